//! Following a command: what it writes is passed on as it comes, and recorded, until it ends.
//!
//! One thread reads each output and passes it on, so that one whose reader is slow does not hold up the other; what
//! they read meets in a channel, and is recorded in the order in which it arrived there.

use std::fs::File;
use std::io::{self, ErrorKind as IoKind, Read, Write};
use std::os::fd::AsFd;
use std::process::Child;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use super::Failure;
use super::output::{Ending, Recorded, Recorder, Stream};

/// How much of an output is read at once.
const CHUNK_BYTES: usize = 64 << 10;
/// Chunks that wait to be recorded.
const CHUNKS_WAITING_MAX: usize = 16;
/// The pause before writing again to an output that does not block and is full.
const FULL_OUTPUT_PAUSE: Duration = Duration::from_millis(1);

/// Passes on what the command writes, as it comes, until it has ended and its outputs are closed.
pub(crate) fn listen(
    child: &mut Child,
    input: Option<Vec<u8>>,
    mut recorder: Recorder,
    outlets: &mut Outlets,
) -> io::Result<(Ending, Recorded)> {
    let pipes = child.stdout.take().zip(child.stderr.take()).ok_or(IoKind::BrokenPipe)?;
    let feed = child.stdin.take().zip(input);
    thread::scope(|scope| {
        let (chunks, recorded) = sync_channel(CHUNKS_WAITING_MAX);
        let spawn = |name: &str| thread::Builder::new().name(name.to_owned());
        if let Some((mut pipe, input)) = feed {
            // A command that does not want all of its input closes it; what it makes of that is its own affair.
            spawn("input").spawn_scoped(scope, move || pipe.write_all(&input).is_ok())?;
        }
        let Outlets { out, err } = outlets;
        let out_chunks = chunks.clone();
        let out = spawn("output").spawn_scoped(scope, move || pump(pipes.0, Stream::Out, out, &out_chunks))?;
        let err = spawn("errors").spawn_scoped(scope, move || pump(pipes.1, Stream::Err, err, &chunks))?;
        for (stream, bytes) in recorded {
            let bytes: Vec<u8> = bytes;
            recorder.record(stream, &bytes);
        }
        for pump in [out, err] {
            pump.join().map_err(|_| io::Error::other("a thread that reads the command's output has ended early"))??;
        }
        Ok::<_, io::Error>(())
    })?;
    let ending =
        Ending::of(child.wait()?).ok_or_else(|| io::Error::other("the command's exit status cannot be read"))?;
    Ok((ending, recorder.finish(ending)))
}

/// Passes one output on until it is closed.
fn pump(
    mut pipe: impl Read,
    stream: Stream,
    outlet: &mut Outlet,
    chunks: &SyncSender<(Stream, Vec<u8>)>,
) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        let bytes = match pipe.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(read) => buffer.get(..read).unwrap_or_default(),
            Err(error) if error.kind() == IoKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        outlet.pass_on(bytes);
        if chunks.send((stream, bytes.to_vec())).is_err() {
            return Err(IoKind::BrokenPipe.into());
        }
    }
}

/// This process's own two outputs.
pub(crate) struct Outlets {
    out: Outlet,
    err: Outlet,
}

impl Outlets {
    /// Takes the two as they are, past any buffer of this program.
    pub(crate) fn open() -> Result<Self, Failure> {
        let failed = |error| Failure::of("the outputs cannot be used", error);
        let out = Outlet::on(io::stdout()).map_err(failed)?;
        let err = Outlet::on(io::stderr()).map_err(failed)?;
        Ok(Self { out, err })
    }

    /// The one that goes by this name.
    pub(crate) fn of(&mut self, stream: Stream) -> &mut Outlet {
        match stream {
            Stream::Out => &mut self.out,
            Stream::Err => &mut self.err,
        }
    }

    /// Fails if something could not be passed on. A reader that has closed its end wanted no more, and that is no
    /// failure.
    pub(crate) fn check(self, what: &str) -> Result<(), Failure> {
        let failed =
            [self.out.failed, self.err.failed].into_iter().flatten().find(|error| error.kind() != IoKind::BrokenPipe);
        match failed {
            Some(error) => Err(Failure::of(format!("{what} cannot be written"), error)),
            None => Ok(()),
        }
    }
}

/// One output, without a buffer: what is passed on is seen at once.
pub(crate) struct Outlet {
    file: File,
    /// The first failure; nothing is passed on after it.
    failed: Option<io::Error>,
}

impl Outlet {
    fn on(output: impl AsFd) -> io::Result<Self> {
        Ok(Self { file: File::from(output.as_fd().try_clone_to_owned()?), failed: None })
    }

    /// Writes all of it, unless an earlier write has failed.
    pub(crate) fn pass_on(&mut self, mut bytes: &[u8]) {
        while self.failed.is_none() && !bytes.is_empty() {
            match self.file.write(bytes) {
                Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
                Err(error) if error.kind() == IoKind::Interrupted => {}
                // Whoever shares the output has set it so that it does not block.
                Err(error) if error.kind() == IoKind::WouldBlock => thread::sleep(FULL_OUTPUT_PAUSE),
                Err(error) => self.failed = Some(error),
            }
        }
    }
}
