//! Looking at crash images: every moment of a recorded workload, opened, held against the oracle, and crashed again.

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use keyonce::testing::{self, SimDisk};
use keyonce::{Durability, KeyState, Store};

use super::clients::Phase;
use super::oracle::{self, Crash, Expected, Later, Oracle, Seen, key};
use super::workload::{Random, Settings, WALL_STEPS_MS, mixed};

/// The number of a key that no workload names.
pub(crate) const PROBE: usize = 30;

/// How much of what may follow from a crash is looked at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// Images of power losses at each moment.
    pub(crate) limit: u64,
    /// One image in this many is crashed once more after it has answered.
    pub(crate) again_one_in: u64,
    /// The recovery of one image in this many is crashed at one of its steps, and every other time once more.
    pub(crate) deep_one_in: u64,
}

/// What a campaign did.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) workloads: u64,
    pub(crate) phases: u64,
    pub(crate) calls: u64,
    pub(crate) moments: u64,
    /// Moments of which every image was looked at.
    pub(crate) exhausted: u64,
    pub(crate) kills: u64,
    pub(crate) power_losses: u64,
    /// Recoveries that were crashed at one of their steps, and how many of those had followed upon such a crash.
    pub(crate) crashed_recoveries: u64,
    pub(crate) crashed_deeper: u64,
    pub(crate) crashed_again: u64,
    pub(crate) torn: u64,
    pub(crate) copied: u64,
    pub(crate) states: BTreeMap<&'static str, u64>,
    /// How often the clients of the workloads met what is rare.
    pub(crate) met: BTreeMap<&'static str, u64>,
}

impl Tally {
    pub(crate) fn images(&self) -> u64 {
        self.kills + self.power_losses + self.crashed_recoveries + self.crashed_again
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.workloads += other.workloads;
        self.phases += other.phases;
        self.calls += other.calls;
        self.moments += other.moments;
        self.exhausted += other.exhausted;
        self.kills += other.kills;
        self.power_losses += other.power_losses;
        self.crashed_recoveries += other.crashed_recoveries;
        self.crashed_deeper += other.crashed_deeper;
        self.crashed_again += other.crashed_again;
        self.torn += other.torn;
        self.copied += other.copied;
        for (state, count) in other.states {
            *self.states.entry(state).or_default() += count;
        }
        for (what, count) in other.met {
            *self.met.entry(what).or_default() += count;
        }
    }
}

fn open(disk: &SimDisk, settings: &Settings, expected: &Expected, seed: u64) -> Result<Store, String> {
    // The level of the checks: what they are told must survive the next crash.
    let options = settings.options(&expected.clock).durability(Durability::PowerLoss);
    testing::open(disk.clone(), options, seed).map_err(|error| format!("it does not open: {error}"))
}

/// A stretch of a workload and how to look at it.
pub(crate) struct Check<'a> {
    /// What the number of an image is called.
    pub(crate) name: &'static str,
    pub(crate) settings: &'a Settings,
    pub(crate) seed: u64,
    pub(crate) plan: Plan,
    /// The one step and image to look at.
    pub(crate) only: Option<(u64, u64)>,
    pub(crate) tally: Tally,
}

impl Check<'_> {
    /// Looks at every moment of `phase`, the `number`-th one of its workload.
    pub(crate) fn phase(&mut self, number: u64, phase: Phase) -> Result<(), String> {
        let Phase { disk, moments, oracle } = phase;
        self.tally.phases += 1;
        for moment in moments {
            let step = moment.steps();
            if self.only.is_some_and(|(only, _)| only != step) {
                continue;
            }
            self.tally.moments += 1;
            let seed = mixed(&[self.seed, number, step]);
            self.moment(&oracle, &moment, seed).map_err(|(image, why)| {
                let after = step.checked_sub(1).map(|last| disk.describe(last)).unwrap_or_default();
                let (name, seed, limit) = (self.name, self.seed, self.plan.limit);
                format!("{name}={seed}:{number}:{step}:{limit}:{image} (crash after: {after})\n{why}")
            })?;
        }
        Ok(())
    }

    fn moment(&mut self, oracle: &Oracle, moment: &SimDisk, seed: u64) -> Result<(), (u64, String)> {
        let instants = oracle.instants_at(moment.steps());
        if instants.is_empty() {
            return Ok(());
        }
        let kill = (Crash::Kill, moment.kill());
        let crashes = moment.crashes();
        self.tally.exhausted += u64::from(crashes.count().is_some_and(|count| count <= self.plan.limit));
        let losses = crashes.images(self.plan.limit).map(|image| (Crash::PowerLoss, image));
        for (number, (crash, image)) in (0..).zip(std::iter::once(kill).chain(losses)) {
            if self.only.is_some_and(|(_, only)| only != number) {
                continue;
            }
            let mut random = Random(mixed(&[seed, number]));
            let instant = instants[instants.len() - 1 - random.index(instants.len())];
            let wall_step_ms = if self.settings.jumps { random.of(&WALL_STEPS_MS) } else { 0 };
            let later = Later { ms: random.of(&[0, 0, 0, 1, 20_000, 100_000]), wall_step_ms };
            match crash {
                Crash::Kill => self.tally.kills += 1,
                Crash::PowerLoss => self.tally.power_losses += 1,
            }
            let expected = oracle.expected(instant, crash, later);
            // A kill may be followed by a power loss before anything was made durable.
            let expected_later = oracle.expected(instant, Crash::PowerLoss, later).or_since(&expected);
            self.image(&image, &expected, &expected_later, &mut random)
                .map_err(|why| (number, format!("{crash:?}, and until the opening {later:?}: {why}")))?;
        }
        Ok(())
    }

    /// Opens one image and looks at what may follow: a second crash after it has answered, and crashes of its recovery,
    /// one after the other. `expected_later` holds once the power was lost on the way.
    pub(crate) fn image(
        &mut self,
        image: &SimDisk,
        expected: &Expected,
        expected_later: &Expected,
        random: &mut Random,
    ) -> Result<(), String> {
        let mut way: Vec<CrashedRecovery> = Vec::new();
        let (mut image, mut expected) = (image.clone(), expected);
        loop {
            let again = random.one_in(self.plan.again_one_in);
            let deep = random.one_in(if way.is_empty() { self.plan.deep_one_in } else { 2 });
            if deep {
                image.record();
            }
            let began = image.steps();
            let opened = caught(|| self.opening(&image, expected, random, again));
            let opened_at = opened.map_err(|why| way.iter().fold(why, |told, crashed| told + &crashed.to_string()))?;
            if !deep {
                return Ok(());
            }
            let step = began + random.below(opened_at - began + 1);
            let moment = image.at(step);
            let loss = random.below(4);
            self.tally.crashed_recoveries += 1;
            self.tally.crashed_deeper += u64::from(!way.is_empty());
            let crashed = match loss {
                0 => moment.kill(),
                1 => moment.crash_all_old(),
                _ => moment.crash_image(random.next()),
            };
            way.push(CrashedRecovery { disk: image, began, step, loss });
            image = crashed;
            if loss > 0 {
                expected = expected_later;
            }
        }
    }

    /// Opens an image, checks it, perhaps crashes it once more; says how many steps the opening took it to.
    fn opening(
        &mut self,
        image: &SimDisk,
        expected: &Expected,
        random: &mut Random,
        again: bool,
    ) -> Result<u64, String> {
        let store = open(image, self.settings, expected, random.next())?;
        let opened_at = image.steps();
        let (probe, now_ms) = expected.probe(&store, PROBE)?;
        let seen = expected.check(&store, now_ms)?;
        self.tally.torn += u64::from(store.opened().torn > 0);
        self.tally.copied += u64::from(store.opened().copied > 0);
        oracle::count(&seen, &mut self.tally.states);
        if again {
            let (name, after) = match random.below(4) {
                0 => ("everything", image.kill()),
                1 => ("something", image.crash_image(random.next())),
                _ => ("nothing unsynced", image.crash_all_old()),
            };
            self.tally.crashed_again += 1;
            let why = |why| format!("after a second crash that left {name}: {why}");
            let store = open(&after, self.settings, expected, random.next()).map_err(why)?;
            let found = oracle::observe(&store, seen.len()).map_err(why)?;
            same(&seen, &found).map_err(why)?;
            let info = store.peek(&key(PROBE)).map_err(|error| error.to_string())?;
            if !info.as_ref().is_some_and(|info| info.state == KeyState::Interrupted && info.token == probe.token()) {
                return Err(why(format!(
                    "the key of token {}, given away after the first, is {info:?}",
                    probe.token()
                )));
            }
        }
        Ok(opened_at)
    }
}

/// A recovery that was crashed, for messages.
struct CrashedRecovery {
    /// Recorded from step `began` on.
    disk: SimDisk,
    began: u64,
    /// The step before which it was crashed.
    step: u64,
    loss: u64,
}

impl fmt::Display for CrashedRecovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\n  after a crash at step {} of a recovery ({}):", self.step, self.loss)?;
        (self.began..self.step).try_for_each(|step| write!(f, "\n    {step}: {}", self.disk.describe(step)))
    }
}

/// Two openings must say the same.
fn same(first: &[Seen], second: &[Seen]) -> Result<(), String> {
    match first.iter().zip(second).enumerate().find(|(_, (first, second))| first != second) {
        Some((key, (first, second))) => Err(format!("key {key} was {first:#?} and is {second:#?}")),
        None => Ok(()),
    }
}

/// A panic is a failure like any other: it must be told with the number of its image.
pub(crate) fn caught<T>(check: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(check)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("it panicked: {}", text.unwrap_or_default()))
    })
}

/// Does what `next` gives, on all processors, until it gives no more or something fails. `next` is told what was done
/// so far.
pub(crate) fn in_threads<W>(next: impl Fn(&Tally) -> Option<W> + Sync) -> (Tally, Result<(), String>)
where
    W: FnOnce() -> (Tally, Result<(), String>),
{
    let done = Mutex::new((Tally::default(), Ok(())));
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get().min(4));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let work = {
                        let done = done.lock().unwrap();
                        if done.1.is_err() { None } else { next(&done.0) }
                    };
                    let Some(work) = work else { return };
                    let (tally, result) = work();
                    let mut done = done.lock().unwrap();
                    done.0.add(tally);
                    if done.1.is_ok() {
                        done.1 = result;
                    }
                }
            });
        }
    });
    done.into_inner().unwrap()
}

/// Does `work` for every number below `count`, on all processors; panics with the first failure.
pub(crate) fn in_parallel(count: u64, work: impl Fn(u64) -> (Tally, Result<(), String>) + Sync) -> Tally {
    let numbers = AtomicU64::new(0);
    let (total, result) = in_threads(|_| {
        let number = numbers.fetch_add(1, Ordering::Relaxed);
        let work = &work;
        (number < count).then_some(move || work(number))
    });
    result.unwrap_or_else(|why| panic!("{why}"));
    total
}

/// The number in an environment variable, if it is set.
pub(crate) fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text:?} is not a number")))
}
