//! The state of a simulated disk, and how each event changes it. Pure: no locks, no faults, no I/O.
//!
//! A file is what the platter holds, and after it every write since, in order. The page cache is the two together: what
//! reads see. A sync moves writes from the list to the platter, page by page; a power loss takes for each page the
//! platter's bytes and any number of the writes to it, oldest first. Names work alike: the durable directory, and every
//! change since.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use super::pages::Pages;

/// The unit in which the page cache is written back.
pub(super) const PAGE_BYTES: usize = 4096;

/// Which file a name stands for.
pub(super) type Names = BTreeMap<Arc<str>, FileNumber>;

/// A file, whatever its name, for as long as the disk lives.
pub(super) type FileNumber = u64;

/// Everything that the disk and the page cache above it hold. Cheap to clone: the bytes are shared.
#[derive(Clone, Debug, Default)]
pub(super) struct Disk {
    /// How many events there have been.
    pub(super) steps: u64,
    pub(super) files: BTreeMap<FileNumber, Arc<SimFile>>,
    /// The directory as the next power loss may find it at worst.
    pub(super) names_durable: Arc<Names>,
    /// What was done to it since.
    pub(super) changes: Vec<DatedChange>,
    /// The directory as it is seen: the two together.
    pub(super) names: Arc<Names>,
    next_file: FileNumber,
}

/// A file on the platter, and what the page cache has on top of it.
#[derive(Clone, Debug, Default)]
pub(super) struct SimFile {
    /// What survives a power loss for certain. Its length is the durable length.
    pub(super) platter: Pages,
    /// The length that is seen.
    pub(super) bytes: usize,
    /// What was written since, in order. A power loss may have let any of it through.
    pub(super) writes: Vec<Write>,
    /// How many of them, from the first on, went into a sync that failed: the page cache thinks that they are on the
    /// platter, and no later sync writes them, unless their page is written again.
    pub(super) forsaken: usize,
}

/// Bytes on their way to the platter.
#[derive(Clone, Debug)]
pub(super) struct Write {
    pub(super) step: u64,
    pub(super) offset: usize,
    pub(super) bytes: Arc<[u8]>,
}

/// A change of a directory and the step that made it.
#[derive(Clone, Debug)]
pub(super) struct DatedChange {
    pub(super) step: u64,
    pub(super) change: Change,
}

/// One change of a directory: durable whole or not at all.
#[derive(Clone, Debug)]
pub(super) enum Change {
    Link { name: Arc<str>, file: FileNumber },
    Unlink { name: Arc<str> },
    Rename { from: Arc<str>, to: Arc<str>, file: FileNumber },
}

/// One step of a disk.
#[derive(Clone, Debug)]
pub(super) enum Event {
    Change(Change),
    Resize {
        file: FileNumber,
        bytes: usize,
    },
    Write {
        file: FileNumber,
        offset: usize,
        bytes: Arc<[u8]>,
    },
    /// A sync that began when there had been `began` steps: later writes are not its business.
    Sync {
        file: FileNumber,
        began: u64,
    },
    SyncFailed {
        file: FileNumber,
        began: u64,
    },
    SyncDirectory,
    /// An operation that failed and changed nothing.
    Failed,
}

impl Disk {
    /// A disk of which nothing is in the page cache. Files without a name are left out.
    pub(super) fn on_platter(names: Arc<Names>, files: BTreeMap<FileNumber, Arc<SimFile>>) -> Self {
        let next_file = files.last_key_value().map_or(0, |(number, _)| *number);
        let mut disk = Self { files, names_durable: names.clone(), names, next_file, ..Self::default() };
        disk.forget_nameless(|_| false);
        disk
    }

    /// A number that no file has had.
    pub(super) fn new_file(&mut self) -> FileNumber {
        self.next_file += 1;
        self.next_file
    }

    /// What the disk is after one more step.
    pub(super) fn apply(&mut self, event: &Event) {
        let step = self.steps;
        self.steps += 1;
        match event {
            Event::Change(change) => {
                if let Change::Link { file, .. } = change {
                    self.files.insert(*file, Arc::default());
                    self.next_file = self.next_file.max(*file);
                }
                change.apply(Arc::make_mut(&mut self.names));
                self.changes.push(DatedChange { step, change: change.clone() });
            }
            Event::Resize { file, bytes } => self.change(*file, |file| file.resize(*bytes)),
            Event::Write { file, offset, bytes } => {
                let write = Write { step, offset: *offset, bytes: bytes.clone() };
                self.change(*file, |file| file.write(write));
            }
            Event::Sync { file, began } => self.change(*file, |file| file.sync(*began)),
            Event::SyncFailed { file, began } => self.change(*file, |file| file.fail_sync(*began)),
            Event::SyncDirectory => {
                self.names_durable = self.names.clone();
                self.changes.clear();
            }
            Event::Failed => {}
        }
    }

    /// The file of this name, as it is seen.
    pub(super) fn file(&self, name: &str) -> Option<(FileNumber, &Arc<SimFile>)> {
        let number = *self.names.get(name)?;
        Some((number, self.files.get(&number)?))
    }

    /// Changes a file as no event can, at once and for good.
    pub(super) fn replace(&mut self, file: FileNumber, change: impl FnOnce(&mut Vec<u8>)) {
        if let Some(file) = self.files.get_mut(&file) {
            let mut bytes = file.newest().to_vec();
            change(&mut bytes);
            *file = Arc::new(SimFile::synced(bytes.as_slice().into()));
        }
    }

    /// What `event` would do, in words.
    pub(super) fn describe(&self, event: &Event) -> String {
        let name = |file: &FileNumber| {
            let named = self.names.iter().find(|(_, number)| *number == file);
            named.map_or_else(|| format!("file {file}, which has no name any more"), |(name, _)| String::from(&**name))
        };
        match event {
            Event::Change(Change::Link { name, .. }) => format!("create {name}"),
            Event::Change(Change::Unlink { name }) => format!("remove {name}"),
            Event::Change(Change::Rename { from, to, .. }) => format!("rename {from} to {to}"),
            Event::Resize { file, bytes } => format!("resize {} to {bytes} bytes", name(file)),
            Event::Write { file, offset, bytes } => {
                format!("write {} bytes at {offset} of {}", bytes.len(), name(file))
            }
            Event::Sync { file, .. } => format!("sync {}", name(file)),
            Event::SyncFailed { file, .. } => format!("fail to sync {}", name(file)),
            Event::SyncDirectory => "sync the directory".to_owned(),
            Event::Failed => "fail without a change".to_owned(),
        }
    }

    /// The length of all files together, as it is seen.
    pub(super) fn bytes(&self) -> u64 {
        self.names.values().filter_map(|file| self.files.get(file)).map(|file| file.bytes as u64).sum()
    }

    /// Lets go of files that have no name any more, now or after a power loss, and are not `open`.
    pub(super) fn forget_nameless(&mut self, open: impl Fn(FileNumber) -> bool) {
        if self.changes.is_empty() && self.files.len() > self.names.len() {
            let named: BTreeSet<FileNumber> = self.names.values().copied().collect();
            self.files.retain(|number, _| named.contains(number) || open(*number));
        }
    }

    /// A file whose events come after it was let go of is no longer of interest.
    fn change(&mut self, file: FileNumber, change: impl FnOnce(&mut SimFile)) {
        if let Some(file) = self.files.get_mut(&file) {
            change(Arc::make_mut(file));
        }
    }
}

impl Event {
    /// What happens instead when it fails: half of a write is seen, and half of a new length, a sync leaves its writes
    /// forsaken, all else does nothing.
    pub(super) fn failing(self) -> Self {
        match self {
            Self::Write { file, offset, bytes } => {
                let half = bytes.get(..bytes.len() / 2).unwrap_or_default();
                Self::Write { file, offset, bytes: half.into() }
            }
            Self::Resize { file, bytes } => Self::Resize { file, bytes: bytes / 2 },
            Self::Sync { file, began } => Self::SyncFailed { file, began },
            _ => Self::Failed,
        }
    }
}

impl Change {
    pub(super) fn apply(&self, names: &mut Names) {
        match self {
            Self::Link { name, file } => {
                names.insert(name.clone(), *file);
            }
            Self::Unlink { name } => {
                names.remove(name);
            }
            Self::Rename { from, to, file } => {
                names.remove(from);
                names.insert(to.clone(), *file);
            }
        }
    }
}

impl SimFile {
    /// A file that is wholly on the platter.
    pub(super) fn synced(platter: Pages) -> Self {
        Self { bytes: platter.len(), platter, writes: Vec::new(), forsaken: 0 }
    }

    /// The bytes as they are seen.
    pub(super) fn newest(&self) -> Pages {
        let mut bytes = self.platter.clone();
        if self.bytes != bytes.len() {
            bytes.resize(self.bytes);
        }
        for write in &self.writes {
            bytes.write(write.offset, &write.bytes);
        }
        bytes
    }

    /// Reads what is seen at `offset`; says how much that was.
    pub(super) fn read(&self, offset: usize, into: &mut [u8]) -> usize {
        let read = into.len().min(self.bytes.saturating_sub(offset));
        let into = into.get_mut(..read).expect("no more is read than was asked for");
        let kept = read.min(self.platter.len().saturating_sub(offset));
        into.get_mut(kept..).unwrap_or_default().fill(0);
        self.platter.read(offset, into);
        for write in &self.writes {
            copy_overlap(into, offset, write.offset, &write.bytes);
        }
        read
    }

    /// The bytes at `offset`, if they lie in one page and the page cache has nothing that the platter has not.
    pub(super) fn within_page(&self, offset: usize, len: usize) -> Option<&[u8]> {
        let same = self.writes.is_empty() && self.bytes == self.platter.len();
        if same { self.platter.within_page(offset, len) } else { None }
    }

    fn resize(&mut self, bytes: usize) {
        self.bytes = bytes;
    }

    fn write(&mut self, write: Write) {
        self.bytes = self.bytes.max(write.offset + write.bytes.len());
        self.writes.push(write);
    }

    fn sync(&mut self, began: u64) {
        if self.platter.len() != self.bytes {
            self.platter.resize(self.bytes);
        }
        let covered = self.before(began);
        if self.forsaken == 0 {
            for write in self.writes.drain(..covered) {
                self.platter.write(write.offset, &write.bytes);
            }
            return;
        }
        // Only pages written since the failure are written back, with all that the page cache has for them.
        let forsaken = self.forsaken.min(covered);
        let since_failure = self.writes.get(forsaken..covered).unwrap_or_default();
        let dirty: BTreeSet<usize> = since_failure.iter().flat_map(Write::pages).collect();
        let later = self.writes.split_off(covered);
        let mut still_forsaken = Vec::new();
        for (at, write) in std::mem::take(&mut self.writes).iter().enumerate() {
            for piece in write.pieces(PAGE_BYTES) {
                let bytes = piece.bytes(&write.bytes);
                if dirty.contains(&piece.unit) {
                    self.platter.write(piece.start, bytes);
                } else if at < forsaken {
                    still_forsaken.push(Write { step: write.step, offset: piece.start, bytes: bytes.into() });
                }
            }
        }
        self.forsaken = still_forsaken.len();
        self.writes = still_forsaken;
        self.writes.extend(later);
    }

    fn fail_sync(&mut self, began: u64) {
        self.forsaken = self.forsaken.max(self.before(began));
    }

    /// How many writes came before step `began`.
    fn before(&self, began: u64) -> usize {
        self.writes.partition_point(|write| write.step < began)
    }
}

/// The part of a write that falls into one page or sector.
pub(super) struct Piece {
    /// Which page or sector of the file.
    pub(super) unit: usize,
    /// Where in the file it starts.
    pub(super) start: usize,
    /// Which bytes of the write.
    pub(super) part: Range<usize>,
}

impl Piece {
    pub(super) fn bytes<'a>(&self, write: &'a [u8]) -> &'a [u8] {
        write.get(self.part.clone()).expect("a piece is a part of its write")
    }
}

impl Write {
    /// The write, cut at every multiple of `unit_bytes` of the file.
    pub(super) fn pieces(&self, unit_bytes: usize) -> impl Iterator<Item = Piece> + use<> {
        let (offset, len) = (self.offset, self.bytes.len());
        let mut done = 0;
        std::iter::from_fn(move || {
            let start = offset + done;
            let unit = start / unit_bytes;
            let end = ((unit + 1) * unit_bytes - offset).min(len);
            let part = done..end;
            done = end;
            (!part.is_empty()).then_some(Piece { unit, start, part })
        })
    }

    fn pages(&self) -> Range<usize> {
        let end = (self.offset + self.bytes.len()).div_ceil(PAGE_BYTES);
        self.offset / PAGE_BYTES..end
    }
}

/// Copies what two stretches of one file have in common: `into` starts at `into_offset` of it, `from` at `from_offset`.
fn copy_overlap(into: &mut [u8], into_offset: usize, from_offset: usize, from: &[u8]) {
    let start = into_offset.max(from_offset);
    let end = (into_offset + into.len()).min(from_offset + from.len());
    if start < end {
        let into = into.get_mut(start - into_offset..end - into_offset).expect("the overlap lies in both");
        let from = from.get(start - from_offset..end - from_offset).expect("the overlap lies in both");
        into.copy_from_slice(from);
    }
}
