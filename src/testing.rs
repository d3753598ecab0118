//! What tests need: a disk that forgets what was not synced, and a clock that is moved by hand.
//!
//! [`SimDisk`] answers "what does my service find after a power cut at this very moment?", for every moment of a test and
//! for every way in which a disk may keep or lose what was not synced. [`ManualClock`] makes leases lapse and keys expire
//! without waiting. Both are deterministic: no real time, no randomness but from a seed that the test gives.

mod crash;
mod disk;
mod manual_clock;
mod sim_disk;

pub use self::crash::{CrashImages, Crashes};
pub use self::manual_clock::ManualClock;
pub use self::sim_disk::{EDQUOT, EIO, ENOSPC, Moments, SimDisk, Step, Tear};
pub use crate::storage::{Access, Segment, Storage};
