//! Memory that one writer fills and any number of readers see. All `unsafe` of the crate is here.
//!
//! A [`Region`] is the memory of one *life* of one segment: a mapping of its file, or a heap buffer in its place. It knows
//! one number, the **published end**. Bytes below it are handed out as slices and never change again while the region
//! lives; bytes at or above it are never handed out, and are the only ones that are written. Every `unsafe` block rests on
//! these invariants:
//!
//! - **M1, valid.** `base .. base + bytes` is readable for as long as the region lives, and writable when `writable` is
//!   set: it is the whole of `owner`, which nothing else can reach, resize or free.
//! - **M2, one writer.** A [`Claim`] is the only way to write or to publish, and a region has at most one at a time: taking
//!   a second one panics.
//! - **M3, append only.** A claim starts at or above the published end and ends within the region, and the published end
//!   only grows. So no byte that a slice covers is ever written through this region.
//! - **M4, nobody else writes.** No other region, process or descriptor writes those bytes of the file while the region
//!   lives. This one is kept by `storage.rs`: it maps only under the lock of the directory, a mapping keeps that lock
//!   alive, and a file gets a new life only when no earlier segment of it is left.
//! - **M5, real blocks.** The file has its full length and its blocks when it is mapped, so a store into it needs no space
//!   on the disk. `storage.rs` makes the files so. (Someone who cuts the file short from outside, or a medium that cannot be read,
//!   still ends in SIGBUS. That stops the process; it is not undefined behaviour.)
//!
//! The published end is the one word that publishes bytes to other threads: stored with Release by [`Claim::publish`],
//! loaded with Acquire by [`Region::view`] and nowhere else. No atomic lives in the mapped memory itself.
//!
//! This file must not know what the bytes mean, nor how they reach the disk.

#![expect(unsafe_code, reason = "the only file of the crate that may")]

use std::fmt;
use std::fs::File;
use std::io;
use std::ptr::NonNull;

use memmap2::{MmapOptions, MmapRaw};

use crate::sync::{AtomicBool, AtomicU64, Ordering};

/// The memory of one life of one segment: published below a mark that only rises, writable above it.
pub(crate) struct Region {
    /// The first byte of `owner`.
    base: NonNull<u8>,
    /// The length of `owner`.
    bytes: usize,
    /// Whether the memory behind `base` may be stored to.
    writable: bool,
    /// How many bytes, from the first on, are published. Release in `Claim::publish`, Acquire in `view`.
    published: AtomicU64,
    /// Whether a claim lives. Acquire when taken, Release when given back: the next writer sees the last one's work.
    busy: AtomicBool,
    /// Keeps the memory alive, and frees it.
    owner: Owner,
}

/// What the memory of a region belongs to.
enum Owner {
    Map { _map: MmapRaw },
    Heap,
}

/// The right to write the bytes `start .. end` of a region and to publish all up to `end`. Dropped unpublished, it
/// leaves the published end where it was, and the next claim may write the same bytes again.
#[must_use = "a claim that is dropped publishes nothing"]
pub(crate) struct Claim<'a> {
    region: &'a Region,
    start: usize,
    end: usize,
}

// SAFETY: `base` points at memory that the region alone owns (M1), and neither a mapping nor a heap buffer belongs to a thread.
unsafe impl Send for Region {}

// SAFETY: through `&Region` threads can only read published bytes, which nobody writes any more (M3, M4), and take a
// claim, of which there is at most one (M2). The published end carries the bytes from the writer to the readers: Release
// in `Claim::publish`, Acquire in `view`.
unsafe impl Sync for Region {}

impl Region {
    /// The first `bytes` of a file that is never written again: mapped read-only, and published whole.
    pub(crate) fn finished(file: &File, bytes: usize) -> io::Result<Self> {
        if bytes == 0 {
            return Ok(Self::heap_published(Vec::new(), 0));
        }
        let map = MmapOptions::new().len(bytes).map_raw_read_only(file)?;
        Ok(Self::over(map, false, bytes))
    }

    /// A new life of a file that is written by positioned writes: mapped read-only, nothing published.
    pub(crate) fn positioned(file: &File, bytes: usize) -> io::Result<Self> {
        if bytes == 0 {
            return Ok(Self::heap_published(Vec::new(), 0));
        }
        let map = MmapOptions::new().len(bytes).map_raw_read_only(file)?;
        Ok(Self::over(map, false, 0))
    }

    /// A new life of a file that is written through its mapping: nothing published.
    pub(crate) fn mapped(file: &File, bytes: usize) -> io::Result<Self> {
        if bytes == 0 {
            return Ok(Self::heap_published(Vec::new(), 0));
        }
        let map = MmapOptions::new().len(bytes).map_raw(file)?;
        Ok(Self::over(map, true, 0))
    }

    /// A new life without a file, in `bytes`: nothing published. For simulated disks and for tools that watch the heap.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn heap(bytes: Vec<u8>) -> Self {
        Self::heap_published(bytes, 0)
    }

    fn over(map: MmapRaw, writable: bool, published: usize) -> Self {
        let base = NonNull::new(map.as_mut_ptr()).expect("a mapping never starts at address zero");
        Self {
            base,
            bytes: map.len(),
            writable,
            published: AtomicU64::new(published as u64),
            busy: AtomicBool::new(false),
            owner: Owner::Map { _map: map },
        }
    }

    fn heap_published(bytes: Vec<u8>, published: usize) -> Self {
        let bytes = bytes.into_boxed_slice();
        let len = bytes.len();
        let base = NonNull::new(Box::into_raw(bytes).cast::<u8>()).expect("a box is never null");
        Self {
            base,
            bytes: len,
            writable: true,
            published: AtomicU64::new(published as u64),
            busy: AtomicBool::new(false),
            owner: Owner::Heap,
        }
    }

    /// The length of the region.
    pub(crate) fn len(&self) -> u64 {
        self.bytes as u64
    }

    /// Published bytes, as they will stay for as long as the region lives.
    ///
    /// # Panics
    ///
    /// When a byte asked for is not published: a slice over it could change under its reader.
    pub(crate) fn view(&self, offset: u64, len: usize) -> &[u8] {
        // Acquire: pairs with the Release in `Claim::publish`, so the bytes below the mark are seen as they were written.
        let published = self.published.load(Ordering::Acquire);
        let end = offset.checked_add(len as u64);
        assert!(
            end.is_some_and(|end| end <= published),
            "view of {len} bytes at {offset}: only {published} bytes are published"
        );
        let start = usize::try_from(offset).expect("an offset below the published end fits the address space");
        // SAFETY: `start + len <= published <= bytes` (asserted above; M3), so the slice lies in memory that is readable
        // while `self` is borrowed (M1) and initialized (a file's bytes, or a `Vec`'s). Published bytes are not written
        // by this region (M3) nor by anybody else (M4), and what was written is visible (the Acquire above).
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(start), len) }
    }

    /// Takes the right to write `len` bytes at `offset`.
    ///
    /// # Panics
    ///
    /// When a byte asked for is published already or lies outside the region, or when another claim lives.
    pub(crate) fn claim(&self, offset: u64, len: usize) -> Claim<'_> {
        // Acquire: pairs with the Release in `Claim::drop`. From here on this thread alone moves `published`.
        assert!(
            !self.busy.swap(true, Ordering::Acquire),
            "two writers in one segment, at {offset}"
        );
        let mut claim = Claim {
            region: self,
            start: 0,
            end: 0,
        }; // from here on a panic gives the claim back
        // Relaxed would do, since the last writer's store was seen by way of `busy`; Acquire keeps one rule for the word.
        let published = self.published.load(Ordering::Acquire);
        assert!(
            offset >= published,
            "write at {offset}: {published} bytes are published"
        );
        let end = offset.checked_add(len as u64);
        assert!(
            end.is_some_and(|end| end <= self.bytes as u64),
            "write of {len} bytes at {offset}: the segment has {} bytes",
            self.bytes
        );
        claim.start = usize::try_from(offset).expect("an offset within the region fits the address space");
        claim.end = claim.start + len;
        claim
    }

    /// Faults pages in for writing, so that the writer will not. Does nothing where the region is not a writable mapping,
    /// or where the system knows no such call.
    #[cfg_attr(not(target_os = "linux"), expect(unused_variables, reason = "a Linux call"))]
    pub(crate) fn populate(&self, offset: u64, len: u64) -> io::Result<()> {
        #[cfg(target_os = "linux")]
        if let (Owner::Map { _map: map }, true) = (&self.owner, self.writable) {
            let bytes = self.bytes as u64;
            let start = offset.min(bytes);
            let len = len.min(bytes - start);
            let start = usize::try_from(start).expect("an offset within the region fits the address space");
            let len = usize::try_from(len).expect("a length within the region fits the address space");
            if len > 0 {
                return match map.advise_range(memmap2::Advice::PopulateWrite, start, len) {
                    // Kernels before 5.14, and file systems that cannot.
                    Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
                    done => done,
                };
            }
        }
        Ok(())
    }
}

impl Claim<'_> {
    /// Copies `bytes` to where the claim starts, and publishes them.
    ///
    /// # Panics
    ///
    /// When the claim is for another number of bytes, or the region is written by positioned writes.
    pub(crate) fn write(self, bytes: &[u8]) {
        assert!(self.region.writable, "this segment is written by positioned writes");
        assert_eq!(
            bytes.len(),
            self.end - self.start,
            "a claim is for exactly the bytes it was taken for"
        );
        // SAFETY: `start + bytes.len() == end <= region.bytes` (asserted in `claim` and above), in memory that may be
        // stored to (`writable`; M1). No other thread writes there, since this is the only claim (M2), and no slice
        // covers these bytes, since they lie at or above the published end (M3). `bytes` does not overlap them: a slice
        // of this region lies below the published end, and any other is other memory.
        unsafe {
            let to = self.region.base.as_ptr().add(self.start);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
        self.publish();
    }

    /// Publishes all bytes up to the end of the claim, which somebody else has written: a positioned write that returned.
    pub(crate) fn publish(self) {
        // Release: pairs with the Acquire in `view`.
        self.region.published.store(self.end as u64, Ordering::Release);
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // Release: pairs with the Acquire in `claim`.
        self.region.busy.store(false, Ordering::Release);
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        match self.owner {
            Owner::Map { .. } => {}
            Owner::Heap => {
                let slice = std::ptr::slice_from_raw_parts_mut(self.base.as_ptr(), self.bytes);
                // SAFETY: `base` and `bytes` are those of the boxed slice that `heap_published` took apart, which nothing else
                // frees (M1); no slice of it is left, since those borrow `self`.
                drop(unsafe { Box::from_raw(slice) });
            }
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("bytes", &self.bytes)
            .field("writable", &self.writable)
            .field("published", &self.published)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Claim<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claim")
            .field("start", &self.start)
            .field("end", &self.end)
            .finish_non_exhaustive()
    }
}
