//! Writing records: whole but for their position, so that little is left to do under the log's lock.

use std::fmt;

use super::check::{self, crc};
use super::record::{Flags, Kind, ascend};
use super::{
    CLOSED_BYTES, Closed, Fill, HEAD_BYTES, MS_MAX, NEXT_BYTES, Next, PAYLOAD_BYTES_MAX, RECORD_BYTES_MAX, STATE_BYTES,
    StateKind, StateRecord, UNIT_BYTES, sealed_bytes, state_record_bytes,
};

/// How much room a draft keeps for the next record, in bytes: one large response does not pin its size for ever.
const KEPT_BYTES_MAX: usize = 64 << 10;

/// A record that is complete but for its position.
///
/// [`Draft::finish`] may be called any number of times, for one position or another. The buffer serves one state record
/// after another by [`Draft::refill`], without allocating once it is large enough.
#[derive(Clone)]
pub(crate) struct Draft {
    /// The head, of which `finish` fills all, and the body, but not a Pad's.
    bytes: Vec<u8>,
    /// The length of the record: that of `bytes`, but for a Pad.
    len: usize,
    kind: Kind,
    body_crc: u32,
    /// What the record's LSN must lie beyond; 0 when it names no earlier record.
    token: u64,
}

impl Draft {
    /// A draft of nothing yet, to be refilled before it is finished. Allocates nothing.
    pub(crate) const fn new() -> Self {
        Self { bytes: Vec::new(), len: 0, kind: Kind::Pad, body_crc: 0, token: 0 }
    }

    /// A state record, in a buffer of its own; else as [`Draft::refill`].
    #[cfg(test)]
    pub(crate) fn state(record: &StateRecord<'_>) -> Self {
        let mut draft = Self::new();
        draft.refill(record);
        draft
    }

    /// Makes this draft a state record, whatever it was. A Reserved one with token 0 gets its own LSN as its token; any
    /// other names the token of an earlier record.
    ///
    /// # Panics
    ///
    /// If the record could not be read back: lengths out of bounds, or a token that is no record's LSN.
    pub(crate) fn refill(&mut self, record: &StateRecord<'_>) {
        let StateRecord { kind, token, scope, id, payload, .. } = *record;
        let scope_bytes = u8::try_from(scope.len()).expect("a scope has at most 255 bytes");
        let id_bytes = u8::try_from(id.len()).expect("an id has at most 255 bytes");
        assert!(id_bytes > 0, "an id is never empty");
        assert!(payload.len() <= PAYLOAD_BYTES_MAX, "a payload has at most {PAYLOAD_BYTES_MAX} bytes");
        assert!(
            token.is_multiple_of(UNIT_BYTES as u64) && (token > 0 || kind == StateKind::Reserved),
            "a token is the LSN of a record: {record:?}"
        );
        let len = state_record_bytes(scope.len(), id.len(), payload.len());
        let flags = Flags {
            padding_bytes: len - (STATE_BYTES + scope.len() + id.len() + payload.len()),
            durability: record.durability,
            detached: record.detached,
            body_kept: record.body_kept,
            cause: record.cause,
        };
        let first_seen_ms = record.first_seen_ms.min(MS_MAX);
        let reserved_after_ms = record.reserved_ms.saturating_sub(first_seen_ms);

        let mut fixed = [0; STATE_BYTES - HEAD_BYTES];
        Fill(&mut fixed)
            .u64(token)
            .u48(first_seen_ms)
            .u48(record.mark_ms)
            .u48(record.retention_ms)
            .u48(record.kept_until_ms)
            .u32(u32::try_from(reserved_after_ms).unwrap_or(u32::MAX))
            .u32(record.attempt)
            .put(flags.to_bits().to_le_bytes())
            .put([scope_bytes, id_bytes])
            .put(record.fingerprint.to_bytes());
        self.begin(Kind::State(kind), len, token);
        self.bytes.extend_from_slice(&fixed);
        self.bytes.extend_from_slice(scope);
        self.bytes.extend_from_slice(id);
        self.bytes.extend_from_slice(payload);
        self.bytes.resize(len, 0);
        self.cover();
    }

    /// A Next record.
    pub(crate) fn next(next: &Next) -> Self {
        let mut draft = Self::new();
        draft.begin(Kind::Next, NEXT_BYTES, 0);
        for field in [next.number, next.first_lsn, next.salt, next.unfinished, next.newest_kept_until_ms] {
            draft.bytes.extend_from_slice(&field.to_le_bytes());
        }
        draft.cover();
        draft
    }

    /// A Sealed record, which replaces these intervals of the log, `from..to` in LSNs.
    ///
    /// # Panics
    ///
    /// If the intervals do not ascend, one is empty or overlaps another, or they are too many for one record.
    pub(crate) fn sealed(count: u64, digest: [u8; 16], intervals: &[(u64, u64)]) -> Self {
        let len = sealed_bytes(intervals.len());
        assert!(len <= RECORD_BYTES_MAX, "a seal replaces no more intervals than a record holds");
        assert!(ascend(intervals.iter().copied()), "replaced intervals ascend and are disjoint: {intervals:?}");
        let mut draft = Self::new();
        draft.begin(Kind::Sealed, len, 0);
        draft.bytes.extend_from_slice(&count.to_le_bytes());
        draft.bytes.extend_from_slice(&digest);
        draft.bytes.extend_from_slice(&(intervals.len() as u64).to_le_bytes());
        for (from, to) in intervals {
            draft.bytes.extend_from_slice(&from.to_le_bytes());
            draft.bytes.extend_from_slice(&to.to_le_bytes());
        }
        draft.cover();
        draft
    }

    /// A Closed record.
    pub(crate) fn closed(closed: &Closed) -> Self {
        let Closed { time, unfinished } = closed;
        let mut draft = Self::new();
        draft.begin(Kind::Closed, CLOSED_BYTES, 0);
        for field in [time.store_ms, time.boot_ms, time.wall_ms] {
            draft.bytes.extend_from_slice(&field.to_le_bytes());
        }
        draft.bytes.extend_from_slice(&time.boot_id);
        draft.bytes.extend_from_slice(&unfinished.to_le_bytes());
        draft.bytes.extend_from_slice(&0_u64.to_le_bytes());
        draft.cover();
        draft
    }

    /// A Pad that fills `len` bytes. Readers know it; no writer has a use for it so far. Only its head is ever written:
    /// what [`Draft::finish`] gives is shorter than [`Draft::len`].
    ///
    /// # Panics
    ///
    /// If no Pad has this length: it must be a multiple of 8, and at least a head's.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn pad(len: usize) -> Self {
        assert!(
            len.is_multiple_of(UNIT_BYTES) && (HEAD_BYTES..=super::PAD_BYTES_MAX).contains(&len),
            "no Pad is {len} bytes long"
        );
        let mut draft = Self::new();
        draft.begin(Kind::Pad, len, 0);
        draft.cover();
        draft
    }

    /// The length of the whole record in bytes: the next one stands that much further.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// How large the buffer is, in bytes.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    /// Gives the record its position, and the bytes to write there.
    ///
    /// `salt` is the segment's, `lsn` the position; everything before `synced_lsn` is known to be on the disk. Costs
    /// one CRC of 16 bytes, whatever the length.
    ///
    /// # Panics
    ///
    /// If the draft was never filled, `lsn` is no record's position, or a token is not from before it.
    pub(crate) fn finish(&mut self, salt: u64, lsn: u64, synced_lsn: u64) -> &[u8] {
        let unit = UNIT_BYTES as u64;
        assert!(self.len > 0, "a draft must be filled before it is finished");
        assert!(lsn.is_multiple_of(unit) && self.token < lsn, "no record with token {} stands at {lsn}", self.token);
        let units = u32::try_from(self.len / UNIT_BYTES).expect("no record is longer than its length field can tell");
        let behind = u32::try_from(lsn.saturating_sub(synced_lsn).div_ceil(unit)).unwrap_or(u32::MAX).to_le_bytes();
        let word = (u32::from(self.kind.code()) << 24 | units).to_le_bytes();
        let head = check::head(word, behind, lsn, salt);
        let checksum = check::whole(self.body_crc, head, salt);
        Fill(&mut self.bytes).put(checksum).put(word).put(head).put(behind);
        &self.bytes
    }

    /// Starts over with a head that is still to be filled.
    fn begin(&mut self, kind: Kind, len: usize, token: u64) {
        self.bytes.clear();
        if self.bytes.capacity() > KEPT_BYTES_MAX {
            self.bytes.shrink_to(KEPT_BYTES_MAX);
        }
        self.bytes.reserve(if kind == Kind::Pad { HEAD_BYTES } else { len });
        self.bytes.extend_from_slice(&[0; HEAD_BYTES]);
        (self.len, self.kind, self.token) = (len, kind, token);
    }

    /// Takes the CRC of the body, now that it is complete.
    fn cover(&mut self) {
        self.body_crc = crc(0, self.bytes.get(HEAD_BYTES..).unwrap_or_default());
    }
}

/// Without the bytes: keys and responses are never printed.
impl fmt::Debug for Draft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Draft").field("kind", &self.kind).field("len", &self.len).finish_non_exhaustive()
    }
}
