//! The system calls of the real storage fail, one by one: a child of this very binary works on a store under strace(1),
//! which has the N-th call of a sort return an error.
//!
//! The child makes a store, works, closes it, opens it again, works, and closes it; whatever fails it tries once more,
//! as a caller would, and it says what it was told. The parent knows what errors may come of which call, opens the store
//! with nothing failing any more, and finds all that was acknowledged. Nothing may panic. An interrupted call, and one
//! that a file system does not offer, must not be noticed at all.
//!
//! Each call of a run fails once, with the errors that it knows going around; with `KEYONCE_SYSTEM_CALLS=all` each fails
//! with all of them.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use keyonce::{AppendMode, Body, Completion, Durability, ErrorKind, Options, Reserve, Store};

use crate::directory::skipped;
use crate::place::{key, request, tell};

const DIR: &str = "KEYONCE_SYSTEM_DIR";
const LEVEL: &str = "KEYONCE_SYSTEM_LEVEL";

/// Keys that a child works on in each of its two runs; five fill a segment.
const KEYS: usize = 9;

/// A child of each: by positioned writes with syncs, and through the map.
const LEVELS: [&str; 2] = ["PowerLoss", "ProcessCrash"];

/// System calls of the storage, and what they may say. The first of each list are such as a caller must never hear of.
const CALLS: [(&str, &[&str], &[&str]); 15] = [
    ("statfs", &["EINTR"], &["EIO", "ENOMEM"]),
    ("mkdir", &["EINTR"], &["ENOSPC", "EDQUOT", "EIO"]),
    ("openat", &["EINTR"], &["EMFILE", "ENFILE", "ENOMEM", "ENOSPC", "EDQUOT", "EIO"]),
    ("flock", &["EINTR"], &["ENOLCK", "EIO"]),
    ("getdents64", &["EINTR"], &["EIO", "ENOMEM"]),
    ("fstatfs", &["EINTR"], &["EIO"]),
    ("statx", &["EINTR"], &["EIO", "ENOMEM"]),
    ("fallocate", &["EOPNOTSUPP", "ENOSYS", "EINTR"], &["ENOSPC", "EDQUOT", "EIO", "EFBIG"]),
    ("mmap", &[], &["ENOMEM", "ENODEV", "EIO"]),
    ("pread64", &["EINTR"], &["EIO"]),
    ("read", &["EINTR"], &["EIO"]),
    ("pwrite64", &["EINTR"], &["EIO", "ENOSPC", "EDQUOT", "EFBIG"]),
    ("fdatasync", &["EINTR"], &["EIO", "ENOSPC", "EDQUOT"]),
    ("fsync", &["EINTR"], &["EIO", "ENOSPC", "EDQUOT"]),
    ("renameat", &["EINTR"], &["EIO", "ENOSPC", "EDQUOT"]),
];

fn options() -> Options {
    let options = Options::new().response_bytes_max(40_000).segment_bytes(192 << 10);
    match std::env::var(LEVEL).as_deref() {
        Ok("ProcessCrash") => options.durability(Durability::ProcessCrash).append_mode(AppendMode::Mapped),
        _ => options,
    }
}

fn response(at: usize) -> Vec<u8> {
    let mut bytes = at.to_string().into_bytes();
    bytes.resize(40_000 - at, u8::try_from(at % 251).unwrap());
    bytes
}

// The child.

/// Works as the environment says; without it, nothing.
#[test]
fn the_child_works_on_whatever_fails() {
    let Ok(dir) = std::env::var(DIR) else { return };
    for run in 0..2 {
        let Some(store) = tried(|| Store::open(&dir, options())) else { continue };
        for at in run * KEYS..(run + 1) * KEYS {
            work(&store, at);
        }
        if tried(|| store.close(Duration::ZERO)).is_some() {
            say("closed");
        }
    }
    say("over");
}

fn say(line: &str) {
    std::io::stderr().write_all(format!("fact {line}\n").as_bytes()).unwrap();
}

/// What a call comes to at its first or second try.
fn tried<T>(mut call: impl FnMut() -> Result<T, keyonce::Error>) -> Option<T> {
    for _ in 0..2 {
        match call() {
            Ok(value) => return Some(value),
            Err(error) => say(&format!("error {} {error}", kind(error.kind()))),
        }
    }
    None
}

fn kind(kind: ErrorKind) -> String {
    match kind {
        ErrorKind::Full { retry_after } if retry_after > Duration::ZERO => "Full".to_owned(),
        other => format!("{other:?}"),
    }
}

fn work(store: &Store, at: usize) {
    let key = key(at.to_string());
    match tried(|| store.reserve(&key, request())) {
        None => {}
        Some(Reserve::Fresh(reservation)) => {
            say(&format!("fresh {at}"));
            let mut reservation = Some(reservation);
            let completed = tried(|| {
                let not_stored = match reservation.take().unwrap().complete(&response(at)) {
                    Ok(completion) => return Ok(completion),
                    Err(not_stored) => not_stored,
                };
                reservation = Some(not_stored.reservation);
                Err(not_stored.error)
            });
            if completed.is_some() {
                assert_eq!(completed, Some(Completion::Done));
                say(&format!("done {at}"));
            }
        }
        // The first try was written and not synced, or its sync has failed.
        Some(Reserve::InFlight(_) | Reserve::Interrupted(_)) => say(&format!("taken {at}")),
        Some(other) => panic!("a new key was answered {other:?}"),
    }
}

// The parent.

/// How calls fail in a run.
#[derive(Clone, Copy, Debug)]
struct Fault {
    level: &'static str,
    call: &'static str,
    error: &'static str,
    /// Nobody may hear of it.
    unheard: bool,
    nth: usize,
}

fn child(dir: &Path, level: &str, before: &[String]) -> Command {
    let mut command = match before {
        [] => Command::new(std::env::current_exe().unwrap()),
        [program, arguments @ ..] => {
            let mut command = Command::new(program);
            command.args(arguments).arg(std::env::current_exe().unwrap());
            command
        }
    };
    command
        .args(["--exact", "system::the_child_works_on_whatever_fails", "--nocapture", "--test-threads=1"])
        .env(DIR, dir)
        .env(LEVEL, level)
        .env_remove("RUST_BACKTRACE")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

/// strace that looks at calls on the store alone, and writes down what it sees.
fn strace(dir: &Path, log: &Path, more: &[String]) -> Vec<String> {
    let mut command: Vec<String> = ["strace", "-f", "--seccomp-bpf", "-qq", "-o"].map(str::to_owned).into();
    command.push(log.to_string_lossy().into_owned());
    let names = (1..16).map(|index| format!("segment-{index:08x}.keyonce"));
    let names = names.chain(["", "LOCK", "keyonce.store", "keyonce.store.tmp"].map(str::to_owned));
    for name in names {
        let path = if name.is_empty() { dir.to_owned() } else { dir.join(name) };
        command.extend(["-P".to_owned(), path.to_string_lossy().into_owned()]);
    }
    command.extend_from_slice(more);
    command
}

fn may_trace() -> bool {
    let tried = Command::new("strace").args(["-f", "--seccomp-bpf", "-qq", "-o", "/dev/null", "true"]).output();
    tried.is_ok_and(|output| output.status.success())
}

/// How often each call is made by the thread that makes it most often.
fn counts(log: &str) -> BTreeMap<String, usize> {
    let mut by_thread: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for line in log.lines() {
        let Some((thread, rest)) = line.split_once(' ') else { continue };
        let Some((call, _)) = rest.trim_start().split_once('(') else { continue };
        *by_thread.entry((thread, call)).or_default() += 1;
    }
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for ((_, call), count) in by_thread {
        let most = counts.entry(call.to_owned()).or_default();
        *most = (*most).max(count);
    }
    counts
}

fn healthy(level: &str) -> BTreeMap<String, usize> {
    let root = tempfile::tempdir().unwrap();
    let (dir, log) = (root.path().join("store"), root.path().join("log"));
    let calls: Vec<_> = CALLS.iter().map(|(call, ..)| *call).collect();
    let trace = ["-e".to_owned(), format!("trace={}", calls.join(","))];
    let output = child(&dir, level, &strace(&dir, &log, &trace)).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !said.contains("fact error"), "{said}");
    assert_eq!(said.matches("fact done").count(), 2 * KEYS, "{said}");
    counts(&fs::read_to_string(log).unwrap())
}

/// Runs a child whose call fails; says whether it was told. `None`: the helper came first this time, and nothing failed.
fn run(fault: Fault) -> Result<Option<bool>, String> {
    let root = tempfile::tempdir().unwrap();
    let (dir, log) = (root.path().join("store"), root.path().join("log"));
    let Fault { level, call, error, nth, .. } = fault;
    let (trace, inject) = (format!("trace={call}"), format!("inject={call}:error={error}:when={nth}"));
    let inject = ["-e", trace.as_str(), "-e", inject.as_str()].map(str::to_owned);
    let output = child(&dir, level, &strace(&dir, &log, &inject)).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if !fs::read_to_string(&log).is_ok_and(|log| log.contains("INJECTED")) {
        return Ok(None);
    }
    let checked = check(fault, &dir, output.status.success(), &said);
    checked.map(Some).map_err(|why| format!("{why}; it said:\n{said}"))
}

fn check(fault: Fault, dir: &Path, ended_well: bool, said: &str) -> Result<bool, String> {
    let Fault { call, error, unheard, .. } = fault;
    let facts: Vec<_> = said.lines().filter_map(|line| line.strip_prefix("fact ")).collect();
    if !ended_well || facts.last() != Some(&"over") {
        return Err("the child did not come to its end".to_owned());
    }
    let told: Vec<_> = facts.iter().filter_map(|fact| fact.strip_prefix("error ")).collect();
    if unheard && !told.is_empty() {
        return Err("a caller heard of it".to_owned());
    }
    let full = ["ENOSPC", "EDQUOT"].contains(&error);
    let mut poisoned = false;
    for told in &told {
        let (kind, message) = told.split_once(' ').unwrap();
        let right = match kind {
            "Full" => full,
            "Io" => !full || poisoned,
            "Poisoned" => ["pwrite64", "fdatasync"].contains(&call),
            // What a failed close leaves closed.
            "Closed" => poisoned,
            _ => false,
        };
        let explained = error != "EMFILE" || (message.contains("ulimit -n") && message.contains("segment_bytes"));
        if !right || !explained {
            return Err(format!("told {told}"));
        }
        poisoned |= kind == "Poisoned";
    }
    // One try more is always enough, unless the store was poisoned or was never opened.
    let done = facts.iter().filter(|fact| fact.starts_with("done")).count();
    if !poisoned && done != 2 * KEYS {
        return Err(format!("{done} keys are done"));
    }
    let store = Store::open(dir, options()).map_err(|error| format!("it does not open again: {error:?}"))?;
    for fact in &facts {
        let Some((what @ ("fresh" | "done" | "taken"), at)) = fact.split_once(' ') else { continue };
        let at: usize = at.parse().unwrap();
        let found = store.reserve(&key(at.to_string()), request()).map_err(|error| error.to_string())?;
        match found {
            Reserve::Replay(replay) if replay.body() == Body::Kept(&response(at)) => {}
            Reserve::Interrupted(_) if !facts.contains(&format!("done {at}").as_str()) => {}
            // Nobody was told that it is theirs.
            Reserve::Fresh(_) if what == "taken" => {}
            other => return Err(format!("{fact}, and then {other:?}")),
        }
    }
    Ok(!told.is_empty())
}

#[test]
fn each_system_call_fails_in_its_turn_and_nothing_acknowledged_is_lost() {
    if !may_trace() {
        skipped("each_system_call_fails_in_its_turn_and_nothing_acknowledged_is_lost: strace may not run");
        return;
    }
    let all = std::env::var("KEYONCE_SYSTEM_CALLS").is_ok_and(|which| which == "all");
    let mut faults = Vec::new();
    for level in LEVELS {
        let counts = healthy(level);
        for (call, unheard, heard) in CALLS {
            let count = counts.get(call).copied().unwrap_or(0);
            let errors: Vec<_> =
                unheard.iter().map(|error| (*error, true)).chain(heard.iter().map(|error| (*error, false))).collect();
            for nth in 1..=count {
                for (at, (error, unheard)) in errors.iter().copied().enumerate() {
                    if all || (at + nth) % errors.len() == 0 || (count < errors.len() && nth == 1) {
                        faults.push(Fault { level, call, error, unheard, nth });
                    }
                }
            }
        }
    }
    let (next, told, missed) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let wrong = Mutex::new(Vec::new());
    std::thread::scope(|threads| {
        for _ in 0..2 {
            threads.spawn(|| {
                while let Some(fault) = faults.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match run(*fault) {
                        Ok(was_told) => {
                            missed.fetch_add(usize::from(was_told.is_none()), Ordering::Relaxed);
                            told.fetch_add(usize::from(was_told == Some(true)), Ordering::Relaxed);
                        }
                        Err(why) => wrong.lock().unwrap().push(format!("{fault:?}: {why}")),
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{} of {} runs went wrong:\n{}", wrong.len(), faults.len(), wrong.join("\n"));
    let sorts: std::collections::BTreeSet<_> = faults.iter().map(|fault| fault.call).collect();
    let (told, missed) = (told.into_inner(), missed.into_inner());
    let runs = faults.len();
    tell(&format!("system calls: {runs} runs, nothing failed in {missed}, callers were told in {told}; {sorts:?}"));
    // How many calls the helper makes, with hints among them, depends on when it gets its turn.
    assert!(missed * 4 < runs, "in {missed} of {runs} runs nothing failed");
    for call in ["openat", "flock", "fallocate", "mmap", "pwrite64", "fdatasync", "fsync", "renameat", "getdents64"] {
        assert!(sorts.contains(call), "no {call} has failed");
    }
    assert!(told * 4 > runs, "hardly a caller was told");
}

/// Pages that are readied ahead of a writer, and the page that notices a fork: comforts, both.
#[test]
fn without_advice_to_the_kernel_all_works() {
    if !may_trace() {
        skipped("without_advice_to_the_kernel_all_works: strace may not run");
        return;
    }
    for level in LEVELS {
        for error in ["EINVAL", "ENOMEM", "EIO"] {
            let root = tempfile::tempdir().unwrap();
            let dir = root.path().join("store");
            let strace = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", "/dev/null", "-e", "trace=madvise", "-e"];
            let inject = format!("inject=madvise:error={error}");
            let before: Vec<_> = strace.into_iter().chain([inject.as_str()]).map(str::to_owned).collect();
            let output = child(&dir, level, &before).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            let fault = Fault { level, call: "madvise", error, unheard: true, nth: 0 };
            check(fault, &dir, output.status.success(), &said).unwrap();
        }
    }
}

/// A limit on the length of files, below that of a segment: where blocks cannot be set aside first, a write is cut short
/// at the limit, and the next one refused.
#[test]
fn a_write_that_is_cut_short_by_a_limit_on_files_is_told_and_leaves_nothing_behind() {
    for injected in [None, Some("inject=fallocate:error=EOPNOTSUPP")] {
        if injected.is_some() && !may_trace() {
            skipped("a_write_that_is_cut_short_by_a_limit_on_files_is_told: strace may not run");
            continue;
        }
        let root = tempfile::tempdir().unwrap();
        let dir: PathBuf = root.path().join("store");
        let log = root.path().join("log");
        let before = match injected {
            None => Vec::new(),
            Some(inject) => {
                let trace = ["-e", "trace=fallocate,pwrite64", "-e", inject].map(str::to_owned);
                strace(&dir, &log, &trace)
            }
        };
        let mut command = child(&dir, "PowerLoss", &before);
        limited(&mut command, libc::RLIMIT_FSIZE, 100_000);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert_eq!(said.matches("fact error Io").count(), 4, "{said}");
        assert!(said.contains("ulimit -f"), "{said}");
        let left: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["LOCK"]);
        if injected.is_some() {
            let log = fs::read_to_string(log).unwrap();
            assert!(log.contains("65536, 65536) = 34464"), "no write was cut short: {log}");
        }
        Store::open(&dir, options()).unwrap();
    }
}

/// Starts the command under a limit of the system, of which a signal says nothing.
#[expect(unsafe_code, reason = "what a process does between fork and exec")]
fn limited(command: &mut Command, resource: libc::__rlimit_resource_t, most: u64) {
    let limit = move || {
        let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
        // SAFETY: both calls may be made between fork and exec, and `limit` is a value of our own.
        let done = unsafe {
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN) != libc::SIG_ERR
                && libc::setrlimit(resource, &raw const limit) == 0
        };
        if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: the closure makes two system calls and touches nothing of the parent's.
    unsafe { command.pre_exec(limit) };
}
