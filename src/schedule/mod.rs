//! One worker's state machine (`plan -> run -> apply`) and the dispatcher that feeds the workers.
//!
//! Never reads a clock, starts a thread or calls llama.cpp: time and results are passed in.

mod compact;
mod decode;
mod dispatch;
mod event;
mod fake;
mod job;
mod layer;
mod limits;
mod picks;
mod prefill;
mod prefix_cache;
mod prefix_config;
mod prefix_map;
mod prefix_store;
mod prompt_queue;
mod runner;
mod waiting;

pub use decode::{Answers, DecodeStep, DecodeWorker};
pub use dispatch::{Command, Dispatcher, MemberError, Outcome, Source, SubmitParams};
pub use event::{CacheChange, WorkerEvent};
pub use fake::{FakeModel, FakeRunner, Fault};
pub use job::{Handoff, Job, Leftover};
pub use layer::RunnerLayer;
pub use limits::{DispatchLimits, DispatchStats, QueueFull};
pub use picks::StepPicks;
pub use prefill::PrefillWorker;
pub use prefix_cache::PrefixCache;
pub use prefix_config::{CacheStats, CacheUse, PrefixConfig};
pub use prefix_store::{PrefixStore, StoredMatch, StoredPrefix, covers, has_layers, n_usable};
pub use prompt_queue::Priority;
pub use runner::{DecodeItem, ModelRunner, Recovery, Reuse, RunError, RunnerInfo, SeqState, StateFingerprint};
