//! Threads that wait for a key, alone and together with tasks.
//!
//! [`rules`] is about what each waiter is told by its own rule, and about rules that go by time; [`together`] about what
//! many calls share: a sync, an interval, a batch, the memory.

mod rules;
mod together;

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use keyonce::testing::{self, EIO, ManualClock, SimDisk};
use keyonce::{
    Ask, Attempt, Body, Completion, Durability, Error, ErrorKind, Failed, NotReattached, OnInterrupted, Reservation,
    Reserve, ReserveOptions, Store,
};

use crate::place::{
    LEASE, MS, Place, Setting, as_fresh, as_replay, everywhere, fresh, interrupted, key, replays, request, reserve,
    state, tell, until_waiting,
};
use crate::tasks::{PATIENCE, block_on, ends, machine_now, options, poll, quick_store, ready, wait, waiting};

use self::rules::{Told, told};

const RESPONSE: &[u8] = b"paid 9.99";

fn wait_here(store: &Store) -> Result<Reserve, Error> {
    store.reserve_with(&key("k"), request(), &waiting())
}

/// How often this thread has gone to sleep by itself.
#[cfg(target_os = "linux")]
fn times_asleep() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
    line.trim().parse().unwrap()
}

#[cfg(target_os = "linux")]
#[test]
fn a_thousand_threads_sleep_until_the_completion_wakes_each() {
    const THREADS: u64 = 1000;
    let (store, _, _) = quick_store();
    let guard = fresh(&store, &key("k"));
    let asleep = Arc::<AtomicU64>::default();
    let threads: Vec<_> = (0..THREADS)
        .map(|_| {
            let (store, asleep) = (store.clone(), Arc::clone(&asleep));
            thread::Builder::new()
                .stack_size(128 << 10)
                .spawn(move || {
                    let before = times_asleep();
                    assert_eq!(as_replay(wait_here(&store).unwrap()).body(), Body::Kept(RESPONSE));
                    asleep.fetch_add(times_asleep() - before, Ordering::SeqCst);
                })
                .unwrap()
        })
        .collect();
    until_waiting(&store, THREADS);
    // Whoever looks again and again has the time to be seen doing it.
    thread::sleep(Duration::from_millis(300));
    let begun = machine_now();
    assert_eq!(guard.complete(RESPONSE).unwrap(), Completion::Done);
    for thread in threads {
        thread.join().unwrap();
    }
    let (took, asleep) = (begun.elapsed(), asleep.load(Ordering::SeqCst));
    tell(&format!("a thousand threads were answered within {took:?}, and slept {asleep} times"));
    // Once for the owner; beyond that only where they meet at the shard's lock.
    assert!((THREADS..5 * THREADS).contains(&asleep), "they slept {asleep} times");
    assert_eq!(store.stats().waiting, 0);
}

#[test]
fn a_released_key_goes_to_the_waiters_in_the_order_of_their_coming() {
    const WAITERS: u64 = 12;
    let (store, _, _) = quick_store();
    let guard = fresh(&store, &key("k"));
    let order = Arc::new(Mutex::new(Vec::new()));
    // Threads and tasks by turns.
    let waiters: Vec<_> = (0..WAITERS)
        .map(|n| {
            let (clone, order) = (store.clone(), Arc::clone(&order));
            let waiter = thread::spawn(move || {
                let told = if n % 2 == 0 { wait_here(&clone) } else { block_on(wait(&clone, "k")) };
                let owner = as_fresh(told.unwrap());
                order.lock().unwrap().push(n);
                assert_eq!(owner.attempt(), 1);
                assert_eq!(owner.release().unwrap(), Completion::Done);
            });
            until_waiting(&store, n + 1);
            waiter
        })
        .collect();
    assert_eq!(guard.release().unwrap(), Completion::Done);
    for waiter in waiters {
        waiter.join().unwrap();
    }
    assert_eq!(*order.lock().unwrap(), (0..WAITERS).collect::<Vec<_>>());
    assert_eq!(state(&store, &key("k")), None);
}

/// S6: three wait, one becomes the owner, the others go on waiting, then replay.
#[test]
fn of_three_waiters_one_becomes_the_owner_and_the_others_replay_its_response() {
    everywhere(|place| {
        let store = place.open();
        let guard = fresh(&store, &key("k"));
        let (tell_owner, owner) = mpsc::channel();
        let waiters: Vec<_> = (0..3_u64)
            .map(|n| {
                let (clone, tell_owner) = (store.clone(), tell_owner.clone());
                let waiter = thread::spawn(move || match wait_here(&clone).unwrap() {
                    Reserve::Fresh(guard) => {
                        tell_owner.send(guard).unwrap();
                        true
                    }
                    told => {
                        assert_eq!(as_replay(told).body(), Body::Kept(RESPONSE));
                        false
                    }
                });
                until_waiting(&store, n + 1);
                waiter
            })
            .collect();
        assert_eq!(guard.release().unwrap(), Completion::Done);
        let guard = owner.recv_timeout(PATIENCE).unwrap();
        assert_eq!((store.stats().waiting, store.stats().guards), (2, 1));
        assert_eq!(guard.complete(RESPONSE).unwrap(), Completion::Done);
        let owned: Vec<_> = waiters.into_iter().map(|waiter| waiter.join().unwrap()).collect();
        assert_eq!(owned, [true, false, false]);
        assert_eq!(store.stats().waiting, 0);
    });
}

// S7: waiters give up, in every order.

/// Every order of `0..n`.
fn orders(n: usize) -> Vec<Vec<usize>> {
    let mut orders = vec![Vec::new()];
    for next in 0..n {
        orders = orders
            .into_iter()
            .flat_map(|order| {
                (0..=order.len()).map(move |at| {
                    let mut order = order.clone();
                    order.insert(at, next);
                    order
                })
            })
            .collect();
    }
    orders
}

#[test]
fn tasks_that_are_dropped_in_any_order_leave_the_key_to_the_first_of_the_rest() {
    for (order, dropped) in orders(4).into_iter().flat_map(|order| (0..=4).map(move |dropped| (order.clone(), dropped)))
    {
        let (store, _, _) = quick_store();
        let guard = fresh(&store, &key("k"));
        let mut tasks: Vec<_> = (0..4).map(|_| Some(wait(&store, "k"))).collect();
        assert!(tasks.iter_mut().flatten().all(|task| poll(task).is_pending()));
        for (n, at) in order.iter().take(dropped).enumerate() {
            tasks[*at] = None;
            assert_eq!(store.stats().waiting, 3 - n as u64);
        }
        assert_eq!(guard.release().unwrap(), Completion::Done);
        // The rest take the key one after another; who is dropped with it in hand passes it on.
        for (n, mut task) in tasks.into_iter().flatten().enumerate() {
            if n % 2 == 0 {
                drop(task);
            } else {
                assert_eq!(as_fresh(ready(&mut task).unwrap()).release().unwrap(), Completion::Done);
            }
        }
        let stats = store.stats();
        assert_eq!((stats.waiting, stats.guards), (0, 0), "{order:?} {dropped}");
        assert_eq!(fresh(&store, &key("k")).attempt(), 1);
    }
}

#[test]
fn threads_and_tasks_whose_time_is_over_in_any_order_are_told_so() {
    for order in orders(4) {
        ends(move || {
            let (store, _, clock) = quick_store();
            let long = ReserveOptions::new().lease(LEASE * 100);
            let guard = as_fresh(store.reserve_with(&key("k"), request(), &long).unwrap());
            let (tell_over, over) = mpsc::channel();
            let mut tasks: Vec<Option<Pin<Box<_>>>> = Vec::new();
            let mut threads = Vec::new();
            for at in 0..4 {
                let gives_up = order.iter().position(|other| *other == at).unwrap();
                let with = ReserveOptions::new().wait(LEASE * u32::try_from(1 + gives_up).unwrap());
                if at % 2 == 0 {
                    let (store, tell_over) = (store.clone(), tell_over.clone());
                    threads.push(thread::spawn(move || {
                        let told = store.reserve_with(&key("k"), request(), &with).unwrap();
                        assert!(matches!(told, Reserve::InFlight(_)), "{told:?}");
                        tell_over.send(at).unwrap();
                    }));
                    tasks.push(None);
                } else {
                    let mut task = Box::pin(store.reserve_with_async(&key("k"), request(), &with));
                    assert!(poll(&mut task).is_pending());
                    tasks.push(Some(task));
                }
                until_waiting(&store, at as u64 + 1);
            }
            for (n, at) in order.iter().enumerate() {
                clock.advance(LEASE - MS);
                assert_eq!(store.stats().waiting, 4 - n as u64, "nobody gives up before the time");
                clock.advance(MS);
                match &mut tasks[*at] {
                    Some(task) => assert!(matches!(ready(task).unwrap(), Reserve::InFlight(_))),
                    None => assert_eq!(over.recv_timeout(PATIENCE).unwrap(), *at),
                }
            }
            assert_eq!(store.stats().waiting, 0);
            for thread in threads {
                thread.join().unwrap();
            }
            assert_eq!(guard.release().unwrap(), Completion::Done);
        });
    }
}

#[test]
fn threads_and_tasks_that_wait_are_told_that_the_store_was_closed() {
    ends(|| {
        let (store, _, _) = quick_store();
        let guard = fresh(&store, &key("k"));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let store = store.clone();
                thread::spawn(move || wait_here(&store).unwrap_err().kind())
            })
            .collect();
        let mut tasks: Vec<_> = (0..2).map(|_| wait(&store, "k")).collect();
        assert!(tasks.iter_mut().all(|task| poll(task).is_pending()));
        drop(wait(&store, "k"));
        until_waiting(&store, 4);
        assert_eq!(store.close(Duration::ZERO).unwrap().unfinished, 1);
        for thread in threads {
            assert_eq!(thread.join().unwrap(), ErrorKind::Closed);
        }
        drop(tasks.remove(0));
        assert_eq!(ready(&mut tasks[0]).unwrap_err().kind(), ErrorKind::Closed);
        drop(guard);
    });
}

// What cannot be written must not keep anybody waiting.

#[test]
fn who_waits_is_told_when_the_lease_lapses_though_the_log_takes_no_more() {
    for full in [false, true] {
        ends(move || {
            let (store, disk, clock) = quick_store();
            let guard = fresh(&store, &key("k"));
            let mut task = wait(&store, "k");
            assert!(poll(&mut task).is_pending());
            let long = ReserveOptions::new().lease(LEASE * 50);
            if full {
                disk.limit_bytes(Some(0));
            } else {
                disk.fail_at(disk.steps(), EIO);
            }
            let refused = (0..).find_map(|n| {
                let filler = store.reserve_with(&key(format!("filler-{n}")), request(), &long);
                filler.map(std::mem::forget).err()
            });
            assert!(matches!(refused.unwrap().kind(), ErrorKind::Full { .. } | ErrorKind::Poisoned));
            clock.advance(LEASE - MS);
            assert!(poll(&mut task).is_pending());
            clock.advance(MS);
            assert_eq!(told(&ready(&mut task).unwrap()), Told::Interrupted(1), "full: {full}");
            drop(guard);
        });
    }
}

/// The rule lets the key count as running for longer than it is remembered.
#[test]
fn who_waits_is_told_when_an_interruption_that_is_held_is_forgotten() {
    let (store, _, clock) = quick_store();
    let short = ReserveOptions::new().retention(Duration::from_secs(1)).lease(Duration::from_secs(1));
    drop(as_fresh(store.reserve_with(&key("k"), request(), &short).unwrap()));
    let mut task = Box::pin(store.reserve_with_async(
        &key("k"),
        request(),
        &waiting().on_interrupted(OnInterrupted::Hold(LEASE * 50)),
    ));
    assert!(poll(&mut task).is_pending());
    clock.advance(Duration::from_secs(10));
    assert_eq!(state(&store, &key("k")), None);
    assert_eq!(told(&ready(&mut task).unwrap()), Told::Fresh(1));
    assert_eq!(store.stats().waiting, 0);
}

/// The worse half of the same: somebody else reserves the forgotten key, and completes it.
#[test]
fn who_waits_is_told_when_a_forgotten_key_is_reserved_by_somebody_else() {
    let (store, _, clock) = quick_store();
    let short = ReserveOptions::new().retention(Duration::from_secs(1)).lease(Duration::from_secs(1));
    drop(as_fresh(store.reserve_with(&key("k"), request(), &short).unwrap()));
    let mut task = Box::pin(store.reserve_with_async(
        &key("k"),
        request(),
        &waiting().on_interrupted(OnInterrupted::Hold(LEASE * 50)),
    ));
    assert!(poll(&mut task).is_pending());
    clock.advance(Duration::from_secs(10));
    let told_first = poll(&mut task);
    if told_first.is_pending() {
        assert_eq!(fresh(&store, &key("k")).complete(RESPONSE).unwrap(), Completion::Done);
        assert_eq!(told(&ready(&mut task).unwrap()), Told::Replay);
    }
    drop(told_first);
    assert_eq!(store.stats().waiting, 0);
}

// M4: every method, on a thread that holds everything.

#[test]
fn every_method_returns_to_a_thread_that_holds_guards_handles_and_half_polled_futures() {
    for setting in [
        Setting { durability: Durability::PowerLoss, append_mode: keyonce::AppendMode::Positioned },
        Setting { durability: Durability::ProcessCrash, append_mode: keyonce::AppendMode::Mapped },
    ] {
        ends(move || {
            let place = Place::new(setting);
            let store = place.open();
            let owner = fresh(&store, &key("k"));
            let view = owner.attempt_view();
            assert_eq!(fresh(&store, &key("done")).complete(RESPONSE).unwrap(), Completion::Done);
            let response = replays(&store, &key("done"), RESPONSE);
            drop(fresh(&store, &key("interrupted")));
            let stopped = interrupted(&store, &key("interrupted"));
            let Reserve::InFlight(in_flight) = reserve(&store, &key("k")) else { panic!("it is held") };
            let mut half: Vec<_> = (0..3).map(|_| wait(&store, "k")).collect();
            assert!(half.iter_mut().all(|half| poll(half).is_pending()));
            let mut others = Box::pin(store.reserve_async(&key("half"), request()));
            let half_done = poll(&mut others);
            all_methods(&store, &view, &owner);
            let mut in_flight = Box::pin(in_flight.wait_async(LEASE));
            assert!(poll(&mut in_flight).is_pending());
            drop(half.pop());
            place.clock.advance(LEASE - MS);
            all_methods(&store, &view, &owner);
            assert_eq!(owner.release().unwrap(), Completion::Done);
            // The first of those who wait owns it, and never looked.
            assert!(matches!(reserve(&store, &key("k")), Reserve::InFlight(_)));
            place.clock.advance(LEASE);
            all_but_the_owners_methods(&store);
            assert!(stopped.release().is_ok());
            let guards = store.stats().guards;
            // One of them was handed to a future that has not looked, and is given back.
            assert_eq!(store.close(Duration::ZERO).unwrap().unfinished, guards - 1);
            drop((half, half_done, others, in_flight, response, view));
        });
    }
}

fn all_methods(store: &Store, view: &Attempt, owner: &Reservation) {
    assert_eq!(owner.renew(LEASE).unwrap(), Completion::Done);
    assert_eq!(view.renew(LEASE).unwrap(), Completion::Done);
    assert_eq!(owner.save_checkpoint(b"half").unwrap(), Completion::Done);
    assert_eq!(block_on(view.save_checkpoint_async(b"half")).unwrap(), Completion::Done);
    assert!(matches!(
        store.reattach(owner.key(), owner.token()),
        Err(NotReattached::InFlight | NotReattached::Superseded)
    ));
    all_but_the_owners_methods(store);
}

fn all_but_the_owners_methods(store: &Store) {
    let work = |_: &Attempt| Ok::<_, Failed<std::io::Error>>(RESPONSE.to_vec());
    assert!(store.once(&key("inner"), request(), work).is_ok());
    let work = |_: Attempt| async { Ok::<_, Failed<std::io::Error>>(RESPONSE.to_vec()) };
    assert!(block_on(store.once_async(&key("inner-async"), request(), work)).is_ok());
    let asks = ["a", "b", "a", "done", "k"].map(|id| Ask::new(&key(id), request()));
    let mut told: Vec<_> = store.reserve_batch(&asks).unwrap().into_iter().map(Result::unwrap).collect();
    told.truncate(2);
    let guards = told.into_iter().map(|told| (as_fresh(told), RESPONSE.to_vec()));
    assert!(store.complete_batch(guards).into_iter().all(|stored| stored.is_ok()));
    assert!(store.forget(&key("a"), "").unwrap() && block_on(store.forget_async(&key("b"), "")).unwrap());
    assert!(store.peek(&key("k")).unwrap().is_some());
    store.sync().unwrap();
    block_on(store.sync_async()).unwrap();
    assert!(store.stats().fresh > 0 && store.opened().created);
}

// M6: the sync of a group fails, and tasks are among those who wait.

#[test]
fn when_a_shared_sync_fails_every_thread_and_task_is_told() {
    ends(|| {
        let (disk, clock) = (SimDisk::new(), ManualClock::default());
        let store = testing::open(disk.clone(), options(&clock).durability(Durability::PowerLoss), 1).unwrap();
        let (entered, is_in) = mpsc::channel();
        let (go, may_go) = mpsc::channel::<()>();
        let may_go = Mutex::new(may_go);
        let fails = disk.clone();
        disk.on_step(move |step| {
            if step == testing::Step::Sync && entered.send(()).is_ok() {
                may_go.lock().unwrap().recv().unwrap();
                fails.fail_at(fails.steps(), EIO);
            }
        });
        let leader = {
            let store = store.clone();
            thread::spawn(move || block_on(store.reserve_async(&key("leads"), request())).map(drop))
        };
        is_in.recv().unwrap();
        let mut tasks: Vec<_> =
            (0..3).map(|n| Box::pin(store.reserve_async(&key(format!("task-{n}")), request()))).collect();
        assert!(tasks.iter_mut().all(|task| poll(task).is_pending()));
        let threads: Vec<_> = (0..3)
            .map(|n| {
                let store = store.clone();
                thread::spawn(move || store.reserve(&key(format!("thread-{n}")), request()).map(drop))
            })
            .collect();
        while store.stats().fresh < 7 {
            thread::yield_now();
        }
        go.send(()).unwrap();
        assert_eq!(leader.join().unwrap().unwrap_err().kind(), ErrorKind::Poisoned);
        for thread in threads {
            assert_eq!(thread.join().unwrap().unwrap_err().kind(), ErrorKind::Poisoned);
        }
        for task in &mut tasks {
            assert_eq!(ready(task).unwrap_err().kind(), ErrorKind::Poisoned);
        }
        assert_eq!(store.stats().guards, 0);
        disk.on_step(|_| {});
    });
}

/// A future that was forgotten renews nothing, whatever a guard that somebody holds would do.
#[test]
fn a_hand_over_that_nobody_takes_passes_on_after_a_lease_also_where_guards_renew_themselves() {
    let (disk, clock) = (SimDisk::new(), ManualClock::default());
    let store = testing::open(disk, options(&clock).renew_while_held(LEASE * 1000), 1).unwrap();
    let guard = fresh(&store, &key("k"));
    let (mut forgotten, mut next) = (wait(&store, "k"), wait(&store, "k"));
    assert!(poll(&mut forgotten).is_pending() && poll(&mut next).is_pending());
    std::mem::forget(forgotten);
    assert_eq!(guard.release().unwrap(), Completion::Done);
    clock.advance(LEASE - MS);
    assert!(poll(&mut next).is_pending());
    clock.advance(MS);
    drop(as_fresh(ready(&mut next).unwrap()));
}
