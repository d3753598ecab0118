//! Directories that somebody made up, checks and all: lengths that nobody has memory for, places that no log comes to.
//! Opening refuses them and changes nothing, or goes on as from any other; and what it allocates is counted.
//!
//! With the variable `KEYONCE_HOSTILE_CASE` set to the name of a case it is the only one.
//!
//! A binary of its own, with one test: the allocator counts for the whole process. CRCs keep nobody from writing such
//! files; what must hold is that they do no more harm than the loss of what they hold.
#![cfg(not(loom))]
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that cannot go on should panic")]

use std::sync::Arc;
use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk, Storage as _};
use keyonce::{Completion, Error, ErrorKind, Fingerprint, Key, Options, Reserve, Retention, Store};
use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// The index as planned, a segment to write, and the page cache's copy of it.
const FIXED_BYTES: usize = 4 << 20;
/// What is read of a segment, and what is noted of its records.
const PER_BYTE: usize = 3;
/// What is known of a file, however short.
const PER_FILE_BYTES: usize = 1 << 10;

const BLOCK: usize = 4096;
const DATA_START: usize = 8192;
/// The kind of record of whose body no byte is covered.
const PAD: u8 = 19;
/// How long the record is that ends a run.
const CLOSED_BYTES: usize = 72;
const STORE_FILE: &str = "keyonce.store";

fn options() -> Options {
    Options::new()
        .retention(Retention::new(Duration::from_secs(60), 1.0))
        .response_bytes_max(1000)
        .clock(Arc::new(ManualClock::default()))
}

fn segment(index: u32) -> String {
    format!("segment-{index:08x}.keyonce")
}

/// A store that was closed, opened and closed again. The first segment is full enough to stay: the log has two.
fn base() -> SimDisk {
    let disk = SimDisk::new();
    for seed in 1..=2_u64 {
        let store = testing::open(disk.clone(), options(), seed).unwrap();
        for number in 0..if seed == 1 { 80 } else { 3 } {
            let key = Key::new("charges", format!("{seed}-{number}")).unwrap();
            let Reserve::Fresh(guard) = store.reserve(&key, Fingerprint::of("9.99")).unwrap() else { panic!() };
            assert_eq!(guard.complete(&[7; 900]).unwrap(), Completion::Done);
        }
        store.close(Duration::ZERO).unwrap();
    }
    disk.kill()
}

fn crc(start: u32, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(start);
    hasher.update(bytes);
    hasher.finalize()
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Sets a field of both header copies, and makes their checks hold.
fn set_in_header(bytes: &mut [u8], at: usize, value: u64) {
    for start in [0, BLOCK] {
        bytes[start + at..start + at + 8].copy_from_slice(&value.to_le_bytes());
        let check = crc(0, &bytes[start..start + 252]);
        bytes[start + 252..start + 256].copy_from_slice(&check.to_le_bytes());
    }
}

/// Writes a record of which kind and length are given, and of whose body the first bytes; the checks hold as far as the
/// file goes.
fn put_record(file: &mut [u8], at: usize, kind: u8, units: u32, body: &[u8]) {
    let (first_lsn, salt) = (u64_at(file, 72), u64_at(file, 136));
    let word = (u32::from(kind) << 24 | units).to_le_bytes();
    let behind = 1_u32.to_le_bytes();
    let lsn = (first_lsn + at as u64).to_le_bytes();
    let low = u32::try_from(salt & 0xFFFF_FFFF).unwrap();
    let high = u32::try_from(salt >> 32).unwrap();
    let head = crc(low, &[&word[..], &behind, &lsn].concat());
    file[at + 16..at + 16 + body.len()].copy_from_slice(body);
    let end = if kind == PAD { at + 16 } else { (at + units as usize * 8).min(file.len()) };
    let checksum = crc(0, &file[at + 16..end]) ^ head ^ high;
    let bytes = [checksum.to_le_bytes(), word, head.to_le_bytes(), behind].concat();
    file[at..at + 16].copy_from_slice(&bytes);
}

/// The segment file whose number is the largest.
fn newest(disk: &SimDisk) -> String {
    let names = disk.list().unwrap().into_iter().filter(|name| name.starts_with("segment-"));
    names.max_by_key(|name| u64_at(&disk.read(name, usize::MAX).unwrap(), 48)).unwrap()
}

/// Where the records of a file end.
fn end(file: &[u8]) -> usize {
    let written = file.iter().rposition(|byte| *byte != 0).unwrap();
    (written + 1).next_multiple_of(8).max(DATA_START)
}

fn with_segment(change: impl FnOnce(&mut Vec<u8>)) -> SimDisk {
    let disk = base();
    disk.damage(&newest(&disk), change);
    disk
}

/// A segment that was made ready behind the newest one, and never written to.
fn with_successor(change: impl FnOnce(&mut Vec<u8>)) -> SimDisk {
    let disk = base();
    let mut file = disk.read(&segment(1), usize::MAX).unwrap();
    let newest = disk.read(&newest(&disk), usize::MAX).unwrap();
    file[DATA_START..].fill(0);
    set_in_header(&mut file, 48, u64_at(&newest, 48) + 1);
    set_in_header(&mut file, 56, u64_at(&newest, 48));
    set_in_header(&mut file, 72, u64_at(&newest, 72) + u64_at(&newest, 64));
    change(&mut file);
    disk.publish(&segment(3), &file).unwrap();
    disk.kill()
}

fn with_files(count: u32, bytes: impl Fn(&[u8], u32) -> Vec<u8>) -> SimDisk {
    let disk = base();
    let sound = disk.read(&newest(&disk), usize::MAX).unwrap();
    for index in 1000..1000 + count {
        disk.publish(&segment(index), &bytes(&sound, index)).unwrap();
    }
    disk.kill()
}

type Case = (&'static str, fn() -> SimDisk);

const CASES: [Case; 18] = [
    ("nothing hostile", base),
    ("a header of 2^63 bytes", || with_segment(|file| set_in_header(file, 64, 1 << 63))),
    ("a header of as many bytes as an LSN can tell", || {
        with_segment(|file| {
            let first_lsn = u64_at(file, 72);
            set_in_header(file, 64, u64::MAX - 7 - first_lsn);
        })
    }),
    ("a header of 4 GiB", || with_segment(|file| set_in_header(file, 64, 1 << 32))),
    ("a successor at the end of all LSNs", || {
        with_successor(|file| {
            let bytes = u64_at(file, 64);
            set_in_header(file, 72, u64::MAX - 7 - bytes);
        })
    }),
    ("a successor with the last number there is", || with_successor(|file| set_in_header(file, 48, u64::MAX))),
    ("a header far beyond its predecessor", || with_segment(|file| set_in_header(file, 48, 1 << 40))),
    ("the last number there is", || with_segment(|file| set_in_header(file, 48, u64::MAX))),
    ("more is said to be synced than was ever written", || with_segment(|file| set_in_header(file, 80, u64::MAX))),
    ("the end of time", || with_segment(|file| set_in_header(file, 96, u64::MAX))),
    ("a recovery that replaces what is yet to be written", || {
        with_segment(|file| {
            let seal = end(file) + CLOSED_BYTES;
            let body = [&0_u64.to_le_bytes()[..], &[0; 16], &1_u64.to_le_bytes(), &8_u64.to_le_bytes(), &[0x7F; 8]];
            put_record(file, seal, 17, 8, &body.concat());
        })
    }),
    ("the oldest live segment is yet to come", || with_segment(|file| set_in_header(file, 88, u64::MAX))),
    ("records of 128 MiB", || {
        with_segment(|file| {
            let end = end(file) + CLOSED_BYTES;
            for (at, kind) in (end..).step_by(64).zip([1, 2, 3, 4, 5, 17, PAD]) {
                put_record(file, at, kind, (1 << 24) - 1, &[]);
            }
        })
    }),
    ("a pad of 128 MiB in the middle", || with_segment(|file| put_record(file, DATA_START, PAD, (1 << 24) - 1, &[]))),
    ("seals that say they replace 2^60 intervals", || {
        with_segment(|file| {
            let end = end(file) + CLOSED_BYTES;
            for (at, count) in (end..).step_by(128).zip([1 << 60, u64::MAX, u64::MAX / 16, 1 << 28]) {
                let body = [&3_u64.to_le_bytes()[..], &[9; 16], &count.to_le_bytes(), &[1; 32]].concat();
                put_record(file, at, 17, 10, &body);
            }
        })
    }),
    ("a store file that is long", || {
        let disk = base();
        disk.damage(STORE_FILE, |file| file.resize(1 << 20, 0));
        disk
    }),
    ("three thousand segment files of no or few bytes", || {
        with_files(3_000, |_, index| vec![u8::try_from(index % 2).unwrap(); usize::try_from(index % 300).unwrap()])
    }),
    ("a thousand segment files of a header alone", || {
        with_files(1_000, |sound, index| {
            let mut file = sound[..DATA_START].to_vec();
            set_in_header(&mut file, 48, 1_000_000 + u64::from(index));
            file.truncate(256);
            file
        })
    }),
];

fn files(disk: &SimDisk) -> Vec<(String, Vec<u8>)> {
    let names = disk.list().unwrap();
    names.into_iter().map(|name| (name.clone(), disk.read(&name, usize::MAX).unwrap())).collect()
}

fn keys(store: &Store) -> Vec<String> {
    let told = store.keys().map(|listed| {
        let (key, info) = listed.unwrap();
        let replay = store.reserve(&key, info.fingerprint).unwrap();
        format!("{:?} {info:?} {replay:?}", key.id())
    });
    let mut told: Vec<_> = told.collect();
    told.sort();
    told
}

/// What an opened store is good for: a new key, and the same answers after a kill.
fn is_sound(disk: &SimDisk, store: Store) -> Result<(), Error> {
    let key = Key::new("charges", "one more").unwrap();
    let Reserve::Fresh(guard) = store.reserve(&key, Fingerprint::of("9.99"))? else { panic!("the key is new") };
    let token = guard.token();
    assert_eq!(guard.complete(b"paid").unwrap(), Completion::Done);
    let before = keys(&store);
    let disk = disk.kill();
    drop(store);
    let store = testing::open(disk, options(), 10)?;
    assert_eq!(keys(&store), before);
    let key = Key::new("charges", "another").unwrap();
    let Reserve::Fresh(guard) = store.reserve(&key, Fingerprint::of("9.99"))? else { panic!("the key is new") };
    assert!(guard.token() > token);
    Ok(())
}

#[test]
fn directories_that_somebody_made_up_are_refused_untouched_or_open_for_good_in_little_memory() {
    let mut refused = 0;
    let only = std::env::var("KEYONCE_HOSTILE_CASE").ok();
    for (name, case) in CASES {
        if only.as_ref().is_some_and(|only| only != name) {
            continue;
        }
        println!("{name}:");
        let disk = case();
        let before = files(&disk);
        let bytes: usize = before.iter().map(|(_, bytes)| bytes.len()).sum();
        let in_use = MEMORY.current_usage();
        MEMORY.reset_peak_usage();
        let opened = testing::open(disk.clone(), options(), 9);
        let peak = MEMORY.peak_usage().saturating_sub(in_use);
        let peak_max = FIXED_BYTES + PER_BYTE * bytes + PER_FILE_BYTES * before.len();
        println!("    {peak} bytes allocated for {bytes} bytes in {} files", before.len());
        assert!(peak <= peak_max, "{name}: {peak} bytes allocated, more than {peak_max}");
        match opened {
            Ok(store) => {
                println!("    {:?}", store.opened());
                is_sound(&disk, store).unwrap_or_else(|error| panic!("{name}: {error}"));
            }
            Err(error) => {
                println!("    {error}");
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{name}: {error}");
                assert!(files(&disk) == before, "{name}: who refuses changes no byte");
                refused += 1;
            }
        }
    }
    assert!(only.is_some() || (8..CASES.len()).contains(&refused), "{refused} refused");
}
