//! What the directory holds, and whether it may be opened: everything before the first write.

use crate::clock::TimeMark;
use crate::error::{Error, ErrorKind};
use crate::format::{self, Bad, Next, Record, Role, SegmentHeader, StoreFile};
use crate::index;
use crate::log::Spare;
use crate::retention::SEGMENT_BYTES_STEP;
use crate::segment::Found;
use crate::stats::OpenReport;

use super::{FOLD_PART, STORE_FILE, unsupported};

/// A segment of the live chain, with what a scan found in it.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) found: Found,
    pub(super) header: SegmentHeader,
    pub(super) scan: Scan,
}

/// What was read from one segment.
#[derive(Debug, Default)]
pub(super) struct Scan {
    /// Offsets of the records that give a key a state.
    pub(super) states: Vec<u32>,
    /// Where nothing verified, in the order of the log.
    holes: Vec<Hole>,
    next: Option<(u64, Next)>,
    sealed: Option<Seal>,
    /// LSN and time of the end mark.
    closed: Option<(u64, TimeMark)>,
    /// Offset behind the last record that verified.
    end: u64,
    /// The largest LSN that a record here says was synced.
    synced_lsn: u64,
}

#[derive(Debug)]
struct Seal {
    lsn: u64,
    count: u64,
    digest: [u8; 16],
    replaced: Vec<(u64, u64)>,
}

/// Bytes between records that verified, or behind the last one.
#[derive(Clone, Copy, Debug)]
struct Hole {
    from_lsn: u64,
    offset: u64,
    bad: Bad,
    /// Something was written here: a record verified behind the hole, or the head of one inside it.
    torn: bool,
}

impl Scan {
    pub(super) fn run(found: &Found, header: &SegmentHeader) -> Result<Scan, Error> {
        if header.segment_bytes > index::OFFSET_END.into() {
            return Err(too_long(found));
        }
        let bytes = header.segment_bytes.min(found.data.len());
        let mut buffer = vec![0; usize::try_from(bytes).map_err(|_| too_long(found))?];
        let read =
            found.data.read_at(0, &mut buffer).map_err(|error| Error::io(format!("reading {}", found.name), error))?;
        buffer.truncate(read);
        Self::of_bytes(found, header, &buffer)
    }

    fn of_bytes(found: &Found, header: &SegmentHeader, buffer: &[u8]) -> Result<Scan, Error> {
        let mut scan = Scan { end: format::DATA_START, ..Scan::default() };
        let mut hole: Option<Hole> = None;
        let mut offset = format::DATA_START;
        while let Some(bytes) = usize::try_from(offset).ok().and_then(|from| buffer.get(from..)) {
            if bytes.len() < format::HEAD_BYTES {
                break;
            }
            let lsn = header.first_lsn + offset;
            match format::verify(bytes, header.salt, lsn) {
                Ok(seen) => {
                    scan.holes.extend(hole.take().map(|hole| Hole { torn: true, ..hole }));
                    if let Some(behind) = seen.behind {
                        scan.synced_lsn = scan.synced_lsn.max(lsn.saturating_sub(behind));
                    }
                    match seen.record {
                        Record::State(_) => scan.states.push(u32::try_from(offset).map_err(|_| too_long(found))?),
                        Record::Next(next) => scan.next = Some((lsn, next)),
                        Record::Sealed(sealed) => {
                            scan.sealed = Some(Seal {
                                lsn,
                                count: sealed.count,
                                digest: sealed.digest,
                                replaced: sealed.intervals().collect(),
                            });
                        }
                        Record::Closed(closed) => {
                            scan.closed = Some((lsn, closed.time));
                            scan.synced_lsn = scan.synced_lsn.max(lsn);
                        }
                        Record::Pad => {}
                    }
                    offset += seen.len as u64;
                    scan.end = offset;
                    if scan.next.is_some() {
                        return Ok(scan);
                    }
                }
                Err(bad) => {
                    let torn = matches!(bad, Bad::Body | Bad::Malformed);
                    let hole = hole.get_or_insert(Hole { from_lsn: lsn, offset, bad, torn: false });
                    hole.torn |= torn;
                    offset += format::UNIT_BYTES as u64;
                }
            }
        }
        // Room behind an end mark is room that was never used.
        let ended =
            scan.closed.is_some_and(|(lsn, _)| header.first_lsn + scan.end == lsn + format::CLOSED_BYTES as u64);
        if hole.is_none() && offset < header.segment_bytes {
            hole = Some(Hole { from_lsn: header.first_lsn + offset, offset, bad: Bad::Blank, torn: false });
        }
        if !ended {
            scan.holes.extend(hole);
        }
        Ok(scan)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.states.is_empty() && self.next.is_none() && self.closed.is_none() && self.sealed.is_none()
    }
}

fn too_long(found: &Found) -> Error {
    Error::corrupt(&found.name, 0, "its header names an impossible length")
}

/// Everything that opening a store is decided upon.
#[derive(Debug)]
pub(super) struct Survey {
    /// The live chain, oldest first.
    pub(super) chain: Vec<Link>,
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
    pub(super) time: Option<TimeMark>,
    pub(super) header_copies_bad: u64,
}

impl Survey {
    pub(super) fn take(store: &StoreFile, files: Vec<Found>) -> Result<Self, Error> {
        let lived = files.iter().filter(|found| found.header.is_some()).map(|found| found.index);
        let mut survey = Survey {
            chain: Vec::new(),
            replaced: Intervals::default(),
            spares: Vec::new(),
            spares_late: Vec::new(),
            next_index: lived.max().unwrap_or(0).wrapping_add(1),
            newest_number: 0,
            next_first_lsn: 0,
            oldest_live: 0,
            synced_lsn: 0,
            time: None,
            header_copies_bad: 0,
        };
        let mut lives = Vec::new();
        for found in files {
            match found.header {
                Some(header) if header.store_id != store.store_id => {
                    let message = format!("{} belongs to another store", found.name);
                    return Err(Error::new(ErrorKind::ForeignDirectory, message));
                }
                Some(header) => {
                    survey.note_header(&found, &header);
                    lives.push((found, header));
                }
                None => match found.newer {
                    Some(version) => return Err(unsupported(&found.name, version)),
                    // A file that a crash left before its first header was durable, or that was never one.
                    None if found.never_lived() => survey.spares.extend(spare(&found)),
                    // Nothing that was acknowledged can be in it: a segment that holds such is named by a durable
                    // record, or by the store file, and would be missed. So it is not ours to touch.
                    None => survey.header_copies_bad += u64::from(found.copies_bad),
                },
            }
        }
        lives.sort_by_key(|(_, header)| header.number);
        if let Some(twice) = lives.windows(2).find_map(|pair| match pair {
            [(_, one), (found, other)] if one.number == other.number => Some(found),
            _ => None,
        }) {
            return Err(Error::corrupt(&twice.name, 0, "another file carries the same segment number"));
        }
        survey.drop_void(&mut lives, store.run_number)?;
        survey.link(lives, store.run_number)?;
        if survey.chain.last().is_none_or(|link| link.header.number < store.run_number) {
            let reason = format!("segment {}, with which the latest run began, is missing", store.run_number);
            return Err(Error::corrupt(STORE_FILE, 0, &reason));
        }
        survey.claims();
        Ok(survey)
    }

    fn note_header(&mut self, found: &Found, header: &SegmentHeader) {
        self.newest_number = self.newest_number.max(header.number);
        self.next_first_lsn = self.next_first_lsn.max(header.first_lsn.saturating_add(header.segment_bytes));
        self.oldest_live = self.oldest_live.max(header.oldest_live);
        self.synced_lsn = self.synced_lsn.max(header.synced_lsn);
        self.header_copies_bad += u64::from(found.copies_bad);
        self.note_time(header.time);
    }

    fn note_time(&mut self, time: TimeMark) {
        if self.time.as_ref().is_none_or(|known| known.store_ms <= time.store_ms) {
            self.time = Some(time);
        }
    }

    /// Gives up the recoveries at the top that did not come to their `Sealed`: no answer ever rested on them.
    fn drop_void(&mut self, lives: &mut Vec<(Found, SegmentHeader)>, run_number: u64) -> Result<(), Error> {
        while let Some((_, top)) = lives.last() {
            if top.role != Role::Recovery {
                return Ok(());
            }
            let run_id = top.run_id;
            let of_run =
                |(_, header): &&(Found, SegmentHeader)| header.run_id == run_id && header.role == Role::Recovery;
            let count = lives.iter().rev().take_while(of_run).count();
            let group = lives.split_off(lives.len() - count);
            let mut scans = Vec::new();
            for (found, header) in &group {
                scans.push(Scan::run(found, header)?);
            }
            // A seal that the store file names was durable. It need not find its copies any more: the oldest may have
            // been given up since.
            let published = group.iter().any(|(_, header)| header.number == run_number);
            let parts: Vec<_> = group.iter().zip(&scans).map(|((found, header), scan)| (found, header, scan)).collect();
            if (published && scans.iter().any(|scan| scan.sealed.is_some())) || sealed(&parts)? {
                lives.extend(group);
                return Ok(());
            }
            let first_lsn = group.first().map_or(0, |(_, header)| header.first_lsn);
            let worked = scans.iter().any(|scan| scan.synced_lsn > first_lsn || scan.closed.is_some());
            if let (true, Some((found, _))) = (worked || published, group.first()) {
                return Err(Error::corrupt(
                    &found.name,
                    format::DATA_START,
                    "the seal of the recovery that ended here is missing",
                ));
            }
            self.spares.extend(group.iter().filter_map(|(found, _)| spare(found)));
        }
        Ok(())
    }

    /// Follows `previous` from the newest segment back; whatever is not met is a spare.
    fn link(&mut self, mut lives: Vec<(Found, SegmentHeader)>, run_number: u64) -> Result<(), Error> {
        let Some((newest, _)) = lives.last() else {
            return Err(Error::corrupt(STORE_FILE, 0, "no segment lies beside it"));
        };
        let mut named_by = newest.name.clone();
        let mut number = lives.last().map_or(0, |(_, header)| header.number);
        while number != 0 && number >= self.oldest_live {
            let Some(at) = lives.iter().position(|(_, header)| header.number == number) else {
                let reason = format!("it names segment {number}, which is missing");
                return Err(Error::corrupt(&named_by, 0, &reason));
            };
            let (found, header) = lives.swap_remove(at);
            let scan = Scan::run(&found, &header)?;
            named_by.clone_from(&found.name);
            number = header.previous;
            self.chain.push(Link { found, header, scan });
        }
        self.chain.reverse();
        self.drop_unused();
        // The store file names a run only once its seal is durable, and with it what that run gave up. What a later
        // seal gave up waits.
        let sealed = |link: &Link| link.scan.sealed.is_some();
        let durable = self.chain.iter().filter(|link| sealed(link)).all(|link| link.header.number <= run_number);
        for (found, header) in &lives {
            let at_once = durable && header.number < run_number;
            let spares = if at_once { &mut self.spares } else { &mut self.spares_late };
            spares.extend(spare(found));
        }
        for link in &self.chain {
            for (from, to) in link.scan.sealed.iter().flat_map(|seal| &seal.replaced) {
                self.replaced.add(*from, *to);
            }
        }
        Ok(())
    }

    /// A successor that was made ready and that the log never came to is a spare at once.
    fn drop_unused(&mut self) {
        if let [.., before, last] = self.chain.as_slice()
            && last.scan.is_empty()
            && last.header.role == Role::Rolled
            && before.scan.next.is_none_or(|(_, next)| next.number != last.header.number)
            && let Some(last) = self.chain.pop()
        {
            self.spares.extend(spare(&last.found));
        }
    }

    fn claims(&mut self) {
        let mut times = Vec::new();
        for link in &self.chain {
            self.synced_lsn = self.synced_lsn.max(link.scan.synced_lsn);
            times.extend(link.scan.closed.map(|(_, time)| time));
        }
        for time in times {
            self.note_time(time);
        }
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
                return Err(Error::corrupt(&link.found.name, hole.offset, &hole.bad.to_string()));
            }
            if let Some((lsn, next)) = link.scan.next {
                let cut = self.replaced.contains(lsn) || self.replaced.contains(next.first_lsn);
                let successor = self.chain.iter().find(|link| link.header.number == next.number);
                let present = successor.is_some_and(|link| link.header.salt == next.salt);
                if !cut && !present {
                    let reason = format!("its successor, segment {}, is missing", next.number);
                    return Err(Error::corrupt(&link.found.name, lsn - link.header.first_lsn, &reason));
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
                return Err(Error::corrupt(&first.found.name, format::DATA_START, "the seal of a recovery is missing"));
            }
            rest = behind;
        }
        Ok(())
    }

    /// Whether the last thing that the last run did was to close the store.
    fn is_clean(&self) -> bool {
        let mut above = self.chain.iter().rev().skip_while(|link| link.scan.is_empty());
        let Some(last) = above.next() else { return false };
        let ended = last
            .scan
            .closed
            .is_some_and(|(lsn, _)| last.header.first_lsn + last.scan.end == lsn + format::CLOSED_BYTES as u64);
        ended
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
            records: self.chain.iter().map(|link| link.scan.states.len() as u64).sum(),
            torn: torn.count() as u64,
            header_copies_bad: self.header_copies_bad,
            ..OpenReport::default()
        }
    }
}

/// The file of a segment that no longer counts.
fn spare(found: &Found) -> Option<Spare> {
    let bytes = found.data.len();
    let fits =
        bytes > format::DATA_START && bytes <= index::OFFSET_END.into() && bytes.is_multiple_of(SEGMENT_BYTES_STEP);
    fits.then(|| Spare { name: found.name.clone(), bytes })
}

/// Whether the segments of one recovery hold its `Sealed`, and all the copies that it counts.
fn sealed(group: &[(&Found, &SegmentHeader, &Scan)]) -> Result<bool, Error> {
    let Some(seal) = group.iter().find_map(|(_, _, scan)| scan.sealed.as_ref()) else {
        return Ok(false);
    };
    let mut count = 0;
    let mut copies = Copies::default();
    for (found, header, scan) in group {
        for offset in &scan.states {
            let lsn = header.first_lsn + u64::from(*offset);
            if lsn > seal.lsn {
                break;
            }
            let bytes = found.data.view(u64::from(*offset), room_behind(found, *offset));
            let seen = format::verify(bytes, header.salt, lsn).map_err(|bad| changed(&found.name, *offset, bad))?;
            copies.add(seen.bytes);
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

fn room_behind(found: &Found, offset: u32) -> usize {
    usize::try_from(found.data.len().saturating_sub(offset.into())).unwrap_or(usize::MAX)
}

fn changed(name: &str, offset: u32, bad: Bad) -> Error {
    Error::corrupt(name, offset.into(), &format!("it changed while it was read: {bad}"))
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
