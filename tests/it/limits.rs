//! What is bounded: descriptors, mappings, the room on a disk. Reaching a limit is an error that says so; what was open
//! goes on, nothing is lost, and with the limit raised all is well.
//!
//! What a process does that has a low limit, or that a signal might end, it does alone: this binary again, with its task
//! in the environment. Row F2: the small disks are mounted by the test; one that may not says so.

#![expect(unsafe_code, reason = "the limits of a process are set by a call of libc")]

use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use keyonce::testing::ManualClock;
use keyonce::{AppendMode, Body, Completion, Durability, Error, ErrorKind, Health, Options, Reserve, Retention, Store};

use crate::directory::{Mount, skipped};
use crate::place::{key, request, tell};

const DIR: &str = "KEYONCE_LIMITS_DIR";
const TASK: &str = "KEYONCE_LIMITS_TASK";
const LEVEL: &str = "KEYONCE_LIMITS_LEVEL";

const LEVELS: [&str; 2] = ["PowerLoss", "ProcessCrash"];
const SEGMENT_BYTES: u64 = 192 << 10;
/// Four fill a segment.
const RESPONSE_BYTES: usize = 40_000;

fn options() -> Options {
    let options = Options::new().response_bytes_max(RESPONSE_BYTES).segment_bytes(SEGMENT_BYTES);
    match std::env::var(LEVEL).as_deref() {
        Ok("ProcessCrash") => options.durability(Durability::ProcessCrash).append_mode(AppendMode::Mapped),
        _ => options,
    }
}

/// One key from its reservation to its response.
fn pair(store: &Store, at: usize) -> Result<(), Error> {
    match store.reserve(&key(at.to_string()), request())? {
        Reserve::Fresh(reservation) => {
            let completed = reservation.complete(&vec![u8::try_from(at % 251).unwrap(); RESPONSE_BYTES]);
            assert_eq!(completed.map_err(|not_stored| not_stored.error)?, Completion::Done);
            Ok(())
        }
        other => panic!("a new key was answered {other:?}"),
    }
}

fn replay(store: &Store, keys: Range<usize>) {
    for at in keys {
        let Reserve::Replay(replay) = store.reserve(&key(at.to_string()), request()).unwrap() else { panic!("{at}") };
        assert!(replay.body() == Body::Kept(&vec![u8::try_from(at % 251).unwrap(); RESPONSE_BYTES]));
    }
}

/// Work until something fails, which nobody may have died of.
fn work_until_refused(store: &Store, keys: &mut usize) -> Error {
    loop {
        match pair(store, *keys) {
            Ok(()) => *keys += 1,
            Err(error) => return error,
        }
        assert!(*keys < 20_000, "there is no limit");
    }
}

fn alone(dir: &Path, task: &str, level: &str) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "limits::the_child_reaches_a_limit", "--nocapture", "--test-threads=1"])
        .env(DIR, dir)
        .env(TASK, task)
        .env(LEVEL, level)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let done = said.lines().find(|line| line.starts_with("child: done"));
    assert!(output.status.success() && done.is_some(), "{task} at {level}: {}: {said}", output.status);
    tell(&format!("{task} at {level}: {}", done.unwrap()));
}

/// Does what the environment says; without it, nothing.
#[test]
fn the_child_reaches_a_limit() {
    let Ok(dir) = std::env::var(DIR) else { return };
    let dir = PathBuf::from(dir);
    match std::env::var(TASK).unwrap().as_str() {
        "descriptors" => reach_the_limit_on_descriptors(&dir),
        "just enough" => open_with_ever_more_descriptors(&dir),
        _ => fill_the_disk(&dir),
    }
}

// Descriptors and mappings.

/// How many descriptors and mappings this process has of files below a directory.
fn held(dir: &Path) -> (usize, usize) {
    let descriptors = fs::read_dir("/proc/self/fd").unwrap();
    let targets = descriptors.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let below = dir.to_str().unwrap();
    (targets.filter(|target| target.starts_with(dir)).count(), maps.lines().filter(|line| line.contains(below)).count())
}

#[test]
fn descriptors_and_mappings_stay_flat_while_the_ring_turns() {
    const WINDOW: Duration = Duration::from_secs(60);
    const TURNS: usize = 24;
    for mode in [AppendMode::Positioned, AppendMode::Mapped] {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("store");
        let clock = ManualClock::default();
        let options = options()
            .durability(Durability::ProcessCrash)
            .append_mode(mode)
            .retention(Retention::new(WINDOW, 1.0))
            .clock(Arc::new(clock.clone()));
        let store = Store::open(&dir, options).unwrap();
        let (mut keys, mut most) = (0, Vec::new());
        for _ in 0..TURNS {
            let mut peak = (0, 0);
            for _ in 0..40 {
                pair(&store, keys).unwrap();
                keys += 1;
                let now = held(&dir);
                peak = (peak.0.max(now.0), peak.1.max(now.1));
            }
            clock.advance(WINDOW * 2);
            most.push(peak);
        }
        // The helper gives up what is over some time later, so a turn may have a few of the last one's.
        let (files, files_at_first) = (fs::read_dir(&dir).unwrap().count(), most[..4].iter().max().unwrap());
        let later = most[4..].iter().max().unwrap();
        tell(&format!("{mode:?}: {files} files after {TURNS} turns, descriptors and mappings by turn: {most:?}"));
        assert!(later.0 <= files_at_first.0 + 10 && later.1 <= files_at_first.1 + 10, "{most:?}");
        // A descriptor for each segment, the directory and the lock; a mapping for each segment.
        let segments = usize::try_from(store.stats().segments).unwrap();
        let now = held(&dir);
        assert!(now.0 <= segments + 6 && now.1 <= segments + 4, "{now:?} for {segments} segments");
        store.close(Duration::ZERO).unwrap();
        assert_eq!(held(&dir).1, 0, "a closed store has nothing mapped");
        drop(store);
        assert_eq!(held(&dir), (0, 0));
    }
}

fn limit_descriptors(most: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a value of our own.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    limit.rlim_cur = most;
    // SAFETY: as above; the process is this test's alone.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}

#[test]
fn a_store_that_needs_more_descriptors_than_there_are_says_so_and_goes_on_when_there_are_more() {
    for level in LEVELS {
        let root = tempfile::tempdir().unwrap();
        alone(&root.path().join("store"), "descriptors", level);
    }
}

/// Whether the error tells of the limit and what to do.
fn names_the_limit(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::Io, "{error:?}");
    let message = error.to_string();
    for part in ["too many open files", "ulimit -n", "segment_bytes"] {
        assert!(message.contains(part), "{message}");
    }
}

fn reach_the_limit_on_descriptors(dir: &Path) {
    limit_descriptors(64);
    let store = Store::open(dir, options()).unwrap();
    let mut keys = 0;
    names_the_limit(&work_until_refused(&store, &mut keys));
    assert!(keys > 100, "{keys} keys have taken all descriptors");
    // What is there is there, and asking again is answered the same.
    replay(&store, 0..keys);
    let first = keys + 1;
    keys = first;
    names_the_limit(&work_until_refused(&store, &mut keys));
    replay(&store, first..keys);
    assert!(matches!(store.health(), Health::Sound));
    assert!(store.peek(&key("0")).unwrap().is_some());
    limit_descriptors(256);
    for _ in 0..20 {
        keys += 1;
        pair(&store, keys).unwrap();
    }
    store.close(Duration::ZERO).unwrap();
    drop(store);

    // Too few to open it: nothing has changed, and with more it opens.
    limit_descriptors(64);
    let before = crate::place::tree(dir);
    for _ in 0..2 {
        names_the_limit(&Store::open(dir, options()).unwrap_err());
    }
    assert!(crate::place::tree(dir) == before, "an opening that failed has changed something");
    limit_descriptors(256);
    let store = Store::open(dir, options()).unwrap();
    assert!(store.opened().clean);
    assert!(store.opened().keys >= keys as u64);
    tell(&format!("child: done, {keys} keys"));
}

#[test]
fn an_opening_with_just_enough_descriptors_or_one_too_few_loses_nothing() {
    for level in LEVELS {
        let root = tempfile::tempdir().unwrap();
        alone(&root.path().join("store"), "just enough", level);
    }
}

/// From a limit under which nothing opens up to one under which all goes on, after a kill and after a close.
fn open_with_ever_more_descriptors(dir: &Path) {
    limit_descriptors(256);
    let store = Store::open(dir, options()).unwrap();
    let keys = 40;
    (0..keys).for_each(|at| pair(&store, at).unwrap());
    store.sync().unwrap();
    let killed = dir.with_file_name("killed");
    crate::place::copy_files(dir, &killed);
    store.close(Duration::ZERO).unwrap();
    drop(store);
    let taken = fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    let (mut refused, mut opened) = (0, 0);
    for dir in [dir, &killed] {
        let mut worked_at = None;
        for most in taken..taken + 40 {
            limit_descriptors(256);
            let copy = dir.with_file_name("copy");
            crate::place::copy_files(dir, &copy);
            limit_descriptors(most);
            match Store::open(&copy, options()) {
                Ok(store) => {
                    opened += 1;
                    worked_at.get_or_insert(most);
                    replay(&store, 0..keys);
                    // It may be out of them at the next segment.
                    let mut more = keys;
                    while more < keys + 10 && pair(&store, more).is_ok() {
                        more += 1;
                    }
                    replay(&store, 0..more);
                    store.close(Duration::ZERO).unwrap();
                }
                Err(error) => {
                    refused += 1;
                    assert!(worked_at.is_none(), "{most} are too few, and {worked_at:?} were enough: {error}");
                    names_the_limit(&error);
                }
            }
            limit_descriptors(256);
            let store = Store::open(&copy, options()).unwrap();
            replay(&store, 0..keys);
            drop(store);
            fs::remove_dir_all(&copy).unwrap();
        }
    }
    assert!(refused > 10 && opened > 10, "{refused} refused, {opened} opened");
    tell(&format!("child: done, {refused} refused, {opened} opened"));
}

// Room on the disk.

/// The work of `a_disk_that_somebody_else_fills`: every error is one that says when to come back, and with room it goes
/// on.
fn fill_the_disk(dir: &Path) {
    let store = Store::open(dir, options()).unwrap();
    let mut keys = 0;
    for _ in 0..8 {
        pair(&store, keys).unwrap();
        keys += 1;
    }
    let held = store.reserve(&key("held"), request()).unwrap();
    let Reserve::Fresh(held) = held else { panic!("a new key") };
    let ballast = dir.with_file_name("ballast");
    for _ in 0..2 {
        fill(&ballast);
        let first = keys;
        let error = work_until_refused(&store, &mut keys);
        let ErrorKind::Full { retry_after } = error.kind() else { panic!("{error:?}") };
        assert!(retry_after > Duration::ZERO && error.is_transient());
        assert!(matches!(store.health(), Health::Sound), "{:?}", store.health());
        assert!(matches!(store.reserve(&key("held"), request()).unwrap(), Reserve::InFlight(_)));
        replay(&store, first..keys);
        fs::remove_file(&ballast).unwrap();
        // The completion may have been what found no room: then the key is interrupted.
        keys += 1;
        for _ in 0..8 {
            pair(&store, keys).unwrap();
            keys += 1;
        }
    }
    assert_eq!(held.complete(b"late").unwrap(), Completion::Done);
    store.close(Duration::ZERO).unwrap();
    drop(store);
    let store = Store::open(dir, options()).unwrap();
    assert!(store.opened().clean);
    assert!(matches!(store.reserve(&key("held"), request()).unwrap(), Reserve::Replay(_)));
    tell(&format!("child: done, {keys} keys"));
}

/// Takes all the room there is on the file system.
fn fill(path: &Path) {
    use std::os::unix::fs::FileExt;
    let ballast = File::create(path).unwrap();
    let (mut offset, mut piece) = (0, 1 << 20);
    while piece >= 4096 {
        match ballast.write_at(&vec![1; piece], offset) {
            Ok(0) => piece /= 2,
            Ok(written) => offset += written as u64,
            Err(error) if error.kind() == std::io::ErrorKind::StorageFull => piece /= 2,
            Err(error) => panic!("{error}"),
        }
    }
    // What is still in the page cache may find no room either.
    match ballast.sync_all() {
        Ok(()) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::StorageFull),
    }
}

/// A small disk of this kind in a file; `None` when this process may not mount.
fn small_disk(kind: &str, megabytes: u64, root: &Path) -> Option<Mount> {
    let (image, at) = (root.join("image"), root.join("mounted"));
    fs::create_dir(&at).unwrap();
    if kind == "tmpfs" {
        return Mount::tmpfs(&at);
    }
    File::create(&image).unwrap().set_len(megabytes << 20).unwrap();
    let made = Command::new(format!("mkfs.{kind}")).arg("-q").arg(&image).output();
    let mounted = || Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&at).output();
    let success = |output: std::io::Result<std::process::Output>| output.is_ok_and(|output| output.status.success());
    (success(made) && success(mounted())).then(|| Mount(at))
}

/// Row F2. The room goes to somebody else; what the store has made ready it has, and a write into it is no signal.
#[test]
fn a_disk_that_somebody_else_fills_is_an_error_no_signal_and_heals() {
    for (kind, megabytes) in [("tmpfs", 64), ("ext4", 64), ("btrfs", 192), ("xfs", 320)] {
        for level in LEVELS {
            let root = tempfile::tempdir().unwrap();
            let Some(mount) = small_disk(kind, megabytes, root.path()) else {
                skipped(&format!("a_disk_that_somebody_else_fills, on {kind}: this process may not mount"));
                continue;
            };
            alone(&mount.0.join("store"), &format!("fill {kind}"), level);
        }
    }
}
