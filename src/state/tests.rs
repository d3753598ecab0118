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
        too_old,
    })
}

const SURFACE: Policy = Policy::Surface;
const TAKE_OVER: Policy = Policy::TakeOver { also_lapsed: false };

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
        [GONE, GONE, GONE, GONE],
        [GONE, GONE, fresh, GONE],
        [GONE, GONE, does(Done), GONE],
        [GONE, GONE, does(Released), GONE],
    ];
    let mut rows = vec![
        (ask("same", SURFACE, false), [fresh, says(Answer::InFlight), interrupted, says(Answer::Replay)]),
        (ask("same", TAKE_OVER, false), [fresh, says(Answer::InFlight), fresh, says(Answer::Replay)]),
        (ask("same", SURFACE, true), [says(Answer::TooOld), says(Answer::InFlight), interrupted, says(Answer::Replay)]),
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
    assert_eq!(cells, 40 * 4);
}

#[test]
fn a_later_attempt_is_never_released_to_absent() {
    for state in [State::InFlight(owned(2)), State::Interrupted(owned(2), stop(Cause::Dropped))] {
        assert_eq!(outcome(&state, &Call::Release { token: TOKEN }), does(StateKind::Interrupted));
    }
}

#[test]
fn a_policy_takes_over_only_from_an_owner_that_is_known_to_be_gone() {
    for (cause, answer) in
        [(Cause::Crash, Answer::Fresh), (Cause::Dropped, Answer::Fresh), (Cause::LeaseLapsed, Answer::Interrupted)]
    {
        let state = State::Interrupted(owned(1), stop(cause));
        assert_eq!(decide(&state, &ask("same", TAKE_OVER, false), NOW).answer, answer, "{cause:?}");
    }
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
