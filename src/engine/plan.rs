use std::path::Path;

use serde::Serialize;

use crate::{
    engine::{
        EngineConfig, EngineError, ThreadUse,
        copies::{context_params, is_exact, kv_type, model_params},
        host_memory::HostMemory,
        plan_pins::{PinRoom, pinned},
        sharing::Sharing,
    },
    kv::row_bytes_per_token,
    llama::{Backend, Context, Device, Model, ModelParams},
    schedule::PrefixConfig,
    types::MoeShape,
};

/// What a configuration takes on each device, before anything is loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// The host first, then the others as they are named.
    pub devices: Vec<PlannedDevice>,
    /// Threads that compute on the host.
    pub threads: ThreadUse,
    /// Pinned prefixes that are kept: each takes a slot of every prefill worker.
    pub n_pinned: u32,
    /// Why others are not, in a sentence each.
    pub unpinned: Vec<String>,
}

/// What is taken on one device, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlannedDevice {
    /// ggml's name; `host` is the machine's memory.
    pub name: String,
    /// Workers that compute there.
    pub n_workers: usize,
    /// Weights, shared by its workers; of a divided model those of its layers there.
    pub weights: u64,
    /// The weights are pages of the file, which the system can give up and read again.
    pub mapped: bool,
    /// Keys and values.
    pub kv: u64,
    /// Intermediate results.
    pub compute: u64,
    /// Expert counts of the tokens that are kept, and prefixes kept in host memory.
    pub rows: u64,
    /// What is free now.
    pub free: u64,
}

const HOST: &str = "host";

impl PlannedDevice {
    /// Bytes of it all.
    pub fn need(&self) -> u64 {
        self.weights + self.kv + self.compute + self.rows
    }

    /// Whether it can run; mapped weights need not fit, but are slow then.
    pub fn fits(&self) -> bool {
        self.need() - if self.mapped { self.weights } else { 0 } <= self.free
    }

    fn sentence(&self) -> String {
        let mapped = if self.mapped { " besides" } else { "" };
        format!(
            "the workers need {} on {} ({} of weights{mapped}, {} of keys and values, {} of buffers, {} of expert counts \
             and prefixes) and {} are free",
            mib(self.need() - if self.mapped { self.weights } else { 0 }),
            self.name,
            mib(self.weights),
            mib(self.kv),
            mib(self.compute),
            mib(self.rows),
            mib(self.free)
        )
    }
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

/// Models whose headers have been read, by how they would be loaded.
type Read = Vec<(ModelParams, Model)>;

impl Plan {
    /// Reads the header of the model at `path` and foresees what the workers of `config` take; devices are asked what is
    /// free. Errors: a file that is no model, a device there is not, a context that cannot work.
    pub fn new(path: &Path, config: &EngineConfig) -> Result<Self, EngineError> {
        let (sharing, mut read) = (Sharing::of(config)?, Read::new());
        let plan = Self::with(path, config, &sharing, &mut read)?;
        let Some((_, model)) = read.first() else { return Ok(plan) };
        let facts = model.facts();
        let room = PinRoom {
            n_slots: config.n_slots,
            n_ctx_slot: config.n_ctx_slot.min(facts.n_ctx_train),
            cuts: !facts.recurrent && !facts.hybrid,
        };
        let (n_pinned, unpinned) = pinned(config, model, room)?;
        Ok(Self { n_pinned, unpinned, ..plan })
    }

    fn with(path: &Path, config: &EngineConfig, sharing: &Sharing, read: &mut Read) -> Result<Self, EngineError> {
        let mut devices = vec![on_host()];
        let mut counted: Vec<ModelParams> = Vec::new();
        for (kind, list) in [("prefill", &config.prefill), ("decode", &config.decode)] {
            for spec in &list.0 {
                let used = sharing.known.devices(spec, config)?;
                let params = ModelParams { no_alloc: true, ..model_params(config, spec, &used) };
                let model = header(path, &params, read)?;
                for device in &used {
                    let at = place(&mut devices, device);
                    devices[at].n_workers += spec.n as usize;
                }
                let cpus = spec.cpus.as_ref().and_then(|cpus| cpus.split(spec.n as usize)?.pop());
                let mut context = context_params(kind, spec, cpus.as_ref(), config, &model, sharing)?;
                context.n_slots += u32::from(is_exact(config, &context, sharing));
                let is_new = !counted.contains(&params);
                for row in Context::new(&model, &context)?.footprint()? {
                    let at = devices.iter().position(|d| d.name == row.device.as_deref().unwrap_or(HOST));
                    // Another device of the same kind, which only the host's buffers stand for.
                    let planned = &mut devices[at.unwrap_or(0)];
                    planned.weights += if is_new { row.weights } else { 0 };
                    planned.kv += row.kv * u64::from(spec.n);
                    planned.compute += row.compute * u64::from(spec.n);
                }
                if kind == "prefill" {
                    devices[0].rows += rows(&model, config, context.n_ctx_slot) * u64::from(spec.n);
                }
                counted.push(params);
            }
        }
        devices[0].rows += config.cache_ram_mib << 20;
        devices[0].mapped = config.use_mmap;
        devices.retain(|device| device.need() > 0);
        Ok(Self { devices, threads: sharing.thread_use(), n_pinned: 0, unpinned: Vec::new() })
    }

    /// Whether a guess, four times over, says that the workers fit on the host, so that nothing has to be foreseen: not with
    /// devices of their own, nor with weights that are not mapped.
    pub(super) fn is_needless(model: &Model, config: &EngineConfig, sharing: &Sharing) -> bool {
        let Some(memory) = HostMemory::detect().filter(|_| config.use_mmap && !sharing.on_device) else { return false };
        let n_ctx_slot = config.n_ctx_slot.min(model.facts().n_ctx_train);
        let n_tokens = u64::from(n_ctx_slot) * (u64::from(config.n_slots) + 1);
        // Scores of attention over a slot take no more than what the slots keep, and the rest less than this a chunk.
        let compute = (u64::from(config.chunk).div_ceil(512)) << 28;
        let kv = model.kv_bytes_per_token(kv_type(config.kv_format), kv_type(config.kv_format)) * n_tokens;
        let n_workers = (config.prefill.n_workers() + config.decode.n_workers()) as u64;
        let kept = rows(model, config, n_ctx_slot) * config.prefill.n_workers() as u64 + (config.cache_ram_mib << 20);
        let guess = (kv + compute).saturating_mul(n_workers).saturating_add(kept + model.facts().size_bytes);
        guess.saturating_mul(4) <= memory.free
    }

    /// What does not fit, in a sentence each.
    pub fn problems(&self) -> Vec<String> {
        self.devices.iter().filter(|device| !device.fits()).map(PlannedDevice::sentence).collect()
    }

    /// What runs, but slowly.
    pub fn warnings(&self) -> Vec<String> {
        let pages = self.devices.iter().filter(|device| device.fits() && device.need() > device.free);
        pages
            .map(|device| {
                format!(
                    "{} of mapped weights and {} besides are more than the {} that are free on {}: weights will be read \
                     from the file again and again",
                    mib(device.weights),
                    mib(device.need() - device.weights),
                    mib(device.free),
                    device.name
                )
            })
            .collect()
    }

    /// Why a configuration does not fit, with the nearest that would; nothing if it does, or if the model can not be
    /// read, which loading it tells better.
    pub(super) fn refusal(path: &Path, config: &EngineConfig, sharing: &Sharing) -> Option<String> {
        let mut read = Read::new();
        let plan = Self::with(path, config, sharing, &mut read);
        let plan = plan.inspect_err(|error| log::debug!("no plan: {error}")).ok()?;
        plan.warnings().iter().for_each(|warning| log::warn!("{warning}"));
        let problems = plan.problems();
        if problems.is_empty() {
            return None;
        }
        Some(format!("{}: {}", problems.join("; "), nearest(path, config, sharing, &mut read)))
    }

    /// The nearest settings that would fit, as advice.
    pub fn advice(path: &Path, config: &EngineConfig) -> Result<String, EngineError> {
        Ok(nearest(path, config, &Sharing::of(config)?, &mut Read::new()))
    }
}

fn nearest(path: &Path, config: &EngineConfig, sharing: &Sharing, read: &mut Read) -> String {
    let mut fits =
        |config: &EngineConfig| Plan::with(path, config, sharing, read).is_ok_and(|plan| plan.problems().is_empty());
    let slots = largest(1, config.n_slots, |n_slots| fits(&EngineConfig { n_slots, ..config.clone() }));
    let trained = read_ctx(path, config, sharing);
    let n_ctx = config.n_ctx_slot.min(trained) / 256;
    let ctx = largest(1, n_ctx, |n| fits(&EngineConfig { n_ctx_slot: n * 256, ..config.clone() }));
    let mut ways: Vec<String> = slots.map(|n| format!("--slots {n}")).into_iter().collect();
    ways.extend(ctx.map(|n| format!("--ctx {}", n * 256)));
    ways.extend(divided(config, sharing).filter(|(_, config)| fits(config)).map(|(way, _)| way.to_owned()));
    if !ways.is_empty() {
        return format!("{} would fit", ways.join(" or "));
    }
    let small = EngineConfig { n_slots: 1, n_ctx_slot: 256, ..config.clone() };
    if fits(&EngineConfig { cpu_moe: true, ..small }) {
        "no --slots or --ctx alone would: keep experts in host memory with --cpu-moe and lower both".to_owned()
    } else {
        "no --slots or --ctx alone would: use fewer workers, a smaller model or another device".to_owned()
    }
}

/// The same workers with their layers divided otherwise: by free memory, or over all devices.
fn divided(config: &EngineConfig, sharing: &Sharing) -> impl Iterator<Item = (&'static str, EngineConfig)> {
    let mut by_memory = config.clone();
    let specs = by_memory.prefill.0.iter_mut().chain(&mut by_memory.decode.0);
    let n_shares: usize = specs.map(|spec| std::mem::take(&mut spec.split).len()).sum();
    let over_all = EngineConfig { split: true, ..config.clone() };
    let may_split = !config.split && sharing.known.all.len() > 1 && over_all.problems().is_empty();
    let by_memory = (n_shares > 0).then_some(("shares by free memory, without split=,", by_memory));
    by_memory.into_iter().chain(may_split.then_some(("--split", over_all)))
}

fn read_ctx(path: &Path, config: &EngineConfig, sharing: &Sharing) -> u32 {
    let params = ModelParams { device: Some(sharing.known.best.clone()), no_alloc: true, ..ModelParams::default() };
    Model::load(&Backend::init(), path, &params).map_or(config.n_ctx_slot, |model| model.facts().n_ctx_train)
}

/// The largest number below `from` and at least `least` that holds, where smaller ones hold too.
fn largest(least: u32, from: u32, mut holds: impl FnMut(u32) -> bool) -> Option<u32> {
    if from <= least || !holds(least) {
        return None;
    }
    let (mut yes, mut no) = (least, from);
    while no - yes > 1 {
        let middle = yes + (no - yes) / 2;
        *(if holds(middle) { &mut yes } else { &mut no }) = middle;
    }
    Some(yes)
}

fn header(path: &Path, params: &ModelParams, read: &mut Read) -> Result<Model, EngineError> {
    if let Some((_, model)) = read.iter().find(|(known, _)| known == params) {
        return Ok(model.clone());
    }
    let model = Model::load(&Backend::init(), path, params)?;
    read.push((params.clone(), model.clone()));
    Ok(model)
}

fn on_host() -> PlannedDevice {
    // Where the system does not tell, nothing is refused.
    let free = HostMemory::detect().map_or(u64::MAX, |memory| memory.free);
    PlannedDevice { name: HOST.to_owned(), n_workers: 0, weights: 0, mapped: false, kv: 0, compute: 0, rows: 0, free }
}

fn place(devices: &mut Vec<PlannedDevice>, device: &Device) -> usize {
    let Some(name) = device.memory_name() else { return 0 };
    if let Some(at) = devices.iter().position(|known| known.name == name) {
        return at;
    }
    let free = device.info().free_bytes;
    devices.push(PlannedDevice { name: name.to_owned(), free, ..on_host() });
    devices.len() - 1
}

/// Expert counts of a prefill worker's tokens, in blocks, if all its slots are full.
fn rows(model: &Model, config: &EngineConfig, n_ctx_slot: u32) -> u64 {
    let Some(shape) = model.moe_shape() else { return 0 };
    let n_layers = MoeShape::usable(shape).len();
    let per_token = row_bytes_per_token(n_layers, shape.n_expert, PrefixConfig::default().block);
    (per_token * f64::from(n_ctx_slot) * f64::from(config.n_slots)).ceil() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-moe-64x4.gguf");

    fn config(decode: &str) -> EngineConfig {
        let decode = decode.parse().expect("valid");
        EngineConfig {
            prefill: "1@cpu".parse().expect("valid"),
            decode,
            n_slots: 2,
            n_threads: 1,
            ..EngineConfig::default()
        }
    }

    #[test]
    fn workers_share_weights_and_have_keys_and_values_of_their_own() {
        let plan = |decode: &str| Plan::new(Path::new(MODEL), &config(decode)).expect("a plan");
        let (one, three) = (plan("1@cpu"), plan("3@cpu"));
        let (one, three) = (&one.devices[0], &three.devices[0]);
        assert_eq!((one.name.as_str(), one.n_workers, three.n_workers), ("host", 2, 4));
        assert_eq!(one.weights, three.weights);
        // 2 slots of 1024 tokens, the trained context, of 2 heads of 64 in 6 layers, keys and values of 2 bytes.
        let slots = 2 * 1024 * (2 * 64 * 6 * 2 * 2);
        assert_eq!((one.kv, three.kv), (2 * slots, 4 * slots));
        assert!(three.compute > one.compute && one.rows > 0 && one.fits());
    }

    #[test]
    fn what_does_not_fit_is_told_with_the_numbers() {
        let device = PlannedDevice {
            name: "CUDA0".to_owned(),
            weights: 8 << 20,
            kv: 3 << 20,
            compute: 1 << 20,
            free: 10 << 20,
            ..on_host()
        };
        assert!(!device.fits());
        let text = device.sentence();
        assert!(
            text.contains("need 12 MiB on CUDA0 (8 MiB of weights, 3 MiB of keys") && text.contains("10 MiB are free"),
            "{text}"
        );
        let mapped = PlannedDevice { mapped: true, ..device };
        assert!(mapped.fits());
        let threads = Sharing::of(&config("1@cpu")).expect("fits").thread_use();
        let plan = Plan { devices: vec![mapped], threads, n_pinned: 0, unpinned: Vec::new() };
        assert!(plan.problems().is_empty() && plan.warnings()[0].contains("8 MiB of mapped weights and 4 MiB besides"));
    }

    #[test]
    fn the_nearest_number_is_found_exactly() {
        for most in 0..20 {
            let found = largest(1, 16, |n| n <= most);
            assert_eq!(found, (most >= 1).then_some(most.min(15)), "{most}");
        }
        assert_eq!(largest(1, 1, |_| true), None);
    }

    // Symptom: the system promises memory it does not have, and ends the process when it is used.
    #[test]
    fn an_engine_that_can_not_fit_is_refused_with_the_nearest_settings() {
        let free = HostMemory::detect().expect("Linux").free;
        // A worker's slots take 3 KiB a token; 1,000 workers of 255 slots of 1,024 tokens take 740 GiB.
        let huge = EngineConfig { n_slots: 255, ..config("1000@cpu") };
        assert!(free < 700 << 30, "this test needs a machine with less memory");
        let sharing = Sharing::of(&huge).expect("turns");
        let params = ModelParams { no_alloc: true, ..ModelParams::default() };
        let model = Model::load(&Backend::init(), Path::new(MODEL), &params).expect("reads");
        assert!(!Plan::is_needless(&model, &huge, &sharing));
        let refusal = Plan::refusal(Path::new(MODEL), &huge, &sharing).expect("refused");
        assert!(refusal.contains("MiB of keys and values") && refusal.contains("are free: "), "{refusal}");
        let (_, advice) = refusal.split_once("--slots ").expect("an advice");
        let n_slots: u32 = advice.split_whitespace().next().and_then(|n| n.parse().ok()).expect("a number");
        let fitting = EngineConfig { n_slots: n_slots.saturating_sub(1).max(1), ..huge };
        assert_eq!(Plan::refusal(Path::new(MODEL), &fitting, &sharing), None);
    }
}
