//! P1 to P5: what a caller is told, and what that rests on.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use keyonce::testing::{ManualClock, SimDisk};
use keyonce::{
    Body, Cause, Completion, Durability, ErrorKind, Key, KeyState, NotStored, OnInterrupted, Reserve, ReserveOptions,
    Store,
};

use crate::place::{
    LEASE, MS, RESPONSE_BYTES_MAX, WINDOW, as_fresh, as_interrupted, as_replay, everywhere, fresh, info, interrupted,
    key, other_request, replays, request, reserve, state, until_waiting,
};

use super::{Named, open_on, waiting};

// P1: one owner.

#[test]
fn p1_one_owner_of_many_threads() {
    everywhere(|place| {
        let store = place.open();
        let rounds = if place.setting.durability == Durability::PowerLoss { 20 } else { 100 };
        let start = Barrier::new(8);
        for round in 0..rounds {
            let key = key(format!("round-{round}"));
            let owners: usize = thread::scope(|threads| {
                let ask = || {
                    start.wait();
                    match reserve(&store, &key) {
                        Reserve::Fresh(reservation) => {
                            assert_eq!(reservation.complete(&[round; 40]).unwrap(), Completion::Done);
                            1
                        }
                        Reserve::Replay(response) => {
                            assert_eq!(response.body(), Body::Kept(&[round; 40]));
                            0
                        }
                        Reserve::InFlight(_) => 0,
                        other => panic!("{other:?}"),
                    }
                };
                let asks: Vec<_> = (0..8).map(|_| threads.spawn(ask)).collect();
                asks.into_iter().map(|ask| ask.join().unwrap()).sum()
            });
            assert_eq!(owners, 1, "owners of round {round}");
            replays(&store, &key, &[round; 40]);
        }
        assert_eq!(store.stats().fresh, u64::from(rounds));
    });
}

#[test]
fn p1_after_expiry_one_of_two_retries_is_fresh() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        assert_eq!(fresh(&store, &key).complete(b"old").unwrap(), Completion::Done);
        place.clock.advance(WINDOW);
        let owner = fresh(&store, &key);
        let Reserve::InFlight(in_flight) = reserve(&store, &key) else { panic!("the first retry owns it") };
        assert_eq!(in_flight.info().token, owner.token());
        assert_eq!(in_flight.retry_after(), LEASE);
    });
}

#[test]
fn p1_a_waiter_is_woken_by_the_completion_and_replays_it() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let owner = fresh(&store, &key);
        thread::scope(|threads| {
            let waiter = || as_replay(store.reserve_with(&key, request(), &waiting()).unwrap());
            let waiters: Vec<_> = (0..3).map(|_| threads.spawn(waiter)).collect();
            until_waiting(&store, 3);
            assert_eq!(owner.complete(b"paid").unwrap(), Completion::Done);
            for waiter in waiters {
                assert_eq!(waiter.join().unwrap().body(), Body::Kept(b"paid"));
            }
        });
    });
}

#[test]
fn p1_of_three_waiters_a_release_makes_one_the_owner_and_the_others_wait_on() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let owner = fresh(&store, &key);
        thread::scope(|threads| {
            let waiter = || match store.reserve_with(&key, request(), &waiting()).unwrap() {
                Reserve::Fresh(next) => {
                    // The two others wait for this one now, and nobody has woken them.
                    until_waiting(&store, 2);
                    assert_eq!(next.complete(b"by the next owner").unwrap(), Completion::Done);
                    1
                }
                Reserve::Replay(response) => {
                    assert_eq!(response.body(), Body::Kept(b"by the next owner"));
                    0
                }
                other => panic!("{other:?}"),
            };
            let waiters: Vec<_> = (0..3).map(|_| threads.spawn(waiter)).collect();
            until_waiting(&store, 3);
            assert_eq!(owner.release().unwrap(), Completion::Done);
            let owners: usize = waiters.into_iter().map(|waiter| waiter.join().unwrap()).sum();
            assert_eq!(owners, 1);
        });
    });
}

#[test]
fn p1_a_waiter_is_told_when_the_owner_drops_or_its_lease_lapses() {
    for lapses in [false, true] {
        everywhere(|place| {
            let store = place.open();
            let key = key("a");
            let owner = fresh(&store, &key);
            thread::scope(|threads| {
                let waiter =
                    threads.spawn(|| as_interrupted(store.reserve_with(&key, request(), &waiting()).unwrap()).cause());
                until_waiting(&store, 1);
                if lapses {
                    place.clock.advance(LEASE);
                    assert_eq!(waiter.join().unwrap(), Cause::LeaseLapsed);
                    drop(owner);
                } else {
                    drop(owner);
                    assert_eq!(waiter.join().unwrap(), Cause::Dropped);
                }
            });
        });
    }
}

#[test]
fn p1_a_waiter_waits_as_long_as_it_said_and_no_longer() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let owner = fresh(&store, &key);
        thread::scope(|threads| {
            let with = ReserveOptions::new().wait(Duration::from_secs(10));
            let waiter = threads.spawn(|| reserve_with_in_flight(&store, &key, with));
            until_waiting(&store, 1);
            place.clock.advance(Duration::from_secs(10) - MS);
            assert!(!waiter.is_finished());
            place.clock.advance(MS);
            assert_eq!(waiter.join().unwrap(), LEASE - Duration::from_secs(10));
        });
        assert_eq!(owner.complete(b"").unwrap(), Completion::Done);
    });
}

fn reserve_with_in_flight(store: &Store, key: &Key, with: ReserveOptions) -> Duration {
    let Reserve::InFlight(in_flight) = store.reserve_with(key, request(), &with).unwrap() else {
        panic!("it is owned")
    };
    in_flight.retry_after()
}

#[test]
fn p1_a_waiter_learns_of_a_renewal_by_waiting_on_and_of_a_close_by_an_error() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let owner = fresh(&store, &key);
        thread::scope(|threads| {
            let waiter = threads.spawn(|| store.reserve_with(&key, request(), &waiting()).map(|_| ()));
            until_waiting(&store, 1);
            assert_eq!(owner.renew(2 * LEASE).unwrap(), Completion::Done);
            place.clock.advance(LEASE);
            assert!(!waiter.is_finished(), "the lease was renewed");
            let report = store.close(Duration::ZERO).unwrap();
            assert_eq!(report.unfinished, 1);
            assert_eq!(waiter.join().unwrap().unwrap_err().kind(), ErrorKind::Closed);
        });
    });
}

#[test]
fn p1_in_flight_can_be_waited_for_afterwards() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let owner = fresh(&store, &key);
        let Reserve::InFlight(in_flight) = reserve(&store, &key) else { panic!("it is owned") };
        thread::scope(|threads| {
            let waiter = threads.spawn(|| as_replay(in_flight.wait(Duration::MAX).unwrap()));
            until_waiting(&store, 1);
            assert_eq!(owner.complete(b"paid").unwrap(), Completion::Done);
            assert_eq!(waiter.join().unwrap().body(), Body::Kept(b"paid"));
        });
    });
}

// P2: reserved before the work.

#[test]
fn p2_a_reservation_survives_a_kill_as_interrupted_and_hands_its_checkpoint_over() {
    everywhere(|place| {
        let store = place.open();
        let owner = fresh(&store, &key("a"));
        assert_eq!(owner.save_checkpoint(b"half").unwrap(), Completion::Done);
        assert_eq!(owner.save_checkpoint(b"three quarters").unwrap(), Completion::Done);
        let bare = fresh(&store, &key("b"));

        let after = place.open_after_kill();
        assert!(!after.opened().clean);
        assert_eq!(after.opened().interrupted, 2);
        for (id, token, checkpoint) in [("a", owner.token(), &b"three quarters"[..]), ("b", bare.token(), b"")] {
            let stop = interrupted(&after, &key(id));
            assert_eq!((stop.cause(), stop.token, stop.attempt), (Cause::Crash, token, 1));
            assert_eq!(stop.checkpoint(), checkpoint);
            let next = as_fresh(stop.take_over().unwrap());
            assert_eq!((next.attempt_view().number(), next.attempt_view().checkpoint()), (2, checkpoint));
            // What the new owner saves takes its place.
            assert_eq!(next.save_checkpoint(b"more").unwrap(), Completion::Done);
            drop(next);
            assert_eq!(interrupted(&after, &key(id)).checkpoint(), b"more");
        }
    });
}

#[test]
fn p2_a_reservation_survives_every_power_loss() {
    let (disk, clock) = (SimDisk::new(), ManualClock::default());
    let store = open_on(&disk, &clock, Durability::PowerLoss, 1);
    let owner = fresh(&store, &key("a"));
    assert_eq!(owner.save_checkpoint(b"half").unwrap(), Completion::Done);
    for (at, image) in (2..).zip(disk.images(64)) {
        let after = open_on(&image, &clock, Durability::PowerLoss, at);
        let stop = interrupted(&after, &key("a"));
        assert_eq!((stop.cause(), stop.token, stop.checkpoint()), (Cause::Crash, owner.token(), &b"half"[..]));
    }
}

#[test]
fn p2_at_process_crash_a_reservation_survives_the_kill() {
    let (disk, clock) = (SimDisk::new(), ManualClock::default());
    let store = open_on(&disk, &clock, Durability::ProcessCrash, 1);
    let owner = fresh(&store, &key("a"));
    let after = open_on(&disk.kill(), &clock, Durability::ProcessCrash, 2);
    assert_eq!(interrupted(&after, &key("a")).token, owner.token());
    // A call may ask for more than its store.
    let with = ReserveOptions::new().durability(Durability::PowerLoss);
    let owner = as_fresh(store.reserve_with(&key("b"), request(), &with).unwrap());
    let after = open_on(&disk.crash_all_old(), &clock, Durability::ProcessCrash, 3);
    assert_eq!(interrupted(&after, &key("b")).token, owner.token());
}

// P3: completed before the answer.

#[test]
fn p3_completed_before_the_answer_survives_the_kill() {
    everywhere(|place| {
        let store = place.open();
        assert_eq!(fresh(&store, &key("a")).complete(b"paid").unwrap(), Completion::Done);
        let response = replays(&store, &key("a"), b"paid");
        let after = place.open_after_kill();
        let replayed = replays(&after, &key("a"), b"paid");
        assert_eq!(replayed.completed_at(), response.completed_at());
        assert_eq!(replayed.expires_at(), response.expires_at());
    });
}

#[test]
fn p3_completed_before_the_answer_survives_every_power_loss() {
    let (disk, clock) = (SimDisk::new(), ManualClock::default());
    let store = open_on(&disk, &clock, Durability::PowerLoss, 1);
    assert_eq!(fresh(&store, &key("a")).complete(b"paid").unwrap(), Completion::Done);
    for (at, image) in (2..).zip(disk.images(64)) {
        replays(&open_on(&image, &clock, Durability::PowerLoss, at), &key("a"), b"paid");
    }
}

/// A response stored at the weaker level is told to a caller of the stronger one only when it is durable.
#[test]
fn p3_no_answer_rests_on_a_record_that_may_still_be_lost() {
    let weak = ReserveOptions::new().durability(Durability::ProcessCrash);
    let asks: [Named<fn(&Store)>; 4] = [
        ("replay", |store| drop(replays(store, &key("a"), b"paid"))),
        ("mismatch", |store| {
            assert!(matches!(store.reserve(&key("a"), other_request()).unwrap(), Reserve::Mismatch(_)));
        }),
        ("peek", |store| assert_eq!(state(store, &key("a")), Some(KeyState::Done))),
        ("sync", |store| store.sync().unwrap()),
    ];
    for (name, ask) in asks {
        let (disk, clock) = (SimDisk::new(), ManualClock::default());
        let store = open_on(&disk, &clock, Durability::PowerLoss, 1);
        let owner = as_fresh(store.reserve_with(&key("a"), request(), &weak).unwrap());
        assert_eq!(owner.complete(b"paid").unwrap(), Completion::Done);
        let before = open_on(&disk.crash_all_old(), &clock, Durability::PowerLoss, 2);
        assert_eq!(state(&before, &key("a")), None, "nothing waited for a sync so far");
        ask(&store);
        let after = open_on(&disk.crash_all_old(), &clock, Durability::PowerLoss, 3);
        assert_eq!(state(&after, &key("a")), Some(KeyState::Done), "after {name}");
    }
}

#[test]
fn p3_a_superseded_owner_is_told_only_what_is_durable() {
    let weak = ReserveOptions::new().durability(Durability::ProcessCrash);
    let (disk, clock) = (SimDisk::new(), ManualClock::default());
    let store = open_on(&disk, &clock, Durability::PowerLoss, 1);
    let first = as_fresh(store.reserve_with(&key("a"), request(), &weak).unwrap());
    clock.advance(LEASE);
    let second =
        as_fresh(as_interrupted(store.reserve_with(&key("a"), request(), &weak).unwrap()).take_over().unwrap());
    assert_eq!(first.complete(b"late").unwrap(), Completion::Superseded);
    let after = open_on(&disk.crash_all_old(), &clock, Durability::PowerLoss, 2);
    assert_eq!(interrupted(&after, &key("a")).token, second.token());
}

#[test]
fn p3_a_close_lets_running_owners_finish_as_long_as_it_was_told() {
    for finishes in [false, true] {
        everywhere(|place| {
            let store = place.open();
            let owner = fresh(&store, &key("a"));
            thread::scope(|threads| {
                let closer = threads.spawn(|| store.close(Duration::from_secs(10)).unwrap().unfinished);
                // Nobody becomes an owner any more once it has begun.
                while let Ok(reserve) = store.reserve(&key("probe"), request()) {
                    assert_eq!(as_fresh(reserve).release().unwrap(), Completion::Done);
                }
                assert!(!closer.is_finished());
                if finishes {
                    assert_eq!(owner.complete(b"paid").unwrap(), Completion::Done);
                } else {
                    place.clock.advance(Duration::from_secs(10));
                }
                assert_eq!(closer.join().unwrap(), u64::from(!finishes));
            });
            drop(store);
            let after = place.open();
            assert!(after.opened().clean);
            let expected = if finishes { KeyState::Done } else { KeyState::Interrupted };
            assert_eq!(state(&after, &key("a")), Some(expected));
        });
    }
}

// P4: the same answer.

#[test]
fn p4_the_same_answer_byte_for_byte_and_never_another_keys() {
    let sizes = [0, 1, 4095, 4096, 4097, RESPONSE_BYTES_MAX - 1, RESPONSE_BYTES_MAX];
    let bytes_of = |bytes: usize| -> Vec<u8> { (0..bytes).map(|at| (at * 31 + bytes * 7).to_le_bytes()[0]).collect() };
    everywhere(|place| {
        let store = place.open();
        for bytes in sizes {
            let owner = fresh(&store, &key(bytes.to_string()));
            assert_eq!(owner.complete(&bytes_of(bytes)).unwrap(), Completion::Done);
        }
        let killed = place.open_after_kill();
        for store in [&store, &killed] {
            for bytes in sizes {
                replays(store, &key(bytes.to_string()), &bytes_of(bytes));
            }
        }
        store.close(Duration::ZERO).unwrap();
        drop(store);
        let reopened = place.open();
        for bytes in sizes {
            replays(&reopened, &key(bytes.to_string()), &bytes_of(bytes));
        }
    });
}

#[test]
fn p4_done_without_a_body_is_replayed_as_such() {
    everywhere(|place| {
        let store = place.open();
        let references: [&[u8]; 2] = [b"", b"row 17"];
        for (at, reference) in references.iter().enumerate() {
            let owner = fresh(&store, &key(at.to_string()));
            assert_eq!(owner.complete_without_body(reference).unwrap(), Completion::Done);
        }
        assert_eq!(fresh(&store, &key("empty")).complete(b"").unwrap(), Completion::Done);
        let killed = place.open_after_kill();
        for store in [&store, &killed] {
            for (at, reference) in references.iter().enumerate() {
                let response = as_replay(reserve(store, &key(at.to_string())));
                assert_eq!(response.body(), Body::NotKept { reference });
            }
            replays(store, &key("empty"), b"");
        }
    });
}

#[test]
fn p4_a_response_is_refused_beyond_the_limit_before_a_byte_is_written_and_the_guard_comes_back() {
    for durability in [Durability::PowerLoss, Durability::ProcessCrash] {
        let (disk, clock) = (SimDisk::new(), ManualClock::default());
        let store = open_on(&disk, &clock, durability, 1);
        let key = key("a");
        let owner = fresh(&store, &key);
        let (token, steps) = (owner.token(), disk.steps());
        let NotStored { error, reservation } = owner.complete(&[1; RESPONSE_BYTES_MAX + 1]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TooLarge);
        let NotStored { error, reservation } =
            reservation.complete_without_body(&[1; RESPONSE_BYTES_MAX + 1]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TooLarge);
        assert_eq!(disk.steps(), steps, "steps of the disk");
        assert_eq!((reservation.token(), state(&store, &key)), (token, Some(KeyState::InFlight)));
        assert_eq!(reservation.complete(&[1; RESPONSE_BYTES_MAX]).unwrap(), Completion::Done);
        replays(&store, &key, &[1; RESPONSE_BYTES_MAX]);
    }
}

/// The largest response that still fits into the segment is found by trying; it, and its neighbours on both sides, are
/// stored and found again, whether they end a segment or begin one.
#[test]
fn p4_a_response_that_is_exactly_the_rest_of_a_segment_is_stored_like_any_other() {
    for durability in [Durability::PowerLoss, Durability::ProcessCrash] {
        let clock = ManualClock::default();
        // One filler fewer than the segment takes, so that some kilobytes are left.
        let fillers = {
            let disk = SimDisk::new();
            let store = open_on(&disk, &clock, durability, 1);
            let mut at = 0_u32;
            while disk_segments(&store) == 1 {
                assert_eq!(fresh(&store, &key(at.to_string())).complete(&[7; 3000]).unwrap(), Completion::Done);
                at += 1;
            }
            at - 1
        };
        let with_last = |bytes: usize| {
            let disk = SimDisk::new();
            let store = open_on(&disk, &clock, durability, 1);
            for at in 0..fillers {
                assert_eq!(fresh(&store, &key(at.to_string())).complete(&[7; 3000]).unwrap(), Completion::Done);
            }
            let owner = fresh(&store, &key("last"));
            assert_eq!(disk_segments(&store), 1, "there is room for the last response");
            assert_eq!(owner.complete(&vec![3; bytes]).unwrap(), Completion::Done);
            let rolled = disk_segments(&store) > 1;
            (disk, store, rolled)
        };
        let (mut fits, mut rolls) = (0, RESPONSE_BYTES_MAX);
        assert!(with_last(rolls).2 && !with_last(fits).2, "the rest of the segment lies between");
        while rolls - fits > 1 {
            let middle = fits.midpoint(rolls);
            if with_last(middle).2 { rolls = middle } else { fits = middle }
        }
        for bytes in [fits.saturating_sub(8), fits, fits + 1, fits + 8, fits + 9] {
            let (disk, store, rolled) = with_last(bytes);
            assert_eq!(rolled, bytes > fits);
            assert_eq!(fresh(&store, &key("behind")).complete(b"next").unwrap(), Completion::Done);
            let killed = open_on(&disk.kill(), &clock, durability, 2);
            store.close(Duration::ZERO).unwrap();
            let closed = open_on(&disk, &clock, durability, 3);
            for after in [killed, closed] {
                assert_eq!(after.opened().torn, 0);
                replays(&after, &key("last"), &vec![3; bytes]);
                replays(&after, &key("behind"), b"next");
                replays(&after, &key("0"), &[7; 3000]);
            }
        }
    }
}

fn disk_segments(store: &Store) -> u64 {
    store.stats().segments
}

// P5: a key stands for one request.

#[track_caller]
fn mismatches(store: &Store, key: &Key, expected: KeyState) {
    let Reserve::Mismatch(mismatch) = store.reserve(key, other_request()).unwrap() else { panic!("another request") };
    assert_eq!(mismatch.state, expected);
    let first_seen = info(store, key).first_seen;
    assert_eq!(mismatch.first_seen, first_seen);
    // A waiter is told at once, and a policy that takes over does not take over for another request.
    let with = waiting().on_interrupted(OnInterrupted::TakeOver);
    assert!(matches!(store.reserve_with(key, other_request(), &with).unwrap(), Reserve::Mismatch(_)));
}

#[test]
fn p5_a_key_stands_for_one_request_in_every_state() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let owner = fresh(&store, &key);
        mismatches(&store, &key, KeyState::InFlight);
        assert_eq!(owner.save_checkpoint(b"half").unwrap(), Completion::Done);
        mismatches(&store, &key, KeyState::InFlight);
        mismatches(&place.open_after_kill(), &key, KeyState::Interrupted);
        place.clock.advance(LEASE);
        mismatches(&store, &key, KeyState::Interrupted);
        let next = as_fresh(interrupted(&store, &key).take_over().unwrap());
        mismatches(&store, &key, KeyState::InFlight);
        drop(next);
        mismatches(&store, &key, KeyState::Interrupted);
        mismatches(&place.open_after_kill(), &key, KeyState::Interrupted);
        assert_eq!(interrupted(&store, &key).resolve(b"paid").unwrap(), Completion::Done);
        mismatches(&store, &key, KeyState::Done);
        mismatches(&place.open_after_kill(), &key, KeyState::Done);
        drop((owner, store));
        let store = place.open();
        assert!(store.opened().clean);
        mismatches(&store, &key, KeyState::Done);
        replays(&store, &key, b"paid");
    });
}

#[test]
fn p5_only_release_and_expiry_drop_the_binding() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        assert_eq!(fresh(&store, &key).release().unwrap(), Completion::Done);
        let owner = as_fresh(store.reserve(&key, other_request()).unwrap());
        assert!(matches!(reserve(&store, &key), Reserve::Mismatch(_)));
        assert_eq!(owner.complete(b"other").unwrap(), Completion::Done);
        assert!(matches!(reserve(&store, &key), Reserve::Mismatch(_)));
        place.clock.advance(WINDOW);
        assert_eq!(fresh(&store, &key).release().unwrap(), Completion::Done);
    });
}

#[test]
fn p5_a_waiter_of_another_request_is_told_when_the_key_changes_hands() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let owner = fresh(&store, &key);
        thread::scope(|threads| {
            let waiter = threads.spawn(|| store.reserve_with(&key, request(), &waiting()).unwrap());
            until_waiting(&store, 1);
            // Forgotten, which hands the key to the waiter, forgotten again and reserved for another request, before or
            // after the waiter has woken.
            assert!(store.forget(&key, "never happened").unwrap());
            assert!(store.forget(&key, "nor did this").unwrap());
            let other = store.reserve(&key, other_request()).unwrap();
            match (waiter.join().unwrap(), other) {
                // Woken between the two, or before the other one asked: then it was first.
                (Reserve::Fresh(late), Reserve::Fresh(_)) => {
                    assert_eq!(late.complete(b"").unwrap(), Completion::Superseded);
                }
                (Reserve::Fresh(first), Reserve::Mismatch(_)) => {
                    assert_eq!(first.complete(b"").unwrap(), Completion::Done);
                }
                (Reserve::Mismatch(_), Reserve::Fresh(_)) => {}
                answers => panic!("{answers:?}"),
            }
            drop(owner);
        });
    });
}
