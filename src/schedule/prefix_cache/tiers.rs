//! What leaves a prefill worker's slots and comes back: to and from host memory, a disk and decode workers.
//!
//! Never uses a stored prefix whose picks are not known where picks are counted.

use super::PrefixCache;
use crate::{
    kv::{ChunkCounts, PrefixMatch},
    schedule::{Leftover, ModelRunner, PrefixStore, Reuse, RunError, StoredPrefix},
    types::{Slot, Token},
};

impl PrefixCache {
    /// Where prefixes go that must make room.
    pub(in crate::schedule) fn spill_to(&mut self, store: Option<Box<dyn PrefixStore>>) {
        self.store = store.filter(|_| self.reuse != Reuse::Nothing);
    }

    /// Puts a stored prefix into a slot, if it has enough more of `tokens` than the `n_reached` that a slot can give;
    /// `found` is what is held then. The tokens that came back.
    pub(super) fn restore(
        &mut self,
        tokens: &[Token],
        n_reached: u32,
        found: &mut PrefixMatch,
        runner: &mut dyn ModelRunner,
    ) -> Result<u32, RunError> {
        let layers = if self.blind { &[] } else { &**self.rows.layers() };
        let Some(store) = &mut self.store else { return Ok(0) };
        let Some(stored) = store.find(tokens, layers) else { return Ok(0) };
        let n_usable = if stored.n_common == stored.n_tokens {
            stored.n_tokens
        } else {
            stored.n_common / self.config.block * self.config.block
        };
        let n_saved = n_usable.saturating_sub(n_reached);
        if n_saved == 0 {
            return Ok(0);
        }
        if !store.is_faster(&stored, n_saved) {
            self.change.stats.n_not_worth += 1;
            return Ok(0);
        }
        let Some(prefix) = store.load(&stored) else { return Ok(0) };
        let counts = prefix.counts.as_ref().and_then(|counts| self.fitting(counts));
        if counts.is_none() && !self.layers().is_empty() {
            self.change.stats.n_uncounted += 1;
            return Ok(0);
        }
        let Some(slot) = self.free_slot(None) else { return Ok(0) };
        self.make_room(slot, runner)?;
        let imported = runner.import(Slot(slot as u32), &prefix.state);
        let mut n_restored = 0;
        if self.arrived(slot, stored.n_tokens, imported)?.1 > 0 {
            self.ledger.append(slot, &prefix.tokens);
            self.follow(counts.as_ref());
            self.change.stats.n_restored_tokens += u64::from(stored.n_tokens);
            n_restored = n_usable;
            if n_usable < stored.n_tokens {
                let left = self.ledger.truncate(slot, n_usable);
                self.cut(slot, left, runner)?;
            }
        }
        // Whatever came of it: what was held before may have made room. What is longer can not be reached.
        let most = if n_restored > 0 { n_restored as usize } else { tokens.len() };
        *found = self.find(&tokens[..most], false);
        Ok(n_restored)
    }

    /// Stored counts as those of this cache's blocks and layers; none if they are others.
    fn fitting(&self, counts: &ChunkCounts) -> Option<ChunkCounts> {
        let alike = counts.block() == self.config.block && counts.n_expert() == self.rows.n_expert();
        if alike { counts.of_layers(self.rows.layers()) } else { None }
    }

    /// Stores what a slot holds elsewhere, if there is such a place and it is not there yet; whether it is there now. A
    /// state that can not be copied out is simply gone.
    pub(super) fn spill(&mut self, slot: usize, runner: &mut dyn ModelRunner) -> bool {
        let layers = if self.blind { &[] } else { &**self.rows.layers() };
        let Some(store) = &self.store else { return false };
        let mut tokens = self.ledger.tokens(slot);
        tokens.truncate(self.n_there[slot] as usize);
        if tokens.len() < self.config.block as usize || store.has(&tokens, layers) {
            return false;
        }
        let rows =
            if tokens.len() == self.ledger.len(slot) as usize { self.rows.rows(&self.ledger, slot) } else { None };
        if rows.is_none() && !layers.is_empty() {
            return false;
        }
        if !self.is_as_left(slot, runner) {
            return false;
        }
        let Some(store) = &mut self.store else { return false };
        let Ok(state) = runner.export(Slot(slot as u32)) else { return false };
        let (layers, n_expert, block) = (self.rows.layers(), self.rows.n_expert(), self.config.block);
        let counts = rows.map(|rows| ChunkCounts::from_rows(layers, n_expert, block, state.n_tokens, rows));
        let whole = matches!(self.reuse, Reuse::Whole | Reuse::Window);
        store.put(StoredPrefix { tokens, state, counts, whole });
        self.change.stats.n_spilled += 1;
        true
    }

    /// Stores how far a slot's prompt is, if its next chunk goes past what another prompt has in common with it and the
    /// model's memory could not be cut to that: the third prompt that begins so finds it.
    pub(in crate::schedule) fn checkpoint(&mut self, slot: Slot, chunk: u32, runner: &mut dyn ModelRunner) {
        let n_there = self.n_there[slot.index()];
        let n_uncut = self.n_uncut[slot.index()];
        let is_last = n_there <= n_uncut && n_there + chunk > n_uncut;
        if n_there > 0 && is_last && n_there.is_multiple_of(self.config.align) && self.spill(slot.index(), runner) {
            self.change.stats.n_spilled -= 1;
            self.change.stats.n_checkpoints += 1;
        }
    }

    /// Stores all that is kept where it will last. Only at the end.
    pub(in crate::schedule) fn save(&mut self, runner: &mut dyn ModelRunner) {
        if let Some(store) = self.store.as_mut().filter(|store| store.lasts()) {
            store.closing();
            for slot in 0..self.n_there.len() {
                self.spill(slot, runner);
            }
        }
    }

    /// Takes in what a finished request left on its decode worker, if its prompt is still held here. Errors: fatal ones.
    pub(in crate::schedule) fn take_in(
        &mut self,
        left: &Leftover,
        runner: &mut dyn ModelRunner,
    ) -> Result<(), RunError> {
        let (n_base, n_tokens) = (left.n_base, left.tokens.len() as u32);
        let prompt = self.find(&left.tokens[..n_base as usize], false);
        let is_new = self.ledger.match_prefix(&left.tokens).n_tokens < n_tokens;
        let counts = left.counts.as_ref().filter(|counts| counts.layers() == &**self.rows.layers());
        if !is_new || prompt.n_tokens < n_base || (counts.is_none() && !self.layers().is_empty()) {
            return Ok(());
        }
        let Some(slot) = self.free_slot(None) else { return Ok(()) };
        // Its blocks must outlive the slot that may have to make room.
        let Some(holder) = self.ledger.holders(&prompt).map(|(holder, _)| holder).find(|&holder| holder != slot) else {
            return Ok(());
        };
        self.make_room(slot, runner)?;
        let imported = runner.import(Slot(slot as u32), &left.state);
        if self.arrived(slot, n_tokens, imported)?.1 == 0 {
            return Ok(());
        }
        self.ledger.share(slot, &prompt);
        self.follow(None);
        self.ledger.append(slot, &left.tokens[n_base as usize..]);
        self.follow(counts);
        // What the answer's slot holds too would only take the room of another prompt.
        if self.reuse == Reuse::Prefix && left.tokens.starts_with(&self.ledger.tokens(holder)) {
            self.ledger.retire(holder);
        }
        self.change.stats.n_returned += 1;
        self.keep_to_budget(runner)
    }
}
