//! The program `keyonce`.

use std::process::ExitCode;

use clap::Parser;

#[path = "../cli"]
mod cli {
    pub(crate) mod demo;
}

#[derive(Parser)]
#[command(version, about)]
enum Program {
    /// Shows on a real store what a key is good for: payments over a link that loses messages
    Demo(cli::demo::DemoArgs),
}

fn main() -> ExitCode {
    match Program::parse() {
        Program::Demo(args) => cli::demo::demo(&args),
    }
}
