//! The order of steps, for every call on a key. No other file knows it.
//!
//! Under the lock of the key's shard: look the key up, decide, append, publish in the index. So the order of a key's
//! records in the log is the order in which they happened, and of any number of callers exactly one sees the key as it
//! was before. Then, outside every lock: wait until what the answer rests on is durable.
//!
//! Lock order: shard, then the log's tail, then what the log keeps beneath it. The commit mutex stands apart: it is
//! taken under none of them but for the look at a failure.

mod closing;
mod upkeep;

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crossbeam::utils::CachePadded;

use crate::commit::Commit;
use crate::error::{Error, ErrorKind};
use crate::format::{Draft, StateKind, StateRecord};
use crate::helper::Helper;
use crate::index::{self, Address, IndexShard};
use crate::key::{HashSeed, Key};
use crate::log::{Appended, Live, Log};
use crate::options::{Checked, Durability};
use crate::recovery::{self, Opened};
use crate::retention::CHECKPOINT_BYTES_MAX;
use crate::segment::Life;
use crate::state::{self, Answer, Ask, Call, Carry, Decision, Guard, Owned, State, Write};
use crate::stats::{OpenReport, Stats};
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering};
use crate::wait::Bell;

pub use self::closing::CloseReport;
use self::closing::Closing;

/// Shards of the index. A power of two; two under the model checker, where every lock is a choice to explore.
pub(crate) const SHARDS: usize = if cfg!(loom) { 2 } else { 64 };

/// A store at work.
pub(crate) struct Engine {
    options: Checked,
    seed: HashSeed,
    log: Log,
    commit: Commit,
    shards: Box<[CachePadded<Mutex<Shard>>]>,
    report: OpenReport,
    /// No call begins any more. Set before every shard lock is passed through once: who holds one and reads `false`
    /// ends before the segments are let go. Release and Acquire pair with each other.
    closed: AtomicBool,
    /// The store is being closed: who owns a key may finish, nobody becomes an owner.
    draining: AtomicBool,
    /// Oldest live number at which every shard was last swept.
    swept_at: AtomicU64,
    /// The LSN behind the last copy that was carried forward. Relaxed: who keeps house writes and reads it, in turn.
    carried_end: AtomicU64,
    closing: Mutex<Closing>,
    /// One caller closes at a time; a second one waits and is told what the first did.
    turn_to_close: Mutex<()>,
    /// One thread keeps house at a time.
    turn_to_keep_house: Mutex<()>,
    helper: Helper,
    /// What the clock calls when it was moved by hand.
    on_clock_move: Mutex<Option<Arc<dyn Fn() + Send + Sync>>>,
}

/// The part of the store under one lock.
struct Shard {
    index: IndexShard,
    /// By token: reservations that a guard of this process holds, or that somebody waits for. Nothing else is kept per
    /// key.
    held: HashMap<u64, Held>,
    /// Buffer for the record that is being appended.
    draft: Draft,
    counts: Stats,
}

#[derive(Default)]
struct Held {
    guard: Option<Guard>,
    /// Where the latest record of a guarded reservation stands.
    address: Option<Address>,
    bells: Vec<Arc<Bell>>,
}

/// A key as it was found, in the segments that were alive then.
struct Look<'a> {
    state: State,
    /// `None`: the log holds no record of the key.
    latest: Option<Latest<'a>>,
    guard: Option<Guard>,
}

/// The latest record of a key.
struct Latest<'a> {
    found: index::Found,
    life: &'a Arc<Life>,
    record: StateRecord<'a>,
    /// Its length.
    bytes: u64,
    end_lsn: u64,
}

/// What a new record of the key takes the place of.
struct Before {
    token: Option<u64>,
    found: Option<index::Found>,
    /// The segment of the latest record, if that is unfinished, and its length in bytes.
    unfinished_in: Option<(Arc<Life>, u64)>,
}

/// What a call came to.
#[derive(Debug)]
pub(crate) struct Acted {
    pub(crate) answer: Answer,
    /// The state the answer speaks of: after the call for what a record was written for, else as it was found.
    pub(crate) state: State,
    /// The response, the checkpoint, or nothing: the payload of the record that the answer rests on.
    pub(crate) payload: Arc<[u8]>,
    /// The guard that the call has made.
    pub(crate) guard_id: Option<u64>,
}

/// What the answer to a call waits for.
#[derive(Clone, Copy, Debug)]
enum Waits {
    /// What it rests on, at this level or that of the record, whichever is higher.
    For(Durability),
    /// Nothing, since nobody hears it.
    ForNothing,
}

impl Engine {
    /// Opens what `storage` holds, under its lock.
    ///
    /// # Errors
    ///
    /// See [`recovery::open`].
    pub(crate) fn new(
        opened: Opened,
        lock: Box<dyn Any + Send + Sync>,
        options: Checked,
        with_helper: bool,
    ) -> Result<Arc<Self>, Error> {
        let shards = opened.shards.into_iter().map(|index| {
            let shard = Shard { index, held: HashMap::new(), draft: Draft::new(), counts: Stats::default() };
            CachePadded::new(Mutex::new(shard))
        });
        let engine = Arc::new(Self {
            options,
            seed: opened.seed,
            swept_at: AtomicU64::new(opened.log.oldest_live()),
            log: opened.log,
            commit: opened.commit,
            shards: shards.collect(),
            report: opened.report,
            closed: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            carried_end: AtomicU64::new(0),
            closing: Mutex::new(Closing { lock: Some(lock), ..Closing::default() }),
            turn_to_close: Mutex::new(()),
            turn_to_keep_house: Mutex::new(()),
            helper: Helper::default(),
            on_clock_move: Mutex::new(None),
        });
        if with_helper {
            let weak = Arc::downgrade(&engine);
            engine.helper.start(move || {
                if let Some(engine) = Weak::upgrade(&weak) {
                    engine.keep_house();
                }
            })?;
        }
        let weak = Arc::downgrade(&engine);
        let on_move: Arc<dyn Fn() + Send + Sync> = Arc::new(move || {
            if let Some(engine) = Weak::upgrade(&weak) {
                engine.ring_all();
            }
        });
        engine.options.clock.on_move(Arc::downgrade(&on_move));
        *engine.on_clock_move.lock() = Some(on_move);
        Ok(engine)
    }

    pub(crate) fn options(&self) -> &Checked {
        &self.options
    }

    pub(crate) fn report(&self) -> &OpenReport {
        &self.report
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.log.time().now_ms()
    }

    /// Reserves a key, or says what is known of it; waits at most `wait_ms` while it is in flight.
    pub(crate) fn reserve(&self, key: &Key, ask: Ask, wait_ms: u64) -> Result<Acted, Error> {
        if wait_ms == 0 {
            return self.act(key, |_| Call::Reserve(ask), &[], Waits::For(ask.durability), None);
        }
        let deadline_ms = self.now_ms().saturating_add(wait_ms);
        loop {
            let bell = Arc::new(Bell::new());
            let acted = self.act(key, |_| Call::Reserve(ask), &[], Waits::For(ask.durability), Some(&bell))?;
            let now_ms = self.now_ms();
            let State::InFlight(owned) = &acted.state else {
                return Ok(acted);
            };
            if acted.answer != Answer::InFlight {
                return Ok(acted);
            }
            let due_ms = deadline_ms.min(owned.lease_end_ms);
            if now_ms < due_ms {
                bell.listen(self.options.clock.sleep(due_ms - now_ms));
            }
            self.take_off(key, owned.token, &bell);
            if self.now_ms() >= deadline_ms {
                return self.act(key, |_| Call::Reserve(ask), &[], Waits::For(ask.durability), None);
            }
        }
    }

    /// An act of whoever holds this guard: once it has ended, the act is superseded.
    pub(crate) fn call_of_guard(&self, key: &Key, guard_id: u64, call: Call, given: &[u8]) -> Result<Acted, Error> {
        let guarded = |guard: Option<Guard>| match guard {
            Some(guard) if guard.id == guard_id => call,
            Some(_) | None => Call::Release { token: 0 },
        };
        self.act(key, guarded, given, Waits::For(self.options.durability), None)
    }

    /// The act of a guard that is dropped: it waits for nothing.
    pub(crate) fn drop_guard(&self, key: &Key, call: Call) -> Result<Acted, Error> {
        self.act(key, |_| call, &[], Waits::ForNothing, None)
    }

    /// An act of an owner, of who found out about an interrupted key, or of an operator.
    pub(crate) fn call(&self, key: &Key, call: Call) -> Result<Acted, Error> {
        self.call_with(key, call, &[])
    }

    /// As [`Engine::call`], with the bytes that the record is to carry.
    pub(crate) fn call_with(&self, key: &Key, call: Call, given: &[u8]) -> Result<Acted, Error> {
        self.act(key, |_| call, given, Waits::For(self.options.durability), None)
    }

    /// Takes the guard of `token` off without a word in the log: the key reads as interrupted.
    pub(crate) fn let_go(&self, key: &Key, token: u64) {
        self.let_go_at(key.hash(&self.seed), token);
    }

    /// Goes on with a detached reservation.
    pub(crate) fn reattach(&self, key: &Key, token: u64, lease_ms: u64) -> Result<Acted, Error> {
        let call = |guard: Option<Guard>| Call::Reattach { token, lease_ms, guard_lives: guard.is_some() };
        self.act(key, call, &[], Waits::For(self.options.durability), None)
    }

    /// The state of a key, without changing it.
    pub(crate) fn peek(&self, key: &Key) -> Result<(State, Arc<[u8]>), Error> {
        let hash = key.hash(&self.seed);
        let shard = self.shard(hash).lock();
        self.refuse_closed()?;
        let live = self.log.live().read();
        let look = self.look(&live, &shard, hash, key, self.now_ms())?;
        let payload = match look.state {
            State::InFlight(_) | State::Interrupted(..) => look.payload(),
            State::Absent | State::Done(_) => Arc::default(),
        };
        let (state, rests_on) = (look.state, look.rests_on(self.options.durability));
        drop(live);
        drop(shard);
        if let Some((end_lsn, level)) = rests_on {
            self.settle(end_lsn, level)?;
        }
        Ok((state, payload))
    }

    fn act(
        &self,
        key: &Key,
        call: impl FnOnce(Option<Guard>) -> Call,
        given: &[u8],
        waits: Waits,
        bell: Option<&Arc<Bell>>,
    ) -> Result<Acted, Error> {
        let hash = key.hash(&self.seed);
        let mut shard = self.shard(hash).lock();
        self.refuse_closed()?;
        let now_ms = self.now_ms();
        let live = self.log.live().read();
        let look = self.look(&live, &shard, hash, key, now_ms)?;
        let call = call(look.guard);
        let Decision { answer, write } = state::decide(&look.state, &call, now_ms);
        let mut bells = Vec::new();
        let mut housekeeping_due = false;
        let (acted, rests_on) = match write {
            Some(write) => {
                let payload = match write.carry {
                    Carry::Nothing | Carry::Given => Arc::default(),
                    Carry::Checkpoint => look.payload(),
                };
                let before = look.before();
                let expired_unresolved = look.expired_unresolved();
                // An append may begin a segment, for which nobody may be reading the table of them.
                drop(live);
                let carried = if write.carry == Carry::Given { given } else { &payload };
                if call.makes_an_owner() && self.draining.load(Ordering::Acquire) {
                    return Err(Error::closed());
                }
                let (state, appended) = match self.write(&mut shard, hash, key, &before, &write, carried) {
                    Ok(written) => written,
                    Err(error) => {
                        drop(shard);
                        return Err(self.refused(error));
                    }
                };
                shard.counts.expired_unresolved += u64::from(expired_unresolved);
                housekeeping_due = appended.housekeeping_due;
                let guard_id = shard.move_guard(&call, before.token, &state, &appended, &mut bells);
                let level = match write.kind {
                    StateKind::Reserved | StateKind::Done | StateKind::Forgotten => write.owned.durability,
                    // Losing these leaves the key Interrupted, which is safe.
                    StateKind::Interrupted | StateKind::Released => Durability::ProcessCrash,
                };
                (Acted { answer, state, payload, guard_id }, Some((appended.end, level)))
            }
            None => {
                let acted = shard.answer_as_found(&look, &call, answer, now_ms, bell);
                let rests_on = match waits {
                    Waits::For(level) => look.rests_on(level),
                    Waits::ForNothing => None,
                };
                drop(live);
                (acted, rests_on)
            }
        };
        shard.count(answer, write.as_ref());
        drop(shard);
        for bell in bells {
            bell.ring();
        }
        if self.draining.load(Ordering::Acquire) {
            self.ring_who_closes();
        }
        if housekeeping_due {
            self.housekeeping_is_due();
        }
        if let Some((end_lsn, level)) = rests_on {
            self.settle(end_lsn, level).inspect_err(|_| self.let_guard_go(hash, &acted))?;
        }
        Ok(acted)
    }

    /// A full disk may have room once what is past its use is given up.
    fn refused(&self, error: Error) -> Error {
        if matches!(error.kind(), ErrorKind::Full { .. }) {
            self.housekeeping_is_due();
        }
        error
    }

    fn check_size(&self, write: &Write, payload: &[u8]) -> Result<(), Error> {
        let (what, bytes_max) = match write.kind {
            StateKind::Done => ("the response", self.options.response_bytes_max),
            StateKind::Reserved | StateKind::Interrupted => ("the checkpoint", CHECKPOINT_BYTES_MAX),
            StateKind::Released | StateKind::Forgotten => ("the reason", CHECKPOINT_BYTES_MAX),
        };
        if payload.len() > bytes_max {
            return Err(Error::too_large(what, payload.len(), bytes_max));
        }
        Ok(())
    }

    /// Appends what was decided and makes it the latest record of the key.
    fn write(
        &self,
        shard: &mut Shard,
        hash: u64,
        key: &Key,
        before: &Before,
        write: &Write,
        payload: &[u8],
    ) -> Result<(State, Appended), Error> {
        self.check_size(write, payload)?;
        let mut record = write.record(key.scope(), key.id(), payload);
        shard.draft.refill(&record);
        let appended = self.log.append(&mut shard.draft, &self.commit)?;
        if record.token == 0 {
            record.token = appended.lsn;
        }
        shard.index.publish(hash, self.log.oldest_live(), before.found, appended.address);
        if let Some((life, bytes)) = &before.unfinished_in {
            life.note_superseded(*bytes);
        }
        let unfinished = matches!(write.kind, StateKind::Reserved | StateKind::Interrupted);
        let live = self.log.live().read();
        let life = live.get(appended.address.segment).expect("what was just appended is alive");
        if unfinished {
            life.note_unfinished(record.kept_until_ms, appended.end - appended.lsn);
        } else {
            life.note_finished(record.kept_until_ms);
        }
        Ok((state::apply(&record), appended))
    }

    fn look<'a>(&self, live: &'a Live, shard: &Shard, hash: u64, key: &Key, now_ms: u64) -> Result<Look<'a>, Error> {
        let mut latest = None;
        let mut damage = None;
        let found = shard.index.find(hash, self.log.oldest_live(), |address| {
            let Some(life) = live.get(address.segment) else { return false };
            match life.state_record(address.offset) {
                Ok((record, len)) if record.scope == key.scope() && record.id == key.id() => {
                    latest = Some((life, record, len, life.lsn(address.offset) + len));
                    true
                }
                Ok(_) => false,
                Err(error) => {
                    damage = Some(error);
                    false
                }
            }
        });
        let (Some(found), Some((life, record, bytes, end_lsn))) = (found, latest) else {
            // A record that cannot be read may be this key's: it is never taken for absent.
            let absent = Look { state: State::Absent, latest: None, guard: None };
            return damage.map_or(Ok(absent), Err);
        };
        let state = state::apply(&record);
        let guard = state.token().and_then(|token| shard.held.get(&token)).and_then(|held| held.guard);
        let latest = Some(Latest { found, life, record, bytes, end_lsn });
        Ok(Look { state: state.observed(now_ms, guard), latest, guard })
    }

    /// Returns once an answer that rests on the log up to `end_lsn` survives what `level` names.
    fn settle(&self, end_lsn: u64, level: Durability) -> Result<(), Error> {
        match level {
            Durability::PowerLoss => self.commit.wait(end_lsn, &|| self.log.sync()),
            Durability::ProcessCrash => Ok(()),
        }
    }

    /// A reservation that could not be made durable is owned by nobody.
    fn let_guard_go(&self, hash: u64, acted: &Acted) {
        if let (Some(_), Some(token)) = (acted.guard_id, acted.state.token()) {
            self.let_go_at(hash, token);
        }
    }

    fn let_go_at(&self, hash: u64, token: u64) {
        let held = self.shard(hash).lock().held.remove(&token);
        for bell in held.into_iter().flat_map(|held| held.bells) {
            bell.ring();
        }
        if self.draining.load(Ordering::Acquire) {
            self.ring_who_closes();
        }
    }

    fn shard(&self, hash: u64) -> &Mutex<Shard> {
        self.shards.get(recovery::shard_of(hash, SHARDS)).expect("a shard's number is below the number of shards")
    }

    fn refuse_closed(&self) -> Result<(), Error> {
        if self.closed.load(Ordering::Acquire) { Err(Error::closed()) } else { Ok(()) }
    }

    fn take_off(&self, key: &Key, token: u64, bell: &Arc<Bell>) {
        let mut shard = self.shard(key.hash(&self.seed)).lock();
        if let Some(held) = shard.held.get_mut(&token) {
            held.bells.retain(|other| !Arc::ptr_eq(other, bell));
            if held.guard.is_none() && held.bells.is_empty() {
                shard.held.remove(&token);
            }
        }
    }

    /// The clock was moved: everybody who sleeps looks at it again.
    fn ring_all(&self) {
        self.ring_who_closes();
        for shard in &self.shards {
            let bells: Vec<_> = shard.lock().held.values().flat_map(|held| held.bells.iter().cloned()).collect();
            for bell in bells {
                bell.ring();
            }
        }
    }

    fn housekeeping_is_due(&self) {
        if !self.helper.call() {
            self.keep_house();
        }
    }

    /// Makes durable all that was appended before the call.
    pub(crate) fn sync(&self) -> Result<(), Error> {
        self.refuse_closed()?;
        self.settle(self.log.end(), Durability::PowerLoss)
    }

    /// Counters and sizes.
    pub(crate) fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        let oldest_live = self.log.oldest_live();
        for shard in &self.shards {
            let shard = shard.lock();
            stats.add(&shard.counts);
            stats.guards += shard.held.values().filter(|held| held.guard.is_some()).count() as u64;
            stats.keys += shard.index.len(oldest_live) as u64;
            stats.index_bytes += shard.index.bytes() as u64;
        }
        for life in self.log.live().read().iter() {
            stats.segments += 1;
            stats.log_bytes += life.bytes;
        }
        stats.syncs = self.commit.syncs();
        stats.expired_unresolved += self.report.expired_unresolved;
        let jump = self.log.time().jump_while_open();
        stats.clock_jump_held_ms = jump.map_or(0, |jump| jump.wall_ms.abs_diff(jump.expected_wall_ms));
        stats
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("log", &self.log).field("commit", &self.commit).finish_non_exhaustive()
    }
}

impl Shard {
    /// The answer to a call that writes nothing. A renewal moves the lease in memory; who waits hangs up a bell.
    fn answer_as_found(
        &mut self,
        look: &Look<'_>,
        call: &Call,
        answer: Answer,
        now_ms: u64,
        bell: Option<&Arc<Bell>>,
    ) -> Acted {
        if let (Answer::Done, Call::Renew { token, lease_ms }) = (answer, *call) {
            self.renew(token, now_ms.saturating_add(lease_ms));
        }
        if let (Answer::InFlight, Some(bell), Some(token)) = (answer, bell, look.state.token()) {
            self.held.entry(token).or_default().bells.push(Arc::clone(bell));
        }
        let payload = match answer {
            Answer::Replay | Answer::Interrupted | Answer::InFlight => look.payload(),
            Answer::Fresh | Answer::Mismatch | Answer::TooOld | Answer::Done | Answer::Superseded => Arc::default(),
        };
        Acted { answer, state: look.state, payload, guard_id: None }
    }

    fn renew(&mut self, token: u64, lease_end_ms: u64) {
        if let Some(guard) = self.held.get_mut(&token).and_then(|held| held.guard.as_mut()) {
            guard.lease_end_ms = lease_end_ms;
        }
    }

    /// Makes `held` say who owns the key once the record of `call` is published, and takes off the bells of those for
    /// whom something has changed.
    fn move_guard(
        &mut self,
        call: &Call,
        before: Option<u64>,
        state: &State,
        appended: &Appended,
        bells: &mut Vec<Arc<Bell>>,
    ) -> Option<u64> {
        let address = Some(appended.address);
        match state {
            State::InFlight(owned) if !call.makes_an_owner() && !owned.detached => {
                if let Some(held) = self.held.get_mut(&owned.token) {
                    held.address = address;
                }
                self.renew(owned.token, owned.lease_end_ms);
                None
            }
            State::Absent | State::InFlight(_) | State::Interrupted(..) | State::Done(_) => {
                if let Some(before) = before {
                    bells.extend(self.held.remove(&before).into_iter().flat_map(|held| held.bells));
                }
                let State::InFlight(Owned { token, lease_end_ms, detached: false, .. }) = *state else { return None };
                let guard = Some(Guard { id: appended.lsn, lease_end_ms });
                self.held.insert(token, Held { guard, address, bells: Vec::new() });
                Some(appended.lsn)
            }
        }
    }

    fn count(&mut self, answer: Answer, write: Option<&Write>) {
        let counts = &mut self.counts;
        match answer {
            Answer::Fresh => counts.fresh += 1,
            Answer::Replay => counts.replays += 1,
            Answer::InFlight => counts.in_flight += 1,
            Answer::Interrupted => counts.interrupted += 1,
            Answer::Mismatch => counts.mismatches += 1,
            Answer::TooOld => counts.too_old += 1,
            Answer::Superseded => counts.superseded += 1,
            Answer::Done => match write.map(|write| write.kind) {
                Some(StateKind::Done) => counts.completed += 1,
                Some(StateKind::Released) => counts.released += 1,
                Some(StateKind::Reserved | StateKind::Interrupted | StateKind::Forgotten) | None => {}
            },
        }
    }
}

impl Latest<'_> {
    fn is_unfinished(&self) -> bool {
        matches!(self.record.kind, StateKind::Reserved | StateKind::Interrupted)
    }
}

impl Look<'_> {
    /// A copy of what the latest record carries.
    fn payload(&self) -> Arc<[u8]> {
        self.latest.as_ref().map_or_else(Arc::default, |latest| Arc::from(latest.record.payload))
    }

    /// What an answer of this level rests on: the end of the record, and the higher of the two levels.
    fn rests_on(&self, level: Durability) -> Option<(u64, Durability)> {
        self.latest.as_ref().map(|latest| (latest.end_lsn, latest.record.durability.stronger(level)))
    }

    /// Whether the key was forgotten before anybody found out how its last attempt had ended.
    fn expired_unresolved(&self) -> bool {
        self.state == State::Absent && self.latest.as_ref().is_some_and(Latest::is_unfinished)
    }

    fn before(&self) -> Before {
        let unfinished =
            |latest: &&Latest<'_>| matches!(latest.record.kind, StateKind::Reserved | StateKind::Interrupted);
        Before {
            token: self.state.token(),
            found: self.latest.as_ref().map(|latest| latest.found),
            unfinished_in: self
                .latest
                .as_ref()
                .filter(unfinished)
                .map(|latest| (Arc::clone(latest.life), latest.bytes)),
        }
    }
}

/// How long a caller that was told `InFlight` may wait before it asks again.
pub(crate) fn retry_after(lease_end_ms: u64, now_ms: u64) -> Duration {
    Duration::from_millis(lease_end_ms.saturating_sub(now_ms))
}
