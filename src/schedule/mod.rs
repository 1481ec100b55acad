//! One worker's state machine (`plan -> run -> apply`) and the dispatcher that feeds the workers.
//!
//! Never reads a clock, starts a thread or calls llama.cpp: time and results are passed in.
//!
//! ```
//! use std::{sync::Arc, time::Duration};
//!
//! use eldr::{
//!     route::LeastLoaded,
//!     schedule::{
//!         Command, DecodeStep, DecodeWorker, DispatchLimits, DispatchStats, Dispatcher, FakeModel, FakeRunner, Fault, Handoff, Job,
//!         ModelRunner, Outcome, PrefillWorker, Priority, QueueFull, RunnerInfo, Source, WorkerEvent,
//!     },
//!     types::{Request, RequestId, SamplingParams, WorkerId},
//! };
//!
//! # fn main() -> Result<(), QueueFull> {
//! // A prefill and a decode worker of a toy model; the first decode step fails, and is run again.
//! let model = FakeModel { n_vocab: 50, n_layer: 2, n_expert: 8, n_expert_used: 2 };
//! let mut prefill_runner = FakeRunner::new(model, 4, 256, Vec::new());
//! let mut decode_runner = FakeRunner::new(model, 4, 256, vec![Fault::DecodeRestored(0)]);
//! let info: RunnerInfo = decode_runner.info().clone();
//! let mut prefill = PrefillWorker::new(prefill_runner.info(), 16, 4, &[], model.n_expert);
//! let mut decode = DecodeWorker::new(&info, 16, &[]);
//! let mut dispatcher = Dispatcher::new(1, &[info.n_slots], Box::new(LeastLoaded), None, DispatchLimits::default());
//!
//! // Submit; then carry out what the dispatcher commands and tell it what happened, until the request has ended.
//! let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::default() };
//! let request = Arc::new(Request { prompt: vec![1, 2, 3], max_tokens: 5, sampling, domain: None, deadline: None });
//! let (mut commands, mut events) = (Vec::new(), Vec::new());
//! dispatcher.submit_as(Priority::High, RequestId(0), Arc::clone(&request), Duration::ZERO, &mut commands)?;
//! let mut tokens = Vec::new();
//! let outcome: Outcome = 'run: loop {
//!     for command in std::mem::take(&mut commands) {
//!         match command {
//!             Command::Prefill(_, job) => prefill.admit(job),
//!             Command::Decode(worker, handoff, decision) => {
//!                 let Handoff { job: Job { id, .. }, .. } = &handoff;
//!                 assert_eq!((*id, worker, decision.worker), (RequestId(0), WorkerId(0), WorkerId(0)));
//!                 decode.admit(handoff);
//!             }
//!             Command::Cancel(..) | Command::Keep(..) | Command::Migrate(..) => unreachable!("it is left alone"),
//!             Command::End(_, outcome) => break 'run outcome,
//!         }
//!     }
//!     let source = if prefill.is_idle() { Source::Decode(WorkerId(0)) } else { Source::Prefill(WorkerId(0)) };
//!     match source {
//!         Source::Prefill(_) => {
//!             prefill.step(&mut prefill_runner, &mut events);
//!         }
//!         Source::Decode(_) => {
//!             let step: &DecodeStep = decode.step(&mut decode_runner, &mut events);
//!             assert!(step.requests.len() <= 1);
//!         }
//!     }
//!     for event in events.drain(..) {
//!         if let WorkerEvent::Token { token, .. } = &event {
//!             tokens.push(*token);
//!         }
//!         dispatcher.on_event(source, event, &mut commands);
//!     }
//! };
//! assert!(matches!(outcome, Outcome::Finished(..)));
//! assert_eq!(tokens, model.complete(&request.prompt, &request.sampling, 5));
//! assert_eq!(dispatcher.stats(), DispatchStats::default(), "nothing was given back");
//! # Ok(())
//! # }
//! ```

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
