//! What a prompt's picks foretell of its request's, and what requests pick usually.
//!
//! Never asks what that costs.

use super::MarginalCost;
use crate::{route::survival::ONE, signature::ExpertCounts};

/// Requests over which the usual picks are averaged.
const USUAL_MEMORY: f32 = 256.0;

impl MarginalCost {
    /// The counts of a layer, if they are there.
    fn row<'a>(&self, counts: Option<&'a ExpertCounts>, layer: usize) -> Option<&'a [u32]> {
        let row = counts?.row(layer as u32)?;
        assert_eq!(row.len(), self.n_expert, "counts of another model");
        Some(row)
    }

    /// Predicts the request's picks into `picks`.
    pub(super) fn predict(&mut self, counts: Option<&ExpertCounts>) {
        const LAST: f32 = (ONE - 1) as f32;
        // Adding 2^23 rounds to a whole number, which then stands in the low bits.
        const ROUND: f32 = 8_388_608.0;
        let quantise = |q: f32| (q.min(LAST) + ROUND).to_bits() as u16;
        let one = f32::from(ONE);
        for layer in 0..self.n_layer {
            let row = self.row(counts, layer);
            let at = layer * self.n_expert..(layer + 1) * self.n_expert;
            let (usual, picks) = (&self.usual[at.clone()], &mut self.picks[at]);
            let n_tokens = counts.map_or(0, ExpertCounts::n_tokens);
            match row.filter(|_| n_tokens > 0) {
                Some(row) => {
                    let scale = one / (n_tokens as f32 + self.params.prior_tokens);
                    let prior = self.params.prior_tokens * scale;
                    for ((q, &g), &c) in picks.iter_mut().zip(usual).zip(row) {
                        *q = quantise(c.cast_signed() as f32 * scale + g * prior);
                    }
                }
                None => picks.iter_mut().zip(usual).for_each(|(q, &g)| *q = quantise(g * one)),
            }
        }
    }

    /// Learns how often experts are picked usually.
    pub(super) fn learn(&mut self, counts: Option<&ExpertCounts>) {
        let Some(counts) = counts.filter(|counts| counts.n_tokens() > 0) else { return };
        self.n_seen = (self.n_seen + 1.0).min(USUAL_MEMORY);
        let weight = 1.0 / (self.n_seen + 1.0);
        let scale = 1.0 / counts.n_tokens() as f32;
        for layer in 0..self.n_layer {
            let Some(row) = self.row(Some(counts), layer) else { continue };
            for (g, &c) in self.usual[layer * self.n_expert..].iter_mut().zip(row) {
                *g += (c as f32 * scale - *g) * weight;
            }
        }
    }
}
