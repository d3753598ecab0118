//! Waiting for a key, handing it over, and what becomes due by time alone.
//!
//! Whoever changes a key serves those who wait for it, under the same shard lock: each is decided anew, in the order of
//! their coming. Who would become the owner is made the owner, by a record of its own in the log, and finds the
//! ownership handed over when it wakes; its lease begins then. Until then no work can have begun: if it gave up
//! meanwhile, or does not wake for a whole lease, the key is released again, and so passes on.
//!
//! What happens by time alone is found by one look through what is held, when the earliest of it is due: a lease has
//! lapsed (which the log is told), a waiter's time is over, a held interruption comes to its end.

use std::sync::Arc;

use super::retries::Retries;
use super::{Act, Acted, Begun, Engine, Shard, Step, Waits};
use crate::error::Error;
use crate::event::Event;
use crate::format::Cause;
use crate::key::{Key, Token};
use crate::log::NotAppended;
use crate::state::{self, Answer, Call, Decision, Guard, Owned, State, Terms};
use crate::sync::{Mutex, Ordering};
use crate::wait::{Bell, Caller};

/// One who waits for a key that somebody else owns.
#[derive(Debug)]
pub(super) struct Waiter {
    bell: Bell,
    terms: Terms,
    /// Store time at which it gives up.
    deadline_ms: u64,
    /// Changes under the lock of the key's shard only.
    standing: Mutex<Standing>,
}

/// How a waiter stands.
#[derive(Debug)]
enum Standing {
    /// It is in no list, and looks at the key itself.
    Looks,
    /// It is in the list of the reservation with this token.
    Listed { token: u64 },
    /// It was made the owner.
    Owns(Begun),
}

/// A place in the list of those who wait.
#[derive(Debug)]
pub(super) struct Place {
    waiter: Arc<Waiter>,
    /// Store time at which the waiter looks again whatever happens.
    due_ms: u64,
}

impl Place {
    /// Takes the waiter out of every list: it looks at the key itself.
    pub(super) fn look_again(self) {
        *self.waiter.standing.lock() = Standing::Looks;
        self.waiter.bell.ring();
    }
}

/// What a step leaves to be done once the shard lock is free.
#[derive(Debug, Default)]
pub(super) struct Aftermath {
    /// Who has something to hear.
    told: Vec<Arc<Waiter>>,
    pub(super) housekeeping_due: bool,
    pub(super) retries: Retries,
    /// There is something for who listens.
    pub(super) news: bool,
    lapsed: Option<Box<Event>>,
    /// The earliest moment at which something is due, if the step has set one.
    due_ms: Option<u64>,
}

impl Aftermath {
    pub(super) fn due_at(&mut self, ms: u64) {
        self.due_ms = Some(self.due_ms.map_or(ms, |earlier| earlier.min(ms)));
    }
}

impl Shard {
    /// Puts a waiter at the end of the list of the key's latest reservation.
    pub(super) fn list(&mut self, state: &State, waiter: &Arc<Waiter>, after: &mut Aftermath) -> bool {
        let Some(token) = state.token() else { return false };
        let is_guarded = self.held.get(&token).is_some_and(|held| held.guard.is_some());
        let due_ms = waiter.deadline_ms.min(changes_ms(state, &waiter.terms, is_guarded));
        after.due_at(due_ms);
        *waiter.standing.lock() = Standing::Listed { token };
        self.held.entry(token).or_default().places.push(Place { waiter: Arc::clone(waiter), due_ms });
        true
    }

    fn unlist(&mut self, token: u64, waiter: &Arc<Waiter>) {
        if let Some(held) = self.held.get_mut(&token) {
            held.places.retain(|place| !Arc::ptr_eq(&place.waiter, waiter));
            if held.guard.is_none() && held.places.is_empty() {
                self.held.remove(&token);
            }
        }
    }

    /// Who waits, and for whom something is due at `now_ms`; and the tokens of guards whose lease has lapsed since the
    /// last look. Says, too, when the next is due.
    fn take_what_is_due(&mut self, now_ms: u64, after: &mut Aftermath) -> Vec<u64> {
        let mut lapsed = Vec::new();
        for (token, held) in &mut self.held {
            if let Some(guard) = held.guard.as_ref().filter(|_| !held.lapse_told) {
                if guard.lapses_ms() <= now_ms {
                    lapsed.push(*token);
                } else {
                    after.due_at(guard.lapses_ms());
                }
            }
            for place in &mut held.places {
                if place.due_ms <= now_ms {
                    // It leaves the list itself.
                    place.due_ms = u64::MAX;
                    after.told.push(Arc::clone(&place.waiter));
                } else {
                    after.due_at(place.due_ms);
                }
            }
        }
        lapsed
    }
}

/// When an answer of `InFlight` to these terms may become another by time alone, without a guard's lapse, which is
/// found by itself.
fn changes_ms(state: &State, terms: &Terms, is_guarded: bool) -> u64 {
    match state {
        State::InFlight(owned) if owned.detached => owned.lease_end_ms,
        State::Interrupted(_, stop) if is_guarded => terms.policy.holds_until_ms(stop),
        // Or it is forgotten before.
        State::Interrupted(owned, stop) => terms.policy.holds_until_ms(stop).min(owned.kept_until_ms),
        State::InFlight(_) | State::Absent | State::Done(_) => u64::MAX,
    }
}

/// A waiter on its way; whatever becomes of the call, it leaves no trace.
struct Waiting<'a> {
    engine: &'a Engine,
    key: &'a Key,
    waiter: Arc<Waiter>,
}

impl Waiting<'_> {
    /// Leaves the list. What was handed over meanwhile is taken, if it still stands, and its lease begins.
    fn leave(&self) -> Option<Begun> {
        self.engine.refuse_forked().ok()?;
        let hash = self.key.hash(&self.engine.seed);
        let mut shard = self.engine.shard(hash).lock();
        let standing = std::mem::replace(&mut *self.waiter.standing.lock(), Standing::Looks);
        match standing {
            Standing::Looks => None,
            Standing::Listed { token } => {
                shard.unlist(token, &self.waiter);
                None
            }
            Standing::Owns(begun) => {
                let State::InFlight(owned) = &begun.acted.state else { return None };
                let held = shard.held.get_mut(&owned.token)?;
                let guard = held.guard.as_mut().filter(|guard| Some(guard.id) == begun.acted.guard_id)?;
                guard.begin_anew(self.engine.now_ms(), owned);
                held.unseen = false;
                held.lapse_told = false;
                Some(begun)
            }
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.engine.refuse_forked().is_err() || matches!(*self.waiter.standing.lock(), Standing::Looks) {
            return;
        }
        if let Some(Begun { acted: Acted { state, guard_id: Some(guard_id), .. }, .. }) = self.leave()
            && let Some(token) = state.token()
        {
            self.engine.drop_guard(self.key, token, guard_id, Call::Release { token });
        }
    }
}

impl Engine {
    /// Reserves a key, or says what is known of it; waits at most `wait_ms` while it is in flight.
    pub(crate) async fn reserve(&self, key: &Key, terms: Terms, wait_ms: u64, caller: Caller) -> Result<Begun, Error> {
        let mut step = Step::reserve(terms);
        let deadline_ms = if wait_ms == 0 { 0 } else { self.now_ms().saturating_add(wait_ms) };
        while wait_ms > 0 && self.now_ms() < deadline_ms {
            let waiter = Waiter { bell: Bell::new(), terms, deadline_ms, standing: Mutex::new(Standing::Looks) };
            let waiting = Waiting { engine: self, key, waiter: Arc::new(waiter) };
            let begun = self.begin(key, step.waiting_as(&waiting.waiter), caller).await?;
            if begun.acted.answer != Answer::InFlight {
                return Ok(begun);
            }
            step = step.again();
            let left_ms = deadline_ms.saturating_sub(self.now_ms());
            waiting.waiter.bell.rung(caller, self.options.clock.sleep(left_ms)).await;
            if let Some(begun) = waiting.leave() {
                return Ok(begun);
            }
        }
        self.begin(key, step, caller).await
    }

    /// Decides anew for those who waited for the key, now that it is in `state`.
    pub(super) fn serve(
        &self,
        shard: &mut Shard,
        hash: u64,
        key: &Key,
        mut state: State,
        places: Vec<Place>,
        after: &mut Aftermath,
    ) {
        let now_ms = if places.is_empty() { return } else { self.now_ms() };
        for place in places {
            let terms = place.waiter.terms;
            let Decision { answer, write } = state::decide(&state, &Call::Reserve(terms), now_ms);
            if write.is_some() {
                if let Ok(begun) = self.hand_over(shard, hash, key, terms, after) {
                    state = begun.acted.state;
                    *place.waiter.standing.lock() = Standing::Owns(begun);
                } else {
                    // It tries for itself, and is told what is wrong.
                    *place.waiter.standing.lock() = Standing::Looks;
                }
                after.told.push(place.waiter);
            } else if answer != Answer::InFlight || !shard.list(&state, &place.waiter, after) {
                *place.waiter.standing.lock() = Standing::Looks;
                after.told.push(place.waiter);
            }
        }
    }

    /// Makes one who waits the owner.
    fn hand_over(
        &self,
        shard: &mut Shard,
        hash: u64,
        key: &Key,
        terms: Terms,
        after: &mut Aftermath,
    ) -> Result<Begun, NotAppended> {
        let begun = self.step_in(shard, hash, key, &Step::reserve(terms).again(), after)?;
        if let Some(held) = begun.acted.state.token().and_then(|token| shard.held.get_mut(&token)) {
            held.unseen = true;
            held.guard = held.guard.map(Guard::not_held);
            after.due_at(held.guard.map_or(u64::MAX, |guard| guard.lapses_ms()));
        }
        Ok(begun)
    }

    /// Does what a step has left to be done, outside of every lock.
    pub(super) fn see_to(&self, after: Aftermath) {
        if let Some(due_ms) = after.due_ms {
            self.timer.set(due_ms);
            // Time may have passed since it was decided; where no thread keeps the time, nobody else would look.
            if self.clock_is_moved_by_hand && due_ms <= self.now_ms() {
                self.do_what_is_due();
            }
        }
        for waiter in after.told {
            waiter.bell.ring();
        }
        if self.draining() {
            self.ring_who_closes();
        }
        if after.housekeeping_due {
            self.housekeeping_is_due();
        }
        self.tell_of_retries(after.retries);
        if let Some(lapsed) = after.lapsed {
            self.listener.tell(&lapsed, self.now_ms());
        }
        if after.news {
            self.tell_news();
        }
    }

    pub(super) fn draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Something was written at `now_ms`: it is synced in time, though nobody may wait for it.
    pub(super) fn want_a_sync_by(&self, now_ms: u64, after: &mut Aftermath) {
        if let Some(every_ms) = self.options.sync_every_ms
            && self.sync_due_ms.load(Ordering::Relaxed) == u64::MAX
        {
            let due_ms = now_ms.saturating_add(every_ms);
            self.sync_due_ms.store(due_ms, Ordering::Relaxed);
            after.due_at(due_ms);
        }
    }

    /// Does all that has become due by time alone.
    pub(super) fn do_what_is_due(&self) {
        let now_ms = self.now_ms();
        if !self.timer.take(now_ms) {
            return;
        }
        for shard in &self.shards {
            let mut after = Aftermath::default();
            let lapsed = shard.lock().take_what_is_due(now_ms, &mut after);
            self.see_to(after);
            for token in lapsed {
                if self.end_lease(shard, token).is_err() {
                    // The log need not know: whoever looks at the key sees that the lease has lapsed.
                    let places = shard.lock().held.get_mut(&token).map(|held| std::mem::take(&mut held.places));
                    places.into_iter().flatten().for_each(Place::look_again);
                }
            }
        }
        let sync_due_ms = self.sync_due_ms.load(Ordering::Relaxed);
        if sync_due_ms <= now_ms {
            self.sync_due_ms.store(u64::MAX, Ordering::Relaxed);
            if self.commit.want(self.log.end()) {
                self.ask_for_a_sync();
            }
        } else {
            self.timer.set(sync_due_ms);
        }
        self.tell_news();
    }

    /// Has the log say that a guard's lease is over, which serves who waits. The guard stays: its owner may be at work,
    /// and finish late. One that nobody has seen is released instead.
    pub(super) fn end_lease(&self, shard: &Mutex<Shard>, token: u64) -> Result<(), Error> {
        loop {
            let mut after = Aftermath::default();
            let ended = self.end_lease_in(&mut shard.lock(), token, &mut after);
            self.see_to(after);
            match ended {
                Ok(()) => return Ok(()),
                Err(NotAppended::NoRoom) => self.log.prepare_successor(&self.commit)?,
                Err(NotAppended::Failed(error)) => return Err(error),
            }
        }
    }

    fn end_lease_in(&self, shard: &mut Shard, token: u64, after: &mut Aftermath) -> Result<(), NotAppended> {
        let Some(held) = shard.held.get_mut(&token) else { return Ok(()) };
        let closed = self.refuse_closed().is_err();
        let over = |guard: &Guard| closed || guard.lapses_ms() <= self.now_ms();
        let (Some(address), true) = (held.address, held.guard.as_ref().is_some_and(over)) else { return Ok(()) };
        let call = match (held.unseen, closed) {
            (true, _) => Call::Release { token },
            (false, _) if held.fallen.is_some() => Call::Interrupt { token, cause: Cause::Dropped },
            (false, true) => Call::Interrupt { token, cause: Cause::LeaseLapsed },
            (false, false) => Call::Lapse { token },
        };
        // Told or not: this is not tried again and again.
        held.lapse_told = true;
        let live = self.log.live().read();
        let life = live.get(address.segment).map(Arc::clone).ok_or_else(Error::closed)?;
        drop(live);
        let (record, _) = life.state_record(address.offset)?;
        let key = Key::new(record.scope, record.id).map_err(Error::from)?;
        let hash = key.hash(&self.seed);
        let begun = self.step_in(shard, hash, &key, &Step::new(Act::Call(call), Waits::ForNothing), after)?;
        if let (State::Interrupted(Owned { attempt, .. }, _), Call::Lapse { .. }) = (begun.acted.state, call) {
            after.lapsed = Some(Box::new(Event::LeaseLapsed { key, token: Token::from_u64(token), attempt }));
        }
        Ok(())
    }
}
