//! Work that is done once: reserve, work, complete, in one call.

use std::fmt;
use std::future::ready;

use super::{Reserve, Store};
use crate::error::{Error, ErrorKind};
use crate::key::{Fingerprint, Key};
use crate::options::ReserveOptions;
use crate::reservation::{
    Asked, Attempt, Completion, InFlight, Interrupted, Mismatch, NotStored, Reservation, Response, TooOld,
};
use crate::wait::{Caller, now};

impl Store {
    /// Does `work` once for the key, stores its response, and answers every later call with it.
    ///
    /// A final error of the work is a response like any other: return it as `Ok`. An `Err` says what is known of the
    /// effect. A panic leaves the key interrupted (or gives it back, where `on_drop` says so). A response that is too large to be stored is kept as "done, body not
    /// kept", and returned.
    ///
    /// # Errors
    ///
    /// [`OnceError`] says why the work was not done, or what became of it.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// use std::io;
    ///
    /// use keyonce::{Attempt, Failed, Fingerprint, Key, Options, Outcome, Store};
    ///
    /// let store = Store::open(dir.path().join("keys"), Options::default())?;
    /// let key = Key::new("charges", "order-17")?;
    /// let pay = |_: &Attempt| -> Result<Vec<u8>, Failed<io::Error>> { Ok(b"paid".to_vec()) };
    ///
    /// assert!(matches!(store.once(&key, Fingerprint::of("9.99 EUR"), pay)?, Outcome::Ran(body) if body == b"paid"));
    /// assert!(matches!(store.once(&key, Fingerprint::of("9.99 EUR"), pay)?, Outcome::Replayed(_)));
    /// # Ok(())
    /// # }
    /// ```
    pub fn once<E>(
        &self,
        key: &Key,
        fingerprint: Fingerprint,
        work: impl FnOnce(&Attempt) -> Result<Vec<u8>, Failed<E>>,
    ) -> Result<Outcome, OnceError<E>> {
        self.once_with(key, fingerprint, &ReserveOptions::default(), work)
    }

    /// As [`once`](Self::once), with options of this call's own: [`ReserveOptions::wait`] waits for who does the work
    /// now, and replays what comes of it.
    ///
    /// # Errors
    ///
    /// As [`once`](Self::once).
    pub fn once_with<E>(
        &self,
        key: &Key,
        fingerprint: Fingerprint,
        with: &ReserveOptions,
        work: impl FnOnce(&Attempt) -> Result<Vec<u8>, Failed<E>>,
    ) -> Result<Outcome, OnceError<E>> {
        now(run(self.asked(key, fingerprint, with), |attempt| ready(work(&attempt)), Caller::Thread))
    }

    /// As [`once`](Self::once), for a task. Dropped while the work is under way, it leaves the key interrupted
    /// (or gives it back, where `on_drop` says so); before
    /// that, it leaves nothing behind. It is `Send` if the work is.
    ///
    /// # Errors
    ///
    /// As [`once`](Self::once).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// use keyonce::{Attempt, Failed, Fingerprint, Key, Options, Store};
    ///
    /// async fn charge(attempt: Attempt) -> Result<Vec<u8>, Failed<std::io::Error>> {
    ///     // Send `attempt.downstream_key("charge")` along with the request to whoever takes the money.
    ///     Ok(b"paid".to_vec())
    /// }
    ///
    /// let store = Store::open(dir.path().join("keys"), Options::default())?;
    /// let key = Key::new("charges", "order-17")?;
    /// let charged = store.once_async(&key, Fingerprint::of("9.99 EUR"), charge);
    /// # let _ = charged;
    /// # Ok(())
    /// # }
    /// ```
    pub fn once_async<E, F, Fut>(
        &self,
        key: &Key,
        fingerprint: Fingerprint,
        work: F,
    ) -> impl Future<Output = Result<Outcome, OnceError<E>>> + use<E, F, Fut>
    where
        F: FnOnce(Attempt) -> Fut,
        Fut: Future<Output = Result<Vec<u8>, Failed<E>>>,
    {
        self.once_with_async(key, fingerprint, &ReserveOptions::default(), work)
    }

    /// As [`once_with`](Self::once_with), for a task: see [`once_async`](Self::once_async).
    ///
    /// # Errors
    ///
    /// As [`once`](Self::once).
    pub fn once_with_async<E, F, Fut>(
        &self,
        key: &Key,
        fingerprint: Fingerprint,
        with: &ReserveOptions,
        work: F,
    ) -> impl Future<Output = Result<Outcome, OnceError<E>>> + use<E, F, Fut>
    where
        F: FnOnce(Attempt) -> Fut,
        Fut: Future<Output = Result<Vec<u8>, Failed<E>>>,
    {
        run(self.asked(key, fingerprint, with), work, Caller::Task)
    }
}

async fn run<E, Fut>(
    asked: Result<(Asked, u64), Error>,
    work: impl FnOnce(Attempt) -> Fut,
    caller: Caller,
) -> Result<Outcome, OnceError<E>>
where
    Fut: Future<Output = Result<Vec<u8>, Failed<E>>>,
{
    let (asked, wait_ms) = asked.map_err(OnceError::Store)?;
    let reserved = Reserve::ask(&asked.question(), wait_ms, caller).await;
    let reservation = match reserved.map_err(OnceError::Store)? {
        Reserve::Fresh(reservation) => reservation,
        Reserve::Replay(response) => return Ok(Outcome::Replayed(response)),
        Reserve::InFlight(in_flight) => return Err(OnceError::InFlight(in_flight)),
        Reserve::Interrupted(interrupted) => return Err(OnceError::Interrupted(interrupted)),
        Reserve::Mismatch(mismatch) => return Err(OnceError::Mismatch(mismatch)),
        Reserve::TooOld(too_old) => return Err(OnceError::TooOld(too_old)),
    };
    match work(reservation.attempt_view()).await {
        Ok(response) => store(reservation, response, caller).await,
        Err(Failed::NothingHappened(error)) => match reservation.give_back(caller).await {
            Ok(_) => Err(OnceError::Work(error)),
            Err(store) => Err(OnceError::Store(store)),
        },
        Err(Failed::Unknown(error)) => {
            reservation.interrupt();
            Err(OnceError::Work(error))
        }
    }
}

async fn store<E>(reservation: Reservation, response: Vec<u8>, caller: Caller) -> Result<Outcome, OnceError<E>> {
    let mut stored = reservation.finish(&response, true, caller).await;
    if let Err(NotStored { error, reservation }) = stored {
        stored = match error.kind() {
            ErrorKind::TooLarge => reservation.finish(&[], false, caller).await,
            _ => Err(NotStored { error, reservation }),
        };
    }
    match stored {
        Ok(Completion::Done) => Ok(Outcome::Ran(response)),
        Ok(Completion::Superseded) => Err(OnceError::Superseded { response }),
        Err(not_stored) => Err(OnceError::NotStored { response, not_stored }),
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
///
/// `?` takes an `E` itself, and says `Unknown`. Work that meets several kinds of errors stands in a function of its own,
/// whose error is one type:
///
/// ```
/// # use keyonce::{Attempt, Failed};
/// # #[derive(Debug)]
/// # enum PayError { NeverSent, Lost }
/// # fn send(_: &Attempt) -> Result<Vec<u8>, PayError> { Err(PayError::NeverSent) }
/// fn pay(attempt: &Attempt) -> Result<Vec<u8>, Failed<PayError>> {
///     send(attempt).map_err(|error| match error {
///         PayError::NeverSent => Failed::NothingHappened(error),
///         PayError::Lost => Failed::Unknown(error),
///     })
/// }
/// # let _ = pay;
/// ```
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

/// Why [`Store::once`] has no outcome. Exhaustive, as [`Reserve`] is.
#[derive(Debug)]
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
            Self::Work(_) => f.write_str("the work failed"),
            Self::InFlight(_) => f.write_str("another caller is doing the work now"),
            Self::Interrupted(_) => f.write_str("the work was begun before, and whether it took effect is unknown"),
            Self::Mismatch(_) => f.write_str("the key stands for another request"),
            Self::TooOld(_) => f.write_str("the key is so old that it may already have been forgotten"),
            Self::NotStored { .. } => f.write_str("the work was done, but its response was not stored"),
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
