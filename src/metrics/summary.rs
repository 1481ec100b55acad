use serde::{Deserialize, Serialize};

/// Median, 99th percentile and mean of a set of samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The median.
    pub p50: f64,
    /// The 99th percentile.
    pub p99: f64,
    /// The arithmetic mean.
    pub mean: f64,
}

impl Summary {
    /// The summary of `samples` (none is NaN), which are put in order; nothing if there are none.
    ///
    /// Percentiles are exact, by nearest rank: p% of n samples is the ceil(n * p / 100)-th smallest, so a percentile is
    /// always one of the samples, and the 99th of fewer than 100 is the largest. The order samples came in does not
    /// matter to the last bit.
    pub fn of(samples: &mut [f64]) -> Option<Self> {
        if samples.is_empty() {
            return None;
        }
        samples.sort_unstable_by(f64::total_cmp);
        let mean = samples.iter().sum::<f64>() / samples.len() as f64;
        Some(Self { p50: nearest_rank(samples, 50), p99: nearest_rank(samples, 99), mean })
    }
}

/// The `percent`-th percentile (1 to 100) of samples in ascending order.
fn nearest_rank(ascending: &[f64], percent: usize) -> f64 {
    ascending[(ascending.len() * percent).div_ceil(100) - 1]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn percentiles_are_the_nearest_rank() {
        let mut hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(Summary::of(&mut hundred), Some(Summary { p50: 50.0, p99: 99.0, mean: 50.5 }));
        let mut odd = [30.0, 10.0, 20.0];
        assert_eq!(Summary::of(&mut odd), Some(Summary { p50: 20.0, p99: 30.0, mean: 20.0 }));
        assert_eq!(Summary::of(&mut [7.0]), Some(Summary { p50: 7.0, p99: 7.0, mean: 7.0 }));
        assert_eq!(Summary::of(&mut []), None);
    }

    proptest! {
        #[test]
        fn a_percentile_is_the_smallest_sample_that_enough_samples_do_not_pass(
            mut samples in prop::collection::vec(-1e6f64..1e6, 1..300),
        ) {
            let summary = Summary::of(&mut samples).expect("not empty");
            for (percent, got) in [(50, summary.p50), (99, summary.p99)] {
                let reaches = |x: f64| samples.iter().filter(|&&y| y <= x).count() * 100 >= percent * samples.len();
                let want = samples.iter().copied().filter(|&x| reaches(x)).fold(f64::INFINITY, f64::min);
                prop_assert_eq!(got.to_bits(), want.to_bits());
            }
        }

        #[test]
        fn the_order_of_samples_does_not_matter(mut samples in prop::collection::vec(-1e6f64..1e6, 1..100)) {
            let mut reversed: Vec<f64> = samples.iter().rev().copied().collect();
            prop_assert_eq!(Summary::of(&mut samples), Summary::of(&mut reversed));
        }
    }
}
