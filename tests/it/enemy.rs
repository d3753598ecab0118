//! Damage in a segment that is known from a hint, where more rests on the segment than a look at one key.

#![expect(unsafe_code, reason = "mlockall is unsafe")]

use std::process::Command;
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

const LOCKED_DIR: &str = "KEYONCE_LOCKED_DIR";

/// A service that never pages: all its memory is locked, mappings too.
#[test]
fn a_process_that_locks_its_memory_goes_on_when_segments_roll() {
    if let Some(dir) = std::env::var_os(LOCKED_DIR) {
        // SAFETY: it changes no memory.
        let locked = unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) };
        assert_eq!(locked, 0, "{}", std::io::Error::last_os_error());
        let options = options(&ManualClock::new(START_MS));
        let store = Store::open(dir, options).unwrap();
        for at in 0..200 {
            let Reserve::Fresh(owner) = store.reserve(&key(at), request()).unwrap() else { panic!("{at} is new") };
            assert_eq!(owner.complete(&body(1)).unwrap(), Completion::Done);
            std::thread::sleep(Duration::from_millis(2));
        }
        store.sync().unwrap();
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "enemy::a_process_that_locks_its_memory_goes_on_when_segments_roll", "--nocapture"])
        .env(LOCKED_DIR, root.path().join("store"))
        .env("RUST_BACKTRACE", "0")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}

/// A hint with a sound digest that says of a done key that it was released: the key was forgotten since.
#[test]
fn a_hint_that_is_made_up_miscounts_at_most() {
    let clock = ManualClock::new(START_MS);
    let disk = SimDisk::new();
    let store = testing::open(disk.clone(), options(&clock), 1).unwrap();
    for at in 1..60 {
        let Reserve::Fresh(owner) = store.reserve(&key(at), request()).unwrap() else { panic!("{at} is new") };
        assert_eq!(owner.complete(&body(at)).unwrap(), Completion::Done);
        assert!(store.forget(&key(at), "why not").unwrap());
    }
    store.sync().unwrap();
    let disk = disk.kill();
    drop(store);
    let seed = disk.read("keyonce.store", 512).unwrap()[32..48].to_vec();
    for name in disk.list().unwrap().into_iter().filter(|name| name.starts_with("hint-")) {
        disk.damage(&name, |bytes| {
            for entry in bytes[80..].chunks_mut(18).filter(|entry| entry[17] == 3) {
                entry[17] = 4;
            }
            let digest = blake3::hash(&[&seed, &bytes[..64], &bytes[80..]].concat());
            bytes[64..80].copy_from_slice(&digest.as_bytes()[..16]);
        });
    }
    let store = testing::open(disk.clone(), options(&clock), 2).unwrap();
    assert!(store.opened().hints > 0);
    eprintln!("{:?}", store.opened());
}

/// A store that lost its hints, as a backup may: the helper makes them anew, and nobody waits for all of them.
#[test]
fn tasks_and_closing_do_not_wait_for_all_the_hints_that_are_made_anew() {
    use super::tasks::block_on;
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("store");
    let options = keyonce::Options::new().durability(keyonce::Durability::ProcessCrash).segment_bytes(4 << 20);
    let store = Store::open(&dir, options.clone()).unwrap();
    let large = vec![7; 1 << 20];
    for at in 0..180 {
        let Reserve::Fresh(owner) = store.reserve(&key(at), request()).unwrap() else { panic!("{at} is new") };
        assert_eq!(owner.complete(&large).unwrap(), Completion::Done);
    }
    store.close(Duration::ZERO).unwrap();
    drop(store);
    let remove_hints = || {
        for entry in std::fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().unwrap().to_string_lossy().starts_with("hint-") {
                std::fs::remove_file(path).unwrap();
            }
        }
    };
    let mut longest = Vec::new();
    for hinted in [true, false] {
        if !hinted {
            remove_hints();
        }
        let store = Store::open(&dir, options.clone()).unwrap();
        assert_eq!(store.opened().hints > 20, hinted);
        let mut most = Duration::ZERO;
        for at in 0..8 {
            let key = Key::new(if hinted { "a" } else { "b" }, at.to_string()).unwrap();
            let begin = crate::tasks::machine_now();
            let Reserve::Fresh(owner) = block_on(store.reserve_async(&key, request())).unwrap() else { panic!() };
            assert_eq!(block_on(owner.complete_async(&large)).unwrap(), Completion::Done);
            most = most.max(begin.elapsed());
        }
        longest.push(most);
        store.close(Duration::ZERO).unwrap();
    }
    remove_hints();
    let store = Store::open(&dir, options).unwrap();
    let begin = crate::tasks::machine_now();
    store.close(Duration::ZERO).unwrap();
    let closing = begin.elapsed();
    eprintln!("longest with hints, without: {longest:?}; closing at once without: {closing:?}");
    assert!(longest[1] < 4 * longest[0] + Duration::from_secs(1) && closing < Duration::from_secs(1));
}
