//! Tasks: futures of the store, polled by executors of this file's own, dropped at every point at which they wait.
//!
//! What a future waits for is in the hands of the test. [`Scene`] plays the thread that syncs for tasks and lets its
//! syncs through one by one, so that whoever waits for a sync is seen to wait. [`cancelled_everywhere`] polls a future
//! n times and drops it, for every n until it is ready, and each time looks at what became of the key.

use std::any::Any;
use std::fmt::Debug;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Condvar, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, JoinHandle, Thread};
use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk, Step};
use keyonce::{
    Ask, Attempt, Body, Completion, Durability, Failed, InFlight, Key, KeyState, OnInterrupted, Options, Reservation,
    Reserve, ReserveOptions, Retention, Store, Token,
};

use crate::place::{LEASE, MS, as_fresh, as_interrupted, as_replay, fresh, key, other_request, request, tell};

const RESPONSE: &[u8] = b"paid 9.99";
/// Longer than anything here takes by the clock of the machine; who waits so long was never woken.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// Longer than anything here takes by the store's clock.
const LONG: Duration = Duration::from_secs(1 << 20);

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

// A scene: a store at PowerLoss, and the one who syncs for it.

#[derive(Default)]
struct Cues {
    /// The syncing thread has a sync to do.
    syncing: bool,
    /// It stands at the door of the disk.
    at_door: bool,
    let_through: bool,
    /// Nobody holds it back any more.
    open: bool,
    over: bool,
    woken: u64,
}

struct Stage {
    cues: Mutex<Cues>,
    changed: Condvar,
}

impl Stage {
    fn change<T>(&self, change: impl FnOnce(&mut Cues) -> T) -> T {
        let changed = change(&mut self.cues.lock().unwrap());
        self.changed.notify_all();
        changed
    }

    #[track_caller]
    fn until<T>(&self, mut when: impl FnMut(&mut Cues) -> Option<T>) -> T {
        let mut cues = self.cues.lock().unwrap();
        loop {
            if let Some(then) = when(&mut cues) {
                return then;
            }
            let (again, late) = self.changed.wait_timeout(cues, PATIENCE).unwrap();
            assert!(!late.timed_out(), "nobody was woken");
            cues = again;
        }
    }
}

impl Wake for Stage {
    fn wake(self: Arc<Self>) {
        self.change(|cues| cues.woken += 1);
    }
}

struct Scene {
    store: Store,
    disk: SimDisk,
    clock: ManualClock,
    stage: Arc<Stage>,
    syncer: Mutex<Option<JoinHandle<()>>>,
    /// Guards that live through the call that is tried.
    guards: Mutex<Vec<Reservation>>,
    effects: Arc<AtomicU64>,
}

/// The name of the thread whose syncs are held back.
const SYNCER: &str = "syncer";

impl Scene {
    fn new() -> Self {
        let (disk, clock) = (SimDisk::new(), ManualClock::default());
        let store = testing::open(disk.clone(), options(&clock).durability(Durability::PowerLoss), 1).unwrap();
        let stage = Arc::new(Stage { cues: Mutex::default(), changed: Condvar::new() });
        let door = Arc::clone(&stage);
        disk.on_step(move |step| {
            if step == Step::Sync && thread::current().name() == Some(SYNCER) {
                door.change(|cues| cues.at_door = true);
                door.until(|cues| (cues.open || std::mem::take(&mut cues.let_through)).then_some(()));
                door.change(|cues| cues.at_door = false);
            }
        });
        let (syncs, cues) = (store.clone(), Arc::clone(&stage));
        let syncer = thread::Builder::new().name(SYNCER.into()).spawn(move || sync_on_cue(&syncs, &cues)).unwrap();
        Self {
            store,
            disk,
            clock,
            stage,
            syncer: Mutex::new(Some(syncer)),
            guards: Mutex::default(),
            effects: Arc::default(),
        }
    }

    /// From here on a sync is under way that does not end, and that does not cover what is written next.
    fn hold_syncs_back(&self) {
        self.stage.until(|cues| {
            if !cues.at_door && !cues.syncing {
                cues.syncing = true;
                self.stage.changed.notify_all();
            }
            cues.at_door.then_some(())
        });
    }

    /// Lets syncs through until somebody is woken who waits for one.
    #[track_caller]
    fn sync_until_woken(&self, woken: u64) {
        loop {
            self.stage.change(|cues| {
                cues.let_through = true;
                cues.at_door = false;
            });
            let done = self.stage.until(|cues| {
                let stuck = !cues.syncing && cues.woken == woken;
                assert!(!stuck, "all is durable, and who waited was not woken");
                (cues.woken > woken || cues.at_door).then_some(cues.woken > woken)
            });
            if done {
                return;
            }
        }
    }

    fn woken(&self) -> u64 {
        self.stage.cues.lock().unwrap().woken
    }

    /// Nobody is held back any more, and the syncing thread goes.
    fn let_all_through(&self) {
        self.stage.change(|cues| (cues.open, cues.over) = (true, true));
        self.syncer.lock().unwrap().take().unwrap().join().unwrap();
    }

    fn poll<F: Future + ?Sized>(&self, future: &mut Pin<Box<F>>) -> Poll<F::Output> {
        future.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::clone(&self.stage))))
    }

    fn keep(&self, guard: Reservation) {
        self.guards.lock().unwrap().push(guard);
    }

    fn guard(&self) -> Reservation {
        self.guards.lock().unwrap().pop().unwrap()
    }

    fn quickly(&self, id: &str) -> Reservation {
        let quick = ReserveOptions::new().durability(Durability::ProcessCrash);
        as_fresh(self.store.reserve_with(&key(id), request(), &quick).unwrap())
    }
}

/// Syncs, each time it is told to, and what others want then.
fn sync_on_cue(store: &Store, stage: &Stage) {
    let quick = ReserveOptions::new().durability(Durability::ProcessCrash);
    for round in 0.. {
        if stage.until(|cues| (cues.syncing || cues.over).then_some(cues.over)) {
            return;
        }
        // Something that is not durable yet.
        let filler = store.reserve_with(&key(format!("filler-{round}")), request(), &quick);
        if let Ok(Reserve::Fresh(filler)) = filler {
            drop(filler.release());
        }
        let mut sync = Box::pin(store.sync_async());
        drop(poll(&mut sync));
        stage.change(|cues| cues.syncing = false);
    }
}

// The harness.

/// Whatever a call gives, to be dropped when the time has come.
type Kept = Box<dyn Any + Send>;
type Call = Pin<Box<dyn Future<Output = Kept> + Send>>;

fn kept<F: Future<Output: Send + 'static> + Send + 'static>(future: F) -> Call {
    Box::pin(async move { Box::new(future.await) as Kept })
}

/// How far a call came before it was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    Unpolled,
    /// Pending when it was polled for this time.
    Pending(u32),
    /// Ready; its output was dropped, too.
    Ready,
}

/// What is seen of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Free,
    InFlight,
    Detached,
    Interrupted(u32),
    Done,
}

fn seen(store: &Store, id: &str) -> Seen {
    match store.peek(&key(id)).unwrap() {
        None => Seen::Free,
        Some(info) => match info.state {
            KeyState::InFlight if info.detached => Seen::Detached,
            KeyState::InFlight => Seen::InFlight,
            KeyState::Interrupted => Seen::Interrupted(info.attempt),
            KeyState::Done => Seen::Done,
            other => panic!("{other:?}"),
        },
    }
}

/// A call, prepared: the future, and what happens after each time it was pending, if that is not a sync.
struct Tried {
    call: Call,
    cues: Vec<fn(&Scene)>,
}

impl From<Call> for Tried {
    fn from(call: Call) -> Self {
        Self { call, cues: Vec::new() }
    }
}

/// Polls the call `0, 1, 2, ..` times and drops it, until it is ready. `becomes` says for each cut what the key `k` may
/// be then, while the guards live that the scene holds.
fn cancelled_everywhere(name: &str, try_it: impl Fn(&Scene) -> Tried, becomes: impl Fn(Cut) -> Vec<Seen>) -> u32 {
    for polls in 0_u32.. {
        assert!(polls < 30, "{name} is never ready");
        let scene = Scene::new();
        let Tried { mut call, cues } = try_it(&scene);
        let mut cues = cues.into_iter();
        let (mut cut, mut output) = (Cut::Unpolled, None);
        for n in 1..=polls {
            scene.hold_syncs_back();
            let woken = scene.woken();
            match scene.poll(&mut call) {
                Poll::Ready(ready) => {
                    (cut, output) = (Cut::Ready, Some(ready));
                    break;
                }
                Poll::Pending => cut = Cut::Pending(n),
            }
            if n < polls {
                match cues.next() {
                    Some(cue) => cue(&scene),
                    None if scene.woken() > woken => {}
                    None => scene.sync_until_woken(woken),
                }
            }
        }
        drop((call, output));
        check(&scene, &format!("{name}, {cut:?}"), &becomes(cut));
        if cut == Cut::Ready {
            return polls;
        }
    }
    unreachable!()
}

fn check(scene: &Scene, what: &str, allowed: &[Seen]) {
    // A power loss at this moment never makes work run twice.
    let began = scene.effects.load(Ordering::SeqCst);
    if began > 0 && !allowed.contains(&Seen::Free) {
        let lost = testing::open(scene.disk.crash_all_old(), options(&scene.clock), 99).unwrap();
        assert_ne!(seen(&lost, "k"), Seen::Free, "{what}: after a power loss");
    }
    scene.let_all_through();
    let found = seen(&scene.store, "k");
    assert!(allowed.contains(&found), "{what}: the key is {found:?}");
    scene.guards.lock().unwrap().clear();
    let stats = scene.store.stats();
    assert_eq!((stats.guards, stats.waiting), (0, 0), "{what}: somebody is held on to");
    // Nobody is kept from the key for ever, and there is one effect in all.
    let outcome = scene.store.reserve(&key("k"), request()).unwrap();
    match (found, outcome) {
        (Seen::Free, Reserve::Fresh(guard)) => {
            assert_eq!((guard.attempt(), began), (1, 0), "{what}");
            assert_eq!(guard.complete(RESPONSE).unwrap(), Completion::Done);
        }
        (Seen::Done, Reserve::Replay(_)) => {}
        (Seen::Detached, Reserve::InFlight(in_flight)) => {
            let token = in_flight.info().token;
            assert_eq!(scene.store.reattach(&key("k"), token).unwrap().complete(RESPONSE).unwrap(), Completion::Done);
        }
        (Seen::InFlight | Seen::Interrupted(_), Reserve::Interrupted(stopped)) => {
            let next = as_fresh(stopped.take_over().unwrap());
            assert_eq!(next.complete(RESPONSE).unwrap(), Completion::Done);
        }
        (found, other) => panic!("{what}: {found:?}, and then {other:?}"),
    }
    let response = as_replay(scene.store.reserve(&key("k"), request()).unwrap());
    assert_eq!(response.body(), Body::Kept(RESPONSE), "{what}");
    assert!(scene.effects.load(Ordering::SeqCst) <= 1, "{what}");
}

fn always(seen: Seen) -> impl Fn(Cut) -> Vec<Seen> {
    move |_| vec![seen]
}

fn by_cut(unpolled: Seen, pending: Seen, ready: Seen) -> impl Fn(Cut) -> Vec<Seen> {
    move |cut| match cut {
        Cut::Unpolled => vec![unpolled],
        Cut::Pending(_) => vec![pending],
        Cut::Ready => vec![ready],
    }
}

// S9, O11: who was not told owns nothing.

#[test]
fn a_reserve_that_nobody_hears_leaves_nothing_behind() {
    let polls = cancelled_everywhere(
        "a reserve",
        |scene| kept(scene.store.reserve_async(&key("k"), request())).into(),
        by_cut(Seen::Free, Seen::Free, Seen::Interrupted(1)),
    );
    assert_eq!(polls, 2, "it waited for its sync");
}

#[test]
fn an_answer_that_is_not_fresh_changes_nothing_whenever_it_is_dropped() {
    let replay = |scene: &Scene| {
        assert_eq!(scene.quickly("k").complete(RESPONSE).unwrap(), Completion::Done);
        kept(scene.store.reserve_async(&key("k"), request())).into()
    };
    let interrupted = |scene: &Scene| {
        drop(scene.quickly("k"));
        kept(scene.store.reserve_async(&key("k"), request())).into()
    };
    let in_flight = |scene: &Scene| {
        scene.keep(scene.quickly("k"));
        kept(scene.store.reserve_async(&key("k"), request())).into()
    };
    let mismatch = |scene: &Scene| {
        scene.keep(scene.quickly("k"));
        kept(scene.store.reserve_async(&key("k"), other_request())).into()
    };
    let peek = |scene: &Scene| {
        drop(scene.quickly("k"));
        kept(scene.store.peek_async(&key("k"))).into()
    };
    let sync = |scene: &Scene| {
        drop(scene.quickly("k"));
        kept(scene.store.sync_async()).into()
    };
    cancelled_everywhere("a replay", replay, always(Seen::Done));
    let polls = [
        cancelled_everywhere("an interruption", interrupted, always(Seen::Interrupted(1))),
        cancelled_everywhere("in flight", in_flight, always(Seen::InFlight)),
        cancelled_everywhere("a mismatch", mismatch, always(Seen::InFlight)),
        cancelled_everywhere("a peek", peek, always(Seen::Interrupted(1))),
        cancelled_everywhere("a sync", sync, always(Seen::Interrupted(1))),
    ];
    assert_eq!(polls, [2; 5], "each waits for what its answer rests on");
}

/// The key is held; then the owner ends; then the answer waits for its sync.
fn waits_for_the_end(end: fn(&Scene)) -> impl Fn(&Scene) -> Tried {
    move |scene| {
        scene.keep(fresh(&scene.store, &key("k")));
        Tried { call: kept(scene.store.reserve_with_async(&key("k"), request(), &waiting())), cues: vec![end] }
    }
}

#[test]
fn who_waits_and_gives_up_leaves_nothing_behind() {
    let polls = cancelled_everywhere(
        "a wait for a completion",
        waits_for_the_end(|scene| {
            let mut call = Box::pin(scene.guard().complete_async(RESPONSE));
            assert!(poll(&mut call).is_pending());
        }),
        |cut| match cut {
            Cut::Unpolled | Cut::Pending(1) => vec![Seen::InFlight],
            Cut::Pending(_) | Cut::Ready => vec![Seen::Done],
        },
    );
    assert_eq!(polls, 3);
    cancelled_everywhere("a wait for a drop", waits_for_the_end(|scene| drop(scene.guard())), |cut| match cut {
        Cut::Unpolled | Cut::Pending(1) => vec![Seen::InFlight],
        Cut::Pending(_) | Cut::Ready => vec![Seen::Interrupted(1)],
    });
    cancelled_everywhere(
        "a wait of who was told InFlight",
        |scene| {
            scene.keep(scene.quickly("k"));
            let Reserve::InFlight(in_flight) = scene.store.reserve(&key("k"), request()).unwrap() else { panic!() };
            Tried { call: kept(in_flight.wait_async(LONG)), cues: vec![|scene| drop(scene.guard())] }
        },
        |cut| match cut {
            Cut::Unpolled | Cut::Pending(1) => vec![Seen::InFlight],
            Cut::Pending(_) | Cut::Ready => vec![Seen::Interrupted(1)],
        },
    );
}

#[test]
fn a_hand_over_that_nobody_hears_leaves_nothing_behind() {
    let polls = cancelled_everywhere(
        "a hand-over",
        waits_for_the_end(|scene| assert_eq!(scene.guard().release().unwrap(), Completion::Done)),
        |cut| match cut {
            Cut::Unpolled | Cut::Pending(1) => vec![Seen::InFlight],
            Cut::Pending(_) => vec![Seen::Free],
            Cut::Ready => vec![Seen::Interrupted(1)],
        },
    );
    assert_eq!(polls, 3);
    // Dropped between the hand-over and the next poll.
    let scene = Scene::new();
    let guard = fresh(&scene.store, &key("k"));
    let mut waits = wait(&scene.store, "k");
    assert!(scene.poll(&mut waits).is_pending());
    assert_eq!(guard.release().unwrap(), Completion::Done);
    assert_eq!((seen(&scene.store, "k"), scene.woken()), (Seen::InFlight, 1));
    drop(waits);
    check(&scene, "a hand-over that was never looked at", &[Seen::Free]);
}

#[test]
fn a_later_attempt_that_nobody_hears_of_leaves_the_key_interrupted() {
    let polls = cancelled_everywhere(
        "a take-over",
        |scene| {
            drop(scene.quickly("k"));
            let stopped = as_interrupted(scene.store.reserve(&key("k"), request()).unwrap());
            kept(stopped.take_over_async()).into()
        },
        by_cut(Seen::Interrupted(1), Seen::Interrupted(2), Seen::Interrupted(2)),
    );
    assert_eq!(polls, 2);
    cancelled_everywhere(
        "a take-over by policy",
        |scene| {
            drop(scene.quickly("k"));
            let takes_over = ReserveOptions::new().on_interrupted(OnInterrupted::TakeOver);
            kept(scene.store.reserve_with_async(&key("k"), request(), &takes_over)).into()
        },
        by_cut(Seen::Interrupted(1), Seen::Interrupted(2), Seen::Interrupted(2)),
    );
    cancelled_everywhere(
        "a take-over by who waited for the end",
        |scene| {
            scene.keep(scene.quickly("k"));
            let takes_over = waiting().on_interrupted(OnInterrupted::TakeOver);
            Tried {
                call: kept(scene.store.reserve_with_async(&key("k"), request(), &takes_over)),
                cues: vec![|scene| drop(scene.guard())],
            }
        },
        |cut| match cut {
            Cut::Unpolled | Cut::Pending(1) => vec![Seen::InFlight],
            Cut::Pending(_) | Cut::Ready => vec![Seen::Interrupted(2)],
        },
    );
}

// S5: a completion that is dropped.

#[test]
fn a_completion_that_is_dropped_is_stored_or_leaves_the_key_interrupted() {
    let completion = |scene: &Scene| {
        scene.effects.fetch_add(1, Ordering::SeqCst);
        kept(fresh(&scene.store, &key("k")).complete_async(RESPONSE)).into()
    };
    let polls = cancelled_everywhere("a completion", completion, by_cut(Seen::Interrupted(1), Seen::Done, Seen::Done));
    assert_eq!(polls, 2);
    let many = |scene: &Scene| {
        scene.effects.fetch_add(1, Ordering::SeqCst);
        let items = ["one", "k", "two"].map(|id| (fresh(&scene.store, &key(id)), RESPONSE.to_vec()));
        kept(scene.store.complete_batch_async(items)).into()
    };
    cancelled_everywhere("a batch of completions", many, by_cut(Seen::Interrupted(1), Seen::Done, Seen::Done));
    let resolved = |scene: &Scene| {
        scene.effects.fetch_add(1, Ordering::SeqCst);
        drop(fresh(&scene.store, &key("k")));
        kept(as_interrupted(scene.store.reserve(&key("k"), request()).unwrap()).resolve_async(RESPONSE)).into()
    };
    cancelled_everywhere("a resolution", resolved, by_cut(Seen::Interrupted(1), Seen::Done, Seen::Done));
}

#[test]
fn a_completion_without_body_that_is_dropped_is_stored_or_leaves_the_key_interrupted() {
    for polls in 0..=2 {
        let scene = Scene::new();
        let mut call = Box::pin(fresh(&scene.store, &key("k")).complete_without_body_async(b"order 17"));
        for n in 0..polls {
            scene.hold_syncs_back();
            let woken = scene.woken();
            let ready = scene.poll(&mut call).is_ready();
            assert_eq!(ready, n == 1);
            if !ready && n + 1 < polls {
                scene.sync_until_woken(woken);
            }
        }
        drop(call);
        scene.let_all_through();
        match (polls, scene.store.reserve(&key("k"), request()).unwrap()) {
            (0, Reserve::Interrupted(_)) => {}
            (1 | 2, Reserve::Replay(response)) => {
                assert_eq!(response.body(), Body::NotKept { reference: b"order 17" });
            }
            (_, other) => panic!("after {polls} polls: {other:?}"),
        }
        assert_eq!(scene.store.stats().guards, 0);
    }
}

// The other acts of an owner.

#[test]
fn a_release_that_is_dropped_has_taken_place_or_leaves_the_key_interrupted() {
    let first = |scene: &Scene| kept(fresh(&scene.store, &key("k")).release_async()).into();
    cancelled_everywhere("a release", first, by_cut(Seen::Interrupted(1), Seen::Free, Seen::Free));
    let later = |scene: &Scene| {
        drop(fresh(&scene.store, &key("k")));
        let stopped = as_interrupted(scene.store.reserve(&key("k"), request()).unwrap());
        kept(as_fresh(stopped.take_over().unwrap()).release_async()).into()
    };
    cancelled_everywhere("a release of attempt 2", later, always(Seen::Interrupted(2)));
    let by_handle = |scene: &Scene| {
        drop(fresh(&scene.store, &key("k")));
        kept(as_interrupted(scene.store.reserve(&key("k"), request()).unwrap()).release_async()).into()
    };
    cancelled_everywhere("a release by handle", by_handle, by_cut(Seen::Interrupted(1), Seen::Free, Seen::Free));
}

#[test]
fn a_renewal_or_a_checkpoint_that_is_dropped_leaves_the_owner_at_work() {
    let renewal = |scene: &Scene| {
        let guard = fresh(&scene.store, &key("k"));
        let call = kept(guard.renew_async(LEASE * 1000));
        scene.keep(guard);
        call.into()
    };
    assert_eq!(cancelled_everywhere("a renewal far ahead", renewal, always(Seen::InFlight)), 2);
    let short = |scene: &Scene| {
        let guard = fresh(&scene.store, &key("k"));
        let call = kept(guard.renew_async(LEASE));
        scene.keep(guard);
        call.into()
    };
    cancelled_everywhere("a renewal", short, always(Seen::InFlight));
    let checkpoint = |scene: &Scene| {
        let guard = fresh(&scene.store, &key("k"));
        let call = kept(guard.attempt_view().save_checkpoint_async(b"half"));
        scene.keep(guard);
        call.into()
    };
    assert_eq!(cancelled_everywhere("a checkpoint", checkpoint, always(Seen::InFlight)), 2);
    // The view alone is left: its guard was dropped before.
    let late = |scene: &Scene| {
        let view = fresh(&scene.store, &key("k")).attempt_view();
        kept(async move { view.save_checkpoint_async(b"late").await }).into()
    };
    cancelled_everywhere("a late checkpoint", late, always(Seen::Interrupted(1)));
}

#[test]
fn a_detachment_that_is_dropped_leaves_the_key_detached_or_interrupted() {
    let detach = |scene: &Scene| kept(fresh(&scene.store, &key("k")).detach_async(LEASE * 10)).into();
    let polls = cancelled_everywhere(
        "a detachment",
        detach,
        by_cut(Seen::Interrupted(1), Seen::Interrupted(1), Seen::Detached),
    );
    assert_eq!(polls, 2);
}

#[test]
fn a_reattachment_that_nobody_hears_of_leaves_the_reservation_detached() {
    let reattach = |scene: &Scene| {
        let token = fresh(&scene.store, &key("k")).detach(LEASE * 10).unwrap();
        kept(scene.store.reattach_async(&key("k"), token)).into()
    };
    let polls =
        cancelled_everywhere("a reattachment", reattach, by_cut(Seen::Detached, Seen::Detached, Seen::Interrupted(1)));
    assert_eq!(polls, 2);
}

/// What nobody heard of must change nothing, and so must not shorten the lease.
#[test]
fn a_reattachment_that_nobody_hears_of_leaves_the_lease_as_long_as_it_was() {
    let scene = Scene::new();
    let token = fresh(&scene.store, &key("k")).detach(LEASE * 10).unwrap();
    let lease_end = scene.store.peek(&key("k")).unwrap().unwrap().lease_end;
    scene.hold_syncs_back();
    let mut call = Box::pin(scene.store.reattach_async(&key("k"), token));
    assert!(scene.poll(&mut call).is_pending());
    drop(call);
    scene.let_all_through();
    assert_eq!(scene.store.peek(&key("k")).unwrap().unwrap().lease_end, lease_end);
}

/// Nobody heard of it, and the log has no room to say so: the reservation must not stay held by nobody for ever.
#[test]
fn a_reattachment_that_nobody_hears_of_holds_nothing_though_the_log_takes_no_more() {
    let scene = Scene::new();
    let token = fresh(&scene.store, &key("k")).detach(LEASE * 10).unwrap();
    scene.hold_syncs_back();
    let mut call = Box::pin(scene.store.reattach_async(&key("k"), token));
    assert!(scene.poll(&mut call).is_pending());
    scene.disk.limit_bytes(Some(0));
    let long = ReserveOptions::new().lease(LEASE * 500).durability(Durability::ProcessCrash);
    for id in (0..).map(|n| format!("{n:04}")).take_while(|id| id.len() == 4) {
        match scene.store.reserve_with(&key(id), request(), &long) {
            Ok(filler) => std::mem::forget(filler),
            Err(_) => break,
        }
    }
    let guards = scene.store.stats().guards;
    drop(call);
    assert_eq!(scene.store.stats().guards, guards - 1, "nobody holds it");
    scene.disk.limit_bytes(None);
    scene.let_all_through();
    scene.clock.advance(LEASE * 10);
    match scene.store.reattach(&key("k"), token) {
        Ok(_) | Err(keyonce::NotReattached::Superseded) => {}
        Err(other) => panic!("{other:?}"),
    }
}

/// Its token was known before, so somebody else may have gone on with it already.
#[test]
fn a_detachment_that_is_dropped_does_not_stop_who_has_reattached_it() {
    let scene = Scene::new();
    let guard = fresh(&scene.store, &key("k"));
    let token = guard.token();
    scene.hold_syncs_back();
    let mut detaches = Box::pin(guard.detach_async(LEASE * 10));
    assert!(scene.poll(&mut detaches).is_pending());
    let mut reattaches = Box::pin(scene.store.reattach_async(&key("k"), token));
    assert!(scene.poll(&mut reattaches).is_pending());
    drop(detaches);
    scene.let_all_through();
    let next = ready(&mut reattaches).unwrap();
    assert_eq!(seen(&scene.store, "k"), Seen::InFlight);
    assert_eq!(next.complete(RESPONSE).unwrap(), Completion::Done);
}

#[test]
fn an_operators_forget_that_is_dropped_has_taken_place_or_not() {
    let forget = |scene: &Scene| {
        drop(fresh(&scene.store, &key("k")));
        kept(scene.store.forget_async(&key("k"), "a test")).into()
    };
    let polls = cancelled_everywhere("a forget", forget, by_cut(Seen::Interrupted(1), Seen::Free, Seen::Free));
    assert!(polls > 1, "it waited for its sync");
}

#[test]
fn a_batch_that_nobody_hears_leaves_nothing_behind() {
    let batch = |scene: &Scene| {
        assert_eq!(scene.quickly("done").complete(RESPONSE).unwrap(), Completion::Done);
        drop(scene.quickly("interrupted"));
        let asks = ["done", "k", "interrupted", "k", "new"].map(|id| Ask::new(&key(id), request()));
        kept(scene.store.reserve_batch_async(&asks)).into()
    };
    let polls = cancelled_everywhere("a batch", batch, by_cut(Seen::Free, Seen::Free, Seen::Interrupted(1)));
    assert_eq!(polls, 2, "one sync serves the batch");
}

/// Pending once, and woken at once.
async fn pause() {
    let mut paused = false;
    poll_fn(|context| {
        if std::mem::replace(&mut paused, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

#[test]
fn once_that_is_dropped_anywhere_has_one_effect_and_holds_nothing() {
    let once = |scene: &Scene| {
        let effects = Arc::clone(&scene.effects);
        let work = async move |attempt: Attempt| {
            effects.fetch_add(1, Ordering::SeqCst);
            pause().await;
            assert_eq!(attempt.save_checkpoint_async(b"half").await.unwrap(), Completion::Done);
            pause().await;
            Ok::<_, Failed<std::io::Error>>(RESPONSE.to_vec())
        };
        kept(scene.store.once_async(&key("k"), request(), work)).into()
    };
    // Pending in the reserve, the pause, the checkpoint, the pause, and the completion.
    let polls = cancelled_everywhere("once", once, |cut| match cut {
        Cut::Unpolled | Cut::Pending(1) => vec![Seen::Free],
        Cut::Pending(2..=4) => vec![Seen::Interrupted(1)],
        Cut::Pending(5) | Cut::Ready => vec![Seen::Done],
        Cut::Pending(n) => panic!("pending for the {n}th time"),
    });
    assert_eq!(polls, 6);
    let nothing_happened = |scene: &Scene| {
        let work = |_| async {
            pause().await;
            Err(Failed::NothingHappened(std::io::Error::other("refused")))
        };
        kept(scene.store.once_async(&key("k"), request(), work)).into()
    };
    cancelled_everywhere("once, and nothing happened", nothing_happened, |cut| match cut {
        Cut::Unpolled | Cut::Pending(1) | Cut::Ready => vec![Seen::Free],
        Cut::Pending(_) => vec![Seen::Interrupted(1)],
    });
    let too_large = |scene: &Scene| {
        let work = |_| async { Ok::<_, Failed<std::io::Error>>(vec![7; 6001]) };
        kept(scene.store.once_async(&key("large"), request(), work)).into()
    };
    cancelled_everywhere("once, and too much of it", too_large, always(Seen::Free));
}

// Closing.

/// Returns once nobody becomes an owner any more.
fn until_closing(store: &Store) {
    while store.reserve(&key("other"), request()).is_ok_and(|told| match told {
        Reserve::Fresh(guard) => guard.release().is_ok(),
        other => panic!("{other:?}"),
    }) {
        thread::yield_now();
    }
}

#[test]
fn a_close_that_is_dropped_once_it_was_polled_closes_the_store_all_the_same() {
    for polls in 0..=1 {
        let (store, disk, clock) = quick_store();
        let guard = fresh(&store, &key("k"));
        let mut waits = wait(&store, "k");
        assert!(poll(&mut waits).is_pending());
        let wakes = Arc::<Wakes>::default();
        let mut closing = Box::pin(store.close_async(Duration::ZERO));
        for _ in 0..polls {
            drop(poll_for(&mut closing, &wakes));
        }
        drop(closing);
        if polls == 0 {
            assert_eq!(seen(&store, "k"), Seen::InFlight);
            continue;
        }
        // A second one tells what the first one did.
        assert_eq!(block_on(store.close_async(LONG)).unwrap().unfinished, 1);
        assert_eq!(ready(&mut waits).unwrap_err().kind(), keyonce::ErrorKind::Closed);
        drop((guard, store));
        let again = testing::open(disk, options(&clock), 2).unwrap();
        assert_eq!(seen(&again, "k"), Seen::Interrupted(1));
    }
}

#[test]
fn who_closes_as_a_task_is_woken_by_the_last_guard() {
    ends(|| {
        let (store, _, _) = quick_store();
        let guard = fresh(&store, &key("k"));
        let closing = store.close_async(LONG);
        let closer = thread::spawn(move || block_on(closing));
        until_closing(&store);
        assert_eq!(guard.complete(RESPONSE).unwrap(), Completion::Done);
        assert_eq!(closer.join().unwrap().unwrap().unfinished, 0);
    });
}

/// The last handle's drop waits for nobody, also when somebody else had more patience.
#[test]
fn the_last_handle_cuts_short_a_close_that_waits_for_owners() {
    ends(|| {
        let (store, disk, clock) = quick_store();
        let guard = fresh(&store, &key("k"));
        let mut closing = Box::pin(store.close_async(LONG));
        assert!(poll(&mut closing).is_pending());
        until_closing(&store);
        drop(store);
        assert!(testing::open(disk, options(&clock), 2).is_ok(), "the lock is free");
        drop(guard);
    });
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
    let deadline = std::time::Instant::now() + PATIENCE;
    while store.stats().guards > 0 {
        assert!(std::time::Instant::now() < deadline, "a guard lives on that nobody holds");
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
    let begun = std::time::Instant::now();
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
        let begun = std::time::Instant::now();
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

// Wakers that come and go.

#[test]
fn a_future_wakes_the_task_that_polled_it_last() {
    let (store, _, _) = quick_store();
    let guard = fresh(&store, &key("k"));
    let mut call = wait(&store, "k");
    let tasks = [(); 3].map(|()| Arc::<Wakes>::default());
    for task in [0, 1, 1, 2, 0, 2] {
        assert!(poll_for(&mut call, &tasks[task]).is_pending());
    }
    assert_eq!(guard.release().unwrap(), Completion::Done);
    assert_eq!(tasks.map(|task| task.count()), [0, 0, 1]);
    drop(as_fresh(ready(&mut call).unwrap()));
}

#[test]
fn a_future_may_be_polled_by_one_thread_after_another() {
    let scene = Scene::new();
    let guard = fresh(&scene.store, &key("k"));
    let mut call: Call = kept(scene.store.reserve_with_async(&key("k"), request(), &waiting()));
    let mut woken = 0;
    scene.hold_syncs_back();
    for n in 0..3 {
        let stage = Arc::clone(&scene.stage);
        call = thread::spawn(move || {
            let waker = Waker::from(stage);
            assert!(call.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            call
        })
        .join()
        .unwrap();
        if n == 1 {
            thread::scope(|scope| scope.spawn(|| drop(guard.release())).join().unwrap());
            break;
        }
    }
    woken += 1;
    assert_eq!(scene.woken(), woken);
    assert!(scene.poll(&mut call).is_pending(), "the hand-over is not durable yet");
    scene.sync_until_woken(woken);
    let answer = *ready(&mut call).downcast::<Result<Reserve, keyonce::Error>>().unwrap();
    drop(as_fresh(answer.unwrap()));
    scene.let_all_through();
}

#[test]
fn a_hand_over_that_nobody_ever_takes_passes_on_after_a_lease() {
    let (store, _, clock) = quick_store();
    let guard = fresh(&store, &key("k"));
    let mut waits: Vec<_> = (0..4).map(|_| wait(&store, "k")).collect();
    assert!(waits.iter_mut().all(|call| poll(call).is_pending()));
    let last = waits.pop().unwrap();
    let mut last = last;
    waits.into_iter().for_each(std::mem::forget);
    clock.advance(LEASE / 2);
    assert_eq!(guard.release().unwrap(), Completion::Done);
    for _ in 0..3 {
        assert!(poll(&mut last).is_pending());
        clock.advance(LEASE - MS);
        assert!(poll(&mut last).is_pending());
        clock.advance(MS);
    }
    let owner = as_fresh(ready(&mut last).unwrap());
    assert_eq!(owner.attempt(), 1, "nobody has begun before");
    assert_eq!(store.stats().waiting, 0);
    // Its lease began when it was seen.
    clock.advance(LEASE - MS);
    assert_eq!(seen(&store, "k"), Seen::InFlight);
    clock.advance(MS);
    assert_eq!(seen(&store, "k"), Seen::Interrupted(1));
    drop(owner);
}

/// The lease of a hand-over begins when it is taken, however late that is within the first one.
#[test]
fn who_takes_a_hand_over_late_has_a_whole_lease() {
    let (store, _, clock) = quick_store();
    let guard = fresh(&store, &key("k"));
    let mut call = wait(&store, "k");
    assert!(poll(&mut call).is_pending());
    assert_eq!(guard.release().unwrap(), Completion::Done);
    clock.advance(LEASE - MS);
    let owner = as_fresh(ready(&mut call).unwrap());
    clock.advance(LEASE - MS);
    assert_eq!(seen(&store, "k"), Seen::InFlight);
    clock.advance(MS);
    assert_eq!(seen(&store, "k"), Seen::Interrupted(1));
    drop(owner);
}

// A waker may do anything.

/// Polls its future where it is woken.
struct Inline {
    call: Mutex<Option<Call>>,
    done: AtomicU64,
}

impl Inline {
    fn start(call: Call) -> Arc<Self> {
        let task = Arc::new(Self { call: Mutex::new(Some(call)), done: AtomicU64::new(0) });
        Arc::clone(&task).wake();
        task
    }

    fn is_done(&self) -> bool {
        self.done.load(Ordering::SeqCst) == 1
    }
}

impl Wake for Inline {
    fn wake(self: Arc<Self>) {
        let Some(mut call) = self.call.lock().unwrap().take() else { return };
        match call.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::clone(&self)))) {
            Poll::Pending => *self.call.lock().unwrap() = Some(call),
            Poll::Ready(output) => {
                drop(output);
                self.done.fetch_add(1, Ordering::SeqCst);
            }
        }
    }
}

/// Every call that does not end the store, by who was told this.
fn call_everything(store: &Store, told: Reserve) {
    drop(store.reserve(&key("other"), request()).unwrap());
    assert!(store.forget(&key("other"), "").unwrap());
    drop(store.peek(&key("k")).unwrap());
    assert!(store.stats().fresh > 0);
    store.sync().unwrap();
    drop(store.reserve_batch(&[Ask::new(&key("k"), request())]).unwrap());
    match told {
        Reserve::Fresh(guard) => {
            assert_eq!(guard.renew(LEASE).unwrap(), Completion::Done);
            assert_eq!(guard.save_checkpoint(b"half").unwrap(), Completion::Done);
            assert_eq!(guard.release().unwrap(), Completion::Done);
        }
        Reserve::Interrupted(stopped) => assert!(stopped.release().is_ok()),
        Reserve::Replay(_) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_waker_may_call_the_store_whatever_woke_it() {
    let ends_of_an_owner: [(&str, fn(&Store, &ManualClock, Reservation)); 6] = [
        ("completion", |_, _, guard| assert_eq!(guard.complete(RESPONSE).unwrap(), Completion::Done)),
        ("release", |_, _, guard| assert_eq!(guard.release().unwrap(), Completion::Done)),
        ("drop", |_, _, guard| drop(guard)),
        ("lapse", |_, clock, guard| {
            clock.advance(LEASE);
            drop(guard);
        }),
        ("forget", |store, _, guard| {
            assert!(store.forget(&key("k"), "").unwrap());
            drop(guard);
        }),
        ("detach", |store, clock, guard| {
            let token = guard.detach(LEASE).unwrap();
            assert_eq!(store.reattach(&key("k"), token).unwrap().release().unwrap(), Completion::Done);
            clock.advance(MS);
        }),
    ];
    for (how, end) in ends_of_an_owner {
        ends(move || {
            let (store, _, clock) = quick_store();
            let guard = fresh(&store, &key("k"));
            let tasks = [(); 4].map(|()| {
                let (store, waits) = (store.clone(), wait(&store, "k"));
                Inline::start(kept(async move { call_everything(&store, waits.await.unwrap()) }))
            });
            end(&store, &clock, guard);
            assert!(tasks.iter().all(|task| task.is_done()), "{how}");
            let stats = store.stats();
            assert_eq!((stats.guards, stats.waiting), (0, 0), "{how}");
        });
    }
}

#[test]
fn a_waker_that_a_sync_wakes_may_call_the_store() {
    ends(|| {
        let scene = Scene::new();
        scene.hold_syncs_back();
        let tasks = [0, 1, 2].map(|n| {
            let (store, mine) = (scene.store.clone(), key(format!("{n}")));
            Inline::start(kept(async move {
                let guard = as_fresh(store.reserve_async(&mine, request()).await.unwrap());
                assert_eq!(guard.complete(RESPONSE).unwrap(), Completion::Done);
                drop(store.reserve(&key(format!("also-{n}")), request()).unwrap());
            }))
        });
        assert!(!tasks.iter().any(|task| task.is_done()));
        scene.let_all_through();
        assert!(tasks.iter().all(|task| task.is_done()));
    });
}

/// The store's failure wakes everybody, wherever it was found.
#[test]
fn a_waker_that_a_failed_write_wakes_may_call_the_store() {
    ends(|| {
        let scene = Scene::new();
        scene.hold_syncs_back();
        let (store, told) = (scene.store.clone(), Arc::<AtomicU64>::default());
        let tells = Arc::clone(&told);
        let task = Inline::start(kept(async move {
            let error = store.reserve_async(&key("k"), request()).await.unwrap_err();
            assert_eq!(error.kind(), keyonce::ErrorKind::Poisoned);
            assert!(store.reserve(&key("other"), request()).is_err());
            tells.fetch_add(1, Ordering::SeqCst);
        }));
        scene.disk.fail_at(scene.disk.steps(), testing::EIO);
        assert!(scene.store.reserve(&key("fails"), request()).is_err());
        scene.let_all_through();
        assert!(task.is_done() && told.load(Ordering::SeqCst) == 1);
    });
}

#[test]
fn a_waker_that_closing_wakes_may_close_too() {
    ends(|| {
        let (store, _, _) = quick_store();
        let guard = fresh(&store, &key("k"));
        let (closes, waits) = (store.clone(), wait(&store, "k"));
        let task = Inline::start(kept(async move {
            assert_eq!(waits.await.unwrap_err().kind(), keyonce::ErrorKind::Closed);
            drop(closes.close(Duration::ZERO));
        }));
        assert_eq!(store.close(Duration::ZERO).unwrap().unfinished, 1);
        assert!(task.is_done());
        drop(guard);
    });
}

/// Does something when the last of its wakers is dropped.
struct Dropped(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Wake for Dropped {
    fn wake(self: Arc<Self>) {}
}

impl Drop for Dropped {
    fn drop(&mut self) {
        if let Some(at_last) = self.0.lock().unwrap().take() {
            at_last();
        }
    }
}

/// The last waker of a task holds its future: dropping it drops whatever that owned.
#[test]
fn a_waker_that_is_replaced_may_own_the_key_that_is_waited_for() {
    ends(|| {
        let (store, _, _) = quick_store();
        let guard = fresh(&store, &key("k"));
        let mut call = wait(&store, "k");
        let at_last = Box::new(move || assert_eq!(guard.release().unwrap(), Completion::Done));
        let waker = Waker::from(Arc::new(Dropped(Mutex::new(Some(at_last)))));
        assert!(call.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        drop(waker);
        let wakes = Arc::<Wakes>::default();
        drop(poll_for(&mut call, &wakes));
        assert_eq!(wakes.count(), 1);
        drop(as_fresh(ready(&mut call).unwrap()));
    });
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
    attempt: &Attempt,
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
    is_send_and_static(attempt.renew_async(LEASE));
    is_send_and_static(attempt.save_checkpoint_async(b"half"));
    is_send_and_static(in_flight().wait_async(LEASE));
    is_send_and_static(stopped().take_over_async());
    is_send_and_static(stopped().resolve_async(b"paid"));
    is_send_and_static(stopped().release_async());
}
