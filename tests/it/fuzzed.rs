//! What the fuzzers have found worth keeping, replayed; and as much again of bytes by chance.
//!
//! The fuzzers themselves: `.ci/run` runs each for half a minute. For longer, from the project's root:
//!
//! ```text
//! mkdir -p fuzz/found/recover
//! RUSTC_BOOTSTRAP=1 cargo fuzz run --sanitizer none recover fuzz/found/recover fuzz/corpus/recover -- \
//!     -max_total_time=900 -max_len=400 -len_control=0
//! ```
//!
//! and `ops`, `decode` likewise. New inputs go to the first directory, which must exist. Of these
//! `cargo fuzz cmin --sanitizer none recover` keeps those that the corpus needs. A finding is replayed by
//! `cargo fuzz run --sanitizer none recover FILE`; with `KEYONCE_FUZZ_TELL` set it tells what it is.
//!
//! A failure by chance prints `KEYONCE_FUZZED_SEED=n`; with that variable set, each test here runs that seed alone.

use std::fs;
use std::path::Path;

use keyonce::testing::RecoveryCases;

use crate::examine::{caught, number};
use crate::machine::bytes;
use crate::place::tell;
use crate::workload::Random;

/// Gives `exercise` every input of the corpus, and `count` more by chance of up to `len_max` bytes.
fn replay(target: &str, count: u64, len_max: u64, exercise: impl Fn(&[u8]) -> Result<(), String>) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let only = number("KEYONCE_FUZZED_SEED");
    let mut files = 0;
    // The published crate comes without the corpus.
    if corpus.exists() && only.is_none() {
        for entry in fs::read_dir(corpus).unwrap() {
            let path = entry.unwrap().path();
            let bytes = fs::read(&path).unwrap();
            caught(|| exercise(&bytes)).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
            files += 1;
        }
        assert!(files >= 20, "the corpus of {target} has {files} files");
    }
    for seed in only.map_or(1..=count, |only| only..=only) {
        let mut random = Random(seed);
        let len = usize::try_from(random.below(len_max)).unwrap();
        let bytes: Vec<u8> = std::iter::repeat_with(|| random.next().to_le_bytes()).flatten().take(len).collect();
        caught(|| exercise(&bytes)).unwrap_or_else(|why| panic!("KEYONCE_FUZZED_SEED={seed}: {why}"));
    }
    tell(&format!("{target}: {files} inputs of the corpus, {count} by chance"));
}

#[test]
fn damaged_directories_open_soundly_or_are_refused_untouched() {
    let cases = RecoveryCases::new();
    replay("recover", 60, 80, |bytes| {
        cases.exercise(bytes, |opening| {
            opening();
            0
        });
        Ok(())
    });
}

#[test]
fn operations_amid_faults_agree_with_the_model() {
    replay("ops", 60, 600, |bytes| bytes::run(bytes).0);
}
