//! What the tap costs: prefills and decode steps in a context without one, with one that is not asked, and with one that
//! is, in turns.
//!
//! Never compares with another machine's numbers.

use std::error::Error;

use eldr::llama::{Context, ContextParams, Model};
use serde_json::{Value, json};

use super::{
    Found,
    rig::{Rig, context, median, prompt_batch, step_batch, time, time_tapped},
};

const N_PROMPT: usize = 512;
/// Layers of a mask; the paper and the shipped calibrations keep a few.
const N_MASKED: usize = 3;

fn made(model: &Model, n_slots: u32, tap: bool) -> Result<Context, Box<dyn Error>> {
    let params = ContextParams { n_slots, n_ctx_slot: 1024, flash_attn: true, tap, ..ContextParams::default() };
    Ok(context(model, &params)?)
}

/// A 512-token prefill: no tap, a tap on the layers of a mask, a tap on every layer.
pub fn prefill(rig: &Rig) -> Found {
    let model = rig.load(&rig.timed)?;
    let shape = model.moe_shape().ok_or("a model with experts")?.clone();
    let usable = shape.usable();
    let mask = &usable[..N_MASKED.min(usable.len())];
    let (mut plain, mut tapped) = (made(&model, 1, false)?, made(&model, 1, true)?);
    let text: Vec<i32> = rig.prompts.iter().flatten().copied().take(N_PROMPT).collect();
    let batch = prompt_batch(&text, 0, 0);
    let (mut without, mut masked, mut whole) = (Vec::new(), Vec::new(), Vec::new());
    // The first round warms up.
    for round in 0..=rig.size.of(3, 50) {
        let none = time(&mut plain, &batch)?;
        plain.clear_seq(0)?;
        let mut of = [0.0; 2];
        for (layers, ms) in [mask, &usable].into_iter().zip(&mut of) {
            tapped.set_tap_layers(layers)?;
            let (took, picks) = time_tapped(&mut tapped, &batch)?;
            tapped.clear_seq(0)?;
            let n_picks: usize = picks.iter().flat_map(|(_, rows)| rows).map(Vec::len).sum();
            let wanted = layers.len() * text.len() * shape.n_expert_used as usize;
            if n_picks != wanted {
                return Err(format!("{n_picks} of {wanted} picks of {} layers were read", layers.len()).into());
            }
            *ms = took;
        }
        if round > 0 {
            without.push(none);
            masked.push(of[0] / none);
            whole.push(of[1] / none);
        }
    }
    let (ms, masked, whole) = (median(without), median(masked) - 1.0, median(whole) - 1.0);
    let found = format!(
        "{N_PROMPT} tokens take {ms:.2} ms; {:+.1} % with the tap on {} layers, {:+.1} % on all {}",
        masked * 100.0,
        mask.len(),
        whole * 100.0,
        usable.len()
    );
    Ok((found, json!({ "n_tokens": N_PROMPT, "plain_ms": ms, "masked": masked, "all": whole, "n_masked": mask.len() })))
}

/// Decode steps of several batch sizes: no tap, a tap that is not asked, a tap on every layer.
pub fn decode(rig: &Rig) -> Found {
    let model = rig.load(&rig.timed)?;
    let n_layer = model.moe_shape().ok_or("a model with experts")?.n_layer_moe();
    let mut rows = Vec::new();
    for batch in [1, 8, 16, 32] {
        rows.push(steps_of(rig, &model, n_layer, batch)?);
    }
    let words: Vec<String> =
        rows.iter().map(|row| format!("{}: {:.2} ms", row["batch"], row["plain_ms"].as_f64().unwrap_or(0.0))).collect();
    Ok((format!("a step of each batch without a tap: {}", words.join(", ")), json!(rows)))
}

fn steps_of(rig: &Rig, model: &Model, n_layer: usize, n_batch: usize) -> Result<Value, Box<dyn Error>> {
    let (mut plain, mut tapped) = (made(model, n_batch as u32, false)?, made(model, n_batch as u32, true)?);
    let all: Vec<i32> = rig.prompts.iter().flatten().copied().collect();
    let (mut without, mut idle, mut asked) = (Vec::new(), Vec::new(), Vec::new());
    let n_steps = rig.size.of(12, 200);
    for pos in 0..n_steps {
        // Every sequence is at another place of the prompts.
        let tokens: Vec<i32> = (0..n_batch).map(|seq| all[(seq * 97 + pos as usize) % all.len()]).collect();
        let batch = step_batch(&tokens, pos);
        let none = time(&mut plain, &batch)?;
        // One context for both, so that their tokens before are the same.
        if pos % 2 == 0 {
            idle.push(time(&mut tapped, &batch)? / none);
        } else {
            let (ms, picks) = time_tapped(&mut tapped, &batch)?;
            if picks.len() != n_layer {
                return Err(format!("{} of {n_layer} layers were read", picks.len()).into());
            }
            asked.push(ms / none);
        }
        // The first steps warm up.
        if pos >= 4 {
            without.push(none);
        }
    }
    let late = |values: Vec<f64>| median(values[2..].to_vec()) - 1.0;
    let ms = median(without);
    let per_s = n_batch as f64 * 1e3 / ms;
    Ok(json!({ "batch": n_batch, "plain_ms": ms, "tokens_per_s": per_s, "idle_tap": late(idle), "tap": late(asked) }))
}
