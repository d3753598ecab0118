//! Calls from their first step to their answer, for threads and for tasks.
//!
//! A call takes its step under the shard lock and then waits, outside every lock, until what its answer rests on is
//! durable. Where the log has no room the step changes nothing, and is taken again when the next segment is ready. A
//! thread makes that ready itself and leads its own sync; a task leaves both to the store's helpers, and never blocks.
//!
//! One body serves both kinds of callers. The two calls that a service makes all the time, a reserve that does not wait
//! and a completion, have one of their own for threads, since moving a future about costs as much as the call.

use std::sync::Arc;

use super::{Act, Acted, Begun, Engine, Place, RestsOn, Step, Unsaid, Waits};
use crate::error::{Error, ErrorKind};
use crate::format::Cause;
use crate::key::Key;
use crate::log::NotAppended;
use crate::options::Durability;
use crate::state::{Answer, Call, Lease, State, Stop, Terms};
use crate::wait::Caller;

impl Engine {
    /// An act of whoever holds this guard: once it has ended, the act is superseded.
    pub(crate) async fn call_of_guard(
        &self,
        key: &Key,
        guard_id: u64,
        call: Call,
        given: &[u8],
        caller: Caller,
    ) -> Result<Acted, Error> {
        let act = Act::OfGuard { guard_id, call };
        let begun = self.begin(key, Step::new(act, self.waits()).carrying(given), caller).await?;
        self.settled(begun, caller).await
    }

    /// An act of an owner, of who found out about an interrupted key, or of an operator, with the bytes that its record
    /// is to carry.
    pub(crate) async fn call(&self, key: &Key, call: Call, given: &[u8], caller: Caller) -> Result<Acted, Error> {
        let begun = self.begin_call(key, call, given, caller).await?;
        self.settled(begun, caller).await
    }

    /// The first half of [`Engine::call`].
    pub(crate) async fn begin_call(&self, key: &Key, call: Call, given: &[u8], caller: Caller) -> Result<Begun, Error> {
        self.begin(key, Step::new(Act::Call(call), self.waits()).carrying(given), caller).await
    }

    /// Goes on with a detached reservation.
    pub(crate) async fn reattach(&self, key: &Key, token: u64, lease: Lease, caller: Caller) -> Result<Begun, Error> {
        self.begin(key, Step::new(Act::Reattach { token, lease }, self.waits()), caller).await
    }

    /// The act of a guard that is dropped, if it is the one that holds the key: it waits for nothing, and what cannot be
    /// said now is said later. Where nothing can be written, the guard ends without a word, and the key reads as
    /// interrupted.
    pub(crate) fn drop_guard(&self, key: &Key, token: u64, guard_id: u64, call: Call) {
        if self.refuse_forked().is_err() {
            // The guard is that of the process that this one was forked from, where it goes on.
            return;
        }
        match self.step(key, &Step::new(Act::OfGuard { guard_id, call }, Waits::ForNothing)) {
            Ok(_) => {}
            Err(NotAppended::Failed(_)) => self.let_go(key, token, guard_id),
            Err(NotAppended::NoRoom) => {
                self.fall(key, token, guard_id);
                self.left_unsaid.lock().push(Unsaid { key: key.clone(), token, guard_id, call });
                self.housekeeping_is_due();
            }
        }
    }

    /// Says what dropped guards left unsaid.
    pub(super) fn say_what_was_left_unsaid(&self) {
        let left_unsaid = std::mem::take(&mut *self.left_unsaid.lock());
        for Unsaid { key, token, guard_id, call } in left_unsaid {
            match self.log.prepare_successor(&self.commit) {
                Ok(()) => self.drop_guard(&key, token, guard_id, call),
                // To be said when there is room.
                Err(full) if matches!(full.kind(), ErrorKind::Full { .. }) => {
                    self.left_unsaid.lock().push(Unsaid { key, token, guard_id, call });
                }
                Err(_) => self.let_go(&key, token, guard_id),
            }
        }
    }

    /// A guard was dropped: the key reads as interrupted from now on, also before the log says so.
    fn fall(&self, key: &Key, token: u64, guard_id: u64) {
        let stop = Stop { cause: Cause::Dropped, since_ms: self.now_ms() };
        let mut shard = self.shard(key.hash(&self.seed)).lock();
        let held = shard.held.get_mut(&token);
        let held = held.filter(|held| held.guard.is_some_and(|guard| guard.id == guard_id) && held.fallen.is_none());
        let places = held.map(|held| {
            held.fallen = Some(stop);
            std::mem::take(&mut held.places)
        });
        drop(shard);
        places.into_iter().flatten().for_each(Place::look_again);
        if self.draining() {
            self.ring_who_closes();
        }
    }

    /// Takes a guard off without a word in the log.
    fn let_go(&self, key: &Key, token: u64, guard_id: u64) {
        let mut shard = self.shard(key.hash(&self.seed)).lock();
        let is_held = shard.held.get(&token).is_some_and(|held| held.guard.is_some_and(|guard| guard.id == guard_id));
        let held = if is_held { shard.held.remove(&token) } else { None };
        drop(shard);
        for place in held.into_iter().flat_map(|held| held.places) {
            place.look_again();
        }
        if self.draining() {
            self.ring_who_closes();
        }
    }

    /// The state of a key, without changing it, and its checkpoint.
    pub(crate) async fn peek(&self, key: &Key, caller: Caller) -> Result<(State, Arc<[u8]>), Error> {
        let Begun { acted, rests_on } = self.look_at(key)?;
        self.settle(rests_on, caller).await?;
        Ok((acted.state, acted.payload))
    }

    fn look_at(&self, key: &Key) -> Result<Begun, Error> {
        let hash = key.hash(&self.seed);
        self.refuse_forked()?;
        let mut shard = self.shard(hash).lock();
        self.refuse_ended()?;
        let live = self.log.live().read();
        let look = self.look(&live, &mut shard, hash, key, self.now_ms())?;
        let payload = match look.state {
            State::InFlight(_) | State::Interrupted(..) => look.payload(),
            State::Absent | State::Done(_) => Arc::default(),
        };
        let rests_on = look.rests_on(self.options.durability);
        let (answer, state) = (Answer::Done, look.state);
        Ok(Begun { acted: Acted { answer, state, payload, guard_id: None, lease_end_before_ms: 0 }, rests_on })
    }

    /// Makes durable all that was appended before the call.
    pub(crate) async fn sync(&self, caller: Caller) -> Result<(), Error> {
        self.refuse_closed()?;
        self.settle(Some(RestsOn { end_lsn: self.log.end(), level: Durability::PowerLoss }), caller).await
    }

    fn waits(&self) -> Waits {
        Waits::For(self.options.durability)
    }

    /// Takes the step of a call, as soon as there is room for it.
    pub(super) async fn begin(&self, key: &Key, step: Step<'_>, caller: Caller) -> Result<Begun, Error> {
        if caller == Caller::Thread {
            return self.begin_here(key, step);
        }
        loop {
            if let Some(begun) = self.begin_at_once(key, step)? {
                return Ok(begun);
            }
            let order = self.room.order();
            self.housekeeping_is_due();
            order.bell.rung(caller, None).await;
            order.outcome()?;
        }
    }

    /// [`Engine::begin`] on this thread.
    fn begin_here(&self, key: &Key, step: Step<'_>) -> Result<Begun, Error> {
        loop {
            if let Some(begun) = self.begin_at_once(key, step)? {
                return Ok(begun);
            }
            self.log.prepare_successor(&self.commit).map_err(|error| self.refused(error))?;
        }
    }

    /// [`Engine::begin`] without waiting; `None` when there is no room.
    fn begin_at_once(&self, key: &Key, step: Step<'_>) -> Result<Option<Begun>, Error> {
        match self.step(key, &step) {
            Ok(begun) => Ok(Some(begun)),
            Err(NotAppended::NoRoom) => Ok(None),
            Err(NotAppended::Failed(error)) => Err(self.refused(error)),
        }
    }

    /// Reserves a key, or says what is known of it, on this thread and without waiting for who may own it.
    pub(crate) fn reserve_here(&self, key: &Key, terms: Terms) -> Result<Begun, Error> {
        self.begin_here(key, Step::reserve(terms))
    }

    /// [`Engine::reserve_here`] for a task; `None` when it would have to wait for room.
    pub(crate) fn reserve_at_once(&self, key: &Key, terms: Terms) -> Result<Option<Begun>, Error> {
        self.begin_at_once(key, Step::reserve(terms))
    }

    /// Whether there is nothing to wait for: what the answer rests on survives what its level names already.
    pub(crate) fn is_settled(&self, rests_on: Option<RestsOn>) -> bool {
        !matches!(rests_on, Some(RestsOn { end_lsn, level: Durability::PowerLoss }) if end_lsn > self.commit.durable())
    }

    /// [`Engine::begin_call`] on this thread.
    pub(crate) fn begin_call_here(&self, key: &Key, call: Call, given: &[u8]) -> Result<Begun, Error> {
        self.begin_here(key, Step::new(Act::Call(call), self.waits()).carrying(given))
    }

    /// A full disk may have room once what is past its use is given up.
    fn refused(&self, error: Error) -> Error {
        if matches!(error.kind(), ErrorKind::Full { .. }) {
            self.housekeeping_is_due();
        }
        self.tell_refusal(&error);
        error
    }

    async fn settled(&self, begun: Begun, caller: Caller) -> Result<Acted, Error> {
        self.settle(begun.rests_on, caller).await?;
        Ok(begun.acted)
    }

    /// Returns once what an answer rests on survives what its level names.
    pub(crate) async fn settle(&self, rests_on: Option<RestsOn>, caller: Caller) -> Result<(), Error> {
        self.refuse_forked()?;
        match (rests_on, caller) {
            (Some(RestsOn { end_lsn, level: Durability::PowerLoss }), Caller::Task) => {
                let synced = self.commit.wait_as_task(end_lsn, &|| self.ask_for_a_sync()).await;
                self.tell_of_sync(&synced);
                synced
            }
            (Some(_) | None, _) => self.settle_here(rests_on),
        }
    }

    /// [`Engine::settle`] on this thread.
    pub(crate) fn settle_here(&self, rests_on: Option<RestsOn>) -> Result<(), Error> {
        match rests_on {
            Some(RestsOn { end_lsn, level: Durability::PowerLoss }) => {
                let synced = self.sync_to(end_lsn);
                self.tell_of_sync(&synced);
                synced
            }
            Some(RestsOn { level: Durability::ProcessCrash | Durability::Interval(_), .. }) | None => Ok(()),
        }
    }

    /// Waits for what all these answers rest on at once: one sync serves them, where one is needed. What then fails to
    /// settle on its own says why.
    pub(crate) async fn settle_all(&self, rest_on: impl Iterator<Item = RestsOn>, caller: Caller) {
        let highest = rest_on.filter(|on| on.level == Durability::PowerLoss).max_by_key(|on| on.end_lsn);
        if self.settle(highest, caller).await.is_err() {
            // Each answer is settled on its own, and told the failure if it rests on what is not durable.
        }
    }

    /// Returns once the log is durable up to here; this thread syncs if nobody else is at it.
    pub(super) fn sync_to(&self, end_lsn: u64) -> Result<(), Error> {
        self.commit.wait(end_lsn, &|| self.sync_log())
    }

    pub(super) fn ask_for_a_sync(&self) {
        if !self.leader.call() {
            self.commit.see_to_what_is_wanted(&|| self.sync_log());
        }
    }

    pub(super) fn housekeeping_is_due(&self) {
        if !self.helper.call() {
            self.keep_house();
        }
    }
}
