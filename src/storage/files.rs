//! A directory of the file system.
//!
//! Two rules here carry the soundness of `map.rs`:
//!
//! - A file is mapped only while this storage holds the directory's lock, and every mapped segment keeps the lock
//!   alive. So nobody who respects the lock writes a file under a slice of it.
//! - A file gets a new life ([`Access::NewLife`]) only when no other segment of it is open, and is not opened for
//!   reading while one that writes it is. So no slice of an earlier life sees the next one.
//!
//! And one promise about a full disk: [`Storage::create_segment`] returns when all blocks of the file are allocated,
//! written and synced, so that writing into a segment needs no space. (btrfs with snapshots is the exception: see
//! SAFETY.md.)

#[cfg(not(unix))]
compile_error!(
    "keyonce needs positioned reads and writes, file locks and synced directories as Unix systems have them"
);

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::Path;
use std::sync::{Arc, Weak};

use rustix::fs::{AtFlags, Dir, FallocateFlags, Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};

use super::{Access, Segment, Storage};
use crate::fork::KeptFile;
use crate::map::Region;
use crate::options::AppendMode;
use crate::sync::{AtomicBool, Mutex, Ordering};

/// The file whose lock means "this process owns the directory". It is empty, and never deleted.
pub(crate) const LOCK_FILE: &str = "LOCK";

/// What a published file is called until it is whole.
const TEMPORARY_SUFFIX: &str = ".tmp";

/// New segments are filled in pieces of this many bytes. The page cache keeps a piece together, and two prices depend
/// on its size: a store through a mapping makes all of it dirty, so that a sync writes that much (1 MiB pieces: 1 MiB a
/// sync), and a sync after a small write looks through all of it. Smaller pieces take longer to write.
const FILL_BYTES: usize = 64 << 10;

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

/// The locked files; closing them frees the lock.
#[derive(Debug)]
struct DirectoryLock {
    files: [Arc<KeptFile>; 2],
}

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        // Closing alone would not do: a child that another thread has forked and that has not executed its program yet
        // holds the descriptor, too. A child that drops its copy of the store, in turn, frees nothing: the lock is of
        // what both descriptors stand for.
        for file in self.files.iter().filter_map(|file| file.take()) {
            if file.unlock().is_err() {
                // Closing frees the lock in the next moment.
            }
        }
    }
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
    /// `None` when opened without the lock: then nothing says that the bytes stay as they are, and `read_at` alone
    /// serves.
    region: Option<Region>,
    /// Whether mapping and positioned calls were seen to agree. Only the one writer asks.
    coherent: AtomicBool,
    /// Keeps the directory locked for as long as anything of it is mapped. Dropped after `region`, which stands above
    /// it.
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
        Ok(Self { directory, append_mode, lock: Mutex::new(Weak::new()), open: Mutex::new(BTreeMap::new()) })
    }

    fn open_file(&self, name: &str, flags: OFlags) -> io::Result<File> {
        let name = plain(name)?;
        // Without NONBLOCK a pipe under this name would hold the caller until somebody writes into it. Through a link
        // somebody else's file would be written.
        let flags = flags | OFlags::NONBLOCK | OFlags::NOFOLLOW;
        // Keys and responses lie in these files as they are.
        let mode = Mode::from_raw_mode(0o600);
        Ok(File::from(retry_on_intr(|| rustix::fs::openat(&self.directory, name, flags | OFlags::CLOEXEC, mode))?))
    }

    /// Maps a file and hands it out; `open` are the segments open under its name.
    fn map(&self, name: &str, file: File, access: Access, open: &mut Vec<Opened>) -> io::Result<Arc<dyn Segment>> {
        let found = retried(|| file.metadata())?;
        if !found.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{name} is not a file")));
        }
        let bytes = found.len();
        let region_bytes = usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        let lock = self.lock.lock().upgrade();
        if access == Access::NewLife && lock.is_none() {
            return Err(not_locked());
        }
        if access == Access::NewLife && found.blocks().saturating_mul(512) < bytes {
            // The file has holes: a copy, made by a tool that leaves zeros out.
            reserve_blocks(&file, bytes)?;
        }
        let region = match (access, self.append_mode) {
            (Access::Read, _) if lock.is_none() => None,
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
        open.push(Opened { access, segment: Arc::downgrade(&segment) });
        Ok(segment)
    }

    /// Everything about a new segment that can fail and leave a part of it behind.
    fn fill_segment(&self, name: &str, file: File, bytes: u64) -> io::Result<Arc<dyn Segment>> {
        overwrite_in_place(&file)?;
        reserve_blocks(&file, bytes)?;
        write_zeros(&file, bytes)?;
        file.sync_all()?;
        self.sync_directory()?;
        let mut open = self.open.lock();
        self.map(name, file, Access::NewLife, open.entry(name.to_owned()).or_default())
    }

    /// Opens a new file for writing. What was there under its name goes: a link to it that somebody made keeps its bytes.
    fn open_anew(&self, name: &str) -> io::Result<File> {
        match self.remove(name) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        self.open_file(name, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)
    }

    fn remove_part(&self, name: &str, why: io::Error) -> io::Error {
        match self.remove(name) {
            Ok(()) => why,
            Err(also) => io::Error::new(why.kind(), format!("{why}; what was made of {name} was not removed: {also}")),
        }
    }
}

impl Storage for FileStorage {
    fn lock(&self) -> io::Result<Option<Box<dyn Any + Send + Sync>>> {
        let file = self.open_file(LOCK_FILE, OFlags::RDWR | OFlags::CREATE)?;
        if !try_lock(&file)? {
            return Ok(None);
        }
        // The directory itself as well: whoever has removed the lock file and makes a new one meets this. Some file
        // systems lock no directories; then the file alone serves.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = || rustix::fs::openat(&self.directory, ".", flags, Mode::empty());
        let directory = File::from(retry_on_intr(open)?);
        if try_lock(&directory).is_ok_and(|locked| !locked) {
            return Ok(None);
        }
        let lock = Arc::new(DirectoryLock { files: [file, directory].map(KeptFile::new) });
        *self.lock.lock() = Arc::downgrade(&lock);
        Ok(Some(Box::new(lock)))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let names = || {
            let mut names = Vec::new();
            for entry in Dir::read_from(&self.directory)? {
                let name = entry?.file_name().to_string_lossy().into_owned();
                if name != "." && name != ".." {
                    names.push(name);
                }
            }
            Ok(names)
        };
        // From the start, since an interrupted list is over.
        let mut names = retry_on_intr(names)?;
        names.sort();
        Ok(names)
    }

    fn read(&self, name: &str, bytes_max: usize) -> io::Result<Vec<u8>> {
        let file = self.open_file(name, OFlags::RDONLY)?;
        let expected = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX).min(bytes_max);
        let mut bytes = Vec::with_capacity(expected.saturating_add(1));
        file.take((bytes_max as u64).saturating_add(1)).read_to_end(&mut bytes)?;
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
        let mut file = self.open_anew(&temporary)?;
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

    fn leave(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.open_anew(name)?.write_all(bytes)
    }

    fn create_segment(&self, name: &str, bytes: u64) -> io::Result<Arc<dyn Segment>> {
        if self.lock.lock().strong_count() == 0 {
            return Err(not_locked());
        }
        // Exclusive: a file that is there already is somebody's, and must not be removed when this fails.
        let file = self.open_file(name, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL)?;
        self.fill_segment(name, file, bytes).map_err(|why| self.remove_part(name, why))
    }

    fn open_segment(&self, name: &str, access: Access) -> io::Result<Arc<dyn Segment>> {
        let flags = match access {
            Access::Read => OFlags::RDONLY,
            Access::NewLife => OFlags::RDWR,
        };
        let mut open = self.open.lock();
        let open = open.entry(name.to_owned()).or_default();
        open.retain(|opened| opened.segment.strong_count() > 0);
        if open.iter().any(|opened| access == Access::NewLife || opened.access == Access::NewLife) {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, format!("segment {name} is still open")));
        }
        let file = self.open_file(name, flags)?;
        self.map(name, file, access, open)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let name = plain(name)?;
        Ok(retry_on_intr(|| rustix::fs::unlinkat(&self.directory, name, AtFlags::empty()))?)
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
            None => panic!("segment {} was opened without the lock of its directory: its bytes may change", self.name),
        }
    }

    /// Whether what was written one way is read the other way. Some network and user-space file systems keep the two
    /// apart.
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
        assert_eq!(self.access, Access::NewLife, "segment {} is open for reading only", self.name);
        let claim = self.region().claim(offset, bytes.len());
        match self.append_mode {
            AppendMode::Mapped => claim.write(bytes),
            AppendMode::Positioned => {
                // Goes on after a short write and an interrupted one.
                self.file.write_all_at(bytes, offset)?;
                claim.publish();
            }
        }
        if self.coherent.load(Ordering::Relaxed) { Ok(()) } else { self.check_coherent(offset, bytes) }
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

    fn detach(&self) -> io::Result<()> {
        self.region.as_ref().map_or(Ok(()), Region::detach)
    }

    fn populate(&self, offset: u64, len: u64) -> io::Result<()> {
        match &self.region {
            Some(region) => region.populate(offset, len),
            None => Ok(()),
        }
    }
}

/// Takes the lock of an open file; `false` when somebody else has it.
fn try_lock(file: &File) -> io::Result<bool> {
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::WouldBlock) => return Ok(false),
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

fn not_locked() -> io::Error {
    io::Error::other("the lock of the directory is not held")
}

/// What a call comes to that is made again for as long as a signal interrupts it. For calls of the standard library that
/// do not see to it themselves.
fn retried<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

/// A name that stays within the directory.
fn plain(name: &str) -> io::Result<&str> {
    let odd = name.is_empty() || name == "." || name == ".." || name.contains(['/', '\\', '\0']);
    if odd { Err(io::Error::new(io::ErrorKind::InvalidInput, "not a plain file name")) } else { Ok(name) }
}

/// Makes a directory that its owner alone may enter.
fn create_private(directory: &Path) -> io::Result<()> {
    retried(|| fs::DirBuilder::new().mode(0o700).create(directory))
}

/// Makes a directory and those above it, and the entry of each durable.
fn create_directory(directory: &Path) -> io::Result<()> {
    let parent = match directory.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => return Ok(()), // the root
    };
    match create_private(directory) {
        Ok(()) => File::open(parent)?.sync_all(),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => sync_entry_of_new(directory, parent),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            create_directory(parent)?;
            match create_private(directory) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
                _ => File::open(parent)?.sync_all(),
            }
        }
        Err(error) => Err(error),
    }
}

/// A directory that has no lock file yet may have been made by an open that a crash cut short before the entry was
/// synced. A parent that may not be read was not written by this process either: then whoever made the entry answers
/// for it.
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

/// Has btrfs overwrite the blocks of an empty file in place, as the other file systems do. By default it writes each
/// change to a new place: then writing needs space, and a full disk would show itself in a segment that is in use.
#[cfg(target_os = "linux")]
fn overwrite_in_place(file: &File) -> io::Result<()> {
    const BTRFS: rustix::fs::FsWord = 0x9123_683E;
    if retry_on_intr(|| rustix::fs::fstatfs(file))?.f_type != BTRFS {
        return Ok(());
    }
    let flags = retry_on_intr(|| rustix::fs::ioctl_getflags(file))?;
    match retry_on_intr(|| rustix::fs::ioctl_setflags(file, flags | rustix::fs::IFlags::NOCOW)) {
        // Zoned devices cannot.
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(not(target_os = "linux"))]
fn overwrite_in_place(_file: &File) -> io::Result<()> {
    Ok(())
}

/// Has the file system set blocks aside, where it can: a full disk is then told at once, and the blocks lie together.
/// Where it cannot, the zeros that follow take the blocks.
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

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
