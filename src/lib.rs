//! An embedded, concurrent, crash-safe idempotency key store.
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("keyonce is for 64-bit platforms");

mod clock;
mod commit;
mod engine;
mod entropy;
mod error;
mod format;
mod helper;
mod index;
mod key;
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
pub use crate::format::Cause;
pub use crate::key::{Fingerprint, FingerprintBuilder, InvalidKey, Key, Scope, Token};
pub use crate::options::{AppendMode, Durability, OnDrop, OnInterrupted, Options, ReserveOptions};
pub use crate::reservation::{
    Attempt, Body, Completion, InFlight, Interrupted, KeyInfo, KeyState, Mismatch, NotReattached, NotStored, Reservation,
    Response, TooOld,
};
pub use crate::retention::Retention;
pub use crate::stats::{OpenReport, Stats};
pub use crate::store::{Failed, OnceError, Outcome, Reserve, Store};
