//! Rows of the directory: the store file, the segments beside it, and what else lies there.

use keyonce::ErrorKind;
use keyonce::testing::Storage as _;

use super::{Rows, holds, opens, refused};
use crate::forge::{Directory, Header, STORE_FILE, SegmentFile, store_file};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StoreFile {
    Sound,
    Missing,
    Empty,
    Short,
    Long,
    Flipped,
    OtherMagic,
    Newer,
    /// A newer version whose check does not hold.
    NewerFlipped,
}

const STORE_FILES: [StoreFile; 9] = [
    StoreFile::Sound,
    StoreFile::Missing,
    StoreFile::Empty,
    StoreFile::Short,
    StoreFile::Long,
    StoreFile::Flipped,
    StoreFile::OtherMagic,
    StoreFile::Newer,
    StoreFile::NewerFlipped,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Segments {
    None,
    /// The first one, with a record.
    Own,
    /// The first one, as a creation leaves it.
    New,
    /// Of another store.
    Foreign,
    /// Of a later version.
    Newer,
    /// With a record, and neither copy of its header sound.
    Rotten,
    /// Nothing but zeros.
    Blank,
    /// Ten bytes.
    Stub,
    /// The first one, and one of another store below it.
    OwnAndForeign,
    /// The first one, and one of a later version.
    OwnAndNewer,
    /// Two files with one number.
    Twice,
}

const SEGMENTS: [Segments; 11] = [
    Segments::None,
    Segments::Own,
    Segments::New,
    Segments::Foreign,
    Segments::Newer,
    Segments::Rotten,
    Segments::Blank,
    Segments::Stub,
    Segments::OwnAndForeign,
    Segments::OwnAndNewer,
    Segments::Twice,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    Nothing,
    /// What the crate or a file system leaves.
    Ours,
    OtherProgram,
}

#[derive(Clone, Copy, Debug)]
struct Facts {
    store: StoreFile,
    segments: Segments,
    beside: Beside,
}

impl Facts {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for store in STORE_FILES {
            for segments in SEGMENTS {
                for beside in [Beside::Nothing, Beside::Ours, Beside::OtherProgram] {
                    all.push(Self { store, segments, beside });
                }
            }
        }
        all
    }

    /// What a creation that was cut short may leave.
    fn half_made(&self) -> bool {
        matches!(self.segments, Segments::None | Segments::New | Segments::Blank | Segments::Stub)
    }

    fn lay_out(&self) -> Directory {
        let mut files = Vec::new();
        let sound = store_file(1, 1);
        match self.store {
            StoreFile::Missing => {}
            StoreFile::Sound => files.push(sound),
            StoreFile::Empty => files.push(Vec::new()),
            StoreFile::Short => files.push(sound[..511].to_vec()),
            StoreFile::Long => files.push([&sound[..], &[0]].concat()),
            StoreFile::Flipped | StoreFile::OtherMagic => {
                let mut bytes = sound;
                bytes[if self.store == StoreFile::Flipped { 20 } else { 3 }] ^= 1;
                files.push(bytes);
            }
            StoreFile::Newer => files.push(store_file(7, 1)),
            StoreFile::NewerFlipped => {
                let mut bytes = store_file(7, 1);
                bytes[300] ^= 1;
                files.push(bytes);
            }
        }
        let mut files: Vec<_> = files.into_iter().map(|bytes| (STORE_FILE.to_owned(), bytes)).collect();
        let own = with_a_record(Header::first());
        let name = own.name();
        let foreign = Header { store_id: [1; 16], ..Header::first() };
        let newer = Header { version: 7, ..Header::first() };
        let second = "segment-00000002.keyonce".to_owned();
        match self.segments {
            Segments::None => {}
            Segments::Own => files.push((name, own.bytes)),
            Segments::New => files.push((name, SegmentFile::new(Header::first()).bytes)),
            Segments::Foreign => files.push((name, with_a_record(foreign).bytes)),
            Segments::Newer => files.push((name, with_a_record(newer).bytes)),
            Segments::Rotten => {
                let mut bytes = own.bytes;
                [40, 4096 + 40].into_iter().for_each(|at| bytes[at] ^= 1);
                files.push((name, bytes));
            }
            Segments::Blank => files.push((name, vec![0; own.bytes.len()])),
            Segments::Stub => files.push((name, vec![1; 10])),
            Segments::OwnAndForeign => files.extend([(name, own.bytes), (second, with_a_record(foreign).bytes)]),
            Segments::OwnAndNewer => files.extend([(name, own.bytes), (second, with_a_record(newer).bytes)]),
            Segments::Twice => files.extend([(name, own.bytes.clone()), (second, own.bytes)]),
        }
        match self.beside {
            Beside::Nothing => {}
            Beside::Ours => files.extend([("LOCK", &b""[..]), ("keyonce.store.tmp", b"half")].map(owned)),
            Beside::OtherProgram => files.extend([("data.db", &b"theirs"[..])].map(owned)),
        }
        Directory(files)
    }
}

fn owned((name, bytes): (&str, &[u8])) -> (String, Vec<u8>) {
    (name.to_owned(), bytes.to_vec())
}

fn with_a_record(header: Header) -> SegmentFile {
    let mut file = SegmentFile::new(header);
    file.done("there", 0);
    file
}

#[test]
fn a_directory_is_a_store_or_none_or_a_damaged_one() {
    use {Segments as S, StoreFile as F};
    let mut rows = Rows::<Facts>::new(&[
        ("opened", |facts| facts.store == F::Sound && matches!(facts.segments, S::Own | S::New)),
        ("created", |facts| facts.store == F::Missing && facts.beside != Beside::OtherProgram && facts.half_made()),
        ("another program's", |facts| facts.store == F::Missing && facts.beside == Beside::OtherProgram),
        ("the store file is missed", |facts| {
            facts.store == F::Missing && facts.beside != Beside::OtherProgram && !facts.half_made()
        }),
        ("the store file is somebody else's", |facts| matches!(facts.store, F::Empty | F::OtherMagic)),
        ("the store file is damaged", |facts| matches!(facts.store, F::Short | F::Long | F::Flipped | F::NewerFlipped)),
        ("the store file is newer", |facts| facts.store == F::Newer),
        ("a segment is somebody else's", |facts| {
            facts.store == F::Sound && matches!(facts.segments, S::Foreign | S::OwnAndForeign)
        }),
        ("a segment is newer", |facts| facts.store == F::Sound && matches!(facts.segments, S::Newer | S::OwnAndNewer)),
        ("a segment is there twice", |facts| facts.store == F::Sound && facts.segments == S::Twice),
        ("no segment is there", |facts| {
            facts.store == F::Sound && matches!(facts.segments, S::None | S::Rotten | S::Blank | S::Stub)
        }),
    ]);
    for facts in Facts::all() {
        let directory = facts.lay_out();
        let row = rows.only(&facts);
        let (kind, words): (_, &[&str]) = match row {
            "opened" | "created" => {
                opened(&directory, &facts, row == "created");
                continue;
            }
            "another program's" => (ErrorKind::ForeignDirectory, &["not a store", "data.db"]),
            "the store file is missed" => {
                (ErrorKind::Corrupt, &["keyonce.store is corrupt at byte 0: it is missing beside segment-0000000"])
            }
            "the store file is somebody else's" => (ErrorKind::ForeignDirectory, &["keyonce.store was not written"]),
            "the store file is damaged" => (ErrorKind::Corrupt, &["keyonce.store is corrupt at byte 0: "]),
            "the store file is newer" => {
                (ErrorKind::UnsupportedFormat, &["keyonce.store has format version 7", "version 1"])
            }
            "a segment is somebody else's" => {
                (ErrorKind::ForeignDirectory, &["segment-0000000", " belongs to another store"])
            }
            "a segment is newer" => {
                (ErrorKind::UnsupportedFormat, &["segment-0000000", " has format version 7", "version 1"])
            }
            "a segment is there twice" => (ErrorKind::Corrupt, &["segment-0000000", "the same segment number"]),
            "no segment is there" if facts.segments == Segments::Rotten => {
                (ErrorKind::Corrupt, &["segment-0000000", "both copies of its header", "no segment lies beside it"])
            }
            "no segment is there" => {
                (ErrorKind::Corrupt, &["keyonce.store is corrupt at byte 0: no segment lies beside it"])
            }
            other => unreachable!("{other}"),
        };
        let said = refused(&directory, &facts, kind);
        for word in words {
            assert!(said.contains(word), "{facts:?}: {said}");
        }
    }
    rows.all_hit("the directory");
}

fn opened(directory: &Directory, facts: &Facts, created: bool) {
    opens(directory, facts, |store, first| {
        if first {
            assert_eq!(store.opened().created, created, "{facts:?}");
        }
        holds(store, facts, &[("there", facts.segments == Segments::Own)]);
    });
    if facts.beside == Beside::OtherProgram {
        let disk = directory.disk();
        super::open(&disk, 1).unwrap().close(std::time::Duration::ZERO).unwrap();
        assert_eq!(disk.read("data.db", 100).unwrap(), b"theirs", "{facts:?}");
    }
}
