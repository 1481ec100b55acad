//! Seeded random numbers: the same seed gives the same sequence on every machine.
//!
//! Never reads entropy, a clock or a thread id.

/// A `SplitMix64` generator (Steele, Lea and Flood, OOPSLA 2014): 64 bits of state, full period.
///
/// ```
/// use eldr::rng::Rng;
///
/// let (mut one, mut other) = (Rng::new(7), Rng::new(7));
/// assert_eq!((one.below(10), one.uniform()), (other.below(10), other.uniform()));
/// ```
#[derive(Debug, Clone)]
pub struct Rng {
    state: u64,
}

impl Rng {
    /// A generator whose sequence is fixed by `seed`.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state)
    }

    /// A number in `[0, 1)` with 53 random bits.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// A whole number in `[0, n)`, without bias. Panics if `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        assert!(n > 0, "Rng::below(0)");
        let n = n as u64;
        // Lemire's multiply-shift with rejection of the short interval.
        let threshold = n.wrapping_neg() % n;
        loop {
            let wide = u128::from(self.next_u64()) * u128::from(n);
            if (wide as u64) >= threshold {
                return (wide >> 64) as usize;
            }
        }
    }

    /// The time to the next event of a Poisson process of `rate` events a second, in seconds.
    pub fn exponential(&mut self, rate: f64) -> f64 {
        -(1.0 - self.uniform()).ln() / rate
    }
}

/// The number in `[0, 1)` that belongs to (`seed`, `index`): draw `index` without the draws before it.
pub fn uniform_at(seed: u64, index: u64) -> f64 {
    Rng::new(mix(seed ^ 0x5851_f42d_4c95_7f2d).wrapping_add(mix(index))).uniform()
}

/// Mixes all bits of `z` (the finaliser of `SplitMix64`).
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix_matches_the_published_sequence() {
        let mut rng = Rng::new(1_234_567);
        assert_eq!(rng.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(rng.next_u64(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn below_stays_in_range_and_reaches_every_value() {
        let mut rng = Rng::new(7);
        let mut seen = [0u32; 5];
        for _ in 0..1000 {
            seen[rng.below(5)] += 1;
        }
        assert!(seen.iter().all(|&n| n > 150), "{seen:?}");
    }

    #[test]
    fn a_draw_depends_on_seed_and_index_alone() {
        assert_eq!(uniform_at(3, 9).to_bits(), uniform_at(3, 9).to_bits());
        assert_ne!(uniform_at(3, 9).to_bits(), uniform_at(3, 10).to_bits());
        assert_ne!(uniform_at(3, 9).to_bits(), uniform_at(4, 9).to_bits());
    }
}
