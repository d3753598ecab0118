//! What tests need: a disk that forgets what was not synced, and a clock that is moved by hand.
//!
//! [`SimDisk`] answers "what does my service find after a power cut at this very moment?", for every moment of a test
//! and for every way in which a disk may keep or lose what was not synced. [`ManualClock`] makes leases lapse and keys
//! expire without waiting. Both are deterministic: no real time, no randomness but from a seed that the test gives.

mod crash;
mod decoders;
mod disk;
mod fuzz;
mod machine;
mod manual_clock;
mod model;
mod pages;
mod sim_disk;
mod sim_segment;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use self::crash::{CrashImages, Crashes};
pub use self::decoders::exercise_decoders;
pub use self::fuzz::RecoveryCases;
pub use self::manual_clock::ManualClock;
pub use self::model::{Expected, Handle, Known, Model, Owner, WaiterId};
pub use self::sim_disk::{EDQUOT, EINTR, EIO, EMFILE, ENOMEM, ENOSPC, Look, Moments, SimDisk, Step, Tear};
pub use crate::storage::{Access, Segment, Storage};

use std::sync::Arc;

use crate::entropy::Entropy;
use crate::error::Error;
use crate::options::Options;
use crate::store::Store;

/// Opens a store on a storage of the test's own, usually a [`SimDisk`].
///
/// It has no helper thread and draws its random numbers from `seed`, so that the same calls write the same bytes at the
/// same steps. Give different seeds to the openings of one disk: a real store never draws the same salt twice.
///
/// # Errors
///
/// As [`Store::open`].
///
/// ```
/// # fn main() -> Result<(), keyonce::Error> {
/// use keyonce::testing::{self, SimDisk};
/// use keyonce::{Fingerprint, Key, Options, Reserve};
///
/// let disk = SimDisk::new();
/// let store = testing::open(disk.clone(), Options::default(), 1)?;
/// let key = Key::new("charges", "order-17")?;
/// assert!(matches!(store.reserve(&key, Fingerprint::of("9.99"))?, Reserve::Fresh(_)));
/// # Ok(())
/// # }
/// ```
pub fn open(storage: impl Storage, options: Options, seed: u64) -> Result<Store, Error> {
    Store::open_on(Arc::new(storage), Entropy::seeded(seed), options.validate()?, false)
}
