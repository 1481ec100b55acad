use crate::schedule::QueueFull;

/// Why the engine did not start, or did not take a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// As many requests as allowed are waiting.
    #[error(transparent)]
    QueueFull(#[from] QueueFull),
    /// The engine finishes what it has and takes no more.
    #[error("the engine is shutting down and takes no more requests")]
    Draining,
    /// The request can not be run as it stands.
    #[error("{0}")]
    Request(String),
    /// The workers or their settings do not fit together.
    #[error("{0}")]
    Config(String),
    /// A calibration file could not be used.
    #[error("{0}")]
    Calibration(String),
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: std::path::PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}
