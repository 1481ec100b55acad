//! Several values of one option, between commas.
//!
//! Never judges a value beyond its parser.

use std::str::FromStr;

/// Values in the order given, at least one.
#[derive(Debug, Clone, PartialEq)]
pub struct Many<T>(Vec<T>);

impl<T: Copy> Many<T> {
    /// Each value.
    pub fn values(&self) -> impl Iterator<Item = T> + '_ {
        self.0.iter().copied()
    }
}

impl<T: FromStr> FromStr for Many<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let values: Result<Vec<T>, _> = text.split(',').map(|part| part.trim().parse::<T>()).collect();
        values.map(Self).map_err(|_| "it must be values between commas, such as 8,16".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_between_commas() {
        assert_eq!("8, 16".parse::<Many<u32>>().map(|many| many.values().collect()), Ok(vec![8, 16]));
        for wrong in ["", "8,", "a", "-1"] {
            assert!(wrong.parse::<Many<u32>>().is_err(), "{wrong}");
        }
    }
}
