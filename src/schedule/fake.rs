use std::sync::Arc;

use crate::{
    kv::ChunkCounts,
    rng::mix,
    schedule::{DecodeItem, ModelRunner, Reuse, RunError, RunnerInfo, SeqState, StateFingerprint, StepPicks},
    types::{SamplingParams, Slot, Token},
};

/// A toy model whose next token is a hash of all tokens before it, so that a lost, doubled or misplaced token changes
/// everything after it.
#[derive(Debug, Clone, Copy)]
pub struct FakeModel {
    /// Tokens are `0..n_vocab`; token 0 ends the text.
    pub n_vocab: u32,
    /// MoE layers.
    pub n_layer: u32,
    /// Experts a layer; 0 is a dense model.
    pub n_expert: u32,
    /// Experts a token picks.
    pub n_expert_used: u32,
}

impl FakeModel {
    /// The token after `tokens`.
    pub fn next(&self, tokens: &[Token], sampling: &SamplingParams) -> Token {
        let hash = tokens.iter().fold(mix(sampling.seed), |hash, &token| mix(hash ^ token as u64));
        (hash % u64::from(self.n_vocab)) as Token
    }

    /// The experts `token` picks in `layer`: `n_expert_used` neighbours.
    pub fn picks(&self, token: Token, layer: u32) -> Vec<u32> {
        let first = mix(token as u64 ^ (u64::from(layer) << 32)) % u64::from(self.n_expert);
        (0..self.n_expert_used).map(|i| (first as u32 + i) % self.n_expert).collect()
    }

    /// The whole output for `prompt`, computed at once: what any number of workers must reproduce.
    pub fn complete(&self, prompt: &[Token], sampling: &SamplingParams, max_tokens: u32) -> Vec<Token> {
        self.complete_as(|token| token, prompt, sampling, max_tokens)
    }

    /// As [`FakeModel::complete`], for runners that are [`FakeRunner::path_dependent`].
    pub fn complete_by_path(&self, prompt: &[Token], sampling: &SamplingParams, max_tokens: u32) -> Vec<Token> {
        self.complete_as(decoded, prompt, sampling, max_tokens)
    }

    fn complete_as(
        &self,
        keep: impl Fn(Token) -> Token,
        prompt: &[Token],
        sampling: &SamplingParams,
        max_tokens: u32,
    ) -> Vec<Token> {
        let (mut held, mut output) = (prompt.to_vec(), Vec::new());
        while output.len() < max_tokens as usize {
            let token = self.next(&held, sampling);
            if token == 0 && !sampling.ignore_eos {
                break;
            }
            held.push(keep(token));
            output.push(token);
        }
        output
    }
}

/// What a decoded token leaves where it matters how a token was computed.
fn decoded(token: Token) -> Token {
    !token
}

/// A failure to inject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The n-th call of decode (from 0) fails and leaves everything as it was.
    DecodeRestored(u64),
    /// The n-th call of decode fails and takes the worker with it.
    DecodeFatal(u64),
    /// The n-th call of decode panics.
    DecodePanic(u64),
    /// The n-th call of prefill fails and leaves everything as it was.
    PrefillRestored(u64),
    /// The n-th call of prefill fails and takes the worker with it.
    PrefillFatal(u64),
    /// The n-th import fails and leaves the slot empty.
    ImportRestored(u64),
    /// The n-th export fails.
    ExportRestored(u64),
    /// The n-th keeping of a slot, or copying of a prefix, fails and leaves the slot empty.
    ReuseRestored(u64),
}

/// What a sequence that draws nothing gets: no text may have it.
const NO_TOKEN: Token = Token::MIN;

/// How far a sequence can be cut back where the fake memory has a sliding window.
const FAKE_WINDOW: u32 = 10;

/// A [`ModelRunner`] over a [`FakeModel`], with scripted faults, that panics when the scheduler breaks a rule.
#[derive(Debug)]
pub struct FakeRunner {
    model: FakeModel,
    info: RunnerInfo,
    slots: Vec<Sequence>,
    faults: Vec<Fault>,
    path_dependent: bool,
    n_decode: u64,
    n_prefill: u64,
    n_import: u64,
    n_export: u64,
    n_reuse: u64,
}

#[derive(Debug, Clone, Default)]
struct Sequence {
    /// While it is open.
    sampling: Option<SamplingParams>,
    tokens: Vec<Token>,
    /// Somebody else has moved its positions.
    shifted: bool,
}

impl FakeRunner {
    /// A runner with `n_slots` slots of `n_ctx_slot` tokens, which taps prefill if the model has experts.
    pub fn new(model: FakeModel, n_slots: u32, n_ctx_slot: u32, faults: Vec<Fault>) -> Self {
        let tapped = if model.n_expert == 0 { Vec::new() } else { (0..model.n_layer).collect() };
        let info = RunnerInfo {
            n_slots,
            n_ctx_slot,
            n_batch: 512,
            contiguous_slots: true,
            tapped,
            reuse: Reuse::Prefix,
            replays: false,
            fingerprint: StateFingerprint(vec![("model", format!("{model:?}"))]),
        };
        let slots = vec![Sequence::default(); n_slots as usize];
        Self {
            model,
            info,
            slots,
            faults,
            path_dependent: false,
            n_decode: 0,
            n_prefill: 0,
            n_import: 0,
            n_export: 0,
            n_reuse: 0,
        }
    }

    /// The same runner, for a model whose memory allows this much.
    #[must_use]
    pub fn reusing(mut self, reuse: Reuse) -> Self {
        self.info.reuse = reuse;
        self
    }

    /// The same runner, which counts the picks of prompts in these layers.
    #[must_use]
    pub fn tapping(mut self, layers: &[u32]) -> Self {
        self.info.tapped = layers.to_vec();
        self
    }

    /// The same runner, for a model in which a decoded token leaves something else than one that ran with a prompt, so
    /// that the text tells the two apart; with `replays`, what was drawn is decoded again after a loss.
    #[must_use]
    pub fn path_dependent(mut self, replays: bool) -> Self {
        self.path_dependent = true;
        self.info.replays = replays;
        self
    }

    /// Slots that hold an open sequence.
    pub fn n_open(&self) -> usize {
        self.slots.iter().filter(|slot| slot.sampling.is_some()).count()
    }

    /// The tokens in a slot, open or kept, as they were left there.
    pub fn tokens(&self, slot: Slot) -> &[Token] {
        &self.slots[slot.index()].tokens
    }

    /// Moves a slot's positions behind the scheduler's back, as llama.cpp's context shift does; an empty one has none.
    pub fn shift(&mut self, slot: Slot) {
        let place = &mut self.slots[slot.index()];
        place.shifted |= !place.tokens.is_empty();
    }

    /// Whether a slot's positions have been moved.
    pub fn is_shifted(&self, slot: Slot) -> bool {
        self.slots[slot.index()].shifted
    }

    /// llama.cpp takes no token whose position does not follow the last one.
    fn check_positions(&self, slot: Slot) -> Result<(), RunError> {
        if self.is_shifted(slot) {
            return Err(RunError::Restored(format!("the positions of slot {slot} were moved")));
        }
        Ok(())
    }

    fn sequence(&mut self, slot: Slot) -> &mut Sequence {
        let sequence = &mut self.slots[slot.index()];
        assert!(sequence.sampling.is_some(), "slot {slot} is not open");
        sequence
    }

    fn reuse_fails(&mut self) -> Result<(), RunError> {
        let call = self.n_reuse;
        self.n_reuse += 1;
        if self.has(&Fault::ReuseRestored(call)) {
            return Err(RunError::Restored(format!("reuse {call} failed as scripted")));
        }
        Ok(())
    }

    /// Whether a beginning of `n_tokens` may be made of `n_held` tokens.
    fn check_cut(&self, n_tokens: u32, n_held: usize) {
        let held = n_held as u32;
        match self.info.reuse {
            Reuse::Prefix | Reuse::Window => assert!(n_tokens <= held, "{n_tokens} tokens of {held}"),
            Reuse::Whole => assert_eq!(n_tokens, held, "this memory can not be cut"),
            Reuse::Nothing => panic!("this runner keeps nothing"),
        }
    }

    /// A window of [`FAKE_WINDOW`] tokens reaches back that far.
    fn is_out_of_window(&self, n_tokens: u32, n_held: usize) -> bool {
        self.info.reuse == Reuse::Window && n_held as u32 - n_tokens > FAKE_WINDOW
    }

    fn has(&self, fault: &Fault) -> bool {
        self.faults.contains(fault)
    }
}

impl ModelRunner for FakeRunner {
    fn info(&self) -> &RunnerInfo {
        &self.info
    }

    fn open(&mut self, slot: Slot, sampling: &SamplingParams, _generated: &[Token]) -> Result<(), RunError> {
        let place = &mut self.slots[slot.index()];
        assert!(place.sampling.is_none(), "slot {slot} is taken");
        place.sampling = Some(sampling.clone());
        Ok(())
    }

    fn prefill(
        &mut self,
        slot: Slot,
        tokens: &[Token],
        pos: u32,
        last: bool,
        counts: Option<&mut ChunkCounts>,
    ) -> Result<Option<Token>, RunError> {
        let call = self.n_prefill;
        self.n_prefill += 1;
        if self.has(&Fault::PrefillRestored(call)) {
            return Err(RunError::Restored(format!("prefill {call} failed as scripted")));
        }
        if self.has(&Fault::PrefillFatal(call)) {
            return Err(RunError::Fatal(format!("prefill {call} broke the worker as scripted")));
        }
        self.check_positions(slot)?;
        let (model, n_ctx_slot, tapped) = (self.model, self.info.n_ctx_slot, self.info.tapped.clone());
        let sequence = self.sequence(slot);
        assert_eq!(sequence.tokens.len() as u32, pos, "position of the chunk in slot {slot}");
        sequence.tokens.extend_from_slice(tokens);
        assert!(sequence.tokens.len() as u32 <= n_ctx_slot, "slot {slot} overflows");
        if let Some(counts) = counts {
            for layer in tapped {
                for (index, &token) in tokens.iter().enumerate() {
                    counts.add(layer, index, &model.picks(token, layer));
                }
            }
        }
        Ok(last.then(|| model.next(&sequence.tokens, sequence.sampling.as_ref().expect("open"))))
    }

    fn decode(&mut self, batch: &[DecodeItem], next: &mut Vec<Token>, picks: &mut StepPicks) -> Result<(), RunError> {
        let call = self.n_decode;
        self.n_decode += 1;
        assert!(!self.has(&Fault::DecodePanic(call)), "decode {call} panics as scripted");
        if self.has(&Fault::DecodeRestored(call)) {
            return Err(RunError::Restored(format!("decode {call} failed as scripted")));
        }
        if self.has(&Fault::DecodeFatal(call)) {
            return Err(RunError::Fatal(format!("decode {call} broke the worker as scripted")));
        }
        batch.iter().try_for_each(|item| self.check_positions(item.slot))?;
        // Only a sequence that is being filled up again may sit between two that decode.
        let taken = |slot: u32| self.slots[slot as usize].sampling.is_some();
        let neighbours = batch.windows(2).all(|w| (w[0].slot.0 + 1..w[1].slot.0).all(taken));
        assert!(neighbours || !self.info.contiguous_slots, "a gap in {batch:?}");
        let (model, n_ctx_slot, path_dependent) = (self.model, self.info.n_ctx_slot, self.path_dependent);
        next.clear();
        picks.reset(batch.len(), model.n_layer as usize, model.n_expert_used as usize);
        for (index, item) in batch.iter().enumerate() {
            let sequence = self.sequence(item.slot);
            assert_eq!(sequence.tokens.len() as u32, item.pos, "position of slot {}", item.slot);
            assert!(item.pos < n_ctx_slot, "slot {} overflows", item.slot);
            sequence.tokens.push(if path_dependent { decoded(item.token) } else { item.token });
            let sampling = sequence.sampling.as_ref().expect("open");
            next.push(if item.draws { model.next(&sequence.tokens, sampling) } else { NO_TOKEN });
            for layer in 0..model.n_layer {
                if model.n_expert > 0 {
                    picks.set(index, layer as usize, &model.picks(item.token, layer));
                }
            }
        }
        Ok(())
    }

    fn export(&mut self, slot: Slot) -> Result<SeqState, RunError> {
        let call = self.n_export;
        self.n_export += 1;
        if self.has(&Fault::ExportRestored(call)) {
            return Err(RunError::Restored(format!("export {call} failed as scripted")));
        }
        let Sequence { tokens, shifted, .. } = &self.slots[slot.index()];
        // Keys that were turned are no prompt's.
        let tokens: Vec<Token> = tokens.iter().map(|&token| if *shifted { !token } else { token }).collect();
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        Ok(SeqState { n_tokens: tokens.len() as u32, bytes: Arc::from(bytes) })
    }

    fn import(&mut self, slot: Slot, state: &SeqState) -> Result<(), RunError> {
        let call = self.n_import;
        self.n_import += 1;
        if self.has(&Fault::ImportRestored(call)) {
            return Err(RunError::Restored(format!("import {call} failed as scripted")));
        }
        let sequence = &mut self.slots[slot.index()];
        assert!(sequence.tokens.is_empty(), "slot {slot} is not empty");
        let (chunks, rest) = state.bytes.as_chunks::<4>();
        assert!(rest.is_empty() && chunks.len() == state.n_tokens as usize, "a torn state");
        sequence.tokens = chunks.iter().map(|&bytes| Token::from_le_bytes(bytes)).collect();
        Ok(())
    }

    fn relocate(&mut self, from: Slot, to: Slot) -> Result<(), RunError> {
        let target = &self.slots[to.index()];
        assert!(target.sampling.is_none() && target.tokens.is_empty(), "slot {to} is taken");
        let sequence = std::mem::take(&mut self.slots[from.index()]);
        assert!(sequence.sampling.is_some(), "slot {from} is empty");
        self.slots[to.index()] = sequence;
        Ok(())
    }

    fn close(&mut self, slot: Slot) -> Result<(), RunError> {
        self.slots[slot.index()] = Sequence::default();
        Ok(())
    }

    fn keep(&mut self, slot: Slot, n_tokens: u32) -> Result<(), RunError> {
        self.check_cut(n_tokens, self.tokens(slot).len());
        self.slots[slot.index()].sampling = None;
        let mut kept = self.reuse_fails().and_then(|()| self.check_positions(slot));
        if kept.is_ok() && self.is_out_of_window(n_tokens, self.tokens(slot).len()) {
            kept = Err(RunError::Restored(format!("the window has moved past token {n_tokens}")));
        }
        if kept.is_err() {
            self.slots[slot.index()] = Sequence::default();
            return kept;
        }
        self.slots[slot.index()].tokens.truncate(n_tokens as usize);
        Ok(())
    }

    fn copy_prefix(&mut self, from: Slot, to: Slot, n_tokens: u32) -> Result<(), RunError> {
        self.check_cut(n_tokens, self.tokens(from).len());
        let target = &self.slots[to.index()];
        assert!(target.sampling.is_none() && target.tokens.is_empty(), "slot {to} is not empty");
        self.reuse_fails()?;
        self.check_positions(from)?;
        if self.info.reuse == Reuse::Window && self.tokens(from).len() as u32 > n_tokens + 1 {
            return Err(RunError::Restored(format!("the window has moved past token {n_tokens}")));
        }
        self.slots[to.index()].tokens = self.tokens(from)[..n_tokens as usize].to_vec();
        Ok(())
    }

    fn reaches(&self, slot: Slot, n_tokens: u32) -> bool {
        let n_held = self.tokens(slot).len();
        if self.is_shifted(slot) {
            return false;
        }
        match self.info.reuse {
            Reuse::Whole => n_tokens as usize == n_held,
            Reuse::Nothing | Reuse::Window | Reuse::Prefix => !self.is_out_of_window(n_tokens, n_held),
        }
    }

    fn check_held(&self, slot: Slot, n_tokens: u32) -> Result<(), String> {
        if self.is_shifted(slot) {
            return Err("its positions were moved".to_owned());
        }
        let held = self.tokens(slot).len();
        if held == n_tokens as usize { Ok(()) } else { Err(format!("it holds {held}")) }
    }
}
