//! What llama-server's `samplers`, a list of names, leaves of a request's sampling.
//!
//! Never takes another order than that of [`SamplingParams`]: the workers' draws have no other.

use serde_json::Value;

use super::{
    error::ApiError,
    fields::{Fields, wrong_kind},
};
use crate::types::SamplingParams;

/// In the order in which they are applied.
const OURS: [&str; 5] = ["penalties", "top_k", "top_p", "min_p", "temperature"];
/// Those that no request can turn on ([`super::refused`]): where they stand says nothing.
const OFF: [&str; 5] = ["dry", "top_n_sigma", "typ_p", "xtc", "adaptive_p"];
/// Other ways to write some of them, and the letters of the short form.
const ALIASES: [(&str, &str); 13] = [
    ("nucleus", "top_p"),
    ("temp", "temperature"),
    ("typ", "typ_p"),
    ("e", "penalties"),
    ("k", "top_k"),
    ("p", "top_p"),
    ("m", "min_p"),
    ("t", "temperature"),
    ("d", "dry"),
    ("s", "top_n_sigma"),
    ("y", "typ_p"),
    ("x", "xtc"),
    ("a", "adaptive_p"),
];

/// Turns off what `samplers` does not name.
pub(super) fn apply(fields: &Fields<'_>, sampling: &mut SamplingParams) -> Result<(), ApiError> {
    let names: Vec<String> = match fields.get("samplers") {
        None => return Ok(()),
        Some(Value::String(letters)) => letters.chars().map(String::from).collect(),
        Some(Value::Array(list)) => {
            let name = |(at, name): (usize, &Value)| {
                let wrong = || wrong_kind(&fields.path(&format!("samplers[{at}]")), "a string", name);
                name.as_str().map(str::to_lowercase).ok_or_else(wrong)
            };
            list.iter().enumerate().map(name).collect::<Result<_, _>>()?
        }
        Some(other) => return Err(wrong_kind(&fields.path("samplers"), "a list of names", other)),
    };
    let refuse = |why: String| Err(ApiError::invalid(&fields.path("samplers"), why));
    let mut used = Vec::new();
    for name in &names {
        let Some(name) = known(name) else {
            let [ours, off] = [OURS, OFF].map(|names| names.join(", "));
            return refuse(format!(
                "samplers names {name:?}; this server knows {ours}, and {off}, which are always off"
            ));
        };
        used.extend(OURS.iter().position(|&ours| ours == name));
    }
    if !used.is_sorted_by(|a, b| a < b) {
        return refuse(format!("samplers must be in this server's order, each once: {}", OURS.join(", ")));
    }
    let off = SamplingParams::default();
    for unused in (0..OURS.len()).filter(|at| !used.contains(at)) {
        match OURS[unused] {
            "penalties" => {
                sampling.penalty_repeat = off.penalty_repeat;
                sampling.penalty_freq = off.penalty_freq;
                sampling.penalty_present = off.penalty_present;
            }
            "top_k" => sampling.top_k = off.top_k,
            "top_p" => sampling.top_p = off.top_p,
            "min_p" => sampling.min_p = off.min_p,
            // Draws by the model's own probabilities, whatever the temperature.
            _ => sampling.temperature = 1.0,
        }
    }
    Ok(())
}

/// The sampler that is meant; dashes, and no line between words, are as good.
fn known(name: &str) -> Option<&'static str> {
    let bare = |name: &str| name.replace(['_', '-'], "");
    let own = OURS.into_iter().chain(OFF).find(|own| bare(own) == bare(name));
    own.or_else(|| ALIASES.iter().find(|(alias, _)| *alias == name).map(|&(_, own)| own))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const GIVEN: SamplingParams = SamplingParams {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.95,
        min_p: 0.05,
        penalty_repeat: 1.1,
        penalty_freq: 0.5,
        penalty_present: 0.5,
        penalty_last_n: 64,
        seed: 7,
        ignore_eos: false,
        logit_bias: Vec::new(),
        grammar: None,
        n_logprobs: None,
    };

    fn read(samplers: &Value) -> Result<SamplingParams, ApiError> {
        let body = json!({ "samplers": samplers });
        let mut sampling = GIVEN;
        apply(&Fields::of(&body, "").expect("an object"), &mut sampling).map(|()| sampling)
    }

    // Symptom: a request that asked for temperature alone was also cut to the 40 likeliest tokens.
    #[test]
    fn what_is_not_named_is_off() {
        let all = json!(["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]);
        for samplers in [all, json!(null), json!("edskypmxt"), json!(["Penalties", "topk", "nucleus", "min-p", "temp"])]
        {
            assert_eq!(read(&samplers), Ok(GIVEN), "{samplers}");
        }
        let temperature = read(&json!(["temperature"])).expect("one of its own");
        assert_eq!(temperature, SamplingParams { temperature: 0.8, seed: 7, ..SamplingParams::default() });
        let none = SamplingParams { temperature: 1.0, seed: 7, ..SamplingParams::default() };
        assert_eq!((read(&json!([])), read(&json!(""))), (Ok(none.clone()), Ok(none)));
    }

    #[test]
    fn another_order_and_what_it_does_not_know_are_refused() {
        for (samplers, want) in [
            (json!(["temperature", "top_k"]), "samplers must be in this server's order"),
            (json!(["top_k", "top_k"]), "samplers must be in this server's order"),
            (json!(["infill"]), "samplers names \"infill\"; this server knows penalties, top_k"),
            (json!("kz"), "samplers names \"z\""),
            (json!([1]), "samplers[0] must be a string"),
            (json!(1), "samplers must be a list of names"),
        ] {
            let error = read(&samplers).expect_err("not done");
            assert!(error.message.starts_with(want), "{samplers}: {}", error.message);
        }
    }
}
