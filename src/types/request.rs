use std::{sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};

use crate::types::Token;

/// What a caller asks for: a prompt in tokens, how to sample, and when to stop.
///
/// ```
/// use eldr::types::{Request, SamplingParams};
///
/// let sampling = SamplingParams { temperature: 0.8, top_p: 0.95, seed: 7, ..SamplingParams::default() };
/// let request = Request { prompt: vec![1, 15, 4], max_tokens: 64, sampling, domain: None, deadline: None };
/// assert_eq!(request.sampling.top_k, 0, "0 keeps all tokens");
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The prompt, special tokens included. Not empty.
    pub prompt: Vec<Token>,
    /// Tokens to generate at most; at least 1.
    pub max_tokens: u32,
    /// How each token is chosen.
    pub sampling: SamplingParams,
    /// A label of the workload, used only by the `domain` oracle.
    pub domain: Option<String>,
    /// Longest time from submission to the last token; past it the request ends with [`FinishReason::Deadline`].
    pub deadline: Option<Duration>,
}

/// How a token is chosen from the logits. The default is greedy.
///
/// Applied in this order: bias, grammar, penalties, top-k, top-p, min-p, temperature, draw. The i-th draw of a request depends on
/// `seed` and i alone, so the text does not depend on the worker, and a request that moves to another worker goes on
/// with the same text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingParams {
    /// 0 takes the likeliest token.
    pub temperature: f32,
    /// Keep the k likeliest tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of likeliest tokens whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this share of the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Divide the logits of the last `penalty_last_n` tokens by this; 1 is off.
    pub penalty_repeat: f32,
    /// Lower a token's logit by this for each time it occurred; 0 is off.
    pub penalty_freq: f32,
    /// Lower a token's logit by this when it occurred; 0 is off.
    pub penalty_present: f32,
    /// Generated tokens the penalties look back at.
    pub penalty_last_n: u32,
    /// Seed of the draws.
    pub seed: u64,
    /// Go on after an end-of-generation token, so that an output has exactly `max_tokens` tokens.
    pub ignore_eos: bool,
    /// Added to the logits of these tokens, each at most once; negative infinity forbids one.
    #[serde(skip)]
    pub logit_bias: Vec<(Token, f32)>,
    /// A grammar (GBNF, start symbol `root`) that the text must match from its first token on.
    #[serde(skip)]
    pub grammar: Option<Arc<str>>,
    /// Report the log probability of each token drawn and of so many of the likeliest.
    #[serde(skip)]
    pub n_logprobs: Option<u32>,
}

/// How likely a drawn token was, by the model's own distribution: before bias, grammar, penalties, truncation and
/// temperature.
///
/// ```
/// use eldr::types::{SamplingParams, TokenLogprobs};
///
/// // Asked for by
/// let sampling = SamplingParams { n_logprobs: Some(2), ..SamplingParams::default() };
/// // and told with each token:
/// let drawn = TokenLogprobs { logprob: -0.5, top: vec![(7, -0.5), (3, -1.2)] };
/// assert!(drawn.logprob.exp() > 0.6 && drawn.top.len() == sampling.n_logprobs.unwrap_or(0) as usize);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct TokenLogprobs {
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The likeliest tokens and theirs, likeliest first, of equals the lowest id first.
    pub top: Vec<(Token, f32)>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            penalty_repeat: 1.0,
            penalty_freq: 0.0,
            penalty_present: 0.0,
            penalty_last_n: 64,
            seed: 0,
            ignore_eos: false,
            logit_bias: Vec::new(),
            grammar: None,
            n_logprobs: None,
        }
    }
}

/// Why a request's stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended its text.
    Stop,
    /// `max_tokens` or the slot's length was reached.
    Length,
    /// The caller cancelled or dropped the stream.
    Cancelled,
    /// The request's deadline passed.
    Deadline,
}

/// What a finished request used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub completion_tokens: u32,
    /// Tokens of the prompt that were not computed, because a worker still held their keys and values.
    #[serde(default)]
    pub cached_tokens: u32,
    /// Blocks of the prompt that were there.
    #[serde(default)]
    pub block_hits: u32,
    /// Blocks of the prompt that were not.
    #[serde(default)]
    pub block_misses: u32,
    /// Of the cached tokens, those that came back from host memory or a disk and were verified.
    #[serde(default)]
    pub restored_tokens: u32,
}
