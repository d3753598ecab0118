//! Every state in which a power loss may leave a disk.
//!
//! What was not synced splits into independent **choices**: per page (or sector) how many of the writes to it reached
//! the platter, per file whether its new length did, per change of the directory whether it did. A crash image is one
//! pick for each choice; 0 is always "nothing got through".

use std::sync::Arc;

use super::disk::{Change, Disk, FileNumber, SimFile};
use super::sim_disk::SimDisk;

/// All crash images of one moment of a disk, made once and then asked for as many as a test can afford.
///
/// ```
/// use keyonce::testing::{SimDisk, Storage};
///
/// let disk = SimDisk::new();
/// let lock = disk.lock()?.expect("a new disk is not locked");
/// let segment = disk.create_segment("log", 8192)?;
/// segment.write_at(0, b"one")?;
/// segment.write_at(4096, b"two")?;
///
/// let crashes = disk.crashes();
/// assert_eq!(crashes.count(), Some(4)); // each page old or new
/// for image in crashes.images(1000) {
///     let log = image.read("log", 8192)?;
///     assert!(log[..3] == *b"one" || log[..3] == [0; 3]);
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Crashes {
    disk: Disk,
    settings: SimDisk,
    /// How many versions each choice has, two or more: the pick is below it.
    versions: Vec<u32>,
    /// One entry for each version but the old one, in the order in which they came to be: which choice it belongs to.
    order: Vec<usize>,
    files: Vec<DirtyFile>,
    /// The choices of the directory's changes, in order.
    changes: Vec<(usize, Change)>,
}

/// A file that a power loss may change.
#[derive(Debug)]
struct DirtyFile {
    number: FileNumber,
    /// The choice whether its new length is durable.
    length: Option<usize>,
    /// Parts of its writes, in the order of the writes.
    pieces: Vec<DirtyPiece>,
}

/// A part of a write that gets through, or does not, in one.
#[derive(Debug)]
struct DirtyPiece {
    choice: usize,
    /// It got through when the pick of its choice is this or more.
    version: u32,
    start: usize,
    write: Arc<[u8]>,
    part: std::ops::Range<usize>,
}

/// Crash images, one after the other: see [`Crashes::images`].
#[derive(Debug)]
pub struct CrashImages {
    crashes: Arc<Crashes>,
    plan: Plan,
    next: u64,
    end: u64,
    picks: Vec<u32>,
}

/// How the images of an iterator are chosen.
#[derive(Clone, Copy, Debug)]
enum Plan {
    /// Every one there is, counted like the digits of a number.
    All,
    /// The first `telling` ones are spread over the telling ones, the rest comes from seeds.
    Sample { telling: u64 },
}

impl Crashes {
    /// The images of `disk` as it is; they get the settings of `settings`.
    pub(super) fn new(disk: Disk, settings: SimDisk, unit_bytes: usize) -> Self {
        let mut crashes =
            Self { disk, settings, versions: Vec::new(), order: Vec::new(), files: Vec::new(), changes: Vec::new() };
        let mut dated = Vec::new();
        let files: Vec<(FileNumber, Arc<SimFile>)> =
            crashes.disk.files.iter().map(|(number, file)| (*number, file.clone())).collect();
        for (number, file) in files {
            crashes.add_file(number, &file, unit_bytes, &mut dated);
        }
        for dated_change in std::mem::take(&mut crashes.disk.changes) {
            let choice = crashes.add_choice();
            dated.push((dated_change.step, choice));
            crashes.changes.push((choice, dated_change.change));
        }
        dated.sort_by_key(|(step, _)| *step);
        crashes.order = dated.into_iter().map(|(_, choice)| choice).collect();
        crashes
    }

    fn add_choice(&mut self) -> usize {
        self.versions.push(2);
        self.versions.len() - 1
    }

    fn add_file(&mut self, number: FileNumber, file: &SimFile, unit_bytes: usize, dated: &mut Vec<(u64, usize)>) {
        let mut dirty = DirtyFile { number, length: None, pieces: Vec::new() };
        if file.bytes != file.platter.len() {
            let choice = self.add_choice();
            // A length comes to be with the first write behind the old end or, without one, before all that is there.
            let grown = file.writes.iter().find(|write| write.offset + write.bytes.len() > file.platter.len());
            dated.push((grown.map_or(0, |write| write.step), choice));
            dirty.length = Some(choice);
        }
        let mut choice_of_unit = std::collections::BTreeMap::new();
        for write in &file.writes {
            for piece in write.pieces(unit_bytes) {
                let version = match choice_of_unit.get(&piece.unit) {
                    None => {
                        choice_of_unit.insert(piece.unit, self.add_choice());
                        1
                    }
                    Some(choice) => {
                        let versions = self.versions.get_mut(*choice).expect("a choice made above");
                        *versions += 1;
                        *versions - 1
                    }
                };
                let choice = *choice_of_unit.get(&piece.unit).expect("a choice made above");
                dated.push((write.step, choice));
                let write = write.bytes.clone();
                dirty.pieces.push(DirtyPiece { choice, version, start: piece.start, write, part: piece.part });
            }
        }
        if dirty.length.is_some() || !dirty.pieces.is_empty() {
            self.files.push(dirty);
        }
    }

    /// How many different picks there are; `None` when more than fit.
    #[must_use]
    pub fn count(&self) -> Option<u64> {
        self.versions.iter().try_fold(1_u64, |product, versions| product.checked_mul(u64::from(*versions)))
    }

    /// The disk on which nothing got through that was not synced.
    #[must_use]
    pub fn all_old(&self) -> SimDisk {
        self.build(&vec![0; self.versions.len()])
    }

    /// The disk on which everything got through.
    #[must_use]
    pub fn all_new(&self) -> SimDisk {
        let mut picks = Vec::new();
        self.pick_all_new(&mut picks);
        self.build(&picks)
    }

    /// One image by chance; the same for the same seed. Some seeds give images in which little got through, some those
    /// in which little is missing, some keep the order of the writes, most follow no rule.
    #[must_use]
    pub fn image(&self, seed: u64) -> SimDisk {
        let mut picks = Vec::new();
        self.pick_by_seed(seed, &mut picks);
        self.build(&picks)
    }

    /// Images, at most `limit` of them: every one there is when they are that few. Otherwise about half are the telling
    /// ones (nothing got through, everything did, all but one thing, one thing alone, a first part in order of time, a
    /// last part in order of place), or as many as fit, spread evenly; the others are those of the seeds 0, 1, 2 and so
    /// on.
    #[must_use]
    pub fn images(self, limit: u64) -> CrashImages {
        let (plan, end) = match self.count() {
            Some(count) if count <= limit => (Plan::All, count),
            _ => (Plan::Sample { telling: self.telling_count().min(limit.div_ceil(2)) }, limit),
        };
        CrashImages { crashes: Arc::new(self), plan, next: 0, end, picks: Vec::new() }
    }

    fn telling_count(&self) -> u64 {
        2 + 3 * self.versions.len() as u64 + self.order.len() as u64
    }

    fn pick_all_new(&self, picks: &mut Vec<u32>) {
        picks.clear();
        picks.extend(self.versions.iter().map(|versions| versions - 1));
    }

    fn pick_all_old(&self, picks: &mut Vec<u32>) {
        picks.clear();
        picks.resize(self.versions.len(), 0);
    }

    /// The `index`-th of all picks.
    fn pick_counted(&self, mut index: u64, picks: &mut Vec<u32>) {
        picks.clear();
        for versions in &self.versions {
            let versions = u64::from(*versions);
            picks.push(u32::try_from(index % versions).expect("less than a u32"));
            index /= versions;
        }
    }

    /// The `index`-th of the telling picks.
    fn pick_telling(&self, index: u64, picks: &mut Vec<u32>) {
        let index = usize::try_from(index).expect("an index of a list in memory");
        let choices = self.versions.len();
        match index {
            0 => return self.pick_all_old(picks),
            1 => return self.pick_all_new(picks),
            _ => {}
        }
        let index = index - 2;
        if index < choices {
            self.pick_all_new(picks);
            set(picks, index, 0);
        } else if index < 2 * choices {
            self.pick_all_old(picks);
            set(picks, index - choices, self.newest(index - choices));
        } else if index < 3 * choices {
            self.pick_all_new(picks);
            picks.iter_mut().take(index - 2 * choices).for_each(|pick| *pick = 0);
        } else {
            self.pick_first(index - 3 * choices, picks);
        }
    }

    /// The first `count` things, in order of time.
    fn pick_first(&self, count: usize, picks: &mut Vec<u32>) {
        self.pick_all_old(picks);
        for choice in self.order.iter().take(count) {
            if let Some(pick) = picks.get_mut(*choice) {
                *pick += 1;
            }
        }
    }

    fn newest(&self, choice: usize) -> u32 {
        self.versions.get(choice).map_or(0, |versions| versions - 1)
    }

    fn pick_by_seed(&self, seed: u64, picks: &mut Vec<u32>) {
        let mut random = SplitMix(seed);
        let mode = random.below(8);
        match mode {
            // In order of time, with one exception.
            0 | 1 => {
                self.pick_first(random.index(self.order.len() + 1), picks);
                if mode == 1 && !picks.is_empty() {
                    let choice = random.index(picks.len());
                    set(picks, choice, self.any(choice, &mut random));
                }
            }
            // Nearly nothing, or nearly everything.
            2 | 3 => {
                if mode == 2 {
                    self.pick_all_old(picks)
                } else {
                    self.pick_all_new(picks)
                }
                for _ in 0..=random.below(3) {
                    if !picks.is_empty() {
                        let choice = random.index(picks.len());
                        set(picks, choice, self.any(choice, &mut random));
                    }
                }
            }
            _ => {
                self.pick_all_old(picks);
                for choice in 0..picks.len() {
                    let pick = match random.below(3) {
                        0 => 0,
                        1 => self.newest(choice),
                        _ => self.any(choice, &mut random),
                    };
                    set(picks, choice, pick);
                }
            }
        }
    }

    fn any(&self, choice: usize, random: &mut SplitMix) -> u32 {
        u32::try_from(random.below(u64::from(self.newest(choice)) + 1)).expect("at most the newest version")
    }

    fn build(&self, picks: &[u32]) -> SimDisk {
        let pick = |choice: usize| picks.get(choice).copied().unwrap_or(0);
        let mut names = self.disk.names_durable.clone();
        for (choice, change) in &self.changes {
            if pick(*choice) > 0 {
                change.apply(Arc::make_mut(&mut names));
            }
        }
        let mut files = self.disk.files.clone();
        for dirty in &self.files {
            if let Some(file) = files.get_mut(&dirty.number) {
                *file = dirty.after(file, pick);
            }
        }
        self.settings.sibling(Disk::on_platter(names, files))
    }
}

impl DirtyFile {
    /// The file as a power loss leaves it.
    fn after(&self, file: &SimFile, pick: impl Fn(usize) -> u32) -> Arc<SimFile> {
        let grown = self.length.is_some_and(|choice| pick(choice) > 0);
        let touched = self.pieces.iter().any(|piece| pick(piece.choice) >= piece.version);
        if !grown && !touched {
            return Arc::new(SimFile::synced(file.platter.clone()));
        }
        let mut platter = file.platter.clone();
        if grown {
            platter.resize(file.bytes);
        }
        for piece in &self.pieces {
            if pick(piece.choice) >= piece.version {
                let part = piece.write.get(piece.part.clone()).expect("a piece is a part of its write");
                platter.write(piece.start, part);
            }
        }
        Arc::new(SimFile::synced(platter))
    }
}

impl Iterator for CrashImages {
    type Item = SimDisk;

    fn next(&mut self) -> Option<SimDisk> {
        if self.next == self.end {
            return None;
        }
        let index = self.next;
        self.next += 1;
        match self.plan {
            Plan::All => self.crashes.pick_counted(index, &mut self.picks),
            Plan::Sample { telling } if index < telling => {
                let spread = u128::from(index) * u128::from(self.crashes.telling_count()) / u128::from(telling);
                let spread = u64::try_from(spread).expect("below the count of telling images");
                self.crashes.pick_telling(spread, &mut self.picks);
            }
            Plan::Sample { telling } => self.crashes.pick_by_seed(index - telling, &mut self.picks),
        }
        Some(self.crashes.build(&self.picks))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = usize::try_from(self.end - self.next).unwrap_or(usize::MAX);
        (left, Some(left))
    }
}

fn set(picks: &mut [u32], choice: usize, pick: u32) {
    if let Some(place) = picks.get_mut(choice) {
        *place = pick;
    }
}

/// Sebastiano Vigna's SplitMix64: small, and the same everywhere for ever.
#[derive(Debug)]
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, which is not zero. The bias of the remainder does not matter here.
    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).expect("below a length in memory")
    }
}
