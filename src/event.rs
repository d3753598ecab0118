//! What a store tells of its own accord, while it happens.
//!
//! [`Stats`](crate::Stats) counts, and has to be asked. An [`Event`] comes to whoever set `on_event` in the options, so
//! that what needs a person reaches one. This file decides what an event says and how often it may come; when it comes,
//! those know who notice it, and they tell it outside every lock.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::clock::{HeldJump, whole_ms};
use crate::error::Error;
use crate::key::{Key, Token};
use crate::stats::{OpenReport, RetryAges};
use crate::sync::{Ordering, UnmodelledAtomicU64};

/// A sync that takes longer than this is told.
pub(crate) const SYNC_SLOW: Duration = Duration::from_secs(1);

/// The part of the retention, in hundredths, from which on a retry came near its end.
const NEAR_PERCENT: u64 = 80;

const MINUTE_MS: u64 = 60 * 1000;
const HOUR_MS: u64 = 60 * MINUTE_MS;

/// What happened to a store, as it tells whoever listens.
///
/// Set [`Options::on_event`](crate::Options::on_event) to listen. The callback runs on the thread that noticed, one of
/// the service's or the store's own, with nothing locked, so it may call the store, though not wait there for an
/// `_async` call, which the same thread may have to serve; it should be quick, since somebody may be waiting for that
/// thread. If it panics, the panic ends there. What must be rare is told at most once in the
/// time that is given below, in store time. Counts run since the opening, so what was held back is in the next event,
/// and in [`Stats`](crate::Stats).
///
/// `Display` is one sentence for a log. Neither it nor `Debug` shows a raw key.
///
/// ```
/// use keyonce::Event;
///
/// fn on_event(event: &Event) {
///     match event {
///         Event::Poisoned(_) | Event::Full { .. } => eprintln!("to be looked at now: {event}"),
///         _ => println!("{event}"),
///     }
/// }
/// # on_event(&Event::Full { retry_after: std::time::Duration::from_secs(1) });
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The store is open. Told once, before the opening returns.
    ///
    /// What to do: log it. Keys that are `interrupted` are work whose outcome nobody knows; go through them. A report
    /// that is not `clean`, though nothing was killed, is worth a question.
    Opened(OpenReport),
    /// The wall clock jumped further than is believed, at the opening or while the store was open; store time did not
    /// follow. Told at most once an hour.
    ///
    /// What to do: find out who set the clock. Keys are remembered for longer than they had to be, and none is
    /// forgotten too soon; a key that its client says was issued before the jump counts as too old once it is unknown.
    ClockJumped {
        /// What the wall clock should have said.
        expected: SystemTime,
        /// What it said.
        wall: SystemTime,
        /// Store time at that moment.
        store: SystemTime,
    },
    /// Interrupted keys were forgotten, since their retention ended before anybody resolved them. Told at most once a
    /// minute.
    ///
    /// What to do: reconcile by other means, since a retry of such a key now runs as if it were new; and have somebody
    /// go through the interrupted keys well within the retention.
    ExpiredUnresolved {
        /// How many, since the opening.
        count: u64,
    },
    /// The lease of a reservation ran out and its owner had neither finished nor renewed it: the key is interrupted.
    /// Told once for each reservation that is noticed so.
    ///
    /// What to do: the owner hangs, or its lease is shorter than its work. It may still complete, as long as nobody
    /// takes over.
    LeaseLapsed {
        /// The key.
        key: Key,
        /// The token of the reservation.
        token: Token,
        /// Which attempt it was.
        attempt: u32,
    },
    /// Retries come so late that the retention hardly covers them: the 99.9th percentile of the ages of duplicates has
    /// reached four fifths of it. Told at most once an hour.
    ///
    /// What to do: a longer retention, or clients that give up sooner. Retries that come after it are not seen as such,
    /// and run again.
    RetryWindowShort {
        /// The age that 999 of 1000 duplicates did not exceed; at most an eighth too high. Of fewer than a thousand,
        /// it is the oldest.
        p999: Duration,
        /// The retention of the store.
        retention: Duration,
    },
    /// A request came again within a minute, in the same scope and with the same fingerprint, under a key that was new.
    /// Told at most once a minute.
    ///
    /// What to do: look at the client. One that makes a new key for each try gets its work done at each try. A key
    /// belongs to the operation and is made before the first try. People who mean the same request twice look alike.
    FreshKeyPerRetry {
        /// How many were seen since the opening, of the one fingerprint in eight that is watched.
        count: u64,
    },
    /// A write or a sync failed, and the store takes no more. Told once.
    ///
    /// What to do: stop taking work, close the store, have the disk looked at, open again. What was acknowledged is
    /// safe; what was being written gets its verdict when the store is opened.
    Poisoned(Error),
    /// The record of an unfinished key, which has to be kept, fails its checks, so the segment that it lies in cannot
    /// be given up when its time is over, nor any behind it: the log grows. Told once for each such segment.
    ///
    /// What to do: keep a copy of the directory before the store is closed, since opening it would be refused, and have
    /// the disk looked at. Once every unfinished key of that age is finished by its owner, or settled, the segment
    /// goes, and the damage with it.
    Damaged(Error),
    /// There is no room: a call was refused, or the next segment could not be made ready ahead of need. Told at most
    /// once a minute.
    ///
    /// What to do: free disk space, or plan for more keys. Until then what needs a new segment is refused, completions
    /// too: their guards come back, and nothing is lost.
    Full {
        /// When trying again may help.
        retry_after: Duration,
    },
    /// A data sync took longer than a second. Told at most once a minute.
    ///
    /// What to do: look at the disk, and at who shares it. Every caller at `PowerLoss` waited for it.
    SlowSync {
        /// How long it took.
        took: Duration,
    },
}

impl Event {
    /// The event of a jump of the wall clock.
    pub(crate) fn clock_jumped(jump: &HeldJump) -> Self {
        let at = |ms| UNIX_EPOCH + Duration::from_millis(ms);
        Self::ClockJumped { expected: at(jump.expected_wall_ms), wall: at(jump.wall_ms), store: at(jump.store_ms) }
    }

    /// The warning that retries come nearly as late as keys are remembered, when they do.
    pub(crate) fn retry_window_short(ages: &RetryAges, retention: Duration) -> Option<Self> {
        let p999 = ages.quantile(0.999)?;
        is_near(whole_ms(p999), whole_ms(retention)).then_some(Self::RetryWindowShort { p999, retention })
    }

    /// Which pace it keeps, and for how long it is not told again: `None` is told each time.
    fn pace(&self) -> Option<(Paced, u64)> {
        match self {
            Self::Opened(_) | Self::LeaseLapsed { .. } | Self::Poisoned(_) | Self::Damaged(_) => None,
            Self::ClockJumped { .. } => Some((Paced::ClockJumped, HOUR_MS)),
            Self::RetryWindowShort { .. } => Some((Paced::RetryWindowShort, HOUR_MS)),
            Self::ExpiredUnresolved { .. } => Some((Paced::ExpiredUnresolved, MINUTE_MS)),
            Self::FreshKeyPerRetry { .. } => Some((Paced::FreshKeyPerRetry, MINUTE_MS)),
            Self::Full { .. } => Some((Paced::Full, MINUTE_MS)),
            Self::SlowSync { .. } => Some((Paced::SlowSync, MINUTE_MS)),
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Opened(report) if report.created => f.write_str("a new store was created"),
            Self::Opened(report) => {
                let end = if report.clean { "a clean end" } else { "a crash" };
                let OpenReport { keys, interrupted, .. } = report;
                write!(f, "the store was opened after {end} with {keys} keys, {interrupted} of them interrupted")
            }
            Self::ClockJumped { expected, wall, .. } => {
                let (by, towards) = match wall.duration_since(*expected) {
                    Ok(by) => (by, "ahead"),
                    Err(back) => (back.duration(), "back"),
                };
                write!(f, "the wall clock jumped {towards} by {by:?}, and store time did not follow")
            }
            Self::ExpiredUnresolved { count } => {
                write!(f, "{count} interrupted keys were forgotten before anybody found out what had become of them")
            }
            Self::LeaseLapsed { key, token, attempt } => {
                write!(f, "the lease of {key:?} lapsed at attempt {attempt} with token {token}")
            }
            Self::RetryWindowShort { p999, retention } => {
                write!(f, "one retry in a thousand comes after {p999:?} or later, and keys are kept for {retention:?}")
            }
            Self::FreshKeyPerRetry { count } => {
                write!(
                    f,
                    "{count} requests came again within a minute under a new key: a client makes one for each try"
                )
            }
            Self::Poisoned(error) => write!(f, "the store takes no more: {error}"),
            Self::Damaged(error) => write!(f, "a segment cannot be given up, so the log grows: {error}"),
            Self::Full { retry_after } => write!(f, "the store is full and refuses new keys for {retry_after:?}"),
            Self::SlowSync { took } => write!(f, "a data sync took {took:?}"),
        }
    }
}

fn is_near(age_ms: u64, retention_ms: u64) -> bool {
    age_ms.saturating_mul(100) >= retention_ms.saturating_mul(NEAR_PERCENT)
}

/// What is held back when it comes too often.
#[derive(Clone, Copy)]
enum Paced {
    /// Not an event: the look at all ages that may lead to one.
    RetryWindowLook,
    ClockJumped,
    RetryWindowShort,
    ExpiredUnresolved,
    FreshKeyPerRetry,
    Full,
    SlowSync,
}

const PACES: usize = Paced::SlowSync as usize + 1;

/// A listener as the options keep it.
#[derive(Clone)]
pub(crate) struct OnEvent(pub(crate) Arc<dyn Fn(&Event) + Send + Sync>);

impl fmt::Debug for OnEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnEvent").finish_non_exhaustive()
    }
}

/// Who listens to a store, if anybody does, and how often it was told.
#[derive(Debug)]
pub(crate) struct Listener {
    on_event: Option<OnEvent>,
    /// By [`Paced`]: the store time at which the event may be told again.
    next_ms: [UnmodelledAtomicU64; PACES],
}

impl Listener {
    pub(crate) fn new(on_event: Option<OnEvent>) -> Self {
        Self { on_event, next_ms: [const { UnmodelledAtomicU64::new(0) }; PACES] }
    }

    /// Whether anybody listens: else nothing need be found out for an event.
    pub(crate) fn listens(&self) -> bool {
        self.on_event.is_some()
    }

    /// Tells an event of this moment of store time, unless one of its sort was told too short a time ago. To be called
    /// with nothing locked: the callback may call the store. If it panics, it has been told.
    pub(crate) fn tell(&self, event: &Event, now_ms: u64) {
        let Some(OnEvent(on_event)) = &self.on_event else { return };
        if event.pace().is_some_and(|(paced, pause_ms)| !self.is_due(paced, pause_ms, now_ms)) {
            return;
        }
        if catch_unwind(AssertUnwindSafe(|| on_event(event))).is_err() {
            // The panic hook has told it. A listener's fault is no reason to fail the call that happened to notice.
        }
    }

    /// Whether a duplicate of this age is reason to look at the ages of all: somebody listens, it came near the end of
    /// the retention, and the last look was a minute ago. So no timer is needed, and most duplicates cost a comparison.
    pub(crate) fn is_retry_window_in_doubt(&self, age_ms: u64, retention_ms: u64, now_ms: u64) -> bool {
        is_near(age_ms, retention_ms) && self.listens() && self.is_due(Paced::RetryWindowLook, MINUTE_MS, now_ms)
    }

    /// Of several threads that come at the same time, one is told so.
    fn is_due(&self, paced: Paced, pause_ms: u64, now_ms: u64) -> bool {
        let Some(next_ms) = self.next_ms.get(paced as usize) else { return true };
        let due_ms = next_ms.load(Ordering::Relaxed);
        let then_ms = now_ms.saturating_add(pause_ms);
        due_ms <= now_ms && next_ms.compare_exchange(due_ms, then_ms, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use crate::sync::Mutex;

    use super::*;

    const T0: u64 = 1_800_000_000_000;

    fn key() -> Key {
        Key::new("alice@example.com", "secret-4711").unwrap()
    }

    fn one_of_each() -> [Event; 10] {
        [
            Event::Opened(OpenReport { keys: 12, interrupted: 3, ..OpenReport::default() }),
            Event::clock_jumped(&HeldJump { expected_wall_ms: T0, wall_ms: T0 + 9_000, store_ms: T0 }),
            Event::ExpiredUnresolved { count: 7 },
            Event::LeaseLapsed { key: key(), token: Token::from_u64(4096), attempt: 2 },
            Event::RetryWindowShort { p999: Duration::from_secs(80), retention: Duration::from_secs(100) },
            Event::FreshKeyPerRetry { count: 5 },
            Event::Poisoned(Error::closed()),
            Event::Damaged(Error::corrupt("segment-00000001.keyonce", 8192, "its checksum fails")),
            Event::Full { retry_after: Duration::from_secs(1) },
            Event::SlowSync { took: Duration::from_millis(1500) },
        ]
    }

    fn listening(on_event: impl Fn(&Event) + Send + Sync + 'static) -> Listener {
        Listener::new(Some(OnEvent(Arc::new(on_event))))
    }

    /// A listener, and what it has heard.
    fn recorder() -> (Listener, Arc<Mutex<Vec<String>>>) {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let into = Arc::clone(&heard);
        (listening(move |event| into.lock().push(event.to_string())), heard)
    }

    #[test]
    fn each_event_is_a_sentence_and_shows_no_raw_key() {
        let sentences = one_of_each().map(|event| {
            let (shown, debug) = (event.to_string(), format!("{event:?}"));
            for secret in ["alice", "secret", "4711"] {
                assert!(!shown.contains(secret) && !debug.contains(secret), "{shown} {debug}");
            }
            shown
        });
        let digest = format!("{:?}", key());
        assert_eq!(
            sentences,
            [
                "the store was opened after a crash with 12 keys, 3 of them interrupted",
                "the wall clock jumped ahead by 9s, and store time did not follow",
                "7 interrupted keys were forgotten before anybody found out what had become of them",
                &format!("the lease of {digest} lapsed at attempt 2 with token 4096"),
                "one retry in a thousand comes after 80s or later, and keys are kept for 100s",
                "5 requests came again within a minute under a new key: a client makes one for each try",
                "the store takes no more: the store is closed",
                "a segment cannot be given up, so the log grows: segment-00000001.keyonce is corrupt at byte 8192: its \
                 checksum fails",
                "the store is full and refuses new keys for 1s",
                "a data sync took 1.5s",
            ]
        );
        let created = Event::Opened(OpenReport { created: true, ..OpenReport::default() });
        assert_eq!(created.to_string(), "a new store was created");
        let back = Event::clock_jumped(&HeldJump { expected_wall_ms: T0, wall_ms: T0 - 500, store_ms: T0 });
        assert_eq!(back.to_string(), "the wall clock jumped back by 500ms, and store time did not follow");
    }

    #[test]
    fn what_must_be_rare_is_told_once_in_its_time_and_the_rest_each_time() {
        for event in one_of_each() {
            let (listener, heard) = recorder();
            let told = |now_ms| {
                heard.lock().clear();
                listener.tell(&event, now_ms);
                heard.lock().len() == 1
            };
            let pause_ms = match event {
                Event::Opened(_) | Event::LeaseLapsed { .. } | Event::Poisoned(_) | Event::Damaged(_) => 0,
                Event::ClockJumped { .. } | Event::RetryWindowShort { .. } => HOUR_MS,
                _ => MINUTE_MS,
            };
            assert!(told(T0), "{event}");
            if pause_ms == 0 {
                assert!(told(T0), "{event}");
            } else {
                assert!(!told(T0) && !told(T0 + 1) && !told(T0 + pause_ms - 1), "{event}");
                assert!(told(T0 + pause_ms), "{event}");
                assert!(!told(T0 + 2 * pause_ms - 1), "{event}");
            }
        }
    }

    #[test]
    fn events_of_one_sort_do_not_hold_back_those_of_another() {
        let (listener, heard) = recorder();
        for event in one_of_each() {
            listener.tell(&event, T0);
        }
        assert_eq!(heard.lock().len(), one_of_each().len());
    }

    #[test]
    fn of_many_threads_at_one_moment_one_tells() {
        let (listener, heard) = recorder();
        std::thread::scope(|threads| {
            for _ in 0..8 {
                threads.spawn(|| {
                    for minute in 0..100 {
                        listener.tell(&Event::Full { retry_after: Duration::ZERO }, T0 + minute * MINUTE_MS);
                    }
                });
            }
        });
        let told = heard.lock().len();
        assert!((1..=100).contains(&told), "{told} times in a hundred minutes");
    }

    #[test]
    fn a_listener_that_panics_harms_nobody_and_is_told_the_next_event() {
        let heard = Arc::new(UnmodelledAtomicU64::new(0));
        let count = Arc::clone(&heard);
        let listener = listening(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            std::panic::panic_any("a fault of the listener's own");
        });
        for event in one_of_each() {
            listener.tell(&event, T0);
        }
        assert_eq!(heard.load(Ordering::Relaxed), one_of_each().len() as u64);
    }

    #[test]
    fn nobody_listens_by_default() {
        let listener = Listener::new(None);
        assert!(!listener.listens());
        listener.tell(&Event::ExpiredUnresolved { count: 1 }, T0);
        assert!(!listener.is_retry_window_in_doubt(1000, 1000, T0));
    }

    #[test]
    fn the_retry_window_is_short_from_four_fifths_on() {
        let window = Duration::from_millis(1000);
        let told = |ages_ms: &[u64]| {
            let mut ages = RetryAges::default();
            ages_ms.iter().for_each(|age_ms| ages.note(*age_ms));
            Event::retry_window_short(&ages, window)
        };
        assert!(told(&[]).is_none());
        assert!(told(&[799]).is_none());
        assert!(matches!(told(&[800]), Some(Event::RetryWindowShort { p999, retention: kept })
            if p999 == Duration::from_millis(800) && kept == window));
        // One in a thousand may be late; two may not.
        let mut ages_ms = vec![5; 1998];
        ages_ms.extend([900, 900]);
        assert!(told(&ages_ms).is_none());
        ages_ms.push(900);
        assert!(told(&ages_ms).is_some());
    }

    #[test]
    fn the_ages_are_looked_at_when_a_late_duplicate_comes_and_once_a_minute() {
        let (listener, _) = recorder();
        let looks = |age_ms, now_ms| listener.is_retry_window_in_doubt(age_ms, 1000, now_ms);
        assert!(!looks(0, T0) && !looks(799, T0));
        assert!(looks(800, T0));
        assert!(!looks(800, T0) && !looks(1000, T0 + MINUTE_MS - 1));
        assert!(looks(u64::MAX, T0 + MINUTE_MS));
    }

    #[test]
    fn an_event_can_be_sent_to_another_thread() {
        fn assert_sendable<T: Send + Sync + 'static>() {}
        assert_sendable::<Event>();
        assert_sendable::<Listener>();
    }
}
