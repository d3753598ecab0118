//! Further places where the faults of `tests/cases.md` can live: the same situations met by another kind of caller, in
//! another order, or after a reopening; each at every level and append mode, in a directory and on a simulated disk.
//!
//! [`ground`] is where they are tried, and what a crash leaves of it.

mod durations;
mod ground;
mod identity;
mod many;
mod owners;
mod stuck;
mod time;
