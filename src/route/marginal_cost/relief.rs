//! Which running sequence had better go on elsewhere.
//!
//! Never moves it: the dispatcher does, as often as it may.

use super::MarginalCost;
use crate::{
    route::{Relief, WorkerView},
    types::{RequestId, WorkerId},
};

/// Steps a sequence has run before it is looked at. It is expected to run as many more as it has.
const SETTLED: i64 = 4;

/// Part of a step that a move must save for each token; in all it must save more than it costs. Less is mostly chance: the
/// best of many predictions is too good.
const LEAST: f64 = 0.2;

impl MarginalCost {
    /// Looks at the worker whose step takes longest, and at sequences that have not moved yet.
    pub(super) fn find_relief(&mut self, workers: &[WorkerView], stall: f64) -> Option<Relief> {
        self.make_room(workers.last().map_or(0, |worker| worker.id.index() + 1));
        let step = |worker: &WorkerView| {
            let batch = &self.workers[worker.id.index()];
            self.times.get(worker.id.index()).of(&batch.load(worker.n_inflight))
        };
        let busy = workers.iter().rev().filter(|worker| worker.healthy && worker.n_inflight > 0);
        let from = busy.max_by(|a, b| step(a).total_cmp(&step(b)))?;
        let step_from = step(from);
        let lambda = self.lambda(workers) * step_from;
        let without = WorkerView { n_inflight: from.n_inflight - 1, ..*from };
        let mut best: Option<Relief> = None;
        for at in 0..self.workers[from.id.index()].residents.len() {
            let batch = &mut self.workers[from.id.index()];
            let (n_run, n_tokens) = (batch.n_run(at), batch.n_tokens(at));
            if n_run < SETTLED || batch.residents[at].has_moved {
                continue;
            }
            let resident = batch.take(at, &self.tables);
            self.picks.copy_from_slice(&resident.picks);
            let here = self.joining(&without, n_tokens).cost + lambda * resident.behind(from.id);
            for to in workers.iter().filter(|to| to.eligible() && to.id != from.id) {
                let mut marginal = self.joining(to, n_tokens);
                marginal.regret = lambda * resident.behind(to.id);
                let saved = here - marginal.cost - marginal.regret;
                // The others wait while it is given away and taken in, and it itself until the step is over in which it
                // leaves.
                let price = f64::from(from.n_inflight + to.n_inflight + 1) * stall + step_from;
                let pays = saved > LEAST * step_from && saved * n_run as f64 > price;
                if pays && best.is_none_or(|best| saved > best.saved) {
                    best = Some(Relief { id: resident.id, from: from.id, to: to.id, saved, marginal });
                }
            }
            self.workers[from.id.index()].put_back(at, resident, &self.tables);
        }
        best
    }

    pub(super) fn move_resident(&mut self, id: RequestId, n_tokens: u32, from: WorkerId, to: WorkerId) {
        self.make_room(from.index().max(to.index()) + 1);
        let batch = &mut self.workers[from.index()];
        let Some(at) = batch.find(id) else { return };
        let n_run = batch.n_run(at);
        let mut resident = batch.take(at, &self.tables);
        resident.has_moved = true;
        let batch = &mut self.workers[to.index()];
        batch.push(resident, n_tokens, n_run, &self.tables);
        batch.survival.remember();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        route::{MarginalCostParams, RoutePolicy, RouteRequest, StepTime},
        signature::{ExpertCounts, Signature},
        types::MoeShape,
    };

    fn view(id: u32, n_inflight: u32) -> WorkerView {
        WorkerView { id: WorkerId(id), n_slots: 8, n_inflight, healthy: true }
    }

    /// Even requests pick experts 0 and 1, odd ones 6 and 7: three even ones and an odd one on worker 0, three odd ones on
    /// worker 1, all settled.
    fn policy() -> MarginalCost {
        settle(|policy| policy)
    }

    fn settle(with: impl Fn(MarginalCost) -> MarginalCost) -> MarginalCost {
        let shape = MoeShape { layers: vec![0, 1], n_layer: 3, n_expert: 8, n_expert_used: 2 };
        let time = StepTime { fixed: 1.0, per_expert: 1.0, per_sequence: 0.1, per_token: 0.0 };
        let mut policy = with(MarginalCost::new(Some(&shape), 2, MarginalCostParams::default()).with_step_time(time));
        let own = Signature::normalised(vec![1.0, 0.0]).expect("not zero");
        let signature = policy.centroids.as_ref().map(|_| &own);
        for (id, worker) in [(0, 0), (2, 0), (4, 0), (1, 0), (3, 1), (5, 1), (7, 1)] {
            let mut counts = ExpertCounts::for_shape(&shape);
            counts.add_tokens(30);
            let experts = if id % 2 == 0 { [0, 1] } else { [6, 7] };
            shape.usable().into_iter().for_each(|layer| counts.add(layer, &experts.repeat(30)));
            let id = RequestId(id);
            let request =
                RouteRequest { id, counts: Some(&counts), signature, n_tokens: 30, ..RouteRequest::default() };
            policy.select(&request, &[view(0, 0), view(1, 0)]).expect("room");
            policy.placed(&request, WorkerId(worker));
        }
        for batch in &mut policy.workers {
            batch.n_steps += 100;
        }
        policy
    }

    #[test]
    fn the_one_that_is_unlike_its_batch_goes_to_its_like() {
        let mut policy = policy();
        let workers = [view(0, 4), view(1, 3)];
        let relief = policy.relief(&workers, 0.0).expect("one is out of place");
        assert_eq!((relief.id, relief.from, relief.to), (RequestId(1), WorkerId(0), WorkerId(1)));
        assert_eq!(policy.relief(&workers, 0.0), Some(relief), "looking changes nothing");
        policy.moved(RequestId(1), 130, WorkerId(0), WorkerId(1));
        assert_eq!((policy.workers[0].find(RequestId(1)), policy.workers[1].find(RequestId(1))), (None, Some(3)));
        assert_eq!((policy.workers[1].n_run(3), policy.workers[1].n_tokens(3)), (100, 130));
        assert_eq!(policy.relief(&[view(0, 3), view(1, 4)], 0.0), None, "each is among its like");
    }

    #[test]
    fn a_move_away_from_the_nearest_centroid_must_save_the_regret_too() {
        let moves = |lambda| {
            let axes = Arc::new(ndarray::array![[1.0f32, 0.0], [0.0, 1.0]]);
            let mut policy = settle(|policy| policy.with_centroids(Arc::clone(&axes)).expect("two of length 1"));
            policy.params.lambda = lambda;
            policy.relief(&[view(0, 4), view(1, 3)], 0.0)
        };
        let (free, bound) = (moves(0.0).expect("one is out of place"), moves(0.5).expect("it is still worth it"));
        assert_eq!((free.id, bound.id), (RequestId(1), RequestId(1)));
        assert!(bound.marginal.regret > 0.0 && (free.saved - bound.saved - bound.marginal.regret).abs() < 1e-9);
        assert_eq!(moves(100.0), None);
    }

    #[test]
    fn nothing_moves_where_it_would_not_pay_or_may_not() {
        let mut policy = policy();
        let busy = view(0, 4);
        for (other, stall) in [
            (WorkerView { healthy: false, ..view(1, 3) }, 0.0),
            (WorkerView { n_slots: 3, ..view(1, 3) }, 0.0),
            (view(1, 3), 1000.0),
        ] {
            assert_eq!(policy.relief(&[busy, other], stall), None, "{other:?}, {stall}");
        }
        policy.workers.iter_mut().for_each(|batch| batch.n_steps -= 100 - SETTLED + 1);
        assert_eq!(policy.relief(&[busy, view(1, 3)], 0.0), None, "they have just begun");
    }
}
