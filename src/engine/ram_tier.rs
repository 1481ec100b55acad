use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;

use crate::{
    schedule::{PrefixStore, StoredPrefix},
    types::Token,
};

/// Prefixes in host memory, shared by all prefill workers, the least recently used first; at most so many bytes.
///
/// ```
/// use eldr::{
///     engine::RamTier,
///     schedule::{PrefixStore, SeqState, StoredPrefix},
/// };
///
/// let mut tier = RamTier::new(1 << 20);
/// let state = SeqState { n_tokens: 3, bytes: vec![0; 96].into() };
/// tier.put(StoredPrefix { tokens: vec![1, 2, 3], state, counts: None });
/// let (_, n_common) = tier.longest(&[1, 2, 9]).expect("it begins alike");
/// assert!(n_common == 2 && tier.has(&[1, 2, 3]));
/// ```
#[derive(Clone)]
pub struct RamTier(Arc<Mutex<Kept>>);

struct Kept {
    prefixes: VecDeque<Arc<StoredPrefix>>,
    n_bytes: usize,
    max_bytes: usize,
}

impl RamTier {
    /// An empty one that takes at most `max_bytes` bytes.
    pub fn new(max_bytes: u64) -> Self {
        let max_bytes = usize::try_from(max_bytes).unwrap_or(usize::MAX);
        Self(Arc::new(Mutex::new(Kept { prefixes: VecDeque::new(), n_bytes: 0, max_bytes })))
    }
}

impl PrefixStore for RamTier {
    fn longest(&mut self, prompt: &[Token]) -> Option<(Arc<StoredPrefix>, usize)> {
        let Kept { prefixes, .. } = &mut *self.0.lock();
        let common = prefixes.iter().map(|prefix| prefix.n_common(prompt)).enumerate();
        let (at, n) = common.max_by_key(|&(at, n)| (n, at)).filter(|&(_, n)| n > 0)?;
        let prefix = prefixes.remove(at)?;
        prefixes.push_back(Arc::clone(&prefix));
        Some((prefix, n))
    }

    fn has(&self, tokens: &[Token]) -> bool {
        self.0.lock().prefixes.iter().any(|prefix| prefix.tokens.starts_with(tokens))
    }

    fn put(&mut self, prefix: StoredPrefix) {
        let kept = &mut *self.0.lock();
        let n_bytes = prefix.n_bytes();
        if n_bytes > kept.max_bytes {
            return;
        }
        // What the new one begins with is in it.
        let older = |other: &Arc<StoredPrefix>| prefix.tokens.starts_with(&other.tokens);
        while let Some(at) = kept.prefixes.iter().position(older) {
            kept.drop_at(at);
        }
        while kept.n_bytes + n_bytes > kept.max_bytes {
            kept.drop_at(0);
        }
        kept.n_bytes += n_bytes;
        kept.prefixes.push_back(Arc::new(prefix));
    }
}

impl Kept {
    fn drop_at(&mut self, at: usize) {
        if let Some(prefix) = self.prefixes.remove(at) {
            self.n_bytes -= prefix.n_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::SeqState;

    fn prefix(tokens: &[Token]) -> StoredPrefix {
        let state = SeqState { n_tokens: tokens.len() as u32, bytes: Arc::from(vec![0; 100 * tokens.len()]) };
        StoredPrefix { tokens: tokens.to_vec(), state, counts: None }
    }

    #[test]
    fn the_least_recently_used_makes_room_and_a_longer_one_stands_for_its_beginnings() {
        let mut tier = RamTier::new(1000);
        tier.put(prefix(&[1, 2, 3, 4]));
        tier.put(prefix(&[5, 6, 7]));
        let longest = |prompt: &[Token]| tier.clone().longest(prompt).map(|(p, n)| (p.tokens.clone(), n));
        assert_eq!(longest(&[1, 2, 9]), Some((vec![1, 2, 3, 4], 2)));
        assert_eq!(longest(&[9]), None);
        tier.put(prefix(&[8, 8, 8]));
        assert!(tier.has(&[1, 2]) && tier.has(&[8]) && !tier.has(&[5]), "5, 6, 7 was used least recently");
        tier.put(prefix(&[8, 8, 8, 8]));
        assert_eq!(tier.0.lock().prefixes.len(), 2);
        tier.put(prefix(&[0; 20]));
        assert!(!tier.has(&[0]), "larger than all the room there is");
        let kept = tier.0.lock();
        assert_eq!(kept.n_bytes, kept.prefixes.iter().map(|p| p.n_bytes()).sum::<usize>());
    }
}
