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
        None => play_all(args.habits, &mut Playbill::new()),
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

/// Plays every scene, each act in a directory of its own, and returns how many scenes failed.
fn play_all(habits: Habits, playbill: &mut Playbill) -> Result<usize> {
    let dir = tempfile::tempdir()?;
    let mut failed = 0;
    for (number, acts) in (1..).zip(SCENES) {
        let mut as_told = true;
        for (index, act) in (0..).zip(*acts) {
            let act_dir = dir.path().join(format!("{number}-{index}"));
            let played = Shop::open(act_dir, habits).and_then(|shop| play(act, shop));
            let number = if index == 0 {
                format!("{number}.")
            } else {
                String::new()
            };
            as_told &= playbill.tell(&number, act, played)?;
        }
        failed += usize::from(!as_told);
    }
    playbill.close(failed)?;
    Ok(failed)
}

/// What an act came to: what the client saw, and the amounts in the ledger.
struct Played {
    client_saw: String,
    charges: Vec<String>,
}

fn play(act: &Act, mut shop: Shop) -> Result<Played> {
    (act.play)(&mut shop)?;
    Ok(Played {
        client_saw: shop.client_saw(),
        charges: shop.charges()?,
    })
}

/// Prints what happened. In colour on a terminal alone.
struct Playbill {
    out: io::Stdout,
    ok: &'static str,
    failed: &'static str,
}

impl Playbill {
    fn new() -> Self {
        let out = io::stdout();
        if out.is_terminal() && std::env::var_os("NO_COLOR").is_none() {
            Self {
                out,
                ok: "\x1b[32mok    \x1b[0m",
                failed: "\x1b[1;31mFAILED\x1b[0m",
            }
        } else {
            Self {
                out,
                ok: "ok    ",
                failed: "FAILED",
            }
        }
    }

    /// Prints one act, and returns whether it went as told.
    fn tell(&mut self, number: &str, act: &Act, played: Result<Played>) -> io::Result<bool> {
        let as_told = played
            .as_ref()
            .is_ok_and(|it| it.client_saw == act.client_sees && it.charges == act.charges);
        let verdict = if as_told { self.ok } else { self.failed };
        writeln!(self.out, "{verdict} {number:<2} {}", act.title)?;
        match played {
            Ok(it) => self.tell_facts("", &it.client_saw, &it.charges)?,
            Err(error) => writeln!(self.out, "          error: {error}")?,
        }
        if !as_told {
            self.tell_facts("expected: ", act.client_sees, act.charges)?;
        }
        Ok(as_told)
    }

    fn tell_facts(&mut self, prefix: &str, client_sees: &str, charges: &[impl AsRef<str>]) -> io::Result<()> {
        let charges: Vec<&str> = charges.iter().map(AsRef::as_ref).collect();
        let charges = match charges.as_slice() {
            [] => "no charge".to_owned(),
            [one] => format!("1 charge: {one}"),
            more => format!("{} charges: {}", more.len(), more.join(", ")),
        };
        writeln!(self.out, "          {prefix}client sees: {client_sees}")?;
        writeln!(self.out, "          {prefix}ledger:      {charges}")
    }

    fn close(&mut self, failed: usize) -> io::Result<()> {
        let scenes = SCENES.len();
        match failed {
            0 => writeln!(self.out, "demo: {scenes} scenes, all as told"),
            _ => writeln!(self.out, "demo: {scenes} scenes, {failed} not as told"),
        }
    }
}
