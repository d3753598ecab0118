//! Hints: an opening by them finds what reading the segments would find, whatever became of them; and how an opening
//! tells how far it has come.

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};

use keyonce::testing::{self, ManualClock, SimDisk, Storage as _};
use keyonce::{Body, Completion, Error, ErrorKind, Fingerprint, Key, KeyState, Options, Progress, Reserve, Store};

use super::forge::check_of;
use super::place::tree;
use super::ring::{START_MS, options};

const KEYS: usize = 144;

fn key(at: usize) -> Key {
    Key::new("hints", format!("key {at}")).unwrap()
}

fn request(at: usize) -> Fingerprint {
    Fingerprint::of(format!("request {at}"))
}

/// A store with a few segments that have ended, of which most keys are done.
struct Ended {
    disk: SimDisk,
    clock: ManualClock,
}

impl Ended {
    /// `end` closes the store, or leaves it as a kill does.
    fn new(end: impl FnOnce(&Store)) -> Self {
        let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
        let store = testing::open(disk.clone(), options(&clock), 1).unwrap();
        let mut held = Vec::new();
        for at in 0..KEYS {
            let Reserve::Fresh(owner) = store.reserve(&key(at), request(at)).unwrap() else { panic!("{at} is new") };
            match at % 9 {
                0 => drop(owner),
                1 => assert_eq!(owner.release().unwrap(), Completion::Done),
                2 => held.push(owner),
                3 => assert_eq!(owner.complete_without_body(b"row 7").unwrap(), Completion::Done),
                _ => assert_eq!(owner.complete(&body(at)).unwrap(), Completion::Done),
            }
        }
        store.sync().unwrap();
        end(&store);
        let disk = disk.kill();
        drop((held, store));
        let ended = Self { disk, clock };
        assert!(ended.hints().len() >= 3, "{:?}", ended.disk.list());
        ended
    }

    fn hints(&self) -> Vec<String> {
        self.disk.list().unwrap().into_iter().filter(|name| name.starts_with("hint-")).collect()
    }

    fn open(&self, disk: &SimDisk) -> Result<Store, Error> {
        testing::open(disk.clone(), options(&self.clock), 2)
    }

    /// What the store says of all its keys, and how many segments it knew from hints.
    fn answers(&self, disk: &SimDisk) -> (Vec<String>, u64) {
        let store = self.open(disk).unwrap();
        let report = store.opened().clone();
        let counts = format!("{} keys, {} interrupted", report.keys, report.interrupted);
        let told = (0..KEYS).map(|at| {
            let info = store.peek(&key(at)).unwrap();
            let mismatch = store.reserve(&key(at), Fingerprint::of("another")).unwrap();
            let other = matches!(mismatch, Reserve::Mismatch(_));
            assert_eq!(other, info.is_some(), "key {at} stands for one request");
            drop(mismatch);
            let told = match store.reserve(&key(at), request(at)).unwrap() {
                Reserve::Replay(response) => format!("{:?}", response.body()),
                _ => String::new(),
            };
            format!("{at}: {:?} {told}", info.map(|info| (info.state, info.token, info.attempt)))
        });
        (std::iter::once(counts).chain(told).collect(), report.hints)
    }
}

fn body(at: usize) -> Vec<u8> {
    vec![u8::try_from(at).unwrap(); 9000]
}

#[test]
fn an_opening_by_hints_finds_what_reading_finds_whatever_became_of_them() {
    let closed: fn(&Store) = |store| assert!(store.close(std::time::Duration::ZERO).is_ok());
    let killed: fn(&Store) = |_| {};
    for end in [closed, killed] {
        let ended = Ended::new(end);
        let hints = ended.hints();
        let without = ended.disk.kill();
        hints.iter().for_each(|name| without.remove(name).unwrap());
        let (expected, none) = ended.answers(&without);
        assert_eq!(none, 0);
        let (told, known) = ended.answers(&ended.disk.kill());
        assert_eq!((told, known >= 2), (expected.clone(), true), "{known} of {hints:?}");

        let same_without = |what: &str, spoiled: &SimDisk, fewer: u64| {
            let (told, now_known) = ended.answers(spoiled);
            assert!(told == expected, "{what}");
            assert!(now_known + fewer >= known && now_known <= known, "{what}: {now_known} of {known} hints");
            now_known
        };
        for name in &hints {
            let bytes = ended.disk.read(name, 1 << 20).unwrap();
            for cut in [0, 1, 79, 80, bytes.len() - 18, bytes.len() - 1] {
                let spoiled = ended.disk.kill();
                spoiled.damage(name, |bytes| bytes.truncate(cut));
                same_without(&format!("{name} cut at {cut}"), &spoiled, 1);
            }
            let spoiled = ended.disk.kill();
            spoiled.damage(name, |bytes| bytes.push(0));
            same_without(&format!("{name} grown"), &spoiled, 1);
        }
        let (one, other) = (&hints[0], &hints[1]);
        let spoiled = ended.disk.kill();
        let of_other = ended.disk.read(other, 1 << 20).unwrap();
        spoiled.damage(one, |bytes| *bytes = of_other);
        assert_eq!(same_without("the hint of another segment", &spoiled, 1), known - 1);
    }
}

/// Where the store file tells the seed of the key hash, and its check.
const SEED_AT: usize = 32;
const CHECK_AT: usize = 508;

#[test]
fn a_hint_that_was_made_under_another_hash_seed_is_not_believed() {
    let ended = Ended::new(|_| {});
    let (expected, known) = ended.answers(&ended.disk.kill());
    assert!(known >= 2, "{known}");
    let other = ended.disk.kill();
    other.damage("keyonce.store", |bytes| {
        bytes[SEED_AT] ^= 1;
        let check = check_of(&bytes[..CHECK_AT]);
        bytes[CHECK_AT..].copy_from_slice(&check);
    });
    let (told, believed) = ended.answers(&other);
    assert!(told == expected, "the segments say what they said");
    assert_eq!(believed, 0);
}

#[test]
fn no_flipped_bit_of_a_hint_changes_an_answer() {
    let ended = Ended::new(|_| {});
    let name = &ended.hints()[1];
    let (expected, known) = ended.answers(&ended.disk.kill());
    let bits = 8 * ended.disk.read(name, 1 << 20).unwrap().len();
    for bit in (0..bits).step_by(29) {
        let spoiled = ended.disk.kill();
        spoiled.damage(name, |bytes| bytes[bit / 8] ^= 1 << (bit % 8));
        let (told, now_known) = ended.answers(&spoiled);
        assert!(told == expected && now_known == known - 1, "bit {bit}: {now_known} of {known} hints");
    }
}

#[test]
fn a_record_that_is_known_from_a_hint_is_checked_when_it_is_first_used() {
    let ended = Ended::new(|_| {});
    let (expected, _) = ended.answers(&ended.disk.kill());
    let segment = ended.hints()[1].replace("hint", "segment");
    let at = body_in(&ended.disk, &segment);
    let spoiled = ended.disk.kill();
    let offset = find(&spoiled.read(&segment, 1 << 20).unwrap(), &body(at)[..64]);
    spoiled.damage(&segment, |bytes| bytes[offset] ^= 1);

    let store = ended.open(&spoiled).unwrap();
    for _ in 0..2 {
        for error in [
            store.reserve(&key(at), request(at)).unwrap_err(),
            store.reserve(&key(at), Fingerprint::of("another")).unwrap_err(),
            store.peek(&key(at)).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            assert!(error.to_string().contains(&segment), "{error}");
        }
    }
    assert_eq!(store.keys().filter(|told| told.is_err()).count(), 1);
    for other in (0..KEYS).filter(|other| *other != at) {
        let info = store.peek(&key(other)).unwrap();
        let told = format!("{other}: {:?}", info.map(|info| (info.state, info.token, info.attempt)));
        assert!(expected[other + 1].starts_with(&told), "{told}");
    }
    drop(store);
    // Who reads the segment itself sees the damage at once.
    let read = spoiled.kill();
    ended.hints().iter().for_each(|name| read.remove(name).unwrap());
    assert_eq!(ended.open(&read).unwrap_err().kind(), ErrorKind::Corrupt);
}

/// A key whose response lies in the segment.
fn body_in(disk: &SimDisk, segment: &str) -> usize {
    let bytes = disk.read(segment, 1 << 20).unwrap();
    let holds = |at: &usize| bytes.windows(64).any(|window| window == &body(*at)[..64]);
    (4..KEYS).step_by(9).filter(holds).nth(1).expect("the segment holds a response, and not at its start")
}

fn find(bytes: &[u8], what: &[u8]) -> usize {
    bytes.windows(what.len()).position(|window| window == what).unwrap()
}

#[test]
fn a_hint_whose_segment_never_reached_the_disk_brings_nothing_back_and_hides_nothing() {
    let clock = ManualClock::new(START_MS);
    let options = || options(&clock).durability(keyonce::Durability::ProcessCrash);
    let disk = SimDisk::new();
    let store = testing::open(disk.clone(), options(), 1).unwrap();
    let reserve = |at| {
        let Reserve::Fresh(owner) = store.reserve(&key(at), request(at)).unwrap() else { panic!("{at} is new") };
        owner
    };
    let owners: Vec<_> = (0..KEYS).map(reserve).collect();
    store.sync().unwrap();
    disk.record();
    for (at, owner) in owners.into_iter().enumerate() {
        assert_eq!(owner.complete(&body(at)).unwrap(), Completion::Done);
    }
    store.sync().unwrap();
    let later = disk.kill();
    drop(store);
    let hints: Vec<_> = later.list().unwrap().into_iter().filter(|name| name.starts_with("hint-")).collect();
    let (mut lost, mut met) = (0, 0);
    // The end of a segment may have reached the disk, and what lies before it not.
    let images = disk.moments().flat_map(|moment| moment.images(8).chain([moment.crash_all_old()]));
    for image in images {
        let names = image.list().unwrap();
        for name in hints.iter().filter(|name| names.contains(&name.replace("hint", "segment"))) {
            image.leave(name, &later.read(name, 1 << 20).unwrap()).unwrap();
            met += 1;
        }
        let store = testing::open(image, options(), 2).unwrap();
        for at in 0..KEYS {
            match store.reserve(&key(at), request(at)).unwrap() {
                Reserve::Replay(response) => assert_eq!(response.body(), Body::Kept(&body(at))),
                // The reservation was on the disk.
                Reserve::Interrupted(_) => lost += 1,
                other => panic!("key {at}: {other:?}"),
            }
        }
    }
    assert!(met > 50 && lost > 50, "{met} hints were left, {lost} results were lost");
}

#[test]
fn a_long_log_is_read_by_several_threads_with_the_same_result() {
    let root = tempfile::tempdir().unwrap();
    let clock = ManualClock::new(START_MS);
    let options = Options::new().clock(Arc::new(clock.clone())).durability(keyonce::Durability::ProcessCrash);
    let options = options.segment_bytes(8 << 20);
    let store = Store::open(root.path().join("store"), options.clone()).unwrap();
    let many = 800;
    for round in 0..2 {
        for at in 0..many {
            let Reserve::Fresh(owner) = store.reserve(&key(at), request(at)).unwrap() else { panic!("{at} is free") };
            if round == 1 {
                assert_eq!(owner.complete(&vec![u8::try_from(at % 251).unwrap(); 90_000]).unwrap(), Completion::Done);
            } else {
                assert_eq!(owner.save_checkpoint(&[1; 50]).unwrap(), Completion::Done);
                assert_eq!(owner.release().unwrap(), Completion::Done);
            }
        }
    }
    store.close(std::time::Duration::ZERO).unwrap();
    drop(store);
    for hinted in [true, false, true] {
        if !hinted {
            for entry in std::fs::read_dir(root.path().join("store")).unwrap() {
                let path = entry.unwrap().path();
                if path.file_name().unwrap().to_string_lossy().starts_with("hint-") {
                    std::fs::remove_file(path).unwrap();
                }
            }
        }
        let store = Store::open(root.path().join("store"), options.clone()).unwrap();
        assert_eq!(store.opened().hints > 3, hinted, "{:?}", store.opened());
        assert_eq!(store.opened().keys, 800);
        for at in 0..many {
            let info = store.peek(&key(at)).unwrap().unwrap();
            assert_eq!((info.state, info.attempt), (KeyState::Done, 1), "key {at}");
        }
        // What is missing is made anew in the background, one hint after the other.
        let is_hint = |name: &str| name.starts_with("hint-");
        let hints = || names_in(&root.path().join("store")).iter().filter(|name| is_hint(name)).count();
        let began = super::tasks::machine_now();
        while hints() < 6 {
            assert!(began.elapsed() < std::time::Duration::from_secs(120), "{} hints were made anew", hints());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        store.close(std::time::Duration::ZERO).unwrap();
    }
}

fn names_in(dir: &std::path::Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn an_opening_tells_how_far_it_has_come_and_can_be_called_off() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("store");
    let clock = ManualClock::new(START_MS);
    let store = Store::open(&dir, options(&clock)).unwrap();
    for at in 0..KEYS {
        let Reserve::Fresh(owner) = store.reserve(&key(at), request(at)).unwrap() else { panic!("{at} is new") };
        assert_eq!(owner.complete(&body(at)).unwrap(), Completion::Done);
    }
    store.close(std::time::Duration::ZERO).unwrap();
    drop(store);
    let before = tree(&dir);
    let told: Arc<Mutex<Vec<Progress>>> = Arc::default();
    let listener = |stop_at: usize| {
        let told = Arc::clone(&told);
        move |progress: &Progress| {
            let mut told = told.lock().unwrap();
            told.push(*progress);
            if told.len() > stop_at { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        }
    };
    for stop_at in 0..3 {
        let error = Store::open(&dir, options(&clock).progress(listener(stop_at))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled);
        assert!(tree(&dir) == before, "a byte changed");
        assert_eq!(std::mem::take(&mut *told.lock().unwrap()).len(), stop_at + 1);
    }
    drop(Store::open(&dir, options(&clock).progress(listener(usize::MAX))).unwrap());
    let told = told.lock().unwrap();
    assert_eq!(told[0].bytes_read, 0);
    assert!(told.is_sorted_by_key(|progress| progress.bytes_read));
    assert!(told.iter().all(|progress| progress.bytes_read <= progress.bytes && progress.bytes > 0));
    assert!(told.len() > 3, "{told:?}");
}
