//! The baseline that draws a worker.
//!
//! Never looks at loads, only at who has room.

use crate::{
    rng::Rng,
    route::{Decision, Reason, RouteError, RoutePolicy, RouteRequest, WorkerView, load},
};

/// Draws one of the eligible workers, each as likely as the others.
#[derive(Debug, Clone)]
pub struct Random {
    rng: Rng,
}

impl Random {
    /// A policy whose draws are fixed by `seed`.
    pub fn new(seed: u64) -> Self {
        Self { rng: Rng::new(seed) }
    }
}

impl RoutePolicy for Random {
    fn name(&self) -> &'static str {
        "random"
    }

    fn select(&mut self, _: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
        let n = load::count_eligible(workers)?;
        let worker = load::nth_eligible(workers, self.rng.below(n));
        Ok(load::decide(worker, Reason::Draw, n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::load::tests::loads;

    #[test]
    fn draws_are_the_generators() {
        let mut workers = loads(&[1, 2, 16, 4, 5]);
        workers[3].healthy = false;
        let mut policy = Random::new(11);
        let mut rng = Rng::new(11);
        for _ in 0..50 {
            let decision = policy.select(&RouteRequest::default(), &workers).expect("three workers have room");
            assert_eq!(decision.worker.0, [0, 1, 4][rng.below(3)]);
            assert_eq!((decision.reason, decision.band), (Reason::Draw, 3));
        }
    }
}
