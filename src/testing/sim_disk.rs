//! The simulated disk as a [`Storage`]: steps, faults, a record of everything.

use std::any::Any;
use std::fmt;
use std::io;
use std::sync::{Arc, Weak};

use rustix::io::Errno;

use super::crash::{CrashImages, Crashes};
use super::disk::{Change, Disk, Event, FileNumber, PAGE_BYTES};
use crate::map::Region;
use crate::storage::{Access, Segment, Storage};
use crate::sync::UnmodelledMutex;

/// The number of the error "input/output error", for [`SimDisk::fail_at`].
pub const EIO: i32 = Errno::IO.raw_os_error();
/// The number of the error "no space left on device".
pub const ENOSPC: i32 = Errno::NOSPC.raw_os_error();
/// The number of the error "disk quota exceeded".
pub const EDQUOT: i32 = Errno::DQUOT.raw_os_error();

/// Sectors are what a disk writes in one, come what may.
const SECTOR_BYTES: usize = 512;

/// A disk in memory that behaves as badly as a real one may.
///
/// It is a directory of files with a page cache above it. What was written is seen at once, and survives a killed process; it
/// survives a **power loss** only once it was synced. Until then each page of 4096 bytes (or each sector of 512, see
/// [`tearing`](Self::tearing)) may be found old, new, or as any write in between left it, in any combination; a file's new length
/// and each change of the directory may be found or not. Clones are the same disk.
///
/// # Crashes
///
/// [`crashes`](Self::crashes) has all states that a power loss at this moment could leave, and [`kill`](Self::kill) the one that a killed
/// process leaves. Each is a disk of its own, not locked, on which the store is opened again, and which may be crashed again.
///
/// Every change counts one [step](Self::steps): creating, writing, syncing, renaming, removing. A test that [records](Self::record) runs its
/// workload once, notes [`steps`](Self::steps) whenever the store has promised something, and afterwards looks at **every** moment: at
/// a moment of `k` steps all must hold that was promised when there had been `k` or fewer.
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
/// [`fail_at`](Self::fail_at) makes one step fail, [`fail_from`](Self::fail_from) all from some step on, [`fail_reads_from`](Self::fail_reads_from) reads,
/// [`limit_bytes`](Self::limit_bytes) fills the disk up, [`damage`](Self::damage) changes bytes behind everybody's back.
///
/// A failing write leaves the first half of its bytes in the page cache. A **failed sync** is as bad as on ext4: nothing counts as
/// synced, what was written goes on being seen, also by a new process, and the next sync says `Ok` without writing it, unless
/// its page was written again.
///
/// # How it differs from a real disk
///
/// A power loss never damages what was synced, and a sync that returns has synced; both are promises of real disks that `keyonce`
/// relies on. The page cache is never written back but by a sync. Reading takes no time, and neither does syncing.
#[derive(Clone)]
pub struct SimDisk {
    shared: Arc<Shared>,
}

struct Shared {
    machine: UnmodelledMutex<Machine>,
    on_step: UnmodelledMutex<Option<OnStep>>,
}

type OnStep = Arc<dyn Fn(Step) + Send + Sync>;

/// All of the machine that a process does not take with it.
#[derive(Default)]
struct Machine {
    disk: Disk,
    unit: Tear,
    bytes_max: Option<u64>,
    reads: u64,
    fail_steps: Vec<Fault>,
    fail_reads: Vec<Fault>,
    lock: Weak<Held>,
    open: Vec<Opened>,
    recorded: Option<Recorded>,
}

/// The lock of the disk.
#[derive(Debug)]
struct Held;

/// Operations `from .. until` fail.
#[derive(Clone, Copy)]
struct Fault {
    from: u64,
    until: u64,
    raw_os_error: i32,
}

/// A segment that was handed out, perhaps dropped since.
struct Opened {
    file: FileNumber,
    access: Access,
    segment: Weak<SimSegment>,
}

/// How the disk was, and all that happened since.
#[derive(Clone)]
struct Recorded {
    first: Disk,
    events: Arc<Vec<Event>>,
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

/// A segment on a simulated disk.
struct SimSegment {
    disk: SimDisk,
    file: FileNumber,
    bytes: Bytes,
    lock: Option<Arc<Held>>,
}

/// What `view` shows.
enum Bytes {
    /// The file when it was opened for reading.
    Finished(Arc<[u8]>),
    /// A new life.
    Life(Region),
}

impl SimDisk {
    /// An empty disk, without faults, that is not recorded.
    #[must_use]
    pub fn new() -> Self {
        Self::of(Machine::default())
    }

    fn of(machine: Machine) -> Self {
        Self {
            shared: Arc::new(Shared {
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
        Self::of(Machine {
            disk,
            unit,
            bytes_max,
            ..Machine::default()
        })
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

    /// How many reads there have been. Views do not count.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.shared.machine.lock().reads
    }

    /// Calls `f` before every step, on the thread whose step it is, with nothing locked: it may block, to hold that step up;
    /// it may look at the disk, crash it, and use other disks. In the place of an earlier one.
    pub fn on_step(&self, f: impl Fn(Step) + Send + Sync + 'static) {
        *self.shared.on_step.lock() = Some(Arc::new(f));
    }

    /// Makes the step fail that is taken when [`steps`](Self::steps) is `step`, with an error of the operating system such as [`EIO`].
    pub fn fail_at(&self, step: u64, raw_os_error: i32) {
        self.shared.machine.lock().fail_steps.push(Fault {
            from: step,
            until: step.saturating_add(1),
            raw_os_error,
        });
    }

    /// Makes that step and every later one fail.
    pub fn fail_from(&self, step: u64, raw_os_error: i32) {
        self.shared.machine.lock().fail_steps.push(Fault {
            from: step,
            until: u64::MAX,
            raw_os_error,
        });
    }

    /// Makes the read fail that is made when [`reads`](Self::reads) is `read`, and every later one.
    pub fn fail_reads_from(&self, read: u64, raw_os_error: i32) {
        self.shared.machine.lock().fail_reads.push(Fault {
            from: read,
            until: u64::MAX,
            raw_os_error,
        });
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

    /// Changes the bytes of a file, as a bad disk or a careless hand does: no step, not recorded, durable at once together with
    /// all that was written to the file, not seen in views of segments that are open.
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

    /// The disk as a process finds it that is started after this one was killed: all that was written is seen, and what was not
    /// synced is still not.
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

    /// One state that a power loss could leave, chosen by a seed: see [`Crashes::image`]. Ask [`crashes`](Self::crashes) for many.
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

    /// Starts to record, so that [`at`](Self::at) and [`moments`](Self::moments) can go back to any step from now on. An earlier record is lost.
    pub fn record(&self) {
        let mut machine = self.shared.machine.lock();
        machine.recorded = Some(Recorded {
            first: machine.disk.clone(),
            events: Arc::default(),
        });
    }

    /// The disk as it was after `steps` steps: what was seen, and what was not yet synced.
    ///
    /// # Panics
    ///
    /// When that moment is not recorded.
    #[must_use]
    pub fn at(&self, steps: u64) -> Self {
        let recorded = self.recorded();
        let skip = steps
            .checked_sub(recorded.first.steps)
            .and_then(|skip| usize::try_from(skip).ok());
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
        Moments {
            settings: self.clone(),
            next: Some(recorded.first),
            events: recorded.events,
            applied: 0,
        }
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
        let index = step
            .checked_sub(recorded.first.steps)
            .and_then(|index| usize::try_from(index).ok());
        let event = index.and_then(|index| recorded.events.get(index));
        let event = event.unwrap_or_else(|| panic!("step {step} is not recorded"));
        let disk = before.shared.machine.lock();
        disk.disk.describe(event)
    }

    fn recorded(&self) -> Recorded {
        self.shared
            .machine
            .lock()
            .recorded
            .clone()
            .expect("SimDisk::record was not called")
    }

    /// Takes one step: `look` says, under the lock, what is to happen.
    fn step(&self, step: Step, look: impl FnOnce(&mut Machine) -> io::Result<Event>) -> io::Result<()> {
        let on_step = self.shared.on_step.lock().clone();
        if let Some(on_step) = on_step {
            on_step(step);
        }
        let mut machine = self.shared.machine.lock();
        let event = look(&mut machine)?;
        machine.perform(event)
    }

    fn create_file(&self, name: &str, exclusive: bool) -> io::Result<FileNumber> {
        let mut made = 0;
        self.step(Step::Create, |machine| {
            if exclusive && machine.disk.file(name).is_some() {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    format!("{name} exists already"),
                ));
            }
            made = machine.disk.new_file();
            Ok(Event::Change(Change::Link {
                name: name.into(),
                file: made,
            }))
        })?;
        Ok(made)
    }

    fn write(&self, file: FileNumber, offset: usize, bytes: &[u8]) -> io::Result<()> {
        self.step(Step::Write, |machine| {
            machine.has_room_for(file, offset.saturating_add(bytes.len()))?;
            Ok(Event::Write {
                file,
                offset,
                bytes: bytes.into(),
            })
        })
    }

    fn sync_file(&self, file: FileNumber) -> io::Result<()> {
        // What is written while the sync goes on is not covered by it.
        let began = self.steps();
        self.step(Step::Sync, |_| Ok(Event::Sync { file, began }))
    }

    fn opened(&self, file: FileNumber, access: Access) -> Arc<dyn Segment> {
        let mut machine = self.shared.machine.lock();
        let lock = machine.lock.upgrade();
        let newest = machine
            .disk
            .files
            .get(&file)
            .map(|file| file.newest())
            .unwrap_or_default();
        let bytes = match access {
            Access::Read => Bytes::Finished(newest),
            Access::NewLife => {
                assert!(lock.is_some(), "a segment written without the lock of its directory");
                Bytes::Life(Region::heap(newest.to_vec()))
            }
        };
        let segment = Arc::new(SimSegment {
            disk: self.clone(),
            file,
            bytes,
            lock,
        });
        machine.open.push(Opened {
            file,
            access,
            segment: Arc::downgrade(&segment),
        });
        segment
    }
}

impl Machine {
    /// Carries out the next step, or has it fail.
    fn perform(&mut self, event: Event) -> io::Result<()> {
        let fault = Fault::at(&self.fail_steps, self.disk.steps);
        let event = match fault {
            None => event,
            Some(_) => event.failing(),
        };
        self.disk.apply(&event);
        let open = &self.open;
        self.disk.forget_nameless(|file| {
            open.iter()
                .any(|opened| opened.file == file && opened.segment.strong_count() > 0)
        });
        if let Some(recorded) = &mut self.recorded {
            Arc::make_mut(&mut recorded.events).push(event);
        }
        fault.map_or(Ok(()), |fault| Err(fault.error()))
    }

    fn has_room_for(&self, file: FileNumber, bytes: usize) -> io::Result<()> {
        let now = self.disk.files.get(&file).map_or(0, |file| file.bytes);
        let more = bytes.saturating_sub(now) as u64;
        match self.bytes_max {
            Some(max) if more > 0 && self.disk.bytes().saturating_add(more) > max => {
                Err(io::Error::from_raw_os_error(ENOSPC))
            }
            _ => Ok(()),
        }
    }

    fn count_read(&mut self) -> io::Result<()> {
        let fault = Fault::at(&self.fail_reads, self.reads);
        self.reads += 1;
        fault.map_or(Ok(()), |fault| Err(fault.error()))
    }
}

impl Fault {
    fn at(faults: &[Self], operation: u64) -> Option<Self> {
        faults
            .iter()
            .find(|fault| (fault.from..fault.until).contains(&operation))
            .copied()
    }

    fn error(self) -> io::Error {
        io::Error::from_raw_os_error(self.raw_os_error)
    }
}

impl Tear {
    fn bytes(self) -> usize {
        match self {
            Self::Page => PAGE_BYTES,
            Self::Sector => SECTOR_BYTES,
        }
    }
}

impl Storage for SimDisk {
    fn lock(&self) -> io::Result<Option<Box<dyn Any + Send + Sync>>> {
        let mut machine = self.shared.machine.lock();
        if machine.lock.strong_count() > 0 {
            return Ok(None);
        }
        let lock = Arc::new(Held);
        machine.lock = Arc::downgrade(&lock);
        Ok(Some(Box::new(lock)))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut machine = self.shared.machine.lock();
        machine.count_read()?;
        Ok(machine.disk.names.keys().map(|name| String::from(&**name)).collect())
    }

    fn read(&self, name: &str, bytes_max: usize) -> io::Result<Vec<u8>> {
        let mut machine = self.shared.machine.lock();
        machine.count_read()?;
        let (_, file) = machine.disk.file(name).ok_or_else(|| missing(name))?;
        if file.bytes > bytes_max {
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!("{name} is longer than {bytes_max} bytes"),
            ));
        }
        Ok(file.newest().to_vec())
    }

    fn publish(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let temporary = format!("{name}.tmp");
        let file = self.create_file(&temporary, false)?;
        let renamed = self
            .write(file, 0, bytes)
            .and_then(|()| self.sync_file(file))
            .and_then(|()| {
                self.step(Step::Rename, |_| {
                    Ok(Event::Change(Change::Rename {
                        from: temporary.as_str().into(),
                        to: name.into(),
                        file,
                    }))
                })
            });
        if let Err(why) = renamed {
            return Err(after_removal(self.remove(&temporary), &temporary, why));
        }
        self.sync_directory()
    }

    fn create_segment(&self, name: &str, bytes: u64) -> io::Result<Arc<dyn Segment>> {
        let bytes = usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        let file = self.create_file(name, true)?;
        let filled = self
            .step(Step::Resize, |machine| {
                machine.has_room_for(file, bytes)?;
                Ok(Event::Resize { file, bytes })
            })
            .and_then(|()| self.sync_file(file))
            .and_then(|()| self.sync_directory());
        match filled {
            Ok(()) => Ok(self.opened(file, Access::NewLife)),
            Err(why) => Err(after_removal(self.remove(name), name, why)),
        }
    }

    fn open_segment(&self, name: &str, access: Access) -> io::Result<Arc<dyn Segment>> {
        let file = {
            let mut machine = self.shared.machine.lock();
            machine.count_read()?;
            let (file, _) = machine.disk.file(name).ok_or_else(|| missing(name))?;
            machine.open.retain(|opened| opened.segment.strong_count() > 0);
            let mut others = machine.open.iter().filter(|opened| opened.file == file);
            if others.any(|opened| access == Access::NewLife || opened.access == Access::NewLife) {
                return Err(io::Error::new(
                    io::ErrorKind::ResourceBusy,
                    format!("segment {name} is still open"),
                ));
            }
            file
        };
        Ok(self.opened(file, access))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.step(Step::Remove, |machine| {
            machine.disk.file(name).ok_or_else(|| missing(name))?;
            Ok(Event::Change(Change::Unlink { name: name.into() }))
        })
    }

    fn sync_directory(&self) -> io::Result<()> {
        self.step(Step::SyncDirectory, |_| Ok(Event::SyncDirectory))
    }
}

fn missing(name: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("there is no file {name}"))
}

fn after_removal(removed: io::Result<()>, name: &str, why: io::Error) -> io::Error {
    match removed {
        Ok(()) => why,
        Err(also) => io::Error::new(
            why.kind(),
            format!("{why}; what was made of {name} was not removed: {also}"),
        ),
    }
}

impl Segment for SimSegment {
    fn len(&self) -> u64 {
        match &self.bytes {
            Bytes::Finished(bytes) => bytes.len() as u64,
            Bytes::Life(region) => region.len(),
        }
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let Bytes::Life(region) = &self.bytes else {
            panic!("this segment is open for reading only")
        };
        let claim = region.claim(offset, bytes.len());
        let offset = usize::try_from(offset).expect("an offset within a region in memory");
        self.disk.write(self.file, offset, bytes)?;
        claim.write(bytes);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.disk.sync_file(self.file)
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let mut machine = self.disk.shared.machine.lock();
        machine.count_read()?;
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        Ok(machine
            .disk
            .files
            .get(&self.file)
            .map_or(0, |file| file.read(offset, into)))
    }

    fn view(&self, offset: u64, len: usize) -> &[u8] {
        match &self.bytes {
            Bytes::Life(region) => region.view(offset, len),
            Bytes::Finished(bytes) => {
                assert!(
                    self.lock.is_some(),
                    "a view of a segment opened without the lock of its directory"
                );
                let start = usize::try_from(offset).unwrap_or(usize::MAX);
                let view = bytes.get(start..start.saturating_add(len));
                view.unwrap_or_else(|| panic!("view of {len} bytes at {offset}: the file has {}", bytes.len()))
            }
        }
    }

    fn populate(&self, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
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
        f.debug_struct("Moments")
            .field("applied", &self.applied)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for SimSegment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimSegment")
            .field("file", &self.file)
            .field("bytes", &self.len())
            .finish_non_exhaustive()
    }
}
