//! Hints: leaving them on the disk when a segment has ended, and opening by them. The format's head tells what they
//! are.

use crate::format::{self, Entry, HINT_ENTRY_BYTES, HINT_HEAD_BYTES, HintOf, Record};
use crate::key::HashSeed;
use crate::retention::SEGMENT_BYTES_MAX;
use crate::scan::{Reading, Scan};
use crate::segment::{self, Life};
use crate::storage::Storage;

const NAME_PREFIX: &str = "hint-";

/// The longest hint in bytes: a segment of the shortest records alone.
const BYTES_MAX: u64 =
    HINT_HEAD_BYTES as u64 + HINT_ENTRY_BYTES as u64 * (SEGMENT_BYTES_MAX / format::STATE_BYTES as u64);

/// The name of the hint of segment file `index`.
fn file_name(index: u32) -> String {
    segment::numbered(NAME_PREFIX, index)
}

/// The index in the name of a hint.
pub(crate) fn file_index(name: &str) -> Option<u32> {
    segment::index_in(NAME_PREFIX, name)
}

/// The name of the hint of a segment file.
fn name_beside(segment_name: &str) -> Option<String> {
    segment::file_index(segment_name).map(file_name)
}

/// Removes the hint of a segment file that is no more, if there is one.
pub(crate) fn remove_beside(storage: &dyn Storage, segment_name: &str) {
    if let Some(name) = name_beside(segment_name)
        && storage.remove(&name).is_err()
    {
        // There was none, or it stays, and nothing reads it.
    }
}

/// Removes the hints among these files whose segment is not among them.
pub(crate) fn remove_orphans(storage: &dyn Storage, names: &[String]) {
    let has_segment = |index: &u32| names.contains(&segment::file_name(*index));
    for index in names.iter().filter_map(|name| file_index(name)).filter(|index| !has_segment(index)) {
        remove_beside(storage, &segment::file_name(index));
    }
}

/// Leaves the hint of a segment that has ended and was synced whole. When that fails, or what is read is not all sound,
/// there is none, and the next opening reads the segment.
pub(crate) fn leave(storage: &dyn Storage, store_id: [u8; 16], life: &Life, seed: &HashSeed) {
    life.note_hint_done();
    let mut buffer = Vec::new();
    let (Some(name), Ok(reading)) = (name_beside(&life.name), Reading::of(life, &mut buffer)) else { return };
    if reading.scan.next.is_none() || !reading.scan.holes.is_empty() {
        return;
    }
    let of = HintOf { store_id, number: life.number, salt: life.salt, seed: *seed };
    if storage.leave(&name, &format::encode_hint(&of, reading.scan.end, &reading.entries(seed))).is_err() {
        // A full disk, say. What is left of it is no hint.
    }
}

/// The bytes of the hint of a segment, whatever they are.
pub(crate) fn read(storage: &dyn Storage, life: &Life) -> Option<Vec<u8>> {
    let bytes_max = usize::try_from(BYTES_MAX).ok()?;
    storage.read(&name_beside(&life.name)?, bytes_max).ok()
}

/// What the hint of a segment says, in place of reading it. `None`: it cannot be believed.
pub(crate) fn of<'a>(
    bytes: &'a [u8],
    store_id: [u8; 16],
    seed: &HashSeed,
    life: &Life,
) -> Option<(Scan, impl ExactSizeIterator<Item = Entry> + Clone + use<'a>)> {
    let of = HintOf { store_id, number: life.number, salt: life.salt, seed: *seed };
    let (end, entries) = format::decode_hint(bytes, &of)?;
    if end > life.bytes || life.data.len() < life.bytes {
        return None;
    }
    // The segment itself says where the log goes on.
    let mut next = [0; format::NEXT_BYTES];
    let offset = end.checked_sub(next.len() as u64)?;
    let read = life.data.read_at(offset, &mut next).ok()?;
    let lsn = life.first_lsn + offset;
    let Record::Next(next) = format::verify(next.get(..read)?, life.salt, lsn).ok()?.record else { return None };
    life.note_hint_done();
    let scan = Scan { records: entries.len() as u64, hinted: true, next: Some((lsn, next)), end, ..Scan::default() };
    Some((scan, entries))
}
