//! What one routing decision costs: 24 workers, signatures of 20 layers x 128 experts. The target is 10 us; for the
//! marginal cost, which looks at 48 layers x 128 experts of every worker, 20 us. No decision allocates.
//!
//! Workers' loads change between decisions, as they do in an engine, so that branches are not learnt by heart.

use std::sync::Arc;

use divan::{AllocProfiler, Bencher};
use eldr::{
    rng::Rng,
    route::{PolicyKind, PolicyParams, RoutePolicy, RouteRequest, WorkerView},
    signature::{ExpertCounts, Signature},
    types::{MoeShape, RequestId, WorkerId},
};
use ndarray::Array2;

#[global_allocator]
static ALLOC: AllocProfiler = AllocProfiler::system();

const N_WORKERS: usize = 24;
const DIM: usize = 20 * 128;
/// Requests and load patterns that take turns; more than fits a branch predictor's memory, less than fills a cache.
const N_CASES: usize = 32;
const N_LAYER: u32 = 48;
const N_EXPERT: u32 = 128;
const N_RESIDENT: u64 = 16;

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

fn params(rng: &mut Rng) -> PolicyParams {
    let flat: Vec<f32> = (0..N_WORKERS).flat_map(|_| signature(rng).as_slice().to_vec()).collect();
    let centroids = Array2::from_shape_vec((N_WORKERS, DIM), flat).expect("K rows");
    PolicyParams {
        centroids: Some(Arc::new(centroids)),
        domains: ["code", "law", "math", "medical"].map(String::from).to_vec(),
        ..PolicyParams::new(N_WORKERS)
    }
}

#[divan::bench(args = PolicyKind::ALL, sample_count = 500, sample_size = 100)]
fn decision(bencher: Bencher<'_, '_>, kind: PolicyKind) {
    let mut rng = Rng::new(1);
    let mut policy = kind.build(&params(&mut rng)).expect("valid parameters");
    let signatures: Vec<_> = (0..N_CASES).map(|_| signature(&mut rng)).collect();
    let loads: Vec<_> = (0..N_CASES).map(|_| workers(&mut rng)).collect();
    let mut turn = 0;
    bencher.bench_local(|| {
        turn = (turn + 1) % N_CASES;
        let request =
            RouteRequest { signature: Some(&signatures[turn]), domain: Some("math"), ..RouteRequest::default() };
        policy.select(divan::black_box(&request), divan::black_box(&loads[turn]))
    });
}

/// The marginal cost with [`N_RESIDENT`] requests on every worker, of a model of 48 layers x 128 experts.
struct Marginal {
    policy: Box<dyn RoutePolicy>,
    counts: Vec<ExpertCounts>,
    signatures: Vec<Signature>,
    loads: Vec<Vec<WorkerView>>,
}

impl Marginal {
    fn new() -> Self {
        let mut rng = Rng::new(1);
        let shape = MoeShape { layers: (0..N_LAYER).collect(), n_layer: N_LAYER, n_expert: N_EXPERT, n_expert_used: 8 };
        let params = PolicyParams { shape: Some(shape.clone()), ..params(&mut rng) };
        let mut policy = PolicyKind::MarginalCost.build(&params).expect("valid parameters");
        let mut prompt = || {
            let mut counts = ExpertCounts::for_shape(&shape);
            counts.add_tokens(200);
            for layer in shape.usable() {
                let picks: Vec<u32> = (0..1600).map(|_| rng.below(N_EXPERT as usize) as u32).collect();
                counts.add(layer, &picks);
            }
            counts
        };
        let counts: Vec<_> = (0..N_CASES).map(|_| prompt()).collect();
        for id in 0..N_RESIDENT * N_WORKERS as u64 {
            let counts = Some(&counts[id as usize % N_CASES]);
            let request = RouteRequest { id: RequestId(id), counts, n_tokens: 200, ..RouteRequest::default() };
            policy.placed(&request, WorkerId(id as u32 % N_WORKERS as u32));
        }
        let signatures = (0..N_CASES).map(|_| signature(&mut rng)).collect();
        let loads = (0..N_CASES).map(|_| workers(&mut rng)).collect();
        Self { policy, counts, signatures, loads }
    }

    fn request(&self, turn: usize, id: u64) -> RouteRequest<'_> {
        RouteRequest {
            id: RequestId(id),
            signature: Some(&self.signatures[turn]),
            domain: None,
            counts: Some(&self.counts[turn]),
            n_tokens: 200,
        }
    }
}

#[divan::bench(sample_count = 500, sample_size = 100)]
fn marginal_cost(bencher: Bencher<'_, '_>) {
    let mut marginal = Marginal::new();
    let mut policy = std::mem::replace(&mut marginal.policy, Box::new(eldr::route::LeastLoaded));
    let mut turn = 0;
    bencher.bench_local(|| {
        turn = (turn + 1) % N_CASES;
        policy.select(divan::black_box(&marginal.request(turn, 0)), divan::black_box(&marginal.loads[turn]))
    });
}

/// What the policy does around a decision: the request joins a worker and leaves it.
#[divan::bench(sample_count = 100, sample_size = 100)]
fn marginal_cost_books(bencher: Bencher<'_, '_>) {
    let mut marginal = Marginal::new();
    let mut policy = std::mem::replace(&mut marginal.policy, Box::new(eldr::route::LeastLoaded));
    let mut id = 1 << 32;
    bencher.bench_local(|| {
        id += 1;
        let worker = WorkerId((id % N_WORKERS as u64) as u32);
        policy.placed(&marginal.request(id as usize % N_CASES, id), worker);
        policy.left(RequestId(id), worker);
    });
}
