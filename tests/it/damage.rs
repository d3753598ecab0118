//! What is said of a store whose bytes were changed or lost: the place, or nothing where nothing counts; never a wrong
//! answer.

mod bits;
mod headers;
mod lengths;
mod lives;
mod small;

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk, Storage as _};
use keyonce::{Completion, ErrorKind, Key, Reserve, Store};

use crate::place::{
    EVERYWHERE, Place, Setting, copy_files, everywhere, fresh, key, replays, reserve, snapshot, tell, tree,
};

/// Row D8: a segment of the live chain that is missing, cut, or empty.
#[test]
fn a_segment_that_is_missing_in_the_middle_is_corruption_and_nothing_changes() {
    let place = Place::new(EVERYWHERE[2]);
    let store = place.open();
    let mut at = 0;
    while store.stats().segments < 4 {
        assert_eq!(fresh(&store, &key(at.to_string())).complete(&[1; 6000]).unwrap(), Completion::Done);
        at += 1;
    }
    drop(store);
    let mut segments: Vec<_> = fs::read_dir(place.dir()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    segments.retain(|name| name.to_string_lossy().starts_with("segment-"));
    segments.sort();
    type Spoil = fn(&Path);
    let spoils: [(&str, Spoil); 4] = [
        ("removed", |path| fs::remove_file(path).unwrap()),
        ("emptied", |path| fs::write(path, "").unwrap()),
        ("one byte", |path| fs::write(path, [0]).unwrap()),
        ("headers only", |path| {
            let bytes = fs::read(path).unwrap();
            fs::write(path, &bytes[..8192]).unwrap();
        }),
    ];
    for segment in &segments[..3] {
        for (what, spoil) in spoils {
            let dir = place.root().join("spoiled");
            copy_files(&place.dir(), &dir);
            spoil(&dir.join(segment));
            let before = tree(&dir);
            let error = Store::open(&dir, place.options()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{segment:?} {what}: {error}");
            assert!(tree(&dir) == before, "{segment:?} {what}: something changed");
            fs::remove_dir_all(&dir).unwrap();
        }
    }
}

/// A small store that was closed, as a disk and as what every one of its keys is answered.
struct Closed {
    disk: SimDisk,
    clock: ManualClock,
    setting: Setting,
    /// Every key with its state, in the order of the log.
    keys: Vec<Key>,
    answers: Vec<String>,
    /// Where the first record of the first key stands, in the first segment.
    start: usize,
    /// For each key the place behind its last record.
    ends: Vec<usize>,
}

const KEYS: usize = 8;

impl Closed {
    /// `fillers` keys of five kilobytes come first: with twenty the segment is more than half full, and its successor
    /// is prepared, whose header knows how far the log was synced.
    fn new(setting: Setting, fillers: usize) -> Self {
        let (disk, clock) = (SimDisk::new(), ManualClock::default());
        let store = testing::open(disk.clone(), setting.options(&clock), 1).unwrap();
        for at in 0..fillers {
            assert_eq!(fresh(&store, &key(format!("filler {at}"))).complete(&[1; 5000]).unwrap(), Completion::Done);
        }
        let keys: Vec<_> = (0..KEYS).map(|at| key(at.to_string())).collect();
        let mut starts = Vec::new();
        for (at, key) in (0_u8..).zip(&keys) {
            let owner = fresh(&store, key);
            // The first segment begins at LSN 0, so a token is a place in its file.
            starts.push(usize::try_from(owner.token().to_u64()).unwrap());
            match at % 4 {
                0 | 1 => assert_eq!(owner.complete(&[at; 30]).unwrap(), Completion::Done),
                2 => assert_eq!(owner.complete_without_body(b"row").unwrap(), Completion::Done),
                _ => drop(owner),
            }
        }
        let marker = fresh(&store, &crate::place::key("marker"));
        let end = usize::try_from(marker.token().to_u64()).unwrap();
        assert_eq!(marker.release().unwrap(), Completion::Done);
        store.close(Duration::ZERO).unwrap();
        drop(store);
        let ends = starts.iter().copied().skip(1).chain([end]).collect();
        let mut closed = Self { disk, clock, setting, keys, answers: Vec::new(), start: starts[0], ends };
        let whole = closed.open(&closed.disk.kill()).unwrap();
        closed.answers = closed.keys.iter().map(|key| closed.ask(&whole, key)).collect();
        closed
    }

    fn open(&self, disk: &SimDisk) -> Result<Store, keyonce::Error> {
        testing::open(disk.clone(), self.setting.options(&self.clock), 99)
    }

    fn ask(&self, store: &Store, key: &Key) -> String {
        let body = match reserve(store, key) {
            Reserve::Replay(response) => format!("{:?}", response.body()),
            Reserve::Fresh(owner) => {
                assert_eq!(owner.release().unwrap(), Completion::Done);
                "absent".to_owned()
            }
            _ => String::new(),
        };
        format!("{body} {}", snapshot(store, key))
    }

    fn files(&self) -> Vec<(String, usize)> {
        let names = self.disk.list().unwrap();
        let bytes_max = 1 << 20;
        names.into_iter().map(|name| (name.clone(), self.disk.read(&name, bytes_max).unwrap().len())).collect()
    }

    fn bytes(&self, disk: &SimDisk) -> Vec<(String, Vec<u8>)> {
        disk.list().unwrap().into_iter().map(|name| (name.clone(), disk.read(&name, 1 << 20).unwrap())).collect()
    }

    /// The last byte of the log that was ever written, with the end mark and some room behind it.
    fn used(&self) -> usize {
        self.ends.last().unwrap() + 512
    }
}

/// The places to damage: every one that was written, and each 509th of the rest.
///
/// The blocks of the two headers are zero behind 256 bytes, and nothing lies behind the end mark: what no check covers
/// is sampled at a prime distance, since 200 000 openings would take an hour.
fn places(name: &str, bytes: usize, used: usize) -> Vec<usize> {
    let written = |at: &usize| {
        !name.starts_with("segment-")
            || at % 4096 < 256 && *at < 8192
            || (8192..used).contains(at)
            || at.is_multiple_of(509)
    };
    (0..bytes).filter(written).collect()
}

/// Row D1. Opening says where the damage is, or the damage hit nothing that is still needed; no answer is ever wrong.
#[test]
fn a_flipped_bit_in_any_byte_of_a_closed_store_is_told_or_hits_nothing_that_counts() {
    let closed = Closed::new(EVERYWHERE[0], 0);
    let cases: Vec<(String, usize)> = closed
        .files()
        .iter()
        .flat_map(|(name, bytes)| places(name, *bytes, closed.used()).into_iter().map(|at| (name.clone(), at)))
        .collect();
    let half = cases.len() / 2;
    let (told, harmless) = thread::scope(|threads| {
        let other = threads.spawn(|| flip_each(&closed, &cases[half..]));
        let (told, harmless) = flip_each(&closed, &cases[..half]);
        let (more_told, more_harmless) = other.join().unwrap();
        (told + more_told, harmless + more_harmless)
    });
    tell(&format!("flipped bits: {} places, {told} told, {harmless} hit nothing that counts", cases.len()));
    assert!(told > 2000 && harmless > 500, "{told} told, {harmless} harmless");
}

fn flip_each(closed: &Closed, cases: &[(String, usize)]) -> (usize, usize) {
    let (mut told, mut harmless) = (0, 0);
    for (name, at) in cases {
        let disk = closed.disk.kill();
        disk.damage(name, |bytes| bytes[*at] ^= 1 << (at % 8));
        let before = disk.steps();
        match closed.open(&disk) {
            Ok(store) => {
                harmless += 1;
                for (key, answer) in closed.keys.iter().zip(&closed.answers) {
                    assert_eq!(&closed.ask(&store, key), answer, "{name} byte {at}");
                }
            }
            Err(error) => {
                told += 1;
                let said = error.to_string();
                let kinds = [ErrorKind::Corrupt, ErrorKind::ForeignDirectory];
                assert!(kinds.contains(&error.kind()), "{name} byte {at}: {said}");
                assert!(said.contains(name), "{name} byte {at}: {said}");
                assert_eq!(disk.steps(), before, "{name} byte {at}: an opening that fails changes nothing");
                if name.starts_with("segment-") && *at >= 8192 {
                    let place: usize =
                        said.split("at byte ").nth(1).unwrap().split(':').next().unwrap().parse().unwrap();
                    assert!(place <= *at && *at < place + 400, "{name} byte {at}: {said}");
                }
            }
        }
    }
    (told, harmless)
}

/// Row D2. What lay before the cut is there, and what is known to have been on the disk is missed. What is known is
/// what other records and headers say: in a single segment a cut takes that away with the rest, as a power loss would.
#[test]
fn a_log_that_was_cut_at_any_byte_keeps_what_lay_before_the_cut_or_is_refused_untouched() {
    // Behind the fillers the cuts meet the same records again, so every seventh byte will do.
    for (fillers, step, opened_min, refused_min) in [(0, 1, 1500, 1), (20, 7, 200, 50)] {
        let (opened, refused) = cut_at_each(&Closed::new(EVERYWHERE[0], fillers), step);
        tell(&format!("cuts behind {fillers} fillers: {opened} opened, {refused} refused"));
        assert!(
            opened >= opened_min && refused >= refused_min,
            "{fillers} fillers: {opened} opened, {refused} refused"
        );
    }
}

/// Cuts the log of the eight keys at each `step`-th byte, and the rest of the file, where nothing new can be met, at
/// each 1021st.
fn cut_at_each(closed: &Closed, step: usize) -> (usize, usize) {
    let files = closed.files();
    let (name, bytes) = files.iter().find(|(name, _)| name.starts_with("segment-")).unwrap();
    let (mut opened, mut refused) = (0, 0);
    let cuts = (closed.start..closed.used()).step_by(step).chain((0..*bytes).step_by(1021));
    let mut cuts: Vec<_> = cuts.collect();
    cuts.sort_unstable();
    for cut in cuts {
        let disk = closed.disk.kill();
        disk.damage(name, |bytes| bytes.truncate(cut));
        let before = closed.bytes(&disk);
        match closed.open(&disk) {
            Ok(store) => {
                opened += 1;
                let mut lost = false;
                for ((key, answer), end) in closed.keys.iter().zip(&closed.answers).zip(&closed.ends) {
                    let now = closed.ask(&store, key);
                    if *end <= cut {
                        assert_eq!(&now, answer, "cut at {cut}, behind {key:?} which ends at {end}");
                    } else if &now != answer {
                        // The one that was cut through is interrupted or gone; those behind it are gone.
                        assert!(
                            now.contains("Interrupted") && !lost || now.starts_with("absent"),
                            "cut at {cut}: {now}"
                        );
                        lost = true;
                    }
                }
            }
            Err(error) => {
                refused += 1;
                assert!(opened == 0, "cut at {cut}: refused, although an earlier cut was not");
                assert_eq!(error.kind(), ErrorKind::Corrupt, "cut at {cut}: {error}");
                assert!(error.to_string().contains(name.as_str()) || cut < 8192, "cut at {cut}: {error}");
                assert!(closed.bytes(&disk) == before, "cut at {cut}: something changed");
            }
        }
    }
    (opened, refused)
}

/// The same on a real directory, at each level and append mode, at a distance of 997 bytes: a file is opened, mapped
/// and refused as the simulated disk says.
#[test]
fn a_flipped_bit_on_a_real_disk_is_told_with_every_byte_untouched() {
    everywhere(|place| {
        let store = place.open();
        for at in 0..KEYS {
            assert_eq!(fresh(&store, &key(at.to_string())).complete(&[7; 100]).unwrap(), Completion::Done);
        }
        drop(store);
        for entry in fs::read_dir(place.dir()).unwrap() {
            let name = entry.unwrap().file_name();
            let bytes = fs::read(place.dir().join(&name)).unwrap().len();
            for at in (0..bytes.min(16_000)).step_by(997) {
                let dir = place.root().join("damaged");
                copy_files(&place.dir(), &dir);
                let mut damaged = fs::read(dir.join(&name)).unwrap();
                damaged[at] ^= 1 << (at % 8);
                fs::write(dir.join(&name), damaged).unwrap();
                let before = tree(&dir);
                match Store::open(&dir, place.options()) {
                    Ok(store) => {
                        for at in 0..KEYS {
                            replays(&store, &key(at.to_string()), &[7; 100]);
                        }
                    }
                    Err(error) => {
                        assert!(error.to_string().contains(name.to_str().unwrap()), "{name:?} byte {at}: {error}");
                        assert!(tree(&dir) == before, "{name:?} byte {at}: something changed");
                    }
                }
                fs::remove_dir_all(&dir).unwrap();
            }
        }
    });
}
