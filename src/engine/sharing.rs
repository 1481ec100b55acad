use std::time::Duration;

use crate::{
    engine::{EngineConfig, EngineError, HostExperts, ThreadPlan, Topology, WorkerSpec},
    llama::{Backend, CpuMoe, Device, DeviceKind, LlamaError, rpc_endpoint},
    types::CpuSet,
};

/// How a configuration's workers share the host's processors.
#[derive(Debug, Clone)]
pub(super) struct Sharing {
    /// Of workers that compute on the host and are not pinned.
    pub threads: ThreadPlan,
    pub topology: Topology,
    /// Processors of the workers that are not pinned, where others are; empty where all may go anywhere.
    pub shared_cpus: CpuSet,
    /// Whether any worker has a device of its own.
    pub on_device: bool,
    pub best: Device,
    /// Threads of pinned workers.
    n_pinned: u32,
    /// Workers that take turns.
    n_turns: usize,
}

/// Threads that compute on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct ThreadUse {
    /// Of pinned workers, all together: each has its own processors.
    pub n_pinned: u32,
    /// Workers that are not pinned.
    pub n_sharing: usize,
    /// Threads of each of those.
    pub n_threads: u32,
    /// Of those, how many compute at once.
    pub n_at_once: usize,
    /// Processors this process may use.
    pub n_cores: usize,
}

impl ThreadUse {
    /// Most threads that compute at once: never more than the processors.
    pub fn most(&self) -> usize {
        self.n_pinned as usize + self.n_at_once.min(self.n_sharing) * self.n_threads as usize
    }
}

impl Sharing {
    /// Errors: a device there is not, processors this process may not use, more threads than cores.
    pub fn of(config: &EngineConfig) -> Result<Self, EngineError> {
        let best = Backend::init().best_device()?;
        let topology = Topology::detect();
        let mut pinned = CpuSet::default();
        let (mut n_pinned, mut n_sharing, mut on_device, mut widest) = (0, 0, false, config.n_threads);
        for spec in config.prefill.0.iter().chain(&config.decode.0) {
            let device = device(&best, spec, config)?;
            on_device |= device.kind() != DeviceKind::Cpu;
            if let Some(cpus) = &spec.cpus {
                if let Some(problem) = topology.problem(cpus) {
                    return Err(EngineError::Config(format!("'{spec}': {problem}")));
                }
                pinned = CpuSet::new(pinned.cpus().iter().chain(cpus.cpus()).copied());
                n_pinned += spec.n_threads.map_or(cpus.len() as u32, |n| n * spec.n);
            } else if uses_host(&device, spec, config) {
                n_sharing += spec.n as usize;
                widest = widest.max(spec.n_threads.unwrap_or(0));
            }
        }
        let threads = ThreadPlan::beside(pinned.len() as u32, widest, n_sharing)?;
        let shared_cpus = if pinned.is_empty() { CpuSet::default() } else { topology.allowed.without(&pinned) };
        Ok(Self { threads, topology, shared_cpus, on_device, best, n_pinned, n_turns: n_sharing })
    }

    /// The threads of all workers together.
    pub fn thread_use(&self) -> ThreadUse {
        ThreadUse {
            n_pinned: self.n_pinned,
            n_sharing: self.n_turns,
            n_threads: self.threads.n_threads,
            n_at_once: self.threads.permits.n_at_once(),
            n_cores: self.topology.allowed.len(),
        }
    }
}

/// How many threads a configuration's workers compute with on this machine.
///
/// Errors: a device there is not, processors this process may not use, more threads than cores.
pub fn thread_use(config: &EngineConfig) -> Result<ThreadUse, EngineError> {
    Ok(Sharing::of(config)?.thread_use())
}

/// The device of an entry; a remote one keeps to the configured deadline.
pub(super) fn device(best: &Device, spec: &WorkerSpec, config: &EngineConfig) -> Result<Device, EngineError> {
    let Some(name) = spec.device.as_deref() else { return Ok(best.clone()) };
    let device = named(name, config.rpc_deadline)?;
    device.set_deadline(config.rpc_deadline);
    Ok(device)
}

/// The device with this name; an RPC server that it names is connected to first.
pub(super) fn named(name: &str, deadline: Duration) -> Result<Device, LlamaError> {
    let backend = Backend::init();
    if let Some(endpoint) = rpc_endpoint(name) {
        backend.add_rpc(endpoint, deadline)?;
    }
    backend.device(name)
}

/// Whether a worker computes with the host's processors: all of it, or the layers and experts that stay there.
pub(super) fn uses_host(device: &Device, spec: &WorkerSpec, config: &EngineConfig) -> bool {
    let layers = spec.n_gpu_layers.or(config.n_gpu_layers);
    device.kind() == DeviceKind::Cpu || layers.is_some() || host_experts(config, spec) != CpuMoe::None
}

/// Which experts of a worker stay in host memory.
pub(super) fn host_experts(config: &EngineConfig, spec: &WorkerSpec) -> CpuMoe {
    match (spec.experts, config.cpu_moe, config.n_cpu_moe) {
        (Some(HostExperts::All), ..) | (None, true, _) => CpuMoe::All,
        (Some(HostExperts::First(0)), ..) | (None, false, 0) => CpuMoe::None,
        (Some(HostExperts::First(n)), ..) | (None, false, n) => CpuMoe::First(n),
    }
}
