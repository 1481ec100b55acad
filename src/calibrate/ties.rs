//! What groups of tied pairs add to a rank correlation, group after group in order.
//!
//! Never sees a cosine: it is given whole-numbered keys, and ranks on the other side.

use std::mem::take;

/// Bits of a sum of doubled ranks: at most n (n + 1) for n pairs below 2^21.
const RANK_SUM_BITS: u32 = 43;

/// Pairs that belong together, and the sum of their doubled ranks on the other side, in one word: the sum below the
/// number.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Group(u64);

impl Group {
    /// One more pair, of this doubled rank.
    #[inline]
    pub fn add(&mut self, rank: u32) {
        self.0 += 1 << RANK_SUM_BITS | u64::from(rank);
    }

    /// Pairs in the group.
    pub fn n(self) -> u64 {
        self.0 >> RANK_SUM_BITS
    }

    /// The sum of their doubled ranks.
    pub fn rank_sum(self) -> u64 {
        self.0 & ((1 << RANK_SUM_BITS) - 1)
    }
}

/// Sums over groups of pairs that tie on one side, added in order. With n below 2^21 none reaches 2^64.
#[derive(Debug, Default)]
pub(super) struct RankSums {
    /// Pairs in the groups so far.
    pub before: u64,
    /// Pairs before each group times the sum of its ranks on the other side.
    below: u64,
    /// One more than the pairs of each group times that sum.
    within: u64,
    /// n^3 - n of the n pairs of each group.
    pub ties: u64,
}

impl RankSums {
    /// Adds the pairs of the next group.
    #[inline]
    pub fn add(&mut self, group: Group) {
        let (n, rank_sum) = (group.n(), group.rank_sum());
        self.below += self.before * rank_sum;
        self.within += (n + 1) * rank_sum;
        self.ties += n * n * n - n;
        self.before += n;
    }

    /// Adds the groups of equal keys among `entries`: keys with doubled ranks below them, in any order.
    pub fn add_sorted(&mut self, entries: &mut [u64]) {
        entries.sort_unstable();
        for tied in entries.chunk_by(|a, b| a >> 32 == b >> 32) {
            let mut group = Group::default();
            tied.iter().for_each(|&entry| group.add(entry as u32));
            self.add(group);
        }
    }

    /// The sum of products of doubled ranks, those of a group being twice the pairs before it, its own, and one more.
    pub fn product(&self) -> u128 {
        2 * u128::from(self.below) + u128::from(self.within)
    }
}

/// A place for each key of a narrow range: puts pairs in order without comparing any two.
pub(super) struct Table {
    groups: Vec<Group>,
    /// Which have pairs, a bit each.
    seen: Vec<u64>,
}

impl Table {
    /// For ranges of `width` keys, a power of two, that start at a multiple of it.
    pub fn new(width: usize) -> Self {
        assert!(width.is_power_of_two(), "{width} keys are no power of two");
        Self { groups: vec![Group::default(); width], seen: vec![0; width.div_ceil(64)] }
    }

    /// Does what [`RankSums::add_sorted`] does, for entries of one range.
    pub fn add_to(&mut self, sums: &mut RankSums, entries: &[u64]) {
        let (groups, seen) = (self.groups.as_mut_slice(), self.seen.as_mut_slice());
        let mask = groups.len() - 1;
        for entry in entries {
            let at = (entry >> 32) as usize & mask;
            groups[at].add(*entry as u32);
            seen[at / 64] |= 1 << (at % 64);
        }
        for (seen, groups) in seen.iter_mut().zip(groups.chunks_mut(64)) {
            let mut left = take(seen);
            while left != 0 {
                sums.add(take(&mut groups[left.trailing_zeros() as usize]));
                left &= left - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_table_orders_as_sorting_does(
            ranges in prop::collection::vec((0u32..9, prop::collection::vec((0u32..256, 2u32..1 << 22), 0..40)), 1..4),
            width in prop::sample::select(vec![1usize, 2, 64, 256]),
        ) {
            let (mut table, mut got, mut want) = (Table::new(width), RankSums::default(), RankSums::default());
            for (range, pairs) in ranges {
                let key = |key: u32| u64::from(range) * width as u64 + u64::from(key) % width as u64;
                let mut entries: Vec<u64> = pairs.iter().map(|&(k, rank)| key(k) << 32 | u64::from(rank)).collect();
                table.add_to(&mut got, &entries);
                want.add_sorted(&mut entries);
            }
            prop_assert_eq!((got.product(), got.before, got.ties), (want.product(), want.before, want.ties));
        }
    }

    #[test]
    fn groups_give_the_sum_of_products_of_doubled_ranks() {
        // Keys 5, 5, 7, 9 have doubled ranks 3, 3, 6, 8.
        let ranks = [2u64, 8, 5, 5];
        let mut entries: Vec<u64> = [5u64, 9, 7, 5].iter().zip(ranks).map(|(key, rank)| key << 32 | rank).collect();
        let mut sums = RankSums::default();
        sums.add_sorted(&mut entries);
        assert_eq!(sums.product(), u128::from(3 * 2 + 8 * 8 + 6 * 5 + 3 * 5u64));
        assert_eq!((sums.before, sums.ties), (4, 6));
    }
}
