//! Recorded requests of a model whose experts are known.

use eldr::{
    rng::Rng,
    trace::{Trace, TraceHeader, TraceRequest},
    types::MoeShape,
};

const N_DOMAINS: usize = 4;
const N_LAYER: usize = 4;
const N_EXPERT: usize = 32;
const K: usize = 3;
const N_PROMPT: usize = 48;
const N_BLOCK: usize = 16;

/// Requests of four domains in turn. With `structured`, a token picks from its domain's quarter of the experts three times
/// of four; otherwise from all, always. The last layer's prompt picks are not recorded.
pub fn planted(structured: bool, n_requests: usize, seed: u64) -> Trace {
    let mut rng = Rng::new(seed);
    let n = N_LAYER as u32;
    let shape = MoeShape { layers: (0..n).collect(), n_layer: n, n_expert: N_EXPERT as u32, n_expert_used: K as u32 };
    let header = TraceHeader { shape, fingerprint: "planted".into(), n_block: N_BLOCK as u32 };
    let requests = (0..n_requests).map(|i| request(i, structured, &mut rng)).collect();
    Trace { header, requests }
}

fn request(i: usize, structured: bool, rng: &mut Rng) -> TraceRequest {
    let domain = i % N_DOMAINS;
    let mut blocks = vec![0u8; N_PROMPT / N_BLOCK * (N_LAYER - 1) * N_EXPERT];
    for token in 0..N_PROMPT {
        for layer in 0..N_LAYER - 1 {
            for expert in pick(domain, structured, rng) {
                blocks[(token / N_BLOCK * (N_LAYER - 1) + layer) * N_EXPERT + usize::from(expert)] += 1;
            }
        }
    }
    let n_steps = 40 + rng.below(21);
    let picks = (0..n_steps * N_LAYER).flat_map(|_| pick(domain, structured, rng)).collect();
    TraceRequest {
        id: format!("request-{i}"),
        domain: Some(format!("domain-{domain}")),
        n_prompt: N_PROMPT as u32,
        blocks,
        picks,
        gates: None,
    }
}

fn pick(domain: usize, structured: bool, rng: &mut Rng) -> Vec<u16> {
    let own = N_EXPERT / N_DOMAINS;
    let mut picks = Vec::new();
    while picks.len() < K {
        let is_own = structured && rng.below(4) > 0;
        let expert = if is_own { domain * own + rng.below(own) } else { rng.below(N_EXPERT) } as u16;
        if !picks.contains(&expert) {
            picks.push(expert);
        }
    }
    picks
}
