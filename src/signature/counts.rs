use crate::types::MoeShape;

/// How many of a request's prefill tokens picked each expert: one row of E counts for each tapped MoE layer.
///
/// Integers, never gate scores: an expert below the cut loads no weights (paper, section 4.1).
///
/// ```
/// use eldr::signature::ExpertCounts;
///
/// // Two tokens in MoE layers 0 and 2 of 4 experts; each token picks two in each layer.
/// let mut counts = ExpertCounts::new(&[0, 2], 4);
/// counts.add_tokens(2);
/// counts.add(0, &[1, 3, 1, 0]);
/// counts.add(2, &[2, 3, 2, 3]);
/// assert_eq!(counts.row(0), Some(&[1, 2, 0, 1][..]));
/// assert!(counts.conserves(2), "every row holds two picks a token");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertCounts {
    n_expert: u32,
    n_tokens: u32,
    layers: Vec<u32>,
    counts: Vec<u32>,
}

impl ExpertCounts {
    /// No tokens yet, for the MoE layers `layers` (rows of [`MoeShape::layers`], ascending) of `n_expert` experts.
    pub fn new(layers: &[u32], n_expert: u32) -> Self {
        assert!(layers.windows(2).all(|w| w[0] < w[1]), "layers must ascend: {layers:?}");
        let counts = vec![0; layers.len() * n_expert as usize];
        Self { n_expert, n_tokens: 0, layers: layers.to_vec(), counts }
    }

    /// No tokens yet, for every usable layer of `shape`.
    pub fn for_shape(shape: &MoeShape) -> Self {
        Self::new(&shape.usable(), shape.n_expert)
    }

    /// Counts already summed: the rows of `layers`, one after another, for `n_tokens` tokens.
    pub fn from_rows(layers: &[u32], n_expert: u32, n_tokens: u32, counts: Vec<u32>) -> Self {
        assert_eq!(counts.len(), layers.len() * n_expert as usize, "a row of E counts for each layer");
        Self { n_tokens, counts, ..Self::new(layers, n_expert) }
    }

    /// Experts a layer (E).
    pub fn n_expert(&self) -> u32 {
        self.n_expert
    }

    /// Tokens counted.
    pub fn n_tokens(&self) -> u32 {
        self.n_tokens
    }

    /// The MoE layers that have a row, ascending.
    pub fn layers(&self) -> &[u32] {
        &self.layers
    }

    /// The E counts of MoE layer `layer`, or nothing if it was not tapped.
    pub fn row(&self, layer: u32) -> Option<&[u32]> {
        let row = self.layers.binary_search(&layer).ok()?;
        let e = self.n_expert as usize;
        Some(&self.counts[row * e..(row + 1) * e])
    }

    /// Notes that `n` more tokens were counted; their picks come through [`ExpertCounts::add`].
    pub fn add_tokens(&mut self, n: u32) {
        self.n_tokens += n;
    }

    /// Counts the expert ids one or more tokens picked in MoE layer `layer`. Ids are below E (the tap refuses others).
    pub fn add(&mut self, layer: u32, experts: &[u32]) {
        let row = self.layers.binary_search(&layer).expect("a layer that was not tapped");
        let e = self.n_expert as usize;
        let counts = &mut self.counts[row * e..(row + 1) * e];
        for &expert in experts {
            counts[expert as usize] += 1;
        }
    }

    /// Adds the counts of `other`, which has the same layers and experts.
    pub fn merge(&mut self, other: &Self) {
        assert_eq!(self.layers, other.layers, "counts of other layers");
        assert_eq!(self.n_expert, other.n_expert, "counts of another model");
        self.n_tokens += other.n_tokens;
        for (sum, n) in self.counts.iter_mut().zip(&other.counts) {
            *sum += n;
        }
    }

    /// Token conservation: each row sums to tokens * k. Holds for every prompt prefilled by a healthy tap.
    pub fn conserves(&self, n_expert_used: u32) -> bool {
        let want = u64::from(self.n_tokens) * u64::from(n_expert_used);
        self.layers
            .iter()
            .all(|&layer| self.row(layer).is_some_and(|row| row.iter().map(|&n| u64::from(n)).sum::<u64>() == want))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_add_up_and_conserve_tokens() {
        let mut a = ExpertCounts::new(&[0, 2], 4);
        a.add_tokens(2);
        a.add(0, &[1, 3, 1, 0]);
        a.add(2, &[2, 3, 2, 3]);
        assert!(a.conserves(2));
        assert!(!a.conserves(1));
        assert_eq!(a.row(0), Some(&[1, 2, 0, 1][..]));
        assert_eq!(a.row(1), None);
        let b = a.clone();
        a.merge(&b);
        assert_eq!((a.n_tokens(), a.row(2)), (4, Some(&[0, 0, 4, 4][..])));
    }
}
