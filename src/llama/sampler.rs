//! How the next token is chosen from a row of logits.
//!
//! Never draws from hidden state: a draw depends on the seed, on how many tokens came before, and on the logits alone.

use std::fmt;

use llama_cpp_sys_2 as sys;

use crate::{
    rng::uniform_at,
    types::{SamplingParams, Token, TokenLogprobs},
};

use super::{
    chain::{Chain, failed, no_steps},
    draw::draw,
    error::LlamaError,
    grammar::Grammar,
    guard, logprobs,
    model::Model,
};

/// What tells the draw under a grammar from the one before it, which the grammar did not allow.
const SECOND_DRAW: u64 = 0x6772_616d_6d61_7221;

/// The sampler of one sequence.
///
/// llama.cpp's own chain applies penalties, top-k, top-p and min-p; temperature and draw are ours, by inverse CDF over
/// the remaining tokens in the order of their ids, so that it goes on unchanged on another worker: [`Sampler::new`]
/// with the tokens generated so far continues where they end.
///
/// Under a grammar a token is drawn as without it, and if it is not allowed, a second one among those that are. That
/// is the distribution over the allowed tokens, and spares looking at all of them at each step.
pub struct Sampler {
    model: Model,
    chain: Option<Chain>,
    grammar: Option<Grammar>,
    bias: Vec<(Token, f32)>,
    candidates: Vec<sys::llama_token_data>,
    room: Room,
    /// Tokens are drawn from the logits divided by this, after the chain.
    temperature: f32,
    greedy: bool,
    seed: u64,
    /// Tokens chosen so far, those of the history included.
    n_chosen: u64,
    n_logprobs: Option<u32>,
    logprobs: Option<Box<TokenLogprobs>>,
}

/// Kept to spare allocations.
#[derive(Default)]
struct Room {
    biased: Vec<f32>,
    logits: Vec<f32>,
    weights: Vec<f32>,
}

impl Sampler {
    /// A sampler for a sequence that has generated `history` so far.
    pub fn new(model: &Model, params: &SamplingParams, history: &[Token]) -> Result<Self, LlamaError> {
        check(params)?;
        let greedy = params.temperature <= 0.0;
        for &(token, _) in &params.logit_bias {
            model.check_token(token)?;
        }
        let mut sampler = Self {
            model: model.clone(),
            chain: chain(model, params, greedy)?,
            grammar: params.grammar.as_deref().map(|text| Grammar::new(model, text)).transpose()?,
            bias: params.logit_bias.clone(),
            candidates: Vec::new(),
            room: Room::default(),
            temperature: params.temperature,
            greedy,
            seed: params.seed,
            n_chosen: 0,
            n_logprobs: params.n_logprobs,
            logprobs: None,
        };
        for &token in history {
            model.check_token(token)?;
            sampler.accept(token)?;
        }
        Ok(sampler)
    }

    /// Says why a grammar can not be used.
    pub fn check_grammar(model: &Model, grammar: &str) -> Result<(), LlamaError> {
        Grammar::new(model, grammar).map(drop)
    }

    /// Chooses the next token from its logits, one for each token of the vocabulary, and remembers it.
    ///
    /// Greedy takes the largest logit, and of equal ones the lowest id. A grammar that allows nothing more ends the
    /// text.
    pub fn sample(&mut self, logits: &[f32]) -> Result<Token, LlamaError> {
        let mut room = std::mem::take(&mut self.room);
        let mut biased = std::mem::take(&mut room.biased);
        let chosen = self.choose(self.biased(logits, &mut biased), &mut room);
        room.biased = biased;
        self.room = room;
        let token = chosen?;
        self.logprobs = self.n_logprobs.map(|n| Box::new(logprobs::of(logits, token, n as usize)));
        self.accept(token)?;
        Ok(token)
    }

    /// How likely the last token was, once, if the parameters ask for it.
    pub fn take_logprobs(&mut self) -> Option<Box<TokenLogprobs>> {
        self.logprobs.take()
    }

    fn biased<'a>(&self, logits: &'a [f32], room: &'a mut Vec<f32>) -> &'a [f32] {
        if self.bias.is_empty() {
            return logits;
        }
        room.clear();
        room.extend_from_slice(logits);
        for &(token, bias) in &self.bias {
            room[token as usize] += bias;
        }
        room
    }

    fn choose(&mut self, logits: &[f32], room: &mut Room) -> Result<Token, LlamaError> {
        let uniform = uniform_at(self.seed, self.n_chosen);
        let token = if self.chain.is_some() {
            self.fill(logits);
            self.pick(uniform, room)?
        } else if self.greedy {
            argmax(logits.iter().copied().zip(0..))
        } else {
            draw(logits, self.temperature, uniform, &mut room.weights).and_then(|id| Token::try_from(id).ok())
        };
        let nothing = || failed("no logit is a number: the model or its input is broken".to_owned());
        let token = match token {
            Some(token) => token,
            // Every token was forbidden: the text ends, which is the request's doing and not the worker's.
            None if !self.bias.is_empty() => return self.model.eos().ok_or_else(nothing),
            None => return Err(nothing()),
        };
        let Some(grammar) = &self.grammar else { return Ok(token) };
        if grammar.allows(token)? {
            return Ok(token);
        }
        self.fill(logits);
        if let Some(grammar) = &self.grammar {
            grammar.filter(&mut self.candidates)?;
        }
        let uniform = uniform_at(self.seed ^ SECOND_DRAW, self.n_chosen);
        match self.pick(uniform, room)? {
            Some(token) => Ok(token),
            None => self.model.eos().ok_or_else(nothing),
        }
    }

    /// All tokens are candidates.
    fn fill(&mut self, logits: &[f32]) {
        self.candidates.clear();
        self.candidates.extend(logits.iter().zip(0..).map(|(&logit, id)| sys::llama_token_data { id, logit, p: 0.0 }));
    }

    /// Runs the chain over the candidates and takes one of those that are left.
    fn pick(&mut self, uniform: f64, room: &mut Room) -> Result<Option<Token>, LlamaError> {
        let left = match &self.chain {
            _ if self.candidates.is_empty() => return Ok(None),
            Some(chain) => chain.apply(&mut self.candidates)?,
            None => &mut self.candidates,
        };
        Ok(if self.greedy {
            argmax(left.iter().map(|c| (c.logit, c.id)))
        } else {
            draw_candidate(left, self.temperature, uniform, room)
        })
    }

    fn accept(&mut self, token: Token) -> Result<(), LlamaError> {
        self.n_chosen += 1;
        if let Some(grammar) = self.grammar.as_mut().filter(|_| !self.model.is_eog(token)) {
            grammar.accept(token)?;
        }
        self.chain.as_mut().map_or(Ok(()), |chain| chain.accept(token))
    }
}

impl fmt::Debug for Sampler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sampler(greedy: {}, seed: {}, after {} tokens)", self.greedy, self.seed, self.n_chosen)
    }
}

/// The steps that change something; `None` when none does. Greedy needs no step but the penalties; temperature is the
/// last step, which the draw does itself.
fn chain(model: &Model, params: &SamplingParams, greedy: bool) -> Result<Option<Chain>, LlamaError> {
    let whole = |n: u32| i32::try_from(n).unwrap_or(i32::MAX);
    let steps = guard::eldr_guard_sampling {
        penalty_last_n: whole(params.penalty_last_n),
        penalty_repeat: params.penalty_repeat,
        penalty_freq: params.penalty_freq,
        penalty_present: params.penalty_present,
        top_k: if greedy { 0 } else { whole(params.top_k) },
        top_p: if greedy { 1.0 } else { params.top_p },
        min_p: if greedy { 0.0 } else { params.min_p },
        ..no_steps()
    };
    let chain = Chain::new(model, &steps)?.ok_or_else(|| failed("llama.cpp made no sampler".to_owned()))?;
    Ok((!chain.is_empty()).then_some(chain))
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
        (
            params.logit_bias.iter().any(|(_, bias)| bias.is_nan() || *bias == f32::INFINITY),
            "a logit's bias is not a number",
        ),
        (params.grammar.is_some() && params.ignore_eos, "a grammar ends the text: it can not go on past its end"),
    ];
    match problem.into_iter().find(|(is_wrong, _)| *is_wrong) {
        Some((_, reason)) => Err(LlamaError::Sampling { reason: reason.to_owned() }),
        None => Ok(()),
    }
}

/// The id of the largest logit, the lowest of equal ones. `None` when no logit is a number above negative infinity.
fn argmax(logits: impl Iterator<Item = (f32, Token)>) -> Option<Token> {
    let mut best: Option<(f32, Token)> = None;
    for (logit, id) in logits.filter(|(logit, _)| *logit > f32::NEG_INFINITY) {
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
        let mut other = sampler(&SamplingParams { seed: 12, ..params.clone() }, &[]);
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
        assert_eq!(drawn(SamplingParams { top_k: 2, ..base.clone() }), [10, 20]);
        assert_eq!(drawn(SamplingParams { min_p: 0.2, ..base.clone() }), [10, 20]);
        assert_eq!(drawn(SamplingParams { top_p: 0.1, ..base.clone() }), [10]);
        assert_eq!(drawn(SamplingParams { temperature: 0.01, ..base.clone() }), [10]);
    }

    // A chain that changes nothing draws what no chain draws.
    #[test]
    fn the_short_way_draws_the_same_tokens() {
        let row: Vec<f32> = (0..model().n_vocab()).map(|id| (id * 7919 % 4001) as f32 / 400.0).collect();
        let plain = SamplingParams { temperature: 0.7, seed: 5, ..SamplingParams::default() };
        let chained = SamplingParams { top_k: 4096, ..plain.clone() };
        let (mut short, mut long) = (sampler(&plain, &[]), sampler(&chained, &[]));
        for _ in 0..300 {
            assert_eq!(short.sample(&row), long.sample(&row));
        }
    }

    #[test]
    fn settings_that_cannot_work_are_named() {
        let base = SamplingParams::default();
        for (params, word) in [
            (SamplingParams { temperature: f32::NAN, ..base.clone() }, "temperature"),
            (SamplingParams { top_p: 1.5, ..base.clone() }, "top_p"),
            (SamplingParams { min_p: -0.1, ..base.clone() }, "min_p"),
            (SamplingParams { penalty_repeat: 0.0, ..base.clone() }, "penalty_repeat"),
            (SamplingParams { penalty_freq: f32::INFINITY, ..base.clone() }, "penalty_freq"),
        ] {
            let error = Sampler::new(model(), &params, &[]).expect_err(word).to_string();
            assert!(error.contains(word), "{error}");
        }
        assert!(Sampler::new(model(), &base, &[-1]).is_err());
    }

    #[test]
    fn a_bias_changes_what_is_likeliest() {
        let row = logits(&[(5, 4.0), (6, 3.0), (7, 2.0)]);
        let with = |logit_bias: Vec<(Token, f32)>| {
            let params = SamplingParams { logit_bias, ..SamplingParams::default() };
            sampler(&params, &[]).sample(&row)
        };
        assert_eq!(with(vec![(5, f32::NEG_INFINITY)]), Ok(6));
        assert_eq!(with(vec![(7, 2.5)]), Ok(7));
        let all: Vec<_> =
            (0..model().n_vocab()).map(|id| (Token::try_from(id).expect("a token"), f32::NEG_INFINITY)).collect();
        assert_eq!(with(all), Ok(model().eos().expect("a last token")));
        let params = SamplingParams { logit_bias: vec![(-1, 1.0)], ..SamplingParams::default() };
        assert!(Sampler::new(model(), &params, &[]).is_err());
    }

    #[test]
    fn a_grammar_is_kept_whatever_is_likely() {
        let row: Vec<f32> = (0..model().n_vocab()).map(|id| (id * 7919 % 4001) as f32 / 400.0).collect();
        let grammar = Some("root ::= [0-9]{3} \"-\" [a-f]{2}".into());
        for temperature in [0.0, 1.0] {
            for penalty_present in [0.0, 0.5] {
                let params = SamplingParams {
                    temperature,
                    penalty_present,
                    seed: 3,
                    grammar: grammar.clone(),
                    ..SamplingParams::default()
                };
                let mut here = sampler(&params, &[]);
                let mut tokens = Vec::new();
                while !tokens.last().is_some_and(|&token| model().is_eog(token)) {
                    tokens.push(here.sample(&row).expect("a token"));
                    assert!(tokens.len() < 9, "{tokens:?}");
                }
                tokens.pop();
                let text = model().text(&tokens).expect("text");
                let (digits, letters) = text.split_once('-').expect("a dash");
                assert!(digits.len() == 3 && digits.bytes().all(|b| b.is_ascii_digit()), "{text}");
                assert!(letters.len() == 2 && letters.bytes().all(|b| (b'a'..=b'f').contains(&b)), "{text}");
                let mut moved = sampler(&params, &tokens[..2]);
                assert_eq!(moved.sample(&row), Ok(tokens[2]), "goes on elsewhere");
            }
        }
        let endless = SamplingParams { ignore_eos: true, grammar, ..SamplingParams::default() };
        assert!(Sampler::new(model(), &endless, &[]).is_err());
    }

    #[test]
    fn how_likely_a_token_was_is_told_once_and_only_if_asked() {
        let row = logits(&[(5, 4.0), (6, 3.0)]);
        let params = SamplingParams { n_logprobs: Some(1), ..SamplingParams::default() };
        let mut asked = sampler(&params, &[]);
        asked.sample(&row).expect("a token");
        assert_eq!(asked.take_logprobs().expect("asked").top.len(), 1);
        assert_eq!(asked.take_logprobs(), None);
        let mut not_asked = sampler(&SamplingParams::default(), &[]);
        not_asked.sample(&row).expect("a token");
        assert_eq!(not_asked.take_logprobs(), None);
    }
}
