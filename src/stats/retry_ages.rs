//! How old keys are when their duplicates come: the measured retry window.
//!
//! Buckets are log-linear: each power of two of milliseconds is cut into [`SUB_BUCKETS`] of one width, so that a bucket
//! is never wider than an eighth of the ages in it, at a millisecond as at a century. Ages below eight milliseconds are
//! exact. The memory is fixed, and taken when the first duplicate comes.

use std::fmt;
use std::time::Duration;

/// Buckets in each power of two.
const SUB_BUCKETS: usize = 1 << SUB_BITS;
const SUB_BITS: u32 = 3;

/// The power of two, in milliseconds, whose buckets are the last: 2^42 ms is more than 100 years.
const POWER_LAST: u32 = 41;

const BUCKETS: usize = SUB_BUCKETS * (POWER_LAST - SUB_BITS + 2) as usize;

/// How old keys were when a caller asked for them again: the retry window as it was measured.
///
/// Every `reserve` that finds its key known, with the same fingerprint, is such a duplicate. Its age is the store time
/// since the key was first reserved. A retention that is not well above the oldest retries forgets keys that are still
/// retried; compare it with `quantile(0.999)`.
///
/// A retry that comes after its key was forgotten cannot be told from a new key and is not counted, so the ages end at
/// the retention even where the retries do not. Many ages close to it are the sign.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let dir = dir.path().join("keys");
/// use keyonce::{Options, Store};
///
/// let store = Store::open(&dir, Options::default())?;
/// let ages = store.stats().retry_ages;
/// assert_eq!(ages.count(), 0);
/// assert_eq!(ages.quantile(0.999), None);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RetryAges {
    noted: Option<Box<Noted>>,
}

#[derive(Clone, PartialEq, Eq)]
struct Noted {
    oldest_ms: u64,
    counts: [u64; BUCKETS],
}

impl RetryAges {
    /// How many duplicates came.
    pub fn count(&self) -> u64 {
        self.counts().iter().sum()
    }

    /// The age that this part of the duplicates did not exceed: `0.5` for the median, `1.0` for the oldest. `None` when
    /// there was no duplicate, or `part` is not a number; below 0 counts as 0, above 1 as 1.
    ///
    /// It is the upper end of the bucket in which the age lies, or the largest age of all if that is less: never less
    /// than the true one, and never an eighth or more above it. Below 8 ms it is exact to the millisecond. Ages beyond
    /// 139 years all count as in the last bucket.
    pub fn quantile(&self, part: f64) -> Option<Duration> {
        let noted = self.noted.as_ref().filter(|_| !part.is_nan())?;
        let wanted = part.clamp(0.0, 1.0) * self.count() as f64;
        let mut seen = 0;
        let bucket = noted.counts.iter().position(|count| {
            seen += count;
            seen > 0 && seen as f64 >= wanted
        });
        let last_ms = bucket.map_or(noted.oldest_ms, last_ms_of).min(noted.oldest_ms);
        Some(Duration::from_millis(last_ms))
    }

    /// The buckets that are not empty, youngest first: the largest age that belongs into one, and how many duplicates
    /// were of an age in it.
    pub fn buckets(&self) -> impl Iterator<Item = (Duration, u64)> + '_ {
        let buckets = self.counts().iter().enumerate();
        buckets.filter(|(_, count)| **count > 0).map(|(bucket, count)| {
            let last_ms = last_ms_of(bucket);
            (Duration::from_millis(last_ms), *count)
        })
    }

    /// Counts a duplicate of a key that was first reserved so long ago.
    pub(crate) fn note(&mut self, age_ms: u64) {
        let noted = self.noted.get_or_insert_with(Noted::none);
        noted.oldest_ms = noted.oldest_ms.max(age_ms);
        if let Some(count) = noted.counts.get_mut(bucket_of(age_ms)) {
            *count += 1;
        }
    }

    /// Adds what another part of the store has counted.
    pub(crate) fn add(&mut self, other: &Self) {
        let Some(other) = &other.noted else { return };
        let noted = self.noted.get_or_insert_with(Noted::none);
        noted.oldest_ms = noted.oldest_ms.max(other.oldest_ms);
        for (count, more) in noted.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
    }

    fn counts(&self) -> &[u64] {
        self.noted.as_ref().map_or(&[], |noted| &noted.counts)
    }
}

impl fmt::Debug for RetryAges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("RetryAges");
        shown.field("count", &self.count());
        if let (Some(median), Some(late), Some(oldest)) = (self.quantile(0.5), self.quantile(0.999), self.quantile(1.0))
        {
            shown.field("p50", &median).field("p99.9", &late).field("oldest", &oldest);
        }
        shown.finish()
    }
}

impl Noted {
    fn none() -> Box<Self> {
        Box::new(Self { oldest_ms: 0, counts: [0; BUCKETS] })
    }
}

/// The bucket of an age: below [`SUB_BUCKETS`] one for each millisecond, then by the age's power of two and its next
/// [`SUB_BITS`] bits.
fn bucket_of(age_ms: u64) -> usize {
    let power = (age_ms | 1).ilog2();
    if power > POWER_LAST {
        return BUCKETS - 1;
    }
    let shift = power.saturating_sub(SUB_BITS);
    let leading = usize::try_from(age_ms >> shift).expect("fewer than two times SUB_BUCKETS");
    // The bit of the power is among the leading ones, which makes up for the power that is not counted.
    shift as usize * SUB_BUCKETS + leading
}

/// The largest age that belongs into a bucket.
fn last_ms_of(bucket: usize) -> u64 {
    let shift = (bucket / SUB_BUCKETS).saturating_sub(1);
    let leading = bucket - shift * SUB_BUCKETS;
    ((leading as u64 + 1) << shift) - 1
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const YEAR_MS: u64 = 365 * 24 * 60 * 60 * 1000;

    fn ages_of(ages_ms: &[u64]) -> RetryAges {
        let mut ages = RetryAges::default();
        ages_ms.iter().for_each(|age_ms| ages.note(*age_ms));
        ages
    }

    /// Ages of every size, as often of a millisecond as of a century.
    fn any_age() -> impl Strategy<Value = u64> {
        (0..=42_u32, any::<u64>()).prop_map(|(bits, random)| random & ((1 << bits) - 1))
    }

    #[test]
    fn every_age_has_one_bucket_and_the_buckets_leave_no_gap() {
        let mut next_ms = 0;
        for bucket in 0..BUCKETS {
            assert_eq!(bucket_of(next_ms), bucket, "{next_ms} ms is the first of its bucket");
            let last_ms = last_ms_of(bucket);
            assert_eq!(bucket_of(last_ms), bucket, "{last_ms} ms is the last of its bucket");
            assert!(last_ms < SUB_BUCKETS as u64 || (last_ms - next_ms) < next_ms.div_ceil(8), "{next_ms}..={last_ms}");
            next_ms = last_ms + 1;
        }
        assert!(next_ms > 139 * YEAR_MS, "the last bucket ends at {next_ms} ms");
        for beyond in [next_ms, next_ms * 2, u64::MAX] {
            assert_eq!(bucket_of(beyond), BUCKETS - 1);
        }
    }

    #[test]
    fn nothing_is_allocated_before_the_first_duplicate_and_little_afterwards() {
        assert_eq!(size_of::<RetryAges>(), 8);
        assert!(RetryAges::default().noted.is_none());
        assert!(size_of::<Noted>() <= 2600, "{} bytes", size_of::<Noted>());
    }

    #[test]
    fn without_a_duplicate_there_is_no_quantile_and_no_bucket() {
        let mut none = RetryAges::default();
        none.add(&RetryAges::default());
        assert_eq!((none.count(), none.quantile(0.5), none.buckets().count()), (0, None, 0));
        assert_eq!(format!("{none:?}"), "RetryAges { count: 0 }");
    }

    #[test]
    fn a_quantile_out_of_range_is_the_nearest_one_in_range() {
        let ages = ages_of(&[3, 1000]);
        assert_eq!(ages.quantile(-1.0), Some(Duration::from_millis(3)));
        assert_eq!(ages.quantile(0.0), Some(Duration::from_millis(3)));
        assert_eq!(ages.quantile(7.0), Some(Duration::from_millis(1000)));
        assert_eq!(ages.quantile(f64::INFINITY), Some(Duration::from_millis(1000)));
        assert_eq!(ages.quantile(f64::NAN), None);
    }

    #[test]
    fn no_quantile_is_beyond_the_oldest_age() {
        for age_ms in [0, 1, 7, 8, 9, 1025, 86_399_999, YEAR_MS * 100, YEAR_MS * 1000, u64::MAX] {
            let ages = ages_of(&[age_ms]);
            let told = ages.quantile(0.999).unwrap();
            assert!(told <= Duration::from_millis(age_ms), "{told:?} for {age_ms} ms");
            assert_eq!(ages.count(), 1);
        }
    }

    #[test]
    fn debug_is_one_short_line() {
        let text = format!("{:?}", ages_of(&[5, 5, 2000]));
        assert_eq!(text, "RetryAges { count: 3, p50: 5ms, p99.9: 2s, oldest: 2s }");
    }

    proptest! {
        #[test]
        fn quantiles_are_those_of_the_sorted_ages_up_to_an_eighth(
            ages_ms in prop::collection::vec(any_age(), 1..400),
            part in 0.0..=1.0_f64,
        ) {
            let ages = ages_of(&ages_ms);
            let mut sorted = ages_ms.clone();
            sorted.sort_unstable();
            for part in [part, 0.0, 0.5, 0.99, 0.999, 1.0] {
                // The nearest rank: the first age that at least this part does not exceed.
                let rank = (1..=sorted.len()).find(|rank| *rank as f64 >= part * sorted.len() as f64).unwrap();
                let true_ms = sorted[rank - 1];
                let told_ms = u64::try_from(ages.quantile(part).unwrap().as_millis()).unwrap();
                prop_assert!(told_ms >= true_ms, "{} ms told, {} ms true", told_ms, true_ms);
                prop_assert!(told_ms - true_ms < true_ms.div_ceil(8).max(1), "{} told, {} true", told_ms, true_ms);
            }
            prop_assert_eq!(ages.count(), ages_ms.len() as u64);
        }

        #[test]
        fn buckets_count_every_age_once_in_order(ages_ms in prop::collection::vec(any_age(), 0..200)) {
            let ages = ages_of(&ages_ms);
            let (mut after, mut counted) = (None, 0);
            for (last, count) in ages.buckets() {
                let ms = |age_ms: &&u64| Duration::from_millis(**age_ms);
                let within = ages_ms.iter().filter(|age| ms(age) <= last && after.is_none_or(|after| ms(age) > after));
                prop_assert_eq!(within.count() as u64, count);
                prop_assert!(count > 0);
                (after, counted) = (Some(last), counted + count);
            }
            prop_assert_eq!(counted, ages.count());
        }

        #[test]
        fn parts_add_up_to_the_whole(
            parts in prop::collection::vec(prop::collection::vec(any_age(), 0..50), 0..6),
        ) {
            let mut sum = RetryAges::default();
            parts.iter().for_each(|part| sum.add(&ages_of(part)));
            prop_assert_eq!(sum, ages_of(&parts.concat()));
        }
    }
}
