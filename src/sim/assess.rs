use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::{
    calibrate::CalibrationParams,
    route::PolicyKind,
    sim::{
        BalancerPoint, Compared, Fold, ReplayMeans, ReplayReport, ReplaySet, SimError, StepCost, TAUS, TauCurve,
        TauPoint, Verdict, folds,
        trials::{Fitted, Routed, Trial, Trials},
    },
    trace::Trace,
};

/// The load balancers the band's width is measured against.
const BALANCERS: [PolicyKind; 3] = [PolicyKind::RoundRobin, PolicyKind::LeastLoaded, PolicyKind::PowerOfTwo];

/// How to choose the band's width and judge it. Everything but the fit has a default.
#[derive(Debug, Clone)]
pub struct AssessParams {
    /// The fit of every fold; its `tau` takes no part.
    pub fit: CalibrationParams,
    /// Slots of each decode worker, as many entries as the fit has workers.
    pub n_slots: Vec<u32>,
    /// Requests in the system, those in prefill included; half the slots if not given. Never more than nine tenths of
    /// a fold's, so that no request meets its own copy; slots are then fewer in proportion.
    pub concurrency: Option<usize>,
    /// What a step costs; if not given, [`crate::sim::CostShares::default`] at round robin's mean step, which then takes 1.
    pub cost: Option<StepCost>,
    /// Widths to compare, ascending.
    pub taus: Vec<f32>,
    /// How far the 99th percentile of a width may lie above the balancers' least, as a share.
    pub p99_slack: f64,
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
    /// The defaults for a fit: 32 slots a worker, 4 folds, 4 seeds, a gain of 2% as threshold.
    pub fn new(fit: CalibrationParams) -> Self {
        Self {
            n_slots: vec![32; fit.n_workers],
            fit,
            concurrency: None,
            cost: None,
            taus: TAUS.to_vec(),
            p99_slack: 0.05,
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
/// has seen. Its interval is Student's over the folds (each the mean of its seeds): they judge on different requests, and
/// where there is no locality, what they fitted does not matter, so that they are independent where it counts.
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
    let trials = Trials::new(&set, &requests, params)?;
    let fit = |(fold, parts): (usize, &Fold)| {
        Fitted::new(trace, &parts.fit, &params.fit).map_err(|source| SimError::Fit { fold, source })
    };
    let fitted: Vec<Fitted> = parts.par_iter().enumerate().map(fit).collect::<Result<_, _>>()?;

    let bands = taus.iter().map(|&tau| Routed::Band(tau));
    let candidates: Vec<Routed> = BALANCERS.into_iter().map(Routed::Load).chain(bands).collect();
    let trial = |fold: usize, requests, routed| Trial { requests, fitted: &fitted[fold], fold, routed };
    let choosing: Vec<Trial<'_>> = (0..parts.len())
        .flat_map(|fold| candidates.iter().map(move |&routed| (fold, routed)))
        .map(|(fold, routed)| trial(fold, &parts[fold].choose, routed))
        .collect();
    let chosen_on = trials.replay_all(&choosing, 0)?;
    let by_fold: Vec<&[Vec<ReplayReport>]> = chosen_on.chunks(candidates.len()).collect();
    let taus_of_folds: Vec<f32> = by_fold.iter().map(|fold| curve(params, &[fold]).tau).collect();

    let judging: Vec<Trial<'_>> = (0..parts.len())
        .flat_map(|fold| {
            let both = [Routed::Load(PolicyKind::LeastLoaded), Routed::Band(taus_of_folds[fold])];
            both.map(|routed| trial(fold, &parts[fold].judge, routed))
        })
        .collect();
    let judged = trials.replay_all(&judging, 1)?;
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
        concurrency: trials.concurrency,
        n_seeds: params.n_seeds,
        cost: trials.plan.cost,
    };
    Ok(Assessment { tau_curve: curve(params, &by_fold), verdict })
}

/// The curve over some folds, each of which has the balancers' and then the widths' replays.
fn curve(params: &AssessParams, folds: &[&[Vec<ReplayReport>]]) -> TauCurve {
    let means = |candidate: usize| ReplayMeans::of(folds.iter().flat_map(|fold| &fold[candidate]));
    let balancer = |(at, kind): (usize, &PolicyKind)| BalancerPoint { policy: kind.to_string(), means: means(at) };
    let point = |(at, &tau): (usize, &f32)| TauPoint { tau, means: means(BALANCERS.len() + at) };
    let points = params.taus.iter().enumerate().map(point).collect();
    TauCurve::new(points, BALANCERS.iter().enumerate().map(balancer).collect(), params.p99_slack)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::planted::{Planted, Pools};

    fn of(planted: &Planted) -> Assessment {
        let params = AssessParams::new(CalibrationParams::new(planted.n_domains));
        assess(&planted.trace(), &params).expect("enough requests")
    }

    /// Distinct experts of `batch` tokens that each pick `k` of `n`.
    fn expected(n: usize, k: usize, batch: f64) -> f64 {
        n as f64 * (1.0 - (1.0 - k as f64 / n as f64).powf(batch))
    }

    #[test]
    fn disjoint_domains_help_and_each_worker_reads_one_domains_experts() {
        let Assessment { tau_curve, verdict } = of(&Planted::default());
        assert!(verdict.helps && verdict.tpot_p99.gain.low > 0.0, "{verdict:?}");
        let (experts, batch) = (verdict.experts_per_step, verdict.batch);
        let (mixed, own) = (expected(32, 3, batch.least_loaded), expected(8, 3, batch.locality_band));
        assert!((experts.least_loaded / mixed - 1.0).abs() < 0.05, "{mixed}: {verdict:?}");
        assert!((0.85..1.1).contains(&(experts.locality_band / own)), "{own}: {verdict:?}");
        // A request is as similar to its own centroid as it is unlike the others, so the band is one worker or all.
        let reads = |at: usize| tau_curve.points[at].means.experts_per_token;
        assert!((0..7).all(|at| (reads(at) / reads(0) - 1.0).abs() < 0.02), "{tau_curve:?}");
        assert!(reads(8) > 1.3 * reads(0) && tau_curve.tau < 1.0, "{tau_curve:?}");
        assert!(verdict.sentence().starts_with("locality helps here: "), "{}", verdict.sentence());
    }

    #[test]
    fn noise_does_not_help() {
        for seed in 1..=3 {
            let Assessment { verdict, .. } = of(&Planted { pools: Pools::Noise, seed, ..Planted::default() });
            assert!(!verdict.helps && verdict.experts_per_token.gain.mean < 0.02, "seed {seed}: {verdict:?}");
            assert!(verdict.sentence().starts_with("locality does not help here: "), "{}", verdict.sentence());
        }
    }

    #[test]
    fn a_generalist_expert_and_one_telling_layer_hide_no_domains() {
        for pools in [Pools::Generalist, Pools::OneLayer(1)] {
            let Assessment { verdict, .. } = of(&Planted { pools, ..Planted::default() });
            assert!(verdict.helps && verdict.experts_per_token.gain.low > 0.2, "{verdict:?}");
        }
    }

    #[test]
    fn nested_domains_save_reads_at_the_price_of_the_widest_domain() {
        let Assessment { tau_curve, verdict } = of(&Planted { pools: Pools::Nested, ..Planted::default() });
        let (nearest, load) = (&tau_curve.points[0].means, &tau_curve.balancers[1].means);
        assert!(nearest.experts_per_token < 0.9 * load.experts_per_token, "{tau_curve:?}");
        // The worker of the domain that uses every expert is slower than a mixed one.
        assert!(nearest.tpot_p99 > 1.1 * load.tpot_p99, "{tau_curve:?}");
        assert!(tau_curve.tau > 1.0 && !verdict.helps, "{verdict:?}");
        let params = AssessParams { taus: vec![0.0], ..AssessParams::new(CalibrationParams::new(4)) };
        let planted = Planted { pools: Pools::Nested, ..Planted::default() };
        let Assessment { verdict, .. } = assess(&planted.trace(), &params).expect("enough requests");
        assert!(verdict.experts_per_token.gain.low > 0.05 && verdict.tpot_p99.gain.mean < -0.1, "{verdict:?}");
    }

    #[test]
    fn labels_and_threads_change_nothing() {
        let planted = Planted::default();
        let mut trace = planted.trace();
        trace.requests.iter_mut().for_each(|request| request.domain = None);
        let params = AssessParams { n_seeds: 2, ..AssessParams::new(CalibrationParams::new(4)) };
        let labelled = assess(&planted.trace(), &params).expect("enough requests");
        for n_threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().expect("threads");
            assert_eq!(pool.install(|| assess(&trace, &params)).as_ref(), Ok(&labelled));
        }
        let json = serde_json::to_string(&labelled).expect("json");
        let read: Assessment = serde_json::from_str(&json).expect("its own json");
        assert_eq!(read.verdict.sentence(), labelled.verdict.sentence());
        assert_eq!(read.tau_curve.points.len(), TAUS.len());
    }

    #[test]
    fn what_can_not_be_judged_is_refused_in_words() {
        let trace = Planted { n_requests: 30, ..Planted::default() }.trace();
        let params = AssessParams::new(CalibrationParams::new(4));
        let error = |params: &AssessParams| assess(&trace, params).expect_err("bad").to_string();
        let too_few = error(&params);
        assert!(too_few.contains("needs 36 requests") && too_few.contains("has 30"), "{too_few}");
        assert!(error(&AssessParams { n_folds: 2, ..params.clone() }).contains("2 folds"));
        assert!(error(&AssessParams { n_seeds: 0, ..params.clone() }).contains("seed"));
        assert!(error(&AssessParams { taus: vec![0.1, 0.1], ..params.clone() }).contains("ascend"));
        assert!(error(&AssessParams { n_slots: vec![32; 3], ..params }).contains("[32, 32, 32]"));
    }
}
