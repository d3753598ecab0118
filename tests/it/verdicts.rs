//! Opening by verdict: every combination of facts hits exactly one row of the table that opening is decided by, and is
//! answered as that row says.
//!
//! Each module is one part of the table: it enumerates all combinations of its facts, lays each out as a directory
//! written by hand, and opens it. A row is a predicate over the facts, written here and not taken from the code; of all
//! rows exactly one must apply. A refusal must name the file, the place and the reason, and change nothing. What opens
//! is opened once more after a kill, and must say the same: the decision was made once.

mod directories;
mod records;
mod recoveries;
mod segments;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk, Storage as _};
use keyonce::{Body, Error, ErrorKind, Key, Options, Reserve, Retention, Store};

use crate::forge::{Directory, SCOPE, request};
use crate::place::tell;

/// A row of the table: its name, and whether it applies.
pub(crate) type Row<F> = (&'static str, fn(&F) -> bool);

/// Counts how often each row was hit.
pub(crate) struct Rows<F: 'static> {
    rows: &'static [Row<F>],
    hits: BTreeMap<&'static str, u64>,
}

impl<F: Debug> Rows<F> {
    pub(crate) fn new(rows: &'static [Row<F>]) -> Self {
        Self { rows, hits: BTreeMap::new() }
    }

    /// The one row that applies.
    pub(crate) fn only(&mut self, facts: &F) -> &'static str {
        let hit: Vec<_> = self.rows.iter().filter(|(_, applies)| applies(facts)).map(|(name, _)| *name).collect();
        let [row] = hit[..] else { panic!("{facts:?} hits not one row but {hit:?}") };
        *self.hits.entry(row).or_default() += 1;
        row
    }

    /// Every row was hit.
    pub(crate) fn all_hit(&self, part: &str) {
        let missed: Vec<_> = self.rows.iter().filter(|(name, _)| !self.hits.contains_key(name)).collect();
        assert!(missed.is_empty(), "never hit: {:?}", missed.iter().map(|(name, _)| name).collect::<Vec<_>>());
        tell(&format!("verdicts of {part}: {} combinations: {:?}", self.hits.values().sum::<u64>(), self.hits));
    }
}

/// Small segments and a small index: most of an opening's time is in making them.
fn options() -> Options {
    Options::new()
        .clock(Arc::new(ManualClock::default()))
        .retention(Retention::new(Duration::from_secs(3600), 0.001))
        .response_bytes_max(512)
}

pub(crate) fn open(disk: &SimDisk, seed: u64) -> Result<Store, Error> {
    testing::open(disk.clone(), options(), seed)
}

/// The directory must open; and open again, from what a kill right after leaves.
pub(crate) fn opens(directory: &Directory, facts: &impl Debug, check: impl Fn(&Store, bool)) {
    let disk = directory.disk();
    let store = open(&disk, 1).unwrap_or_else(|error| panic!("{facts:?}: {error}"));
    let killed = disk.kill();
    check(&store, true);
    drop(store);
    let again = open(&killed, 2).unwrap_or_else(|error| panic!("{facts:?}: opened, and after a kill: {error}"));
    check(&again, false);
}

/// The directory must be refused, with every byte untouched; says in which words.
pub(crate) fn refused(directory: &Directory, facts: &impl Debug, kind: ErrorKind) -> String {
    let disk = directory.disk();
    let steps = disk.steps();
    match open(&disk, 1) {
        Ok(store) => panic!("{facts:?}: opened, with {:?}", store.opened()),
        Err(error) => {
            assert_eq!(error.kind(), kind, "{facts:?}: {error}");
            assert_eq!(disk.steps(), steps, "{facts:?}: something was written");
            for (name, bytes) in &directory.0 {
                assert!(disk.read(name, usize::MAX).unwrap() == *bytes, "{facts:?}: {name} has changed");
            }
            error.to_string()
        }
    }
}

/// What a forged key replays; `None` when nothing is known of it.
fn response(store: &Store, id: &str) -> Option<String> {
    let key = Key::new(SCOPE, id).unwrap();
    store.peek(&key).unwrap()?;
    match store.reserve(&key, request()).unwrap() {
        Reserve::Replay(response) => match response.body() {
            Body::Kept(body) => Some(String::from_utf8(body.to_vec()).unwrap()),
            Body::NotKept { .. } => panic!("{id}: every forged response is kept"),
        },
        other => panic!("{id}: {other:?}"),
    }
}

/// Exactly these of the forged keys are there, each with its own name as its response.
#[track_caller]
pub(crate) fn holds(store: &Store, facts: &impl Debug, keys: &[(&str, bool)]) {
    for (id, there) in keys {
        assert_eq!(response(store, id), there.then(|| (*id).to_owned()), "{facts:?}: key {id}");
    }
}
