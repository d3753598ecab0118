//! Callers who wait for a key: futures that are polled by hand after each call of another client, so that one seed is
//! one course of events.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use keyonce::{Completion, Error, ErrorKind, Reserve};

use super::acts::given_back;
use super::{Asked, Clients};
use crate::oracle::{Fate, fingerprint, key};
use crate::workload::With;

/// One who waits for a key.
pub(super) struct Waiter {
    pub(super) key: usize,
    asked: Asked,
    take_over: bool,
    answer: Pin<Box<dyn Future<Output = Result<Reserve, Error>> + Send>>,
}

impl Waiter {
    fn poll(&mut self) -> Poll<Result<Reserve, Error>> {
        self.answer.as_mut().poll(&mut Context::from_waker(Waker::noop()))
    }
}

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiter").field("key", &self.key).field("asked", &self.asked).finish_non_exhaustive()
    }
}

impl Clients {
    pub(super) fn wait(&mut self, number: usize, with: With, wait_ms: u64) {
        let (asked, options) = self.asking(0, with);
        let options = options.wait(Duration::from_millis(wait_ms));
        let answer = self.store().reserve_with_async(&key(number), fingerprint(number, 0), &options);
        self.waiters.push(Waiter { key: number, asked, take_over: with.take_over, answer: Box::pin(answer) });
    }

    /// Tells everybody what they wait for, if it has come.
    pub(super) fn settle_waiters(&mut self) {
        let mut at = 0;
        while at < self.waiters.len() {
            let Poll::Ready(answer) = self.waiters[at].poll() else {
                at += 1;
                continue;
            };
            let Waiter { key, asked, take_over, .. } = self.waiters.remove(at);
            let answer = answer.unwrap();
            self.meet(match &answer {
                Reserve::Fresh(_) => "waiters made owners",
                Reserve::Replay(_) => "waiters told a response",
                _ => "waiters told otherwise",
            });
            let next = self.next_owner(key, asked, take_over);
            self.answered(key, asked, answer, next);
        }
    }

    /// The store is closed: whoever still waits is told that.
    pub(super) fn turn_waiters_away(&mut self) {
        for mut waiter in std::mem::take(&mut self.waiters) {
            match waiter.poll() {
                Poll::Ready(Err(error)) if error.kind() == ErrorKind::Closed => {}
                answer => panic!("{waiter:?} is told {answer:?} by a closed store"),
            }
        }
    }

    pub(super) fn leave(&mut self, key: usize) {
        if let Some(at) = self.waiters.iter().position(|waiter| waiter.key == key) {
            self.waiters.remove(at);
        }
    }

    pub(super) fn release_unseen(&mut self, key: usize) {
        let Some(guard) = self.take_guard(key) else { return };
        let latest = self.latest(key, guard.reservation.token());
        if latest.as_ref().is_some_and(|owner| owner.attempt > 1) {
            self.guards.push(guard);
            return;
        }
        let owned = latest.is_some();
        let since_ms = self.now_ms();
        let completion = guard.reservation.release().unwrap();
        assert_eq!(completion == Completion::Done, owned, "key {key}");
        self.acted(key, completion, latest, |owner| given_back(owner, since_ms));
        let (left, stay) = std::mem::take(&mut self.waiters).into_iter().partition(|waiter| waiter.key == key);
        self.waiters = stay;
        let left: Vec<Waiter> = left;
        for Waiter { asked, answer, .. } in left {
            if owned {
                // One after the other became the owner, and no work can have begun.
                let owner = self.leased(self.first_owner(asked), asked);
                self.oracle.asked(key, Fate::Held(owner));
                self.oracle.confirmed(key, false);
                self.meet("owners who never knew");
            }
            drop(answer);
        }
        if owned {
            self.oracle.asked(key, Fate::Absent);
            self.oracle.confirmed(key, false);
        }
    }
}
