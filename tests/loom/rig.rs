//! What every model uses: the explorer, a small store, and the book of what was told before which power loss.

use std::collections::BTreeMap;
use std::io::Write;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk, Step, Storage};
use keyonce::{
    Body, Durability, Error, Fingerprint, Key, KeyState, Options, Reserve, ReserveOptions, Retention, Store,
};

/// The file that holds the only segment of a store this small.
pub(crate) const SEGMENT: &str = "segment-00000001.keyonce";
/// Its size: the smallest that an option may name.
pub(crate) const SEGMENT_BYTES: u64 = 192 << 10;
/// Steps of one execution; opening and closing the store are most of them.
pub(crate) const BRANCHES_MAX: usize = 20_000;
/// Preemptions explored when the environment does not say.
pub(crate) const PREEMPTIONS: usize = 3;
/// Longer than anything here takes; time stands still unless a model moves it.
pub(crate) const WAIT: Duration = Duration::from_secs(3600);
pub(crate) const LEASE: Duration = Duration::from_secs(10);
pub(crate) const RESPONSE: &[u8] = b"paid 9.99";

/// Runs `model` in every order with at most as many preemptions as the environment says.
pub(crate) fn explore(name: &str, model: impl Fn() + Send + Sync + 'static) {
    explore_with_at_most(usize::MAX, name, model);
}

/// As [`explore`], with at most this many preemptions, for a model that has too many orders otherwise.
pub(crate) fn explore_with_at_most(preemptions: usize, name: &str, model: impl Fn() + Send + Sync + 'static) {
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
pub(crate) fn say(line: &str) {
    writeln!(std::io::stderr(), "{line}").expect("standard error takes a line");
}

pub(crate) fn open(disk: &SimDisk, durability: Durability, clock: &ManualClock) -> Store {
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
pub(crate) fn fresh_store(durability: Durability) -> (Store, SimDisk) {
    let disk = SimDisk::new();
    (open(&disk, durability, &ManualClock::default()), disk)
}

pub(crate) fn key(id: &str) -> Key {
    Key::new("charges", id).expect("a short key")
}

pub(crate) fn request() -> Fingerprint {
    Fingerprint::from_bytes([7; 16])
}

pub(crate) fn reserve(store: &Store, id: &str) -> Result<Reserve, Error> {
    store.reserve(&key(id), request())
}

pub(crate) fn reserve_fresh(store: &Store, id: &str) -> keyonce::Reservation {
    match reserve(store, id) {
        Ok(Reserve::Fresh(reservation)) => reservation,
        other => panic!("nobody else asked: {other:?}"),
    }
}

/// Asks, and waits for as long as the key is in flight.
pub(crate) fn reserve_waiting(store: &Store, id: &str) -> Result<Reserve, Error> {
    store.reserve_with(&key(id), request(), &ReserveOptions::default().wait(WAIT))
}

/// Gives the other threads a chance in the middle of every sync: after the moment from which on what is written is not
/// covered, and before the sync returns.
pub(crate) fn let_others_in_at_syncs(disk: &SimDisk) {
    let door = loom::sync::atomic::AtomicUsize::new(0);
    disk.on_step(move |step| {
        if step == Step::Sync {
            door.load(loom::sync::atomic::Ordering::Relaxed);
        }
    });
}

/// What somebody was told about a key, which holds after any crash from then on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Told {
    /// It was reserved at least.
    Known,
    /// Its response was stored.
    Done,
}

/// Every different image that a thread saw when it was told something; shared by all executions of a model.
#[derive(Clone, Default)]
pub(crate) struct Book {
    seen: Arc<Mutex<BTreeMap<Line, SimDisk>>>,
}

/// Who was told what, and all that had been synced then.
pub(crate) type Line = (Vec<u8>, &'static str, Told);

impl Book {
    /// To be called before anything else that the model checker sees happens on this thread.
    pub(crate) fn note(&self, disk: &SimDisk, id: &'static str, told: Told) {
        let image = disk.crash_all_old();
        let mut synced = Vec::new();
        for name in image.list().expect("a disk without faults") {
            let bytes = image.read(&name, usize::MAX).expect("it was listed");
            synced.extend(bytes.iter().take(bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1)));
        }
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.entry((synced, id, told)).or_insert(image);
    }

    /// Opens every image, and looks for what was told.
    pub(crate) fn check(&self, name: &str) {
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
pub(crate) fn explore_alone(work: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.max_branches = builder.max_branches.max(BRANCHES_MAX);
    builder.check(work);
}

pub(crate) fn is_replay(answer: &Reserve) -> bool {
    match answer {
        Reserve::Replay(response) => {
            assert_eq!(response.body(), Body::Kept(RESPONSE));
            true
        }
        _ => false,
    }
}

/// Notes what `answer` promises; the reservation lives on in it.
pub(crate) fn note_answer(book: &Book, disk: &SimDisk, id: &'static str, answer: &Reserve) {
    match answer {
        Reserve::Fresh(_) | Reserve::InFlight(_) | Reserve::Interrupted(_) => book.note(disk, id, Told::Known),
        Reserve::Replay(_) => book.note(disk, id, Told::Done),
        Reserve::Mismatch(_) | Reserve::TooOld(_) => panic!("nobody may be told {answer:?}"),
    }
}

#[derive(Default)]
pub(crate) struct Sleeper {
    woken: loom::sync::Mutex<bool>,
    wakes: loom::sync::Condvar,
}

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        *self.woken.lock().expect("no thread panics") = true;
        self.wakes.notify_one();
    }
}

pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
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
pub(crate) fn waiting(
    store: &Store,
    id: &str,
) -> Pin<Box<impl Future<Output = Result<Reserve, Error>> + Send + use<>>> {
    Box::pin(store.reserve_with_async(&key(id), request(), &ReserveOptions::default().wait(WAIT)))
}

pub(crate) fn poll_once<F: Future>(future: &mut Pin<Box<F>>) -> Poll<F::Output> {
    future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// Nobody is held on to once every handle is gone, and the key may be had.
pub(crate) fn nothing_is_left(store: &Store) {
    let stats = store.stats();
    assert_eq!((stats.guards, stats.waiting), (0, 0), "somebody is held on to");
}
