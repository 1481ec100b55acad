use std::sync::Arc;

use super::{BlockEvent, ChunkCounts, Ledger, composed::Composed};
use crate::signature::ExpertCounts;

/// A row of counts for each block of a [`Ledger`], in one flat array: how many of the block's tokens picked each expert
/// of each counted layer.
///
/// It has no policy of its own: it does what the ledger's events say.
///
/// ```
/// use eldr::kv::{BlockName, ChunkCounts, Ledger, SignatureRows};
///
/// let mut ledger = Ledger::new(4, BlockName::root(["model"]), 1);
/// let mut rows = SignatureRows::new(&[0], 8);
/// // A chunk of two tokens runs, and the tap tells their picks in MoE layer 0.
/// let mut counts = ChunkCounts::new(rows.layers(), rows.n_expert(), 4, 0, 2, 0);
/// counts.add(0, 0, &[3, 5]);
/// counts.add(0, 1, &[3, 6]);
/// ledger.append(0, &[11, 12]);
/// let mut events = Vec::new();
/// ledger.take_events(&mut events);
/// rows.follow(&events, Some(&counts));
/// assert_eq!(rows.sum(&ledger, 0).expect("all picks are known").row(0), Some(&[0, 0, 0, 2, 0, 1, 1, 0][..]));
/// ```
#[derive(Debug)]
pub struct SignatureRows {
    layers: Arc<[u32]>,
    n_expert: u32,
    width: usize,
    rows: Vec<u8>,
    /// By block: tokens whose picks are in its row.
    n_counted: Vec<u8>,
    /// The counts asked for last.
    composed: Composed,
}

impl SignatureRows {
    /// No rows yet, for the MoE layers `layers` (rows of [`MoeShape::layers`](crate::types::MoeShape::layers),
    /// ascending) of `n_expert` experts. Without layers every row is empty and every sum is none.
    pub fn new(layers: &[u32], n_expert: u32) -> Self {
        let width = layers.len() * n_expert as usize;
        let composed = Composed::new(width);
        Self { layers: Arc::from(layers), n_expert, width, rows: Vec::new(), n_counted: Vec::new(), composed }
    }

    /// The counted layers.
    pub fn layers(&self) -> &Arc<[u32]> {
        &self.layers
    }

    /// Experts a layer (E).
    pub fn n_expert(&self) -> u32 {
        self.n_expert
    }

    /// Bytes of a block's row.
    pub fn row_bytes(&self) -> usize {
        self.width
    }

    /// Follows the ledger. `counts` are those of the tokens appended since the last call, if they are known: the ledger
    /// extends a block for each of their runs, in order.
    pub fn follow(&mut self, events: &[BlockEvent], counts: Option<&ChunkCounts>) {
        if self.width == 0 {
            return;
        }
        let mut run = 0;
        for event in events {
            match *event {
                BlockEvent::Allocated(block) => self.begin(block),
                BlockEvent::Extended { block, n_tokens } => {
                    self.composed.drop_last(block, row(&self.rows, self.width, block));
                    let row = counts.and_then(|counts| counts.row(run));
                    run += 1;
                    if let Some(row) = row {
                        self.n_counted[block as usize] += n_tokens as u8;
                        add(&mut self.rows[block as usize * self.width..][..self.width], row);
                    }
                }
                BlockEvent::Copied { from, to } => self.copy(from, to),
                BlockEvent::Merged { from, into } => {
                    if self.n_counted[into as usize] < self.n_counted[from as usize] {
                        self.copy(from, into);
                    }
                }
                BlockEvent::Freed { block, .. } => {
                    self.composed.drop_last(block, row(&self.rows, self.width, block));
                }
                BlockEvent::Filled { .. } | BlockEvent::Shared(_) => {}
            }
        }
        assert!(counts.is_none_or(|counts| run == counts.n_runs()), "{run} runs of counts were used");
    }

    /// A sequence's counts: the sum of its blocks' rows. None if the picks of some tokens are not known. Takes the less time
    /// the more the sequence has in common with the one before.
    pub fn sum(&mut self, ledger: &Ledger, sequence: usize) -> Option<ExpertCounts> {
        let blocks = self.known(ledger, sequence)?;
        let sums = self.composed.of(blocks, |block| row(&self.rows, self.width, block)).to_vec();
        Some(ExpertCounts::from_rows(&self.layers, self.n_expert, ledger.len(sequence), sums))
    }

    /// A sequence's rows as they are, one after another. None if the picks of some tokens are not known.
    pub fn rows(&self, ledger: &Ledger, sequence: usize) -> Option<Vec<u8>> {
        let blocks = self.known(ledger, sequence)?;
        Some(blocks.iter().flat_map(|&block| row(&self.rows, self.width, block)).copied().collect())
    }

    /// Whether the picks of all tokens of a block are known.
    pub fn knows(&self, ledger: &Ledger, block: u32) -> bool {
        let n_counted = self.n_counted.get(block as usize).copied().unwrap_or(0);
        self.width > 0 && u32::from(n_counted) == ledger.block_len(block)
    }

    /// Bytes of all rows, and of the sum.
    pub fn n_bytes(&self) -> u64 {
        (self.rows.len() + self.n_counted.len() + self.composed.n_bytes()) as u64
    }

    fn known<'a>(&self, ledger: &'a Ledger, sequence: usize) -> Option<&'a [u32]> {
        let blocks = ledger.chain(sequence);
        (self.width > 0 && blocks.iter().all(|&block| self.knows(ledger, block))).then_some(blocks)
    }

    fn begin(&mut self, block: u32) {
        let block = block as usize;
        if block >= self.n_counted.len() {
            self.n_counted.resize(block + 1, 0);
            self.rows.resize((block + 1) * self.width, 0);
        }
        self.n_counted[block] = 0;
        self.rows[block * self.width..][..self.width].fill(0);
    }

    fn copy(&mut self, from: u32, to: u32) {
        self.n_counted[to as usize] = self.n_counted[from as usize];
        let start = from as usize * self.width;
        self.rows.copy_within(start..start + self.width, to as usize * self.width);
    }
}

/// The row of a block.
fn row(rows: &[u8], width: usize, block: u32) -> &[u8] {
    &rows[block as usize * width..][..width]
}

/// Bytes of rows that a token takes, where `n_layers` layers of `n_expert` experts are counted in blocks of `block` tokens.
pub fn row_bytes_per_token(n_layers: usize, n_expert: u32, block: u32) -> f64 {
    n_layers as f64 * f64::from(n_expert) / f64::from(block)
}

/// Adds bytes to bytes; none overflows, since a block has at most [`MAX_BLOCK`](super::MAX_BLOCK) tokens.
fn add(sums: &mut [u8], row: &[u8]) {
    for (sum, n) in sums.iter_mut().zip(row) {
        *sum += n;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{kv::BlockName, rng::mix, types::Token};

    const BLOCK: u32 = 4;
    const N_SEQUENCES: usize = 5;
    const LAYERS: [u32; 2] = [0, 3];
    const N_EXPERT: u32 = 5;

    /// The expert that the last of `tokens` picks: it depends on all before it.
    fn pick(tokens: &[Token], layer: u32) -> u32 {
        let hash = tokens.iter().fold(u64::from(layer), |hash, &token| mix(hash ^ token as u64));
        (hash % u64::from(N_EXPERT)) as u32
    }

    /// The counts of a prompt that is run from its first token.
    fn cold(tokens: &[Token]) -> ExpertCounts {
        let mut counts = ExpertCounts::new(&LAYERS, N_EXPERT);
        counts.add_tokens(tokens.len() as u32);
        for layer in LAYERS {
            (1..=tokens.len()).for_each(|n| counts.add(layer, &[pick(&tokens[..n], layer)]));
        }
        counts
    }

    /// The ledger and its rows, beside the plainest thing that does the same: every sequence's tokens.
    struct Both {
        ledger: Ledger,
        rows: SignatureRows,
        plain: Vec<Vec<Token>>,
        pins: Vec<u32>,
        used: Vec<u64>,
        tick: u64,
    }

    impl Both {
        fn new() -> Self {
            Self {
                ledger: Ledger::new(BLOCK, BlockName::root(["test"]), N_SEQUENCES),
                rows: SignatureRows::new(&LAYERS, N_EXPERT),
                plain: vec![Vec::new(); N_SEQUENCES],
                pins: vec![0; N_SEQUENCES],
                used: vec![0; N_SEQUENCES],
                tick: 0,
            }
        }

        fn follow(&mut self, counts: Option<&ChunkCounts>) {
            let mut events = Vec::new();
            self.ledger.take_events(&mut events);
            self.rows.follow(&events, counts);
        }

        fn touch(&mut self, sequence: usize) {
            self.tick += 1;
            self.used[sequence] = self.tick;
        }

        fn append(&mut self, sequence: usize, tokens: &[Token], tap_works: bool) {
            let pos = self.plain[sequence].len();
            self.plain[sequence].extend_from_slice(tokens);
            let end = self.plain[sequence].len() as u32;
            let layers = Arc::clone(self.rows.layers());
            let mut counts = ChunkCounts::new(&layers, N_EXPERT, BLOCK, pos as u32, end, 0);
            for layer in LAYERS {
                for index in 0..tokens.len() {
                    counts.add(layer, index, &[pick(&self.plain[sequence][..=pos + index], layer)]);
                }
            }
            if !tap_works {
                counts.fail();
            }
            self.ledger.append(sequence, tokens);
            self.follow(Some(&counts));
            self.touch(sequence);
        }

        /// What the longest match must be: the end of some sequence's block.
        fn longest(&self, tokens: &[Token]) -> usize {
            let ends = |held: &Vec<Token>| {
                let blocks = (0..=held.len()).step_by(BLOCK as usize).chain([held.len()]);
                blocks.filter(|&end| tokens.starts_with(&held[..end])).max().unwrap_or(0)
            };
            self.plain.iter().map(ends).max().unwrap_or(0)
        }

        fn share(&mut self, sequence: usize, tokens: &[Token]) {
            let found = self.ledger.match_prefix(tokens);
            assert_eq!(found.n_tokens as usize, self.longest(tokens), "match of {tokens:?} in {:?}", self.plain);
            let holders: Vec<usize> = self.ledger.holders(&found).map(|(holder, _)| holder).collect();
            let matched = &tokens[..found.n_tokens as usize];
            if !matched.is_empty() {
                let want = (0..N_SEQUENCES).filter(|&s| self.plain[s].starts_with(matched));
                assert!(!holders.is_empty() && holders.iter().all(|h| want.clone().any(|s| s == *h)), "{holders:?}");
            }
            if self.plain[sequence].is_empty() {
                self.ledger.share(sequence, &found);
                self.follow(None);
                self.plain[sequence] = matched.to_vec();
                self.touch(sequence);
            }
        }

        fn truncate(&mut self, sequence: usize, n_tokens: usize) {
            let left = self.ledger.truncate(sequence, n_tokens as u32) as usize;
            self.follow(None);
            let len = self.plain[sequence].len();
            assert_eq!(left, if n_tokens >= len { len } else { n_tokens / BLOCK as usize * BLOCK as usize });
            self.plain[sequence].truncate(left);
        }

        fn evict(&mut self) {
            let idle = |&s: &usize| self.pins[s] == 0 && !self.plain[s].is_empty();
            let oldest = (0..N_SEQUENCES).filter(idle).min_by_key(|&s| self.used[s]);
            let evicted = self.ledger.evict_block();
            self.follow(None);
            assert_eq!(evicted.map(|(sequence, _)| sequence), oldest);
            if let Some((sequence, left)) = evicted {
                let len = self.plain[sequence].len();
                assert_eq!(left as usize, (len - 1) / BLOCK as usize * BLOCK as usize);
                self.plain[sequence].truncate(left as usize);
            }
        }

        fn run(&mut self, op: &Op) {
            match op {
                Op::Append(sequence, tokens) => self.append(*sequence, tokens, true),
                Op::Share(sequence, tokens) => self.share(*sequence, tokens),
                Op::Truncate(sequence, n_tokens) => self.truncate(*sequence, *n_tokens),
                Op::Clear(sequence) => self.truncate(*sequence, 0),
                Op::Evict => self.evict(),
                Op::Pin(sequence) => {
                    self.ledger.pin(*sequence);
                    self.pins[*sequence] += 1;
                }
                Op::Unpin(sequence) => {
                    if self.ledger.is_pinned(*sequence) {
                        self.ledger.unpin(*sequence);
                        self.pins[*sequence] -= 1;
                        self.touch(*sequence);
                    }
                }
            }
            self.check();
        }

        fn check(&mut self) {
            self.ledger.check_integrity();
            let mut prefixes = std::collections::BTreeSet::new();
            for (sequence, held) in self.plain.iter().enumerate() {
                assert_eq!(self.ledger.tokens(sequence), *held);
                assert_eq!(self.rows.sum(&self.ledger, sequence), Some(cold(held)), "counts of sequence {sequence}");
                let full = held.len() / BLOCK as usize;
                prefixes.extend((1..=full).map(|n| &held[..n * BLOCK as usize]));
            }
            let n_partial = self.plain.iter().filter(|held| held.len() % BLOCK as usize > 0).count();
            let n_blocks = self.ledger.n_blocks();
            assert!((prefixes.len()..=prefixes.len() + n_partial).contains(&n_blocks), "{n_blocks} blocks");
        }
    }

    #[derive(Debug, Clone)]
    enum Op {
        Append(usize, Vec<Token>),
        Share(usize, Vec<Token>),
        Truncate(usize, usize),
        Clear(usize),
        Pin(usize),
        Unpin(usize),
        Evict,
    }

    fn op() -> impl Strategy<Value = Op> {
        // Two different tokens, so that sequences often begin alike.
        let tokens = |n| prop::collection::vec(0..2 as Token, 1..n);
        let sequence = 0..N_SEQUENCES;
        prop_oneof![
            4 => (sequence.clone(), tokens(11)).prop_map(|(s, t)| Op::Append(s, t)),
            4 => (sequence.clone(), tokens(17)).prop_map(|(s, t)| Op::Share(s, t)),
            2 => (sequence.clone(), 0usize..20).prop_map(|(s, n)| Op::Truncate(s, n)),
            1 => sequence.clone().prop_map(Op::Clear),
            1 => sequence.clone().prop_map(Op::Pin),
            2 => sequence.prop_map(Op::Unpin),
            2 => Just(Op::Evict),
        ]
    }

    proptest! {
        #[test]
        fn after_any_operations_sequences_and_counts_are_those_of_a_plain_list(
            ops in prop::collection::vec(op(), 1..120)
        ) {
            let mut both = Both::new();
            for op in &ops {
                both.run(op);
            }
            for sequence in 0..N_SEQUENCES {
                both.truncate(sequence, 0);
            }
            both.check();
            prop_assert_eq!((both.ledger.n_blocks(), both.ledger.n_tokens()), (0, 0));
        }
    }

    #[test]
    fn a_failed_tap_leaves_its_blocks_unknown_and_a_later_copy_makes_them_known() {
        let mut both = Both::new();
        both.append(0, &[1, 0, 1, 1], false);
        both.append(0, &[0, 0], true);
        assert_eq!(both.rows.sum(&both.ledger, 0), None);
        both.append(1, &[1, 0, 1, 1], true);
        assert_eq!(both.rows.sum(&both.ledger, 0), Some(cold(&[1, 0, 1, 1, 0, 0])), "the merged block has counts now");
        assert_eq!(both.ledger.chain(0)[0], both.ledger.chain(1)[0]);
    }

    // 48 layers of 128 experts; 4 heads of 128 keys and 128 values, 16 bits each, in every layer.
    #[test]
    fn rows_take_a_fifth_of_a_percent_of_a_large_models_keys_and_values() {
        let kv = f64::from(48 * 4 * (128 + 128) * 2);
        let share = row_bytes_per_token(48, 128, crate::kv::BLOCK) / kv;
        assert!(share <= 0.002, "{share}");
    }

    #[test]
    fn without_layers_there_are_no_counts() {
        let mut ledger = Ledger::new(BLOCK, BlockName::root(["dense"]), 1);
        let mut rows = SignatureRows::new(&[], 0);
        ledger.append(0, &[1, 2, 3, 4, 5]);
        let mut events = Vec::new();
        ledger.take_events(&mut events);
        rows.follow(&events, None);
        assert_eq!((rows.sum(&ledger, 0), rows.row_bytes()), (None, 0));
    }
}
