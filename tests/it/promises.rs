//! The ten promises, each through the public interface, at every durability level and append mode.
//!
//! A test is named after the promise it keeps. What a kill leaves is asked of a copied directory, what a power loss
//! leaves of the simulated disk; time is moved by hand, and nobody sleeps.

mod answers;
mod owners;
mod remembering;

use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk};
use keyonce::{Durability, ReserveOptions, Store};

use crate::place::EVERYWHERE;

/// The largest checkpoint, as the documentation of `save_checkpoint` says.
const CHECKPOINT_BYTES_MAX: usize = 64 << 10;

/// A row of a table: what it is called when it fails, and what is done.
type Named<F> = (&'static str, F);

fn waiting() -> ReserveOptions {
    ReserveOptions::new().wait(Duration::from_secs(24 * 60 * 60))
}

/// Opens a store on a simulated disk; `seed` differs for each opening of one disk.
fn open_on(disk: &SimDisk, clock: &ManualClock, durability: Durability, seed: u64) -> Store {
    let setting = EVERYWHERE.into_iter().find(|setting| setting.durability == durability).unwrap();
    testing::open(disk.clone(), setting.options(clock), seed).unwrap()
}
