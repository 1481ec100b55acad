//! The requests of a bench and when they arrive.
//!
//! Never tokenises a prompt and never waits.

mod arrivals;
mod file;

pub use arrivals::{Arrivals, ArrivalsError};
pub use file::{WorkloadError, WorkloadItem, domains, parse, read, take};
