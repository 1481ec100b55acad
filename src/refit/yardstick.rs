//! How well centroids serve signatures when every worker takes its share.
//!
//! Never fits anything.

use std::sync::Arc;

use ndarray::{Array2, ArrayView1};

use crate::{calibrate::weighted_assignment, signature::Signature};

/// How alike signatures and centroids are.
pub(super) struct Yardstick {
    /// For each signature, its similarity to the centroid it gets when all centroids get their shares of the signatures
    /// at the highest total.
    pub shared: Vec<f64>,
    /// For each signature, its similarity to the nearest centroid.
    pub best: Vec<f64>,
}

impl Yardstick {
    /// Compares at least one signature with at least one centroid; shares are in proportion to `weights`, one a centroid.
    pub fn new(signatures: &[&Arc<Signature>], centroids: &[ArrayView1<'_, f32>], weights: &[u32]) -> Self {
        let cosines = Self::cosines(signatures, centroids);
        let shares = Self::shares(&cosines, weights);
        Self {
            shared: shares.iter().enumerate().map(|(i, &k)| f64::from(cosines[[i, k as usize]])).collect(),
            best: cosines.outer_iter().map(|row| f64::from(row.fold(f32::MIN, |a, &b| a.max(b)))).collect(),
        }
    }

    /// Similarities of signatures (rows) and centroids (columns).
    pub fn cosines(signatures: &[&Arc<Signature>], centroids: &[ArrayView1<'_, f32>]) -> Array2<f32> {
        let rows: Vec<Vec<f32>> = centroids.iter().map(|row| row.to_vec()).collect();
        Array2::from_shape_fn((signatures.len(), rows.len()), |(i, k)| signatures[i].cosine(&rows[k]))
    }

    /// The centroid of each signature when all get shares in proportion to `weights`, at the highest total.
    pub fn shares(cosines: &Array2<f32>, weights: &[u32]) -> Vec<u32> {
        const UNIT: f64 = (1u64 << 32) as f64;
        weighted_assignment(&cosines.mapv(|cosine| (-f64::from(cosine) * UNIT).round() as i64), weights)
    }

    /// Compares each half of the signatures with its own centroids; signatures are those of the first half, then those
    /// of the second.
    pub fn of_halves(
        halves: &[Vec<&Arc<Signature>>; 2],
        centroids: [&[ArrayView1<'_, f32>]; 2],
        weights: &[u32],
    ) -> Self {
        let mut whole = Self::new(&halves[0], centroids[0], weights);
        let second = Self::new(&halves[1], centroids[1], weights);
        whole.shared.extend(second.shared);
        whole.best.extend(second.best);
        whole
    }

    /// The mean of `shared`.
    pub fn level(&self) -> f64 {
        self.shared.iter().sum::<f64>() / self.shared.len() as f64
    }

    /// The tenth part of the signatures has a `best` below this.
    pub fn low_edge(&self) -> f64 {
        let mut sorted = self.best.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        sorted[sorted.len() / 10]
    }

    /// The share of signatures whose `best` is below `edge`.
    pub fn low_share(&self, edge: f64) -> f64 {
        self.best.iter().filter(|&&best| best < edge).count() as f64 / self.best.len() as f64
    }

    /// How much higher this is than `other`, measured on the same signatures: the mean difference and its standard error.
    pub fn gain_over(&self, other: &Self) -> (f64, f64) {
        let n = self.shared.len() as f64;
        let gain = self.level() - other.level();
        let gains = self.shared.iter().zip(&other.shared).map(|(new, old)| new - old);
        let variance = gains.map(|g| (g - gain) * (g - gain)).sum::<f64>() / (n - 1.0).max(1.0);
        (gain, (variance / n).sqrt())
    }
}

#[cfg(test)]
mod tests {
    use ndarray::array;

    use super::*;

    fn measure(angles: &[f32], centroids: &[ArrayView1<'_, f32>]) -> Yardstick {
        let unit = |a: &f32| Arc::new(Signature::normalised(vec![a.cos(), a.sin()]).expect("not zero"));
        let signatures: Vec<_> = angles.iter().map(unit).collect();
        Yardstick::new(&signatures.iter().collect::<Vec<_>>(), centroids, &vec![1; centroids.len()])
    }

    #[test]
    fn a_skewed_mix_shows_in_the_shares_and_not_in_the_nearest() {
        let axes = array![[1.0f32, 0.0], [0.0, 1.0]];
        let views: Vec<_> = axes.outer_iter().collect();
        let even = measure(&[0.0, 0.0, 1.570_796_4, 1.570_796_4], &views);
        let skewed = measure(&[0.0, 0.0, 0.0, 1.570_796_4], &views);
        assert!((even.level() - 1.0).abs() < 1e-6 && (skewed.level() - 0.75).abs() < 1e-6);
        assert_eq!(skewed.low_share(0.99).to_bits(), 0.0f64.to_bits());
        let (gain, error) = even.gain_over(&skewed);
        assert!((gain - 0.25).abs() < 1e-6 && (error - 0.25).abs() < 1e-6, "{gain} {error}");
    }

    #[test]
    fn a_new_domain_shows_in_both() {
        let axes = array![[1.0f32, 0.0], [0.0, 1.0]];
        let views: Vec<_> = axes.outer_iter().collect();
        let known = measure(&[0.0, 0.1, 1.4, 1.5], &views);
        let strange = measure(&[0.0, 0.7, 0.8, 1.5], &views);
        assert!(strange.level() < known.level() - 0.1);
        assert!((strange.low_share(known.low_edge()) - 0.5).abs() < 1e-9);
    }
}
