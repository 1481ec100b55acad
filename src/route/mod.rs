//! Which decode worker a prefilled request goes to, and why.
//!
//! Pure: never counts load itself, books nothing, reads no clock.

#![forbid(unsafe_code)]

mod domain;
mod kind;
mod least_loaded;
mod load;
mod locality_band;
mod policy;
mod power_of_two;
mod random;
mod round_robin;

pub use domain::Domain;
pub use kind::{ParsePolicyError, PolicyKind, PolicyParams};
pub use least_loaded::LeastLoaded;
pub use locality_band::{LocalityBand, LocalityBandParams};
pub use policy::{Decision, Reason, RouteBuildError, RouteError, RoutePolicy, RouteRequest, WorkerView};
pub use power_of_two::PowerOfTwo;
pub use random::Random;
pub use round_robin::RoundRobin;
