//! The simulated disk as a [`Storage`]: the same steps as the real one takes, in the same order.

use std::any::Any;
use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};

use super::disk::{Change, Event, FileNumber, SimFile};
use super::machine::{Held, Machine, Opened};
use super::sim_disk::{Look, SimDisk, Step};
use crate::map::Region;
use crate::storage::{Access, Segment, Storage};

/// A segment on a simulated disk.
pub(super) struct SimSegment {
    disk: SimDisk,
    file: FileNumber,
    bytes: Bytes,
    lock: Option<Arc<Held>>,
}

/// What `view` shows.
enum Bytes {
    /// The file when it was opened for reading, and all of its bytes in one piece once somebody needs that.
    Finished { file: Arc<SimFile>, whole: OnceLock<Box<[u8]>> },
    /// A new life.
    Life(Region),
}

impl SimDisk {
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
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, format!("{name} exists already")));
            }
            made = machine.disk.new_file();
            Ok(Event::Change(Change::Link { name: name.into(), file: made }))
        })?;
        Ok(made)
    }

    fn write(&self, file: FileNumber, offset: usize, bytes: &[u8]) -> io::Result<()> {
        self.step(Step::Write, |machine| {
            machine.has_room_for(file, offset.saturating_add(bytes.len()))?;
            Ok(Event::Write { file, offset, bytes: bytes.into() })
        })
    }

    fn sync_file(&self, file: FileNumber) -> io::Result<()> {
        // What is written while the sync goes on is not covered by it.
        let began = self.steps();
        self.step(Step::Sync, |_| Ok(Event::Sync { file, began }))
    }

    /// Hands a file out as a segment.
    fn hand_out(&self, machine: &mut Machine, file: FileNumber, access: Access) -> io::Result<Arc<dyn Segment>> {
        machine.look(Look::Map)?;
        let lock = machine.lock.upgrade();
        let found = machine.disk.files.get(&file).cloned().unwrap_or_default();
        let bytes = match access {
            Access::Read => Bytes::Finished { file: found, whole: OnceLock::new() },
            Access::NewLife if lock.is_none() => return Err(not_locked()),
            Access::NewLife => {
                let mut bytes = vec![0; found.bytes];
                found.read(0, &mut bytes);
                Bytes::Life(Region::heap(bytes))
            }
        };
        let segment = Arc::new(SimSegment { disk: self.clone(), file, bytes, lock });
        machine.open.push(Opened { file, access, segment: Arc::downgrade(&segment) });
        Ok(segment)
    }
}

fn not_locked() -> io::Error {
    io::Error::other("the lock of the disk is not held")
}

impl Storage for SimDisk {
    fn number(&self) -> u64 {
        self.shared.number
    }

    fn lock(&self) -> io::Result<Option<Box<dyn Any + Send + Sync>>> {
        let mut machine = self.shared.machine.lock();
        machine.look(Look::Lock)?;
        if machine.lock.strong_count() > 0 {
            return Ok(None);
        }
        let lock = Arc::new(Held);
        machine.lock = Arc::downgrade(&lock);
        Ok(Some(Box::new(lock)))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut machine = self.shared.machine.lock();
        machine.look(Look::List)?;
        Ok(machine.disk.names.keys().map(|name| String::from(&**name)).collect())
    }

    fn read(&self, name: &str, bytes_max: usize) -> io::Result<Vec<u8>> {
        let mut machine = self.shared.machine.lock();
        machine.look(Look::ReadFile)?;
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
        let renamed = self.write(file, 0, bytes).and_then(|()| self.sync_file(file)).and_then(|()| {
            self.step(Step::Rename, |_| {
                Ok(Event::Change(Change::Rename { from: temporary.as_str().into(), to: name.into(), file }))
            })
        });
        if let Err(why) = renamed {
            return Err(after_removal(self.remove(&temporary), &temporary, why));
        }
        self.sync_directory()
    }

    fn leave(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let file = self.create_file(name, false)?;
        self.write(file, 0, bytes)
    }

    fn create_segment(&self, name: &str, bytes: u64) -> io::Result<Arc<dyn Segment>> {
        let bytes = usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        if self.shared.machine.lock().lock.strong_count() == 0 {
            return Err(not_locked());
        }
        let file = self.create_file(name, true)?;
        let filled = self
            .step(Step::Resize, |machine| {
                machine.has_room_for(file, bytes)?;
                Ok(Event::Resize { file, bytes })
            })
            .and_then(|()| self.sync_file(file))
            .and_then(|()| self.sync_directory());
        let made = filled.and_then(|()| self.hand_out(&mut self.shared.machine.lock(), file, Access::NewLife));
        made.map_err(|why| after_removal(self.remove(name), name, why))
    }

    fn open_segment(&self, name: &str, access: Access) -> io::Result<Arc<dyn Segment>> {
        let mut machine = self.shared.machine.lock();
        machine.look(Look::Open)?;
        let (file, _) = machine.disk.file(name).ok_or_else(|| missing(name))?;
        machine.open.retain(|opened| opened.segment.strong_count() > 0);
        let mut others = machine.open.iter().filter(|opened| opened.file == file);
        if others.any(|opened| access == Access::NewLife || opened.access == Access::NewLife) {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, format!("segment {name} is still open")));
        }
        self.hand_out(&mut machine, file, access)
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
        Err(also) => io::Error::new(why.kind(), format!("{why}; what was made of {name} was not removed: {also}")),
    }
}

impl Segment for SimSegment {
    fn len(&self) -> u64 {
        match &self.bytes {
            Bytes::Finished { file, .. } => file.bytes as u64,
            Bytes::Life(region) => region.len(),
        }
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let Bytes::Life(region) = &self.bytes else { panic!("this segment is open for reading only") };
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
        machine.look(Look::ReadSegment)?;
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        Ok(machine.disk.files.get(&self.file).map_or(0, |file| file.read(offset, into)))
    }

    fn view(&self, offset: u64, len: usize) -> &[u8] {
        match &self.bytes {
            Bytes::Life(region) => region.view(offset, len),
            Bytes::Finished { file, whole } => {
                assert!(self.lock.is_some(), "a view of a segment opened without the lock of its directory");
                let start = usize::try_from(offset).unwrap_or(usize::MAX);
                let view = file.within_page(start, len).or_else(|| {
                    let whole = whole.get_or_init(|| file.newest().to_vec().into_boxed_slice());
                    whole.get(start..start.saturating_add(len))
                });
                view.unwrap_or_else(|| panic!("view of {len} bytes at {offset}: the file has {}", file.bytes))
            }
        }
    }

    fn populate(&self, _offset: u64, _len: u64) -> io::Result<()> {
        self.disk.shared.machine.lock().look(Look::Populate)
    }
}

impl fmt::Debug for SimSegment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimSegment").field("file", &self.file).field("bytes", &self.len()).finish_non_exhaustive()
    }
}
