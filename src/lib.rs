//! Run work once per idempotency key: an embedded, concurrent, crash-safe store that a service links when a retry must
//! not charge the card twice.
//!
//! A timeout tells a caller to stop waiting; it does not undo the work. So the caller retries, and the work is done
//! twice, unless the request carries a key that the client made once for the operation, and somebody remembers keys and
//! answers. This crate remembers them: in a directory of its own, without a server, through crashes and power loss.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let dir = dir.path().join("keys");
//! use keyonce::{Fingerprint, Key, Options, Reserve, Store};
//!
//! let store = Store::open(&dir, Options::default())?;
//! let key = Key::new("shop-7/charges", "order-1001")?; // scope and id: the same id in another scope is another key
//! let request = Fingerprint::of("9.99 EUR"); // a retry must ask for the same
//!
//! match store.reserve(&key, request)? {
//!     Reserve::Fresh(reservation) => {
//!         // Charge the card here, and pass on `reservation.downstream_key("charge")`.
//!         let _ = reservation.complete(b"charged 9.99 EUR")?;
//!     }
//!     Reserve::Replay(response) => println!("done before: {:?}", response.body()),
//!     Reserve::InFlight(running) => println!("in progress, come back in {:?}", running.retry_after()),
//!     Reserve::Interrupted(unknown) => println!("begun by attempt {}, never finished: find out", unknown.attempt),
//!     Reserve::Mismatch(_) => println!("this key stands for another request"),
//!     Reserve::TooOld(_) => println!("this key may have been forgotten"),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! What each answer means, how it arises, what to do and what to say over HTTP: [`Reserve`].
//!
//! # Once
//!
//! [`Store::once`] is these steps in one call, for a function that does the work. What the function returns as `Ok` is
//! stored, a final refusal as well as a success. What it returns as an error says what is known: `?` means that the
//! effect may have happened, [`Failed::NothingHappened`] gives the key back.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let dir = dir.path().join("keys");
//! use keyonce::{Attempt, Failed, Fingerprint, Key, OnceError, Options, Outcome, Store};
//!
//! fn charge(attempt: &Attempt) -> Result<Vec<u8>, Failed<std::io::Error>> {
//!     let key = attempt.downstream_key("charge"); // send it along: its receiver can refuse to charge twice
//!     Ok(format!("charged 9.99 EUR under {key}").into_bytes())
//! }
//!
//! let store = Store::open(&dir, Options::default())?;
//! let key = Key::new("shop-7/charges", "order-1001")?;
//! match store.once(&key, Fingerprint::of("9.99 EUR"), charge) {
//!     Ok(Outcome::Ran(response)) => println!("charged now: {response:?}"),
//!     Ok(Outcome::Replayed(response)) => println!("charged before: {:?}", response.body()),
//!     Err(OnceError::InFlight(running)) => println!("in progress, come back in {:?}", running.retry_after()),
//!     Err(OnceError::Interrupted(unknown)) => println!("ask under {}", unknown.downstream_key("charge")),
//!     Err(other) => return Err(other.into()),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Tasks
//!
//! Every call on a key has a twin that ends in `_async`. It returns a future that is `Send + 'static` (with work of
//! your own in it: if that is), runs on any executor, blocks no thread, and may be dropped at any time: before the work
//! has begun, nothing is left behind; after that the key is interrupted, as it is when a guard is dropped, or its
//! response stored. Opening a store, going through a list of keys and dropping the last handle block: do these on a
//! thread that may, and [`Store::close_async`] first.
//!
//! # Threads
//!
//! A store has three threads of its own: `keyonce-helper` makes segments ready and gives old ones up, `keyonce-sync`
//! syncs for tasks and in the background, `keyonce-timer` sleeps until a lease or a wait ends. They are gone when the
//! store is closed.
//!
//! ```
//! use std::time::Duration;
//!
//! use keyonce::{Attempt, Failed, Fingerprint, Key, OnceError, Outcome, ReserveOptions, Store};
//!
//! async fn charge(attempt: Attempt) -> Result<Vec<u8>, Failed<std::io::Error>> {
//!     let key = attempt.downstream_key("charge");
//!     Ok(format!("charged 9.99 EUR under {key}").into_bytes()) // a real one awaits the payment provider
//! }
//!
//! async fn pay(store: &Store, key: &Key) -> Result<Outcome, OnceError<std::io::Error>> {
//!     // Of two that come at once, the second waits for what the first is answered.
//!     let with = ReserveOptions::new().wait(Duration::from_secs(5));
//!     store.once_with_async(key, Fingerprint::of("9.99 EUR"), &with, charge).await
//! }
//! # fn assert_send<T: Send>(_: T) {}
//! # fn check(store: Store, key: Key) { assert_send(async move { pay(&store, &key).await.is_ok() }) }
//! ```
//!
//! # Where to begin
//!
//! | you have | use |
//! |---|---|
//! | a function that does the work | [`Store::once`], [`Store::once_async`] |
//! | work whose steps you keep in hand | [`Store::reserve`], then the [`Reservation`] |
//! | many keys at a time | [`Store::reserve_batch`], [`Store::complete_batch`]: one sync for all |
//! | callers that should wait for the one at work | [`ReserveOptions::wait`], [`InFlight::wait`] |
//! | work that may outlast its lease | [`Reservation::renew`], [`Options::renew_while_held`] |
//! | work of several steps | [`Reservation::save_checkpoint`] |
//! | work that goes on in another process | [`Reservation::detach`], [`Store::reattach`] |
//! | a key that was left interrupted, or all of them | [`Interrupted`], [`Store::interrupted`], [`OnInterrupted`] |
//! | clients or queues that retry for days | [`ReserveOptions::issued_at`], [`Retention`] |
//! | an HTTP or gRPC service whose clients send keys | feature `tower`, `http::IdempotencyLayer` |
//! | somebody to be told of what needs a person | [`Options::on_event`], [`Store::health`] |
//! | tests of your own service against crashes | feature `testing`, `examples/crash_test.rs` |
//!
//! # Which crash loses what
//!
//! [`Durability`] says it, per store or per call. At `PowerLoss`, the default, no answer rests on anything that a power
//! loss could take back; callers that wait at the same time share one sync. At `ProcessCrash` no call waits for a sync,
//! and every answer survives the end of the process; `Interval` bounds what a power loss can take then.
//!
//! # Layout
//!
//! `store` and `reservation` are the public face; `engine` knows the order of steps; `state` decides, purely; `index`
//! finds the latest record of a key, `log` appends records to `segment`s, `commit` makes them durable, `recovery`
//! opens, by what `scan` reads of a segment or a `hint` says of it; `format` alone knows bytes, `storage` files, and
//! `map` holds all unsafe code. `http` (feature `tower`) stands on the public face. Imports point down
//! only.
//!
//! # Features
//!
//! | feature | gives |
//! |---|---|
//! | `testing` | a simulated disk, a clock moved by hand, the seams they plug into, and a reference model |
//! | `cli` | the program `keyonce` |
//! | `tower` | `http`: the `Idempotency-Key` header for axum, tonic, hyper and any tower service |
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("keyonce is for 64-bit platforms");

mod clock;
mod commit;
mod engine;
mod entropy;
mod error;
mod event;
mod fork;
mod format;
mod helper;
mod hint;
#[cfg(feature = "tower")]
pub mod http;
mod index;
mod key;
mod left;
mod log;
mod map;
mod options;
mod recovery;
mod reservation;
mod retention;
mod scan;
mod segment;
mod state;
mod stats;
mod storage;
mod store;
mod sync;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod wait;

pub use crate::clock::{Clock, SystemClock};
pub use crate::engine::CloseReport;
pub use crate::error::{Error, ErrorKind};
pub use crate::event::Event;
pub use crate::format::Cause;
pub use crate::key::{Fingerprint, FingerprintBuilder, InvalidKey, Key, Scope, Token};
pub use crate::options::{AppendMode, Durability, OnDrop, OnInterrupted, Options, ReserveOptions};
pub use crate::reservation::{
    Attempt, Body, Completion, InFlight, Interrupted, InterruptedKeys, KeyInfo, KeyState, Keys, Mismatch,
    NotReattached, NotStored, Reservation, Response, TooOld,
};
pub use crate::retention::Retention;
pub use crate::stats::{Health, OpenReport, Progress, RetryAges, Stats};
pub use crate::store::{Ask, Failed, OnceError, Outcome, Reserve, Store};

/// The README's example compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
