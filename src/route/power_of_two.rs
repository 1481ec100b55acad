//! The baseline that draws two workers and takes the less loaded one (Mitzenmacher, TPDS 2001).
//!
//! Never looks at the request.

use crate::{
    rng::Rng,
    route::{Decision, Reason, RouteError, RoutePolicy, RouteRequest, WorkerView, load},
};

/// Draws two different eligible workers and takes the one with fewer sequences; a tie goes to the lower id.
#[derive(Debug, Clone)]
pub struct PowerOfTwo {
    rng: Rng,
}

impl PowerOfTwo {
    /// A policy whose draws are fixed by `seed`.
    pub fn new(seed: u64) -> Self {
        Self { rng: Rng::new(seed) }
    }
}

impl RoutePolicy for PowerOfTwo {
    fn name(&self) -> &'static str {
        "power_of_two"
    }

    fn select(&mut self, _: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
        let n = load::count_eligible(workers)?;
        if n == 1 {
            return Ok(load::decide(load::nth_eligible(workers, 0), Reason::Load, 1));
        }
        let first = self.rng.below(n);
        let other = self.rng.below(n - 1);
        // The n - 1 workers that are not `first`.
        let second = other + usize::from(other >= first);
        let pair = [load::nth_eligible(workers, first), load::nth_eligible(workers, second)];
        let worker =
            if (pair[1].n_inflight, pair[1].id) < (pair[0].n_inflight, pair[0].id) { pair[1] } else { pair[0] };
        Ok(load::decide(worker, Reason::Load, 2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::load::tests::loads;

    #[test]
    fn of_two_workers_it_always_sees_both() {
        let workers = loads(&[16, 7, 16, 6]);
        let mut policy = PowerOfTwo::new(3);
        for _ in 0..50 {
            let decision = policy.select(&RouteRequest::default(), &workers).expect("two workers have room");
            assert_eq!((decision.worker.0, decision.band), (3, 2));
        }
    }

    #[test]
    fn the_most_loaded_worker_is_never_chosen_and_every_other_is() {
        let workers = loads(&[3, 9, 3, 3]);
        let mut policy = PowerOfTwo::new(5);
        let mut chosen = [0; 4];
        for _ in 0..200 {
            let decision = policy.select(&RouteRequest::default(), &workers).expect("all have room");
            chosen[decision.worker.index()] += 1;
        }
        assert_eq!(chosen[1], 0);
        assert!([0, 2, 3].iter().all(|&id: &usize| chosen[id] > 0), "{chosen:?}");
    }

    #[test]
    fn the_only_worker_with_room_is_taken() {
        let decision = PowerOfTwo::new(5).select(&RouteRequest::default(), &loads(&[16, 4, 16]));
        assert_eq!(decision.map(|d| (d.worker.0, d.band)), Ok((1, 1)));
    }
}
