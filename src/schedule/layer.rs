//! What a runner around another runner passes on: everything, but for what it is there to change.
//!
//! Never adds a call of its own.

use std::sync::Arc;

use crate::{
    kv::ChunkCounts,
    schedule::{DecodeItem, ModelRunner, Recovery, RunError, RunnerInfo, SeqState, StepPicks},
    types::{SamplingParams, Slot, Token, TokenLogprobs},
};

/// A [`ModelRunner`] around another one, which gets every call that the layer does not take for itself.
///
/// Here and not in [`ModelRunner`]'s defaults, because those are for runners that lack an ability: a layer that forgot
/// to pass a call on would silently take the ability away.
pub trait RunnerLayer: Send {
    /// The runner around which this one stands.
    fn inner(&self) -> &dyn ModelRunner;

    /// The same, to run it.
    fn inner_mut(&mut self) -> &mut dyn ModelRunner;

    /// See [`ModelRunner::info`].
    fn info(&self) -> &RunnerInfo {
        self.inner().info()
    }

    /// See [`ModelRunner::enter`].
    fn enter(&mut self) {
        self.inner_mut().enter();
    }

    /// See [`ModelRunner::recovery`].
    fn recovery(&self) -> Option<Arc<dyn Recovery>> {
        self.inner().recovery()
    }

    /// See [`ModelRunner::open`].
    fn open(&mut self, slot: Slot, sampling: &SamplingParams, generated: &[Token]) -> Result<(), RunError> {
        self.inner_mut().open(slot, sampling, generated)
    }

    /// See [`ModelRunner::prefill`].
    fn prefill(
        &mut self,
        slot: Slot,
        tokens: &[Token],
        pos: u32,
        last: bool,
        counts: Option<&mut ChunkCounts>,
    ) -> Result<Option<Token>, RunError> {
        self.inner_mut().prefill(slot, tokens, pos, last, counts)
    }

    /// See [`ModelRunner::decode`].
    fn decode(&mut self, batch: &[DecodeItem], next: &mut Vec<Token>, picks: &mut StepPicks) -> Result<(), RunError> {
        self.inner_mut().decode(batch, next, picks)
    }

    /// See [`ModelRunner::take_logprobs`].
    fn take_logprobs(&mut self, slot: Slot) -> Option<Box<TokenLogprobs>> {
        self.inner_mut().take_logprobs(slot)
    }

    /// See [`ModelRunner::export`].
    fn export(&mut self, slot: Slot) -> Result<SeqState, RunError> {
        self.inner_mut().export(slot)
    }

    /// See [`ModelRunner::import`].
    fn import(&mut self, slot: Slot, state: &SeqState) -> Result<(), RunError> {
        self.inner_mut().import(slot, state)
    }

    /// See [`ModelRunner::relocate`].
    fn relocate(&mut self, from: Slot, to: Slot) -> Result<(), RunError> {
        self.inner_mut().relocate(from, to)
    }

    /// See [`ModelRunner::close`].
    fn close(&mut self, slot: Slot) -> Result<(), RunError> {
        self.inner_mut().close(slot)
    }

    /// See [`ModelRunner::keep`].
    fn keep(&mut self, slot: Slot, n_tokens: u32) -> Result<(), RunError> {
        self.inner_mut().keep(slot, n_tokens)
    }

    /// See [`ModelRunner::copy_prefix`].
    fn copy_prefix(&mut self, from: Slot, to: Slot, n_tokens: u32) -> Result<(), RunError> {
        self.inner_mut().copy_prefix(from, to, n_tokens)
    }

    /// See [`ModelRunner::reaches`].
    fn reaches(&self, slot: Slot, n_tokens: u32) -> bool {
        self.inner().reaches(slot, n_tokens)
    }

    /// See [`ModelRunner::check_held`].
    fn check_held(&self, slot: Slot, n_tokens: u32) -> Result<(), String> {
        self.inner().check_held(slot, n_tokens)
    }
}

#[deny(clippy::missing_trait_methods, reason = "a default here would be a call not passed on")]
impl<L: RunnerLayer> ModelRunner for L {
    fn info(&self) -> &RunnerInfo {
        RunnerLayer::info(self)
    }

    fn enter(&mut self) {
        RunnerLayer::enter(self);
    }

    fn recovery(&self) -> Option<Arc<dyn Recovery>> {
        RunnerLayer::recovery(self)
    }

    fn open(&mut self, slot: Slot, sampling: &SamplingParams, generated: &[Token]) -> Result<(), RunError> {
        RunnerLayer::open(self, slot, sampling, generated)
    }

    fn prefill(
        &mut self,
        slot: Slot,
        tokens: &[Token],
        pos: u32,
        last: bool,
        counts: Option<&mut ChunkCounts>,
    ) -> Result<Option<Token>, RunError> {
        RunnerLayer::prefill(self, slot, tokens, pos, last, counts)
    }

    fn decode(&mut self, batch: &[DecodeItem], next: &mut Vec<Token>, picks: &mut StepPicks) -> Result<(), RunError> {
        RunnerLayer::decode(self, batch, next, picks)
    }

    fn take_logprobs(&mut self, slot: Slot) -> Option<Box<TokenLogprobs>> {
        RunnerLayer::take_logprobs(self, slot)
    }

    fn export(&mut self, slot: Slot) -> Result<SeqState, RunError> {
        RunnerLayer::export(self, slot)
    }

    fn import(&mut self, slot: Slot, state: &SeqState) -> Result<(), RunError> {
        RunnerLayer::import(self, slot, state)
    }

    fn relocate(&mut self, from: Slot, to: Slot) -> Result<(), RunError> {
        RunnerLayer::relocate(self, from, to)
    }

    fn close(&mut self, slot: Slot) -> Result<(), RunError> {
        RunnerLayer::close(self, slot)
    }

    fn keep(&mut self, slot: Slot, n_tokens: u32) -> Result<(), RunError> {
        RunnerLayer::keep(self, slot, n_tokens)
    }

    fn copy_prefix(&mut self, from: Slot, to: Slot, n_tokens: u32) -> Result<(), RunError> {
        RunnerLayer::copy_prefix(self, from, to, n_tokens)
    }

    fn reaches(&self, slot: Slot, n_tokens: u32) -> bool {
        RunnerLayer::reaches(self, slot, n_tokens)
    }

    fn check_held(&self, slot: Slot, n_tokens: u32) -> Result<(), String> {
        RunnerLayer::check_held(self, slot, n_tokens)
    }
}
