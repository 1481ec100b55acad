//! How alike requests are over several layers together, as whole numbers that can be ranked.
//!
//! Never ranks them itself.

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

/// Keys in order, in so many equal ranges, numbered from 0. Keys below `first` are taken for `first`, those above `last`
/// for `last`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Buckets {
    first: u32,
    last: u32,
    /// Buckets a key, at most 1.
    scale: f64,
}

impl Buckets {
    /// Every key for itself.
    pub const KEYS: Self = Self { first: 0, last: LAST_KEY, scale: 1.0 };

    /// At most `n` buckets from `first` to `last`.
    fn over(first: u32, last: u32, n: u32) -> Self {
        let width = f64::from(last - first).max(1.0);
        Self { first, last, scale: (f64::from(n - 1) / width).min(1.0) }
    }

    /// The bucket of `key`.
    pub fn of(self, key: u32) -> u32 {
        Scale::new(self).bucket(f64::from(key) - f64::from(KEY_OF_ZERO))
    }
}

/// [`Buckets`] in numbers that suit cosines times 2^24.
#[derive(Clone, Copy)]
struct Scale {
    low: f64,
    high: f64,
    factor: f64,
}

impl Scale {
    fn new(buckets: Buckets) -> Self {
        let place = |key: u32| f64::from(key) - f64::from(KEY_OF_ZERO);
        Self { low: place(buckets.first), high: place(buckets.last), factor: buckets.scale }
    }

    /// The bucket of a cosine times 2^24: rounded to its key first, so that equal keys share a bucket.
    #[inline]
    fn bucket(self, cosine: f64) -> u32 {
        // Adding 1.5 * 2^52 rounds to the nearest whole number; adding 2^52 to one that is not negative leaves it in the
        // low bits of the mantissa, too.
        const ROUND: f64 = (3u64 << 51) as f64;
        const BITS: f64 = (1u64 << 52) as f64;
        // Not `clamp`: these two comparisons are one instruction each for several pairs.
        let cosine = if cosine > self.low { cosine } else { self.low };
        let cosine = if cosine < self.high { cosine } else { self.high };
        let key = (cosine + ROUND) - ROUND;
        ((key - self.low) * self.factor + BITS).to_bits() as u32
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
        for (sum, &x) in self.pairs.iter_mut().zip(&layer.pairs) {
            *sum += f64::from(x);
        }
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
        let scale = Scale::new(buckets);
        let mine = self.inverse_lengths[i] * f64::from(KEY_OF_ZERO);
        let theirs = &self.inverse_lengths[i + 1..];
        let sums = &self.sums[start..][..theirs.len()];
        let products = &self.products.map_or(zeros, |products| &products[start..])[..theirs.len()];
        for (((bucket, sum), &product), other) in row.iter_mut().zip(sums).zip(products).zip(theirs) {
            *bucket = scale.bucket((sum + f64::from(product)) * (mine * other));
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
        let buckets = Buckets { first: (1 << 24) + 5, last: (1 << 24) + 9, scale: 0.5 };
        assert_eq!(keys(&sums.cosines(), buckets), [2, 0, 0]);
    }

    #[test]
    fn buckets_are_in_the_order_of_keys() {
        for n in [4, 1 << 16] {
            for (first, last) in [(0, 0), (0, LAST_KEY), (7, 9), (LAST_KEY, LAST_KEY), (1 << 24, (1 << 24) + 200_000)] {
                let buckets = Buckets::over(first, last, n);
                let of: Vec<u32> = [0, first, last, LAST_KEY].iter().map(|&key| buckets.of(key)).collect();
                assert_eq!(of, [0, 0, (last - first).min(n - 1), (last - first).min(n - 1)], "{buckets:?}");
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
        sums.pairs.fill_with(|| rng.uniform() * 1e-5 - 2e-6);
        sums.squares.fill(1.0);
        let cosines = sums.cosines();
        let buckets = Buckets::over((1 << 24) - 11, (1 << 24) + 77, 32);
        let alone: Vec<u32> = keys(&cosines, Buckets::KEYS).iter().map(|&key| buckets.of(key)).collect();
        assert_eq!(keys(&cosines, buckets), alone);
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
