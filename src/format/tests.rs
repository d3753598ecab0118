//! The bytes of version 1, as they were laid down: `tests/fixtures/v1/MANIFEST.md` tells their inputs.

use super::*;
use crate::clock::TimeMark;
use crate::key::Fingerprint;
use crate::options::Durability;

const SALT: u64 = 0x1122_3344_5566_7788;
const LSN: u64 = 0x1_0000_2000;
const SYNCED_LSN: u64 = 0x1_0000_1FC0;
const TOKEN: u64 = 0x1_0000_2008 - 0x1000;
const TIME: TimeMark = TimeMark {
    store_ms: 1_767_225_600_000,
    boot_ms: 86_400_000,
    wall_ms: 1_767_225_600_123,
    boot_id: *b"boot id boot id ",
};
const INTERVALS: [(u64, u64); 2] = [(0x2000, 0x3000), (0x4000, 0x4008)];

/// A file of `tests/fixtures/v1`.
macro_rules! fixture {
    ($name:literal) => {
        include_bytes!(concat!("../../tests/fixtures/v1/", $name)).as_slice()
    };
}

fn store_file() -> StoreFile {
    StoreFile {
        store_id: *b"store id store i",
        hash_seed: *b"hash seed hash s",
        created_ms: 1_767_225_600_000,
        run_number: 0x11_2233_4455,
    }
}

fn header() -> SegmentHeader {
    SegmentHeader {
        role: Role::Recovery,
        store_id: *b"store id store i",
        run_id: *b"run id run id ru",
        number: 7,
        previous: 6,
        segment_bytes: 1 << 20,
        first_lsn: 0x1_0000_0000,
        synced_lsn: 0xFFFF_F000,
        oldest_live: 3,
        time: TIME,
        salt: SALT,
    }
}

fn state(kind: StateKind) -> StateRecord<'static> {
    let cause = (kind == StateKind::Interrupted).then_some(Cause::LeaseLapsed);
    let payload: &[u8] = match kind {
        StateKind::Reserved => b"",
        StateKind::Interrupted => b"step 2 of 3",
        StateKind::Done => b"{\"charged\":4200}",
        StateKind::Released => b"",
        StateKind::Forgotten => b"ticket 4711",
    };
    StateRecord {
        kind,
        token: if kind == StateKind::Reserved { 0 } else { TOKEN },
        attempt: 2,
        cause,
        durability: if kind == StateKind::Released { Durability::ProcessCrash } else { Durability::PowerLoss },
        detached: kind == StateKind::Interrupted,
        body_kept: true,
        first_seen_ms: 1_767_225_600_000,
        reserved_ms: 1_767_225_601_500,
        mark_ms: 1_767_225_660_000,
        retention_ms: 86_400_000,
        kept_until_ms: 1_767_312_060_000,
        fingerprint: Fingerprint::from_bytes(*b"fingerprint fing"),
        scope: b"tenant-1",
        id: b"0b7e6a52-96b5-4c4e-a4a0-5d4f2f0c9a11",
        payload,
    }
}

/// Makes the checks of a record hold for whatever its bytes say, as a buggy writer's would.
pub(super) fn reseal(bytes: &mut [u8], salt: u64, lsn: u64) {
    let part = |bytes: &[u8], at: usize| <[u8; 4]>::try_from(&bytes[at..at + 4]).unwrap();
    let word = part(bytes, 4);
    let head = check::head(word, part(bytes, 12), lsn, salt);
    let len = (u32::from_le_bytes(word) & LENGTH_UNITS_MAX) as usize * UNIT_BYTES;
    let covered = if word[3] == 19 { &[] } else { bytes.get(HEAD_BYTES..len).unwrap_or_default() };
    let checksum = check::whole(check::crc(0, covered), head, salt);
    bytes[..4].copy_from_slice(&checksum);
    bytes[8..12].copy_from_slice(&head);
}

#[test]
fn store_file_and_header_copies_are_as_they_were_laid_down() {
    assert_eq!(store_file().encode().as_slice(), fixture!("store.bin"));
    assert_eq!(StoreFile::decode(fixture!("store.bin")), Ok(store_file()));
    for (copy, bytes) in [(0, fixture!("header-0.bin")), (1, fixture!("header-1.bin"))] {
        assert_eq!(header().encode(copy).as_slice(), bytes);
        assert_eq!(SegmentHeader::decode(bytes, copy), Ok(header()));
    }
}

#[test]
fn state_records_are_as_they_were_laid_down() {
    let reference = StateRecord { body_kept: false, payload: b"order 17", ..state(StateKind::Done) };
    let copied = StateRecord { token: TOKEN, ..state(StateKind::Reserved) };
    for (record, bytes) in [
        (state(StateKind::Reserved), fixture!("reserved.bin")),
        (copied, fixture!("reserved-copy.bin")),
        (state(StateKind::Interrupted), fixture!("interrupted.bin")),
        (state(StateKind::Done), fixture!("done.bin")),
        (reference, fixture!("done-reference.bin")),
        (state(StateKind::Released), fixture!("released.bin")),
        (state(StateKind::Forgotten), fixture!("forgotten.bin")),
    ] {
        assert_eq!(Draft::state(&record).finish(SALT, LSN, SYNCED_LSN), bytes, "{record:?}");
        let found = StateRecord { token: if record.token == 0 { LSN } else { record.token }, ..record };
        assert_eq!(trusted(bytes, LSN), Ok(found));
        let seen = verify(bytes, SALT, LSN).unwrap();
        assert_eq!(seen, Seen { record: Record::State(found), len: bytes.len(), behind: Some(0x40), bytes });
    }
}

#[test]
fn other_records_are_as_they_were_laid_down() {
    let next = Next {
        number: 8,
        first_lsn: 0x1_0010_0000,
        salt: 0x99AA_BBCC_DDEE_FF00,
        unfinished: 5,
        newest_kept_until_ms: 1_767_312_060_000,
    };
    let closed = Closed { time: TIME, unfinished: 5 };
    for (mut draft, bytes) in [
        (Draft::next(&next), fixture!("next.bin")),
        (Draft::sealed(9, *b"digest of copies", &INTERVALS), fixture!("sealed.bin")),
        (Draft::closed(&closed), fixture!("closed.bin")),
        (Draft::pad(16), fixture!("pad.bin")),
    ] {
        assert_eq!(draft.finish(SALT, LSN, SYNCED_LSN), bytes);
        let seen = verify(bytes, SALT, LSN).unwrap();
        assert_eq!((seen.len, seen.behind, seen.bytes), (bytes.len(), Some(0x40), bytes));
        match seen.record {
            Record::Next(found) => assert_eq!(found, next),
            Record::Closed(found) => assert_eq!(found, closed),
            Record::Sealed(found) => {
                assert_eq!((found.count, &found.digest), (9, b"digest of copies"));
                assert!(found.intervals().eq(INTERVALS));
            }
            Record::Pad => assert_eq!(seen.len, 16),
            Record::State(found) => panic!("no state was written: {found:?}"),
        }
    }
}

#[test]
fn sizes_are_those_of_the_reference_work() {
    assert_eq!(state_record_bytes(8, 36, 0), 120);
    assert_eq!(state_record_bytes(8, 36, 200), 320);
    assert_eq!(Draft::state(&state(StateKind::Reserved)).len(), 120);
    let response = [7; 200];
    assert_eq!(Draft::state(&StateRecord { payload: &response, ..state(StateKind::Done) }).len(), 320);
    assert_eq!(Draft::sealed(0, [0; 16], &INTERVALS).len(), sealed_bytes(2));
}

#[test]
fn the_checks_are_those_of_the_specification() {
    /// CRC-32/ISO-HDLC bit by bit, going on from `start`.
    fn crc(start: u32, bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!start, |state, byte| {
            (0..8).fold(state ^ u32::from(*byte), |state, _| state >> 1 ^ if state & 1 == 1 { 0xEDB8_8320 } else { 0 })
        })
    }
    assert_eq!(crc(0, b"123456789"), 0xCBF4_3926);
    let record = fixture!("done.bin");
    let head = [&record[4..8], &record[12..16], &LSN.to_le_bytes()].concat();
    assert_eq!(crc(0x5566_7788, &head).to_le_bytes(), record[8..12]);
    let check = u32::from_le_bytes(record[8..12].try_into().unwrap());
    assert_eq!((crc(0, &record[16..]) ^ check ^ 0x1122_3344).to_le_bytes(), record[..4]);
}

#[test]
fn a_token_is_never_of_a_later_record_nor_missing() {
    for (kind, token, reads) in [
        (StateKind::Reserved, 0, true),
        (StateKind::Done, 0, false),
        (StateKind::Reserved, LSN, false),
        (StateKind::Done, LSN, false),
        (StateKind::Done, LSN + 8, false),
        (StateKind::Done, LSN - 8, true),
        (StateKind::Done, LSN - 7, false),
    ] {
        let mut bytes = Draft::state(&StateRecord { token: 8, ..state(kind) }).finish(SALT, LSN, SYNCED_LSN).to_vec();
        bytes[16..24].copy_from_slice(&u64::to_le_bytes(token));
        assert_eq!(verify(&bytes, SALT, LSN).err(), Some(Bad::Body), "{kind:?} {token}");
        reseal(&mut bytes, SALT, LSN);
        assert_eq!(verify(&bytes, SALT, LSN).err(), (!reads).then_some(Bad::Malformed), "{kind:?} {token}");
    }
}

#[test]
fn what_makes_no_sense_is_refused_though_its_checks_hold() {
    let (done, next, sealed) = (fixture!("done.bin"), fixture!("next.bin"), fixture!("sealed.bin"));
    let (closed, pad) = (fixture!("closed.bin"), fixture!("pad.bin"));
    for (record, at, byte, bad) in [
        (done, 4, 0, Bad::Length),
        (done, 4, 1, Bad::Length),
        (done, 4, 9, Bad::Length),
        (done, 4, 0xFF, Bad::Length),
        (done, 6, 0xFF, Bad::Length),
        (done, 7, 0, Bad::Malformed),
        (done, 7, 6, Bad::Malformed),
        (done, 7, 15, Bad::Malformed),
        (done, 7, 16, Bad::Length),
        (done, 7, 18, Bad::Length),
        (done, 7, 20, Bad::Malformed),
        (done, 7, 0xFF, Bad::Malformed),
        (done, 15, 0xFF, Bad::Malformed), // synced, before LSN 0
        (done, 56, 0x10, Bad::Malformed), // durability 2
        (done, 56, 0x18, Bad::Malformed), // durability 3
        (done, 57, 0x03, Bad::Malformed), // cause 6
        (done, 57, 0x04, Bad::Malformed),
        (done, 57, 0x08, Bad::Malformed),
        (done, 57, 0x10, Bad::Malformed),
        (done, 57, 0x20, Bad::Malformed),
        (done, 57, 0x40, Bad::Malformed),
        (done, 57, 0x80, Bad::Malformed),
        (done, 58, 0xFF, Bad::Malformed),
        (done, 59, 0, Bad::Malformed),
        (done, 59, 0xFF, Bad::Malformed),
        (fixture!("interrupted.bin"), 135, 1, Bad::Malformed), // padding
        (next, 4, 8, Bad::Length),
        (next, 4, 6, Bad::Length),
        (sealed, 40, 1, Bad::Malformed),    // n
        (sealed, 40, 3, Bad::Malformed),    // n
        (sealed, 4, 9, Bad::Malformed),     // n, and half an interval
        (sealed, 49, 0x30, Bad::Malformed), // empty
        (sealed, 49, 0x50, Bad::Malformed), // backwards
        (sealed, 65, 0x20, Bad::Malformed), // overlapping
        (closed, 4, 8, Bad::Length),
        (closed, 4, 10, Bad::Length),
        (closed, 64, 1, Bad::Malformed),
        (closed, 71, 0x80, Bad::Malformed),
        (pad, 4, 0, Bad::Length),
        (pad, 4, 1, Bad::Length),
    ] {
        let mut bytes = [record, &[0; 8]].concat();
        bytes[at] = byte;
        reseal(&mut bytes, SALT, LSN);
        let here = if at == 4 { &bytes[..] } else { &bytes[..record.len()] };
        assert_eq!(verify(here, SALT, LSN).err(), Some(bad), "byte {at} = {byte} of {record:?}");
    }
}

#[test]
fn what_verifies_can_be_written_again_even_at_the_bounds() {
    let (longest, payload) = ([7; 255], vec![7; PAYLOAD_BYTES_MAX]);
    let largest = StateRecord { scope: &longest, id: &longest, payload: &payload, ..state(StateKind::Done) };
    let mut draft = Draft::state(&largest);
    assert_eq!(draft.len(), RECORD_BYTES_MAX);
    let mut bytes = draft.finish(SALT, LSN, SYNCED_LSN).to_vec();
    assert!(verify(&bytes, SALT, LSN).is_ok());
    // The same length with a short key would be a payload beyond its bound.
    bytes[58..60].copy_from_slice(&[0, 1]);
    reseal(&mut bytes, SALT, LSN);
    assert_eq!(verify(&bytes, SALT, LSN).err(), Some(Bad::Malformed));

    let mut pad = Draft::pad(PAD_BYTES_MAX);
    assert_eq!((pad.len(), pad.finish(SALT, LSN, SYNCED_LSN).len()), (PAD_BYTES_MAX, HEAD_BYTES));
    assert_eq!(verify(pad.finish(SALT, LSN, SYNCED_LSN), SALT, LSN).err(), Some(Bad::Length));
}

#[test]
fn times_saturate() {
    let record = StateRecord {
        first_seen_ms: 5,
        reserved_ms: u64::MAX,
        mark_ms: MS_MAX,
        retention_ms: MS_MAX + 1,
        kept_until_ms: u64::MAX,
        ..state(StateKind::Done)
    };
    let mut draft = Draft::state(&record);
    let found = trusted(draft.finish(SALT, LSN, 0), LSN).unwrap();
    assert_eq!(found.reserved_ms, 5 + u64::from(u32::MAX));
    assert_eq!((found.mark_ms, found.retention_ms, found.kept_until_ms), (MS_MAX, MS_MAX, MS_MAX));
    let early = StateRecord { first_seen_ms: u64::MAX, reserved_ms: 7, ..record };
    let mut draft = Draft::state(&early);
    let found = trusted(draft.finish(SALT, LSN, 0), LSN).unwrap();
    assert_eq!((found.first_seen_ms, found.reserved_ms), (MS_MAX, MS_MAX));
}

#[test]
fn how_far_the_synced_position_lay_behind_is_never_told_too_near() {
    let mut draft = Draft::pad(16);
    let far = u64::from(u32::MAX) * 8;
    let lsn = far + 8 * 10;
    for (synced_lsn, behind) in [
        (lsn, Some(0)),
        (lsn + 800, Some(0)),
        (lsn - 8, Some(8)),
        (lsn - 7, Some(8)),
        (lsn - 9, Some(16)),
        (lsn - far + 8, Some(far - 8)),
        (lsn - far, None),
        (0, None),
    ] {
        let seen = verify(draft.finish(SALT, lsn, synced_lsn), SALT, lsn).unwrap();
        assert_eq!(seen.behind, behind, "{synced_lsn}");
    }
}

#[test]
fn one_draft_serves_many_records_without_allocating() {
    let response = [7; 200];
    let large = vec![7; 1 << 20];
    let mut draft = Draft::new();
    let done = StateRecord { payload: &response, ..state(StateKind::Done) };
    draft.refill(&done);
    let first = draft.finish(SALT, LSN, SYNCED_LSN).as_ptr();
    draft.refill(&state(StateKind::Reserved));
    assert_eq!(draft.finish(SALT, LSN, SYNCED_LSN).as_ptr(), first);
    draft.refill(&done);
    assert_eq!(draft.finish(SALT, LSN, SYNCED_LSN).as_ptr(), first);

    draft.refill(&StateRecord { payload: &large, ..done });
    draft.refill(&done);
    assert_eq!(draft.len(), 320);
    assert!(draft.capacity() <= 64 << 10, "one large response does not pin its size");
    let other_place = draft.finish(1, LSN + 8, SYNCED_LSN).to_vec();
    assert!(verify(&other_place, 1, LSN + 8).is_ok());
    assert_eq!(draft.finish(SALT, LSN, SYNCED_LSN), Draft::state(&done).finish(SALT, LSN, SYNCED_LSN));
}

#[test]
fn nothing_printed_shows_a_key_or_a_response() {
    let mut draft = Draft::state(&state(StateKind::Done));
    let mut printed = format!("{draft:?}");
    let seen = verify(draft.finish(SALT, LSN, SYNCED_LSN), SALT, LSN).unwrap();
    printed += &format!("{seen:?} {:?}", seen.record);
    for secret in ["tenant", "0b7e6a52", "charged", "[116, 101", "[48, 98", "[123, 34"] {
        assert!(!printed.contains(secret), "{printed}");
    }
}

#[test]
fn faults_read_as_sentences() {
    let faults = [Bad::Blank, Bad::Head, Bad::Length, Bad::Body, Bad::Malformed].map(|bad| bad.to_string());
    let headers = [HeaderFault::Blank, HeaderFault::Foreign, HeaderFault::Version(9), HeaderFault::Damaged]
        .map(|fault| fault.to_string());
    let stores = [StoreFileFault::Foreign, StoreFileFault::Version(9), StoreFileFault::Damaged];
    for told in faults.into_iter().chain(headers).chain(stores.map(|fault| fault.to_string())) {
        assert!(told.contains(' ') && !told.ends_with('.'), "{told}");
    }
}
