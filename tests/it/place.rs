//! Where the contract is tested: a real directory at every durability level and append mode, under a clock moved by
//! hand.
//!
//! The table is [`EVERYWHERE`]. What a kill leaves is a copy of the directory's files taken while the store is open:
//! the page cache, which is what a new process reads. What a power loss leaves needs the simulated disk.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use keyonce::testing::ManualClock;
use keyonce::{
    AppendMode, Body, Durability, Fingerprint, Interrupted, Key, KeyInfo, KeyState, Options, Reservation, Reserve,
    Response, Retention, Store,
};

/// How long keys are remembered in these tests.
pub(crate) const WINDOW: Duration = Duration::from_secs(3600);

/// How long a reservation counts as running.
pub(crate) const LEASE: Duration = Duration::from_secs(60);

/// The largest response; small, so that segments are small and quickly made.
pub(crate) const RESPONSE_BYTES_MAX: usize = 6000;

/// How soon what is written is synced at [`Durability::Interval`], shorter than a lease.
pub(crate) const SYNC_EVERY: Duration = Duration::from_secs(1);

pub(crate) const MS: Duration = Duration::from_millis(1);

/// Every level with every append mode.
pub(crate) const EVERYWHERE: [Setting; 6] = [
    Setting { durability: Durability::PowerLoss, append_mode: AppendMode::Positioned },
    Setting { durability: Durability::PowerLoss, append_mode: AppendMode::Mapped },
    Setting { durability: Durability::ProcessCrash, append_mode: AppendMode::Positioned },
    Setting { durability: Durability::ProcessCrash, append_mode: AppendMode::Mapped },
    Setting { durability: Durability::Interval(SYNC_EVERY), append_mode: AppendMode::Positioned },
    Setting { durability: Durability::Interval(SYNC_EVERY), append_mode: AppendMode::Mapped },
];

/// A level and an append mode.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting {
    pub(crate) durability: Durability,
    pub(crate) append_mode: AppendMode,
}

impl Setting {
    /// The options of every store in these tests.
    pub(crate) fn options(self, clock: &ManualClock) -> Options {
        Options::new()
            .durability(self.durability)
            .append_mode(self.append_mode)
            .lease(LEASE)
            .retention(Retention::new(WINDOW, 0.1))
            .response_bytes_max(RESPONSE_BYTES_MAX)
            .clock(Arc::new(clock.clone()))
    }
}

/// A directory of the test's own, with its clock.
pub(crate) struct Place {
    root: tempfile::TempDir,
    copies: std::cell::Cell<u32>,
    pub(crate) setting: Setting,
    pub(crate) clock: ManualClock,
}

impl Place {
    pub(crate) fn new(setting: Setting) -> Self {
        let root = tempfile::tempdir().unwrap();
        Self { root, copies: std::cell::Cell::new(0), setting, clock: ManualClock::default() }
    }

    pub(crate) fn dir(&self) -> PathBuf {
        self.root.path().join("store")
    }

    pub(crate) fn root(&self) -> &Path {
        self.root.path()
    }

    pub(crate) fn options(&self) -> Options {
        self.setting.options(&self.clock)
    }

    pub(crate) fn open(&self) -> Store {
        self.open_as(self.options())
    }

    pub(crate) fn open_as(&self, options: Options) -> Store {
        Store::open(self.dir(), options).unwrap()
    }

    /// The store as a new process finds it after this one was killed.
    pub(crate) fn open_after_kill(&self) -> Store {
        self.open_after_kill_as(self.options())
    }

    pub(crate) fn open_after_kill_as(&self, options: Options) -> Store {
        self.copies.set(self.copies.get() + 1);
        let copy = self.root.path().join(format!("killed-{}", self.copies.get()));
        // A kill is a moment: the files are copied until none has changed meanwhile.
        while {
            copy_files(&self.dir(), &copy);
            contents(&self.dir()) != contents(&copy)
        } {
            fs::remove_dir_all(&copy).unwrap();
        }
        Store::open(copy, options).unwrap()
    }
}

/// Runs a test at every level and append mode, and names the one at which it failed.
pub(crate) fn everywhere(test: impl Fn(&Place)) {
    for setting in EVERYWHERE {
        let named = NamesSetting(setting);
        test(&Place::new(setting));
        drop(named);
    }
}

/// Says in a panic which row of the table it was.
struct NamesSetting(Setting);

impl Drop for NamesSetting {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("at {:?}", self.0);
        }
    }
}

/// Copies the files of a flat directory.
pub(crate) fn copy_files(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// The bytes of the files in a directory, by name.
fn contents(dir: &Path) -> Vec<Vec<u8>> {
    tree(dir).into_iter().map(|(_, bytes)| bytes).collect()
}

/// Every file below a path with its bytes, to compare before and after.
pub(crate) fn tree(path: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    if path.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            let path = entry.unwrap().path();
            found.push((path.clone(), Vec::new()));
            found.extend(tree(&path));
        }
    } else {
        found.push((path.to_owned(), fs::read(path).unwrap()));
    }
    found.sort();
    found
}

/// Tells something that must be seen although the test passes: the harness captures `eprintln` alone.
pub(crate) fn tell(line: &str) {
    std::io::stderr().write_all(format!("{line}\n").as_bytes()).unwrap();
}

pub(crate) fn key(id: impl AsRef<[u8]>) -> Key {
    Key::new("charges", id).unwrap()
}

/// The request that a key stands for in these tests, unless the test is about another one.
pub(crate) fn request() -> Fingerprint {
    Fingerprint::of("9.99 EUR")
}

pub(crate) fn other_request() -> Fingerprint {
    Fingerprint::of("10.00 EUR")
}

#[track_caller]
pub(crate) fn reserve(store: &Store, key: &Key) -> Reserve {
    store.reserve(key, request()).unwrap()
}

#[track_caller]
pub(crate) fn fresh(store: &Store, key: &Key) -> Reservation {
    as_fresh(reserve(store, key))
}

#[track_caller]
pub(crate) fn as_fresh(reserve: Reserve) -> Reservation {
    let Reserve::Fresh(reservation) = reserve else { panic!("not Fresh but {reserve:?}") };
    reservation
}

#[track_caller]
pub(crate) fn as_interrupted(reserve: Reserve) -> Interrupted {
    let Reserve::Interrupted(interrupted) = reserve else { panic!("not Interrupted but {reserve:?}") };
    interrupted
}

#[track_caller]
pub(crate) fn interrupted(store: &Store, key: &Key) -> Interrupted {
    as_interrupted(reserve(store, key))
}

#[track_caller]
pub(crate) fn as_replay(reserve: Reserve) -> Response {
    let Reserve::Replay(response) = reserve else { panic!("not Replay but {reserve:?}") };
    response
}

/// Asserts that the key replays exactly these bytes.
#[track_caller]
pub(crate) fn replays(store: &Store, key: &Key, bytes: &[u8]) -> Response {
    let response = as_replay(reserve(store, key));
    assert!(response.body() == Body::Kept(bytes), "another response than was stored: {response:?}");
    response
}

#[track_caller]
pub(crate) fn info(store: &Store, key: &Key) -> KeyInfo {
    store.peek(key).unwrap().expect("the key is known")
}

/// The state of a key, `None` when nothing is known.
#[track_caller]
pub(crate) fn state(store: &Store, key: &Key) -> Option<KeyState> {
    store.peek(key).unwrap().map(|info| info.state)
}

/// All that is known of a key, to compare before and after.
#[track_caller]
pub(crate) fn snapshot(store: &Store, key: &Key) -> String {
    format!("{:?}", store.peek(key).unwrap())
}

/// Returns once `count` callers wait for keys in flight.
pub(crate) fn until_waiting(store: &Store, count: u64) {
    while store.stats().waiting < count {
        std::thread::yield_now();
    }
}
