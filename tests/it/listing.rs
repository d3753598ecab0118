//! Lists of keys, gone through while the store goes on.
//!
//! `KEYONCE_LISTING_SEED=n` begins the random test with another seed.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak, mpsc};
use std::thread;
use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk, Storage as _};
use keyonce::{
    Cause, Clock, Completion, Durability, Error, ErrorKind, Interrupted, InterruptedKeys, Key, KeyInfo, KeyState, Keys,
    Reservation, Reserve, Store,
};

use crate::place::{
    LEASE, MS, as_fresh, as_interrupted, everywhere, fresh, key, other_request, replays, request, reserve, state,
};
use crate::ring::{START_MS, options};
use crate::workload::Random;

fn told(list: Keys) -> HashMap<Key, KeyInfo> {
    let mut told = HashMap::new();
    for item in list {
        let (key, info) = item.unwrap();
        assert!(told.insert(key.clone(), info).is_none(), "{key:?} came twice");
    }
    told
}

fn interrupted_ids(list: InterruptedKeys) -> Vec<Vec<u8>> {
    let mut ids: Vec<_> = list.map(|item| item.unwrap().key().id().to_vec()).collect();
    ids.sort();
    ids
}

/// What a crash left: so many interrupted keys among as many finished ones.
fn crashed(durability: Durability, keys: u64) -> (SimDisk, ManualClock, Store) {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(disk.clone(), options(&clock).durability(durability), 1).unwrap();
    let owners: Vec<_> = (0..keys).map(|at| fresh(&store, &key(at.to_string()))).collect();
    for at in 0..keys {
        assert_eq!(fresh(&store, &key(format!("done {at}"))).complete(b"").unwrap(), Completion::Done);
    }
    owners.into_iter().for_each(std::mem::forget);
    let killed = disk.kill();
    let after = testing::open(killed.clone(), options(&clock).durability(durability), 2).unwrap();
    (killed, clock, after)
}

fn settle(at: usize, stop: Interrupted) -> Option<KeyState> {
    match at % 3 {
        0 => {
            assert_eq!(stop.resolve(b"found out").unwrap(), Completion::Done);
            Some(KeyState::Done)
        }
        1 => {
            assert_eq!(stop.release().unwrap(), Completion::Done);
            None
        }
        _ => {
            let next = as_fresh(stop.take_over().unwrap());
            assert_eq!(next.complete(b"done again").unwrap(), Completion::Done);
            Some(KeyState::Done)
        }
    }
}

/// Row S8: one by one while the list is gone through, and all at once when it is complete.
#[test]
fn ten_thousand_keys_that_one_crash_interrupted_are_listed_once_each_and_settled() {
    const KEYS: u64 = 10_000;
    for in_bulk in [false, true] {
        let (_, _, store) = crashed(Durability::ProcessCrash, KEYS);
        assert_eq!(told(store.keys()).len() as u64, 2 * KEYS);
        let mut became = HashMap::new();
        let mut note = |at: usize, stop: Interrupted| {
            assert_eq!((stop.cause(), stop.attempt, stop.fingerprint), (Cause::Crash, 1, request()));
            let key = stop.key().clone();
            let expected = settle(at, stop);
            assert!(became.insert(key, expected).is_none(), "{at} came twice");
        };
        if in_bulk {
            let all: Vec<_> = store.interrupted().collect::<Result<_, Error>>().unwrap();
            assert_eq!(all.len() as u64, KEYS);
            all.into_iter().enumerate().for_each(|(at, stop)| note(at, stop));
        } else {
            store.interrupted().enumerate().for_each(|(at, stop)| note(at, stop.unwrap()));
        }
        assert_eq!(became.len() as u64, KEYS);
        for at in 0..KEYS {
            let key = key(at.to_string());
            assert_eq!(state(&store, &key), became[&key], "{at}");
        }
        assert_eq!(store.interrupted().count(), 0);
        let left = KEYS + became.values().flatten().count() as u64;
        assert_eq!(told(store.keys()).len() as u64, left);
    }
}

#[test]
fn an_item_says_what_a_look_at_its_key_says() {
    everywhere(|place| {
        let store = place.open();
        let owner = fresh(&store, &key("in flight"));
        assert_eq!(owner.save_checkpoint(b"half").unwrap(), Completion::Done);
        assert_eq!(fresh(&store, &key("done")).complete(b"paid").unwrap(), Completion::Done);
        drop(fresh(&store, &key("dropped")));
        let detached = fresh(&store, &key("detached")).detach(2 * LEASE).unwrap();
        let lapsed = fresh(&store, &key("lapsed"));
        assert_eq!(fresh(&store, &key("released")).release().unwrap(), Completion::Done);
        assert_eq!(fresh(&store, &key("forgotten")).complete(b"").unwrap(), Completion::Done);
        assert!(store.forget(&key("forgotten"), "a test").unwrap());
        place.clock.advance(LEASE - MS);
        assert_eq!(owner.renew(LEASE).unwrap(), Completion::Done);
        place.clock.advance(MS);

        let all = told(store.keys());
        let ids = ["detached", "done", "dropped", "in flight", "lapsed"];
        assert_eq!(all.len(), ids.len(), "{all:?}");
        for id in ids {
            let looked = store.peek(&key(id)).unwrap().unwrap();
            assert_eq!(format!("{:?}", all[&key(id)]), format!("{looked:?}"), "{id}");
        }
        assert_eq!(interrupted_ids(store.interrupted()), [&b"dropped"[..], b"lapsed"]);
        for item in store.interrupted() {
            let listed = item.unwrap();
            let asked = as_interrupted(reserve(&store, listed.key()));
            assert_eq!(format!("{:?}", listed.info()), format!("{:?}", asked.info()));
            assert_eq!((listed.cause(), listed.token, listed.since), (asked.cause(), asked.token, asked.since));
        }
        assert_eq!(lapsed.complete(b"late").unwrap(), Completion::Done);
        assert_eq!(store.reattach(&key("detached"), detached).unwrap().complete(b"").unwrap(), Completion::Done);
        assert_eq!(interrupted_ids(store.interrupted()), [b"dropped"]);
    });
}

/// What happens to some keys, as every look in between saw it.
#[derive(Default)]
struct History {
    /// By key: every state it was seen in, `None` for unknown.
    seen: HashMap<Key, Vec<Option<KeyState>>>,
}

impl History {
    fn look(&mut self, store: &Store, keys: &[Key]) {
        for key in keys {
            let states = self.seen.entry(key.clone()).or_default();
            let now = state(store, key);
            if states.last() != Some(&now) {
                states.push(now);
            }
        }
    }

    /// Asserts that a list of keys `that were` so told those that were so all the time once, and others at most once.
    fn check(&self, told: &HashMap<Key, Vec<KeyState>>, were: impl Fn(&Option<KeyState>) -> bool, when: &str) {
        for (key, states) in &self.seen {
            let told = told.get(key).map_or(&[][..], Vec::as_slice);
            assert!(told.len() <= 1, "{when}: {key:?} came {} times", told.len());
            assert!(told.iter().all(|told| states.contains(&Some(*told))), "{when}: {key:?} {told:?} {states:?}");
            if states.iter().all(&were) {
                assert_eq!(told.len(), 1, "{when}: {key:?} was {states:?} all the time");
            }
        }
    }
}

/// Random acts of one thread on a store of small segments, which go and get a new life as time passes.
struct Acts {
    store: Store,
    clock: ManualClock,
    random: Random,
    keys: Vec<Key>,
    held: Vec<Reservation>,
    others: u64,
}

impl Acts {
    fn act(&mut self) {
        let key = self.keys[self.random.index(self.keys.len())].clone();
        match self.random.below(12) {
            0..=3 => match reserve(&self.store, &key) {
                Reserve::Fresh(owner) if self.random.one_in(2) => self.held.push(owner),
                Reserve::Fresh(owner) => complete(owner, &[3; 2000]),
                Reserve::Interrupted(stop) => drop(settle(self.random.index(3), stop)),
                _ => {}
            },
            4 if !self.held.is_empty() => {
                let owner = self.held.swap_remove(self.random.index(self.held.len()));
                match self.random.below(4) {
                    0 => drop(owner),
                    1 => acted(owner.release()),
                    _ => acted(owner.complete(b"done")),
                }
            }
            5 => assert!(self.store.forget(&key, "a test").is_ok()),
            6..=7 => self.clock.advance(MS * u32::try_from(self.random.below(4000)).unwrap()),
            8 => self.held.iter().for_each(|owner| acted(owner.renew(LEASE))),
            _ => {
                for _ in 0..self.random.below(40) {
                    self.others += 1;
                    complete(fresh(&self.store, &other(self.others)), &[5; 2000]);
                }
            }
        }
    }
}

/// The owner may be superseded: somebody else acted on its key.
fn acted<E: std::fmt::Debug>(completion: Result<Completion, E>) {
    assert!(matches!(completion.unwrap(), Completion::Done | Completion::Superseded));
}

fn complete(owner: Reservation, response: &[u8]) {
    assert_eq!(owner.complete(response).unwrap(), Completion::Done);
}

fn other(n: u64) -> Key {
    Key::new("others", n.to_string()).unwrap()
}

#[test]
fn what_stays_so_is_told_once_while_keys_come_finish_expire_and_segments_go() {
    let first = std::env::var("KEYONCE_LISTING_SEED").map_or(1, |seed| seed.parse().unwrap());
    for seed in first..first + 12 {
        println!("KEYONCE_LISTING_SEED={seed}");
        let clock = ManualClock::new(START_MS);
        let store = testing::open(SimDisk::new(), options(&clock), seed).unwrap();
        let keys: Vec<_> = (0..120).map(|n| key(n.to_string())).collect();
        let mut acts =
            Acts { store: store.clone(), clock, random: Random(seed), keys: keys.clone(), held: Vec::new(), others: 0 };
        (0..600).for_each(|_| acts.act());
        for round in 0..4 {
            let (mut known, mut stopped) = (store.keys(), store.interrupted());
            let mut history = History::default();
            let (mut all, mut interrupted) = (HashMap::<_, Vec<_>>::new(), HashMap::<_, Vec<_>>::new());
            history.look(&store, &keys);
            let (mut over, mut segments) = ([false; 2], store.stats().segments);
            while over != [true; 2] {
                for _ in 0..acts.random.below(30) {
                    let item = known.next().map(Result::unwrap);
                    over[0] = item.is_none();
                    item.into_iter().for_each(|(key, info)| all.entry(key).or_default().push(info.state));
                }
                for _ in 0..acts.random.below(3) {
                    let item = stopped.next().map(Result::unwrap);
                    over[1] = item.is_none();
                    let stop = item.into_iter().map(|stop| (stop.key().clone(), stop.info().state));
                    stop.for_each(|(key, state)| interrupted.entry(key).or_default().push(state));
                }
                for _ in 0..acts.random.below(4) {
                    acts.act();
                    history.look(&store, &keys);
                }
                segments = segments.max(store.stats().segments);
            }
            let when = format!("seed {seed}, list {round}, {segments} segments");
            history.check(&all, Option::is_some, &when);
            history.check(&interrupted, |state| *state == Some(KeyState::Interrupted), &when);
            assert!(all.values().all(|told| told.len() == 1), "{when}: a key came twice");
        }
    }
}

#[test]
fn a_held_key_is_in_each_list_once_while_another_thread_makes_segments_go() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(disk, options(&clock), 1).unwrap();
    let held: Vec<_> = (0..200).map(|n| fresh(&store, &key(n.to_string()))).collect();
    let over = AtomicBool::new(false);
    thread::scope(|threads| {
        let lists = threads.spawn(|| {
            let mut lists = 0;
            while !over.load(Ordering::Relaxed) || lists < 3 {
                let all = told(store.keys());
                for n in 0..held.len() {
                    assert!(all.contains_key(&key(n.to_string())), "key {n} is missing in list {lists}");
                }
                lists += 1;
            }
            lists
        });
        for n in 0..6_000 {
            complete(fresh(&store, &other(n)), &[5; 2000]);
            clock.advance(100 * MS);
            if n % 100 == 0 {
                held.iter().for_each(|owner| acted(owner.renew(LEASE)));
            }
        }
        over.store(true, Ordering::Relaxed);
        println!("{} lists while ten windows passed", lists.join().unwrap());
    });
}

/// A clock in whose reading something happens: between two steps of a call, on its own thread.
struct Happens {
    clock: ManualClock,
    next: Mutex<Vec<Box<dyn FnOnce() + Send>>>,
}

impl std::fmt::Debug for Happens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Happens").finish_non_exhaustive()
    }
}

impl Clock for Happens {
    fn wall_ms(&self) -> u64 {
        self.clock.wall_ms()
    }

    fn boot_ms(&self) -> u64 {
        // What happens may read the clock: it happens once.
        let next = self.next.lock().unwrap().pop();
        if let Some(happens) = next {
            let later = std::mem::take(&mut *self.next.lock().unwrap());
            happens();
            self.next.lock().unwrap().extend(later);
        }
        self.clock.boot_ms()
    }

    fn boot_id(&self) -> [u8; 16] {
        self.clock.boot_id()
    }

    fn sleep(&self, ms: u64) -> Option<Duration> {
        self.clock.sleep(ms)
    }

    fn on_move(&self, wake: Weak<dyn Fn() + Send + Sync>) {
        self.clock.on_move(wake);
    }
}

/// A list copies addresses first and reads the records then, with nothing locked: here all their segments go between.
#[test]
fn a_key_is_told_although_its_segment_goes_while_the_list_is_there() {
    for times in 1..=2 {
        let clock = ManualClock::new(START_MS);
        let happens = Arc::new(Happens { clock: clock.clone(), next: Mutex::default() });
        let with = options(&clock).clock(Arc::clone(&happens) as Arc<dyn Clock>);
        let store = testing::open(SimDisk::new(), with, 1).unwrap();
        let held: Arc<Vec<_>> = Arc::new((0..640).map(|n| fresh(&store, &key(n.to_string()))).collect());
        let mut list = store.keys();
        for time in 0..times {
            let (store, clock, held) = (store.clone(), clock.clone(), Arc::clone(&held));
            happens.next.lock().unwrap().push(Box::new(move || {
                for n in 0..900 {
                    complete(fresh(&store, &other(time * 1000 + n)), &[5; 2000]);
                    clock.advance(100 * MS);
                    if n % 100 == 0 {
                        held.iter().for_each(|owner| acted(owner.renew(LEASE)));
                    }
                }
            }));
        }
        let first = list.next().unwrap().unwrap();
        assert!(happens.next.lock().unwrap().is_empty(), "all of it happened before the first item");
        let mut all: HashSet<_> = list.map(|item| item.unwrap().0).collect();
        assert!(all.insert(first.0));
        for n in 0..held.len() {
            assert!(all.contains(&key(n.to_string())), "key {n} is missing");
        }
    }
}

#[test]
fn a_list_grown_into_by_many_keys_tells_none_twice() {
    let clock = ManualClock::new(START_MS);
    let store = testing::open(SimDisk::new(), options(&clock), 1).unwrap();
    let early: Vec<_> = (0..500).map(|n| key(n.to_string())).collect();
    early.iter().for_each(|key| complete(fresh(&store, key), b""));
    let bytes = store.stats().index_bytes;
    let list = store.keys();
    let mut all = HashSet::new();
    let mut more = 0;
    for item in list {
        let (key, _) = item.unwrap();
        assert!(all.insert(key.clone()), "{key:?} came twice");
        for _ in 0..40 {
            more += u64::from(more < 20_000);
            if more < 20_000 {
                complete(fresh(&store, &other(more)), b"");
            }
        }
    }
    assert!(store.stats().index_bytes > 2 * bytes, "the shards grew");
    assert!(early.iter().all(|key| all.contains(key)));
}

#[test]
fn a_list_of_a_closed_store_says_so_once_and_ends() {
    everywhere(|place| {
        let store = place.open();
        let owners: Vec<_> = (0..300).map(|n| fresh(&store, &key(n.to_string()))).collect();
        drop(owners);
        let (mut known, mut stopped, mut unused) = (store.keys(), store.interrupted(), store.keys());
        let mut finished = store.keys();
        assert_eq!(finished.by_ref().count(), 300);
        assert!(known.next().unwrap().is_ok() && stopped.next().unwrap().is_ok());
        store.close(Duration::ZERO).unwrap();
        assert!(finished.next().is_none(), "it was over before");
        let closed = |item: Option<Result<(), Error>>| {
            item.and_then(Result::err).is_some_and(|error| error.kind() == ErrorKind::Closed)
        };
        for list in [&mut known, &mut unused, &mut store.keys()] {
            assert!(closed(list.next().map(|item| item.map(drop))));
            assert!(list.next().is_none() && list.next().is_none());
        }
        for list in [&mut stopped, &mut store.interrupted()] {
            assert!(closed(list.next().map(|item| item.map(drop))));
            assert!(list.next().is_none() && list.next().is_none());
        }
        // A list is no handle of the store: the directory is free although lists live.
        let again = place.open();
        assert_eq!(again.interrupted().count(), 300);
        let kept = again.keys();
        drop(again);
        assert_eq!(place.open().keys().count(), 300);
        assert!(closed(kept.last().map(|item| item.map(drop))));
    });
}

/// What a list reads outside of the locks must not be unmapped beneath it.
#[test]
fn a_store_may_be_closed_while_other_threads_go_through_lists() {
    everywhere(|place| {
        for round in 0..4 {
            let store = place.open();
            let owners: Vec<_> = (0..100).map(|n| fresh(&store, &key(format!("{round}-{n}")))).collect();
            let lists = || {
                loop {
                    let mut told = 0;
                    match store.keys().find_map(|item| item.inspect(|_| told += 1).err()) {
                        Some(error) => break error.kind(),
                        None => assert!(told >= 100, "a whole list tells what is held: {told}"),
                    }
                }
            };
            thread::scope(|threads| {
                let threads = [threads.spawn(lists), threads.spawn(lists)];
                (0..round * 20).for_each(|_| thread::yield_now());
                assert_eq!(store.close(Duration::ZERO).unwrap().unfinished, 100);
                for thread in threads {
                    assert_eq!(thread.join().unwrap(), ErrorKind::Closed);
                }
            });
            drop(owners);
        }
    });
}

#[test]
fn every_method_of_the_store_returns_while_a_list_is_held() {
    let (over, ended) = mpsc::channel();
    // A call that never returns cannot be joined: the thread is left behind, and the test fails.
    thread::spawn(move || {
        let (disk, clock, store) = crashed(Durability::PowerLoss, 100);
        let mut lists = (store.keys(), store.interrupted());
        let mut calls = 0;
        while let (Some(known), stopped) = (lists.0.next(), lists.1.next()) {
            let (known, _) = known.unwrap();
            calls += 1;
            let key = key(format!("while {calls}"));
            let owner = fresh(&store, &key);
            assert_eq!(owner.save_checkpoint(b"half").unwrap(), Completion::Done);
            assert_eq!(owner.renew(LEASE).unwrap(), Completion::Done);
            let token = owner.detach(LEASE).unwrap();
            assert_eq!(store.reattach(&key, token).unwrap().complete(b"").unwrap(), Completion::Done);
            drop(store.reserve(&known, request()).unwrap());
            assert!(store.peek(&known).unwrap().is_some());
            assert!(store.forget(&key, "a test").unwrap());
            assert!(store.stats().keys > 0 && !store.opened().created);
            store.sync().unwrap();
            assert!(store.keys().next().unwrap().is_ok());
            if let Some(stop) = stopped {
                assert!(store.interrupted().next().unwrap().is_ok());
                assert_eq!(stop.unwrap().resolve(b"found out").unwrap(), Completion::Done);
            }
            clock.advance(MS);
        }
        assert!(calls >= 200, "{calls}");
        let list = store.keys();
        store.close(Duration::from_secs(1)).unwrap();
        drop((store, list));
        assert!(disk.lock().unwrap().is_some());
        over.send(()).unwrap();
    });
    ended.recv_timeout(Duration::from_secs(120)).expect("a call did not return, or an assertion failed");
}

#[test]
fn a_handle_from_the_list_stands_for_the_request_of_its_key() {
    everywhere(|place| {
        let store = place.open();
        let ids = ["take over", "twice", "came back", "resolve"];
        let owners: Vec<_> =
            ids.map(|id| store.reserve(&key(id), other_request()).unwrap()).into_iter().map(as_fresh).collect();
        assert_eq!(owners[0].save_checkpoint(b"half").unwrap(), Completion::Done);
        place.clock.advance(LEASE);
        let mut stops: HashMap<_, _> =
            store.interrupted().map(|stop| stop.unwrap()).map(|stop| (stop.key().clone(), stop)).collect();
        let mut stop = |id| stops.remove(&key(id)).unwrap();

        let taken = stop("take over");
        assert_eq!((taken.fingerprint, taken.checkpoint()), (other_request(), &b"half"[..]));
        assert_eq!(taken.downstream_key("charge"), key("take over").downstream_key("charge"));
        let next = as_fresh(taken.take_over().unwrap());
        assert_eq!((next.attempt(), next.checkpoint()), (2, &b"half"[..]));
        assert!(matches!(reserve(&store, &key("take over")), Reserve::Mismatch(_)));
        assert_eq!(next.complete(b"paid").unwrap(), Completion::Done);
        assert!(matches!(reserve(&store, &key("take over")), Reserve::Mismatch(_)));
        assert!(matches!(store.reserve(&key("take over"), other_request()).unwrap(), Reserve::Replay(_)));

        let [one, two, three] = [(); 3].map(|()| {
            let again = store.interrupted().map(Result::unwrap);
            again.into_iter().find(|stop| *stop.key() == key("twice")).unwrap()
        });
        let owner = as_fresh(one.take_over().unwrap());
        // What the handle asks again, it asks for the request of the key: in flight, and not a mismatch.
        assert!(matches!(two.take_over().unwrap(), Reserve::InFlight(_)));
        assert_eq!(three.resolve(b"late").unwrap(), Completion::Superseded);
        assert_eq!(owner.complete(b"").unwrap(), Completion::Done);
        assert!(matches!(stop("twice").take_over().unwrap(), Reserve::Replay(_)));

        assert_eq!(owners[2].renew(LEASE).unwrap(), Completion::Done);
        assert_eq!(stop("came back").release().unwrap(), Completion::Superseded);
        assert_eq!(stop("resolve").resolve(b"found out").unwrap(), Completion::Done);
        let Reserve::Replay(response) = store.reserve(&key("resolve"), other_request()).unwrap() else { panic!() };
        assert_eq!(response.body(), keyonce::Body::Kept(b"found out"));
    });
}

#[test]
fn a_list_can_be_sent_to_another_thread_and_outlives_the_handle_it_came_from() {
    fn assert_sendable<T: Send + 'static>(list: T) -> T {
        list
    }
    let (_, _, store) = crashed(Durability::ProcessCrash, 50);
    let first = store.clone();
    let lists = (assert_sendable(first.keys()), assert_sendable(first.interrupted()));
    drop(first);
    let counted = thread::spawn(move || (told(lists.0).len(), interrupted_ids(lists.1).len())).join().unwrap();
    assert_eq!(counted, (100, 50));
}

/// A dropped guard leaves a record that nobody waits for.
#[test]
fn what_a_list_has_told_is_told_again_after_a_power_loss() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(disk.clone(), options(&clock).durability(Durability::PowerLoss), 1).unwrap();
    (0..5).for_each(|n| drop(fresh(&store, &key(n.to_string()))));
    let lost = testing::open(disk.crash_all_old(), options(&clock).durability(Durability::PowerLoss), 2).unwrap();
    let causes: Vec<_> = lost.interrupted().map(|stop| stop.unwrap().cause()).collect();
    assert!(causes.contains(&Cause::Crash), "a drop waits for no sync: {causes:?}");
    for from_keys in [false, true] {
        if from_keys {
            drop(fresh(&store, &key("one more")));
            assert!(told(store.keys()).values().all(|info| info.cause == Some(Cause::Dropped)));
        } else {
            assert!(store.interrupted().all(|stop| stop.unwrap().cause() == Cause::Dropped));
        }
        let image = disk.crash_all_old();
        let after = testing::open(image, options(&clock).durability(Durability::PowerLoss), 3).unwrap();
        assert!(after.interrupted().count() >= 5);
        assert!(after.interrupted().all(|stop| stop.unwrap().cause() == Cause::Dropped));
    }
}

/// A careless hand writes into a file of the open store.
#[test]
fn a_record_that_cannot_be_read_is_an_error_in_the_list_which_goes_on() {
    everywhere(|place| {
        let store = place.open();
        let segments = || -> Vec<_> {
            let files = crate::place::tree(&place.dir()).into_iter();
            files.filter(|(path, _)| path.file_name().unwrap().to_string_lossy().starts_with("segment-")).collect()
        };
        let mut done_at = None;
        for n in 0..50 {
            let owner = fresh(&store, &key(n.to_string()));
            let before = if n == 20 { segments() } else { Vec::new() };
            assert_eq!(owner.complete(b"paid").unwrap(), Completion::Done);
            for ((path, then), (_, now)) in before.into_iter().zip(segments()) {
                let changed = then.iter().zip(&now).position(|(then, now)| then != now);
                done_at = done_at.or(changed.map(|at| (path, at / 8 * 8)));
            }
        }
        let (path, at) = done_at.unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[0; 8], at as u64).unwrap();

        let (items, errors): (Vec<_>, Vec<_>) = store.keys().partition(Result::is_ok);
        assert_eq!((items.len(), errors.len()), (49, 1));
        let error = errors.into_iter().next().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains(&*path.file_name().unwrap().to_string_lossy()), "{error}");
        replays(&store, &key("21"), b"paid");
    });
}
