//! What a dispatcher can be asked.
//!
//! Never changes anything.

use super::{DispatchStats, Dispatcher, Place};
use crate::{
    route::WorkerView,
    schedule::CacheStats,
    types::{RequestId, WorkerId},
};

impl Dispatcher {
    /// Requests accepted and not ended.
    pub fn n_active(&self) -> usize {
        self.records.len()
    }

    /// Requests waiting for a prefill worker.
    pub fn n_queued(&self) -> usize {
        self.queue.len()
    }

    /// The decode workers and their booked loads.
    pub fn workers(&self) -> &[WorkerView] {
        &self.decode
    }

    /// Counters since the start.
    pub fn stats(&self) -> DispatchStats {
        self.stats
    }

    /// What the prefill workers' caches did.
    pub fn cache_stats(&self) -> CacheStats {
        self.prefixes.stats()
    }

    /// The policy in use.
    pub fn policy_name(&self) -> &'static str {
        self.policies.name()
    }

    /// Panics unless the bookings are exactly the requests that hold them.
    pub fn check_integrity(&self) {
        for worker in &self.decode {
            let held = self.records.values().filter(|r| r.place == Place::Decode(worker.id)).count();
            let coming = usize::from(self.moves.is_booked(worker.id));
            assert_eq!(held + coming, worker.n_inflight as usize, "bookings of decode worker {}", worker.id);
            assert!(worker.n_inflight <= worker.n_slots, "decode worker {} is overbooked", worker.id);
        }
        for (index, worker) in self.prefill.iter().enumerate() {
            let id = WorkerId(index as u32);
            let held = || self.records.values().filter(|r| r.place == Place::Prefill(id));
            assert_eq!(held().count(), worker.n_inflight, "requests of prefill worker {id}");
            assert_eq!(held().map(|r| r.n_tokens).sum::<u64>(), worker.n_tokens, "tokens of prefill worker {id}");
        }
        let place = |id: RequestId| self.records.get(&id).map(|r| r.place);
        assert!(self.queue.iter().all(|job| place(job.id) == Some(Place::Queue)), "queue");
        assert!(self.handoffs.iter().all(|(h, _)| place(h.job.id) == Some(Place::Handoff)), "hand-offs");
        let waiting = self.records.values().filter(|r| matches!(r.place, Place::Queue | Place::Handoff)).count();
        assert_eq!(waiting, self.queue.len() + self.handoffs.len(), "requests that wait nowhere");
    }
}
