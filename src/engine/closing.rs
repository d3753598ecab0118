//! How a store ends: owners may finish, the rest is left as interrupted, the end is marked, and everything is let go.

use std::any::Any;
use std::sync::Arc;

use super::{Engine, Held, Place, Shard};
use crate::error::Error;
use crate::format::Cause;
use crate::helper;
use crate::key::Key;
use crate::left::{self, Left};
use crate::state::Call;
use crate::sync::Ordering;
use crate::wait::Bell;

#[derive(Default)]
pub(super) struct Closing {
    pub(super) report: Option<Result<CloseReport, Error>>,
    /// Store time until which owners may finish.
    pub(super) deadline_ms: Option<u64>,
    /// Who waits for the last guard to end.
    pub(super) waiter: Option<Arc<Bell>>,
    /// The directory's lock.
    pub(super) lock: Option<Box<dyn Any + Send + Sync>>,
}

/// What closing the store left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CloseReport {
    /// Reservations that were neither completed nor given back: the next opening finds them interrupted.
    pub unfinished: u64,
}

/// What closing has found running.
#[derive(Default)]
struct Ended {
    unfinished: u64,
    /// Who waits for keys.
    places: Vec<Place>,
    /// Reservations that the log says are interrupted, and those that it could not be told of.
    said: Left,
    left_unsaid: Left,
}

impl Engine {
    /// Ends the store: no new reservation, running owners may finish for `wait_ms`, then an end mark, and the lock is
    /// free. Once closed, stays so; a second call shortens the time that is left to the owners, and tells what the first
    /// one did. One that comes out of the first, by a waker that it rang, or from a thread that the first waits for, is
    /// told no more than that the store is closed.
    pub(crate) fn close(&self, wait_ms: u64) -> Result<CloseReport, Error> {
        self.refuse_forked()?;
        let deadline_ms = self.now_ms().saturating_add(wait_ms);
        let sooner = |earlier: u64| earlier.min(deadline_ms);
        {
            let mut closing = self.closing.lock();
            closing.deadline_ms = Some(closing.deadline_ms.map_or(deadline_ms, sooner));
        }
        self.draining.store(true, Ordering::Release);
        self.ring_who_closes();
        let Some(turn) = self.turn_to_close.take(!helper::is_own_thread()) else { return Err(Error::closed()) };
        if let Some(report) = self.closing.lock().report.clone() {
            return report;
        }
        self.wait_for_guards();
        let Ended { unfinished, places, said, left_unsaid } = self.interrupt_all();
        let ended = self.end(unfinished);
        // What was said in vain is left to the next opening in this process, as what could not be said at all.
        let in_vain = if ended.is_err() { said } else { Vec::new() };
        left::leave(self.log.whose(), in_vain.into_iter().chain(left_unsaid).collect());
        self.timer.stop();
        self.leader.stop();
        self.helper.stop();
        drop(self.turn_to_keep_house.take(true));
        // After a failure somebody else may still be at a sync; nobody begins another.
        self.commit.wait_for_leader();
        // Every call that began before has left its shard lock; the segments can go, and with them the directory's
        // lock.
        self.pass_through_shards();
        self.log.let_go();
        let report = ended.map(|()| CloseReport { unfinished });
        let lock = {
            let mut closing = self.closing.lock();
            closing.report = Some(report.clone());
            closing.lock.take()
        };
        drop(lock);
        drop(turn);
        for place in places {
            place.look_again();
        }
        self.room.serve(&Err(Error::closed()));
        report
    }

    fn wait_for_guards(&self) {
        loop {
            let bell = Arc::new(Bell::new());
            let deadline_ms = {
                let mut closing = self.closing.lock();
                closing.waiter = Some(Arc::clone(&bell));
                closing.deadline_ms.unwrap_or(0)
            };
            let now_ms = self.now_ms();
            let guards = || self.shards.iter().any(|shard| shard.lock().held.values().any(Held::is_guarded));
            if now_ms >= deadline_ms || !guards() {
                self.closing.lock().waiter = None;
                return;
            }
            bell.listen(self.options.clock.sleep(deadline_ms - now_ms));
        }
    }

    /// Refuses all further calls and leaves every reservation that still runs as interrupted: its owner may still be at
    /// work, so as one whose lease lapsed.
    fn interrupt_all(&self) -> Ended {
        self.closed.store(true, Ordering::Release);
        let mut all = Ended::default();
        for shard in &self.shards {
            let tokens: Vec<_> = {
                let mut shard = shard.lock();
                all.places.extend(shard.held.values_mut().flat_map(|held| std::mem::take(&mut held.places)));
                // What was handed over to somebody who has not taken it is given back.
                let is_unfinished = |held: &&Held| held.is_guarded() && !held.unseen;
                all.unfinished += shard.held.values().filter(is_unfinished).count() as u64;
                shard.held.iter().filter(|(_, held)| held.guard.is_some()).map(|(token, _)| *token).collect()
            };
            for token in tokens {
                let key = self.key_of(&shard.lock(), token);
                let is_said = self.end_lease(shard, token).is_ok();
                let kept = if is_said { &mut all.said } else { &mut all.left_unsaid };
                kept.extend(key.map(|key| (key, token)));
            }
            shard.lock().held.clear();
        }
        all
    }

    /// The key of a reservation that a guard holds.
    fn key_of(&self, shard: &Shard, token: u64) -> Option<Key> {
        let address = shard.held.get(&token)?.address?;
        let live = self.log.live().read();
        let (record, _) = live.get(address.segment)?.state_record(address.offset).ok()?;
        Key::new(record.scope, record.id).ok()
    }

    /// Says what the run before this one, in this process, could not say of reservations that were still held.
    pub(super) fn say_what_an_earlier_run_left(&self) -> Result<(), Error> {
        let mut left = left::take(self.log.whose());
        while let Some((key, token)) = left.pop() {
            let call = Call::Interrupt { token, cause: Cause::LeaseLapsed };
            if let Err(error) = self.begin_call_here(&key, call, &[]) {
                left.push((key, token));
                left::leave(self.log.whose(), left);
                return Err(error);
            }
        }
        Ok(())
    }

    pub(super) fn ring_who_closes(&self) {
        if let Some(bell) = self.closing.lock().waiter.clone() {
            bell.ring();
        }
    }

    fn end(&self, unfinished: u64) -> Result<(), Error> {
        self.log.refuse();
        self.sync_to(self.log.end())?;
        let closed = self.log.close(unfinished, &self.commit)?;
        self.sync_to(closed.end)?;
        // Those of earlier runs are left to the next opening: closing is not to take the reading of the whole log.
        while self.log.leave_hint(true, &self.seed, &self.commit) {}
        Ok(())
    }
}
