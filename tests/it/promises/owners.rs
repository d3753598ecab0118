//! P6 to P8: who may act on a key, until when, and what becomes of it without an owner.

use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use keyonce::testing::{ManualClock, SimDisk};
use keyonce::{
    Body, Cause, Completion, Durability, ErrorKind, Failed, Key, KeyState, NotReattached, OnDrop, OnInterrupted,
    OnceError, Outcome, Reserve, ReserveOptions, Store,
};

use crate::place::{
    LEASE, MS, RESPONSE_BYTES_MAX, WINDOW, as_fresh, as_interrupted, as_replay, everywhere, fresh, info, interrupted,
    key, other_request, replays, request, reserve, snapshot, state,
};

use super::{CHECKPOINT_BYTES_MAX, Named, open_on};

// P6: only the latest owner acts.

#[test]
fn p6_only_the_latest_owner_acts() {
    let acts: [Named<fn(keyonce::Reservation)>; 7] = [
        ("complete", |old| assert_eq!(old.complete(b"late").unwrap(), Completion::Superseded)),
        ("complete_without_body", |old| assert_eq!(old.complete_without_body(b"").unwrap(), Completion::Superseded)),
        ("release", |old| assert_eq!(old.release().unwrap(), Completion::Superseded)),
        ("renew", |old| assert_eq!(old.renew(LEASE).unwrap(), Completion::Superseded)),
        ("save_checkpoint", |old| assert_eq!(old.save_checkpoint(b"late").unwrap(), Completion::Superseded)),
        ("detach", |old| drop(old.detach(LEASE).unwrap_err())),
        ("drop", drop),
    ];
    everywhere(|place| {
        let store = place.open();
        for (name, act) in acts {
            for completed in [false, true] {
                let key = key(format!("{name}-{completed}"));
                let old = fresh(&store, &key);
                let view = old.attempt_view();
                place.clock.advance(LEASE);
                let new = as_fresh(interrupted(&store, &key).take_over().unwrap());
                assert!(new.token() > old.token());
                let mut new = Some(new);
                if completed {
                    assert_eq!(new.take().unwrap().complete(b"by the new owner").unwrap(), Completion::Done);
                }
                let before = snapshot(&store, &key);
                act(old);
                assert_eq!(view.renew(LEASE).unwrap(), Completion::Superseded);
                assert_eq!(view.save_checkpoint(b"late").unwrap(), Completion::Superseded);
                assert_eq!(snapshot(&store, &key), before, "after {name}, completed: {completed}");
                if let Some(new) = new {
                    assert_eq!(new.complete(b"by the new owner").unwrap(), Completion::Done);
                }
                replays(&store, &key, b"by the new owner");
                let killed = place.open_after_kill();
                replays(&killed, &key, b"by the new owner");
            }
        }
    });
}

#[test]
fn p6_a_completed_key_is_never_deleted_by_its_owners_release() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let owner = fresh(&store, &key);
        let view = owner.attempt_view();
        assert_eq!(owner.complete(b"paid").unwrap(), Completion::Done);
        assert_eq!(view.renew(LEASE).unwrap(), Completion::Superseded);
        assert_eq!(view.save_checkpoint(b"").unwrap(), Completion::Superseded);
        let token = info(&store, &key).token;
        assert!(matches!(store.reattach(&key, token), Err(NotReattached::Superseded)));
        replays(&store, &key, b"paid");
    });
}

#[test]
fn p6_a_handle_of_an_interruption_is_superseded_when_the_owner_came_back() {
    everywhere(|place| {
        let store = place.open();
        for completes in [false, true] {
            let key = key(format!("{completes}"));
            let owner = fresh(&store, &key);
            place.clock.advance(LEASE);
            let handles: Vec<_> = (0..3).map(|_| interrupted(&store, &key)).collect();
            let mut owner = Some(owner);
            if completes {
                assert_eq!(owner.take().unwrap().complete(b"paid").unwrap(), Completion::Done);
            } else {
                assert_eq!(owner.as_ref().unwrap().renew(LEASE).unwrap(), Completion::Done);
            }
            let before = snapshot(&store, &key);
            let [one, two, three] = <[_; 3]>::try_from(handles).unwrap();
            match (one.take_over().unwrap(), completes) {
                (Reserve::InFlight(_), false) | (Reserve::Replay(_), true) => {}
                (other, _) => panic!("{other:?}"),
            }
            assert_eq!(two.resolve(b"found out").unwrap(), Completion::Superseded);
            assert_eq!(three.release().unwrap(), Completion::Superseded);
            assert_eq!(snapshot(&store, &key), before);
            if let Some(owner) = owner {
                assert_eq!(owner.complete(b"paid").unwrap(), Completion::Done);
            }
            replays(&store, &key, b"paid");
        }
    });
}

#[test]
fn p6_of_two_handles_of_one_interruption_one_takes_over() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        drop(fresh(&store, &key));
        let (one, two) = (interrupted(&store, &key), interrupted(&store, &key));
        let owner = as_fresh(one.take_over().unwrap());
        assert!(matches!(two.take_over().unwrap(), Reserve::InFlight(_)));
        assert_eq!(owner.attempt_view().number(), 2);
    });
}

#[test]
fn p6_an_old_token_never_acts_again_once_the_key_was_free() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let first = fresh(&store, &key);
        let (token, view) = (first.token(), first.attempt_view());
        assert_eq!(first.release().unwrap(), Completion::Done);
        let second = as_fresh(store.reserve(&key, other_request()).unwrap());
        assert!(second.token() > token);
        assert_eq!(second.attempt_view().number(), 1, "attempts count anew once the key was free");
        assert_eq!(view.renew(LEASE).unwrap(), Completion::Superseded);
        assert_eq!(view.save_checkpoint(b"old").unwrap(), Completion::Superseded);
        assert!(matches!(store.reattach(&key, token), Err(NotReattached::Superseded)));
        assert_eq!(second.complete(b"other").unwrap(), Completion::Done);
        let killed = place.open_after_kill();
        for store in [&store, &killed] {
            assert!(matches!(store.reattach(&key, token), Err(NotReattached::Superseded)));
            assert_eq!(as_replay(store.reserve(&key, other_request()).unwrap()).body(), Body::Kept(b"other"));
        }
    });
}

/// A short retention over a long one: reserved for the window, taken over for a minute, completed, expired, reopened.
#[test]
fn p6_a_record_of_a_short_retention_hides_the_long_one_beneath_it_also_after_a_reopen() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        drop(fresh(&store, &key));
        let minute = ReserveOptions::new().retention(Duration::from_secs(60)).on_interrupted(OnInterrupted::TakeOver);
        let owner = as_fresh(store.reserve_with(&key, request(), &minute).unwrap());
        assert_eq!(owner.complete(b"paid").unwrap(), Completion::Done);
        place.clock.advance(Duration::from_secs(60));
        let killed = place.open_after_kill();
        store.close(Duration::ZERO).unwrap();
        drop(store);
        for store in [killed, place.open()] {
            assert_eq!(state(&store, &key), None);
            assert_eq!(fresh(&store, &key).attempt_view().number(), 1);
        }
    });
}

#[test]
fn p6_tokens_grow_across_closes_and_kills() {
    everywhere(|place| {
        let mut last = None;
        for run in 0..4 {
            let store = place.open();
            let mut tokens = Vec::new();
            for at in 0..3 {
                let owner = fresh(&store, &key(format!("{run}-{at}")));
                tokens.push(owner.token());
                assert_eq!(owner.complete(b"").unwrap(), Completion::Done);
            }
            let killed = place.open_after_kill();
            tokens.push(fresh(&killed, &key(format!("{run}-killed"))).token());
            assert!(tokens.is_sorted_by(|a, b| a < b) && last < tokens.first().copied(), "{last:?} then {tokens:?}");
            last = tokens.get(2).copied();
        }
    });
}

#[test]
fn p6_a_token_whose_record_was_lost_is_never_given_again() {
    let (disk, clock) = (SimDisk::new(), ManualClock::default());
    let store = open_on(&disk, &clock, Durability::ProcessCrash, 1);
    let lost: Vec<_> = (0..20).map(|at| fresh(&store, &key(at.to_string())).token()).collect();
    let largest = *lost.iter().max().unwrap();
    for (at, image) in (2..).zip(disk.images(24)) {
        let after = open_on(&image, &clock, Durability::ProcessCrash, 2 * at);
        let token = fresh(&after, &key("new")).token();
        assert!(token > largest, "{token} after {largest}");
        let again = open_on(&image.crash_all_old(), &clock, Durability::ProcessCrash, 2 * at + 1);
        assert!(fresh(&again, &key("newer")).token() > token);
    }
}

// P7: a late finish counts.

#[test]
fn p7_a_late_finish_counts_and_retention_starts_then() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let owner = fresh(&store, &key);
        place.clock.advance(3 * LEASE);
        assert_eq!(interrupted(&store, &key).cause(), Cause::LeaseLapsed);
        assert_eq!(owner.complete(b"late").unwrap(), Completion::Done);
        let response = replays(&store, &key, b"late");
        assert_eq!(response.expires_at(), response.completed_at() + WINDOW);
        place.clock.advance(WINDOW - MS);
        replays(&store, &key, b"late");
        place.clock.advance(MS);
        assert_eq!(state(&store, &key), None);
    });
}

#[test]
fn p7_the_lease_ends_at_its_millisecond_and_a_renewal_brings_the_owner_back() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let owner = fresh(&store, &key);
        place.clock.advance(LEASE - MS);
        assert_eq!(state(&store, &key), Some(KeyState::InFlight));
        place.clock.advance(MS);
        assert_eq!(state(&store, &key), Some(KeyState::Interrupted));
        assert_eq!(owner.renew(LEASE).unwrap(), Completion::Done);
        assert_eq!(state(&store, &key), Some(KeyState::InFlight));
        place.clock.advance(LEASE);
        assert_eq!(state(&store, &key), Some(KeyState::Interrupted));
        assert_eq!(owner.save_checkpoint(b"back").unwrap(), Completion::Done);
        assert_eq!(state(&store, &key), Some(KeyState::InFlight));
        assert_eq!(owner.complete(b"paid").unwrap(), Completion::Done);
    });
}

#[test]
fn p7_work_of_many_leases_that_is_renewed_is_never_interrupted() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let owner = fresh(&store, &key);
        for _ in 0..6 {
            place.clock.advance(LEASE / 2);
            assert!(matches!(reserve(&store, &key), Reserve::InFlight(_)));
            assert_eq!(owner.renew(LEASE).unwrap(), Completion::Done);
        }
        assert_eq!(owner.complete(b"once").unwrap(), Completion::Done);
        replays(&store, &key, b"once");
    });
}

// P8: no silent second run.

#[test]
fn p8_no_silent_second_run_however_the_owner_ends() {
    let ends: [Named<fn(keyonce::Reservation)>; 4] = [
        ("drop", drop),
        ("interrupt", keyonce::Reservation::interrupt),
        ("panic", |owner| {
            let panicked = catch_unwind(AssertUnwindSafe(move || {
                let _owner = owner;
                std::panic::resume_unwind(Box::new("the work panics"));
            }));
            assert!(panicked.is_err());
        }),
        ("question mark", |owner| {
            let work = || -> Result<(), keyonce::Error> {
                assert_eq!(owner.complete(&[0; RESPONSE_BYTES_MAX + 1])?, Completion::Done);
                Ok(())
            };
            assert_eq!(work().unwrap_err().kind(), ErrorKind::TooLarge);
        }),
    ];
    everywhere(|place| {
        let store = place.open();
        for (name, end) in ends {
            let key = key(name);
            let owner = fresh(&store, &key);
            let token = owner.token();
            assert_eq!(owner.save_checkpoint(b"half").unwrap(), Completion::Done);
            end(owner);
            let killed = place.open_after_kill();
            for store in [&store, &killed] {
                let stop = interrupted(store, &key);
                assert_eq!((stop.token, stop.attempt, stop.checkpoint()), (token, 1, &b"half"[..]), "{name}");
                assert_eq!(stop.cause(), Cause::Dropped, "{name}");
                assert_eq!(stop.downstream_key("charge"), key.downstream_key("charge"));
            }
            assert_eq!(interrupted(&store, &key).release().unwrap(), Completion::Done);
            assert_eq!(fresh(&store, &key).release().unwrap(), Completion::Done);
        }
    });
}

#[test]
fn p8_a_second_run_needs_a_policy_and_a_lapsed_lease_a_decision() {
    let take_over = ReserveOptions::new().on_interrupted(OnInterrupted::TakeOver);
    everywhere(|place| {
        let store = place.open();
        drop(fresh(&store, &key("dropped")));
        let lapsed = fresh(&store, &key("lapsed"));
        let longer = take_over.clone().lease(2 * LEASE);
        let next = as_fresh(store.reserve_with(&key("dropped"), request(), &longer).unwrap());
        assert_eq!(next.attempt_view().number(), 2);
        place.clock.advance(LEASE);
        let stop = as_interrupted(store.reserve_with(&key("lapsed"), request(), &take_over).unwrap());
        assert_eq!(stop.cause(), Cause::LeaseLapsed);
        // After the kill the answers are the same, but that an owner that was running is known to be gone.
        let killed = place.open_after_kill();
        let third = as_fresh(killed.reserve_with(&key("dropped"), request(), &take_over).unwrap());
        assert_eq!(third.attempt_view().number(), 3);
        let stop = as_interrupted(killed.reserve_with(&key("lapsed"), request(), &take_over).unwrap());
        assert_eq!(stop.cause(), Cause::LeaseLapsed);
        let lapsed_too = ReserveOptions::new().on_interrupted(OnInterrupted::TakeOverLapsed);
        let second = as_fresh(killed.reserve_with(&key("lapsed"), request(), &lapsed_too).unwrap());
        assert_eq!(second.attempt_view().number(), 2);
        // After a close in the same process they are not.
        store.close(Duration::ZERO).unwrap();
        drop((store, lapsed, next));
        let reopened = place.open();
        for id in ["dropped", "lapsed"] {
            let stop = as_interrupted(reopened.reserve_with(&key(id), request(), &take_over).unwrap());
            assert_eq!(stop.cause(), Cause::LeaseLapsed, "{id}");
        }
    });
}

#[test]
fn p8_a_drop_frees_the_key_only_where_the_caller_said_so_and_only_a_first_attempt() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let releases = ReserveOptions::new().on_drop(OnDrop::Release);
        drop(as_fresh(store.reserve_with(&key, request(), &releases).unwrap()));
        assert_eq!(state(&store, &key), None);
        drop(fresh(&store, &key));
        let with = releases.clone().on_interrupted(OnInterrupted::TakeOver);
        let second = as_fresh(store.reserve_with(&key, request(), &with).unwrap());
        assert_eq!(second.attempt_view().number(), 2);
        drop(second);
        assert_eq!(interrupted(&store, &key).attempt, 2);
    });
}

#[test]
fn p8_a_release_at_attempt_two_leaves_the_key_interrupted() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let owner = fresh(&store, &key);
        assert_eq!(owner.save_checkpoint(b"half").unwrap(), Completion::Done);
        drop(owner);
        let second = as_fresh(interrupted(&store, &key).take_over().unwrap());
        assert_eq!(second.release().unwrap(), Completion::Done);
        let killed = place.open_after_kill();
        for store in [&store, &killed] {
            let stop = interrupted(store, &key);
            assert_eq!((stop.attempt, stop.checkpoint()), (2, &b"half"[..]));
        }
        // Who found out that nothing happened may free it.
        assert_eq!(interrupted(&store, &key).release().unwrap(), Completion::Done);
        assert_eq!(fresh(&store, &key).attempt_view().number(), 1);
    });
}

#[test]
fn p8_a_resolved_interruption_replays_what_was_found_out() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        drop(fresh(&store, &key));
        assert_eq!(interrupted(&store, &key).resolve(b"it went through").unwrap(), Completion::Done);
        replays(&store, &key, b"it went through");
        replays(&place.open_after_kill(), &key, b"it went through");
    });
}

#[test]
fn p8_detached_work_goes_on_across_a_reopen_one_holder_at_a_time() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let owner = fresh(&store, &key);
        assert_eq!(owner.save_checkpoint(b"half").unwrap(), Completion::Done);
        let token = owner.detach(2 * LEASE).unwrap();
        assert!(info(&store, &key).detached);
        let killed = place.open_after_kill();
        store.close(Duration::ZERO).unwrap();
        drop(store);
        let reopened = place.open();
        for store in [&killed, &reopened] {
            place_is_in_flight(store, &key);
            let again = store.reattach(&key, token).unwrap();
            assert_eq!((again.token(), again.attempt_view().checkpoint()), (token, &b"half"[..]));
            assert!(matches!(store.reattach(&key, token), Err(NotReattached::InFlight)));
            assert_eq!(again.complete(b"paid").unwrap(), Completion::Done);
            assert!(matches!(store.reattach(&key, token), Err(NotReattached::Superseded)));
            replays(store, &key, b"paid");
        }
    });
}

#[track_caller]
fn place_is_in_flight(store: &Store, key: &Key) {
    let Reserve::InFlight(in_flight) = reserve(store, key) else { panic!("its lease is durable") };
    assert!(in_flight.info().detached);
}

#[test]
fn p8_a_detached_lease_that_lapses_is_interrupted_and_can_be_taken_up_again() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let token = fresh(&store, &key).detach(LEASE).unwrap();
        place.clock.advance(LEASE - MS);
        place_is_in_flight(&store, &key);
        place_is_in_flight(&place.open_after_kill(), &key);
        place.clock.advance(MS);
        for store in [&store, &place.open_after_kill()] {
            assert_eq!(interrupted(store, &key).cause(), Cause::LeaseLapsed);
            let again = store.reattach(&key, token).unwrap();
            assert_eq!(state(store, &key), Some(KeyState::InFlight));
            drop(again);
            assert_eq!(interrupted(store, &key).cause(), Cause::Dropped);
            assert!(matches!(store.reattach(&key, token), Err(NotReattached::Superseded)), "it was not detached again");
        }
    });
}

#[test]
fn p8_whoever_reattached_and_dies_leaves_the_key_interrupted() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let token = fresh(&store, &key).detach(10 * LEASE).unwrap();
        let again = store.reattach(&key, token).unwrap();
        let killed = place.open_after_kill();
        assert_eq!(interrupted(&killed, &key).token, again.token());
        drop(again);
        assert_eq!(interrupted(&store, &key).token, token);
    });
}

#[test]
fn p8_reattach_takes_only_the_latest_detached_reservation() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let owner = fresh(&store, &key);
        let never = keyonce::Token::from_u64(owner.token().to_u64() + 8);
        assert!(matches!(store.reattach(&key, owner.token()), Err(NotReattached::InFlight)));
        assert!(matches!(store.reattach(&key, never), Err(NotReattached::Superseded)));
        assert!(matches!(store.reattach(&crate::place::key("b"), owner.token()), Err(NotReattached::Superseded)));
        let token = owner.detach(LEASE).unwrap();
        place.clock.advance(LEASE);
        let next = as_fresh(interrupted(&store, &key).take_over().unwrap());
        assert!(matches!(store.reattach(&key, token), Err(NotReattached::Superseded)));
        assert_eq!(next.complete(b"").unwrap(), Completion::Done);
    });
}

#[test]
fn p8_once_runs_the_work_once_and_says_what_became_of_it() {
    everywhere(|place| {
        let store = place.open();
        let runs = std::cell::Cell::new(0);
        let once = |id: &str, result: Result<Vec<u8>, Failed<&'static str>>| {
            store.once(&key(id), request(), |attempt| {
                runs.set(runs.get() + 1);
                assert_eq!(attempt.key(), &key(id));
                result
            })
        };
        // Ok: ran, then replayed.
        assert!(matches!(once("ok", Ok(b"paid".to_vec())), Ok(Outcome::Ran(body)) if body == b"paid"));
        let Ok(Outcome::Replayed(response)) = once("ok", Ok(b"again".to_vec())) else { panic!("it was done") };
        assert_eq!((response.body(), runs.get()), (Body::Kept(&b"paid"[..]), 1));
        // NothingHappened: free again.
        let refused = once("nothing", Err(Failed::NothingHappened("no")));
        assert!(matches!(refused, Err(OnceError::Work("no"))));
        assert!(matches!(once("nothing", Ok(Vec::new())), Ok(Outcome::Ran(_))));
        // Unknown: interrupted.
        assert!(matches!(once("unknown", Err("lost".into())), Err(OnceError::Work("lost"))));
        assert!(matches!(once("unknown", Ok(Vec::new())), Err(OnceError::Interrupted(_))));
        // A panic: interrupted.
        let panics = || {
            store.once(&key("panic"), request(), |_| -> Result<Vec<u8>, Failed<Infallible>> {
                std::panic::resume_unwind(Box::new("the work panics"))
            })
        };
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        assert_eq!(interrupted(&store, &key("panic")).cause(), Cause::Dropped);
        // Too large to be kept: done all the same.
        let large = vec![1; RESPONSE_BYTES_MAX + 1];
        assert!(matches!(once("large", Ok(large.clone())), Ok(Outcome::Ran(body)) if body == large));
        let Ok(Outcome::Replayed(response)) = once("large", Ok(Vec::new())) else { panic!("it was done") };
        assert_eq!(response.body(), Body::NotKept { reference: b"" });
        // Another owner, another request.
        let before = runs.get();
        let owner = fresh(&store, &key("owned"));
        assert!(matches!(once("owned", Ok(Vec::new())), Err(OnceError::InFlight(_))));
        drop(owner);
        let other =
            store.once(&key("ok"), other_request(), |_| -> Result<_, Failed<Infallible>> { panic!("must not run") });
        assert!(matches!(other, Err(OnceError::Mismatch(_))));
        assert_eq!(runs.get(), before, "work that was not to be done");
    });
}

#[test]
fn p8_once_says_when_somebody_took_over_meanwhile() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let outcome = store.once(&key, request(), |_| -> Result<_, Failed<Infallible>> {
            place.clock.advance(LEASE);
            let next = as_fresh(interrupted(&store, &key).take_over().unwrap());
            assert_eq!(next.complete(b"by the next").unwrap(), Completion::Done);
            Ok(b"by the first".to_vec())
        });
        assert!(matches!(outcome, Err(OnceError::Superseded { response }) if response == b"by the first"));
        replays(&store, &key, b"by the next");
    });
}

#[test]
fn p8_checkpoints_are_kept_up_to_their_limit_and_refused_beyond_it() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let owner = fresh(&store, &key);
        for bytes in [CHECKPOINT_BYTES_MAX - 1, CHECKPOINT_BYTES_MAX] {
            assert_eq!(owner.save_checkpoint(&vec![5; bytes]).unwrap(), Completion::Done);
            assert!(*info(&store, &key).checkpoint == *vec![5; bytes]);
        }
        let error = owner.save_checkpoint(&vec![6; CHECKPOINT_BYTES_MAX + 1]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TooLarge);
        let killed = place.open_after_kill();
        assert!(interrupted(&killed, &key).checkpoint() == vec![5; CHECKPOINT_BYTES_MAX]);
        // It goes with every step of an unfinished key, and ends with it.
        let next = as_fresh(interrupted(&killed, &key).take_over().unwrap());
        assert!(next.attempt_view().checkpoint() == vec![5; CHECKPOINT_BYTES_MAX]);
        assert_eq!(next.complete(b"paid").unwrap(), Completion::Done);
        assert!(info(&killed, &key).checkpoint.is_empty());
    });
}
