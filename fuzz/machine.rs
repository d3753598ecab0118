//! The driver of the tests, which holds a store against the model.

#[path = "../tests/it/machine/bytes.rs"]
pub(crate) mod bytes;
#[path = "../tests/it/machine/driver/mod.rs"]
pub(crate) mod driver;
#[path = "../src/testing/fuzz/input.rs"]
pub(crate) mod input;
#[path = "../tests/it/machine/ops.rs"]
pub(crate) mod ops;

pub(crate) use self::ops::{Op, Reboot, Reopen, With, Work};
