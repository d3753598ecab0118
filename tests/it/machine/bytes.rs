//! A whole run out of bytes, as a fuzzer makes them: how the store is opened, then what is done.

use std::time::Duration;

use keyonce::testing::Tear;
use keyonce::{AppendMode, Durability, OnInterrupted};

use super::driver::{Driver, Place, Settings, Tally};
use super::input::Input;
use super::ops::{self, Op};

/// Runs them; says what was done. With the variable `KEYONCE_FUZZ_TELL` set, each act is told before it is done.
pub(crate) fn run(bytes: &[u8]) -> (Result<(), String>, Tally) {
    let mut input = Input::new(bytes);
    let settings = settings(&mut input);
    let ops = ops::read_all(&mut input);
    let mut driver = Driver::new(settings, 1);
    let told = std::env::var_os("KEYONCE_FUZZ_TELL").is_some();
    let mut done = 0;
    let result = ops.iter().try_for_each(|op| {
        done += 1;
        if told {
            eprintln!("{op:?}");
        }
        driver.act(*op)
    });
    let result = result.and_then(|()| driver.act(Op::Heal)).and_then(|()| driver.finish());
    let result = result.map_err(|why| {
        let ops: Vec<String> = ops.iter().take(done).map(|op| format!("    {op:?}")).collect();
        format!("{why}\nat {settings:?}:\n{}", ops.join("\n"))
    });
    (result, std::mem::take(&mut driver.tally))
}

fn settings(input: &mut Input<'_>) -> Settings {
    let flags = input.u8();
    let flag = |bit: u8| flags & 1 << bit != 0;
    Settings {
        durability: match input.u8() % 8 {
            0..4 => Durability::PowerLoss,
            4..6 => Durability::ProcessCrash,
            6 => Durability::Interval(Duration::from_millis(1)),
            _ => Durability::Interval(Duration::from_secs(5)),
        },
        append_mode: if flag(0) { AppendMode::Mapped } else { AppendMode::Positioned },
        on_interrupted: match (flag(1), flag(2)) {
            (false, _) => OnInterrupted::Surface,
            (true, false) => OnInterrupted::TakeOver,
            (true, true) => OnInterrupted::Hold(Duration::from_secs(20)),
        },
        releases_on_drop: flag(3),
        renew_while_held: flag(4),
        tear: if flag(5) { Tear::Sector } else { Tear::Page },
        place: Place::Simulated,
    }
}
