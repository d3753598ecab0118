//! What the directory holds, and whether it may be opened: everything before the first write.
//!
//! One thing leads to the next: the headers of all files ([`Heads`]) give the chain, what is read of it ahead
//! ([`Ahead`]) gives what is known of the whole log ([`Known`]), and only then is the rest read, and judged.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::Error;
use crate::format::{self, Entry, Role, StoreFile};
use crate::hint;
use crate::index::{self, IndexShard};
use crate::key::HashSeed;
use crate::log::{Live, Spare};
use crate::scan::{Reading, Scan};
use crate::segment::{Found, Life};
use crate::stats::OpenReport;
use crate::sync::{Ordering, UnmodelledMutex as Mutex};

use super::ahead::{Ahead, ReadAhead};
use super::heads::{Heads, LatestTime, Link, TIME_MS_MAX, spare};
use super::table::Table;
use super::{FOLD_PART, Reader, STORE_FILE};

/// Everything that opening a store is decided upon.
#[derive(Debug)]
pub(super) struct Survey {
    pub(super) heads: Heads,
    /// The live chain, oldest first.
    pub(super) chain: Vec<Link>,
    /// What was read already, by segment number.
    ahead: BTreeMap<u64, ReadAhead>,
    pub(super) known: Known,
    seed: HashSeed,
    /// Files that can get a new life at once: nothing in them ever counted.
    pub(super) spares: Vec<Spare>,
    /// Files that were given up by what may stand in the page cache alone: they wait until this recovery is sealed.
    pub(super) spares_late: Vec<Spare>,
}

/// What headers, marks and seals tell of the whole log.
#[derive(Debug)]
pub(super) struct Known {
    /// The largest LSN that any header or record says was synced.
    pub(super) synced_lsn: u64,
    /// The latest time that any header or end mark tells.
    pub(super) time: LatestTime,
    /// Intervals of the log that a `Sealed` has replaced.
    pub(super) replaced: Intervals,
}

impl Survey {
    /// Looks at the headers of all segments, and at the records of those on which it depends how the others are read.
    pub(super) fn take(store: &StoreFile, files: Vec<Found>) -> Result<Self, Error> {
        let seed = HashSeed(store.hash_seed);
        let (mut heads, mut lives) = Heads::read(store, files)?;
        let mut spares = std::mem::take(&mut heads.unlived);
        let mut ahead = Ahead::new(seed);
        spares.extend(ahead.drop_void(&mut lives, store.run_number)?);
        let (mut chain, rest) = heads.link(lives)?;
        spares.extend(ahead.read_what_decides(&mut chain)?);
        let known = Known::of(&heads, &chain, &ahead, store.run_number)?;
        // The store file names a run only once its seal is durable, and with it what that run gave up. What a later
        // seal gave up waits.
        let durable = !ahead.scans().any(|(number, scan)| number > store.run_number && scan.sealed.is_some());
        let (at_once, late): (Vec<_>, Vec<_>) =
            rest.iter().partition(|link| durable && link.header.number < store.run_number);
        spares.extend(at_once.iter().filter_map(|link| spare(&link.life.name, link.life.data.len())));
        let spares_late = late.iter().filter_map(|link| spare(&link.life.name, link.life.data.len())).collect();
        if chain.last().is_none_or(|link| link.header.number < store.run_number) {
            let reason = format!("segment {}, with which the latest run began, is missing", store.run_number);
            return Err(heads.missing(STORE_FILE, 0, &reason));
        }
        Ok(Self { heads, chain, ahead: ahead.into_read(), known, seed, spares, spares_late })
    }

    /// Bytes of the live chain.
    pub(super) fn bytes(&self) -> u64 {
        self.chain.iter().map(|link| link.life.bytes).sum()
    }

    /// A table of the records of the chain, empty as yet.
    pub(super) fn table(&self, shards: Vec<IndexShard>, now_ms: u64) -> Table {
        let oldest_live = self.chain.first().map_or(1, |link| link.header.number).max(self.heads.oldest_live);
        let live = Live::new(self.chain.iter().map(|link| Arc::clone(&link.life)));
        Table::new(shards, self.seed, live, oldest_live, now_ms)
    }

    /// Reads every segment that was not read yet, or its hint, and puts all records into `table`: on several threads,
    /// if there is much to read. The hint of a segment counts only below what is known to be synced: there the segment
    /// was on the disk once, whatever became of its hint.
    pub(super) fn read(&mut self, table: &Table, reader: &Reader<'_>) -> Result<(), Error> {
        let (replaced, synced_lsn) = (&self.known.replaced, self.known.synced_lsn);
        let mut ahead = std::mem::take(&mut self.ahead);
        let threads = reader.threads(self.bytes()).min(self.chain.len());
        // The newest first: of a key that was written again and again, the first to come is then the latest.
        let turns = self.chain.iter_mut().rev().map(|link| {
            let early = ahead.remove(&link.header.number);
            (link, early)
        });
        let turns: Mutex<Vec<_>> = Mutex::new(turns.rev().collect());
        let read_all = || -> Result<(), Error> {
            let mut buffers = Buffers::default();
            loop {
                let Some((link, early)) = turns.lock().pop() else { return Ok(()) };
                let may_be_hinted = link.life.end_lsn() <= synced_lsn;
                link.scan = read_one(&link.life, early, may_be_hinted, table, replaced, reader, &mut buffers)?;
                reader.tell(link.life.bytes)?;
            }
        };
        reader.tell(0)?;
        if threads <= 1 {
            read_all()?;
        } else {
            std::thread::scope(|scope| {
                let others: Vec<_> = (1..threads).map(|_| scope.spawn(read_all)).collect();
                let own = read_all();
                let join = |other: std::thread::ScopedJoinHandle<'_, _>| {
                    other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                };
                others.into_iter().map(join).fold(own, Result::and)
            })?;
        }
        // What lies outside of the chain needs no reading.
        reader.tell(reader.bytes)?;
        for link in &self.chain {
            self.known.synced_lsn = self.known.synced_lsn.max(link.scan.synced_lsn);
        }
        // A hint passes over damage. What is going to be copied, and given up, is judged by its bytes.
        let cut_lsn = self.cut_lsn();
        let mut buffer = Vec::new();
        for link in self.chain.iter_mut().filter(|link| link.scan.hinted && link.life.end_lsn() > cut_lsn) {
            link.scan = Reading::of(&link.life, &mut buffer)?.scan;
        }
        Ok(())
    }

    /// Refuses a store in which something that was on the disk once is not as it was.
    pub(super) fn judge(&self) -> Result<(), Error> {
        for link in &self.chain {
            let damaged = link
                .scan
                .holes
                .iter()
                .find(|hole| hole.from_lsn < self.known.synced_lsn && !self.known.replaced.contains(hole.from_lsn));
            if let Some(hole) = damaged {
                return Err(Error::corrupt(&link.life.name, hole.offset, &hole.bad.to_string()));
            }
            if let Some((lsn, next)) = link.scan.next {
                let cut = self.known.replaced.contains(lsn) || self.known.replaced.contains(next.first_lsn);
                let successor = self.chain.iter().find(|link| link.header.number == next.number);
                let present = successor
                    .is_some_and(|link| (link.header.salt, link.header.first_lsn) == (next.salt, next.first_lsn));
                if !cut && !present {
                    let reason = format!("its successor, segment {}, is missing", next.number);
                    return Err(self.heads.missing(&link.life.name, lsn - link.header.first_lsn, &reason));
                }
            }
        }
        let mut rest = self.chain.as_slice();
        while let Some(first) = rest.first() {
            let of_run = |link: &&Link| link.header.run_id == first.header.run_id && link.header.role == Role::Recovery;
            let count = rest.iter().take_while(of_run).count();
            let (group, behind) = rest.split_at(count.max(1));
            let sealed = group.iter().any(|link| link.scan.sealed.is_some());
            if count > 0 && !sealed && !self.known.replaced.contains(first.header.first_lsn) {
                return Err(Error::corrupt(&first.life.name, format::DATA_START, "the seal of a recovery is missing"));
            }
            rest = behind;
        }
        Ok(())
    }

    /// Whether the last thing that the last run did was to close the store.
    fn is_clean(&self) -> bool {
        let mut above = self.chain.iter().rev().skip_while(|link| link.scan.is_empty());
        let Some(last) = above.next() else { return false };
        last.scan.ends_closed(&last.life)
            && !self.chain.iter().any(|link| {
                link.scan.holes.iter().any(|hole| hole.torn && !self.known.replaced.contains(hole.from_lsn))
            })
    }

    /// From where on the log is copied: the known synced LSN, or the first of the nearly empty segments at its end.
    pub(super) fn cut_lsn(&self) -> u64 {
        let oldest = self.chain.first().map_or((0, 0), |link| (link.header.number, link.header.first_lsn));
        if self.heads.newest_number - oldest.0 >= index::SEGMENT_SPAN_MAX / 2 {
            // So many openings since the oldest segment began that its number would soon be too far back.
            return oldest.1;
        }
        let mut cut_lsn = self.known.synced_lsn;
        let mut links = self.chain.iter().rev().peekable();
        while let Some(link) = links.next() {
            let used = link.scan.end - format::DATA_START;
            let splits = links.peek().is_some_and(|before| {
                before.header.role == Role::Recovery && before.header.run_id == link.header.run_id
            });
            if used.saturating_mul(FOLD_PART) >= link.header.segment_bytes || splits {
                break;
            }
            cut_lsn = cut_lsn.min(link.header.first_lsn);
        }
        cut_lsn
    }

    /// What was found, before anything is written.
    pub(super) fn report(&self) -> OpenReport {
        let holes = self.chain.iter().flat_map(|link| &link.scan.holes);
        let torn = holes.filter(|hole| hole.torn && !self.known.replaced.contains(hole.from_lsn));
        OpenReport {
            clean: self.is_clean(),
            segments: self.chain.len() as u64,
            records: self.chain.iter().map(|link| link.scan.records).sum(),
            torn: torn.count() as u64,
            header_copies_bad: self.heads.copies_bad,
            ..OpenReport::default()
        }
    }
}

impl Known {
    /// Puts together what the headers say and what was read ahead of the chain.
    fn of(heads: &Heads, chain: &[Link], ahead: &Ahead, run_number: u64) -> Result<Self, Error> {
        let mut known = Self { synced_lsn: heads.synced_lsn, time: heads.time.clone(), replaced: Intervals::default() };
        let newest = chain.last().map_or(0, |link| link.header.number);
        for (number, scan) in ahead.scans() {
            known.synced_lsn = known.synced_lsn.max(scan.synced_lsn);
            let Some(link) = chain.iter().find(|link| link.header.number == number) else { continue };
            if let Some((_, time)) = scan.closed.filter(|(_, time)| time.store_ms <= TIME_MS_MAX) {
                // The end mark of a run is later than every header that it wrote.
                let newest_of_run = heads.newest_of_run.get(&link.header.run_id).copied();
                known.time.note(newest_of_run.unwrap_or(number), time);
            }
            let Some(seal) = &scan.sealed else { continue };
            // The store file names a run, and the log goes on behind its recovery, only once the seal is durable.
            if number <= run_number || number < newest {
                known.synced_lsn = known.synced_lsn.max(seal.lsn);
            }
            let of_run = |other: &&Link| other.header.run_id == link.header.run_id;
            let began_lsn = chain.iter().find(of_run).map_or(0, |first| first.header.first_lsn);
            for (from, to) in &seal.replaced {
                if *to > began_lsn {
                    let reason = "it replaces what was written after it";
                    return Err(Error::corrupt(&link.life.name, seal.lsn - link.header.first_lsn, reason));
                }
                known.replaced.add(*from, *to);
            }
        }
        Ok(known)
    }
}

/// What a thread that reads segments uses again and again.
#[derive(Default)]
struct Buffers {
    segment: Vec<u8>,
    entries: Vec<Entry>,
}

/// What one segment comes to: by what was read of it already, by its hint, or by reading it.
fn read_one(
    life: &Life,
    early: Option<ReadAhead>,
    may_be_hinted: bool,
    table: &Table,
    replaced: &Intervals,
    reader: &Reader<'_>,
    Buffers { segment, entries: sorted }: &mut Buffers,
) -> Result<Scan, Error> {
    let (early, entries) = early.map_or((None, None), |early| (Some(early.scan), early.entries));
    if let Some(entries) = entries {
        table.apply(life, entries.into_iter(), false, replaced, sorted)?;
        return Ok(early.unwrap_or_default());
    }
    let hint = if may_be_hinted { hint::read(reader.storage, life) } else { None };
    if let Some((scan, entries)) = hint.as_ref().and_then(|bytes| hint::of(bytes, reader.store_id, table.seed(), life))
    {
        table.apply(life, entries, true, replaced, sorted)?;
        reader.hints.fetch_add(1, Ordering::Relaxed);
        return Ok(early.unwrap_or(scan));
    }
    let reading = Reading::of(life, segment)?;
    table.apply(life, reading.entries(table.seed()).into_iter(), false, replaced, sorted)?;
    Ok(reading.scan)
}

/// Intervals of the log, `from..to` in LSNs: ascending, none empty, none touching another.
#[derive(Clone, Debug, Default)]
pub(super) struct Intervals(Vec<(u64, u64)>);

impl Intervals {
    pub(super) fn add(&mut self, from: u64, to: u64) {
        self.0.push((from, to));
        self.0.retain(|(from, to)| from < to);
        self.0.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::new();
        for (from, to) in self.0.drain(..) {
            match merged.last_mut() {
                Some((_, end)) if from <= *end => *end = (*end).max(to),
                _ => merged.push((from, to)),
            }
        }
        self.0 = merged;
    }

    pub(super) fn contains(&self, lsn: u64) -> bool {
        self.0.iter().any(|(from, to)| (*from..*to).contains(&lsn))
    }

    /// Whether all of `from..to` lies in one interval.
    pub(super) fn covers(&self, from: u64, to: u64) -> bool {
        self.0.iter().any(|(start, end)| *start <= from && to <= *end)
    }

    /// Drops what ends before `lsn`, where no live segment is left; the last interval stays.
    pub(super) fn forget_below(&mut self, lsn: u64) {
        let last = self.0.last().copied();
        self.0.retain(|interval| interval.1 > lsn || Some(*interval) == last);
    }

    pub(super) fn as_slice(&self) -> &[(u64, u64)] {
        &self.0
    }
}
