//! The baseline that joins the shortest queue.
//!
//! Never looks at the request.

use crate::route::{Decision, Reason, RouteError, RoutePolicy, RouteRequest, WorkerView, load};

/// Takes the eligible worker that holds the fewest sequences; ties go to the lowest id.
#[derive(Debug, Clone, Copy, Default)]
pub struct LeastLoaded;

impl RoutePolicy for LeastLoaded {
    fn name(&self) -> &'static str {
        "least_loaded"
    }

    fn select(&mut self, _: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
        let (worker, n) = load::least_loaded(workers)?;
        Ok(load::decide(worker, Reason::Load, n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{route::load::tests::loads, types::WorkerId};

    #[test]
    fn takes_the_fewest_sequences() {
        let decision = LeastLoaded.select(&RouteRequest::default(), &loads(&[4, 2, 9, 2]));
        let want = Decision {
            worker: WorkerId(1),
            reason: Reason::Load,
            similarity: None,
            best_similarity: None,
            band: 4,
            n_inflight: 2,
            marginal: None,
        };
        assert_eq!(decision, Ok(want));
    }
}
