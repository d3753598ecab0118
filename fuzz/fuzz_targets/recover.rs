//! Opening a directory whose files may hold anything, as they are and with their checks made to hold.

#![no_main]

use std::sync::LazyLock;

use keyonce::testing::RecoveryCases;
use libfuzzer_sys::fuzz_target;
use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

static CASES: LazyLock<RecoveryCases> = LazyLock::new(RecoveryCases::new);

fuzz_target!(|bytes: &[u8]| CASES.exercise(bytes, |opening| {
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    opening();
    MEMORY.peak_usage().saturating_sub(before) as u64
}));
