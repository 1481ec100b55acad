//! How long a step takes when its batch picks more or fewer experts, everything else being equal: the paper's first
//! figure, with a model whose picks are chosen.
//!
//! Never counts what it was told: the tap says how many experts a batch really picked.

use std::collections::BTreeSet;

use eldr::llama::ContextParams;
use serde_json::json;

use super::{
    Found,
    rig::{Rig, context, median, step_batch, time, time_tapped},
    wide::{self, N_EXPERT, N_GROUPS},
};

const N_BATCH: usize = 16;

pub fn steps(rig: &Rig) -> Found {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("wide.gguf");
    let n_ff = rig.size.of(64, 2048);
    wide::write(&path, n_ff)?;
    let model = rig.load(&path)?;
    let bytes = model.facts().experts.ok_or("experts")?.expert;
    let params =
        ContextParams { n_slots: N_BATCH as u32, n_ctx_slot: 1024, flash_attn: true, ..ContextParams::default() };
    let mut plain = context(&model, &params)?;
    let mut tapped = context(&model, &ContextParams { tap: true, ..params })?;
    let groups = [1, 2, 4, 6, 8, 10, 12, 14, 16];
    let mut times = vec![Vec::new(); groups.len()];
    let mut pos = 0;
    // The first round warms up; sizes take turns, so that whatever else the machine does falls on all.
    for round in 0..=rig.size.of(3, 60) {
        for (&n_groups, times) in groups.iter().zip(&mut times) {
            let tokens: Vec<i32> = (0..N_BATCH).map(|row| wide::token(row % n_groups)).collect();
            if round == 0 {
                let (_, picks) = time_tapped(&mut tapped, &step_batch(&tokens, pos))?;
                for (layer, rows) in picks {
                    let distinct = rows.into_iter().flatten().collect::<BTreeSet<u32>>().len();
                    let wanted = n_groups * N_EXPERT / N_GROUPS;
                    if distinct != wanted {
                        return Err(format!("layer {layer}: {distinct} distinct experts, not {wanted}").into());
                    }
                }
            }
            let ms = time(&mut plain, &step_batch(&tokens, pos))?;
            pos += 1;
            if round > 0 {
                times.push(ms);
            }
        }
    }
    let rows: Vec<(usize, f64)> =
        groups.iter().map(|n| n * N_EXPERT / N_GROUPS).zip(times.into_iter().map(median)).collect();
    let ((fewest, low), (most, high)) = (rows[0], rows[rows.len() - 1]);
    let found = format!(
        "a step of {N_BATCH} takes {low:.3} ms with {fewest} experts a layer and {high:.3} ms with {most} of {N_EXPERT}, {:.1} KiB each",
        bytes as f64 / 1024.0
    );
    let rows: Vec<_> = rows.iter().map(|(experts, ms)| json!({ "experts": experts, "ms": ms })).collect();
    let measured = json!({ "batch": N_BATCH, "n_expert": N_EXPERT, "n_layer": wide::N_LAYER, "expert_bytes": bytes, "steps": rows });
    Ok((found, measured))
}
