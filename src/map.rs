//! Memory that one writer fills and any number of readers see, and the one word that a forked child does not get. All
//! `unsafe` of the crate is here.
//!
//! A [`Region`] is the memory of one *life* of one segment: a mapping of its file, or a heap buffer in its place. It
//! knows one number, the **published end**. Bytes below it are handed out as slices and never change again while the
//! region lives; bytes at or above it are never handed out, and are the only ones that are written. Every `unsafe`
//! block rests on these invariants:
//!
//! - **M1, valid.** `base .. base + bytes` is readable for as long as the region lives, and writable when `writable` is
//!   set: it is the whole of `owner`, which nothing else can reach, resize or free.
//! - **M2, one writer.** A [`Claim`] is the only way to write or to publish, and a region has at most one at a time:
//!   taking a second one panics.
//! - **M3, append only.** A claim starts at or above the published end and ends within the region, and the published
//!   end only grows. So no byte that a slice covers is ever written through this region.
//! - **M4, nobody else writes.** No other region, process or descriptor writes those bytes of the file while the region
//!   lives. This one is kept by `storage.rs`: it maps only under the lock of the directory, a mapping keeps that lock
//!   alive, and a file gets a new life only when no earlier segment of it is left.
//! - **M5, real blocks.** The file has its full length and its blocks when it is mapped, so a store into it needs no
//!   space on the disk. `storage.rs` makes the files so. (Someone who cuts the file short from outside, or a medium
//!   that cannot be read, still ends in SIGBUS. That stops the process; it is not undefined behaviour.)
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

use crate::sync::{AtomicU64, Ordering, UnmodelledAtomicU64};

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
    /// Where the next claim may start, which is the published end, or [`CLAIMED`] while one lives. The writers' word
    /// alone. Acquire when taken, Release when given back: the next writer sees the last one's work.
    tail: AtomicU64,
    /// Keeps the memory alive, and frees it.
    owner: Owner,
    /// The accesses to the memory, as the model checker can see them.
    #[cfg(loom)]
    shadow: shadow::Shadow,
}

/// What `tail` says while a claim lives. No region is that long.
const CLAIMED: u64 = u64::MAX;

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
    /// The published end: what `tail` is when the claim is given back.
    published: u64,
}

// SAFETY: `base` points at memory that the region alone owns (M1), and neither a mapping nor a heap buffer belongs to a
// thread.
unsafe impl Send for Region {}

// SAFETY: through `&Region` threads can only read published bytes, which nobody writes any more (M3, M4), and take a
// claim, of which there is at most one (M2). The published end carries the bytes from the writer to the readers:
// Release in `Claim::publish`, Acquire in `view`.
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
            tail: AtomicU64::new(published as u64),
            owner: Owner::Map { _map: map },
            #[cfg(loom)]
            shadow: shadow::Shadow::default(),
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
            tail: AtomicU64::new(published as u64),
            owner: Owner::Heap,
            #[cfg(loom)]
            shadow: shadow::Shadow::default(),
        }
    }

    /// The length of the region.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn len(&self) -> u64 {
        self.bytes as u64
    }

    /// Published bytes, as they will stay for as long as the region lives.
    ///
    /// # Panics
    ///
    /// When a byte asked for is not published: a slice over it could change under its reader.
    pub(crate) fn view(&self, offset: u64, len: usize) -> &[u8] {
        // Acquire: pairs with the Release in `Claim::publish`, so the bytes below the mark are seen as they were
        // written.
        let published = self.published.load(Ordering::Acquire);
        let end = offset.checked_add(len as u64);
        assert!(
            end.is_some_and(|end| end <= published),
            "view of {len} bytes at {offset}: only {published} bytes are published"
        );
        let start = usize::try_from(offset).expect("an offset below the published end fits the address space");
        #[cfg(loom)]
        self.shadow.read(start..start + len);
        // SAFETY: `start + len <= published <= bytes` (asserted above; M3), so the slice lies in memory that is
        // readable while `self` is borrowed (M1) and initialized (a file's bytes, or a `Vec`'s). Published bytes are
        // not written by this region (M3) nor by anybody else (M4), and what was written is visible (the Acquire
        // above).
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(start), len) }
    }

    /// Takes the right to write `len` bytes at `offset`.
    ///
    /// # Panics
    ///
    /// When a byte asked for is published already or lies outside the region, or when another claim lives.
    pub(crate) fn claim(&self, offset: u64, len: usize) -> Claim<'_> {
        // Acquire: pairs with the Release in `Claim::drop`. From here on this thread alone moves the published end.
        let published = self.tail.swap(CLAIMED, Ordering::Acquire);
        assert!(published != CLAIMED, "two writers in one segment, the second at {offset}");
        // From here on a panic gives the claim back.
        let mut claim = Claim { region: self, start: 0, end: 0, published };
        assert!(offset >= published, "write at {offset}: {published} bytes are published");
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

    /// Faults pages in for writing, so that the writer will not. Does nothing where the region is not a writable
    /// mapping, or where the system knows no such call.
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

    /// Takes the pages of a writable mapping out of the page tables in one go. A sync would do so page by page, and
    /// interrupt every core that runs a thread of this process for each. They come back as they are looked at.
    pub(crate) fn detach(&self) -> io::Result<()> {
        #[cfg(target_os = "linux")]
        if let (Owner::Map { _map: map }, true) = (&self.owner, self.writable) {
            // SAFETY: the mapping is shared and of a file (`over` alone makes it), so no byte changes: what was written
            // stays in the page cache, and the next access to the memory finds it there, also one through a slice that
            // was handed out (M1, M3).
            return unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, 0, self.bytes) };
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
        assert_eq!(bytes.len(), self.end - self.start, "a claim is for exactly the bytes it was taken for");
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

    /// Publishes all bytes up to the end of the claim, which somebody else has written: a positioned write that
    /// returned.
    pub(crate) fn publish(mut self) {
        #[cfg(loom)]
        self.region.shadow.write(self.start..self.end);
        // Release: pairs with the Acquire in `view`.
        self.region.published.store(self.end as u64, Ordering::Release);
        self.published = self.end as u64;
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // Release: pairs with the Acquire in `claim`.
        self.region.tail.store(self.published, Ordering::Release);
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        match self.owner {
            Owner::Map { .. } => {}
            Owner::Heap => {
                let slice = std::ptr::slice_from_raw_parts_mut(self.base.as_ptr(), self.bytes);
                // SAFETY: `base` and `bytes` are those of the boxed slice that `heap_published` took apart, which
                // nothing else frees (M1); no slice of it is left, since those borrow `self`.
                drop(unsafe { Box::from_raw(slice) });
            }
        }
    }
}

/// A word of memory of which a child made by `fork` gets zero instead of a copy.
pub(crate) struct WipedOnFork {
    map: MmapRaw,
}

impl WipedOnFork {
    /// A word of zero; `None` where the system has none to give.
    #[cfg(target_os = "linux")]
    pub(crate) fn new() -> Option<Self> {
        let map = MmapRaw::from(MmapOptions::new().len(Self::BYTES).map_anon().ok()?);
        // SAFETY: the range is the whole of an anonymous private mapping that nobody else knows of yet, and the advice
        // changes nothing in this process: it says what a child gets.
        let advised =
            unsafe { rustix::mm::madvise(map.as_mut_ptr().cast(), map.len(), rustix::mm::Advice::LinuxWipeOnFork) };
        advised.is_ok().then_some(Self { map })
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn new() -> Option<Self> {
        None
    }

    /// The least that the system gives or wipes.
    #[cfg(target_os = "linux")]
    const BYTES: usize = 4096;

    pub(crate) fn word(&self) -> &UnmodelledAtomicU64 {
        let word = self.map.as_mut_ptr().cast::<u64>();
        // SAFETY: a mapping begins at a page, so it is aligned, and holds more than a word that was zero from the
        // start; it lives as long as `self`, and nothing but these atomic accesses reaches it. The kernel wipes the
        // child's page before the child runs.
        unsafe { UnmodelledAtomicU64::from_ptr(word) }
    }
}

impl fmt::Debug for WipedOnFork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WipedOnFork").field("word", self.word()).finish()
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
        f.debug_struct("Claim").field("start", &self.start).field("end", &self.end).finish_non_exhaustive()
    }
}

/// What the model checker cannot see by itself: which thread reads and writes which bytes. Each write is a cell of
/// loom's; a read of any of its bytes must have been ordered behind it.
#[cfg(loom)]
mod shadow {
    use std::ops::Range;
    use std::sync::Arc;

    use loom::cell::UnsafeCell;

    use crate::sync::UnmodelledMutex;

    /// The writes so far. The lock is not the model's, and never held while the model may switch threads.
    #[derive(Debug)]
    pub(super) struct Shadow(UnmodelledMutex<Vec<(Range<usize>, Arc<UnsafeCell<()>>)>>);

    impl Default for Shadow {
        fn default() -> Self {
            Self(UnmodelledMutex::new(Vec::new()))
        }
    }

    impl Shadow {
        pub(super) fn write(&self, bytes: Range<usize>) {
            let cell = Arc::new(UnsafeCell::new(()));
            self.0.lock().push((bytes, cell.clone()));
            cell.with_mut(|_| ());
        }

        pub(super) fn read(&self, bytes: Range<usize>) {
            let writes = self.0.lock();
            let met = writes.iter().filter(|(written, _)| written.start < bytes.end && bytes.start < written.end);
            let met: Vec<_> = met.map(|(_, cell)| cell.clone()).collect();
            drop(writes);
            for cell in met {
                cell.with(|_| ());
            }
        }
    }
}

/// Each fails when an ordering that it names is weakened.
#[cfg(all(test, loom))]
mod models {
    use std::sync::Arc;

    use loom::thread;

    use super::*;

    /// The Release in `Claim::publish`, the Acquire in `view`.
    #[test]
    fn a_published_byte_is_seen_as_it_was_written() {
        loom::model(|| {
            let region = Arc::new(Region::heap(vec![0; 16]));
            let writer = {
                let region = region.clone();
                thread::spawn(move || {
                    region.claim(0, 8).write(&[1; 8]);
                    region.claim(8, 8).write(&[2; 8]);
                })
            };
            // Relaxed: nothing but the view itself orders the reader behind the write.
            let published = region.published.load(Ordering::Relaxed);
            if published >= 8 {
                assert_eq!(region.view(0, 8), [1; 8]);
            }
            if published >= 16 {
                assert_eq!(region.view(8, 8), [2; 8]);
            }
            writer.join().unwrap();
        });
    }

    /// The Release in `Claim::drop`, the Acquire in `claim`.
    #[test]
    fn one_writer_goes_on_where_another_stopped() {
        loom::model(|| {
            let region = Arc::new(Region::heap(vec![0; 16]));
            let first = {
                let region = region.clone();
                thread::spawn(move || region.claim(0, 8).write(&[1; 8]))
            };
            // Writers that only the region itself orders.
            if region.tail.load(Ordering::Relaxed) == 8 {
                region.claim(8, 8).write(&[2; 8]);
                assert_eq!(region.view(0, 16), [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2]);
            }
            first.join().unwrap();
        });
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::io::{Seek, SeekFrom, Write};
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    fn panics(f: impl FnOnce()) -> bool {
        catch_unwind(AssertUnwindSafe(f)).is_err()
    }

    fn file_of(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file.seek(SeekFrom::Start(0)).unwrap();
        file
    }

    /// Each kind of region that may be written through itself.
    fn writable(bytes: usize) -> [Region; 2] {
        [Region::heap(vec![0; bytes]), Region::mapped(&file_of(&vec![0; bytes]), bytes).unwrap()]
    }

    #[test]
    fn what_is_written_is_seen_and_stays() {
        for region in writable(8192) {
            assert_eq!(region.len(), 8192);
            region.claim(0, 3).write(b"one");
            let one = region.view(0, 3);
            region.claim(4096, 3).write(b"two");
            assert_eq!(region.view(4096, 3), b"two");
            assert_eq!(region.view(0, 4099).len(), 4099, "a gap is published with what follows it");
            assert_eq!(one, b"one");
            region.claim(4099, 8192 - 4099).write(&vec![7; 8192 - 4099]);
            assert_eq!(region.view(8191, 1), [7]);
        }
    }

    #[test]
    fn nothing_is_published_when_a_life_begins() {
        for region in writable(4096) {
            assert_eq!(region.view(0, 0), b"");
            assert!(panics(|| drop(region.view(0, 1).to_vec())));
        }
        let region = Region::positioned(&file_of(b"an earlier life"), 15).unwrap();
        assert!(panics(|| drop(region.view(0, 1).to_vec())));
    }

    #[test]
    fn a_view_above_the_published_end_is_refused() {
        for region in writable(4096) {
            region.claim(0, 100).write(&[1; 100]);
            for (offset, len) in [(0, 101), (100, 1), (4096, 1), (u64::MAX, 1), (1, usize::MAX), (u64::MAX, usize::MAX)]
            {
                assert!(panics(|| drop(region.view(offset, len).to_vec())), "{offset} {len}");
            }
            assert_eq!(region.view(100, 0), b"");
        }
    }

    #[test]
    fn a_write_below_the_published_end_is_refused_and_changes_nothing() {
        for region in writable(4096) {
            region.claim(0, 100).write(&[1; 100]);
            for offset in [0, 50, 99] {
                assert!(panics(|| region.claim(offset, 1).write(&[2])), "{offset}");
            }
            assert_eq!(region.view(0, 100), [1; 100]);
            region.claim(100, 1).write(&[3]); // a refused claim does not stop the next
        }
    }

    #[test]
    fn a_write_beyond_the_end_is_refused() {
        for region in writable(4096) {
            for (offset, len) in [(4096, 1), (4095, 2), (0, 4097), (u64::MAX, 1), (1, usize::MAX)] {
                assert!(panics(|| region.claim(offset, len).publish()), "{offset} {len}");
            }
            region.claim(4096, 0).publish();
        }
    }

    #[test]
    fn a_second_writer_is_refused_and_the_first_goes_on() {
        for region in writable(4096) {
            let first = region.claim(0, 10);
            assert!(panics(|| region.claim(10, 10).publish()));
            assert!(
                panics(|| region.claim(10, 10).publish()),
                "the refused one did not give the first one's claim back"
            );
            first.write(&[1; 10]);
            region.claim(10, 10).write(&[2; 10]);
        }
    }

    #[test]
    fn a_claim_that_is_given_up_publishes_nothing() {
        for region in writable(4096) {
            drop(region.claim(0, 10));
            assert!(panics(|| drop(region.view(0, 1).to_vec())));
            region.claim(0, 10).write(&[1; 10]);
        }
    }

    #[test]
    fn a_claim_takes_exactly_its_bytes() {
        for region in writable(4096) {
            assert!(panics(|| region.claim(0, 10).write(&[1; 11])));
            assert!(panics(|| region.claim(0, 10).write(&[1; 9])));
        }
    }

    #[test]
    fn a_positioned_region_shows_what_the_file_was_given_and_takes_no_stores() {
        use std::os::unix::fs::FileExt;
        let file = file_of(&[0; 4096]);
        let region = Region::positioned(&file, 4096).unwrap();
        let claim = region.claim(0, 5);
        file.write_all_at(b"hello", 0).unwrap();
        claim.publish();
        assert_eq!(region.view(0, 5), b"hello");
        assert!(panics(|| region.claim(5, 1).write(&[1])));
    }

    #[test]
    fn a_finished_file_is_published_whole() {
        let region = Region::finished(&file_of(b"all of it"), 9).unwrap();
        assert_eq!(region.view(0, 9), b"all of it");
        assert!(panics(|| region.claim(0, 1).publish()));
        let empty = Region::finished(&file_of(b""), 0).unwrap();
        assert_eq!(empty.view(0, 0), b"");
    }

    #[test]
    fn populating_changes_no_byte_and_stops_at_the_end() {
        let region = Region::mapped(&file_of(&[9; 10_000]), 10_000).unwrap();
        region.populate(0, 10_000).unwrap();
        region.populate(5_000, u64::MAX).unwrap();
        region.populate(u64::MAX, 1).unwrap();
        region.claim(10_000, 0).publish();
        assert_eq!(region.view(0, 10_000), [9; 10_000]);
        Region::positioned(&file_of(&[9; 10]), 10).unwrap().populate(0, 10).unwrap();
        Region::heap(vec![0; 10]).populate(0, 10).unwrap();
    }

    #[test]
    fn readers_see_whole_writes_while_the_writer_goes_on() {
        const PIECE: u64 = 64;
        const PIECES: u64 = 2_000;
        let value = |piece: u64| u8::try_from(piece % 251 + 1).unwrap();
        for region in writable(usize::try_from(PIECE * PIECES).unwrap()) {
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        loop {
                            let pieces = region.published.load(Ordering::Acquire) / PIECE;
                            let Some(last) = pieces.checked_sub(1) else { continue };
                            assert_eq!(region.view(last * PIECE, 64), [value(last); 64]);
                            if pieces == PIECES {
                                break;
                            }
                        }
                    });
                }
                for piece in 0..PIECES {
                    region.claim(piece * PIECE, 64).write(&[value(piece); 64]);
                }
            });
        }
    }
}
