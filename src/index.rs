//! Where is the newest record of a key? One shard of the index answers with an address in the log.
//!
//! Keys live only in the log. A slot is 8 bytes, a bucket is one cache line of 8 slots, and whether a slot is the key's
//! is decided by the caller, who compares the whole key at the address that the slot names (`matches`). A tag only
//! keeps most of these comparisons from being made; nothing rests on it. This file knows neither records nor files.
//!
//! # The slot
//!
//! ```text
//!  63        44 43    42  41      40      39     38         23 22          0
//! +------------+--------+-------+-------+------+-------------+-------------+
//! | tag        | dis-   | taken | spare | mark | segment     | offset in   |
//! | 20         | placed | 1     | 1     | 1    | mod 2^16    | 8-byte units|
//! +------------+--------+-------+-------+------+-------------+-------------+
//! ```
//!
//! The upper 23 bits are compared in one step: a slot can be the key's only if it is taken, has the key's tag and lies
//! as many buckets behind its home as the search has gone. The mark belongs to the bucket, not to the slot it shares a
//! word with: in slots 0, 1 and 2 it says "some key of this home lies 1, 2, 3 buckets on", in slot 3 "some key of this
//! home is in the stash". The spare bit and the marks of the other slots are zero.
//!
//! # Life and death
//!
//! A slot whose segment number lies below `oldest_live` is dead without anyone touching it. The 16 bits are compared by
//! serial arithmetic (RFC 1982): the distance from `oldest_live`, modulo 2^16, is under 2^15 for a live slot, and
//! `oldest_live` plus that distance is the full number. A dead slot is never matched, is free to writers, and never ends
//! a search, since what a search goes by are marks. So that an old number never comes to look alive again, a sweep must
//! pass before `oldest_live` has moved 2^15 segments; the shard remembers where it stood at the last one and panics rather
//! than take a dead slot for a live one.
//!
//! # Home, growth
//!
//! A hash is cut into three parts that share no bit: 32 bits choose among the buckets that the shard began with, 20 are
//! the tag, and the 12 between are the caller's, to choose the shard. Begun with `first` buckets and doubled `level`
//! times, a shard has `first << level` buckets, and the home of a key is
//!
//! ```text
//! position = (first bucket << 20) | tag          home = position >> (20 - level)
//! ```
//!
//! so each doubling lets one more bit of the tag, from the top, speak for the home. A slot tells its position by itself:
//! its tag, and the home that its place and displacement name. Growth therefore rewrites all slots without the log, drops
//! dead ones, and sets every mark anew. It ends when the tag is used up, 2^20 times the first size.
//!
//! # Where a key goes
//!
//! The first slot that is empty or dead, in the home bucket or one of the next three (the table wraps around). A search
//! reads the home bucket and further ones only where a mark sends it; marks are set with the slot, and cleared by the
//! sweep alone. If all four buckets are full, the slot goes to the stash, a plain list. When the stash has more than its
//! share, there are two remedies: a sweep, which frees dead slots, brings displaced ones home and clears stale marks; and
//! growth, when the last sweep was so short a time ago that another could not help, and the buckets are in fact filled.
//! Under a constant hash they never are: the stash takes all, and everything is right, only slow.
//!
//! # Invariants
//!
//! 1. A live slot of home `h` lies in bucket `h + d`, `d` in 0..4, and says `d`; for `d > 0` bucket `h` has mark `d`. Or it
//!    is in the stash, with its position, and bucket `h` has the stash mark.
//! 2. Every slot's segment number is at or above `clean_since`, and less than 2^15 above the `oldest_live` it was
//!    published under.
//! 3. A key has at most one live slot, if each `publish` follows a `find` whose `matches` was right, under one lock.
//! 4. `taken` counts the taken slots of all buckets, dead ones too.

use std::fmt;
use std::mem;

const SLOTS: usize = 8;
/// Buckets a key may lie in: its home and those behind it.
const PROBES_MAX: usize = 4;
const TAG_BITS: u32 = 20;

const OFFSET_BITS: u32 = 23;
const SEGMENT_BITS: u32 = 16;
const ADDRESS_BITS: u32 = OFFSET_BITS + SEGMENT_BITS;
const MARK_SHIFT: u32 = ADDRESS_BITS;
const TAKEN_SHIFT: u32 = 41;
const DISPLACED_SHIFT: u32 = 42;
const TAG_SHIFT: u32 = 44;

const OFFSET_MASK: u64 = (1 << OFFSET_BITS) - 1;
const SEGMENT_MASK: u64 = (1 << SEGMENT_BITS) - 1;
const ADDRESS_MASK: u64 = (1 << ADDRESS_BITS) - 1;
const TAG_MASK: u64 = (1 << TAG_BITS) - 1;
const MARK: u64 = 1 << MARK_SHIFT;
const TAKEN: u64 = 1 << TAKEN_SHIFT;

/// Live segment numbers span less than this, and a sweep passes at least this often.
pub(crate) const SEGMENT_SPAN_MAX: u64 = 1 << (SEGMENT_BITS - 1);
/// No record starts at or beyond this offset of its segment.
pub(crate) const OFFSET_END: u32 = 8 << OFFSET_BITS;

/// The place of the stash mark among the marks of a bucket; those before it are for displacements 1 to 3.
const STASH_MARK: usize = PROBES_MAX - 1;

/// Slots in use at planned capacity, in percent.
const FILL_PLANNED_PERCENT: u64 = 85;
/// Growth needs at least three quarters of the slots taken, whatever the stash says.
const FILL_GROW_NUM: usize = 3;
const FILL_GROW_DEN: usize = 4;
/// The stash may hold one key for so many slots before a remedy is sought.
const SLOTS_PER_STASHED: usize = 512;
/// A sweep is worth its price when a sixteenth of the slots were published since the last.
const SLOTS_PER_SWEEP_GAIN: usize = 16;
/// A planned shard begins with at least this many buckets, unless the plan is smaller.
const BUCKETS_FIRST_MIN: usize = 32;

/// The place of a record in the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Address {
    /// The full segment number.
    pub(crate) segment: u64,
    /// Bytes from the start of the segment, a multiple of 8 below [`OFFSET_END`].
    pub(crate) offset: u32,
}

/// What a search found. It is good until the shard is next changed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    /// Where the key's newest record lies.
    pub(crate) address: Address,
    place: Place,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    Slot { bucket: usize, slot: usize },
    Stash { entry: usize },
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Bucket([u64; SLOTS]);

/// A slot for which four buckets had no room.
#[derive(Clone, Copy)]
struct Stashed {
    position: u64,
    slot: u64,
}

/// One shard of the index. The caller's lock covers look, decide, append and publish.
pub(crate) struct IndexShard {
    buckets: Vec<Bucket>,
    /// Buckets at the beginning.
    first: u64,
    /// Doublings since.
    level: u32,
    /// Taken slots in all buckets, dead ones among them.
    taken: usize,
    stash: Vec<Stashed>,
    /// No slot, dead or alive, has a segment number below this one.
    clean_since: u64,
    /// Slots published into buckets since the last sweep or growth.
    fresh: usize,
}

/// The bits of a hash that choose the shard: 12 bits that neither the bucket nor the tag uses.
pub(crate) fn shard_bits(hash: u64) -> usize {
    to_usize((hash >> TAG_BITS) & 0xfff)
}

impl IndexShard {
    /// An empty shard of at least `buckets_min` buckets of 8 slots. It doubles when it has to.
    pub(crate) fn new(buckets_min: usize) -> Self {
        let first = buckets_min.max(1);
        assert!(first < 1 << 32, "a shard begins with fewer than 2^32 buckets");
        Self {
            buckets: vec![Bucket([0; SLOTS]); first],
            first: to_u64(first),
            level: 0,
            taken: 0,
            stash: Vec::new(),
            clean_since: 0,
            fresh: 0,
        }
    }

    /// An empty shard that begins small and, by doubling, comes to just the size that `keys` keys need.
    ///
    /// Three standard deviations are added to `keys`, since a shard's share is a matter of chance.
    pub(crate) fn planned(keys: u64) -> Self {
        let keys = keys.saturating_add(keys.isqrt().saturating_mul(3));
        let slots = keys.saturating_mul(100) / FILL_PLANNED_PERCENT;
        let mut buckets = usize::try_from(slots.div_ceil(to_u64(SLOTS))).expect("the plan of a shard fits into memory");
        while buckets >= 2 * BUCKETS_FIRST_MIN {
            buckets = buckets.div_ceil(2);
        }
        Self::new(buckets)
    }

    /// Looks for the live slot of the key that hashes to `hash`. `matches` compares the whole key with the record.
    ///
    /// # Panics
    ///
    /// If `oldest_live` moved too far since the last sweep.
    pub(crate) fn find(&self, hash: u64, oldest_live: u64, mut matches: impl FnMut(Address) -> bool) -> Option<Found> {
        let position = self.position(hash);
        let home = self.home(position);
        let bucket = self.bucket(home);
        if let Some(found) = self.find_in(home, bucket, head(position, 0), oldest_live, &mut matches) {
            return Some(found);
        }
        if bucket.has_no_mark() {
            return None;
        }
        self.find_beyond(position, home, oldest_live, &mut matches)
    }

    /// Names `address` as the newest record of the key: in place of `found`, or as a new slot when the key has none.
    ///
    /// # Panics
    ///
    /// If `found` is stale, if the address cannot be packed (see [`OFFSET_END`], [`SEGMENT_SPAN_MAX`]), or if `oldest_live`
    /// moved too far since the last sweep.
    pub(crate) fn publish(&mut self, hash: u64, oldest_live: u64, found: Option<Found>, address: Address) {
        let packed = pack(address, oldest_live);
        if let Some(found) = found {
            let slot = self.slot_of(found);
            *slot = (*slot & !ADDRESS_MASK) | packed;
            return;
        }
        if self.taken == 0 && self.stash.is_empty() {
            self.clean_since = oldest_live;
        }
        self.check_span(oldest_live);
        let position = self.position(hash);
        if self.place(position, packed, oldest_live) {
            return;
        }
        if self.stash.len() >= self.slot_count() / SLOTS_PER_STASHED {
            self.make_room(oldest_live);
            if self.place(position, packed, oldest_live) {
                return;
            }
        }
        self.put_into_stash(position, packed, oldest_live);
    }

    /// Takes the key's slot out: the key has no record any more.
    ///
    /// # Panics
    ///
    /// If `found` is stale.
    pub(crate) fn remove(&mut self, found: Found) {
        let slot = self.slot_of(found);
        match found.place {
            Place::Slot { .. } => {
                *slot &= MARK;
                self.taken -= 1;
            }
            Place::Stash { entry } => {
                self.stash.swap_remove(entry);
            }
        }
    }

    /// Frees dead slots, brings displaced ones home where there is room, and clears marks that no slot needs any more.
    ///
    /// Due at least once a window, and before `oldest_live` has moved [`SEGMENT_SPAN_MAX`] since the last.
    pub(crate) fn sweep(&mut self, oldest_live: u64) {
        if self.taken > 0 || !self.stash.is_empty() {
            self.check_span(oldest_live);
        }
        for home in 0..self.buckets.len() {
            self.sweep_home(home, oldest_live);
        }
        self.stash.retain(|stashed| is_live(stashed.slot, oldest_live));
        self.clean_since = oldest_live;
        self.fresh = 0;
    }

    /// Live keys, counted one by one.
    pub(crate) fn len(&self, oldest_live: u64) -> usize {
        self.addresses(oldest_live).count()
    }

    /// The addresses of all live keys, in no order.
    pub(crate) fn addresses(&self, oldest_live: u64) -> impl Iterator<Item = Address> + '_ {
        let in_buckets = self.buckets.iter().flat_map(|bucket| bucket.0.iter().copied());
        let in_stash = self.stash.iter().map(|stashed| stashed.slot);
        in_buckets
            .chain(in_stash)
            .filter(move |slot| slot & TAKEN != 0 && is_live(*slot, oldest_live))
            .map(move |slot| self.unpack(slot, oldest_live))
    }

    /// Memory held, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.buckets.capacity() * size_of::<Bucket>() + self.stash.capacity() * size_of::<Stashed>() + size_of::<Self>()
    }

    fn slot_count(&self) -> usize {
        self.buckets.len() * SLOTS
    }

    fn position(&self, hash: u64) -> u64 {
        let first_bucket = ((hash >> 32) * self.first) >> 32;
        (first_bucket << TAG_BITS) | (hash & TAG_MASK)
    }

    fn home(&self, position: u64) -> usize {
        to_usize(position >> (TAG_BITS - self.level))
    }

    /// The bucket `displaced` places behind `home`; the table wraps around.
    fn behind(&self, home: usize, displaced: usize) -> usize {
        let index = home + displaced;
        if index < self.buckets.len() {
            index
        } else {
            index - self.buckets.len()
        }
    }

    /// A table of fewer than four buckets has no bucket twice in a probe.
    fn probes(&self) -> usize {
        self.buckets.len().min(PROBES_MAX)
    }

    fn bucket(&self, index: usize) -> &Bucket {
        self.buckets
            .get(index)
            .expect("bucket numbers are below the number of buckets")
    }

    fn bucket_mut(&mut self, index: usize) -> &mut Bucket {
        self.buckets
            .get_mut(index)
            .expect("bucket numbers are below the number of buckets")
    }

    /// The word that `found` speaks of; a stale `found` is a bug of the caller.
    fn slot_of(&mut self, found: Found) -> &mut u64 {
        let slot = match found.place {
            Place::Slot { bucket, slot } => self.buckets.get_mut(bucket).and_then(|bucket| bucket.0.get_mut(slot)),
            Place::Stash { entry } => self.stash.get_mut(entry).map(|stashed| &mut stashed.slot),
        };
        let slot = slot.expect("what was found is still there");
        assert!(
            *slot & TAKEN != 0 && *slot & ADDRESS_MASK == pack_bits(found.address),
            "what was found has changed"
        );
        slot
    }

    fn check_span(&self, oldest_live: u64) {
        assert!(
            oldest_live.wrapping_sub(self.clean_since) <= SEGMENT_SPAN_MAX,
            "the oldest live segment is {oldest_live}, and the shard was last swept at {}",
            self.clean_since
        );
    }

    fn unpack(&self, slot: u64, oldest_live: u64) -> Address {
        self.check_span(oldest_live);
        let offset = u32::try_from((slot & OFFSET_MASK) << 3).expect("26 bits");
        Address {
            segment: oldest_live + distance(slot, oldest_live),
            offset,
        }
    }

    /// Searches one bucket for slots whose upper bits are those of `head`.
    #[inline]
    fn find_in(
        &self,
        index: usize,
        bucket: &Bucket,
        head: u64,
        oldest_live: u64,
        matches: &mut impl FnMut(Address) -> bool,
    ) -> Option<Found> {
        let mut candidates = bucket.candidates(head);
        while candidates != 0 {
            let slot = to_usize(u64::from(candidates.trailing_zeros()));
            candidates &= candidates - 1;
            let word = bucket.slot(slot);
            if !is_live(word, oldest_live) {
                continue;
            }
            let address = self.unpack(word, oldest_live);
            if matches(address) {
                return Some(Found {
                    address,
                    place: Place::Slot { bucket: index, slot },
                });
            }
        }
        None
    }

    /// Follows the marks of `home`.
    #[cold]
    fn find_beyond(
        &self,
        position: u64,
        home: usize,
        oldest_live: u64,
        matches: &mut impl FnMut(Address) -> bool,
    ) -> Option<Found> {
        for displaced in 1..self.probes() {
            if self.bucket(home).is_marked(displaced - 1) {
                let index = self.behind(home, displaced);
                let head = head(position, displaced);
                if let Some(found) = self.find_in(index, self.bucket(index), head, oldest_live, matches) {
                    return Some(found);
                }
            }
        }
        if !self.bucket(home).is_marked(STASH_MARK) {
            return None;
        }
        self.stash.iter().enumerate().find_map(|(entry, stashed)| {
            if stashed.position != position || !is_live(stashed.slot, oldest_live) {
                return None;
            }
            let address = self.unpack(stashed.slot, oldest_live);
            matches(address).then_some(Found {
                address,
                place: Place::Stash { entry },
            })
        })
    }

    /// Puts a slot into the first room in its home bucket or those behind it. False: there is none.
    fn place(&mut self, position: u64, packed: u64, oldest_live: u64) -> bool {
        let home = self.home(position);
        for displaced in 0..self.probes() {
            let index = self.behind(home, displaced);
            let head = head(position, displaced);
            let Some(slot) = self.bucket_mut(index).room(oldest_live) else {
                continue;
            };
            let was_taken = *slot & TAKEN != 0;
            *slot = head | (*slot & MARK) | packed;
            self.taken += usize::from(!was_taken);
            self.fresh += 1;
            if displaced > 0 {
                self.bucket_mut(home).set_mark(displaced - 1, true);
            }
            return true;
        }
        false
    }

    fn put_into_stash(&mut self, position: u64, packed: u64, oldest_live: u64) {
        if self.stash.len() == self.stash.capacity() {
            self.stash.retain(|stashed| is_live(stashed.slot, oldest_live));
        }
        self.stash.push(Stashed {
            position,
            slot: head(position, 0) | packed,
        });
        let home = self.home(position);
        self.bucket_mut(home).set_mark(STASH_MARK, true);
    }

    /// Sweeps if that is likely to help, and grows if not, provided that the buckets are filled.
    #[cold]
    fn make_room(&mut self, oldest_live: u64) {
        if self.taken < self.slot_count() / FILL_GROW_DEN * FILL_GROW_NUM {
            return;
        }
        if self.fresh >= self.slot_count() / SLOTS_PER_SWEEP_GAIN {
            self.sweep(oldest_live);
        }
        let filled = self.taken >= self.slot_count() / FILL_GROW_DEN * FILL_GROW_NUM;
        let stash_full = self.stash.len() >= self.slot_count() / SLOTS_PER_STASHED;
        if filled && stash_full && self.level < TAG_BITS {
            self.grow(oldest_live);
        }
    }

    /// Doubles the number of buckets. Slots tell their positions, so the log is not read.
    fn grow(&mut self, oldest_live: u64) {
        let grown = vec![Bucket([0; SLOTS]); self.buckets.len() * 2];
        let old = mem::replace(&mut self.buckets, grown);
        let old_stash = mem::take(&mut self.stash);
        let old_level = self.level;
        self.level += 1;
        self.taken = 0;
        for (index, bucket) in old.iter().enumerate() {
            for slot in bucket.0 {
                if slot & TAKEN == 0 || !is_live(slot, oldest_live) {
                    continue;
                }
                let displaced = displaced(slot);
                let home = if index >= displaced {
                    index - displaced
                } else {
                    index + old.len() - displaced
                };
                let position = ((to_u64(home) >> old_level) << TAG_BITS) | (slot >> TAG_SHIFT);
                self.place_or_stash(position, slot & ADDRESS_MASK, oldest_live);
            }
        }
        for stashed in old_stash {
            if is_live(stashed.slot, oldest_live) {
                self.place_or_stash(stashed.position, stashed.slot & ADDRESS_MASK, oldest_live);
            }
        }
        self.clean_since = oldest_live;
        self.fresh = 0;
    }

    fn place_or_stash(&mut self, position: u64, packed: u64, oldest_live: u64) {
        if !self.place(position, packed, oldest_live) {
            self.put_into_stash(position, packed, oldest_live);
        }
    }

    /// Tidies one bucket and the keys whose home it is.
    fn sweep_home(&mut self, home: usize, oldest_live: u64) {
        let freed = self.bucket_mut(home).free_dead(oldest_live);
        self.taken -= freed;
        for displaced in 1..self.probes() {
            if self.bucket(home).is_marked(displaced - 1) {
                let needed = self.bring_home(home, displaced, oldest_live);
                self.bucket_mut(home).set_mark(displaced - 1, needed);
            }
        }
        if self.bucket(home).is_marked(STASH_MARK) {
            self.unstash(home, oldest_live);
        }
    }

    /// Moves live slots of `home` that lie `displaced` buckets behind it into free slots of `home`. True: some stay there.
    fn bring_home(&mut self, home: usize, displaced_by: usize, oldest_live: u64) -> bool {
        let index = self.behind(home, displaced_by);
        let mut stay = false;
        for slot in 0..SLOTS {
            let word = self.bucket(index).slot(slot);
            if word & TAKEN == 0 || displaced(word) != displaced_by || !is_live(word, oldest_live) {
                continue;
            }
            let Some(room) = self.bucket_mut(home).room(oldest_live) else {
                stay = true;
                continue;
            };
            *room = (*room & MARK) | (word & (TAG_MASK << TAG_SHIFT)) | TAKEN | (word & ADDRESS_MASK);
            *self.bucket_mut(index).slot_mut(slot) &= MARK;
        }
        stay
    }

    /// Takes the keys of `home` out of the stash as far as buckets have room for them.
    fn unstash(&mut self, home: usize, oldest_live: u64) {
        let mut needed = false;
        let mut entry = 0;
        while let Some(&Stashed { position, slot }) = self.stash.get(entry) {
            if self.home(position) != home {
                entry += 1;
            } else if !is_live(slot, oldest_live) || self.place(position, slot & ADDRESS_MASK, oldest_live) {
                self.stash.swap_remove(entry);
            } else {
                needed = true;
                entry += 1;
            }
        }
        self.bucket_mut(home).set_mark(STASH_MARK, needed);
    }
}

impl fmt::Debug for IndexShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IndexShard")
            .field("buckets", &self.buckets.len())
            .field("taken", &self.taken)
            .field("stash", &self.stash.len())
            .finish_non_exhaustive()
    }
}

impl Bucket {
    fn slot(&self, index: usize) -> u64 {
        *self.0.get(index).expect("a bucket has 8 slots")
    }

    fn slot_mut(&mut self, index: usize) -> &mut u64 {
        self.0.get_mut(index).expect("a bucket has 8 slots")
    }

    /// One bit for each slot whose upper bits are those of `head`.
    #[inline]
    fn candidates(&self, head: u64) -> u32 {
        self.0.iter().zip(0..).fold(0, |bits, (slot, index)| {
            bits | (u32::from((slot ^ head) >> TAKEN_SHIFT == 0) << index)
        })
    }

    /// The first slot that is empty or dead.
    fn room(&mut self, oldest_live: u64) -> Option<&mut u64> {
        self.0
            .iter_mut()
            .find(|slot| **slot & TAKEN == 0 || !is_live(**slot, oldest_live))
    }

    /// Empties dead slots, and says how many there were.
    fn free_dead(&mut self, oldest_live: u64) -> usize {
        let mut freed = 0;
        for slot in &mut self.0 {
            if *slot & TAKEN != 0 && !is_live(*slot, oldest_live) {
                *slot &= MARK;
                freed += 1;
            }
        }
        freed
    }

    fn has_no_mark(&self) -> bool {
        let [a, b, c, d, ..] = self.0;
        (a | b | c | d) & MARK == 0
    }

    fn is_marked(&self, mark: usize) -> bool {
        self.slot(mark) & MARK != 0
    }

    fn set_mark(&mut self, mark: usize, on: bool) {
        let slot = self.slot_mut(mark);
        *slot = if on { *slot | MARK } else { *slot & !MARK };
    }
}

/// The upper bits of a taken slot of this position, `displaced` buckets behind its home.
fn head(position: u64, displaced: usize) -> u64 {
    (position << TAG_SHIFT) | (to_u64(displaced) << DISPLACED_SHIFT) | TAKEN
}

fn displaced(slot: u64) -> usize {
    to_usize((slot >> DISPLACED_SHIFT) & 3)
}

/// How far the slot's segment lies ahead of the oldest live one, if it is live.
fn distance(slot: u64, oldest_live: u64) -> u64 {
    (slot >> OFFSET_BITS).wrapping_sub(oldest_live) & SEGMENT_MASK
}

fn is_live(slot: u64, oldest_live: u64) -> bool {
    distance(slot, oldest_live) < SEGMENT_SPAN_MAX
}

fn pack_bits(address: Address) -> u64 {
    ((address.segment & SEGMENT_MASK) << OFFSET_BITS) | u64::from(address.offset >> 3)
}

fn pack(address: Address, oldest_live: u64) -> u64 {
    let Address { segment, offset } = address;
    assert!(
        offset % 8 == 0 && offset < OFFSET_END,
        "offset {offset} is not the offset of a record"
    );
    assert!(
        segment
            .checked_sub(oldest_live)
            .is_some_and(|ahead| ahead < SEGMENT_SPAN_MAX),
        "segment {segment} cannot be told from a dead one while {oldest_live} is the oldest live"
    );
    pack_bits(address)
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).expect("usize has 64 bits")
}

fn to_u64(value: usize) -> u64 {
    u64::try_from(value).expect("usize has 64 bits")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    /// The log as the index needs it: which key lies where.
    #[derive(Default)]
    struct Log {
        keys: HashMap<(u64, u32), u64>,
        segment: u64,
        oldest_live: u64,
        offset: u32,
    }

    impl Log {
        fn starting_at(segment: u64) -> Self {
            Self {
                segment,
                oldest_live: segment,
                offset: 8192,
                ..Self::default()
            }
        }

        fn append(&mut self, key: u64) -> Address {
            let address = Address {
                segment: self.segment,
                offset: self.offset,
            };
            self.keys.insert((address.segment, address.offset), key);
            self.offset += 8;
            address
        }

        fn roll(&mut self) {
            self.segment += 1;
            self.offset = 8192;
        }

        fn retire(&mut self) {
            if self.oldest_live < self.segment {
                self.oldest_live += 1;
                let oldest_live = self.oldest_live;
                self.keys.retain(|(segment, _), _| *segment >= oldest_live);
            }
        }

        fn holds(&self, address: Address, key: u64) -> bool {
            *self
                .keys
                .get(&(address.segment, address.offset))
                .expect("only live addresses are compared")
                == key
        }
    }

    /// The index and a map that does the same.
    struct Pair {
        index: IndexShard,
        model: HashMap<u64, Address>,
        log: Log,
        hash: fn(u64) -> u64,
    }

    impl Pair {
        fn new(buckets_min: usize, segment: u64, hash: fn(u64) -> u64) -> Self {
            Self {
                index: IndexShard::new(buckets_min),
                model: HashMap::new(),
                log: Log::starting_at(segment),
                hash,
            }
        }

        fn find(&self, key: u64) -> Option<Found> {
            self.index.find((self.hash)(key), self.log.oldest_live, |address| {
                self.log.holds(address, key)
            })
        }

        fn publish(&mut self, key: u64) {
            let found = self.find(key);
            let address = self.log.append(key);
            self.index
                .publish((self.hash)(key), self.log.oldest_live, found, address);
            self.model.insert(key, address);
        }

        fn remove(&mut self, key: u64) {
            let found = self.find(key);
            assert_eq!(found.map(|found| found.address), self.model.remove(&key));
            if let Some(found) = found {
                self.index.remove(found);
            }
        }

        fn retire(&mut self) {
            self.log.retire();
            let oldest_live = self.log.oldest_live;
            self.model.retain(|_, address| address.segment >= oldest_live);
        }

        fn sweep(&mut self) {
            self.index.sweep(self.log.oldest_live);
        }

        /// Every key of `keys` is found exactly where the model has it, the index holds nothing else, and invariants hold.
        fn check(&self, keys: impl Iterator<Item = u64>) {
            for key in keys {
                assert_eq!(
                    self.find(key).map(|found| found.address),
                    self.model.get(&key).copied(),
                    "key {key}"
                );
            }
            let mut held: Vec<_> = self
                .index
                .addresses(self.log.oldest_live)
                .map(|a| (a.segment, a.offset))
                .collect();
            let mut expected: Vec<_> = self.model.values().map(|a| (a.segment, a.offset)).collect();
            held.sort_unstable();
            expected.sort_unstable();
            assert_eq!(held, expected);
            assert_eq!(self.index.len(self.log.oldest_live), self.model.len());
            let words = || self.index.buckets.iter().flat_map(|bucket| bucket.0);
            assert_eq!(self.index.taken, words().filter(|slot| slot & TAKEN != 0).count());
        }
    }

    fn mixed(key: u64) -> u64 {
        let mut x = key.wrapping_add(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn constant(_: u64) -> u64 {
        0x1234_5678_9abc_def0
    }

    fn low_four_bits(key: u64) -> u64 {
        mixed(key) & 15
    }

    fn high_four_bits(key: u64) -> u64 {
        mixed(key) & (15 << 60)
    }

    const HASHES: [fn(u64) -> u64; 4] = [mixed, constant, low_four_bits, high_four_bits];

    #[derive(Clone, Debug)]
    enum Op {
        Publish(u64),
        PublishNew(u16),
        Remove(u64),
        Roll,
        Retire,
        Sweep,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            8 => (0..300_u64).prop_map(Op::Publish),
            1 => (1..200_u16).prop_map(Op::PublishNew),
            3 => (0..300_u64).prop_map(Op::Remove),
            2 => Just(Op::Roll),
            1 => Just(Op::Retire),
            1 => Just(Op::Sweep),
        ]
    }

    proptest! {
        #[test]
        fn index_agrees_with_a_map(
            ops in prop::collection::vec(op(), 1..400),
            buckets_min in 1..9_usize,
            segment in prop_oneof![Just(1_u64), Just(0xffff), Just(0x7fff), Just((1 << 40) - 3)],
            hash in 0..HASHES.len(),
        ) {
            let mut pair = Pair::new(buckets_min, segment, HASHES[hash]);
            let mut new = 1000;
            for op in ops {
                match op {
                    Op::Publish(key) => pair.publish(key),
                    Op::PublishNew(count) => for _ in 0..count {
                        pair.publish(new);
                        new += 1;
                    },
                    Op::Remove(key) => pair.remove(key),
                    Op::Roll => pair.log.roll(),
                    Op::Retire => pair.retire(),
                    Op::Sweep => pair.sweep(),
                }
            }
            pair.check((0..300).chain(1000..new + 5));
        }
    }
}
