use std::sync::Arc;

use crate::{
    kv::{BLOCK, BlockEvent, ChunkCounts, Ledger, PrefixMatch, SignatureRows},
    schedule::{CacheChange, ModelRunner, PrefixStore, Reuse, RunError, RunnerInfo, StoredPrefix},
    signature::ExpertCounts,
    types::{Slot, Token},
};

/// Tokens of a prompt that are computed whatever is known of it: the last one for its logits, and one more, because a
/// lone row runs through other kernels than several and its last bits would differ.
const N_ALWAYS_RUN: u32 = 2;

/// A copy moves the whole sequence it starts from; it is made if it saves at least one token in this many.
const COPY_PER_SAVED: u32 = 16;

/// Restoring moves a whole stored sequence; it is done if it saves at least one token in this many.
const RESTORE_PER_SAVED: u32 = 16;

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
}

impl Default for PrefixConfig {
    fn default() -> Self {
        Self { max_tokens: 0, block: BLOCK, ram_bytes: 0, align: 1 }
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
    /// Tokens that came back from there and were verified.
    pub n_restored_tokens: u64,
    /// Prefixes that were there but could not be used: the whole prompt ran.
    pub n_fallbacks: u64,
    /// Tokens held now.
    pub n_held_tokens: u64,
}

impl std::ops::AddAssign for CacheStats {
    fn add_assign(&mut self, other: Self) {
        self.n_prompt_tokens += other.n_prompt_tokens;
        self.n_cached_tokens += other.n_cached_tokens;
        self.n_block_hits += other.n_block_hits;
        self.n_block_misses += other.n_block_misses;
        self.n_copies += other.n_copies;
        self.n_spilled += other.n_spilled;
        self.n_restored_tokens += other.n_restored_tokens;
        self.n_fallbacks += other.n_fallbacks;
        self.n_held_tokens += other.n_held_tokens;
    }
}

/// The slots of a prefill worker: which is free for a prompt, what is left in the others, and how much of a prompt
/// need not be computed again.
///
/// Every change of a slot goes through here, so that the ledger and the runner's memory say the same.
pub struct PrefixCache {
    config: PrefixConfig,
    reuse: Reuse,
    ledger: Ledger,
    rows: SignatureRows,
    /// By slot: tokens that are really there. While the end of a known prompt runs again, fewer than in the ledger.
    n_there: Vec<u32>,
    events: Vec<BlockEvent>,
    change: CacheChange,
    told: CacheStats,
    store: Option<Box<dyn PrefixStore>>,
}

/// Where a prompt runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// Its slot.
    pub slot: Slot,
    /// Its tokens that are there.
    pub n_tokens: u32,
}

/// How a prefix gets where it is needed.
enum Way {
    /// It is there: the slot's sequence goes on.
    Stay(usize),
    /// From one slot to another.
    Copy(usize, usize),
}

impl PrefixCache {
    /// A cache for a runner with `info`, whose model has `n_expert` experts a layer (0: dense).
    pub fn new(config: PrefixConfig, info: &RunnerInfo, n_expert: u32) -> Self {
        let n_slots = info.n_slots as usize;
        Self {
            config,
            reuse: if config.max_tokens == 0 { Reuse::Nothing } else { info.reuse },
            ledger: Ledger::new(config.block, info.root_name(), n_slots),
            rows: SignatureRows::new(&info.tapped, n_expert),
            n_there: vec![0; n_slots],
            events: Vec::new(),
            change: CacheChange::default(),
            told: CacheStats::default(),
            store: None,
        }
    }

    /// Where prefixes go that must make room.
    pub(super) fn spill_to(&mut self, store: Option<Box<dyn PrefixStore>>) {
        self.store = store.filter(|_| self.reuse != Reuse::Nothing);
    }

    /// A slot for a prompt of `tokens`, with as much of it as could be found; it is the caller's until
    /// [`PrefixCache::end`] or [`PrefixCache::discard`]. There must be one that no prompt has. Errors: fatal ones.
    pub(super) fn begin(&mut self, tokens: &[Token], runner: &mut dyn ModelRunner) -> Result<Place, RunError> {
        let mut found = match self.reuse {
            Reuse::Nothing => PrefixMatch::default(),
            Reuse::Whole | Reuse::Prefix => self.ledger.match_prefix(tokens),
        };
        let most = (tokens.len() as u32).saturating_sub(N_ALWAYS_RUN);
        if let Some(restored) = self.restore(tokens, found.n_tokens, runner)? {
            found = restored;
        }
        let mut n_used = found.n_tokens.min(most);
        if !n_used.is_multiple_of(self.config.align) {
            n_used -= n_used % self.config.align;
            found = self.ledger.match_prefix(&tokens[..n_used as usize]);
        }
        let place = match self.way(&found, n_used) {
            Some(Way::Stay(slot)) => self.stay(slot, &found, n_used, runner)?,
            Some(Way::Copy(from, to)) => self.copy(from, to, &found, n_used, runner)?,
            None => {
                let slot = self.free_slot(None).expect("a slot that no prompt has");
                self.make_room(slot, runner)?;
                Place { slot: Slot(slot as u32), n_tokens: 0 }
            }
        };
        self.ledger.pin(place.slot.index());
        let n_blocks = (tokens.len() as u64).div_ceil(u64::from(self.config.block));
        let n_hits = if place.n_tokens == 0 { 0 } else { found.blocks.len() as u64 };
        let stats = &mut self.change.stats;
        stats.n_prompt_tokens += tokens.len() as u64;
        stats.n_cached_tokens += u64::from(place.n_tokens);
        stats.n_block_hits += n_hits;
        stats.n_block_misses += n_blocks - n_hits;
        Ok(place)
    }

    /// Where the picks of the tokens at `pos..end` of a slot's prompt are counted; none if nothing is.
    pub(super) fn chunk_counts(&self, slot: Slot, pos: u32, end: u32) -> Option<ChunkCounts> {
        let counted = self.ledger.len(slot.index());
        let layers: &Arc<[u32]> = self.rows.layers();
        (!layers.is_empty())
            .then(|| ChunkCounts::new(layers, self.rows.n_expert(), self.config.block, pos, end, counted))
    }

    /// A chunk of a slot's prompt, at `pos`, has run.
    pub(super) fn ran(&mut self, slot: Slot, pos: u32, tokens: &[Token], counts: Option<&ChunkCounts>) {
        let index = slot.index();
        assert_eq!(self.n_there[index], pos, "tokens in slot {slot}");
        self.n_there[index] += tokens.len() as u32;
        let n_known = (self.ledger.len(index) - pos) as usize;
        self.ledger.append(index, &tokens[n_known.min(tokens.len())..]);
        self.follow(counts);
    }

    /// The picks of all tokens of a slot's prompt so far; none if some are not known.
    pub(super) fn counts(&self, slot: Slot) -> Option<ExpertCounts> {
        self.rows.sum(&self.ledger, slot.index())
    }

    /// A slot's prompt is over: what there is of it is kept as far as the budget goes. Errors: fatal ones.
    pub(super) fn end(&mut self, slot: Slot, runner: &mut dyn ModelRunner) -> Result<(), RunError> {
        let index = slot.index();
        self.ledger.unpin(index);
        let n_there = self.n_there[index];
        let n_kept = match self.reuse {
            Reuse::Prefix => self.ledger.truncate(index, n_there),
            Reuse::Whole if self.ledger.len(index) == n_there => n_there,
            Reuse::Nothing | Reuse::Whole => 0,
        };
        self.cut(index, n_kept, runner)?;
        while self.ledger.n_tokens() > self.config.max_tokens
            && let Some(oldest) = self.ledger.oldest()
        {
            self.spill(oldest, runner);
            let left = self.ledger.evict_block().map_or(0, |(_, left)| left);
            self.cut(oldest, if self.reuse == Reuse::Whole { 0 } else { left }, runner)?;
        }
        Ok(())
    }

    /// A slot's prompt failed: nothing of it is kept. Errors: fatal ones.
    pub(super) fn discard(&mut self, slot: Slot, runner: &mut dyn ModelRunner) -> Result<(), RunError> {
        self.ledger.unpin(slot.index());
        self.empty(slot.index(), runner)
    }

    /// What has changed since the last call.
    pub(super) fn take_change(&mut self) -> Option<CacheChange> {
        self.change.stats.n_held_tokens = self.ledger.n_tokens();
        let stats = self.change.stats;
        if self.reuse == Reuse::Nothing || (self.change.blocks.is_empty() && stats == self.told) {
            self.change.blocks.clear();
            return None;
        }
        self.told = stats;
        Some(CacheChange { blocks: std::mem::take(&mut self.change.blocks), stats })
    }

    /// The tokens a slot holds.
    pub fn tokens(&self, slot: Slot) -> Vec<Token> {
        let mut tokens = self.ledger.tokens(slot.index());
        tokens.truncate(self.n_there[slot.index()] as usize);
        tokens
    }

    /// Panics unless the ledger is whole and says of every slot what is there.
    pub fn check_integrity(&self) {
        self.ledger.check_integrity();
        for (slot, &n_there) in self.n_there.iter().enumerate() {
            let n_known = self.ledger.len(slot);
            let may_lack = if self.ledger.is_pinned(slot) { N_ALWAYS_RUN } else { 0 };
            assert!(n_there <= n_known && n_known - n_there <= may_lack, "slot {slot}: {n_there} of {n_known} tokens");
        }
    }

    /// The cheapest way to `n_used` tokens of a match; none if there is no way, or it is not worth its copy.
    fn way(&self, found: &PrefixMatch, n_used: u32) -> Option<Way> {
        if n_used == 0 {
            return None;
        }
        let usable = |&(slot, _): &(usize, u32)| match self.reuse {
            Reuse::Nothing => false,
            Reuse::Whole => self.n_there[slot] == n_used && found.n_tokens == n_used,
            Reuse::Prefix => self.n_there[slot] >= n_used,
        };
        let holders = || self.ledger.holders(found).filter(usable);
        let idle = |&(slot, _): &(usize, u32)| !self.ledger.is_pinned(slot);
        if let Some((slot, _)) = holders().filter(idle).find(|&(_, len)| len == found.n_tokens) {
            return Some(Way::Stay(slot));
        }
        let (from, len) = holders().min_by_key(|&(slot, len)| (len, slot))?;
        match self.free_slot(Some(from)) {
            Some(to) if n_used.saturating_mul(COPY_PER_SAVED) >= len => Some(Way::Copy(from, to)),
            Some(_) => None,
            None => holders().find(idle).map(|(slot, _)| Way::Stay(slot)),
        }
    }

    fn stay(
        &mut self,
        slot: usize,
        found: &PrefixMatch,
        n_used: u32,
        runner: &mut dyn ModelRunner,
    ) -> Result<Place, RunError> {
        self.ledger.truncate(slot, found.n_tokens);
        self.follow(None);
        self.arrived(slot, n_used, runner.keep(Slot(slot as u32), n_used))
    }

    fn copy(
        &mut self,
        from: usize,
        to: usize,
        found: &PrefixMatch,
        n_used: u32,
        runner: &mut dyn ModelRunner,
    ) -> Result<Place, RunError> {
        self.make_room(to, runner)?;
        self.ledger.share(to, found);
        self.follow(None);
        self.change.stats.n_copies += 1;
        self.arrived(to, n_used, runner.copy_prefix(Slot(from as u32), Slot(to as u32), n_used))
    }

    /// Puts a stored prefix into a slot, if it has enough more of `tokens` than the `n_held` that are held; what is held
    /// then.
    fn restore(
        &mut self,
        tokens: &[Token],
        n_held: u32,
        runner: &mut dyn ModelRunner,
    ) -> Result<Option<PrefixMatch>, RunError> {
        let Some((stored, n_common)) = self.store.as_mut().and_then(|store| store.longest(tokens)) else {
            return Ok(None);
        };
        let (n_common, n_stored) = (n_common as u32, stored.tokens.len() as u32);
        let n_usable = match self.reuse {
            _ if n_common == n_stored => n_stored,
            Reuse::Prefix => n_common / self.config.block * self.config.block,
            Reuse::Nothing | Reuse::Whole => 0,
        };
        let Some(slot) = self.free_slot(None) else { return Ok(None) };
        if n_usable.saturating_sub(n_held).saturating_mul(RESTORE_PER_SAVED) < n_stored {
            return Ok(None);
        }
        self.make_room(slot, runner)?;
        let imported = runner.import(Slot(slot as u32), &stored.state);
        if self.arrived(slot, n_stored, imported)?.n_tokens > 0 {
            self.ledger.append(slot, &stored.tokens);
            self.follow(stored.counts.as_ref());
            self.change.stats.n_restored_tokens += u64::from(n_stored);
            if n_usable < n_stored {
                let left = self.ledger.truncate(slot, n_usable);
                self.cut(slot, left, runner)?;
            }
        }
        // Whatever came of it: what was held before may have made room.
        Ok(Some(self.ledger.match_prefix(tokens)))
    }

    /// Stores what a slot holds elsewhere, if there is such a place and it is not there yet. A state that can not be
    /// copied out is simply gone.
    fn spill(&mut self, slot: usize, runner: &mut dyn ModelRunner) {
        let Some(store) = &mut self.store else { return };
        let tokens = self.ledger.tokens(slot);
        if tokens.len() < self.config.block as usize || store.has(&tokens) {
            return;
        }
        let Ok(state) = runner.export(Slot(slot as u32)) else { return };
        let (layers, n_expert, block) = (self.rows.layers(), self.rows.n_expert(), self.config.block);
        let rows = self.rows.rows(&self.ledger, slot);
        let counts = rows.map(|rows| ChunkCounts::from_rows(layers, n_expert, block, state.n_tokens, rows));
        store.put(StoredPrefix { tokens, state, counts });
        self.change.stats.n_spilled += 1;
    }

    /// Empties a slot for another prompt.
    fn make_room(&mut self, slot: usize, runner: &mut dyn ModelRunner) -> Result<(), RunError> {
        self.spill(slot, runner);
        self.empty(slot, runner)
    }

    /// Takes in whether a prefix is in its slot; if not, the slot is empty.
    fn arrived(&mut self, slot: usize, n_tokens: u32, done: Result<(), RunError>) -> Result<Place, RunError> {
        let n_tokens = match done {
            Ok(()) => n_tokens,
            Err(RunError::Restored(_)) => {
                self.change.stats.n_fallbacks += 1;
                self.ledger.clear(slot);
                self.follow(None);
                0
            }
            Err(fatal) => return Err(fatal),
        };
        self.n_there[slot] = n_tokens;
        Ok(Place { slot: Slot(slot as u32), n_tokens })
    }

    /// An empty slot, or the one that was not used for longest, but not `except`.
    fn free_slot(&self, except: Option<usize>) -> Option<usize> {
        let empty = (0..self.n_there.len()).find(|&slot| self.ledger.is_empty(slot) && !self.ledger.is_pinned(slot));
        empty.or_else(|| self.ledger.idle().find(|&slot| Some(slot) != except))
    }

    /// Keeps the first `n_tokens` of a slot that no prompt has, or nothing if they can not be kept.
    fn cut(&mut self, slot: usize, n_tokens: u32, runner: &mut dyn ModelRunner) -> Result<(), RunError> {
        if n_tokens == 0 {
            return self.empty(slot, runner);
        }
        self.arrived(slot, n_tokens, runner.keep(Slot(slot as u32), n_tokens))?;
        self.follow(None);
        Ok(())
    }

    fn empty(&mut self, slot: usize, runner: &mut dyn ModelRunner) -> Result<(), RunError> {
        self.ledger.clear(slot);
        self.follow(None);
        self.n_there[slot] = 0;
        runner.close(Slot(slot as u32))
    }

    /// Lets the rows and the list of changes follow the ledger.
    fn follow(&mut self, counts: Option<&ChunkCounts>) {
        self.events.clear();
        self.ledger.take_events(&mut self.events);
        self.rows.follow(&self.events, counts);
        for event in &self.events {
            match *event {
                BlockEvent::Filled { name: Some(name), .. } => self.change.blocks.push((name, true)),
                BlockEvent::Freed { name: Some(name), .. } => self.change.blocks.push((name, false)),
                _ => {}
            }
        }
    }
}

impl std::fmt::Debug for PrefixCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PrefixCache {{ {:?}, {:?} }}", self.ledger, self.change.stats)
    }
}
