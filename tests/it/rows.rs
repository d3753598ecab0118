//! Rows of `tests/cases.md` that need a history of their own: records in chosen segments, torn and damaged records,
//! clocks that are set, many threads and many keys.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::thread;
use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk, Storage as _};
use keyonce::{
    Body, Cause, Clock as _, Completion, Durability, ErrorKind, Failed, KeyState, NotReattached, OnInterrupted,
    OnceError, Options, Outcome, Reserve, ReserveOptions, Retention, Store,
};

use crate::place::{
    LEASE, MS, WINDOW, as_fresh, everywhere, fresh, interrupted, key, other_request, replays, request, reserve,
    snapshot, state,
};

const HOUR_MS: u64 = 60 * 60 * 1000;
const TEN_YEARS_MS: u64 = 10 * 365 * 24 * HOUR_MS;
const MINUTE: Duration = Duration::from_secs(60);

/// The first position of a record in a segment; headers lie before it.
const RECORDS_START: usize = 8192;

/// The size of every segment here.
const SEGMENT_BYTES: u64 = 192 << 10;

// Ownership.

/// Row O12: both ask at the same moment.
#[test]
fn of_two_threads_that_reattach_at_the_same_moment_one_holds() {
    everywhere(|place| {
        let store = place.open();
        for round in 0..20 {
            let key = key(format!("{round}"));
            let token = fresh(&store, &key).detach(LEASE).unwrap();
            let start = Barrier::new(2);
            let ask = || {
                start.wait();
                store.reattach(&key, token)
            };
            let answers = thread::scope(|threads| {
                let asks = [threads.spawn(ask), threads.spawn(ask)];
                asks.map(|ask| ask.join().unwrap())
            });
            match answers {
                [Ok(holder), Err(NotReattached::InFlight)] | [Err(NotReattached::InFlight), Ok(holder)] => drop(holder),
                answers => panic!("{answers:?}"),
            }
            assert_eq!(interrupted(&store, &key).cause(), Cause::Dropped);
            assert!(matches!(store.reattach(&key, token), Err(NotReattached::Superseded)));
        }
    });
}

// Keys that get stuck.

/// Row S8, as far as it goes without a list of keys: all are counted, and each can be resolved, taken over, or
/// released.
#[test]
fn ten_thousand_keys_that_one_crash_interrupted_are_counted_and_each_can_be_settled() {
    const KEYS: u64 = 10_000;
    let (disk, clock) = (SimDisk::new(), ManualClock::default());
    let options = || plain_options(&clock).durability(Durability::ProcessCrash);
    let store = testing::open(disk.clone(), options(), 1).unwrap();
    let owners: Vec<_> = (0..KEYS).map(|at| fresh(&store, &key(at.to_string()))).collect();
    assert_eq!(store.stats().guards, KEYS);
    let killed = disk.kill();
    let after = testing::open(killed.clone(), options(), 2).unwrap();
    assert_eq!((after.opened().interrupted, after.opened().keys), (KEYS, KEYS));
    for (at, owner) in owners.iter().enumerate() {
        let key = key(at.to_string());
        let stop = interrupted(&after, &key);
        assert_eq!((stop.cause(), stop.token), (Cause::Crash, owner.token()));
        match at % 3 {
            0 => assert_eq!(stop.resolve(b"found out").unwrap(), Completion::Done),
            1 => assert_eq!(stop.release().unwrap(), Completion::Done),
            _ => {
                let next = as_fresh(stop.take_over().unwrap());
                assert_eq!(next.complete(b"done again").unwrap(), Completion::Done);
            }
        }
    }
    drop(after);
    let after = testing::open(killed, options(), 3).unwrap();
    assert_eq!(after.opened().interrupted, 0);
    for at in 0..KEYS {
        let expected = if at % 3 == 1 { None } else { Some(KeyState::Done) };
        assert_eq!(state(&after, &key(at.to_string())), expected, "key {at}");
    }
}

// Time.

/// Row T1.
#[test]
fn a_wall_clock_that_steps_back_an_hour_frees_nothing_and_lengthens_nothing() {
    for reboots in [false, true] {
        everywhere(|place| {
            let store = place.open();
            assert_eq!(fresh(&store, &key("done")).complete(b"paid").unwrap(), Completion::Done);
            let token = fresh(&store, &key("detached")).detach(2 * LEASE).unwrap();
            let owner = fresh(&store, &key("owned"));
            place.clock.set_wall_ms(place.clock.wall_ms() - HOUR_MS);

            // While open: the lease ends at its millisecond.
            replays(&store, &key("done"), b"paid");
            place.clock.advance(LEASE - MS);
            assert_eq!(state(&store, &key("owned")), Some(KeyState::InFlight));
            place.clock.advance(MS);
            assert_eq!(interrupted(&store, &key("owned")).cause(), Cause::LeaseLapsed);
            drop(owner);

            // Across a reopening, with another step back of an hour.
            store.close(Duration::ZERO).unwrap();
            drop(store);
            place.clock.set_wall_ms(place.clock.wall_ms() - HOUR_MS);
            let closed_for = if reboots { Duration::ZERO } else { LEASE / 2 };
            if reboots {
                place.clock.reboot();
            }
            place.clock.advance(closed_for);
            let store = place.open();
            replays(&store, &key("done"), b"paid");
            place.clock.advance(LEASE - closed_for - MS);
            assert_eq!(state(&store, &key("detached")), Some(KeyState::InFlight));
            place.clock.advance(MS);
            assert_eq!(interrupted(&store, &key("detached")).token, token);
            place.clock.advance(WINDOW - 2 * LEASE - MS);
            replays(&store, &key("done"), b"paid");
            place.clock.advance(MS);
            assert_eq!(state(&store, &key("done")), None, "expiry goes on");
        });
    }
}

/// Row T2.
#[test]
fn a_wall_clock_that_jumps_ten_years_ahead_frees_nothing_and_is_told() {
    for jump in ["open", "closed", "rebooted"] {
        everywhere(|place| {
            let store = place.open();
            assert_eq!(fresh(&store, &key("done")).complete(b"paid").unwrap(), Completion::Done);
            let owner = fresh(&store, &key("owned"));
            if jump == "open" {
                place.clock.set_wall_ms(place.clock.wall_ms() + TEN_YEARS_MS);
                assert_eq!(store.stats().clock_jump_held_ms, TEN_YEARS_MS);
            }
            replays(&store, &key("done"), b"paid");
            assert!(matches!(reserve(&store, &key("owned")), Reserve::InFlight(_)));
            store.close(Duration::ZERO).unwrap();
            drop((store, owner));
            if jump == "rebooted" {
                place.clock.reboot();
            }
            if jump != "open" {
                place.clock.set_wall_ms(place.clock.wall_ms() + TEN_YEARS_MS);
            }
            let store = place.open();
            let told = if jump == "open" { 0 } else { TEN_YEARS_MS };
            assert_eq!(store.opened().clock_jump_held_ms, told, "the jump came while {jump}");
            replays(&store, &key("done"), b"paid");
            assert_eq!(state(&store, &key("owned")), Some(KeyState::Interrupted));
            place.clock.advance(WINDOW - MS);
            replays(&store, &key("done"), b"paid");
            place.clock.advance(MS);
            assert_eq!(state(&store, &key("done")), None);
        });
    }
}

/// Small segments, and room for what these tests store.
fn plain_options(clock: &ManualClock) -> Options {
    Options::new()
        .lease(LEASE)
        .retention(Retention::new(WINDOW, 1.0))
        .response_bytes_max(16 << 10)
        .segment_bytes(SEGMENT_BYTES)
        .clock(Arc::new(clock.clone()))
}

/// Fills segments with finished keys that are kept for a minute until the log has rolled `rolls` more times.
fn roll(store: &Store, fillers: &AtomicU32, rolls: u64) {
    let with = ReserveOptions::new().retention(MINUTE).durability(Durability::ProcessCrash);
    let mut first = None;
    loop {
        let key = key(format!("filler {}", fillers.fetch_add(1, Ordering::Relaxed)));
        let owner = as_fresh(store.reserve_with(&key, request(), &with).unwrap());
        // A token is a place in the log, and all segments are of one size.
        let segment = owner.token().to_u64() / SEGMENT_BYTES;
        assert_eq!(owner.complete(&[1; 15_000]).unwrap(), Completion::Done);
        if segment >= *first.get_or_insert(segment) + rolls {
            return;
        }
    }
}

/// Row T6: the segment lives exactly as long as its youngest record, whichever millisecond the log rolls in.
#[test]
fn a_segment_goes_at_the_millisecond_of_its_youngest_record_and_not_before() {
    let kept = 10 * MINUTE;
    for after in [kept - MS, kept, kept + MS] {
        let (disk, clock, fillers) = (SimDisk::new(), ManualClock::default(), AtomicU32::new(0));
        let store = testing::open(disk.clone(), plain_options(&clock), 1).unwrap();
        for (id, retention, pause) in [("old", MINUTE, MINUTE), ("young", kept, Duration::ZERO)] {
            let with = ReserveOptions::new().retention(retention);
            let owner = as_fresh(store.reserve_with(&key(id), request(), &with).unwrap());
            assert_eq!(owner.complete(id.as_bytes()).unwrap(), Completion::Done);
            clock.advance(pause);
        }
        roll(&store, &fillers, 1);
        clock.advance(after);
        roll(&store, &fillers, 2);
        let images = [disk.kill(), disk.crash_all_old(), disk.crash_all_new()];
        let reopened = images.map(|image| testing::open(image, plain_options(&clock), 2).unwrap());
        for store in [&store].into_iter().chain(&reopened) {
            assert_eq!(state(store, &key("old")), None);
            if after < kept {
                replays(store, &key("young"), b"young");
            } else {
                assert_eq!(fresh(store, &key("young")).attempt_view().number(), 1);
            }
        }
        // The first segment is given up; the fillers of the others are young.
        assert_eq!(store.stats().segments, if after < kept { 4 } else { 3 }, "{after:?} after the youngest");
    }
}

// Many at once.

/// Row M1. `KEYONCE_ROUNDS` sets how many rounds; the default keeps a machine with two processors busy for seconds.
#[test]
fn of_64_threads_at_a_barrier_one_owns_the_key_in_every_round() {
    const THREADS: usize = 64;
    let rounds: u32 = std::env::var("KEYONCE_ROUNDS").map_or(10_000, |rounds| rounds.parse().unwrap());
    let (disk, clock) = (SimDisk::new(), ManualClock::default());
    let options = plain_options(&clock).durability(Durability::ProcessCrash);
    let store = testing::open(disk, options, 1).unwrap();
    let owners: Vec<AtomicU32> = (0..rounds).map(|_| AtomicU32::new(0)).collect();
    let start = Barrier::new(THREADS);
    thread::scope(|threads| {
        for _ in 0..THREADS {
            threads.spawn(|| {
                for (round, owners) in owners.iter().enumerate() {
                    let key = key(round.to_string());
                    start.wait();
                    match reserve(&store, &key) {
                        Reserve::Fresh(owner) => {
                            owners.fetch_add(1, Ordering::Relaxed);
                            assert_eq!(owner.complete(b"once").unwrap(), Completion::Done);
                        }
                        Reserve::InFlight(_) => {}
                        Reserve::Replay(response) => assert_eq!(response.body(), Body::Kept(b"once")),
                        other => panic!("round {round}: {other:?}"),
                    }
                }
            });
        }
    });
    for (round, owners) in owners.iter().enumerate() {
        assert_eq!(owners.load(Ordering::Relaxed), 1, "owners of round {round}");
        replays(&store, &key(round.to_string()), b"once");
    }
    assert_eq!(store.stats().fresh, u64::from(rounds));
}

/// Row M4, as far as there are methods: each is called by a thread that holds a reservation, a response and an
/// interruption.
#[test]
fn every_method_returns_to_a_thread_that_holds_a_reservation_and_a_response() {
    let (over, ended) = mpsc::channel();
    thread::spawn(move || {
        let place = tempfile::tempdir().unwrap();
        let options = Options::new().retention(Retention::new(WINDOW, 0.1)).response_bytes_max(6000);
        let store = Store::open(place.path().join("store"), options).unwrap();
        let owner = fresh(&store, &key("held"));
        let view = owner.attempt_view();
        assert_eq!(fresh(&store, &key("done")).complete(b"paid").unwrap(), Completion::Done);
        let response = replays(&store, &key("done"), b"paid");
        drop(fresh(&store, &key("interrupted")));
        let stops: Vec<_> = (0..3).map(|_| interrupted(&store, &key("interrupted"))).collect();
        let Reserve::InFlight(in_flight) = reserve(&store, &key("held")) else { panic!("it is held") };

        let short = Duration::from_millis(5);
        let waits = ReserveOptions::new().wait(short);
        assert!(matches!(store.reserve_with(&key("held"), request(), &waits).unwrap(), Reserve::InFlight(_)));
        assert!(matches!(in_flight.wait(short).unwrap(), Reserve::InFlight(_)));
        assert!(matches!(store.reserve(&key("held"), other_request()).unwrap(), Reserve::Mismatch(_)));
        let work = |_: &_| Ok::<_, Failed<std::io::Error>>(b"done".to_vec());
        assert!(matches!(store.once(&key("other"), request(), work), Ok(Outcome::Ran(_))));
        assert!(matches!(store.once(&key("held"), request(), work), Err(OnceError::InFlight(_))));
        let within = store.once(&key("outer"), request(), |_| {
            assert!(matches!(store.once(&key("inner"), request(), work), Ok(Outcome::Ran(_))));
            assert!(matches!(store.once(&key("outer"), request(), work), Err(OnceError::InFlight(_))));
            Ok::<_, Failed<std::io::Error>>(Vec::new())
        });
        assert!(matches!(within, Ok(Outcome::Ran(_))));
        assert_eq!(state(&store, &key("held")), Some(KeyState::InFlight));
        assert!(store.stats().guards >= 1 && store.opened().created);
        store.sync().unwrap();
        assert!(matches!(
            store.reattach(&key("held"), owner.token()),
            Err(NotReattached::InFlight | NotReattached::Superseded)
        ));
        assert_eq!(owner.renew(LEASE).unwrap(), Completion::Done);
        assert_eq!(view.save_checkpoint(b"half").unwrap(), Completion::Done);
        assert!(store.forget(&key("done"), "a test").unwrap());
        let [one, two, three] = <[_; 3]>::try_from(stops).unwrap();
        let next = as_fresh(one.take_over().unwrap());
        assert_eq!(two.resolve(b"late").unwrap(), Completion::Superseded);
        assert_eq!(three.release().unwrap(), Completion::Superseded);
        let token = next.detach(LEASE).unwrap();
        let next = store.reattach(&key("interrupted"), token).unwrap();
        // Closing waits for those who hold something, and no longer than it was told.
        assert_eq!(store.close(short).unwrap().unfinished, 2);
        assert_eq!(owner.complete(b"late").unwrap_err().error.kind(), ErrorKind::Closed);
        next.interrupt();
        assert_eq!(response.body(), Body::Kept(b"paid"));
        over.send(()).unwrap();
    });
    ended.recv_timeout(Duration::from_secs(120)).expect("a call did not return, or an assertion failed");
}

// Damage and restart.

/// The file of the only segment that has changed, and where: what was written between two looks at the disk.
fn written(before: &[(String, Vec<u8>)], after: &[(String, Vec<u8>)]) -> (String, usize, usize) {
    for (name, now) in after {
        let then = before.iter().find(|(other, _)| other == name).map_or(&[][..], |(_, bytes)| bytes);
        let differs = |at: &usize| now.get(*at) != then.get(*at);
        if let Some(start) = (0..now.len()).find(differs) {
            let end = (0..now.len()).rev().find(differs).unwrap() + 1;
            return (name.clone(), start / 8 * 8, end.next_multiple_of(8));
        }
    }
    panic!("nothing was written");
}

fn files(disk: &SimDisk) -> Vec<(String, Vec<u8>)> {
    let names = disk.list().unwrap().into_iter().filter(|name| name.starts_with("segment-"));
    names.map(|name| (name.clone(), disk.read(&name, 4 << 20).unwrap())).collect()
}

/// What `act` wrote, as the place of the record that it wrote last.
fn record_of(disk: &SimDisk, act: impl FnOnce()) -> (String, usize, Vec<u8>) {
    let before = files(disk);
    act();
    let after = files(disk);
    let (name, start, end) = written(&before, &after);
    let bytes = &after.iter().find(|(other, _)| *other == name).unwrap().1;
    // A record begins with its head, the checksum of which may begin with zeros: the change begins within eight bytes
    // of it.
    let bytes_of_record =
        usize::try_from(u32::from_le_bytes(bytes[start + 4..start + 8].try_into().unwrap()) & 0xff_ffff).unwrap() * 8;
    assert!(start >= RECORDS_START && start + bytes_of_record >= end, "one record was written");
    (name, start, bytes[start..start + bytes_of_record].to_vec())
}

/// Row D3.
#[test]
fn a_thousand_reserves_behind_a_torn_tail_are_all_there_five_times_over() {
    for durability in [Durability::PowerLoss, Durability::ProcessCrash] {
        let (mut disk, clock) = (SimDisk::new(), ManualClock::default());
        let options = || plain_options(&clock).durability(durability);
        let mut seed = 0;
        let mut open = |disk: &SimDisk| {
            seed += 1;
            testing::open(disk.clone(), options(), seed).unwrap()
        };
        for round in 0..5_u32 {
            let store = open(&disk);
            let torn = key(format!("torn {round}"));
            let (name, at, bytes) = record_of(&disk, || std::mem::forget(fresh(&store, &torn)));
            disk = disk.kill();
            disk.damage(&name, |file| file[at + bytes.len() / 2..at + bytes.len()].fill(0));

            let store = open(&disk);
            assert_eq!((store.opened().torn, store.opened().clean), (1, false), "round {round}");
            assert_eq!(state(&store, &torn), None);
            let mut held = Vec::new();
            for at in 0..1000_u32 {
                let owner = fresh(&store, &key(format!("{round}-{at}")));
                if at % 2 == 0 {
                    assert_eq!(owner.complete(&at.to_le_bytes()).unwrap(), Completion::Done);
                } else {
                    held.push(owner);
                }
            }
            assert_eq!(store.close(Duration::ZERO).unwrap().unfinished, 500);
            drop((store, held));

            let store = open(&disk);
            assert!(store.opened().clean);
            for (earlier, at) in (0..=round).flat_map(|round| (0..1000_u32).map(move |at| (round, at))) {
                let key = key(format!("{earlier}-{at}"));
                if at % 2 == 0 {
                    replays(&store, &key, &at.to_le_bytes());
                } else {
                    assert_eq!(state(&store, &key), Some(KeyState::Interrupted), "{key:?}");
                }
            }
            store.close(Duration::ZERO).unwrap();
        }
    }
}

/// Row D4, on opening: above the known synced position neighbours survive, below it the damage is told.
#[test]
fn a_damaged_length_costs_no_other_record_above_the_synced_position_and_is_told_below_it() {
    type Change = fn(u32) -> u32;
    let changes: [(&str, Change); 6] = [
        ("zero", |_| 0),
        ("one unit", |_| 1),
        ("one less", |units| units - 1),
        ("one more", |units| units + 1),
        ("over the next record", |units| 2 * units),
        ("past the end", |_| 0xff_ffff),
    ];
    for durability in [Durability::ProcessCrash, Durability::PowerLoss] {
        for (what, change) in changes {
            let (disk, clock) = (SimDisk::new(), ManualClock::default());
            let options = || plain_options(&clock).durability(durability);
            let store = testing::open(disk.clone(), options(), 1).unwrap();
            let mut damaged = None;
            for at in 0..7_u8 {
                let owner = fresh(&store, &key(at.to_string()));
                let record = record_of(&disk, || assert_eq!(owner.complete(&[at; 100]).unwrap(), Completion::Done));
                if at == 3 {
                    damaged = Some(record);
                }
            }
            let (name, at, _) = damaged.unwrap();
            let disk = disk.kill();
            disk.damage(&name, |file| {
                let word = u32::from_le_bytes(file[at + 4..at + 8].try_into().unwrap());
                let word = word & 0xff00_0000 | change(word & 0xff_ffff);
                file[at + 4..at + 8].copy_from_slice(&word.to_le_bytes());
            });
            let before = files(&disk);
            match (durability, testing::open(disk.clone(), options(), 2)) {
                (Durability::ProcessCrash, opened) => {
                    let store = opened.unwrap();
                    assert_eq!(store.opened().torn, 1, "{what}");
                    for at in (0..7_u8).filter(|at| *at != 3) {
                        replays(&store, &key(at.to_string()), &[at; 100]);
                    }
                    assert_eq!(
                        interrupted(&store, &key("3")).cause(),
                        Cause::Crash,
                        "{what}: its reservation is there"
                    );
                }
                (_, opened) => {
                    let error = opened.unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Corrupt, "{what}: {error}");
                    assert!(error.to_string().contains(&format!("byte {at}:")), "{what}: {error}");
                    assert!(files(&disk) == before, "{what}: something changed");
                }
            }
        }
    }
}

/// Row D7: the copies lie at every alignment; the record around them is torn at its start, its middle, or its end.
#[test]
fn a_copy_of_a_record_in_a_response_is_never_taken_for_a_record() {
    for tear in ["head", "fields", "body"] {
        let (disk, clock) = (SimDisk::new(), ManualClock::default());
        let options = || plain_options(&clock).durability(Durability::ProcessCrash);
        let store = testing::open(disk.clone(), options(), 1).unwrap();
        // A key that was released, and then reserved and completed by another request: to read the older records later
        // would free it, or bind it to the first request again.
        let mut owner = None;
        let (_, _, reserved) = record_of(&disk, || owner = Some(fresh(&store, &key("victim"))));
        let (_, _, released) =
            record_of(&disk, || assert_eq!(owner.take().unwrap().release().unwrap(), Completion::Done));
        let second = as_fresh(store.reserve(&key("victim"), other_request()).unwrap());
        assert_eq!(second.complete(b"of the other request").unwrap(), Completion::Done);
        let before = snapshot(&store, &key("victim"));

        let mut planted = Vec::new();
        for shift in 0..8 {
            planted.resize(planted.len().next_multiple_of(8) + shift, 0xee);
            planted.extend([&reserved[..], &released[..]].concat());
        }
        let outer = fresh(&store, &key("outer"));
        let (name, at, bytes) = record_of(&disk, || assert_eq!(outer.complete(&planted).unwrap(), Completion::Done));
        assert_eq!(fresh(&store, &key("behind")).complete(b"behind").unwrap(), Completion::Done);
        let disk = disk.kill();
        let torn = match tear {
            "head" => at + 8,
            "fields" => at + 40,
            _ => at + bytes.len() - 9,
        };
        disk.damage(&name, |file| file[torn] ^= 0xff);
        for (seed, disk) in (2..).zip([disk.kill(), disk]) {
            let store = testing::open(disk.clone(), options(), seed).unwrap();
            assert_eq!(store.opened().torn, 1, "torn in its {tear}");
            assert_eq!(snapshot(&store, &key("victim")), before, "torn in its {tear}");
            assert_eq!(interrupted(&store, &key("outer")).cause(), Cause::Crash);
            replays(&store, &key("behind"), b"behind");
        }
    }
}

// Recycling and order.

/// Row R1: at a level that waits for no sync, only the copy itself keeps the key once its old file is given away.
#[test]
fn an_unfinished_key_is_on_the_disk_before_the_file_it_lay_in_gets_a_new_life() {
    let (disk, clock, fillers) = (SimDisk::new(), ManualClock::default(), AtomicU32::new(0));
    let options = || plain_options(&clock).durability(Durability::ProcessCrash);
    let store = testing::open(disk.clone(), options(), 1).unwrap();
    let with = ReserveOptions::new().durability(Durability::PowerLoss);
    let held = as_fresh(store.reserve_with(&key("held"), request(), &with).unwrap());
    let mut seed = 1;
    while fillers.load(Ordering::Relaxed) < 100 {
        roll(&store, &fillers, 0);
        // A segment is over when its successor is full, and not when that is half full: so it is given up just before
        // the next header is written, which says so, and no sync comes between the two but that of the copies.
        clock.advance(MINUTE / 10);
        for image in [disk.crash_all_old(), disk.crash_image(seed)] {
            seed += 1;
            let after = testing::open(image, options(), seed).unwrap();
            assert_eq!(interrupted(&after, &key("held")).token, held.token(), "filler {fillers:?}");
        }
    }
    assert!(held.token().to_u64() < SEGMENT_BYTES && store.stats().segments < 4, "the first segment was given up");
}

/// Row R12.
#[test]
fn after_a_clean_close_and_two_power_losses_no_token_is_given_twice() {
    let (disk, clock, seeds) = (SimDisk::new(), ManualClock::default(), AtomicU32::new(0));
    no_token_twice(&disk, &clock, &seeds, 0, 2);
}

/// Gives tokens and closes; gives tokens that no sync covers and loses the power; goes on so from every image of the
/// loss.
fn no_token_twice(disk: &SimDisk, clock: &ManualClock, seeds: &AtomicU32, mut largest: u64, losses: u32) {
    let open = || {
        let options = plain_options(clock).durability(Durability::ProcessCrash);
        testing::open(disk.clone(), options, seeds.fetch_add(1, Ordering::Relaxed).into()).unwrap()
    };
    let mut given = |store: &Store| {
        let key = key(format!("{losses} {}", seeds.fetch_add(1, Ordering::Relaxed)));
        let token = fresh(store, &key).token().to_u64();
        assert!(token > largest, "{token} was given after {largest}, with {losses} losses to come");
        largest = token;
    };
    let store = open();
    given(&store);
    store.close(Duration::ZERO).unwrap();
    drop(store);
    let store = open();
    for _ in 0..10 {
        given(&store);
    }
    if losses > 0 {
        let images: Vec<_> = disk.images(8).collect();
        for image in images {
            no_token_twice(&image, clock, seeds, largest, losses - 1);
        }
    }
}

/// Row R13: the segment of the short record is full, or so empty that it is folded into the next at every opening.
#[test]
fn a_short_record_whose_segment_has_expired_still_hides_the_long_one_beneath_it() {
    for rolls in [0, 3] {
        let (disk, clock, fillers) = (SimDisk::new(), ManualClock::default(), AtomicU32::new(0));
        let options = || plain_options(&clock);
        let store = testing::open(disk.clone(), options(), 1).unwrap();
        let (key, long) = (key("a"), crate::place::key("long"));
        // The long record, of a reservation that is dropped, and a finished key that keeps its segment alive for the
        // window.
        drop(fresh(&store, &key));
        assert_eq!(fresh(&store, &long).complete(b"long").unwrap(), Completion::Done);
        roll(&store, &fillers, 1);
        // The short one, alone with fillers of a minute in the segments from here on.
        let minute = ReserveOptions::new().retention(MINUTE).on_interrupted(OnInterrupted::TakeOver);
        let owner = as_fresh(store.reserve_with(&key, request(), &minute).unwrap());
        assert_eq!(owner.complete(b"short").unwrap(), Completion::Done);
        roll(&store, &fillers, rolls);
        clock.advance(2 * MINUTE);
        let killed = [disk.kill(), disk.crash_all_new()];
        roll(&store, &fillers, rolls);
        assert_eq!(state(&store, &key), None);
        store.close(Duration::ZERO).unwrap();
        drop(store);
        for (number, disk) in (1..).zip(killed.into_iter().chain([disk.clone(), disk.kill()])) {
            for opening in 0..5 {
                let store = testing::open(disk.clone(), options(), 100 * number + opening).unwrap();
                assert_eq!(state(&store, &key), None, "{rolls} rolls, image {number}, opening {opening}");
                replays(&store, &long, b"long");
                if opening == 3 {
                    roll(&store, &fillers, 2);
                }
            }
            let store = testing::open(disk, options(), 100 * number + 50).unwrap();
            assert_eq!(fresh(&store, &key).attempt_view().number(), 1);
        }
    }
}

/// Row R15: the marks of an opening, a roll and a close lie below later records, and one bit of them rots.
#[test]
fn one_flipped_bit_of_a_mark_beneath_later_records_is_told_and_nothing_is_lost() {
    const BODY: [u8; 9000] = [7; 9000];
    let (disk, clock, fillers) = (SimDisk::new(), ManualClock::default(), AtomicU32::new(0));
    let options = || plain_options(&clock);
    let mut keys = Vec::new();
    let mut finish = |store: &Store, id: String| {
        let key = key(id);
        assert_eq!(fresh(store, &key).complete(&BODY).unwrap(), Completion::Done);
        keys.push(key);
    };
    let store = testing::open(disk.clone(), options(), 1).unwrap();
    finish(&store, "before".to_owned());
    roll(&store, &fillers, 1);
    // Enough that the segment is not folded into the next when the store is opened again.
    for at in 0..6 {
        finish(&store, format!("behind Next {at}"));
    }
    drop(store);
    let store = testing::open(disk.clone(), options(), 2).unwrap();
    for at in 0..6 {
        finish(&store, format!("behind Closed and Sealed {at}"));
    }
    let disk = disk.kill();
    let store = testing::open(disk.clone(), options(), 3).unwrap();
    finish(&store, "behind a crash and Sealed".to_owned());
    store.sync().unwrap();
    let disk = disk.kill();
    drop(store);

    let marks: Vec<_> = files(&disk).into_iter().flat_map(|(name, bytes)| marks(&name, &bytes)).collect();
    for kind in [16, 17, 18] {
        assert!(marks.iter().any(|mark| mark.kind == kind), "no mark of kind {kind}: {marks:?}");
    }
    let (mut told, mut passed) = (0, 0);
    for Mark { name, start, end, kind } in &marks {
        for at in *start..*end {
            let damaged = disk.kill();
            damaged.damage(name, |file| file[at] ^= 1 << (at % 8));
            let before = files(&damaged);
            match testing::open(damaged.clone(), options(), 4) {
                Ok(store) => {
                    passed += 1;
                    for key in &keys {
                        replays(&store, key, &BODY);
                    }
                }
                Err(error) => {
                    told += 1;
                    assert_eq!(error.kind(), ErrorKind::Corrupt, "kind {kind}, {name} byte {at}: {error}");
                    assert!(files(&damaged) == before, "kind {kind}, {name} byte {at}: something changed");
                }
            }
        }
    }
    println!("flipped bits of {} marks: {told} told, {passed} passed", marks.len());
    assert!(told > 100, "{told} told, {passed} passed");
    // A header copy: the other one stands in, and it is told.
    for (name, _) in files(&disk) {
        for at in [8, 48, 72, 136, 4096 + 8, 4096 + 48, 4096 + 72, 4096 + 136] {
            let damaged = disk.kill();
            damaged.damage(&name, |file| file[at] ^= 1 << (at % 8));
            let store = testing::open(damaged, options(), 5).unwrap();
            assert_eq!(store.opened().header_copies_bad, 1, "{name} byte {at}");
            for key in &keys {
                replays(&store, key, &BODY);
            }
        }
    }
}

#[derive(Debug)]
struct Mark {
    name: String,
    start: usize,
    end: usize,
    kind: u8,
}

/// Where the records stand in a segment that give no key a state.
fn marks(name: &str, bytes: &[u8]) -> Vec<Mark> {
    let mut found = Vec::new();
    let mut at = RECORDS_START;
    while let Some(word) = bytes.get(at + 4..at + 8) {
        let word = u32::from_le_bytes(word.try_into().unwrap());
        let (kind, len) = (word.to_le_bytes()[3], usize::try_from(word & 0xff_ffff).unwrap() * 8);
        if len == 0 {
            break;
        }
        if kind >= 16 {
            found.push(Mark { name: name.to_owned(), start: at, end: at + len, kind });
        }
        at += len;
    }
    found
}
