//! A store's files written by hand, as the specification at the head of `src/format.rs` says, and not with its code: so
//! that a test can lay out any combination of facts, sound in every check, and so that the two are held against each
//! other.

use std::ops::Range;

use keyonce::Fingerprint;
use keyonce::testing::{SimDisk, Storage as _};

/// The first position of a record in a segment file.
pub(crate) const RECORDS_START: usize = 8192;

/// The name of the store file.
pub(crate) const STORE_FILE: &str = "keyonce.store";

/// Store time, wall clock and boot time of everything forged, in milliseconds; the boot is one that no clock has.
pub(crate) const NOW_MS: u64 = 1_767_225_600_000;

/// The id of every forged store, but for those that are somebody else's.
pub(crate) const STORE_ID: [u8; 16] = [0x5a; 16];

/// The scope of every forged key.
pub(crate) const SCOPE: &str = "forged";

/// The request that every forged key stands for.
pub(crate) fn request() -> Fingerprint {
    Fingerprint::from_bytes([9; 16])
}

/// A kind of record, by its code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Its response is stored.
    Done = 3,
    /// The end of a segment.
    Next = 16,
    /// The end of a recovery.
    Sealed = 17,
    /// The end of a run.
    Closed = 18,
}

/// What a segment was made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The log rolled into it.
    Rolled = 1,
    /// A recovery.
    Recovery = 2,
}

/// A segment's header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) role: Role,
    pub(crate) store_id: [u8; 16],
    /// One byte, repeated, stands for the run's id.
    pub(crate) run: u8,
    pub(crate) number: u64,
    pub(crate) previous: u64,
    pub(crate) segment_bytes: u64,
    pub(crate) first_lsn: u64,
    pub(crate) synced_lsn: u64,
    pub(crate) oldest_live: u64,
}

impl Header {
    /// A segment of the first run that stands alone, with room for four kilobytes of records.
    pub(crate) fn first() -> Self {
        Self {
            version: 1,
            role: Role::Rolled,
            store_id: STORE_ID,
            run: 1,
            number: 1,
            previous: 0,
            segment_bytes: RECORDS_START as u64 + 4096,
            first_lsn: 0,
            synced_lsn: 0,
            oldest_live: 1,
        }
    }

    /// The segment behind this one, in the same run.
    pub(crate) fn behind(&self) -> Self {
        Self { number: self.number + 1, previous: self.number, first_lsn: self.end_lsn(), ..*self }
    }

    /// The first segment of the recovery behind this one.
    pub(crate) fn recovery_behind(&self) -> Self {
        Self { role: Role::Recovery, run: self.run + 1, ..self.behind() }
    }

    pub(crate) fn end_lsn(&self) -> u64 {
        self.first_lsn + self.segment_bytes
    }

    pub(crate) fn salt(&self) -> u64 {
        (self.number ^ u64::from(self.run) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def0
    }

    /// Copy 0 or 1.
    pub(crate) fn copy(&self, copy: u8) -> Vec<u8> {
        let mut bytes = b"KEYSEG\0\0".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend([self.role as u8, copy, 0, 0]);
        bytes.extend(self.store_id);
        bytes.extend([self.run; 16]);
        let fields = [
            self.number,
            self.previous,
            self.segment_bytes,
            self.first_lsn,
            self.synced_lsn,
            self.oldest_live,
            NOW_MS,
            0,
            NOW_MS,
        ];
        for field in fields {
            bytes.extend(field.to_le_bytes());
        }
        bytes.extend([0xb0; 16]);
        bytes.extend(self.salt().to_le_bytes());
        bytes.resize(252, 0);
        bytes.extend(check_of(&bytes));
        bytes
    }
}

/// The store file of a store whose latest run began with segment `run_number`.
pub(crate) fn store_file(version: u32, run_number: u64) -> Vec<u8> {
    let mut bytes = b"KEYONCE\0".to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend(0_u32.to_le_bytes());
    bytes.extend(STORE_ID);
    bytes.extend([0xc3; 16]);
    bytes.extend(NOW_MS.to_le_bytes());
    bytes.extend(run_number.to_le_bytes());
    bytes.resize(508, 0);
    bytes.extend(check_of(&bytes));
    bytes
}

/// A segment file as it is being written.
#[derive(Clone, Debug)]
pub(crate) struct SegmentFile {
    pub(crate) header: Header,
    pub(crate) bytes: Vec<u8>,
    at: usize,
}

impl SegmentFile {
    pub(crate) fn new(header: Header) -> Self {
        let mut file =
            Self { header, bytes: vec![0; usize::try_from(header.segment_bytes).unwrap()], at: RECORDS_START };
        file.write_headers();
        file
    }

    /// Writes both copies of the header, after a change of it.
    pub(crate) fn write_headers(&mut self) {
        for (at, copy) in [(0, 0), (4096, 1)] {
            self.bytes[at..at + 256].copy_from_slice(&self.header.copy(copy));
        }
    }

    pub(crate) fn name(&self) -> String {
        format!("segment-{:08x}.keyonce", self.header.number & 0xffff_ffff)
    }

    /// Where the next record will stand, in LSNs.
    pub(crate) fn lsn(&self) -> u64 {
        self.header.first_lsn + self.at as u64
    }

    /// The LSN of a place in this file.
    pub(crate) fn lsn_at(&self, offset: usize) -> u64 {
        self.header.first_lsn + offset as u64
    }

    /// Writes a record whose log was synced up to `synced_lsn`; says where it stands.
    pub(crate) fn put(&mut self, kind: Kind, body: &[u8], synced_lsn: u64) -> Range<usize> {
        let units = u32::try_from((16 + body.len()).div_ceil(8)).unwrap();
        let behind = u32::try_from(self.lsn().saturating_sub(synced_lsn).div_ceil(8)).unwrap_or(u32::MAX);
        let start = self.at;
        self.at += usize::try_from(units).unwrap() * 8;
        let record = &mut self.bytes[start..self.at];
        record[4..8].copy_from_slice(&((kind as u32) << 24 | units).to_le_bytes());
        record[12..16].copy_from_slice(&behind.to_le_bytes());
        record[16..16 + body.len()].copy_from_slice(body);
        self.repair(start, self.at);
        start..self.at
    }

    /// Makes both checks of what stands at `start` hold, as a record that ends at `end`.
    pub(crate) fn repair(&mut self, start: usize, end: usize) {
        let lsn = self.lsn_at(start);
        repair(&mut self.bytes, start..end, lsn, self.header.salt());
    }

    /// Writes a completed key, whose response is its own name.
    pub(crate) fn done(&mut self, id: &str, synced_lsn: u64) -> Range<usize> {
        self.state(Kind::Done, id, 8, id.as_bytes(), synced_lsn)
    }

    /// Writes a state record of a key; a token of 0 stands for the record's own LSN.
    pub(crate) fn state(&mut self, kind: Kind, id: &str, token: u64, payload: &[u8], synced_lsn: u64) -> Range<usize> {
        let tail = [SCOPE.as_bytes(), id.as_bytes(), payload].concat();
        let padding = u16::try_from((76 + tail.len()).next_multiple_of(8) - 76 - tail.len()).unwrap();
        let mut body = token.to_le_bytes().to_vec();
        let hour = 60 * 60 * 1000;
        for time in [NOW_MS, NOW_MS, hour, NOW_MS + hour] {
            body.extend(&time.to_le_bytes()[..6]);
        }
        body.extend(0_u32.to_le_bytes());
        body.extend(1_u32.to_le_bytes());
        body.extend((padding | 1 << 3).to_le_bytes());
        body.extend([u8::try_from(SCOPE.len()).unwrap(), u8::try_from(id.len()).unwrap()]);
        body.extend(request().to_bytes());
        body.extend(tail);
        body.resize(body.len() + usize::from(padding), 0);
        self.put(kind, &body, synced_lsn)
    }

    /// Writes the mark that the log goes on in `successor`.
    pub(crate) fn next(&mut self, successor: &Header, synced_lsn: u64) -> Range<usize> {
        let fields = [successor.number, successor.first_lsn, successor.salt(), 0, NOW_MS + 60 * 60 * 1000];
        self.put(Kind::Next, &fields.map(u64::to_le_bytes).concat(), synced_lsn)
    }

    /// Writes the end of a recovery that made `copies` in the place of these intervals of the log.
    pub(crate) fn sealed(&mut self, copies: &[&[u8]], replaced: &[(u64, u64)], synced_lsn: u64) -> Range<usize> {
        let mut digest = blake3::Hasher::new();
        for copy in copies {
            digest.update(copy);
        }
        let mut body = (copies.len() as u64).to_le_bytes().to_vec();
        body.extend(&digest.finalize().as_bytes()[..16]);
        body.extend((replaced.len() as u64).to_le_bytes());
        for (from, to) in replaced {
            body.extend(from.to_le_bytes());
            body.extend(to.to_le_bytes());
        }
        self.put(Kind::Sealed, &body, synced_lsn)
    }

    /// Writes a clean end.
    pub(crate) fn closed(&mut self, synced_lsn: u64) -> Range<usize> {
        let mut body = [NOW_MS, 0, NOW_MS].map(u64::to_le_bytes).concat();
        body.extend([0xb0; 16]);
        body.extend([0; 16]);
        self.put(Kind::Closed, &body, synced_lsn)
    }
}

/// The check of a store file or of a header copy, of which these are all bytes before it.
pub(crate) fn check_of(covered: &[u8]) -> [u8; 4] {
    crc32fast::hash(covered).to_le_bytes()
}

/// Makes both checks hold of the record that stands in `range` of `bytes`, at `lsn` of a segment with this salt.
pub(crate) fn repair(bytes: &mut [u8], range: Range<usize>, lsn: u64, salt: u64) {
    let [low, high] = [salt & 0xffff_ffff, salt >> 32].map(|half| u32::try_from(half).unwrap());
    let record = &mut bytes[range];
    let mut head = crc32fast::Hasher::new_with_initial(low);
    head.update(&record[4..8]);
    head.update(&record[12..16]);
    head.update(&lsn.to_le_bytes());
    let head = head.finalize();
    record[8..12].copy_from_slice(&head.to_le_bytes());
    let checksum = crc32fast::hash(&record[16..]) ^ head ^ high;
    record[0..4].copy_from_slice(&checksum.to_le_bytes());
}

/// Whether the record that stands in `range` of `bytes` was written there.
pub(crate) fn verifies(bytes: &[u8], range: Range<usize>, lsn: u64, salt: u64) -> bool {
    let Some(record) = bytes.get(range).filter(|record| record.len() >= 16) else { return false };
    let mut repaired = record.to_vec();
    repair(&mut repaired, 0..record.len(), lsn, salt);
    repaired == record
}

/// A directory of forged files.
#[derive(Clone, Debug, Default)]
pub(crate) struct Directory(pub(crate) Vec<(String, Vec<u8>)>);

impl Directory {
    /// A store whose latest run began with segment `run_number`.
    pub(crate) fn store(run_number: u64, segments: &[SegmentFile]) -> Self {
        let mut files = vec![(STORE_FILE.to_owned(), store_file(1, run_number))];
        files.extend(segments.iter().map(|file| (file.name(), file.bytes.clone())));
        Self(files)
    }

    /// The directory on a disk of its own, all of it durable.
    pub(crate) fn disk(&self) -> SimDisk {
        let disk = SimDisk::new();
        for (name, bytes) in &self.0 {
            disk.publish(name, bytes).unwrap();
        }
        disk
    }
}
