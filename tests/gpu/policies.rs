//! Whether the likeliest tokens are the same under every policy: in the exact setting, and as requests are served.
//!
//! Never fails because they differ on a device that promises nothing; a CPU in the exact setting promises that they do not.

use std::error::Error;

use eldr::{
    engine::{EngineConfig, FlashAttention, LoadedModel, StreamEvent, WorkerList},
    route::PolicyKind,
    types::{Request, SamplingParams, Token},
};
use serde_json::json;

use super::{
    Found,
    rig::{Rig, shipped},
};

const N_TOKENS: u32 = 32;
const N_WORKERS: u32 = 4;

/// What each request got.
fn serve(rig: &Rig, exact: bool, policy: PolicyKind) -> Result<Vec<Vec<Token>>, Box<dyn Error>> {
    let name = rig.device.name();
    let mut config = EngineConfig {
        prefill: format!("1@{name}").parse::<WorkerList>()?,
        decode: format!("{N_WORKERS}@{name}").parse::<WorkerList>()?,
        n_slots: 8,
        n_ctx_slot: 512,
        n_threads: 1,
        exact,
        policy,
        calibration: rig.calibration.clone(),
        ..EngineConfig::default()
    };
    if exact {
        config.flash_attention = FlashAttention::Off;
    }
    let engine = LoadedModel::load(&shipped(), &config)?.engine(&config)?;
    let request = |prompt: &Vec<Token>| Request {
        prompt: prompt[..prompt.len().min(256)].to_vec(),
        max_tokens: N_TOKENS,
        sampling: SamplingParams { temperature: 0.0, ignore_eos: true, ..SamplingParams::default() },
        domain: None,
        deadline: None,
    };
    let n = rig.size.of(12, 64);
    let streams = rig.prompts.iter().step_by(3).take(n).map(|prompt| engine.submit(request(prompt)));
    let streams = streams.collect::<Result<Vec<_>, _>>()?;
    let mut outputs = Vec::new();
    for stream in streams {
        let mut tokens = Vec::new();
        for event in stream {
            match event {
                StreamEvent::Token { token, .. } => tokens.push(token),
                StreamEvent::Failed(error) => return Err(format!("{policy}: {error}").into()),
                _ => {}
            }
        }
        if tokens.len() != N_TOKENS as usize {
            return Err(format!("{policy}: a request got {} of {N_TOKENS} tokens", tokens.len()).into());
        }
        outputs.push(tokens);
    }
    Ok(outputs)
}

pub fn greedy(rig: &Rig) -> Found {
    let mut policies = vec![PolicyKind::RoundRobin, PolicyKind::LeastLoaded, PolicyKind::MarginalCost];
    if rig.calibration.is_some() {
        policies.push(PolicyKind::LocalityBand);
    }
    let (mut rows, mut words) = (Vec::new(), Vec::new());
    for exact in [true, false] {
        let setting = if exact { "exact" } else { "as served" };
        let first = serve(rig, exact, policies[0])?;
        for &policy in &policies[1..] {
            let other = serve(rig, exact, policy)?;
            let n = first.len();
            let n_equal = first.iter().zip(&other).filter(|(a, b)| a == b).count();
            let same = |(a, b): (&Vec<Token>, &Vec<Token>)| a.iter().zip(b).take_while(|(a, b)| a == b).count();
            let n_same: usize = first.iter().zip(&other).map(same).sum();
            let share = n_same as f64 / (n * N_TOKENS as usize) as f64;
            words.push(format!("{setting}, {policy}: {n_equal} of {n}"));
            rows.push(json!({
                "setting": setting, "policy": policy.name(), "n_requests": n, "n_equal": n_equal, "tokens_until_they_part": share,
            }));
            if exact && rig.is_cpu() && n_equal < n {
                return Err(format!("{}; in the exact setting a CPU must give the same", words.join("; ")).into());
            }
        }
    }
    Ok((format!("equal to round robin's: {}", words.join("; ")), json!(rows)))
}
