//! Runs a workload under each policy and reports what was measured.
//!
//! Never decides where a request goes, and never rounds in a policy's favour.

pub mod chart;
mod machine;
mod report;
pub mod table;
pub mod workload;

pub use machine::Machine;
pub use report::{BenchReport, CalibrationInfo, Change, Clock, ModelInfo, REPORT_VERSION, tokens_sha256};
