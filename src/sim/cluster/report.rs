use serde::{Deserialize, Serialize};

use crate::metrics::Summary;

/// One simulated run under one policy.
///
/// Warm-up and drain are left out as `bench` does: a request counts if it reached a decode worker after the warm-up's
/// share of them had; a step counts if it ended after the first such request came and before the last one did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClusterReport {
    /// The policy's name.
    pub policy: String,
    /// Decode workers at the end, lost ones included.
    pub workers: u32,
    /// Requests that finished, warm-up and drain included.
    pub finished: u64,
    /// Requests that could not be run.
    pub failed: u64,
    /// Requests that found the queue full.
    pub refused: u64,
    /// Times a request was prefilled again because its worker was lost.
    pub retried: u64,
    /// Workers lost.
    pub lost: u64,
    /// Running sequences that moved to another worker.
    #[serde(default)]
    pub migrated: u64,
    /// Requests that came while a copy of the same recorded request was in the system; those replay other steps of it.
    pub copies: u64,
    /// Requests that the times are over.
    pub measured: u64,
    /// Seconds from the start to the last token.
    pub time_s: f64,
    /// Time to first token.
    pub ttft_ms: Option<Summary>,
    /// Time per output token after the first, one sample a request.
    pub tpot_ms: Option<Summary>,
    /// From submission to the last token.
    pub e2e_ms: Option<Summary>,
    /// From the first token until there was a decode slot.
    pub wait_ms: Option<Summary>,
    /// Distinct experts a layer, averaged over steps; under a placement, those of the busiest rank.
    pub experts_per_step: f64,
    /// Distinct experts a layer read for each token: all of them over all tokens. Unlike the number a step, it can not
    /// be lowered by making batches smaller.
    pub experts_per_token: f64,
    /// Sequences in a batch, averaged over steps.
    pub batch: f64,
    /// Tokens of context in a batch, averaged over steps.
    pub context: f64,
    /// Time of a step, averaged over steps.
    pub step_ms: f64,
    /// Tokens that decode steps generated in a second.
    pub tokens_per_s: f64,
    /// Share of the time that decode workers were in a step.
    pub busy: f64,
    /// Tokens of the worker that generated the most, over the mean.
    pub imbalance: f64,
    /// Share of the prompts' tokens that a prefill worker still held.
    pub cached: f64,
    /// Simulated decode steps, all of them.
    pub steps: u64,
}
