//! What a step notes of retries, and whom that is told to.
//!
//! Counting happens under the shard lock, a few instructions for each duplicate and each new key. What may be worth
//! telling is carried out of the lock and looked at there.

use std::time::Duration;

use super::{Engine, Look, Shard};
use crate::event::Event;
use crate::key::Key;
use crate::state::{Call, State, Terms};

/// What a step has noted that may be worth telling.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Retries {
    /// The age of a duplicate.
    age_ms: Option<u64>,
    /// A request came under another key than before.
    fresh_key: bool,
}

impl Shard {
    /// Counts a duplicate of this age, which is being answered.
    pub(super) fn note_duplicate(&mut self, age_ms: Option<u64>, retries: &mut Retries) {
        if let Some(age_ms) = age_ms {
            self.counts.retry_ages.note(age_ms);
            retries.age_ms = Some(age_ms);
        }
    }
}

impl Look<'_> {
    /// How old the key is, if the call is a duplicate: a reserve of the request that the key stands for.
    pub(super) fn age_of_duplicate(&self, call: &Call, now_ms: u64) -> Option<u64> {
        let Call::Reserve(Terms { fingerprint, .. }) = call else { return None };
        let (stands_for, first_seen_ms) = match &self.state {
            State::Absent => return None,
            State::InFlight(owned) | State::Interrupted(owned, _) => (owned.fingerprint, owned.first_seen_ms),
            State::Done(finished) => (finished.fingerprint, finished.first_seen_ms),
        };
        (stands_for == *fingerprint).then(|| now_ms.saturating_sub(first_seen_ms))
    }
}

impl Engine {
    /// Counts a request under a key that nobody had used, or that was free again, if it came under another one before.
    pub(super) fn note_new_key(
        &self,
        shard: &mut Shard,
        key: &Key,
        hash: u64,
        call: &Call,
        now_ms: u64,
        retries: &mut Retries,
    ) {
        if let Call::Reserve(Terms { fingerprint, .. }) = call
            && self.fresh_keys.note(key.scope(), fingerprint, hash, now_ms)
        {
            shard.counts.fresh_key_per_retry += 1;
            retries.fresh_key = true;
        }
    }

    /// Tells what is worth it. To be called with nothing locked.
    pub(super) fn tell_of_retries(&self, retries: Retries) {
        let Retries { age_ms, fresh_key } = retries;
        if (age_ms.is_none() && !fresh_key) || !self.listener.listens() {
            return;
        }
        let (now_ms, retention_ms) = (self.now_ms(), self.options.retention_ms);
        if age_ms.is_some_and(|age_ms| self.listener.is_retry_window_in_doubt(age_ms, retention_ms, now_ms)) {
            let ages = self.stats().retry_ages;
            if let Some(event) = Event::retry_window_short(&ages, Duration::from_millis(retention_ms)) {
                self.listener.tell(&event, now_ms);
            }
        }
        if fresh_key {
            let count = self.stats().fresh_key_per_retry;
            self.listener.tell(&Event::FreshKeyPerRetry { count }, now_ms);
        }
    }
}
