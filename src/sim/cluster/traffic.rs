//! When requests come, on the simulated clock.
//!
//! Never knows which request comes.

use std::f64::consts::TAU;

use super::{Burst, Scenario, Swing};
use crate::rng::Rng;

/// Times of arrival, one after another, in seconds.
pub(super) struct Traffic {
    rng: Rng,
    rate: f64,
    burst: Option<Burst>,
    swing: Option<Swing>,
    /// Time that passes only while requests come.
    at: f64,
}

impl Traffic {
    /// The scenario's; nothing where requests do not come by themselves. Without a swing the same draws as the bench's.
    pub fn new(scenario: &Scenario) -> Option<Self> {
        let (burst, swing) = (scenario.burst, scenario.swing);
        let share_on = burst.map_or(1.0, |burst| burst.on / (burst.on + burst.off));
        let rate = scenario.rate? / share_on;
        Some(Self { rng: Rng::new(scenario.seed), rate, burst, swing, at: 0.0 })
    }

    /// When the next request comes.
    pub fn next(&mut self) -> f64 {
        match (self.burst, self.swing) {
            (Some(burst), _) => {
                self.at += self.rng.exponential(self.rate);
                self.at + (self.at / burst.on).floor() * burst.off
            }
            (None, Some(swing)) => self.next_of_swing(swing),
            (None, None) => {
                self.at += self.rng.exponential(self.rate);
                self.at
            }
        }
    }

    /// By thinning a process as fast as the swing's peak (Lewis and Shedler 1979).
    fn next_of_swing(&mut self, swing: Swing) -> f64 {
        let peak = 1.0 + swing.amplitude;
        loop {
            self.at += self.rng.exponential(self.rate * peak);
            let now = 1.0 + swing.amplitude * (TAU * self.at / swing.period).sin();
            if self.rng.uniform() * peak < now {
                return self.at;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(scenario: Scenario, n: usize) -> Vec<f64> {
        let mut traffic = Traffic::new(&Scenario { rate: Some(10.0), seed: 5, ..scenario }).expect("a rate");
        (0..n).map(|_| traffic.next()).collect()
    }

    #[test]
    fn arrivals_keep_the_rate_and_the_bench_s_draws() {
        let plain = times(Scenario::default(), 2000);
        let mut rng = Rng::new(5);
        let first = rng.exponential(10.0);
        assert_eq!(plain[0].to_bits(), first.to_bits());
        assert_eq!(plain[1].to_bits(), (first + rng.exponential(10.0)).to_bits());
        assert!((plain[1999] - 200.0).abs() < 15.0, "{}", plain[1999]);
        assert!(Traffic::new(&Scenario::default()).is_none());
    }

    #[test]
    fn bursts_pause_and_swings_swing() {
        let bursts = times(Scenario { burst: Some(Burst { on: 1.0, off: 3.0 }), ..Scenario::default() }, 2000);
        assert!(bursts.iter().all(|at| at % 4.0 <= 1.0 + 1e-9) && bursts.is_sorted());
        assert!((bursts[1999] - 200.0).abs() < 15.0);
        let swing = Some(Swing { period: 40.0, amplitude: 1.0 });
        let swings = times(Scenario { swing, ..Scenario::default() }, 2000);
        let high = swings.iter().filter(|at| *at % 40.0 < 20.0).count();
        assert!((1550..1750).contains(&high) && swings.is_sorted(), "{high}");
    }
}
