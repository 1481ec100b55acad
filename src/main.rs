//! The `eldr` program: what the shell gives goes in, an exit code comes out.
//!
//! Never does a verb's work; that is in [`cli`].

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main(std::env::args_os().collect())
}
