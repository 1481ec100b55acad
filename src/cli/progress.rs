//! How far a long job is, on a terminal only, and how it ends when it is interrupted.
//!
//! Never writes to standard output.

use std::borrow::Cow;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::output::{complain, end_now};

/// Ctrl-C ends the program with this sentence, exit code 1.
pub fn end_on_interrupt(sentence: &'static str) {
    let installed = ctrlc::set_handler(move || {
        complain(&format!("eldr: interrupted: {sentence}"));
        end_now(1);
    });
    if let Err(error) = installed {
        log::warn!("Ctrl-C will end without a word: {error}");
    }
}

/// A bar for `n` pieces of `what`. It vanishes when it is dropped or finished.
pub fn bar(n: u64, what: impl Into<Cow<'static, str>>) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} [{bar:32}] {pos}/{len} {eta}").expect("a constant template");
    let bar = ProgressBar::with_draw_target(Some(n), ProgressDrawTarget::stderr());
    bar.with_style(style.progress_chars("=> ")).with_message(what)
}
