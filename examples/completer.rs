//! Work that is handed to a worker in a later run, and a completer that settles what workers left behind.
//!
//! ```text
//! cargo run --example completer [DIRECTORY]
//! ```
//!
//! The front of the service reserves an order's key, *detaches* the reservation and writes a job. A worker, in another
//! run of the process, takes the job, *reattaches* with the token that stands in it, charges, completes. Meanwhile the
//! client's retries are told `InFlight`, also across the restart.
//!
//! Workers die. What they leave is `Interrupted`, and a completer goes over those keys in the background: it asks the
//! payment provider by the downstream key, and resolves or releases each. Time is moved by hand (feature `testing`).

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use keyonce::testing::ManualClock;
use keyonce::{Body, Cause, Clock as _, Completion, Fingerprint, Key, NotReattached, Options, Reserve, Store};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// How long a job may lie in the queue, and then be worked on, before the key counts as interrupted.
const JOB_LEASE: Duration = Duration::from_secs(3600);

/// No worker lives longer than this after its lease lapsed: by then its supervisor has ended it.
const WORKER_GRACE: Duration = Duration::from_secs(900);

const ORDERS: [&str; 5] = ["well", "charged-then-died", "died-at-once", "never-taken", "twice-delivered"];

fn main() -> Result<()> {
    let temporary = tempfile::tempdir()?;
    let dir = std::env::args_os().nth(1).map_or_else(|| temporary.path().to_owned(), PathBuf::from);
    let clock = ManualClock::default();
    let mut provider = Provider::default();

    let jobs = run_of_the_front(&dir, &clock)?;
    run_of_the_workers(&dir, &clock, &jobs, &mut provider)?;
    run_of_the_completer(&dir, &clock, &mut provider)
}

/// Takes orders and answers "accepted"; the process ends, as in a deployment.
fn run_of_the_front(dir: &Path, clock: &ManualClock) -> Result<Vec<String>> {
    let store = open(dir, clock)?;
    let mut jobs = Vec::new();
    for order in ORDERS {
        match store.reserve(&key(order)?, request())? {
            Reserve::Fresh(reservation) => {
                let token = reservation.detach(JOB_LEASE)?;
                jobs.push(format!("{order} {token}"));
                println!("{order}: accepted, job written");
            }
            other => return Err(surprise(&other)),
        }
    }
    store.close(Duration::ZERO)?;
    Ok(jobs)
}

/// Does the jobs it finds, and dies with some of them.
fn run_of_the_workers(dir: &Path, clock: &ManualClock, jobs: &[String], provider: &mut Provider) -> Result<()> {
    let store = open(dir, clock)?;
    match store.reserve(&key("well")?, request())? {
        Reserve::InFlight(running) => {
            println!("well: a retry after the restart: running for {:?} more", running.retry_after())
        }
        other => return Err(surprise(&other)),
    }
    for job in jobs.iter().filter(|job| !job.starts_with("never-taken")) {
        work(&store, job, provider)?;
    }
    // At-least-once queues deliver twice.
    for job in jobs.iter().filter(|job| job.starts_with("twice-delivered")) {
        work(&store, job, provider)?;
    }
    store.close(Duration::ZERO)?;
    Ok(())
}

/// One job: "order token".
fn work(store: &Store, job: &str, provider: &mut Provider) -> Result<()> {
    let (order, token) = job.split_once(' ').ok_or("a job is an order and a token")?;
    let reservation = match store.reattach(&key(order)?, token.parse()?) {
        Ok(reservation) => reservation,
        Err(NotReattached::InFlight) => {
            println!("{order}: another worker has it");
            return Ok(());
        }
        Err(NotReattached::Superseded) => {
            println!("{order}: delivered again, and settled by now");
            return Ok(());
        }
        Err(NotReattached::Store(error)) => return Err(error.into()),
    };
    if order == "died-at-once" {
        println!("{order}: the worker dies before the charge");
        return Ok(());
    }
    provider.charge(reservation.downstream_key("charge"));
    if order == "charged-then-died" {
        println!("{order}: the worker dies after the charge");
        return Ok(());
    }
    assert_eq!(reservation.complete(ANSWER)?, Completion::Done);
    println!("{order}: charged and completed");
    Ok(())
}

/// Goes over what is interrupted, again and again; here three times.
fn run_of_the_completer(dir: &Path, clock: &ManualClock, provider: &mut Provider) -> Result<()> {
    let store = open(dir, clock)?;
    assert_eq!(complete_what_is_interrupted(&store, clock, provider)?, 2);
    clock.advance(JOB_LEASE);
    println!("an hour later:");
    assert_eq!(complete_what_is_interrupted(&store, clock, provider)?, 0, "its worker may still be at work");
    clock.advance(WORKER_GRACE);
    println!("a quarter of an hour later:");
    assert_eq!(complete_what_is_interrupted(&store, clock, provider)?, 1);

    for order in ORDERS {
        let charges = provider.charges_under(&key(order)?.downstream_key("charge"));
        match store.reserve(&key(order)?, request())? {
            Reserve::Replay(response) => {
                assert_eq!((response.body(), charges), (Body::Kept(ANSWER), 1));
                println!("{order}: a retry is answered, charges: {charges}");
            }
            Reserve::Fresh(reservation) => {
                assert_eq!(charges, 0);
                println!("{order}: a retry runs as new, charges: {charges}");
                assert_eq!(reservation.release()?, Completion::Done);
            }
            other => return Err(surprise(&other)),
        }
    }
    Ok(())
}

/// Settles every interrupted key about which something can be said now; says how many those were.
fn complete_what_is_interrupted(store: &Store, clock: &ManualClock, provider: &Provider) -> Result<u32> {
    let mut settled = 0;
    for unknown in store.interrupted() {
        let unknown = unknown?;
        let name = String::from_utf8_lossy(unknown.key().id()).into_owned();
        if unknown.cause() == Cause::LeaseLapsed && now(clock) < unknown.since + WORKER_GRACE {
            // "Not charged" would prove nothing as long as somebody may still charge.
            println!("{name}: the lease lapsed, its worker may still be at work: later");
            continue;
        }
        let completion = if provider.charges_under(&unknown.downstream_key("charge")) > 0 {
            println!("{name}: {:?}, and the provider has charged it: resolve", unknown.cause());
            unknown.resolve(ANSWER)?
        } else {
            println!("{name}: {:?}, and the provider knows nothing of it: release", unknown.cause());
            unknown.release()?
        };
        match completion {
            Completion::Done => settled += 1,
            Completion::Superseded => println!("{name}: somebody else settled it meanwhile, which is as good"),
        }
    }
    Ok(settled)
}

fn open(dir: &Path, clock: &ManualClock) -> Result<Store> {
    Ok(Store::open(dir.join("keys"), Options::default().clock(Arc::new(clock.clone())))?)
}

fn now(clock: &ManualClock) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(clock.wall_ms())
}

const ANSWER: &[u8] = b"charged 9.99 EUR";

fn key(order: &str) -> Result<Key> {
    Ok(Key::new("shop-7/charges", order)?)
}

fn request() -> Fingerprint {
    Fingerprint::of("9.99 EUR")
}

fn surprise(answer: &Reserve) -> Box<dyn Error> {
    format!("this answer is a surprise: {answer:?}").into()
}

/// Stands for a payment provider: it can be asked under which keys it has charged.
#[derive(Default)]
struct Provider {
    charges: BTreeMap<String, u32>,
}

impl Provider {
    fn charge(&mut self, downstream_key: String) {
        *self.charges.entry(downstream_key).or_default() += 1;
    }

    fn charges_under(&self, downstream_key: &str) -> u32 {
        self.charges.get(downstream_key).copied().unwrap_or(0)
    }
}
