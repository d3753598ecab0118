//! Rows of the recovery at the top of the chain: sealed, void, or damaged.

use keyonce::{ErrorKind, Key, Reserve};

use super::{Rows, holds, opens, refused, response};
use crate::forge::{Directory, Header, Kind, Role, SCOPE, SegmentFile, request};

/// What the recovery came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seal {
    Sound,
    /// It was not written, or its page was lost.
    Missing,
    /// It is there, and one of the copies before it is not.
    WithoutACopy,
    /// It is there, and counts one copy more than there are.
    OfMore,
    /// It is there, and the digest is of other copies.
    OfOthers,
}

/// What was written after the recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Behind {
    Nothing,
    /// A record that says that all before it was synced.
    Work,
    EndMark,
    /// A successor with a record in it, named by the last record of the recovery.
    Successor,
}

#[derive(Clone, Copy, Debug)]
struct Facts {
    seal: Seal,
    segments: usize,
    /// The store file names this run.
    published: bool,
    behind: Behind,
}

impl Facts {
    fn all() -> Vec<Self> {
        let seals = [Seal::Sound, Seal::Missing, Seal::WithoutACopy, Seal::OfMore, Seal::OfOthers];
        let mut all = Vec::new();
        for seal in seals {
            for segments in [1, 2] {
                for published in [false, true] {
                    for behind in [Behind::Nothing, Behind::Work, Behind::EndMark, Behind::Successor] {
                        all.push(Self { seal, segments, published, behind });
                    }
                }
            }
        }
        // A sound seal of other copies is never written: with a run that the store file names it says that copies were
        // given up since, as happens to the oldest of many.
        all.retain(|facts| !matches!(facts.seal, Seal::OfMore | Seal::OfOthers) || !facts.rested_upon());
        all
    }

    /// Answers have rested on it.
    fn rested_upon(&self) -> bool {
        self.published || self.behind != Behind::Nothing
    }

    /// An old segment with `a`, `b` and `c`; a recovery that replaces it from `b` on; what is behind. Says the LSN
    /// behind all of it, too.
    fn lay_out(&self) -> (Directory, u64) {
        let mut old = SegmentFile::new(Header::first());
        old.done("a", 0);
        let cut_lsn = old.lsn();
        old.done("b", 0);
        old.done("c", 0);
        let first = old.header.recovery_behind();
        let mut files = vec![old, SegmentFile::new(first)];
        let mut copies = Vec::new();
        for (n, id) in ["b", "c"].into_iter().enumerate() {
            if n + 1 == self.segments && n > 0 {
                go_on(&mut files, Role::Recovery);
            }
            let file = files.last_mut().unwrap();
            let copy = file.state(Kind::Done, id, 8, format!("copy of {id}").as_bytes(), 0);
            copies.push(file.bytes[copy.clone()].to_vec());
            if n == 0 && self.seal == Seal::WithoutACopy {
                file.bytes[copy.start + 30] ^= 4;
            }
        }
        let file = files.last_mut().unwrap();
        let mut counted: Vec<_> = copies.iter().map(Vec::as_slice).collect();
        match self.seal {
            Seal::Sound | Seal::Missing | Seal::WithoutACopy => {}
            Seal::OfMore => counted.push(b"one more"),
            Seal::OfOthers => counted.reverse(),
        }
        let sealed = file.sealed(&counted, &[(cut_lsn, first.first_lsn)], 0);
        let synced_lsn = file.lsn();
        if self.seal == Seal::Missing {
            file.bytes[sealed].fill(0);
        }
        match self.behind {
            Behind::Nothing => {}
            Behind::Work => drop(file.done("work", synced_lsn)),
            Behind::EndMark => drop(file.closed(synced_lsn)),
            Behind::Successor => {
                go_on(&mut files, Role::Rolled);
                files.last_mut().unwrap().done("work", 0);
            }
        }
        let run_number = if self.published { files[self.segments].header.number } else { 1 };
        (Directory::store(run_number, &files), files.last().unwrap().header.end_lsn())
    }
}

/// Adds a segment behind the last one, which names it.
fn go_on(files: &mut Vec<SegmentFile>, role: Role) {
    let last = files.last_mut().unwrap();
    let header = Header { role, ..last.header.behind() };
    last.next(&header, 0);
    files.push(SegmentFile::new(header));
}

#[test]
fn a_recovery_is_sealed_or_void_or_damaged() {
    let mut rows = Rows::<Facts>::new(&[
        ("sealed", |facts| facts.seal == Seal::Sound),
        ("void", |facts| facts.seal != Seal::Sound && !facts.rested_upon()),
        ("damaged", |facts| facts.seal != Seal::Sound && facts.rested_upon()),
    ]);
    let mut wrong = Vec::new();
    for facts in Facts::all() {
        let (directory, end_lsn) = facts.lay_out();
        let row = rows.only(&facts);
        let checked = std::panic::catch_unwind(|| match row {
            "damaged" => {
                let said = refused(&directory, &facts, ErrorKind::Corrupt);
                assert!(said.starts_with("segment-0000000"), "{facts:?}: {said}");
            }
            _ => opens(&directory, &facts, |store, first| {
                let sealed = row == "sealed";
                holds(store, &facts, &[("a", true), ("work", sealed && works(facts.behind))]);
                for id in ["b", "c"] {
                    let expected = if sealed { format!("copy of {id}") } else { id.to_owned() };
                    assert_eq!(response(store, id), Some(expected), "{facts:?}: {id}");
                }
                let Reserve::Fresh(owner) = store.reserve(&Key::new(SCOPE, "new").unwrap(), request()).unwrap() else {
                    panic!("{facts:?}: a new key")
                };
                // Never a position that was within the range of any header, void or not.
                assert!(!first || owner.token().to_u64() >= end_lsn, "{facts:?}: {} < {end_lsn}", owner.token());
                assert_eq!(owner.release().unwrap(), keyonce::Completion::Done);
            }),
        });
        if let Err(panic) = checked {
            wrong.push(panic.downcast::<String>().map_or_else(|_| format!("{facts:?}"), |said| *said));
        }
    }
    assert!(wrong.is_empty(), "{} combinations: {wrong:#?}", wrong.len());
    rows.all_hit("a recovery");
}

fn works(behind: Behind) -> bool {
    matches!(behind, Behind::Work | Behind::Successor)
}
