/// The experts each sequence of one decode step picked, in every MoE layer.
///
/// Shape `[n_items, n_layer, k]`, filled by a runner whose decode contexts carry a tap; empty otherwise.
///
/// ```
/// use eldr::schedule::StepPicks;
///
/// // Two sequences, one MoE layer, two picks each.
/// let mut picks = StepPicks::default();
/// picks.reset(2, 1, 2);
/// picks.set(0, 0, &[1, 2]);
/// picks.set(1, 0, &[2, 3]);
/// assert_eq!(picks.distinct(), [3], "what the step had to read");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepPicks {
    n_items: usize,
    n_layer: usize,
    n_expert_used: usize,
    experts: Vec<u32>,
}

impl StepPicks {
    /// Room for a step of `n_items` tokens through `n_layer` MoE layers of `n_expert_used` picks.
    pub fn reset(&mut self, n_items: usize, n_layer: usize, n_expert_used: usize) {
        self.n_items = n_items;
        self.n_layer = n_layer;
        self.n_expert_used = n_expert_used;
        self.experts.clear();
        self.experts.resize(n_items * n_layer * n_expert_used, u32::MAX);
    }

    /// Forgets the step.
    pub fn clear(&mut self) {
        self.reset(0, 0, 0);
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.experts.is_empty()
    }

    /// Stores the picks of item `item` in MoE layer `layer`.
    pub fn set(&mut self, item: usize, layer: usize, experts: &[u32]) {
        self.row_mut(item, layer).copy_from_slice(experts);
    }

    /// The picks of item `item` in MoE layer `layer`.
    pub fn row(&self, item: usize, layer: usize) -> &[u32] {
        let start = (item * self.n_layer + layer) * self.n_expert_used;
        &self.experts[start..start + self.n_expert_used]
    }

    /// The picks of item `item`, layer by layer.
    pub fn item(&self, item: usize) -> &[u32] {
        let n = self.n_layer * self.n_expert_used;
        &self.experts[item * n..(item + 1) * n]
    }

    fn row_mut(&mut self, item: usize, layer: usize) -> &mut [u32] {
        let start = (item * self.n_layer + layer) * self.n_expert_used;
        &mut self.experts[start..start + self.n_expert_used]
    }

    /// MoE layers recorded.
    pub fn n_layer(&self) -> usize {
        self.n_layer
    }

    /// Distinct experts the whole step picked, one number for each MoE layer: what the step had to read.
    pub fn distinct(&self) -> Vec<u32> {
        let mut seen: Vec<u32> = Vec::with_capacity(self.n_items * self.n_expert_used);
        (0..self.n_layer)
            .map(|layer| {
                seen.clear();
                for item in 0..self.n_items {
                    seen.extend_from_slice(self.row(item, layer));
                }
                seen.sort_unstable();
                seen.dedup();
                seen.len() as u32
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distinct_counts_each_expert_of_a_layer_once() {
        let mut picks = StepPicks::default();
        picks.reset(2, 2, 2);
        picks.set(0, 0, &[1, 2]);
        picks.set(1, 0, &[2, 3]);
        picks.set(0, 1, &[5, 7]);
        picks.set(1, 1, &[7, 5]);
        assert_eq!(picks.distinct(), [3, 2]);
        assert_eq!(picks.item(1), [2, 3, 7, 5]);
        picks.clear();
        assert!(picks.is_empty());
        assert!(picks.distinct().is_empty());
    }
}
