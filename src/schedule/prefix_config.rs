//! How much a prefill worker keeps, and what came of it.
//!
//! Never decides anything.

use crate::kv::BLOCK;

/// How much of what finished prompts leave behind a prefill worker keeps. The default is nothing.
///
/// ```
/// use eldr::schedule::{CacheChange, CacheStats, FakeModel, FakeRunner, ModelRunner, PrefillWorker, PrefixCache, PrefixConfig, Reuse};
///
/// // A prefill worker that keeps 4096 tokens of finished prompts.
/// let model = FakeModel { n_vocab: 50, n_layer: 2, n_expert: 8, n_expert_used: 2 };
/// let runner = FakeRunner::new(model, 4, 2048, Vec::new()).reusing(Reuse::Prefix);
/// let config = PrefixConfig { max_tokens: 4096, ..PrefixConfig::default() };
/// let worker = PrefillWorker::new(runner.info(), 16, 4, &[], 8).caching(config, runner.info(), 8);
/// let cache: &PrefixCache = worker.cache();
/// cache.check_integrity();
/// // What it tells the dispatcher, which then knows who holds what.
/// let change = CacheChange { blocks: Vec::new(), stats: CacheStats::default() };
/// assert_eq!(change.stats.n_cached_tokens, 0);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixConfig {
    /// Tokens kept at most, those that prompts share counted once; 0 keeps nothing.
    pub max_tokens: u64,
    /// Tokens of a block: a prefix is used again to the end of one.
    pub block: u32,
    /// Bytes of host memory for prefixes that had to make room in the slots; 0 is none.
    pub ram_bytes: u64,
    /// What is used again of a prompt is a multiple of so many tokens. A multiple of blocks and of chunks makes the rest
    /// run in the very chunks of a cold prefill, to the same bits; 1 saves the most.
    pub align: u32,
    /// What a finished request leaves on its decode worker, prompt and answer, comes back to a prefill worker.
    pub answers: bool,
}

impl Default for PrefixConfig {
    fn default() -> Self {
        Self { max_tokens: 0, block: BLOCK, ram_bytes: 0, align: 1, answers: false }
    }
}

/// What a prefill worker's cache has done since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Tokens of the prompts that began.
    pub n_prompt_tokens: u64,
    /// Of those, tokens that were not computed.
    pub n_cached_tokens: u64,
    /// Blocks of these prompts that were there.
    pub n_block_hits: u64,
    /// Blocks that were not.
    pub n_block_misses: u64,
    /// Prefixes copied from another slot.
    pub n_copies: u64,
    /// Prefixes that made room and were stored elsewhere.
    pub n_spilled: u64,
    /// Prefixes stored on the way, because the model's memory can not be cut there later.
    pub n_checkpoints: u64,
    /// Tokens that came back from where they were stored and were verified.
    pub n_restored_tokens: u64,
    /// Stored prefixes left where they are, because computing them is faster.
    pub n_not_worth: u64,
    /// Prefixes that were there but could not be used: the whole prompt ran.
    pub n_fallbacks: u64,
    /// Prefixes that were there but whose picks are not known in the layers that are counted now.
    pub n_uncounted: u64,
    /// Requests whose prompt and answer came back from their decode worker.
    pub n_returned: u64,
    /// Tokens held now.
    pub n_held_tokens: u64,
    /// Of those, tokens that are never dropped.
    pub n_pinned_tokens: u64,
    /// Bytes of the rows of counts.
    pub n_row_bytes: u64,
}

impl std::ops::AddAssign for CacheStats {
    fn add_assign(&mut self, other: Self) {
        self.n_prompt_tokens += other.n_prompt_tokens;
        self.n_cached_tokens += other.n_cached_tokens;
        self.n_block_hits += other.n_block_hits;
        self.n_block_misses += other.n_block_misses;
        self.n_copies += other.n_copies;
        self.n_spilled += other.n_spilled;
        self.n_checkpoints += other.n_checkpoints;
        self.n_restored_tokens += other.n_restored_tokens;
        self.n_not_worth += other.n_not_worth;
        self.n_fallbacks += other.n_fallbacks;
        self.n_uncounted += other.n_uncounted;
        self.n_returned += other.n_returned;
        self.n_held_tokens += other.n_held_tokens;
        self.n_pinned_tokens += other.n_pinned_tokens;
        self.n_row_bytes += other.n_row_bytes;
    }
}

/// What of one prompt was there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheUse {
    /// Tokens that were not computed.
    pub n_tokens: u32,
    /// Blocks that were there.
    pub n_hits: u32,
    /// Blocks that were not.
    pub n_misses: u32,
    /// Tokens that came back from host memory or a disk for it and were verified.
    pub n_restored: u32,
}
