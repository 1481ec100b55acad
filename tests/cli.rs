//! The `eldr` program as a shell sees it: exit codes, both output streams, and a sentence for every bad input.

#[path = "cli/bad_input.rs"]
mod bad_input;
#[path = "cli/calibrating.rs"]
mod calibrating;
#[cfg(unix)]
#[path = "cli/outputs.rs"]
mod outputs;
#[path = "cli/settings.rs"]
mod settings;
#[path = "cli/simulating.rs"]
mod simulating;
mod support;
#[path = "cli/verbs.rs"]
mod verbs;

use std::{
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
};

use serde_json::Value;
use support::planted::{self, Arch};
use tempfile::TempDir;

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data");
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-moe-64x4.gguf");

/// What a verb may say before it fails.
const NOTES: [&str; 2] = ["eldr: no -m given: using the shipped test model", "eldr: policy locality_band is left out"];

/// Two programs that compute at once would have more threads than there are cores.
static COMPUTING: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    COMPUTING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The program with these arguments and none of the caller's settings. One thread a worker: a second one waits for the
/// first at every node, which takes forever on cores that are busy with something else.
fn eldr<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_eldr"));
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("ELDR_")) {
        command.env_remove(name);
    }
    command.args(args).env("ELDR_THREADS", "1").stdin(Stdio::null());
    command
}

/// What a finished program left behind.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("the program writes UTF-8");
        Self { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }
}

impl Ran {
    #[track_caller]
    fn succeeded(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }

    /// Standard output as the one JSON document it must be.
    #[track_caller]
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("not one JSON document ({error}): {self:?}"))
    }

    /// The sentence after `eldr: `, which must be the last line of standard error.
    #[track_caller]
    fn sentence(&self) -> &str {
        let last = self.err.lines().last().unwrap_or_default();
        assert!(!self.err.contains("panicked") && !self.err.contains("RUST_BACKTRACE"), "{self:?}");
        last.strip_prefix("eldr: ").unwrap_or_else(|| panic!("no sentence: {self:?}"))
    }
}

fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Ran {
    let _alone = alone();
    eldr(args).output().expect("the program starts").into()
}

/// Runs a command line of words without spaces in them.
fn line(words: &str) -> Ran {
    run(words.split_whitespace())
}

/// Expects exit code 2, nothing but one sentence, and that it holds all of `wanted`.
#[track_caller]
fn refused(args: &[&str], wanted: &[&str]) {
    let ran = run(args);
    assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""), "{args:?}: {ran:?}");
    let sentence = ran.sentence();
    for want in wanted {
        assert!(sentence.contains(want), "{args:?}: '{want}' is not in: {sentence}");
    }
    let is_note = |line: &&str| NOTES.iter().any(|note| line.starts_with(note));
    let n_notes = ran.err.lines().filter(is_note).count();
    assert_eq!(ran.err.lines().count(), 1 + n_notes, "more than a sentence: {ran:?}");

    // The bench writes its JSON where it is told to.
    let json = if args[0] == "bench" { "--json=-" } else { "--json" };
    let with_json: Vec<&str> = args.iter().take(1).copied().chain([json]).chain(args[1..].iter().copied()).collect();
    let ran = run(&with_json);
    assert_eq!(ran.code, Some(2), "{with_json:?}: {ran:?}");
    let error = &ran.json()["error"];
    assert_eq!(error["message"], sentence, "{with_json:?}");
    assert!(["usage", "input"].contains(&error["kind"].as_str().unwrap_or_default()), "{error}");
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a temporary folder has a Unicode name")
}

fn write(dir: &TempDir, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = dir.path().join(name);
    fs::write(&path, content).expect("written");
    path
}

/// A model without experts.
fn dense(dir: &TempDir) -> PathBuf {
    let path = dir.path().join("dense.gguf");
    planted::write(Arch::DenseLlama, &path, 1);
    path
}
