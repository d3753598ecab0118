//! A bare log with group commit: what 64 threads can get from one file when nothing is asked but that their bytes are
//! on the disk. No checksum, no index, no answer.
//!
//! An append copies its bytes into a buffer under a mutex, or writes them there at once. Whoever finds nobody leading
//! writes what is in the buffer with one positioned write, and syncs; those who come meanwhile wait and share the next
//! sync. The file's blocks are all written, and used over and over.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;

use parking_lot::{Condvar, Mutex};
use tempfile::TempDir;

use crate::sync::written_file;

const FILE_BYTES: u64 = 64 << 20;

/// What kind of log it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Who waits is woken with all others through one condition variable, and looks whether its bytes are on the disk.
    AllWoken,
    /// Those are woken whose bytes are on the disk, one by one; before them the one that leads next.
    EachWoken,
    /// The same, but each append writes its own bytes under the mutex: they outlive the process before they are synced,
    /// as those of the store do.
    EachWritten,
}

/// The log.
#[derive(Debug)]
pub(crate) struct BareLog {
    file: File,
    kind: Kind,
    state: Mutex<State>,
    synced: Condvar,
}

#[derive(Debug, Default)]
struct State {
    buffer: Vec<u8>,
    /// Where the next write begins in the file.
    offset: u64,
    /// How many bytes were ever appended, and how many of them are on the disk.
    appended: u64,
    synced: u64,
    syncs: u64,
    leading: bool,
    waiting: VecDeque<Waiter>,
}

#[derive(Debug)]
struct Waiter {
    end: u64,
    thread: Thread,
    woken: Arc<AtomicBool>,
}

impl BareLog {
    /// An empty log in the file system of the directory.
    pub(crate) fn new(directory: &TempDir, kind: Kind) -> Self {
        let file = written_file(directory, FILE_BYTES);
        Self { file, kind, state: Mutex::new(State::default()), synced: Condvar::new() }
    }

    /// How many syncs there were.
    pub(crate) fn syncs(&self) -> u64 {
        self.state.lock().syncs
    }

    /// Returns when the bytes are on the disk.
    pub(crate) fn append(&self, bytes: &[u8]) {
        let mut state = self.state.lock();
        if self.kind == Kind::EachWritten {
            let offset = state.place(bytes.len());
            self.file.write_all_at(bytes, offset).expect("written blocks");
        } else {
            state.buffer.extend_from_slice(bytes);
        }
        state.appended += bytes.len() as u64;
        let end = state.appended;
        while state.synced < end {
            if !state.leading {
                state.leading = true;
                drop(state);
                self.lead();
                state = self.state.lock();
            } else if self.kind == Kind::AllWoken {
                self.synced.wait(&mut state);
            } else {
                let woken = Arc::new(AtomicBool::new(false));
                let waiter = Waiter { end, thread: std::thread::current(), woken: Arc::clone(&woken) };
                state.waiting.push_back(waiter);
                drop(state);
                while !woken.load(Ordering::Acquire) {
                    std::thread::park();
                }
                state = self.state.lock();
            }
        }
    }

    fn lead(&self) {
        let (offset, buffer, end) = {
            let mut state = self.state.lock();
            let buffer = std::mem::take(&mut state.buffer);
            (state.place(buffer.len()), buffer, state.appended)
        };
        if !buffer.is_empty() {
            self.file.write_all_at(&buffer, offset).expect("written blocks");
        }
        self.file.sync_data().expect("a disk that syncs");
        let mut state = self.state.lock();
        state.leading = false;
        state.synced = end;
        state.syncs += 1;
        let successor = state.waiting.iter().position(|waiter| waiter.end > end);
        let successor = successor.and_then(|at| state.waiting.remove(at));
        let (woken, waiting): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut state.waiting).into_iter().partition(|waiter| waiter.end <= end);
        state.waiting = waiting;
        drop(state);
        self.synced.notify_all();
        for waiter in successor.into_iter().chain(woken) {
            waiter.woken.store(true, Ordering::Release);
            waiter.thread.unpark();
        }
    }
}

impl State {
    /// Where in the file the next so many bytes are written.
    fn place(&mut self, bytes: usize) -> u64 {
        let bytes = bytes as u64;
        let offset = if self.offset + bytes > FILE_BYTES { 0 } else { self.offset };
        self.offset = offset + bytes;
        offset
    }
}
