//! Which worker gets which new centroid.
//!
//! Never changes a centroid.

use ndarray::{Array2, ArrayView1};

use crate::{calibrate::balanced_assignment, signature::dot};

/// The new centroid (row of `new`) for each old one, each given once, so that the summed cosine of old and new is as
/// large as it can be.
///
/// A worker then keeps the centroid most like the one its resident requests came by. There are at least as many new
/// centroids as old ones; those left over belong to nobody yet. Exact; of several best ways, always the same one.
pub fn align(old: &[ArrayView1<'_, f32>], new: &Array2<f32>) -> Vec<usize> {
    const UNIT: f64 = (1u64 << 32) as f64;
    assert!(old.len() <= new.nrows(), "{} old centroids for {} new ones", old.len(), new.nrows());
    let row = |view: ArrayView1<'_, f32>| view.to_vec();
    let (old, new): (Vec<_>, Vec<_>) = (old.iter().map(|&r| row(r)).collect(), new.outer_iter().map(row).collect());
    // With at most as many points as columns, a balanced assignment gives each column at most one.
    let costs = Array2::from_shape_fn((old.len(), new.len()), |(i, j)| {
        (-f64::from(dot(&old[i], &new[j])) * UNIT).round() as i64
    });
    if old.is_empty() {
        return Vec::new();
    }
    balanced_assignment(&costs).into_iter().map(|column| column as usize).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{rng::Rng, signature::Signature};

    fn units(rng: &mut Rng, n: usize, dim: usize) -> Array2<f32> {
        let mut rows = Array2::zeros((n, dim));
        for mut row in rows.outer_iter_mut() {
            let unit = Signature::normalised((0..dim).map(|_| rng.uniform() as f32 + 1e-6).collect());
            row.assign(&ArrayView1::from(unit.expect("not zero").as_slice()));
        }
        rows
    }

    /// The largest sum over every way to give `old` rows different `new` rows.
    fn best(old: &Array2<f32>, new: &Array2<f32>, from: usize, taken: &mut Vec<usize>) -> f64 {
        if from == old.nrows() {
            return 0.0;
        }
        let mut most = f64::NEG_INFINITY;
        for j in 0..new.nrows() {
            if !taken.contains(&j) {
                taken.push(j);
                most = most.max(f64::from(old.row(from).dot(&new.row(j))) + best(old, new, from + 1, taken));
                taken.pop();
            }
        }
        most
    }

    #[test]
    fn a_shuffle_is_undone() {
        let old = units(&mut Rng::new(3), 9, 20);
        let order = [4, 2, 8, 0, 1, 7, 3, 6, 5];
        let new = old.select(ndarray::Axis(0), &order);
        let views: Vec<_> = old.outer_iter().collect();
        let found: Vec<usize> = align(&views, &new).into_iter().map(|j| order[j]).collect();
        assert_eq!(found, [0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(align(&[], &new), Vec::<usize>::new());
    }

    proptest! {
        #[test]
        fn no_permutation_is_better(seed: u64, n_old in 1usize..=6, n_more in 0usize..=2) {
            let mut rng = Rng::new(seed);
            let (old, new) = (units(&mut rng, n_old, 8), units(&mut rng, (n_old + n_more).min(6), 8));
            let views: Vec<_> = old.outer_iter().collect();
            let found = align(&views, &new);
            let mut once = found.clone();
            once.sort_unstable();
            once.dedup();
            prop_assert_eq!(once.len(), n_old);
            let sum: f64 = found.iter().enumerate().map(|(i, &j)| f64::from(old.row(i).dot(&new.row(j)))).sum();
            let want = best(&old, &new, 0, &mut Vec::new());
            prop_assert!((sum - want).abs() < 1e-5, "{} instead of {}", sum, want);
        }
    }
}
