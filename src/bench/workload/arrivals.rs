use std::{fmt, time::Duration};

use crate::{rng::Rng, types::shown_number};

/// When requests arrive.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arrivals {
    /// All at time 0: the workers are never idle.
    Saturating,
    /// A Poisson process: independent requests, `rate` a second on average.
    Poisson {
        /// Requests a second.
        rate: f64,
    },
    /// A Poisson process that is on for `on` seconds, then off for `off`, from the start on.
    Bursts {
        /// Requests a second, averaged over on and off: while on they come faster.
        rate: f64,
        /// Seconds with arrivals.
        on: f64,
        /// Seconds without.
        off: f64,
    },
}

/// Arrivals that cannot be drawn.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ArrivalsError {
    /// The rate is zero, negative or not finite.
    #[error("the rate is {} requests a second, which must be a finite number above 0", shown_number(*.0))]
    Rate(f64),
    /// The rate is so low that time overflows.
    #[error(
        "at {} requests a second the next ones arrive after more time than can be counted: ask for a higher rate",
        shown_number(*.0)
    )]
    TooSlow(f64),
    /// A burst's length is not positive, or its pause negative.
    #[error(
        "bursts are on for {} s and off for {} s; both must be finite, on above 0 and off at least 0",
        shown_number(*on),
        shown_number(*off)
    )]
    Bursts {
        /// Seconds with arrivals.
        on: f64,
        /// Seconds without.
        off: f64,
    },
}

impl Arrivals {
    /// The requests a second; nothing if all arrive at once.
    pub fn rate(&self) -> Option<f64> {
        match *self {
            Self::Saturating => None,
            Self::Poisson { rate } | Self::Bursts { rate, .. } => Some(rate),
        }
    }

    /// Refuses numbers that no arrival can be drawn with.
    pub fn check(&self) -> Result<(), ArrivalsError> {
        if let Some(rate) = self.rate().filter(|rate| !(rate.is_finite() && *rate > 0.0)) {
            return Err(ArrivalsError::Rate(rate));
        }
        match *self {
            Self::Bursts { on, off, .. } if !(on.is_finite() && on > 0.0 && off.is_finite() && off >= 0.0) => {
                Err(ArrivalsError::Bursts { on, off })
            }
            _ => Ok(()),
        }
    }

    /// The arrival of each of `n` requests since the start, ascending. The first k of n are the k of fewer.
    pub fn times(&self, n: usize, seed: u64) -> Result<Vec<Duration>, ArrivalsError> {
        self.check()?;
        match *self {
            Self::Saturating => Ok(vec![Duration::ZERO; n]),
            Self::Poisson { rate } => poisson(n, rate, seed).map(|at| to_duration(at, rate)).collect(),
            Self::Bursts { rate, on, off } => {
                let rate_on = rate * ((on + off) / on);
                // Time that runs only while on, stretched by the pauses before it.
                poisson(n, rate_on, seed).map(|at| to_duration(at + (at / on).floor() * off, rate)).collect()
            }
        }
    }
}

fn poisson(n: usize, rate: f64, seed: u64) -> impl Iterator<Item = f64> {
    let mut rng = Rng::new(seed);
    let mut at = 0.0;
    (0..n).map(move |_| {
        at += rng.exponential(rate);
        at
    })
}

fn to_duration(seconds: f64, rate: f64) -> Result<Duration, ArrivalsError> {
    Duration::try_from_secs_f64(seconds).map_err(|_| ArrivalsError::TooSlow(rate))
}

impl fmt::Display for Arrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Saturating => write!(f, "all requests at once"),
            Self::Poisson { rate } => write!(f, "Poisson, {} requests a second", shown_number(*rate)),
            Self::Bursts { rate, on, off } => {
                let [rate, on, off] = [rate, on, off].map(|number| shown_number(*number));
                write!(f, "bursts, {rate} requests a second, {on} s on and {off} s off")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poisson_times_are_sums_of_exponential_gaps() {
        let times = Arrivals::Poisson { rate: 20.0 }.times(50, 3).expect("valid");
        let mut rng = Rng::new(3);
        let mut at = 0.0;
        for time in &times {
            at += rng.exponential(20.0);
            assert_eq!(*time, Duration::from_secs_f64(at));
        }
        assert_eq!(Arrivals::Poisson { rate: 20.0 }.times(10, 3).expect("valid"), times[..10]);
        assert_ne!(Arrivals::Poisson { rate: 20.0 }.times(10, 4).expect("valid"), times[..10]);
        // Twice the rate is the same arrivals in half the time.
        let fast = Arrivals::Poisson { rate: 40.0 }.times(50, 3).expect("valid");
        let halved = fast.iter().zip(&times).map(|(fast, slow)| (fast.as_secs_f64() * 2.0 - slow.as_secs_f64()).abs());
        assert!(halved.fold(0.0, f64::max) < 1e-8);
    }

    #[test]
    fn bursts_arrive_only_while_on_and_keep_the_mean_rate() {
        let bursts = Arrivals::Bursts { rate: 10.0, on: 0.5, off: 1.5 };
        let times = bursts.times(400, 8).expect("valid");
        assert!(times.is_sorted());
        assert!(times.iter().all(|time| time.as_secs_f64() % 2.0 <= 0.5 + 1e-9));
        // Without the pauses it is a Poisson process of four times the rate.
        let dense = Arrivals::Poisson { rate: 40.0 }.times(400, 8).expect("valid");
        for (sparse, dense) in times.iter().zip(dense) {
            let pauses = (sparse.as_secs_f64() / 2.0).floor() * 1.5;
            assert!((sparse.as_secs_f64() - pauses - dense.as_secs_f64()).abs() < 1e-6);
        }
        let no_pause = Arrivals::Bursts { rate: 10.0, on: 0.5, off: 0.0 }.times(20, 8).expect("valid");
        assert_eq!(no_pause, Arrivals::Poisson { rate: 10.0 }.times(20, 8).expect("valid"));
    }

    #[test]
    fn saturating_requests_are_all_there_at_the_start() {
        assert_eq!(Arrivals::Saturating.times(3, 1), Ok(vec![Duration::ZERO; 3]));
    }

    #[test]
    fn rates_that_make_no_sense_are_refused() {
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(matches!(Arrivals::Poisson { rate }.times(3, 1), Err(ArrivalsError::Rate(_))), "{rate}");
        }
        // Symptom: 1e-300 requests a second, which is above 0, "must be a number above 0", in 300 digits.
        let error = Arrivals::Poisson { rate: 1e-300 }.times(3, 1).expect_err("after the end of time").to_string();
        assert!(error.starts_with("at 1e-300 requests a second") && error.contains("than can be counted"), "{error}");
        for (on, off) in [(0.0, 1.0), (1.0, -1.0), (f64::NAN, 1.0), (1.0, f64::INFINITY)] {
            let refused = Arrivals::Bursts { rate: 1.0, on, off }.times(3, 1);
            assert!(matches!(refused, Err(ArrivalsError::Bursts { .. })), "{on} {off}");
        }
    }
}
