//! Only the length of a record is wrong: row D4.

use keyonce::ErrorKind;

use crate::forge::{Directory, Header, RECORDS_START, SegmentFile};
use crate::verdicts::{holds, opens, refused};

const KEYS: [&str; 5] = ["k0", "k1", "k2", "k3", "k4"];

/// Lengths too small, too large, to the very end of the segment and past it, with the check of the head as it was and
/// with one that holds; below the synced position and above it. The neighbours survive, or the place is told.
#[test]
fn a_wrong_length_costs_no_neighbour_or_is_told_by_place() {
    let segment_units = Header::first().segment_bytes / 8;
    for damaged in 0..KEYS.len() {
        let (_, starts) = lay_out(0);
        let units_of = |at: usize| u64::try_from(starts[at + 1] - starts[at]).unwrap() / 8;
        let (right, to_end) = (units_of(damaged), segment_units - starts[damaged] as u64 / 8);
        let mut wrong = vec![0, 1, 2, 9, 10, right - 1, right + 1, 2 * right, 3 * right, to_end - 1, to_end];
        wrong.extend([to_end + 1, 2 * to_end, (1 << 21) + 80, (1 << 24) - 1]);
        wrong.retain(|units| *units != right);
        for units in wrong {
            for repaired in [false, true] {
                for below in [false, true] {
                    // The last record cannot lie below what a later one says.
                    if below && damaged + 1 == KEYS.len() {
                        continue;
                    }
                    let (mut file, starts) = lay_out(if below { damaged + 1 } else { 0 });
                    let (start, end) = (starts[damaged], starts[damaged + 1]);
                    let word = 3 << 24 | u32::try_from(units).unwrap();
                    file.bytes[start + 4..start + 8].copy_from_slice(&word.to_le_bytes());
                    if repaired {
                        file.repair(start, end);
                    }
                    let facts = (KEYS[damaged], units, repaired, below);
                    let directory = Directory::store(1, &[file]);
                    if below {
                        let said = refused(&directory, &facts, ErrorKind::Corrupt);
                        let place = format!("segment-00000001.keyonce is corrupt at byte {start}: ");
                        assert!(said.starts_with(&place), "{facts:?}: {said}");
                        continue;
                    }
                    opens(&directory, &facts, |store, _| {
                        for (at, key) in KEYS.into_iter().enumerate() {
                            holds(store, &facts, &[(key, at != damaged)]);
                        }
                    });
                }
            }
        }
    }
}

/// Five keys, of which the last says that the first `synced` were on the disk; and where each starts.
fn lay_out(synced: usize) -> (SegmentFile, Vec<usize>) {
    let mut file = SegmentFile::new(Header::first());
    let mut starts = vec![RECORDS_START];
    for (at, key) in KEYS.into_iter().enumerate() {
        let synced_lsn = if at + 1 == KEYS.len() { starts[synced] as u64 } else { 0 };
        starts.push(file.done(key, synced_lsn).end);
    }
    (file, starts)
}
