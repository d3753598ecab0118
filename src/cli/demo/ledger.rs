//! The ledger of the payment provider: a file with one line a charge, appended and synced. It tells what really happened.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The ledger in a shop's directory.
pub(super) struct Ledger {
    path: PathBuf,
    file: File,
}

impl Ledger {
    pub(super) fn open(dir: &Path) -> io::Result<Self> {
        let path = dir.join("ledger");
        let file = OpenOptions::new().create(true).append(true).open(&path)?;
        Ok(Self { path, file })
    }

    /// Charges, and returns the number of the receipt. The provider honours keys: one that it has seen is not charged
    /// again, but answered with the earlier receipt. Without a key it cannot tell.
    pub(super) fn charge(&mut self, amount: &str, key: Option<&str>) -> io::Result<usize> {
        let charges = fs::read_to_string(&self.path)?;
        let seen = |key| {
            charges
                .lines()
                .position(|charge| charge.split_once('\t').is_some_and(|it| it.1 == key))
        };
        if let Some(earlier) = key.and_then(seen) {
            return Ok(earlier + 1);
        }
        self.file
            .write_all(format!("{amount}\t{}\n", key.unwrap_or_default()).as_bytes())?;
        self.file.sync_all()?;
        Ok(charges.lines().count() + 1)
    }

    /// Every amount that was charged, in order.
    pub(super) fn amounts(&self) -> io::Result<Vec<String>> {
        let charges = fs::read_to_string(&self.path)?;
        Ok(charges
            .lines()
            .map(|charge| charge.split('\t').take(1).collect())
            .collect())
    }
}
