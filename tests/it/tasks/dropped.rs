//! Each future, polled n times and dropped, for every n until it is ready.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use keyonce::{
    Ask, Attempt, Body, Completion, Durability, Failed, NotReattached, OnInterrupted, Reserve, ReserveOptions,
};

use super::scene::{Cut, Scene, Seen, Tried, always, by_cut, cancelled_everywhere, check, kept, seen};
use super::{LONG, RESPONSE, poll, ready, wait, waiting};
use crate::place::{LEASE, as_fresh, as_interrupted, fresh, key, other_request, request};

// S9, O11: who was not told owns nothing.

#[test]
fn a_reserve_that_nobody_hears_leaves_nothing_behind() {
    let polls = cancelled_everywhere(
        "a reserve",
        |scene| kept(scene.store.reserve_async(&key("k"), request())).into(),
        by_cut(Seen::Free, Seen::Free, Seen::Interrupted(1)),
    );
    assert_eq!(polls, 2, "it waited for its sync");
}

#[test]
fn an_answer_that_is_not_fresh_changes_nothing_whenever_it_is_dropped() {
    let replay = |scene: &Scene| {
        assert_eq!(scene.quickly("k").complete(RESPONSE).unwrap(), Completion::Done);
        kept(scene.store.reserve_async(&key("k"), request())).into()
    };
    let interrupted = |scene: &Scene| {
        drop(scene.quickly("k"));
        kept(scene.store.reserve_async(&key("k"), request())).into()
    };
    let in_flight = |scene: &Scene| {
        scene.keep(scene.quickly("k"));
        kept(scene.store.reserve_async(&key("k"), request())).into()
    };
    let mismatch = |scene: &Scene| {
        scene.keep(scene.quickly("k"));
        kept(scene.store.reserve_async(&key("k"), other_request())).into()
    };
    let peek = |scene: &Scene| {
        drop(scene.quickly("k"));
        kept(scene.store.peek_async(&key("k"))).into()
    };
    let sync = |scene: &Scene| {
        drop(scene.quickly("k"));
        kept(scene.store.sync_async()).into()
    };
    cancelled_everywhere("a replay", replay, always(Seen::Done));
    let polls = [
        cancelled_everywhere("an interruption", interrupted, always(Seen::Interrupted(1))),
        cancelled_everywhere("in flight", in_flight, always(Seen::InFlight)),
        cancelled_everywhere("a mismatch", mismatch, always(Seen::InFlight)),
        cancelled_everywhere("a peek", peek, always(Seen::Interrupted(1))),
        cancelled_everywhere("a sync", sync, always(Seen::Interrupted(1))),
    ];
    assert_eq!(polls, [2; 5], "each waits for what its answer rests on");
}

/// The key is held; then the owner ends; then the answer waits for its sync.
fn waits_for_the_end(end: fn(&Scene)) -> impl Fn(&Scene) -> Tried {
    move |scene| {
        scene.keep(fresh(&scene.store, &key("k")));
        Tried { call: kept(scene.store.reserve_with_async(&key("k"), request(), &waiting())), cues: vec![end] }
    }
}

#[test]
fn who_waits_and_gives_up_leaves_nothing_behind() {
    let polls = cancelled_everywhere(
        "a wait for a completion",
        waits_for_the_end(|scene| {
            let mut call = Box::pin(scene.guard().complete_async(RESPONSE));
            assert!(poll(&mut call).is_pending());
        }),
        |cut| match cut {
            Cut::Unpolled | Cut::Pending(1) => vec![Seen::InFlight],
            Cut::Pending(_) | Cut::Ready => vec![Seen::Done],
        },
    );
    assert_eq!(polls, 3);
    cancelled_everywhere("a wait for a drop", waits_for_the_end(|scene| drop(scene.guard())), |cut| match cut {
        Cut::Unpolled | Cut::Pending(1) => vec![Seen::InFlight],
        Cut::Pending(_) | Cut::Ready => vec![Seen::Interrupted(1)],
    });
    cancelled_everywhere(
        "a wait of who was told InFlight",
        |scene| {
            scene.keep(scene.quickly("k"));
            let Reserve::InFlight(in_flight) = scene.store.reserve(&key("k"), request()).unwrap() else { panic!() };
            Tried { call: kept(in_flight.wait_async(LONG)), cues: vec![|scene| drop(scene.guard())] }
        },
        |cut| match cut {
            Cut::Unpolled | Cut::Pending(1) => vec![Seen::InFlight],
            Cut::Pending(_) | Cut::Ready => vec![Seen::Interrupted(1)],
        },
    );
}

#[test]
fn a_hand_over_that_nobody_hears_leaves_nothing_behind() {
    let polls = cancelled_everywhere(
        "a hand-over",
        waits_for_the_end(|scene| assert_eq!(scene.guard().release().unwrap(), Completion::Done)),
        |cut| match cut {
            Cut::Unpolled | Cut::Pending(1) => vec![Seen::InFlight],
            Cut::Pending(_) => vec![Seen::Free],
            Cut::Ready => vec![Seen::Interrupted(1)],
        },
    );
    assert_eq!(polls, 3);
    // Dropped between the hand-over and the next poll.
    let scene = Scene::new();
    let guard = fresh(&scene.store, &key("k"));
    let mut waits = wait(&scene.store, "k");
    assert!(scene.poll(&mut waits).is_pending());
    assert_eq!(guard.release().unwrap(), Completion::Done);
    assert_eq!((seen(&scene.store, "k"), scene.woken()), (Seen::InFlight, 1));
    drop(waits);
    check(&scene, "a hand-over that was never looked at", &[Seen::Free]);
}

#[test]
fn a_later_attempt_that_nobody_hears_of_leaves_the_key_interrupted() {
    let polls = cancelled_everywhere(
        "a take-over",
        |scene| {
            drop(scene.quickly("k"));
            let stopped = as_interrupted(scene.store.reserve(&key("k"), request()).unwrap());
            kept(stopped.take_over_async()).into()
        },
        by_cut(Seen::Interrupted(1), Seen::Interrupted(2), Seen::Interrupted(2)),
    );
    assert_eq!(polls, 2);
    cancelled_everywhere(
        "a take-over by policy",
        |scene| {
            drop(scene.quickly("k"));
            let takes_over = ReserveOptions::new().on_interrupted(OnInterrupted::TakeOver);
            kept(scene.store.reserve_with_async(&key("k"), request(), &takes_over)).into()
        },
        by_cut(Seen::Interrupted(1), Seen::Interrupted(2), Seen::Interrupted(2)),
    );
    cancelled_everywhere(
        "a take-over by who waited for the end",
        |scene| {
            scene.keep(scene.quickly("k"));
            let takes_over = waiting().on_interrupted(OnInterrupted::TakeOver);
            Tried {
                call: kept(scene.store.reserve_with_async(&key("k"), request(), &takes_over)),
                cues: vec![|scene| drop(scene.guard())],
            }
        },
        |cut| match cut {
            Cut::Unpolled | Cut::Pending(1) => vec![Seen::InFlight],
            Cut::Pending(_) | Cut::Ready => vec![Seen::Interrupted(2)],
        },
    );
}

// S5: a completion that is dropped.

#[test]
fn a_completion_that_is_dropped_is_stored_or_leaves_the_key_interrupted() {
    let completion = |scene: &Scene| {
        scene.effects.fetch_add(1, Ordering::SeqCst);
        kept(fresh(&scene.store, &key("k")).complete_async(RESPONSE)).into()
    };
    let polls = cancelled_everywhere("a completion", completion, by_cut(Seen::Interrupted(1), Seen::Done, Seen::Done));
    assert_eq!(polls, 2);
    let many = |scene: &Scene| {
        scene.effects.fetch_add(1, Ordering::SeqCst);
        let items = ["one", "k", "two"].map(|id| (fresh(&scene.store, &key(id)), RESPONSE.to_vec()));
        kept(scene.store.complete_batch_async(items)).into()
    };
    cancelled_everywhere("a batch of completions", many, by_cut(Seen::Interrupted(1), Seen::Done, Seen::Done));
    let resolved = |scene: &Scene| {
        scene.effects.fetch_add(1, Ordering::SeqCst);
        drop(fresh(&scene.store, &key("k")));
        kept(as_interrupted(scene.store.reserve(&key("k"), request()).unwrap()).resolve_async(RESPONSE)).into()
    };
    cancelled_everywhere("a resolution", resolved, by_cut(Seen::Interrupted(1), Seen::Done, Seen::Done));
}

#[test]
fn a_completion_without_body_that_is_dropped_is_stored_or_leaves_the_key_interrupted() {
    for polls in 0..=2 {
        let scene = Scene::new();
        let mut call = Box::pin(fresh(&scene.store, &key("k")).complete_without_body_async(b"order 17"));
        for n in 0..polls {
            scene.hold_syncs_back();
            let woken = scene.woken();
            let ready = scene.poll(&mut call).is_ready();
            assert_eq!(ready, n == 1);
            if !ready && n + 1 < polls {
                scene.sync_until_woken(woken);
            }
        }
        drop(call);
        scene.let_all_through();
        match (polls, scene.store.reserve(&key("k"), request()).unwrap()) {
            (0, Reserve::Interrupted(_)) => {}
            (1 | 2, Reserve::Replay(response)) => {
                assert_eq!(response.body(), Body::NotKept { reference: b"order 17" });
            }
            (_, other) => panic!("after {polls} polls: {other:?}"),
        }
        assert_eq!(scene.store.stats().guards, 0);
    }
}

// The other acts of an owner.

#[test]
fn a_release_that_is_dropped_has_taken_place_or_leaves_the_key_interrupted() {
    let first = |scene: &Scene| kept(fresh(&scene.store, &key("k")).release_async()).into();
    cancelled_everywhere("a release", first, by_cut(Seen::Interrupted(1), Seen::Free, Seen::Free));
    let later = |scene: &Scene| {
        drop(fresh(&scene.store, &key("k")));
        let stopped = as_interrupted(scene.store.reserve(&key("k"), request()).unwrap());
        kept(as_fresh(stopped.take_over().unwrap()).release_async()).into()
    };
    cancelled_everywhere("a release of attempt 2", later, always(Seen::Interrupted(2)));
    let by_handle = |scene: &Scene| {
        drop(fresh(&scene.store, &key("k")));
        kept(as_interrupted(scene.store.reserve(&key("k"), request()).unwrap()).release_async()).into()
    };
    cancelled_everywhere("a release by handle", by_handle, by_cut(Seen::Interrupted(1), Seen::Free, Seen::Free));
}

#[test]
fn a_renewal_or_a_checkpoint_that_is_dropped_leaves_the_owner_at_work() {
    let renewal = |scene: &Scene| {
        let guard = fresh(&scene.store, &key("k"));
        let call = kept(guard.renew_async(LEASE * 1000));
        scene.keep(guard);
        call.into()
    };
    assert_eq!(cancelled_everywhere("a renewal far ahead", renewal, always(Seen::InFlight)), 2);
    let short = |scene: &Scene| {
        let guard = fresh(&scene.store, &key("k"));
        let call = kept(guard.renew_async(LEASE));
        scene.keep(guard);
        call.into()
    };
    cancelled_everywhere("a renewal", short, always(Seen::InFlight));
    let checkpoint = |scene: &Scene| {
        let guard = fresh(&scene.store, &key("k"));
        let call = kept(guard.attempt_view().save_checkpoint_async(b"half"));
        scene.keep(guard);
        call.into()
    };
    assert_eq!(cancelled_everywhere("a checkpoint", checkpoint, always(Seen::InFlight)), 2);
    // The view alone is left: its guard was dropped before.
    let late = |scene: &Scene| {
        let view = fresh(&scene.store, &key("k")).attempt_view();
        kept(async move { view.save_checkpoint_async(b"late").await }).into()
    };
    cancelled_everywhere("a late checkpoint", late, always(Seen::Interrupted(1)));
}

#[test]
fn a_detachment_that_is_dropped_leaves_the_key_detached_or_interrupted() {
    let detach = |scene: &Scene| kept(fresh(&scene.store, &key("k")).detach_async(LEASE * 10)).into();
    let polls =
        cancelled_everywhere("a detachment", detach, by_cut(Seen::Interrupted(1), Seen::Detached, Seen::Detached));
    assert_eq!(polls, 2);
}

#[test]
fn a_reattachment_that_nobody_hears_of_leaves_the_reservation_detached() {
    let reattach = |scene: &Scene| {
        let token = fresh(&scene.store, &key("k")).detach(LEASE * 10).unwrap();
        kept(scene.store.reattach_async(&key("k"), token)).into()
    };
    let polls =
        cancelled_everywhere("a reattachment", reattach, by_cut(Seen::Detached, Seen::Detached, Seen::Interrupted(1)));
    assert_eq!(polls, 2);
}

/// What nobody heard of must change nothing, and so must not shorten the lease.
#[test]
fn a_reattachment_that_nobody_hears_of_leaves_the_lease_as_long_as_it_was() {
    let scene = Scene::new();
    let token = fresh(&scene.store, &key("k")).detach(LEASE * 10).unwrap();
    let lease_end = scene.store.peek(&key("k")).unwrap().unwrap().lease_end;
    scene.hold_syncs_back();
    let mut call = Box::pin(scene.store.reattach_async(&key("k"), token));
    assert!(scene.poll(&mut call).is_pending());
    drop(call);
    scene.let_all_through();
    assert_eq!(scene.store.peek(&key("k")).unwrap().unwrap().lease_end, lease_end);
}

/// Nobody heard of it, and the log has no room to say so: the reservation must not stay held by nobody for ever.
#[test]
fn a_reattachment_that_nobody_hears_of_holds_nothing_though_the_log_takes_no_more() {
    let scene = Scene::new();
    let token = fresh(&scene.store, &key("k")).detach(LEASE * 10).unwrap();
    scene.hold_syncs_back();
    let mut call = Box::pin(scene.store.reattach_async(&key("k"), token));
    assert!(scene.poll(&mut call).is_pending());
    scene.disk.limit_bytes(Some(0));
    let long = ReserveOptions::new().lease(LEASE * 500).durability(Durability::ProcessCrash);
    for id in (0..).map(|n| format!("{n:04}")).take_while(|id| id.len() == 4) {
        match scene.store.reserve_with(&key(id), request(), &long) {
            Ok(filler) => std::mem::forget(filler),
            Err(_) => break,
        }
    }
    let guards = scene.store.stats().guards;
    drop(call);
    assert_eq!(scene.store.stats().guards, guards - 1, "nobody holds it");
    scene.disk.limit_bytes(None);
    scene.let_all_through();
    scene.clock.advance(LEASE * 10);
    match scene.store.reattach(&key("k"), token) {
        Ok(_) | Err(NotReattached::Superseded) => {}
        Err(other) => panic!("{other:?}"),
    }
}

/// Its token was known before, so somebody else may have gone on with it already.
#[test]
fn a_detachment_that_is_dropped_does_not_stop_who_has_reattached_it() {
    let scene = Scene::new();
    let guard = fresh(&scene.store, &key("k"));
    let token = guard.token();
    scene.hold_syncs_back();
    let mut detaches = Box::pin(guard.detach_async(LEASE * 10));
    assert!(scene.poll(&mut detaches).is_pending());
    let mut reattaches = Box::pin(scene.store.reattach_async(&key("k"), token));
    assert!(scene.poll(&mut reattaches).is_pending());
    drop(detaches);
    scene.let_all_through();
    let next = ready(&mut reattaches).unwrap();
    assert_eq!(seen(&scene.store, "k"), Seen::InFlight);
    assert_eq!(next.complete(RESPONSE).unwrap(), Completion::Done);
}

#[test]
fn an_operators_forget_that_is_dropped_has_taken_place_or_not() {
    let forget = |scene: &Scene| {
        drop(fresh(&scene.store, &key("k")));
        kept(scene.store.forget_async(&key("k"), "a test")).into()
    };
    let polls = cancelled_everywhere("a forget", forget, by_cut(Seen::Interrupted(1), Seen::Free, Seen::Free));
    assert!(polls > 1, "it waited for its sync");
}

#[test]
fn a_batch_that_nobody_hears_leaves_nothing_behind() {
    let batch = |scene: &Scene| {
        assert_eq!(scene.quickly("done").complete(RESPONSE).unwrap(), Completion::Done);
        drop(scene.quickly("interrupted"));
        let asks = ["done", "k", "interrupted", "k", "new"].map(|id| Ask::new(&key(id), request()));
        kept(scene.store.reserve_batch_async(&asks)).into()
    };
    let polls = cancelled_everywhere("a batch", batch, by_cut(Seen::Free, Seen::Free, Seen::Interrupted(1)));
    assert_eq!(polls, 2, "one sync serves the batch");
}

/// Pending once, and woken at once.
async fn pause() {
    let mut paused = false;
    poll_fn(|context| {
        if std::mem::replace(&mut paused, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

#[test]
fn once_that_is_dropped_anywhere_has_one_effect_and_holds_nothing() {
    let once = |scene: &Scene| {
        let effects = Arc::clone(&scene.effects);
        let work = async move |attempt: Attempt| {
            effects.fetch_add(1, Ordering::SeqCst);
            pause().await;
            assert_eq!(attempt.save_checkpoint_async(b"half").await.unwrap(), Completion::Done);
            pause().await;
            Ok::<_, Failed<std::io::Error>>(RESPONSE.to_vec())
        };
        kept(scene.store.once_async(&key("k"), request(), work)).into()
    };
    // Pending in the reserve, the pause, the checkpoint, the pause, and the completion.
    let polls = cancelled_everywhere("once", once, |cut| match cut {
        Cut::Unpolled | Cut::Pending(1) => vec![Seen::Free],
        Cut::Pending(2..=4) => vec![Seen::Interrupted(1)],
        Cut::Pending(5) | Cut::Ready => vec![Seen::Done],
        Cut::Pending(n) => panic!("pending for the {n}th time"),
    });
    assert_eq!(polls, 6);
    let nothing_happened = |scene: &Scene| {
        let work = |_| async {
            pause().await;
            Err(Failed::NothingHappened(std::io::Error::other("refused")))
        };
        kept(scene.store.once_async(&key("k"), request(), work)).into()
    };
    cancelled_everywhere("once, and nothing happened", nothing_happened, |cut| match cut {
        Cut::Unpolled | Cut::Pending(1) | Cut::Ready => vec![Seen::Free],
        Cut::Pending(_) => vec![Seen::Interrupted(1)],
    });
    let too_large = |scene: &Scene| {
        let work = |_| async { Ok::<_, Failed<std::io::Error>>(vec![7; 6001]) };
        kept(scene.store.once_async(&key("large"), request(), work)).into()
    };
    cancelled_everywhere("once, and too much of it", too_large, always(Seen::Free));
}
