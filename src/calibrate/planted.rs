//! Requests with known structure, for tests.
//!
//! Never used outside tests.

use ndarray::{Array2, array};

use crate::{
    calibrate::{Calibration, CalibrationInput, TauOrigin},
    rng::Rng,
    signature::ExpertCounts,
    types::MoeShape,
};

/// Requests of `n_domains` domains in turn, in a model of 6 MoE layers of which the last is the model's last.
///
/// In an informative layer, and in every layer in decode, a token picks 2 of its domain's own experts; elsewhere, and
/// with the chance `noise`, it picks any. In a coarse layer two neighbouring domains share their experts.
pub(super) struct Planted {
    pub n_requests: usize,
    pub n_domains: u32,
    pub n_expert: u32,
    pub informative: Vec<u32>,
    pub coarse: Vec<u32>,
    pub noise: f64,
    pub seed: u64,
}

impl Default for Planted {
    fn default() -> Self {
        Self {
            n_requests: 48,
            n_domains: 4,
            n_expert: 32,
            informative: (0..5).collect(),
            coarse: vec![],
            noise: 0.2,
            seed: 1,
        }
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
        self.counts_among(self.n_expert, rename)
    }

    /// With picks among the first `n_expert` experts only.
    fn counts_among(&self, n_expert: u32, rename: impl Fn(u32) -> u32) -> Vec<(ExpertCounts, ExpertCounts)> {
        let shape = self.shape();
        let mut rng = Rng::new(self.seed);
        let own = n_expert / self.n_domains;
        let mut fill = |counts: &mut ExpertCounts, n_tokens: u32, domain: u32, informative: &[u32]| {
            counts.add_tokens(n_tokens);
            for layer in counts.layers().to_vec() {
                let informative = informative.contains(&layer);
                let own =
                    if self.coarse.contains(&layer) { (domain / 2 * 2 * own, 2 * own) } else { (domain * own, own) };
                for _ in 0..n_tokens {
                    let any = !informative || rng.uniform() < self.noise;
                    let (first, n) = if any { (0, n_expert) } else { own };
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
        tau_origin: TauOrigin::Default,
        capacity: None,
        cost: 1.5,
        seed: 1,
        load_model: None,
        verdict: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::{CalibrationParams, CalibrationReport, Transform, fit, transform_rhos};

    fn ok(input: &CalibrationInput, n_workers: usize) -> (Calibration, CalibrationReport) {
        fit(input, &CalibrationParams::new(n_workers)).expect("a good input")
    }

    #[test]
    fn nested_domains_are_split_where_the_workers_say() {
        let input = Planted { coarse: vec![0, 1, 5], noise: 0.1, ..Planted::default() }.input();
        let (_, two) = ok(&input, 2);
        assert_eq!(two.purity, Some(0.5));
        // Neighbours stay together: requests 0 and 1 (mod 4) on one worker, 2 and 3 on the other.
        for (i, worker) in two.workers.iter().enumerate() {
            assert_eq!(*worker, Some(i as u32 % 4 / 2), "request {i}");
        }
        let (_, four) = ok(&input, 4);
        assert_eq!(four.purity, Some(1.0));
        // Three distances in decode: within a domain, to the neighbour, to the others. Both kinds of layers are needed.
        let is_coarse = |layer: &&u32| **layer < 2;
        let n_coarse = four.layers.iter().filter(is_coarse).count();
        assert!(n_coarse > 0 && n_coarse < four.layers.len(), "{:?}", four.layers);
    }

    #[test]
    fn idf_silences_a_generalist() {
        // Expert 32 belongs to no domain. Every prompt picks it, some hundreds of times as often as others.
        let planted = Planted { n_expert: 33, ..Planted::default() };
        let (mut with, mut rng) = (CalibrationInput::new(planted.shape(), "planted"), Rng::new(8));
        for (i, (mut prefill, decode)) in planted.counts_among(32, |expert| expert).into_iter().enumerate() {
            for layer in prefill.layers().to_vec() {
                let n = 1 + 10 * rng.below(10) * rng.below(10);
                prefill.add(layer, &vec![32; n]);
            }
            with.push(format!("request-{i}"), None, &prefill, &decode);
        }
        let mut without = CalibrationInput::new(planted.shape(), "planted");
        for (i, (prefill, decode)) in planted.counts_among(32, |expert| expert).into_iter().enumerate() {
            without.push(format!("request-{i}"), None, &prefill, &decode);
        }
        let ((loud, loud_report), (quiet, quiet_report)) = (ok(&with, 4), ok(&without, 4));
        assert!((0..5).all(|layer| loud.idf[[layer, 32]] == 0.0 && quiet.idf[[layer, 32]] > 3.0));
        assert_eq!((loud.layers, loud.centroids, loud.rho), (quiet.layers, quiet.centroids, quiet.rho));
        assert_eq!(loud_report.workers, quiet_report.workers);
        // Without weights it drowns the domains.
        let rho = |input, transform: Transform| {
            let of = transform_rhos(input, None, 1).into_iter().find(|r| r.transform == transform);
            of.and_then(|r| r.rho).expect("spread")
        };
        let drowned = rho(&with, Transform::Count);
        assert!(drowned < rho(&with, Transform::CountIdf) && drowned < rho(&without, Transform::Count), "{drowned}");
    }

    #[test]
    fn another_order_of_requests_gives_the_same_mask_and_groups() {
        let planted = Planted::default();
        let counts = planted.counts();
        let order: Vec<usize> = (0..counts.len()).map(|i| (i * 7 + 5) % counts.len()).collect();
        let mut moved = CalibrationInput::new(planted.shape(), "planted");
        for &i in &order {
            moved.push(i.to_string(), None, &counts[i].0, &counts[i].1);
        }
        let ((first, there), (second, here)) = (ok(&planted.input(), 4), ok(&moved, 4));
        assert_eq!((first.idf, first.layers, first.rho), (second.idf, second.layers, second.rho));
        assert_eq!((&there.layer_order, &there.rho_curve), (&here.layer_order, &here.rho_curve));
        for (a, &i) in order.iter().enumerate() {
            for (b, &j) in order.iter().enumerate() {
                assert_eq!(here.workers[a] == here.workers[b], there.workers[i] == there.workers[j]);
            }
        }
    }
}
