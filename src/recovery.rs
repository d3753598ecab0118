//! Opening a directory: what is there, what it means, and what must be written before the first answer.
//!
//! Decide first, write afterwards. Everything up to [`Survey::judge`] only reads; an error there has changed no byte.
//!
//! 1. **Survey.** Both header copies of every segment file are read. A recovery at the top of the chain that did not
//!    come to its `Sealed` is void. The live chain runs from the newest segment back by `previous`, down to the oldest
//!    live number that any header names; a segment missing in it is corruption.
//! 2. **Scan.** Every segment of the chain is read by positioned reads, record after record; where nothing verifies,
//!    the scan goes on eight bytes further, so one damaged record costs no other.
//! 3. **Judge.** The *known synced LSN* is the largest that any header or record claims. Below it every byte was on the
//!    disk once: a failed check is damage, and the store is refused. At or above it a failed check is what a crash
//!    leaves.
//! 4. **Apply** the records in the order of the log; of two of a key the later wins, expired or not.
//! 5. **Seal.** What lies above the known synced LSN may stand in the page cache alone. The latest record of every key
//!    touched there is copied into a recovery segment, then `Sealed` names the interval of the log that the copies
//!    replace, then one sync. Replaced intervals are never read or judged again, so the decision is made once, and a
//!    crash at any moment of a recovery changes nothing. Nearly empty segments at the end of the chain are folded in
//!    the same way, so that a store that is opened often does not grow.
//!
//! Every run appends only to segments whose header it wrote itself, and its LSNs begin beyond the range of every header
//! seen, so no token is ever given twice.

mod survey;

use std::sync::Arc;

use self::survey::{Copies, Intervals, Link, Scan, Survey};
use crate::clock::{HeldJump, StoreTime};
use crate::commit::Commit;
use crate::entropy::Entropy;
use crate::error::{Error, ErrorKind};
use crate::format::{self, Draft, Role, STORE_FILE_BYTES, StateKind, StateRecord, StoreFile, StoreFileFault};
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
        recover(survey, storage, entropy, options, &store, shard_count)
    } else {
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
            Some(header) => header.number == 1 && Scan::run(found, header)?.is_empty(),
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
    let run = new_run(Arc::clone(&storage), entropy, time, store.store_id, options)?;
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
    store_id: [u8; 16],
    options: &Checked,
) -> Result<Run, Error> {
    Ok(Run {
        storage,
        store_id,
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

/// Applies what was accepted, writes anew what must not rest on the page cache, and begins the run.
fn recover(
    survey: Survey,
    storage: Arc<dyn Storage>,
    entropy: Entropy,
    options: &Checked,
    store: &StoreFile,
    shard_count: usize,
) -> Result<Opened, Error> {
    let (time, jump) = StoreTime::start(Arc::clone(&options.clock), survey.time.as_ref(), options.clock_jump_max_ms);
    let mut report = OpenReport {
        clock_jump_held_ms: jump.map_or(0, |jump| jump.wall_ms.abs_diff(jump.expected_wall_ms)),
        ..survey.report()
    };
    let now_ms = time.now_ms();
    let cut_lsn = survey.cut_lsn();
    let chain = Chain::new(survey.chain, &survey.replaced);
    let mut replaced = survey.replaced;
    replaced.add(cut_lsn, survey.next_first_lsn);

    let keys_at_most = report.records.min(options.keys);
    let oldest_live = chain.lives.first().map_or(1, |life| life.number).max(survey.oldest_live);
    let mut table = Table {
        shards: new_shards(shard_count, options, keys_at_most),
        seed: HashSeed(store.hash_seed),
        live: Live::new(chain.lives.iter().cloned()),
        oldest_live,
    };
    for (life, offset) in chain.records() {
        table.apply(life, offset)?;
    }

    let (given_up, kept): (Vec<_>, Vec<_>) =
        chain.lives.iter().cloned().partition(|life| replaced.covers(life.first_lsn, life.end_lsn()));
    let start = Start {
        previous: kept.last().map_or(0, |life| life.number),
        first_lsn: survey.next_first_lsn,
        bytes: options.segment_bytes_first,
        role: Role::Recovery,
    };
    let past = Past {
        newest_number: survey.newest_number,
        // What this recovery gives up is given up by its seal, which is not durable yet.
        oldest_live: survey.oldest_live.max(1),
        synced_lsn: survey.synced_lsn,
        spares: survey.spares,
        next_index: survey.next_index,
    };
    // The entry of a file that a crash left may be known to the kernel alone.
    storage.sync_directory().map_err(|error| Error::io("syncing the directory", error))?;
    let run = new_run(Arc::clone(&storage), entropy, time, store.store_id, options)?;
    let log = Log::begin(run, start, kept.clone(), past)?;
    let commit = Commit::new(survey.synced_lsn);

    let above = chain.records().filter(|(life, offset)| replaced.contains(life.lsn(*offset)));
    // An expired record still hides the older ones of its key; with no older ones left, it has no use.
    let forget_expired = kept.is_empty().then_some(now_ms);
    let digest = copy(above, &mut table, &log, &commit, forget_expired, &mut report)?;
    replaced.forget_below(kept.first().map_or(survey.next_first_lsn, |life| life.first_lsn));
    let mut seal = Draft::sealed(report.copied, digest, replaced.as_slice());
    let end = log.append_patiently(&mut seal, &commit)?.end;
    commit.wait(end, &|| log.sync())?;
    write_store_file(&*storage, &StoreFile { run_number: log.newest_number(), ..*store })?;

    // Only now is what was replaced, or given up by an earlier seal that may not have been durable, out of use for
    // good.
    let spares = given_up.iter().map(|life| Spare { name: life.name.clone(), bytes: life.bytes });
    let spares = spares.chain(survey.spares_late).collect();
    // Nobody may hold a life whose file is given away.
    table.live = Live::default();
    drop((chain, given_up, kept));
    log.recovered(spares, oldest_live);
    table.note(&log.live().read(), now_ms, &mut report)?;
    Ok(Opened { jump, log, commit, shards: table.shards, seed: table.seed, report })
}

/// Copies the latest record of every key among `records` to the tail of the log; says the digest of the copies. Keys
/// that are past their retention at `forget_expired_ms` are forgotten instead.
fn copy<'a>(
    records: impl Iterator<Item = (&'a Arc<Life>, u32)>,
    table: &mut Table,
    log: &Log,
    commit: &Commit,
    forget_expired_ms: Option<u64>,
    report: &mut OpenReport,
) -> Result<[u8; 16], Error> {
    let mut copies = Copies::default();
    let mut draft = Draft::new();
    for (life, offset) in records {
        let (record, _) = life.state_record(offset)?;
        let address = Address { segment: life.number, offset };
        if !table.is_latest(address, &record) {
            continue;
        }
        if forget_expired_ms.is_some_and(|now_ms| state::apply(&record).observed(now_ms, None) == State::Absent) {
            table.remove(address, &record);
            let unfinished = matches!(record.kind, StateKind::Reserved | StateKind::Interrupted);
            report.expired_unresolved += u64::from(unfinished);
            continue;
        }
        draft.refill(&record);
        let copy = log.append_patiently(&mut draft, commit)?.address;
        let live = log.live().read();
        let written = live.get(copy.segment).expect("what was just appended is alive");
        copies.add(written.record(copy.offset));
        table.replace(address, &record, copy);
        report.copied += 1;
    }
    Ok(copies.digest())
}

/// The live chain while its records are applied and copied, oldest first.
#[derive(Debug)]
struct Chain {
    lives: Vec<Arc<Life>>,
    /// For each segment the offsets of its records that count.
    states: Vec<Vec<u32>>,
}

impl Chain {
    fn new(links: Vec<Link>, replaced: &Intervals) -> Self {
        let (lives, states) = links
            .into_iter()
            .map(|Link { found, header, scan }| {
                let life = Life::new(found.name, &header, found.data);
                let mut states = scan.states;
                states.retain(|offset| !replaced.contains(life.lsn(*offset)));
                (Arc::new(life), states)
            })
            .unzip();
        Self { lives, states }
    }

    fn records(&self) -> impl Iterator<Item = (&Arc<Life>, u32)> {
        let segments = self.lives.iter().zip(&self.states);
        segments.flat_map(|(life, offsets)| offsets.iter().map(move |offset| (life, *offset)))
    }
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
        life.state_record(address.offset).map(|(record, _)| record)
    }

    /// Makes the record at `offset` of `life` the latest of its key.
    fn apply(&mut self, life: &Life, offset: u32) -> Result<(), Error> {
        let (record, _) = life.state_record(offset)?;
        let address = Address { segment: life.number, offset };
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
            let (record, bytes) = life.state_record(address.offset)?;
            let unfinished = matches!(record.kind, StateKind::Reserved | StateKind::Interrupted);
            if unfinished {
                life.note_unfinished(record.kept_until_ms, bytes);
            } else {
                life.note_finished(record.kept_until_ms);
            }
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
