//! The options of a fit whose values need more than a number's parser.
//!
//! Never fits anything.

use std::str::FromStr;

/// How the width of the locality band is found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TauChoice {
    /// By replaying the requests.
    Auto,
    /// As given.
    Fixed(f32),
}

impl FromStr for TauChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.eq_ignore_ascii_case("auto") {
            return Ok(Self::Auto);
        }
        match text.parse::<f32>() {
            Ok(tau) if (0.0..=2.0).contains(&tau) => Ok(Self::Fixed(tau)),
            _ => Err("it must be auto, or a number from 0 (only the most similar worker) to 2 (every worker)".into()),
        }
    }
}

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
    fn tau_is_auto_or_a_cosine_distance() {
        assert_eq!("Auto".parse(), Ok(TauChoice::Auto));
        assert_eq!("0.25".parse(), Ok(TauChoice::Fixed(0.25)));
        for wrong in ["", "-0.1", "2.5", "NaN", "wide"] {
            assert!(wrong.parse::<TauChoice>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn capacities_are_numbers_above_0() {
        assert_eq!("2, 1,1".parse(), Ok(Capacities(vec![2, 1, 1])));
        for wrong in ["", "2,,1", "2,0", "-1", "a"] {
            assert!(wrong.parse::<Capacities>().is_err(), "{wrong}");
        }
    }
}
