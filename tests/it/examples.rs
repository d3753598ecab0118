//! The programs in `examples/` do what they say: each runs as a user would run it, ends well, and prints what it is
//! there to show.
//!
//! `cargo test` builds the examples, `cargo test --test it` does not; so the first test asks cargo to, which has
//! nothing to do when they are built already.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// Every example for readers, and beginnings of lines that it must print. Keys come off a list in any order.
const EXAMPLES: [(&str, &[&str]); 8] = [
    (
        "guard_and_lease",
        &[
            "  another caller: running, lease left 60s",
            "  a retry is answered: three parts",
            "  nobody took over, so the late completion counts",
            "  a retry is answered: late, but done",
            "  attempt 2 goes on where it finds: 2 of 10 letters are sent",
            "  the first owner's completion: superseded",
            "  a retry is answered: by the second",
            "  nobody renewed, lease left 30s",
            "  a retry is answered: in the end",
        ],
    ),
    (
        "crash_and_recover",
        &[
            "opened: clean false, interrupted keys 3",
            "order-1: the provider has charged it: resolve",
            "order-2: the provider knows nothing of it: release",
            "order-2: attempt 1 charges under the downstream key",
            "order-3: attempt 2 charges under the downstream key",
            "three orders, three crashes, three charges",
        ],
    ),
    (
        "async_once",
        &[
            "two tasks, charges: 1",
            "waiter: the key is mine now",
            "dropped while it reserves (ready: false): nothing is left behind",
            "dropped while it charges: interrupted, ask under aac4a098bd4b5e674d402e4bae5e5940",
        ],
    ),
    (
        "completer",
        &[
            "well: a retry after the restart: running for 3600s more",
            "well: charged and completed",
            "twice-delivered: delivered again, and settled by now",
            "charged-then-died: Dropped, and the provider has charged it: resolve",
            "died-at-once: Dropped, and the provider knows nothing of it: release",
            "never-taken: the lease lapsed, its worker may still be at work: later",
            "never-taken: LeaseLapsed, and the provider knows nothing of it: release",
            "charged-then-died: a retry is answered, charges: 1",
            "died-at-once: a retry runs as new, charges: 0",
        ],
    ),
    (
        "queue_consumer",
        &[
            "m-1, new: Ack",
            "m-1, delivered again: Ack",
            "m-1, its id with another letter: DeadLetter(\"its id stands for another message\")",
            "m-2, running elsewhere: Again(40s)",
            "m-2, interrupted, not sent: Ack",
            "m-3, the post takes nothing: Again(5s)",
            "m-1, delivered again after a day: DeadLetter(\"it may have been handled and forgotten\")",
            "letters sent: [\"Dear Ada\", \"Dear Carl\"]",
        ],
    ),
    (
        "axum_tips",
        &[
            "  try 1: no answer in time",
            "  the client gave up after 6 tries, and the reader was charged 6 times",
            "  try 2: 409 Conflict",
            "  the client tried ",
        ],
    ),
    (
        "reqwest_retry",
        &[
            "  503 Service Unavailable, to come back after 1s: the same request again, under the same key",
            "  502 Bad Gateway: the same request again, under the same key",
            "paid: charge 1 of 9.99 EUR, replayed: true",
            "charges: 1",
            "refused at once: 422 Unprocessable Entity",
        ],
    ),
    ("crash_test", &["the careful handler: ", "the careless handler: ", "  deaths: "]),
];

/// The directory with the built examples.
static BUILT: LazyLock<PathBuf> = LazyLock::new(|| {
    let profile_dir = Path::new(env!("CARGO_BIN_EXE_keyonce")).parent().unwrap();
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--examples", "--quiet", "--locked", "--offline"]);
    build.env("CARGO_TARGET_DIR", profile_dir.parent().unwrap()).current_dir(env!("CARGO_MANIFEST_DIR"));
    match profile_dir.file_name().and_then(|name| name.to_str()).unwrap() {
        "debug" => {}
        profile => _ = build.args(["--profile", profile]),
    }
    assert!(build.status().unwrap().success(), "the examples are built");
    profile_dir.join("examples")
});

fn source(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("examples/{name}.rs"))).unwrap()
}

/// Runs an example and gives what it printed.
fn run(name: &str, arguments: &[&Path], dir: &Path) -> String {
    let ran = Command::new(BUILT.join(name)).args(arguments).current_dir(dir).output().unwrap();
    let (printed, complaint) = (String::from_utf8(ran.stdout).unwrap(), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{name} ended with {}: {printed}{complaint}", ran.status);
    printed
}

/// Asserts that lines which begin so were printed.
fn assert_printed(name: &str, printed: &str, expected: &[&str]) {
    for expected in expected {
        let found = printed.lines().any(|line| line.starts_with(expected));
        assert!(found, "{name} does not print \"{expected}\":\n{printed}");
    }
}

#[test]
fn every_example_ends_well_and_shows_what_it_is_there_for() {
    for (name, expected) in EXAMPLES {
        let dir = tempfile::tempdir().unwrap();
        assert_printed(name, &run(name, &[], dir.path()), expected);
        if source(name).contains("[DIRECTORY]") {
            assert_printed(name, &run(name, &[&dir.path().join("named")], dir.path()), expected);
        }
        let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(left.iter().all(|left| left == "named"), "{name} leaves {left:?} behind");
    }
}

#[test]
fn the_first_example_prints_what_the_readme_says_and_remembers() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(run("hello_once", &[], dir.path()), "executed\nreplayed\nmismatch\n");
    assert_eq!(run("hello_once", &[], dir.path()), "replayed\nreplayed\nmismatch\n");
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let example = source("hello_once");
    let (_, code) = example.split_once("\n\n").unwrap();
    assert!(readme.contains(code), "the README shows examples/hello_once.rs as it is");
}

#[test]
fn one_pair_syncs_twice_a_pair_and_replays_them_all() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let pairs = Path::new("7");
    assert_eq!(run("one_pair", &[&store, pairs], dir.path()), "executed 7, replayed 0, log syncs 14\n");
    assert_eq!(run("one_pair", &[&store, pairs], dir.path()), "executed 0, replayed 7, log syncs 0\n");
}

#[test]
fn no_example_is_left_out() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let found = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    // A directory is a package of its own.
    let found: BTreeSet<_> = found.filter(|path| path.is_file()).map(|path| path.file_name().unwrap().into()).collect();
    let tested = EXAMPLES.iter().map(|(name, _)| *name).chain(["hello_once", "one_pair"]);
    assert_eq!(found, tested.map(|name| format!("{name}.rs").into()).collect::<BTreeSet<std::ffi::OsString>>());
}
