//! What a recording of requests holds: the experts each prompt picked, block by block, and those of every generated
//! token.
//!
//! Never reads a file or runs a model. Picks follow from a request's tokens alone, not from its batch, so a trace
//! replays any policy exactly.

mod request;

pub use request::{GateSums, TraceRequest};

use crate::types::MoeShape;

/// Recorded requests of one model.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// What holds for all of them.
    pub header: TraceHeader,
    /// The requests, in order of recording.
    pub requests: Vec<TraceRequest>,
}

/// What holds for every request of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceHeader {
    /// The model's MoE layers and experts.
    pub shape: MoeShape,
    /// Which model it is, as a calibration names it.
    pub fingerprint: String,
    /// Prompt tokens a block, 1 to 128; a prompt's last block may hold fewer.
    pub n_block: u32,
}
