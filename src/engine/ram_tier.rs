use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;

use crate::{
    schedule::{PrefixStore, StoredMatch, StoredPrefix, has_layers, n_usable},
    types::Token,
};

/// Prefixes in host memory, shared by all prefill workers, the least recently used first; at most so many bytes.
///
/// ```
/// use eldr::{
///     engine::RamTier,
///     schedule::{PrefixStore, SeqState, StoredMatch, StoredPrefix},
/// };
///
/// let mut tier = RamTier::new(1 << 20);
/// let state = SeqState { n_tokens: 3, bytes: vec![0; 96].into() };
/// tier.put(StoredPrefix { tokens: vec![1, 2, 3], state, counts: None, whole: false });
/// let found: StoredMatch = tier.find(&[1, 2, 9], &[]).expect("it begins alike");
/// assert!(found.n_common == 2 && tier.has(&[1, 2, 3], &[]));
/// ```
#[derive(Clone)]
pub struct RamTier(Arc<Mutex<Kept>>);

struct Kept {
    prefixes: VecDeque<(u64, Arc<StoredPrefix>)>,
    n_ids: u64,
    n_bytes: usize,
    max_bytes: usize,
}

impl RamTier {
    /// An empty one that takes at most `max_bytes` bytes.
    pub fn new(max_bytes: u64) -> Self {
        let max_bytes = usize::try_from(max_bytes).unwrap_or(usize::MAX);
        Self(Arc::new(Mutex::new(Kept { prefixes: VecDeque::new(), n_ids: 0, n_bytes: 0, max_bytes })))
    }

    /// Stores a prefix that another store may have too.
    pub(super) fn put_shared(&self, prefix: Arc<StoredPrefix>) {
        let kept = &mut *self.0.lock();
        let n_bytes = prefix.n_bytes();
        if n_bytes > kept.max_bytes || kept.covers(&prefix.tokens, prefix.layers()) {
            return;
        }
        // What the new one begins with is in it.
        while let Some(at) = kept.prefixes.iter().position(|(_, old)| prefix.covers(&old.tokens, old.layers())) {
            kept.drop_at(at);
        }
        while kept.n_bytes + n_bytes > kept.max_bytes {
            kept.drop_at(0);
        }
        kept.n_bytes += n_bytes;
        kept.n_ids += 1;
        kept.prefixes.push_back((kept.n_ids, prefix));
    }

    /// Bytes it takes now.
    pub(super) fn n_bytes(&self) -> u64 {
        self.0.lock().n_bytes as u64
    }
}

impl PrefixStore for RamTier {
    fn find(&mut self, prompt: &[Token], layers: &[u32]) -> Option<StoredMatch> {
        let kept = self.0.lock();
        let fitting = kept.prefixes.iter().filter(|(_, prefix)| has_layers(prefix.layers(), layers));
        let common = fitting.map(|(id, prefix)| (n_usable(&prefix.tokens, prefix.whole, prompt), *id, prefix));
        let (n_common, id, prefix) = common.max_by_key(|&(n, id, _)| (n, id)).filter(|&(n, ..)| n > 0)?;
        let (n_tokens, n_bytes) = (prefix.tokens.len() as u32, prefix.n_bytes() as u64);
        Some(StoredMatch { id, tier: 0, n_tokens, n_common, n_bytes })
    }

    fn load(&mut self, found: &StoredMatch) -> Option<Arc<StoredPrefix>> {
        let Kept { prefixes, .. } = &mut *self.0.lock();
        let at = prefixes.iter().position(|&(id, _)| id == found.id)?;
        let (id, prefix) = prefixes.remove(at)?;
        prefixes.push_back((id, Arc::clone(&prefix)));
        Some(prefix)
    }

    fn has(&self, tokens: &[Token], layers: &[u32]) -> bool {
        self.0.lock().covers(tokens, layers)
    }

    fn put(&mut self, prefix: StoredPrefix) {
        self.put_shared(Arc::new(prefix));
    }
}

impl Kept {
    fn covers(&self, tokens: &[Token], layers: &[u32]) -> bool {
        self.prefixes.iter().any(|(_, prefix)| prefix.covers(tokens, layers))
    }

    fn drop_at(&mut self, at: usize) {
        if let Some((_, prefix)) = self.prefixes.remove(at) {
            self.n_bytes -= prefix.n_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::SeqState;

    fn prefix(tokens: &[Token], whole: bool) -> StoredPrefix {
        let state = SeqState { n_tokens: tokens.len() as u32, bytes: Arc::from(vec![0; 100 * tokens.len()]) };
        StoredPrefix { tokens: tokens.to_vec(), state, counts: None, whole }
    }

    #[test]
    fn the_least_recently_used_makes_room_and_a_longer_one_stands_for_its_beginnings() {
        let mut tier = RamTier::new(1000);
        tier.put(prefix(&[1, 2, 3, 4], false));
        tier.put(prefix(&[5, 6, 7], false));
        let longest = |prompt: &[Token]| {
            let mut tier = tier.clone();
            let found = tier.find(prompt, &[])?;
            Some((tier.load(&found)?.tokens.clone(), found.n_common))
        };
        assert_eq!(longest(&[1, 2, 9]), Some((vec![1, 2, 3, 4], 2)));
        assert_eq!(longest(&[9]), None);
        tier.put(prefix(&[8, 8, 8], false));
        let has = |tokens: &[Token]| tier.has(tokens, &[]);
        assert!(has(&[1, 2]) && has(&[8]) && !has(&[5]), "5, 6, 7 was used least recently");
        assert!(!tier.has(&[8], &[3]), "the picks of no layer are known");
        tier.put(prefix(&[8, 8, 8, 8], false));
        assert_eq!(tier.0.lock().prefixes.len(), 2);
        tier.put(prefix(&[0; 20], false));
        assert!(!tier.has(&[0], &[]), "larger than all the room there is");
        let kept = tier.0.lock();
        assert_eq!(kept.n_bytes, kept.prefixes.iter().map(|(_, p)| p.n_bytes()).sum::<usize>());
    }

    #[test]
    fn what_can_not_be_cut_stands_for_nothing_but_itself() {
        let mut tier = RamTier::new(10_000);
        tier.put(prefix(&[1, 2, 3, 4], true));
        tier.put(prefix(&[1, 2], true));
        assert!(tier.has(&[1, 2], &[]) && !tier.has(&[1], &[]));
        let found = |prompt: &[Token]| tier.clone().find(prompt, &[]).map(|found| (found.n_common, found.n_tokens));
        assert_eq!(found(&[1, 2, 3]), Some((2, 2)));
        assert_eq!(found(&[1, 2, 3, 4, 5]), Some((4, 4)));
        assert_eq!(found(&[1, 3]), None);
    }
}
