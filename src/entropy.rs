//! Where random numbers come from: the operating system, or a seed in tests that must run the same way twice.
//!
//! Salts are drawn at every new life of a segment and never kept in a process-wide generator, so a forked child cannot
//! draw the same ones.

use std::io;

use crate::sync::{AtomicU64, Ordering};

/// A source of random bytes.
#[derive(Debug)]
pub(crate) enum Entropy {
    /// The operating system's generator.
    System,
    /// SplitMix64 from a seed; for simulated disks only.
    #[cfg_attr(not(any(test, feature = "testing")), expect(dead_code, reason = "only simulated disks are seeded"))]
    Seeded(AtomicU64),
}

impl Entropy {
    /// A source that gives the same numbers for the same seed.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn seeded(seed: u64) -> Self {
        Self::Seeded(AtomicU64::new(seed))
    }

    /// Sixteen random bytes.
    pub(crate) fn bytes(&self) -> io::Result<[u8; 16]> {
        let mut bytes = [0; 16];
        match self {
            Self::System => getrandom::fill(&mut bytes).map_err(from_system)?,
            Self::Seeded(state) => {
                let (low, high) = bytes.split_at_mut(8);
                low.copy_from_slice(&next(state).to_le_bytes());
                high.copy_from_slice(&next(state).to_le_bytes());
            }
        }
        Ok(bytes)
    }

    /// A random number.
    pub(crate) fn number(&self) -> io::Result<u64> {
        Ok(match self {
            Self::System => getrandom::u64().map_err(from_system)?,
            Self::Seeded(state) => next(state),
        })
    }
}

fn from_system(error: getrandom::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| io::Error::other(error.to_string()), io::Error::from_raw_os_error)
}

fn next(state: &AtomicU64) -> u64 {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut mixed = state.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
