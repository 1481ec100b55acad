//! Serve mixture-of-experts GGUF models faster: several llama.cpp workers, each request sent to the one whose batch
//! already uses the same experts.

#[cfg(feature = "cli")]
pub mod bench;
pub mod calibrate;
pub mod engine;
#[cfg(feature = "llama")]
pub mod llama;
pub mod metrics;
pub mod rng;
pub mod route;
pub mod schedule;
pub mod signature;
pub mod types;
