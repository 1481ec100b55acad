use std::sync::Arc;

/// The picks of a prompt's chunk, counted apart for each block that the chunk touches.
///
/// A run is the part of the chunk that lies in one block. Tokens at the front may be left out, because their picks
/// have been counted before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkCounts {
    layers: Arc<[u32]>,
    n_expert: u32,
    n_skipped: u32,
    /// Tokens of each run.
    runs: Vec<u32>,
    /// By run, layer, expert.
    rows: Vec<u8>,
    /// Where the second run starts, counted from the first counted token's block.
    offset: u32,
    block: u32,
    failed: bool,
}

impl ChunkCounts {
    /// Nothing counted yet of the tokens at positions `pos..end`, of which those before `counted` are left out.
    ///
    /// `layers` are rows of [`MoeShape::layers`](crate::types::MoeShape::layers), ascending, of `n_expert` experts;
    /// `block` is at most [`MAX_BLOCK`](super::MAX_BLOCK).
    pub fn new(layers: &Arc<[u32]>, n_expert: u32, block: u32, pos: u32, end: u32, counted: u32) -> Self {
        assert!(block > 0 && block <= super::MAX_BLOCK, "a row's bytes hold {} tokens, not {block}", super::MAX_BLOCK);
        let first = counted.clamp(pos, end);
        let mut runs = Vec::with_capacity(((end - first) / block + 2) as usize);
        let mut at = first;
        while at < end {
            let next = ((at / block + 1) * block).min(end);
            runs.push(next - at);
            at = next;
        }
        let rows = vec![0; runs.len() * layers.len() * n_expert as usize];
        let (layers, offset) = (Arc::clone(layers), first % block);
        Self { layers, n_expert, n_skipped: first - pos, runs, rows, offset, block, failed: false }
    }

    /// Counts taken before: the rows of a sequence's blocks from its start, `n_tokens` in all.
    pub fn from_rows(layers: &Arc<[u32]>, n_expert: u32, block: u32, n_tokens: u32, rows: Vec<u8>) -> Self {
        let empty = Self::new(layers, n_expert, block, 0, n_tokens, 0);
        assert_eq!(rows.len(), empty.rows.len(), "a row for each block of {n_tokens} tokens");
        Self { rows, ..empty }
    }

    /// The MoE layers counted, ascending.
    pub fn layers(&self) -> &[u32] {
        &self.layers
    }

    /// Experts a layer (E).
    pub fn n_expert(&self) -> u32 {
        self.n_expert
    }

    /// Tokens of a block.
    pub fn block(&self) -> u32 {
        self.block
    }

    /// The same counts of layers `layers` alone; none if one of them was not counted here.
    pub fn of_layers(&self, layers: &Arc<[u32]>) -> Option<Self> {
        if *self.layers == **layers {
            return Some(self.clone());
        }
        let from: Vec<usize> =
            layers.iter().map(|layer| self.layers.binary_search(layer).ok()).collect::<Option<_>>()?;
        let n_expert = self.n_expert as usize;
        let blocks = self.rows.chunks_exact(self.layers.len() * n_expert);
        let rows = blocks.flat_map(|row| from.iter().flat_map(move |at| &row[at * n_expert..][..n_expert])).copied();
        Some(Self { rows: rows.collect(), layers: Arc::clone(layers), ..self.clone() })
    }

    /// The same tokens, with nothing counted.
    #[must_use]
    pub fn cleared(&self) -> Self {
        Self { rows: vec![0; self.rows.len()], failed: false, ..self.clone() }
    }

    /// Counts the experts that token `index` of the chunk picked in MoE layer `layer`.
    pub fn add(&mut self, layer: u32, index: usize, experts: &[u32]) {
        let Some(index) = (index as u32).checked_sub(self.n_skipped) else { return };
        let row = self.layers.binary_search(&layer).expect("a layer that was not tapped");
        let run = ((index + self.offset) / self.block) as usize;
        let start = (run * self.layers.len() + row) * self.n_expert as usize;
        let counts = &mut self.rows[start..start + self.n_expert as usize];
        for &expert in experts {
            counts[expert as usize] += 1;
        }
    }

    /// Nothing is known of these tokens' picks: the tap failed.
    pub fn fail(&mut self) {
        self.failed = true;
    }

    /// Whether the tap failed.
    pub fn is_failed(&self) -> bool {
        self.failed
    }

    /// Takes over what `other`, of the same tokens, counted.
    pub fn copy_from(&mut self, other: &Self) {
        assert_eq!((&self.runs, self.n_skipped), (&other.runs, other.n_skipped), "counts of other tokens");
        self.rows.clone_from(&other.rows);
        self.failed = other.failed;
    }

    /// Runs in the chunk.
    pub fn n_runs(&self) -> usize {
        self.runs.len()
    }

    /// The row of run `run`: its layers' E counts, one after another. None if the tap failed.
    pub fn row(&self, run: usize) -> Option<&[u8]> {
        let width = self.layers.len() * self.n_expert as usize;
        (!self.failed).then(|| &self.rows[run * width..(run + 1) * width])
    }

    /// All rows, run after run.
    pub fn rows(&self) -> &[u8] {
        &self.rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_counts_in_its_block_and_known_ones_not_again() {
        let layers: Arc<[u32]> = Arc::from([1, 4]);
        let mut counts = ChunkCounts::new(&layers, 3, 4, 6, 15, 7);
        assert_eq!(counts.runs, [1, 4, 3]);
        for index in 0..9 {
            counts.add(1, index, &[0, 2]);
            counts.add(4, index, &[(index % 3) as u32]);
        }
        let rows: Vec<&[u8]> = (0..3).map(|run| counts.row(run).expect("counted")).collect();
        assert_eq!(rows[0], [1, 0, 1, 0, 1, 0]);
        assert_eq!(rows[1], [4, 0, 4, 1, 1, 2]);
        assert_eq!(rows[2], [3, 0, 3, 1, 1, 1]);
        counts.fail();
        assert_eq!(counts.row(0), None);
    }

    #[test]
    fn some_of_the_layers_are_those_layers_rows() {
        let [all, some, other] = [&[1, 4, 6][..], &[4, 6], &[1, 5]].map(Arc::from);
        let count = |layers: &Arc<[u32]>| {
            let mut counts = ChunkCounts::new(layers, 3, 4, 0, 9, 0);
            for &layer in layers.iter() {
                (0..9).for_each(|index| counts.add(layer, index, &[(layer + index as u32) % 3]));
            }
            counts
        };
        assert_eq!(count(&all).of_layers(&some), Some(count(&some)));
        assert_eq!(count(&all).of_layers(&other), None);
    }

    #[test]
    fn a_chunk_whose_tokens_are_all_known_has_no_runs() {
        let layers: Arc<[u32]> = Arc::from([0]);
        let mut counts = ChunkCounts::new(&layers, 3, 4, 6, 8, 8);
        counts.add(0, 0, &[1]);
        assert_eq!(counts.n_runs(), 0);
    }
}
