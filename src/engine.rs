//! The order of steps, for every call on a key. No other file knows it.
//!
//! Under the lock of the key's shard: look the key up, decide, append, publish in the index. So the order of a key's
//! records in the log is the order in which they happened, and of any number of callers exactly one sees the key as it
//! was before. Then, outside every lock: wait until what the answer rests on is durable.
//!
//! Lock order: shard, then the log's tail, then what the log keeps beneath it. The commit mutex stands apart: it is
//! taken under none of them but for the look at a failure.

mod calls;
mod closing;
mod listing;
mod news;
mod retries;
mod shard;
mod upkeep;
mod waiting;

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};

use crossbeam::utils::CachePadded;

use crate::commit::Commit;
use crate::error::Error;
use crate::event::{Event, Listener};
use crate::fork::{self, Mark};
use crate::format::{Draft, StateKind};
use crate::helper::{Counter, Helper, Timer};
use crate::index::Candidate;
use crate::key::{HashSeed, Key};
use crate::log::{Appended, Live, Log, NotAppended};
use crate::options::{Checked, Durability};
use crate::recovery::{self, Opened};
use crate::retention::CHECKPOINT_BYTES_MAX;
use crate::state::{self, Answer, Call, Carry, Decision, Guard, Lease, State, Terms, Write};
use crate::stats::{FreshKeys, Health, OpenReport, Stats};
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering};
use crate::wait::Turn;

pub use self::closing::CloseReport;
use self::closing::Closing;
pub(crate) use self::listing::{Listed, Listing, Wanted};
use self::news::News;
use self::shard::{Before, Held, Latest, Look, Shard};
use self::waiting::{Aftermath, Place, Waiter};

/// Shards of the index. A power of two; two under the model checker, where every lock is a choice to explore.
pub(crate) const SHARDS: usize = if cfg!(loom) { 2 } else { 64 };

/// A store at work.
pub(crate) struct Engine {
    options: Checked,
    seed: HashSeed,
    /// The process that opened it, and that alone may use it.
    opened_in: Mark,
    /// Store time at which it was opened.
    opened_ms: u64,
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
    closing: Mutex<Closing>,
    /// One caller closes at a time; a second one waits and is told what the first did.
    turn_to_close: Turn,
    /// One thread keeps house at a time.
    turn_to_keep_house: Turn,
    listener: Listener,
    news: News,
    fresh_keys: FreshKeys,
    /// Keeps house.
    helper: Helper,
    /// Syncs for those who do not lead themselves.
    leader: Helper,
    timer: Arc<Timer>,
    /// There is no thread that sleeps until something is due: whoever moves the clock looks.
    clock_is_moved_by_hand: bool,
    /// When what was written is synced at the latest though nobody waits for it; [`u64::MAX`] when nothing waits.
    /// Relaxed: see [`Timer`], whose argument holds for it, too.
    sync_due_ms: AtomicU64,
    /// Tasks that wait for room in the log.
    room: Counter,
    /// What dropped guards had to say when there was no room for it.
    left_unsaid: Mutex<Vec<Unsaid>>,
    /// What the clock calls when it was moved by hand.
    on_clock_move: Mutex<Option<Arc<dyn Fn() + Send + Sync>>>,
}

/// The last act of a guard that was dropped, for which there was no room.
struct Unsaid {
    key: Key,
    token: u64,
    guard_id: u64,
    call: Call,
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
    /// When the lease ended, before the call, of the reservation that it has written of.
    pub(crate) lease_end_before_ms: u64,
}

/// A call that was decided, and whose answer may have to wait until what it rests on is durable.
#[derive(Debug)]
#[must_use = "an answer is told once it is settled"]
pub(crate) struct Begun {
    pub(crate) acted: Acted,
    pub(crate) rests_on: Option<RestsOn>,
}

/// What an answer rests on: the log up to here, at this level.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RestsOn {
    end_lsn: u64,
    level: Durability,
}

/// A call, before it is known how the key stands.
#[derive(Clone, Copy, Debug)]
enum Act {
    /// Whatever guard there is.
    Call(Call),
    /// By this guard: once it has ended, the act is superseded.
    OfGuard { guard_id: u64, call: Call },
    /// Going on with a detached reservation, which one does at a time.
    Reattach { token: u64, lease: Lease },
}

impl Act {
    fn call(&self, guard: Option<Guard>) -> Call {
        match (*self, guard) {
            (Self::Call(call), _) => call,
            (Self::OfGuard { guard_id, call }, Some(guard)) if guard.id == guard_id => call,
            (Self::OfGuard { .. }, Some(_) | None) => Call::Release { token: 0 },
            (Self::Reattach { token, lease }, guard) => Call::Reattach { token, lease, guard_lives: guard.is_some() },
        }
    }
}

/// What a step is to do.
#[derive(Clone, Copy, Debug)]
struct Step<'a> {
    act: Act,
    /// The bytes that its record is to carry.
    given: &'a [u8],
    waits: Waits,
    /// Who takes a place in the list where the key is in flight.
    waiter: Option<&'a Arc<Waiter>>,
    /// It is the first step of its call, which tells how old the key was when it came.
    first: bool,
}

impl<'a> Step<'a> {
    /// A step that carries nothing, whose answer waits, and whose caller does not.
    fn new(act: Act, waits: Waits) -> Self {
        Self { act, given: &[], waits, waiter: None, first: true }
    }

    fn reserve(terms: Terms) -> Self {
        Self::new(Act::Call(Call::Reserve(terms)), Waits::For(terms.durability))
    }

    fn carrying(self, given: &'a [u8]) -> Self {
        Self { given, ..self }
    }

    /// A further step of a call.
    fn again(self) -> Self {
        Self { first: false, ..self }
    }

    fn waiting_as(self, waiter: &'a Arc<Waiter>) -> Self {
        Self { waiter: Some(waiter), ..self }
    }
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
        let clock_is_moved_by_hand = options.clock.sleep(1).is_none();
        let engine = Arc::new(Self {
            listener: Listener::new(options.on_event.clone()),
            news: News::default(),
            fresh_keys: FreshKeys::new(),
            options,
            seed: opened.seed,
            opened_in: Mark::here(),
            opened_ms: opened.log.time().now_ms(),
            swept_at: AtomicU64::new(opened.log.oldest_live()),
            log: opened.log,
            commit: opened.commit,
            shards: shards.collect(),
            report: opened.report,
            closed: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            closing: Mutex::new(Closing { lock: Some(lock), ..Closing::default() }),
            turn_to_close: Turn::new(),
            turn_to_keep_house: Turn::new(),
            helper: Helper::default(),
            leader: Helper::default(),
            timer: Arc::default(),
            clock_is_moved_by_hand,
            sync_due_ms: AtomicU64::new(u64::MAX),
            room: Counter::default(),
            left_unsaid: Mutex::default(),
            on_clock_move: Mutex::new(None),
        });
        engine.say_what_an_earlier_run_left()?;
        if with_helper {
            engine.start_helpers()?;
            // Segments that an earlier run left without a hint get one.
            engine.helper.call();
        }
        if !clock_is_moved_by_hand {
            engine.start_timer()?;
        }
        let weak = Arc::downgrade(&engine);
        let on_move: Arc<dyn Fn() + Send + Sync> = Arc::new(move || {
            if let Some(engine) = Weak::upgrade(&weak).filter(|engine| engine.refuse_forked().is_ok()) {
                engine.ring_who_closes();
                engine.do_what_is_due();
            }
        });
        engine.options.clock.on_move(Arc::downgrade(&on_move));
        *engine.on_clock_move.lock() = Some(on_move);
        engine.listener.tell(&Event::Opened(engine.report.clone()), engine.now_ms());
        if let Some(jump) = opened.jump {
            engine.listener.tell(&Event::clock_jumped(&jump), engine.now_ms());
        }
        engine.tell_news();
        Ok(engine)
    }

    fn start_helpers(self: &Arc<Self>) -> Result<(), Error> {
        let weak = Arc::downgrade(self);
        self.helper.start("keyonce-helper", move || {
            if let Some(engine) = Weak::upgrade(&weak) {
                engine.keep_house();
            }
        })?;
        let weak = Arc::downgrade(self);
        self.leader.start("keyonce-sync", move || {
            if let Some(engine) = Weak::upgrade(&weak) {
                engine.commit.see_to_what_is_wanted(&|| engine.sync_log());
                engine.tell_news();
            }
        })
    }

    fn start_timer(self: &Arc<Self>) -> Result<(), Error> {
        let weak = Arc::downgrade(self);
        let timer = Arc::clone(&self.timer);
        self.timer.start("keyonce-timer", move || {
            loop {
                let Some(engine) = Weak::upgrade(&weak) else { return };
                engine.do_what_is_due();
                let (clock, now_ms) = (Arc::clone(&engine.options.clock), engine.now_ms());
                drop(engine);
                if !timer.sleep(|due_ms| clock.sleep(due_ms.saturating_sub(now_ms))) {
                    return;
                }
            }
        })
    }

    pub(crate) fn options(&self) -> &Checked {
        &self.options
    }

    pub(crate) fn report(&self) -> &OpenReport {
        &self.report
    }

    /// Store time at which the store was opened.
    pub(crate) fn opened_ms(&self) -> u64 {
        self.opened_ms
    }

    /// Whether a key that was issued at this moment may already have been forgotten.
    pub(crate) fn is_too_old(&self, issued_ms: u64, retention_ms: u64) -> bool {
        self.refuse_forked().is_ok() && issued_ms <= self.log.time().forgotten_before(retention_ms)
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.log.time().now_ms()
    }

    /// One step of a call: looks, decides, appends, publishes, under the lock of the key's shard.
    fn step(&self, key: &Key, step: &Step<'_>) -> Result<Begun, NotAppended> {
        let hash = key.hash(&self.seed);
        let mut after = Aftermath::default();
        self.refuse_forked()?;
        let mut shard = self.shard(hash).lock();
        self.refuse_closed()?;
        let begun = self.step_in(&mut shard, hash, key, step, &mut after);
        drop(shard);
        self.see_to(after);
        begun
    }

    /// [`Engine::step`], for who holds the shard's lock.
    fn step_in(
        &self,
        shard: &mut Shard,
        hash: u64,
        key: &Key,
        step: &Step<'_>,
        after: &mut Aftermath,
    ) -> Result<Begun, NotAppended> {
        let now_ms = self.now_ms();
        let live = self.log.live().read();
        let look = self.look(&live, shard, hash, key, now_ms)?;
        let call = step.act.call(look.guard);
        let Decision { answer, write } = state::decide(&look.state, &call, now_ms);
        let Some(write) = write else {
            return Ok(shard.answer_as_found(&look, &call, answer, now_ms, step, after));
        };
        let payload = match write.carry {
            Carry::Nothing | Carry::Given => Arc::default(),
            Carry::Checkpoint => look.payload(),
        };
        let before = look.before();
        let expired_unresolved = look.expired_unresolved();
        let lease_end_before_ms = look.state.lease_end_ms();
        let age_ms = look.age_of_duplicate(&call, now_ms).filter(|_| step.first);
        let is_new = look.state == State::Absent;
        // An append may begin a segment, for which nobody may be reading the table of them.
        drop(live);
        let carried = if write.carry == Carry::Given { step.given } else { &payload };
        if call.makes_an_owner().is_some() && self.draining.load(Ordering::Acquire) {
            return Err(Error::closed().into());
        }
        let (state, appended) = self.write(shard, hash, key, &before, &write, carried)?;
        shard.counts.expired_unresolved += u64::from(expired_unresolved);
        after.news |= expired_unresolved;
        shard.note_duplicate(age_ms, &mut after.retries);
        if is_new {
            self.note_new_key(shard, key, hash, &call, now_ms, &mut after.retries);
        }
        after.housekeeping_due |= appended.housekeeping_due;
        let (guard_id, places) = shard.move_guard(&call, before.token, &state, &appended, now_ms, after);
        self.serve(shard, hash, key, state, places, after);
        self.want_a_sync_by(now_ms, after);
        let level = match write.kind {
            StateKind::Reserved | StateKind::Done | StateKind::Forgotten => write.owned.durability,
            // Losing these leaves the key Interrupted, which is safe.
            StateKind::Interrupted | StateKind::Released => Durability::ProcessCrash,
        };
        shard.count(answer, Some(&write));
        let acted = Acted { answer, state, payload, guard_id, lease_end_before_ms };
        Ok(Begun { acted, rests_on: Some(RestsOn { end_lsn: appended.end, level }) })
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
    ) -> Result<(State, Appended), NotAppended> {
        self.check_size(write, payload)?;
        let mut record = write.record(key.scope(), key.id(), payload);
        shard.draft.refill(&record);
        let appended = self.log.append(&mut shard.draft, &self.commit)?;
        if record.token == 0 {
            record.token = appended.lsn;
        }
        shard.index.publish(hash, self.log.oldest_live(), before.found, appended.address);
        if let Some((life, bytes)) = &before.unfinished_in {
            life.note_superseded(*bytes, appended.end);
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

    fn look<'a>(
        &self,
        live: &'a Live,
        shard: &mut Shard,
        hash: u64,
        key: &Key,
        now_ms: u64,
    ) -> Result<Look<'a>, Error> {
        let mut latest = None;
        let mut damage = None;
        let found = shard.index.find(hash, self.log.oldest_live(), |Candidate { address, hinted }| {
            let Some(life) = live.get(address.segment) else { return false };
            let record = if hinted { life.checked_record(address.offset) } else { life.state_record(address.offset) };
            match record {
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
        if found.hinted {
            shard.index.note_checked(found);
        }
        let state = state::apply(&record);
        let held = state.token().and_then(|token| shard.held.get(&token));
        let guard = held.and_then(|held| held.guard);
        let latest = Some(Latest { found, life, record, bytes, end_lsn });
        let state = match (state, held.and_then(|held| held.fallen)) {
            (State::InFlight(owned) | State::Interrupted(owned, _), Some(stop)) => State::Interrupted(owned, stop),
            (state, _) => state.observed(now_ms, guard),
        };
        Ok(Look { state, latest, guard })
    }

    fn shard(&self, hash: u64) -> &Mutex<Shard> {
        self.shards.get(recovery::shard_of(hash, SHARDS)).expect("a shard's number is below the number of shards")
    }

    pub(crate) fn refuse_closed(&self) -> Result<(), Error> {
        self.refuse_forked()?;
        if self.closed.load(Ordering::Acquire) { Err(Error::closed()) } else { Ok(()) }
    }

    /// Refuses a child made by `fork`: asked before any lock is taken, since in a child it may never be free again.
    pub(crate) fn refuse_forked(&self) -> Result<(), Error> {
        if self.opened_in.is_here() {
            return Ok(());
        }
        fork::close_what_is_not_ours();
        Err(Error::forked())
    }

    pub(crate) fn health(&self) -> Health {
        match self.refuse_closed().map(|()| self.commit.failure()) {
            Err(_) => Health::Closed,
            Ok(Some(failure)) => Health::Poisoned(failure),
            Ok(None) => Health::Sound,
        }
    }

    /// Counters and sizes; none in a child made by `fork`.
    pub(crate) fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        if self.refuse_forked().is_err() {
            return stats;
        }
        let oldest_live = self.log.oldest_live();
        for shard in &self.shards {
            let shard = shard.lock();
            stats.add(&shard.counts);
            stats.guards += shard.held.values().filter(|held| held.is_guarded()).count() as u64;
            stats.waiting += shard.held.values().map(|held| held.places.len() as u64).sum::<u64>();
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
