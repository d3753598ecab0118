//! A store so small that every bit of it can be damaged, and what opening must say of each damage: worked out from the
//! bytes, by the rules of opening, and not by the code that opens.

use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk, Storage as _};
use keyonce::{Body, Completion, Durability, Error, ErrorKind, Key, Options, Reserve, Retention, Store};

use crate::forge::{self, Kind, RECORDS_START, STORE_FILE};
use crate::place::{LEASE, request, snapshot};

/// To how many bytes each segment is cut down: its headers, its records, and some room.
pub(super) const SEGMENT_BYTES: usize = RECORDS_START + 4096;

/// How a store ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Closed,
    Killed,
    /// Killed when it had just been opened: nothing has been synced since but the seal of that opening.
    JustOpened,
}

/// A store of three runs: the first was closed, the second killed, the third ended as was asked for. Its first file is
/// in its second life.
pub(super) struct Small {
    pub(super) disk: SimDisk,
    pub(super) files: Vec<(String, Vec<u8>)>,
    clock: ManualClock,
    /// Every key with what it is answered.
    pub(super) answers: Vec<(Key, String)>,
    /// The segments of the live chain, as indices of `files`, oldest first.
    chain: Vec<usize>,
    pub(super) records: Vec<Record>,
    /// The number that the store file names.
    run_number: u64,
}

/// A record of a segment of the chain.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) file: usize,
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) kind: u8,
    lsn: u64,
    /// What it says was synced.
    claim: u64,
    /// A state record's key.
    id: Option<String>,
    replaced: bool,
}

/// What opening must say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Expected {
    /// It opens, every key but these is answered as before, and so many copies of headers are bad.
    Opens { lost: Vec<String>, copies_bad: u64 },
    /// It is refused, for this file, and at this place if it is known.
    Refused { file: String, at: Option<usize> },
}

impl Small {
    pub(super) fn new(end: End) -> Self {
        let (mut disk, clock) = (SimDisk::new(), ManualClock::default());
        let mut keys = Vec::new();
        for run in 0..3 {
            let store = testing::open(disk.clone(), options(&clock), run).unwrap();
            let keys_of_run = if run == 2 && end == End::JustOpened { 0 } else { 5 };
            for at in 0..keys_of_run {
                let key = Key::new("small", format!("{run}-{at}")).unwrap();
                work(&store, &key, at);
                keys.push(key);
            }
            clock.advance(Duration::from_millis(5));
            if run == 0 || run == 2 && end == End::Closed {
                store.close(Duration::ZERO).unwrap();
            } else {
                disk = disk.kill();
            }
        }
        let mut small = Self {
            disk: SimDisk::new(),
            files: Vec::new(),
            clock,
            answers: Vec::new(),
            chain: Vec::new(),
            records: Vec::new(),
            run_number: 0,
        };
        for name in disk.list().unwrap() {
            let mut bytes = disk.read(&name, 1 << 20).unwrap();
            if name.starts_with("segment-") {
                cut_down(&name, &mut bytes);
            }
            small.disk.publish(&name, &bytes).unwrap();
            small.files.push((name, bytes));
        }
        small.read();
        let whole = small.open(&small.disk.kill()).unwrap();
        small.answers = keys.into_iter().map(|key| (key.clone(), ask(&whole, &key))).collect();
        small
    }

    pub(super) fn open(&self, disk: &SimDisk) -> Result<Store, Error> {
        testing::open(disk.clone(), options(&self.clock), 99)
    }

    /// Learns the chain and its records from the bytes.
    fn read(&mut self) {
        let (_, store) = self.files.iter().find(|(name, _)| name == STORE_FILE).unwrap();
        self.run_number = u64_at(store, 56);
        let segments = self.files.iter().enumerate().filter(|(_, (name, _))| name.starts_with("segment-"));
        let numbers: Vec<_> = segments.map(|(at, (_, bytes))| (u64_at(bytes, 48), at)).collect();
        let mut number = numbers.iter().map(|(number, _)| *number).max().unwrap();
        while let Some((_, at)) = numbers.iter().find(|(other, _)| *other == number) {
            self.chain.insert(0, *at);
            number = u64_at(&self.files[*at].1, 56);
        }
        let mut replaced = Vec::new();
        for at in &self.chain {
            let bytes = &self.files[*at].1;
            let (first_lsn, salt) = (u64_at(bytes, 72), u64_at(bytes, 136));
            let mut start = RECORDS_START;
            loop {
                let word = u32_at(bytes, start + 4);
                let end = start + usize::try_from(word & 0xff_ffff).unwrap() * 8;
                let kind = word.to_le_bytes()[3];
                let lsn = first_lsn + start as u64;
                // Behind the last record stand zeros, or records of an earlier life.
                if !forge::verifies(bytes, start..end, lsn, salt) {
                    break;
                }
                let mut claim = lsn - u64::from(u32_at(bytes, start + 12)) * 8;
                if kind == Kind::Closed as u8 {
                    claim = lsn;
                }
                if kind == Kind::Sealed as u8 {
                    let count = usize::try_from(u64_at(bytes, start + 40)).unwrap();
                    let interval = |n| (u64_at(bytes, start + 48 + 16 * n), u64_at(bytes, start + 56 + 16 * n));
                    replaced.extend((0..count).map(interval));
                    // The store file names the run only once its seal is durable.
                    if u64_at(bytes, 48) <= self.run_number {
                        claim = lsn;
                    }
                }
                let id = (kind < 16).then(|| {
                    let id_start = start + 76 + usize::from(bytes[start + 58]);
                    String::from_utf8(bytes[id_start..id_start + usize::from(bytes[start + 59])].to_vec()).unwrap()
                });
                self.records.push(Record { file: *at, start, end, kind, lsn, claim, id, replaced: false });
                start = end;
            }
        }
        for record in &mut self.records {
            record.replaced = replaced.iter().any(|(from, to)| (*from..*to).contains(&record.lsn));
        }
    }

    /// How far the log is known to have been synced, from the headers and from the records that `reads` lets through.
    fn synced_lsn(&self, reads: impl Fn(&Record) -> bool) -> u64 {
        let headers = self.chain.iter().map(|at| u64_at(&self.files[*at].1, 80));
        let claims = self.records.iter().filter(|record| reads(record)).map(|record| record.claim);
        headers.chain(claims).max().unwrap()
    }

    /// What opening must say when a bit of this byte is flipped.
    pub(super) fn expect_flipped(&self, file: usize, at: usize) -> Expected {
        let same = |copies_bad| Expected::Opens { lost: Vec::new(), copies_bad };
        let (name, _) = &self.files[file];
        if name == STORE_FILE {
            return Expected::Refused { file: name.clone(), at: None };
        }
        if at < RECORDS_START {
            return same(u64::from(at % 4096 < 256));
        }
        let Some(record) = self.records.iter().find(|it| it.file == file && (it.start..it.end).contains(&at)) else {
            return same(0);
        };
        let others = |it: &Record| it.lsn != record.lsn;
        if record.kind == Kind::Sealed as u8 && !record.replaced {
            return Expected::Refused { file: name.clone(), at: None };
        }
        if record.replaced {
            same(0)
        } else if record.lsn < self.synced_lsn(others) {
            Expected::Refused { file: name.clone(), at: Some(record.start) }
        } else {
            Expected::Opens { lost: record.id.iter().cloned().collect(), copies_bad: 0 }
        }
    }

    /// Whether somebody wrote this byte: the store file, the copies of a header, a record of any life.
    pub(super) fn is_written(&self, file: usize, at: usize) -> bool {
        let (name, bytes) = &self.files[file];
        let header = at < RECORDS_START && at % 4096 < 256;
        let last = bytes.iter().rposition(|byte| *byte != 0).unwrap_or(0);
        name == STORE_FILE || header || (RECORDS_START..=last).contains(&at)
    }

    /// The file that holds the newest segment.
    pub(super) fn newest(&self) -> usize {
        *self.chain.last().unwrap()
    }

    /// What opening must say when the newest segment ends at this byte.
    pub(super) fn expect_cut(&self, cut: usize) -> Expected {
        let file = self.newest();
        let (name, _) = &self.files[file];
        if cut < 256 {
            return Expected::Refused { file: STORE_FILE.to_owned(), at: None };
        }
        let gone = |it: &Record| it.file == file && it.end > cut;
        if self.records.iter().any(|it| gone(it) && it.kind == Kind::Sealed as u8 && !it.replaced) {
            return Expected::Refused { file: name.clone(), at: None };
        }
        let synced_lsn = self.synced_lsn(|it| !gone(it));
        match self.records.iter().find(|it| gone(it) && !it.replaced && it.lsn < synced_lsn) {
            Some(record) => Expected::Refused { file: name.clone(), at: Some(record.start) },
            None => {
                let lost = self.records.iter().filter(|it| gone(it)).filter_map(|it| it.id.clone()).collect();
                Expected::Opens { lost, copies_bad: u64::from(cut < 4096 + 256) }
            }
        }
    }

    /// Opens what became of the disk, and holds it against what must be said. `true` when it was refused.
    pub(super) fn check(&self, disk: &SimDisk, expected: &Expected, what: &str) -> bool {
        let steps = disk.steps();
        match (self.open(disk), expected) {
            (Ok(store), Expected::Opens { lost, copies_bad }) => {
                assert_eq!(store.opened().header_copies_bad, *copies_bad, "{what}");
                for (key, answer) in &self.answers {
                    let now = ask(&store, key);
                    let id = std::str::from_utf8(key.id()).unwrap();
                    if lost.iter().any(|other| other == id) {
                        // An earlier state of it, or none; never a response that was not stored.
                        assert!(now == *answer || !now.starts_with("Kept") && !now.starts_with("Not"), "{what}: {now}");
                    } else {
                        assert_eq!(now, *answer, "{what}: key {id}");
                    }
                }
                false
            }
            (Err(error), Expected::Refused { file, at }) => {
                let said = error.to_string();
                let kinds = [ErrorKind::Corrupt, ErrorKind::ForeignDirectory];
                assert!(kinds.contains(&error.kind()) && said.starts_with(file.as_str()), "{what}: {said}");
                if let Some(at) = at {
                    assert!(said.starts_with(&format!("{file} is corrupt at byte {at}: ")), "{what}: {said}");
                }
                assert_eq!(disk.steps(), steps, "{what}: an opening that fails changes nothing");
                true
            }
            (Ok(store), _) => panic!("{what}: {expected:?}, but it opened with {:?}", store.opened()),
            (Err(error), _) => panic!("{what}: {expected:?}, but {error}"),
        }
    }
}

fn options(clock: &ManualClock) -> Options {
    Options::new()
        .durability(Durability::PowerLoss)
        .lease(LEASE)
        .retention(Retention::new(Duration::from_secs(3600), 0.001))
        .response_bytes_max(512)
        .clock(std::sync::Arc::new(clock.clone()))
}

/// Every state that a key can be left in; the last act of each run is one that no sync covers.
fn work(store: &Store, key: &Key, at: u64) {
    let Reserve::Fresh(owner) = store.reserve(key, request()).unwrap() else { panic!("{key:?} is new") };
    match at {
        0 => assert_eq!(owner.complete(key.id()).unwrap(), Completion::Done),
        1 => {
            assert_eq!(owner.save_checkpoint(b"half").unwrap(), Completion::Done);
            assert_eq!(owner.complete(&[7; 50]).unwrap(), Completion::Done);
        }
        2 => assert_eq!(owner.complete_without_body(b"row").unwrap(), Completion::Done),
        3 => assert_eq!(owner.release().unwrap(), Completion::Done),
        _ => drop(owner),
    }
}

/// All that a key is answered; a body comes first.
pub(super) fn ask(store: &Store, key: &Key) -> String {
    let body = match store.reserve(key, request()).unwrap() {
        Reserve::Replay(response) => match response.body() {
            Body::Kept(body) => format!("Kept {body:?}"),
            Body::NotKept { reference } => format!("NotKept {reference:?}"),
        },
        Reserve::Fresh(owner) => {
            assert_eq!(owner.release().unwrap(), Completion::Done);
            "absent".to_owned()
        }
        _ => String::new(),
    };
    format!("{body} {}", snapshot(store, key))
}

/// Makes a segment file as small as [`SEGMENT_BYTES`], which its headers must say, too.
fn cut_down(name: &str, bytes: &mut Vec<u8>) {
    assert!(bytes[SEGMENT_BYTES..].iter().all(|byte| *byte == 0), "{name} holds more than fits");
    bytes.truncate(SEGMENT_BYTES);
    for copy in [0, 4096] {
        bytes[copy + 64..copy + 72].copy_from_slice(&(SEGMENT_BYTES as u64).to_le_bytes());
        let check = forge::check_of(&bytes[copy..copy + 252]);
        bytes[copy + 252..copy + 256].copy_from_slice(&check);
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).map_or(0, |field| u64::from_le_bytes(field.try_into().unwrap()))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}
