//! The running system: one thread a worker, the dispatcher they share, and a stream for every request.
//!
//! Never speaks HTTP, parses arguments or calls the sys crate; llama.cpp is behind [`crate::schedule::ModelRunner`].
//!
//! ```no_run
//! # #[cfg(feature = "llama")]
//! use eldr::{
//!     EngineConfig, EngineError,
//!     engine::{
//!         DeviceInfo, DeviceKind, ExpertBytes, InflateError, InflateReport, InflateTarget, LlamaError, LlamaRunner, LoadedModel,
//!         ModelFacts, Plan, PlannedDevice, TapUse, ThreadUse, UnusableLibrary, Versions, devices, inflate, unusable_libraries,
//!         versions,
//!     },
//! };
//!
//! # #[cfg(feature = "llama")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // With llama.cpp: what there is to run on,
//! let Versions { llama_cpp, .. } = versions();
//! let gpus: Vec<DeviceInfo> = devices().into_iter().filter(|device| device.kind == DeviceKind::Gpu).collect();
//! println!("llama.cpp {llama_cpp}, {} GPUs", gpus.len());
//! for UnusableLibrary { path, reason } in unusable_libraries() {
//!     println!("{} is of no use: {reason}", path.display());
//! }
//!
//! // what it would take, before anything is loaded,
//! let config = EngineConfig::default();
//! let Plan { devices, threads, .. } = Plan::new("model.gguf".as_ref(), &config)?;
//! let crowded: Vec<&PlannedDevice> = devices.iter().filter(|device| !device.fits()).collect();
//! println!("{} devices are too small; {} threads at once", crowded.len(), ThreadUse::most(&threads));
//!
//! // a model looked at before it is served,
//! let model = match LoadedModel::load("model.gguf".as_ref(), &config) {
//!     Err(EngineError::Llama(LlamaError::NotFound { .. })) => return Err("there is no model.gguf".into()),
//!     loaded => loaded?,
//! };
//! let ModelFacts { arch, experts, .. } = model.facts();
//! if let Some(ExpertBytes { .. }) = experts {
//!     println!("{arch}: a mixture of experts");
//! }
//! let engine = model.engine(&config)?;
//! # drop(engine);
//!
//! // or run by hand,
//! let tap = TapUse::Prefill(model.usable_layers());
//! # fn by_hand(model: &eldr::llama::Model, params: &eldr::llama::ContextParams, tap: &TapUse) -> Result<LlamaRunner, LlamaError> {
//! #     LlamaRunner::new(model, params, tap, true)
//! # }
//! # let _ = (tap, by_hand);
//!
//! // or made larger to see what its weights cost.
//! let grown: Result<InflateReport, InflateError> =
//!     inflate("model.gguf".as_ref(), "large.gguf".as_ref(), InflateTarget::Factor(4.0), false, |_, _| {});
//! println!("{} tensors grew", grown?.n_grown);
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "llama"))]
//! # fn main() {}
//! ```

mod builder;
mod calibration_file;
mod config;
#[cfg(feature = "llama")]
mod copies;
mod disk_file;
mod disk_tier;
mod error;
mod handle;
#[cfg(feature = "llama")]
mod host_memory;
#[cfg(feature = "llama")]
mod inflate;
#[cfg(feature = "llama")]
mod llama_runner;
#[cfg(feature = "llama")]
mod model;
#[cfg(feature = "llama")]
mod model_tokenizer;
mod parts;
mod permits;
mod placement;
#[cfg(feature = "llama")]
mod plan;
#[cfg(feature = "llama")]
mod plan_pins;
mod prefix_budget;
#[cfg(any(feature = "llama", test))]
mod prefix_notes;
mod prefix_tiers;
mod ram_tier;
#[cfg(feature = "llama")]
mod record;
mod recorder;
mod refit;
mod replace;
mod request_check;
mod residents;
mod restore_rates;
mod rpc_front;
mod shared;
#[cfg(feature = "llama")]
mod sharing;
mod stats;
mod stop;
mod stream;
#[cfg(feature = "llama")]
mod system;
mod threads;
mod timed;
mod tokenizer;
mod topology;
mod trace_file;
mod trace_writer;
mod watchdog;
#[cfg(feature = "llama")]
mod weights;
mod worker;

pub use builder::{ConfigProblems, EngineBuilder};
pub use calibration_file::{CalibrationFileError, read_calibration, write_calibration};
pub use config::{EngineConfig, FlashAttention, KvFormat};
pub use disk_tier::{DiskStats, DiskTier};
pub use error::EngineError;
pub use handle::{Engine, N_PREFILL_PARALLEL};
#[cfg(feature = "llama")]
pub use inflate::{InflateError, InflateReport, InflateTarget, inflate, inflate_partial};
#[cfg(feature = "llama")]
pub use llama_runner::{LlamaRunner, TapUse};
#[cfg(feature = "llama")]
pub use model::LoadedModel;
#[cfg(feature = "llama")]
use model_tokenizer::ModelTokenizer;
pub use parts::{EngineExtras, EngineParts, EngineWorker};
pub use permits::{Permit, Permits};
pub use placement::{HostExperts, Placed, WorkerList, WorkerSpec};
#[cfg(feature = "llama")]
pub use plan::{Plan, PlannedDevice};
pub use prefix_budget::PrefixBudget;
pub use prefix_tiers::PrefixTiers;
pub use ram_tier::RamTier;
#[cfg(feature = "llama")]
pub use record::{DEFAULT_BLOCK, record, record_trace};
pub use recorder::{PromptRows, RecordPrompt, RecordSummary, Recorder, TapRunner};
pub use replace::{OutputError, check_folder, check_output, replace_file, replace_files};
pub use residents::{PolicyBuilder, Resident};
pub use restore_rates::RestoreRates;
pub use rpc_front::RpcFront;
use shared::Shared;
#[cfg(feature = "llama")]
pub use sharing::{ThreadUse, thread_use};
pub use stats::{EngineStats, GivenBack};
pub use stop::{Released, StopFilter};
pub use stream::{Canceller, Completion, StreamEvent, TokenStream};
#[cfg(feature = "llama")]
pub use system::{Versions, add_rpc, devices, is_device, model_fingerprint, serve_rpc, unusable_libraries, versions};
pub use threads::{ThreadPlan, threads_alone};
pub use timed::Times;
pub use tokenizer::Tokenizer;
pub use topology::{Layout, NumaNode, Topology};
pub use trace_file::{TraceFileError, read_trace, read_trace_settings, write_trace};
pub use trace_writer::{TraceWriter, check_trace_output};

#[cfg(feature = "llama")]
pub use crate::llama::{DeviceInfo, DeviceKind, ExpertBytes, LlamaError, ModelFacts, UnusableLibrary, rpc_endpoint};
