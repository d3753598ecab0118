//! What executors do with wakers and futures, and what a waker may do.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use keyonce::testing::{self, ManualClock};
use keyonce::{Ask, Completion, ErrorKind, Reservation, Reserve, Store};

use super::scene::{Call, Scene, Seen, kept, seen};
use super::{LONG, RESPONSE, Wakes, block_on, ends, options, poll, poll_for, quick_store, ready, wait, waiting};
use crate::place::{LEASE, MS, as_fresh, fresh, key, request};

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
        assert_eq!(ready(&mut waits).unwrap_err().kind(), ErrorKind::Closed);
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

type EndsAnOwner = fn(&Store, &ManualClock, Reservation);

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
    let ends_of_an_owner: [(&str, EndsAnOwner); 6] = [
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
            assert_eq!(error.kind(), ErrorKind::Poisoned);
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
            assert_eq!(waits.await.unwrap_err().kind(), ErrorKind::Closed);
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
