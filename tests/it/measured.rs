//! What the store measures of its clients, and whom it tells.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use keyonce::testing::{self, EIO, ManualClock, SimDisk, Step};
use keyonce::{
    AppendMode, Ask, Completion, Durability, ErrorKind, Event, Fingerprint, Health, OnInterrupted, Options, Reserve,
    ReserveOptions, Retention, Store,
};

use crate::place::{
    LEASE, MS, as_fresh, as_interrupted, as_replay, everywhere, fresh, key, other_request, request, reserve,
    until_waiting,
};
use crate::ring::{START_MS, options as ring_options};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// What a store has told.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<Event>>>);

impl Heard {
    fn listen(&self, options: Options) -> Options {
        let heard = self.clone();
        options.on_event(Arc::new(move |event| heard.0.lock().unwrap().push(event.clone())))
    }

    /// What was told since the last call, but for the opening.
    fn take(&self) -> Vec<Event> {
        let told = std::mem::take(&mut *self.0.lock().unwrap());
        told.into_iter().filter(|event| !matches!(event, Event::Opened(_))).collect()
    }
}

/// A store that remembers keys for a day, and what it tells.
fn a_day() -> (ManualClock, Heard, Store) {
    let (clock, heard) = (ManualClock::new(START_MS), Heard::default());
    let options = Options::new().clock(Arc::new(clock.clone())).lease(2 * DAY).retention(Retention::new(DAY, 0.1));
    let store = testing::open(SimDisk::new(), heard.listen(options), 1).unwrap();
    (clock, heard, store)
}

fn done(store: &Store, id: &str) {
    assert_eq!(fresh(store, &key(id)).complete(b"paid").unwrap(), Completion::Done);
}

#[test]
fn the_age_of_each_duplicate_is_counted_by_its_answer() {
    everywhere(|place| {
        let store = place.open();
        let ages = || store.stats().retry_ages;
        done(&store, "done");
        let owner = fresh(&store, &key("in flight"));
        drop(fresh(&store, &key("dropped")));
        assert_eq!(ages().count(), 0, "a first request is no duplicate");

        place.clock.advance(SECOND);
        as_replay(reserve(&store, &key("done")));
        assert_eq!((ages().count(), ages().quantile(1.0)), (1, Some(SECOND)));
        place.clock.advance(SECOND);
        assert!(matches!(reserve(&store, &key("in flight")), Reserve::InFlight(_)));
        assert_eq!((ages().count(), ages().quantile(1.0)), (2, Some(2 * SECOND)));
        place.clock.advance(SECOND);
        let stop = as_interrupted(reserve(&store, &key("dropped")));
        assert_eq!((ages().count(), ages().quantile(1.0)), (3, Some(3 * SECOND)));
        place.clock.advance(SECOND);
        let takes_over = ReserveOptions::new().on_interrupted(OnInterrupted::TakeOver);
        let next = as_fresh(store.reserve_with(&key("dropped"), request(), &takes_over).unwrap());
        assert_eq!((ages().count(), ages().quantile(1.0)), (4, Some(4 * SECOND)), "a take-over is a retry as well");

        // Another request under the key is none, and neither is an act of an owner or of a handle, or a look.
        place.clock.advance(SECOND);
        assert!(matches!(reserve(&store, &key("dropped")), Reserve::InFlight(_)));
        assert_eq!((ages().count(), ages().quantile(1.0)), (5, Some(5 * SECOND)), "since the first attempt");
        for id in ["done", "in flight", "dropped"] {
            assert!(matches!(store.reserve(&key(id), other_request()).unwrap(), Reserve::Mismatch(_)));
            assert!(store.peek(&key(id)).unwrap().is_some());
        }
        assert_eq!(owner.renew(LEASE).unwrap(), Completion::Done);
        assert_eq!(owner.release().unwrap(), Completion::Done);
        assert_eq!(stop.resolve(b"late").unwrap(), Completion::Superseded);
        assert_eq!(next.complete(b"paid").unwrap(), Completion::Done);
        let again = fresh(&store, &key("in flight"));
        assert_eq!(ages().count(), 5);
        assert_eq!(ages().buckets().map(|(_, count)| count).sum::<u64>(), 5);

        // The age counts from the first time, however often the key changed hands; from anew once it was given back.
        place.clock.advance(SECOND);
        as_replay(reserve(&store, &key("dropped")));
        assert_eq!(ages().quantile(1.0), Some(6 * SECOND));
        assert!(matches!(reserve(&store, &key("in flight")), Reserve::InFlight(_)));
        let youngest = ages().quantile(0.0).unwrap();
        assert!(ages().count() == 7 && youngest >= SECOND && youngest < SECOND * 9 / 8, "{:?}", ages());
        drop(again);
    });
}

#[test]
fn a_duplicate_in_a_batch_counts_as_any_other() {
    let (clock, _, store) = a_day();
    done(&store, "done");
    clock.advance(SECOND);
    let (done, new) = (key("done"), key("new"));
    let asks = [Ask::new(&done, request()), Ask::new(&new, request()), Ask::new(&new, request())];
    let answers = store.reserve_batch(&asks).unwrap();
    assert!(matches!(answers[..], [Ok(Reserve::Replay(_)), Ok(Reserve::Fresh(_)), Ok(Reserve::InFlight(_))]));
    let ages = store.stats().retry_ages;
    assert_eq!((ages.count(), ages.quantile(0.0), ages.quantile(1.0)), (2, Some(Duration::ZERO), Some(SECOND)));
}

#[test]
fn the_ages_add_up_over_the_whole_store() {
    let (clock, _, store) = a_day();
    for n in 0..1000 {
        done(&store, &n.to_string());
    }
    clock.advance(SECOND);
    (0..900).for_each(|n| drop(as_replay(reserve(&store, &key(n.to_string())))));
    clock.advance(MINUTE);
    (0..100).for_each(|n| drop(as_replay(reserve(&store, &key(n.to_string())))));
    let ages = store.stats().retry_ages;
    assert_eq!(ages.count(), 1000);
    let near = |told: Option<Duration>, ms: u64| {
        let told = told.unwrap();
        told >= Duration::from_millis(ms) && told < Duration::from_millis(ms + ms.div_ceil(8))
    };
    assert!(near(ages.quantile(0.5), 1000) && near(ages.quantile(0.9), 1000), "{ages:?}");
    assert!(near(ages.quantile(0.91), 61_000) && near(ages.quantile(0.999), 61_000), "{ages:?}");
    assert_eq!(ages.buckets().map(|(_, count)| count).collect::<Vec<_>>(), [900, 100]);
}

#[test]
fn a_caller_that_waits_is_one_duplicate() {
    let (clock, _, store) = a_day();
    let owner = fresh(&store, &key("held"));
    clock.advance(SECOND);
    let waits = ReserveOptions::new().wait(HOUR);
    thread::scope(|threads| {
        let waiter = threads.spawn(|| as_replay(store.reserve_with(&key("held"), request(), &waits).unwrap()));
        until_waiting(&store, 1);
        // What it looks at again is no new request.
        clock.advance(SECOND);
        assert_eq!(owner.renew(2 * DAY).unwrap(), Completion::Done);
        clock.advance(SECOND);
        assert_eq!(owner.complete(b"paid").unwrap(), Completion::Done);
        waiter.join().unwrap();
    });
    let ages = store.stats().retry_ages;
    assert_eq!((ages.count(), ages.quantile(1.0)), (1, Some(SECOND)), "as old as when it came");
    let waits = ReserveOptions::new().wait(SECOND);
    as_replay(store.reserve_with(&key("held"), request(), &waits).unwrap());
    assert_eq!(store.stats().retry_ages.count(), 2);
}

fn warnings(told: &[Event]) -> usize {
    told.iter().filter(|event| matches!(event, Event::RetryWindowShort { .. })).count()
}

#[test]
fn retries_that_come_near_the_end_of_the_retention_are_told_at_most_once_an_hour() {
    let (clock, heard, store) = a_day();
    for n in 0..10 {
        done(&store, &n.to_string());
    }
    let four_fifths = DAY * 4 / 5;
    clock.advance(four_fifths - MS);
    as_replay(reserve(&store, &key("0")));
    assert_eq!(warnings(&heard.take()), 0, "a millisecond below four fifths");
    clock.advance(MS);
    as_replay(reserve(&store, &key("1")));
    let told = heard.take();
    let [Event::RetryWindowShort { p999, retention }] = told[..] else { panic!("{told:?}") };
    assert_eq!((p999, retention), (four_fifths, DAY));

    for minute in 0..60 {
        as_replay(reserve(&store, &key("2")));
        assert_eq!(warnings(&heard.take()), 0, "after {minute} minutes");
        clock.advance(MINUTE);
    }
    as_replay(reserve(&store, &key("2")));
    assert_eq!(warnings(&heard.take()), 1, "after an hour");
}

#[test]
fn one_late_retry_among_thousands_is_no_warning_and_a_few_are() {
    let (clock, heard, store) = a_day();
    for n in 0..20 {
        done(&store, &n.to_string());
    }
    (0..3000).for_each(|n| drop(as_replay(reserve(&store, &key((n % 20).to_string())))));
    clock.advance(DAY * 9 / 10);
    let mut late = 0;
    while warnings(&heard.take()) == 0 {
        as_replay(reserve(&store, &key((late % 20).to_string())));
        late += 1;
        assert!(late < 20, "{:?}", store.stats().retry_ages);
        // The ages of all are looked at once a minute at most.
        clock.advance(MINUTE);
    }
    assert_eq!(late, 4, "more than one in a thousand of 3004");
}

/// One fingerprint in eight is watched.
fn requests(count: u32) -> impl Iterator<Item = Fingerprint> {
    (0..count).map(|n| Fingerprint::of(n.to_le_bytes()))
}

fn ask(store: &Store, id: String, request: Fingerprint) {
    let owner = as_fresh(store.reserve(&key(id), request).unwrap());
    assert_eq!(owner.complete(b"paid").unwrap(), Completion::Done);
}

#[test]
fn a_client_that_makes_a_key_for_each_try_is_counted_and_told() {
    let (clock, heard, store) = a_day();
    for (n, request) in requests(400).enumerate() {
        ask(&store, format!("{n} first"), request);
    }
    assert_eq!((store.stats().fresh_key_per_retry, heard.take().len()), (0, 0));
    clock.advance(10 * SECOND);
    for (n, request) in requests(400).enumerate() {
        ask(&store, format!("{n} second"), request);
    }
    let count = store.stats().fresh_key_per_retry;
    assert!((20..=100).contains(&count), "{count} of 400, where one in eight is watched");
    let told = heard.take();
    let [Event::FreshKeyPerRetry { count: first }] = told[..] else { panic!("{told:?}") };
    assert_eq!(first, 1, "told at once");
    println!("{} of 400 retries under a new key were seen", count);

    // The next event comes a minute later, and tells of all.
    clock.advance(MINUTE);
    for attempt in ["third", "fourth"] {
        for (n, request) in requests(400).enumerate() {
            ask(&store, format!("{n} {attempt}"), request);
        }
    }
    let told = heard.take();
    let [Event::FreshKeyPerRetry { count: all }] = told[..] else { panic!("{told:?}") };
    assert_eq!(all, count + 1);
    assert_eq!(store.stats().fresh_key_per_retry, 2 * count);
}

#[test]
fn retries_of_one_key_and_equal_requests_of_other_scopes_or_minutes_are_no_fresh_keys() {
    let (clock, heard, store) = a_day();
    for (n, request) in requests(200).enumerate() {
        ask(&store, n.to_string(), request);
        let again = store.reserve(&key(n.to_string()), request).unwrap();
        drop(as_replay(again));
        // Given back and asked for again, it is the same key.
        let given_back = as_fresh(store.reserve(&key(format!("{n} back")), Fingerprint::of(n.to_string())).unwrap());
        assert_eq!(given_back.release().unwrap(), Completion::Done);
        ask(&store, format!("{n} back"), Fingerprint::of(n.to_string()));
        // Interrupted and taken over, too.
        let with = ReserveOptions::new().on_interrupted(OnInterrupted::TakeOver);
        let stopped = Fingerprint::of(format!("{n} stopped"));
        drop(as_fresh(store.reserve_with(&key(format!("{n} stopped")), stopped, &with).unwrap()));
        drop(as_fresh(store.reserve_with(&key(format!("{n} stopped")), stopped, &with).unwrap()));
    }
    for (n, request) in requests(200).enumerate() {
        let elsewhere = keyonce::Key::new("refunds", n.to_string()).unwrap();
        drop(as_fresh(store.reserve(&elsewhere, request).unwrap()));
    }
    clock.advance(MINUTE);
    for (n, request) in requests(200).enumerate() {
        ask(&store, format!("{n} a minute later"), request);
    }
    assert_eq!((store.stats().fresh_key_per_retry, heard.take().len()), (0, 0));
}

#[test]
fn the_opening_is_told_once_before_anything_else() {
    everywhere(|place| {
        for created in [true, false] {
            let heard = Heard::default();
            let store = place.open_as(heard.listen(place.options()));
            drop(fresh(&store, &key(created.to_string())));
            let told = std::mem::take(&mut *heard.0.lock().unwrap());
            let Some(Event::Opened(report)) = told.first() else { panic!("{told:?}") };
            assert_eq!((report.created, report), (created, store.opened()));
            assert_eq!(told.iter().filter(|event| matches!(event, Event::Opened(_))).count(), 1);
            store.close(Duration::ZERO).unwrap();
        }
    });
}

#[test]
fn a_listener_may_call_the_store_and_may_panic() {
    let (over, ended) = mpsc::channel();
    // A call that never returns cannot be joined: the thread is left behind, and the test fails.
    thread::spawn(move || {
        listen_and_call();
        over.send(()).unwrap();
    });
    ended.recv_timeout(2 * MINUTE).expect("a call did not return, or an assertion failed");
}

fn listen_and_call() {
    let clock = ManualClock::new(START_MS);
    let listens: Arc<Mutex<Option<Store>>> = Arc::default();
    let within = Arc::clone(&listens);
    let calls = Arc::new(Mutex::new(0));
    let counted = Arc::clone(&calls);
    let on_event = move |event: &Event| {
        let store = within.lock().unwrap().clone();
        let Some(store) = store else { return };
        // Whatever was locked when it is told would be locked for ever now.
        drop(store.reserve(&key("0"), request()).unwrap());
        ask(&store, format!("within {event:?}"), request());
        assert!(store.peek(&key("0")).unwrap().is_some() && store.stats().keys > 0);
        *counted.lock().unwrap() += 1;
        std::panic::panic_any("a fault of the listener's own");
    };
    let options = Options::new()
        .clock(Arc::new(clock.clone()))
        .lease(2 * DAY)
        .retention(Retention::new(DAY, 0.1))
        .on_event(Arc::new(on_event));
    let store = testing::open(SimDisk::new(), options, 1).unwrap();
    done(&store, "0");
    *listens.lock().unwrap() = Some(store.clone());
    clock.advance(DAY * 9 / 10);
    as_replay(reserve(&store, &key("0")));
    for (n, request) in requests(100).chain(requests(100)).enumerate() {
        ask(&store, format!("{n} of two"), request);
    }
    assert!(*calls.lock().unwrap() >= 2, "the window and the fresh keys");
    as_replay(reserve(&store, &key("0")));
}

/// A bit rots beneath an open store, in two records that have to be kept when their segments are over.
#[test]
fn a_damaged_record_that_keeps_its_segment_from_being_given_up_is_told_once_a_segment() {
    let root = tempfile::tempdir().unwrap();
    let (clock, heard) = (ManualClock::new(START_MS), Heard::default());
    let options = || ring_options(&clock).append_mode(AppendMode::Positioned);
    let store = Store::open(root.path().join("store"), heard.listen(options())).unwrap();
    let mut at = 0;
    let mut work = |keys: u64| {
        for _ in 0..keys {
            at += 1;
            assert_eq!(fresh(&store, &key(at.to_string())).complete(&[7; 2000]).unwrap(), Completion::Done);
            clock.advance(SECOND / 10);
        }
    };
    let with = ReserveOptions::new().lease(DAY);
    let owners = ["the first", "the second"].map(|id| {
        let owner = as_fresh(store.reserve_with(&key(id), request(), &with).unwrap());
        assert_eq!(owner.save_checkpoint(format!("half of {id}").as_bytes()).unwrap(), Completion::Done);
        work(150);
        owner
    });
    let spoilt = ["half of the first", "half of the second"].map(|what| spoil(&root.path().join("store"), what));
    assert_ne!(spoilt[0], spoilt[1], "each lies in a segment of its own");
    let told = |heard: &Heard| {
        let damaged = |event| if let Event::Damaged(error) = event { Some(error) } else { None };
        heard.take().into_iter().filter_map(damaged).collect::<Vec<_>>()
    };
    assert!(told(&heard).is_empty(), "nobody has looked yet");
    for (owner, segment) in owners.into_iter().zip(spoilt) {
        work(1500);
        let errors = told(&heard);
        assert_eq!(errors.len(), 1, "{errors:?}");
        assert_eq!(errors[0].kind(), ErrorKind::Corrupt);
        assert!(errors[0].to_string().contains(&segment), "{errors:?}");
        assert!(store.stats().segments > 12, "nothing is given up: {}", store.stats().segments);
        assert_eq!(owner.complete(b"late").unwrap(), Completion::Done);
    }
    work(1500);
    assert!(told(&heard).is_empty());
    assert!(store.stats().segments < 12, "the damage is gone: {}", store.stats().segments);
}

/// Flips a bit in the file of the segment that holds `what`, and says which that is.
fn spoil(dir: &Path, what: &str) -> String {
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let bytes = fs::read(entry.path()).unwrap();
        let name = entry.file_name().into_string().unwrap();
        let found = bytes.windows(what.len()).position(|window| window == what.as_bytes());
        if let (true, Some(at)) = (name.starts_with("segment-"), found) {
            let file = fs::File::options().write(true).open(entry.path()).unwrap();
            file.write_all_at(&[bytes[at] ^ 1], at as u64).unwrap();
            return name;
        }
    }
    panic!("no segment holds {what:?}")
}

/// Every event that the store tells of its own accord, on one disk: a lease that lapses, a key that expires unresolved,
/// a clock that jumps, a disk that fills up, a sync that is slow, and one that fails.
#[test]
fn what_needs_a_person_is_told_once_and_never_under_a_lock() {
    let (clock, disk, heard) = (ManualClock::new(START_MS), SimDisk::new(), Heard::default());
    let calls_back: Arc<Mutex<Option<Store>>> = Arc::default();
    let (into, back) = (heard.clone(), Arc::clone(&calls_back));
    let on_event = move |event: &Event| {
        into.0.lock().unwrap().push(event.clone());
        // Whatever it tells, the store can be called.
        let store = back.lock().unwrap().clone();
        if let Some(store) = store {
            let _ = (store.stats(), store.peek(&key("lapsed")), store.reserve(&key("anything"), request()));
        }
    };
    let options = ring_options(&clock).lease(MINUTE).on_event(Arc::new(on_event));
    let store = testing::open(disk.clone(), options, 1).unwrap();
    *calls_back.lock().unwrap() = Some(store.clone());

    let owner = fresh(&store, &key("lapsed"));
    clock.advance(MINUTE);
    assert!(
        heard
            .take()
            .iter()
            .any(|event| matches!(event, Event::LeaseLapsed { attempt: 1, token, .. } if *token == owner.token()))
    );
    drop(owner);
    assert!(heard.take().is_empty());
    clock.advance(2 * DAY);
    drop(reserve(&store, &key("lapsed")));
    assert!(heard.take().iter().any(|event| matches!(event, Event::ExpiredUnresolved { .. })));

    clock.set_wall_ms(START_MS + 30 * 86_400_000);
    assert_eq!(fresh(&store, &key("after the jump")).renew(MINUTE).unwrap(), Completion::Done);
    clock.advance(MINUTE);
    assert!(heard.take().iter().any(|event| matches!(event, Event::ClockJumped { .. })));

    // The simulated disk takes no time: the clock moves while it is at the sync.
    let (slow, by) = (Arc::new(AtomicBool::new(true)), clock.clone());
    disk.on_step(move |step| {
        if step == Step::Sync && slow.swap(false, Ordering::Relaxed) {
            by.advance(2 * SECOND);
        }
    });
    store.sync().unwrap();
    clock.advance(DAY);
    assert!(heard.take().iter().any(|event| matches!(event, Event::SlowSync { took } if *took == 2 * SECOND)));

    let with = ReserveOptions::new().durability(Durability::ProcessCrash);
    drop(store.reserve_with(&key("not yet synced"), request(), &with).unwrap());
    disk.fail_from(disk.steps(), EIO);
    assert!(store.sync().is_err());
    assert!(store.sync().is_err());
    let poisoned = heard.take().iter().filter(|event| matches!(event, Event::Poisoned(_))).count();
    assert_eq!(poisoned, 1);
    assert!(matches!(store.health(), Health::Poisoned(_)));
    *calls_back.lock().unwrap() = None;
}
