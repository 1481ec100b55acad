//! A runner whose calls take what a device's costs say, not what this machine takes for them.
//!
//! Never leaves a call out: what it computes is what it would have computed.

use std::time::Duration;

use crate::{
    bench::stopwatch::charge,
    kv::ChunkCounts,
    schedule::{DecodeItem, ModelRunner, RunError, RunnerLayer, SeqState, StepPicks},
    sim::DeviceCost,
    types::{Slot, Token},
};

/// Charges the calling thread, which a [`crate::bench::Stopwatch::Charged`] reads.
///
/// Decode steps have to be tapped: what they take depends on the experts they picked.
pub struct ChargedRunner {
    cost: DeviceCost,
    runner: Box<dyn ModelRunner>,
}

impl ChargedRunner {
    /// `runner` on a device with these costs.
    pub fn new(cost: DeviceCost, runner: Box<dyn ModelRunner>) -> Self {
        Self { cost, runner }
    }
}

fn charge_ms(ms: f64) {
    charge(Duration::from_secs_f64(ms / 1e3));
}

impl RunnerLayer for ChargedRunner {
    fn inner(&self) -> &dyn ModelRunner {
        &*self.runner
    }

    fn inner_mut(&mut self) -> &mut dyn ModelRunner {
        &mut *self.runner
    }

    fn prefill(
        &mut self,
        slot: Slot,
        tokens: &[Token],
        pos: u32,
        last: bool,
        counts: Option<&mut ChunkCounts>,
    ) -> Result<Option<Token>, RunError> {
        charge_ms(self.cost.prefill.step(tokens.len(), pos));
        self.runner.prefill(slot, tokens, pos, last, counts)
    }

    fn decode(&mut self, batch: &[DecodeItem], next: &mut Vec<Token>, picks: &mut StepPicks) -> Result<(), RunError> {
        self.runner.decode(batch, next, picks)?;
        let n_experts = picks.distinct().iter().sum();
        let n_batch = u32::try_from(batch.len()).unwrap_or(u32::MAX);
        let n_kv = batch.iter().map(|item| u64::from(item.pos) + 1).sum();
        charge_ms(self.cost.decode.step(n_experts, n_batch, n_kv));
        Ok(())
    }

    fn import(&mut self, slot: Slot, state: &SeqState) -> Result<(), RunError> {
        charge_ms(self.cost.handoff.step(state.n_tokens));
        self.runner.import(slot, state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        bench::Stopwatch,
        schedule::{FakeModel, FakeRunner},
        sim::{DecodeCost, HandoffCost, PrefillCost},
        types::SamplingParams,
    };

    #[test]
    fn calls_take_what_the_costs_say() {
        let cost = DeviceCost {
            source: String::new(),
            decode: DecodeCost { fixed: 4.0, per_expert: 0.5, per_token: 2.0, per_kv_token: 0.125 },
            prefill: PrefillCost { fixed: 1.0, per_token: 0.25, per_kv_token: 0.0625 },
            handoff: HandoffCost { fixed: 3.0, per_token: 0.5 },
        };
        let model = FakeModel { n_vocab: 100, n_layer: 2, n_expert: 16, n_expert_used: 2 };
        let mut runner = ChargedRunner::new(cost, Box::new(FakeRunner::new(model, 2, 64, Vec::new())));
        let (slot, sampling) = (Slot(0), SamplingParams::default());
        let took = |call: &mut dyn FnMut()| {
            let started = Stopwatch::Charged.start();
            call();
            started.elapsed().as_secs_f64() * 1e3
        };
        RunnerLayer::open(&mut runner, slot, &sampling, &[]).expect("the fake does");
        let prefill = took(&mut || {
            RunnerLayer::prefill(&mut runner, slot, &[1, 2, 3, 4], 0, false, None).expect("the fake does");
            RunnerLayer::prefill(&mut runner, slot, &[5, 6], 4, true, None).expect("the fake does");
        });
        // Four tokens with 1 to 4 of context, two with 5 and 6.
        assert!((prefill - (2.0 + 6.0 * 0.25 + 21.0 * 0.0625)).abs() < 1e-6, "{prefill}");
        let state = runner.runner.export(slot).expect("the fake does");
        let taken_in = took(&mut || {
            RunnerLayer::open(&mut runner, Slot(1), &sampling, &[]).expect("the fake does");
            RunnerLayer::import(&mut runner, Slot(1), &state).expect("the fake does");
        });
        assert!((taken_in - (3.0 + 6.0 * 0.5)).abs() < 1e-6, "{taken_in}");
        let (mut next, mut picks) = (Vec::new(), StepPicks::default());
        let batch = [slot, Slot(1)].map(|slot| DecodeItem { slot, token: 7, pos: 6, draws: true });
        let step =
            took(&mut || RunnerLayer::decode(&mut runner, &batch, &mut next, &mut picks).expect("the fake does"));
        // The same token picks the same two experts of each of two layers.
        assert!((step - (4.0 + 4.0 * 0.5 + 2.0 * 2.0 + 14.0 * 0.125)).abs() < 1e-6, "{step}");
    }
}
