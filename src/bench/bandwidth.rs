//! How fast this machine's cores read memory that no cache holds.
//!
//! Never measures a device other than the CPU.

use std::{hint::black_box, thread, time::Duration};

use super::Stopwatch;

/// Bytes each thread reads in a round: more than a core's caches hold.
const BYTES: usize = 256 << 20;
/// Rounds; the fastest one counts, since others only take time away.
const ROUNDS: usize = 5;

/// GB/s (1e9 bytes) that `n_threads` threads read together, each from its own part of memory. Takes some 256 MiB and a tenth
/// of a second for each thread.
pub fn read_bandwidth(n_threads: usize) -> f64 {
    of(n_threads.max(1), BYTES, ROUNDS)
}

fn of(n_threads: usize, bytes: usize, rounds: usize) -> f64 {
    let words = vec![1u64; bytes * n_threads / 8];
    let best = (0..rounds).map(|_| round(&words, n_threads)).min().unwrap_or(Duration::MAX);
    (words.len() * 8) as f64 / best.as_secs_f64().max(1e-9) / 1e9
}

/// The time of the slowest thread, without what other programs took of its core.
fn round(words: &[u64], n_threads: usize) -> Duration {
    let part = words.len().div_ceil(n_threads);
    let read = |part: &[u64]| {
        let started = Stopwatch::Thread.start();
        black_box(sum(part));
        started.elapsed()
    };
    thread::scope(|scope| {
        let others: Vec<_> = words.chunks(part).skip(1).map(|part| scope.spawn(move || read(part))).collect();
        let own = words.chunks(part).next().map_or(Duration::ZERO, read);
        others.into_iter().filter_map(|other| other.join().ok()).fold(own, Duration::max)
    })
}

/// Eight sums, so that none waits for another's addition.
fn sum(words: &[u64]) -> u64 {
    let mut sums = [0u64; 8];
    for eight in words.chunks_exact(8) {
        for (sum, &word) in sums.iter_mut().zip(eight) {
            *sum = sum.wrapping_add(word);
        }
    }
    sums.iter().fold(0, |all, &sum| all.wrapping_add(sum))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_read_once() {
        assert_eq!(sum(&vec![1; 4096]), 4096);
        assert!(of(2, 1 << 16, 2) > 0.0);
    }
}
