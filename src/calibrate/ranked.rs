//! How well distances over some layers follow one fixed side, exactly or within bounds.
//!
//! Never samples: every pair counts, in bounds too.
//!
//! All of it rests on the keys of [`Cosines`], whole numbers that cut into ranges ("buckets") without ever parting
//! equal keys. A [`Histogram`] holds, for each bucket, how many pairs fall into it and the sum of their ranks on the
//! fixed side. That alone fixes rho up to the order inside the buckets, which [`Ranked::bounds`] bounds; more buckets
//! give closer bounds, fewer stay in a nearer cache. [`Ranked::rho`] goes on to order each bucket.

use rayon::prelude::*;

use crate::calibrate::{
    cosines::{Buckets, Cosines},
    spearman::{covariance, cube_less_one, rho, spread},
    ties::{Group, RankSums, Table},
};

/// There are fewer pairs than this: 2,048 requests have 2,096,128.
const MAX_PAIRS: usize = 1 << 21;

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

/// Buckets that stay in the first-level cache, for bounds within about 0.001 of each other.
pub(super) const COARSE: usize = 1 << 12;

/// Buckets that stay in the second-level cache, for bounds within about 0.0002.
pub(super) const FINE: usize = 1 << 15;

/// Pairs by their cosines, in `B` buckets.
pub(super) struct Histogram<const B: usize> {
    buckets: Buckets,
    groups: Box<[Group; B]>,
}

impl<const B: usize> Histogram<B> {
    /// Counts pairs in `buckets` that have these `ranks` on the other side.
    fn add(&mut self, buckets: &[u32], ranks: &[u32]) {
        for (&bucket, &rank) in buckets.iter().zip(ranks) {
            self.groups[bucket as usize % B].add(rank);
        }
    }
}

/// One value for each of `B` buckets.
fn per_bucket<T: Clone + Default, const B: usize>() -> Box<[T; B]> {
    vec![T::default(); B].into_boxed_slice().try_into().ok().expect("as many as asked for")
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
    pub fn histogram<const B: usize>(&self, cosines: &Cosines<'_>) -> Histogram<B> {
        assert_eq!(cosines.n_pairs(), self.ranks.len(), "the same pairs on both sides");
        let mut histogram = Histogram { buckets: cosines.buckets(B as u32), groups: per_bucket() };
        cosines.for_each_row(histogram.buckets, |start, row| histogram.add(row, &self.ranks[start..]));
        histogram
    }

    /// Spearman's rho of the keys of `cosines` and this side; nothing if a side has no spread. `histogram` is theirs.
    ///
    /// Pairs are put bucket after bucket, as the histogram says how many each will hold, and then by their keys: in a
    /// table with a place for each key a bucket may hold, or sorted in the outermost two, whose keys may be far apart.
    pub fn rho<const B: usize>(&self, cosines: &Cosines<'_>, histogram: &Histogram<B>) -> Option<f64> {
        let n = self.ranks.len();
        let (mut entries, ends) = self.by_bucket(cosines, histogram);
        let mut sums = RankSums::default();
        let mut table = Table::new(histogram.buckets.width());
        let outermost = [0, histogram.buckets.last() as usize];
        let mut rest = entries.as_mut_slice();
        for (bucket, &end) in ends.iter().enumerate() {
            let (entries, others) = rest.split_at_mut(end as usize - sums.before as usize);
            rest = others;
            if outermost.contains(&bucket) {
                sums.add_sorted(entries);
            } else {
                table.add_to(&mut sums, entries);
            }
        }
        rho(n, sums.product(), (cube_less_one(n as u64) - u128::from(sums.ties)) / 3, self.spread)
    }

    /// Keys with ranks below them, bucket after bucket; and where each bucket ends.
    fn by_bucket<const B: usize>(&self, cosines: &Cosines<'_>, histogram: &Histogram<B>) -> (Vec<u64>, Box<[u32; B]>) {
        let mut ends = per_bucket::<u32, B>();
        let mut start = 0;
        for (end, group) in ends.iter_mut().zip(histogram.groups.iter()) {
            *end = start;
            start += group.n() as u32;
        }
        let mut entries = vec![0; self.ranks.len()];
        cosines.for_each_row(Buckets::KEYS, |start, keys| {
            scatter(keys, &self.ranks[start..], histogram.buckets, &mut ends, &mut entries);
        });
        (entries, ends)
    }

    /// Bounds of [`Ranked::rho`], close when keys spread over many buckets. Nothing if one bucket holds them all.
    ///
    /// The order of buckets gives all but the ranks inside each. There the doubled ranks of c keys run from -c + 1 to
    /// c - 1 about their mean in steps of 2; those of the other side lie between 2 and 2n and have a known sum s. The
    /// sum of products is largest where as many as possible of the highest are 2n and the others 2: with
    /// t = s - 2c and w = 2n - 2 that is t (c w - t) / w, or less where t is no multiple of w.
    pub fn bounds<const B: usize>(&self, histogram: &Histogram<B>) -> Option<Bounds> {
        let n = self.ranks.len();
        let width = 2 * n as u64 - 2;
        let (mut sums, mut unknown) = (RankSums::default(), 0);
        for &group in histogram.groups.iter() {
            sums.add(group);
            let n = group.n();
            let above = group.rank_sum() - 2 * n;
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

/// Puts each of `keys` with its rank where its bucket ends so far.
fn scatter<const B: usize>(keys: &[u32], ranks: &[u32], buckets: Buckets, ends: &mut [u32; B], entries: &mut [u64]) {
    for (&key, &rank) in keys.iter().zip(ranks) {
        let end = &mut ends[buckets.of(key) as usize % B];
        entries[*end as usize] = u64::from(key) << 32 | u64::from(rank);
        *end += 1;
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
        // So few buckets that most hold several keys, too.
        let few = ranked.histogram::<16>(&x);
        let (coarse, fine) = (ranked.histogram::<COARSE>(&x), ranked.histogram::<FINE>(&x));
        for rho in [ranked.rho(&x, &few), ranked.rho(&x, &coarse), ranked.rho(&x, &fine)] {
            assert_eq!(rho.map(f64::to_bits), want.map(f64::to_bits));
        }
        let all = [ranked.bounds(&few), ranked.bounds(&coarse), ranked.bounds(&fine)];
        for bounds in all.iter().flatten() {
            let rho = want.unwrap_or_else(|| panic!("{bounds:?} of nothing"));
            assert!(bounds.low <= rho && rho <= bounds.high, "{bounds:?} {rho}");
        }
        all[2]
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
        let histogram = ranked.histogram::<COARSE>(&cosines);
        assert_eq!((ranked.rho(&cosines, &histogram), ranked.bounds(&histogram)), (None, None));
        let (ranked, cosines) = (Ranked::new(&cosines), varied.cosines());
        let histogram = ranked.histogram::<COARSE>(&cosines);
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
