use std::sync::Arc;

use crate::{kv::ChunkCounts, schedule::SeqState, types::Token};

/// What a prompt left behind, outside any worker: its keys and values, and the picks of its tokens.
#[derive(Debug)]
pub struct StoredPrefix {
    /// The tokens.
    pub tokens: Vec<Token>,
    /// Their keys and values.
    pub state: SeqState,
    /// Their picks, block by block; none if they are not known.
    pub counts: Option<ChunkCounts>,
    /// It can only be gone on from at its end: the model's memory can not be cut.
    pub whole: bool,
}

/// A stored prefix that begins like a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredMatch {
    /// The store's own name for it.
    pub id: u64,
    /// Which of several stores has it, the fastest first.
    pub tier: u8,
    /// Its tokens.
    pub n_tokens: u32,
    /// Of those, tokens that the prompt begins with.
    pub n_common: u32,
    /// Bytes to move.
    pub n_bytes: u64,
}

/// Restoring moves a whole stored sequence; while nobody knows how long that takes, it is done if it saves at least one
/// token in this many.
const RESTORE_PER_SAVED: u32 = 16;

impl StoredPrefix {
    /// Bytes it takes, about.
    pub fn n_bytes(&self) -> usize {
        let counts = self.counts.as_ref().map_or(0, |counts| counts.rows().len());
        self.state.bytes.len() + counts + size_of_val(self.tokens.as_slice())
    }

    /// MoE layers whose picks are known.
    pub fn layers(&self) -> &[u32] {
        self.counts.as_ref().map_or(&[], ChunkCounts::layers)
    }

    /// Whether storing `tokens`, with the picks of `layers`, would add nothing to it.
    pub fn covers(&self, tokens: &[Token], layers: &[u32]) -> bool {
        covers(&self.tokens, self.whole, tokens) && has_layers(self.layers(), layers)
    }
}

/// How many tokens of `prompt` a stored prefix of these tokens can give it; 0 if nothing.
pub fn n_usable(tokens: &[Token], whole: bool, prompt: &[Token]) -> u32 {
    let n = tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
    if whole && n < tokens.len() { 0 } else { n as u32 }
}

/// Whether a stored prefix of tokens `stored` holds `tokens` too.
pub fn covers(stored: &[Token], whole: bool, tokens: &[Token]) -> bool {
    stored.starts_with(tokens) && (!whole || stored.len() == tokens.len())
}

/// Whether all of `wanted` are among `counted`, both ascending.
pub fn has_layers(counted: &[u32], wanted: &[u32]) -> bool {
    wanted.iter().all(|layer| counted.binary_search(layer).is_ok())
}

/// Where prefixes go that had to make room in a worker's slots, and where they are looked for before a prompt runs.
pub trait PrefixStore: Send {
    /// The stored prefix that has most of `prompt`, among those that know the picks of `layers`.
    fn find(&mut self, prompt: &[Token], layers: &[u32]) -> Option<StoredMatch>;

    /// Whether moving it into a worker takes less time than computing the `n_saved` tokens it saves.
    fn is_faster(&self, found: &StoredMatch, n_saved: u32) -> bool {
        n_saved.saturating_mul(RESTORE_PER_SAVED) >= found.n_tokens
    }

    /// What was found; none if it is gone by now, or damaged.
    fn load(&mut self, found: &StoredMatch) -> Option<Arc<StoredPrefix>>;

    /// Whether storing `tokens`, with the picks of `layers`, would add nothing.
    fn has(&self, tokens: &[Token], layers: &[u32]) -> bool;

    /// Stores a prefix; older ones go where there is no room.
    fn put(&mut self, prefix: StoredPrefix);

    /// Whether what is stored is still there after this process.
    fn lasts(&self) -> bool {
        false
    }

    /// From now on [`PrefixStore::put`] may wait rather than leave something out: nothing runs any more.
    fn closing(&mut self) {}
}
