use std::collections::{BTreeSet, HashMap, hash_map::Entry};

use super::{
    BlockEvent,
    name::{BlockName, BuildAsIs},
};
use crate::types::Token;

/// No block: the parent of a sequence's first.
pub(super) const NONE: u32 = u32::MAX;

/// The blocks of all sequences: each is there once, however many hold it.
#[derive(Debug)]
pub(super) struct Pool {
    size: usize,
    root: BlockName,
    blocks: Vec<Block>,
    /// `size` tokens for each block.
    tokens: Vec<Token>,
    free: Vec<u32>,
    full: HashMap<u64, u32, BuildAsIs>,
    /// Blocks with room, after their parents.
    partial: BTreeSet<(u32, u32)>,
    n_tokens: u64,
    pub(super) events: Vec<BlockEvent>,
}

#[derive(Debug, Clone)]
struct Block {
    /// Of a full block.
    name: BlockName,
    parent: u32,
    n_tokens: u32,
    n_holders: u32,
    /// Found by its name; a second block of the same name is not.
    indexed: bool,
}

impl Pool {
    pub(super) fn new(size: u32, root: BlockName) -> Self {
        Self {
            size: size as usize,
            root,
            blocks: Vec::new(),
            tokens: Vec::new(),
            free: Vec::new(),
            full: HashMap::default(),
            partial: BTreeSet::new(),
            n_tokens: 0,
            events: Vec::new(),
        }
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Tokens of all blocks together.
    pub(super) fn n_tokens(&self) -> u64 {
        self.n_tokens
    }

    pub(super) fn n_blocks(&self) -> usize {
        self.blocks.len() - self.free.len()
    }

    pub(super) fn tokens(&self, id: u32) -> &[Token] {
        let start = id as usize * self.size;
        &self.tokens[start..start + self.blocks[id as usize].n_tokens as usize]
    }

    pub(super) fn n_holders(&self, id: u32) -> u32 {
        self.blocks[id as usize].n_holders
    }

    /// The name up to a full block, or of the empty prefix.
    pub(super) fn name_after(&self, id: u32) -> BlockName {
        if id == NONE { self.root } else { self.blocks[id as usize].name }
    }

    /// The full block of `tokens` after `parent`, called `name`.
    pub(super) fn full_child(&self, parent: u32, name: BlockName, tokens: &[Token]) -> Option<u32> {
        let id = *self.full.get(&name.0)?;
        (self.blocks[id as usize].parent == parent && self.tokens(id) == tokens).then_some(id)
    }

    /// The longest block with room after `parent` whose tokens `tokens` begins with; ties to the lowest number.
    pub(super) fn partial_child(&self, parent: u32, tokens: &[Token]) -> Option<u32> {
        let children = self.partial.range((parent, 0)..=(parent, u32::MAX)).map(|&(_, id)| id);
        let fits = children.filter(|&id| tokens.starts_with(self.tokens(id)));
        fits.max_by_key(|&id| (self.blocks[id as usize].n_tokens, std::cmp::Reverse(id)))
    }

    /// A new block with one holder.
    pub(super) fn allocate(&mut self, parent: u32) -> u32 {
        let block = Block { name: self.root, parent, n_tokens: 0, n_holders: 1, indexed: false };
        let id = if let Some(id) = self.free.pop() {
            self.blocks[id as usize] = block;
            id
        } else {
            self.blocks.push(block);
            self.tokens.resize(self.tokens.len() + self.size, 0);
            (self.blocks.len() - 1) as u32
        };
        self.partial.insert((parent, id));
        self.events.push(BlockEvent::Allocated(id));
        id
    }

    pub(super) fn hold(&mut self, id: u32) {
        self.blocks[id as usize].n_holders += 1;
        self.events.push(BlockEvent::Shared(id));
    }

    /// One holder less; without any it is gone.
    pub(super) fn release(&mut self, id: u32) {
        let block = &mut self.blocks[id as usize];
        assert!(block.n_holders > 0, "block {id} released once too often");
        block.n_holders -= 1;
        if block.n_holders > 0 {
            return;
        }
        self.n_tokens -= u64::from(block.n_tokens);
        if block.indexed {
            self.full.remove(&block.name.0);
        }
        if (block.n_tokens as usize) < self.size {
            self.partial.remove(&(block.parent, id));
        }
        let name = block.indexed.then_some(block.name);
        self.free.push(id);
        self.events.push(BlockEvent::Freed { block: id, name });
    }

    /// A block like `id`, which others hold, for one holder that will go on otherwise.
    pub(super) fn copy(&mut self, id: u32) -> u32 {
        let Block { parent, n_tokens, .. } = self.blocks[id as usize];
        let to = self.allocate(parent);
        let (from_start, to_start) = (id as usize * self.size, to as usize * self.size);
        self.tokens.copy_within(from_start..from_start + n_tokens as usize, to_start);
        self.blocks[to as usize].n_tokens = n_tokens;
        self.n_tokens += u64::from(n_tokens);
        self.events.push(BlockEvent::Copied { from: id, to });
        self.release(id);
        to
    }

    /// Tokens a block still takes.
    pub(super) fn room(&self, id: u32) -> usize {
        self.size - self.blocks[id as usize].n_tokens as usize
    }

    /// Adds tokens to a block with one holder. Once it is full, the block it now is: itself, or an older one like it.
    pub(super) fn extend(&mut self, id: u32, tokens: &[Token]) -> u32 {
        let block = &mut self.blocks[id as usize];
        assert!(block.n_holders == 1, "block {id} has {} holders and can not grow", block.n_holders);
        let start = id as usize * self.size;
        let used = block.n_tokens as usize;
        self.tokens[start + used..start + used + tokens.len()].copy_from_slice(tokens);
        block.n_tokens += tokens.len() as u32;
        let (parent, is_full) = (block.parent, block.n_tokens as usize == self.size);
        self.n_tokens += tokens.len() as u64;
        self.events.push(BlockEvent::Extended { block: id, n_tokens: tokens.len() as u32 });
        if !is_full {
            return id;
        }
        self.partial.remove(&(parent, id));
        let name = self.name_after(parent).then(self.tokens(id));
        self.blocks[id as usize].name = name;
        if let Some(into) = self.full_child(parent, name, self.tokens(id)) {
            self.events.push(BlockEvent::Merged { from: id, into });
            self.hold(into);
            self.release(id);
            return into;
        }
        if let Entry::Vacant(place) = self.full.entry(name.0) {
            place.insert(id);
            self.blocks[id as usize].indexed = true;
        }
        let name = self.blocks[id as usize].indexed.then_some(name);
        self.events.push(BlockEvent::Filled { block: id, name });
        id
    }

    /// Panics unless the blocks are exactly those of `chains`, each held as often, and can be found.
    pub(super) fn check<'a>(&self, chains: impl Iterator<Item = &'a [u32]>) {
        let mut n_holders = vec![0; self.blocks.len()];
        for chain in chains {
            let mut parent = NONE;
            for (at, &id) in chain.iter().enumerate() {
                n_holders[id as usize] += 1;
                let block = &self.blocks[id as usize];
                assert_eq!(block.parent, parent, "parent of block {id}");
                let is_full = block.n_tokens as usize == self.size;
                assert!(block.n_tokens > 0 && (is_full || at + 1 == chain.len()), "block {id} has room inside a chain");
                assert_eq!(self.partial.contains(&(parent, id)), !is_full, "block {id} among those with room");
                if is_full {
                    let name = self.name_after(parent).then(self.tokens(id));
                    assert_eq!(block.name, name, "name of block {id}");
                    assert_eq!(block.indexed, self.full.get(&name.0) == Some(&id), "index of block {id}");
                }
                parent = id;
            }
        }
        let mut n_tokens = 0;
        for (id, (block, n)) in self.blocks.iter().zip(n_holders).enumerate() {
            let is_free = self.free.contains(&(id as u32));
            assert_eq!(is_free, n == 0, "block {id} with {n} holders is free: {is_free}");
            if !is_free {
                assert_eq!(block.n_holders, n, "holders of block {id}");
                n_tokens += u64::from(block.n_tokens);
            }
        }
        assert_eq!(self.n_tokens, n_tokens, "tokens of all blocks");
        let n_indexed = |block: &&Block| block.n_holders > 0 && block.indexed;
        assert_eq!(self.full.len(), self.blocks.iter().filter(n_indexed).count(), "names that lead nowhere");
        assert!(self.partial.iter().all(|&(_, id)| self.blocks[id as usize].n_holders > 0), "a freed block with room");
    }
}
