//! A file that is in a later life still holds bytes of its earlier ones, and a disk may write a page to a wrong place:
//! neither is ever taken for what was written here.

use keyonce::ErrorKind;

use crate::forge::{Directory, Header, RECORDS_START, Role, SegmentFile};
use crate::verdicts::{holds, open, opens};

/// What lies where it does not belong.
#[derive(Clone, Copy, Debug)]
enum Stale {
    /// One record of an earlier life of the file, by its number in that life.
    Record(usize),
    /// All of the earlier life from this place on: pages that were never written anew.
    Tail,
    /// A record of this very life, from another place.
    Misplaced(usize),
}

const KEYS: [&str; 6] = ["new0", "new1", "new2", "new3", "new4", "new5"];

/// The file as it is now: the third segment of the log, which was synced up to its fourth key.
fn present() -> (SegmentFile, Vec<usize>) {
    let first = Header { role: Role::Rolled, ..Header::first().behind().behind() };
    let mut file = SegmentFile::new(Header { oldest_live: 3, ..first });
    let mut starts = Vec::new();
    let mut synced_lsn = 0;
    for (at, key) in KEYS.into_iter().enumerate() {
        if at < 4 {
            synced_lsn = file.lsn();
        }
        starts.push(file.done(key, synced_lsn).start);
    }
    starts.push(usize::try_from(file.lsn() - file.header.first_lsn).unwrap());
    (file, starts)
}

/// The file in its first life, with every kind of record; none of its keys would be past its retention now.
fn earlier() -> (SegmentFile, Vec<std::ops::Range<usize>>) {
    let mut file = SegmentFile::new(Header::first());
    let mut records = Vec::new();
    for key in ["old0", "old1", "old2"] {
        records.push(file.done(key, 0));
    }
    records.push(file.sealed(&[], &[(0, u64::from(u32::MAX))], 0));
    records.push(file.next(&Header { number: 9, previous: 1, ..Header::first() }, 0));
    records.push(file.closed(0));
    for key in ["old3", "old4"] {
        records.push(file.done(key, 0));
    }
    (file, records)
}

/// At every place where a record may stand, and over every record: what is below the synced position is missed, what is
/// above it is a hole, and what was put there never counts.
#[test]
fn bytes_of_an_earlier_life_or_of_another_place_never_count_wherever_they_lie() {
    let ((file, starts), (old, old_records)) = (present(), earlier());
    let end = *starts.last().unwrap();
    let stale = (0..old_records.len()).map(Stale::Record).chain([Stale::Tail]);
    let stale: Vec<_> = stale.chain((0..KEYS.len()).map(Stale::Misplaced)).collect();
    let (mut told, mut passed) = (0, 0);
    for at in (RECORDS_START..end + 200).step_by(8) {
        for stale in &stale {
            let bytes = match *stale {
                Stale::Record(number) => &old.bytes[old_records[number].clone()],
                Stale::Tail => &old.bytes[at..],
                // In its own place it is no damage.
                Stale::Misplaced(number) if starts[number] == at => continue,
                Stale::Misplaced(number) => &file.bytes[starts[number]..starts[number + 1]],
            };
            let mut damaged = file.clone();
            damaged.bytes[at..at + bytes.len()].copy_from_slice(bytes);
            let whole = |number: usize| starts[number + 1] <= at || at + bytes.len() <= starts[number];
            let facts = (at, stale);
            let directory = Directory::store(3, &[damaged]);
            // A record that was overwritten takes what it said of the synced position with it.
            let synced = (0..4).rev().find(|number| whole(*number)).map_or(0, |number| starts[number]);
            let synced = if (4..KEYS.len()).any(whole) { starts[3] } else { synced };
            match (0..KEYS.len()).find(|number| !whole(*number) && starts[*number] < synced) {
                Some(number) => {
                    told += 1;
                    let said = crate::verdicts::refused(&directory, &facts, ErrorKind::Corrupt);
                    let place = format!("segment-00000003.keyonce is corrupt at byte {}: ", starts[number]);
                    assert!(said.starts_with(&place), "{facts:?}: {said}");
                }
                None => {
                    passed += 1;
                    opens(&directory, &facts, |store, _| {
                        for (number, key) in KEYS.into_iter().enumerate() {
                            holds(store, &facts, &[(key, whole(number))]);
                        }
                        let old = ["old0", "old1", "old2", "old3", "old4"];
                        holds(store, &facts, &old.map(|key| (key, false)));
                    });
                }
            }
        }
    }
    crate::place::tell(&format!("stale bytes: {told} told, {passed} passed over"));
    assert!(told > 300 && passed > 300, "{told} told, {passed} passed over");
}

/// The rig sees what is accepted: the same records, written for this place and this life, do count.
#[test]
fn a_record_that_is_made_to_fit_its_place_does_count() {
    let (mut file, starts) = present();
    let (old, records) = earlier();
    let (start, bytes) = (*starts.last().unwrap(), &old.bytes[records[0].clone()]);
    file.bytes[start..start + bytes.len()].copy_from_slice(bytes);
    file.repair(start, start + bytes.len());
    let store = open(&Directory::store(3, &[file]).disk(), 1).unwrap();
    holds(&store, &"fitted", &[("old0", true), ("new5", true)]);
}
