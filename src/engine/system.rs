use std::{path::Path, time::Duration};

use serde::Serialize;

use crate::{
    engine::EngineError,
    llama::{self, Backend, DeviceInfo, UnusableLibrary},
};

/// What this build of eldr stands on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Versions {
    /// This crate.
    pub eldr: &'static str,
    /// llama.cpp and ggml.
    pub llama_cpp: String,
    /// The instruction sets and features ggml was built with.
    pub system_info: String,
}

/// The ggml devices there are.
pub fn devices() -> Vec<DeviceInfo> {
    Backend::init().devices()
}

/// The device with this name, see [`is_device`]. The error says which there are, and which libraries give none.
pub fn device(name: &str) -> Result<DeviceInfo, EngineError> {
    Ok(Backend::init().device(name)?.info())
}

/// Libraries of ggml backends that are where this build looks for them and give no device, each with the reason.
pub fn unusable_libraries() -> Vec<UnusableLibrary> {
    Backend::init().unusable_libraries().to_vec()
}

/// Whether `name` means this device to the engine: its name in any case, with or without a colon, or its number.
pub fn is_device(device: &DeviceInfo, name: &str) -> bool {
    llama::is_named(device, name)
}

/// Makes the devices of an RPC server (`HOST:PORT`) known; gives their names. It may keep a byte waiting for `deadline`
/// at the longest.
pub fn add_rpc(endpoint: &str, deadline: Duration) -> Result<Vec<String>, EngineError> {
    Ok(Backend::init().add_rpc(endpoint, deadline)?.iter().map(|device| device.name().to_owned()).collect())
}

/// What this build of eldr stands on.
pub fn versions() -> Versions {
    let backend = Backend::init();
    Versions { eldr: env!("CARGO_PKG_VERSION"), llama_cpp: backend.version(), system_info: backend.system_info() }
}

/// What calibrations and traces name a model file by, see [`crate::engine::ModelFacts::fingerprint`]; reads its header only.
pub fn model_fingerprint(path: &Path) -> Result<String, EngineError> {
    // ggml prints what it finds wrong in a file unless its log is taken first.
    Backend::init();
    Ok(llama::fingerprint(path)?)
}

/// Serves a device of this machine to others at `endpoint` (`HOST:PORT`) until the process ends; returns only with an
/// error. There is no authentication: bind to loopback or a trusted network.
pub fn serve_rpc(endpoint: &str, device: &str, n_threads: u32) -> Result<(), EngineError> {
    let backend = Backend::init();
    let device = backend.device(device)?;
    Ok(backend.serve_rpc(endpoint, &device, n_threads)?)
}
