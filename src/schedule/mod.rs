//! One worker's state machine (`plan -> run -> apply`) and the dispatcher that feeds the workers.
//!
//! Never reads a clock, starts a thread or calls llama.cpp: time and results are passed in.

mod runner;

pub use runner::{DecodeItem, ModelRunner, RunError, RunnerInfo, SeqState, StateFingerprint};
