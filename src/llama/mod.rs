//! llama.cpp as safe Rust types: what a model is, how a batch runs, which experts its tokens picked, where a sequence's
//! state goes.
//!
//! Never knows a request, a worker or a signature, and no llama.cpp type appears in its public items.
//!
//! Drop order is held by ownership: a [`Context`] owns a clone of its [`Model`], a [`Model`] owns its [`Device`]'s
//! [`Backend`], and the tap's state outlives the context that calls it. No C++ exception crosses into Rust: every call
//! that can throw goes through `vendor/guard`.

#![expect(unsafe_code, reason = "the boundary to llama.cpp; every floor above is safe")]

mod backend;
mod batch;
mod chain;
mod context;
mod device;
mod draw;
mod error;
mod facts;
mod gate;
mod gguf;
pub mod gguf_file;
mod grammar;
mod guard;
mod logging;
mod logprobs;
mod memory;
mod model;
mod params;
mod plausible;
mod pool;
mod rpc;
mod sampler;
mod sequence;
mod tap;
#[cfg(test)]
mod testing;
mod vocab;

pub use backend::{Backend, RPC_DEADLINE, rpc_endpoint};
pub use batch::Batch;
pub use context::Context;
pub use device::{Device, DeviceInfo, DeviceKind, is_named};
pub use error::{DecodeError, DecodeFailure, LlamaError};
pub use facts::{ExpertBytes, ModelFacts};
pub use gguf::{INFLATED_OF, fingerprint};
pub use memory::MemoryRow;
pub use model::{CpuMoe, Model, ModelParams};
pub use params::{ContextParams, KvType};
pub use pool::{pin_thread, prefer_memory_of};
pub use sampler::Sampler;
pub use tap::TapRows;
