//! The yardstick *sync*: writing 512 bytes into written blocks of a file, and `fdatasync`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use tempfile::TempDir;

use crate::work::now;

const BYTES: usize = 512;
const FILE_BYTES: u64 = 1 << 20;

/// A file all blocks of which are written.
#[derive(Debug)]
pub(crate) struct Yardstick {
    file: File,
    offset: u64,
}

impl Yardstick {
    /// In the file system of the directory.
    pub(crate) fn new(directory: &TempDir) -> Self {
        Self { file: written_file(directory, FILE_BYTES), offset: 0 }
    }

    /// Syncs once; says how long it took.
    pub(crate) fn once(&mut self) -> Duration {
        let start = now();
        self.file.write_all_at(&[0xa5; BYTES], self.offset).expect("a written block");
        self.file.sync_data().expect("a disk that syncs");
        self.offset = (self.offset + BYTES as u64) % FILE_BYTES;
        start.elapsed()
    }
}

/// A nameless file of so many zeros, all of them on the disk.
pub(crate) fn written_file(directory: &TempDir, bytes: u64) -> File {
    let file = tempfile::tempfile_in(directory.path()).expect("a new file");
    let zeros = vec![0; usize::try_from(FILE_BYTES).unwrap_or(BYTES)];
    for offset in (0..bytes).step_by(zeros.len()) {
        file.write_all_at(&zeros, offset).expect("room for the file");
    }
    file.sync_all().expect("a disk that syncs");
    file
}
