//! Every decoder of the format before arbitrary bytes, as they are and with their checks made to hold.

#![no_main]

use keyonce::testing::exercise_decoders;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| exercise_decoders(bytes));
