use std::sync::Arc;

use super::{PromptRows, TapRunner};
use crate::{
    kv::ChunkCounts,
    llama::{Batch, Context, ContextParams, DecodeError, DecodeFailure, LlamaError, Model, Sampler, pin_thread},
    schedule::{DecodeItem, ModelRunner, Recovery, Reuse, RunError, RunnerInfo, SeqState, StateFingerprint, StepPicks},
    types::{SamplingParams, Slot, Token, TokenLogprobs},
};

/// Which picks a runner reads from its context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TapUse {
    /// None: the context has no tap and runs at full speed.
    Off,
    /// The experts of prompts in these MoE layers, for signatures.
    Prefill(Vec<u32>),
    /// As [`TapUse::Prefill`], and the gate's outputs for every expert too, for recordings that ask for them.
    Gates(Vec<u32>),
    /// The experts of one decode step in so many, in all MoE layers; of every step if 1. The others run as without a tap.
    Decode(u32),
}

/// A [`ModelRunner`] over one llama.cpp context: slot i is sequence i.
///
/// An exact runner never computes one row alone. ggml multiplies a single row by other kernels than several (tinyBLAS
/// starts at two rows, `llamafile/sgemm.cpp`), which sum in another order; the gate's scores then differ in the last
/// bits, and sooner or later a sequence that decodes alone draws another token than it would in company. So a lone row
/// gets company: a copy in a neighbouring sequence, at position 0 of an empty one if there is one, else after the last
/// token of one that is kept, dropped again at once.
pub struct LlamaRunner {
    context: Context,
    info: RunnerInfo,
    samplers: Vec<Option<Sampler>>,
    n_tokens: Vec<u32>,
    /// Slots whose sequence had no number among its logits, and perhaps none among its keys and values.
    spoiled: Vec<bool>,
    batch: Batch,
    /// One decode step in so many is tapped; none if 0.
    tap_every: u32,
    n_steps: u32,
    tap_failed: bool,
    exact: bool,
    recovery: Option<Arc<dyn Recovery>>,
}

/// Where a lone row's company is computed.
#[derive(Debug, Clone, Copy)]
struct Company {
    seq: u32,
    pos: u32,
}

impl LlamaRunner {
    /// A runner in a new context of `model`. An exact one needs room for one sequence more.
    pub fn new(model: &Model, params: &ContextParams, tap: &TapUse, exact: bool) -> Result<Self, LlamaError> {
        let n_slots = params.n_slots;
        let params = ContextParams { n_slots: n_slots + u32::from(exact), tap: *tap != TapUse::Off, ..params.clone() };
        let mut context = Context::new(model, &params)?;
        let tapped = match tap {
            TapUse::Prefill(layers) | TapUse::Gates(layers) => layers.clone(),
            TapUse::Off | TapUse::Decode(_) => Vec::new(),
        };
        if let TapUse::Prefill(layers) | TapUse::Gates(layers) = tap {
            context.set_tap_layers(layers)?;
        }
        if let TapUse::Gates(_) = tap {
            context.tap_gates()?;
        }
        let params = context.params();
        let info = RunnerInfo {
            n_slots,
            n_ctx_slot: params.n_ctx_slot,
            n_batch: params.n_batch,
            contiguous_slots: !params.kv_unified,
            tapped,
            // Even where the whole sequence is kept, an exported one has lost what the window has moved past.
            reuse: match (context.cuts_sequences(), model.facts().n_swa) {
                (false, _) => Reuse::Whole,
                (true, 0) => Reuse::Prefix,
                (true, _) => Reuse::Window,
            },
            replays: exact,
            fingerprint: StateFingerprint(context.fingerprint()),
        };
        let n_sequences = params.n_slots as usize;
        let batch = Batch::new(info.n_batch as usize);
        Ok(Self {
            context,
            info,
            samplers: (0..n_sequences).map(|_| None).collect(),
            n_tokens: vec![0; n_sequences],
            spoiled: vec![false; n_sequences],
            batch,
            tap_every: if let TapUse::Decode(every) = *tap { every } else { 0 },
            n_steps: 0,
            tap_failed: false,
            exact,
            recovery: None,
        })
    }

    /// The way back after its device has failed.
    pub(super) fn set_recovery(&mut self, recovery: Arc<dyn Recovery>) {
        self.recovery = Some(recovery);
    }

    /// For tests: moves a slot's positions behind the runner's back; see [`Context::shift_seq`].
    #[doc(hidden)]
    pub fn shift(&mut self, slot: Slot, by: i32) -> Result<bool, LlamaError> {
        self.context.shift_seq(slot.0, by)
    }

    /// What a call gave, unless the device has failed meanwhile: then it is not what the model computed.
    fn vouch<T>(&self, got: Result<T, RunError>) -> Result<T, RunError> {
        match self.context.model().failure() {
            Some(reason) => Err(RunError::Fatal(format!("{}: {reason}", self.context.params().name))),
            None => got,
        }
    }

    /// Whether the picks of the call just made can be used; a tap that fails says so once and is not used again.
    fn check_tap(&mut self, ran: Result<(), DecodeError>) -> Result<bool, RunError> {
        match ran {
            Ok(()) => Ok(true),
            Err(error) if error.failure == DecodeFailure::Tap => {
                log::error!("experts can not be counted any more, requests are routed by load: {error}");
                self.tap_failed = true;
                Ok(false)
            }
            Err(error) => Err(run_error(&error)),
        }
    }

    /// The place beside a lone row's sequence that keeps it company; none where company is not needed.
    fn companion(&self, n_rows: usize, slot: Slot) -> Option<Company> {
        if !self.exact || n_rows != 1 {
            return None;
        }
        let beside = || {
            let seqs = [Some(slot.0 + 1), slot.0.checked_sub(1)].into_iter().flatten();
            seqs.filter_map(|seq| Some(Company { seq, pos: *self.n_tokens.get(seq as usize)? }))
        };
        let has_room = |place: &Company| self.context.cuts_anywhere() && place.pos < self.info.n_ctx_slot;
        beside().find(|place| place.pos == 0).or_else(|| beside().find(has_room))
    }

    /// Puts the rows into the batch, with a lone one's company; the row of the first.
    fn fill_batch(
        &mut self,
        rows: impl ExactSizeIterator<Item = (Token, u32, Slot, bool)>,
        companion: Option<Company>,
    ) -> Result<usize, RunError> {
        self.batch.clear();
        let mut first = 0;
        for (token, pos, slot, wanted) in rows {
            let below = companion.filter(|place| place.seq < slot.0);
            let above = companion.filter(|place| place.seq > slot.0);
            // As wanted as the row itself, so that the last layer too computes both.
            if let Some(Company { seq, pos }) = below {
                self.batch.push(token, pos, seq, wanted).map_err(refused)?;
                first = 1;
            }
            self.batch.push(token, pos, slot.0, wanted).map_err(refused)?;
            if let Some(Company { seq, pos }) = above {
                self.batch.push(token, pos, seq, wanted).map_err(refused)?;
            }
        }
        Ok(first)
    }

    /// Puts a chunk of a prompt into the batch; the row of its first token, and its company.
    fn fill_chunk(
        &mut self,
        slot: Slot,
        tokens: &[Token],
        pos: u32,
        last: bool,
    ) -> Result<(usize, Option<Company>), RunError> {
        assert_eq!(self.n_tokens[slot.index()], pos, "position of the chunk in slot {slot}");
        let companion = self.companion(tokens.len(), slot);
        let rows = tokens.iter().enumerate().map(|(index, &token)| {
            let wanted = last && index + 1 == tokens.len();
            (token, pos + index as u32, slot, wanted)
        });
        Ok((self.fill_batch(rows, companion)?, companion))
    }

    /// Takes a chunk that has run into account, and draws the next token after the last one.
    fn end_chunk(
        &mut self,
        slot: Slot,
        n: usize,
        last: bool,
        first: usize,
        companion: Option<Company>,
    ) -> Result<Option<Token>, RunError> {
        self.dismiss(companion)?;
        self.n_tokens[slot.index()] += n as u32;
        // A prompt that no token can follow costs no other.
        if last { self.sample(slot, first + n - 1).map(Some).map_err(RunError::Restored) } else { Ok(None) }
    }

    /// Cuts a slot to its first tokens and verifies that they are all there; otherwise empties it.
    fn cut(&mut self, slot: Slot, n_tokens: u32) -> Result<(), RunError> {
        let held = &mut self.n_tokens[slot.index()];
        assert!(n_tokens <= *held, "slot {slot} holds {held} tokens, not {n_tokens}");
        let whole = self.context.verify(slot.0, *held);
        *held = n_tokens;
        let cut = whole.and_then(|()| self.context.seq_truncate(slot.0, n_tokens));
        let cut = cut.and_then(|()| self.context.verify(slot.0, n_tokens));
        let Err(error) = cut else { return Ok(()) };
        *held = 0;
        self.context.clear_seq(slot.0).map_err(|error| RunError::Fatal(error.to_string()))?;
        Err(RunError::Restored(error.to_string()))
    }

    fn dismiss(&mut self, companion: Option<Company>) -> Result<(), RunError> {
        let Some(Company { seq, pos }) = companion else { return Ok(()) };
        self.context.seq_truncate(seq, pos).map_err(|error| RunError::Fatal(error.to_string()))
    }

    fn sample(&mut self, slot: Slot, row: usize) -> Result<Token, String> {
        let sampler = self.samplers[slot.index()].as_mut().unwrap_or_else(|| panic!("slot {slot} is not open"));
        let drawn = sampler.sample(self.context.logits(row)).map_err(|error| error.to_string());
        self.spoiled[slot.index()] |= drawn.is_err();
        drawn
    }

    /// Writes numbers over what a spoiled sequence of so many tokens has left: attention reads the memory behind a
    /// sequence too, and weighs it with 0, which makes NaN of NaN. An empty stream is filled from its first cell on.
    fn wipe(&mut self, slot: Slot, n_tokens: u32) -> Result<(), RunError> {
        let positions: Vec<u32> = (0..n_tokens).collect();
        for chunk in positions.chunks(self.info.n_batch as usize) {
            self.fill_batch(chunk.iter().map(|&pos| (0, pos, slot, false)), None)?;
            self.context.decode(&self.batch).map_err(|error| RunError::Fatal(error.to_string()))?;
        }
        self.context.clear_seq(slot.0).map_err(|error| RunError::Fatal(error.to_string()))
    }

    fn prefill_unvouched(
        &mut self,
        slot: Slot,
        tokens: &[Token],
        pos: u32,
        last: bool,
        counts: Option<&mut ChunkCounts>,
    ) -> Result<Option<Token>, RunError> {
        let (first, companion) = self.fill_chunk(slot, tokens, pos, last)?;
        match counts {
            Some(counts) if !self.tap_failed => {
                let ran = self.context.decode_tapped(&self.batch, &mut |rows| {
                    for (index, experts) in rows.tokens().skip(first).take(tokens.len()).enumerate() {
                        counts.add(rows.layer, index, experts);
                    }
                });
                if !self.check_tap(ran)? {
                    counts.fail();
                }
            }
            counts => {
                self.context.decode(&self.batch).map_err(|error| run_error(&error))?;
                counts.into_iter().for_each(ChunkCounts::fail);
            }
        }
        self.end_chunk(slot, tokens.len(), last, first, companion)
    }

    fn decode_unvouched(
        &mut self,
        batch: &[DecodeItem],
        next: &mut Vec<Token>,
        picks: &mut StepPicks,
    ) -> Result<(), RunError> {
        for item in batch {
            assert_eq!(self.n_tokens[item.slot.index()], item.pos, "position of slot {}", item.slot);
        }
        let companion = batch.first().and_then(|item| self.companion(batch.len(), item.slot));
        let rows = batch.iter().map(|item| (item.token, item.pos, item.slot, true));
        let first = self.fill_batch(rows, companion)?;
        picks.clear();
        self.n_steps = self.n_steps.wrapping_add(1);
        if self.tap_every > 0 && self.n_steps.is_multiple_of(self.tap_every) && !self.tap_failed {
            let n_layer = self.context.model().moe_shape().map_or(0, |shape| shape.layers.len());
            let ran = self.context.decode_tapped(&self.batch, &mut |rows| {
                if picks.is_empty() {
                    picks.reset(batch.len(), n_layer, rows.n_expert_used);
                }
                for (item, experts) in rows.tokens().skip(first).take(batch.len()).enumerate() {
                    picks.set(item, rows.layer as usize, experts);
                }
            });
            if !self.check_tap(ran)? {
                picks.clear();
            }
        } else {
            self.context.decode(&self.batch).map_err(|error| run_error(&error))?;
        }
        next.clear();
        let mut undrawn = Vec::new();
        for (row, item) in batch.iter().enumerate() {
            self.n_tokens[item.slot.index()] += 1;
            let drawn = if item.draws { self.sample(item.slot, first + row) } else { Ok(item.token) };
            next.push(drawn.unwrap_or_else(|reason| {
                undrawn.push((item.slot, reason));
                item.token
            }));
        }
        self.dismiss(companion)?;
        if undrawn.is_empty() { Ok(()) } else { Err(RunError::Undrawn(undrawn)) }
    }

    fn export_unvouched(&mut self, slot: Slot) -> Result<SeqState, RunError> {
        let bytes = self.context.state_get(slot.0).map_err(|error| RunError::Restored(error.to_string()))?;
        Ok(SeqState { n_tokens: self.n_tokens[slot.index()], bytes: Arc::from(bytes) })
    }

    fn import_unvouched(&mut self, slot: Slot, state: &SeqState) -> Result<(), RunError> {
        assert_eq!(self.n_tokens[slot.index()], 0, "slot {slot} is not empty");
        let set = self.context.state_set(slot.0, &state.bytes, state.n_tokens);
        set.map_err(|error| RunError::Restored(error.to_string()))?;
        self.n_tokens[slot.index()] = state.n_tokens;
        Ok(())
    }

    fn relocate_unvouched(&mut self, from: Slot, to: Slot) -> Result<(), RunError> {
        assert_eq!(self.n_tokens[to.index()], 0, "slot {to} is not empty");
        // A failed copy leaves the source whole and the target empty.
        self.context.seq_cp(from.0, to.0).map_err(|error| RunError::Restored(error.to_string()))?;
        self.context.clear_seq(from.0).map_err(|error| RunError::Fatal(error.to_string()))?;
        self.n_tokens[to.index()] = std::mem::take(&mut self.n_tokens[from.index()]);
        self.samplers[to.index()] = self.samplers[from.index()].take();
        Ok(())
    }

    fn copy_prefix_unvouched(&mut self, from: Slot, to: Slot, n_tokens: u32) -> Result<(), RunError> {
        assert_eq!(self.n_tokens[to.index()], 0, "slot {to} is not empty");
        // A failed copy leaves the target empty.
        self.context.seq_cp(from.0, to.0).map_err(|error| RunError::Restored(error.to_string()))?;
        self.n_tokens[to.index()] = self.n_tokens[from.index()];
        self.cut(to, n_tokens)
    }
}

impl ModelRunner for LlamaRunner {
    fn info(&self) -> &RunnerInfo {
        &self.info
    }

    fn enter(&mut self) {
        let cpus = &self.context.params().cpus;
        if !cpus.is_empty()
            && let Err(error) = pin_thread(cpus)
        {
            log::warn!("{error}");
        }
    }

    fn recovery(&self) -> Option<Arc<dyn Recovery>> {
        self.recovery.clone()
    }

    fn open(&mut self, slot: Slot, sampling: &SamplingParams, generated: &[Token]) -> Result<(), RunError> {
        let index = slot.index();
        assert!(self.samplers[index].is_none(), "slot {slot} is taken");
        let sampler = Sampler::new(self.context.model(), sampling, generated);
        self.samplers[index] = Some(sampler.map_err(|error| RunError::Restored(error.to_string()))?);
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
        let got = self.prefill_unvouched(slot, tokens, pos, last, counts);
        self.vouch(got)
    }

    fn decode(&mut self, batch: &[DecodeItem], next: &mut Vec<Token>, picks: &mut StepPicks) -> Result<(), RunError> {
        let got = self.decode_unvouched(batch, next, picks);
        self.vouch(got)
    }

    fn take_logprobs(&mut self, slot: Slot) -> Option<Box<TokenLogprobs>> {
        self.samplers[slot.index()].as_mut()?.take_logprobs()
    }

    fn export(&mut self, slot: Slot) -> Result<SeqState, RunError> {
        let got = self.export_unvouched(slot);
        self.vouch(got)
    }

    fn import(&mut self, slot: Slot, state: &SeqState) -> Result<(), RunError> {
        let got = self.import_unvouched(slot, state);
        self.vouch(got)
    }

    fn relocate(&mut self, from: Slot, to: Slot) -> Result<(), RunError> {
        let got = self.relocate_unvouched(from, to);
        self.vouch(got)
    }

    fn close(&mut self, slot: Slot) -> Result<(), RunError> {
        self.samplers[slot.index()] = None;
        let n_tokens = std::mem::take(&mut self.n_tokens[slot.index()]);
        self.context.clear_seq(slot.0).map_err(|error| RunError::Fatal(error.to_string()))?;
        if std::mem::take(&mut self.spoiled[slot.index()]) { self.wipe(slot, n_tokens) } else { Ok(()) }
    }

    fn keep(&mut self, slot: Slot, n_tokens: u32) -> Result<(), RunError> {
        self.samplers[slot.index()] = None;
        self.cut(slot, n_tokens)
    }

    fn copy_prefix(&mut self, from: Slot, to: Slot, n_tokens: u32) -> Result<(), RunError> {
        let got = self.copy_prefix_unvouched(from, to, n_tokens);
        self.vouch(got)
    }

    fn reaches(&self, slot: Slot, n_tokens: u32) -> bool {
        // What another user of the context has shifted begins or ends elsewhere than this runner left it.
        let is_whole = self.context.verify(slot.0, self.n_tokens[slot.index()]).is_ok();
        is_whole && self.context.reaches(slot.0, n_tokens)
    }

    fn check_held(&self, slot: Slot, n_tokens: u32) -> Result<(), String> {
        if self.n_tokens[slot.index()] != n_tokens {
            return Err(format!("the runner believes in {}", self.n_tokens[slot.index()]));
        }
        self.context.check_seq_cells(slot.0, n_tokens).map_err(|error| error.to_string())
    }
}

impl TapRunner for LlamaRunner {
    fn prefill_rows(
        &mut self,
        slot: Slot,
        tokens: &[Token],
        pos: u32,
        last: bool,
        sink: &mut dyn FnMut(PromptRows<'_>),
    ) -> Result<Option<Token>, RunError> {
        let (first, companion) = self.fill_chunk(slot, tokens, pos, last)?;
        let n = tokens.len();
        let ran = self.context.decode_tapped(&self.batch, &mut |rows| {
            let k = rows.n_expert_used;
            let gate = |outputs: &'_ [f32]| {
                let e = outputs.len() / rows.tokens().len();
                first * e..(first + n) * e
            };
            sink(PromptRows {
                layer: rows.layer,
                experts: &rows.experts[first * k..][..n * k],
                probabilities: &rows.probabilities[gate(rows.probabilities)],
                logits: &rows.logits[gate(rows.logits)],
            });
        });
        let ran = ran.map_err(|error| run_error(&error));
        let got = ran.and_then(|()| self.end_chunk(slot, n, last, first, companion));
        self.vouch(got)
    }
}

fn run_error(error: &DecodeError) -> RunError {
    if error.restored { RunError::Restored(error.to_string()) } else { RunError::Fatal(error.to_string()) }
}

/// A batch that was refused before llama.cpp saw it.
#[expect(clippy::needless_pass_by_value, reason = "it is the argument of map_err")]
fn refused(error: LlamaError) -> RunError {
    RunError::Restored(error.to_string())
}
