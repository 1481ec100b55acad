//! Whether the tap reads on the device what the gate chose: known picks of planted models, and the CPU's of a trained one.
//!
//! Never times anything.

use eldr::llama::{Context, ContextParams, DecodeError};
use serde_json::json;

use super::{
    Found,
    rig::{Rig, context, prompt_batch, step_batch, time_tapped},
    support::planted::{self, Arch},
};

const CHUNK: usize = 64;
/// Largest share of a trained model's picks that another device's rounding may change.
const MAX_DIFFER: f64 = 0.02;

/// Every pick of prompts and decode steps, in each architecture that can be planted.
pub fn planted(rig: &Rig) -> Found {
    let dir = tempfile::tempdir()?;
    let mut n_picks = 0;
    for arch in Arch::MOE {
        let planted = planted::write(arch, &dir.path().join(arch.name()), 1);
        let model = rig.load(&planted.path)?;
        let params = ContextParams { n_slots: 2, n_ctx_slot: 256, tap: true, ..ContextParams::default() };
        let mut context = context(&model, &params)?;
        let usable = planted.shape.usable();
        let mut check = |tokens: &[i32], picks: super::rig::Picks, what: &str| {
            for (layer, rows) in picks {
                for (&token, row) in tokens.iter().zip(&rows) {
                    let known = planted.expected_picks(token, layer);
                    if row != known {
                        let name = arch.name();
                        return Err(format!(
                            "{name}, {what}, layer {layer}: token {token} picked {row:?}, not {known:?}"
                        ));
                    }
                    n_picks += row.len();
                }
            }
            Ok(())
        };
        let prompt = planted::some_tokens(100, 5);
        for (i, tokens) in prompt.chunks(32).enumerate() {
            let (_, picks) = time_tapped(&mut context, &prompt_batch(tokens, 32 * i as u32, 1))?;
            let prompts: super::rig::Picks = picks.into_iter().filter(|(layer, _)| usable.contains(layer)).collect();
            if prompts.len() != usable.len() {
                return Err(format!("{}: {} of {} layers were read", arch.name(), prompts.len(), usable.len()).into());
            }
            check(tokens, prompts, "prefill")?;
        }
        context.clear_seq(1)?;
        for pos in 0..8 {
            let tokens = planted::some_tokens(2, 100 + u64::from(pos));
            let (_, picks) = time_tapped(&mut context, &step_batch(&tokens, pos))?;
            check(&tokens, picks, "decode")?;
        }
    }
    let n_arch = Arch::MOE.len();
    Ok((format!("all {n_picks} picks of {n_arch} architectures"), json!({ "n_picks": n_picks, "n_arch": n_arch })))
}

/// By usable layer, picks of each expert.
fn counts(context: &mut Context, prompt: &[i32]) -> Result<Vec<Vec<u32>>, DecodeError> {
    let shape = context.model().moe_shape().expect("a model with experts").clone();
    let mut counts = vec![vec![0; shape.n_expert as usize]; shape.usable().len()];
    for (i, tokens) in prompt.chunks(CHUNK).enumerate() {
        context.decode_tapped(&prompt_batch(tokens, (CHUNK * i) as u32, 0), &mut |rows| {
            if let Some(counts) = counts.get_mut(rows.layer as usize) {
                rows.experts.iter().for_each(|&expert| counts[expert as usize] += 1);
            }
        })?;
    }
    context.clear_seq(0).expect("a slot");
    Ok(counts)
}

/// Counts of real prompts on the device and on the CPU: as many picks, and the same ones but for near ties.
pub fn trained(rig: &Rig) -> Found {
    let params = ContextParams { n_ctx_slot: 1024, tap: true, ..ContextParams::default() };
    let (mut here, mut there) = (context(&rig.model, &params)?, context(&rig.on_cpu, &params)?);
    let n_used = u64::from(rig.model.moe_shape().ok_or("a model with experts")?.n_expert_used);
    let (mut n_picks, mut n_differ, mut n_equal) = (0, 0, 0);
    let n = rig.size.of(8, 100).min(rig.prompts.len());
    for prompt in &rig.prompts[..n] {
        let (ours, cpus) = (counts(&mut here, prompt)?, counts(&mut there, prompt)?);
        n_equal += u32::from(ours == cpus);
        for (ours, cpus) in ours.iter().zip(&cpus) {
            let read: u64 = ours.iter().map(|&n| u64::from(n)).sum();
            let wanted = prompt.len() as u64 * n_used;
            if read != wanted {
                return Err(format!("{read} picks of a layer were read of a prompt that has {wanted}").into());
            }
            n_picks += read;
            n_differ += ours.iter().zip(cpus).map(|(a, b)| u64::from(a.saturating_sub(*b))).sum::<u64>();
        }
    }
    let share = n_differ as f64 / n_picks as f64;
    let limit = if rig.is_cpu() { 0.0 } else { MAX_DIFFER };
    let found = format!(
        "{n_differ} of {n_picks} picks differ ({:.3} %), {n_equal} of {n} prompts have equal counts",
        share * 100.0
    );
    if share > limit {
        return Err(format!("{found}; at most {} % may", limit * 100.0).into());
    }
    Ok((found, json!({ "n_picks": n_picks, "n_differ": n_differ, "n_prompts": n, "n_equal": n_equal })))
}
