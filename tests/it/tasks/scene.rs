//! A store whose syncs the test holds back, and a harness that drops a future wherever it waits.

use std::any::Any;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, JoinHandle};

use keyonce::testing::{self, ManualClock, SimDisk, Step};
use keyonce::{Body, Completion, Durability, KeyState, Reservation, Reserve, ReserveOptions, Store};

use super::{PATIENCE, RESPONSE, options, poll};
use crate::place::{as_fresh, as_replay, key, request};

#[derive(Default)]
pub(super) struct Cues {
    /// The syncing thread has a sync to do.
    syncing: bool,
    /// It stands at the door of the disk.
    at_door: bool,
    let_through: bool,
    /// Nobody holds it back any more.
    pub(super) open: bool,
    over: bool,
    woken: u64,
}

pub(super) struct Stage {
    cues: Mutex<Cues>,
    changed: Condvar,
}

impl Stage {
    /// Also after a test has failed, so that the syncing thread comes to its end.
    fn cues(&self) -> MutexGuard<'_, Cues> {
        self.cues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn change<T>(&self, change: impl FnOnce(&mut Cues) -> T) -> T {
        let changed = change(&mut self.cues());
        self.changed.notify_all();
        changed
    }

    #[track_caller]
    pub(super) fn until<T>(&self, mut when: impl FnMut(&mut Cues) -> Option<T>) -> T {
        let mut cues = self.cues();
        loop {
            if let Some(then) = when(&mut cues) {
                return then;
            }
            let (again, late) = self.changed.wait_timeout(cues, PATIENCE).unwrap_or_else(PoisonError::into_inner);
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

pub(super) struct Scene {
    pub(super) store: Store,
    pub(super) disk: SimDisk,
    pub(super) clock: ManualClock,
    pub(super) stage: Arc<Stage>,
    syncer: Mutex<Option<JoinHandle<()>>>,
    /// Guards that live through the call that is tried.
    guards: Mutex<Vec<Reservation>>,
    pub(super) effects: Arc<AtomicU64>,
}

/// The name of the thread whose syncs are held back.
pub(super) const SYNCER: &str = "syncer";

impl Scene {
    pub(super) fn new() -> Self {
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
    pub(super) fn hold_syncs_back(&self) {
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
    pub(super) fn sync_until_woken(&self, woken: u64) {
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

    pub(super) fn woken(&self) -> u64 {
        self.stage.cues().woken
    }

    /// Nobody is held back any more, and the syncing thread goes.
    pub(super) fn let_all_through(&self) {
        self.stage.change(|cues| (cues.open, cues.over) = (true, true));
        self.syncer.lock().unwrap().take().unwrap().join().unwrap();
    }

    pub(super) fn poll<F: Future + ?Sized>(&self, future: &mut Pin<Box<F>>) -> Poll<F::Output> {
        future.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::clone(&self.stage))))
    }

    pub(super) fn keep(&self, guard: Reservation) {
        self.guards.lock().unwrap().push(guard);
    }

    pub(super) fn guard(&self) -> Reservation {
        self.guards.lock().unwrap().pop().unwrap()
    }

    pub(super) fn quickly(&self, id: &str) -> Reservation {
        let quick = ReserveOptions::new().durability(Durability::ProcessCrash);
        as_fresh(self.store.reserve_with(&key(id), request(), &quick).unwrap())
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.stage.change(|cues| (cues.open, cues.over) = (true, true));
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
pub(super) type Kept = Box<dyn Any + Send>;
pub(super) type Call = Pin<Box<dyn Future<Output = Kept> + Send>>;

pub(super) fn kept<F: Future<Output: Send + 'static> + Send + 'static>(future: F) -> Call {
    Box::pin(async move { Box::new(future.await) as Kept })
}

/// How far a call came before it was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    Unpolled,
    /// Pending when it was polled for this time.
    Pending(u32),
    /// Ready; its output was dropped, too.
    Ready,
}

/// What is seen of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    Free,
    InFlight,
    Detached,
    Interrupted(u32),
    Done,
}

pub(super) fn seen(store: &Store, id: &str) -> Seen {
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
pub(super) struct Tried {
    pub(super) call: Call,
    pub(super) cues: Vec<fn(&Scene)>,
}

impl From<Call> for Tried {
    fn from(call: Call) -> Self {
        Self { call, cues: Vec::new() }
    }
}

/// Polls the call `0, 1, 2, ..` times and drops it, until it is ready. `becomes` says for each cut what the key `k` may
/// be then, while the guards live that the scene holds.
pub(super) fn cancelled_everywhere(
    name: &str,
    try_it: impl Fn(&Scene) -> Tried,
    becomes: impl Fn(Cut) -> Vec<Seen>,
) -> u32 {
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

pub(super) fn check(scene: &Scene, what: &str, allowed: &[Seen]) {
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

pub(super) fn always(seen: Seen) -> impl Fn(Cut) -> Vec<Seen> {
    move |_| vec![seen]
}

pub(super) fn by_cut(unpolled: Seen, pending: Seen, ready: Seen) -> impl Fn(Cut) -> Vec<Seen> {
    move |cut| match cut {
        Cut::Unpolled => vec![unpolled],
        Cut::Pending(_) => vec![pending],
        Cut::Ready => vec![ready],
    }
}
