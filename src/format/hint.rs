//! Hints: what an opening needs to know of a segment that ended, without reading it.

use super::record::Kind;
use super::{DATA_START, Fields, Fill, NEXT_BYTES, STATE_BYTES, StateKind, UNIT_BYTES, VERSION};
use crate::key::HashSeed;

const MAGIC: [u8; 8] = *b"KEYHINT\0";
/// The size of a hint's head in bytes.
pub(crate) const HINT_HEAD_BYTES: usize = 80;
/// The size of one entry in bytes.
pub(crate) const HINT_ENTRY_BYTES: usize = 18;
/// Where the digest stands, which covers the hash seed and all bytes but its own.
const DIGEST_AT: usize = HINT_HEAD_BYTES - 16;

/// A record that gives a key a state: enough to put it into the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The hash of the key under the store's seed.
    pub(crate) hash: u64,
    /// Until when the record counts.
    pub(crate) kept_until_ms: u64,
    /// Where in its segment the record starts.
    pub(crate) offset: u32,
    /// What it makes of the key.
    pub(crate) kind: StateKind,
}

/// Which life of which segment a hint is of, and what its hashes were made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HintOf {
    /// The store it belongs to.
    pub(crate) store_id: [u8; 16],
    /// The segment's number.
    pub(crate) number: u64,
    /// The salt of its life.
    pub(crate) salt: u64,
    /// The seed of the store's key hash.
    pub(crate) seed: HashSeed,
}

/// The bytes of a hint; `end` is the offset behind the segment's last record.
///
/// # Panics
///
/// If an entry is none of a segment: its offset is no multiple of 8 below 64 MiB.
pub(crate) fn encode_hint(of: &HintOf, end: u64, entries: &[Entry]) -> Vec<u8> {
    let mut bytes = vec![0; HINT_HEAD_BYTES + HINT_ENTRY_BYTES * entries.len()];
    let (head, body) = bytes.split_at_mut(HINT_HEAD_BYTES);
    let mut fill = Fill(head);
    fill.put(MAGIC).u32(VERSION).u32(0).put(of.store_id).u64(of.number).u64(of.salt).u64(end);
    fill.u64(entries.len() as u64);
    let mut fill = Fill(body);
    for entry in entries {
        let units = entry.offset / 8;
        assert!(entry.offset.is_multiple_of(8) && units >> 24 == 0, "no record starts at offset {}", entry.offset);
        let place = u32::from(Kind::State(entry.kind).code()) << 24 | units;
        fill.u64(entry.hash).u48(entry.kept_until_ms).u32(place);
    }
    let digest = digest(&of.seed, &bytes);
    if let Some(place) = bytes.get_mut(DIGEST_AT..HINT_HEAD_BYTES) {
        place.copy_from_slice(&digest);
    }
    bytes
}

/// The segment's end and the entries, if these are all the bytes of a hint of just that life; else nothing, whatever is
/// wrong with them.
pub(crate) fn decode_hint<'a>(
    bytes: &'a [u8],
    of: &HintOf,
) -> Option<(u64, impl ExactSizeIterator<Item = Entry> + Clone + use<'a>)> {
    let (head, body) = bytes.split_at_checked(HINT_HEAD_BYTES)?;
    let mut fields = Fields(head);
    let ours = fields.array()? == MAGIC && fields.u32()? == VERSION && fields.u32()? == 0;
    let of_it = (fields.array()?, fields.u64()?, fields.u64()?) == (of.store_id, of.number, of.salt);
    let (end, count) = (fields.u64()?, fields.u64()?);
    if !ours || !of_it || fields.array()? != digest(&of.seed, bytes) {
        return None;
    }
    let (entries, []) = body.as_chunks::<HINT_ENTRY_BYTES>() else { return None };
    if entries.len() as u64 != count {
        return None;
    }
    let mut last = DATA_START - 1;
    for bytes in entries {
        let offset = u64::from(entry(bytes)?.offset);
        if offset <= last || offset + (STATE_BYTES + NEXT_BYTES) as u64 > end {
            return None;
        }
        last = offset;
    }
    let ends = end.is_multiple_of(UNIT_BYTES as u64) && end >= DATA_START + NEXT_BYTES as u64;
    let entries = entries.iter().map(|bytes| entry(bytes).expect("it was read before"));
    ends.then_some((end, entries))
}

fn entry(bytes: &[u8; HINT_ENTRY_BYTES]) -> Option<Entry> {
    let mut fields = Fields(bytes);
    let (hash, kept_until_ms) = (fields.u64()?, fields.u48()?);
    let [a, b, c, code] = fields.array()?;
    let Some(Kind::State(kind)) = Kind::from_code(code) else { return None };
    let offset = u32::from_le_bytes([a, b, c, 0]) * 8;
    Some(Entry { hash, kept_until_ms, offset, kind })
}

/// The first half of the BLAKE3 digest of the seed and of all but the digest.
fn digest(HashSeed(seed): &HashSeed, bytes: &[u8]) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(seed);
    hasher.update(bytes.get(..DIGEST_AT).unwrap_or_default());
    hasher.update(bytes.get(HINT_HEAD_BYTES..).unwrap_or_default());
    let mut digest = [0; 16];
    hasher.finalize_xof().fill(&mut digest);
    digest
}
