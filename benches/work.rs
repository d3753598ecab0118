//! The reference work, which every bench does: an id of 36 bytes, a scope of 8, a fingerprint of 16, a response of 200.

use std::path::PathBuf;
use std::time::Instant;

use keyonce::{Completion, Fingerprint, Key, Reserve, Store};
use tempfile::TempDir;

/// What is stored for each key.
pub(crate) const RESPONSE: [u8; 200] = [0x5a; 200];
const SCOPE: &str = "charges!";

/// The key of that number: 36 bytes, like a UUID.
pub(crate) fn key(number: u64) -> Key {
    let id = format!("{:08x}-7a4c-4e01-9b55-{:012x}", number.wrapping_mul(0x9e37_79b9) & 0xffff_ffff, number);
    Key::new(SCOPE, &id).expect("a key of 36 bytes")
}

/// The fingerprint of every request.
pub(crate) fn request() -> Fingerprint {
    Fingerprint::from_bytes([0x17; 16])
}

/// A **pair**: one reserve that is told Fresh, and the completion of it. Says the token, which is the place in the log
/// where the pair began.
pub(crate) fn pair(store: &Store, key: &Key) -> u64 {
    let reservation = match store.reserve(key, request()).expect("a sound store") {
        Reserve::Fresh(reservation) => reservation,
        other => panic!("a key that nobody has used: {other:?}"),
    };
    let token = reservation.token().to_u64();
    assert_eq!(reservation.complete(&RESPONSE).expect("a sound store"), Completion::Done);
    token
}

/// A new directory, in `KEYONCE_BENCH_DIR` if that is set.
pub(crate) fn directory() -> TempDir {
    let parent = std::env::var_os("KEYONCE_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    tempfile::tempdir_in(parent).expect("a directory for the bench")
}

/// A number from the environment, or what it is without.
pub(crate) fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |set| set.parse().unwrap_or_else(|_| panic!("{name} is a whole number")))
}

/// The moment.
#[expect(clippy::disallowed_methods, reason = "a bench measures real time")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// The middle one of what was measured, in order; not a number when nothing was.
pub(crate) fn median(measured: &[f64]) -> f64 {
    let mut sorted = measured.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// How many threads wanted a processor lately, and how many processors there are: figures are to be read beside it.
pub(crate) fn load() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: Vec<_> = load.split(' ').take(3).collect();
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    format!("load {} on {processors} processors", load.join(" "))
}

/// What a comparison with a wanted figure comes to.
pub(crate) fn verdict(reached: bool) -> &'static str {
    if reached { "reached" } else { "MISSED" }
}
