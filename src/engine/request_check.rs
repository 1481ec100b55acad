//! What a request must be for any worker to take it.
//!
//! Never looks at what the workers are doing.

use crate::{
    engine::{Engine, EngineError},
    types::{Request, Token},
};

impl Engine {
    /// Refuses what no worker could run, in a sentence.
    pub(super) fn check(&self, request: &Request) -> Result<(), EngineError> {
        let n_prompt = request.prompt.len();
        let n_ctx_slot = self.n_ctx_slot();
        let n_vocab = self.tokenizer().n_tokens();
        let refuse = |why: String| Err(EngineError::Request(why));
        if n_prompt == 0 {
            return refuse("the prompt is empty: give at least one token".to_owned());
        }
        if n_prompt > n_ctx_slot as usize {
            return refuse(too_long(n_prompt, n_ctx_slot));
        }
        if request.max_tokens == 0 {
            return refuse("max_tokens is 0: ask for at least one token".to_owned());
        }
        let unknown = |&&token: &&Token| u32::try_from(token).map_or(true, |token| token >= n_vocab);
        if let Some(token) = request.prompt.iter().find(unknown) {
            return refuse(format!("token {token} of the prompt is not in the vocabulary of {n_vocab} tokens"));
        }
        check_sampling(request).or_else(refuse)
    }
}

fn too_long(n_prompt: usize, n_ctx_slot: u32) -> String {
    format!(
        "the prompt has {n_prompt} tokens and a slot holds {n_ctx_slot}: shorten it, or raise --ctx if the model was \
         trained with a longer context"
    )
}

fn check_sampling(request: &Request) -> Result<(), String> {
    let s = &request.sampling;
    let rules = [
        (s.temperature.is_finite() && s.temperature >= 0.0, "temperature", s.temperature, "a finite number, 0 or more"),
        ((0.0..=1.0).contains(&s.top_p), "top_p", s.top_p, "between 0 and 1"),
        ((0.0..=1.0).contains(&s.min_p), "min_p", s.min_p, "between 0 and 1"),
        (
            s.penalty_repeat.is_finite() && s.penalty_repeat > 0.0,
            "penalty_repeat",
            s.penalty_repeat,
            "a finite number above 0",
        ),
        (s.penalty_freq.is_finite(), "penalty_freq", s.penalty_freq, "a finite number"),
        (s.penalty_present.is_finite(), "penalty_present", s.penalty_present, "a finite number"),
    ];
    match rules.iter().find(|rule| !rule.0) {
        Some((_, name, value, want)) => Err(format!("{name} is {value}; it must be {want}")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Symptom: the error advised --ctx, which the model's trained context had already cut.
    #[test]
    fn a_longer_context_is_advised_only_where_the_model_allows_it() {
        let text = too_long(2000, 1024);
        assert!(text.contains("2000 tokens") && text.contains("a slot holds 1024"), "{text}");
        assert!(text.contains("--ctx if the model was trained with a longer context"), "{text}");
    }
}
