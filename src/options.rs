//! What a store and a single reservation can be told.
//!
//! Setters never fail. All checking is in `validate`, which names the option that is at fault and gives plain numbers:
//! behind it, nobody checks an option again.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::clock::{Clock, SystemClock, ms_rounded_up, unix_ms};
use crate::error::Error;
use crate::event::{Event, OnEvent};
use crate::retention::{
    DURATION_MS_MAX, Retention, checked_ms, checked_segment_bytes, pair_bytes, planned_segment_bytes, segment_bytes_min,
};
use crate::state::{Lease, Policy};
use crate::stats::{OnProgress, Progress};

/// The largest `response_bytes_max`.
pub(crate) const RESPONSE_BYTES_LIMIT: usize = 16 << 20;

const LEASE: Duration = Duration::from_secs(60);
const RESPONSE_BYTES: usize = 1 << 10;
const RESPONSE_BYTES_MAX: usize = 1 << 20;
const CLOCK_JUMP_MAX: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Which crash a record survives once the call that wrote it has returned.
///
/// The level of a reservation holds for its completion, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Durability {
    /// Survives power loss and a crash of the kernel, and with them every crash of the process: the call waits for a
    /// data sync, which it shares with all callers that wait at the time.
    #[default]
    PowerLoss,
    /// Survives the end of the process, however it comes (`kill -9`, abort, out of memory): the bytes are in the page
    /// cache. Power loss and a crash of the kernel may lose what was not yet synced, about a segment at most. No call
    /// waits for a sync.
    ProcessCrash,
    /// As `ProcessCrash`, and whatever is written is synced in the background within this time: power loss loses at
    /// most that and the time of one sync. For a whole store only. Above 0, to 100 years; rounded up to ms.
    Interval(Duration),
}

impl Durability {
    /// The level that survives what either of the two survives.
    pub(crate) fn stronger(self, other: Self) -> Self {
        match (self, other) {
            (Self::PowerLoss, _) | (_, Self::PowerLoss) => Self::PowerLoss,
            (Self::ProcessCrash | Self::Interval(_), Self::ProcessCrash | Self::Interval(_)) => Self::ProcessCrash,
        }
    }
}

/// How records get into the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AppendMode {
    /// A copy into a map of the file: no system call. A device that fails under the map is a signal instead of an
    /// error.
    Mapped,
    /// A positioned write: one system call a record, and a write that fails is an error.
    Positioned,
}

/// What `reserve` answers for a key whose owner never finished.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnInterrupted {
    /// Says `Interrupted`, so that the caller decides: look up what happened, take over, or give up.
    #[default]
    Surface,
    /// Takes over after a crash or a drop and says `Fresh`, with a new token and the next attempt. For work that may
    /// safely run twice. After a lapsed lease it still says `Interrupted`, since that owner may be at work; a key that
    /// was still held when its store was closed counts as lapsed, since its owner outlived the store.
    TakeOver,
    /// As `TakeOver`, also after a lapsed lease: whoever held it may still be at work, and both may take effect. Of the
    /// two, the store hears only the later one.
    TakeOverLapsed,
    /// Says `InFlight` for this long after the interruption, so that what was under way can land or come back; then as
    /// `Surface`. After a crash, whose moment nobody knows, the time counts from the opening. Above 0, to 100 years;
    /// rounded up to ms.
    Hold(Duration),
}

impl OnInterrupted {
    fn checked(self) -> Result<Self, Error> {
        match self {
            Self::Hold(held) => checked_ms("on_interrupted", held).map(|_| self),
            Self::Surface | Self::TakeOver | Self::TakeOverLapsed => Ok(self),
        }
    }

    /// The rule for one reserve at a store that was opened at `opened_ms`.
    pub(crate) fn policy(self, opened_ms: u64) -> Policy {
        match self {
            Self::Surface => Policy::Surface,
            Self::TakeOver => Policy::TakeOver { also_lapsed: false },
            Self::TakeOverLapsed => Policy::TakeOver { also_lapsed: true },
            Self::Hold(held) => Policy::Hold { ms: ms_rounded_up(held), opened_ms },
        }
    }
}

/// What dropping a reservation means, also in a panic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnDrop {
    /// The outcome is unknown: the key is interrupted.
    #[default]
    Interrupt,
    /// Nothing happened: the key is given back. Only for work that has no effect before it completes: once a completion
    /// or a detachment was tried, a drop interrupts.
    Release,
}

/// How a store is opened. Every option has a default; setters never fail, opening refuses what is out of range, by
/// name.
///
/// | option | default | range | unit |
/// |---|---|---|---|
/// | [`durability`](Self::durability) | `PowerLoss` | `Interval`: above 0, to 100 years | rounded up to ms |
/// | [`append_mode`](Self::append_mode) | `Positioned` for `PowerLoss`, else `Mapped` | | |
/// | [`lease`](Self::lease) | 60 s | above 0, to 100 years | rounded up to ms |
/// | [`renew_while_held`](Self::renew_while_held) | off | above 0, to 100 years | rounded up to ms |
/// | [`on_interrupted`](Self::on_interrupted) | `Surface` | `Hold`: above 0, to 100 years | rounded up to ms |
/// | [`on_drop`](Self::on_drop) | `Interrupt` | | |
/// | [`retention`](Self::retention) | 24 h at 200 keys/s | see [`Retention`] | |
/// | [`response_bytes`](Self::response_bytes) | 1 KiB, or the maximum if less | 0 to the maximum | bytes |
/// | [`response_bytes_max`](Self::response_bytes_max) | 1 MiB | 0 to 16 MiB | bytes |
/// | [`segment_bytes`](Self::segment_bytes) | derived | two largest records to 64 MiB, in steps of 64 KiB | bytes |
/// | [`network_file_system`](Self::network_file_system) | `false`: refused | | |
/// | [`lock_wait`](Self::lock_wait) | 0 | any; beyond 100 years counts as 100 years | rounded up to ms |
/// | [`clock`](Self::clock) | [`SystemClock`] | | |
/// | [`clock_jump_max`](Self::clock_jump_max) | 7 days | 0 to 100 years | rounded up to ms |
/// | [`on_event`](Self::on_event) | nobody listens | | |
/// | [`progress`](Self::progress) | nobody is told | | |
///
/// ```
/// use std::time::Duration;
/// use keyonce::{Durability, Options, Retention};
///
/// let options = Options::new()
///     .durability(Durability::ProcessCrash)
///     .lease(Duration::from_secs(10))
///     .retention(Retention::new(Duration::from_secs(3600), 50.0));
/// # let _ = options;
/// ```
#[derive(Clone, Debug)]
#[must_use = "options do nothing until a store is opened with them"]
pub struct Options {
    durability: Durability,
    append_mode: Option<AppendMode>,
    lease: Duration,
    renew_while_held: Option<Duration>,
    on_interrupted: OnInterrupted,
    on_drop: OnDrop,
    retention: Retention,
    response_bytes: Option<usize>,
    response_bytes_max: usize,
    segment_bytes: Option<u64>,
    network_file_system: bool,
    lock_wait: Duration,
    clock: Option<Arc<dyn Clock>>,
    clock_jump_max: Duration,
    on_event: Option<OnEvent>,
    progress: Option<OnProgress>,
}

impl Options {
    /// Every option at its default.
    pub fn new() -> Self {
        Self {
            durability: Durability::default(),
            append_mode: None,
            lease: LEASE,
            renew_while_held: None,
            on_interrupted: OnInterrupted::default(),
            on_drop: OnDrop::default(),
            retention: Retention::default(),
            response_bytes: None,
            response_bytes_max: RESPONSE_BYTES_MAX,
            segment_bytes: None,
            network_file_system: false,
            lock_wait: Duration::ZERO,
            clock: None,
            clock_jump_max: CLOCK_JUMP_MAX,
            on_event: None,
            progress: None,
        }
    }

    /// Which crash a record survives. Default [`Durability::PowerLoss`].
    pub fn durability(self, durability: Durability) -> Self {
        Self { durability, ..self }
    }

    /// How records get into the log. Default [`AppendMode::Positioned`] for [`Durability::PowerLoss`], where a sync
    /// costs far more than a system call, and [`AppendMode::Mapped`] for [`Durability::ProcessCrash`].
    pub fn append_mode(self, append_mode: AppendMode) -> Self {
        Self { append_mode: Some(append_mode), ..self }
    }

    /// How long a reservation counts as running without a renewal. Default 60 seconds; above 0, to 100 years; rounded
    /// up to whole milliseconds.
    ///
    /// Choose it longer than the work usually takes. A late completion still counts if nobody took over.
    pub fn lease(self, lease: Duration) -> Self {
        Self { lease, ..self }
    }

    /// A reservation renews its own lease for as long as it is held, at most until this long after it was made. Default
    /// off; above 0, to 100 years; rounded up to whole milliseconds.
    ///
    /// For work whose length is hard to foresee: the lease can be short, so that others are told of little waiting, and
    /// the bound says when a holder that hangs no longer counts as running. It writes nothing.
    pub fn renew_while_held(self, at_most: Duration) -> Self {
        Self { renew_while_held: Some(at_most), ..self }
    }

    /// What `reserve` answers for a key whose owner never finished. Default [`OnInterrupted::Surface`].
    pub fn on_interrupted(self, on_interrupted: OnInterrupted) -> Self {
        Self { on_interrupted, ..self }
    }

    /// What dropping a reservation means. Default [`OnDrop::Interrupt`].
    pub fn on_drop(self, on_drop: OnDrop) -> Self {
        Self { on_drop, ..self }
    }

    /// How long keys are remembered and how many come. Default 24 hours at 200 new keys a second.
    pub fn retention(self, retention: Retention) -> Self {
        Self { retention, ..self }
    }

    /// How large a response is expected to be, in bytes: the room that is kept for each unfinished key. Default 1 KiB,
    /// or `response_bytes_max` if that is less; 0 to `response_bytes_max`.
    pub fn response_bytes(self, bytes: usize) -> Self {
        Self { response_bytes: Some(bytes), ..self }
    }

    /// How large a response may be, in bytes; a larger one is refused before a byte is written. Default 1 MiB, at most
    /// 16 MiB.
    pub fn response_bytes_max(self, bytes: usize) -> Self {
        Self { response_bytes_max: bytes, ..self }
    }

    /// The size of every segment, in bytes. By default it is derived from the retention and grows from the smallest
    /// that is possible, which suits all but special needs.
    ///
    /// A multiple of 64 KiB, at least twice the largest record and at most 64 MiB. The largest record holds a response
    /// of `response_bytes_max` or a checkpoint of 64 KiB, whichever is larger.
    pub fn segment_bytes(self, bytes: u64) -> Self {
        Self { segment_bytes: Some(bytes), ..self }
    }

    /// Whether the directory may lie on a network or cluster file system (NFS, SMB, 9p, Ceph, `sshfs` and their like).
    /// Default `false`: opening refuses one, naming it.
    ///
    /// `SAFETY.md` says what such a file system must do to be trusted: its locks exclude every other machine, its
    /// mappings show what was written, and a sync that has returned has synced. Set this only if you know that of
    /// yours, and no other machine opens the directory. On Linux the kernel is asked; elsewhere nothing is refused.
    pub fn network_file_system(self, allowed: bool) -> Self {
        Self { network_file_system: allowed, ..self }
    }

    /// How long opening waits while another store has the directory open. Default 0: it fails at once. Rounded up to
    /// whole milliseconds; more than 100 years counts as 100 years.
    pub fn lock_wait(self, at_most: Duration) -> Self {
        Self { lock_wait: at_most, ..self }
    }

    /// Where time comes from. Default [`SystemClock`].
    pub fn clock(self, clock: Arc<dyn Clock>) -> Self {
        Self { clock: Some(clock), ..self }
    }

    /// How far the wall clock may have moved across boots and still be believed. Default 7 days; 0 to 100 years;
    /// rounded up to whole milliseconds.
    ///
    /// A larger jump is held once: the store's time goes on from where it was, and the jump is reported. So a wrong
    /// clock does not make the store forget live keys. One that is wrong by less than this is believed.
    pub fn clock_jump_max(self, jump: Duration) -> Self {
        Self { clock_jump_max: jump, ..self }
    }

    /// Who is told what happens to the store: see [`Event`]. Called on the thread that notices, with nothing locked.
    /// Default nobody.
    ///
    /// The store keeps the callback for as long as anything of it is left. One that keeps a [`Store`](crate::Store) in
    /// turn keeps it from being closed by the drop of its last handle: then call [`Store::close`](crate::Store::close).
    pub fn on_event(self, on_event: Arc<dyn Fn(&Event) + Send + Sync>) -> Self {
        Self { on_event: Some(OnEvent(on_event)), ..self }
    }

    /// Who is told how far an opening has come, and may call it off: before any record is read, and whenever a segment
    /// is known, from whatever thread reads it. [`ControlFlow::Break`] ends the opening with
    /// [`ErrorKind::Cancelled`](crate::ErrorKind::Cancelled), and not a byte is changed. Default nobody.
    ///
    /// ```
    /// use std::ops::ControlFlow;
    /// use keyonce::{Options, Progress};
    ///
    /// let options = Options::new().progress(|progress: &Progress| {
    ///     eprintln!("{} of {} bytes", progress.bytes_read, progress.bytes);
    ///     ControlFlow::Continue(())
    /// });
    /// # let _ = options;
    /// ```
    pub fn progress(self, progress: impl Fn(&Progress) -> ControlFlow<()> + Send + Sync + 'static) -> Self {
        Self { progress: Some(OnProgress(Arc::new(progress))), ..self }
    }

    /// The options as plain numbers, each within its range.
    pub(crate) fn validate(&self) -> Result<Checked, Error> {
        let retention_ms = self.retention.checked_window_ms()?;
        let keys = self.retention.keys();
        let response_bytes = self.checked_response_bytes()?;
        let segment_bytes_min = segment_bytes_min(self.response_bytes_max);
        let (segment_bytes_first, segment_bytes_plan) = match self.segment_bytes {
            Some(bytes) => {
                checked_segment_bytes(bytes, segment_bytes_min)?;
                (bytes, bytes)
            }
            None => (segment_bytes_min, planned_segment_bytes(keys, response_bytes).max(segment_bytes_min)),
        };
        let clock_jump_max_ms = ms_rounded_up(self.clock_jump_max);
        if clock_jump_max_ms > DURATION_MS_MAX {
            return Err(Error::invalid_option("clock_jump_max", "must not be longer than 100 years"));
        }
        let (durability, sync_every_ms, mode) = match self.durability {
            Durability::PowerLoss => (Durability::PowerLoss, None, AppendMode::Positioned),
            Durability::ProcessCrash => (Durability::ProcessCrash, None, AppendMode::Mapped),
            Durability::Interval(every) => {
                (Durability::ProcessCrash, Some(checked_ms("durability", every)?), AppendMode::Mapped)
            }
        };
        let while_held_ms = self.renew_while_held.map(|max| checked_ms("renew_while_held", max)).transpose()?;
        Ok(Checked {
            durability,
            sync_every_ms,
            append_mode: self.append_mode.unwrap_or(mode),
            lease: Lease { ms: checked_ms("lease", self.lease)?, while_held_ms: while_held_ms.unwrap_or(0) },
            on_interrupted: self.on_interrupted.checked()?,
            on_drop: self.on_drop,
            retention_ms,
            keys,
            response_bytes_max: self.response_bytes_max,
            segment_bytes_first,
            segment_bytes_plan,
            network_file_system: self.network_file_system,
            lock_wait: Duration::from_millis(ms_rounded_up(self.lock_wait).min(DURATION_MS_MAX)),
            clock: self.clock.clone().unwrap_or_else(|| Arc::new(SystemClock::new())),
            clock_jump_max_ms,
            on_event: self.on_event.clone(),
            progress: self.progress.clone(),
            pair_bytes: pair_bytes(response_bytes),
        })
    }

    fn checked_response_bytes(&self) -> Result<usize, Error> {
        let max = self.response_bytes_max;
        if max > RESPONSE_BYTES_LIMIT {
            let problem = format!("is {max}, more than {RESPONSE_BYTES_LIMIT} bytes");
            return Err(Error::invalid_option("response_bytes_max", problem));
        }
        match self.response_bytes {
            None => Ok(RESPONSE_BYTES.min(max)),
            Some(bytes) if bytes <= max => Ok(bytes),
            Some(bytes) => {
                let problem = format!("is {bytes}, more than the {max} bytes of `response_bytes_max`");
                Err(Error::invalid_option("response_bytes", problem))
            }
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self::new()
    }
}

/// [`Options`] that have been checked: every number is within its range.
#[derive(Clone, Debug)]
pub(crate) struct Checked {
    /// Which of the two levels that a record can be of; `Interval` is the lower one and `sync_every_ms`.
    pub(crate) durability: Durability,
    /// How long what is written may wait for a sync that nobody asked for.
    pub(crate) sync_every_ms: Option<u64>,
    pub(crate) append_mode: AppendMode,
    pub(crate) lease: Lease,
    pub(crate) on_interrupted: OnInterrupted,
    pub(crate) on_drop: OnDrop,
    /// The window.
    pub(crate) retention_ms: u64,
    /// The planned number of keys in a window.
    pub(crate) keys: u64,
    pub(crate) response_bytes_max: usize,
    /// The size of the first segments: the smallest that holds two of the largest records.
    pub(crate) segment_bytes_first: u64,
    /// The size up to which later segments double; not always a power of two times the first.
    pub(crate) segment_bytes_plan: u64,
    /// Whether the directory may lie on one.
    pub(crate) network_file_system: bool,
    /// At most 100 years.
    pub(crate) lock_wait: Duration,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) clock_jump_max_ms: u64,
    pub(crate) on_event: Option<OnEvent>,
    pub(crate) progress: Option<OnProgress>,
    /// What a key is planned to take in the log.
    pub(crate) pair_bytes: u64,
}

/// What a single `reserve` asks for beyond the store's options; what is not set is the store's.
///
/// | option | default | range | unit |
/// |---|---|---|---|
/// | [`retention`](Self::retention) | the store's window | above 0, to the store's window | rounded up to ms |
/// | [`lease`](Self::lease) | the store's | above 0, to 100 years | rounded up to ms |
/// | [`renew_while_held`](Self::renew_while_held) | the store's | above 0, to 100 years | rounded up to ms |
/// | [`durability`](Self::durability) | the store's | | |
/// | [`on_interrupted`](Self::on_interrupted) | the store's | | |
/// | [`on_drop`](Self::on_drop) | the store's | | |
/// | [`wait`](Self::wait) | 0 | any; beyond 100 years counts as 100 years | rounded up to ms |
/// | [`issued_at`](Self::issued_at) | not said | any; before 1970 counts as 1970 | |
///
/// ```
/// use std::time::Duration;
/// use keyonce::ReserveOptions;
///
/// let with = ReserveOptions::new().lease(Duration::from_secs(300)).wait(Duration::from_secs(2));
/// # let _ = with;
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "these options do nothing until a key is reserved with them"]
pub struct ReserveOptions {
    retention: Option<Duration>,
    lease: Option<Duration>,
    renew_while_held: Option<Duration>,
    durability: Option<Durability>,
    on_interrupted: Option<OnInterrupted>,
    on_drop: Option<OnDrop>,
    wait: Duration,
    issued_at: Option<SystemTime>,
}

impl ReserveOptions {
    /// Asks for nothing beyond the store's options.
    pub fn new() -> Self {
        Self::default()
    }

    /// How long this key is remembered: above 0, to the store's window. Ask one key always with the same: what counts is
    /// the retention of who reserved it, and `TooOld` is judged by that of who asks.
    pub fn retention(self, retention: Duration) -> Self {
        Self { retention: Some(retention), ..self }
    }

    /// How long this reservation counts as running without a renewal: above 0, to 100 years.
    pub fn lease(self, lease: Duration) -> Self {
        Self { lease: Some(lease), ..self }
    }

    /// For how long this reservation renews its own lease while it is held: above 0, to 100 years. See
    /// [`Options::renew_while_held`].
    pub fn renew_while_held(self, at_most: Duration) -> Self {
        Self { renew_while_held: Some(at_most), ..self }
    }

    /// Which crash this reservation and its completion survive: `PowerLoss` or `ProcessCrash`.
    pub fn durability(self, durability: Durability) -> Self {
        Self { durability: Some(durability), ..self }
    }

    /// What to answer if the owner of this key never finished.
    pub fn on_interrupted(self, on_interrupted: OnInterrupted) -> Self {
        Self { on_interrupted: Some(on_interrupted), ..self }
    }

    /// What dropping this reservation means.
    pub fn on_drop(self, on_drop: OnDrop) -> Self {
        Self { on_drop: Some(on_drop), ..self }
    }

    /// Waits while the key is in flight, at most this long. Default 0: answers `InFlight` at once. More than 100 years
    /// counts as 100 years.
    pub fn wait(self, at_most: Duration) -> Self {
        Self { wait: at_most, ..self }
    }

    /// When the client first made this request, so that a retry from before the retention is `TooOld` and never runs as
    /// new.
    pub fn issued_at(self, issued_at: SystemTime) -> Self {
        Self { issued_at: Some(issued_at), ..self }
    }

    /// What holds for one reservation: these options over the store's.
    pub(crate) fn validate(&self, store: &Checked) -> Result<CheckedReserve, Error> {
        let retention_ms = match self.retention {
            None => store.retention_ms,
            Some(retention) => checked_ms("retention", retention)?,
        };
        if retention_ms > store.retention_ms {
            let problem = format!("is {retention_ms} ms, longer than the store's window of {} ms", store.retention_ms);
            return Err(Error::invalid_option("retention", problem));
        }
        if let Some(Durability::Interval(_)) = self.durability {
            return Err(Error::invalid_option("durability", "of one call is `PowerLoss` or `ProcessCrash`"));
        }
        let ms = self.lease.map_or(Ok(store.lease.ms), |lease| checked_ms("lease", lease))?;
        let while_held = self.renew_while_held.map(|max| checked_ms("renew_while_held", max)).transpose()?;
        let while_held_ms = while_held.unwrap_or(store.lease.while_held_ms);
        Ok(CheckedReserve {
            retention_ms,
            lease: Lease { ms, while_held_ms },
            durability: self.durability.unwrap_or(store.durability),
            on_interrupted: self.on_interrupted.unwrap_or(store.on_interrupted).checked()?,
            on_drop: self.on_drop.unwrap_or(store.on_drop),
            wait_ms: ms_rounded_up(self.wait).min(DURATION_MS_MAX),
            issued_at_ms: self.issued_at.map(unix_ms),
        })
    }
}

/// [`ReserveOptions`] that have been checked and filled up from the store's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CheckedReserve {
    /// At most the store's window.
    pub(crate) retention_ms: u64,
    pub(crate) lease: Lease,
    pub(crate) durability: Durability,
    pub(crate) on_interrupted: OnInterrupted,
    pub(crate) on_drop: OnDrop,
    /// 0: no waiting. At most 100 years.
    pub(crate) wait_ms: u64,
    /// Milliseconds since the Unix epoch.
    pub(crate) issued_at_ms: Option<u64>,
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use crate::error::ErrorKind;
    use crate::retention::{CHECKPOINT_BYTES_MAX, SEGMENT_BYTES_MAX, SEGMENT_BYTES_STEP, state_record_bytes};

    use super::*;

    fn options_response_bytes(options: &Options) -> usize {
        options.checked_response_bytes().unwrap()
    }

    const NANOSECOND: Duration = Duration::from_nanos(1);
    const LONGEST: Duration = Duration::from_millis(DURATION_MS_MAX);
    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    fn accepted(options: Options) -> Checked {
        options.validate().unwrap()
    }

    fn assert_names<T: std::fmt::Debug>(result: Result<T, Error>, option: &str) {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOptions);
        assert!(error.to_string().contains(&format!("`{option}`")), "{error} does not name {option}");
    }

    fn refused(options: Options, option: &str) {
        assert_names(options.validate(), option);
    }

    #[test]
    fn the_defaults_are_those_of_the_table() {
        let checked = accepted(Options::default());
        assert_eq!(checked.durability, Durability::PowerLoss);
        assert_eq!(checked.append_mode, AppendMode::Positioned);
        assert_eq!(checked.lease, Lease { ms: 60_000, while_held_ms: 0 });
        assert_eq!(checked.on_interrupted, OnInterrupted::Surface);
        assert_eq!(checked.on_drop, OnDrop::Interrupt);
        assert_eq!(checked.retention_ms, 86_400_000);
        assert_eq!(checked.keys, 17_280_000);
        assert_eq!(options_response_bytes(&Options::default()), 1024);
        assert_eq!(checked.response_bytes_max, 1_048_576);
        assert_eq!(checked.lock_wait, Duration::ZERO);
        assert_eq!(checked.clock_jump_max_ms, 7 * 86_400_000);
        assert!(format!("{:?}", checked.clock).starts_with("SystemClock"));
    }

    #[test]
    fn the_append_mode_follows_the_durability_unless_it_is_set() {
        let of = |options: Options| accepted(options).append_mode;
        assert_eq!(of(Options::new().durability(Durability::ProcessCrash)), AppendMode::Mapped);
        assert_eq!(of(Options::new().append_mode(AppendMode::Mapped)), AppendMode::Mapped);
        let set = Options::new().append_mode(AppendMode::Positioned).durability(Durability::ProcessCrash);
        assert_eq!(of(set), AppendMode::Positioned);
    }

    #[test]
    fn the_lease_is_checked_at_its_limits() {
        let lease = |lease| Options::new().lease(lease);
        refused(lease(Duration::ZERO), "lease");
        assert_eq!(accepted(lease(NANOSECOND)).lease.ms, 1);
        assert_eq!(accepted(lease(Duration::from_nanos(1_000_001))).lease.ms, 2);
        assert_eq!(accepted(lease(LONGEST - NANOSECOND)).lease.ms, DURATION_MS_MAX);
        assert_eq!(accepted(lease(LONGEST)).lease.ms, DURATION_MS_MAX);
        refused(lease(LONGEST + NANOSECOND), "lease");
        refused(lease(Duration::MAX), "lease");
    }

    #[test]
    fn the_clock_jump_is_checked_at_its_limits() {
        let jump = |jump| Options::new().clock_jump_max(jump);
        assert_eq!(accepted(jump(Duration::ZERO)).clock_jump_max_ms, 0);
        assert_eq!(accepted(jump(NANOSECOND)).clock_jump_max_ms, 1);
        assert_eq!(accepted(jump(LONGEST)).clock_jump_max_ms, DURATION_MS_MAX);
        refused(jump(LONGEST + NANOSECOND), "clock_jump_max");
        refused(jump(Duration::MAX), "clock_jump_max");
    }

    #[test]
    fn a_wait_for_the_lock_has_no_illegal_length() {
        let waits = |wait| accepted(Options::new().lock_wait(wait)).lock_wait;
        assert_eq!(waits(NANOSECOND), Duration::from_millis(1));
        assert_eq!(waits(LONGEST), LONGEST);
        assert_eq!(waits(LONGEST + NANOSECOND), LONGEST);
        assert_eq!(waits(Duration::MAX), LONGEST);
    }

    #[test]
    fn a_bad_retention_is_refused_by_name() {
        refused(Options::new().retention(Retention::new(Duration::ZERO, 200.0)), "retention");
        refused(Options::new().retention(Retention::new(Duration::MAX, 200.0)), "retention");
        refused(Options::new().retention(Retention::new(Duration::from_secs(1), f64::NAN)), "retention");
    }

    #[test]
    fn response_sizes_are_checked_at_their_limits() {
        let max = |bytes| Options::new().response_bytes_max(bytes);
        assert_eq!(options_response_bytes(&max(0)), 0);
        assert_eq!(options_response_bytes(&max(1)), 1);
        assert_eq!(options_response_bytes(&max(1023)), 1023);
        assert_eq!(options_response_bytes(&max(1025)), 1024);
        assert_eq!(accepted(max(RESPONSE_BYTES_LIMIT - 1)).response_bytes_max, RESPONSE_BYTES_LIMIT - 1);
        assert_eq!(accepted(max(RESPONSE_BYTES_LIMIT)).response_bytes_max, RESPONSE_BYTES_LIMIT);
        refused(max(RESPONSE_BYTES_LIMIT + 1), "response_bytes_max");
        refused(max(usize::MAX), "response_bytes_max");
        for bytes in [0, 1, 1999, 2000] {
            assert_eq!(options_response_bytes(&max(2000).response_bytes(bytes)), bytes);
        }
        refused(max(2000).response_bytes(2001), "response_bytes");
        refused(max(0).response_bytes(1), "response_bytes");
    }

    #[test]
    fn a_given_segment_size_is_checked_at_its_limits_and_fixes_both() {
        let (step, min) = (SEGMENT_BYTES_STEP, segment_bytes_min(RESPONSE_BYTES_MAX));
        let segment = |bytes| Options::new().segment_bytes(bytes);
        for bytes in [min, min + step, SEGMENT_BYTES_MAX - step, SEGMENT_BYTES_MAX] {
            let checked = accepted(segment(bytes));
            assert_eq!((checked.segment_bytes_first, checked.segment_bytes_plan), (bytes, bytes));
        }
        for bytes in [0, 1, min - step, min - 1, min + 1, SEGMENT_BYTES_MAX - 1, SEGMENT_BYTES_MAX + 1, u64::MAX] {
            refused(segment(bytes), "segment_bytes");
        }
        refused(segment(SEGMENT_BYTES_MAX + step), "segment_bytes");
    }

    #[test]
    fn segments_start_small_and_double_up_to_a_64th_of_the_window() {
        let plan = |window_s, response_bytes_max| {
            let retention = Retention::new(Duration::from_secs(window_s), 200.0);
            let checked = accepted(Options::new().retention(retention).response_bytes_max(response_bytes_max));
            (checked.segment_bytes_first, checked.segment_bytes_plan)
        };
        assert_eq!(plan(86_400, 1 << 20), (2 * MIB + 64 * KIB, 64 * MIB));
        // 200 keys/s for 30 s at 120 + 1144 bytes a pair are 7.6 MB, and a 64th of that is 118 500 bytes.
        assert_eq!(planned_segment_bytes(6_000, 1024), 128 * KIB);
        assert_eq!(plan(30, 1 << 20), (2 * MIB + 64 * KIB, 2 * MIB + 64 * KIB));
        assert_eq!(plan(30, 4096), (192 * KIB, 192 * KIB));
        assert_eq!(plan(300, 4096), (192 * KIB, 2 * MIB));
        assert_eq!(planned_segment_bytes(1, 0), 64 * KIB);
        assert_eq!(planned_segment_bytes(u64::MAX, RESPONSE_BYTES_LIMIT), 64 * MIB);
    }

    #[test]
    fn every_legal_response_fits_twice_into_the_smallest_segment() {
        for response_bytes_max in [0, 65_535, 65_536, 65_537, RESPONSE_BYTES_MAX, RESPONSE_BYTES_LIMIT] {
            let checked = accepted(Options::new().response_bytes_max(response_bytes_max));
            let payload_bytes = response_bytes_max.max(CHECKPOINT_BYTES_MAX);
            assert!(checked.segment_bytes_first >= 2 * state_record_bytes(510, payload_bytes));
            assert!(checked.segment_bytes_first <= checked.segment_bytes_plan);
            assert!(checked.segment_bytes_plan <= SEGMENT_BYTES_MAX);
        }
    }

    #[test]
    fn a_reservation_takes_what_it_does_not_say_from_the_store() {
        let store = accepted(Options::new().on_drop(OnDrop::Release).on_interrupted(OnInterrupted::TakeOver));
        let inherited = ReserveOptions::new().validate(&store).unwrap();
        let expected = CheckedReserve {
            retention_ms: 86_400_000,
            lease: Lease { ms: 60_000, while_held_ms: 0 },
            durability: Durability::PowerLoss,
            on_interrupted: OnInterrupted::TakeOver,
            on_drop: OnDrop::Release,
            wait_ms: 0,
            issued_at_ms: None,
        };
        assert_eq!(inherited, expected);
        let said = ReserveOptions::new()
            .retention(Duration::from_secs(5))
            .lease(Duration::from_secs(6))
            .renew_while_held(Duration::from_secs(9))
            .durability(Durability::ProcessCrash)
            .on_interrupted(OnInterrupted::Surface)
            .on_drop(OnDrop::Interrupt)
            .wait(Duration::from_secs(7))
            .issued_at(UNIX_EPOCH + Duration::from_millis(8));
        let expected = CheckedReserve {
            retention_ms: 5000,
            lease: Lease { ms: 6000, while_held_ms: 9000 },
            durability: Durability::ProcessCrash,
            on_interrupted: OnInterrupted::Surface,
            on_drop: OnDrop::Interrupt,
            wait_ms: 7000,
            issued_at_ms: Some(8),
        };
        assert_eq!(said.validate(&store).unwrap(), expected);
    }

    #[test]
    fn a_reservation_is_checked_at_its_limits() {
        let window = Duration::from_secs(60);
        let store = accepted(Options::new().retention(Retention::new(window, 200.0)));
        let check = |with: ReserveOptions| with.validate(&store);
        let retention = |retention| check(ReserveOptions::new().retention(retention));
        assert_names(retention(Duration::ZERO), "retention");
        assert_eq!(retention(NANOSECOND).unwrap().retention_ms, 1);
        assert_eq!(retention(window - NANOSECOND).unwrap().retention_ms, 60_000);
        assert_eq!(retention(window).unwrap().retention_ms, 60_000);
        assert_names(retention(window + NANOSECOND), "retention");
        assert_names(retention(Duration::MAX), "retention");
        let lease = |lease| check(ReserveOptions::new().lease(lease));
        assert_names(lease(Duration::ZERO), "lease");
        assert_eq!(lease(NANOSECOND).unwrap().lease.ms, 1);
        assert_eq!(lease(LONGEST).unwrap().lease.ms, DURATION_MS_MAX);
        assert_names(lease(LONGEST + NANOSECOND), "lease");
        assert_names(lease(Duration::MAX), "lease");
        let held = |held| check(ReserveOptions::new().renew_while_held(held));
        assert_names(held(Duration::ZERO), "renew_while_held");
        assert_eq!(held(NANOSECOND).unwrap().lease, Lease { ms: 60_000, while_held_ms: 1 });
        assert_eq!(held(LONGEST).unwrap().lease.while_held_ms, DURATION_MS_MAX);
        assert_names(held(LONGEST + NANOSECOND), "renew_while_held");
        let wait_ms = |wait| check(ReserveOptions::new().wait(wait)).unwrap().wait_ms;
        assert_eq!((wait_ms(Duration::ZERO), wait_ms(NANOSECOND)), (0, 1));
        assert_eq!(wait_ms(Duration::MAX), DURATION_MS_MAX);
        let issued = |at| check(ReserveOptions::new().issued_at(at)).unwrap().issued_at_ms;
        assert_eq!(issued(UNIX_EPOCH - Duration::from_secs(1)), Some(0));
        assert_eq!(issued(UNIX_EPOCH), Some(0));
    }
}
