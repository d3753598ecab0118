//! How a caller waits for a key that somebody else owns.
//!
//! A waiter hangs a [`Bell`] at the reservation under the shard lock, so nothing that happens afterwards is missed.
//! Whoever changes the key takes the bells off and rings them once the lock is free; a waiter looks again, and hangs up
//! a new one if there is still something to wait for. Nobody polls: a waiter sleeps until it is rung for, its time is
//! over, or the lease of the owner would have lapsed.

use std::time::Duration;

use crate::sync::{Condvar, Mutex};

/// One waiter's wake-up call.
#[derive(Debug)]
pub(crate) struct Bell {
    rung: Mutex<bool>,
    heard: Condvar,
}

impl Bell {
    pub(crate) fn new() -> Self {
        Self { rung: Mutex::new(false), heard: Condvar::new() }
    }

    /// Wakes the waiter, now or as soon as it listens.
    pub(crate) fn ring(&self) {
        *self.rung.lock() = true;
        self.heard.notify_one();
    }

    /// Sleeps until the bell is rung, at most this long; `None` sets no bound.
    pub(crate) fn listen(&self, at_most: Option<Duration>) {
        let rung = self.rung.lock();
        if !*rung {
            drop(self.heard.wait_for(rung, at_most));
        }
    }
}
