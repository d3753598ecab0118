//! Corners in which the contract was once broken: each test tells how.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, Weak};
use std::task::{Context, Wake, Waker};
use std::thread;
use std::time::Duration;

use keyonce::testing::{self, ENOSPC, ManualClock, SimDisk, Step};
use keyonce::{
    Cause, Clock, Completion, Durability, Event, KeyState, OnDrop, OnInterrupted, Options, Reserve, ReserveOptions,
    Retention, Store,
};

use crate::place::{LEASE, as_fresh, fresh, key, request, state};
use crate::tasks::{block_on, ends, options, poll, quick_store, wait};

// A segment is made ready for a place that the log has passed: the store does not open again.

#[test]
fn a_store_opens_again_however_its_writers_met_at_the_end_of_a_segment() {
    const THREADS: u64 = 8;
    let rounds = std::env::var("BROKEN_ROUNDS").map_or(400, |rounds| rounds.parse().unwrap());
    for round in 0..rounds {
        let (store, disk, clock) = quick_store();
        for n in 0..13 {
            let guard = fresh(&store, &key(format!("before-{n}")));
            assert_eq!(guard.complete(&[7; 6000]).unwrap(), Completion::Done);
        }
        // The disk is slow to make a segment ready, so that many come to the end of the last one meanwhile.
        disk.on_step(|step| {
            if step == Step::Sync {
                thread::sleep(Duration::from_millis(2));
            }
        });
        let barrier = Arc::new(Barrier::new(usize::try_from(THREADS).unwrap()));
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (store, barrier) = (store.clone(), Arc::clone(&barrier));
                thread::spawn(move || {
                    barrier.wait();
                    for n in 0..3 {
                        let guard = fresh(&store, &key(format!("{thread}-{n}")));
                        assert_eq!(guard.complete(&[7; 6000]).unwrap(), Completion::Done);
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        disk.on_step(|_| {});
        // Once after a kill, once after a clean end.
        let killed = testing::open(disk.kill(), options(&clock), 2).map(drop).map_err(|error| error.to_string());
        drop(store);
        let closed = testing::open(disk, options(&clock), 3).map(drop).map_err(|error| error.to_string());
        assert_eq!((killed, closed), (Ok(()), Ok(())), "round {round}, killed and closed");
    }
}

// A completion that was asked for and never polled gives the key back.

fn releasing() -> ReserveOptions {
    ReserveOptions::new().on_drop(OnDrop::Release)
}

#[test]
fn a_completion_dropped_before_its_first_poll_never_frees_the_key() {
    let (store, _, _) = quick_store();
    let guard = |id: &str| as_fresh(store.reserve_with(&key(id), request(), &releasing()).unwrap());
    drop(guard("complete").complete_async(b"paid"));
    drop(guard("without").complete_without_body_async(b"paid"));
    drop(guard("detach").detach_async(LEASE));
    drop(store.complete_batch_async([(guard("batch"), b"paid".to_vec())]));
    let states = ["complete", "without", "detach", "batch"].map(|id| state(&store, &key(id)));
    assert_eq!(states, [Some(KeyState::Interrupted); 4], "the work was done: nobody may do it again");
}

// A batch of another store's guards.

#[test]
fn a_batch_with_a_guard_of_another_store_comes_to_an_end() {
    ends(|| {
        let clock = ManualClock::default();
        let open = || {
            let options = options(&clock).durability(Durability::PowerLoss);
            testing::open(SimDisk::new(), options, 1).unwrap()
        };
        let (one, other) = (open(), open());
        assert_eq!(fresh(&other, &key("before")).complete(&[7; 5000]).unwrap(), Completion::Done);
        let guard = fresh(&other, &key("k"));
        assert_eq!(one.complete_batch([(guard, b"paid".to_vec())]).len(), 1);
    });
}

// A take-over that nobody saw.

#[test]
fn a_take_over_that_nobody_saw_does_not_make_a_lapsed_lease_a_drop() {
    let (store, _, clock) = quick_store();
    let at_work = fresh(&store, &key("k"));
    let also_lapsed = ReserveOptions::new().on_interrupted(OnInterrupted::TakeOverLapsed).wait(LEASE * 10);
    let mut waits = Box::pin(store.reserve_with_async(&key("k"), request(), &also_lapsed));
    assert!(poll(&mut waits).is_pending());
    clock.advance(LEASE);
    drop(waits);
    // Nobody did anything at attempt 2; the owner whose lease lapsed is still at work.
    let takes_over = ReserveOptions::new().on_interrupted(OnInterrupted::TakeOver);
    match store.reserve_with(&key("k"), request(), &takes_over).unwrap() {
        Reserve::Interrupted(interrupted) => assert_eq!(interrupted.cause(), Cause::LeaseLapsed),
        other => panic!("{other:?} while {at_work:?} is at work"),
    }
}

// The ages of duplicates.

#[test]
fn the_age_of_a_duplicate_is_that_at_which_it_came() {
    let (store, _, clock) = quick_store();
    let guard = fresh(&store, &key("k"));
    let mut waits = wait(&store, "k");
    assert!(poll(&mut waits).is_pending());
    clock.advance(LEASE / 2);
    assert_eq!(guard.complete(b"paid").unwrap(), Completion::Done);
    assert!(poll(&mut waits).is_ready());
    assert_eq!(store.stats().retry_ages.quantile(1.0), Some(Duration::ZERO), "it came at once");
}

// A waker that panics.

struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("planted");
    }
}

#[test]
fn a_waker_that_panics_takes_no_answer_from_others() {
    ends(|| {
        let (store, _, _) = quick_store();
        let guard = fresh(&store, &key("k"));
        let mut bad = wait(&store, "k");
        assert!(bad.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::new(Panics)))).is_pending());
        let good = {
            let store = store.clone();
            thread::spawn(move || store.reserve_with(&key("k"), request(), &ReserveOptions::new().wait(LEASE)))
        };
        crate::place::until_waiting(&store, 2);
        drop(catch_unwind(AssertUnwindSafe(|| guard.complete(b"paid"))));
        assert!(matches!(good.join().unwrap().unwrap(), Reserve::Replay(_)));
    });
}

/// The thread that syncs for tasks is gone, and nobody is asked in its place.
#[test]
fn after_a_waker_has_panicked_tasks_are_synced_for() {
    let place = tempfile::tempdir().unwrap();
    let clock = ManualClock::default();
    let store = Store::open(place.path().join("s"), options(&clock).durability(Durability::PowerLoss)).unwrap();
    for n in 0..50 {
        let mut bad = Box::pin(store.reserve_async(&key(format!("bad-{n}")), request()));
        if bad.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::new(Panics)))).is_pending() {
            break;
        }
    }
    thread::sleep(Duration::from_millis(300));
    let told = ends(move || block_on(store.reserve_async(&key("good"), request())).map(|told| format!("{told:?}")));
    assert!(told.is_ok(), "{told:?}");
}

// Time that passes while somebody lies down.

/// A clock by hand that is moved right after one of its readings, as by another thread.
#[derive(Debug)]
struct Moved {
    hands: ManualClock,
    moves_in: AtomicU64,
}

impl Clock for Moved {
    fn wall_ms(&self) -> u64 {
        self.hands.wall_ms()
    }
    fn boot_ms(&self) -> u64 {
        let read = self.hands.boot_ms();
        if self.moves_in.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)) == Ok(1) {
            let hands = self.hands.clone();
            // Not waited for: this may be read with a lock held. Long enough for the clock to be moved.
            thread::spawn(move || hands.advance(Duration::from_secs(2)));
            thread::sleep(Duration::from_millis(200));
        }
        read
    }
    fn boot_id(&self) -> [u8; 16] {
        self.hands.boot_id()
    }
    fn sleep(&self, ms: u64) -> Option<Duration> {
        self.hands.sleep(ms)
    }
    fn on_move(&self, wake: Weak<dyn Fn() + Send + Sync>) {
        self.hands.on_move(wake);
    }
}

#[test]
fn a_wait_ends_also_when_its_time_passes_while_it_begins() {
    ends(|| {
        let clock = Arc::new(Moved { hands: ManualClock::default(), moves_in: AtomicU64::new(0) });
        let options = options(&clock.hands).clock(clock.clone());
        let store = testing::open(SimDisk::new(), options, 1).unwrap();
        let _guard = fresh(&store, &key("k"));
        // The first reading sets the end of the wait, the second finds that it is not yet, the third is the step's.
        clock.moves_in.store(3, Ordering::SeqCst);
        let waits = ReserveOptions::new().wait(Duration::from_secs(1));
        assert!(matches!(store.reserve_with(&key("k"), request(), &waits).unwrap(), Reserve::InFlight(_)));
    });
}

/// Nobody owned it, so nobody's lease lapsed.
#[test]
fn the_lapse_of_a_hand_over_that_nobody_saw_is_not_told_as_an_owners() {
    let clock = ManualClock::default();
    let heard: Arc<Mutex<Vec<u32>>> = Arc::default();
    let into = Arc::clone(&heard);
    let listening = options(&clock).on_event(Arc::new(move |event| {
        if let Event::LeaseLapsed { attempt, .. } = event {
            into.lock().unwrap().push(*attempt);
        }
    }));
    let store = testing::open(SimDisk::new(), listening, 1).unwrap();
    let _at_work = fresh(&store, &key("k"));
    let also_lapsed = ReserveOptions::new().on_interrupted(OnInterrupted::TakeOverLapsed).wait(LEASE * 10);
    let mut waits = Box::pin(store.reserve_with_async(&key("k"), request(), &also_lapsed));
    assert!(poll(&mut waits).is_pending());
    clock.advance(LEASE);
    clock.advance(LEASE);
    assert_eq!(*heard.lock().unwrap(), [1], "the second lease was nobody's");
}

/// The store's timer ends with the first waker that panics on it, and with it leases, waits and the syncs of `Interval`.
#[test]
fn after_a_waker_has_panicked_the_interval_is_kept() {
    let place = tempfile::tempdir().unwrap();
    let options = Options::new()
        .durability(Durability::Interval(Duration::from_millis(10)))
        .retention(Retention::new(Duration::from_secs(3600), 0.1));
    let store = Store::open(place.path().join("s"), options).unwrap();
    let _guard = fresh(&store, &key("k"));
    let short = ReserveOptions::new().wait(Duration::from_millis(20));
    let mut bad = Box::pin(store.reserve_with_async(&key("k"), request(), &short));
    assert!(bad.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::new(Panics)))).is_pending());
    thread::sleep(Duration::from_millis(300));
    let before = store.stats().syncs;
    assert!(before > 0, "it was kept until then");
    let _later = fresh(&store, &key("later"));
    thread::sleep(Duration::from_millis(500));
    assert!(store.stats().syncs > before, "nothing was synced for fifty times the interval");
}

/// A guard is dropped when not even the record of it has room: the key is interrupted by a drop all the same.
#[test]
fn a_hold_holds_also_for_a_guard_that_fell_while_the_disk_was_full() {
    let (store, disk, clock) = quick_store();
    let guard = fresh(&store, &key("k"));
    clock.advance(LEASE / 2);
    disk.fail_from(disk.steps(), ENOSPC);
    disk.heal();
    disk.limit_bytes(Some(1));
    let mut n = 0;
    // Until not even the record of a drop has room.
    let full = loop {
        n += 1;
        let size = if n > 40 { 0 } else { 6000 };
        match store.reserve(&key(format!("fill-{n}")), request()) {
            Ok(Reserve::Fresh(other)) => match other.complete(&vec![7; size]) {
                Ok(_) => {}
                Err(_) if size > 0 => {}
                Err(not_stored) => break not_stored.error,
            },
            Ok(other) => panic!("{other:?}"),
            Err(error) => break error,
        }
        assert!(n < 100_000);
    };
    drop(guard);
    let hold = ReserveOptions::new().on_interrupted(OnInterrupted::Hold(LEASE / 4));
    let told = store.reserve_with(&key("k"), request(), &hold).unwrap();
    let cause = store.peek(&key("k")).unwrap().unwrap().cause;
    assert!(matches!(told, Reserve::InFlight(_)), "{full}: {told:?}, {cause:?}");
    assert_eq!(cause, Some(Cause::Dropped), "this process lives");
}

/// Dropped before it is ready, a reserve leaves nothing behind, as soon as the log can say so.
#[test]
fn a_hand_over_that_nobody_saw_is_given_back_also_when_the_disk_was_full() {
    let (store, disk, _) = quick_store();
    let guard = fresh(&store, &key("k"));
    let mut waits = wait(&store, "k");
    assert!(poll(&mut waits).is_pending());
    assert_eq!(guard.release().unwrap(), Completion::Done);
    disk.limit_bytes(Some(1));
    let mut n = 0;
    while let Ok(Reserve::Fresh(other)) = store.reserve(&key(format!("fill-{n}")), request()) {
        n += 1;
        std::mem::forget(other);
    }
    drop(waits);
    // Until there is room it reads as what a dropped guard leaves; whoever finds room again lets it be said.
    assert_eq!(state(&store, &key("k")), Some(KeyState::Interrupted));
    disk.limit_bytes(None);
    drop(fresh(&store, &key("there is room")));
    assert_eq!(state(&store, &key("k")), None, "no work can have begun");
    let told = store.reserve(&key("k"), request()).unwrap();
    assert!(matches!(told, Reserve::Fresh(_)), "{told:?}");
}
