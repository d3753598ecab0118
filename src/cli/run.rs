//! `keyonce run`: a command that runs once per key.
//!
//! The directory's lock is held around the calls on the store alone, so that the commands of many keys run side by
//! side:
//!
//! 1. Open, reserve, save a checkpoint that names this process. Only then start the command; save a checkpoint that
//!    names it, too, detach the reservation under a durable lease, close.
//! 2. Pass on what the command writes, as it comes, and record it; wait for its end.
//! 3. Open again, go on with the reservation by its token, complete it with what was recorded.
//!
//! A repeat that finds a detached reservation looks up the runner that the checkpoint names. One that is gone can no
//! longer complete: the repeat goes on with the reservation and interrupts it, so nobody waits for a lease to lapse.

use std::ffi::OsString;
use std::io::{self, ErrorKind as IoKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, SystemTime};

use clap::{Args, ValueEnum};
use jiff::{SignedDuration, Span, SpanRelativeTo, Timestamp};
use keyonce::{
    Body, Completion, Error, ErrorKind, Fingerprint, InFlight, Interrupted, Key, KeyInfo, Mismatch, NotReattached,
    Options, Reservation, Reserve, ReserveOptions, Response, Retention, Store, Token,
};

use super::listen::{Outlets, listen};
use super::output::{Ending, HEAD_BYTES, Output, Recorded, Recorder};
use super::runner::{Life, Runner};
use super::{Failure, KEYONCE_FAILED, say};

/// Another runner is at work on the key.
const STILL_RUNNING: u8 = 119;
/// Another process had the directory open for longer than `--lock-wait`.
const LOCKED: u8 = 120;
/// The command was started before, and whether it took effect is unknown.
const INTERRUPTED: u8 = 121;
/// The key stands for another command line or input.
const MISMATCH: u8 = 122;
/// The key may already have been forgotten.
const TOO_OLD: u8 = 123;
/// The command ran, its output was not kept.
const NOT_KEPT: u8 = 124;
/// The command was found and could not be executed.
const NOT_EXECUTABLE: u8 = 126;
/// The command was not found.
const NOT_FOUND: u8 = 127;

/// How long a command that has ended waits for the directory, so that its answer is stored. Whoever has the directory
/// open holds it for a few syncs.
const COMPLETE_LOCK_WAIT: Duration = Duration::from_secs(600);
/// The most of standard input that `--stdin` takes.
const STDIN_BYTES_MAX: u64 = 16 << 20;
/// The largest cap on stored output: the store's largest response.
const OUTPUT_BYTES_MAX: usize = 16 << 20;
/// The keys of a window that the store's files are laid out for; more are welcome.
const KEYS_PLANNED: f64 = 10_000.0;
/// What the command line's fingerprint begins with, so that no other use of the store gives the same.
const FINGERPRINT_LABEL: &str = "keyonce run 1";
/// The label of the downstream key that the command is given.
const DOWNSTREAM_LABEL: &str = "keyonce run";

/// Run a command once per key; a repeat gets its output and exit status again, without running it.
///
/// The first time, COMMAND runs: its standard output and standard error are passed on as they come, and stored together
/// with its exit status. Each repeat with the same key gets both outputs and the status byte for byte, and does not run
/// it, for as long as the retention says. The same key with another command line is refused.
///
/// Stored means on the disk: when `keyonce run` ends with the command's status, the answer survives power loss. If it
/// is killed before that, whether the command took effect is unknown: a repeat says so and does not run it again,
/// unless told `--on-interrupted take-over`.
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP, after_long_help = AFTER_LONG_HELP)]
pub(crate) struct RunArgs {
    /// The directory of the store; made if it does not exist. Not on a network file system
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,

    /// What keeps equal keys of different jobs apart: 0 to 255 bytes
    #[arg(long, value_name = "SCOPE")]
    scope: OsString,

    /// The idempotency key: 1 to 255 bytes of any kind
    #[arg(long, value_name = "KEY")]
    key: OsString,

    /// How long the answer is kept, from the command's end; at most 100 years
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = duration)]
    retention: Duration,

    /// How long to wait while another process has the directory open. Runs of other keys hold it for moments only:
    /// while they begin, and while they end
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration)]
    lock_wait: Duration,

    /// What to do when an earlier run of the key was stopped half-way
    #[arg(long, value_name = "POLICY", value_enum, default_value_t = OnInterrupted::Surface)]
    on_interrupted: OnInterrupted,

    /// Read standard input to its end (at most 16 MiB), make it part of what the key stands for, and give it to the
    /// command. Without this the command reads an empty input
    #[arg(long)]
    stdin: bool,

    /// How many bytes of output are stored, framing included (16, and 8 for each change between the two outputs); up to
    /// 16MiB. A command that writes more runs all the same, and repeats are told that its output was not kept. Larger
    /// caps make larger files
    #[arg(long, value_name = "BYTES|KiB|MiB", default_value = "1MiB", value_parser = output_bytes)]
    output_max: usize,

    /// How long the command counts as running when that cannot be looked up, as from another container. A command that
    /// runs longer than this and the retention together is forgotten
    #[arg(long, value_name = "DURATION", default_value = "7d", value_parser = duration)]
    lease: Duration,

    /// When the key was made, as in 2026-07-01T09:30:00Z; one older than the retention may have been forgotten, and is
    /// refused
    #[arg(long, value_name = "TIME")]
    issued_at: Option<Timestamp>,

    /// The command and its arguments; no shell is involved
    #[arg(required = true, last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// What a repeat does about a run that was stopped half-way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OnInterrupted {
    /// Say so, and end with status 121
    Surface,
    /// Run the command again, as the next attempt; what the earlier one started is left alone, and may be running still
    TakeOver,
}

const AFTER_HELP: &str = "See 'keyonce run --help' for exit statuses and examples.";

const AFTER_LONG_HELP: &str = "\
Exit status:
  that of the command; 128 + n if signal n ended it. Else, with a sentence on standard error:
  119  the command of this key is still running
  120  another process has the directory open
  121  interrupted: an earlier run was stopped half-way, its outcome is unknown
  122  the key stands for another command line, or other standard input
  123  the key is older than the retention, and may have been forgotten
  124  the command ran before, but its output was not kept
  125  keyonce itself failed
  126  the command cannot be executed; it can be tried again
  127  the command was not found; it can be tried again

Environment of the command:
  KEYONCE_DOWNSTREAM_KEY  32 hexadecimal digits, the same in every attempt of the key: pass
                          them on to a receiver that honours idempotency keys
  KEYONCE_ATTEMPT         1, and one more each time it is run again after an interruption

Signals:
  keyonce handles none. Ctrl-C reaches it and the command alike: keyonce ends at once, and the
  key is interrupted. SIGTERM or SIGKILL to keyonce alone ends it, and leaves the command
  running without anybody who reads its output.

A run is over when the command has ended and both its outputs are closed, also by what it
started in the background. The working directory and the environment are not part of what a
key stands for.

Examples:
  Send an invoice once, however often the job is retried:
    keyonce run --dir /var/lib/jobs --scope invoices --key 2026-07/4711 -- send-invoice 4711
  Remember for 30 days; wait for the directory; run again after a crash:
    keyonce run --dir /var/lib/jobs --scope billing --key 2026-07 --retention 30d \\
        --lock-wait 10s --on-interrupted take-over -- close-month 2026-07
  The input is part of the request:
    keyonce run --dir /var/lib/jobs --scope payments --key \"$KEY\" --stdin -- \\
        curl -sS -d @- \"$URL\" < payment.json";

/// Reads a duration such as `24h`, `7d` or `1m 30s`; a day has 24 hours, and what has no fixed length is refused.
fn duration(text: &str) -> Result<Duration, Box<dyn std::error::Error + Send + Sync>> {
    let span: Span = text.parse()?;
    let signed = span
        .to_duration(SpanRelativeTo::days_are_24_hours())
        .map_err(|_| "a duration is told in weeks, days, hours, minutes and seconds")?;
    Duration::try_from(signed).map_err(|_| "a duration must not be negative".into())
}

/// Reads a number of bytes such as `4096`, `64KiB` or `1MiB`.
fn output_bytes(text: &str) -> Result<usize, Box<dyn std::error::Error + Send + Sync>> {
    let units = [("MiB", 1 << 20), ("KiB", 1 << 10)];
    let unit = units.into_iter().find_map(|(name, bytes)| Some((text.strip_suffix(name)?, bytes)));
    let (number, unit) = unit.unwrap_or((text, 1));
    let bytes = number.trim_end().parse::<usize>()?.saturating_mul(unit);
    if bytes > OUTPUT_BYTES_MAX {
        return Err(format!("at most {OUTPUT_BYTES_MAX} bytes can be kept").into());
    }
    Ok(bytes)
}

/// Runs the command, or says what is known of its key.
pub(crate) fn run(args: &RunArgs) -> ExitCode {
    match execute(args) {
        Ok(status) => ExitCode::from(status),
        Err(failure) => failure.tell(),
    }
}

fn execute(args: &RunArgs) -> Result<u8, Failure> {
    let key = Key::new(args.scope.as_bytes(), args.key.as_bytes())
        .map_err(|error| Failure::of("the scope and key cannot be used", error))?;
    let input = if args.stdin { Some(read_input()?) } else { None };
    let fingerprint = fingerprint(&args.command, input.as_deref());
    let outlets = Outlets::open()?;
    let store = open(args, args.lock_wait)?;
    match ask(args, &store, &key, fingerprint)? {
        Asked::Owner(reservation) => run_once(args, store, reservation, input, outlets),
        Asked::Replay(response) => {
            close(&store);
            replay(&response, outlets)
        }
    }
}

/// Reads standard input whole.
fn read_input() -> Result<Vec<u8>, Failure> {
    let mut input = Vec::new();
    let read = io::stdin().lock().take(STDIN_BYTES_MAX + 1).read_to_end(&mut input);
    read.map_err(|error| Failure::of("standard input cannot be read", error))?;
    if input.len() as u64 > STDIN_BYTES_MAX {
        let sentence = format!("standard input has more than {STDIN_BYTES_MAX} bytes, the most that --stdin takes");
        return Err(Failure::new(KEYONCE_FAILED, sentence));
    }
    Ok(input)
}

/// What the key stands for: the command, its arguments, and its input where that is given.
fn fingerprint(command: &[OsString], input: Option<&[u8]>) -> Fingerprint {
    let mut parts: Vec<&[u8]> = vec![FINGERPRINT_LABEL.as_bytes()];
    match input {
        Some(input) => parts.extend([&b"input"[..], input]),
        None => parts.push(b"no input"),
    }
    parts.extend(command.iter().map(|argument| argument.as_bytes()));
    Fingerprint::of_parts(parts)
}

fn open(args: &RunArgs, lock_wait: Duration) -> Result<Store, Failure> {
    let window_s = args.retention.as_secs_f64();
    let keys_per_second = if window_s > 0.0 { KEYS_PLANNED / window_s } else { 1.0 };
    let options = Options::new()
        .retention(Retention::new(args.retention, keys_per_second))
        .response_bytes_max(args.output_max.max(HEAD_BYTES))
        .lock_wait(lock_wait);
    Store::open(&args.dir, options).map_err(|error| match error.kind() {
        ErrorKind::Locked => {
            let waited = SignedDuration::try_from(lock_wait).unwrap_or(SignedDuration::MAX);
            Failure::new(
                LOCKED,
                format!("another process has the directory open; waited {waited:#}, as --lock-wait says"),
            )
        }
        _ => Failure::of(format!("the store in {} cannot be opened", args.dir.display()), error),
    })
}

/// Lets the directory go. What was answered before is durable already, so a failure here takes nothing back.
fn close(store: &Store) {
    if let Err(error) = store.close(Duration::ZERO) {
        say(Failure::of("the store was left without its end mark", error));
    }
}

/// What this process is to do.
enum Asked {
    /// Run the command.
    Owner(Reservation),
    /// Repeat what is stored.
    Replay(Response),
}

fn ask(args: &RunArgs, store: &Store, key: &Key, fingerprint: Fingerprint) -> Result<Asked, Failure> {
    // The lease is the one that detaching asks for: refused here if it is out of range, before the command has started.
    let mut with = ReserveOptions::new().retention(args.retention).lease(args.lease);
    if let Some(issued_at) = args.issued_at {
        with = with.issued_at(SystemTime::from(issued_at));
    }
    let failed = |error: Error| Failure::of("the key cannot be reserved", error);
    let mut answer = store.reserve_with(key, fingerprint, &with).map_err(failed)?;
    loop {
        answer = match answer {
            Reserve::Fresh(reservation) => return Ok(Asked::Owner(reservation)),
            Reserve::Replay(response) => return Ok(Asked::Replay(response)),
            Reserve::InFlight(in_flight) => {
                interrupt_if_gone(store, key, &in_flight)?;
                store.reserve_with(key, fingerprint, &with).map_err(failed)?
            }
            Reserve::Interrupted(interrupted) => take_over_if_told(args, interrupted)?.map_err(failed)?,
            Reserve::Mismatch(mismatch) => return Err(refused(&mismatch)),
            Reserve::TooOld(_) => {
                let sentence = "the key was made longer ago than the retention, and may have been forgotten";
                return Err(Failure::new(TOO_OLD, sentence));
            }
        };
    }
}

/// Interrupts a detached reservation whose runner is gone; fails when it is not.
fn interrupt_if_gone(store: &Store, key: &Key, in_flight: &InFlight) -> Result<(), Failure> {
    let info = in_flight.info();
    let runner = Runner::of_checkpoint(&info.checkpoint);
    if runner.as_ref().is_none_or(|runner| runner.life() != Life::Ended) {
        return Err(still_running(info, runner.as_ref()));
    }
    match store.reattach(key, info.token) {
        Ok(reservation) => {
            reservation.interrupt();
            Ok(())
        }
        Err(NotReattached::Store(error)) => Err(Failure::of("an interrupted key cannot be marked as such", error)),
        Err(NotReattached::InFlight | NotReattached::Superseded) => Err(still_running(info, runner.as_ref())),
    }
}

fn take_over_if_told(args: &RunArgs, interrupted: Interrupted) -> Result<Result<Reserve, Error>, Failure> {
    let info = interrupted.info();
    let runner = Runner::of_checkpoint(interrupted.checkpoint());
    // Its lease has lapsed, and it is there all the same: it can still complete.
    if let Some(runner) =
        runner.as_ref().filter(|runner| runner.attempt == info.attempt && runner.life() == Life::Running)
    {
        return Err(still_running(info, Some(runner)));
    }
    let what = what_of_command(info, runner.as_ref());
    match args.on_interrupted {
        OnInterrupted::Surface => {
            let attempt = info.attempt;
            let sentence = format!(
                "interrupted: attempt {attempt} did not finish, and its outcome is unknown; {what}; find out what it did, \
                 then run it again with --on-interrupted take-over"
            );
            Err(Failure::new(INTERRUPTED, sentence))
        }
        OnInterrupted::TakeOver => {
            say(format_args!("taking over from attempt {}, which was interrupted; {what}", info.attempt));
            Ok(interrupted.take_over())
        }
    }
}

fn still_running(info: &KeyInfo, runner: Option<&Runner>) -> Failure {
    let sentence = match runner {
        Some(Runner { process, command: Some(command), .. }) => {
            format!("the command is still running with pid {}, under the keyonce with pid {}", command.pid, process.pid)
        }
        Some(Runner { process, .. }) => {
            format!("the command is still running, under the keyonce with pid {}", process.pid)
        }
        None => "the key is still in use".to_owned(),
    };
    let seen = runner.is_some_and(|runner| runner.life() == Life::Running);
    let until = info.lease_end.and_then(|end| Timestamp::try_from(end).ok()).filter(|_| !seen);
    Failure::new(
        STILL_RUNNING,
        match until {
            Some(until) => format!("{sentence}, as far as can be told from here, and counts as such until {until:.0}"),
            None => sentence,
        },
    )
}

/// What became of the command of an interrupted key, as far as can be told.
fn what_of_command(info: &KeyInfo, runner: Option<&Runner>) -> String {
    let Some(runner) = runner else {
        return match *info.checkpoint {
            [] => "it ended before it started the command".to_owned(),
            [..] => "its checkpoint is none of `keyonce run`, so what it did cannot be told".to_owned(),
        };
    };
    let whose = if runner.attempt == info.attempt { String::new() } else { format!(" of attempt {}", runner.attempt) };
    match (runner.command, runner.command_life()) {
        (Some(command), Some(Life::Ended)) => {
            let pid = command.pid;
            format!("the command{whose} had pid {pid} and has ended, but what it started may still be running")
        }
        (Some(command), _) => format!("the command{whose} may still be running with pid {}", command.pid),
        (None, _) => {
            let pid = runner.process.pid;
            format!("the command{whose} may still be running, with a pid that keyonce (pid {pid}) did not live to note")
        }
    }
}

fn refused(mismatch: &Mismatch) -> Failure {
    let first_seen =
        Timestamp::try_from(mismatch.first_seen).map_or_else(|_| String::new(), |at| format!(" since {at:.0}"));
    let sentence = format!("the key stands for another command line or other standard input{first_seen}");
    Failure::new(MISMATCH, sentence)
}

/// Gives the stored answer again.
fn replay(response: &Response, mut outlets: Outlets) -> Result<u8, Failure> {
    let foreign = || Failure::new(KEYONCE_FAILED, "what is stored under the key was not written by `keyonce run`");
    match response.body() {
        Body::Kept(stored) => {
            let output = Output::read(stored).ok_or_else(foreign)?;
            for (stream, bytes) in output.stretches {
                outlets.of(stream).pass_on(bytes);
            }
            outlets.check("the stored output")?;
            Ok(output.ending.exit_status())
        }
        Body::NotKept { reference } => {
            let ending = Ending::read_alone(reference).ok_or_else(foreign)?;
            let status = ending.exit_status();
            let sentence =
                format!("the command ran before and ended with status {status}, but its output was not kept");
            Err(Failure::new(NOT_KEPT, sentence))
        }
    }
}

/// Runs the command as the owner of its key.
fn run_once(
    args: &RunArgs,
    store: Store,
    reservation: Reservation,
    input: Option<Vec<u8>>,
    mut outlets: Outlets,
) -> Result<u8, Failure> {
    let key = reservation.key().clone();
    let runner = Runner::this(reservation.attempt_view().number());
    let started = save(&reservation, &runner)
        .map_err(|error| Failure::of("the command was not started, since its runner cannot be noted", error))
        .and_then(|()| start(args, &reservation, input.is_some()).map_err(not_spawned));
    let mut child = match started {
        Ok(child) => child,
        Err(why) => return Err(not_started(&store, reservation, why)),
    };
    let runner = runner.with_command(child.id());
    // From here on the command runs, whatever fails: it is heard to its end before anything is said.
    let detached = save(&reservation, &runner).and_then(|()| Ok(reservation.detach(args.lease)?));
    close(&store);
    drop(store);
    let recorder = Recorder::new(args.output_max.max(HEAD_BYTES));
    let recorded = listen(&mut child, input, recorder, &mut outlets);
    let (ending, recorded) = recorded.map_err(|error| {
        Failure::of("the command was started, but it cannot be followed, and its key will be interrupted", error)
    })?;
    let status = ending.exit_status();
    let token = detached.map_err(|error| not_stored(status, error))?;
    complete(args, &key, token, status, recorded)?;
    outlets.check(&format!("the command ended with status {status}, which is stored, but its output"))?;
    Ok(status)
}

/// Says in the reservation's checkpoint who runs the command.
fn save(reservation: &Reservation, runner: &Runner) -> Result<(), Error> {
    match reservation.save_checkpoint(&runner.to_checkpoint())? {
        // Only who holds the directory's lock could take the key, and that is this process.
        Completion::Done | Completion::Superseded => Ok(()),
    }
}

fn start(args: &RunArgs, reservation: &Reservation, with_input: bool) -> io::Result<Child> {
    let (program, arguments) = args.command.split_first().ok_or(IoKind::NotFound)?;
    let attempt = reservation.attempt_view();
    Command::new(program)
        .args(arguments)
        .env("KEYONCE_DOWNSTREAM_KEY", attempt.downstream_key(DOWNSTREAM_LABEL))
        .env("KEYONCE_ATTEMPT", attempt.number().to_string())
        .stdin(if with_input { Stdio::piped() } else { Stdio::null() })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
}

/// Gives the key back, since no command was started.
fn not_started(store: &Store, reservation: Reservation, why: Failure) -> Failure {
    let released = reservation.release();
    close(store);
    match released {
        Ok(Completion::Done | Completion::Superseded) => why,
        Err(error) => Failure::of(format!("{why}; and its key cannot be given back"), error),
    }
}

/// What it means that the system did not start the command.
fn not_spawned(error: io::Error) -> Failure {
    let status = match error.kind() {
        IoKind::NotFound => NOT_FOUND,
        // The system has no room for another process now; the command itself may be fine.
        IoKind::WouldBlock | IoKind::OutOfMemory => KEYONCE_FAILED,
        _ => NOT_EXECUTABLE,
    };
    Failure::of("the command cannot be started", error).with_status(status)
}

/// Stores how the command ended and what it wrote. The caller ends with the command's status only after this.
fn complete(args: &RunArgs, key: &Key, token: Token, status: u8, recorded: Recorded) -> Result<(), Failure> {
    let store = open(args, COMPLETE_LOCK_WAIT)
        .map_err(|failure| Failure::new(KEYONCE_FAILED, format!("{}: {failure}", not_stored_sentence(status))))?;
    let taken = || {
        let sentence = "the key was taken over or forgotten meanwhile";
        Failure::new(KEYONCE_FAILED, format!("{}: {sentence}", not_stored_sentence(status)))
    };
    let reservation = store.reattach(key, token).map_err(|error| match error {
        NotReattached::Store(error) => not_stored(status, error),
        NotReattached::InFlight | NotReattached::Superseded => taken(),
    })?;
    let completed = match recorded {
        Recorded::Whole(stored) => reservation.complete(&stored),
        Recorded::TooLong { reference } => reservation.complete_without_body(&reference),
    };
    match completed {
        Ok(Completion::Done) => {
            close(&store);
            Ok(())
        }
        Ok(Completion::Superseded) => Err(taken()),
        Err(failed) => Err(not_stored(status, failed.error)),
    }
}

fn not_stored(status: u8, error: Error) -> Failure {
    Failure::of(not_stored_sentence(status), error)
}

fn not_stored_sentence(status: u8) -> String {
    format!("the command ended with status {status}, but that is not stored, and its key will be interrupted")
}
