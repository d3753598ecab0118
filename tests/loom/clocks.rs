//! Calls that meet a move of the clock.

use std::task::Poll;

use keyonce::testing::{ManualClock, SimDisk, Storage};
use keyonce::{Completion, Durability, Reserve, ReserveOptions};
use loom::thread;

use crate::rig::{
    LEASE, SEGMENT, WAIT, explore, key, nothing_is_left, open, poll_once, request, reserve_fresh, waiting,
};

#[test]
fn a_renewal_that_meets_a_move_of_the_clock_lapses_in_its_time_all_the_same() {
    explore("a renewal against the clock", || {
        let clock = ManualClock::default();
        let store = open(&SimDisk::new(), Durability::ProcessCrash, &clock);
        let reservation = reserve_fresh(&store, "a");
        let renewer = thread::spawn(move || {
            assert_eq!(reservation.renew(LEASE * 2).expect("nothing fails here"), Completion::Done);
            reservation
        });
        clock.advance(LEASE);
        let reservation = renewer.join().expect("the thread ended well");
        let mut waits = waiting(&store, "a");
        assert!(poll_once(&mut waits).is_pending(), "it was renewed");
        clock.advance(LEASE * 2);
        let Poll::Ready(answer) = poll_once(&mut waits) else { panic!("the lease has lapsed, and nobody looked") };
        assert!(matches!(answer, Ok(Reserve::Interrupted(_))), "{answer:?}");
        drop(reservation);
    });
}

#[test]
fn a_waiter_that_comes_while_the_clock_moves_is_told_when_its_time_is_over() {
    explore("a waiter against the clock", || {
        let clock = ManualClock::default();
        let store = open(&SimDisk::new(), Durability::ProcessCrash, &clock);
        let long = ReserveOptions::default().lease(WAIT);
        let Ok(Reserve::Fresh(reservation)) = store.reserve_with(&key("a"), request(), &long) else { panic!("new") };
        let wait = |at_most| {
            Box::pin(store.reserve_with_async(&key("a"), request(), &ReserveOptions::default().wait(at_most)))
        };
        let mut first = wait(LEASE);
        assert!(poll_once(&mut first).is_pending());
        let mut second = wait(LEASE * 2);
        let waiter = thread::spawn(move || {
            let pending = poll_once(&mut second).is_pending();
            (second, pending)
        });
        clock.advance(LEASE);
        let (mut second, pending) = waiter.join().expect("the thread ended well");
        assert!(pending && poll_once(&mut first).is_ready());
        clock.advance(LEASE * 2);
        assert!(poll_once(&mut second).is_ready(), "its time is over, and nobody looked");
        drop((first, second));
        drop(reservation);
        nothing_is_left(&store);
    });
}

#[test]
fn what_is_written_while_the_clock_moves_is_synced_in_its_time() {
    explore("a write against the clock, Interval", || {
        let clock = ManualClock::default();
        let disk = SimDisk::new();
        let store = open(&disk, Durability::Interval(LEASE * 2), &clock);
        let long = ReserveOptions::default().lease(WAIT);
        let Ok(Reserve::Fresh(reservation)) = store.reserve_with(&key("a"), request(), &long) else { panic!("new") };
        // All is synced, and what is due next is the end of a wait.
        clock.advance(LEASE * 2);
        let mut waits =
            Box::pin(store.reserve_with_async(&key("a"), request(), &ReserveOptions::default().wait(LEASE)));
        assert!(poll_once(&mut waits).is_pending());
        let writer = {
            let store = store.clone();
            thread::spawn(move || store.reserve_with(&key("b"), request(), &long))
        };
        clock.advance(LEASE);
        let written = writer.join().expect("the thread ended well");
        assert!(poll_once(&mut waits).is_ready());
        clock.advance(LEASE * 2);
        let synced = disk.crash_all_old().read(SEGMENT, usize::MAX).expect("it is there");
        assert!(synced == disk.read(SEGMENT, usize::MAX).expect("it is there"), "a record is not synced in its time");
        drop((waits, written, reservation));
    });
}
