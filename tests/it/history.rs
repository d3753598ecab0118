//! Histories of threads that use one store at the same time are those of a store that is used by one after the other.
//!
//! A few threads call what they can on a few keys, by chance, and write down when each call began and when and how it
//! was answered ([`worker`], [`record`]). Then a search looks for an order of the calls that explains every answer by
//! the contract ([`crate::linear`]). One that finds none has found a bug.
//!
//! A history goes on across the ends of a store, on the same disk: a close; a kill or a power loss at some step of the
//! simulated disk, amid the calls of all threads; a real `kill -9` ([`killed`]). Time stands still, or passes by calls
//! that are part of the history, so that leases lapse and keys expire. That the search finds what is false is shown by
//! histories that were recorded and then made false ([`falsified`]).
//!
//! The seed of a history that fails is printed. `KEYONCE_HISTORY_SEED` begins with that seed instead of 0: the same
//! calls are chosen as long as they are answered the same, but threads are scheduled anew, so it may take more than one
//! try. `KEYONCE_HISTORY_ROUNDS` (default 1) records that many times as many histories.

mod falsified;
mod killed;
mod record;
mod rig;
mod worker;

use std::collections::BTreeMap;

use self::rig::{Rig, Stage, Time};
use crate::linear::spec::{Answer, Call, Cause, End};
use crate::linear::{self, Op};
use crate::place::{EVERYWHERE, Setting, tell};

/// A number from the environment.
fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |number| number.parse().unwrap())
}

/// The seeds of `count` histories, or as many times more as the environment says.
fn seeds(count: u64) -> std::ops::Range<u64> {
    let first = number("KEYONCE_HISTORY_SEED", 0);
    first..first + count * number("KEYONCE_HISTORY_ROUNDS", 1)
}

/// What a number of histories came to.
#[derive(Debug, Default)]
struct Tally {
    histories: u64,
    calls: usize,
    open_ends: usize,
    configurations: usize,
    /// How often each kind of answer was heard.
    answers: BTreeMap<&'static str, u64>,
}

impl Tally {
    /// Checks one history.
    ///
    /// # Panics
    ///
    /// When no order explains it.
    fn add(&mut self, history: &[Op], of: &str) {
        let checked = linear::check(history).unwrap_or_else(|why| panic!("{of}: {why}"));
        self.histories += 1;
        self.calls += checked.calls;
        self.open_ends += checked.open_ends;
        self.configurations = self.configurations.max(checked.configurations);
        for op in history {
            if let Some(name) = name(op) {
                *self.answers.entry(name).or_default() += 1;
            }
        }
    }

    fn tell(&self, of: &str) {
        let Self { histories, calls, open_ends, configurations, answers } = self;
        tell(&format!(
            "{of}: {histories} histories of {calls} calls, {open_ends} unanswered, at most {configurations} \
             configurations; {answers:?}"
        ));
    }

    /// Histories in which some answer never comes up say nothing of it.
    fn has_heard(&self, names: &[&str]) {
        if let Some(name) = self.lacks(names) {
            panic!("nobody was ever told {name}: {:?}", self.answers);
        }
    }

    /// An answer that never came up.
    fn lacks<'a>(&self, names: &[&'a str]) -> Option<&'a str> {
        names.iter().copied().find(|name| !self.answers.contains_key(name))
    }
}

/// An answer by name; `None` for one that nobody heard.
fn name(op: &Op) -> Option<&'static str> {
    let answer = op.answer().filter(|_| op.is_told())?;
    Some(match (op.call, answer) {
        (Call::End(End::Kill), _) => "kill",
        (Call::End(End::PowerLoss), _) => "power loss",
        (Call::End(End::Close), _) => "close",
        (Call::Advance { .. }, _) => "time passes",
        (Call::TakeOver { .. }, Answer::Fresh(_)) => "taken over",
        (_, Answer::Fresh(shown)) if shown.attempt > 1 => "fresh by policy",
        (_, Answer::Fresh(_)) => "fresh",
        (_, Answer::Replay { .. }) => "replay",
        (_, Answer::InFlight(_)) => "in flight",
        (_, Answer::Interrupted(_, Cause::Crash)) => "interrupted by a crash",
        (_, Answer::Interrupted(_, Cause::Dropped)) => "interrupted by a drop",
        (_, Answer::Interrupted(_, Cause::LeaseLapsed)) => "interrupted by a lapse",
        (_, Answer::Mismatch(_)) => "mismatch",
        (Call::Complete { .. }, Answer::Superseded) => "completed too late",
        (Call::Complete { .. }, _) => "completed",
        (Call::Resolve { .. }, Answer::Done) => "resolved",
        (Call::ReleaseInterrupted { .. }, Answer::Done) => "released by handle",
        (Call::Release { .. }, Answer::Done) => "released",
        (Call::Renew { .. }, Answer::Done) => "renewed",
        (Call::SaveCheckpoint { .. }, Answer::Done) => "saved",
        (Call::Reattach { .. }, Answer::Done) => "reattached",
        (_, Answer::Held) => "held",
        (_, Answer::Done) => "done",
        (_, Answer::Superseded) => "superseded",
        (_, Answer::Known { .. }) => "known",
        (_, Answer::Unknown) => "unknown",
        (_, Answer::Over) => "over",
        (_, Answer::Unheard) => "gone away unheard",
    })
}

/// Answers that every kind of history must bring up.
const ALWAYS: [&str; 16] = [
    "fresh",
    "replay",
    "in flight",
    "interrupted by a drop",
    "mismatch",
    "completed",
    "released",
    "renewed",
    "saved",
    "taken over",
    "fresh by policy",
    "resolved",
    "superseded",
    "known",
    "unknown",
    "reattached",
];

/// Records histories in one setting and checks each.
fn campaign(tally: &mut Tally, setting: Setting, seeds: std::ops::Range<u64>, rig: impl Fn(u64, Setting) -> Rig) {
    for seed in seeds {
        let history = rig(seed, setting).record();
        tally.add(&history, &format!("seed {seed}, {setting:?}"));
    }
}

#[test]
fn threads_on_a_simulated_disk_are_answered_as_if_one_after_the_other() {
    let mut tally = Tally::default();
    for setting in EVERYWHERE {
        for time in [Time::StandsStill, Time::Passes] {
            campaign(&mut tally, setting, seeds(6), |seed, setting| Rig::new(seed, setting, time, Stage::Simulated));
        }
    }
    tally.tell("threads on a simulated disk");
    tally.has_heard(&ALWAYS);
    tally.has_heard(&[
        "kill",
        "power loss",
        "close",
        "interrupted by a crash",
        "interrupted by a lapse",
        "time passes",
    ]);
}

#[test]
fn threads_on_a_real_directory_are_answered_as_if_one_after_the_other() {
    let mut tally = Tally::default();
    for setting in EVERYWHERE {
        for time in [Time::StandsStill, Time::Passes] {
            campaign(&mut tally, setting, seeds(3), |seed, setting| Rig::new(seed, setting, time, Stage::Directory));
        }
    }
    tally.tell("threads on a real directory");
    tally.has_heard(&ALWAYS);
    tally.has_heard(&["close", "interrupted by a lapse", "time passes"]);
}
