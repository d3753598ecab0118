//! Those who wait for a key in flight: one list a key, served in the order of their coming.

use super::expected::Expected;
use super::history::{Place, Record, Seen, Work};
use super::{Model, standing_for};
use crate::error::ErrorKind;
use crate::format::Cause;
use crate::key::{Fingerprint, Key};
use crate::options::{CheckedReserve, ReserveOptions};

/// The model's shadow of the future of a reserve that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WaiterId(u64);

/// One who waits, or is about to.
#[derive(Clone, Debug)]
pub(super) struct Waiter {
    key: Key,
    fingerprint: Fingerprint,
    asked: CheckedReserve,
    run: u64,
    /// Store time at which it gives up; `None` until it is polled for the first time.
    deadline_ms: Option<u64>,
    /// It has something to hear.
    is_told: bool,
    /// The number of the guard that it was handed.
    owns: Option<u64>,
}

impl Model {
    /// The future of [`Store::reserve_with_async`](crate::Store::reserve_with_async), most of all one that
    /// [waits](ReserveOptions::wait). Like a future it does nothing until it is [polled](Self::poll), once for each
    /// time that the test polls the real one; and it is [given up](Self::give_up) when that is dropped.
    ///
    /// # Errors
    ///
    /// `InvalidOptions`, which the real one answers when it is polled.
    pub fn wait(&mut self, key: &Key, fingerprint: Fingerprint, with: &ReserveOptions) -> Result<WaiterId, ErrorKind> {
        let asked = with.validate(&self.options).map_err(|error| error.kind())?;
        Ok(self.new_waiter(key, fingerprint, asked, self.run))
    }

    pub(super) fn new_waiter(
        &mut self,
        key: &Key,
        fingerprint: Fingerprint,
        asked: CheckedReserve,
        run: u64,
    ) -> WaiterId {
        self.waiters_made += 1;
        let key = key.clone();
        let waiter = Waiter { key, fingerprint, asked, run, deadline_ms: None, is_told: false, owns: None };
        self.waiters.insert(self.waiters_made, waiter);
        WaiterId(self.waiters_made)
    }

    /// What a poll gives; `None` is pending.
    ///
    /// # Panics
    ///
    /// When it was ready before, or given up.
    pub fn poll(&mut self, id: WaiterId) -> Option<Expected> {
        let is_open = self.begin().is_ok();
        let mut waiter = self.waiters.remove(&id.0).unwrap_or_else(|| panic!("{id:?} is over"));
        if waiter.deadline_ms.is_some() && !waiter.is_told {
            self.waiters.insert(id.0, waiter);
            return None;
        }
        if !is_open || waiter.run != self.run {
            return Some(Expected::Refused(ErrorKind::Closed));
        }
        let deadline_ms = *waiter.deadline_ms.get_or_insert(self.now_ms.saturating_add(waiter.asked.wait_ms));
        if let Some(answer) = self.take_up(&waiter) {
            return Some(answer);
        }
        self.unlist(id, &waiter.key);
        let seen = self.seen(&waiter.key);
        if self.now_ms < deadline_ms && self.would_wait(&seen, &waiter) {
            self.list(id.0, &seen, &waiter);
            self.waiters.insert(id.0, Waiter { is_told: false, owns: None, ..waiter });
            return None;
        }
        Some(self.ask(&waiter.key, waiter.fingerprint, &waiter.asked, true))
    }

    /// The future is dropped.
    pub fn give_up(&mut self, id: WaiterId) {
        let is_open = self.begin().is_ok();
        let Some(waiter) = self.waiters.remove(&id.0) else { return };
        if !is_open || waiter.run != self.run {
            return;
        }
        self.unlist(id, &waiter.key);
        if let (true, Seen::InFlight(work) | Seen::Interrupted(work, ..)) = (self.owns(&waiter), self.seen(&waiter.key))
        {
            self.give_up_unseen(&waiter.key, work);
        }
    }

    /// What nobody has seen is given back: no work can have begun.
    pub(super) fn give_up_unseen(&mut self, key: &Key, work: Work) {
        if work.attempt == 1 {
            self.give_back(key, &work);
        } else {
            let cause = work.earlier.unwrap_or(Cause::Dropped);
            self.stop(key, work, cause, self.now_ms);
        }
    }

    /// Takes what was handed over, if it still stands. The lease begins now, as far as the key is kept anyway.
    fn take_up(&mut self, waiter: &Waiter) -> Option<Expected> {
        if !self.owns(waiter) {
            return None;
        }
        let now_ms = self.now_ms;
        let history = self.keys.get_mut(&waiter.key)?;
        let work = history.latest().and_then(Record::work)?.clone();
        let guard = history.guard.as_mut()?;
        let lease_end_ms_max = work.kept_until_ms.saturating_sub(work.retention_ms);
        let while_held_ms = self.options.lease.while_held_ms;
        guard.lease_end_ms = now_ms.saturating_add(guard.lease_ms).min(lease_end_ms_max);
        guard.renews_until_ms = now_ms.saturating_add(while_held_ms).min(lease_end_ms_max);
        guard.is_unseen = false;
        self.rests_on(&waiter.key, waiter.asked.durability);
        Some(Expected::Owns { attempt: work.attempt, checkpoint: work.checkpoint.to_vec() })
    }

    fn owns(&self, waiter: &Waiter) -> bool {
        let guard = self.keys.get(&waiter.key).and_then(|history| history.guard.as_ref());
        waiter.owns.is_some() && guard.map(|guard| guard.number) == waiter.owns
    }

    fn unlist(&mut self, id: WaiterId, key: &Key) {
        if let Some(history) = self.keys.get_mut(key) {
            history.places.retain(|place| place.waiter != id.0);
        }
    }

    /// Whether the answer would be `InFlight`.
    fn would_wait(&self, seen: &Seen, waiter: &Waiter) -> bool {
        let is_other = standing_for(seen).is_some_and(|(work, _)| work.fingerprint != waiter.fingerprint);
        match seen {
            _ if is_other => false,
            Seen::InFlight(_) => true,
            Seen::Interrupted(_, cause, since_ms) => self.is_held(&waiter.asked, *cause, *since_ms).is_some(),
            Seen::Absent | Seen::Done(..) => false,
        }
    }

    /// Puts a waiter at the end of the list.
    fn list(&mut self, number: u64, seen: &Seen, waiter: &Waiter) {
        let changes_ms = match seen {
            // The lapse of a guard's lease serves everybody anyway.
            Seen::InFlight(work) if work.detached => work.lease_end_ms,
            Seen::Interrupted(_, cause, since_ms) => {
                let left_ms = self.is_held(&waiter.asked, *cause, *since_ms).unwrap_or(0);
                self.now_ms.saturating_add(left_ms)
            }
            Seen::InFlight(_) | Seen::Absent | Seen::Done(..) => u64::MAX,
        };
        let due_ms = changes_ms.min(waiter.deadline_ms.unwrap_or(u64::MAX));
        self.keys.entry(waiter.key.clone()).or_default().places.push(Place { waiter: number, due_ms });
    }

    /// The key has changed: each who waits for it is decided anew. One who would become the owner is made the owner.
    pub(super) fn serve(&mut self, key: &Key) {
        let Some(history) = self.keys.get_mut(key) else { return };
        for place in std::mem::take(&mut history.places) {
            let Some(mut waiter) = self.waiters.remove(&place.waiter) else { continue };
            let Some(history) = self.keys.get(key) else { continue };
            let seen = history.seen(self.now_ms);
            if self.would_wait(&seen, &waiter) {
                self.list(place.waiter, &seen, &waiter);
            } else {
                waiter.is_told = true;
                waiter.owns = self.hand_over(&seen, &waiter);
            }
            self.waiters.insert(place.waiter, waiter);
        }
    }

    /// Makes a waiter the owner if its policy would. Gives the guard's number.
    fn hand_over(&mut self, seen: &Seen, waiter: &Waiter) -> Option<u64> {
        // Nobody has been told yet, so nothing has waited for a sync.
        let durable = self.durable;
        self.make_owner(&waiter.key, waiter.fingerprint, seen, &waiter.asked)?;
        self.durable = durable;
        let guard = self.keys.get_mut(&waiter.key).and_then(|history| history.guard.as_mut())?;
        guard.is_unseen = true;
        Some(guard.number)
    }

    /// Tells everybody whose time is over, or whose key is seen otherwise from now on.
    pub(super) fn wake_who_is_due(&mut self) {
        for history in self.keys.values_mut() {
            for place in history.places.iter_mut().filter(|place| place.due_ms <= self.now_ms) {
                if let Some(waiter) = self.waiters.get_mut(&place.waiter) {
                    waiter.is_told = true;
                }
            }
        }
    }

    /// The store is closed: everybody is told.
    pub(super) fn wake_all(&mut self) {
        for waiter in self.waiters.values_mut() {
            waiter.is_told = true;
        }
        for history in self.keys.values_mut() {
            history.places.clear();
        }
    }
}
