//! The simulated disk as a test sees it: steps, crashes, faults, a record of everything.

use std::fmt;
use std::sync::{Arc, Once};

use rustix::io::Errno;

use super::crash::{CrashImages, Crashes};
use super::disk::{Disk, Event, PAGE_BYTES};
use super::machine::{Fault, Machine, Recorded};
use crate::sync::UnmodelledMutex;

/// The number of the error "input/output error", for [`SimDisk::fail_at`].
pub const EIO: i32 = Errno::IO.raw_os_error();
/// The number of the error "no space left on device".
pub const ENOSPC: i32 = Errno::NOSPC.raw_os_error();
/// The number of the error "disk quota exceeded".
pub const EDQUOT: i32 = Errno::DQUOT.raw_os_error();
/// The number of the error "too many open files".
pub const EMFILE: i32 = Errno::MFILE.raw_os_error();
/// The number of the error "out of memory", which also says that a process has too many mappings.
pub const ENOMEM: i32 = Errno::NOMEM.raw_os_error();
/// The number of the error "interrupted system call".
pub const EINTR: i32 = Errno::INTR.raw_os_error();

/// Sectors are what a disk writes in one, come what may.
const SECTOR_BYTES: usize = 512;

/// A disk in memory that behaves as badly as a real one may.
///
/// It is a directory of files with a page cache above it. What was written is seen at once, and survives a killed
/// process; it survives a **power loss** only once it was synced. Until then each page of 4096 bytes (or each sector of
/// 512, see [`tearing`](Self::tearing)) may be found old, new, or as any write in between left it, in any combination;
/// a file's new length and each change of the directory may be found or not. Clones are the same disk.
///
/// # Crashes
///
/// [`crashes`](Self::crashes) has all states that a power loss at this moment could leave, and [`kill`](Self::kill) the
/// one that a killed process leaves. Each is a disk of its own, not locked, on which the store is opened again, and
/// which may be crashed again.
///
/// Every change counts one [step](Self::steps): creating, writing, syncing, renaming, removing. A test that
/// [records](Self::record) runs its workload once, notes [`steps`](Self::steps) whenever the store has promised
/// something, and afterwards looks at **every** moment: at a moment of `k` steps all must hold that was promised when
/// there had been `k` or fewer.
///
/// ```
/// use keyonce::testing::{SimDisk, Storage};
///
/// let disk = SimDisk::new();
/// disk.record();
/// disk.publish("settings", b"old")?;
/// let old_from = disk.steps();
/// disk.publish("settings", b"new")?;
/// let new_from = disk.steps();
///
/// for moment in disk.moments() {
///     for image in moment.images(100) {
///         match image.read("settings", 100) {
///             Ok(found) if found == b"new" => {}
///             Ok(found) if found == b"old" => assert!(moment.steps() < new_from),
///             Ok(found) => panic!("neither old nor new: {found:?}"),
///             Err(_) => assert!(moment.steps() < old_from),
///         }
///     }
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Faults
///
/// [`fail_at`](Self::fail_at) makes one step fail, [`fail_from`](Self::fail_from) all from some step on,
/// [`fail_read_at`](Self::fail_read_at) and [`fail_reads_from`](Self::fail_reads_from) calls that change nothing,
/// [`limit_bytes`](Self::limit_bytes) fills the disk up, [`damage`](Self::damage) changes bytes behind everybody's back.
///
/// A failing write leaves the first half of its bytes in the page cache, and a failing change of length half of the
/// file, as `fallocate` does on a disk that fills up. A **failed sync** is as bad as on ext4:
/// nothing counts as synced, what was written goes on being seen, also by a new process, and the next sync says `Ok`
/// without writing it, unless its page was written again.
///
/// # How it differs from a real disk
///
/// A power loss never damages what was synced, and a sync that returns has synced; both are promises of real disks that
/// `keyonce` relies on. The page cache is never written back but by a sync. Reading takes no time, and neither does
/// syncing.
#[derive(Clone)]
pub struct SimDisk {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    /// No other disk of this process has it.
    pub(super) number: u64,
    pub(super) machine: UnmodelledMutex<Machine>,
    pub(super) on_step: UnmodelledMutex<Option<OnStep>>,
}

pub(super) type OnStep = Arc<dyn Fn(Step) + Send + Sync>;

/// How many disks there have been.
static DISKS: UnmodelledMutex<u64> = UnmodelledMutex::new(0);

/// Whether the allocator was told.
static KEEP_MEMORY: Once = Once::new();

/// Has glibc's allocator keep what is freed: an image needs a few buffers of a segment's length for microseconds, and
/// fetching their pages from the system each time takes eight times as long as everything else. (Freeing one large
/// mapped block raises its thresholds for giving memory back, see `M_MMAP_THRESHOLD` in mallopt(3). Other allocators
/// are not impressed.)
fn keep_memory() {
    drop(std::hint::black_box(Vec::<u8>::with_capacity(24 << 20)));
}

/// The unit that reaches the disk in one, or does not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Tear {
    /// A page of 4096 bytes: what file systems and today's disks do.
    #[default]
    Page,
    /// A sector of 512 bytes: the least that any disk promises.
    Sector,
}

/// What a step does: see [`SimDisk::on_step`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Step {
    /// Makes an empty file.
    Create,
    /// Gives a file its length.
    Resize,
    /// Writes bytes.
    Write,
    /// Syncs a file.
    Sync,
    /// Renames a file.
    Rename,
    /// Removes a file.
    Remove,
    /// Syncs the directory.
    SyncDirectory,
}

/// What a call does that changes nothing: see [`SimDisk::look`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Look {
    /// Takes the lock.
    Lock,
    /// Lists the directory.
    List,
    /// Reads a small file.
    ReadFile,
    /// Opens a segment.
    Open,
    /// Maps a segment.
    Map,
    /// Reads some of a segment.
    ReadSegment,
    /// Readies pages of a segment for writing.
    Populate,
}

impl SimDisk {
    /// An empty disk, without faults, that is not recorded.
    #[must_use]
    pub fn new() -> Self {
        KEEP_MEMORY.call_once(keep_memory);
        Self::of(Machine::default())
    }

    fn of(machine: Machine) -> Self {
        let mut disks = DISKS.lock();
        *disks += 1;
        Self {
            shared: Arc::new(Shared {
                number: *disks,
                machine: UnmodelledMutex::new(machine),
                on_step: UnmodelledMutex::new(None),
            }),
        }
    }

    /// Another disk in the state `disk`, with the settings of this one but none of its faults.
    pub(super) fn sibling(&self, disk: Disk) -> Self {
        let (unit, bytes_max) = {
            let machine = self.shared.machine.lock();
            (machine.unit, machine.bytes_max)
        };
        Self::of(Machine { disk, unit, bytes_max, ..Machine::default() })
    }

    /// The same disk, tearing writes at `unit`. Default: [`Tear::Page`].
    #[must_use]
    pub fn tearing(self, unit: Tear) -> Self {
        self.shared.machine.lock().unit = unit;
        self
    }

    /// How many steps there have been, failed ones included.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.shared.machine.lock().disk.steps
    }

    /// How many calls there have been that change nothing: locking, listing, opening, mapping, reading, readying pages.
    /// Views do not count.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.shared.machine.lock().reads
    }

    /// Calls `f` before every step, on the thread whose step it is, with nothing locked: it may block, to hold that
    /// step up; it may look at the disk, crash it, and use other disks. In the place of an earlier one.
    pub fn on_step(&self, f: impl Fn(Step) + Send + Sync + 'static) {
        *self.shared.on_step.lock() = Some(Arc::new(f));
    }

    /// Makes the step fail that is taken when [`steps`](Self::steps) is `step`, with an error of the operating system
    /// such as [`EIO`].
    pub fn fail_at(&self, step: u64, raw_os_error: i32) {
        self.shared.machine.lock().fail_steps.push(Fault { from: step, until: step.saturating_add(1), raw_os_error });
    }

    /// Makes that step and every later one fail.
    pub fn fail_from(&self, step: u64, raw_os_error: i32) {
        self.shared.machine.lock().fail_steps.push(Fault { from: step, until: u64::MAX, raw_os_error });
    }

    /// Makes the call fail that is made when [`reads`](Self::reads) is `read`.
    pub fn fail_read_at(&self, read: u64, raw_os_error: i32) {
        self.shared.machine.lock().fail_reads.push(Fault { from: read, until: read.saturating_add(1), raw_os_error });
    }

    /// Makes that call fail, and every later one that changes nothing.
    pub fn fail_reads_from(&self, read: u64, raw_os_error: i32) {
        self.shared.machine.lock().fail_reads.push(Fault { from: read, until: u64::MAX, raw_os_error });
    }

    /// Takes all faults away. What they did stays done.
    pub fn heal(&self) {
        let mut machine = self.shared.machine.lock();
        machine.fail_steps.clear();
        machine.fail_reads.clear();
    }

    /// Lets no file grow when all files together would be longer than this: a full disk. Default: no limit.
    pub fn limit_bytes(&self, bytes_max: Option<u64>) {
        self.shared.machine.lock().bytes_max = bytes_max;
    }

    /// Changes the bytes of a file, as a bad disk or a careless hand does: no step, not recorded, durable at once
    /// together with all that was written to the file, not seen in views of segments that are open.
    ///
    /// # Panics
    ///
    /// When there is no such file.
    pub fn damage(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut machine = self.shared.machine.lock();
        let machine = &mut *machine;
        let file = machine.disk.file(name).map(|(file, _)| file);
        let file = file.unwrap_or_else(|| panic!("there is no file {name} to damage"));
        machine.disk.replace(file, change);
    }

    /// The disk as a process finds it that is started after this one was killed: all that was written is seen, and what
    /// was not synced is still not.
    #[must_use]
    pub fn kill(&self) -> Self {
        let disk = self.shared.machine.lock().disk.clone();
        self.sibling(disk)
    }

    /// All states that a power loss at this moment could leave.
    #[must_use]
    pub fn crashes(&self) -> Crashes {
        let (disk, unit) = {
            let machine = self.shared.machine.lock();
            (machine.disk.clone(), machine.unit)
        };
        Crashes::new(disk, self.clone(), unit.bytes())
    }

    /// One state that a power loss could leave, chosen by a seed: see [`Crashes::image`]. Ask
    /// [`crashes`](Self::crashes) for many.
    #[must_use]
    pub fn crash_image(&self, seed: u64) -> Self {
        self.crashes().image(seed)
    }

    /// The state after a power loss that let nothing through but what was synced.
    #[must_use]
    pub fn crash_all_old(&self) -> Self {
        self.crashes().all_old()
    }

    /// The state after a power loss that let everything through.
    #[must_use]
    pub fn crash_all_new(&self) -> Self {
        self.crashes().all_new()
    }

    /// States that a power loss could leave, at most `limit`: see [`Crashes::images`].
    #[must_use]
    pub fn images(&self, limit: u64) -> CrashImages {
        self.crashes().images(limit)
    }

    /// Starts to record, so that [`at`](Self::at) and [`moments`](Self::moments) can go back to any step from now on.
    /// An earlier record is lost.
    pub fn record(&self) {
        let mut machine = self.shared.machine.lock();
        machine.recorded = Some(Recorded { first: machine.disk.clone(), events: Arc::default() });
        machine.looks.clear();
    }

    /// The disk as it was after `steps` steps: what was seen, and what was not yet synced.
    ///
    /// # Panics
    ///
    /// When that moment is not recorded.
    #[must_use]
    pub fn at(&self, steps: u64) -> Self {
        let recorded = self.recorded();
        let skip = steps.checked_sub(recorded.first.steps).and_then(|skip| usize::try_from(skip).ok());
        let events = skip.and_then(|skip| recorded.events.get(..skip));
        let events = events.unwrap_or_else(|| panic!("the moment of {steps} steps is not recorded"));
        let mut disk = recorded.first;
        for event in events {
            disk.apply(event);
        }
        self.sibling(disk)
    }

    /// Every recorded moment, from the first (before any recorded step) to the last (after all of them).
    ///
    /// # Panics
    ///
    /// When nothing is recorded.
    #[must_use]
    pub fn moments(&self) -> Moments {
        let recorded = self.recorded();
        Moments { settings: self.clone(), next: Some(recorded.first), events: recorded.events, applied: 0 }
    }

    /// What the recorded step did that was taken when there had been `step` steps, for messages.
    ///
    /// # Panics
    ///
    /// When that step is not recorded.
    #[must_use]
    pub fn describe(&self, step: u64) -> String {
        let recorded = self.recorded();
        let before = self.at(step);
        let index = step.checked_sub(recorded.first.steps).and_then(|index| usize::try_from(index).ok());
        let event = index.and_then(|index| recorded.events.get(index));
        let event = event.unwrap_or_else(|| panic!("step {step} is not recorded"));
        let disk = before.shared.machine.lock();
        disk.disk.describe(event)
    }

    /// What the recorded call did that was made when [`reads`](Self::reads) was `read`.
    ///
    /// # Panics
    ///
    /// When that call is not recorded.
    #[must_use]
    pub fn look(&self, read: u64) -> Look {
        let machine = self.shared.machine.lock();
        let first = machine.reads - machine.looks.len() as u64;
        let index = read.checked_sub(first).and_then(|index| usize::try_from(index).ok());
        let look = index.and_then(|index| machine.looks.get(index));
        *look.unwrap_or_else(|| panic!("call {read} is not recorded"))
    }

    fn recorded(&self) -> Recorded {
        self.shared.machine.lock().recorded.clone().expect("SimDisk::record was not called")
    }
}

impl Tear {
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Page => PAGE_BYTES,
            Self::Sector => SECTOR_BYTES,
        }
    }
}

/// Every recorded moment of a disk: see [`SimDisk::moments`].
pub struct Moments {
    settings: SimDisk,
    next: Option<Disk>,
    events: Arc<Vec<Event>>,
    applied: usize,
}

impl Iterator for Moments {
    type Item = SimDisk;

    fn next(&mut self) -> Option<SimDisk> {
        let disk = self.next.take()?;
        if let Some(event) = self.events.get(self.applied) {
            let mut next = disk.clone();
            next.apply(event);
            next.forget_nameless(|_| false);
            self.applied += 1;
            self.next = Some(next);
        }
        Some(self.settings.sibling(disk))
    }
}

impl Default for SimDisk {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let machine = self.shared.machine.lock();
        f.debug_struct("SimDisk")
            .field("steps", &machine.disk.steps)
            .field("names", &machine.disk.names)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Moments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Moments").field("applied", &self.applied).finish_non_exhaustive()
    }
}
