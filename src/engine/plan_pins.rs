//! Which pinned prefixes the prefill workers of a configuration can keep, before anything is loaded.
//!
//! Never computes one, and never decides for a running worker, which says the same in its log.

use std::path::Path;

use crate::{
    engine::{EngineConfig, EngineError, ModelTokenizer, N_PREFILL_PARALLEL, Tokenizer},
    llama::Model,
    schedule::PrefixConfig,
    types::Token,
};

/// Room for pinned prefixes in the smallest prefill worker.
#[derive(Debug, Clone, Copy)]
pub(super) struct PinRoom {
    pub n_slots: u32,
    pub n_ctx_slot: u32,
    /// The model's memory can be cut to a prefix.
    pub cuts: bool,
}

/// How many of the configured prefixes are kept, each in a slot of every prefill worker, and why others are not.
///
/// Errors: a file that can not be read, or whose text can not be tokens.
pub(super) fn pinned(config: &EngineConfig, model: &Model, room: PinRoom) -> Result<(u32, Vec<String>), EngineError> {
    let tokenizer = (!config.pins.is_empty()).then(|| ModelTokenizer::new(model.clone()));
    let mut kept: Vec<Vec<Token>> = Vec::new();
    let mut problems = Vec::new();
    for path in &config.pins {
        let Some(tokenizer) = &tokenizer else { break };
        let text = std::fs::read_to_string(path).map_err(|error| {
            EngineError::Config(format!("cannot read {}: {error}; name a file that can be read", path.display()))
        })?;
        let mut tokens = tokenizer.tokenize(&text).map_err(EngineError::Request)?;
        let n_tokens = tokens.len();
        tokens.truncate(n_tokens - n_tokens % PrefixConfig::default().block as usize);
        if kept.contains(&tokens) {
            continue;
        }
        match problem(n_tokens, kept.len() as u32, room) {
            Some(problem) => problems.push(told(path, &problem)),
            None => kept.push(tokens),
        }
    }
    Ok((kept.len() as u32, problems))
}

fn told(path: &Path, problem: &str) -> String {
    format!("the prefix of {} will not be pinned: {problem}", path.display())
}

/// Why a prefix of so many tokens is not kept beside so many others.
fn problem(n_tokens: usize, n_kept: u32, room: PinRoom) -> Option<String> {
    let block = PrefixConfig::default().block;
    let PinRoom { n_slots, n_ctx_slot, cuts } = room;
    let n_free = N_PREFILL_PARALLEL.min(n_slots);
    if !cuts {
        return Some("the model's memory can not be cut to it (recurrent layers)".to_owned());
    }
    if n_tokens < block as usize {
        return Some(format!("it has {n_tokens} tokens, and whole blocks of {block} are pinned"));
    }
    if n_tokens >= n_ctx_slot as usize {
        return Some(format!("its {n_tokens} tokens leave no room for a prompt in a slot of {n_ctx_slot}"));
    }
    (n_slots < n_free + n_kept + 1).then(|| {
        format!(
            "each takes a slot of the prefill worker, and prompts need {n_free} of its {n_slots}; give it more slots"
        )
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::engine::Plan;

    const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-moe-64x4.gguf");

    #[test]
    fn a_prefix_is_kept_while_slots_are_left() {
        let room = PinRoom { n_slots: 6, n_ctx_slot: 256, cuts: true };
        let block = PrefixConfig::default().block as usize;
        assert_eq!([0, 1].map(|n_kept| problem(block, n_kept, room)), [None, None]);
        assert!(problem(block, 2, room).is_some_and(|why| why.contains("need 4 of its 6")));
        assert!(problem(block - 1, 0, room).is_some_and(|why| why.contains("whole blocks")));
        assert!(problem(256, 0, room).is_some_and(|why| why.contains("in a slot of 256")));
        assert!(problem(block, 0, PinRoom { cuts: false, ..room }).is_some());
        assert!(problem(block, 0, PinRoom { n_slots: 2, ..room }).is_some_and(|why| why.contains("need 2 of its 2")));
    }

    // Symptom: a plan said that all was well with pins that the engine then left out.
    #[test]
    fn a_plan_tells_the_pins_that_will_be_left_out() {
        let dir = tempfile::tempdir().expect("a folder");
        let pin = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::write(&path, text).expect("written");
            path
        };
        let mut config = EngineConfig {
            prefill: "1@cpu".parse().expect("valid"),
            decode: "1@cpu".parse().expect("valid"),
            n_slots: 5,
            n_threads: 1,
            ..EngineConfig::default()
        };
        config.pins = vec![
            pin("first", &"You are a careful assistant. ".repeat(20)),
            pin("short", "You"),
            pin("same", &"You are a careful assistant. ".repeat(20)),
            pin("second", &"Answer in one word. ".repeat(20)),
        ];
        let plan = Plan::new(Path::new(MODEL), &config).expect("a plan");
        assert_eq!(plan.n_pinned, 1);
        assert!(plan.unpinned.len() == 2 && plan.unpinned[0].contains("short"), "{:?}", plan.unpinned);
        assert!(plan.unpinned[1].contains("need 4 of its 5"), "{:?}", plan.unpinned);
        config.pins.push(dir.path().join("none"));
        let error = Plan::new(Path::new(MODEL), &config).expect_err("no such file").to_string();
        assert!(error.contains("none") && error.contains("name a file"), "{error}");
    }
}
