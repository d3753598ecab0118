//! What a directory may hold, who may have it open, and what damage to its files is told.
//!
//! A test that is refused what it needs (a mount, another user) says so on standard error, and is not silent about it.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk, Storage as _};
use keyonce::{
    Body, Completion, ErrorKind, InvalidKey, Key, KeyState, Options, Reserve, ReserveOptions, Retention, Store,
};

use crate::place::{
    EVERYWHERE, MS, Place, as_fresh, as_replay, copy_files, everywhere, fresh, interrupted, key, other_request,
    replays, request, reserve, snapshot, state, tell, tree,
};

// Keys.

/// Row I3: nothing is trimmed, folded, cut or ignored.
#[test]
fn ids_that_look_alike_are_different_keys() {
    let longest = [b'x'; 255];
    let shorter = [b'x'; 254];
    let ids: [&[u8]; 16] = [
        b"abc",
        b"AbC",
        b"ABC",
        b"abc ",
        b" abc",
        b"abc\n",
        b"abc\0",
        b"\0abc",
        b"\0",
        b"\0\0",
        b"\xff",
        b"\xff\xfe",
        b"\xc3\x28",
        "\u{e9}".as_bytes(),
        &longest,
        &shorter,
    ];
    everywhere(|place| {
        let store = place.open();
        for id in ids {
            assert_eq!(fresh(&store, &key(id)).complete(id).unwrap(), Completion::Done, "{id:?} is its own key");
        }
        let killed = place.open_after_kill();
        for store in [&store, &killed] {
            for id in ids {
                replays(store, &key(id), id);
            }
        }
        assert_eq!(store.stats().fresh, ids.len() as u64);
    });
    assert_eq!(Key::new("s", ""), Err(InvalidKey::EmptyId));
    assert_eq!(Key::new("s", [b'x'; 256]), Err(InvalidKey::IdTooLong { bytes: 256 }));
    assert_eq!(Key::new([b'x'; 256], "a"), Err(InvalidKey::ScopeTooLong { bytes: 256 }));
}

/// Row I4: a scope and an id are two things, wherever the border between them lies.
#[test]
fn equal_ids_of_two_scopes_are_different_keys() {
    let longest = [b'x'; 255];
    let names: [(&[u8], &[u8]); 8] = [
        (b"tenant-1", b"order"),
        (b"tenant-2", b"order"),
        (b"", b"order"),
        (b"a", b"bc"),
        (b"ab", b"c"),
        (b"", b"abc"),
        (&longest, b"x"),
        (b"x", &longest),
    ];
    everywhere(|place| {
        let store = place.open();
        for (at, (scope, id)) in (0_u8..).zip(names) {
            let key = Key::new(scope, id).unwrap();
            assert_eq!(fresh(&store, &key).complete(&[at]).unwrap(), Completion::Done, "{scope:?} {id:?}");
        }
        let killed = place.open_after_kill();
        for store in [&store, &killed] {
            for (at, (scope, id)) in (0_u8..).zip(names) {
                replays(store, &Key::new(scope, id).unwrap(), &[at]);
            }
        }
    });
}

// Durations.

/// Row S3: each duration at both of its ends is refused by name or means what it says; 0 never means "for ever".
#[test]
fn every_duration_at_its_ends_is_refused_or_exactly_defined() {
    let ns = Duration::from_nanos(1);
    let century = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    let place = Place::new(EVERYWHERE[2]);
    let options = || place.options();
    let store_with = |options: Options| {
        let dir = tempfile::tempdir().unwrap();
        Store::open(dir.path().join("store"), options).map(drop).map_err(|error| error.kind())
    };
    let refused = Err(ErrorKind::InvalidOptions);
    let retention = |window| Retention::new(window, 1e-6);
    for (name, set, zero, longest) in [
        ("lease", (|o: Options, d| o.lease(d)) as fn(Options, Duration) -> Options, refused, refused),
        ("retention", |o, d| o.retention(Retention::new(d, 1e-6)), refused, refused),
        ("clock_jump_max", |o, d| o.clock_jump_max(d), Ok(()), refused),
        ("lock_wait", |o, d| o.lock_wait(d), Ok(()), Ok(())),
    ] {
        assert_eq!(store_with(set(options(), Duration::ZERO)), zero, "{name} of 0");
        assert_eq!(store_with(set(options(), ns)), Ok(()), "{name} of 1 ns");
        assert_eq!(store_with(set(options(), century)), Ok(()), "{name} of a century");
        assert_eq!(store_with(set(options(), Duration::MAX)), longest, "{name} of the longest duration");
    }

    let store = place.open_as(options().retention(retention(century)));
    let reserve_with = |with: ReserveOptions| store.reserve_with(&key("refused"), request(), &with);
    for (name, with) in [
        ("lease", ReserveOptions::new().lease(Duration::ZERO)),
        ("lease", ReserveOptions::new().lease(Duration::MAX)),
        ("retention", ReserveOptions::new().retention(Duration::ZERO)),
        ("retention", ReserveOptions::new().retention(Duration::MAX)),
    ] {
        let error = reserve_with(with).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOptions);
        assert!(error.to_string().contains(name), "{error}");
    }
    assert_eq!(state(&store, &key("refused")), None);

    // One nanosecond is a millisecond, for a lease as for a retention.
    let with = ReserveOptions::new().lease(ns).retention(ns);
    let owner = as_fresh(store.reserve_with(&key("ns"), request(), &with).unwrap());
    assert_eq!(state(&store, &key("ns")), Some(KeyState::InFlight));
    place.clock.advance(MS);
    assert_eq!(state(&store, &key("ns")), Some(KeyState::Interrupted));
    assert_eq!(owner.complete(b"").unwrap(), Completion::Done);
    replays(&store, &key("ns"), b"");
    place.clock.advance(MS);
    assert_eq!(state(&store, &key("ns")), None);

    // A wait of 0 answers at once, one of a nanosecond after a millisecond, the longest when there is an answer.
    let owner = fresh(&store, &key("wait"));
    for wait in [Duration::ZERO, ns] {
        thread::scope(|threads| {
            let with = ReserveOptions::new().wait(wait);
            let (store, key) = (&store, key("wait"));
            let waiter = threads.spawn(move || store.reserve_with(&key, request(), &with).unwrap());
            if wait > Duration::ZERO {
                crate::place::until_waiting(store, 1);
                place.clock.advance(MS);
            }
            assert!(matches!(waiter.join().unwrap(), Reserve::InFlight(_)));
        });
    }
    for lease in [Duration::ZERO, Duration::MAX] {
        assert_eq!(owner.renew(lease).unwrap_err().kind(), ErrorKind::InvalidOptions);
    }
    let not_stored = owner.detach(Duration::ZERO).unwrap_err();
    assert_eq!(not_stored.error.kind(), ErrorKind::InvalidOptions);
    let not_stored = not_stored.reservation.detach(Duration::MAX).unwrap_err();
    assert_eq!(not_stored.error.kind(), ErrorKind::InvalidOptions);
    let owner = not_stored.reservation;
    assert_eq!(owner.renew(century).unwrap(), Completion::Done);
    let with = ReserveOptions::new().wait(Duration::MAX);
    thread::scope(|threads| {
        let waiter = threads.spawn(|| as_replay(store.reserve_with(&key("wait"), request(), &with).unwrap()));
        crate::place::until_waiting(&store, 1);
        place.clock.advance(Duration::from_secs(24 * 60 * 60));
        assert_eq!(owner.complete(b"paid").unwrap(), Completion::Done);
        assert_eq!(waiter.join().unwrap().body(), Body::Kept(b"paid"));
    });
    // Nobody works, so the longest wait is over at once.
    assert_eq!(store.close(Duration::MAX).unwrap().unfinished, 0);
}

// The same questions, asked again.

/// Row D14. In flight becomes interrupted; everything else stays as it is, to the last field.
#[test]
fn the_same_questions_are_answered_the_same_before_and_after_a_close_and_a_kill() {
    everywhere(|place| {
        let store = place.open();
        let owner = fresh(&store, &key("in flight"));
        assert_eq!(owner.save_checkpoint(b"half").unwrap(), Completion::Done);
        assert_eq!(fresh(&store, &key("done")).complete(b"paid").unwrap(), Completion::Done);
        assert_eq!(fresh(&store, &key("no body")).complete_without_body(b"row 7").unwrap(), Completion::Done);
        place.clock.advance(MS);
        let dropped = fresh(&store, &key("dropped"));
        assert_eq!(dropped.save_checkpoint(b"a part").unwrap(), Completion::Done);
        drop(dropped);
        let second = as_fresh(interrupted(&store, &key("dropped")).take_over().unwrap());
        place.clock.advance(MS);
        drop(second);
        assert_eq!(fresh(&store, &key("released")).release().unwrap(), Completion::Done);
        let _token = fresh(&store, &key("detached")).detach(Duration::from_secs(3000)).unwrap();

        let same = ["done", "no body", "dropped", "released", "detached", "never seen"];
        let ask = |store: &Store| -> Vec<String> {
            let answer = |id: &&str| {
                let other = store.reserve(&key(id), other_request()).unwrap();
                let mine = match reserve(store, &key(id)) {
                    Reserve::Replay(response) => {
                        format!("{:?} {:?} {response:?}", response.body(), response.expires_at())
                    }
                    Reserve::Fresh(owner) => format!("fresh {:?}", owner.release().unwrap()),
                    other => format!("{other:?}"),
                };
                let other = match other {
                    Reserve::Fresh(owner) => format!("fresh {:?}", owner.release().unwrap()),
                    other => format!("{other:?}"),
                };
                format!("{id}: {} / {mine} / {other}", snapshot(store, &key(id)))
            };
            same.iter().filter(|id| !["released", "never seen"].contains(id)).map(answer).collect()
        };
        let before = ask(&store);
        let token = owner.token();
        let killed = place.open_after_kill();
        store.close(Duration::ZERO).unwrap();
        drop((owner, store));
        let reopened = place.open();
        assert!(reopened.opened().clean && !killed.opened().clean);
        for (what, store) in [("kill", &killed), ("close", &reopened)] {
            assert_eq!(ask(store), before, "after the {what}");
            let stop = interrupted(store, &key("in flight"));
            assert_eq!((stop.token, stop.attempt, stop.checkpoint()), (token, 1, &b"half"[..]), "after the {what}");
            for free in ["released", "never seen"] {
                assert_eq!(state(store, &key(free)), None, "after the {what}");
            }
        }
    });
}

// Who has it open.

fn refused(dir: impl AsRef<Path>, options: Options) -> ErrorKind {
    match Store::open(dir, options) {
        Ok(_) => panic!("it must not open"),
        Err(error) => error.kind(),
    }
}

/// Row D10, within this process.
#[test]
fn a_directory_is_open_once_by_whatever_path() {
    everywhere(|place| {
        let store = place.open();
        assert_eq!(fresh(&store, &key("a")).complete(b"paid").unwrap(), Completion::Done);
        let link = place.root().join("link");
        symlink(place.dir(), &link).unwrap();
        let here = std::env::current_dir().unwrap();
        let up: PathBuf = here.components().skip(1).map(|_| "..").collect();
        let relative = up.join(place.dir().strip_prefix("/").unwrap());
        assert!(relative.is_relative() && relative.exists());
        let before = tree(&place.dir());
        for path in [place.dir(), link, relative, place.dir().join("."), place.dir().join("../store")] {
            assert_eq!(refused(&path, place.options()), ErrorKind::Locked, "{path:?}");
            // The failed try has not freed the lock, nor changed a byte.
            assert_eq!(refused(place.dir(), place.options()), ErrorKind::Locked);
        }
        assert!(tree(&place.dir()) == before);
        replays(&store, &key("a"), b"paid");
        assert_eq!(fresh(&store, &key("b")).complete(b"").unwrap(), Completion::Done);

        // Free at the close, and at the end of the last handle, although a reservation lives on.
        let clone = store.clone();
        let owner = fresh(&store, &key("c"));
        drop(store);
        assert_eq!(refused(place.dir(), place.options()), ErrorKind::Locked);
        drop(clone);
        let second = place.open();
        assert_eq!(owner.complete(b"").unwrap_err().error.kind(), ErrorKind::Closed);
        second.close(Duration::ZERO).unwrap();
        let third = place.open();
        replays(&third, &key("a"), b"paid");
        assert_eq!(second.reserve(&key("a"), request()).unwrap_err().kind(), ErrorKind::Closed);
    });
}

#[test]
fn opening_waits_for_the_lock_as_long_as_it_was_told() {
    let place = Place::new(EVERYWHERE[0]);
    let store = place.open();
    assert_eq!(refused(place.dir(), place.options().lock_wait(Duration::from_millis(20))), ErrorKind::Locked);
    let (dir, options) = (place.dir(), place.options().lock_wait(Duration::MAX));
    let waiter = thread::spawn(move || Store::open(dir, options));
    assert_eq!(fresh(&store, &key("a")).complete(b"paid").unwrap(), Completion::Done);
    drop(store);
    replays(&waiter.join().unwrap().unwrap(), &key("a"), b"paid");
}

/// Row D10, during recovery: at no step of an opening is the directory free.
#[test]
fn a_directory_that_is_being_recovered_is_locked_at_every_step() {
    for setting in [EVERYWHERE[0], EVERYWHERE[2]] {
        let (disk, clock) = (SimDisk::new(), ManualClock::default());
        let store = testing::open(disk.clone(), setting.options(&clock), 1).unwrap();
        for at in 0..20 {
            assert_eq!(fresh(&store, &key(at.to_string())).complete(b"paid").unwrap(), Completion::Done);
        }
        let disk = disk.kill();
        let steps = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let (seen, looked_at) = (Arc::clone(&steps), disk.clone());
        disk.on_step(move |_| {
            assert!(looked_at.lock().unwrap().is_none(), "free during recovery");
            seen.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        });
        let after = testing::open(disk.clone(), setting.options(&clock), 2).unwrap();
        assert!(after.opened().copied > 0);
        assert!(steps.load(std::sync::atomic::Ordering::Relaxed) > 3, "recovery took no steps");
        replays(&after, &key("0"), b"paid");
    }
}

const CHILD_DIR: &str = "KEYONCE_DIRECTORY_DIR";
const CHILD_TASK: &str = "KEYONCE_DIRECTORY_TASK";

/// Does what the environment says in a process of its own; without it, nothing.
#[test]
fn the_child_opens_a_directory() {
    let Ok(dir) = std::env::var(CHILD_DIR) else { return };
    let opened = Store::open(dir, Options::new().response_bytes_max(100));
    match std::env::var(CHILD_TASK).unwrap().as_str() {
        "hold" => {
            let store = opened.unwrap();
            assert_eq!(fresh(&store, &key("child")).complete(b"by the child").unwrap(), Completion::Done);
            tell("child: open");
            // Until the parent closes its end, or dies.
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        }
        _ => tell(&match opened {
            Ok(_) => "child: open".to_owned(),
            Err(error) => format!("child: {:?}", error.kind()),
        }),
    }
}

fn child(dir: &Path, task: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "directory::the_child_opens_a_directory", "--nocapture", "--test-threads=1"])
        .env(CHILD_DIR, dir)
        .env(CHILD_TASK, task)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

/// Starts a child and reads what it says; it lives until its standard input is closed.
fn start(mut command: Command) -> (Child, ChildStdin, String) {
    let mut child = command.spawn().unwrap();
    let stdin = child.stdin.take().unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let said = lines.map(Result::unwrap).find_map(|line| line.strip_prefix("child: ").map(str::to_owned));
    (child, stdin, said.expect("the child ended without a word"))
}

/// Row D10, in another process, however that one ends.
#[test]
fn a_directory_that_another_process_has_open_is_locked_until_that_ends() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("store");
    let options = || Options::new().response_bytes_max(100);
    for killed in [false, true] {
        let (mut holder, stdin, said) = start(child(&dir, "hold"));
        assert_eq!(said, "open");
        assert_eq!(refused(&dir, options()), ErrorKind::Locked);
        assert_eq!(refused(&dir, options()), ErrorKind::Locked, "the first failure has not freed it");
        if killed {
            holder.kill().unwrap();
        }
        drop(stdin);
        assert_eq!(holder.wait().unwrap().success(), !killed);
        let store = Store::open(&dir, options()).unwrap();
        assert_eq!(store.opened().clean, !killed);
        replays(&store, &key("child"), b"by the child");
        // And the other way round.
        let (mut other, stdin, said) = start(child(&dir, "try"));
        assert_eq!(said, "Locked");
        drop(stdin);
        assert!(other.wait().unwrap().success());
        replays(&store, &key("child"), b"by the child");
        drop(store);
        fs::remove_dir_all(&dir).unwrap();
    }
}

// What it may hold.

/// Row D9: not a store.
#[test]
fn what_is_not_a_store_is_refused_with_every_byte_untouched() {
    let place = Place::new(EVERYWHERE[0]);
    let program = place.root().join("another-program");
    fs::create_dir_all(program.join("data")).unwrap();
    fs::write(program.join("config.toml"), "name = 'other'").unwrap();
    fs::write(program.join("data/table"), [7; 5000]).unwrap();
    let text = place.root().join("notes.txt");
    fs::write(&text, "not a directory\n").unwrap();
    let hidden = place.root().join("hidden");
    fs::create_dir(&hidden).unwrap();
    fs::write(hidden.join(".keep"), "").unwrap();
    let nearly = place.root().join("nearly");
    fs::create_dir(&nearly).unwrap();
    fs::write(nearly.join("segment-00000001.keyonce.bak"), "").unwrap();

    let before = tree(place.root());
    for (path, kind) in [
        (text.clone(), ErrorKind::ForeignDirectory),
        (text.join("below"), ErrorKind::ForeignDirectory),
        (program, ErrorKind::ForeignDirectory),
        (hidden, ErrorKind::ForeignDirectory),
        (nearly, ErrorKind::ForeignDirectory),
    ] {
        let error = Store::open(&path, place.options()).unwrap_err();
        assert_eq!(error.kind(), kind, "{path:?}: {error}");
        assert!(tree(place.root()) == before, "opening {path:?} changed something");
    }
}

/// Row D9: an empty directory, one that does not exist and one below that.
#[test]
fn a_new_store_is_made_where_nothing_is() {
    everywhere(|place| {
        let fresh_disk = place.root().join("fresh-disk");
        fs::create_dir_all(fresh_disk.join("lost+found")).unwrap();
        let empty = place.root().join("empty");
        fs::create_dir(&empty).unwrap();
        for dir in [empty, fresh_disk, place.root().join("new"), place.root().join("a/b/c")] {
            let store = Store::open(&dir, place.options()).unwrap();
            assert!(store.opened().created && store.opened().clean);
            assert_eq!(fresh(&store, &key("a")).complete(b"paid").unwrap(), Completion::Done);
            drop(store);
            let store = Store::open(&dir, place.options()).unwrap();
            assert!(!store.opened().created && store.opened().clean);
            replays(&store, &key("a"), b"paid");
        }
    });
}

/// Row D9: a store whose own file, or parts of it, are something else's.
#[test]
fn parts_of_another_store_are_refused_with_every_byte_untouched() {
    let place = Place::new(EVERYWHERE[0]);
    let store = place.open();
    assert_eq!(fresh(&store, &key("a")).complete(b"paid").unwrap(), Completion::Done);
    drop(store);
    let other = place.root().join("other");
    drop(Store::open(&other, place.options()).unwrap());
    let segment = |dir: &Path| {
        let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        names.retain(|path| path.to_string_lossy().contains("segment-"));
        names.into_iter().max().unwrap()
    };
    type Spoil<'a> = &'a dyn Fn(&Path);
    let spoils: [(&str, ErrorKind, Spoil<'_>); 6] = [
        ("a segment of another store", ErrorKind::ForeignDirectory, &|dir| {
            fs::copy(segment(&other), dir.join("segment-000000aa.keyonce")).unwrap();
        }),
        ("another program's keyonce.store", ErrorKind::ForeignDirectory, &|dir| {
            fs::write(dir.join("keyonce.store"), [b'x'; 512]).unwrap();
        }),
        ("a cut keyonce.store", ErrorKind::Corrupt, &|dir| {
            let bytes = fs::read(dir.join("keyonce.store")).unwrap();
            fs::write(dir.join("keyonce.store"), &bytes[..511]).unwrap();
        }),
        ("a long keyonce.store", ErrorKind::Corrupt, &|dir| {
            let mut bytes = fs::read(dir.join("keyonce.store")).unwrap();
            bytes.push(0);
            fs::write(dir.join("keyonce.store"), bytes).unwrap();
        }),
        ("no keyonce.store", ErrorKind::Corrupt, &|dir| fs::remove_file(dir.join("keyonce.store")).unwrap()),
        ("no segment", ErrorKind::Corrupt, &|dir| {
            for entry in fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                if path.to_string_lossy().contains("segment-") {
                    fs::remove_file(path).unwrap();
                }
            }
        }),
    ];
    for (at, (what, kind, spoil)) in spoils.into_iter().enumerate() {
        let dir = place.root().join(format!("spoiled-{at}"));
        copy_files(&place.dir(), &dir);
        spoil(&dir);
        let before = tree(&dir);
        let error = Store::open(&dir, place.options()).unwrap_err();
        assert_eq!(error.kind(), kind, "{what}: {error}");
        assert!(tree(&dir) == before, "{what}: something changed");
    }
}

/// Row D8: files that lie beside the log and are none of its segments.
#[test]
fn files_beside_the_log_do_not_keep_it_from_opening_and_stay_as_they_are() {
    everywhere(|place| {
        let store = place.open();
        assert_eq!(fresh(&store, &key("a")).complete(b"paid").unwrap(), Completion::Done);
        drop(store);
        let dir = place.dir();
        fs::write(dir.join("notes.txt"), "foreign").unwrap();
        fs::create_dir(dir.join("below")).unwrap();
        fs::write(dir.join("below/table"), "foreign").unwrap();
        fs::write(dir.join("segment-1.keyonce"), "a name that is nearly ours").unwrap();
        fs::write(dir.join("keyonce.store.tmp"), "a publication that a crash cut short").unwrap();
        // Half-made spares: a crash during their creation leaves any length, and zeros.
        for (index, bytes) in
            [(0xa0, 0), (0xa1, 1), (0xa2, 255), (0xa3, 4096), (0xa4, 8192), (0xa5, 8200), (0xa6, 70_000)]
        {
            fs::write(dir.join(format!("segment-000000{index:02x}.keyonce")), vec![0; bytes]).unwrap();
        }
        for _ in 0..3 {
            let store = place.open();
            replays(&store, &key("a"), b"paid");
            drop(store);
            assert_eq!(fs::read(dir.join("notes.txt")).unwrap(), b"foreign");
            assert_eq!(fs::read(dir.join("below/table")).unwrap(), b"foreign");
            assert_eq!(fs::read(dir.join("segment-1.keyonce")).unwrap(), b"a name that is nearly ours");
        }
    });
}

/// Takes a mount away again, also when the test fails.
pub(crate) struct Mount(pub(crate) PathBuf);

impl Mount {
    /// A file system in memory at `at`; `None` when this process may not mount.
    pub(crate) fn tmpfs(at: &Path) -> Option<Self> {
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=64m", "tmpfs"]).arg(at).output();
        mounted.is_ok_and(|output| output.status.success()).then(|| Self(at.to_owned()))
    }

    fn read_only(&self) {
        let output = Command::new("mount").args(["-o", "remount,ro"]).arg(&self.0).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(&self.0).status();
        assert!(unmounted.is_ok_and(|status| status.success()) || thread::panicking(), "{:?} stays mounted", self.0);
    }
}

/// Says that a rig did not run, and fails where `KEYONCE_RIGS=required` says that it can.
pub(crate) fn skipped(what: &str) {
    tell(&format!("skipped: {what}"));
    assert!(std::env::var_os("KEYONCE_RIGS").is_none(), "a rig that can run here was skipped: {what}");
}

/// Row D9: a read-only file system, which holds a store that was closed, one that was killed, an empty directory, or
/// none.
#[test]
fn a_read_only_mount_is_an_error_with_every_byte_untouched() {
    let place = Place::new(EVERYWHERE[0]);
    let at = place.root().join("mounted");
    fs::create_dir(&at).unwrap();
    let Some(mount) = Mount::tmpfs(&at) else {
        skipped("a_read_only_mount_is_an_error_with_every_byte_untouched: this process may not mount");
        return;
    };
    let store = place.open();
    assert_eq!(fresh(&store, &key("a")).complete(b"paid").unwrap(), Completion::Done);
    copy_files(&place.dir(), &at.join("killed"));
    store.close(Duration::ZERO).unwrap();
    copy_files(&place.dir(), &at.join("closed"));
    fs::create_dir(at.join("empty")).unwrap();
    mount.read_only();
    let before = tree(&at);
    for name in ["killed", "closed", "empty", "new", "new/below"] {
        for setting in EVERYWHERE {
            let error = Store::open(at.join(name), setting.options(&place.clock)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Io, "{name}: {error}");
            let source = std::error::Error::source(&error).and_then(|source| source.downcast_ref::<std::io::Error>());
            assert_eq!(source.unwrap().kind(), std::io::ErrorKind::ReadOnlyFilesystem, "{name}: {error}");
        }
    }
    assert!(tree(&at) == before);
}

/// Row D9: no permission. Root may do everything, so a child that is nobody tries.
#[test]
fn a_missing_permission_is_an_error_with_every_byte_untouched() {
    let place = Place::new(EVERYWHERE[0]);
    fs::set_permissions(place.root(), fs::Permissions::from_mode(0o755)).unwrap();
    drop(place.open());
    let closed = place.root().join("closed-to-others");
    copy_files(&place.dir(), &closed);
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).unwrap();
    let empty = place.root().join("empty");
    fs::create_dir(&empty).unwrap();
    let before = tree(place.root());
    for dir in [place.dir(), closed, empty, place.root().join("new")] {
        let mut command = child(&dir, "try");
        command.uid(65534).gid(65534);
        let Ok(mut tried) = command.spawn() else {
            skipped("a_missing_permission_is_an_error_with_every_byte_untouched: no child of another user may run");
            return;
        };
        drop(tried.stdin.take());
        let mut said = String::new();
        tried.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(said.contains("child: Io"), "{dir:?}: {said}");
        assert!(tried.wait().unwrap().success());
        assert!(tree(place.root()) == before, "{dir:?}: something changed");
    }
}
