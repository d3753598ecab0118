//! What can fail, as one type.
//!
//! The outcomes of the store's one question are no errors and are not here. An [`Error`] prints one sentence that never
//! holds a raw key; what caused it is its `source`.

use std::error;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

use crate::key::InvalidKey;

/// How long to wait before a full disk is tried again: the store itself tries each second.
const DISK_FULL_RETRY_AFTER: Duration = Duration::from_secs(1);

/// Why a call failed.
///
/// [`kind`](Self::kind) tells what to do about it, `Display` is one sentence for a person, and
/// [`source`](error::Error::source) is the cause beneath it, where there is one. It is one pointer wide and cheap to
/// clone, since one failed sync may fail many calls.
///
/// ```
/// use keyonce::{Error, ErrorKind, Key};
///
/// fn key_of(header: &str) -> Result<Key, Error> {
///     Ok(Key::new("charges", header)?)
/// }
///
/// let error = key_of("").unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::InvalidKey);
/// assert!(!error.is_transient());
/// ```
#[derive(Clone)]
pub struct Error {
    inner: Arc<Inner>,
}

struct Inner {
    kind: ErrorKind,
    message: String,
    source: Option<Box<dyn error::Error + Send + Sync>>,
}

impl Error {
    /// What sort of failure it is.
    pub fn kind(&self) -> ErrorKind {
        self.inner.kind
    }

    /// Whether the same call may succeed later without anybody mending anything: true for [`ErrorKind::Full`],
    /// [`ErrorKind::Locked`] and [`ErrorKind::Cancelled`].
    pub fn is_transient(&self) -> bool {
        match self.kind() {
            ErrorKind::Full { .. } | ErrorKind::Locked | ErrorKind::Cancelled => true,
            ErrorKind::InvalidKey
            | ErrorKind::InvalidOptions
            | ErrorKind::TooLarge
            | ErrorKind::Corrupt
            | ErrorKind::ForeignDirectory
            | ErrorKind::UnsupportedFormat
            | ErrorKind::Io
            | ErrorKind::Poisoned
            | ErrorKind::Closed
            | ErrorKind::Superseded => false,
        }
    }

    /// An error with nothing beneath it. `message` is one sentence without a full stop and without a raw key.
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { inner: Arc::new(Inner { kind, message: message.into(), source: None }) }
    }

    /// An error with the cause beneath it, which the message does not repeat.
    pub(crate) fn with_source(
        kind: ErrorKind,
        message: impl Into<String>,
        source: impl Into<Box<dyn error::Error + Send + Sync>>,
    ) -> Self {
        Self { inner: Arc::new(Inner { kind, message: message.into(), source: Some(source.into()) }) }
    }

    /// A failed operation of the operating system. `what` names it as an activity, as in `"syncing
    /// segment-00000001.keyonce"`.
    ///
    /// A full disk and an exhausted quota are `Full`; everything else is `Io`.
    pub(crate) fn io(what: impl Into<String>, source: io::Error) -> Self {
        let kind = match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                ErrorKind::Full { retry_after: DISK_FULL_RETRY_AFTER }
            }
            _ => ErrorKind::Io,
        };
        let remedy = source.raw_os_error().map(Errno::from_raw_os_error).and_then(remedy).unwrap_or_default();
        Self::with_source(kind, format!("{} failed{remedy}", what.into()), source)
    }

    /// Damage: a check that failed in `file` at byte `offset`, where no crash explains it.
    pub(crate) fn corrupt(file: &str, offset: u64, reason: &str) -> Self {
        Self::new(ErrorKind::Corrupt, format!("{file} is corrupt at byte {offset}: {reason}"))
    }

    /// A refused option. `problem` goes on after its name, as in `"must not be zero"`.
    pub(crate) fn invalid_option(option: &str, problem: impl fmt::Display) -> Self {
        Self::new(ErrorKind::InvalidOptions, format!("the option `{option}` {problem}"))
    }

    /// Bytes beyond a limit. `what` begins the sentence, as in `"the response"`.
    pub(crate) fn too_large(what: &str, bytes: usize, bytes_max: usize) -> Self {
        Self::new(ErrorKind::TooLarge, format!("{what} has {bytes} bytes, more than {bytes_max}"))
    }

    /// What a call gets once the store is closed.
    pub(crate) fn closed() -> Self {
        Self::new(ErrorKind::Closed, "the store is closed")
    }

    /// What a child made by `fork` gets of the stores of its parent.
    pub(crate) fn forked() -> Self {
        Self::new(
            ErrorKind::Closed,
            "the store is open in the process that this one was forked from, and serves that one alone",
        )
    }

    /// An act on a reservation that is no longer the latest of its key, where only an error can say so.
    pub(crate) fn superseded() -> Self {
        Self::new(ErrorKind::Superseded, "the reservation is no longer the latest of its key")
    }

    /// What every call gets after the first failed write or sync, with that failure beneath it.
    pub(crate) fn poisoned(first: Self) -> Self {
        Self::with_source(ErrorKind::Poisoned, "an earlier write or sync failed, so the store takes no more", first)
    }
}

/// What a person can do about a limit of the system, where its own words do not say it.
fn remedy(errno: Errno) -> Option<&'static str> {
    match errno {
        Errno::MFILE => Some(
            ": too many open files in this process, where each segment takes one: raise the limit (ulimit -n); larger \
             segments (the option `segment_bytes`) take fewer, once those that are there have expired",
        ),
        Errno::NFILE => Some(": too many open files in the system: raise the limit (fs.file-max)"),
        Errno::NOMEM => Some(": no memory, or more mappings than a process may have (vm.max_map_count)"),
        Errno::FBIG => Some(": files may not become that large: raise the limit (ulimit -f)"),
        _ => None,
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.inner.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Error");
        shown.field("kind", &self.inner.kind).field("message", &self.inner.message);
        if let Some(source) = &self.inner.source {
            shown.field("source", source);
        }
        shown.finish()
    }
}

impl error::Error for Error {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        self.inner.source.as_deref().map(|source| source as &(dyn error::Error + 'static))
    }
}

impl From<InvalidKey> for Error {
    fn from(invalid: InvalidKey) -> Self {
        Self::new(ErrorKind::InvalidKey, invalid.to_string())
    }
}

/// The sorts of failure, by what can be done about them.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorKind {
    /// The bytes are not a key: the id is empty, or the id or the scope is too long. The request is at fault.
    InvalidKey,
    /// An option is out of its range, or two do not go together. The message names it.
    InvalidOptions,
    /// A response, checkpoint or reference is beyond its limit. Nothing was written.
    TooLarge,
    /// There is no room for the next segment on the disk, or in the quota. Nothing was written and nothing was lost.
    Full {
        /// When it is worth trying again.
        retry_after: Duration,
    },
    /// Another store has the directory open, in this process or in another.
    Locked,
    /// Bytes fail their checks where no crash explains it. The message names file, offset and reason; nothing was
    /// changed. Keep a copy of the directory, then restore one from before, or begin a new one and treat every key of
    /// the last window as interrupted. Removing `hint-*` files is always safe and mends nothing else.
    Corrupt,
    /// The directory holds something else, or parts of another store. Nothing was changed.
    ForeignDirectory,
    /// The store was written by a newer version of this crate. Nothing was changed.
    UnsupportedFormat,
    /// The operating system refused an operation; the source says why.
    Io,
    /// An earlier write or sync failed, so nothing more is written. Close the store, mend the disk, open it again.
    Poisoned,
    /// The store is closed; or this process is a child that was forked from the one that opened it, which has it still.
    Closed,
    /// The caller asked for the call to stop.
    Cancelled,
    /// The reservation is no longer the latest of its key: another owner, or an operator, decides the key's fate.
    /// Nothing was changed. Drop the guard and ask about the key anew, as after
    /// [`Completion::Superseded`](crate::Completion::Superseded).
    Superseded,
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    fn assert_send_and_sync<T: Send + Sync + 'static>() {}

    #[test]
    fn an_error_is_one_pointer_and_goes_anywhere() {
        assert_eq!(size_of::<Result<(), Error>>(), size_of::<usize>());
        assert_send_and_sync::<Error>();
    }

    #[test]
    fn a_full_disk_and_a_used_up_quota_are_full_and_transient() {
        for raw in [rustix::io::Errno::NOSPC, rustix::io::Errno::DQUOT] {
            let error = Error::io("allocating a segment", raw.into());
            assert_eq!(error.kind(), ErrorKind::Full { retry_after: Duration::from_secs(1) });
            assert!(error.is_transient());
        }
    }

    #[test]
    fn every_other_failed_operation_is_io_with_its_cause() {
        for raw in [rustix::io::Errno::IO, rustix::io::Errno::ROFS, rustix::io::Errno::ACCESS, rustix::io::Errno::NXIO]
        {
            let error = Error::io("syncing segment-00000001.keyonce", raw.into());
            assert_eq!(error.kind(), ErrorKind::Io);
            assert!(!error.is_transient());
            assert_eq!(error.to_string(), "syncing segment-00000001.keyonce failed");
            let source = error.source().and_then(|source| source.downcast_ref::<io::Error>()).unwrap();
            assert_eq!(source.raw_os_error(), Some(raw.raw_os_error()));
        }
    }

    #[test]
    fn a_limit_of_the_system_is_told_with_what_can_be_done_about_it() {
        let remedies = [
            (Errno::MFILE, "ulimit -n"),
            (Errno::MFILE, "segment_bytes"),
            (Errno::NFILE, "fs.file-max"),
            (Errno::NOMEM, "vm.max_map_count"),
            (Errno::FBIG, "ulimit -f"),
        ];
        for (errno, remedy) in remedies {
            let error = Error::io("preparing segment-00000001.keyonce", errno.into());
            assert_eq!(error.kind(), ErrorKind::Io);
            assert!(error.to_string().contains(remedy), "{error}");
        }
    }

    #[test]
    fn corruption_names_file_offset_and_reason() {
        let error = Error::corrupt("segment-00000002.keyonce", 8192, "the checksum is wrong");
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert_eq!(error.to_string(), "segment-00000002.keyonce is corrupt at byte 8192: the checksum is wrong");
    }

    #[test]
    fn poison_hands_the_first_failure_to_everybody() {
        let first = Error::io("syncing the log", io::Error::from(rustix::io::Errno::IO));
        let (one, other) = (Error::poisoned(first.clone()), Error::poisoned(first).clone());
        for error in [one, other] {
            assert_eq!(error.kind(), ErrorKind::Poisoned);
            assert_eq!(error.source().unwrap().to_string(), "syncing the log failed");
        }
    }

    #[test]
    fn exactly_full_locked_and_cancelled_are_transient() {
        let full = ErrorKind::Full { retry_after: Duration::ZERO };
        let cases = [
            (ErrorKind::InvalidKey, false),
            (ErrorKind::InvalidOptions, false),
            (ErrorKind::TooLarge, false),
            (full, true),
            (ErrorKind::Locked, true),
            (ErrorKind::Corrupt, false),
            (ErrorKind::ForeignDirectory, false),
            (ErrorKind::UnsupportedFormat, false),
            (ErrorKind::Io, false),
            (ErrorKind::Poisoned, false),
            (ErrorKind::Closed, false),
            (ErrorKind::Cancelled, true),
            (ErrorKind::Superseded, false),
        ];
        for (kind, transient) in cases {
            assert_eq!(Error::new(kind, "it failed").is_transient(), transient, "{kind:?}");
        }
    }

    #[test]
    fn an_invalid_key_and_an_excess_are_told_in_numbers() {
        let error = Error::from(InvalidKey::IdTooLong { bytes: 256 });
        assert_eq!(error.kind(), ErrorKind::InvalidKey);
        assert_eq!(error.to_string(), "the id of the key has 256 bytes, more than 255");
        let error = Error::too_large("the response", 11, 10);
        assert_eq!(error.kind(), ErrorKind::TooLarge);
        assert_eq!(error.to_string(), "the response has 11 bytes, more than 10");
    }
}
