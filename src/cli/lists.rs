//! Several values of one option, between commas.
//!
//! Never judges a value beyond its parser.

use std::{fmt::Display, str::FromStr};

use eldr::types::shown;

/// Values in the order given, at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Many<T>(Vec<T>);

impl<T: Copy> Many<T> {
    /// Each value.
    pub fn values(&self) -> impl ExactSizeIterator<Item = T> + '_ {
        self.0.iter().copied()
    }
}

impl<T: FromStr<Err: Display>> FromStr for Many<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_one = !text.contains(',');
        let value = |part: &str| {
            let part = part.trim();
            let wrong = |error| if is_one { format!("{error}") } else { format!("'{}' of it: {error}", shown(part)) };
            part.parse::<T>().map_err(wrong)
        };
        text.split(',').map(value).collect::<Result<_, _>>().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    #[test]
    fn values_are_between_commas() {
        assert_eq!("8, 16".parse::<Many<u32>>().map(|many| many.values().collect()), Ok(vec![8, 16]));
        for wrong in ["", "8,", "2,,1", "a", "-1"] {
            assert!(wrong.parse::<Many<u32>>().is_err(), "{wrong}");
        }
        let error = |text: &str| text.parse::<Many<NonZeroU32>>().expect_err("zero");
        assert_eq!(error("2,0"), "'0' of it: number would be zero for non-zero type");
        assert_eq!(error("0"), "number would be zero for non-zero type");
    }
}
