//! `keyonce demo`: why a payment service wants an idempotency key store, told in nine scenes.
//!
//! Nothing is acted. The service is a process of its own (this program, started again with `--serve`) with a store at
//! full durability; a client with a time-out talks to it over sockets; the [`link`] between them loses messages on cue.
//! What was charged is read from the ledger, a file that the service process alone writes. Each of the [`scenes`] says
//! what the client sees and what the ledger holds; the demo compares both, and exits with 1 if anything is not as told.

use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use self::scenes::{Act, SCENES};
use self::service::Habits;
use self::shop::Shop;

mod client;
mod frame;
mod ledger;
mod link;
mod scenes;
mod service;
mod shop;

/// Anything that goes wrong is shown as a sentence, and fails the scene.
type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// What `keyonce demo` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    #[command(flatten)]
    habits: Habits,
    /// Be the payment service, with its files in this directory; the socket to the link is standard input
    #[arg(long, hide = true, value_name = "DIR")]
    serve: Option<PathBuf>,
}

/// Plays all scenes: 0 if each went as told, else 1. With `--serve`, is the payment service of one of them.
pub(crate) fn demo(args: &DemoArgs) -> ExitCode {
    let done = match &args.serve {
        Some(dir) => service::serve(dir, args.habits).map(|()| 0),
        None => play_all(args.habits),
    };
    match done {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("keyonce demo: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Plays every scene, prints what came of it, and returns how many scenes failed.
fn play_all(habits: Habits) -> Result<usize> {
    let dir = tempfile::tempdir()?;
    let mut out = io::stdout();
    let [ok, not_ok] = verdicts();
    let mut failed = 0;
    for (number, acts) in (1..).zip(SCENES) {
        let mut scene_ok = true;
        for (part, act) in acts.iter().enumerate() {
            let name = if part == 0 { format!("{number}.") } else { String::new() };
            let act_dir = dir.path().join(format!("scene-{number}-{part}"));
            let found = play(act, act_dir, habits).unwrap_or_else(|error| format!("{INDENT}error: {error}\n"));
            let expected = facts(act.client_sees, act.charges);
            if found == expected {
                write!(out, "{ok} {name:<2} {}\n{found}", act.title)?;
            } else {
                write!(out, "{not_ok} {name:<2} {}\n{found}{INDENT}but should be\n{expected}", act.title)?;
                scene_ok = false;
            }
        }
        failed += usize::from(!scene_ok);
    }
    match failed {
        0 => writeln!(out, "demo: {} scenes, all as told", SCENES.len())?,
        _ => writeln!(out, "demo: {} scenes, {failed} not as told", SCENES.len())?,
    }
    Ok(failed)
}

/// Plays one act in a shop of its own, and returns the facts.
fn play(act: &Act, dir: PathBuf, habits: Habits) -> Result<String> {
    let mut shop = Shop::open(dir, habits)?;
    (act.play)(&mut shop)?;
    let charges = shop.charges()?;
    Ok(facts(&shop.client_saw(), &charges.iter().map(String::as_str).collect::<Vec<_>>()))
}

/// The lines that an act is judged by.
fn facts(client_saw: &str, charges: &[&str]) -> String {
    let charges = match charges {
        [] => "no charge".to_owned(),
        [one] => format!("1 charge: {one}"),
        more => format!("{} charges: {}", more.len(), more.join(", ")),
    };
    format!("{INDENT}client sees: {client_saw}\n{INDENT}ledger:      {charges}\n")
}

/// How the lines below a title begin.
const INDENT: &str = "          ";

/// "ok" and "FAILED", equally wide, and in colour on a terminal.
fn verdicts() -> [&'static str; 2] {
    if io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none() {
        ["\x1b[32mok    \x1b[0m", "\x1b[1;31mFAILED\x1b[0m"]
    } else {
        ["ok    ", "FAILED"]
    }
}
