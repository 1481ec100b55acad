use std::{
    collections::HashSet,
    hash::{BuildHasherDefault, Hasher},
};

use crate::{rng::mix, types::Token};

/// What a full block is called: a hash over every token from the start of its sequence to its end, and over whatever
/// else its keys and values depend on. Equal names are a hint; tokens decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockName(pub u64);

impl BlockName {
    /// The name before the first token, from what else changes keys and values: model, types, adapters.
    pub fn root<'a>(fingerprint: impl IntoIterator<Item = &'a str>) -> Self {
        let fold = |hash, text: &str| text.bytes().fold(mix(hash), |hash, byte| mix(hash ^ u64::from(byte)));
        Self(fingerprint.into_iter().fold(0, fold))
    }

    /// The name of the block that follows with `tokens`.
    #[must_use]
    pub fn then(self, tokens: &[Token]) -> Self {
        let fold = |hash: u64, &token: &Token| mix(hash ^ u64::from(token.cast_unsigned()));
        Self(tokens.iter().fold(self.0, fold))
    }
}

/// The names of a prompt's full blocks, in order.
pub fn names(root: BlockName, block: u32, tokens: &[Token]) -> Vec<BlockName> {
    let blocks = tokens.chunks_exact(block as usize);
    blocks
        .scan(root, |name, tokens| {
            *name = name.then(tokens);
            Some(*name)
        })
        .collect()
}

/// Takes a name as it is: it is a hash already.
#[derive(Debug, Clone, Copy, Default)]
pub struct AsIs(u64);

impl Hasher for AsIs {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = mix(self.0 ^ u64::from(byte));
        }
    }

    fn write_u64(&mut self, name: u64) {
        self.0 = name;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Names, quickly found.
pub type NameSet = HashSet<BlockName, BuildAsIs>;

pub type BuildAsIs = BuildHasherDefault<AsIs>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_depends_on_everything_before_it() {
        let root = BlockName::root(["model", "f16"]);
        let tokens: Vec<Token> = (0..8).collect();
        let named = names(root, 3, &tokens);
        assert_eq!(named.len(), 2, "the last two tokens fill no block");
        assert_eq!(named[1], root.then(&tokens[..6]));
        let mut other = tokens.clone();
        other[0] = 9;
        assert_ne!(names(root, 3, &other)[1], named[1]);
        assert_ne!(names(BlockName::root(["model", "f32"]), 3, &tokens)[0], named[0]);
        assert_ne!(BlockName::root(["ab", "c"]), BlockName::root(["a", "bc"]));
    }
}
