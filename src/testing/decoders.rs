//! Every decoder of the format before bytes that may be anything: what the fuzzer drives, and a test replays.

use std::hint::black_box;

use crate::format::{
    self, Draft, HeaderFault, Record, Seen, SegmentHeader, StateRecord, StoreFile, StoreFileFault, trusted, verify,
};

/// How many bytes are looked at: two blocks hold everything there is to the format, and the fuzzer stays quick.
const BYTES_MAX: usize = 8192;

/// Decodes `bytes` as everything that the format knows, and checks what the decoders promise.
///
/// The first 16 bytes are a salt and an LSN. The rest is read as a store file, as both copies of a header, and as a
/// record at every position: as it is, and again with all checks made to hold, so that what lies behind is reached.
///
/// # Panics
///
/// If a decoder panics, reads what does not encode to the same bytes again, tells a length that is out of bounds, takes
/// a record for one of another place, or if the trusting reader and the checking one disagree.
pub fn exercise_decoders(bytes: &[u8]) {
    let Some((salt, rest)) = bytes.split_first_chunk() else {
        return;
    };
    let Some((lsn, rest)) = rest.split_first_chunk() else {
        return;
    };
    let salt = u64::from_le_bytes(*salt);
    // Half of all positions, so that the end of the bytes has one, too; never 0, which no record has.
    let lsn = (u64::from_le_bytes(*lsn) >> 1 & !7).max(8);
    let rest = rest.get(..BYTES_MAX).unwrap_or(rest);

    store_file(rest);
    header(rest);
    records(rest, salt, lsn);

    let mut repaired = rest.to_vec();
    for len in [format::STORE_FILE_BYTES, format::HEADER_BYTES] {
        if let Some(block) = repaired.get_mut(..len) {
            repair_block(block);
            store_file(block);
            header(block);
            block.copy_from_slice(rest.get(..len).unwrap_or_default());
        }
    }
    repair_records(&mut repaired, salt, lsn);
    records(&repaired, salt, lsn);
}

fn store_file(bytes: &[u8]) {
    match StoreFile::decode(bytes) {
        Ok(store) => assert_eq!(store.encode(), bytes, "a store file has one encoding"),
        Err(StoreFileFault::Version(version)) => assert_ne!(version, format::VERSION, "this version is known"),
        Err(StoreFileFault::Foreign | StoreFileFault::Damaged) => {}
    }
}

fn header(bytes: &[u8]) {
    for copy in 0..2 {
        match SegmentHeader::decode(bytes, copy) {
            Ok(header) => {
                assert!(bytes.starts_with(&header.encode(copy)), "a header copy has one encoding");
                assert_eq!(SegmentHeader::decode(bytes, 1 - copy), Err(HeaderFault::Damaged), "one copy is one copy");
            }
            Err(HeaderFault::Version(version)) => assert_ne!(version, format::VERSION, "this version is known"),
            Err(HeaderFault::Blank) => assert!(bytes.iter().take(format::HEADER_BYTES).all(|byte| *byte == 0)),
            Err(HeaderFault::Foreign | HeaderFault::Damaged) => {}
        }
    }
}

fn records(bytes: &[u8], salt: u64, lsn: u64) {
    let mut draft = Draft::new();
    for at in (0..bytes.len()).step_by(format::UNIT_BYTES) {
        let here = bytes.get(at..).unwrap_or_default();
        let lsn = lsn + at as u64;
        black_box(trusted(here, lsn).is_ok());
        if let Ok(seen) = verify(here, salt, lsn) {
            sound(&seen, here, salt, lsn);
            only_here(&seen, salt, lsn);
            encodes_the_same(&seen, &mut draft, salt, lsn);
        }
    }
}

/// What was read lies within the bytes, and every other way to read it gives the same.
fn sound(seen: &Seen<'_>, bytes: &[u8], salt: u64, lsn: u64) {
    assert!(seen.len >= format::HEAD_BYTES && seen.len.is_multiple_of(format::UNIT_BYTES), "{seen:?}");
    assert_eq!(bytes.get(..seen.len), Some(seen.bytes), "a record lies within the bytes");
    assert!(seen.behind.unwrap_or_default() <= lsn, "nothing is synced before LSN 0: {seen:?}");
    assert_eq!(verify(seen.bytes, salt, lsn), Ok(*seen), "what follows a record says nothing about it");
    match seen.record {
        Record::State(state) => {
            assert_eq!(trusted(bytes, lsn), Ok(state), "trusted and verified are the same");
            assert!(state.token > 0 && state.token <= lsn, "a token is of this record or an earlier one: {state:?}");
            assert!((1..=255).contains(&state.id.len()) && state.scope.len() <= 255, "{state:?}");
        }
        Record::Next(_) | Record::Sealed(_) | Record::Closed(_) | Record::Pad => {
            assert!(trusted(bytes, lsn).is_err(), "no state is read out of another record");
        }
    }
}

/// The record verifies nowhere else, under no other salt, and not when it is cut.
fn only_here(seen: &Seen<'_>, salt: u64, lsn: u64) {
    assert!(verify(seen.bytes, salt, lsn ^ 8).is_err(), "a position is told apart from its neighbour");
    assert!(verify(seen.bytes, salt ^ 1, lsn).is_err(), "the head check knows the salt");
    assert!(verify(seen.bytes, salt ^ 1 << 63, lsn).is_err(), "the checksum knows the salt");
    if let Some((_, cut)) = seen.bytes.split_last() {
        assert!(verify(cut, salt, lsn).is_err(), "a cut record is none");
    }
}

/// The record, written again, gives the same bytes; of a Pad only the head is written.
fn encodes_the_same(seen: &Seen<'_>, draft: &mut Draft, salt: u64, lsn: u64) {
    match seen.record {
        Record::State(state) => {
            // Whether a record tells its own LSN or 0 stands for it, is not for the reader to know.
            let token = if state.token == lsn { 0 } else { state.token };
            draft.refill(&StateRecord { token, ..state });
        }
        Record::Next(next) => *draft = Draft::next(&next),
        Record::Sealed(sealed) => {
            let intervals: Vec<_> = sealed.intervals().collect();
            *draft = Draft::sealed(sealed.count, sealed.digest, &intervals);
        }
        Record::Closed(closed) => *draft = Draft::closed(&closed),
        Record::Pad => *draft = Draft::pad(seen.len),
    }
    assert_eq!(draft.len(), seen.len, "a record has one length: {seen:?}");
    let synced_lsn = seen.behind.map_or(0, |behind| lsn - behind);
    let written = draft.finish(salt, lsn, synced_lsn);
    assert!(seen.bytes.starts_with(written), "a record has one encoding: {seen:?}");
    assert!(written.len() == seen.len || seen.record == Record::Pad, "a record is written whole: {seen:?}");
}

/// Makes the check of a store file or header hold. Here and below the specification is followed again, not the code.
pub(super) fn repair_block(block: &mut [u8]) {
    if let Some((covered, check)) = block.split_last_chunk_mut() {
        *check = crc32fast::hash(covered).to_le_bytes();
    }
}

/// Makes the checks of a record hold at one position after another, going on behind each that then verifies.
fn repair_records(bytes: &mut [u8], salt: u64, lsn: u64) {
    let mut at = 0;
    while let Some(here) = bytes.get_mut(at..).filter(|here| here.len() >= 16) {
        let lsn = lsn + at as u64;
        repair_record(here, salt, lsn);
        at += verify(here, salt, lsn).map_or(8, |seen| seen.len);
    }
}

pub(super) fn repair_record(bytes: &mut [u8], salt: u64, lsn: u64) {
    let Some((head, body)) = bytes.split_first_chunk_mut::<16>() else {
        return;
    };
    let ([checksum, word, check, behind], []) = head.as_chunks_mut::<4>() else {
        return;
    };
    let (salt_low, salt_high) = (salt & 0xFFFF_FFFF, salt >> 32);
    let [length @ .., kind] = *word;
    let [a, b, c] = length;
    let body_bytes = (u32::from_le_bytes([a, b, c, 0]) as usize * 8).saturating_sub(16);
    let body = if kind == 19 { &[] } else { body.get(..body_bytes).unwrap_or_default() };

    let start = u32::try_from(salt_low).expect("it was masked");
    let mut head_crc = crc32fast::Hasher::new_with_initial(start);
    for part in [word.as_slice(), behind.as_slice(), lsn.to_le_bytes().as_slice()] {
        head_crc.update(part);
    }
    let head_check = head_crc.finalize();
    let mask = u32::try_from(salt_high).expect("it was shifted");
    *check = head_check.to_le_bytes();
    *checksum = (crc32fast::hash(body) ^ head_check ^ mask).to_le_bytes();
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::exercise_decoders;

    #[test]
    fn the_fuzzers_corpus_passes() {
        let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
        if !fuzz.exists() {
            return; // The published crate comes without the fuzzer.
        }
        let mut files = 0;
        for entry in fs::read_dir(fuzz.join("corpus/decode")).unwrap() {
            let path = entry.unwrap().path();
            println!("{}", path.display());
            exercise_decoders(&fs::read(path).unwrap());
            files += 1;
        }
        assert!(files >= 20, "the corpus has {files} files");
    }
}
