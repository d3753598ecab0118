//! What holds for every record and for all bytes, tried at random.

use std::hint::black_box;

use proptest::collection::vec;
use proptest::prelude::*;

use super::tests::reseal;
use super::*;
use crate::clock::TimeMark;
use crate::key::Fingerprint;
use crate::options::Durability;

/// A state record that owns its bytes.
#[derive(Clone, Debug)]
struct OwnedState {
    kind: StateKind,
    /// How far back the token's record stands, in units; 0, in a Reserved record only: it is this one.
    token_units_back: u32,
    attempt: u32,
    cause: Option<Cause>,
    durability: Durability,
    detached: bool,
    body_kept: bool,
    times_ms: [u64; 4],
    reserved_after_ms: u32,
    fingerprint: [u8; 16],
    scope: Vec<u8>,
    id: Vec<u8>,
    payload: Vec<u8>,
}

/// Any record, as a writer has it before it knows the position.
#[derive(Clone, Debug)]
enum Written {
    State(OwnedState),
    Next(Next),
    Sealed { count: u64, digest: [u8; 16], intervals: Vec<(u64, u64)> },
    Closed(Closed),
    Pad { len: usize },
}

/// Where a record is written.
#[derive(Clone, Copy, Debug)]
struct Place {
    salt: u64,
    lsn: u64,
    synced_lsn: u64,
}

impl OwnedState {
    /// The record as a reader is to find it at `lsn`.
    fn at(&self, lsn: u64) -> StateRecord<'_> {
        let [first_seen_ms, mark_ms, retention_ms, kept_until_ms] = self.times_ms;
        StateRecord {
            kind: self.kind,
            token: lsn - u64::from(self.token_units_back) * 8,
            attempt: self.attempt,
            cause: self.cause,
            durability: self.durability,
            detached: self.detached,
            body_kept: self.body_kept,
            first_seen_ms,
            reserved_ms: first_seen_ms + u64::from(self.reserved_after_ms),
            mark_ms,
            retention_ms,
            kept_until_ms,
            fingerprint: Fingerprint::from_bytes(self.fingerprint),
            scope: &self.scope,
            id: &self.id,
            payload: &self.payload,
        }
    }
}

impl Written {
    fn draft(&self, lsn: u64) -> Draft {
        match self {
            Self::State(state) if state.token_units_back == 0 => {
                Draft::state(&StateRecord { token: 0, ..state.at(lsn) })
            }
            Self::State(state) => Draft::state(&state.at(lsn)),
            Self::Next(next) => Draft::next(next),
            Self::Sealed { count, digest, intervals } => Draft::sealed(*count, *digest, intervals),
            Self::Closed(closed) => Draft::closed(closed),
            Self::Pad { len } => Draft::pad(*len),
        }
    }

    /// The whole record; a Pad's body, which nobody writes, is 0xAA.
    fn bytes(&self, place: Place) -> Vec<u8> {
        let mut draft = self.draft(place.lsn);
        let len = draft.len();
        let mut bytes = draft.finish(place.salt, place.lsn, place.synced_lsn).to_vec();
        bytes.resize(len, 0xAA);
        bytes
    }

    /// How many bytes from the start the checks vouch for.
    fn covered_bytes(&self, bytes: &[u8]) -> usize {
        if matches!(self, Self::Pad { .. }) { HEAD_BYTES } else { bytes.len() }
    }

    fn assert_is(&self, record: Record<'_>, lsn: u64) {
        match (self, record) {
            (Self::State(state), Record::State(found)) => assert!(state.at(lsn) == found, "{state:?} {found:?}"),
            (Self::Next(next), Record::Next(found)) => assert_eq!(*next, found),
            (Self::Sealed { count, digest, intervals }, Record::Sealed(found)) => {
                assert_eq!((*count, *digest), (found.count, found.digest));
                assert_eq!(*intervals, found.intervals().collect::<Vec<_>>());
            }
            (Self::Closed(closed), Record::Closed(found)) => assert_eq!(*closed, found),
            (Self::Pad { .. }, Record::Pad) => {}
            (written, found) => panic!("{written:?} came back as {found:?}"),
        }
    }
}

fn state_kinds() -> impl Strategy<Value = StateKind> {
    use StateKind::{Done, Forgotten, Interrupted, Released, Reserved};
    prop_oneof![Just(Reserved), Just(Interrupted), Just(Done), Just(Released), Just(Forgotten)]
}

fn causes() -> impl Strategy<Value = Option<Cause>> {
    use Cause::{Crash, Dropped, LeaseLapsed};
    prop_oneof![Just(None), Just(Some(Crash)), Just(Some(Dropped)), Just(Some(LeaseLapsed))]
}

prop_compose! {
    fn states()(
        kind in state_kinds(),
        back in 0..1000_u32,
        attempt in any::<u32>(),
        cause in causes(),
        durability in prop_oneof![Just(Durability::PowerLoss), Just(Durability::ProcessCrash)],
        (detached, body_kept) in any::<(bool, bool)>(),
        times_ms in [0..=MS_MAX, 0..=MS_MAX, 0..=MS_MAX, 0..=MS_MAX],
        reserved_after_ms in prop_oneof![Just(0), any::<u32>(), Just(u32::MAX)],
        fingerprint in any::<[u8; 16]>(),
        scope in prop_oneof![vec(any::<u8>(), 0..12), vec(any::<u8>(), 255)],
        id in prop_oneof![vec(any::<u8>(), 1..40), vec(any::<u8>(), 255)],
        payload in vec(any::<u8>(), 0..300),
    ) -> OwnedState {
        let token_units_back = if kind == StateKind::Reserved { back } else { back + 1 };
        OwnedState {
            kind, token_units_back, attempt, cause, durability, detached, body_kept, times_ms, reserved_after_ms,
            fingerprint, scope, id, payload,
        }
    }
}

fn written() -> impl Strategy<Value = Written> {
    let next = any::<[u64; 5]>().prop_map(|[number, first_lsn, salt, unfinished, newest_kept_until_ms]| {
        Written::Next(Next { number, first_lsn, salt, unfinished, newest_kept_until_ms })
    });
    let sealed = (any::<u64>(), any::<[u8; 16]>(), vec((0..1_u64 << 40, 1..1_u64 << 40), 0..6)).prop_map(
        |(count, digest, steps)| {
            let mut end = 0;
            let intervals = steps.into_iter().map(|(gap, length)| {
                let from = end + gap;
                end = from + length;
                (from, end)
            });
            Written::Sealed { count, digest, intervals: intervals.collect() }
        },
    );
    let closed =
        (any::<[u64; 4]>(), any::<[u8; 16]>()).prop_map(|([store_ms, boot_ms, wall_ms, unfinished], boot_id)| {
            Written::Closed(Closed { time: TimeMark { store_ms, boot_ms, wall_ms, boot_id }, unfinished })
        });
    let pad = (2..40_usize).prop_map(|units| Written::Pad { len: units * 8 });
    prop_oneof![4 => states().prop_map(Written::State), 1 => next, 1 => sealed, 1 => closed, 1 => pad]
}

fn places() -> impl Strategy<Value = Place> {
    let lsn = prop_oneof![8192..1_u64 << 20, 8192..1_u64 << 50, (1_u64 << 35) - 4096..(1 << 35) + 4096, Just(1 << 62)];
    let behind = prop_oneof![Just(0), 0..1_u64 << 20, any::<u64>()];
    (any::<u64>(), lsn, behind).prop_map(|(salt, lsn, behind)| {
        let lsn = lsn & !7;
        Place { salt, lsn, synced_lsn: lsn.saturating_sub(behind) & !7 }
    })
}

proptest! {
    #[test]
    fn what_was_written_is_read_and_encodes_the_same(
        written in written(), place in places(), behind_it in vec(any::<u8>(), 0..40),
    ) {
        let Place { salt, lsn, synced_lsn } = place;
        let bytes = written.bytes(place);
        prop_assert!(bytes.len().is_multiple_of(8));
        let segment = [&bytes[..], &behind_it].concat();

        let seen = verify(&segment, salt, lsn).unwrap();
        written.assert_is(seen.record, lsn);
        prop_assert_eq!(seen.len, bytes.len());
        prop_assert_eq!(seen.bytes, &bytes[..]);
        let behind = lsn - synced_lsn;
        prop_assert_eq!(seen.behind, (behind < u64::from(u32::MAX) * 8).then_some(behind));
        prop_assert_eq!(verify(&bytes, salt, lsn), Ok(seen));
        match seen.record {
            Record::State(state) => prop_assert_eq!(trusted(&segment, lsn), Ok(state)),
            _ => prop_assert_eq!(trusted(&segment, lsn), Err(Bad::Malformed)),
        }
    }

    #[test]
    fn every_flipped_bit_fails_but_in_a_pads_body(written in written(), place in places()) {
        let mut bytes = written.bytes(place);
        let covered_bytes = written.covered_bytes(&bytes);
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            let found = verify(&bytes, place.salt, place.lsn);
            prop_assert_eq!(found.is_err(), bit / 8 < covered_bytes, "bit {}: {:?}", bit, found);
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn every_burst_within_32_bits_fails(
        written in written(), place in places(), at in any::<prop::sample::Index>(), burst in 1..=u32::MAX,
    ) {
        let mut bytes = written.bytes(place);
        let at = at.index(written.covered_bytes(&bytes) - 3);
        for (byte, flip) in bytes[at..].iter_mut().zip(burst.to_le_bytes()) {
            *byte ^= flip;
        }
        prop_assert!(verify(&bytes, place.salt, place.lsn).is_err());
    }

    #[test]
    fn under_another_salt_nothing_verifies(written in written(), place in places(), other in 1..=u64::MAX) {
        let bytes = written.bytes(place);
        for change in [other, other & 0xFFFF_FFFF, other & !0xFFFF_FFFF, 1, 1 << 63] {
            if change != 0 {
                prop_assert!(verify(&bytes, place.salt ^ change, place.lsn).is_err());
            }
        }
    }

    #[test]
    fn at_another_position_nothing_verifies(written in written(), place in places(), units in 1..=u32::MAX) {
        let bytes = written.bytes(place);
        let other = place.lsn ^ (u64::from(units) << 3);
        prop_assert_eq!(verify(&bytes, place.salt, other), Err(Bad::Head));
        prop_assert_eq!(verify(&bytes, place.salt, place.lsn + 8 * u64::from(units)), Err(Bad::Head));
    }

    #[test]
    fn a_record_inside_a_response_is_never_found(inner in written(), outer in states(), place in places()) {
        let planted = inner.bytes(place);
        let outer = Written::State(OwnedState { payload: [&outer.payload, &planted[..]].concat(), ..outer });
        let place = Place { lsn: place.lsn + 8 * 1000, ..place };
        let bytes = outer.bytes(place);
        for at in 1..bytes.len() {
            prop_assert!(verify(&bytes[at..], place.salt, place.lsn + at as u64).is_err());
        }
    }

    #[test]
    fn a_damaged_length_fails(written in written(), place in places(), cut in any::<prop::sample::Index>()) {
        let bytes = written.bytes(place);
        let right = u32::try_from(bytes.len() / 8).unwrap();
        prop_assert!(verify(&bytes[..cut.index(bytes.len())], place.salt, place.lsn).is_err());
        for units in (0..right + 4).chain([0xFF_FFFE, 0xFF_FFFF]).filter(|units| *units != right) {
            let mut bytes = bytes.clone();
            bytes[4..7].copy_from_slice(&units.to_le_bytes()[..3]);
            prop_assert_eq!(verify(&bytes, place.salt, place.lsn), Err(Bad::Head));
            // Even a writer that lied about the length, and put the right checks, leads nobody out of the bytes.
            reseal(&mut bytes, place.salt, place.lsn);
            match verify(&bytes, place.salt, place.lsn) {
                Ok(seen) => prop_assert!(units >= 2 && units < right && seen.len == units as usize * 8),
                Err(Bad::Malformed) => prop_assert!(units < right),
                Err(bad) => prop_assert_eq!(bad, Bad::Length),
            }
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(
        mut bytes in vec(any::<u8>(), 0..600), word in (0..24_u8, 0..80_u32), place in places(),
    ) {
        let Place { salt, lsn, .. } = place;
        let read_all = |bytes: &[u8]| {
            for copy in 0..2 {
                assert!(SegmentHeader::decode(bytes, copy).is_err());
            }
            assert!(StoreFile::decode(bytes).is_err());
            for at in 0..bytes.len() {
                black_box(verify(&bytes[at..], salt, lsn).is_ok());
                black_box(trusted(&bytes[at..], lsn).is_ok());
            }
        };
        read_all(&bytes);
        if bytes.len() >= HEAD_BYTES {
            bytes[4..8].copy_from_slice(&(u32::from(word.0) << 24 | word.1).to_le_bytes());
            reseal(&mut bytes, place.salt, place.lsn);
            read_all(&bytes);
        }
    }

    #[test]
    fn with_right_checks_only_the_one_encoding_is_read(
        written in written(), place in places(), at in any::<prop::sample::Index>(), byte in any::<u8>(),
    ) {
        let mut bytes = written.bytes(place);
        let at = 12 + at.index(bytes.len() - 12);
        bytes[at] = byte;
        reseal(&mut bytes, place.salt, place.lsn);
        if let Ok(Seen { record: Record::State(state), behind, .. }) = verify(&bytes, place.salt, place.lsn) {
            let token = if state.token == place.lsn { 0 } else { state.token };
            let mut again = Draft::state(&StateRecord { token, ..state });
            let synced_lsn = behind.map_or(0, |behind| place.lsn - behind);
            prop_assert_eq!(again.finish(place.salt, place.lsn, synced_lsn), &bytes[..]);
        }
    }
}
