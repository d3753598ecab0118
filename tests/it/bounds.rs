//! Row F4: positions and segment numbers near the ends of the fields that hold them, in a store written by hand that is
//! then opened, written to until it has rolled past the bound, and opened again.

use std::sync::Arc;
use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk};
use keyonce::{Completion, Durability, Key, Options, Reserve, Retention, Store};

use crate::forge::{Directory, Header, SCOPE, SegmentFile, request};
use crate::place::replays;

/// Every segment that the store makes has this size.
const SEGMENT_BYTES: u64 = 192 << 10;

fn open(disk: &SimDisk, clock: &ManualClock, seed: u64) -> Store {
    let options = Options::new()
        .clock(Arc::new(clock.clone()))
        .durability(Durability::ProcessCrash)
        .retention(Retention::new(Duration::from_secs(3600), 0.001))
        .response_bytes_max(16_000)
        .segment_bytes(SEGMENT_BYTES);
    testing::open(disk.clone(), options, seed).unwrap()
}

fn key(id: impl std::fmt::Display) -> Key {
    Key::new(SCOPE, id.to_string()).unwrap()
}

/// Goes on from a segment of this number and position over the next four segments, twice: closed, and killed.
fn goes_on_from(number: u64, first_lsn: u64, until_token: u64) {
    let (clock, header) = (ManualClock::default(), Header { number, first_lsn, ..Header::first() });
    let mut file = SegmentFile::new(Header { oldest_live: number, synced_lsn: first_lsn, ..header });
    file.done("old", first_lsn);
    file.closed(first_lsn);
    let mut disk = Directory::store(number, &[file]).disk();
    let (mut written, mut largest) = (0, first_lsn);
    for opening in 0..4 {
        let store = open(&disk, &clock, opening);
        replays_forged(&store);
        for at in 0..60 {
            let at = 100 * opening + at;
            let Reserve::Fresh(owner) = store.reserve(&key(at), crate::place::request()).unwrap() else {
                panic!("{number} at {first_lsn}: key {at} is new")
            };
            assert!(owner.token().to_u64() > largest, "{number} at {first_lsn}: {} <= {largest}", owner.token());
            largest = owner.token().to_u64();
            assert_eq!(owner.complete(&[u8::try_from(at % 251).unwrap(); 15_000]).unwrap(), Completion::Done);
            written += 1;
        }
        for opening in 0..=opening {
            for at in (0..60).map(|at| 100 * opening + at) {
                replays(&store, &key(at), &[u8::try_from(at % 251).unwrap(); 15_000]);
            }
        }
        if opening % 2 == 0 {
            store.close(Duration::ZERO).unwrap();
        } else {
            disk = disk.kill();
        }
    }
    assert!(written == 240 && largest > until_token, "{number} at {first_lsn}: only up to {largest}");
}

fn replays_forged(store: &Store) {
    match store.reserve(&key("old"), request()).unwrap() {
        Reserve::Replay(response) => assert_eq!(response.body(), keyonce::Body::Kept(b"old")),
        other => panic!("{other:?}"),
    }
}

#[test]
fn positions_go_on_beyond_each_bound_of_32_bits() {
    // Bytes, units of eight bytes, and the sign bit of each.
    for bound in [1_u64 << 31, 1 << 32, 1 << 34, 1 << 35] {
        for before in [8192, SEGMENT_BYTES, 5 * SEGMENT_BYTES / 2] {
            let first_lsn = (bound - before) & !7;
            goes_on_from(1, first_lsn, bound);
        }
    }
}

#[test]
fn segment_numbers_go_on_beyond_each_bound_of_the_index_and_of_32_bits() {
    for bound in [1_u64 << 14, 1 << 15, 1 << 16, 1 << 17, 1 << 31, 1 << 32, 1 << 47] {
        for before in [1, 2, 5] {
            goes_on_from(bound - before, 1 << 20, 1 << 20);
        }
    }
}
