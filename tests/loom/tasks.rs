//! Tasks: threads of the model that sleep until their waker is called, and futures that are dropped.

use std::sync::atomic::{AtomicU64, Ordering};

use keyonce::testing::{EIO, Step};
use keyonce::{Completion, Durability, Error, ErrorKind, Reserve, Store};
use loom::thread;

use crate::rig::{
    Book, RESPONSE, block_on, explore, explore_with_at_most, fresh_store, is_replay, key, let_others_in_at_syncs,
    note_answer, nothing_is_left, poll_once, request, reserve, reserve_fresh, reserve_waiting, waiting,
};

#[test]
fn a_waiting_task_is_woken_by_the_completion_and_replays_it() {
    explore("a task against a completion", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let owner = thread::spawn(move || reservation.complete(RESPONSE).expect("nothing fails here"));
        let answer = block_on(waiting(&store, "a")).expect("nothing fails here");
        assert!(is_replay(&answer), "{answer:?}");
        assert_eq!(owner.join().expect("the thread ended well"), Completion::Done);
        nothing_is_left(&store);
    });
}

#[test]
fn a_completion_wakes_every_waiting_task() {
    explore("two tasks against a completion", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let other = {
            let store = store.clone();
            thread::spawn(move || block_on(waiting(&store, "a")).expect("nothing fails here"))
        };
        let owner = thread::spawn(move || reservation.complete(RESPONSE).expect("nothing fails here"));
        let answers =
            [block_on(waiting(&store, "a")).expect("nothing fails here"), other.join().expect("the thread ended well")];
        assert!(answers.iter().all(is_replay), "{answers:?}");
        assert_eq!(owner.join().expect("the thread ended well"), Completion::Done);
        nothing_is_left(&store);
    });
}

#[test]
fn a_waiting_task_is_woken_by_the_drop_and_told_interrupted() {
    explore("a task against a drop", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let owner = thread::spawn(move || drop(reservation));
        let answer = block_on(waiting(&store, "a")).expect("nothing fails here");
        assert!(matches!(answer, Reserve::Interrupted(_)), "{answer:?}");
        owner.join().expect("the thread ended well");
        nothing_is_left(&store);
    });
}

#[test]
fn a_hand_over_to_a_future_that_is_dropped_at_that_moment_passes_on() {
    explore("a future that is dropped against a release", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let mut gives_up = waiting(&store, "a");
        assert!(poll_once(&mut gives_up).is_pending());
        let owner = thread::spawn(move || reservation.release().expect("nothing fails here"));
        drop(gives_up);
        // Whoever comes next gets it: nobody has begun.
        let answer = reserve_waiting(&store, "a").expect("nothing fails here");
        assert!(matches!(&answer, Reserve::Fresh(next) if next.attempt() == 1), "{answer:?}");
        assert_eq!(owner.join().expect("the thread ended well"), Completion::Done);
        drop(answer);
        nothing_is_left(&store);
    });
}

#[test]
fn of_two_waiting_futures_one_is_dropped_and_the_other_becomes_the_owner() {
    explore("two futures, one dropped, against a release", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let (mut gives_up, mut stays) = (waiting(&store, "a"), waiting(&store, "a"));
        assert!(poll_once(&mut gives_up).is_pending() && poll_once(&mut stays).is_pending());
        let owner = thread::spawn(move || reservation.release().expect("nothing fails here"));
        let dropper = thread::spawn(move || drop(gives_up));
        let answer = block_on(stays).expect("nothing fails here");
        assert!(matches!(&answer, Reserve::Fresh(next) if next.attempt() == 1), "{answer:?}");
        assert_eq!(owner.join().expect("the thread ended well"), Completion::Done);
        dropper.join().expect("the thread ended well");
        drop(answer);
        nothing_is_left(&store);
    });
}

#[test]
fn of_two_waiting_tasks_a_release_makes_one_the_owner_and_its_completion_wakes_the_other() {
    explore("two tasks against a release", || {
        let (store, _) = fresh_store(Durability::ProcessCrash);
        let reservation = reserve_fresh(&store, "a");
        let ask = |store: &Store| match block_on(waiting(store, "a")).expect("nothing fails here") {
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
            thread::spawn(move || ask(&store))
        };
        let owner = thread::spawn(move || reservation.release().expect("nothing fails here"));
        let owned = [ask(&store), other.join().expect("the thread ended well")];
        assert_eq!(owned.iter().filter(|owned| **owned).count(), 1);
        assert_eq!(owner.join().expect("the thread ended well"), Completion::Done);
        nothing_is_left(&store);
    });
}

#[test]
fn what_a_thread_and_two_tasks_are_told_survives_a_power_loss() {
    let name = "a thread and two tasks, PowerLoss";
    let book = Book::default();
    let noted = book.clone();
    explore_with_at_most(2, name, move || {
        let (store, disk) = fresh_store(Durability::PowerLoss);
        let_others_in_at_syncs(&disk);
        let ask = |id: &'static str| {
            let (store, disk, book) = (store.clone(), disk.clone(), noted.clone());
            move || {
                let answer = block_on(store.reserve_async(&key(id), request())).expect("nothing fails here");
                note_answer(&book, &disk, id, &answer);
                assert!(matches!(answer, Reserve::Fresh(_)), "{answer:?}");
            }
        };
        let tasks = [thread::spawn(ask("a")), thread::spawn(ask("b"))];
        let answer = reserve(&store, "c").expect("nothing fails here");
        note_answer(&noted, &disk, "c", &answer);
        for task in tasks {
            task.join().expect("the thread ended well");
        }
        drop(answer);
        nothing_is_left(&store);
    });
    book.check(name);
}

#[test]
fn after_a_failed_sync_tasks_get_an_error_and_nobody_hangs() {
    explore_with_at_most(2, "a thread and two tasks against a failing sync", || {
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
            move || block_on(store.reserve_async(&key(id), request())).map(|answer| panic!("told {answer:?}"))
        };
        let tasks = [thread::spawn(ask("a")), thread::spawn(ask("b"))];
        let here = reserve(&store, "c").map(|answer| panic!("told {answer:?} after a failed sync"));
        let [a, b] = tasks.map(|task| task.join().expect("the thread ended well"));
        for told in [a, b, here] {
            let error: Error = told.map(|never: ()| never).expect_err("the sync failed");
            assert_eq!(error.kind(), ErrorKind::Poisoned, "{error}");
        }
        disk.on_step(|_| {});
        nothing_is_left(&store);
    });
}
