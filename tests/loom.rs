//! Models: every order in which two or three threads can meet in the store's own engine, explored by loom.
//!
//! Nothing here is a copy of the engine. The crate is built with `--cfg loom`, where `src/sync.rs` hands out the model
//! checker's locks, atomics and condition variables, and each model opens a store on a simulated disk, whose own lock
//! the checker does not see: it stands for the machine. Every execution begins with an empty disk.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=3 CARGO_TARGET_DIR=target/loom \
//!     cargo test --release --features testing --test loom
//! ```
//!
//! `LOOM_MAX_PREEMPTIONS` bounds how often a thread is stopped while it could go on. Each model prints how many
//! executions it explored. A thread that nobody wakes is found without a clock: loom fails as soon as no thread can
//! run.
//!
//! **Acknowledged before durable** is found so: the moment a thread is answered it takes the image that a power loss
//! would leave if nothing got through but what was synced. When all is explored, each image that was seen is opened,
//! and must hold what that thread was told.

#![cfg(loom)]

use std::collections::BTreeMap;
use std::io::Write;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use keyonce::testing::{self, EIO, ManualClock, SimDisk, Step, Storage};
use keyonce::{
    Body, Completion, Durability, Error, ErrorKind, Fingerprint, Key, KeyState, Options, Reserve, ReserveOptions,
    Retention, Store,
};
use loom::thread;

/// The file that holds the only segment of a store this small.
const SEGMENT: &str = "segment-00000001.keyonce";
/// Its size: the smallest that an option may name.
const SEGMENT_BYTES: u64 = 192 << 10;
/// Steps of one execution; opening and closing the store are most of them.
const BRANCHES_MAX: usize = 20_000;
/// Preemptions explored when the environment does not say.
const PREEMPTIONS: usize = 3;
/// Longer than anything here takes; time stands still unless a model moves it.
const WAIT: Duration = Duration::from_secs(3600);
const LEASE: Duration = Duration::from_secs(10);
const RESPONSE: &[u8] = b"paid 9.99";

/// Runs `model` in every order with at most as many preemptions as the environment says.
fn explore(name: &str, model: impl Fn() + Send + Sync + 'static) {
    explore_with_at_most(usize::MAX, name, model);
}

/// As [`explore`], with at most this many preemptions, for a model that has too many orders otherwise.
fn explore_with_at_most(preemptions: usize, name: &str, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.max_branches = builder.max_branches.max(BRANCHES_MAX);
    let bound = builder.preemption_bound.unwrap_or(PREEMPTIONS).min(preemptions);
    builder.preemption_bound = Some(bound);
    let executions = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&executions);
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    say(&format!("{name}: {} executions, at most {bound} preemptions", executions.load(Ordering::Relaxed)));
}

/// Past the capture of the test harness, so that a passing run shows the figures, too.
fn say(line: &str) {
    writeln!(std::io::stderr(), "{line}").expect("standard error takes a line");
}

fn open(disk: &SimDisk, durability: Durability, clock: &ManualClock) -> Store {
    let options = Options::default()
        .durability(durability)
        .lease(LEASE)
        .retention(Retention::new(Duration::from_secs(3600), 0.001))
        .response_bytes_max(1024)
        .segment_bytes(SEGMENT_BYTES)
        .clock(Arc::new(clock.clone()));
    testing::open(disk.clone(), options, disk.steps()).expect("the disk is sound")
}

/// A store at `durability` on a new disk, at a time that stands still.
fn fresh_store(durability: Durability) -> (Store, SimDisk) {
    let disk = SimDisk::new();
    (open(&disk, durability, &ManualClock::default()), disk)
}

fn key(id: &str) -> Key {
    Key::new("charges", id).expect("a short key")
}

fn request() -> Fingerprint {
    Fingerprint::from_bytes([7; 16])
}

fn reserve(store: &Store, id: &str) -> Result<Reserve, Error> {
    store.reserve(&key(id), request())
}

fn reserve_fresh(store: &Store, id: &str) -> keyonce::Reservation {
    match reserve(store, id) {
        Ok(Reserve::Fresh(reservation)) => reservation,
        other => panic!("nobody else asked: {other:?}"),
    }
}

/// Asks, and waits for as long as the key is in flight.
fn reserve_waiting(store: &Store, id: &str) -> Result<Reserve, Error> {
    store.reserve_with(&key(id), request(), &ReserveOptions::default().wait(WAIT))
}

/// Gives the other threads a chance in the middle of every sync: after the moment from which on what is written is not
/// covered, and before the sync returns.
fn let_others_in_at_syncs(disk: &SimDisk) {
    let door = loom::sync::atomic::AtomicUsize::new(0);
    disk.on_step(move |step| {
        if step == Step::Sync {
            door.load(loom::sync::atomic::Ordering::Relaxed);
        }
    });
}

/// What somebody was told about a key, which holds after any crash from then on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Told {
    /// It was reserved at least.
    Known,
    /// Its response was stored.
    Done,
}

/// Every different image that a thread saw when it was told something; shared by all executions of a model.
#[derive(Clone, Default)]
struct Book {
    seen: Arc<Mutex<BTreeMap<Line, SimDisk>>>,
}

/// Who was told what, and all that had been synced then.
type Line = (Vec<u8>, &'static str, Told);

impl Book {
    /// To be called before anything else that the model checker sees happens on this thread.
    fn note(&self, disk: &SimDisk, id: &'static str, told: Told) {
        let image = disk.crash_all_old();
        let mut synced = image.read(SEGMENT, usize::MAX).expect("the segment was there before the first answer");
        synced.truncate(synced.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1));
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.entry((synced, id, told)).or_insert(image);
    }

    /// Opens every image, and looks for what was told.
    fn check(&self, name: &str) {
        let seen = std::mem::take(&mut *self.seen.lock().unwrap_or_else(PoisonError::into_inner));
        assert!(!seen.is_empty(), "{name}: nobody was told anything");
        say(&format!("{name}: {} different images opened", seen.len()));
        for ((_, id, told), image) in seen {
            explore_alone(move || {
                let store = open(&image.kill(), Durability::PowerLoss, &ManualClock::default());
                let found = store.peek(&key(id)).expect("a sound image").map(|info| info.state);
                match told {
                    Told::Known => assert!(found.is_some(), "{id} was told to be known, and a power loss forgets it"),
                    Told::Done => {
                        assert_eq!(found, Some(KeyState::Done), "{id} was told to be done, and a power loss undoes it");
                        let replay = reserve(&store, id).expect("a sound image");
                        assert!(is_replay(&replay), "{replay:?}");
                    }
                }
            });
        }
    }
}

/// The checker's types work inside a model only; this one has one thread, so one execution.
fn explore_alone(work: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.max_branches = builder.max_branches.max(BRANCHES_MAX);
    builder.check(work);
}

fn is_replay(answer: &Reserve) -> bool {
    match answer {
        Reserve::Replay(response) => {
            assert_eq!(response.body(), Body::Kept(RESPONSE));
            true
        }
        _ => false,
    }
}

/// Notes what `answer` promises; the reservation lives on in it.
fn note_answer(book: &Book, disk: &SimDisk, id: &'static str, answer: &Reserve) {
    match answer {
        Reserve::Fresh(_) | Reserve::InFlight(_) | Reserve::Interrupted(_) => book.note(disk, id, Told::Known),
        Reserve::Replay(_) => book.note(disk, id, Told::Done),
        Reserve::Mismatch(_) | Reserve::TooOld(_) => panic!("nobody may be told {answer:?}"),
    }
}

#[test]
fn of_two_threads_that_reserve_one_key_exactly_one_is_fresh() {
    explore("two threads, one key", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let other = {
            let store = store.clone();
            thread::spawn(move || reserve(&store, "a"))
        };
        let answers = [reserve(&store, "a"), other.join().expect("the thread ended well")];
        let answers = answers.map(|answer| answer.expect("nothing fails here"));
        let fresh = answers.iter().filter(|answer| matches!(answer, Reserve::Fresh(_))).count();
        let in_flight = answers.iter().filter(|answer| matches!(answer, Reserve::InFlight(_))).count();
        assert_eq!((fresh, in_flight), (1, 1), "{answers:?}");
    });
}

#[test]
fn what_three_threads_are_told_about_two_keys_survives_a_power_loss() {
    let name = "three threads, two keys, PowerLoss";
    let book = Book::default();
    let noted = book.clone();
    explore(name, move || {
        let (store, disk) = fresh_store(Durability::PowerLoss);
        let_others_in_at_syncs(&disk);
        let ask = |id: &'static str| {
            let (store, disk, book) = (store.clone(), disk.clone(), noted.clone());
            move || {
                let answer = reserve(&store, id).expect("nothing fails here");
                note_answer(&book, &disk, id, &answer);
                answer
            }
        };
        let threads = [thread::spawn(ask("a")), thread::spawn(ask("b"))];
        let third = ask("b")();
        let [a, b] = threads.map(|thread| thread.join().expect("the thread ended well"));
        assert!(matches!(a, Reserve::Fresh(_)), "{a:?}");
        let fresh = [&b, &third].iter().filter(|answer| matches!(answer, Reserve::Fresh(_))).count();
        assert_eq!(fresh, 1, "{b:?} {third:?}");
    });
    book.check(name);
}

#[test]
fn a_response_is_replayed_and_completed_only_once_it_survives_a_power_loss() {
    let name = "a completion against a reserve, PowerLoss";
    let book = Book::default();
    let noted = book.clone();
    explore(name, move || {
        let (store, disk) = fresh_store(Durability::PowerLoss);
        let_others_in_at_syncs(&disk);
        let reservation = reserve_fresh(&store, "a");
        let owner = {
            let (disk, book) = (disk.clone(), noted.clone());
            thread::spawn(move || {
                assert_eq!(reservation.complete(RESPONSE).expect("nothing fails here"), Completion::Done);
                book.note(&disk, "a", Told::Done);
            })
        };
        let answer = reserve(&store, "a").expect("nothing fails here");
        note_answer(&noted, &disk, "a", &answer);
        assert!(is_replay(&answer) || matches!(answer, Reserve::InFlight(_)), "{answer:?}");
        owner.join().expect("the thread ended well");
    });
    book.check(name);
}

#[test]
fn a_waiter_is_woken_by_the_completion_and_replays_it() {
    explore("a waiter against a completion", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let owner = thread::spawn(move || reservation.complete(RESPONSE).expect("nothing fails here"));
        let answer = reserve_waiting(&store, "a").expect("nothing fails here");
        assert!(is_replay(&answer), "{answer:?}");
        assert_eq!(owner.join().expect("the thread ended well"), Completion::Done);
    });
}

#[test]
fn a_waiter_is_woken_by_the_release_and_becomes_the_owner() {
    explore("a waiter against a release", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let owner = thread::spawn(move || reservation.release().expect("nothing fails here"));
        let answer = reserve_waiting(&store, "a").expect("nothing fails here");
        assert!(matches!(answer, Reserve::Fresh(_)), "{answer:?}");
        assert_eq!(owner.join().expect("the thread ended well"), Completion::Done);
    });
}

#[test]
fn of_two_waiters_a_release_makes_one_the_owner_and_its_completion_wakes_the_other() {
    explore("two waiters against a release", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let wait = |store: Store| match reserve_waiting(&store, "a").expect("nothing fails here") {
            Reserve::Fresh(reservation) => {
                assert_eq!(reservation.complete(RESPONSE).expect("nothing fails here"), Completion::Done);
                true
            }
            answer => {
                assert!(is_replay(&answer), "{answer:?}");
                false
            }
        };
        let other = {
            let store = store.clone();
            thread::spawn(move || wait(store))
        };
        let owner = thread::spawn(move || reservation.release().expect("nothing fails here"));
        let owned = [wait(store.clone()), other.join().expect("the thread ended well")];
        assert_eq!(owned.iter().filter(|owned| **owned).count(), 1);
        assert_eq!(owner.join().expect("the thread ended well"), Completion::Done);
    });
}

#[test]
fn a_waiter_is_woken_by_the_drop_and_told_interrupted() {
    explore("a waiter against a drop", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let owner = thread::spawn(move || drop(reservation));
        let answer = reserve_waiting(&store, "a").expect("nothing fails here");
        assert!(matches!(answer, Reserve::Interrupted(_)), "{answer:?}");
        owner.join().expect("the thread ended well");
    });
}

#[test]
fn a_waiter_is_woken_by_the_end_of_the_lease() {
    explore("a waiter against the clock", || {
        let clock = ManualClock::default();
        let store = open(&SimDisk::new(), Durability::ProcessCrash, &clock);
        let reservation = reserve_fresh(&store, "a");
        let moved = thread::spawn(move || clock.advance(LEASE));
        let answer = reserve_waiting(&store, "a").expect("nothing fails here");
        assert!(matches!(answer, Reserve::Interrupted(_)), "{answer:?}");
        moved.join().expect("the thread ended well");
        drop(reservation);
    });
}

#[test]
fn of_a_take_over_and_a_late_completion_one_acts() {
    explore("a take-over against a late completion", || {
        let clock = ManualClock::default();
        let store = open(&SimDisk::new(), Durability::ProcessCrash, &clock);
        let reservation = reserve_fresh(&store, "a");
        let late_token = reservation.token();
        clock.advance(LEASE);
        let Ok(Reserve::Interrupted(interrupted)) = reserve(&store, "a") else { panic!("the lease has lapsed") };
        let late = thread::spawn(move || reservation.complete(RESPONSE).expect("nothing fails here"));
        let answer = interrupted.take_over().expect("nothing fails here");
        let late = late.join().expect("the thread ended well");
        match &answer {
            Reserve::Fresh(next) => {
                assert_eq!((late, next.attempt_view().number()), (Completion::Superseded, 2));
                assert!(next.token() > late_token, "tokens grow");
            }
            _ => assert!(is_replay(&answer) && late == Completion::Done, "{answer:?}, and the owner was told {late:?}"),
        }
    });
}

#[test]
fn of_two_take_overs_one_acts() {
    explore("two take-overs", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        reserve_fresh(&store, "a").interrupt();
        let take_over = |answer| match answer {
            Ok(Reserve::Interrupted(interrupted)) => interrupted.take_over().expect("nothing fails here"),
            other => panic!("the key is interrupted: {other:?}"),
        };
        let [mine, theirs] = [reserve(&store, "a"), reserve(&store, "a")];
        let other = thread::spawn(move || take_over(theirs));
        let answers = [take_over(mine), other.join().expect("the thread ended well")];
        let fresh = answers.iter().filter(|answer| matches!(answer, Reserve::Fresh(_))).count();
        let in_flight = answers.iter().filter(|answer| matches!(answer, Reserve::InFlight(_))).count();
        assert_eq!((fresh, in_flight), (1, 1), "{answers:?}");
    });
}

/// The first sync of the model fails; the second would say "ok", as on ext4.
#[test]
fn after_a_failed_sync_everyone_gets_an_error_and_nobody_hangs() {
    explore("three threads against a failing sync", || {
        let (store, disk) = fresh_store(Durability::PowerLoss);
        let door = loom::sync::atomic::AtomicUsize::new(0);
        let failed = AtomicU64::new(0);
        let failing = disk.clone();
        disk.on_step(move |step| {
            if step == Step::Sync {
                door.load(loom::sync::atomic::Ordering::Relaxed);
                if failed.fetch_add(1, Ordering::Relaxed) == 0 {
                    failing.fail_at(failing.steps(), EIO);
                }
            }
        });
        let ask = |id: &'static str| {
            let store = store.clone();
            move || reserve(&store, id).map(|answer| panic!("told {answer:?} after a failed sync"))
        };
        let threads = [thread::spawn(ask("a")), thread::spawn(ask("b"))];
        let third = ask("b")();
        let [a, b] = threads.map(|thread| thread.join().expect("the thread ended well"));
        for told in [a, b, third] {
            let error: Error = told.map(|never: ()| never).expect_err("the sync failed");
            assert_eq!(error.kind(), ErrorKind::Poisoned, "{error}");
        }
        // What the hook holds of the disk would keep it alive for ever.
        disk.on_step(|_| {});
    });
}

#[test]
fn closing_the_store_wakes_its_waiters() {
    explore("a waiter against close", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let closer = {
            let store = store.clone();
            thread::spawn(move || store.close(Duration::ZERO).expect("nothing fails here"))
        };
        let answer = reserve_waiting(&store, "a");
        let error =
            answer.map(|answer| panic!("told {answer:?}, and nobody ended the reservation")).map(|never: ()| never);
        assert_eq!(error.expect_err("the store was closed").kind(), ErrorKind::Closed);
        assert_eq!(closer.join().expect("the thread ended well").unfinished, 1);
        drop(reservation);
    });
}

#[test]
fn who_is_told_fresh_while_the_store_closes_has_a_record_on_the_disk() {
    let name = "a reserve against close, PowerLoss";
    let book = Book::default();
    let noted = book.clone();
    explore(name, move || {
        let (store, disk) = fresh_store(Durability::PowerLoss);
        let closer = {
            let store = store.clone();
            thread::spawn(move || store.close(Duration::ZERO).expect("nothing fails here"))
        };
        match reserve(&store, "a") {
            Ok(answer) => note_answer(&noted, &disk, "a", &answer),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Closed, "{error}"),
        }
        closer.join().expect("the thread ended well");
    });
    book.check(name);
}

// Tasks: threads of the model that sleep until their waker is called.

#[derive(Default)]
struct Sleeper {
    woken: loom::sync::Mutex<bool>,
    wakes: loom::sync::Condvar,
}

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        *self.woken.lock().expect("no thread panics") = true;
        self.wakes.notify_one();
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let sleeper = Arc::<Sleeper>::default();
    let waker = Waker::from(Arc::clone(&sleeper));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        let mut woken = sleeper.woken.lock().expect("no thread panics");
        while !std::mem::take(&mut *woken) {
            woken = sleeper.wakes.wait(woken).expect("no thread panics");
        }
    }
}

/// A future that asks, and waits for as long as the key is in flight.
fn waiting(store: &Store, id: &str) -> Pin<Box<impl Future<Output = Result<Reserve, Error>> + Send + use<>>> {
    Box::pin(store.reserve_with_async(&key(id), request(), &ReserveOptions::default().wait(WAIT)))
}

fn poll_once<F: Future>(future: &mut Pin<Box<F>>) -> Poll<F::Output> {
    future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// Nobody is held on to once every handle is gone, and the key may be had.
fn nothing_is_left(store: &Store) {
    let stats = store.stats();
    assert_eq!((stats.guards, stats.waiting), (0, 0), "somebody is held on to");
}

#[test]
fn a_waiting_task_is_woken_by_the_completion_and_replays_it() {
    explore("a task against a completion", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let owner = thread::spawn(move || reservation.complete(RESPONSE).expect("nothing fails here"));
        let answer = block_on(waiting(&store, "a")).expect("nothing fails here");
        assert!(is_replay(&answer), "{answer:?}");
        assert_eq!(owner.join().expect("the thread ended well"), Completion::Done);
        nothing_is_left(&store);
    });
}

#[test]
fn a_completion_wakes_every_waiting_task() {
    explore("two tasks against a completion", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let other = {
            let store = store.clone();
            thread::spawn(move || block_on(waiting(&store, "a")).expect("nothing fails here"))
        };
        let owner = thread::spawn(move || reservation.complete(RESPONSE).expect("nothing fails here"));
        let answers =
            [block_on(waiting(&store, "a")).expect("nothing fails here"), other.join().expect("the thread ended well")];
        assert!(answers.iter().all(is_replay), "{answers:?}");
        assert_eq!(owner.join().expect("the thread ended well"), Completion::Done);
        nothing_is_left(&store);
    });
}

#[test]
fn a_waiting_task_is_woken_by_the_drop_and_told_interrupted() {
    explore("a task against a drop", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let owner = thread::spawn(move || drop(reservation));
        let answer = block_on(waiting(&store, "a")).expect("nothing fails here");
        assert!(matches!(answer, Reserve::Interrupted(_)), "{answer:?}");
        owner.join().expect("the thread ended well");
        nothing_is_left(&store);
    });
}

#[test]
fn a_hand_over_to_a_future_that_is_dropped_at_that_moment_passes_on() {
    explore("a future that is dropped against a release", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let mut gives_up = waiting(&store, "a");
        assert!(poll_once(&mut gives_up).is_pending());
        let owner = thread::spawn(move || reservation.release().expect("nothing fails here"));
        drop(gives_up);
        // Whoever comes next gets it: nobody has begun.
        let answer = reserve_waiting(&store, "a").expect("nothing fails here");
        assert!(matches!(&answer, Reserve::Fresh(next) if next.attempt() == 1), "{answer:?}");
        assert_eq!(owner.join().expect("the thread ended well"), Completion::Done);
        drop(answer);
        nothing_is_left(&store);
    });
}

#[test]
fn of_two_waiting_futures_one_is_dropped_and_the_other_becomes_the_owner() {
    explore("two futures, one dropped, against a release", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let (mut gives_up, mut stays) = (waiting(&store, "a"), waiting(&store, "a"));
        assert!(poll_once(&mut gives_up).is_pending() && poll_once(&mut stays).is_pending());
        let owner = thread::spawn(move || reservation.release().expect("nothing fails here"));
        let dropper = thread::spawn(move || drop(gives_up));
        let answer = block_on(stays).expect("nothing fails here");
        assert!(matches!(&answer, Reserve::Fresh(next) if next.attempt() == 1), "{answer:?}");
        assert_eq!(owner.join().expect("the thread ended well"), Completion::Done);
        dropper.join().expect("the thread ended well");
        drop(answer);
        nothing_is_left(&store);
    });
}

#[test]
fn of_two_waiting_tasks_a_release_makes_one_the_owner_and_its_completion_wakes_the_other() {
    explore("two tasks against a release", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let ask = |store: &Store| match block_on(waiting(store, "a")).expect("nothing fails here") {
            Reserve::Fresh(reservation) => {
                assert_eq!(reservation.complete(RESPONSE).expect("nothing fails here"), Completion::Done);
                true
            }
            answer => {
                assert!(is_replay(&answer), "{answer:?}");
                false
            }
        };
        let other = {
            let store = store.clone();
            thread::spawn(move || ask(&store))
        };
        let owner = thread::spawn(move || reservation.release().expect("nothing fails here"));
        let owned = [ask(&store), other.join().expect("the thread ended well")];
        assert_eq!(owned.iter().filter(|owned| **owned).count(), 1);
        assert_eq!(owner.join().expect("the thread ended well"), Completion::Done);
        nothing_is_left(&store);
    });
}

#[test]
fn what_a_thread_and_two_tasks_are_told_survives_a_power_loss() {
    let name = "a thread and two tasks, PowerLoss";
    let book = Book::default();
    let noted = book.clone();
    explore_with_at_most(2, name, move || {
        let (store, disk) = fresh_store(Durability::PowerLoss);
        let_others_in_at_syncs(&disk);
        let ask = |id: &'static str| {
            let (store, disk, book) = (store.clone(), disk.clone(), noted.clone());
            move || {
                let answer = block_on(store.reserve_async(&key(id), request())).expect("nothing fails here");
                note_answer(&book, &disk, id, &answer);
                assert!(matches!(answer, Reserve::Fresh(_)), "{answer:?}");
            }
        };
        let tasks = [thread::spawn(ask("a")), thread::spawn(ask("b"))];
        let answer = reserve(&store, "c").expect("nothing fails here");
        note_answer(&noted, &disk, "c", &answer);
        for task in tasks {
            task.join().expect("the thread ended well");
        }
        drop(answer);
        nothing_is_left(&store);
    });
    book.check(name);
}

#[test]
fn after_a_failed_sync_tasks_get_an_error_and_nobody_hangs() {
    explore_with_at_most(2, "a thread and two tasks against a failing sync", || {
        let (store, disk) = fresh_store(Durability::PowerLoss);
        let door = loom::sync::atomic::AtomicUsize::new(0);
        let failed = AtomicU64::new(0);
        let failing = disk.clone();
        disk.on_step(move |step| {
            if step == Step::Sync {
                door.load(loom::sync::atomic::Ordering::Relaxed);
                if failed.fetch_add(1, Ordering::Relaxed) == 0 {
                    failing.fail_at(failing.steps(), EIO);
                }
            }
        });
        let ask = |id: &'static str| {
            let store = store.clone();
            move || block_on(store.reserve_async(&key(id), request())).map(|answer| panic!("told {answer:?}"))
        };
        let tasks = [thread::spawn(ask("a")), thread::spawn(ask("b"))];
        let here = reserve(&store, "c").map(|answer| panic!("told {answer:?} after a failed sync"));
        let [a, b] = tasks.map(|task| task.join().expect("the thread ended well"));
        for told in [a, b, here] {
            let error: Error = told.map(|never: ()| never).expect_err("the sync failed");
            assert_eq!(error.kind(), ErrorKind::Poisoned, "{error}");
        }
        disk.on_step(|_| {});
        nothing_is_left(&store);
    });
}

#[test]
fn a_renewal_that_meets_a_move_of_the_clock_lapses_in_its_time_all_the_same() {
    explore("a renewal against the clock", || {
        let clock = ManualClock::default();
        let store = open(&SimDisk::new(), Durability::ProcessCrash, &clock);
        let reservation = reserve_fresh(&store, "a");
        let renewer = thread::spawn(move || {
            assert_eq!(reservation.renew(LEASE * 2).expect("nothing fails here"), Completion::Done);
            reservation
        });
        clock.advance(LEASE);
        let reservation = renewer.join().expect("the thread ended well");
        let mut waits = waiting(&store, "a");
        assert!(poll_once(&mut waits).is_pending(), "it was renewed");
        clock.advance(LEASE * 2);
        let Poll::Ready(answer) = poll_once(&mut waits) else { panic!("the lease has lapsed, and nobody looked") };
        assert!(matches!(answer, Ok(Reserve::Interrupted(_))), "{answer:?}");
        drop(reservation);
    });
}

#[test]
fn a_waiter_that_comes_while_the_clock_moves_is_told_when_its_time_is_over() {
    explore("a waiter against the clock", || {
        let clock = ManualClock::default();
        let store = open(&SimDisk::new(), Durability::ProcessCrash, &clock);
        let long = ReserveOptions::default().lease(WAIT);
        let Ok(Reserve::Fresh(reservation)) = store.reserve_with(&key("a"), request(), &long) else { panic!("new") };
        let wait = |at_most| {
            Box::pin(store.reserve_with_async(&key("a"), request(), &ReserveOptions::default().wait(at_most)))
        };
        let mut first = wait(LEASE);
        assert!(poll_once(&mut first).is_pending());
        let mut second = wait(LEASE * 2);
        let waiter = thread::spawn(move || {
            let pending = poll_once(&mut second).is_pending();
            (second, pending)
        });
        clock.advance(LEASE);
        let (mut second, pending) = waiter.join().expect("the thread ended well");
        assert!(pending && poll_once(&mut first).is_ready());
        clock.advance(LEASE * 2);
        assert!(poll_once(&mut second).is_ready(), "its time is over, and nobody looked");
        drop((first, second));
        drop(reservation);
        nothing_is_left(&store);
    });
}

#[test]
fn what_is_written_while_the_clock_moves_is_synced_in_its_time() {
    explore("a write against the clock, Interval", || {
        let clock = ManualClock::default();
        let disk = SimDisk::new();
        let store = open(&disk, Durability::Interval(LEASE * 2), &clock);
        let long = ReserveOptions::default().lease(WAIT);
        let Ok(Reserve::Fresh(reservation)) = store.reserve_with(&key("a"), request(), &long) else { panic!("new") };
        // All is synced, and what is due next is the end of a wait.
        clock.advance(LEASE * 2);
        let mut waits =
            Box::pin(store.reserve_with_async(&key("a"), request(), &ReserveOptions::default().wait(LEASE)));
        assert!(poll_once(&mut waits).is_pending());
        let writer = {
            let store = store.clone();
            thread::spawn(move || store.reserve_with(&key("b"), request(), &long))
        };
        clock.advance(LEASE);
        let written = writer.join().expect("the thread ended well");
        assert!(poll_once(&mut waits).is_ready());
        clock.advance(LEASE * 2);
        let synced = disk.crash_all_old().read(SEGMENT, usize::MAX).expect("it is there");
        assert!(synced == disk.read(SEGMENT, usize::MAX).expect("it is there"), "a record is not synced in its time");
        drop((waits, written, reservation));
    });
}
