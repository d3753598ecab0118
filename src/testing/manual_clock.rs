//! A clock that is moved by hand.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::clock::Clock;
use crate::sync::UnmodelledMutex;

/// A clock that stands still until a test moves it. Clones are the same clock.
///
/// [`advance`](Self::advance) lets time pass, and returns when everything that is due was woken.
/// [`set_wall_ms`](Self::set_wall_ms) is somebody setting the wall clock, and [`reboot`](Self::reboot) a machine that
/// starts again: the time since boot starts at zero, the wall clock goes on.
///
/// ```
/// use std::time::Duration;
///
/// use keyonce::Clock;
/// use keyonce::testing::ManualClock;
///
/// let clock = ManualClock::new(1_767_225_600_000); // 2026-01-01
/// clock.advance(Duration::from_secs(60));
/// assert_eq!(clock.wall_ms(), 1_767_225_660_000);
/// assert_eq!(clock.boot_ms(), 60_000);
///
/// let before = clock.boot_id();
/// clock.reboot();
/// assert_eq!(clock.boot_ms(), 0);
/// assert_ne!(clock.boot_id(), before);
/// assert_eq!(clock.wall_ms(), 1_767_225_660_000);
/// ```
#[derive(Clone)]
pub struct ManualClock {
    shared: Arc<UnmodelledMutex<Hands>>,
}

struct Hands {
    wall_ms: u64,
    boot_ms: u64,
    boot: u64,
    /// What passed below a millisecond, so that a thousand steps of a microsecond make one millisecond.
    rest: Duration,
    wakes: Vec<Weak<dyn Fn() + Send + Sync>>,
}

impl ManualClock {
    /// A clock that shows `wall_ms` milliseconds since the Unix epoch, on a machine that has just started.
    #[must_use]
    pub fn new(wall_ms: u64) -> Self {
        let hands = Hands { wall_ms, boot_ms: 0, boot: 1, rest: Duration::ZERO, wakes: Vec::new() };
        Self { shared: Arc::new(UnmodelledMutex::new(hands)) }
    }

    /// Lets time pass, on the wall and since boot, and wakes whoever waits for it before it returns.
    pub fn advance(&self, by: Duration) {
        self.turn(|hands| {
            let passed = hands.rest.saturating_add(by);
            let ms = u64::try_from(passed.as_millis()).unwrap_or(u64::MAX);
            hands.rest = passed.saturating_sub(Duration::from_millis(ms));
            hands.wall_ms = hands.wall_ms.saturating_add(ms);
            hands.boot_ms = hands.boot_ms.saturating_add(ms);
        });
    }

    /// Sets the wall clock, forwards or backwards. No time passes.
    pub fn set_wall_ms(&self, wall_ms: u64) {
        self.turn(|hands| hands.wall_ms = wall_ms);
    }

    /// Starts the machine again: another boot, no time since. A store that is open lives through no reboot; close or
    /// drop it first.
    pub fn reboot(&self) {
        self.turn(|hands| {
            hands.boot += 1;
            hands.boot_ms = 0;
        });
    }

    /// Moves the hands, then wakes; with no lock held, so that those woken may ask for the time or move it on.
    fn turn(&self, turn: impl FnOnce(&mut Hands)) {
        let wakes: Vec<_> = {
            let mut hands = self.shared.lock();
            turn(&mut hands);
            hands.wakes.retain(|wake| wake.strong_count() > 0);
            hands.wakes.iter().filter_map(Weak::upgrade).collect()
        };
        for wake in wakes {
            wake();
        }
    }
}

impl Default for ManualClock {
    /// A clock that shows the first moment of 2026.
    fn default() -> Self {
        Self::new(1_767_225_600_000)
    }
}

impl Clock for ManualClock {
    fn wall_ms(&self) -> u64 {
        self.shared.lock().wall_ms
    }

    fn boot_ms(&self) -> u64 {
        self.shared.lock().boot_ms
    }

    fn boot_id(&self) -> [u8; 16] {
        u128::from(self.shared.lock().boot).to_le_bytes()
    }

    fn sleep(&self, _ms: u64) -> Option<Duration> {
        None
    }

    fn on_move(&self, wake: Weak<dyn Fn() + Send + Sync>) {
        self.shared.lock().wakes.push(wake);
    }
}

impl fmt::Debug for ManualClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hands = self.shared.lock();
        f.debug_struct("ManualClock")
            .field("wall_ms", &hands.wall_ms)
            .field("boot_ms", &hands.boot_ms)
            .field("boot", &hands.boot)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::sync::{AtomicU64, Ordering};

    #[test]
    fn advance_moves_both_times_and_keeps_what_is_below_a_millisecond() {
        let clock = ManualClock::new(1_000);
        for _ in 0..1_500 {
            clock.advance(Duration::from_micros(10));
        }
        assert_eq!((clock.wall_ms(), clock.boot_ms()), (1_015, 15));
    }

    #[test]
    fn everything_is_woken_before_advance_returns_and_nothing_after_it_is_gone() {
        let clock = ManualClock::new(0);
        let woken = Arc::new(AtomicU64::new(0));
        let seen = Arc::new(UnmodelledMutex::new(Vec::new()));
        let wake: Arc<dyn Fn() + Send + Sync> = {
            let (woken, seen, clock) = (woken.clone(), seen.clone(), clock.clone());
            Arc::new(move || {
                woken.fetch_add(1, Ordering::Relaxed);
                seen.lock().push(clock.wall_ms()); // the time may be asked for while being woken
            })
        };
        clock.on_move(Arc::downgrade(&wake));
        clock.advance(Duration::from_millis(5));
        clock.set_wall_ms(50);
        clock.reboot();
        assert_eq!(woken.load(Ordering::Relaxed), 3);
        assert_eq!(*seen.lock(), [5, 50, 50]);
        drop(wake);
        clock.advance(Duration::from_millis(5));
        assert_eq!(woken.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn the_wall_goes_backwards_when_set_and_the_time_since_boot_does_not() {
        let clock = ManualClock::default();
        clock.advance(Duration::from_secs(1));
        clock.set_wall_ms(1);
        assert_eq!((clock.wall_ms(), clock.boot_ms()), (1, 1_000));
        assert_eq!(clock.sleep(1), None, "nobody sleeps by real time under a manual clock");
    }

    #[test]
    fn clones_are_one_clock() {
        let clock = ManualClock::new(0);
        clock.clone().advance(Duration::from_millis(7));
        assert_eq!(clock.boot_ms(), 7);
    }
}
