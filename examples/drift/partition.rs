//! Which requests had best run together: partitions over workers under which the mean request's decode step is shortest.
//!
//! Never guesses a pick, and never asks where requests run: chances are handed in.

use eldr::{rng::Rng, sim::StepCost};

/// Requests that run at the same time, and what their steps take.
pub struct Partition<'a> {
    /// Of each request and expert, the chance that a step does not pick it; above 0.
    pub spared: &'a [Vec<f64>],
    pub cost: StepCost,
    /// Requests a worker holds at most.
    pub n_slots: usize,
    /// A request may go without another one coming for it, so that some workers hold more than others.
    pub resizes: bool,
}

/// The requests of each worker.
pub type Parts = Vec<Vec<usize>>;

/// A change gains more than this, in steps of the cost's unit.
const LEAST: f64 = 1e-9;

/// A change of two workers: the request at a place of one leaves it for the other, and perhaps one of that comes for it.
#[derive(Clone, Copy)]
struct Change {
    gain: f64,
    from: (usize, usize),
    to: usize,
    back: Option<usize>,
}

/// The state of a search.
struct Search {
    parts: Parts,
    /// Of each worker, the time of a step, that its requests all take.
    total: Vec<f64>,
    /// Of each worker and expert, the chance that a step spares it.
    spared: Vec<Vec<f64>>,
    /// Of each request and expert, the chance that a step of the others of its worker spares it.
    without: Vec<Vec<f64>>,
}

impl Partition<'_> {
    /// The best of what changes make of each start, one at a time until none gains: local optima, not proven the best.
    pub fn best(&self, starts: impl IntoIterator<Item = Parts>) -> Parts {
        let found = starts.into_iter().map(|start| self.improve(start));
        let best = found.min_by(|a, b| self.total(a).total_cmp(&self.total(b)));
        best.expect("a start")
    }

    /// The step times of all requests together; over their number, what the mean request's token takes.
    pub fn total(&self, parts: &Parts) -> f64 {
        parts.iter().map(|part| self.time(reads(&self.spared_by(part)), part.len())).sum()
    }

    fn improve(&self, start: Parts) -> Parts {
        let n = start.len();
        let mut search =
            Search { total: vec![0.0; n], spared: vec![Vec::new(); n], without: self.spared.to_vec(), parts: start };
        (0..n).for_each(|worker| self.settle(&mut search, worker));
        loop {
            let mut is_done = true;
            for from in 0..n {
                let mut place = 0;
                while place < search.parts[from].len() {
                    if let Some(change) = self.best_change(&search, from, place) {
                        self.apply(&mut search, change);
                        is_done = false;
                    }
                    place += 1;
                }
            }
            if is_done {
                return search.parts;
            }
        }
    }

    fn best_change(&self, search: &Search, from: usize, place: usize) -> Option<Change> {
        let mut best: Option<Change> = None;
        let leaving = search.parts[from][place];
        let n_from = search.parts[from].len();
        let alone = self.time(reads(&search.without[leaving]), n_from - 1);
        for to in (0..search.parts.len()).filter(|&to| to != from) {
            let n_to = search.parts[to].len();
            let before = search.total[from] + search.total[to];
            let mut offer = |back: Option<usize>, after: f64| {
                let gain = before - after;
                if gain > best.map_or(LEAST, |best| best.gain) {
                    best = Some(Change { gain, from: (from, place), to, back });
                }
            };
            for (at, &coming) in search.parts[to].iter().enumerate() {
                let here = self.time(self.reads_both(&search.without[leaving], coming), n_from);
                let there = self.time(self.reads_both(&search.without[coming], leaving), n_to);
                offer(Some(at), here + there);
            }
            if self.resizes && n_to < self.n_slots {
                offer(None, alone + self.time(self.reads_both(&search.spared[to], leaving), n_to + 1));
            }
        }
        best
    }

    fn apply(&self, search: &mut Search, Change { from: (from, place), to, back, .. }: Change) {
        if let Some(at) = back {
            let leaving = search.parts[from][place];
            search.parts[from][place] = std::mem::replace(&mut search.parts[to][at], leaving);
        } else {
            let leaving = search.parts[from].swap_remove(place);
            search.parts[to].push(leaving);
        }
        self.settle(search, from);
        self.settle(search, to);
    }

    /// What is known of a worker whose requests changed.
    fn settle(&self, search: &mut Search, worker: usize) {
        let part = &search.parts[worker];
        let spared = self.spared_by(part);
        search.total[worker] = self.time(reads(&spared), part.len());
        for &request in part {
            let own = spared.iter().zip(&self.spared[request]);
            search.without[request] = own.map(|(all, own)| all / own).collect();
        }
        search.spared[worker] = spared;
    }

    fn spared_by(&self, part: &[usize]) -> Vec<f64> {
        let mut spared = vec![1.0; self.spared.first().map_or(0, Vec::len)];
        for &request in part {
            spared.iter_mut().zip(&self.spared[request]).for_each(|(all, own)| *all *= own);
        }
        spared
    }

    /// The same with one request more.
    fn reads_both(&self, spared: &[f64], request: usize) -> f64 {
        spared.len() as f64 - dot(spared, &self.spared[request])
    }

    /// The step of so many requests, which all of them take.
    fn time(&self, n_distinct: f64, n_batch: usize) -> f64 {
        let StepCost { fixed, per_expert, per_token } = self.cost;
        let n_batch = n_batch as f64;
        n_batch * (fixed + per_expert * n_distinct + per_token * n_batch)
    }
}

/// Distinct experts a step is expected to read.
fn reads(spared: &[f64]) -> f64 {
    spared.len() as f64 - spared.iter().sum::<f64>()
}

/// Several sums at a time, which is faster than one.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    const LANES: usize = 8;
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut lanes = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    lanes.iter().sum::<f64>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f64>()
}

/// Requests 0 to `n` dealt to workers at random, evenly.
pub fn dealt(n: usize, n_workers: usize, rng: &mut Rng) -> Parts {
    let mut requests: Vec<usize> = (0..n).collect();
    for last in (1..n).rev() {
        requests.swap(last, rng.below(last + 1));
    }
    (0..n_workers).map(|worker| requests.iter().copied().skip(worker).step_by(n_workers).collect()).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Rng, *};

    const COST: StepCost = StepCost { fixed: 0.3, per_expert: 0.05, per_token: 0.01 };

    fn partition(spared: &[Vec<f64>], resizes: bool) -> Partition<'_> {
        Partition { spared, cost: COST, n_slots: 5, resizes }
    }

    /// The least total of all partitions over `n_workers` whose sizes are in `sizes`.
    fn exhaustive(partition: &Partition<'_>, n_workers: usize, sizes: std::ops::RangeInclusive<usize>) -> f64 {
        let n = partition.spared.len();
        let all = (0..n_workers.pow(n as u32)).filter_map(|code| {
            let mut parts = vec![Vec::new(); n_workers];
            (0..n).for_each(|request| parts[code / n_workers.pow(request as u32) % n_workers].push(request));
            parts.iter().all(|part| sizes.contains(&part.len())).then(|| partition.total(&parts))
        });
        all.min_by(f64::total_cmp).expect("a partition")
    }

    fn chances(n: usize) -> impl Strategy<Value = Vec<Vec<f64>>> {
        prop::collection::vec(prop::collection::vec(0.001..1.0, 11), n)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
        /// Any two partitions of six into threes are one exchange apart, so that a local optimum is the best.
        #[test]
        fn two_threes_are_the_best_there_are(spared in chances(6), seed in any::<u64>()) {
            let partition = partition(&spared, false);
            let found = partition.total(&partition.best([dealt(6, 2, &mut Rng::new(seed))]));
            prop_assert!((found - exhaustive(&partition, 2, 3..=3)).abs() < 1e-9);
        }

        #[test]
        fn several_starts_come_within_a_hundredth_of_the_best(spared in chances(8), seed in any::<u64>()) {
            let mut rng = Rng::new(seed);
            let even = partition(&spared, false);
            let parts = even.best((0..12).map(|_| dealt(8, 2, &mut rng)));
            let (found, best) = (even.total(&parts), exhaustive(&even, 2, 4..=4));
            prop_assert!(found > best - 1e-9 && found < 1.01 * best, "{found} {best}");
            // With sizes free, from there on.
            let free = partition(&spared, true);
            let (freed, best) = (free.total(&free.best([parts])), exhaustive(&free, 2, 3..=5));
            prop_assert!(freed <= found && freed > best - 1e-9 && freed < 1.03 * best, "{freed} {best}");
        }
    }

    #[test]
    fn like_goes_to_like() {
        // Twelve requests of three kinds, each of which picks its own four of twelve experts.
        let kind = |request: usize| request % 3;
        let spared: Vec<Vec<f64>> = (0..12)
            .map(|request| (0..12).map(|expert| if expert / 4 == kind(request) { 0.5 } else { 1.0 }).collect())
            .collect();
        let mut rng = Rng::new(7);
        let parts = partition(&spared, false).best((0..12).map(|_| dealt(12, 3, &mut rng)));
        for part in &parts {
            assert!(part.len() == 4 && part.iter().all(|&request| kind(request) == kind(part[0])), "{parts:?}");
        }
    }
}
