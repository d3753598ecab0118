use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const OFFSET_FIRST: u32 = 8192;

/// The log as the index needs it: which key lies where.
struct Log {
    first: u64,
    oldest_live: u64,
    segments: Vec<Vec<u64>>,
}

impl Log {
    fn starting_at(first: u64) -> Self {
        Self { first, oldest_live: first, segments: vec![Vec::new()] }
    }

    fn newest(&self) -> u64 {
        self.first + to_u64(self.segments.len()) - 1
    }

    fn append(&mut self, key: u64) -> Address {
        let segment = self.newest();
        let keys = self.segments.last_mut().unwrap();
        keys.push(key);
        Address { segment, offset: OFFSET_FIRST + 8 * u32::try_from(keys.len() - 1).unwrap() }
    }

    fn holds(&self, address: Address, key: u64) -> bool {
        assert!(address.segment >= self.oldest_live, "only live addresses are compared");
        let keys = &self.segments[to_usize(address.segment - self.first)];
        keys[usize::try_from((address.offset - OFFSET_FIRST) / 8).unwrap()] == key
    }
}

/// The index, and a map that must agree with it.
struct Pair {
    index: IndexShard,
    model: HashMap<u64, Address>,
    log: Log,
    hash: fn(u64) -> u64,
}

impl Pair {
    fn new(index: IndexShard, segment: u64, hash: fn(u64) -> u64) -> Self {
        Self { index, model: HashMap::new(), log: Log::starting_at(segment), hash }
    }

    fn find(&self, key: u64) -> Option<Found> {
        let found = self.index.find((self.hash)(key), self.log.oldest_live, |other| self.log.holds(other.address, key));
        assert_eq!(found.map(|found| found.address), self.model.get(&key).copied(), "key {key}");
        found
    }

    fn publish(&mut self, key: u64) {
        let found = self.find(key);
        let address = self.log.append(key);
        self.index.publish((self.hash)(key), self.log.oldest_live, found, address);
        self.model.insert(key, address);
    }

    fn remove(&mut self, key: u64) {
        if let Some(found) = self.find(key) {
            self.index.remove(found);
        }
        self.model.remove(&key);
    }

    fn roll(&mut self) {
        self.log.segments.push(Vec::new());
    }

    fn retire(&mut self) {
        if self.log.oldest_live < self.log.newest() {
            self.log.oldest_live += 1;
        }
        let oldest_live = self.log.oldest_live;
        self.model.retain(|_, address| address.segment >= oldest_live);
    }

    /// The index holds what the map holds and nothing else, and keeps its invariants.
    fn check(&self) {
        let oldest_live = self.log.oldest_live;
        for key in self.model.keys() {
            self.find(*key);
        }
        let mut held: Vec<_> = self.index.addresses(oldest_live).map(|at| (at.segment, at.offset)).collect();
        let mut expected: Vec<_> = self.model.values().map(|at| (at.segment, at.offset)).collect();
        held.sort_unstable();
        expected.sort_unstable();
        assert_eq!(held, expected);
        assert_eq!(self.index.len(oldest_live), self.model.len());
        self.check_invariants();
    }

    fn check_invariants(&self) {
        let index = &self.index;
        let oldest_live = self.log.oldest_live;
        let mut taken = 0;
        for (at, bucket) in index.buckets.iter().enumerate() {
            for word in bucket.0.into_iter().filter(|word| slot::is_taken(*word)) {
                taken += 1;
                assert!(slot::is_live(word, index.clean_since));
                let displaced = slot::displaced(word);
                assert!(displaced < index.near());
                let home = before(at, displaced, index.buckets.len());
                if displaced > 0 && slot::is_live(word, oldest_live) {
                    assert!(index.bucket(home).marks(slot::class(slot::tag(word))) & LATER != 0);
                }
            }
        }
        assert_eq!(index.taken, taken);
        assert!(index.stash.iter().all(|stashed| slot::is_live(stashed.word, index.clean_since)));
        for stashed in index.stash.iter().filter(|stashed| slot::is_live(stashed.word, oldest_live)) {
            let marks = index.bucket(index.home(stashed.position)).marks(slot::class(stashed.position));
            assert!(marks & STASHED != 0);
        }
    }

    /// Buckets that a miss reads on average.
    fn buckets_per_miss(&self) -> f64 {
        let classes = self.index.buckets.iter().flat_map(|bucket| (0..SLOTS).map(|class| bucket.marks(class)));
        let later = classes.filter(|marks| marks & LATER != 0).count();
        1.0 + (NEAR - 1) as f64 * later as f64 / self.index.slot_count() as f64
    }
}

/// The finisher of splitmix64.
fn mixed(key: u64) -> u64 {
    let mut x = key.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn constant(_: u64) -> u64 {
    0x1234_5678_9abc_def0
}

fn four_low_bits(key: u64) -> u64 {
    mixed(key) & 15
}

fn four_high_bits(key: u64) -> u64 {
    mixed(key) & (15 << 60)
}

/// Two bits of the bucket and two of the top of the tag: homes lie apart, and part again with growth.
fn scattered_bits(key: u64) -> u64 {
    mixed(key) & ((3 << 62) | (3 << 17))
}

const HASHES: [fn(u64) -> u64; 5] = [mixed, constant, four_low_bits, four_high_bits, scattered_bits];

#[derive(Clone, Debug)]
enum Op {
    Publish(u64),
    PublishNew(u64),
    Remove(u64),
    Roll,
    Retire,
    Sweep,
    SweepSome(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0..200_u64).prop_map(Op::Publish),
        1 => (1..60_u64).prop_map(Op::PublishNew),
        3 => (0..200_u64).prop_map(Op::Remove),
        2 => Just(Op::Roll),
        1 => Just(Op::Retire),
        1 => Just(Op::Sweep),
        2 => (1..9_usize).prop_map(Op::SweepSome),
    ]
}

proptest! {
    #[test]
    fn index_agrees_with_a_map(
        ops in prop::collection::vec(op(), 1..300),
        buckets_min in 0..12_usize,
        segment in prop_oneof![Just(1_u64), Just(0xfffd), Just(0x7ffd), Just((1 << 40) - 3)],
        hash in 0..HASHES.len(),
    ) {
        let mut pair = Pair::new(IndexShard::new(buckets_min), segment, HASHES[hash]);
        let mut new = 1000;
        for op in ops {
            match op {
                Op::Publish(key) => pair.publish(key),
                Op::PublishNew(count) => {
                    (new..new + count).for_each(|key| pair.publish(key));
                    new += count;
                }
                Op::Remove(key) => pair.remove(key),
                Op::Roll => pair.roll(),
                Op::Retire => pair.retire(),
                Op::Sweep => pair.index.sweep(pair.log.oldest_live),
                Op::SweepSome(buckets) => {
                    pair.index.sweep_some(pair.log.oldest_live, buckets);
                }
            }
            pair.check_invariants();
        }
        for key in (0..200).chain(1000..new + 5) {
            pair.find(key);
        }
        pair.check();
    }
}

#[test]
fn growth_keeps_every_key_and_waits_until_the_buckets_are_filled() {
    let mut pair = Pair::new(IndexShard::new(1), 1, mixed);
    for key in 0..40_000 {
        let before = (pair.index.level, pair.index.slot_count());
        pair.publish(key);
        if pair.index.level > before.0 {
            assert!(key * 100 >= to_u64(before.1) * 93, "grew from {} slots at {key} keys", before.1);
            pair.check();
        }
    }
    assert_eq!(pair.index.level, 13);
}

#[test]
fn a_constant_hash_is_right_and_does_not_grow_the_buckets() {
    let mut pair = Pair::new(IndexShard::new(1), 1, constant);
    for key in 0..1000 {
        pair.publish(key);
    }
    pair.check();
    assert!(pair.index.buckets.len() <= 8, "{:?}", pair.index);
    assert_eq!(pair.index.stash.len(), 1000 - NEAR * SLOTS);
    for key in 0..1000 {
        pair.remove(key);
    }
    pair.check();
    pair.index.sweep(1);
    assert_eq!(pair.index.addresses(1).count() + pair.index.taken + pair.index.stash.len(), 0);
    assert!(pair.index.buckets.iter().all(|bucket| bucket.0 == [0; SLOTS]));
}

#[test]
fn growth_ends_with_the_tag() {
    let mut index = IndexShard::at_level(1, TAG_BITS);
    let position = index.position(constant(0));
    assert_eq!(to_u64(index.home(position)), constant(0) & TAG_MASK);
    index.taken = index.slot_count();
    for offset in 1..=200 {
        index.publish(constant(0), 1, None, Address { segment: 1, offset: 8 * offset });
    }
    assert_eq!(index.level, TAG_BITS);
    assert_eq!(index.len(1), 200);
}

#[test]
fn a_planned_shard_keeps_to_its_memory_and_a_miss_to_its_buckets() {
    for keys in [2_000_u64, 15_625, 60_000] {
        let mut pair = Pair::new(IndexShard::planned(keys), 1, mixed);
        (0..keys).for_each(|key| pair.publish(key));
        let bytes_per_key = pair.index.bytes() as f64 / keys as f64;
        assert!(bytes_per_key <= 9.9, "{bytes_per_key} bytes a key at {keys} keys");
        let buckets_per_miss = pair.buckets_per_miss();
        assert!(buckets_per_miss <= 1.35, "{buckets_per_miss} buckets a miss at {keys} keys");
        assert_eq!(pair.index.bytes(), IndexShard::planned(keys).with_room_for(keys).bytes());
    }
}

#[test]
fn windows_pass_through_a_planned_shard_without_growth() {
    let (keys, segments) = (4096_u64, 32);
    let mut pair = Pair::new(IndexShard::planned(keys), 1, mixed);
    let per_segment = keys / segments;
    for round in 0..segments * 6 {
        (0..per_segment).for_each(|at| pair.publish(round * per_segment + at));
        pair.roll();
        if round >= segments - 1 {
            pair.retire();
        }
        if round % 4 == 0 {
            while !pair.index.sweep_some(pair.log.oldest_live, 50) {}
        }
        let buckets_per_miss = pair.buckets_per_miss();
        assert!(round < segments || buckets_per_miss <= 1.5, "{buckets_per_miss} buckets a miss");
    }
    pair.check();
    assert!(pair.index.bytes() as f64 / keys as f64 <= 9.9);
}

#[test]
fn dead_slots_hide_nothing_and_are_written_again() {
    let mut pair = Pair::new(IndexShard::new(8), 1, constant);
    for key in 0..60 {
        pair.publish(key);
        pair.roll();
    }
    for _ in 0..45 {
        pair.retire();
        pair.check();
    }
    let taken = pair.index.taken;
    (100..120).for_each(|key| pair.publish(key));
    pair.check();
    assert_eq!(pair.index.taken, taken);
    assert!(pair.index.stash.len() <= 60 - NEAR * SLOTS);
}

#[test]
fn marks_that_nothing_needs_are_cleared_by_a_sweep() {
    let mut pair = Pair::new(IndexShard::new(64), 1, mixed);
    (0..480).for_each(|key| pair.publish(key));
    assert!(pair.buckets_per_miss() > 1.3);
    for key in 0..480 {
        if key % 2 == 0 {
            pair.remove(key);
        }
    }
    assert!(pair.buckets_per_miss() > 1.3);
    pair.index.sweep(1);
    pair.check();
    assert!(pair.buckets_per_miss() < 1.02, "{}", pair.buckets_per_miss());
}

#[test]
fn segment_numbers_wrap_many_times() {
    let mut index = IndexShard::new(2);
    let mut newest = Vec::new();
    for step in 0..400_u64 {
        let oldest_live = (1 << 33) + step * 1000;
        newest.retain(|(_, address): &(u64, Address)| address.segment >= oldest_live);
        if step % 16 == 0 {
            index.sweep(oldest_live);
        }
        for ahead in [0, 999, 20_000, SEGMENT_SPAN_MAX - 1] {
            let address = Address { segment: oldest_live + ahead, offset: OFFSET_END - 8 };
            let key = step * 4 + ahead % 7;
            assert!(index.find(mixed(key), oldest_live, |_| false).is_none());
            index.publish(mixed(key), oldest_live, None, address);
            newest.push((key, address));
        }
        for (key, address) in &newest {
            assert!(index.find(mixed(*key), oldest_live, |other| other.address == *address).is_some());
        }
        assert_eq!(index.len(oldest_live), newest.len());
    }
}

#[test]
fn an_oldest_live_segment_that_lags_behind_does_no_harm() {
    let mut index = IndexShard::new(1);
    let address = Address { segment: 100, offset: 0 };
    index.publish(7, 90, None, address);
    index.sweep(95);
    let found = index.find(7, 60, |other| other.address == address);
    index.publish(7, 60, found, Address { segment: 101, offset: 8 });
    index.sweep(60);
    let newest = Address { segment: 101, offset: 8 };
    assert_eq!(index.addresses(101).collect::<Vec<_>>(), [newest]);

    let mut index = IndexShard::new(2);
    index.publish(u64::MAX, 90, None, Address { segment: 92, offset: 0 });
    assert!(!index.sweep_some(95, 1));
    assert!(index.sweep_some(91, 1));
    assert_eq!(index.clean_since, 91);
    assert_eq!(index.len(91), 1);
}

#[test]
#[should_panic(expected = "no sweep while the oldest live segment moved by 32769")]
fn a_sweep_that_is_overdue_is_found_out() {
    let mut index = IndexShard::new(1);
    index.publish(7, 1, None, Address { segment: 1, offset: 8 });
    for oldest_live in [2, 1 + SEGMENT_SPAN_MAX] {
        assert!(index.find(7, oldest_live, |_| true).is_none());
    }
    index.publish(8, 2 + SEGMENT_SPAN_MAX, None, Address { segment: 2 + SEGMENT_SPAN_MAX, offset: 8 });
}

#[test]
#[should_panic(expected = "the shard was changed since the search")]
fn a_stale_find_is_found_out() {
    let mut index = IndexShard::new(1);
    index.publish(7, 1, None, Address { segment: 1, offset: 8 });
    let found = index.find(7, 1, |_| true);
    index.publish(7, 1, found, Address { segment: 1, offset: 16 });
    index.publish(7, 1, found, Address { segment: 1, offset: 24 });
}

#[test]
fn addresses_that_cannot_be_packed_are_refused() {
    for (segment, offset) in [(1, 4), (1, OFFSET_END), (0, 8), (1 + SEGMENT_SPAN_MAX, 8)] {
        let refused = std::panic::catch_unwind(|| IndexShard::new(1).publish(7, 1, None, Address { segment, offset }));
        assert!(refused.is_err(), "{segment} {offset}");
    }
}

#[test]
fn shards_and_buckets_share_no_bits_with_the_tag() {
    let index = IndexShard::new(1000);
    let hash = mixed(1);
    for bit in 0..64 {
        let other = hash ^ (1 << bit);
        let tag = (index.position(hash) ^ index.position(other)) & TAG_MASK != 0;
        let shard = shard_bits(hash) != shard_bits(other);
        let bucket = (index.position(hash) ^ index.position(other)) >> TAG_BITS != 0;
        assert!(u32::from(tag) + u32::from(shard) + u32::from(bucket) <= 1, "bit {bit}");
    }
}
