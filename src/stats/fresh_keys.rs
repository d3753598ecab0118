//! Finds clients that make a fresh key for each try.
//!
//! Such a client sends the same request again under another key, and the store rightly runs it again: the double charge
//! that keys exist to prevent, with nothing wrong in the service. It shows as the same fingerprint in the same scope
//! under another key within a short time.
//!
//! It is a diagnosis, so it may miss some and must cost next to nothing: one fingerprint in [`SAMPLE_ONE_IN`] is looked
//! at all, and a table of [`ENTRIES`] words remembers those. A word that is in use is not given to another request
//! until it has been watched for the whole of [`WATCHED_MS`]: so in a busy store fewer requests are watched, but each
//! of them as long as it takes a client to retry. A retry has the same fingerprint, so it comes to the same word.
//!
//! Equal requests can also be meant: somebody buys the same again. So it is counted and told, and refuses nobody.

use std::fmt;
use std::hash::Hasher as _;

use siphasher::sip::SipHasher13;

use crate::key::Fingerprint;
use crate::sync::{Ordering, UnmodelledAtomicU64};

/// For how long a request is watched, in milliseconds of store time; counted in whole seconds.
pub(crate) const WATCHED_MS: u64 = 60_000;

/// One fingerprint in this many is watched. A power of two.
pub(crate) const SAMPLE_ONE_IN: u64 = 8;

/// How many requests are watched at a time. A power of two.
const ENTRIES: usize = 1 << 10;

/// The requests that are watched at the moment.
pub(crate) struct FreshKeys {
    /// A request's tag (32 bits), its key's (16 bits, the lowest of them set), and the second in which it came, modulo
    /// 2^16. Zero: not in use.
    entries: Box<[UnmodelledAtomicU64; ENTRIES]>,
}

impl FreshKeys {
    pub(crate) fn new() -> Self {
        Self { entries: Box::new([const { UnmodelledAtomicU64::new(0) }; ENTRIES]) }
    }

    /// Notes a request that came under a key nobody had used; `key_hash` is the index's hash of the key. True: the same
    /// request came under another key less than [`WATCHED_MS`] ago.
    ///
    /// Never waits. Two that come within the same few nanoseconds may miss each other.
    #[inline]
    pub(crate) fn note(&self, scope: &[u8], fingerprint: &Fingerprint, key_hash: u64, now_ms: u64) -> bool {
        is_sampled(fingerprint) && self.note_sampled(scope, fingerprint, key_hash, now_ms)
    }

    fn note_sampled(&self, scope: &[u8], fingerprint: &Fingerprint, key_hash: u64, now_ms: u64) -> bool {
        let request = hash(scope, fingerprint);
        let Some(entry) = usize::try_from(request).ok().and_then(|hash| self.entries.get(hash % ENTRIES)) else {
            return false;
        };
        let this = Watched { request: request & !LOW_HALF, key: ((key_hash >> 48) | 1) << 16, second: now_ms / 1000 };
        let found = entry.load(Ordering::Relaxed);
        if this.is_watched_at(found) {
            return this.is_retry_of(found);
        }
        entry.store(this.word(), Ordering::Relaxed);
        false
    }
}

impl fmt::Debug for FreshKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FreshKeys").finish_non_exhaustive()
    }
}

const LOW_HALF: u64 = 0xffff_ffff;
const KEY_BITS: u64 = 0xffff_0000;
const SECOND_BITS: u64 = 0xffff;

/// What a word of the table says, each part in its place.
struct Watched {
    request: u64,
    key: u64,
    second: u64,
}

impl Watched {
    fn word(&self) -> u64 {
        self.request | self.key | (self.second & SECOND_BITS)
    }

    /// Whether `word` is in use at this second.
    fn is_watched_at(&self, word: u64) -> bool {
        // A caller may have read the clock just before another whose word it finds, hence the second more. Seconds wrap
        // after eighteen hours: a word that nobody touched for so long counts as in use for another minute.
        word != 0 && self.second.wrapping_sub(word).wrapping_add(1) & SECOND_BITS <= WATCHED_MS / 1000
    }

    fn is_retry_of(&self, word: u64) -> bool {
        word & !LOW_HALF == self.request && word & KEY_BITS != self.key
    }
}

/// The request as the table knows it. The key of the hash is fixed: who makes requests collide spoils a diagnosis of
/// its own doing.
fn hash(scope: &[u8], fingerprint: &Fingerprint) -> u64 {
    let mut hasher = SipHasher13::new();
    hasher.write(scope);
    hasher.write(&fingerprint.to_bytes());
    hasher.finish()
}

/// A fingerprint may have been made by a recipe of the caller's own, such as a counter: so every bit of it counts,
/// whichever half it stands in, and also when both halves are equal.
#[inline]
fn is_sampled(fingerprint: &Fingerprint) -> bool {
    const { assert!(SAMPLE_ONE_IN.is_power_of_two() && SAMPLE_ONE_IN > 1) };
    let [low, high] = halves(fingerprint.to_bytes());
    let folded = high ^ low.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    folded.wrapping_mul(0xd6e8_feb8_6659_fd93) >> (64 - SAMPLE_ONE_IN.ilog2()) == 0
}

#[inline]
fn halves(bytes: [u8; 16]) -> [u64; 2] {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = bytes;
    [u64::from_le_bytes([a, b, c, d, e, f, g, h]), u64::from_le_bytes([i, j, k, l, m, n, o, p])]
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use crate::entropy::Entropy;

    use super::*;

    const T0: u64 = 1_800_000_000_000;
    const SCOPE: &[u8] = b"charges";

    /// The first fingerprints that are watched.
    fn sampled() -> impl Iterator<Item = Fingerprint> {
        (0_u32..).map(|n| Fingerprint::of(n.to_le_bytes())).filter(is_sampled)
    }

    fn one() -> Fingerprint {
        sampled().next().unwrap()
    }

    /// Hashes of keys, as the index makes them.
    fn key(n: u64) -> u64 {
        crate::key::Key::new(SCOPE, n.to_le_bytes()).unwrap().hash(&crate::key::HashSeed([7; 16]))
    }

    /// The same for each seed; `KEYONCE_FRESH_KEYS_SEED` chooses another.
    fn random() -> Entropy {
        let seed = std::env::var("KEYONCE_FRESH_KEYS_SEED").ok().map_or(1, |seed| seed.parse().unwrap());
        println!("KEYONCE_FRESH_KEYS_SEED={seed}");
        Entropy::seeded(seed)
    }

    #[test]
    fn the_same_request_under_another_key_is_found_at_each_try() {
        let watch = FreshKeys::new();
        assert!(!watch.note(SCOPE, &one(), key(0), T0));
        for n in 1..50 {
            assert!(watch.note(SCOPE, &one(), key(n), T0 + n * 1000), "try {n}");
        }
    }

    #[test]
    fn the_same_key_again_is_no_fresh_key() {
        let watch = FreshKeys::new();
        for second in 0..200 {
            assert!(!watch.note(SCOPE, &one(), key(0), T0 + second * 1000), "second {second}");
        }
    }

    #[test]
    fn another_scope_or_another_request_is_another_matter() {
        let watch = FreshKeys::new();
        let other = sampled().nth(1).unwrap();
        assert!(!watch.note(SCOPE, &one(), key(0), T0));
        assert!(!watch.note(b"refunds", &one(), key(1), T0));
        assert!(!watch.note(SCOPE, &other, key(2), T0));
    }

    #[test]
    fn a_request_is_watched_for_a_minute_and_no_longer() {
        for begun_ms in [0, 1, 999, 500_000] {
            for (after_ms, found) in [(0, true), (1, true), (59_000, true), (60_000, false), (61_000, false)] {
                let watch = FreshKeys::new();
                assert!(!watch.note(SCOPE, &one(), key(0), T0 + begun_ms));
                let now_ms = T0 + begun_ms + after_ms;
                assert_eq!(watch.note(SCOPE, &one(), key(1), now_ms), found, "{after_ms} ms after {begun_ms}");
            }
        }
    }

    #[test]
    fn the_minute_counts_from_the_first_key_and_the_next_one_begins_another() {
        let watch = FreshKeys::new();
        let found: Vec<_> = [0, 30, 59, 60, 90, 119, 120]
            .map(|second| watch.note(SCOPE, &one(), key(second), T0 + second * 1000))
            .into();
        assert_eq!(found, [false, true, true, false, true, true, false]);
    }

    #[test]
    fn a_clock_read_just_before_another_callers_is_no_obstacle() {
        let watch = FreshKeys::new();
        assert!(!watch.note(SCOPE, &one(), key(0), T0 + 1000));
        assert!(watch.note(SCOPE, &one(), key(1), T0 + 999));
    }

    #[test]
    fn about_one_fingerprint_in_eight_is_watched_whatever_recipe_made_it() {
        type Recipe = fn(u64) -> [u8; 16];
        let recipes: [(&str, Recipe); 7] = [
            ("digest", |n| Fingerprint::of(n.to_le_bytes()).to_bytes()),
            ("counter, little-endian", |n| u128::from(n).to_le_bytes()),
            ("counter, big-endian", |n| u128::from(n).to_be_bytes()),
            ("a counter twice", |n| (u128::from(n) << 64 | u128::from(n)).to_le_bytes()),
            ("a counter in steps of 4096", |n| u128::from(n << 12).to_le_bytes()),
            ("a counter above", |n| (u128::from(n) << 64).to_le_bytes()),
            ("a counter at the top", |n| (u128::from(n) << 104).to_le_bytes()),
        ];
        for (name, recipe) in recipes {
            let count = (0..16_000).filter(|n| is_sampled(&Fingerprint::from_bytes(recipe(*n)))).count();
            println!("{name}: {count} of 16000");
            assert!((1_000..4_000).contains(&count), "{name}: {count} of 16000");
        }
    }

    #[test]
    fn in_a_busy_store_some_retries_are_still_found_after_half_a_minute() {
        const SECONDS: usize = 240;
        const RETRIED_A_SECOND: usize = 20;
        let (watch, random) = (FreshKeys::new(), random());
        let retried: Vec<_> = sampled().take(RETRIED_A_SECOND * SECONDS).collect();
        let mut of_second = retried.chunks(RETRIED_A_SECOND);
        let mut pending = std::collections::VecDeque::new();
        let (mut tried, mut found) = (0, 0);
        for second in 0..SECONDS {
            let now_ms = T0 + second as u64 * 1000;
            for _ in 0..2000 {
                let fingerprint = Fingerprint::from_bytes(random.bytes().unwrap());
                watch.note(SCOPE, &fingerprint, random.number().unwrap(), now_ms);
            }
            let requests = of_second.next().unwrap();
            for request in requests {
                assert!(!watch.note(SCOPE, request, key(0), now_ms));
            }
            pending.push_back(requests);
            if pending.len() > 30 {
                for request in pending.pop_front().unwrap() {
                    tried += 1;
                    found += u32::from(watch.note(SCOPE, request, key(1), now_ms));
                }
            }
        }
        println!("{found} of {tried} watched retries found beside 2000 requests a second");
        // Of about 270 a second, the 1024 words hold 17 a second for a minute each: one in sixteen.
        assert!((tried / 32..tried / 8).contains(&found), "{found} of {tried}");
    }

    #[test]
    fn memory_is_bounded_and_random_requests_are_not_taken_for_retries() {
        const NOTES: u64 = 1_000_000;
        let (watch, random) = (FreshKeys::new(), random());
        assert_eq!(size_of_val(&*watch.entries), 8 * 1024);
        let mut wrong = 0;
        for n in 0..NOTES {
            let fingerprint = Fingerprint::from_bytes(random.bytes().unwrap());
            wrong += u32::from(watch.note(SCOPE, &fingerprint, random.number().unwrap(), T0 + n / 100));
        }
        println!("{wrong} of {NOTES} random requests were taken for retries");
        assert!(wrong <= 1, "{wrong} of {NOTES}");
    }
}
