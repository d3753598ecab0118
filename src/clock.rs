//! Time: the clocks of the machine, and the store's own time made from them.
//!
//! *Store time* is milliseconds since the Unix epoch that never run backwards. Within one boot it follows the boot
//! clock, which nobody can set and which counts suspend. Across boots only the wall clock is left, which anybody can
//! set: it is followed up to a bound, and a larger jump is held, so that a wrong clock does not make the store forget
//! live keys.
//!
//! Nothing else in the crate reads a clock.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::sync::{AtomicU64, Mutex, Ordering};

/// The boot id that says "cannot be told".
const BOOT_ID_UNKNOWN: [u8; 16] = [0; 16];

/// The largest jump that may be followed because one like it was held before: 365 days in milliseconds. Beyond it a
/// clock is wrong rather than the machine long off.
const REPEATED_JUMP_MS_MAX: u64 = 365 * 24 * 60 * 60 * 1000;

/// Where a store takes its time from.
///
/// A service uses [`SystemClock`], the default. Tests use a clock that they move by hand, so that leases lapse and keys
/// expire without sleeping.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// Milliseconds since the Unix epoch by the wall clock. It may jump either way.
    fn wall_ms(&self) -> u64;

    /// Milliseconds since the machine started; time in suspend counts. It never goes back within one boot.
    fn boot_ms(&self) -> u64;

    /// Names this boot of the machine. Zeros: it cannot be told, so that every opening counts as another boot.
    fn boot_id(&self) -> [u8; 16];

    /// How long a thread may sleep until `ms` more have passed. `None`: until it is woken, for a clock moved by hand.
    fn sleep(&self, ms: u64) -> Option<Duration>;

    /// Asks the clock to call `wake` whenever it was moved by hand. A real clock never does.
    fn on_move(&self, wake: Weak<dyn Fn() + Send + Sync>);
}

/// The clocks of the operating system.
///
/// On Linux the boot time is `CLOCK_BOOTTIME` (clock_gettime(2)) and the boot id is that of `random(4)` in `/proc`,
/// read once. Where it cannot be read, every opening of a store counts as one after another boot.
#[derive(Clone, Debug)]
pub struct SystemClock {
    boot_id: [u8; 16],
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    started: std::time::Instant,
}

impl SystemClock {
    /// The clocks of this machine.
    pub fn new() -> Self {
        Self {
            boot_id: system_boot_id(),
            #[cfg(not(any(target_os = "linux", target_os = "android")))]
            started: instant_now(),
        }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the wall clock")]
    fn wall_ms(&self) -> u64 {
        unix_ms(SystemTime::now())
    }

    #[cfg(any(target_os = "linux", target_os = "android"))]
    fn boot_ms(&self) -> u64 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        let ms = u64::try_from(now.tv_nsec / 1_000_000).unwrap_or(0);
        seconds.saturating_mul(1000).saturating_add(ms)
    }

    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    fn boot_ms(&self) -> u64 {
        whole_ms(self.started.elapsed())
    }

    fn boot_id(&self) -> [u8; 16] {
        self.boot_id
    }

    fn sleep(&self, ms: u64) -> Option<Duration> {
        Some(Duration::from_millis(ms))
    }

    fn on_move(&self, _wake: Weak<dyn Fn() + Send + Sync>) {}
}

/// One reading of all clocks at once, as segment headers keep it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TimeMark {
    /// Store time.
    pub(crate) store_ms: u64,
    /// Time since boot.
    pub(crate) boot_ms: u64,
    /// The wall clock.
    pub(crate) wall_ms: u64,
    /// The boot that `boot_ms` counts from.
    pub(crate) boot_id: [u8; 16],
}

/// A jump of the wall clock that store time did not follow, to be reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct HeldJump {
    /// What the wall clock should have said by what was known of it.
    pub(crate) expected_wall_ms: u64,
    /// What it said.
    pub(crate) wall_ms: u64,
    /// Store time, which went on from its floor.
    pub(crate) store_ms: u64,
}

/// The time of one open store.
#[derive(Debug)]
pub(crate) struct StoreTime {
    clock: Arc<dyn Clock>,
    /// Store time, boot time and wall time at the start; what follows is measured from here.
    start: TimeMark,
    jump_max_ms: u64,
    /// The largest time told so far. It orders nothing but itself.
    told_ms: AtomicU64,
    /// What is known of the wall clock since it last jumped. Nothing else is locked beneath it.
    since_jump: Mutex<SinceJump>,
}

/// The wall clock and the boot clock when the wall clock was last found to have jumped, or at the start.
#[derive(Debug)]
struct SinceJump {
    wall_ms: u64,
    boot_ms: u64,
    /// What its client issued at or before this wall time came before the jump; 0 if none is known.
    issued_before_ms: u64,
}

impl StoreTime {
    /// Starts the time of a store whose newest header says `newest`, or of a new store.
    ///
    /// Within the boot of the mark, time goes on by the boot clock. After another boot it follows the wall clock,
    /// measured against the mark's own reading of it, if that moved by `jump_max_ms` or less. A larger jump is held:
    /// time goes on from the mark. A jump is held once: what was held shows as the wall clock lying ahead of store time
    /// in later marks, and a jump no larger than that (and than [`REPEATED_JUMP_MS_MAX`]) is followed. So a store that
    /// is opened once in ten days still forgets, while a clock that went ten years wrong frees nothing.
    pub(crate) fn start(
        clock: Arc<dyn Clock>,
        newest: Option<&TimeMark>,
        jump_max_ms: u64,
    ) -> (Self, Option<HeldJump>) {
        let (boot_ms, wall_ms, boot_id) = (clock.boot_ms(), clock.wall_ms(), clock.boot_id());
        let mut jumped = false;
        let (store_ms, expected_wall_ms) = match newest {
            None => (wall_ms, wall_ms),
            Some(mark) if same_boot(mark, boot_ms, boot_id) => {
                let passed_ms = boot_ms - mark.boot_ms;
                (mark.store_ms.saturating_add(passed_ms), mark.wall_ms.saturating_add(passed_ms))
            }
            Some(mark) => {
                let passed_ms = wall_ms.saturating_sub(mark.wall_ms);
                let held_before_ms = mark.wall_ms.saturating_sub(mark.store_ms).min(REPEATED_JUMP_MS_MAX);
                jumped = passed_ms > jump_max_ms;
                if passed_ms <= jump_max_ms.max(held_before_ms) {
                    // A step back is no passing of time. A small one is followed by standing still, a large one is
                    // told.
                    (mark.store_ms.saturating_add(passed_ms), mark.wall_ms.saturating_add(passed_ms))
                } else {
                    (mark.store_ms, mark.wall_ms)
                }
            }
        };
        let start = TimeMark { store_ms, boot_ms, wall_ms, boot_id };
        let held = (expected_wall_ms.abs_diff(wall_ms) > jump_max_ms).then_some(HeldJump {
            expected_wall_ms,
            wall_ms,
            store_ms,
        });
        let issued_before_ms = if jumped || held.is_some() { wall_ms } else { 0 };
        let since_jump = Mutex::new(SinceJump { wall_ms, boot_ms, issued_before_ms });
        (Self { clock, start, jump_max_ms, told_ms: AtomicU64::new(store_ms), since_jump }, held)
    }

    /// The time of the store, in milliseconds since the Unix epoch. It never goes back, on any thread.
    pub(crate) fn now_ms(&self) -> u64 {
        self.told_at(self.clock.boot_ms())
    }

    /// All clocks at this moment.
    pub(crate) fn mark(&self) -> TimeMark {
        let boot_ms = self.clock.boot_ms();
        TimeMark {
            store_ms: self.told_at(boot_ms),
            boot_ms,
            wall_ms: self.clock.wall_ms(),
            boot_id: self.clock.boot_id(),
        }
    }

    /// How far the wall clock has jumped since the start, if by more than the bound. Store time never follows while
    /// open.
    pub(crate) fn jump_while_open(&self) -> Option<HeldJump> {
        let now = self.mark();
        self.issued_before_jump_ms(&now);
        let expected_wall_ms = self.start.wall_ms.saturating_add(now.boot_ms.saturating_sub(self.start.boot_ms));
        (expected_wall_ms.abs_diff(now.wall_ms) > self.jump_max_ms).then_some(HeldJump {
            expected_wall_ms,
            wall_ms: now.wall_ms,
            store_ms: now.store_ms,
        })
    }

    /// A key that its client issued at or before this moment (milliseconds since the Unix epoch), and that is to be
    /// remembered for `retention_ms`, may already have been forgotten.
    ///
    /// A key issued exactly one retention ago is among them, since its record may have ended in this very millisecond.
    /// So is every key from before the latest jump of the wall clock, whatever its age: nobody can say how long ago
    /// that was. A jump counts from when it was found, at the start or by one of the calls that look for it, this one
    /// among them.
    pub(crate) fn forgotten_before(&self, retention_ms: u64) -> u64 {
        let now = self.mark();
        let past_retention_ms = now.wall_ms.max(now.store_ms).saturating_sub(retention_ms);
        past_retention_ms.max(self.issued_before_jump_ms(&now))
    }

    /// The wall clock when it was last found to have jumped by more than the bound; 0 if it never did. A clock that is
    /// set right again has jumped again, so that one wrong reading does not make keys too old for years.
    fn issued_before_jump_ms(&self, now: &TimeMark) -> u64 {
        let mut since = self.since_jump.lock();
        let expected_wall_ms = since.wall_ms.saturating_add(now.boot_ms.saturating_sub(since.boot_ms));
        if expected_wall_ms.abs_diff(now.wall_ms) > self.jump_max_ms {
            let (wall_ms, boot_ms) = (now.wall_ms, now.boot_ms);
            *since = SinceJump { wall_ms, boot_ms, issued_before_ms: wall_ms };
        }
        since.issued_before_ms
    }

    /// Store time at a reading of the boot clock, or the largest time told so far if that is later.
    fn told_at(&self, boot_ms: u64) -> u64 {
        let ms = self.start.store_ms.saturating_add(boot_ms.saturating_sub(self.start.boot_ms));
        // Relaxed: the order of one atomic's own values is all that is needed, nothing is published through it. Most
        // calls fall into a millisecond that was told before, and leave the cache line shared.
        let told_ms = self.told_ms.load(Ordering::Relaxed);
        if ms <= told_ms { told_ms } else { self.told_ms.fetch_max(ms, Ordering::Relaxed).max(ms) }
    }
}

/// Whether the mark was made in this boot. A boot clock that went back (a restored machine image) is another boot.
fn same_boot(mark: &TimeMark, boot_ms: u64, boot_id: [u8; 16]) -> bool {
    boot_id != BOOT_ID_UNKNOWN && mark.boot_id == boot_id && mark.boot_ms <= boot_ms
}

/// Milliseconds since the Unix epoch; times before it count as the epoch.
pub(crate) fn unix_ms(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, whole_ms)
}

/// The whole milliseconds of a duration, rounded down; what exceeds 64 bits counts as the largest.
pub(crate) fn whole_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The milliseconds of a duration, rounded up, so that a promise is never shorter than was asked for.
pub(crate) fn ms_rounded_up(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn system_boot_id() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    parsed_boot_id(&text).unwrap_or(BOOT_ID_UNKNOWN)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn system_boot_id() -> [u8; 16] {
    BOOT_ID_UNKNOWN
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
#[expect(
    clippy::disallowed_methods,
    reason = "the one place that reads a monotonic clock where there is no boot clock"
)]
fn instant_now() -> std::time::Instant {
    std::time::Instant::now()
}

/// The 16 bytes of a UUID in text, as the kernel prints it.
fn parsed_boot_id(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.trim_end().chars().filter(|character| *character != '-').collect();
    let is_hex = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_hex.then(|| u128::from_str_radix(&digits, 16).ok().map(u128::to_be_bytes)).flatten()
}

#[cfg(test)]
mod tests {
    use crate::sync::UnmodelledMutex;

    use super::*;

    const HOUR_MS: u64 = 60 * 60 * 1000;
    const DAY_MS: u64 = 24 * HOUR_MS;
    const YEARS_10_MS: u64 = 3652 * DAY_MS;
    const JUMP_MAX_MS: u64 = 7 * DAY_MS;
    const T0: u64 = 1_800_000_000_000;

    /// The three readings, set by hand.
    #[derive(Debug)]
    struct Hands(UnmodelledMutex<(u64, u64, [u8; 16])>);

    impl Hands {
        fn new(wall_ms: u64, boot_ms: u64, boot: u8) -> Arc<Self> {
            Arc::new(Self(UnmodelledMutex::new((wall_ms, boot_ms, [boot; 16]))))
        }

        fn set(&self, wall_ms: u64, boot_ms: u64) {
            let mut hands = self.0.lock();
            (hands.0, hands.1) = (wall_ms, boot_ms);
        }
    }

    impl Clock for Hands {
        fn wall_ms(&self) -> u64 {
            self.0.lock().0
        }

        fn boot_ms(&self) -> u64 {
            self.0.lock().1
        }

        fn boot_id(&self) -> [u8; 16] {
            self.0.lock().2
        }

        fn sleep(&self, _ms: u64) -> Option<Duration> {
            None
        }

        fn on_move(&self, _wake: Weak<dyn Fn() + Send + Sync>) {}
    }

    fn mark_of(store_ms: u64, boot_ms: u64, wall_ms: u64, boot: u8) -> TimeMark {
        TimeMark { store_ms, boot_ms, wall_ms, boot_id: [boot; 16] }
    }

    #[test]
    fn a_new_store_starts_at_the_wall_clock() {
        let (time, held) = StoreTime::start(Hands::new(T0, 500, 1), None, JUMP_MAX_MS);
        assert_eq!((time.now_ms(), held), (T0, None));
        assert_eq!(time.mark(), mark_of(T0, 500, T0, 1));
    }

    #[test]
    fn an_open_store_follows_boot_time_and_never_the_wall_clock() {
        let clock = Hands::new(T0, 500, 1);
        let (time, _) = StoreTime::start(clock.clone(), None, JUMP_MAX_MS);
        for wall_ms in [T0 - HOUR_MS, T0 + YEARS_10_MS, 0, u64::MAX] {
            clock.set(wall_ms, 1500);
            assert_eq!(time.now_ms(), T0 + 1000);
        }
    }

    #[test]
    fn store_time_never_goes_back() {
        let clock = Hands::new(T0, 500, 1);
        let (time, _) = StoreTime::start(clock.clone(), None, JUMP_MAX_MS);
        let mut latest_ms = T0;
        for boot_ms in [500, 900, 899, 0, 901, 100, u64::MAX, 5] {
            clock.set(T0, boot_ms);
            let now_ms = time.now_ms();
            assert!(now_ms >= latest_ms, "{now_ms} after {latest_ms}");
            assert!(time.mark().store_ms >= now_ms);
            latest_ms = now_ms;
        }
    }

    #[test]
    fn a_reopen_within_a_boot_goes_on_by_boot_time() {
        let mark = mark_of(T0, 1000, T0, 1);
        for (wall_ms, told) in
            [(T0 + 4000, false), (T0 - HOUR_MS, false), (T0 + DAY_MS, false), (T0 + YEARS_10_MS, true), (0, true)]
        {
            let (time, held) = StoreTime::start(Hands::new(wall_ms, 5000, 1), Some(&mark), JUMP_MAX_MS);
            assert_eq!(time.now_ms(), T0 + 4000, "wall {wall_ms}");
            assert_eq!(held.is_some(), told, "wall {wall_ms}");
        }
    }

    #[test]
    fn within_a_boot_no_bound_applies() {
        let mark = mark_of(T0, 0, T0, 1);
        let (time, held) = StoreTime::start(Hands::new(T0 + 30 * DAY_MS, 30 * DAY_MS, 1), Some(&mark), JUMP_MAX_MS);
        assert_eq!((time.now_ms(), held), (T0 + 30 * DAY_MS, None));
    }

    #[test]
    fn across_boots_the_wall_clock_is_followed_up_to_the_bound_and_held_beyond() {
        let mark = mark_of(T0, 9_000_000, T0, 1);
        for (jump_ms, followed) in
            [(0, true), (HOUR_MS, true), (JUMP_MAX_MS - 1, true), (JUMP_MAX_MS, true), (JUMP_MAX_MS + 1, false)]
        {
            let (time, held) = StoreTime::start(Hands::new(T0 + jump_ms, 10, 2), Some(&mark), JUMP_MAX_MS);
            assert_eq!(time.now_ms(), if followed { T0 + jump_ms } else { T0 }, "jump {jump_ms}");
            assert_eq!(held.is_none(), followed, "jump {jump_ms}");
        }
    }

    #[test]
    fn the_bound_is_measured_against_the_marks_wall_clock_and_not_its_store_time() {
        let mark = mark_of(T0, 0, T0 - DAY_MS, 1);
        let (time, held) = StoreTime::start(Hands::new(T0 - DAY_MS + HOUR_MS, 10, 2), Some(&mark), JUMP_MAX_MS);
        assert_eq!((time.now_ms(), held), (T0 + HOUR_MS, None));
    }

    #[test]
    fn across_boots_a_step_back_stands_still_and_a_large_one_is_told() {
        let mark = mark_of(T0, 0, T0, 1);
        for (wall_ms, told) in
            [(T0 - HOUR_MS, false), (T0 - JUMP_MAX_MS, false), (T0 - JUMP_MAX_MS - 1, true), (0, true)]
        {
            let (time, held) = StoreTime::start(Hands::new(wall_ms, 10, 2), Some(&mark), JUMP_MAX_MS);
            assert_eq!(time.now_ms(), T0);
            assert_eq!(held.is_some(), told, "wall {wall_ms}");
        }
    }

    #[test]
    fn a_boot_clock_that_went_back_or_an_unknown_boot_counts_as_another_boot() {
        for (mark, boot) in [(mark_of(T0, 5000, T0, 1), 1), (mark_of(T0, 10, T0, 0), 0)] {
            let (time, held) = StoreTime::start(Hands::new(T0 + HOUR_MS, 20, boot), Some(&mark), JUMP_MAX_MS);
            assert_eq!((time.now_ms(), held), (T0 + HOUR_MS, None));
        }
    }

    #[test]
    fn a_jump_is_held_once_so_that_a_store_opened_each_tenth_day_still_forgets() {
        let (step_ms, mut mark, mut held_count) = (10 * DAY_MS, mark_of(T0, 0, T0, 0), 0);
        for boot in 1..=20 {
            let clock = Hands::new(T0 + u64::from(boot) * step_ms, 10, boot);
            let (time, held) = StoreTime::start(clock, Some(&mark), JUMP_MAX_MS);
            held_count += u32::from(held.is_some());
            mark = time.mark();
        }
        assert_eq!((mark.store_ms, held_count), (T0 + 19 * step_ms, 1));
    }

    #[test]
    fn a_clock_that_is_wrong_by_years_frees_nothing_however_often() {
        let mut mark = mark_of(T0, 0, T0, 0);
        for boot in 1..=10 {
            let wall_ms = if boot % 2 == 1 { T0 + YEARS_10_MS } else { T0 };
            let (time, held) = StoreTime::start(Hands::new(wall_ms, 10, boot), Some(&mark), JUMP_MAX_MS);
            mark = time.mark();
            assert_eq!(mark.store_ms, T0, "boot {boot}");
            assert!(held.is_some(), "boot {boot}");
        }
        let ahead = mark_of(T0, 0, T0 + 5 * YEARS_10_MS, 1);
        let (time, held) = StoreTime::start(Hands::new(T0 + 6 * YEARS_10_MS, 10, 2), Some(&ahead), JUMP_MAX_MS);
        assert_eq!((time.now_ms(), held.is_some()), (T0, true));
    }

    #[test]
    fn a_jump_while_open_is_told_and_not_followed() {
        let clock = Hands::new(T0, 500, 1);
        let (time, _) = StoreTime::start(clock.clone(), None, JUMP_MAX_MS);
        clock.set(T0 + 1000 + JUMP_MAX_MS, 1500);
        assert_eq!(time.jump_while_open(), None);
        clock.set(T0 + 1000 + JUMP_MAX_MS + 1, 1500);
        let told = time.jump_while_open().unwrap();
        let (expected_wall_ms, wall_ms, store_ms) = (T0 + 1000, T0 + 1000 + JUMP_MAX_MS + 1, T0 + 1000);
        assert_eq!(told, HeldJump { expected_wall_ms, wall_ms, store_ms });
    }

    /// Whether a key that was issued at this moment is too old for a retention of an hour.
    fn too_old(time: &StoreTime, issued_at_ms: u64) -> bool {
        issued_at_ms <= time.forgotten_before(HOUR_MS)
    }

    /// Asserts that keys are too old up to and including this moment.
    fn assert_too_old_until(time: &StoreTime, ms: u64, when: &str) {
        assert!(too_old(time, ms - 1) && too_old(time, ms), "{when}");
        assert!(!too_old(time, ms + 1), "{when}");
    }

    #[test]
    fn a_key_is_too_old_from_the_millisecond_in_which_its_record_may_end() {
        let clock = Hands::new(T0, 500, 1);
        let (time, _) = StoreTime::start(clock.clone(), None, JUMP_MAX_MS);
        assert_too_old_until(&time, T0 - HOUR_MS, "a new store");
        clock.set(T0 + 5, 505);
        assert_too_old_until(&time, T0 + 5 - HOUR_MS, "five milliseconds later");
        assert_eq!(time.forgotten_before(u64::MAX), 0);
    }

    #[test]
    fn the_later_of_the_two_clocks_says_how_old_a_key_is() {
        let clock = Hands::new(T0, 500, 1);
        let (time, _) = StoreTime::start(clock.clone(), None, JUMP_MAX_MS);
        clock.set(T0 + DAY_MS, 500);
        assert_too_old_until(&time, T0 + DAY_MS - HOUR_MS, "the wall clock is ahead");
        clock.set(T0 - DAY_MS, 500);
        assert_too_old_until(&time, T0 - HOUR_MS, "the wall clock is behind");
    }

    #[test]
    fn what_was_issued_before_a_jump_that_the_start_found_is_too_old_whatever_its_age() {
        let held_before = mark_of(T0 - 10 * DAY_MS, 0, T0, 1);
        for (name, mark, wall_ms, boot, is_held) in [
            ("held", mark_of(T0, 0, T0, 1), T0 + JUMP_MAX_MS + 1, 2, true),
            ("followed, since one like it was held", held_before, T0 + 9 * DAY_MS, 2, false),
            ("held within one boot", mark_of(T0, 10, T0, 1), T0 + JUMP_MAX_MS + 1, 1, true),
        ] {
            let clock = Hands::new(wall_ms, 10, boot);
            let (time, held) = StoreTime::start(clock.clone(), Some(&mark), JUMP_MAX_MS);
            assert_eq!(held.is_some(), is_held, "{name}");
            assert_too_old_until(&time, wall_ms, name);
            clock.set(wall_ms + 1000, 1010);
            assert_too_old_until(&time, wall_ms, "it counts from the jump, not from now");
            clock.set(wall_ms + DAY_MS, DAY_MS);
            assert_too_old_until(&time, wall_ms + DAY_MS - HOUR_MS, "a day later the retention reaches further");
        }
    }

    #[test]
    fn a_large_step_back_is_a_jump_too() {
        let mark = mark_of(T0, 0, T0, 1);
        let (time, held) = StoreTime::start(Hands::new(T0 - 30 * DAY_MS, 10, 2), Some(&mark), JUMP_MAX_MS);
        assert!(held.is_some());
        assert_too_old_until(&time, T0 - HOUR_MS, "store time is the later one");
        assert_eq!(time.forgotten_before(60 * DAY_MS), T0 - 30 * DAY_MS);
    }

    #[test]
    fn a_start_without_a_jump_makes_no_key_too_old_before_its_time() {
        let mark = mark_of(T0, 0, T0, 1);
        for wall_ms in [T0, T0 + HOUR_MS, T0 + JUMP_MAX_MS] {
            let (time, _) = StoreTime::start(Hands::new(wall_ms, 10, 2), Some(&mark), JUMP_MAX_MS);
            assert_too_old_until(&time, wall_ms - HOUR_MS, "the wall clock was followed");
        }
    }

    #[test]
    fn what_was_issued_before_a_jump_while_open_is_too_old() {
        for seen_by_another_call in [false, true] {
            let clock = Hands::new(T0, 500, 1);
            let (time, _) = StoreTime::start(clock.clone(), None, JUMP_MAX_MS);
            clock.set(T0 + JUMP_MAX_MS, 500);
            assert_too_old_until(&time, T0 + JUMP_MAX_MS - HOUR_MS, "within the bound");
            let wall_ms = T0 + 30 * DAY_MS;
            clock.set(wall_ms, 500);
            if seen_by_another_call {
                assert!(time.jump_while_open().is_some());
                clock.set(wall_ms + 1000, 1500);
            }
            assert_too_old_until(&time, wall_ms, "from when the jump was found");
            clock.set(wall_ms + 5000, 5500);
            assert_too_old_until(&time, wall_ms, "it stays the same jump");
        }
    }

    #[test]
    fn a_clock_that_is_set_right_again_makes_keys_too_old_for_no_longer_than_that() {
        let clock = Hands::new(T0, 500, 1);
        let (time, _) = StoreTime::start(clock.clone(), None, JUMP_MAX_MS);
        clock.set(T0 + YEARS_10_MS, 500);
        assert_too_old_until(&time, T0 + YEARS_10_MS, "a clock that is ten years wrong");
        clock.set(T0 + 60_000, 60_500);
        assert_too_old_until(&time, T0 + 60_000, "set right after a minute");
        clock.set(T0 + 60_000 + HOUR_MS, 60_500 + HOUR_MS);
        assert_too_old_until(&time, T0 + 60_000, "the retention after that");
        clock.set(T0 + DAY_MS, DAY_MS + 500);
        assert_too_old_until(&time, T0 + DAY_MS - HOUR_MS, "and from then on as ever");
    }

    #[test]
    fn durations_round_the_way_their_use_needs() {
        assert_eq!(ms_rounded_up(Duration::ZERO), 0);
        assert_eq!(ms_rounded_up(Duration::from_nanos(1)), 1);
        assert_eq!(ms_rounded_up(Duration::from_millis(5)), 5);
        assert_eq!(ms_rounded_up(Duration::MAX), u64::MAX);
        assert_eq!(whole_ms(Duration::from_nanos(1_999_999)), 1);
        assert_eq!(whole_ms(Duration::MAX), u64::MAX);
        assert_eq!(unix_ms(UNIX_EPOCH - Duration::from_secs(1)), 0);
        assert_eq!(unix_ms(UNIX_EPOCH + Duration::from_millis(7)), 7);
    }

    #[test]
    fn a_boot_id_is_read_exactly_or_is_unknown() {
        let parsed = parsed_boot_id("01234567-89ab-cdef-0123-456789abcdef\n");
        assert_eq!(parsed, Some([1, 35, 69, 103, 137, 171, 205, 239, 1, 35, 69, 103, 137, 171, 205, 239]));
        for refused in ["", "0123", "+1234567-89ab-cdef-0123-456789abcdef", "g1234567-89ab-cdef-0123-456789abcdef"] {
            assert_eq!(parsed_boot_id(refused), None, "{refused}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_system_clock_reads_this_machine() {
        let clock = SystemClock::new();
        assert_ne!(clock.boot_id(), BOOT_ID_UNKNOWN);
        assert_eq!(clock.boot_id(), SystemClock::default().boot_id());
        let before_ms = clock.boot_ms();
        assert!(before_ms > 0 && clock.boot_ms() >= before_ms);
        assert!(clock.wall_ms() > 1_700_000_000_000);
        assert_eq!(clock.sleep(5), Some(Duration::from_millis(5)));
    }
}
