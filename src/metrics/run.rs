use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{
    metrics::{RequestTimes, Summary, request},
    route::{Decision, PolicyKind},
    types::WorkerId,
};

/// One decode step of one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepRecord<'a> {
    /// The worker.
    pub worker: WorkerId,
    /// Sequences in the batch, at least 1.
    pub n_batch: u32,
    /// Distinct experts the batch picked in each MoE layer; empty if the step's picks were not counted.
    pub n_distinct: &'a [u32],
}

/// Collects what happened during one run of a workload under one policy.
///
/// Warm-up is left out by not recording it. Records may come in any order.
#[derive(Debug, Clone, Default)]
pub struct RunMetrics {
    ttft_ms: Vec<f64>,
    tpot_ms: Vec<f64>,
    itl_ms: Vec<f64>,
    batch: Vec<f64>,
    experts_distinct: Vec<f64>,
    /// Distinct experts a layer, and sequences, summed over the counted steps.
    experts_read: (f64, u64),
    band: Vec<f64>,
    route_us: Vec<f64>,
    handoff_ms: Vec<f64>,
    /// Decode steps of each worker.
    steps: Vec<u64>,
    n_failed: u64,
    n_output: u64,
    /// The first arrival and the last token.
    span: Option<(Duration, Duration)>,
}

/// One run of a workload under one policy, as the bench report lists it.
///
/// A summary is null where nothing was sampled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunSummary {
    /// The policy's name.
    pub policy: String,
    /// Requests that finished.
    pub requests: u64,
    /// Requests that did not.
    pub failed: u64,
    /// Time to first token.
    pub ttft_ms: Option<Summary>,
    /// Time per output token after the first, one sample a request of at least two tokens.
    pub tpot_ms: Option<Summary>,
    /// Gaps between tokens, pooled over requests.
    pub itl_ms: Option<Summary>,
    /// Distinct experts a layer, one sample a decode step: the mean over its layers.
    pub experts_distinct: Option<Summary>,
    /// Distinct experts a layer that were read for each generated token: all of them over all tokens of the counted
    /// steps. Unlike the mean a step it does not favour a policy whose steps are many and small.
    #[serde(default)]
    pub experts_per_token: Option<f64>,
    /// Bytes of the distinct experts that a decode step reads, over all layers, in the mean.
    #[serde(default)]
    pub expert_bytes_step: Option<f64>,
    /// Sequences in a batch, one sample a decode step.
    pub batch: Option<Summary>,
    /// Workers the policy chose between at the end, one sample a decision.
    pub band: Option<Summary>,
    /// Time a decision took.
    pub route_us: Option<Summary>,
    /// Time a sequence was between workers.
    pub handoff_ms: Option<Summary>,
    /// Tokens generated per second from the first arrival to the last token.
    pub output_tokens_per_s: f64,
    /// One hash over all outputs.
    pub tokens_sha256: String,
    /// Decode steps of each worker.
    #[serde(default)]
    pub steps: Vec<u64>,
}

impl RunMetrics {
    /// A run in which nothing has happened yet, with `n_workers` decode workers.
    pub fn new(n_workers: usize) -> Self {
        Self { steps: vec![0; n_workers], ..Self::default() }
    }

    /// A request finished: it arrived at `arrival` and its tokens came at `tokens`, ascending, at least one.
    pub fn finished(&mut self, arrival: Duration, tokens: &[Duration]) {
        let times = RequestTimes::from_tokens(arrival, tokens).expect("a finished request has at least one token");
        self.ttft_ms.push(times.ttft_ms());
        self.tpot_ms.extend(times.tpot_ms());
        self.itl_ms.extend(request::itl_ms(tokens));
        self.n_output += u64::from(times.n_output);
        let (first, last) = self.span.unwrap_or((arrival, times.last_token));
        self.span = Some((first.min(arrival), last.max(times.last_token)));
    }

    /// A request failed.
    pub fn failed(&mut self) {
        self.n_failed += 1;
    }

    /// A request was routed in `took`.
    pub fn routed(&mut self, decision: &Decision, took: Duration) {
        self.band.push(f64::from(decision.band));
        self.route_us.push(took.as_secs_f64() * 1e6);
    }

    /// A sequence was exported, moved and imported in `took`.
    pub fn handed_off(&mut self, took: Duration) {
        self.handoff_ms.push(request::millis(took));
    }

    /// A worker did a decode step.
    pub fn stepped(&mut self, step: StepRecord<'_>) {
        self.steps[step.worker.index()] += 1;
        self.batch.push(f64::from(step.n_batch));
        if !step.n_distinct.is_empty() {
            let sum: u64 = step.n_distinct.iter().map(|&n| u64::from(n)).sum();
            let mean = sum as f64 / step.n_distinct.len() as f64;
            self.experts_distinct.push(mean);
            self.experts_read.0 += mean;
            self.experts_read.1 += u64::from(step.n_batch);
        }
    }

    /// The run as the report lists it; `tokens_sha256` is the hash over all outputs.
    pub fn summarise(mut self, policy: PolicyKind, tokens_sha256: String) -> RunSummary {
        let seconds = self.span.map_or(0.0, |(first, last)| last.saturating_sub(first).as_secs_f64());
        RunSummary {
            policy: policy.name().to_owned(),
            requests: self.ttft_ms.len() as u64,
            failed: self.n_failed,
            ttft_ms: Summary::of(&mut self.ttft_ms),
            tpot_ms: Summary::of(&mut self.tpot_ms),
            itl_ms: Summary::of(&mut self.itl_ms),
            experts_distinct: Summary::of(&mut self.experts_distinct),
            experts_per_token: (self.experts_read.1 > 0).then(|| self.experts_read.0 / self.experts_read.1 as f64),
            expert_bytes_step: None,
            batch: Summary::of(&mut self.batch),
            band: Summary::of(&mut self.band),
            route_us: Summary::of(&mut self.route_us),
            handoff_ms: Summary::of(&mut self.handoff_ms),
            output_tokens_per_s: if seconds > 0.0 { self.n_output as f64 / seconds } else { 0.0 },
            tokens_sha256,
            steps: self.steps,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::Reason;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn step(worker: u32, n_batch: u32, n_distinct: &[u32]) -> StepRecord<'_> {
        StepRecord { worker: WorkerId(worker), n_batch, n_distinct }
    }

    #[test]
    fn a_run_adds_up() {
        let mut metrics = RunMetrics::new(2);
        metrics.finished(ms(1000), &[ms(1500), ms(2000), ms(3000)]);
        metrics.finished(ms(500), &[ms(750)]);
        metrics.failed();
        let decision = Decision {
            worker: WorkerId(1),
            reason: Reason::Band,
            similarity: None,
            best_similarity: None,
            band: 3,
            n_inflight: 0,
            marginal: None,
        };
        metrics.routed(&decision, Duration::from_micros(8));
        metrics.handed_off(ms(2));
        metrics.stepped(step(0, 1, &[4, 4]));
        metrics.stepped(step(1, 3, &[10, 12]));
        metrics.stepped(step(1, 5, &[]));
        let run = metrics.summarise(PolicyKind::LocalityBand, "ab".into());

        let all = |x: f64| Some(Summary { p50: x, p99: x, mean: x });
        assert_eq!((run.policy.as_str(), run.requests, run.failed), ("locality_band", 2, 1));
        assert_eq!(run.ttft_ms, Some(Summary { p50: 250.0, p99: 500.0, mean: 375.0 }));
        assert_eq!(run.tpot_ms, all(750.0));
        assert_eq!(run.itl_ms, Some(Summary { p50: 500.0, p99: 1000.0, mean: 750.0 }));
        assert_eq!(run.experts_distinct, Some(Summary { p50: 4.0, p99: 11.0, mean: 7.5 }));
        // 4 experts for one token and 11 for three.
        assert_eq!(run.experts_per_token, Some(3.75));
        assert_eq!(run.batch, Some(Summary { p50: 3.0, p99: 5.0, mean: 3.0 }));
        assert_eq!((run.band, run.handoff_ms), (all(3.0), all(2.0)));
        assert!(run.route_us.is_some_and(|us| (us.p50 - 8.0).abs() < 1e-9));
        // Four tokens from 0.5 s to 3 s.
        assert_eq!(run.output_tokens_per_s.to_bits(), 1.6f64.to_bits());
        assert_eq!(run.steps, [1, 2]);
    }

    #[test]
    fn what_was_not_sampled_is_null() {
        let run = RunMetrics::new(1).summarise(PolicyKind::Random, String::new());
        let json = serde_json::to_value(&run).expect("json");
        for name in [
            "ttft_ms",
            "tpot_ms",
            "itl_ms",
            "experts_distinct",
            "experts_per_token",
            "batch",
            "band",
            "route_us",
            "handoff_ms",
        ] {
            assert!(json[name].is_null(), "{name}: {}", json[name]);
        }
        assert_eq!(json["output_tokens_per_s"], 0.0);
    }
}
