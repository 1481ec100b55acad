//! One decode worker and a queue: what it gains to let those go first that cost the batch least.

use std::{error::Error, path::Path};

use eldr::{
    route::{PolicyKind, PolicyParams},
    schedule::DispatchLimits,
    sim::{Arrivals, CostShares, Interval, Order, ReplayParams, ReplayReport, StepCost, Traffic, replay},
};
use serde::Serialize;

use crate::{
    cases::{N_RESIDENT, World},
    chart::{self, Mark},
};

/// So many that the queue that runs empty in the end does not count.
const N_REQUESTS: usize = 19_200;

/// Against first come, first served, in percent.
#[derive(Debug, Serialize)]
pub struct Overtaking {
    pub waiting: usize,
    pub age_bound: u32,
    pub tokens_per_s: Interval,
    pub mean_wait: Interval,
    /// The longest percentile's wait over that in turn.
    pub p99_wait_ratio: f64,
}

pub fn all(world: &World) -> Result<Vec<Overtaking>, Box<dyn Error>> {
    let runs = [(64, 2), (64, 4), (64, 1000), (16, 2), (128, 2)];
    runs.into_iter().map(|(waiting, age_bound)| one(world, waiting, age_bound)).collect()
}

fn one(world: &World, waiting: usize, age_bound: u32) -> Result<Overtaking, Box<dyn Error>> {
    let pairs = world.seeds().map(|seed| Ok([run(world, waiting, 1, seed)?, run(world, waiting, age_bound, seed)?]));
    let pairs = pairs.collect::<Result<Vec<_>, Box<dyn Error>>>()?;
    let changes = |of: &dyn Fn(&ReplayReport) -> f64| {
        let change = |[before, after]: &[ReplayReport; 2]| 100.0 * (of(after) / of(before) - 1.0);
        pairs.iter().map(change).collect::<Vec<_>>()
    };
    let wait = |report: &ReplayReport| report.wait.expect("requests that were admitted");
    let p99 = changes(&|report| wait(report).p99);
    Ok(Overtaking {
        waiting,
        age_bound,
        tokens_per_s: Interval::of(&changes(&|report| report.n_tokens as f64 / report.time)),
        mean_wait: Interval::of(&changes(&|report| wait(report).mean)),
        p99_wait_ratio: 1.0 + p99.iter().sum::<f64>() / p99.len() as f64 / 100.0,
    })
}

fn run(world: &World, waiting: usize, age_bound: u32, seed: u64) -> Result<ReplayReport, Box<dyn Error>> {
    let (_, served) = Traffic::Matched.split(&world.trace, 0, N_REQUESTS, seed);
    let shape = Some(world.trace.header.shape.clone());
    let policy =
        || PolicyKind::MarginalCost.build(&PolicyParams { seed, shape: shape.clone(), ..PolicyParams::new(1) });
    let mut params = ReplayParams {
        n_slots: vec![N_RESIDENT as u32],
        arrivals: Arrivals::Closed { concurrency: N_RESIDENT + waiting, ramp: 100.0 },
        order: Order::Passing,
        n_requests: N_REQUESTS,
        warmup: 0.2,
        prefill: 0.0,
        cost: StepCost::UNIT,
        handoff: 0.0,
        limits: DispatchLimits { max_handoffs: waiting, ..DispatchLimits::default() },
    };
    let even = replay(&world.set, &served, &params, policy()?, None)?;
    params.cost = StepCost::from_shares(CostShares::default(), &even, world.set.n_layer());
    params.limits.age_bound = age_bound;
    Ok(replay(&world.set, &served, &params, policy()?, None)?)
}

/// What it gains over turns, which is admission off.
pub fn chart(path: &Path, all: &[Overtaking]) -> Result<(), Box<dyn Error>> {
    let mark = |row: &Overtaking| Mark {
        group: format!("{} wait", row.waiting),
        name: format!("age bound {}", row.age_bound),
        left: row.tokens_per_s,
        right: row.mean_wait,
    };
    let titles = ["tokens a second, change in % against turns", "mean wait, change in % against turns"];
    chart::draw(path, titles, &all.iter().map(mark).collect::<Vec<_>>())
}

pub fn print(all: &[Overtaking]) {
    println!("one worker, those that wait may overtake: change of tokens a second and of the mean wait, P99 of waits");
    for Overtaking { waiting, age_bound, tokens_per_s, mean_wait, p99_wait_ratio } in all {
        let half = (tokens_per_s.high - tokens_per_s.low) / 2.0;
        println!(
            "  {waiting:4} wait, bound {age_bound:4}: {:+.1} +-{half:.1}%  {:+.1}%  {p99_wait_ratio:.2} x",
            tokens_per_s.mean, mean_wait.mean
        );
    }
}
