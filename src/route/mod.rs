//! Which decode worker a prefilled request goes to, and why.
//!
//! Pure: never counts load itself, books nothing, reads no clock.

mod policy;

pub use policy::{Decision, Reason, RouteError, RoutePolicy, RouteRequest, WorkerView};
