use serde::{Deserialize, Serialize};

use crate::route::StepTime;

/// What a device's steps take, in milliseconds: fitted by `eldr bench --fit`, estimated, or written by hand.
///
/// ```
/// use eldr::sim::{DecodeCost, DeviceCost, HandoffCost, PrefillCost};
///
/// let cost = DeviceCost {
///     source: "by hand".to_owned(),
///     decode: DecodeCost { fixed: 2.0, per_expert: 0.01, per_token: 0.05, per_kv_token: 0.0 },
///     prefill: PrefillCost { fixed: 1.0, per_token: 0.1, per_kv_token: 0.0 },
///     handoff: HandoffCost::default(),
/// };
/// assert_eq!(cost.prefill.step(10, 0), 2.0);
/// assert!(cost.decode.step(400, 8, 0) > cost.decode.step(300, 8, 0), "experts have to be read");
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceCost {
    /// Where the numbers come from, in words.
    #[serde(default)]
    pub source: String,
    /// Of a decode step.
    pub decode: DecodeCost,
    /// Of a prefill step.
    pub prefill: PrefillCost,
    /// Of a sequence that moves from one worker to another.
    #[serde(default)]
    pub handoff: HandoffCost,
}

/// A decode step takes `fixed + per_expert * experts + per_token * tokens + per_kv_token * context`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeCost {
    /// What every step takes: dense weights, launches.
    pub fixed: f64,
    /// For each distinct expert of each layer.
    pub per_expert: f64,
    /// For each sequence of the batch.
    pub per_token: f64,
    /// For each token of context, summed over the batch.
    #[serde(default)]
    pub per_kv_token: f64,
}

/// A prefill step of one prompt's chunk takes `fixed + per_token * tokens + per_kv_token * context`, where the context of a
/// token is all tokens up to it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefillCost {
    /// What every chunk takes.
    pub fixed: f64,
    /// For each token of it.
    pub per_token: f64,
    /// For each token of context, summed over the tokens of the chunk: attention, which is felt in long prompts.
    #[serde(default)]
    pub per_kv_token: f64,
}

/// Taking a sequence in takes a decode worker `fixed + per_token * tokens` more in that step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HandoffCost {
    /// For each sequence.
    pub fixed: f64,
    /// For each token of its context.
    pub per_token: f64,
}

impl DecodeCost {
    /// Milliseconds of a step of `n_batch` sequences with `n_kv` tokens of context, that picked `n_experts` distinct
    /// experts, summed over the layers.
    pub fn step(&self, n_experts: u32, n_batch: u32, n_kv: u64) -> f64 {
        self.fixed
            + self.per_expert * f64::from(n_experts)
            + self.per_token * f64::from(n_batch)
            + self.per_kv_token * n_kv as f64
    }
}

impl PrefillCost {
    /// Milliseconds of a chunk of `n_tokens` after the prompt's first `pos`.
    pub fn step(&self, n_tokens: usize, pos: u32) -> f64 {
        self.fixed + self.per_token * n_tokens as f64 + self.per_kv_token * Self::context(n_tokens, pos)
    }

    /// Tokens of context, summed over a chunk of `n_tokens` after the first `pos`.
    pub(crate) fn context(n_tokens: usize, pos: u32) -> f64 {
        let n = n_tokens as f64;
        n * f64::from(pos) + n * (n + 1.0) / 2.0
    }
}

impl HandoffCost {
    /// Milliseconds of a sequence of `n_tokens`.
    pub fn step(&self, n_tokens: u32) -> f64 {
        self.fixed + self.per_token * f64::from(n_tokens)
    }
}

/// Milliseconds beyond which no part of a step can take: twelve days.
const LONGEST_MS: f64 = 1e9;

impl DeviceCost {
    /// What a decode step takes, in milliseconds, as a policy predicts it.
    pub fn step_time(&self) -> StepTime {
        let DecodeCost { fixed, per_expert, per_token, per_kv_token } = self.decode;
        StepTime { fixed, per_expert, per_sequence: per_token, per_token: per_kv_token }
    }

    /// What is wrong with the numbers, in a sentence, or nothing.
    pub fn problem(&self) -> Option<String> {
        let numbers = [
            ("decode.fixed", self.decode.fixed),
            ("decode.per_expert", self.decode.per_expert),
            ("decode.per_token", self.decode.per_token),
            ("decode.per_kv_token", self.decode.per_kv_token),
            ("prefill.fixed", self.prefill.fixed),
            ("prefill.per_token", self.prefill.per_token),
            ("prefill.per_kv_token", self.prefill.per_kv_token),
            ("handoff.fixed", self.handoff.fixed),
            ("handoff.per_token", self.handoff.per_token),
        ];
        let wrong = numbers.iter().find(|(_, ms)| !(ms.is_finite() && *ms >= 0.0));
        if let Some((name, ms)) = wrong {
            return Some(format!("{name} is {ms} ms, which must be a finite number, 0 or more"));
        }
        if let Some((name, ms)) = numbers.iter().find(|(_, ms)| *ms > LONGEST_MS) {
            return Some(format!("{name} is {ms:e} ms, which must be at most {LONGEST_MS:e}"));
        }
        let no_time = self.decode.fixed <= 0.0 && self.decode.per_token <= 0.0;
        no_time.then(|| "decode.fixed and decode.per_token are both 0 ms: a step must take some time".to_owned())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::route::StepLoad;

    pub fn cost() -> DeviceCost {
        DeviceCost {
            source: "planted".into(),
            decode: DecodeCost { fixed: 4.0, per_expert: 0.25, per_token: 0.5, per_kv_token: 0.001 },
            prefill: PrefillCost { fixed: 2.0, per_token: 0.1, per_kv_token: 0.0 },
            handoff: HandoffCost { fixed: 0.5, per_token: 0.01 },
        }
    }

    #[test]
    fn the_parts_add_up() {
        let DeviceCost { decode, prefill, handoff, .. } = cost();
        assert!((decode.step(8, 2, 100) - (4.0 + 2.0 + 1.0 + 0.1)).abs() < 1e-12);
        let load = StepLoad { n_experts: 8.0, n_batch: 2.0, n_context: 100.0 };
        assert_eq!(cost().step_time().of(&load).to_bits(), decode.step(8, 2, 100).to_bits());
        assert!((prefill.step(30, 100) - 5.0).abs() < 1e-12);
        let attending = PrefillCost { per_kv_token: 0.5, ..prefill };
        // Tokens 101, 102 and 103 of a prompt attend to as many.
        assert!((attending.step(3, 100) - (2.0 + 0.3 + 0.5 * 306.0)).abs() < 1e-12);
        assert!((handoff.step(50) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn impossible_numbers_are_named() {
        assert_eq!(cost().problem(), None);
        let mut wrong = cost();
        wrong.prefill.per_token = f64::NAN;
        assert!(wrong.problem().is_some_and(|problem| problem.starts_with("prefill.per_token is NaN")));
        let mut endless = cost();
        endless.handoff.per_token = 1e300;
        assert!(endless.problem().is_some_and(|problem| problem.starts_with("handoff.per_token is 1e300 ms")));
        let decode = DecodeCost { fixed: 0.0, per_expert: 1.0, per_token: 0.0, per_kv_token: 1.0 };
        let still = DeviceCost { decode, ..cost() };
        assert!(still.problem().is_some_and(|problem| problem.contains("must take some time")));
    }
}
