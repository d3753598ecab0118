//! What the headers of all segment files say, and the chain that they make: nothing here reads a record.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::clock::TimeMark;
use crate::error::{Error, ErrorKind};
use crate::format::{self, SegmentHeader, StoreFile};
use crate::index;
use crate::log::Spare;
use crate::retention::{SEGMENT_BYTES_MAX, SEGMENT_BYTES_STEP};
use crate::scan::Scan;
use crate::segment::{Found, Life};

use super::{STORE_FILE, unsupported};

/// A segment that has a sound header, with what was found in it.
#[derive(Clone, Debug)]
pub(super) struct Link {
    pub(super) life: Arc<Life>,
    pub(super) header: SegmentHeader,
    pub(super) scan: Scan,
}

/// No store comes to so many segments, so far, or so late: a header that says so was made up.
const NUMBER_MAX: u64 = 1 << 56;
const LSN_MAX: u64 = 1 << 62;
pub(super) const TIME_MS_MAX: u64 = format::MS_MAX / 2;

/// What all headers tell together.
#[derive(Debug, Default)]
pub(super) struct Heads {
    /// The first index that no file of a segment carries.
    pub(super) next_index: u32,
    pub(super) newest_number: u64,
    /// The LSN beyond the range of every header seen.
    pub(super) next_first_lsn: u64,
    /// The oldest number that any header names as alive.
    pub(super) oldest_live: u64,
    /// The largest LSN that any header says was synced.
    pub(super) synced_lsn: u64,
    pub(super) time: LatestTime,
    /// The newest segment of each run.
    pub(super) newest_of_run: BTreeMap<[u8; 16], u64>,
    /// Files that never had a life.
    pub(super) unlived: Vec<Spare>,
    pub(super) copies_bad: u64,
    /// A file whose header copies are both damaged: where a segment is missing, it may be this one.
    headless: Option<String>,
}

/// The latest time of several; where two tell the same, the one that was written later: it may be of another boot, or
/// another reading of the wall clock.
#[derive(Clone, Debug, Default)]
pub(super) struct LatestTime {
    pub(super) mark: Option<TimeMark>,
    number: u64,
}

impl LatestTime {
    /// A time that was written in segment `number`.
    pub(super) fn note(&mut self, number: u64, time: TimeMark) {
        let later = (time.store_ms, number);
        if self.mark.as_ref().is_none_or(|known| (known.store_ms, self.number) <= later) {
            *self = Self { mark: Some(time), number };
        }
    }
}

impl Heads {
    /// Looks at the headers of all files; gives back the segments that have a sound one, by number.
    ///
    /// # Errors
    ///
    /// `ForeignDirectory`, `UnsupportedFormat`, `Corrupt`.
    pub(super) fn read(store: &StoreFile, files: Vec<Found>) -> Result<(Self, Vec<Link>), Error> {
        let lived = files.iter().filter(|found| found.header.is_some()).map(|found| found.index);
        let mut heads = Self { next_index: lived.max().unwrap_or(0).wrapping_add(1), ..Self::default() };
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
                    heads.note(&found, &header);
                    let life = Arc::new(Life::new(found.name, &header, found.data));
                    lives.push(Link { life, header, scan: Scan::default() });
                }
                None => match found.newer {
                    Some(version) => return Err(unsupported(&found.name, version)),
                    // A file that a crash left before its first header was durable, or that was never one.
                    None if found.never_lived() => heads.unlived.extend(spare(&found.name, found.data.len())),
                    // Nothing that was acknowledged can be in it: a segment that holds such is named by a durable
                    // record, or by the store file, and would be missed. So it is not ours to touch.
                    None => {
                        heads.copies_bad += u64::from(found.copies_bad);
                        heads.headless = heads.headless.take().or(Some(found.name));
                    }
                },
            }
        }
        lives.sort_by_key(|link| link.header.number);
        let twice =
            lives.iter().zip(lives.iter().skip(1)).find(|(one, other)| one.header.number == other.header.number);
        if let Some((_, twice)) = twice {
            return Err(Error::corrupt(&twice.life.name, 0, "another file carries the same segment number"));
        }
        Ok((heads, lives))
    }

    fn note(&mut self, found: &Found, header: &SegmentHeader) {
        self.newest_number = self.newest_number.max(header.number);
        self.next_first_lsn = self.next_first_lsn.max(header.first_lsn.saturating_add(header.segment_bytes));
        self.oldest_live = self.oldest_live.max(header.oldest_live);
        self.synced_lsn = self.synced_lsn.max(header.synced_lsn);
        self.copies_bad += u64::from(found.copies_bad);
        let newest = self.newest_of_run.entry(header.run_id).or_default();
        *newest = header.number.max(*newest);
        self.time.note(header.number, header.time);
    }

    /// Follows `previous` from the newest segment back; gives the chain, oldest first, and what it does not meet.
    ///
    /// # Errors
    ///
    /// `Corrupt`: a segment is missing, or two cannot be of one log.
    pub(super) fn link(&self, mut lives: Vec<Link>) -> Result<(Vec<Link>, Vec<Link>), Error> {
        let Some(newest) = lives.last() else {
            return Err(self.missing(STORE_FILE, 0, "no segment lies beside it"));
        };
        let mut chain = Vec::new();
        let mut named_by = newest.life.name.clone();
        let mut number = newest.header.number;
        while number != 0 && number >= self.oldest_live {
            let Some(at) = lives.iter().rposition(|link| link.header.number == number) else {
                let reason = format!("it names segment {number}, which is missing");
                return Err(self.missing(&named_by, 0, &reason));
            };
            let link = lives.remove(at);
            named_by.clone_from(&link.life.name);
            number = link.header.previous;
            chain.push(link);
        }
        chain.reverse();
        for (before, link) in chain.iter().zip(chain.iter().skip(1)) {
            if link.header.first_lsn < before.life.end_lsn() {
                let reason = "its header names a place in the log that another segment has";
                return Err(Error::corrupt(&link.life.name, 0, reason));
            }
        }
        let oldest = chain.first().map_or(self.newest_number, |link| link.header.number);
        if self.newest_number - oldest >= index::SEGMENT_SPAN_MAX {
            let reason = format!("segments {oldest} and {} cannot belong to one store", self.newest_number);
            return Err(Error::corrupt(STORE_FILE, 0, &reason));
        }
        Ok((chain, lives))
    }

    /// The error of a segment that is missing, as `file` tells at `offset`: where the damage is, if that can be told.
    pub(super) fn missing(&self, file: &str, offset: u64, reason: &str) -> Error {
        match &self.headless {
            Some(headless) => {
                let reason = format!("both copies of its header fail their checks; {file}: {reason}");
                Error::corrupt(headless, 0, &reason)
            }
            None => Error::corrupt(file, offset, reason),
        }
    }
}

/// Whether a log can have come so far, in any measure.
fn is_of_a_log(header: &SegmentHeader) -> bool {
    header.number <= NUMBER_MAX
        && header.first_lsn <= LSN_MAX
        && header.segment_bytes <= LSN_MAX
        && header.synced_lsn <= header.first_lsn
        && header.time.store_ms <= TIME_MS_MAX
}

/// The file of a segment that no longer counts.
pub(super) fn spare(name: &str, bytes: u64) -> Option<Spare> {
    let fits = bytes > format::DATA_START && bytes <= SEGMENT_BYTES_MAX && bytes.is_multiple_of(SEGMENT_BYTES_STEP);
    fits.then(|| Spare { name: name.to_owned(), bytes })
}
