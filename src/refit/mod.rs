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
