//! When the centroids are checked, and what becomes of a check's result.
//!
//! Never fits anything itself: its own calls take microseconds.

use std::{sync::Arc, time::Duration};

use ndarray::Array2;

use crate::{
    refit::{
        FitJob, FitResult, Reads, RefitConfig, RefitError, RefitOutcome, RefitReason, RefitStats, job, window::Window,
    },
    signature::Signature,
    types::WorkerId,
};

/// Part of a newly observed step in the smoothed reads.
const READS_WEIGHT: f64 = 0.01;
/// Part of a higher similarity than expected in what is expected from then on.
const RISE_WEIGHT: f64 = 0.25;

/// Watches signatures, says when the centroids should be checked, and takes in what the check found.
///
/// One owner, which calls [`Refitter::observe`] for every routed signature, [`Refitter::due`] every now and then, runs
/// the job it may get, and gives the result to [`Refitter::apply`]. Centroids returned from there and from
/// [`Refitter::resize`] are for the routing policy. The same calls give the same centroids, whenever and wherever jobs
/// are run.
#[derive(Debug)]
pub struct Refitter {
    config: RefitConfig,
    window: Window,
    centroids: Arc<Array2<f32>>,
    group: Vec<WorkerId>,
    /// The weight of each worker's share, by id; those past the end have 1.
    weights: Vec<u32>,
    /// Counts changes of the group.
    generation: u64,
    is_out: bool,
    must_recut: bool,
    last_check: Option<Duration>,
    n_at_check: u64,
    n_at_fit: u64,
    expected: Option<job::Expectation>,
    stats: RefitStats,
}

impl Refitter {
    /// A refitter for decode workers 0 to K - 1, each with its row of `centroids`.
    ///
    /// # Errors
    /// Settings that can not work.
    pub fn new(config: RefitConfig, centroids: Arc<Array2<f32>>) -> Result<Self, RefitError> {
        let n_workers = centroids.nrows();
        if let Some(problem) = config.problems(n_workers).into_iter().next() {
            return Err(RefitError::Config(problem));
        }
        Ok(Self {
            window: Window::new(config.max_signatures, config.max_age),
            stats: RefitStats { expected_reads: config.expected_reads, ..RefitStats::default() },
            config,
            centroids,
            group: (0..n_workers as u32).map(WorkerId).collect(),
            weights: vec![1; n_workers],
            generation: 0,
            is_out: false,
            must_recut: false,
            last_check: None,
            n_at_check: 0,
            n_at_fit: 0,
            expected: None,
        })
    }

    /// Gives each worker a share of the traffic in proportion to its weight, at least 1; new workers' are set before they
    /// join (see [`Refitter::resize`]). Without weights shares are equal.
    pub fn set_weight(&mut self, worker: WorkerId, weight: u32) {
        assert!(weight > 0, "worker {worker} gets no share");
        if self.weights.len() <= worker.index() {
            self.weights.resize(worker.index() + 1, 1);
        }
        self.weights[worker.index()] = weight;
    }

    /// The weight of a worker's share.
    pub fn weight(&self, worker: WorkerId) -> u32 {
        self.weights.get(worker.index()).copied().unwrap_or(1)
    }

    /// Takes in the signature of a request routed at time `now`. Times never decrease.
    pub fn observe(&mut self, signature: Signature, now: Duration) {
        let (n, dim) = (signature.as_slice().len(), self.centroids.ncols());
        assert_eq!(n, dim, "a signature of {n} entries for centroids of {dim}");
        self.window.push(signature, now);
        self.stats.n_observed += 1;
    }

    /// Takes in what a decode step read.
    pub fn observe_step(&mut self, step: Reads) {
        let old = self.stats.reads.unwrap_or(step);
        let smooth = |old: f64, new: f64| old + READS_WEIGHT * (new - old);
        let reads = Reads { distinct: smooth(old.distinct, step.distinct), batch: smooth(old.batch, step.batch) };
        self.stats.reads = Some(reads);
    }

    /// A check to run, if one is due at time `now`: after a change of the group as soon as the window is long enough,
    /// otherwise once the shortest interval has passed and enough new signatures are in. One at a time: nothing is due
    /// until its result is applied.
    pub fn due(&mut self, now: Duration) -> Option<FitJob> {
        self.window.forget(now);
        let enough = self.config.n_fresh(self.group.len());
        let is_possible = !self.is_out && self.stats.off.is_none() && !self.group.is_empty();
        if !is_possible || self.window.len() < enough {
            return None;
        }
        let n_fresh = (self.stats.n_observed - self.n_at_check) as usize;
        let is_early = self.last_check.is_some_and(|last| now.saturating_sub(last) < self.config.min_interval);
        if !self.must_recut && (n_fresh < enough || is_early) {
            return None;
        }
        let reason = if self.must_recut {
            Some(RefitReason::Resized)
        } else if self.expected.is_none() {
            Some(RefitReason::First)
        } else if self.stats.n_observed - self.n_at_fit >= self.config.max_signatures as u64 {
            Some(RefitReason::Renewed)
        } else if self.stats.last_outcome == Some(RefitOutcome::Swapped) {
            Some(RefitReason::Moving)
        } else {
            None
        };
        self.is_out = true;
        self.last_check = Some(now);
        self.n_at_check = self.stats.n_observed;
        Some(FitJob {
            generation: self.generation,
            group: self.group.clone(),
            weights: self.group.iter().map(|&worker| self.weight(worker)).collect(),
            centroids: Arc::clone(&self.centroids),
            n_recent: n_fresh.clamp(enough, self.window.len()),
            window: self.window.snapshot(),
            reason,
            expected: self.expected,
            config: self.config.clone(),
        })
    }

    /// Takes in what the check found; the centroids to set, if there are new ones. Drops it if the group has changed.
    pub fn apply(&mut self, result: FitResult) -> Option<Arc<Array2<f32>>> {
        self.is_out = false;
        self.stats.n_checks += 1;
        if result.generation != self.generation {
            self.stats.n_dropped += 1;
            self.stats.last_outcome = Some(RefitOutcome::Dropped);
            return None;
        }
        self.stats.recent = Some(result.recent);
        self.stats.low_share = result.low_share;
        let Some(fit) = result.fit else {
            if let Some(expected) = &mut self.expected {
                expected.level += RISE_WEIGHT * (result.recent - expected.level).max(0.0);
                self.stats.expected = Some(expected.level);
            }
            self.stats.last_outcome = Some(RefitOutcome::Steady);
            return None;
        };
        self.stats.n_fits += 1;
        self.stats.last_reason = Some(fit.reason);
        self.stats.last_gain = Some(fit.gain);
        self.stats.last_n_fitted = Some(fit.n_fitted);
        self.stats.expected = Some(fit.expected.level);
        self.expected = Some(fit.expected);
        self.n_at_fit = self.n_at_check;
        self.must_recut = false;
        let Some(centroids) = fit.centroids else {
            self.stats.last_outcome = Some(RefitOutcome::Kept);
            return None;
        };
        self.stats.n_swaps += 1;
        self.stats.last_outcome = Some(RefitOutcome::Swapped);
        self.centroids = Arc::new(centroids);
        Some(Arc::clone(&self.centroids))
    }

    /// Makes `workers` the group that shares the traffic; the centroids to set until it is recut, if it has changed.
    ///
    /// Workers that stay keep their centroids; rows of those that leave become zeros, and those that join have none yet.
    /// A recut for the new number is due as soon as the window holds enough signatures. The order of `workers` does not
    /// matter.
    pub fn resize(&mut self, workers: &[WorkerId]) -> Option<Arc<Array2<f32>>> {
        let mut group = workers.to_vec();
        group.sort_unstable();
        group.dedup();
        if group == self.group {
            return None;
        }
        let n_rows = group.last().map_or(0, |last| last.index() + 1).max(self.centroids.nrows());
        let mut rows = Array2::zeros((n_rows, self.centroids.ncols()));
        for worker in self.group.iter().filter(|worker| group.binary_search(worker).is_ok()) {
            rows.row_mut(worker.index()).assign(&self.centroids.row(worker.index()));
        }
        self.group = group;
        self.generation += 1;
        self.must_recut = true;
        self.expected = None;
        self.stats.expected = None;
        self.centroids = Arc::new(rows);
        Some(Arc::clone(&self.centroids))
    }

    /// No more checks, for the reason given; the centroids stay.
    pub fn switch_off(&mut self, why: impl Into<String>) {
        self.stats.off = Some(why.into());
    }

    /// The workers that share the traffic, ascending.
    pub fn group(&self) -> &[WorkerId] {
        &self.group
    }

    /// The centroids in use: row i is worker i's, of length 1, or zeros where it has none.
    pub fn centroids(&self) -> &Arc<Array2<f32>> {
        &self.centroids
    }

    /// What was seen and done so far.
    pub fn stats(&self) -> RefitStats {
        RefitStats { n_workers: self.group.len(), n_window: self.window.len(), ..self.stats.clone() }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{rng::Rng, signature::dot};

    const DIM: usize = 6;

    fn config() -> RefitConfig {
        RefitConfig {
            max_signatures: 128,
            min_fresh: 16,
            min_interval: Duration::from_secs(2),
            ..RefitConfig::default()
        }
    }

    fn seconds(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    /// A signature near axis `axis`.
    fn near(axis: usize, rng: &mut Rng) -> Signature {
        let entry = |i| f32::from(u8::from(i == axis)) + 0.2 * rng.uniform() as f32;
        Signature::normalised((0..DIM).map(entry).collect()).expect("not zero")
    }

    fn axes(n: usize) -> Arc<Array2<f32>> {
        Arc::new(Array2::from_shape_fn((n, DIM), |(i, j)| f32::from(u8::from(i == j))))
    }

    /// The axis each worker's centroid is nearest to; none for a row of zeros.
    fn served(centroids: &Array2<f32>) -> Vec<Option<usize>> {
        let nearest = |row: ndarray::ArrayView1<'_, f32>| {
            let axis = (0..DIM).max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("axes");
            (row[axis] > 0.0).then_some(axis)
        };
        centroids.outer_iter().map(nearest).collect()
    }

    fn watch(refitter: &mut Refitter, rng: &mut Rng, axes: &[usize], n: usize, now: Duration) {
        (0..n).for_each(|i| refitter.observe(near(axes[i % axes.len()], rng), now));
    }

    /// Runs the check that must be due.
    fn check(refitter: &mut Refitter, now: Duration) -> Option<Arc<Array2<f32>>> {
        let job = refitter.due(now).expect("a check is due");
        refitter.apply(job.run())
    }

    #[test]
    fn a_check_waits_for_signatures_and_for_time() {
        let (mut refitter, mut rng) = (Refitter::new(config(), axes(4)).expect("valid"), Rng::new(1));
        watch(&mut refitter, &mut rng, &[0, 1, 2, 3], 31, seconds(0));
        assert!(refitter.due(seconds(9)).is_none(), "4 workers need 32 signatures");
        watch(&mut refitter, &mut rng, &[0], 1, seconds(9));
        let job = refitter.due(seconds(9)).expect("due");
        assert_eq!(job.n_signatures(), 32);
        watch(&mut refitter, &mut rng, &[0, 1, 2, 3], 32, seconds(20));
        assert!(refitter.due(seconds(20)).is_none(), "one at a time");
        refitter.apply(job.run());
        check(&mut refitter, seconds(20));
        watch(&mut refitter, &mut rng, &[0, 1, 2, 3], 32, seconds(21));
        assert!(refitter.due(seconds(21)).is_none(), "too early");
        assert!(refitter.due(seconds(22)).is_some());
    }

    #[test]
    fn old_signatures_are_forgotten_and_bring_no_check() {
        let (mut refitter, mut rng) = (Refitter::new(config(), axes(4)).expect("valid"), Rng::new(1));
        watch(&mut refitter, &mut rng, &[0, 1, 2, 3], 40, seconds(0));
        assert!(refitter.due(seconds(301)).is_none());
        assert_eq!((refitter.stats().n_window, refitter.stats().n_observed), (0, 40));
    }

    #[test]
    fn steady_traffic_is_fitted_once_and_then_left_alone_until_the_window_is_new() {
        let (mut refitter, mut rng) = (Refitter::new(config(), axes(4)).expect("valid"), Rng::new(2));
        let mut outcomes = Vec::new();
        for round in 0..6 {
            watch(&mut refitter, &mut rng, &[0, 1, 2, 3], 32, seconds(10 * round));
            check(&mut refitter, seconds(10 * round));
            outcomes.push((refitter.stats().n_fits, refitter.stats().last_outcome.expect("a check")));
        }
        let (kept, steady) = (RefitOutcome::Kept, RefitOutcome::Steady);
        // The fifth check is 128 signatures after the first fit.
        assert_eq!(outcomes, [(1, kept), (1, steady), (1, steady), (1, steady), (2, kept), (2, steady)]);
        assert_eq!(refitter.stats().last_reason, Some(RefitReason::Renewed));
        assert_eq!(served(refitter.centroids()), [0, 1, 2, 3].map(Some));
    }

    #[test]
    fn a_new_domain_and_a_skewed_mix_move_the_centroids() {
        for (axes_now, want) in [(&[0usize, 1, 4, 4][..], [0, 1, 4, 4]), (&[0, 0, 0, 0, 0, 1][..], [0, 0, 0, 1])] {
            let (mut refitter, mut rng) = (Refitter::new(config(), axes(4)).expect("valid"), Rng::new(3));
            watch(&mut refitter, &mut rng, &[0, 1, 2, 3], 96, seconds(0));
            check(&mut refitter, seconds(0));
            for round in 1..5 {
                watch(&mut refitter, &mut rng, axes_now, 48, seconds(10 * round));
                check(&mut refitter, seconds(10 * round));
            }
            let mut axes: Vec<_> = served(refitter.centroids()).into_iter().flatten().collect();
            axes.sort_unstable();
            assert_eq!(axes, want, "{:?}", refitter.stats());
        }
    }

    #[test]
    fn a_lost_worker_leaves_its_share_to_the_others() {
        let (mut refitter, mut rng) = (Refitter::new(config(), axes(4)).expect("valid"), Rng::new(4));
        watch(&mut refitter, &mut rng, &[0, 1, 2, 1, 3, 1], 64, seconds(0));
        let group = [0, 2, 3].map(WorkerId);
        let until_recut = refitter.resize(&group).expect("the group has changed");
        assert_eq!(served(&until_recut), [Some(0), None, Some(2), Some(3)]);
        assert_eq!(refitter.resize(&group), None);
        // Due at once, however short the time since the last check.
        let recut = served(&check(&mut refitter, seconds(0)).expect("new centroids"));
        assert!(recut[1].is_none() && recut.iter().flatten().count() == 3, "{recut:?}");
        assert!(recut.contains(&Some(1)), "half the traffic is the lost worker's: {recut:?}");
        assert_eq!(refitter.stats().last_reason, Some(RefitReason::Resized));
        assert!(refitter.due(seconds(0)).is_none());
    }

    #[test]
    fn a_worker_that_joins_gets_what_the_others_do_not_keep() {
        let (mut refitter, mut rng) = (Refitter::new(config(), axes(2)).expect("valid"), Rng::new(5));
        watch(&mut refitter, &mut rng, &[0, 1, 5], 48, seconds(0));
        let until_recut = refitter.resize(&[3, 1, 0].map(WorkerId)).expect("the group has changed");
        assert_eq!(served(&until_recut), [Some(0), Some(1), None, None]);
        let recut = check(&mut refitter, seconds(0)).expect("new centroids");
        assert_eq!(served(&recut), [Some(0), Some(1), None, Some(5)]);
    }

    #[test]
    fn a_worker_of_twice_the_weight_gets_twice_the_share() {
        let (mut refitter, mut rng) = (Refitter::new(config(), axes(3)).expect("valid"), Rng::new(9));
        refitter.set_weight(WorkerId(1), 2);
        // Half the traffic is near axis 4: it belongs to the worker that takes half of all.
        watch(&mut refitter, &mut rng, &[4, 0, 4, 2], 96, seconds(0));
        let recut = served(&check(&mut refitter, seconds(0)).expect("new centroids"));
        assert_eq!(recut, [Some(0), Some(4), Some(2)]);
        // A fourth worker, as heavy as worker 1, takes over an axis as large.
        refitter.set_weight(WorkerId(3), 2);
        refitter.resize(&[0, 1, 2, 3].map(WorkerId));
        watch(&mut refitter, &mut rng, &[4, 0, 4, 5, 2, 5], 126, seconds(1));
        let recut = served(&check(&mut refitter, seconds(1)).expect("new centroids"));
        assert_eq!(recut, [Some(0), Some(4), Some(2), Some(5)]);
    }

    #[test]
    fn a_weight_too_small_for_one_signature_is_raised() {
        let (mut refitter, mut rng) = (Refitter::new(config(), axes(4)).expect("valid"), Rng::new(10));
        refitter.set_weight(WorkerId(0), 1_000_000);
        refitter.resize(&[0, 1, 2].map(WorkerId));
        watch(&mut refitter, &mut rng, &[0, 1, 4], 32, seconds(0));
        check(&mut refitter, seconds(0));
        assert_eq!(refitter.stats().n_checks, 1);
    }

    #[test]
    fn survivors_keep_their_centroids_while_the_window_is_short() {
        let (mut refitter, mut rng) = (Refitter::new(config(), axes(4)).expect("valid"), Rng::new(6));
        watch(&mut refitter, &mut rng, &[0, 1], 5, seconds(0));
        refitter.resize(&[1, 2].map(WorkerId));
        assert!(refitter.due(seconds(60)).is_none());
        assert_eq!(served(refitter.centroids()), [None, Some(1), Some(2), None]);
        watch(&mut refitter, &mut rng, &[0, 1], 16, seconds(60));
        check(&mut refitter, seconds(60));
        assert_eq!(served(refitter.centroids()), [None, Some(1), Some(0), None]);
        refitter.resize(&[]);
        assert!(refitter.due(seconds(70)).is_none(), "nobody to cut for");
    }

    #[test]
    fn a_result_for_another_group_is_dropped() {
        let (mut refitter, mut rng) = (Refitter::new(config(), axes(4)).expect("valid"), Rng::new(7));
        watch(&mut refitter, &mut rng, &[4, 5], 64, seconds(0));
        let job = refitter.due(seconds(0)).expect("due");
        refitter.resize(&[0, 1, 2].map(WorkerId));
        let before = Arc::clone(refitter.centroids());
        assert_eq!(refitter.apply(job.run()), None);
        assert_eq!((refitter.centroids(), refitter.stats().n_dropped), (&before, 1));
        assert!(check(&mut refitter, seconds(0)).is_some(), "the recut is still due");
    }

    #[test]
    fn switched_off_nothing_is_due() {
        let (mut refitter, mut rng) = (Refitter::new(config(), axes(4)).expect("valid"), Rng::new(8));
        watch(&mut refitter, &mut rng, &[4, 5], 64, seconds(0));
        refitter.switch_off("as scripted");
        assert!(refitter.due(seconds(60)).is_none());
        assert_eq!(refitter.stats().off.as_deref(), Some("as scripted"));
    }

    #[test]
    fn reads_are_smoothed() {
        let expected = Some(Reads { distinct: 20.0, batch: 8.0 });
        let mut refitter = Refitter::new(RefitConfig { expected_reads: expected, ..config() }, axes(2)).expect("valid");
        refitter.observe_step(Reads { distinct: 24.0, batch: 9.0 });
        refitter.observe_step(Reads { distinct: 34.0, batch: 9.0 });
        let stats = refitter.stats();
        let reads = stats.reads.expect("observed");
        assert!((reads.distinct - 24.1).abs() < 1e-9 && (reads.batch - 9.0).abs() < 1e-9, "{reads:?}");
        assert_eq!(stats.expected_reads, expected);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn whatever_happens_rows_are_unit_vectors_of_the_group(
            seed: u64,
            steps in prop::collection::vec((0u8..8, 1usize..40, 0u32..32), 1..40),
        ) {
            let mut rng = Rng::new(seed);
            let mut refitter = Refitter::new(config(), axes(4)).expect("valid");
            let (mut job, mut now) = (None, 0);
            for (what, n, members) in steps {
                now += u64::from(members);
                let had: Vec<bool> = served(refitter.centroids()).iter().map(Option::is_some).collect();
                let old_group = refitter.group().to_vec();
                match what {
                    0..4 => (0..n).for_each(|_| refitter.observe(near(rng.below(DIM), &mut rng), seconds(now))),
                    4 => job = refitter.due(seconds(now)).or(job),
                    5 | 6 => {
                        let swapped = job.take().and_then(|job: FitJob| refitter.apply(job.run()));
                        if let Some(rows) = swapped {
                            prop_assert_eq!(&rows, refitter.centroids());
                            let of_group = refitter.group().iter().all(|w| served(&rows)[w.index()].is_some());
                            prop_assert!(of_group, "a worker without a centroid after a cut");
                        }
                    }
                    _ => {
                        let group: Vec<_> = (0..5).filter(|i| members >> i & 1 == 1).map(WorkerId).collect();
                        let changed = refitter.resize(&group).is_some();
                        prop_assert_eq!(changed, group != old_group);
                    }
                }
                for (id, row) in refitter.centroids().outer_iter().enumerate() {
                    let worker = WorkerId(id as u32);
                    let row = row.to_vec();
                    let length = dot(&row, &row).sqrt();
                    let is_member = refitter.group().contains(&worker);
                    prop_assert!((length - 1.0).abs() < 1e-5 || length.to_bits() == 0, "{}", length);
                    prop_assert!(is_member || length.to_bits() == 0, "a row of a worker that is not there");
                    let stayed = is_member && old_group.contains(&worker) && had[id];
                    prop_assert!(!stayed || length > 0.0, "a worker lost its centroid");
                }
            }
        }
    }
}
