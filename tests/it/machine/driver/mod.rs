//! Drives a store and the model side by side, and keeps what the callers hold.

mod acts;
mod faults;
mod many;

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use keyonce::testing::{self, Expected, Handle, Known, ManualClock, Model, Owner, SimDisk, Tear, WaiterId};
use keyonce::{
    AppendMode, Attempt, Durability, Error, ErrorKind, Fingerprint, InFlight, Interrupted, Key, KeyState, OnDrop,
    OnInterrupted, Options, Reservation, Reserve, ReserveOptions, Retention, Store, Token,
};

use self::faults::Faults;
use super::{Reboot, Reopen};
use crate::place::{copy_files, tree};
use crate::workload::mixed;

pub(crate) const KEYS: u8 = 4;
pub(crate) const WINDOW_MS: u64 = 60_000;
pub(crate) const RESPONSE_BYTES_MAX: usize = 5_000;
/// The largest checkpoint, and the largest reason to forget a key.
pub(crate) const NOTE_BYTES_MAX: usize = 64 << 10;
const LEASE_MS: u64 = 30_000;
/// How long a guard renews itself.
const HELD_MS: u64 = 45_000;

/// As many of a kind are held; the oldest is dropped when another comes.
const HELD_MAX: usize = 6;

/// A future of a reserve, with what it asks and the model's shadow of it.
struct Waiting {
    id: WaiterId,
    key: Key,
    fingerprint: Fingerprint,
    options: ReserveOptions,
    future: Pin<Box<dyn Future<Output = Result<Reserve, Error>> + Send>>,
}

/// How a run's store is opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) durability: Durability,
    pub(crate) append_mode: AppendMode,
    pub(crate) on_interrupted: OnInterrupted,
    pub(crate) releases_on_drop: bool,
    pub(crate) renew_while_held: bool,
    pub(crate) tear: Tear,
    pub(crate) place: Place,
}

/// Where the store lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Simulated,
    Directory,
}

/// What was done, and what was answered how often.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) ops: u64,
    pub(crate) openings: u64,
    answers: BTreeMap<String, u64>,
}

enum Ground {
    Disk(SimDisk),
    /// A directory with a store in it; each kill leaves another one, by its number.
    Root(tempfile::TempDir, u64),
}

pub(crate) struct Driver {
    settings: Settings,
    seed: u64,
    clock: ManualClock,
    ground: Ground,
    store: Option<Store>,
    model: Model,
    opened: u64,
    calls: u64,
    guards: Vec<(Owner, Reservation)>,
    views: Vec<(Owner, Attempt)>,
    interrupted: Vec<(Handle, Interrupted)>,
    running: Vec<(Handle, InFlight, ReserveOptions)>,
    tokens: Vec<(Key, Token)>,
    waiting: Vec<Waiting>,
    faults: Faults,
    /// The act at hand was refused in a way that only a fault explains.
    refused: Option<ErrorKind>,
    /// The model when the act at hand had come so far, if a part of it was answered for good.
    done_of_it: Option<Model>,
    pub(crate) tally: Tally,
}

impl Settings {
    fn options(&self, clock: &ManualClock) -> Options {
        let options = Options::new()
            .durability(self.durability)
            .append_mode(self.append_mode)
            .on_interrupted(self.on_interrupted)
            .on_drop(if self.releases_on_drop { OnDrop::Release } else { OnDrop::Interrupt })
            .lease(Duration::from_millis(LEASE_MS))
            .retention(Retention::new(Duration::from_millis(WINDOW_MS), 1.0))
            .response_bytes_max(RESPONSE_BYTES_MAX)
            .clock(Arc::new(clock.clone()));
        if self.renew_while_held { options.renew_while_held(Duration::from_millis(HELD_MS)) } else { options }
    }
}

impl Tally {
    pub(super) fn add(&mut self, other: &Self) {
        self.ops += other.ops;
        self.openings += other.openings;
        for (answer, count) in &other.answers {
            *self.answers.entry(answer.clone()).or_default() += count;
        }
    }

    fn count(&mut self, call: &str, answer: &Expected) {
        let answer = format!("{answer:?}");
        let name = match answer.split_once([' ', '(', '{']) {
            Some(("Refused", kind)) => format!("{call}: {}", kind.trim_end_matches(')')),
            Some((name, _)) => format!("{call}: {name}"),
            None => format!("{call}: {answer}"),
        };
        *self.answers.entry(name).or_default() += 1;
    }

    /// Every answer that a call can give was given.
    pub(super) fn assert_everything_was_met(&self) {
        if std::env::var("KEYONCE_MACHINE_SEED").is_ok() || std::env::var("KEYONCE_MACHINE_OPS").is_ok() {
            return;
        }
        let answers = [
            ("reserve", "Owns Replay InFlight Interrupted Mismatch TooOld InvalidOptions"),
            ("complete", "Done Superseded TooLarge Closed"),
            ("complete without body", "Done Superseded TooLarge Closed"),
            ("release", "Done Superseded Closed"),
            ("renew", "Done Superseded Closed InvalidOptions"),
            ("renew by a view", "Done Superseded Closed InvalidOptions"),
            ("save checkpoint", "Done Superseded Closed TooLarge"),
            ("save checkpoint by a view", "Done Superseded Closed"),
            ("detach", "Done Superseded Closed"),
            ("reattach", "Owns Held Superseded"),
            ("take over", "Owns Replay InFlight Interrupted Closed"),
            ("resolve", "Done Superseded TooLarge Closed"),
            ("release interrupted", "Done Superseded Closed"),
            ("wait", "Owns Replay InFlight Interrupted Mismatch TooOld Closed"),
            ("once", "Owns Replay InFlight Interrupted Mismatch"),
            ("reserve in a batch", "Owns Replay InFlight Interrupted Mismatch TooOld InvalidOptions"),
            ("complete in a batch", "Done Superseded TooLarge Closed"),
            ("ask again", "Owns Replay InFlight Interrupted Mismatch Closed"),
            ("forget", "Done Superseded TooLarge"),
            ("reopen", "Close DropStore Kill LosePower LoseSome"),
        ];
        for (call, answers) in answers {
            for answer in answers.split(' ') {
                let name = format!("{call}: {answer}");
                assert!(self.answers.contains_key(&name), "no call was answered {name}: {:#?}", self.answers);
            }
        }
    }
}

fn key(number: u8) -> Key {
    Key::new("charges", [b'a' + number]).unwrap()
}

fn fingerprint(request: u8) -> Fingerprint {
    Fingerprint::of([request])
}

fn agree<T: PartialEq + std::fmt::Debug>(what: &str, store: &T, model: &T) -> Result<(), String> {
    if store == model {
        return Ok(());
    }
    let (store, model) = (brief(&format!("{store:?}")), brief(&format!("{model:?}")));
    Err(format!("{what}: the store says {store}\nthe model says {model}"))
}

/// A text in which long lists are cut.
fn brief(text: &str) -> String {
    let mut brief = String::new();
    let mut rest = text;
    while let Some((before, list)) = rest.split_once('[') {
        let (list, after) = list.split_once(']').unwrap_or((list, ""));
        let count = list.matches(", ").count() + 1;
        let list = if count > 8 { format!("{}, .. {count} in all", &list[..16]) } else { list.to_owned() };
        brief += &format!("{before}[{list}]");
        rest = after;
    }
    brief + rest
}

impl Driver {
    pub(crate) fn new(settings: Settings, seed: u64) -> Self {
        let clock = ManualClock::default();
        let model = Model::new(&settings.options(&clock)).unwrap();
        let ground = match settings.place {
            Place::Simulated => Ground::Disk(SimDisk::new().tearing(settings.tear)),
            Place::Directory => Ground::Root(tempfile::tempdir().unwrap(), 0),
        };
        let mut driver = Self {
            settings,
            seed,
            clock,
            ground,
            store: None,
            model,
            opened: 0,
            calls: 0,
            guards: Vec::new(),
            views: Vec::new(),
            interrupted: Vec::new(),
            running: Vec::new(),
            tokens: Vec::new(),
            waiting: Vec::new(),
            faults: Faults::default(),
            refused: None,
            done_of_it: None,
            tally: Tally::default(),
        };
        driver.open().unwrap();
        driver
    }

    /// The last look at everything.
    pub(crate) fn finish(&mut self) -> Result<(), String> {
        self.peek_all()?;
        while !self.waiting.is_empty() {
            self.give_up(0)?;
            self.learn()?;
        }
        self.compare_stats()
    }

    fn open(&mut self) -> Result<(), Error> {
        self.opened += 1;
        self.tally.openings += 1;
        let options = self.settings.options(&self.clock);
        let opened = match &self.ground {
            Ground::Disk(disk) => testing::open(disk.clone(), options, mixed(&[self.seed, self.opened])),
            Ground::Root(root, number) => Store::open(root.path().join(number.to_string()), options),
        };
        self.store = Some(opened?);
        Ok(())
    }

    fn store(&self) -> &Store {
        self.store.as_ref().unwrap()
    }

    fn reopen(&mut self, way: Reopen, reboot: Reboot) -> Result<(), String> {
        // A real directory loses no power.
        let way = match (way, &self.ground) {
            (Reopen::LosePower | Reopen::LoseSome { .. }, Ground::Root(..)) => Reopen::Kill,
            (way, _) => way,
        };
        self.compare_stats()?;
        let left = self.leave(way);
        let store = self.store.take().unwrap();
        match way {
            Reopen::Close => {
                let report = store.close(Duration::ZERO);
                let unfinished = self.model.close();
                let report = report.map_err(|error| self.failed("closing", &error))?;
                agree("closing", &report.unfinished, &unfinished)?;
            }
            Reopen::DropStore => {
                self.model.close();
            }
            Reopen::Kill => self.model.kill(),
            Reopen::LosePower | Reopen::LoseSome { .. } => self.model.lose_power(),
        }
        drop(store);
        if way == Reopen::DropStore && self.is_strained() {
            // Nobody is told whether all was said.
            self.refused = Some(ErrorKind::Poisoned);
            return Err("the store was dropped while its disk failed".to_owned());
        }
        if let Some(left) = left {
            self.take_to(left);
        }
        if reboot == Reboot::Yes {
            self.clock.reboot();
        }
        self.open().map_err(|error| self.failed("opening", &error))?;
        self.model.open();
        let crashed = !matches!(way, Reopen::Close | Reopen::DropStore);
        let name = format!("{way:?}");
        let name = name.split(' ').next().unwrap();
        *self.tally.answers.entry(format!("reopen: {name}")).or_default() += 1;
        if !self.is_strained() {
            agree("clean", &self.store().opened().clean, &!crashed)?;
        }
        self.compare_opening(crashed)
    }

    /// What a crash leaves, taken before the store is closed in the place that is given up.
    fn leave(&mut self, way: Reopen) -> Option<Ground> {
        match &mut self.ground {
            Ground::Disk(disk) => match way {
                Reopen::Close | Reopen::DropStore => None,
                Reopen::Kill => Some(Ground::Disk(disk.kill())),
                Reopen::LosePower => Some(Ground::Disk(disk.crash_all_old())),
                Reopen::LoseSome { seed } => Some(Ground::Disk(disk.crash_image(seed))),
            },
            Ground::Root(root, number) => {
                if way == Reopen::Kill {
                    let from = root.path().join(number.to_string());
                    *number += 1;
                    let to = root.path().join(number.to_string());
                    // The helper thread may be at work; a kill is a moment.
                    while {
                        copy_files(&from, &to);
                        contents(&from) != contents(&to)
                    } {
                        std::fs::remove_dir_all(&to).unwrap();
                    }
                }
                None
            }
        }
    }

    fn compare_opening(&mut self, crashed: bool) -> Result<(), String> {
        for number in 0..KEYS {
            let key = key(number);
            let seen = self.store().peek(&key).map_err(|error| self.failed("peeking", &error))?;
            if crashed {
                self.model.adopt(&key, seen.as_ref());
            }
            self.peeked(&key, seen.as_ref())?;
        }
        let known = self.model.known();
        let interrupted = known.iter().filter(|(_, known)| known.state == KeyState::Interrupted).count();
        let report = self.store().opened();
        agree("keys", &report.keys, &(known.len() as u64))?;
        agree("interrupted keys", &report.interrupted, &(interrupted as u64))
    }

    fn peek(&mut self, key: &Key) -> Result<(), String> {
        let seen = self.store().peek(key).map_err(|error| self.failed("peeking", &error))?;
        self.peeked(key, seen.as_ref())
    }

    fn peeked(&mut self, key: &Key, seen: Option<&keyonce::KeyInfo>) -> Result<(), String> {
        agree(&format!("peek at {key:?}"), &Ok(seen.map(Known::from)), &self.model.peek(key))
    }

    fn peek_all(&mut self) -> Result<(), String> {
        (0..KEYS).try_for_each(|number| self.peek(&key(number)))
    }

    fn compare_stats(&mut self) -> Result<(), String> {
        let (store, model) = (self.store().stats(), self.model.stats());
        let counters = |stats: &keyonce::Stats| {
            [
                ("fresh", stats.fresh),
                ("replays", stats.replays),
                ("in flight", stats.in_flight),
                ("interrupted", stats.interrupted),
                ("mismatches", stats.mismatches),
                ("too old", stats.too_old),
                ("completed", stats.completed),
                ("released", stats.released),
                ("superseded", stats.superseded),
                ("guards", stats.guards),
            ]
        };
        agree("stats", &counters(&store), &counters(&model))?;
        let bounds = self.model.expired_unresolved();
        if bounds.contains(&store.expired_unresolved) {
            return Ok(());
        }
        Err(format!("{} keys expired unresolved, by the model {bounds:?}", store.expired_unresolved))
    }
}

fn contents(dir: &std::path::Path) -> Vec<Vec<u8>> {
    tree(dir).into_iter().map(|(_, bytes)| bytes).collect()
}
