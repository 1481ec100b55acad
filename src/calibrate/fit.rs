//! The whole fit: weights, mask, signatures, clusters.
//!
//! Never reads requests from anywhere but its input.

use ndarray::{Array2, Axis, s};
use rayon::prelude::*;

use crate::{
    calibrate::{
        CalibrateError, Calibration, CalibrationInput, CalibrationReport, KmeansParams, Shares, TauOrigin,
        choose_layers,
        idf::{weigh, weights},
        kmeans::unbalanced_kmeans,
        mask::{NoSpread, rho_of_all},
        products::{compared, decode_products, layer_products},
        report::{clusters, pearson},
        weighted_kmeans,
    },
    signature::Signature,
};

/// What to fit. Everything but the number of workers has a default.
#[derive(Debug, Clone, PartialEq)]
pub struct CalibrationParams {
    /// Decode workers, one centroid each (K).
    pub n_workers: usize,
    /// How much each decode worker can hold, relative to the others: a worker with twice the slots gets twice the share
    /// of the requests. Cluster i belongs to worker i and has its size. Equal shares without.
    pub capacity: Option<Vec<u32>>,
    /// Lets clusters have any sizes, whatever the capacity: an ablation, which overloads the workers of large clusters.
    pub unbalanced: bool,
    /// Seed of the clustering, and of the sample of requests compared if there are too many.
    pub seed: u64,
    /// Width of the locality band to store in the calibration.
    pub tau: f32,
    /// Where `tau` comes from, to store beside it.
    pub tau_origin: TauOrigin,
    /// Searches of the clustering, 1 to 10,000.
    pub n_restarts: u32,
    /// Assignment steps a search takes at most, at least 1.
    pub max_iterations: u32,
    /// Layers in the mask at most, at least 1.
    pub max_layers: Option<usize>,
}

/// More searches than this take hours and find nothing better.
const MAX_RESTARTS: u32 = 10_000;

impl CalibrationParams {
    /// The defaults for `n_workers` decode workers.
    pub fn new(n_workers: usize) -> Self {
        Self {
            n_workers,
            capacity: None,
            unbalanced: false,
            seed: 1,
            tau: 0.1,
            tau_origin: TauOrigin::Default,
            n_restarts: 8,
            max_iterations: 50,
            max_layers: None,
        }
    }

    /// Whether a fit with these can work, as far as that does not depend on the requests.
    pub fn check(&self) -> Result<(), CalibrateError> {
        let n_workers = self.n_workers;
        if n_workers == 0 {
            return Err(CalibrateError::NoWorkers);
        }
        if let Some(capacity) = self.capacity.as_ref().filter(|capacity| capacity.len() != n_workers) {
            return Err(CalibrateError::Capacities { n_capacities: capacity.len(), n_workers });
        }
        if !(0.0..=2.0).contains(&self.tau) {
            return Err(CalibrateError::Tau(self.tau));
        }
        if !(1..=MAX_RESTARTS).contains(&self.n_restarts) {
            return Err(CalibrateError::Restarts { n_restarts: self.n_restarts, limit: MAX_RESTARTS });
        }
        if self.max_iterations == 0 {
            return Err(CalibrateError::NoIterations);
        }
        if self.max_layers == Some(0) {
            return Err(CalibrateError::NoLayers);
        }
        Ok(())
    }
}

/// Fits a calibration to recorded requests: weights, mask, clusters.
///
/// The same input and parameters give the same calibration, bit for bit, on any number of threads.
///
/// The mask compares all pairs of requests: L^2 * N^2 / 4 steps and 4 bytes a pair and layer, 100 MB for 1,000 requests
/// and 48 layers. Therefore it compares at most [`MAX_COMPARED`](crate::calibrate::MAX_COMPARED) requests, a sample drawn
/// by the seed if there are more (the report says how many). Weights and clusters are always those of all requests, which
/// takes time and memory in proportion to their number.
pub fn fit(
    input: &CalibrationInput,
    params: &CalibrationParams,
) -> Result<(Calibration, CalibrationReport), CalibrateError> {
    check(input, params)?;
    let n_requests = input.n_requests();
    let weights = weights(input);
    let which = compared(n_requests, params.seed);
    let prefill = input.prefill();
    let weighted = |r: usize, l: usize, e: usize| f64::from(prefill[[r, l, e]]) * f64::from(weights[l][e]);
    let (layers, target) = rayon::join(|| layer_products(input, &which, weighted), || decode_products(input, &which));
    let max_layers = params.max_layers.unwrap_or(usize::MAX);
    let choice = choose_layers(&layers, &target, max_layers).map_err(|side| CalibrateError::NoSpread {
        n_requests: which.len(),
        phase: match side {
            NoSpread::Layers => "prefill",
            NoSpread::Target => "decode",
        },
    })?;
    let kept = choice.kept();
    let rho_all_layers = rho_of_all(&layers, &target);
    drop((layers, target));

    let signatures: Vec<Option<Signature>> =
        (0..n_requests).into_par_iter().map(|request| signature(input, &weights, &kept, request)).collect();
    let n_signatures = signatures.iter().flatten().count();
    if n_signatures < params.n_workers {
        return Err(CalibrateError::TooFewSignatures { n_signatures, n_requests, n_workers: params.n_workers });
    }
    let shares = shares(params, n_signatures)?;
    let flat = signatures.iter().flatten().flat_map(Signature::as_slice).copied().collect();
    let width = kept.len() * input.shape().n_expert as usize;
    let points = Array2::from_shape_vec((n_signatures, width), flat).expect("signatures of one mask");
    let search = KmeansParams {
        k: params.n_workers,
        seed: params.seed,
        n_restarts: params.n_restarts,
        max_iterations: params.max_iterations,
    };
    let clustering = if params.unbalanced {
        unbalanced_kmeans(&points, &search)
    } else {
        weighted_kmeans(&points, &shares, &search)
    };

    let mut labels = clustering.labels.iter().copied();
    let workers: Vec<Option<u32>> = signatures.iter().map(|s| s.as_ref().and_then(|_| labels.next())).collect();
    let (clusters, purity) = clusters(params.n_workers, &workers, input.labels());
    let to_layer = |&position: &usize| input.usable()[position];
    let report = CalibrationReport {
        n_requests,
        n_tokens: input.n_tokens().iter().map(|&n| u64::from(n)).sum(),
        n_compared: which.len(),
        n_without_signature: n_requests - n_signatures,
        layer_order: choice.order.iter().map(to_layer).collect(),
        rho_curve: choice.curve.clone(),
        layers: kept.iter().map(to_layer).collect(),
        rho: choice.rho(),
        rho_all_layers,
        prefill_decode_correlation: prefill_decode_correlation(input),
        capacity: params.capacity.clone(),
        cost: clustering.cost,
        n_iterations: clustering.n_iterations,
        purity,
        clusters,
        workers,
    };
    let calibration = Calibration {
        shape: input.shape().clone(),
        fingerprint: input.fingerprint().to_owned(),
        idf: idf_of_all_layers(input, &weights),
        layers: report.layers.clone(),
        centroids: clustering.centroids,
        n_requests: n_requests as u64,
        n_tokens: report.n_tokens,
        rho: report.rho,
        tau: params.tau,
        tau_origin: params.tau_origin,
        capacity: params.capacity.clone(),
        cost: report.cost,
        seed: params.seed,
        load_model: None,
        verdict: None,
    };
    Ok((calibration, report))
}

fn check(input: &CalibrationInput, params: &CalibrationParams) -> Result<(), CalibrateError> {
    let (n_requests, n_workers) = (input.n_requests(), params.n_workers);
    if input.usable().is_empty() {
        return Err(CalibrateError::NoUsableLayer);
    }
    params.check()?;
    if n_requests == 0 {
        return Err(CalibrateError::NoRequests);
    }
    if n_requests < n_workers {
        return Err(CalibrateError::TooFewRequests { n_requests, n_workers });
    }
    for (phase, counts) in [("prefill", input.prefill()), ("decode", input.decode())] {
        for (id, counts) in input.ids().iter().zip(counts.outer_iter()) {
            if counts.iter().all(|&c| c == 0) {
                return Err(CalibrateError::NoTokens { id: id.clone(), phase });
            }
        }
    }
    Ok(())
}

/// Weights of the clusters of `n` signatures. Each must get one at least.
fn shares(params: &CalibrationParams, n: usize) -> Result<Vec<u32>, CalibrateError> {
    let weights = params.capacity.clone().unwrap_or_else(|| vec![1; params.n_workers]);
    let all: u64 = weights.iter().map(|&w| u64::from(w)).sum();
    let none = |worker: usize| CalibrateError::NoShare { worker, capacity: weights[worker], all, n_requests: n };
    if all == 0 {
        return Err(none(0));
    }
    match Shares::new(n, &weights).floor.iter().position(|&floor| floor == 0) {
        Some(worker) => Err(none(worker)),
        None => Ok(weights),
    }
}

/// As [`Calibration::signature`], from recorded counts.
fn signature(input: &CalibrationInput, weights: &[Vec<f32>], kept: &[usize], request: usize) -> Option<Signature> {
    let counts = input.prefill();
    let mut weighted = Vec::with_capacity(kept.len() * counts.len_of(Axis(2)));
    for &position in kept {
        let row = counts.slice(s![request, position, ..]);
        weigh(row.to_slice().expect("rows are contiguous"), &weights[position], &mut weighted);
    }
    Signature::normalised(weighted)
}

fn idf_of_all_layers(input: &CalibrationInput, weights: &[Vec<f32>]) -> Array2<f32> {
    let mut all = Array2::zeros((input.shape().n_layer_moe(), input.shape().n_expert as usize));
    for (&layer, weights) in input.usable().iter().zip(weights) {
        all.row_mut(layer as usize).iter_mut().zip(weights).for_each(|(cell, &w)| *cell = w);
    }
    all
}

/// Over the usable layers, whose prefill counts are whole.
fn prefill_decode_correlation(input: &CalibrationInput) -> Option<f64> {
    let positions: Vec<usize> = input.usable().iter().map(|&layer| layer as usize).collect();
    let of_requests: Vec<f64> = input
        .prefill()
        .outer_iter()
        .zip(input.decode().outer_iter())
        .filter_map(|(prefill, decode)| pearson(prefill.iter().zip(decode.select(Axis(0), &positions).iter())))
        .collect();
    (!of_requests.is_empty()).then(|| of_requests.iter().sum::<f64>() / of_requests.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        calibrate::{encode, planted::Planted},
        signature::ExpertCounts,
        types::MoeShape,
    };

    fn ok(input: &CalibrationInput, n_workers: usize) -> (Calibration, CalibrationReport) {
        fit(input, &CalibrationParams::new(n_workers)).expect("a good input")
    }

    #[test]
    fn disjoint_domains_become_the_clusters() {
        let input = Planted { n_domains: 4, noise: 0.0, ..Planted::default() }.input();
        let (calibration, report) = ok(&input, 4);
        assert_eq!(report.purity, Some(1.0));
        assert!(report.clusters.iter().all(|c| c.size == 12 && c.labels.len() == 1), "{:?}", report.clusters);
        // The last layer is not usable; two prompts of one domain differ by chance alone.
        assert!(!report.layers.contains(&5));
        assert!(report.rho > 0.7 && report.prefill_decode_correlation.expect("spread") > 0.7, "{report:?}");
        assert!(calibration.idf.row(5).iter().all(|&w| w == 0.0));
        // Every recorded request is routed to its own worker.
        let counts = Planted { n_domains: 4, noise: 0.0, ..Planted::default() }.counts();
        for ((prefill, _), worker) in counts.iter().zip(&report.workers) {
            let signature = calibration.signature(prefill).expect("a domain's experts weigh something");
            let similarity = |w: usize| signature.cosine(calibration.centroid(w));
            let best = (0..4).reduce(|a, b| if similarity(b) > similarity(a) { b } else { a });
            assert_eq!(best.map(|w| w as u32), *worker);
        }
    }

    #[test]
    fn the_one_informative_layer_is_the_mask() {
        for informative in 0..5 {
            // Enough noise that one layer does not tell domains apart perfectly; then the others only blur it.
            let input =
                Planted { informative: vec![informative], n_expert: 128, noise: 0.75, ..Planted::default() }.input();
            let (calibration, report) = ok(&input, 4);
            assert_eq!(report.layer_order[0], informative);
            assert_eq!(calibration.layers, [informative], "{:?}", report.rho_curve);
            assert!(report.rho > report.rho_all_layers.expect("spread"));
        }
    }

    #[test]
    fn noise_gives_a_low_rho_and_still_balanced_clusters() {
        let planted = Planted { informative: vec![], n_requests: 50, ..Planted::default() };
        let (_, noise) = ok(&planted.input(), 8);
        let (_, signal) = ok(&Planted::default().input(), 8);
        assert!(noise.rho < 0.2 && signal.rho > 0.5, "{} {}", noise.rho, signal.rho);
        assert!(noise.clusters.iter().all(|c| c.size == 6 || c.size == 7), "{:?}", noise.clusters);
    }

    #[test]
    fn renaming_experts_renames_weights_and_centroids() {
        let planted = Planted::default();
        let e = planted.n_expert;
        let rename = |expert: u32| (expert * 5 + 3) % e;
        let (before, first) = ok(&planted.input(), 3);
        let (after, second) = ok(&planted.input_with(rename), 3);
        assert_eq!((&first.layer_order, &first.workers), (&second.layer_order, &second.workers));
        for (a, b) in first.rho_curve.iter().zip(&second.rho_curve) {
            assert!((a - b).abs() < 1e-6);
        }
        let n = before.layers.len();
        for expert in 0..e {
            let renamed = rename(expert) as usize;
            for layer in 0..6 {
                assert_eq!(before.idf[[layer, expert as usize]].to_bits(), after.idf[[layer, renamed]].to_bits());
            }
            for (row, at) in (0..3).flat_map(|row| (0..n).map(move |at| (row, at * e as usize))) {
                let (a, b) = (before.centroids[[row, at + expert as usize]], after.centroids[[row, at + renamed]]);
                assert!((a - b).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn the_same_bytes_on_any_number_of_threads() {
        let input = Planted { n_requests: 90, ..Planted::default() }.input();
        let on = |n_threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().expect("threads");
            pool.install(|| ok(&input, 7))
        };
        let (one, report) = on(1);
        for n_threads in [2, 3, 5] {
            let (other, other_report) = on(n_threads);
            assert_eq!(encode(&one), encode(&other));
            assert_eq!(report, other_report);
        }
    }

    #[test]
    fn a_request_that_weighs_nothing_is_left_out_of_the_clusters() {
        let planted = Planted::default();
        let shape = planted.input().shape().clone();
        // Experts every request picks weigh nothing: give all the same one, and one request nothing else.
        let mut common = CalibrationInput::new(shape.clone(), "planted");
        for (i, (mut prefill, decode)) in planted.counts().into_iter().enumerate() {
            if i == 7 {
                prefill = ExpertCounts::for_shape(&shape);
                prefill.add_tokens(1);
            }
            for layer in shape.usable() {
                prefill.add(layer, &[0]);
            }
            common.push(format!("{i}"), None, &prefill, &decode);
        }
        let (_, report) = ok(&common, 4);
        assert_eq!((report.n_without_signature, report.workers[7], report.purity), (1, None, None));
        assert_eq!(report.workers.iter().flatten().count(), 47);
    }

    #[test]
    fn a_worker_with_twice_the_capacity_gets_twice_the_share() {
        // Domains 0 to 3 have 12 requests each; the second worker can take two of them.
        let input = Planted { noise: 0.0, ..Planted::default() }.input();
        let params = CalibrationParams { capacity: Some(vec![1, 2, 1]), ..CalibrationParams::new(3) };
        let (calibration, report) = fit(&input, &params).expect("a good input");
        assert_eq!(report.clusters.iter().map(|c| c.size).collect::<Vec<_>>(), [12, 24, 12]);
        assert!(report.clusters.iter().zip([1, 2, 1]).all(|(c, n)| c.labels.len() == n), "{:?}", report.clusters);
        assert_eq!((&report.capacity, &calibration.capacity), (&params.capacity, &params.capacity));
        let equal = CalibrationParams { capacity: Some(vec![5; 4]), ..CalibrationParams::new(4) };
        let (of_equal, _) = fit(&input, &equal).expect("a good input");
        assert_eq!(Calibration { capacity: None, ..of_equal }, ok(&input, 4).0);
    }

    #[test]
    fn max_layers_bounds_the_mask() {
        let input = Planted::default().input();
        let params = CalibrationParams { max_layers: Some(2), ..CalibrationParams::new(4) };
        let (calibration, report) = fit(&input, &params).expect("a good input");
        assert!(calibration.layers.len() <= 2 && report.rho_curve.len() == 2);
        assert_eq!(report.rho_all_layers, ok(&input, 4).1.rho_curve.last().copied());
    }

    #[test]
    fn bad_input_is_refused_in_words() {
        let good = Planted::default().input();
        let error = |input: &CalibrationInput, params: CalibrationParams| {
            fit(input, &params).expect_err("a bad input").to_string()
        };
        let params = CalibrationParams::new;
        let empty = CalibrationInput::new(good.shape().clone(), "planted");
        assert!(error(&empty, params(4)).contains("no calibration requests"));
        assert!(error(&good, params(0)).contains("zero decode workers"));
        assert!(error(&good, params(49)).contains("48 calibration requests are too few for 49"));
        for tau in [-0.1, 2.1, f32::NAN] {
            assert!(error(&good, CalibrationParams { tau, ..params(4) }).contains("between 0 and 2"));
        }

        // Symptom: 4294967295 restarts aborted on a 446 GB allocation; 0 restarts, iterations or layers became 1.
        for n_restarts in [0, 10_001, u32::MAX] {
            let text = error(&good, CalibrationParams { n_restarts, ..params(4) });
            assert!(text.contains(&n_restarts.to_string()) && text.contains("between 1 and 10000"), "{text}");
        }
        assert!(error(&good, CalibrationParams { max_iterations: 0, ..params(4) }).contains("no assignment step"));
        assert!(error(&good, CalibrationParams { max_layers: Some(0), ..params(4) }).contains("no layer"));

        let with = |capacity: &[u32]| CalibrationParams { capacity: Some(capacity.to_vec()), ..params(3) };
        assert!(error(&good, with(&[2, 1])).contains("2 capacities for 3 decode workers"));
        let text = error(&good, with(&[2, 0, 1]));
        assert!(text.contains("decode worker 1 with capacity 0 of 3 would get none of 48"), "{text}");
        assert!(error(&good, with(&[0, 0, 0])).contains("decode worker 0 with capacity 0 of 0"));
        assert!(error(&good, with(&[1, 1, 1000])).contains("decode worker 0 with capacity 1 of 1002"));

        let counts = Planted::default().counts();
        let none = ExpertCounts::for_shape(good.shape());
        let mut silent = good.clone();
        silent.push("silent", None, &none, &counts[0].1);
        assert!(error(&silent, params(4)).contains("`silent` has no prefill tokens"));
        let mut mute = good.clone();
        mute.push("mute", None, &counts[0].0, &ExpertCounts::new(&[0, 1, 2, 3, 4, 5], good.shape().n_expert));
        assert!(error(&mute, params(4)).contains("`mute` has no decode tokens"));

        let dense = MoeShape { layers: vec![5], ..good.shape().clone() };
        assert!(error(&CalibrationInput::new(dense, "planted"), params(4)).contains("no MoE layer"));

        let mut same = empty.clone();
        for i in 0..6 {
            same.push(format!("{i}"), None, &counts[0].0, &counts[0].1);
        }
        assert!(error(&same, params(2)).contains("rho is undefined"));
        let mut two = empty;
        for (i, (prefill, decode)) in counts.iter().take(2).enumerate() {
            two.push(format!("{i}"), None, prefill, decode);
        }
        assert!(error(&two, params(2)).contains("rho is undefined"));
    }
}
