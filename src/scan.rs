//! What lies in one segment: every record that can be vouched for, and where none can.
//!
//! A scan reads by positioned reads, from the first record to the last, and never stops at damage: where nothing
//! verifies it goes on to the next head that does, so one damaged record costs no other. It judges nothing.

use crate::clock::TimeMark;
use crate::error::Error;
use crate::format::{self, Bad, Entry, Next, Record};
use crate::index;
use crate::key::HashSeed;
use crate::segment::Life;

/// Two records start at least this far apart: the fixed part of one alone is longer.
const GRANULE: usize = 64;
const _: () = assert!(format::STATE_BYTES >= GRANULE);

/// What was found in a segment beside the records of keys.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scan {
    /// How many records give a key a state.
    pub(crate) records: u64,
    /// A hint says all this: nobody has read the segment.
    pub(crate) hinted: bool,
    /// Where nothing verified, in the order of the log.
    pub(crate) holes: Vec<Hole>,
    /// The end of the segment: its LSN, and what it says.
    pub(crate) next: Option<(u64, Next)>,
    pub(crate) sealed: Option<Seal>,
    /// LSN and time of the end mark.
    pub(crate) closed: Option<(u64, TimeMark)>,
    /// Offset behind the last record that verified.
    pub(crate) end: u64,
    /// The largest LSN that a record here says was synced.
    pub(crate) synced_lsn: u64,
}

/// The end of a recovery: what its copies have replaced.
#[derive(Clone, Debug)]
pub(crate) struct Seal {
    pub(crate) lsn: u64,
    pub(crate) count: u64,
    pub(crate) digest: [u8; 16],
    pub(crate) replaced: Vec<(u64, u64)>,
}

/// Bytes between records that verified, or behind the last one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hole {
    pub(crate) from_lsn: u64,
    pub(crate) offset: u64,
    pub(crate) bad: Bad,
    /// Something was written here: a record verified behind the hole, or the head of one inside it.
    pub(crate) torn: bool,
}

/// A segment that was read, while its bytes are at hand.
#[derive(Debug)]
pub(crate) struct Reading<'a> {
    pub(crate) scan: Scan,
    /// Offsets of the records that give a key a state.
    pub(crate) states: Vec<u32>,
    life: &'a Life,
    bytes: &'a [u8],
}

impl<'a> Reading<'a> {
    /// Reads the segment `life` into `buffer`.
    ///
    /// # Errors
    ///
    /// `Io`; `Corrupt`, when the header tells of an impossible length.
    pub(crate) fn of(life: &'a Life, buffer: &'a mut Vec<u8>) -> Result<Self, Error> {
        let too_long = || Error::corrupt(&life.name, 0, "its header names an impossible length");
        if life.bytes > index::OFFSET_END.into() {
            return Err(too_long());
        }
        let bytes = usize::try_from(life.bytes.min(life.data.len())).map_err(|_| too_long())?;
        if buffer.len() < bytes {
            *buffer = vec![0; bytes];
        }
        let into = buffer.get_mut(..bytes).expect("the buffer was made long enough");
        let read = life.data.read_at(0, into).map_err(|error| Error::io(format!("reading {}", life.name), error))?;
        let mut reading = Reading {
            scan: Scan { end: format::DATA_START, ..Scan::default() },
            states: Vec::new(),
            life,
            bytes: into.get(..read).unwrap_or_default(),
        };
        reading.run();
        Ok(reading)
    }

    fn run(&mut self) {
        let mut hole: Option<Hole> = None;
        let mut offset = format::DATA_START;
        while let Some(bytes) = usize::try_from(offset).ok().and_then(|from| self.bytes.get(from..)) {
            if bytes.len() < format::HEAD_BYTES {
                break;
            }
            let lsn = self.life.first_lsn + offset;
            match format::verify(bytes, self.life.salt, lsn) {
                Ok(seen) => {
                    self.scan.holes.extend(hole.take().map(|hole| Hole { torn: true, ..hole }));
                    if let Some(behind) = seen.behind {
                        self.scan.synced_lsn = self.scan.synced_lsn.max(lsn.saturating_sub(behind));
                    }
                    self.note(&seen.record, lsn, offset);
                    offset += seen.len as u64;
                    self.scan.end = offset;
                    if self.scan.next.is_some() {
                        self.scan.records = self.states.len() as u64;
                        return;
                    }
                }
                Err(bad) => {
                    let torn = matches!(bad, Bad::Body | Bad::Malformed);
                    let hole = hole.get_or_insert(Hole { from_lsn: lsn, offset, bad, torn: false });
                    hole.torn |= torn;
                    offset += format::to_next_head(bytes, self.life.salt, lsn) as u64;
                }
            }
        }
        self.end_without_next(hole);
    }

    fn note(&mut self, record: &Record<'_>, lsn: u64, offset: u64) {
        match record {
            Record::State(_) => self.states.extend(u32::try_from(offset)),
            Record::Next(next) => self.scan.next = Some((lsn, *next)),
            Record::Sealed(sealed) => {
                let replaced = sealed.intervals().collect();
                self.scan.sealed = Some(Seal { lsn, count: sealed.count, digest: sealed.digest, replaced });
            }
            Record::Closed(closed) => {
                self.scan.closed = Some((lsn, closed.time));
                self.scan.synced_lsn = self.scan.synced_lsn.max(lsn);
            }
            Record::Pad => {}
        }
    }

    fn end_without_next(&mut self, mut hole: Option<Hole>) {
        let (life, scan) = (self.life, &mut self.scan);
        scan.records = self.states.len() as u64;
        if hole.is_none() && scan.end < life.bytes {
            let offset = scan.end;
            // Bytes that the header tells of and that are not there are no room that was never used.
            let torn = (self.bytes.len() as u64) < life.bytes;
            hole = Some(Hole { from_lsn: life.first_lsn + offset, offset, bad: Bad::Blank, torn });
        }
        // Room behind an end mark is room that was never used.
        if !scan.ends_closed(life) {
            scan.holes.extend(hole);
        }
    }

    /// The bytes from the record at `offset` on.
    pub(crate) fn bytes_from(&self, offset: u32) -> &'a [u8] {
        usize::try_from(offset).ok().and_then(|from| self.bytes.get(from..)).unwrap_or_default()
    }

    /// What the index needs to know of the records, but for those that a later record of the same reservation, in the
    /// same segment, has superseded.
    pub(crate) fn entries(&self, seed: &HashSeed) -> Vec<Entry> {
        let mut superseded = vec![0_u64; self.bytes.len().div_ceil(GRANULE * 64)];
        let granule = |offset: u32| (offset as usize / GRANULE / 64, offset as usize / GRANULE % 64);
        let mut entries = Vec::with_capacity(self.states.len());
        for offset in self.states.iter().rev() {
            let (word, bit) = granule(*offset);
            if superseded.get(word).is_some_and(|word| word >> bit & 1 != 0) {
                continue;
            }
            let lsn = self.life.lsn(*offset);
            let Ok(record) = format::trusted(self.bytes_from(*offset), lsn) else { continue };
            if let (true, Some(first)) = (record.token < lsn, record.token.checked_sub(self.life.first_lsn)) {
                let (word, bit) = granule(u32::try_from(first).unwrap_or(u32::MAX));
                if let Some(word) = superseded.get_mut(word) {
                    *word |= 1 << bit;
                }
            }
            let (hash, kept_until_ms) = (seed.hash(record.scope, record.id), record.kept_until_ms);
            entries.push(Entry { hash, kept_until_ms, offset: *offset, kind: record.kind });
        }
        entries.reverse();
        entries
    }
}

impl Scan {
    /// Nothing in the segment counts: it was made ready, and never used.
    pub(crate) fn is_empty(&self) -> bool {
        self.records == 0 && self.next.is_none() && self.closed.is_none() && self.sealed.is_none()
    }

    /// Whether the end mark of a run is the last record.
    pub(crate) fn ends_closed(&self, life: &Life) -> bool {
        self.closed.is_some_and(|(lsn, _)| life.first_lsn + self.end == lsn + format::CLOSED_BYTES as u64)
    }
}
