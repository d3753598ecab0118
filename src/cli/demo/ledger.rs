//! The ledger: a file with one line a charge, appended and synced. It tells what really happened.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The ledger in a shop's directory.
pub(super) struct Ledger {
    path: PathBuf,
    file: File,
}

impl Ledger {
    /// Opens the service's ledger, or begins one.
    pub(super) fn open(dir: &Path) -> io::Result<Self> {
        let path = path(dir);
        let file = OpenOptions::new().create(true).append(true).open(&path)?;
        Ok(Self { path, file })
    }

    /// Charges, and returns the number of the receipt. The provider honours keys: the same charge under the same key is
    /// made once, and answered with the same receipt. Without a key it cannot tell.
    pub(super) fn charge(&mut self, amount: &str, key: Option<&str>) -> io::Result<usize> {
        let charges = fs::read_to_string(&self.path)?;
        let charge = format!("{amount}\t{}", key.unwrap_or_default());
        if key.is_some()
            && let Some(earlier) = charges.lines().position(|line| line == charge)
        {
            return Ok(earlier + 1);
        }
        self.file.write_all(format!("{charge}\n").as_bytes())?;
        self.file.sync_all()?;
        Ok(charges.lines().count() + 1)
    }
}

/// Every amount that was charged, in order. No file means no charge: the service may not even have got so far.
pub(super) fn amounts(dir: &Path) -> io::Result<Vec<String>> {
    let charges = match fs::read_to_string(path(dir)) {
        Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
        other => other?,
    };
    Ok(charges.lines().filter_map(|charge| Some(charge.split_once('\t')?.0.to_owned())).collect())
}

fn path(dir: &Path) -> PathBuf {
    dir.join("ledger")
}
