//! Small histories, each true or false for a reason that can be seen.

use super::spec::{Answer, Ask, Call, Cause, End, LEAP_MS, Name, Policy, Shown};
use super::{NEVER, Op, check};

const LEASE_MS: u64 = 10_000;

fn op(id: u64, invoked: u64, call: Call, answered: Option<(u64, Answer)>) -> Op {
    let everywhere = matches!(call, Call::Advance { .. } | Call::End(_));
    Op { id, key: (!everywhere).then_some(0), call, invoked, answered }
}

/// Calls that follow each other, from this stamp on.
fn in_turn(from: u64, calls: &[(Call, Answer)]) -> Vec<Op> {
    let stamps = (from..).step_by(2);
    stamps.zip(calls).map(|(at, (call, answer))| op(at, at, *call, Some((at + 1, *answer)))).collect()
}

/// Calls that are all open at the same time, from this stamp on.
fn at_once(from: u64, calls: &[(Call, Answer)]) -> Vec<Op> {
    (from..).zip(calls).map(|(at, (call, answer))| op(at, at, *call, Some((at + 50, *answer)))).collect()
}

fn reserve(request: u64) -> Call {
    Call::Reserve(Ask { request, lease_ms: LEASE_MS, policy: Policy::Surface, waits: false })
}

fn reserve_or_take_over() -> Call {
    Call::Reserve(Ask { request: 0, lease_ms: LEASE_MS, policy: Policy::TakeOver, waits: false })
}

fn take_over(token: u64) -> Call {
    Call::TakeOver { token, ask: Ask { request: 0, lease_ms: LEASE_MS, policy: Policy::Surface, waits: false } }
}

fn shown(token: u64, attempt: u64) -> Shown {
    Shown { token, attempt, checkpoint: 0 }
}

fn fresh(token: u64) -> Answer {
    Answer::Fresh(shown(token, 1))
}

fn complete(token: u64) -> Call {
    Call::Complete { token, body: token }
}

fn replay(token: u64) -> Answer {
    Answer::Replay { body: token, attempt: 1 }
}

fn dropped(token: u64) -> (Call, Answer) {
    (Call::Drop { token, release: false }, Answer::Over)
}

fn end(end: End) -> (Call, Answer) {
    (Call::End(end), Answer::Over)
}

fn passes(ms: u64) -> (Call, Answer) {
    (Call::Advance { ms }, Answer::Over)
}

fn interrupted(token: u64, attempt: u64, cause: Cause) -> Answer {
    Answer::Interrupted(shown(token, attempt), cause)
}

#[track_caller]
fn is_true(history: &[Op]) {
    if let Err(why) = check(history) {
        panic!("{why}");
    }
}

#[track_caller]
fn is_false(history: &[Op]) {
    assert!(check(history).is_err(), "an order was found for {history:#?}");
}

#[test]
fn calls_in_turn_are_answered_by_the_table() {
    is_true(&in_turn(1, &[(reserve(0), fresh(8)), (complete(8), Answer::Done), (reserve(0), replay(8))]));
    is_false(&in_turn(1, &[(reserve(0), fresh(8)), (complete(8), Answer::Done), (reserve(0), fresh(16))]));
    is_false(&in_turn(1, &[(reserve(0), fresh(8)), (complete(8), Answer::Superseded)]));
    is_false(&in_turn(1, &[(reserve(0), fresh(8)), (reserve(0), fresh(16))]));
    is_true(&in_turn(1, &[(reserve(0), fresh(8)), (reserve(1), Answer::Mismatch(Name::InFlight))]));
    is_false(&in_turn(1, &[(reserve(0), fresh(8)), (reserve(1), Answer::InFlight(shown(8, 1)))]));
    is_false(&in_turn(1, &[(reserve(0), fresh(8)), (reserve(1), Answer::Mismatch(Name::Done))]));
    let given_back = [(reserve(0), fresh(8)), (Call::Release { token: 8 }, Answer::Done), (reserve(1), fresh(16))];
    is_true(&in_turn(1, &given_back));
    is_false(&in_turn(1, &[given_back[0], given_back[1], (reserve(1), fresh(4))]));
    let after_drop = [(reserve(0), fresh(8)), dropped(8)];
    is_true(&in_turn(1, &[after_drop, [(take_over(8), Answer::Fresh(shown(16, 2))), dropped(8)]].concat()));
    is_false(&in_turn(1, &[after_drop, [(take_over(8), Answer::Fresh(shown(16, 1))), dropped(8)]].concat()));
    is_true(&in_turn(1, &[after_drop, [(reserve_or_take_over(), Answer::Fresh(shown(16, 2))), dropped(16)]].concat()));
}

#[test]
fn a_release_of_a_later_attempt_leaves_the_key_interrupted() {
    let calls = [
        (reserve(0), fresh(8)),
        dropped(8),
        (take_over(8), Answer::Fresh(shown(16, 2))),
        (Call::Release { token: 16 }, Answer::Done),
    ];
    is_true(&in_turn(1, &[&calls[..], &[(reserve(0), interrupted(16, 2, Cause::Dropped))]].concat()));
    is_false(&in_turn(1, &[&calls[..], &[(reserve(0), fresh(24))]].concat()));
}

#[test]
fn calls_at_once_may_be_put_in_any_order_but_one_is_first() {
    is_true(&at_once(1, &[(reserve(0), fresh(8)), (reserve(0), Answer::InFlight(shown(8, 1)))]));
    is_true(&at_once(1, &[(reserve(0), Answer::InFlight(shown(8, 1))), (reserve(0), fresh(8))]));
    is_false(&at_once(1, &[(reserve(0), fresh(8)), (reserve(0), fresh(16))]));
    is_false(&at_once(1, &[(reserve(0), Answer::InFlight(shown(8, 1)))]));
    // The order of the two tells which request it is.
    is_true(&at_once(1, &[(reserve(0), fresh(8)), (reserve(1), Answer::Mismatch(Name::InFlight))]));
    is_false(&at_once(
        1,
        &[(reserve(0), Answer::Mismatch(Name::InFlight)), (reserve(1), Answer::Mismatch(Name::InFlight))],
    ));
    // A completion and a drop by a handle of somebody else: one acts.
    let before = in_turn(1, &[(reserve(0), fresh(8)), dropped(8), (reserve(0), interrupted(8, 1, Cause::Dropped))]);
    let race = |first, second| {
        [before.clone(), at_once(10, &[(Call::Resolve { token: 8, body: 7 }, first), (take_over(8), second)])].concat()
    };
    is_true(&race(Answer::Done, Answer::Replay { body: 7, attempt: 1 }));
    is_true(&race(Answer::Superseded, Answer::Fresh(shown(16, 2))));
    is_false(&race(Answer::Done, Answer::Fresh(shown(16, 2))));
    is_false(&race(Answer::Superseded, Answer::Replay { body: 7, attempt: 1 }));
}

#[test]
fn a_take_over_that_comes_too_late_is_answered_as_a_reserve() {
    // Between the two steps of the take-over the key was released, so that the second one finds it free.
    let before = in_turn(1, &[(reserve(0), fresh(8)), dropped(8)]);
    let release = (Call::ReleaseInterrupted { token: 8 }, Answer::Done);
    is_true(&[before.clone(), at_once(10, &[(take_over(8), fresh(16)), release])].concat());
    is_false(&[before, at_once(10, &[(take_over(8), fresh(16))])].concat());
}

#[test]
fn who_was_killed_may_have_acted_or_not() {
    let reserved = in_turn(1, &[(reserve(0), fresh(8))]);
    let completes = op(10, 10, complete(8), None);
    let killed = in_turn(20, &[end(End::Kill)]);
    let with = |calls: &[(Call, Answer)]| [&reserved[..], &[completes], &killed, &in_turn(30, calls)].concat();
    is_true(&with(&[(reserve(0), replay(8))]));
    is_true(&with(&[(reserve(0), interrupted(8, 1, Cause::Crash))]));
    is_false(&with(&[(reserve(0), interrupted(8, 1, Cause::Crash)), (reserve(0), replay(8))]));
    is_false(&with(&[(reserve(0), fresh(16))]));
    // What was answered before the kill has happened.
    let told = op(10, 10, complete(8), Some((11, Answer::Done)));
    let lost = in_turn(30, &[(reserve(0), interrupted(8, 1, Cause::Crash))]);
    is_false(&[&reserved[..], &[told], &killed, &lost].concat());
    // What was answered after the image was taken may be missing from it, and else is what it was.
    let after = op(10, 10, complete(8), Some((NEVER, Answer::Done)));
    is_true(&[&reserved[..], &[after], &killed, &lost].concat());
    let superseded = op(10, 10, complete(8), Some((NEVER, Answer::Superseded)));
    is_false(&[&reserved[..], &[superseded], &killed, &in_turn(30, &[(reserve(0), replay(8))])].concat());
}

#[test]
fn a_reservation_of_one_who_was_killed_has_a_token_that_the_next_one_learns() {
    let asks = op(1, 1, reserve(0), None);
    let killed = in_turn(20, &[end(End::Kill)]);
    let with = |calls: &[(Call, Answer)]| [&[asks][..], &killed, &in_turn(30, calls)].concat();
    let crashed = |token| (reserve(0), interrupted(token, 1, Cause::Crash));
    is_true(&with(&[crashed(8), (take_over(8), Answer::Fresh(shown(16, 2)))]));
    is_true(&with(&[(reserve(0), fresh(8))]));
    is_false(&with(&[crashed(8), crashed(16)]));
    is_false(&with(&[crashed(8), (take_over(8), Answer::Fresh(shown(4, 2)))]));
}

#[test]
fn tokens_grow_also_from_key_to_key() {
    let other_key = |op: Op| Op { key: Some(1), ..op };
    let first = in_turn(1, &[(reserve(0), fresh(16))]);
    let smaller: Vec<_> = in_turn(10, &[(reserve(0), fresh(8))]).into_iter().map(other_key).collect();
    is_false(&[first.clone(), smaller].concat());
    let same: Vec<_> = in_turn(10, &[(reserve(0), fresh(16))]).into_iter().map(other_key).collect();
    is_false(&[first.clone(), same].concat());
    let at_once = vec![other_key(op(0, 0, reserve(0), Some((9, fresh(8)))))];
    is_true(&[first, at_once].concat());
}

#[test]
fn a_power_loss_undoes_what_needs_no_sync_and_nothing_else() {
    let given_back = [(reserve(0), fresh(8)), (Call::Release { token: 8 }, Answer::Done)];
    let lost = [end(End::PowerLoss), (reserve(0), interrupted(8, 1, Cause::Crash))];
    is_true(&in_turn(1, &[given_back, lost].concat()));
    is_true(&in_turn(1, &[given_back, [end(End::PowerLoss), (reserve(0), fresh(16))]].concat()));
    is_false(&in_turn(1, &[given_back, [end(End::Kill), lost[1]]].concat()));
    // Somebody was told that the key is free.
    is_false(&in_turn(1, &[given_back, [(Call::Peek, Answer::Unknown), lost[0]], [lost[1], lost[1]]].concat()));
    let done = [(reserve(0), fresh(8)), (complete(8), Answer::Done)];
    is_false(&in_turn(1, &[done, lost].concat()));
}

#[test]
fn leases_lapse_and_keys_expire_when_time_passes() {
    let lapsed = [(reserve(0), fresh(8)), passes(LEASE_MS)];
    is_true(&in_turn(
        1,
        &[lapsed, [(reserve(0), interrupted(8, 1, Cause::LeaseLapsed)), (complete(8), Answer::Done)]].concat(),
    ));
    is_false(&in_turn(1, &[&lapsed[..], &[(reserve(0), Answer::InFlight(shown(8, 1)))]].concat()));
    is_false(&in_turn(
        1,
        &[(reserve(0), fresh(8)), passes(LEASE_MS - 1), (reserve(0), interrupted(8, 1, Cause::LeaseLapsed))],
    ));
    // A policy of taking over stops at a lapsed lease.
    is_false(&in_turn(1, &[&lapsed[..], &[(reserve_or_take_over(), Answer::Fresh(shown(16, 2)))]].concat()));
    let done = [(reserve(0), fresh(8)), (complete(8), Answer::Done)];
    is_true(&in_turn(1, &[done, [passes(LEAP_MS), (reserve(0), fresh(16))]].concat()));
    is_false(&in_turn(1, &[done, [passes(LEASE_MS), (reserve(0), fresh(16))]].concat()));
    // A guard keeps its key.
    let kept = [(reserve(0), fresh(8)), passes(LEAP_MS)];
    is_false(&in_turn(1, &[&kept[..], &[(reserve(0), fresh(16))]].concat()));
    is_true(&in_turn(1, &[&kept[..], &[dropped(8), passes(LEAP_MS), (reserve(0), fresh(16))]].concat()));
}

#[test]
fn work_that_was_detached_has_one_holder_at_a_time() {
    let detached = [(reserve(0), fresh(8)), (Call::Detach { token: 8, lease_ms: LEASE_MS }, Answer::Done)];
    let reattach = Call::Reattach { token: 8, lease_ms: LEASE_MS };
    is_true(&in_turn(1, &[detached, [end(End::Kill), (reserve(0), Answer::InFlight(shown(8, 1)))]].concat()));
    is_true(&in_turn(1, &[detached, [(reattach, Answer::Done), (reattach, Answer::Held)]].concat()));
    is_false(&in_turn(1, &[detached, [(reattach, Answer::Done), (reattach, Answer::Done)]].concat()));
    is_false(&in_turn(1, &[(reserve(0), fresh(8)), dropped(8), (reattach, Answer::Done)]));
    // The guard of the first holder is worth nothing any more, that of the second is.
    let renew = |guard| Call::Renew { token: 8, guard, lease_ms: LEASE_MS };
    let held = [detached, [(reattach, Answer::Done), (renew(5), Answer::Done)]].concat();
    is_true(&in_turn(1, &[&held[..], &[(renew(1), Answer::Superseded)]].concat()));
    is_false(&in_turn(1, &[&held[..], &[(renew(1), Answer::Done)]].concat()));
}

#[test]
fn a_long_history_of_many_at_once_is_checked_in_time() {
    let mut history = Vec::new();
    for round in 0..500 {
        let token = 8 * (round + 1);
        let mut calls = vec![(reserve(0), fresh(token))];
        calls.extend([(reserve(0), Answer::InFlight(shown(token, 1))); 6]);
        calls.push((reserve(1), Answer::Mismatch(Name::InFlight)));
        history.append(&mut at_once(round * 1000 + 1, &calls));
        history.append(&mut in_turn(round * 1000 + 900, &[(Call::Release { token }, Answer::Done)]));
    }
    let checked = check(&history).unwrap();
    assert_eq!(checked.calls, 4500);
}
