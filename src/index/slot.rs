//! What do the 64 bits of a slot say, and the 64 bytes of a bucket?
//!
//! ```text
//!  63      45 44     43  42      41      40    39  38        23 22          0
//! +----------+-----------+-------+-------+--------+------------+--------------+
//! | tag      | displaced | taken | hint  | marks  | segment    | offset in    |
//! | 19       | 2         | 1     | 1     | 2      | mod 2^16   | 8-byte units |
//! +----------+-----------+-------+-------+--------+------------+--------------+
//! ```
//!
//! The upper 22 bits are compared in one step: a slot can be the key's only if it is taken, has the key's tag, and lies
//! as many buckets behind its home as the search has gone. An empty slot is zero but for the marks, which belong to the
//! bucket, not to the slot whose word they share. Keys fall into 8 classes by the lowest bits of their tags. The marks
//! in slot `c` of a bucket speak of the keys of this home and of class `c`: some may lie in a later bucket (bit 39),
//! some may lie in the stash (bit 40). Bit 41 says that the record is known from a hint alone: nobody has checked its
//! bytes since the store was opened.
//!
//! # Life and death
//!
//! A slot whose segment number lies below `oldest_live` is dead without anyone touching it. The 16 bits are compared by
//! serial arithmetic (RFC 1982): the distance from `oldest_live`, modulo 2^16, is under 2^15 for a live slot, and
//! `oldest_live` plus that distance is the full number. A dead slot is never matched, is free to writers, and never
//! ends a search, since a search goes by marks alone. An old number would come to look alive again once `oldest_live`
//! has moved on by more than 2^15, so dead slots are swept before that.

use std::mem;

pub(super) const SLOTS: usize = 8;
/// Buckets that a slot may lie in: its home and those behind it.
pub(super) const NEAR: usize = 4;
/// One for each slot of a bucket, which holds the marks.
pub(super) const CLASSES: u64 = 8;

const OFFSET_BITS: u32 = 23;
const SEGMENT_BITS: u32 = 16;
pub(super) const TAG_BITS: u32 = 19;

const ADDRESS_BITS: u32 = OFFSET_BITS + SEGMENT_BITS;
const TAKEN_SHIFT: u32 = ADDRESS_BITS + 3;
const DISPLACED_SHIFT: u32 = TAKEN_SHIFT + 1;
const TAG_SHIFT: u32 = DISPLACED_SHIFT + 2;

const OFFSET_MASK: u64 = (1 << OFFSET_BITS) - 1;
const SEGMENT_MASK: u64 = (1 << SEGMENT_BITS) - 1;
const ADDRESS_MASK: u64 = (1 << ADDRESS_BITS) - 1;
pub(super) const TAG_MASK: u64 = (1 << TAG_BITS) - 1;
/// Some key of this home and class may lie in a later bucket.
pub(super) const LATER: u64 = 1 << ADDRESS_BITS;
/// Some key of this home and class may lie in the stash.
pub(super) const STASHED: u64 = LATER << 1;
const MARKS: u64 = LATER | STASHED;
/// The record at the address is known from a hint alone.
pub(super) const HINTED: u64 = STASHED << 1;
const TAKEN: u64 = 1 << TAKEN_SHIFT;

const _: () = assert!(TAG_SHIFT + TAG_BITS == u64::BITS && size_of::<Bucket>() == 64);

/// Live segment numbers span less than this, and a sweep passes before the oldest has moved farther.
pub(crate) const SEGMENT_SPAN_MAX: u64 = 1 << (SEGMENT_BITS - 1);
/// Every record starts below this offset of its segment.
pub(crate) const OFFSET_END: u32 = 8 << OFFSET_BITS;

/// The place of a record in the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Address {
    /// The full segment number.
    pub(crate) segment: u64,
    /// Bytes from the start of the segment, a multiple of 8 below [`OFFSET_END`].
    pub(crate) offset: u32,
}

#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Bucket(pub(super) [u64; SLOTS]);

impl Bucket {
    pub(super) fn word(&self, slot: usize) -> u64 {
        *self.0.get(slot).expect("a bucket has 8 slots")
    }

    pub(super) fn word_mut(&mut self, slot: usize) -> &mut u64 {
        self.0.get_mut(slot).expect("a bucket has 8 slots")
    }

    /// One bit for each slot whose upper bits are those of `head`.
    #[inline]
    pub(super) fn candidates(&self, head: u64) -> u32 {
        let bit = |(word, slot): (&u64, u32)| u32::from((word ^ head) >> TAKEN_SHIFT == 0) << slot;
        self.0.iter().zip(0..).map(bit).fold(0, |all, bit| all | bit)
    }

    /// The first slot that is empty or dead.
    pub(super) fn room(&self, oldest_live: u64) -> Option<usize> {
        self.0.iter().position(|word| is_room(*word, oldest_live))
    }

    pub(super) fn marks(&self, class: usize) -> u64 {
        self.word(class) & MARKS
    }

    pub(super) fn mark(&mut self, class: usize, mark: u64) {
        *self.word_mut(class) |= mark;
    }

    /// Clears all marks, and tells which there were.
    pub(super) fn take_marks(&mut self) -> u64 {
        self.0.iter_mut().fold(0, |all, word| all | mem::replace(word, *word & !MARKS)) & MARKS
    }
}

/// The upper bits of a taken slot of this position (or tag), `displaced` buckets behind its home.
pub(super) fn head(position: u64, displaced: usize) -> u64 {
    (position << TAG_SHIFT) | (to_u64(displaced) << DISPLACED_SHIFT) | TAKEN
}

/// The class of a position, or of a tag alone.
pub(super) fn class(position: u64) -> usize {
    to_usize(position % CLASSES)
}

pub(super) fn tag(word: u64) -> u64 {
    word >> TAG_SHIFT
}

pub(super) fn displaced(word: u64) -> usize {
    to_usize(word >> DISPLACED_SHIFT) % NEAR
}

pub(super) fn is_taken(word: u64) -> bool {
    word & TAKEN != 0
}

/// Of a taken slot: its segment is not below the oldest live one.
pub(super) fn is_live(word: u64, oldest_live: u64) -> bool {
    distance(word, oldest_live) < SEGMENT_SPAN_MAX
}

/// Empty or dead.
pub(super) fn is_room(word: u64, oldest_live: u64) -> bool {
    !is_taken(word) || !is_live(word, oldest_live)
}

/// How far the slot's segment lies ahead of the oldest live one, if the slot is live.
fn distance(word: u64, oldest_live: u64) -> u64 {
    (word >> OFFSET_BITS).wrapping_sub(oldest_live) & SEGMENT_MASK
}

/// The address in a live slot.
pub(super) fn address(word: u64, oldest_live: u64) -> Address {
    let offset = u32::try_from((word & OFFSET_MASK) << 3).expect("23 + 3 bits");
    Address { segment: oldest_live + distance(word, oldest_live), offset }
}

/// The bits of a slot that speak of a record: its address, and whether it is known from a hint alone.
pub(super) fn packed(word: u64) -> u64 {
    word & (ADDRESS_MASK | HINTED)
}

pub(super) fn with_packed(word: u64, packed: u64) -> u64 {
    (word & !(ADDRESS_MASK | HINTED)) | packed
}

/// Whether the slot names this address.
pub(super) fn names(word: u64, address: Address) -> bool {
    word & ADDRESS_MASK == pack(address)
}

/// The word of an empty slot, or of one with other upper bits, that shares its marks with `word`.
pub(super) fn refilled(word: u64, slot: u64) -> u64 {
    (word & MARKS) | slot
}

/// The bits that stand for an address.
fn pack(address: Address) -> u64 {
    ((address.segment & SEGMENT_MASK) << OFFSET_BITS) | u64::from(address.offset >> 3)
}

/// The same for an address that is about to be published.
///
/// # Panics
///
/// If no record can lie there, or if it would not be found to be alive.
pub(super) fn pack_checked(address: Address, oldest_live: u64) -> u64 {
    let Address { segment, offset } = address;
    assert!(offset % 8 == 0 && offset < OFFSET_END, "no record starts at offset {offset}");
    let ahead = segment.checked_sub(oldest_live);
    assert!(
        ahead.is_some_and(|ahead| ahead < SEGMENT_SPAN_MAX),
        "segment {segment} does not look alive while {oldest_live} is the oldest live one"
    );
    pack(address)
}

pub(super) fn to_usize(value: u64) -> usize {
    usize::try_from(value).expect("usize has 64 bits")
}

pub(super) fn to_u64(value: usize) -> u64 {
    u64::try_from(value).expect("usize has 64 bits")
}
