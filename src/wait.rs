//! How a caller sleeps: as a thread that listens for a bell, or as a task that left its waker at it.
//!
//! Who rings does not know which it is, and every list of sleepers holds bells. Nobody polls: a sleeper wakes when its
//! bell is rung or, for a thread, when its time is over. A task's time is kept by the store's timer, which rings.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::sync::{Condvar, Mutex, ThreadId, current};

/// Who makes a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Caller {
    /// A thread that may sleep, and that leads a sync itself.
    Thread,
    /// A task of some executor: it leaves its waker and lets others do what takes time.
    Task,
}

/// What a call by [`Caller::Thread`] comes to. The one body of a call serves threads and tasks: for a thread every wait
/// in it sleeps, so it is never pending.
pub(crate) fn now<T>(call: impl Future<Output = T>) -> T {
    match pin!(call).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer,
        Poll::Pending => panic!("a thread sleeps, it never leaves a waker"),
    }
}

/// One sleeper's wake-up call.
#[derive(Debug)]
pub(crate) struct Bell {
    ringing: Mutex<Ringing>,
    heard: Condvar,
}

#[derive(Debug, Default)]
struct Ringing {
    rung: bool,
    waker: Option<Waker>,
}

impl Bell {
    pub(crate) fn new() -> Self {
        Self { ringing: Mutex::new(Ringing::default()), heard: Condvar::new() }
    }

    /// Wakes the sleeper, now or as soon as it listens.
    pub(crate) fn ring(&self) {
        let waker = {
            let mut ringing = self.ringing.lock();
            ringing.rung = true;
            ringing.waker.take()
        };
        self.heard.notify_one();
        if let Some(waker) = waker
            && catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err()
        {
            // The panic hook has told it. One task's executor is no reason to wake no other.
        }
    }

    /// Sleeps until the bell is rung, at most this long; `None` sets no bound. It may wake for nothing.
    pub(crate) fn listen(&self, at_most: Option<Duration>) {
        let ringing = self.ringing.lock();
        if !ringing.rung {
            drop(self.heard.wait_for(ringing, at_most));
        }
    }

    fn poll(&self, context: &Context<'_>) -> Poll<()> {
        let waker = context.waker().clone();
        let (polled, other) = {
            let mut ringing = self.ringing.lock();
            if ringing.rung { (Poll::Ready(()), Some(waker)) } else { (Poll::Pending, ringing.waker.replace(waker)) }
        };
        // Dropping a waker may do anything: not under the lock.
        drop(other);
        polled
    }

    /// Waits until the bell is rung, whoever the caller is. A thread wakes after `at_most`, too.
    pub(crate) async fn rung(&self, caller: Caller, at_most: Option<Duration>) {
        match caller {
            Caller::Thread => self.listen(at_most),
            Caller::Task => poll_fn(|context| self.poll(context)).await,
        }
    }
}

/// Something that one thread does at a time. A thread that comes back to it while it is at it, called by a waker that
/// it woke or a listener that it told, is told so instead of waiting for itself.
#[derive(Debug)]
pub(crate) struct Turn {
    taken_by: Mutex<Option<ThreadId>>,
    freed: Condvar,
}

/// A turn that was taken; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Taken<'a> {
    turn: &'a Turn,
}

impl Turn {
    pub(crate) fn new() -> Self {
        Self { taken_by: Mutex::new(None), freed: Condvar::new() }
    }

    /// Waits for the turn; `None` when this thread has it already, or when it is not free and `waits` is false.
    pub(crate) fn take(&self, waits: bool) -> Option<Taken<'_>> {
        let mut taken_by = self.taken_by.lock();
        while let Some(other) = *taken_by {
            if !waits || other == current().id() {
                return None;
            }
            taken_by = self.freed.wait(taken_by);
        }
        *taken_by = Some(current().id());
        Some(Taken { turn: self })
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        *self.turn.taken_by.lock() = None;
        self.turn.freed.notify_one();
    }
}
