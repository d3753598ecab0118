//! One life of one segment file: how it begins, and what the store must know of it while it lives.
//!
//! A file outlives its lives: when every record in it is past its use it is recycled under a new number with a new
//! salt. A new life begins with both copies of its header written and synced; only then may a record be appended.

use std::io;
use std::sync::Arc;

use crate::error::Error;
use crate::format::{self, Bad, HeaderFault, Record, Seen, SegmentHeader, StateRecord};
use crate::retention::SEGMENT_BYTES_MAX;
use crate::storage::{Access, Segment, Storage};
use crate::sync::{AtomicBool, AtomicU64, Ordering};

const NAME_PREFIX: &str = "segment-";
const NAME_SUFFIX: &str = ".keyonce";

/// The name of segment file `index`. Names say nothing of the order of segments; headers do.
pub(crate) fn file_name(index: u32) -> String {
    numbered(NAME_PREFIX, index)
}

/// The index in the name of a segment file of ours.
pub(crate) fn file_index(name: &str) -> Option<u32> {
    index_in(NAME_PREFIX, name)
}

/// The name of a file of ours of which there are many.
pub(crate) fn numbered(prefix: &str, index: u32) -> String {
    format!("{prefix}{index:08x}{NAME_SUFFIX}")
}

/// The index in such a name.
pub(crate) fn index_in(prefix: &str, name: &str) -> Option<u32> {
    let digits = name.strip_prefix(prefix)?.strip_suffix(NAME_SUFFIX)?;
    let index = u32::from_str_radix(digits, 16).ok()?;
    (numbered(prefix, index) == name).then_some(index)
}

/// A segment in its present life.
#[derive(Debug)]
pub(crate) struct Life {
    pub(crate) name: String,
    pub(crate) number: u64,
    pub(crate) first_lsn: u64,
    pub(crate) bytes: u64,
    pub(crate) salt: u64,
    pub(crate) data: Arc<dyn Segment>,
    /// The newest `kept_until` of a finished record that was the latest of its key when it was published here. Relaxed,
    /// as the next two: who decides by them has passed through the shard locks under which they are raised.
    newest_kept_until_ms: AtomicU64,
    /// The same of unfinished records.
    newest_unfinished_until_ms: AtomicU64,
    /// Keys whose latest record lies here and is unfinished, and the bytes of those records.
    unfinished: AtomicU64,
    unfinished_bytes: AtomicU64,
    /// The LSN behind the newest record that has taken the place of an unfinished one here: a copy, or what became of the
    /// key. Until that is durable, a power loss brings the key back to what stands here.
    superseded_end: AtomicU64,
    /// Its hint was left on the disk, or cannot be had. Relaxed: who keeps house alone asks.
    hint_is_done: AtomicBool,
}

impl Life {
    /// The segment that `header` describes, on `data`.
    pub(crate) fn new(name: String, header: &SegmentHeader, data: Arc<dyn Segment>) -> Self {
        Self {
            name,
            number: header.number,
            first_lsn: header.first_lsn,
            bytes: header.segment_bytes,
            salt: header.salt,
            data,
            newest_kept_until_ms: AtomicU64::new(0),
            newest_unfinished_until_ms: AtomicU64::new(0),
            unfinished: AtomicU64::new(0),
            unfinished_bytes: AtomicU64::new(0),
            superseded_end: AtomicU64::new(0),
            hint_is_done: AtomicBool::new(false),
        }
    }

    /// Gives the file `name` the new life that `header` describes. When this returns, the header is durable. One of the
    /// two copies is sound at every moment: that of the old life until that of the new one is durable, which says that
    /// nothing of the old one counts any more.
    ///
    /// # Errors
    ///
    /// What the storage says; the file is then a spare with no life, or still in its old one.
    pub(crate) fn begin(data: Arc<dyn Segment>, name: String, header: &SegmentHeader) -> io::Result<Self> {
        data.write_at(0, &header.encode(0))?;
        data.sync()?;
        data.write_at(format::BLOCK as u64, &header.encode(1))?;
        data.sync()?;
        Ok(Self::new(name, header, data))
    }

    /// The bytes of the record at `offset`, which a scan has verified or this run has written.
    pub(crate) fn record(&self, offset: u32) -> &[u8] {
        let head = self.data.view(offset.into(), format::HEAD_BYTES);
        self.data.view(offset.into(), format::record_len(head))
    }

    /// What the record at `offset` says, and its length in bytes; it was verified by a scan or written by this run.
    ///
    /// # Errors
    ///
    /// `Corrupt`, when the bytes have changed since.
    pub(crate) fn state_record(&self, offset: u32) -> Result<(StateRecord<'_>, u64), Error> {
        let bytes = self.record(offset);
        match format::trusted(bytes, self.lsn(offset)) {
            Ok(record) => Ok((record, bytes.len() as u64)),
            Err(bad) => Err(self.changed(offset, bad)),
        }
    }

    /// The same of a record that nobody has checked yet, as one that is known from a hint: every byte is checked first.
    ///
    /// # Errors
    ///
    /// `Corrupt`.
    pub(crate) fn checked_record(&self, offset: u32) -> Result<(StateRecord<'_>, u64), Error> {
        let head = self.data.view(offset.into(), format::HEAD_BYTES);
        let len = format::record_len(head);
        // Also a length that is damaged stays within the file.
        let bytes = if u64::from(offset) + len as u64 <= self.data.len() { self.record(offset) } else { head };
        match format::verify(bytes, self.salt, self.lsn(offset)) {
            Ok(Seen { record: Record::State(record), len, .. }) => Ok((record, len as u64)),
            Ok(_) => Err(Error::corrupt(&self.name, offset.into(), "no record of a key stands where one was synced")),
            Err(bad) => Err(Error::corrupt(&self.name, offset.into(), &bad.to_string())),
        }
    }

    #[cold]
    fn changed(&self, offset: u32, bad: Bad) -> Error {
        let reason = format!("it changed while the store was open: {bad}");
        Error::corrupt(&self.name, offset.into(), &reason)
    }

    /// The LSN of the byte at `offset`.
    pub(crate) fn lsn(&self, offset: u32) -> u64 {
        self.first_lsn + u64::from(offset)
    }

    /// The LSN just behind the segment.
    pub(crate) fn end_lsn(&self) -> u64 {
        self.first_lsn.saturating_add(self.bytes)
    }

    /// A finished record that is the latest of its key now stands here.
    pub(crate) fn note_finished(&self, kept_until_ms: u64) {
        self.newest_kept_until_ms.fetch_max(kept_until_ms, Ordering::Relaxed);
    }

    /// An unfinished record of so many bytes that is the latest of its key now stands here, and will not be given up
    /// before `until_ms`.
    pub(crate) fn note_unfinished(&self, until_ms: u64, bytes: u64) {
        self.newest_unfinished_until_ms.fetch_max(until_ms, Ordering::Relaxed);
        self.unfinished.fetch_add(1, Ordering::Relaxed);
        self.unfinished_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// An unfinished record of so many bytes here is no longer the latest of its key: what ends at `by_lsn` is, or 0, when
    /// its retention is over.
    pub(crate) fn note_superseded(&self, bytes: u64, by_lsn: u64) {
        self.unfinished.fetch_sub(1, Ordering::Relaxed);
        self.unfinished_bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.superseded_end.fetch_max(by_lsn, Ordering::Relaxed);
    }

    /// How far the log must be durable before the file of this life may be given away.
    pub(crate) fn superseded_end(&self) -> u64 {
        self.superseded_end.load(Ordering::Relaxed)
    }

    /// When the last finished key here is past its retention.
    pub(crate) fn newest_kept_until_ms(&self) -> u64 {
        self.newest_kept_until_ms.load(Ordering::Relaxed)
    }

    /// Whether every finished key here is past its retention at `now_ms`.
    pub(crate) fn is_over(&self, now_ms: u64) -> bool {
        self.newest_kept_until_ms() <= now_ms
    }

    /// Whether giving up this segment, which is over, would free room: at least half of it is of no use, or its
    /// unfinished keys are all past their time. One that is full of live unfinished keys would only be written anew.
    pub(crate) fn frees_room(&self, now_ms: u64) -> bool {
        let unfinished_until_ms = self.newest_unfinished_until_ms.load(Ordering::Relaxed);
        self.unfinished_bytes() <= self.bytes / 2 || unfinished_until_ms <= now_ms
    }

    /// Whether there is nothing more to be done about its hint.
    pub(crate) fn hint_is_done(&self) -> bool {
        self.hint_is_done.load(Ordering::Relaxed)
    }

    /// Its hint is on the disk, or cannot be had.
    pub(crate) fn note_hint_done(&self) {
        self.hint_is_done.store(true, Ordering::Relaxed);
    }

    /// How many unfinished keys have their latest record here.
    pub(crate) fn unfinished(&self) -> u64 {
        self.unfinished.load(Ordering::Relaxed)
    }

    /// Bytes of the records here that are unfinished and the latest of their keys.
    fn unfinished_bytes(&self) -> u64 {
        self.unfinished_bytes.load(Ordering::Relaxed)
    }
}

/// What a segment file says of itself.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) name: String,
    pub(crate) index: u32,
    pub(crate) data: Arc<dyn Segment>,
    /// The newest life of which a header copy verifies.
    pub(crate) header: Option<SegmentHeader>,
    /// A copy that does not verify beside one that does, or beside another life's.
    pub(crate) copies_bad: u32,
    /// The version that a newer crate wrote.
    pub(crate) newer: Option<u32>,
    /// The file holds nothing but zeros where its headers would be.
    pub(crate) blank: bool,
}

impl Found {
    /// Whether this file can never have held a record: it is too short, or its headers were never written.
    pub(crate) fn never_lived(&self) -> bool {
        self.header.is_none() && (self.blank || self.data.len() <= format::DATA_START)
    }
}

/// Reads both header copies of a segment file; changes nothing.
pub(crate) fn examine(storage: &dyn Storage, name: &str, index: u32) -> io::Result<Found> {
    let data = storage.open_segment(name, Access::Read)?;
    let mut found = Found { name: name.to_owned(), index, data, header: None, copies_bad: 0, newer: None, blank: true };
    for copy in 0..2_u8 {
        let mut bytes = [0_u8; format::HEADER_BYTES];
        let read = found.data.read_at(u64::from(copy) * format::BLOCK as u64, &mut bytes)?;
        let bytes = bytes.get(..read).unwrap_or_default();
        found.blank &= bytes.iter().all(|byte| *byte == 0);
        match SegmentHeader::decode(bytes, copy) {
            Ok(header) if found.header.as_ref().is_none_or(|other| other.number < header.number) => {
                found.header = Some(header);
            }
            Ok(_) => {}
            Err(HeaderFault::Version(version)) => found.newer = Some(version),
            Err(HeaderFault::Blank | HeaderFault::Foreign | HeaderFault::Damaged) => found.copies_bad += 1,
        }
    }
    let of_our_size = found.data.len() <= SEGMENT_BYTES_MAX;
    if found.header.is_none() && found.newer.is_none() && !found.blank && of_our_size {
        // A first header that was half written, with nothing behind it, is one that nothing ever rested on.
        let len = usize::try_from(found.data.len().saturating_sub(format::DATA_START)).unwrap_or(0);
        let mut behind = vec![0; len];
        let read = found.data.read_at(format::DATA_START, &mut behind)?;
        found.blank = behind.iter().take(read).all(|byte| *byte == 0);
    }
    Ok(found)
}
