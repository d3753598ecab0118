//! Rows of one segment: of the live chain and whole, missing from it, or of no use any more.

use keyonce::ErrorKind;

use super::{Rows, holds, opens, refused};
use crate::forge::{Directory, Header, RECORDS_START, Role, SegmentFile};

/// Where the segment stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// At the old end of the chain.
    Oldest,
    Middle,
    /// Named by the segment before it, or by the store file, and holding records.
    Newest,
    /// Made ready, named by nobody, and empty.
    Unused,
    /// Below the oldest live number.
    Dead,
    /// All of it replaced by a later `Sealed`.
    Replaced,
}

/// What became of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spoilt {
    Sound,
    Missing,
    Empty,
    HalfHeader,
    OneHeader,
    HeadersOnly,
    CutInARecord,
    CutInTheRoom,
    FirstCopyBad,
    SecondCopyBad,
    BothCopiesBad,
    FirstCopyZero,
    BothCopiesZero,
}

const SPOILT: [Spoilt; 13] = [
    Spoilt::Sound,
    Spoilt::Missing,
    Spoilt::Empty,
    Spoilt::HalfHeader,
    Spoilt::OneHeader,
    Spoilt::HeadersOnly,
    Spoilt::CutInARecord,
    Spoilt::CutInTheRoom,
    Spoilt::FirstCopyBad,
    Spoilt::SecondCopyBad,
    Spoilt::BothCopiesBad,
    Spoilt::FirstCopyZero,
    Spoilt::BothCopiesZero,
];

#[derive(Clone, Copy, Debug)]
struct Facts {
    place: Place,
    spoilt: Spoilt,
    role: Role,
    /// Something durable says that all records were synced.
    synced: bool,
}

impl Facts {
    fn all() -> Vec<Self> {
        let places = [Place::Oldest, Place::Middle, Place::Newest, Place::Unused, Place::Dead, Place::Replaced];
        let mut all = Vec::new();
        for place in places {
            for spoilt in SPOILT {
                for role in [Role::Rolled, Role::Recovery] {
                    for synced in [false, true] {
                        all.push(Self { place, spoilt, role, synced });
                    }
                }
            }
        }
        // A recovery is never made ready ahead of its need: see the rows of recoveries.
        all.retain(|facts| facts.place != Place::Unused || facts.role == Role::Rolled);
        all
    }

    fn counts(&self) -> bool {
        matches!(self.place, Place::Oldest | Place::Middle | Place::Newest)
    }

    /// No header tells which segment it is.
    fn nameless(&self) -> bool {
        matches!(
            self.spoilt,
            Spoilt::Missing | Spoilt::Empty | Spoilt::HalfHeader | Spoilt::BothCopiesBad | Spoilt::BothCopiesZero
        )
    }

    fn cut(&self) -> bool {
        matches!(self.spoilt, Spoilt::OneHeader | Spoilt::HeadersOnly | Spoilt::CutInARecord)
    }

    /// Cut off with everything behind the headers, a recovery has no seal.
    fn seal_cut_off(&self) -> bool {
        self.role == Role::Recovery && matches!(self.spoilt, Spoilt::OneHeader | Spoilt::HeadersOnly)
    }

    /// Which of the three segments it is, counted from 0.
    fn index(&self) -> usize {
        match self.place {
            Place::Oldest | Place::Dead => 0,
            Place::Middle | Place::Replaced => 1,
            Place::Newest => 2,
            Place::Unused => 3,
        }
    }

    /// Three segments of two keys each, and what the place asks for behind them.
    fn lay_out(&self) -> (Directory, String) {
        let subject = self.index();
        let count = match self.place {
            Place::Replaced => 2,
            Place::Unused => 4,
            _ => 3,
        };
        let mut headers = vec![Header::first()];
        while let Some(last) = headers.last().filter(|_| headers.len() < count) {
            headers.push(Header { role: Role::Rolled, ..last.behind() });
        }
        if self.role == Role::Recovery {
            headers[subject].role = Role::Recovery;
            // The segments of its run.
            headers.iter_mut().skip(subject).for_each(|header| header.run = 2);
        }
        if self.place == Place::Dead {
            headers[2].oldest_live = 2;
        }
        if self.synced {
            let last = headers.len() - 1;
            headers[last].synced_lsn = headers[last].first_lsn;
        }
        let mut files: Vec<_> = headers.iter().map(|header| SegmentFile::new(*header)).collect();
        let ids = [["a1", "a2"], ["b1", "b2"], ["c1", "c2"]];
        let (mut second, mut end_lsn) = (0, 0);
        for (at, file) in files.iter_mut().enumerate() {
            if file.header.role == Role::Recovery {
                // The end of the run before, which nothing was known of.
                let replaced = if at > 0 { vec![(end_lsn, file.header.first_lsn)] } else { Vec::new() };
                file.sealed(&[], &replaced, 0);
            }
            for (n, id) in ids.get(at).into_iter().flatten().enumerate() {
                let record = file.done(id, 0);
                if at == subject && n == 1 {
                    second = record.start;
                }
            }
            // Nothing leads to a recovery but its own header, nor to a segment that is only made ready.
            let leads = headers.get(at + 1).filter(|next| next.role == Role::Rolled && at < 2);
            if let Some(next) = leads {
                file.next(next, 0);
            }
            end_lsn = file.lsn();
        }
        if let (Place::Newest | Place::Unused, true) = (self.place, self.synced) {
            // The header of a segment that was made ready behind it says so, and that one was never used.
            let synced_lsn = files[2].lsn();
            files.truncate(3);
            files.push(SegmentFile::new(Header { role: Role::Rolled, synced_lsn, ..files[2].header.behind() }));
        }
        if self.place == Place::Replaced {
            let newest = files[1].header;
            let header = Header { previous: 1, run: 3, synced_lsn: 0, ..newest.recovery_behind() };
            let mut recovery = SegmentFile::new(header);
            // All that an earlier seal has replaced, a later one names, too.
            let from = if self.role == Role::Recovery { files[0].lsn() } else { newest.first_lsn };
            recovery.sealed(&[], &[(from, header.first_lsn)], 0);
            files.push(recovery);
        }
        let recovery = files.iter().rev().find(|file| file.header.role == Role::Recovery);
        let run_number = recovery.map_or(1, |file| file.header.number);
        let mut directory = Directory::store(run_number, &files);
        let name = files[subject].name();
        self.spoil(&mut directory, &name, second);
        (directory, name)
    }

    fn spoil(&self, directory: &mut Directory, name: &str, second: usize) {
        let (_, bytes) = directory.0.iter_mut().find(|(other, _)| other == name).unwrap();
        match self.spoilt {
            Spoilt::Sound => {}
            Spoilt::Missing => directory.0.retain(|(other, _)| other != name),
            Spoilt::Empty => bytes.clear(),
            Spoilt::HalfHeader => bytes.truncate(100),
            Spoilt::OneHeader => bytes.truncate(4096),
            Spoilt::HeadersOnly => bytes.truncate(RECORDS_START),
            Spoilt::CutInARecord => bytes.truncate(second.max(RECORDS_START) + 20),
            Spoilt::CutInTheRoom => bytes.truncate(bytes.len() - 8),
            Spoilt::FirstCopyBad => bytes[50] ^= 1,
            Spoilt::SecondCopyBad => bytes[4096 + 50] ^= 1,
            Spoilt::BothCopiesBad => [50, 4096 + 50].into_iter().for_each(|at| bytes[at] ^= 1),
            Spoilt::FirstCopyZero => bytes[..256].fill(0),
            Spoilt::BothCopiesZero => [0, 4096].into_iter().for_each(|at| bytes[at..at + 256].fill(0)),
        }
    }
}

#[test]
fn a_segment_is_of_the_chain_or_missed_or_out_of_use() {
    let mut rows = Rows::<Facts>::new(&[
        ("of the chain", |facts| facts.counts() && !facts.nameless() && !facts.cut()),
        ("missed", |facts| facts.counts() && facts.nameless()),
        ("cut below the synced", |facts| facts.counts() && facts.cut() && facts.synced && !facts.seal_cut_off()),
        ("cut at or above it", |facts| facts.counts() && facts.cut() && !facts.synced && !facts.seal_cut_off()),
        ("its seal is cut off", |facts| facts.counts() && facts.seal_cut_off()),
        ("out of use", |facts| !facts.counts()),
    ]);
    for facts in Facts::all() {
        let (directory, name) = facts.lay_out();
        let row = rows.only(&facts);
        match row {
            "missed" => missed(&directory, &facts, &name),
            "cut below the synced" => {
                let said = refused(&directory, &facts, ErrorKind::Corrupt);
                assert!(said.starts_with(&format!("{name} is corrupt at byte ")), "{facts:?}: {said}");
            }
            "its seal is cut off" => {
                let said = refused(&directory, &facts, ErrorKind::Corrupt);
                // What the seal had replaced is missed, too.
                let missed = facts.synced && facts.place != Place::Oldest;
                let names_it = said.starts_with(&format!("{name} is corrupt at byte "));
                assert!(names_it || missed && said.starts_with("segment-"), "{facts:?}: {said}");
            }
            _ => opened(&directory, &facts, &name),
        }
    }
    rows.all_hit("one segment");
}

/// Who names the segment that is not there says so, and where its file is there without a sound header, that is named.
fn missed(directory: &Directory, facts: &Facts, name: &str) {
    let said = refused(directory, facts, ErrorKind::Corrupt);
    let number = facts.index() + 1;
    // A newest segment that was synced has one behind it that was made ready, and names it.
    let newest = facts.place == Place::Newest && !facts.synced;
    let expected = match (newest, facts.role) {
        (true, Role::Recovery) => format!("segment {number}, with which the latest run began, is missing"),
        (true, Role::Rolled) => format!("its successor, segment {number}, is missing"),
        _ => format!("it names segment {number}, which is missing"),
    };
    assert!(said.ends_with(&expected), "{facts:?}: {said}");
    let by = match (newest, facts.role) {
        (true, Role::Recovery) => "keyonce.store".to_owned(),
        (true, Role::Rolled) => "segment-00000002.keyonce".to_owned(),
        _ => format!("segment-{:08x}.keyonce", number + 1),
    };
    if facts.spoilt == Spoilt::BothCopiesBad {
        let told = format!("{name} is corrupt at byte 0: both copies of its header fail their checks; {by}: ");
        assert!(said.starts_with(&told), "{facts:?}: {said}");
    } else {
        assert!(said.starts_with(&format!("{by} is corrupt at byte ")), "{facts:?}: {said}");
    }
}

fn opened(directory: &Directory, facts: &Facts, name: &str) {
    opens(directory, facts, |store, first| {
        let there = |segment: usize, second: bool| {
            let of_subject = segment == facts.index();
            match facts.place {
                Place::Replaced => segment == 0,
                Place::Dead => !of_subject,
                _ => !of_subject || !facts.cut() || !second && facts.spoilt == Spoilt::CutInARecord,
            }
        };
        let keys = [["a1", "a2"], ["b1", "b2"], ["c1", "c2"]];
        for (segment, [one, two]) in keys.into_iter().enumerate() {
            let known = facts.place != Place::Replaced || segment < 2;
            holds(store, facts, &[(one, known && there(segment, false)), (two, known && there(segment, true))]);
        }
        let bad = matches!(
            facts.spoilt,
            Spoilt::FirstCopyBad | Spoilt::SecondCopyBad | Spoilt::FirstCopyZero | Spoilt::OneHeader
        );
        if first && facts.counts() {
            assert_eq!(store.opened().header_copies_bad, u64::from(bad), "{facts:?}: {name}");
        }
    });
}
