use crate::{
    engine::{CalibrationFileError, ConfigProblems, TraceFileError},
    schedule::{MemberError, QueueFull},
};

/// Why the engine did not start, or did not take a request.
///
/// ```
/// # mod fake {
/// #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_engine.rs"));
/// # }
///
/// use std::time::Duration;
///
/// use eldr::{
///     EngineError,
///     types::{Request, SamplingParams},
/// };
///
/// let engine = fake::engine();
/// let request =
///     Request { prompt: vec![], max_tokens: 8, sampling: SamplingParams::default(), domain: None, deadline: None };
/// assert!(matches!(engine.submit(request.clone()), Err(EngineError::Request(why)) if why.contains("is empty")));
/// engine.drain(Duration::from_secs(1));
/// assert!(matches!(engine.submit(Request { prompt: vec![1], ..request }), Err(EngineError::Draining)));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// As many requests as allowed are waiting.
    #[error(transparent)]
    QueueFull(#[from] QueueFull),
    /// The engine finishes what it has and takes no more.
    #[error("the engine is shutting down and takes no more requests")]
    Draining,
    /// A decode worker was not drained or taken back.
    #[error(transparent)]
    Member(#[from] MemberError),
    /// The request can not be run as it stands.
    #[error("{0}")]
    Request(String),
    /// The workers or their settings do not fit together.
    #[error("{0}")]
    Config(String),
    /// A configuration that can not work, with everything that is wrong with it.
    #[error(transparent)]
    Problems(#[from] ConfigProblems),
    /// A calibration does not fit the model or the workers.
    #[error("{0}")]
    Calibration(String),
    /// A calibration file could not be read or written.
    #[error(transparent)]
    CalibrationFile(#[from] CalibrationFileError),
    /// A trace could not be read or written.
    #[error(transparent)]
    TraceFile(#[from] TraceFileError),
    /// A worker failed outside the engine's threads.
    #[error("{0}")]
    Run(String),
    /// llama.cpp refused.
    #[cfg(feature = "llama")]
    #[error(transparent)]
    Llama(#[from] crate::llama::LlamaError),
}
