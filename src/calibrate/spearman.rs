//! How well one order of pairs follows another: Spearman's rank correlation.
//!
//! Never samples: every pair counts, and ties are exact.

/// Spearman's rank correlation of two lists of the same length, ties sharing their average rank.
///
/// Ranks are whole numbers and summed exactly, so the result does not depend on the order of the pairs. Nothing if a
/// list has no two values that differ.
pub fn spearman(x: &[f64], y: &[f64]) -> Option<f64> {
    assert_eq!(x.len(), y.len(), "lists of different lengths");
    let (x, y) = (doubled_ranks(x), doubled_ranks(y));
    let product = x.iter().zip(&y).map(|(&x, &y)| u128::from(x) * u128::from(y)).sum();
    rho(x.len(), product, spread(&x), spread(&y))
}

/// Twice the average rank of each value: whole numbers from 2 to 2n.
fn doubled_ranks(values: &[f64]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..u32::try_from(values.len()).expect("fewer than 2^32 values")).collect();
    order.sort_unstable_by(|&a, &b| values[a as usize].total_cmp(&values[b as usize]));
    let mut ranks = vec![0; values.len()];
    let mut before = 0;
    for ties in order.chunk_by(|&a, &b| values[a as usize].total_cmp(&values[b as usize]).is_eq()) {
        for &i in ties {
            ranks[i as usize] = 2 * before + ties.len() as u32 + 1;
        }
        before += ties.len() as u32;
    }
    ranks
}

/// Sum of squared deviations of doubled ranks from their mean, n + 1.
pub(super) fn spread(doubled: &[u32]) -> u128 {
    let mean = doubled.len() as i128 + 1;
    doubled.iter().map(|&r| (i128::from(r) - mean).pow(2).unsigned_abs()).sum()
}

/// The correlation of doubled ranks, from the sum of their products and both spreads.
pub(super) fn rho(n: usize, product: u128, spread_x: u128, spread_y: u128) -> Option<f64> {
    if spread_x == 0 || spread_y == 0 {
        return None;
    }
    Some(covariance(n, product) as f64 / ((spread_x as f64).sqrt() * (spread_y as f64).sqrt()))
}

/// The sum of products of deviations from the mean, n + 1.
pub(super) fn covariance(n: usize, product: u128) -> i128 {
    i128::try_from(product).expect("ranks below 2^32") - n as i128 * (n as i128 + 1).pow(2)
}

/// n^3 - n: three times the spread of n doubled ranks without ties, and what n ties take from it.
pub(super) fn cube_less_one(n: u64) -> u128 {
    let n = u128::from(n);
    n * n * n - n
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The textbook: Pearson's correlation of average ranks.
    fn textbook(x: &[f64], y: &[f64]) -> f64 {
        let ranks = |values: &[f64]| -> Vec<f64> {
            let below = |v: f64| values.iter().filter(|&&w| w < v).count() as f64;
            let not_above = |v: f64| values.iter().filter(|&&w| w <= v).count() as f64;
            values.iter().map(|&v| f64::midpoint(below(v) + 1.0, not_above(v))).collect()
        };
        let (x, y) = (ranks(x), ranks(y));
        let n = x.len() as f64;
        let (mean_x, mean_y) = (x.iter().sum::<f64>() / n, y.iter().sum::<f64>() / n);
        let dot =
            |a: &[f64], ma: f64, b: &[f64], mb: f64| -> f64 { a.iter().zip(b).map(|(a, b)| (a - ma) * (b - mb)).sum() };
        dot(&x, mean_x, &y, mean_y) / (dot(&x, mean_x, &x, mean_x) * dot(&y, mean_y, &y, mean_y)).sqrt()
    }

    #[test]
    fn known_values() {
        let rho = |x: &[f64], y: &[f64]| spearman(x, y).expect("spread");
        assert!((rho(&[1.0, 2.0, 3.0], &[10.0, 20.0, 90.0]) - 1.0).abs() < 1e-15);
        assert!((rho(&[1.0, 2.0, 3.0], &[3.0, 2.0, 1.0]) + 1.0).abs() < 1e-15);
        // Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4.
        assert!((rho(&[0.0, 5.0, 5.0, 9.0], &[1.0, 2.0, 3.0, 4.0]) - 4.5 / (4.5f64 * 5.0).sqrt()).abs() < 1e-15);
    }

    #[test]
    fn a_constant_side_leaves_rho_undefined() {
        assert_eq!(spearman(&[1.0, 1.0], &[1.0, 2.0]), None);
        assert_eq!(spearman(&[1.0], &[1.0]), None);
        assert_eq!(spearman(&[], &[]), None);
    }

    proptest! {
        #[test]
        fn equals_the_textbook(pairs in prop::collection::vec((0u32..12, 0u32..12), 2..60)) {
            let x: Vec<f64> = pairs.iter().map(|p| f64::from(p.0)).collect();
            let y: Vec<f64> = pairs.iter().map(|p| f64::from(p.1)).collect();
            match spearman(&x, &y) {
                Some(rho) => prop_assert!((rho - textbook(&x, &y)).abs() < 1e-12),
                None => prop_assert!(textbook(&x, &y).is_nan()),
            }
        }
    }
}
