//! Real kills: a child of this very binary works on a store until it gets SIGKILL, and every fact it was told is
//! checked.
//!
//! The child writes a line for each answer it got, by one `write(2)` below `PIPE_BUF`, so a line is whole or missing. A
//! line that reached the pipe is an acknowledgement: whatever it says must be found by the next opening. What the child
//! was doing when it died is *in doubt*: it may have happened or not, but nothing else may. The parent looks at the
//! directory itself in one round, and at a copy of it in the next, so that the next child also recovers from a kill on
//! its own.
//!
//! `KEYONCE_KILL_ROUNDS` sets how many children are killed at each level.

mod moments;

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use keyonce::{Body, Cause, Completion, Durability, Fingerprint, Key, Options, Reservation, Reserve, Retention, Store};

use crate::place::{copy_files, tell};

/// Children killed at each level, unless `KEYONCE_KILL_ROUNDS` says otherwise.
const ROUNDS: u64 = 24;

/// Fewer acknowledgements than this prove nothing.
const ACKNOWLEDGED_MIN: u64 = 1000;

const THREADS: u64 = 4;

/// A child that nobody kills ends after this many keys a thread.
const KEYS_MAX: u64 = 20_000;

const CHILD_DIR: &str = "KEYONCE_KILL_DIR";
const CHILD_ROUND: &str = "KEYONCE_KILL_ROUND";
const CHILD_LEVEL: &str = "KEYONCE_KILL_LEVEL";

fn level_name(level: Durability) -> &'static str {
    match level {
        Durability::PowerLoss => "PowerLoss",
        _ => "ProcessCrash",
    }
}

fn options(level: Durability) -> Options {
    let retention = Retention::new(Duration::from_secs(24 * 60 * 60), 0.1);
    Options::new().durability(level).retention(retention).response_bytes_max(1500).lock_wait(Duration::from_secs(10))
}

fn key(id: &str) -> Key {
    Key::new("kill", id).unwrap()
}

fn fingerprint(id: &str) -> Fingerprint {
    Fingerprint::of(id)
}

/// The response of an attempt: nobody else's, of every length up to 1200.
fn response(id: &str, token: u64) -> Vec<u8> {
    let seed = Fingerprint::of_parts([id, &token.to_string()]).to_bytes();
    let bytes = (usize::from(seed[0]) * 256 + usize::from(seed[1])) % 1200;
    seed.iter().copied().cycle().take(bytes).collect()
}

fn checkpoint(id: &str, token: u64) -> Vec<u8> {
    format!("checkpoint of {id} at {token}").into_bytes()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

// The child.

/// Works on the store in the directory that the environment names, until it is killed; without the name it does
/// nothing.
#[test]
fn the_child_works_until_it_is_killed() {
    let Ok(dir) = std::env::var(CHILD_DIR) else { return };
    let round: u64 = std::env::var(CHILD_ROUND).unwrap().parse().unwrap();
    let level = match std::env::var(CHILD_LEVEL).unwrap().as_str() {
        "PowerLoss" => Durability::PowerLoss,
        _ => Durability::ProcessCrash,
    };
    say("opening");
    let store = Store::open(dir, options(level)).unwrap();
    say("open");
    std::thread::scope(|threads| {
        for thread in 0..THREADS {
            let store = &store;
            threads.spawn(move || {
                for at in 0..KEYS_MAX {
                    work(store, &format!("{round}-{thread}-{at}"), at);
                    if round > 0 && at % 3 == 0 {
                        // A key of an earlier child: finished, interrupted, or never seen.
                        revisit(store, &format!("{}-{thread}-{}", round - 1 - (at / 3) % round.min(3), at / 9));
                    }
                }
            });
        }
    });
}

/// One line, one write.
fn say(line: &str) {
    let line = format!("fact {line}\n");
    assert!(line.len() <= 4096, "a longer line may be torn by the kill");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}

fn work(store: &Store, id: &str, at: u64) {
    let Reserve::Fresh(reservation) = store.reserve(&key(id), fingerprint(id)).unwrap() else {
        panic!("{id} is reserved once alone")
    };
    let token = reservation.token().to_u64();
    say(&format!("fresh {id} {token} 1"));
    match at % 8 {
        0 | 1 => {
            assert_eq!(reservation.save_checkpoint(&checkpoint(id, token)).unwrap(), Completion::Done);
            say(&format!("saved {id} {token}"));
            finish(reservation, id);
        }
        2 => {
            assert_eq!(reservation.save_checkpoint(&checkpoint(id, token)).unwrap(), Completion::Done);
            say(&format!("saved {id} {token}"));
            std::mem::forget(reservation);
        }
        3 => {
            drop(reservation);
            say(&format!("dropped {id} {token}"));
        }
        _ => finish(reservation, id),
    }
}

fn finish(reservation: Reservation, id: &str) {
    let token = reservation.token().to_u64();
    assert_eq!(reservation.complete(&response(id, token)).unwrap(), Completion::Done);
    say(&format!("done {id} {token}"));
}

fn revisit(store: &Store, id: &str) {
    say(&format!("revisits {id}"));
    match store.reserve(&key(id), fingerprint(id)).unwrap() {
        Reserve::Replay(replay) => {
            let Body::Kept(bytes) = replay.body() else { panic!("the body of {id} was kept") };
            say(&format!("replay {id} {}", hex(bytes)));
        }
        Reserve::Interrupted(interrupted) => {
            let attempt = interrupted.attempt + 1;
            if let Reserve::Fresh(reservation) = interrupted.take_over().unwrap() {
                say(&format!("fresh {id} {} {attempt}", reservation.token()));
                finish(reservation, id);
            }
        }
        Reserve::Fresh(reservation) => {
            say(&format!("fresh {id} {} 1", reservation.token()));
            finish(reservation, id);
        }
        other => panic!("{id}: {other:?}"),
    }
}

// The parent.

/// What was acknowledged of a key.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    /// The token of the latest reservation that was told; 0: none was.
    token: u64,
    attempt: u64,
    done: bool,
    dropped: bool,
    /// The token under which a checkpoint was saved.
    saved: Option<u64>,
    /// A child went back to the key and was killed before it was told an answer: a next attempt may have begun.
    revisited: bool,
}

/// All that was acknowledged, and what came of checking it.
#[derive(Clone, Debug, Default)]
struct Ledger {
    keys: BTreeMap<String, Known>,
    token_max: u64,
    /// The largest token that was told before the present child began.
    token_max_before: u64,
    acknowledged: u64,
    /// Acts that had happened although the child died before it was told.
    in_doubt: u64,
    lost: Vec<String>,
}

impl Ledger {
    fn begin_round(&mut self) {
        self.token_max_before = self.token_max;
    }

    fn hear(&mut self, line: &str) {
        let words: Vec<_> = line.split(' ').collect();
        let [what, id, rest @ ..] = words.as_slice() else {
            return;
        };
        let number = |at: usize| rest[at].parse::<u64>().unwrap();
        let known = self.keys.entry((*id).to_owned()).or_default();
        match *what {
            "revisits" => {
                known.revisited = true;
                return;
            }
            "fresh" => {
                let (token, attempt) = (number(0), number(1));
                let next = if known.revisited { attempt > known.attempt } else { attempt == known.attempt + 1 };
                if known.done || !next || token <= self.token_max_before || token <= known.token {
                    self.lost.push(format!("{line}: after {known:?} and token {}", self.token_max_before));
                }
                *known = Known { token, attempt, saved: known.saved, ..Known::default() };
                self.token_max = self.token_max.max(token);
            }
            "saved" => known.saved = Some(number(0)),
            "dropped" => known.dropped = true,
            "done" => known.done = true,
            // A completion that was in doubt is known from now on.
            "replay" => {
                if known.dropped || rest.first() != Some(&hex(&response(id, known.token)).as_str()) {
                    self.lost.push(format!("{id}: a replay of {rest:?} after {known:?}"));
                }
                self.in_doubt += u64::from(!known.done);
                (known.done, known.revisited) = (true, false);
            }
            other => panic!("the child says {other}: {line}"),
        }
        self.acknowledged += 1;
    }

    /// Asks an open store about every key, and learns how what was in doubt came out.
    fn check(&mut self, store: &Store) {
        for (id, known) in &mut self.keys {
            match found(store, id, known) {
                Ok((now, further)) => {
                    *known = now;
                    self.in_doubt += u64::from(further);
                }
                Err(why) => self.lost.push(format!("{id}: {why}, but {known:?}")),
            }
        }
    }
}

/// What the store says of a key, and whether that is more than was acknowledged; or what is wrong with it.
fn found(store: &Store, id: &str, known: &Known) -> Result<(Known, bool), String> {
    match store.reserve(&key(id), Fingerprint::of("another request")) {
        Ok(Reserve::Mismatch(_)) => {}
        Ok(Reserve::Fresh(nobody)) if known.token == 0 => {
            nobody.release().map_err(|error| error.to_string()).map(drop)?;
            return Ok((Known::default(), false));
        }
        other => return Err(format!("another request is answered {other:?}")),
    }
    match store.reserve(&key(id), fingerprint(id)).map_err(|error| error.to_string())? {
        Reserve::Replay(replay) => {
            let attempt = u64::from(replay.attempt());
            if known.dropped || replay.body() != Body::Kept(&response(id, known.token)) || attempt != known.attempt {
                return Err(format!("attempt {attempt} replays {:?}", replay.body()));
            }
            Ok((Known { done: true, revisited: false, ..*known }, !known.done))
        }
        Reserve::Interrupted(stop) if !known.done => {
            let (token, attempt) = (stop.token.to_u64(), u64::from(stop.attempt));
            let next = known.revisited && token > known.token && attempt > known.attempt;
            if !next && (token, attempt) != (known.token, known.attempt) {
                return Err(format!("interrupted with token {token} at attempt {attempt}"));
            }
            // A drop is told after the fact: one that was not told may have happened. One that met a full segment waits in
            // memory until the next is ready, and a kill takes it along.
            if ![Cause::Crash, Cause::Dropped].contains(&stop.cause()) {
                return Err(format!("interrupted by {:?}", stop.cause()));
            }
            if known.saved.is_some_and(|token| stop.checkpoint() != checkpoint(id, token)) {
                return Err(format!("its checkpoint is {:?}", stop.checkpoint()));
            }
            let dropped = stop.cause() == Cause::Dropped;
            let further = next || dropped != known.dropped;
            Ok((Known { token, attempt, saved: known.saved, dropped, ..Known::default() }, further))
        }
        other => Err(format!("{other:?}")),
    }
}

/// Numbers that differ from round to round and are the same in every run.
fn mixed(seed: u64) -> u64 {
    let mut mixed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// After how many lines a child is killed: at once, while it opens, just after, or somewhere in its work.
fn lines_until_kill(round: u64) -> u64 {
    match round % 8 {
        3 => 1,
        6 => 2,
        _ => 3 + mixed(round) % 500,
    }
}

fn spawn(dir: &Path, round: u64, level: Durability) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kill::the_child_works_until_it_is_killed", "--nocapture", "--test-threads=1"])
        .env(CHILD_DIR, dir)
        .env(CHILD_ROUND, round.to_string())
        .env(CHILD_LEVEL, level_name(level))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Lets one child work, kills it, and writes down what it was told.
fn run_child(dir: &Path, round: u64, level: Durability, ledger: &mut Ledger) {
    let mut child = spawn(dir, round, level);
    let lines = BufReader::new(child.stderr.take().unwrap());
    let mut heard = 0;
    let mut other = Vec::new();
    ledger.begin_round();
    for line in lines.split(b'\n') {
        let line = String::from_utf8(line.unwrap()).unwrap();
        match line.strip_prefix("fact ") {
            Some(fact) => ledger.hear(fact),
            None => other.push(line),
        }
        heard += 1;
        if heard == lines_until_kill(round) {
            child.kill().unwrap();
        }
    }
    let ended = child.wait().unwrap();
    let killed = std::os::unix::process::ExitStatusExt::signal(&ended) == Some(9);
    assert!(killed, "the child of round {round} ended by itself: {ended}\n{}", other.join("\n"));
}

fn loop_at(level: Durability) -> Ledger {
    let rounds = std::env::var("KEYONCE_KILL_ROUNDS").map_or(ROUNDS, |rounds| rounds.parse().unwrap());
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("store");
    let mut ledger = Ledger::default();
    let mut torn = 0;
    for round in 0..rounds {
        run_child(&dir, round, level, &mut ledger);
        if !dir.exists() {
            continue;
        }
        let looked_at = if round % 2 == 0 { dir.clone() } else { root.path().join(format!("copy-{round}")) };
        if looked_at != dir {
            copy_files(&dir, &looked_at);
        }
        let store = Store::open(&looked_at, options(level)).unwrap();
        torn += store.opened().torn;
        // What the copy tells is not remembered: the next child recovers the directory itself.
        if looked_at == dir {
            ledger.check(&store);
        } else {
            let mut looked = ledger.clone();
            looked.check(&store);
            (ledger.lost, ledger.in_doubt) = (looked.lost, looked.in_doubt);
            drop(store);
            std::fs::remove_dir_all(looked_at).unwrap();
        }
        assert!(ledger.lost.is_empty(), "round {round} at {}: {:#?}", level_name(level), ledger.lost);
    }
    tell(&format!(
        "kill -9 at {}: {rounds} kills, {} acknowledgements checked, {} in doubt, {} lost, {} keys, {} torn records",
        level_name(level),
        ledger.acknowledged,
        ledger.in_doubt,
        ledger.lost.len(),
        ledger.keys.len(),
        torn,
    ));
    assert!(ledger.acknowledged >= ACKNOWLEDGED_MIN, "{} acknowledgements prove nothing", ledger.acknowledged);
    ledger
}

#[test]
fn what_was_acknowledged_survives_a_kill_at_power_loss() {
    loop_at(Durability::PowerLoss);
}

#[test]
fn what_was_acknowledged_survives_a_kill_at_process_crash() {
    loop_at(Durability::ProcessCrash);
}

/// The rig must be able to see a loss: facts that are no longer true, each of another kind, are told.
#[test]
fn the_check_notices_what_is_lost() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path().join("store"), options(Durability::ProcessCrash)).unwrap();
    let heard = |lines: &[String]| {
        let mut ledger = Ledger::default();
        for line in lines {
            ledger.hear(line);
        }
        ledger.check(&store);
        ledger.lost
    };
    let Reserve::Fresh(reservation) = store.reserve(&key("a"), fingerprint("a")).unwrap() else { panic!("a is new") };
    let token = reservation.token().to_u64();
    drop(reservation);
    let dropped = [format!("fresh a {token} 1"), format!("dropped a {token}")];
    assert_eq!(heard(&dropped), [""; 0]);
    assert_eq!(heard(&[format!("fresh a {} 1", token + 8), dropped[1].clone()]).len(), 1, "another token");
    assert_eq!(heard(&[format!("fresh a {token} 1"), format!("done a {token}")]).len(), 1, "a lost completion");
    assert_eq!(heard(&[format!("fresh b {token} 1")]).len(), 1, "a lost reservation");
    assert_eq!(
        heard(&[dropped[0].clone(), format!("saved a {token}"), dropped[1].clone()]).len(),
        1,
        "a lost checkpoint"
    );
    let mut smaller = Ledger { token_max_before: token, ..Ledger::default() };
    smaller.hear(&dropped[0]);
    assert_eq!(smaller.lost.len(), 1, "a token that did not grow");
    let Reserve::Fresh(reservation) = store.reserve(&key("c"), fingerprint("c")).unwrap() else { panic!("c is new") };
    let token = reservation.token();
    assert_eq!(reservation.complete(b"other bytes").unwrap(), Completion::Done);
    assert_eq!(heard(&[format!("fresh c {token} 1"), format!("done c {token}")]).len(), 1, "another response");
}
