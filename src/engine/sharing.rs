use std::{sync::Arc, time::Duration};

use crate::{
    engine::{EngineConfig, EngineError, HostExperts, Permits, ThreadPlan, Topology, WorkerSpec, split, turns::Turns},
    llama::{Backend, CpuMoe, Device, DeviceKind, LlamaError, MAX_DEVICES, rpc_endpoint},
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
    pub known: Known,
    /// Of workers on RPC servers.
    turns: Turns,
    /// Threads of pinned workers.
    n_pinned: u32,
    /// Workers that take turns.
    n_turns: usize,
}

/// The devices that entries without a name of their own stand for, looked up once: a server that fails later is still one.
#[derive(Debug, Clone)]
pub(super) struct Known {
    pub best: Device,
    pub all: Vec<Device>,
}

impl Known {
    /// Connects to the servers that `config` names, so that they are among all.
    fn of(config: &EngineConfig) -> Result<Self, EngineError> {
        let backend = Backend::init();
        let best = backend.best_device()?;
        for spec in config.prefill.0.iter().chain(&config.decode.0) {
            spec.device_names().try_for_each(|name| named(name, config.rpc_deadline).map(drop))?;
        }
        Ok(Self { best, all: backend.all_devices()? })
    }

    /// The devices of an entry, in the order of its layers; remote ones keep to the configured deadline.
    pub fn devices(&self, spec: &WorkerSpec, config: &EngineConfig) -> Result<Vec<Device>, EngineError> {
        // One whose server failed and came back is another since.
        let now = |device: &Device| match device.failure() {
            Some(_) => Backend::init().renewed(device, config.rpc_deadline),
            None => Ok(device.clone()),
        };
        let devices: Result<Vec<Device>, LlamaError> = match spec.device.as_deref() {
            None if !config.split => now(&self.best).map(|best| vec![best]),
            None => self.all.iter().map(now).collect(),
            Some(device) if split::is_all(device) => self.all.iter().map(now).collect(),
            Some(_) => spec.device_names().map(|name| named(name, config.rpc_deadline)).collect(),
        };
        let devices = devices?;
        check(&devices, spec).map_err(|why| EngineError::Config(format!("'{spec}' {why}")))?;
        for device in &devices {
            device.set_deadline(config.rpc_deadline);
        }
        Ok(devices)
    }
}

/// What names did not show: two of one device, the host by its number, and how many all are.
fn check(devices: &[Device], spec: &WorkerSpec) -> Result<(), String> {
    let n = devices.len();
    if n > 1 && devices.iter().any(|device| device.kind() == DeviceKind::Cpu) {
        return Err(split::on_host());
    }
    if let Some(device) = split::twice(devices, Device::eq) {
        return Err(split::once(device.name()));
    }
    if n > MAX_DEVICES {
        return Err(format!("divides layers among {n} devices, and llama.cpp among at most {MAX_DEVICES}: name fewer"));
    }
    split::check_shares(n, &spec.split)
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
        let known = Known::of(config)?;
        let topology = Topology::detect();
        let mut pinned = CpuSet::default();
        let (mut n_pinned, mut n_sharing, mut on_device, mut widest) = (0, 0, false, config.n_threads);
        let mut used = Vec::new();
        for spec in config.prefill.0.iter().chain(&config.decode.0) {
            let devices = known.devices(spec, config)?;
            on_device |= !is_host(&devices);
            if let Some(cpus) = &spec.cpus {
                if let Some(problem) = topology.problem(cpus) {
                    return Err(EngineError::Config(format!("'{spec}': {problem}")));
                }
                pinned = CpuSet::new(pinned.cpus().iter().chain(cpus.cpus()).copied());
                n_pinned += spec.n_threads.map_or(cpus.len() as u32, |n| n * spec.n);
            } else if uses_host(&devices, spec, config) {
                n_sharing += spec.n as usize;
                widest = widest.max(spec.n_threads.unwrap_or(0));
            }
            used.push(devices);
        }
        let turns = Turns::new(used.iter().map(|devices| endpoints(devices)));
        let threads = ThreadPlan::beside(pinned.len() as u32, widest, n_sharing)?;
        let shared_cpus = if pinned.is_empty() { CpuSet::default() } else { topology.allowed.without(&pinned) };
        Ok(Self { threads, topology, shared_cpus, on_device, known, turns, n_pinned, n_turns: n_sharing })
    }

    /// The turns that a worker takes with others; none where nothing is shared.
    pub fn turns(&self, devices: &[Device], spec: &WorkerSpec, config: &EngineConfig) -> Option<Arc<Permits>> {
        let of_host = || uses_host(devices, spec, config).then(|| Arc::clone(&self.threads.permits));
        self.turns.of(&endpoints(devices)).or_else(of_host)
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

/// The device with this name; an RPC server that it names is connected to first.
pub(super) fn named(name: &str, deadline: Duration) -> Result<Device, LlamaError> {
    let backend = Backend::init();
    if let Some(endpoint) = rpc_endpoint(name) {
        backend.add_rpc(endpoint, deadline)?;
    }
    backend.device(name)
}

fn endpoints(devices: &[Device]) -> Vec<&str> {
    devices.iter().filter_map(Device::endpoint).collect()
}

/// Whether a worker is on the host alone.
pub(super) fn is_host(devices: &[Device]) -> bool {
    devices.iter().all(|device| device.kind() == DeviceKind::Cpu)
}

/// Whether a worker computes with the host's processors: all of it, or the layers and experts that stay there.
pub(super) fn uses_host(devices: &[Device], spec: &WorkerSpec, config: &EngineConfig) -> bool {
    let layers = spec.n_gpu_layers.or(config.n_gpu_layers);
    is_host(devices) || layers.is_some() || host_experts(config, spec) != CpuMoe::None
}

/// Which experts of a worker stay in host memory.
pub(super) fn host_experts(config: &EngineConfig, spec: &WorkerSpec) -> CpuMoe {
    match (spec.experts, config.cpu_moe, config.n_cpu_moe) {
        (Some(HostExperts::All), ..) | (None, true, _) => CpuMoe::All,
        (Some(HostExperts::First(0)), ..) | (None, false, 0) => CpuMoe::None,
        (Some(HostExperts::First(n)), ..) | (None, false, n) => CpuMoe::First(n),
    }
}
