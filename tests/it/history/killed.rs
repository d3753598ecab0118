//! Histories across real kills: a child of this very binary works on a store with several threads until it gets
//! SIGKILL, the next one opens what it left, and all that they were told is one history.
//!
//! A child says each invocation before the call and each answer before its thread goes on, a line each, by one write to
//! a pipe: what it was told and has not said when it dies, it has told nobody. The stamps in the lines give the order;
//! those of the next child begin after the last one that was heard.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use keyonce::Store;

use super::record::{Heard, Log, Stamps};
use super::rig::{options, timeless};
use super::worker::{Shared, Worker};
use super::{Tally, number, seeds};
use crate::linear::Op;
use crate::linear::spec::{Answer, Call, End};
use crate::place::{EVERYWHERE, Setting};
use crate::workload::{Random, mixed};

/// Children that follow each other on one directory.
const CHILDREN: u64 = 6;
const THREADS: u64 = 4;
const KEYS: u64 = 3;

const CHILD_DIR: &str = "KEYONCE_HISTORY_CHILD_DIR";
const CHILD_SETTING: &str = "KEYONCE_HISTORY_CHILD_SETTING";
const CHILD_SEED: &str = "KEYONCE_HISTORY_CHILD_SEED";
const CHILD_STAMP: &str = "KEYONCE_HISTORY_CHILD_STAMP";

fn open(dir: &Path, setting: Setting) -> Store {
    Store::open(dir, options(setting, timeless(KEYS).lease_ms)).unwrap()
}

/// Works on the store in the directory that the environment names, until it is killed; without the name it does
/// nothing.
#[test]
fn the_child_calls_until_it_is_killed() {
    let Ok(dir) = std::env::var(CHILD_DIR) else { return };
    let setting = EVERYWHERE[usize::try_from(number(CHILD_SETTING, 0)).unwrap()];
    let mut random = Random(number(CHILD_SEED, 0));
    let stamps = Stamps::after(number(CHILD_STAMP, 0));
    let store = open(Path::new(&dir), setting);
    let shared = Shared::default();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let random = Random(random.next());
            let manner = timeless(KEYS);
            let log = Log::new(&stamps, true);
            let mut worker = Worker::new(store.clone(), log, random, manner, &shared);
            if thread == 0 {
                worker.look_at_all();
            }
            scope.spawn(move || {
                loop {
                    worker.act();
                }
            });
        }
    });
}

fn spawn(dir: &Path, setting: usize, seed: u64, stamp: u64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "history::killed::the_child_calls_until_it_is_killed", "--nocapture", "--test-threads=1"])
        .env(CHILD_DIR, dir)
        .env(CHILD_SETTING, setting.to_string())
        .env(CHILD_SEED, seed.to_string())
        .env(CHILD_STAMP, stamp.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Lets one child work, kills it after that many lines, and gives what it said.
fn child(dir: &Path, setting: usize, seed: u64, stamp: u64, lines_max: u64) -> Vec<Op> {
    let mut child = spawn(dir, setting, seed, stamp);
    let lines = BufReader::new(child.stderr.take().unwrap());
    let (mut heard, mut other) = (Heard::default(), Vec::new());
    for (at, line) in lines.lines().enumerate() {
        let line = line.unwrap();
        if !heard.hear(&line) {
            other.push(line);
        }
        if at as u64 == lines_max {
            child.kill().unwrap();
        }
    }
    let ended = child.wait().unwrap();
    let killed = std::os::unix::process::ExitStatusExt::signal(&ended) == Some(9);
    assert!(killed && other.is_empty(), "the child of seed {seed}: {ended}\n{}", other.join("\n"));
    heard.into_ops()
}

/// A history of several children, and of one who looks at what they left.
fn history_of_children(seed: u64, at: usize) -> Vec<Op> {
    let root = tempfile::tempdir().unwrap();
    let mut random = Random(mixed(&[seed, at as u64]));
    let (mut history, mut stamp) = (Vec::<Op>::new(), 0);
    for _ in 0..CHILDREN {
        let lines_max = if random.one_in(4) { random.below(30) } else { random.below(700) };
        let mut said = child(root.path(), at, random.next(), stamp, lines_max);
        let last = said.iter().flat_map(|op| [Some(op.invoked), op.answered.map(|(at, _)| at)]).flatten().max();
        stamp = last.unwrap_or(stamp) + 1;
        let (call, answered) = (Call::End(End::Kill), Some((stamp, Answer::Over)));
        said.push(Op { id: stamp, key: None, call, invoked: stamp, answered });
        history.append(&mut said);
    }
    let (stamps, shared) = (Stamps::after(stamp), Shared::default());
    let store = open(root.path(), EVERYWHERE[at]);
    let mut worker = Worker::new(store, Log::new(&stamps, false), random, timeless(KEYS), &shared);
    worker.look_at_all();
    history.append(&mut worker.log.ops);
    history
}

#[test]
fn threads_that_are_killed_are_answered_as_if_one_after_the_other() {
    let mut tally = Tally::default();
    // How much is said before each kill is chance: a few more seeds, where some answer has not come up.
    let least = seeds(2).count();
    for (round, seed) in seeds(8).enumerate() {
        if round >= least && tally.lacks(&super::ALWAYS).is_none() {
            break;
        }
        for (at, setting) in EVERYWHERE.into_iter().enumerate() {
            tally.add(&history_of_children(seed, at), &format!("seed {seed}, {setting:?}"));
        }
    }
    tally.tell("threads that are killed");
    tally.has_heard(&super::ALWAYS);
    tally.has_heard(&["kill", "interrupted by a crash"]);
    assert!(tally.open_ends > 40, "{} calls that no answer came to prove nothing", tally.open_ends);
}
