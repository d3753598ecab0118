//! Damage in a segment that is known from a hint, where more rests on the segment than a look at one key.

use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk, Storage as _};
use keyonce::{Completion, Fingerprint, Key, Reserve, Store};

use super::ring::{START_MS, options};

fn key(at: usize) -> Key {
    Key::new("enemy", format!("key {at}")).unwrap()
}

fn request() -> Fingerprint {
    Fingerprint::of("request")
}

fn body(at: usize) -> Vec<u8> {
    vec![u8::try_from(at).unwrap(); 9000]
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

/// A killed store of a few segments; key 40 is in the second of them, and its response is damaged.
fn damaged(clock: &ManualClock, spoil: bool) -> SimDisk {
    let disk = SimDisk::new();
    let store = testing::open(disk.clone(), options(clock), 1).unwrap();
    for at in 1..90 {
        let Reserve::Fresh(owner) = store.reserve(&key(at), request()).unwrap() else { panic!("{at} is new") };
        if at % 10 == 0 && at != 40 {
            owner.interrupt();
        } else {
            assert_eq!(owner.complete(&body(at)).unwrap(), Completion::Done);
        }
    }
    store.sync().unwrap();
    let disk = disk.kill();
    drop(store);
    let (segment, offset) = disk
        .list()
        .unwrap()
        .into_iter()
        .filter(|name| name.starts_with("segment-"))
        .find_map(|name| Some((name.clone(), find(&disk.read(&name, 1 << 20).unwrap(), &body(40)[..64])?)))
        .unwrap();
    let hint = segment.replace("segment", "hint");
    assert!(disk.list().unwrap().contains(&hint), "{:?}", disk.list());
    if spoil {
        disk.damage(&segment, |bytes| bytes[offset] ^= 1);
    }
    disk
}

fn segment_files(disk: &SimDisk) -> usize {
    disk.list().unwrap().iter().filter(|name| name.starts_with("segment-")).count()
}

#[test]
fn damage_that_a_hint_passes_over_is_not_left_out_when_all_is_copied() {
    let clock = ManualClock::new(START_MS);
    let mut disk = damaged(&clock, true);
    for opening in 0..16_500 {
        match testing::open(disk.clone(), options(&clock), opening + 2) {
            Ok(store) => drop(store),
            Err(error) => {
                assert_eq!(error.kind(), keyonce::ErrorKind::Corrupt);
                eprintln!("refused at {opening}: {error}");
                return;
            }
        }
        disk = disk.kill();
    }
    let store: Store = testing::open(disk.clone(), options(&clock), 2).unwrap();
    let told = store.peek(&key(40));
    assert!(told.is_err(), "the key whose record is damaged: {told:?}");
}

#[test]
fn a_damaged_record_that_is_past_its_use_does_not_stop_the_ring() {
    let mut counts = Vec::new();
    for spoil in [false, true] {
        let clock = ManualClock::new(START_MS);
        let disk = damaged(&clock, spoil);
        let store = testing::open(disk.clone(), options(&clock), 2).unwrap();
        assert!(store.opened().hints > 0);
        clock.advance(Duration::from_secs(120));
        for at in 0..400 {
            let Reserve::Fresh(owner) = store.reserve(&key(1000 + at), request()).unwrap() else { panic!() };
            assert_eq!(owner.complete(&body(200)).unwrap(), Completion::Done);
            clock.advance(Duration::from_secs(2));
        }
        counts.push((segment_files(&disk), store.stats().segments, store.health()));
    }
    eprintln!("{counts:?}");
    assert_eq!(counts[0].0, counts[1].0, "{counts:?}");
}
