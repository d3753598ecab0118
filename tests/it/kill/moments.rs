//! Kills at chosen moments: a child is killed at its n-th system call of a kind, while it creates a store, opens one,
//! rolls, retires and writes files again, many times a second.
//!
//! `strace` chooses the moment, where it is there; without it the child is killed after a number of lines, and the
//! tests that need a system call say that they did not run. What each kill hit is read from the directory that it left.
//!
//! A longer run, which also fails when a kind of moment was never hit:
//!
//! ```text
//! KEYONCE_KILL_MOMENTS=1000 cargo test --release --test it kill::moments -- --nocapture
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use keyonce::testing::ManualClock;
use keyonce::{Body, Clock as _, Completion, Durability, Options, Reserve, ReserveOptions, Retention, Store};

use super::{fingerprint, key, mixed, response, say};
use crate::place::{copy_files, snapshot, tell};

/// Children killed by the loop, unless `KEYONCE_KILL_MOMENTS` says otherwise.
const ROUNDS: u64 = 12;
/// From so many on a kind of moment that was never hit is a failure.
const ROUNDS_LONG: u64 = 300;

const DIR: &str = "KEYONCE_MOMENTS_DIR";
const ROUND: &str = "KEYONCE_MOMENTS_ROUND";
const WALL_MS: &str = "KEYONCE_MOMENTS_WALL_MS";
/// After so many keys a child that `strace` watches ends itself: to kill `strace` would only let it go.
const KEYS: &str = "KEYONCE_MOMENTS_KEYS";

/// How long a finished key is remembered, by the child's clock; it moves by [`STEP`] with each key.
const WINDOW: Duration = Duration::from_secs(2);
const STEP: Duration = Duration::from_millis(20);
/// A held key is completed when so many are held.
const HELD_MAX: usize = 6;
const HOLD: Duration = Duration::from_secs(1_000_000);

/// The system calls that change a directory, its files, or what of them is on the disk.
const SYSTEM_CALLS: [&str; 10] =
    ["openat", "fallocate", "ftruncate", "pwrite64", "write", "fsync", "fdatasync", "rename", "unlink", HINT_WRITE];
/// Not any `write`, but one to a hint.
const HINT_WRITE: &str = "write to a hint";
/// No child makes so many segment files.
const FILES_MAX: u32 = 64;

fn options(round: u64, clock: &ManualClock) -> Options {
    let durability = if round.is_multiple_of(2) { Durability::PowerLoss } else { Durability::ProcessCrash };
    Options::new()
        .durability(durability)
        .retention(Retention::new(WINDOW, 50.0))
        .response_bytes_max(4000)
        .segment_bytes(192 << 10)
        .lock_wait(Duration::from_secs(10))
        .clock(Arc::new(clock.clone()))
}

/// Works on the store in the directory that the environment names, until it is killed; without the name it does
/// nothing.
#[test]
fn the_child_rolls_and_retires_until_it_is_killed() {
    let Ok(dir) = std::env::var(DIR) else { return };
    let number = |name| std::env::var(name).unwrap().parse::<u64>().unwrap();
    let (round, clock) = (number(ROUND), ManualClock::new(number(WALL_MS)));
    say("opening");
    let store = Store::open(dir, options(round, &clock)).unwrap();
    say("open");
    let mut held = VecDeque::new();
    for at in 0..number(KEYS) {
        let id = format!("{round}-{at}");
        let hold = at % 40 == 0;
        let with = ReserveOptions::new().lease(if hold { HOLD } else { WINDOW });
        let Reserve::Fresh(owner) = store.reserve_with(&key(&id), fingerprint(&id), &with).unwrap() else {
            panic!("{id} is reserved once")
        };
        say(&format!("fresh {id} {} {}", owner.token(), clock.wall_ms()));
        held.push_back((id, owner));
        // One that is held stays so while its segment is given up, several times over.
        let next =
            if hold { held.len().checked_sub(HELD_MAX).map(|_| held.pop_front()) } else { Some(held.pop_back()) };
        if let Some((id, owner)) = next.flatten() {
            let token = owner.token().to_u64();
            assert_eq!(owner.complete(&response(&id, token)).unwrap(), Completion::Done);
            say(&format!("done {id} {token} {}", clock.wall_ms()));
        }
        clock.advance(STEP);
    }
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
}

// The parent.

/// What was acknowledged of a key.
#[derive(Clone, Debug)]
struct Known {
    token: u64,
    /// When it was completed, by the child's clock.
    done_ms: Option<u64>,
    /// It was asked about after its process was gone: of a short lease, it is soon past its retention.
    asked: bool,
}

#[derive(Clone, Debug, Default)]
struct Ledger {
    keys: BTreeMap<String, Known>,
    token_max: u64,
    now_ms: u64,
    acknowledged: u64,
    lost: Vec<String>,
}

impl Ledger {
    fn hear(&mut self, line: &str) {
        let words: Vec<_> = line.split(' ').collect();
        let [what, id, token, now_ms] = words[..] else { return };
        let (token, now_ms) = (token.parse().unwrap(), now_ms.parse().unwrap());
        self.now_ms = now_ms;
        self.acknowledged += 1;
        match what {
            "fresh" => {
                if token <= self.token_max {
                    self.lost.push(format!("{id} has token {token} after {}", self.token_max));
                }
                self.token_max = self.token_max.max(token);
                self.keys.insert(id.to_owned(), Known { token, done_ms: None, asked: false });
            }
            "done" => self.keys.get_mut(id).unwrap().done_ms = Some(now_ms),
            other => panic!("the child says {other}: {line}"),
        }
    }

    /// Asks about every key that must be remembered: what is held, and what was completed not too long ago.
    fn check(&mut self, store: &Store) {
        let margin_ms = 5 * u64::try_from(STEP.as_millis()).unwrap();
        let window_ms = u64::try_from(WINDOW.as_millis()).unwrap();
        let now_ms = self.now_ms;
        self.keys.retain(|_, known| known.done_ms.is_none_or(|done_ms| done_ms + window_ms > now_ms + margin_ms));
        for (id, known) in &mut self.keys {
            // Of a short lease, it is forgotten a lease and a retention later.
            if known.asked {
                continue;
            }
            match store.reserve(&key(id), fingerprint(id)).unwrap() {
                Reserve::Replay(replay) if replay.body() == Body::Kept(&response(id, known.token)) => {}
                Reserve::Interrupted(stop) if known.done_ms.is_none() && stop.token.to_u64() == known.token => {}
                other => self.lost.push(format!("{id}: {other:?}, but {known:?}")),
            }
            known.asked = known.done_ms.is_none() && !is_held(id);
        }
    }
}

/// Whether the child holds a key of this name for long.
fn is_held(id: &str) -> bool {
    id.split('-').nth(1).is_some_and(|at| at.parse::<u64>().unwrap().is_multiple_of(40))
}

/// A child, killed when one of its threads enters its `n`-th system call of this name, or after so many keys.
fn child(dir: &Path, round: u64, wall_ms: u64, kill_at: Option<(&str, u64)>, keys: u64) -> Command {
    let binary = std::env::current_exe().unwrap();
    let mut command = match kill_at {
        Some((name, n)) => {
            let mut command = Command::new("strace");
            let (name, hints) = if name == HINT_WRITE { ("write", 0..FILES_MAX) } else { (name, 0..0) };
            for index in hints {
                command.arg("-P").arg(dir.join(format!("hint-{index:08x}.keyonce")));
            }
            command.args(["-f", "-qqq", "-o", "/dev/null", "-e", &format!("trace={name}")]);
            command.args(["-e", &format!("inject={name}:signal=SIGKILL:when={n}")]).arg(binary);
            command
        }
        None => Command::new(binary),
    };
    command
        .args(["--exact", "kill::moments::the_child_rolls_and_retires_until_it_is_killed", "--nocapture"])
        .arg("--test-threads=1")
        .env(DIR, dir)
        .env(ROUND, round.to_string())
        .env(WALL_MS, wall_ms.to_string())
        .env(KEYS, keys.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

/// How far a child came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Came {
    /// It had not begun to open the store.
    Nowhere,
    /// It was opening.
    Opening,
    /// It was at work.
    AtWork,
}

/// Lets a child work until it is gone, or for so many lines if it is our own; writes down what it was told.
fn run(mut command: Command, lines_max: Option<u64>, ledger: &mut Ledger) -> Came {
    let mut child = command.spawn().unwrap();
    let (mut came, mut lines) = (Came::Nowhere, 0);
    let mut other = Vec::new();
    for line in BufReader::new(child.stderr.take().unwrap()).split(b'\n') {
        let line = String::from_utf8(line.unwrap()).unwrap();
        match line.strip_prefix("fact ") {
            Some("opening") => came = Came::Opening,
            Some("open") => came = Came::AtWork,
            Some(fact) => ledger.hear(fact),
            None => other.push(line),
        }
        lines += 1;
        if Some(lines) == lines_max {
            child.kill().unwrap();
        }
    }
    let ended = child.wait().unwrap();
    assert_eq!(ended.signal(), Some(9), "the child ended by itself: {ended}\n{}", other.join("\n"));
    came
}

/// Whether a child can be killed at a system call here.
fn strace_works() -> bool {
    let tried = Command::new("strace").args(["-qqq", "-o", "/dev/null", "-e", "trace=execve", "true"]).status();
    let works = tried.is_ok_and(|status| status.success());
    if !works {
        tell("strace does not run here: no child is killed at a chosen system call");
        assert!(std::env::var("KEYONCE_RIGS").is_err(), "KEYONCE_RIGS says that every rig runs here");
    }
    works
}

/// What the directory shows of the moment of the kill.
fn moments(dir: &Path) -> Vec<&'static str> {
    let number = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let Ok(store) = fs::read(dir.join("keyonce.store")) else { return vec!["creation"] };
    let mut found = Vec::new();
    let mut lives = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if name.ends_with(".tmp") {
            found.push("store file half written");
        }
        if name.starts_with("hint-") && entry.metadata().unwrap().len() == 0 {
            found.push("hint being written");
        }
        if !name.starts_with("segment-") {
            continue;
        }
        let bytes = fs::read(entry.path()).unwrap();
        if bytes.len() < 192 << 10 || bytes[..8] == [0; 8] {
            found.push("file made");
            continue;
        }
        let [one, other] = [number(&bytes, 48), number(&bytes, 4096 + 48)];
        if one != other {
            found.push("new life half begun");
        }
        lives.push((one.max(other), bytes));
    }
    lives.sort_by_key(|(number, _)| *number);
    let Some((newest, bytes)) = lives.last() else { return found };
    let written = |bytes: &[u8]| number(bytes, 8192 + 8) != 0;
    let first_is_this_lifes = written(bytes) && {
        let lsn = number(bytes, 72) + 8192;
        let word = u32::from_le_bytes(bytes[8192 + 4..8192 + 8].try_into().unwrap());
        let end = 8192 + usize::try_from(word & 0xff_ffff).unwrap() * 8;
        crate::forge::verifies(bytes, 8192..end, lsn, number(bytes, 136))
    };
    if bytes[12] == 2 && *newest > number(&store, 56) {
        found.push("recovery not yet sealed");
    } else if !first_is_this_lifes {
        found.push("successor ready or just rolled to");
    } else {
        found.push("work");
    }
    if lives.iter().any(|(other, _)| *other < number(bytes, 88)) {
        found.push("segment given up");
    }
    found
}

const MOMENTS: [&str; 8] = [
    "creation",
    "file made",
    "new life half begun",
    "successor ready or just rolled to",
    "work",
    "segment given up",
    "recovery not yet sealed",
    "hint being written",
];

/// Kills at every kind of system call and at random lines; nothing that was told is lost.
#[test]
fn what_was_acknowledged_survives_kills_while_segments_roll_retire_and_are_written_again() {
    let rounds = std::env::var("KEYONCE_KILL_MOMENTS").map_or(ROUNDS, |rounds| rounds.parse().unwrap());
    let strace = strace_works();
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("store");
    let mut ledger = Ledger { now_ms: 1_767_225_600_000, ..Ledger::default() };
    let (mut acknowledged, mut hits) = (0, BTreeMap::new());
    for round in 0..rounds {
        // Every so often a new store, for the moments of its creation.
        if round % 10 == 9 && dir.exists() {
            fs::remove_dir_all(&dir).unwrap();
            acknowledged += std::mem::take(&mut ledger.acknowledged);
            ledger = Ledger { now_ms: ledger.now_ms, ..Ledger::default() };
        }
        let random = mixed(round);
        let name = SYSTEM_CALLS[usize::try_from(random % SYSTEM_CALLS.len() as u64).unwrap()];
        let n_max = match name {
            // A child leaves few.
            HINT_WRITE => 3,
            // Nor does the creation of a store take many.
            _ if !dir.exists() => 5,
            _ if round % 3 == 0 => 8,
            _ => 120,
        };
        let n = 1 + random / 64 % n_max;
        let kill_at = (strace && round % 4 != 1).then_some((name, n));
        let lines_max = kill_at.is_none().then_some(20 + random / 8 % 2000);
        run(child(&dir, round, ledger.now_ms + 20, kill_at, 1500), lines_max, &mut ledger);
        if dir.exists() {
            for moment in moments(&dir) {
                *hits.entry(moment).or_insert(0_u64) += 1;
            }
            let copy = root.path().join("copy");
            copy_files(&dir, &copy);
            let store = Store::open(&copy, options(round, &ManualClock::new(ledger.now_ms))).unwrap();
            ledger.check(&store);
            drop(store);
            fs::remove_dir_all(copy).unwrap();
        }
        assert!(ledger.lost.is_empty(), "round {round}, {name} {n}: {:#?}", ledger.lost);
    }
    acknowledged += ledger.acknowledged;
    tell(&format!("kills at moments: {rounds} kills, {acknowledged} acknowledgements, 0 lost; {hits:?}"));
    assert!(acknowledged > 20 * rounds, "{acknowledged} acknowledgements prove nothing");
    if rounds >= ROUNDS_LONG && strace {
        let missed: Vec<_> = MOMENTS.iter().filter(|moment| !hits.contains_key(*moment)).collect();
        assert!(missed.is_empty(), "never hit: {missed:?}");
    }
}

/// Row D11: the creation is killed at every system call that it makes of each kind; what is left opens, and works.
#[test]
fn a_creation_that_is_killed_at_any_system_call_leaves_a_directory_that_opens() {
    if !strace_works() {
        return;
    }
    let mut kills = 0;
    for name in SYSTEM_CALLS {
        for n in 1.. {
            let root = tempfile::tempdir().unwrap();
            let dir = root.path().join("store");
            let child = child(&dir, 0, 1_767_225_600_000, Some((name, n)), 1);
            let came = run(child, None, &mut Ledger::default());
            if came == Came::AtWork {
                break;
            }
            kills += u64::from(came == Came::Opening);
            let store = Store::open(&dir, options(0, &ManualClock::default())).unwrap();
            let Reserve::Fresh(owner) = store.reserve(&key("a"), fingerprint("a")).unwrap() else { panic!("new") };
            assert_eq!(owner.complete(b"paid").unwrap(), Completion::Done);
        }
    }
    tell(&format!("creation: killed at {kills} system calls"));
    assert!(kills >= 10, "only {kills} kills hit the creation");
}

/// A child is killed when one of its threads writes its n-th hint, and the next one goes on with what it left: the hint
/// stands there empty, and its segment is read instead. Hints are left when there is time, so not every child comes so
/// far.
#[test]
fn a_hint_that_is_being_written_at_the_kill_costs_nothing() {
    if !strace_works() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().canonicalize().unwrap().join("store");
    let mut ledger = Ledger { now_ms: 1_767_225_600_000, ..Ledger::default() };
    // A child that ends by itself has had that many acknowledged, and as many again for their ends.
    let keys = 1500;
    let mut kills = 0;
    // Even rounds wait for their syncs, and give the helper its turn.
    for round in (0..60).step_by(2) {
        let n = 1 + round / 2 % 3;
        let before = ledger.acknowledged;
        run(child(&dir, round, ledger.now_ms + 20, Some((HINT_WRITE, n)), keys), None, &mut ledger);
        if ledger.acknowledged - before < keys {
            assert!(moments(&dir).contains(&"hint being written"), "round {round}");
            kills += 1;
        }
        let copy = root.path().join("copy");
        copy_files(&dir, &copy);
        let store = Store::open(&copy, options(round, &ManualClock::new(ledger.now_ms))).unwrap();
        ledger.check(&store);
        assert!(ledger.lost.is_empty(), "round {round}: {:#?}", ledger.lost);
        drop(store);
        fs::remove_dir_all(copy).unwrap();
        if kills == 3 {
            break;
        }
    }
    tell(&format!("hints: {kills} kills, {} acknowledgements, 0 lost", ledger.acknowledged));
    assert!(kills == 3 && ledger.acknowledged > 100, "{kills} kills, {} acknowledgements", ledger.acknowledged);
}

/// Row D6: an opening is killed ten times running, each time further on or nearer to its start, and what comes of it is
/// what comes of one that is left alone.
#[test]
fn an_opening_that_is_killed_ten_times_running_comes_to_the_same() {
    if !strace_works() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("store");
    let mut ledger = Ledger { now_ms: 1_767_225_600_000, ..Ledger::default() };
    run(child(&dir, 1, ledger.now_ms, None, 600), None, &mut ledger);
    let whole = root.path().join("whole");
    copy_files(&dir, &whole);
    let clock = ManualClock::new(ledger.now_ms);
    let answers = |dir: &Path| {
        let store = Store::open(dir, options(1, &clock)).unwrap();
        let ids = ledger.keys.keys();
        ids.map(|id| (id.clone(), snapshot(&store, &key(id)))).collect::<Vec<_>>()
    };
    let expected = answers(&whole);
    assert!(expected.iter().filter(|(_, answer)| answer != "None").count() > 50, "too little is known");
    let (mut kills, mut hit) = (0, BTreeMap::new());
    for attempt in 0..400_u64 {
        let random = mixed(attempt);
        let name = SYSTEM_CALLS[usize::try_from(random % SYSTEM_CALLS.len() as u64).unwrap()];
        // Before an opening begins, the process itself has opened some files.
        let n = 1 + random / 64 % if name == "openat" { 60 } else { 5 };
        // What an opening that comes to its end and works does is not wanted: it works on a copy.
        let tried = root.path().join("tried");
        copy_files(&dir, &tried);
        let child = child(&tried, 1, ledger.now_ms, Some((name, n)), 1);
        let came = run(child, None, &mut Ledger::default());
        if came == Came::Opening {
            kills += 1;
            for moment in moments(&tried) {
                *hit.entry(moment).or_insert(0_u64) += 1;
            }
            fs::remove_dir_all(&dir).unwrap();
            fs::rename(&tried, &dir).unwrap();
        } else {
            fs::remove_dir_all(&tried).unwrap();
        }
        if kills == 10 {
            break;
        }
    }
    tell(&format!("recovery: killed {kills} times running; {hit:?}"));
    assert_eq!(kills, 10);
    assert_eq!(answers(&dir), expected);
}
