//! The store's threads: two that do what nobody should have to wait for, each time somebody calls them, and one that
//! sleeps until something is due.

use std::cell::Cell;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam::channel::{Sender, bounded};

use crate::error::Error;
use crate::sync::{AtomicU64, Condvar, Mutex, Ordering};
use crate::wait::Bell;

/// A thread that may be running. Without one, callers do the work themselves.
#[derive(Debug, Default)]
pub(crate) struct Helper {
    running: Mutex<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    /// Holds one call: a second one before the first is answered says nothing new.
    calls: Sender<()>,
    thread: JoinHandle<()>,
}

impl Helper {
    /// Starts the thread, which does `work` once for each call.
    ///
    /// # Errors
    ///
    /// `Io`, when the system has no thread to give.
    pub(crate) fn start(&self, name: &str, work: impl Fn() + Send + 'static) -> Result<(), Error> {
        let (calls, called) = bounded(1);
        let thread = spawn_own(name, move || {
            while called.recv().is_ok() {
                work();
            }
        })?;
        *self.running.lock() = Some(Running { calls, thread });
        Ok(())
    }

    /// Asks for the work to be done soon; `false` when there is no thread to do it.
    pub(crate) fn call(&self) -> bool {
        match &*self.running.lock() {
            // A full channel holds a call that was not answered yet, which serves this one, too.
            Some(running) => !matches!(running.calls.try_send(()), Err(error) if error.is_disconnected()),
            None => false,
        }
    }

    /// Ends the thread, after the work it is at.
    pub(crate) fn stop(&self) {
        let running = self.running.lock().take();
        if let Some(Running { calls, thread }) = running {
            drop(calls);
            join(thread);
        }
    }
}

/// Starts a thread of this name.
///
/// # Errors
///
/// `Io`, when the system has no thread to give.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Error> {
    thread::Builder::new()
        .name(name.to_owned())
        .spawn(work)
        .map_err(|error| Error::io(format!("starting the thread {name}"), error))
}

thread_local! {
    /// This thread is one of a store's own.
    static OWN: Cell<bool> = const { Cell::new(false) };
}

fn spawn_own(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Error> {
    spawn(name, move || {
        OWN.set(true);
        work();
    })
}

/// Whether this thread is one that a store waits for when it is closed.
pub(crate) fn is_own_thread() -> bool {
    OWN.get()
}

/// Waits for the end of a thread, unless it is the one that asks: a listener may close the store from any thread.
fn join(thread: JoinHandle<()>) {
    if thread.thread().id() != thread::current().id() {
        // A panic of the thread was reported where it happened; what it left undone, the next opening does.
        drop(thread.join());
    }
}

/// The moment at which something is due next, and the thread that sleeps until then. With a clock that is moved by
/// hand there is no thread: whoever moves it does what is due.
#[derive(Debug)]
pub(crate) struct Timer {
    /// Store time; a copy of what is under the lock. Relaxed: what is due later than this is entered under a shard lock
    /// before this is read, and the thread sets this before it goes through the shard locks to find what is next. So
    /// either that thread sees what was entered, or whoever entered it sees this.
    due_ms: AtomicU64,
    state: Mutex<Due>,
    changed: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Due {
    ms: u64,
    stopped: bool,
}

impl Default for Timer {
    fn default() -> Self {
        Self {
            due_ms: AtomicU64::new(u64::MAX),
            state: Mutex::new(Due { ms: u64::MAX, stopped: false }),
            changed: Condvar::new(),
            thread: Mutex::new(None),
        }
    }
}

impl Timer {
    /// Starts the thread, which is to do what is due, [`sleep`](Self::sleep), and begin again until that says `false`.
    ///
    /// # Errors
    ///
    /// `Io`, when the system has no thread to give.
    pub(crate) fn start(&self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        *self.thread.lock() = Some(spawn_own(name, work)?);
        Ok(())
    }

    /// Has the store look at `ms` at the latest.
    pub(crate) fn set(&self, ms: u64) {
        if ms >= self.due_ms.load(Ordering::Relaxed) {
            return;
        }
        let mut state = self.state.lock();
        if ms < state.ms {
            state.ms = ms;
            self.due_ms.store(ms, Ordering::Relaxed);
            drop(state);
            self.changed.notify_one();
        }
    }

    /// Takes what is due at `now_ms`: from here on nothing is, until somebody sets it. `false` when nothing is yet.
    pub(crate) fn take(&self, now_ms: u64) -> bool {
        let mut state = self.state.lock();
        let due = state.ms <= now_ms;
        if due {
            state.ms = u64::MAX;
            self.due_ms.store(u64::MAX, Ordering::Relaxed);
        }
        due
    }

    /// Sleeps until what is due next, or until that changes; `for_ms` says how long the time until a moment is.
    /// `false` once the timer was stopped.
    pub(crate) fn sleep(&self, for_ms: impl FnOnce(u64) -> Option<Duration>) -> bool {
        let state = self.state.lock();
        if state.stopped {
            return false;
        }
        let at_most = if state.ms == u64::MAX { None } else { for_ms(state.ms) };
        let state = self.changed.wait_for(state, at_most);
        !state.stopped
    }

    /// Ends the thread.
    pub(crate) fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_one();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            join(thread);
        }
    }
}

/// Those who wait for something that a helper makes, and what they are told of it.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    waiting: Mutex<Vec<Arc<Order>>>,
}

/// One who waits at the counter.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) bell: Bell,
    outcome: Mutex<Result<(), Error>>,
}

impl Counter {
    /// Takes an order. Whoever serves next answers it.
    pub(crate) fn order(&self) -> Arc<Order> {
        let order = Arc::new(Order { bell: Bell::new(), outcome: Mutex::new(Ok(())) });
        self.waiting.lock().push(Arc::clone(&order));
        order
    }

    pub(crate) fn is_waited_at(&self) -> bool {
        !self.waiting.lock().is_empty()
    }

    /// Answers all orders.
    pub(crate) fn serve(&self, outcome: &Result<(), Error>) {
        let waiting = std::mem::take(&mut *self.waiting.lock());
        for order in waiting {
            *order.outcome.lock() = outcome.clone();
            order.bell.ring();
        }
    }
}

impl Order {
    /// What came of it, once the bell was rung.
    pub(crate) fn outcome(&self) -> Result<(), Error> {
        self.outcome.lock().clone()
    }
}
