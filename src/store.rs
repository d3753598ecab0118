//! The public face: the store's handle.
//!
//! Each call has one body, which serves threads and tasks alike: see [`Caller`].

mod batch;
mod once;
mod reserve;

use std::any::Any;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub use self::batch::Ask;
pub use self::once::{Failed, OnceError, Outcome};
pub use self::reserve::Reserve;
use crate::clock::ms_rounded_up;
use crate::engine::{CloseReport, Engine, SHARDS};
use crate::entropy::Entropy;
use crate::error::{Error, ErrorKind};
use crate::helper;
use crate::key::{Fingerprint, Key, Token};
use crate::options::{Checked, Options, ReserveOptions};
use crate::recovery;
use crate::reservation::{Asked, Ending, InterruptedKeys, KeyInfo, Keys, NotReattached, Question, Reservation};
use crate::retention::DURATION_MS_MAX;
use crate::state::{Answer, Call, Terms};
use crate::stats::{Health, OpenReport, Stats};
use crate::storage::{FileStorage, Storage, network_file_system};
use crate::sync::Mutex;
use crate::wait::{Bell, Caller, now};

/// How long a caller sleeps between two tries for a directory's lock.
const LOCK_RETRY: Duration = Duration::from_millis(5);

/// An open store: a cheap handle, to be cloned and shared.
///
/// Dropping the last handle closes the store without waiting for running owners, and frees the directory's lock before
/// it returns; [`close`](Self::close) does the same and says how it went.
///
/// A store serves the process that opened it. In a child that `fork` has made of that process every call fails with
/// [`ErrorKind::Closed`] (`stats` is empty), and a drop does nothing; the parent's store goes on.
#[derive(Clone)]
pub struct Store {
    handle: Arc<Handle>,
}

/// What all clones of a store share; its end is the end of the store.
struct Handle {
    engine: Arc<Engine>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.engine.refuse_forked().is_err() {
            // Taking it apart would take locks, which may never be free in a child. All of it goes with the process.
            std::mem::forget(Arc::clone(&self.engine));
        } else if self.engine.close(0).is_err() {
            // The end mark is missing: the next opening reads the log as after a crash, and loses nothing that was
            // promised.
        }
    }
}

impl Store {
    /// Opens the store in `dir`, or makes one there if the directory is empty or does not exist.
    ///
    /// After a crash, what was accepted is made durable anew before this returns; see [`opened`](Self::opened) for what
    /// was found.
    ///
    /// # Errors
    ///
    /// `InvalidOptions`, also for a directory on a network file system (see [`Options::network_file_system`]); `Locked`,
    /// when the directory is open already, here or in another process (see [`Options::lock_wait`]); `ForeignDirectory`,
    /// when it is no directory or holds something else; `UnsupportedFormat`; `Corrupt`, naming file and offset;
    /// `Cancelled`, by [`Options::progress`]; in all these cases no byte has changed. `Full` and `Io`, from the file
    /// system.
    pub fn open(dir: impl AsRef<Path>, options: Options) -> Result<Self, Error> {
        let options = options.validate()?;
        let dir = dir.as_ref();
        if !options.network_file_system {
            refuse_network_file_system(dir)?;
        }
        let storage = FileStorage::open(dir, options.append_mode, true).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotADirectory => {
                Error::with_source(ErrorKind::ForeignDirectory, "the path of the store is not a directory", error)
            }
            _ => Error::io("opening the directory of the store", error),
        })?;
        Self::open_on(Arc::new(storage), Entropy::System, options, true)
    }

    pub(crate) fn open_on(
        storage: Arc<dyn Storage>,
        entropy: Entropy,
        options: Checked,
        with_helper: bool,
    ) -> Result<Self, Error> {
        recovery::refuse_foreign(&*storage)?;
        let lock = take_lock(&*storage, options.lock_wait)?;
        let opened = recovery::open(storage, entropy, &options, SHARDS)?;
        let engine = Engine::new(opened, lock, options, with_helper)?;
        Ok(Self { handle: Arc::new(Handle { engine }) })
    }

    /// Asks whether the work named by `key`, for the request with this fingerprint, may be done now. Atomic: of any
    /// number of callers one is told `Fresh`.
    ///
    /// # Errors
    ///
    /// `Full`, `Poisoned`, `Closed`, `Io`, `Corrupt`: the caller must not do the work.
    pub fn reserve(&self, key: &Key, fingerprint: Fingerprint) -> Result<Reserve, Error> {
        self.reserve_with(key, fingerprint, &ReserveOptions::default())
    }

    /// As [`reserve`](Self::reserve), for a task. Dropped before it is ready, it leaves nothing behind.
    ///
    /// # Errors
    ///
    /// As [`reserve`](Self::reserve).
    pub fn reserve_async(
        &self,
        key: &Key,
        fingerprint: Fingerprint,
    ) -> impl Future<Output = Result<Reserve, Error>> + Send + use<> {
        self.reserve_with_async(key, fingerprint, &ReserveOptions::default())
    }

    /// As [`reserve`](Self::reserve), with options of this call's own.
    ///
    /// # Errors
    ///
    /// Also `InvalidOptions`, naming the option.
    pub fn reserve_with(&self, key: &Key, fingerprint: Fingerprint, with: &ReserveOptions) -> Result<Reserve, Error> {
        match self.question(key, fingerprint, with)? {
            (question, 0) => Reserve::ask_here(&question),
            (question, wait_ms) => now(Reserve::ask(&question, wait_ms, Caller::Thread)),
        }
    }

    /// As [`reserve_with`](Self::reserve_with), for a task. Dropped before it is ready, it leaves nothing behind: what
    /// it waited for goes to the next, and a key that it had already reserved is free again.
    ///
    /// # Errors
    ///
    /// As [`reserve_with`](Self::reserve_with).
    pub fn reserve_with_async(
        &self,
        key: &Key,
        fingerprint: Fingerprint,
        with: &ReserveOptions,
    ) -> impl Future<Output = Result<Reserve, Error>> + Send + use<> {
        Reserve::ask_as_task(self.asked(key, fingerprint, with))
    }

    /// What a call asks, and how long it waits, in milliseconds.
    fn question<'a>(
        &'a self,
        key: &'a Key,
        fingerprint: Fingerprint,
        with: &ReserveOptions,
    ) -> Result<(Question<'a>, u64), Error> {
        let engine = self.engine();
        let with = with.validate(engine.options())?;
        let terms = Terms {
            fingerprint,
            retention_ms: with.retention_ms,
            lease: with.lease,
            durability: with.durability,
            policy: with.on_interrupted.policy(engine.opened_ms()),
            too_old_from_ms: match with.issued_at_ms {
                None => u64::MAX,
                Some(issued_ms) if engine.is_too_old(issued_ms, with.retention_ms) => 0,
                Some(issued_ms) => issued_ms.saturating_add(with.retention_ms),
            },
        };
        Ok((Question { engine, key, terms, on_drop: with.on_drop }, with.wait_ms))
    }

    /// As [`Store::question`], to be kept.
    fn asked(&self, key: &Key, fingerprint: Fingerprint, with: &ReserveOptions) -> Result<(Asked, u64), Error> {
        let (question, wait_ms) = self.question(key, fingerprint, with)?;
        Ok((question.keep(), wait_ms))
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.handle.engine
    }

    /// Goes on with a detached reservation, also one of an earlier run.
    ///
    /// # Errors
    ///
    /// `InFlight` while a guard of it lives; `Superseded` when it is no longer the latest of its key, or was not
    /// detached; else what kept the store from answering.
    pub fn reattach(&self, key: &Key, token: Token) -> Result<Reservation, NotReattached> {
        now(reattach(self.engine(), key, token, Caller::Thread))
    }

    /// As [`reattach`](Self::reattach), for a task. Dropped before it is ready, it leaves the reservation detached.
    ///
    /// # Errors
    ///
    /// As [`reattach`](Self::reattach).
    pub fn reattach_async(
        &self,
        key: &Key,
        token: Token,
    ) -> impl Future<Output = Result<Reservation, NotReattached>> + Send + use<> {
        let (engine, key) = (Arc::clone(self.engine()), key.clone());
        async move { reattach(&engine, &key, token, Caller::Task).await }
    }

    /// What is known of a key, without reserving it; `None` when nothing is.
    ///
    /// # Errors
    ///
    /// `Poisoned`, `Closed`, `Corrupt`, `Io`.
    pub fn peek(&self, key: &Key) -> Result<Option<KeyInfo>, Error> {
        let (state, checkpoint) = now(self.engine().peek(key, Caller::Thread))?;
        Ok(KeyInfo::new(&state, checkpoint))
    }

    /// As [`peek`](Self::peek), for a task.
    ///
    /// # Errors
    ///
    /// As [`peek`](Self::peek).
    pub fn peek_async(&self, key: &Key) -> impl Future<Output = Result<Option<KeyInfo>, Error>> + Send + use<> {
        let (engine, key) = (Arc::clone(self.engine()), key.clone());
        async move {
            let (state, checkpoint) = engine.peek(&key, Caller::Task).await?;
            Ok(KeyInfo::new(&state, checkpoint))
        }
    }

    /// Makes a key as if it had never been: an operator's act, for when the store must not remember what happened. It
    /// is synced, and stands in the log with its reason (at most 64 KiB); an owner at work is superseded. `false` when
    /// nothing was known of the key.
    ///
    /// # Errors
    ///
    /// `TooLarge`, `Full`, `Poisoned`, `Closed`, `Io`: the key is as it was.
    pub fn forget(&self, key: &Key, reason: &str) -> Result<bool, Error> {
        now(forget(self.engine(), key, reason, Caller::Thread))
    }

    /// As [`forget`](Self::forget), for a task.
    ///
    /// # Errors
    ///
    /// As [`forget`](Self::forget).
    pub fn forget_async(&self, key: &Key, reason: &str) -> impl Future<Output = Result<bool, Error>> + Send + use<> {
        let (engine, key, reason) = (Arc::clone(self.engine()), key.clone(), reason.to_owned());
        async move { forget(&engine, &key, &reason, Caller::Task).await }
    }

    /// All keys that are known, one after the other, while the store goes on: see [`Keys`] for what such a list
    /// promises.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let store = keyonce::Store::open(dir.path().join("keys"), keyonce::Options::default())?;
    /// for known in store.keys() {
    ///     let (key, info) = known?;
    ///     println!("{key:?} is {:?} since {:?}", info.state, info.since);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn keys(&self) -> Keys {
        Keys::new(&self.handle.engine)
    }

    /// All keys whose owner never finished, to find out about each what became of it. A service goes through them after
    /// each opening.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let store = keyonce::Store::open(dir.path().join("keys"), keyonce::Options::default())?;
    /// use std::time::{Duration, SystemTime};
    ///
    /// use keyonce::Cause;
    ///
    /// # fn ask_the_bank(key: &str) -> Option<Vec<u8>> { let _ = key; None }
    /// for interrupted in store.interrupted() {
    ///     let interrupted = interrupted?;
    ///     let longest_work = Duration::from_secs(600);
    ///     if interrupted.cause() == Cause::LeaseLapsed && interrupted.since + longest_work > SystemTime::now() {
    ///         continue; // Its owner may still be at work: what the bank says now may not be the last word.
    ///     }
    ///     let _ = match ask_the_bank(&interrupted.downstream_key("charge")) {
    ///         Some(receipt) => interrupted.resolve(&receipt)?,
    ///         None => interrupted.release()?, // The bank never heard of it.
    ///     };
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn interrupted(&self) -> InterruptedKeys {
        InterruptedKeys::new(&self.handle.engine)
    }

    /// Counters and sizes, as of now.
    pub fn stats(&self) -> Stats {
        self.engine().stats()
    }

    /// Whether the store can do its work. Looks at what is known; touches no disk.
    pub fn health(&self) -> Health {
        self.engine().health()
    }

    /// What opening the store found.
    pub fn opened(&self) -> &OpenReport {
        self.engine().report()
    }

    /// Makes durable all that was answered before the call, whatever its level.
    ///
    /// # Errors
    ///
    /// `Poisoned`, `Closed`.
    pub fn sync(&self) -> Result<(), Error> {
        now(self.engine().sync(Caller::Thread))
    }

    /// As [`sync`](Self::sync), for a task.
    ///
    /// # Errors
    ///
    /// As [`sync`](Self::sync).
    pub fn sync_async(&self) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        let engine = Arc::clone(self.engine());
        async move { engine.sync(Caller::Task).await }
    }

    /// Ends the store for every clone: nobody becomes an owner any more, running owners may finish for `wait`, waiters
    /// get `Closed`; then everything is synced, the end is marked, and the directory's lock is free. What is unfinished
    /// then is found interrupted by the next opening, with the cause `LeaseLapsed`, since its owner may still be at work.
    ///
    /// # Errors
    ///
    /// `Poisoned`, `Io`: the store is closed all the same, without its end mark.
    pub fn close(&self, wait: Duration) -> Result<CloseReport, Error> {
        self.engine().close(ms_rounded_up(wait).min(DURATION_MS_MAX))
    }

    /// As [`close`](Self::close), for a task: a thread of its own closes the store. Once it was polled the store is
    /// being closed, also when it is dropped.
    ///
    /// # Errors
    ///
    /// As [`close`](Self::close); `Io`, when the system has no thread to give: the store is open still.
    pub fn close_async(&self, wait: Duration) -> impl Future<Output = Result<CloseReport, Error>> + Send + use<> {
        let engine = Arc::clone(self.engine());
        let wait_ms = ms_rounded_up(wait).min(DURATION_MS_MAX);
        async move {
            let told = Arc::new((Bell::new(), Mutex::new(Err(Error::closed()))));
            let tells = Arc::clone(&told);
            drop(helper::spawn("keyonce-close", move || {
                let closed = engine.close(wait_ms);
                *tells.1.lock() = closed;
                tells.0.ring();
            })?);
            told.0.rung(Caller::Task, None).await;
            told.1.lock().clone()
        }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("opened", self.opened()).finish_non_exhaustive()
    }
}

async fn reattach(engine: &Arc<Engine>, key: &Key, token: Token, caller: Caller) -> Result<Reservation, NotReattached> {
    let lease = engine.options().lease;
    let begun = engine.reattach(key, token.to_u64(), lease, caller).await?;
    let (answer, rests_on) = (begun.acted.answer, begun.rests_on);
    let reattached = (answer == Answer::Done).then(|| {
        let until_ms = begun.acted.lease_end_before_ms;
        Reservation::new(engine, key, &begun.acted, lease.ms, Ending::UnseenReattached { until_ms })
    });
    engine.settle(rests_on, caller).await?;
    match (reattached, answer) {
        (Some(reservation), _) => Ok(reservation.seen(engine.options().on_drop)),
        (None, Answer::InFlight) => Err(NotReattached::InFlight),
        (None, _) => Err(NotReattached::Superseded),
    }
}

async fn forget(engine: &Engine, key: &Key, reason: &str, caller: Caller) -> Result<bool, Error> {
    let acted = engine.call(key, Call::Forget, reason.as_bytes(), caller).await?;
    engine.sync(caller).await?;
    Ok(acted.answer == Answer::Done)
}

fn refuse_network_file_system(dir: &Path) -> Result<(), Error> {
    let found =
        network_file_system(dir).map_err(|error| Error::io("asking for the file system of the store", error))?;
    let Some(name) = found else { return Ok(()) };
    let problem = format!(
        "is off, and the directory lies on {name}, where locks, mappings and syncs need not mean what the store relies on"
    );
    Err(Error::invalid_option("network_file_system", problem))
}

fn take_lock(storage: &dyn Storage, lock_wait: Duration) -> Result<Box<dyn Any + Send + Sync>, Error> {
    let mut waited = Duration::ZERO;
    loop {
        if let Some(lock) = storage.lock().map_err(|error| Error::io("locking the directory", error))? {
            return Ok(lock);
        }
        if waited >= lock_wait {
            return Err(Error::new(ErrorKind::Locked, "the store is open already, in this process or another"));
        }
        let pause = LOCK_RETRY.min(lock_wait - waited);
        std::thread::sleep(pause);
        waited += pause;
    }
}
