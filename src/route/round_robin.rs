//! The baseline that takes workers in turn.
//!
//! Never looks at loads, only at who has room.

use crate::route::{Decision, Reason, RouteError, RoutePolicy, RouteRequest, WorkerView, load};

/// Takes eligible workers in id order, then starts again. A worker that has no room misses its turn.
#[derive(Debug, Clone, Default)]
pub struct RoundRobin {
    next_id: u32,
}

impl RoutePolicy for RoundRobin {
    fn name(&self) -> &'static str {
        "round_robin"
    }

    fn select(&mut self, _: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
        load::count_eligible(workers)?;
        let worker = load::eligible(workers)
            .find(|worker| worker.id.0 >= self.next_id)
            .unwrap_or_else(|| load::nth_eligible(workers, 0));
        self.next_id = worker.id.0 + 1;
        Ok(load::decide(worker, Reason::Turn, 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::load::tests::loads;

    #[test]
    fn takes_turns_and_skips_who_has_no_room() {
        let mut workers = loads(&[9, 0, 3]);
        let mut policy = RoundRobin::default();
        let mut turn = |workers: &[WorkerView]| policy.select(&RouteRequest::default(), workers).map(|d| d.worker.0);
        assert_eq!([turn(&workers), turn(&workers), turn(&workers), turn(&workers)], [Ok(0), Ok(1), Ok(2), Ok(0)]);
        workers[1].healthy = false;
        assert_eq!([turn(&workers), turn(&workers)], [Ok(2), Ok(0)]);
        workers[1].healthy = true;
        workers[0].n_inflight = 16;
        workers[2].n_inflight = 16;
        assert_eq!([turn(&workers), turn(&workers)], [Ok(1), Ok(1)]);
    }

    #[test]
    fn a_refusal_costs_no_turn() {
        let (full, free) = (loads(&[16, 16]), loads(&[0, 0]));
        let mut policy = RoundRobin::default();
        let request = RouteRequest::default();
        assert_eq!(policy.select(&request, &full), Err(RouteError::AllFull));
        assert_eq!(policy.select(&request, &free).map(|d| d.worker.0), Ok(0));
    }
}
