//! What the model says that the store must answer, and the store's answers in the same words.

use std::time::{Duration, SystemTime};

use crate::error::{Error, ErrorKind};
use crate::format::Cause;
use crate::key::{Fingerprint, Token};
use crate::reservation::{Body, Completion, KeyInfo, KeyState, NotReattached, NotStored, Reservation};
use crate::store::Reserve;

/// What the store must answer. The store's own answers turn into it by `From`, so that a test compares the two with
/// `assert_eq!`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expected {
    /// The caller owns the key now: it was told `Fresh`, or it has reattached. Tell the model of it by
    /// [`Model::owner`](super::Model::owner).
    Owns {
        /// Which attempt it is.
        attempt: u32,
        /// What an earlier holder or attempt stored of its progress.
        checkpoint: Vec<u8>,
    },
    /// Done before.
    Replay {
        /// The response, or the reference that was left in its place.
        bytes: Vec<u8>,
        /// It is the response.
        body_kept: bool,
        /// When the key was completed.
        completed_at: SystemTime,
        /// When the key will be forgotten.
        expires_at: SystemTime,
        /// Which attempt completed it.
        attempt: u32,
    },
    /// Another caller is at work.
    InFlight {
        /// What is known of the key.
        known: Known,
        /// How long the lease has still to run.
        retry_after: Duration,
    },
    /// Somebody began and never finished.
    Interrupted(Known),
    /// The key stands for another request.
    Mismatch {
        /// When the key was first reserved.
        first_seen: SystemTime,
        /// What has become of the request it stands for.
        state: KeyState,
    },
    /// The key may already have been forgotten.
    TooOld {
        /// How long it would have been remembered.
        retention: Duration,
    },
    /// The act took effect.
    Done,
    /// The act changed nothing, since its owner, its handle or its token is no longer the latest; or there was nothing
    /// to forget.
    Superseded,
    /// The reservation has a living guard, so nobody else takes it up.
    Held,
    /// The call fails.
    Refused(ErrorKind),
}

/// What is known of a key, as [`KeyInfo`] has it, to be compared.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Known {
    /// The state.
    pub state: KeyState,
    /// The request that the key stands for.
    pub fingerprint: Fingerprint,
    /// The token of the latest reservation.
    pub token: Token,
    /// Which attempt that was.
    pub attempt: u32,
    /// When the key was first reserved.
    pub first_seen: SystemTime,
    /// When the state began.
    pub since: SystemTime,
    /// Until when the latest owner counts as running; `None` unless in flight.
    pub lease_end: Option<SystemTime>,
    /// Until when the key is remembered at least.
    pub kept_until: SystemTime,
    /// The work goes on elsewhere.
    pub detached: bool,
    /// Why nobody is known to work on it; `None` unless interrupted.
    pub cause: Option<Cause>,
    /// The last checkpoint; empty when done.
    pub checkpoint: Vec<u8>,
}

impl From<&KeyInfo> for Known {
    fn from(info: &KeyInfo) -> Self {
        Self {
            state: info.state,
            fingerprint: info.fingerprint,
            token: info.token,
            attempt: info.attempt,
            first_seen: info.first_seen,
            since: info.since,
            lease_end: info.lease_end,
            kept_until: info.kept_until,
            detached: info.detached,
            cause: info.cause,
            checkpoint: info.checkpoint.to_vec(),
        }
    }
}

impl From<&Reserve> for Expected {
    fn from(answer: &Reserve) -> Self {
        match answer {
            Reserve::Fresh(reservation) => Self::from(reservation),
            Reserve::Replay(response) => {
                let (bytes, body_kept) = match response.body() {
                    Body::Kept(bytes) => (bytes, true),
                    Body::NotKept { reference } => (reference, false),
                };
                Self::Replay {
                    bytes: bytes.to_vec(),
                    body_kept,
                    completed_at: response.completed_at(),
                    expires_at: response.expires_at(),
                    attempt: response.attempt(),
                }
            }
            Reserve::InFlight(running) => {
                Self::InFlight { known: Known::from(running.info()), retry_after: running.retry_after() }
            }
            Reserve::Interrupted(unknown) => Self::Interrupted(Known::from(unknown.info())),
            Reserve::Mismatch(mismatch) => Self::Mismatch { first_seen: mismatch.first_seen, state: mismatch.state },
            Reserve::TooOld(too_old) => Self::TooOld { retention: too_old.retention },
        }
    }
}

impl From<&Reservation> for Expected {
    fn from(reservation: &Reservation) -> Self {
        Self::Owns { attempt: reservation.attempt(), checkpoint: reservation.checkpoint().to_vec() }
    }
}

impl From<&Completion> for Expected {
    fn from(completion: &Completion) -> Self {
        match completion {
            Completion::Done => Self::Done,
            Completion::Superseded => Self::Superseded,
        }
    }
}

impl From<&Error> for Expected {
    fn from(error: &Error) -> Self {
        Self::Refused(error.kind())
    }
}

impl From<&Result<Reserve, Error>> for Expected {
    fn from(answer: &Result<Reserve, Error>) -> Self {
        answer.as_ref().map_or_else(Self::from, Self::from)
    }
}

impl From<&Result<Completion, Error>> for Expected {
    fn from(answer: &Result<Completion, Error>) -> Self {
        answer.as_ref().map_or_else(Self::from, Self::from)
    }
}

impl From<&Result<Completion, NotStored>> for Expected {
    fn from(answer: &Result<Completion, NotStored>) -> Self {
        answer.as_ref().map_or_else(|not_stored| Self::from(&not_stored.error), Self::from)
    }
}

/// A detachment.
impl From<&Result<Token, NotStored>> for Expected {
    fn from(answer: &Result<Token, NotStored>) -> Self {
        match answer {
            Ok(_) => Self::Done,
            // A guard that is no longer the latest has no other way to say so.
            Err(not_stored) if not_stored.error.kind() == ErrorKind::Superseded => Self::Superseded,
            Err(not_stored) => Self::from(&not_stored.error),
        }
    }
}

impl From<&Result<Reservation, NotReattached>> for Expected {
    fn from(answer: &Result<Reservation, NotReattached>) -> Self {
        match answer {
            Ok(reservation) => Self::from(reservation),
            Err(NotReattached::InFlight) => Self::Held,
            Err(NotReattached::Superseded) => Self::Superseded,
            Err(NotReattached::Store(error)) => Self::from(error),
        }
    }
}

/// A forgetting: whether there was something to forget.
impl From<&Result<bool, Error>> for Expected {
    fn from(answer: &Result<bool, Error>) -> Self {
        match answer {
            Ok(true) => Self::Done,
            Ok(false) => Self::Superseded,
            Err(error) => Self::from(error),
        }
    }
}
