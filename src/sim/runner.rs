use std::sync::Arc;

use crate::{
    kv::ChunkCounts,
    schedule::{DecodeItem, ModelRunner, Reuse, RunError, RunnerInfo, SeqState, StateFingerprint, StepPicks},
    sim::ReplaySet,
    types::{SamplingParams, Slot, Token},
};

/// A decode worker's runner that looks picks up instead of computing them.
///
/// What it counts of a step it keeps; a step takes no time here.
pub(super) struct ReplayRunner<'a> {
    set: &'a ReplaySet,
    info: RunnerInfo,
    /// The request in each slot, where there is one.
    slots: Vec<usize>,
    /// What the batch picked: as [`ReplaySet::mask`].
    seen: Vec<u64>,
    /// One step in so many tells what each sequence picked; none does if 0.
    tap_every: u32,
    n_steps: u32,
    /// Tokens in each slot.
    n_held: Vec<u32>,
}

impl<'a> ReplayRunner<'a> {
    /// A runner with `n_slots` slots, all empty.
    pub fn new(set: &'a ReplaySet, n_slots: u32, tap_every: u32) -> Self {
        let info = RunnerInfo {
            n_slots,
            n_ctx_slot: u32::MAX,
            n_batch: 1,
            contiguous_slots: false,
            tapped: Vec::new(),
            reuse: Reuse::Nothing,
            replays: false,
            fingerprint: StateFingerprint::default(),
        };
        let n = n_slots as usize;
        let seen = vec![0; set.n_words()];
        Self { set, info, slots: vec![0; n], seen, tap_every, n_steps: 0, n_held: vec![0; n] }
    }

    /// Distinct experts of the last step, summed over the layers.
    pub fn n_distinct(&self) -> u32 {
        self.seen.iter().map(|word| word.count_ones()).sum()
    }
}

impl ModelRunner for ReplayRunner<'_> {
    fn info(&self) -> &RunnerInfo {
        &self.info
    }

    fn open(&mut self, _: Slot, _: &SamplingParams, _: &[Token]) -> Result<(), RunError> {
        Ok(())
    }

    fn prefill(
        &mut self,
        _: Slot,
        _: &[Token],
        _: u32,
        _: bool,
        _: Option<&mut ChunkCounts>,
    ) -> Result<Option<Token>, RunError> {
        Err(RunError::Fatal("a replay has no prompts to run".into()))
    }

    fn decode(&mut self, batch: &[DecodeItem], next: &mut Vec<Token>, picks: &mut StepPicks) -> Result<(), RunError> {
        self.seen.fill(0);
        for item in batch {
            let index = self.slots[item.slot.index()];
            let step = item.pos - self.set.get(index).state.n_tokens;
            let mask = self.set.mask(index, step as usize);
            self.seen.iter_mut().zip(mask).for_each(|(seen, &picked)| *seen |= picked);
        }
        self.n_steps = self.n_steps.wrapping_add(1);
        if self.tap_every > 0 && self.n_steps.is_multiple_of(self.tap_every) {
            let step = |item: &DecodeItem| {
                let index = self.slots[item.slot.index()];
                (index, (item.pos - self.set.get(index).state.n_tokens) as usize)
            };
            self.set.fill(batch.iter().map(step), picks);
        }
        for item in batch {
            self.n_held[item.slot.index()] = item.pos + 1;
        }
        next.clear();
        next.resize(batch.len(), 0);
        Ok(())
    }

    fn export(&mut self, slot: Slot) -> Result<SeqState, RunError> {
        let index = self.slots[slot.index()] as u64;
        Ok(SeqState { n_tokens: self.n_held[slot.index()], bytes: Arc::from(index.to_le_bytes()) })
    }

    fn import(&mut self, slot: Slot, state: &SeqState) -> Result<(), RunError> {
        let bytes = state.bytes.as_ref().try_into();
        let index = bytes.map_err(|_| RunError::Fatal("the hand-off is not a replay's".into()))?;
        self.slots[slot.index()] = u64::from_le_bytes(index) as usize;
        self.n_held[slot.index()] = state.n_tokens;
        Ok(())
    }

    fn relocate(&mut self, from: Slot, to: Slot) -> Result<(), RunError> {
        self.slots[to.index()] = self.slots[from.index()];
        self.n_held[to.index()] = self.n_held[from.index()];
        Ok(())
    }

    fn close(&mut self, _: Slot) -> Result<(), RunError> {
        Ok(())
    }
}
