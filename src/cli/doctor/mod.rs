//! `eldr doctor`: what would keep a model from running well, and what to do about it.
//!
//! Never changes anything, and never risks its own process: what may crash is tried in another one.

mod checks;
mod findings;
mod plan;
mod probe;

use clap::Args;
use eldr::{
    bench::Machine,
    engine::{self, DeviceInfo, DeviceKind, EngineConfig, Topology, WorkerList, read_calibration},
    route::PolicyKind,
};
use serde_json::json;

use self::findings::{Findings, Level};
use super::{
    args::{ModelArgs, RouteArgs, WorkerArgs},
    error::CliError,
    model::shipped_or,
    output::{Output, columns},
    size::show,
};

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
    /// Show what the workers would take on each device, against what is free, and the machine's processors
    #[arg(long)]
    plan: bool,
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

impl DoctorArgs {
    pub fn run(&self, output: &mut Output) -> Result<(), CliError> {
        let mut findings = Findings::default();
        let versions = engine::versions();
        let config = self.config();
        if let Err(error) = self.model.add_rpc(&config) {
            findings.broken(error.message, "start the server, or leave --rpc out");
        }
        let devices = engine::devices();
        let machine =
            Machine::detect(Some(versions.llama_cpp.clone()), devices.iter().map(|d| d.name.clone()).collect());
        checks::environment(&mut findings);
        checks::gpus(&devices, &mut findings);
        checks::libraries(&mut findings);
        checks::config(&config, &devices, &mut findings);
        let mut planned = None;
        match shipped_or(self.model.model.as_ref()) {
            Ok(path) => {
                checks::model(&path, &config, &mut findings);
                if self.plan && !findings.0.iter().any(|finding| finding.level == Level::Broken) {
                    planned = plan::plan(&path, &config, &mut findings);
                }
            }
            Err(error) => findings.warn(error.message, "name a model with -m"),
        }
        if !self.plan {
            probe::extra_bufts(&mut findings);
        }
        let topology = Topology::detect();

        output.line(&format!("eldr {}, {}", versions.eldr, versions.llama_cpp))?;
        for line in machine_lines(&machine, &versions.system_info) {
            output.line(&line)?;
        }
        for line in columns(&devices.iter().map(device_row).collect::<Vec<_>>()) {
            output.line(&line)?;
        }
        for line in plan::topology_lines(&topology) {
            output.line(&line)?;
        }
        if let Some(planned) = &planned {
            for line in columns(&plan::table(planned)) {
                output.line(&line)?;
            }
            output.line(&plan::threads(planned))?;
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
            "topology": plan::topology_document(&topology),
            "plan": planned.as_ref().map(plan::document),
            "findings": findings.0,
        }))?;
        if n_broken > 0 {
            return Err(CliError::already_told(verdict(n_broken)));
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
}

fn verdict(n_broken: usize) -> String {
    let finding = if n_broken == 1 { "finding keeps" } else { "findings keep" };
    format!("{n_broken} {finding} eldr from running as configured")
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

    // Symptom: "1 findings keep eldr from running", and "llama.cpp llama.cpp" in the first line.
    #[test]
    fn one_finding_is_singular_and_llama_cpp_names_itself() {
        assert_eq!(verdict(1), "1 finding keeps eldr from running as configured");
        assert_eq!(verdict(2), "2 findings keep eldr from running as configured");
        assert_eq!(engine::versions().llama_cpp.matches("llama.cpp").count(), 1);
    }
}
