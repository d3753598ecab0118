//! The index while it is built: records come in any order, from several threads, and of each key the latest one stays.

use crossbeam::utils::CachePadded;

use super::survey::Intervals;
use crate::error::Error;
use crate::format::{Entry, StateKind, StateRecord};
use crate::index::{self, Address, Candidate, IndexShard};
use crate::key::HashSeed;
use crate::log::Live;
use crate::segment::Life;
use crate::state::{self, State};
use crate::sync::UnmodelledMutex as Mutex;

/// The index as it is being built, and the segments that its addresses lie in.
#[derive(Debug)]
pub(super) struct Table {
    parts: Vec<CachePadded<Mutex<Part>>>,
    seed: HashSeed,
    live: Live,
    oldest_live: u64,
    now_ms: u64,
}

/// One shard of the index, with what its keys come to.
#[derive(Debug)]
struct Part {
    index: IndexShard,
    known: Known,
}

/// How many keys are remembered, and how many of them are interrupted.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Known {
    pub(super) keys: u64,
    pub(super) interrupted: u64,
}

impl Table {
    pub(super) fn new(shards: Vec<IndexShard>, seed: HashSeed, live: Live, oldest_live: u64, now_ms: u64) -> Self {
        let part = |index| CachePadded::new(Mutex::new(Part { index, known: Known::default() }));
        Self { parts: shards.into_iter().map(part).collect(), seed, live, oldest_live, now_ms }
    }

    pub(super) fn seed(&self) -> &HashSeed {
        &self.seed
    }

    /// Makes each of these records of `life` the latest of its key, unless a later one is known already. `hinted`:
    /// nobody has checked them. What `replaced` covers is left out.
    ///
    /// # Errors
    ///
    /// `Corrupt`, when a record that had to be looked at is damaged.
    pub(super) fn apply(
        &self,
        life: &Life,
        entries: impl ExactSizeIterator<Item = Entry> + Clone,
        hinted: bool,
        replaced: &Intervals,
        buffer: &mut Vec<Entry>,
    ) -> Result<(), Error> {
        let (mut sorted, ends) = self.sort(entries, buffer);
        let mut begin = 0;
        for (part, end) in self.parts.iter().zip(ends) {
            let (of_part, rest) = sorted.split_at(end - begin);
            (sorted, begin) = (rest, end);
            if of_part.is_empty() {
                continue;
            }
            let mut part = part.lock();
            for entry in of_part {
                if !replaced.contains(life.lsn(entry.offset)) {
                    self.publish(&mut part, life, entry, hinted)?;
                }
            }
        }
        Ok(())
    }

    /// The entries by shard, so that one lock, and one part of the memory, comes after the other; and where those of
    /// each shard end.
    fn sort<'a>(
        &self,
        entries: impl ExactSizeIterator<Item = Entry> + Clone,
        buffer: &'a mut Vec<Entry>,
    ) -> (&'a [Entry], Vec<usize>) {
        const NOTHING: Entry = Entry { hash: 0, kept_until_ms: 0, offset: 0, kind: StateKind::Released };
        let part_of = |entry: &Entry| shard_of(entry.hash, self.parts.len());
        let mut ends = vec![0_usize; self.parts.len() + 1];
        for entry in entries.clone() {
            *ends.get_mut(part_of(&entry) + 1).expect("a shard's number is below the number of shards") += 1;
        }
        let mut sum = 0;
        for end in &mut ends {
            sum += *end;
            *end = sum;
        }
        if buffer.len() < sum {
            buffer.resize(sum, NOTHING);
        }
        for entry in entries {
            let end = ends.get_mut(part_of(&entry)).expect("a shard's number is below the number of shards");
            *buffer.get_mut(*end).expect("each entry has its place") = entry;
            *end += 1;
        }
        (buffer.get(..sum).unwrap_or_default(), ends)
    }

    fn publish(&self, part: &mut Part, life: &Life, entry: &Entry, hinted: bool) -> Result<(), Error> {
        let own = Candidate { address: Address { segment: life.number, offset: entry.offset }, hinted };
        let mut damage = None;
        let found = part.index.find(entry.hash, self.oldest_live, |other| {
            let same = self.read(other).and_then(|(other, _)| {
                let (own, _) = self.read(own)?;
                Ok(own.scope == other.scope && own.id == other.id)
            });
            same.unwrap_or_else(|error| {
                damage = Some(error);
                false
            })
        });
        if let Some(damage) = damage {
            return Err(damage);
        }
        if let Some(found) = found {
            if is_later(found.address, own.address) {
                return Ok(());
            }
            let older = Candidate { address: found.address, hinted: found.hinted };
            let (record, bytes) = self.read(older)?;
            self.forget(&mut part.known, found.address, &record, bytes);
        }
        if is_unfinished(entry.kind) {
            let (record, bytes) = self.read(own)?;
            self.note(&mut part.known, life, &record, bytes);
            part.index.publish(entry.hash, self.oldest_live, found, own.address);
            return Ok(());
        }
        life.note_finished(entry.kept_until_ms);
        part.known.keys += u64::from(entry.kind == StateKind::Done && self.now_ms < entry.kept_until_ms);
        if hinted {
            part.index.publish_hinted(entry.hash, self.oldest_live, found, own.address);
        } else {
            part.index.publish(entry.hash, self.oldest_live, found, own.address);
        }
        Ok(())
    }

    fn read(&self, Candidate { address, hinted }: Candidate) -> Result<(StateRecord<'_>, u64), Error> {
        let life = self.live.get(address.segment).expect("an address that was read lies in the chain");
        if hinted { life.checked_record(address.offset) } else { life.state_record(address.offset) }
    }

    /// A record becomes the latest of its key.
    fn note(&self, known: &mut Known, life: &Life, record: &StateRecord<'_>, bytes: u64) {
        if is_unfinished(record.kind) {
            life.note_unfinished(record.kept_until_ms, bytes);
        } else {
            life.note_finished(record.kept_until_ms);
        }
        let (keys, interrupted) = self.counts_as(record);
        known.keys += keys;
        known.interrupted += interrupted;
    }

    /// A record is the latest of its key no longer.
    fn forget(&self, known: &mut Known, address: Address, record: &StateRecord<'_>, bytes: u64) {
        if let (true, Some(life)) = (is_unfinished(record.kind), self.live.get(address.segment)) {
            // What has taken its place is durable before the first answer.
            life.note_superseded(bytes, 0);
        }
        let (keys, interrupted) = self.counts_as(record);
        // What a hint that was made up has told of the record need not be what it says.
        known.keys = known.keys.saturating_sub(keys);
        known.interrupted = known.interrupted.saturating_sub(interrupted);
    }

    /// Whether the key of this record is remembered, and whether it is interrupted.
    fn counts_as(&self, record: &StateRecord<'_>) -> (u64, u64) {
        match state::apply(record).observed(self.now_ms, None) {
            State::Absent => (0, 0),
            State::InFlight(_) | State::Done(_) => (1, 0),
            State::Interrupted(..) => (1, 1),
        }
    }

    fn part(&self, record: &StateRecord<'_>) -> (&Mutex<Part>, u64) {
        let hash = self.seed.hash(record.scope, record.id);
        let part = self.parts.get(shard_of(hash, self.parts.len()));
        (part.expect("a shard's number is below the number of shards"), hash)
    }

    pub(super) fn is_latest(&self, address: Address, record: &StateRecord<'_>) -> bool {
        let (part, hash) = self.part(record);
        part.lock().index.find(hash, self.oldest_live, |other| other.address == address).is_some()
    }

    /// Puts `copy`, which lies in `life`, in the place of the record at `address`, which must be the latest of its key.
    pub(super) fn replace(&self, address: Address, record: &StateRecord<'_>, bytes: u64, copy: Address, life: &Life) {
        let (part, hash) = self.part(record);
        let Part { index, known } = &mut *part.lock();
        let found = index.find(hash, self.oldest_live, |other| other.address == address);
        index.publish(hash, self.oldest_live, found, copy);
        self.forget(known, address, record, bytes);
        self.note(known, life, record, bytes);
    }

    /// Takes the record at `address`, the latest of its key, out of the index.
    pub(super) fn remove(&self, address: Address, record: &StateRecord<'_>, bytes: u64) {
        let (part, hash) = self.part(record);
        let Part { index, known } = &mut *part.lock();
        if let Some(found) = index.find(hash, self.oldest_live, |other| other.address == address) {
            index.remove(found);
            self.forget(known, address, record, bytes);
        }
    }

    /// Lets go of all segments.
    pub(super) fn let_go(&mut self) {
        self.live = Live::default();
    }

    /// The shards, and what all their keys come to.
    pub(super) fn finish(self) -> (Vec<IndexShard>, Known) {
        let mut all = Known::default();
        let shard = |part: CachePadded<Mutex<Part>>| {
            let Part { index, known } = part.into_inner().into_inner();
            all.keys += known.keys;
            all.interrupted += known.interrupted;
            index
        };
        let shards = self.parts.into_iter().map(shard).collect();
        (shards, all)
    }
}

fn is_unfinished(kind: StateKind) -> bool {
    matches!(kind, StateKind::Reserved | StateKind::Interrupted)
}

fn is_later(one: Address, other: Address) -> bool {
    (one.segment, one.offset) > (other.segment, other.offset)
}

/// Which shard a key's hash belongs to; `shard_count` is a power of two.
pub(crate) fn shard_of(hash: u64, shard_count: usize) -> usize {
    index::shard_bits(hash) & (shard_count - 1)
}
