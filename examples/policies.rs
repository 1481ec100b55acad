//! Replays requests you have recorded under every policy, as they came and as they might come one day.
//!
//! `cargo run --release --example policies -- model.trace 8` prints the change of the median and the 99th percentile of the
//! time per output token, each against the best of three load balancers. The trace needs domains (`eldr record`).
#![expect(clippy::print_stdout, reason = "it prints a table")]

use std::{error::Error, path::Path, sync::Arc, time::Duration};

use eldr::{
    calibrate::{CalibrationInput, CalibrationParams, fit},
    engine::read_trace,
    refit::{RefitConfig, Refitter},
    route::{PolicyKind, PolicyParams},
    schedule::DispatchLimits,
    sim::{
        Arrivals, CostShares, Order, ReplayMeans, ReplayParams, ReplayReport, ReplaySet, StepCost, Traffic, replay,
        replay_refitting,
    },
    trace::Trace,
};

/// The first three are the balancers; then whether there are centroids, and whether they follow the traffic.
const RUNS: [(PolicyKind, bool, bool); 7] = [
    (PolicyKind::RoundRobin, false, false),
    (PolicyKind::LeastLoaded, false, false),
    (PolicyKind::PowerOfTwo, false, false),
    (PolicyKind::LocalityBand, true, false),
    (PolicyKind::MarginalCost, false, false),
    (PolicyKind::MarginalCost, true, false),
    (PolicyKind::MarginalCost, true, true),
];
/// Requests a worker has on average, and requests of each domain that a calibration is fitted to.
const N_RESIDENT: usize = 16;
const N_FIT: usize = 20;
const SEEDS: std::ops::Range<u64> = 101..105;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let [_, trace, n_workers] = &args[..] else { return Err("give a trace and a number of workers".into()) };
    let trace = read_trace(Path::new(trace))?;
    let (set, n_workers) = (ReplaySet::new(&trace), n_workers.parse()?);
    println!("{:12}{}", "p50/p99 %", RUNS.map(|(kind, c, r)| format!("{:>17}{:2}", kind.name(), mark(c, r))).concat());
    for traffic in Traffic::ALL {
        let runs = SEEDS.map(|seed| serve(&trace, &set, n_workers, traffic, seed)).collect::<Result<Vec<_>, _>>()?;
        let means: Vec<ReplayMeans> = (0..RUNS.len()).map(|at| ReplayMeans::of(runs.iter().map(|r| &r[at]))).collect();
        let best = |of: fn(&ReplayMeans) -> f64| means[..3].iter().map(of).fold(f64::INFINITY, f64::min);
        let (p50, p99) = (best(|m| m.tpot_p50), best(|m| m.tpot_p99));
        let change = |now: f64, then: f64| 100.0 * (now / then - 1.0);
        let cell = |m: &ReplayMeans| format!("{:+.1}/{:+.1}", change(m.tpot_p50, p50), change(m.tpot_p99, p99));
        let cells: Vec<String> = means.iter().map(|m| format!("{:>19}", cell(m))).collect();
        println!("{:12}{}", traffic.name(), cells.concat());
    }
    Ok(())
}

/// `c`: with centroids; `r`: which follow the traffic.
fn mark(centroids: bool, refits: bool) -> &'static str {
    if refits {
        "+r"
    } else if centroids {
        "+c"
    } else {
        ""
    }
}

fn serve(
    trace: &Trace,
    set: &ReplaySet,
    n_workers: usize,
    traffic: Traffic,
    seed: u64,
) -> Result<Vec<ReplayReport>, Box<dyn Error>> {
    let n_domain = trace.requests.len() / 5;
    let wanted = N_RESIDENT * n_workers;
    let concurrency = if traffic == Traffic::OneDomain { wanted.min(n_domain * 4 / 5) } else { wanted };
    let n_requests = 8 * concurrency;
    let (fitted_to, served) = traffic.split(trace, N_FIT, n_requests, seed);
    let calibration =
        Arc::new(fit(&CalibrationInput::of_trace(trace, fitted_to), &CalibrationParams::new(n_workers))?.0);
    let centroids = Arc::new(calibration.centroids.clone());
    let mut params = ReplayParams {
        n_slots: vec![2 * N_RESIDENT as u32; n_workers],
        arrivals: Arrivals::Closed { concurrency, ramp: 100.0 },
        order: Order::Passing,
        n_requests,
        warmup: 0.2,
        prefill: 10.0,
        cost: StepCost::UNIT,
        limits: DispatchLimits::default(),
    };
    let policy = |kind: PolicyKind, calibrated: bool| {
        let centroids = calibrated.then(|| Arc::clone(&centroids));
        let shape = Some(trace.header.shape.clone());
        kind.build(&PolicyParams { seed, centroids, shape, ..PolicyParams::new(n_workers) })
    };
    let even = replay(set, &served, &params, policy(PolicyKind::RoundRobin, false)?, None)?;
    params.cost = StepCost::from_shares(CostShares::default(), &even, set.n_layer());
    let run = |&(kind, calibrated, refits): &(PolicyKind, bool, bool)| -> Result<_, Box<dyn Error>> {
        let policy = policy(kind, calibrated)?;
        if refits {
            let refitter = Refitter::new(RefitConfig::default(), Arc::clone(&centroids))?;
            let step = Duration::from_millis(30);
            return Ok(replay_refitting(set, &served, &params, policy, Arc::clone(&calibration), refitter, step)?);
        }
        Ok(replay(set, &served, &params, policy, calibrated.then(|| Arc::clone(&calibration)))?)
    };
    RUNS.iter().map(run).collect()
}
