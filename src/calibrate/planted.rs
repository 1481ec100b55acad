//! Requests with known structure, for tests.
//!
//! Never used outside tests.

use ndarray::{Array2, array};

use crate::{
    calibrate::{Calibration, CalibrationInput},
    rng::Rng,
    signature::ExpertCounts,
    types::MoeShape,
};

/// Requests of `n_domains` domains in turn, in a model of 6 MoE layers of which the last is the model's last.
///
/// In an informative layer, and in every layer in decode, a token picks 2 of its domain's own experts; elsewhere, and
/// with the chance `noise`, it picks any.
pub(super) struct Planted {
    pub n_requests: usize,
    pub n_domains: u32,
    pub n_expert: u32,
    pub informative: Vec<u32>,
    pub noise: f64,
    pub seed: u64,
}

impl Default for Planted {
    fn default() -> Self {
        Self { n_requests: 48, n_domains: 4, n_expert: 32, informative: (0..5).collect(), noise: 0.2, seed: 1 }
    }
}

impl Planted {
    fn shape(&self) -> MoeShape {
        MoeShape { layers: (0..6).collect(), n_layer: 6, n_expert: self.n_expert, n_expert_used: 2 }
    }

    /// Prefill and decode counts of each request.
    pub fn counts(&self) -> Vec<(ExpertCounts, ExpertCounts)> {
        self.counts_with(|expert| expert)
    }

    pub fn input(&self) -> CalibrationInput {
        self.input_with(|expert| expert)
    }

    /// With experts renamed.
    pub fn input_with(&self, rename: impl Fn(u32) -> u32) -> CalibrationInput {
        let mut input = CalibrationInput::new(self.shape(), "planted");
        for (i, (prefill, decode)) in self.counts_with(rename).iter().enumerate() {
            let domain = i as u32 % self.n_domains;
            input.push(format!("request-{i}"), Some(format!("domain-{domain}")), prefill, decode);
        }
        input
    }

    fn counts_with(&self, rename: impl Fn(u32) -> u32) -> Vec<(ExpertCounts, ExpertCounts)> {
        let shape = self.shape();
        let mut rng = Rng::new(self.seed);
        let own = self.n_expert / self.n_domains;
        let mut fill = |counts: &mut ExpertCounts, n_tokens: u32, domain: u32, informative: &[u32]| {
            counts.add_tokens(n_tokens);
            for layer in counts.layers().to_vec() {
                let informative = informative.contains(&layer);
                for _ in 0..n_tokens {
                    let any = !informative || rng.uniform() < self.noise;
                    let (first, n) = if any { (0, self.n_expert) } else { (domain * own, own) };
                    let one = rng.below(n as usize) as u32;
                    let other = (one + 1 + rng.below(n as usize - 1) as u32) % n;
                    counts.add(layer, &[rename(first + one), rename(first + other)]);
                }
            }
        };
        (0..self.n_requests as u32)
            .map(|i| {
                let domain = i % self.n_domains;
                let mut prefill = ExpertCounts::for_shape(&shape);
                let mut decode = ExpertCounts::new(&[0, 1, 2, 3, 4, 5], self.n_expert);
                fill(&mut prefill, 40, domain, &self.informative);
                fill(&mut decode, 40, domain, &[0, 1, 2, 3, 4, 5]);
                (prefill, decode)
            })
            .collect()
    }
}

/// A small calibration by hand: mask {0, 2} of 4 MoE layers of 4 experts, 2 workers.
pub(super) fn calibration() -> Calibration {
    let mut idf = Array2::from_shape_fn((4, 4), |(l, e)| (l + e) as f32);
    idf.row_mut(3).fill(0.0);
    Calibration {
        shape: MoeShape { layers: vec![1, 2, 3, 4], n_layer: 5, n_expert: 4, n_expert_used: 2 },
        fingerprint: "planted".into(),
        idf,
        layers: vec![0, 2],
        centroids: array![[0.6f32, 0.0, 0.8, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]],
        n_requests: 10,
        n_tokens: 1234,
        rho: 0.625,
        tau: 0.1,
        cost: 1.5,
        seed: 1,
        load_model: None,
    }
}
