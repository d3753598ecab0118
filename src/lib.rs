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
//!         // Charge the card here, and pass on `reservation.attempt_view().downstream_key("charge")`.
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
//! # Where to begin
//!
//! | you have | use |
//! |---|---|
//! | a function that does the work | [`Store::once`] |
//! | work whose steps you keep in hand | [`Store::reserve`], then the [`Reservation`] |
//! | callers that should wait for the one at work | [`ReserveOptions::wait`] |
//! | work that goes on in another process | [`Reservation::detach`], [`Store::reattach`] |
//! | a key that was left interrupted | [`Interrupted`] |
//! | tests of your own service against crashes | feature `testing` |
//!
//! # Which crash loses what
//!
//! [`Durability`] says it, per store or per call. At `PowerLoss`, the default, no answer rests on anything that a power
//! loss could take back; callers that wait at the same time share one sync. At `ProcessCrash` no call waits for a sync.
//!
//! # Layout
//!
//! `store` and `reservation` are the public face; `engine` knows the order of steps; `state` decides, purely; `index`
//! finds the latest record of a key, `log` appends records to `segment`s, `commit` makes them durable, `recovery`
//! opens; `format` alone knows bytes, `storage` files, and `map` holds all unsafe code. Imports point down only.
//!
//! # Features
//!
//! | feature | gives |
//! |---|---|
//! | `testing` | a simulated disk, a clock moved by hand, and the seams they plug into |
//! | `cli` | the program `keyonce` |
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("keyonce is for 64-bit platforms");

mod clock;
mod commit;
mod engine;
mod entropy;
mod error;
mod event;
mod format;
mod helper;
mod index;
mod key;
mod left;
mod log;
mod map;
mod options;
mod recovery;
mod reservation;
mod retention;
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
pub use crate::stats::{Health, OpenReport, RetryAges, Stats};
pub use crate::store::{Ask, Failed, OnceError, Outcome, Reserve, Store};

/// The README's example compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
