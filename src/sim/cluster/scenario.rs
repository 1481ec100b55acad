//! What comes to the pool and what happens to it, as a user writes it down.
//!
//! Never reads a file: `eldr simulate` reads TOML into it.

mod events;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Far beyond what anybody serves; above them a typing error would fill the memory, or run for days.
const MOST_WORKERS: u64 = 10_000;
const MOST_SLOTS: u64 = 1 << 20;
const MOST_REQUESTS: u64 = 100_000_000;
const MOST_PREFIX: u64 = 1_000_000;
const MOST_GROUPS: u64 = 10_000;
/// Requests a second: one in some thirty years.
const SLOWEST: f64 = 1e-9;
/// Seconds of a scenario's times: some thirty thousand years, of which a clock still tells microseconds.
const LONGEST: f64 = 1e12;
/// How many times faster or slower than its cost a device may be.
const MOST_TIMES: f64 = 1e6;

/// A pool, its traffic, and what goes wrong. Times are in seconds on the simulated clock.
///
/// ```
/// # mod planted {
/// #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/planted_trace.rs"));
/// # }
///
/// use eldr::{
///     route::LeastLoaded,
///     sim::{
///         Burst, ClusterReport, DecodeCost, DecodeGroup, DeviceCost, Drift, Event, HandoffCost, Happens, Pool, PrefillCost,
///         PrefixSharing, Preset, PresetModel, ReplaySet, Scenario, Swing, simulate,
///     },
/// };
///
/// // Two workers, of which one is lost after a second of bursts, while the mix of domains drifts.
/// let scenario = Scenario {
///     requests: 200,
///     decode: vec![DecodeGroup { workers: 2, slots: 8, speed: 1.0 }],
///     rate: Some(20.0),
///     burst: Some(Burst { on: 2.0, off: 1.0 }),
///     drift: Some(Drift { period: 60.0, amplitude: 0.5 }),
///     event: vec![Event { at: 1.0, worker: 1, what: Happens::Fail, by: 1.0 }],
///     ..Scenario::default()
/// };
/// let trace = planted::trace(64);
/// let domains = ["code", "legal", "math", "medical"].map(str::to_owned);
/// assert_eq!(scenario.problem(&domains), None);
/// let alike = PrefixSharing { groups: 2, tokens: 8, share: 0.5, cache_tokens: 4096 };
/// assert_eq!(Scenario { prefix: Some(alike), ..scenario.clone() }.problem(&domains), None);
/// let both = Scenario { swing: Some(Swing { period: 60.0, amplitude: 0.5 }), ..scenario.clone() };
/// assert!(both.problem(&domains).expect("two shapes of one rate").contains("burst and swing"));
///
/// // What steps take: written by hand, or estimated for a device that is known by name.
/// let model = PresetModel { expert_bytes: 2e6, dense_bytes: 1e9, kv_bytes: 1e5, active_params: 3e9, n_layer: 4.0 };
/// let estimated: DeviceCost = Preset::named("h200").expect("it is known").cost(&model);
/// let cost = DeviceCost {
///     source: "by hand".to_owned(),
///     decode: DecodeCost { fixed: 2.0, per_expert: 0.01, per_token: 0.05, per_kv_token: 0.0 },
///     prefill: PrefillCost { fixed: 1.0, per_token: 0.1, per_kv_token: 0.0 },
///     handoff: HandoffCost::default(),
/// };
/// assert_ne!(cost.source, estimated.source);
/// let (set, served) = (ReplaySet::new(&trace), (0..64).collect::<Vec<_>>());
/// let pool = Pool { trace: &trace, set: &set, served: &served, cost: &cost, calibration: None, ranks: &[], clairvoyant: false };
/// let report: ClusterReport = simulate(pool, &scenario, Box::new(LeastLoaded), None).expect("sound");
/// assert_eq!((report.lost, report.failed), (1, 0));
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Scenario {
    /// Requests that come in all.
    pub requests: u64,
    /// Seed of arrivals, draws and policies.
    pub seed: u64,
    /// Share of the requests that is warm-up and not measured.
    pub warmup: f64,
    /// Prefill workers; without a number, one for every four decode workers.
    pub prefill: Option<u32>,
    /// Prompt tokens a prefill step runs.
    pub chunk: u32,
    /// Decode workers, alike ones together.
    pub decode: Vec<DecodeGroup>,
    /// Requests a second; without it all that may be in the system are.
    pub rate: Option<f64>,
    /// Requests in the system at most; without it, and without a rate, half of all slots.
    pub concurrency: Option<u32>,
    /// Requests come in bursts.
    pub burst: Option<Burst>,
    /// The rate swings, as over a day.
    pub swing: Option<Swing>,
    /// Requests come in the order of the trace, again and again, instead of being drawn from it.
    pub in_order: bool,
    /// The weight of each domain; domains without one have 0. Without any, as in the trace.
    pub mix: BTreeMap<String, f64>,
    /// The mix drifts, as over a day.
    pub drift: Option<Drift>,
    /// Requests share beginnings.
    pub prefix: Option<PrefixSharing>,
    /// What happens to workers, and when.
    pub event: Vec<Event>,
    /// Prefilled requests that may wait for a slot.
    pub max_handoffs: u32,
    /// Requests that may wait for a prefill worker; one more is refused.
    pub max_queue: Option<u64>,
    /// As `--age-bound` of `eldr serve`.
    pub age_bound: u32,
    /// A running sequence may move to another decode worker once in so many decode steps; none moves if 0.
    pub migrate_every: u32,
}

/// Decode workers that are alike.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeGroup {
    /// How many.
    pub workers: u32,
    /// Sequences each holds.
    #[serde(default = "default_slots")]
    pub slots: u32,
    /// How fast each is: 0.5 takes twice the cost's time.
    #[serde(default = "default_speed")]
    pub speed: f64,
}

const fn default_slots() -> u32 {
    32
}

const fn default_speed() -> f64 {
    1.0
}

/// Requests come for `on` seconds, then pause for `off`; the rate is the average.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Burst {
    /// Seconds with arrivals.
    pub on: f64,
    /// Seconds without.
    pub off: f64,
}

/// The rate is `rate * (1 + amplitude * sin(2 pi t / period))`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Swing {
    /// Seconds of a day.
    pub period: f64,
    /// From 0 to 1.
    pub amplitude: f64,
}

/// The weight of domain i of n is multiplied by `1 + amplitude * sin(2 pi (t / period + i / n))`, domains by name.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Drift {
    /// Seconds of a day.
    pub period: f64,
    /// From 0 to 1.
    pub amplitude: f64,
}

/// A share of the requests begins with one of `groups` system prompts of `tokens` tokens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefixSharing {
    /// System prompts; each is the beginning of some recorded prompts and belongs to their domain.
    pub groups: u32,
    /// Tokens of each.
    pub tokens: u32,
    /// Share of the requests that begin with one.
    #[serde(default = "default_speed")]
    pub share: f64,
    /// Tokens a prefill worker keeps of finished prompts; 0 computes every prompt whole.
    #[serde(default = "default_cache")]
    pub cache_tokens: u64,
}

const fn default_cache() -> u64 {
    65_536
}

/// Something that happens to a decode worker.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Event {
    /// When.
    pub at: f64,
    /// To which decode worker, from 0. Not used by `join`.
    #[serde(default)]
    pub worker: u32,
    /// What.
    pub what: Happens,
    /// With `slow`: how many times longer a step takes from then on. With `join`: the slots of the new worker.
    #[serde(default = "default_speed")]
    pub by: f64,
}

/// What can happen to a decode worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Happens {
    /// It is lost at the end of its step; its requests are prefilled again elsewhere.
    Fail,
    /// Its steps take `by` times as long; 1 is well again.
    Slow,
    /// It gets nothing new. There must be another one that does.
    Drain,
    /// It gets requests again. A lost worker does not come back.
    Resume,
    /// One more worker, of `by` slots.
    Join,
}

impl Default for Scenario {
    /// Eight workers, half full, and the trace's own mix.
    fn default() -> Self {
        Self {
            requests: 2000,
            seed: 0,
            warmup: 0.2,
            prefill: None,
            chunk: 512,
            decode: vec![DecodeGroup { workers: 8, slots: default_slots(), speed: 1.0 }],
            rate: None,
            concurrency: None,
            burst: None,
            swing: None,
            in_order: false,
            mix: BTreeMap::new(),
            drift: None,
            prefix: None,
            event: Vec::new(),
            max_handoffs: 16,
            max_queue: None,
            age_bound: 1,
            migrate_every: 0,
        }
    }
}

impl Scenario {
    /// Decode workers at the start.
    pub fn n_workers(&self) -> usize {
        self.decode.iter().map(|group| group.workers as usize).sum()
    }

    /// Slots of each decode worker at the start.
    pub fn n_slots(&self) -> Vec<u32> {
        let each = |group: &DecodeGroup| vec![group.slots; group.workers as usize];
        self.decode.iter().flat_map(each).collect()
    }

    /// Prefill workers.
    pub fn n_prefill(&self) -> usize {
        self.prefill.map_or_else(|| self.n_workers().div_ceil(4), |n| n as usize)
    }

    /// What is wrong with it, in a sentence that names the key, or nothing. `domains` are the trace's.
    pub fn problem(&self, domains: &[String]) -> Option<String> {
        self.bad_count().or_else(|| self.bad_number()).or_else(|| self.bad_event()).or_else(|| self.bad_mix(domains))
    }

    fn bad_count(&self) -> Option<String> {
        let zero = |name: &str, n: u64| (n == 0).then(|| format!("{name} is 0, which must be at least 1"));
        let group = self.decode.iter().find_map(|group| {
            zero("decode.workers", group.workers.into()).or_else(|| zero("decode.slots", group.slots.into()))
        });
        let most = |name: &str, n: u64, most: u64| {
            (n > most).then(|| {
                format!("{name} is {n}, which must be at most {most}, so that a simulation ends and fits in memory")
            })
        };
        let slots = self.decode.iter().map(|group| u64::from(group.workers) * u64::from(group.slots)).sum();
        let prefix = self.prefix.map_or(0, |prefix| u64::from(prefix.tokens));
        zero("requests", self.requests)
            .or_else(|| most("requests", self.requests, MOST_REQUESTS))
            .or_else(|| most("workers", self.n_workers() as u64, MOST_WORKERS))
            .or_else(|| most("slots of all workers together", slots, MOST_SLOTS))
            .or_else(|| most("prefill", self.prefill.unwrap_or(1).into(), MOST_WORKERS))
            .or_else(|| most("prefix.tokens", prefix, MOST_PREFIX))
            .or_else(|| most("prefix.groups", self.prefix.map_or(0, |prefix| prefix.groups.into()), MOST_GROUPS))
            .or_else(|| most("concurrency", self.concurrency.unwrap_or(1).into(), MOST_REQUESTS))
            .or_else(|| zero("max_queue", self.max_queue.unwrap_or(1)))
            .or_else(|| self.decode.is_empty().then(|| "decode is empty: there must be a decode worker".to_owned()))
            .or(group)
            .or_else(|| zero("prefill", self.prefill.unwrap_or(1).into()))
            .or_else(|| zero("chunk", self.chunk.into()))
            .or_else(|| zero("age_bound", self.age_bound.into()))
            .or_else(|| zero("concurrency", self.concurrency.unwrap_or(1).into()))
            .or_else(|| zero("prefix.groups", self.prefix.map_or(1, |prefix| prefix.groups).into()))
            .or_else(|| zero("prefix.tokens", self.prefix.map_or(1, |prefix| prefix.tokens).into()))
    }

    fn bad_number(&self) -> Option<String> {
        let positive = |name: &str, x: f64| {
            (!(x.is_finite() && x > 0.0)).then(|| format!("{name} is {x}, which must be a finite number above 0"))
        };
        let seconds = |name: &str, x: f64| {
            positive(name, x).or_else(|| {
                (x > LONGEST).then(|| format!("{name} is {x:e} seconds, which must be at most {LONGEST:e}"))
            })
        };
        let speed = |x: f64| {
            let range = MOST_TIMES.recip()..=MOST_TIMES;
            positive("decode.speed", x).or_else(|| {
                (!range.contains(&x))
                    .then(|| format!("decode.speed is {x:e}, which must be from {:e} to {MOST_TIMES:e}", range.start()))
            })
        };
        let share = |name: &str, x: f64| {
            (!(0.0..=1.0).contains(&x)).then(|| format!("{name} is {x}, which must be a share from 0 to 1"))
        };
        let needs_rate = |name: &str, given: bool| {
            (given && self.rate.is_none())
                .then(|| format!("{name} is given without rate, the average of requests a second"))
        };
        (!(0.0..1.0).contains(&self.warmup))
            .then(|| format!("warmup is {}, which must be a share from 0 to below 1", self.warmup))
            .or_else(|| self.decode.iter().find_map(|group| speed(group.speed)))
            .or_else(|| self.rate.and_then(|rate| positive("rate", rate)))
            .or_else(|| {
                let slow = |rate: &f64| *rate < SLOWEST;
                self.rate.filter(slow).map(|rate| format!("rate is {rate} a second, which must be at least {SLOWEST}"))
            })
            .or_else(|| self.burst.and_then(|burst| seconds("burst.on", burst.on)))
            .or_else(|| self.burst.filter(|b| b.off != 0.0).and_then(|burst| seconds("burst.off", burst.off)))
            .or_else(|| self.swing.and_then(|swing| seconds("swing.period", swing.period)))
            .or_else(|| self.swing.and_then(|swing| share("swing.amplitude", swing.amplitude)))
            .or_else(|| self.drift.and_then(|drift| seconds("drift.period", drift.period)))
            .or_else(|| self.drift.and_then(|drift| share("drift.amplitude", drift.amplitude)))
            .or_else(|| self.prefix.and_then(|prefix| share("prefix.share", prefix.share)))
            .or_else(|| needs_rate("burst", self.burst.is_some()))
            .or_else(|| needs_rate("swing", self.swing.is_some()))
            .or_else(|| {
                (self.burst.is_some() && self.swing.is_some())
                    .then(|| "burst and swing are both given: the rate can follow one of them".to_owned())
            })
    }

    fn bad_mix(&self, domains: &[String]) -> Option<String> {
        if self.in_order && !(self.mix.is_empty() && self.drift.is_none()) {
            return Some("in_order is true and a mix or drift is given: the order of the trace has its own mix".into());
        }
        if let Some(unknown) = self.mix.keys().find(|name| !domains.contains(name)) {
            return Some(format!(
                "mix.{unknown} names a domain that the trace does not have; it has {}",
                if domains.is_empty() { "none".to_owned() } else { domains.join(", ") }
            ));
        }
        if let Some((name, weight)) = self.mix.iter().find(|(_, w)| !(w.is_finite() && **w >= 0.0)) {
            return Some(format!("mix.{name} is {weight}, which must be a finite number, 0 or more"));
        }
        if !self.mix.is_empty() && self.mix.values().sum::<f64>() <= 0.0 {
            return Some("every weight of mix is 0: give one domain at least a weight above 0".to_owned());
        }
        (self.drift.is_some() && domains.len() < 2)
            .then(|| "drift moves weight between domains, and the trace has fewer than two".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_makes_no_sense_is_named_by_its_key() {
        let domains = ["code".to_owned(), "math".to_owned()];
        let good = Scenario::default();
        assert_eq!(good.problem(&domains), None);
        let group = |slots, speed| vec![DecodeGroup { workers: 2, slots, speed }];
        let event = |at, worker, what, by| vec![Event { at, worker, what, by }];
        let mix = |name: &str, weight| BTreeMap::from([(name.to_owned(), weight)]);
        let cases = [
            (Scenario { requests: 0, ..good.clone() }, "requests is 0"),
            (Scenario { decode: group(0, 1.0), ..good.clone() }, "decode.slots is 0"),
            // These aborted for want of memory, ran without end, or panicked over a time that is no time.
            (
                Scenario { requests: u64::MAX, ..good.clone() },
                "requests is 18446744073709551615, which must be at most",
            ),
            (
                Scenario { decode: vec![DecodeGroup { workers: u32::MAX, slots: 1, speed: 1.0 }], ..good.clone() },
                "workers is 4294967295, which must be at most",
            ),
            (Scenario { decode: group(u32::MAX, 1.0), ..good.clone() }, "slots of all workers together is 8589934590"),
            (Scenario { prefill: Some(4_000_000_000), ..good.clone() }, "prefill is 4000000000"),
            (Scenario { rate: Some(1e-300), ..good.clone() }, "rate is 0.0000"),
            (Scenario { decode: group(4, 1e-300), ..good.clone() }, "decode.speed is 1e-300, which must be from 1e-6"),
            (
                Scenario { rate: Some(1.0), burst: Some(Burst { on: 1.0, off: 1e300 }), ..good.clone() },
                "burst.off is 1e300 seconds, which must be at most 1e12",
            ),
            (
                Scenario {
                    prefix: Some(PrefixSharing { groups: u32::MAX, tokens: 8, share: 1.0, cache_tokens: 0 }),
                    ..good.clone()
                },
                "prefix.groups is 4294967295, which must be at most 10000",
            ),
            (Scenario { event: event(1e300, 0, Happens::Resume, 1.0), ..good.clone() }, "event 0 is at 1e300 seconds"),
            (Scenario { event: event(1.0, 0, Happens::Slow, 1e300), ..good.clone() }, "event 0: by is 1e300"),
            (Scenario { max_queue: Some(0), ..good.clone() }, "max_queue is 0"),
            (Scenario { event: event(1.0, 0, Happens::Join, 4e9), ..good.clone() }, "event 0: by is 4000000000"),
            // This was a worker of 2 slots.
            (
                Scenario { event: event(1.0, 0, Happens::Join, 2.5), ..good.clone() },
                "event 0: by is 2.5, which must be a whole",
            ),
            (Scenario { decode: group(4, -1.0), ..good.clone() }, "decode.speed is -1"),
            (Scenario { decode: Vec::new(), ..good.clone() }, "decode is empty"),
            (Scenario { warmup: 1.0, ..good.clone() }, "warmup is 1"),
            (Scenario { rate: Some(f64::NAN), ..good.clone() }, "rate is NaN"),
            (Scenario { burst: Some(Burst { on: 1.0, off: 1.0 }), ..good.clone() }, "burst is given without rate"),
            (Scenario { mix: mix("law", 1.0), ..good.clone() }, "mix.law names a domain"),
            (Scenario { mix: mix("code", -1.0), ..good.clone() }, "mix.code is -1"),
            (Scenario { mix: mix("code", 0.0), ..good.clone() }, "every weight of mix is 0"),
            (Scenario { mix: mix("code", 1.0), in_order: true, ..good.clone() }, "in_order is true"),
            (Scenario { event: event(1.0, 8, Happens::Fail, 1.0), ..good.clone() }, "event 0 is about decode worker 8"),
            (Scenario { event: event(-1.0, 0, Happens::Fail, 1.0), ..good.clone() }, "event 0 is at -1"),
            (Scenario { event: event(1.0, 0, Happens::Slow, 0.0), ..good.clone() }, "event 0: by is 0"),
        ];
        for (scenario, want) in cases {
            let problem = scenario.problem(&domains).unwrap_or_default();
            assert!(problem.starts_with(want), "{want}: {problem}");
        }
        let joined = Scenario {
            event: vec![
                Event { at: 1.0, worker: 0, what: Happens::Join, by: 16.0 },
                Event { at: 2.0, worker: 8, what: Happens::Fail, by: 1.0 },
            ],
            ..good
        };
        assert_eq!(joined.problem(&domains), None);
    }

    #[test]
    fn workers_and_prefill_follow_the_groups() {
        let group = |workers, slots| DecodeGroup { workers, slots, speed: 1.0 };
        let scenario = Scenario { decode: vec![group(2, 4), group(3, 8)], ..Scenario::default() };
        assert_eq!((scenario.n_workers(), scenario.n_slots(), scenario.n_prefill()), (5, vec![4, 4, 8, 8, 8], 2));
    }
}
