//! How recent requests spread over the workers' centroids, and so how far a policy had better keep to those.
//!
//! Never places a request.

use crate::{route::WorkerView, types::WorkerId};

/// Requests that count, for each worker.
const MEMORY: usize = 8;

/// What is left of the trust in centroids that have most requests on few workers.
const LEAST: f64 = 0.25;

/// A worker may be nearest to so many times its share before trust falls, since chance alone makes of it that much.
const CHANCE: f64 = 1.5;
/// How fast it falls then.
const STEEPNESS: f64 = 2.0;

/// The share of recent requests that each worker's centroid is the nearest to.
#[derive(Debug, Clone)]
pub(super) struct Spread {
    shares: Vec<f64>,
}

impl Spread {
    /// Even to begin with.
    pub fn new(n_workers: usize) -> Self {
        Self { shares: vec![1.0 / n_workers.max(1) as f64; n_workers] }
    }

    /// Makes room for workers that joined, which are nearest to nothing yet.
    pub fn make_room(&mut self, n_workers: usize) {
        self.shares.resize(n_workers.max(self.shares.len()), 0.0);
    }

    /// A request was placed whose nearest centroid is this worker's.
    pub fn observe(&mut self, nearest: WorkerId) {
        let memory = (MEMORY * self.shares.len()) as f64;
        for (worker, share) in self.shares.iter_mut().enumerate() {
            *share += (f64::from(u8::from(worker == nearest.index())) - *share) / memory;
        }
    }

    /// From [`LEAST`] to 1: whether no worker that is up would get many more requests than its share of the slots if each
    /// went to its nearest centroid.
    pub fn trust(&self, workers: &[WorkerView]) -> f64 {
        let up = || workers.iter().filter(|worker| worker.healthy);
        let n_slots = up().map(|worker| f64::from(worker.n_slots)).sum::<f64>();
        let share = |worker: &WorkerView| self.shares.get(worker.id.index()).copied().unwrap_or(0.0);
        let times = |worker: &WorkerView| share(worker) * n_slots / f64::from(worker.n_slots);
        let most = up().map(times).fold(0.0, f64::max);
        (1.0 - STEEPNESS * (most - CHANCE).max(0.0)).max(LEAST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    fn workers(n_slots: &[u32]) -> Vec<WorkerView> {
        let view = |(id, &n_slots)| WorkerView { id: WorkerId(id), n_slots, n_inflight: 0, healthy: true };
        (0..).zip(n_slots).map(view).collect()
    }

    /// The mean trust while requests are drawn with these weights.
    fn trust(weights: &[u32], workers: &[WorkerView]) -> f64 {
        let mut spread = Spread::new(workers.len());
        let mut rng = Rng::new(1);
        let all: u32 = weights.iter().sum();
        let mut sum = 0.0;
        for nth in 0..2000 {
            let mut left = rng.below(all as usize) as u32;
            let nearest = weights.iter().position(|&weight| {
                let is_it = left < weight;
                left = left.wrapping_sub(weight);
                is_it
            });
            spread.observe(WorkerId(nearest.expect("below the sum") as u32));
            sum += if nth < 1000 { 0.0 } else { spread.trust(workers) / 1000.0 };
        }
        sum
    }

    #[test]
    fn centroids_are_trusted_as_far_as_requests_spread_over_them() {
        let even = workers(&[8; 8]);
        let (matched, skewed, one) =
            (trust(&[1; 8], &even), trust(&[9, 9, 6, 6, 3, 3, 2, 2], &even), trust(&[1], &even));
        assert!(matched > 0.85 && (LEAST..0.5).contains(&skewed), "{matched} {skewed}");
        assert!((one - LEAST).abs() < 1e-9, "{one}");
    }

    #[test]
    fn a_worker_of_twice_the_slots_is_nearest_to_twice_as_many() {
        let unequal = workers(&[16, 8, 8]);
        let (fit, misfit) = (trust(&[2, 1, 1], &unequal), trust(&[1, 1, 2], &unequal));
        assert!(fit > 0.9 && misfit < 0.5, "{fit} {misfit}");
    }

    #[test]
    fn workers_that_join_and_are_lost_change_what_is_even() {
        let mut pool = workers(&[8; 4]);
        let mut spread = Spread::new(2);
        assert!((spread.trust(&pool[..2]) - 1.0).abs() < 1e-9);
        spread.make_room(4);
        assert!((spread.trust(&pool) - LEAST).abs() < 1e-9, "nothing is near to the new ones");
        pool[2..].iter_mut().for_each(|worker| worker.healthy = false);
        assert!((spread.trust(&pool) - 1.0).abs() < 1e-9);
        assert!((Spread::new(0).trust(&[]) - 1.0).abs() < 1e-9);
    }
}
