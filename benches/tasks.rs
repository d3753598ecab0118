//! An executor that is as small as can be: one thread polls its own list of tasks, and sleeps while none is woken.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use parking_lot::Mutex;

/// Something to be polled until it is ready.
pub(crate) type Task<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The tasks of one thread that were woken.
struct Ready {
    tasks: Mutex<VecDeque<usize>>,
    thread: Thread,
}

struct WakesTask {
    ready: Arc<Ready>,
    task: usize,
    /// It stands in the list already.
    listed: AtomicBool,
}

impl Wake for WakesTask {
    fn wake(self: Arc<Self>) {
        if !self.listed.swap(true, Ordering::AcqRel) {
            self.ready.tasks.lock().push_back(self.task);
            self.ready.thread.unpark();
        }
    }
}

/// Runs all tasks on this thread; says what they came to, in the order in which they ended.
pub(crate) fn run_all<T>(tasks: Vec<Task<'_, T>>) -> Vec<T> {
    let ready = Arc::new(Ready { tasks: Mutex::new((0..tasks.len()).collect()), thread: std::thread::current() });
    let mut tasks: Vec<_> = tasks
        .into_iter()
        .enumerate()
        .map(|(task, future)| {
            let wakes = Arc::new(WakesTask { ready: Arc::clone(&ready), task, listed: AtomicBool::new(true) });
            (Waker::from(Arc::clone(&wakes)), wakes, Some(future))
        })
        .collect();
    let mut ended = Vec::new();
    while ended.len() < tasks.len() {
        let woken = std::mem::take(&mut *ready.tasks.lock());
        if woken.is_empty() {
            std::thread::park();
        }
        for task in woken {
            let (waker, wakes, future) = tasks.get_mut(task).expect("a task of this list");
            wakes.listed.store(false, Ordering::Release);
            let polled = future.as_mut().map(|future| future.as_mut().poll(&mut Context::from_waker(waker)));
            if let Some(Poll::Ready(output)) = polled {
                *future = None;
                ended.push(output);
            }
        }
    }
    ended
}
