//! Segments end, are given up oldest first, and get a new life: what is live survives that, and the disk stays as
//! large.

use std::sync::Arc;
use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk, Storage};
use keyonce::{Body, Completion, Durability, Fingerprint, Key, Options, Reserve, Retention, Store};

pub(crate) const START_MS: u64 = 1_767_225_600_000;

pub(crate) fn options(clock: &ManualClock) -> Options {
    Options::new()
        .clock(Arc::new(clock.clone()))
        .durability(Durability::ProcessCrash)
        .retention(Retention::new(Duration::from_secs(60), 10.0))
        .lease(Duration::from_secs(30))
        .response_bytes_max(16 << 10)
        .segment_bytes(192 << 10)
}

fn segment_files(disk: &SimDisk) -> usize {
    disk.list().unwrap().iter().filter(|name| name.starts_with("segment-")).count()
}

fn key(id: impl std::fmt::Display) -> Key {
    Key::new("ring", id.to_string()).unwrap()
}

fn request() -> Fingerprint {
    Fingerprint::of("same")
}

fn finish(store: &Store, id: impl std::fmt::Display, response: &[u8]) {
    let Reserve::Fresh(reservation) = store.reserve(&key(&id), request()).unwrap() else { panic!("{id} is new") };
    assert_eq!(reservation.complete(response).unwrap(), Completion::Done);
}

fn replayed(store: &Store, id: impl std::fmt::Display) -> Option<Vec<u8>> {
    match store.reserve(&key(&id), request()).unwrap() {
        Reserve::Replay(response) => match response.body() {
            Body::Kept(body) => Some(body.to_vec()),
            Body::NotKept { .. } => None,
        },
        _ => None,
    }
}

#[test]
fn sixty_openings_with_ten_keys_each_leave_few_files() {
    let (mut disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    for opening in 0..60 {
        let store = testing::open(disk.clone(), options(&clock), opening).unwrap();
        for n in 0..10 {
            finish(&store, format_args!("{opening}-{n}"), b"done");
        }
        for earlier in 0..=opening {
            assert_eq!(replayed(&store, format_args!("{earlier}-3")).as_deref(), Some(&b"done"[..]), "{earlier}");
        }
        if opening % 2 == 0 {
            store.close(Duration::ZERO).unwrap();
        } else {
            // A kill: no end mark.
            disk = disk.kill();
        }
        assert!(segment_files(&disk) <= 4, "after opening {opening}: {:?}", disk.list());
        clock.advance(Duration::from_millis(10));
    }
}

#[test]
fn ten_windows_at_a_steady_rate_keep_the_disk_as_large_as_two() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(disk.clone(), options(&clock), 1).unwrap();
    let body = vec![7; 2_000];
    let mut after_two = 0;
    for n in 0..6_000_u64 {
        finish(&store, n, &body);
        clock.advance(Duration::from_millis(100));
        if n == 1_200 {
            after_two = segment_files(&disk);
        }
        if n % 97 == 0 {
            let live = n.saturating_sub(500);
            assert_eq!(replayed(&store, live).as_deref(), Some(&body[..]), "key {live} at {n}");
        }
    }
    assert!(segment_files(&disk) <= after_two + 1, "{after_two} files grew to {}", segment_files(&disk));
    assert!(store.stats().segments <= after_two as u64);
}

#[test]
fn an_unfinished_key_outlives_its_segment_also_through_power_loss() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(disk.clone(), options(&clock), 1).unwrap();
    let Reserve::Fresh(held) = store.reserve(&key("held"), request()).unwrap() else { panic!("new") };
    assert_eq!(held.save_checkpoint(b"half way").unwrap(), Completion::Done);
    let body = vec![7; 2_000];
    for n in 0..3_000_u64 {
        finish(&store, n, &body);
        clock.advance(Duration::from_millis(100));
        if n % 100 == 0 {
            assert_eq!(held.renew(Duration::from_secs(30)).unwrap(), Completion::Done);
        }
    }
    store.sync().unwrap();
    for image in [disk.crash_all_old(), disk.crash_all_new(), disk.crash_image(5)] {
        let reopened = testing::open(image, options(&clock), 2).unwrap();
        let Reserve::Interrupted(found) = reopened.reserve(&key("held"), request()).unwrap() else {
            panic!("a held key is never forgotten")
        };
        assert_eq!((found.token, found.checkpoint()), (held.token(), &b"half way"[..]));
        assert!(matches!(reopened.reserve(&key("held"), Fingerprint::of("other")).unwrap(), Reserve::Mismatch(_)));
    }
    assert_eq!(held.complete(b"late, and it counts").unwrap(), Completion::Done);
    assert_eq!(replayed(&store, "held").as_deref(), Some(&b"late, and it counts"[..]));
}

#[test]
fn an_interrupted_key_that_nobody_resolves_expires_and_is_counted() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(disk, options(&clock), 1).unwrap();
    drop(store.reserve(&key("lost"), request()).unwrap());
    let body = vec![7; 2_000];
    for n in 0..6_000_u64 {
        finish(&store, n, &body);
        clock.advance(Duration::from_millis(100));
    }
    assert_eq!(store.stats().expired_unresolved, 1);
    assert!(matches!(store.reserve(&key("lost"), Fingerprint::of("other")).unwrap(), Reserve::Fresh(_)));
}

/// Records that only move from the head of the log to its tail free nothing: the store must not write for their sake.
#[test]
fn unfinished_keys_of_many_segments_are_not_copied_round_and_round() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(disk.clone(), options(&clock), 1).unwrap();
    let mut tokens = Vec::new();
    for n in 0..5_000 {
        let Reserve::Fresh(reservation) = store.reserve(&key(n), request()).unwrap() else { panic!("{n} is new") };
        tokens.push(reservation.token());
        drop(reservation);
    }
    let span = tokens.last().unwrap().to_u64() - tokens[0].to_u64();
    assert!(span < 5_000 * 400, "5000 small records took {span} bytes of the log");
    assert!(store.stats().segments < 12, "{:?}", store.stats());
    for (n, token) in tokens.iter().enumerate().step_by(97) {
        let Reserve::Interrupted(found) = store.reserve(&key(n), request()).unwrap() else { panic!("{n}") };
        assert_eq!(found.token, *token);
    }
}

#[test]
fn a_store_in_which_nothing_is_ever_completed_stays_as_large() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(disk.clone(), options(&clock), 1).unwrap();
    let mut early = 0;
    for n in 0..30_000_u64 {
        drop(store.reserve(&key(n), request()).unwrap());
        clock.advance(Duration::from_millis(50));
        if n == 10_000 {
            early = segment_files(&disk);
        }
    }
    assert!(segment_files(&disk) <= early + 2, "{early} files grew to {}", segment_files(&disk));
    assert!(store.stats().expired_unresolved > 20_000, "{:?}", store.stats());
}

/// A recovery of two segments whose first is given up later: the seal in the second no longer finds all its copies.
#[test]
fn a_long_recovery_may_be_given_up_piece_by_piece() {
    let (mut disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let body = vec![7; 2_000];
    {
        let large = options(&clock).segment_bytes(1 << 20);
        let store = testing::open(disk.clone(), large, 1).unwrap();
        (0..120).for_each(|n| finish(&store, n, &body));
        disk = disk.kill();
    }
    let store = testing::open(disk.clone(), options(&clock), 2).unwrap();
    assert!(store.opened().copied >= 80, "the copies need two segments: {:?}", store.opened());
    clock.advance(Duration::from_secs(59));
    (200..210).for_each(|n| finish(&store, n, &body));
    clock.advance(Duration::from_secs(2));
    (300..400).for_each(|n| finish(&store, n, &body));
    for image in [disk.kill(), disk.crash_all_new()] {
        let reopened = testing::open(image, options(&clock), 3).unwrap();
        assert_eq!(replayed(&reopened, 205).as_deref(), Some(&body[..]));
        assert_eq!(replayed(&reopened, 399).as_deref(), Some(&body[..]));
    }
}

/// A retired file that is too small for the next, larger segment goes only after a header has given it up for good.
#[test]
fn a_kill_at_any_moment_while_segments_grow_leaves_a_store_that_opens() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let growing = || {
        Options::new()
            .clock(Arc::new(clock.clone()))
            .durability(Durability::ProcessCrash)
            .retention(Retention::new(Duration::from_secs(60), 2_000.0))
            .response_bytes_max(16 << 10)
    };
    disk.record();
    let store = testing::open(disk.clone(), growing(), 1).unwrap();
    let body = vec![7; 16_000];
    for n in 0..120 {
        finish(&store, n, &body);
        if n % 20 == 19 {
            clock.advance(Duration::from_secs(100));
        }
    }
    for moment in disk.moments().skip(14) {
        let opened = testing::open(moment.kill(), growing(), 2);
        assert!(opened.is_ok(), "after {} steps: {}", moment.steps(), opened.unwrap_err());
    }
}

/// Row R10: a job that runs once a day, each time after another boot.
#[test]
fn a_store_that_is_opened_once_a_day_for_a_month_stays_flat_and_forgets_nothing_early() {
    let (mut disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let day = Duration::from_secs(24 * 60 * 60);
    let three_days = || options(&clock).retention(Retention::new(3 * day, 0.001));
    for today in 0..30_u64 {
        let store = testing::open(disk.clone(), three_days(), today).unwrap();
        finish(&store, today, format!("of day {today}").as_bytes());
        for earlier in 0..=today {
            let remembered = store.peek(&key(earlier)).unwrap().is_some();
            assert_eq!(remembered, today - earlier < 3, "the key of day {earlier} on day {today}");
        }
        if today.is_multiple_of(2) {
            store.close(Duration::ZERO).unwrap();
        }
        let left = disk.kill();
        drop(store);
        disk = left;
        assert!(segment_files(&disk) <= 4, "{:?}", disk.list().unwrap());
        clock.advance(day);
        clock.reboot();
    }
}

/// Row R8: whoever reads a response gets its own bytes, while segments are given up and used again beneath.
#[test]
fn a_large_response_is_its_own_bytes_while_segments_go_and_come_back() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new(START_MS));
    let store = testing::open(disk.clone(), options(&clock), 1).unwrap();
    let body = |at: u64| (0..15_000).map(|byte| u8::try_from((at * 31 + byte / 97) % 251).unwrap()).collect::<Vec<_>>();
    let newest = std::sync::atomic::AtomicU64::new(0);
    let is_its_own = |store: &Store, at: u64| match store.reserve(&key(at), request()).unwrap() {
        Reserve::Replay(response) => {
            assert_eq!(response.body(), Body::Kept(&body(at)), "key {at}");
            true
        }
        Reserve::Fresh(owner) => {
            assert_eq!(owner.release().unwrap(), Completion::Done);
            false
        }
        // The other reader has found it gone, and not given it back yet.
        Reserve::InFlight(_) => false,
        other => panic!("key {at}: {other:?}"),
    };
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let (mut read, mut gone) = (0, 0);
                    while newest.load(std::sync::atomic::Ordering::Acquire) < 300 {
                        let newest = newest.load(std::sync::atomic::Ordering::Acquire);
                        for at in newest.saturating_sub(70)..newest {
                            if is_its_own(&store, at) { read += 1 } else { gone += 1 }
                        }
                    }
                    (read, gone)
                })
            })
            .collect();
        for at in 0..300 {
            finish(&store, at, &body(at));
            newest.store(at + 1, std::sync::atomic::Ordering::Release);
            clock.advance(Duration::from_secs(1));
        }
        for reader in readers {
            let (read, gone) = reader.join().unwrap();
            assert!(read > 100 && gone > 0, "{read} were read, {gone} were gone");
        }
    });
    assert!(segment_files(&disk) < 20, "{:?}", disk.list().unwrap());
    let left = testing::open(disk.kill(), options(&clock), 2).unwrap();
    assert!((260..300).all(|at| is_its_own(&left, at)));
}
