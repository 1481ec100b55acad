//! What a layer's gate says of every expert: logits and probabilities, read from llama.cpp's graph on demand.
//!
//! Never guesses which node is which: what a node holds follows from its name and from the operation that made it.
//!
//! `build_moe_ffn` (llama-graph.cpp) names the logits `ffn_moe_logits`, those with a bias `ffn_moe_logits_biased`, and
//! what it makes of them `ffn_moe_probs`. Where the softmax comes only after the choice (gpt-oss), the last two are one
//! node, which then has the last name and holds logits.

use llama_cpp_sys_2 as sys;

/// A node of the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GateNode {
    Logits,
    LogitsBiased,
    Probabilities,
}

impl GateNode {
    /// The node that a name stands for, between `ffn_moe_` and the layer's number.
    pub fn of_name(name: &[u8]) -> Option<Self> {
        match name {
            b"logits" => Some(Self::Logits),
            b"logits_biased" => Some(Self::LogitsBiased),
            b"probs" => Some(Self::Probabilities),
            _ => None,
        }
    }
}

/// One layer's outputs for the batch that runs: E numbers for each token, by node.
#[derive(Debug, Default)]
pub(super) struct GateOutputs {
    logits: Vec<f32>,
    biased: Vec<f32>,
    probabilities: Vec<f32>,
    /// `ffn_moe_probs` is the node of the logits.
    chooses_by_logit: bool,
}

impl GateOutputs {
    /// Forgets the batch before.
    pub fn clear(&mut self) {
        self.logits.clear();
        self.biased.clear();
        self.probabilities.clear();
        self.chooses_by_logit = false;
    }

    /// Reads a computed node behind those of earlier ubatches.
    pub fn read(&mut self, kind: GateNode, node: &sys::ggml_tensor, n_expert: u32) -> Result<(), String> {
        let out = match kind {
            GateNode::Logits => &mut self.logits,
            GateNode::LogitsBiased => &mut self.biased,
            GateNode::Probabilities => {
                self.chooses_by_logit = matches!(node.op, sys::GGML_OP_MUL_MAT | sys::GGML_OP_ADD);
                &mut self.probabilities
            }
        };
        read_columns(node, n_expert as usize, out)
    }

    /// Puts the outputs of all `n_tokens` tokens in order; the logits are those the choice is made from.
    ///
    /// A gate that chooses by logit has no probabilities of its own: they are the softmax of its logits, of which its
    /// weights are the chosen ones, scaled. Errors: a layer whose graph has no such nodes.
    pub fn finish(&mut self, n_tokens: usize, n_expert: u32) -> Result<(), String> {
        let e = n_expert as usize;
        if self.chooses_by_logit {
            self.logits = std::mem::take(&mut self.probabilities);
            self.probabilities = self.logits.chunks_exact(e).flat_map(softmax).collect();
        } else if !self.biased.is_empty() {
            std::mem::swap(&mut self.logits, &mut self.biased);
        }
        for (what, outputs) in [("probabilities", &self.probabilities), ("logits", &self.logits)] {
            if outputs.len() != n_tokens * e {
                return Err(match outputs.len() / e {
                    0 => format!("its gate shows no {what}: record without --gates"),
                    n => format!("its gate shows {what} of {n} tokens for a batch of {n_tokens}"),
                });
            }
        }
        Ok(())
    }

    /// Probabilities and logits, once finished.
    pub fn outputs(&self) -> (&[f32], &[f32]) {
        (&self.probabilities, &self.logits)
    }
}

fn softmax(logits: &[f32]) -> Vec<f32> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f32> = logits.iter().map(|&logit| (logit - most).exp()).collect();
    let sum: f32 = powers.iter().sum();
    powers.iter().map(|power| power / sum).collect()
}

/// Appends every column of `node`, `n_expert` floats each.
fn read_columns(node: &sys::ggml_tensor, n_expert: usize, out: &mut Vec<f32>) -> Result<(), String> {
    let bytes = n_expert * size_of::<f32>();
    let fits = node.type_ == sys::GGML_TYPE_F32
        && usize::try_from(node.ne[0]) == Ok(n_expert)
        && node.ne[2] == 1
        && node.ne[3] == 1
        && node.nb[0] == size_of::<f32>()
        && node.nb[1] >= bytes;
    let (Ok(columns), true) = (usize::try_from(node.ne[1]), fits) else {
        return Err(format!(
            "the gate's outputs have type {}, shape {:?} and strides {:?} where {n_expert} floats a token were expected",
            node.type_, node.ne, node.nb
        ));
    };
    let start = out.len();
    out.resize(start + n_expert * columns, 0.0);
    let to = out[start..].as_mut_ptr();
    // SAFETY: the node is computed; each of `columns` rows of `bytes` bytes lies inside it, `nb[1]` apart, and the
    // vector has room for them behind `start`, packed.
    unsafe { sys::ggml_backend_tensor_get_2d(node, to.cast(), 0, bytes, columns, node.nb[1], bytes) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logits_are_those_the_choice_is_made_from() {
        let outputs = |logits: &[f32], biased: &[f32], probabilities: &[f32], chooses_by_logit| GateOutputs {
            logits: logits.to_vec(),
            biased: biased.to_vec(),
            probabilities: probabilities.to_vec(),
            chooses_by_logit,
        };
        let mut plain = outputs(&[1.0, 2.0], &[], &[0.25, 0.75], false);
        assert_eq!(plain.finish(1, 2), Ok(()));
        assert_eq!(plain.outputs(), (&[0.25, 0.75][..], &[1.0, 2.0][..]));
        let mut biased = outputs(&[1.0, 2.0], &[3.0, 2.0], &[0.75, 0.25], false);
        assert_eq!(biased.finish(1, 2), Ok(()));
        assert_eq!(biased.outputs(), (&[0.75, 0.25][..], &[3.0, 2.0][..]));
        let mut by_logit = outputs(&[1.0, 2.0, 0.0, 0.0], &[], &[5.0, 5.0, -1.0, -1.0], true);
        assert_eq!(by_logit.finish(2, 2), Ok(()));
        assert_eq!(by_logit.outputs(), (&[0.5; 4][..], &[5.0, 5.0, -1.0, -1.0][..]));
        let error = outputs(&[], &[], &[0.25, 0.75], false).finish(1, 2).expect_err("no logits");
        assert!(error.contains("shows no logits"), "{error}");
        let error = outputs(&[1.0, 2.0], &[], &[0.25, 0.75], false).finish(2, 2).expect_err("a token is lost");
        assert!(error.contains("probabilities of 1 tokens for a batch of 2"), "{error}");
    }

    #[test]
    fn a_softmax_adds_up_and_does_not_overflow() {
        assert_eq!(softmax(&[1000.0, 1000.0]), [0.5, 0.5]);
        let third = softmax(&[0.0, f32::ln(3.0)]);
        assert!((third[0] - 0.25).abs() < 1e-6 && (third[1] - 0.75).abs() < 1e-6, "{third:?}");
    }
}
