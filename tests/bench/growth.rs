//! How costs grow: routing, signatures, the ledger, the fit, the placement and the simulator, with workers, experts, layers,
//! blocks, requests and ranks; the fitted exponent of each, and a chart.
//!
//! `cargo bench --bench growth -- [--small] [-o ROWS] [--svg CHART]`. The fastest of several runs counts.
#![allow(clippy::print_stdout, reason = "it prints a table")]

use std::{
    collections::BTreeMap,
    error::Error,
    fs,
    sync::Arc,
    time::{Duration, Instant},
};

use eldr::{
    bench::{
        Environment,
        rows::{ROWS_VERSION, Row, Rows, exponents, markdown, svg},
    },
    calibrate::{CalibrationInput, CalibrationParams, fit, place_layer},
    kv::{BLOCK, BlockName, Ledger},
    rng::Rng,
    route::{PolicyKind, PolicyParams, RouteRequest, WorkerView},
    signature::{ExpertCounts, Signature},
    sim::{DecodeCost, DecodeGroup, DeviceCost, HandoffCost, Pool, PrefillCost, ReplaySet, Scenario, simulate},
    trace::{Trace, TraceHeader, TraceRequest},
    types::{MoeShape, RequestId, WorkerId},
};
use ndarray::Array2;
use serde_json::json;

/// A measurement takes at least this long.
const LEAST: Duration = Duration::from_millis(20);

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let value = |flag: &str| args.iter().position(|arg| arg == flag).and_then(|at| args.get(at + 1));
    let small = args.iter().any(|arg| arg == "--small");
    let rounds = if small { 1 } else { 5 };
    let up_to = |sizes: &[usize]| sizes[..if small { 3 } else { sizes.len() }].to_vec();

    let mut rows = Vec::new();
    let mut add = |what: &str, by: &str, sizes: &[usize], cost: &dyn Fn(usize) -> f64| {
        for n in up_to(sizes) {
            let us = (0..rounds).map(|_| cost(n)).fold(f64::INFINITY, f64::min);
            rows.push(row(what, by, n, us));
        }
    };
    let (band, marginal) = (PolicyKind::LocalityBand, PolicyKind::MarginalCost);
    add("locality_band", "workers", &[8, 32, 128, 512, 2048], &|n| decision(band, n, 12, 64));
    add("locality_band", "experts", &[16, 32, 64, 128, 256], &|n| decision(band, 16, 12, n));
    add("locality_band", "layers", &[6, 12, 24, 48, 96], &|n| decision(band, 16, n, 128));
    add("marginal_cost", "workers", &[8, 32, 128, 512], &|n| decision(marginal, n, 12, 64));
    add("marginal_cost", "experts", &[16, 32, 64, 128, 256], &|n| decision(marginal, 16, 12, n));
    add("marginal_cost", "layers", &[6, 12, 24, 48, 96], &|n| decision(marginal, 16, n, 128));
    add("signature", "experts", &[16, 32, 64, 128, 256], &|n| signature(24, n));
    add("signature", "layers", &[6, 12, 24, 48, 96], &|n| signature(n, 128));
    add("ledger", "blocks", &[1_000, 4_000, 16_000, 64_000, 256_000], &ledger);
    add("fit", "requests", &[64, 128, 256, 512], &fitting);
    add("placement", "experts", &[16, 32, 64, 128], &placing);
    add("simulator", "requests", &[500, 1_000, 2_000, 4_000, 8_000], &|n| simulation(n, 8, 8, 64));
    add("simulator", "workers", &[8, 16, 32, 64, 128], &|n| simulation(2_000, n, 8, 64));
    add("simulator", "layers", &[4, 8, 16, 32], &|n| simulation(500, 8, n, 64));
    add("simulator", "experts", &[32, 64, 128, 256], &|n| simulation(500, 8, 8, n));

    let notes = vec!["Microseconds of one operation on planted data; the fastest of several runs.".to_owned()];
    let environment = Some(Environment::detect(None, Vec::new()));
    let rows = Rows { version: ROWS_VERSION, environment, notes, rows };
    let table = markdown(&rows);
    println!("{}", &table[table.find("| cost |").unwrap_or(0)..]);
    assert_eq!(exponents(&rows).len(), 15, "a cost has no exponent");
    if let Some(path) = value("-o") {
        fs::write(path, rows.to_json())?;
    }
    if let Some(path) = value("--svg") {
        fs::write(path, svg(&rows).ok_or("nothing to draw")?)?;
    }
    Ok(())
}

fn row(what: &str, by: &str, n: usize, us: f64) -> Row {
    let setting = [("what", json!(what)), ("by", json!(by)), ("n", json!(n))];
    Row {
        verb: "growth".to_owned(),
        setting: setting.map(|(name, value)| (name.to_owned(), value)).into(),
        measured: BTreeMap::from([("us".to_owned(), us)]),
    }
}

/// Microseconds of one call, over as many as take [`LEAST`].
fn each(mut call: impl FnMut()) -> f64 {
    call();
    let started = Instant::now();
    let mut n = 0u32;
    while started.elapsed() < LEAST {
        call();
        n += 1;
    }
    started.elapsed().as_secs_f64() * 1e6 / f64::from(n)
}

/// Microseconds of one call that takes long enough by itself.
fn once<T>(call: impl FnOnce() -> T) -> f64 {
    let started = Instant::now();
    std::hint::black_box(call());
    started.elapsed().as_secs_f64() * 1e6
}

fn shape(n_layer: usize, n_expert: usize) -> MoeShape {
    let n = n_layer as u32;
    MoeShape { layers: (0..n).collect(), n_layer: n + 1, n_expert: n_expert as u32, n_expert_used: 4 }
}

fn counts(shape: &MoeShape, rng: &mut Rng) -> ExpertCounts {
    let mut counts = ExpertCounts::for_shape(shape);
    counts.add_tokens(200);
    for layer in 0..shape.n_layer_moe() as u32 {
        for _ in 0..200 * shape.n_expert_used {
            counts.add(layer, &[rng.below(shape.n_expert as usize) as u32]);
        }
    }
    counts
}

/// Centroids of a third of the layers.
fn decision(kind: PolicyKind, n_workers: usize, n_layer: usize, n_expert: usize) -> f64 {
    let mut rng = Rng::new(1);
    let shape = shape(n_layer, n_expert);
    let dim = n_layer / 3 * n_expert;
    let mut unit = || Signature::normalised((0..dim).map(|_| rng.uniform() as f32).collect()).expect("not all zero");
    let signature = unit();
    let flat: Vec<f32> = (0..n_workers).flat_map(|_| unit().as_slice().to_vec()).collect();
    let centroids = Array2::from_shape_vec((n_workers, dim), flat).expect("K rows");
    let params = PolicyParams {
        centroids: Some(Arc::new(centroids)),
        shape: Some(shape.clone()),
        ..PolicyParams::new(n_workers)
    };
    let mut policy = kind.build(&params).expect("valid");
    let counts = counts(&shape, &mut Rng::new(2));
    let workers: Vec<WorkerView> = (0..n_workers as u32)
        .map(|id| WorkerView { id: WorkerId(id), n_slots: 64, n_inflight: id % 50, healthy: true })
        .collect();
    let request = RouteRequest {
        id: RequestId(0),
        signature: Some(&signature),
        domain: None,
        counts: Some(&counts),
        n_tokens: 200,
    };
    each(|| drop(std::hint::black_box(policy.select(&request, &workers))))
}

fn signature(n_layer: usize, n_expert: usize) -> f64 {
    let shape = shape(n_layer, n_expert);
    let mut rng = Rng::new(3);
    let mut input = CalibrationInput::new(shape.clone(), "planted");
    for at in 0..4 {
        // Experts that every request picks tell nothing: each picks half of them.
        let mut counts = ExpertCounts::for_shape(&shape);
        counts.add_tokens(200);
        for layer in 0..n_layer as u32 {
            (0..800).for_each(|_| counts.add(layer, &[2 * rng.below(n_expert / 2) as u32 + at % 2]));
        }
        input.push(at.to_string(), None, &counts, &counts);
    }
    let params = CalibrationParams { max_layers: Some(1), ..CalibrationParams::new(2) };
    let (mut calibration, _) = fit(&input, &params).expect("fits");
    // Every layer, whatever the mask would be.
    calibration.layers = shape.usable();
    let counts = counts(&shape, &mut rng);
    each(|| drop(std::hint::black_box(calibration.signature(&counts))))
}

fn ledger(n_blocks: usize) -> f64 {
    let mut rng = Rng::new(4);
    let mut ledger = Ledger::new(BLOCK, BlockName::root(["growth"]), n_blocks / 100 + 1);
    let mut prompt = Vec::new();
    for sequence in 0..n_blocks / 100 {
        prompt = (0..100 * BLOCK).map(|_| i32::try_from(rng.below(50_000)).expect("below 50,000")).collect();
        ledger.append(sequence, &prompt);
    }
    each(|| drop(std::hint::black_box(ledger.match_prefix(&prompt))))
}

fn fitting(n_requests: usize) -> f64 {
    let trace = trace(n_requests, 8, 64);
    let input = CalibrationInput::of_trace(&trace, 0..n_requests);
    once(|| fit(&input, &CalibrationParams::new(8)).expect("fits"))
}

fn placing(n_expert: usize) -> f64 {
    let mut rng = Rng::new(5);
    let words = n_expert.div_ceil(64);
    let keep = if n_expert >= 64 { u64::MAX } else { (1 << n_expert) - 1 };
    let batches: Vec<Vec<u64>> =
        (0..32).map(|_| (0..words).map(|_| rng.next_u64() & rng.next_u64() & keep).collect()).collect();
    let views: Vec<&[u64]> = batches.iter().map(Vec::as_slice).collect();
    once(|| place_layer(&views, n_expert, 8, 1))
}

/// Requests of four domains, each with a quarter of the experts to itself.
fn trace(n_requests: usize, n_layer: usize, n_expert: usize) -> Trace {
    let shape = shape(n_layer, n_expert);
    let (n_prompt, n_steps, n_block) = (64, 32, 32);
    let mut rng = Rng::new(6);
    let request = |at: usize| {
        let mut pick = || (at % 4 * (n_expert / 4) + rng.below(n_expert / 4)) as u16;
        let width = n_layer * n_expert;
        let mut blocks = vec![0u8; 2 * width];
        for token in 0..n_prompt {
            for pick in (0..n_layer * 4).map(|i| (i / 4, pick())) {
                blocks[token / n_block * width + pick.0 * n_expert + usize::from(pick.1)] += 1;
            }
        }
        TraceRequest {
            id: at.to_string(),
            domain: Some((at % 4).to_string()),
            n_prompt: n_prompt as u32,
            blocks,
            picks: (0..n_steps * n_layer * 4).map(|_| pick()).collect(),
            gates: None,
        }
    };
    let mut request = request;
    let requests = (0..n_requests).map(&mut request).collect();
    Trace { header: TraceHeader { shape, fingerprint: "planted".into(), n_block: n_block as u32 }, requests }
}

fn simulation(n_requests: usize, n_workers: usize, n_layer: usize, n_expert: usize) -> f64 {
    let trace = trace(256, n_layer, n_expert);
    let set = ReplaySet::new(&trace);
    let served: Vec<usize> = (0..256).collect();
    let cost = DeviceCost {
        source: String::new(),
        decode: DecodeCost { fixed: 1.0, per_expert: 0.01, per_token: 0.05, per_kv_token: 0.0 },
        prefill: PrefillCost { fixed: 1.0, per_token: 0.05, per_kv_token: 0.0 },
        handoff: HandoffCost::default(),
    };
    let pool = Pool {
        trace: &trace,
        set: &set,
        served: &served,
        cost: &cost,
        calibration: None,
        ranks: &[],
        clairvoyant: false,
    };
    let scenario = Scenario {
        requests: n_requests as u64,
        decode: vec![DecodeGroup { workers: n_workers as u32, slots: 16, speed: 1.0 }],
        ..Scenario::default()
    };
    let policy = PolicyKind::LeastLoaded.build(&PolicyParams::new(n_workers)).expect("valid");
    once(|| simulate(pool, &scenario, policy, None).expect("runs"))
}
