//! What the configured workers take on each device, against what is free, and the machine they are placed on.
//!
//! Never loads a model: headers are read and llama.cpp is asked.

use std::path::Path;

use eldr::engine::{EngineConfig, Plan, PlannedDevice, Topology};
use serde_json::{Value, json};

use super::findings::Findings;
use crate::cli::size::show;

/// The plan; what does not fit is a broken finding.
pub fn plan(path: &Path, config: &EngineConfig, findings: &mut Findings) -> Option<Plan> {
    let plan = match Plan::new(path, config) {
        Ok(plan) => plan,
        Err(error) => {
            findings.broken(error.to_string(), "correct the workers or the model");
            return None;
        }
    };
    let problems = plan.problems();
    if !problems.is_empty() {
        let advice = Plan::advice(path, config).unwrap_or_else(|error| error.to_string());
        for problem in problems {
            findings.broken(problem, advice.clone());
        }
    }
    for warning in plan.warnings() {
        findings.warn(warning, "use fewer workers or a smaller model, if it is too slow");
    }
    for why in &plan.unpinned {
        findings.warn(why.clone(), "it is computed anew once it has made room, as without --pin");
    }
    if plan.n_pinned > 0 {
        let n_slots = config.n_slots;
        findings.ok(format!("pinned prefixes take {} of the {n_slots} slots of each prefill worker", plan.n_pinned));
    }
    let devices = plan.devices.iter().filter(|device| device.fits());
    for device in devices {
        findings.ok(format!("{} of the {} free on {} are needed", show(device.need()), free(device), device.name));
    }
    Some(plan)
}

fn free(device: &PlannedDevice) -> String {
    if device.free == u64::MAX { "unknown memory".to_owned() } else { show(device.free) }
}

/// A table of the plan, in words.
pub fn table(plan: &Plan) -> Vec<Vec<String>> {
    let header = ["plan", "workers", "weights", "keys, values", "buffers", "counts", "needs", "free", ""];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    rows.extend(plan.devices.iter().map(|device| {
        let bytes = [device.weights, device.kv, device.compute, device.rows, device.need()].map(show);
        let fits = if device.fits() { "fits" } else { "does not fit" };
        let mut row = vec![device.name.clone(), device.n_workers.to_string()];
        row.extend(bytes);
        row.extend([free(device), fits.to_owned()]);
        row
    }));
    rows
}

pub fn threads(plan: &Plan) -> String {
    let used = plan.threads;
    format!("at most {} threads compute at once on {} processors", used.most(), used.n_cores)
}

/// The plan as JSON.
pub fn document(plan: &Plan) -> Value {
    let devices = plan.devices.iter().map(|device| {
        let mut row = serde_json::to_value(device).unwrap_or_default();
        row["need"] = device.need().into();
        row["fits"] = device.fits().into();
        row
    });
    let mut threads = serde_json::to_value(plan.threads).unwrap_or_default();
    threads["most"] = plan.threads.most().into();
    json!({
        "devices": devices.collect::<Vec<_>>(),
        "threads": threads,
        "n_pinned": plan.n_pinned,
        "unpinned": plan.unpinned,
    })
}

/// The machine's nodes, and workers to place on them.
pub fn topology_lines(topology: &Topology) -> Vec<String> {
    let mut lines: Vec<String> = topology
        .nodes
        .iter()
        .map(|node| {
            let memory = node.total_bytes.map_or_else(String::new, |bytes| format!(", {}", show(bytes)));
            format!("NUMA node {}: processors {}{memory}", node.id, node.cpus)
        })
        .collect();
    let layout = topology.layout();
    lines.push(format!("layout: --prefill {} --decode {} ({})", layout.prefill, layout.decode, layout.why));
    lines
}

pub fn topology_document(topology: &Topology) -> Value {
    let layout = topology.layout();
    let node = |node: &eldr::engine::NumaNode| {
        json!({
            "id": node.id,
            "cpus": node.cpus.to_string(),
            "total_bytes": node.total_bytes,
            "free_bytes": node.free_bytes,
        })
    };
    json!({
        "allowed": topology.allowed.to_string(),
        "n_physical_cores": topology.cores.len(),
        "nodes": topology.nodes.iter().map(node).collect::<Vec<_>>(),
        "layout": { "prefill": layout.prefill, "decode": layout.decode, "why": layout.why },
    })
}
