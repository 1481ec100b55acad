//! How alike requests are over several layers together, as whole numbers that can be ranked.
//!
//! Never ranks them itself.

use rayon::prelude::*;

use crate::calibrate::PairProducts;

/// Cosines are ranked on a grid of 2^-24, the resolution of the single-precision products they are made of. A key is
/// the place of a cosine on it: 0 for -1, 2^24 for 0 and 2^25 for 1.
const KEY_OF_ZERO: u32 = 1 << 24;

/// The largest key.
const LAST_KEY: u32 = 2 * KEY_OF_ZERO;

/// Products of all pairs, summed over a set of layers.
pub(super) struct SummedProducts {
    pairs: Vec<f64>,
    squares: Vec<f64>,
}

/// Keys in order, in equal ranges of 2^`shift` keys, numbered from 0. Keys below `first` are taken for `first`, those
/// above `last` for `last`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Buckets {
    first: u32,
    last: u32,
    shift: u32,
}

impl Buckets {
    /// Every key for itself.
    pub const KEYS: Self = Self { first: 0, last: LAST_KEY, shift: 0 };

    /// At most `n` buckets from `first` or a little before to `last`, as narrow as that allows.
    fn over(first: u32, last: u32, n: u32) -> Self {
        // Even, so that a cosine halfway between two keys rounds to the same one from here as from zero.
        let first = first & !1;
        let shift = (0..).find(|shift| (last >> shift) - (first >> shift) < n).expect("one bucket at last");
        Self { first: first >> shift << shift, last, shift }
    }

    /// The bucket of `key`.
    #[inline]
    pub fn of(self, key: u32) -> u32 {
        (key.clamp(self.first, self.last) - self.first) >> self.shift
    }

    /// Keys that each but the first and the last bucket may hold, from a multiple of this on.
    pub fn width(self) -> usize {
        1 << self.shift
    }

    /// The last bucket.
    pub fn last(self) -> u32 {
        self.of(self.last)
    }
}

/// The cosines of all pairs over the layers of a sum and perhaps one more.
pub(super) struct Cosines<'a> {
    sums: &'a [f64],
    /// Nothing adds 0 to every pair.
    products: Option<&'a [f32]>,
    inverse_lengths: Vec<f64>,
}

impl SummedProducts {
    /// No layer yet, for `n` requests.
    pub fn new(n: usize) -> Self {
        Self { pairs: vec![0.0; n * n.saturating_sub(1) / 2], squares: vec![0.0; n] }
    }

    /// Adds a layer.
    pub fn add(&mut self, layer: &PairProducts) {
        self.pairs.par_iter_mut().with_min_len(1 << 14).zip(&layer.pairs).for_each(|(sum, &x)| *sum += f64::from(x));
        for (sum, &x) in self.squares.iter_mut().zip(&layer.squares) {
            *sum += f64::from(x);
        }
    }

    /// Cosines over the layers added. A request without length is at cosine 0 to all others.
    pub fn cosines(&self) -> Cosines<'_> {
        let inverse_lengths = self.squares.iter().map(|&sum| inverse_length(sum)).collect();
        Cosines { sums: &self.pairs, products: None, inverse_lengths }
    }

    /// Cosines over the layers added and `layer`, the same as if it had been added.
    pub fn cosines_with<'a>(&'a self, layer: &'a PairProducts) -> Cosines<'a> {
        let squares = self.squares.iter().zip(&layer.squares);
        let inverse_lengths = squares.map(|(sum, &x)| inverse_length(sum + f64::from(x))).collect();
        Cosines { sums: &self.pairs, products: Some(&layer.pairs), inverse_lengths }
    }
}

fn inverse_length(square: f64) -> f64 {
    if square > 0.0 { 1.0 / square.sqrt() } else { 0.0 }
}

impl Cosines<'_> {
    /// Pairs there are.
    pub fn n_pairs(&self) -> usize {
        self.sums.len()
    }

    /// Calls `visit` with the first pair and the buckets of the pairs of each request with all later ones.
    pub fn for_each_row(&self, buckets: Buckets, mut visit: impl FnMut(usize, &[u32])) {
        let n = self.inverse_lengths.len();
        let (mut row, zeros) = (vec![0; n], vec![0.0; n]);
        let mut start = 0;
        for i in 0..n {
            let row = &mut row[i + 1..];
            self.row(i, start, &zeros, buckets, row);
            visit(start, row);
            start += row.len();
        }
    }

    /// At most `n` buckets for these cosines, from where a few requests have their lowest to where they have their highest;
    /// one in a thousand is left beyond on either side.
    pub fn buckets(&self, n_buckets: u32) -> Buckets {
        const N_ROWS: usize = 4;
        let n = self.inverse_lengths.len();
        let zeros = vec![0.0; n];
        let mut sample: Vec<u32> = Vec::with_capacity(N_ROWS * n);
        for i in (0..n).step_by(n.div_ceil(2 * N_ROWS).max(1)).take(N_ROWS) {
            let seen = sample.len();
            sample.resize(seen + n - i - 1, 0);
            self.row(i, i * (2 * n - i - 1) / 2, &zeros, Buckets::KEYS, &mut sample[seen..]);
        }
        if sample.is_empty() {
            return Buckets::over(0, LAST_KEY, n_buckets);
        }
        let beyond = sample.len() / 1000;
        let top = sample.len() - 1 - beyond;
        let last = *sample.select_nth_unstable(top).1;
        let first = *sample.select_nth_unstable(beyond).1;
        Buckets::over(first, last, n_buckets)
    }

    /// Buckets of request `i` with all later ones, of which the first is pair `start`.
    fn row(&self, i: usize, start: usize, zeros: &[f32], buckets: Buckets, row: &mut [u32]) {
        // Adding 1.5 * 2^52, or an even number less, rounds to the nearest whole number, halves to even ones, and leaves
        // it in the low bits of the mantissa.
        const ROUND: f64 = (3u64 << 51) as f64;
        let [low, high] = [buckets.first, buckets.last].map(|key| f64::from(key) - f64::from(KEY_OF_ZERO));
        let round = ROUND - low;
        let mine = self.inverse_lengths[i] * f64::from(KEY_OF_ZERO);
        let theirs = &self.inverse_lengths[i + 1..];
        let sums = &self.sums[start..][..theirs.len()];
        let products = &self.products.map_or(zeros, |products| &products[start..])[..theirs.len()];
        for (((bucket, sum), &product), other) in row.iter_mut().zip(sums).zip(products).zip(theirs) {
            let cosine = (sum + f64::from(product)) * (mine * other);
            // Not `clamp`: these two comparisons are one instruction each for several pairs.
            let cosine = if cosine > low { cosine } else { low };
            let cosine = if cosine < high { cosine } else { high };
            *bucket = (cosine + round).to_bits() as u32 >> buckets.shift;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    /// Requests whose products with each other are given.
    fn layer(squares: &[f32], pairs: &[f32]) -> PairProducts {
        PairProducts { pairs: pairs.to_vec(), squares: squares.to_vec() }
    }

    fn keys(cosines: &Cosines<'_>, range: Buckets) -> Vec<u32> {
        let mut all = Vec::new();
        cosines.for_each_row(range, |start, keys| {
            assert_eq!(start, all.len());
            all.extend(keys);
        });
        assert_eq!(all.len(), cosines.n_pairs());
        all
    }

    #[test]
    fn keys_round_to_the_nearest_and_end_at_one() {
        let one = f64::from(1 << 24);
        let mut sums = SummedProducts::new(2);
        sums.squares.fill(1.0);
        for (cosine, want) in [
            (0.0, 1 << 24),
            (1.0, 1 << 25),
            (-1.0, 0),
            (1.0 + 1e-7, 1 << 25),
            (-1.0 - 1e-7, 0),
            (0.5 + 0.4 / one, 3 << 23),
            (0.5 + 0.6 / one, (3 << 23) + 1),
            (-0.5 - 0.6 / one, (1 << 23) - 1),
        ] {
            sums.pairs[0] = cosine;
            assert_eq!(keys(&sums.cosines(), Buckets::KEYS), [want], "{cosine}");
        }
    }

    #[test]
    fn a_layer_beside_the_sum_counts_as_one_in_it() {
        let (a, b) = (layer(&[1.0, 4.0, 0.0], &[1.0, 0.0, 0.0]), layer(&[3.0, 0.0, 0.0], &[0.5, 0.0, 0.0]));
        let mut sums = SummedProducts::new(3);
        sums.add(&a);
        let beside = keys(&sums.cosines_with(&b), Buckets::KEYS);
        // (1 + 0.5) / (2 * 2); the last request has no length.
        assert_eq!(beside, [(1 << 24) + 3 * (1 << 21), 1 << 24, 1 << 24]);
        sums.add(&b);
        assert_eq!(keys(&sums.cosines(), Buckets::KEYS), beside);
        let buckets = Buckets { first: (1 << 24) + 4, last: (1 << 24) + 9, shift: 1 };
        assert_eq!(keys(&sums.cosines(), buckets), [2, 0, 0]);
    }

    #[test]
    fn buckets_are_in_the_order_of_keys_and_as_narrow_as_can_be() {
        for n in [4, 1 << 16] {
            for (first, last) in [(0, 0), (0, LAST_KEY), (7, 9), (LAST_KEY, LAST_KEY), (1 << 24, (1 << 24) + 200_000)] {
                let buckets = Buckets::over(first, last, n);
                assert_eq!(
                    [0, first & !1, last, LAST_KEY].map(|key| buckets.of(key)),
                    [0, 0, buckets.last(), buckets.last()]
                );
                assert!(buckets.last() < n && buckets.first.is_multiple_of(buckets.width() as u32));
                let half = buckets.shift.saturating_sub(1);
                assert!(buckets.shift == 0 || (last >> half) - (first >> half) >= n, "{buckets:?}");
                let some: Vec<u32> = (0..=LAST_KEY).step_by(1001).map(|key| buckets.of(key)).collect();
                assert!(some.is_sorted());
            }
        }
        assert!([0, 1, 77, (1 << 24) - 1, 1 << 24, LAST_KEY].iter().all(|&key| Buckets::KEYS.of(key) == key));
    }

    #[test]
    fn equal_keys_share_a_bucket_in_rows_and_alone() {
        let mut sums = SummedProducts::new(40);
        let mut rng = Rng::new(1);
        // Every other cosine lies halfway between two keys.
        let mut cosine = |i: usize| {
            let key = rng.uniform() * 160.0 - 40.0;
            (if i.is_multiple_of(2) { key.floor() + 0.5 } else { key }) / f64::from(KEY_OF_ZERO)
        };
        sums.pairs.iter_mut().enumerate().for_each(|(i, pair)| *pair = cosine(i));
        sums.squares.fill(1.0);
        let cosines = sums.cosines();
        for n in [8, 32, 1000] {
            for first in [(1 << 24) - 11, 1 << 24] {
                let buckets = Buckets::over(first, (1 << 24) + 77, n);
                let alone: Vec<u32> = keys(&cosines, Buckets::KEYS).iter().map(|&key| buckets.of(key)).collect();
                assert_eq!(keys(&cosines, buckets), alone);
            }
        }
    }

    #[test]
    fn buckets_are_sampled_from_some_requests() {
        let mut sums = SummedProducts::new(3);
        sums.add(&layer(&[1.0; 3], &[0.25, 0.5, 1.0]));
        let buckets = sums.cosines().buckets(16);
        assert_eq!(buckets, Buckets::over((1 << 24) + (1 << 22), LAST_KEY, 16));
        assert_eq!(SummedProducts::new(1).cosines().buckets(16), Buckets::over(0, LAST_KEY, 16));
    }
}
