//! A store on a disk, the threads that use it, and the ends of their process.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk, Step, Tear};
use keyonce::{Durability, Options, Retention, Store};

use super::record::{Log, Stamps};
use super::worker::{Manner, Shared, Worker};
use crate::linear::spec::{Answer, Call, End, LEAP_MS, RETENTION_MS};
use crate::linear::{NEVER, Op};
use crate::place::Setting;
use crate::workload::{Random, mixed};

/// Leases that no history outlives.
const LONG_LEASES_MS: &[u64] = &[600_000, 900_000];
/// Leases that lapse when time passes.
const SHORT_LEASES_MS: &[u64] = &[2_000, 10_000, 60_000];

/// How many processes follow each other on one disk, and how much each thread of one calls at most.
const ROUNDS: u64 = 4;
const CALLS_MAX: u64 = 60;

/// Between two moves of the clock, in real time.
const TICK: Duration = Duration::from_micros(200);

/// How long a sync is held up that the power loss then hits.
const HOLD_UP: Duration = Duration::from_millis(2);

/// Whether leases lapse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Time {
    StandsStill,
    Passes,
}

/// Where the store is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Simulated,
    Directory,
}

/// A history that is to be recorded.
pub(crate) struct Rig {
    setting: Setting,
    time: Time,
    random: Random,
    manner: Manner,
    clock: ManualClock,
    /// What passed in each boot of the machine, as far as the history knows.
    boots_ms: Vec<u64>,
    /// Some of its processes end by a power loss, so all calls are at that level.
    loses_power: bool,
    stamps: Arc<Stamps>,
    seed: u64,
    root: tempfile::TempDir,
    /// `None`: the store is in a directory.
    disk: Option<SimDisk>,
    history: Vec<Op>,
}

/// The options of every store under a history.
pub(crate) fn options(setting: Setting, leases_ms: &[u64]) -> Options {
    Options::new()
        .durability(setting.durability)
        .append_mode(setting.append_mode)
        .retention(Retention::new(Duration::from_millis(RETENTION_MS), 0.001))
        .lease(Duration::from_millis(leases_ms[0]))
        .response_bytes_max(1500)
        .lock_wait(Duration::from_secs(10))
        .clock_jump_max(Duration::from_secs(90 * 365 * 24 * 60 * 60))
}

/// What a thread does when time stands still.
pub(crate) fn timeless(keys: u64) -> Manner {
    Manner {
        keys,
        lease_ms: LONG_LEASES_MS,
        wait: Duration::from_millis(1),
        levels: false,
        tasks: true,
        goes_away: true,
    }
}

/// The world at a step of the disk, and between which stamps that was.
struct Image {
    disk: SimDisk,
    from: u64,
    to: u64,
}

/// Whose turn it is to change the world: the clock's, or that of whoever takes its image.
#[derive(Default)]
struct World {
    image: Option<Image>,
}

impl Rig {
    pub(crate) fn new(seed: u64, setting: Setting, time: Time, stage: Stage) -> Self {
        let level = u64::from(setting.durability == Durability::PowerLoss);
        let mut random = Random(mixed(&[seed, time as u64, stage as u64, level]));
        let keys = 2 + random.below(3);
        let lease_ms = if time == Time::Passes { SHORT_LEASES_MS } else { LONG_LEASES_MS };
        let wait = if time == Time::Passes { Duration::from_secs(20) } else { Duration::from_millis(1) };
        let may_lose_power = stage == Stage::Simulated && setting.durability == Durability::PowerLoss;
        let loses_power = may_lose_power && seed.is_multiple_of(2);
        let levels = !loses_power && random.one_in(2);
        let tear = random.of(&[Tear::Page, Tear::Sector]);
        Self {
            setting,
            time,
            manner: Manner { keys, lease_ms, wait, levels, tasks: true, goes_away: !loses_power },
            random,
            clock: ManualClock::default(),
            boots_ms: vec![0],
            loses_power,
            stamps: Arc::new(Stamps::after(0)),
            seed,
            root: tempfile::tempdir().unwrap(),
            disk: (stage == Stage::Simulated).then(|| SimDisk::new().tearing(tear)),
            history: Vec::new(),
        }
    }

    /// Lets several processes follow each other, and gives what all their threads were told.
    pub(crate) fn record(mut self) -> Vec<Op> {
        for round in 0..ROUNDS {
            let end = match &self.disk {
                None => End::Close,
                Some(_) if self.loses_power => self.random.of(&[End::PowerLoss, End::PowerLoss, End::Kill, End::Close]),
                Some(_) => self.random.of(&[End::Kill, End::Kill, End::Close]),
            };
            self.round(round, end);
        }
        let store = self.open(ROUNDS);
        let (shared, stamps) = (Shared::default(), Arc::clone(&self.stamps));
        let mut worker = Worker::new(store, Log::new(&stamps, false), self.random.clone(), self.manner, &shared);
        worker.look_at_all();
        self.history.append(&mut worker.log.ops);
        self.history.sort_unstable_by_key(|op| op.invoked);
        self.history
    }

    fn open(&self, round: u64) -> Store {
        let mut options = options(self.setting, self.manner.lease_ms);
        if self.time == Time::Passes {
            options = options.clock(Arc::new(self.clock.clone()));
        }
        match &self.disk {
            Some(disk) => testing::open(disk.clone(), options, mixed(&[self.seed, round])).unwrap(),
            None => Store::open(self.directory(), options).unwrap(),
        }
    }

    fn directory(&self) -> &Path {
        self.root.path()
    }

    /// One process: its threads, and its end.
    fn round(&mut self, round: u64, end: End) {
        let store = self.open(round);
        let world = Arc::new(Mutex::new(World::default()));
        let over = Arc::new(AtomicBool::new(false));
        if let (Some(disk), End::Kill | End::PowerLoss) = (&self.disk, end) {
            let at_step = disk.steps() + 1 + self.random.below(300);
            let (world, over, stamps) = (Arc::clone(&world), Arc::clone(&over), Arc::clone(&self.stamps));
            let (seed, source) = (self.random.next(), disk.clone());
            let only_at_syncs = end == End::PowerLoss && self.random.one_in(2);
            disk.on_step(move |step| {
                if source.steps() >= at_step
                    && (!only_at_syncs || step == Step::Sync)
                    && let Ok(mut world) = world.try_lock()
                    && world.image.is_none()
                {
                    if only_at_syncs {
                        // Who should wait for this sync, and does not, is told something before it.
                        std::thread::sleep(HOLD_UP);
                    }
                    world.image = Some(image(&source, end, seed, &stamps));
                    over.store(true, Ordering::SeqCst);
                }
            });
        }
        let shared = Shared::default();
        let threads = 2 + self.random.below(7);
        let stamps = Arc::clone(&self.stamps);
        let mut workers: Vec<_> = (0..threads)
            .map(|_| {
                let random = Random(self.random.next());
                Worker::new(store.clone(), Log::new(&stamps, false), random, self.manner, &shared)
            })
            .collect();
        workers[0].look_at_all();
        self.run(&mut workers, &world, &over, &stamps);
        if let Some(disk) = &self.disk {
            disk.on_step(|_| ());
        }
        let mut ops: Vec<_> = workers.iter_mut().flat_map(|worker| worker.log.ops.drain(..)).collect();
        let taken = world.lock().unwrap().image.take();
        let ended = match (taken, &self.disk, end) {
            (Some(image), ..) => Some(image),
            (None, Some(disk), End::Kill | End::PowerLoss) => Some(image(disk, end, self.seed, &stamps)),
            (None, ..) => {
                store.close(Duration::ZERO).unwrap();
                None
            }
        };
        // What the guards do when they fall is not part of this world any more.
        drop(workers);
        drop(store);
        let at = ended.as_ref().map_or_else(|| stamps.next(), |image| image.to);
        if let Some(image) = ended {
            ops.retain(|op| op.invoked < image.to);
            for op in &mut ops {
                op.answered = op.answered.map(|(at, answer)| (if at < image.from { at } else { NEVER }, answer));
            }
            self.disk = Some(image.disk);
        }
        if end == End::PowerLoss {
            self.boots_ms.push(0);
        }
        self.clock = clock_after(&self.boots_ms);
        ops.push(Op { id: at, key: None, call: Call::End(end), invoked: at, answered: Some((at, Answer::Over)) });
        self.history.append(&mut ops);
    }

    /// Lets the threads work at the same time, and time pass, until all are done or the world has ended.
    fn run(&mut self, workers: &mut [Worker<'_>], world: &Mutex<World>, over: &AtomicBool, stamps: &Stamps) {
        let barrier = Barrier::new(workers.len());
        let at_work = AtomicBool::new(true);
        let mut log = Log::new(stamps, false);
        let (clock, random, passes) = (&self.clock, &mut self.random, self.time == Time::Passes);
        let passed_ms = self.boots_ms.last_mut().unwrap();
        std::thread::scope(|scope| {
            let ticker = scope.spawn(|| {
                while passes && at_work.load(Ordering::SeqCst) {
                    let world = world.lock().unwrap();
                    if world.image.is_none() {
                        // Whole seconds, so that the clock often shows the very end of a lease.
                        let ms = if random.one_in(40) { LEAP_MS } else { 1_000 * (1 + random.below(5)) };
                        tick(clock, ms, &mut log);
                        *passed_ms += ms;
                    } else {
                        // This is not part of the history any more, but threads may still wait for it.
                        clock.advance(Duration::from_secs(100));
                    }
                    drop(world);
                    std::thread::sleep(TICK);
                }
            });
            let handles: Vec<_> = workers
                .iter_mut()
                .map(|worker| {
                    scope.spawn(|| {
                        barrier.wait();
                        for _ in 0..CALLS_MAX {
                            if over.load(Ordering::SeqCst) {
                                break;
                            }
                            worker.act();
                        }
                    })
                })
                .collect();
            let ends: Vec<_> = handles.into_iter().map(|handle| handle.join()).collect();
            at_work.store(false, Ordering::SeqCst);
            ticker.join().unwrap();
            for end in ends {
                end.unwrap();
            }
        });
        self.history.append(&mut log.ops);
    }
}

/// A clock that went through these boots and shows what it showed then; whatever becomes of the one that did.
fn clock_after(boots_ms: &[u64]) -> ManualClock {
    let clock = ManualClock::default();
    for (boot, ms) in boots_ms.iter().enumerate() {
        if boot > 0 {
            clock.reboot();
        }
        clock.advance(Duration::from_millis(*ms));
    }
    clock
}

fn tick(clock: &ManualClock, ms: u64, log: &mut Log<'_>) {
    log.invoke(None, |_| Call::Advance { ms });
    clock.advance(Duration::from_millis(ms));
    log.answer(Answer::Over);
}

fn image(disk: &SimDisk, end: End, seed: u64, stamps: &Stamps) -> Image {
    let from = stamps.next();
    let disk = match end {
        End::PowerLoss => disk.crash_image(seed),
        End::Kill | End::Close => disk.kill(),
    };
    Image { disk, from, to: stamps.next() }
}
