//! Opening a directory: what is there, what it means, and what must be written before the first answer.
//!
//! Decide first, write afterwards. Everything up to [`Survey::judge`] only reads; an error there has changed no byte.
//!
//! 1. **Survey.** Both header copies of every segment file are read. A recovery at the top of the chain that did not come
//!    to its `Sealed` is void. The live chain runs from the newest segment back by `previous`, down to the oldest live
//!    number that any header names; a segment missing in it is corruption.
//! 2. **Scan.** Every segment of the chain is read by positioned reads, record after record; where nothing verifies, the
//!    scan goes on eight bytes further, so one damaged record costs no other.
//! 3. **Judge.** The *known synced LSN* is the largest that any header or record claims. Below it every byte was on the
//!    disk once: a failed check is damage, and the store is refused. At or above it a failed check is what a crash leaves.
//! 4. **Apply** the records in the order of the log; of two of a key the later wins, expired or not.
//! 5. **Seal.** What lies above the known synced LSN may stand in the page cache alone. The latest record of every key
//!    touched there is copied into a recovery segment, then `Sealed` names the interval of the log that the copies
//!    replace, then one sync. Replaced intervals are never read or judged again, so the decision is made once, and a crash
//!    at any moment of a recovery changes nothing. Nearly empty segments at the end of the chain are folded in the same
//!    way, so that a store that is opened often does not grow.
//!
//! Every run appends only to segments whose header it wrote itself, and its LSNs begin beyond the range of every header
//! seen, so no token is ever given twice.

use std::sync::Arc;

use crate::clock::{StoreTime, TimeMark};
use crate::commit::Commit;
use crate::entropy::Entropy;
use crate::error::{Error, ErrorKind};
use crate::format::{
    self, Bad, Draft, Next, Record, Role, STORE_FILE_BYTES, SegmentHeader, StateKind, StateRecord, StoreFile,
    StoreFileFault,
};
use crate::index::{self, Address, IndexShard};
use crate::key::HashSeed;
use crate::log::{Live, Log, Past, Run, Spare, Start};
use crate::options::Checked;
use crate::segment::{self, Found, Life};
use crate::state::{self, State};
use crate::stats::OpenReport;
use crate::storage::{LOCK_FILE, Storage};

/// The file that makes a directory a store; it is renamed into place when everything else is durable.
pub(crate) const STORE_FILE: &str = "keyonce.store";
const STORE_FILE_PART: &str = "keyonce.store.tmp";
/// What a file system puts into the root of a fresh disk.
const LOST_AND_FOUND: &str = "lost+found";

/// A segment at the end of the chain that is filled to less than one part in this many is folded at opening.
const FOLD_PART: u64 = 4;

/// A store that is ready to answer.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) log: Log,
    pub(crate) commit: Commit,
    pub(crate) shards: Vec<IndexShard>,
    pub(crate) seed: HashSeed,
    pub(crate) report: OpenReport,
}

/// Refuses a directory that holds something else, before even the lock file is made in it.
///
/// # Errors
///
/// `ForeignDirectory`, naming the file.
pub(crate) fn refuse_foreign(storage: &dyn Storage) -> Result<(), Error> {
    let names = list(storage)?;
    if names.iter().any(|name| name == STORE_FILE) {
        return Ok(());
    }
    let ours = |name: &str| {
        name == LOCK_FILE || name == STORE_FILE_PART || name == LOST_AND_FOUND || segment::file_index(name).is_some()
    };
    match names.iter().find(|name| !ours(name)) {
        Some(foreign) => Err(Error::new(
            ErrorKind::ForeignDirectory,
            format!("the directory is not a store: it has no {STORE_FILE}, and it holds {foreign:?}"),
        )),
        None => Ok(()),
    }
}

/// Opens the store in a locked directory, or makes one in an empty one.
///
/// # Errors
///
/// `Corrupt`, `ForeignDirectory`, `UnsupportedFormat`: no byte has changed. `Full`, `Io`: the store is as it was.
pub(crate) fn open(
    storage: Arc<dyn Storage>,
    entropy: Entropy,
    options: &Checked,
    shard_count: usize,
) -> Result<Opened, Error> {
    refuse_foreign(&*storage)?;
    let names = list(&*storage)?;
    let files = names
        .iter()
        .filter_map(|name| Some((name, segment::file_index(name)?)))
        .map(|(name, index)| {
            segment::examine(&*storage, name, index).map_err(|error| Error::io(format!("reading {name}"), error))
        })
        .collect::<Result<Vec<_>, _>>()?;
    if names.iter().any(|name| name == STORE_FILE) {
        let store = read_store_file(&*storage)?;
        let survey = Survey::take(&store, files)?;
        survey.judge()?;
        survey.recover(storage, entropy, options, &store, shard_count)
    } else {
        create(storage, entropy, options, files, shard_count)
    }
}

fn list(storage: &dyn Storage) -> Result<Vec<String>, Error> {
    storage.list().map_err(|error| Error::io("listing the directory", error))
}

fn read_store_file(storage: &dyn Storage) -> Result<StoreFile, Error> {
    let bytes = storage.read(STORE_FILE, STORE_FILE_BYTES).or_else(|error| match error.kind() {
        std::io::ErrorKind::FileTooLarge => Err(Error::corrupt(STORE_FILE, 0, "longer than a store file")),
        _ => Err(Error::io(format!("reading {STORE_FILE}"), error)),
    })?;
    StoreFile::decode(&bytes).map_err(|fault| match fault {
        StoreFileFault::Foreign => {
            Error::new(ErrorKind::ForeignDirectory, format!("{STORE_FILE} was not written by this crate"))
        }
        StoreFileFault::Version(version) => unsupported(STORE_FILE, version),
        StoreFileFault::Damaged => Error::corrupt(STORE_FILE, 0, "its checksum fails"),
    })
}

fn unsupported(name: &str, version: u32) -> Error {
    let known = format::VERSION;
    Error::new(
        ErrorKind::UnsupportedFormat,
        format!("{name} has format version {version}; this crate reads version {known}"),
    )
}

/// Makes a store in a directory that holds none. A creation that a crash cut short is begun anew; a directory whose
/// segments hold records but that lost its store file is refused.
fn create(
    storage: Arc<dyn Storage>,
    entropy: Entropy,
    options: &Checked,
    files: Vec<Found>,
    shard_count: usize,
) -> Result<Opened, Error> {
    for found in &files {
        let half_made = match &found.header {
            Some(header) => header.number == 1 && Scan::run(found, header)?.is_empty(),
            None => found.blank,
        };
        if !half_made {
            return Err(Error::corrupt(STORE_FILE, 0, &format!("it is missing beside {}", found.name)));
        }
    }
    for found in files {
        let name = found.name.clone();
        drop(found);
        storage.remove(&name).map_err(|error| Error::io(format!("removing the half-made {name}"), error))?;
    }
    let (time, _) = StoreTime::start(Arc::clone(&options.clock), None, options.clock_jump_max_ms);
    let failed = |error| Error::io("drawing random numbers", error);
    let store = StoreFile {
        store_id: entropy.bytes().map_err(failed)?,
        hash_seed: entropy.bytes().map_err(failed)?,
        created_ms: time.now_ms(),
    };
    let run = Run {
        storage: Arc::clone(&storage),
        store_id: store.store_id,
        run_id: entropy.bytes().map_err(failed)?,
        entropy,
        time,
        segment_bytes_plan: options.segment_bytes_plan,
    };
    let start = Start { previous: 0, first_lsn: 0, bytes: options.segment_bytes_first, role: Role::Rolled };
    let past = Past { newest_number: 0, oldest_live: 1, synced_lsn: 0, spares: Vec::new(), next_index: 1 };
    let log = Log::begin(run, start, Vec::new(), past)?;
    storage.publish(STORE_FILE, &store.encode()).map_err(|error| Error::io(format!("writing {STORE_FILE}"), error))?;
    let commit = Commit::new(format::DATA_START);
    let shards = new_shards(shard_count, options);
    let report = OpenReport { created: true, clean: true, ..OpenReport::default() };
    Ok(Opened { log, commit, shards, seed: HashSeed(store.hash_seed), report })
}

fn new_shards(shard_count: usize, options: &Checked) -> Vec<IndexShard> {
    let keys = options.keys / shard_count as u64;
    (0..shard_count).map(|_| IndexShard::planned(keys)).collect()
}

/// A segment of the live chain, with what a scan found in it.
#[derive(Debug)]
struct Link {
    found: Found,
    header: SegmentHeader,
    scan: Scan,
}

/// What was read from one segment.
#[derive(Debug, Default)]
struct Scan {
    /// Offsets of the records that give a key a state.
    states: Vec<u32>,
    /// Where nothing verified, in the order of the log.
    holes: Vec<Hole>,
    next: Option<(u64, Next)>,
    sealed: Option<Seal>,
    /// LSN and time of the end mark.
    closed: Option<(u64, TimeMark)>,
    /// Offset behind the last record that verified.
    end: u64,
    /// The largest LSN that a record here says was synced.
    synced_lsn: u64,
}

#[derive(Debug)]
struct Seal {
    lsn: u64,
    count: u64,
    digest: [u8; 16],
    replaced: Vec<(u64, u64)>,
}

/// Bytes between records that verified, or behind the last one.
#[derive(Clone, Copy, Debug)]
struct Hole {
    from_lsn: u64,
    offset: u64,
    bad: Bad,
    /// Something was written here: a record verified behind the hole, or the head of one inside it.
    torn: bool,
}

impl Scan {
    fn run(found: &Found, header: &SegmentHeader) -> Result<Scan, Error> {
        let bytes = usize::try_from(header.segment_bytes).map_err(|_| too_long(found))?;
        let mut buffer = vec![0; bytes];
        let read =
            found.data.read_at(0, &mut buffer).map_err(|error| Error::io(format!("reading {}", found.name), error))?;
        buffer.truncate(read);
        Self::of_bytes(found, header, &buffer)
    }

    fn of_bytes(found: &Found, header: &SegmentHeader, buffer: &[u8]) -> Result<Scan, Error> {
        let mut scan = Scan { end: format::DATA_START, ..Scan::default() };
        let mut hole: Option<Hole> = None;
        let mut offset = format::DATA_START;
        while let Some(bytes) = usize::try_from(offset).ok().and_then(|from| buffer.get(from..)) {
            if bytes.len() < format::HEAD_BYTES {
                break;
            }
            let lsn = header.first_lsn + offset;
            match format::verify(bytes, header.salt, lsn) {
                Ok(seen) => {
                    scan.holes.extend(hole.take().map(|hole| Hole { torn: true, ..hole }));
                    if let Some(behind) = seen.behind {
                        scan.synced_lsn = scan.synced_lsn.max(lsn.saturating_sub(behind));
                    }
                    match seen.record {
                        Record::State(_) => scan.states.push(u32::try_from(offset).map_err(|_| too_long(found))?),
                        Record::Next(next) => scan.next = Some((lsn, next)),
                        Record::Sealed(sealed) => {
                            scan.sealed = Some(Seal {
                                lsn,
                                count: sealed.count,
                                digest: sealed.digest,
                                replaced: sealed.intervals().collect(),
                            });
                        }
                        Record::Closed(closed) => {
                            scan.closed = Some((lsn, closed.time));
                            scan.synced_lsn = scan.synced_lsn.max(lsn);
                        }
                        Record::Pad => {}
                    }
                    offset += seen.len as u64;
                    scan.end = offset;
                    if scan.next.is_some() {
                        return Ok(scan);
                    }
                }
                Err(bad) => {
                    let torn = matches!(bad, Bad::Body | Bad::Malformed);
                    let hole = hole.get_or_insert(Hole { from_lsn: lsn, offset, bad, torn: false });
                    hole.torn |= torn;
                    offset += format::UNIT_BYTES as u64;
                }
            }
        }
        // Room behind an end mark is room that was never used.
        let ended = scan.closed.is_some_and(|(lsn, _)| header.first_lsn + scan.end == lsn + format::CLOSED_BYTES as u64);
        if hole.is_none() && offset < header.segment_bytes {
            hole = Some(Hole { from_lsn: header.first_lsn + offset, offset, bad: Bad::Blank, torn: false });
        }
        if !ended {
            scan.holes.extend(hole);
        }
        Ok(scan)
    }

    fn is_empty(&self) -> bool {
        self.states.is_empty() && self.next.is_none() && self.closed.is_none() && self.sealed.is_none()
    }
}

fn too_long(found: &Found) -> Error {
    Error::corrupt(&found.name, 0, "its header names an impossible length")
}

/// Everything that opening a store is decided upon.
#[derive(Debug)]
struct Survey {
    /// The live chain, oldest first.
    chain: Vec<Link>,
    /// Intervals of the log that a `Sealed` has replaced.
    replaced: Vec<(u64, u64)>,
    /// Files that can get a new life at once: nothing in them counts.
    spares: Vec<Spare>,
    next_index: u32,
    newest_number: u64,
    /// The LSN beyond the range of every header seen.
    next_first_lsn: u64,
    /// The oldest number that any header names as alive.
    oldest_live: u64,
    /// The largest LSN that any header or record says was synced.
    synced_lsn: u64,
    time: Option<TimeMark>,
    header_copies_bad: u64,
}

impl Survey {
    fn take(store: &StoreFile, files: Vec<Found>) -> Result<Self, Error> {
        let mut survey = Survey {
            chain: Vec::new(),
            replaced: Vec::new(),
            spares: Vec::new(),
            next_index: files.iter().map(|found| found.index).max().unwrap_or(0) + 1,
            newest_number: 0,
            next_first_lsn: 0,
            oldest_live: 0,
            synced_lsn: 0,
            time: None,
            header_copies_bad: 0,
        };
        let mut lives = Vec::new();
        for found in files {
            match found.header {
                Some(header) if header.store_id != store.store_id => {
                    let message = format!("{} belongs to another store", found.name);
                    return Err(Error::new(ErrorKind::ForeignDirectory, message));
                }
                Some(header) => {
                    survey.note_header(&found, &header);
                    lives.push((found, header));
                }
                None => match found.newer {
                    Some(version) => return Err(unsupported(&found.name, version)),
                    // A file that a crash left before its first header was durable, or that was never one.
                    None if found.blank => survey.spares.extend(spare(&found)),
                    None => return Err(Error::corrupt(&found.name, 0, "both copies of its header fail their checks")),
                },
            }
        }
        lives.sort_by_key(|(_, header)| header.number);
        if let Some(twice) = lives.windows(2).find_map(|pair| match pair {
            [(_, one), (found, other)] if one.number == other.number => Some(found),
            _ => None,
        }) {
            return Err(Error::corrupt(&twice.name, 0, "another file carries the same segment number"));
        }
        survey.drop_void(&mut lives)?;
        survey.link(lives)?;
        survey.claims();
        Ok(survey)
    }

    fn note_header(&mut self, found: &Found, header: &SegmentHeader) {
        self.newest_number = self.newest_number.max(header.number);
        self.next_first_lsn = self.next_first_lsn.max(header.first_lsn.saturating_add(header.segment_bytes));
        self.oldest_live = self.oldest_live.max(header.oldest_live);
        self.synced_lsn = self.synced_lsn.max(header.synced_lsn);
        self.header_copies_bad += u64::from(found.copies_bad);
        self.note_time(header.time);
    }

    fn note_time(&mut self, time: TimeMark) {
        if self.time.as_ref().is_none_or(|known| known.store_ms <= time.store_ms) {
            self.time = Some(time);
        }
    }

    /// Gives up the recoveries at the top that did not come to their `Sealed`: no answer ever rested on them.
    fn drop_void(&mut self, lives: &mut Vec<(Found, SegmentHeader)>) -> Result<(), Error> {
        while let Some((_, top)) = lives.last() {
            if top.role != Role::Recovery {
                return Ok(());
            }
            let run_id = top.run_id;
            let of_run = |(_, header): &&(Found, SegmentHeader)| header.run_id == run_id && header.role == Role::Recovery;
            let count = lives.iter().rev().take_while(of_run).count();
            let group = lives.split_off(lives.len() - count);
            let mut scans = Vec::new();
            for (found, header) in &group {
                scans.push(Scan::run(found, header)?);
            }
            let parts: Vec<_> = group.iter().zip(&scans).map(|((found, header), scan)| (found, header, scan)).collect();
            if sealed(&parts)? {
                lives.extend(group);
                return Ok(());
            }
            let first_lsn = group.first().map_or(0, |(_, header)| header.first_lsn);
            let worked = scans.iter().any(|scan| scan.synced_lsn > first_lsn || scan.closed.is_some());
            if let (true, Some((found, _))) = (worked, group.first()) {
                return Err(Error::corrupt(&found.name, format::DATA_START, "work lies behind a recovery without its seal"));
            }
            self.spares.extend(group.iter().filter_map(|(found, _)| spare(found)));
        }
        Ok(())
    }

    /// Follows `previous` from the newest segment back; whatever is not met is a spare.
    fn link(&mut self, mut lives: Vec<(Found, SegmentHeader)>) -> Result<(), Error> {
        let Some((newest, _)) = lives.last() else {
            return Err(Error::corrupt(STORE_FILE, 0, "no segment lies beside it"));
        };
        let mut named_by = newest.name.clone();
        let mut number = lives.last().map_or(0, |(_, header)| header.number);
        while number != 0 && number >= self.oldest_live {
            let Some(at) = lives.iter().position(|(_, header)| header.number == number) else {
                let reason = format!("it names segment {number}, which is missing");
                return Err(Error::corrupt(&named_by, 0, &reason));
            };
            let (found, header) = lives.swap_remove(at);
            let scan = Scan::run(&found, &header)?;
            named_by.clone_from(&found.name);
            number = header.previous;
            self.chain.push(Link { found, header, scan });
        }
        self.chain.reverse();
        self.spares.extend(lives.iter().filter_map(|(found, _)| spare(found)));
        for link in &self.chain {
            if let Some(seal) = &link.scan.sealed {
                self.replaced.extend(&seal.replaced);
            }
        }
        self.replaced = merged(std::mem::take(&mut self.replaced));
        Ok(())
    }

    fn claims(&mut self) {
        let mut times = Vec::new();
        for link in &self.chain {
            self.synced_lsn = self.synced_lsn.max(link.scan.synced_lsn);
            times.extend(link.scan.closed.map(|(_, time)| time));
        }
        for time in times {
            self.note_time(time);
        }
    }

    fn is_replaced(&self, lsn: u64) -> bool {
        self.replaced.iter().any(|(from, to)| (*from..*to).contains(&lsn))
    }

    /// Refuses a store in which something that was on the disk once is not as it was.
    fn judge(&self) -> Result<(), Error> {
        for link in &self.chain {
            let damaged =
                link.scan.holes.iter().find(|hole| hole.from_lsn < self.synced_lsn && !self.is_replaced(hole.from_lsn));
            if let Some(hole) = damaged {
                return Err(Error::corrupt(&link.found.name, hole.offset, &hole.bad.to_string()));
            }
            if let Some((lsn, next)) = link.scan.next {
                let cut = self.is_replaced(lsn) || self.is_replaced(next.first_lsn);
                let successor = self.chain.iter().find(|link| link.header.number == next.number);
                let present = successor.is_some_and(|link| link.header.salt == next.salt);
                if !cut && !present {
                    let reason = format!("its successor, segment {}, is missing", next.number);
                    return Err(Error::corrupt(&link.found.name, lsn - link.header.first_lsn, &reason));
                }
            }
        }
        let mut rest = self.chain.as_slice();
        while let Some(first) = rest.first() {
            let of_run = |link: &&Link| {
                link.header.run_id == first.header.run_id && link.header.role == Role::Recovery
            };
            let count = rest.iter().take_while(of_run).count();
            let (group, behind) = rest.split_at(count.max(1));
            let parts: Vec<_> = group.iter().map(|link| (&link.found, &link.header, &link.scan)).collect();
            if count > 0 && !self.is_replaced(first.header.first_lsn) && !sealed(&parts)? {
                return Err(Error::corrupt(&first.found.name, format::DATA_START, "the seal of a recovery is missing"));
            }
            rest = behind;
        }
        Ok(())
    }

    /// Whether the last thing that the last run did was to close the store.
    fn is_clean(&self) -> bool {
        let mut above = self.chain.iter().rev().skip_while(|link| link.scan.is_empty());
        let Some(last) = above.next() else { return false };
        let ended = last.scan.closed.is_some_and(|(lsn, _)| {
            last.header.first_lsn + last.scan.end == lsn + format::CLOSED_BYTES as u64
        });
        ended && !self.chain.iter().any(|link| link.scan.holes.iter().any(|hole| hole.torn && !self.is_replaced(hole.from_lsn)))
    }

    /// From where on the log is copied: the known synced LSN, or the first of the nearly empty segments at its end.
    fn cut_lsn(&self) -> u64 {
        let oldest = self.chain.first().map_or((0, 0), |link| (link.header.number, link.header.first_lsn));
        if self.newest_number - oldest.0 >= index::SEGMENT_SPAN_MAX / 2 {
            // So many openings since the oldest segment began that its number would soon be too far back.
            return oldest.1;
        }
        let mut cut_lsn = self.synced_lsn;
        let mut links = self.chain.iter().rev().peekable();
        while let Some(link) = links.next() {
            let used = link.scan.end - format::DATA_START;
            let splits = links.peek().is_some_and(|before| {
                before.header.role == Role::Recovery && before.header.run_id == link.header.run_id
            });
            if used.saturating_mul(FOLD_PART) >= link.header.segment_bytes || splits {
                break;
            }
            cut_lsn = cut_lsn.min(link.header.first_lsn);
        }
        cut_lsn
    }

    /// Applies what was accepted, writes anew what must not rest on the page cache, and begins the run.
    fn recover(
        self,
        storage: Arc<dyn Storage>,
        entropy: Entropy,
        options: &Checked,
        store: &StoreFile,
        shard_count: usize,
    ) -> Result<Opened, Error> {
        let clean = self.is_clean();
        let cut_lsn = self.cut_lsn();
        let (time, jump) = StoreTime::start(Arc::clone(&options.clock), self.time.as_ref(), options.clock_jump_max_ms);
        let now_ms = time.now_ms();
        let mut report = OpenReport {
            clean,
            segments: self.chain.len() as u64,
            records: self.chain.iter().map(|link| link.scan.states.len() as u64).sum(),
            torn: self.torn(),
            header_copies_bad: self.header_copies_bad,
            clock_jump_held_ms: jump.map_or(0, |jump| jump.wall_ms.abs_diff(jump.expected_wall_ms)),
            ..OpenReport::default()
        };
        let replaced = self.replaced;
        let next_first_lsn = self.next_first_lsn;
        let mut intervals = replaced.clone();
        intervals.push((cut_lsn, next_first_lsn));
        let intervals = merged(intervals);
        let is_in = |intervals: &[(u64, u64)], lsn| intervals.iter().any(|(from, to)| (*from..*to).contains(&lsn));

        let (lives, states): (Vec<_>, Vec<_>) = self
            .chain
            .into_iter()
            .map(|link| (Arc::new(Life::new(link.found.name, &link.header, link.found.data)), link.scan.states))
            .unzip();
        let oldest_live = lives.iter().map(|life| life.number).min().unwrap_or(1).max(self.oldest_live);
        let mut table = Table {
            shards: new_shards(shard_count, options),
            seed: HashSeed(store.hash_seed),
            live: Live::new(lives.iter().cloned()),
            oldest_live,
        };
        for (life, offsets) in lives.iter().zip(&states) {
            for offset in offsets {
                let lsn = life.first_lsn + u64::from(*offset);
                if !is_in(&replaced, lsn) {
                    table.apply(Address { segment: life.number, offset: *offset })?;
                }
            }
        }

        let whole = |life: &&Arc<Life>| is_in(&intervals, life.first_lsn) && is_in(&intervals, life.end_lsn() - 1);
        let kept: Vec<_> = lives.iter().filter(|life| !whole(life)).cloned().collect();
        let failed = |error| Error::io("drawing random numbers", error);
        let run = Run {
            storage,
            store_id: store.store_id,
            run_id: entropy.bytes().map_err(failed)?,
            entropy,
            time,
            segment_bytes_plan: options.segment_bytes_plan,
        };
        let start = Start {
            previous: kept.iter().map(|life| life.number).max().unwrap_or(0),
            first_lsn: next_first_lsn,
            bytes: options.segment_bytes_first,
            role: Role::Recovery,
        };
        let past = Past {
            newest_number: self.newest_number,
            oldest_live,
            synced_lsn: self.synced_lsn,
            spares: self.spares,
            next_index: self.next_index,
        };
        let log = Log::begin(run, start, kept.clone(), past)?;
        let commit = Commit::new(self.synced_lsn);

        // An expired record still hides the older ones of its key; with no older ones left, it has no use.
        let all_replaced = kept.is_empty();
        let mut copies = blake3::Hasher::new();
        let mut draft = Draft::new();
        for (life, offsets) in lives.iter().zip(&states) {
            for offset in offsets {
                let lsn = life.first_lsn + u64::from(*offset);
                let address = Address { segment: life.number, offset: *offset };
                if is_in(&replaced, lsn) || !is_in(&intervals, lsn) {
                    continue;
                }
                let record = life.state_record(*offset)?;
                if !table.is_latest(address, &record) {
                    continue;
                }
                if all_replaced && state::apply(&record).observed(now_ms, None) == State::Absent {
                    table.remove(address, &record);
                    continue;
                }
                draft.refill(&record);
                let copy = log.append(&mut draft, &commit)?.address;
                let live = log.live().read();
                let written = live.get(copy.segment).expect("what was just appended is alive");
                copies.update(written.data.view(copy.offset.into(), draft.len()));
                table.replace(address, &record, copy);
                report.copied += 1;
            }
        }
        let digest = digest(&copies);
        let first_kept = kept.iter().map(|life| life.first_lsn).min().unwrap_or(next_first_lsn);
        let mut carried = intervals.clone();
        carried.retain(|(_, to)| *to > first_kept || *to == next_first_lsn);
        let mut seal = Draft::sealed(report.copied, digest, &carried);
        let end = log.append(&mut seal, &commit)?.end;
        commit.wait(end, &|| log.sync())?;

        let given_up = lives.iter().filter(whole);
        let given_up = given_up.map(|life| Spare { name: life.name.clone(), bytes: life.bytes }).collect();
        table.live = Live::default();
        drop((lives, kept));
        log.recovered(given_up);
        table.note(&log.live().read(), now_ms, &mut report)?;
        Ok(Opened { log, commit, shards: table.shards, seed: table.seed, report })
    }

    fn torn(&self) -> u64 {
        let holes = self.chain.iter().flat_map(|link| &link.scan.holes);
        holes.filter(|hole| hole.torn && !self.is_replaced(hole.from_lsn)).count() as u64
    }
}

/// The file of a segment that no longer counts.
fn spare(found: &Found) -> Option<Spare> {
    let bytes = found.data.len();
    (bytes > format::DATA_START && bytes <= index::OFFSET_END.into()).then(|| Spare { name: found.name.clone(), bytes })
}

/// Whether the segments of one recovery hold its `Sealed`, and all the copies that it counts.
fn sealed(group: &[(&Found, &SegmentHeader, &Scan)]) -> Result<bool, Error> {
    let Some(seal) = group.iter().find_map(|(_, _, scan)| scan.sealed.as_ref()) else {
        return Ok(false);
    };
    let mut count = 0;
    let mut copies = blake3::Hasher::new();
    for (found, header, scan) in group {
        for offset in &scan.states {
            let lsn = header.first_lsn + u64::from(*offset);
            if lsn > seal.lsn {
                break;
            }
            let bytes = found.data.view(u64::from(*offset), room_behind(found, *offset));
            let seen = format::verify(bytes, header.salt, lsn).map_err(|bad| changed(&found.name, *offset, bad))?;
            copies.update(seen.bytes);
            count += 1;
        }
    }
    Ok(count == seal.count && digest(&copies) == seal.digest)
}

/// The digest that a `Sealed` carries: BLAKE3 of the copies' bytes in the order of the log, its first half.
fn digest(copies: &blake3::Hasher) -> [u8; 16] {
    let mut digest = [0; 16];
    copies.finalize_xof().fill(&mut digest);
    digest
}

fn room_behind(found: &Found, offset: u32) -> usize {
    usize::try_from(found.data.len().saturating_sub(offset.into())).unwrap_or(usize::MAX)
}

fn changed(name: &str, offset: u32, bad: Bad) -> Error {
    Error::corrupt(name, offset.into(), &format!("it changed while it was read: {bad}"))
}

/// The index as it is being built, and the segments that its addresses lie in.
#[derive(Debug)]
struct Table {
    shards: Vec<IndexShard>,
    seed: HashSeed,
    live: Live,
    oldest_live: u64,
}

impl Table {
    fn read(&self, address: Address) -> Result<StateRecord<'_>, Error> {
        let life = self.live.get(address.segment).expect("an address that was scanned lies in the chain");
        life.state_record(address.offset)
    }

    /// Makes the record at `address` the latest of its key.
    fn apply(&mut self, address: Address) -> Result<(), Error> {
        let record = self.read(address)?;
        let hash = self.seed.hash(record.scope, record.id);
        let at = shard_of(hash, self.shards.len());
        let found = self.shards.get(at).and_then(|shard| {
            shard.find(hash, self.oldest_live, |other| {
                self.read(other).is_ok_and(|other| other.scope == record.scope && other.id == record.id)
            })
        });
        let shard = self.shards.get_mut(at).expect("a shard's number is below the number of shards");
        shard.publish(hash, self.oldest_live, found, address);
        Ok(())
    }

    fn is_latest(&mut self, address: Address, record: &StateRecord<'_>) -> bool {
        self.find(address, record).2.is_some()
    }

    fn find(&mut self, address: Address, record: &StateRecord<'_>) -> (&mut IndexShard, u64, Option<index::Found>) {
        let hash = self.seed.hash(record.scope, record.id);
        let at = shard_of(hash, self.shards.len());
        let shard = self.shards.get_mut(at).expect("a shard's number is below the number of shards");
        let found = shard.find(hash, self.oldest_live, |other| other == address);
        (shard, hash, found)
    }

    /// Puts `copy` in the place of the record at `address`, which must be the latest of its key.
    fn replace(&mut self, address: Address, record: &StateRecord<'_>, copy: Address) {
        let oldest_live = self.oldest_live;
        let (shard, hash, found) = self.find(address, record);
        shard.publish(hash, oldest_live, found, copy);
    }

    fn remove(&mut self, address: Address, record: &StateRecord<'_>) {
        let (shard, _, found) = self.find(address, record);
        if let Some(found) = found {
            shard.remove(found);
        }
    }

    /// Tells every segment what lies in it, and counts.
    fn note(&self, live: &Live, now_ms: u64, report: &mut OpenReport) -> Result<(), Error> {
        for address in self.shards.iter().flat_map(|shard| shard.addresses(self.oldest_live)) {
            let life = live.get(address.segment).expect("the index names live segments alone");
            let record = life.state_record(address.offset)?;
            let unfinished = matches!(record.kind, StateKind::Reserved | StateKind::Interrupted);
            life.note(if unfinished { 0 } else { record.kept_until_ms }, unfinished);
            match state::apply(&record).observed(now_ms, None) {
                State::Absent => {}
                State::InFlight(_) | State::Done(_) => report.keys += 1,
                State::Interrupted(..) => {
                    report.keys += 1;
                    report.interrupted += 1;
                }
            }
        }
        Ok(())
    }
}

/// Which shard a key's hash belongs to; `shard_count` is a power of two.
pub(crate) fn shard_of(hash: u64, shard_count: usize) -> usize {
    index::shard_bits(hash) & (shard_count - 1)
}


fn merged(mut intervals: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    intervals.retain(|(from, to)| from < to);
    intervals.sort_unstable();
    let mut merged: Vec<(u64, u64)> = Vec::new();
    for (from, to) in intervals {
        match merged.last_mut() {
            Some((_, end)) if from <= *end => *end = (*end).max(to),
            _ => merged.push((from, to)),
        }
    }
    merged
}
