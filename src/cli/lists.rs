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

/// As [`Many`], of values that are compared with one another: none of them twice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compared<T>(Many<T>);

impl<T: Copy> Compared<T> {
    /// Each value.
    pub fn values(&self) -> impl ExactSizeIterator<Item = T> + '_ {
        self.0.values()
    }
}

impl<T: FromStr<Err: Display> + PartialEq> FromStr for Compared<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let many: Many<T> = text.parse()?;
        let again = (1..many.0.len()).find(|&at| many.0[..at].contains(&many.0[at]));
        match again.and_then(|at| text.split(',').nth(at)) {
            Some(part) => Err(format!("it holds {} twice; leave one out", shown(part.trim()))),
            None => Ok(Self(many)),
        }
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

    // Symptom: `simulate --workers 4,4` simulated the same thing twice, and called it repeats.
    #[test]
    fn compared_values_differ() {
        assert_eq!("4, 8".parse::<Compared<u32>>().map(|compared| compared.values().collect()), Ok(vec![4, 8]));
        for (text, twice) in [("4,8,4", "4"), ("1,2, 1.0", "1.0")] {
            assert_eq!(text.parse::<Compared<f64>>(), Err(format!("it holds {twice} twice; leave one out")));
        }
        assert_eq!("0,0".parse::<Many<u32>>().map(|many| many.values().len()), Ok(2), "loads may be alike");
    }
}
