//! Which cluster each point joins when the clusters' sizes are given.
//!
//! Never approximates, and never builds an N x N matrix.

use std::{cmp::Reverse, collections::BinaryHeap};

use ndarray::Array2;

use crate::calibrate::Shares;

/// The cheapest way to give each of N points (rows) one of K columns, so that column sizes differ by at most one.
///
/// [`weighted_assignment`] with columns of equal weight.
pub fn balanced_assignment(cost: &Array2<i64>) -> Vec<u32> {
    weighted_assignment(cost, &vec![1; cost.ncols()])
}

/// The cheapest way to give each of N points (rows) one of K columns, whose sizes are in proportion to `weights`.
///
/// Sizes are those of [`Shares`]. Exact. A transportation problem over K columns rather than an assignment of N x N:
/// points enter one at a time, each along a shortest path of moves between columns, so that after each the points so far
/// are placed at the least cost (successive shortest paths). About N * K * (K + log N) steps and N * K heap entries.
/// Costs are whole numbers below 2^40 in size, which makes sums exact and ties decidable; of several cheapest ways,
/// always the same one is taken.
pub fn weighted_assignment(cost: &Array2<i64>, weights: &[u32]) -> Vec<u32> {
    let (n, k) = cost.dim();
    assert!(k > 0, "no columns to assign {n} points to");
    assert_eq!(weights.len(), k, "a weight for each column");
    assert!(cost.iter().all(|c| c.unsigned_abs() < 1 << 40), "costs must be below 2^40");
    let cost = cost.as_standard_layout();
    let mut columns = Columns::new(cost.as_slice().expect("standard layout"), Shares::new(n, weights));
    for point in 0..n {
        columns.insert(point as u32);
    }
    columns.of
}

/// More than any path costs, and far from overflow when two are added.
const UNREACHED: i64 = i64::MAX / 4;

/// Where a shortest path came from.
#[derive(Clone, Copy, PartialEq)]
enum From {
    /// The new point joins the column.
    Outside,
    /// A point moves over from this column.
    Column(usize),
    /// The column gives up its extra place.
    Extra,
}

struct Columns<'a> {
    cost: &'a [i64],
    k: usize,
    /// Column of each point that has entered.
    of: Vec<u32>,
    size: Vec<usize>,
    shares: Shares,
    n_extra_used: usize,
    /// For columns a and b: points of a by what their move to b costs. Entries of points that left stay until met.
    moves: Vec<BinaryHeap<Reverse<(i64, u32)>>>,
    /// The cheapest of each heap, K x K.
    cheapest: Vec<i64>,
    distance: Vec<i64>,
    from: Vec<From>,
}

impl<'a> Columns<'a> {
    fn new(cost: &'a [i64], shares: Shares) -> Self {
        let k = shares.floor.len();
        Self {
            cost,
            k,
            of: Vec::with_capacity(cost.len() / k),
            size: vec![0; k],
            shares,
            n_extra_used: 0,
            moves: (0..k * k).map(|_| BinaryHeap::new()).collect(),
            cheapest: vec![UNREACHED; k * k],
            distance: vec![0; k],
            from: vec![From::Outside; k],
        }
    }

    fn costs(&self, point: u32) -> &'a [i64] {
        &self.cost[point as usize * self.k..][..self.k]
    }

    fn has_room(&self, column: usize) -> bool {
        self.size[column] < self.shares.floor[column]
            || (self.takes_extra(column) && self.n_extra_used < self.shares.n_extra)
    }

    /// Full, and one of those that may hold one more.
    fn takes_extra(&self, column: usize) -> bool {
        self.shares.may_exceed[column] && self.size[column] == self.shares.floor[column]
    }

    fn holds_extra(&self, column: usize) -> bool {
        self.size[column] > self.shares.floor[column]
    }

    fn insert(&mut self, point: u32) {
        let costs = self.costs(point);
        let nearest = (0..self.k).min_by_key(|&c| costs[c]).expect("at least one column");
        self.of.push(u32::MAX);
        // While the points so far are placed at the least cost, moving any of them along to a column with room saves
        // nothing, so no path is shorter than the nearest column alone.
        if self.has_room(nearest) {
            self.enter(point, nearest);
            return;
        }
        let last_extra = self.shortest_paths(costs);
        let end = (0..self.k)
            .filter(|&c| self.has_room(c))
            .min_by_key(|&c| self.distance[c])
            .expect("there are as many places as points");
        self.follow(point, end, last_extra);
    }

    /// Bellman and Ford from the new point to every column. Returns the full column that would take over an extra place.
    fn shortest_paths(&mut self, costs: &[i64]) -> Option<usize> {
        let k = self.k;
        self.distance.copy_from_slice(costs);
        self.from.fill(From::Outside);
        let mut taker: Option<usize> = None;
        let all_extra_used = self.n_extra_used == self.shares.n_extra;
        loop {
            let mut changed = false;
            for a in 0..k {
                let base = self.distance[a];
                for (b, &weight) in self.cheapest[a * k..(a + 1) * k].iter().enumerate() {
                    if base + weight < self.distance[b] {
                        self.distance[b] = base + weight;
                        self.from[b] = From::Column(a);
                        changed = true;
                    }
                }
            }
            if all_extra_used {
                for a in (0..k).filter(|&a| self.takes_extra(a)) {
                    if taker.is_none_or(|t| self.distance[a] < self.distance[t]) {
                        taker = Some(a);
                    }
                }
                for b in 0..k {
                    if let Some(t) = taker
                        && self.holds_extra(b)
                        && self.distance[t] < self.distance[b]
                    {
                        self.distance[b] = self.distance[t];
                        self.from[b] = From::Extra;
                        changed = true;
                    }
                }
            }
            if !changed {
                return taker;
            }
        }
    }

    /// Moves points along the path to `end`, last move first.
    fn follow(&mut self, point: u32, end: usize, taker: Option<usize>) {
        let mut moved = Vec::new();
        let mut at = end;
        loop {
            match self.from[at] {
                From::Outside => break,
                From::Extra => at = taker.expect("a column takes over the extra place"),
                From::Column(a) => {
                    let Reverse((_, p)) = self.moves[a * self.k + at].peek().expect("the path uses this move");
                    moved.push((*p, a, at));
                    at = a;
                }
            }
        }
        for &(p, a, _) in &moved {
            self.resize(a, self.size[a] - 1);
            self.of[p as usize] = u32::MAX;
        }
        for &(p, _, b) in &moved {
            self.enter(p, b);
        }
        self.enter(point, at);
        for &(_, a, _) in &moved {
            self.refresh(a);
        }
    }

    fn resize(&mut self, column: usize, size: usize) {
        self.n_extra_used -= usize::from(self.holds_extra(column));
        self.size[column] = size;
        self.n_extra_used += usize::from(self.holds_extra(column));
    }

    fn enter(&mut self, point: u32, column: usize) {
        self.resize(column, self.size[column] + 1);
        self.of[point as usize] = column as u32;
        let costs = self.costs(point);
        for b in (0..self.k).filter(|&b| b != column) {
            let change = costs[b] - costs[column];
            let pair = column * self.k + b;
            self.moves[pair].push(Reverse((change, point)));
            self.cheapest[pair] = self.cheapest[pair].min(change);
        }
    }

    /// Drops points that left `column` from the top of its heaps.
    fn refresh(&mut self, column: usize) {
        for b in (0..self.k).filter(|&b| b != column) {
            let pair = column * self.k + b;
            let heap = &mut self.moves[pair];
            while let Some(Reverse((_, point))) = heap.peek()
                && self.of[*point as usize] != column as u32
            {
                heap.pop();
            }
            self.cheapest[pair] = heap.peek().map_or(UNREACHED, |Reverse((change, _))| *change);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::rng::Rng;

    fn below(rng: &mut Rng, n: u32) -> i64 {
        i64::from(rng.below(n as usize) as u32)
    }

    /// The textbook assignment of rows to columns of a square matrix in O(n^3), as its least total cost.
    fn hungarian(n: usize, cost: impl Fn(usize, usize) -> i64) -> i64 {
        const FAR: i64 = i64::MAX / 4;
        // Rows and columns count from 1; 0 stands for none.
        let (mut u, mut v) = (vec![0i64; n + 1], vec![0i64; n + 1]);
        let mut row_of = vec![0usize; n + 1];
        for row in 1..=n {
            row_of[0] = row;
            let mut column = 0;
            let mut slack = vec![FAR; n + 1];
            let mut parent = vec![0usize; n + 1];
            let mut done = vec![false; n + 1];
            while row_of[column] != 0 {
                done[column] = true;
                let i = row_of[column];
                let (mut delta, mut next) = (FAR, 0);
                for j in (1..=n).filter(|&j| !done[j]) {
                    let reduced = cost(i - 1, j - 1) - u[i] - v[j];
                    if reduced < slack[j] {
                        slack[j] = reduced;
                        parent[j] = column;
                    }
                    if slack[j] < delta {
                        delta = slack[j];
                        next = j;
                    }
                }
                for j in 0..=n {
                    if done[j] {
                        u[row_of[j]] += delta;
                        v[j] -= delta;
                    } else {
                        slack[j] -= delta;
                    }
                }
                column = next;
            }
            while column != 0 {
                row_of[column] = row_of[parent[column]];
                column = parent[column];
            }
        }
        (1..=n).map(|j| cost(row_of[j] - 1, j - 1)).sum()
    }

    /// Least cost by the textbook: each column's floor in places that a point must fill, one more in those that may
    /// exceed it, and as many dummies as places are to stay empty, for free.
    fn textbook(cost: &Array2<i64>, shares: &Shares) -> i64 {
        const FORBIDDEN: i64 = 1 << 50;
        let n = cost.nrows();
        let must = shares.floor.iter().enumerate().flat_map(|(column, &floor)| vec![(column, false); floor]);
        let may = (0..cost.ncols()).filter(|&column| shares.may_exceed[column]).map(|column| (column, true));
        let places: Vec<(usize, bool)> = must.chain(may).collect();
        hungarian(places.len(), |row, place| match (row < n, places[place]) {
            (true, (column, _)) => cost[[row, column]],
            (false, (_, true)) => 0,
            (false, (_, false)) => FORBIDDEN,
        })
    }

    fn total(cost: &Array2<i64>, columns: &[u32]) -> i64 {
        columns.iter().enumerate().map(|(p, &c)| cost[[p, c as usize]]).sum()
    }

    fn check(cost: &Array2<i64>) {
        let (n, k) = cost.dim();
        let columns = check_weighted(cost, &vec![1; k]);
        assert_eq!(balanced_assignment(cost), columns);
        assert_eq!(weighted_assignment(cost, &vec![7; k]), columns, "only the proportion counts");
        let sizes = sizes(&columns, k);
        assert!(sizes.iter().all(|&s| s == n / k || s == n.div_ceil(k)), "{sizes:?} of {n}");
    }

    fn check_weighted(cost: &Array2<i64>, weights: &[u32]) -> Vec<u32> {
        let (n, k) = cost.dim();
        let columns = weighted_assignment(cost, weights);
        assert_eq!(columns.len(), n);
        let shares = Shares::new(n, weights);
        for (column, &size) in sizes(&columns, k).iter().enumerate() {
            let (floor, most) = (shares.floor[column], shares.floor[column] + usize::from(shares.may_exceed[column]));
            assert!((floor..=most).contains(&size), "{weights:?}: {size} of {n} in column {column}");
        }
        assert_eq!(total(cost, &columns), textbook(cost, &shares), "{n} points, weights {weights:?}");
        columns
    }

    fn sizes(columns: &[u32], k: usize) -> Vec<usize> {
        let mut sizes = vec![0; k];
        for &column in columns {
            sizes[column as usize] += 1;
        }
        sizes
    }

    #[test]
    fn the_textbook_itself_equals_trying_all_ways() {
        let mut rng = Rng::new(9);
        for _ in 0..20 {
            let cost = Array2::from_shape_fn((5, 5), |_| below(&mut rng, 50));
            let mut best = i64::MAX;
            let mut way = [0, 1, 2, 3, 4];
            permute(&mut way, 0, &mut |way| {
                best = best.min(way.iter().enumerate().map(|(r, &c)| cost[[r, c]]).sum());
            });
            assert_eq!(hungarian(5, |r, c| cost[[r, c]]), best);
        }
    }

    fn permute(way: &mut [usize; 5], from: usize, visit: &mut impl FnMut(&[usize; 5])) {
        if from == way.len() {
            return visit(way);
        }
        for i in from..way.len() {
            way.swap(from, i);
            permute(way, from + 1, visit);
            way.swap(from, i);
        }
    }

    #[test]
    fn cheapest_at_every_size_with_many_and_few_ties() {
        let mut rng = Rng::new(1);
        for k in 1..=8 {
            for n in 0..=3 * k + 2 {
                for range in [2, 5, 1000, 1 << 31] {
                    check(&Array2::from_shape_fn((n, k), |_| below(&mut rng, range) - i64::from(range / 3)));
                }
            }
        }
    }

    #[test]
    fn cheapest_when_all_want_the_same_columns() {
        let mut rng = Rng::new(2);
        for (n, k) in [(60, 7), (90, 16), (100, 3), (16, 16), (129, 12)] {
            check(&Array2::from_shape_fn((n, k), |(_, c)| below(&mut rng, 40) + i64::from(100 * c as u32)));
        }
    }

    #[test]
    fn cheapest_with_unequal_columns() {
        let mut rng = Rng::new(3);
        for weights in [&[2, 1, 1][..], &[3, 1], &[5, 2, 2, 1], &[1, 1, 1, 2], &[4, 4, 1, 1, 1], &[100, 1]] {
            for n in [1, 2, 9, 12, 25, 40] {
                for range in [3, 1000] {
                    check_weighted(&Array2::from_shape_fn((n, weights.len()), |_| below(&mut rng, range)), weights);
                    // All want the first column.
                    let slope = |c: usize| i64::from(500 * c as u32);
                    check_weighted(
                        &Array2::from_shape_fn((n, weights.len()), |(_, c)| slope(c) + below(&mut rng, range)),
                        weights,
                    );
                }
            }
        }
    }

    proptest! {
        #[test]
        fn cheapest_on_random_weights(
            weights in prop::collection::vec(1u32..6, 1..6), cells in prop::collection::vec(-9i64..9, 0..150)
        ) {
            let n = cells.len() / weights.len();
            check_weighted(&Array2::from_shape_fn((n, weights.len()), |(p, c)| cells[p * weights.len() + c]), &weights);
        }

        #[test]
        fn cheapest_on_random_cases(
            (k, cells) in (1usize..7).prop_flat_map(|k| (Just(k), prop::collection::vec(-9i64..9, 0..40 * k)))
        ) {
            let n = cells.len() / k;
            check(&Array2::from_shape_fn((n, k), |(p, c)| cells[p * k + c]));
        }
    }
}
