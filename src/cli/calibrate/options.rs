//! The options of a fit whose values need more than a number's parser.
//!
//! Never fits anything.

use std::str::FromStr;

/// What each decode worker can hold, relative to the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capacities(pub Vec<u32>);

impl FromStr for Capacities {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers: Result<Vec<u32>, _> = text.split(',').map(|part| part.trim().parse()).collect();
        match numbers {
            Ok(numbers) if numbers.iter().all(|&n| n > 0) => Ok(Self(numbers)),
            _ => Err("it must be a whole number above 0 for each decode worker, such as 2,1,1".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities_are_numbers_above_0() {
        assert_eq!("2, 1,1".parse(), Ok(Capacities(vec![2, 1, 1])));
        for wrong in ["", "2,,1", "2,0", "-1", "a"] {
            assert!(wrong.parse::<Capacities>().is_err(), "{wrong}");
        }
    }
}
