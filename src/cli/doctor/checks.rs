//! What can be found wrong by looking: settings, devices, cores, memory, the model, the calibration.
//!
//! Never computes with the model.

use std::{env, path::Path};

use eldr::{
    engine::{self, DeviceInfo, DeviceKind, EngineConfig, LoadedModel},
    sim::Verdict,
};

use super::findings::Findings;
use crate::cli::{settings, size::show};

/// Variables that look like settings and are none.
pub fn environment(findings: &mut Findings) {
    for name in settings::unknown(env::vars_os().map(|(name, _)| name)) {
        findings.warn(format!("{name} is set, but there is no such setting"), "see `eldr run --help` for the names");
    }
}

/// Hardware that this build does not use.
pub fn gpus(devices: &[DeviceInfo], findings: &mut Findings) {
    let has_gpu = devices.iter().any(|d| matches!(d.kind, DeviceKind::Gpu | DeviceKind::IntegratedGpu));
    for (file, feature) in [("/dev/nvidia0", "cuda"), ("/dev/kfd", "rocm")] {
        if !has_gpu && Path::new(file).exists() {
            findings.warn(
                format!("the machine has {file}, but this build of eldr sees no GPU"),
                format!("build with `--features {feature}`, and check the driver if that is done"),
            );
        }
    }
}

/// Backends that could be used and are not: a library is there, but its driver or another library is not.
pub fn libraries(findings: &mut Findings) {
    for library in engine::unusable_libraries() {
        findings.warn(
            format!("{} cannot be used: {}", library.path.display(), library.reason),
            "install what is missing, or remove the file",
        );
    }
}

/// Numbers that can not work, devices there are not, more threads than cores.
pub fn config(config: &EngineConfig, devices: &[DeviceInfo], findings: &mut Findings) {
    for problem in config.problems() {
        findings.broken(problem, "correct the setting");
    }
    let names: Vec<&str> = config.prefill.devices().chain(config.decode.devices()).flatten().collect();
    let mut all_there = true;
    for (_, &name) in names.iter().enumerate().filter(|(at, name)| !names[..*at].contains(name)) {
        let found = match engine::rpc_endpoint(name) {
            Some(endpoint) => {
                engine::add_rpc(endpoint, config.rpc_deadline).map(drop).map_err(|error| error.to_string())
            }
            None if devices.iter().any(|device| engine::is_device(device, name)) => Ok(()),
            None => Err(format!("there is no device '{name}'")),
        };
        let Err(why) = found else { continue };
        all_there = false;
        let known: Vec<&str> = devices.iter().map(|d| d.name.as_str()).collect();
        findings.broken(why, format!("name one of {}, or start the RPC server named", known.join(", ")));
    }
    if !all_there {
        return;
    }
    match engine::thread_use(config) {
        Err(error) => findings.broken(error.to_string(), "correct the workers or --threads"),
        Ok(used) if used.n_at_once < used.n_sharing => findings.warn(
            format!(
                "{} CPU workers of {} threads share {} cores, so {} compute at a time and the others wait",
                used.n_sharing, used.n_threads, used.n_cores, used.n_at_once
            ),
            "use fewer workers, or measure with `eldr bench --clock virtual`",
        ),
        Ok(used) if used.most() > 0 => {
            let pinned =
                if used.n_pinned > 0 { format!("{} pinned threads and ", used.n_pinned) } else { String::new() };
            let (n, threads, cores) = (used.n_sharing, used.n_threads, used.n_cores);
            findings.ok(format!("{pinned}{n} CPU workers of {threads} threads on {cores} cores"));
        }
        Ok(_) => {}
    }
}

/// Whether the file is a model, and what the configuration makes of it.
pub fn model(path: &Path, config: &EngineConfig, findings: &mut Findings) {
    // The configuration has findings of its own; the model is looked at by itself.
    let plain = EngineConfig { use_mmap: config.use_mmap, ..EngineConfig::default() };
    let loaded = match LoadedModel::load(path, &plain) {
        Ok(loaded) => loaded,
        Err(error) => {
            findings.broken(error.to_string(), "give another model with -m");
            return;
        }
    };
    let facts = loaded.facts();
    let place = path.display();
    match &facts.moe {
        Some(shape) => findings.ok(format!(
            "model {place}: {} with {} MoE layers of {} experts, {} a token",
            facts.arch,
            shape.n_layer_moe(),
            shape.n_expert,
            shape.n_expert_used
        )),
        None => findings.warn(
            format!("model {place} is dense, so requests can only be routed by load"),
            "use a mixture-of-experts model to gain from expert locality",
        ),
    }
    memory(&loaded, config, findings);
    let asked = config.n_ctx_slot != EngineConfig::default().n_ctx_slot;
    if asked && config.n_ctx_slot > facts.n_ctx_train {
        let (asked, trained) = (config.n_ctx_slot, facts.n_ctx_train);
        findings.warn(
            format!("a slot of {asked} tokens is cut to the {trained} the model was trained with"),
            format!("say --ctx {trained}"),
        );
    }
    let slot = config.n_ctx_slot.min(facts.n_ctx_train);
    if rounded(slot) != slot {
        let real = rounded(slot);
        findings.ok(format!("a slot of {slot} tokens holds {real}: llama.cpp makes them in steps of {CTX_STEP}"));
    }
    match (&config.calibration, loaded.calibration(config)) {
        (None, _) if config.policy.needs_calibration() && facts.moe.is_some() => {
            findings.broken(
                format!("policy {} has no calibration", config.policy),
                "make one with `eldr calibrate` and give it with --calibration",
            );
        }
        (None, _) => {}
        (Some(path), Ok(calibration)) => {
            findings.ok(format!("calibration {} fits the model and the decode workers", path.display()));
            let verdict = calibration.as_deref().and_then(Verdict::of);
            if let Some(verdict) = verdict.filter(|verdict| !verdict.helps) {
                findings.warn(verdict.sentence(), "leave the calibration away, or ask for --policy marginal_cost");
            }
        }
        (Some(_), Err(error)) => findings.broken(error.to_string(), "calibrate again, or give another file"),
    }
}

/// What llama.cpp makes of a slot's tokens, which is what they take.
const CTX_STEP: u32 = 256;

fn rounded(n_ctx_slot: u32) -> u32 {
    n_ctx_slot.checked_next_multiple_of(CTX_STEP).unwrap_or(u32::MAX)
}

/// Weights once and keys and values of every worker, against what the machine has.
fn memory(loaded: &LoadedModel, config: &EngineConfig, findings: &mut Findings) {
    let facts = loaded.facts();
    let n_ctx_slot = u64::from(rounded(config.n_ctx_slot.min(facts.n_ctx_train)));
    let n_contexts = (config.prefill.n_workers() + config.decode.n_workers()) as u64;
    let a_context =
        loaded.kv_bytes_per_token(config.kv_format).saturating_mul(n_ctx_slot).saturating_mul(config.n_slots.into());
    let need = facts.size_bytes.saturating_add(a_context.saturating_mul(n_contexts));
    let have = engine::devices().iter().map(|device| device.total_bytes).max().unwrap_or(0);
    let sum = format!(
        "{} of weights and {} of keys and values for {n_contexts} workers",
        show(facts.size_bytes),
        show(need - facts.size_bytes)
    );
    if need > have {
        findings.warn(
            format!("{sum} are more than the {} of the largest device", show(have)),
            "use fewer --slots, a shorter --ctx, or spread the workers over devices",
        );
    } else {
        findings.ok(sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::doctor::findings::Level;

    #[test]
    fn devices_are_found_as_the_engine_finds_them() {
        let device = |index: usize, name: &str, kind| DeviceInfo {
            index,
            name: name.to_owned(),
            description: String::new(),
            kind,
            free_bytes: 1,
            total_bytes: 2,
        };
        let devices = [device(0, "CUDA0", DeviceKind::Gpu), device(1, "CPU", DeviceKind::Cpu)];
        let index = |name: &str| devices.iter().find(|d| engine::is_device(d, name)).map(|device| device.index);
        assert_eq!([index("cuda:0"), index("cpu"), index("1"), index("cuda:1")], [Some(0), Some(1), Some(1), None]);
        let config = EngineConfig { decode: "2@cuda:1,1@vulkan0".parse().expect("valid"), ..EngineConfig::default() };
        let mut findings = Findings::default();
        super::config(&config, &devices, &mut findings);
        let broken: Vec<&str> =
            findings.0.iter().filter(|f| f.level == Level::Broken).map(|f| f.message.as_str()).collect();
        assert_eq!(broken, ["there is no device 'cuda:1'", "there is no device 'vulkan0'"]);
    }

    #[test]
    fn every_wrong_setting_is_a_finding() {
        let config = EngineConfig { n_slots: 0, chunk: 0, ..EngineConfig::default() };
        let mut findings = Findings::default();
        super::config(&config, &[], &mut findings);
        assert_eq!(findings.0.iter().filter(|finding| finding.level == Level::Broken).count(), 2, "{findings:?}");
    }
}
