//! Row I1: a key stands for one request, whoever asks, by whatever rule, and over whatever crash.

use std::time::SystemTime;

use keyonce::{Ask, Completion, Failed, KeyState, OnInterrupted, OnceError, Reserve, ReserveOptions, Store};

use super::ground::on_every_ground;
use crate::place::{LEASE, as_fresh, fresh, interrupted, key, other_request, request, reserve};
use crate::tasks::{block_on, poll, ready, waiting};

/// Every way to ask says `Mismatch`, and nothing has changed.
fn mismatches_by_every_caller(store: &Store, id: &str, expected: KeyState, when: &str) {
    let key = &key(id);
    let before = crate::place::snapshot(store, key);
    let other = other_request();
    let is_mismatch = |told: Reserve, how: &str| match told {
        Reserve::Mismatch(told) => assert_eq!(told.state, expected, "{how}, {when}"),
        told => panic!("{how}, {when}: {told:?}"),
    };
    let rules = [
        OnInterrupted::Surface,
        OnInterrupted::TakeOver,
        OnInterrupted::TakeOverLapsed,
        OnInterrupted::Hold(LEASE * 1000),
    ];
    for rule in rules {
        let with = ReserveOptions::new().on_interrupted(rule);
        is_mismatch(store.reserve_with(key, other, &with).unwrap(), "a thread");
        is_mismatch(block_on(store.reserve_with_async(key, other, &with)).unwrap(), "a task");
        let with = with.wait(LEASE);
        is_mismatch(store.reserve_with(key, other, &with).unwrap(), "a thread that would wait");
        let mut waits = Box::pin(store.reserve_with_async(key, other, &with));
        let told = match poll(&mut waits) {
            std::task::Poll::Ready(told) => told,
            std::task::Poll::Pending => block_on(waits),
        };
        is_mismatch(told.unwrap(), "a task that would wait");
    }
    let old = ReserveOptions::new().issued_at(SystemTime::UNIX_EPOCH);
    is_mismatch(store.reserve_with(key, other, &old).unwrap(), "one that is too old");
    for told in [
        store.reserve_batch(&[Ask::new(key, other), Ask::new(key, other)]).unwrap(),
        block_on(store.reserve_batch_async(&[Ask::new(key, other).options(old)])).unwrap(),
    ] {
        told.into_iter().for_each(|told| is_mismatch(told.unwrap(), "a batch"));
    }
    let work = |_: &_| -> Result<Vec<u8>, Failed<std::io::Error>> { panic!("it must not run") };
    let told = store.once(key, other, work);
    assert!(matches!(told, Err(OnceError::Mismatch(told)) if told.state == expected), "once, {when}");
    let told = block_on(store.once_async(key, other, |_| async { Ok::<_, Failed<std::io::Error>>(Vec::new()) }));
    assert!(matches!(told, Err(OnceError::Mismatch(told)) if told.state == expected), "once_async, {when}");
    assert_eq!(crate::place::snapshot(store, key), before, "{when}");
}

#[test]
fn a_key_stands_for_one_request_by_every_caller_in_every_state_and_after_a_crash() {
    on_every_ground(|ground| {
        let store = ground.open();
        let check = mismatches_by_every_caller;
        let running = fresh(&store, &key("running"));
        let _detached = fresh(&store, &key("detached")).detach(LEASE * 100).unwrap();
        let lapsed =
            as_fresh(store.reserve_with(&key("lapsed"), request(), &ReserveOptions::new().lease(LEASE / 2)).unwrap());
        drop(fresh(&store, &key("dropped")));
        drop(fresh(&store, &key("later")));
        drop(as_fresh(interrupted(&store, &key("later")).take_over().unwrap()));
        assert_eq!(fresh(&store, &key("done")).complete(b"paid").unwrap(), Completion::Done);
        assert_eq!(fresh(&store, &key("no body")).complete_without_body(b"").unwrap(), Completion::Done);
        drop(fresh(&store, &key("resolved")));
        assert_eq!(interrupted(&store, &key("resolved")).resolve(b"").unwrap(), Completion::Done);
        ground.place.clock.advance(LEASE / 2);
        for after in ground.after_crashes().iter().chain([&store]) {
            let crashed = !std::ptr::eq(after, &store);
            let running = if crashed { KeyState::Interrupted } else { KeyState::InFlight };
            let when = if crashed { "after a crash" } else { "before" };
            for (id, state) in [
                ("running", running),
                ("detached", KeyState::InFlight),
                ("lapsed", KeyState::Interrupted),
                ("dropped", KeyState::Interrupted),
                ("later", KeyState::Interrupted),
                ("done", KeyState::Done),
                ("no body", KeyState::Done),
                ("resolved", KeyState::Done),
            ] {
                check(after, id, state, &format!("{id} {when}"));
            }
        }
        drop((running, lapsed));
        store.close(std::time::Duration::ZERO).unwrap();
        drop(store);
        let store = ground.open();
        check(&store, "running", KeyState::Interrupted, "after a close");
        check(&store, "done", KeyState::Done, "after a close");
    });
}

/// Who waited, and who has a handle, asks again for the request that it came with.
#[test]
fn a_handle_and_a_waiter_stand_for_the_request_they_came_with_when_the_key_stands_for_another() {
    on_every_ground(|ground| {
        let store = ground.open();
        let key = key("k");
        let owner = fresh(&store, &key);
        let Reserve::InFlight(one) = reserve(&store, &key) else { panic!("it is held") };
        let Reserve::InFlight(two) = reserve(&store, &key) else { panic!("it is held") };
        let listed = || store.interrupted().next().unwrap().unwrap();
        owner.interrupt();
        let (handle, other_handle, from_list) = (interrupted(&store, &key), interrupted(&store, &key), listed());
        assert_eq!(interrupted(&store, &key).release().unwrap(), Completion::Done);
        let other = as_fresh(store.reserve(&key, other_request()).unwrap());
        let is_mismatch = |told: Reserve| assert!(matches!(told, Reserve::Mismatch(_)), "{told:?}");
        is_mismatch(one.wait(LEASE).unwrap());
        let mut waits = Box::pin(two.wait_async(LEASE));
        is_mismatch(ready(&mut waits).unwrap());
        is_mismatch(handle.take_over().unwrap());
        is_mismatch(block_on(from_list.take_over_async()).unwrap());
        assert_eq!(other_handle.resolve(b"not mine").unwrap(), Completion::Superseded);

        // Who waits for the other request is told what the first waiter made of the key.
        let mut first = Box::pin(store.reserve_with_async(&key, other_request(), &waiting()));
        let mut second = Box::pin(store.reserve_with_async(&key, other_request(), &waiting()));
        assert!(poll(&mut first).is_pending() && poll(&mut second).is_pending());
        assert!(store.forget(&key, "a test").unwrap());
        let next = as_fresh(block_on(first).unwrap());
        assert!(poll(&mut second).is_pending());
        assert!(store.forget(&key, "a test").unwrap());
        let third = as_fresh(block_on(second).unwrap());
        is_mismatch(reserve(&store, &key));
        assert_eq!(next.complete(b"").unwrap(), Completion::Superseded);
        assert_eq!(third.complete(b"paid").unwrap(), Completion::Done);
        assert_eq!(other.complete(b"").unwrap(), Completion::Superseded);
        for after in ground.after_crashes() {
            is_mismatch(reserve(&after, &key));
        }
    });
}
