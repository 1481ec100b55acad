//! The plain data every floor shares: ids, a model's MoE shape, requests and how they end.
//!
//! Nothing here computes, waits or does I/O.

mod cpu_set;
mod ids;
mod request;
mod shape;
mod shown;

pub use cpu_set::CpuSet;
pub use ids::{RequestId, Slot, Token, WorkerId};
pub use request::{FinishReason, Request, SamplingParams, TokenLogprobs, Usage};
pub use shape::MoeShape;
pub use shown::{shown, shown_number, visible};
