use std::collections::BTreeMap;

use eldr::{
    Decision,
    rng::Rng,
    route::{Marginal, Reason, Relief, RouteError, RoutePolicy, RouteRequest, WorkerView},
    types::{RequestId, WorkerId},
};

/// Places requests at random and always wants one of them elsewhere.
pub struct Restless {
    pub rng: Rng,
    pub residents: BTreeMap<RequestId, WorkerId>,
}

impl Restless {
    pub fn new(seed: u64) -> Self {
        Self { rng: Rng::new(seed), residents: BTreeMap::new() }
    }
}

const MARGINAL: Marginal = Marginal { experts: 0.0, added_experts: 0.0, step: 1.0, cost: 1.0, regret: 0.0 };

impl RoutePolicy for Restless {
    fn name(&self) -> &'static str {
        "restless"
    }

    fn select(&mut self, _: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
        let room: Vec<&WorkerView> = workers.iter().filter(|worker| worker.eligible()).collect();
        if room.is_empty() {
            let any = workers.iter().any(|worker| worker.healthy);
            return Err(if any { RouteError::AllFull } else { RouteError::NoWorker });
        }
        let worker = room[self.rng.below(room.len())];
        Ok(Decision {
            worker: worker.id,
            reason: Reason::Draw,
            similarity: None,
            best_similarity: None,
            band: room.len() as u32,
            n_inflight: worker.n_inflight,
            marginal: None,
        })
    }

    fn placed(&mut self, request: &RouteRequest<'_>, worker: WorkerId) {
        assert_eq!(self.residents.insert(request.id, worker), None, "{} is placed twice", request.id);
    }

    fn left(&mut self, id: RequestId, worker: WorkerId) {
        assert_eq!(self.residents.remove(&id), Some(worker), "{id} leaves another worker");
    }

    fn relief(&mut self, workers: &[WorkerView], _: f64) -> Option<Relief> {
        let up = |worker: &&WorkerView| worker.healthy;
        let residents: Vec<_> = self.residents.iter().filter(|entry| up(&&workers[entry.1.index()])).collect();
        let (&id, &from) = *residents.get(self.rng.below(residents.len().max(1)))?;
        let room: Vec<_> = workers.iter().filter(|worker| worker.eligible() && worker.id != from).collect();
        let to = room.get(self.rng.below(room.len().max(1)))?.id;
        Some(Relief { id, from, to, saved: 1.0, marginal: MARGINAL })
    }
}
