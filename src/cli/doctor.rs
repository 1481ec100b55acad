//! `eldr doctor`: what would keep a model from running well, and what to do about it.
//!
//! Never changes anything, and never risks its own process: what may crash is tried in another one.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use clap::Args;
use eldr::{
    bench::Machine,
    engine::{self, DeviceInfo, DeviceKind, EngineConfig, LoadedModel, ThreadPlan, WorkerList, read_calibration},
    route::PolicyKind,
};
use serde::Serialize;
use serde_json::json;

use super::{
    args::{ModelArgs, RouteArgs, WorkerArgs},
    error::CliError,
    model,
    output::{Output, columns},
    settings,
    size::show,
};

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
    /// Routing policy to check
    #[arg(long, value_name = "NAME")]
    policy: Option<PolicyKind>,
    #[command(flatten)]
    route: RouteArgs,
    #[command(flatten)]
    workers: WorkerArgs,
    #[command(flatten)]
    model: ModelArgs,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Level {
    Ok,
    Warning,
    Broken,
}

/// One line of the diagnosis; `advice` is what to do, and empty where nothing is to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Finding {
    level: Level,
    message: String,
    advice: String,
}

#[derive(Debug, Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, level: Level, message: impl Into<String>, advice: impl Into<String>) {
        self.0.push(Finding { level, message: message.into(), advice: advice.into() });
    }

    fn ok(&mut self, message: impl Into<String>) {
        self.add(Level::Ok, message, "");
    }

    fn warn(&mut self, message: impl Into<String>, advice: impl Into<String>) {
        self.add(Level::Warning, message, advice);
    }

    fn broken(&mut self, message: impl Into<String>, advice: impl Into<String>) {
        self.add(Level::Broken, message, advice);
    }
}

impl DoctorArgs {
    pub fn run(&self, output: &mut Output) -> Result<(), CliError> {
        let mut findings = Findings::default();
        let versions = engine::versions();
        if let Err(error) = self.model.add_rpc() {
            findings.broken(error.message, "start the server, or leave --rpc out");
        }
        let devices = engine::devices();
        let machine =
            Machine::detect(Some(versions.llama_cpp.clone()), devices.iter().map(|d| d.name.clone()).collect());
        let config = self.config();
        check_environment(&mut findings);
        check_gpus(&devices, &mut findings);
        check_config(&config, &devices, &mut findings);
        self.check_model(&config, &mut findings);
        check_extra_bufts(&mut findings);

        output.line(&format!("eldr {}, llama.cpp {}", versions.eldr, versions.llama_cpp))?;
        for line in machine_lines(&machine, &versions.system_info) {
            output.line(&line)?;
        }
        for line in columns(&devices.iter().map(device_row).collect::<Vec<_>>()) {
            output.line(&line)?;
        }
        for finding in &findings.0 {
            output.line(&finding.line())?;
        }
        let n_broken = findings.0.iter().filter(|finding| finding.level == Level::Broken).count();
        output.json(&json!({
            "usable": n_broken == 0,
            "versions": versions,
            "machine": machine,
            "devices": devices.iter().map(device_json).collect::<Vec<_>>(),
            "findings": findings.0,
        }))?;
        if n_broken > 0 {
            return Err(CliError::already_told(format!("{n_broken} findings keep eldr from running as configured")));
        }
        Ok(())
    }

    fn config(&self) -> EngineConfig {
        let mut config = EngineConfig::default();
        let of_calibration = self.route.calibration.as_deref().and_then(|path| read_calibration(path).ok());
        if let Some(n_workers) = of_calibration.and_then(|calibration| u32::try_from(calibration.n_workers()).ok()) {
            config.decode = WorkerList::best(n_workers);
        }
        self.model.configure(&mut config);
        self.workers.configure(&mut config);
        self.route.configure(&mut config, self.policy);
        config
    }

    fn check_model(&self, config: &EngineConfig, findings: &mut Findings) {
        let Some(path) = self.model.model.clone().or_else(model::shipped) else {
            findings.warn("there is no model to look at", "name one with -m");
            return;
        };
        // The configuration has findings of its own; the model is looked at by itself.
        let plain = EngineConfig { use_mmap: config.use_mmap, ..EngineConfig::default() };
        let loaded = match LoadedModel::load(&path, &plain) {
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
        check_memory(&loaded, config, findings);
        if config.n_ctx_slot > facts.n_ctx_train {
            findings.warn(
                format!(
                    "a slot of {} tokens is cut to the {} the model was trained with",
                    config.n_ctx_slot, facts.n_ctx_train
                ),
                format!("say --ctx {}", facts.n_ctx_train),
            );
        }
        match (&self.route.calibration, loaded.calibration(config)) {
            (None, _) if config.policy.needs_calibration() => {
                findings.broken(
                    format!("policy {} has no calibration", config.policy),
                    "make one with `eldr calibrate` and give it with --calibration",
                );
            }
            (None, _) => {}
            (Some(path), Ok(_)) => {
                findings.ok(format!("calibration {} fits the model and the decode workers", path.display()));
            }
            (Some(_), Err(error)) => findings.broken(error.to_string(), "calibrate again, or give another file"),
        }
    }
}

impl Finding {
    fn line(&self) -> String {
        let level = match self.level {
            Level::Ok => "ok     ",
            Level::Warning => "warning",
            Level::Broken => "broken ",
        };
        match self.advice.as_str() {
            "" => format!("{level}  {}", self.message),
            advice => format!("{level}  {}: {advice}", self.message),
        }
    }
}

/// Variables that look like settings and are none.
fn check_environment(findings: &mut Findings) {
    let mut known: Vec<String> =
        settings::names(&super::command()).iter().map(|name| settings::env_name(name)).collect();
    known.push(settings::env_name("config"));
    let given = env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for name in given.filter(|name| name.starts_with("ELDR_") && !known.contains(name)) {
        findings.warn(format!("{name} is set, but there is no such setting"), "see `eldr run --help` for the names");
    }
}

fn check_gpus(devices: &[DeviceInfo], findings: &mut Findings) {
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

fn check_config(config: &EngineConfig, devices: &[DeviceInfo], findings: &mut Findings) {
    for problem in config.problems() {
        findings.broken(problem, "correct the setting");
    }
    let names: Vec<&str> = config.prefill.devices().chain(config.decode.devices()).flatten().collect();
    for (at, name) in names.iter().enumerate() {
        if find(devices, name).is_none() && !names[..at].contains(name) {
            let known: Vec<&str> = devices.iter().map(|d| d.name.as_str()).collect();
            findings.broken(format!("there is no device '{name}'"), format!("name one of {}", known.join(", ")));
        }
    }
    let has_gpu = devices.iter().any(|d| d.kind != DeviceKind::Cpu && d.kind != DeviceKind::Accelerator);
    let on_cpu = |name: Option<&str>| match name {
        Some(name) => find(devices, name).is_some_and(|device| device.kind == DeviceKind::Cpu),
        None => !has_gpu,
    };
    let n_cpu = config.prefill.devices().chain(config.decode.devices()).filter(|&name| on_cpu(name)).count();
    let n_cores = thread::available_parallelism().map_or(1, usize::from);
    match ThreadPlan::new(config.n_threads, n_cpu) {
        Err(error) => findings.broken(error.to_string(), "lower --threads"),
        Ok(plan) if plan.permits.n_at_once() < n_cpu => findings.warn(
            format!(
                "{n_cpu} CPU workers of {} threads share {n_cores} cores, so {} compute at a time and the others wait",
                plan.n_threads,
                plan.permits.n_at_once()
            ),
            "use fewer workers, or measure with `eldr bench --clock virtual`",
        ),
        Ok(plan) if n_cpu > 0 => {
            findings.ok(format!("{n_cpu} CPU workers of {} threads on {n_cores} cores", plan.n_threads));
        }
        Ok(_) => {}
    }
}

/// As the engine finds devices: by name without case and colon, or by index.
fn find<'a>(devices: &'a [DeviceInfo], name: &str) -> Option<&'a DeviceInfo> {
    let plain = |name: &str| name.trim().replace(':', "").to_ascii_lowercase();
    let by_name = devices.iter().find(|device| plain(&device.name) == plain(name));
    by_name.or_else(|| devices.get(name.trim().parse::<usize>().ok()?))
}

/// Weights once and keys and values of every worker, against what the machine has.
fn check_memory(loaded: &LoadedModel, config: &EngineConfig, findings: &mut Findings) {
    let facts = loaded.facts();
    let n_ctx_slot = u64::from(config.n_ctx_slot.min(facts.n_ctx_train));
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

/// Runs the shipped model with the extra buffer types in a process of its own, which a faulting AMX would kill.
fn check_extra_bufts(findings: &mut Findings) {
    let (Ok(program), Some(model)) = (env::current_exe(), model::shipped()) else {
        findings
            .warn("extra buffer types were not tried, because the shipped model was not found", "run from the project");
        return;
    };
    match probe(&program, &model) {
        Ok(()) => findings.ok("extra buffer types (repacking, AMX) work here: --extra-bufts may be faster"),
        Err(error) => findings.warn(
            format!("extra buffer types (repacking, AMX) do not work here ({error})"),
            "leave --extra-bufts off, as it is by default",
        ),
    }
}

const PROBE_LIMIT: Duration = Duration::from_secs(60);

fn probe(program: &Path, model: &PathBuf) -> Result<(), String> {
    let ours = env::vars_os().map(|(name, _)| name).filter(|name| name.to_string_lossy().starts_with("ELDR_"));
    let mut command = Command::new(program);
    for name in ours {
        command.env_remove(name);
    }
    let flags = ["--extra-bufts", "--prefill", "1@cpu", "--decode", "1@cpu", "--ctx", "64", "-t", "1", "-n", "4"];
    let mut child = command
        .arg("run")
        .arg("-m")
        .arg(model)
        .args(flags)
        .args(["--ignore-eos", "The doctor asks"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| error.to_string())?;
    let started = Instant::now();
    loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(status.to_string()),
            None if started.elapsed() > PROBE_LIMIT => {
                // Gone already, perhaps; then there is nothing to end.
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("no answer in {} seconds", PROBE_LIMIT.as_secs()));
            }
            None => thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn machine_lines(machine: &Machine, system_info: &str) -> Vec<String> {
    let cpu = machine.cpu.as_deref().unwrap_or("unknown CPU");
    let cores = machine.cores.map_or_else(|| "?".to_owned(), |n| n.to_string());
    let memory = machine.memory_bytes.map_or_else(|| "unknown memory".to_owned(), show);
    let features = machine.features.as_ref().map_or_else(String::new, |list| list.join(" "));
    vec![
        format!("{}, {}: {cpu}, {cores} cores, {memory}", machine.os, machine.arch),
        format!("CPU features: {features}"),
        format!("built for: {}", system_info.trim()),
    ]
}

fn device_row(device: &DeviceInfo) -> Vec<String> {
    vec![
        format!("device {}", device.index),
        device.name.clone(),
        kind_name(device.kind).to_owned(),
        format!("{} free of {}", show(device.free_bytes), show(device.total_bytes)),
        device.description.clone(),
    ]
}

fn device_json(device: &DeviceInfo) -> serde_json::Value {
    json!({
        "index": device.index,
        "name": device.name,
        "description": device.description,
        "kind": kind_name(device.kind),
        "free_bytes": device.free_bytes,
        "total_bytes": device.total_bytes,
    })
}

fn kind_name(kind: DeviceKind) -> &'static str {
    match kind {
        DeviceKind::Cpu => "cpu",
        DeviceKind::Gpu => "gpu",
        DeviceKind::IntegratedGpu => "integrated_gpu",
        DeviceKind::Rpc => "rpc",
        _ => "accelerator",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let index = |name: &str| find(&devices, name).map(|device| device.index);
        assert_eq!([index("cuda:0"), index("cpu"), index("1"), index("cuda:1")], [Some(0), Some(1), Some(1), None]);
        let config = EngineConfig { decode: "2@cuda:1,1@vulkan0".parse().expect("valid"), ..EngineConfig::default() };
        let mut findings = Findings::default();
        check_config(&config, &devices, &mut findings);
        let broken: Vec<&str> =
            findings.0.iter().filter(|f| f.level == Level::Broken).map(|f| f.message.as_str()).collect();
        assert_eq!(broken, ["there is no device 'cuda:1'", "there is no device 'vulkan0'"]);
    }

    #[test]
    fn every_wrong_setting_is_a_finding() {
        let config = EngineConfig { n_slots: 0, chunk: 0, ..EngineConfig::default() };
        let mut findings = Findings::default();
        check_config(&config, &[], &mut findings);
        assert_eq!(findings.0.iter().filter(|finding| finding.level == Level::Broken).count(), 2, "{findings:?}");
    }
}
