//! Checks that are made to hold again, so that what was damaged gets behind them.

use std::ops::Range;

use super::base::Files;
use crate::format::{self, Draft, Record, Role, SegmentHeader, verify};
use crate::recovery::STORE_FILE;
use crate::testing::decoders::{repair_block, repair_record};
use crate::{hint, segment};

/// Where the commit word of a record tells its kind and length, and where its head ends.
const WORD: Range<usize> = 4..8;
/// Where the store file tells the hash seed.
const SEED: Range<usize> = 32..48;

/// Which checks are made to hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Repair {
    pub(super) store_file: bool,
    pub(super) headers: bool,
    pub(super) records: bool,
    pub(super) seals: bool,
    pub(super) hints: bool,
}

impl Repair {
    /// Makes them hold in all files.
    pub(super) fn apply(self, files: &mut Files) {
        let seed = files.get(STORE_FILE).and_then(|bytes| bytes.get(SEED)).unwrap_or_default().to_vec();
        for (name, bytes) in files.iter_mut() {
            if self.hints && hint::file_index(name).is_some() {
                repair_hint(bytes, &seed);
            } else if segment::file_index(name).is_none() {
                if self.store_file
                    && let Some(block) = bytes.get_mut(..format::STORE_FILE_BYTES)
                {
                    repair_block(block);
                }
            } else {
                self.apply_to_segment(bytes);
            }
        }
        if self.seals {
            repair_seals(files);
        }
    }

    fn apply_to_segment(self, bytes: &mut [u8]) {
        if self.headers {
            for copy in 0..2 {
                let block = bytes.get_mut(copy * format::BLOCK..).and_then(|rest| rest.get_mut(..format::HEADER_BYTES));
                if let Some(block) = block.filter(|block| block.iter().any(|byte| *byte != 0)) {
                    repair_block(block);
                }
            }
        }
        if self.records
            && let Some(header) = header(bytes)
        {
            repair_records(bytes, &header);
        }
    }
}

/// The newest life of which a header copy verifies, as an opening finds it.
pub(super) fn header(bytes: &[u8]) -> Option<SegmentHeader> {
    let copy = |copy: u8| SegmentHeader::decode(bytes.get(usize::from(copy) * format::BLOCK..)?, copy).ok();
    copy(1).into_iter().chain(copy(0)).max_by_key(|header| header.number)
}

/// The places of all records that verify, in their order, as an opening meets them.
pub(super) fn records(bytes: &[u8]) -> Vec<Range<usize>> {
    let mut records = Vec::new();
    let Some(header) = header(bytes) else { return records };
    let mut at = usize::try_from(format::DATA_START).unwrap_or(usize::MAX);
    while let Some(here) = bytes.get(at..).filter(|here| here.len() >= format::HEAD_BYTES) {
        match verify(here, header.salt, header.first_lsn.saturating_add(at as u64)) {
            Ok(seen) => {
                records.push(at..at + seen.len);
                at += seen.len;
            }
            Err(_) => at += format::UNIT_BYTES,
        }
    }
    records
}

/// Files, headers and records in words, for who looks into a finding.
pub(super) fn told(files: &Files) -> String {
    let mut told = String::new();
    for (name, bytes) in files {
        told.push_str(&format!("{name}: {} bytes\n", bytes.len()));
        let Some(header) = header(bytes).filter(|_| segment::file_index(name).is_some()) else { continue };
        told.push_str(&format!("    {header:?}\n"));
        for at in records(bytes) {
            let lsn = header.first_lsn.saturating_add(at.start as u64);
            if let Some(Ok(seen)) = bytes.get(at.clone()).map(|record| verify(record, header.salt, lsn)) {
                told.push_str(&format!("    {at:?} synced {:?} behind: {:?}\n", seen.behind, seen.record));
            }
        }
    }
    told
}

/// Repairs whatever looks like a record by its kind and length, and goes on behind it.
fn repair_records(bytes: &mut [u8], header: &SegmentHeader) {
    let mut at = usize::try_from(format::DATA_START).unwrap_or(usize::MAX);
    while let Some(here) = bytes.get_mut(at..).filter(|here| here.len() >= format::HEAD_BYTES) {
        let lsn = header.first_lsn.saturating_add(at as u64);
        if verify(here, header.salt, lsn).is_err() && looks_like_a_record(here) {
            repair_record(here, header.salt, lsn);
        }
        at += verify(here, header.salt, lsn).map_or(format::UNIT_BYTES, |seen| seen.len);
    }
}

fn repair_hint(bytes: &mut [u8], seed: &[u8]) {
    let mut digest = [0; 16];
    let Some((head, entries)) = bytes.split_at_mut_checked(format::HINT_HEAD_BYTES) else { return };
    let Some((covered, place)) = head.split_last_chunk_mut::<16>() else { return };
    blake3::Hasher::new().update(seed).update(covered).update(entries).finalize_xof().fill(&mut digest);
    *place = digest;
}

fn looks_like_a_record(bytes: &[u8]) -> bool {
    let Some([a, b, c, kind]) = bytes.get(WORD) else { return false };
    let len = u32::from_le_bytes([*a, *b, *c, 0]) as usize * format::UNIT_BYTES;
    matches!(kind, 1..=5 | 16..=19) && len >= format::HEAD_BYTES
}

/// Lets the first seal of each recovery count the copies that stand before it, and digest them.
fn repair_seals(files: &mut Files) {
    let mut group: Vec<(SegmentHeader, String)> = files
        .iter()
        .filter(|(name, _)| segment::file_index(name).is_some())
        .filter_map(|(name, bytes)| Some((header(bytes)?, name.clone())))
        .filter(|(header, _)| header.role == Role::Recovery)
        .collect();
    group.sort_by_key(|(header, _)| header.number);
    for run in group.chunk_by(|(one, _), (other, _)| one.run_id == other.run_id) {
        repair_seal(files, run);
    }
}

fn repair_seal(files: &mut Files, run: &[(SegmentHeader, String)]) {
    let mut copies = blake3::Hasher::new();
    let mut count = 0;
    for (header, name) in run {
        let Some(bytes) = files.get_mut(name) else { return };
        for at in records(bytes) {
            let lsn = header.first_lsn.saturating_add(at.start as u64);
            let Some(record) = bytes.get_mut(at) else { return };
            let Ok(seen) = verify(record, header.salt, lsn) else { return };
            match seen.record {
                Record::State(_) => {
                    copies.update(seen.bytes);
                    count += 1;
                }
                Record::Sealed(sealed) => {
                    let mut digest = [0; 16];
                    copies.finalize_xof().fill(&mut digest);
                    let intervals: Vec<_> = sealed.intervals().collect();
                    let synced_lsn = lsn - seen.behind.unwrap_or_default();
                    let mut draft = Draft::sealed(count, digest, &intervals);
                    record.copy_from_slice(draft.finish(header.salt, lsn, synced_lsn));
                    return;
                }
                Record::Next(_) | Record::Closed(_) | Record::Pad => {}
            }
        }
    }
}
