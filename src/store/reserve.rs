//! The answer of `reserve`, and how it comes about.

use std::time::Duration;

use crate::engine::{Acted, Begun};
use crate::error::Error;
use crate::reservation::{Ending, InFlight, Interrupted, Mismatch, Question, Reservation, Response, TooOld};
use crate::state::{Answer, State};
use crate::wait::Caller;

/// The answer to a reserve. Exhaustive on purpose: the compiler asks "and if it was interrupted?".
///
/// What becomes of a key, by its state:
///
/// | event | Absent | InFlight | Interrupted | Done |
/// |---|---|---|---|---|
/// | reserve, same fingerprint | InFlight: `Fresh`; or `TooOld` | `InFlight` | `Interrupted`; by policy InFlight: `Fresh`, attempt + 1, new token; or `InFlight` while held | `Replay` |
/// | reserve, other fingerprint | as above | `Mismatch` | `Mismatch` | `Mismatch` |
/// | complete, latest token | `Superseded` | Done | Done | `Superseded` |
/// | save checkpoint / renew / detach, latest token | `Superseded` | stays | InFlight again | `Superseded` |
/// | release, latest token | `Superseded` | attempt 1: Absent; later: Interrupted | the same | `Superseded` |
/// | interrupt / drop, latest token | `Superseded` | Interrupted | Interrupted | `Superseded` |
/// | reattach, latest token of a detached reservation | `Superseded` | InFlight, if no guard lives (else `InFlight`) | InFlight | `Superseded` |
/// | any of these, any other token | `Superseded` | `Superseded` | `Superseded` | `Superseded` |
/// | take over, resolve, release by an `Interrupted` handle | `Superseded` | `Superseded` | acts, only if the token is still the handle's (release: Absent) | `Superseded` |
/// | forget | nothing to forget | Absent | Absent | Absent |
/// | lease lapses / holder gone (observed) | - | Interrupted | - | - |
/// | `kept_until` passes (observed) | - | never while a guard lives | Absent, unless a guard lives | Absent |
#[derive(Debug)]
#[must_use = "the answer says whether the work may be done"]
pub enum Reserve {
    /// You own the key: do the work, then complete.
    Fresh(Reservation),
    /// Done before: here is the stored response.
    Replay(Response),
    /// Another caller is doing it now. Over HTTP: 409 with `Retry-After`.
    InFlight(InFlight),
    /// Somebody began and never finished: the outcome is unknown.
    Interrupted(Interrupted),
    /// The key stands for another request. Over HTTP: 422.
    Mismatch(Mismatch),
    /// The key may already have been forgotten, so it must not run as if new. Over HTTP: 412.
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
