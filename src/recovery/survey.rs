//! What the directory holds, and whether it may be opened: everything before the first write.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::clock::TimeMark;
use crate::error::{Error, ErrorKind};
use crate::format::{self, Entry, Role, SegmentHeader, StoreFile};
use crate::hint;
use crate::index::{self, IndexShard};
use crate::key::HashSeed;
use crate::log::{Live, Spare};
use crate::retention::SEGMENT_BYTES_STEP;
use crate::scan::{Reading, Scan, Seal};
use crate::segment::{Found, Life};
use crate::stats::OpenReport;
use crate::sync::{Ordering, UnmodelledMutex as Mutex};

use super::table::Table;
use super::{FOLD_PART, Reader, STORE_FILE, unsupported};

/// A segment of the live chain, with what was found in it.
#[derive(Clone, Debug)]
pub(super) struct Link {
    pub(super) life: Arc<Life>,
    pub(super) header: SegmentHeader,
    pub(super) scan: Scan,
}

/// What was read of a segment before its turn: its seal decides how others are read.
#[derive(Debug)]
pub(super) struct Look {
    pub(super) scan: Scan,
    /// `None`: there were too many to keep.
    pub(super) entries: Option<Vec<Entry>>,
}

/// No store comes to so many segments, so far, or so late: a header that says so was made up.
const NUMBER_MAX: u64 = 1 << 56;
const LSN_MAX: u64 = 1 << 62;
const TIME_MS_MAX: u64 = format::MS_MAX / 2;

/// So many entries are kept from looks at segments; what is beyond is read again.
const ENTRIES_KEPT_MAX: usize = 1 << 20;

/// Everything that opening a store is decided upon.
#[derive(Debug)]
pub(super) struct Survey {
    /// The live chain, oldest first.
    pub(super) chain: Vec<Link>,
    /// What was read already, by segment number.
    pub(super) looks: BTreeMap<u64, Look>,
    pub(super) seed: HashSeed,
    /// Intervals of the log that a `Sealed` has replaced.
    pub(super) replaced: Intervals,
    /// Files that can get a new life at once: nothing in them ever counted.
    pub(super) spares: Vec<Spare>,
    /// Files that were given up by what may stand in the page cache alone: they wait until this recovery is sealed.
    pub(super) spares_late: Vec<Spare>,
    pub(super) next_index: u32,
    pub(super) newest_number: u64,
    /// The LSN beyond the range of every header seen.
    pub(super) next_first_lsn: u64,
    /// The oldest number that any header names as alive.
    pub(super) oldest_live: u64,
    /// The largest LSN that any header or record says was synced.
    pub(super) synced_lsn: u64,
    /// The latest time that any header or end mark tells; where two tell the same, the one that was written later: it may
    /// be of another boot, or another reading of the wall clock.
    pub(super) time: Option<TimeMark>,
    time_number: u64,
    /// The newest segment of each run.
    newest_of_run: BTreeMap<[u8; 16], u64>,
    pub(super) header_copies_bad: u64,
}

impl Survey {
    /// Looks at the headers of all segments, and at the records of those on which it depends how the others are read.
    pub(super) fn take(store: &StoreFile, files: Vec<Found>) -> Result<Self, Error> {
        let lived = files.iter().filter(|found| found.header.is_some()).map(|found| found.index);
        let mut survey = Survey {
            chain: Vec::new(),
            looks: BTreeMap::new(),
            seed: HashSeed(store.hash_seed),
            replaced: Intervals::default(),
            spares: Vec::new(),
            spares_late: Vec::new(),
            next_index: lived.max().unwrap_or(0).wrapping_add(1),
            newest_number: 0,
            next_first_lsn: 0,
            oldest_live: 0,
            synced_lsn: 0,
            time: None,
            time_number: 0,
            newest_of_run: BTreeMap::new(),
            header_copies_bad: 0,
        };
        let mut lives = survey.take_headers(store, files)?;
        let mut buffer = Vec::new();
        survey.drop_void(&mut lives, store.run_number, &mut buffer)?;
        let rest = survey.link(lives)?;
        let oldest = survey.chain.first().map_or(survey.newest_number, |link| link.header.number);
        if survey.newest_number - oldest >= index::SEGMENT_SPAN_MAX {
            let reason = format!("segments {oldest} and {} cannot belong to one store", survey.newest_number);
            return Err(Error::corrupt(STORE_FILE, 0, &reason));
        }
        survey.look_ahead(store.run_number, &mut buffer)?;
        survey.sort_out(&rest, store.run_number);
        if survey.chain.last().is_none_or(|link| link.header.number < store.run_number) {
            let reason = format!("segment {}, with which the latest run began, is missing", store.run_number);
            return Err(Error::corrupt(STORE_FILE, 0, &reason));
        }
        Ok(survey)
    }

    /// The segments that have a sound header, by number.
    fn take_headers(&mut self, store: &StoreFile, files: Vec<Found>) -> Result<Vec<Link>, Error> {
        let mut lives = Vec::new();
        for found in files {
            match found.header {
                Some(header) if header.store_id != store.store_id => {
                    let message = format!("{} belongs to another store", found.name);
                    return Err(Error::new(ErrorKind::ForeignDirectory, message));
                }
                Some(header) if !is_of_a_log(&header) => {
                    return Err(Error::corrupt(&found.name, 0, "its header names a place that no log comes to"));
                }
                Some(header) => {
                    self.note_header(&found, &header);
                    let life = Arc::new(Life::new(found.name, &header, found.data));
                    lives.push(Link { life, header, scan: Scan::default() });
                }
                None => match found.newer {
                    Some(version) => return Err(unsupported(&found.name, version)),
                    // A file that a crash left before its first header was durable, or that was never one.
                    None if found.never_lived() => self.spares.extend(spare(&found.name, found.data.len())),
                    // Nothing that was acknowledged can be in it: a segment that holds such is named by a durable
                    // record, or by the store file, and would be missed. So it is not ours to touch.
                    None => self.header_copies_bad += u64::from(found.copies_bad),
                },
            }
        }
        lives.sort_by_key(|link| link.header.number);
        let twice =
            lives.iter().zip(lives.iter().skip(1)).find(|(one, other)| one.header.number == other.header.number);
        if let Some((_, twice)) = twice {
            return Err(Error::corrupt(&twice.life.name, 0, "another file carries the same segment number"));
        }
        Ok(lives)
    }

    fn note_header(&mut self, found: &Found, header: &SegmentHeader) {
        self.newest_number = self.newest_number.max(header.number);
        self.next_first_lsn = self.next_first_lsn.max(header.first_lsn.saturating_add(header.segment_bytes));
        self.oldest_live = self.oldest_live.max(header.oldest_live);
        self.synced_lsn = self.synced_lsn.max(header.synced_lsn);
        self.header_copies_bad += u64::from(found.copies_bad);
        let newest = self.newest_of_run.entry(header.run_id).or_default();
        *newest = header.number.max(*newest);
        self.note_time(header.number, header.time);
    }

    fn note_time(&mut self, number: u64, time: TimeMark) {
        let later = (time.store_ms, number);
        if self.time.as_ref().is_none_or(|known| (known.store_ms, self.time_number) <= later) {
            (self.time, self.time_number) = (Some(time), number);
        }
    }

    /// Reads a segment before its turn. Says where its records are.
    fn look(&mut self, link: &Link, buffer: &mut Vec<u8>) -> Result<Vec<u32>, Error> {
        let reading = Reading::of(&link.life, buffer)?;
        let kept: usize = self.looks.values().flat_map(|look| &look.entries).map(Vec::len).sum();
        let entries = (kept + reading.states.len() <= ENTRIES_KEPT_MAX).then(|| reading.entries(&self.seed));
        self.looks.insert(link.header.number, Look { scan: reading.scan, entries });
        Ok(reading.states)
    }

    /// Gives up the recoveries at the top that did not come to their `Sealed`: no answer ever rested on them.
    fn drop_void(&mut self, lives: &mut Vec<Link>, run_number: u64, buffer: &mut Vec<u8>) -> Result<(), Error> {
        while let Some(top) = lives.last() {
            if top.header.role != Role::Recovery {
                return Ok(());
            }
            let run_id = top.header.run_id;
            let of_run = |link: &&Link| link.header.run_id == run_id && link.header.role == Role::Recovery;
            let count = lives.iter().rev().take_while(of_run).count();
            let group = lives.split_off(lives.len() - count);
            let mut states = Vec::new();
            for link in &group {
                states.push(self.look(link, buffer)?);
            }
            let looks: Vec<_> = group.iter().filter_map(|link| self.looks.get(&link.header.number)).collect();
            // A seal that the store file names was durable. It need not find its copies any more: the oldest may have
            // been given up since.
            let published = group.iter().any(|link| link.header.number == run_number);
            let seal = looks.iter().find_map(|look| look.scan.sealed.as_ref());
            let parts = group.iter().map(|link| &*link.life).zip(&states);
            let whole = match seal {
                None => false,
                Some(seal) => published || is_whole(seal, parts)?,
            };
            if whole {
                lives.extend(group);
                return Ok(());
            }
            let first_lsn = group.first().map_or(0, |link| link.header.first_lsn);
            let worked = looks.iter().any(|look| look.scan.synced_lsn > first_lsn || look.scan.closed.is_some());
            if let (true, Some(first)) = (worked || published, group.first()) {
                let reason = "the seal of the recovery that ended here is missing";
                return Err(Error::corrupt(&first.life.name, format::DATA_START, reason));
            }
            for link in group {
                self.looks.remove(&link.header.number);
                self.spares.extend(spare(&link.life.name, link.life.data.len()));
            }
        }
        Ok(())
    }

    /// Follows `previous` from the newest segment back; gives back what is not met.
    fn link(&mut self, mut lives: Vec<Link>) -> Result<Vec<Link>, Error> {
        let Some(newest) = lives.last() else {
            return Err(Error::corrupt(STORE_FILE, 0, "no segment lies beside it"));
        };
        let mut named_by = newest.life.name.clone();
        let mut number = newest.header.number;
        while number != 0 && number >= self.oldest_live {
            let Some(at) = lives.iter().rposition(|link| link.header.number == number) else {
                let reason = format!("it names segment {number}, which is missing");
                return Err(Error::corrupt(&named_by, 0, &reason));
            };
            let link = lives.remove(at);
            named_by.clone_from(&link.life.name);
            number = link.header.previous;
            self.chain.push(link);
        }
        self.chain.reverse();
        for (before, link) in self.chain.iter().zip(self.chain.iter().skip(1)) {
            if link.header.first_lsn < before.life.end_lsn() {
                let reason = "its header names a place in the log that another segment has";
                return Err(Error::corrupt(&link.life.name, 0, reason));
            }
        }
        Ok(lives)
    }

    /// Reads what decides how the rest is read: the end of the log, which tells how far it was synced, and where each
    /// run began, which tells what it has replaced.
    fn look_ahead(&mut self, run_number: u64, buffer: &mut Vec<u8>) -> Result<(), Error> {
        let newest = self.chain.last().map(|link| link.header.number);
        let ahead = |link: &&Link| Some(link.header.number) == newest || link.header.role == Role::Recovery;
        for link in self.chain.iter().filter(ahead).cloned().collect::<Vec<_>>() {
            if !self.looks.contains_key(&link.header.number) {
                self.look(&link, buffer)?;
            }
        }
        self.drop_unused(buffer)?;
        let newest = self.chain.last().map_or(0, |link| link.header.number);
        let looks = std::mem::take(&mut self.looks);
        for (number, look) in &looks {
            self.synced_lsn = self.synced_lsn.max(look.scan.synced_lsn);
            let Some(link) = self.chain.iter().find(|link| link.header.number == *number).cloned() else { continue };
            if let Some((_, time)) = look.scan.closed.filter(|(_, time)| time.store_ms <= TIME_MS_MAX) {
                // The end mark of a run is later than every header that it wrote.
                let newest_of_run = self.newest_of_run.get(&link.header.run_id).copied();
                self.note_time(newest_of_run.unwrap_or(*number), time);
            }
            let Some(seal) = &look.scan.sealed else { continue };
            // The store file names a run, and the log goes on behind its recovery, only once the seal is durable.
            if *number <= run_number || *number < newest {
                self.synced_lsn = self.synced_lsn.max(seal.lsn);
            }
            let of_run = |other: &&Link| other.header.run_id == link.header.run_id;
            let began_lsn = self.chain.iter().find(of_run).map_or(0, |first| first.header.first_lsn);
            for (from, to) in &seal.replaced {
                if *to > began_lsn {
                    let reason = "it replaces what was written after it";
                    return Err(Error::corrupt(&link.life.name, seal.lsn - link.header.first_lsn, reason));
                }
                self.replaced.add(*from, *to);
            }
        }
        self.looks = looks;
        Ok(())
    }

    /// A successor that was made ready and that the log never came to is a spare at once.
    fn drop_unused(&mut self, buffer: &mut Vec<u8>) -> Result<(), Error> {
        let [.., before, last] = self.chain.as_slice() else { return Ok(()) };
        let (before, last) = (before.clone(), last.clone());
        let number = last.header.number;
        if last.header.role != Role::Rolled || !self.scan_of(number).is_some_and(Scan::is_empty) {
            return Ok(());
        }
        if !self.looks.contains_key(&before.header.number) {
            self.look(&before, buffer)?;
        }
        let next = self.scan_of(before.header.number).and_then(|scan| scan.next);
        if next.is_none_or(|(_, next)| next.number != number) {
            self.looks.remove(&number);
            self.spares.extend(spare(&last.life.name, last.life.data.len()));
            self.chain.pop();
        }
        Ok(())
    }

    fn scan_of(&self, number: u64) -> Option<&Scan> {
        self.looks.get(&number).map(|look| &look.scan)
    }

    /// Says of the segments outside of the chain when their files can be used again.
    fn sort_out(&mut self, rest: &[Link], run_number: u64) {
        // The store file names a run only once its seal is durable, and with it what that run gave up. What a later
        // seal gave up waits.
        let later_seal = |(number, look): (&u64, &Look)| *number > run_number && look.scan.sealed.is_some();
        let durable = !self.looks.iter().any(later_seal);
        for Link { life, header, .. } in rest {
            let at_once = durable && header.number < run_number;
            let spares = if at_once { &mut self.spares } else { &mut self.spares_late };
            spares.extend(spare(&life.name, life.data.len()));
        }
    }

    /// Bytes of the live chain.
    pub(super) fn bytes(&self) -> u64 {
        self.chain.iter().map(|link| link.life.bytes).sum()
    }

    /// A table of the records of the chain, empty as yet.
    pub(super) fn table(&self, shards: Vec<IndexShard>, now_ms: u64) -> Table {
        let oldest_live = self.chain.first().map_or(1, |link| link.header.number).max(self.oldest_live);
        let live = Live::new(self.chain.iter().map(|link| Arc::clone(&link.life)));
        Table::new(shards, self.seed, live, oldest_live, now_ms)
    }

    /// Reads every segment that was not read yet, or its hint, and puts all records into `table`: on several threads, if
    /// there is much to read. The hint of a segment counts only below what is known to be synced: there the segment was
    /// on the disk once, whatever became of its hint.
    pub(super) fn read(&mut self, table: &Table, reader: &Reader<'_>) -> Result<(), Error> {
        let (replaced, synced_lsn) = (&self.replaced, self.synced_lsn);
        let mut looks = std::mem::take(&mut self.looks);
        let threads = reader.threads(self.bytes()).min(self.chain.len());
        // The newest first: of a key that was written again and again, the first to come is then the latest.
        let turns = self.chain.iter_mut().rev().map(|link| {
            let look = looks.remove(&link.header.number);
            (link, look)
        });
        let turns: Mutex<Vec<_>> = Mutex::new(turns.rev().collect());
        let read_all = || -> Result<(), Error> {
            let mut buffers = Buffers::default();
            loop {
                let Some((link, look)) = turns.lock().pop() else { return Ok(()) };
                let may_be_hinted = link.life.end_lsn() <= synced_lsn;
                link.scan = read_one(&link.life, look, may_be_hinted, table, replaced, reader, &mut buffers)?;
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
            self.synced_lsn = self.synced_lsn.max(link.scan.synced_lsn);
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
                .find(|hole| hole.from_lsn < self.synced_lsn && !self.replaced.contains(hole.from_lsn));
            if let Some(hole) = damaged {
                return Err(Error::corrupt(&link.life.name, hole.offset, &hole.bad.to_string()));
            }
            if let Some((lsn, next)) = link.scan.next {
                let cut = self.replaced.contains(lsn) || self.replaced.contains(next.first_lsn);
                let successor = self.chain.iter().find(|link| link.header.number == next.number);
                let present = successor
                    .is_some_and(|link| (link.header.salt, link.header.first_lsn) == (next.salt, next.first_lsn));
                if !cut && !present {
                    let reason = format!("its successor, segment {}, is missing", next.number);
                    return Err(Error::corrupt(&link.life.name, lsn - link.header.first_lsn, &reason));
                }
            }
        }
        let mut rest = self.chain.as_slice();
        while let Some(first) = rest.first() {
            let of_run = |link: &&Link| link.header.run_id == first.header.run_id && link.header.role == Role::Recovery;
            let count = rest.iter().take_while(of_run).count();
            let (group, behind) = rest.split_at(count.max(1));
            let sealed = group.iter().any(|link| link.scan.sealed.is_some());
            if count > 0 && !sealed && !self.replaced.contains(first.header.first_lsn) {
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
            && !self
                .chain
                .iter()
                .any(|link| link.scan.holes.iter().any(|hole| hole.torn && !self.replaced.contains(hole.from_lsn)))
    }

    /// From where on the log is copied: the known synced LSN, or the first of the nearly empty segments at its end.
    pub(super) fn cut_lsn(&self) -> u64 {
        let oldest = self.chain.first().map_or((0, 0), |link| (link.header.number, link.header.first_lsn));
        if self.newest_number - oldest.0 >= index::SEGMENT_SPAN_MAX / 2 {
            // So many openings since the oldest segment began that its number would soon be too far back.
            return oldest.1;
        }
        let mut cut_lsn = self.synced_lsn;
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
        let torn = holes.filter(|hole| hole.torn && !self.replaced.contains(hole.from_lsn));
        OpenReport {
            clean: self.is_clean(),
            segments: self.chain.len() as u64,
            records: self.chain.iter().map(|link| link.scan.records).sum(),
            torn: torn.count() as u64,
            header_copies_bad: self.header_copies_bad,
            ..OpenReport::default()
        }
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
    look: Option<Look>,
    may_be_hinted: bool,
    table: &Table,
    replaced: &Intervals,
    reader: &Reader<'_>,
    Buffers { segment, entries: sorted }: &mut Buffers,
) -> Result<Scan, Error> {
    let (look, entries) = look.map_or((None, None), |look| (Some(look.scan), look.entries));
    if let Some(entries) = entries {
        table.apply(life, entries.into_iter(), false, replaced, sorted)?;
        return Ok(look.unwrap_or_default());
    }
    let hint = if may_be_hinted { hint::read(reader.storage, life) } else { None };
    if let Some((scan, entries)) = hint.as_ref().and_then(|bytes| hint::of(bytes, reader.store_id, life)) {
        table.apply(life, entries, true, replaced, sorted)?;
        reader.hints.fetch_add(1, Ordering::Relaxed);
        return Ok(look.unwrap_or(scan));
    }
    let reading = Reading::of(life, segment)?;
    table.apply(life, reading.entries(table.seed()).into_iter(), false, replaced, sorted)?;
    Ok(reading.scan)
}

/// Whether a log can have come so far, in any measure.
fn is_of_a_log(header: &SegmentHeader) -> bool {
    header.number <= NUMBER_MAX
        && header.first_lsn <= LSN_MAX
        && header.segment_bytes <= LSN_MAX
        && header.synced_lsn <= LSN_MAX
        && header.time.store_ms <= TIME_MS_MAX
}

/// The file of a segment that no longer counts.
fn spare(name: &str, bytes: u64) -> Option<Spare> {
    let fits =
        bytes > format::DATA_START && bytes <= index::OFFSET_END.into() && bytes.is_multiple_of(SEGMENT_BYTES_STEP);
    fits.then(|| Spare { name: name.to_owned(), bytes })
}

/// Whether the segments of one recovery, with the offsets of their records, hold all the copies that its `Sealed` counts.
fn is_whole<'a>(seal: &Seal, group: impl Iterator<Item = (&'a Life, &'a Vec<u32>)>) -> Result<bool, Error> {
    let mut count = 0;
    let mut copies = Copies::default();
    for (life, states) in group {
        for offset in states.iter().take_while(|offset| life.lsn(**offset) <= seal.lsn) {
            copies.add(life.checked_record(*offset).map(|_| life.record(*offset))?);
            count += 1;
        }
    }
    Ok(count == seal.count && copies.digest() == seal.digest)
}

/// The digest that a `Sealed` carries: BLAKE3 of the copies' bytes in the order of the log, its first half.
#[derive(Debug, Default)]
pub(super) struct Copies(blake3::Hasher);

impl Copies {
    pub(super) fn add(&mut self, record: &[u8]) {
        self.0.update(record);
    }

    pub(super) fn digest(&self) -> [u8; 16] {
        let mut digest = [0; 16];
        self.0.finalize_xof().fill(&mut digest);
        digest
    }
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
