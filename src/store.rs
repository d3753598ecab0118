//! The public face: the store's handle and the answers of `reserve`.

use std::any::Any;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::ms_rounded_up;
use crate::engine::{Acted, CloseReport, Engine, SHARDS};
use crate::entropy::Entropy;
use crate::error::{Error, ErrorKind};
use crate::key::{Fingerprint, Key, Token};
use crate::options::{Checked, OnInterrupted, Options, ReserveOptions};
use crate::recovery;
use crate::reservation::{
    Attempt, Completion, InFlight, Interrupted, KeyInfo, Mismatch, NotReattached, NotStored, Question, Reservation,
    Response, TooOld,
};
use crate::retention::DURATION_MS_MAX;
use crate::state::{Answer, Ask, Call, State};
use crate::stats::{OpenReport, Stats};
use crate::storage::{FileStorage, Storage};

/// How long a caller sleeps between two tries for a directory's lock.
const LOCK_RETRY: Duration = Duration::from_millis(5);

/// An open store: a cheap handle, to be cloned and shared.
///
/// Dropping the last handle closes the store without waiting for running owners, and frees the directory's lock before
/// it returns; [`close`](Self::close) does the same and says how it went.
#[derive(Clone)]
pub struct Store {
    handle: Arc<Handle>,
}

/// What all clones of a store share; its end is the end of the store.
struct Handle {
    engine: Arc<Engine>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.engine.close(0).is_err() {
            // The end mark is missing: the next opening reads the log as after a crash, and loses nothing that was
            // promised.
        }
    }
}

impl Store {
    /// Opens the store in `dir`, or makes one there if the directory is empty or does not exist.
    ///
    /// After a crash, what was accepted is made durable anew before this returns; see [`opened`](Self::opened) for what
    /// was found.
    ///
    /// # Errors
    ///
    /// `InvalidOptions`; `Locked`, when the directory is open already, here or in another process (see
    /// [`Options::lock_wait`]); `ForeignDirectory`, when it is no directory or holds something else;
    /// `UnsupportedFormat`; `Corrupt`, naming file and offset; in all these cases no byte has changed. `Full` and `Io`,
    /// from the file system.
    pub fn open(dir: impl AsRef<Path>, options: Options) -> Result<Self, Error> {
        let options = options.validate()?;
        let dir = dir.as_ref();
        let storage = FileStorage::open(dir, options.append_mode, true).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotADirectory => {
                Error::with_source(ErrorKind::ForeignDirectory, "the path of the store is not a directory", error)
            }
            _ => Error::io("opening the directory of the store", error),
        })?;
        Self::open_on(Arc::new(storage), Entropy::System, options, true)
    }

    pub(crate) fn open_on(
        storage: Arc<dyn Storage>,
        entropy: Entropy,
        options: Checked,
        with_helper: bool,
    ) -> Result<Self, Error> {
        recovery::refuse_foreign(&*storage)?;
        let lock = take_lock(&*storage, options.lock_wait)?;
        let opened = recovery::open(storage, entropy, &options, SHARDS)?;
        let engine = Engine::new(opened, lock, options, with_helper)?;
        Ok(Self { handle: Arc::new(Handle { engine }) })
    }

    /// Asks whether the work named by `key`, for the request with this fingerprint, may be done now. Atomic: of any
    /// number of callers one is told `Fresh`.
    ///
    /// # Errors
    ///
    /// `Full`, `Poisoned`, `Closed`, `Io`, `Corrupt`: the caller must not do the work.
    pub fn reserve(&self, key: &Key, fingerprint: Fingerprint) -> Result<Reserve, Error> {
        self.reserve_with(key, fingerprint, &ReserveOptions::default())
    }

    /// As [`reserve`](Self::reserve), with options of this call's own.
    ///
    /// # Errors
    ///
    /// Also `InvalidOptions`, naming the option.
    pub fn reserve_with(&self, key: &Key, fingerprint: Fingerprint, with: &ReserveOptions) -> Result<Reserve, Error> {
        let engine = &self.handle.engine;
        let with = with.validate(engine.options())?;
        let ask = Ask {
            fingerprint,
            retention_ms: with.retention_ms,
            lease_ms: with.lease_ms,
            durability: with.durability,
            take_over: match with.on_interrupted {
                OnInterrupted::Surface => false,
                OnInterrupted::TakeOver => true,
            },
            issued_at_ms: with.issued_at_ms,
        };
        let on_drop = with.on_drop;
        Reserve::ask(&Question { engine, key, ask, on_drop }, with.wait_ms)
    }

    /// Does `work` once for the key, stores its response, and answers every later call with it.
    ///
    /// A final error of the work is a response like any other: return it as `Ok`. An `Err` says what is known of the
    /// effect. A panic leaves the key interrupted. A response that is too large to be stored is kept as "done, body not
    /// kept", and returned.
    ///
    /// # Errors
    ///
    /// [`OnceError`] says why the work was not done, or what became of it.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// use keyonce::{Failed, Fingerprint, Key, Options, Outcome, Store};
    ///
    /// let store = Store::open(dir.path().join("keys"), Options::default())?;
    /// let key = Key::new("charges", "order-17")?;
    /// let charge = || store.once(&key, Fingerprint::of("9.99 EUR"), |_| Ok::<_,
    /// Failed<std::io::Error>>(b"paid".to_vec())); assert!(matches!(charge()?, Outcome::Ran(body) if body == b"paid"));
    /// assert!(matches!(charge()?, Outcome::Replayed(_)));
    /// # Ok(())
    /// # }
    /// ```
    pub fn once<E>(
        &self,
        key: &Key,
        fingerprint: Fingerprint,
        work: impl FnOnce(&Attempt) -> Result<Vec<u8>, Failed<E>>,
    ) -> Result<Outcome, OnceError<E>> {
        let reservation = match self.reserve(key, fingerprint).map_err(OnceError::Store)? {
            Reserve::Fresh(reservation) => reservation,
            Reserve::Replay(response) => return Ok(Outcome::Replayed(response)),
            Reserve::InFlight(in_flight) => return Err(OnceError::InFlight(in_flight)),
            Reserve::Interrupted(interrupted) => return Err(OnceError::Interrupted(interrupted)),
            Reserve::Mismatch(mismatch) => return Err(OnceError::Mismatch(mismatch)),
            Reserve::TooOld(too_old) => return Err(OnceError::TooOld(too_old)),
        };
        match work(&reservation.attempt_view()) {
            Ok(response) => {
                let mut stored = reservation.complete(&response);
                if let Err(NotStored { error, reservation }) = stored {
                    stored = match error.kind() {
                        ErrorKind::TooLarge => reservation.complete_without_body(&[]),
                        _ => Err(NotStored { error, reservation }),
                    };
                }
                match stored {
                    Ok(Completion::Done) => Ok(Outcome::Ran(response)),
                    Ok(Completion::Superseded) => Err(OnceError::Superseded { response }),
                    Err(not_stored) => Err(OnceError::NotStored { response, not_stored }),
                }
            }
            Err(Failed::NothingHappened(error)) => match reservation.release() {
                Ok(_) => Err(OnceError::Work(error)),
                Err(store) => Err(OnceError::Store(store)),
            },
            Err(Failed::Unknown(error)) => {
                reservation.interrupt();
                Err(OnceError::Work(error))
            }
        }
    }

    /// Goes on with a detached reservation, also one of an earlier run.
    ///
    /// # Errors
    ///
    /// `InFlight` while a guard of it lives; `Superseded` when it is no longer the latest of its key, or was not
    /// detached; else what kept the store from answering.
    pub fn reattach(&self, key: &Key, token: Token) -> Result<Reservation, NotReattached> {
        let engine = &self.handle.engine;
        let lease_ms = engine.options().lease_ms;
        let acted = engine.reattach(key, token.to_u64(), lease_ms)?;
        match acted.answer {
            Answer::Done => Ok(Reservation::new(engine, key, &acted, lease_ms, engine.options().on_drop)),
            Answer::InFlight => Err(NotReattached::InFlight),
            Answer::Superseded
            | Answer::Fresh
            | Answer::Replay
            | Answer::Interrupted
            | Answer::Mismatch
            | Answer::TooOld => Err(NotReattached::Superseded),
        }
    }

    /// What is known of a key, without reserving it; `None` when nothing is.
    ///
    /// # Errors
    ///
    /// `Poisoned`, `Closed`, `Corrupt`, `Io`.
    pub fn peek(&self, key: &Key) -> Result<Option<KeyInfo>, Error> {
        let (state, checkpoint) = self.handle.engine.peek(key)?;
        Ok(KeyInfo::new(&state, checkpoint))
    }

    /// Makes a key as if it had never been: an operator's act, for when the store must not remember what happened. It
    /// is synced, and stands in the log with its reason (at most 64 KiB); an owner at work is superseded. `false` when
    /// nothing was known of the key.
    ///
    /// # Errors
    ///
    /// `TooLarge`, `Full`, `Poisoned`, `Closed`, `Io`: the key is as it was.
    pub fn forget(&self, key: &Key, reason: &str) -> Result<bool, Error> {
        let acted = self.handle.engine.call_with(key, Call::Forget, reason.as_bytes())?;
        self.sync()?;
        Ok(acted.answer == Answer::Done)
    }

    /// Counters and sizes, as of now.
    pub fn stats(&self) -> Stats {
        self.handle.engine.stats()
    }

    /// What opening the store found.
    pub fn opened(&self) -> &OpenReport {
        self.handle.engine.report()
    }

    /// Makes durable all that was answered before the call, whatever its level.
    ///
    /// # Errors
    ///
    /// `Poisoned`, `Closed`.
    pub fn sync(&self) -> Result<(), Error> {
        self.handle.engine.sync()
    }

    /// Ends the store for every clone: nobody becomes an owner any more, running owners may finish for `wait`, waiters
    /// get `Closed`; then everything is synced, the end is marked, and the directory's lock is free. What is unfinished
    /// then is found interrupted by the next opening.
    ///
    /// # Errors
    ///
    /// `Poisoned`, `Io`: the store is closed all the same, without its end mark.
    pub fn close(&self, wait: Duration) -> Result<CloseReport, Error> {
        self.handle.engine.close(ms_rounded_up(wait).min(DURATION_MS_MAX))
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("opened", self.opened()).finish_non_exhaustive()
    }
}

fn take_lock(storage: &dyn Storage, lock_wait: Duration) -> Result<Box<dyn Any + Send + Sync>, Error> {
    let mut waited = Duration::ZERO;
    loop {
        if let Some(lock) = storage.lock().map_err(|error| Error::io("locking the directory", error))? {
            return Ok(lock);
        }
        if waited >= lock_wait {
            return Err(Error::new(ErrorKind::Locked, "the store is open already, in this process or another"));
        }
        let pause = LOCK_RETRY.min(lock_wait - waited);
        std::thread::sleep(pause);
        waited += pause;
    }
}

/// The answer to a reserve. Exhaustive on purpose: the compiler asks "and if it was interrupted?".
#[derive(Debug)]
#[must_use = "the answer says whether the work may be done"]
pub enum Reserve {
    /// You own the key: do the work, then complete.
    Fresh(Reservation),
    /// Done before: here is the stored response.
    Replay(Response),
    /// Another caller is doing it now. Over HTTP: 409 with `Retry-After`.
    InFlight(InFlight),
    /// Somebody began and never finished: the outcome is unknown.
    Interrupted(Interrupted),
    /// The key stands for another request. Over HTTP: 422.
    Mismatch(Mismatch),
    /// The key may already have been forgotten, so it must not run as if new. Over HTTP: 412.
    TooOld(TooOld),
}

impl Reserve {
    pub(crate) fn ask(question: &Question<'_>, wait_ms: u64) -> Result<Self, Error> {
        let acted = question.engine.reserve(question.key, question.ask, wait_ms)?;
        Ok(Self::of(question, acted))
    }

    pub(crate) fn of(question: &Question<'_>, acted: Acted) -> Self {
        let Question { engine, key, ask, on_drop } = *question;
        match (acted.answer, &acted.state) {
            (Answer::Fresh, _) => Self::Fresh(Reservation::new(engine, key, &acted, ask.lease_ms, on_drop)),
            (Answer::Replay, State::Done(finished)) => Self::Replay(Response::new(*finished, acted.payload)),
            (Answer::InFlight, State::InFlight(owned)) => {
                Self::InFlight(InFlight::new(question.keep(), owned, acted.payload))
            }
            (Answer::Interrupted, State::Interrupted(owned, stop)) => {
                Self::Interrupted(Interrupted::new(question.keep(), owned, *stop, acted.payload))
            }
            (Answer::Mismatch, state) => Self::Mismatch(Mismatch::new(state)),
            (Answer::TooOld, _) => Self::TooOld(TooOld { retention: Duration::from_millis(ask.retention_ms) }),
            (answer, state) => panic!("a reserve is never answered {answer:?} in {state:?}"),
        }
    }
}

/// What [`Store::once`] did.
#[derive(Debug)]
pub enum Outcome {
    /// The work was done now; this is what it returned.
    Ran(Vec<u8>),
    /// It was done before; this is what was stored.
    Replayed(Response),
}

/// How the work of [`Store::once`] failed. A final error is a response: return it as `Ok`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed<E> {
    /// The effect did not happen and will not: the key is released, a retry may run.
    NothingHappened(E),
    /// Whether it happened is unknown: the key is interrupted. This is what `?` gives.
    Unknown(E),
}

impl<E> From<E> for Failed<E> {
    fn from(error: E) -> Self {
        Self::Unknown(error)
    }
}

/// Why [`Store::once`] has no outcome.
#[derive(Debug)]
#[non_exhaustive]
pub enum OnceError<E> {
    /// The work failed.
    Work(E),
    /// Another caller is doing it now.
    InFlight(InFlight),
    /// Somebody began it and never finished.
    Interrupted(Interrupted),
    /// The key stands for another request.
    Mismatch(Mismatch),
    /// The key may already have been forgotten.
    TooOld(TooOld),
    /// The work was done, and its response could not be stored.
    NotStored {
        /// What the work returned.
        response: Vec<u8>,
        /// Why, with the guard.
        not_stored: NotStored,
    },
    /// The work was done, but somebody took the key over meanwhile.
    Superseded {
        /// What the work returned.
        response: Vec<u8>,
    },
    /// The store could not say, and the work was not done; or it could not take back a key for which nothing happened.
    Store(Error),
}

impl<E: fmt::Display> fmt::Display for OnceError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Work(error) => write!(f, "the work failed: {error}"),
            Self::InFlight(_) => f.write_str("another caller is doing the work now"),
            Self::Interrupted(_) => f.write_str("the work was begun before, and whether it took effect is unknown"),
            Self::Mismatch(_) => f.write_str("the key stands for another request"),
            Self::TooOld(_) => f.write_str("the key is so old that it may already have been forgotten"),
            Self::NotStored { not_stored, .. } => write!(f, "the work was done, but {not_stored}"),
            Self::Superseded { .. } => f.write_str("the work was done, but somebody took the key over meanwhile"),
            Self::Store(error) => error.fmt(f),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for OnceError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Work(error) => Some(error),
            Self::NotStored { not_stored, .. } => Some(not_stored),
            Self::Store(error) => error.source(),
            Self::InFlight(_)
            | Self::Interrupted(_)
            | Self::Mismatch(_)
            | Self::TooOld(_)
            | Self::Superseded { .. } => None,
        }
    }
}
