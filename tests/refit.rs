//! Online refit in a replay of planted domains: what it gains on traffic that moves, and that it loses nothing on traffic
//! that does not.
//!
//! Compared with the calibration as it is, and with a refit by the clock (the last 5 s, every 2.5 s, always set), at
//! outputs of about 512 tokens. Everything is seeded, so the numbers compared are exact.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

#[path = "refit/replay.rs"]
mod replay;
#[path = "refit/world.rs"]
mod world;

use eldr::refit::RefitConfig;
use replay::{Measured, Mover, Replay};
use world::{Mix, World};

const N_REQUESTS: u64 = 1600;
const N_WORKERS: usize = 8;
const EQUAL: Mix = [0.25, 0.25, 0.25, 0.25, 0.0];

struct Outcome {
    calibrated: Measured,
    timer: Measured,
    refitted: Measured,
}

/// The three ways on the same traffic, calibrated on equal parts of four domains; the mean over four worlds, on which nothing was tuned.
fn compare(name: &str, mixture: impl Fn(u64) -> Mix) -> Outcome {
    let mut runs: [Vec<Measured>; 3] = Default::default();
    for seed in 100..104 {
        let world = World::new(seed);
        let calibration = world.calibration(N_WORKERS, &EQUAL);
        let replay = Replay { world: &world, calibration: &calibration, n_requests: N_REQUESTS, mixture: &mixture };
        let refitter = Mover::refitter(RefitConfig::default(), &calibration);
        for (runs, mover) in runs.iter_mut().zip([Mover::Nobody, Mover::timer(), refitter]) {
            runs.push(replay.run(mover));
        }
    }
    let [calibrated, timer, refitted] = runs.map(|runs| Measured::mean(&runs));
    for (mover, m) in [("calibrated", &calibrated), ("timer", &timer), ("refitted", &refitted)] {
        let Measured { distinct, tpot, tpot_p99, n_swaps } = m;
        println!("{name} {mover}: {distinct:.3} experts, tpot {tpot:.5} p99 {tpot_p99:.5} s, {n_swaps:.1} swaps");
    }
    Outcome { calibrated, timer, refitted }
}

impl Outcome {
    fn refit_is_best(&self) {
        for other in [&self.calibrated, &self.timer] {
            assert!(self.refitted.distinct < other.distinct, "{:?} against {other:?}", self.refitted);
            assert!(self.refitted.tpot < other.tpot, "{:?} against {other:?}", self.refitted);
        }
        assert!(self.refitted.n_swaps < self.timer.n_swaps, "{:?} against {:?}", self.refitted, self.timer);
    }
}

#[test]
fn best_when_the_mix_turns_over() {
    // One domain after the other has most of the traffic.
    let turning = |i: u64| {
        let phase = 2.0 * i as f64 / N_REQUESTS as f64;
        let (now, part) = (phase as usize, phase.fract());
        let mut mix = [0.1, 0.1, 0.1, 0.1, 0.0];
        mix[now] += 0.6 * (1.0 - part);
        mix[now + 1] += 0.6 * part;
        mix
    };
    compare("turning", turning).refit_is_best();
}

#[test]
fn best_when_the_mix_is_not_the_calibrated_one() {
    compare("skewed", |_| [0.45, 0.30, 0.15, 0.10, 0.0]).refit_is_best();
}

#[test]
fn best_when_a_domain_appears_that_calibration_never_saw() {
    let appearing = |i: u64| {
        let share = 0.4 * (4.0 * i as f64 / N_REQUESTS as f64 - 1.0).clamp(0.0, 1.0);
        let old = (1.0 - share) / 4.0;
        [old, old, old, old, share]
    };
    compare("appearing", appearing).refit_is_best();
}

#[test]
fn loses_nothing_when_traffic_is_as_calibrated() {
    let Outcome { calibrated, timer, refitted } = compare("steady", |_| EQUAL);
    // Not one centroid has to move; what little is lost by chance is bounded.
    for (name, [refitted, calibrated, timer]) in [
        ("experts", [&refitted, &calibrated, &timer].map(|m| m.distinct)),
        ("TPOT", [&refitted, &calibrated, &timer].map(|m| m.tpot)),
        ("P99", [&refitted, &calibrated, &timer].map(|m| m.tpot_p99)),
    ] {
        assert!(refitted < 1.003 * calibrated, "{name}: {refitted} against {calibrated}");
        // A refit by the clock does lose.
        assert!(timer > 1.01 * calibrated, "{name}: {timer} against {calibrated}");
    }
}
