//! eldr's own policy: the worker whose batch loses the least time by one more sequence, given what that is likely to pick.
//!
//! Never needs a calibration; with one, it also keeps to the workers' centroids, so that like finds like for longer.

mod batch;
mod feedback;
mod predict;
mod relief;
mod spread;

use std::sync::Arc;

use batch::{Batch, Resident};
use ndarray::Array2;
use spread::Spread;

use crate::{
    route::{
        Decision, Marginal, Reason, Relief, RouteBuildError, RouteError, RoutePolicy, RouteRequest, StepLoad, StepTime,
        StepTimes, WorkerView, centroids::Centroids, load, survival::Tables,
    },
    types::{MoeShape, RequestId, WorkerId},
};

/// How the cost is weighed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MarginalCostParams {
    /// What a similarity one lower than the best costs, in steps, where recent requests spread evenly over the centroids; down
    /// to an eighth of it where most are near to few of them. Counts only where there are centroids.
    pub lambda: f32,
    /// Tokens that the usual picks weigh in the prediction of a request's.
    pub prior_tokens: f32,
    /// How many times the added experts count. More than once, because a batch that is alike draws what is like it, and so
    /// stays cheap after those it has now are gone.
    pub pull: f32,
    /// One decode step in so many, of those that are tapped, tells what the sequences really pick, which corrects what their
    /// prompts foretold; none does if 0. It gains next to nothing: see `examples/drift`.
    pub feedback: u32,
}

impl Default for MarginalCostParams {
    /// As replays of recorded requests had the best median whose 99th percentile was never behind a load balancer's.
    fn default() -> Self {
        Self { lambda: 0.8, prior_tokens: 2.0, pull: 1.5, feedback: 0 }
    }
}

/// Takes the eligible worker of the least marginal cost; ties go to the lowest id.
///
/// A request whose n prompt tokens picked expert e of layer l c times will pick it in a decode step with the probability
/// q = (c + a g) / (n + a), where g is how often requests pick it usually and a are [`MarginalCostParams::prior_tokens`];
/// where there are no counts (the last layer), q = g. A worker reads an expert unless none of its sequences picks it, so
/// it reads U = sum(1 - P) experts a step, P the product of its sequences' 1 - q, and with the request dU = sum(P q) more.
/// With the worker's step time T, learnt from its steps ([`StepTimes`]), the batch of B sequences loses
/// `J = (B + 1) T(B + 1, U + dU) - B T(B, U)` for each token, where what dU adds counts [`MarginalCostParams::pull`] times.
/// Chosen is the least `J + lambda (best similarity - similarity) T`, T the eligible workers' mean step, and similarity the cosine of
/// signature and centroid, where there are both. Lambda is less where the centroids that recent requests are near to are not spread over the
/// workers as their slots are: who kept to them would crowd some workers and leave others idle.
#[derive(Debug, Clone)]
pub struct MarginalCost {
    params: MarginalCostParams,
    n_layer: usize,
    n_expert: usize,
    /// g, L rows of E; rows without counts stay uniform.
    usual: Vec<f32>,
    n_seen: f32,
    tables: Tables,
    workers: Vec<Batch>,
    times: StepTimes,
    centroids: Option<Centroids>,
    spread: Spread,
    /// q of the request at hand, who that is, and what each worker would cost; kept to spare allocations.
    picks: Vec<u16>,
    asked: Option<RequestId>,
    offers: Vec<Offer>,
    /// Memory of those that have left, for those to come.
    spare: Vec<Resident>,
}

/// What the request at hand would cost on an eligible worker.
#[derive(Debug, Clone, Copy)]
struct Offer {
    position: usize,
    worker: WorkerId,
    similarity: Option<f32>,
    /// How far the similarity is behind the best; a worker without a centroid is not.
    behind: f32,
    marginal: Marginal,
}

impl MarginalCost {
    /// A policy for `n_workers` decode workers of a model with these experts; without any, the cost is by load alone.
    pub fn new(shape: Option<&MoeShape>, n_workers: usize, params: MarginalCostParams) -> Self {
        let (n_layer, n_expert, k) =
            shape.map_or((0, 0, 0), |shape| (shape.n_layer_moe(), shape.n_expert, shape.n_expert_used));
        let n = n_layer * n_expert as usize;
        let uniform = k as f32 / n_expert.max(1) as f32;
        Self {
            params,
            n_layer,
            n_expert: n_expert as usize,
            usual: vec![uniform; n],
            n_seen: 0.0,
            tables: Tables::new(),
            workers: vec![Batch::new(n); n_workers],
            times: StepTimes::new(StepTime::preset(n_layer, n_expert, k), n_workers),
            centroids: None,
            spread: Spread::new(n_workers),
            picks: vec![0; n],
            asked: None,
            offers: Vec::with_capacity(n_workers),
            spare: Vec::new(),
        }
    }

    /// Keeps to `centroids`, one of length 1 for each worker.
    ///
    /// # Errors
    /// Centroids of another number or length.
    pub fn with_centroids(mut self, centroids: Arc<Array2<f32>>) -> Result<Self, RouteBuildError> {
        self.centroids = Some(Centroids::new(centroids, self.workers.len())?);
        Ok(self)
    }

    /// Starts from a known step time, of every worker alike, instead of the preset.
    #[must_use]
    pub fn with_step_time(mut self, first: StepTime) -> Self {
        self.times = StepTimes::new(first, self.workers.len());
        self
    }

    /// The step times as learnt so far.
    pub fn step_times(&self) -> &StepTimes {
        &self.times
    }

    /// Makes room for workers that joined.
    fn make_room(&mut self, n_workers: usize) {
        if n_workers > self.workers.len() {
            self.workers.resize(n_workers, Batch::new(self.usual.len()));
            self.times.make_room(n_workers);
            self.spread.make_room(n_workers);
        }
    }

    /// What the request with `picks` would cost on a worker, without regret.
    fn joining(&self, worker: &WorkerView, n_tokens: u32) -> Marginal {
        let batch = &self.workers[worker.id.index()];
        let time = self.times.get(worker.id.index());
        let before = batch.load(worker.n_inflight);
        let added_experts = batch.survival.added(&self.picks);
        let after = StepLoad {
            n_experts: before.n_experts + f64::from(added_experts),
            n_batch: before.n_batch + 1.0,
            n_context: before.n_context + f64::from(n_tokens),
        };
        let step = time.of(&after);
        let pull = (f64::from(self.params.pull) - 1.0) * after.n_batch * time.per_expert * f64::from(added_experts);
        let cost = after.n_batch * step - before.n_batch * time.of(&before) + pull;
        Marginal { experts: batch.survival.expected(), added_experts, step, cost, regret: 0.0 }
    }

    /// What a similarity one lower than the best costs as of now, in steps.
    fn lambda(&self, workers: &[WorkerView]) -> f64 {
        if self.centroids.is_none() { 0.0 } else { f64::from(self.params.lambda) * self.spread.trust(workers) }
    }

    /// Prices the request on every eligible worker; the best offer, and the highest similarity.
    fn price(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Option<(Offer, Option<f32>)> {
        self.make_room(workers.last().map_or(0, |worker| worker.id.index() + 1));
        self.predict(request.counts);
        self.asked = Some(request.id);
        self.offers.clear();
        let mut best = f32::NEG_INFINITY;
        for (position, worker) in workers.iter().enumerate().filter(|(_, worker)| worker.eligible()) {
            let marginal = self.joining(worker, request.n_tokens);
            let similarity = match (&self.centroids, request.signature) {
                (Some(centroids), Some(signature)) => centroids.cosine(worker.id, signature.as_slice()),
                _ => None,
            };
            best = best.max(similarity.unwrap_or(best));
            self.offers.push(Offer { position, worker: worker.id, similarity, behind: 0.0, marginal });
        }
        let mean_step = self.offers.iter().map(|offer| offer.marginal.step).sum::<f64>() / self.offers.len() as f64;
        let lambda = self.lambda(workers) * mean_step;
        for offer in &mut self.offers {
            offer.behind = offer.similarity.map_or(0.0, |own| best - own);
            offer.marginal.regret = lambda * f64::from(offer.behind);
        }
        let score = |offer: &&Offer| offer.marginal.cost + offer.marginal.regret;
        let least = self.offers.iter().min_by(|a, b| score(a).total_cmp(&score(b)))?;
        Some((*least, (best > f32::NEG_INFINITY).then_some(best)))
    }

    /// How far each worker is behind, for the request that was priced last and is now placed. Workers that were not eligible
    /// are as far behind as any.
    fn compare(&mut self, behind: &mut Vec<f32>) {
        let known = self.offers.iter().filter(|offer| offer.similarity.is_some());
        if known.clone().next().is_some() {
            behind.resize(self.workers.len(), self.offers.iter().map(|offer| offer.behind).fold(0.0, f32::max));
            self.offers.iter().for_each(|offer| behind[offer.worker.index()] = offer.behind);
            self.spread.observe(known.map(|offer| (offer.worker, offer.behind)));
        }
    }
}

impl RoutePolicy for MarginalCost {
    fn name(&self) -> &'static str {
        "marginal_cost"
    }

    fn select(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
        let n = load::count_eligible(workers)?;
        let (offer, best_similarity) = self.price(request, workers).expect("an eligible worker");
        Ok(Decision {
            similarity: offer.similarity,
            best_similarity,
            marginal: Some(offer.marginal),
            ..load::decide(&workers[offer.position], Reason::MarginalCost, n)
        })
    }

    /// Does nothing without centroids to begin with.
    fn set_centroids(&mut self, centroids: &Arc<Array2<f32>>) -> Result<(), RouteBuildError> {
        self.centroids.as_mut().map_or(Ok(()), |old| old.set(centroids))
    }

    fn replace_centroids(&mut self, centroids: &Arc<Array2<f32>>) -> Result<(), RouteBuildError> {
        self.centroids.as_mut().map_or(Ok(()), |old| old.replace(centroids))
    }

    /// What the experts it adds, and the regret, cost the batch of now, over what they cost its batches on average. Requests
    /// that pick many experts, or are long, must run some time: a bargain is one that the batch of now makes cheap. All are
    /// alike where experts cost nothing.
    fn cost(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Option<f64> {
        let (Offer { position, marginal, .. }, _) = self.price(request, workers)?;
        let worker = workers[position];
        let time = self.times.get(worker.id.index()).per_expert;
        let for_all = f64::from(self.params.pull) * f64::from(worker.n_inflight + 1) * time;
        let usually = for_all * f64::from(self.workers[worker.id.index()].survival.usually_added(&self.picks));
        let now = for_all * f64::from(marginal.added_experts) + marginal.regret;
        Some(if usually > 0.0 { now / usually } else { 0.0 })
    }

    fn placed(&mut self, request: &RouteRequest<'_>, worker: WorkerId) {
        self.make_room(worker.index() + 1);
        self.predict(request.counts);
        self.learn(request.counts);
        let spare = self.spare.pop();
        let mut resident = spare.unwrap_or_else(|| Resident::new(self.picks.len(), self.workers.len()));
        resident.begin(request.id, &self.picks);
        if self.asked == Some(request.id) {
            self.compare(&mut resident.behind);
        }
        let batch = &mut self.workers[worker.index()];
        batch.push(resident, request.n_tokens, 0, &self.tables);
        batch.survival.remember();
    }

    fn left(&mut self, id: RequestId, worker: WorkerId) {
        let Some(batch) = self.workers.get_mut(worker.index()) else { return };
        let Some(at) = batch.find(id) else { return };
        let resident = batch.take(at, &self.tables);
        self.spare.push(resident);
    }

    /// Learns from steps whose batch is the one the policy knows; others had a request on its way in or out.
    fn stepped(&mut self, worker: WorkerId, n_batch: u32, time: f64) {
        self.make_room(worker.index() + 1);
        let batch = &mut self.workers[worker.index()];
        if batch.residents.len() == n_batch as usize {
            self.times.observe(worker.index(), &batch.load(n_batch), time);
        }
        batch.n_steps += 1;
    }

    fn feedback(&self) -> u32 {
        self.params.feedback
    }

    fn picked(&mut self, id: RequestId, worker: WorkerId, experts: &[u32]) {
        self.correct(id, worker, experts);
    }

    fn relief(&mut self, workers: &[WorkerView], stall: f64) -> Option<Relief> {
        self.find_relief(workers, stall)
    }

    fn moved(&mut self, id: RequestId, n_tokens: u32, from: WorkerId, to: WorkerId) {
        self.move_resident(id, n_tokens, from, to);
    }

    fn step_time_error(&self) -> Option<f64> {
        self.times.error()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        rng::Rng,
        route::{LeastLoaded, load::tests::loads},
        signature::{ExpertCounts, Signature},
    };

    const E: u32 = 16;

    /// Two layers whose prompts show, and a last one that does not.
    fn shape() -> MoeShape {
        MoeShape { layers: vec![0, 1, 2], n_layer: 3, n_expert: E, n_expert_used: 2 }
    }

    fn policy(n_workers: usize) -> MarginalCost {
        MarginalCost::new(Some(&shape()), n_workers, MarginalCostParams::default())
    }

    /// A prompt of `n_tokens` whose tokens pick two neighbours of `range` each.
    fn counts(range: std::ops::Range<u32>, n_tokens: u32, rng: &mut Rng) -> ExpertCounts {
        let mut counts = ExpertCounts::for_shape(&shape());
        counts.add_tokens(n_tokens);
        for _ in 0..n_tokens {
            for layer in 0..2 {
                let first = range.start + rng.below(range.len() - 1) as u32;
                counts.add(layer, &[first, first + 1]);
            }
        }
        counts
    }

    fn ask(id: u64, counts: &ExpertCounts) -> RouteRequest<'_> {
        let n_tokens = counts.n_tokens();
        RouteRequest { id: RequestId(id), counts: Some(counts), n_tokens, ..RouteRequest::default() }
    }

    /// Routes and books a request.
    fn place(policy: &mut MarginalCost, workers: &mut [WorkerView], request: &RouteRequest<'_>) -> Decision {
        let decision = policy.select(request, workers).expect("room");
        policy.placed(request, decision.worker);
        workers[decision.worker.index()].n_inflight += 1;
        decision
    }

    #[test]
    fn like_joins_like_without_a_calibration() {
        let mut rng = Rng::new(1);
        let (mut policy, mut workers) = (policy(2), loads(&[0, 0]));
        let mut homes = [[0; 2]; 2];
        for id in 0..24 {
            let domain = (id % 2) as u32;
            let counts = counts(domain * 8..domain * 8 + 8, 100, &mut rng);
            let decision = place(&mut policy, &mut workers, &ask(id, &counts));
            assert_eq!((decision.reason, decision.band), (Reason::MarginalCost, 2));
            homes[domain as usize][decision.worker.index()] += 1;
        }
        assert_eq!(homes, [[12, 0], [0, 12]]);
    }

    #[test]
    fn without_experts_or_counts_it_balances_load() {
        let mut rng = Rng::new(2);
        for shape in [None, Some(shape())] {
            let mut policy = MarginalCost::new(shape.as_ref(), 4, MarginalCostParams::default());
            let mut workers = loads(&[0; 4]);
            for id in 0..40 {
                let request = RouteRequest { id: RequestId(id), n_tokens: 9, ..RouteRequest::default() };
                let want = LeastLoaded.select(&request, &workers).expect("room").worker;
                assert_eq!(place(&mut policy, &mut workers, &request).worker, want);
            }
            assert_eq!(workers.iter().map(|worker| worker.n_inflight).collect::<Vec<_>>(), [10; 4]);
            workers[rng.below(4)].healthy = false;
            assert!(policy.select(&RouteRequest::default(), &workers).is_ok());
        }
    }

    #[test]
    fn a_worker_that_joins_is_filled() {
        let (mut policy, mut workers) = (policy(1), loads(&[0, 0]));
        for id in 0..10 {
            place(&mut policy, &mut workers, &RouteRequest { id: RequestId(id), ..RouteRequest::default() });
        }
        assert_eq!([workers[0].n_inflight, workers[1].n_inflight], [5, 5]);
    }

    #[test]
    fn a_slow_worker_gets_fewer_requests() {
        let (mut policy, mut workers) = (policy(2), loads(&[0, 0]));
        for step in 0..200 {
            policy.stepped(WorkerId(0), 0, 0.010 + 1e-5 * f64::from(step % 3));
            policy.stepped(WorkerId(1), 0, 0.030 + 1e-5 * f64::from(step % 3));
        }
        for id in 0..16 {
            place(&mut policy, &mut workers, &RouteRequest { id: RequestId(id), ..RouteRequest::default() });
        }
        assert!(workers[0].n_inflight > workers[1].n_inflight + 3, "{workers:?}");
    }

    #[test]
    fn a_centroid_decides_between_equal_costs_and_its_regret_is_told() {
        let axes = Arc::new(ndarray::array![[1.0f32, 0.0], [0.0, 1.0]]);
        let mut policy = policy(2).with_centroids(axes).expect("two of length 1");
        let signature = Signature::normalised(vec![0.0, 1.0]).expect("not zero");
        let request = RouteRequest { signature: Some(&signature), ..RouteRequest::default() };
        let decision = policy.select(&request, &loads(&[0, 0])).expect("room");
        assert_eq!((decision.worker.0, decision.similarity, decision.best_similarity), (1, Some(1.0), Some(1.0)));
        let decision = policy.select(&request, &loads(&[0, 16])).expect("room");
        assert_eq!((decision.worker.0, decision.best_similarity), (0, Some(0.0)));
        let decision = policy.select(&request, &loads(&[0, 12])).expect("room");
        let marginal = decision.marginal.expect("a price");
        assert_eq!((decision.worker.0, decision.best_similarity), (0, Some(1.0)));
        assert!(marginal.regret > 0.0 && marginal.cost > 0.0, "{marginal:?}");
        let wide = Arc::new(ndarray::array![[1.0f32], [1.0]]);
        assert!(matches!(policy.set_centroids(&wide), Err(RouteBuildError::Width { found: 1, want: 2 })));
    }

    #[test]
    fn centroids_that_crowd_one_worker_are_followed_less() {
        let mut policy = policy(2).with_centroids(Arc::new(ndarray::array![[1.0f32, 0.0], [0.0, 1.0]])).expect("valid");
        let sides = [[1.0, 0.0], [0.0, 1.0]].map(|side| Signature::normalised(side.to_vec()).expect("not zero"));
        // On the worker that is not the nearest.
        let mut regret = |sides: &[Signature], id: u64| {
            for (nth, side) in sides.iter().cycle().take(40).enumerate() {
                let request =
                    RouteRequest { id: RequestId(id + nth as u64), signature: Some(side), ..RouteRequest::default() };
                policy.select(&request, &loads(&[0, 0])).expect("room");
                policy.placed(&request, WorkerId(0));
                policy.left(request.id, WorkerId(0));
            }
            let request = RouteRequest { signature: Some(&sides[0]), ..RouteRequest::default() };
            policy.select(&request, &loads(&[0, 0])).expect("room");
            policy.offers[1].marginal.regret
        };
        let (even, crowded) = (regret(&sides, 0), regret(&sides[..1], 100));
        assert!(even > 3.0 * crowded && crowded > 0.0, "{even} {crowded}");
    }

    proptest! {
        #[test]
        fn prices_are_the_definitions(
            seed: u64,
            steps in prop::collection::vec((0u8..3, 1u32..60, 0u32..8), 1..40),
        ) {
            let mut rng = Rng::new(seed);
            let params = MarginalCostParams::default();
            let (mut policy, mut workers) = (policy(3), loads(&[0; 3]));
            // Each resident's worker and probabilities, as the definition has them.
            let mut residents: Vec<(RequestId, WorkerId, Vec<f64>)> = Vec::new();
            for (id, (what, n_tokens, start)) in steps.into_iter().enumerate() {
                if what == 0 && !residents.is_empty() {
                    let (id, worker, _) = residents.swap_remove(rng.below(residents.len()));
                    policy.left(id, worker);
                    workers[worker.index()].n_inflight -= 1;
                    continue;
                }
                let counts = counts(start..start + 8, n_tokens, &mut rng);
                let request = ask(id as u64, &counts);
                let a = f64::from(params.prior_tokens);
                let q: Vec<f64> = (0..3 * E as usize).map(|at| {
                    let usual = f64::from(policy.usual[at]);
                    match counts.row(at as u32 / E) {
                        Some(row) => (f64::from(row[at % E as usize]) + a * usual) / (f64::from(n_tokens) + a),
                        None => usual,
                    }
                }).collect();
                let price = |worker: &WorkerView| {
                    let batch: Vec<_> = residents.iter().filter(|(_, at, _)| *at == worker.id).collect();
                    let nobody = |at: usize| batch.iter().map(|(_, _, q)| 1.0 - q[at]).product::<f64>();
                    let u: f64 = (0..q.len()).map(|at| 1.0 - nobody(at)).sum();
                    let du: f64 = (0..q.len()).map(|at| nobody(at) * q[at]).sum();
                    let (b, t) = (f64::from(worker.n_inflight), policy.times.get(worker.id.index()));
                    let time = |n_experts, n_batch| t.of(&StepLoad { n_experts, n_batch, n_context: 0.0 });
                    let pull = (f64::from(params.pull) - 1.0) * (b + 1.0) * t.per_expert * du;
                    (b + 1.0) * time(u + du, b + 1.0) - b * time(u, b) + pull
                };
                let prices: Vec<f64> = workers.iter().filter(|w| w.eligible()).map(price).collect();
                let least = prices.iter().copied().fold(f64::INFINITY, f64::min);
                let cost = policy.cost(&request, &workers);
                if !prices.is_empty() {
                    let decision = place(&mut policy, &mut workers, &request);
                    let got = decision.marginal.expect("a price").cost;
                    prop_assert!(cost.is_some_and(|cost| cost >= 0.0 && cost.is_finite()), "{:?} {}", cost, got);
                    prop_assert!((got / least - 1.0).abs() < 0.01, "{} {}", got, least);
                    residents.push((request.id, decision.worker, q));
                }
            }
        }
    }
}
