//! Serve mixture-of-experts GGUF models faster: several llama.cpp workers, each request sent to the one whose batch
//! already uses the same experts.

pub mod calibrate;
pub mod engine;
#[cfg(feature = "llama")]
pub mod llama;
pub mod rng;
pub mod route;
pub mod schedule;
pub mod signature;
pub mod types;
