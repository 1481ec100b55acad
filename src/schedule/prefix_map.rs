use crate::{
    kv::{BlockName, NameSet, names},
    schedule::{CacheChange, CacheStats},
    types::{RequestId, Token, WorkerId},
};

/// Which beginnings of prompts each prefill worker holds, as far as the workers have said, or will when the prompts they
/// were given have run. It may lag behind; a worker looks for itself.
#[derive(Debug, Default)]
pub(super) struct PrefixMap {
    /// Tokens of a block, and the name before the first; none where nothing is kept.
    block: Option<(u32, BlockName)>,
    workers: Vec<Held>,
}

#[derive(Debug, Clone, Default)]
struct Held {
    names: NameSet,
    stats: CacheStats,
    /// Prompts on their way.
    given: Vec<(RequestId, Vec<BlockName>)>,
}

impl PrefixMap {
    /// A map of `n_workers` workers that keep blocks of `block` tokens, named from `root` on.
    pub fn new(n_workers: usize, block: u32, root: BlockName) -> Self {
        Self { block: Some((block, root)), workers: vec![Held::default(); n_workers] }
    }

    /// What a prompt's blocks are called; nothing where nothing is kept.
    pub fn names(&self, prompt: &[Token]) -> Vec<BlockName> {
        self.block.map_or_else(Vec::new, |(block, root)| names(root, block, prompt))
    }

    /// Tokens of a prompt that a worker holds, or will hold when it gets there.
    pub fn n_cached(&self, worker: usize, prompt: &[BlockName]) -> u64 {
        let (Some((block, _)), Some(held)) = (self.block, self.workers.get(worker)) else { return 0 };
        let told = prompt.iter().take_while(|name| held.names.contains(name)).count();
        let common = |other: &[BlockName]| prompt.iter().zip(other).take_while(|(a, b)| a == b).count();
        let given = held.given.iter().map(|(_, other)| common(other)).max().unwrap_or(0);
        (told.max(given) as u64) * u64::from(block)
    }

    /// A worker was given a prompt.
    pub fn give(&mut self, worker: usize, id: RequestId, prompt: Vec<BlockName>) {
        if let Some(held) = self.workers.get_mut(worker) {
            held.given.push((id, prompt));
        }
    }

    /// A prompt has left a worker.
    pub fn leave(&mut self, worker: WorkerId, id: RequestId) {
        if let Some(held) = self.workers.get_mut(worker.index()) {
            held.given.retain(|(other, _)| *other != id);
        }
    }

    /// Takes in what a worker says of itself.
    pub fn apply(&mut self, worker: WorkerId, change: &CacheChange) {
        let Some(held) = self.workers.get_mut(worker.index()) else { return };
        held.stats = change.stats;
        for &(name, came) in &change.blocks {
            if came {
                held.names.insert(name);
            } else {
                held.names.remove(&name);
            }
        }
    }

    /// A lost worker holds nothing.
    pub fn lose(&mut self, worker: WorkerId) {
        if let Some(held) = self.workers.get_mut(worker.index()) {
            held.names.clear();
            held.given.clear();
            held.stats.n_held_tokens = 0;
        }
    }

    /// What all workers' caches did together.
    pub fn stats(&self) -> CacheStats {
        let mut sum = CacheStats::default();
        self.workers.iter().for_each(|held| sum += held.stats);
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_holds_what_it_said_and_what_it_was_given() {
        let mut map = PrefixMap::new(2, 4, BlockName::root(["m"]));
        let prompt: Vec<Token> = (0..18).collect();
        let names = map.names(&prompt);
        assert_eq!((names.len(), map.n_cached(0, &names)), (4, 0));
        map.give(0, RequestId(7), map.names(&prompt[..9]));
        assert_eq!((map.n_cached(0, &names), map.n_cached(1, &names)), (8, 0));
        let came: Vec<_> = names.iter().map(|&name| (name, true)).collect();
        map.apply(WorkerId(1), &CacheChange { blocks: came, ..CacheChange::default() });
        assert_eq!(map.n_cached(1, &names), 16);
        map.apply(WorkerId(1), &CacheChange { blocks: vec![(names[2], false)], ..CacheChange::default() });
        assert_eq!(map.n_cached(1, &names), 8);
        map.leave(WorkerId(0), RequestId(7));
        map.lose(WorkerId(1));
        assert_eq!((map.n_cached(0, &names), map.n_cached(1, &names)), (0, 0));
        assert!(PrefixMap::default().names(&prompt).is_empty());
    }
}
