//! The running system: one thread a worker, the dispatcher they share, and a stream for every request.
//!
//! Never speaks HTTP, parses arguments or calls the sys crate; llama.cpp is behind [`crate::schedule::ModelRunner`].

mod calibration_file;
mod error;
mod handle;
mod permits;
mod shared;
mod stream;
mod tokenizer;
mod worker;

pub use calibration_file::{CalibrationFileError, read_calibration, write_calibration};
pub use error::EngineError;
pub use handle::{Engine, EngineParts, EngineWorker};
pub use permits::{Permit, Permits};
pub use shared::EngineStats;
use shared::Shared;
pub use stream::{Completion, StreamEvent, TokenStream};
pub use tokenizer::Tokenizer;
