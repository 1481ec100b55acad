//! What every policy does with loads: who may be chosen, who holds least, and why nobody can be chosen.
//!
//! Never looks at the request.

use crate::route::{Decision, Reason, RouteError, WorkerView};

/// The workers a request may be sent to now, in id order.
pub(super) fn eligible(workers: &[WorkerView]) -> impl Iterator<Item = &WorkerView> {
    workers.iter().filter(|worker| worker.eligible())
}

/// How many workers are eligible, or why none is.
pub(super) fn count_eligible(workers: &[WorkerView]) -> Result<usize, RouteError> {
    match eligible(workers).count() {
        0 if workers.iter().any(|worker| worker.healthy) => Err(RouteError::AllFull),
        0 => Err(RouteError::NoWorker),
        n => Ok(n),
    }
}

/// The `n`-th eligible worker, from 0. `n` is below [`count_eligible`].
pub(super) fn nth_eligible(workers: &[WorkerView], n: usize) -> &WorkerView {
    eligible(workers).nth(n).expect("n is below the number of eligible workers")
}

/// The eligible worker with the fewest sequences, the lowest id among equals, and how many were compared.
pub(super) fn least_loaded(workers: &[WorkerView]) -> Result<(&WorkerView, usize), RouteError> {
    let n = count_eligible(workers)?;
    let worker = eligible(workers).min_by_key(|worker| (worker.n_inflight, worker.id));
    Ok((worker.expect("at least one worker is eligible"), n))
}

/// A decision by anything but similarity.
pub(super) fn decide(worker: &WorkerView, reason: Reason, band: usize) -> Decision {
    Decision {
        worker: worker.id,
        reason,
        similarity: None,
        best_similarity: None,
        band: band as u32,
        n_inflight: worker.n_inflight,
        marginal: None,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::types::WorkerId;

    /// Healthy workers with 16 slots and these loads.
    pub(in crate::route) fn loads(n_inflight: &[u32]) -> Vec<WorkerView> {
        let view = |(id, &n_inflight)| WorkerView { id: WorkerId(id as u32), n_slots: 16, n_inflight, healthy: true };
        n_inflight.iter().enumerate().map(view).collect()
    }

    #[test]
    fn full_and_lost_are_different_answers() {
        let mut workers = loads(&[16, 16]);
        assert_eq!(least_loaded(&workers), Err(RouteError::AllFull));
        workers[0].healthy = false;
        assert_eq!(least_loaded(&workers), Err(RouteError::AllFull));
        workers[1].healthy = false;
        assert_eq!(least_loaded(&workers), Err(RouteError::NoWorker));
        assert_eq!(least_loaded(&[]), Err(RouteError::NoWorker));
    }

    #[test]
    fn the_lowest_id_wins_among_equal_loads() {
        let mut workers = loads(&[5, 3, 3, 4]);
        assert_eq!(least_loaded(&workers), Ok((&workers[1], 4)));
        workers[1].healthy = false;
        assert_eq!(least_loaded(&workers), Ok((&workers[2], 3)));
    }
}
