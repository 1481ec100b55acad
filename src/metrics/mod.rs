//! What a run of requests measured: latencies, batches, distinct experts, routing and hand-off times.
//!
//! Never reads a clock: times are passed in, on whatever clock the run used.
//!
//! ```
//! use std::time::Duration;
//!
//! use eldr::{
//!     PolicyKind,
//!     metrics::{RequestTimes, RunMetrics, RunSummary, StepRecord, Summary},
//!     types::WorkerId,
//! };
//!
//! let ms = Duration::from_millis;
//! // Submitted at 10 ms; tokens at 30, 40 and 60 ms.
//! let times = RequestTimes::from_tokens(ms(10), &[ms(30), ms(40), ms(60)]).expect("three tokens");
//! assert_eq!((times.ttft_ms(), times.tpot_ms()), (20.0, Some(15.0)));
//!
//! let mut run = RunMetrics::new(1);
//! run.finished(ms(10), &[ms(30), ms(40), ms(60)]);
//! run.stepped(StepRecord { worker: WorkerId(0), n_batch: 2, n_distinct: &[5, 7] });
//! let summary: RunSummary = run.summarise(PolicyKind::LeastLoaded, String::new());
//! assert_eq!(summary.tpot_ms, Some(Summary { p50: 15.0, p99: 15.0, mean: 15.0 }));
//! assert_eq!(summary.experts_per_token, Some(3.0), "6 experts a layer for 2 tokens");
//! ```

#![forbid(unsafe_code)]

mod request;
mod run;
mod summary;

pub use request::RequestTimes;
pub use run::{RunMetrics, RunSummary, StepRecord};
pub use summary::Summary;
