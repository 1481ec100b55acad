//! What is reported of a scenario and a policy.

use eldr::sim::Interval;
use serde::Serialize;

use crate::{
    bound,
    cases::{Case, Outcome},
    chart::Mark,
};

/// Changes in percent, with 95% intervals over the seeds; one is against what the same seed gave the other policy.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    pub scenario: String,
    pub workers: usize,
    pub policy: String,
    pub is_default: bool,
    pub seeds: usize,
    /// Of the time per output token, against the best of round robin, least loaded, power of two and random.
    pub p50: Interval,
    pub p99: Interval,
    pub mean: Interval,
    /// The mean against round robin's, whose median says little where it crowds half of the workers.
    pub mean_to_round_robin: Interval,
    /// The gain of `mean` as a share of what the best partition of even batches would gain, where that is known and 2 % or more.
    pub of_best: Option<f64>,
    pub experts_per_step: f64,
    /// Decode steps of a worker until recovered, for each change of the workers; the mean over the seeds.
    pub recovery_steps: Vec<f64>,
}

/// Of a smaller gain no share is told: it would be of noise.
const SHOWN: f64 = 2.0;

impl Row {
    /// Median and P99.
    pub fn mark(&self) -> Mark {
        Mark { group: self.scenario.clone(), name: self.policy.clone(), left: self.p50, right: self.p99 }
    }
}

/// One row a name, which says too whether that is the default; the first four are the load balancers, the first of them
/// round robin.
pub fn rows(case: Case, workers: usize, names: &[(&str, bool)], runs: &[Vec<Outcome>]) -> Vec<Row> {
    let mean =
        |at: usize, of: fn(&Outcome) -> f64| runs.iter().map(|run| of(&run[at])).sum::<f64>() / runs.len() as f64;
    let best = |of: fn(&Outcome) -> f64| (0..4).min_by(|&a, &b| mean(a, of).total_cmp(&mean(b, of))).expect("four");
    let change = |at: usize, to: usize, of: fn(&Outcome) -> f64| {
        let changes: Vec<f64> = runs.iter().map(|run| 100.0 * (of(&run[at]) / of(&run[to]) - 1.0)).collect();
        Interval::of(&changes)
    };
    let p50: fn(&Outcome) -> f64 = |run| run.p50;
    let p99: fn(&Outcome) -> f64 = |run| run.p99;
    let average: fn(&Outcome) -> f64 = |run| run.mean;
    let gain = |at: usize| change(at, best(average), average).mean;
    let most = names.iter().position(|&(name, _)| name == bound::KINDS[0]).map(gain);
    let row = |(at, &(name, is_default)): (usize, &(&str, bool))| {
        let n_changes = runs.iter().map(|run| run[at].recoveries.len()).min().unwrap_or(0);
        let recovery = |change: usize| runs.iter().map(|run| run[at].recoveries[change] as f64).sum::<f64>();
        Row {
            scenario: case.name(),
            workers,
            policy: name.to_owned(),
            is_default,
            seeds: runs.len(),
            p50: change(at, best(p50), p50),
            p99: change(at, best(p99), p99),
            mean: change(at, best(average), average),
            mean_to_round_robin: change(at, 0, average),
            of_best: most.filter(|&most| at >= 4 && most < -SHOWN).map(|most| gain(at) / most),
            experts_per_step: mean(at, |run| run.experts),
            recovery_steps: (0..n_changes).map(|change| recovery(change) / runs.len() as f64).collect(),
        }
    };
    names.iter().enumerate().map(row).collect()
}

pub fn print(rows: &[Row]) {
    println!("{}, {} workers, {} seeds", rows[0].scenario, rows[0].workers, rows[0].seeds);
    for row in rows {
        let shown = |interval: &Interval| {
            let half = (interval.high - interval.low) / 2.0;
            if half.is_nan() { format!("{:13}", "     -") } else { format!("{:+6.1} +-{half:4.1}", interval.mean) }
        };
        let recovery: Vec<String> = row.recovery_steps.iter().map(|steps| format!("  {steps:.0} steps")).collect();
        let of_best = row.of_best.map(|share| format!("  {:3.0}% of the best", 100.0 * share));
        println!(
            "  {:20} p50 {}  p99 {}  mean {}  {:5.1} experts{}{}",
            row.policy,
            shown(&row.p50),
            shown(&row.p99),
            shown(&row.mean),
            row.experts_per_step,
            recovery.concat(),
            of_best.unwrap_or_default(),
        );
    }
}
