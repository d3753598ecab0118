//! What a command left behind, and how it is stored: its ending, and what it wrote to its two outputs.
//!
//! | offset | bytes | |
//! |---|---|---|
//! | 0 | 8 | `kyonrun1`; the last byte is the version |
//! | 8 | 4 | 0: it exited; 1: a signal ended it |
//! | 12 | 4 | its status, or the signal's number |
//! | 16 | | stretches, in the order in which they arrived, to the end |
//!
//! A stretch is 4 bytes that say which output (1 standard output, 2 standard error), 4 bytes of length, and that many
//! bytes. Two stretches in a row are never of the same output. All numbers are little-endian. Whatever is not exactly
//! this is refused as a whole: these bytes are an answer, and half an answer is none.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// What every stored output begins with.
const MAGIC: [u8; 8] = *b"kyonrun1";
/// The bytes before the first stretch: what is stored when the output itself is not kept.
pub(crate) const HEAD_BYTES: usize = 16;
/// What a shell adds to the number of the signal that ended a command.
const SIGNAL_BASE: u8 = 128;

const EXITED: u32 = 0;
const SIGNALLED: u32 = 1;

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// It exited by itself, with this status.
    Exited(u8),
    /// The signal of this number ended it.
    Signalled(u8),
}

impl Ending {
    /// Reads what the system says; `None` for what is no ending.
    pub(crate) fn of(status: ExitStatus) -> Option<Self> {
        let signalled = || status.signal().and_then(|signal| u8::try_from(signal).ok()).map(Self::Signalled);
        status.code().and_then(|code| u8::try_from(code).ok()).map(Self::Exited).or_else(signalled)
    }

    /// The exit status that says the same, as shells have it.
    pub(crate) fn exit_status(self) -> u8 {
        match self {
            Self::Exited(status) => status,
            Self::Signalled(signal) => SIGNAL_BASE.saturating_add(signal),
        }
    }

    fn head(self) -> [u8; HEAD_BYTES] {
        let (kind, number) = match self {
            Self::Exited(status) => (EXITED, status),
            Self::Signalled(signal) => (SIGNALLED, signal),
        };
        let mut head = [0; HEAD_BYTES];
        let fields = MAGIC.into_iter().chain(kind.to_le_bytes()).chain(u32::from(number).to_le_bytes());
        for (byte, field) in head.iter_mut().zip(fields) {
            *byte = field;
        }
        head
    }

    /// Reads the head of what is stored. Returns what follows it, too.
    fn read(stored: &[u8]) -> Option<(Self, &[u8])> {
        let stretches = stored.strip_prefix(&MAGIC)?;
        let (kind, stretches) = read_u32(stretches)?;
        let (number, stretches) = read_u32(stretches)?;
        let number = u8::try_from(number).ok()?;
        match kind {
            EXITED => Some((Self::Exited(number), stretches)),
            SIGNALLED => Some((Self::Signalled(number), stretches)),
            _ => None,
        }
    }

    /// Reads what is stored in place of an output that was not kept.
    pub(crate) fn read_alone(stored: &[u8]) -> Option<Self> {
        Self::read(stored).filter(|(_, stretches)| stretches.is_empty()).map(|(ending, _)| ending)
    }
}

/// Which of the two outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

impl Stream {
    fn number(self) -> u32 {
        match self {
            Self::Out => 1,
            Self::Err => 2,
        }
    }

    fn of(number: u32) -> Option<Self> {
        [Self::Out, Self::Err].into_iter().find(|stream| stream.number() == number)
    }
}

/// Keeps what a command writes, up to a number of bytes; beyond it, nothing.
#[derive(Debug)]
pub(crate) struct Recorder {
    bytes_max: usize,
    /// The bytes to store, with room for the head; `None` once they would be too many.
    stored: Option<Vec<u8>>,
    /// Which output the last stretch is of, and where its length stands.
    last: Option<(Stream, usize)>,
}

impl Recorder {
    /// `bytes_max` counts the stored form, framing included.
    pub(crate) fn new(bytes_max: usize) -> Self {
        let stored = (bytes_max >= HEAD_BYTES).then(|| vec![0; HEAD_BYTES]);
        Self { bytes_max, stored, last: None }
    }

    /// Takes down what came from one output.
    pub(crate) fn record(&mut self, stream: Stream, bytes: &[u8]) {
        if self.append(stream, bytes).is_none() {
            self.stored = None;
        }
    }

    /// `None` when it does not fit.
    fn append(&mut self, stream: Stream, bytes: &[u8]) -> Option<()> {
        let stored = self.stored.as_mut()?;
        if bytes.is_empty() {
            return Some(());
        }
        let at = match self.last {
            Some((last, at)) if last == stream => at,
            _ => {
                stored.extend(stream.number().to_le_bytes());
                let at = stored.len();
                stored.extend([0; 4]);
                self.last = Some((stream, at));
                at
            }
        };
        stored.extend(bytes);
        let length = u32::try_from(stored.len().checked_sub(at + 4)?).ok()?;
        stored.get_mut(at..at + 4)?.copy_from_slice(&length.to_le_bytes());
        (stored.len() <= self.bytes_max).then_some(())
    }

    /// The bytes to store, now that it is known how the command ended.
    pub(crate) fn finish(self, ending: Ending) -> Recorded {
        let head = ending.head();
        let Some(mut stored) = self.stored else {
            return Recorded::TooLong { reference: head };
        };
        for (byte, field) in stored.iter_mut().zip(head) {
            *byte = field;
        }
        Recorded::Whole(stored)
    }
}

/// What there is to store.
#[derive(Debug)]
pub(crate) enum Recorded {
    /// All of it.
    Whole(Vec<u8>),
    /// The output was too long to be kept; this says how the command ended.
    TooLong {
        /// What to store in its place.
        reference: [u8; HEAD_BYTES],
    },
}

/// What is stored of a command, read back and checked.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Output<'a> {
    /// How it ended.
    pub(crate) ending: Ending,
    /// What it wrote, in the order in which it arrived.
    pub(crate) stretches: Vec<(Stream, &'a [u8])>,
}

impl<'a> Output<'a> {
    /// Reads what is stored; `None` if it is not, from the first byte to the last, what a [`Recorder`] made.
    pub(crate) fn read(stored: &'a [u8]) -> Option<Self> {
        let (ending, mut rest) = Ending::read(stored)?;
        let mut stretches = Vec::new();
        let mut last = None;
        while !rest.is_empty() {
            let (number, behind) = read_u32(rest)?;
            let (length, behind) = read_u32(behind)?;
            let stream = Stream::of(number).filter(|stream| last != Some(*stream) && length > 0)?;
            let (bytes, behind) = behind.split_at_checked(usize::try_from(length).ok()?)?;
            stretches.push((stream, bytes));
            last = Some(stream);
            rest = behind;
        }
        Some(Self { ending, stretches })
    }
}

fn read_u32(bytes: &[u8]) -> Option<(u32, &[u8])> {
    bytes.split_first_chunk().map(|(number, behind)| (u32::from_le_bytes(*number), behind))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(stretches: &[(Stream, &[u8])], bytes_max: usize, ending: Ending) -> Recorded {
        let mut recorder = Recorder::new(bytes_max);
        for (stream, bytes) in stretches {
            recorder.record(*stream, bytes);
        }
        recorder.finish(ending)
    }

    #[test]
    fn what_is_read_back_is_what_was_recorded() {
        let all: Vec<u8> = (0..=255).collect();
        let writes: [(Stream, &[u8]); 4] =
            [(Stream::Out, &all[..7]), (Stream::Out, &all[7..]), (Stream::Err, b"no\n"), (Stream::Out, b"")];
        for ending in [Ending::Exited(0), Ending::Exited(255), Ending::Signalled(9)] {
            let Recorded::Whole(stored) = recorded(&writes, 1 << 20, ending) else { panic!("it fits") };
            let output = Output::read(&stored).unwrap();
            assert_eq!(output.ending, ending);
            assert_eq!(output.stretches, [(Stream::Out, &all[..]), (Stream::Err, b"no\n")]);
        }
    }

    #[test]
    fn the_stored_form_has_these_bytes() {
        let Recorded::Whole(stored) = recorded(&[(Stream::Err, b"x")], 25, Ending::Signalled(15)) else {
            panic!("it fits")
        };
        assert_eq!(stored, *b"kyonrun1\x01\0\0\0\x0f\0\0\0\x02\0\0\0\x01\0\0\0x");
    }

    #[test]
    fn one_byte_beyond_the_cap_keeps_the_ending_alone() {
        for (bytes_max, fits) in [(25, true), (24, false), (16, false), (0, false)] {
            match recorded(&[(Stream::Out, b"x")], bytes_max, Ending::Exited(3)) {
                Recorded::Whole(_) => assert!(fits),
                Recorded::TooLong { reference } => {
                    assert!(!fits);
                    assert_eq!(Ending::read_alone(&reference), Some(Ending::Exited(3)));
                }
            }
        }
    }

    #[test]
    fn what_is_cut_or_extended_or_foreign_is_refused() {
        let writes: [(Stream, &[u8]); 2] = [(Stream::Out, b"one"), (Stream::Err, b"two")];
        let Recorded::Whole(stored) = recorded(&writes, 1 << 10, Ending::Exited(0)) else { panic!("it fits") };
        let whole_stretches = [HEAD_BYTES, HEAD_BYTES + 11];
        for end in (0..stored.len()).filter(|end| !whole_stretches.contains(end)) {
            assert_eq!(Output::read(&stored[..end]), None, "cut to {end} bytes");
        }
        for place in (0..HEAD_BYTES + 8).filter(|place| *place != 8 && *place != 12) {
            let mut other = stored.clone();
            other[place] ^= 0x40;
            assert_eq!(Output::read(&other), None, "byte {place} is another");
        }
        let mut longer = stored.clone();
        longer.push(0);
        assert_eq!(Output::read(&longer), None);
        assert_eq!(Output::read(b"paid"), None);
        assert_eq!(Ending::read_alone(&stored), None);
    }
}
