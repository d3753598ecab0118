//! Tasks that ask for the same key at once: the work is done once, and nobody blocks a thread.
//!
//! ```text
//! cargo run --example async_once [DIRECTORY]
//! ```
//!
//! The futures of a store need no runtime and run on any. Here that is the smallest there is: forty lines at the end of
//! this file that poll a list of tasks on the main thread and sleep until one of them is woken.

use std::cell::Cell;
use std::error::Error;
use std::future::{pending, poll_fn};
use std::path::PathBuf;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use keyonce::{
    Attempt, Body, Cause, Completion, Failed, Fingerprint, Key, OnceError, Options, Outcome, Reserve, ReserveOptions,
    Store,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let temporary = tempfile::tempdir()?;
    let dir = std::env::args_os().nth(1).map_or_else(|| temporary.path().to_owned(), PathBuf::from);
    let store = Store::open(dir.join("keys"), Options::default())?;
    one_effect(&store)?;
    a_waiter(&store)?;
    cancelled(&store)
}

/// Two tasks, one key: one of them charges, the other waits for what comes of it.
fn one_effect(store: &Store) -> Result<()> {
    let charges = Cell::new(0);
    let charge = async |attempt: Attempt| {
        let _sent_along = attempt.downstream_key("charge");
        turn().await; // here the answer of the payment provider would be awaited
        charges.set(charges.get() + 1);
        Ok::<_, Failed<std::io::Error>>(b"charged 9.99 EUR".to_vec())
    };
    let task = async |name: &str| -> Result<()> {
        let with = ReserveOptions::new().wait(Duration::from_secs(10));
        match store.once_with_async(&key("order-1")?, request(), &with, charge).await? {
            Outcome::Ran(_) => println!("task {name}: ran"),
            Outcome::Replayed(response) => {
                assert_eq!(response.body(), Body::Kept(b"charged 9.99 EUR"));
                println!("task {name}: replayed");
            }
        }
        Ok(())
    };
    run_all([task("A"), task("B")])?;
    assert_eq!(charges.get(), 1);
    println!("two tasks, charges: {}", charges.get());

    // Without options of its own a call does not wait: while another is at work it would be told `InFlight`.
    run_all([async {
        match store.once_async(&key("order-1")?, request(), charge).await {
            Ok(Outcome::Replayed(_)) => Ok(()),
            other => Err(surprise(&other)),
        }
    }])
}

/// The same with the steps in hand: an owner that releases, and a waiter that gets the key then.
fn a_waiter(store: &Store) -> Result<()> {
    let key = key("order-2")?;
    let owner = async {
        let Reserve::Fresh(reservation) = store.reserve_async(&key, request()).await? else {
            return Err("the key is new".into());
        };
        turn().await;
        println!("owner: the card was declined before anything happened, release");
        assert_eq!(reservation.release_async().await?, Completion::Done);
        Ok(())
    };
    let waiter = async {
        turn().await;
        let with = ReserveOptions::new().wait(Duration::from_secs(10));
        match store.reserve_with_async(&key, request(), &with).await? {
            Reserve::Fresh(reservation) => {
                println!("waiter: the key is mine now");
                assert_eq!(reservation.complete_async(b"charged another card").await?, Completion::Done);
                Ok(())
            }
            other => Err(surprise(&other)),
        }
    };
    let (owner, waiter): (Task<'_>, Task<'_>) = (Box::pin(owner), Box::pin(waiter));
    run_all([owner, waiter])
}

/// Futures that are dropped before they are ready, as when a client hangs up.
fn cancelled(store: &Store) -> Result<()> {
    // While the key is being reserved no work has begun, and nothing is left behind.
    let key_3 = key("order-3")?;
    let mut reserving = Box::pin(store.reserve_async(&key_3, request()));
    let first_poll = reserving.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    println!("dropped while it reserves (ready: {}): nothing is left behind", first_poll.is_ready());
    drop((reserving, first_poll));
    run_all([async {
        match store.reserve_async(&key_3, request()).await? {
            Reserve::Fresh(reservation) => {
                assert_eq!(reservation.release_async().await?, Completion::Done);
                Ok(())
            }
            other => Err(surprise(&other)),
        }
    }])?;

    // Once the work runs, its outcome is unknown.
    let key_4 = key("order-4")?;
    let working = Cell::new(false);
    let stuck = async |_attempt: Attempt| {
        working.set(true);
        pending::<std::result::Result<Vec<u8>, Failed<std::io::Error>>>().await
    };
    let mut charging = Box::pin(store.once_async(&key_4, request(), stuck));
    let until_it_works = poll_fn(|context| match charging.as_mut().poll(context) {
        Poll::Pending if working.get() => Poll::Ready(Ok(())),
        Poll::Pending => Poll::Pending,
        Poll::Ready(ended) => Poll::Ready(Err(surprise(&ended))),
    });
    run_all([until_it_works])?;
    drop(charging);
    let again = async |_attempt: Attempt| Ok::<_, Failed<std::io::Error>>(b"charged again".to_vec());
    run_all([async {
        match store.once_async(&key_4, request(), again).await {
            Err(OnceError::Interrupted(unknown)) => {
                assert_eq!(unknown.cause(), Cause::Dropped);
                println!("dropped while it charges: interrupted, ask under {}", unknown.downstream_key("charge"));
                Ok(())
            }
            other => Err(surprise(&other)),
        }
    }])
}

fn key(id: &str) -> Result<Key> {
    Ok(Key::new("shop-7/charges", id)?)
}

fn request() -> Fingerprint {
    Fingerprint::of("9.99 EUR")
}

fn surprise(answer: &impl std::fmt::Debug) -> Box<dyn Error> {
    format!("this answer is a surprise: {answer:?}").into()
}

// The executor.

type Task<'a> = Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

/// Wakes the thread that polls.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls all tasks until each is ready; after each wake-up, every one of them.
fn run_all<'a>(tasks: impl IntoIterator<Item = impl Future<Output = Result<()>> + 'a>) -> Result<()> {
    let mut tasks: Vec<Task<'a>> = tasks.into_iter().map(|task| Box::pin(task) as Task<'a>).collect();
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        let mut failed = None;
        tasks.retain_mut(|task| match task.as_mut().poll(&mut context) {
            Poll::Pending => true,
            Poll::Ready(ended) => {
                failed = failed.take().or(ended.err());
                false
            }
        });
        match failed {
            Some(error) => return Err(error),
            None if tasks.is_empty() => return Ok(()),
            None => thread::park(),
        }
    }
}

/// Lets every other task have a turn.
async fn turn() {
    let mut had = false;
    let turn = poll_fn(|context| {
        if std::mem::replace(&mut had, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    });
    pin!(turn).await;
}
