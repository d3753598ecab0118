//! Keys that get stuck and keys that get lost: rows S1, S2, S4, S6, S7, S9 and S10, by other callers and other ends.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use keyonce::{
    Ask, Body, Cause, Completion, Failed, KeyState, OnDrop, OnInterrupted, OnceError, Outcome, Reservation, Reserve,
    ReserveOptions, Store,
};

use super::ground::on_every_ground;
use crate::place::{
    LEASE, MS, RESPONSE_BYTES_MAX, WINDOW, as_fresh, as_replay, fresh, interrupted, key, replays, request, reserve,
    state,
};
use crate::tasks::{block_on, poll, waiting};

type Named<T> = (&'static str, T);

/// Row S1: whatever way the key was reserved. What was detached goes on, by its durable lease.
#[test]
fn a_key_is_interrupted_at_once_after_a_crash_in_whatever_way_it_was_reserved() {
    on_every_ground(|ground| {
        let store = ground.open();
        let handed = {
            let owner = fresh(&store, &key("handed over"));
            let mut waits = Box::pin(store.reserve_with_async(&key("handed over"), request(), &waiting()));
            assert!(poll(&mut waits).is_pending());
            assert_eq!(owner.release().unwrap(), Completion::Done);
            as_fresh(block_on(waits).unwrap())
        };
        drop(fresh(&store, &key("taken over")));
        let batch = store.reserve_batch(&[Ask::new(&key("batch"), request())]).unwrap().remove(0);
        let held = [
            handed,
            as_fresh(interrupted(&store, &key("taken over")).take_over().unwrap()),
            as_fresh(batch.unwrap()),
            as_fresh(block_on(store.reserve_async(&key("task"), request())).unwrap()),
            {
                let token = fresh(&store, &key("reattached")).detach(LEASE).unwrap();
                store.reattach(&key("reattached"), token).unwrap()
            },
        ];
        let detached = fresh(&store, &key("detached")).detach(LEASE).unwrap();
        for after in ground.after_crashes() {
            for owner in &held {
                let stop = interrupted(&after, owner.key());
                assert_eq!((stop.cause(), stop.token, stop.attempt), (Cause::Crash, owner.token(), owner.attempt()));
            }
            assert_eq!(after.opened().interrupted, held.len() as u64);
            assert!(matches!(reserve(&after, &key("detached")), Reserve::InFlight(_)));
            assert_eq!(after.reattach(&key("detached"), detached).unwrap().complete(b"").unwrap(), Completion::Done);
        }
    });
}

/// Row S2: panics and early returns of work that somebody else runs.
#[test]
fn an_owner_that_is_lost_in_once_in_a_batch_or_in_an_error_leaves_the_key_interrupted() {
    type Act = fn(&Store, &str);
    let ends: [Named<Act>; 6] = [
        ("once that panics", |store, id| {
            let told = catch_unwind(AssertUnwindSafe(|| {
                store.once(&key(id), request(), |_| -> Result<Vec<u8>, Failed<std::io::Error>> {
                    std::panic::resume_unwind(Box::new("planted"))
                })
            }));
            assert!(told.is_err());
        }),
        ("once_async that panics", |store, id| {
            let told = catch_unwind(AssertUnwindSafe(|| {
                block_on(store.once_async(&key(id), request(), |_| async {
                    if true {
                        std::panic::resume_unwind(Box::new("planted"));
                    }
                    Ok::<_, Failed<std::io::Error>>(Vec::new())
                }))
            }));
            assert!(told.is_err());
        }),
        ("once that is unknown", |store, id| {
            let told = store.once(&key(id), request(), |_| Err::<Vec<u8>, _>(Failed::Unknown("no")));
            assert!(matches!(told, Err(OnceError::Work("no"))));
        }),
        ("the answers of a batch", |store, id| drop(store.reserve_batch(&[Ask::new(&key(id), request())]).unwrap())),
        ("what a batch could not store", |store, id| {
            let stored = store.complete_batch([(fresh(store, &key(id)), vec![0; RESPONSE_BYTES_MAX + 1])]);
            assert!(matches!(stored[..], [Err(_)]));
        }),
        ("an iterator of a batch that panics", |store, id| {
            let told = catch_unwind(AssertUnwindSafe(|| {
                let items = [id, "-"].into_iter().map(|id| {
                    assert_ne!(id, "-", "planted");
                    (fresh(store, &key(id)), b"paid".to_vec())
                });
                store.complete_batch(items)
            }));
            assert!(told.is_err());
        }),
    ];
    on_every_ground(|ground| {
        let store = ground.open();
        for (name, end) in ends {
            // Who waits is told.
            let owner = fresh(&store, &key(name));
            assert_eq!(owner.release().unwrap(), Completion::Done);
            end(&store, name);
            assert_eq!(interrupted(&store, &key(name)).cause(), Cause::Dropped, "{name}");
        }
        assert_eq!(store.stats().guards, 0);
        for after in ground.after_crashes() {
            for (name, _) in ends {
                let stop = interrupted(&after, &key(name));
                assert!(matches!(stop.cause(), Cause::Dropped | Cause::Crash), "{name}");
            }
        }
    });
}

/// Row S2: where the caller chose that a drop releases, a panic in `once` does, too, but never a later attempt.
#[test]
fn once_that_panics_frees_the_key_only_where_a_drop_may_and_only_a_first_attempt() {
    on_every_ground(|ground| {
        let store = ground.open_as(ground.options().on_drop(OnDrop::Release).on_interrupted(OnInterrupted::TakeOver));
        let panics = || {
            let told = catch_unwind(AssertUnwindSafe(|| {
                store.once(&key("k"), request(), |_| -> Result<Vec<u8>, Failed<std::io::Error>> {
                    std::panic::resume_unwind(Box::new("planted"))
                })
            }));
            assert!(told.is_err());
        };
        panics();
        assert_eq!(state(&store, &key("k")), None);
        fresh(&store, &key("k")).interrupt();
        panics();
        assert_eq!(state(&store, &key("k")), Some(KeyState::Interrupted));
        // What is said aloud is not a drop.
        let told = store.once(&key("said"), request(), |_| Err::<Vec<u8>, _>(Failed::Unknown("no")));
        assert!(matches!(told, Err(OnceError::Work("no"))));
        assert_eq!(state(&store, &key("said")), Some(KeyState::Interrupted));
    });
}

/// Row S4, by every call that stores an outcome.
#[test]
fn no_bytes_and_no_body_are_replayed_as_just_that_whoever_stored_them() {
    type Store_ = fn(&Store, &str);
    let empty: [Named<Store_>; 5] = [
        ("a task", |store, id| {
            assert_eq!(block_on(fresh(store, &key(id)).complete_async(b"")).unwrap(), Completion::Done);
        }),
        ("a batch", |store, id| {
            assert!(matches!(store.complete_batch([(fresh(store, &key(id)), Vec::new())])[..], [Ok(Completion::Done)]));
        }),
        ("once", |store, id| {
            let told = store.once(&key(id), request(), |_| Ok::<_, Failed<std::io::Error>>(Vec::new()));
            assert!(matches!(told, Ok(Outcome::Ran(body)) if body.is_empty()));
        }),
        ("resolve", |store, id| {
            drop(fresh(store, &key(id)));
            assert_eq!(interrupted(store, &key(id)).resolve(b"").unwrap(), Completion::Done);
        }),
        ("after a checkpoint", |store, id| {
            let owner = fresh(store, &key(id));
            assert_eq!(owner.save_checkpoint(b"half").unwrap(), Completion::Done);
            assert_eq!(owner.complete(b"").unwrap(), Completion::Done);
        }),
    ];
    let none: [Named<Store_>; 3] = [
        ("no body by a task", |store, id| {
            let done = block_on(fresh(store, &key(id)).complete_without_body_async(b"")).unwrap();
            assert_eq!(done, Completion::Done);
        }),
        ("no body after a checkpoint", |store, id| {
            let owner = fresh(store, &key(id));
            assert_eq!(owner.save_checkpoint(b"half").unwrap(), Completion::Done);
            assert_eq!(owner.complete_without_body(b"").unwrap(), Completion::Done);
        }),
        ("too large for once", |store, id| {
            let body = || vec![7; RESPONSE_BYTES_MAX + 1];
            let told = store.once(&key(id), request(), |_| Ok::<_, Failed<std::io::Error>>(body()));
            assert!(matches!(told, Ok(Outcome::Ran(ran)) if ran == body()));
        }),
    ];
    on_every_ground(|ground| {
        let store = ground.open();
        for (name, store_it) in empty.into_iter().chain(none) {
            store_it(&store, name);
        }
        for after in ground.after_crashes().iter().chain([&store]) {
            for (name, _) in empty {
                replays(after, &key(name), b"");
                assert!(store.peek(&key(name)).unwrap().unwrap().checkpoint.is_empty());
            }
            for (name, _) in none {
                let response = as_replay(reserve(after, &key(name)));
                assert_eq!(response.body(), Body::NotKept { reference: b"" }, "{name}");
            }
        }
    });
}

/// Row S6: the key becomes free in other ways than by a release.
#[test]
fn of_three_waiters_one_owns_the_key_however_it_became_free() {
    type Act = fn(&Store, Reservation);
    let ends: [Named<Act>; 4] = [
        ("a drop that may release", |_, owner| drop(owner)),
        ("an operator", |store, owner| {
            assert!(store.forget(owner.key(), "a test").unwrap());
            drop(owner);
        }),
        ("once, nothing happened", |_, owner| {
            assert_eq!(block_on(owner.release_async()).unwrap(), Completion::Done);
        }),
        ("who found out", |store, owner| {
            owner.interrupt();
            let _ = store;
        }),
    ];
    on_every_ground(|ground| {
        let store = ground.open();
        for (name, end) in ends {
            let found_out = name == "who found out";
            let key = key(name);
            let with = ReserveOptions::new().on_drop(OnDrop::Release);
            let owner = as_fresh(store.reserve_with(&key, request(), &with).unwrap());
            let with = waiting().on_interrupted(OnInterrupted::Hold(LEASE));
            let mut waits: Vec<_> =
                (0..3).map(|_| Box::pin(store.reserve_with_async(&key, request(), &with))).collect();
            assert!(waits.iter_mut().all(|task| poll(task).is_pending()));
            end(&store, owner);
            if found_out {
                assert!(waits.iter_mut().all(|task| poll(task).is_pending()), "it is held");
                assert_eq!(interrupted(&store, &key).release().unwrap(), Completion::Done);
            }
            let next = as_fresh(block_on(waits.remove(0)).unwrap());
            assert_eq!(next.attempt(), 1);
            assert!(waits.iter_mut().all(|task| poll(task).is_pending()));
            assert_eq!(store.stats().waiting, 2);
            assert_eq!(next.complete(name.as_bytes()).unwrap(), Completion::Done);
            for task in waits {
                assert_eq!(as_replay(block_on(task).unwrap()).body(), Body::Kept(name.as_bytes()));
            }
            assert_eq!((store.stats().waiting, store.stats().guards), (0, 0));
        }
    });
}

/// Row S7: the handle from which a waiter came is gone, and with it the store.
#[test]
fn who_waits_when_the_last_handle_goes_is_told() {
    on_every_ground(|ground| {
        let store = ground.open();
        let owner = fresh(&store, &key("k"));
        let mut waits: Vec<_> =
            (0..2).map(|_| Box::pin(store.reserve_with_async(&key("k"), request(), &waiting()))).collect();
        assert!(waits.iter_mut().all(|task| poll(task).is_pending()));
        let Reserve::InFlight(running) = reserve(&store, &key("k")) else { panic!("it is held") };
        let waiting_thread = thread::spawn(move || running.wait(100 * LEASE).map(drop));
        crate::place::until_waiting(&store, 3);
        drop(waits.pop());
        drop(store);
        let kind = |error: keyonce::Error| error.kind();
        assert_eq!(block_on(waits.remove(0)).map(drop).map_err(kind), Err(keyonce::ErrorKind::Closed));
        assert_eq!(waiting_thread.join().unwrap().map_err(kind), Err(keyonce::ErrorKind::Closed));
        drop(owner);
        // And the next opening is in nobody's way.
        let store = ground.open();
        assert_eq!(interrupted(&store, &key("k")).cause(), Cause::LeaseLapsed);
    });
}

/// Row S9: a take-over, a batch and a whole `once` of which nobody heard.
#[test]
fn a_call_that_nobody_polls_has_never_been() {
    on_every_ground(|ground| {
        let store = ground.open();
        drop(store.reserve_async(&key("k"), request()));
        drop(store.reserve_with_async(&key("k"), request(), &waiting()));
        drop(store.reserve_batch_async(&[Ask::new(&key("k"), request())]));
        drop(store.once_async(&key("k"), request(), |_| async { Ok::<_, Failed<std::io::Error>>(Vec::new()) }));
        drop(store.forget_async(&key("k"), ""));
        assert_eq!((state(&store, &key("k")), store.stats().fresh), (None, 0));
        drop(fresh(&store, &key("k")));
        drop(interrupted(&store, &key("k")).take_over_async());
        drop(interrupted(&store, &key("k")).resolve_async(b"paid"));
        drop(interrupted(&store, &key("k")).release_async());
        assert_eq!(interrupted(&store, &key("k")).attempt, 1);
        let token = {
            let owner = as_fresh(interrupted(&store, &key("k")).take_over().unwrap());
            drop(owner.renew_async(LEASE * 5));
            drop(owner.save_checkpoint_async(b"half"));
            assert!(store.peek(&key("k")).unwrap().unwrap().checkpoint.is_empty());
            owner.detach(LEASE).unwrap()
        };
        drop(store.reattach_async(&key("k"), token));
        assert!(store.reattach(&key("k"), token).is_ok(), "nobody has taken it up");
        // An owner that went into a future is gone with it.
        for end in [0, 1, 2] {
            let id = format!("end {end}");
            let owner = fresh(&store, &key(&id));
            match end {
                0 => drop(owner.complete_async(b"paid")),
                1 => drop(owner.detach_async(LEASE)),
                _ => drop(store.complete_batch_async([(owner, Vec::new())])),
            }
            assert_eq!(interrupted(&store, &key(&id)).cause(), Cause::Dropped);
        }
        assert_eq!((store.stats().guards, store.stats().waiting), (0, 0));
    });
}

/// Row S10: renewed by a task, taken over, reattached; while the log rolls on; then a crash.
#[test]
fn a_key_held_far_beyond_its_retention_is_there_after_a_crash_whoever_held_it() {
    on_every_ground(|ground| {
        let store = ground.open();
        drop(fresh(&store, &key("taken over")));
        let token = fresh(&store, &key("reattached")).detach(LEASE).unwrap();
        let short = ReserveOptions::new().retention(MS);
        let held = [
            as_fresh(interrupted(&store, &key("taken over")).take_over().unwrap()),
            store.reattach(&key("reattached"), token).unwrap(),
            as_fresh(store.reserve_with(&key("a short retention"), request(), &short).unwrap()),
        ];
        for round in 0..6 {
            for owner in &held {
                assert_eq!(block_on(owner.renew_async(WINDOW * 2)).unwrap(), Completion::Done);
            }
            ground.place.clock.advance(WINDOW + WINDOW / 2);
            // More than a segment, so that what is past its use goes.
            for n in 0..30 {
                let filler = fresh(&store, &key(format!("filler {round} {n}")));
                assert_eq!(filler.complete(&[1; RESPONSE_BYTES_MAX]).unwrap(), Completion::Done);
            }
        }
        let detached = fresh(&store, &key("detached")).detach(WINDOW * 30).unwrap();
        ground.place.clock.advance(WINDOW * 19);
        for owner in &held {
            assert_eq!(block_on(owner.renew_async(WINDOW * 2)).unwrap(), Completion::Done);
        }
        ground.place.clock.advance(WINDOW - MS);
        for after in ground.after_crashes() {
            for owner in &held {
                let stop = interrupted(&after, owner.key());
                assert_eq!((stop.cause(), stop.token), (Cause::Crash, owner.token()));
            }
            assert!(after.reattach(&key("detached"), detached).is_ok());
        }
        for owner in held {
            assert_eq!(owner.complete(b"at last").unwrap(), Completion::Done);
        }
    });
}
