//! Failing disks: after the k-th write or sync has failed, for each k, nobody is told anything that is not on the disk.
//!
//! Each step of a workload fails in a run of its own, and so does each call that changes nothing (locking, opening,
//! mapping, reading and so on), with one of the errors that systems know, once or from then on. A failing write leaves half
//! of its bytes, a failing change of length half of the file.
//!
//! `KEYONCE_FAULT_SEEDS=n` runs the workloads of `n` seeds, each once for every step that can fail; errors go around, so
//! that of six seeds in a row each moment is struck by every error.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use keyonce::testing::{self, EDQUOT, EINTR, EIO, EMFILE, ENOMEM, ENOSPC, Look, ManualClock, SimDisk, Step};
use keyonce::{Body, Completion, Error, ErrorKind, KeyState, NotStored, Reserve};

use super::clients::{Clients, Fault};
use super::examine::{Check, Plan, Tally, caught, in_parallel, number};
use super::oracle::{Crash, fingerprint, key};
use super::place::tell;
use super::workload::{Op, Random, Settings, mixed, plainly};

/// The first position of a record in a segment; headers lie before it.
const RECORDS_START: u64 = 8192;

/// A key that no workload names.
const NEWCOMER: usize = 29;

/// What a failing step is to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Struck {
    /// A record was being written or synced: nothing after it can be promised.
    Record,
    /// A segment was being prepared, or the store being created: nobody was promised anything.
    Preparation,
    /// Nothing that anybody needs: pages that were to be readied for a writer.
    Comfort,
}

/// What the system says when a call fails.
const ERRORS: [i32; 6] = [EIO, ENOSPC, EDQUOT, EMFILE, ENOMEM, EINTR];

/// How the disk fails.
#[derive(Clone, Copy, Debug)]
struct Failure {
    fault: Fault,
    from_then_on: bool,
    raw_os_error: i32,
}

/// What the same run does when nothing fails.
struct Healthy {
    /// The numbers of the first step and of the first call that changes nothing.
    first: (u64, u64),
    /// In words.
    steps: Vec<String>,
    looks: Vec<Look>,
}

impl Healthy {
    /// All that `disk` did since there had been so many steps and calls, from where on it is recorded.
    fn since(disk: &SimDisk, first: (u64, u64)) -> Self {
        let steps = (first.0..disk.steps()).map(|step| disk.describe(step)).collect();
        let looks = (first.1..disk.reads()).map(|read| disk.look(read)).collect();
        Self { first, steps, looks }
    }

    fn steps(&self) -> impl Iterator<Item = Fault> {
        (self.first.0..).take(self.steps.len()).map(Fault::Step)
    }

    fn looks(&self) -> impl Iterator<Item = Fault> {
        (self.first.1..).take(self.looks.len()).map(Fault::Read)
    }

    /// What fails, in words.
    fn describe(&self, fault: Fault) -> String {
        match fault {
            Fault::Step(step) => self.steps[usize::try_from(step - self.first.0).unwrap()].clone(),
            Fault::Read(read) => format!("{:?}", self.look(read)),
        }
    }

    fn look(&self, read: u64) -> Look {
        self.looks[usize::try_from(read - self.first.1).unwrap()]
    }

    fn struck(&self, fault: Fault) -> Struck {
        let what = self.describe(fault);
        let step = match fault {
            Fault::Step(step) => step,
            Fault::Read(read) if self.look(read) == Look::Populate => return Struck::Comfort,
            Fault::Read(_) => return Struck::Preparation,
        };
        let offset =
            what.strip_prefix("write ").and_then(|rest| rest.split(" at ").nth(1)?.split(' ').next()?.parse().ok());
        match offset {
            Some(offset) if what.contains("segment-") && RECORDS_START <= offset => return Struck::Record,
            _ => {}
        }
        // Each copy of a header is synced by itself; every other sync of a segment is of records.
        let before = if step == self.first.0 { String::new() } else { self.describe(Fault::Step(step - 1)) };
        let header = before.contains("write 256 bytes at 0 of")
            || before.contains("write 256 bytes at 4096 of")
            || before.starts_with("resize");
        if what.starts_with("sync segment-") && !header { Struck::Record } else { Struck::Preparation }
    }
}

/// The sort of a step or call, for counting.
fn sort(what: &str) -> String {
    if what == "sync the directory" { what.to_owned() } else { what.split(' ').next().unwrap_or_default().to_owned() }
}

fn ops(seed: u64, count: u64) -> (Settings, Vec<Op>) {
    let mut random = Random(mixed(&[seed, 77]));
    let settings = Settings { keys: 4, ..Settings::by_chance(&mut random) };
    let mut ops = Vec::new();
    while (ops.len() as u64) < count {
        let op = Op::by_chance(&mut random, &settings);
        if !matches!(op, Op::Kill | Op::LosePower { .. }) {
            ops.push(op);
        }
    }
    (settings, ops)
}

fn clients_with(seed: u64, failure: Option<Failure>) -> (Settings, Clients) {
    let (settings, ops) = ops(seed, 60);
    let mut clients = Clients::new(plainly, settings, seed);
    if let Some(Failure { fault, from_then_on, raw_os_error }) = failure {
        clients.fail(fault, from_then_on, raw_os_error);
    }
    for op in ops {
        let op = clients.usable(op);
        clients.run(op);
    }
    (settings, clients)
}

/// Runs a workload once for each of its steps or calls, which fails, and says which sorts were struck by which error.
fn fail_each(
    name: &str,
    seeds: u64,
    from_then_on: bool,
    faults: impl Fn(&Healthy) -> Vec<Fault>,
) -> BTreeSet<(String, i32)> {
    let mut all = Tally::default();
    let (mut runs, met) = (0, Mutex::new(BTreeSet::new()));
    for seed in 1..=number("KEYONCE_FAULT_SEEDS").unwrap_or(seeds) {
        let (_, clients) = clients_with(seed, None);
        let healthy = Healthy::since(&clients.disk, (0, 0));
        drop(clients);
        let faults = faults(&healthy);
        all.add(in_parallel(faults.len() as u64, |at| {
            let mut tally = Tally::default();
            let raw_os_error = ERRORS[usize::try_from((at + seed) % ERRORS.len() as u64).unwrap()];
            let failure = Failure { fault: faults[usize::try_from(at).unwrap()], from_then_on, raw_os_error };
            let result = caught(|| fail_one(seed, &healthy, failure, &mut tally));
            met.lock().unwrap().insert((sort(&healthy.describe(failure.fault)), raw_os_error));
            (tally, result.map_err(|why| format!("seed {seed}, {failure:?}: {why}")))
        }));
        runs += faults.len();
    }
    tell(&format!("{name}: {runs} runs, each with another failing call; images: {}: {all:?}", all.images()));
    met.into_inner().unwrap()
}

fn assert_all_met(met: &BTreeSet<(String, i32)>, sorts: &[&str]) {
    for sort in sorts {
        for error in ERRORS {
            assert!(met.contains(&((*sort).to_owned(), error)), "no {sort} was struck by error {error}");
        }
    }
}

#[test]
fn after_the_kth_step_has_failed_nothing_is_told_that_a_crash_takes_back() {
    let met = fail_each("faults", 6, false, |healthy| healthy.steps().collect());
    assert_all_met(&met, &["create", "resize", "write", "sync", "rename", "sync the directory"]);
}

#[test]
fn after_the_disk_has_failed_for_good_nothing_is_told_that_a_crash_takes_back_and_once_mended_it_opens() {
    fail_each("faults for good", 1, true, |healthy| healthy.steps().collect());
    fail_each("looks that fail for good", 1, true, |healthy| healthy.looks().collect());
}

#[test]
fn after_the_kth_look_at_the_disk_has_failed_the_next_one_finds_everything() {
    let met = fail_each("failing looks", 6, false, |healthy| healthy.looks().collect());
    assert_all_met(&met, &["Open", "Map", "ReadSegment", "Populate"]);
    assert!(["Lock", "List", "ReadFile"].iter().all(|sort| met.iter().any(|(met, _)| met == sort)));
}

/// A store with a finished key, one in flight and some segments, left by a kill.
fn left_by_a_kill(settings: &Settings, clock: &ManualClock) -> SimDisk {
    let disk = SimDisk::new();
    let store = testing::open(disk.clone(), settings.options(clock), 1).unwrap();
    for at in 0..8 {
        let Ok(Reserve::Fresh(reservation)) = store.reserve(&key(at), fingerprint(at, 0)) else { panic!("a new key") };
        assert_eq!(reservation.complete(&[7; 60_000]).unwrap(), Completion::Done);
    }
    let Ok(Reserve::Fresh(held)) = store.reserve(&key(9), fingerprint(9, 0)) else { panic!("a new key") };
    std::mem::forget(held);
    disk.kill()
}

/// What must be there however often opening failed before.
fn finds_everything(disk: &SimDisk, settings: &Settings, clock: &ManualClock) -> Result<(), String> {
    let store = testing::open(disk.clone(), settings.options(clock), 77).map_err(|error| format!("{error:?}"))?;
    for at in 0..8 {
        let answer = store.reserve(&key(at), fingerprint(at, 0));
        let Ok(Reserve::Replay(replay)) = &answer else { return Err(format!("key {at}: {answer:?}")) };
        assert_eq!(replay.body(), Body::Kept(&[7; 60_000]));
    }
    match store.reserve(&key(9), fingerprint(9, 0)) {
        Ok(Reserve::Interrupted(_)) => Ok(()),
        answer => Err(format!("the key that was held: {answer:?}")),
    }
}

/// Whether this call may have been about a hint, which nobody misses: the segment is read instead.
fn may_be_of_a_hint(what: &str) -> bool {
    what.contains("hint-") || ["ReadFile", "ReadSegment"].contains(&what)
}

/// Opens and closes once for each call to the disk and each error, with that call failing, and then as it should be.
fn fails_and_heals(
    start: impl Fn() -> SimDisk,
    settings: &Settings,
    clock: &ManualClock,
    look: impl Fn(&SimDisk) -> Result<(), String>,
) -> BTreeSet<(String, i32)> {
    let mut met = BTreeSet::new();
    let run = |fault: Option<(Fault, i32)>| {
        let disk = start();
        disk.record();
        let (steps, reads) = (disk.steps(), disk.reads());
        match fault {
            Some((Fault::Step(step), error)) => disk.fail_at(step, error),
            Some((Fault::Read(read), error)) => disk.fail_read_at(read, error),
            None => {}
        }
        let opened = testing::open(disk.clone(), settings.options(clock), 2);
        let ended = opened.and_then(|store| store.close(Duration::ZERO));
        (disk, ended, steps, reads)
    };
    let (disk, ended, steps, reads) = run(None);
    ended.unwrap();
    let healthy = Healthy::since(&disk, (steps, reads));
    for (fault, error) in healthy.steps().chain(healthy.looks()).flat_map(|fault| ERRORS.map(|error| (fault, error))) {
        let (disk, ended, ..) = run(Some((fault, error)));
        let (what, struck) = (healthy.describe(fault), healthy.struck(fault));
        match ended {
            Ok(_) => {
                assert!(struck == Struck::Comfort || may_be_of_a_hint(&what), "{what} failed, and nobody was told")
            }
            Err(told) => assert!(is_rightly_told(&told, struck, error), "{what}: {told:?}"),
        }
        for disk in std::iter::once(disk.kill()).chain(disk.images(4)) {
            if let Err(why) = caught(|| look(&disk)) {
                panic!("{what} failed with error {error}, and then: {why}");
            }
        }
        met.insert((sort(&what), error));
    }
    met
}

#[test]
fn whichever_call_fails_while_a_store_is_made_opened_or_closed_the_next_opening_finds_everything() {
    let (clock, settings) = (ManualClock::default(), Settings::plain());
    let opens = |disk: &SimDisk| {
        testing::open(disk.clone(), settings.options(&clock), 3).map(drop).map_err(|error| format!("{error:?}"))
    };
    let made = fails_and_heals(SimDisk::new, &settings, &clock, opens);
    // A creation that a crash cut short, once there was a file.
    let half_made = SimDisk::new();
    half_made.record();
    drop(testing::open(half_made.clone(), settings.options(&clock), 1).unwrap());
    let half_made = half_made.at(2);
    let made_anew = fails_and_heals(|| half_made.kill(), &settings, &clock, opens);
    let left = left_by_a_kill(&settings, &clock);
    let opened = fails_and_heals(|| left.kill(), &settings, &clock, |disk| finds_everything(disk, &settings, &clock));
    let all: BTreeSet<_> = made.into_iter().chain(made_anew).chain(opened).collect();
    let steps = ["create", "resize", "write", "sync", "rename", "remove", "sync the directory"];
    assert_all_met(&all, &steps);
    assert_all_met(&all, &["Lock", "List", "ReadFile", "Open", "Map", "ReadSegment", "Populate"]);
    tell(&format!("each call of making, opening and closing a store: {} sorts with an error each", all.len()));
}

/// Whether a call that failed was told the right kind of error, with the system's own word beneath it.
fn is_rightly_told(error: &Error, struck: Struck, raw_os_error: i32) -> bool {
    let is_full = [ENOSPC, EDQUOT].contains(&raw_os_error);
    let kind = match error.kind() {
        ErrorKind::Poisoned => struck == Struck::Record,
        ErrorKind::Full { retry_after } => is_full && retry_after > Duration::ZERO && error.is_transient(),
        ErrorKind::Io => !is_full,
        _ => false,
    };
    let mut beneath: Option<&dyn std::error::Error> = Some(error);
    let mut named = false;
    while let Some(cause) = beneath {
        named |= cause.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error) == Some(raw_os_error);
        beneath = cause.source();
    }
    kind && named
}

fn fail_one(seed: u64, healthy: &Healthy, failure: Failure, tally: &mut Tally) -> Result<(), String> {
    let Failure { fault, from_then_on, raw_os_error } = failure;
    let (settings, mut clients) = clients_with(seed, Some(failure));
    if !clients.is_struck() {
        return Err("the workload did not come as far".to_owned());
    }
    let (what, struck) = (healthy.describe(fault), healthy.struck(fault));

    // A store that was open when a record failed is poisoned, and says so; any other goes on.
    let poisoned = matches!(fault, Fault::Step(step) if struck == Struck::Record && clients.opened_at() <= step);
    for failed in &clients.failed {
        if !from_then_on && !is_rightly_told(&failed.error, struck, raw_os_error) {
            return Err(format!("{what} ({struck:?}), and a call was told {:?}", failed.error));
        }
        if let (true, false, Fault::Step(step)) = (poisoned, from_then_on, fault)
            && failed.call >= clients.oracle.call_of(step).unwrap()
            && failed.error.kind() != ErrorKind::Poisoned
        {
            return Err(format!("{what}, and call {} was told {:?}", failed.call, failed.error));
        }
    }
    if from_then_on {
        // Once the disk is mended, a store that is not poisoned goes on, and one that could not be opened opens.
        clients.heal();
    }
    match (poisoned, clients.ask_anew(NEWCOMER)) {
        (true, Some(Err(ErrorKind::Poisoned))) | (false, Some(Ok(()))) | (_, None) => {}
        // A later step may have been of a record, and the store may have been opened anew since.
        (_, Some(Err(ErrorKind::Poisoned) | Ok(()))) if from_then_on => {}
        (_, answer) => return Err(format!("{what} ({struck:?}), and a new key was answered {answer:?}")),
    }

    // What the processes and disks after this one find: the page cache as it is, and what a power loss leaves.
    let instant = clients.oracle.now(clients.hands());
    let plan = match from_then_on {
        false => Plan { limit: 3, again_one_in: 1, deep_one_in: 5 },
        true => Plan { limit: 2, again_one_in: 3, deep_one_in: 9 },
    };
    let mut check = Check { name: "image", settings: &settings, seed, plan, only: None, tally: Tally::default() };
    let (Fault::Step(at) | Fault::Read(at)) = fault;
    let mut random = Random(mixed(&[seed, at]));
    let kept = clients.oracle.expected(instant, Crash::Kill, 0);
    let expected = clients.oracle.expected(instant, Crash::PowerLoss, 0);
    let result = check.image(&clients.disk.kill(), &kept, &expected, &mut random).and_then(|()| {
        clients.disk.images(plan.limit).try_for_each(|image| check.image(&image, &expected, &expected, &mut random))
    });
    check.tally.kills += 1;
    check.tally.power_losses += plan.limit;
    tally.add(check.tally);
    result.map_err(|why| format!("{what} ({struck:?}): {why}"))
}

#[test]
fn a_completion_whose_write_or_sync_fails_is_told_and_the_key_is_never_free() {
    for sync in [false, true] {
        let (disk, clock, settings) = (SimDisk::new(), ManualClock::default(), Settings::plain());
        let store = testing::open(disk.clone(), settings.options(&clock), 1).unwrap();
        let Ok(Reserve::Fresh(reservation)) = store.reserve(&key(1), fingerprint(1, 0)) else { panic!("a new key") };
        let token = reservation.token();
        disk.fail_at(disk.steps() + u64::from(sync), EIO);
        let NotStored { error, reservation } = reservation.complete(b"paid").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Poisoned);
        let again = store.reserve(&key(1), fingerprint(1, 0));
        assert!(!matches!(again, Ok(Reserve::Fresh(_) | Reserve::Replay(_))), "{again:?}");
        drop(reservation);
        let again = store.reserve(&key(1), fingerprint(1, 0));
        assert!(!matches!(again, Ok(Reserve::Fresh(_) | Reserve::Replay(_))), "{again:?}");
        assert_eq!(store.close(Duration::ZERO).unwrap_err().kind(), ErrorKind::Poisoned);

        // The next process, and after it a power loss: what the one has said, the other must say, too.
        let store = testing::open(disk.clone(), settings.options(&clock), 2).unwrap();
        let said = store.peek(&key(1)).unwrap().unwrap();
        assert!(said.token == token && said.state != KeyState::InFlight, "{said:?}");
        assert!(sync || said.state == KeyState::Interrupted, "half a record was taken for a whole one: {said:?}");
        for image in disk.images(20) {
            let store = testing::open(image, settings.options(&clock), 3).unwrap();
            let found = store.peek(&key(1)).unwrap().unwrap();
            assert_eq!((found.state, found.token), (said.state, token));
        }
    }
}

/// Many threads reserve keys of their own, and the first sync that they share goes as `first_sync` says.
fn shared_sync(
    first_sync: impl Fn(&SimDisk) + Send + Sync + 'static,
) -> Vec<std::thread::Result<Result<(), ErrorKind>>> {
    const THREADS: usize = 8;
    let (disk, clock, settings) = (SimDisk::new(), ManualClock::default(), Settings::plain());
    let store = testing::open(disk.clone(), settings.options(&clock), 1).unwrap();
    // The first sync waits until every thread has written, so that all of them wait for it or the next.
    let (written, syncs) = (Arc::new(AtomicU64::new(0)), AtomicU64::new(0));
    let watched = disk.clone();
    disk.on_step(move |step| match step {
        Step::Write => {
            written.fetch_add(1, Ordering::SeqCst);
        }
        Step::Sync if syncs.fetch_add(1, Ordering::SeqCst) == 0 => {
            while written.load(Ordering::SeqCst) < THREADS as u64 {
                std::thread::yield_now();
            }
            first_sync(&watched);
        }
        _ => {}
    });
    let barrier = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        let (store, barrier) = (&store, &barrier);
        let reserve = |number: usize| {
            move || {
                barrier.wait();
                let answer = store.reserve(&key(number), fingerprint(number, 0));
                answer.map(|_| ()).map_err(|error| error.kind())
            }
        };
        let threads: Vec<_> = (0..THREADS).map(|number| scope.spawn(reserve(number))).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    })
}

#[test]
fn when_a_shared_sync_fails_every_waiter_is_told() {
    let answers = shared_sync(|disk| disk.fail_at(disk.steps(), EIO));
    for answer in answers {
        assert_eq!(answer.unwrap(), Err(ErrorKind::Poisoned));
    }
}

#[test]
fn when_the_thread_that_syncs_for_others_panics_every_waiter_is_told() {
    let answers = shared_sync(|_| panic!("planted, in the sync of eight threads"));
    let (panicked, told): (Vec<_>, Vec<_>) = answers.into_iter().partition(std::thread::Result::is_err);
    assert_eq!(panicked.len(), 1, "one thread syncs");
    for answer in told {
        assert_eq!(answer.unwrap(), Err(ErrorKind::Poisoned));
    }
}

#[test]
fn a_release_that_fails_leaves_the_key_taken() {
    let (disk, clock, settings) = (SimDisk::new(), ManualClock::default(), Settings::plain());
    let store = testing::open(disk.clone(), settings.options(&clock), 1).unwrap();
    let Ok(Reserve::Fresh(reservation)) = store.reserve(&key(1), fingerprint(1, 0)) else { panic!("a new key") };
    disk.fail_at(disk.steps(), EIO);
    let released = reservation.release();
    assert!(!matches!(released, Ok(Completion::Done | Completion::Superseded)), "{released:?}");
    drop(store);
    let store = testing::open(disk, settings.options(&clock), 2).unwrap();
    assert!(matches!(store.reserve(&key(1), fingerprint(1, 0)), Ok(Reserve::Interrupted(_))));
}
