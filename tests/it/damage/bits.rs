//! Every bit of a small store flipped, and its newest segment cut at every byte.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::small::{End, SEGMENT_BYTES, Small};
use crate::place::tell;

/// Where the code is not optimized, one in so many of the bits that somebody wrote is flipped, and one in so many cuts
/// among them is made. The distance is odd and no divisor of a record's length, so that every field has its turn.
const WRITTEN_DEBUG: usize = 31;
/// The same of bits that nobody wrote.
const BLANK_DEBUG: usize = 1999;

/// Which of `cases` are due: all of them in a release build, or with `KEYONCE_EVERY_BIT=1`.
fn due(cases: impl Iterator<Item = usize>, written: impl Fn(usize) -> bool) -> Vec<usize> {
    if !cfg!(debug_assertions) || std::env::var("KEYONCE_EVERY_BIT").is_ok_and(|every| every == "1") {
        return cases.collect();
    }
    cases.filter(|case| case.is_multiple_of(if written(*case) { WRITTEN_DEBUG } else { BLANK_DEBUG })).collect()
}

/// Runs `case` for each of `cases`, on as many threads as there are processors; says how many were refused.
fn each(cases: &[usize], case: impl Fn(usize) -> bool + Sync) -> usize {
    let (next, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|threads| {
        for _ in 0..thread::available_parallelism().map_or(2, |threads| threads.get()) {
            threads.spawn(|| {
                while let Some(number) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    refused.fetch_add(usize::from(case(*number)), Ordering::Relaxed);
                }
            });
        }
    });
    refused.into_inner()
}

/// Row D1, and R15 for every mark of the log: each bit, and exactly what must be said of it.
#[test]
fn every_bit_of_a_small_store_flipped_is_told_by_place_or_costs_nothing_but_its_own_record() {
    for end in [End::Closed, End::Killed, End::JustOpened] {
        let small = Small::new(end);
        // Where each file begins, were they one.
        let mut starts = vec![0];
        for (_, bytes) in &small.files {
            starts.push(starts.last().unwrap() + bytes.len());
        }
        let bits = starts.last().unwrap() * 8;
        let place = |bit: usize| {
            let file = starts.partition_point(|start| *start <= bit / 8) - 1;
            (file, bit / 8 - starts[file])
        };
        let cases = due(0..bits, |bit| {
            let (file, at) = place(bit);
            small.is_written(file, at)
        });
        let refused = each(&cases, |bit| {
            let (file, at) = place(bit);
            let disk = small.disk.kill();
            let name = &small.files[file].0;
            disk.damage(name, |bytes| bytes[at] ^= 1 << (bit % 8));
            small.check(&disk, &small.expect_flipped(file, at), &format!("{end:?}: {name} byte {at} bit {}", bit % 8))
        });
        let flipped = cases.len();
        tell(&format!("{end:?}: {flipped} of {bits} bits flipped, {refused} refused"));
        assert!(refused * 40 > flipped, "{end:?}: {refused} of {flipped} refused");
    }
}

/// Row D2, of a store that was closed and of one that was killed.
#[test]
fn a_newest_segment_cut_at_every_byte_keeps_what_lay_before_or_is_refused_by_place() {
    for end in [End::Closed, End::Killed, End::JustOpened] {
        let small = Small::new(end);
        let file = small.newest();
        let cases = due(0..SEGMENT_BYTES, |cut| small.is_written(file, cut));
        let refused = each(&cases, |cut| {
            let disk = small.disk.kill();
            let name = &small.files[file].0;
            disk.damage(name, |bytes| bytes.truncate(cut));
            small.check(&disk, &small.expect_cut(cut), &format!("{end:?}: {name} cut at {cut}"))
        });
        let cuts = cases.len();
        tell(&format!("{end:?}: {cuts} of {SEGMENT_BYTES} cuts, {refused} refused"));
        assert!(refused > 0 && refused < cuts, "{end:?}: {refused} of {cuts} refused");
    }
}
