//! The program `keyonce`. All it does is in `cli`.

use std::process::ExitCode;

#[path = "../cli/mod.rs"]
mod cli;

fn main() -> ExitCode {
    cli::main()
}
