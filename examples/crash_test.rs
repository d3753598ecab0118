//! How a service tests its own handler against crashes: at every step of the disk, and between any two.
//!
//! ```text
//! cargo run --example crash_test
//! ```
//!
//! In a service this is a `#[test]`, with the feature `testing` of `keyonce` among its dev-dependencies. The store lies
//! on a [`SimDisk`], which remembers every step that it took, and the payment provider is a double that remembers
//! before which step it was called. The handler runs once. Then, for every step, the process is taken to have died just
//! there, by a kill or by a power loss that lost any part of what was not synced: what is left is opened, the client
//! retries, and there must be one charge on its card, one answer that names it, and a receipt. The retry is killed at
//! every step, too.
//!
//! What the store itself must answer after each crash is not asked here: `keyonce::testing::Model` says that, to a test
//! that calls both.
//!
//! A test that cannot fail shows nothing. So a second handler is tested, too, which charges again when it is not sure,
//! and the program fails unless the same test finds it out.

use std::cell::RefCell;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk};
use keyonce::{Body, Completion, Fingerprint, Key, Options, Reservation, Reserve, Retention, Store};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let careful = Trial::of(InDoubt::AskTheProvider)?;
    println!("the careful handler: {} crashes, {} wrong", careful.crashes, careful.wrong.len());
    assert_eq!(careful.wrong, [""; 0]);

    let careless = Trial::of(InDoubt::ChargeAgain)?;
    println!("the careless handler: {} crashes, {} wrong, such as:", careless.crashes, careless.wrong.len());
    println!("  {}", careless.wrong.first().ok_or("the test must find what is wrong with this one")?);
    Ok(())
}

// The service.

/// What the handler does when an earlier attempt may have charged.
#[derive(Clone, Copy)]
enum InDoubt {
    AskTheProvider,
    ChargeAgain,
}

/// Handles a request, and any retry of it.
fn handle(store: &Store, provider: &Provider, in_doubt: InDoubt) -> Result<String> {
    let key = Key::new("shop-7/charges", "order-1001")?;
    let mut answer = store.reserve(&key, Fingerprint::of("9.99 EUR"))?;
    if let Reserve::Interrupted(unknown) = answer {
        answer = unknown.take_over()?;
    }
    match answer {
        Reserve::Fresh(reservation) => charge(reservation, provider, in_doubt),
        Reserve::Replay(response) => match response.body() {
            Body::Kept(answer) => Ok(String::from_utf8(answer.to_vec())?),
            Body::NotKept { .. } => Err("every answer is kept here".into()),
        },
        other => Err(format!("this answer is a surprise: {other:?}").into()),
    }
}

/// Charges and sends a receipt. The checkpoint between the two tells a later attempt that the first is done.
fn charge(reservation: Reservation, provider: &Provider, in_doubt: InDoubt) -> Result<String> {
    let downstream_key = reservation.downstream_key("charge");
    let known = match (std::str::from_utf8(reservation.checkpoint())?, in_doubt) {
        ("", InDoubt::AskTheProvider) if reservation.attempt() > 1 => provider.charge_under(&downstream_key),
        ("", _) => None,
        (charge, _) => Some(charge.to_owned()),
    };
    let charge = known.unwrap_or_else(|| provider.charge(&downstream_key));
    assert_eq!(reservation.save_checkpoint(charge.as_bytes())?, Completion::Done);
    provider.send_receipt(&charge); // twice would do no harm
    let answer = format!("paid by {charge}");
    assert_eq!(reservation.complete(answer.as_bytes())?, Completion::Done);
    Ok(answer)
}

// The test.

/// How often the process dies: in its first run, and again in the one after it.
const DEATHS: u64 = 2;

/// States of the disk that are tried for a power loss at one moment.
const IMAGES: u64 = 10;

/// What came of all crashes.
struct Trial {
    in_doubt: InDoubt,
    crashes: u64,
    wrong: Vec<String>,
}

impl Trial {
    fn of(in_doubt: InDoubt) -> Result<Self> {
        let mut trial = Self { in_doubt, crashes: 0, wrong: Vec::new() };
        trial.run(&SimDisk::new(), Vec::new(), DEATHS)?;
        Ok(trial)
    }

    /// One run of the process, on what earlier ones left: it handles the request, and then it is taken to have died
    /// everywhere on the way there, `deaths` times at most.
    fn run(&mut self, disk: &SimDisk, had_before: Vec<String>, deaths: u64) -> Result<()> {
        disk.record();
        let provider = Provider { disk: disk.clone(), had_before, had: RefCell::default() };
        let store = open(disk, DEATHS - deaths)?;
        let answer = handle(&store, &provider, self.in_doubt)?;
        drop(store);

        let effects = provider.effects();
        let charges = effects.iter().filter(|effect| effect.starts_with("charge")).count();
        if charges != 1 || answer != "paid by charge-1" || !effects.contains(&"receipt for charge-1".to_owned()) {
            self.wrong.push(format!("deaths: {}, effects: {effects:?}, answer: \"{answer}\"", DEATHS - deaths));
        }
        if deaths == 0 {
            return Ok(());
        }
        // A second death costs a second loop in the first, so it is always a kill.
        let images = if deaths == DEATHS { IMAGES } else { 0 };
        for moment in disk.moments() {
            for effects in provider.effects_at(moment.steps()) {
                self.crashes += 1;
                self.run(&moment.kill(), effects.clone(), deaths - 1)?;
                for image in moment.images(images) {
                    self.crashes += 1;
                    self.run(&image, effects.clone(), 0)?;
                }
            }
        }
        Ok(())
    }
}

/// Opens the store as the service does, on a disk of the test; `seed` differs for each opening of one disk.
fn open(disk: &SimDisk, seed: u64) -> Result<Store> {
    let options = Options::default()
        .retention(Retention::new(Duration::from_secs(3600), 1.0))
        .response_bytes_max(1000) // the less, the smaller the files that are copied for every crash
        .clock(Arc::new(ManualClock::default()));
    Ok(testing::open(disk.clone(), options, seed)?)
}

/// A double of the payment provider. It charges as often as it is told to, and can be asked under which key it did.
struct Provider {
    disk: SimDisk,
    /// The effects of earlier runs.
    had_before: Vec<String>,
    /// The effects of this run, each with how many steps the disk had taken before it.
    had: RefCell<Vec<(u64, String)>>,
}

impl Provider {
    fn charge(&self, downstream_key: &str) -> String {
        let charges = self.effects().iter().filter(|effect| effect.starts_with("charge")).count();
        let charge = format!("charge-{}", charges + 1);
        self.has(format!("{charge} under {downstream_key}"));
        charge
    }

    fn charge_under(&self, downstream_key: &str) -> Option<String> {
        let effects = self.effects();
        let (charge, _) =
            effects.iter().filter_map(|effect| effect.split_once(" under ")).find(|(_, key)| *key == downstream_key)?;
        Some(charge.to_owned())
    }

    fn send_receipt(&self, charge: &str) {
        self.has(format!("receipt for {charge}"));
    }

    fn has(&self, effect: String) {
        self.had.borrow_mut().push((self.disk.steps(), effect));
    }

    fn effects(&self) -> Vec<String> {
        self.had_before.iter().cloned().chain(self.had.borrow().iter().map(|(_, effect)| effect.clone())).collect()
    }

    /// What may have happened when the disk had taken `steps` steps: the effects before an earlier step surely, and of
    /// those before the next one none, the first, the first two, and so on.
    fn effects_at(&self, steps: u64) -> Vec<Vec<String>> {
        let had = self.had.borrow();
        let surely = self.had_before.len() + had.partition_point(|(before, _)| *before < steps);
        let perhaps = self.had_before.len() + had.partition_point(|(before, _)| *before <= steps);
        let effects = self.effects();
        (surely..=perhaps).map(|count| effects.iter().take(count).cloned().collect()).collect()
    }
}
