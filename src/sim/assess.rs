use std::sync::Arc;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::{
    calibrate::{Calibration, CalibrationInput, CalibrationParams, fit},
    rng::mix,
    route::{PolicyKind, PolicyParams},
    sim::{
        Arrivals, BalancerPoint, Compared, CostShares, Fold, Order, ReplayMeans, ReplayParams, ReplayReport, ReplaySet,
        SimError, StepCost, TAUS, TauCurve, TauPoint, Verdict, folds, replay,
    },
    trace::Trace,
};

/// The load balancers the band's width is measured against.
const BALANCERS: [PolicyKind; 3] = [PolicyKind::RoundRobin, PolicyKind::LeastLoaded, PolicyKind::PowerOfTwo];
/// Requests of a replay, for each that is in the system.
const ROUNDS: usize = 8;
/// Share of a replay's requests before the measurement: more than one round.
const WARMUP: f64 = 0.2;
/// A prefill, in mean steps.
const PREFILL_STEPS: f64 = 10.0;
/// The fewest requests in the system for each decode worker: with fewer, most batches have one sequence.
const MIN_BATCH: usize = 2;

/// How to choose the band's width and judge it. Everything but the fit has a default.
#[derive(Debug, Clone)]
pub struct AssessParams {
    /// The fit of every fold; its `tau` takes no part.
    pub fit: CalibrationParams,
    /// Slots of each decode worker, as many entries as the fit has workers.
    pub n_slots: Vec<u32>,
    /// Requests in the system; half the slots if not given. Never more than half of a fold's, so that what meets in a
    /// batch varies; slots are then fewer in proportion.
    pub concurrency: Option<usize>,
    /// What a step costs; if not given, [`CostShares::default`] at round robin's mean step, which then takes 1.
    pub cost: Option<StepCost>,
    /// Widths to compare, ascending.
    pub taus: Vec<f32>,
    /// Parts of the trace: one judges, one chooses, the others fit, in turn.
    pub n_folds: usize,
    /// Replays of each policy in each fold, which differ in the order of requests.
    pub n_seeds: usize,
    /// Gain of the median TPOT that is worth routing for.
    pub threshold: f64,
    /// Seed of the split and of the orders.
    pub seed: u64,
}

impl AssessParams {
    /// The defaults for a fit: 32 slots a worker, 4 folds, 4 seeds, 2% as threshold.
    pub fn new(fit: CalibrationParams) -> Self {
        Self {
            n_slots: vec![32; fit.n_workers],
            fit,
            concurrency: None,
            cost: None,
            taus: TAUS.to_vec(),
            n_folds: 4,
            n_seeds: 4,
            threshold: 0.02,
            seed: 1,
        }
    }
}

/// What replays of a trace say.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Assessment {
    /// The band's width from all folds together: the one to serve with.
    pub tau_curve: TauCurve,
    /// Whether to use the band at all.
    pub verdict: Verdict,
}

/// Chooses the band's width for a trace, and judges whether the band helps, both by cross-validation.
///
/// In each fold a calibration is fitted to some requests, the width is chosen on others, and the band of that width is
/// compared with `least_loaded` on the rest ([`folds()`]): the verdict is over requests that neither the fit nor its width
/// has seen. Its interval is Student's over the folds (each the mean of its seeds), which judge on different requests.
/// The curve averages the parts that chose, over all folds. Labels take no part.
///
/// Bit for bit the same on any number of threads. Requests without a decode step are left out.
///
/// # Errors
/// Too few requests to put two in the system for each worker, parameters out of range, and parts that can not be fitted.
pub fn assess(trace: &Trace, params: &AssessParams) -> Result<Assessment, SimError> {
    let taus = &params.taus;
    if taus.is_empty() || !taus.windows(2).all(|w| w[0] < w[1]) || !taus.iter().all(|tau| (0.0..=2.0).contains(tau)) {
        return Err(SimError::Taus(taus.clone()));
    }
    if params.n_seeds == 0 {
        return Err(SimError::NoSeeds);
    }
    let set = ReplaySet::new(trace);
    let requests: Vec<usize> = (0..set.n_requests()).filter(|&index| set.n_steps(index) > 0).collect();
    let parts = folds(&requests, params.n_folds, params.seed)?;
    let bench = Bench::new(&set, &requests, params)?;
    let fitted: Vec<Fitted> = parts
        .par_iter()
        .enumerate()
        .map(|(fold, parts)| Fitted::new(trace, parts, params).map_err(|source| SimError::Fit { fold, source }))
        .collect::<Result<_, _>>()?;

    let on_choose: Vec<&[usize]> = parts.iter().map(|fold| fold.choose.as_slice()).collect();
    let bands = taus.iter().map(|&tau| Routed::Band(tau));
    let candidates: Vec<Routed> = BALANCERS.into_iter().map(Routed::Load).chain(bands).collect();
    let jobs: Vec<Job<'_>> = (0..parts.len())
        .flat_map(|fold| candidates.iter().map(move |&routed| (fold, routed)))
        .map(|(fold, routed)| Job { requests: on_choose[fold], fitted: &fitted[fold], fold, routed })
        .collect();
    let chosen_on = bench.replay_all(&jobs, 0)?;
    let by_fold: Vec<&[Vec<ReplayReport>]> = chosen_on.chunks(candidates.len()).collect();
    let taus_of_folds: Vec<f32> = by_fold.iter().map(|fold| curve(taus, &[fold]).tau).collect();

    let judging = |fold: usize| [Routed::Load(PolicyKind::LeastLoaded), Routed::Band(taus_of_folds[fold])];
    let jobs: Vec<Job<'_>> = (0..parts.len())
        .flat_map(|fold| judging(fold).map(|routed| (fold, routed)))
        .map(|(fold, routed)| Job { requests: &parts[fold].judge, fitted: &fitted[fold], fold, routed })
        .collect();
    let judged = bench.replay_all(&jobs, 1)?;
    let pairs: Vec<(ReplayMeans, ReplayMeans)> =
        judged.chunks(2).map(|pair| (ReplayMeans::of(&pair[0]), ReplayMeans::of(&pair[1]))).collect();
    let tpot_p50 = Compared::of(&pairs, |means| means.tpot_p50);
    let verdict = Verdict {
        helps: Verdict::is_worth(&tpot_p50.gain, params.threshold),
        threshold: params.threshold,
        tpot_p50,
        tpot_p99: Compared::of(&pairs, |means| means.tpot_p99),
        experts_per_token: Compared::of(&pairs, |means| means.experts_per_token),
        experts_per_step: Compared::of(&pairs, |means| means.experts_per_step),
        batch: Compared::of(&pairs, |means| means.batch),
        taus: taus_of_folds,
        n_requests: requests.len(),
        n_workers: params.fit.n_workers,
        concurrency: bench.concurrency,
        n_seeds: params.n_seeds,
        cost: bench.plan.cost,
    };
    Ok(Assessment { tau_curve: curve(taus, &by_fold), verdict })
}

/// The curve over some folds, each of which has the balancers' and then the widths' replays.
fn curve(taus: &[f32], folds: &[&[Vec<ReplayReport>]]) -> TauCurve {
    let means = |candidate: usize| ReplayMeans::of(folds.iter().flat_map(|fold| &fold[candidate]));
    let balancer = |(at, kind): (usize, &PolicyKind)| BalancerPoint { policy: kind.to_string(), means: means(at) };
    let point = |(at, &tau): (usize, &f32)| TauPoint { tau, means: means(BALANCERS.len() + at) };
    TauCurve::new(
        taus.iter().enumerate().map(point).collect(),
        BALANCERS.iter().enumerate().map(balancer).collect(),
    )
}

struct Fitted {
    calibration: Arc<Calibration>,
    centroids: Arc<ndarray::Array2<f32>>,
}

impl Fitted {
    fn new(trace: &Trace, fold: &Fold, params: &AssessParams) -> Result<Self, crate::calibrate::CalibrateError> {
        let input = CalibrationInput::of_trace(trace, fold.fit.iter().copied());
        let (calibration, _) = fit(&input, &params.fit)?;
        Ok(Self { centroids: Arc::new(calibration.centroids.clone()), calibration: Arc::new(calibration) })
    }
}

#[derive(Clone, Copy)]
enum Routed {
    Load(PolicyKind),
    Band(f32),
}

/// Replays of one policy on one part of a fold.
struct Job<'a> {
    requests: &'a [usize],
    fitted: &'a Fitted,
    fold: usize,
    routed: Routed,
}

/// The workers, load and cost that every replay has in common.
struct Bench<'a> {
    set: &'a ReplaySet,
    plan: ReplayParams,
    concurrency: usize,
    n_seeds: usize,
    seed: u64,
}

impl<'a> Bench<'a> {
    fn new(set: &'a ReplaySet, requests: &[usize], params: &AssessParams) -> Result<Self, SimError> {
        let n_workers = params.fit.n_workers;
        if n_workers == 0 || params.n_slots.len() != n_workers || params.n_slots.contains(&0) {
            return Err(SimError::Slots(params.n_slots.clone()));
        }
        let n_slots: usize = params.n_slots.iter().map(|&n| n as usize).sum();
        let wanted = params.concurrency.unwrap_or(n_slots / 2).max(1);
        let concurrency = wanted.min(requests.len() / params.n_folds / 2);
        if concurrency < MIN_BATCH * n_workers && concurrency < wanted {
            let needed = 2 * params.n_folds * wanted.min(MIN_BATCH * n_workers);
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

    /// The reports of each job, one a seed. A fold's jobs get requests in the same orders; `stage` tells one use of a
    /// part from another.
    fn replay_all(&self, jobs: &[Job<'_>], stage: u64) -> Result<Vec<Vec<ReplayReport>>, SimError> {
        let runs: Vec<(&Job<'_>, usize)> =
            jobs.iter().flat_map(|job| (0..self.n_seeds).map(move |seed| (job, seed))).collect();
        let reports: Vec<ReplayReport> =
            runs.par_iter().map(|(job, seed)| self.replay_one(job, stage, *seed)).collect::<Result<_, _>>()?;
        Ok(reports.chunks(self.n_seeds).map(<[ReplayReport]>::to_vec).collect())
    }

    fn replay_one(&self, job: &Job<'_>, stage: u64, seed: usize) -> Result<ReplayReport, SimError> {
        let seed = [stage, job.fold as u64, seed as u64].iter().fold(mix(self.seed), |seed, &part| mix(seed ^ part));
        let params = ReplayParams { order: Order::Shuffled { seed }, ..self.plan.clone() };
        let mut policy = PolicyParams { seed, ..PolicyParams::new(params.n_slots.len()) };
        let (kind, calibration) = match job.routed {
            Routed::Load(kind) => (kind, None),
            Routed::Band(tau) => {
                policy.tau = tau;
                policy.centroids = Some(Arc::clone(&job.fitted.centroids));
                (PolicyKind::LocalityBand, Some(Arc::clone(&job.fitted.calibration)))
            }
        };
        replay(self.set, job.requests, &params, kind.build(&policy)?, calibration)
    }
}
