use std::sync::Arc;

use ndarray::Array2;
use serde::Serialize;

use crate::{
    signature::{ExpertCounts, Signature},
    types::{RequestId, WorkerId},
};

/// What a policy may know about the request it places.
#[derive(Debug, Clone, Copy, Default)]
pub struct RouteRequest<'a> {
    /// Which request.
    pub id: RequestId,
    /// The prompt's signature; none for dense models, without a calibration, or for counts that weigh nothing.
    pub signature: Option<&'a Signature>,
    /// The workload's label, for the `domain` oracle.
    pub domain: Option<&'a str>,
    /// The experts its prefill picked; none where the prefill worker has no tap.
    pub counts: Option<&'a ExpertCounts>,
    /// Tokens of context it brings.
    pub n_tokens: u32,
}

/// What a policy may know about a decode worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerView {
    /// The worker.
    pub id: WorkerId,
    /// Sequences it can hold.
    pub n_slots: u32,
    /// Sequences it holds, booked hand-offs included.
    pub n_inflight: u32,
    /// False while the worker is lost or drained: nothing may be sent to it.
    pub healthy: bool,
}

impl WorkerView {
    /// Whether a request may be sent to the worker now.
    pub fn eligible(&self) -> bool {
        self.healthy && self.n_inflight < self.n_slots
    }
}

/// Where a request goes, and why.
///
/// ```
/// use eldr::{
///     Decision, PolicyKind,
///     route::{PolicyParams, Reason, RouteRequest, WorkerView},
///     types::WorkerId,
/// };
///
/// let mut policy = PolicyKind::LeastLoaded.build(&PolicyParams::new(2)).expect("two workers");
/// let view = |id, n_inflight| WorkerView { id: WorkerId(id), n_slots: 4, n_inflight, healthy: true };
/// let decision: Decision = policy.select(&RouteRequest::default(), &[view(0, 3), view(1, 1)]).expect("room");
/// assert_eq!((decision.worker, decision.reason, decision.n_inflight), (WorkerId(1), Reason::Load, 1));
/// assert!(serde_json::to_string(&decision).expect("plain fields").contains(r#""reason":"load""#));
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Decision {
    /// The chosen worker.
    pub worker: WorkerId,
    /// What decided.
    pub reason: Reason,
    /// Cosine of the request's signature and the chosen worker's centroid, where the policy compares them.
    pub similarity: Option<f32>,
    /// The largest such cosine over eligible workers.
    pub best_similarity: Option<f32>,
    /// Eligible workers the policy chose between at the end (the band's size).
    pub band: u32,
    /// The chosen worker's load before this request.
    pub n_inflight: u32,
    /// What the request was expected to cost there, where the policy predicts it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub marginal: Option<Marginal>,
}

/// What a request is expected to cost on a worker. Times are in the unit of the steps the policy was told of; before the
/// first, a step of 16 unrelated sequences takes 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Marginal {
    /// Distinct experts a step reads without the request, summed over the layers.
    pub experts: f32,
    /// Distinct experts the request adds.
    pub added_experts: f32,
    /// Time of a step with the request.
    pub step: f64,
    /// Time that all sequences of the batch, the new one included, wait longer for each token.
    pub cost: f64,
    /// What was added to the cost for being less similar to the worker's centroid than to the best one.
    pub regret: f64,
}

/// A running request that would cost less on another worker.
///
/// ```
/// use eldr::{
///     route::{MarginalCost, MarginalCostParams, Relief, RoutePolicy, RouteRequest, WorkerView},
///     types::{RequestId, WorkerId},
/// };
///
/// // All on one of two workers, and a hundred steps later.
/// let mut policy = MarginalCost::new(None, 2, MarginalCostParams::default());
/// let view = |id, n_inflight| WorkerView { id: WorkerId(id), n_slots: 8, n_inflight, healthy: true };
/// for id in 0..8 {
///     policy.placed(&RouteRequest { id: RequestId(id), n_tokens: 9, ..RouteRequest::default() }, WorkerId(0));
/// }
/// (0..100).for_each(|_| policy.stepped(WorkerId(0), 8, 0.02));
/// let Some(Relief { from, to, .. }) = policy.relief(&[view(0, 8), view(1, 0)], 0.001) else { panic!("worker 1 is idle") };
/// assert_eq!((from, to), (WorkerId(0), WorkerId(1)));
/// assert_eq!(policy.relief(&[view(0, 8), view(1, 0)], 60.0), None, "moving would take longer than it saves");
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Relief {
    /// Which request.
    pub id: RequestId,
    /// The worker that runs it.
    pub from: WorkerId,
    /// The worker that would run it for less.
    pub to: WorkerId,
    /// Time by which all sequences of both workers together wait less for each token, less what it regrets more there.
    pub saved: f64,
    /// What it is expected to cost there.
    pub marginal: Marginal,
}

/// What decided a [`Decision`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The least loaded worker of the locality band.
    Band,
    /// A worker that has no centroid yet, which held fewer requests than every worker of the band.
    NoCentroid,
    /// The request has no signature, so the least loaded worker.
    NoSignature,
    /// The least expected cost for the batch it joins.
    MarginalCost,
    /// It ran elsewhere, and was moved because it is expected to cost less here.
    Migration,
    /// The policy looks at load only.
    Load,
    /// The next worker in turn.
    Turn,
    /// A seeded draw.
    Draw,
    /// A worker set apart for the request's domain.
    Domain,
    /// The domain's own workers were full, or the request has no label, so the least loaded worker.
    OutsideDomain,
}

/// Why no worker was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RouteError {
    /// Every worker is lost or drained.
    #[error("no decode worker is running")]
    NoWorker,
    /// Every running worker is full; the request waits.
    #[error("every decode worker is full")]
    AllFull,
}

/// Why a policy could not be built.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RouteBuildError {
    /// There is nothing to route to.
    #[error("a routing policy needs at least one decode worker; start one")]
    NoWorkers,
    /// The policy compares signatures with centroids, and there are none.
    #[error("policy {policy} needs a calibration; make one with `eldr calibrate`, or choose another policy")]
    NoCentroids {
        /// The policy's name.
        policy: &'static str,
    },
    /// Worker i has centroid i, so both must be as many.
    #[error(
        "the calibration has {n_centroids} centroids for {n_workers} decode workers; calibrate again with \
         `--workers {n_workers}`"
    )]
    WorkerCount {
        /// Centroids of the calibration.
        n_centroids: usize,
        /// Decode workers.
        n_workers: usize,
    },
    /// Cosines are dot products of unit vectors.
    #[error("centroid {centroid} has length {length}, which must be 1; calibrate again")]
    NotUnit {
        /// The centroid's row.
        centroid: usize,
        /// Its length; NaN if an entry is NaN.
        length: f32,
    },
    /// Centroids for signatures of another mask or model.
    #[error("the new centroids have {found} entries and the old ones {want}; cut them from signatures of one mask")]
    Width {
        /// Entries of a new centroid.
        found: usize,
        /// Entries of an old one.
        want: usize,
    },
    /// The band's width is not a cosine distance.
    #[error("tau is {0}, which must be a number from 0 (only the most similar worker) to 2 (every worker)")]
    Tau(f32),
    /// A band of no worker could choose none.
    #[error("the smallest band is 0 workers, which must be at least 1 (the band as tau gives it)")]
    MinBand,
}

/// Chooses a decode worker for a prefilled request.
///
/// One owner calls it, one request at a time. It books nothing and changes no worker: the dispatcher does. The same
/// calls and seed give the same decisions on every machine; ties go to the lowest id.
///
/// ```
/// use eldr::{
///     Decision, RoutePolicy,
///     route::{Reason, RouteBuildError, RouteError, RouteRequest, WorkerView},
///     types::WorkerId,
/// };
///
/// /// Fills one worker after another.
/// struct Pack;
///
/// impl RoutePolicy for Pack {
///     fn name(&self) -> &'static str {
///         "pack"
///     }
///
///     fn select(&mut self, _: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
///         let Some(worker) = workers.iter().find(|worker| worker.eligible()) else {
///             let any = workers.iter().any(|worker| worker.healthy);
///             return Err(if any { RouteError::AllFull } else { RouteError::NoWorker });
///         };
///         Ok(Decision {
///             worker: worker.id,
///             reason: Reason::Load,
///             similarity: None,
///             best_similarity: None,
///             band: 1,
///             n_inflight: worker.n_inflight,
///             marginal: None,
///         })
///     }
/// }
///
/// let view = |id, n_inflight| WorkerView { id: WorkerId(id), n_slots: 2, n_inflight, healthy: true };
/// let request = RouteRequest::default();
/// assert_eq!(Pack.select(&request, &[view(0, 1), view(1, 0)]).map(|decision| decision.worker), Ok(WorkerId(0)));
/// assert_eq!(Pack.select(&request, &[view(0, 2), view(1, 2)]), Err(RouteError::AllFull));
/// ```
pub trait RoutePolicy: Send {
    /// The policy's name in the command line, configuration and JSON.
    fn name(&self) -> &'static str;

    /// The worker for `request`. `workers` is in id order.
    fn select(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError>;

    /// Compares signatures with `centroids` from the next decision on. Row i is worker i's, of length 1, or zeros where
    /// it has none.
    ///
    /// Does nothing unless the policy compares signatures with centroids; one that wraps another passes it on.
    fn set_centroids(&mut self, centroids: &Arc<Array2<f32>>) -> Result<(), RouteBuildError> {
        let _ = centroids;
        Ok(())
    }

    /// As [`RoutePolicy::set_centroids`], for signatures of other layers: of any width, as all signatures are from then on.
    fn replace_centroids(&mut self, centroids: &Arc<Array2<f32>>) -> Result<(), RouteBuildError> {
        self.set_centroids(centroids)
    }

    /// How dear placing `request` on the best worker would be now; with it the dispatcher compares requests that wait.
    /// Nothing where no worker has room, and from a policy that does not predict it.
    fn cost(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Option<f64> {
        let _ = (request, workers);
        None
    }

    /// `request` was booked on `worker`.
    fn placed(&mut self, request: &RouteRequest<'_>, worker: WorkerId) {
        let _ = (request, worker);
    }

    /// The request has left `worker`, where it was placed: it ended, or was given back.
    fn left(&mut self, id: RequestId, worker: WorkerId) {
        let _ = (id, worker);
    }

    /// `worker` ran a decode step of `n_batch` sequences, which did nothing else, in `time` (of any one unit).
    fn stepped(&mut self, worker: WorkerId, n_batch: u32, time: f64) {
        let _ = (worker, n_batch, time);
    }

    /// It is told the picks of one decode step in so many ([`RoutePolicy::picked`]), where steps are tapped as often; of
    /// none if 0.
    fn feedback(&self) -> u32 {
        0
    }

    /// What the request on `worker` picked in a decode step: experts of each MoE layer, as many of each, layer by layer.
    fn picked(&mut self, id: RequestId, worker: WorkerId, experts: &[u32]) {
        let _ = (id, worker, experts);
    }

    /// A running request that had better go on elsewhere. To move it takes the time `stall`, in the unit of the steps it was
    /// told of, for which the worker that gives it away and the one that takes it in each stand still. Nothing from a policy that does not predict it.
    fn relief(&mut self, workers: &[WorkerView], stall: f64) -> Option<Relief> {
        let _ = (workers, stall);
        None
    }

    /// The request has moved from one worker to another, with `n_tokens` of context.
    fn moved(&mut self, id: RequestId, n_tokens: u32, from: WorkerId, to: WorkerId) {
        self.left(id, from);
        self.placed(&RouteRequest { id, n_tokens, ..RouteRequest::default() }, to);
    }

    /// The mean relative error of the step times it predicts; nothing from a policy that predicts none, or before steps.
    fn step_time_error(&self) -> Option<f64> {
        None
    }
}
