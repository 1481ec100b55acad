//! Where the experts of a model are, for a device of several ranks that share its layers' experts.
//!
//! Never chooses the places: [`place_layer`](super::place_layer) does.

use super::PlacementError;

/// Each layer's experts on the ranks of one device.
///
/// ```
/// use eldr::calibrate::{ExpertRanks, PlacementError};
///
/// // Four experts of one layer: 0 and 1 on rank 0, 2 and 3 on rank 1. A batch picked 0, 1 and 2, a bit each.
/// let ranks = ExpertRanks::new(&[vec![0, 0, 1, 1]], 2)?;
/// assert_eq!(ranks.busiest(&[0b0111]), 2);
/// assert!(matches!(ExpertRanks::new(&[vec![7]], 2), Err(PlacementError::Rank { rank: 7, .. })));
/// # Ok::<(), PlacementError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertRanks {
    n_ranks: usize,
    /// Words of a layer.
    n_words: usize,
    /// By layer, rank, word: the rank's experts, a bit each.
    masks: Vec<u64>,
}

impl ExpertRanks {
    /// From the rank of each expert of each layer, all layers of as many experts.
    ///
    /// # Errors
    /// Layers of other numbers of experts, and ranks of `n_ranks` or more.
    pub fn new(layers: &[Vec<u32>], n_ranks: u32) -> Result<Self, PlacementError> {
        let n_expert = layers.first().map_or(0, Vec::len);
        let (n_words, n_ranks) = (n_expert.div_ceil(64), n_ranks as usize);
        let mut masks = vec![0; layers.len() * n_ranks * n_words];
        for (nth, layer) in layers.iter().enumerate() {
            if layer.len() != n_expert {
                return Err(PlacementError::Layer { layer: nth, found: layer.len(), wanted: n_expert });
            }
            for (expert, &rank) in layer.iter().enumerate() {
                if rank as usize >= n_ranks {
                    return Err(PlacementError::Rank { layer: nth, expert, rank, n_ranks });
                }
                masks[(nth * n_ranks + rank as usize) * n_words + expert / 64] |= 1 << (expert % 64);
            }
        }
        Ok(Self { n_ranks, n_words, masks })
    }

    /// Experts of the rank that has the most of a batch, summed over the layers. `seen` holds a bit for each expert that
    /// the batch picked, each layer's from a new word on.
    pub fn busiest(&self, seen: &[u64]) -> u32 {
        if self.n_words == 0 {
            return 0;
        }
        let layers = seen.chunks_exact(self.n_words).zip(self.masks.chunks_exact(self.n_ranks * self.n_words));
        layers
            .map(|(seen, ranks)| ranks.chunks_exact(self.n_words).map(|rank| both(seen, rank)).max().unwrap_or(0))
            .sum()
    }
}

fn both(a: &[u64], b: &[u64]) -> u32 {
    a.iter().zip(b).map(|(a, b)| (a & b).count_ones()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_rank_of_each_layer_counts() {
        let first: Vec<u32> = (0..70).map(|expert| u32::from(expert >= 35)).collect();
        let second: Vec<u32> = (0..70).map(|expert| expert % 2).collect();
        let ranks = ExpertRanks::new(&[first, second], 2).expect("two ranks");
        // Layer 0: experts 0, 1, 2 and 69; layer 1: 64 and 66.
        assert_eq!(ranks.busiest(&[0b111, 1 << 5, 0, 0b101]), 3 + 2);
    }

    #[test]
    fn wrong_shapes_are_refused() {
        let message = |layers: &[Vec<u32>]| ExpertRanks::new(layers, 2).expect_err("wrong").to_string();
        assert!(message(&[vec![0, 1], vec![0]]).contains("layer 1 has the places of 1 experts"));
        assert!(message(&[vec![0, 2]]).contains("expert 1 of layer 0 is on rank 2"));
    }
}
