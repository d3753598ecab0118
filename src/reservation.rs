//! What a caller holds: the guard of a reservation, the view of an attempt, and the handles of the other answers.
//!
//! A handle holds the store's engine, the key and what was true when it was made; every act asks the engine again,
//! which decides by the token. Nothing here touches the log.

mod handles;
mod lists;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub(crate) use self::handles::{Asked, Question};
pub use self::handles::{Body, InFlight, Interrupted, KeyInfo, KeyState, Mismatch, Response, TooOld};
pub use self::lists::{InterruptedKeys, Keys};
use crate::engine::{Acted, Begun, Engine, RestsOn};
use crate::error::Error;
use crate::format::Cause;
use crate::key::{Fingerprint, Key, Token};
use crate::options::OnDrop;
use crate::retention::checked_ms;
use crate::state::{Answer, Call, State};
use crate::wait::{Caller, now};

/// Whether an act of an owner took effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "`Superseded` means that nothing was changed: another owner, or an operator, decided the key's fate"]
pub enum Completion {
    /// It took effect, and survives what the reservation's level names; but for a release, which a power loss may take
    /// back: the key is interrupted then, which is safe.
    Done,
    /// The reservation is no longer the latest of its key, or the key is gone. Nothing was changed.
    Superseded,
}

impl Completion {
    fn of(acted: &Acted) -> Self {
        match acted.answer {
            Answer::Superseded => Self::Superseded,
            Answer::Done
            | Answer::Fresh
            | Answer::Replay
            | Answer::InFlight
            | Answer::Interrupted
            | Answer::Mismatch
            | Answer::TooOld => Self::Done,
        }
    }
}

/// What identifies a reservation, shared by its guard and its views.
struct Held {
    engine: Arc<Engine>,
    key: Key,
    fingerprint: Fingerprint,
    token: Token,
    /// Which guard of the token this is.
    guard_id: u64,
    attempt: u32,
    lease_ms: u64,
    checkpoint: Arc<[u8]>,
}

impl Held {
    async fn renew(&self, lease: Duration, caller: Caller) -> Result<Completion, Error> {
        let lease_ms = checked_ms("lease", lease)?;
        self.act(Call::Renew { token: self.token.to_u64(), lease_ms }, &[], caller).await
    }

    async fn save_checkpoint(&self, bytes: &[u8], caller: Caller) -> Result<Completion, Error> {
        let call = Call::SaveCheckpoint { token: self.token.to_u64(), lease_ms: self.lease_ms };
        self.act(call, bytes, caller).await
    }

    async fn act(&self, call: Call, given: &[u8], caller: Caller) -> Result<Completion, Error> {
        Ok(Completion::of(&self.engine.call_of_guard(&self.key, self.guard_id, call, given, caller).await?))
    }
}

/// What becomes of a reservation that is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Its caller has seen it.
    Seen(OnDrop),
    /// Nobody was told of it yet, so no work can have begun.
    Unseen,
    /// Nobody was told that it was reattached: it is detached again, with the lease that it had.
    UnseenReattached { until_ms: u64 },
    /// An act has ended it; nothing is left to be done.
    Ended,
}

/// Of a reservation whose completion or detachment was tried: the work is done, or goes on elsewhere, so whatever the
/// options say, dropping it never gives the key back.
const TRIED: Ending = Ending::Seen(OnDrop::Interrupt);

/// The ownership of a key while its work is done.
///
/// Whoever holds it is the one who may do the work. It ends by [`complete`](Self::complete) and its kin, by
/// [`release`](Self::release) when nothing happened, or by [`interrupt`](Self::interrupt). Dropping it leaves the key
/// interrupted (or released, if the options say so): drop never blocks on a sync and never fails.
///
/// A guard does not keep the store open. Once the last [`Store`](crate::Store) is dropped its acts give `Closed`, and
/// the next opening finds the key interrupted.
#[must_use = "dropping a reservation at once leaves its key interrupted"]
pub struct Reservation {
    held: Arc<Held>,
    ending: Ending,
}

impl Reservation {
    pub(crate) fn new(engine: &Arc<Engine>, key: &Key, acted: &Acted, lease_ms: u64, ending: Ending) -> Self {
        let State::InFlight(owned) = &acted.state else {
            panic!("a reservation is made of a key in flight alone");
        };
        let held = Held {
            engine: Arc::clone(engine),
            key: key.clone(),
            fingerprint: owned.fingerprint,
            token: Token::from_u64(owned.token),
            guard_id: acted.guard_id.expect("a guard was made"),
            attempt: owned.attempt,
            lease_ms,
            checkpoint: Arc::clone(&acted.payload),
        };
        Self { held: Arc::new(held), ending }
    }

    /// Its completion or detachment is being tried: from here on dropping it never gives the key back.
    pub(crate) fn tried(mut self) -> Self {
        self.ending = TRIED;
        self
    }

    /// Its caller is about to be told of it.
    pub(crate) fn seen(mut self, on_drop: OnDrop) -> Self {
        self.ending = Ending::Seen(on_drop);
        self
    }

    /// The key.
    pub fn key(&self) -> &Key {
        &self.held.key
    }

    /// The fingerprint of the request.
    pub fn fingerprint(&self) -> Fingerprint {
        self.held.fingerprint
    }

    /// The fencing token: larger than every earlier one of the store.
    pub fn token(&self) -> Token {
        self.held.token
    }

    /// 1 for the first owner of the key, one more at each take-over.
    pub fn attempt(&self) -> u32 {
        self.held.attempt
    }

    /// What an earlier attempt stored of its progress; empty if nothing.
    pub fn checkpoint(&self) -> &[u8] {
        &self.held.checkpoint
    }

    /// The key to send on to the receiver of the effect: see [`Key::downstream_key`].
    pub fn downstream_key(&self, label: &str) -> String {
        self.held.key.downstream_key(label)
    }

    /// A view for whoever does the work: it can renew, save checkpoints and derive keys, but not end the reservation.
    pub fn attempt_view(&self) -> Attempt {
        Attempt { held: Arc::clone(&self.held) }
    }

    /// Stores the response. When this returns `Done`, every retry of the key is answered with it, byte for byte, and it
    /// survives what the reservation's level names. It counts also after the lease lapsed, if nobody took over.
    ///
    /// # Errors
    ///
    /// [`NotStored`] gives the reservation back: `TooLarge` for more than `response_bytes_max` bytes (complete again,
    /// with less), `Full`, `Poisoned`, `Closed`, `Io`.
    pub fn complete(self, response: &[u8]) -> Result<Completion, NotStored> {
        self.finish_here(response, true)
    }

    /// As [`complete`](Self::complete), for a task. Dropped before it is ready, it has stored the response or leaves the
    /// key interrupted.
    ///
    /// # Errors
    ///
    /// As [`complete`](Self::complete).
    pub fn complete_async(self, response: &[u8]) -> impl Future<Output = Result<Completion, NotStored>> + Send + use<> {
        let (tried, response) = (self.tried(), response.to_vec());
        async move { tried.finish(&response, true, Caller::Task).await }
    }

    /// Stores that the work is done, but not its response. `reference` says where the answer can be found, if anywhere.
    ///
    /// # Errors
    ///
    /// As [`complete`](Self::complete).
    pub fn complete_without_body(self, reference: &[u8]) -> Result<Completion, NotStored> {
        self.finish_here(reference, false)
    }

    /// As [`complete_without_body`](Self::complete_without_body), for a task.
    ///
    /// # Errors
    ///
    /// As [`complete`](Self::complete).
    pub fn complete_without_body_async(
        self,
        reference: &[u8],
    ) -> impl Future<Output = Result<Completion, NotStored>> + Send + use<> {
        let (tried, reference) = (self.tried(), reference.to_vec());
        async move { tried.finish(&reference, false, Caller::Task).await }
    }

    fn finish_here(mut self, bytes: &[u8], body_kept: bool) -> Result<Completion, NotStored> {
        self.ending = TRIED;
        let call = Call::Complete { token: self.token().to_u64(), body_kept };
        let begun = self.held.engine.begin_call_here(&self.held.key, call, bytes);
        match begun.and_then(|begun| self.held.engine.settle_here(begun.rests_on).map(|()| begun.acted)) {
            Ok(acted) => {
                self.ending = Ending::Ended;
                Ok(Completion::of(&acted))
            }
            Err(error) => Err(NotStored { error, reservation: self }),
        }
    }

    pub(crate) async fn finish(self, bytes: &[u8], body_kept: bool, caller: Caller) -> Result<Completion, NotStored> {
        let finishing = self.begin_to_finish(bytes, body_kept, caller).await?;
        finishing.settle(caller).await
    }

    /// Stores the response, all but the wait until it is durable.
    pub(crate) async fn begin_to_finish(
        mut self,
        bytes: &[u8],
        body_kept: bool,
        caller: Caller,
    ) -> Result<Finishing, NotStored> {
        self.ending = TRIED;
        let call = Call::Complete { token: self.token().to_u64(), body_kept };
        match self.held.engine.begin_call(&self.held.key, call, bytes, caller).await {
            Ok(begun) => {
                // From here on the response stands in the log, and a drop has nothing to add.
                self.ending = Ending::Ended;
                Ok(Finishing { reservation: self, begun })
            }
            Err(error) => Err(NotStored { error, reservation: self }),
        }
    }

    /// Gives the key back: nothing happened. The next reserve is `Fresh`; after an earlier attempt that did not end
    /// well it is `Interrupted` again, since the outcome of that one is still unknown.
    ///
    /// # Errors
    ///
    /// `Full`, `Poisoned`, `Closed`, `Io`: the key is interrupted then.
    pub fn release(self) -> Result<Completion, Error> {
        now(self.give_back(Caller::Thread))
    }

    /// As [`release`](Self::release), for a task. Dropped before it was polled, it is a dropped reservation.
    ///
    /// # Errors
    ///
    /// As [`release`](Self::release).
    pub fn release_async(self) -> impl Future<Output = Result<Completion, Error>> + Send + use<> {
        self.give_back(Caller::Task)
    }

    pub(crate) async fn give_back(mut self, caller: Caller) -> Result<Completion, Error> {
        let call = Call::Release { token: self.token().to_u64() };
        let begun = self.held.engine.begin_call(&self.held.key, call, &[], caller).await?;
        self.ending = Ending::Ended;
        self.held.engine.settle(begun.rests_on, caller).await?;
        Ok(Completion::of(&begun.acted))
    }

    /// Says that the outcome is unknown. Dropping the reservation does the same by default.
    pub fn interrupt(self) {
        drop(self.seen(OnDrop::Interrupt));
    }

    /// Extends the lease to `lease` from now. Writes nothing in the normal case.
    ///
    /// # Errors
    ///
    /// `InvalidOptions` for a lease of 0 or over 100 years; `Full`, `Poisoned`, `Closed`, `Io`.
    pub fn renew(&self, lease: Duration) -> Result<Completion, Error> {
        now(self.held.renew(lease, Caller::Thread))
    }

    /// As [`renew`](Self::renew), for a task.
    ///
    /// # Errors
    ///
    /// As [`renew`](Self::renew).
    pub fn renew_async(&self, lease: Duration) -> impl Future<Output = Result<Completion, Error>> + Send + use<> {
        self.attempt_view().renew_async(lease)
    }

    /// Stores how far the work has come, in place of what was stored before. It is handed to whoever goes on after an
    /// interruption, and kept until the key is done. At most 64 KiB.
    ///
    /// # Errors
    ///
    /// `TooLarge`, `Full`, `Poisoned`, `Closed`, `Io`; what was stored before stays.
    pub fn save_checkpoint(&self, bytes: &[u8]) -> Result<Completion, Error> {
        now(self.held.save_checkpoint(bytes, Caller::Thread))
    }

    /// As [`save_checkpoint`](Self::save_checkpoint), for a task.
    ///
    /// # Errors
    ///
    /// As [`save_checkpoint`](Self::save_checkpoint).
    pub fn save_checkpoint_async(
        &self,
        bytes: &[u8],
    ) -> impl Future<Output = Result<Completion, Error>> + Send + use<> {
        self.attempt_view().save_checkpoint_async(bytes)
    }

    /// Lets the work go on elsewhere, in another process or a later run: the lease becomes durable, and
    /// [`Store::reattach`](crate::Store::reattach) with the token goes on with it, until the lease lapses.
    ///
    /// # Errors
    ///
    /// [`NotStored`] gives the reservation back, with `Superseded` when it was no longer the latest of its key.
    pub fn detach(self, lease: Duration) -> Result<Token, NotStored> {
        now(self.hand_on(lease, Caller::Thread))
    }

    /// As [`detach`](Self::detach), for a task. Dropped before it is ready, it has detached the reservation or leaves the
    /// key interrupted.
    ///
    /// # Errors
    ///
    /// As [`detach`](Self::detach).
    pub fn detach_async(self, lease: Duration) -> impl Future<Output = Result<Token, NotStored>> + Send + use<> {
        let tried = if checked_ms("lease", lease).is_ok() { self.tried() } else { self };
        tried.hand_on(lease, Caller::Task)
    }

    async fn hand_on(mut self, lease: Duration, caller: Caller) -> Result<Token, NotStored> {
        let token = self.token();
        let detached = match checked_ms("lease", lease) {
            Ok(lease_ms) => {
                self.ending = TRIED;
                let call = Call::Detach { token: token.to_u64(), lease_ms };
                self.held.engine.call(&self.held.key, call, &[], caller).await
            }
            Err(error) => Err(error),
        };
        match detached {
            Ok(acted) if acted.answer == Answer::Done => {
                self.ending = Ending::Ended;
                Ok(token)
            }
            Ok(_) => Err(NotStored { error: Error::superseded(), reservation: self }),
            Err(error) => Err(NotStored { error, reservation: self }),
        }
    }
}

/// A response that stands in the log and may have to wait until it is durable.
pub(crate) struct Finishing {
    reservation: Reservation,
    begun: Begun,
}

impl Finishing {
    /// What it rests on in the log of this store; a guard of another store rests on another log.
    pub(crate) fn rests_on(&self, engine: &Arc<Engine>) -> Option<RestsOn> {
        self.begun.rests_on.filter(|_| Arc::ptr_eq(engine, &self.reservation.held.engine))
    }

    pub(crate) async fn settle(mut self, caller: Caller) -> Result<Completion, NotStored> {
        match self.reservation.held.engine.settle(self.begun.rests_on, caller).await {
            Ok(()) => Ok(Completion::of(&self.begun.acted)),
            Err(error) => {
                self.reservation.ending = TRIED;
                Err(NotStored { error, reservation: self.reservation })
            }
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let token = self.held.token.to_u64();
        let call = match self.ending {
            Ending::Ended => return,
            Ending::Seen(OnDrop::Interrupt) => Call::Interrupt { token, cause: Cause::Dropped },
            Ending::Seen(OnDrop::Release) | Ending::Unseen => Call::Release { token },
            Ending::UnseenReattached { until_ms } => {
                Call::Detach { token, lease_ms: until_ms.saturating_sub(self.held.engine.now_ms()) }
            }
        };
        self.held.engine.drop_guard(&self.held.key, token, self.held.guard_id, call);
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation")
            .field("key", &self.held.key)
            .field("token", &self.held.token)
            .field("attempt", &self.held.attempt)
            .finish_non_exhaustive()
    }
}

/// A view of a running attempt. Cheap to clone, fits the extensions of a request, and cannot end the reservation.
#[derive(Clone)]
pub struct Attempt {
    held: Arc<Held>,
}

impl Attempt {
    /// Whether it is one of this store's.
    #[cfg(feature = "tower")]
    pub(crate) fn is_of(&self, engine: &Arc<Engine>) -> bool {
        Arc::ptr_eq(&self.held.engine, engine)
    }

    /// The key.
    pub fn key(&self) -> &Key {
        &self.held.key
    }

    /// The fencing token.
    pub fn token(&self) -> Token {
        self.held.token
    }

    /// 1 for the first owner of the key, one more at each take-over.
    pub fn number(&self) -> u32 {
        self.held.attempt
    }

    /// What an earlier attempt stored of its progress; empty if nothing.
    pub fn checkpoint(&self) -> &[u8] {
        &self.held.checkpoint
    }

    /// As [`Reservation::renew`]; `Superseded` once the reservation has ended.
    ///
    /// # Errors
    ///
    /// As [`Reservation::renew`].
    pub fn renew(&self, lease: Duration) -> Result<Completion, Error> {
        now(self.held.renew(lease, Caller::Thread))
    }

    /// As [`renew`](Self::renew), for a task.
    ///
    /// # Errors
    ///
    /// As [`Reservation::renew`].
    pub fn renew_async(&self, lease: Duration) -> impl Future<Output = Result<Completion, Error>> + Send + use<> {
        let held = Arc::clone(&self.held);
        async move { held.renew(lease, Caller::Task).await }
    }

    /// As [`Reservation::save_checkpoint`]; `Superseded` once the reservation has ended.
    ///
    /// # Errors
    ///
    /// As [`Reservation::save_checkpoint`].
    pub fn save_checkpoint(&self, bytes: &[u8]) -> Result<Completion, Error> {
        now(self.held.save_checkpoint(bytes, Caller::Thread))
    }

    /// As [`save_checkpoint`](Self::save_checkpoint), for a task.
    ///
    /// # Errors
    ///
    /// As [`Reservation::save_checkpoint`].
    pub fn save_checkpoint_async(
        &self,
        bytes: &[u8],
    ) -> impl Future<Output = Result<Completion, Error>> + Send + use<> {
        let (held, bytes) = (Arc::clone(&self.held), bytes.to_vec());
        async move { held.save_checkpoint(&bytes, Caller::Task).await }
    }

    /// The key to send on to the receiver of the effect, so that it can refuse to have it twice: see
    /// [`Key::downstream_key`].
    pub fn downstream_key(&self, label: &str) -> String {
        self.held.key.downstream_key(label)
    }
}

impl fmt::Debug for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempt")
            .field("key", &self.held.key)
            .field("token", &self.held.token)
            .field("number", &self.held.attempt)
            .finish_non_exhaustive()
    }
}

/// A response that could not be stored. The reservation comes back, so nothing is lost yet: complete again, shorter or
/// without body, or keep the guard until there is room. Dropping it, also by `?` into [`Error`], leaves the key
/// interrupted.
#[derive(Debug)]
pub struct NotStored {
    /// Why.
    pub error: Error,
    /// The guard, as it was.
    pub reservation: Reservation,
}

impl fmt::Display for NotStored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the outcome was not stored")
    }
}

impl std::error::Error for NotStored {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl From<NotStored> for Error {
    fn from(not_stored: NotStored) -> Self {
        not_stored.error
    }
}

/// Why a detached reservation was not taken up again.
#[derive(Debug)]
pub enum NotReattached {
    /// A guard of it lives: one holder at a time.
    InFlight,
    /// It is no longer the latest reservation of its key, was never detached, or the key is gone.
    Superseded,
    /// The store could not say.
    Store(Error),
}

impl fmt::Display for NotReattached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InFlight => f.write_str("the reservation has a living guard"),
            Self::Superseded => f.write_str("the reservation is no longer the latest of its key, or was not detached"),
            Self::Store(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for NotReattached {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Store(error) => error.source(),
            Self::InFlight | Self::Superseded => None,
        }
    }
}

impl From<Error> for NotReattached {
    fn from(error: Error) -> Self {
        Self::Store(error)
    }
}
