//! Row S3: the ends of every duration that is not an option of its own.

use std::thread;
use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk};
use keyonce::{Cause, Durability, ErrorKind, KeyState, OnInterrupted, Options, Reserve, ReserveOptions, Store};

use crate::place::{LEASE, MS, WINDOW, as_fresh, fresh, interrupted, key, request, reserve, state, until_waiting};
use crate::tasks::{block_on, options, poll, quick_store, ready};

const NS: Duration = Duration::from_nanos(1);
const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

fn opens(options: Options) -> Result<Store, ErrorKind> {
    testing::open(SimDisk::new(), options, 1).map_err(|error| error.kind())
}

#[test]
fn an_interval_a_hold_and_a_renewal_are_refused_at_zero_and_beyond_a_century() {
    let clock = ManualClock::default();
    type Set = fn(Options, Duration) -> Options;
    let all: [(&str, Set); 3] = [
        ("durability", |options, d| options.durability(Durability::Interval(d))),
        ("on_interrupted", |options, d| options.on_interrupted(OnInterrupted::Hold(d))),
        ("renew_while_held", |options, d| options.renew_while_held(d)),
    ];
    for (name, set) in all {
        for bad in [Duration::ZERO, CENTURY + NS, Duration::MAX] {
            assert_eq!(opens(set(options(&clock), bad)).unwrap_err(), ErrorKind::InvalidOptions, "{name} of {bad:?}");
        }
        for good in [NS, MS, CENTURY] {
            let store = opens(set(options(&clock), good)).unwrap();
            drop(fresh(&store, &key("k")));
            // Past every end, and nothing turns round.
            clock.advance(WINDOW);
            let _told = reserve(&store, &key("k"));
        }
    }
    let (store, ..) = quick_store();
    for bad in [Duration::ZERO, CENTURY + NS, Duration::MAX] {
        let with = ReserveOptions::new().on_interrupted(OnInterrupted::Hold(bad));
        let error = store.reserve_with(&key("k"), request(), &with).unwrap_err();
        assert!(error.kind() == ErrorKind::InvalidOptions && error.to_string().contains("on_interrupted"), "{error}");
        let error = block_on(store.reserve_with_async(&key("k"), request(), &with)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOptions);
    }
    for level in [Durability::Interval(NS), Durability::Interval(Duration::ZERO), Durability::Interval(Duration::MAX)] {
        let with = ReserveOptions::new().durability(level);
        assert_eq!(store.reserve_with(&key("k"), request(), &with).unwrap_err().kind(), ErrorKind::InvalidOptions);
    }
    assert_eq!(state(&store, &key("k")), None, "a refused call leaves nothing");
}

/// A nanosecond counts as a millisecond; the longest hold lasts as long as the key.
#[test]
fn a_hold_of_a_nanosecond_is_a_millisecond_and_the_longest_lasts_as_long_as_the_key() {
    let (store, _, clock) = quick_store();
    let held = |held| {
        let with = ReserveOptions::new().on_interrupted(OnInterrupted::Hold(held));
        store.reserve_with(&key("k"), request(), &with).unwrap()
    };
    drop(fresh(&store, &key("k")));
    assert!(matches!(held(NS), Reserve::InFlight(_)));
    clock.advance(MS);
    assert!(matches!(held(NS), Reserve::Interrupted(_)));
    let Reserve::InFlight(running) = held(CENTURY) else { panic!("it is held") };
    assert_eq!(running.retry_after(), CENTURY - MS);
    // Who waits for the end of such a hold is told when the key is forgotten, and not before.
    let with = ReserveOptions::new().on_interrupted(OnInterrupted::Hold(CENTURY)).wait(Duration::MAX);
    let mut waits = Box::pin(store.reserve_with_async(&key("k"), request(), &with));
    assert!(poll(&mut waits).is_pending());
    let kept = interrupted(&store, &key("k")).info().kept_until;
    let now = std::time::UNIX_EPOCH + Duration::from_millis(keyonce::Clock::wall_ms(&clock));
    clock.advance(kept.duration_since(now).unwrap() - MS);
    assert!(poll(&mut waits).is_pending());
    clock.advance(MS);
    assert_eq!(as_fresh(ready(&mut waits).unwrap()).attempt(), 1);
    assert_eq!(store.stats().expired_unresolved, 1);
}

/// A handle's wait of 0 asks once; the longest ends with the owner; a task's does, too.
#[test]
fn a_wait_by_a_handle_is_over_at_once_at_zero_and_never_by_itself_at_the_longest() {
    let (store, _, clock) = quick_store();
    let owner = fresh(&store, &key("k"));
    let running = || {
        let Reserve::InFlight(running) = reserve(&store, &key("k")) else { panic!("it is held") };
        running
    };
    assert!(matches!(running().wait(Duration::ZERO).unwrap(), Reserve::InFlight(_)));
    assert!(matches!(block_on(running().wait_async(Duration::ZERO)).unwrap(), Reserve::InFlight(_)));
    let mut shortest = Box::pin(running().wait_async(NS));
    assert!(poll(&mut shortest).is_pending());
    clock.advance(MS);
    assert!(matches!(ready(&mut shortest).unwrap(), Reserve::InFlight(_)));
    let mut longest = Box::pin(running().wait_async(Duration::MAX));
    assert!(poll(&mut longest).is_pending());
    assert_eq!(owner.renew(CENTURY).unwrap(), keyonce::Completion::Done);
    clock.advance(CENTURY - MS);
    assert!(poll(&mut longest).is_pending());
    clock.advance(MS);
    let Reserve::Interrupted(stop) = ready(&mut longest).unwrap() else { panic!("its lease has lapsed") };
    assert_eq!(stop.cause(), Cause::LeaseLapsed);
    drop(owner);
}

/// Closing waits for who owns a key; 0 for nobody, the longest for as long as it takes.
#[test]
fn a_close_of_zero_waits_for_nobody_and_the_longest_for_the_owner() {
    let (store, ..) = quick_store();
    let owner = fresh(&store, &key("k"));
    let report = thread::scope(|threads| {
        let closes = threads.spawn(|| store.close(Duration::MAX).unwrap());
        // Nobody becomes an owner once it closes.
        for n in 0.. {
            if store.reserve(&key(format!("other {n}")), request()).map(drop).is_err() {
                break;
            }
        }
        assert_eq!(owner.complete(b"paid").unwrap(), keyonce::Completion::Done);
        closes.join().unwrap()
    });
    assert_eq!(report.unfinished, 0);

    let (store, disk, clock) = quick_store();
    let owner = fresh(&store, &key("k"));
    assert_eq!(store.close(Duration::ZERO).unwrap().unfinished, 1);
    let after = testing::open(disk, options(&clock), 2).unwrap();
    assert_eq!(state(&after, &key("k")), Some(KeyState::Interrupted));
    drop(owner);
}

/// The clock is at its end, and nothing turns round.
#[test]
fn a_lease_of_a_century_renewed_near_its_end_is_still_a_lease() {
    let (store, disk, clock) = quick_store();
    let with = ReserveOptions::new().lease(CENTURY);
    let owner = as_fresh(store.reserve_with(&key("k"), request(), &with).unwrap());
    for _ in 0..5 {
        clock.advance(CENTURY - MS);
        assert_eq!(owner.renew(CENTURY).unwrap(), keyonce::Completion::Done);
        assert!(matches!(reserve(&store, &key("k")), Reserve::InFlight(_)));
    }
    let token = owner.detach(CENTURY).unwrap();
    let killed = testing::open(disk.kill(), options(&clock), 2).unwrap();
    for store in [&store, &killed] {
        assert!(matches!(reserve(store, &key("k")), Reserve::InFlight(_)));
    }
    clock.advance(CENTURY);
    for store in [&store, &killed] {
        assert_eq!(interrupted(store, &key("k")).token, token);
    }
    let with = ReserveOptions::new().on_interrupted(OnInterrupted::TakeOverLapsed).lease(LEASE).wait(CENTURY);
    let next = as_fresh(store.reserve_with(&key("k"), request(), &with).unwrap());
    thread::scope(|threads| {
        let waits = threads.spawn(|| as_fresh(store.reserve_with(&key("k"), request(), &with).unwrap()).attempt());
        until_waiting(&store, 1);
        clock.advance(LEASE);
        assert_eq!(waits.join().unwrap(), 3);
    });
    drop(next);
}
