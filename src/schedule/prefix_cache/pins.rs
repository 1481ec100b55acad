//! Prefixes that are never dropped: system prompts.
//!
//! Never computes one: the first prompt that begins with it does, and leaves a copy in a slot of its own.

use super::PrefixCache;
use crate::{
    schedule::{ModelRunner, Reuse, RunError},
    types::{Slot, Token},
};

#[derive(Debug)]
pub(super) struct Pin {
    /// Whole blocks.
    tokens: Vec<Token>,
    /// The slot that holds it, once a prompt has computed it.
    home: Option<usize>,
}

impl PrefixCache {
    /// Keeps the whole blocks of `tokens` for good, in a slot of their own, from the first prompt on that begins with them.
    /// At least `n_free` slots must be left for prompts. Errors: why it can not be kept.
    pub fn pin(&mut self, tokens: &[Token], n_free: usize) -> Result<(), String> {
        let block = self.config.block as usize;
        let whole = &tokens[..tokens.len() / block * block];
        if self.pins.iter().any(|pin| pin.tokens == whole) {
            return Ok(());
        }
        let n_slots = self.n_there.len();
        match self.reuse {
            Reuse::Nothing => return Err("prefixes are not kept; switch the prefix cache on".to_owned()),
            Reuse::Whole => {
                return Err("the model's memory can not be cut to it (recurrent layers); leave the pin out".to_owned());
            }
            Reuse::Prefix | Reuse::Window => {}
        }
        if whole.is_empty() {
            return Err(format!("it has {} tokens and a block {block}; only whole blocks are pinned", tokens.len()));
        }
        if n_slots < n_free + self.pins.len() + 1 {
            return Err(format!(
                "each pinned prefix takes a slot of the prefill worker, and prompts need {n_free} of its {n_slots}; give it \
                 more slots"
            ));
        }
        self.pins.push(Pin { tokens: whole.to_vec(), home: None });
        Ok(())
    }

    /// A slot's prompt is about to end: copies the pinned prefixes it begins with to slots of their own.
    pub(super) fn keep_pinned(&mut self, slot: usize, runner: &mut dyn ModelRunner) -> Result<(), RunError> {
        if self.pins.iter().all(|pin| pin.home.is_some()) {
            return Ok(());
        }
        let held = self.tokens(Slot(slot as u32));
        for index in 0..self.pins.len() {
            let Pin { tokens, home: None } = &self.pins[index] else { continue };
            if !held.starts_with(tokens) {
                continue;
            }
            let tokens = tokens.clone();
            let found = self.find(&tokens, false);
            let Some(to) = self.free_slot(Some(slot)).filter(|_| found.n_tokens as usize == tokens.len()) else {
                continue;
            };
            let n_tokens = found.n_tokens;
            if self.copy(slot, to, &found, n_tokens, runner)?.1 == n_tokens {
                self.ledger.pin(to);
                self.pins[index].home = Some(to);
                self.change.stats.n_pinned_tokens += u64::from(n_tokens);
            }
        }
        Ok(())
    }

    /// A slot's pinned prefix, if it has one, must be computed again.
    pub(super) fn unpin_home(&mut self, slot: usize) {
        for pin in self.pins.iter_mut().filter(|pin| pin.home == Some(slot)) {
            pin.home = None;
            self.ledger.unpin(slot);
            self.change.stats.n_pinned_tokens -= pin.tokens.len() as u64;
        }
    }

    /// Slots that hold a pinned prefix.
    pub fn n_pinned(&self) -> usize {
        self.pins.iter().filter(|pin| pin.home.is_some()).count()
    }

    pub(super) fn check_pins(&self) {
        for Pin { tokens, home } in &self.pins {
            let Some(home) = *home else { continue };
            assert!(self.ledger.is_pinned(home), "slot {home} of a pinned prefix may be dropped");
            assert_eq!(self.tokens(Slot(home as u32)), *tokens, "the pinned prefix of slot {home}");
        }
    }
}
