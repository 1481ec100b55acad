use std::collections::BTreeSet;

use super::{
    BlockEvent, BlockName,
    pool::{NONE, Pool},
};
use crate::types::Token;

/// Which sequence of a worker holds which tokens, in blocks that sequences with the same beginning share.
///
/// It mirrors what is done to llama.cpp's memory: tokens run, copied, cut off. Sequences are numbered like the
/// worker's slots. One that is not pinned is kept only as long as nothing else needs its place.
///
/// ```
/// use eldr::kv::{BlockEvent, BlockName, Ledger, PrefixMatch};
///
/// // Two sequences, blocks of 4 tokens.
/// let mut ledger = Ledger::new(4, BlockName::root(["model", "f16"]), 2);
/// ledger.append(0, &[1, 2, 3, 4, 5, 6]);
/// // A prompt that begins with the first block: the second sequence gets a copy of it, then runs the rest.
/// let found: PrefixMatch = ledger.match_prefix(&[1, 2, 3, 4, 9]);
/// assert_eq!(found.n_tokens, 4);
/// ledger.share(1, &found);
/// ledger.append(1, &[9]);
/// assert_eq!(ledger.n_tokens(), 7, "shared tokens count once");
///
/// let mut events = Vec::new();
/// ledger.take_events(&mut events);
/// assert!(events.contains(&BlockEvent::Shared(found.blocks[0])));
/// ledger.check_integrity();
/// ```
#[derive(Debug)]
pub struct Ledger {
    pool: Pool,
    sequences: Vec<Sequence>,
    /// Sequences that hold tokens and are not pinned, the least recently used first.
    idle: BTreeSet<(u64, usize)>,
    tick: u64,
}

#[derive(Debug, Clone, Default)]
struct Sequence {
    chain: Vec<u32>,
    n_tokens: u32,
    n_pins: u32,
    used: u64,
}

/// The longest beginning of a prompt that some sequence holds, to the end of a block.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PrefixMatch {
    /// The blocks, in order. The last may have room for more.
    pub blocks: Vec<u32>,
    /// Their tokens.
    pub n_tokens: u32,
}

impl Ledger {
    /// A ledger of `n_sequences` empty sequences in blocks of `block` tokens. `root` stands for all that the keys and
    /// values depend on besides the tokens.
    pub fn new(block: u32, root: BlockName, n_sequences: usize) -> Self {
        assert!(block > 0, "blocks of no tokens");
        let sequences = vec![Sequence::default(); n_sequences];
        Self { pool: Pool::new(block, root), sequences, idle: BTreeSet::new(), tick: 0 }
    }

    /// The longest beginning of `tokens` that is held. A block counts only if all its tokens are among them: what the
    /// tokens of a part picked is not known.
    pub fn match_prefix(&self, tokens: &[Token]) -> PrefixMatch {
        let mut found = PrefixMatch::default();
        let (mut parent, mut name) = (NONE, self.pool.name_after(NONE));
        let size = self.pool.size();
        for block in tokens.chunks_exact(size) {
            name = name.then(block);
            let Some(id) = self.pool.full_child(parent, name, block) else { break };
            found.blocks.push(id);
            found.n_tokens += size as u32;
            parent = id;
        }
        if let Some(id) = self.pool.partial_child(parent, &tokens[found.n_tokens as usize..]) {
            found.blocks.push(id);
            found.n_tokens += self.pool.tokens(id).len() as u32;
        }
        found
    }

    /// The first `n_blocks` blocks of a match.
    pub fn shorter(&self, found: &PrefixMatch, n_blocks: usize) -> PrefixMatch {
        let blocks = found.blocks[..n_blocks].to_vec();
        PrefixMatch { n_tokens: blocks.iter().map(|&id| self.block_len(id)).sum(), blocks }
    }

    /// The sequences that hold all of a match, with their lengths.
    pub fn holders<'a>(&'a self, found: &'a PrefixMatch) -> impl Iterator<Item = (usize, u32)> + 'a {
        let last = found.blocks.len().checked_sub(1).map(|last| (last, found.blocks[last]));
        let holds = move |sequence: &Sequence| last.is_some_and(|(at, id)| sequence.chain.get(at) == Some(&id));
        self.sequences.iter().enumerate().filter(move |(_, s)| holds(s)).map(|(index, s)| (index, s.n_tokens))
    }

    /// An empty sequence begins with the blocks of a match: they were copied to it.
    pub fn share(&mut self, sequence: usize, found: &PrefixMatch) {
        assert!(self.sequences[sequence].chain.is_empty(), "sequence {sequence} is not empty");
        for &id in &found.blocks {
            self.pool.hold(id);
        }
        let place = &mut self.sequences[sequence];
        place.chain.clone_from(&found.blocks);
        place.n_tokens = found.n_tokens;
        self.touch(sequence);
    }

    /// More tokens of a sequence were run, or arrived in it.
    pub fn append(&mut self, sequence: usize, tokens: &[Token]) {
        let place = &mut self.sequences[sequence];
        let mut rest = tokens;
        while !rest.is_empty() {
            let last = place.chain.last().copied();
            let id = match last.filter(|&id| self.pool.room(id) > 0) {
                Some(id) if self.pool.n_holders(id) == 1 => id,
                Some(id) => {
                    let copy = self.pool.copy(id);
                    *place.chain.last_mut().expect("it has a last block") = copy;
                    copy
                }
                None => {
                    let id = self.pool.allocate(last.unwrap_or(NONE));
                    place.chain.push(id);
                    id
                }
            };
            let (now, later) = rest.split_at(self.pool.room(id).min(rest.len()));
            *place.chain.last_mut().expect("it has a last block") = self.pool.extend(id, now);
            rest = later;
        }
        place.n_tokens += tokens.len() as u32;
        self.touch(sequence);
    }

    /// Cuts a sequence to its first `n_tokens` tokens, or to the block end before: the tokens that are left.
    pub fn truncate(&mut self, sequence: usize, n_tokens: u32) -> u32 {
        let place = &mut self.sequences[sequence];
        while place.n_tokens > n_tokens {
            let id = place.chain.pop().expect("tokens lie in blocks");
            place.n_tokens -= self.pool.tokens(id).len() as u32;
            self.pool.release(id);
        }
        let left = place.n_tokens;
        self.file(sequence);
        left
    }

    /// Empties a sequence.
    pub fn clear(&mut self, sequence: usize) {
        self.truncate(sequence, 0);
    }

    /// Keeps a sequence whatever happens, until it is unpinned as often.
    pub fn pin(&mut self, sequence: usize) {
        self.sequences[sequence].n_pins += 1;
        self.file(sequence);
    }

    /// Takes one pin back.
    pub fn unpin(&mut self, sequence: usize) {
        let pins = &mut self.sequences[sequence].n_pins;
        assert!(*pins > 0, "sequence {sequence} is not pinned");
        *pins -= 1;
        self.touch(sequence);
    }

    /// Whether a sequence is pinned.
    pub fn is_pinned(&self, sequence: usize) -> bool {
        self.sequences[sequence].n_pins > 0
    }

    /// The sequences that hold tokens and are not pinned, the one that was not used for longest first.
    pub fn idle(&self) -> impl Iterator<Item = usize> + '_ {
        self.idle.iter().map(|&(_, sequence)| sequence)
    }

    /// The first of them.
    pub fn oldest(&self) -> Option<usize> {
        self.idle.first().map(|&(_, sequence)| sequence)
    }

    /// Drops the last block of the sequence that was not used for longest; the sequence and the tokens it has left. None
    /// if nothing may be dropped.
    pub fn evict_block(&mut self) -> Option<(usize, u32)> {
        let sequence = self.oldest()?;
        let n_tokens = self.sequences[sequence].n_tokens;
        Some((sequence, self.truncate(sequence, n_tokens - 1)))
    }

    /// Tokens held, those that several sequences share counted once.
    pub fn n_tokens(&self) -> u64 {
        self.pool.n_tokens()
    }

    /// Blocks held.
    pub fn n_blocks(&self) -> usize {
        self.pool.n_blocks()
    }

    /// Tokens of a sequence.
    pub fn len(&self, sequence: usize) -> u32 {
        self.sequences[sequence].n_tokens
    }

    /// Whether a sequence holds nothing.
    pub fn is_empty(&self, sequence: usize) -> bool {
        self.len(sequence) == 0
    }

    /// A sequence's blocks.
    pub fn chain(&self, sequence: usize) -> &[u32] {
        &self.sequences[sequence].chain
    }

    /// A sequence's tokens.
    pub fn tokens(&self, sequence: usize) -> Vec<Token> {
        self.chain(sequence).iter().flat_map(|&id| self.pool.tokens(id)).copied().collect()
    }

    /// Tokens in a block.
    pub fn block_len(&self, block: u32) -> u32 {
        self.pool.tokens(block).len() as u32
    }

    /// What happened since the last call, in order.
    pub fn take_events(&mut self, into: &mut Vec<BlockEvent>) {
        into.append(&mut self.pool.events);
    }

    /// Panics unless every block is held as often as it says, can be found, and nothing else is there.
    pub fn check_integrity(&self) {
        self.pool.check(self.sequences.iter().map(|sequence| sequence.chain.as_slice()));
        for (index, sequence) in self.sequences.iter().enumerate() {
            let n_tokens: u32 = sequence.chain.iter().map(|&id| self.block_len(id)).sum();
            assert_eq!(sequence.n_tokens, n_tokens, "tokens of sequence {index}");
            let is_idle = sequence.n_pins == 0 && n_tokens > 0;
            assert_eq!(self.idle.contains(&(sequence.used, index)), is_idle, "sequence {index} among the idle");
        }
        assert!(self.idle.len() <= self.sequences.len(), "sequences that are idle twice");
    }

    /// Makes an idle sequence the first to make room: another holds all it has.
    pub fn retire(&mut self, sequence: usize) {
        self.idle.remove(&(self.sequences[sequence].used, sequence));
        self.sequences[sequence].used = 0;
        self.file(sequence);
    }

    fn touch(&mut self, sequence: usize) {
        self.idle.remove(&(self.sequences[sequence].used, sequence));
        self.tick += 1;
        self.sequences[sequence].used = self.tick;
        self.file(sequence);
    }

    fn file(&mut self, sequence: usize) {
        let Sequence { n_tokens, n_pins, used, .. } = self.sequences[sequence];
        if n_pins == 0 && n_tokens > 0 {
            self.idle.insert((used, sequence));
        } else {
            self.idle.remove(&(used, sequence));
        }
    }
}
