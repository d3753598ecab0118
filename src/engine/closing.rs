//! How a store ends: owners may finish, the rest is left as interrupted, the end is marked, and everything is let go.

use std::any::Any;
use std::sync::Arc;

use super::{Engine, Held, Shard};
use crate::error::Error;
use crate::format::Cause;
use crate::key::Key;
use crate::left;
use crate::state::Call;
use crate::sync::Ordering;
use crate::wait::Bell;

#[derive(Default)]
pub(super) struct Closing {
    pub(super) report: Option<Result<CloseReport, Error>>,
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

impl Engine {
    /// Ends the store: no new reservation, running owners may finish for `wait_ms`, then an end mark, and the lock is
    /// free. Once closed, stays so; a second call tells what the first one did.
    pub(crate) fn close(&self, wait_ms: u64) -> Result<CloseReport, Error> {
        let _turn = self.turn_to_close.lock();
        if let Some(report) = self.closing.lock().report.clone() {
            return report;
        }
        self.draining.store(true, Ordering::Release);
        self.wait_for_guards(wait_ms);
        let unfinished = self.interrupt_all();
        let ended = self.end(unfinished);
        self.timer.stop();
        self.leader.stop();
        self.helper.stop();
        drop(self.turn_to_keep_house.lock());
        self.room.serve(&Err(Error::closed()));
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
        report
    }

    fn wait_for_guards(&self, wait_ms: u64) {
        if wait_ms == 0 {
            return;
        }
        let deadline_ms = self.now_ms().saturating_add(wait_ms);
        loop {
            let bell = Arc::new(Bell::new());
            self.closing.lock().waiter = Some(Arc::clone(&bell));
            let guards = self.shards.iter().any(|shard| shard.lock().held.values().any(|held| held.guard.is_some()));
            let now_ms = self.now_ms();
            if !guards || now_ms >= deadline_ms {
                self.closing.lock().waiter = None;
                return;
            }
            bell.listen(self.options.clock.sleep(deadline_ms - now_ms));
        }
    }

    /// Refuses all further calls and leaves every reservation that still runs as interrupted: its owner may still be at
    /// work, so as one whose lease lapsed.
    fn interrupt_all(&self) -> u64 {
        self.closed.store(true, Ordering::Release);
        let mut unfinished = 0;
        let mut left_unsaid = Vec::new();
        for shard in &self.shards {
            let (places, tokens) = {
                let mut shard = shard.lock();
                let places: Vec<_> =
                    shard.held.values_mut().flat_map(|held| std::mem::take(&mut held.places)).collect();
                // What was handed over to somebody who has not taken it is given back.
                let is_unfinished = |held: &&Held| held.guard.is_some() && !held.unseen;
                unfinished += shard.held.values().filter(is_unfinished).count() as u64;
                let guarded = shard.held.iter().filter(|(_, held)| held.guard.is_some());
                (places, guarded.map(|(token, _)| *token).collect::<Vec<_>>())
            };
            for place in places {
                place.look_again();
            }
            for token in tokens {
                if self.end_lease(shard, token).is_err() {
                    left_unsaid.extend(self.key_of(&shard.lock(), token).map(|key| (key, token)));
                }
            }
            shard.lock().held.clear();
        }
        left::leave(self.log.whose(), left_unsaid);
        unfinished
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
        self.sync_to(closed.end)
    }
}
