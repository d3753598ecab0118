//! The reference of the store: a map, without a disk, without threads, without a log.
//!
//! It is a second opinion on the table of states, written from the words of the documentation. So it uses nothing of
//! what decides in the store.

mod acts;
mod doubt;
mod expected;
mod history;
mod waiting;

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::time::SystemTime;

pub use self::expected::{Expected, Known};
use self::history::{Guard, History, Record, Seen, Work, at};
use self::waiting::Waiter;
pub use self::waiting::WaiterId;
use crate::error::{Error, ErrorKind};
use crate::format::Cause;
use crate::key::{Fingerprint, Key, Token};
use crate::options::{Checked, CheckedReserve, Durability, OnDrop, Options, ReserveOptions};
use crate::reservation::{KeyInfo, KeyState};
use crate::stats::Stats;

/// What a store must answer, said by a plain map that is driven beside it.
///
/// A test calls the store and the model with the same arguments and compares: every answer of the store turns into the
/// [`Expected`] one by `From`. What the model cannot know it is told: the token of each new owner by
/// [`owner`](Self::owner), and after a crash, for a key of which the crash may have left one record or another, which
/// one it was, by [`adopt`](Self::adopt). Both panic when what they are told breaks a promise.
///
/// It knows every answer but those of a full disk and of a failing one. Calls are made one at a time; one that waits is
/// a future that the test polls: see [`wait`](Self::wait). Its time is that of the options' clock, which nobody may set
/// by hand but by letting time pass; across boots of the machine it goes on by the wall clock.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// use keyonce::testing::{self, Expected, ManualClock, Model, SimDisk};
/// use keyonce::{Fingerprint, Key, Options, Reserve, ReserveOptions};
///
/// let clock = ManualClock::default();
/// let options = Options::new().lease(Duration::from_secs(10)).clock(Arc::new(clock.clone()));
/// let disk = SimDisk::new();
/// let store = testing::open(disk.clone(), options.clone(), 1)?;
/// let mut model = Model::new(&options)?;
///
/// let (key, request, with) = (Key::new("charges", "order-17")?, Fingerprint::of("9.99"), ReserveOptions::new());
/// let answer = store.reserve_with(&key, request, &with);
/// assert_eq!(Expected::from(&answer), model.reserve(&key, request, &with));
/// let Reserve::Fresh(reservation) = answer? else { panic!("the key is new") };
/// let owner = model.owner(&key, reservation.token());
///
/// clock.advance(Duration::from_secs(10)); // the lease lapses
/// assert_eq!(Expected::from(&store.reserve_with(&key, request, &with)), model.reserve(&key, request, &with));
/// // A late completion counts.
/// assert_eq!(Expected::from(&reservation.complete(b"charged")), model.complete(&owner, b"charged"));
///
/// // The power fails; what was told is still true.
/// let store = testing::open(disk.crash_image(7), options, 2)?;
/// model.lose_power();
/// model.open();
/// model.adopt(&key, store.peek(&key)?.as_ref());
/// assert_eq!(Expected::from(&store.reserve_with(&key, request, &with)), model.reserve(&key, request, &with));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Model {
    options: Checked,
    time: Time,
    /// Store time of the call at hand.
    now_ms: u64,
    keys: HashMap<Key, History>,
    token_max: u64,
    /// How often the store was opened; 0 is not open.
    run: u64,
    is_open: bool,
    guards: u64,
    waiters: HashMap<u64, Waiter>,
    /// How many there have been.
    waiters_made: u64,
    /// The position of the newest record.
    written: u64,
    /// All up to this position is durable, whatever else may be.
    durable: u64,
    /// When the background sync is due, at [`Durability::Interval`].
    sync_due_ms: u64,
    opened_ms: u64,
    stats: Stats,
    /// Keys that had expired unfinished before the store was opened and were reserved anew since.
    expired_at_opening: u64,
    /// What counts as durable may turn out not to be.
    expects_failures: bool,
    /// The largest token before the call that was lost.
    token_before: u64,
}

/// The model's shadow of a guard: whoever owns a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    key: Key,
    token: Token,
    guard: u64,
    run: u64,
}

/// The model's shadow of an [`Interrupted`](crate::Interrupted) or an [`InFlight`](crate::InFlight).
#[derive(Clone, Debug)]
pub struct Handle {
    key: Key,
    fingerprint: Fingerprint,
    asked: CheckedReserve,
    token: Token,
    run: u64,
}

/// Why an act is not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum No {
    Closed,
    Superseded,
}

impl From<No> for Expected {
    fn from(no: No) -> Self {
        match no {
            No::Closed => Self::Refused(ErrorKind::Closed),
            No::Superseded => Self::Superseded,
        }
    }
}

/// One reading of the clocks, beside the store's time.
#[derive(Clone, Copy, Debug)]
struct Time {
    store_ms: u64,
    boot_ms: u64,
    wall_ms: u64,
    boot_id: [u8; 16],
}

impl Owner {
    /// The key.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The fencing token.
    pub fn token(&self) -> Token {
        self.token
    }
}

impl Handle {
    /// The key.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The token of the reservation that was found.
    pub fn token(&self) -> Token {
        self.token
    }
}

impl Model {
    /// The model of an empty store that was just opened with these options.
    ///
    /// # Errors
    ///
    /// `InvalidOptions`, as [`Store::open`](crate::Store::open).
    pub fn new(options: &Options) -> Result<Self, Error> {
        let options = options.validate()?;
        let (boot_ms, wall_ms, boot_id) = (options.clock.boot_ms(), options.clock.wall_ms(), options.clock.boot_id());
        Ok(Self {
            options,
            time: Time { store_ms: wall_ms, boot_ms, wall_ms, boot_id },
            now_ms: wall_ms,
            keys: HashMap::new(),
            token_max: 0,
            run: 1,
            is_open: true,
            guards: 0,
            waiters: HashMap::new(),
            waiters_made: 0,
            written: 0,
            durable: 0,
            sync_due_ms: u64::MAX,
            opened_ms: wall_ms,
            stats: Stats::default(),
            expired_at_opening: 0,
            expects_failures: false,
            token_before: 0,
        })
    }

    /// What [`Store::reserve_with`](crate::Store::reserve_with) answers.
    pub fn reserve(&mut self, key: &Key, fingerprint: Fingerprint, with: &ReserveOptions) -> Expected {
        let asked = match with.validate(&self.options) {
            Ok(asked) => asked,
            Err(error) => return Expected::Refused(error.kind()),
        };
        if let Err(no) = self.begin() {
            return no.into();
        }
        self.ask(key, fingerprint, &asked, true)
    }

    /// The owner that an answer [`Expected::Owns`] has made, with its real token.
    ///
    /// # Panics
    ///
    /// When nobody owns the key, or the token was given before.
    pub fn owner(&mut self, key: &Key, token: Token) -> Owner {
        let history = self.keys.get_mut(key).unwrap_or_else(|| panic!("{key:?} was never reserved"));
        let guard = history.guard.as_ref().unwrap_or_else(|| panic!("nobody owns {key:?}")).number;
        self.learn(key, token);
        Owner { key: key.clone(), token, guard, run: self.run }
    }

    /// Tells the token of the latest reservation of a key, for one that was handed over to somebody who has not yet
    /// taken it: see [`nameless`](Self::nameless).
    ///
    /// # Panics
    ///
    /// When the key is not in flight, the token was given before, or another one was told.
    pub fn learn(&mut self, key: &Key, token: Token) {
        let latest = self.keys.get_mut(key).and_then(History::latest_mut);
        let Some(Record::Running(work)) = latest else { panic!("{key:?} is not in flight") };
        if work.token == 0 {
            assert!(token.to_u64() > self.token_max, "the token {token} of {key:?} is not new");
            work.token = token.to_u64();
            self.token_max = work.token;
        }
        assert_eq!(work.token, token.to_u64(), "the token of {key:?}");
    }

    /// The keys that have changed hands without the model being told the new token. [`learn`](Self::learn) each before
    /// the next call, from a peek at the store; of several, the one with the smallest token first.
    pub fn nameless(&mut self) -> Vec<Key> {
        self.tick();
        let is_nameless = |(_, history): &(&Key, &History)| history.token() == Some(0);
        self.keys.iter().filter(is_nameless).map(|(key, _)| key.clone()).collect()
    }

    /// The handle that an answer [`Expected::Interrupted`] or [`Expected::InFlight`] has given to whoever asked so.
    ///
    /// # Panics
    ///
    /// When the options are out of their range.
    pub fn handle(&self, key: &Key, fingerprint: Fingerprint, with: &ReserveOptions, token: Token) -> Handle {
        let asked = with.validate(&self.options).expect("the options were good for an answer");
        Handle { key: key.clone(), fingerprint, asked, token, run: self.run }
    }

    /// What [`Store::peek`](crate::Store::peek) answers.
    ///
    /// # Errors
    ///
    /// `Closed`.
    pub fn peek(&mut self, key: &Key) -> Result<Option<Known>, ErrorKind> {
        if self.begin().is_err() {
            return Err(ErrorKind::Closed);
        }
        self.rests_on(key, self.options.durability);
        Ok(self.seen(key).known())
    }

    /// What [`Store::sync`](crate::Store::sync) answers.
    ///
    /// # Errors
    ///
    /// `Closed`.
    pub fn sync(&mut self) -> Result<(), ErrorKind> {
        self.begin().map_err(|_| ErrorKind::Closed)?;
        self.durable = self.written;
        Ok(())
    }

    /// The store is closed, and waits for nobody. Returns how many owners have not finished.
    ///
    /// # Panics
    ///
    /// When the model was not told who owns a key, or what a crash has left of it.
    pub fn close(&mut self) -> u64 {
        if self.begin().is_err() {
            return 0;
        }
        self.wake_all();
        let now_ms = self.now_ms;
        let guarded = |(key, history): (&Key, &History)| Some((key.clone(), history.guard.clone()?));
        let guarded: Vec<(Key, Guard)> = self.keys.iter().filter_map(guarded).collect();
        let mut unfinished = 0;
        for (key, guard) in guarded {
            match self.seen(&key) {
                Seen::InFlight(work) | Seen::Interrupted(work, ..) if guard.is_unseen => {
                    self.give_up_unseen(&key, work);
                    continue;
                }
                // The owner may still be at work.
                Seen::InFlight(work) => self.stop(&key, work, Cause::LeaseLapsed, now_ms),
                Seen::Interrupted(work, cause, since_ms) => self.stop(&key, work, cause, since_ms),
                Seen::Absent | Seen::Done(..) => unreachable!("a guard keeps its key"),
            }
            unfinished += 1;
        }
        self.durable = self.written;
        self.is_open = false;
        unfinished
    }

    /// The process is killed: all that was written is there, and nobody holds anything.
    pub fn kill(&mut self) {
        self.tick();
        self.durable = self.written;
        self.crash();
    }

    /// The power fails, between two calls: what no answer rests on may be there or not. [`adopt`](Self::adopt) every key
    /// once the store is open again. Of a crash amid a call the store shows what a model before that call allows, or one
    /// after it: keep a clone of each. A guard that a test drops writes to the disk, too: take the image before.
    pub fn lose_power(&mut self) {
        self.tick();
        self.crash();
    }

    fn crash(&mut self) {
        for history in self.keys.values_mut() {
            history.forget_before(self.durable);
            history.crash();
        }
        self.is_open = false;
        self.wake_all();
    }

    /// The store is opened again, after it was closed or has crashed.
    pub fn open(&mut self) {
        self.tick();
        self.run += 1;
        self.is_open = true;
        self.opened_ms = self.now_ms;
        self.sync_due_ms = u64::MAX;
        self.stats = Stats::default();
        self.expired_at_opening = 0;
        for history in self.keys.values_mut() {
            let is_absent = matches!(history.seen(self.now_ms), Seen::Absent);
            history.expired_at_opening = is_absent && history.latest().is_some_and(Record::is_unfinished);
        }
        self.expects_failures = false;
        // What an opening accepts, it makes durable anew.
        self.durable = self.written;
    }

    /// Takes over what the store knows of a key after a crash: `seen` is the answer of its peek.
    ///
    /// # Panics
    ///
    /// When the crash could not have left that. Then the store has broken a promise.
    pub fn adopt(&mut self, key: &Key, seen: Option<&KeyInfo>) {
        self.tick();
        let seen = seen.map(Known::from);
        let history = self.keys.entry(key.clone()).or_default();
        let fits = |(_, record): &&(u64, Record)| record.seen(self.now_ms, None).known() == seen;
        // Of those that look alike, one that expired unfinished is told from the others by a counter alone.
        let expired = |record: &&(u64, Record)| fits(record) && seen.is_none() && record.1.is_unfinished();
        let left = history.records.iter().rfind(expired).or_else(|| history.records.iter().rfind(fits)).cloned();
        match left {
            Some(left) => {
                history.expired_at_opening = seen.is_none() && left.1.is_unfinished();
                history.records = vec![left];
            }
            None if history.records.is_empty() && seen.is_none() => {}
            None => panic!("a crash cannot have left {seen:#?} of {key:?}, only one of {:#?}", history.records),
        }
        history.in_doubt = false;
    }

    /// The moments, by the store's time, at which something will change by itself: leases that lapse, keys that are
    /// forgotten, syncs that nobody waits for. In order; some may have passed.
    pub fn due(&self) -> Vec<SystemTime> {
        let mut due: Vec<u64> = Vec::new();
        due.extend((self.sync_due_ms < u64::MAX).then_some(self.sync_due_ms));
        for history in self.keys.values() {
            due.extend(history.guard.as_ref().map(Guard::lapses_ms));
            if let Some(work) = history.latest().and_then(Record::work) {
                due.push(work.kept_until_ms);
                due.extend(work.detached.then_some(work.lease_end_ms));
            }
        }
        due.sort_unstable();
        due.dedup();
        due.into_iter().map(at).collect()
    }

    /// The store's time.
    pub fn now(&mut self) -> SystemTime {
        self.tick();
        at(self.now_ms)
    }

    /// What is known of every key that is not absent, in no order.
    pub fn known(&mut self) -> Vec<(Key, Known)> {
        self.tick();
        let known = |(key, history): (&Key, &History)| Some((key.clone(), history.seen(self.now_ms).known()?));
        self.keys.iter().filter_map(known).collect()
    }

    /// The counters of [`Store::stats`](crate::Store::stats) that calls move, from `fresh` to `superseded`, and
    /// `guards`. Others are zero, and [`expired_unresolved`](Self::expired_unresolved) has bounds for one more.
    pub fn stats(&self) -> Stats {
        let guards = self.keys.values().filter(|history| history.guard.is_some()).count();
        Stats { guards: guards as u64, ..self.stats.clone() }
    }

    /// Within which bounds [`Stats::expired_unresolved`] is: the store counts such a key when it is asked for again, or
    /// earlier.
    pub fn expired_unresolved(&mut self) -> RangeInclusive<u64> {
        self.tick();
        let asked = self.stats.expired_unresolved;
        let expired = |history: &&History| {
            history.latest().is_some_and(Record::is_unfinished) && matches!(history.seen(self.now_ms), Seen::Absent)
        };
        asked..=asked + self.expired_at_opening + self.keys.values().filter(expired).count() as u64
    }

    /// Reads the clock, and does what has become due since.
    fn tick(&mut self) {
        self.read_clock();
        if !self.is_open {
            return;
        }
        if self.sync_due_ms <= self.now_ms {
            self.sync_due_ms = u64::MAX;
            self.durable = self.written;
        }
        let now_ms = self.now_ms;
        self.wake_who_is_due();
        let lapsed = |(_, history): &(&Key, &History)| {
            let over = history.guard.as_ref().is_some_and(|guard| guard.lapses_ms() <= now_ms);
            over && matches!(history.latest(), Some(Record::Running(_)))
        };
        let lapsed: Vec<Key> = self.keys.iter().filter(lapsed).map(|(key, _)| key.clone()).collect();
        for key in lapsed {
            let history = self.keys.get(&key).cloned().unwrap_or_default();
            match (history.seen(now_ms), history.guard) {
                (Seen::Interrupted(work, ..), Some(guard)) if guard.is_unseen => self.give_up_unseen(&key, work),
                // The guard stays: its owner may be at work, and finish late.
                (Seen::Interrupted(work, cause, since_ms), guard) => {
                    self.stop_under(&key, work, cause, since_ms, guard);
                }
                (Seen::Absent | Seen::InFlight(_) | Seen::Done(..), _) => unreachable!("its lease has lapsed"),
            }
        }
    }

    fn read_clock(&mut self) {
        let clock = &self.options.clock;
        let (boot_ms, wall_ms, boot_id) = (clock.boot_ms(), clock.wall_ms(), clock.boot_id());
        let passed_ms = if boot_id == self.time.boot_id {
            boot_ms.saturating_sub(self.time.boot_ms)
        } else {
            wall_ms.saturating_sub(self.time.wall_ms)
        };
        self.time = Time { store_ms: self.time.store_ms.saturating_add(passed_ms), boot_ms, wall_ms, boot_id };
        self.now_ms = self.time.store_ms;
    }

    fn begin(&mut self) -> Result<(), No> {
        self.tick();
        if self.is_open { Ok(()) } else { Err(No::Closed) }
    }

    fn seen(&self, key: &Key) -> Seen {
        let Some(history) = self.keys.get(key) else { return Seen::Absent };
        assert!(!history.in_doubt, "what the crash left of {key:?} is not known: adopt what peek says");
        assert_ne!(history.token(), Some(0), "the model was not told who owns {key:?}");
        history.seen(self.now_ms)
    }

    /// An answer rests on the latest record of a key, at this level or that of the record.
    fn rests_on(&mut self, key: &Key, level: Durability) {
        if let Some((position, record)) = self.keys.get(key).and_then(|history| history.records.last())
            && (needs_sync(level) || needs_sync(record.durability()))
        {
            self.durable = self.durable.max(*position);
        }
    }

    /// Writes a record. Its guard is ended, unless `guard` goes on or begins.
    fn write(&mut self, key: &Key, record: Record, guard: Option<Guard>) {
        self.written += 1;
        let (written, durable, now_ms) = (self.written, self.durable, self.now_ms);
        let history = self.keys.entry(key.clone()).or_default();
        if history.records.is_empty() {
            history.records.push((0, Record::Gone(Durability::ProcessCrash)));
        }
        let was_unfinished = history.latest().is_some_and(Record::is_unfinished);
        if was_unfinished && matches!(history.seen(now_ms), Seen::Absent) {
            match history.expired_at_opening {
                true => self.expired_at_opening += 1,
                false => self.stats.expired_unresolved += 1,
            }
        }
        history.expired_at_opening = false;
        // Losing what ends a reservation without a response is safe: the key is interrupted then.
        let waits = match &record {
            Record::Running(work) | Record::Done(work, _) => needs_sync(work.durability),
            Record::Stopped(..) | Record::Gone(_) => false,
        };
        history.records.push((written, record));
        history.guard = guard;
        if !self.expects_failures {
            history.forget_before(durable);
        }
        if waits {
            self.durable = written;
        }
        if let (Some(every_ms), u64::MAX) = (self.options.sync_every_ms, self.sync_due_ms) {
            self.sync_due_ms = now_ms.saturating_add(every_ms);
        }
        self.serve(key);
    }

    /// The key is interrupted, and nobody holds it any more.
    fn stop(&mut self, key: &Key, work: Work, cause: Cause, since_ms: u64) {
        self.stop_under(key, work, cause, since_ms, None);
    }

    /// The key is interrupted. It is kept a retention longer than anybody may have worked on it, or held it.
    fn stop_under(&mut self, key: &Key, work: Work, cause: Cause, since_ms: u64, guard: Option<Guard>) {
        let held_until_ms = if guard.is_some() { since_ms } else { self.now_ms };
        let worked_until_ms = work.lease_end_ms.max(held_until_ms);
        let kept_until_ms = work.kept_until_ms.max(worked_until_ms.saturating_add(work.retention_ms));
        self.write(
            key,
            Record::Stopped(Work { kept_until_ms, detached: false, earlier: None, ..work }, cause, since_ms),
            guard,
        );
    }

    fn new_guard(&mut self, lease_ms: u64, on_drop: OnDrop) -> Guard {
        self.guards += 1;
        Guard {
            number: self.guards,
            lease_end_ms: self.now_ms.saturating_add(lease_ms),
            lease_ms,
            renews_until_ms: self.now_ms.saturating_add(self.options.lease.while_held_ms),
            on_drop,
            is_unseen: false,
        }
    }
}

fn needs_sync(level: Durability) -> bool {
    match level {
        Durability::PowerLoss => true,
        Durability::ProcessCrash | Durability::Interval(_) => false,
    }
}

/// The state of a key that is not absent, and when it was first reserved.
fn standing_for(seen: &Seen) -> Option<(&Work, KeyState)> {
    match seen {
        Seen::Absent => None,
        Seen::InFlight(work) => Some((work, KeyState::InFlight)),
        Seen::Interrupted(work, ..) => Some((work, KeyState::Interrupted)),
        Seen::Done(work, _) => Some((work, KeyState::Done)),
    }
}
