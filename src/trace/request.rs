use crate::{signature::ExpertCounts, trace::TraceHeader};

/// One recorded request.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceRequest {
    /// Its name, unique in the trace.
    pub id: String,
    /// Its label, if it has one.
    pub domain: Option<String>,
    /// Prompt tokens.
    pub n_prompt: u32,
    /// Prefill counts: blocks x L' x E, L' the model's usable layers ([`crate::types::MoeShape::usable`]).
    pub blocks: Vec<u8>,
    /// Picks of the decode steps: steps x L x k expert ids. An answer of n tokens has n - 1 steps, because the prefill
    /// draws the first one.
    pub picks: Vec<u16>,
    /// What the gates said in prefill, if it was asked for.
    pub gates: Option<GateSums>,
}

/// The gate's outputs for every expert, summed over the prompt's tokens: L' x E each, L' the usable layers.
#[derive(Debug, Clone, PartialEq)]
pub struct GateSums {
    /// Probabilities.
    pub probability: Vec<f32>,
    /// Logits.
    pub logit: Vec<f32>,
}

impl TraceRequest {
    /// Decode steps recorded.
    pub fn n_steps(&self, header: &TraceHeader) -> usize {
        self.picks.len() / step_width(header)
    }

    /// The k experts that decode step `step` picked in MoE layer `layer`.
    pub fn step_picks(&self, header: &TraceHeader, step: usize, layer: usize) -> &[u16] {
        let k = header.shape.n_expert_used as usize;
        &self.picks[step * step_width(header) + layer * k..][..k]
    }

    /// Prefill counts of the whole prompt, over the usable layers.
    pub fn prefill_counts(&self, header: &TraceHeader) -> ExpertCounts {
        let layers = header.shape.usable();
        let width = layers.len() * header.shape.n_expert as usize;
        let mut sums = vec![0u32; width];
        for block in self.blocks.chunks_exact(width.max(1)) {
            sums.iter_mut().zip(block).for_each(|(sum, &n)| *sum += u32::from(n));
        }
        ExpertCounts::from_rows(&layers, header.shape.n_expert, self.n_prompt, sums)
    }

    /// Picks of all decode steps, counted over every MoE layer.
    pub fn decode_counts(&self, header: &TraceHeader) -> ExpertCounts {
        let (n_layer, e) = (header.shape.n_layer_moe(), header.shape.n_expert as usize);
        let mut sums = vec![0u32; n_layer * e];
        let n_steps = self.n_steps(header);
        for (step, layer) in (0..n_steps).flat_map(|step| (0..n_layer).map(move |layer| (step, layer))) {
            for &expert in self.step_picks(header, step, layer) {
                sums[layer * e + usize::from(expert)] += 1;
            }
        }
        let layers: Vec<u32> = (0..n_layer as u32).collect();
        ExpertCounts::from_rows(&layers, header.shape.n_expert, n_steps as u32, sums)
    }
}

/// Expert ids a decode step has: L x k.
fn step_width(header: &TraceHeader) -> usize {
    header.shape.n_layer_moe() * header.shape.n_expert_used as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::MoeShape;

    #[test]
    fn counts_sum_over_blocks_and_steps() {
        let shape = MoeShape { layers: vec![0, 1], n_layer: 2, n_expert: 3, n_expert_used: 1 };
        let header = TraceHeader { shape, fingerprint: "planted".into(), n_block: 2 };
        let request = TraceRequest {
            id: "a".into(),
            domain: None,
            n_prompt: 3,
            blocks: vec![2, 0, 0, 0, 0, 1],
            picks: vec![0, 2, 1, 2],
            gates: None,
        };
        let prefill = request.prefill_counts(&header);
        assert_eq!((prefill.n_tokens(), prefill.row(0), prefill.row(1)), (3, Some(&[2, 0, 1][..]), None));
        assert_eq!((request.n_steps(&header), request.step_picks(&header, 1, 0)), (2, &[1u16][..]));
        let decode = request.decode_counts(&header);
        assert_eq!((decode.row(0), decode.row(1)), (Some(&[1, 1, 0][..]), Some(&[0, 0, 2][..])));
        assert!(prefill.conserves(1) && decode.conserves(1));
    }
}
