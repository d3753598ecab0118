//! The acts on one key: the table of states, row by row.

use std::sync::Arc;
use std::time::Duration;

use super::expected::Expected;
use super::history::{Guard, Record, Seen, Stored, Work};
use super::{Handle, Model, No, Owner, WaiterId, standing_for};
use crate::clock::ms_rounded_up;
use crate::error::ErrorKind;
use crate::format::Cause;
use crate::key::{Fingerprint, Key, Token};
use crate::options::{CheckedReserve, Durability, OnDrop, OnInterrupted};
use crate::retention::checked_ms;

/// The largest checkpoint, and the largest reason of a forgetting.
const NOTE_BYTES_MAX: usize = 64 << 10;

impl Model {
    /// A reserve, with or without its policy for interrupted keys.
    pub(super) fn ask(
        &mut self,
        key: &Key,
        fingerprint: Fingerprint,
        asked: &CheckedReserve,
        with_policy: bool,
    ) -> Expected {
        let seen = self.seen(key);
        if let Some((work, state)) = standing_for(&seen).filter(|(work, _)| work.fingerprint != fingerprint) {
            let first_seen = super::at(work.first_seen_ms);
            self.stats.mismatches += 1;
            self.rests_on(key, asked.durability);
            return Expected::Mismatch { first_seen, state };
        }
        if with_policy || matches!(seen, Seen::Absent) {
            let owns = self.make_owner(key, fingerprint, &seen, asked);
            if let Some(owns) = owns {
                return owns;
            }
        }
        self.rests_on(key, asked.durability);
        self.as_found(&seen, asked, with_policy)
    }

    /// The answer to whoever does not become the owner and asks for the same as the key stands for.
    fn as_found(&mut self, seen: &Seen, asked: &CheckedReserve, with_policy: bool) -> Expected {
        match seen {
            Seen::Absent => {
                self.stats.too_old += 1;
                Expected::TooOld { retention: Duration::from_millis(asked.retention_ms) }
            }
            Seen::InFlight(work) => {
                self.stats.in_flight += 1;
                let retry_after = Duration::from_millis(work.lease_end_ms - self.now_ms);
                Expected::InFlight { known: seen.known().expect("it is in flight"), retry_after }
            }
            Seen::Interrupted(_, cause, since_ms) => {
                let known = seen.known().expect("it is interrupted");
                if let (true, Some(left_ms)) = (with_policy, self.is_held(asked, *cause, *since_ms)) {
                    self.stats.in_flight += 1;
                    return Expected::InFlight { known, retry_after: Duration::from_millis(left_ms) };
                }
                self.stats.interrupted += 1;
                Expected::Interrupted(known)
            }
            Seen::Done(work, stored) => {
                self.stats.replays += 1;
                Expected::Replay {
                    bytes: stored.bytes.to_vec(),
                    body_kept: stored.body_kept,
                    completed_at: super::at(stored.completed_ms),
                    expires_at: super::at(work.kept_until_ms),
                    attempt: work.attempt,
                }
            }
        }
    }

    /// Makes whoever asks the owner of the key, if that is what it is told.
    pub(super) fn make_owner(
        &mut self,
        key: &Key,
        fingerprint: Fingerprint,
        seen: &Seen,
        asked: &CheckedReserve,
    ) -> Option<Expected> {
        match seen {
            Seen::Absent if !self.is_too_old(asked) => Some(self.first_owner(key, fingerprint, asked)),
            Seen::Interrupted(work, cause, _)
                if work.fingerprint == fingerprint && takes_over(asked.on_interrupted, *cause) =>
            {
                Some(self.next_owner(key, (work, *cause), asked, asked.retention_ms))
            }
            Seen::Absent | Seen::InFlight(_) | Seen::Interrupted(..) | Seen::Done(..) => None,
        }
    }

    /// How long an interruption is still held, if it is.
    pub(super) fn is_held(&self, asked: &CheckedReserve, cause: Cause, since_ms: u64) -> Option<u64> {
        let OnInterrupted::Hold(held) = asked.on_interrupted else { return None };
        // Nobody knows when a crash came, but that it was before the opening.
        let from_ms = if cause == Cause::Crash { self.opened_ms } else { since_ms };
        let until_ms = from_ms.saturating_add(ms_rounded_up(held));
        until_ms.checked_sub(self.now_ms).filter(|left_ms| *left_ms > 0)
    }

    /// A key that was issued a retention ago may have been completed at once, and be forgotten now.
    fn is_too_old(&self, asked: &CheckedReserve) -> bool {
        asked.issued_at_ms.is_some_and(|issued_ms| issued_ms.saturating_add(asked.retention_ms) <= self.now_ms)
    }

    fn first_owner(&mut self, key: &Key, fingerprint: Fingerprint, asked: &CheckedReserve) -> Expected {
        let work = Work {
            token: 0,
            attempt: 1,
            fingerprint,
            first_seen_ms: self.now_ms,
            began_ms: self.now_ms,
            lease_end_ms: 0,
            retention_ms: asked.retention_ms,
            kept_until_ms: 0,
            durability: asked.durability,
            detached: false,
            earlier: None,
            checkpoint: Arc::default(),
        };
        self.begin_work(key, work, asked)
    }

    fn next_owner(
        &mut self,
        key: &Key,
        (work, cause): (&Work, Cause),
        asked: &CheckedReserve,
        retention_ms: u64,
    ) -> Expected {
        let next = Work {
            token: 0,
            attempt: work.attempt + 1,
            began_ms: self.now_ms,
            retention_ms,
            durability: stronger(work.durability, asked.durability),
            detached: false,
            earlier: Some(cause),
            ..work.clone()
        };
        self.begin_work(key, next, asked)
    }

    fn begin_work(&mut self, key: &Key, work: Work, asked: &CheckedReserve) -> Expected {
        self.stats.fresh += 1;
        let (attempt, checkpoint) = (work.attempt, work.checkpoint.to_vec());
        let guard = self.new_guard(asked.lease.ms, asked.on_drop);
        self.run_anew(key, work, guard);
        Expected::Owns { attempt, checkpoint }
    }

    /// Writes that a reservation has a new guard.
    fn run_anew(&mut self, key: &Key, work: Work, guard: Guard) {
        let (lease_end_ms, held_until_ms) = (guard.lease_end_ms, guard.lapses_ms());
        self.run_until(key, work, lease_end_ms, held_until_ms, Some(guard));
    }

    /// Writes that a reservation goes on, with this lease.
    fn run_on(&mut self, key: &Key, work: Work, lease_end_ms: u64, guard: Option<Guard>) {
        self.run_until(key, work, lease_end_ms, lease_end_ms, guard);
    }

    /// A key is kept two retentions beyond the moment until which somebody may hold it without another word.
    fn run_until(&mut self, key: &Key, work: Work, lease_end_ms: u64, held_until_ms: u64, guard: Option<Guard>) {
        let kept_until_ms = held_until_ms.saturating_add(work.retention_ms.saturating_mul(2)).max(work.kept_until_ms);
        self.write(key, Record::Running(Work { lease_end_ms, kept_until_ms, ..work }), guard);
    }

    /// The work of an owner who is still the latest, its guard, and whether its lease still runs; else what it is told.
    fn standing(&mut self, owner: &Owner) -> Result<(Work, Guard, bool), No> {
        if owner.run != self.run || self.begin().is_err() {
            return Err(No::Closed);
        }
        let seen = self.seen(&owner.key);
        let guard = self.keys.get(&owner.key).and_then(|history| history.guard.clone());
        match (seen, guard.filter(|guard| guard.number == owner.guard)) {
            (Seen::InFlight(work), Some(guard)) => Ok((work, guard, true)),
            (Seen::Interrupted(work, ..), Some(guard)) => Ok((work, guard, false)),
            (Seen::Absent | Seen::Done(..), Some(_)) => panic!("a guard keeps its key"),
            (_, None) => Err(self.superseded(&owner.key)),
        }
    }

    fn superseded(&mut self, key: &Key) -> No {
        self.stats.superseded += 1;
        self.rests_on(key, self.options.durability);
        No::Superseded
    }

    /// What [`Reservation::complete`](crate::Reservation::complete) answers.
    pub fn complete(&mut self, owner: &Owner, response: &[u8]) -> Expected {
        match self.standing(owner) {
            Ok((work, ..)) => self.finish(&owner.key, work, response, true),
            Err(no) => no.into(),
        }
    }

    /// What [`Reservation::complete_without_body`](crate::Reservation::complete_without_body) answers.
    pub fn complete_without_body(&mut self, owner: &Owner, reference: &[u8]) -> Expected {
        match self.standing(owner) {
            Ok((work, ..)) => self.finish(&owner.key, work, reference, false),
            Err(no) => no.into(),
        }
    }

    fn finish(&mut self, key: &Key, work: Work, bytes: &[u8], body_kept: bool) -> Expected {
        if bytes.len() > self.options.response_bytes_max {
            // The work is done, so from here on dropping the guard gives nothing back.
            if let Some(guard) = self.keys.get_mut(key).and_then(|history| history.guard.as_mut()) {
                guard.on_drop = OnDrop::Interrupt;
            }
            return Expected::Refused(ErrorKind::TooLarge);
        }
        let kept_until_ms = self.now_ms.saturating_add(work.retention_ms);
        let stored = Stored { bytes: Arc::from(bytes), body_kept, completed_ms: self.now_ms };
        self.stats.completed += 1;
        self.write(key, Record::Done(Work { kept_until_ms, detached: false, ..work }, stored), None);
        Expected::Done
    }

    /// What [`Reservation::release`](crate::Reservation::release) answers.
    pub fn release(&mut self, owner: &Owner) -> Expected {
        match self.standing(owner) {
            // What became of an earlier attempt is still unknown.
            Ok((work, ..)) if work.attempt > 1 => {
                let cause = work.earlier.unwrap_or(Cause::Dropped);
                self.stop(&owner.key, work, cause, self.now_ms);
            }
            Ok((work, ..)) => self.give_back(&owner.key, &work),
            Err(no) => return no.into(),
        }
        Expected::Done
    }

    pub(super) fn give_back(&mut self, key: &Key, work: &Work) {
        self.stats.released += 1;
        self.write(key, Record::Gone(work.durability), None);
    }

    /// What [`Reservation::interrupt`](crate::Reservation::interrupt) does.
    pub fn interrupt(&mut self, owner: &Owner) {
        if let Some((work, _)) = self.standing_at_the_end(owner) {
            self.stop(&owner.key, work, Cause::Dropped, self.now_ms);
        }
    }

    /// What dropping a [`Reservation`](crate::Reservation) does.
    pub fn drop_guard(&mut self, owner: &Owner) {
        match self.standing_at_the_end(owner) {
            Some((work, OnDrop::Release)) if work.attempt == 1 => self.give_back(&owner.key, &work),
            Some((work, OnDrop::Release)) => {
                let cause = work.earlier.unwrap_or(Cause::Dropped);
                self.stop(&owner.key, work, cause, self.now_ms);
            }
            Some((work, OnDrop::Interrupt)) => self.stop(&owner.key, work, Cause::Dropped, self.now_ms),
            None => {}
        }
    }

    /// As [`Self::standing`], for an act whose answer nobody hears: nothing waits for what it rests on.
    fn standing_at_the_end(&mut self, owner: &Owner) -> Option<(Work, OnDrop)> {
        let durable = self.durable;
        let standing = self.standing(owner);
        self.durable = durable;
        standing.ok().map(|(work, guard, _)| (work, guard.on_drop))
    }

    /// What [`Reservation::renew`](crate::Reservation::renew) answers, and that of an attempt.
    pub fn renew(&mut self, owner: &Owner, lease: Duration) -> Expected {
        let lease_ms = match checked_ms("lease", lease) {
            Ok(lease_ms) => lease_ms,
            Err(error) => return Expected::Refused(error.kind()),
        };
        let (work, guard, is_running) = match self.standing(owner) {
            Ok(standing) => standing,
            Err(no) => return no.into(),
        };
        let lease_end_ms = self.now_ms.saturating_add(lease_ms);
        let guard = Guard { lease_end_ms, ..guard };
        if is_running && lease_end_ms.saturating_add(work.retention_ms) <= work.kept_until_ms {
            self.keys.entry(owner.key.clone()).or_default().guard = Some(guard);
            self.rests_on(&owner.key, self.options.durability);
        } else {
            self.run_on(&owner.key, work, lease_end_ms, Some(guard));
        }
        Expected::Done
    }

    /// What [`Reservation::save_checkpoint`](crate::Reservation::save_checkpoint) answers, and that of an attempt.
    pub fn save_checkpoint(&mut self, owner: &Owner, bytes: &[u8]) -> Expected {
        let (work, guard, is_running) = match self.standing(owner) {
            Ok(standing) => standing,
            Err(no) => return no.into(),
        };
        if bytes.len() > NOTE_BYTES_MAX {
            return Expected::Refused(ErrorKind::TooLarge);
        }
        let work = Work { checkpoint: Arc::from(bytes), ..work };
        // Whoever works on after a lapse has the lease that was asked for, once more.
        let lease_end_ms =
            if is_running { guard.lease_end_ms(self.now_ms) } else { self.now_ms.saturating_add(guard.lease_ms) };
        self.run_on(&owner.key, work, lease_end_ms, Some(Guard { lease_end_ms, ..guard }));
        Expected::Done
    }

    /// What [`Reservation::detach`](crate::Reservation::detach) answers.
    pub fn detach(&mut self, owner: &Owner, lease: Duration) -> Expected {
        let lease_ms = match checked_ms("lease", lease) {
            Ok(lease_ms) => lease_ms,
            Err(error) => return Expected::Refused(error.kind()),
        };
        let (work, ..) = match self.standing(owner) {
            Ok(standing) => standing,
            Err(no) => return no.into(),
        };
        let lease_end_ms = self.now_ms.saturating_add(lease_ms);
        self.run_on(&owner.key, Work { detached: true, ..work }, lease_end_ms, None);
        Expected::Done
    }

    /// What [`Store::reattach`](crate::Store::reattach) answers.
    pub fn reattach(&mut self, key: &Key, token: Token) -> Expected {
        if let Err(no) = self.begin() {
            return no.into();
        }
        let guard = self.keys.get(key).and_then(|history| history.guard.as_ref());
        let work = match self.seen(key) {
            Seen::InFlight(work) | Seen::Interrupted(work, ..) if work.token == token.to_u64() => work,
            Seen::InFlight(_) | Seen::Interrupted(..) | Seen::Absent | Seen::Done(..) => {
                return self.superseded(key).into();
            }
        };
        if guard.is_some() {
            self.stats.in_flight += 1;
            self.rests_on(key, self.options.durability);
            return Expected::Held;
        }
        if !work.detached {
            return self.superseded(key).into();
        }
        let (attempt, checkpoint) = (work.attempt, work.checkpoint.to_vec());
        let guard = self.new_guard(self.options.lease.ms, self.options.on_drop);
        self.run_anew(key, Work { detached: false, ..work }, guard);
        Expected::Owns { attempt, checkpoint }
    }

    /// The work of an interruption that is still the handle's; else what is answered.
    fn still_interrupted(&mut self, handle: &Handle) -> Result<(Work, Cause), No> {
        if handle.run != self.run || self.begin().is_err() {
            return Err(No::Closed);
        }
        match self.seen(&handle.key) {
            Seen::Interrupted(work, cause, _) if work.token == handle.token.to_u64() => Ok((work, cause)),
            Seen::Interrupted(..) | Seen::InFlight(_) | Seen::Absent | Seen::Done(..) => {
                Err(self.superseded(&handle.key))
            }
        }
    }

    /// What [`Interrupted::take_over`](crate::Interrupted::take_over) answers.
    pub fn take_over(&mut self, handle: &Handle) -> Expected {
        let durable = self.durable;
        match self.still_interrupted(handle) {
            Ok((work, cause)) => self.next_owner(&handle.key, (&work, cause), &handle.asked, work.retention_ms),
            Err(No::Superseded) => {
                // Nobody is told so, and nothing rests on it: the question is asked anew.
                self.durable = durable;
                self.ask(&handle.key, handle.fingerprint, &handle.asked, false)
            }
            Err(no) => no.into(),
        }
    }

    /// [`InFlight::wait_async`](crate::InFlight::wait_async), as [`Model::wait`] is a reserve that waits.
    pub fn wait_again(&mut self, handle: &Handle, at_most: Duration) -> WaiterId {
        let asked = CheckedReserve { wait_ms: ms_rounded_up(at_most), ..handle.asked };
        self.new_waiter(&handle.key, handle.fingerprint, asked, handle.run)
    }

    /// What [`InFlight::wait`](crate::InFlight::wait) answers when it may wait for no time at all.
    pub fn ask_again(&mut self, handle: &Handle) -> Expected {
        if handle.run != self.run || self.begin().is_err() {
            return Expected::Refused(ErrorKind::Closed);
        }
        self.ask(&handle.key, handle.fingerprint, &handle.asked, true)
    }

    /// What [`Interrupted::resolve`](crate::Interrupted::resolve) answers.
    pub fn resolve(&mut self, handle: &Handle, response: &[u8]) -> Expected {
        match self.still_interrupted(handle) {
            Ok((work, _)) => self.finish(&handle.key, work, response, true),
            Err(no) => no.into(),
        }
    }

    /// What [`Interrupted::release`](crate::Interrupted::release) answers.
    pub fn release_interrupted(&mut self, handle: &Handle) -> Expected {
        match self.still_interrupted(handle) {
            Ok((work, _)) => {
                self.give_back(&handle.key, &work);
                Expected::Done
            }
            Err(no) => no.into(),
        }
    }

    /// What [`Store::forget`](crate::Store::forget) answers.
    pub fn forget(&mut self, key: &Key, reason: &str) -> Expected {
        if let Err(no) = self.begin() {
            return no.into();
        }
        let seen = self.seen(key);
        let answer = match standing_for(&seen) {
            None => self.superseded(key).into(),
            Some(_) if reason.len() > NOTE_BYTES_MAX => return Expected::Refused(ErrorKind::TooLarge),
            Some((work, _)) => {
                self.write(key, Record::Gone(work.durability), None);
                Expected::Done
            }
        };
        self.durable = self.written;
        answer
    }
}

fn takes_over(policy: OnInterrupted, cause: Cause) -> bool {
    match (policy, cause) {
        (OnInterrupted::TakeOver, Cause::Crash | Cause::Dropped) | (OnInterrupted::TakeOverLapsed, _) => true,
        // Whoever held a lapsed lease may still be at work.
        (OnInterrupted::TakeOver, Cause::LeaseLapsed) | (OnInterrupted::Surface | OnInterrupted::Hold(_), _) => false,
    }
}

fn stronger(one: Durability, other: Durability) -> Durability {
    if super::needs_sync(one) { one } else { other }
}
