//! Sound stores to begin with: small workloads, the same each time, and what an opening may say of their keys.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::{Name, Shown, open, shown};
use crate::key::{Fingerprint, Key};
use crate::options::{AppendMode, Durability, OnInterrupted, Options, ReserveOptions};
use crate::reservation::{Interrupted, Reservation};
use crate::retention::Retention;
use crate::storage::Storage;
use crate::store::{Reserve, Store};
use crate::testing::{ManualClock, SimDisk};

/// A directory: names and what the files hold.
pub(super) type Files = BTreeMap<String, Vec<u8>>;

/// The smallest segment there may be at this size of responses, so that a few of the large ones fill it.
const SEGMENT_BYTES: u64 = 192 << 10;
const RESPONSE_BYTES_MAX: usize = 60_000;
const RETENTION: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_secs(30);
const KEYS: usize = 6;

/// How often a workload does something.
const ACTS: u64 = 24;

/// What a store has behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Past {
    /// It was closed.
    Closed,
    /// Its process was killed.
    Killed,
    /// The power went, and left nothing but what was synced.
    LostPower,
    /// It was killed twice: a recovery lies in the middle, sealed.
    Recovered,
    /// Responses are large, so its log has several segments; killed.
    Rolled,
    /// The same, and time passes, so that files have new lives and hold pieces of old ones; closed.
    Recycled,
}

const PASTS: [Past; 6] = [Past::Closed, Past::Killed, Past::LostPower, Past::Recovered, Past::Rolled, Past::Recycled];

/// A store as a workload left it.
#[derive(Debug)]
pub(super) struct Base {
    /// The directory after each act of the workload; the last one is what is damaged, the others are where bytes come
    /// from that were true once.
    pub(super) moments: Vec<Files>,
    /// How long after the beginning that was.
    pub(super) passed: Duration,
    /// All that an opening may say of a key, whatever it has lost of the log. Of others it knows nothing.
    pub(super) known: BTreeMap<Name, Vec<Shown>>,
}

impl Base {
    /// One store of each past, and an empty directory.
    pub(super) fn all() -> Vec<Self> {
        let empty = Self { moments: vec![Files::new()], passed: Duration::ZERO, known: BTreeMap::new() };
        let mut bases: Vec<Self> = (1..).zip(PASTS).map(|(seed, past)| Self::of(past, seed)).collect();
        bases.push(empty);
        bases
    }

    fn of(past: Past, seed: u64) -> Self {
        let mut workload = Workload::new(past, seed);
        for act in 0..ACTS {
            workload.act();
            workload.moments.push(workload.disk.kill());
            if past == Past::Recovered && act % 8 == 7 {
                workload.reopen(workload.disk.kill());
                workload.moments.push(workload.disk.kill());
            }
        }
        workload.end(past)
    }

    /// The clock at the moment of the damage. Each opening gets its own: a clock remembers whom it is to wake.
    pub(super) fn clock(&self) -> ManualClock {
        clock(self.passed)
    }
}

fn clock(passed: Duration) -> ManualClock {
    let clock = ManualClock::default();
    clock.advance(passed);
    clock
}

/// The options of every store here.
pub(super) fn options(clock: &ManualClock) -> Options {
    Options::new()
        .durability(Durability::ProcessCrash)
        .append_mode(AppendMode::Positioned)
        .lease(LEASE)
        .retention(Retention::new(RETENTION, 1.0))
        .response_bytes_max(RESPONSE_BYTES_MAX)
        .segment_bytes(SEGMENT_BYTES)
        .clock(Arc::new(clock.clone()))
}

/// All files of a disk.
pub(super) fn files(disk: &SimDisk) -> Files {
    let names = disk.list().expect("a disk without faults is read");
    let read = |name: String| {
        let bytes = disk.read(&name, usize::MAX).expect("a file that was listed is there");
        (name, bytes)
    };
    names.into_iter().map(read).collect()
}

/// A workload that goes on.
struct Workload {
    past: Past,
    random: u64,
    clock: ManualClock,
    passed: Duration,
    disk: SimDisk,
    store: Option<Store>,
    openings: u64,
    guards: Vec<Reservation>,
    interrupted: Vec<Interrupted>,
    moments: Vec<SimDisk>,
}

impl Workload {
    fn new(past: Past, seed: u64) -> Self {
        let mut workload = Self {
            past,
            random: seed,
            clock: clock(Duration::ZERO),
            passed: Duration::ZERO,
            disk: SimDisk::new(),
            store: None,
            openings: 0,
            guards: Vec::new(),
            interrupted: Vec::new(),
            moments: Vec::new(),
        };
        workload.reopen(SimDisk::new());
        workload
    }

    fn below(&mut self, bound: u64) -> u64 {
        super::mixed(&mut self.random) % bound
    }

    fn store(&self) -> &Store {
        self.store.as_ref().expect("the store is open")
    }

    /// Goes on with another disk; nothing of what is held is said on the one before.
    fn reopen(&mut self, disk: SimDisk) {
        self.store = None;
        self.guards.clear();
        self.interrupted.clear();
        self.openings += 1;
        self.disk = disk;
        self.store = Some(open(&self.disk, &self.clock, self.openings).expect("a sound store opens"));
    }

    fn key(&mut self) -> Key {
        let number = usize::try_from(self.below(KEYS as u64)).unwrap_or(0);
        // Scopes and ids of different lengths, so that records start at odd places.
        let scope = "scope".get(..number % 5).unwrap_or_default();
        Key::new(scope, format!("{}-{number}", "k".repeat(1 + 7 * number))).expect("a short key is a key")
    }

    /// Bytes that no other act stores.
    fn bytes(&mut self, max: u64) -> Vec<u8> {
        let len = usize::try_from(self.below(max)).unwrap_or(0);
        let mut seed = self.below(u64::MAX);
        std::iter::repeat_with(|| super::mixed(&mut seed).to_le_bytes()).flatten().take(len).collect()
    }

    fn response(&mut self) -> Vec<u8> {
        let large = matches!(self.past, Past::Rolled | Past::Recycled);
        let mut response = self.bytes(if large { 30_000 } else { 400 });
        response.resize(response.len() + if large { 30_000 } else { 0 }, 7);
        response
    }

    fn guard(&mut self) -> Option<Reservation> {
        let at = self.below(self.guards.len().max(1) as u64);
        let at = usize::try_from(at).unwrap_or(0);
        (at < self.guards.len()).then(|| self.guards.swap_remove(at))
    }

    fn act(&mut self) {
        match self.below(16) {
            0..6 => self.reserve(),
            6..10 => {
                let response = self.response();
                match self.guard() {
                    Some(guard) => told(guard.complete(&response)),
                    None => self.reserve(),
                }
            }
            10 => {
                let note = self.bytes(200);
                match self.guards.last() {
                    Some(guard) => told(guard.save_checkpoint(&note)),
                    None => self.reserve(),
                }
            }
            11 => {
                drop(self.guard());
            }
            12 => match self.guard() {
                Some(guard) => told(guard.detach(3 * LEASE)),
                None => self.reserve(),
            },
            13 => match self.guard() {
                Some(guard) => told(guard.release()),
                None => told(self.store().sync()),
            },
            14 => {
                let key = self.key();
                told(self.store().forget(&key, "asked to"));
            }
            _ => self.reserve(),
        }
        if self.past == Past::Recycled {
            let step = Duration::from_secs(12);
            self.passed += step;
            self.clock.advance(step);
        }
    }

    fn reserve(&mut self) {
        let key = self.key();
        let mut with = ReserveOptions::new().on_interrupted(OnInterrupted::TakeOver);
        if self.below(2) == 0 {
            with = with.durability(Durability::PowerLoss);
        }
        let fingerprint = Fingerprint::of(key.id());
        match self.store().reserve_with(&key, fingerprint, &with).expect("a sound store answers") {
            Reserve::Fresh(guard) => self.guards.push(guard),
            Reserve::Interrupted(interrupted) => self.interrupted.push(interrupted),
            Reserve::Replay(_) | Reserve::InFlight(_) | Reserve::Mismatch(_) | Reserve::TooOld(_) => {}
        }
    }

    fn end(mut self, past: Past) -> Base {
        let disk = match past {
            Past::Closed | Past::Recycled => {
                told(self.store().close(Duration::ZERO));
                self.disk.kill()
            }
            Past::Killed | Past::Recovered | Past::Rolled => self.disk.kill(),
            Past::LostPower => self.disk.crash_all_old(),
        };
        let mut moments = std::mem::take(&mut self.moments);
        moments.push(disk);
        let mut known: BTreeMap<_, Vec<Shown>> = BTreeMap::new();
        for moment in &moments {
            let store = open(&moment.kill(), &clock(self.passed), 1_000).expect("a moment of a sound store opens");
            for (key, shown) in shown(&store).keys {
                let all = known.entry(key).or_default();
                if !all.contains(&shown) {
                    all.push(shown);
                }
            }
        }
        Base { moments: moments.iter().map(files).collect(), passed: self.passed, known }
    }
}

/// An act of a sound store; what it comes to is told by the next opening.
fn told<T, E: std::fmt::Debug>(answer: Result<T, E>) {
    answer.map(drop).expect("a sound store acts");
}
