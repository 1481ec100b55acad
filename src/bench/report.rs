//! The bench's report: one JSON document that the table and the chart are drawn from.
//!
//! Field names are stable; new ones may be added.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::{
    bench::{Environment, Limit, Machine},
    metrics::RunSummary,
    route::PolicyKind,
    sim::DeviceCost,
    types::Token,
};

/// The version of the report's format.
pub const REPORT_VERSION: u32 = 1;

/// One bench: the same requests, arrivals and seeds under several policies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchReport {
    /// [`REPORT_VERSION`].
    pub version: u32,
    /// What it ran on.
    pub machine: Machine,
    /// The model.
    pub model: ModelInfo,
    /// Which clock the times are on.
    pub clock: Clock,
    /// Prefill workers.
    pub prefill: u32,
    /// Decode workers.
    pub decode: u32,
    /// Requests a second; null when all requests arrive at once.
    pub rate: Option<f64>,
    /// Seed of arrivals, policies and sampling.
    pub seed: u64,
    /// The workload's file.
    #[serde(default)]
    pub workload: Option<String>,
    /// How requests arrived, in words.
    #[serde(default)]
    pub arrivals: Option<String>,
    /// What the locality band worked with; null without a calibration.
    #[serde(default)]
    pub calibration: Option<CalibrationInfo>,
    /// What a reader must know to judge the numbers, one sentence each.
    #[serde(default)]
    pub notes: Vec<String>,
    /// One entry a policy.
    pub runs: Vec<RunSummary>,
    /// What the steps of each run read, where experts were counted.
    #[serde(default)]
    pub limits: Vec<Limit>,
    /// What the steps of all runs took, as costs to simulate with; null where they were not timed alone, or not counted.
    #[serde(default)]
    pub cost: Option<DeviceCost>,
    /// How the machine was while it ran.
    #[serde(default)]
    pub environment: Option<Environment>,
    /// Any other fields.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// The model a bench ran.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelInfo {
    /// Its file.
    pub path: String,
    /// The file's SHA-256, in hexadecimal.
    pub sha256: String,
    /// Layers with experts.
    pub n_layer_moe: u32,
    /// Experts a layer.
    pub n_expert: u32,
    /// Experts a token picks in a layer.
    pub n_expert_used: u32,
    /// Whether zero rows were added to its experts: same outputs and picks, larger weights.
    #[serde(default)]
    pub inflated: bool,
}

/// The calibration a bench routed with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CalibrationInfo {
    /// Its file; null if it was made for this bench.
    pub path: Option<String>,
    /// Spearman correlation of prefill and decode distances over the kept layers.
    pub rho: f64,
    /// Layers kept.
    pub n_layer: u32,
    /// The band's width.
    pub tau: f32,
    /// Fewest workers of a band.
    pub min_band: u32,
}

/// The clock that times are on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Clock {
    /// Threads and wall time.
    Real,
    /// Steps are computed and timed one at a time; arrivals and hand-offs advance a virtual clock.
    Virtual,
}

/// How much a run's numbers differ from the best load balancer's, as a share: -0.1 is 10% less.
///
/// Each number is compared with the lowest that any of the four load balancers reached for it, so a policy gains nothing
/// from a balancer that is good at one thing and bad at another. Null where either was not measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Change {
    /// Median time per output token.
    pub tpot_p50: Option<f64>,
    /// 99th percentile of the time per output token.
    pub tpot_p99: Option<f64>,
    /// Mean distinct experts a layer a step.
    pub experts: Option<f64>,
    /// Distinct experts a layer read for each token.
    pub reads: Option<f64>,
}

impl BenchReport {
    /// Whether any load balancer is among the runs.
    pub fn has_load_balancer(&self) -> bool {
        self.runs.iter().any(is_load_balancer)
    }

    /// The change of each run against the best load balancer, in the order of `runs`.
    pub fn changes(&self) -> Vec<Change> {
        let tpot_p50 = |run: &RunSummary| run.tpot_ms.map(|tpot| tpot.p50);
        let tpot_p99 = |run: &RunSummary| run.tpot_ms.map(|tpot| tpot.p99);
        let experts = |run: &RunSummary| run.experts_distinct.map(|experts| experts.mean);
        let reads = |run: &RunSummary| run.experts_per_token;
        self.runs
            .iter()
            .map(|run| Change {
                tpot_p50: relative(tpot_p50(run), self.lowest(tpot_p50)),
                tpot_p99: relative(tpot_p99(run), self.lowest(tpot_p99)),
                experts: relative(experts(run), self.lowest(experts)),
                reads: relative(reads(run), self.lowest(reads)),
            })
            .collect()
    }

    /// The lowest value of a load balancer.
    fn lowest(&self, value: impl Fn(&RunSummary) -> Option<f64>) -> Option<f64> {
        self.runs.iter().filter(|run| is_load_balancer(run)).filter_map(value).min_by(f64::total_cmp)
    }

    /// Whether a run's outputs are the first run's, token for token.
    pub fn outputs_equal(&self, run: &RunSummary) -> bool {
        self.runs.first().is_some_and(|first| first.tokens_sha256 == run.tokens_sha256)
    }
}

fn is_load_balancer(run: &RunSummary) -> bool {
    run.policy.parse().is_ok_and(PolicyKind::is_load_balancer)
}

fn relative(value: Option<f64>, best: Option<f64>) -> Option<f64> {
    let (value, best) = (value?, best?);
    (best > 0.0).then(|| value / best - 1.0)
}

/// One hash over all outputs, in hexadecimal: equal if and only if every request got the same tokens.
///
/// `outputs` are request ids, each once, and generated tokens, in any order. Hashed in id order, each as the id's length
/// (u32), the id, the number of tokens (u32) and the tokens (i32), all little-endian.
pub fn tokens_sha256(outputs: &[(&str, &[Token])]) -> String {
    let mut outputs = outputs.to_vec();
    outputs.sort_unstable();
    let mut hash = Sha256::new();
    for (id, tokens) in outputs {
        hash.update((id.len() as u32).to_le_bytes());
        hash.update(id.as_bytes());
        hash.update((tokens.len() as u32).to_le_bytes());
        for token in tokens {
            hash.update(token.to_le_bytes());
        }
    }
    format!("{:x}", hash.finalize())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::metrics::Summary;

    fn summary(p50: f64, p99: f64, mean: f64) -> Summary {
        Summary { p50, p99, mean }
    }

    /// A run with these median and 99th percentile times per output token, and this many distinct experts.
    fn run(policy: &str, tpot_p50: f64, tpot_p99: f64, experts: f64) -> RunSummary {
        RunSummary {
            policy: policy.into(),
            requests: 400,
            failed: 0,
            ttft_ms: Some(summary(80.25, 310.5, 101.0)),
            tpot_ms: Some(summary(tpot_p50, tpot_p99, tpot_p50 * 1.0625)),
            itl_ms: Some(summary(tpot_p50, tpot_p99 * 1.25, tpot_p50 * 1.0625)),
            experts_distinct: Some(summary(experts, experts * 1.25, experts)),
            expert_bytes_step: None,
            experts_per_token: Some(experts / 16.0),
            batch: Some(summary(16.0, 20.0, 15.5)),
            band: Some(summary(2.0, 4.0, 2.25)),
            route_us: Some(summary(8.5, 12.0, 8.75)),
            handoff_ms: Some(summary(0.75, 1.5, 0.875)),
            output_tokens_per_s: 1234.5,
            tokens_sha256: "c0ffee".into(),
            steps: vec![100; 8],
        }
    }

    /// A report with every policy; `locality_band` is the best at everything.
    pub(in crate::bench) fn sample() -> BenchReport {
        BenchReport {
            version: REPORT_VERSION,
            machine: Machine { os: "linux".into(), arch: "x86_64".into(), ..Machine::default() },
            model: ModelInfo {
                path: "models/tiny-moe-64x4.gguf".into(),
                sha256: "ab".repeat(32),
                n_layer_moe: 6,
                n_expert: 64,
                n_expert_used: 4,
                inflated: false,
            },
            clock: Clock::Virtual,
            prefill: 1,
            decode: 8,
            rate: Some(40.0),
            seed: 7,
            workload: Some("task.serve.jsonl".into()),
            arrivals: Some("Poisson, 40 requests a second".into()),
            calibration: None,
            notes: vec!["The virtual clock times one step at a time.".into()],
            runs: vec![
                run("round_robin", 20.0, 31.0, 36.5),
                run("random", 21.5, 35.0, 37.25),
                run("least_loaded", 20.5, 30.0, 36.75),
                run("power_of_two", 21.0, 32.0, 37.0),
                run("domain", 17.5, 29.0, 29.25),
                run("locality_band", 16.0, 27.0, 27.375),
            ],
            limits: Vec::new(),
            cost: None,
            environment: None,
            extra: Map::new(),
        }
    }

    #[test]
    fn names_are_the_documented_ones() {
        let json = serde_json::to_value(sample()).expect("json");
        let top = ["version", "machine", "model", "clock", "prefill", "decode", "rate", "seed", "runs"];
        assert!(top.iter().all(|name| json.get(name).is_some()), "{json}");
        assert_eq!((&json["version"], &json["clock"]), (&1.into(), &"virtual".into()));
        for name in ["path", "sha256", "n_layer_moe", "n_expert", "n_expert_used"] {
            assert!(json["model"].get(name).is_some(), "model.{name}");
        }
        let run = &json["runs"][0];
        for name in ["policy", "requests", "failed", "output_tokens_per_s", "tokens_sha256"] {
            assert!(run.get(name).is_some(), "runs[].{name}");
        }
        let summaries = [
            ("ttft_ms", &["p50", "p99", "mean"][..]),
            ("tpot_ms", &["p50", "p99", "mean"]),
            ("itl_ms", &["p50", "p99", "mean"]),
            ("experts_distinct", &["mean", "p99"]),
            ("batch", &["mean"]),
            ("band", &["mean"]),
            ("route_us", &["p50", "p99"]),
            ("handoff_ms", &["p50", "p99"]),
        ];
        for (name, parts) in summaries {
            assert!(parts.iter().all(|part| run[name][part].is_f64()), "runs[].{name}: {}", run[name]);
        }
    }

    #[test]
    fn a_report_comes_back_as_written_with_fields_it_does_not_know() {
        let mut report = sample();
        report.extra.insert("prefix_hits".into(), 12.into());
        let json = serde_json::to_string(&report).expect("json");
        assert_eq!(serde_json::from_str::<BenchReport>(&json).expect("a report"), report);
    }

    #[test]
    fn each_number_is_compared_with_the_lowest_of_the_load_balancers() {
        let changes = sample().changes();
        let close = |got: Option<f64>, want: f64| got.is_some_and(|got| (got - want).abs() < 1e-12);
        // Round robin has the best median, join-shortest-queue the best tail.
        assert!(close(changes[0].tpot_p50, 0.0) && close(changes[0].tpot_p99, 31.0 / 30.0 - 1.0));
        assert!(close(changes[2].tpot_p50, 0.025) && close(changes[2].tpot_p99, 0.0));
        assert!(
            close(changes[5].tpot_p50, -0.2) && close(changes[5].tpot_p99, -0.1) && close(changes[5].experts, -0.25)
        );
    }

    #[test]
    fn without_a_load_balancer_or_a_measurement_there_is_no_change() {
        let mut report = sample();
        report.runs[5].experts_distinct = None;
        report.runs[5].experts_per_token = None;
        assert_eq!((report.changes()[5].experts, report.changes()[5].reads), (None, None));
        report.runs.drain(..4);
        assert!(!report.has_load_balancer());
        assert_eq!(report.changes(), [Change::default(); 2]);
    }

    #[test]
    fn the_hash_is_of_what_each_request_got() {
        let hash = tokens_sha256(&[("a", &[1, 2]), ("b", &[3])]);
        assert_eq!(hash, tokens_sha256(&[("b", &[3]), ("a", &[1, 2])]));
        let others: [&[(&str, &[Token])]; 4] = [
            &[("a", &[1, 2]), ("b", &[4])],
            &[("a", &[1]), ("b", &[2, 3])],
            &[("a", &[1, 2])],
            &[("b", &[1, 2]), ("a", &[3])],
        ];
        assert!(others.iter().all(|other| tokens_sha256(other) != hash));
        // Of nothing: the SHA-256 of the empty string.
        assert_eq!(tokens_sha256(&[]), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    }
}
