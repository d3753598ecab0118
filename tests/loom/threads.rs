//! Threads that reserve, wait, end, take over and close.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use keyonce::testing::{EIO, ManualClock, SimDisk, Step};
use keyonce::{Completion, Durability, Error, ErrorKind, Reserve, Store};
use loom::thread;

use crate::rig::{
    Book, LEASE, RESPONSE, Told, explore, fresh_store, is_replay, let_others_in_at_syncs, note_answer, open, reserve,
    reserve_fresh, reserve_waiting,
};

#[test]
fn of_two_threads_that_reserve_one_key_exactly_one_is_fresh() {
    explore("two threads, one key", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let other = {
            let store = store.clone();
            thread::spawn(move || reserve(&store, "a"))
        };
        let answers = [reserve(&store, "a"), other.join().expect("the thread ended well")];
        let answers = answers.map(|answer| answer.expect("nothing fails here"));
        let fresh = answers.iter().filter(|answer| matches!(answer, Reserve::Fresh(_))).count();
        let in_flight = answers.iter().filter(|answer| matches!(answer, Reserve::InFlight(_))).count();
        assert_eq!((fresh, in_flight), (1, 1), "{answers:?}");
    });
}

#[test]
fn what_three_threads_are_told_about_two_keys_survives_a_power_loss() {
    let name = "three threads, two keys, PowerLoss";
    let book = Book::default();
    let noted = book.clone();
    explore(name, move || {
        let (store, disk) = fresh_store(Durability::PowerLoss);
        let_others_in_at_syncs(&disk);
        let ask = |id: &'static str| {
            let (store, disk, book) = (store.clone(), disk.clone(), noted.clone());
            move || {
                let answer = reserve(&store, id).expect("nothing fails here");
                note_answer(&book, &disk, id, &answer);
                answer
            }
        };
        let threads = [thread::spawn(ask("a")), thread::spawn(ask("b"))];
        let third = ask("b")();
        let [a, b] = threads.map(|thread| thread.join().expect("the thread ended well"));
        assert!(matches!(a, Reserve::Fresh(_)), "{a:?}");
        let fresh = [&b, &third].iter().filter(|answer| matches!(answer, Reserve::Fresh(_))).count();
        assert_eq!(fresh, 1, "{b:?} {third:?}");
    });
    book.check(name);
}

#[test]
fn a_response_is_replayed_and_completed_only_once_it_survives_a_power_loss() {
    let name = "a completion against a reserve, PowerLoss";
    let book = Book::default();
    let noted = book.clone();
    explore(name, move || {
        let (store, disk) = fresh_store(Durability::PowerLoss);
        let_others_in_at_syncs(&disk);
        let reservation = reserve_fresh(&store, "a");
        let owner = {
            let (disk, book) = (disk.clone(), noted.clone());
            thread::spawn(move || {
                assert_eq!(reservation.complete(RESPONSE).expect("nothing fails here"), Completion::Done);
                book.note(&disk, "a", Told::Done);
            })
        };
        let answer = reserve(&store, "a").expect("nothing fails here");
        note_answer(&noted, &disk, "a", &answer);
        assert!(is_replay(&answer) || matches!(answer, Reserve::InFlight(_)), "{answer:?}");
        owner.join().expect("the thread ended well");
    });
    book.check(name);
}

#[test]
fn a_waiter_is_woken_by_the_completion_and_replays_it() {
    explore("a waiter against a completion", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let owner = thread::spawn(move || reservation.complete(RESPONSE).expect("nothing fails here"));
        let answer = reserve_waiting(&store, "a").expect("nothing fails here");
        assert!(is_replay(&answer), "{answer:?}");
        assert_eq!(owner.join().expect("the thread ended well"), Completion::Done);
    });
}

#[test]
fn a_waiter_is_woken_by_the_release_and_becomes_the_owner() {
    explore("a waiter against a release", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let owner = thread::spawn(move || reservation.release().expect("nothing fails here"));
        let answer = reserve_waiting(&store, "a").expect("nothing fails here");
        assert!(matches!(answer, Reserve::Fresh(_)), "{answer:?}");
        assert_eq!(owner.join().expect("the thread ended well"), Completion::Done);
    });
}

#[test]
fn of_two_waiters_a_release_makes_one_the_owner_and_its_completion_wakes_the_other() {
    explore("two waiters against a release", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let wait = |store: Store| match reserve_waiting(&store, "a").expect("nothing fails here") {
            Reserve::Fresh(reservation) => {
                assert_eq!(reservation.complete(RESPONSE).expect("nothing fails here"), Completion::Done);
                true
            }
            answer => {
                assert!(is_replay(&answer), "{answer:?}");
                false
            }
        };
        let other = {
            let store = store.clone();
            thread::spawn(move || wait(store))
        };
        let owner = thread::spawn(move || reservation.release().expect("nothing fails here"));
        let owned = [wait(store.clone()), other.join().expect("the thread ended well")];
        assert_eq!(owned.iter().filter(|owned| **owned).count(), 1);
        assert_eq!(owner.join().expect("the thread ended well"), Completion::Done);
    });
}

#[test]
fn a_waiter_is_woken_by_the_drop_and_told_interrupted() {
    explore("a waiter against a drop", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let owner = thread::spawn(move || drop(reservation));
        let answer = reserve_waiting(&store, "a").expect("nothing fails here");
        assert!(matches!(answer, Reserve::Interrupted(_)), "{answer:?}");
        owner.join().expect("the thread ended well");
    });
}

#[test]
fn a_waiter_is_woken_by_the_end_of_the_lease() {
    explore("a waiter against the clock", || {
        let clock = ManualClock::default();
        let store = open(&SimDisk::new(), Durability::ProcessCrash, &clock);
        let reservation = reserve_fresh(&store, "a");
        let moved = thread::spawn(move || clock.advance(LEASE));
        let answer = reserve_waiting(&store, "a").expect("nothing fails here");
        assert!(matches!(answer, Reserve::Interrupted(_)), "{answer:?}");
        moved.join().expect("the thread ended well");
        drop(reservation);
    });
}

#[test]
fn of_a_take_over_and_a_late_completion_one_acts() {
    explore("a take-over against a late completion", || {
        let clock = ManualClock::default();
        let store = open(&SimDisk::new(), Durability::ProcessCrash, &clock);
        let reservation = reserve_fresh(&store, "a");
        let late_token = reservation.token();
        clock.advance(LEASE);
        let Ok(Reserve::Interrupted(interrupted)) = reserve(&store, "a") else { panic!("the lease has lapsed") };
        let late = thread::spawn(move || reservation.complete(RESPONSE).expect("nothing fails here"));
        let answer = interrupted.take_over().expect("nothing fails here");
        let late = late.join().expect("the thread ended well");
        match &answer {
            Reserve::Fresh(next) => {
                assert_eq!((late, next.attempt_view().number()), (Completion::Superseded, 2));
                assert!(next.token() > late_token, "tokens grow");
            }
            _ => assert!(is_replay(&answer) && late == Completion::Done, "{answer:?}, and the owner was told {late:?}"),
        }
    });
}

#[test]
fn of_two_take_overs_one_acts() {
    explore("two take-overs", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        reserve_fresh(&store, "a").interrupt();
        let take_over = |answer| match answer {
            Ok(Reserve::Interrupted(interrupted)) => interrupted.take_over().expect("nothing fails here"),
            other => panic!("the key is interrupted: {other:?}"),
        };
        let [mine, theirs] = [reserve(&store, "a"), reserve(&store, "a")];
        let other = thread::spawn(move || take_over(theirs));
        let answers = [take_over(mine), other.join().expect("the thread ended well")];
        let fresh = answers.iter().filter(|answer| matches!(answer, Reserve::Fresh(_))).count();
        let in_flight = answers.iter().filter(|answer| matches!(answer, Reserve::InFlight(_))).count();
        assert_eq!((fresh, in_flight), (1, 1), "{answers:?}");
    });
}

/// The first sync of the model fails; the second would say "ok", as on ext4.
#[test]
fn after_a_failed_sync_everyone_gets_an_error_and_nobody_hangs() {
    explore("three threads against a failing sync", || {
        let (store, disk) = fresh_store(Durability::PowerLoss);
        let door = loom::sync::atomic::AtomicUsize::new(0);
        let failed = AtomicU64::new(0);
        let failing = disk.clone();
        disk.on_step(move |step| {
            if step == Step::Sync {
                door.load(loom::sync::atomic::Ordering::Relaxed);
                if failed.fetch_add(1, Ordering::Relaxed) == 0 {
                    failing.fail_at(failing.steps(), EIO);
                }
            }
        });
        let ask = |id: &'static str| {
            let store = store.clone();
            move || reserve(&store, id).map(|answer| panic!("told {answer:?} after a failed sync"))
        };
        let threads = [thread::spawn(ask("a")), thread::spawn(ask("b"))];
        let third = ask("b")();
        let [a, b] = threads.map(|thread| thread.join().expect("the thread ended well"));
        for told in [a, b, third] {
            let error: Error = told.map(|never: ()| never).expect_err("the sync failed");
            assert_eq!(error.kind(), ErrorKind::Poisoned, "{error}");
        }
        // What the hook holds of the disk would keep it alive for ever.
        disk.on_step(|_| {});
    });
}

#[test]
fn closing_the_store_wakes_its_waiters() {
    explore("a waiter against close", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let closer = {
            let store = store.clone();
            thread::spawn(move || store.close(Duration::ZERO).expect("nothing fails here"))
        };
        let answer = reserve_waiting(&store, "a");
        let error =
            answer.map(|answer| panic!("told {answer:?}, and nobody ended the reservation")).map(|never: ()| never);
        assert_eq!(error.expect_err("the store was closed").kind(), ErrorKind::Closed);
        assert_eq!(closer.join().expect("the thread ended well").unfinished, 1);
        drop(reservation);
    });
}

#[test]
fn who_is_told_fresh_while_the_store_closes_has_a_record_on_the_disk() {
    let name = "a reserve against close, PowerLoss";
    let book = Book::default();
    let noted = book.clone();
    explore(name, move || {
        let (store, disk) = fresh_store(Durability::PowerLoss);
        let closer = {
            let store = store.clone();
            thread::spawn(move || store.close(Duration::ZERO).expect("nothing fails here"))
        };
        match reserve(&store, "a") {
            Ok(answer) => note_answer(&noted, &disk, "a", &answer),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Closed, "{error}"),
        }
        closer.join().expect("the thread ended well");
    });
    book.check(name);
}
