use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{engine::EngineError, types::shown};

/// How much of what finished prompts leave behind a prefill worker keeps: `on`, `off`, a number of tokens, or a size such
/// as `512MiB` or `2GiB`.
///
/// It takes no memory of its own: a worker's slots are there anyway, and it keeps at most what they hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum PrefixBudget {
    /// Nothing.
    Off,
    /// All that its slots hold.
    #[default]
    Slots,
    /// So many tokens, those that prompts share counted once.
    Tokens(u64),
    /// So many MiB of keys and values.
    MiB(u64),
}

impl PrefixBudget {
    /// The tokens kept at most, where a token takes `bytes_per_token` bytes; 0 keeps nothing.
    pub fn tokens(self, bytes_per_token: u64) -> u64 {
        match self {
            Self::Off => 0,
            Self::Slots => u64::MAX,
            Self::Tokens(n) => n,
            Self::MiB(mib) => mib.saturating_mul(1 << 20) / bytes_per_token.max(1),
        }
    }
}

impl FromStr for PrefixBudget {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self, EngineError> {
        let wrong = || {
            EngineError::Config(format!(
                "'{}' is no size of a prefix cache; write on, off, a number of tokens, or a size such as 512MiB",
                shown(text)
            ))
        };
        let number = |digits: &str| digits.trim().parse::<u64>().map_err(|_| wrong());
        match text.trim().to_ascii_lowercase().as_str() {
            "on" | "true" => Ok(Self::Slots),
            "off" | "false" => Ok(Self::Off),
            lower => match (lower.strip_suffix("mib"), lower.strip_suffix("gib")) {
                (Some(mib), _) => Ok(Self::MiB(number(mib)?)),
                (_, Some(gib)) => Ok(Self::MiB(number(gib)?.checked_mul(1024).ok_or_else(wrong)?)),
                _ => Ok(Self::Tokens(number(lower)?)),
            },
        }
    }
}

impl fmt::Display for PrefixBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Slots => f.write_str("on"),
            Self::Tokens(n) => write!(f, "{n}"),
            Self::MiB(mib) => write!(f, "{mib}MiB"),
        }
    }
}

impl TryFrom<String> for PrefixBudget {
    type Error = EngineError;

    fn try_from(text: String) -> Result<Self, EngineError> {
        text.parse()
    }
}

impl From<PrefixBudget> for String {
    fn from(budget: PrefixBudget) -> Self {
        budget.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_back_as_written() {
        for (text, budget) in [
            ("on", PrefixBudget::Slots),
            ("off", PrefixBudget::Off),
            ("4096", PrefixBudget::Tokens(4096)),
            ("512MiB", PrefixBudget::MiB(512)),
        ] {
            assert_eq!((text.parse().ok(), budget.to_string()), (Some(budget), text.to_owned()));
        }
        assert_eq!("2 GiB".parse().ok(), Some(PrefixBudget::MiB(2048)));
        for wrong in ["", "-1", "many", "MiB", "1.5GiB", "99999999999999999999"] {
            let error = wrong.parse::<PrefixBudget>().expect_err(wrong).to_string();
            assert!(error.contains("such as 512MiB"), "{error}");
        }
    }

    #[test]
    fn a_size_is_as_many_tokens_as_fit() {
        assert_eq!(PrefixBudget::MiB(3).tokens(1 << 10), 3 << 10);
        assert_eq!((PrefixBudget::Off.tokens(8), PrefixBudget::Tokens(7).tokens(8)), (0, 7));
        assert_eq!(PrefixBudget::MiB(1).tokens(0), 1 << 20);
    }
}
