//! Rounding, Pearson's correlation, and evenly spread samples.
//!
//! Never keeps the numbers it is given.

use crate::rng::Rng;

/// Six decimals: enough for every figure, few enough that JSON gives back the same bits.
pub(super) fn round(x: f64) -> f64 {
    // Adding 0 makes a negative zero positive.
    (x * 1e6).round() / 1e6 + 0.0
}

/// Running sums for Pearson's correlation.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Moments {
    n: f64,
    x: f64,
    y: f64,
    xx: f64,
    yy: f64,
    xy: f64,
}

impl Moments {
    /// Adds a pair. Pairs near 0 lose no digits, so subtract what is known of the mean.
    pub(super) fn add(&mut self, x: f64, y: f64) {
        self.n += 1.0;
        self.x += x;
        self.y += y;
        self.xx += x * x;
        self.yy += y * y;
        self.xy += x * y;
    }

    /// Adds the pairs of `other`, of which the same was subtracted.
    pub(super) fn merge(&mut self, other: &Self) {
        self.n += other.n;
        self.x += other.x;
        self.y += other.y;
        self.xx += other.xx;
        self.yy += other.yy;
        self.xy += other.xy;
    }

    /// Pearson's correlation; nothing if a side has no spread.
    pub(super) fn r(&self) -> Option<f64> {
        // What is left of a spread after rounding is no spread.
        let spread = |squares: f64, sum: f64| {
            let spread = squares - sum * sum / self.n;
            (spread > 1e-12 * squares).then_some(spread)
        };
        let (xx, yy) = (spread(self.xx, self.x)?, spread(self.yy, self.y)?);
        Some(((self.xy - self.x * self.y / self.n) / (xx.sqrt() * yy.sqrt())).clamp(-1.0, 1.0))
    }
}

/// `m` of `n` positions, ascending: one drawn from each of m equal stretches, so that no regular pattern in the
/// positions can hide. All of them if there are no more.
pub(super) fn spread_sample(n: usize, m: usize, seed: u64) -> Vec<usize> {
    if n <= m {
        return (0..n).collect();
    }
    let mut rng = Rng::new(seed);
    let edge = |i: usize| (i as u128 * n as u128 / m as u128) as usize;
    (0..m).map(|i| edge(i) + rng.below(edge(i + 1) - edge(i))).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::rng::Rng;

    /// As a textbook has it, in two passes.
    fn pearson(pairs: &[(f64, f64)]) -> f64 {
        let n = pairs.len() as f64;
        let mean_x = pairs.iter().map(|p| p.0).sum::<f64>() / n;
        let mean_y = pairs.iter().map(|p| p.1).sum::<f64>() / n;
        let sum = |f: &dyn Fn(f64, f64) -> f64| pairs.iter().map(|p| f(p.0 - mean_x, p.1 - mean_y)).sum::<f64>();
        sum(&|x, y| x * y) / (sum(&|x, _| x * x) * sum(&|_, y| y * y)).sqrt()
    }

    #[test]
    fn no_spread_has_no_correlation() {
        let mut moments = Moments::default();
        assert_eq!(moments.r(), None);
        for y in [0.1, 0.2, 0.3] {
            moments.add(0.1, y);
        }
        assert_eq!(moments.r(), None);
    }

    #[test]
    fn rounded_numbers_come_back_from_json_bit_for_bit() {
        let mut rng = Rng::new(3);
        for _ in 0..2000 {
            let x = round((rng.uniform() - 0.5) * 200.0);
            let back: f64 = serde_json::from_str(&serde_json::to_string(&x).expect("a number")).expect("a number");
            assert_eq!(x.to_bits(), back.to_bits());
        }
        assert!(round(-1e-9).is_sign_positive());
    }

    proptest! {
            #[test]
            fn r_is_the_textbooks(pairs in prop::collection::vec((0u32..50, 0u32..50), 3..60), cut in 0usize..60) {
                let pairs: Vec<(f64, f64)> = pairs.into_iter().map(|(x, y)| (f64::from(x), f64::from(y))).collect();
                let (first, second) = pairs.split_at(cut.min(pairs.len()));
                let of = |pairs: &[(f64, f64)]| {
                    let mut moments = Moments::default();
                    for &(x, y) in pairs {
     moments.add(x, y);
    }
                    moments
                };
                let mut moments = of(first);
                moments.merge(&of(second));
                match moments.r() {
                    Some(r) => prop_assert!((r - pearson(&pairs)).abs() < 1e-9),
                    None => prop_assert!(pearson(&pairs).is_nan()),
                }
            }

            #[test]
            fn samples_are_spread_and_ascend(n in 0usize..500, m in 1usize..100) {
                let sample = spread_sample(n, m, 1);
                prop_assert_eq!(sample.len(), n.min(m));
                prop_assert!(sample.windows(2).all(|w| w[0] < w[1]));
                prop_assert!(sample.iter().enumerate().all(|(i, &at)| at < n && at >= i * n / m.min(n)));
            }
        }
}
