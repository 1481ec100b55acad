//! The runs of a simulation, each a row.
//!
//! Never decides what is compared.

use std::{collections::BTreeMap, sync::Arc};

use eldr::{
    bench::rows::Row,
    metrics::Summary,
    refit::{RefitConfig, Refitter},
    route::{PolicyKind, PolicyParams},
    sim::{ClusterReport, Pool, Scenario, SimError, simulate},
};
use ndarray::{Array2, Axis};
use rayon::prelude::*;
use serde_json::{Value, json};

use super::sources::{Setup, SetupKey, Sources};
use crate::cli::{error::CliError, progress};

/// One run.
#[derive(Debug, Clone)]
pub struct Job {
    pub scenario: Scenario,
    pub kind: PolicyKind,
    /// The band's width, where it is not the calibration's.
    pub tau: Option<f32>,
    /// On devices of several ranks: experts where their cluster wants them, or in order.
    pub own_placement: Option<bool>,
    /// Told the picks of the answer.
    pub clairvoyant: bool,
    /// With clusters of any size.
    pub unbalanced: bool,
}

impl Job {
    /// Which setup it runs with.
    pub fn setup(&self) -> SetupKey {
        SetupKey { n_workers: self.scenario.n_workers(), unbalanced: self.unbalanced }
    }
}

/// Runs all of them, as many at a time as there are cores; the rows are in the order of `jobs`.
pub fn run_all(
    sources: &Sources,
    setups: &BTreeMap<SetupKey, Setup>,
    jobs: &[Job],
    refits: bool,
) -> Result<Vec<Row>, CliError> {
    let bar = progress::bar(jobs.len() as u64, "simulating");
    let run = |job: &Job| {
        let row = run(sources, &setups[&job.setup()], job, refits);
        bar.inc(1);
        row
    };
    let rows: Result<Vec<Row>, SimError> = jobs.par_iter().map(run).collect();
    bar.finish_and_clear();
    rows.map_err(CliError::input)
}

fn run(sources: &Sources, setup: &Setup, job: &Job, refits: bool) -> Result<Row, SimError> {
    let n_workers = job.scenario.n_workers();
    let calibration = setup.calibration.as_ref();
    // Workers beyond the calibration's take its centroids in turn.
    let centroids = calibration.map(|calibration| {
        let rows: Vec<usize> = (0..n_workers).map(|worker| worker % calibration.n_workers()).collect();
        Arc::new(calibration.centroids.select(Axis(0), &rows))
    });
    let mut domains: Vec<String> = sources.trace.requests.iter().filter_map(|request| request.domain.clone()).collect();
    domains.sort_unstable();
    domains.dedup();
    let params = PolicyParams {
        seed: job.scenario.seed,
        tau: job.tau.or(calibration.map(|calibration| calibration.tau)).unwrap_or(0.1),
        centroids: centroids.clone(),
        domains,
        shape: Some(sources.trace.header.shape.clone()),
        step_time: sources.known_cost.then(|| sources.cost.step_time()),
        ..PolicyParams::new(n_workers)
    };
    let policy = job.kind.build(&params)?;
    let follows = refits && job.kind.uses_centroids();
    let refitter = refitter(centroids.filter(|_| follows))?;
    let ranks = match job.own_placement {
        None => &[][..],
        Some(true) => &setup.own,
        Some(false) => &setup.in_order,
    };
    let pool = Pool {
        trace: &sources.trace,
        set: &sources.set,
        served: &sources.served,
        cost: &sources.cost,
        calibration: calibration.filter(|_| job.kind.uses_centroids()),
        ranks,
        clairvoyant: job.clairvoyant,
    };
    let report = simulate(pool, &job.scenario, policy, refitter)?;
    let mut setting = setting(job, params.tau);
    setting.extend(follows.then(|| ("refit".to_owned(), json!(true))));
    let begins = sources.known_cost && job.kind == PolicyKind::MarginalCost;
    setting.extend(begins.then(|| ("known_cost".to_owned(), json!(true))));
    Ok(Row { verb: "simulate".to_owned(), setting, measured: measured(&report) })
}

fn refitter(centroids: Option<Arc<Array2<f32>>>) -> Result<Option<Refitter>, SimError> {
    let refitter = centroids.map(|centroids| Refitter::new(RefitConfig::default(), centroids)).transpose();
    refitter.map_err(|error| SimError::Scenario(format!("the centroids can not follow the traffic: {error}")))
}

fn setting(job: &Job, tau: f32) -> BTreeMap<String, Value> {
    let scenario = &job.scenario;
    let slots = scenario.n_slots();
    let mut setting = BTreeMap::from([
        ("policy".to_owned(), json!(job.kind.name())),
        ("workers".to_owned(), json!(scenario.n_workers())),
        ("prefill".to_owned(), json!(scenario.n_prefill())),
        ("slots".to_owned(), json!(slots.iter().max())),
        ("requests".to_owned(), json!(scenario.requests)),
        ("seed".to_owned(), json!(scenario.seed)),
    ]);
    setting.extend(scenario.rate.map(|rate| ("rate".to_owned(), json!(rate))));
    setting.extend(scenario.concurrency.map(|n| ("concurrency".to_owned(), json!(n))));
    if job.kind == PolicyKind::LocalityBand {
        // As short as it was given: an f32 would show its binary digits.
        let tau: f64 = tau.to_string().parse().unwrap_or_else(|_| f64::from(tau));
        setting.insert("tau".to_owned(), json!(tau));
    }
    let placement = |own: bool| ("placement".to_owned(), json!(if own { "own" } else { "in_order" }));
    setting.extend(job.own_placement.map(placement));
    setting.extend(job.unbalanced.then(|| ("clusters".to_owned(), json!("unbalanced"))));
    setting.extend(job.clairvoyant.then(|| ("clairvoyant".to_owned(), json!(true))));
    setting
}

fn measured(report: &ClusterReport) -> BTreeMap<String, f64> {
    let mut measured = BTreeMap::new();
    let times = [("ttft", report.ttft_ms), ("tpot", report.tpot_ms), ("e2e", report.e2e_ms), ("wait", report.wait_ms)];
    for (name, times) in times {
        if let Some(Summary { p50, p99, mean }) = times {
            measured.insert(format!("{name}_p50_ms"), p50);
            measured.insert(format!("{name}_p99_ms"), p99);
            measured.insert(format!("{name}_mean_ms"), mean);
        }
    }
    let numbers = [
        ("experts_per_step", report.experts_per_step),
        ("experts_per_token", report.experts_per_token),
        ("batch", report.batch),
        ("context", report.context),
        ("step_ms", report.step_ms),
        ("tokens_per_s", report.tokens_per_s),
        ("busy", report.busy),
        ("imbalance", report.imbalance),
        ("cached", report.cached),
        ("time_s", report.time_s),
        ("finished", report.finished as f64),
        ("failed", report.failed as f64),
        ("refused", report.refused as f64),
        ("retried", report.retried as f64),
        ("lost", report.lost as f64),
        ("copies", report.copies as f64),
        ("steps", report.steps as f64),
    ];
    measured.extend(numbers.map(|(name, x)| (name.to_owned(), x)));
    measured
}
