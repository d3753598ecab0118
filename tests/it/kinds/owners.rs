//! Ownership: rows O1 to O12, met by tasks, batches, waiters, and over reopenings.

use std::thread;
use std::time::Duration;

use keyonce::testing::{self, EIO, ManualClock, SimDisk};
use keyonce::{
    Ask, Attempt, Body, Cause, Completion, Durability, ErrorKind, Failed, Interrupted, Key, KeyState, NotReattached,
    OnDrop, OnInterrupted, OnceError, Outcome, Reservation, Reserve, ReserveOptions, Store,
};

use super::ground::{Ground, on_every_ground};
use crate::place::{
    LEASE, MS, WINDOW, as_fresh, as_interrupted, as_replay, fresh, interrupted, key, other_request, replays, request,
    reserve, snapshot, state,
};
use crate::tasks::{block_on, options, poll, ready, waiting};

type Named<T> = (&'static str, T);

type End = fn(&Store, Reservation);

/// How an owner can end that was overtaken.
const ENDS: [Named<End>; 8] = [
    ("complete_async", |_, old| assert_eq!(block_on(old.complete_async(b"late")).unwrap(), Completion::Superseded)),
    ("complete_batch", |store, old| {
        let stored = store.complete_batch([(old, b"late".to_vec())]);
        assert!(matches!(stored[..], [Ok(Completion::Superseded)]), "{stored:?}");
    }),
    ("complete_batch_async", |store, old| {
        let stored = block_on(store.complete_batch_async([(old, b"late".to_vec())]));
        assert!(matches!(stored[..], [Ok(Completion::Superseded)]), "{stored:?}");
    }),
    ("complete_without_body_async", |_, old| {
        assert_eq!(block_on(old.complete_without_body_async(b"")).unwrap(), Completion::Superseded);
    }),
    ("release_async", |_, old| assert_eq!(block_on(old.release_async()).unwrap(), Completion::Superseded)),
    ("a completion that is never polled", |_, old| drop(old.complete_async(b"late"))),
    ("interrupt", |_, old| old.interrupt()),
    ("detach_async", |_, old| {
        let not_stored = block_on(old.detach_async(LEASE)).unwrap_err();
        assert_eq!(not_stored.error.kind(), ErrorKind::Superseded);
        assert!(!not_stored.error.is_transient(), "it never comes back");
    }),
];

type Heir = fn(&Ground, &Store, &Key) -> Reservation;

/// Who takes over: a waiter, a question of a batch, or a task that asks by itself.
const HEIRS: [Named<Heir>; 3] = [
    ("a waiter", |ground, store, key| {
        let with = ReserveOptions::new().on_interrupted(OnInterrupted::TakeOverLapsed).wait(10 * LEASE);
        let mut waits = Box::pin(store.reserve_with_async(key, request(), &with));
        assert!(poll(&mut waits).is_pending());
        ground.place.clock.advance(LEASE);
        as_fresh(block_on(waits).unwrap())
    }),
    ("a batch", |ground, store, key| {
        ground.place.clock.advance(LEASE);
        let with = ReserveOptions::new().on_interrupted(OnInterrupted::TakeOverLapsed);
        let asks = [Ask::new(key, request()).options(with), Ask::new(key, request())];
        let mut told = store.reserve_batch(&asks).unwrap();
        assert!(matches!(told.pop(), Some(Ok(Reserve::InFlight(_)))));
        as_fresh(told.pop().unwrap().unwrap())
    }),
    ("a task with a handle", |ground, store, key| {
        ground.place.clock.advance(LEASE);
        as_fresh(block_on(interrupted(store, key).take_over_async()).unwrap())
    }),
];

/// Rows O1 and O2.
#[test]
fn an_overtaken_owner_changes_nothing_whoever_took_over_and_however_it_ends() {
    on_every_ground(|ground| {
        let store = ground.open();
        let mut done = Vec::new();
        for (heir, take_over) in HEIRS {
            for (end, act) in ENDS {
                let key = key(format!("{heir}, {end}"));
                let old = fresh(&store, &key);
                let view = old.attempt_view();
                let new = take_over(ground, &store, &key);
                assert!(new.attempt() == 2 && new.token() > old.token());
                let before = snapshot(&store, &key);
                act(&store, old);
                assert_eq!(block_on(view.renew_async(LEASE)).unwrap(), Completion::Superseded);
                assert_eq!(snapshot(&store, &key), before, "after {end}");
                let Reserve::InFlight(running) = reserve(&store, &key) else { panic!("{heir} is at work") };
                assert_eq!(running.info().token, new.token());
                assert_eq!(new.complete(b"by the heir").unwrap(), Completion::Done);
                done.push(key);
            }
        }
        for after in ground.after_crashes() {
            for key in &done {
                assert_eq!(replays(&after, key, b"by the heir").attempt(), 2);
            }
        }
    });
}

/// Row O3, after the lapse was written and told.
#[test]
fn a_late_completion_counts_from_its_own_moment_by_a_batch_a_task_and_who_reattached() {
    on_every_ground(|ground| {
        let store = ground.open();
        type Act = fn(&Store, Reservation);
        let ends: [Named<Act>; 3] = [
            ("a batch", |store, owner| {
                let stored = store.complete_batch([(owner, b"late".to_vec())]);
                assert!(matches!(stored[..], [Ok(Completion::Done)]), "{stored:?}");
            }),
            ("a task", |_, owner| assert_eq!(block_on(owner.complete_async(b"late")).unwrap(), Completion::Done)),
            ("who reattached", |store, owner| {
                let key = owner.key().clone();
                let token = owner.detach(LEASE).unwrap();
                let again = store.reattach(&key, token).unwrap();
                assert_eq!(again.complete(b"late").unwrap(), Completion::Done);
            }),
        ];
        let owners = ends.map(|(name, end)| (fresh(&store, &key(name)), end));
        ground.place.clock.advance(LEASE + WINDOW);
        for (owner, end) in owners {
            assert_eq!(interrupted(&store, owner.key()).cause(), Cause::LeaseLapsed);
            end(&store, owner);
        }
        ground.place.clock.advance(WINDOW - MS);
        for (name, _) in ends {
            replays(&store, &key(name), b"late");
        }
        let crashed = ground.after_crashes();
        for after in &crashed {
            for (name, _) in ends {
                replays(after, &key(name), b"late");
            }
        }
        ground.place.clock.advance(MS);
        for after in crashed.iter().chain([&store]) {
            for (name, _) in ends {
                assert_eq!(state(after, &key(name)), None, "{name}");
            }
        }
    });
}

/// Row O4, where a token can still be used once its guard is gone: by `reattach`, by a view, by a handle.
#[test]
fn a_token_of_an_earlier_attempt_does_nothing_by_reattaching_by_a_view_or_by_a_handle() {
    on_every_ground(|ground| {
        let store = ground.open();
        let key = key("k");
        let first = fresh(&store, &key);
        let view = first.attempt_view();
        let first = first.detach(LEASE).unwrap();
        ground.place.clock.advance(LEASE);
        let stale: [Interrupted; 3] = [(); 3].map(|()| interrupted(&store, &key));
        let second = as_fresh(interrupted(&store, &key).take_over().unwrap());
        let second = second.detach(LEASE).unwrap();
        let unchanged = |store: &Store, stale: [Interrupted; 3], expect: &str| {
            let before = snapshot(store, &key);
            assert!(matches!(store.reattach(&key, first), Err(NotReattached::Superseded)));
            assert!(matches!(block_on(store.reattach_async(&key, first)), Err(NotReattached::Superseded)));
            assert_eq!(view.renew(LEASE).unwrap(), Completion::Superseded);
            assert_eq!(view.save_checkpoint(b"late").unwrap(), Completion::Superseded);
            let [one, two, three] = stale;
            let told = one.take_over().unwrap();
            assert!(format!("{told:?}").starts_with(expect), "{told:?}");
            assert_eq!(block_on(two.resolve_async(b"late")).unwrap(), Completion::Superseded);
            assert_eq!(block_on(three.release_async()).unwrap(), Completion::Superseded);
            assert_eq!(snapshot(store, &key), before);
        };
        // The second attempt is detached and running, then interrupted, then done.
        unchanged(&store, stale, "InFlight");
        let stale = [(); 3].map(|()| {
            as_interrupted({
                ground.place.clock.advance(LEASE);
                reserve(&store, &key)
            })
        });
        let third = as_fresh(interrupted(&store, &key).take_over().unwrap());
        drop(third);
        unchanged(&store, stale, "Interrupted");
        assert!(matches!(store.reattach(&key, second), Err(NotReattached::Superseded)));
        for after in ground.after_crashes() {
            for token in [first, second] {
                assert!(matches!(after.reattach(&key, token), Err(NotReattached::Superseded)));
            }
            let stop = interrupted(&after, &key);
            assert_eq!(stop.attempt, 3);
            assert_eq!(stop.resolve(b"found out").unwrap(), Completion::Done);
            for token in [first, second] {
                assert!(matches!(after.reattach(&key, token), Err(NotReattached::Superseded)));
            }
            replays(&after, &key, b"found out");
        }
    });
}

/// Row O5, renewed by a view as a task while others wait.
#[test]
fn who_waits_for_work_that_is_renewed_at_every_half_lease_is_never_told_that_it_was_interrupted() {
    on_every_ground(|ground| {
        let store = ground.open();
        let key = key("k");
        let owner = fresh(&store, &key);
        let view: Attempt = owner.attempt_view();
        let mut waits: Vec<_> =
            (0..3).map(|_| Box::pin(store.reserve_with_async(&key, request(), &waiting()))).collect();
        assert!(waits.iter_mut().all(|task| poll(task).is_pending()));
        for _ in 0..6 {
            ground.place.clock.advance(LEASE / 2);
            assert_eq!(block_on(view.renew_async(LEASE)).unwrap(), Completion::Done);
            assert!(waits.iter_mut().all(|task| poll(task).is_pending()));
            assert!(matches!(reserve(&store, &key), Reserve::InFlight(_)));
        }
        ground.place.clock.advance(LEASE - MS);
        assert!(matches!(reserve(&store, &key), Reserve::InFlight(_)));
        assert_eq!(owner.complete(b"paid").unwrap(), Completion::Done);
        for task in waits {
            assert_eq!(as_replay(block_on(task).unwrap()).body(), Body::Kept(b"paid"));
        }
        assert_eq!((store.stats().fresh, store.stats().interrupted), (1, 0));
    });
}

/// Row O6: whoever had a part in it acts after the completion.
#[test]
fn a_response_stays_whatever_the_error_path_of_its_caller_does() {
    on_every_ground(|ground| {
        let store = ground.open();
        let key = key("k");
        let first = fresh(&store, &key);
        let view = first.attempt_view();
        ground.place.clock.advance(LEASE);
        let [one, two, three] = [(); 3].map(|()| interrupted(&store, &key));
        let listed = store.interrupted().next().unwrap().unwrap();
        let token = first.detach(LEASE).unwrap();
        let second = store.reattach(&key, token).unwrap();
        let other_view = second.attempt_view();
        assert_eq!(second.complete(b"paid").unwrap(), Completion::Done);
        for view in [view, other_view] {
            assert_eq!(view.renew(LEASE).unwrap(), Completion::Superseded);
            assert_eq!(block_on(view.save_checkpoint_async(b"late")).unwrap(), Completion::Superseded);
        }
        assert_eq!(one.release().unwrap(), Completion::Superseded);
        assert_eq!(two.resolve(b"other").unwrap(), Completion::Superseded);
        assert_eq!(as_replay(three.take_over().unwrap()).body(), Body::Kept(b"paid"));
        assert_eq!(listed.release().unwrap(), Completion::Superseded);
        assert!(matches!(store.reattach(&key, token), Err(NotReattached::Superseded)));
        for after in ground.after_crashes().iter().chain([&store]) {
            replays(after, &key, b"paid");
        }
    });
}

/// Row O7, for each call that stores an outcome.
#[test]
fn an_outcome_that_cannot_be_written_is_told_by_every_call_and_the_key_is_never_free() {
    type Act = fn(&Store, &Key);
    let calls: [Named<Act>; 7] = [
        ("complete_async", |store, key| {
            let not_stored = block_on(fresh(store, key).complete_async(b"paid")).unwrap_err();
            assert_eq!(not_stored.error.kind(), ErrorKind::Poisoned);
        }),
        ("complete_batch", |store, key| {
            let stored = store.complete_batch([(fresh(store, key), b"paid".to_vec())]);
            assert_eq!(stored[0].as_ref().unwrap_err().error.kind(), ErrorKind::Poisoned);
        }),
        ("complete_without_body", |store, key| {
            let not_stored = fresh(store, key).complete_without_body(b"").unwrap_err();
            assert_eq!(not_stored.error.kind(), ErrorKind::Poisoned);
        }),
        ("once", |store, key| {
            let told = store.once(key, request(), |_| Ok::<_, Failed<std::io::Error>>(b"paid".to_vec()));
            let Err(OnceError::NotStored { response, .. }) = told else { panic!("{told:?}") };
            assert_eq!(response, b"paid");
        }),
        ("once, nothing happened", |store, key| {
            let told = store.once(key, request(), |_| Err::<Vec<u8>, _>(Failed::NothingHappened("no")));
            assert!(matches!(told, Err(OnceError::Store(_))), "{told:?}");
        }),
        ("resolve", |store, key| {
            drop(fresh(store, key));
            assert_eq!(interrupted(store, key).resolve(b"paid").unwrap_err().kind(), ErrorKind::Poisoned);
        }),
        ("a drop that may release", |store, key| {
            let with = ReserveOptions::new().on_drop(OnDrop::Release);
            let owner = as_fresh(store.reserve_with(key, request(), &with).unwrap());
            assert_eq!(owner.complete(b"paid").unwrap_err().error.kind(), ErrorKind::Poisoned);
        }),
    ];
    for (name, call) in calls {
        for step in 0..2 {
            let (disk, clock) = (SimDisk::new(), ManualClock::default());
            let plain = || options(&clock).durability(Durability::PowerLoss);
            let store = testing::open(disk.clone(), plain(), 1).unwrap();
            let key = key("k");
            // The reservation takes a write and a sync; the fault comes behind it.
            let from = disk.steps() + 2 + step;
            disk.fail_from(from, EIO);
            let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| call(&store, &key)));
            // Whose outcome takes other steps has said it of one of them.
            let takes_two = name != "resolve" && name != "once, nothing happened";
            assert!(told.is_ok() || !takes_two, "{name}, step {step}");
            // Where the fault came after it, the key was given back.
            let free = name == "once, nothing happened" && step > 0;
            let again = store.reserve(&key, request());
            assert!(free || !matches!(again, Ok(Reserve::Fresh(_))), "{name}, step {step}: {again:?}");
            drop((again, store));
            disk.heal();
            for image in [disk.kill(), disk.crash_all_old(), disk.crash_all_new()] {
                let after = testing::open(image, plain(), 2).unwrap();
                let found = state(&after, &key);
                assert!(free || matches!(found, Some(KeyState::Interrupted | KeyState::Done)), "{name}: {found:?}");
            }
        }
    }
}

/// Row O8: tokens of batches, hand-overs and take-overs, of records that were lost and of ones that were not.
#[test]
fn every_token_after_a_crash_is_larger_than_every_one_before_it_however_it_was_given() {
    for durability in [Durability::PowerLoss, Durability::ProcessCrash, Durability::Interval(MS * 100)] {
        let clock = ManualClock::default();
        let mut disk = SimDisk::new();
        let (mut largest, mut seed) = (0, 0);
        for _ in 0..6 {
            seed += 1;
            let store = testing::open(disk.clone(), options(&clock).durability(durability), seed).unwrap();
            let quick = ReserveOptions::new().durability(Durability::ProcessCrash);
            let asks =
                ["a", "b", "c"].map(|id| Ask::new(&key(format!("{id} {seed}")), request()).options(quick.clone()));
            let mut guards: Vec<_> =
                store.reserve_batch(&asks).unwrap().into_iter().map(|told| as_fresh(told.unwrap())).collect();
            let handed = key(format!("handed {seed}"));
            let owner = fresh(&store, &handed);
            let mut waits = Box::pin(store.reserve_with_async(&handed, request(), &waiting()));
            assert!(poll(&mut waits).is_pending());
            assert_eq!(owner.release().unwrap(), Completion::Done);
            guards.push(as_fresh(block_on(waits).unwrap()));
            drop(guards.remove(0));
            guards.push(as_fresh(interrupted(&store, asks_key(seed)).take_over().unwrap()));
            for guard in &guards {
                let token = guard.token().to_u64();
                assert!(token > largest, "{durability:?}: {token} after {largest}");
            }
            largest = guards.iter().map(|guard| guard.token().to_u64()).max().unwrap();
            disk = if seed % 2 == 0 { disk.crash_all_old() } else { disk.kill() };
            drop((guards, store));
        }
    }

    fn asks_key(seed: u64) -> &'static Key {
        Box::leak(Box::new(key(format!("a {seed}"))))
    }
}

/// Row O9: handles of a list, and an owner that comes back in ways of its own.
#[test]
fn a_listed_handle_is_superseded_by_an_owner_that_came_back_in_whatever_way() {
    type Act = fn(&Store, Reservation) -> Option<Reservation>;
    let backs: [Named<Act>; 5] = [
        ("renew_async", |_, owner| {
            assert_eq!(block_on(owner.renew_async(LEASE)).unwrap(), Completion::Done);
            Some(owner)
        }),
        ("save_checkpoint_async", |_, owner| {
            assert_eq!(block_on(owner.save_checkpoint_async(b"half")).unwrap(), Completion::Done);
            Some(owner)
        }),
        ("detach", |_, owner| {
            let _token = owner.detach(LEASE).unwrap();
            None
        }),
        ("reattach", |store, owner| {
            let key = owner.key().clone();
            let token = owner.detach(LEASE).unwrap();
            Some(store.reattach(&key, token).unwrap())
        }),
        ("complete_batch", |store, owner| {
            assert!(matches!(store.complete_batch([(owner, b"paid".to_vec())])[..], [Ok(Completion::Done)]));
            None
        }),
    ];
    on_every_ground(|ground| {
        let store = ground.open();
        for (name, come_back) in backs {
            let key = key(name);
            let owner = fresh(&store, &key);
            ground.place.clock.advance(LEASE);
            let listed = || store.interrupted().map(Result::unwrap).find(|stop| *stop.key() == key).unwrap();
            let [one, two, three] = [(); 3].map(|()| listed());
            let owner = come_back(&store, owner);
            let before = snapshot(&store, &key);
            let told = one.take_over().unwrap();
            assert!(matches!(told, Reserve::InFlight(_) | Reserve::Replay(_)), "{name}: {told:?}");
            assert_eq!(two.resolve(b"other").unwrap(), Completion::Superseded, "{name}");
            assert_eq!(three.release().unwrap(), Completion::Superseded, "{name}");
            assert_eq!(snapshot(&store, &key), before, "{name}");
            drop(owner);
        }
    });
}

/// Row O10: the free key goes to another request that waited, or to one in a batch; the shorter retention is a
/// waiter's.
#[test]
fn a_key_that_was_given_back_stands_for_the_next_request_and_the_shorter_retention_wins() {
    on_every_ground(|ground| {
        let store = ground.open();
        let key = key("k");
        let old = fresh(&store, &key);
        let (view, token) = (old.attempt_view(), old.token());
        assert_eq!(old.release().unwrap(), Completion::Done);
        let asks = [Ask::new(&key, other_request()), Ask::new(&key, request())];
        let told = store.reserve_batch(&asks).unwrap();
        let mut told = told.into_iter().map(Result::unwrap);
        let owner = as_fresh(told.next().unwrap());
        assert!(matches!(told.next(), Some(Reserve::Mismatch(_))));
        assert_eq!(view.renew(LEASE).unwrap(), Completion::Superseded);
        assert!(matches!(store.reattach(&key, token), Err(NotReattached::Superseded)));

        // Two retentions, the shorter one by a waiter that takes over.
        let short = ReserveOptions::new().retention(MS * 50).on_interrupted(OnInterrupted::TakeOver).wait(LEASE);
        let mut waits = Box::pin(store.reserve_with_async(&key, other_request(), &short));
        assert!(poll(&mut waits).is_pending());
        drop(owner);
        let next = as_fresh(block_on(waits).unwrap());
        assert_eq!(next.attempt(), 2);
        assert_eq!(next.complete(b"paid").unwrap(), Completion::Done);
        ground.place.clock.advance(MS * 49);
        assert!(matches!(store.reserve(&key, other_request()).unwrap(), Reserve::Replay(_)));
        ground.place.clock.advance(MS);
        for after in ground.after_crashes().iter().chain([&store]) {
            assert_eq!(state(after, &key), None);
            assert_eq!(fresh(after, &key).attempt(), 1);
        }
    });
}

/// Row O11: a later attempt that ends without an effect of its own.
#[test]
fn a_later_attempt_never_frees_the_key_by_once_by_a_batch_or_by_a_hand_over() {
    let take_over = || ReserveOptions::new().on_interrupted(OnInterrupted::TakeOver);
    type Act = fn(&Store, &Key, &ReserveOptions);
    let ends: [Named<Act>; 5] = [
        ("once", |store, key, with| {
            let told = store.once_with(key, request(), with, |attempt| {
                assert_eq!(attempt.number(), 2);
                Err::<Vec<u8>, _>(Failed::NothingHappened("no"))
            });
            assert!(matches!(told, Err(OnceError::Work("no"))), "{told:?}");
        }),
        ("a batch that is dropped", |store, key, with| {
            drop(store.reserve_batch(&[Ask::new(key, request()).options(with.clone())]).unwrap());
        }),
        ("a batch that nobody hears", |store, key, with| {
            let mut batch = Box::pin(store.reserve_batch_async(&[Ask::new(key, request()).options(with.clone())]));
            drop(poll(&mut batch));
        }),
        ("a drop that may release", |store, key, with| {
            let with = with.clone().on_drop(OnDrop::Release);
            drop(as_fresh(store.reserve_with(key, request(), &with).unwrap()));
        }),
        ("a hand-over that nobody takes", |store, key, with| {
            let second = as_fresh(store.reserve_with(key, request(), with).unwrap());
            let waits_with = with.clone().wait(LEASE);
            let mut waits = Box::pin(store.reserve_with_async(key, request(), &waits_with));
            assert!(poll(&mut waits).is_pending());
            drop(second);
            drop(waits);
        }),
    ];
    on_every_ground(|ground| {
        let store = ground.open();
        for (name, end) in ends {
            let key = key(name);
            drop(fresh(&store, &key));
            end(&store, &key, &take_over());
            assert!(interrupted(&store, &key).attempt >= 2, "{name}");
        }
        for after in ground.after_crashes() {
            for (name, _) in ends {
                let attempt = interrupted(&after, &key(name)).attempt;
                // What nobody heard of need not be on the disk, but then the attempt before it is.
                assert!(attempt >= 1, "{name}: {attempt}");
            }
        }
    });
}

/// Row O12: a thread and a task, and over a reopening.
#[test]
fn of_a_thread_and_a_task_that_reattach_at_once_one_holds_also_after_a_reopen() {
    on_every_ground(|ground| {
        let key = key("k");
        let token = {
            let store = ground.open();
            let token = fresh(&store, &key).detach(10 * LEASE).unwrap();
            store.close(Duration::ZERO).unwrap();
            token
        };
        let store = ground.open();
        let (one, two) = thread::scope(|threads| {
            let thread = threads.spawn(|| store.reattach(&key, token));
            let task = block_on(store.reattach_async(&key, token));
            (thread.join().unwrap(), task)
        });
        let holder = match (one, two) {
            (Ok(holder), Err(NotReattached::InFlight)) | (Err(NotReattached::InFlight), Ok(holder)) => holder,
            answers => panic!("{answers:?}"),
        };
        // The holder dies with its process: its lease is not durable any more.
        for after in ground.after_crashes() {
            let stop = interrupted(&after, &key);
            assert_eq!((stop.cause(), stop.token), (Cause::Crash, token));
            assert!(matches!(after.reattach(&key, token), Err(NotReattached::Superseded)));
        }
        drop(holder);
        assert_eq!(interrupted(&store, &key).cause(), Cause::Dropped);
        assert!(matches!(block_on(store.reattach_async(&key, token)), Err(NotReattached::Superseded)));
    });
}

/// Rows O2 and S4 by `once`: work that outlives its lease is told so, with its response.
#[test]
fn work_that_was_overtaken_gets_its_response_back() {
    on_every_ground(|ground| {
        let store = ground.open();
        let key = key("k");
        let told = store.once(&key, request(), |attempt| {
            assert_eq!(attempt.number(), 1);
            ground.place.clock.advance(LEASE);
            let next = as_fresh(interrupted(&store, attempt.key()).take_over().unwrap());
            assert_eq!(next.complete(b"").unwrap(), Completion::Done);
            Ok::<_, Failed<std::io::Error>>(b"late".to_vec())
        });
        let Err(OnceError::Superseded { response }) = told else { panic!("{told:?}") };
        assert_eq!(response, b"late");
        let again = store.once(&key, request(), |_| Ok::<_, Failed<std::io::Error>>(b"again".to_vec()));
        let Ok(Outcome::Replayed(response)) = again else { panic!("{again:?}") };
        assert_eq!((response.body(), response.attempt()), (Body::Kept(b""), 2));
    });
}

/// A batch takes guards of this store; one of another store is completed there, and nobody waits for ever.
#[test]
fn a_batch_of_guards_of_two_stores_ends() {
    let (disk, clock) = (SimDisk::new(), ManualClock::default());
    let plain = || options(&clock).durability(Durability::PowerLoss);
    let store = testing::open(disk, plain(), 1).unwrap();
    let other = testing::open(SimDisk::new(), plain(), 2).unwrap();
    for n in 0..50 {
        assert_eq!(fresh(&other, &key(format!("{n}"))).complete(&[1; 1000]).unwrap(), Completion::Done);
    }
    let here = fresh(&store, &key("k"));
    let there = fresh(&other, &key("k"));
    let stored = crate::tasks::ends(move || {
        let stored = store.complete_batch([(here, b"here".to_vec()), (there, b"there".to_vec())]);
        stored.into_iter().map(|stored| stored.is_ok()).collect::<Vec<_>>()
    });
    assert_eq!(stored, [true, true]);
    let mut again = Box::pin(other.reserve_async(&key("k"), request()));
    assert!(matches!(ready(&mut again).unwrap(), Reserve::Replay(_)));
}
