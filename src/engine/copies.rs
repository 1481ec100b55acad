use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;

use crate::{
    engine::{
        EngineConfig, EngineError, FlashAttention, KvFormat, LlamaRunner, Permits, Placed, TapUse, WorkerSpec,
        sharing::{Sharing, host_experts, is_host, uses_host},
    },
    llama::{
        Backend, ContextParams, CpuMoe, Device, DeviceKind, KvType, LlamaError, Model, ModelParams, failure_of,
        pin_thread, prefer_memory_of,
    },
    schedule::{ModelRunner, Recovery},
    types::CpuSet,
};

/// Tokens a decode context computes at once beyond its batch: what a lost hand-off is prefilled again in.
const REFILL_UBATCH: u32 = 128;

/// The model on one device or divided over several, its experts in one place.
#[derive(Clone)]
pub(super) struct ModelCopy {
    params: ModelParams,
    pub model: Model,
    /// The turns its workers take.
    turns: Option<Arc<Permits>>,
}

/// A worker that is ready to run.
pub(super) struct ReadyWorker {
    pub name: String,
    pub runner: LlamaRunner,
    pub permits: Option<Arc<Permits>>,
}

/// The copies of a model that the workers of a configuration share: one for each list of devices, shares of the layers and
/// place of its experts.
pub(super) struct Copies {
    path: PathBuf,
    loaded: Mutex<Vec<ModelCopy>>,
    pub sharing: Sharing,
}

impl Copies {
    /// Loads the file once for each list of devices and setting that `config` names.
    pub fn load(path: &Path, config: &EngineConfig, sharing: Sharing) -> Result<Self, EngineError> {
        let copies = Self { path: path.to_owned(), loaded: Mutex::default(), sharing };
        for spec in config.prefill.0.iter().chain(&config.decode.0) {
            copies.copy(&copies.sharing.known.devices(spec, config)?, spec, config, true)?;
        }
        Ok(copies)
    }

    /// The first copy, which knows the vocabulary and the shape as every other does.
    pub fn first(&self) -> ModelCopy {
        self.loaded.lock()[0].clone()
    }

    /// What knows the vocabulary and the shape for as long as the process lives: the first copy, or a header alone where
    /// that copy would keep the memory of devices that are well when a server beside them has failed.
    pub fn lasting(&self) -> Result<Model, LlamaError> {
        let first = self.first().model;
        if first.devices().len() == 1 || first.devices().iter().all(|device| device.endpoint().is_none()) {
            return Ok(first);
        }
        let backend = Backend::init();
        let params = ModelParams { device: Some(backend.device("cpu")?), no_alloc: true, ..ModelParams::default() };
        Model::load(&backend, &self.path, &params)
    }

    /// The copy for a worker, loaded if it may be.
    fn copy(
        &self,
        devices: &[Device],
        spec: &WorkerSpec,
        config: &EngineConfig,
        may_load: bool,
    ) -> Result<ModelCopy, EngineError> {
        let params = model_params(config, spec, devices);
        let mut copies = self.loaded.lock();
        if let Some(copy) = copies.iter().find(|copy| copy.params == params && copy.model.failure().is_none()) {
            return Ok(copy.clone());
        }
        if !may_load {
            return Err(EngineError::Config(format!("the model was not loaded on {}", place(devices))));
        }
        // What has failed is of no use to anybody new, and the devices beside it need the room.
        copies.retain(|copy| copy.model.failure().is_none());
        let model = Model::load(&Backend::init(), &self.path, &params)?;
        let turns = self.sharing.turns(devices, spec, config);
        let copy = ModelCopy { params, model, turns };
        copies.push(copy.clone());
        Ok(copy)
    }

    /// A worker as placed. It can be made again after its device failed and came back.
    pub fn worker(
        self: &Arc<Self>,
        kind: &'static str,
        index: usize,
        placed: Placed<'_>,
        config: &EngineConfig,
        tap: &TapUse,
    ) -> Result<ReadyWorker, EngineError> {
        let devices = self.sharing.known.devices(placed.spec, config)?;
        let seat = Seat {
            kind,
            index,
            spec: placed.spec.clone(),
            cpus: placed.cpus(),
            config: config.clone(),
            tap: tap.clone(),
        };
        self.seated(seat, devices, false)
    }

    fn seated(self: &Arc<Self>, seat: Seat, devices: Vec<Device>, may_load: bool) -> Result<ReadyWorker, EngineError> {
        let Seat { kind, index, spec, cpus, config, tap } = &seat;
        let copy = self.copy(&devices, spec, config, may_load)?;
        let mut params = context_params(kind, spec, cpus.as_ref(), config, &copy.model, &self.sharing)?;
        params.name = format!("{kind} {index} on {}", place(&devices));
        let exact = is_exact(config, &params, &self.sharing);
        let node = cpus.as_ref().and_then(|cpus| self.sharing.topology.node_of(cpus));
        let mut runner = at(cpus.as_ref(), node.filter(|_| self.sharing.topology.nodes.len() > 1), || {
            LlamaRunner::new(&copy.model, &params, tap, exact)
        })?;
        let permits = if cpus.is_some() { None } else { copy.turns };
        if devices.iter().any(|device| device.endpoint().is_some()) {
            runner.set_recovery(Arc::new(Revival { copies: Arc::clone(self), seat, devices }));
        }
        Ok(ReadyWorker { name: params.name, runner, permits })
    }
}

/// What a worker is, so that it can be made again.
#[derive(Clone)]
struct Seat {
    kind: &'static str,
    index: usize,
    spec: WorkerSpec,
    cpus: Option<CpuSet>,
    config: EngineConfig,
    tap: TapUse,
}

/// The longest a server that failed may take to say that it is back.
const QUICK: Duration = Duration::from_secs(2);

/// The way back of a worker that has a remote device.
struct Revival {
    copies: Arc<Copies>,
    seat: Seat,
    devices: Vec<Device>,
}

impl Recovery for Revival {
    fn failure(&self) -> Option<String> {
        failure_of(&self.devices)
    }

    fn revive(&self) -> Result<Box<dyn ModelRunner>, String> {
        let again = || {
            let deadline = self.seat.config.rpc_deadline;
            let backend = Backend::init();
            let again = self.devices.iter().map(|device| backend.renewed(device, deadline.min(QUICK)));
            let devices = again.collect::<Result<Vec<_>, _>>()?;
            for device in &devices {
                device.set_deadline(deadline);
            }
            self.copies.seated(self.seat.clone(), devices, true)
        };
        again().map(|worker| Box::new(worker.runner) as Box<dyn ModelRunner>).map_err(|error| error.to_string())
    }
}

/// Runs `body` on these processors, its memory on that node where the kernel allows it.
fn at<T: Send>(cpus: Option<&CpuSet>, node: Option<u32>, body: impl FnOnce() -> T + Send) -> T {
    let Some(cpus) = cpus else { return body() };
    std::thread::scope(|scope| {
        let there = scope.spawn(|| {
            let bound = pin_thread(cpus).and_then(|()| node.map_or(Ok(()), prefer_memory_of));
            if let Err(error) = bound {
                log::warn!("{error}; the worker's memory may be far from its processors");
            }
            body()
        });
        there.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// What devices are called in the names of their workers.
fn place(devices: &[Device]) -> String {
    let name = |device: &Device| match device.endpoint() {
        Some(endpoint) => format!("rpc:{endpoint}"),
        None => device.name().to_owned(),
    };
    devices.iter().map(name).collect::<Vec<_>>().join("+")
}

/// How a worker's context is made, its name left out.
pub(super) fn context_params(
    kind: &str,
    spec: &WorkerSpec,
    cpus: Option<&CpuSet>,
    config: &EngineConfig,
    model: &Model,
    sharing: &Sharing,
) -> Result<ContextParams, EngineError> {
    let devices = model.devices();
    let host = uses_host(devices, spec, config);
    let is_remote = devices.iter().any(|device| device.kind() == DeviceKind::Rpc);
    let n_threads = match (spec.n_threads, cpus) {
        (Some(n), _) => n,
        (None, Some(cpus)) => cpus.len() as u32,
        (None, None) if host && !is_remote => sharing.threads.n_threads,
        // A device computes; the thread that calls it has little to do.
        (None, None) => 1,
    };
    if is_remote && n_threads > 1 {
        return Err(EngineError::Config(format!(
            "'{spec}' asks for threads of this machine for a device of another: start its server with as many"
        )));
    }
    let flash_attn = match config.flash_attention {
        FlashAttention::Auto => sharing.on_device,
        FlashAttention::On => true,
        FlashAttention::Off => false,
    };
    let n_ctx_slot = config.n_ctx_slot.min(model.facts().n_ctx_train);
    let chunk = config.chunk.min(n_ctx_slot);
    let n_batch = chunk.max(config.n_slots);
    let n_ubatch = if kind == "prefill" { chunk } else { REFILL_UBATCH.max(config.n_slots) };
    let shared_cpus = || if host { sharing.shared_cpus.clone() } else { CpuSet::default() };
    Ok(ContextParams {
        n_ctx_slot,
        n_slots: config.n_slots,
        n_batch,
        n_ubatch: spec.n_batch.unwrap_or(n_ubatch).min(n_batch),
        n_threads,
        cpus: cpus.cloned().unwrap_or_else(shared_cpus),
        flash_attn,
        swa_full: config.swa_full,
        type_k: kv_type(config.kv_format),
        type_v: kv_type(config.kv_format),
        op_offload: spec.op_offload.unwrap_or(true),
        ..ContextParams::default()
    })
}

/// Whether a worker can be exact where that is asked for: several threads of flash attention divide the keys among them,
/// which changes the sums.
pub(super) fn is_exact(config: &EngineConfig, params: &ContextParams, sharing: &Sharing) -> bool {
    config.exact && (!params.flash_attn || (!sharing.on_device && params.n_threads == 1))
}

pub(super) fn kv_type(format: KvFormat) -> KvType {
    match format {
        KvFormat::F16 => KvType::F16,
        KvFormat::Q8_0 => KvType::Q8_0,
        KvFormat::F32 => KvType::F32,
    }
}

pub(super) fn model_params(config: &EngineConfig, spec: &WorkerSpec, devices: &[Device]) -> ModelParams {
    let is_cpu = is_host(devices);
    ModelParams {
        device: devices.first().cloned(),
        beside: devices.iter().skip(1).cloned().collect(),
        shares: spec.split.clone(),
        // They change nothing on the CPU, whose workers share one copy.
        n_gpu_layers: spec.n_gpu_layers.or(config.n_gpu_layers).filter(|_| !is_cpu),
        cpu_moe: if is_cpu { CpuMoe::None } else { host_experts(config, spec) },
        use_mmap: config.use_mmap,
        extra_bufts: config.extra_bufts,
        no_alloc: false,
    }
}
