//! How far a long job is, on a terminal only.
//!
//! Never writes to standard output, and nothing at all where standard error is no terminal.

use std::borrow::Cow;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar for `n` pieces of `what`. It vanishes when it is dropped or finished.
pub fn bar(n: u64, what: impl Into<Cow<'static, str>>) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} [{bar:32}] {pos}/{len} {eta}").expect("a constant template");
    let bar = ProgressBar::with_draw_target(Some(n), ProgressDrawTarget::stderr());
    bar.with_style(style.progress_chars("=> ")).with_message(what)
}
