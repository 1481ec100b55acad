//! Whether the centroids still fit the traffic, and which would fit better: drift, a new fit, who keeps which centroid.
//!
//! Never reads a clock, starts a thread or decides where a request goes: times are passed in, fits are jobs to be run
//! elsewhere, and results are centroids for a policy to take up between two decisions.
//!
//! A [`Refitter`] watches the signatures of the requests that are routed. From time to time it has a [`FitJob`], which
//! holds the newest of them and is run anywhere, at leisure. It measures how well the centroids in use serve the newest
//! signatures; if worse than expected, it moves them along with the traffic, by balanced k-means over as long a past as
//! serves best, and compares old and new on signatures the new ones were not cut from. Only centroids that are better
//! there by a margin are set. For another number of workers they are cut anew and aligned: each worker keeps what is
//! most like what it had.
//!
//! The yardstick is the mean similarity of signatures and the centroids they get when every worker takes an equal share
//! of them at the highest similarity in total ([`crate::calibrate::balanced_assignment`]). It falls when prompts look
//! like no centroid (a new domain), and also when each looks like one but too many like the same (a skewed mix), which
//! the similarity to the nearest centroid does not show.
//!
//! What a refit can not repair: the expert weights (idf) and the layer mask stay as calibrated, since the window holds
//! signatures and not counts. Where traffic has moved so far that other layers or rarer experts would tell requests
//! apart, signatures are blurred for any centroids, and only a new calibration helps; the sign is a similarity that stays
//! low while fits bring nothing ([`RefitStats::recent`], [`RefitOutcome::Kept`]).
//!
//! ```
//! use std::{sync::Arc, time::Duration};
//!
//! use eldr::{
//!     refit::{FitJob, FitResult, Reads, RefitConfig, RefitError, RefitOutcome, RefitReason, RefitStats, Refitter},
//!     signature::Signature,
//! };
//! use ndarray::array;
//!
//! # fn main() -> Result<(), RefitError> {
//! let config = RefitConfig { min_fresh: 16, ..RefitConfig::default() };
//! let mut refitter = Refitter::new(config, Arc::new(array![[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))?;
//! refitter.observe_step(Reads { distinct: 12.0, batch: 4.0 });
//!
//! // Half of the traffic looks like no centroid.
//! for n in 0..32 {
//!     let vector = if n % 2 == 0 { vec![1.0, 0.0, 0.1] } else { vec![0.0, 0.1, 1.0] };
//!     refitter.observe(Signature::normalised(vector).expect("not zero"), Duration::from_secs(n));
//! }
//! let job: FitJob = refitter.due(Duration::from_secs(40)).expect("enough is new");
//! let result: FitResult = job.run(); // on any thread
//! let centroids = refitter.apply(result).expect("others serve unseen requests better");
//! assert!(centroids[[1, 2]] > 0.9, "the second worker moved along");
//! let RefitStats { last_reason, last_outcome, n_swaps, .. } = refitter.stats();
//! assert_eq!((last_reason, last_outcome, n_swaps), (Some(RefitReason::First), Some(RefitOutcome::Swapped), 1));
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod align;
mod calibrated;
mod config;
mod follow;
mod job;
mod refitter;
mod stats;
mod window;
mod yardstick;

pub use align::align;
pub use config::{RefitConfig, RefitError};
pub use job::{FitJob, FitResult};
pub use refitter::Refitter;
pub use stats::{Reads, RefitOutcome, RefitReason, RefitStats};
