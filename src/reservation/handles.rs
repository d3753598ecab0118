//! The handles of the answers that own nothing, and what is known of a key.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::Completion;
use crate::engine::Engine;
use crate::error::Error;
use crate::format::Cause;
use crate::key::{Fingerprint, Key, Token};
use crate::options::OnDrop;
use crate::state::{Answer, Call, Finished, Owned, Policy, State, Stop, Terms};
use crate::store::Reserve;
use crate::wait::{Caller, now};

/// The state of a key, without what is stored for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeyState {
    /// Somebody is at work.
    InFlight,
    /// Somebody began and is not known to have finished: the outcome is unknown.
    Interrupted,
    /// A response is stored.
    Done,
}

/// What is known of a key, as of one moment.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct KeyInfo {
    /// The state.
    pub state: KeyState,
    /// The request that the key stands for.
    pub fingerprint: Fingerprint,
    /// The token of the latest reservation.
    pub token: Token,
    /// Which attempt that was.
    pub attempt: u32,
    /// When the key was first reserved, by store time.
    pub first_seen: SystemTime,
    /// When the state began: this attempt, the interruption, or the completion.
    pub since: SystemTime,
    /// Until when the latest owner counts as running; `None` unless in flight.
    pub lease_end: Option<SystemTime>,
    /// Until when the key is remembered at least: the retention after its completion; while it is unfinished, two
    /// retentions after the lease (see [`Retention`](crate::Retention)).
    pub kept_until: SystemTime,
    /// The work goes on elsewhere, under a durable lease.
    pub detached: bool,
    /// Why nobody is known to work on it; `None` unless interrupted.
    pub cause: Option<Cause>,
    /// The last checkpoint; empty when done.
    pub checkpoint: Arc<[u8]>,
}

impl KeyInfo {
    pub(crate) fn new(state: &State, checkpoint: Arc<[u8]>) -> Option<Self> {
        let (name, owned, since_ms, stop) = match state {
            State::Absent => return None,
            State::InFlight(owned) => (KeyState::InFlight, owned, owned.reserved_ms, None),
            State::Interrupted(owned, stop) => (KeyState::Interrupted, owned, stop.since_ms, Some(*stop)),
            State::Done(finished) => return Some(Self::done(finished)),
        };
        Some(Self::unfinished(name, owned, since_ms, stop, checkpoint))
    }

    fn unfinished(state: KeyState, owned: &Owned, since_ms: u64, stop: Option<Stop>, checkpoint: Arc<[u8]>) -> Self {
        Self {
            state,
            fingerprint: owned.fingerprint,
            token: Token::from_u64(owned.token),
            attempt: owned.attempt,
            first_seen: at(owned.first_seen_ms),
            since: at(since_ms),
            lease_end: stop.is_none().then(|| at(owned.lease_end_ms)),
            kept_until: at(owned.kept_until_ms),
            detached: owned.detached,
            cause: stop.map(|stop| stop.cause),
            checkpoint,
        }
    }

    fn done(finished: &Finished) -> Self {
        Self {
            state: KeyState::Done,
            fingerprint: finished.fingerprint,
            token: Token::from_u64(finished.token),
            attempt: finished.attempt,
            first_seen: at(finished.first_seen_ms),
            since: at(finished.completed_ms),
            lease_end: None,
            kept_until: at(finished.kept_until_ms),
            detached: false,
            cause: None,
            checkpoint: Arc::default(),
        }
    }
}

/// Store time as a time of the system.
fn at(ms: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_millis(ms)
}

/// What was asked of the store.
#[derive(Clone, Copy)]
pub(crate) struct Question<'a> {
    pub(crate) engine: &'a Arc<Engine>,
    pub(crate) key: &'a Key,
    pub(crate) terms: Terms,
    pub(crate) on_drop: OnDrop,
}

impl Question<'_> {
    /// The question, for a handle that may ask it again.
    pub(crate) fn keep(&self) -> Asked {
        let Self { engine, key, terms, on_drop } = *self;
        Asked { engine: Arc::clone(engine), key: key.clone(), terms, on_drop }
    }
}

/// A question that a handle keeps.
#[derive(Clone)]
pub(crate) struct Asked {
    engine: Arc<Engine>,
    key: Key,
    terms: Terms,
    on_drop: OnDrop,
}

impl Asked {
    pub(crate) fn question(&self) -> Question<'_> {
        Question { engine: &self.engine, key: &self.key, terms: self.terms, on_drop: self.on_drop }
    }
}

/// Another caller is at work on the key right now.
pub struct InFlight {
    asked: Box<Asked>,
    info: Box<KeyInfo>,
    retry_after: Duration,
}

impl InFlight {
    pub(crate) fn new(asked: Asked, state: &State, checkpoint: Arc<[u8]>) -> Self {
        let until_ms = match state {
            State::InFlight(owned) => owned.lease_end_ms,
            State::Interrupted(_, stop) => asked.terms.policy.holds_until_ms(stop),
            State::Absent | State::Done(_) => 0,
        };
        let retry_after = Duration::from_millis(until_ms.saturating_sub(asked.engine.now_ms()));
        let info = KeyInfo::new(state, checkpoint).expect("an absent key is not in flight");
        Self { asked: Box::new(asked), info: Box::new(info), retry_after }
    }

    /// What is known of the key. Its state is `Interrupted` where [`OnInterrupted::Hold`](crate::OnInterrupted::Hold)
    /// lets it count as running.
    pub fn info(&self) -> &KeyInfo {
        &self.info
    }

    /// How long the owner's lease had still to run, or the interruption to be held: a caller that comes back then is
    /// told more.
    pub fn retry_after(&self) -> Duration {
        self.retry_after
    }

    /// Waits until the owner has finished, at most this long, and reserves again. `InFlight` again when the time is
    /// over.
    ///
    /// # Errors
    ///
    /// As [`Store::reserve`](crate::Store::reserve).
    pub fn wait(self, at_most: Duration) -> Result<Reserve, Error> {
        now(Reserve::ask(&self.asked.question(), wait_ms(at_most), Caller::Thread))
    }

    /// As [`wait`](Self::wait), for a task.
    ///
    /// # Errors
    ///
    /// As [`Store::reserve`](crate::Store::reserve).
    pub fn wait_async(self, at_most: Duration) -> impl Future<Output = Result<Reserve, Error>> + Send + use<> {
        let asked = self.asked;
        async move { Reserve::ask(&asked.question(), wait_ms(at_most), Caller::Task).await }
    }
}

fn wait_ms(at_most: Duration) -> u64 {
    crate::clock::ms_rounded_up(at_most).min(crate::retention::DURATION_MS_MAX)
}

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight").field("key", &self.asked.key).field("info", &self.info).finish_non_exhaustive()
    }
}

/// Somebody began the work of the key and is not known to have finished it: whether it took effect is unknown.
///
/// Ask whoever received the effect, by [`downstream_key`](Self::downstream_key), then [`resolve`](Self::resolve) with
/// what it says or [`release`](Self::release) the key; or [`take_over`](Self::take_over) when the work may be done
/// again, as it may when its receiver honours the downstream key.
///
/// It stays so until somebody does one of these, or until its `kept_until` passes: then the key is forgotten like any
/// other, and [`Stats::expired_unresolved`](crate::Stats::expired_unresolved) counts it.
pub struct Interrupted {
    asked: Box<Asked>,
    /// The request that the key stands for.
    pub fingerprint: Fingerprint,
    /// The token of the reservation that was interrupted.
    pub token: Token,
    /// Which attempt that was.
    pub attempt: u32,
    /// Since when nobody is known to work on it. After a crash: when that attempt began.
    pub since: SystemTime,
    info: Box<KeyInfo>,
    stop: Stop,
}

impl Interrupted {
    pub(crate) fn new(asked: Asked, owned: &Owned, stop: Stop, checkpoint: Arc<[u8]>) -> Self {
        let info = KeyInfo::unfinished(KeyState::Interrupted, owned, stop.since_ms, Some(stop), checkpoint);
        Self {
            asked: Box::new(asked),
            fingerprint: info.fingerprint,
            token: info.token,
            attempt: info.attempt,
            since: info.since,
            info: Box::new(info),
            stop,
        }
    }

    /// The key.
    pub fn key(&self) -> &Key {
        &self.asked.key
    }

    /// All that is known of the key.
    pub fn info(&self) -> &KeyInfo {
        &self.info
    }

    /// Why nobody is known to work on the key.
    pub fn cause(&self) -> Cause {
        self.stop.cause
    }

    /// How far the work had come, as it was last stored; empty if never.
    pub fn checkpoint(&self) -> &[u8] {
        &self.info.checkpoint
    }

    /// The key that the attempt sent on: see [`Key::downstream_key`].
    pub fn downstream_key(&self, label: &str) -> String {
        self.asked.key.downstream_key(label)
    }

    /// Becomes the next owner: `Fresh`, with the attempt's number one higher, if the key is still interrupted with this
    /// token. Else the answer is what the key is now. Lease, level and `on_drop` are those of the call that was
    /// answered so; the retention is the key's.
    ///
    /// # Errors
    ///
    /// As [`Store::reserve`](crate::Store::reserve).
    pub fn take_over(self) -> Result<Reserve, Error> {
        now(self.become_owner(Caller::Thread))
    }

    /// As [`take_over`](Self::take_over), for a task.
    ///
    /// # Errors
    ///
    /// As [`Store::reserve`](crate::Store::reserve).
    pub fn take_over_async(self) -> impl Future<Output = Result<Reserve, Error>> + Send + use<> {
        self.become_owner(Caller::Task)
    }

    async fn become_owner(self, caller: Caller) -> Result<Reserve, Error> {
        let question = self.asked.question();
        let Terms { lease, durability, .. } = question.terms;
        let call = Call::TakeOver { token: self.token.to_u64(), lease, durability };
        let begun = question.engine.begin_call(question.key, call, &[], caller).await?;
        if begun.acted.answer == Answer::Fresh {
            return Reserve::answer(&question, begun, caller).await;
        }
        let terms = Terms { policy: Policy::Surface, ..question.terms };
        Reserve::ask(&Question { terms, ..question }, 0, caller).await
    }

    /// Stores the outcome that was found out about, as if the attempt had completed.
    ///
    /// # Errors
    ///
    /// `TooLarge`, `Full`, `Poisoned`, `Closed`, `Io`: the key is still interrupted.
    pub fn resolve(self, response: &[u8]) -> Result<Completion, Error> {
        now(self.act(Call::Resolve { token: self.token.to_u64(), body_kept: true }, response, Caller::Thread))
    }

    /// As [`resolve`](Self::resolve), for a task.
    ///
    /// # Errors
    ///
    /// As [`resolve`](Self::resolve).
    pub fn resolve_async(self, response: &[u8]) -> impl Future<Output = Result<Completion, Error>> + Send + use<> {
        let response = response.to_vec();
        let call = Call::Resolve { token: self.token.to_u64(), body_kept: true };
        async move { self.act(call, &response, Caller::Task).await }
    }

    /// Gives the key back, since it was found out that nothing happened: the next reserve is `Fresh`.
    ///
    /// # Errors
    ///
    /// `Full`, `Poisoned`, `Closed`, `Io`: the key is still interrupted.
    pub fn release(self) -> Result<Completion, Error> {
        now(self.act(Call::ReleaseInterrupted { token: self.token.to_u64() }, &[], Caller::Thread))
    }

    /// As [`release`](Self::release), for a task.
    ///
    /// # Errors
    ///
    /// As [`release`](Self::release).
    pub fn release_async(self) -> impl Future<Output = Result<Completion, Error>> + Send + use<> {
        let call = Call::ReleaseInterrupted { token: self.token.to_u64() };
        async move { self.act(call, &[], Caller::Task).await }
    }

    async fn act(&self, call: Call, given: &[u8], caller: Caller) -> Result<Completion, Error> {
        Ok(Completion::of(&self.asked.engine.call(&self.asked.key, call, given, caller).await?))
    }
}

impl fmt::Debug for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Interrupted").field("key", &self.asked.key).field("info", &self.info).finish_non_exhaustive()
    }
}

/// The key stands for another request. The stored response is not told: it belongs to that one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mismatch {
    /// When the key was first reserved.
    pub first_seen: SystemTime,
    /// What has become of the request it stands for.
    pub state: KeyState,
}

impl Mismatch {
    pub(crate) fn new(state: &State) -> Self {
        let info = KeyInfo::new(state, Arc::default()).expect("an absent key stands for no request");
        Self { first_seen: info.first_seen, state: info.state }
    }
}

/// The key was issued so long ago that it may already have been forgotten: it must not run as if it were new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TooOld {
    /// How long the key would have been remembered.
    pub retention: Duration,
}

/// A stored response: an owned copy, cheap to clone.
#[derive(Clone)]
pub struct Response {
    bytes: Arc<[u8]>,
    finished: Finished,
}

/// What was stored of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body<'a> {
    /// The response, byte for byte.
    Kept(&'a [u8]),
    /// The work is done, its response was not stored.
    NotKept {
        /// What the completer left to find it by; may be empty.
        reference: &'a [u8],
    },
}

impl Response {
    pub(crate) fn new(finished: Finished, bytes: Arc<[u8]>) -> Self {
        Self { bytes, finished }
    }

    /// What was stored.
    pub fn body(&self) -> Body<'_> {
        if self.finished.body_kept { Body::Kept(&self.bytes) } else { Body::NotKept { reference: &self.bytes } }
    }

    /// When the key was completed, by store time.
    pub fn completed_at(&self) -> SystemTime {
        at(self.finished.completed_ms)
    }

    /// When the key will be forgotten. A replay does not extend it.
    pub fn expires_at(&self) -> SystemTime {
        at(self.finished.kept_until_ms)
    }

    /// Which attempt completed it.
    pub fn attempt(&self) -> u32 {
        self.finished.attempt
    }
}

impl fmt::Debug for Response {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Response")
            .field("bytes", &self.bytes.len())
            .field("body_kept", &self.finished.body_kept)
            .field("attempt", &self.finished.attempt)
            .finish_non_exhaustive()
    }
}
