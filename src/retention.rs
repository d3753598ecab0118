//! How long keys are remembered, and how many that makes.
//!
//! Capacity is derived: whoever says for how long and how fast has said how many, and how large a segment should be.

use std::time::Duration;

use crate::clock::ms_rounded_up;
use crate::error::Error;
use crate::key::{ID_BYTES_MAX, SCOPE_BYTES_MAX};

/// The longest duration that an option may name: 100 years of 365 days, in milliseconds.
pub(crate) const DURATION_MS_MAX: u64 = 100 * 365 * 24 * 60 * 60 * 1000;

/// The largest checkpoint.
pub(crate) const CHECKPOINT_BYTES_MAX: usize = 64 << 10;

/// Segment sizes are multiples of this, and it is the smallest that a small enough record would allow.
pub(crate) const SEGMENT_BYTES_STEP: u64 = 64 << 10;

/// The largest segment: an index slot addresses no more.
pub(crate) const SEGMENT_BYTES_MAX: u64 = 64 << 20;

/// Segments in a window, so that retiring one gives back a small part of the whole.
const SEGMENTS_PER_WINDOW: u64 = 64;

/// The fixed part of a record that gives a key a state.
const STATE_RECORD_HEAD_BYTES: usize = 76;

/// Scope and id of the reference work (8 and 36 bytes), which planning takes for the usual key.
const KEY_BYTES_PLANNED: usize = 44;

/// The most keys that a plan may hold.
pub(crate) const KEYS_PLANNED_MAX: u64 = 1 << 40;

/// The highest rate of new keys that may be planned for.
const KEYS_PER_SECOND_MAX: f64 = 1e9;

/// The largest margin.
const MARGIN_MAX: f64 = 1000.0;

/// A day, the window unless another is named.
const WINDOW: Duration = Duration::from_secs(24 * 60 * 60);

/// New keys a second, unless another rate is named.
const KEYS_PER_SECOND: f64 = 200.0;

/// How long keys are remembered, and how fast new ones come.
///
/// From the two follows how many keys the store must hold, and so the size of its index and its segments.
///
/// | part | default | range | unit |
/// |---|---|---|---|
/// | window | 24 hours | above 0, to 100 years (of 365 days); rounded up to whole milliseconds | duration |
/// | rate | 200 | above 0, to 1 000 000 000 | new keys a second, averaged over the window |
/// | margin | 1.0 | 1.0 to 1000.0 | factor on the number of keys |
///
/// A value out of its range is refused when the store is opened, by name. So is a plan of more than 2^40 keys.
///
/// ```
/// use std::time::Duration;
/// use keyonce::Retention;
///
/// assert_eq!(Retention::new(Duration::from_secs(30), 200.0).keys(), 6_000);
/// assert_eq!(Retention::default().keys(), 17_280_000);
/// assert_eq!(Retention::default().margin(1.5).keys(), 25_920_000);
/// ```
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Retention {
    window: Duration,
    keys_per_second: f64,
    margin: f64,
}

impl Retention {
    /// Remembers keys for `window`, at an average of `keys_per_second` new keys.
    ///
    /// The window runs from completion. Choose it longer than the longest time over which a client may retry: after it,
    /// a retry is a new key. A key that is unfinished is kept for two windows beyond its lease, and as long as a guard
    /// of it lives.
    ///
    /// Both are a plan, not a limit: segments are sized by it, and a store that outgrows it goes on.
    pub fn new(window: Duration, keys_per_second: f64) -> Self {
        Self { window, keys_per_second, margin: 1.0 }
    }

    /// Plans for `margin` times as many keys, for rates whose average over a window varies. Default 1.0, range 1.0 to
    /// 1000.0.
    #[must_use]
    pub fn margin(self, margin: f64) -> Self {
        Self { margin, ..self }
    }

    /// How long a key is remembered.
    pub fn window(&self) -> Duration {
        self.window
    }

    /// The number of keys in a window: window x rate x margin, rounded up, and at least 1.
    ///
    /// Parts that are no number or negative count as one key here; opening a store refuses them.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the value is whole, and the cast saturates at both ends"
    )]
    pub fn keys(&self) -> u64 {
        // A few units in the last place of a float are noise of the multiplication and never one more key.
        let keys = self.window.as_secs_f64() * self.keys_per_second * self.margin;
        ((keys * (1.0 - 1e-12)).ceil() as u64).max(1)
    }

    /// The window in milliseconds, if every part is within its range.
    pub(crate) fn checked_window_ms(&self) -> Result<u64, Error> {
        let window_ms = checked_ms("retention", self.window)?;
        if !(self.keys_per_second > 0.0 && self.keys_per_second <= KEYS_PER_SECOND_MAX) {
            let problem = format!("needs a rate above 0 and up to {KEYS_PER_SECOND_MAX} keys a second");
            return Err(Error::invalid_option("retention", problem));
        }
        if !(1.0..=MARGIN_MAX).contains(&self.margin) {
            return Err(Error::invalid_option("retention", format!("needs a margin of 1 to {MARGIN_MAX}")));
        }
        if self.keys() > KEYS_PLANNED_MAX {
            let problem = format!("plans for {} keys, more than {KEYS_PLANNED_MAX}", self.keys());
            return Err(Error::invalid_option("retention", problem));
        }
        Ok(window_ms)
    }
}

/// A window of 24 hours at 200 keys a second, margin 1.0.
impl Default for Retention {
    fn default() -> Self {
        Self::new(WINDOW, KEYS_PER_SECOND)
    }
}

/// The milliseconds of an option that must be above zero and at most 100 years, rounded up.
pub(crate) fn checked_ms(option: &str, duration: Duration) -> Result<u64, Error> {
    match ms_rounded_up(duration) {
        0 => Err(Error::invalid_option(option, "must be longer than zero")),
        ms if ms > DURATION_MS_MAX => Err(Error::invalid_option(option, "must not be longer than 100 years")),
        ms => Ok(ms),
    }
}

/// The bytes of a record that gives a key a state.
pub(crate) const fn state_record_bytes(key_bytes: usize, payload_bytes: usize) -> u64 {
    (STATE_RECORD_HEAD_BYTES + key_bytes + payload_bytes).next_multiple_of(8) as u64
}

/// The smallest segment that holds two of the largest records.
pub(crate) fn segment_bytes_min(response_bytes_max: usize) -> u64 {
    let payload_bytes_max = response_bytes_max.max(CHECKPOINT_BYTES_MAX);
    let record_bytes_max = state_record_bytes(SCOPE_BYTES_MAX + ID_BYTES_MAX, payload_bytes_max);
    (2 * record_bytes_max).next_multiple_of(SEGMENT_BYTES_STEP)
}

/// The bytes of Reserved and Done of one key, as planned.
pub(crate) fn pair_bytes(response_bytes: usize) -> u64 {
    state_record_bytes(KEY_BYTES_PLANNED, 0) + state_record_bytes(KEY_BYTES_PLANNED, response_bytes)
}

/// The segment size that cuts a window of `keys` pairs of Reserved and Done into [`SEGMENTS_PER_WINDOW`] or more.
pub(crate) fn planned_segment_bytes(keys: u64, response_bytes: usize) -> u64 {
    let share_bytes = keys.saturating_mul(pair_bytes(response_bytes)) / SEGMENTS_PER_WINDOW;
    share_bytes.clamp(SEGMENT_BYTES_STEP, SEGMENT_BYTES_MAX).next_power_of_two()
}

/// Refuses a given segment size that is out of its range.
pub(crate) fn checked_segment_bytes(bytes: u64, bytes_min: u64) -> Result<(), Error> {
    let problem = if bytes < bytes_min {
        format!("is {bytes}, less than the {bytes_min} bytes that hold two of the largest records")
    } else if bytes > SEGMENT_BYTES_MAX {
        format!("is {bytes}, more than {SEGMENT_BYTES_MAX} bytes")
    } else if !bytes.is_multiple_of(SEGMENT_BYTES_STEP) {
        format!("is {bytes}, not a multiple of {SEGMENT_BYTES_STEP} bytes")
    } else {
        return Ok(());
    };
    Err(Error::invalid_option("segment_bytes", problem))
}

#[cfg(test)]
mod tests {
    use crate::error::ErrorKind;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn refused(retention: Retention) -> bool {
        match retention.checked_window_ms() {
            Ok(_) => false,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::InvalidOptions);
                assert!(error.to_string().contains("`retention`"), "{error}");
                true
            }
        }
    }

    #[test]
    fn keys_are_window_times_rate_times_margin_rounded_up() {
        let cases = [
            (Duration::from_secs(30), 200.0, 1.0, 6_000),
            (WINDOW, 200.0, 1.0, 17_280_000),
            (WINDOW, 200.0, 1.25, 21_600_000),
            (Duration::from_secs(30), 200.0, 1.1, 6_600),
            (Duration::from_millis(300), 10.0, 1.0, 3),
            (Duration::from_millis(301), 10.0, 1.0, 4),
            (SECOND, 0.001, 1.0, 1),
            (Duration::ZERO, 200.0, 1.0, 1),
            (SECOND, f64::NAN, 1.0, 1),
            (SECOND, -5.0, 1.0, 1),
            (SECOND, f64::INFINITY, 1.0, u64::MAX),
        ];
        for (window, rate, margin, keys) in cases {
            assert_eq!(Retention::new(window, rate).margin(margin).keys(), keys, "{window:?} {rate} {margin}");
        }
    }

    #[test]
    fn the_default_is_a_day_at_200_a_second() {
        assert_eq!(Retention::default(), Retention::new(Duration::from_secs(86_400), 200.0));
        assert_eq!(Retention::default().window(), WINDOW);
        assert_eq!(Retention::default().checked_window_ms().unwrap(), 86_400_000);
    }

    #[test]
    fn the_window_is_checked_at_its_limits() {
        let longest = Duration::from_millis(DURATION_MS_MAX);
        let rare = |window| Retention::new(window, 0.001);
        assert!(refused(rare(Duration::ZERO)));
        assert_eq!(rare(Duration::from_nanos(1)).checked_window_ms().unwrap(), 1);
        assert_eq!(rare(Duration::from_nanos(1_000_001)).checked_window_ms().unwrap(), 2);
        assert!(!refused(rare(longest - Duration::from_nanos(1))));
        assert!(!refused(rare(longest)));
        assert!(refused(rare(longest + Duration::from_nanos(1))));
        assert!(refused(rare(Duration::MAX)));
    }

    #[test]
    fn rate_margin_and_number_are_checked_at_their_limits() {
        let rate = |rate| refused(Retention::new(SECOND, rate));
        assert!(rate(0.0) && rate(-1.0) && rate(f64::NAN) && rate(f64::INFINITY));
        assert!(rate(KEYS_PER_SECOND_MAX.next_up()) && !rate(KEYS_PER_SECOND_MAX) && !rate(f64::MIN_POSITIVE));
        let margin = |margin| refused(Retention::default().margin(margin));
        assert!(margin(1.0_f64.next_down()) && !margin(1.0) && !margin(1.0_f64.next_up()));
        assert!(!margin(MARGIN_MAX) && margin(MARGIN_MAX.next_up()) && margin(f64::NAN));
        let keys = |keys: u32| refused(Retention::new(Duration::from_secs(1 << 20), f64::from(keys)));
        assert!(!keys((1 << 20) - 1) && !keys(1 << 20) && keys((1 << 20) + 1));
    }

    #[test]
    fn the_reference_pair_is_as_large_as_the_format_says() {
        assert_eq!(state_record_bytes(KEY_BYTES_PLANNED, 0), 120);
        assert_eq!(state_record_bytes(KEY_BYTES_PLANNED, 200), 320);
    }
}
