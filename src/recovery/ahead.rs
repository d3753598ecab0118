//! What is read of segments before their turn: it decides how all others are read, and whether they count.

use std::collections::BTreeMap;

use crate::error::Error;
use crate::format::{self, Entry, Role};
use crate::key::HashSeed;
use crate::log::Spare;
use crate::scan::{Reading, Scan, Seal};
use crate::segment::Life;

use super::heads::{Link, spare};

/// So many entries are kept of what is read ahead; what is beyond is read again.
const ENTRIES_KEPT_MAX: usize = 1 << 20;

/// The segments that were read before their turn, by number.
#[derive(Debug)]
pub(super) struct Ahead {
    seed: HashSeed,
    read: BTreeMap<u64, ReadAhead>,
    buffer: Vec<u8>,
}

/// What was read of one.
#[derive(Debug)]
pub(super) struct ReadAhead {
    pub(super) scan: Scan,
    /// `None`: there were too many to keep.
    pub(super) entries: Option<Vec<Entry>>,
}

impl Ahead {
    pub(super) fn new(seed: HashSeed) -> Self {
        Self { seed, read: BTreeMap::new(), buffer: Vec::new() }
    }

    /// What was read, by number.
    pub(super) fn into_read(self) -> BTreeMap<u64, ReadAhead> {
        self.read
    }

    /// What was found in each, oldest first.
    pub(super) fn scans(&self) -> impl Iterator<Item = (u64, &Scan)> {
        self.read.iter().map(|(number, early)| (*number, &early.scan))
    }

    fn scan_of(&self, number: u64) -> Option<&Scan> {
        self.read.get(&number).map(|early| &early.scan)
    }

    /// Reads a segment before its turn. Says where its records are.
    fn read_one(&mut self, link: &Link) -> Result<Vec<u32>, Error> {
        let reading = Reading::of(&link.life, &mut self.buffer)?;
        let kept: usize = self.read.values().flat_map(|early| &early.entries).map(Vec::len).sum();
        let entries = (kept + reading.states.len() <= ENTRIES_KEPT_MAX).then(|| reading.entries(&self.seed));
        self.read.insert(link.header.number, ReadAhead { scan: reading.scan, entries });
        Ok(reading.states)
    }

    /// Gives up the recoveries at the top that did not come to their `Sealed`: no answer ever rested on them. Says
    /// which files that frees.
    ///
    /// # Errors
    ///
    /// `Corrupt`: something rests on one of them.
    pub(super) fn drop_void(&mut self, lives: &mut Vec<Link>, run_number: u64) -> Result<Vec<Spare>, Error> {
        let mut void = Vec::new();
        while let Some(top) = lives.last() {
            if top.header.role != Role::Recovery {
                return Ok(void);
            }
            let run_id = top.header.run_id;
            let of_run = |link: &&Link| link.header.run_id == run_id && link.header.role == Role::Recovery;
            let count = lives.iter().rev().take_while(of_run).count();
            let group = lives.split_off(lives.len() - count);
            let mut states = Vec::new();
            for link in &group {
                states.push(self.read_one(link)?);
            }
            let ahead: Vec<_> = group.iter().filter_map(|link| self.read.get(&link.header.number)).collect();
            // A seal that the store file names was durable. It need not find its copies any more: the oldest may have
            // been given up since.
            let published = group.iter().any(|link| link.header.number == run_number);
            let seal = ahead.iter().find_map(|early| early.scan.sealed.as_ref());
            let parts = group.iter().map(|link| &*link.life).zip(&states);
            let whole = match seal {
                None => false,
                Some(seal) => published || is_whole(seal, parts)?,
            };
            if whole {
                lives.extend(group);
                return Ok(void);
            }
            let first_lsn = group.first().map_or(0, |link| link.header.first_lsn);
            let worked = ahead.iter().any(|early| early.scan.synced_lsn > first_lsn || early.scan.closed.is_some());
            if let (true, Some(first)) = (worked || published, group.first()) {
                let reason = "the seal of the recovery that ended here is missing";
                return Err(Error::corrupt(&first.life.name, format::DATA_START, reason));
            }
            for link in group {
                self.read.remove(&link.header.number);
                void.extend(spare(&link.life.name, link.life.data.len()));
            }
        }
        Ok(void)
    }

    /// Reads what decides how the rest of the chain is read: the end of the log, which tells how far it was synced, and
    /// where each run began, which tells what it has replaced. A successor that was made ready and that the log never
    /// came to leaves the chain: its file is a spare at once.
    ///
    /// # Errors
    ///
    /// `Io`.
    pub(super) fn read_what_decides(&mut self, chain: &mut Vec<Link>) -> Result<Option<Spare>, Error> {
        let newest = chain.last().map(|link| link.header.number);
        let decides = |link: &&Link| Some(link.header.number) == newest || link.header.role == Role::Recovery;
        for link in chain.iter().filter(decides) {
            self.read_once(link)?;
        }
        let [.., before, last] = chain.as_slice() else { return Ok(None) };
        let number = last.header.number;
        if last.header.role != Role::Rolled || !self.scan_of(number).is_some_and(Scan::is_empty) {
            return Ok(None);
        }
        self.read_once(before)?;
        let next = self.scan_of(before.header.number).and_then(|scan| scan.next);
        if next.is_some_and(|(_, next)| next.number == number) {
            return Ok(None);
        }
        self.read.remove(&number);
        Ok(chain.pop().and_then(|unused| spare(&unused.life.name, unused.life.data.len())))
    }

    fn read_once(&mut self, link: &Link) -> Result<(), Error> {
        if !self.read.contains_key(&link.header.number) {
            self.read_one(link)?;
        }
        Ok(())
    }
}

/// Whether the segments of one recovery, with the offsets of their records, hold all the copies that its `Sealed`
/// counts.
fn is_whole<'a>(seal: &Seal, group: impl Iterator<Item = (&'a Life, &'a Vec<u32>)>) -> Result<bool, Error> {
    let mut count = 0;
    let mut copies = Copies::default();
    for (life, states) in group {
        for offset in states.iter().take_while(|offset| life.lsn(**offset) <= seal.lsn) {
            copies.add(life.checked_record(*offset).map(|_| life.record(*offset))?);
            count += 1;
        }
    }
    Ok(count == seal.count && copies.digest() == seal.digest)
}

/// The digest that a `Sealed` carries: BLAKE3 of the copies' bytes in the order of the log, its first half.
#[derive(Debug, Default)]
pub(super) struct Copies(blake3::Hasher);

impl Copies {
    pub(super) fn add(&mut self, record: &[u8]) {
        self.0.update(record);
    }

    pub(super) fn digest(&self) -> [u8; 16] {
        let mut digest = [0; 16];
        self.0.finalize_xof().fill(&mut digest);
        digest
    }
}
