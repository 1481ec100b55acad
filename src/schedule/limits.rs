//! The dispatcher's bounds, and what it counts.
//!
//! Never decides anything.

/// Bounds of the queues between the stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DispatchLimits {
    /// Requests waiting for a prefill worker; one more is refused.
    pub max_queue: usize,
    /// Requests given to one prefill worker at a time.
    pub max_prefill: usize,
    /// Prefilled requests waiting for a decode slot, each a sequence state in memory; prefill pauses at this many.
    pub max_handoffs: usize,
    /// Times a request is prefilled again before it fails.
    pub max_retries: u32,
    /// Of prefilled requests that wait for a slot, those go first that cost the running batches least
    /// ([`crate::route::RoutePolicy::cost`]), as long as none waits for more than so many times the slots that it would wait for in turn.
    /// 1 is in turn.
    pub age_bound: u32,
    /// A running sequence may move to another decode worker, where the policy foresees that this pays
    /// ([`crate::route::RoutePolicy::relief`]): one at a time, and at most one in so many decode steps of all workers together. None
    /// moves if 0.
    pub migrate_every: u32,
}

impl Default for DispatchLimits {
    fn default() -> Self {
        Self { max_queue: 1024, max_prefill: 4, max_handoffs: 16, max_retries: 3, age_bound: 1, migrate_every: 0 }
    }
}

/// The queue of waiting requests is full: try again later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the queue is full: {0} requests are waiting; try again later")]
pub struct QueueFull(pub usize);

/// Counters since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DispatchStats {
    /// Requests given to a worker again after one gave them back.
    pub n_retried: u64,
    /// Workers lost.
    pub n_workers_lost: u64,
    /// Running sequences that were moved to another decode worker.
    pub n_migrated: u64,
}
