//! What the clients of one store were told, and what a later opening may therefore show.
//!
//! The oracle stands outside the store. It knows which acts clients asked for, in which order, what they were answered
//! and between which steps of the disk, and nothing of segments or records. From that it says for a crash at any moment
//! which states of each key an opening may show: nothing older than the last one that a client was promised, nothing
//! newer than the last one that a client had asked for, and nothing that is not one of those, whole.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use keyonce::testing::ManualClock;
use keyonce::{Body, Cause, Clock, Durability, Fingerprint, Key, KeyState, Reservation, Reserve, Store};

/// The request that no client of a workload ever makes.
const STRANGER: u8 = u8::MAX;

/// The store's default for the largest jump of the wall clock that it follows.
const CLOCK_JUMP_MAX_MS: u64 = 7 * 24 * 60 * 60 * 1000;
const YEAR_MS: u64 = 365 * 24 * 60 * 60 * 1000;

/// The key of this number. All scopes and ids have different lengths, so that records start at odd places.
pub(crate) fn key(number: usize) -> Key {
    Key::new(&"scope"[..number % 5], format!("{}-{number}", "k".repeat(1 + 7 * number))).unwrap()
}

/// What a request for a key looks like.
pub(crate) fn fingerprint(key: usize, request: u8) -> Fingerprint {
    Fingerprint::of_parts([key.to_string(), request.to_string()])
}

/// What the clocks show at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hands {
    pub(crate) wall_ms: u64,
    pub(crate) boot_ms: u64,
    /// How often the machine was started again.
    pub(crate) boots: u32,
    /// Store time.
    pub(crate) store_ms: u64,
}

/// What passes between a crash and the opening after it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Later {
    pub(crate) ms: u64,
    /// By how much somebody sets the wall clock meanwhile.
    pub(crate) wall_step_ms: i64,
}

impl From<u64> for Later {
    fn from(ms: u64) -> Self {
        Self { ms, wall_step_ms: 0 }
    }
}

impl Hands {
    /// The clock of the same machine, some time later.
    fn same_boot(self, later: Later) -> ManualClock {
        self.clock(self.boots, self.boot_ms + later.ms, later)
    }

    /// The clock of the machine started again, some time later.
    fn next_boot(self, later: Later) -> ManualClock {
        self.clock(self.boots + 1, 0, later)
    }

    fn clock(self, boots: u32, boot_ms: u64, later: Later) -> ManualClock {
        let clock = ManualClock::new(0);
        for _ in 0..boots {
            clock.reboot();
        }
        clock.advance(Duration::from_millis(boot_ms));
        clock.set_wall_ms((self.wall_ms + later.ms).saturating_add_signed(later.wall_step_ms));
        clock
    }

    /// Store time after a boot, when the wall clock shows `wall_ms` and this is the last that the store knows: it
    /// follows the wall clock, but not backwards, and not further than a week or than the clock was off before.
    pub(crate) fn store_ms_after_boot(self, wall_ms: u64) -> u64 {
        let passed_ms = wall_ms.saturating_sub(self.wall_ms);
        let off_ms = self.wall_ms.saturating_sub(self.store_ms).min(YEAR_MS);
        if passed_ms <= off_ms.max(CLOCK_JUMP_MAX_MS) { self.store_ms + passed_ms } else { self.store_ms }
    }
}

/// Bytes of a client; printed as a length and a start.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Bytes(pub(crate) Vec<u8>);

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes {:02x?}", self.0.len(), &self.0[..self.0.len().min(8)])
    }
}

/// A reservation as its clients know it.
#[derive(Clone, Debug)]
pub(crate) struct Owner {
    pub(crate) request: u8,
    /// `None` when the call failed, so that nobody was told.
    pub(crate) token: Option<u64>,
    pub(crate) attempt: u32,
    pub(crate) checkpoint: Bytes,
    pub(crate) lease_end_ms: u64,
    pub(crate) retention_ms: u64,
    pub(crate) detached: bool,
    pub(crate) durability: Durability,
}

/// What became of a key by one act of a client.
#[derive(Clone, Debug)]
pub(crate) enum Fate {
    Absent,
    Held(Owner),
    Stopped { owner: Owner, cause: Cause, since_ms: u64 },
    Done { owner: Owner, bytes: Bytes, kept: bool, until_ms: u64 },
}

/// What an opened store shows of a key.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Seen {
    Absent,
    Present(Box<Shown>),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Shown {
    state: KeyState,
    fingerprint: Fingerprint,
    token: u64,
    attempt: u32,
    detached: bool,
    cause: Option<Cause>,
    checkpoint: Bytes,
    lease_end_ms: Option<u64>,
    kept_until_ms: u64,
    first_seen_ms: u64,
    since_ms: u64,
    /// Whether the response was kept, and the response or what stands for it.
    response: Option<(bool, Bytes)>,
}

impl Fate {
    pub(crate) fn owner(&self) -> Option<&Owner> {
        match self {
            Self::Absent => None,
            Self::Held(owner) | Self::Stopped { owner, .. } | Self::Done { owner, .. } => Some(owner),
        }
    }

    /// The latest reservation, if it is not done.
    pub(crate) fn unfinished(&self) -> Option<&Owner> {
        match self {
            Self::Held(owner) | Self::Stopped { owner, .. } => Some(owner),
            Self::Absent | Self::Done { .. } => None,
        }
    }

    /// Until when the key must be remembered, whoever asks. An unfinished one may be remembered for longer.
    pub(crate) fn kept_until_ms(&self) -> u64 {
        match self {
            Self::Absent => 0,
            Self::Held(owner) => owner.lease_end_ms + owner.retention_ms,
            Self::Stopped { owner, since_ms, .. } => owner.lease_end_ms.max(*since_ms) + owner.retention_ms,
            Self::Done { until_ms, .. } => *until_ms,
        }
    }

    /// Whether a store that was opened after this, with nobody alive who owned anything, may show `seen` at `now_ms`.
    /// Before the crash it may have been as late as `newest_ms`.
    fn allows(&self, key: usize, seen: &Seen, now_ms: u64, newest_ms: u64) -> bool {
        let Seen::Present(shown) = seen else {
            return newest_ms >= self.kept_until_ms();
        };
        let is_of = |owner: &Owner| {
            shown.fingerprint == fingerprint(key, owner.request)
                && owner.token.is_none_or(|token| token == shown.token)
                && owner.attempt == shown.attempt
        };
        let interrupted = |owner: &Owner, cause| {
            shown.state == KeyState::Interrupted && shown.cause == Some(cause) && shown.checkpoint == owner.checkpoint
        };
        match self {
            Self::Absent => false,
            Self::Held(owner) if owner.detached && now_ms < owner.lease_end_ms => {
                let lapsed = owner.lease_end_ms <= newest_ms && interrupted(owner, Cause::LeaseLapsed);
                is_of(owner) && lapsed
                    || is_of(owner)
                        && (shown.state, shown.detached) == (KeyState::InFlight, true)
                        && shown.lease_end_ms == Some(owner.lease_end_ms)
                        && shown.checkpoint == owner.checkpoint
            }
            Self::Held(owner) if owner.detached => is_of(owner) && interrupted(owner, Cause::LeaseLapsed),
            // A lapse that came before the crash is in the log, unless the crash took it.
            Self::Held(owner) => {
                let lapsed = (owner.lease_end_ms..=newest_ms).contains(&shown.since_ms);
                is_of(owner) && (interrupted(owner, Cause::Crash) || lapsed && interrupted(owner, Cause::LeaseLapsed))
            }
            // A later attempt that was given back is interrupted for the cause of the one before it.
            Self::Stopped { owner, cause: Cause::Dropped, .. } if owner.attempt > 1 => {
                let causes = [Cause::Dropped, Cause::Crash, Cause::LeaseLapsed];
                is_of(owner) && causes.into_iter().any(|cause| interrupted(owner, cause))
            }
            Self::Stopped { owner, cause, .. } => is_of(owner) && interrupted(owner, *cause),
            Self::Done { owner, bytes, kept, until_ms } => {
                now_ms < *until_ms
                    && is_of(owner)
                    && shown.state == KeyState::Done
                    && shown.kept_until_ms == *until_ms
                    && shown.response.as_ref().is_some_and(|(is_kept, found)| (is_kept, found) == (kept, bytes))
            }
        }
    }
}

/// One act on one key.
#[derive(Clone, Debug)]
struct Fact {
    call: usize,
    fate: Arc<Fate>,
    /// The call was answered. Else it failed, or ended without a word while the disk failed: it is in doubt.
    sure: bool,
}

/// From the end of call `call` on, no opening may show a state of `key` that is older than fact `fact`.
#[derive(Clone, Copy, Debug)]
struct Promise {
    call: usize,
    key: usize,
    fact: usize,
    /// Also after a power loss, not only after a kill.
    durable: bool,
}

/// A moment at which a crash may come: the first `ended` calls were answered, and perhaps one is running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Instant {
    ended: usize,
    running: bool,
    pub(crate) hands: Hands,
}

#[derive(Clone, Copy, Debug)]
struct Call {
    first_step: u64,
    end_step: u64,
    after: Hands,
    /// It opened the store: from its end on, what the store knows of the time is no older.
    opened: bool,
}

/// The memory of all clients of one store. See the head of this file.
#[derive(Clone, Debug)]
pub(crate) struct Oracle {
    facts: Vec<Vec<Fact>>,
    promises: Vec<Promise>,
    calls: Vec<Call>,
    /// After which call which token was told.
    tokens: Vec<(usize, u64)>,
    /// The largest token told before the first call.
    token_floor: u64,
    /// What the store may know of the time before the first call.
    marks: Vec<Hands>,
    /// As late as store time ever was before the first call: a wall clock that is set back can take it back over a
    /// restart, but not what was written meanwhile.
    latest_ms: u64,
}

impl Oracle {
    /// Of clients that have asked for nothing yet; `fates` is what is true of each key, and durable.
    pub(crate) fn new(fates: impl IntoIterator<Item = Arc<Fate>>, token_floor: u64) -> Self {
        let facts = fates.into_iter().map(|fate| vec![Fact { call: 0, fate, sure: true }]).collect();
        let (promises, calls, tokens, marks, latest_ms) = Default::default();
        Self { facts, promises, calls, tokens, token_floor, marks, latest_ms }
    }

    pub(crate) fn keys(&self) -> usize {
        self.facts.len()
    }

    pub(crate) fn begin(&mut self, step: u64, hands: Hands) {
        self.calls.push(Call { first_step: step, end_step: u64::MAX, after: hands, opened: false });
    }

    pub(crate) fn end(&mut self, step: u64, hands: Hands) {
        let call = self.calls.last_mut().unwrap();
        call.end_step = step;
        call.after = hands;
    }

    /// The running call has opened the store.
    pub(crate) fn opened(&mut self) {
        self.calls.last_mut().unwrap().opened = true;
    }

    /// The number of calls that were begun.
    pub(crate) fn calls(&self) -> usize {
        self.calls.len()
    }

    /// The call that took `step`.
    pub(crate) fn call_of(&self, step: u64) -> Option<usize> {
        self.calls.iter().position(|call| (call.first_step..call.end_step).contains(&step))
    }

    /// What the last act on the key made of it that is not in doubt.
    pub(crate) fn last(&self, key: usize) -> &Fate {
        &self.facts[key][self.last_sure(key)].fate
    }

    fn last_sure(&self, key: usize) -> usize {
        self.facts[key].iter().rposition(|fact| fact.sure).unwrap()
    }

    /// Whether some key may be what the client does not know of.
    pub(crate) fn is_in_doubt(&self) -> bool {
        (0..self.keys()).any(|key| self.is_key_in_doubt(key))
    }

    pub(crate) fn is_key_in_doubt(&self, key: usize) -> bool {
        !self.facts[key].last().unwrap().sure
    }

    /// The running call has asked for this; whether it took effect is in doubt until it is
    /// [`confirmed`](Self::confirmed).
    pub(crate) fn asked(&mut self, key: usize, fate: Fate) {
        let call = self.calls.len() - 1;
        self.facts[key].push(Fact { call, fate: Arc::new(fate), sure: false });
    }

    /// What was asked for last took effect.
    pub(crate) fn confirmed(&mut self, key: usize, durable: bool) {
        self.facts[key].last_mut().unwrap().sure = true;
        self.told(key, durable);
    }

    /// The running call was answered, and its answer rests on what the key is.
    pub(crate) fn told(&mut self, key: usize, durable: bool) {
        let call = self.calls.len() - 1;
        let fact = self.last_sure(key);
        self.promises.push(Promise { call, key, fact, durable });
    }

    /// The running call has shown that all is durable that was answered at store time `until_ms` or before.
    pub(crate) fn durable_until(&mut self, until_ms: u64) {
        let call = self.calls.len() - 1;
        for (key, facts) in self.facts.iter().enumerate() {
            let settled = |fact: &Fact| fact.sure && self.calls[fact.call].after.store_ms <= until_ms;
            if let Some(fact) = facts.iter().rposition(settled) {
                self.promises.push(Promise { call, key, fact, durable: true });
            }
        }
    }

    pub(crate) fn told_all(&mut self, durable: bool) {
        for key in 0..self.keys() {
            self.told(key, durable);
        }
    }

    pub(crate) fn token_told(&mut self, token: u64) {
        self.tokens.push((self.calls.len() - 1, token));
    }

    /// The largest token that was told.
    pub(crate) fn token_max(&self) -> u64 {
        self.tokens.iter().map(|(_, token)| *token).max().unwrap_or(0).max(self.token_floor)
    }

    /// This moment, after all that was begun.
    pub(crate) fn now(&self, hands: Hands) -> Instant {
        Instant { ended: self.calls.len(), running: false, hands }
    }

    /// Every different moment of `step` at which a crash may come: the last one is the one with most promises.
    pub(crate) fn instants_at(&self, step: u64) -> Vec<Instant> {
        let mut instants: Vec<Instant> = Vec::new();
        for (number, call) in self.calls.iter().enumerate() {
            if call.first_step < step && step < call.end_step {
                // A call that moves the clock takes its steps when the clock has moved.
                instants.push(Instant { ended: number, running: true, hands: call.after });
            }
            if call.end_step == step {
                let instant = Instant { ended: number + 1, running: false, hands: call.after };
                match instants.last_mut() {
                    Some(last) if last.hands == instant.hands => *last = instant,
                    _ => instants.push(instant),
                }
            }
        }
        instants
    }

    /// What an opening after a crash at `instant` may show, some time later.
    pub(crate) fn expected(&self, instant: Instant, crash: Crash, later: impl Into<Later>) -> Expected {
        let later = later.into();
        let asked_before = instant.ended + usize::from(instant.running);
        let mut floors = vec![0; self.keys()];
        for promise in &self.promises {
            if promise.call < instant.ended && (promise.durable || crash == Crash::Kill) {
                floors[promise.key] = floors[promise.key].max(promise.fact);
            }
        }
        let candidates = self.facts.iter().zip(floors).map(|(facts, floor)| {
            let asked = facts.iter().enumerate().filter(|(at, fact)| *at == 0 || fact.call < asked_before);
            asked.filter(|(at, _)| *at >= floor).map(|(_, fact)| Arc::clone(&fact.fate)).collect()
        });
        let told = self.tokens.iter().filter(|(call, _)| *call < instant.ended).map(|(_, token)| *token);
        let clock = match crash {
            Crash::Kill => instant.hands.same_boot(later),
            Crash::PowerLoss => instant.hands.next_boot(later),
        };
        let after = |mark: &Hands| match crash {
            Crash::Kill if mark.boots == instant.hands.boots => mark.store_ms + clock.boot_ms() - mark.boot_ms,
            Crash::Kill | Crash::PowerLoss => mark.store_ms_after_boot(clock.wall_ms()),
        };
        let mut now_ms: Vec<u64> = self.marks_at(instant).iter().map(after).collect();
        if self.marks.is_empty() && !self.calls[..instant.ended].iter().any(|call| call.opened) {
            // There may be no store yet, and a new one begins with the wall clock.
            now_ms.push(clock.wall_ms());
        }
        Expected {
            candidates: candidates.collect(),
            token_max: told.max().unwrap_or(0).max(self.token_floor),
            clock,
            now_ms,
            crashed_ms: self.latest_at(instant),
        }
    }

    /// As late as store time ever was by `instant`.
    fn latest_at(&self, instant: Instant) -> u64 {
        let ended = self.calls.iter().take(instant.ended).map(|call| call.after.store_ms);
        ended.chain([self.latest_ms, instant.hands.store_ms]).max().unwrap_or(0)
    }

    /// What the store may know of the time after a crash at `instant`: all since the last opening.
    fn marks_at(&self, instant: Instant) -> Vec<Hands> {
        let ended = &self.calls[..instant.ended];
        let opened = ended.iter().rposition(|call| call.opened);
        let earlier = if opened.is_none() { self.marks.as_slice() } else { &[] };
        let since = ended[opened.unwrap_or(0)..].iter().map(|call| call.after);
        let mut marks: Vec<Hands> = earlier.iter().copied().chain(since).chain([instant.hands]).collect();
        marks.dedup();
        marks
    }

    /// The memory of clients after a crash at `instant` that left `seen` at `now_ms`, of what was `expected`.
    pub(crate) fn after(&self, instant: Instant, expected: &Expected, seen: &[Seen], now_ms: u64) -> Self {
        let newest_ms = expected.newest_ms(now_ms);
        let facts = seen.iter().zip(&expected.candidates).enumerate().map(|(key, (seen, candidates))| {
            let left = candidates.iter().filter(|fate| fate.allows(key, seen, now_ms, newest_ms));
            let mut left: Vec<Arc<Fate>> = left.cloned().collect();
            // Until an opening ends, what this one saw may be seen otherwise: a key that was over is not, where the
            // wall clock is set back. From then on it is, of acts that look the same, the one that promised least.
            let least = (0..left.len()).min_by_key(|at| left[*at].kept_until_ms()).unwrap();
            let least = left.remove(least);
            left.push(least);
            left.into_iter().map(|fate| Fact { call: 0, fate, sure: true }).collect()
        });
        let facts = facts.collect();
        let wall_ms = expected.clock.wall_ms();
        let mut marks = self.marks_at(instant);
        marks.retain(|mark| mark.store_ms_after_boot(wall_ms) == now_ms);
        let latest_ms = expected.crashed_ms.max(now_ms);
        Self { facts, marks, latest_ms, ..Self::new([], self.token_max()) }
    }
}

/// What ended a run of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Crash {
    Kill,
    PowerLoss,
}

/// What an opening may show.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
    /// By key, oldest first.
    candidates: Vec<Vec<Arc<Fate>>>,
    token_max: u64,
    pub(crate) clock: ManualClock,
    /// What store time may be.
    now_ms: Vec<u64>,
    /// As late as it ever was before the crash.
    crashed_ms: u64,
}

impl Expected {
    /// The same, if some recovery before was begun when `earlier` held: it has told the store the time.
    pub(crate) fn or_since(mut self, earlier: &Self) -> Self {
        self.now_ms.extend(&earlier.now_ms);
        self
    }

    fn newest_ms(&self, now_ms: u64) -> u64 {
        now_ms.max(self.crashed_ms)
    }

    /// Whether every key is as some client left it, and refuses what it must; gives what was seen.
    pub(crate) fn check(&self, store: &Store, now_ms: u64) -> Result<Vec<Seen>, String> {
        let seen = observe(store, self.candidates.len())?;
        self.check_seen(&seen, now_ms)?;
        for (number, seen) in seen.iter().enumerate() {
            if matches!(seen, Seen::Present(_)) {
                let stranger = store.reserve(&key(number), fingerprint(number, STRANGER));
                if !matches!(stranger, Ok(Reserve::Mismatch(_))) {
                    return Err(format!("another request under key {number} is answered {stranger:?}"));
                }
            }
        }
        Ok(seen)
    }

    /// Whether every key is as some client left it.
    pub(crate) fn check_seen(&self, seen: &[Seen], now_ms: u64) -> Result<(), String> {
        let newest_ms = self.newest_ms(now_ms);
        for (number, (seen, candidates)) in seen.iter().zip(&self.candidates).enumerate() {
            if !candidates.iter().any(|fate| fate.allows(number, seen, now_ms, newest_ms)) {
                return Err(format!("key {number} is {seen:#?} at {now_ms}; allowed, oldest first: {candidates:#?}"));
            }
        }
        Ok(())
    }

    /// Reserves a key that nobody has ever named: its token must be larger than every one told before, and the time at
    /// which the store saw it first is the store's time, which must be one that it can be. Says that time, too.
    pub(crate) fn probe(&self, store: &Store, number: usize) -> Result<(Reservation, u64), String> {
        let reservation = match store.reserve(&key(number), fingerprint(number, 0)) {
            Ok(Reserve::Fresh(reservation)) if reservation.token().to_u64() > self.token_max => reservation,
            Ok(Reserve::Fresh(reservation)) => {
                return Err(format!("the token {} was given after {} was told", reservation.token(), self.token_max));
            }
            other => return Err(format!("a key that was never named is answered {other:?}")),
        };
        let info = store.peek(&key(number)).map_err(|error| error.to_string())?;
        let now_ms = info.map(|info| ms(info.first_seen)).ok_or("a key that was just reserved is absent")?;
        if !self.now_ms.contains(&now_ms) {
            return Err(format!(
                "store time is {now_ms}; allowed: {:?}; it was {} before",
                self.now_ms, self.crashed_ms
            ));
        }
        Ok((reservation, now_ms))
    }
}

/// What the store says of the first `keys` keys. Changes nothing, but by saying `Fresh` where it contradicts itself.
pub(crate) fn observe(store: &Store, keys: usize) -> Result<Vec<Seen>, String> {
    (0..keys).map(|number| observe_key(store, number)).collect()
}

fn observe_key(store: &Store, number: usize) -> Result<Seen, String> {
    let info = store.peek(&key(number)).map_err(|error| format!("peek of key {number}: {error}"))?;
    let Some(info) = info else { return Ok(Seen::Absent) };
    let answer = store.reserve(&key(number), info.fingerprint).map_err(|error| format!("key {number}: {error}"))?;
    let response = match (info.state, answer) {
        (KeyState::Done, Reserve::Replay(response)) => Some(match response.body() {
            Body::Kept(bytes) => (true, Bytes(bytes.to_vec())),
            Body::NotKept { reference } => (false, Bytes(reference.to_vec())),
        }),
        (KeyState::InFlight, Reserve::InFlight(_)) => None,
        (KeyState::Interrupted, Reserve::Interrupted(interrupted)) if interrupted.token == info.token => None,
        (state, answer) => return Err(format!("key {number} is {state:?} to peek and {answer:?} to reserve")),
    };
    Ok(Seen::Present(Box::new(Shown {
        state: info.state,
        fingerprint: info.fingerprint,
        token: info.token.to_u64(),
        attempt: info.attempt,
        detached: info.detached,
        cause: info.cause,
        checkpoint: Bytes(info.checkpoint.to_vec()),
        lease_end_ms: info.lease_end.map(ms),
        kept_until_ms: ms(info.kept_until),
        first_seen_ms: ms(info.first_seen),
        since_ms: ms(info.since),
        response,
    })))
}

pub(crate) fn ms(time: SystemTime) -> u64 {
    u64::try_from(time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis()).unwrap()
}

/// How often each of the states of a key was seen, to show that a campaign met them all.
pub(crate) fn count(seen: &[Seen], counts: &mut BTreeMap<&'static str, u64>) {
    for seen in seen {
        let name = match seen {
            Seen::Absent => "absent",
            Seen::Present(shown) => match (shown.state, shown.cause) {
                (KeyState::InFlight, _) => "in flight",
                (KeyState::Done, _) => "done",
                (_, Some(Cause::Crash)) => "interrupted by a crash",
                (_, Some(Cause::Dropped)) => "interrupted by a drop",
                (_, Some(Cause::LeaseLapsed)) => "interrupted by a lapse",
                (..) => "interrupted otherwise",
            },
        };
        *counts.entry(name).or_default() += 1;
    }
}
