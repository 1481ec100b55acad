use crate::{
    engine::{DiskStats, Times},
    refit::RefitStats,
    route::WorkerView,
    schedule::{CacheStats, DispatchStats},
};

/// What the engine is doing.
///
/// ```
/// # mod fake {
/// #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_engine.rs"));
/// # }
///
/// use eldr::engine::{EngineStats, GivenBack, Times};
///
/// let EngineStats { workers, lost, route_times, n_given_back, .. } = fake::engine().stats();
/// assert_eq!((workers.len(), lost), (2, vec![false, false]));
/// assert_eq!((route_times, n_given_back), (Times::default(), GivenBack::default()), "nothing has happened");
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct EngineStats {
    /// Requests accepted and not ended.
    pub n_active: usize,
    /// Of those, requests waiting for a prefill worker.
    pub n_queued: usize,
    /// The decode workers and their loads.
    pub workers: Vec<WorkerView>,
    /// Which of them are lost; the others that are not healthy are drained.
    pub lost: Vec<bool>,
    /// Counters since the start.
    pub dispatch: DispatchStats,
    /// What the prefill workers kept and used again.
    pub cache: CacheStats,
    /// The mean relative error of the step times that the policy predicts; none where it predicts none.
    pub step_time_error: Option<f64>,
    /// Drift and refits; none where the centroids stay as calibrated.
    pub refit: Option<RefitStats>,
    /// What the policy took for each choice of a decode worker.
    pub route_times: Times,
    /// What each sequence took to get into a decode worker and be verified there.
    pub handoff_times: Times,
    /// What each stored prefix took to get back into a prefill worker and be verified there.
    pub restore_times: Times,
    /// Bytes of stored prefixes in host memory.
    pub cache_ram_bytes: u64,
    /// Stored prefixes on a disk; none where there is no folder for them.
    pub cache_disk: Option<DiskStats>,
    /// Requests that decode workers gave back.
    pub n_given_back: GivenBack,
}

/// Requests that were handed to a decode worker and went back to be prefilled again, or failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GivenBack {
    /// Because the worker was lost.
    pub worker_lost: u64,
    /// Because the worker could not take them in or run them, but others.
    pub not_run: u64,
}
