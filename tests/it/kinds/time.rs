//! Rows T3 to T5: the age of a key for other callers, and over reopenings.

use std::time::{Duration, UNIX_EPOCH};

use keyonce::{
    Ask, Body, Clock as _, Completion, Failed, OnInterrupted, OnceError, Outcome, Reserve, ReserveOptions, Store,
};

use super::ground::{Ground, on_every_ground};
use crate::place::{LEASE, MS, WINDOW, as_fresh, as_replay, fresh, interrupted, key, replays, request, reserve, state};
use crate::tasks::{block_on, poll};

/// Row T3, to the millisecond, with a retention of the key's own, by every caller, and after a crash in each moment.
#[test]
fn a_duplicate_is_answered_by_its_age_by_every_caller_and_after_a_crash() {
    on_every_ground(|ground| {
        let store = ground.open();
        let kept = WINDOW / 10;
        let issued = UNIX_EPOCH + Duration::from_millis(ground.place.clock.wall_ms());
        let with = || ReserveOptions::new().retention(kept);
        let dated = || with().issued_at(issued);
        let owner = as_fresh(store.reserve_with(&key("k"), request(), &dated()).unwrap());
        assert_eq!(owner.complete(b"paid").unwrap(), Completion::Done);
        drop(as_fresh(store.reserve_with(&key("interrupted"), request(), &dated()).unwrap()));
        let mut passed = Duration::ZERO;
        for age in [kept / 2, kept / 10 * 9, kept - MS] {
            ground.place.clock.advance(age - passed);
            passed = age;
            for after in ground.after_crashes().iter().chain([&store]) {
                replays(after, &key("k"), b"paid");
                as_replay(block_on(after.reserve_with_async(&key("k"), request(), &dated())).unwrap());
                let mut told = after.reserve_batch(&[Ask::new(&key("k"), request()).options(dated())]).unwrap();
                as_replay(told.remove(0).unwrap());
                let never = |_: &_| -> Result<Vec<u8>, Failed<std::io::Error>> { panic!("it was done") };
                let Ok(Outcome::Replayed(told)) = after.once(&key("k"), request(), never) else { panic!("replay") };
                assert_eq!(told.body(), Body::Kept(b"paid"));
            }
        }
        for age in [kept, kept / 10 * 11] {
            ground.place.clock.advance(age - passed);
            passed = age;
            for after in ground.after_crashes().iter().chain([&store]) {
                let is_too_old = |told| assert!(matches!(told, Reserve::TooOld(_)), "{told:?}");
                is_too_old(after.reserve_with(&key("k"), request(), &dated()).unwrap());
                is_too_old(block_on(after.reserve_with_async(&key("k"), request(), &dated().wait(LEASE))).unwrap());
                let mut told = after.reserve_batch(&[Ask::new(&key("k"), request()).options(dated())]).unwrap();
                is_too_old(told.remove(0).unwrap());
                let never = |_: &_| -> Result<Vec<u8>, Failed<std::io::Error>> { panic!("it may be done") };
                let told = after.once_with(&key("k"), request(), &dated(), never);
                assert!(matches!(told, Err(OnceError::TooOld(_))), "{told:?}");
                assert_eq!(state(after, &key("k")), None);
                // What is known is said, however old the caller is.
                let told = after.reserve_with(&key("interrupted"), request(), &dated()).unwrap();
                assert!(matches!(told, Reserve::Interrupted(_)), "{told:?}");
            }
        }
    });
}

/// Who waits grows old meanwhile: a key that is given back to it then must not run as if new.
#[test]
fn who_grew_too_old_while_it_waited_is_told_so_when_the_key_becomes_free() {
    on_every_ground(|ground| {
        let store = ground.open();
        let kept = LEASE / 2;
        let issued = UNIX_EPOCH + Duration::from_millis(ground.place.clock.wall_ms());
        let owner = fresh(&store, &key("k"));
        let dated = ReserveOptions::new().retention(kept).issued_at(issued).wait(10 * LEASE);
        let plain = ReserveOptions::new().retention(kept).wait(10 * LEASE);
        let mut old = Box::pin(store.reserve_with_async(&key("k"), request(), &dated));
        let mut young = Box::pin(store.reserve_with_async(&key("k"), request(), &plain));
        assert!(poll(&mut old).is_pending() && poll(&mut young).is_pending());
        ground.place.clock.advance(kept);
        assert_eq!(owner.release().unwrap(), Completion::Done);
        let next = as_fresh(block_on(young).unwrap());
        // The key has another owner by now, which is what is known of it.
        match poll(&mut old) {
            std::task::Poll::Pending => {}
            std::task::Poll::Ready(told) => assert!(matches!(told.unwrap(), Reserve::TooOld(_))),
        }
        drop(old);
        drop(next);

        let owner = fresh(&store, &key("alone"));
        let issued = UNIX_EPOCH + Duration::from_millis(ground.place.clock.wall_ms());
        let dated = ReserveOptions::new().retention(kept).issued_at(issued).wait(10 * LEASE);
        let mut old = Box::pin(store.reserve_with_async(&key("alone"), request(), &dated));
        assert!(poll(&mut old).is_pending());
        ground.place.clock.advance(kept);
        assert_eq!(owner.release().unwrap(), Completion::Done);
        assert!(matches!(block_on(old).unwrap(), Reserve::TooOld(_)));
        assert_eq!(state(&store, &key("alone")), None);
    });
}

/// Row T4: whatever looks at the key.
#[test]
fn nothing_that_looks_at_a_key_extends_its_retention() {
    on_every_ground(|ground| {
        let store = ground.open();
        type Look = fn(&Store, &keyonce::Key);
        let looks: [(&str, Look); 6] = [
            ("a thread", |store, key| drop(reserve(store, key))),
            ("a task that would wait", |store, key| {
                let with = ReserveOptions::new().wait(LEASE);
                drop(block_on(store.reserve_with_async(key, request(), &with)).unwrap());
            }),
            ("a batch", |store, key| drop(store.reserve_batch(&[Ask::new(key, request())]).unwrap())),
            ("another request", |store, key| drop(store.reserve(key, crate::place::other_request()).unwrap())),
            ("a look", |store, key| drop(store.peek(key).unwrap())),
            ("a list", |store, _| assert!(store.keys().count() > 0)),
        ];
        for (name, look) in looks {
            let key = key(name);
            assert_eq!(fresh(&store, &key).complete(b"paid").unwrap(), Completion::Done);
            let until = store.peek(&key).unwrap().unwrap().kept_until;
            for _ in 0..4 {
                ground.place.clock.advance(WINDOW / 5);
                look(&store, &key);
                assert_eq!(store.peek(&key).unwrap().unwrap().kept_until, until);
            }
            ground.place.clock.advance(WINDOW / 5 - MS);
            replays(&store, &key, b"paid");
            ground.place.clock.advance(MS);
            assert_eq!(state(&store, &key), None, "{name}");
        }
        // Nor that of an interrupted one.
        drop(fresh(&store, &key("interrupted")));
        let until = interrupted(&store, &key("interrupted")).info().kept_until;
        let hold = ReserveOptions::new().on_interrupted(OnInterrupted::Hold(WINDOW));
        for _ in 0..4 {
            ground.place.clock.advance(WINDOW / 5);
            drop(interrupted(&store, &key("interrupted")));
            drop(store.reserve_with(&key("interrupted"), request(), &hold).unwrap());
            assert_eq!(interrupted(&store, &key("interrupted")).info().kept_until, until);
        }
    });
}

/// Row T5: at the very millisecond, by threads, by tasks, by a batch, also of a key that expired unresolved.
#[test]
fn of_two_retries_at_the_end_of_the_retention_one_is_fresh_whoever_they_are() {
    on_every_ground(|ground| {
        let store = ground.open();
        for round in 0..4 {
            let key = key(format!("{round}"));
            if round % 2 == 0 {
                assert_eq!(fresh(&store, &key).complete(b"paid").unwrap(), Completion::Done);
            } else {
                drop(fresh(&store, &key));
            }
            let until = store.peek(&key).unwrap().unwrap().kept_until;
            let now = UNIX_EPOCH + Duration::from_millis(ground.place.clock.wall_ms());
            ground.place.clock.advance(until.duration_since(now).unwrap());
            let told = if round < 2 {
                std::thread::scope(|threads| {
                    let task = threads.spawn(|| block_on(store.reserve_async(&key, request())).unwrap());
                    let thread = reserve(&store, &key);
                    vec![thread, task.join().unwrap()]
                })
            } else {
                let asks = [Ask::new(&key, request()), Ask::new(&key, request())];
                store.reserve_batch(&asks).unwrap().into_iter().map(Result::unwrap).collect()
            };
            let fresh =
                told.iter().filter(|told| matches!(told, Reserve::Fresh(owner) if owner.attempt() == 1)).count();
            let running = told.iter().filter(|told| matches!(told, Reserve::InFlight(_))).count();
            assert_eq!((fresh, running), (1, 1), "{told:?}");
        }
        assert_eq!(store.stats().expired_unresolved, 2);
    });
}

/// No step on the disk while the reservation that is renewed is of this level, whoever renews.
fn renewals_take_no_step(ground: &Ground, with: &ReserveOptions) {
    let Some(disk) = &ground.disk else { return };
    let store = ground.open();
    let owner = as_fresh(store.reserve_with(&key("k"), request(), with).unwrap());
    let view = owner.attempt_view();
    let steps = disk.steps();
    for _ in 0..100 {
        ground.place.clock.advance(MS);
        assert_eq!(owner.renew(LEASE).unwrap(), Completion::Done);
        assert_eq!(view.renew(LEASE).unwrap(), Completion::Done);
        assert_eq!(block_on(owner.renew_async(LEASE)).unwrap(), Completion::Done);
    }
    assert_eq!(disk.steps(), steps);
}

/// A renewal moves the lease in memory.
#[test]
fn a_renewal_writes_nothing() {
    on_every_ground(|ground| renewals_take_no_step(ground, &ReserveOptions::new()));
}
