//! How the next token is chosen from a row of logits.
//!
//! Never draws from hidden state: a draw depends on the seed, on how many tokens came before, and on the logits alone.

use std::{
    fmt,
    ptr::{self, NonNull},
};

use llama_cpp_sys_2 as sys;

use crate::{
    rng::uniform_at,
    types::{SamplingParams, Token},
};

use super::{error::LlamaError, guard, model::Model};

/// The sampler of one sequence.
///
/// llama.cpp's own chain applies penalties, top-k, top-p, min-p and temperature; the draw is ours, by inverse CDF over
/// the remaining tokens in the order of their ids, so that it goes on unchanged on another worker: [`Sampler::new`]
/// with the tokens generated so far continues where they end.
pub struct Sampler {
    chain: Option<Chain>,
    candidates: Vec<sys::llama_token_data>,
    greedy: bool,
    seed: u64,
    /// Tokens chosen so far, those of the history included.
    n_chosen: u64,
}

struct Chain {
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

impl Sampler {
    /// A sampler for a sequence that has generated `history` so far.
    pub fn new(model: &Model, params: &SamplingParams, history: &[Token]) -> Result<Self, LlamaError> {
        check(params)?;
        let greedy = params.temperature <= 0.0;
        let mut sampler = Self {
            chain: Chain::new(model, params, greedy)?,
            candidates: Vec::new(),
            greedy,
            seed: params.seed,
            n_chosen: 0,
        };
        for &token in history {
            model.check_token(token)?;
            sampler.accept(token)?;
        }
        Ok(sampler)
    }

    /// Chooses the next token from its logits, one for each token of the vocabulary, and remembers it.
    ///
    /// Greedy takes the largest logit, and of equal ones the lowest id.
    pub fn sample(&mut self, logits: &[f32]) -> Result<Token, LlamaError> {
        let token = if self.greedy && self.chain.is_none() {
            argmax(logits.iter().copied().zip(0..))
        } else {
            let uniform = uniform_at(self.seed, self.n_chosen);
            let greedy = self.greedy;
            let candidates = self.apply(logits)?;
            if greedy { argmax(candidates.iter().map(|c| (c.logit, c.id))) } else { draw(candidates, uniform) }
        };
        let token = token.ok_or_else(|| LlamaError::Sampling {
            reason: "no logit is a number: the model or its input is broken".to_owned(),
        })?;
        self.accept(token)?;
        Ok(token)
    }

    /// Runs the chain over all tokens; gives those that are left.
    fn apply(&mut self, logits: &[f32]) -> Result<&mut [sys::llama_token_data], LlamaError> {
        self.candidates.clear();
        self.candidates.extend(logits.iter().zip(0..).map(|(&logit, id)| sys::llama_token_data { id, logit, p: 0.0 }));
        let Some(chain) = &self.chain else { return Ok(&mut self.candidates) };
        let mut array = sys::llama_token_data_array {
            data: self.candidates.as_mut_ptr(),
            size: self.candidates.len(),
            selected: -1,
            sorted: false,
        };
        // SAFETY: the chain is ours and the array describes our candidates.
        guard::call(|message, size| unsafe {
            guard::eldr_guard_sampler_apply(chain.raw.as_ptr(), &raw mut array, message, size)
        })
        .map_err(|e| LlamaError::Sampling { reason: e.to_string() })?;
        // SAFETY: a step may shorten the array or replace it by one it owns; either way `size` entries are there until
        // the chain is used again.
        Ok(unsafe { std::slice::from_raw_parts_mut(array.data, array.size) })
    }

    fn accept(&mut self, token: Token) -> Result<(), LlamaError> {
        self.n_chosen += 1;
        let Some(chain) = &self.chain else { return Ok(()) };
        // SAFETY: the chain is ours and the token is in the vocabulary.
        guard::call(|message, size| unsafe {
            guard::eldr_guard_sampler_accept(chain.raw.as_ptr(), token, message, size)
        })
        .map_err(|e| LlamaError::Sampling { reason: e.to_string() })
    }
}

impl fmt::Debug for Sampler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sampler(greedy: {}, seed: {}, after {} tokens)", self.greedy, self.seed, self.n_chosen)
    }
}

impl Chain {
    /// The steps that change something; `None` when none does. Greedy needs no step but the penalties.
    fn new(model: &Model, params: &SamplingParams, greedy: bool) -> Result<Option<Self>, LlamaError> {
        let whole = |n: u32| i32::try_from(n).unwrap_or(i32::MAX);
        let steps = guard::eldr_guard_sampling {
            penalty_last_n: whole(params.penalty_last_n),
            penalty_repeat: params.penalty_repeat,
            penalty_freq: params.penalty_freq,
            penalty_present: params.penalty_present,
            top_k: if greedy { 0 } else { whole(params.top_k) },
            top_p: if greedy { 1.0 } else { params.top_p },
            min_p: if greedy { 0.0 } else { params.min_p },
            temperature: if greedy { 1.0 } else { params.temperature },
            grammar: ptr::null(),
            grammar_root: ptr::null(),
        };
        let failed = |reason: String| LlamaError::Sampling { reason };
        let mut raw = ptr::null_mut();
        // SAFETY: the vocabulary lives as long as the model, and the steps outlive the call.
        guard::call(|message, size| unsafe {
            guard::eldr_guard_sampler_init(model.vocab(), &raw const steps, &raw mut raw, message, size)
        })
        .map_err(|e| failed(e.to_string()))?;
        let raw = NonNull::new(raw).ok_or_else(|| failed("llama.cpp made no sampler".to_owned()))?;
        let chain = Self { raw, _model: model.clone() };
        // SAFETY: the chain is ours.
        let n_steps = unsafe { sys::llama_sampler_chain_n(chain.raw.as_ptr()) };
        Ok((n_steps > 0).then_some(chain))
    }
}

fn check(params: &SamplingParams) -> Result<(), LlamaError> {
    let share = |x: f32| (0.0..=1.0).contains(&x);
    let problem = [
        (!params.temperature.is_finite(), "temperature is not a number"),
        (!share(params.top_p), "top_p must be between 0 and 1"),
        (!share(params.min_p), "min_p must be between 0 and 1"),
        (
            !(params.penalty_repeat.is_finite() && params.penalty_repeat > 0.0),
            "penalty_repeat must be above 0; 1 is off",
        ),
        (!params.penalty_freq.is_finite(), "penalty_freq is not a number"),
        (!params.penalty_present.is_finite(), "penalty_present is not a number"),
    ];
    match problem.into_iter().find(|(is_wrong, _)| *is_wrong) {
        Some((_, reason)) => Err(LlamaError::Sampling { reason: reason.to_owned() }),
        None => Ok(()),
    }
}

/// The id of the largest logit, the lowest of equal ones. `None` when no logit is a number.
fn argmax(logits: impl Iterator<Item = (f32, Token)>) -> Option<Token> {
    let mut best: Option<(f32, Token)> = None;
    for (logit, id) in logits.filter(|(logit, _)| !logit.is_nan()) {
        if best.is_none_or(|(top, top_id)| logit > top || (logit == top && id < top_id)) {
            best = Some((logit, id));
        }
    }
    best.map(|(_, id)| id)
}

/// The token at `uniform` of the cumulative distribution over the candidates, ascending by id.
///
/// By id and not by probability: two tokens of nearly equal probability that swap ranks from one device to another
/// would also swap their shares of the interval.
fn draw(candidates: &mut [sys::llama_token_data], uniform: f64) -> Option<Token> {
    let top = candidates.iter().map(|c| c.logit).filter(|l| !l.is_nan()).fold(f32::NEG_INFINITY, f32::max);
    if !top.is_finite() {
        return None;
    }
    if !candidates.is_sorted_by_key(|c| c.id) {
        candidates.sort_unstable_by_key(|c| c.id);
    }
    let weight = |c: &sys::llama_token_data| {
        if c.logit.is_nan() { 0.0 } else { (f64::from(c.logit) - f64::from(top)).exp() }
    };
    let total: f64 = candidates.iter().map(weight).sum();
    let target = uniform * total;
    let mut sum = 0.0;
    let mut last = None;
    for c in candidates.iter() {
        let w = weight(c);
        if w > 0.0 {
            sum += w;
            last = Some(c.id);
            if sum > target {
                break;
            }
        }
    }
    last
}
