//! The store's one helper thread: it does what nobody should have to wait for, each time somebody calls it.

use std::thread::JoinHandle;

use crossbeam::channel::{Sender, bounded};

use crate::error::Error;
use crate::sync::Mutex;

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
    pub(crate) fn start(&self, work: impl Fn() + Send + 'static) -> Result<(), Error> {
        let (calls, called) = bounded(1);
        let thread = std::thread::Builder::new()
            .name("keyonce-helper".to_owned())
            .spawn(move || {
                while called.recv().is_ok() {
                    work();
                }
            })
            .map_err(|error| Error::io("starting the helper thread", error))?;
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
            // A panic of the thread was reported where it happened; what it left undone, the next opening does.
            drop(thread.join());
        }
    }
}
