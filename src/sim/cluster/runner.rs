use std::sync::Arc;

use super::{
    DeviceCost,
    drawing::{Coding, Drawing},
};
use crate::{
    calibrate::ExpertRanks,
    kv::ChunkCounts,
    rng::mix,
    schedule::{DecodeItem, ModelRunner, Reuse, RunError, RunnerInfo, SeqState, StateFingerprint, StepPicks},
    sim::ReplaySet,
    types::{SamplingParams, Slot, Token},
};

/// A simulated worker's runner: picks are looked up, and time is charged to a meter instead of passing.
pub(super) struct ClusterRunner<'a> {
    set: &'a ReplaySet,
    cost: &'a DeviceCost,
    coding: Coding,
    /// Tokens of a shared prefix.
    n_prefix: u32,
    ranks: Option<Arc<ExpertRanks>>,
    info: RunnerInfo,
    slots: Vec<Resident>,
    /// What the batch picked: as [`ReplaySet::mask`].
    seen: Vec<u64>,
    charged: Charged,
    /// One step in so many tells what each sequence picked; none does if 0.
    tap_every: u32,
    n_steps: u32,
}

/// What a slot holds.
#[derive(Debug, Clone, Copy, Default)]
struct Resident {
    token: Token,
    index: usize,
    n_prompt: u32,
    /// The recorded step that its first one replays.
    first_step: u32,
    n_steps: u32,
    /// Tokens that were run or found there.
    n_held: u32,
}

/// What one step cost.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Charged {
    pub ms: f64,
    /// Distinct experts summed over the layers; under a placement, those of the busiest rank of each.
    pub n_experts: u32,
    pub n_kv: u64,
}

impl Resident {
    /// The recorded step that the token at `pos` replays.
    fn step(&self, pos: u32) -> usize {
        ((pos - self.n_prompt + self.first_step) % self.n_steps) as usize
    }
}

impl<'a> ClusterRunner<'a> {
    /// A worker of `n_slots` slots whose sequences may begin with a prefix of `n_prefix` tokens.
    pub fn new(
        set: &'a ReplaySet,
        cost: &'a DeviceCost,
        n_slots: u32,
        chunk: u32,
        n_prefix: u32,
        ranks: Option<Arc<ExpertRanks>>,
    ) -> Self {
        let info = RunnerInfo {
            n_slots,
            n_ctx_slot: u32::MAX,
            n_batch: chunk,
            contiguous_slots: false,
            tapped: Vec::new(),
            reuse: Reuse::Prefix,
            replays: false,
            fingerprint: StateFingerprint::default(),
        };
        let slots = vec![Resident::default(); n_slots as usize];
        let (coding, seen) = (Coding::new(set.n_requests()), vec![0; set.n_words()]);
        Self {
            set,
            cost,
            coding,
            n_prefix,
            ranks,
            info,
            slots,
            seen,
            charged: Charged::default(),
            tap_every: 0,
            n_steps: 0,
        }
    }

    /// Lets one step in so many tell what each sequence picked.
    pub fn tapped(self, every: u32) -> Self {
        Self { tap_every: every, ..self }
    }

    /// What was charged since the last call.
    pub fn take_charged(&mut self) -> Charged {
        std::mem::take(&mut self.charged)
    }

    fn resident(&self, token: Token) -> Option<Resident> {
        let Drawing { index, shares, is_copy } = self.coding.drawing(token)?;
        let index = index as usize;
        let recorded = self.set.get(index);
        let n_prompt = recorded.state.n_tokens + if shares { self.n_prefix } else { 0 };
        // Beside its own copy a request would share more experts than any two real ones do.
        let first_step =
            if is_copy { mix(u64::from(token.cast_unsigned())) as u32 % recorded.n_steps.max(1) } else { 0 };
        Some(Resident { token, index, n_prompt, first_step, n_steps: recorded.n_steps, n_held: 0 })
    }

    /// Experts the step has to wait for.
    fn n_experts(&self) -> u32 {
        match &self.ranks {
            None => self.seen.iter().map(|word| word.count_ones()).sum(),
            Some(ranks) => ranks.busiest(&self.seen),
        }
    }
}

impl ModelRunner for ClusterRunner<'_> {
    fn info(&self) -> &RunnerInfo {
        &self.info
    }

    fn open(&mut self, _: Slot, _: &SamplingParams, _: &[Token]) -> Result<(), RunError> {
        Ok(())
    }

    /// Counts nothing: the counts of a whole prompt are known, and stand for those of its chunks.
    fn prefill(
        &mut self,
        slot: Slot,
        tokens: &[Token],
        pos: u32,
        last: bool,
        _: Option<&mut ChunkCounts>,
    ) -> Result<Option<Token>, RunError> {
        self.charged.ms += self.cost.prefill.step(tokens.len(), pos);
        let token = tokens.last().copied().unwrap_or_default();
        // A chunk of nothing but the shared prefix tells no request yet.
        let resident = self.resident(token).unwrap_or_default();
        self.slots[slot.index()] = Resident { n_held: pos + tokens.len() as u32, ..resident };
        Ok(last.then_some(token))
    }

    fn decode(&mut self, batch: &[DecodeItem], next: &mut Vec<Token>, picks: &mut StepPicks) -> Result<(), RunError> {
        self.seen.fill(0);
        next.clear();
        let mut n_kv = 0;
        for item in batch {
            let resident = self.slots[item.slot.index()];
            let mask = self.set.mask(resident.index, resident.step(item.pos));
            self.seen.iter_mut().zip(mask).for_each(|(seen, &picked)| *seen |= picked);
            n_kv += u64::from(item.pos) + 1;
            next.push(resident.token);
            self.slots[item.slot.index()].n_held = item.pos + 1;
        }
        self.n_steps = self.n_steps.wrapping_add(1);
        if self.tap_every > 0 && self.n_steps.is_multiple_of(self.tap_every) {
            let step = |item: &DecodeItem| {
                let resident = self.slots[item.slot.index()];
                (resident.index, resident.step(item.pos))
            };
            self.set.fill(batch.iter().map(step), picks);
        }
        let n_experts = self.n_experts();
        self.charged.ms += self.cost.decode.step(n_experts, batch.len() as u32, n_kv);
        self.charged.n_experts = n_experts;
        self.charged.n_kv = n_kv;
        Ok(())
    }

    fn export(&mut self, slot: Slot) -> Result<SeqState, RunError> {
        let Resident { token, n_held, .. } = self.slots[slot.index()];
        Ok(SeqState { n_tokens: n_held, bytes: Arc::from(token.to_le_bytes()) })
    }

    fn import(&mut self, slot: Slot, state: &SeqState) -> Result<(), RunError> {
        let foreign = || RunError::Fatal("the hand-off is not a simulated one".into());
        let token = Token::from_le_bytes(state.bytes.as_ref().try_into().map_err(|_| foreign())?);
        let resident = self.resident(token).ok_or_else(foreign)?;
        self.slots[slot.index()] = Resident { n_held: state.n_tokens, ..resident };
        self.charged.ms += self.cost.handoff.step(state.n_tokens);
        Ok(())
    }

    fn relocate(&mut self, from: Slot, to: Slot) -> Result<(), RunError> {
        self.slots[to.index()] = self.slots[from.index()];
        Ok(())
    }

    fn close(&mut self, _: Slot) -> Result<(), RunError> {
        Ok(())
    }

    fn keep(&mut self, _: Slot, _: u32) -> Result<(), RunError> {
        Ok(())
    }

    fn copy_prefix(&mut self, _: Slot, _: Slot, _: u32) -> Result<(), RunError> {
        Ok(())
    }
}
