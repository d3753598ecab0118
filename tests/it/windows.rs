//! What went wrong once between two steps, and must not again.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use keyonce::testing::{self, EIO, ManualClock, SimDisk, Step, Storage};
use keyonce::{
    Cause, Clock, Completion, Durability, ErrorKind, Fingerprint, Key, Options, Reservation, Reserve, ReserveOptions,
    Retention, Store,
};

use crate::ring::{START_MS, options};
fn key(id: impl std::fmt::Display) -> Key {
    Key::new("b", id.to_string()).unwrap()
}
fn request() -> Fingerprint {
    Fingerprint::of("same")
}
fn fresh(store: &Store, id: impl std::fmt::Display) -> Reservation {
    match store.reserve(&key(&id), request()).unwrap() {
        Reserve::Fresh(r) => r,
        other => panic!("{id}: {other:?}"),
    }
}
fn finish(store: &Store, id: impl std::fmt::Display, bytes: usize) {
    assert_eq!(fresh(store, id).complete(&vec![7; bytes]).unwrap(), Completion::Done);
}

/// Copying a key forward met a full disk; the key that could not be copied was taken for copied the next time.
#[test]
fn a_full_disk_never_costs_a_held_reservation_its_place() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(disk.clone(), options(&clock), 1).unwrap();
    let long = ReserveOptions::new().lease(Duration::from_secs(100_000));
    let mut held = Vec::new();
    for id in ["A", "B"] {
        let Reserve::Fresh(r) = store.reserve_with(&key(id), request(), &long).unwrap() else { panic!() };
        assert_eq!(r.save_checkpoint(&vec![1; 60 << 10]).unwrap(), Completion::Done);
        held.push(r);
    }
    disk.limit_bytes(Some(1)); // the successor is ready; from here on no file grows
    let mut n = 0;
    while store.stats().segments < 2 {
        finish(&store, n, 1000);
        n += 1;
    }
    clock.advance(Duration::from_secs(200)); // all that is finished is past its retention
    let mut failed = false;
    for _ in 0..300 {
        match store.reserve(&key(n), request()) {
            Ok(Reserve::Fresh(r)) => {
                if r.complete(&[7; 1000]).is_err() {
                    failed = true;
                    break;
                }
            }
            Ok(other) => panic!("{other:?}"),
            Err(_) => {
                failed = true;
                break;
            }
        }
        n += 1;
    }
    assert!(failed, "the disk is full");
    disk.limit_bytes(None); // there is room again
    clock.advance(Duration::from_secs(200));
    for n in 10_000..10_400 {
        finish(&store, n, 1000);
        if n % 50 == 0 {
            clock.advance(Duration::from_secs(100));
        }
    }
    let mut lost = Vec::new();
    for id in ["A", "B"] {
        let now = store.reserve(&key(id), request()).unwrap();
        lost.extend((!matches!(now, Reserve::InFlight(_))).then(|| format!("{id}: {now:?}")));
        std::mem::forget(now);
    }
    std::mem::forget((held, store));
    assert!(lost.is_empty(), "held with a living guard and lease, and: {lost:?}");
}

/// A failed write, or a kill within a copy into the map, leaves half of a new file's first header.
#[test]
fn half_a_first_header_is_a_spare() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(disk.clone(), options(&clock), 1).unwrap();
    let (armed, done) = (Arc::new(AtomicU64::new(0)), AtomicBool::new(false));
    let d = disk.clone();
    disk.on_step(move |step| match step {
        Step::Create if !done.swap(true, Ordering::Relaxed) => armed.store(1, Ordering::Relaxed),
        Step::Write if armed.swap(0, Ordering::Relaxed) == 1 => d.fail_at(d.steps(), EIO),
        _ => {}
    });
    for n in 0..200 {
        finish(&store, n, 1000);
    }
    store.close(Duration::ZERO).unwrap();
    let again = testing::open(disk.kill(), options(&clock), 2);
    assert!(again.is_ok(), "{:?}", again.err());
}

/// The store is poisoned, and somebody closes it: the last guard ends without a record.
#[test]
fn who_closes_is_woken_also_by_a_guard_that_cannot_write() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(disk.clone(), options(&clock).durability(Durability::PowerLoss), 1).unwrap();
    let held = fresh(&store, "held");
    disk.fail_from(disk.steps(), EIO);
    assert!(store.reserve(&key("other"), request()).is_err());
    let (tell, told) = mpsc::channel();
    let s = store.clone();
    std::thread::spawn(move || tell.send(s.close(Duration::from_secs(3600)).is_err()));
    std::thread::sleep(Duration::from_millis(300));
    drop(held);
    let woken = told.recv_timeout(Duration::from_secs(3));
    std::mem::forget(store);
    assert!(woken.is_ok(), "no guard is left, and close sleeps on");
}

/// Without a helper thread every caller may find that upkeep is due.
#[test]
fn many_threads_without_a_helper_keep_house_in_turn() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(
        disk,
        options(&clock).retention(Retention::new(Duration::from_secs(1), 10.0)).lease(Duration::from_secs(1)),
        1,
    )
    .unwrap();
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                for _ in 0..1500 {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    let r = fresh(&store, n);
                    if n.is_multiple_of(3) {
                        drop(r)
                    } else {
                        assert_eq!(r.complete(&[7; 1500]).unwrap(), Completion::Done)
                    }
                    if n.is_multiple_of(20) {
                        clock.advance(Duration::from_millis(500));
                    }
                }
            });
        }
    });
}

/// The store is at ProcessCrash; the caller asked for PowerLoss, was told Interrupted, and takes over.
#[test]
fn a_take_over_by_handle_is_as_durable_as_was_asked() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(disk.clone(), options(&clock), 1).unwrap();
    drop(fresh(&store, "k"));
    let ask = ReserveOptions::new().durability(Durability::PowerLoss);
    let Reserve::Interrupted(found) = store.reserve_with(&key("k"), request(), &ask).unwrap() else { panic!() };
    let Reserve::Fresh(second) = found.take_over().unwrap() else { panic!() };
    let lost = disk.crash_all_old();
    let again = testing::open(lost, options(&clock), 2).unwrap();
    let Reserve::Interrupted(now) = again.reserve(&key("k"), request()).unwrap() else { panic!("forgotten") };
    assert_eq!(now.token, second.token(), "the take-over that was told Fresh at PowerLoss is lost");
}

/// A creation that was cut short where files grow as they are written.
#[test]
fn a_blank_file_of_odd_length_is_never_given_a_life() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    testing::open(disk.clone(), options(&clock), 1).unwrap().close(Duration::ZERO).unwrap();
    disk.publish("segment-000000ff.keyonce", &vec![0; 300_001]).unwrap();
    let store = testing::open(disk.clone(), options(&clock), 2).unwrap();
    finish(&store, "k", 10);
    store.sync().unwrap();
    store.close(Duration::ZERO).unwrap();
    let again = testing::open(disk.kill(), options(&clock), 3);
    assert!(again.is_ok(), "{:?}", again.err());
}

/// Drop never blocks on a sync, also when it finds that somebody else released the key.
#[test]
fn the_drop_of_a_superseded_reservation_waits_for_nothing() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(disk, options(&clock).durability(Durability::PowerLoss), 1).unwrap();
    let late = fresh(&store, "k");
    clock.advance(Duration::from_secs(31));
    let Reserve::Interrupted(found) = store.reserve(&key("k"), request()).unwrap() else { panic!() };
    assert_eq!(found.release().unwrap(), Completion::Done); // not synced
    let before = store.stats().syncs;
    drop(late);
    assert_eq!(store.stats().syncs, before);
}

/// A detached reservation that is reattached has the same token, and another guard.
#[test]
fn the_view_of_an_ended_guard_never_acts_for_the_next_one() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(disk, options(&clock), 1).unwrap();
    let first = fresh(&store, "k");
    let view = first.attempt_view();
    let token = first.detach(Duration::from_secs(30)).unwrap();
    let again = store.reattach(&key("k"), token).unwrap();
    // An Attempt of the guard that ended acts for the new one.
    assert_eq!(view.renew(Duration::from_secs(9)).unwrap(), Completion::Superseded);
    drop(again);
}

/// An interrupted key that nobody resolved is counted, whenever it is forgotten.
#[test]
fn what_expired_unresolved_while_the_store_was_closed_is_told() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(disk.clone(), options(&clock), 1).unwrap();
    drop(fresh(&store, "lost"));
    store.close(Duration::ZERO).unwrap();
    clock.advance(Duration::from_secs(1000));
    let store = testing::open(disk, options(&clock), 2).unwrap();
    assert_eq!(fresh(&store, "lost").complete(b"second run").unwrap(), Completion::Done);
    assert_eq!(store.stats().expired_unresolved, 1, "{:?}", store.opened());
}

/// A large response is copied by openings whose own limit is small.
#[test]
fn responses_of_other_sizes_survive_openings_with_other_limits() {
    let (mut disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let small = || {
        Options::new()
            .clock(Arc::new(clock.clone()))
            .response_bytes_max(0)
            .retention(Retention::new(Duration::from_secs(60), 1.0))
    };
    let large = || small().response_bytes_max(16 << 20);
    let store = testing::open(disk.clone(), large(), 1).unwrap();
    finish(&store, "k", 16 << 20);
    finish(&store, "l", 9 << 20);
    for n in 0..6 {
        disk = disk.kill();
        let store = testing::open(disk.clone(), if n % 2 == 0 { small() } else { large() }, 2 + n).unwrap();
        for (id, bytes) in [("k", 16 << 20), ("l", 9 << 20)] {
            let Reserve::Replay(r) = store.reserve(&key(id), request()).unwrap() else { panic!() };
            assert!(matches!(r.body(), keyonce::Body::Kept(body) if body.len() == bytes));
        }
        finish(&store, n, 0);
        std::mem::forget(store);
    }
}

/// Two close and three write, at the same time.
#[test]
fn the_lock_is_free_whoever_closes_and_whoever_writes() {
    for round in 0..30 {
        let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
        let store = testing::open(disk.clone(), options(&clock), 1).unwrap();
        std::thread::scope(|scope| {
            for t in 0..3 {
                let store = &store;
                scope.spawn(move || {
                    for n in 0..400 {
                        match store.reserve(&key(format!("{t}-{n}")), request()) {
                            Ok(Reserve::Fresh(r)) => drop(r.complete(&[1; 3000])),
                            _ => break,
                        }
                    }
                });
            }
            for _ in 0..2 {
                let (store, disk, clock) = (&store, &disk, &clock);
                scope.spawn(move || {
                    std::thread::sleep(Duration::from_millis(3 + round));
                    store.close(Duration::ZERO).unwrap();
                    let _ = (disk, clock);
                });
            }
        });
        let again = testing::open(disk.clone(), options(&clock), 2);
        assert!(again.is_ok(), "round {round}: {:?}", again.err());
    }
}

/// Fills the disk; says after how many keys it was full.
fn fill(store: &Store, from: u64) -> u64 {
    let mut n = from;
    loop {
        match store.reserve(&key(n), request()) {
            Ok(Reserve::Fresh(r)) => {
                if r.complete(&[7; 1000]).is_err() {
                    return n;
                }
            }
            Ok(other) => panic!("{other:?}"),
            Err(e) => {
                assert!(matches!(e.kind(), ErrorKind::Full { .. }), "{e}");
                return n;
            }
        }
        n += 1;
        assert!(n < from + 100_000);
    }
}

/// Upkeep began only after an append that went well, and a retired file waited for a header that had no file to stand
/// in.
#[test]
fn a_full_store_heals_when_what_fills_it_has_expired() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(disk.clone(), options(&clock), 1).unwrap();
    (0..600).for_each(|n| finish(&store, format!("w{n}"), 1_000));
    disk.limit_bytes(Some(1));
    fill(&store, 0);
    clock.advance(Duration::from_secs(600));
    let healed =
        (0..5).any(|round| matches!(store.reserve(&key(format!("r{round}")), request()), Ok(Reserve::Fresh(_))));
    assert!(healed, "{:?}", store.stats());
}

/// A call that the full disk refuses changes nothing, and is counted as nothing.
#[test]
fn refused_calls_do_not_count_a_key_as_expired_again() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(disk.clone(), options(&clock), 1).unwrap();
    (0..600).for_each(|n| finish(&store, format!("w{n}"), 1_000));
    let short = ReserveOptions::new().retention(Duration::from_secs(1)).lease(Duration::from_secs(1));
    drop(store.reserve_with(&key("lost"), request(), &short).unwrap());
    disk.limit_bytes(Some(1));
    let n = fill(&store, 0);
    for n in n + 1.. {
        match store.reserve(&key(n), request()) {
            Ok(r) => std::mem::forget(r),
            Err(_) => break,
        }
    }
    clock.advance(Duration::from_secs(10));
    for _ in 0..10 {
        assert!(store.reserve(&key("lost"), request()).is_err());
    }
    assert!(store.stats().expired_unresolved <= 1, "one key, counted {} times", store.stats().expired_unresolved);
}

/// A segment holds little but records that later ones took the place of, and one key that is owned for long.
#[test]
fn idle_owners_do_not_each_hold_a_segment() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(disk.clone(), options(&clock), 1).unwrap();
    let long = ReserveOptions::new().lease(Duration::from_secs(1_000_000));
    let Reserve::Fresh(busy) = store.reserve_with(&key("busy"), request(), &long).unwrap() else { panic!() };
    let mut held = Vec::new();
    for n in 0..60 {
        let Reserve::Fresh(r) = store.reserve_with(&key(n), request(), &long).unwrap() else { panic!() };
        held.push(r);
        for _ in 0..3 {
            assert_eq!(busy.save_checkpoint(&vec![1; 60 << 10]).unwrap(), Completion::Done);
        }
        clock.advance(Duration::from_secs(600));
    }
    let stats = store.stats();
    assert!(
        stats.segments < 15,
        "61 live records of some 75 KiB in all hold {} segments, {} bytes",
        stats.segments,
        stats.log_bytes
    );
}

/// The names behind the last index begin again with the first that nobody has.
#[test]
fn a_stray_file_of_the_last_index_is_in_nobodys_way() {
    for name in ["segment-ffffffff.keyonce", "segment-fffffffe.keyonce"] {
        let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
        testing::open(disk.clone(), options(&clock), 1).unwrap().close(Duration::ZERO).unwrap();
        disk.publish(name, b"stray").unwrap();
        for n in 2..6 {
            let store = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                testing::open(disk.clone(), options(&clock), n)
            }));
            let store = match store {
                Ok(Ok(s)) => s,
                Ok(Err(e)) => panic!("{name} {n}: {e}"),
                Err(p) => panic!("{name} {n}: panic {:?} {:?}", p.downcast_ref::<String>(), p.downcast_ref::<&str>()),
            };
            for k in 0..400 {
                finish(&store, format!("{n}-{k}"), 1_000);
            }
            store.close(Duration::ZERO).unwrap();
        }
    }
}

/// Copies of keys that a guard holds beyond their time are soon over again: a round does not look at what it wrote
/// itself.
#[test]
fn carrying_forward_comes_to_an_end() {
    let disk = SimDisk::new();
    let o = Options::new()
        .durability(Durability::ProcessCrash)
        .response_bytes_max(16 << 10)
        .segment_bytes(192 << 10)
        .retention(Retention::new(Duration::from_secs(60), 10.0));
    let store = testing::open(disk.clone(), o, 1).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let short = ReserveOptions::new().lease(Duration::from_millis(1)).retention(Duration::from_millis(5));
        let mut held = Vec::new();
        for n in 0..120 {
            let Reserve::Fresh(r) = store.reserve_with(&key(n), request(), &short).unwrap() else { panic!() };
            assert_eq!(r.save_checkpoint(&vec![1; 60 << 10]).unwrap(), Completion::Done);
            held.push(r);
            tell.send(n).unwrap();
        }
        tell.send(1000).unwrap();
    });
    let mut last = 0;
    while last != 1000 {
        match told.recv_timeout(Duration::from_secs(8)) {
            Ok(n) => last = n,
            Err(e) => panic!("after {last}: {e:?}"),
        }
    }
}

/// A poisoned store cannot say that its reservations are still held: the process remembers, and nobody takes over from
/// an owner that may be at work. In the image of a crash, that owner is gone.
#[test]
fn a_reservation_that_outlives_a_poisoned_store_in_its_process_has_lapsed_and_not_crashed() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(disk.clone(), options(&clock), 1).unwrap();
    let held = fresh(&store, "held");
    let token = held.token();
    disk.fail_from(disk.steps(), EIO);
    assert!(store.sync().is_err());
    assert!(store.close(Duration::ZERO).is_err());
    disk.heal();
    let crashed = disk.crash_all_new();
    for (disk, cause) in [(crashed, Cause::Crash), (disk, Cause::LeaseLapsed)] {
        let store = testing::open(disk, options(&clock), 2).unwrap();
        let Reserve::Interrupted(found) = store.reserve(&key("held"), request()).unwrap() else { panic!() };
        assert_eq!((found.token, found.cause()), (token, cause));
    }
    drop(held);
}

/// A guard keeps its key for as long as it lives, and the lapse of its lease was told long ago: the close that ends it
/// keeps the key for a retention more, as if it were interrupted then.
#[test]
fn a_key_whose_guard_outlived_its_lease_is_kept_for_a_retention_after_the_close() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let window = Duration::from_secs(60);
    let open = |seed| {
        let options = options(&clock).retention(Retention::new(window, 10.0)).lease(Duration::from_secs(1));
        testing::open(disk.clone(), options, seed).unwrap()
    };
    let store = open(1);
    let held = fresh(&store, "held");
    clock.advance(Duration::from_secs(1));
    clock.advance(10 * window);
    assert_eq!(store.close(Duration::ZERO).unwrap().unfinished, 1);
    for (later, known) in [(window - Duration::from_millis(1), true), (Duration::from_millis(1), false)] {
        clock.advance(later);
        assert_eq!(open(clock.boot_ms()).peek(&key("held")).unwrap().is_some(), known);
    }
    drop(held);
}

/// A reservation is on the disk, its completion is not yet, and the segment of the reservation has nothing else that
/// counts: its file may be given away only once the completion is on the disk, or a power loss would leave neither.
#[test]
fn a_segment_goes_only_when_what_has_superseded_its_records_is_durable() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let minute = Duration::from_secs(60);
    let options = options(&clock).durability(Durability::ProcessCrash).retention(Retention::new(minute, 10.0));
    let store = testing::open(disk.clone(), options.clone().lease(10 * minute), 1).unwrap();
    let mut filled = 0;
    let mut fill = || {
        filled += 1;
        assert_eq!(fresh(&store, filled).complete(&[7; 1500]).unwrap(), Completion::Done);
    };
    let held = fresh(&store, "held");
    while store.stats().segments < 3 {
        fill();
    }
    store.sync().unwrap();
    clock.advance(minute);
    assert_eq!(held.complete(b"paid").unwrap(), Completion::Done);
    while store.stats().segments >= 3 {
        fill();
    }
    let again = testing::open(disk.crash_all_old(), options, 2).unwrap();
    assert!(again.peek(&key("held")).unwrap().is_some(), "neither the reservation nor its response is there");
}
