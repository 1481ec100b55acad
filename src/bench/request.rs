use std::{sync::Arc, time::Duration};

use crate::types::Request;

/// A request of a run, ready to submit.
#[derive(Debug, Clone)]
pub struct BenchRequest {
    /// Its id in the workload.
    pub name: String,
    /// When it arrives.
    pub arrival: Duration,
    /// What is asked for.
    pub request: Arc<Request>,
}
