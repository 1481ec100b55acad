//! What routing would gain: recorded requests replayed through any policy over a model of a step's cost, the band's
//! width chosen from the replays, and the verdict whether locality helps at all.
//!
//! Never runs a model, reads a clock or a file; the same trace and seed give the same numbers on any number of threads.
//!
//! ```
//! # mod planted {
//! #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/planted_trace.rs"));
//! # }
//!
//! use eldr::{
//!     PolicyKind,
//!     calibrate::CalibrationParams,
//!     route::PolicyParams,
//!     schedule::DispatchLimits,
//!     sim::{
//!         Arrivals, AssessParams, Assessment, BalancerPoint, Compared, CostShares, Fold, Interval, Order, ReplayMeans, ReplayParams,
//!         ReplayReport, ReplaySet, SimError, StepCost, TauCurve, TauPoint, Traffic, Verdict, assess, folds, replay,
//!     },
//! };
//!
//! # fn main() -> Result<(), SimError> {
//! // Recorded requests, served by two workers of four slots on a simulated clock; a step takes 1.
//! let trace = planted::trace(64);
//! let set = ReplaySet::new(&trace);
//! let mut params = ReplayParams {
//!     n_slots: vec![4, 4],
//!     arrivals: Arrivals::Closed { concurrency: 6, ramp: 20.0 },
//!     order: Order::Given,
//!     n_requests: 64,
//!     warmup: 0.2,
//!     prefill: 1.0,
//!     cost: StepCost::UNIT,
//!     handoff: 0.0,
//!     limits: DispatchLimits::default(),
//! };
//! let all: Vec<usize> = (0..64).collect();
//! let serve = |kind: PolicyKind, params: &ReplayParams| -> Result<ReplayReport, SimError> {
//!     replay(&set, &all, params, kind.build(&PolicyParams::new(2))?, None)
//! };
//! let report = serve(PolicyKind::RoundRobin, &params)?;
//! assert_eq!(report.n_requests, 64);
//! // What a step costs where experts have to be read: shares of that policy's mean step, which then takes 1.
//! params.cost = StepCost::from_shares(CostShares::default(), &report, set.n_layer());
//! let report = serve(PolicyKind::LeastLoaded, &params)?;
//! assert!(ReplayMeans::of([&report]).tpot_p50 > 0.0);
//!
//! // Whether locality is worth it, on requests that neither the fit nor the band's width has seen.
//! let judge = AssessParams { n_seeds: 1, ..AssessParams::new(CalibrationParams::new(2)) };
//! let Assessment { tau_curve, verdict } = assess(&trace, &judge)?;
//! let TauCurve { tau, points, balancers } = tau_curve;
//! let (widest, balancer): (&TauPoint, &BalancerPoint) = (points.last().expect("a width"), &balancers[0]);
//! assert!(tau <= widest.tau && balancer.policy == "round_robin");
//! let Verdict { tpot_p50: Compared { gain, .. }, .. } = &verdict;
//! let Interval { low, high, .. } = gain;
//! assert!(low <= high && verdict.sentence().starts_with("locality"));
//!
//! // Its parts, and traffic of other kinds.
//! let parts: Vec<Fold> = folds(&all, 4, 1)?;
//! assert_eq!(parts[0].judge.len(), 16);
//! let (fitted, served) = Traffic::Skewed.split(&trace, 32, 32, 1);
//! assert_eq!((fitted.len(), served.len()), (32, 32));
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod assess;
mod cluster;
mod cost;
mod error;
mod folds;
mod interval;
mod meter;
mod order;
mod params;
mod placing;
#[cfg(test)]
mod planted;
#[cfg(test)]
mod reference;
mod replay;
mod report;
mod runner;
mod set;
mod tau;
mod traffic;
mod trials;
mod verdict;

pub use assess::{AssessParams, Assessment, assess};
pub use cluster::{
    Burst, ClusterReport, DecodeCost, DecodeGroup, DeviceCost, Drift, Event, HandoffCost, Happens, PRESETS, Pool,
    PrefillCost, PrefixSharing, Preset, PresetModel, Scenario, Swing, simulate,
};
pub use cost::{CostShares, StepCost};
pub use error::SimError;
pub use folds::{Fold, folds};
pub use interval::Interval;
pub use order::Order;
pub use params::{Arrivals, ReplayParams};
pub use placing::{Judged, PLACEMENT_VERSION, Placement, PlacingParams, place_experts};
pub use replay::{replay, replay_refitting};
pub use report::{ReplayMeans, ReplayReport};
pub use set::ReplaySet;
pub use tau::{BalancerPoint, TAUS, TauCurve, TauPoint};
pub use traffic::Traffic;
pub use verdict::{Compared, Verdict};
