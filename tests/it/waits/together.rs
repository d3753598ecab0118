//! What many calls share: a sync, an interval, a batch, the memory.

use std::thread;
use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk};
use keyonce::{
    Ask, Completion, Durability, Error, ErrorKind, OnInterrupted, Options, Reserve, ReserveOptions, Retention, Store,
};

use crate::place::{LEASE, MS, everywhere, fresh, key, replays, request, tell};
use crate::tasks::{PATIENCE, machine_now, options, poll, waiting};

use super::RESPONSE;

// Durability::Interval.

#[test]
fn what_is_written_is_synced_within_the_interval_and_nothing_is_synced_for_nothing() {
    let every = Duration::from_secs(2);
    let (disk, clock) = (SimDisk::new(), ManualClock::default());
    let store = testing::open(disk.clone(), options(&clock).durability(Durability::Interval(every)), 1).unwrap();
    let opened = store.stats().syncs;
    let syncs = || store.stats().syncs - opened;
    clock.advance(every * 10);
    assert_eq!(syncs(), 0, "nothing was written");
    let guard = fresh(&store, &key("k"));
    clock.advance(every - MS);
    assert_eq!(guard.complete(RESPONSE).unwrap(), Completion::Done);
    assert_eq!(syncs(), 0);
    clock.advance(MS);
    assert_eq!(syncs(), 1, "the first record is as old as the interval");
    let lost = testing::open(disk.crash_all_old(), options(&clock), 2).unwrap();
    replays(&lost, &key("k"), RESPONSE);
    clock.advance(every * 10);
    assert_eq!(syncs(), 1, "nothing was written since");
    // Every kind of record counts: a drop, a lapse, a release.
    drop(fresh(&store, &key("dropped")));
    clock.advance(every);
    assert_eq!(syncs(), 2);
    let lapses = fresh(&store, &key("lapses"));
    clock.advance(every);
    assert_eq!(syncs(), 3);
    clock.advance(LEASE - every);
    assert_eq!(syncs(), 3);
    clock.advance(every);
    assert_eq!(syncs(), 4, "the lapse was written");
    // What somebody else has synced meanwhile needs no sync.
    assert_eq!(lapses.release().unwrap(), Completion::Done);
    store.sync().unwrap();
    assert_eq!(syncs(), 5);
    clock.advance(every * 10);
    assert_eq!(syncs(), 5);
}

#[test]
fn the_interval_is_kept_by_the_clock_of_the_machine_too() {
    let place = tempfile::tempdir().unwrap();
    let every = Duration::from_millis(30);
    let open = Options::new().durability(Durability::Interval(every)).retention(Retention::new(LEASE, 0.1));
    let store = Store::open(place.path().join("store"), open).unwrap();
    let opened = store.stats().syncs;
    for round in 1..=5_u64 {
        assert_eq!(fresh(&store, &key(format!("{round}"))).complete(RESPONSE).unwrap(), Completion::Done);
        let begun = machine_now();
        while store.stats().syncs < opened + round {
            assert!(begun.elapsed() < PATIENCE, "never synced");
            thread::sleep(MS);
        }
        // Idle: at most one more, of what was written while the sync went on.
        thread::sleep(every * 3);
        assert!(store.stats().syncs <= opened + round + 1);
        let surplus = store.stats().syncs - opened - round;
        assert_eq!(surplus, 0, "round {round}");
    }
}

// M5: batches.

#[test]
fn a_batch_is_answered_item_by_item_as_if_one_after_another() {
    everywhere(|place| {
        let store = place.open();
        assert_eq!(fresh(&store, &key("done")).complete(RESPONSE).unwrap(), Completion::Done);
        let held = fresh(&store, &key("held"));
        drop(fresh(&store, &key("interrupted")));
        let ask = |id: &str| Ask::new(&key(id), request());
        let old = std::time::SystemTime::UNIX_EPOCH;
        let asks = [
            ask("new"),
            ask("done"),
            ask("new"),
            Ask::new(&key("new"), crate::place::other_request()),
            ask("held"),
            Ask::new(&key("done"), crate::place::other_request()),
            ask("interrupted"),
            Ask::new(&key("interrupted"), request())
                .options(ReserveOptions::new().on_interrupted(OnInterrupted::TakeOver)),
            ask("interrupted"),
            Ask::new(&key("waits"), request()).options(ReserveOptions::new().wait(MS)),
            Ask::new(&key("zero"), request()).options(ReserveOptions::new().lease(Duration::ZERO)),
            Ask::new(&key("old"), request()).options(ReserveOptions::new().issued_at(old)),
            ask("waits"),
        ];
        let syncs = store.stats().syncs;
        let told = store.reserve_batch(&asks).unwrap();
        let synced = store.stats().syncs - syncs;
        assert_eq!(synced, u64::from(place.setting.durability == Durability::PowerLoss), "one sync for all");
        let name = |told: &Result<Reserve, Error>| match told {
            Ok(Reserve::Fresh(guard)) => format!("fresh {}", guard.attempt()),
            Ok(Reserve::Replay(_)) => "replay".into(),
            Ok(Reserve::InFlight(_)) => "in flight".into(),
            Ok(Reserve::Interrupted(_)) => "interrupted".into(),
            Ok(Reserve::Mismatch(_)) => "mismatch".into(),
            Ok(Reserve::TooOld(_)) => "too old".into(),
            Err(error) => format!("{:?}", error.kind()),
        };
        let expect = [
            "fresh 1",
            "replay",
            "in flight",
            "mismatch",
            "in flight",
            "mismatch",
            "interrupted",
            "fresh 2",
            "in flight",
            "InvalidOptions",
            "InvalidOptions",
            "too old",
            "fresh 1",
        ];
        assert_eq!(told.iter().map(name).collect::<Vec<_>>(), expect);
        let guards: Vec<_> = told
            .into_iter()
            .flatten()
            .filter_map(|told| match told {
                Reserve::Fresh(guard) => Some(guard),
                _ => None,
            })
            .collect();
        // One of them was overtaken, one is too large: each is told for itself.
        let overtaken = guards[0].key().clone();
        assert!(store.forget(&overtaken, "").unwrap());
        let sizes = [3, crate::place::RESPONSE_BYTES_MAX + 1, 5];
        let items = guards.into_iter().zip(sizes).map(|(guard, size)| (guard, vec![7; size]));
        let stored = store.complete_batch(items);
        assert_eq!(*stored[0].as_ref().unwrap(), Completion::Superseded);
        let error = stored[1].as_ref().unwrap_err();
        assert_eq!((error.error.kind(), error.reservation.key().id()), (ErrorKind::TooLarge, &b"interrupted"[..]));
        assert_eq!(*stored[2].as_ref().unwrap(), Completion::Done);
        drop((stored, held));
        assert_eq!(store.stats().guards, 0);
        assert!(store.reserve_batch(&[]).unwrap().is_empty());
        assert!(store.complete_batch([]).is_empty());
        store.close(Duration::ZERO).unwrap();
        assert_eq!(store.reserve_batch(&asks).unwrap_err().kind(), ErrorKind::Closed);
    });
}

// Figures.

#[cfg(target_os = "linux")]
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

/// What is kept per key is kept while it is in flight; what has expired is given up.
///
/// Memory is that of a process, so the test is one that runs nothing else.
#[cfg(target_os = "linux")]
#[test]
fn keys_that_come_and_go_leave_nothing_in_memory() {
    const ALONE: &str = "KEYONCE_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name = "waits::together::keys_that_come_and_go_leave_nothing_in_memory";
        let this = std::env::current_exe().unwrap();
        let alone = std::process::Command::new(this).args(["--exact", name]).env(ALONE, "1").output().unwrap();
        assert!(alone.status.success(), "{}", String::from_utf8_lossy(&alone.stdout));
        tell(String::from_utf8_lossy(&alone.stderr).trim_end());
        return;
    }
    const BATCH: u64 = 1000;
    let keys: u64 = if cfg!(debug_assertions) { 40_000 } else { 1_000_000 };
    let (place, clock) = (tempfile::tempdir().unwrap(), ManualClock::default());
    let window = Duration::from_secs(10);
    let open = options(&clock).retention(Retention::new(window, 1000.0)).lease(window);
    let store = Store::open(place.path().join("store"), open).unwrap();
    let go_through = |from: u64, until: u64| {
        for n in from..until {
            let guard = fresh(&store, &key(format!("{n}")));
            let mut waits = Box::pin(store.reserve_with_async(guard.key(), request(), &waiting()));
            assert!(poll(&mut waits).is_pending());
            match n % 4 {
                0 => assert_eq!(guard.complete(RESPONSE).unwrap(), Completion::Done),
                1 => assert_eq!(guard.release().unwrap(), Completion::Done),
                2 => drop(guard),
                _ => assert_eq!(guard.detach(MS).map(|_| ()).map_err(|_| ()), Ok(())),
            }
            drop(waits);
            if n % BATCH == 0 {
                clock.advance(window / 10);
            }
        }
        (resident_bytes(), store.stats())
    };
    let (before, _) = go_through(0, keys / 2);
    let (after, stats) = go_through(keys / 2, keys);
    tell(&format!(
        "{keys} keys came and went: {} KiB resident after half of them, {} KiB after all; {} keys in the index",
        before >> 10,
        after >> 10,
        stats.keys
    ));
    // What a guard could not say when it was dropped is said as soon as there is room.
    let begun = machine_now();
    while store.stats().guards > 0 {
        assert!(begun.elapsed() < PATIENCE, "a guard lives on that nobody holds");
        thread::yield_now();
    }
    assert_eq!(stats.waiting, 0);
    assert!(stats.keys < 60 * BATCH, "{}", stats.keys);
    assert!(after < before + (16 << 20), "{before} bytes, and then {after}");
}

#[test]
fn a_reserve_by_a_task_costs_little_more_than_one_by_a_thread() {
    const ROUNDS: u32 = 21;
    let calls: u32 = if cfg!(debug_assertions) { 200 } else { 20_000 };
    let (place, clock) = (tempfile::tempdir().unwrap(), ManualClock::default());
    let open = options(&clock).retention(Retention::new(Duration::from_secs(3600), 1000.0));
    let store = Store::open(place.path().join("store"), open).unwrap();
    let mut times = [Vec::new(), Vec::new()];
    let mut keys: Vec<_> = Vec::new();
    for round in 0..2 * ROUNDS {
        keys.clear();
        keys.extend((0..calls).map(|n| key(format!("{round}-{n}"))));
        let begun = machine_now();
        for key in &keys {
            let answer = if round % 2 == 0 {
                store.reserve(key, request())
            } else {
                let call = std::pin::pin!(store.reserve_async(key, request()));
                match call.poll(&mut std::task::Context::from_waker(std::task::Waker::noop())) {
                    std::task::Poll::Ready(answer) => answer,
                    // The helper has not made the next segment ready.
                    std::task::Poll::Pending => continue,
                }
            };
            std::mem::forget(answer);
        }
        times[(round % 2) as usize].push(begun.elapsed() / calls);
    }
    let [thread, task] = times.map(|mut times| {
        times.sort();
        (times[0], times[times.len() / 2])
    });
    tell(&format!(
        "a reserve by a thread took {:?} (median of {ROUNDS} rounds; best {:?}), by a task {:?} (best {:?})",
        thread.1, thread.0, task.1, task.0
    ));
    if !cfg!(debug_assertions) {
        assert!(task.1 <= thread.1 + Duration::from_nanos(100), "{task:?} against {thread:?}");
    }
}
