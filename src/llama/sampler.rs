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

use super::{draw::draw, error::LlamaError, guard, model::Model};

/// The sampler of one sequence.
///
/// llama.cpp's own chain applies penalties, top-k, top-p and min-p; temperature and draw are ours, by inverse CDF over
/// the remaining tokens in the order of their ids, so that it goes on unchanged on another worker: [`Sampler::new`]
/// with the tokens generated so far continues where they end.
pub struct Sampler {
    chain: Option<Chain>,
    candidates: Vec<sys::llama_token_data>,
    room: Room,
    /// Tokens are drawn from the logits divided by this, after the chain.
    temperature: f32,
    greedy: bool,
    seed: u64,
    /// Tokens chosen so far, those of the history included.
    n_chosen: u64,
}

/// Kept to spare allocations.
#[derive(Default)]
struct Room {
    logits: Vec<f32>,
    weights: Vec<f32>,
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
            room: Room::default(),
            temperature: params.temperature,
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
        } else if self.chain.is_none() {
            let uniform = uniform_at(self.seed, self.n_chosen);
            draw(logits, self.temperature, uniform, &mut self.room.weights).and_then(|id| Token::try_from(id).ok())
        } else {
            let uniform = uniform_at(self.seed, self.n_chosen);
            let (greedy, temperature, mut room) = (self.greedy, self.temperature, std::mem::take(&mut self.room));
            let candidates = self.apply(logits)?;
            let token = if greedy {
                argmax(candidates.iter().map(|c| (c.logit, c.id)))
            } else {
                draw_candidate(candidates, temperature, uniform, &mut room)
            };
            self.room = room;
            token
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
            // The last step, which the draw does itself.
            temperature: 1.0,
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
        if best.is_none_or(|(top, top_id)| logit > top || (logit >= top && id < top_id)) {
            best = Some((logit, id));
        }
    }
    best.map(|(_, id)| id)
}

/// The token at `uniform` of the cumulative distribution over the candidates, ascending by id.
///
/// By id and not by probability: two tokens of nearly equal probability that swap ranks from one device to another
/// would also swap their shares of the interval.
fn draw_candidate(
    candidates: &mut [sys::llama_token_data],
    temperature: f32,
    uniform: f64,
    room: &mut Room,
) -> Option<Token> {
    if !candidates.is_sorted_by_key(|c| c.id) {
        candidates.sort_unstable_by_key(|c| c.id);
    }
    room.logits.clear();
    room.logits.extend(candidates.iter().map(|c| c.logit));
    draw(&room.logits, temperature, uniform, &mut room.weights).map(|index| candidates[index].id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llama::testing::model;

    fn sampler(params: &SamplingParams, history: &[Token]) -> Sampler {
        Sampler::new(model(), params, history).expect("a sampler")
    }

    /// Logits of the shipped model's vocabulary that are 0 but for these.
    fn logits(pairs: &[(usize, f32)]) -> Vec<f32> {
        let mut logits = vec![0.0; model().n_vocab()];
        for &(id, logit) in pairs {
            logits[id] = logit;
        }
        logits
    }

    #[test]
    fn greedy_takes_the_largest_and_of_equals_the_first() {
        let mut greedy = sampler(&SamplingParams::default(), &[]);
        assert_eq!(greedy.sample(&logits(&[(9, 2.0), (7, 2.0), (800, 1.0)])), Ok(7));
        assert_eq!(greedy.sample(&logits(&[(3, f32::NAN), (9, -1.0), (4095, 5.0)])), Ok(4095));
        assert!(greedy.sample(&vec![f32::NAN; model().n_vocab()]).is_err());
    }

    #[test]
    fn penalties_apply_to_greedy_and_come_back_with_the_history() {
        let params = SamplingParams { penalty_present: 1.5, penalty_last_n: 2, ..SamplingParams::default() };
        let row = logits(&[(5, 4.0), (6, 3.0), (7, 2.0)]);
        let mut here = sampler(&params, &[]);
        let first: Vec<_> = (0..3).map(|_| here.sample(&row).expect("a token")).collect();
        assert_eq!(first, [5, 6, 5]);
        let mut moved = sampler(&params, &first[..2]);
        assert_eq!(moved.sample(&row), Ok(5));
        let mut forgot = sampler(&params, &[5, 9, 9]);
        assert_eq!(forgot.sample(&row), Ok(5), "the window holds the last two tokens only");
    }

    #[test]
    fn a_draw_depends_on_seed_index_and_logits_alone() {
        let params = SamplingParams { temperature: 0.9, seed: 11, ..SamplingParams::default() };
        let row = logits(&[(1, 8.0), (2, 8.0), (3, 8.0), (4, 8.0)]);
        let mut stayed = sampler(&params, &[]);
        let tokens: Vec<_> = (0..40).map(|_| stayed.sample(&row).expect("a token")).collect();
        for cut in [0, 1, 17, 39] {
            let mut moved = sampler(&params, &tokens[..cut]);
            let rest: Vec<_> = (cut..40).map(|_| moved.sample(&row).expect("a token")).collect();
            assert_eq!(rest, tokens[cut..], "moved after {cut}");
        }
        let mut other = sampler(&SamplingParams { seed: 12, ..params }, &[]);
        assert_ne!((0..40).map(|_| other.sample(&row).expect("a token")).collect::<Vec<_>>(), tokens);
        assert!((1..=4).all(|id| tokens.contains(&id)), "{tokens:?}");
    }

    #[test]
    fn truncation_keeps_the_likeliest() {
        let row = logits(&[(10, 9.0), (20, 8.0), (30, 7.0), (40, 6.0)]);
        let base = SamplingParams { temperature: 1.0, seed: 3, ..SamplingParams::default() };
        let drawn = |params: SamplingParams| {
            let mut sampler = sampler(&params, &[]);
            let mut seen: Vec<_> = (0..200).map(|_| sampler.sample(&row).expect("a token")).collect();
            seen.sort_unstable();
            seen.dedup();
            seen
        };
        assert_eq!(drawn(SamplingParams { top_k: 2, ..base }), [10, 20]);
        assert_eq!(drawn(SamplingParams { min_p: 0.2, ..base }), [10, 20]);
        assert_eq!(drawn(SamplingParams { top_p: 0.1, ..base }), [10]);
        assert_eq!(drawn(SamplingParams { temperature: 0.01, ..base }), [10]);
    }

    // A chain that changes nothing draws what no chain draws.
    #[test]
    fn the_short_way_draws_the_same_tokens() {
        let row: Vec<f32> = (0..model().n_vocab()).map(|id| (id * 7919 % 4001) as f32 / 400.0).collect();
        let plain = SamplingParams { temperature: 0.7, seed: 5, ..SamplingParams::default() };
        let chained = SamplingParams { top_k: 4096, ..plain };
        let (mut short, mut long) = (sampler(&plain, &[]), sampler(&chained, &[]));
        for _ in 0..300 {
            assert_eq!(short.sample(&row), long.sample(&row));
        }
    }

    #[test]
    fn settings_that_cannot_work_are_named() {
        let base = SamplingParams::default();
        for (params, word) in [
            (SamplingParams { temperature: f32::NAN, ..base }, "temperature"),
            (SamplingParams { top_p: 1.5, ..base }, "top_p"),
            (SamplingParams { min_p: -0.1, ..base }, "min_p"),
            (SamplingParams { penalty_repeat: 0.0, ..base }, "penalty_repeat"),
            (SamplingParams { penalty_freq: f32::INFINITY, ..base }, "penalty_freq"),
        ] {
            let error = Sampler::new(model(), &params, &[]).expect_err(word).to_string();
            assert!(error.contains(word), "{error}");
        }
        assert!(Sampler::new(model(), &base, &[-1]).is_err());
    }
}
