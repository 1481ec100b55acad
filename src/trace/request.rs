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
        self.picks.len() / header.step_width().max(1)
    }

    /// The k experts that decode step `step` picked in MoE layer `layer`.
    pub fn step_picks(&self, header: &TraceHeader, step: usize, layer: usize) -> &[u16] {
        let k = header.shape.n_expert_used as usize;
        &self.picks[step * header.step_width() + layer * k..][..k]
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

/// Whether `request` can stand in a trace with `header`, with gate sums or without: what is wrong with it if not.
pub(super) fn check(header: &TraceHeader, gates: bool, request: &TraceRequest) -> Result<(), String> {
    let (layers, e, k) = (header.shape.usable().len(), header.shape.n_expert, header.shape.n_expert_used);
    let n_blocks = header.n_blocks(request.n_prompt);
    let width = header.block_width();
    if request.id.is_empty() || request.n_prompt == 0 {
        return Err("has no id or no prompt".to_owned());
    }
    if request.blocks.len() != n_blocks * width {
        let (found, wanted) = (request.blocks.len(), n_blocks * width);
        return Err(format!("has {found} prefill counts where {wanted} belong"));
    }
    for (row, counts) in request.blocks.chunks_exact(e.max(1) as usize).enumerate() {
        let (block, layer) = (row / layers, row % layers);
        let (sum, n) =
            (counts.iter().map(|&n| u32::from(n)).sum::<u32>(), header.n_block_tokens(request.n_prompt, block));
        if sum != n * k {
            return Err(format!(
                "has {sum} picks of {n} tokens in block {block}, row {layer}, where {k} a token belong"
            ));
        }
    }
    if !request.picks.len().is_multiple_of(header.step_width().max(1)) {
        let (found, width) = (request.picks.len(), header.step_width());
        return Err(format!("has {found} picks, which is no multiple of the {width} of a step"));
    }
    if let Some(expert) = request.picks.iter().find(|&&expert| u32::from(expert) >= e) {
        return Err(format!("picks expert {expert} of {e}"));
    }
    match &request.gates {
        None if gates => Err("lacks the gate's sums".to_owned()),
        Some(_) if !gates => Err("has gate sums in a trace without".to_owned()),
        Some(sums) if sums.probability.len() != width || sums.logit.len() != width => {
            Err(format!("has gate sums of another shape than the {width} of its layers and experts"))
        }
        Some(sums) if sums.probability.iter().chain(&sums.logit).any(|sum| !sum.is_finite()) => {
            Err("has a gate sum that is no number".to_owned())
        }
        _ => Ok(()),
    }
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
