//! Reading records: what stands at a position of the log, if it can be vouched for.

use std::fmt;

use super::check::{self, crc};
use super::{
    CLOSED_BYTES, Fields, HEAD_BYTES, LENGTH_UNITS_MAX, NEXT_BYTES, PAYLOAD_BYTES_MAX, RECORD_BYTES_MAX, STATE_BYTES,
    UNIT_BYTES, is_zero, sealed_bytes,
};
use crate::clock::TimeMark;
use crate::key::Fingerprint;
use crate::options::Durability;

/// Why a key is Interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// The process that held the reservation is known to be gone.
    Crash,
    /// The owner let go without an outcome: it dropped the reservation (by a panic, an early return), interrupted it
    /// aloud, or gave back a later attempt of a key whose earlier one did not end well.
    Dropped,
    /// The lease lapsed, or the store was closed under a living guard: whoever owned the key may still be at work.
    LeaseLapsed,
}

/// What a state record makes of its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum StateKind {
    /// In flight: somebody owns it.
    Reserved,
    /// Nobody works on it, its outcome is unknown.
    Interrupted,
    /// Its response is stored.
    Done,
    /// Given back: nothing happened.
    Released,
    /// Deleted by an operator.
    Forgotten,
}

/// The kind of a record, of all kinds that this version knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    State(StateKind),
    Next,
    Sealed,
    Closed,
    Pad,
}

impl Kind {
    pub(super) fn code(self) -> u8 {
        match self {
            Self::State(StateKind::Reserved) => 1,
            Self::State(StateKind::Interrupted) => 2,
            Self::State(StateKind::Done) => 3,
            Self::State(StateKind::Released) => 4,
            Self::State(StateKind::Forgotten) => 5,
            Self::Next => 16,
            Self::Sealed => 17,
            Self::Closed => 18,
            Self::Pad => 19,
        }
    }

    pub(super) fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::State(StateKind::Reserved)),
            2 => Some(Self::State(StateKind::Interrupted)),
            3 => Some(Self::State(StateKind::Done)),
            4 => Some(Self::State(StateKind::Released)),
            5 => Some(Self::State(StateKind::Forgotten)),
            16 => Some(Self::Next),
            17 => Some(Self::Sealed),
            18 => Some(Self::Closed),
            19 => Some(Self::Pad),
            _ => None,
        }
    }

    /// Whether a record of this kind can be this long; how long exactly, its fields tell.
    fn suits(self, len: usize) -> bool {
        match self {
            Self::State(_) => (STATE_BYTES..=RECORD_BYTES_MAX).contains(&len),
            Self::Next => len == NEXT_BYTES,
            Self::Sealed => (sealed_bytes(0)..=RECORD_BYTES_MAX).contains(&len),
            Self::Closed => len == CLOSED_BYTES,
            Self::Pad => len >= HEAD_BYTES,
        }
    }
}

/// All that is known of a key, as one record tells it. Times are store time.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct StateRecord<'a> {
    /// What it makes of the key.
    pub(crate) kind: StateKind,
    /// The fencing token. In a Reserved record that is about to be written, 0 stands for the record's own LSN.
    pub(crate) token: u64,
    /// The number of the attempt.
    pub(crate) attempt: u32,
    /// Why the key is Interrupted.
    pub(crate) cause: Option<Cause>,
    /// The level of the reservation.
    pub(crate) durability: Durability,
    /// Whether the reservation outlives its process.
    pub(crate) detached: bool,
    /// Whether the payload of a Done record is the response; else it is the reference.
    pub(crate) body_kept: bool,
    /// When the key was first reserved.
    pub(crate) first_seen_ms: u64,
    /// When this attempt was reserved, not before `first_seen_ms`; told up to 49 days later, then as that.
    pub(crate) reserved_ms: u64,
    /// The lease's end in a Reserved record, else the moment it tells of.
    pub(crate) mark_ms: u64,
    /// How long the key is to be remembered from its completion.
    pub(crate) retention_ms: u64,
    /// Until when this record counts.
    pub(crate) kept_until_ms: u64,
    /// The request that the key stands for.
    pub(crate) fingerprint: Fingerprint,
    /// The key's scope, at most 255 bytes.
    pub(crate) scope: &'a [u8],
    /// The key's id, 1 to 255 bytes.
    pub(crate) id: &'a [u8],
    /// Checkpoint, response, reference or reason, by the kind.
    pub(crate) payload: &'a [u8],
}

/// Names and lengths only: keys and responses are never printed.
impl fmt::Debug for StateRecord<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StateRecord")
            .field("kind", &self.kind)
            .field("token", &self.token)
            .field("attempt", &self.attempt)
            .field("cause", &self.cause)
            .field("kept_until_ms", &self.kept_until_ms)
            .field("payload_bytes", &self.payload.len())
            .finish_non_exhaustive()
    }
}

/// The last record of a segment: where the log goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Next {
    /// The successor's number.
    pub(crate) number: u64,
    /// The successor's first LSN.
    pub(crate) first_lsn: u64,
    /// The successor's salt.
    pub(crate) salt: u64,
    /// Keys whose latest record lies in this segment and that are unfinished.
    pub(crate) unfinished: u64,
    /// The newest kept-until of this segment's records.
    pub(crate) newest_kept_until_ms: u64,
}

/// The end of a recovery: what its copies replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sealed<'a> {
    /// How many copies there are.
    pub(crate) count: u64,
    /// The digest of the copies.
    pub(crate) digest: [u8; 16],
    intervals: &'a [[u8; 16]],
}

impl Sealed<'_> {
    /// The replaced intervals of the log, `from..to` in LSNs: ascending, none empty, none overlapping.
    pub(crate) fn intervals(&self) -> impl ExactSizeIterator<Item = (u64, u64)> + Clone {
        self.intervals.iter().map(|pair| {
            let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *pair;
            (u64::from_le_bytes([a, b, c, d, e, f, g, h]), u64::from_le_bytes([i, j, k, l, m, n, o, p]))
        })
    }
}

/// Whether intervals of the log ascend, and none is empty or overlaps another.
pub(super) fn ascend(intervals: impl Iterator<Item = (u64, u64)>) -> bool {
    let mut end = 0;
    for (from, to) in intervals {
        if from < end || to <= from {
            return false;
        }
        end = to;
    }
    true
}

/// The clean end of a run: everything before it was synced before it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Closed {
    /// When.
    pub(crate) time: TimeMark,
    /// How many keys are unfinished.
    pub(crate) unfinished: u64,
}

/// A record of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Record<'a> {
    /// Gives a key a state.
    State(StateRecord<'a>),
    /// Ends a segment.
    Next(Next),
    /// Ends a recovery.
    Sealed(Sealed<'a>),
    /// Ends a run.
    Closed(Closed),
    /// Fills room.
    Pad,
}

/// A record that was vouched for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen<'a> {
    /// What it says.
    pub(crate) record: Record<'a>,
    /// Its length in bytes: the next record stands there.
    pub(crate) len: usize,
    /// How many bytes the synced LSN lay behind when it was written, never more than the record's LSN; `None`: further
    /// than a record can tell, the segment's header knows.
    pub(crate) behind: Option<u64>,
    /// Its bytes, head included.
    pub(crate) bytes: &'a [u8],
}

/// Without the bytes: keys and responses are never printed.
impl fmt::Debug for Seen<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seen")
            .field("record", &self.record)
            .field("len", &self.len)
            .field("behind", &self.behind)
            .finish_non_exhaustive()
    }
}

/// Why no record can be vouched for at a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub(crate) enum Bad {
    /// The commit word is zero: nothing was written here.
    Blank,
    /// No record's head was written here in this life of the segment, or it is damaged.
    Head,
    /// The head is sound, its length is not: wrong for the kind, or past the end of the bytes.
    Length,
    /// The head is sound, the rest is not as it was written.
    Body,
    /// As it was written, and still no record of this format: a bug of a writer.
    Malformed,
}

impl fmt::Display for Bad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Blank => "nothing was written here",
            Self::Head => "the head of the record fails its check",
            Self::Length => "the record is too short for its kind or longer than its segment",
            Self::Body => "the record fails its checksum",
            Self::Malformed => "the record's checks hold but its fields make no sense",
        })
    }
}

/// A record's head as it is read, not yet checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RawHead {
    checksum: [u8; 4],
    word: [u8; 4],
    check: [u8; 4],
    behind: [u8; 4],
}

impl RawHead {
    fn read(bytes: &[u8]) -> Result<Self, Bad> {
        let commit_word: &[u8; 8] = bytes.first_chunk().ok_or(Bad::Length)?;
        if u64::from_le_bytes(*commit_word) == 0 {
            return Err(Bad::Blank);
        }
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *bytes.first_chunk().ok_or(Bad::Length)?;
        Ok(Self { checksum: [a, b, c, d], word: [e, f, g, h], check: [i, j, k, l], behind: [m, n, o, p] })
    }

    fn kind(self) -> Option<Kind> {
        let [_, _, _, code] = self.word;
        Kind::from_code(code)
    }

    /// The length of the whole record in bytes, as the head tells it: from 0 to all that the field can tell.
    fn len(self) -> usize {
        (u32::from_le_bytes(self.word) & LENGTH_UNITS_MAX) as usize * UNIT_BYTES
    }

    /// How many bytes the synced LSN lay behind: `Some(None)` is further than can be told, `None` before LSN 0.
    fn behind(self, lsn: u64) -> Option<Option<u64>> {
        let units = u32::from_le_bytes(self.behind);
        let bytes = u64::from(units) * UNIT_BYTES as u64;
        (bytes <= lsn).then_some((units != u32::MAX).then_some(bytes))
    }
}

/// A record's head whose check holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    /// The length of the whole record in bytes; it suits the kind.
    len: usize,
    kind: Kind,
    behind: Option<u64>,
    raw: RawHead,
}

/// Vouches for the head that starts `bytes`; the record may be longer than they are.
fn checked_head(bytes: &[u8], salt: u64, lsn: u64) -> Result<Head, Bad> {
    let raw = RawHead::read(bytes)?;
    if check::head(raw.word, raw.behind, lsn, salt) != raw.check {
        return Err(Bad::Head);
    }
    let (kind, len) = (raw.kind().ok_or(Bad::Malformed)?, raw.len());
    if !kind.suits(len) {
        return Err(Bad::Length);
    }
    let behind = raw.behind(lsn).ok_or(Bad::Malformed)?;
    Ok(Head { len, kind, behind, raw })
}

/// Reads the record at `lsn` and vouches for every byte of it, a Pad's body excepted.
///
/// `bytes` starts at the record and goes on to the end of its segment; `salt` is the segment's. This is the only way
/// from bytes that may be anything to a [`Record`].
pub(crate) fn verify(bytes: &[u8], salt: u64, lsn: u64) -> Result<Seen<'_>, Bad> {
    let Head { len, kind, behind, raw } = checked_head(bytes, salt, lsn)?;
    let bytes = bytes.get(..len).ok_or(Bad::Length)?;
    let body = bytes.get(HEAD_BYTES..).ok_or(Bad::Length)?;
    let covered = if kind == Kind::Pad { &[] } else { body };
    if check::whole(crc(0, covered), raw.check, salt) != raw.checksum {
        return Err(Bad::Body);
    }
    let record = record(kind, body, lsn).ok_or(Bad::Malformed)?;
    Ok(Seen { record, len, behind, bytes })
}

/// How far behind the start of `bytes`, where no record can be vouched for, the next head stands whose check holds: all
/// of them, when there is none. Linear: empty stretches are skipped as such, and what cannot be a head is not checked
/// as one.
pub(crate) fn to_next_head(bytes: &[u8], salt: u64, lsn: u64) -> usize {
    let (words, _) = bytes.as_chunks::<UNIT_BYTES>();
    let mut at = 1;
    loop {
        at += empty_words(words.get(at..).unwrap_or_default());
        let Some(word) = words.get(at) else { return bytes.len() };
        let offset = at * UNIT_BYTES;
        let here = bytes.get(offset..).unwrap_or_default();
        if may_start_a_record(*word) && checked_head(here, salt, lsn + offset as u64) != Err(Bad::Head) {
            return offset;
        }
        at += 1;
    }
}

/// How many words at the start are zero.
fn empty_words(words: &[[u8; UNIT_BYTES]]) -> usize {
    let (blocks, _) = words.as_chunks::<8>();
    let blocks = blocks.iter().take_while(|block| block.iter().all(|word| *word == [0; UNIT_BYTES])).count();
    let rest = words.get(8 * blocks..).unwrap_or_default();
    8 * blocks + rest.iter().take_while(|word| **word == [0; UNIT_BYTES]).count()
}

/// Whether a commit word tells a kind, and a length that suits it.
fn may_start_a_record(commit_word: [u8; UNIT_BYTES]) -> bool {
    let [_, _, _, _, a, b, c, code] = commit_word;
    let units = u32::from_le_bytes([a, b, c, 0]);
    Kind::from_code(code).is_some_and(|kind| kind.suits(units as usize * UNIT_BYTES))
}

/// The length in bytes of the record whose head this is, which was vouched for before; 0 when it is no head at all.
pub(crate) fn record_len(head: &[u8]) -> usize {
    RawHead::read(head).map_or(0, RawHead::len)
}

/// Reads the state record at `lsn` without its checks: a handful of loads.
///
/// Only for a record that this run verified or wrote, so that it can be no other. Given anything else it still reads
/// within `bytes`, and what it gives means nothing.
pub(crate) fn trusted(bytes: &[u8], lsn: u64) -> Result<StateRecord<'_>, Bad> {
    let raw = RawHead::read(bytes)?;
    let Some(Kind::State(kind)) = raw.kind() else {
        return Err(Bad::Malformed);
    };
    let body = bytes.get(HEAD_BYTES..raw.len()).ok_or(Bad::Length)?;
    let (state, _) = state(kind, body, lsn).ok_or(Bad::Malformed)?;
    Ok(state)
}

fn record(kind: Kind, body: &[u8], lsn: u64) -> Option<Record<'_>> {
    match kind {
        Kind::State(kind) => canonical_state(kind, body, lsn).map(Record::State),
        Kind::Next => next(body).map(Record::Next),
        Kind::Sealed => sealed(body).map(Record::Sealed),
        Kind::Closed => closed(body).map(Record::Closed),
        Kind::Pad => Some(Record::Pad),
    }
}

/// A state record as a draft would make it: the token is that of a record before this one, or told as 0 for this one's
/// own; the payload is within its bound; the padding is zero.
fn canonical_state(kind: StateKind, body: &[u8], lsn: u64) -> Option<StateRecord<'_>> {
    let told = Fields(body).u64()?;
    let (state, padding) = state(kind, body, lsn)?;
    let own = told == 0 && kind == StateKind::Reserved;
    let earlier = (1..lsn).contains(&told) && told.is_multiple_of(UNIT_BYTES as u64);
    ((own || earlier) && state.payload.len() <= PAYLOAD_BYTES_MAX && is_zero(padding)).then_some(state)
}

/// The fields of a state record, and its padding.
fn state(kind: StateKind, body: &[u8], lsn: u64) -> Option<(StateRecord<'_>, &[u8])> {
    let (fixed, rest) = body.split_first_chunk::<{ STATE_BYTES - HEAD_BYTES }>()?;
    let mut fields = Fields(fixed);
    let token = fields.u64()?;
    let first_seen_ms = fields.u48()?;
    let mark_ms = fields.u48()?;
    let retention_ms = fields.u48()?;
    let kept_until_ms = fields.u48()?;
    let reserved_ms = first_seen_ms + u64::from(fields.u32()?);
    let attempt = fields.u32()?;
    let flags = Flags::from_bits(fields.u16()?)?;
    let scope_bytes = usize::from(fields.u8()?);
    let id_bytes = usize::from(fields.u8()?);
    let fingerprint = Fingerprint::from_bytes(fields.array()?);

    let payload_bytes = rest.len().checked_sub(scope_bytes + id_bytes + flags.padding_bytes)?;
    let mut fields = Fields(rest);
    let scope = fields.slice(scope_bytes)?;
    let id = fields.slice(id_bytes)?;
    let payload = fields.slice(payload_bytes)?;
    let Fields(padding) = fields;
    let state = StateRecord {
        kind,
        token: if token == 0 { lsn } else { token },
        attempt,
        cause: flags.cause,
        durability: flags.durability,
        detached: flags.detached,
        body_kept: flags.body_kept,
        first_seen_ms,
        reserved_ms,
        mark_ms,
        retention_ms,
        kept_until_ms,
        fingerprint,
        scope,
        id,
        payload,
    };
    (id_bytes > 0).then_some((state, padding))
}

/// The flags of a state record.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flags {
    /// How many zeros end the record, less than a unit.
    pub(super) padding_bytes: usize,
    pub(super) durability: Durability,
    pub(super) detached: bool,
    pub(super) body_kept: bool,
    pub(super) cause: Option<Cause>,
}

impl Flags {
    fn from_bits(bits: u16) -> Option<Self> {
        let durability = match bits >> 3 & 0b11 {
            0 => Durability::ProcessCrash,
            1 => Durability::PowerLoss,
            _ => return None,
        };
        // The bits above the cause are zero, else it is none of these.
        let cause = match bits >> 7 {
            0 => None,
            1 => Some(Cause::Crash),
            2 => Some(Cause::Dropped),
            3 => Some(Cause::LeaseLapsed),
            _ => return None,
        };
        Some(Self {
            padding_bytes: usize::from(bits & 0b111),
            durability,
            detached: bits & 1 << 5 != 0,
            body_kept: bits & 1 << 6 == 0,
            cause,
        })
    }

    pub(super) fn to_bits(self) -> u16 {
        let padding = u16::try_from(self.padding_bytes).expect("padding is less than a unit");
        let durability = match self.durability {
            Durability::ProcessCrash | Durability::Interval(_) => 0,
            Durability::PowerLoss => 1,
        };
        let cause = match self.cause {
            None => 0,
            Some(Cause::Crash) => 1,
            Some(Cause::Dropped) => 2,
            Some(Cause::LeaseLapsed) => 3,
        };
        padding | durability << 3 | u16::from(self.detached) << 5 | u16::from(!self.body_kept) << 6 | cause << 7
    }
}

fn next(body: &[u8]) -> Option<Next> {
    let mut fields = Fields(body);
    Some(Next {
        number: fields.u64()?,
        first_lsn: fields.u64()?,
        salt: fields.u64()?,
        unfinished: fields.u64()?,
        newest_kept_until_ms: fields.u64()?,
    })
}

fn sealed(body: &[u8]) -> Option<Sealed<'_>> {
    let mut fields = Fields(body);
    let count = fields.u64()?;
    let digest = fields.array()?;
    let interval_count = fields.u64()?;
    let (intervals, []) = fields.0.as_chunks() else {
        return None;
    };
    let sealed = Sealed { count, digest, intervals };
    (intervals.len() as u64 == interval_count && ascend(sealed.intervals())).then_some(sealed)
}

fn closed(body: &[u8]) -> Option<Closed> {
    let mut fields = Fields(body);
    let time =
        TimeMark { store_ms: fields.u64()?, boot_ms: fields.u64()?, wall_ms: fields.u64()?, boot_id: fields.array()? };
    let unfinished = fields.u64()?;
    (fields.u64()? == 0).then_some(Closed { time, unfinished })
}
