use serde::{Deserialize, Serialize};

/// The mixture-of-experts part of a model: which layers have experts, how many, and how many a token picks.
///
/// Everywhere in eldr an *MoE layer* is named by its row in `layers` (0 is the first layer with experts), because
/// counts, idf and masks are matrices with one row for each of them. `layers` maps a row to llama.cpp's layer number.
///
/// ```
/// use eldr::types::MoeShape;
///
/// // A model of 4 layers whose first is dense. What its last layer picks does not show in prompts.
/// let shape = MoeShape { layers: vec![1, 2, 3], n_layer: 4, n_expert: 64, n_expert_used: 4 };
/// assert_eq!((shape.n_layer_moe(), shape.usable()), (3, vec![0, 1]));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoeShape {
    /// llama.cpp's number of each layer that has experts, ascending.
    pub layers: Vec<u32>,
    /// All layers of the model, dense ones too.
    pub n_layer: u32,
    /// Experts a layer (E).
    pub n_expert: u32,
    /// Experts a token picks in a layer (k).
    pub n_expert_used: u32,
}

impl MoeShape {
    /// Layers with experts (L).
    pub fn n_layer_moe(&self) -> usize {
        self.layers.len()
    }

    /// MoE layers whose prefill counts are the prompt's, ascending.
    ///
    /// llama.cpp computes the model's last layer only for rows whose logits were asked for (one token of a prompt),
    /// so it never belongs to a signature.
    pub fn usable(&self) -> Vec<u32> {
        (0..self.layers.len()).filter(|&row| self.layers[row] + 1 != self.n_layer).map(|row| row as u32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_layer_of_the_model_is_not_usable() {
        let shape = MoeShape { layers: vec![1, 2, 3], n_layer: 4, n_expert: 8, n_expert_used: 2 };
        assert_eq!(shape.usable(), [0, 1]);
        let shape = MoeShape { layers: vec![0, 2], n_layer: 4, ..shape };
        assert_eq!(shape.usable(), [0, 1]);
    }
}
