//! The end of a segment: the log rolls, and the segment is given up while somebody reads it or carries a key out of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use keyonce::testing::{ManualClock, SimDisk, Storage};
use keyonce::{Completion, Durability, KeyState, Reservation, Reserve, ReserveOptions, Store};
use loom::thread;

use crate::rig::{
    Book, LEASE, RESPONSE, SEGMENT_BYTES, Told, WAIT, explore, is_replay, key, let_others_in_at_syncs, note_answer,
    open, request, reserve,
};

/// Where the first record of a segment stands.
const RECORDS_START: u64 = 8192;
/// The room that every append leaves for the marks that end a segment and a run.
const END_ROOM: u64 = 128;
/// The length of a record whose scope is that of these models, and whose id and payload have so many bytes together.
const fn record_bytes(id_and_payload: u64) -> u64 {
    (76 + 7 + id_and_payload).next_multiple_of(8)
}

/// A key that does not lie in the same shard as the fillers: its owner and who writes meet at the log alone.
const HELD: &str = "i";

/// A reservation that waits for no sync, and whose checkpoints fill the log.
fn filler(store: &Store, id: &str) -> Reservation {
    let with = ReserveOptions::default().lease(WAIT).durability(Durability::ProcessCrash);
    match store.reserve_with(&key(id), request(), &with) {
        Ok(Reserve::Fresh(reservation)) => reservation,
        other => panic!("nobody else asked: {other:?}"),
    }
}

/// Appends a record of exactly this many bytes; `id_bytes` is the length of the filler's id.
fn fill(filler: &Reservation, id_bytes: u64, bytes: u64) {
    let checkpoint = vec![0xcc; usize::try_from(bytes - 76 - 7 - id_bytes).expect("it fits a segment")];
    assert_eq!(filler.save_checkpoint(&checkpoint).expect("nothing fails here"), Completion::Done);
}

/// Row R2: there is room for one more record in the segment, and two callers. Whoever leads the sync, an answer that
/// rests on the end of the full segment is given only when that is on the disk, too.
#[test]
fn what_is_told_while_the_log_rolls_survives_a_power_loss() {
    let name = "two threads at the end of a segment, PowerLoss";
    let book = Book::default();
    let noted = book.clone();
    let rolled = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&rolled);
    explore(name, move || {
        let disk = SimDisk::new();
        let store = open(&disk, Durability::PowerLoss, &ManualClock::default());
        let filler = filler(&store, "f");
        let end = SEGMENT_BYTES - END_ROOM - record_bytes(1);
        let mut at = RECORDS_START + record_bytes(1);
        while at < end {
            let bytes = (end - at).min(60_000);
            fill(&filler, 1, bytes);
            at += bytes;
        }
        let_others_in_at_syncs(&disk);
        let ask = |id: &'static str| {
            let (store, disk, book) = (store.clone(), disk.clone(), noted.clone());
            move || {
                let answer = reserve(&store, id).expect("nothing fails here");
                note_answer(&book, &disk, id, &answer);
                answer
            }
        };
        let other = thread::spawn(ask("a"));
        let answers = [ask("b")(), other.join().expect("the thread ended well")];
        let mut tokens: Vec<_> = answers
            .iter()
            .map(|answer| match answer {
                Reserve::Fresh(owner) => owner.token().to_u64(),
                other => panic!("two keys: {other:?}"),
            })
            .collect();
        tokens.sort_unstable();
        let segments: Vec<_> = tokens.iter().map(|token| token / SEGMENT_BYTES).collect();
        assert_eq!(segments, [0, 1], "one at the end of the first segment, one in the next");
        counted.fetch_add(1, Ordering::Relaxed);
        disk.on_step(|_| {});
    });
    assert!(rolled.load(Ordering::Relaxed) > 0);
    book.check(name);
}

/// A store whose first segment is full and past its use once the lease's time has passed, and whose second is nearly
/// half full: the next large record makes the store keep house. The first holds the key `a`, done, and what `begin`
/// writes.
fn about_to_retire<T>(clock: &ManualClock, disk: &SimDisk, begin: impl FnOnce(&Store) -> T) -> (Store, Reservation, T) {
    let store = open(disk, Durability::ProcessCrash, clock);
    let short = ReserveOptions::default().retention(LEASE);
    let Ok(Reserve::Fresh(owner)) = store.reserve_with(&key("a"), request(), &short) else { panic!("new") };
    assert_eq!(owner.complete(RESPONSE).expect("nothing fails here"), Completion::Done);
    let begun = begin(&store);
    let first = filler(&store, "f");
    // The fourth is the first record of the second segment.
    for _ in 0..4 {
        fill(&first, 1, 60_000);
    }
    assert_eq!(store.stats().segments, 2, "the log has rolled once");
    assert_eq!(first.complete(b"").expect("nothing fails here"), Completion::Done);
    let second = filler(&store, "g");
    fill(&second, 1, 25_000);
    (store, second, begun)
}

fn segment_files(disk: &SimDisk) -> usize {
    let names = disk.list().expect("a disk without faults");
    names.iter().filter(|name| name.starts_with("segment-")).count()
}

/// Row R6: the segment is given up and its file written again while somebody asks for a key in it.
#[test]
fn who_reads_a_segment_that_is_given_up_gets_its_own_bytes_or_nothing() {
    let (replays, freshs) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (counted_replays, counted_freshs) = (Arc::clone(&replays), Arc::clone(&freshs));
    explore("a reader against the end of its segment", move || {
        let (disk, clock) = (SimDisk::new(), ManualClock::default());
        let (store, filler, ()) = about_to_retire(&clock, &disk, |_| {});
        assert_eq!(segment_files(&disk), 2);
        // What the checker sees of the clock: without it, it would take it that nobody minds when time moves.
        let moment = Arc::new(loom::sync::atomic::AtomicUsize::new(0));
        let reader = {
            let (store, moment) = (store.clone(), Arc::clone(&moment));
            thread::spawn(move || {
                moment.load(loom::sync::atomic::Ordering::Relaxed);
                reserve(&store, "a").expect("nothing fails here")
            })
        };
        moment.store(1, loom::sync::atomic::Ordering::Relaxed);
        clock.advance(LEASE);
        fill(&filler, 1, 60_000);
        let answer = reader.join().expect("the thread ended well");
        if is_replay(&answer) {
            counted_replays.fetch_add(1, Ordering::Relaxed);
        } else {
            assert!(matches!(&answer, Reserve::Fresh(owner) if owner.attempt() == 1), "{answer:?}");
            counted_freshs.fetch_add(1, Ordering::Relaxed);
        }
        // Its file is the successor's: no third one was made.
        assert_eq!((store.stats().segments, segment_files(&disk)), (1, 2));
    });
    let seen = (replays.load(Ordering::Relaxed), freshs.load(Ordering::Relaxed));
    assert!(seen.0 > 0 && seen.1 > 0, "{} replays and {} absences", seen.0, seen.1);
}

/// Row R1: the segment holds an unfinished key, whose owner completes it while the key is carried forward.
#[test]
fn a_completion_that_meets_the_carrying_of_its_key_stays() {
    let name = "a completion against the end of its segment";
    let book = Book::default();
    let noted = book.clone();
    explore(name, move || {
        let (disk, clock) = (SimDisk::new(), ManualClock::default());
        let (store, filler, held) = about_to_retire(&clock, &disk, |store| {
            let with = ReserveOptions::default().lease(WAIT).durability(Durability::PowerLoss);
            match store.reserve_with(&key(HELD), request(), &with) {
                Ok(Reserve::Fresh(owner)) => owner,
                other => panic!("nobody else asked: {other:?}"),
            }
        });
        clock.advance(LEASE);
        let owner = thread::spawn(move || held.complete(RESPONSE).expect("nothing fails here"));
        fill(&filler, 1, 60_000);
        // Its reservation was on the disk: whatever has taken its place by now is there, too.
        noted.note(&disk, HELD, Told::Known);
        assert_eq!(owner.join().expect("the thread ended well"), Completion::Done);
        let answer = reserve(&store, HELD).expect("nothing fails here");
        assert!(is_replay(&answer), "{answer:?}");
        // The same after a kill.
        explore_after(&disk.kill(), &clock);
    });
    book.check(name);
}

/// Opens what a kill left: the key is done.
fn explore_after(disk: &SimDisk, clock: &ManualClock) {
    let store = open(disk, Durability::ProcessCrash, clock);
    let found = store.peek(&key(HELD)).expect("a sound image").map(|info| info.state);
    assert_eq!(found, Some(KeyState::Done));
}

/// The last record of a segment is published, and not yet noted at it, when the log rolls and the segment, in which all
/// else is over, is looked at: it is not given up with a live response in it.
#[test]
fn a_response_at_the_very_end_of_a_segment_that_is_over_keeps_it() {
    let (stayed, went) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (counted_stayed, counted_went) = (Arc::clone(&stayed), Arc::clone(&went));
    explore("a completion at the end of a segment", move || {
        let (disk, clock) = (SimDisk::new(), ManualClock::default());
        let store = open(&disk, Durability::ProcessCrash, &clock);
        let short = ReserveOptions::default().retention(LEASE);
        let Ok(Reserve::Fresh(owner)) = store.reserve_with(&key("a"), request(), &short) else { panic!("new") };
        assert_eq!(owner.complete(b"").expect("nothing fails here"), Completion::Done);
        let held = filler(&store, HELD);
        let filler = filler(&store, "f");
        let end = SEGMENT_BYTES - END_ROOM - record_bytes(1 + RESPONSE.len() as u64);
        let mut at = RECORDS_START + 4 * record_bytes(1);
        while at < end {
            let bytes = (end - at).min(60_000);
            fill(&filler, 1, bytes);
            at += bytes;
        }
        clock.advance(LEASE);
        let owner = thread::spawn(move || held.complete(RESPONSE).expect("nothing fails here"));
        fill(&filler, 1, 60_000);
        assert_eq!(owner.join().expect("the thread ended well"), Completion::Done);
        let counted = if store.stats().segments == 1 { &counted_went } else { &counted_stayed };
        counted.fetch_add(1, Ordering::Relaxed);
        let answer = reserve(&store, HELD).expect("nothing fails here");
        assert!(is_replay(&answer), "{answer:?}");
        explore_after(&disk.kill(), &clock);
    });
    let seen = (stayed.load(Ordering::Relaxed), went.load(Ordering::Relaxed));
    assert!(seen.0 > 0 && seen.1 > 0, "the segment stayed {} times and went {} times", seen.0, seen.1);
}
