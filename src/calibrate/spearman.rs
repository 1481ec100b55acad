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
fn spread(doubled: &[u32]) -> u128 {
    let mean = doubled.len() as i128 + 1;
    doubled.iter().map(|&r| (i128::from(r) - mean).pow(2).unsigned_abs()).sum()
}

/// The same without looking at the ranks: (n^3 - n) / 3, less (t^3 - t) / 3 for each group of t ties.
fn spread_of_ties(n: usize, ties: u128) -> u128 {
    (cube_less_one(n) - ties) / 3
}

fn cube_less_one(n: usize) -> u128 {
    let n = n as u128;
    n * n * n - n
}

/// The correlation of doubled ranks, from the sum of their products and both spreads.
fn rho(n: usize, product: u128, spread_x: u128, spread_y: u128) -> Option<f64> {
    if spread_x == 0 || spread_y == 0 {
        return None;
    }
    let means = n as i128 * (n as i128 + 1).pow(2);
    let covariance = i128::try_from(product).expect("ranks below 2^33") - means;
    Some(covariance as f64 / ((spread_x as f64).sqrt() * (spread_y as f64).sqrt()))
}

/// Cosines are ranked on a grid of 2^-24, the resolution of the single-precision products they are made of.
const GRID_BITS: u32 = 24;
const DIGIT_BITS: u32 = GRID_BITS / 2;
const DIGITS: usize = 1 << DIGIT_BITS;

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

/// Work space for [`Ranked::rho`], reused between calls.
#[derive(Default)]
pub(super) struct Scratch {
    /// The other side's [`grid_key`]s.
    pub keys: Vec<u32>,
    by_low_digit: Vec<u64>,
}

/// Equal keys met last among those that share a high digit.
#[derive(Clone, Copy, Default)]
struct TieGroup {
    n_before: u32,
    low: u32,
    n: u32,
    rank_sum: u64,
}

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

    /// [`spearman`] of `scratch.keys` and this side, bit for bit, in linear time.
    ///
    /// A stable scatter by the low digit puts the keys of each high digit in ascending order, so that ranks follow
    /// from counts and ties are neighbours.
    pub fn rho(&self, scratch: &mut Scratch) -> Option<f64> {
        const MASK: u32 = DIGITS as u32 - 1;
        let n = self.ranks.len();
        assert_eq!(scratch.keys.len(), n, "as many keys as ranks");
        let mut starts = [0u32; DIGITS];
        // The key of cosine 1 has the high digit 2^12.
        let mut groups = [TieGroup::default(); DIGITS + 1];
        for &key in &scratch.keys {
            starts[(key & MASK) as usize] += 1;
            groups[(key >> DIGIT_BITS) as usize].n_before += 1;
        }
        to_starts(starts.iter_mut());
        to_starts(groups.iter_mut().map(|group| &mut group.n_before));

        scratch.by_low_digit.resize(n, 0);
        for (&key, &rank) in scratch.keys.iter().zip(&self.ranks) {
            let at = &mut starts[(key & MASK) as usize];
            scratch.by_low_digit[*at as usize] = u64::from(key) << 32 | u64::from(rank);
            *at += 1;
        }

        let mut product = 0;
        let mut ties = 0;
        for &entry in &scratch.by_low_digit {
            let (key, rank) = ((entry >> 32) as u32, entry & u64::from(u32::MAX));
            let group = &mut groups[(key >> DIGIT_BITS) as usize];
            if group.low != key & MASK {
                group.close(&mut product, &mut ties);
                group.low = key & MASK;
            }
            group.n += 1;
            group.rank_sum += rank;
        }
        for group in &mut groups {
            group.close(&mut product, &mut ties);
        }
        rho(n, product, spread_of_ties(n, ties), self.spread)
    }
}

impl TieGroup {
    /// Adds the group's share and makes room for the next one.
    #[inline]
    fn close(&mut self, product: &mut u128, ties: &mut u128) {
        *product += u128::from(2 * self.n_before + self.n + 1) * u128::from(self.rank_sum);
        if self.n > 1 {
            *ties += cube_less_one(self.n as usize);
        }
        self.n_before += self.n;
        self.n = 0;
        self.rank_sum = 0;
    }
}

/// Turns counts into the sum of the counts before each.
fn to_starts<'a>(counts: impl Iterator<Item = &'a mut u32>) {
    let mut sum = 0;
    for count in counts {
        sum += std::mem::replace(count, sum);
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
        assert_eq!(ranked.rho(&mut Scratch { keys: vec![7; 3], ..Scratch::default() }), None);
        assert!(Ranked::new(&[4, 4]).is_constant() && !ranked.is_constant());
    }

    #[test]
    fn the_grid_rounds_to_the_nearest_and_ends_at_one() {
        assert_eq!(grid_key(0.0), 0);
        assert_eq!(grid_key(1.0), 1 << 24);
        assert_eq!(grid_key(1.0 + 1e-7), 1 << 24);
        assert_eq!(grid_key(0.5 + 0.4 / 16_777_216.0), 1 << 23);
        assert_eq!(grid_key(0.5 + 0.6 / 16_777_216.0), (1 << 23) + 1);
    }

    #[test]
    fn many_keys_with_and_without_ties() {
        let mut rng = Rng::new(3);
        for range in [2, 50, 5_000, (1 << 24) + 1] {
            let mut draw = |_| rng.below(range) as u32;
            let x: Vec<u32> = (0..20_000).map(&mut draw).collect();
            let y: Vec<u32> = (0..20_000).map(&mut draw).collect();
            let float = |keys: &[u32]| -> Vec<f64> { keys.iter().map(|&k| f64::from(k)).collect() };
            let want = spearman(&float(&x), &float(&y)).expect("spread");
            let got = Ranked::new(&y).rho(&mut Scratch { keys: x, ..Scratch::default() }).expect("spread");
            assert_eq!(got.to_bits(), want.to_bits());
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
        fn linear_time_equals_sorting(pairs in prop::collection::vec((0u32..=1 << 24, 0u32..9), 1..60), coarse in 0u32..24) {
            let x: Vec<u32> = pairs.iter().map(|p| p.0 >> coarse).collect();
            let y: Vec<u32> = pairs.iter().map(|p| p.1).collect();
            let float = |keys: &[u32]| -> Vec<f64> { keys.iter().map(|&k| f64::from(k)).collect() };
            let want = spearman(&float(&x), &float(&y)).map(f64::to_bits);
            let got = Ranked::new(&y).rho(&mut Scratch { keys: x, ..Scratch::default() }).map(f64::to_bits);
            prop_assert_eq!(got, want);
        }
    }
}
