//! What a run of requests measured: latencies, batches, distinct experts, routing and hand-off times.
//!
//! Never reads a clock: times are passed in, on whatever clock the run used.

#![forbid(unsafe_code)]

mod request;
mod run;
mod summary;

pub use request::RequestTimes;
pub use run::{RunMetrics, RunSummary, StepRecord};
pub use summary::Summary;
