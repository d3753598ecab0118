//! What one lock of the store protects: a part of the index, who holds and who waits, and how a key was found.

use std::collections::HashMap;
use std::sync::Arc;

use super::{Acted, Aftermath, Begun, Place, RestsOn, Step, Waits};
use crate::format::{Draft, StateKind, StateRecord};
use crate::index::{self, Address, IndexShard};
use crate::log::Appended;
use crate::options::Durability;
use crate::segment::Life;
use crate::state::{Answer, Call, Guard, Owned, State, Stop, Write};
use crate::stats::Stats;

/// The part of the store under one lock.
pub(super) struct Shard {
    pub(super) index: IndexShard,
    /// By token: reservations that a guard of this process holds, or whose key somebody waits for. Nothing else is kept
    /// per key.
    pub(super) held: HashMap<u64, Held>,
    /// Buffer for the record that is being appended.
    pub(super) draft: Draft,
    pub(super) counts: Stats,
}

#[derive(Default)]
pub(super) struct Held {
    pub(super) guard: Option<Guard>,
    /// The log says that its lease has lapsed.
    pub(super) lapse_told: bool,
    /// It was handed over to a waiter that has not yet taken it: no work can have begun.
    pub(super) unseen: bool,
    /// It was dropped, and there was no room yet to say so.
    pub(super) fallen: Option<Stop>,
    /// Where the latest record of a guarded reservation stands.
    pub(super) address: Option<Address>,
    /// Who waits for the key, in the order of their coming.
    pub(super) places: Vec<Place>,
}

/// A key as it was found, in the segments that were alive then.
pub(super) struct Look<'a> {
    pub(super) state: State,
    /// `None`: the log holds no record of the key.
    pub(super) latest: Option<Latest<'a>>,
    pub(super) guard: Option<Guard>,
}

/// The latest record of a key.
pub(super) struct Latest<'a> {
    pub(super) found: index::Found,
    pub(super) life: &'a Arc<Life>,
    pub(super) record: StateRecord<'a>,
    /// Its length.
    pub(super) bytes: u64,
    pub(super) end_lsn: u64,
}

/// What a new record of the key takes the place of.
pub(super) struct Before {
    pub(super) token: Option<u64>,
    pub(super) found: Option<index::Found>,
    /// The segment of the latest record, if that is unfinished, and its length in bytes.
    pub(super) unfinished_in: Option<(Arc<Life>, u64)>,
}

impl Shard {
    /// The answer to a call that writes nothing. A renewal moves the lease in memory; who waits takes its place.
    pub(super) fn answer_as_found(
        &mut self,
        look: &Look<'_>,
        call: &Call,
        answer: Answer,
        now_ms: u64,
        step: &Step<'_>,
        after: &mut Aftermath,
    ) -> Begun {
        if let (Answer::Done, Call::Renew { token, lease_ms }) = (answer, *call) {
            self.renew(token, now_ms.saturating_add(lease_ms), after);
        }
        let listed = match (answer, step.waiter) {
            (Answer::InFlight, Some(waiter)) => self.list(&look.state, waiter, after),
            (_, Some(_) | None) => false,
        };
        if !listed {
            self.count(answer, None);
        }
        self.note_duplicate(look.age_of_duplicate(call, now_ms).filter(|_| step.first), &mut after.retries);
        let payload = match answer {
            Answer::Replay | Answer::Interrupted | Answer::InFlight if !listed => look.payload(),
            Answer::Replay
            | Answer::Interrupted
            | Answer::InFlight
            | Answer::Fresh
            | Answer::Mismatch
            | Answer::TooOld
            | Answer::Done
            | Answer::Superseded => Arc::default(),
        };
        let rests_on = match step.waits {
            Waits::For(level) if !listed => look.rests_on(level),
            Waits::For(_) | Waits::ForNothing => None,
        };
        Begun { acted: Acted { answer, state: look.state, payload, guard_id: None, lease_end_before_ms: 0 }, rests_on }
    }

    pub(super) fn renew(&mut self, token: u64, lease_end_ms: u64, after: &mut Aftermath) {
        if let Some(held) = self.held.get_mut(&token)
            && let Some(guard) = held.guard.as_mut()
        {
            guard.lease_end_ms = lease_end_ms;
            held.lapse_told = false;
            after.due_at(guard.lapses_ms());
        }
    }

    /// Makes `held` say who owns the key once the record of `call` is published. Gives the new guard's number, and who
    /// waited for the reservation that was the latest until then.
    pub(super) fn move_guard(
        &mut self,
        call: &Call,
        before: Option<u64>,
        state: &State,
        appended: &Appended,
        now_ms: u64,
        after: &mut Aftermath,
    ) -> (Option<u64>, Vec<Place>) {
        let mut held = before.and_then(|before| self.held.remove(&before)).unwrap_or_default();
        let places = std::mem::take(&mut held.places);
        let lapsed = matches!(call, Call::Lapse { .. });
        let guard_id = match (state, call.makes_an_owner()) {
            (State::InFlight(Owned { token, .. }), Some(lease)) => {
                let guard = Guard::new(appended.lsn, lease, now_ms);
                after.due_at(guard.lapses_ms());
                let held = Held { guard: Some(guard), address: Some(appended.address), ..Held::default() };
                self.held.insert(*token, held);
                Some(appended.lsn)
            }
            // The owner goes on, or may still be at work.
            (State::InFlight(Owned { token, detached: false, .. }), None)
            | (State::Interrupted(Owned { token, .. }, _), None)
                if held.guard.is_some() && (lapsed || matches!(state, State::InFlight(_))) =>
            {
                held.address = Some(appended.address);
                held.lapse_told = lapsed;
                self.held.insert(*token, held);
                if let State::InFlight(owned) = state {
                    self.renew(*token, owned.lease_end_ms, after);
                }
                None
            }
            (State::Absent | State::InFlight(_) | State::Interrupted(..) | State::Done(_), _) => None,
        };
        (guard_id, places)
    }

    pub(super) fn count(&mut self, answer: Answer, write: Option<&Write>) {
        let counts = &mut self.counts;
        match answer {
            Answer::Fresh => counts.fresh += 1,
            Answer::Replay => counts.replays += 1,
            Answer::InFlight => counts.in_flight += 1,
            Answer::Interrupted => counts.interrupted += 1,
            Answer::Mismatch => counts.mismatches += 1,
            Answer::TooOld => counts.too_old += 1,
            Answer::Superseded => counts.superseded += 1,
            Answer::Done => match write.map(|write| write.kind) {
                Some(StateKind::Done) => counts.completed += 1,
                Some(StateKind::Released) => counts.released += 1,
                Some(StateKind::Reserved | StateKind::Interrupted | StateKind::Forgotten) | None => {}
            },
        }
    }
}

impl Held {
    /// Somebody holds it.
    pub(super) fn is_guarded(&self) -> bool {
        self.guard.is_some() && self.fallen.is_none()
    }
}

impl Latest<'_> {
    pub(super) fn is_unfinished(&self) -> bool {
        matches!(self.record.kind, StateKind::Reserved | StateKind::Interrupted)
    }
}

impl Look<'_> {
    /// A copy of what the latest record carries.
    pub(super) fn payload(&self) -> Arc<[u8]> {
        self.latest.as_ref().map_or_else(Arc::default, |latest| Arc::from(latest.record.payload))
    }

    /// What an answer of this level rests on: the end of the record, and the higher of the two levels.
    pub(super) fn rests_on(&self, level: Durability) -> Option<RestsOn> {
        let rests_on =
            |latest: &Latest<'_>| RestsOn { end_lsn: latest.end_lsn, level: latest.record.durability.stronger(level) };
        self.latest.as_ref().map(rests_on)
    }

    /// Whether the key was forgotten before anybody found out how its last attempt had ended.
    pub(super) fn expired_unresolved(&self) -> bool {
        self.state == State::Absent && self.latest.as_ref().is_some_and(Latest::is_unfinished)
    }

    pub(super) fn before(&self) -> Before {
        let unfinished = |latest: &&Latest<'_>| latest.is_unfinished();
        Before {
            // Also of a key that reads as absent since its retention ended: somebody may wait for the end of a hold.
            token: self.latest.as_ref().map(|latest| latest.record.token),
            found: self.latest.as_ref().map(|latest| latest.found),
            unfinished_in: self
                .latest
                .as_ref()
                .filter(unfinished)
                .map(|latest| (Arc::clone(latest.life), latest.bytes)),
        }
    }
}
