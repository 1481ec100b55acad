//! One worker's state machine (`plan -> run -> apply`) and the dispatcher that feeds the workers.
//!
//! Never reads a clock, starts a thread or calls llama.cpp: time and results are passed in.

mod compact;
mod decode;
mod dispatch;
mod event;
mod fake;
mod job;
mod picks;
mod prefill;
mod runner;
mod waiting;

pub use decode::{DecodeStep, DecodeWorker};
pub use dispatch::{Command, DispatchLimits, DispatchStats, Dispatcher, Outcome, QueueFull, Source};
pub use event::WorkerEvent;
pub use fake::{FakeModel, FakeRunner, Fault};
pub use job::{Handoff, Job};
pub use picks::StepPicks;
pub use prefill::PrefillWorker;
pub use runner::{DecodeItem, ModelRunner, RunError, RunnerInfo, SeqState, StateFingerprint};
