//! `keyonce demo`: the story of the problem, on a real store in a temporary directory.

use std::process::ExitCode;

use clap::Args;

/// What `keyonce demo` is asked for.
#[derive(Args, Debug)]
pub(crate) struct DemoArgs {}

/// Tells the story; fails when one of its claims does not hold.
pub(crate) fn demo(_args: DemoArgs) -> ExitCode {
    super::say("the demo is not part of this build");
    ExitCode::from(super::KEYONCE_FAILED)
}
