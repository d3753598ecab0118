//! The log: a chain of segments, a tail that grows, and the files that wait for their next life.
//!
//! Invariants:
//!
//! - The tail lock covers position, checksum and write, so the written prefix of the log is contiguous, and the order
//!   of appends is the order of LSNs.
//! - Every append leaves room for the [`format::Next`] record, and for `Closed`, so a segment can always be ended.
//! - A segment's header is durable before its first record, and its predecessor's `Next` is written after that.
//! - A file gets a new life only when nothing in it counts any more: every copy made out of it is durable, or a durable
//!   `Sealed` has replaced it; and when nobody holds its old life. The header of the new life says so, and one of its
//!   copies is durable before the other touches what the file said before.
//! - A failed write poisons; a failed preparation of a segment promises nothing to anyone and is tried again.
//! - Nobody makes a segment ready under the tail's lock: an append that finds none says so, and its caller makes one
//!   ready, or has it made, before it tries again. So an append never waits for the disk.
//!
//! Order of locks: files, then tail, then the segment that is ready.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::StoreTime;
use crate::commit::Commit;
use crate::entropy::Entropy;
use crate::error::{Error, ErrorKind};
use crate::format::{self, Closed, Draft, Next, Role, SegmentHeader};
use crate::hint;
use crate::index::{self, Address};
use crate::key::HashSeed;
use crate::left::Whose;
use crate::retention::SEGMENT_BYTES_STEP;
use crate::segment::{self, Life};
use crate::storage::{Access, Segment, Storage};
use crate::sync::{AtomicU64, Mutex, Ordering, RwLock};

/// Room that every append leaves at the end of a segment.
const END_ROOM: u64 = (format::NEXT_BYTES + format::CLOSED_BYTES) as u64;

/// Segment numbers of live segments span less than this, so that the index can tell a live one from a dead one.
const LIVE_SPAN_MAX: u64 = index::SEGMENT_SPAN_MAX - 8;

/// Pages are readied for writing in steps of this many bytes.
const POPULATE_BYTES: u64 = 64 << 10;

/// What stays the same through a run.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) entropy: Entropy,
    pub(crate) time: StoreTime,
    pub(crate) store_id: [u8; 16],
    pub(crate) run_id: [u8; 16],
    /// Segments double in size up to this.
    pub(crate) segment_bytes_plan: u64,
}

/// Where the next segment of a log begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Start {
    pub(crate) previous: u64,
    pub(crate) first_lsn: u64,
    pub(crate) bytes: u64,
    pub(crate) role: Role,
}

/// What earlier runs left, as far as a new run must go on from it.
#[derive(Debug)]
pub(crate) struct Past {
    /// The highest number in any header.
    pub(crate) newest_number: u64,
    /// The oldest live number that every header of this run may name, even if recovery does not come to its end.
    pub(crate) oldest_live: u64,
    pub(crate) synced_lsn: u64,
    pub(crate) spares: Vec<Spare>,
    /// The first index that no segment file's name carries.
    pub(crate) next_index: u32,
}

/// A file that waits for its next life.
#[derive(Debug)]
pub(crate) struct Spare {
    pub(crate) name: String,
    pub(crate) bytes: u64,
}

/// Where a record was put.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Appended {
    pub(crate) address: Address,
    /// The LSN of the record's first byte.
    pub(crate) lsn: u64,
    /// The LSN just behind the record: durable once the durable LSN has reached it.
    pub(crate) end: u64,
    /// A successor should be made ready, or a rolled segment waits for its sync.
    pub(crate) housekeeping_due: bool,
}

/// Why a record was not appended. Nothing was written.
#[derive(Debug)]
pub(crate) enum NotAppended {
    /// The segment is full and the next one is not ready: see [`Log::prepare_successor`].
    NoRoom,
    /// Anything else.
    Failed(Error),
}

impl From<Error> for NotAppended {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// A segment that has served its time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Over {
    pub(crate) number: u64,
    /// Keys in it are unfinished: they must stand elsewhere before it is given up.
    pub(crate) unfinished: bool,
}

/// The append side of the log and the table of its live segments.
#[derive(Debug)]
pub(crate) struct Log {
    run: Run,
    /// `None` once the store is closed: then nothing of its files is mapped any more.
    tail: Mutex<Option<Tail>>,
    live: RwLock<Live>,
    /// The tail's successor, if one was prepared. Only who holds `files` puts one here.
    ready: Mutex<Option<Life>>,
    files: Mutex<Files>,
    /// Number of the oldest live segment. Release when it moves, Acquire in readers; a reader that holds a shard lock
    /// keeps what it found, since who moves it passes through every shard lock before a file is given away.
    oldest_live: AtomicU64,
    /// Number of the segment with which this run began.
    begun_number: u64,
}

#[derive(Debug)]
struct Tail {
    life: Arc<Life>,
    offset: u64,
    role: Role,
    /// Rolled segments that no sync has covered yet, oldest first.
    rolled: Vec<Arc<Life>>,
    /// The store is being closed: nothing but the end mark is appended.
    closing: bool,
    /// The helper was told that a successor will be needed.
    asked: bool,
    /// What the successor must hold at least, in bytes of file: more than planned for a record that is very large.
    needed_bytes: u64,
    /// Offset up to which pages were readied for writing.
    populated: u64,
}

/// Live segments by number; numbers that recovery skipped are gaps.
#[derive(Debug, Default)]
pub(crate) struct Live {
    base: u64,
    lives: VecDeque<Option<Arc<Life>>>,
}

#[derive(Debug)]
struct Files {
    spares: Vec<Spare>,
    /// Lives that ended, and that somebody may still be looking at.
    retired: Vec<Arc<Life>>,
    /// The highest number that any header carries, so that no number is given twice.
    newest_number: u64,
    /// The store is closed: nothing is mapped any more.
    closed: bool,
    next_index: u32,
}

impl Live {
    /// The segments of a chain, in any order.
    pub(crate) fn new(chain: impl IntoIterator<Item = Arc<Life>>) -> Self {
        let mut chain: Vec<_> = chain.into_iter().collect();
        chain.sort_by_key(|life| life.number);
        let mut live = Self::default();
        for life in chain {
            live.push(life);
        }
        live
    }

    /// The segment that `address` lies in, if it is alive.
    pub(crate) fn get(&self, number: u64) -> Option<&Arc<Life>> {
        let at = usize::try_from(number.checked_sub(self.base)?).ok()?;
        self.lives.get(at)?.as_ref()
    }

    /// Live segments, oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Life>> {
        self.lives.iter().flatten()
    }

    fn push(&mut self, life: Arc<Life>) {
        if self.lives.is_empty() {
            self.base = life.number;
        }
        while self.base.saturating_add(self.lives.len() as u64) < life.number {
            self.lives.push_back(None);
        }
        self.lives.push_back(Some(life));
    }

    fn remove_below(&mut self, oldest_live: u64) -> Vec<Arc<Life>> {
        let mut removed = Vec::new();
        while self.base < oldest_live && !self.lives.is_empty() {
            removed.extend(self.lives.pop_front().flatten());
            self.base += 1;
        }
        removed
    }
}

impl Log {
    /// Begins a run: gives the segment `start` its life and makes it the tail behind the segments in `chain`.
    ///
    /// # Errors
    ///
    /// The failure to prepare the segment; nothing that was there before has changed.
    pub(crate) fn begin(run: Run, start: Start, chain: Vec<Arc<Life>>, past: Past) -> Result<Self, Error> {
        let mut files = Files {
            spares: past.spares,
            retired: Vec::new(),
            newest_number: past.newest_number,
            closed: false,
            next_index: past.next_index,
        };
        let oldest_live = past.oldest_live;
        let life = Arc::new(files.prepare(&run, start, past.synced_lsn, oldest_live)?);
        let mut live = Live::new(chain);
        live.push(Arc::clone(&life));
        let begun_number = life.number;
        Ok(Self {
            run,
            begun_number,
            tail: Mutex::new(Some(Tail::new(life, start.role))),
            live: RwLock::new(live),
            ready: Mutex::new(None),
            files: Mutex::new(files),
            oldest_live: AtomicU64::new(oldest_live),
        })
    }

    /// Store time, which every part of the run reads from one place.
    pub(crate) fn time(&self) -> &StoreTime {
        &self.run.time
    }

    /// Whose log it is, in this process.
    pub(crate) fn whose(&self) -> Whose {
        (self.run.storage.number(), self.run.store_id)
    }

    /// The live segments. A reader of records holds a shard lock, too, or knows that nothing retires.
    pub(crate) fn live(&self) -> &RwLock<Live> {
        &self.live
    }

    /// Number of the oldest live segment.
    pub(crate) fn oldest_live(&self) -> u64 {
        self.oldest_live.load(Ordering::Acquire)
    }

    /// How many segments are alive.
    pub(crate) fn segments(&self) -> u64 {
        self.live.read().iter().count() as u64
    }

    /// Appends a record.
    ///
    /// # Errors
    ///
    /// `NoRoom`; `Closed`, `Poisoned`; `Full` when the log has as many segments as can be told apart. A failed write
    /// poisons the store.
    pub(crate) fn append(&self, draft: &mut Draft, commit: &Commit) -> Result<Appended, NotAppended> {
        let mut tail = self.tail.lock();
        let tail = tail.as_mut().filter(|tail| !tail.closing).ok_or_else(Error::closed)?;
        if let Some(failure) = commit.failure() {
            return Err(failure.into());
        }
        let mut rolled = false;
        while tail.offset + draft.len() as u64 + END_ROOM > tail.life.bytes {
            self.roll(tail, draft.len() as u64, commit)?;
            rolled = true;
        }
        let mut appended = tail.write(draft, commit)?;
        // While segments are small and grow, a hot writer would be at their end before the helper: ask at once.
        let growing = rolled && tail.life.bytes < self.run.segment_bytes_plan;
        let asks = !tail.asked && (growing || tail.offset > tail.life.bytes / 2);
        tail.asked |= asks;
        appended.housekeeping_due = rolled || asks;
        Ok(appended)
    }

    /// Appends a record, and makes the next segment ready first where there is none: for who may wait for the disk.
    ///
    /// # Errors
    ///
    /// As [`Log::append`] and [`Log::prepare_successor`].
    pub(crate) fn append_patiently(&self, draft: &mut Draft, commit: &Commit) -> Result<Appended, Error> {
        loop {
            match self.append(draft, commit) {
                Ok(appended) => return Ok(appended),
                Err(NotAppended::NoRoom) => self.prepare_successor(commit)?,
                Err(NotAppended::Failed(error)) => return Err(error),
            }
        }
    }

    /// Makes durable what was appended before the call: the rolled segments, and only when there are none, the tail. Who
    /// waits for more than a rolled segment calls again; who does not spares the writers of the tail the faults that a
    /// sync of it costs them. Says how far. Only [`Commit::wait`] calls it, one at a time.
    ///
    /// # Errors
    ///
    /// The first sync that failed.
    pub(crate) fn sync(&self) -> Result<u64, Error> {
        let (rolled, life, end) = {
            let tail = self.tail.lock();
            let tail = tail.as_ref().ok_or_else(Error::closed)?;
            (tail.rolled.clone(), Arc::clone(&tail.life), tail.end())
        };
        let failed = |life: &Life| {
            let what = format!("syncing {}", life.name);
            move |error| Error::io(what, error)
        };
        let Some(last) = rolled.last() else {
            life.data.sync().map_err(failed(&life))?;
            return Ok(end);
        };
        for life in &rolled {
            if life.data.detach().is_err() {
                // Locked memory, say, stays where it is: then the sync takes page by page.
            }
            life.data.sync().map_err(failed(life))?;
        }
        if let Some(tail) = self.tail.lock().as_mut() {
            tail.rolled.drain(..rolled.len());
        }
        Ok(last.end_lsn())
    }

    /// The number of the segment at the tail.
    pub(crate) fn newest_number(&self) -> u64 {
        self.tail.lock().as_ref().map_or(0, |tail| tail.life.number)
    }

    /// The LSN behind the last record.
    pub(crate) fn end(&self) -> u64 {
        self.tail.lock().as_ref().map_or(0, Tail::end)
    }

    /// The LSN behind the last rolled segment that waits for a sync.
    pub(crate) fn rolled_end(&self) -> Option<u64> {
        self.tail.lock().as_ref()?.rolled.last().map(|life| life.end_lsn())
    }

    /// Makes the next segment ready, unless it is already or there is no need yet.
    ///
    /// # Errors
    ///
    /// `Full` or `Io`; to be tried again.
    pub(crate) fn prepare_successor(&self, commit: &Commit) -> Result<(), Error> {
        let mut files = self.files.lock();
        let (start, needed_bytes, unfit, is_ready) = {
            let tail = self.tail.lock();
            let Some(tail) = tail.as_ref().filter(|tail| tail.asked) else { return Ok(()) };
            let (start, needed_bytes) = (self.successor(tail), tail.needed_bytes);
            // Looked at before the tail can move on.
            let mut ready = self.ready.lock();
            let unfit = ready.take_if(|life| life.first_lsn != start.first_lsn || life.bytes < needed_bytes);
            (start, needed_bytes, unfit, ready.is_some())
        };
        files.spares.extend(unfit.map(|life| Spare { name: life.name, bytes: life.bytes }));
        if !is_ready && !files.closed {
            let start = Start { bytes: start.bytes.max(needed_bytes), ..start };
            let life = files.prepare(&self.run, start, commit.durable(), self.oldest_live())?;
            *self.ready.lock() = Some(life);
        }
        Ok(())
    }

    /// Recovery has come to its end: from here on the segments of this run hold new work.
    pub(crate) fn recovered(&self, spares: Vec<Spare>, oldest_live: u64) {
        self.oldest_live.store(oldest_live, Ordering::Release);
        if let Some(tail) = self.tail.lock().as_mut() {
            tail.role = Role::Rolled;
        }
        self.files.lock().spares.extend(spares);
    }

    /// Refuses all further records but the end mark.
    pub(crate) fn refuse(&self) {
        if let Some(tail) = self.tail.lock().as_mut() {
            tail.closing = true;
        }
    }

    /// Appends the end mark of the run, for which every append has left room.
    ///
    /// # Errors
    ///
    /// `Closed`, `Poisoned`; a failed write poisons the store.
    pub(crate) fn close(&self, unfinished: u64, commit: &Commit) -> Result<Appended, Error> {
        let mut tail = self.tail.lock();
        let tail = tail.as_mut().ok_or_else(Error::closed)?;
        if let Some(failure) = commit.failure() {
            return Err(failure);
        }
        tail.write(&mut Draft::closed(&Closed { time: self.run.time.mark(), unfinished }), commit)
    }

    /// Lets go of every segment, and with them of the last hold on the directory's lock. Nobody may be looking at a
    /// record.
    pub(crate) fn let_go(&self) {
        *self.tail.lock() = None;
        *self.live.write() = Live::default();
        let mut files = self.files.lock();
        files.closed = true;
        files.retired.clear();
        *self.ready.lock() = None;
    }

    /// Leaves the hint of one segment that has ended, is durable, and has none yet: the newest, of this run alone or of
    /// any. `false`: there is none such.
    pub(crate) fn leave_hint(&self, of_this_run: bool, seed: &HashSeed, commit: &Commit) -> bool {
        let newest_number = self.newest_number();
        let oldest_number = if of_this_run { self.begun_number } else { 0 };
        let due = |life: &&Arc<Life>| {
            (oldest_number..newest_number).contains(&life.number)
                && life.end_lsn() <= commit.durable()
                && !life.hint_is_done()
        };
        let due = self.live.read().iter().filter(due).last().cloned();
        let is_due = due.is_some();
        if let Some(life) = due {
            hint::leave(&*self.run.storage, self.run.store_id, &life, seed);
        }
        is_due
    }

    /// The oldest segment, if it is durable, every finished key in it is past its retention at `now_ms`, and giving it
    /// up frees room: its own, or that of a segment behind it that can follow.
    pub(crate) fn retirable(&self, now_ms: u64, commit: &Commit) -> Option<Over> {
        let active = self.tail.lock().as_ref()?.life.number;
        let live = self.live.read();
        let mut over = live
            .iter()
            .take_while(|life| life.number < active && life.end_lsn() <= commit.durable() && life.is_over(now_ms))
            .peekable();
        let oldest = *over.peek()?;
        let unfinished = oldest.unfinished() > 0;
        let worth_it = over.any(|life| life.frees_room(now_ms));
        worth_it.then_some(Over { number: oldest.number, unfinished })
    }

    /// How far the log must be durable before the file of segment `number` may be given away.
    pub(crate) fn superseded_end(&self, number: u64) -> u64 {
        self.live.read().get(number).map_or(0, |life| life.superseded_end())
    }

    /// Gives up the segment `number`, the oldest: from now on an address in it is dead. `pass` goes once through every
    /// shard lock, after which nobody can still be looking at it.
    pub(crate) fn retire(&self, number: u64, pass: impl FnOnce()) {
        let oldest_live = {
            let live = self.live.read();
            live.iter().map(|life| life.number).find(|other| *other > number).unwrap_or(number)
        };
        self.oldest_live.store(oldest_live, Ordering::Release);
        pass();
        let removed = self.live.write().remove_below(oldest_live);
        let mut files = self.files.lock();
        if !files.closed {
            files.retired.extend(removed);
        }
    }

    fn successor(&self, tail: &Tail) -> Start {
        Start {
            previous: tail.life.number,
            first_lsn: tail.life.end_lsn(),
            bytes: (tail.life.bytes * 2).min(self.run.segment_bytes_plan).max(tail.life.bytes),
            role: tail.role,
        }
    }

    /// Ends the tail's segment and begins the next, in which a record of `record_bytes` will fit.
    fn roll(&self, tail: &mut Tail, record_bytes: u64, commit: &Commit) -> Result<(), NotAppended> {
        if tail.life.number - self.oldest_live() >= LIVE_SPAN_MAX {
            let retry_after = Duration::from_secs(1);
            let problem = "the log has as many segments as can be told apart";
            return Err(Error::new(ErrorKind::Full { retry_after }, problem).into());
        }
        let needed_bytes = (format::DATA_START + record_bytes + END_ROOM).next_multiple_of(SEGMENT_BYTES_STEP);
        let end_lsn = tail.life.end_lsn();
        let suits = |life: &mut Life| life.first_lsn == end_lsn && life.bytes >= needed_bytes;
        let Some(next) = self.ready.lock().take_if(suits) else {
            tail.asked = true;
            tail.needed_bytes = tail.needed_bytes.max(needed_bytes);
            return Err(NotAppended::NoRoom);
        };
        let next = Arc::new(next);
        let mut mark = Draft::next(&Next {
            number: next.number,
            first_lsn: next.first_lsn,
            salt: next.salt,
            unfinished: tail.life.unfinished(),
            newest_kept_until_ms: tail.life.newest_kept_until_ms(),
        });
        tail.write(&mut mark, commit)?;
        self.live.write().push(Arc::clone(&next));
        let rolled = std::mem::replace(&mut tail.life, next);
        let mut all_rolled = std::mem::take(&mut tail.rolled);
        all_rolled.push(rolled);
        *tail = Tail { rolled: all_rolled, ..Tail::new(Arc::clone(&tail.life), tail.role) };
        Ok(())
    }
}

impl Tail {
    fn new(life: Arc<Life>, role: Role) -> Self {
        let offset = format::DATA_START;
        Self {
            life,
            offset,
            role,
            rolled: Vec::new(),
            closing: false,
            asked: false,
            needed_bytes: 0,
            populated: offset,
        }
    }

    fn end(&self) -> u64 {
        self.life.first_lsn + self.offset
    }

    fn write(&mut self, draft: &mut Draft, commit: &Commit) -> Result<Appended, Error> {
        let lsn = self.end();
        let offset = u32::try_from(self.offset).map_err(|_| Error::new(ErrorKind::Io, "a segment is too long"))?;
        self.populate(self.offset + draft.len() as u64);
        let bytes = draft.finish(self.life.salt, lsn, commit.durable());
        if let Err(error) = self.life.data.write_at(self.offset, bytes) {
            return Err(commit.poison(&Error::io(format!("writing to {}", self.life.name), error)));
        }
        self.offset += bytes.len() as u64;
        let address = Address { segment: self.life.number, offset };
        Ok(Appended { address, lsn, end: self.end(), housekeeping_due: false })
    }

    /// Readies the pages ahead of `end` in small steps, so that a writer seldom meets a fault. Where that fails, it
    /// does.
    fn populate(&mut self, end: u64) {
        while self.populated < end {
            match self.life.data.populate(self.populated, POPULATE_BYTES) {
                Ok(()) => self.populated += POPULATE_BYTES,
                Err(_) => self.populated = u64::MAX,
            }
        }
    }
}

impl Files {
    /// Finds or makes a file for `start` and begins its life. When this returns, its header is durable.
    fn prepare(&mut self, run: &Run, start: Start, synced_lsn: u64, oldest_live: u64) -> Result<Life, Error> {
        let failed = |name: &str| {
            let what = format!("preparing {name}");
            move |error| Error::io(what, error)
        };
        self.collect_retired();
        let fits = self.spares.iter().position(|spare| spare.bytes >= start.bytes);
        let (name, data) = match fits.map(|at| self.spares.swap_remove(at)) {
            Some(spare) => {
                let data = run.storage.open_segment(&spare.name, Access::NewLife).map_err(failed(&spare.name))?;
                (spare.name, data)
            }
            None => self.create(run, start.bytes)?,
        };
        let salt = run.entropy.number().map_err(failed(&name))?;
        // Taken also when the preparation fails: a header that was half written must not meet another of its number.
        self.newest_number += 1;
        let header = SegmentHeader {
            role: start.role,
            store_id: run.store_id,
            run_id: run.run_id,
            number: self.newest_number,
            previous: start.previous,
            segment_bytes: data.len(),
            first_lsn: start.first_lsn,
            synced_lsn,
            oldest_live,
            time: run.time.mark(),
            salt,
        };
        // A file that failed here is left alone until the next opening: what its pages hold is no longer known.
        let failed = failed(&name);
        let life = Life::begin(data, name, &header).map_err(failed)?;
        // Files that are too small by now go, but only once a durable header says that nothing in them counts.
        if fits.is_none() {
            while let Some(small) = self.spares.pop() {
                run.storage
                    .remove(&small.name)
                    .map_err(|error| Error::io(format!("removing {}", small.name), error))?;
                hint::remove_beside(&*run.storage, &small.name);
            }
        }
        Ok(life)
    }

    /// Makes a new file, under the next name that nobody has.
    fn create(&mut self, run: &Run, bytes: u64) -> Result<(String, Arc<dyn Segment>), Error> {
        loop {
            let name = segment::file_name(self.next_index);
            self.next_index = self.next_index.wrapping_add(1);
            match run.storage.create_segment(&name, bytes) {
                Ok(data) => return Ok((name, data)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(Error::io(format!("preparing {name}"), error)),
            }
        }
    }

    /// Lives that nobody holds any more leave their files.
    fn collect_retired(&mut self) {
        for life in std::mem::take(&mut self.retired) {
            if Arc::strong_count(&life) > 1 {
                self.retired.push(life);
            } else {
                self.spares.push(Spare { name: life.name.clone(), bytes: life.bytes });
            }
        }
    }
}
