//! Traces with known structure, for tests.
//!
//! Never used outside tests.

use crate::{
    rng::Rng,
    trace::{Trace, TraceHeader, TraceRequest},
    types::MoeShape,
};

/// Which experts the requests of a domain pick from.
#[derive(Clone, Copy)]
pub(super) enum Pools {
    /// A share of its own.
    Disjoint,
    /// Domain d picks from the first 1/2^d of the experts.
    Nested,
    /// All experts, whatever the domain.
    Noise,
    /// Expert 0 in every token, the others as in `Disjoint`.
    Generalist,
    /// In prefill only this layer shows the domain; in decode all do.
    OneLayer(usize),
}

/// Requests of `n_domains` domains in turn, in a model whose last layer is an MoE layer.
pub(super) struct Planted {
    pub pools: Pools,
    pub n_requests: usize,
    pub n_domains: usize,
    pub n_layer: usize,
    pub n_expert: usize,
    pub k: usize,
    /// Shortest and longest output, in decode steps.
    pub n_steps: (usize, usize),
    pub seed: u64,
}

impl Default for Planted {
    fn default() -> Self {
        Self {
            pools: Pools::Disjoint,
            n_requests: 192,
            n_domains: 4,
            n_layer: 4,
            n_expert: 32,
            k: 3,
            n_steps: (40, 60),
            seed: 1,
        }
    }
}

const N_PROMPT: usize = 40;
const N_BLOCK: usize = 16;

impl Planted {
    pub fn trace(&self) -> Trace {
        let n = self.n_layer as u32;
        let shape = MoeShape {
            layers: (0..n).collect(),
            n_layer: n,
            n_expert: self.n_expert as u32,
            n_expert_used: self.k as u32,
        };
        let mut rng = Rng::new(self.seed);
        let requests = (0..self.n_requests).map(|i| self.request(i, &mut rng)).collect();
        Trace { header: TraceHeader { shape, fingerprint: "planted".into(), n_block: N_BLOCK as u32 }, requests }
    }

    fn request(&self, i: usize, rng: &mut Rng) -> TraceRequest {
        let domain = i % self.n_domains;
        let (e, n_usable) = (self.n_expert, self.n_layer - 1);
        let mut blocks = vec![0u8; N_PROMPT.div_ceil(N_BLOCK) * n_usable * e];
        for token in 0..N_PROMPT {
            for layer in 0..n_usable {
                let shows = !matches!(self.pools, Pools::OneLayer(only) if only != layer);
                for expert in self.pick(if shows { Some(domain) } else { None }, rng) {
                    blocks[(token / N_BLOCK * n_usable + layer) * e + usize::from(expert)] += 1;
                }
            }
        }
        let n_steps = self.n_steps.0 + rng.below(self.n_steps.1 - self.n_steps.0 + 1);
        let picks = (0..n_steps * self.n_layer).flat_map(|_| self.pick(Some(domain), rng)).collect();
        TraceRequest {
            id: format!("request-{i}"),
            domain: Some(format!("domain-{domain}")),
            n_prompt: N_PROMPT as u32,
            blocks,
            picks,
            gates: None,
        }
    }

    /// k different experts from the domain's pool, or from all.
    fn pick(&self, domain: Option<usize>, rng: &mut Rng) -> Vec<u16> {
        let own = self.n_expert / self.n_domains;
        let (first, n) = match (self.pools, domain) {
            (Pools::Noise, _) | (_, None) => (0, self.n_expert),
            (Pools::Nested, Some(domain)) => (0, self.n_expert >> domain),
            (_, Some(domain)) => (domain * own, own),
        };
        let generalist = matches!(self.pools, Pools::Generalist);
        let mut picks: Vec<u16> = if generalist { vec![0] } else { Vec::new() };
        while picks.len() < self.k {
            let expert = (first + rng.below(n)) as u16;
            if !picks.contains(&expert) {
                picks.push(expert);
            }
        }
        picks
    }
}
