use sha2::{Digest, Sha256};

use crate::{trace::frame::first, types::Token};

/// How requests were recorded: what must be equal for a recording to go on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RecordSettings {
    /// Tokens generated for each prompt at most.
    pub max_tokens: u32,
    /// Temperature of the draws; 0 takes the likeliest token.
    pub temperature: f32,
    /// Seed of the draws.
    pub seed: u64,
    /// Each prompt stood in the model's chat template as one user message.
    pub chat: bool,
    /// The gate's outputs were summed over each prompt.
    pub gates: bool,
}

impl Default for RecordSettings {
    /// 128 tokens, drawn as users draw them, because greedy text of a small model loops.
    fn default() -> Self {
        Self { max_tokens: 128, temperature: 0.8, seed: 0, chat: false, gates: false }
    }
}

/// What was asked for a request: the first 8 bytes of SHA-256 over the prompt's tokens (`i32` each), the number of
/// tokens to generate (`u32`) and the domain, if there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PromptKey(pub [u8; 8]);

impl PromptKey {
    /// The key of a prompt.
    pub fn new(tokens: &[Token], max_tokens: u32, domain: Option<&str>) -> Self {
        let mut hash = Sha256::new();
        for token in tokens {
            hash.update(token.to_le_bytes());
        }
        hash.update(max_tokens.to_le_bytes());
        if let Some(domain) = domain {
            hash.update([1]);
            hash.update(domain);
        }
        Self(first(hash))
    }
}

impl RecordSettings {
    /// The seed of the request `id`: the same wherever it stands among the others.
    pub fn seed_of(&self, id: &str) -> u64 {
        u64::from_le_bytes(first(Sha256::new().chain_update(self.seed.to_le_bytes()).chain_update(id)))
    }

    /// The first setting that differs: its option, the value here and the value there.
    pub fn difference(&self, other: &Self) -> Option<(&'static str, String, String)> {
        let on = |on: bool| if on { "on" } else { "off" }.to_owned();
        let values = |s: &Self| {
            [
                ("--max-tokens", s.max_tokens.to_string()),
                ("--temperature", s.temperature.to_string()),
                ("--seed", s.seed.to_string()),
                ("--chat", on(s.chat)),
                ("--gates", on(s.gates)),
            ]
        };
        let pairs = values(self).into_iter().zip(values(other));
        pairs.map(|((name, here), (_, there))| (name, here, there)).find(|(_, here, there)| here != there)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_that_differs_is_named() {
        let base = RecordSettings::default();
        assert_eq!(base.difference(&base), None);
        for (other, want) in [
            (RecordSettings { max_tokens: 4, ..base }, ("--max-tokens", "128", "4")),
            (RecordSettings { temperature: 0.25, ..base }, ("--temperature", "0.8", "0.25")),
            (RecordSettings { seed: 7, ..base }, ("--seed", "0", "7")),
            (RecordSettings { chat: true, ..base }, ("--chat", "off", "on")),
            (RecordSettings { gates: true, ..base }, ("--gates", "off", "on")),
        ] {
            let (name, here, there) = base.difference(&other).expect("differs");
            assert_eq!((name, here.as_str(), there.as_str()), want);
        }
    }

    #[test]
    fn a_seed_depends_on_the_id_and_a_key_on_all_that_was_asked() {
        let base = RecordSettings::default();
        assert_eq!(base.seed_of("a"), base.seed_of("a"));
        assert_ne!(base.seed_of("a"), base.seed_of("b"));
        assert_ne!(base.seed_of("a"), RecordSettings { seed: 1, ..base }.seed_of("a"));
        let key = PromptKey::new(&[1, 2], 5, None);
        assert_eq!(key, PromptKey::new(&[1, 2], 5, None));
        for other in [
            PromptKey::new(&[2, 1], 5, None),
            PromptKey::new(&[1, 2], 6, None),
            PromptKey::new(&[1, 2], 5, Some("")),
            PromptKey::new(&[1, 2], 5, Some("code")),
        ] {
            assert_ne!(key, other);
        }
    }
}
