//! One check of the centroids, and the fit that may follow: the work that takes long.
//!
//! Never changes anything: what it finds is a [`FitResult`] for [`crate::refit::Refitter::apply`].

use std::{collections::BTreeMap, sync::Arc};

use ndarray::{Array2, ArrayView1, Axis};

use crate::{
    calibrate::{KmeansParams, weighted_kmeans},
    refit::{RefitConfig, RefitReason, align, follow::follow, yardstick::Yardstick},
    rng::mix,
    signature::Signature,
    types::WorkerId,
};

/// Standard errors of the comparison that a gain must exceed before centroids are moved, which costs something: the
/// requests being decoded were placed by the old ones. After a change of traffic, chance in the check is the likelier
/// the smaller its gain.
const DRIFT_ERRORS: f64 = 1.25;
/// The same while traffic is on the move.
const MOVING_ERRORS: f64 = 0.5;
/// The same where nothing says that traffic has moved.
const UNCALLED_ERRORS: f64 = 1.5;

/// A check to be run, on any thread and at any time. Dropping it is safe: there are then no more checks.
#[derive(Debug)]
pub struct FitJob {
    pub(super) generation: u64,
    /// The workers that get centroids, ascending.
    pub(super) group: Vec<WorkerId>,
    /// Their shares are in proportion to these.
    pub(super) weights: Vec<u32>,
    /// The centroids in use; row i is worker i's, zeros where it has none.
    pub(super) centroids: Arc<Array2<f32>>,
    /// Oldest first.
    pub(super) window: Vec<Arc<Signature>>,
    /// The newest so many are what is checked.
    pub(super) n_recent: usize,
    /// Why a fit is made; none if drift alone is a reason.
    pub(super) reason: Option<RefitReason>,
    pub(super) expected: Option<Expectation>,
    pub(super) config: RefitConfig,
}

/// What the newest signatures are compared with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Expectation {
    /// Mean similarity when every worker gets its share.
    pub level: f64,
    /// The tenth part is less similar to its nearest centroid.
    pub low_edge: f64,
}

/// What a check found.
#[derive(Debug)]
pub struct FitResult {
    pub(super) generation: u64,
    pub(super) recent: f64,
    pub(super) low_share: Option<f64>,
    pub(super) fit: Option<Fit>,
}

#[derive(Debug)]
pub(super) struct Fit {
    pub reason: RefitReason,
    pub gain: f64,
    pub n_fitted: usize,
    /// One row for each worker id, if they are to be set.
    pub centroids: Option<Array2<f32>>,
    /// Of the centroids that are in use from now on.
    pub expected: Expectation,
}

/// The newest signatures in two halves: either judges what was cut without it. Of each two neighbours one is in either
/// half, by the toss of a fixed coin, so that requests that take turns are not parted by kind.
type Halves<'a> = [Vec<&'a Arc<Signature>>; 2];

/// A way to cut centroids.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// From the newest so many signatures.
    n_past: usize,
    /// Moves the centroids in use along instead of starting anew.
    follows: bool,
}

impl FitJob {
    /// Signatures the job holds.
    pub fn n_signatures(&self) -> usize {
        self.window.len()
    }

    /// Does the work, which may take seconds. Uses rayon's current pool.
    pub fn run(self) -> FitResult {
        let recent = &self.window[self.window.len() - self.n_recent..];
        let mut halves: Halves<'_> = [Vec::new(), Vec::new()];
        for (i, signature) in recent.iter().enumerate() {
            let flip = mix(i as u64 / 2) as usize;
            halves[(i ^ flip) & 1].push(signature);
        }
        let (positions, in_use): (Vec<_>, Vec<_>) = self.in_use().unzip();
        let weights: Vec<u32> = positions.into_iter().map(|position| self.weights[position]).collect();
        let now = (!in_use.is_empty()).then(|| Yardstick::of_halves(&halves, [&in_use, &in_use], &weights));
        let level = now.as_ref().map_or(0.0, Yardstick::level);
        let low_share = now.as_ref().zip(self.expected).map(|(now, expected)| now.low_share(expected.low_edge));
        let drifted = self.expected.is_none_or(|expected| level < expected.level - self.config.drift);
        let reason = self.reason.or(drifted.then_some(RefitReason::Drift));
        let fit = reason.map(|reason| self.fit(reason, &halves, now));
        FitResult { generation: self.generation, recent: level, low_share, fit }
    }

    /// The group's workers that have a centroid now, as positions in the group.
    fn in_use(&self) -> impl Iterator<Item = (usize, ArrayView1<'_, f32>)> {
        let row = |(position, worker): (usize, &WorkerId)| {
            let row = self.centroids.row(worker.index());
            row.iter().any(|x| x.abs().to_bits() != 0).then_some((position, row))
        };
        self.group.iter().enumerate().filter_map(row)
    }

    /// Finds out which cut serves the newest signatures best, and makes it.
    fn fit(&self, reason: RefitReason, halves: &Halves<'_>, now: Option<Yardstick>) -> Fit {
        let mut best: Option<(Cut, Yardstick)> = None;
        for cut in self.cuts(reason) {
            let yardstick = self.judge(cut, halves);
            if best.as_ref().is_none_or(|(_, best)| yardstick.level() >= best.level()) {
                best = Some((cut, yardstick));
            }
        }
        let (cut, yardstick) = best.expect("at least one cut");
        let (gain, error) = now.as_ref().map_or((yardstick.level(), 0.0), |now| yardstick.gain_over(now));
        let is_better = match reason {
            RefitReason::Resized => !self.has_all() || gain > 0.0,
            RefitReason::Drift => gain - DRIFT_ERRORS * error > self.config.margin,
            RefitReason::Moving => gain - MOVING_ERRORS * error > self.config.margin,
            RefitReason::First | RefitReason::Renewed => gain - UNCALLED_ERRORS * error > self.config.margin,
        };
        let serves = now.filter(|_| !is_better).unwrap_or(yardstick);
        let expected = Expectation { level: serves.level(), low_edge: serves.low_edge() };
        let centroids = is_better.then(|| {
            let past: Vec<_> = self.window[self.window.len() - cut.n_past..].iter().collect();
            self.by_worker(&self.cut(cut, &past))
        });
        Fit { reason, gain, n_fitted: cut.n_past, centroids, expected }
    }

    fn has_all(&self) -> bool {
        self.in_use().count() == self.group.len()
    }

    /// The cuts to compare: of an ever longer past, since after a change of traffic a short one serves best and in steady
    /// traffic a long one; of equals the last is taken, which is the least noisy.
    ///
    /// The centroids in use are moved along, so that workers keep what their residents need. No centroid is left behind
    /// by that, since each gets its share of the signatures. Only another number of centroids is a start anew.
    fn cuts(&self, reason: RefitReason) -> Vec<Cut> {
        let n = self.window.len();
        let pasts = std::iter::successors(Some(self.n_recent), |&n_past| (n_past < n).then(|| (4 * n_past).min(n)));
        let follows: &[bool] = match (self.has_all(), reason) {
            (false, _) => &[false],
            (true, RefitReason::Resized) => &[false, true],
            (true, _) => &[true],
        };
        pasts.flat_map(|n_past| follows.iter().map(move |&follows| Cut { n_past, follows })).collect()
    }

    /// How well the cut serves the newest signatures. Each half of these is served by centroids cut without it.
    fn judge(&self, cut: Cut, halves: &Halves<'_>) -> Yardstick {
        let (from, until) = (self.window.len() - cut.n_past, self.window.len() - self.n_recent);
        let without = |which: usize| {
            let past: Vec<_> = self.window[from..until].iter().chain(halves[1 - which].iter().copied()).collect();
            self.cut(cut, &past)
        };
        let (first, second) = rayon::join(|| without(0), || without(1));
        let [first, second] = [&first, &second].map(|rows| rows.outer_iter().collect::<Vec<_>>());
        Yardstick::of_halves(halves, [&first, &second], &self.weights)
    }

    /// One centroid for each worker of the group.
    fn cut(&self, cut: Cut, past: &[&Arc<Signature>]) -> Array2<f32> {
        if cut.follows {
            let rows: Vec<usize> = self.group.iter().map(|worker| worker.index()).collect();
            let old = self.centroids.select(Axis(0), &rows);
            return follow(past, &old, &self.weights, self.config.max_iterations);
        }
        let dim = self.centroids.ncols();
        let flat = past.iter().flat_map(|signature| signature.as_slice()).copied().collect();
        let points = Array2::from_shape_vec((past.len(), dim), flat).expect("signatures of one mask");
        let params = KmeansParams {
            k: self.group.len(),
            seed: self.config.seed,
            n_restarts: self.config.n_restarts,
            max_iterations: self.config.max_iterations,
        };
        weighted_kmeans(&points, &self.raised(past.len()), &params).centroids
    }

    /// The weights, the small ones raised so far that each worker gets one of `n` signatures at least.
    fn raised(&self, n: usize) -> Vec<u32> {
        let all: u64 = self.weights.iter().map(|&weight| u64::from(weight)).sum();
        // Raising up to K <= n / 4 weights by so much at most doubles their sum.
        let least = (2 * all).div_ceil(n as u64) as u32;
        self.weights.iter().map(|&weight| weight.max(least)).collect()
    }

    /// The fitted centroids as rows of their workers: those that have one keep what is most like it, the others take
    /// what is left. Row i was cut for the weight of worker i of the group, so only workers of one weight exchange rows.
    fn by_worker(&self, fitted: &Array2<f32>) -> Array2<f32> {
        let in_use: BTreeMap<usize, ArrayView1<'_, f32>> = self.in_use().collect();
        let mut alike: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (position, &weight) in self.weights.iter().enumerate() {
            alike.entry(weight).or_default().push(position);
        }
        let mut rows = Array2::zeros(self.centroids.dim());
        for positions in alike.values() {
            let (have, lack): (Vec<usize>, Vec<usize>) = positions.iter().partition(|p| in_use.contains_key(p));
            let old: Vec<_> = have.iter().map(|position| in_use[position]).collect();
            let new = fitted.select(Axis(0), positions);
            let kept = align(&old, &new);
            let left = (0..new.nrows()).filter(|row| !kept.contains(row));
            for (position, row) in have.iter().zip(kept.iter().copied()).chain(lack.iter().zip(left)) {
                rows.index_axis_mut(Axis(0), self.group[*position].index()).assign(&new.row(row));
            }
        }
        rows
    }
}
