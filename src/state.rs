//! What may happen to a key, decided without I/O, locks or clocks.
//!
//! A key is [`State::Absent`], in flight, interrupted or done. Two pure functions carry the whole protocol:
//!
//! - [`decide`] takes a state and a call and says what to answer and which record to append;
//! - [`apply`] takes a record and says what state the key has once the record stands in the log. It is unconditional:
//!   of two records of a key the one with the higher LSN wins.
//!
//! The live store decides, appends, applies; recovery only applies. Neither function knows time: a state is first
//! *observed* at a moment ([`State::observed`]), which turns a lapsed lease, a vanished holder and an ended retention
//! into the state that a caller must see.
//!
//! | event | Absent | InFlight | Interrupted | Done |
//! |---|---|---|---|---|
//! | reserve, same fingerprint | InFlight: `Fresh`; or `TooOld` | `InFlight` | `Interrupted`; by policy InFlight: `Fresh`, attempt + 1, new token; or `InFlight` while held | `Replay` |
//! | reserve, other fingerprint | as above | `Mismatch` | `Mismatch` | `Mismatch` |
//! | complete, latest token | `Superseded` | Done | Done | `Superseded` |
//! | save checkpoint / renew / detach, latest token | `Superseded` | stays | InFlight again | `Superseded` |
//! | release, latest token | `Superseded` | attempt 1: Absent, or the next waiter owns it; later: Interrupted | the same | `Superseded` |
//! | interrupt / drop, latest token | `Superseded` | Interrupted | Interrupted | `Superseded` |
//! | reattach, latest token of a detached reservation | `Superseded` | InFlight, if no guard lives (else `InFlight`) | InFlight | `Superseded` |
//! | any of these, any other token | `Superseded` | `Superseded` | `Superseded` | `Superseded` |
//! | take over, resolve, release by an `Interrupted` handle | `Superseded` | `Superseded` | acts, only if the token is still the handle's (release: Absent) | `Superseded` |
//! | forget | nothing to forget | Absent | Absent | Absent |
//! | lease lapses / holder gone (observed) | - | Interrupted | - | - |
//! | `kept_until` passes (observed) | - | never while a guard lives | Absent, unless a guard lives | Absent |

use crate::format::{Cause, StateKind, StateRecord};
use crate::key::Fingerprint;
use crate::options::Durability;

/// What is known of an unfinished key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owned {
    /// The LSN of the reservation's first record; 0 only in a [`Write`], where it means "this record's own LSN".
    pub(crate) token: u64,
    pub(crate) attempt: u32,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) first_seen_ms: u64,
    pub(crate) reserved_ms: u64,
    pub(crate) lease_end_ms: u64,
    pub(crate) retention_ms: u64,
    pub(crate) kept_until_ms: u64,
    pub(crate) durability: Durability,
    /// The work went on elsewhere: the lease in the record counts, also across a reopen.
    pub(crate) detached: bool,
    /// Of a later attempt: why the one before it had stopped.
    pub(crate) earlier: Option<Cause>,
}

/// What is known of a completed key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Finished {
    pub(crate) token: u64,
    pub(crate) attempt: u32,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) first_seen_ms: u64,
    pub(crate) completed_ms: u64,
    pub(crate) kept_until_ms: u64,
    pub(crate) durability: Durability,
    pub(crate) body_kept: bool,
}

/// Why and since when nobody is known to work on a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stop {
    pub(crate) cause: Cause,
    pub(crate) since_ms: u64,
}

/// The state of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Absent,
    InFlight(Owned),
    Interrupted(Owned, Stop),
    Done(Finished),
}

/// The living guard of a reservation, which only this process knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Guard {
    /// The LSN of the record that it was made with: a later guard of the same token, after a detachment, is another.
    pub(crate) id: u64,
    /// The lease in memory; a renewal writes nothing as long as the record's `kept_until` leaves room.
    pub(crate) lease_end_ms: u64,
    /// What it is to be held for, from the moment at which it was made.
    lease: Lease,
    /// Until when it renews itself.
    renews_until_ms: u64,
}

/// How long an owner counts as running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lease {
    /// Without a renewal.
    pub(crate) ms: u64,
    /// A living guard renews its lease by itself until this long after it was made; 0: it does not.
    pub(crate) while_held_ms: u64,
}

impl Lease {
    /// When it ends, counted from `now_ms`, if nothing is renewed by hand and the guard lives.
    fn last_ms(&self, now_ms: u64) -> u64 {
        now_ms.saturating_add(self.ms.max(self.while_held_ms))
    }
}

impl Guard {
    /// A guard that is made at `now_ms`.
    pub(crate) fn new(id: u64, lease: Lease, now_ms: u64) -> Self {
        let renews_until_ms = now_ms.saturating_add(lease.while_held_ms);
        Self { id, lease_end_ms: now_ms.saturating_add(lease.ms), lease, renews_until_ms }
    }

    /// When the lease ends, as of `now_ms`. A guard that renews itself needs nobody to do it: it has a whole lease left
    /// at every moment, up to its bound.
    pub(crate) fn lease_end_ms(&self, now_ms: u64) -> u64 {
        let renewed_ms = now_ms.saturating_add(self.lease.ms).min(self.renews_until_ms);
        self.lease_end_ms.max(renewed_ms)
    }

    /// As this guard, but it does not renew itself: nobody holds it yet.
    pub(crate) fn not_held(self) -> Self {
        Self { renews_until_ms: 0, ..self }
    }

    /// When the lease lapses unless it is renewed by hand.
    pub(crate) fn lapses_ms(&self) -> u64 {
        self.lease_end_ms.max(self.renews_until_ms)
    }

    /// The lease begins anew at `now_ms`, as far as the key is kept anyway.
    pub(crate) fn begin_anew(&mut self, now_ms: u64, owned: &Owned) {
        let lease_end_ms_max = owned.kept_until_ms.saturating_sub(owned.retention_ms);
        *self = Self::new(self.id, self.lease, now_ms);
        self.lease_end_ms = self.lease_end_ms.min(lease_end_ms_max);
        self.renews_until_ms = self.renews_until_ms.min(lease_end_ms_max);
    }
}

impl State {
    /// The state as a caller must see it at `now_ms`. `guard` is the living guard of the state's token, if any.
    pub(crate) fn observed(self, now_ms: u64, guard: Option<Guard>) -> State {
        match self {
            State::Absent => State::Absent,
            State::Done(finished) if finished.kept_until_ms <= now_ms => State::Absent,
            State::Done(finished) => State::Done(finished),
            State::Interrupted(owned, _) | State::InFlight(owned)
                if guard.is_none() && owned.kept_until_ms <= now_ms =>
            {
                State::Absent
            }
            State::Interrupted(owned, stop) => State::Interrupted(owned, stop),
            State::InFlight(owned) => {
                let lease_end_ms = match guard {
                    Some(guard) => guard.lease_end_ms(now_ms),
                    None if owned.detached => owned.lease_end_ms,
                    None => {
                        let stop = Stop { cause: Cause::Crash, since_ms: owned.reserved_ms };
                        return State::Interrupted(owned, stop);
                    }
                };
                if lease_end_ms <= now_ms {
                    let stop = Stop { cause: Cause::LeaseLapsed, since_ms: lease_end_ms };
                    State::Interrupted(Owned { lease_end_ms, ..owned }, stop)
                } else {
                    State::InFlight(Owned { lease_end_ms, ..owned })
                }
            }
        }
    }

    /// When the lease of an unfinished reservation ends, or ended; 0 without one.
    pub(crate) fn lease_end_ms(&self) -> u64 {
        match self {
            State::InFlight(owned) | State::Interrupted(owned, _) => owned.lease_end_ms,
            State::Absent | State::Done(_) => 0,
        }
    }

    /// Why an interrupted key is so.
    fn stop_cause(&self) -> Option<Cause> {
        match self {
            State::Interrupted(_, stop) => Some(stop.cause),
            State::Absent | State::InFlight(_) | State::Done(_) => None,
        }
    }

    /// The token of the latest reservation, if the key has one.
    pub(crate) fn token(&self) -> Option<u64> {
        match self {
            State::Absent => None,
            State::InFlight(owned) | State::Interrupted(owned, _) => Some(owned.token),
            State::Done(finished) => Some(finished.token),
        }
    }
}

/// What a reserve asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) retention_ms: u64,
    pub(crate) lease: Lease,
    pub(crate) durability: Durability,
    pub(crate) policy: Policy,
    /// From this moment on the key may already have been forgotten, so long ago did the client make it.
    pub(crate) too_old_from_ms: u64,
}

/// What a reserve is to make of a key whose owner never finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    Surface,
    /// Become the next owner, if the one before is known to be gone or, where that is said, its lease has lapsed.
    TakeOver {
        also_lapsed: bool,
    },
    /// The key counts as running for this long after it was interrupted. Nobody knows when a crash came, but that it
    /// came before the store was opened.
    Hold {
        ms: u64,
        opened_ms: u64,
    },
}

impl Policy {
    /// Until when an interrupted key counts as running; 0: not at all.
    pub(crate) fn holds_until_ms(&self, stop: &Stop) -> u64 {
        match (self, stop.cause) {
            (Self::Surface | Self::TakeOver { .. }, _) => 0,
            (Self::Hold { ms, opened_ms }, Cause::Crash) => opened_ms.saturating_add(*ms),
            (Self::Hold { ms, .. }, Cause::Dropped | Cause::LeaseLapsed) => stop.since_ms.saturating_add(*ms),
        }
    }

    fn takes_over(&self, cause: Cause) -> bool {
        match (self, cause) {
            (Self::TakeOver { .. }, Cause::Crash | Cause::Dropped) => true,
            // The owner of a lapsed lease may still be at work.
            (Self::TakeOver { also_lapsed }, Cause::LeaseLapsed) => *also_lapsed,
            (Self::Surface | Self::Hold { .. }, Cause::Crash | Cause::Dropped | Cause::LeaseLapsed) => false,
        }
    }
}

/// A call that acts on one key.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Call {
    Reserve(Terms),
    Complete {
        token: u64,
        body_kept: bool,
    },
    SaveCheckpoint {
        token: u64,
        lease_ms: u64,
    },
    Renew {
        token: u64,
        lease_ms: u64,
    },
    Detach {
        token: u64,
        lease_ms: u64,
    },
    Release {
        token: u64,
    },
    Interrupt {
        token: u64,
        cause: Cause,
    },
    /// The lease of a guard that lives on has lapsed.
    Lapse {
        token: u64,
    },
    Reattach {
        token: u64,
        lease: Lease,
        guard_lives: bool,
    },
    TakeOver {
        token: u64,
        lease: Lease,
        durability: Durability,
    },
    Resolve {
        token: u64,
        body_kept: bool,
    },
    ReleaseInterrupted {
        token: u64,
    },
    Forget,
}

impl Call {
    /// The lease of the guard that its caller gets when the call has written its record; `None`: it gets none.
    pub(crate) fn makes_an_owner(&self) -> Option<Lease> {
        match self {
            Self::Reserve(terms) => Some(terms.lease),
            Self::TakeOver { lease, .. } | Self::Reattach { lease, .. } => Some(*lease),
            Self::Complete { .. }
            | Self::SaveCheckpoint { .. }
            | Self::Renew { .. }
            | Self::Detach { .. }
            | Self::Release { .. }
            | Self::Interrupt { .. }
            | Self::Lapse { .. }
            | Self::Resolve { .. }
            | Self::ReleaseInterrupted { .. }
            | Self::Forget => None,
        }
    }
}

/// What the caller is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Fresh,
    Replay,
    InFlight,
    Interrupted,
    Mismatch,
    TooOld,
    /// The act of an owner, a resolver or an operator took effect.
    Done,
    Superseded,
}

/// Which bytes the record to append carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carry {
    Nothing,
    /// The bytes that the call brought: a response, a reference, a checkpoint, a reason.
    Given,
    /// The checkpoint that the key already has.
    Checkpoint,
}

/// A record to append, all but its key and its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Write {
    pub(crate) kind: StateKind,
    pub(crate) owned: Owned,
    pub(crate) cause: Option<Cause>,
    /// Lease end of a Reserved record, else the moment at which it happened.
    pub(crate) mark_ms: u64,
    pub(crate) body_kept: bool,
    pub(crate) carry: Carry,
}

impl Write {
    /// The record, for the key of this scope and id, with the bytes that it is to carry.
    pub(crate) fn record<'a>(&self, scope: &'a [u8], id: &'a [u8], payload: &'a [u8]) -> StateRecord<'a> {
        StateRecord {
            kind: self.kind,
            token: self.owned.token,
            attempt: self.owned.attempt,
            cause: self.cause,
            durability: self.owned.durability,
            detached: self.owned.detached,
            body_kept: self.body_kept,
            first_seen_ms: self.owned.first_seen_ms,
            reserved_ms: self.owned.reserved_ms,
            mark_ms: self.mark_ms,
            retention_ms: self.owned.retention_ms,
            kept_until_ms: self.owned.kept_until_ms,
            fingerprint: self.owned.fingerprint,
            scope,
            id,
            payload,
        }
    }
}

/// What to answer, and what must stand in the log first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Decision {
    pub(crate) answer: Answer,
    pub(crate) write: Option<Write>,
}

impl Decision {
    fn only(answer: Answer) -> Self {
        Self { answer, write: None }
    }

    fn write(answer: Answer, write: Write) -> Self {
        Self { answer, write: Some(write) }
    }
}

/// How an owner's call stands towards the state: only equality of tokens acts.
enum Standing<'a> {
    Running(&'a Owned),
    Stopped(&'a Owned),
    Superseded,
}

fn standing(state: &State, token: u64) -> Standing<'_> {
    match state {
        State::InFlight(owned) if owned.token == token => Standing::Running(owned),
        State::Interrupted(owned, _) if owned.token == token => Standing::Stopped(owned),
        State::InFlight(_) | State::Interrupted(..) | State::Absent | State::Done(_) => Standing::Superseded,
    }
}

/// Decides what `call` does to a key in `state` (as observed at `now_ms`).
pub(crate) fn decide(state: &State, call: &Call, now_ms: u64) -> Decision {
    match *call {
        Call::Reserve(terms) => reserve(state, &terms, now_ms),
        Call::Complete { token, body_kept } => match standing(state, token) {
            Standing::Running(owned) | Standing::Stopped(owned) => done(owned, body_kept, now_ms),
            Standing::Superseded => Decision::only(Answer::Superseded),
        },
        Call::SaveCheckpoint { token, lease_ms } => match standing(state, token) {
            Standing::Running(owned) => {
                Decision::write(Answer::Done, reserved(*owned, owned.lease_end_ms, Carry::Given))
            }
            Standing::Stopped(owned) => {
                let lease_end_ms = now_ms.saturating_add(lease_ms);
                Decision::write(Answer::Done, reserved(Owned { lease_end_ms, ..*owned }, lease_end_ms, Carry::Given))
            }
            Standing::Superseded => Decision::only(Answer::Superseded),
        },
        Call::Renew { token, lease_ms } => match standing(state, token) {
            Standing::Running(owned) if !owned.detached && room_to_renew(owned, now_ms, lease_ms) => {
                Decision::only(Answer::Done)
            }
            Standing::Running(owned) | Standing::Stopped(owned) => {
                let lease_end_ms = now_ms.saturating_add(lease_ms);
                Decision::write(
                    Answer::Done,
                    reserved(Owned { lease_end_ms, ..*owned }, lease_end_ms, Carry::Checkpoint),
                )
            }
            Standing::Superseded => Decision::only(Answer::Superseded),
        },
        Call::Detach { token, lease_ms } => match standing(state, token) {
            Standing::Running(owned) | Standing::Stopped(owned) => {
                let lease_end_ms = now_ms.saturating_add(lease_ms);
                let owned = Owned { lease_end_ms, detached: true, ..*owned };
                Decision::write(Answer::Done, reserved(owned, lease_end_ms, Carry::Checkpoint))
            }
            Standing::Superseded => Decision::only(Answer::Superseded),
        },
        Call::Release { token } => match standing(state, token) {
            Standing::Running(owned) | Standing::Stopped(owned) if owned.attempt > 1 => {
                // What the attempt before had come to is as unknown as it was.
                interrupted(owned, owned.earlier.unwrap_or(Cause::Dropped), now_ms, now_ms)
            }
            Standing::Running(owned) | Standing::Stopped(owned) => gone(StateKind::Released, owned, now_ms),
            Standing::Superseded => Decision::only(Answer::Superseded),
        },
        Call::Interrupt { token, cause } => match standing(state, token) {
            Standing::Running(owned) | Standing::Stopped(owned) => {
                let since_ms = match cause {
                    Cause::LeaseLapsed => owned.lease_end_ms.min(now_ms),
                    Cause::Crash | Cause::Dropped => now_ms,
                };
                interrupted(owned, cause, since_ms, now_ms)
            }
            Standing::Superseded => Decision::only(Answer::Superseded),
        },
        // The guard keeps the key for as long as it lives; so it is the same whether this is said late.
        Call::Lapse { token } => match standing(state, token) {
            Standing::Running(owned) | Standing::Stopped(owned) => {
                interrupted(owned, Cause::LeaseLapsed, owned.lease_end_ms, owned.lease_end_ms)
            }
            Standing::Superseded => Decision::only(Answer::Superseded),
        },
        Call::Reattach { token, lease, guard_lives } => match standing(state, token) {
            Standing::Running(_) | Standing::Stopped(_) if guard_lives => Decision::only(Answer::InFlight),
            Standing::Running(owned) | Standing::Stopped(owned) if owned.detached => {
                let lease_end_ms = now_ms.saturating_add(lease.ms);
                let owned = Owned { lease_end_ms, detached: false, ..*owned };
                Decision::write(Answer::Done, reserved(owned, lease.last_ms(now_ms), Carry::Checkpoint))
            }
            Standing::Running(_) | Standing::Stopped(_) | Standing::Superseded => Decision::only(Answer::Superseded),
        },
        Call::TakeOver { token, lease, durability } => match standing(state, token) {
            Standing::Stopped(owned) => {
                let durability = owned.durability.stronger(durability);
                let cause = state.stop_cause().unwrap_or(Cause::Dropped);
                taken_over(&Owned { durability, ..*owned }, cause, lease, now_ms)
            }
            Standing::Running(_) | Standing::Superseded => Decision::only(Answer::Superseded),
        },
        Call::Resolve { token, body_kept } => match standing(state, token) {
            Standing::Stopped(owned) => done(owned, body_kept, now_ms),
            Standing::Running(_) | Standing::Superseded => Decision::only(Answer::Superseded),
        },
        Call::ReleaseInterrupted { token } => match standing(state, token) {
            Standing::Stopped(owned) => gone(StateKind::Released, owned, now_ms),
            Standing::Running(_) | Standing::Superseded => Decision::only(Answer::Superseded),
        },
        Call::Forget => match state {
            State::Absent => Decision::only(Answer::Superseded),
            State::InFlight(owned) | State::Interrupted(owned, _) => forgotten(owned, now_ms),
            State::Done(finished) => forgotten(&finished.as_owned(), now_ms),
        },
    }
}

/// The state that a key has once `record` is the latest of its records.
pub(crate) fn apply(record: &StateRecord<'_>) -> State {
    let owned = Owned {
        token: record.token,
        attempt: record.attempt,
        fingerprint: record.fingerprint,
        first_seen_ms: record.first_seen_ms,
        reserved_ms: record.reserved_ms,
        lease_end_ms: record.mark_ms,
        retention_ms: record.retention_ms,
        kept_until_ms: record.kept_until_ms,
        durability: record.durability,
        detached: record.detached,
        earlier: record.cause.filter(|_| record.kind == StateKind::Reserved),
    };
    match record.kind {
        StateKind::Reserved => State::InFlight(owned),
        StateKind::Interrupted => {
            let cause = record.cause.unwrap_or(Cause::LeaseLapsed);
            State::Interrupted(owned, Stop { cause, since_ms: record.mark_ms })
        }
        StateKind::Done => State::Done(Finished {
            token: record.token,
            attempt: record.attempt,
            fingerprint: record.fingerprint,
            first_seen_ms: record.first_seen_ms,
            completed_ms: record.mark_ms,
            kept_until_ms: record.kept_until_ms,
            durability: record.durability,
            body_kept: record.body_kept,
        }),
        StateKind::Released | StateKind::Forgotten => State::Absent,
    }
}

fn reserve(state: &State, terms: &Terms, now_ms: u64) -> Decision {
    match state {
        State::Absent if terms.too_old_from_ms <= now_ms => Decision::only(Answer::TooOld),
        State::Absent => {
            let owned = Owned {
                token: 0,
                attempt: 1,
                fingerprint: terms.fingerprint,
                first_seen_ms: now_ms,
                reserved_ms: now_ms,
                lease_end_ms: now_ms.saturating_add(terms.lease.ms),
                retention_ms: terms.retention_ms,
                kept_until_ms: 0,
                durability: terms.durability,
                detached: false,
                earlier: None,
            };
            Decision::write(Answer::Fresh, reserved(owned, terms.lease.last_ms(now_ms), Carry::Nothing))
        }
        State::InFlight(Owned { fingerprint, .. })
        | State::Interrupted(Owned { fingerprint, .. }, _)
        | State::Done(Finished { fingerprint, .. })
            if *fingerprint != terms.fingerprint =>
        {
            Decision::only(Answer::Mismatch)
        }
        State::InFlight(_) => Decision::only(Answer::InFlight),
        State::Interrupted(owned, stop) if terms.policy.takes_over(stop.cause) => {
            let durability = owned.durability.stronger(terms.durability);
            let next = Owned { retention_ms: terms.retention_ms, durability, ..*owned };
            taken_over(&next, stop.cause, terms.lease, now_ms)
        }
        State::Interrupted(_, stop) if now_ms < terms.policy.holds_until_ms(stop) => Decision::only(Answer::InFlight),
        State::Interrupted(..) => Decision::only(Answer::Interrupted),
        State::Done(_) => Decision::only(Answer::Replay),
    }
}

/// A renewal needs no record while the lease leaves a whole retention before the key would be forgotten.
fn room_to_renew(owned: &Owned, now_ms: u64, lease_ms: u64) -> bool {
    now_ms.saturating_add(lease_ms).saturating_add(owned.retention_ms) <= owned.kept_until_ms
}

/// A Reserved record. It keeps the key for two retentions beyond `held_until_ms`, the end of the lease as far as it can
/// be foreseen, so that renewals seldom need another.
fn reserved(owned: Owned, held_until_ms: u64, carry: Carry) -> Write {
    let kept_until_ms = held_until_ms.saturating_add(owned.retention_ms.saturating_mul(2));
    Write {
        kind: StateKind::Reserved,
        owned: Owned { kept_until_ms: kept_until_ms.max(owned.kept_until_ms), ..owned },
        cause: owned.earlier,
        mark_ms: owned.lease_end_ms,
        body_kept: true,
        carry,
    }
}

fn taken_over(owned: &Owned, cause: Cause, lease: Lease, now_ms: u64) -> Decision {
    let next = Owned {
        token: 0,
        attempt: owned.attempt.saturating_add(1),
        reserved_ms: now_ms,
        lease_end_ms: now_ms.saturating_add(lease.ms),
        detached: false,
        earlier: Some(cause),
        ..*owned
    };
    Decision::write(Answer::Fresh, reserved(next, lease.last_ms(now_ms), Carry::Checkpoint))
}

fn done(owned: &Owned, body_kept: bool, now_ms: u64) -> Decision {
    let owned = Owned { kept_until_ms: now_ms.saturating_add(owned.retention_ms), detached: false, ..*owned };
    Decision::write(
        Answer::Done,
        Write { kind: StateKind::Done, owned, cause: None, mark_ms: now_ms, body_kept, carry: Carry::Given },
    )
}

/// An Interrupted record, which keeps the key for a retention from `kept_from_ms`: the moment at which nothing else
/// keeps it any more.
fn interrupted(owned: &Owned, cause: Cause, since_ms: u64, kept_from_ms: u64) -> Decision {
    let kept_until_ms = owned.lease_end_ms.max(kept_from_ms).saturating_add(owned.retention_ms);
    let owned = Owned { kept_until_ms: kept_until_ms.max(owned.kept_until_ms), detached: false, ..*owned };
    Decision::write(
        Answer::Done,
        Write {
            kind: StateKind::Interrupted,
            owned,
            cause: Some(cause),
            mark_ms: since_ms,
            body_kept: true,
            carry: Carry::Checkpoint,
        },
    )
}

/// A record after which the key is Absent. It is kept as long as the records it lies over.
fn gone(kind: StateKind, owned: &Owned, now_ms: u64) -> Decision {
    let carry = match kind {
        StateKind::Forgotten => Carry::Given,
        StateKind::Reserved | StateKind::Interrupted | StateKind::Done | StateKind::Released => Carry::Nothing,
    };
    let owned = Owned { detached: false, ..*owned };
    Decision::write(Answer::Done, Write { kind, owned, cause: None, mark_ms: now_ms, body_kept: true, carry })
}

fn forgotten(owned: &Owned, now_ms: u64) -> Decision {
    gone(StateKind::Forgotten, owned, now_ms)
}

impl Finished {
    fn as_owned(&self) -> Owned {
        Owned {
            token: self.token,
            attempt: self.attempt,
            fingerprint: self.fingerprint,
            first_seen_ms: self.first_seen_ms,
            reserved_ms: self.first_seen_ms,
            lease_end_ms: self.completed_ms,
            retention_ms: self.kept_until_ms.saturating_sub(self.completed_ms),
            kept_until_ms: self.kept_until_ms,
            durability: self.durability,
            detached: false,
            earlier: None,
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
