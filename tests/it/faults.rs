//! Failing disks: after the k-th write or sync has failed, for each k, nobody is told anything that is not on the disk.
//!
//! `KEYONCE_FAULT_SEEDS=n` runs the workloads of `n` seeds, each once for every step that can fail.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use keyonce::testing::{self, EIO, ENOSPC, ManualClock, SimDisk, Step};
use keyonce::{Completion, ErrorKind, KeyState, NotStored, Reserve};

use super::clients::Clients;
use super::examine::{Check, Plan, Tally, caught, in_parallel, number};
use super::oracle::{Crash, fingerprint, key};
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
}

fn struck(disk: &SimDisk, step: u64) -> Struck {
    let what = disk.describe(step);
    let offset =
        what.strip_prefix("write ").and_then(|rest| rest.split(" at ").nth(1)?.split(' ').next()?.parse().ok());
    match offset {
        Some(offset) if what.contains("segment-") && RECORDS_START <= offset => return Struck::Record,
        _ => {}
    }
    // Each copy of a header is synced by itself; every other sync of a segment is of records.
    let before = step.checked_sub(1).map(|before| disk.describe(before)).unwrap_or_default();
    let header = before.contains("write 256 bytes at 0 of")
        || before.contains("write 256 bytes at 4096 of")
        || before.starts_with("resize");
    if what.starts_with("fail to sync segment-") && !header { Struck::Record } else { Struck::Preparation }
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

fn clients_with_fault(seed: u64, fault: Option<(u64, i32)>) -> (Settings, Clients) {
    let (settings, ops) = ops(seed, 60);
    let mut clients = Clients::new(plainly, settings, seed);
    if let Some((step, raw_os_error)) = fault {
        clients.fail_at(step, raw_os_error);
    }
    for op in ops {
        let op = clients.usable(op);
        clients.run(op);
    }
    (settings, clients)
}

#[test]
fn after_the_kth_step_has_failed_nothing_is_told_that_a_crash_takes_back() {
    let mut all = Tally::default();
    let mut runs = 0;
    for seed in 1..=number("KEYONCE_FAULT_SEEDS").unwrap_or(8) {
        let steps = clients_with_fault(seed, None).1.disk.steps();
        all.add(in_parallel(steps, |step| {
            let mut tally = Tally::default();
            let result = caught(|| fail_one(seed, step, &mut tally));
            (tally, result.map_err(|why| format!("seed {seed}, step {step} fails: {why}")))
        }));
        runs += steps;
    }
    println!("faults: {runs} runs, each with another failing step; images: {}: {all:?}", all.images());
}

fn fail_one(seed: u64, step: u64, tally: &mut Tally) -> Result<(), String> {
    let error = if step.is_multiple_of(3) { ENOSPC } else { EIO };
    let (settings, mut clients) = clients_with_fault(seed, Some((step, error)));
    if !clients.is_struck() {
        return Err("the workload did not come as far".to_owned());
    }
    let what = clients.disk.describe(step);
    let struck = struck(&clients.disk, step);
    let call = clients.oracle.call_of(step).unwrap();

    // A store that was open when a record failed is poisoned, and says so; any other goes on.
    let poisoned = struck == Struck::Record && clients.opened_at() <= step;
    if poisoned {
        for failed in clients.failed.iter().filter(|failed| failed.call >= call) {
            if failed.error.kind() != ErrorKind::Poisoned {
                return Err(format!("{what}, and call {} was told {:?}", failed.call, failed.error));
            }
        }
    }
    match (poisoned, clients.ask_anew(NEWCOMER)) {
        (true, Some(Err(ErrorKind::Poisoned))) | (false, Some(Ok(()))) | (_, None) => {}
        (_, answer) => return Err(format!("{what} ({struck:?}), and a new key was answered {answer:?}")),
    }

    // What the processes and disks after this one find: the page cache as it is, and what a power loss leaves.
    let instant = clients.oracle.now(clients.hands());
    let plan = Plan { limit: 3, again_one_in: 1, deep_one_in: 5 };
    let mut check = Check { name: "image", settings: &settings, seed, plan, only: None, tally: Tally::default() };
    let mut random = Random(mixed(&[seed, step]));
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
