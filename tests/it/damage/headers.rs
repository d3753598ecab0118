//! The two copies of a header while a file gets a new life, and after it: row R4.

use keyonce::ErrorKind;

use crate::forge::{Directory, Header, Role, SegmentFile};
use crate::verdicts::{Rows, holds, opens, refused};

/// What one copy is found as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bytes {
    /// As in the old life.
    Old,
    /// As in the new one.
    New,
    /// The new one's bytes up to here, and the old one's behind.
    Torn(usize),
    /// The new one's, with one bit flipped.
    Rotten(usize),
    /// Never written, or lost.
    Zero,
}

#[derive(Clone, Copy, Debug)]
struct Facts {
    copies: [Bytes; 2],
    /// The segment before names the new life, so both of its copies were on the disk; records followed.
    named: bool,
}

impl Facts {
    fn has(&self, wanted: Bytes) -> bool {
        let found = |(number, copy): (u8, Bytes)| {
            let [old, new] = [old(), new()].map(|header| header.copy(number));
            let bytes = bytes(copy, number);
            match wanted {
                Bytes::Old => bytes == old,
                _ => bytes == new,
            }
        };
        [0, 1].into_iter().zip(self.copies).any(found)
    }
}

/// The life that is over: its keys would not be past their retention, but the log says that nothing in it counts.
fn old() -> Header {
    Header::first()
}

fn live(number: u64) -> Header {
    let mut header = Header::first();
    for _ in 1..number {
        header = Header { role: Role::Rolled, ..header.behind() };
    }
    Header { previous: if number == 2 { 0 } else { number - 1 }, oldest_live: 2, ..header }
}

/// The life that begins in the same file.
fn new() -> Header {
    live(4)
}

fn bytes(copy: Bytes, number: u8) -> Vec<u8> {
    let (old, mut new) = (old().copy(number), new().copy(number));
    match copy {
        Bytes::Old => old,
        Bytes::New => new,
        Bytes::Torn(at) => [&new[..at], &old[at..]].concat(),
        Bytes::Rotten(at) => {
            new[at] ^= 1;
            new
        }
        Bytes::Zero => vec![0; 256],
    }
}

impl Facts {
    fn lay_out(&self) -> Directory {
        let mut segments: Vec<_> = [2, 3].map(|number| SegmentFile::new(live(number))).into();
        segments[0].done("b", 0);
        segments[0].next(&live(3), 0);
        segments[1].done("c", 0);
        if self.named {
            segments[1].next(&new(), 0);
        }
        let mut file = SegmentFile::new(old());
        for key in ["a1", "a2", "a3"] {
            file.done(key, 0);
        }
        let name = file.name();
        if self.named {
            let mut life = SegmentFile::new(new());
            let record = life.done("d", 0);
            file.bytes[record.clone()].copy_from_slice(&life.bytes[record]);
        }
        for (at, copy) in [0, 4096].into_iter().zip([0, 1]) {
            file.bytes[at..at + 256].copy_from_slice(&bytes(self.copies[usize::from(copy)], copy));
        }
        let mut directory = Directory::store(2, &segments);
        directory.0.push((name, file.bytes));
        directory
    }
}

#[test]
fn a_header_that_is_torn_or_rots_around_a_new_life_never_brings_the_old_one_back() {
    let mut rows = Rows::<Facts>::new(&[
        ("the new life counts", |facts| facts.named && facts.has(Bytes::New)),
        ("the new life is missed", |facts| facts.named && !facts.has(Bytes::New)),
        ("a spare", |facts| !facts.named),
    ]);
    let mut kinds = vec![Bytes::Old, Bytes::New, Bytes::Zero];
    kinds.extend([8, 49, 72, 80, 136, 200, 252, 255].map(Bytes::Torn));
    kinds.extend([0, 8, 13, 48, 56, 72, 88, 136, 254].map(Bytes::Rotten));
    let mut all = Vec::new();
    for first in &kinds {
        for second in &kinds {
            all.extend([false, true].map(|named| Facts { copies: [*first, *second], named }));
        }
    }
    // A write of the first copy, and then of the second, cut short after every byte.
    for at in 0..=256 {
        all.push(Facts { copies: [Bytes::Torn(at), Bytes::Old], named: false });
        all.push(Facts { copies: [Bytes::New, Bytes::Torn(at)], named: false });
    }
    for facts in all {
        let directory = facts.lay_out();
        match rows.only(&facts) {
            "the new life is missed" => {
                let said = refused(&directory, &facts, ErrorKind::Corrupt);
                assert!(said.ends_with("its successor, segment 4, is missing"), "{facts:?}: {said}");
            }
            row => opens(&directory, &facts, |store, _| {
                let keys = [("b", true), ("c", true), ("d", row == "the new life counts")];
                holds(store, &facts, &keys);
                holds(store, &facts, &["a1", "a2", "a3"].map(|key| (key, false)));
            }),
        }
    }
    rows.all_hit("headers around a new life");
}
