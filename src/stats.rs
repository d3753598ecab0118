//! What a store tells of itself: counters, and what opening it found.

mod fresh_keys;
mod retry_ages;

use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;

pub(crate) use self::fresh_keys::FreshKeys;
pub use self::retry_ages::RetryAges;
use crate::error::Error;

/// What opening the store found and did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenReport {
    /// The store did not exist and was created.
    pub created: bool,
    /// The last run closed the store; `false` after a crash, a kill or a failure.
    pub clean: bool,
    /// Segments of the log that were found alive; the one that this run begins with is not among them.
    pub segments: u64,
    /// Segments that were known from their hints and not read.
    pub hints: u64,
    /// Records that were met, of any age. A hint leaves out those that a later one in their segment had superseded.
    pub records: u64,
    /// Keys that are remembered, finished or not.
    pub keys: u64,
    /// Keys whose owner is gone without having finished.
    pub interrupted: u64,
    /// Interrupted keys whose retention had passed before anybody resolved them, and that were forgotten now.
    pub expired_unresolved: u64,
    /// Records or holes at the end of the log that a crash had torn: never acknowledged, skipped.
    pub torn: u64,
    /// Records that were copied, because only the page cache vouched for them or their segment was nearly empty.
    pub copied: u64,
    /// Header copies that failed their check beside a sound one.
    pub header_copies_bad: u64,
    /// Milliseconds by which the wall clock had jumped beyond what is believed; store time does not follow it.
    pub clock_jump_held_ms: u64,
}

/// How far an opening has come: see [`Options::progress`](crate::Options::progress).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Bytes of the log that are known, in the end all of them. What a crash has left to be written anew follows.
    pub bytes_read: u64,
    /// Bytes of all its files, also of those that hold nothing that counts and are not read.
    pub bytes: u64,
}

/// Who is told, and may say that it is enough.
type Tell = dyn Fn(&Progress) -> ControlFlow<()> + Send + Sync;

/// See [`Tell`].
#[derive(Clone)]
pub(crate) struct OnProgress(pub(crate) Arc<Tell>);

impl fmt::Debug for OnProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnProgress").finish_non_exhaustive()
    }
}

/// Whether a store can do its work, for the health check of a service.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Health {
    /// It reserves, completes and answers.
    Sound,
    /// A write or a sync has failed: it takes no more, and answers only what is durable. Close it and open it again.
    Poisoned(Error),
    /// It was closed.
    Closed,
}

/// Counters and sizes of an open store, as of one moment.
///
/// Counters begin at zero at each opening.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Reserves that were answered `Fresh`, take-overs included.
    pub fresh: u64,
    /// Reserves that were answered `Replay`.
    pub replays: u64,
    /// Reserves that were answered `InFlight`, and reattachments that found a living guard.
    pub in_flight: u64,
    /// Reserves that were answered `Interrupted`.
    pub interrupted: u64,
    /// Reserves that were answered `Mismatch`.
    pub mismatches: u64,
    /// Reserves that were answered `TooOld`.
    pub too_old: u64,
    /// Responses that were stored.
    pub completed: u64,
    /// Reservations that were given back.
    pub released: u64,
    /// Acts of an owner that was no longer the latest, and of operators on keys that were not known.
    pub superseded: u64,
    /// How old keys were when their duplicates came: the retry window as it was measured.
    pub retry_ages: RetryAges,
    /// Requests that came again in the same scope within a minute of the first time, with the same fingerprint but
    /// under another key: a client that makes a new key for each try defeats the purpose of keys. Sampled: one
    /// fingerprint in eight is watched, of a busy store fewer. Nobody is refused for it.
    pub fresh_key_per_retry: u64,
    /// Interrupted keys whose retention passed before anybody resolved them; counted when the key is asked for again,
    /// or its segment is given up.
    pub expired_unresolved: u64,
    /// Reservations whose guard lives now.
    pub guards: u64,
    /// Callers that wait for a key in flight now.
    pub waiting: u64,
    /// Index entries: keys, among them some past their retention that nothing has overwritten yet.
    pub keys: u64,
    /// Bytes of memory of the index.
    pub index_bytes: u64,
    /// Live segments.
    pub segments: u64,
    /// Bytes of the live segments.
    pub log_bytes: u64,
    /// Data syncs of the log since opening.
    pub syncs: u64,
    /// Milliseconds by which the wall clock has jumped, in either direction, since opening; store time does not follow
    /// it.
    pub clock_jump_held_ms: u64,
}

impl Stats {
    /// Adds the counters of one shard.
    pub(crate) fn add(&mut self, other: &Stats) {
        self.fresh += other.fresh;
        self.replays += other.replays;
        self.in_flight += other.in_flight;
        self.interrupted += other.interrupted;
        self.mismatches += other.mismatches;
        self.too_old += other.too_old;
        self.completed += other.completed;
        self.released += other.released;
        self.superseded += other.superseded;
        self.retry_ages.add(&other.retry_ages);
        self.fresh_key_per_retry += other.fresh_key_per_retry;
        self.expired_unresolved += other.expired_unresolved;
    }
}
