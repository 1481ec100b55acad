//! Which options of the prefix cache change nothing with this model, in a sentence each.
//!
//! Never refuses one: what is asked for in vain does no harm, but whoever asked should know.

use crate::engine::EngineConfig;

/// What the notes depend on besides the configuration.
#[derive(Debug, Clone, Copy)]
pub(super) struct PrefixFacts {
    /// Tokens of the model's sliding window; 0 without.
    pub n_swa: u32,
    /// Tokens that are kept at most.
    pub max_tokens: u64,
    /// Tokens of a block.
    pub block: u32,
    /// Tokens of a slot.
    pub n_ctx_slot: u32,
}

/// The options of `config` that change nothing.
pub(super) fn without_effect(config: &EngineConfig, facts: PrefixFacts) -> Vec<String> {
    let PrefixFacts { n_swa, max_tokens, block, .. } = facts;
    let mut notes = Vec::new();
    if config.cache_dir.is_none() && config.cache_disk_mib != EngineConfig::default().cache_disk_mib {
        notes.push("--cache-disk changes nothing without --cache-dir, the folder it bounds".to_owned());
    }
    if config.swa_full && n_swa == 0 {
        notes.push("--swa-full changes nothing: this model has no sliding window".to_owned());
    }
    if (1..u64::from(block)).contains(&max_tokens) {
        notes.push(format!(
            "--prefix-cache {} keeps nothing longer than {max_tokens} tokens, and prefixes are found by blocks of {block}: give \
             it at least that many, or switch it off",
            config.prefix_cache
        ));
    }
    notes
}

/// Why a pin of `n_tokens` tokens is in vain; none if it is not.
pub(super) fn vain_pin(name: &str, n_tokens: usize, facts: PrefixFacts) -> Option<String> {
    let n_ctx_slot = facts.n_ctx_slot;
    (n_tokens >= n_ctx_slot as usize).then(|| {
        format!(
            "--pin {name} changes nothing: it has {n_tokens} tokens and a slot {n_ctx_slot}, so that no prompt can go on after \
             it; give slots more context (--ctx) or shorten it"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::PrefixBudget;

    const FACTS: PrefixFacts = PrefixFacts { n_swa: 0, max_tokens: u64::MAX, block: 32, n_ctx_slot: 512 };

    #[test]
    fn each_option_that_changes_nothing_is_named_once() {
        let plain = EngineConfig::default();
        let disk = EngineConfig { cache_disk_mib: 1, ..plain.clone() };
        let with_dir = EngineConfig { cache_dir: Some("prefixes".into()), ..disk.clone() };
        let full = EngineConfig { swa_full: true, ..plain.clone() };
        let few = EngineConfig { prefix_cache: PrefixBudget::Tokens(31), ..plain.clone() };
        let window = PrefixFacts { n_swa: 128, ..FACTS };
        let small = PrefixFacts { max_tokens: 31, ..FACTS };
        for (config, facts, starts) in [
            (&plain, FACTS, None),
            (&disk, FACTS, Some("--cache-disk changes nothing without --cache-dir")),
            (&with_dir, FACTS, None),
            (&full, FACTS, Some("--swa-full changes nothing: this model has no sliding window")),
            (&full, window, None),
            (&few, small, Some("--prefix-cache 31 keeps nothing longer than 31 tokens")),
            (&plain, PrefixFacts { max_tokens: 0, ..FACTS }, None),
            (&plain, PrefixFacts { max_tokens: 32, ..FACTS }, None),
        ] {
            let notes = without_effect(config, facts);
            assert_eq!(notes.len(), usize::from(starts.is_some()), "{notes:?}");
            assert!(notes.iter().all(|note| note.starts_with(starts.unwrap_or_default())), "{notes:?}");
        }
        assert_eq!(vain_pin("a", 511, FACTS), None);
        assert!(
            vain_pin("system.txt", 512, FACTS).is_some_and(|note| note.contains("--pin system.txt changes nothing"))
        );
    }
}
