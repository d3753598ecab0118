//! The program's command line: which commands there are, how they say what went wrong, and with which exit status.
//!
//! What a command says goes to standard error, one sentence a line, behind `keyonce:`. No message holds a raw key.

use std::error::Error;
use std::fmt;
use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod demo;
mod listen;
mod output;
mod run;
mod runner;

/// The exit status for what is keyonce's own failure, a wrong command line among it. As `env`, `nohup` and `timeout`
/// do.
pub(crate) const KEYONCE_FAILED: u8 = 125;

/// Runs work once per key, replays its answer, and knows what happened after a crash.
#[derive(Debug, Parser)]
#[command(name = "keyonce", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(Box<run::RunArgs>),
    /// Tell the story of lost requests and lost replies, on a real store in a temporary directory.
    Demo(demo::DemoArgs),
}

/// Runs the command that the command line names.
pub(crate) fn main() -> ExitCode {
    match Cli::try_parse() {
        Ok(Cli { command: Command::Run(args) }) => run::run(&args),
        Ok(Cli { command: Command::Demo(args) }) => demo::demo(&args),
        Err(usage) => {
            let status = if usage.use_stderr() { ExitCode::from(KEYONCE_FAILED) } else { ExitCode::SUCCESS };
            match usage.print() {
                Ok(()) => status,
                Err(_) => ExitCode::from(KEYONCE_FAILED),
            }
        }
    }
}

/// Says one sentence on standard error.
pub(crate) fn say(sentence: impl fmt::Display) {
    if writeln!(std::io::stderr(), "keyonce: {sentence}").is_err() {
        // Nobody reads it, and there is no other place to say so; the exit status still tells.
    }
}

/// Why a command ends without what it was asked for: one sentence, what caused it, and the exit status.
#[derive(Debug)]
pub(crate) struct Failure {
    status: u8,
    sentence: String,
    source: Option<Box<dyn Error>>,
}

impl Failure {
    /// An end with a status of its own, which nothing else has caused.
    pub(crate) fn new(status: u8, sentence: impl Into<String>) -> Self {
        Self { status, sentence: sentence.into(), source: None }
    }

    /// A failure of keyonce, with what caused it.
    pub(crate) fn of(sentence: impl Into<String>, source: impl Error + 'static) -> Self {
        Self { source: Some(Box::new(source)), ..Self::new(KEYONCE_FAILED, sentence) }
    }

    /// The same, with another exit status.
    pub(crate) fn with_status(self, status: u8) -> Self {
        Self { status, ..self }
    }

    /// Says what went wrong, with the whole chain of causes, and gives the exit status.
    pub(crate) fn tell(&self) -> ExitCode {
        say(self);
        ExitCode::from(self.status)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)?;
        let mut cause = self.source.as_deref();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}
