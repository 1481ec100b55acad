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
}

impl<'a> ReplayRunner<'a> {
    /// A runner with `n_slots` slots, all empty.
    pub fn new(set: &'a ReplaySet, n_slots: u32) -> Self {
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
        Self { set, info, slots: vec![0; n_slots as usize], seen: vec![0; set.n_words()] }
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

    fn decode(&mut self, batch: &[DecodeItem], next: &mut Vec<Token>, _: &mut StepPicks) -> Result<(), RunError> {
        self.seen.fill(0);
        for item in batch {
            let index = self.slots[item.slot.index()];
            let step = item.pos - self.set.get(index).state.n_tokens;
            let mask = self.set.mask(index, step as usize);
            self.seen.iter_mut().zip(mask).for_each(|(seen, &picked)| *seen |= picked);
        }
        next.clear();
        next.resize(batch.len(), 0);
        Ok(())
    }

    fn export(&mut self, _: Slot) -> Result<SeqState, RunError> {
        Err(RunError::Fatal("a replay has no state to copy".into()))
    }

    fn import(&mut self, slot: Slot, state: &SeqState) -> Result<(), RunError> {
        let bytes = state.bytes.as_ref().try_into();
        let index = bytes.map_err(|_| RunError::Fatal("the hand-off is not a replay's".into()))?;
        self.slots[slot.index()] = u64::from_le_bytes(index) as usize;
        Ok(())
    }

    fn relocate(&mut self, from: Slot, to: Slot) -> Result<(), RunError> {
        self.slots[to.index()] = self.slots[from.index()];
        Ok(())
    }

    fn close(&mut self, _: Slot) -> Result<(), RunError> {
        Ok(())
    }
}
