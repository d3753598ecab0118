//! What random operations have found, told one by one.

use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, UNIX_EPOCH};

use keyonce::testing::{ManualClock, SimDisk};
use keyonce::{Clock, Completion, Fingerprint, Key, KeyState, Options, Reserve, ReserveOptions, Store};

use crate::place::{EVERYWHERE, LEASE, WINDOW, fresh, key, request, reserve};

fn open(disk: &SimDisk, clock: &ManualClock, seed: u64) -> Store {
    let options: Options = EVERYWHERE[0].options(clock);
    keyonce::testing::open(disk.clone(), options, seed).unwrap()
}

fn ask(store: &Store, key: &Key, request: Fingerprint, with: &ReserveOptions) -> Reserve {
    store.reserve_with(key, request, with).unwrap()
}

/// A client dates its request and is told to wait, and its handle is kept for longer than the retention: meanwhile the
/// key was completed and forgotten. The age counts when the handle asks, not when it was given.
#[test]
fn a_handle_that_is_kept_beyond_the_retention_is_too_old() {
    let clock = ManualClock::default();
    let store = open(&SimDisk::new(), &clock, 1);
    let dated = ReserveOptions::new().issued_at(UNIX_EPOCH + Duration::from_millis(clock.wall_ms()));
    let owner = fresh(&store, &key("a"));
    let Reserve::InFlight(running) = ask(&store, &key("a"), request(), &dated) else { panic!("it is in flight") };
    assert_eq!(owner.complete(b"paid").unwrap(), Completion::Done);
    clock.advance(WINDOW);
    let answer = running.wait(Duration::ZERO).unwrap();
    assert!(matches!(answer, Reserve::TooOld(_)), "the work would be done twice: {answer:?}");
}

/// Ownership was handed to a waiter that never took it, and the store is closed: nothing is left unfinished.
#[test]
fn what_closing_gives_back_is_not_unfinished() {
    let (clock, disk) = (ManualClock::default(), SimDisk::new());
    let store = open(&disk, &clock, 1);
    let owner = fresh(&store, &key("a"));
    let mut waits = pin!(store.reserve_with_async(&key("a"), request(), &ReserveOptions::new().wait(LEASE)));
    let mut context = Context::from_waker(Waker::noop());
    assert!(matches!(waits.as_mut().poll(&mut context), Poll::Pending));
    assert_eq!(owner.release().unwrap(), Completion::Done);
    assert_eq!(store.peek(&key("a")).unwrap().map(|info| info.state), Some(KeyState::InFlight));
    assert_eq!(store.close(Duration::ZERO).unwrap().unfinished, 0);
    assert!(matches!(reserve(&open(&disk, &clock, 2), &key("a")), Reserve::Fresh(_)));
}
/// Somebody waits for an interruption that is held, which is forgotten before the holding ends; another one reserves the
/// key and completes it. Whoever changes a key serves those who wait for it.
#[test]
fn a_waiter_hears_of_the_next_owner_of_a_key_that_was_forgotten_meanwhile() {
    let clock = ManualClock::default();
    let store = open(&SimDisk::new(), &clock, 1);
    let short = ReserveOptions::new().retention(Duration::from_millis(1)).lease(Duration::from_secs(10));
    drop(ask(&store, &key("a"), request(), &short));
    let held = ReserveOptions::new().on_interrupted(keyonce::OnInterrupted::Hold(LEASE)).wait(2 * LEASE);
    let mut waits = pin!(store.reserve_with_async(&key("a"), request(), &held));
    let mut context = Context::from_waker(Waker::noop());
    assert!(matches!(waits.as_mut().poll(&mut context), Poll::Pending));
    clock.advance(Duration::from_secs(11));
    assert_eq!(fresh(&store, &key("a")).complete(b"paid").unwrap(), Completion::Done);
    assert!(matches!(waits.as_mut().poll(&mut context), Poll::Ready(Ok(Reserve::Replay(_)))), "it still waits");
}
