//! Online refit in a replay of planted domains.
#![allow(clippy::unwrap_used)]

#[path = "refit/replay.rs"]
mod replay;
#[path = "refit/world.rs"]
mod world;

use eldr::{refit::RefitConfig, route::PolicyKind};
use replay::{Measured, Mover, Replay};
use world::{Mix, World};

#[test]
fn explore() {
    let f = |n: &str, d: f64| std::env::var(n).map_or(d, |v| v.parse().unwrap());
    let equal: Mix = [0.25, 0.25, 0.25, 0.25, 0.0];
    let n: u64 = std::env::var("N").map_or(4000, |n| n.parse().unwrap());
    let rotate = move |i: u64| -> Mix {
        let phase = i as f64 / n as f64 * f("PHASES", 2.0);
        let at = phase as usize % 4;
        let part = phase - phase.floor();
        let mut mix = [0.1, 0.1, 0.1, 0.1, 0.0];
        mix[at] += 0.6 * (1.0 - part);
        mix[(at + 1) % 4] += 0.6 * part;
        mix
    };
    let skew = |_: u64| -> Mix { [0.45, 0.30, 0.15, 0.10, 0.0] };
    let fresh = move |i: u64| -> Mix {
        let x = ((i as f64 / n as f64 - 0.25) * 4.0).clamp(0.0, 1.0) * 0.4;
        [0.25 * (1.0 - x), 0.25 * (1.0 - x), 0.25 * (1.0 - x), 0.25 * (1.0 - x), x]
    };
    let steady = move |_: u64| equal;
    let scenarios: [(&str, &dyn Fn(u64) -> Mix); 4] =
        [("steady", &steady), ("turnover", &rotate), ("skew", &skew), ("new", &fresh)];
    let seeds: u64 = std::env::var("SEEDS").map_or(2, |n| n.parse().unwrap());
    for (name, mixture) in scenarios {
        for seed in 0..seeds {
            let world = World::new(seed);
            let calibration = world.calibration(8, &equal);
            let replay = Replay {
                world: &world,
                calibration: &calibration,
                policy: PolicyKind::LocalityBand,
                n_requests: n,
                mixture,
            };
            if std::env::var("ONLY").is_ok_and(|o| o != name) {
                continue;
            }
            let load = Replay { policy: PolicyKind::LeastLoaded, ..replay };
            let load = if std::env::var("BASE").is_ok() { Some(load.run(Mover::Nobody)) } else { None };
            let replay = Replay {
                world: &world,
                calibration: &calibration,
                policy: PolicyKind::LocalityBand,
                n_requests: n,
                mixture,
            };
            let show = |what: &str, m: &Measured| {
                println!(
                    "{name:9} {seed} {what:7} distinct {:6.3} tpot {:.5} p99 {:.5} swaps {:3} {:.0}s {}",
                    m.distinct,
                    m.tpot,
                    m.tpot_p99,
                    m.n_swaps,
                    m.seconds,
                    m.stats.as_ref().map_or(String::new(), |s| format!(
                        "{:?}",
                        (s.n_checks, s.n_fits, s.expected, s.recent, s.last_n_fitted, s.low_share)
                    ))
                );
            };
            if std::env::var("BASE").is_ok() {
                show("load", load.as_ref().unwrap());
                show("static", &replay.run(Mover::Nobody));
            }
            if std::env::var("TIMER").is_ok() {
                show("timer", &replay.run(Mover::timer()));
            }
            let c = RefitConfig {
                drift: f("DRIFT", 0.02),
                margin: f("MARGIN", 0.005),
                min_fresh: f("FRESH", 64.0) as usize,
                max_signatures: f("WINDOW", 1024.0) as usize,
                ..RefitConfig::default()
            };
            show("ours", &replay.run(Mover::refitter(c, &calibration)));
        }
    }
}
