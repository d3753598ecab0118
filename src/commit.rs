//! Group commit: which LSN is durable, who syncs next, and what happens when a sync fails.
//!
//! Invariants:
//!
//! - One sync is in flight at any time. Who finds nobody leading leads on its own thread, so a lone caller pays one
//!   device sync and no hand-off; those who come meanwhile wait and share the next one.
//! - A task never leads: it says what it wants to be durable, and the store's syncing thread waits for that as any other
//!   thread does.
//! - `durable` only grows, and only over a contiguous synced prefix of the log: the sync that a leader runs covers all
//!   segments up to the end it reports.
//! - The first failure stays. It is looked at under the mutex before anything is published, so nothing becomes durable
//!   after it; a failed sync is never tried again (on ext4 and XFS the second try says "ok" though nothing was
//!   written).
//!
//! This file knows neither segments nor records: a sync is a closure that says how far it reached.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::error::{Error, ErrorKind};
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering};
use crate::wait::{Bell, Caller};

/// The durable end of the log and those who wait for it.
#[derive(Debug)]
pub(crate) struct Commit {
    state: Mutex<State>,
    /// Mirror of `State::synced`. Release in `publish`, Acquire in `durable`: who sees an LSN here sees all that its
    /// sync made durable.
    durable: AtomicU64,
    /// Mirror of `State::failure.is_some()`, so that an append can refuse without the mutex. Release in `poison`.
    failed: AtomicBool,
}

#[derive(Debug)]
struct State {
    synced: u64,
    leading: bool,
    failure: Option<Error>,
    waiting: VecDeque<Arc<Waiter>>,
    syncs: u64,
    /// What others want to be durable who do not lead themselves.
    wanted: u64,
    /// Somebody was asked to see to `wanted`, and has not yet found that all of it is durable.
    seen_to: bool,
}

/// One that waits for an LSN while somebody else leads.
#[derive(Debug)]
struct Waiter {
    lsn: u64,
    /// It is a thread, and leads the next sync if it is not durable by then.
    may_lead: bool,
    bell: Bell,
}

impl Commit {
    /// A log that is durable up to `synced`.
    pub(crate) fn new(synced: u64) -> Self {
        Self {
            state: Mutex::new(State {
                synced,
                leading: false,
                failure: None,
                waiting: VecDeque::new(),
                syncs: 0,
                wanted: 0,
                seen_to: false,
            }),
            durable: AtomicU64::new(synced),
            failed: AtomicBool::new(false),
        }
    }

    /// Everything below this LSN survives power loss.
    pub(crate) fn durable(&self) -> u64 {
        self.durable.load(Ordering::Acquire)
    }

    /// How many syncs have returned well.
    pub(crate) fn syncs(&self) -> u64 {
        self.state.lock().syncs
    }

    /// The failure that ended all writing, if there was one.
    pub(crate) fn failure(&self) -> Option<Error> {
        if self.failed.load(Ordering::Acquire) { self.state.lock().failure.clone() } else { None }
    }

    /// Ends all writing: the bytes in the page cache can no longer be trusted to be those on the disk. Rings for nobody,
    /// since locks may be held: those who wait are told by whoever leads, or would lead next.
    pub(crate) fn poison(&self, cause: &Error) -> Error {
        self.fail(&mut self.state.lock(), cause)
    }

    /// Returns once everything below `lsn` is durable. `sync` makes durable more of what had been appended when it was
    /// called, and says up to which LSN; it runs on this thread if nobody else is at it, and again if that was not enough.
    ///
    /// # Errors
    ///
    /// The store's failure, when a sync or a write failed before `lsn` became durable.
    pub(crate) fn wait(&self, lsn: u64, sync: &dyn Fn() -> Result<u64, Error>) -> Result<(), Error> {
        if self.durable() >= lsn {
            return Ok(());
        }
        let mut state = self.state.lock();
        loop {
            if state.synced >= lsn {
                return Ok(());
            }
            if let Some(failure) = state.failure.clone() {
                let waiting = std::mem::take(&mut state.waiting);
                drop(state);
                waiting.iter().for_each(|waiter| waiter.bell.ring());
                return Err(failure);
            }
            if state.leading {
                let waiter = state.enlist(lsn, true);
                drop(state);
                waiter.bell.listen(None);
            } else {
                state.leading = true;
                drop(state);
                self.lead(sync);
            }
            state = self.state.lock();
        }
    }

    /// As [`Commit::wait`], for a task. `ask` has somebody call [`Commit::see_to_what_is_wanted`] soon.
    ///
    /// # Errors
    ///
    /// As [`Commit::wait`].
    pub(crate) async fn wait_as_task(&self, lsn: u64, ask: &(impl Fn() + Sync)) -> Result<(), Error> {
        if self.durable() >= lsn {
            return Ok(());
        }
        loop {
            let (waiter, asks) = {
                let mut state = self.state.lock();
                if state.synced >= lsn {
                    return Ok(());
                }
                if let Some(failure) = &state.failure {
                    return Err(failure.clone());
                }
                (state.enlist(lsn, false), state.want(lsn))
            };
            if asks {
                ask();
            }
            waiter.bell.rung(Caller::Task, None).await;
        }
    }

    /// Says that everything below `lsn` should become durable soon. `true` when somebody must be asked to see to it.
    pub(crate) fn want(&self, lsn: u64) -> bool {
        let mut state = self.state.lock();
        lsn > state.synced && state.failure.is_none() && state.want(lsn)
    }

    /// Syncs until all that is wanted is durable, or a sync has failed, which those who wait are told.
    pub(crate) fn see_to_what_is_wanted(&self, sync: &dyn Fn() -> Result<u64, Error>) {
        loop {
            let wanted = {
                let mut state = self.state.lock();
                if state.wanted <= state.synced {
                    state.seen_to = false;
                    return;
                }
                state.wanted
            };
            if self.wait(wanted, sync).is_err() {
                // All who waited were told, and nobody will be let in to wait.
                return;
            }
        }
    }

    /// Returns once nobody is at a sync.
    pub(crate) fn wait_for_leader(&self) {
        loop {
            let mut state = self.state.lock();
            if !state.leading {
                return;
            }
            // Woken by the next end of a sync, whatever it reached.
            let waiter = state.enlist(0, false);
            drop(state);
            waiter.bell.listen(None);
        }
    }

    fn lead(&self, sync: &dyn Fn() -> Result<u64, Error>) {
        // A panic in the sync must not leave the others waiting for a leader who is gone.
        let mut turn =
            Turn { commit: self, result: Err(Error::new(ErrorKind::Poisoned, "the thread that synced panicked")) };
        turn.result = sync();
    }

    fn fail(&self, state: &mut State, cause: &Error) -> Error {
        let failure = state.failure.get_or_insert_with(|| Error::poisoned(cause.clone()));
        self.failed.store(true, Ordering::Release);
        failure.clone()
    }
}

/// The leader's turn; ends by publishing what came of it, also when the sync panics.
struct Turn<'a> {
    commit: &'a Commit,
    result: Result<u64, Error>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.commit.state.lock();
        state.leading = false;
        match &self.result {
            Ok(end) if state.failure.is_none() => {
                state.syncs += 1;
                state.synced = state.synced.max(*end);
                self.commit.durable.store(state.synced, Ordering::Release);
            }
            Ok(_) => {}
            Err(cause) => {
                self.commit.fail(&mut state, cause);
            }
        }
        let (successor, woken) = state.take_who_is_told();
        drop(state);
        // The next leader first, so that the device does not idle while the others wake.
        for waiter in successor.into_iter().chain(woken) {
            waiter.bell.ring();
        }
    }
}

impl State {
    fn enlist(&mut self, lsn: u64, may_lead: bool) -> Arc<Waiter> {
        let waiter = Arc::new(Waiter { lsn, may_lead, bell: Bell::new() });
        self.waiting.push_back(Arc::clone(&waiter));
        waiter
    }

    /// `true` when nobody was asked yet.
    fn want(&mut self, lsn: u64) -> bool {
        self.wanted = self.wanted.max(lsn);
        !std::mem::replace(&mut self.seen_to, true)
    }

    /// Takes the next leader off the list, and all for whom the sync that has just ended has settled something.
    fn take_who_is_told(&mut self) -> (Option<Arc<Waiter>>, VecDeque<Arc<Waiter>>) {
        if self.failure.is_some() {
            return (None, std::mem::take(&mut self.waiting));
        }
        let synced = self.synced;
        let successor = self.waiting.iter().position(|waiter| waiter.may_lead && waiter.lsn > synced);
        let successor = successor.and_then(|at| self.waiting.remove(at));
        let (woken, waiting) = std::mem::take(&mut self.waiting).into_iter().partition(|waiter| waiter.lsn <= synced);
        self.waiting = waiting;
        (successor, woken)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_lone_caller_syncs_once_and_only_when_needed() {
        let commit = Commit::new(100);
        commit.wait(100, &|| unreachable!("already durable")).unwrap();
        commit.wait(101, &|| Ok(140)).unwrap();
        assert_eq!(commit.durable(), 140);
        commit.wait(140, &|| unreachable!("already durable")).unwrap();
        assert_eq!(commit.syncs(), 1);
    }

    #[test]
    fn after_a_failed_sync_nothing_becomes_durable() {
        let commit = Commit::new(0);
        let failed = commit.wait(8, &|| Err(Error::new(ErrorKind::Io, "sync failed")));
        assert_eq!(failed.unwrap_err().kind(), ErrorKind::Poisoned);
        let later = commit.wait(16, &|| unreachable!("a failed sync is never tried again"));
        assert_eq!(later.unwrap_err().kind(), ErrorKind::Poisoned);
        assert_eq!(commit.durable(), 0);
        commit.wait(0, &|| unreachable!("durable before the failure")).unwrap();
    }

    #[test]
    fn a_sync_that_returns_after_the_poison_publishes_nothing() {
        let commit = Commit::new(0);
        let outcome = commit.wait(8, &|| {
            commit.poison(&Error::new(ErrorKind::Io, "write failed"));
            Ok(8)
        });
        assert!(outcome.is_err());
        assert_eq!(commit.durable(), 0);
    }

    #[test]
    fn a_panicking_leader_leaves_nobody_waiting() {
        let commit = Arc::new(Commit::new(0));
        let (leading, is_leading) = mpsc::channel();
        let (go, may_panic) = mpsc::channel::<()>();
        let leader = {
            let commit = Arc::clone(&commit);
            std::thread::spawn(move || {
                commit.wait(8, &|| {
                    leading.send(()).unwrap();
                    may_panic.recv().unwrap();
                    panic!("planted")
                })
            })
        };
        is_leading.recv().unwrap();
        let follower = {
            let commit = Arc::clone(&commit);
            std::thread::spawn(move || commit.wait(16, &|| Ok(16)))
        };
        while commit.state.lock().waiting.is_empty() {
            std::thread::yield_now();
        }
        go.send(()).unwrap();
        assert!(leader.join().is_err());
        assert_eq!(follower.join().unwrap().unwrap_err().kind(), ErrorKind::Poisoned);
    }

    #[test]
    fn those_who_wait_while_one_leads_share_the_next_sync() {
        let commit = Arc::new(Commit::new(0));
        let (leading, is_leading) = mpsc::channel();
        let (go, may_go) = mpsc::channel::<()>();
        let leader = {
            let commit = Arc::clone(&commit);
            std::thread::spawn(move || {
                commit.wait(8, &|| {
                    leading.send(()).unwrap();
                    may_go.recv().unwrap();
                    Ok(8)
                })
            })
        };
        is_leading.recv().unwrap();
        let followers: Vec<_> = (2..10)
            .map(|n| {
                let commit = Arc::clone(&commit);
                std::thread::spawn(move || commit.wait(8 * n, &|| Ok(80)))
            })
            .collect();
        while commit.state.lock().waiting.len() < 8 {
            std::thread::yield_now();
        }
        go.send(()).unwrap();
        leader.join().unwrap().unwrap();
        for follower in followers {
            follower.join().unwrap().unwrap();
        }
        assert_eq!(commit.syncs(), 2);
    }
}
