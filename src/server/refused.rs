//! Which fields of OpenAI's and llama-server's requests ask for what this server does not do.
//!
//! Never refuses one that asks for nothing, and never one without which the answer is the same.

use serde_json::Value;

use super::{error::ApiError, fields::Fields};

/// The values with which a field asks for nothing.
#[derive(Debug, Clone, Copy)]
enum Off {
    False,
    True,
    /// An empty text or list.
    Empty,
    AtMost(f64),
    AtLeast(f64),
    Negative,
    /// The list of this one text.
    Only(&'static str),
    /// None.
    Absent,
}

/// By name: when they are off, and what to do instead. Fields that only matter together with one of these are not here.
const FIELDS: [(&str, Off, &str); 24] = [
    ("suffix", Off::Empty, "leave it out"),
    ("best_of", Off::AtMost(1.0), "ask for n"),
    ("echo", Off::False, "leave it out"),
    ("functions", Off::Empty, "give tools"),
    ("modalities", Off::Only("text"), "ask for text"),
    ("audio", Off::Absent, "ask for text"),
    ("web_search_options", Off::Absent, "leave it out"),
    ("add_generation_prompt", Off::True, "leave it out"),
    ("continue_final_message", Off::False, "leave it out"),
    ("reasoning_budget_tokens", Off::Negative, "leave it out, or give -1"),
    ("thinking_budget_tokens", Off::Negative, "leave it out, or give -1"),
    ("grammar_lazy", Off::False, "leave it out: a grammar holds from the first token on"),
    ("post_sampling_probs", Off::False, "leave it out: log probabilities are the model's own"),
    ("lora", Off::Empty, "leave it out"),
    ("n_indent", Off::AtMost(0.0), "leave it out, or give 0"),
    ("t_max_predict_ms", Off::AtMost(0.0), "leave it out, or give -1"),
    ("min_keep", Off::AtMost(1.0), "leave it out, or give 0"),
    ("top_n_sigma", Off::AtMost(0.0), "leave it out, or give -1"),
    ("xtc_probability", Off::AtMost(0.0), "leave it out, or give 0"),
    ("typical_p", Off::AtLeast(1.0), "leave it out, or give 1"),
    ("dynatemp_range", Off::AtMost(0.0), "leave it out, or give 0"),
    ("dry_multiplier", Off::AtMost(0.0), "leave it out, or give 0"),
    ("mirostat", Off::AtMost(0.0), "leave it out, or give 0"),
    ("adaptive_target", Off::Negative, "leave it out, or give -1"),
];

/// Refuses what would be answered as if it had not been asked for.
pub(super) fn check(fields: &Fields<'_>) -> Result<(), ApiError> {
    for (name, off, instead) in FIELDS {
        if fields.get(name).is_some_and(|value| !off.holds(value)) {
            let path = fields.path(name);
            let why = format!("{path} asks for something that this server does not do; {instead}");
            return Err(ApiError::invalid(&path, why));
        }
    }
    Ok(())
}

impl Off {
    fn holds(self, value: &Value) -> bool {
        let is_number = |holds: &dyn Fn(f64) -> bool| value.as_f64().is_some_and(holds);
        match self {
            Self::False => value == &Value::Bool(false),
            Self::True => value == &Value::Bool(true),
            Self::Empty => {
                value.as_str().is_some_and(str::is_empty)
                    || value.as_array().is_some_and(Vec::is_empty)
                    || value == &Value::Bool(false)
            }
            Self::AtMost(most) => is_number(&|number| number <= most),
            Self::AtLeast(least) => is_number(&|number| number >= least),
            Self::Negative => is_number(&|number| number < 0.0),
            Self::Only(text) => value.as_array().is_some_and(|list| matches!(&list[..], [one] if one == text)),
            Self::Absent => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(body: &Value) -> Option<String> {
        check(&Fields::of(body, "").expect("an object")).err().and_then(|error| error.param)
    }

    // Symptom: a request with mirostat, a DRY penalty or a budget for thinking was answered as one without, and nobody told.
    #[test]
    fn what_is_asked_for_and_not_done_is_refused() {
        for (name, value) in [
            ("suffix", json!("}")),
            ("best_of", json!(2)),
            ("echo", json!(true)),
            ("functions", json!([{"name": "f"}])),
            ("modalities", json!(["text", "audio"])),
            ("audio", json!({"voice": "alloy"})),
            ("web_search_options", json!({})),
            ("add_generation_prompt", json!(false)),
            ("continue_final_message", json!("content")),
            ("reasoning_budget_tokens", json!(0)),
            ("thinking_budget_tokens", json!(100)),
            ("grammar_lazy", json!(true)),
            ("post_sampling_probs", json!(true)),
            ("lora", json!([{"id": 0, "scale": 1.0}])),
            ("n_indent", json!(4)),
            ("t_max_predict_ms", json!(1000)),
            ("min_keep", json!(2)),
            ("top_n_sigma", json!(1.0)),
            ("xtc_probability", json!(0.5)),
            ("typical_p", json!(0.9)),
            ("dynatemp_range", json!(0.5)),
            ("dry_multiplier", json!(0.8)),
            ("mirostat", json!(2)),
            ("mirostat", json!("2")),
            ("adaptive_target", json!(0.0)),
        ] {
            assert_eq!(refused(&json!({ name: value })).as_deref(), Some(name), "{value}");
        }
        let error = check(&Fields::of(&json!({"mirostat": 2}), "").expect("an object")).expect_err("on");
        let want = "mirostat asks for something that this server does not do; leave it out, or give 0";
        assert_eq!(error.message, want);
    }

    #[test]
    fn what_asks_for_nothing_is_taken() {
        // llama-server's defaults, as its own pages send them.
        let defaults = json!({
            "suffix": "", "best_of": 1, "echo": false, "functions": [], "modalities": ["text"], "audio": null,
            "add_generation_prompt": true, "continue_final_message": false, "reasoning_budget_tokens": -1, "grammar_lazy": false,
            "post_sampling_probs": false, "lora": [], "n_indent": 0, "t_max_predict_ms": -1, "min_keep": 0, "top_n_sigma": -1.0,
            "xtc_probability": 0.0, "xtc_threshold": 0.1, "typical_p": 1.0, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0,
            "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "mirostat": 0,
            "mirostat_tau": 5.0, "mirostat_eta": 0.1, "adaptive_target": -1.0, "adaptive_decay": 0.9, "id_slot": -1, "n_keep": 0,
            "n_discard": 0, "n_cache_reuse": 0, "return_progress": true, "user": "me", "store": false, "service_tier": "auto",
        });
        assert_eq!(refused(&defaults), None);
    }
}
