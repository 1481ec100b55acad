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
}

impl StoredPrefix {
    /// Bytes it takes, about.
    pub fn n_bytes(&self) -> usize {
        let counts = self.counts.as_ref().map_or(0, |counts| counts.rows().len());
        self.state.bytes.len() + counts + size_of_val(self.tokens.as_slice())
    }

    /// Tokens of it that `prompt` begins with.
    pub fn n_common(&self, prompt: &[Token]) -> usize {
        self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count()
    }
}

/// Where prefixes go that had to make room in a worker's slots, and where they are looked for before a prompt runs.
pub trait PrefixStore: Send {
    /// The stored prefix with most tokens in common with `prompt`, and how many those are.
    fn longest(&mut self, prompt: &[Token]) -> Option<(Arc<StoredPrefix>, usize)>;

    /// Whether a stored prefix begins with all of `tokens`, so that storing them would add nothing.
    fn has(&self, tokens: &[Token]) -> bool;

    /// Stores a prefix; older ones go where there is no room.
    fn put(&mut self, prefix: StoredPrefix);
}
