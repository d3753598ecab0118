//! The one door to locks, atomics and threads.
//!
//! Everything that two threads can contend for comes from here, so that under `--cfg loom` the model checker sees it.
//! The two sides have one face: `lock` never fails, and a wait takes the guard and gives it back.

#[cfg(not(loom))]
pub(crate) use self::real::*;

#[cfg(loom)]
pub(crate) use self::modelled::*;

/// A number that orders nothing, and by which no thread waits for or trusts another: a sample, a pace. It stays the
/// standard library's, since each access would be a choice for the model checker to explore. Relaxed only.
pub(crate) type UnmodelledAtomicU64 = std::sync::atomic::AtomicU64;

#[cfg(not(loom))]
mod real {
    use std::time::Duration;

    pub(crate) use parking_lot::{Mutex, MutexGuard, RwLock};
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    pub(crate) use std::thread::{ThreadId, current};

    /// A condition variable whose waits hand the guard through.
    #[derive(Debug, Default)]
    pub(crate) struct Condvar(parking_lot::Condvar);

    impl Condvar {
        pub(crate) fn new() -> Self {
            Self::default()
        }

        pub(crate) fn wait<'a, T>(&self, mut guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
            self.0.wait(&mut guard);
            guard
        }

        /// Waits at most `at_most`; `None` waits until notified.
        pub(crate) fn wait_for<'a, T>(
            &self,
            mut guard: MutexGuard<'a, T>,
            at_most: Option<Duration>,
        ) -> MutexGuard<'a, T> {
            match at_most {
                Some(at_most) => {
                    self.0.wait_for(&mut guard, at_most);
                    guard
                }
                None => self.wait(guard),
            }
        }

        pub(crate) fn notify_one(&self) {
            self.0.notify_one();
        }
    }

    /// A lock the model checker must not see: the simulated disk's and the manual clock's own, which stand for the
    /// machine, that of what belongs to the whole process, and those of an opening, which nobody else can meet.
    pub(crate) type UnmodelledMutex<T> = parking_lot::Mutex<T>;
}

#[cfg(loom)]
mod modelled {
    use std::time::Duration;

    pub(crate) use loom::sync::MutexGuard;
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    pub(crate) use loom::thread::{ThreadId, current};

    #[derive(Debug)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect("a thread of the model panicked")
        }
    }

    impl<T: Default> Default for Mutex<T> {
        fn default() -> Self {
            Self::new(T::default())
        }
    }

    /// Loom's own reader-writer lock has no `Debug`, and readers here never overlap a writer for long: a mutex models
    /// both.
    #[derive(Debug)]
    pub(crate) struct RwLock<T>(loom::sync::Mutex<T>);

    impl<T> RwLock<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn read(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect("a thread of the model panicked")
        }

        pub(crate) fn write(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect("a thread of the model panicked")
        }
    }

    #[derive(Debug)]
    pub(crate) struct Condvar(loom::sync::Condvar);

    impl Condvar {
        pub(crate) fn new() -> Self {
            Self(loom::sync::Condvar::new())
        }

        pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
            self.0.wait(guard).expect("a thread of the model panicked")
        }

        /// The model has no time: a bounded wait ends when it is notified.
        pub(crate) fn wait_for<'a, T>(
            &self,
            guard: MutexGuard<'a, T>,
            _at_most: Option<Duration>,
        ) -> MutexGuard<'a, T> {
            self.wait(guard)
        }

        pub(crate) fn notify_one(&self) {
            self.0.notify_one();
        }
    }

    pub(crate) type UnmodelledMutex<T> = parking_lot::Mutex<T>;
}
