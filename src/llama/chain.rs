//! A chain of llama.cpp's samplers: steps that change logits, and what they remember of the tokens so far.
//!
//! Never chooses a token.

use std::ptr::NonNull;

use llama_cpp_sys_2 as sys;

use crate::types::Token;

use super::{error::LlamaError, guard, model::Model};

/// One chain, with the history of one sequence.
pub(super) struct Chain {
    raw: NonNull<sys::llama_sampler>,
    /// Its steps may point into the vocabulary.
    _model: Model,
}

// SAFETY: a chain has no thread of its own and keeps no thread-local state; one owner uses it at a time.
unsafe impl Send for Chain {}

impl Drop for Chain {
    fn drop(&mut self) {
        // SAFETY: ours, and not used again.
        unsafe { sys::llama_sampler_free(self.raw.as_ptr()) };
    }
}

impl Chain {
    /// The steps that change something; `None` when llama.cpp makes no chain of them, which only a grammar causes.
    pub fn new(model: &Model, steps: &guard::eldr_guard_sampling) -> Result<Option<Self>, LlamaError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the vocabulary lives as long as the model, and the steps and their strings outlive the call.
        guard::call(|message, size| unsafe {
            guard::eldr_guard_sampler_init(model.vocab(), &raw const *steps, &raw mut raw, message, size)
        })
        .map_err(|e| failed(e.to_string()))?;
        Ok(NonNull::new(raw).map(|raw| Self { raw, _model: model.clone() }))
    }

    /// Whether it has no step.
    pub fn is_empty(&self) -> bool {
        // SAFETY: the chain is ours.
        unsafe { sys::llama_sampler_chain_n(self.raw.as_ptr()) == 0 }
    }

    /// Runs the steps over `candidates`; gives those that are left.
    pub fn apply<'a>(
        &'a self,
        candidates: &'a mut [sys::llama_token_data],
    ) -> Result<&'a mut [sys::llama_token_data], LlamaError> {
        let mut array = sys::llama_token_data_array {
            data: candidates.as_mut_ptr(),
            size: candidates.len(),
            selected: -1,
            sorted: false,
        };
        // SAFETY: the chain is ours and the array describes our candidates.
        guard::call(|message, size| unsafe {
            guard::eldr_guard_sampler_apply(self.raw.as_ptr(), &raw mut array, message, size)
        })
        .map_err(|e| failed(e.to_string()))?;
        // SAFETY: a step may shorten the array or replace it by one it owns; either way `size` entries are there until
        // the chain is used again, which its borrow prevents.
        Ok(unsafe { std::slice::from_raw_parts_mut(array.data, array.size) })
    }

    /// Remembers a token of the vocabulary.
    pub fn accept(&mut self, token: Token) -> Result<(), LlamaError> {
        // SAFETY: the chain is ours and the token is in the vocabulary.
        guard::call(|message, size| unsafe {
            guard::eldr_guard_sampler_accept(self.raw.as_ptr(), token, message, size)
        })
        .map_err(|e| failed(e.to_string()))
    }
}

/// Steps that change nothing.
pub(super) fn no_steps() -> guard::eldr_guard_sampling {
    guard::eldr_guard_sampling {
        penalty_last_n: 0,
        penalty_repeat: 1.0,
        penalty_freq: 0.0,
        penalty_present: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        temperature: 1.0,
        grammar: std::ptr::null(),
        grammar_root: std::ptr::null(),
    }
}

pub(super) fn failed(reason: String) -> LlamaError {
    LlamaError::Sampling { reason }
}
