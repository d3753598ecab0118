//! Threads that wait for a key, and what becomes due by time alone.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use keyonce::testing::{self, EIO, ManualClock, SimDisk};
use keyonce::{
    Ask, Attempt, Body, Cause, Completion, Durability, Error, ErrorKind, Failed, KeyState, NotReattached,
    OnInterrupted, Options, Reservation, Reserve, ReserveOptions, Retention, Store,
};

use crate::place::{
    LEASE, MS, Place, Setting, as_fresh, as_interrupted, as_replay, everywhere, fresh, interrupted, key, replays,
    request, reserve, state, tell, until_waiting,
};
use crate::tasks::{PATIENCE, Wakes, block_on, ends, options, poll, poll_for, quick_store, ready, wait, waiting};

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
    let begun = Instant::now();
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
                let with = ReserveOptions::new().wait(LEASE * (1 + gives_up as u32));
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

// Who waits under different rules.

const HELD: Duration = Duration::from_secs(30);

const RULES: [OnInterrupted; 4] =
    [OnInterrupted::Surface, OnInterrupted::TakeOver, OnInterrupted::TakeOverLapsed, OnInterrupted::Hold(HELD)];

/// How an owner ends while others wait for its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Complete,
    Release,
    Drop,
    Lapse,
    Forget,
    Detach,
}

/// What a waiter is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    Waits,
    Fresh(u32),
    Replay,
    Interrupted(u32),
}

/// What they are to be told, in the order of their coming.
///
/// Who is told that the key is interrupted looks for itself when it wakes, and may find that somebody who came later
/// has taken it over meanwhile: then it goes on waiting. So the number of times that it was woken is told, too.
fn expected(end: End, rules: &[OnInterrupted]) -> Vec<(Told, u64)> {
    let mut owned_anew = end == End::Detach;
    let expect = |rule: &OnInterrupted| {
        let told = match (end, rule) {
            (End::Complete, _) => return Told::Replay,
            (_, _) if owned_anew => Told::Waits,
            (End::Release | End::Forget, _) => Told::Fresh(1),
            (End::Drop, OnInterrupted::TakeOver | OnInterrupted::TakeOverLapsed) => Told::Fresh(2),
            (End::Lapse, OnInterrupted::TakeOverLapsed) => Told::Fresh(2),
            (_, OnInterrupted::Hold(_)) => Told::Waits,
            (_, _) => Told::Interrupted(1),
        };
        owned_anew |= matches!(told, Told::Fresh(_));
        told
    };
    let told: Vec<_> = rules.iter().map(expect).collect();
    let outdated = |told: Told| if owned_anew && told == Told::Interrupted(1) { Told::Waits } else { told };
    told.into_iter().map(|told| (outdated(told), u64::from(told != Told::Waits))).collect()
}

fn told(told: &Reserve) -> Told {
    match told {
        Reserve::Fresh(guard) => Told::Fresh(guard.attempt()),
        Reserve::Replay(_) => Told::Replay,
        Reserve::Interrupted(stopped) => Told::Interrupted(stopped.attempt),
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_waiter_is_answered_by_its_own_rule_in_the_order_of_their_coming() {
    for end in [End::Complete, End::Release, End::Drop, End::Lapse, End::Forget, End::Detach] {
        for order in orders(RULES.len()) {
            let rules: Vec<_> = order.into_iter().map(|at| RULES[at]).collect();
            let what = format!("{end:?} while {rules:?} wait");
            let (store, _, clock) = quick_store();
            let guard = fresh(&store, &key("k"));
            let mut tasks: Vec<_> = rules
                .iter()
                .map(|rule| Box::pin(store.reserve_with_async(&key("k"), request(), &waiting().on_interrupted(*rule))))
                .collect();
            let wakes: Vec<_> = tasks.iter().map(|_| Arc::<Wakes>::default()).collect();
            assert!(tasks.iter_mut().zip(&wakes).all(|(task, wakes)| poll_for(task, wakes).is_pending()));
            let mut held = Some(guard);
            match end {
                End::Complete => assert_eq!(held.take().unwrap().complete(RESPONSE).unwrap(), Completion::Done),
                End::Release => assert_eq!(held.take().unwrap().release().unwrap(), Completion::Done),
                End::Drop => drop(held.take()),
                End::Lapse => clock.advance(LEASE),
                End::Forget => assert!(store.forget(&key("k"), "").unwrap()),
                End::Detach => drop(held.take().unwrap().detach(LEASE).unwrap()),
            }
            let mut heard = Vec::new();
            let mut answers = Vec::new();
            for (task, wakes) in tasks.iter_mut().zip(&wakes) {
                let woken = wakes.count();
                match poll_for(task, wakes) {
                    std::task::Poll::Pending => heard.push((Told::Waits, woken)),
                    std::task::Poll::Ready(answer) => {
                        let answer = answer.unwrap();
                        heard.push((told(&answer), woken));
                        answers.push(answer);
                    }
                }
            }
            assert_eq!(heard, expected(end, &rules), "{what}");
            // Whoever still waits is answered by the next end.
            let owner = answers.into_iter().find_map(|answer| match answer {
                Reserve::Fresh(guard) => Some(guard),
                _ => None,
            });
            let waits = heard.iter().filter(|(told, _)| *told == Told::Waits).count();
            assert_eq!(store.stats().waiting, waits as u64, "{what}");
            let next = match owner {
                Some(owner) => owner,
                None if end == End::Detach => {
                    let token = store.peek(&key("k")).unwrap().unwrap().token;
                    store.reattach(&key("k"), token).unwrap()
                }
                None if end == End::Complete => continue,
                None => panic!("{what}: nobody owns it"),
            };
            assert_eq!(next.complete(RESPONSE).unwrap(), Completion::Done, "{what}");
            for (task, (told, _)) in tasks.iter_mut().zip(heard) {
                if told == Told::Waits {
                    assert_eq!(as_replay(ready(task).unwrap()).body(), Body::Kept(RESPONSE), "{what}");
                }
            }
            assert_eq!((store.stats().waiting, store.stats().guards), (0, 0), "{what}");
        }
    }
}

#[test]
fn a_thread_that_waits_under_a_rule_that_takes_over_becomes_the_owner_when_the_one_before_is_dropped() {
    everywhere(|place| {
        let store = place.open();
        let guard = fresh(&store, &key("k"));
        assert_eq!(guard.save_checkpoint(b"half").unwrap(), Completion::Done);
        let clone = store.clone();
        let waiter = thread::spawn(move || {
            let with = waiting().on_interrupted(OnInterrupted::TakeOver);
            let next = as_fresh(clone.reserve_with(&key("k"), request(), &with).unwrap());
            assert_eq!((next.attempt(), next.checkpoint()), (2, &b"half"[..]));
            assert_eq!(next.complete(RESPONSE).unwrap(), Completion::Done);
        });
        until_waiting(&store, 1);
        drop(guard);
        waiter.join().unwrap();
        replays(&store, &key("k"), RESPONSE);
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

// Rules that go by time.

fn holds(store: &Store) -> Reserve {
    let hold = ReserveOptions::new().on_interrupted(OnInterrupted::Hold(HELD));
    store.reserve_with(&key("k"), request(), &hold).unwrap()
}

/// Asserts that the interruption counts as running for exactly this long from now, and that who waits is told then.
#[track_caller]
fn held_for(store: &Store, clock: &ManualClock, held: Duration, cause: Cause) {
    let mut task =
        Box::pin(store.reserve_with_async(&key("k"), request(), &waiting().on_interrupted(OnInterrupted::Hold(HELD))));
    assert!(poll(&mut task).is_pending());
    let Reserve::InFlight(in_flight) = holds(store) else { panic!("it is held") };
    assert_eq!((in_flight.retry_after(), in_flight.info().state), (held, KeyState::Interrupted));
    clock.advance(held - MS);
    assert!(poll(&mut task).is_pending());
    assert!(matches!(holds(store), Reserve::InFlight(_)));
    clock.advance(MS);
    assert_eq!(as_interrupted(holds(store)).cause(), cause);
    assert_eq!(as_interrupted(ready(&mut task).unwrap()).cause(), cause);
    clock.advance(MS);
    assert!(matches!(holds(store), Reserve::Interrupted(_)));
}

#[test]
fn an_interruption_is_held_to_the_millisecond_from_the_drop_the_lapse_and_the_opening() {
    everywhere(|place| {
        let store = place.open();
        drop(fresh(&store, &key("k")));
        place.clock.advance(MS * 7);
        held_for(&store, &place.clock, HELD - MS * 7, Cause::Dropped);
        assert!(store.forget(&key("k"), "").unwrap());
        let guard = fresh(&store, &key("k"));
        place.clock.advance(LEASE + MS * 7);
        held_for(&store, &place.clock, HELD - MS * 7, Cause::LeaseLapsed);
        drop(guard);
        assert!(store.forget(&key("k"), "").unwrap());
        // Closed while it was held: from then on; said in the log, so the moment of the reopening does not count.
        let guard = fresh(&store, &key("k"));
        place.clock.advance(MS * 7);
        assert_eq!(store.close(Duration::ZERO).unwrap().unfinished, 1);
        drop((guard, store));
        place.clock.advance(MS * 9);
        let store = place.open();
        held_for(&store, &place.clock, HELD - MS * 9, Cause::LeaseLapsed);
        assert!(store.forget(&key("k"), "").unwrap());
        // Killed: nobody knows when, but that it was before the opening.
        let guard = fresh(&store, &key("k"));
        place.clock.advance(MS * 7);
        let killed = place.open_after_kill();
        place.clock.advance(MS * 3);
        held_for(&killed, &place.clock, HELD - MS * 3, Cause::Crash);
        drop(guard);
    });
}

fn renewing(place: &Place, max: Duration) -> Options {
    place.options().renew_while_held(max)
}

#[test]
fn a_guard_that_renews_itself_counts_as_running_while_it_is_held_and_until_its_bound() {
    everywhere(|place| {
        let store = place.open_as(renewing(place, LEASE * 100));
        let guard = fresh(&store, &key("k"));
        let mut task = wait(&store, "k");
        let wakes = Arc::<Wakes>::default();
        assert!(poll_for(&mut task, &wakes).is_pending());
        let written = store.stats().log_bytes;
        for n in 0..99 {
            place.clock.advance(LEASE);
            let Reserve::InFlight(in_flight) = reserve(&store, &key("k")) else { panic!("after {n} leases") };
            assert_eq!(in_flight.retry_after(), LEASE);
        }
        place.clock.advance(LEASE - MS);
        let Reserve::InFlight(in_flight) = reserve(&store, &key("k")) else { panic!("to the bound") };
        assert_eq!((in_flight.retry_after(), wakes.count()), (MS, 0));
        place.clock.advance(MS);
        assert_eq!(interrupted(&store, &key("k")).cause(), Cause::LeaseLapsed);
        assert_eq!((told(&ready(&mut task).unwrap()), wakes.count()), (Told::Interrupted(1), 1));
        place.clock.advance(MS);
        assert_eq!((state(&store, &key("k")), store.stats().log_bytes), (Some(KeyState::Interrupted), written));
        // Late, and it counts.
        assert_eq!(guard.complete(RESPONSE).unwrap(), Completion::Done);
        // Dropped within the bound: interrupted at once.
        let guard = fresh(&store, &key("other"));
        place.clock.advance(LEASE * 50);
        drop(guard);
        assert_eq!(interrupted(&store, &key("other")).cause(), Cause::Dropped);
    });
}

/// The bound shorter than the lease, and equal to it.
#[test]
fn a_bound_below_the_lease_does_not_shorten_it() {
    let (disk, clock) = (SimDisk::new(), ManualClock::default());
    for (n, bound) in [MS, LEASE - MS, LEASE, LEASE + MS].into_iter().enumerate() {
        let store = testing::open(disk.clone(), options(&clock).renew_while_held(bound), n as u64).unwrap();
        let guard = fresh(&store, &key(format!("{n}")));
        clock.advance(LEASE.max(bound) - MS);
        assert_eq!(state(&store, guard.key()), Some(KeyState::InFlight));
        clock.advance(MS);
        assert_eq!(state(&store, guard.key()), Some(KeyState::Interrupted));
        drop(guard);
        drop(store);
    }
}

/// S10: a held key never expires, and after a kill it is interrupted.
#[test]
fn a_key_that_renewed_itself_far_beyond_the_retention_is_interrupted_by_a_kill() {
    everywhere(|place| {
        let window = Duration::from_secs(60);
        let open = || renewing(place, window * 20).retention(Retention::new(window, 0.5)).lease(Duration::from_secs(5));
        let store = place.open_as(open());
        let guard = fresh(&store, &key("k"));
        // Others come and go, so that segments retire beneath it.
        for n in 0..200 {
            place.clock.advance(window / 12);
            let other = fresh(&store, &key(format!("other-{n}")));
            assert_eq!(other.complete(&[7; 3000]).unwrap(), Completion::Done);
            assert_eq!(state(&store, &key("k")), Some(KeyState::InFlight), "{n}");
        }
        let killed = place.open_after_kill_as(open());
        assert_eq!(interrupted(&killed, &key("k")).cause(), Cause::Crash);
        drop(killed);
        drop(guard);
    });
}

// Durability::Interval.

#[test]
fn what_is_written_is_synced_within_the_interval_and_nothing_is_synced_for_nothing() {
    let every = Duration::from_secs(2);
    let (disk, clock) = (SimDisk::new(), ManualClock::default());
    let store = testing::open(disk.clone(), options(&clock).durability(Durability::Interval(every)), 1).unwrap();
    let opened = store.stats().syncs;
    let syncs = || store.stats().syncs - opened;
    clock.advance(every * 10);
    assert_eq!(syncs(), 0, "nothing was written");
    let guard = fresh(&store, &key("k"));
    clock.advance(every - MS);
    assert_eq!(guard.complete(RESPONSE).unwrap(), Completion::Done);
    assert_eq!(syncs(), 0);
    clock.advance(MS);
    assert_eq!(syncs(), 1, "the first record is as old as the interval");
    let lost = testing::open(disk.crash_all_old(), options(&clock), 2).unwrap();
    replays(&lost, &key("k"), RESPONSE);
    clock.advance(every * 10);
    assert_eq!(syncs(), 1, "nothing was written since");
    // Every kind of record counts: a drop, a lapse, a release.
    drop(fresh(&store, &key("dropped")));
    clock.advance(every);
    assert_eq!(syncs(), 2);
    let lapses = fresh(&store, &key("lapses"));
    clock.advance(every);
    assert_eq!(syncs(), 3);
    clock.advance(LEASE - every);
    assert_eq!(syncs(), 3);
    clock.advance(every);
    assert_eq!(syncs(), 4, "the lapse was written");
    // What somebody else has synced meanwhile needs no sync.
    assert_eq!(lapses.release().unwrap(), Completion::Done);
    store.sync().unwrap();
    assert_eq!(syncs(), 5);
    clock.advance(every * 10);
    assert_eq!(syncs(), 5);
}

#[test]
fn the_interval_is_kept_by_the_clock_of_the_machine_too() {
    let place = tempfile::tempdir().unwrap();
    let every = Duration::from_millis(30);
    let open = Options::new().durability(Durability::Interval(every)).retention(Retention::new(LEASE, 0.1));
    let store = Store::open(place.path().join("store"), open).unwrap();
    let opened = store.stats().syncs;
    for round in 1..=5_u64 {
        assert_eq!(fresh(&store, &key(format!("{round}"))).complete(RESPONSE).unwrap(), Completion::Done);
        let begun = Instant::now();
        while store.stats().syncs < opened + round {
            assert!(begun.elapsed() < PATIENCE, "never synced");
            thread::sleep(MS);
        }
        // Idle: at most one more, of what was written while the sync went on.
        thread::sleep(every * 3);
        assert!(store.stats().syncs <= opened + round + 1);
        let surplus = store.stats().syncs - opened - round;
        assert_eq!(surplus, 0, "round {round}");
    }
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
            assert_eq!(store.close(Duration::ZERO).unwrap().unfinished, guards);
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

// M5: batches.

#[test]
fn a_batch_is_answered_item_by_item_as_if_one_after_another() {
    everywhere(|place| {
        let store = place.open();
        assert_eq!(fresh(&store, &key("done")).complete(RESPONSE).unwrap(), Completion::Done);
        let held = fresh(&store, &key("held"));
        drop(fresh(&store, &key("interrupted")));
        let ask = |id: &str| Ask::new(&key(id), request());
        let old = std::time::SystemTime::UNIX_EPOCH;
        let asks = [
            ask("new"),
            ask("done"),
            ask("new"),
            Ask::new(&key("new"), crate::place::other_request()),
            ask("held"),
            Ask::new(&key("done"), crate::place::other_request()),
            ask("interrupted"),
            Ask::new(&key("interrupted"), request())
                .options(ReserveOptions::new().on_interrupted(OnInterrupted::TakeOver)),
            ask("interrupted"),
            Ask::new(&key("waits"), request()).options(ReserveOptions::new().wait(MS)),
            Ask::new(&key("zero"), request()).options(ReserveOptions::new().lease(Duration::ZERO)),
            Ask::new(&key("old"), request()).options(ReserveOptions::new().issued_at(old)),
            ask("waits"),
        ];
        let syncs = store.stats().syncs;
        let told = store.reserve_batch(&asks).unwrap();
        let synced = store.stats().syncs - syncs;
        assert_eq!(synced, u64::from(place.setting.durability == Durability::PowerLoss), "one sync for all");
        let name = |told: &Result<Reserve, Error>| match told {
            Ok(Reserve::Fresh(guard)) => format!("fresh {}", guard.attempt()),
            Ok(Reserve::Replay(_)) => "replay".into(),
            Ok(Reserve::InFlight(_)) => "in flight".into(),
            Ok(Reserve::Interrupted(_)) => "interrupted".into(),
            Ok(Reserve::Mismatch(_)) => "mismatch".into(),
            Ok(Reserve::TooOld(_)) => "too old".into(),
            Err(error) => format!("{:?}", error.kind()),
        };
        let expect = [
            "fresh 1",
            "replay",
            "in flight",
            "mismatch",
            "in flight",
            "mismatch",
            "interrupted",
            "fresh 2",
            "in flight",
            "InvalidOptions",
            "InvalidOptions",
            "too old",
            "fresh 1",
        ];
        assert_eq!(told.iter().map(name).collect::<Vec<_>>(), expect);
        let guards: Vec<_> = told
            .into_iter()
            .flatten()
            .filter_map(|told| match told {
                Reserve::Fresh(guard) => Some(guard),
                _ => None,
            })
            .collect();
        // One of them was overtaken, one is too large: each is told for itself.
        let overtaken = guards[0].key().clone();
        assert!(store.forget(&overtaken, "").unwrap());
        let sizes = [3, crate::place::RESPONSE_BYTES_MAX + 1, 5];
        let items = guards.into_iter().zip(sizes).map(|(guard, size)| (guard, vec![7; size]));
        let stored = store.complete_batch(items);
        assert_eq!(*stored[0].as_ref().unwrap(), Completion::Superseded);
        let error = stored[1].as_ref().unwrap_err();
        assert_eq!((error.error.kind(), error.reservation.key().id()), (ErrorKind::TooLarge, &b"interrupted"[..]));
        assert_eq!(*stored[2].as_ref().unwrap(), Completion::Done);
        drop((stored, held));
        assert_eq!(store.stats().guards, 0);
        assert!(store.reserve_batch(&[]).unwrap().is_empty());
        assert!(store.complete_batch([]).is_empty());
        store.close(Duration::ZERO).unwrap();
        assert_eq!(store.reserve_batch(&asks).unwrap_err().kind(), ErrorKind::Closed);
    });
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

// Figures.

#[cfg(target_os = "linux")]
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

/// What is kept per key is kept while it is in flight; what has expired is given up.
#[cfg(target_os = "linux")]
#[test]
fn keys_that_come_and_go_leave_nothing_in_memory() {
    const BATCH: u64 = 1000;
    let keys: u64 = if cfg!(debug_assertions) { 40_000 } else { 1_000_000 };
    let (place, clock) = (tempfile::tempdir().unwrap(), ManualClock::default());
    let window = Duration::from_secs(10);
    let open = options(&clock).retention(Retention::new(window, 1000.0)).lease(window);
    let store = Store::open(place.path().join("store"), open).unwrap();
    let go_through = |from: u64, until: u64| {
        for n in from..until {
            let guard = fresh(&store, &key(format!("{n}")));
            let mut waits = Box::pin(store.reserve_with_async(guard.key(), request(), &waiting()));
            assert!(poll(&mut waits).is_pending());
            match n % 4 {
                0 => assert_eq!(guard.complete(RESPONSE).unwrap(), Completion::Done),
                1 => assert_eq!(guard.release().unwrap(), Completion::Done),
                2 => drop(guard),
                _ => assert_eq!(guard.detach(MS).map(|_| ()).map_err(|_| ()), Ok(())),
            }
            drop(waits);
            if n % BATCH == 0 {
                clock.advance(window / 10);
            }
        }
        (resident_bytes(), store.stats())
    };
    let (before, _) = go_through(0, keys / 2);
    let (after, stats) = go_through(keys / 2, keys);
    tell(&format!(
        "{keys} keys came and went: {} KiB resident after half of them, {} KiB after all; {} keys in the index",
        before >> 10,
        after >> 10,
        stats.keys
    ));
    assert_eq!((stats.guards, stats.waiting), (0, 0));
    assert!(stats.keys < 60 * BATCH, "{}", stats.keys);
    assert!(after < before + (16 << 20), "{before} bytes, and then {after}");
}

#[test]
fn a_reserve_by_a_task_costs_little_more_than_one_by_a_thread() {
    const ROUNDS: u32 = 21;
    let calls: u32 = if cfg!(debug_assertions) { 200 } else { 20_000 };
    let (place, clock) = (tempfile::tempdir().unwrap(), ManualClock::default());
    let open = options(&clock).retention(Retention::new(Duration::from_secs(3600), 1000.0));
    let store = Store::open(place.path().join("store"), open).unwrap();
    let mut times = [Vec::new(), Vec::new()];
    let mut keys: Vec<_> = Vec::new();
    for round in 0..2 * ROUNDS {
        keys.clear();
        keys.extend((0..calls).map(|n| key(format!("{round}-{n}"))));
        let begun = Instant::now();
        for key in &keys {
            let answer = if round % 2 == 0 {
                store.reserve(key, request())
            } else {
                let call = std::pin::pin!(store.reserve_async(key, request()));
                match call.poll(&mut std::task::Context::from_waker(std::task::Waker::noop())) {
                    std::task::Poll::Ready(answer) => answer,
                    // The helper has not made the next segment ready.
                    std::task::Poll::Pending => continue,
                }
            };
            std::mem::forget(answer);
        }
        times[(round % 2) as usize].push(begun.elapsed() / calls);
    }
    let [thread, task] = times.map(|mut times| {
        times.sort();
        (times[0], times[times.len() / 2])
    });
    tell(&format!(
        "a reserve by a thread took {:?} (median of {ROUNDS} rounds; best {:?}), by a task {:?} (best {:?})",
        thread.1, thread.0, task.1, task.0
    ));
    if !cfg!(debug_assertions) {
        assert!(task.0 <= thread.0 + Duration::from_nanos(100), "{task:?} against {thread:?}");
    }
}
