//! Why requests can not be calibrated, bytes not decoded, or a calibration not used with a model.
//!
//! Never carries a path: whoever opened the file adds it.

use crate::types::shown;

/// Why recorded requests can not be turned into a calibration.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrateError {
    /// Nothing was recorded.
    #[error("there are no calibration requests: give at least three prompts")]
    NoRequests,
    /// K is 0.
    #[error("zero decode workers: a calibration needs at least one")]
    NoWorkers,
    /// Fewer requests than centroids.
    #[error("{n_requests} calibration requests are too few for {n_workers} decode workers: give at least one a worker")]
    TooFewRequests {
        /// Requests given.
        n_requests: usize,
        /// Decode workers asked for.
        n_workers: usize,
    },
    /// A request whose prompt or output was not counted.
    #[error("calibration request `{}` has no {phase} tokens: remove it or record it again", shown(id))]
    NoTokens {
        /// The request.
        id: String,
        /// `prefill` or `decode`.
        phase: &'static str,
    },
    /// A dense model, or one whose only MoE layer is its last layer.
    #[error("the model has no MoE layer that shows a prompt's picks, so there is nothing to calibrate: route by load")]
    NoUsableLayer,
    /// Every pair of requests is equally far apart, in prefill or in decode.
    #[error(
        "rho is undefined because all pairs of the {n_requests} calibration requests are equally far apart in {phase}: \
         give at least three prompts that differ"
    )]
    NoSpread {
        /// Requests given.
        n_requests: usize,
        /// `prefill` or `decode`.
        phase: &'static str,
    },
    /// Requests whose picks all have weight 0 in the masked layers can not be clustered.
    #[error(
        "only {n_signatures} of {n_requests} calibration requests have a signature, too few for {n_workers} decode \
         workers: give more prompts that differ"
    )]
    TooFewSignatures {
        /// Requests with a signature.
        n_signatures: usize,
        /// Requests given.
        n_requests: usize,
        /// Decode workers asked for.
        n_workers: usize,
    },
    /// A parameter no router could use.
    #[error("tau is {0}, but a difference of cosine similarities lies between 0 and 2")]
    Tau(f32),
    /// No search at all, or more than anyone would wait for.
    #[error("{n_restarts} restarts of the clustering: give a number between 1 and {limit}")]
    Restarts {
        /// Restarts asked for.
        n_restarts: u32,
        /// The most there may be.
        limit: u32,
    },
    /// A search of 0 steps.
    #[error("the clustering may take no assignment step: allow at least one")]
    NoIterations,
    /// A mask of 0 layers.
    #[error("the mask may keep no layer: allow at least one")]
    NoLayers,
    /// One capacity a worker is needed.
    #[error("{n_capacities} capacities for {n_workers} decode workers: give one for each, or none at all")]
    Capacities {
        /// Capacities given.
        n_capacities: usize,
        /// Decode workers asked for.
        n_workers: usize,
    },
    /// A worker whose share of the requests is less than one.
    #[error(
        "decode worker {worker} with capacity {capacity} of {all} would get none of {n_requests} calibration requests: \
         give it more capacity, or more requests"
    )]
    NoShare {
        /// The worker.
        worker: usize,
        /// Its capacity.
        capacity: u32,
        /// Capacity of all workers.
        all: u64,
        /// Requests that were to be clustered.
        n_requests: usize,
    },
}

/// Why bytes are not counts to calibrate from.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CountsError {
    /// Not safetensors at all, or cut short.
    #[error("the counts are not a whole safetensors file ({0}): write them again")]
    Safetensors(String),
    /// A tensor is missing.
    #[error("the counts have no tensor `{name}`: {needed} needed, U32 [N, L, E]")]
    NoTensor {
        /// The tensor.
        name: &'static str,
        /// Those that are needed, with their verb.
        needed: &'static str,
    },
    /// A tensor of another type or number of dimensions.
    #[error("the counts' tensor `{name}` is {found}, but it must be U32 [N, L, E]: requests, layers, experts")]
    Shape {
        /// The tensor.
        name: &'static str,
        /// Its type and shape.
        found: String,
    },
    /// The two tensors are of different requests, layers or experts.
    #[error("`prefill_counts` is {prefill:?} but `decode_counts` is {decode:?}: both must have one shape [N, L, E]")]
    Disagree {
        /// Shape of the prefill counts.
        prefill: [usize; 3],
        /// Shape of the decode counts.
        decode: [usize; 3],
    },
    /// No requests, layers or experts.
    #[error("the counts' tensor `{name}` is empty ({dim:?}): it needs at least one request, layer and expert")]
    Empty {
        /// The tensor.
        name: &'static str,
        /// Its shape.
        dim: [usize; 3],
    },
    /// A dimension beyond any model.
    #[error("the counts have {0} layers or experts, more than a model can have")]
    TooLarge(usize),
    /// All counts of a request are 0.
    #[error("request `{}` has no {phase} picks: all its counts are 0; remove it or capture it again", shown(id))]
    NoPicks {
        /// The request.
        id: String,
        /// `prefill` or `decode`.
        phase: &'static str,
    },
    /// A metadata entry that does not parse or does not fit the tensors.
    #[error("the counts' metadata entry `{name}` {problem}")]
    Entry {
        /// The metadata entry.
        name: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// Labels of another type or number.
    #[error(
        "the counts' tensor `labels` is {found}, but it must hold {n_requests} whole numbers (U8, I32, U32, I64, U64)"
    )]
    Labels {
        /// Its type and shape.
        found: String,
        /// Requests there are.
        n_requests: usize,
    },
}

/// Why bytes are not a calibration.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// Not safetensors at all, or cut short.
    #[error("the calibration is not a whole safetensors file ({0}): make it again with `eldr calibrate`")]
    Safetensors(String),
    /// Safetensors of something else.
    #[error("the file is safetensors but not a calibration: its metadata has no `{0}`")]
    NoEntry(&'static str),
    /// Another version of the format.
    #[error("the calibration has format version {}, but this eldr reads version {known}: make it again", shown(found))]
    Version {
        /// The file's version.
        found: String,
        /// The version this crate reads and writes.
        known: &'static str,
    },
    /// Bytes are not as they were written.
    #[error("the calibration is damaged (its bytes do not match their SHA-256): copy it again, or make it again")]
    Checksum,
    /// A metadata entry that does not parse or lies outside its range.
    #[error("the calibration's `{name}` is `{}`, but it must be {want}", shown(value))]
    Value {
        /// The metadata entry.
        name: &'static str,
        /// What the file holds.
        value: String,
        /// What it should hold.
        want: &'static str,
    },
    /// A tensor is missing.
    #[error("the calibration has no tensor `{0}`")]
    NoTensor(&'static str),
    /// A tensor of another type or shape.
    #[error("the calibration's tensor `{name}` is {found}, but it must be {want}")]
    Shape {
        /// The tensor.
        name: &'static str,
        /// Type and shape in the file.
        found: String,
        /// Type and shape that fit the metadata.
        want: String,
    },
    /// A tensor that holds a number it must not hold.
    #[error("the calibration's tensor `{name}` {problem}")]
    Content {
        /// The tensor.
        name: &'static str,
        /// What is wrong, with the place.
        problem: String,
    },
}

/// Why a calibration can not be used with a model and a number of decode workers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MismatchError {
    /// Other MoE layers or experts.
    #[error("the calibration was made for a model of {made_for}, but this model has {used_with}: calibrate this model")]
    Shape {
        /// The calibration's model in words.
        made_for: String,
        /// This model in words.
        used_with: String,
    },
    /// The same shape, but other weights.
    #[error(
        "the calibration was made for model `{}`, but this model is `{}`: calibrate this model",
        shown(made_for),
        shown(used_with)
    )]
    Model {
        /// The calibration's fingerprint.
        made_for: String,
        /// This model's fingerprint.
        used_with: String,
    },
    /// One centroid a worker is needed.
    #[error(
        "the calibration was made for {made_for} decode workers, but the number of decode workers is {used_with}: \
         calibrate with `--workers {used_with}`"
    )]
    Workers {
        /// The calibration's K.
        made_for: usize,
        /// Workers there are.
        used_with: usize,
    },
}
