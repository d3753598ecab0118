//! The store against its reference: random calls of several callers, and every answer is the model's.
//!
//! A run is a list of [`Op`]s, made by proptest from a seed; so a run that fails is made short. What it needs beyond a
//! number it picks from what callers hold: guards, views of attempts, handles, tokens, those of closed stores among
//! them.
//!
//! A failure prints `KEYONCE_MACHINE_SEED=n`; with that variable set, each test here runs that seed alone. With
//! `KEYONCE_MACHINE_OPS=n` a test goes on until it has done that many operations.

pub(crate) mod bytes;
pub(crate) mod driver;
mod found;
#[path = "../../src/testing/fuzz/input.rs"]
pub(crate) mod input;
pub(crate) mod ops;

use std::sync::Mutex;
use std::time::Duration;

use keyonce::testing::Tear;
use keyonce::{AppendMode, Durability, OnInterrupted};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};

use self::driver::{Driver, Place, Settings, Tally};
pub(crate) use self::ops::{Op, Reboot, Reopen, With, Work};
use crate::examine::{caught, number};
use crate::place::tell;
use crate::workload::mixed;

/// How many operations a run has at most; half as many on average.
const OPS_MAX: usize = 600;

fn with() -> BoxedStrategy<With> {
    let durability = prop_oneof![
        2 => Just(None),
        1 => Just(Some(Durability::PowerLoss)),
        1 => Just(Some(Durability::ProcessCrash)),
    ];
    let lease_ms = prop_oneof![20 => Just(None), 10 => leases().prop_map(Some), 1 => Just(Some(0))];
    let retention_ms = prop_oneof![
        20 => Just(None),
        5 => Just(Some(20_000)),
        5 => Just(Some(driver::WINDOW_MS)),
        2 => Just(Some(1)),
        1 => Just(Some(driver::WINDOW_MS + 1)),
        1 => Just(Some(0)),
    ];
    let on_interrupted = prop_oneof![
        6 => Just(None),
        2 => Just(Some(OnInterrupted::Surface)),
        3 => Just(Some(OnInterrupted::TakeOver)),
        1 => Just(Some(OnInterrupted::TakeOverLapsed)),
        2 => prop_oneof![Just(1_u64), Just(15_000), Just(90_000)]
            .prop_map(|ms| Some(OnInterrupted::Hold(Duration::from_millis(ms)))),
    ];
    let releases_on_drop = prop_oneof![3 => Just(None), 1 => Just(Some(false)), 1 => Just(Some(true))];
    let issued_offset_ms = prop_oneof![6 => Just(None), 1 => (-1_i8..=1).prop_map(Some)];
    (durability, lease_ms, retention_ms, on_interrupted, releases_on_drop, issued_offset_ms)
        .prop_map(|(durability, lease_ms, retention_ms, on_interrupted, releases_on_drop, issued_offset_ms)| With {
            durability,
            lease_ms,
            retention_ms,
            on_interrupted,
            releases_on_drop,
            issued_offset_ms,
        })
        .boxed()
}

fn requests() -> impl Strategy<Value = u8> {
    prop_oneof![5 => Just(0), 1 => Just(1)]
}

fn leases() -> impl Strategy<Value = u64> {
    prop_oneof![Just(1), Just(5_000), Just(20_000), Just(driver::WINDOW_MS), Just(100_000), Just(250_000)]
}

fn response_bytes() -> impl Strategy<Value = usize> {
    let max = driver::RESPONSE_BYTES_MAX;
    prop_oneof![2 => Just(0), 6 => 1..300_usize, 1 => Just(max), 1 => Just(max + 1)]
}

fn note_bytes() -> impl Strategy<Value = usize> {
    let max = driver::NOTE_BYTES_MAX;
    prop_oneof![8 => Just(0), 30 => 1..300_usize, 1 => Just(max), 1 => Just(max + 1)]
}

fn op() -> BoxedStrategy<Op> {
    let key = || 0..driver::KEYS;
    let pick = any::<u8>;
    let way = prop_oneof![
        3 => Just(Reopen::Close),
        1 => Just(Reopen::DropStore),
        3 => Just(Reopen::Kill),
        2 => Just(Reopen::LosePower),
        2 => any::<u64>().prop_map(|seed| Reopen::LoseSome { seed }),
    ];
    let reboot = prop_oneof![Just(Reboot::Yes), Just(Reboot::No)];
    let of_owners = prop_oneof![
        10 => (pick(), response_bytes()).prop_map(|(pick, bytes)| Op::Complete { pick, bytes }),
        2 => (pick(), response_bytes()).prop_map(|(pick, bytes)| Op::CompleteWithoutBody { pick, bytes }),
        5 => pick().prop_map(|pick| Op::Release { pick }),
        5 => pick().prop_map(|pick| Op::Drop { pick }),
        2 => pick().prop_map(|pick| Op::Interrupt { pick }),
        8 => (pick(), prop_oneof![9 => leases(), 1 => Just(0)], any::<bool>())
            .prop_map(|(pick, lease_ms, by_view)| Op::Renew { pick, lease_ms, by_view }),
        5 => (pick(), note_bytes(), any::<bool>())
            .prop_map(|(pick, bytes, by_view)| Op::SaveCheckpoint { pick, bytes, by_view }),
        4 => (pick(), leases()).prop_map(|(pick, lease_ms)| Op::Detach { pick, lease_ms }),
        6 => pick().prop_map(|pick| Op::Reattach { pick }),
    ];
    let of_handles = prop_oneof![
        4 => pick().prop_map(|pick| Op::TakeOver { pick }),
        2 => (pick(), response_bytes()).prop_map(|(pick, bytes)| Op::Resolve { pick, bytes }),
        2 => pick().prop_map(|pick| Op::ReleaseInterrupted { pick }),
        2 => pick().prop_map(|pick| Op::AskAgain { pick }),
        1 => pick().prop_map(|pick| Op::DropHandle { pick }),
    ];
    let ask = || (key(), requests(), with());
    let work = prop_oneof![
        4 => response_bytes().prop_map(|bytes| Work::Responds { bytes }),
        1 => Just(Work::NothingHappened),
        1 => Just(Work::Unknown),
        1 => Just(Work::Panics),
    ];
    let waits_ms = || prop_oneof![Just(0), Just(1), Just(10_000), Just(45_000), Just(500_000)];
    let of_waiters = prop_oneof![
        6 => (ask(), waits_ms())
            .prop_map(|((key, request, with), wait_ms)| Op::Wait { key, request, with, wait_ms }),
        2 => (pick(), waits_ms()).prop_map(|(pick, wait_ms)| Op::WaitAgain { pick, wait_ms }),
        8 => pick().prop_map(|pick| Op::Poll { pick }),
        2 => pick().prop_map(|pick| Op::GiveUp { pick }),
    ];
    let of_many = prop_oneof![
        2 => ([ask(), ask(), ask()], 0_u8..16).prop_map(|(asks, waits)| Op::ReserveBatch { asks, waits }),
        2 => (pick(), response_bytes()).prop_map(|(pick, bytes)| Op::CompleteBatch { pick, bytes }),
        3 => (key(), requests(), work).prop_map(|(key, request, work)| Op::Once { key, request, work }),
    ];
    let of_the_store = prop_oneof![
        2 => (key(), note_bytes()).prop_map(|(key, bytes)| Op::Forget { key, bytes }),
        8 => key().prop_map(|key| Op::Peek { key }),
        10 => Just(Op::PeekAll),
        2 => Just(Op::Sync),
        16 => (pick(), -1_i8..=1).prop_map(|(pick, offset)| Op::AdvanceTo { pick, offset }),
        6 => prop_oneof![Just(1), Just(1_000), Just(9_999), Just(70_000)].prop_map(|ms| Op::Advance { ms }),
        4 => (way, reboot).prop_map(|(way, reboot)| Op::Reopen(way, reboot)),
    ];
    prop_oneof![
        40 => ask().prop_map(|(key, request, with)| Op::Reserve { key, request, with }),
        45 => of_owners.boxed(),
        15 => of_handles.boxed(),
        25 => of_waiters.boxed(),
        8 => of_many.boxed(),
        30 => of_the_store.boxed(),
    ]
    .boxed()
}

/// Runs seeds, as many as it takes, and shortens the first run that fails.
fn run(name: &str, ops: u64, settings_of: impl Fn(u64) -> Settings) -> Tally {
    let tally = Mutex::new(Tally::default());
    let only = number("KEYONCE_MACHINE_SEED");
    let ops = number("KEYONCE_MACHINE_OPS").unwrap_or(ops);
    let mut seed = only.unwrap_or(1);
    loop {
        let settings = settings_of(seed);
        run_seed(seed, settings, &tally);
        let done = tally.lock().unwrap().ops;
        if only.is_some() || done >= ops {
            break;
        }
        seed += 1;
    }
    let tally = tally.into_inner().unwrap();
    tell(&format!("{name}: {} operations of seeds up to {seed}, {} openings", tally.ops, tally.openings));
    tally
}

fn run_seed(seed: u64, settings: Settings, tally: &Mutex<Tally>) {
    let config = Config {
        cases: 1,
        failure_persistence: None,
        max_shrink_iters: 2_000,
        max_shrink_time: 20_000,
        ..Config::default()
    };
    let bytes: Vec<u8> = (0..4).flat_map(|part| mixed(&[seed, part]).to_le_bytes()).collect();
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let outcome = runner.run(&vec(op(), 1..=OPS_MAX), |ops| {
        let (result, done) = drive(&ops, settings, seed);
        tally.lock().unwrap().add(&done);
        result.map_err(TestCaseError::fail)
    });
    match outcome {
        Ok(()) => {}
        Err(TestError::Fail(_, ops)) => {
            let ops = shortened(ops, |ops| drive(ops, settings, seed).0.is_err());
            let why = drive(&ops, settings, seed).0.err().unwrap_or_else(|| "it fails no more".to_owned());
            let ops: Vec<String> = ops.iter().map(|op| format!("    {op:?}")).collect();
            panic!("KEYONCE_MACHINE_SEED={seed} at {settings:?}: {why}\nshortest:\n{}", ops.join("\n"));
        }
        Err(TestError::Abort(why)) => panic!("KEYONCE_MACHINE_SEED={seed} at {settings:?}: {why}"),
    }
}

fn drive(ops: &[Op], settings: Settings, seed: u64) -> (Result<(), String>, Tally) {
    let mut driver = Driver::new(settings, seed);
    let result = caught(|| ops.iter().try_for_each(|op| driver.act(*op)).and_then(|()| driver.finish()));
    (result, std::mem::take(&mut driver.tally))
}

/// The operations without those that the failure does not need. Proptest leaves them out one by one; here it is halves
/// first, then quarters and so on.
fn shortened(mut ops: Vec<Op>, fails: impl Fn(&[Op]) -> bool) -> Vec<Op> {
    let mut part = ops.len().div_ceil(2);
    loop {
        let mut from = 0;
        let before = ops.len();
        while from < ops.len() {
            let until = (from + part).min(ops.len());
            let without = [&ops[..from], &ops[until..]].concat();
            if fails(&without) {
                ops = without;
            } else {
                from = until;
            }
        }
        if part == 1 && ops.len() == before {
            return ops;
        }
        part = if part == 1 { 1 } else { part.div_ceil(2) };
    }
}

/// Every append mode, every default, by turns.
fn settings(durability: Durability, place: Place, seed: u64) -> Settings {
    Settings {
        durability,
        place,
        append_mode: if seed.is_multiple_of(2) { AppendMode::Mapped } else { AppendMode::Positioned },
        on_interrupted: match (seed / 2) % 4 {
            0 => OnInterrupted::TakeOver,
            1 => OnInterrupted::Hold(Duration::from_secs(20)),
            _ => OnInterrupted::Surface,
        },
        releases_on_drop: (seed / 2) % 3 == 1,
        renew_while_held: (seed / 2) % 5 == 1,
        tear: if (seed / 4).is_multiple_of(2) { Tear::Page } else { Tear::Sector },
    }
}

#[test]
fn every_answer_is_the_models_at_power_loss() {
    let tally = run("at PowerLoss", 35_000, |seed| settings(Durability::PowerLoss, Place::Simulated, seed));
    tally.assert_everything_was_met();
}

#[test]
fn every_answer_is_the_models_at_process_crash() {
    let tally = run("at ProcessCrash", 50_000, |seed| settings(Durability::ProcessCrash, Place::Simulated, seed));
    tally.assert_everything_was_met();
}

#[test]
fn every_answer_is_the_models_at_an_interval() {
    run("at Interval", 15_000, |seed| {
        let every_ms = [1, 5_000, 40_000][usize::try_from(seed % 3).unwrap()];
        settings(Durability::Interval(Duration::from_millis(every_ms)), Place::Simulated, seed)
    });
}

#[test]
fn every_answer_is_the_models_in_a_real_directory() {
    run("in a real directory", 5_000, |seed| {
        let durability = if seed % 4 < 2 { Durability::PowerLoss } else { Durability::ProcessCrash };
        settings(durability, Place::Directory, seed)
    });
}
