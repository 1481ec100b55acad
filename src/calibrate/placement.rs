//! Which rank holds which expert, so that the rank with the most experts of a batch has as few as can be.
//!
//! Never samples batches: which experts are active together is passed in.

use crate::rng::Rng;

/// Starts of the local search; the first is greedy, the others shuffled.
const N_STARTS: u64 = 4;
/// Most nodes the exact search visits before it gives up.
const MAX_NODES: u64 = 200_000;

/// Why a placement makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// Layers differ.
    #[error("layer {layer} has the places of {found} experts where {wanted} belong: give every layer as many")]
    Layer {
        /// Which.
        layer: usize,
        /// Its experts.
        found: usize,
        /// The first layer's.
        wanted: usize,
    },
    /// A rank that is not there.
    #[error("expert {expert} of layer {layer} is on rank {rank}, and there are {n_ranks}, counted from 0")]
    Rank {
        /// Which layer.
        layer: usize,
        /// Which expert.
        expert: usize,
        /// Its rank.
        rank: u32,
        /// Ranks.
        n_ranks: usize,
    },
}

/// Batches' active experts of one layer, as the search looks at them.
struct Layer {
    n_expert: usize,
    n_ranks: usize,
    n_batches: usize,
    /// By expert, batch: 1 where it is active.
    active: Vec<u8>,
}

/// The sum over batches of the busiest rank's experts, then of all ranks' squared: the second tells apart what the
/// first does not.
type Cost = (u64, u64);

/// A placement and its experts of each rank in each batch.
struct Search<'a> {
    layer: &'a Layer,
    rank_of: Vec<u32>,
    /// By batch, rank.
    n_active: Vec<u32>,
    cost: Cost,
}

/// The rank of each of `n_expert` experts, at most `ceil(n_expert / n_ranks)` on each of `n_ranks`, for which the mean over
/// `batches` of the most active experts on a rank is least, as far as a local search from a few starts finds.
///
/// A batch is a bit for each expert that is active in it, in words of 64. The same input and seed give the same places.
pub fn place_layer(batches: &[&[u64]], n_expert: usize, n_ranks: usize, seed: u64) -> Vec<u32> {
    assert!(n_ranks > 0, "no rank to place experts on");
    let layer = Layer::new(batches, n_expert, n_ranks);
    let mut rng = Rng::new(seed);
    let mut best = Search::new(&layer, layer.greedy());
    best.improve();
    for _ in 1..N_STARTS {
        let mut other = Search::new(&layer, layer.shuffled(&mut rng));
        other.improve();
        if other.cost < best.cost {
            best = other;
        }
    }
    best.rank_of
}

/// As [`place_layer`], certainly the best, by branch and bound; nothing where that would take too long.
pub fn place_layer_exactly(batches: &[&[u64]], n_expert: usize, n_ranks: usize) -> Option<Vec<u32>> {
    assert!(n_ranks > 0, "no rank to place experts on");
    let layer = Layer::new(batches, n_expert, n_ranks);
    let mut order: Vec<usize> = (0..n_expert).collect();
    order.sort_by_key(|&expert| std::cmp::Reverse(layer.n_active(expert)));
    let first = place_layer(batches, n_expert, n_ranks, 0);
    let bound = Search::new(&layer, first.clone()).cost.0;
    let mut exact = Exact {
        layer: &layer,
        order,
        rank_of: vec![0; n_expert],
        held: vec![0; n_ranks],
        n_active: vec![0; layer.n_batches * n_ranks],
        bound,
        best: first,
        n_nodes: 0,
    };
    exact.descend(0);
    (exact.n_nodes < MAX_NODES).then_some(exact.best)
}

/// The mean over `batches` of the most active experts on a rank.
pub fn busiest_rank(batches: &[&[u64]], rank_of: &[u32], n_ranks: usize) -> f64 {
    let layer = Layer::new(batches, rank_of.len(), n_ranks);
    Search::new(&layer, rank_of.to_vec()).cost.0 as f64 / batches.len().max(1) as f64
}

impl Layer {
    fn new(batches: &[&[u64]], n_expert: usize, n_ranks: usize) -> Self {
        let is_active = |expert: usize, batch: &[u64]| (batch[expert / 64] >> (expert % 64) & 1) as u8;
        let active = (0..n_expert).flat_map(|expert| batches.iter().map(move |batch| is_active(expert, batch)));
        Self { n_expert, n_ranks, n_batches: batches.len(), active: active.collect() }
    }

    fn capacity(&self) -> usize {
        self.n_expert.div_ceil(self.n_ranks)
    }

    fn of(&self, expert: usize) -> &[u8] {
        &self.active[expert * self.n_batches..][..self.n_batches]
    }

    fn n_active(&self, expert: usize) -> u32 {
        self.of(expert).iter().map(|&one| u32::from(one)).sum()
    }

    /// Busy experts first, each to the rank whose experts are least active together with it.
    fn greedy(&self) -> Vec<u32> {
        let mut order: Vec<usize> = (0..self.n_expert).collect();
        order.sort_by_key(|&expert| (std::cmp::Reverse(self.n_active(expert)), expert));
        let mut rank_of = vec![0u32; self.n_expert];
        let mut held = vec![0; self.n_ranks];
        let mut n_active = vec![0u32; self.n_batches * self.n_ranks];
        for expert in order {
            let shared = |rank: usize| -> u32 {
                let counts = n_active.chunks_exact(self.n_ranks).zip(self.of(expert));
                counts.map(|(counts, &one)| counts[rank] * u32::from(one)).sum()
            };
            let open = (0..self.n_ranks).filter(|&rank| held[rank] < self.capacity());
            let rank = open.min_by_key(|&rank| (shared(rank), held[rank], rank)).expect("capacity for every expert");
            rank_of[expert] = rank as u32;
            held[rank] += 1;
            for (counts, &one) in n_active.chunks_exact_mut(self.n_ranks).zip(self.of(expert)) {
                counts[rank] += u32::from(one);
            }
        }
        rank_of
    }

    fn shuffled(&self, rng: &mut Rng) -> Vec<u32> {
        let mut rank_of: Vec<u32> = (0..self.n_expert).map(|expert| (expert % self.n_ranks) as u32).collect();
        for at in (1..rank_of.len()).rev() {
            rank_of.swap(at, rng.below(at + 1));
        }
        rank_of
    }
}

impl<'a> Search<'a> {
    fn new(layer: &'a Layer, rank_of: Vec<u32>) -> Self {
        let mut n_active = vec![0; layer.n_batches * layer.n_ranks];
        for (expert, &rank) in rank_of.iter().enumerate() {
            for (counts, &one) in n_active.chunks_exact_mut(layer.n_ranks).zip(layer.of(expert)) {
                counts[rank as usize] += u32::from(one);
            }
        }
        let cost = cost(n_active.chunks_exact(layer.n_ranks));
        Self { layer, rank_of, n_active, cost }
    }

    /// Swaps experts of two ranks as long as that helps.
    fn improve(&mut self) {
        loop {
            let before = self.cost;
            for a in 0..self.rank_of.len() {
                for b in a + 1..self.rank_of.len() {
                    self.try_swap(a, b);
                }
            }
            if self.cost == before {
                return;
            }
        }
    }

    fn try_swap(&mut self, a: usize, b: usize) {
        let (from, to) = (self.rank_of[a] as usize, self.rank_of[b] as usize);
        if from == to {
            return;
        }
        let (mut less, mut more) = ((0, 0), (0, 0));
        let moves = self.layer.of(a).iter().zip(self.layer.of(b));
        let batches = self.n_active.chunks_exact(self.layer.n_ranks).zip(moves);
        for (counts, (&a, &b)) in batches.filter(|(_, (a, b))| a != b) {
            let old = of_batch(counts);
            let (down, up) = if a > b { (from, to) } else { (to, from) };
            // Both ranks' squares change by their own counts, the most by either.
            let squares = old.1 + 2 * u64::from(counts[up]) + 2 - 2 * u64::from(counts[down]);
            let others = counts.iter().enumerate().filter(|(rank, _)| *rank != down && *rank != up);
            let most = others.map(|(_, &n)| n).max().unwrap_or(0).max(counts[up] + 1).max(counts[down] - 1);
            less = (less.0 + old.0, less.1 + old.1);
            more = (more.0 + u64::from(most), more.1 + squares);
        }
        let after = (self.cost.0 + more.0 - less.0, self.cost.1 + more.1 - less.1);
        if after < self.cost {
            let moves = self.layer.of(a).iter().zip(self.layer.of(b));
            for (counts, (&a, &b)) in self.n_active.chunks_exact_mut(self.layer.n_ranks).zip(moves) {
                counts[from] = counts[from] + u32::from(b) - u32::from(a);
                counts[to] = counts[to] + u32::from(a) - u32::from(b);
            }
            self.rank_of.swap(a, b);
            self.cost = after;
        }
    }
}

fn of_batch(counts: &[u32]) -> Cost {
    let most = counts.iter().copied().max().unwrap_or(0);
    (u64::from(most), counts.iter().map(|&n| u64::from(n) * u64::from(n)).sum())
}

fn cost<'a>(batches: impl Iterator<Item = &'a [u32]>) -> Cost {
    batches.map(of_batch).fold((0, 0), |sum, batch| (sum.0 + batch.0, sum.1 + batch.1))
}

/// Depth-first over experts, busiest first.
struct Exact<'a> {
    layer: &'a Layer,
    order: Vec<usize>,
    rank_of: Vec<u32>,
    held: Vec<usize>,
    n_active: Vec<u32>,
    bound: u64,
    best: Vec<u32>,
    n_nodes: u64,
}

impl Exact<'_> {
    fn descend(&mut self, depth: usize) {
        self.n_nodes += 1;
        if self.n_nodes >= MAX_NODES {
            return;
        }
        if cost(self.n_active.chunks_exact(self.layer.n_ranks)).0 >= self.bound {
            return;
        }
        let Some(&expert) = self.order.get(depth) else {
            self.bound = cost(self.n_active.chunks_exact(self.layer.n_ranks)).0;
            self.best.clone_from(&self.rank_of);
            return;
        };
        for rank in 0..self.layer.n_ranks {
            if self.held[rank] < self.layer.capacity() {
                self.put(expert, rank, true);
                self.descend(depth + 1);
                self.put(expert, rank, false);
            }
            // Empty ranks are alike.
            if self.held[rank] == 0 {
                break;
            }
        }
    }

    fn put(&mut self, expert: usize, rank: usize, there: bool) {
        self.rank_of[expert] = rank as u32;
        self.held[rank] = if there { self.held[rank] + 1 } else { self.held[rank] - 1 };
        for (counts, &one) in self.n_active.chunks_exact_mut(self.layer.n_ranks).zip(self.layer.of(expert)) {
            counts[rank] = if there { counts[rank] + u32::from(one) } else { counts[rank] - u32::from(one) };
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::rng::Rng;

    fn views(batches: &[Vec<u64>]) -> Vec<&[u64]> {
        batches.iter().map(Vec::as_slice).collect()
    }

    /// The best of all placements that keep to the capacity, one by one.
    fn by_trying_all(batches: &[&[u64]], n_expert: usize, n_ranks: usize) -> f64 {
        let capacity = n_expert.div_ceil(n_ranks);
        let all = n_ranks.pow(n_expert as u32);
        let places = (0..all).map(|code| {
            (0..n_expert).map(|expert| (code / n_ranks.pow(expert as u32) % n_ranks) as u32).collect::<Vec<u32>>()
        });
        let fits = |place: &Vec<u32>| {
            (0..n_ranks).all(|rank| place.iter().filter(|&&at| at as usize == rank).count() <= capacity)
        };
        places.filter(fits).map(|place| busiest_rank(batches, &place, n_ranks)).fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn experts_that_are_active_together_are_parted() {
        // Two groups of 8 that never meet: the best puts 2 of each on each of 4 ranks.
        let batches = [vec![0x00ff], vec![0xff00], vec![0x00ff]];
        let places = place_layer(&views(&batches), 16, 4, 1);
        assert!((busiest_rank(&views(&batches), &places, 4) - 2.0).abs() < 1e-12, "{places:?}");
        // In order of their numbers the first two ranks would have 4 each.
        let in_order: Vec<u32> = (0..16).map(|expert| expert / 4).collect();
        assert!((busiest_rank(&views(&batches), &in_order, 4) - 4.0).abs() < 1e-12);
    }

    #[test]
    fn a_large_layer_is_placed_evenly() {
        let mut rng = Rng::new(5);
        let batches: Vec<Vec<u64>> = (0..48).map(|_| vec![rng.next_u64() & rng.next_u64(), rng.next_u64()]).collect();
        let places = place_layer(&views(&batches), 128, 8, 1);
        assert!((0..8).all(|rank| places.iter().filter(|&&at| at == rank).count() == 16));
        let in_order: Vec<u32> = (0..128).map(|expert| expert / 16).collect();
        let (ours, theirs) = (busiest_rank(&views(&batches), &places, 8), busiest_rank(&views(&batches), &in_order, 8));
        assert!(ours < 0.85 * theirs, "{ours} of {theirs}");
        assert_eq!(places, place_layer(&views(&batches), 128, 8, 1));
    }

    #[test]
    fn an_exact_search_that_is_too_long_says_so() {
        let mut rng = Rng::new(6);
        let batches: Vec<Vec<u64>> = (0..30).map(|_| vec![rng.next_u64() & rng.next_u64()]).collect();
        assert_eq!(place_layer_exactly(&views(&batches), 48, 8), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn branch_and_bound_is_best_and_the_fast_search_close(
            batches in prop::collection::vec(prop::collection::vec(0u64..256, 1), 1..8),
            n_expert in 2usize..8,
            n_ranks in 1usize..4,
        ) {
            let batches = views(&batches);
            let best = by_trying_all(&batches, n_expert, n_ranks);
            let exact = place_layer_exactly(&batches, n_expert, n_ranks).expect("small");
            prop_assert_eq!(busiest_rank(&batches, &exact, n_ranks).to_bits(), best.to_bits());
            let fast = busiest_rank(&batches, &place_layer(&batches, n_expert, n_ranks, 1), n_ranks);
            prop_assert!(fast <= best * 1.2 + 0.2, "{} for {}", fast, best);
        }
    }
}
