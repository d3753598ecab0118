//! Whether this process is the one that opened a store, or a child that `fork` has made of it.
//!
//! A child has a copy of the store's memory and of its descriptors, but none of its threads, and locks that somebody
//! held at the fork stay taken in it for ever. Two processes that append to one log would destroy it. So whatever a
//! store is asked in a child is refused before it takes a lock, and what a child drops writes nothing.
//!
//! How it is noticed: one page of memory of which the kernel gives a child zeros instead of a copy (`MADV_WIPEONFORK`,
//! see madvise(2), Linux 4.14). It holds a number that no ancestor ever had in its own. Looking costs a load and no
//! system call. Where the system has no such page, the number of the process is asked for each time.
//!
//! This file must not know what a store is.

use std::fs::File;
use std::process;
use std::sync::{Arc, OnceLock, Weak};

use crate::map::WipedOnFork;
use crate::sync::{Ordering, UnmodelledAtomicU64, UnmodelledMutex};

/// The page; `None` where the system has none to give.
static PAGE: OnceLock<Option<WipedOnFork>> = OnceLock::new();

/// The last number that was written into the page, here or in an ancestor. A child has a copy, so its own are larger.
static NUMBERS: UnmodelledAtomicU64 = UnmodelledAtomicU64::new(0);

/// Files whose descriptor a child is to close.
static KEPT: UnmodelledMutex<Vec<Weak<KeptFile>>> = UnmodelledMutex::new(Vec::new());

/// The process in which it was made, which `fork` leaves and its child is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark(u64);

impl Mark {
    /// The mark of this process.
    pub(crate) fn here() -> Self {
        let Some(page) = PAGE.get_or_init(WipedOnFork::new) else { return Self(process::id().into()) };
        let now = page.word().load(Ordering::Relaxed);
        if now != 0 {
            return Self(now);
        }
        // A new process, or the first mark of this one.
        let next = NUMBERS.fetch_add(1, Ordering::Relaxed) + 1;
        match page.word().compare_exchange(0, next, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Self(next),
            Err(another_threads) => Self(another_threads),
        }
    }

    /// Whether this is still that process.
    #[inline]
    pub(crate) fn is_here(self) -> bool {
        let now = match PAGE.get() {
            Some(Some(page)) => page.word().load(Ordering::Relaxed),
            Some(None) | None => process::id().into(),
        };
        now == self.0
    }
}

/// A file that belongs to the process that opened it, and to none of its children.
#[derive(Debug)]
pub(crate) struct KeptFile {
    mark: Mark,
    file: UnmodelledMutex<Option<File>>,
}

impl KeptFile {
    pub(crate) fn new(file: File) -> Arc<Self> {
        let kept = Arc::new(Self { mark: Mark::here(), file: UnmodelledMutex::new(Some(file)) });
        let mut all = KEPT.lock();
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&kept));
        kept
    }

    /// Takes the file out, unless this is a child, to which it does not belong.
    pub(crate) fn take(&self) -> Option<File> {
        if self.mark.is_here() { self.file.lock().take() } else { None }
    }
}

/// Closes the descriptors that this process has only because it is a child. The files of its own stay.
#[cold]
pub(crate) fn close_what_is_not_ours() {
    // Who held one of these locks at the fork holds it for ever: then the descriptors go with the process.
    let Some(all) = KEPT.try_lock() else { return };
    for kept in all.iter().filter_map(Weak::upgrade).filter(|kept| !kept.mark.is_here()) {
        drop(kept.file.try_lock().and_then(|mut file| file.take()));
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_of_this_process_and_the_same_each_time() {
        let mark = Mark::here();
        assert!(mark.is_here());
        assert_eq!(mark, Mark::here());
        assert!(!Mark(mark.0 + 1).is_here());
        assert!(!Mark(0).is_here());
    }

    #[test]
    fn a_file_of_this_process_is_taken_once_and_never_closed_as_somebody_elses() {
        let kept = KeptFile::new(tempfile::tempfile().unwrap());
        close_what_is_not_ours();
        assert!(kept.take().is_some());
        assert!(kept.take().is_none());
    }

    #[test]
    fn a_file_of_another_process_is_not_taken_but_closed() {
        let mut kept = Arc::into_inner(KeptFile::new(tempfile::tempfile().unwrap())).unwrap();
        kept.mark = Mark(u64::MAX);
        assert!(kept.take().is_none());
        let kept = Arc::new(kept);
        KEPT.lock().push(Arc::downgrade(&kept));
        // Another test may be looking at the list.
        let closed = (0..1_000_000).any(|_| {
            close_what_is_not_ours();
            kept.file.lock().is_none()
        });
        assert!(closed);
    }
}
