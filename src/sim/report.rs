use serde::{Deserialize, Serialize};

use crate::metrics::Summary;

/// One replay under one policy. Times are in the step cost's unit.
///
/// Warm-up and drain are left out as `bench` does: a request counts if it reached a decode worker after the warm-up's
/// share of them had; a step counts if it ended after the first such request came and before the last one did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReplayReport {
    /// The policy's name.
    pub policy: String,
    /// Requests served, warm-up and drain included.
    pub n_requests: u64,
    /// Tokens they generated in decode steps.
    pub n_tokens: u64,
    /// Requests that `tpot` is over.
    pub n_measured: u64,
    /// Requests that came while they were already in the system: 0 as long as the recorded ones suffice.
    pub n_repeats: u64,
    /// From the start to the last token.
    pub time: f64,
    /// Time per output token after the first, one sample a request; nothing if none was measured.
    pub tpot: Option<Summary>,
    /// From a request's first token until it got a decode slot, one sample a request measured.
    pub wait: Option<Summary>,
    /// Distinct experts a layer, averaged over steps.
    pub experts_per_step: f64,
    /// Expert reads a layer for each token: distinct experts summed over steps, over tokens. Unlike the number a step,
    /// it can not be lowered by making batches smaller.
    pub experts_per_token: f64,
    /// Sequences in a batch, averaged over steps.
    pub batch: f64,
    /// Time of a step, averaged over steps.
    pub step: f64,
    /// Steps of each decode worker.
    pub steps: Vec<u64>,
}

/// The averages of several replays of one policy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct ReplayMeans {
    /// Median time per output token.
    pub tpot_p50: f64,
    /// Its 99th percentile.
    pub tpot_p99: f64,
    /// Its mean.
    pub tpot_mean: f64,
    /// As [`ReplayReport::experts_per_step`].
    pub experts_per_step: f64,
    /// As [`ReplayReport::experts_per_token`].
    pub experts_per_token: f64,
    /// As [`ReplayReport::batch`].
    pub batch: f64,
}

impl ReplayMeans {
    /// The averages of `reports`, of which there is at least one.
    pub fn of<'a>(reports: impl IntoIterator<Item = &'a ReplayReport>) -> Self {
        let mut sum = Self::default();
        let mut n = 0.0;
        for report in reports {
            let tpot = report.tpot.unwrap_or(Summary { p50: 0.0, p99: 0.0, mean: 0.0 });
            sum.tpot_p50 += tpot.p50;
            sum.tpot_p99 += tpot.p99;
            sum.tpot_mean += tpot.mean;
            sum.experts_per_step += report.experts_per_step;
            sum.experts_per_token += report.experts_per_token;
            sum.batch += report.batch;
            n += 1.0;
        }
        assert!(n > 0.0, "the average of no replay");
        Self {
            tpot_p50: sum.tpot_p50 / n,
            tpot_p99: sum.tpot_p99 / n,
            tpot_mean: sum.tpot_mean / n,
            experts_per_step: sum.experts_per_step / n,
            experts_per_token: sum.experts_per_token / n,
            batch: sum.batch / n,
        }
    }
}
