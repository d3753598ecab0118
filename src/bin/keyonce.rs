//! The program `keyonce`.
fn main() {}
