use std::{fmt, io};

use eldr::{
    engine::{CalibrationFileError, ConfigProblems, EngineError, LlamaError},
    types::visible,
};
use serde_json::{Value, json};

/// Whose fault a failure is; it decides the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The command line, the environment or the configuration file: exit code 2.
    Usage,
    /// A file, a device or a prompt that can not be used: exit code 2.
    Input,
    /// What was asked for is sound, but did not work: exit code 1.
    Failed,
    /// The JSON document already says what failed, or how far it came: exit code 1.
    Told,
    /// Nobody reads the output any more: exit code 0, and silence.
    Closed,
}

/// What the system and the standard library say of a file, and what they mean.
const SYSTEM: [(&str, &str); 6] = [
    ("Is a directory (os error 21)", "it is a folder, and a file is needed"),
    ("No such file or directory (os error 2)", "there is no such file or folder"),
    ("Permission denied (os error 13)", "this user may not"),
    ("Not a directory (os error 20)", "part of the path is a file, not a folder"),
    ("No space left on device (os error 28)", "the disk is full"),
    ("stream did not contain valid UTF-8", "it is not text in UTF-8"),
];

/// Why a verb ended early, in one sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CliError {
    pub kind: Kind,
    pub message: String,
}

impl CliError {
    /// Whatever the message quotes, it stays one line and does a terminal no harm.
    fn new(kind: Kind, message: &impl fmt::Display) -> Self {
        let message = SYSTEM.iter().fold(message.to_string(), |text, (theirs, ours)| text.replace(theirs, ours));
        Self { kind, message: visible(&message) }
    }

    pub fn usage(message: impl fmt::Display) -> Self {
        Self::new(Kind::Usage, &message)
    }

    pub fn input(message: impl fmt::Display) -> Self {
        Self::new(Kind::Input, &message)
    }

    pub fn failed(message: impl fmt::Display) -> Self {
        Self::new(Kind::Failed, &message)
    }

    /// All that is wrong with a configuration, in one line.
    pub fn problems(kind: Kind, problems: &ConfigProblems) -> Self {
        let all: Vec<&str> = problems.iter().collect();
        Self::new(kind, &all.join("; "))
    }

    /// A failure whose document was printed already.
    pub fn already_told(message: impl fmt::Display) -> Self {
        Self::new(Kind::Told, &message)
    }

    pub fn exit_code(&self) -> u8 {
        match self.kind {
            Kind::Usage | Kind::Input => 2,
            Kind::Failed | Kind::Told => 1,
            Kind::Closed => 0,
        }
    }

    /// `{"error": {"message", "kind"}}`.
    pub fn to_json(&self) -> Value {
        json!({ "error": { "message": self.message, "kind": self.kind.name() } })
    }
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Usage => "usage",
            Self::Input => "input",
            Self::Failed => "failed",
            Self::Told => "told",
            Self::Closed => "closed",
        }
    }
}

impl From<EngineError> for CliError {
    fn from(error: EngineError) -> Self {
        if let EngineError::Problems(problems) = &error {
            return Self::problems(Kind::Input, problems);
        }
        if is_input(&error) { Self::input(error) } else { Self::failed(error) }
    }
}

/// Whether other input would have worked.
fn is_input(error: &EngineError) -> bool {
    match error {
        EngineError::Request(_) | EngineError::Config(_) | EngineError::Problems(_) | EngineError::Calibration(_) => {
            true
        }
        EngineError::CalibrationFile(error) => !matches!(error, CalibrationFileError::Write { .. }),
        EngineError::TraceFile(error) => error.is_input(),
        EngineError::Llama(error) => !matches!(
            error,
            LlamaError::BatchFull { .. }
                | LlamaError::OutOfRange { .. }
                | LlamaError::StateGet { .. }
                | LlamaError::StateSet { .. }
                | LlamaError::Sequence { .. }
                | LlamaError::Context { .. }
        ),
        _ => false,
    }
}

/// From writing results; reading has its own messages.
impl From<io::Error> for CliError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self { kind: Kind::Closed, message: "the output was closed".to_owned() },
            _ => Self::failed(format!("cannot write the output: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Symptom: "cannot read dir: Is a directory (os error 21)".
    #[test]
    fn what_the_system_says_is_said_in_our_words() {
        let said = |kind: io::ErrorKind| CliError::input(io::Error::from(kind)).message;
        assert_eq!(said(io::ErrorKind::Other), "other error");
        for (code, wanted) in [(2, "there is no such file or folder"), (21, "it is a folder, and a file is needed")] {
            let error = io::Error::from_raw_os_error(code);
            assert_eq!(CliError::input(format!("cannot read x: {error}")).message, format!("cannot read x: {wanted}"));
        }
        let text = io::read_to_string(&b"\xff"[..]).expect_err("no text");
        assert_eq!(CliError::usage(text).message, "it is not text in UTF-8");
    }

    // Symptom: two mistakes were told in one line with a literal `\n` between them.
    #[test]
    fn several_problems_are_one_line() {
        let wrong = eldr::engine::EngineConfig { n_slots: 0, chunk: 0, ..eldr::engine::EngineConfig::default() };
        let problems = wrong.check().expect_err("two mistakes");
        for error in [CliError::problems(Kind::Usage, &problems), EngineError::Problems(problems.clone()).into()] {
            let (first, second) = error.message.split_once("a context; ").expect("two of them");
            assert!(first.starts_with("slots must be") && second.starts_with("the prefill chunk"), "{}", error.message);
            assert!(!error.message.contains(['\n', '\\']), "{}", error.message);
        }
    }

    // Symptom: a path or an id with an escape sequence in it coloured the terminal, and one with a newline made two
    // lines of an error.
    #[test]
    fn a_message_is_one_harmless_line_whatever_it_quotes() {
        let path = "no model file at a\u{1b}[31m\nb";
        for error in
            [CliError::usage(path), CliError::input(path), CliError::failed(path), CliError::already_told(path)]
        {
            assert_eq!(error.message, "no model file at a\\u{1b}[31m\\nb");
        }
    }
}
