//! What somebody else did to a slot behind the ledger's back: llama.cpp's context shift, say, by a host that shares it.
//!
//! Never repairs it: a slot that is not as it was left is emptied, and what it held is computed again.

use super::PrefixCache;
use crate::{
    kv::PrefixMatch,
    schedule::{ModelRunner, RunError},
    types::Slot,
};

impl PrefixCache {
    /// Empties the slots that hold a match and are not as they were left; whether there was one. One that a prompt has is
    /// left to it: its next chunk fails.
    pub(super) fn drop_changed(&mut self, found: &PrefixMatch, runner: &mut dyn ModelRunner) -> Result<bool, RunError> {
        let is_changed = |&slot: &usize| self.n_there[slot] > 0 && !self.is_as_left(slot, runner);
        let changed: Vec<usize> = self.ledger.holders(found).map(|(slot, _)| slot).filter(is_changed).collect();
        let mut any = false;
        for slot in changed {
            self.unpin_home(slot);
            if !self.ledger.is_pinned(slot) {
                self.empty(slot, runner)?;
                self.change.stats.n_fallbacks += 1;
                any = true;
            }
        }
        Ok(any)
    }

    /// Whether a slot still ends where the ledger says, with all that comes before its end.
    pub(super) fn is_as_left(&self, slot: usize, runner: &dyn ModelRunner) -> bool {
        runner.reaches(Slot(slot as u32), self.n_there[slot])
    }

    /// The slots whose memory is not what the ledger says, and what is there instead.
    pub fn differences(&self, runner: &dyn ModelRunner) -> Vec<(Slot, String)> {
        let slots = self.n_there.iter().enumerate().map(|(slot, &n_there)| (Slot(slot as u32), n_there));
        slots.filter_map(|(slot, n_there)| Some((slot, runner.check_held(slot, n_there).err()?))).collect()
    }

    /// Panics unless the runner's memory holds in every slot what the ledger says.
    pub fn check_against(&self, runner: &dyn ModelRunner) {
        if let Some((slot, problem)) = self.differences(runner).first() {
            panic!("slot {slot} should hold {} tokens: {problem}", self.n_there[slot.index()]);
        }
    }
}
