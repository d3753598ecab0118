//! What somebody may do to a directory between two openings, and none of the rows names: hints that are no files or not
//! ours, files that were renamed, put back or linked, other options each time, a directory that may no longer be written.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk, Storage as _};
use keyonce::{
    AppendMode, Completion, Durability, ErrorKind, Fingerprint, Key, KeyState, Options, Reserve, Retention, Store,
};

use crate::directory::skipped;
use crate::place::{
    EVERYWHERE, LEASE, Place, WINDOW, copy_files, fresh, info, key, replays, request, reserve, state, tell, tree,
};
use crate::ring::{self, START_MS};

const KEYS: usize = 130;

fn body(at: usize) -> Vec<u8> {
    vec![u8::try_from(at % 251).unwrap(); 5000]
}

/// Fills a few segments: most keys are done, some are interrupted, one is held with a checkpoint.
fn work(store: &Store) {
    for at in 0..KEYS {
        let owner = fresh(store, &key(at.to_string()));
        match at % 10 {
            0 => drop(owner),
            1 => {
                assert_eq!(owner.save_checkpoint(&body(at)).unwrap(), Completion::Done);
                drop(owner);
            }
            _ => assert_eq!(owner.complete(&body(at)).unwrap(), Completion::Done),
        }
    }
}

#[track_caller]
fn holds(store: &Store, what: &str) {
    for at in 0..KEYS {
        match (reserve(store, &key(at.to_string())), at % 10) {
            (Reserve::Interrupted(stop), 0) => assert!(stop.checkpoint().is_empty(), "{what}: {at}"),
            (Reserve::Interrupted(stop), 1) => assert!(stop.checkpoint() == body(at), "{what}: {at}"),
            (Reserve::Replay(response), 2..) => {
                assert!(response.body() == keyonce::Body::Kept(&body(at)), "{what}: {at}");
            }
            (other, _) => panic!("{what}: {at}: {other:?}"),
        }
    }
}

fn named(dir: &Path, prefix: &str) -> Vec<PathBuf> {
    let mut found: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.retain(|path| path.file_name().unwrap().to_string_lossy().starts_with(prefix));
    found.sort();
    found
}

/// A store with hints, which was closed.
fn hinted(place: &Place) -> PathBuf {
    let store = place.open();
    work(&store);
    store.close(Duration::ZERO).unwrap();
    drop(store);
    assert!(named(&place.dir(), "hint-").len() >= 2, "{:?}", tree(&place.dir()).len());
    place.dir()
}

/// Opens, looks, works until segments roll, closes, and opens again.
fn goes_on(dir: &Path, options: &Options, what: &str) {
    let store = Store::open(dir, options.clone()).unwrap_or_else(|error| panic!("{what}: {error}"));
    holds(&store, what);
    for at in 0..60 {
        assert_eq!(fresh(&store, &key(format!("more {at}"))).complete(&body(at)).unwrap(), Completion::Done);
    }
    store.close(Duration::ZERO).unwrap();
    drop(store);
    let store = Store::open(dir, options.clone()).unwrap_or_else(|error| panic!("{what}, then: {error}"));
    holds(&store, what);
    for at in 0..60 {
        replays(&store, &key(format!("more {at}")), &body(at));
    }
}

#[test]
fn a_hint_that_is_no_file_of_ours_changes_no_answer_and_is_not_written_through() {
    let place = Place::new(EVERYWHERE[2]);
    let dir = hinted(&place);
    let precious = place.root().join("precious.txt");
    type Spoil<'a> = &'a dyn Fn(&Path);
    let spoils: [(&str, Spoil<'_>); 8] = [
        ("a directory", &|hint| fs::create_dir(hint).unwrap()),
        ("a directory that is not empty", &|hint| {
            fs::create_dir(hint).unwrap();
            fs::write(hint.join("x"), "x").unwrap();
        }),
        ("a dangling link", &|hint| symlink("nowhere", hint).unwrap()),
        ("a link to itself", &|hint| symlink(hint, hint).unwrap()),
        ("a link to somebody's file", &|hint| symlink(&precious, hint).unwrap()),
        ("a hard link to the store file", &|hint| fs::hard_link(hint.with_file_name("keyonce.store"), hint).unwrap()),
        ("a pipe", &|hint| {
            assert!(Command::new("mkfifo").arg(hint).status().unwrap().success());
        }),
        ("a terabyte of nothing", &|hint| File::create(hint).unwrap().set_len(1 << 40).unwrap()),
    ];
    for (at, (what, spoil)) in spoils.into_iter().enumerate() {
        fs::write(&precious, "somebody's own").unwrap();
        let spoiled = place.root().join(format!("spoiled-{at}"));
        copy_files(&dir, &spoiled);
        for hint in named(&spoiled, "hint-") {
            fs::remove_file(&hint).unwrap();
            spoil(&hint);
        }
        goes_on(&spoiled, &place.options(), what);
        assert_eq!(fs::read(&precious).unwrap(), b"somebody's own", "{what}");
        assert!(!spoiled.join("nowhere").exists(), "{what}: a file was made through it");
    }
}

/// What a link leads to is not ours, whatever it is called.
#[test]
fn a_file_of_the_store_that_became_a_link_is_refused_and_nothing_changes() {
    let place = Place::new(EVERYWHERE[2]);
    let dir = hinted(&place);
    let segment = named(&dir, "segment-").pop().unwrap().file_name().unwrap().to_string_lossy().into_owned();
    for name in ["keyonce.store", "LOCK", &segment, "segment-000000aa.keyonce"] {
        let (copy, elsewhere) =
            (place.root().join(format!("with-{name}")), place.root().join(format!("elsewhere-{name}")));
        copy_files(&dir, &copy);
        match name {
            "segment-000000aa.keyonce" => File::create(&elsewhere).unwrap().set_len(1 << 20).unwrap(),
            _ => fs::rename(copy.join(name), &elsewhere).unwrap(),
        }
        symlink(&elsewhere, copy.join(name)).unwrap();
        let before = tree(place.root());
        assert_eq!(Store::open(&copy, place.options()).map(drop).unwrap_err().kind(), ErrorKind::Io, "{name}");
        assert!(tree(place.root()) == before, "{name}: something changed");
    }
}

/// The copy that a publication writes first is a name of ours, too.
#[test]
fn a_store_file_is_never_published_through_a_link() {
    let place = Place::new(EVERYWHERE[2]);
    let dir = hinted(&place);
    let precious = place.root().join("precious.txt");
    fs::write(&precious, "somebody's own").unwrap();
    symlink(&precious, dir.join("keyonce.store.tmp")).unwrap();
    match Store::open(&dir, place.options()) {
        Ok(store) => holds(&store, "a link"),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Io, "{error}"),
    }
    assert_eq!(fs::read(&precious).unwrap(), b"somebody's own");
    assert!(fs::symlink_metadata(dir.join("keyonce.store")).unwrap().is_file());
}

/// A hint, sound in itself, of the same segment of another store: the fields are changed and the digest made to hold.
#[test]
fn a_sound_hint_of_another_store_number_salt_or_version_is_not_believed() {
    let place = Place::new(EVERYWHERE[2]);
    let dir = hinted(&place);
    let known = {
        let copy = place.root().join("known");
        copy_files(&dir, &copy);
        Store::open(&copy, place.options()).unwrap().opened().hints
    };
    assert!(known >= 2, "{known}");
    // Version, what is reserved, store, number, salt, end, count: see the head of `src/format.rs`.
    // With nothing changed the digest made here is the crate's.
    let fields = [0, 8, 12, 16, 31, 32, 40, 48, 56];
    let changes = fields.into_iter().map(|at| (at, 1, 0));
    for (at, flip, believed) in std::iter::once((0, 0, known)).chain(changes) {
        let copy = place.root().join(format!("at-{at}-{flip}"));
        copy_files(&dir, &copy);
        let seed = &fs::read(copy.join("keyonce.store")).unwrap()[32..48];
        for hint in named(&copy, "hint-") {
            let mut bytes = fs::read(&hint).unwrap();
            bytes[at] ^= flip;
            let mut digest = blake3::Hasher::new();
            digest.update(seed).update(&bytes[..64]).update(&bytes[80..]);
            bytes[64..80].copy_from_slice(&digest.finalize().as_bytes()[..16]);
            fs::write(&hint, bytes).unwrap();
        }
        let store = Store::open(&copy, place.options()).unwrap();
        assert_eq!(store.opened().hints, believed, "byte {at}");
        holds(&store, &format!("byte {at}"));
    }
}

#[test]
fn segments_under_each_others_names_are_the_same_log() {
    let place = Place::new(EVERYWHERE[2]);
    let dir = hinted(&place);
    let segments = named(&dir, "segment-");
    assert!(segments.len() >= 3);
    for (at, turned) in [1, segments.len() - 1].into_iter().enumerate() {
        let copy = place.root().join(format!("turned-{at}"));
        copy_files(&dir, &copy);
        for (at, segment) in segments.iter().enumerate() {
            let other = segments[(at + turned) % segments.len()].file_name().unwrap();
            fs::copy(segment, copy.join(other)).unwrap();
        }
        goes_on(&copy, &place.options(), "names that were turned");
    }
    let copy = place.root().join("far");
    copy_files(&dir, &copy);
    for (at, segment) in named(&copy, "segment-").iter().enumerate() {
        fs::rename(segment, copy.join(format!("segment-{:08x}.keyonce", u32::MAX - u32::try_from(at).unwrap())))
            .unwrap();
    }
    goes_on(&copy, &place.options(), "names at the end");
}

#[test]
fn a_segment_that_is_there_twice_is_told_and_nothing_changes() {
    let place = Place::new(EVERYWHERE[2]);
    let dir = hinted(&place);
    for (at, segment) in named(&dir, "segment-").iter().enumerate() {
        for linked in [false, true] {
            let copy = place.root().join(format!("twice-{at}-{linked}"));
            copy_files(&dir, &copy);
            let (from, to) = (copy.join(segment.file_name().unwrap()), copy.join("segment-000000aa.keyonce"));
            if linked {
                fs::hard_link(from, to).unwrap();
            } else {
                fs::copy(from, to).unwrap();
            }
            let before = tree(&copy);
            let Err(error) = Store::open(&copy, place.options()) else {
                // A file without a life of its own may be there as often as it likes.
                continue;
            };
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            assert!(error.to_string().contains("same segment number"), "{error}");
            assert!(tree(&copy) == before);
        }
    }
}

/// A file from an old copy of the directory, put back under a new name, or over the file as it is now.
#[test]
fn an_old_life_that_was_put_back_brings_nothing_back() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let options = || ring::options(&clock);
    let store = testing::open(disk.clone(), options(), 1).unwrap();
    let name = |at: usize| Key::new("ring", format!("key {at}")).unwrap();
    let mut kept: Vec<(String, Vec<u8>)> = Vec::new();
    let mut at = 0;
    for round in 0..6 {
        for _ in 0..40 {
            let Reserve::Fresh(owner) = store.reserve(&name(at), request()).unwrap() else { panic!() };
            assert_eq!(owner.complete(&[7; 9000]).unwrap(), Completion::Done);
            at += 1;
        }
        if round == 1 {
            store.sync().unwrap();
            let names = disk.list().unwrap();
            let files = names.iter().map(|name| (name.clone(), disk.read(name, 1 << 20).unwrap()));
            kept = files.filter(|(name, _)| name.starts_with("segment-") || name.starts_with("hint-")).collect();
        }
        clock.advance(Duration::from_secs(90));
    }
    let last = at - 1;
    let Reserve::Fresh(owner) = store.reserve(&name(at), request()).unwrap() else { panic!() };
    assert_eq!(owner.complete(b"now").unwrap(), Completion::Done);
    store.sync().unwrap();
    let (mut spares, mut missed) = (0, 0);
    for closed in [false, true] {
        if closed {
            store.close(Duration::ZERO).unwrap();
        }
        for (file, bytes) in kept.iter().filter(|(file, _)| file.starts_with("segment-")) {
            for to in ["segment-000000aa.keyonce", file] {
                let other = disk.kill();
                if other.list().unwrap().iter().any(|name| name == to) {
                    other.damage(to, |now| now.clone_from(bytes));
                } else {
                    other.publish(to, bytes).unwrap();
                }
                if let Some((hint, bytes)) = kept.iter().find(|(hint, _)| *hint == file.replace("segment", "hint")) {
                    other.publish(hint, bytes).unwrap();
                }
                let before = other.steps();
                match testing::open(other.clone(), options(), 2) {
                    Ok(store) => {
                        spares += 1;
                        assert!(matches!(store.reserve(&name(last + 1), request()).unwrap(), Reserve::Replay(_)));
                        for old in 0..80 {
                            assert!(store.peek(&name(old)).unwrap().is_none(), "{file} at {to} brings {old} back");
                        }
                        store.close(Duration::ZERO).unwrap();
                    }
                    Err(error) => {
                        missed += 1;
                        assert_eq!(error.kind(), ErrorKind::Corrupt, "{file} at {to}: {error}");
                        assert_eq!(other.steps(), before);
                    }
                }
            }
        }
    }
    tell(&format!("old lives put back: {spares} of no use, {missed} in the place of one that was missed"));
    assert!(spares > 3, "{spares} {missed}");
}

/// Each opening has other options than the last, after a close or a kill.
#[test]
fn every_opening_may_have_other_options() {
    let place = Place::new(EVERYWHERE[0]);
    let store = place.open();
    work(&store);
    let mut dir = place.dir();
    let windows = [WINDOW, Duration::from_secs(1), WINDOW * 1000, WINDOW];
    let levels = [
        (Durability::ProcessCrash, AppendMode::Mapped),
        (Durability::PowerLoss, AppendMode::Positioned),
        (Durability::Interval(Duration::from_millis(1)), AppendMode::Mapped),
        (Durability::PowerLoss, AppendMode::Mapped),
        (Durability::ProcessCrash, AppendMode::Positioned),
    ];
    let sizes = [(0, None), (1 << 20, None), (10, Some(256 << 10)), (6000, Some(8 << 20)), (100, None)];
    let mut last = Some(store);
    for round in 0..20 {
        let copy = place.root().join(format!("round-{round}"));
        if round % 3 == 0 {
            last.as_ref().unwrap().close(Duration::ZERO).unwrap();
        }
        std::thread::sleep(Duration::from_millis(1));
        while {
            copy_files(&dir, &copy);
            tree(&dir).into_iter().map(|(_, bytes)| bytes).ne(tree(&copy).into_iter().map(|(_, bytes)| bytes))
        } {
            fs::remove_dir_all(&copy).unwrap();
        }
        drop(last.take());
        fs::remove_dir_all(&dir).unwrap();
        let (durability, append_mode) = levels[round % levels.len()];
        let (largest, segment_bytes) = sizes[round / 2 % sizes.len()];
        let rate = [0.1, 1000.0, 1e-6][round % 3];
        let window = windows[round % windows.len()];
        let rate = if window > WINDOW { 0.001 } else { rate };
        let mut options = place
            .options()
            .durability(durability)
            .append_mode(append_mode)
            .response_bytes_max(largest)
            .retention(Retention::new(window, rate))
            .lease(if window < LEASE { window } else { LEASE });
        if let Some(bytes) = segment_bytes {
            options = options.segment_bytes(bytes);
        }
        let store = Store::open(&copy, options).unwrap_or_else(|error| panic!("round {round}: {error}"));
        assert_eq!(store.opened().clean, round % 3 == 0, "round {round}");
        holds(&store, &format!("round {round}"));
        let own = key(format!("round {round}"));
        assert_eq!(fresh(&store, &own).complete(&[7; 10][..largest.min(10)]).unwrap(), Completion::Done);
        let kept = info(&store, &own);
        assert_eq!(kept.state, KeyState::Done);
        (dir, last) = (copy, Some(store));
    }
}

/// A lock file that is gone is made again; while the store is open, this process still knows.
#[test]
fn a_store_whose_lock_file_is_gone_opens() {
    let place = Place::new(EVERYWHERE[2]);
    let dir = hinted(&place);
    for what in ["gone", "full"] {
        let copy = place.root().join(what);
        copy_files(&dir, &copy);
        fs::remove_file(copy.join("LOCK")).unwrap();
        if what == "full" {
            fs::write(copy.join("LOCK"), [7; 5000]).unwrap();
        }
        goes_on(&copy, &place.options(), what);
    }
    let copy = place.root().join("a directory");
    copy_files(&dir, &copy);
    fs::remove_file(copy.join("LOCK")).unwrap();
    fs::create_dir(copy.join("LOCK")).unwrap();
    let before = tree(&copy);
    assert_eq!(Store::open(&copy, place.options()).unwrap_err().kind(), ErrorKind::Io);
    assert!(tree(&copy) == before);
}

#[test]
fn a_lock_file_that_is_removed_while_the_store_is_open_does_not_let_a_second_one_in() {
    let place = Place::new(EVERYWHERE[2]);
    let store = place.open();
    assert_eq!(fresh(&store, &key("a")).complete(b"paid").unwrap(), Completion::Done);
    fs::remove_file(place.dir().join("LOCK")).unwrap();
    let second = Store::open(place.dir(), place.options());
    assert_eq!(second.map(drop).unwrap_err().kind(), ErrorKind::Locked);
    replays(&store, &key("a"), b"paid");
}

#[test]
fn a_store_file_of_any_other_length_is_told_and_nothing_changes() {
    let place = Place::new(EVERYWHERE[2]);
    let dir = hinted(&place);
    let whole = fs::read(dir.join("keyonce.store")).unwrap();
    for bytes in (0..whole.len()).step_by(17).chain([whole.len() - 1, whole.len() + 1, 1 << 20]) {
        let mut other = whole.clone();
        other.resize(bytes, 0);
        fs::write(dir.join("keyonce.store"), &other).unwrap();
        let before = tree(&dir);
        let error = Store::open(&dir, place.options()).unwrap_err();
        let kinds = [ErrorKind::Corrupt, ErrorKind::ForeignDirectory];
        assert!(kinds.contains(&error.kind()) && error.to_string().contains("keyonce.store"), "{bytes}: {error}");
        assert!(tree(&dir) == before, "{bytes}");
    }
}

/// All is gone but what can lie only beside a store that has worked: that is no empty directory.
#[test]
fn hints_without_a_store_are_a_store_that_is_missing() {
    let place = Place::new(EVERYWHERE[2]);
    let dir = hinted(&place);
    for path in named(&dir, "segment-") {
        fs::remove_file(path).unwrap();
    }
    fs::remove_file(dir.join("keyonce.store")).unwrap();
    let before = tree(&dir);
    let error = Store::open(&dir, place.options()).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(tree(&dir) == before);
}

/// Between the kill and the reopening the wall clock is set, within the boot and across one.
#[test]
fn a_wall_clock_that_is_set_between_a_kill_and_the_reopening_frees_nothing() {
    const HOUR_MS: i64 = 3_600_000;
    for reboots in [false, true] {
        for set_ms in [-HOUR_MS, -100 * 24 * HOUR_MS, HOUR_MS / 2, 5000 * 24 * HOUR_MS] {
            let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
            let options = || EVERYWHERE[2].options(&clock);
            let store = testing::open(disk.clone(), options(), 1).unwrap();
            work(&store);
            clock.advance(Duration::from_secs(600));
            let kept = info(&store, &key("5")).kept_until;
            let killed = disk.kill();
            let wall_ms = keyonce::Clock::wall_ms(&clock);
            if reboots {
                clock.reboot();
            }
            clock.set_wall_ms(wall_ms.checked_add_signed(set_ms).unwrap());
            let again = testing::open(killed, options(), 2).unwrap();
            holds(&again, &format!("reboots {reboots}, set by {set_ms}"));
            assert_eq!(info(&again, &key("5")).kept_until, kept);
            // What was kept for an hour goes when that is over, and not before. Over a reboot with a clock that is not
            // believed, store time goes on from the last that was written, ten minutes ago.
            let believed = reboots && set_ms == HOUR_MS / 2;
            let (passed, late) = if believed { (2400, 0) } else { (600, if reboots { 600 } else { 0 }) };
            clock.advance(Duration::from_secs(3600 - passed) - Duration::from_millis(1));
            assert_eq!(state(&again, &key("5")), Some(KeyState::Done), "reboots {reboots}, set by {set_ms}");
            clock.advance(Duration::from_millis(1) + Duration::from_secs(late));
            assert_eq!(state(&again, &key("5")), None, "reboots {reboots}, set by {set_ms}");
        }
    }
}

/// An opening that finds no hints leaves new ones, and is killed, or loses power, at each step of that.
#[test]
fn an_opening_that_is_crashed_while_hints_are_made_again_comes_to_the_same() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let options = || ring::options(&clock);
    let name = |at: usize| Key::new("ring", format!("key {at}")).unwrap();
    let store = testing::open(disk.clone(), options(), 1).unwrap();
    for at in 0..80 {
        let Reserve::Fresh(owner) = store.reserve(&name(at), request()).unwrap() else { panic!() };
        if at % 9 == 0 {
            drop(owner);
        } else {
            assert_eq!(owner.complete(&[u8::try_from(at).unwrap(); 9000]).unwrap(), Completion::Done);
        }
    }
    store.sync().unwrap();
    let disk = disk.kill();
    for hint in disk.list().unwrap().into_iter().filter(|name| name.starts_with("hint-")) {
        disk.remove(&hint).unwrap();
    }
    disk.sync_directory().unwrap();
    disk.record();
    let store = testing::open(disk.clone(), options(), 2).unwrap();
    for at in 80..90 {
        let Reserve::Fresh(owner) = store.reserve(&name(at), request()).unwrap() else { panic!() };
        assert_eq!(owner.complete(&[1; 9000]).unwrap(), Completion::Done);
    }
    store.sync().unwrap();
    let hints = disk.list().unwrap().iter().filter(|name| name.starts_with("hint-")).count();
    assert!(hints >= 2, "{:?}", disk.list());
    let (mut images, mut hinted) = (0, 0);
    for moment in disk.moments() {
        let steps = moment.steps();
        for image in moment.images(4) {
            let store =
                testing::open(image.clone(), options(), 3).unwrap_or_else(|error| panic!("at {steps}: {error}"));
            images += 1;
            hinted += u64::from(store.opened().hints > 0);
            for at in 0..80 {
                match store.reserve(&name(at), request()).unwrap() {
                    Reserve::Replay(response) if at % 9 != 0 => {
                        let expected = vec![u8::try_from(at).unwrap(); 9000];
                        assert!(response.body() == keyonce::Body::Kept(&expected), "at {steps}: {at}");
                    }
                    Reserve::Interrupted(_) if at % 9 == 0 => {}
                    other => panic!("at {steps}: {at}: {other:?}"),
                }
                let other = store.reserve(&name(at), Fingerprint::of("another")).unwrap();
                assert!(matches!(other, Reserve::Mismatch(_)), "at {steps}: {at}");
            }
        }
    }
    tell(&format!("hints made again: {images} images, {hinted} of them opened by hints"));
    assert!(images > 40 && hinted > 0 && hinted < images, "{images} {hinted}");
}

const DIR: &str = "KEYONCE_ODD_DIR";

/// Works in a directory that it may no longer write; without a directory in the environment, nothing.
#[test]
fn the_child_may_no_longer_write_into_its_directory() {
    let Ok(dir) = std::env::var(DIR) else { return };
    let dir = PathBuf::from(dir).join("store");
    let may = |mode| fs::set_permissions(&dir, fs::Permissions::from_mode(mode)).unwrap();
    for setting in [EVERYWHERE[0], EVERYWHERE[3]] {
        let clock = ManualClock::default();
        let options = || setting.options(&clock);
        let store = Store::open(&dir, options()).unwrap();
        let held = fresh(&store, &key("held"));
        work(&store);
        may(0o500);
        let mut done = Vec::new();
        let error = loop {
            let id = format!("locked out {}", done.len());
            match store.reserve(&key(&id), request()) {
                Ok(Reserve::Fresh(owner)) => done.push(owner.complete(&body(1)).is_ok()),
                Ok(other) => panic!("{other:?}"),
                Err(error) => break error,
            }
            assert!(done.len() < 5000);
        };
        tell(&format!("child: {} keys, then {:?}: {error}", done.len(), error.kind()));
        assert!(matches!(error.kind(), ErrorKind::Io | ErrorKind::Full { .. }), "{error}");
        assert!(matches!(store.health(), keyonce::Health::Sound));
        let all = |store: &Store| {
            holds(store, "locked out");
            for (at, done) in done.iter().enumerate() {
                match reserve(store, &key(format!("locked out {at}"))) {
                    Reserve::Replay(_) => assert!(done, "{at}"),
                    Reserve::Interrupted(_) => assert!(!done, "{at}"),
                    other => panic!("{at}: {other:?}"),
                }
            }
        };
        all(&store);
        may(0o700);
        assert_eq!(fresh(&store, &key("let in")).complete(&body(1)).unwrap(), Completion::Done);
        assert_eq!(held.complete(b"late").unwrap(), Completion::Done);
        may(0o500);
        store.close(Duration::ZERO).unwrap();
        drop(store);
        for _ in 0..3 {
            let error = Store::open(&dir, options()).map(drop).unwrap_err();
            tell(&format!("child: {error}"));
            assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        }
        may(0o700);
        let store = Store::open(&dir, options()).unwrap();
        all(&store);
        replays(&store, &key("held"), b"late");
        replays(&store, &key("let in"), &body(1));
        drop(store);
        fs::remove_dir_all(&dir).unwrap();
    }
    tell("child: done");
}

#[test]
fn a_directory_that_may_no_longer_be_written_loses_nothing_and_heals() {
    let root = tempfile::tempdir().unwrap();
    fs::set_permissions(root.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "odd::the_child_may_no_longer_write_into_its_directory", "--nocapture", "--test-threads=1"])
        .env(DIR, root.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .uid(65534)
        .gid(65534);
    let Ok(mut child) = command.spawn() else {
        skipped("a_directory_that_may_no_longer_be_written: no child of another user may run");
        return;
    };
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(child.wait().unwrap().success() && said.contains("child: done"), "{said}");
    tell(&said);
}
