//! What an owner can do while its work runs, and what becomes of one that is too late.
//!
//! ```text
//! cargo run --example guard_and_lease [DIRECTORY]
//! ```
//!
//! A reservation counts as running for the length of its lease. An owner that needs longer renews it, by hand or by an
//! option; one that does not is not forgotten: others are told that the outcome is unknown, and the late completion
//! still counts unless somebody took the key over. Time is moved by hand here (feature `testing`), so nobody waits.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use keyonce::testing::ManualClock;
use keyonce::{Attempt, Body, Cause, Completion, Fingerprint, Interrupted, Key, Options, Reservation, Reserve, Store};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const LEASE: Duration = Duration::from_secs(60);

fn main() -> Result<()> {
    let temporary = tempfile::tempdir()?;
    let dir = std::env::args_os().nth(1).map_or_else(|| temporary.path().to_owned(), PathBuf::from);
    let clock = ManualClock::default();
    let store = Store::open(dir.join("by-hand"), Options::default().lease(LEASE).clock(Arc::new(clock.clone())))?;
    renewed_by_hand(&store, &clock)?;
    completed_late(&store, &clock)?;
    superseded(&store, &clock)?;
    given_back_and_dropped(&store)?;
    renewed_while_held(&dir.join("while-held"), &clock)
}

/// Work that takes longer than a lease, and says from time to time that it is still running.
fn work(attempt: &Attempt, clock: &ManualClock) -> Result<()> {
    for part in 1..=3 {
        clock.advance(LEASE * 2 / 3);
        // `Superseded` would mean that somebody else owns the key by now: stop, and have no more effects.
        if attempt.renew(LEASE)? == Completion::Superseded {
            return Err("somebody took the key over".into());
        }
        println!("  part {part} of 3 is done, the lease begins anew");
    }
    Ok(())
}

fn renewed_by_hand(store: &Store, clock: &ManualClock) -> Result<()> {
    println!("renewed by hand:");
    let key = key("renewed")?;
    let reservation = fresh(store.reserve(&key, request())?)?;
    work(&reservation.attempt_view(), clock)?;
    match store.reserve(&key, request())? {
        Reserve::InFlight(running) => println!("  another caller: running, lease left {:?}", running.retry_after()),
        other => return Err(surprise(&other)),
    }
    assert_eq!(reservation.complete(b"three parts")?, Completion::Done);
    replays(store, &key, b"three parts")
}

fn completed_late(store: &Store, clock: &ManualClock) -> Result<()> {
    println!("completed late:");
    let key = key("late")?;
    let reservation = fresh(store.reserve(&key, request())?)?;
    clock.advance(LEASE);
    let unknown = interrupted(store.reserve(&key, request())?)?;
    assert_eq!(unknown.cause(), Cause::LeaseLapsed);
    println!("  another caller: the lease lapsed, the outcome is unknown");
    assert_eq!(reservation.complete(b"late, but done")?, Completion::Done);
    println!("  nobody took over, so the late completion counts");
    // The handle from before acts only on what it was made for.
    assert_eq!(unknown.resolve(b"a guess")?, Completion::Superseded);
    replays(store, &key, b"late, but done")
}

fn superseded(store: &Store, clock: &ManualClock) -> Result<()> {
    println!("superseded:");
    let key = key("taken-over")?;
    let first = fresh(store.reserve(&key, request())?)?;
    assert_eq!(first.save_checkpoint(b"2 of 10 letters are sent")?, Completion::Done);
    clock.advance(LEASE);
    let second = fresh(interrupted(store.reserve(&key, request())?)?.take_over()?)?;
    let checkpoint = String::from_utf8_lossy(second.checkpoint()).into_owned();
    println!("  attempt {} goes on where it finds: {checkpoint}", second.attempt());
    assert_eq!((second.attempt(), checkpoint.as_str()), (2, "2 of 10 letters are sent"));
    assert!(second.token() > first.token(), "tokens grow");
    // What the first owner does now changes nothing, and it is told so.
    assert_eq!(first.renew(LEASE)?, Completion::Superseded);
    assert_eq!(first.complete(b"by the first")?, Completion::Superseded);
    println!("  the first owner's completion: superseded");
    assert_eq!(second.complete(b"by the second")?, Completion::Done);
    replays(store, &key, b"by the second")
}

fn given_back_and_dropped(store: &Store) -> Result<()> {
    println!("given back, and dropped:");
    let key = key("given-back")?;
    let reservation = fresh(store.reserve(&key, request())?)?;
    assert_eq!(reservation.release()?, Completion::Done);
    println!("  nothing happened, so the key is free again");
    drop(fresh(store.reserve(&key, request())?)?);
    let unknown = interrupted(store.reserve(&key, request())?)?;
    assert_eq!(unknown.cause(), Cause::Dropped);
    println!("  dropped, as by a panic or `?`: interrupted at once, no lease has to lapse");
    Ok(())
}

fn renewed_while_held(dir: &Path, clock: &ManualClock) -> Result<()> {
    println!("renewed while held:");
    let at_most = Duration::from_secs(600);
    let options = Options::default().lease(LEASE).renew_while_held(at_most).clock(Arc::new(clock.clone()));
    let store = Store::open(dir, options)?;
    let key = key("held")?;
    let reservation = fresh(store.reserve(&key, request())?)?;
    clock.advance(at_most - LEASE / 2);
    match store.reserve(&key, request())? {
        Reserve::InFlight(running) => println!("  nobody renewed, lease left {:?}", running.retry_after()),
        other => return Err(surprise(&other)),
    }
    clock.advance(LEASE / 2);
    let unknown = interrupted(store.reserve(&key, request())?)?;
    assert_eq!(unknown.cause(), Cause::LeaseLapsed);
    println!("  after {at_most:?} a holder that hangs counts as running no longer");
    assert_eq!(reservation.complete(b"in the end")?, Completion::Done);
    replays(&store, &key, b"in the end")
}

fn key(id: &str) -> Result<Key> {
    Ok(Key::new("guard-and-lease", id)?)
}

fn request() -> Fingerprint {
    Fingerprint::of("ten letters")
}

fn fresh(answer: Reserve) -> Result<Reservation> {
    match answer {
        Reserve::Fresh(reservation) => Ok(reservation),
        other => Err(surprise(&other)),
    }
}

fn interrupted(answer: Reserve) -> Result<Interrupted> {
    match answer {
        Reserve::Interrupted(unknown) => Ok(unknown),
        other => Err(surprise(&other)),
    }
}

fn replays(store: &Store, key: &Key, expected: &[u8]) -> Result<()> {
    match store.reserve(key, request())? {
        Reserve::Replay(response) => {
            assert_eq!(response.body(), Body::Kept(expected));
            println!("  a retry is answered: {}", String::from_utf8_lossy(expected));
            Ok(())
        }
        other => Err(surprise(&other)),
    }
}

fn surprise(answer: &Reserve) -> Box<dyn Error> {
    format!("this answer is a surprise: {answer:?}").into()
}
