//! Every cell of the table, and the edges of what a caller sees.

use super::*;

const NOW: u64 = 1_000_000;
const TOKEN: u64 = 8192;

fn owned(attempt: u32) -> Owned {
    Owned {
        token: TOKEN,
        attempt,
        fingerprint: Fingerprint::of("same"),
        first_seen_ms: NOW - 500,
        reserved_ms: NOW - 400,
        lease_end_ms: NOW + 100,
        retention_ms: 1_000,
        kept_until_ms: NOW + 2_100,
        durability: Durability::PowerLoss,
        detached: false,
        earlier: None,
    }
}

fn stop(cause: Cause) -> Stop {
    Stop { cause, since_ms: NOW - 50 }
}

fn finished() -> Finished {
    Finished {
        token: TOKEN,
        attempt: 1,
        fingerprint: Fingerprint::of("same"),
        first_seen_ms: NOW - 500,
        completed_ms: NOW - 10,
        kept_until_ms: NOW + 990,
        durability: Durability::PowerLoss,
        body_kept: true,
    }
}

/// The four columns of the table.
fn columns() -> [State; 4] {
    [
        State::Absent,
        State::InFlight(owned(1)),
        State::Interrupted(owned(1), stop(Cause::Crash)),
        State::Done(finished()),
    ]
}

const LEASE: Lease = Lease { ms: 100, while_held_ms: 0 };

fn ask(fingerprint: &str, policy: Policy, too_old: bool) -> Call {
    Call::Reserve(Terms {
        fingerprint: Fingerprint::of(fingerprint),
        retention_ms: 1_000,
        lease: LEASE,
        durability: Durability::ProcessCrash,
        policy,
        too_old_from_ms: if too_old { 0 } else { u64::MAX },
    })
}

const SURFACE: Policy = Policy::Surface;
const TAKE_OVER: Policy = Policy::TakeOver { also_lapsed: false };
const TAKE_OVER_LAPSED: Policy = Policy::TakeOver { also_lapsed: true };
const HELD: Policy = Policy::Hold { ms: 1, opened_ms: NOW };
const NO_LONGER_HELD: Policy = Policy::Hold { ms: 50, opened_ms: NOW - 50 };

fn outcome(state: &State, call: &Call) -> (Answer, Option<StateKind>) {
    let decision = decide(state, call, NOW);
    (decision.answer, decision.write.map(|write| write.kind))
}

const GONE: (Answer, Option<StateKind>) = (Answer::Superseded, None);

fn does(kind: StateKind) -> (Answer, Option<StateKind>) {
    (Answer::Done, Some(kind))
}

fn says(answer: Answer) -> (Answer, Option<StateKind>) {
    (answer, None)
}

#[test]
fn every_cell_of_the_table() {
    use StateKind::{Done, Forgotten, Interrupted, Released, Reserved};
    let fresh = (Answer::Fresh, Some(Reserved));
    let mismatch = says(Answer::Mismatch);
    let interrupted = says(Answer::Interrupted);
    let owner = |token| {
        [
            Call::Complete { token, body_kept: true },
            Call::Complete { token, body_kept: false },
            Call::SaveCheckpoint { token, lease_ms: 100 },
            Call::Renew { token, lease_ms: 100 },
            Call::Detach { token, lease_ms: 100 },
            Call::Release { token },
            Call::Interrupt { token, cause: Cause::Dropped },
            Call::Lapse { token },
            Call::Reattach { token, lease: LEASE, guard_lives: false },
            Call::TakeOver { token, lease: LEASE, durability: Durability::PowerLoss },
            Call::Resolve { token, body_kept: true },
            Call::ReleaseInterrupted { token },
        ]
    };
    let acts = [
        [GONE, does(Done), does(Done), GONE],
        [GONE, does(Done), does(Done), GONE],
        [GONE, does(Reserved), does(Reserved), GONE],
        [GONE, says(Answer::Done), does(Reserved), GONE],
        [GONE, does(Reserved), does(Reserved), GONE],
        [GONE, does(Released), does(Released), GONE],
        [GONE, does(Interrupted), does(Interrupted), GONE],
        [GONE, does(Interrupted), does(Interrupted), GONE],
        [GONE, GONE, GONE, GONE],
        [GONE, GONE, fresh, GONE],
        [GONE, GONE, does(Done), GONE],
        [GONE, GONE, does(Released), GONE],
    ];
    let mut rows = vec![
        (ask("same", SURFACE, false), [fresh, says(Answer::InFlight), interrupted, says(Answer::Replay)]),
        (ask("same", TAKE_OVER, false), [fresh, says(Answer::InFlight), fresh, says(Answer::Replay)]),
        (ask("same", SURFACE, true), [says(Answer::TooOld), says(Answer::InFlight), interrupted, says(Answer::Replay)]),
        (ask("same", TAKE_OVER_LAPSED, false), [fresh, says(Answer::InFlight), fresh, says(Answer::Replay)]),
        (ask("same", HELD, false), [fresh, says(Answer::InFlight), says(Answer::InFlight), says(Answer::Replay)]),
        (ask("same", NO_LONGER_HELD, false), [fresh, says(Answer::InFlight), interrupted, says(Answer::Replay)]),
        (
            ask("same", HELD, true),
            [says(Answer::TooOld), says(Answer::InFlight), says(Answer::InFlight), says(Answer::Replay)],
        ),
        (ask("same", TAKE_OVER, true), [says(Answer::TooOld), says(Answer::InFlight), fresh, says(Answer::Replay)]),
        (ask("other", TAKE_OVER_LAPSED, false), [fresh, mismatch, mismatch, mismatch]),
        (ask("other", HELD, false), [fresh, mismatch, mismatch, mismatch]),
        (ask("other", SURFACE, false), [fresh, mismatch, mismatch, mismatch]),
        (ask("other", TAKE_OVER, false), [fresh, mismatch, mismatch, mismatch]),
        (ask("other", SURFACE, true), [says(Answer::TooOld), mismatch, mismatch, mismatch]),
        (Call::Forget, [GONE, does(Forgotten), does(Forgotten), does(Forgotten)]),
    ];
    rows.extend(owner(TOKEN).into_iter().zip(acts));
    rows.extend(owner(TOKEN - 8).into_iter().map(|call| (call, [GONE; 4])));
    rows.extend(owner(TOKEN + 8).into_iter().map(|call| (call, [GONE; 4])));
    let mut cells = 0;
    for (call, expected) in &rows {
        for (state, expected) in columns().iter().zip(expected) {
            assert_eq!(outcome(state, call), *expected, "{call:?} in {state:?}");
            cells += 1;
        }
    }
    assert_eq!(cells, 50 * 4);
}

#[test]
fn a_later_attempt_is_never_released_to_absent() {
    for state in [State::InFlight(owned(2)), State::Interrupted(owned(2), stop(Cause::Dropped))] {
        assert_eq!(outcome(&state, &Call::Release { token: TOKEN }), does(StateKind::Interrupted));
    }
}

#[test]
fn each_policy_answers_each_cause_as_it_says() {
    use Answer::{Fresh, InFlight, Interrupted};
    let held = |ms| Policy::Hold { ms, opened_ms: NOW - 20 };
    // Crash, dropped, lapsed. The stop was 50 ms ago, and the store was opened 20 ms ago.
    for (policy, answers) in [
        (SURFACE, [Interrupted, Interrupted, Interrupted]),
        // The owner of a lapsed lease may still be at work.
        (TAKE_OVER, [Fresh, Fresh, Interrupted]),
        (TAKE_OVER_LAPSED, [Fresh, Fresh, Fresh]),
        // Nobody knows when a crash came, but that it came before the opening; the other two are counted from the stop.
        (held(20), [Interrupted, Interrupted, Interrupted]),
        (held(21), [InFlight, Interrupted, Interrupted]),
        (held(50), [InFlight, Interrupted, Interrupted]),
        (held(51), [InFlight, InFlight, InFlight]),
        (held(u64::MAX), [InFlight, InFlight, InFlight]),
    ] {
        for (cause, expected) in [Cause::Crash, Cause::Dropped, Cause::LeaseLapsed].into_iter().zip(answers) {
            for attempt in [1, 2] {
                let state = State::Interrupted(owned(attempt), stop(cause));
                let decision = decide(&state, &ask("same", policy, false), NOW);
                assert_eq!(decision.answer, expected, "{policy:?} after {cause:?}");
                assert_eq!(decision.write.is_some(), expected == Fresh, "only a take-over writes");
            }
        }
    }
}

#[test]
fn a_take_over_by_policy_has_the_terms_of_its_call_and_never_a_lower_level() {
    for (before, after) in
        [(Durability::PowerLoss, Durability::PowerLoss), (Durability::ProcessCrash, Durability::ProcessCrash)]
    {
        let owned = Owned { durability: before, retention_ms: 77, ..owned(3) };
        let state = State::Interrupted(owned, stop(Cause::Crash));
        let next = decide(&state, &ask("same", TAKE_OVER, false), NOW).write.unwrap().owned;
        assert_eq!((next.attempt, next.durability, next.retention_ms), (4, after, 1_000));
        assert_eq!((next.lease_end_ms, next.first_seen_ms), (NOW + 100, NOW - 500));
    }
}

#[test]
fn an_owner_that_says_something_after_its_lease_lapsed_is_in_flight_again() {
    let state = State::Interrupted(owned(2), stop(Cause::LeaseLapsed));
    for call in [
        Call::Renew { token: TOKEN, lease_ms: 300 },
        Call::SaveCheckpoint { token: TOKEN, lease_ms: 300 },
        Call::Detach { token: TOKEN, lease_ms: 300 },
    ] {
        let write = decide(&state, &call, NOW).write.unwrap();
        let State::InFlight(again) = apply(&write.record(b"s", b"i", b"")) else { panic!("{call:?}") };
        assert_eq!((again.token, again.attempt, again.lease_end_ms), (TOKEN, 2, NOW + 300), "{call:?}");
        assert!(again.kept_until_ms >= NOW + 300 + again.retention_ms, "{call:?}");
    }
}

#[test]
fn who_found_out_that_nothing_happened_frees_the_key_at_any_attempt() {
    for attempt in [1, 2, 7] {
        let state = State::Interrupted(owned(attempt), stop(Cause::Crash));
        assert_eq!(outcome(&state, &Call::ReleaseInterrupted { token: TOKEN }), does(StateKind::Released));
    }
}

#[test]
fn a_lapse_that_is_said_late_began_when_the_lease_ended() {
    let since = |cause, now_ms| {
        let call = Call::Interrupt { token: TOKEN, cause };
        let write = decide(&State::InFlight(owned(1)), &call, now_ms).write.unwrap();
        assert!(write.owned.kept_until_ms >= owned(1).lease_end_ms + 1_000);
        (write.cause, write.mark_ms)
    };
    assert_eq!(since(Cause::LeaseLapsed, NOW + 250), (Some(Cause::LeaseLapsed), NOW + 100));
    assert_eq!(since(Cause::LeaseLapsed, NOW), (Some(Cause::LeaseLapsed), NOW), "a store that is closed meanwhile");
    assert_eq!(since(Cause::Dropped, NOW + 250), (Some(Cause::Dropped), NOW + 250));
}

#[test]
fn a_guard_that_renews_itself_lapses_at_its_bound_and_at_no_other_time() {
    let flight = State::InFlight(owned(1));
    let guard = Guard::new(TOKEN, Lease { ms: 100, while_held_ms: 250 }, NOW);
    for (at_ms, lease_left_ms) in [(0, 100), (99, 100), (150, 100), (151, 99), (249, 1)] {
        let State::InFlight(seen) = flight.observed(NOW + at_ms, Some(guard)) else { panic!("after {at_ms} ms") };
        assert_eq!(seen.lease_end_ms - (NOW + at_ms), lease_left_ms, "after {at_ms} ms");
    }
    let State::Interrupted(_, stop) = flight.observed(NOW + 250, Some(guard)) else { panic!("at its bound") };
    assert_eq!((stop.cause, stop.since_ms, guard.lapses_ms()), (Cause::LeaseLapsed, NOW + 250, NOW + 250));
    // A bound below the lease shortens nothing.
    let short = Guard::new(TOKEN, Lease { ms: 100, while_held_ms: 30 }, NOW);
    assert!(matches!(flight.observed(NOW + 99, Some(short)), State::InFlight(_)));
    assert!(matches!(flight.observed(NOW + 100, Some(short)), State::Interrupted(..)));
}

#[test]
fn a_take_over_is_the_next_attempt_and_keeps_what_the_key_stands_for() {
    let state = State::Interrupted(owned(1), stop(Cause::LeaseLapsed));
    let write = decide(&state, &Call::TakeOver { token: TOKEN, lease: LEASE, durability: Durability::PowerLoss }, NOW)
        .write
        .unwrap();
    assert_eq!((write.owned.token, write.owned.attempt), (0, 2));
    assert_eq!(write.owned.fingerprint, owned(1).fingerprint);
    assert_eq!(write.owned.first_seen_ms, owned(1).first_seen_ms);
    assert_eq!((write.owned.reserved_ms, write.carry), (NOW, Carry::Checkpoint));
}

#[test]
fn reattach_needs_a_detached_reservation_without_a_guard() {
    let detached = Owned { detached: true, ..owned(1) };
    let call = |guard_lives| Call::Reattach { token: TOKEN, lease: LEASE, guard_lives };
    for state in [State::InFlight(detached), State::Interrupted(detached, stop(Cause::LeaseLapsed))] {
        assert_eq!(outcome(&state, &call(false)), does(StateKind::Reserved));
        assert_eq!(outcome(&state, &call(true)), says(Answer::InFlight));
        assert!(!decide(&state, &call(false), NOW).write.unwrap().owned.detached);
    }
}

#[test]
fn a_renewal_writes_only_when_the_key_would_be_forgotten_too_soon() {
    let renew = |lease_ms| outcome(&State::InFlight(owned(1)), &Call::Renew { token: TOKEN, lease_ms });
    assert_eq!(renew(1_100), says(Answer::Done));
    assert_eq!(renew(1_101), does(StateKind::Reserved));
    let detached = State::InFlight(Owned { detached: true, ..owned(1) });
    assert_eq!(outcome(&detached, &Call::Renew { token: TOKEN, lease_ms: 1 }), does(StateKind::Reserved));
}

#[test]
fn retention_counts_from_the_completion_and_outlasts_every_lease() {
    let done = decide(&State::InFlight(owned(1)), &Call::Complete { token: TOKEN, body_kept: true }, NOW);
    assert_eq!(done.write.unwrap().owned.kept_until_ms, NOW + 1_000);
    let fresh = decide(&State::Absent, &ask("same", SURFACE, false), NOW).write.unwrap().owned;
    assert!(fresh.kept_until_ms >= fresh.lease_end_ms + fresh.retention_ms);
    let dropped = Call::Interrupt { token: TOKEN, cause: Cause::Dropped };
    let stopped = decide(&State::InFlight(owned(1)), &dropped, NOW).write.unwrap().owned;
    assert!(stopped.kept_until_ms >= owned(1).lease_end_ms + 1_000);
}

#[test]
fn what_a_caller_sees_at_a_moment() {
    let guard = |lease_end_ms| Some(Guard { lease_end_ms, ..Guard::new(TOKEN, LEASE, NOW - 100) });
    let flight = State::InFlight(owned(1));
    let cause = |state: State| match state {
        State::Interrupted(_, stop) => Some(stop.cause),
        State::Absent | State::InFlight(_) | State::Done(_) => None,
    };
    // Without a guard, the holder is gone; with one, the lease decides, at its very end, too.
    assert_eq!(cause(flight.observed(NOW, None)), Some(Cause::Crash));
    assert!(matches!(flight.observed(NOW, guard(NOW + 1)), State::InFlight(_)));
    assert_eq!(cause(flight.observed(NOW, guard(NOW))), Some(Cause::LeaseLapsed));
    // A detached one lives by the lease in its record.
    let detached = State::InFlight(Owned { detached: true, ..owned(1) });
    assert!(matches!(detached.observed(NOW + 99, None), State::InFlight(_)));
    assert_eq!(cause(detached.observed(NOW + 100, None)), Some(Cause::LeaseLapsed));
    // The end of the retention: not a millisecond early, and never while a guard lives.
    assert!(matches!(State::Done(finished()).observed(NOW + 989, None), State::Done(_)));
    assert_eq!(State::Done(finished()).observed(NOW + 990, None), State::Absent);
    assert_ne!(flight.observed(NOW + 2_099, None), State::Absent);
    assert_eq!(flight.observed(NOW + 2_100, None), State::Absent);
    assert_ne!(flight.observed(NOW + 2_100, guard(NOW)), State::Absent);
}

#[test]
fn applying_what_was_decided_gives_the_state_that_was_decided() {
    let state = State::InFlight(owned(1));
    for call in [
        Call::Complete { token: TOKEN, body_kept: false },
        Call::SaveCheckpoint { token: TOKEN, lease_ms: 100 },
        Call::Detach { token: TOKEN, lease_ms: 100 },
        Call::Interrupt { token: TOKEN, cause: Cause::Dropped },
        Call::Release { token: TOKEN },
        Call::Forget,
    ] {
        let write = decide(&state, &call, NOW).write.unwrap();
        let record = write.record(b"s", b"i", b"");
        match (write.kind, apply(&record)) {
            (StateKind::Reserved, State::InFlight(owned)) => assert_eq!(owned, write.owned),
            (StateKind::Interrupted, State::Interrupted(owned, stop)) => {
                assert_eq!((owned.token, stop.since_ms), (TOKEN, NOW));
            }
            (StateKind::Done, State::Done(finished)) => {
                assert_eq!((finished.token, finished.completed_ms, finished.body_kept), (TOKEN, NOW, false));
            }
            (StateKind::Released | StateKind::Forgotten, State::Absent) => {}
            (kind, state) => panic!("{kind:?} gave {state:?}"),
        }
    }
}
