use serde::{Deserialize, Serialize};

/// A mean and where it lies with 95% confidence.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// The mean of the samples.
    pub mean: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// Student's t: the 97.5th percentile for 1, 2, .. 19 degrees of freedom.
const T_975: [f64; 19] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093,
];

impl Interval {
    /// Student's 95% interval of the mean of 2 to 20 samples, which are taken as independent.
    pub fn of(samples: &[f64]) -> Self {
        let n = samples.len();
        assert!((2..=T_975.len() + 1).contains(&n), "an interval of {n} samples");
        let mean = samples.iter().sum::<f64>() / n as f64;
        let variance = samples.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / (n - 1) as f64;
        let half = T_975[n - 2] * (variance / n as f64).sqrt();
        Self { mean, low: mean - half, high: mean + half }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interval_of_known_samples() {
        // Mean 5, variance 20/3, standard error sqrt(5/3).
        let got = Interval::of(&[2.0, 4.0, 6.0, 8.0]);
        let half = 3.182 * (5.0f64 / 3.0).sqrt();
        assert!((got.mean - 5.0).abs() < 1e-12, "{got:?}");
        assert!((got.low - (5.0 - half)).abs() < 1e-12 && (got.high - (5.0 + half)).abs() < 1e-12, "{got:?}");
        let same = Interval::of(&[0.5; 20]);
        assert_eq!((same.low.to_bits(), same.high.to_bits()), (0.5f64.to_bits(), 0.5f64.to_bits()));
    }
}
