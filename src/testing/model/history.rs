//! One key of the model: what was written of it, and who holds it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::expected::Known;
use crate::format::Cause;
use crate::key::{Fingerprint, Token};
use crate::options::{Durability, OnDrop};
use crate::reservation::KeyState;

/// A reservation, as it stands in the log.
#[derive(Clone, Debug)]
pub(super) struct Work {
    /// 0 until the model was told.
    pub(super) token: u64,
    pub(super) attempt: u32,
    pub(super) fingerprint: Fingerprint,
    pub(super) first_seen_ms: u64,
    pub(super) began_ms: u64,
    pub(super) lease_end_ms: u64,
    pub(super) retention_ms: u64,
    pub(super) kept_until_ms: u64,
    pub(super) durability: Durability,
    pub(super) detached: bool,
    /// Of a later attempt: why the one before it had stopped.
    pub(super) earlier: Option<Cause>,
    pub(super) checkpoint: Arc<[u8]>,
}

/// What was stored of a response.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub(super) bytes: Arc<[u8]>,
    pub(super) body_kept: bool,
    pub(super) completed_ms: u64,
}

/// What is written of a key.
#[derive(Clone, Debug)]
pub(super) enum Record {
    /// Given back, or forgotten.
    Gone(Durability),
    Running(Work),
    Stopped(Work, Cause, u64),
    Done(Work, Stored),
}

/// What a caller must see of a key at a moment.
#[derive(Clone, Debug)]
pub(super) enum Seen {
    Absent,
    InFlight(Work),
    Interrupted(Work, Cause, u64),
    Done(Work, Stored),
}

/// A living guard.
#[derive(Clone, Debug)]
pub(super) struct Guard {
    /// No two guards of a model have the same.
    pub(super) number: u64,
    /// The lease in memory, as it was last set by hand.
    pub(super) lease_end_ms: u64,
    /// How long a lease the owner asked for.
    pub(super) lease_ms: u64,
    /// Until when the guard renews itself, so that a whole lease is left at every moment.
    pub(super) renews_until_ms: u64,
    pub(super) on_drop: OnDrop,
    /// It was handed over to one who waits and has not yet taken it: no work can have begun.
    pub(super) is_unseen: bool,
}

/// A place in the list of those who wait for a key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) waiter: u64,
    /// When the waiter looks again by itself.
    pub(super) due_ms: u64,
}

/// All that may be found of a key.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    /// Records with their positions in the log, the latest last. Those before the latest matter only to a power loss.
    pub(super) records: Vec<(u64, Record)>,
    pub(super) guard: Option<Guard>,
    /// Who waits, in the order of their coming.
    pub(super) places: Vec<Place>,
    /// A crash has left one of the records, and it is not known yet which.
    pub(super) in_doubt: bool,
    /// The key had expired unfinished before the store was opened.
    pub(super) expired_at_opening: bool,
}

impl Guard {
    /// When the lease ends, as a caller sees it at `now_ms`.
    pub(super) fn lease_end_ms(&self, now_ms: u64) -> u64 {
        let renewed_ms = now_ms.saturating_add(self.lease_ms).min(self.renewing_ends_ms());
        self.lease_end_ms.max(renewed_ms)
    }

    /// When it lapses, if nobody renews it by hand.
    pub(super) fn lapses_ms(&self) -> u64 {
        self.lease_end_ms.max(self.renewing_ends_ms())
    }

    /// What nobody has taken does not renew itself.
    fn renewing_ends_ms(&self) -> u64 {
        if self.is_unseen { 0 } else { self.renews_until_ms }
    }
}

impl Work {
    fn known(&self, state: KeyState, since_ms: u64, checkpoint: &[u8]) -> Known {
        Known {
            state,
            fingerprint: self.fingerprint,
            token: Token::from_u64(self.token),
            attempt: self.attempt,
            first_seen: at(self.first_seen_ms),
            since: at(since_ms),
            lease_end: (state == KeyState::InFlight).then(|| at(self.lease_end_ms)),
            kept_until: at(self.kept_until_ms),
            detached: self.detached,
            cause: None,
            checkpoint: checkpoint.to_vec(),
        }
    }
}

impl Record {
    /// The record as a caller must see it, if this guard lives.
    pub(super) fn seen(&self, now_ms: u64, guard: Option<&Guard>) -> Seen {
        match self {
            Self::Gone(_) => Seen::Absent,
            Self::Done(work, stored) if now_ms < work.kept_until_ms => Seen::Done(work.clone(), stored.clone()),
            Self::Done(..) => Seen::Absent,
            // Who holds a key keeps it, however long.
            Self::Running(work) | Self::Stopped(work, ..) if guard.is_none() && work.kept_until_ms <= now_ms => {
                Seen::Absent
            }
            Self::Stopped(work, cause, since_ms) => Seen::Interrupted(work.clone(), *cause, *since_ms),
            Self::Running(work) => match guard {
                Some(guard) => leased(Work { lease_end_ms: guard.lease_end_ms(now_ms), ..work.clone() }, now_ms),
                None if work.detached => leased(work.clone(), now_ms),
                // A lease in memory ends with the process.
                None => Seen::Interrupted(work.clone(), Cause::Crash, work.began_ms),
            },
        }
    }

    pub(super) fn work(&self) -> Option<&Work> {
        match self {
            Self::Gone(_) => None,
            Self::Running(work) | Self::Stopped(work, ..) | Self::Done(work, _) => Some(work),
        }
    }

    pub(super) fn durability(&self) -> Durability {
        match self {
            Self::Gone(durability) => *durability,
            Self::Running(work) | Self::Stopped(work, ..) | Self::Done(work, _) => work.durability,
        }
    }

    pub(super) fn is_unfinished(&self) -> bool {
        match self {
            Self::Running(_) | Self::Stopped(..) => true,
            Self::Gone(_) | Self::Done(..) => false,
        }
    }
}

fn leased(work: Work, now_ms: u64) -> Seen {
    if now_ms < work.lease_end_ms {
        return Seen::InFlight(work);
    }
    let since_ms = work.lease_end_ms;
    Seen::Interrupted(work, Cause::LeaseLapsed, since_ms)
}

impl Seen {
    pub(super) fn known(&self) -> Option<Known> {
        match self {
            Self::Absent => None,
            Self::InFlight(work) => Some(work.known(KeyState::InFlight, work.began_ms, &work.checkpoint)),
            Self::Interrupted(work, cause, since_ms) => {
                let known = work.known(KeyState::Interrupted, *since_ms, &work.checkpoint);
                Some(Known { cause: Some(*cause), ..known })
            }
            Self::Done(work, stored) => Some(work.known(KeyState::Done, stored.completed_ms, &[])),
        }
    }
}

impl History {
    pub(super) fn latest(&self) -> Option<&Record> {
        self.records.last().map(|(_, record)| record)
    }

    pub(super) fn latest_mut(&mut self) -> Option<&mut Record> {
        self.records.last_mut().map(|(_, record)| record)
    }

    /// The token of the latest reservation; 0 when it is not known.
    pub(super) fn token(&self) -> Option<u64> {
        self.latest().and_then(Record::work).map(|work| work.token)
    }

    pub(super) fn seen(&self, now_ms: u64) -> Seen {
        self.latest().map_or(Seen::Absent, |latest| latest.seen(now_ms, self.guard.as_ref()))
    }

    /// Lets go of what no power loss can bring back any more.
    pub(super) fn forget_before(&mut self, durable: u64) {
        let last_durable = self.records.iter().rposition(|(position, _)| *position <= durable);
        self.records.drain(..last_durable.unwrap_or(0));
    }

    /// The process is gone; of the records, those that are left here are what may be found.
    pub(super) fn crash(&mut self) {
        self.guard = None;
        self.places.clear();
        self.in_doubt = self.records.len() > 1;
    }
}

/// Store time as a time of the system.
pub(super) fn at(ms: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_millis(ms)
}
