//! The answer of `reserve`, and how it comes about.

use std::time::Duration;

use crate::engine::{Acted, Begun};
use crate::error::Error;
use crate::reservation::{Asked, Ending, InFlight, Interrupted, Mismatch, Question, Reservation, Response, TooOld};
use crate::state::{Answer, State};
use crate::wait::Caller;

/// The answer to a reserve: what is known of the key, and so whether the work may be done. Exhaustive on purpose: the
/// compiler asks "and if it was interrupted?".
///
/// | answer | means | do | over HTTP |
/// |---|---|---|---|
/// | [`Fresh`](Self::Fresh) | you own the key | the work, then [`complete`](Reservation::complete) | what the work comes to |
/// | [`Replay`](Self::Replay) | done before | answer with the stored response | the stored status, `Idempotent-Replayed: true` |
/// | [`InFlight`](Self::InFlight) | another caller is doing it now | wait, or have the client come back | 409, `Retry-After` |
/// | [`Interrupted`](Self::Interrupted) | begun, never finished: the outcome is unknown | find out, then resolve, release or take over | 409, of a problem type of its own |
/// | [`Mismatch`](Self::Mismatch) | the key stands for another request | refuse | 422 |
/// | [`TooOld`](Self::TooOld) | the key may have been forgotten | refuse | 412 |
/// | an [`Error`] | the store cannot say | do **not** do the work | 503, `Retry-After` |
///
/// They are judged in this order: a mismatch first, whatever the state of the key; then what is stored or under way;
/// that a key is too old only when nothing is known of it. Every answer waits until what it rests on survives the crash
/// that its [level](crate::Durability) names, so that such a crash takes no answer back.
///
/// The statuses follow the IETF draft [draft-ietf-httpapi-idempotency-key-header][draft] where it has a rule (409 while
/// the first request is being processed, 422 for another payload, the earlier result for a retry), and OASIS
/// [Repeatable Requests][oasis] for the one that is too old, 412. Services that speak [Stripe's dialect][stripe] say
/// 400 with the type `idempotency_error` for a mismatch, and 409 with the code `idempotency_key_in_use` while the first
/// one runs; they replay the first result whatever it was, errors included, once the work had begun.
///
/// [draft]: https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/
/// [oasis]: https://docs.oasis-open.org/odata/repeatable-requests/v1.0/repeatable-requests-v1.0.html
/// [stripe]: https://docs.stripe.com/api/idempotent_requests
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// use keyonce::{Body, Completion, Fingerprint, Key, Options, Reserve, Store};
///
/// /// The status and the body that a client is answered with.
/// fn pay(store: &Store, key: &Key, amount: &str) -> Result<(u16, String), Box<dyn std::error::Error>> {
///     Ok(match store.reserve(key, Fingerprint::of(amount))? {
///         Reserve::Fresh(reservation) => {
///             // Here the card is charged, under `reservation.downstream_key("charge")`.
///             let receipt = format!("charged {amount}");
///             match reservation.complete(receipt.as_bytes())? {
///                 Completion::Done => (200, receipt),
///                 Completion::Superseded => (409, "taken over meanwhile: ask again".to_owned()),
///             }
///         }
///         Reserve::Replay(response) => match response.body() {
///             Body::Kept(receipt) => (200, String::from_utf8_lossy(receipt).into_owned()),
///             Body::NotKept { .. } => (200, "done before, the receipt was not kept".to_owned()),
///         },
///         Reserve::InFlight(running) => (409, format!("Retry-After: {}", running.retry_after().as_secs() + 1)),
///         Reserve::Interrupted(unknown) => (409, format!("attempt {} did not end well", unknown.attempt)),
///         Reserve::Mismatch(_) => (422, "this key stands for another request".to_owned()),
///         Reserve::TooOld(_) => (412, "this key may have been forgotten".to_owned()),
///     })
/// }
///
/// let store = Store::open(dir.path().join("keys"), Options::default())?;
/// let key = Key::new("shop-7/charges", "order-1001")?;
/// assert_eq!(pay(&store, &key, "9.99 EUR")?, (200, "charged 9.99 EUR".to_owned()));
/// assert_eq!(pay(&store, &key, "9.99 EUR")?, (200, "charged 9.99 EUR".to_owned()));
/// assert_eq!(pay(&store, &key, "10.00 EUR")?.0, 422);
/// # Ok(())
/// # }
/// ```
///
/// # What becomes of a key
///
/// All that can happen to a key, and what it is then. *Latest token* is the caller that owns the key, or was the last
/// to: its acts count also after its lease lapsed, if nobody took over. A name in code style is the answer or the
/// [`Completion`](crate::Completion) of the call; any other is the state in which the key is afterwards.
///
/// | event | Absent | InFlight | Interrupted | Done |
/// |---|---|---|---|---|
/// | reserve, same fingerprint | InFlight: `Fresh`; or `TooOld` | `InFlight` | `Interrupted`; by policy InFlight: `Fresh`, attempt + 1, new token; or `InFlight` while held | `Replay` |
/// | reserve, other fingerprint | as above | `Mismatch` | `Mismatch` | `Mismatch` |
/// | complete, latest token | `Superseded` | Done | Done | `Superseded` |
/// | save checkpoint / renew / detach, latest token | `Superseded` | stays | InFlight again | `Superseded` |
/// | release, latest token | `Superseded` | attempt 1: Absent, or the next waiter owns it; later: Interrupted | the same | `Superseded` |
/// | interrupt / drop, latest token | `Superseded` | Interrupted | Interrupted | `Superseded` |
/// | reattach, latest token of a detached reservation | `Superseded` | InFlight, if no guard lives (else `InFlight`) | InFlight | `Superseded` |
/// | any of these, any other token | `Superseded` | `Superseded` | `Superseded` | `Superseded` |
/// | take over, resolve, release by an `Interrupted` handle | `Superseded` | `Superseded` | acts, only if the token is still the handle's (release: Absent) | `Superseded` |
/// | forget | nothing to forget | Absent | Absent | Absent |
/// | lease lapses / holder gone (observed) | - | Interrupted | - | - |
/// | `kept_until` passes (observed) | - | never while a guard lives | Absent, unless a guard lives | Absent |
///
/// [`Options::on_interrupted`](crate::Options::on_interrupted) is the policy, [`Retention`](crate::Retention) says what
/// `kept_until` is.
#[derive(Debug)]
#[must_use = "the answer says whether the work may be done"]
pub enum Reserve {
    /// You own the key: do the work, then complete.
    ///
    /// *How it arises.* Nothing was known of the key: it is new, was released, or its retention is over. Or its owner
    /// never finished and [`OnInterrupted::TakeOver`](crate::OnInterrupted::TakeOver) makes this call the next one;
    /// then [`attempt`](Reservation::attempt) is above 1, and an earlier attempt may have had its effect. Or this call
    /// [waited](crate::ReserveOptions::wait), and the owner it waited for released the key. Of any number of callers
    /// one is told so, and the reservation survives what its level names before it is.
    ///
    /// *What to do.* The work, with [`downstream_key`](Reservation::downstream_key) sent along, so that its receiver
    /// can refuse to have it twice. Then [`complete`](Reservation::complete), with a final error as well as with a
    /// success; [`release`](Reservation::release) if nothing happened and nothing will;
    /// [`interrupt`](Reservation::interrupt), which a drop does, too, if that is not known.
    ///
    /// *Over HTTP.* Whatever the work comes to. Keep status and body together in the response. A failed validation, a
    /// 401 or a 429 that comes before the effect is a release: the client may send the same key again.
    Fresh(Reservation),
    /// Done before: here is the stored response, byte for byte.
    ///
    /// *How it arises.* The same request was completed, or [resolved](Interrupted::resolve), within the retention. It
    /// counts from the completion and a replay does not extend it.
    ///
    /// *What to do.* Answer with it. [`Response::body`] is `NotKept` where the work is done and its answer was too
    /// large or was not to be stored: say so, or look the answer up by the reference.
    ///
    /// *Over HTTP.* The stored status and body, as the draft asks for, errors included, and
    /// `Idempotent-Replayed: true`, which is Stripe's mark.
    Replay(Response),
    /// Another caller is doing it now.
    ///
    /// *How it arises.* The key has an owner whose lease has not lapsed: in this process, or elsewhere if the
    /// reservation was [detached](Reservation::detach). Or it was interrupted, and
    /// [`OnInterrupted::Hold`](crate::OnInterrupted::Hold) lets it count as running for a while. Or this call waited
    /// and its time is over.
    ///
    /// *What to do.* [`InFlight::wait`] for what comes of it (better asked for at once, by
    /// [`ReserveOptions::wait`](crate::ReserveOptions::wait)), or have the client come back. Never do the work.
    ///
    /// *Over HTTP.* 409 with `Retry-After`: [`InFlight::retry_after`] at most, since the owner is likely to be done
    /// sooner. It is the one refusal after which the client sends the same request again unchanged.
    InFlight(InFlight),
    /// Somebody began and never finished: whether it took effect is unknown.
    ///
    /// *How it arises.* [`Interrupted::cause`] says it: [`Crash`](crate::Cause::Crash), the process is gone;
    /// [`Dropped`](crate::Cause::Dropped), the owner let go, by a panic, an early return, a cancelled future, or
    /// aloud; [`LeaseLapsed`](crate::Cause::LeaseLapsed), it took longer than its lease, and may still be at work.
    ///
    /// *What to do.* Ask the receiver of the effect by [`downstream_key`](Interrupted::downstream_key):
    /// [`resolve`](Interrupted::resolve) if it happened, [`release`](Interrupted::release) if it did not and cannot
    /// any more. If the receiver cannot be asked but honours the key, or the work may be done twice,
    /// [`take_over`](Interrupted::take_over) and do it again. If none of this can be said now, leave it, and let a
    /// completer in the background settle it, which goes through [`Store::interrupted`](crate::Store::interrupted).
    /// After a lapsed lease "it did not happen" is no answer yet, as long as its owner may still do it: come back when
    /// it cannot.
    ///
    /// *Over HTTP.* 409, as a problem document (RFC 9457) of a type of its own, so that the client can tell "outcome
    /// unknown, ask again later" from "in progress". With a policy that resolves or takes over, what that comes to. The
    /// draft has no rule for it; Stripe asks its clients to treat such an outcome as indeterminate.
    Interrupted(Interrupted),
    /// The key stands for another request.
    ///
    /// *How it arises.* The fingerprint differs from the one with which the key was reserved, whatever has become of
    /// that request: running, interrupted or done. Only a release, a [`forget`](crate::Store::forget) or the end of the
    /// retention frees a key for another request.
    ///
    /// *What to do.* Refuse: the client has used a key twice. What is stored is not told; it belongs to the other
    /// request.
    ///
    /// *Over HTTP.* 422, as the draft says; 400 in Stripe's dialect. The client must correct the request or make a new
    /// key.
    Mismatch(Mismatch),
    /// The key may already have been forgotten, so it must not run as if new.
    ///
    /// *How it arises.* Only for calls that say with [`ReserveOptions::issued_at`](crate::ReserveOptions::issued_at)
    /// when the client made the request, and only if nothing is known of the key: the request was made a retention ago
    /// or longer, by the wall clock or by store time, or before the wall clock last
    /// [jumped](crate::Options::clock_jump_max), so that nobody can say how long ago. It may have been done and
    /// forgotten.
    ///
    /// *What to do.* Refuse, or send the message to where people look. Retention should be longer than clients retry;
    /// [`Stats::retry_ages`](crate::Stats::retry_ages) says how late they come.
    ///
    /// *Over HTTP.* 412, as OASIS Repeatable Requests has it for requests first sent before what is tracked. The draft
    /// leaves it open; at Stripe such a key is new again.
    TooOld(TooOld),
}

impl Reserve {
    /// Asks, and waits at most `wait_ms` while the key is in flight.
    pub(crate) async fn ask(question: &Question<'_>, wait_ms: u64, caller: Caller) -> Result<Self, Error> {
        let begun = question.engine.reserve(question.key, question.terms, wait_ms, caller).await?;
        Self::answer(question, begun, caller).await
    }

    /// Asks on this thread, without waiting for who may own the key.
    pub(super) fn ask_here(question: &Question<'_>) -> Result<Self, Error> {
        let begun = question.engine.reserve_here(question.key, question.terms)?;
        let answer = Self::of(question, begun.acted);
        question.engine.settle_here(begun.rests_on)?;
        Ok(answer.seen(question))
    }

    /// As [`Reserve::ask`], for a task. What seldom has to be waited for stands in boxes of its own, so that the future
    /// is small: moving it about costs more than the rest.
    pub(super) async fn ask_as_task(asked: Result<(Asked, u64), Error>) -> Result<Self, Error> {
        // Borrowed, since what an async function takes apart it keeps twice.
        let (question, wait_ms) = match &asked {
            Ok((asked, wait_ms)) => (asked.question(), *wait_ms),
            Err(error) => return Err(error.clone()),
        };
        let begun = match wait_ms {
            0 => question.engine.reserve_at_once(question.key, question.terms)?,
            _ => None,
        };
        let Some(begun) = begun else {
            return Box::pin(Self::ask(&question, wait_ms, Caller::Task)).await;
        };
        let answer = Self::of(&question, begun.acted);
        if !question.engine.is_settled(begun.rests_on) {
            Box::pin(question.engine.settle(begun.rests_on, Caller::Task)).await?;
        }
        Ok(answer.seen(&question))
    }

    /// The answer, once what it rests on is durable. Who is not there any more to be told it owns nothing.
    pub(crate) async fn answer(question: &Question<'_>, begun: Begun, caller: Caller) -> Result<Self, Error> {
        let answer = Self::of(question, begun.acted);
        question.engine.settle(begun.rests_on, caller).await?;
        Ok(answer.seen(question))
    }

    /// The answer that nobody was told yet.
    pub(super) fn of(question: &Question<'_>, acted: Acted) -> Self {
        let Question { engine, key, terms, .. } = *question;
        match (acted.answer, &acted.state) {
            (Answer::Fresh, _) => Self::Fresh(Reservation::new(engine, key, &acted, terms.lease.ms, Ending::Unseen)),
            (Answer::Replay, State::Done(finished)) => Self::Replay(Response::new(*finished, acted.payload)),
            (Answer::InFlight, state) => Self::InFlight(InFlight::new(question.keep(), state, acted.payload)),
            (Answer::Interrupted, State::Interrupted(owned, stop)) => {
                Self::Interrupted(Interrupted::new(question.keep(), owned, *stop, acted.payload))
            }
            (Answer::Mismatch, state) => Self::Mismatch(Mismatch::new(state)),
            (Answer::TooOld, _) => Self::TooOld(TooOld { retention: Duration::from_millis(terms.retention_ms) }),
            (answer, state) => panic!("a reserve is never answered {answer:?} in {state:?}"),
        }
    }

    /// Its caller is about to be told.
    pub(super) fn seen(self, question: &Question<'_>) -> Self {
        match self {
            Self::Fresh(reservation) => Self::Fresh(reservation.seen(question.on_drop)),
            other => other,
        }
    }
}
