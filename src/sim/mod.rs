//! What routing would gain: recorded requests replayed through any policy over a model of a step's cost, the band's
//! width chosen from the replays, and the verdict whether locality helps at all.
//!
//! Never runs a model, reads a clock or a file; the same trace and seed give the same numbers on any number of threads.

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
