//! The seam to the disk: a directory of files, some of them segments.
//!
//! Everything the store does to a disk goes through [`Storage`] and [`Segment`], so that a test can put a simulated disk in
//! their place. [`FileStorage`] is the real one. Two of its rules carry the soundness of `map.rs`:
//!
//! - A file is mapped only while this storage holds the directory's lock, and every mapped segment keeps the lock alive. So
//!   nobody who respects the lock writes a file under a slice of it.
//! - A file gets a new life ([`Access::NewLife`]) only when no other segment of it is open, and is not opened for reading
//!   while one that writes it is. So no slice of an earlier life sees the next one.
//!
//! And one of `keyonce`'s promises about a full disk: [`Storage::create_segment`] returns when all blocks of the file are
//! allocated, written and synced, so that writing into a segment never needs space.
//!
//! Names are plain file names in the one directory. Files that are not asked for by name are never touched. This file must
//! not know what the bytes mean.

#[cfg(not(unix))]
compile_error!(
    "keyonce needs positioned reads and writes, file locks and synced directories as Unix systems have them"
);

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Weak};

use rustix::fs::{AtFlags, Dir, FallocateFlags, Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};

use crate::map::Region;
use crate::options::AppendMode;
use crate::sync::{AtomicBool, Mutex, Ordering};

/// The file whose lock means "this process owns the directory". It is empty, and never deleted.
pub(crate) const LOCK_FILE: &str = "LOCK";

/// What a published file is called until it is whole.
const TEMPORARY_SUFFIX: &str = ".tmp";

/// New segments are filled in pieces of this many bytes.
const FILL_BYTES: usize = 1 << 20;

/// A directory of files on some disk.
pub trait Storage: fmt::Debug + Send + Sync + 'static {
    /// Takes the one lock of the directory, or says `None` when somebody else has it. The lock is free again when the value and
    /// every segment opened under it are dropped, and when the process ends, in whatever way.
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

    /// Makes a small file, or takes the place of one, in one step: after a crash at any moment the name has all of its old
    /// bytes (or no file) or all of the new ones, and once this has returned, the new ones.
    ///
    /// # Errors
    ///
    /// Whatever a write, sync or rename says. The name then has its old bytes or, when the directory could not be synced,
    /// either.
    fn publish(&self, name: &str, bytes: &[u8]) -> io::Result<()>;

    /// Makes a segment of zeros whose blocks are allocated, written and synced, together with its directory entry, and opens
    /// it for its first life.
    ///
    /// # Errors
    ///
    /// `AlreadyExists`; a full disk or quota; whatever a write or sync says. What was made of the file is removed again.
    fn create_segment(&self, name: &str, bytes: u64) -> io::Result<Arc<dyn Segment>>;

    /// Opens a segment, which is never made by this.
    ///
    /// # Errors
    ///
    /// `NotFound`; `ResourceBusy` when a segment of this file is open that must not see what this one does; whatever opening
    /// and mapping say.
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
}

/// What a segment is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Every byte is published, none is ever written.
    Read,
    /// Nothing is published: the file is written again from its start.
    NewLife,
}

/// One life of one segment file. Bytes are written in ascending order, once, by one writer at a time; what is written is
/// published at once and does not change for as long as the value lives.
#[expect(
    clippy::len_without_is_empty,
    reason = "the length is the file's, not how much of it was written"
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
    /// Whatever the sync says. Nothing is known then of what was written since the last sync that returned, and a later sync
    /// that succeeds says nothing about it either.
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

    /// Readies `len` bytes at `offset` for writing, where that saves the writer page faults. It makes those pages dirty, so
    /// it is done in small steps just ahead of the writer; what is beyond the end of the file is ignored.
    ///
    /// # Errors
    ///
    /// When the pages cannot be had.
    fn populate(&self, offset: u64, len: u64) -> io::Result<()>;
}

/// A directory of the file system.
pub(crate) struct FileStorage {
    /// All files are named relative to this descriptor: a directory that is moved is still the same one.
    directory: File,
    append_mode: AppendMode,
    /// The lock, while this storage or one of its segments holds it.
    lock: Mutex<Weak<DirectoryLock>>,
    /// The segments that may still be open, by name. Protects the rules on who may be open beside whom.
    open: Mutex<BTreeMap<String, Vec<Opened>>>,
}

/// The locked file; closing it frees the lock.
#[derive(Debug)]
struct DirectoryLock {
    _file: File,
}

/// A segment that was handed out, perhaps dropped since.
#[derive(Debug)]
struct Opened {
    access: Access,
    segment: Weak<FileSegment>,
}

/// A segment file.
#[derive(Debug)]
struct FileSegment {
    name: String,
    file: File,
    bytes: u64,
    access: Access,
    append_mode: AppendMode,
    /// `None` when opened without the lock: then nothing says that the bytes stay as they are, and `read_at` alone serves.
    region: Option<Region>,
    /// Whether mapping and positioned calls were seen to agree. Only the one writer asks.
    coherent: AtomicBool,
    /// Keeps the directory locked for as long as anything of it is mapped. Dropped after `region`, which stands above it.
    _lock: Option<Arc<DirectoryLock>>,
}

impl FileStorage {
    /// Opens a directory, making it when it is missing and `create` says so.
    pub(crate) fn open(directory: &Path, append_mode: AppendMode, create: bool) -> io::Result<Self> {
        if create {
            create_directory(directory)?;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = File::from(retry_on_intr(|| rustix::fs::open(directory, flags, Mode::empty()))?);
        Ok(Self {
            directory,
            append_mode,
            lock: Mutex::new(Weak::new()),
            open: Mutex::new(BTreeMap::new()),
        })
    }

    fn open_file(&self, name: &str, flags: OFlags) -> io::Result<File> {
        let name = plain(name)?;
        let mode = Mode::from_raw_mode(0o666);
        Ok(File::from(retry_on_intr(|| {
            rustix::fs::openat(&self.directory, name, flags | OFlags::CLOEXEC, mode)
        })?))
    }

    /// Maps a file and hands it out; `open` are the segments open under its name.
    fn map(&self, name: &str, file: File, access: Access, open: &mut Vec<Opened>) -> io::Result<Arc<dyn Segment>> {
        let bytes = file.metadata()?.len();
        let region_bytes = usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        let lock = self.lock.lock().upgrade();
        let region = match (access, self.append_mode) {
            (Access::Read, _) if lock.is_none() => None,
            (Access::NewLife, _) if lock.is_none() => {
                panic!("segment {name} written without the lock of its directory")
            }
            (Access::Read, _) => Some(Region::finished(&file, region_bytes)?),
            (Access::NewLife, AppendMode::Mapped) => Some(Region::mapped(&file, region_bytes)?),
            (Access::NewLife, AppendMode::Positioned) => Some(Region::positioned(&file, region_bytes)?),
        };
        let segment = Arc::new(FileSegment {
            name: name.to_owned(),
            file,
            bytes,
            access,
            append_mode: self.append_mode,
            region,
            coherent: AtomicBool::new(false),
            _lock: lock,
        });
        open.push(Opened {
            access,
            segment: Arc::downgrade(&segment),
        });
        Ok(segment)
    }

    /// Everything about a new segment that can fail and leave a part of it behind.
    fn fill_segment(&self, name: &str, file: File, bytes: u64) -> io::Result<Arc<dyn Segment>> {
        reserve_blocks(&file, bytes)?;
        write_zeros(&file, bytes)?;
        file.sync_all()?;
        self.sync_directory()?;
        let mut open = self.open.lock();
        self.map(name, file, Access::NewLife, open.entry(name.to_owned()).or_default())
    }

    fn remove_part(&self, name: &str, why: io::Error) -> io::Error {
        match self.remove(name) {
            Ok(()) => why,
            Err(also) => io::Error::new(
                why.kind(),
                format!("{why}; what was made of {name} was not removed: {also}"),
            ),
        }
    }
}

impl Storage for FileStorage {
    fn lock(&self) -> io::Result<Option<Box<dyn Any + Send + Sync>>> {
        let file = self.open_file(LOCK_FILE, OFlags::RDWR | OFlags::CREATE)?;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
        let lock = Arc::new(DirectoryLock { _file: file });
        *self.lock.lock() = Arc::downgrade(&lock);
        Ok(Some(Box::new(lock)))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.directory)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    fn read(&self, name: &str, bytes_max: usize) -> io::Result<Vec<u8>> {
        // Without O_NONBLOCK a pipe under this name would hold the caller until somebody writes into it.
        let file = self.open_file(name, OFlags::RDONLY | OFlags::NONBLOCK)?;
        let mut bytes = Vec::new();
        file.take((bytes_max as u64).saturating_add(1))
            .read_to_end(&mut bytes)?;
        if bytes.len() > bytes_max {
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!("{name} is longer than {bytes_max} bytes"),
            ));
        }
        Ok(bytes)
    }

    fn publish(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let temporary = format!("{}{TEMPORARY_SUFFIX}", plain(name)?);
        let mut file = self.open_file(&temporary, OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC)?;
        let renamed = (|| {
            file.write_all(bytes)?;
            file.sync_all()?;
            retry_on_intr(|| rustix::fs::renameat(&self.directory, &temporary, &self.directory, name))?;
            Ok(())
        })();
        if let Err(why) = renamed {
            return Err(self.remove_part(&temporary, why));
        }
        self.sync_directory()
    }

    fn create_segment(&self, name: &str, bytes: u64) -> io::Result<Arc<dyn Segment>> {
        // Exclusive: a file that is there already is somebody's, and must not be removed when this fails.
        let file = self.open_file(name, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL)?;
        self.fill_segment(name, file, bytes)
            .map_err(|why| self.remove_part(name, why))
    }

    fn open_segment(&self, name: &str, access: Access) -> io::Result<Arc<dyn Segment>> {
        let flags = match access {
            Access::Read => OFlags::RDONLY,
            Access::NewLife => OFlags::RDWR,
        };
        let mut open = self.open.lock();
        let open = open.entry(name.to_owned()).or_default();
        open.retain(|opened| opened.segment.strong_count() > 0);
        if open
            .iter()
            .any(|opened| access == Access::NewLife || opened.access == Access::NewLife)
        {
            return Err(io::Error::new(
                io::ErrorKind::ResourceBusy,
                format!("segment {name} is still open"),
            ));
        }
        let file = self.open_file(name, flags)?;
        self.map(name, file, access, open)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let name = plain(name)?;
        Ok(retry_on_intr(|| {
            rustix::fs::unlinkat(&self.directory, name, AtFlags::empty())
        })?)
    }

    fn sync_directory(&self) -> io::Result<()> {
        self.directory.sync_all()
    }
}

impl fmt::Debug for FileStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileStorage")
            .field("directory", &self.directory)
            .field("append_mode", &self.append_mode)
            .finish_non_exhaustive()
    }
}

impl FileSegment {
    fn region(&self) -> &Region {
        match &self.region {
            Some(region) => region,
            None => panic!(
                "segment {} was opened without the lock of its directory: its bytes may change",
                self.name
            ),
        }
    }

    /// Whether what was written one way is read the other way. Some network and user-space file systems keep the two apart.
    fn check_coherent(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let agree = match self.append_mode {
            AppendMode::Positioned => self.region().view(offset, bytes.len()) == bytes,
            AppendMode::Mapped => {
                let mut read = vec![0; bytes.len()];
                self.read_at(offset, &mut read)? == bytes.len() && read == bytes
            }
        };
        if !agree {
            let what = "this file system keeps mapped and positioned access to a file apart";
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        self.coherent.store(true, Ordering::Relaxed);
        Ok(())
    }
}

impl Segment for FileSegment {
    fn len(&self) -> u64 {
        self.bytes
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        assert_eq!(
            self.access,
            Access::NewLife,
            "segment {} is open for reading only",
            self.name
        );
        let claim = self.region().claim(offset, bytes.len());
        match self.append_mode {
            AppendMode::Mapped => claim.write(bytes),
            AppendMode::Positioned => {
                // Goes on after a short write and an interrupted one.
                self.file.write_all_at(bytes, offset)?;
                claim.publish();
            }
        }
        if self.coherent.load(Ordering::Relaxed) {
            Ok(())
        } else {
            self.check_coherent(offset, bytes)
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let mut read = 0;
        while let Some(rest) = into.get_mut(read..).filter(|rest| !rest.is_empty()) {
            match self.file.read_at(rest, offset.saturating_add(read as u64)) {
                Ok(0) => break,
                Ok(more) => read += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(read)
    }

    fn view(&self, offset: u64, len: usize) -> &[u8] {
        self.region().view(offset, len)
    }

    fn populate(&self, offset: u64, len: u64) -> io::Result<()> {
        match &self.region {
            Some(region) => region.populate(offset, len),
            None => Ok(()),
        }
    }
}

/// A name that stays within the directory.
fn plain(name: &str) -> io::Result<&str> {
    let odd = name.is_empty() || name == "." || name == ".." || name.contains(['/', '\\', '\0']);
    if odd {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "not a plain file name"))
    } else {
        Ok(name)
    }
}

/// Makes a directory and those above it, and the entry of each durable.
fn create_directory(directory: &Path) -> io::Result<()> {
    let parent = match directory.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => return Ok(()), // the root
    };
    match fs::create_dir(directory) {
        Ok(()) => File::open(parent)?.sync_all(),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => sync_entry_of_new(directory, parent),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            create_directory(parent)?;
            match fs::create_dir(directory) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
                _ => File::open(parent)?.sync_all(),
            }
        }
        Err(error) => Err(error),
    }
}

/// A directory that has no lock file yet may have been made by an open that a crash cut short before the entry was synced.
/// A parent that may not be read was not written by this process either: then whoever made the entry answers for it.
fn sync_entry_of_new(directory: &Path, parent: &Path) -> io::Result<()> {
    if directory.join(LOCK_FILE).exists() {
        return Ok(());
    }
    match File::open(parent) {
        Ok(parent) => parent.sync_all(),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        Err(error) => Err(error),
    }
}

/// Has the file system set blocks aside, where it can: a full disk is then told at once, and the blocks lie together. Where
/// it cannot, the zeros that follow take the blocks.
fn reserve_blocks(file: &File, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    match retry_on_intr(|| rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes)) {
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Writes zeros over the whole file: blocks that were only set aside cost each first sync into them a journal commit.
fn write_zeros(file: &File, bytes: u64) -> io::Result<()> {
    let zeros = vec![0; FILL_BYTES.min(usize::try_from(bytes).unwrap_or(FILL_BYTES))];
    let mut offset = 0;
    while offset < bytes {
        let piece = usize::try_from(bytes - offset).unwrap_or(FILL_BYTES).min(zeros.len());
        let zeros = zeros.get(..piece).expect("a piece is no longer than the zeros");
        file.write_all_at(zeros, offset)?;
        offset += piece as u64;
    }
    Ok(())
}
