//! The seam to the disk: a directory of files, some of them segments.
//!
//! Everything the store does to a disk goes through [`Storage`] and [`Segment`], so that a test can put a simulated
//! disk in their place. [`FileStorage`] is the real one.
//!
//! Names are plain file names in the one directory. Files that are not asked for by name are never touched. This file
//! must not know what the bytes mean.

#![cfg_attr(
    not(any(test, feature = "testing")),
    expect(unreachable_pub, reason = "public for tests that bring a storage of their own")
)]

mod files;
mod network;

use std::any::Any;
use std::fmt;
use std::io;
use std::sync::Arc;

pub(crate) use self::files::{FileStorage, LOCK_FILE};
pub(crate) use self::network::network_file_system;

/// A directory of files on some disk.
pub trait Storage: fmt::Debug + Send + Sync + 'static {
    /// Takes the one lock of the directory, or says `None` when somebody else has it. The lock is free again when the
    /// value and every segment opened under it are dropped, and when the process ends, in whatever way.
    ///
    /// # Errors
    ///
    /// When the lock file cannot be made or locked, which a read-only file system and a missing permission cause.
    fn lock(&self) -> io::Result<Option<Box<dyn Any + Send + Sync>>>;

    /// Every name in the directory, sorted, also those of foreign files (their odd bytes replaced).
    ///
    /// # Errors
    ///
    /// When the directory cannot be read.
    fn list(&self) -> io::Result<Vec<String>>;

    /// The bytes of a small file.
    ///
    /// # Errors
    ///
    /// `FileTooLarge` when it is longer than `bytes_max`; `NotFound`; whatever the read says.
    fn read(&self, name: &str, bytes_max: usize) -> io::Result<Vec<u8>>;

    /// Makes a small file, or takes the place of one, in one step: after a crash at any moment the name has all of its
    /// old bytes (or no file) or all of the new ones, and once this has returned, the new ones.
    ///
    /// # Errors
    ///
    /// Whatever a write, sync or rename says. The name then has its old bytes or, when the directory could not be
    /// synced, either.
    fn publish(&self, name: &str, bytes: &[u8]) -> io::Result<()>;

    /// Writes a small file that may as well be lost: nothing is synced, and a crash leaves none, a part, or all of it. In
    /// the place of an earlier one.
    ///
    /// # Errors
    ///
    /// Whatever opening or writing says.
    fn leave(&self, name: &str, bytes: &[u8]) -> io::Result<()>;

    /// Makes a segment of zeros whose blocks are allocated, written and synced, together with its directory entry, and
    /// opens it for its first life.
    ///
    /// # Errors
    ///
    /// `AlreadyExists`; the lock is not held; a full disk or quota; whatever a write or sync says. What was made of the
    /// file is removed again.
    fn create_segment(&self, name: &str, bytes: u64) -> io::Result<Arc<dyn Segment>>;

    /// Opens a segment, which is never made by this. Opened for reading without the lock, it is read by `read_at`
    /// alone.
    ///
    /// # Errors
    ///
    /// `NotFound`; `ResourceBusy` when a segment of this file is open that must not see what this one does; for a new
    /// life, when the lock is not held; whatever opening and mapping say.
    fn open_segment(&self, name: &str, access: Access) -> io::Result<Arc<dyn Segment>>;

    /// Removes a file. The removal survives a power loss once the directory is synced.
    ///
    /// # Errors
    ///
    /// `NotFound`; whatever the removal says.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes removals durable.
    ///
    /// # Errors
    ///
    /// Whatever the sync says.
    fn sync_directory(&self) -> io::Result<()>;

    /// Tells this storage from another of this process with a copy of the same store: two disks, or one at two moments.
    /// Directories need no such number.
    fn number(&self) -> u64 {
        0
    }
}

/// What a segment is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Every byte is published, none is ever written.
    Read,
    /// Nothing is published: the file is written again from its start.
    NewLife,
}

/// One life of one segment file. Bytes are written in ascending order, once, by one writer at a time; what is written
/// is published at once and does not change for as long as the value lives.
#[cfg_attr(
    any(test, feature = "testing"),
    expect(clippy::len_without_is_empty, reason = "the length is the file's, not how much of it was written")
)]
pub trait Segment: fmt::Debug + Send + Sync + 'static {
    /// The length of the file when it was opened.
    fn len(&self) -> u64;

    /// Writes `bytes` at `offset` and publishes everything up to their end. The only way bytes get in.
    ///
    /// # Errors
    ///
    /// Whatever the write says. Nothing is published then, but any part of the bytes may be in the file.
    ///
    /// # Panics
    ///
    /// When the segment is open for reading, a byte is published already or lies outside the file, or another thread is
    /// writing: each is a bug of the caller.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Returns when all that was written before the call survives power loss.
    ///
    /// # Errors
    ///
    /// Whatever the sync says. Nothing is known then of what was written since the last sync that returned, and a later
    /// sync that succeeds says nothing about it either.
    fn sync(&self) -> io::Result<()>;

    /// Reads what is at `offset`, published or not, by a positioned read: damage of the medium is an error here, not a
    /// signal. Says how many bytes were read; fewer than asked for only at the end of the file.
    ///
    /// # Errors
    ///
    /// Whatever the read says.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize>;

    /// Published bytes, without a copy.
    ///
    /// # Panics
    ///
    /// When a byte asked for is not published, or the segment was opened without the lock of its directory.
    fn view(&self, offset: u64, len: usize) -> &[u8];

    /// Readies `len` bytes at `offset` for writing, where that saves the writer page faults. It makes those pages
    /// dirty, so it is done in small steps just ahead of the writer; what is beyond the end of the file is ignored.
    ///
    /// # Errors
    ///
    /// When the pages cannot be had.
    fn populate(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Nothing more is written: what a sync would do page by page to a mapping is done at once, so that other threads are
    /// not interrupted for each page. A comfort: where it fails, nothing has changed.
    ///
    /// # Errors
    ///
    /// Whatever the system says; `InvalidInput` for memory that the process has locked.
    fn detach(&self) -> io::Result<()> {
        Ok(())
    }
}
