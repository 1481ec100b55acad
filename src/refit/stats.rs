use serde::Serialize;

/// Why a fit was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RefitReason {
    /// Nothing was known about how well the calibration serves this traffic.
    First,
    /// The newest signatures were less similar to their workers' centroids than expected.
    Drift,
    /// The last check set new centroids, so traffic may still be on the move.
    Moving,
    /// No signature of the last fit is left in the window.
    Renewed,
    /// A worker was added, drained or lost.
    Resized,
}

/// What a check came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RefitOutcome {
    /// Traffic is as expected; nothing was fitted.
    Steady,
    /// A fit was made, but was not better by the margin.
    Kept,
    /// New centroids were set.
    Swapped,
    /// The group of workers changed while the check ran, so its result was dropped.
    Dropped,
}

/// What decode steps read.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Reads {
    /// Distinct experts a layer and step, on average.
    pub distinct: f64,
    /// Sequences a step, on average.
    pub batch: f64,
}

/// What refitting has seen and done.
///
/// Similarities are means over the newest signatures, each with the centroid it gets when every worker takes an equal
/// share.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RefitStats {
    /// Workers that share the traffic now.
    pub n_workers: usize,
    /// Signatures observed since the start.
    pub n_observed: u64,
    /// Signatures in the window now.
    pub n_window: usize,
    /// Checks that ended.
    pub n_checks: u64,
    /// Of those, checks that made a fit.
    pub n_fits: u64,
    /// Times new centroids were set.
    pub n_swaps: u64,
    /// Checks whose result was dropped.
    pub n_dropped: u64,
    /// What the last check came to.
    pub last_outcome: Option<RefitOutcome>,
    /// Why the last fit was made.
    pub last_reason: Option<RefitReason>,
    /// By how much the last fit raised the similarity of signatures it had not seen.
    pub last_gain: Option<f64>,
    /// Signatures the last fit's best centroids were cut from.
    pub last_n_fitted: Option<usize>,
    /// The similarity expected, as the last fit found it.
    pub expected: Option<f64>,
    /// The similarity at the last check, before what it did.
    pub recent: Option<f64>,
    /// Share of requests, at the last check, less similar to their nearest centroid than nine in ten were at the last
    /// fit: 0.1 if nothing has changed.
    pub low_share: Option<f64>,
    /// What decode steps read, smoothed, where observed.
    pub reads: Option<Reads>,
    /// What they were expected to read, where known. Larger batches read more: compare the experts where the batches are
    /// alike.
    pub expected_reads: Option<Reads>,
    /// Why there are no more refits, in a sentence.
    pub off: Option<String>,
}
