//! Which slot of a prefill worker a prompt runs in, and what of it need not be computed again.
//!
//! Never lets the ledger and the runner's memory say different things: every change of a slot goes through here.

mod foreign;
mod pins;
mod tiers;

use std::sync::Arc;

use pins::Pin;

use crate::{
    kv::{BlockEvent, ChunkCounts, Ledger, PrefixMatch, SignatureRows},
    schedule::{
        CacheChange, CacheStats, CacheUse, ModelRunner, PrefixConfig, PrefixStore, Reuse, RunError, RunnerInfo,
    },
    signature::ExpertCounts,
    types::{Slot, Token},
};

/// Tokens of a prompt that are computed whatever is known of it: the last one for its logits, and one more, because a
/// lone row runs through other kernels than several and its last bits would differ.
const N_ALWAYS_RUN: u32 = 2;

/// A copy moves the whole sequence it starts from; it is made if it saves at least one token in this many.
const COPY_PER_SAVED: u32 = 16;

/// The slots of a prefill worker: which is free for a prompt, what is left in the others, and how much of a prompt
/// need not be computed again.
pub struct PrefixCache {
    config: PrefixConfig,
    reuse: Reuse,
    ledger: Ledger,
    rows: SignatureRows,
    /// By slot: tokens that are really there. While the end of a known prompt runs again, fewer than in the ledger.
    n_there: Vec<u32>,
    events: Vec<BlockEvent>,
    /// By slot: tokens of its prompt that were there, but in a memory that can not be cut to them; 0 if none.
    n_uncut: Vec<u32>,
    /// The tap has failed: prefixes are used without their picks.
    blind: bool,
    pins: Vec<Pin>,
    change: CacheChange,
    told: CacheStats,
    store: Option<Box<dyn PrefixStore>>,
}

/// Where a prompt runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// Its slot.
    pub slot: Slot,
    /// Its tokens that are there, and where they were.
    pub used: CacheUse,
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
            n_uncut: vec![0; n_slots],
            blind: false,
            pins: Vec::new(),
            change: CacheChange::default(),
            told: CacheStats::default(),
            store: None,
        }
    }

    /// A slot for a prompt of `tokens`, with as much of it as could be found, or, if it must be `fresh`, with nothing of it;
    /// it is the caller's until [`PrefixCache::end`] or [`PrefixCache::discard`]. There must be one that no prompt has.
    /// Errors: fatal ones.
    pub(super) fn begin(
        &mut self,
        tokens: &[Token],
        fresh: bool,
        runner: &mut dyn ModelRunner,
    ) -> Result<Place, RunError> {
        let n_fallbacks = self.change.stats.n_fallbacks;
        let sought = if fresh { &[] } else { tokens };
        let mut found = self.find(sought, true);
        while self.drop_changed(&found, runner)? {
            found = self.find(sought, false);
        }
        let most = (tokens.len() as u32).saturating_sub(N_ALWAYS_RUN);
        let n_reached = self.way(&found, found.n_tokens.min(most), runner).map_or(0, |_| found.n_tokens);
        let n_restored = self.restore(sought, n_reached, &mut found, runner)?;
        let n_found = found.n_tokens.min(most);
        let mut n_used = n_found;
        if !n_used.is_multiple_of(self.config.align) {
            n_used -= n_used % self.config.align;
            found = self.find(&tokens[..n_used as usize], false);
        }
        let (slot, n_tokens) = match self.way(&found, n_used, runner) {
            Some(Way::Stay(slot)) => self.stay(slot, &found, n_used, runner)?,
            Some(Way::Copy(from, to)) => self.copy(from, to, &found, n_used, runner)?,
            None => {
                let reaches = |(slot, _): (usize, u32)| runner.reaches(Slot(slot as u32), n_used);
                if n_used > 0 && !self.ledger.holders(&found).any(reaches) {
                    self.change.stats.n_fallbacks += 1;
                }
                let slot = self.free_slot(None).expect("a slot that no prompt has");
                self.make_room(slot, runner)?;
                (slot, 0)
            }
        };
        self.ledger.pin(slot);
        let fell_back = n_tokens == 0 && self.change.stats.n_fallbacks > n_fallbacks;
        self.n_uncut[slot] = if fell_back { n_found } else { 0 };
        let n_hits = if n_tokens == 0 { 0 } else { found.blocks.len() as u32 };
        let n_misses = (tokens.len() as u32).div_ceil(self.config.block) - n_hits;
        let stats = &mut self.change.stats;
        stats.n_prompt_tokens += tokens.len() as u64;
        stats.n_cached_tokens += u64::from(n_tokens);
        stats.n_block_hits += u64::from(n_hits);
        stats.n_block_misses += u64::from(n_misses);
        let n_restored = if n_tokens == 0 { 0 } else { n_restored };
        Ok(Place { slot: Slot(slot as u32), used: CacheUse { n_tokens, n_hits, n_misses, n_restored } })
    }

    /// The longest beginning of a prompt that is held and whose picks are known, where picks are counted. `counting`
    /// counts it if it would have been longer with its picks.
    fn find(&mut self, tokens: &[Token], counting: bool) -> PrefixMatch {
        if self.reuse == Reuse::Nothing {
            return PrefixMatch::default();
        }
        let found = self.ledger.match_prefix(tokens);
        if self.layers().is_empty() {
            return found;
        }
        let n_known = found.blocks.iter().take_while(|&&block| self.rows.knows(&self.ledger, block)).count();
        if n_known == found.blocks.len() {
            return found;
        }
        if counting {
            self.change.stats.n_uncounted += 1;
        }
        self.ledger.shorter(&found, n_known)
    }

    /// The layers whose picks a prefix must come with.
    fn layers(&self) -> &[u32] {
        if self.blind { &[] } else { self.rows.layers() }
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
        self.blind |= counts.is_some_and(ChunkCounts::is_failed);
        self.follow(counts);
    }

    /// The picks of all tokens of a slot's prompt so far; none if some are not known.
    pub(super) fn counts(&mut self, slot: Slot) -> Option<ExpertCounts> {
        self.rows.sum(&self.ledger, slot.index())
    }

    /// A slot's prompt is over: what there is of it is kept as far as the budget goes. Errors: fatal ones.
    pub(super) fn end(&mut self, slot: Slot, runner: &mut dyn ModelRunner) -> Result<(), RunError> {
        let index = slot.index();
        self.ledger.unpin(index);
        let n_there = self.n_there[index];
        self.keep_pinned(index, runner)?;
        let n_kept = match self.reuse {
            Reuse::Prefix | Reuse::Window => self.ledger.truncate(index, n_there),
            Reuse::Whole if self.ledger.len(index) == n_there => n_there,
            Reuse::Nothing | Reuse::Whole => 0,
        };
        self.cut(index, n_kept, runner)?;
        self.keep_to_budget(runner)
    }

    /// Drops the ends of what was not used for longest until the rest is within the budget.
    fn keep_to_budget(&mut self, runner: &mut dyn ModelRunner) -> Result<(), RunError> {
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
        self.change.stats.n_row_bytes = self.rows.n_bytes();
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
        self.check_pins();
    }

    /// The cheapest way to `n_used` tokens of a match; none if there is no way, or it is not worth its copy.
    fn way(&self, found: &PrefixMatch, n_used: u32, runner: &dyn ModelRunner) -> Option<Way> {
        if n_used == 0 {
            return None;
        }
        let usable =
            |&(slot, _): &(usize, u32)| self.n_there[slot] >= n_used && runner.reaches(Slot(slot as u32), n_used);
        let holders = || self.ledger.holders(found).filter(usable);
        let idle = |&(slot, _): &(usize, u32)| !self.ledger.is_pinned(slot);
        if let Some((slot, _)) = holders().filter(idle).find(|&(_, len)| len == found.n_tokens) {
            return Some(Way::Stay(slot));
        }
        // A copy takes along no more than the window behind the last token.
        let can_copy = |&(slot, _): &(usize, u32)| self.reuse != Reuse::Window || self.n_there[slot] <= n_used + 1;
        let Some((from, len)) = holders().filter(can_copy).min_by_key(|&(slot, len)| (len, slot)) else {
            return holders().find(idle).map(|(slot, _)| Way::Stay(slot));
        };
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
    ) -> Result<(usize, u32), RunError> {
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
    ) -> Result<(usize, u32), RunError> {
        self.make_room(to, runner)?;
        self.ledger.share(to, found);
        self.follow(None);
        self.change.stats.n_copies += 1;
        self.arrived(to, n_used, runner.copy_prefix(Slot(from as u32), Slot(to as u32), n_used))
    }

    /// Empties a slot for another prompt.
    fn make_room(&mut self, slot: usize, runner: &mut dyn ModelRunner) -> Result<(), RunError> {
        self.spill(slot, runner);
        self.empty(slot, runner)
    }

    /// Takes in whether a prefix is in its slot; if not, the slot is empty.
    fn arrived(&mut self, slot: usize, n_tokens: u32, done: Result<(), RunError>) -> Result<(usize, u32), RunError> {
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
        Ok((slot, n_tokens))
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
