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

/// Why a verb ended early, in one sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CliError {
    pub kind: Kind,
    pub message: String,
}

impl CliError {
    /// Whatever the message quotes, it stays one line and does a terminal no harm.
    fn new(kind: Kind, message: &impl fmt::Display) -> Self {
        Self { kind, message: visible(&message.to_string()) }
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

    /// All that is wrong with a configuration, one a line.
    pub fn problems(kind: Kind, problems: &ConfigProblems) -> Self {
        let lines: Vec<String> = problems.iter().map(visible).collect();
        Self { kind, message: lines.join("\n") }
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
