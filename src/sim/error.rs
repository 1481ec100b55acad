use crate::{calibrate::CalibrateError, route::RouteBuildError};

/// Why nothing could be replayed or concluded.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    /// Nothing to replay.
    #[error("there are no requests to replay: give at least one that generated two tokens")]
    NoRequests,
    /// A position beyond the trace.
    #[error("request {index} is not in the trace, which holds {n_requests}")]
    NoSuchRequest {
        /// The position asked for.
        index: usize,
        /// Requests in the trace.
        n_requests: usize,
    },
    /// No worker, or one that holds nothing.
    #[error("every decode worker needs at least one slot, and there must be a worker: the slots given are {0:?}")]
    Slots(Vec<u32>),
    /// Times that do not move a clock.
    #[error("{name} is {value}, which must be {want}")]
    Value {
        /// What was given.
        name: &'static str,
        /// Its value.
        value: f64,
        /// What it must be.
        want: &'static str,
    },
    /// Steps of no time, of negative time, or of a time that is no number.
    #[error("the step cost must be finite, not negative, and more than 0 for a step that picks nothing")]
    Cost,
    /// Too few requests to fit, choose and judge on different ones.
    #[error(
        "a verdict on {n_workers} decode workers needs {needed} requests of two or more generated tokens, and the \
         trace has {n_requests}: record more, or calibrate for fewer workers"
    )]
    TooFewRequests {
        /// Requests that can be replayed.
        n_requests: usize,
        /// Decode workers.
        n_workers: usize,
        /// The fewest requests that do.
        needed: usize,
    },
    /// Fitting, choosing and judging each take at least one fold.
    #[error("{n_folds} folds: give a number from 3 (fit, choose tau, judge) to {limit}")]
    Folds {
        /// Folds asked for.
        n_folds: usize,
        /// The most there may be.
        limit: usize,
    },
    /// An empty or unordered list of widths, or one beyond the cosines.
    #[error("the widths of the band to compare must ascend and lie between 0 and 2; given are {0:?}")]
    Taus(Vec<f32>),
    /// No replay at all.
    #[error("no replay was asked for: give at least one seed")]
    NoSeeds,
    /// The part of the requests that a fold fits on can not be fitted.
    #[error("fold {fold} of the cross-validation: {source}")]
    Fit {
        /// The fold, from 0.
        fold: usize,
        /// What the fit said.
        source: CalibrateError,
    },
    /// A scenario that makes no sense: which key, and what it must be.
    #[error("{0}")]
    Scenario(String),
    /// Costs of a device that make no sense: which, and what it must be.
    #[error("the cost: {0}")]
    DeviceCost(String),
    /// A policy that can not be built.
    #[error(transparent)]
    Policy(#[from] RouteBuildError),
}
