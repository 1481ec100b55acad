//! Whether a sequence that moves to another context goes on as one that stays: logits of the same next tokens, compared.
//!
//! Never compares drawn tokens, which hide small differences and enlarge others.

use std::error::Error;

use eldr::llama::{Context, ContextParams, Model};
use serde_json::json;

use super::{
    Found,
    rig::{Rig, context, prompt_batch},
};

const N_PROMPT: usize = 128;
const N_NEXT: usize = 16;
/// How far from the stayed one a moved sequence may be, as a share of how far one without its prompt is.
const MAX_SHARE: f64 = 0.1;

fn made(model: &Model, flash_attn: bool) -> Result<Context, Box<dyn Error>> {
    let params = ContextParams { n_slots: 3, n_ctx_slot: 256, flash_attn, ..ContextParams::default() };
    Ok(context(model, &params)?)
}

/// The logits after each of `tokens`, run one by one in `seq` from `pos` on.
fn go_on(context: &mut Context, tokens: &[i32], pos: usize, seq: u32) -> Result<Vec<f32>, Box<dyn Error>> {
    let mut logits = Vec::new();
    for (i, token) in tokens.iter().enumerate() {
        context.decode(&prompt_batch(&[*token], (pos + i) as u32, seq))?;
        logits.extend_from_slice(context.logits(0));
    }
    Ok(logits)
}

/// Mean distance of two lists of logits.
fn apart(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())).sum::<f64>() / a.len() as f64
}

/// Distance of the moved sequence, and of one without its prompt, from the one that stayed.
fn moved(rig: &Rig, from: &Model, to: &Model, flash_attn: bool) -> Result<(f64, f64), Box<dyn Error>> {
    let text: Vec<i32> = rig.prompts.iter().flatten().copied().take(N_PROMPT + N_NEXT).collect();
    let (prompt, next) = text.split_at(N_PROMPT);
    let (mut here, mut there) = (made(from, flash_attn)?, made(to, flash_attn)?);
    here.decode(&prompt_batch(prompt, 0, 1))?;
    let state = here.state_get(1)?;
    let stayed = go_on(&mut here, next, N_PROMPT, 1)?;
    there.state_set(2, &state, N_PROMPT as u32)?;
    let went = go_on(&mut there, next, N_PROMPT, 2)?;
    there.clear_seq(2)?;
    let without = go_on(&mut there, next, 0, 2)?;
    Ok((apart(&stayed, &went), apart(&stayed, &without)))
}

/// Between both settings of flash attention; `exact` wants equal bits.
fn judge(rig: &Rig, from: &Model, to: &Model, exact: bool) -> Found {
    let mut measured = Vec::new();
    let mut words = Vec::new();
    for flash_attn in [false, true] {
        let (distance, without) = moved(rig, from, to, flash_attn)?;
        let name = if flash_attn { "on" } else { "off" };
        words.push(format!(
            "flash attention {name}: mean difference of logits {distance:.5}, without the prompt {without:.2}"
        ));
        let limit = if exact { 0.0 } else { without * MAX_SHARE };
        if distance > limit {
            return Err(format!("{}; at most {limit:.5} is allowed", words.join("; ")).into());
        }
        measured.push(json!({ "flash_attn": flash_attn, "distance": distance, "without_prompt": without }));
    }
    Ok((words.join("; "), json!(measured)))
}

/// Between two contexts of the device; on the CPU to the bit.
pub fn within(rig: &Rig) -> Found {
    judge(rig, &rig.model, &rig.model, rig.is_cpu())
}

pub fn to_cpu(rig: &Rig) -> Found {
    judge(rig, &rig.model, &rig.on_cpu, rig.is_cpu())
}

pub fn from_cpu(rig: &Rig) -> Found {
    judge(rig, &rig.on_cpu, &rig.model, rig.is_cpu())
}
