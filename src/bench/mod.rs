//! Runs a workload under each policy and reports what was measured.
//!
//! Never decides where a request goes, and never rounds in a policy's favour.

mod bandwidth;
mod charged;
pub mod chart;
mod environment;
mod error;
pub mod html;
mod least_squares;
mod limit;
mod machine;
mod memo;
mod picks;
mod probe;
mod real_clock;
mod report;
mod request;
pub mod rows;
#[cfg(feature = "llama")]
mod run;
mod stopwatch;
pub mod table;
mod timeline;
mod virtual_clock;
pub mod workload;

pub use bandwidth::read_bandwidth;
pub use charged::ChargedRunner;
pub use environment::Environment;
pub use error::BenchError;
pub use least_squares::{LeastSquares, least_squares};
pub use limit::{Limit, StepBytes, StepSample};
pub use machine::Machine;
pub use memo::PrefillMemo;
pub use picks::PickStore;
pub use probe::{BatchSeen, Probe, Seen};
pub use real_clock::run_real;
pub use report::{BenchReport, CalibrationInfo, Change, Clock, ModelInfo, REPORT_VERSION, tokens_sha256};
pub use request::BenchRequest;
#[cfg(feature = "llama")]
pub use run::{BatchFit, BenchParams, CostFit, Progress, fit_cost, run};
pub use stopwatch::{Running, Stopwatch};
pub use timeline::Timeline;
pub use virtual_clock::{Durations, VirtualOutcome, VirtualRun, Worker};
