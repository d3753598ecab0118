//! What callers of a store do, with faults and crashes, against the model.

#![no_main]

#[path = "../../tests/it/place.rs"]
#[expect(dead_code, reason = "the driver of the tests needs a little of it")]
mod place;
#[path = "../../tests/it/workload.rs"]
#[expect(dead_code, reason = "the driver of the tests needs a little of it")]
mod workload;

#[path = "../machine.rs"]
#[expect(dead_code, reason = "the tests make operations by other means, too")]
mod machine;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let (Err(why), _) = machine::bytes::run(bytes) {
        panic!("{why}");
    }
});
