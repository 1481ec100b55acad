//! A whole pool simulated: the engine's dispatcher, prefill and decode workers over recorded picks and a device's costs,
//! for any policy and number of workers, with failures, stragglers, bursts and mixes that drift.
//!
//! Never runs a model or reads a clock or a file; the same trace, scenario and seed give the same bytes.

mod cost;
mod drawing;
mod drive;
mod meter;
mod mix;
mod presets;
mod prompts;
mod report;
mod runner;
mod scenario;
mod simulate;
mod traffic;
mod world;

pub use cost::{DecodeCost, DeviceCost, HandoffCost, PrefillCost};
pub use presets::{PRESETS, Preset, PresetModel};
pub use report::ClusterReport;
pub use scenario::{Burst, DecodeGroup, Drift, Event, Happens, PrefixSharing, Scenario, Swing};
pub use simulate::{Pool, simulate};
