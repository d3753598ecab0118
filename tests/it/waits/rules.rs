//! Who waits is answered by its own rule; rules that go by time go by the millisecond.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk};
use keyonce::{Body, Cause, Completion, KeyState, OnInterrupted, Options, Reserve, ReserveOptions, Retention, Store};

use crate::place::{
    LEASE, MS, Place, as_fresh, as_interrupted, as_replay, everywhere, fresh, interrupted, key, replays, request,
    reserve, state, until_waiting,
};
use crate::tasks::{Wakes, options, poll, poll_for, quick_store, ready, wait, waiting};

use super::{RESPONSE, orders};

// Who waits under different rules.

const HELD: Duration = Duration::from_secs(30);

const RULES: [OnInterrupted; 4] =
    [OnInterrupted::Surface, OnInterrupted::TakeOver, OnInterrupted::TakeOverLapsed, OnInterrupted::Hold(HELD)];

/// How an owner ends while others wait for its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Complete,
    Release,
    Drop,
    Lapse,
    Forget,
    Detach,
}

/// What a waiter is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    Waits,
    Fresh(u32),
    Replay,
    Interrupted(u32),
}

/// What they are to be told, in the order of their coming.
///
/// Who is told that the key is interrupted looks for itself when it wakes, and may find that somebody who came later
/// has taken it over meanwhile: then it goes on waiting. So the number of times that it was woken is told, too.
fn expected(end: End, rules: &[OnInterrupted]) -> Vec<(Told, u64)> {
    let mut owned_anew = end == End::Detach;
    let expect = |rule: &OnInterrupted| {
        let told = match (end, rule) {
            (End::Complete, _) => return Told::Replay,
            (_, _) if owned_anew => Told::Waits,
            (End::Release | End::Forget, _) => Told::Fresh(1),
            (End::Drop, OnInterrupted::TakeOver | OnInterrupted::TakeOverLapsed) => Told::Fresh(2),
            (End::Lapse, OnInterrupted::TakeOverLapsed) => Told::Fresh(2),
            (_, OnInterrupted::Hold(_)) => Told::Waits,
            (_, _) => Told::Interrupted(1),
        };
        owned_anew |= matches!(told, Told::Fresh(_));
        told
    };
    let told: Vec<_> = rules.iter().map(expect).collect();
    let outdated = |told: Told| if owned_anew && told == Told::Interrupted(1) { Told::Waits } else { told };
    told.into_iter().map(|told| (outdated(told), u64::from(told != Told::Waits))).collect()
}

pub(super) fn told(told: &Reserve) -> Told {
    match told {
        Reserve::Fresh(guard) => Told::Fresh(guard.attempt()),
        Reserve::Replay(_) => Told::Replay,
        Reserve::Interrupted(stopped) => Told::Interrupted(stopped.attempt),
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_waiter_is_answered_by_its_own_rule_in_the_order_of_their_coming() {
    for end in [End::Complete, End::Release, End::Drop, End::Lapse, End::Forget, End::Detach] {
        for order in orders(RULES.len()) {
            let rules: Vec<_> = order.into_iter().map(|at| RULES[at]).collect();
            let what = format!("{end:?} while {rules:?} wait");
            let (store, _, clock) = quick_store();
            let guard = fresh(&store, &key("k"));
            let mut tasks: Vec<_> = rules
                .iter()
                .map(|rule| Box::pin(store.reserve_with_async(&key("k"), request(), &waiting().on_interrupted(*rule))))
                .collect();
            let wakes: Vec<_> = tasks.iter().map(|_| Arc::<Wakes>::default()).collect();
            assert!(tasks.iter_mut().zip(&wakes).all(|(task, wakes)| poll_for(task, wakes).is_pending()));
            let mut held = Some(guard);
            match end {
                End::Complete => assert_eq!(held.take().unwrap().complete(RESPONSE).unwrap(), Completion::Done),
                End::Release => assert_eq!(held.take().unwrap().release().unwrap(), Completion::Done),
                End::Drop => drop(held.take()),
                End::Lapse => clock.advance(LEASE),
                End::Forget => assert!(store.forget(&key("k"), "").unwrap()),
                End::Detach => drop(held.take().unwrap().detach(LEASE).unwrap()),
            }
            let mut heard = Vec::new();
            let mut answers = Vec::new();
            for (task, wakes) in tasks.iter_mut().zip(&wakes) {
                let woken = wakes.count();
                match poll_for(task, wakes) {
                    std::task::Poll::Pending => heard.push((Told::Waits, woken)),
                    std::task::Poll::Ready(answer) => {
                        let answer = answer.unwrap();
                        heard.push((told(&answer), woken));
                        answers.push(answer);
                    }
                }
            }
            assert_eq!(heard, expected(end, &rules), "{what}");
            // Whoever still waits is answered by the next end.
            let owner = answers.into_iter().find_map(|answer| match answer {
                Reserve::Fresh(guard) => Some(guard),
                _ => None,
            });
            let waits = heard.iter().filter(|(told, _)| *told == Told::Waits).count();
            assert_eq!(store.stats().waiting, waits as u64, "{what}");
            let next = match owner {
                Some(owner) => owner,
                None if end == End::Detach => {
                    let token = store.peek(&key("k")).unwrap().unwrap().token;
                    store.reattach(&key("k"), token).unwrap()
                }
                None if end == End::Complete => continue,
                None => panic!("{what}: nobody owns it"),
            };
            assert_eq!(next.complete(RESPONSE).unwrap(), Completion::Done, "{what}");
            for (task, (told, _)) in tasks.iter_mut().zip(heard) {
                if told == Told::Waits {
                    assert_eq!(as_replay(ready(task).unwrap()).body(), Body::Kept(RESPONSE), "{what}");
                }
            }
            assert_eq!((store.stats().waiting, store.stats().guards), (0, 0), "{what}");
        }
    }
}

#[test]
fn a_thread_that_waits_under_a_rule_that_takes_over_becomes_the_owner_when_the_one_before_is_dropped() {
    everywhere(|place| {
        let store = place.open();
        let guard = fresh(&store, &key("k"));
        assert_eq!(guard.save_checkpoint(b"half").unwrap(), Completion::Done);
        let clone = store.clone();
        let waiter = thread::spawn(move || {
            let with = waiting().on_interrupted(OnInterrupted::TakeOver);
            let next = as_fresh(clone.reserve_with(&key("k"), request(), &with).unwrap());
            assert_eq!((next.attempt(), next.checkpoint()), (2, &b"half"[..]));
            assert_eq!(next.complete(RESPONSE).unwrap(), Completion::Done);
        });
        until_waiting(&store, 1);
        drop(guard);
        waiter.join().unwrap();
        replays(&store, &key("k"), RESPONSE);
    });
}

// Rules that go by time.

fn holds(store: &Store) -> Reserve {
    let hold = ReserveOptions::new().on_interrupted(OnInterrupted::Hold(HELD));
    store.reserve_with(&key("k"), request(), &hold).unwrap()
}

/// Asserts that the interruption counts as running for exactly this long from now, and that who waits is told then.
#[track_caller]
fn held_for(store: &Store, clock: &ManualClock, held: Duration, cause: Cause) {
    let mut task =
        Box::pin(store.reserve_with_async(&key("k"), request(), &waiting().on_interrupted(OnInterrupted::Hold(HELD))));
    assert!(poll(&mut task).is_pending());
    let Reserve::InFlight(in_flight) = holds(store) else { panic!("it is held") };
    assert_eq!((in_flight.retry_after(), in_flight.info().state), (held, KeyState::Interrupted));
    clock.advance(held - MS);
    assert!(poll(&mut task).is_pending());
    assert!(matches!(holds(store), Reserve::InFlight(_)));
    clock.advance(MS);
    assert_eq!(as_interrupted(holds(store)).cause(), cause);
    assert_eq!(as_interrupted(ready(&mut task).unwrap()).cause(), cause);
    clock.advance(MS);
    assert!(matches!(holds(store), Reserve::Interrupted(_)));
}

#[test]
fn an_interruption_is_held_to_the_millisecond_from_the_drop_the_lapse_and_the_opening() {
    everywhere(|place| {
        let store = place.open();
        drop(fresh(&store, &key("k")));
        place.clock.advance(MS * 7);
        held_for(&store, &place.clock, HELD - MS * 7, Cause::Dropped);
        assert!(store.forget(&key("k"), "").unwrap());
        let guard = fresh(&store, &key("k"));
        place.clock.advance(LEASE + MS * 7);
        held_for(&store, &place.clock, HELD - MS * 7, Cause::LeaseLapsed);
        drop(guard);
        assert!(store.forget(&key("k"), "").unwrap());
        // Closed while it was held: from then on; said in the log, so the moment of the reopening does not count.
        let guard = fresh(&store, &key("k"));
        place.clock.advance(MS * 7);
        assert_eq!(store.close(Duration::ZERO).unwrap().unfinished, 1);
        drop((guard, store));
        place.clock.advance(MS * 9);
        let store = place.open();
        held_for(&store, &place.clock, HELD - MS * 9, Cause::LeaseLapsed);
        assert!(store.forget(&key("k"), "").unwrap());
        // Killed: nobody knows when, but that it was before the opening.
        let guard = fresh(&store, &key("k"));
        place.clock.advance(MS * 7);
        let killed = place.open_after_kill();
        place.clock.advance(MS * 3);
        held_for(&killed, &place.clock, HELD - MS * 3, Cause::Crash);
        drop(guard);
    });
}

fn renewing(place: &Place, max: Duration) -> Options {
    place.options().renew_while_held(max)
}

#[test]
fn a_guard_that_renews_itself_counts_as_running_while_it_is_held_and_until_its_bound() {
    everywhere(|place| {
        let store = place.open_as(renewing(place, LEASE * 100));
        let guard = fresh(&store, &key("k"));
        let mut task = wait(&store, "k");
        let wakes = Arc::<Wakes>::default();
        assert!(poll_for(&mut task, &wakes).is_pending());
        let written = store.stats().log_bytes;
        for n in 0..99 {
            place.clock.advance(LEASE);
            let Reserve::InFlight(in_flight) = reserve(&store, &key("k")) else { panic!("after {n} leases") };
            assert_eq!(in_flight.retry_after(), LEASE);
        }
        place.clock.advance(LEASE - MS);
        let Reserve::InFlight(in_flight) = reserve(&store, &key("k")) else { panic!("to the bound") };
        assert_eq!((in_flight.retry_after(), wakes.count()), (MS, 0));
        place.clock.advance(MS);
        assert_eq!(interrupted(&store, &key("k")).cause(), Cause::LeaseLapsed);
        assert_eq!((told(&ready(&mut task).unwrap()), wakes.count()), (Told::Interrupted(1), 1));
        place.clock.advance(MS);
        assert_eq!((state(&store, &key("k")), store.stats().log_bytes), (Some(KeyState::Interrupted), written));
        // Late, and it counts.
        assert_eq!(guard.complete(RESPONSE).unwrap(), Completion::Done);
        // Dropped within the bound: interrupted at once.
        let guard = fresh(&store, &key("other"));
        place.clock.advance(LEASE * 50);
        drop(guard);
        assert_eq!(interrupted(&store, &key("other")).cause(), Cause::Dropped);
    });
}

/// The bound shorter than the lease, and equal to it.
#[test]
fn a_bound_below_the_lease_does_not_shorten_it() {
    let (disk, clock) = (SimDisk::new(), ManualClock::default());
    for (n, bound) in [MS, LEASE - MS, LEASE, LEASE + MS].into_iter().enumerate() {
        let store = testing::open(disk.clone(), options(&clock).renew_while_held(bound), n as u64).unwrap();
        let guard = fresh(&store, &key(format!("{n}")));
        clock.advance(LEASE.max(bound) - MS);
        assert_eq!(state(&store, guard.key()), Some(KeyState::InFlight));
        clock.advance(MS);
        assert_eq!(state(&store, guard.key()), Some(KeyState::Interrupted));
        drop(guard);
        drop(store);
    }
}

/// S10: a held key never expires, and after a kill it is interrupted.
#[test]
fn a_key_that_renewed_itself_far_beyond_the_retention_is_interrupted_by_a_kill() {
    everywhere(|place| {
        let window = Duration::from_secs(60);
        let open = || renewing(place, window * 20).retention(Retention::new(window, 0.5)).lease(Duration::from_secs(5));
        let store = place.open_as(open());
        let guard = fresh(&store, &key("k"));
        // Others come and go, so that segments retire beneath it.
        for n in 0..200 {
            place.clock.advance(window / 12);
            let other = fresh(&store, &key(format!("other-{n}")));
            assert_eq!(other.complete(&[7; 3000]).unwrap(), Completion::Done);
            assert_eq!(state(&store, &key("k")), Some(KeyState::InFlight), "{n}");
        }
        let killed = place.open_after_kill_as(open());
        assert_eq!(interrupted(&killed, &key("k")).cause(), Cause::Crash);
        drop(killed);
        drop(guard);
    });
}
