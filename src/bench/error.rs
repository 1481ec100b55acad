use std::{io, path::PathBuf};

use crate::{
    bench::workload::{ArrivalsError, WorkloadError},
    engine::EngineError,
    types::shown,
};

/// Why a bench did not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The workload file.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    /// The arrival process.
    #[error(transparent)]
    Arrivals(#[from] ArrivalsError),
    /// The model, the workers or the calibration.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A line of the workload that can not be run: its id, and why.
    #[error("workload prompt \"{}\": {}", shown(.0), .1)]
    Prompt(String, String),
    /// No line of the workload is short enough.
    #[error("no prompt of the workload has {max_prompt} tokens or fewer: the shortest has {shortest}")]
    AllTooLong {
        /// Tokens a prompt may have.
        max_prompt: usize,
        /// Tokens of the shortest one.
        shortest: usize,
    },
    /// A file could not be read.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Requests that no worker will ever finish.
    #[error("{n_active} requests never ended, although every worker is idle: this is a defect of eldr")]
    Stuck {
        /// How many.
        n_active: usize,
    },
    /// The counting run did not follow the timing run.
    #[error(
        "the run that counts experts took other steps than the timed one: outputs depend on the batch here; use \
         --no-count, or flash attention off"
    )]
    OtherSchedule,
    /// Nothing to fit costs to.
    #[error("no decode or prefill step was measured, so there is nothing to fit: give a workload with longer outputs")]
    NoSteps,
    /// A client thread panicked.
    #[error("a client thread panicked")]
    Client,
}
