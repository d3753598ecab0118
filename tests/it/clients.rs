//! The clients of one store on a simulated disk: they do what a workload says, and tell the oracle what they were told.

mod acts;
mod many;
mod waiters;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use keyonce::testing::{self, Access, ManualClock, Moments, SimDisk, Storage};
use keyonce::{Cause, Clock, Durability, Error, ErrorKind, Interrupted, OnDrop, Reservation, Store, Token};

use self::waiters::Waiter;
use super::examine::PROBE;
use super::oracle::{Crash, Fate, Hands, Oracle, Owner, fingerprint, key, observe};
use super::workload::{Mount, Op, SEGMENT_BYTES, Settings, mixed};

/// A stretch of a workload on one disk, to be looked at moment by moment.
#[derive(Debug)]
pub(crate) struct Phase {
    pub(crate) disk: SimDisk,
    pub(crate) moments: Moments,
    pub(crate) oracle: Oracle,
}

/// A call that failed.
#[derive(Clone, Debug)]
pub(crate) struct Failed {
    pub(crate) call: usize,
    pub(crate) error: Error,
}

/// What was asked for a key when it was reserved.
#[derive(Clone, Copy, Debug)]
struct Asked {
    request: u8,
    durability: Durability,
    lease_ms: u64,
    retention_ms: u64,
    on_drop: OnDrop,
}

struct Guard {
    key: usize,
    on_drop: OnDrop,
    lease_ms: u64,
    reservation: Reservation,
}

/// What fails first, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Step(u64),
    Read(u64),
}

/// All clients of one store.
pub(crate) struct Clients {
    pub(crate) disk: SimDisk,
    pub(crate) oracle: Oracle,
    /// What was told by errors. Empty unless the disk has faults.
    pub(crate) failed: Vec<Failed>,
    mount: Mount,
    settings: Settings,
    clock: ManualClock,
    /// Store time when the machine was started.
    booted_at_ms: u64,
    boots: u32,
    seed: u64,
    opened: u64,
    opened_at: u64,
    store: Option<Store>,
    guards: Vec<Guard>,
    detached: Vec<(usize, Token)>,
    interrupted: Vec<(usize, Asked, Interrupted)>,
    /// In the order of their coming.
    waiters: Vec<Waiter>,
    /// How often what is rare has happened.
    pub(crate) met: BTreeMap<&'static str, u64>,
    /// The step that fails, or the call that changes nothing.
    fault: Option<Fault>,
    /// And every later one.
    fails_on: bool,
    /// What a client knows is not enough to go on.
    over: bool,
    /// What was wrong after a power loss within the workload.
    pub(crate) wrong: Option<String>,
    /// Everything that was recorded.
    pub(crate) phases: Vec<Phase>,
}

impl Clients {
    /// Clients of a store that is not opened yet, on an empty disk.
    pub(crate) fn new(mount: Mount, settings: Settings, seed: u64) -> Self {
        let disk = SimDisk::new().tearing(settings.tear);
        disk.record();
        let clock = ManualClock::default();
        Self {
            disk,
            oracle: Oracle::new((0..settings.keys).map(|_| Arc::new(Fate::Absent)), 0),
            failed: Vec::new(),
            mount,
            settings,
            booted_at_ms: clock.wall_ms(),
            clock,
            boots: 0,
            seed,
            opened: 0,
            opened_at: 0,
            store: None,
            guards: Vec::new(),
            detached: Vec::new(),
            interrupted: Vec::new(),
            waiters: Vec::new(),
            met: BTreeMap::new(),
            fault: None,
            fails_on: false,
            over: false,
            wrong: None,
            phases: Vec::new(),
        }
    }

    /// The process ends here, by a kill.
    pub(crate) fn finish(&mut self) {
        if self.wrong.is_none() {
            self.end_phase();
        }
    }

    fn end_phase(&mut self) {
        let phase = Phase { disk: self.disk.clone(), moments: self.disk.moments(), oracle: self.oracle.clone() };
        let grown = segment_lengths(&self.disk).any(|bytes| bytes > SEGMENT_BYTES);
        self.phases.push(phase);
        if grown {
            self.meet("disks with segments that grew");
        }
    }

    pub(crate) fn hands(&self) -> Hands {
        let boot_ms = self.clock.boot_ms();
        let store_ms = self.booted_at_ms + boot_ms;
        Hands { wall_ms: self.clock.wall_ms(), boot_ms, boots: self.boots, store_ms }
    }

    fn meet(&mut self, what: &'static str) {
        *self.met.entry(what).or_default() += 1;
    }

    /// Lets the one step or call fail, or it and every later one of its sort.
    pub(crate) fn fail(&mut self, fault: Fault, from_then_on: bool, raw_os_error: i32) {
        match (fault, from_then_on) {
            (Fault::Step(step), false) => self.disk.fail_at(step, raw_os_error),
            (Fault::Step(step), true) => self.disk.fail_from(step, raw_os_error),
            (Fault::Read(read), false) => self.disk.fail_read_at(read, raw_os_error),
            (Fault::Read(read), true) => self.disk.fail_reads_from(read, raw_os_error),
        }
        self.fault = Some(fault);
        self.fails_on = from_then_on;
    }

    /// Whether something failed by now.
    pub(crate) fn is_struck(&self) -> bool {
        match self.fault {
            None => false,
            Some(Fault::Step(step)) => self.disk.steps() > step,
            Some(Fault::Read(read)) => self.disk.reads() > read,
        }
    }

    /// Whether something failed while the store was open: then what ends without a word is in doubt.
    fn is_shaken(&self) -> bool {
        let before = matches!(self.fault, Some(Fault::Step(step)) if step < self.opened_at);
        self.is_struck() && (!before || self.fails_on)
    }

    /// The disk works again.
    pub(crate) fn heal(&mut self) {
        self.disk.heal();
        self.open();
    }

    /// Store time.
    fn now_ms(&self) -> u64 {
        self.hands().store_ms
    }

    /// A call that a client makes, with what it tells the oracle.
    fn call(&mut self, act: impl FnOnce(&mut Self)) {
        self.oracle.begin(self.disk.steps(), self.hands());
        act(self);
        self.oracle.end(self.disk.steps(), self.hands());
    }

    fn told(&mut self, error: Error) {
        assert!(self.is_struck(), "nothing is wrong with the disk: {error}: {error:?}");
        self.failed.push(Failed { call: self.oracle.calls() - 1, error });
    }

    /// Opens the store, unless it is open.
    pub(crate) fn open(&mut self) {
        self.over |= self.store.is_none() && self.oracle.is_in_doubt();
        if self.over || self.store.is_some() {
            return;
        }
        self.opened += 1;
        let seed = mixed(&[self.seed, self.opened]);
        self.call(|this| match (this.mount)(this.disk.clone(), this.settings.options(&this.clock), seed) {
            Ok(store) => {
                this.store = Some(store);
                this.opened_at = this.disk.steps();
                this.oracle.opened();
                this.oracle.told_all(true);
            }
            Err(error) => this.told(error),
        });
    }

    pub(crate) fn run(&mut self, op: Op) {
        self.open();
        if self.over {
            return;
        }
        match op {
            Op::Advance { ms } => self.call(|this| this.advance(ms)),
            Op::StepWall { step_ms } => self.call(|this| {
                this.step_wall(step_ms);
                this.settle_waiters();
            }),
            Op::Close => self.close(),
            Op::DropStore => self.call(Self::drop_store),
            Op::Reboot { step_ms } => {
                self.close();
                self.call(|this| {
                    let before = this.hands();
                    this.step_wall(step_ms);
                    this.clock.reboot();
                    this.boots += 1;
                    this.booted_at_ms = before.store_ms_after_boot(this.clock.wall_ms());
                });
            }
            Op::Kill => self.kill(),
            Op::LosePower { seed } => self.lose_power(seed),
            _ if self.store.is_none() => {}
            _ => self.call(|this| {
                this.act(op);
                this.settle_waiters();
            }),
        }
        self.open();
    }

    fn advance(&mut self, ms: u64) {
        self.clock.advance(Duration::from_millis(ms));
        if let (Durability::Interval(every), Some(_)) = (self.settings.durability, &self.store) {
            let every_ms = u64::try_from(every.as_millis()).unwrap();
            self.oracle.durable_until(self.now_ms() - every_ms);
            self.meet("syncs by interval");
        }
        self.settle_waiters();
    }

    fn step_wall(&mut self, step_ms: i64) {
        self.clock.set_wall_ms(self.clock.wall_ms().saturating_add_signed(step_ms));
        if step_ms != 0 {
            self.meet("steps of the wall clock");
        }
    }

    fn store(&self) -> &Store {
        self.store.as_ref().unwrap()
    }

    /// The latest guard of the key that a client holds; an older one lies beneath it.
    fn take_guard(&mut self, key: usize) -> Option<Guard> {
        let at = self.guards.iter().rposition(|guard| guard.key == key)?;
        Some(self.guards.remove(at))
    }

    fn take_interrupted(&mut self, key: usize) -> Option<(Asked, Interrupted)> {
        let at = self.interrupted.iter().rposition(|(other, ..)| *other == key)?;
        let (_, asked, interrupted) = self.interrupted.remove(at);
        Some((asked, interrupted))
    }

    /// `op`, for another key if a client holds nothing that it could use on its own.
    pub(crate) fn usable(&self, op: Op) -> Op {
        let guarded = |key: usize| {
            let held = self.guards.iter().rev().map(|guard| guard.key);
            held.clone().find(|held| *held == key).or_else(|| held.clone().next()).unwrap_or(key)
        };
        let handled = |key: usize| {
            let known = self.interrupted.iter().rev().map(|(key, ..)| *key);
            known.clone().find(|known| *known == key).or_else(|| known.clone().next()).unwrap_or(key)
        };
        let waited = || self.waiters.iter().map(|waiter| waiter.key).find(|key| self.is_held(*key));
        match op {
            Op::Complete { key, bytes } => Op::Complete { key: guarded(key), bytes },
            Op::CompleteWithoutBody { key, bytes } => Op::CompleteWithoutBody { key: guarded(key), bytes },
            Op::Release { key } => Op::Release { key: waited().unwrap_or_else(|| guarded(key)) },
            Op::Drop { key } => Op::Drop { key: waited().unwrap_or_else(|| guarded(key)) },
            Op::Interrupt { key } => Op::Interrupt { key: guarded(key) },
            Op::SaveCheckpoint { key, bytes } => Op::SaveCheckpoint { key: guarded(key), bytes },
            Op::Renew { key, lease_ms } => Op::Renew { key: guarded(key), lease_ms },
            Op::Detach { key, lease_ms } => Op::Detach { key: guarded(key), lease_ms },
            Op::TakeOver { key } => Op::TakeOver { key: handled(key) },
            Op::Resolve { key, bytes } => Op::Resolve { key: handled(key), bytes },
            Op::ReleaseInterrupted { key } => Op::ReleaseInterrupted { key: handled(key) },
            Op::ReleaseUnseen { key } => Op::ReleaseUnseen { key: waited().unwrap_or(key) },
            Op::Leave { key } => Op::Leave { key: self.waiters.first().map_or(key, |waiter| waiter.key) },
            Op::Wait { key, with, wait_ms } => Op::Wait { key: guarded(key), with, wait_ms },
            Op::Reserve { .. } | Op::Reattach { .. } | Op::Peek { .. } | Op::Sync | Op::Close | Op::DropStore => op,
            Op::Once { .. } | Op::ReserveBatch { .. } | Op::CompleteBatch { .. } => op,
            Op::Advance { .. } | Op::StepWall { .. } | Op::Reboot { .. } | Op::Kill | Op::LosePower { .. } => op,
        }
    }

    /// Lets go of all that was recorded so far.
    pub(crate) fn record_from_now(&self) {
        self.disk.record();
    }

    /// Whether somebody can still become an owner.
    pub(crate) fn ask_anew(&mut self, number: usize) -> Option<Result<(), ErrorKind>> {
        let answer = self.store.as_ref()?.reserve(&key(number), fingerprint(number, 0));
        Some(answer.map(|_| ()).map_err(|error| error.kind()))
    }

    /// The step at which the store was last opened.
    pub(crate) fn opened_at(&self) -> u64 {
        self.opened_at
    }

    /// What closing makes of reservations that somebody still holds.
    fn held_at_the_end(&mut self) -> Vec<usize> {
        let since_ms = self.now_ms();
        let mut held = Vec::new();
        for at in 0..self.guards.len() {
            let (key, token) = (self.guards[at].key, self.guards[at].reservation.token());
            if let Some(owner) = self.latest(key, token) {
                let owner = attached(owner);
                self.oracle.asked(key, Fate::Stopped { owner, cause: Cause::LeaseLapsed, since_ms });
                held.push(key);
            }
        }
        held
    }

    fn told_the_end(&mut self, held: &[usize], durable: bool) {
        if !self.is_shaken() {
            for key in held {
                self.oracle.confirmed(*key, durable);
            }
        }
        self.oracle.told_all(durable);
    }

    /// Closes the store; who holds something is left with nothing.
    pub(crate) fn close(&mut self) {
        self.call(|this| {
            let Some(store) = this.store.take() else { return };
            let held = this.held_at_the_end();
            match store.close(Duration::ZERO) {
                Ok(report) => {
                    let held_count = held.len() as u64;
                    assert!(this.is_shaken() || report.unfinished == held_count, "{report:?}, but {held:?} are held");
                    this.told_the_end(&held, true);
                }
                Err(error) => this.told(error),
            }
            this.turn_waiters_away();
            this.let_go();
        });
    }

    fn drop_store(&mut self) {
        let held = self.held_at_the_end();
        self.waiters.clear();
        self.store = None;
        if !self.is_shaken() {
            self.told_the_end(&held, false);
        }
        self.let_go();
    }

    fn let_go(&mut self) {
        self.waiters.clear();
        self.guards.clear();
        self.interrupted.clear();
    }

    fn kill(&mut self) {
        self.end_phase();
        self.disk = self.disk.kill();
        self.disk.record();
        self.waiters.clear();
        self.store = None;
        self.let_go();
    }

    fn lose_power(&mut self, seed: u64) {
        self.end_phase();
        let step = self.disk.steps();
        let image = self.disk.crash_image(seed);
        let instant = *self.oracle.instants_at(step).last().unwrap();
        let expected = self.oracle.expected(instant, Crash::PowerLoss, 0);
        let options = self.settings.options(&expected.clock);
        let opened = testing::open(image.kill(), options, seed).map_err(|error| error.to_string());
        let seen = opened.and_then(|store| {
            let (_, now_ms) = expected.probe(&store, PROBE)?;
            let seen = observe(&store, self.settings.keys)?;
            expected.check_seen(&seen, now_ms).map(|()| (seen, now_ms))
        });
        self.waiters.clear();
        self.store = None;
        self.let_go();
        let (seen, now_ms) = match seen {
            Ok(seen) => seen,
            Err(why) => {
                self.wrong = Some(format!("after power loss {seed} at step {step}: {why}"));
                self.over = true;
                return;
            }
        };
        self.oracle = self.oracle.after(instant, &expected, &seen, now_ms);
        self.clock = expected.clock;
        self.boots += 1;
        self.booted_at_ms = now_ms;
        self.disk = image;
        self.disk.record();
    }
}

fn attached(owner: Owner) -> Owner {
    Owner { detached: false, ..owner }
}

/// The lengths of all segments on a disk.
fn segment_lengths(disk: &SimDisk) -> impl Iterator<Item = u64> {
    let disk = disk.kill();
    let names = disk.list().unwrap().into_iter().filter(|name| name.starts_with("segment-"));
    names.map(move |name| disk.open_segment(&name, Access::Read).unwrap().len())
}
