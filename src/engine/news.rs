//! What has happened to the store that whoever listens should know: found and told outside of every lock and turn, by
//! whoever comes by when a call was refused, a moment was due, or house was kept.

use super::Engine;
use crate::error::{Error, ErrorKind};
use crate::event::{Event, SYNC_SLOW};
use crate::sync::{Ordering, UnmodelledAtomicU64, UnmodelledMutex};

/// What there is to be told. Counters order nothing: who tells takes what it finds.
#[derive(Debug, Default)]
pub(super) struct News {
    /// The longest sync since the last one that was told, in milliseconds.
    slow_sync_ms: UnmodelledAtomicU64,
    /// How many keys were told to have expired unresolved.
    expired_told: UnmodelledAtomicU64,
    /// 1 once the failure of the store was told.
    failure_told: UnmodelledAtomicU64,
    /// The newest segment that damage keeps from being given up.
    damaged_number: UnmodelledAtomicU64,
    /// What is damaged there, until it was told.
    damage: UnmodelledMutex<Option<Error>>,
}

impl News {
    /// The segment, the oldest, could not be given up. Only damage stays as it is; the rest passes, or is told anyway.
    pub(super) fn note_kept(&self, number: u64, why: &Error) {
        let damaged = why.kind() == ErrorKind::Corrupt;
        if damaged && self.damaged_number.fetch_max(number, Ordering::Relaxed) < number {
            *self.damage.lock() = Some(why.clone());
        }
    }
}

impl Engine {
    /// A sync of the log, with a look at the clock.
    pub(super) fn sync_log(&self) -> Result<u64, Error> {
        let began_ms = self.options.clock.boot_ms();
        let synced = self.log.sync();
        let took_ms = self.options.clock.boot_ms().saturating_sub(began_ms);
        if u128::from(took_ms) > SYNC_SLOW.as_millis() {
            self.news.slow_sync_ms.fetch_max(took_ms, Ordering::Relaxed);
        }
        synced
    }

    /// Tells what there is to tell of a sync that somebody waited for. To be called with nothing locked.
    pub(super) fn tell_of_sync(&self, synced: &Result<(), Error>) {
        if synced.is_err() || self.news.slow_sync_ms.load(Ordering::Relaxed) > 0 {
            self.tell_news();
        }
    }

    /// Passes a refusal on to who listens, too. To be called with nothing locked.
    pub(super) fn tell_refusal(&self, error: &Error) {
        match error.kind() {
            ErrorKind::Full { retry_after } => self.listener.tell(&Event::Full { retry_after }, self.now_ms()),
            ErrorKind::Poisoned => self.tell_news(),
            _ => {}
        }
    }

    /// Tells what is new. To be called with nothing locked.
    pub(super) fn tell_news(&self) {
        if !self.listener.listens() {
            return;
        }
        let now_ms = self.now_ms();
        if let Some(failure) = self.commit.failure()
            && self.news.failure_told.swap(1, Ordering::Relaxed) == 0
        {
            self.listener.tell(&Event::Poisoned(failure), now_ms);
        }
        let damage = self.news.damage.lock().take();
        if let Some(damage) = damage {
            self.listener.tell(&Event::Damaged(damage), now_ms);
        }
        let slow_sync_ms = self.news.slow_sync_ms.swap(0, Ordering::Relaxed);
        if slow_sync_ms > 0 {
            let took = std::time::Duration::from_millis(slow_sync_ms);
            self.listener.tell(&Event::SlowSync { took }, now_ms);
        }
        let count = self.stats().expired_unresolved;
        if self.news.expired_told.fetch_max(count, Ordering::Relaxed) < count {
            self.listener.tell(&Event::ExpiredUnresolved { count }, now_ms);
        }
        if let Some(jump) = self.log.time().jump_while_open() {
            self.listener.tell(&Event::clock_jumped(&jump), now_ms);
        }
    }
}
