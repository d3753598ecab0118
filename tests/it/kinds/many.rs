//! Many at once: rows M1 to M3, and a clock that moves in the middle of a call.

use std::collections::HashMap;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use keyonce::testing::ManualClock;
use keyonce::{
    Ask, Body, Clock, Completion, Key, KeyState, OnInterrupted, Reservation, Reserve, ReserveOptions, Store,
};

use super::ground::on_every_ground;
use crate::place::{LEASE, MS, as_fresh, as_replay, fresh, interrupted, key, replays, request};
use crate::tasks::{PATIENCE, block_on, machine_now, poll};

/// Row M1: threads, tasks and batches against each other, of a key that is new, interrupted, or has expired.
#[test]
fn of_threads_tasks_and_batches_that_ask_at_once_one_owns_the_key() {
    const CALLERS: usize = 6;
    on_every_ground(|ground| {
        let store = ground.open();
        for round in 0..15 {
            let key = key(format!("{round}"));
            if round % 3 == 1 {
                drop(fresh(&store, &key));
            }
            let with = ReserveOptions::new().on_interrupted(OnInterrupted::TakeOver);
            let start = Barrier::new(CALLERS);
            let told: Vec<Reserve> = thread::scope(|threads| {
                let callers: Vec<_> = (0..CALLERS)
                    .map(|caller| {
                        let (store, key, with, start) = (&store, &key, &with, &start);
                        threads.spawn(move || {
                            start.wait();
                            match caller % 3 {
                                0 => vec![store.reserve_with(key, request(), with).unwrap()],
                                1 => vec![block_on(store.reserve_with_async(key, request(), with)).unwrap()],
                                _ => {
                                    let asks =
                                        [Ask::new(key, request()).options(with.clone()), Ask::new(key, request())];
                                    store.reserve_batch(&asks).unwrap().into_iter().map(Result::unwrap).collect()
                                }
                            }
                        })
                    })
                    .collect();
                callers.into_iter().flat_map(|caller| caller.join().unwrap()).collect()
            });
            let owners: Vec<_> = told.iter().filter(|told| matches!(told, Reserve::Fresh(_))).collect();
            assert_eq!(owners.len(), 1, "round {round}: {told:?}");
            let attempt = if round % 3 == 1 { 2 } else { 1 };
            assert!(matches!(owners[0], Reserve::Fresh(owner) if owner.attempt() == attempt));
        }
    });
}

/// Row M2: the owner ends in every way while others ask; whoever works has reserved, and no two at a time.
#[test]
fn whoever_works_has_reserved_while_owners_end_in_every_way() {
    const THREADS: u64 = 4;
    on_every_ground(|ground| {
        let store = ground.open();
        let (working, done) = (AtomicU64::new(0), AtomicBool::new(false));
        thread::scope(|threads| {
            for n in 0..THREADS {
                let (store, working, done) = (&store, &working, &done);
                threads.spawn(move || {
                    let with = ReserveOptions::new().on_interrupted(OnInterrupted::TakeOver).wait(LEASE);
                    for turn in 0..30 {
                        let told = match (n + turn) % 2 {
                            0 => store.reserve_with(&key("k"), request(), &with),
                            _ => block_on(store.reserve_with_async(&key("k"), request(), &with)),
                        };
                        match told.unwrap() {
                            Reserve::Fresh(owner) => {
                                assert_eq!(working.fetch_add(1, Ordering::SeqCst), 0, "two at work");
                                thread::yield_now();
                                assert!(!done.load(Ordering::SeqCst), "work after the response");
                                let last = turn >= 28;
                                done.fetch_or(last, Ordering::SeqCst);
                                working.fetch_sub(1, Ordering::SeqCst);
                                if last {
                                    assert_eq!(owner.complete(b"paid").unwrap(), Completion::Done);
                                } else if turn % 3 == 0 {
                                    drop(owner);
                                } else {
                                    assert_eq!(owner.release().unwrap(), Completion::Done);
                                }
                            }
                            Reserve::Replay(response) => {
                                assert!(done.load(Ordering::SeqCst));
                                assert_eq!(response.body(), Body::Kept(b"paid"));
                            }
                            told => panic!("{told:?}"),
                        }
                    }
                });
            }
        });
        replays(&store, &key("k"), b"paid");
        assert_eq!((store.stats().guards, store.stats().waiting), (0, 0));
    });
}

/// A thread of M3: keys of its own, and others that come and go.
struct Churns<'a> {
    store: &'a Store,
    clock: &'a ManualClock,
    thread: u64,
    /// When the own keys that are done will be forgotten.
    until_ms: HashMap<u64, u64>,
}

const OWN: u64 = 40;
const CHURNING: u64 = 3;
/// How long the others are kept, and how much longer the own keys that are done.
const OTHERS_KEPT: Duration = Duration::from_millis(50);
const OWN_KEPT_MS: u64 = 400;
const OWN_KEPT: Duration = Duration::from_millis(OWN_KEPT_MS);

impl Churns<'_> {
    fn own(&self, n: u64) -> Key {
        key(format!("own {} {n}", self.thread))
    }

    fn response(&self, n: u64) -> Vec<u8> {
        format!("{} {n}", self.thread).into_bytes()
    }

    fn complete(&mut self, n: u64) {
        let with = ReserveOptions::new().retention(OWN_KEPT);
        let owner = as_fresh(self.store.reserve_with(&self.own(n), request(), &with).unwrap());
        self.complete_by(owner, n);
    }

    fn complete_by(&mut self, owner: Reservation, n: u64) {
        // It is kept from its completion, which comes later.
        self.until_ms.insert(n, self.clock.wall_ms() + OWN_KEPT_MS);
        assert_eq!(owner.complete(&self.response(n)).unwrap(), Completion::Done);
    }

    fn look(&mut self, n: u64) {
        let found = self.store.peek(&self.own(n)).unwrap();
        // A look that began in time may have ended late.
        let over = n % 4 == 3 && self.clock.wall_ms() >= self.until_ms[&n];
        let Some(info) = found else {
            assert!(over, "own key {n} of thread {} is missing", self.thread);
            return self.complete(n);
        };
        match (n % 4, info.state) {
            (0 | 2, KeyState::InFlight) | (1, KeyState::Interrupted) => {}
            (3, KeyState::Done) => {
                let with = ReserveOptions::new().retention(OWN_KEPT);
                match self.store.reserve_with(&self.own(n), request(), &with).unwrap() {
                    Reserve::Replay(told) => assert_eq!(told.body(), Body::Kept(&self.response(n))),
                    Reserve::Fresh(owner) if self.clock.wall_ms() >= self.until_ms[&n] => {
                        self.complete_by(owner, n);
                    }
                    told => panic!("own key {n} of thread {}: {told:?}", self.thread),
                }
            }
            (_, state) => panic!("own key {n} of thread {}: {state:?}", self.thread),
        }
    }

    fn run(&mut self, rounds: u64) -> Vec<Reservation> {
        let mut held = Vec::new();
        for n in 0..OWN {
            match n % 4 {
                0 => held.push(fresh(self.store, &self.own(n))),
                1 => drop(fresh(self.store, &self.own(n))),
                2 => assert!(fresh(self.store, &self.own(n)).detach(LEASE * 10).is_ok()),
                _ => self.complete(n),
            }
        }
        let with = ReserveOptions::new().retention(OTHERS_KEPT);
        for round in 0..rounds {
            for n in 0..60 {
                let other = key(format!("other {} {round} {n}", self.thread));
                let owner = as_fresh(self.store.reserve_with(&other, request(), &with).unwrap());
                assert_eq!(owner.complete(&[7; 3000]).unwrap(), Completion::Done);
                self.look((round * 60 + n) % OWN);
            }
            self.clock.advance(OTHERS_KEPT);
            (0..OWN).for_each(|n| self.look(n));
        }
        held
    }
}

/// Row M3: each thread's own keys, done, held, detached and interrupted, are there at every look, while others come
/// and go so fast that shards grow and segments get new lives; and after a crash.
#[test]
fn own_keys_are_never_missing_while_others_churn_shards_grow_and_segments_retire() {
    let rounds: u64 = if cfg!(debug_assertions) { 20 } else { 100 };
    on_every_ground(|ground| {
        let clock = &ground.place.clock;
        let open = || ground.options().lease(LEASE * 10).segment_bytes(192 << 10);
        let store = ground.open_as(open());
        let index = store.stats().index_bytes;
        let held: Vec<_> = thread::scope(|threads| {
            let churns = |thread| {
                let mut churns = Churns { store: &store, clock, thread, until_ms: HashMap::new() };
                move || (churns.run(rounds), churns.until_ms)
            };
            let threads: Vec<_> = (0..CHURNING).map(|thread| threads.spawn(churns(thread))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        // The store's helper may be behind; whoever writes calls it.
        let (written, begun) = (CHURNING * rounds * 60 * 3000, machine_now());
        while store.stats().log_bytes > written / 2 {
            assert!(begun.elapsed() < PATIENCE, "{} bytes of {written} are alive", store.stats().log_bytes);
            let other = key(format!("other {:?}", begun.elapsed()));
            let with = ReserveOptions::new().retention(MS);
            let owner = as_fresh(store.reserve_with(&other, request(), &with).unwrap());
            assert_eq!(owner.complete(&[7; 3000]).unwrap(), Completion::Done);
            clock.advance(MS);
            thread::yield_now();
        }
        assert!(store.stats().index_bytes > index, "no shard has grown");
        for after in ground.after_crashes_as(&open()).iter().chain([&store]) {
            let crashed = !std::ptr::eq(after, &store);
            for ((_, until_ms), thread) in held.iter().zip(0..) {
                for n in 0..OWN {
                    let expected = match n % 4 {
                        0 if crashed => Some(KeyState::Interrupted),
                        0 | 2 => Some(KeyState::InFlight),
                        1 => Some(KeyState::Interrupted),
                        _ => (clock.wall_ms() < until_ms[&n]).then_some(KeyState::Done),
                    };
                    let found = after.peek(&key(format!("own {thread} {n}"))).unwrap().map(|info| info.state);
                    assert!(found == expected || (n % 4 == 3 && expected.is_none()), "{thread} {n}: {found:?}");
                }
            }
        }
    });
}

/// Row M2: all who may end an interruption do so at once.
#[test]
fn of_a_resolution_a_take_over_a_release_and_a_late_completion_one_acts() {
    on_every_ground(|ground| {
        let store = ground.open();
        for round in 0..12 {
            let key = key(format!("{round}"));
            let owner = fresh(&store, &key);
            ground.place.clock.advance(LEASE);
            let [one, two, three] = [(); 3].map(|()| interrupted(&store, &key));
            let start = Barrier::new(4);
            let (completed, resolved, released, taken) = thread::scope(|threads| {
                let start = &start;
                let completes = threads.spawn(move || {
                    start.wait();
                    owner.complete(b"late").unwrap()
                });
                let resolves = threads.spawn(move || {
                    start.wait();
                    block_on(one.resolve_async(b"found out")).unwrap()
                });
                let releases = threads.spawn(move || {
                    start.wait();
                    two.release().unwrap()
                });
                start.wait();
                let taken = block_on(three.take_over_async()).unwrap();
                (completes.join().unwrap(), resolves.join().unwrap(), releases.join().unwrap(), taken)
            });
            let acted = [completed, resolved, released].map(|told| u32::from(told == Completion::Done));
            let took = u32::from(matches!(&taken, Reserve::Fresh(next) if next.attempt() == 2));
            assert_eq!(acted.iter().sum::<u32>() + took, 1, "{acted:?}, {taken:?}");
            match taken {
                Reserve::Fresh(next) => assert_eq!(next.complete(b"next").unwrap(), Completion::Done),
                Reserve::Replay(_) | Reserve::Interrupted(_) => {}
                told => panic!("{told:?}"),
            }
        }
    });
}

/// Row M5: whoever waits for a key is served by a batch as by anybody.
#[test]
fn a_batch_serves_those_who_wait_for_its_keys() {
    on_every_ground(|ground| {
        let store = ground.open();
        let ids = ["a", "b", "c"];
        let asks = ids.map(|id| Ask::new(&key(id), request()));
        let told = block_on(store.reserve_batch_async(&asks)).unwrap();
        let guards: Vec<_> = told.into_iter().map(|told| as_fresh(told.unwrap())).collect();
        let with = ReserveOptions::new().wait(LEASE);
        let mut waits: Vec<_> =
            ids.iter().map(|id| Box::pin(store.reserve_with_async(&key(id), request(), &with))).collect();
        assert!(waits.iter_mut().all(|task| poll(task).is_pending()));
        let items = guards.into_iter().zip(ids.map(|id| id.as_bytes().to_vec()));
        let stored = block_on(store.complete_batch_async(items));
        assert!(stored.iter().all(|stored| matches!(stored, Ok(Completion::Done))), "{stored:?}");
        for (task, id) in waits.into_iter().zip(ids) {
            assert_eq!(as_replay(block_on(task).unwrap()).body(), Body::Kept(id.as_bytes()));
        }
        for after in ground.after_crashes() {
            for id in ids {
                replays(&after, &key(id), id.as_bytes());
            }
        }
    });
}
