//! How long calibration takes: a signature online, and the offline fit with its parts, from the size the paper reports to
//! a hundred times that.

use std::sync::LazyLock;

use divan::{Bencher, black_box};
use eldr::{
    calibrate::{
        Calibration, CalibrationInput, CalibrationParams, KmeansParams, PairProducts, TauOrigin, balanced_assignment,
        balanced_kmeans, choose_layers, fit, pair_products,
    },
    rng::Rng,
    signature::ExpertCounts,
    types::MoeShape,
};
use ndarray::{Array2, s};

const N_DOMAINS: usize = 8;

fn main() {
    divan::main();
}

/// Requests of eight domains in a model of `n_layers` usable layers and 128 experts, top 8. A domain prefers its own
/// quarter of the experts, more in deeper layers; `n_tokens` of prompt and of output each.
fn requests(n_requests: usize, n_layers: u32, n_tokens: u32) -> CalibrationInput {
    let n_layer = n_layers + 1;
    let layers: Vec<u32> = (0..n_layer).collect();
    let shape = MoeShape { layers: layers.clone(), n_layer, n_expert: 128, n_expert_used: 8 };
    let mut rng = Rng::new(1);
    let homes: Vec<u32> = (0..N_DOMAINS as u32 * n_layer).map(|_| rng.below(128) as u32).collect();
    let mut input = CalibrationInput::new(shape.clone(), "bench");
    for i in 0..n_requests {
        let domain = i % N_DOMAINS;
        let mut counts = [ExpertCounts::for_shape(&shape), ExpertCounts::new(&layers, 128)];
        for counts in &mut counts {
            counts.add_tokens(n_tokens);
            for layer in counts.layers().to_vec() {
                let home = homes[domain * n_layer as usize + layer as usize];
                let picks: Vec<u32> = (0..n_tokens * 8)
                    .map(|_| {
                        let at_home = rng.below(2 * n_layer as usize) < layer as usize;
                        if at_home { (home + rng.below(32) as u32) % 128 } else { rng.below(128) as u32 }
                    })
                    .collect();
                counts.add(layer, &picks);
            }
        }
        let [prefill, decode] = counts;
        input.push(i.to_string(), Some(domain.to_string()), &prefill, &decode);
    }
    input
}

static REQUESTS: LazyLock<CalibrationInput> = LazyLock::new(|| requests(2048, 48, 64));

fn random_points(n: usize, width: usize) -> Array2<f32> {
    let mut rng = Rng::new(2);
    let mut points = Array2::from_shape_fn((n, width), |_| rng.uniform() as f32);
    for mut point in points.rows_mut() {
        let length = point.dot(&point).sqrt();
        point /= length;
    }
    points
}

/// A prompt's signature: 20 masked layers of 128 experts, 24 workers.
#[divan::bench]
fn signature(bencher: Bencher) {
    let shape = MoeShape { layers: (0..48).collect(), n_layer: 48, n_expert: 128, n_expert_used: 8 };
    let mut rng = Rng::new(3);
    let mut counts = ExpertCounts::for_shape(&shape);
    for layer in shape.usable() {
        counts.add(layer, &(0..4096).map(|_| rng.below(128) as u32).collect::<Vec<_>>());
    }
    let calibration = Calibration {
        idf: Array2::from_shape_fn((48, 128), |_| rng.uniform() as f32),
        layers: (0..40).step_by(2).collect(),
        centroids: random_points(24, 20 * 128),
        shape,
        fingerprint: "bench".into(),
        n_requests: 0,
        n_tokens: 0,
        rho: 0.0,
        tau: 0.1,
        cost: 0.0,
        seed: 1,
        load_model: None,
        tau_origin: TauOrigin::Default,
        capacity: None,
        verdict: None,
    };
    bencher.bench(|| black_box(&calibration).signature(black_box(&counts)));
}

/// The whole fit for 16 workers: requests, usable layers of 128 experts, searches of the clustering.
///
/// Beyond 2,048 requests the mask compares a sample, and what grows is the clustering: with the requests a step, and with
/// the steps it takes.
#[divan::bench(args = [(1_000, 48, 8), (10_000, 48, 8), (100_000, 6, 1)], sample_count = 1, sample_size = 1)]
fn fit_requests_layers_searches(bencher: Bencher, (n, n_layers, n_restarts): (usize, u32, u32)) {
    let input = requests(n, n_layers, 16);
    let params = CalibrationParams { n_restarts, ..CalibrationParams::new(16) };
    bencher.bench(|| fit(black_box(&input), &params).expect("a good input"));
}

/// Products of all pairs in one layer, as the fit does for each.
#[divan::bench(sample_count = 10, sample_size = 1)]
fn pair_products_1000x128(bencher: Bencher) {
    let layer = counts(20, 1000);
    bencher.bench(|| pair_products(black_box(&layer)));
}

/// Counts of the first `n` requests in one layer.
fn counts(layer: usize, n: usize) -> Array2<f64> {
    REQUESTS.prefill_layer(layer).slice(s![..n, ..]).mapv(f64::from)
}

/// The greedy mask over 48 layers and all pairs of requests: four times the pairs, and the time, for twice the requests.
/// 2,048 requests are the most it compares, so this is also its cost in a fit of 10,000 or 100,000.
#[divan::bench(args = [250, 500, 1000, 2048], sample_count = 3, sample_size = 1)]
fn mask_48(bencher: Bencher, n: usize) {
    let layers: Vec<PairProducts> = (0..48).map(|layer| pair_products(&counts(layer, n))).collect();
    let decode = REQUESTS.decode();
    let decode = decode.slice(s![..n, .., ..]).mapv(f64::from);
    let target = pair_products(&decode.to_shape((n, 49 * 128)).expect("contiguous").to_owned());
    bencher.bench(|| choose_layers(black_box(&layers), black_box(&target), usize::MAX));
}

/// Balanced clusters of 1,000 signatures of 20 x 128, 16 workers.
#[divan::bench(sample_count = 3, sample_size = 1)]
fn kmeans_1000x16(bencher: Bencher) {
    let points = random_points(1000, 20 * 128);
    let params = KmeansParams { k: 16, seed: 1, n_restarts: 8, max_iterations: 50 };
    bencher.bench(|| balanced_kmeans(black_box(&points), &params));
}

/// One balanced assignment.
#[divan::bench(args = [(1_000, 16), (10_000, 32), (100_000, 64)], sample_count = 3, sample_size = 1)]
fn assignment(bencher: Bencher, (n, k): (usize, usize)) {
    let mut rng = Rng::new(4);
    // Columns differ in popularity, so that most points can not have their nearest.
    let cost = Array2::from_shape_fn((n, k), |(_, column)| {
        i64::from(rng.below(1 << 30) as u32) + (i64::from(column as u32) << 24)
    });
    bencher.bench(|| balanced_assignment(black_box(&cost)));
}
