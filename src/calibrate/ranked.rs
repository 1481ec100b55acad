//! How well distances over some layers follow one fixed side, exactly or within bounds.
//!
//! Never samples: every pair counts, in bounds too.

use rayon::prelude::*;

use crate::calibrate::{
    cosines::{Buckets, Cosines},
    spearman::{covariance, cube_less_one, rho, spread},
};

/// There are fewer pairs than this: 2,048 requests have 2,096,128.
const MAX_PAIRS: usize = 1 << N_BITS;

const N_BITS: u32 = 21;

/// One side of many correlations: ranked once.
pub(super) struct Ranked {
    /// Doubled ranks.
    ranks: Vec<u32>,
    spread: u128,
}

/// Rho is not below `low` and not above `high`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Bounds {
    pub low: f64,
    pub high: f64,
}

/// As many as fit the second-level cache beside what streams through it.
const N_BUCKETS: usize = 1 << 15;

const RANK_SUM_BITS: u32 = 2 * N_BITS + 1;
const ONE_PAIR: u64 = 1 << RANK_SUM_BITS;

/// How many pairs each bucket holds, and the sum of their doubled ranks on the other side.
pub(super) struct Histogram {
    buckets: Buckets,
    /// The sum, at most n (n + 1), below the number: with n below 2^21 both fit one word.
    words: Box<[u64; N_BUCKETS]>,
}

impl Histogram {
    fn of(ranks: &[u32], cosines: &Cosines<'_>) -> Self {
        let mut words: Box<[u64; N_BUCKETS]> = vec![0; N_BUCKETS].into_boxed_slice().try_into().expect("a whole table");
        let buckets = cosines.buckets(N_BUCKETS as u32);
        cosines.for_each_row(buckets, |start, row| {
            for (&bucket, &rank) in row.iter().zip(&ranks[start..]) {
                words[bucket as usize % N_BUCKETS] += ONE_PAIR | u64::from(rank);
            }
        });
        Self { buckets, words }
    }

    fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.words.iter().map(|&word| (word >> RANK_SUM_BITS, word & (ONE_PAIR - 1)))
    }
}

/// Sums over groups of pairs that tie on one side, added in order. With n below 2^21 none reaches 2^64.
#[derive(Default)]
struct RankSums {
    /// Pairs in the groups so far.
    before: u64,
    /// Pairs before each group times the sum of its ranks on the other side.
    below: u64,
    /// One more than the pairs of each group times that sum.
    within: u64,
    /// n^3 - n of the n pairs of each group.
    ties: u64,
}

impl RankSums {
    #[inline]
    fn add(&mut self, n: u64, rank_sum: u64) {
        self.below += self.before * rank_sum;
        self.within += (n + 1) * rank_sum;
        self.ties += n * n * n - n;
        self.before += n;
    }

    /// The sum of products of doubled ranks, those of a group being twice the pairs before it, its own, and one more.
    fn product(&self) -> u128 {
        2 * u128::from(self.below) + u128::from(self.within)
    }
}

impl Ranked {
    /// Ranks the pairs by their cosines.
    pub fn new(cosines: &Cosines<'_>) -> Self {
        let mut keys = Vec::with_capacity(cosines.n_pairs());
        cosines.for_each_row(Buckets::KEYS, |_, row| keys.extend(row));
        Self::of_keys(&keys)
    }

    fn of_keys(keys: &[u32]) -> Self {
        assert!(keys.len() < MAX_PAIRS, "{} pairs are too many to compare", keys.len());
        let mut sorted: Vec<u64> = keys.iter().zip(0u64..).map(|(&key, pair)| u64::from(key) << 32 | pair).collect();
        sorted.par_sort_unstable();
        let mut ranks = vec![0; keys.len()];
        let mut before = 0;
        for ties in sorted.chunk_by(|a, b| a >> 32 == b >> 32) {
            for &entry in ties {
                ranks[entry as u32 as usize] = 2 * before + ties.len() as u32 + 1;
            }
            before += ties.len() as u32;
        }
        Self { spread: spread(&ranks), ranks }
    }

    /// True if all keys are equal, which leaves every correlation undefined.
    pub fn is_constant(&self) -> bool {
        self.spread == 0
    }

    /// The pairs by their cosines, roughly.
    pub fn histogram(&self, cosines: &Cosines<'_>) -> Histogram {
        assert_eq!(cosines.n_pairs(), self.ranks.len(), "the same pairs on both sides");
        Histogram::of(&self.ranks, cosines)
    }

    /// Spearman's rho of the keys of `cosines` and this side; nothing if a side has no spread. `histogram` is theirs.
    pub fn rho(&self, cosines: &Cosines<'_>, histogram: &Histogram) -> Option<f64> {
        let n = self.ranks.len();
        let (mut sorted, ends) = self.by_bucket(cosines, histogram);
        let mut sums = RankSums::default();
        let mut rest = sorted.as_mut_slice();
        for end in ends {
            let (bucket, others) = rest.split_at_mut(end as usize - sums.before as usize);
            rest = others;
            bucket.sort_unstable();
            for group in bucket.chunk_by(|a, b| a >> 32 == b >> 32) {
                sums.add(group.len() as u64, group.iter().map(|entry| entry & u64::from(u32::MAX)).sum());
            }
        }
        rho(n, sums.product(), (cube_less_one(n as u64) - u128::from(sums.ties)) / 3, self.spread)
    }

    /// Keys with ranks below them, bucket after bucket; and where each bucket ends.
    fn by_bucket(&self, cosines: &Cosines<'_>, histogram: &Histogram) -> (Vec<u64>, Vec<u32>) {
        let mut ends = Vec::with_capacity(N_BUCKETS);
        let mut start = 0;
        for (n, _) in histogram.iter() {
            ends.push(start);
            start += n as u32;
        }
        let mut sorted = vec![0; self.ranks.len()];
        cosines.for_each_row(Buckets::KEYS, |start, keys| {
            for (&key, &rank) in keys.iter().zip(&self.ranks[start..]) {
                let end = &mut ends[histogram.buckets.of(key) as usize];
                sorted[*end as usize] = u64::from(key) << 32 | u64::from(rank);
                *end += 1;
            }
        });
        (sorted, ends)
    }

    /// Bounds of [`Ranked::rho`], close when keys spread over many buckets. Nothing if one bucket holds them all.
    ///
    /// The order of buckets gives all but the ranks inside each. There the doubled ranks of c keys run from -c + 1 to
    /// c - 1 about their mean in steps of 2; those of the other side lie between 2 and 2n and have a known sum s. The
    /// sum of products is largest where as many as possible of the highest are 2n and the others 2: with
    /// t = s - 2c and w = 2n - 2 that is t (c w - t) / w, or less where t is no multiple of w.
    pub fn bounds(&self, histogram: &Histogram) -> Option<Bounds> {
        let n = self.ranks.len();
        let width = 2 * n as u64 - 2;
        let (mut sums, mut unknown) = (RankSums::default(), 0);
        for (n, rank_sum) in histogram.iter() {
            sums.add(n, rank_sum);
            let above = rank_sum - 2 * n;
            unknown += u128::from(above) * u128::from(n * width - above);
        }
        let ties = u128::from(sums.ties);
        let all = cube_less_one(n as u64);
        if all == ties || self.spread == 0 {
            return None;
        }
        let unknown = i128::try_from(unknown.div_ceil(u128::from(width))).expect("at most n^3");
        let covariance = covariance(n, sums.product());
        let limit = |covariance: i128, spread: u128| {
            covariance as f64 / ((spread as f64 / 3.0).sqrt() * (self.spread as f64).sqrt())
        };
        // The smaller spread is that of ties throughout each bucket; it takes both bounds farther from 0.
        let spread_for = |outward: bool| if outward { all - ties } else { all };
        let low = covariance - unknown;
        let high = covariance + unknown;
        // Wider than any rounding of these few steps.
        let margin = 1e-12;
        Some(Bounds { low: limit(low, spread_for(low < 0)) - margin, high: limit(high, spread_for(high > 0)) + margin })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        calibrate::{cosines::SummedProducts, pair_products, spearman},
        rng::Rng,
    };
    use ndarray::Array2;

    fn keys(cosines: &Cosines<'_>) -> Vec<f64> {
        let mut all = Vec::new();
        cosines.for_each_row(Buckets::KEYS, |_, row| all.extend(row.iter().map(|&key| f64::from(key))));
        all
    }

    fn products(vectors: &Array2<f64>) -> SummedProducts {
        let mut sums = SummedProducts::new(vectors.nrows());
        sums.add(&pair_products(vectors));
        sums
    }

    /// Rho by buckets, and its bounds, agree with the plain function.
    fn check(x: &Array2<f64>, y: &Array2<f64>) -> Option<Bounds> {
        let (x, y) = (products(x), products(y));
        let (x, y) = (x.cosines(), y.cosines());
        let ranked = Ranked::new(&y);
        let want = spearman(&keys(&x), &keys(&y));
        let histogram = ranked.histogram(&x);
        assert_eq!(ranked.rho(&x, &histogram).map(f64::to_bits), want.map(f64::to_bits));
        let bounds = ranked.bounds(&histogram);
        match (bounds, want) {
            (Some(bounds), Some(rho)) => assert!(bounds.low <= rho && rho <= bounds.high, "{bounds:?} {rho}"),
            (Some(bounds), None) => panic!("{bounds:?} of nothing"),
            (None, _) => {}
        }
        bounds
    }

    #[test]
    fn equals_the_plain_function_with_and_without_ties() {
        let mut rng = Rng::new(3);
        for range in [2, 3, 50, 1_000_000] {
            for n in [2, 3, 7, 120] {
                let x = Array2::from_shape_fn((n, 6), |_| rng.below(range) as f64);
                let noise = Array2::from_shape_fn((n, 6), |_| rng.below(range) as f64);
                let like = &x + &noise * 0.5;
                let signed = &x - range as f64 / 2.0;
                for y in [&noise, &like, &x, &signed] {
                    check(&x, y);
                    check(&signed, y);
                }
            }
        }
    }

    #[test]
    fn bounds_are_close_when_keys_are_spread() {
        let mut rng = Rng::new(4);
        let x = Array2::from_shape_fn((300, 40), |_| rng.uniform());
        let y = &x + &Array2::from_shape_fn((300, 40), |_| rng.uniform());
        let bounds = check(&x, &y).expect("spread");
        assert!(bounds.high - bounds.low < 1e-3, "{bounds:?}");
    }

    #[test]
    fn a_few_far_pairs_beyond_the_sampled_range_are_ranked_exactly() {
        let mut rng = Rng::new(5);
        let mut x = Array2::from_shape_fn((200, 8), |_| 100.0 + rng.uniform());
        // Requests that no sampled row belongs to.
        for far in [13, 77, 151] {
            x.row_mut(far).fill(0.0);
            x[[far, far % 8]] = 1.0;
        }
        let y = Array2::from_shape_fn((200, 8), |_| rng.uniform());
        check(&x, &y);
        check(&y, &x);
    }

    #[test]
    fn a_constant_side_leaves_rho_undefined() {
        let constant = products(&Array2::from_elem((4, 3), 2.0));
        let varied = products(&Array2::from_shape_fn((4, 3), |(i, j)| (i * j + i) as f64));
        let ranked = Ranked::new(&varied.cosines());
        assert!(!ranked.is_constant() && Ranked::new(&constant.cosines()).is_constant());
        let cosines = constant.cosines();
        let histogram = ranked.histogram(&cosines);
        assert_eq!((ranked.rho(&cosines, &histogram), ranked.bounds(&histogram)), (None, None));
        let (ranked, cosines) = (Ranked::new(&cosines), varied.cosines());
        let histogram = ranked.histogram(&cosines);
        assert_eq!((ranked.rho(&cosines, &histogram), ranked.bounds(&histogram)), (None, None));
    }

    proptest! {
        #[test]
        fn equals_the_plain_function(n in 2usize..12, cells in prop::collection::vec(-3i8..4, 2 * 12 * 3)) {
            let cell = |side: usize, i: usize, j: usize| f64::from(cells[(side * 12 + i) * 3 + j]);
            let [x, y] = [0, 1].map(|side| Array2::from_shape_fn((n, 3), |(i, j)| cell(side, i, j)));
            check(&x, &y);
        }
    }
}
