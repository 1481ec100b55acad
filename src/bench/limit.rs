//! How near decode steps come to what memory can do: the bytes they had to read over the time they took.
//!
//! Never counts what a step could have found in a cache as read: it is a limit of memory, not of a small model.

use serde::{Deserialize, Serialize};

/// Bytes that a step has to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepBytes {
    /// Of one expert of one layer.
    pub expert: u64,
    /// Of all other weights.
    pub dense: u64,
    /// Of one token's keys and values.
    pub kv_token: u64,
}

/// One decode step, as it was measured and counted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepSample {
    /// Milliseconds of the forward pass.
    pub ms: f64,
    /// Distinct experts summed over the layers.
    pub n_experts: u32,
    /// Sequences.
    pub n_batch: u32,
    /// Tokens of context, summed over the sequences.
    pub n_kv: u64,
}

/// What the steps of a run read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Limit {
    /// The policy's name.
    pub policy: String,
    /// Bytes a step had to read on average: its distinct experts, the dense weights, the batch's keys and values.
    pub bytes_per_step: f64,
    /// All bytes over all time, in GB/s (1e9 bytes).
    pub gb_per_s: f64,
    /// As a share of the read bandwidth measured on the same cores in the same run; null on other devices.
    pub share: Option<f64>,
}

impl StepBytes {
    /// Of one step.
    pub fn of(&self, step: &StepSample) -> f64 {
        self.dense as f64 + self.experts(step.n_experts.into()) + self.kv_token as f64 * step.n_kv as f64
    }

    /// Of so many distinct experts, summed over the layers.
    pub fn experts(&self, n_experts: f64) -> f64 {
        self.expert as f64 * n_experts
    }
}

impl Limit {
    /// Over `steps`; nothing without any. `bandwidth` is in GB/s.
    pub fn of(policy: &str, steps: &[StepSample], bytes: &StepBytes, bandwidth: Option<f64>) -> Option<Self> {
        let read: f64 = steps.iter().map(|step| bytes.of(step)).sum();
        let ms: f64 = steps.iter().map(|step| step.ms).sum();
        if steps.is_empty() || ms <= 0.0 {
            return None;
        }
        let gb_per_s = read / ms / 1e6;
        let share = bandwidth.map(|bandwidth| gb_per_s / bandwidth);
        Some(Self { policy: policy.to_owned(), bytes_per_step: read / steps.len() as f64, gb_per_s, share })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_over_time_are_gigabytes_a_second() {
        let bytes = StepBytes { expert: 1_000_000, dense: 20_000_000, kv_token: 1000 };
        let step = |ms, n_experts, n_kv| StepSample { ms, n_experts, n_batch: 2, n_kv };
        // 20 + 30 + 1 and 20 + 50 + 3 MB in 4 and 6 ms.
        assert!((bytes.experts(2.5) - 2.5e6).abs() < 1e-6);
        let limit =
            Limit::of("random", &[step(4.0, 30, 1000), step(6.0, 50, 3000)], &bytes, Some(24.8)).expect("steps");
        assert!((limit.bytes_per_step - 62e6).abs() < 1.0 && (limit.gb_per_s - 12.4).abs() < 1e-9);
        assert!(limit.share.is_some_and(|share| (share - 0.5).abs() < 1e-9));
        assert_eq!(Limit::of("random", &[], &bytes, None), None);
    }
}
