//! Placing the experts of a large model: 128 experts in each of 94 layers, over 8 ranks, for 8 clusters of requests; the
//! time, and how far the busiest rank is from a bound that no placement passes.
//!
//! `cargo bench --bench placement -- [--small]`. The picks are planted: a cluster prefers some experts, by a power law of its
//! own.
#![allow(clippy::print_stdout, reason = "it prints a table")]

use std::time::Instant;

use eldr::{
    calibrate::{busiest_rank, place_layer},
    rng::Rng,
};
use rayon::prelude::*;

const N_EXPERT: usize = 128;
const N_PICKS: usize = 8;
const N_RANKS: usize = 8;
const N_CLUSTERS: usize = 8;
/// Sequences of a batch.
const BATCH: usize = 32;
/// Batches a placement is made for, and as many that judge it.
const N_BATCHES: usize = 64;

/// The active experts of each batch, a bit each.
type Batches = Vec<Vec<u64>>;

#[derive(Clone, Copy, Default)]
struct Judged {
    in_order: f64,
    fitted: f64,
    held_out: f64,
    bound: f64,
    held_out_bound: f64,
}

fn main() {
    let small = std::env::args().any(|arg| arg == "--small");
    let n_layer = if small { 3 } else { 94 };
    let n_clusters = if small { 2 } else { N_CLUSTERS };
    let layers: Vec<(usize, usize)> =
        (0..n_clusters).flat_map(|cluster| (0..n_layer).map(move |layer| (cluster, layer))).collect();
    let batches: Vec<[Batches; 2]> =
        layers.iter().map(|&(cluster, layer)| batches((cluster * n_layer + layer) as u64)).collect();

    let started = Instant::now();
    let places: Vec<Vec<u32>> =
        batches.par_iter().map(|[fitted, _]| place_layer(&views(fitted), N_EXPERT, N_RANKS, 1)).collect();
    let took = started.elapsed();

    let in_order: Vec<u32> = (0..N_EXPERT).map(|expert| (expert * N_RANKS / N_EXPERT) as u32).collect();
    let mut sum = Judged::default();
    for ([fitted, held_out], places) in batches.iter().zip(&places) {
        for rank in 0..N_RANKS as u32 {
            let n = places.iter().filter(|&&at| at == rank).count();
            assert!(n <= N_EXPERT / N_RANKS, "rank {rank} holds {n} experts");
        }
        sum.in_order += busiest_rank(&views(held_out), &in_order, N_RANKS);
        sum.fitted += busiest_rank(&views(fitted), places, N_RANKS);
        sum.held_out += busiest_rank(&views(held_out), places, N_RANKS);
        sum.bound += even(fitted);
        sum.held_out_bound += even(held_out);
    }
    let mean = |x: f64| x / layers.len() as f64;
    println!(
        "{n_clusters} clusters x {n_layer} layers x {N_EXPERT} experts on {N_RANKS} ranks, {N_BATCHES} batches of {BATCH}: \
         {:.2} s with {} threads",
        took.as_secs_f64(),
        rayon::current_num_threads()
    );
    println!("| experts of the busiest rank, a layer | here | no placement has fewer than | above it |");
    println!("| --- | --- | --- | --- |");
    let line = |name: &str, got: f64, bound: f64| {
        println!("| {name} | {:.2} | {:.2} | {:+.1} % |", mean(got), mean(bound), (got / bound - 1.0) * 100.0);
    };
    line("placed, on the batches it was made for", sum.fitted, sum.bound);
    line("placed, on others", sum.held_out, sum.held_out_bound);
    line("in order of their numbers, on those others", sum.in_order, sum.held_out_bound);
}

/// Batches to place by and batches to judge by, of one layer and one cluster.
fn batches(seed: u64) -> [Batches; 2] {
    let mut rng = Rng::new(seed);
    let mut order: Vec<usize> = (0..N_EXPERT).collect();
    for at in (1..N_EXPERT).rev() {
        order.swap(at, rng.below(at + 1));
    }
    let mut sums = Vec::with_capacity(N_EXPERT);
    let mut all = 0.0;
    for place in 0..N_EXPERT {
        all += (1.0 + place as f64).powf(-0.7);
        sums.push(all);
    }
    let mut batch = || {
        let mut active = vec![0u64; N_EXPERT / 64];
        for _ in 0..BATCH {
            let mut picked = [false; N_EXPERT];
            let mut n = 0;
            while n < N_PICKS {
                let drawn = rng.uniform() * all;
                let expert = order[sums.partition_point(|&sum| sum <= drawn).min(N_EXPERT - 1)];
                n += usize::from(!picked[expert]);
                picked[expert] = true;
                active[expert / 64] |= 1 << (expert % 64);
            }
        }
        active
    };
    let mut of = || (0..N_BATCHES).map(|_| batch()).collect();
    [of(), of()]
}

/// What no placement can go below: the busiest rank of a batch has at least its share of the active experts.
fn even(batches: &Batches) -> f64 {
    let least =
        |batch: &Vec<u64>| f64::from(batch.iter().map(|word| word.count_ones()).sum::<u32>().div_ceil(N_RANKS as u32));
    batches.iter().map(least).sum::<f64>() / batches.len() as f64
}

fn views(batches: &Batches) -> Vec<&[u64]> {
    batches.iter().map(Vec::as_slice).collect()
}
