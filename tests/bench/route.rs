//! What one routing decision costs: 24 workers, signatures of 20 layers x 128 experts. The target is 10 us.
//!
//! Workers' loads change between decisions, as they do in an engine, so that branches are not learnt by heart.

use std::sync::Arc;

use divan::Bencher;
use eldr::{
    rng::Rng,
    route::{PolicyKind, PolicyParams, RouteRequest, WorkerView},
    signature::Signature,
    types::WorkerId,
};
use ndarray::Array2;

const N_WORKERS: usize = 24;
const DIM: usize = 20 * 128;
/// Requests and load patterns that take turns; more than fits a branch predictor's memory, less than fills a cache.
const N_CASES: usize = 32;

fn main() {
    divan::main();
}

fn signature(rng: &mut Rng) -> Signature {
    Signature::normalised((0..DIM).map(|_| rng.uniform() as f32).collect()).expect("not all zero")
}

fn workers(rng: &mut Rng) -> Vec<WorkerView> {
    (0..N_WORKERS as u32)
        .map(|id| WorkerView { id: WorkerId(id), n_slots: 64, n_inflight: rng.below(60) as u32, healthy: true })
        .collect()
}

#[divan::bench(args = PolicyKind::ALL, sample_count = 500, sample_size = 100)]
fn decision(bencher: Bencher<'_, '_>, kind: PolicyKind) {
    let mut rng = Rng::new(1);
    let flat: Vec<f32> = (0..N_WORKERS).flat_map(|_| signature(&mut rng).as_slice().to_vec()).collect();
    let centroids = Array2::from_shape_vec((N_WORKERS, DIM), flat).expect("K rows");
    let params = PolicyParams {
        centroids: Some(Arc::new(centroids)),
        domains: ["code", "law", "math", "medical"].map(String::from).to_vec(),
        ..PolicyParams::new(N_WORKERS)
    };
    let mut policy = kind.build(&params).expect("valid parameters");
    let signatures: Vec<_> = (0..N_CASES).map(|_| signature(&mut rng)).collect();
    let loads: Vec<_> = (0..N_CASES).map(|_| workers(&mut rng)).collect();
    let mut turn = 0;
    bencher.bench_local(|| {
        turn = (turn + 1) % N_CASES;
        let request = RouteRequest { signature: Some(&signatures[turn]), domain: Some("math") };
        policy.select(divan::black_box(&request), divan::black_box(&loads[turn]))
    });
}
