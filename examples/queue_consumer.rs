//! A consumer of an at-least-once queue that has the effect of each message once.
//!
//! ```text
//! cargo run --example queue_consumer [DIRECTORY]
//! ```
//!
//! A queue delivers a message again whenever it is not sure that it was acknowledged. [`consume`] turns what the store
//! knows of a message's key into what the queue should do:
//!
//! | the key is | the consumer | the queue |
//! |---|---|---|
//! | new | does the work | ack; or again later, when nothing happened |
//! | done | - | ack |
//! | running elsewhere | - | again, when that lease is over |
//! | interrupted | finds out, resolves or takes over | ack |
//! | another message's | - | dead letter |
//! | too old to be known | - | dead letter |
//!
//! Retention must be longer than the queue may redeliver; [`ReserveOptions::issued_at`] tells the store how old the
//! message is, so that one from before that time is refused and never runs as if it were new. Time is moved by hand
//! (feature `testing`).

use std::collections::BTreeSet;
use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use keyonce::testing::ManualClock;
use keyonce::{
    Clock as _, Completion, Fingerprint, Interrupted, Key, Options, Reservation, Reserve, ReserveOptions, Retention,
    Store,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// How long keys are remembered: longer than the queue keeps a message.
const WINDOW: Duration = Duration::from_secs(24 * 60 * 60);

const LEASE: Duration = Duration::from_secs(60);

/// How long a message waits that could not be handled now.
const AGAIN: Duration = Duration::from_secs(5);

/// What the queue delivers.
#[derive(Clone, Copy)]
struct Message {
    id: &'static str,
    sent_at: SystemTime,
    letter: &'static str,
}

/// What the queue is to do with a message.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Ack,
    Again(Duration),
    DeadLetter(&'static str),
}

/// Handles one delivery.
fn consume(store: &Store, post: &mut Post, message: &Message) -> Result<Verdict> {
    let key = Key::new("letters", message.id)?;
    let with = ReserveOptions::new().issued_at(message.sent_at);
    match store.reserve_with(&key, Fingerprint::of(message.letter), &with) {
        Ok(Reserve::Fresh(reservation)) => send(reservation, post, message),
        Ok(Reserve::Replay(_)) => Ok(Verdict::Ack),
        Ok(Reserve::InFlight(running)) => Ok(Verdict::Again(running.retry_after())),
        Ok(Reserve::Interrupted(unknown)) => settle(unknown, post, message),
        Ok(Reserve::Mismatch(_)) => Ok(Verdict::DeadLetter("its id stands for another message")),
        Ok(Reserve::TooOld(_)) => Ok(Verdict::DeadLetter("it may have been handled and forgotten")),
        Err(error) if error.is_transient() => Ok(Verdict::Again(AGAIN)),
        Err(error) => Err(error.into()),
    }
}

/// Has the effect, as the owner of the key.
fn send(reservation: Reservation, post: &mut Post, message: &Message) -> Result<Verdict> {
    if !post.send(reservation.downstream_key("letter"), message.letter) {
        // It refused before anything happened. An error that leaves it open would call for `interrupt`.
        return reservation.release().map(|_| Verdict::Again(AGAIN)).map_err(Into::into);
    }
    match reservation.complete(b"sent") {
        Ok(Completion::Done) => Ok(Verdict::Ack),
        // Somebody took the key over, or its completion was not stored: the next delivery is told what became of it.
        Ok(Completion::Superseded) => Ok(Verdict::Again(AGAIN)),
        Err(not_stored) if not_stored.error.is_transient() => Ok(Verdict::Again(AGAIN)),
        Err(not_stored) => Err(not_stored.into()),
    }
}

/// The policy for what was begun and never finished: look whether it was sent; if not, become its owner and send it.
fn settle(unknown: Interrupted, post: &mut Post, message: &Message) -> Result<Verdict> {
    if post.has_sent(&unknown.downstream_key("letter")) {
        return Ok(match unknown.resolve(b"sent")? {
            Completion::Done => Verdict::Ack,
            Completion::Superseded => Verdict::Again(AGAIN),
        });
    }
    match unknown.take_over()? {
        Reserve::Fresh(reservation) => send(reservation, post, message),
        // Somebody else was faster.
        _ => Ok(Verdict::Again(AGAIN)),
    }
}

fn main() -> Result<()> {
    let temporary = tempfile::tempdir()?;
    let dir = std::env::args_os().nth(1).map_or_else(|| temporary.path().to_owned(), PathBuf::from);
    let clock = ManualClock::default();
    let options = Options::default().lease(LEASE).retention(Retention::new(WINDOW, 1.0)).clock(Arc::new(clock.clone()));
    let store = Store::open(dir.join("keys"), options)?;
    let mut post = Post::default();
    let now = || UNIX_EPOCH + Duration::from_millis(clock.wall_ms());
    let message = |id, letter| Message { id, sent_at: now(), letter };
    let mut deliver = |what: &str, message: &Message, expected: Verdict| -> Result<()> {
        let verdict = consume(&store, &mut post, message)?;
        println!("{}, {what}: {verdict:?}", message.id);
        assert_eq!(verdict, expected);
        Ok(())
    };

    let first = message("m-1", "Dear Ada");
    deliver("new", &first, Verdict::Ack)?;
    deliver("delivered again", &first, Verdict::Ack)?;
    deliver(
        "its id with another letter",
        &message("m-1", "Dear Bob"),
        Verdict::DeadLetter("its id stands for another message"),
    )?;

    let second = message("m-2", "Dear Carl");
    let Reserve::Fresh(elsewhere) = store.reserve(&Key::new("letters", second.id)?, Fingerprint::of(second.letter))?
    else {
        return Err("the key is new".into());
    };
    clock.advance(LEASE / 3);
    deliver("running elsewhere", &second, Verdict::Again(LEASE * 2 / 3))?;
    drop(elsewhere); // that consumer dies before it has sent anything
    deliver("interrupted, not sent", &second, Verdict::Ack)?;

    let busy = message("m-3", BUSY);
    deliver("the post takes nothing", &busy, Verdict::Again(AGAIN))?;
    deliver("free again, and the post still takes nothing", &busy, Verdict::Again(AGAIN))?;

    clock.advance(WINDOW);
    let late = Verdict::DeadLetter("it may have been handled and forgotten");
    deliver("delivered again after a day", &first, late)?;

    println!("letters sent: {:?}", post.letters);
    assert_eq!(post.letters, ["Dear Ada", "Dear Carl"]);
    Ok(())
}

/// A letter that the post refuses.
const BUSY: &str = "Dear Queue";

/// Stands for the receiver of the effect: it can be asked what it has sent under which key.
#[derive(Default)]
struct Post {
    letters: Vec<&'static str>,
    keys: BTreeSet<String>,
}

impl Post {
    fn send(&mut self, downstream_key: String, letter: &'static str) -> bool {
        if letter == BUSY {
            return false;
        }
        self.letters.push(letter);
        self.keys.insert(downstream_key)
    }

    fn has_sent(&self, downstream_key: &str) -> bool {
        self.keys.contains(downstream_key)
    }
}
