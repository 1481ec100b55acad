//! What the weights and each further worker take on the device: what llama.cpp says, and what the device has less.
//!
//! Never changes a setting to make something fit.

use eldr::llama::ContextParams;
use serde_json::json;

use super::{
    Found,
    rig::{Rig, context},
};

pub fn workers(rig: &Rig) -> Found {
    let free = || rig.device.info().free_bytes;
    let before = free();
    let model = rig.load(&rig.timed)?;
    let loaded = free();
    let params = ContextParams { n_slots: 16, n_ctx_slot: 1024, flash_attn: true, ..ContextParams::default() };
    let mut rows = Vec::new();
    let mut contexts = Vec::new();
    let name = rig.device.memory_name().map(str::to_owned);
    for worker in 1..=rig.size.of(2, 4) {
        let had = free();
        let made = context(&model, &params)?;
        let foreseen = made.footprint()?;
        let own = foreseen.iter().find(|row| row.device == name).ok_or("llama.cpp says nothing of the device")?;
        if own.kv == 0 || own.weights == 0 {
            return Err(
                format!("worker {worker}: {} bytes of weights and {} of keys and values", own.weights, own.kv).into()
            );
        }
        rows.push(json!({ "weights": own.weights, "kv": own.kv, "compute": own.compute, "less_free": had.saturating_sub(free()) }));
        contexts.push(made);
    }
    let mib = |row: &str| rows[rows.len() - 1][row].as_u64().unwrap_or(0) as f64 / f64::from(1 << 20);
    let found = format!(
        "{:.1} MiB of weights once, then {:.1} MiB of keys and values and {:.1} MiB of buffers for each worker of 16 slots",
        mib("weights"),
        mib("kv"),
        mib("compute")
    );
    Ok((found, json!({ "model_less_free": before.saturating_sub(loaded), "workers": rows })))
}
