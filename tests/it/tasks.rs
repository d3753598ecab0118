//! Tasks: futures of the store, and executors of this file's own that poll them.
//!
//! [`scene`] holds what a future waits for in the hands of the test; [`dropped`] drops each future at every point at
//! which it waits; [`wakers`] does with wakers what an executor may do.

mod dropped;
mod scene;
mod wakers;

use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use keyonce::testing::{self, ManualClock, SimDisk, Step};
use keyonce::{
    Ask, Attempt, Body, Completion, Durability, Failed, InFlight, Key, Options, Reservation, Reserve, ReserveOptions,
    Retention, Store, Token,
};

use self::scene::{Call, SYNCER, Scene, Seen, kept, seen};
use crate::place::{LEASE, MS, as_fresh, as_interrupted, as_replay, fresh, key, request, tell};

const RESPONSE: &[u8] = b"paid 9.99";
/// Longer than anything here takes by the clock of the machine; who waits so long was never woken.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// Longer than anything here takes by the store's clock.
const LONG: Duration = Duration::from_secs(1 << 20);

/// The time by the clock of the machine, for what a test measures and for its patience.
#[expect(clippy::disallowed_methods, reason = "what is measured is how long the machine takes")]
pub(crate) fn machine_now() -> Instant {
    Instant::now()
}

// Executors.

struct Unparks(Thread);

impl Wake for Unparks {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future on this thread.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unparks(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

/// A waker that counts.
#[derive(Debug, Default)]
pub(crate) struct Wakes(AtomicU64);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Wakes {
    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

/// Polls once, for a task that is woken by `wakes`.
pub(crate) fn poll_for<F: Future + ?Sized>(future: &mut Pin<Box<F>>, wakes: &Arc<Wakes>) -> Poll<F::Output> {
    future.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::clone(wakes))))
}

/// Polls once, and wakes nobody later.
pub(crate) fn poll<F: Future + ?Sized>(future: &mut Pin<Box<F>>) -> Poll<F::Output> {
    future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// What a future has come to that should be ready by now.
#[track_caller]
pub(crate) fn ready<F: Future + ?Sized>(future: &mut Pin<Box<F>>) -> F::Output {
    match poll(future) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("nobody answered it"),
    }
}

/// Runs it on a thread of its own, and fails if that never comes to an end.
pub(crate) fn ends<T: Send + 'static>(what: impl FnOnce() -> T + Send + 'static) -> T {
    let (tell, told) = mpsc::channel();
    let thread = thread::spawn(move || tell.send(what()));
    match told.recv_timeout(PATIENCE) {
        Ok(output) => output,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("it never came to an end"),
        Err(mpsc::RecvTimeoutError::Disconnected) => std::panic::resume_unwind(thread.join().unwrap_err()),
    }
}

// The store on a simulated disk.

pub(crate) fn options(clock: &ManualClock) -> Options {
    Options::new()
        .durability(Durability::ProcessCrash)
        .lease(LEASE)
        .retention(Retention::new(Duration::from_secs(3600), 0.1))
        .response_bytes_max(6000)
        .clock(Arc::new(clock.clone()))
}

/// A store on a disk in memory that syncs for nobody.
pub(crate) fn quick_store() -> (Store, SimDisk, ManualClock) {
    let (disk, clock) = (SimDisk::new(), ManualClock::default());
    (testing::open(disk.clone(), options(&clock), 1).unwrap(), disk, clock)
}

/// As long as anybody may want to wait.
pub(crate) fn waiting() -> ReserveOptions {
    ReserveOptions::new().wait(LONG)
}

pub(crate) fn wait(store: &Store, id: &str) -> Pin<Box<impl Future<Output = Result<Reserve, keyonce::Error>> + use<>>> {
    Box::pin(store.reserve_with_async(&key(id), request(), &waiting()))
}

// A task never blocks its thread.

/// Every sync stands still, whoever makes it; only the store's own threads may be caught by that.
#[test]
fn no_poll_waits_for_a_sync() {
    let scene = Scene::new();
    let mut guards: Vec<_> = (0..4).map(|n| fresh(&scene.store, &key(format!("held-{n}")))).collect();
    drop(fresh(&scene.store, &key("interrupted")));
    let stopped = as_interrupted(scene.store.reserve(&key("interrupted"), request()).unwrap());
    let token = fresh(&scene.store, &key("detached")).detach(LEASE).unwrap();
    scene.hold_syncs_back();
    let door = Arc::clone(&scene.stage);
    scene.disk.on_step(move |step| {
        if step == Step::Sync {
            assert_eq!(thread::current().name(), Some(SYNCER), "a task syncs");
            door.until(|cues| cues.open.then_some(()));
        }
    });
    let store = &scene.store;
    let mut next = || guards.pop().unwrap();
    let keeps = next();
    let batch = ["x", "y", "x"].map(|id| Ask::new(&key(id), request()));
    let mut calls: Vec<Call> = vec![
        kept(store.reserve_async(&key("new"), request())),
        kept(store.reserve_batch_async(&batch)),
        kept(next().complete_async(RESPONSE)),
        kept(next().complete_without_body_async(b"")),
        kept(store.complete_batch_async([(next(), RESPONSE.to_vec())])),
        kept(keeps.save_checkpoint_async(b"half")),
        kept(keeps.renew_async(LEASE * 1000)),
        kept(stopped.take_over_async()),
        kept(store.reattach_async(&key("detached"), token)),
        kept(store.forget_async(&key("interrupted"), "")),
        kept(store.peek_async(&key("new"))),
        kept(store.sync_async()),
        kept(store.once_async(&key("once"), request(), |_| async { Ok::<_, Failed<std::io::Error>>(Vec::new()) })),
    ];
    for (n, call) in calls.iter_mut().enumerate() {
        assert!(scene.poll(call).is_pending(), "call {n}");
    }
    scene.let_all_through();
    for (n, call) in calls.iter_mut().enumerate() {
        // Whatever came later may need a sync of its own, which nobody holds back any more.
        scene.disk.on_step(|_| {});
        while scene.poll(call).is_pending() {
            assert!(n > 0);
        }
    }
}

/// At ProcessCrash a task waits for nothing but room in the log, which the store's helper makes.
#[test]
fn calls_that_wait_for_room_in_the_log_can_be_dropped() {
    const CALLS: u32 = 60_000;
    let (place, clock) = (tempfile::tempdir().unwrap(), ManualClock::default());
    let store = Store::open(place.path().join("store"), options(&clock)).unwrap();
    let id = |n: u32| format!("{n}-{}", "k".repeat(200));
    let (mut waited, mut told) = ([0; 2], 0);
    for n in 0..CALLS {
        let mut call = Box::pin(store.reserve_async(&key(id(n)), request()));
        match poll(&mut call) {
            // Dropped; nobody heard of it.
            Poll::Pending => {
                waited[0] += 1;
                drop(call);
                assert_eq!(seen(&store, &id(n)), Seen::Free);
                // The helper makes room sooner where it gets a turn.
                std::thread::yield_now();
            }
            Poll::Ready(answer) => {
                let mut call = Box::pin(as_fresh(answer.unwrap()).complete_async(RESPONSE));
                let pending = poll(&mut call).is_pending();
                waited[1] += u32::from(pending);
                drop(call);
                told += u32::from(!pending);
            }
        }
        if waited.iter().all(|waited| *waited >= 20) {
            break;
        }
    }
    tell(&format!("dropped while they waited for room: {} reserves, {} completions", waited[0], waited[1]));
    assert!(waited.iter().all(|waited| *waited > 0), "nobody ever waited for room");
    // What a dropped guard could not say at once is said soon.
    let deadline = machine_now() + PATIENCE;
    while store.stats().guards > 0 {
        assert!(machine_now() < deadline, "a guard lives on that nobody holds");
        thread::yield_now();
    }
    let stats = store.stats();
    assert_eq!((stats.waiting, stats.completed), (0, u64::from(told)));
    // And who waits for room gets it.
    for n in 0..2000 {
        let guard =
            as_fresh(block_on(store.reserve_async(&key(format!("more-{n}-{}", "k".repeat(200))), request())).unwrap());
        assert_eq!(block_on(guard.complete_async(&[7; 2000])).unwrap(), Completion::Done);
    }
}

// Many at once.

/// M1, with tasks: 64 on four threads.
#[test]
fn of_64_tasks_at_a_barrier_one_owns_the_key_in_every_round() {
    const TASKS: usize = 64;
    const THREADS: usize = 4;
    let rounds = if cfg!(debug_assertions) { 500 } else { 10_000 };
    let (store, _, _) = quick_store();
    let barrier = Arc::new(Barrier::new(THREADS));
    let fresh_in = Arc::new((0..rounds).map(|_| AtomicU64::new(0)).collect::<Vec<_>>());
    let threads = [(); THREADS].map(|()| {
        let (store, barrier, fresh_in) = (store.clone(), Arc::clone(&barrier), Arc::clone(&fresh_in));
        thread::spawn(move || {
            for (round, fresh) in fresh_in.iter().enumerate() {
                let key = key(format!("{round}"));
                let mut tasks: Vec<_> = (0..TASKS / THREADS)
                    .map(|_| Box::pin(store.reserve_with_async(&key, request(), &waiting())))
                    .collect();
                barrier.wait();
                let mut owner = None;
                for task in &mut tasks {
                    if let Poll::Ready(answer) = poll(task) {
                        fresh.fetch_add(1, Ordering::SeqCst);
                        owner = Some(as_fresh(answer.unwrap()));
                        break;
                    }
                }
                barrier.wait();
                assert_eq!(fresh.load(Ordering::SeqCst), 1, "round {round}");
                if let Some(owner) = owner {
                    assert_eq!(owner.complete(RESPONSE).unwrap(), Completion::Done);
                }
                barrier.wait();
            }
        })
    });
    for thread in threads {
        thread.join().unwrap();
    }
    let stats = store.stats();
    assert_eq!((stats.fresh, stats.guards, stats.waiting), (rounds as u64, 0, 0));
}

#[test]
fn a_thousand_tasks_are_woken_once_each_by_the_completion() {
    const TASKS: usize = 1000;
    let bound = if cfg!(debug_assertions) { Duration::from_secs(5) } else { Duration::from_millis(50) };
    let (store, _, _) = quick_store();
    let guard = fresh(&store, &key("k"));
    let wakes = Arc::<Wakes>::default();
    let mut tasks: Vec<_> = (0..TASKS).map(|_| wait(&store, "k")).collect();
    assert!(tasks.iter_mut().all(|task| poll_for(task, &wakes).is_pending()));
    // A poll that was not asked for costs nothing.
    assert!(tasks.iter_mut().all(|task| poll_for(task, &wakes).is_pending()));
    assert_eq!((store.stats().waiting, wakes.count()), (1000, 0));
    let begun = machine_now();
    assert_eq!(guard.complete(RESPONSE).unwrap(), Completion::Done);
    assert_eq!(wakes.count(), 1000);
    for task in &mut tasks {
        assert_eq!(as_replay(ready(task).unwrap()).body(), Body::Kept(RESPONSE));
    }
    let took = begun.elapsed();
    tell(&format!(
        "a thousand tasks were answered {took:?} after the completion began, with {} wake-ups",
        wakes.count()
    ));
    assert!(took < bound, "{took:?}");
    assert_eq!((store.stats().waiting, wakes.count()), (0, 1000));
}

/// At PowerLoss each is woken by the completion, and by the one sync that its answer waits for.
#[test]
fn a_thousand_tasks_share_the_sync_of_the_completion() {
    const TASKS: usize = 1000;
    let scene = Scene::new();
    let guard = fresh(&scene.store, &key("k"));
    let wakes = Arc::<Wakes>::default();
    let mut tasks: Vec<_> = (0..TASKS).map(|_| wait(&scene.store, "k")).collect();
    assert!(tasks.iter_mut().all(|task| poll_for(task, &wakes).is_pending()));
    scene.hold_syncs_back();
    let mut completion = Box::pin(guard.complete_async(RESPONSE));
    assert!(scene.poll(&mut completion).is_pending());
    assert!(tasks.iter_mut().all(|task| poll_for(task, &wakes).is_pending()), "the response is not durable yet");
    let syncs = scene.store.stats().syncs;
    scene.let_all_through();
    assert!(scene.poll(&mut completion).is_ready());
    assert_eq!((scene.store.stats().syncs, wakes.count()), (syncs + 2, 2000));
    for task in &mut tasks {
        assert_eq!(as_replay(ready(task).unwrap()).body(), Body::Kept(RESPONSE));
    }
}

#[test]
fn a_task_gives_up_at_its_time_and_not_before() {
    let (store, _, clock) = quick_store();
    let guard = as_fresh(store.reserve_with(&key("k"), request(), &ReserveOptions::new().lease(LEASE * 9)).unwrap());
    let wakes = Arc::<Wakes>::default();
    let with = ReserveOptions::new().wait(LEASE);
    let mut tasks: Vec<_> = (0..3).map(|_| Box::pin(store.reserve_with_async(&key("k"), request(), &with))).collect();
    assert!(tasks.iter_mut().all(|task| poll_for(task, &wakes).is_pending()));
    clock.advance(LEASE - MS);
    assert_eq!(wakes.count(), 0);
    clock.advance(MS);
    assert_eq!(wakes.count(), 3);
    for task in &mut tasks {
        let Reserve::InFlight(in_flight) = ready(task).unwrap() else { panic!("the owner is at work") };
        assert_eq!(in_flight.retry_after(), LEASE * 8);
    }
    assert_eq!(store.stats().waiting, 0);
    drop(guard);
}

#[test]
fn a_task_gives_up_by_the_clock_of_the_machine_too() {
    let place = tempfile::tempdir().unwrap();
    let open = Options::new().durability(Durability::ProcessCrash).retention(Retention::new(LEASE, 0.1));
    let store = Store::open(place.path().join("store"), open).unwrap();
    let guard = fresh(&store, &key("k"));
    for wait in [Duration::from_nanos(1), Duration::from_millis(20)] {
        let begun = machine_now();
        let with = ReserveOptions::new().wait(wait);
        let answer = block_on(store.reserve_with_async(&key("k"), request(), &with)).unwrap();
        assert!(matches!(answer, Reserve::InFlight(_)), "{answer:?}");
        // The store's clock counts whole milliseconds.
        assert!(begun.elapsed() + MS >= wait && begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    }
    // Two futures with their times the other way round: each is found when it is due.
    let mut long = Box::pin(store.reserve_with_async(&key("k"), request(), &ReserveOptions::new().wait(LEASE / 2)));
    assert!(poll(&mut long).is_pending());
    let short = store.reserve_with_async(&key("k"), request(), &ReserveOptions::new().wait(MS * 5));
    assert!(matches!(block_on(short).unwrap(), Reserve::InFlight(_)));
    drop((guard, long));
}

// Compile time: every future may be sent to another thread and lives as long as it likes.

fn is_send_and_static<F: Future + Send + 'static>(_: F) {}

/// Never called: it is enough that it compiles.
#[expect(dead_code, reason = "a proof by the compiler")]
fn every_future_is_send_and_static(
    store: &Store,
    key: &Key,
    token: Token,
    with: &ReserveOptions,
    mut guards: impl FnMut() -> Reservation,
    mut in_flight: impl FnMut() -> InFlight,
    mut stopped: impl FnMut() -> keyonce::Interrupted,
) {
    is_send_and_static(store.reserve_async(key, request()));
    is_send_and_static(store.reserve_with_async(key, request(), with));
    is_send_and_static(store.reserve_batch_async(&[Ask::new(key, request())]));
    is_send_and_static(store.complete_batch_async(vec![(guards(), Vec::new())]));
    let work = |_: Attempt| async { Ok::<_, Failed<std::io::Error>>(Vec::new()) };
    is_send_and_static(store.once_async(key, request(), work));
    is_send_and_static(store.once_with_async(key, request(), with, work));
    is_send_and_static(store.reattach_async(key, token));
    is_send_and_static(store.peek_async(key));
    is_send_and_static(store.forget_async(key, "a reason"));
    is_send_and_static(store.sync_async());
    is_send_and_static(store.close_async(LEASE));
    let guard = guards();
    is_send_and_static(guard.renew_async(LEASE));
    is_send_and_static(guard.save_checkpoint_async(b"half"));
    is_send_and_static(guard.complete_async(b"paid"));
    is_send_and_static(guards().complete_without_body_async(b""));
    is_send_and_static(guards().release_async());
    is_send_and_static(guards().detach_async(LEASE));
    let attempt: Attempt = guards().attempt_view();
    is_send_and_static(attempt.renew_async(LEASE));
    is_send_and_static(attempt.save_checkpoint_async(b"half"));
    is_send_and_static(in_flight().wait_async(LEASE));
    is_send_and_static(stopped().take_over_async());
    is_send_and_static(stopped().resolve_async(b"paid"));
    is_send_and_static(stopped().release_async());
}
