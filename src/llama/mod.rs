//! llama.cpp as safe Rust types: what a model is, how a batch runs, which experts its tokens picked, where a sequence's
//! state goes.
//!
//! Never knows a request, a worker or a signature, and no llama.cpp type appears in its public items.
//!
//! Drop order is held by ownership: a [`Context`] owns a clone of its [`Model`], a [`Model`] owns its [`Device`]'s
//! [`Backend`], and the tap's state outlives the context that calls it. No C++ exception crosses into Rust: every call
//! that can throw goes through `vendor/guard`.
//!
//! ```no_run
//! use eldr::{
//!     llama::{
//!         Backend, Batch, Context, ContextParams, CpuMoe, DecodeError, DecodeFailure, Device, DeviceKind, KvType, LlamaError, Model,
//!         MemoryRow, ModelParams, Sampler, TapRows,
//!     },
//!     types::SamplingParams,
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let backend = Backend::init();
//! let device: Device = backend.best_device()?;
//! let cpu_moe = if device.kind() == DeviceKind::Cpu { CpuMoe::None } else { CpuMoe::First(4) };
//! let model =
//!     Model::load(&backend, "model.gguf", &ModelParams { device: Some(device), cpu_moe, ..ModelParams::default() })?;
//! let mut context = Context::new(&model, &ContextParams { type_k: KvType::F16, n_slots: 1, ..ContextParams::default() })?;
//! context.set_tap_layers(&[0])?;
//!
//! for MemoryRow { weights, kv, compute, .. } in context.footprint()? {
//!     println!("{weights} + {kv} + {compute} bytes");
//! }
//!
//! let prompt = model.tokenize("Once upon a time", true, false)?;
//! let mut batch = Batch::new(prompt.len());
//! for (position, &token) in (0..).zip(&prompt) {
//!     batch.push(token, position, 0, position as usize + 1 == prompt.len())?;
//! }
//! let ran: Result<(), DecodeError> = context.decode_tapped(&batch, &mut |rows: TapRows<'_>| {
//!     println!("layer {}: {} tokens", rows.layer, rows.tokens().len());
//! });
//! if let Err(DecodeError { failure: DecodeFailure::NoSlot, .. }) = &ran {
//!     return Err("the context is full".into());
//! }
//! ran?;
//! let mut sampler = Sampler::new(&model, &SamplingParams::default(), &prompt)?;
//! let token = sampler.sample(context.logits(prompt.len() - 1))?;
//! println!("{}", model.text(&[token])?);
//! # let _: Option<LlamaError> = None;
//! # Ok(())
//! # }
//! ```

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
mod libraries;
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
mod spread;
mod tap;
#[cfg(test)]
mod testing;
mod vocab;

pub use backend::{Backend, rpc_endpoint};
pub use batch::Batch;
pub use context::Context;
pub use device::{Device, DeviceInfo, DeviceKind, failure_of, is_named};
pub use error::{DecodeError, DecodeFailure, LlamaError};
pub use facts::{ExpertBytes, ModelFacts};
pub use gguf::{INFLATED_OF, fingerprint};
pub use libraries::UnusableLibrary;
pub use memory::MemoryRow;
pub use model::{CpuMoe, Model, ModelParams};
pub use params::{ContextParams, KvType};
pub use pool::{pin_thread, prefer_memory_of};
pub use sampler::Sampler;
pub use spread::MAX_DEVICES;
pub use tap::TapRows;
