//! The tokens of one forward pass: each with its position, its sequence, and whether its logits are wanted.
//!
//! Never reallocates past the capacity it was made with, and never reaches llama.cpp unchecked.

use crate::types::Token;

use super::error::LlamaError;

/// Tokens to run together.
///
/// ```
/// use eldr::llama::{Batch, LlamaError};
///
/// let mut batch = Batch::new(1);
/// batch.push(7, 0, 0, true)?;
/// assert_eq!(batch.push(8, 1, 0, true), Err(LlamaError::BatchFull { capacity: 1 }));
/// # Ok::<(), LlamaError>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    capacity: usize,
    pub(super) tokens: Vec<Token>,
    pub(super) positions: Vec<i32>,
    pub(super) sequences: Vec<i32>,
    /// 1 where logits are wanted.
    pub(super) wanted: Vec<i8>,
}

impl Batch {
    /// An empty batch that holds `capacity` tokens at most.
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity,
            tokens: Vec::with_capacity(capacity),
            positions: Vec::with_capacity(capacity),
            sequences: Vec::with_capacity(capacity),
            wanted: Vec::with_capacity(capacity),
        }
    }

    /// Adds a token at `position` of `sequence`. Its row in the batch is the number of tokens before it.
    pub fn push(&mut self, token: Token, position: u32, sequence: u32, logits: bool) -> Result<(), LlamaError> {
        if self.tokens.len() == self.capacity {
            return Err(LlamaError::BatchFull { capacity: self.capacity });
        }
        let position = number("position", position)?;
        let sequence = number("sequence", sequence)?;
        self.tokens.push(token);
        self.positions.push(position);
        self.sequences.push(sequence);
        self.wanted.push(i8::from(logits));
        Ok(())
    }

    /// Removes all tokens.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.sequences.clear();
        self.wanted.clear();
    }

    /// Tokens in it.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// It holds no token.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Rows whose logits are wanted.
    pub fn n_outputs(&self) -> usize {
        self.wanted.iter().filter(|&&w| w != 0).count()
    }

    /// Whatever way llama.cpp cuts this batch, the parts follow each other in batch order: it holds one sequence, or
    /// one token of each of several sequences in ascending order (llama-batch.cpp, `split_simple`, `split_equal`,
    /// `split_seq`).
    pub fn keeps_order(&self) -> bool {
        let one = self.sequences.windows(2).all(|pair| pair[0] == pair[1]);
        let ascending = self.sequences.windows(2).all(|pair| pair[0] < pair[1]);
        one || ascending
    }
}

fn number(what: &'static str, n: u32) -> Result<i32, LlamaError> {
    let limit = i64::from(i32::MAX) + 1;
    i32::try_from(n).map_err(|_| LlamaError::OutOfRange { what, value: i64::from(n), limit })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_push_leaves_the_batch_as_it_was() {
        let mut batch = Batch::new(2);
        batch.push(1, 0, 0, false).expect("room");
        let before = batch.clone();
        assert!(batch.push(2, u32::MAX, 0, false).is_err());
        assert!(batch.push(2, 1, u32::MAX, false).is_err());
        assert_eq!(batch, before);
    }

    #[test]
    fn order_is_kept_by_one_sequence_or_one_token_each() {
        let batch = |sequences: &[u32]| {
            let mut batch = Batch::new(sequences.len());
            for (i, &seq) in sequences.iter().enumerate() {
                batch.push(1, i as u32, seq, true).expect("room");
            }
            batch
        };
        assert!(batch(&[3, 3, 3]).keeps_order());
        assert!(batch(&[0, 1, 5]).keeps_order());
        assert!(!batch(&[1, 0]).keeps_order());
        assert!(!batch(&[0, 0, 1]).keeps_order());
    }
}
