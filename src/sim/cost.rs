use serde::{Deserialize, Serialize};

use crate::sim::ReplayReport;

/// How long a decode step takes: `fixed + per_expert * experts + per_token * tokens`.
///
/// `experts` are the distinct experts of the batch, summed over the MoE layers: the weights the step has to read.
/// The unit of time is the coefficients' own: milliseconds where they were fitted to a device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepCost {
    /// What every step costs.
    pub fixed: f64,
    /// What each distinct expert of each layer adds.
    pub per_expert: f64,
    /// What each token of the batch adds.
    pub per_token: f64,
}

/// What a step of mean experts and tokens is made of.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CostShares {
    /// The part that does not depend on the batch.
    pub fixed: f64,
    /// The part that follows the distinct experts.
    pub experts: f64,
    /// The part that follows the tokens.
    pub tokens: f64,
}

impl Default for CostShares {
    /// A device whose steps wait for weights more than for anything else.
    fn default() -> Self {
        Self { fixed: 0.30, experts: 0.55, tokens: 0.15 }
    }
}

impl StepCost {
    /// One unit of time a step, whatever its batch.
    pub const UNIT: Self = Self { fixed: 1.0, per_expert: 0.0, per_token: 0.0 };

    /// The time of a step of `n_batch` tokens that picked `n_distinct` experts, summed over the layers.
    pub fn step(&self, n_distinct: u32, n_batch: u32) -> f64 {
        self.fixed + self.per_expert * f64::from(n_distinct) + self.per_token * f64::from(n_batch)
    }

    /// The cost under which the mean step of `report` takes the sum of `shares`, split like that; `report` is a replay
    /// of a model of `n_layer` MoE layers.
    pub fn from_shares(shares: CostShares, report: &ReplayReport, n_layer: usize) -> Self {
        let per = |share: f64, n: f64| if n > 0.0 { share / n } else { 0.0 };
        Self {
            fixed: shares.fixed,
            per_expert: per(shares.experts, report.experts_per_step * n_layer as f64),
            per_token: per(shares.tokens, report.batch),
        }
    }

    /// Whether every step takes a finite time above 0.
    pub(super) fn is_usable(&self) -> bool {
        let all = [self.fixed, self.per_expert, self.per_token];
        all.iter().all(|x| x.is_finite() && *x >= 0.0) && (self.fixed > 0.0 || self.per_token > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_add_up() {
        let cost = StepCost { fixed: 0.5, per_expert: 0.25, per_token: 2.0 };
        assert_eq!(cost.step(6, 3).to_bits(), 8.0f64.to_bits());
        assert_eq!(StepCost::UNIT.step(100, 7).to_bits(), 1.0f64.to_bits());
    }

    #[test]
    fn steps_that_take_no_time_are_not_usable() {
        assert!(StepCost::UNIT.is_usable());
        assert!(StepCost { fixed: 0.0, per_expert: 0.0, per_token: 1.0 }.is_usable());
        for fixed in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(!StepCost { fixed, per_expert: 1.0, per_token: 0.0 }.is_usable(), "{fixed}");
        }
    }
}
