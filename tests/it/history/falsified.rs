//! Recorded histories are made false, and the search must find each of them out.
//!
//! Every kind of falsehood changes one answer, one token or the time of one call of a history that was recorded while
//! time stood still, where the rest of the history proves that the change is false. The proof stands at each kind; the
//! words it uses are the functions of [`Facts`].

mod facts;

use self::facts::{Facts, moved_before, renamed};
use super::rig::{Rig, Stage, Time};
use crate::linear::spec::{Answer, Call, Cause, End, Name, Policy, Shown};
use crate::linear::{self, Op};
use crate::place::{EVERYWHERE, tell};
use crate::workload::Random;

/// How many histories of each kind are made false, and the fewest of all kinds together.
const EACH: usize = 4;
const ALL_MIN: usize = 100;

/// More histories than this are not needed to find each kind.
const RECORDED_MAX: u64 = 400;

/// A falsehood: what it is, and the history with it, if this call lends itself to it.
type Kind = (&'static str, fn(&Facts<'_>, &Op) -> Option<Vec<Op>>);

#[rustfmt::skip]
const KINDS: &[Kind] = &[
    ("a second owner beside one at work", second_owner),
    ("free although nobody gave it back", |facts, op| free(facts, op, |_| true)),
    ("free after a drop", |facts, op| free(facts, op, |between| matches!(between.call, Call::Drop { .. }))),
    ("free after a completion", |facts, op| free(facts, op, facts::completes)),
    ("free after a later attempt gave it back", |facts, op| free(facts, op, facts::releases)),
    ("a reservation is lost by a kill", |facts, op| free(facts, op, |between| between.call == Call::End(End::Kill))),
    ("a reservation is lost by a power loss", |facts, op| free(facts, op, |end| end.call == Call::End(End::PowerLoss))),
    ("a reservation is lost by a close", |facts, op| free(facts, op, |between| between.call == Call::End(End::Close))),
    ("known, but not to a peek", unknown_to_a_peek),
    ("known, but not to who forgets it", unknown_to_a_forget),
    ("bytes that nobody stored", bytes_of_nobody),
    ("bytes of another key", bytes_of_another_key),
    ("bytes of an earlier life", bytes_of_an_earlier_life),
    ("replayed before it was completed", replayed_too_early),
    ("in flight after it was completed", |facts, op| undone(facts, op, None, in_flight)),
    ("interrupted after it was completed", |facts, op| undone(facts, op, None, interrupted)),
    ("a completion is lost by a kill", |facts, op| undone(facts, op, Some(End::Kill), interrupted)),
    ("a completion is lost by a power loss", |facts, op| undone(facts, op, Some(End::PowerLoss), interrupted)),
    ("a completion is lost by a close", |facts, op| undone(facts, op, Some(End::Close), interrupted)),
    ("a mismatch with its own request", |facts, op| undone(facts, op, None, |_| Answer::Mismatch(Name::Done))),
    ("no mismatch while another request is at work", no_mismatch_in_flight),
    ("no mismatch after another request was done", no_mismatch_done),
    ("a mismatch with a wrong state", wrong_state),
    ("the owner is told that it was superseded", superseded_for_nothing),
    ("who was superseded completes", late_completion),
    ("who was superseded renews or saves", late_renewal),
    ("two resolve", two_resolve),
    ("two take over", two_take_over),
    ("reattached though never detached", never_detached),
    ("a token goes back", token_goes_back),
    ("a token is given twice", token_given_twice),
    ("in flight before it was reserved", in_flight_too_early),
    ("in flight after its owner dropped it", in_flight_after_drop),
    ("in flight with an owner long past", owner_long_past),
    ("interrupted while its owner works", interrupted_at_work),
    ("a first attempt is the second", first_is_second),
    ("a take-over skips an attempt", attempt_skipped),
    ("an interruption counts another attempt", other_attempt),
    ("a checkpoint is lost", checkpoint_lost),
    ("a checkpoint that nobody saved", checkpoint_of_nobody),
    ("a crash before any crash", crash_before_any),
    ("dropped, but nobody let go", dropped_by_nobody),
];

// When time stands still, nothing but a release, a drop that releases, a release by handle or a forget makes a key
// absent, and an answer is `Fresh` with attempt 1 only when it was absent.

/// `Facts::held`: the owner was told before the call, and nothing that could end its attempt began before the answer.
fn second_owner(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    facts.held(op)?;
    matches!(op.call, Call::Reserve(_)).then(|| facts.answering(op, Answer::Fresh(facts.new_owner())))
}

/// `Facts::is_taken`: somebody was told before the call that the key is taken, and nothing freed it since.
fn free(facts: &Facts<'_>, op: &Op, between: impl Fn(&Op) -> bool) -> Option<Vec<Op>> {
    let Call::Reserve(ask) = op.call else { return None };
    let false_answer = Answer::Fresh(facts.new_owner());
    let taken = ask.policy == Policy::Surface && op.answer()?.fresh().is_none() && facts.is_taken(op, between);
    taken.then(|| facts.answering(op, false_answer))
}

/// As `free`: what is not absent is known to a peek.
fn unknown_to_a_peek(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let known = matches!(op.answer()?, Answer::Known { .. });
    (known && facts.is_taken(op, |_| true)).then(|| facts.answering(op, Answer::Unknown))
}

/// As `free`: to forget what is not absent is never answered "nothing was known".
fn unknown_to_a_forget(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let forgets = op.call == Call::Forget && op.answer()? == Answer::Done;
    (forgets && facts.is_taken(op, |_| true)).then(|| facts.answering(op, Answer::Unknown))
}

/// No call stores these bytes.
fn bytes_of_nobody(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let Answer::Replay { attempt, .. } = op.answer()? else { return None };
    Some(facts.answering(op, Answer::Replay { body: facts.stamp_max() + 1, attempt }))
}

/// A call on another key alone stores these bytes.
fn bytes_of_another_key(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let Answer::Replay { attempt, .. } = op.answer()? else { return None };
    let body = facts.ops.iter().find_map(|other| facts::body(other).filter(|_| other.key != op.key))?;
    Some(facts.answering(op, Answer::Replay { body, attempt }))
}

/// `Facts::done`: throughout the call the key was done with other bytes, and nothing stores twice.
fn bytes_of_an_earlier_life(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let Answer::Replay { body, attempt } = op.answer()? else { return None };
    facts.done(op)?;
    let earlier = facts.on_key_of(op).filter(|other| other.is_before(op)).filter_map(facts::body);
    let other = earlier.rev().find(|other| *other != body)?;
    Some(facts.answering(op, Answer::Replay { body: other, attempt }))
}

/// The only call that stores these bytes begins after the answer.
fn replayed_too_early(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let Answer::Replay { body, .. } = op.answer()? else { return None };
    let completion = facts.on_key_of(op).find(|other| facts::body(other) == Some(body))?;
    Some(moved_before(facts.ops, op, completion))
}

/// `Facts::done`: the key was done throughout the call, also across `end`, so that its request is replayed.
fn undone(facts: &Facts<'_>, op: &Op, end: Option<End>, answer: fn(Shown) -> Answer) -> Option<Vec<Op>> {
    let Answer::Replay { .. } = op.answer()? else { return None };
    let completion = facts.done(op)?;
    let ends = |other: &&Op| completion.is_before(other) && other.is_before(op);
    let crossed = facts.ops.iter().filter(ends).any(|other| end.is_some_and(|end| other.call == Call::End(end)));
    let owner = facts.reservation(completion)?.answer()?;
    let Answer::Fresh(shown) = owner else { return None };
    (crossed || end.is_none()).then(|| facts.answering(op, answer(shown)))
}

fn in_flight(shown: Shown) -> Answer {
    Answer::InFlight(shown)
}

fn interrupted(shown: Shown) -> Answer {
    Answer::Interrupted(shown, Cause::Crash)
}

/// `Facts::held`: throughout the call the key stood for the request of its owner, which is another one.
fn no_mismatch_in_flight(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let (Call::Reserve(_), Answer::Mismatch(_)) = (op.call, op.answer()?) else { return None };
    let Answer::Fresh(shown) = facts.held(op)?.answer()? else { return None };
    Some(facts.answering(op, Answer::InFlight(shown)))
}

/// `Facts::done`: throughout the call the key stood for the request that is done, which is another one.
fn no_mismatch_done(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let (Call::Reserve(_), Answer::Mismatch(_)) = (op.call, op.answer()?) else { return None };
    let completion = facts.done(op)?;
    let Answer::Fresh(shown) = facts.reservation(completion)?.answer()? else { return None };
    let body = facts::body(completion)?;
    Some(facts.answering(op, Answer::Replay { body, attempt: shown.attempt }))
}

/// `Facts::held` or `Facts::done`: the key was in flight, or done, throughout the call.
fn wrong_state(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let (Call::Reserve(_), Answer::Mismatch(name)) = (op.call, op.answer()?) else { return None };
    let (true_name, false_name) = match (facts.held(op), facts.done(op)) {
        (Some(_), None) => (Name::InFlight, Name::Interrupted),
        (None, Some(_)) => (Name::Done, Name::InFlight),
        _ => return None,
    };
    assert_eq!(name, true_name, "what was recorded is true: {op:?}");
    Some(facts.answering(op, Answer::Mismatch(false_name)))
}

/// `Facts::held` by the very token: nothing else could end the attempt, so it was the latest.
fn superseded_for_nothing(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let (Call::Complete { token, .. } | Call::Release { token }, Answer::Done) = (op.call, op.answer()?) else {
        return None;
    };
    let own = facts.held(op)?.answer()?.fresh() == Some(token);
    own.then(|| facts.answering(op, Answer::Superseded))
}

/// A later owner had been told its larger token before the call, and no token ever comes back.
fn late_completion(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let (Call::Complete { token, .. }, Answer::Superseded) = (op.call, op.answer()?) else { return None };
    facts.told_tokens_before(op).any(|later| later > token).then(|| facts.answering(op, Answer::Done))
}

/// As `late_completion`.
fn late_renewal(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let (Call::Renew { token, .. } | Call::SaveCheckpoint { token, .. }, Answer::Superseded) = (op.call, op.answer()?)
    else {
        return None;
    };
    facts.told_tokens_before(op).any(|later| later > token).then(|| facts.answering(op, Answer::Done))
}

/// The reservation had been completed or resolved before the call, so that it is not interrupted any more.
fn two_resolve(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let (Call::Resolve { token, .. }, Answer::Superseded) = (op.call, op.answer()?) else { return None };
    let mut before = facts.on_key_of(op).filter(|other| other.is_before(op) && facts::completes(other));
    before.any(|other| facts::token(&other.call) == Some(token)).then(|| facts.answering(op, Answer::Done))
}

/// Somebody had taken over from this very token before the call. What the handle asks for beyond that is a first
/// attempt.
fn two_take_over(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let (Call::TakeOver { token, .. }, None) = (op.call, op.answer()?.fresh()) else { return None };
    let mut others = facts.on_key_of(op).filter(|other| other.is_before(op));
    let attempt = others.find_map(|other| match (other.call, other.answer()?) {
        (Call::TakeOver { token: same, .. }, Answer::Fresh(shown)) if same == token && shown.attempt > 1 => {
            Some(shown.attempt)
        }
        _ => None,
    })?;
    Some(facts.answering(op, Answer::Fresh(Shown { attempt, ..facts.new_owner() })))
}

/// Nobody ever tried to detach this reservation.
fn never_detached(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    // Every reattachment in these histories follows a detachment; one of another token does not.
    let (Call::Reattach { .. }, Answer::Superseded) = (op.call, op.answer()?) else { return None };
    let is_detached =
        |token| facts.ops.iter().any(|other| matches!(other.call, Call::Detach { token: t, .. } if t == token));
    let token = facts.told_tokens_before(op).find(|token| !is_detached(*token))?;
    let Call::Reattach { lease_ms, .. } = op.call else { return None };
    Some(facts.changing(op, |op| {
        op.call = Call::Reattach { token, lease_ms };
        op.answered = op.answered.map(|(at, _)| (at, Answer::Done));
    }))
}

/// A larger token had been told, on whatever key, before the reservation was asked for.
fn token_goes_back(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let token = op.answer()?.fresh()?;
    let earlier =
        facts.fresh().filter(|other| other.is_before(op)).filter_map(|other| other.answer()?.fresh()).max()?;
    Some(renamed(facts.ops, token, earlier - 1))
}

/// The other reservation has it.
fn token_given_twice(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let token = op.answer()?.fresh()?;
    let other = facts.fresh().filter_map(|other| other.answer()?.fresh()).find(|other| *other < token)?;
    Some(renamed(facts.ops, token, other))
}

/// The call that made the reservation begins after the answer.
fn in_flight_too_early(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let Answer::InFlight(shown) = op.answer()? else { return None };
    let made = facts.fresh().find(|other| other.answer().and_then(|answer| answer.fresh()) == Some(shown.token))?;
    Some(moved_before(facts.ops, op, made))
}

/// The guard had fallen before the call, and views of it are worth nothing without it.
fn in_flight_after_drop(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let (Call::Reserve(_), Answer::Interrupted(shown, Cause::Dropped)) = (op.call, op.answer()?) else { return None };
    let dropped = |other: &Op| matches!(other.call, Call::Drop { token, .. } if token == shown.token);
    let mut before = facts.on_key_of(op).filter(|other| other.is_before(op));
    before.any(dropped).then(|| facts.answering(op, Answer::InFlight(shown)))
}

/// As `late_completion`: what is shown is the latest owner.
fn owner_long_past(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let Answer::InFlight(_) = op.answer()? else { return None };
    let latest = facts.told_tokens_before(op).max()?;
    let past = facts.fresh().filter(|other| other.key == op.key).filter_map(|other| other.answer());
    let shown = past.filter_map(|answer| if let Answer::Fresh(shown) = answer { Some(shown) } else { None });
    let shown = shown.filter(|shown| shown.token < latest).last()?;
    Some(facts.answering(op, Answer::InFlight(shown)))
}

/// `Facts::held`: nothing that could end the attempt began before the answer.
fn interrupted_at_work(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let (Call::Reserve(_), Answer::InFlight(shown)) = (op.call, op.answer()?) else { return None };
    facts.held(op)?;
    Some(facts.answering(op, Answer::Interrupted(shown, Cause::Dropped)))
}

/// Who does not ask to take over gets a key that was free, and its first attempt.
fn first_is_second(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let (Call::Reserve(ask), Answer::Fresh(shown)) = (op.call, op.answer()?) else { return None };
    (ask.policy == Policy::Surface).then(|| facts.answering(op, Answer::Fresh(Shown { attempt: 2, ..shown })))
}

/// The attempt that was taken over from is known, and the next one counts one more.
fn attempt_skipped(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let (Call::TakeOver { token, .. }, Answer::Fresh(shown)) = (op.call, op.answer()?) else { return None };
    (shown.attempt > 1 && facts.attempt(token).is_some())
        .then(|| facts.answering(op, Answer::Fresh(Shown { attempt: shown.attempt + 1, ..shown })))
}

/// The owner of that token had been told another number.
fn other_attempt(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let Answer::Interrupted(shown, cause) = op.answer()? else { return None };
    let attempt = facts.attempt(shown.token)? + 1;
    Some(facts.answering(op, Answer::Interrupted(Shown { attempt, ..shown }, cause)))
}

/// It had been saved under this token before the call, and a later one only takes its place.
fn checkpoint_lost(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let shown = facts::unfinished(&op.answer()?)?;
    let saved = |other: &Op| {
        matches!(other.call, Call::SaveCheckpoint { token, .. } if token == shown.token)
            && other.answer() == Some(Answer::Done)
    };
    let mut before = facts.on_key_of(op).filter(|other| other.is_before(op));
    before.any(saved).then(|| facts.showing(op, Shown { checkpoint: 0, ..shown }))
}

/// No call saves these bytes.
fn checkpoint_of_nobody(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let shown = facts::unfinished(&op.answer()?)?;
    Some(facts.showing(op, Shown { checkpoint: facts.stamp_max() + 1, ..shown }))
}

/// No process had ended.
fn crash_before_any(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let Answer::Interrupted(shown, Cause::Dropped) = op.answer()? else { return None };
    let first = !facts.ops.iter().any(|other| matches!(other.call, Call::End(_)) && other.is_before(op));
    first.then(|| facts.answering(op, Answer::Interrupted(shown, Cause::Crash)))
}

/// The reservation is known, and nobody let it fall, detached it or gave it back, not even into a call that let it
/// fall.
fn dropped_by_nobody(facts: &Facts<'_>, op: &Op) -> Option<Vec<Op>> {
    let Answer::Interrupted(shown, Cause::Crash) = op.answer()? else { return None };
    facts.attempt(shown.token)?;
    let lets_go = |other: &Op| {
        let stays = matches!(other.call, Call::Renew { .. } | Call::SaveCheckpoint { .. } | Call::Resolve { .. });
        !stays && facts::token(&other.call) == Some(shown.token)
    };
    (!facts.ops.iter().any(lets_go)).then(|| facts.answering(op, Answer::Interrupted(shown, Cause::Dropped)))
}

/// Makes one history false in as many ways as are still looked for, each in one place that is found by chance.
fn falsify(history: &[Op], found: &mut [usize], random: &mut Random) {
    let facts = Facts::new(history);
    let told: Vec<_> = history.iter().filter(|op| op.is_told() && op.key.is_some()).collect();
    for ((name, make), found) in KINDS.iter().zip(found).filter(|(_, found)| **found < EACH) {
        let (before, after) = told.split_at(random.index(told.len()));
        let mut fit = after.iter().chain(before).filter_map(|op| Some((op, make(&facts, op)?)));
        let Some((op, false_history)) = fit.next() else { continue };
        assert!(linear::check(&false_history).is_err(), "{name}: found true with another answer to {op:?}");
        *found += 1;
    }
}

#[test]
fn histories_that_were_made_false_are_found_out() {
    let mut found = vec![0; KINDS.len()];
    let mut recorded = 0;
    let mut random = Random(super::number("KEYONCE_HISTORY_SEED", 0));
    for seed in 0..RECORDED_MAX {
        let setting = EVERYWHERE[usize::try_from(seed).unwrap() % EVERYWHERE.len()];
        let history = Rig::new(random.next(), setting, Time::StandsStill, Stage::Simulated).record();
        linear::check(&history).unwrap_or_else(|why| panic!("a history as it was recorded: {why}"));
        falsify(&history, &mut found, &mut random);
        recorded += 1;
        if found.iter().all(|found| *found == EACH) {
            break;
        }
    }
    let all: usize = found.iter().sum();
    tell(&format!("{all} histories made false out of {recorded} true ones, all found out:"));
    for ((name, _), found) in KINDS.iter().zip(&found) {
        tell(&format!("  {found}  {name}"));
    }
    assert!(all >= ALL_MIN, "only {all} histories were made false");
    let never: Vec<_> = KINDS.iter().zip(&found).filter(|(_, found)| **found == 0).map(|((name, _), _)| name).collect();
    assert!(never.is_empty(), "no history lends itself to: {never:?}");
}
