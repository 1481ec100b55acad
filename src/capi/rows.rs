//! Which experts the tokens in a host's KV cache picked: rows that are shared, cut and moved as its sequences are.
//!
//! Never decides what stays: it follows the host's calls, so the counts of a sequence are always those of a cold prefill.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

/// Tokens a block has at most, so that a cut adds up few picks one by one.
const MAX_TOKENS: usize = 128;

/// A number of tokens as positions have it.
fn signed(n: usize) -> i32 {
    i32::try_from(n).expect("no more tokens than positions")
}

/// Picks of tokens that came together.
struct Block {
    n_tokens: usize,
    /// Layer by layer, token by token: k ids.
    picks: Box<[u16]>,
    /// Layer by layer: how often each expert was picked. Only where adding it is less work than adding the picks.
    row: Option<Box<[u16]>>,
}

/// Neighbouring tokens of a block, at neighbouring positions.
#[derive(Clone)]
struct Span {
    pos: i32,
    first: usize,
    n: usize,
    block: Arc<Block>,
}

impl Span {
    fn end(&self) -> i32 {
        self.pos + signed(self.n)
    }

    /// The part within `range`, which it touches.
    fn within(&self, range: &Range<i32>) -> Self {
        let from = self.pos.max(range.start);
        let to = self.end().min(range.end);
        Self { pos: from, first: self.first + (from - self.pos) as usize, n: (to - from) as usize, ..self.clone() }
    }

    fn touches(&self, range: &Range<i32>) -> bool {
        self.pos < range.end && range.start < self.end()
    }
}

/// The picks of every token of every sequence, in the layers of one mask.
///
/// Costs 2 bytes a pick, and 2 an expert of each layer for every long block; tokens that sequences share are kept
/// once.
pub(super) struct Rows {
    n_layer: usize,
    n_expert: usize,
    n_expert_used: usize,
    /// By sequence, ascending by position, without overlaps.
    sequences: BTreeMap<i32, Vec<Span>>,
}

impl Rows {
    pub(super) fn new(n_layer: usize, n_expert: usize, n_expert_used: usize) -> Self {
        assert!(n_expert <= usize::from(u16::MAX) + 1, "{n_expert} experts a layer");
        Self { n_layer, n_expert, n_expert_used, sequences: BTreeMap::new() }
    }

    /// Notes the picks of `n` tokens at `pos` and after it, instead of what was noted there: `picks(layer)` has k ids
    /// below the number of experts for each. Positions stay below `i32::MAX`.
    pub(super) fn put<'a>(&mut self, seq: i32, pos: i32, n: usize, picks: impl Fn(usize) -> &'a [u32]) {
        self.remove_from(seq, &(pos..pos + signed(n)));
        let mut spans = Vec::new();
        for first in (0..n).step_by(MAX_TOKENS) {
            let length = MAX_TOKENS.min(n - first);
            let k = self.n_expert_used;
            let of_layer = |layer| &picks(layer)[first * k..(first + length) * k];
            let block = Arc::new(self.block(length, of_layer));
            spans.push(Span { pos: pos + signed(first), first: 0, n: length, block });
        }
        self.insert(seq, spans);
    }

    fn block<'a>(&self, n_tokens: usize, picks: impl Fn(usize) -> &'a [u32]) -> Block {
        let ids: Box<[u16]> = (0..self.n_layer).flat_map(&picks).map(|&id| id as u16).collect();
        let row = (n_tokens * self.n_expert_used > self.n_expert).then(|| {
            let mut row = vec![0u16; self.n_layer * self.n_expert].into_boxed_slice();
            for (layer, counts) in row.chunks_exact_mut(self.n_expert).enumerate() {
                for &id in picks(layer) {
                    counts[id as usize] += 1;
                }
            }
            row
        });
        Block { n_tokens, picks: ids, row }
    }

    /// As llama_memory_seq_rm: forgets the positions `range` of a sequence.
    pub(super) fn remove(&mut self, seq: Option<i32>, range: &Range<i32>) {
        let all: Vec<i32> = seq.map_or_else(|| self.sequences.keys().copied().collect(), |seq| vec![seq]);
        for seq in all {
            self.remove_from(seq, range);
        }
    }

    fn remove_from(&mut self, seq: i32, range: &Range<i32>) {
        let Some(spans) = self.sequences.remove(&seq) else { return };
        let parts = |span: &Span| {
            [i32::MIN..range.start, range.end..i32::MAX]
                .into_iter()
                .filter(|side| span.touches(side) && !range.is_empty())
                .map(|side| span.within(&side))
                .collect::<Vec<_>>()
        };
        let left: Vec<Span> = if range.is_empty() { spans } else { spans.iter().flat_map(parts).collect() };
        if !left.is_empty() {
            self.sequences.insert(seq, left);
        }
    }

    /// As llama_memory_seq_cp: the positions `range` of `from` belong to `to`, too.
    pub(super) fn copy(&mut self, from: i32, to: i32, range: &Range<i32>) {
        if from == to || range.is_empty() {
            return;
        }
        let spans: Vec<Span> = self.within(from, range).collect();
        for span in &spans {
            self.remove_from(to, &(span.pos..span.end()));
        }
        self.insert(to, spans);
    }

    /// As llama_memory_seq_keep: forgets all other sequences.
    pub(super) fn keep(&mut self, seq: i32) {
        self.sequences.retain(|&other, _| other == seq);
    }

    /// As llama_memory_seq_add: moves the positions `range` by `delta`; those that fall below 0 are forgotten, and where
    /// they meet others they take their place.
    pub(super) fn shift(&mut self, seq: i32, range: &Range<i32>, delta: i32) {
        let moved: Vec<Span> = self.within(seq, range).collect();
        self.remove_from(seq, range);
        let place = |span: Span| Span { pos: span.pos.saturating_add(delta), ..span };
        let room = 0..i32::MAX;
        let fits = |span: &Span| span.pos.checked_add(signed(span.n)).is_some() && span.touches(&room);
        let moved: Vec<Span> = moved.into_iter().map(place).filter(fits).map(|span| span.within(&room)).collect();
        for span in &moved {
            self.remove_from(seq, &(span.pos..span.end()));
        }
        self.insert(seq, moved);
    }

    pub(super) fn clear(&mut self) {
        self.sequences.clear();
    }

    /// How many tokens of the positions `range` are known, and how often they picked each expert, layer by layer.
    pub(super) fn counts(&self, seq: i32, range: &Range<i32>) -> (u32, Vec<u32>) {
        let mut counts = vec![0; self.n_layer * self.n_expert];
        let mut n_tokens = 0;
        for span in self.within(seq, range) {
            n_tokens += span.n as u32;
            match &span.block.row {
                Some(row) if span.n == span.block.n_tokens => {
                    counts.iter_mut().zip(row).for_each(|(sum, &n)| *sum += u32::from(n));
                }
                _ => self.add_picks(&span, &mut counts),
            }
        }
        (n_tokens, counts)
    }

    fn add_picks(&self, span: &Span, counts: &mut [u32]) {
        let k = self.n_expert_used;
        for (layer, counts) in counts.chunks_exact_mut(self.n_expert).enumerate() {
            let start = (layer * span.block.n_tokens + span.first) * k;
            for &id in &span.block.picks[start..start + span.n * k] {
                counts[usize::from(id)] += 1;
            }
        }
    }

    /// Bytes of picks and rows; what several sequences share counts once.
    pub(super) fn n_bytes(&self) -> usize {
        let blocks = self.sequences.values().flatten().map(|span| &span.block);
        let by_place: BTreeMap<usize, &Arc<Block>> = blocks.map(|block| (Arc::as_ptr(block).addr(), block)).collect();
        by_place.values().map(|block| block.picks.len() * 2 + block.row.as_ref().map_or(0, |row| row.len() * 2)).sum()
    }

    fn within(&self, seq: i32, range: &Range<i32>) -> impl Iterator<Item = Span> {
        let spans = self.sequences.get(&seq).map(Vec::as_slice).unwrap_or_default();
        spans.iter().filter(|span| !range.is_empty() && span.touches(range)).map(|span| span.within(range))
    }

    /// Adds spans to a sequence that has nothing at their positions.
    fn insert(&mut self, seq: i32, spans: Vec<Span>) {
        if spans.is_empty() {
            return;
        }
        let all = self.sequences.entry(seq).or_default();
        all.extend(spans);
        all.sort_by_key(|span| span.pos);
        assert!(all.windows(2).all(|w| w[0].end() <= w[1].pos), "sequence {seq} has two tokens at one position");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::rng::mix;

    const L: usize = 2;
    const E: usize = 8;
    const K: usize = 2;

    /// Distinct ids that depend on a token's number.
    fn ids(token: u64, layer: usize) -> [u32; K] {
        let first = mix(token ^ ((layer as u64) << 32)) % E as u64;
        [first as u32, ((first + 3) % E as u64) as u32]
    }

    /// The definition: the number of the token at each position of each sequence.
    type Plain = BTreeMap<(i32, i32), u64>;

    fn plain_counts(plain: &Plain, seq: i32, range: &Range<i32>) -> (u32, Vec<u32>) {
        let mut counts = vec![0; L * E];
        let mut n = 0;
        for (_, &token) in plain.iter().filter(|((s, pos), _)| *s == seq && range.contains(pos)) {
            n += 1;
            for layer in 0..L {
                for id in ids(token, layer) {
                    counts[layer * E + id as usize] += 1;
                }
            }
        }
        (n, counts)
    }

    fn put(rows: &mut Rows, plain: &mut Plain, seq: i32, pos: i32, n: usize, token: u64) {
        let picks: Vec<Vec<u32>> =
            (0..L).map(|layer| (0..n as u64).flat_map(|i| ids(token + i, layer)).collect()).collect();
        rows.put(seq, pos, n, |layer| &picks[layer]);
        plain.extend((0..n).map(|i| ((seq, pos + signed(i)), token + i as u64)));
    }

    fn plain_shift(plain: &mut Plain, seq: i32, range: &Range<i32>, delta: i32) {
        let moved: Vec<(i32, u64)> = plain
            .iter()
            .filter(|((s, pos), _)| *s == seq && range.contains(pos))
            .map(|(&(_, pos), &token)| (pos, token))
            .collect();
        plain.retain(|(s, pos), _| *s != seq || !range.contains(pos));
        plain.extend(moved.into_iter().filter(|(pos, _)| pos + delta >= 0).map(|(pos, t)| ((seq, pos + delta), t)));
    }

    proptest! {
        #[test]
        fn counts_follow_the_cache_through_any_calls(
            calls in prop::collection::vec((0u8..6, 0i32..3, 0i32..3, 0i32..300, 0i32..300, -40i32..40), 1..30),
        ) {
            let mut rows = Rows::new(L, E, K);
            let mut plain = Plain::new();
            for (step, (what, a, b, p0, p1, delta)) in calls.into_iter().enumerate() {
                let range = p0..p1;
                match what {
                    0 | 1 => put(&mut rows, &mut plain, a, p0, p1 as usize, step as u64 * 1000),
                    2 => {
                        rows.remove(Some(a), &range);
                        plain.retain(|(seq, pos), _| *seq != a || !range.contains(pos));
                    }
                    3 => {
                        rows.copy(a, b, &range);
                        let copied: Vec<_> = plain
                            .iter()
                            .filter(|((seq, pos), _)| *seq == a && range.contains(pos))
                            .map(|(&(_, pos), &token)| ((b, pos), token))
                            .collect();
                        plain.extend(copied);
                    }
                    4 => {
                        rows.shift(a, &range, delta);
                        plain_shift(&mut plain, a, &range, delta);
                    }
                    _ => {
                        rows.remove(None, &range);
                        plain.retain(|(_, pos), _| !range.contains(pos));
                    }
                }
                for seq in 0..3 {
                    for range in [0..i32::MAX, p0..p1] {
                        prop_assert_eq!(rows.counts(seq, &range), plain_counts(&plain, seq, &range));
                    }
                }
            }
            rows.keep(1);
            prop_assert_eq!(rows.counts(0, &(0..i32::MAX)).0, 0);
            rows.clear();
            prop_assert_eq!(rows.n_bytes(), 0);
        }
    }

    #[test]
    fn what_sequences_share_is_kept_once() {
        let mut rows = Rows::new(L, E, K);
        put(&mut rows, &mut Plain::new(), 0, 0, 100, 0);
        let one = rows.n_bytes();
        assert_eq!(one, L * 100 * K * 2 + L * E * 2);
        rows.copy(0, 1, &(0..60));
        rows.copy(0, 2, &(0..i32::MAX));
        assert_eq!(rows.n_bytes(), one);
        rows.remove(Some(0), &(0..i32::MAX));
        assert_eq!((rows.n_bytes(), rows.counts(1, &(0..i32::MAX)).0), (one, 60));
    }
}
