//! Opening a directory: what is there, what it means, and what must be written before the first answer.
//!
//! Decide first, write afterwards. Everything up to [`Survey::judge`] only reads; an error there has changed no byte.
//!
//! 1. **Survey.** Both header copies of every segment file are read. A recovery at the top of the chain that did not
//!    come to its `Sealed` is void. The live chain runs from the newest segment back by `previous`, down to the oldest
//!    live number that any header names; a segment missing in it is corruption.
//! 2. **Read.** Every segment of the chain is read by positioned reads, record after record; where nothing verifies,
//!    the scan goes on to the next head that does, so one damaged record costs no other. Of a segment that lies wholly
//!    below the *known synced LSN*, the largest that any header or record claims, the hint serves as well, and its
//!    records are checked when they are first used. Every record goes into the index at once; of two of a key the one
//!    that is later in the log wins, expired or not, so segments are read in any order, and by several threads.
//! 3. **Judge.** Below the known synced LSN every byte was on the disk once: a failed check is damage, and the store is
//!    refused. At or above it a failed check is what a crash leaves.
//! 4. **Seal.** What lies above the known synced LSN may stand in the page cache alone. The latest record of every key
//!    touched there is copied into a recovery segment, then `Sealed` names the interval of the log that the copies
//!    replace, then one sync. Replaced intervals are never read or judged again, so the decision is made once, and a
//!    crash at any moment of a recovery changes nothing. Nearly empty segments at the end of the chain are folded in
//!    the same way, so that a store that is opened often does not grow.
//!
//! Every run appends only to segments whose header it wrote itself, and its LSNs begin beyond the range of every header
//! seen, so no token is ever given twice.

mod ahead;
mod heads;
mod survey;
mod table;

use std::ops::ControlFlow;
use std::sync::Arc;

use self::ahead::Copies;
use self::survey::Survey;
use self::table::Table;
pub(crate) use self::table::shard_of;
use crate::clock::{HeldJump, StoreTime};
use crate::commit::Commit;
use crate::entropy::Entropy;
use crate::error::{Error, ErrorKind};
use crate::format::{self, Draft, Role, STORE_FILE_BYTES, StateKind, StoreFile, StoreFileFault};
use crate::hint;
use crate::index::{Address, IndexShard};
use crate::key::HashSeed;
use crate::log::{Log, Past, Run, Spare, Start};
use crate::options::Checked;
use crate::scan::Reading;
use crate::segment::{self, Found, Life};
use crate::state::{self, State};
use crate::stats::{OnProgress, OpenReport, Progress};
use crate::storage::{LOCK_FILE, Storage};
use crate::sync::{Ordering, UnmodelledAtomicU64};

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
    /// The wall clock was not believed.
    pub(crate) jump: Option<HeldJump>,
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
/// `ForeignDirectory`, naming the file; `UnsupportedFormat` and `Corrupt`, if the store file says so.
pub(crate) fn refuse_foreign(storage: &dyn Storage) -> Result<(), Error> {
    let names = list(storage)?;
    if names.iter().any(|name| name == STORE_FILE) {
        return read_store_file(storage).map(|_| ());
    }
    let ours = |name: &str| {
        let fixed = [LOCK_FILE, STORE_FILE_PART, LOST_AND_FOUND].contains(&name);
        fixed || segment::file_index(name).is_some() || hint::file_index(name).is_some()
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
        let decided = decide(&*storage, &store, options, files, shard_count)?;
        let opened = recover(decided, Arc::clone(&storage), entropy, options, &store)?;
        hint::remove_orphans(&*storage, &names);
        Ok(opened)
    } else {
        // Only a store that has worked leaves hints.
        if let Some(name) = names.iter().find(|name| hint::file_index(name).is_some()) {
            return Err(Error::corrupt(STORE_FILE, 0, &format!("it is missing beside {name}")));
        }
        create(storage, entropy, options, files, shard_count)
    }
}

fn list(storage: &dyn Storage) -> Result<Vec<String>, Error> {
    storage.list().map_err(|error| Error::io("listing the directory", error))
}

fn read_store_file(storage: &dyn Storage) -> Result<StoreFile, Error> {
    let bytes = storage.read(STORE_FILE, STORE_FILE_BYTES).map_err(|error| match error.kind() {
        std::io::ErrorKind::FileTooLarge => Error::corrupt(STORE_FILE, 0, "longer than a store file"),
        _ => Error::io(format!("reading {STORE_FILE}"), error),
    })?;
    StoreFile::decode(&bytes).map_err(|fault| match fault {
        StoreFileFault::Foreign => {
            Error::new(ErrorKind::ForeignDirectory, format!("{STORE_FILE} was not written by this crate"))
        }
        StoreFileFault::Version(version) => unsupported(STORE_FILE, version),
        StoreFileFault::Damaged => Error::corrupt(STORE_FILE, 0, "its checksum fails"),
    })
}

fn write_store_file(storage: &dyn Storage, store: &StoreFile) -> Result<(), Error> {
    storage.publish(STORE_FILE, &store.encode()).map_err(|error| Error::io(format!("writing {STORE_FILE}"), error))
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
            Some(header) => {
                let life = Life::new(found.name.clone(), header, Arc::clone(&found.data));
                header.number == 1 && Reading::of(&life, &mut Vec::new())?.scan.is_empty()
            }
            None => found.never_lived(),
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
    let store = StoreFile {
        store_id: entropy.bytes().map_err(no_entropy)?,
        hash_seed: entropy.bytes().map_err(no_entropy)?,
        created_ms: time.now_ms(),
        run_number: 1,
    };
    let run = new_run(Arc::clone(&storage), entropy, time, &store, options)?;
    let start = Start { previous: 0, first_lsn: 0, bytes: options.segment_bytes_first, role: Role::Rolled };
    let past = Past { newest_number: 0, oldest_live: 1, synced_lsn: 0, spares: Vec::new(), next_index: 1 };
    let log = Log::begin(run, start, Vec::new(), past)?;
    write_store_file(&*storage, &store)?;
    let commit = Commit::new(format::DATA_START);
    let shards = new_shards(shard_count, options, 0);
    let report = OpenReport { created: true, clean: true, ..OpenReport::default() };
    Ok(Opened { jump: None, log, commit, shards, seed: HashSeed(store.hash_seed), report })
}

fn no_entropy(error: std::io::Error) -> Error {
    Error::io("drawing random numbers", error)
}

fn new_run(
    storage: Arc<dyn Storage>,
    entropy: Entropy,
    time: StoreTime,
    store: &StoreFile,
    options: &Checked,
) -> Result<Run, Error> {
    Ok(Run {
        storage,
        store_id: store.store_id,
        run_id: entropy.bytes().map_err(no_entropy)?,
        entropy,
        time,
        segment_bytes_plan: options.segment_bytes_plan,
    })
}

/// Empty shards for the planned number of keys, with room at once for `keys`.
fn new_shards(shard_count: usize, options: &Checked, keys: u64) -> Vec<IndexShard> {
    let each = |keys: u64| keys.div_ceil(shard_count as u64);
    (0..shard_count).map(|_| IndexShard::planned(each(options.keys)).with_room_for(each(keys))).collect()
}

/// Reads what an opening has to read, and tells how far it has come.
struct Reader<'a> {
    storage: &'a dyn Storage,
    store_id: [u8; 16],
    progress: Option<&'a OnProgress>,
    bytes: u64,
    bytes_read: UnmodelledAtomicU64,
    /// Segments that were known from their hints.
    hints: UnmodelledAtomicU64,
}

impl<'a> Reader<'a> {
    /// One thread is not worth its start for less.
    const BYTES_A_THREAD: u64 = 16 << 20;

    fn new(storage: &'a dyn Storage, store: &StoreFile, options: &'a Checked, files: &[Found]) -> Self {
        Self {
            storage,
            store_id: store.store_id,
            progress: options.progress.as_ref(),
            bytes: files.iter().map(|found| found.data.len()).sum(),
            bytes_read: UnmodelledAtomicU64::new(0),
            hints: UnmodelledAtomicU64::new(0),
        }
    }

    /// How many threads are to read so many bytes.
    fn threads(&self, bytes: u64) -> usize {
        let enough = usize::try_from(bytes / Self::BYTES_A_THREAD).unwrap_or(usize::MAX);
        // Asking for the number of cores reads files, too.
        if enough < 2 || cfg!(loom) {
            1
        } else {
            enough.min(std::thread::available_parallelism().map_or(1, usize::from))
        }
    }

    /// So many more bytes of the log are known.
    ///
    /// # Errors
    ///
    /// `Cancelled`, when whoever is told says so.
    fn tell(&self, bytes: u64) -> Result<(), Error> {
        let bytes_read = self.bytes_read.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let Some(OnProgress(tell)) = self.progress else { return Ok(()) };
        match tell(&Progress { bytes_read: bytes_read.min(self.bytes), bytes: self.bytes }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => {
                Err(Error::new(ErrorKind::Cancelled, "the opening was cancelled; nothing was changed"))
            }
        }
    }
}

/// What an opening has come to before its first write.
struct Decided {
    survey: Survey,
    table: Table,
    time: StoreTime,
    jump: Option<HeldJump>,
    report: OpenReport,
}

/// Reads all there is, and decides whether the store may be opened. Writes nothing.
fn decide(
    storage: &dyn Storage,
    store: &StoreFile,
    options: &Checked,
    files: Vec<Found>,
    shard_count: usize,
) -> Result<Decided, Error> {
    let reader = Reader::new(storage, store, options, &files);
    reader.tell(0)?;
    let mut survey = Survey::take(store, files)?;
    let (time, jump) =
        StoreTime::start(Arc::clone(&options.clock), survey.known.time.mark.as_ref(), options.clock_jump_max_ms);
    let keys = survey.bytes().div_ceil(options.pair_bytes).min(options.keys);
    let table = survey.table(new_shards(shard_count, options, keys), time.now_ms());
    survey.read(&table, &reader)?;
    survey.judge()?;
    let report = OpenReport {
        hints: reader.hints.load(Ordering::Relaxed),
        clock_jump_held_ms: jump.map_or(0, |jump| jump.wall_ms.abs_diff(jump.expected_wall_ms)),
        ..survey.report()
    };
    Ok(Decided { survey, table, time, jump, report })
}

/// Writes anew what must not rest on the page cache, seals it, and begins the run.
fn recover(
    Decided { survey, mut table, time, jump, mut report }: Decided,
    storage: Arc<dyn Storage>,
    entropy: Entropy,
    options: &Checked,
    store: &StoreFile,
) -> Result<Opened, Error> {
    let now_ms = time.now_ms();
    let cut_lsn = survey.cut_lsn();
    let lives: Vec<_> = survey.chain.iter().map(|link| Arc::clone(&link.life)).collect();
    let mut replaced = survey.known.replaced.clone();
    replaced.add(cut_lsn, survey.heads.next_first_lsn);
    let oldest_live = lives.first().map_or(1, |life| life.number).max(survey.heads.oldest_live);

    let (given_up, kept): (Vec<_>, Vec<_>) =
        lives.iter().cloned().partition(|life| replaced.covers(life.first_lsn, life.end_lsn()));
    let start = Start {
        previous: kept.last().map_or(0, |life| life.number),
        first_lsn: survey.heads.next_first_lsn,
        bytes: options.segment_bytes_first,
        role: Role::Recovery,
    };
    let past = Past {
        newest_number: survey.heads.newest_number,
        // What this recovery gives up is given up by its seal, which is not durable yet.
        oldest_live: survey.heads.oldest_live.max(1),
        synced_lsn: survey.known.synced_lsn,
        spares: survey.spares,
        next_index: survey.heads.next_index,
    };
    // The entry of a file that a crash left may be known to the kernel alone.
    storage.sync_directory().map_err(|error| Error::io("syncing the directory", error))?;
    let run = new_run(Arc::clone(&storage), entropy, time, store, options)?;
    let log = Log::begin(run, start, kept.clone(), past)?;
    let commit = Commit::new(survey.known.synced_lsn);

    // An expired record still hides the older ones of its key; with no older ones left, it has no use.
    let forget_expired = kept.is_empty().then_some(now_ms);
    let above = lives.iter().filter(|life| life.end_lsn() > cut_lsn);
    let counts = |lsn: u64| lsn >= cut_lsn && !survey.known.replaced.contains(lsn);
    let digest = copy(above, counts, &table, &log, &commit, forget_expired, &mut report)?;
    replaced.forget_below(kept.first().map_or(survey.heads.next_first_lsn, |life| life.first_lsn));
    let mut seal = Draft::sealed(report.copied, digest, replaced.as_slice());
    let end = log.append_patiently(&mut seal, &commit)?.end;
    commit.wait(end, &|| log.sync())?;
    write_store_file(&*storage, &StoreFile { run_number: log.newest_number(), ..*store })?;

    // Only now is what was replaced, or given up by an earlier seal that may not have been durable, out of use for
    // good.
    let spares = given_up.iter().map(|life| Spare { name: life.name.clone(), bytes: life.bytes });
    let spares = spares.chain(survey.spares_late).collect();
    // Nobody may hold a life whose file is given away.
    table.let_go();
    drop((survey.chain, lives, given_up, kept));
    log.recovered(spares, oldest_live);
    let (shards, known) = table.finish();
    report.keys = known.keys;
    report.interrupted = known.interrupted;
    Ok(Opened { jump, log, commit, shards, seed: HashSeed(store.hash_seed), report })
}

/// Copies the latest record of every key among those records of `lives` whose LSN `counts` to the tail of the log; says
/// the digest of the copies. Keys that are past their retention at `forget_expired_ms` are forgotten instead.
fn copy<'a>(
    lives: impl Iterator<Item = &'a Arc<Life>>,
    counts: impl Fn(u64) -> bool,
    table: &Table,
    log: &Log,
    commit: &Commit,
    forget_expired_ms: Option<u64>,
    report: &mut OpenReport,
) -> Result<[u8; 16], Error> {
    let mut copies = Copies::default();
    let mut draft = Draft::new();
    let mut buffer = Vec::new();
    for life in lives {
        let states = Reading::of(life, &mut buffer)?.states;
        for offset in states.into_iter().filter(|offset| counts(life.lsn(*offset))) {
            let (record, bytes) = life.state_record(offset)?;
            let address = Address { segment: life.number, offset };
            if !table.is_latest(address, &record) {
                continue;
            }
            if forget_expired_ms.is_some_and(|now_ms| state::apply(&record).observed(now_ms, None) == State::Absent) {
                table.remove(address, &record, bytes);
                let unfinished = matches!(record.kind, StateKind::Reserved | StateKind::Interrupted);
                report.expired_unresolved += u64::from(unfinished);
                continue;
            }
            draft.refill(&record);
            let copy = log.append_patiently(&mut draft, commit)?.address;
            let live = log.live().read();
            let written = live.get(copy.segment).expect("what was just appended is alive");
            copies.add(written.record(copy.offset));
            table.replace(address, &record, bytes, copy, written);
            report.copied += 1;
        }
    }
    Ok(copies.digest())
}
