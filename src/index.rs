//! Where is the newest record of a key? One shard of the index answers with an address in the log.
//!
//! Keys live only in the log. A slot is 8 bytes, a bucket is one cache line of 8 slots, and whether a slot is the key's
//! is decided by the caller, who compares the whole key at the address that the slot names (`matches`). A tag only
//! spares most of these comparisons; nothing rests on it. A slot dies with its segment, untouched, when `oldest_live`
//! moves on; `slot.rs` tells what the bits of a slot and of a bucket mean. Neither file knows records, files or locks.
//!
//! # Home and growth
//!
//! A hash is cut into three parts that share no bit: 32 bits choose among the buckets that the shard began with, 19 are
//! the tag, and 12 between are the caller's, to choose the shard. Begun with `first` buckets and doubled `level`
//! times, a shard has `first << level` buckets, and
//!
//! ```text
//! position of a key = (bucket among the first << 19) | tag          home = position >> (19 - level)
//! ```
//!
//! so each doubling lets one more bit of the tag, from the top, speak for the home. A slot tells its position by
//! itself, from its tag and the home that its place and displacement name. Growth therefore needs no log: it places
//! every live slot anew, and with them the marks. It ends when the tag is used up, at 2^19 times the first size.
//!
//! # Where a key goes
//!
//! 1. Into a slot that is empty or dead, in the home bucket or one of the three behind it (the table wraps around).
//! 2. If they are full, the next room within [`REACH_MAX`] buckets is brought near by moving other slots into it, none
//!    farther than three buckets from its home: hopscotch hashing (Herlihy, Shavit, Tzafrir, DISC 2008).
//! 3. If none can be brought, into the stash, a plain list. When the stash has more than its share, its keys are tried
//!    again; if that does not help, the shard is swept, unless it just was; if that does not help, it grows. All this
//!    provided that the buckets are filled: under a constant hash they never are, the stash takes all, and everything
//!    is right, only slow.
//!
//! A search reads the home bucket, and goes on only where a mark of the key's class sends it. A mark is set with the
//! slot that needs it, and cleared by the sweep alone, which frees dead slots and brings displaced ones home where it
//! can. Planned for 85 percent live keys, a shard takes 9.5 bytes a key, and a miss reads 1.3 buckets on average when
//! the shard is swept, 1.4 when it is swept eight times a window, more and more when it is not. Growth sets in at 93
//! percent and above.
//!
//! # Invariants
//!
//! 1. A live slot of home `h` lies in bucket `h + d` and says `d`, 0 to 3, or it lies in the stash with its position.
//!    If it does not lie in `h`, the mark of its class that leads to it is set in `h`.
//! 2. No slot has a segment number below `clean_since`, or 2^15 or more above the `oldest_live` it was published under.
//! 3. A key has at most one live slot, if each `publish` follows a `find` whose `matches` was right, under one lock.
//! 4. `taken` counts the taken slots of all buckets, dead ones too.

mod slot;

use std::fmt;
use std::mem;
use std::ops::Range;

pub(crate) use self::slot::{Address, OFFSET_END, SEGMENT_SPAN_MAX};
use self::slot::{Bucket, LATER, NEAR, SLOTS, STASHED, TAG_BITS, TAG_MASK, to_u64, to_usize};

/// How far behind its home a key looks for room that can be brought near.
const REACH_MAX: usize = 64;
/// The share of the stash: so many keys, and one more for so many slots.
const STASHED_MIN: usize = 8;
const SLOTS_PER_STASHED: usize = 512;
/// Growth is tried only after a sweep since which fewer than one in so many slots were filled.
const SLOTS_PER_FRESH: usize = 16;
/// Growth needs this much of the slots taken, whatever the stash holds.
const GROWTH_FILL_PERCENT_MIN: usize = 75;

/// Slots in use when a shard holds what it was planned for, which leaves room for dead ones.
const PLANNED_FILL_PERCENT: u64 = 85;
/// Slots in use when a shard, by chance, holds three standard deviations more.
const LUCKLESS_FILL_PERCENT: u64 = 95;
/// A planned shard begins with this many buckets or up to twice as many, unless the plan is smaller.
const FIRST_BUCKETS_MIN: u64 = 64;

/// A record that may be the one that is looked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub(crate) address: Address,
    /// It is known from a hint alone: whoever looks at it checks it first.
    pub(crate) hinted: bool,
}

/// What a search found. It is good until the shard is next changed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    /// Where the key's newest record lies.
    pub(crate) address: Address,
    /// See [`Candidate::hinted`].
    pub(crate) hinted: bool,
    place: Place,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    Slot { bucket: usize, slot: usize },
    Stash { entry: usize },
}

impl Found {
    fn new(Candidate { address, hinted }: Candidate, place: Place) -> Self {
        Self { address, hinted, place }
    }
}

/// A slot for which there was no room near its home.
#[derive(Clone, Copy)]
struct Stashed {
    position: u64,
    word: u64,
}

/// One shard of the index. One lock of the caller's covers look, decide, append and publish.
pub(crate) struct IndexShard {
    buckets: Vec<Bucket>,
    /// Buckets at level 0, fewer than 2^32.
    first: u64,
    /// Doublings since.
    level: u32,
    /// Taken slots in all buckets, dead ones among them.
    taken: usize,
    stash: Vec<Stashed>,
    /// No slot has a segment number below this one.
    clean_since: u64,
    /// Buckets that the present round of sweeping has done.
    swept: usize,
    /// The least `oldest_live` that this round has gone by.
    round_since: u64,
    /// Slots filled since the last round ended.
    fresh: usize,
}

/// The bits of a hash that may choose the shard: 12 bits that neither the bucket nor the tag uses.
pub(crate) fn shard_bits(hash: u64) -> usize {
    to_usize((hash >> 20) & 0xfff)
}

impl IndexShard {
    /// An empty shard of `buckets_min` buckets, and at least one. It doubles when it has to.
    #[cfg(test)]
    pub(crate) fn new(buckets_min: usize) -> Self {
        Self::at_level(to_u64(buckets_min), 0)
    }

    /// An empty shard that comes, by doubling, to just the size that `keys` keys need.
    pub(crate) fn planned(keys: u64) -> Self {
        let mut first = buckets_for(keys);
        while first >= 2 * FIRST_BUCKETS_MIN {
            first = first.div_ceil(2);
        }
        Self::at_level(first, 0)
    }

    /// The same with room for `keys` keys from the start, so that loading so many does not grow it step by step.
    ///
    /// # Panics
    ///
    /// If the shard is not empty.
    pub(crate) fn with_room_for(self, keys: u64) -> Self {
        assert!(self.is_blank(), "only an empty shard is resized");
        let enough = |level: &u32| self.first << level >= buckets_for(keys);
        Self::at_level(self.first, (0..TAG_BITS).find(enough).unwrap_or(TAG_BITS))
    }

    fn at_level(first: u64, level: u32) -> Self {
        let first = first.max(1);
        assert!(first >> 32 == 0, "a shard begins with fewer than 2^32 buckets");
        Self {
            buckets: vec![Bucket([0; SLOTS]); to_usize(first << level)],
            first,
            level,
            taken: 0,
            stash: Vec::new(),
            clean_since: 0,
            swept: 0,
            round_since: 0,
            fresh: 0,
        }
    }

    /// Looks for the live slot of the key that hashes to `hash`. `matches` compares the whole key with the record.
    ///
    /// Here as everywhere, `oldest_live` is best read under the shard's lock; one that lags behind does no harm.
    ///
    /// # Panics
    ///
    /// If `oldest_live` has moved too far since the last sweep.
    pub(crate) fn find(
        &self,
        hash: u64,
        oldest_live: u64,
        mut matches: impl FnMut(Candidate) -> bool,
    ) -> Option<Found> {
        let position = self.position(hash);
        let home = self.home(position);
        let bucket = self.bucket(home);
        let found = self.find_in(home, bucket, slot::head(position, 0), oldest_live, &mut matches);
        let marks = bucket.marks(slot::class(position));
        if found.is_some() || marks == 0 {
            return found;
        }
        self.find_elsewhere(position, home, marks, oldest_live, &mut matches)
    }

    /// Names `address` as the newest record of the key: in place of `found`, or in a new slot when the key has none.
    ///
    /// # Panics
    ///
    /// If `found` is stale, if the address cannot be packed ([`OFFSET_END`], [`SEGMENT_SPAN_MAX`]), or if `oldest_live`
    /// has moved too far since the last sweep.
    pub(crate) fn publish(&mut self, hash: u64, oldest_live: u64, found: Option<Found>, address: Address) {
        self.publish_packed(hash, oldest_live, found, slot::pack_checked(address, oldest_live));
    }

    /// The same for a record that is known from a hint alone.
    ///
    /// # Panics
    ///
    /// As [`publish`](Self::publish).
    pub(crate) fn publish_hinted(&mut self, hash: u64, oldest_live: u64, found: Option<Found>, address: Address) {
        self.publish_packed(hash, oldest_live, found, slot::pack_checked(address, oldest_live) | slot::HINTED);
    }

    /// The record that was found has been checked.
    ///
    /// # Panics
    ///
    /// If `found` is stale.
    pub(crate) fn note_checked(&mut self, found: Found) {
        *self.word_of(found) &= !slot::HINTED;
    }

    fn publish_packed(&mut self, hash: u64, oldest_live: u64, found: Option<Found>, packed: u64) {
        if let Some(found) = found {
            let word = self.word_of(found);
            *word = slot::with_packed(*word, packed);
            return;
        }
        self.check_span(oldest_live);
        if self.is_blank() {
            self.clean_since = oldest_live;
        }
        let position = self.position(hash);
        if self.place(position, packed, oldest_live) {
            return;
        }
        if self.stash_is_over() {
            self.relieve_stash(oldest_live);
        }
        self.place_or_stash(position, packed, oldest_live);
    }

    /// Takes the key's slot out: the key has no record any more.
    ///
    /// # Panics
    ///
    /// If `found` is stale.
    pub(crate) fn remove(&mut self, found: Found) {
        self.word_of(found);
        match found.place {
            Place::Slot { bucket, slot } => self.vacate(bucket, slot),
            Place::Stash { entry } => drop(self.stash.swap_remove(entry)),
        }
    }

    /// Frees dead slots, brings displaced ones home where there is room, and clears the marks that no slot needs.
    ///
    /// Due well before `oldest_live` has moved [`SEGMENT_SPAN_MAX`], and about eight times a window, since marks that
    /// nothing needs any more send searches on in vain.
    ///
    /// # Panics
    ///
    /// If it comes too late.
    pub(crate) fn sweep(&mut self, oldest_live: u64) {
        self.swept = 0;
        self.sweep_some(oldest_live, usize::MAX);
    }

    /// Sweeps the next `buckets_max` buckets, so that the lock is held for a short time only. True: the round is
    /// complete, and every slot is known to lie at or above what was the oldest live segment when it began.
    ///
    /// # Panics
    ///
    /// As [`sweep`](Self::sweep).
    pub(crate) fn sweep_some(&mut self, oldest_live: u64, buckets_max: usize) -> bool {
        self.check_span(oldest_live);
        self.round_since = if self.swept == 0 { oldest_live } else { self.round_since.min(oldest_live) };
        let end = self.swept.saturating_add(buckets_max).min(self.buckets.len());
        for home in self.swept..end {
            self.sweep_home(home, oldest_live);
        }
        self.swept = end;
        if end < self.buckets.len() {
            return false;
        }
        self.clean_since = self.clean_since.max(self.round_since);
        self.swept = 0;
        self.fresh = 0;
        true
    }

    /// How many keys are live, counted slot by slot.
    pub(crate) fn len(&self, oldest_live: u64) -> usize {
        self.addresses(oldest_live).count()
    }

    /// The addresses of all live keys, in no order.
    pub(crate) fn addresses(&self, oldest_live: u64) -> impl Iterator<Item = Address> + '_ {
        self.candidates(oldest_live).map(|candidate| candidate.address)
    }

    /// The same, with whether each is known from a hint alone.
    pub(crate) fn candidates(&self, oldest_live: u64) -> impl Iterator<Item = Candidate> + '_ {
        let in_buckets = self.buckets.iter().flat_map(|bucket| bucket.0.iter().copied());
        let in_stash = self.stash.iter().map(|stashed| stashed.word);
        in_buckets
            .chain(in_stash)
            .filter(move |word| !slot::is_room(*word, oldest_live))
            .map(move |word| self.candidate(word, oldest_live))
    }

    /// The memory that the shard holds.
    pub(crate) fn bytes(&self) -> usize {
        self.buckets.capacity() * size_of::<Bucket>() + self.stash.capacity() * size_of::<Stashed>() + size_of::<Self>()
    }

    fn slot_count(&self) -> usize {
        self.buckets.len() * SLOTS
    }

    /// No slot is taken, dead or alive.
    fn is_blank(&self) -> bool {
        self.taken == 0 && self.stash.is_empty()
    }

    fn position(&self, hash: u64) -> u64 {
        let first_bucket = ((hash >> 32) * self.first) >> 32;
        (first_bucket << TAG_BITS) | (hash & TAG_MASK)
    }

    fn home(&self, position: u64) -> usize {
        to_usize(position >> (TAG_BITS - self.level))
    }

    /// The bucket that lies `distance` behind another; the table wraps around.
    fn behind(&self, index: usize, distance: usize) -> usize {
        let index = index + distance;
        if index < self.buckets.len() { index } else { index - self.buckets.len() }
    }

    /// The displacements that a slot may have. A table of fewer than four buckets has no bucket twice.
    fn near(&self) -> usize {
        self.buckets.len().min(NEAR)
    }

    fn bucket(&self, index: usize) -> &Bucket {
        self.buckets.get(index).expect("bucket numbers are below the number of buckets")
    }

    fn bucket_mut(&mut self, index: usize) -> &mut Bucket {
        self.buckets.get_mut(index).expect("bucket numbers are below the number of buckets")
    }

    /// The word that `found` speaks of; a stale `found` is a bug of the caller.
    fn word_of(&mut self, found: Found) -> &mut u64 {
        let word = match found.place {
            Place::Slot { bucket, slot } => self.buckets.get_mut(bucket).and_then(|bucket| bucket.0.get_mut(slot)),
            Place::Stash { entry } => self.stash.get_mut(entry).map(|stashed| &mut stashed.word),
        };
        let word = word.expect("what was found is still there");
        let unchanged = slot::is_taken(*word) && slot::names(*word, found.address);
        assert!(unchanged, "the shard was changed since the search");
        word
    }

    fn check_span(&self, oldest_live: u64) {
        let span = oldest_live.abs_diff(self.clean_since);
        assert!(
            span <= SEGMENT_SPAN_MAX || self.is_blank(),
            "a slot may be taken for a live one: no sweep while the oldest live segment moved by {span}"
        );
    }

    fn address(&self, word: u64, oldest_live: u64) -> Address {
        self.check_span(oldest_live);
        slot::address(word, oldest_live)
    }

    fn candidate(&self, word: u64, oldest_live: u64) -> Candidate {
        Candidate { address: self.address(word, oldest_live), hinted: word & slot::HINTED != 0 }
    }

    /// Searches one bucket for slots whose upper bits are those of `head`.
    #[inline]
    fn find_in(
        &self,
        index: usize,
        bucket: &Bucket,
        head: u64,
        oldest_live: u64,
        matches: &mut impl FnMut(Candidate) -> bool,
    ) -> Option<Found> {
        let mut candidates = bucket.candidates(head);
        while candidates != 0 {
            let slot = to_usize(u64::from(candidates.trailing_zeros()));
            candidates &= candidates - 1;
            let word = bucket.word(slot);
            if !slot::is_live(word, oldest_live) {
                continue;
            }
            let candidate = self.candidate(word, oldest_live);
            if matches(candidate) {
                return Some(Found::new(candidate, Place::Slot { bucket: index, slot }));
            }
        }
        None
    }

    /// Searches the places other than its home that a key may have.
    #[inline(never)]
    fn find_elsewhere(
        &self,
        position: u64,
        home: usize,
        marks: u64,
        oldest_live: u64,
        matches: &mut impl FnMut(Candidate) -> bool,
    ) -> Option<Found> {
        let later = if marks & LATER != 0 { 1..self.near() } else { 0..0 };
        for displaced in later {
            let index = self.behind(home, displaced);
            let found = self.find_in(index, self.bucket(index), slot::head(position, displaced), oldest_live, matches);
            if found.is_some() {
                return found;
            }
        }
        if marks & STASHED == 0 {
            return None;
        }
        self.stash.iter().enumerate().find_map(|(entry, stashed)| {
            if stashed.position != position || !slot::is_live(stashed.word, oldest_live) {
                return None;
            }
            let candidate = self.candidate(stashed.word, oldest_live);
            matches(candidate).then_some(Found::new(candidate, Place::Stash { entry }))
        })
    }

    /// Puts a slot into a bucket near its home. False: there is no room, nor can it be brought.
    fn place(&mut self, position: u64, packed: u64, oldest_live: u64) -> bool {
        let home = self.home(position);
        let room = self.room_within(home, 0..self.near(), oldest_live);
        let Some((displaced, slot)) = room.or_else(|| self.bring_room(home, oldest_live)) else {
            return false;
        };
        self.fill(home, displaced, slot, position, packed);
        self.fresh += 1;
        true
    }

    fn place_or_stash(&mut self, position: u64, packed: u64, oldest_live: u64) {
        if self.place(position, packed, oldest_live) {
            return;
        }
        if self.stash.len() == self.stash.capacity() {
            self.stash.retain(|stashed| slot::is_live(stashed.word, oldest_live));
        }
        self.stash.push(Stashed { position, word: slot::head(position, 0) | packed });
        let home = self.home(position);
        self.bucket_mut(home).mark(slot::class(position), STASHED);
    }

    /// The first room in the buckets so far behind `home`: how far, and which slot.
    fn room_within(&self, home: usize, range: Range<usize>, oldest_live: u64) -> Option<(usize, usize)> {
        range.into_iter().find_map(|far| {
            let slot = self.bucket(self.behind(home, far)).room(oldest_live)?;
            Some((far, slot))
        })
    }

    /// Writes a slot of `home`, `displaced` buckets behind it, and sets the mark that leads there.
    fn fill(&mut self, home: usize, displaced: usize, slot: usize, position: u64, packed: u64) {
        let index = self.behind(home, displaced);
        let word = self.bucket_mut(index).word_mut(slot);
        let was_taken = slot::is_taken(*word);
        *word = slot::refilled(*word, slot::head(position, displaced) | packed);
        self.taken += usize::from(!was_taken);
        if displaced > 0 {
            self.bucket_mut(home).mark(slot::class(position), LATER);
        }
    }

    /// Empties a slot; the marks in the same word stay.
    fn vacate(&mut self, index: usize, slot: usize) {
        let word = self.bucket_mut(index).word_mut(slot);
        *word = slot::refilled(*word, 0);
        self.taken -= 1;
    }

    /// Finds the next room behind a full neighbourhood, and brings it near by moving other slots into it. `None`: it is
    /// too far away, or no slot on the way may move so far.
    #[cold]
    fn bring_room(&mut self, home: usize, oldest_live: u64) -> Option<(usize, usize)> {
        let reach = self.buckets.len().min(REACH_MAX);
        let mut room = self.room_within(home, NEAR..reach, oldest_live)?;
        while room.0 >= NEAR {
            room = (room.0 - NEAR + 1..room.0).find_map(|from| self.shift(home, from, room))?;
        }
        Some(room)
    }

    /// Moves into `room` one slot of the bucket `from` behind `home`, if one may go so far. Its place is room now.
    fn shift(&mut self, home: usize, from: usize, room: (usize, usize)) -> Option<(usize, usize)> {
        let (to, free) = room;
        let index = self.behind(home, from);
        let slot = self.bucket(index).0.iter().position(|word| slot::displaced(*word) + to - from < NEAR)?;
        let word = self.bucket(index).word(slot);
        let its_home = before(index, slot::displaced(word), self.buckets.len());
        self.vacate(index, slot);
        self.fill(its_home, slot::displaced(word) + to - from, free, slot::tag(word), slot::packed(word));
        Some((from, slot))
    }

    /// Brings the stash back to its share, at the least price that does it.
    #[cold]
    fn relieve_stash(&mut self, oldest_live: u64) {
        self.retry_stash(oldest_live);
        if self.stash_is_over() && self.fresh >= self.slot_count() / SLOTS_PER_FRESH {
            self.sweep(oldest_live);
        }
        if self.stash_is_over() && self.level < TAG_BITS {
            self.grow(oldest_live);
        }
    }

    /// The stash has more than its share, and not because of a poor hash, which leaves buckets empty.
    fn stash_is_over(&self) -> bool {
        let is_filled = self.taken * 100 >= self.slot_count() * GROWTH_FILL_PERCENT_MIN;
        is_filled && self.stash.len() >= STASHED_MIN + self.slot_count() / SLOTS_PER_STASHED
    }

    fn retry_stash(&mut self, oldest_live: u64) {
        for Stashed { position, word } in mem::take(&mut self.stash) {
            if slot::is_live(word, oldest_live) {
                self.place_or_stash(position, slot::packed(word), oldest_live);
            }
        }
    }

    /// Doubles the number of buckets. Slots tell their positions, so the log is not read.
    fn grow(&mut self, oldest_live: u64) {
        let grown = Self::at_level(self.first, self.level + 1);
        let mut old = mem::replace(self, grown);
        self.clean_since = oldest_live;
        self.stash = mem::take(&mut old.stash);
        for (index, bucket) in old.buckets.iter().enumerate() {
            for word in bucket.0 {
                if !slot::is_room(word, oldest_live) {
                    let home = before(index, slot::displaced(word), old.buckets.len());
                    let position = ((to_u64(home) >> old.level) << TAG_BITS) | slot::tag(word);
                    self.place_or_stash(position, slot::packed(word), oldest_live);
                }
            }
        }
        self.retry_stash(oldest_live);
        self.fresh = 0;
    }

    /// Frees the dead slots of one bucket, and tidies the keys whose home it is.
    fn sweep_home(&mut self, home: usize, oldest_live: u64) {
        for slot in 0..SLOTS {
            let word = self.bucket(home).word(slot);
            if slot::is_taken(word) && !slot::is_live(word, oldest_live) {
                self.vacate(home, slot);
            }
        }
        let marks = self.bucket_mut(home).take_marks();
        if marks & LATER != 0 {
            for displaced in 1..self.near() {
                self.bring_home(home, displaced, oldest_live);
            }
        }
        if marks & STASHED != 0 {
            self.unstash(home, oldest_live);
        }
    }

    /// Moves live slots of `home` that lie `far` behind it into room in `home`, and marks those that stay.
    fn bring_home(&mut self, home: usize, far: usize, oldest_live: u64) {
        let index = self.behind(home, far);
        for slot in 0..SLOTS {
            let word = self.bucket(index).word(slot);
            if slot::displaced(word) != far || slot::is_room(word, oldest_live) {
                continue;
            }
            let tag = slot::tag(word);
            match self.bucket(home).room(oldest_live) {
                Some(room) => {
                    self.vacate(index, slot);
                    self.fill(home, 0, room, tag, slot::packed(word));
                }
                None => self.bucket_mut(home).mark(slot::class(tag), LATER),
            }
        }
    }

    /// Takes live keys of `home` out of the stash if there is room near it, and marks those that stay.
    fn unstash(&mut self, home: usize, oldest_live: u64) {
        let mut entry = 0;
        while let Some(&Stashed { position, word }) = self.stash.get(entry) {
            if self.home(position) != home {
                entry += 1;
            } else if !slot::is_live(word, oldest_live) || self.place(position, slot::packed(word), oldest_live) {
                self.stash.swap_remove(entry);
            } else {
                self.bucket_mut(home).mark(slot::class(position), STASHED);
                entry += 1;
            }
        }
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

/// The buckets that a shard of so many keys needs.
fn buckets_for(keys: u64) -> u64 {
    let luckless = keys.saturating_add(keys.isqrt().saturating_mul(3));
    let slots =
        (keys.saturating_mul(100) / PLANNED_FILL_PERCENT).max(luckless.saturating_mul(100) / LUCKLESS_FILL_PERCENT);
    slots.div_ceil(to_u64(SLOTS))
}

/// The bucket that lies `distance` before another in a table of `len`, which wraps around.
fn before(index: usize, distance: usize, len: usize) -> usize {
    if index >= distance { index - distance } else { index + len - distance }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
