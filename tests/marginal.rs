//! The marginal cost on planted traffic with known answers: what it saves where there is locality, that it costs nothing
//! where there is none, and that overtaking pays and keeps its bound.
//!
//! Everything is seeded and on a simulated clock, so the numbers compared are exact.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

#[path = "support/fake_engine.rs"]
#[expect(dead_code, reason = "the model and its letters are used, in engines made here")]
mod fake;
#[path = "../examples/drift/partition.rs"]
mod partition;
#[path = "marginal/planted.rs"]
mod planted;
#[path = "schedule/restless.rs"]
mod restless;

use std::sync::Arc;

use eldr::{
    StreamEvent,
    calibrate::{CalibrationInput, CalibrationParams, fit},
    engine::{Engine, EngineParts},
    route::{MarginalCostParams, PolicyKind, PolicyParams, Reason},
    schedule::{DispatchLimits, PrefixConfig},
    sim::{Arrivals, CostShares, Order, ReplayParams, ReplayReport, ReplaySet, StepCost, Traffic, replay},
    types::{Request, SamplingParams},
};
use planted::planted;
use restless::Restless;

const N_WORKERS: usize = 4;

struct Served {
    least_loaded: ReplayReport,
    /// At the paper's width.
    band: ReplayReport,
    /// Without a calibration.
    marginal: ReplayReport,
    /// With its centroids.
    calibrated: ReplayReport,
}

fn serve(structured: bool, traffic: Traffic, seed: u64) -> Served {
    let trace = planted(structured, 320, seed);
    let set = ReplaySet::new(&trace);
    let (fitted_to, served) = traffic.split(&trace, 16, 480, seed);
    let params = CalibrationParams::new(N_WORKERS);
    let calibration = Arc::new(fit(&CalibrationInput::of_trace(&trace, fitted_to), &params).unwrap().0);
    let run = |kind: PolicyKind, calibrated: bool, cost: StepCost| {
        let params = ReplayParams {
            n_slots: vec![24; N_WORKERS],
            arrivals: Arrivals::Closed { concurrency: 48, ramp: 50.0 },
            order: Order::Passing,
            n_requests: 480,
            warmup: 0.2,
            prefill: 5.0,
            cost,
            handoff: 0.0,
            limits: DispatchLimits::default(),
        };
        let centroids = calibrated.then(|| Arc::new(calibration.centroids.clone()));
        let shape = Some(trace.header.shape.clone());
        let policy = kind.build(&PolicyParams { seed, centroids, shape, ..PolicyParams::new(N_WORKERS) }).unwrap();
        let calibration = calibrated.then(|| Arc::clone(&calibration));
        replay(&set, &served, &params, policy, calibration).unwrap()
    };
    let even = run(PolicyKind::RoundRobin, false, StepCost::UNIT);
    let cost = StepCost::from_shares(CostShares::default(), &even, set.n_layer());
    let served = Served {
        least_loaded: run(PolicyKind::LeastLoaded, false, cost),
        band: run(PolicyKind::LocalityBand, true, cost),
        marginal: run(PolicyKind::MarginalCost, false, cost),
        calibrated: run(PolicyKind::MarginalCost, true, cost),
    };
    for (name, report) in [("band", &served.band), ("marginal", &served.marginal), ("calibrated", &served.calibrated)] {
        let [p50, p99] = changes(report, &served.least_loaded);
        println!("{} {structured} {seed} {name}: p50 {p50:+.3} p99 {p99:+.3}", traffic.name());
    }
    served
}

/// By which share median and 99th percentile of the time per output token differ.
fn changes(now: &ReplayReport, then: &ReplayReport) -> [f64; 2] {
    let (now, then) = (now.tpot.unwrap(), then.tpot.unwrap());
    [now.p50 / then.p50 - 1.0, now.p99 / then.p99 - 1.0]
}

#[test]
fn finds_the_domains_without_a_calibration() {
    for seed in 1..=3 {
        let served = serve(true, Traffic::Matched, seed);
        for report in [&served.marginal, &served.calibrated] {
            let [p50, p99] = changes(report, &served.least_loaded);
            assert!(p50 < -0.14 && p99 < -0.02, "seed {seed}: {p50} {p99}");
        }
    }
}

#[test]
fn is_never_behind_when_the_mix_is_not_the_calibrated_one() {
    for traffic in [Traffic::Skewed, Traffic::Step, Traffic::Turnover, Traffic::NewDomain] {
        let served = serve(true, traffic, 1);
        for report in [&served.marginal, &served.calibrated] {
            let [p50, p99] = changes(report, &served.least_loaded);
            assert!(p50 < -0.08 && p99 < 0.01, "{}: {p50} {p99}", traffic.name());
        }
        if traffic == Traffic::NewDomain {
            continue;
        }
        // The band sends most requests to few workers.
        let [_, p99] = changes(&served.band, &served.least_loaded);
        let [_, own] = changes(&served.calibrated, &served.least_loaded);
        assert!(own < p99, "{}: {own} {p99}", traffic.name());
    }
}

#[test]
fn where_nothing_can_be_gained_nothing_is_lost() {
    let served = [serve(false, Traffic::Matched, 1), serve(true, Traffic::OneDomain, 1)];
    for Served { least_loaded, marginal, .. } in &served {
        let [p50, p99] = changes(marginal, least_loaded);
        assert!(p50.abs() < 0.01 && p99 < 0.01, "{p50} {p99}");
    }
}

/// One worker of 8 slots and 32 that wait.
fn overtaking(age_bound: u32) -> ReplayReport {
    let trace = planted(true, 320, 1);
    let set = ReplaySet::new(&trace);
    let (_, served) = Traffic::Matched.split(&trace, 0, 600, 1);
    let params = ReplayParams {
        n_slots: vec![8],
        arrivals: Arrivals::Closed { concurrency: 40, ramp: 50.0 },
        order: Order::Passing,
        n_requests: 600,
        warmup: 0.2,
        prefill: 0.0,
        cost: StepCost { fixed: 0.3, per_expert: 0.01, per_token: 0.02 },
        handoff: 0.0,
        limits: DispatchLimits { max_handoffs: 32, age_bound, ..DispatchLimits::default() },
    };
    let shape = Some(trace.header.shape.clone());
    let policy = PolicyKind::MarginalCost.build(&PolicyParams { shape, ..PolicyParams::new(1) }).unwrap();
    replay(&set, &served, &params, policy, None).unwrap()
}

#[test]
fn overtaking_gains_throughput_and_keeps_its_bound() {
    let [in_turn, twice] = [1, 2].map(overtaking);
    let rate = |report: &ReplayReport| report.batch / report.step;
    let [before, after] = [&in_turn, &twice].map(|report| report.wait.unwrap());
    println!("tokens {:.3} -> {:.3}, waits {before:?} -> {after:?}", rate(&in_turn), rate(&twice));
    assert!(rate(&twice) > 1.07 * rate(&in_turn));
    assert!(after.mean < 1.01 * before.mean && after.p99 < 2.0 * before.p99);
}

/// Domains come one after another, so that batches turn from one to the next.
fn turning(feedback: u32, migrate_every: u32) -> ReplayReport {
    let trace = planted(true, 320, 2);
    let set = ReplaySet::new(&trace);
    let (_, served) = Traffic::Runs.split(&trace, 0, 480, 2);
    let params = ReplayParams {
        n_slots: vec![24; N_WORKERS],
        arrivals: Arrivals::Closed { concurrency: 48, ramp: 50.0 },
        order: Order::Passing,
        n_requests: 480,
        warmup: 0.2,
        prefill: 5.0,
        cost: StepCost { fixed: 0.3, per_expert: 0.01, per_token: 0.02 },
        handoff: 0.0,
        limits: DispatchLimits { migrate_every, ..DispatchLimits::default() },
    };
    let marginal = MarginalCostParams { feedback, ..MarginalCostParams::default() };
    let shape = Some(trace.header.shape.clone());
    let policy = PolicyKind::MarginalCost.build(&PolicyParams { shape, marginal, ..PolicyParams::new(N_WORKERS) });
    replay(&set, &served, &params, policy.unwrap(), None).unwrap()
}

#[test]
fn feedback_and_moves_cost_nothing_and_moves_gain() {
    let [plain, told, moving] = [(0, 0), (4, 0), (0, 4)].map(|(feedback, every)| turning(feedback, every));
    let mean = |report: &ReplayReport| report.tpot.unwrap().mean;
    println!("plain {:.3}, with feedback {:.3}, moving {:.3}", mean(&plain), mean(&told), mean(&moving));
    assert!(mean(&told) < 1.01 * mean(&plain) && mean(&moving) < mean(&plain));
    assert_ne!(told, plain, "what was picked was told");
}

#[test]
fn an_engine_moves_running_requests_and_their_streams_go_on() {
    let limits = DispatchLimits { migrate_every: 1, ..DispatchLimits::default() };
    let parts = EngineParts {
        prefill: vec![fake::worker("prefill 0")],
        decode: vec![fake::worker("decode 0"), fake::worker("decode 1")],
        tokenizer: Arc::new(fake::Letters),
        policy: Box::new(Restless::new(3)),
        calibration: None,
        limits,
        chunk: 16,
        n_expert: fake::MODEL.n_expert,
        prefix: PrefixConfig::default(),
    };
    let engine = Engine::start(parts).unwrap();
    let request = |seed: u64| {
        let sampling = SamplingParams { ignore_eos: true, seed, ..SamplingParams::default() };
        let prompt = vec![1, 2, 3 + i32::try_from(seed).unwrap()];
        Request { prompt, max_tokens: 400, sampling, domain: None, deadline: None }
    };
    let streams: Vec<_> = (0..6).map(|seed| engine.submit(request(seed)).unwrap()).collect();
    let mut n_moves = 0;
    for (stream, seed) in streams.into_iter().zip(0..) {
        let mut tokens = Vec::new();
        for event in stream {
            match event {
                StreamEvent::Token { token, .. } => tokens.push(token),
                StreamEvent::Routed { decision, .. } => n_moves += u64::from(decision.reason == Reason::Migration),
                StreamEvent::End { .. } => {}
                StreamEvent::Failed(why) => panic!("{why}"),
            }
        }
        let Request { prompt, sampling, max_tokens, .. } = request(seed);
        assert_eq!(tokens, fake::MODEL.complete(&prompt, &sampling, max_tokens), "seed {seed}");
    }
    let stats = engine.stats().dispatch;
    assert!(n_moves > 0);
    assert_eq!((stats.n_migrated, stats.n_retried), (n_moves, 0));
}
