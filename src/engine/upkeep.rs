//! What nobody should have to wait for: syncing rolled segments, making the next one ready, giving up old ones.

use std::sync::Arc;

use super::{Engine, Shard};
use crate::error::Error;
use crate::format::StateKind;
use crate::index::{Address, Candidate};
use crate::log::NotAppended;
use crate::state::{self, State};
use crate::sync::Ordering;

/// The index is swept each time this part of the live segments has retired.
const SWEEPS_A_WINDOW: u64 = 8;
/// How many buckets a sweep looks at before it lets the shard's callers in.
const SWEEP_BUCKETS: usize = 512;

impl Engine {
    /// What nobody should have to wait for: making the next segment ready, syncing rolled ones, retiring old ones.
    pub(super) fn keep_house(&self) {
        // Who waits for room goes first, unless only what is past its use can give it.
        if self.room.is_waited_at()
            && let Ok(()) = self.log.prepare_successor(&self.commit)
        {
            self.room.serve(&Ok(()));
        }
        self.say_what_was_left_unsaid();
        let prepared = self.take_turn_to_keep_house();
        self.room.serve(&prepared);
        if let Err(error) = &prepared {
            self.tell_refusal(error);
        }
        self.tell_news();
    }

    /// Where a waker that a sync rings comes back here, the house is being kept already.
    fn take_turn_to_keep_house(&self) -> Result<(), Error> {
        let Some(_turn) = self.turn_to_keep_house.take(true) else { return Ok(()) };
        self.refuse_closed()?;
        if self.retire_what_is_over().is_err() {
            // Full, poisoned or closed: what was to be given up stays, and who writes next is told. Damaged: who
            // listens is.
        }
        // When that fails nothing was promised to anyone: who needs the room tries again, and is told.
        let prepared = self.log.prepare_successor(&self.commit);
        // One at a time, since each takes the reading of a segment, and others may wait for room meanwhile.
        let leave_one = || self.log.leave_hint(false, &self.seed, &self.commit);
        if leave_one() && !self.helper.call() {
            while leave_one() {}
        }
        prepared
    }

    fn retire_what_is_over(&self) -> Result<(), Error> {
        if let Some(end) = self.log.rolled_end() {
            self.sync_to(end)?;
        }
        // What a round copies, it does not look at again.
        let newest_number = self.log.newest_number();
        while self.log.retirable(self.now_ms(), &self.commit).is_some_and(|over| over.number < newest_number) {
            // A record is appended first and noted at its segment afterwards, both under its shard lock: after this
            // pass nothing is left to be noted there, since the segment is no longer the tail.
            self.pass_through_shards();
            let Some(over) = self.log.retirable(self.now_ms(), &self.commit) else { break };
            if over.unfinished {
                self.carry_forward(over.number).inspect_err(|why| self.news.note_kept(over.number, why))?;
            }
            // Whatever took the place of an unfinished record in it is durable before its file can be given away.
            self.pass_through_shards();
            self.sync_to(self.log.superseded_end(over.number))?;
            self.log.retire(over.number, || self.pass_through_shards());
            self.sweep();
        }
        Ok(())
    }

    /// Copies the unfinished keys of a segment that is otherwise past its use to the tail of the log. Those whose
    /// retention has passed, and that no guard holds, are forgotten.
    fn carry_forward(&self, number: u64) -> Result<(), Error> {
        let oldest_live = self.log.oldest_live();
        for shard in &self.shards {
            // An opening looks at each unfinished record itself: one that is known from a hint alone is finished, and
            // past its use here. It is not read, so that its damage stops nothing.
            let is_due = |record: &Candidate| record.address.segment == number && !record.hinted;
            let due: Vec<_> = shard.lock().index.candidates(oldest_live).filter(is_due).collect();
            for Candidate { address, .. } in due {
                loop {
                    match self.carry_record(&mut shard.lock(), address, oldest_live) {
                        Ok(()) => break,
                        Err(NotAppended::NoRoom) => {}
                        Err(NotAppended::Failed(error)) => return Err(error),
                    }
                    self.log.prepare_successor(&self.commit)?;
                }
            }
        }
        Ok(())
    }

    /// Copies the record at `address` to the tail, if it is the latest of an unfinished key.
    fn carry_record(&self, shard: &mut Shard, address: Address, oldest_live: u64) -> Result<(), NotAppended> {
        self.refuse_closed()?;
        let live = self.log.live().read();
        let life = Arc::clone(live.get(address.segment).expect("only who carries forward retires"));
        drop(live);
        // Nothing is copied unchecked.
        let (record, bytes) = life.checked_record(address.offset)?;
        let hash = self.seed.hash(record.scope, record.id);
        let latest = shard.index.find(hash, oldest_live, |other| other.address == address);
        let unfinished = matches!(record.kind, StateKind::Reserved | StateKind::Interrupted);
        let (Some(found), true) = (latest, unfinished) else {
            return Ok(());
        };
        let guard = shard.held.get(&record.token).and_then(|held| held.guard);
        if state::apply(&record).observed(self.now_ms(), guard) == State::Absent {
            shard.index.remove(found);
            life.note_superseded(bytes, 0);
            shard.counts.expired_unresolved += 1;
            return Ok(());
        }
        shard.draft.refill(&record);
        let copy = self.log.append(&mut shard.draft, &self.commit)?;
        shard.index.publish(hash, oldest_live, Some(found), copy.address);
        life.note_superseded(bytes, copy.end);
        if let Some(held) = shard.held.get_mut(&record.token).filter(|held| held.guard.is_some()) {
            held.address = Some(copy.address);
        }
        if let Some(life) = self.log.live().read().get(copy.address.segment) {
            // A guard keeps its key beyond its time: that is looked at again a retention later.
            let until_ms = self.now_ms().saturating_add(record.retention_ms);
            let until_ms = if guard.is_some() { until_ms.max(record.kept_until_ms) } else { record.kept_until_ms };
            life.note_unfinished(until_ms, bytes);
        }
        Ok(())
    }

    /// After this, nobody looks at a record of a segment that was dead before it.
    pub(super) fn pass_through_shards(&self) {
        for shard in &self.shards {
            drop(shard.lock());
        }
    }

    /// Sweeps the index in small steps, several times a window, so that misses stay short and no segment number comes
    /// back while a slot still names its earlier bearer.
    fn sweep(&self) {
        let oldest_live = self.log.oldest_live();
        let span = self.log.segments() / SWEEPS_A_WINDOW;
        if oldest_live - self.swept_at.load(Ordering::Relaxed) <= span {
            return;
        }
        for shard in &self.shards {
            while !shard.lock().index.sweep_some(oldest_live, SWEEP_BUCKETS) {}
        }
        self.swept_at.store(oldest_live, Ordering::Relaxed);
    }
}
