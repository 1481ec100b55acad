//! Requests of planted domains: which experts each token picks is a seeded draw, so every policy sees the same traffic.

use std::sync::Arc;

use eldr::{
    Calibration,
    calibrate::{CalibrationInput, CalibrationParams, fit},
    rng::{Rng, mix},
    signature::{ExpertCounts, Signature},
    types::MoeShape,
};

pub const N_LAYERS: u32 = 5;
pub const N_EXPERTS: u32 = 64;
pub const N_USED: usize = 4;
pub const N_DOMAINS: usize = 5;
/// Each domain has so many topics, which share part of its experts.
const N_TOPICS: usize = 4;
const N_PROMPT: u32 = 96;

/// Shares of the domains; they sum to 1.
pub type Mix = [f64; N_DOMAINS];

/// A model whose gate is planted: the experts each topic and each domain prefers in each layer.
pub struct World {
    seed: u64,
    /// For each topic of each domain and each layer: 5 experts of the topic, then 10 of its domain.
    preferred: Vec<Vec<[u32; 15]>>,
}

#[derive(Clone)]
pub struct Planted {
    pub topic: usize,
    pub n_output: u32,
    rng: Rng,
}

impl World {
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::new(mix(seed));
        let mut preferred = Vec::new();
        for _ in 0..N_DOMAINS {
            let domain: Vec<[u32; 15]> = (0..N_LAYERS).map(|_| some_experts(&mut rng)).collect();
            for _ in 0..N_TOPICS {
                preferred.push(
                    domain
                        .iter()
                        .map(|domain| {
                            let mut experts: [u32; 15] = some_experts(&mut rng);
                            experts[5..].copy_from_slice(&domain[..10]);
                            experts
                        })
                        .collect(),
                );
            }
        }
        Self { seed, preferred }
    }

    /// Request `index` of the traffic with this mix of domains.
    pub fn request(&self, index: u64, mixture: &Mix) -> Planted {
        let mut rng = Rng::new(mix(self.seed ^ 0xabcd).wrapping_add(mix(index)));
        let mut left = rng.uniform();
        let domain = mixture.iter().position(|share| {
            left -= share;
            left < 0.0
        });
        let domain = domain.unwrap_or_else(|| mixture.iter().rposition(|&share| share > 0.0).unwrap());
        let topic = domain * N_TOPICS + rng.below(N_TOPICS);
        Planted { topic, n_output: 384 + rng.below(256) as u32, rng }
    }

    /// The experts the request's next token picks in `layer`.
    pub fn picks(&self, request: &mut Planted, layer: u32) -> [u32; N_USED] {
        let preferred = &self.preferred[request.topic][layer as usize];
        let rng = &mut request.rng;
        let mut picks = [u32::MAX; N_USED];
        for i in 0..N_USED {
            loop {
                let expert = match rng.below(20) {
                    0..11 => preferred[rng.below(5)],
                    11..17 => preferred[5 + rng.below(10)],
                    _ => rng.below(N_EXPERTS as usize) as u32,
                };
                if !picks[..i].contains(&expert) {
                    picks[i] = expert;
                    break;
                }
            }
        }
        picks
    }

    fn counts(&self, request: &mut Planted, n_tokens: u32, n_layers: u32) -> ExpertCounts {
        let mut counts = ExpertCounts::new(&(0..n_layers).collect::<Vec<_>>(), N_EXPERTS);
        counts.add_tokens(n_tokens);
        for _ in 0..n_tokens {
            for layer in 0..n_layers {
                counts.add(layer, &self.picks(request, layer));
            }
        }
        counts
    }

    /// Prefills the request.
    pub fn prefill(&self, request: &mut Planted, calibration: &Calibration) -> Signature {
        let counts = self.counts(request, N_PROMPT, N_LAYERS - 1);
        calibration.signature(&counts).expect("planted picks weigh something")
    }

    /// A calibration for `n_workers` workers on 240 requests of this mix, apart from the traffic.
    pub fn calibration(&self, n_workers: usize, mixture: &Mix) -> Arc<Calibration> {
        let shape = MoeShape {
            layers: (0..N_LAYERS).collect(),
            n_layer: N_LAYERS,
            n_expert: N_EXPERTS,
            n_expert_used: N_USED as u32,
        };
        let mut input = CalibrationInput::new(shape, "planted");
        for i in 0..240 {
            let mut request = self.request(1_000_000 + i, mixture);
            let prefill = self.counts(&mut request, N_PROMPT, N_LAYERS - 1);
            let decode = self.counts(&mut request, 64, N_LAYERS);
            input.push(format!("request-{i}"), None, &prefill, &decode);
        }
        Arc::new(fit(&input, &CalibrationParams::new(n_workers)).unwrap().0)
    }
}

fn some_experts(rng: &mut Rng) -> [u32; 15] {
    let mut experts: Vec<u32> = (0..N_EXPERTS).collect();
    for i in 0..15 {
        let other = i + rng.below(experts.len() - i);
        experts.swap(i, other);
    }
    experts[..15].try_into().unwrap()
}
