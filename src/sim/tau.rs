use serde::{Deserialize, Serialize};

use crate::sim::ReplayMeans;

/// The widths of the band that are compared, from the most similar worker alone to all workers.
pub const TAUS: [f32; 9] = [0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 2.0];

/// Means this close are taken as equal: replays do not tell them apart.
const MEAN_SLACK: f64 = 0.005;

/// What the locality band does at each width, beside the load balancers, on requests it was not fitted to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TauCurve {
    /// The width to use.
    ///
    /// Of the widths whose 99th percentile of TPOT is at most `p99_slack` above the least of the balancers', those whose
    /// mean is within 0.5% of the least (a mean feels the tail, which a median does not); of these the widest, because it
    /// balances best. If no width keeps the 99th percentile, the one that comes closest (the widest of equals).
    pub tau: f32,
    /// Each width, ascending.
    pub points: Vec<TauPoint>,
    /// The load balancers.
    pub balancers: Vec<BalancerPoint>,
}

/// One width of the band.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TauPoint {
    /// The width.
    pub tau: f32,
    /// Averages over folds and seeds.
    #[serde(flatten)]
    pub means: ReplayMeans,
}

/// One load balancer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BalancerPoint {
    /// Its name.
    pub policy: String,
    /// Averages over folds and seeds.
    #[serde(flatten)]
    pub means: ReplayMeans,
}

impl TauCurve {
    /// The curve through `points`, at least one, and the width chosen from it.
    pub(super) fn new(points: Vec<TauPoint>, balancers: Vec<BalancerPoint>, p99_slack: f64) -> Self {
        let p99 = balancers.iter().map(|balancer| balancer.means.tpot_p99).fold(f64::INFINITY, f64::min);
        Self { tau: choose(&points, p99 * (1.0 + p99_slack)), points, balancers }
    }
}

fn choose(points: &[TauPoint], p99_limit: f64) -> f32 {
    let keeps_tail = |point: &&TauPoint| point.means.tpot_p99 <= p99_limit;
    let least_mean = points.iter().filter(keeps_tail).map(|point| point.means.tpot_mean).fold(f64::INFINITY, f64::min);
    let as_good = |point: &&TauPoint| point.means.tpot_mean <= least_mean * (1.0 + MEAN_SLACK);
    let chosen = points.iter().filter(keeps_tail).filter(as_good).max_by(|a, b| a.tau.total_cmp(&b.tau));
    let closest =
        || points.iter().min_by(|a, b| a.means.tpot_p99.total_cmp(&b.means.tpot_p99).then(b.tau.total_cmp(&a.tau)));
    chosen.or_else(closest).expect("a curve has a point").tau
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(tau: f32, tpot_mean: f64, tpot_p99: f64) -> TauPoint {
        TauPoint { tau, means: ReplayMeans { tpot_p99, tpot_mean, ..ReplayMeans::default() } }
    }

    #[test]
    fn the_least_mean_that_keeps_the_tail() {
        let points = [point(0.0, 0.80, 1.60), point(0.1, 0.85, 1.21), point(0.2, 0.90, 1.1), point(2.0, 1.0, 1.2)];
        assert_eq!(choose(&points, 1.21).to_bits(), 0.1f32.to_bits());
        assert_eq!(choose(&points, 1.2).to_bits(), 0.2f32.to_bits());
        assert_eq!(choose(&points, 1.6).to_bits(), 0.0f32.to_bits());
    }

    #[test]
    fn equal_means_take_the_wider_band() {
        let points = [point(0.0, 1.0, 1.2), point(0.1, 0.997, 1.2), point(0.2, 1.001, 1.2), point(2.0, 1.003, 1.2)];
        assert_eq!(choose(&points, 1.2).to_bits(), 0.2f32.to_bits());
        assert_eq!(choose(&points[..2], 1.2).to_bits(), 0.1f32.to_bits());
    }

    #[test]
    fn a_tail_that_no_width_keeps_is_kept_as_well_as_it_can_be() {
        let points = [point(0.0, 0.5, 2.0), point(0.1, 0.6, 1.5), point(0.2, 0.7, 1.5)];
        assert_eq!(choose(&points, 1.2).to_bits(), 0.2f32.to_bits());
    }
}
