//! A process dies between the charge and its completion; the next one finds out what happened, and charges nobody
//! twice.
//!
//! ```text
//! cargo run --example crash_and_recover [DIRECTORY]
//! ```
//!
//! The program runs itself three times as a child that aborts in the middle of an order. Then it opens the store and
//! is told `Interrupted` for each of the three. There are three ways out, and which one is right depends on what the
//! receiver of the effect, here the payment provider, can tell and do:
//!
//! - it can be asked and knows of the charge: `resolve`, with the answer that the child would have stored;
//! - it can be asked and knows nothing: `release`, and a retry runs as if the order were new;
//! - it cannot be asked, but honours keys: `take_over`, and charge again under the same downstream key.

use std::error::Error;
use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, abort};

use keyonce::{Body, Cause, Completion, Fingerprint, Interrupted, Key, Options, Reserve, Store};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const AMOUNT: &str = "9.99 EUR";

/// Where a child dies.
const BEFORE_THE_CHARGE: &str = "before-the-charge";
const AFTER_THE_CHARGE: &str = "after-the-charge";

fn main() -> Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    let temporary = tempfile::tempdir()?;
    let dir = arguments.next().map_or_else(|| temporary.path().to_owned(), PathBuf::from);
    match (arguments.next(), arguments.next()) {
        (None, _) => parent(&dir),
        (Some(order), Some(moment)) => child(&dir, &order.to_string_lossy(), &moment.to_string_lossy()),
        (Some(_), None) => Err("usage: crash_and_recover [DIRECTORY]".into()),
    }
}

/// Charges an order, but dies on the way.
fn child(dir: &Path, order: &str, moment: &str) -> Result<()> {
    let store = Store::open(dir.join("keys"), Options::default())?;
    match store.reserve(&key(order)?, request())? {
        Reserve::Fresh(reservation) => {
            if moment == AFTER_THE_CHARGE {
                Provider::at(dir).charge(&reservation.downstream_key("charge"))?;
            }
            abort() // as a `kill -9`, the end of memory, or a power cut would
        }
        other => Err(surprise(&other)),
    }
}

fn parent(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir)?;
    for (order, moment) in
        [("order-1", AFTER_THE_CHARGE), ("order-2", BEFORE_THE_CHARGE), ("order-3", AFTER_THE_CHARGE)]
    {
        let ended = Command::new(std::env::current_exe()?).arg(dir).args([order, moment]).status()?;
        assert_eq!(ended.code(), None, "a signal ended the child");
        println!("{order}: a child died {moment}: {ended}");
    }
    let provider = Provider::at(dir);
    let store = Store::open(dir.join("keys"), Options::default())?;
    let opened = store.opened();
    println!("opened: clean {}, interrupted keys {}", opened.clean, opened.interrupted);
    assert_eq!((opened.clean, opened.interrupted), (false, 3));

    for order in ["order-1", "order-2"] {
        let unknown = interrupted(&store, order)?;
        find_out(unknown, &provider, order)?;
    }
    // Order 2 is free again: a retry of the client runs it.
    charge(store.reserve(&key("order-2")?, request())?, &provider, "order-2")?;
    // For order 3 the provider is not asked; it is trusted to honour the key.
    let unknown = interrupted(&store, "order-3")?;
    charge(unknown.take_over()?, &provider, "order-3")?;

    for order in ["order-1", "order-2", "order-3"] {
        match store.reserve(&key(order)?, request())? {
            Reserve::Replay(response) => {
                assert_eq!(response.body(), Body::Kept(answer().as_bytes()));
                println!("{order}: a retry is answered \"{}\" of attempt {}", answer(), response.attempt());
            }
            other => return Err(surprise(&other)),
        }
        let charges = provider.charges_under(&key(order)?.downstream_key("charge"))?;
        assert_eq!(charges, 1, "{order} was charged {charges} times");
    }
    println!("three orders, three crashes, three charges");
    Ok(())
}

/// Settles an interrupted key by what the provider says.
fn find_out(unknown: Interrupted, provider: &Provider, order: &str) -> Result<()> {
    // The child is gone (`Crash`), so no charge of it can still come. After a lapsed lease one could.
    assert_eq!(unknown.cause(), Cause::Crash);
    let settled = if provider.charges_under(&unknown.downstream_key("charge"))? > 0 {
        println!("{order}: the provider has charged it: resolve");
        unknown.resolve(answer().as_bytes())?
    } else {
        println!("{order}: the provider knows nothing of it: release");
        unknown.release()?
    };
    assert_eq!(settled, Completion::Done, "nobody else settles keys here");
    Ok(())
}

/// Does the work of a fresh key.
fn charge(answered: Reserve, provider: &Provider, order: &str) -> Result<()> {
    match answered {
        Reserve::Fresh(reservation) => {
            println!("{order}: attempt {} charges under the downstream key", reservation.attempt());
            provider.charge(&reservation.downstream_key("charge"))?;
            assert_eq!(reservation.complete(answer().as_bytes())?, Completion::Done);
            Ok(())
        }
        other => Err(surprise(&other)),
    }
}

fn interrupted(store: &Store, order: &str) -> Result<Interrupted> {
    match store.reserve(&key(order)?, request())? {
        Reserve::Interrupted(unknown) => Ok(unknown),
        other => Err(surprise(&other)),
    }
}

fn key(order: &str) -> Result<Key> {
    Ok(Key::new("shop-7/charges", order)?)
}

fn request() -> Fingerprint {
    Fingerprint::of(AMOUNT)
}

fn answer() -> String {
    format!("charged {AMOUNT}")
}

fn surprise(answer: &Reserve) -> Box<dyn Error> {
    format!("this answer is a surprise: {answer:?}").into()
}

/// Stands for a payment provider that honours keys: a file outside the store, with a line for each charge.
struct Provider {
    ledger: PathBuf,
}

impl Provider {
    fn at(dir: &Path) -> Self {
        Self { ledger: dir.join("provider.txt") }
    }

    /// Charges, unless it has charged under this key before.
    fn charge(&self, downstream_key: &str) -> Result<()> {
        if self.charges_under(downstream_key)? == 0 {
            let mut ledger = OpenOptions::new().create(true).append(true).open(&self.ledger)?;
            writeln!(ledger, "{downstream_key} {AMOUNT}")?;
        }
        Ok(())
    }

    fn charges_under(&self, downstream_key: &str) -> Result<usize> {
        let ledger = match fs::read_to_string(&self.ledger) {
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            ledger => ledger?,
        };
        Ok(ledger.lines().filter(|line| line.starts_with(downstream_key)).count())
    }
}
