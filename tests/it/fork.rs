//! `fork`: a child is refused whatever it asks of its parent's store, writes nothing, waits for nothing, and frees
//! nothing; the parent goes on as if nothing had been.
//!
//! A process that forks is to have a purpose of its own: this binary again, with the directory in its environment.

#![expect(unsafe_code, reason = "fork and alarm are unsafe, and what this is about")]

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use keyonce::{
    AppendMode, Ask, Attempt, Completion, Durability, Error, ErrorKind, Failed, Health, InFlight, Interrupted, Keys,
    OnceError, Options, Reservation, Reserve, ReserveOptions, Stats, Store,
};

use crate::place::{fresh, interrupted, key, replays, request, reserve, tell, tree};

const DIR: &str = "KEYONCE_FORK_DIR";
const TASK: &str = "KEYONCE_FORK_TASK";
const LEVEL: &str = "KEYONCE_FORK_LEVEL";

/// Forks while other threads hold whatever lock they are at.
const FORKS_AT_WORK: u32 = 60;

/// And until these have come to so many keys.
const KEYS_MIN: u64 = 200;

/// A child that has not come to its end by then hangs.
const CHILD_SECONDS_MAX: u32 = 30;

fn options() -> Options {
    let options = Options::new().response_bytes_max(1000);
    match std::env::var(LEVEL).as_deref() {
        Ok("ProcessCrash") => options.durability(Durability::ProcessCrash).append_mode(AppendMode::Mapped),
        _ => options,
    }
}

fn parent(dir: &Path, task: &str, level: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "fork::the_parent_forks", "--nocapture", "--test-threads=1"])
        .env(DIR, dir)
        .env(TASK, task)
        .env(LEVEL, level)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

fn succeeds(task: &str, level: &str) {
    let root = tempfile::tempdir().unwrap();
    let output = parent(&root.path().join("store"), task, level).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("parent: done"), "{}: {said}", output.status);
}

#[test]
fn a_forked_child_is_refused_by_every_call_and_frees_and_writes_nothing() {
    for level in ["PowerLoss", "ProcessCrash"] {
        succeeds("quiet", level);
    }
}

#[test]
fn a_forked_child_waits_for_no_lock_that_was_held_at_the_fork() {
    for level in ["PowerLoss", "ProcessCrash"] {
        succeeds("at work", level);
    }
}

#[test]
fn a_forked_child_that_lives_on_does_not_keep_the_directory_locked() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("store");
    let mut parent: Child = parent(&dir, "leaves a child", "PowerLoss").spawn().unwrap();
    // The grandchild has the pipes, too, and ends when this end of the first is closed.
    let stdin = parent.stdin.take().unwrap();
    let mut lines = BufReader::new(parent.stderr.take().unwrap()).lines();
    let ready = lines.find(|line| line.as_ref().unwrap().contains("child: refused"));
    assert!(ready.is_some(), "the child was not refused");
    assert_eq!(Store::open(&dir, options()).unwrap_err().kind(), ErrorKind::Locked);
    parent.kill().unwrap();
    parent.wait().unwrap();
    let store = Store::open(&dir, options()).expect("the child of a process that is gone keeps the directory locked");
    replays(&store, &key("done"), b"paid");
    drop(stdin);
    assert!(lines.any(|line| line.unwrap().contains("child: ends")), "the child lived until then");
}

/// Forks as the environment says; without it, nothing.
#[test]
fn the_parent_forks() {
    let Ok(dir) = std::env::var(DIR) else { return };
    let dir = PathBuf::from(dir);
    let store = Store::open(&dir, options()).unwrap();
    match std::env::var(TASK).unwrap().as_str() {
        "quiet" => forks_in_quiet(&dir, store),
        "at work" => forks_at_work(&dir, store),
        _ => leaves_a_child(&store),
    }
    tell("parent: done");
}

/// All that a process can hold of a store.
struct Everything {
    store: Store,
    guard: Reservation,
    view: Attempt,
    interrupted: Interrupted,
    in_flight: InFlight,
    list: Keys,
    waits: Pin<Box<dyn Future<Output = Result<Reserve, Error>> + Send>>,
    other: PathBuf,
}

impl Everything {
    fn of(dir: &Path, store: &Store) -> Self {
        assert_eq!(fresh(store, &key("done")).complete(b"paid").unwrap(), Completion::Done);
        let guard = fresh(store, &key("held"));
        drop(fresh(store, &key("dropped")));
        let Reserve::InFlight(in_flight) = reserve(store, &key("held")) else { panic!("it is held") };
        let mut list = store.keys();
        list.next().unwrap().unwrap();
        let with = ReserveOptions::new().wait(Duration::from_secs(600));
        let waits = store.reserve_with_async(&key("held"), request(), &with);
        let mut waits: Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(waits);
        assert!(polled(&mut waits).is_pending());
        Self {
            interrupted: interrupted(store, &key("dropped")),
            view: guard.attempt_view(),
            store: store.clone(),
            guard,
            in_flight,
            list,
            waits,
            other: dir.with_file_name("other"),
        }
    }
}

fn polled<T>(future: &mut Pin<Box<dyn Future<Output = T> + Send>>) -> Poll<T> {
    future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// Runs in a child, to its end, and returns in the parent once the child has ended well.
fn fork(child: impl FnOnce()) {
    // SAFETY: the child calls nothing but what this test is about, and ends without a way back into the harness.
    match unsafe { libc::fork() } {
        -1 => panic!("no process to be had"),
        0 => {
            // SAFETY: the default action of the alarm ends the process, which is what is wanted.
            unsafe { libc::alarm(CHILD_SECONDS_MAX) };
            let ended = catch_unwind(AssertUnwindSafe(child));
            // SAFETY: nothing of this process is needed any more.
            unsafe { libc::_exit(i32::from(ended.is_err())) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: `status` is an integer of our own.
            assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
            assert_eq!(status, 0, "14 is a child that hung, 256 one that found something wrong");
        }
    }
}

#[track_caller]
fn refused<T>(result: Result<T, Error>) {
    let Err(error) = result else { panic!("a child is not to be served") };
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert!(error.to_string().contains("forked"), "{error}");
}

/// Every call there is, in a child.
fn everything_is_refused(all: Everything) {
    let Everything { store, guard, view, interrupted, in_flight, mut list, mut waits, .. } = all;
    let lease = Duration::from_secs(5);
    for name in ["done", "held", "dropped", "never seen"] {
        let key = key(name);
        refused(store.reserve(&key, request()));
        refused(store.reserve_with(&key, request(), &ReserveOptions::new().wait(lease)));
        let issued = ReserveOptions::new().issued_at(std::time::SystemTime::UNIX_EPOCH);
        refused(store.reserve_with(&key, request(), &issued));
        refused(store.peek(&key));
        refused(store.forget(&key, "a child asks"));
        let reattached = store.reattach(&key, guard.token()).unwrap_err();
        assert!(format!("{reattached:?}").contains("forked"), "{reattached:?}");
        let once = store.once(&key, request(), |_| -> Result<Vec<u8>, Failed<Error>> { panic!("work in a child") });
        let Err(OnceError::Store(error)) = once else { panic!("{once:?}") };
        refused::<()>(Err(error));
        let Poll::Ready(task) = polled(&mut boxed(store.reserve_async(&key, request()))) else { panic!("it waits") };
        refused(task);
        let Poll::Ready(task) = polled(&mut boxed(store.peek_async(&key))) else { panic!("it waits") };
        refused(task);
    }
    refused(store.reserve_batch(&[Ask::new(&key("done"), request())]));
    refused(store.sync());
    refused(view.renew(lease));
    refused(view.save_checkpoint(b"half"));
    refused(guard.renew(lease));
    refused(guard.save_checkpoint(b"half"));
    refused(list.next().unwrap());
    assert!(list.next().is_none());
    refused(store.keys().next().unwrap().map(drop));
    refused(store.interrupted().next().unwrap().map(drop));
    refused(in_flight.wait(lease));
    refused(interrupted.resolve(b"found"));
    assert!(matches!(store.health(), Health::Closed));
    assert_eq!(format!("{:?}", store.stats()), format!("{:?}", Stats::default()));
    assert!(!store.opened().clean || store.opened().created);
    let not_stored = guard.complete(b"by a child").unwrap_err();
    refused::<()>(Err(not_stored.error));
    let not_stored = not_stored.reservation.detach(lease).unwrap_err();
    refused::<()>(Err(not_stored.error));
    let ended = store.complete_batch([(not_stored.reservation, b"by a child".to_vec())]);
    let not_stored = ended.into_iter().next().unwrap().unwrap_err();
    refused::<()>(Err(not_stored.error));
    refused(not_stored.reservation.release());
    assert!(polled(&mut waits).is_pending(), "nobody of this process rings");
    drop((waits, view));
    refused(store.close(lease));
}

fn boxed<'a, T>(future: impl Future<Output = T> + Send + 'a) -> Pin<Box<dyn Future<Output = T> + Send + 'a>> {
    Box::pin(future)
}

/// Whether one of this process's descriptors is the lock of the store.
fn has_lock_open(dir: &Path) -> bool {
    let lock = dir.join("LOCK");
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok())
        .any(|target| target == lock)
}

fn is_locked(dir: &Path) -> bool {
    File::open(dir.join("LOCK")).unwrap().try_lock().is_err()
}

/// Nothing else goes on, so not a byte may change.
fn forks_in_quiet(dir: &Path, store: Store) {
    let mut all = Some(Everything::of(dir, &store));
    let before = tree(dir);
    assert!(has_lock_open(dir));
    let mut kept = Some(store);
    fork(|| {
        let (all, store) = (all.take().unwrap(), kept.take().unwrap());
        let other = all.other.clone();
        everything_is_refused(all);
        assert!(!has_lock_open(dir), "the child keeps the lock's descriptor");
        refused(store.reserve(&key("held"), request()));
        // The last handle of the child.
        drop(store);
        assert!(is_locked(dir), "the child has freed its parent's lock");
        // A child may have a store of its own.
        assert_eq!(Store::open(dir, options()).unwrap_err().kind(), ErrorKind::Locked);
        let own = Store::open(&other, options()).unwrap();
        assert_eq!(fresh(&own, &key("a")).complete(b"by the child").unwrap(), Completion::Done);
        drop(own);
        assert!(!is_locked(&other));
    });
    assert!(tree(dir) == before, "a child has changed something");
    // And without a call: dropping is all that the child does.
    fork(|| drop((all.take(), kept.take())));
    assert!(tree(dir) == before, "a child has changed something");
    assert!(is_locked(dir), "a child has freed its parent's lock");

    let (all, store) = (all.unwrap(), kept.unwrap());
    assert_eq!(all.guard.complete(b"by the parent").unwrap(), Completion::Done);
    replays(&store, &key("held"), b"by the parent");
    drop((all.waits, all.list, all.interrupted));
    store.close(Duration::ZERO).unwrap();
    assert!(!is_locked(dir));
    replays(&Store::open(dir, options()).unwrap(), &key("held"), b"by the parent");
    let other = Store::open(all.other, options()).unwrap();
    assert!(other.opened().clean);
    replays(&other, &key("a"), b"by the child");
}

/// Has the threads come to an end when it is dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn forks_at_work(dir: &Path, store: Store) {
    let mut all = Some(Everything::of(dir, &store));
    let (over, done) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|threads| {
        for thread in 0..3 {
            let (store, over, done) = (&store, &over, &done);
            threads.spawn(move || {
                for at in 0.. {
                    if over.load(Ordering::Relaxed) {
                        break;
                    }
                    let id = format!("{thread}-{at}");
                    assert_eq!(fresh(store, &key(&id)).complete(id.as_bytes()).unwrap(), Completion::Done);
                    // Every lock of the store, one after the other.
                    assert!(store.stats().fresh > 0);
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // Also when a child has found something wrong.
        let ends = Ends(&over);
        let mut forks = 0;
        while forks < FORKS_AT_WORK || done.load(Ordering::Relaxed) < KEYS_MIN {
            fork(|| everything_is_refused(all.take().unwrap()));
            forks += 1;
        }
        drop(ends);
    });
    assert!(is_locked(dir));
    let done = done.into_inner();
    drop(all);
    store.close(Duration::ZERO).unwrap();
    drop(store);
    let store = Store::open(dir, options()).unwrap();
    assert!(store.opened().clean);
    assert_eq!(store.opened().keys, done + 3);
}

/// Ends by a kill, and leaves a child that was refused once and then waits for the end of its input.
fn leaves_a_child(store: &Store) {
    assert_eq!(fresh(store, &key("done")).complete(b"paid").unwrap(), Completion::Done);
    // SAFETY: the child calls nothing but what this test is about, and ends without a way back into the harness.
    match unsafe { libc::fork() } {
        -1 => panic!("no process to be had"),
        0 => {
            refused(store.reserve(&key("done"), request()));
            let mut stderr = std::io::stderr();
            stderr.write_all(b"child: refused\n").unwrap();
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
            stderr.write_all(b"child: ends\n").unwrap();
            // SAFETY: nothing of this process is needed any more.
            unsafe { libc::_exit(0) }
        }
        _ => loop {
            std::thread::park();
        },
    }
}
