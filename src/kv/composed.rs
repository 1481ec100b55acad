//! The counts of one sequence after another, each made from those of the one before it.
//!
//! Never looks at a block that both sequences begin with: what only the old one has is subtracted, what only the new one
//! has is added, or all is added anew where that is less.

/// The sum of the rows of a chain of blocks.
#[derive(Debug, Default)]
pub(super) struct Composed {
    /// Blocks in the sum. None of their rows has changed since it was added.
    chain: Vec<u32>,
    sums: Vec<u32>,
}

impl Composed {
    /// No blocks, and rows of `width` counts.
    pub fn new(width: usize) -> Self {
        Self { chain: Vec::new(), sums: vec![0; width] }
    }

    /// The sum of the rows of `chain`, where `row` gives a block's. Two chains of a ledger part once and for all, so that
    /// blocks they have in common are in front.
    pub fn of<'a>(&mut self, chain: &[u32], row: impl Fn(u32) -> &'a [u8]) -> &[u32] {
        let n_common = self.chain.iter().zip(chain).take_while(|(a, b)| a == b).count();
        let n_shared = if self.chain.len() - n_common < n_common { n_common } else { 0 };
        if n_shared == 0 {
            self.sums.fill(0);
        } else {
            self.chain[n_shared..].iter().for_each(|&block| subtract(&mut self.sums, row(block)));
        }
        chain[n_shared..].iter().for_each(|&block| add(&mut self.sums, row(block)));
        self.chain.truncate(n_shared);
        self.chain.extend_from_slice(&chain[n_shared..]);
        &self.sums
    }

    /// The row of `block` is about to change. Only blocks that nothing follows grow or go, so it can only be the last.
    pub fn drop_last(&mut self, block: u32, row: &[u8]) {
        if self.chain.last() == Some(&block) {
            self.chain.pop();
            subtract(&mut self.sums, row);
        }
    }

    /// Bytes it takes.
    pub fn n_bytes(&self) -> usize {
        size_of_val(self.sums.as_slice())
    }
}

fn add(sums: &mut [u32], row: &[u8]) {
    for (sum, &n) in sums.iter_mut().zip(row) {
        *sum += u32::from(n);
    }
}

fn subtract(sums: &mut [u32], row: &[u8]) {
    for (sum, &n) in sums.iter_mut().zip(row) {
        *sum -= u32::from(n);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_two_chains_share_is_read_once() {
        let rows: Vec<[u8; 2]> = (0..10).map(|block| [block, 128 - block]).collect();
        let read = std::cell::RefCell::new(Vec::new());
        let row = |block: u32| {
            read.borrow_mut().push(block);
            &rows[block as usize][..]
        };
        let mut composed = Composed::new(2);
        for (chain, want) in [
            (&[0, 1, 2, 3, 4][..], &[0, 1, 2, 3, 4][..]),
            (&[0, 1, 2, 5], &[3, 4, 5]),
            (&[0, 1, 2, 5], &[]),
            (&[0, 1, 6, 7], &[0, 1, 6, 7]), // as much to take away as to add again
            (&[8], &[8]),
            (&[], &[]),
        ] {
            let sums = composed.of(chain, row).to_vec();
            assert_eq!(sums, [chain.iter().sum::<u32>(), chain.iter().map(|block| 128 - block).sum()], "{chain:?}");
            assert_eq!(read.take(), want, "{chain:?}");
        }
        composed.of(&[3, 4], row);
        composed.drop_last(9, &rows[9]);
        composed.drop_last(4, &rows[4]);
        read.take();
        assert_eq!(composed.of(&[3, 5], row), [8, 248]);
        assert_eq!(read.take(), [5]);
    }
}
