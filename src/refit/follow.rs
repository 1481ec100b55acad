//! The centroids in use, moved to where the traffic is now.
//!
//! Never starts anew: each centroid stays the nearest thing to what it was, so that workers keep what their resident
//! requests came by.

use std::sync::Arc;

use ndarray::{Array2, ArrayView1};

use crate::{refit::yardstick::Yardstick, signature::Signature};

/// Balanced k-means of at least one of `signatures` that starts from the unit vectors `old` (K rows) and takes at most
/// `max_iterations` steps. Row i comes from row i, and its share is in proportion to `weights[i]`.
pub(super) fn follow(
    signatures: &[&Arc<Signature>],
    old: &Array2<f32>,
    weights: &[u32],
    max_iterations: u32,
) -> Array2<f32> {
    let mut centroids = old.clone();
    let mut labels = Vec::new();
    for _ in 0..max_iterations {
        let rows: Vec<_> = centroids.outer_iter().collect();
        let next = Yardstick::shares(&Yardstick::cosines(signatures, &rows), weights);
        if next == labels {
            break;
        }
        labels = next;
        let mut sums = Array2::<f64>::zeros(centroids.dim());
        for (signature, &k) in signatures.iter().zip(&labels) {
            for (sum, &x) in sums.row_mut(k as usize).iter_mut().zip(signature.as_slice()) {
                *sum += f64::from(x);
            }
        }
        for (mut centroid, sum) in centroids.outer_iter_mut().zip(sums.outer_iter()) {
            // One without signatures, or whose signatures cancel out, stays.
            if let Some(unit) = Signature::normalised(sum.iter().map(|&x| x as f32).collect()) {
                centroid.assign(&ArrayView1::from(unit.as_slice()));
            }
        }
    }
    centroids
}

#[cfg(test)]
mod tests {
    use ndarray::array;

    use super::*;

    #[test]
    fn each_centroid_goes_to_its_own_share() {
        let at = |angle: f32| Arc::new(Signature::normalised(vec![angle.cos(), angle.sin()]).expect("not zero"));
        let signatures = [0.2, 0.3, 0.4, 1.3, 1.4, 1.5].map(at);
        let all: Vec<_> = signatures.iter().collect();
        let moved = follow(&all, &array![[0.0f32, 1.0], [1.0, 0.0]], &[1, 1], 10);
        let angle = |k: usize| f64::from(moved[[k, 1]]).atan2(f64::from(moved[[k, 0]]));
        assert!((angle(0) - 1.4).abs() < 1e-5 && (angle(1) - 0.3).abs() < 1e-5, "{moved}");
    }

    #[test]
    fn a_centroid_without_signatures_stays() {
        let one = Arc::new(Signature::normalised(vec![0.6, 0.8]).expect("not zero"));
        let moved = follow(&[&one], &array![[1.0f32, 0.0], [0.0, 1.0]], &[1, 1], 10);
        assert_eq!(moved, array![[1.0, 0.0], [0.6, 0.8]]);
    }
}
