//! The running system: one thread a worker, the dispatcher they share, and a stream for every request.
//!
//! Never speaks HTTP, parses arguments or calls the sys crate; llama.cpp is behind [`crate::schedule::ModelRunner`].

mod config;
mod error;
mod handle;
#[cfg(feature = "llama")]
pub mod inflate;
mod permits;
mod shared;
mod stream;
mod tokenizer;
mod worker;

pub use config::{EngineConfig, FlashAttention, KvFormat, WorkerList, WorkerSpec};
pub use error::EngineError;
pub use handle::{Engine, EngineParts, EngineWorker};
pub use permits::{Permit, Permits};
pub use shared::EngineStats;
use shared::Shared;
pub use stream::{Completion, StreamEvent, TokenStream};
pub use tokenizer::Tokenizer;
