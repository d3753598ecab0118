//! Format v1: every byte that the store keeps on disk, and nothing else.
//!
//! This head is the normative specification; the code below it and in `format/` follows it. The module does no I/O,
//! takes no locks and knows no clock: it turns values into bytes and bytes into values. It must not know where in a
//! file a record stands beyond the LSN it is told, nor what a state means: that is the state machine's.
//!
//! # Rules of all bytes
//!
//! - Integers are little-endian and of fixed width; `u48` is six bytes. Times are milliseconds of store time since the
//!   Unix epoch, a `u48` saturates at [`MS_MAX`]. Bytes said to be zero are written as zero and read back as zero.
//! - `crc(start, bytes)` is zlib's `crc32(start, bytes)`: CRC-32/ISO-HDLC going on from `start`; 0 starts afresh.
//! - **One value, one encoding.** Whatever decodes, encodes to the same bytes again. Readers refuse everything else, so
//!   no bit of a file is without meaning and a changed bit is never overlooked.
//! - Reading never panics and never allocates, whatever the bytes; a length is used only after its check.
//!
//! # Files
//!
//! | name | what it holds |
//! |---|---|
//! | `keyonce.store` | the store file, 512 bytes |
//! | `LOCK` | nothing; it is what a process locks |
//! | `segment-XXXXXXXX.keyonce` | a segment: header copies at 0 and 4096, records from 8192 ([`DATA_START`]) on |
//! | `hint-XXXXXXXX.keyonce` | a hint of what lies in the segment file of the same index |
//!
//! ## Store file: 512 bytes
//!
//! | offset | field | type |
//! |---|---|---|
//! | 0 | magic `KEYONCE\0` | 8 bytes |
//! | 8 | format version = 1 | u32 |
//! | 12 | zero | u32 |
//! | 16 | store id | 16 bytes |
//! | 32 | hash seed | 16 bytes |
//! | 48 | created, by the wall clock | u64 ms |
//! | 56 | number of the segment with which the latest run began | u64 |
//! | 64 | zero | 444 bytes |
//! | 508 | `crc(0, bytes 0..508)` | u32 |
//!
//! ## Segment header: 256 bytes, two copies
//!
//! The copies stand in blocks of their own, so that a torn write of one leaves the other. The rest of a header's 4-KiB
//! block is zero and is covered by nothing.
//!
//! | offset | field | type |
//! |---|---|---|
//! | 0 | magic `KEYSEG\0\0` | 8 bytes |
//! | 8 | format version = 1 | u32 |
//! | 12 | role: 1 rolled, 2 recovery | u8 |
//! | 13 | copy: 0 at offset 0, 1 at offset 4096 | u8 |
//! | 14 | zero | u16 |
//! | 16 | store id | 16 bytes |
//! | 32 | run id | 16 bytes |
//! | 48 | segment number, from 1 | u64 |
//! | 56 | previous segment's number, less than this one's; 0: none | u64 |
//! | 64 | bytes of this segment, a multiple of 8 and more than [`DATA_START`] | u64 |
//! | 72 | first LSN: the LSN of the file's offset 0, a multiple of 8 | u64 |
//! | 80 | synced LSN when this header was written | u64 |
//! | 88 | oldest live segment's number | u64 |
//! | 96 | store time | u64 ms |
//! | 104 | boot time | u64 ms |
//! | 112 | wall clock | u64 ms |
//! | 120 | boot id | 16 bytes |
//! | 136 | salt, random, new in every life of the file | u64 |
//! | 144 | zero | 108 bytes |
//! | 252 | `crc(0, bytes 0..252)` | u32 |
//!
//! Every later version keeps magic, version and check of both where they are. So a version is believed only when the
//! check holds: a flipped bit is damage, never "a newer format".
//!
//! # Records
//!
//! The **LSN** of a byte is the segment's first LSN + the byte's offset in the file. A record starts at a multiple of
//! 8, is a multiple of 8 long and lies in one segment. Its LSN is its position and is not stored; the checks cover it.
//!
//! ## Head: 16 bytes
//!
//! | offset | field | type |
//! |---|---|---|
//! | 0 | checksum | u32 |
//! | 4 | kind << 24 \| length of the whole record in units of 8 bytes | u32 |
//! | 8 | head check | u32 |
//! | 12 | behind, see below | u32 |
//!
//! **Behind** is how far the synced LSN lay behind this record's LSN when it was written, in units of 8 bytes, rounded
//! up. `u32::MAX` is that far or further: then only the segment's header tells. It never reaches back before LSN 0.
//!
//! Bytes 0..8 are the **commit word**. It is never zero, since no kind is 0. With `S` the segment's salt:
//!
//! ```text
//! head check = crc(low half of S, bytes 4..8 || behind || LSN as u64)
//! checksum   = crc(0, bytes 16..length) xor head check xor high half of S      (of a Pad: 0 xor ..)
//! ```
//!
//! Checking goes from the outside in, each step using only what the steps before it have vouched for:
//!
//! | step | refused as | why nothing else can pass |
//! |---|---|---|
//! | 1. the commit word is not zero | `Blank` | nothing was written here |
//! | 2. head check | `Head` | kind, length and behind are as written, *at this LSN, in this life of the file* |
//! | 3. the length suits the kind and the bytes there are | `Length` | |
//! | 4. checksum | `Body` | every byte from 16 on is as written, and belongs to this head and this salt |
//! | 5. the fields make sense and are in their one encoding | `Malformed` | |
//!
//! What each check is good for:
//!
//! - **A single flipped bit** anywhere in a record fails, a Pad's body excepted, and so do any within 32 bits in a row
//!   on one side of offset 8, all of which CRC-32 finds: in bytes 4..8 or 12..16 by the head check, from 16 on by the
//!   checksum, over a length that the head check has vouched for. A changed head check that still fits a changed
//!   `behind` fails the checksum, which it is part of.
//! - **Misplaced bytes** (a page or sector written elsewhere in the segment) fail at step 2: the head checks of two
//!   LSNs differ whenever the LSNs do so within 32 bits in a row, as any two records between two multiples of 32 GiB do
//!   (others: but for a chance of 2^-32). The checksum need not repeat the LSN: the head check is part of it.
//! - **Stale bytes** of an earlier life of the file had another LSN and another salt. The halves of the salt are
//!   independent, one for each check, so that both pass with a chance of 2^-64. (With the whole salt covered by two
//!   CRCs of the same shape, whatever slips through the first slips through the second, CRC being linear: 2^-32.)
//! - **Planted bytes**, such as a record that a client smuggles inside a response, need both halves, which never leave
//!   the disk: 2^-64 a guess. A copy of a true record is misplaced.
//! - **Resync** after a hole costs one CRC of 16 bytes for every 8 bytes: only a head that was written here as a head
//!   gets its body read.
//! - The CRC of the body is known before the position is: [`Draft::finish`] adds one CRC of 16 bytes.
//!
//! CRC-32 is no defence against somebody who can write the files.
//!
//! ## State records
//!
//! Kinds Reserved = 1, Interrupted = 2, Done = 3, Released = 4, Forgotten = 5. Each stands alone: it says everything
//! there is to know about its key.
//!
//! | offset | field | type |
//! |---|---|---|
//! | 16 | token: a multiple of 8, less than this record's LSN; 0 (Reserved only): this record's own LSN | u64 |
//! | 24 | first seen | u48 ms |
//! | 30 | mark: the lease's end (Reserved), else the time of what the kind says | u48 ms |
//! | 36 | retention, a length of time | u48 ms |
//! | 42 | kept until | u48 ms |
//! | 48 | reserved, after first seen; saturates | u32 ms |
//! | 52 | attempt | u32 |
//! | 56 | flags, see below | u16 |
//! | 58 | scope's length | u8 |
//! | 59 | id's length, never 0 | u8 |
//! | 60 | fingerprint | 16 bytes |
//! | 76 | scope, id, payload, then zeros to a multiple of 8 | |
//!
//! | bits of flags | meaning |
//! |---|---|
//! | 0-2 | how many zeros end the record |
//! | 3-4 | durability: 0 ProcessCrash, 1 PowerLoss, 2 kept for Interval, 3 never |
//! | 5 | detached |
//! | 6 | body not kept: the payload is the reference |
//! | 7-9 | cause of the interruption, or of the one that a Reserved record took over: 0 none, 1 Crash, 2 Dropped, 3 LeaseLapsed |
//! | 10-15 | zero |
//!
//! | kind | payload, at most [`PAYLOAD_BYTES_MAX`] |
//! |---|---|
//! | Reserved, Interrupted | the checkpoint |
//! | Done | the response, or the reference |
//! | Released | nothing |
//! | Forgotten | the reason |
//!
//! ## Other records
//!
//! | kind | offset | field | type |
//! |---|---|---|---|
//! | Next = 16, 56 bytes | 16 | successor's number | u64 |
//! | | 24 | successor's first LSN | u64 |
//! | | 32 | successor's salt | u64 |
//! | | 40 | unfinished keys in this segment | u64 |
//! | | 48 | newest kept-until in this segment | u64 ms |
//! | Sealed = 17, 48 + 16 n bytes | 16 | count of the copies | u64 |
//! | | 24 | digest of the copies | 16 bytes |
//! | | 40 | n | u64 |
//! | | 48 | n times: from LSN, to LSN (exclusive); ascending, none empty, none overlapping | 2 u64 |
//! | Closed = 18, 72 bytes | 16 | store time, boot time, wall clock | 3 u64 ms |
//! | | 40 | boot id | 16 bytes |
//! | | 56 | unfinished keys | u64 |
//! | | 64 | zero | u64 |
//! | Pad = 19, 16 bytes or more | 16 | anything: not covered, not written | |
//!
//! # Hints
//!
//! A hint spares an opening the reading of a segment that has its Next and was synced whole. It is a cache: written
//! after that sync, never synced itself, and looked at only for a segment that lies wholly below the synced LSN that
//! headers and records tell of. One that is missing, cut, stale or damaged is as good as none. It names every record
//! that gives a key a state, in the order of the log, but for those that a later record of the same token in the same
//! segment has superseded. What it names is not checked until it is first used.
//!
//! | offset | field | type |
//! |---|---|---|
//! | 0 | magic `KEYHINT\0` | 8 bytes |
//! | 8 | format version = 1 | u32 |
//! | 12 | zero | u32 |
//! | 16 | store id | 16 bytes |
//! | 32 | segment number | u64 |
//! | 40 | salt of the segment's life | u64 |
//! | 48 | offset behind the segment's last record, which is its Next | u64 |
//! | 56 | n | u64 |
//! | 64 | first half of the BLAKE3 digest of the store's hash seed, then bytes 0..64 and 80.. | 16 bytes |
//! | 80 | n entries: hash of the key (SipHash-1-3 over the scope's length in a byte, scope, id), kept until, kind << 24 \| offset in units of 8 bytes | u64, u48, u32 |

mod check;
mod draft;
mod header;
mod hint;
mod record;

pub(crate) use self::draft::Draft;
pub(crate) use self::header::{HeaderFault, Role, SegmentHeader, StoreFile, StoreFileFault};
pub(crate) use self::hint::{Entry, HINT_ENTRY_BYTES, HINT_HEAD_BYTES, HintOf, decode_hint, encode_hint};
pub use self::record::Cause;
pub(crate) use self::record::{
    Bad, Closed, Next, Record, Seen, StateKind, StateRecord, record_len, to_next_head, trusted, verify,
};

/// The version of the format that this file specifies.
pub(crate) const VERSION: u32 = 1;

/// The store file's size in bytes.
pub(crate) const STORE_FILE_BYTES: usize = 512;

/// One header copy's size in bytes.
pub(crate) const HEADER_BYTES: usize = 256;

/// The size in bytes of the blocks that the two header copies of a segment start: copy 0 at 0, copy 1 at one block.
pub(crate) const BLOCK: usize = 4096;

/// Where the records of a segment start.
pub(crate) const DATA_START: u64 = 2 * BLOCK as u64;

/// Records start at, and are as long as, multiples of this many bytes.
pub(crate) const UNIT_BYTES: usize = 8;

/// The size of a record's head in bytes, and of the smallest Pad.
pub(crate) const HEAD_BYTES: usize = 16;

/// The fixed part of a state record in bytes, head included; the scope follows.
pub(crate) const STATE_BYTES: usize = 76;

/// The size of a Next record in bytes.
pub(crate) const NEXT_BYTES: usize = 56;

/// The size of a Closed record in bytes.
pub(crate) const CLOSED_BYTES: usize = 72;

/// The largest payload of a state record in bytes: the upper bound of the option `response_bytes_max`.
pub(crate) const PAYLOAD_BYTES_MAX: usize = 16 << 20;

/// The largest record in bytes, a Pad excepted.
pub(crate) const RECORD_BYTES_MAX: usize = state_record_bytes(255, 255, PAYLOAD_BYTES_MAX);

/// The largest Pad in bytes: what the length field can tell.
#[cfg(any(test, feature = "testing"))]
pub(crate) const PAD_BYTES_MAX: usize = LENGTH_UNITS_MAX as usize * UNIT_BYTES;

/// The largest time that fits a `u48` field, in milliseconds.
pub(crate) const MS_MAX: u64 = (1 << 48) - 1;

/// The largest value of a record's length field.
const LENGTH_UNITS_MAX: u32 = (1 << 24) - 1;

/// The size in bytes of a state record whose scope, id and payload have these lengths.
pub(crate) const fn state_record_bytes(scope_bytes: usize, id_bytes: usize, payload_bytes: usize) -> usize {
    (STATE_BYTES + scope_bytes + id_bytes + payload_bytes).next_multiple_of(UNIT_BYTES)
}

/// The size in bytes of a Sealed record that replaces this many intervals.
pub(crate) const fn sealed_bytes(interval_count: usize) -> usize {
    48 + 16 * interval_count
}

/// Reads fields in their order, from bytes that may be anything: every field is `None` when the bytes are used up.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }

    fn slice(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (field, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(field)
    }

    fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u48(&mut self) -> Option<u64> {
        let [a, b, c, d, e, f] = self.array()?;
        Some(u64::from_le_bytes([a, b, c, d, e, f, 0, 0]))
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

/// Writes fields in their order into bytes that were zero.
struct Fill<'a>(&'a mut [u8]);

impl Fill<'_> {
    /// Writes a field. The layouts above leave room for every one of theirs, so running out is a bug.
    fn put<const N: usize>(&mut self, field: [u8; N]) -> &mut Self {
        let (place, rest) =
            std::mem::take(&mut self.0).split_first_chunk_mut().expect("the layout has room for each of its fields");
        *place = field;
        self.0 = rest;
        self
    }

    fn u32(&mut self, field: u32) -> &mut Self {
        self.put(field.to_le_bytes())
    }

    /// Writes the low six bytes of a time, or the largest time that six bytes can tell.
    fn u48(&mut self, field: u64) -> &mut Self {
        let [a, b, c, d, e, f, _, _] = field.min(MS_MAX).to_le_bytes();
        self.put([a, b, c, d, e, f])
    }

    fn u64(&mut self, field: u64) -> &mut Self {
        self.put(field.to_le_bytes())
    }
}

/// Whether all bytes are zero.
fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
#[cfg(not(loom))]
mod properties;

#[cfg(test)]
mod tests;
