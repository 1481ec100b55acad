//! Which decode worker a prefilled request goes to, and why.
//!
//! Pure: never counts load itself, books nothing, reads no clock.

#![forbid(unsafe_code)]

mod auto;
mod centroids;
mod domain;
mod kind;
mod layer;
mod least_loaded;
mod load;
mod locality_band;
mod marginal_cost;
mod policy;
mod power_of_two;
mod random;
mod round_robin;
mod step_time;
mod survival;

pub use auto::{AutoFacts, StepDown, choose};
pub use domain::Domain;
pub use kind::{ParsePolicyError, PolicyKind, PolicyParams};
pub use layer::PolicyLayer;
pub use least_loaded::LeastLoaded;
pub use locality_band::{LocalityBand, LocalityBandParams};
pub use marginal_cost::{MarginalCost, MarginalCostParams};
pub use policy::{Decision, Marginal, Reason, RouteBuildError, RouteError, RoutePolicy, RouteRequest, WorkerView};
pub use power_of_two::PowerOfTwo;
pub use random::Random;
pub use round_robin::RoundRobin;
pub use step_time::{StepLoad, StepTime, StepTimes};
