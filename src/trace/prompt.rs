use crate::trace::{GateSums, TraceHeader};

/// Collects what a prompt picks, chunk by chunk, into the blocks of a [`crate::trace::TraceRequest`].
#[derive(Debug, Clone)]
pub struct PromptPicks {
    usable: Vec<u32>,
    n_expert: usize,
    n_expert_used: usize,
    n_block: usize,
    blocks: Vec<u8>,
    /// Sums of probabilities and logits, L' x E each.
    gates: Option<[Vec<f64>; 2]>,
    n_prompt: usize,
    /// By usable layer: tokens seen.
    n_seen: Vec<usize>,
}

impl PromptPicks {
    /// Nothing yet, for a prompt of `n_prompt` tokens in a trace with `header`; with `gates`, the gate's outputs too.
    pub fn new(header: &TraceHeader, n_prompt: u32, gates: bool) -> Self {
        let usable = header.shape.usable();
        let width = header.block_width();
        Self {
            n_expert: header.shape.n_expert as usize,
            n_expert_used: header.shape.n_expert_used as usize,
            n_block: header.n_block as usize,
            blocks: vec![0; header.n_blocks(n_prompt) * width],
            gates: gates.then(|| [vec![0.0; width], vec![0.0; width]]),
            n_prompt: n_prompt as usize,
            n_seen: vec![0; usable.len()],
            usable,
        }
    }

    /// Adds the tokens of a chunk that follow those seen so far in MoE layer `layer`: k experts each, and, if the gate
    /// is wanted, E probabilities and E logits each. Layers that are not usable are left out.
    pub fn add(&mut self, layer: u32, experts: &[u32], probabilities: &[f32], logits: &[f32]) {
        let Ok(row) = self.usable.binary_search(&layer) else { return };
        let (e, width) = (self.n_expert, self.usable.len() * self.n_expert);
        for experts in experts.chunks_exact(self.n_expert_used) {
            let block = self.n_seen[row] / self.n_block;
            for &expert in experts {
                self.blocks[block * width + row * e + expert as usize] += 1;
            }
            self.n_seen[row] += 1;
        }
        if let Some(gates) = &mut self.gates {
            for (sums, outputs) in gates.iter_mut().zip([probabilities, logits]) {
                for token in outputs.chunks_exact(e) {
                    sums[row * e..][..e].iter_mut().zip(token).for_each(|(sum, &x)| *sum += f64::from(x));
                }
            }
        }
    }

    /// The blocks' counts and the gate's sums; nothing if a layer has not seen every token of the prompt.
    pub fn finish(self) -> Option<(Vec<u8>, Option<GateSums>)> {
        let is_whole = self.n_seen.iter().all(|&n| n == self.n_prompt);
        let narrow = |sums: Vec<f64>| sums.into_iter().map(|sum| sum as f32).collect();
        let gates =
            self.gates.map(|[probability, logit]| GateSums { probability: narrow(probability), logit: narrow(logit) });
        is_whole.then_some((self.blocks, gates))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::MoeShape;

    #[test]
    fn blocks_do_not_depend_on_where_the_prompt_was_cut() {
        let shape = MoeShape { layers: vec![0, 1, 2], n_layer: 3, n_expert: 2, n_expert_used: 1 };
        let header = TraceHeader { shape, fingerprint: "planted".into(), n_block: 2 };
        let (low, high) = ([0, 1, 1, 1, 0], [1, 1, 0, 0, 0]);
        let outputs = [0.25, 0.75, 0.5, 0.5, 1.0, 0.0, 0.0, 1.0, 0.5, 0.5];
        let collected = |cuts: &[usize]| {
            let mut picks = PromptPicks::new(&header, 5, true);
            for cut in cuts.windows(2) {
                let (from, to) = (cut[0], cut[1]);
                let outputs = &outputs[2 * from..2 * to];
                picks.add(0, &low[from..to], outputs, outputs);
                picks.add(1, &high[from..to], outputs, &vec![-1.0; outputs.len()]);
                // The model's last layer shows the last token only.
                picks.add(2, &[0], &[], &[]);
            }
            picks.finish()
        };
        let sums = GateSums { probability: vec![2.25, 2.75, 2.25, 2.75], logit: vec![2.25, 2.75, -5.0, -5.0] };
        let whole = Some((vec![1, 1, 0, 2, 0, 2, 2, 0, 1, 0, 1, 0], Some(sums)));
        for cuts in [&[0, 5][..], &[0, 1, 5], &[0, 2, 4, 5], &[0, 3, 4, 5]] {
            assert_eq!(collected(cuts), whole, "{cuts:?}");
        }
        assert_eq!(collected(&[0, 4]), None, "the last token was lost");
    }
}
