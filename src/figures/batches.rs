//! How many distinct experts a decode step reads when its requests are alike, and when they are not.
//!
//! Never runs a model: batches are drawn from recorded picks, which do not depend on the batch they were made in.

use std::collections::BTreeMap;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{Figure, stats::round};
use crate::{rng::Rng, trace::Trace};

const SIZES: [usize; 6] = [1, 2, 4, 8, 16, 32];
const N_DRAWS: usize = 400;
const SEED: u64 = 1;

/// Mean distinct experts a layer a step, by batch size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Batches {
    /// Batches drawn of each kind and size.
    pub n_draws: usize,
    /// Seed of the draws.
    pub seed: u64,
    /// Experts a layer (E), which no batch can pass.
    pub n_expert: u32,
    /// Sizes there are enough requests for, ascending.
    pub sizes: Vec<BatchSize>,
}

/// Batches of one size: as many different requests, each at a decode step of its own drawn at random.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BatchSize {
    /// Requests in a batch.
    pub size: usize,
    /// Requests the batches were drawn from: those of labels with enough requests, or all if no label has.
    pub n_requests: usize,
    /// Mean distinct experts a layer when the requests are drawn regardless of label.
    pub mixed: f64,
    /// Standard error of `mixed` over the draws.
    pub mixed_error: f64,
    /// The same for batches of one label, each label as often as it has requests; nothing if no label has enough.
    pub same: Option<f64>,
    /// Standard error of `same`.
    pub same_error: Option<f64>,
    /// How much lower `same` is than `mixed`, as a share: 0.2 is 20 % fewer.
    pub reduction: Option<f64>,
}

impl Batches {
    pub(super) fn of(trace: &Trace) -> Figure<Self> {
        let with_steps: Vec<usize> =
            (0..trace.requests.len()).filter(|&at| trace.requests[at].n_steps(&trace.header) > 0).collect();
        if with_steps.is_empty() {
            return Figure::left_out("no request has decode steps");
        }
        let mut groups: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for &at in &with_steps {
            if let Some(domain) = &trace.requests[at].domain {
                groups.entry(domain).or_default().push(at);
            }
        }
        let groups: Vec<Vec<usize>> = groups.into_values().collect();
        Figure::Data(Self {
            n_draws: N_DRAWS,
            seed: SEED,
            n_expert: trace.header.shape.n_expert,
            sizes: SIZES.par_iter().filter_map(|&size| BatchSize::of(trace, &with_steps, &groups, size)).collect(),
        })
    }
}

impl BatchSize {
    fn of(trace: &Trace, all: &[usize], groups: &[Vec<usize>], size: usize) -> Option<Self> {
        let groups: Vec<&Vec<usize>> = groups.iter().filter(|group| group.len() >= size).collect();
        let pool: Vec<usize> =
            if groups.is_empty() { all.to_vec() } else { groups.iter().copied().flatten().copied().collect() };
        if pool.len() < size {
            return None;
        }
        let mut rng = Rng::new(SEED ^ (size as u64) << 32);
        let (mut same, mut mixed) = (Mean::default(), Mean::default());
        for _ in 0..N_DRAWS {
            let first = rng.below(pool.len());
            mixed.add(distinct(trace, &draw(&pool, first, size, &mut rng), &mut rng));
            // The group that holds the first request, so that a label comes as often as it has requests.
            let mut place = first;
            let own = groups.iter().find(|group| {
                let holds = place < group.len();
                place -= if holds { 0 } else { group.len() };
                holds
            });
            if let Some(group) = own {
                same.add(distinct(trace, &draw(group, place, size, &mut rng), &mut rng));
            }
        }
        let is_labelled = !groups.is_empty();
        Some(Self {
            size,
            n_requests: pool.len(),
            mixed: round(mixed.mean()),
            mixed_error: round(mixed.error()),
            same: is_labelled.then(|| round(same.mean())),
            same_error: is_labelled.then(|| round(same.error())),
            reduction: is_labelled.then(|| round(1.0 - same.mean() / mixed.mean())),
        })
    }
}

/// `size` different requests of `from`, the one at position `first` among them.
fn draw(from: &[usize], first: usize, size: usize, rng: &mut Rng) -> Vec<usize> {
    let mut left = from.to_vec();
    left.swap(0, first);
    for i in 1..size {
        let other = i + rng.below(left.len() - i);
        left.swap(i, other);
    }
    left.truncate(size);
    left
}

/// Distinct experts a layer when each request is at a random step.
fn distinct(trace: &Trace, batch: &[usize], rng: &mut Rng) -> f64 {
    let shape = &trace.header.shape;
    let n_layer = shape.n_layer_moe();
    let steps: Vec<usize> = batch.iter().map(|&at| rng.below(trace.requests[at].n_steps(&trace.header))).collect();
    let mut seen = vec![false; shape.n_expert as usize];
    let mut n = 0u32;
    for layer in 0..n_layer {
        seen.fill(false);
        for (&at, &step) in batch.iter().zip(&steps) {
            for &expert in trace.requests[at].step_picks(&trace.header, step, layer) {
                n += u32::from(!seen[usize::from(expert)]);
                seen[usize::from(expert)] = true;
            }
        }
    }
    f64::from(n) / n_layer as f64
}

/// A mean and its standard error.
#[derive(Default)]
struct Mean {
    n: f64,
    sum: f64,
    squares: f64,
}

impl Mean {
    fn add(&mut self, x: f64) {
        self.n += 1.0;
        self.sum += x;
        self.squares += x * x;
    }

    fn mean(&self) -> f64 {
        self.sum / self.n
    }

    fn error(&self) -> f64 {
        let variance = (self.squares - self.sum * self.sum / self.n) / (self.n - 1.0);
        (variance.max(0.0) / self.n).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        figures::planted::Planted,
        trace::{TraceHeader, TraceRequest},
        types::MoeShape,
    };

    /// Requests that pick one expert in both layers at every step: expert `pick(i)` for request i.
    fn constant(n: usize, label: impl Fn(usize) -> Option<String>, pick: impl Fn(usize) -> u16) -> Trace {
        let shape = MoeShape { layers: vec![0, 1], n_layer: 2, n_expert: 64, n_expert_used: 1 };
        let request = |i| TraceRequest {
            id: format!("{i}"),
            domain: label(i),
            n_prompt: 1,
            blocks: vec![1],
            picks: vec![pick(i); 6],
            gates: None,
        };
        let header = TraceHeader { shape, fingerprint: "planted".into(), n_block: 32 };
        Trace { header, requests: (0..n).map(request).collect() }
    }

    fn sizes(trace: &Trace) -> Vec<BatchSize> {
        Batches::of(trace).data().expect("steps").sizes.clone()
    }

    #[test]
    fn each_label_with_its_own_expert_needs_one() {
        // Two labels of 40 requests, one expert each: a batch of one label reads 1, a mixed one of two 1 + 40/79.
        let trace = constant(80, |i| Some(format!("{}", i % 2)), |i| (i % 2) as u16);
        let sizes = sizes(&trace);
        assert_eq!(sizes.iter().map(|s| s.size).collect::<Vec<_>>(), SIZES);
        assert!(sizes.iter().all(|s| s.same == Some(1.0) && s.same_error == Some(0.0) && s.n_requests == 80));
        assert_eq!((sizes[0].mixed, sizes[0].reduction), (1.0, Some(0.0)));
        let want = 1.0 + 40.0 / 79.0;
        assert!((sizes[1].mixed - want).abs() < 4.0 * sizes[1].mixed_error && sizes[1].mixed_error < 0.03);
        // Of 32 requests some are of either label.
        assert_eq!((sizes[5].mixed, sizes[5].reduction), (2.0, Some(0.5)));
    }

    #[test]
    fn a_request_is_in_a_batch_once() {
        // All pick experts of their own, so a batch reads as many as it has requests.
        let trace = constant(50, |_| Some("one".into()), |i| i as u16);
        for size in sizes(&trace) {
            assert_eq!((size.mixed, size.same), (size.size as f64, Some(size.size as f64)));
        }
    }

    #[test]
    fn labels_with_too_few_requests_and_requests_without_are_left_out() {
        // 12 of one label, 5 of another, 3 without.
        let label = |i: usize| (i < 17).then(|| if i < 12 { "big".to_owned() } else { "small".to_owned() });
        let trace = constant(20, label, |i| i as u16);
        let seen: Vec<(usize, usize, bool)> =
            sizes(&trace).iter().map(|s| (s.size, s.n_requests, s.same.is_some())).collect();
        assert_eq!(seen, [(1, 17, true), (2, 17, true), (4, 17, true), (8, 12, true), (16, 20, false)]);
        let unlabelled = sizes(&constant(9, |_| None, |i| i as u16));
        assert!(unlabelled.iter().all(|s| s.same.is_none() && s.reduction.is_none() && s.n_requests == 9));
        let mut silent = constant(3, |_| None, |_| 0);
        silent.requests.iter_mut().for_each(|request| request.picks.clear());
        assert!(matches!(Batches::of(&silent), Figure::LeftOut(_)));
    }

    #[test]
    fn the_same_numbers_on_any_number_of_threads() {
        let trace = Planted::default().trace();
        let on = |n: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("threads");
            pool.install(|| Batches::of(&trace))
        };
        assert_eq!(on(1), on(3));
    }
}
