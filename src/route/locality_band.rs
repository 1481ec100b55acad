//! ELDR's policy: the least loaded of the workers whose centroids are nearly the most similar to the request.
//!
//! Never moves a centroid itself, and never lets load outweigh similarity beyond the band.

use std::sync::Arc;

use ndarray::Array2;

use crate::route::{
    Decision, Reason, RouteBuildError, RouteError, RoutePolicy, RouteRequest, WorkerView, centroids::Centroids,
    least_loaded::LeastLoaded, load,
};

/// Ranks a worker without a centroid behind every cosine.
const NO_CENTROID: f32 = f32::NEG_INFINITY;

/// The band's width.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LocalityBandParams {
    /// A worker whose cosine is at most this far below the best eligible one is in the band (paper, section 4.3: 0.1).
    pub tau: f32,
    /// The band holds at least this many of the most similar eligible workers; 1 is the paper's band.
    pub min_band: u32,
}

impl Default for LocalityBandParams {
    fn default() -> Self {
        Self { tau: 0.1, min_band: 1 }
    }
}

/// Takes the least loaded worker of `{ k : sim_k >= best - tau }`; ties go to the higher cosine, then the lower id.
///
/// `sim_k` is the cosine of the request's signature and centroid k, which belongs to worker k; only eligible workers
/// are compared. A request without a signature goes to the least loaded worker.
///
/// New centroids can be set between two decisions. They may leave a worker out, one that joined lately, say: a row of
/// zeros, or an id past the last row. Such a worker takes part by load alone: it is in every band, behind the others
/// among equal loads, and counts for neither `best` nor `min_band`.
#[derive(Debug, Clone)]
pub struct LocalityBand {
    params: LocalityBandParams,
    centroids: Centroids,
    /// Cosine and position of each eligible worker; kept to spare an allocation a request.
    ranked: Vec<(f32, usize)>,
}

impl LocalityBand {
    /// A policy for `n_workers` decode workers and as many centroids (K rows of N* times E, each of length 1).
    ///
    /// # Errors
    /// Centroids of another number or length, and a `tau` or `min_band` out of range, are refused.
    pub fn new(
        centroids: Arc<Array2<f32>>,
        n_workers: usize,
        params: LocalityBandParams,
    ) -> Result<Self, RouteBuildError> {
        let centroids = Centroids::new(centroids, n_workers)?;
        if !(0.0..=2.0).contains(&params.tau) {
            return Err(RouteBuildError::Tau(params.tau));
        }
        if params.min_band == 0 {
            return Err(RouteBuildError::MinBand);
        }
        Ok(Self { params, centroids, ranked: Vec::with_capacity(n_workers) })
    }

    /// Fills `ranked` with the eligible workers: the most similar first, the lower id first among equals, those without
    /// a centroid last.
    fn rank(&mut self, signature: &[f32], workers: &[WorkerView]) {
        self.ranked.clear();
        for (position, worker) in workers.iter().enumerate().filter(|(_, worker)| worker.eligible()) {
            let similarity = self.centroids.cosine(worker.id, signature).unwrap_or(NO_CENTROID);
            self.ranked.push((similarity, position));
        }
        self.ranked.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    }
}

impl RoutePolicy for LocalityBand {
    fn name(&self) -> &'static str {
        "locality_band"
    }

    fn select(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
        let Some(signature) = request.signature else {
            return Ok(Decision { reason: Reason::NoSignature, ..LeastLoaded.select(request, workers)? });
        };
        load::count_eligible(workers)?;
        self.rank(signature.as_slice(), workers);
        let n_known = self.ranked.partition_point(|&(similarity, _)| similarity > NO_CENTROID);
        let (known, unknown) = self.ranked.split_at(n_known);
        let best = known.first().map(|&(similarity, _)| similarity);
        let edge = best.map_or(f32::INFINITY, |best| best - self.params.tau);
        let within_tau = known.partition_point(|&(similarity, _)| similarity >= edge);
        let near = &known[..within_tau.max(self.params.min_band as usize).min(n_known)];
        // `min_by_key` takes the first of equals, which is the more similar one.
        let chosen = near.iter().chain(unknown).min_by_key(|&&(_, position)| workers[position].n_inflight);
        let &(similarity, position) = chosen.expect("an eligible worker is near or unknown");
        let has_centroid = similarity > NO_CENTROID;
        let reason = if has_centroid { Reason::Band } else { Reason::NoCentroid };
        Ok(Decision {
            similarity: has_centroid.then_some(similarity),
            best_similarity: best,
            ..load::decide(&workers[position], reason, near.len() + unknown.len())
        })
    }

    /// Rows that are neither of length 1 nor all zeros, and rows of another width, are refused: the old ones stay.
    fn set_centroids(&mut self, centroids: &Arc<Array2<f32>>) -> Result<(), RouteBuildError> {
        self.centroids.set(centroids)
    }

    fn replace_centroids(&mut self, centroids: &Arc<Array2<f32>>) -> Result<(), RouteBuildError> {
        self.centroids.replace(centroids)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{rng::Rng, route::centroids::dot, route::load::tests::loads, signature::Signature, types::WorkerId};

    fn unit(values: Vec<f32>) -> Signature {
        Signature::normalised(values).expect("not all zero")
    }

    fn random_unit(rng: &mut Rng, dim: usize) -> Signature {
        unit((0..dim).map(|_| rng.uniform() as f32 + 1e-6).collect())
    }

    fn matrix(rows: &[Signature]) -> Arc<Array2<f32>> {
        let flat: Vec<f32> = rows.iter().flat_map(|row| row.as_slice().iter().copied()).collect();
        Arc::new(Array2::from_shape_vec((rows.len(), flat.len() / rows.len()), flat).expect("rows of one length"))
    }

    fn ask(signature: &Signature) -> RouteRequest<'_> {
        RouteRequest { signature: Some(signature), ..RouteRequest::default() }
    }

    /// Centroids on the axes of a 4-dimensional space, one a worker.
    fn axes(tau: f32, min_band: u32) -> LocalityBand {
        let rows: Vec<_> = (0..4).map(|k| unit((0..4).map(|i| f32::from(u8::from(i == k))).collect())).collect();
        LocalityBand::new(matrix(&rows), 4, LocalityBandParams { tau, min_band }).expect("valid")
    }

    /// The definition, worker by worker: no ranking, no early end.
    fn reference(
        similarities: &[f32],
        workers: &[WorkerView],
        params: LocalityBandParams,
    ) -> Result<(WorkerId, u32), RouteError> {
        let open: Vec<usize> = (0..workers.len()).filter(|&k| workers[k].eligible()).collect();
        if open.is_empty() {
            let lost = workers.iter().all(|worker| !worker.healthy);
            return Err(if lost { RouteError::NoWorker } else { RouteError::AllFull });
        }
        let best = open.iter().map(|&k| similarities[k]).fold(f32::MIN, f32::max);
        let more_similar = |k: usize| {
            open.iter()
                .filter(|&&j| {
                    similarities[j] > similarities[k] || (similarities[j].total_cmp(&similarities[k]).is_eq() && j < k)
                })
                .count()
        };
        let in_band = |k: usize| similarities[k] >= best - params.tau || more_similar(k) < params.min_band as usize;
        let mut chosen: Option<usize> = None;
        let mut band = 0;
        for &k in open.iter().filter(|&&k| in_band(k)) {
            band += 1;
            let better = chosen.is_none_or(|c| {
                workers[k].n_inflight < workers[c].n_inflight
                    || (workers[k].n_inflight == workers[c].n_inflight && similarities[k] > similarities[c])
            });
            if better {
                chosen = Some(k);
            }
        }
        Ok((workers[chosen.expect("the best worker is in the band")].id, band))
    }

    #[test]
    fn takes_the_least_loaded_of_the_band_and_says_why() {
        let mut policy = axes(0.1, 1);
        let signature = unit(vec![0.60, 0.55, 0.0, 0.0]);
        let decision = policy.select(&ask(&signature), &loads(&[5, 4, 0, 0])).expect("room");
        let s = signature.as_slice();
        let want = Decision {
            worker: WorkerId(1),
            reason: Reason::Band,
            similarity: Some(s[1]),
            best_similarity: Some(s[0]),
            band: 2,
            n_inflight: 4,
            marginal: None,
        };
        assert_eq!(decision, want);
        let equal_loads = policy.select(&ask(&signature), &loads(&[4, 4, 0, 0])).expect("room");
        assert_eq!(equal_loads.worker, WorkerId(0));
    }

    #[test]
    fn equal_cosine_and_load_go_to_the_lower_id() {
        let decision = axes(0.1, 1).select(&ask(&unit(vec![0.0, 1.0, 1.0, 0.0])), &loads(&[0, 3, 3, 0])).expect("room");
        assert_eq!((decision.worker, decision.band), (WorkerId(1), 2));
    }

    #[test]
    fn the_band_is_around_the_best_eligible_worker() {
        let mut policy = axes(0.1, 1);
        let signature = unit(vec![1.0, 0.3, 0.28, 0.0]);
        let decision = policy.select(&ask(&signature), &loads(&[16, 9, 8, 0])).expect("room");
        assert_eq!((decision.worker, decision.band), (WorkerId(2), 2));
        assert_eq!(decision.best_similarity, Some(signature.as_slice()[1]));
    }

    #[test]
    fn a_wider_smallest_band_takes_in_the_next_most_similar() {
        let signature = unit(vec![1.0, 0.0, 0.3, 0.1]);
        let workers = loads(&[9, 0, 5, 1]);
        let choose = |min_band| {
            let decision = axes(0.1, min_band).select(&ask(&signature), &workers).expect("room");
            (decision.worker.0, decision.band)
        };
        assert_eq!([1, 2, 3, 4, 9].map(choose), [(0, 1), (2, 2), (3, 3), (1, 4), (1, 4)]);
    }

    #[test]
    fn without_a_signature_load_decides() {
        let decision = axes(0.1, 1).select(&RouteRequest::default(), &loads(&[3, 2, 1, 2])).expect("room");
        assert_eq!((decision.worker, decision.reason, decision.similarity), (WorkerId(2), Reason::NoSignature, None));
    }

    #[test]
    fn rows_of_another_memory_order_mean_the_same() {
        let mut rng = Rng::new(2);
        let rows: Vec<_> = (0..3).map(|_| random_unit(&mut rng, 7)).collect();
        let straight = matrix(&rows);
        let turned = Arc::new(straight.t().as_standard_layout().into_owned().reversed_axes());
        assert!(!turned.is_standard_layout());
        let signature = random_unit(&mut rng, 7);
        let select = |centroids| {
            let params = LocalityBandParams::default();
            LocalityBand::new(centroids, 3, params).expect("valid").select(&ask(&signature), &loads(&[1, 2, 3]))
        };
        assert_eq!(select(straight), select(turned));
    }

    #[test]
    fn what_cannot_work_is_refused() {
        let rows = matrix(&[unit(vec![1.0, 0.0]), unit(vec![1.0, 1.0])]);
        let build = |n_workers, tau, min_band| {
            LocalityBand::new(rows.clone(), n_workers, LocalityBandParams { tau, min_band }).expect_err("bad")
        };
        assert_eq!(build(0, 0.1, 1), RouteBuildError::NoWorkers);
        assert_eq!(build(3, 0.1, 1), RouteBuildError::WorkerCount { n_centroids: 2, n_workers: 3 });
        assert_eq!(build(2, -0.1, 1), RouteBuildError::Tau(-0.1));
        assert!(matches!(build(2, f32::NAN, 1), RouteBuildError::Tau(_)));
        assert_eq!(build(2, 0.1, 0), RouteBuildError::MinBand);
        for bad in [0.0, 2.0, f32::NAN, f32::INFINITY] {
            let rows = Arc::new(Array2::from_shape_vec((1, 2), vec![bad, 0.0]).expect("one row"));
            let error = LocalityBand::new(rows, 1, LocalityBandParams::default()).expect_err("not a unit vector");
            assert!(matches!(error, RouteBuildError::NotUnit { centroid: 0, .. }), "{error}");
        }
    }

    #[test]
    fn a_worker_without_a_centroid_takes_part_by_load_alone() {
        let mut policy = axes(0.1, 1);
        let mut rows = Array2::zeros((3, 4));
        rows[[0, 0]] = 1.0;
        rows[[2, 2]] = 1.0;
        policy.set_centroids(&Arc::new(rows)).expect("units and zeros");
        let signature = unit(vec![1.0, 0.2, 0.0, 0.0]);
        let mut choose = |loads: &[WorkerView]| {
            let d = policy.select(&ask(&signature), loads).expect("room");
            (d.worker.0, d.reason, d.similarity.is_some(), d.band)
        };
        // Worker 1 has a row of zeros and worker 3 no row: both are in the band, behind worker 0 among equals.
        assert_eq!(choose(&loads(&[4, 4, 0, 4])), (0, Reason::Band, true, 3));
        assert_eq!(choose(&loads(&[4, 3, 0, 3])), (1, Reason::NoCentroid, false, 3));
        assert_eq!(choose(&loads(&[4, 4, 0, 1])), (3, Reason::NoCentroid, false, 3));
        // Without them it is the paper's band around the best that is left.
        assert_eq!(choose(&loads(&[16, 16, 9, 16])), (2, Reason::Band, true, 1));
        assert_eq!(choose(&loads(&[16, 7, 16, 9])), (1, Reason::NoCentroid, false, 2));
    }

    #[test]
    fn centroids_that_do_not_fit_are_refused_and_the_old_ones_stay() {
        let mut policy = axes(0.1, 1);
        let wide = Arc::new(Array2::from_elem((4, 5), 0.0));
        assert_eq!(policy.set_centroids(&wide), Err(RouteBuildError::Width { found: 5, want: 4 }));
        let long = Arc::new(Array2::from_elem((4, 4), 1.0));
        assert_eq!(policy.set_centroids(&long), Err(RouteBuildError::NotUnit { centroid: 0, length: 2.0 }));
        let decision = policy.select(&ask(&unit(vec![0.0, 1.0, 0.0, 0.0])), &loads(&[0; 4])).expect("room");
        assert_eq!((decision.worker, decision.similarity), (WorkerId(1), Some(1.0)));
    }

    #[test]
    fn dot_agrees_with_doubles() {
        let mut rng = Rng::new(4);
        for dim in [1, 15, 16, 17, 100, 2560] {
            let (a, b) = (random_unit(&mut rng, dim), random_unit(&mut rng, dim));
            let exact: f64 = a.as_slice().iter().zip(b.as_slice()).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
            let got = dot(a.as_slice(), b.as_slice());
            assert!((f64::from(got) - exact).abs() < 1e-5, "dim {dim}: {got} for {exact}");
        }
    }

    proptest! {
        #[test]
        fn a_decision_depends_on_the_centroids_of_its_moment_alone(
            seed: u64, steps in prop::collection::vec((any::<bool>(), 0usize..3), 1..20),
        ) {
            let mut rng = Rng::new(seed);
            let sets: Vec<_> =
                (0..3).map(|_| matrix(&(0..4).map(|_| random_unit(&mut rng, 19)).collect::<Vec<_>>())).collect();
            let fresh = |which: usize| {
                LocalityBand::new(Arc::clone(&sets[which]), 4, LocalityBandParams::default()).expect("valid")
            };
            let (mut policy, mut now) = (fresh(0), 0);
            for (swap, which) in steps {
                if swap {
                    policy.set_centroids(&sets[which]).expect("valid");
                    now = which;
                }
                let signature = random_unit(&mut rng, 19);
                let workers = loads(&std::array::from_fn::<_, 4, _>(|_| rng.below(17) as u32));
                prop_assert_eq!(
                    policy.select(&ask(&signature), &workers),
                    fresh(now).select(&ask(&signature), &workers)
                );
            }
        }

        #[test]
        fn agrees_with_the_definition(
            seed: u64,
            views in prop::collection::vec((0u32..4, 0u32..5, prop::bool::weighted(0.8)), 1..12),
            tau in prop::sample::select(vec![0.0f32, 0.02, 0.1, 0.5, 2.0]),
            min_band in 1u32..4,
            n_distinct in 1usize..6,
        ) {
            let mut rng = Rng::new(seed);
            let params = LocalityBandParams { tau, min_band };
            // Few distinct centroids, so that cosines tie.
            let distinct: Vec<_> = (0..n_distinct).map(|_| random_unit(&mut rng, 19)).collect();
            let rows: Vec<_> = views.iter().map(|_| distinct[rng.below(n_distinct)].clone()).collect();
            let workers: Vec<_> = views.iter().enumerate()
                .map(|(id, &(n_slots, n_inflight, healthy))| WorkerView { id: WorkerId(id as u32), n_slots, n_inflight, healthy })
                .collect();
            let mut policy = LocalityBand::new(matrix(&rows), rows.len(), params).expect("valid");
            for _ in 0..4 {
                let signature = random_unit(&mut rng, 19);
                let similarities: Vec<f32> = rows.iter().map(|row| dot(signature.as_slice(), row.as_slice())).collect();
                let got = policy.select(&ask(&signature), &workers).map(|d| (d.worker, d.band));
                prop_assert_eq!(got, reference(&similarities, &workers, params));
            }
        }
    }
}
