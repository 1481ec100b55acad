//! How well one order of pairs follows another: Spearman's rank correlation.
//!
//! Never samples: every pair counts, and ties are exact.

use rayon::prelude::*;

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
fn spread(doubled: &[u32]) -> u128 {
    let mean = doubled.len() as i128 + 1;
    doubled.iter().map(|&r| (i128::from(r) - mean).pow(2).unsigned_abs()).sum()
}

/// The correlation of doubled ranks, from the sum of their products and both spreads.
fn rho(n: usize, product: u128, spread_x: u128, spread_y: u128) -> Option<f64> {
    if spread_x == 0 || spread_y == 0 {
        return None;
    }
    Some(covariance(n, product) as f64 / ((spread_x as f64).sqrt() * (spread_y as f64).sqrt()))
}

/// The sum of products of deviations from the mean, n + 1.
fn covariance(n: usize, product: u128) -> i128 {
    i128::try_from(product).expect("ranks below 2^32") - n as i128 * (n as i128 + 1).pow(2)
}

fn cube_less_one(n: u32) -> u128 {
    let n = u128::from(n);
    n * n * n - n
}

/// Cosines are ranked on a grid of 2^-24, the resolution of the single-precision products they are made of.
const GRID_BITS: u32 = 24;

/// The place of a cosine in `[0, 1]` on the grid, 0 to 2^24.
#[inline]
pub(super) fn grid_key(cosine: f64) -> u32 {
    const TOP: f64 = (1u32 << GRID_BITS) as f64;
    // Adding 2^52 rounds to the nearest whole number and leaves it in the low bits of the mantissa.
    const ROUND: f64 = (1u64 << 52) as f64;
    ((cosine * TOP).min(TOP) + ROUND).to_bits() as u32
}

/// One side of many correlations: ranked once.
pub(super) struct Ranked {
    ranks: Vec<u32>,
    spread: u128,
}

/// Rho is not below `low` and not above `high`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Bounds {
    pub low: f64,
    pub high: f64,
}

/// Keys that share their high bits.
#[derive(Clone, Copy, Default)]
pub(super) struct Bucket {
    n: u32,
    rank_sum: u64,
}

/// Buckets of [`Ranked::bounds`]: as many as fit the second-level cache.
const BUCKET_BITS: u32 = 16;

impl Ranked {
    /// Ranks `keys`.
    pub fn new(keys: &[u32]) -> Self {
        assert!(keys.len() < 1 << 31, "{} pairs are more than doubled ranks can count", keys.len());
        let values: Vec<f64> = keys.iter().map(|&key| f64::from(key)).collect();
        let ranks = doubled_ranks(&values);
        Self { spread: spread(&ranks), ranks }
    }

    /// True if all keys are equal, which leaves every correlation undefined.
    pub fn is_constant(&self) -> bool {
        self.spread == 0
    }

    /// [`spearman`] of `keys` and this side, bit for bit. `sorted` is work space.
    pub fn rho(&self, keys: &[u32], sorted: &mut Vec<u64>) -> Option<f64> {
        let n = self.ranks.len();
        assert_eq!(keys.len(), n, "as many keys as ranks");
        sorted.clear();
        sorted.extend(keys.iter().zip(&self.ranks).map(|(&key, &rank)| u64::from(key) << 32 | u64::from(rank)));
        sorted.par_sort_unstable();
        let (mut product, mut ties, mut before) = (0, 0, 0);
        for group in sorted.chunk_by(|a, b| a >> 32 == b >> 32) {
            let size = group.len() as u32;
            let rank_sum: u64 = group.iter().map(|entry| entry & u64::from(u32::MAX)).sum();
            product += u128::from(2 * before + size + 1) * u128::from(rank_sum);
            ties += cube_less_one(size);
            before += size;
        }
        rho(n, product, (cube_less_one(n as u32) - ties) / 3, self.spread)
    }

    /// Bounds of [`Ranked::rho`] from one pass over the keys, close when keys spread over many buckets.
    ///
    /// The order of buckets gives all but the ranks inside each. In doubled ranks, those of c keys deviate from their
    /// mean by c^2 / 2 in sum at most, and the other side's by n - 1 each.
    pub fn bounds(&self, keys: &[u32], table: &mut Vec<Bucket>) -> Bounds {
        let n = self.ranks.len();
        assert_eq!(keys.len(), n, "as many keys as ranks");
        let (first, last) = keys.iter().fold((u32::MAX, 0), |(min, max), &key| (key.min(min), key.max(max)));
        let shift = (u32::BITS - last.saturating_sub(first).leading_zeros()).saturating_sub(BUCKET_BITS);
        table.clear();
        table.resize(1 << BUCKET_BITS, Bucket::default());
        for (&key, &rank) in keys.iter().zip(&self.ranks) {
            let bucket = &mut table[((key - first) >> shift) as usize];
            bucket.n += 1;
            bucket.rank_sum += u64::from(rank);
        }
        let (mut product, mut ties, mut unknown, mut before) = (0, 0, 0i128, 0);
        for bucket in table.iter().filter(|bucket| bucket.n > 0) {
            product += u128::from(2 * before + bucket.n + 1) * u128::from(bucket.rank_sum);
            ties += cube_less_one(bucket.n);
            unknown += i128::from(bucket.n).pow(2) / 2;
            before += bucket.n;
        }
        unknown *= n as i128 - 1;
        let all = cube_less_one(n as u32);
        let covariance = covariance(n, product);
        let limit = |covariance: i128, spread: u128| {
            covariance as f64 / ((spread as f64 / 3.0).sqrt() * (self.spread as f64).sqrt())
        };
        // The smaller spread is that of ties throughout each bucket; it takes both bounds farther from 0.
        let spread_for = |outward: bool| if outward { all - ties } else { all };
        let low = covariance - unknown;
        let high = covariance + unknown;
        // Wider than any rounding of these few steps.
        let margin = 1e-12;
        let bounds =
            Bounds { low: limit(low, spread_for(low < 0)) - margin, high: limit(high, spread_for(high > 0)) + margin };
        if all > ties && self.spread > 0 { bounds } else { Bounds { low: -1.0 - margin, high: 1.0 + margin } }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::rng::Rng;

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
        let ranked = Ranked::new(&[1, 2, 3]);
        assert_eq!(ranked.rho(&[7; 3], &mut Vec::new()), None);
        assert!(Ranked::new(&[4, 4]).is_constant() && !ranked.is_constant());
        for bounds in [ranked.bounds(&[7; 3], &mut Vec::new()), Ranked::new(&[4, 4]).bounds(&[1, 2], &mut Vec::new())] {
            assert!(bounds.low < -1.0 && bounds.high > 1.0);
        }
    }

    #[test]
    fn the_grid_rounds_to_the_nearest_and_ends_at_one() {
        assert_eq!(grid_key(0.0), 0);
        assert_eq!(grid_key(1.0), 1 << 24);
        assert_eq!(grid_key(1.0 + 1e-7), 1 << 24);
        assert_eq!(grid_key(0.5 + 0.4 / 16_777_216.0), 1 << 23);
        assert_eq!(grid_key(0.5 + 0.6 / 16_777_216.0), (1 << 23) + 1);
    }

    fn float(keys: &[u32]) -> Vec<f64> {
        keys.iter().map(|&key| f64::from(key)).collect()
    }

    /// Rho by sorting and by bounds agree with the plain function.
    fn check(x: &[u32], y: &[u32]) -> Bounds {
        let ranked = Ranked::new(y);
        let want = spearman(&float(x), &float(y));
        assert_eq!(ranked.rho(x, &mut Vec::new()).map(f64::to_bits), want.map(f64::to_bits));
        let bounds = ranked.bounds(x, &mut Vec::new());
        if let Some(rho) = want {
            assert!(bounds.low <= rho && rho <= bounds.high, "{bounds:?} {rho}");
        }
        bounds
    }

    #[test]
    fn many_keys_with_and_without_ties() {
        let mut rng = Rng::new(3);
        for range in [2, 50, 5_000, (1 << 24) + 1] {
            let x: Vec<u32> = (0..20_000).map(|_| rng.below(range) as u32).collect();
            let noise: Vec<u32> = (0..20_000).map(|_| rng.below(range) as u32).collect();
            let like: Vec<u32> = x.iter().zip(&noise).map(|(&x, &noise)| x / 2 + noise / 5).collect();
            let unlike: Vec<u32> = like.iter().map(|&like| (1 << 24) - like).collect();
            for y in [noise, like, unlike, x.clone()] {
                let bounds = check(&x, &y);
                assert!(range < 5_001 || bounds.high - bounds.low < 0.02, "{bounds:?}");
            }
        }
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

        #[test]
        fn bounds_and_sorting_agree(
            pairs in prop::collection::vec((0u32..=1 << 24, 0u32..9), 1..60), coarse in 0u32..24
        ) {
            let x: Vec<u32> = pairs.iter().map(|p| p.0 >> coarse << coarse).collect();
            let y: Vec<u32> = pairs.iter().map(|p| p.1).collect();
            check(&x, &y);
            check(&y, &x);
        }
    }
}
