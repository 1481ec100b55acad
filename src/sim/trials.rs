use std::sync::Arc;

use ndarray::Array2;
use rayon::prelude::*;

use crate::{
    calibrate::{CalibrateError, Calibration, CalibrationInput, CalibrationParams, fit},
    rng::mix,
    route::{PolicyKind, PolicyParams},
    schedule::DispatchLimits,
    sim::{
        Arrivals, AssessParams, CostShares, Order, ReplayParams, ReplayReport, ReplaySet, SimError, StepCost, replay,
    },
    trace::Trace,
};

/// Requests of a replay, for each that is in the system.
const ROUNDS: usize = 8;
/// Share of a replay's requests before the measurement: more than one round.
const WARMUP: f64 = 0.2;
/// A prefill, in mean steps.
const PREFILL_STEPS: f64 = 10.0;
/// The fewest requests in the system for each decode worker: with fewer, most batches have one sequence.
const MIN_BATCH: usize = 2;

/// A calibration as replays use it.
pub(super) struct Fitted {
    calibration: Arc<Calibration>,
    centroids: Arc<Array2<f32>>,
}

impl Fitted {
    /// Fits to the requests at positions `which`.
    pub fn new(trace: &Trace, which: &[usize], params: &CalibrationParams) -> Result<Self, CalibrateError> {
        let input = CalibrationInput::of_trace(trace, which.iter().copied());
        let (calibration, _) = fit(&input, params)?;
        Ok(Self { centroids: Arc::new(calibration.centroids.clone()), calibration: Arc::new(calibration) })
    }
}

/// A policy to try.
#[derive(Clone, Copy)]
pub(super) enum Routed {
    /// A load balancer.
    Load(PolicyKind),
    /// The locality band of this width.
    Band(f32),
}

/// Replays of one policy on one part of a fold.
pub(super) struct Trial<'a> {
    pub requests: &'a [usize],
    pub fitted: &'a Fitted,
    pub fold: usize,
    pub routed: Routed,
}

/// The workers, load and cost that every replay has in common.
pub(super) struct Trials<'a> {
    set: &'a ReplaySet,
    pub plan: ReplayParams,
    pub concurrency: usize,
    n_seeds: usize,
    seed: u64,
}

impl<'a> Trials<'a> {
    /// Sets them for parts of `requests`, and the cost by a round robin replay of all of them.
    pub fn new(set: &'a ReplaySet, requests: &[usize], params: &AssessParams) -> Result<Self, SimError> {
        let n_workers = params.fit.n_workers;
        if n_workers == 0 || params.n_slots.len() != n_workers || params.n_slots.contains(&0) {
            return Err(SimError::Slots(params.n_slots.clone()));
        }
        let n_slots: usize = params.n_slots.iter().map(|&n| n as usize).sum();
        let wanted = params.concurrency.unwrap_or(n_slots / 2).max(1);
        let concurrency = wanted.min(requests.len() / params.n_folds * 9 / 10);
        if concurrency < MIN_BATCH * n_workers && concurrency < wanted {
            let needed = (params.n_folds * wanted.min(MIN_BATCH * n_workers) * 10).div_ceil(9);
            return Err(SimError::TooFewRequests { n_requests: requests.len(), n_workers, needed });
        }
        let fewer = |&n: &u32| (f64::from(n) * concurrency as f64 / wanted as f64).ceil() as u32;
        let mean_steps = requests.iter().map(|&at| f64::from(set.n_steps(at))).sum::<f64>() / requests.len() as f64;
        let mut plan = ReplayParams {
            n_slots: params.n_slots.iter().map(fewer).collect(),
            arrivals: Arrivals::Closed { concurrency, ramp: mean_steps },
            order: Order::Shuffled { seed: params.seed },
            n_requests: ROUNDS * concurrency,
            warmup: WARMUP,
            prefill: PREFILL_STEPS,
            cost: StepCost::UNIT,
            handoff: 0.0,
            limits: DispatchLimits::default(),
        };
        let round_robin = PolicyKind::RoundRobin.build(&PolicyParams::new(n_workers))?;
        let report = replay(set, requests, &plan, round_robin, None)?;
        let from_shares = || StepCost::from_shares(CostShares::default(), &report, set.n_layer());
        plan.cost = params.cost.unwrap_or_else(from_shares);
        let mean_step = plan.cost.fixed
            + plan.cost.per_expert * report.experts_per_step * set.n_layer() as f64
            + plan.cost.per_token * report.batch;
        plan.arrivals = Arrivals::Closed { concurrency, ramp: mean_steps * mean_step };
        plan.prefill = PREFILL_STEPS * mean_step;
        Ok(Self { set, plan, concurrency, n_seeds: params.n_seeds, seed: params.seed })
    }

    /// The reports of each trial, one a seed. A fold's trials get requests in the same orders; `stage` tells one use of a
    /// part from another.
    pub fn replay_all(&self, trials: &[Trial<'_>], stage: u64) -> Result<Vec<Vec<ReplayReport>>, SimError> {
        let runs: Vec<(&Trial<'_>, usize)> =
            trials.iter().flat_map(|trial| (0..self.n_seeds).map(move |seed| (trial, seed))).collect();
        let reports: Vec<ReplayReport> =
            runs.par_iter().map(|(trial, seed)| self.replay_one(trial, stage, *seed)).collect::<Result<_, _>>()?;
        Ok(reports.chunks(self.n_seeds).map(<[ReplayReport]>::to_vec).collect())
    }

    fn replay_one(&self, trial: &Trial<'_>, stage: u64, seed: usize) -> Result<ReplayReport, SimError> {
        let seed = [stage, trial.fold as u64, seed as u64].iter().fold(mix(self.seed), |seed, &part| mix(seed ^ part));
        let params = ReplayParams { order: Order::Shuffled { seed }, ..self.plan.clone() };
        let mut policy = PolicyParams { seed, ..PolicyParams::new(params.n_slots.len()) };
        let (kind, calibration) = match trial.routed {
            Routed::Load(kind) => (kind, None),
            Routed::Band(tau) => {
                policy.tau = tau;
                policy.centroids = Some(Arc::clone(&trial.fitted.centroids));
                (PolicyKind::LocalityBand, Some(Arc::clone(&trial.fitted.calibration)))
            }
        };
        replay(self.set, trial.requests, &params, kind.build(&policy)?, calibration)
    }
}
