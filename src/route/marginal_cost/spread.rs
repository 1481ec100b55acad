//! How recent requests spread over the workers' centroids, and so how far a policy had better keep to those.
//!
//! Never places a request.

use crate::{route::WorkerView, types::WorkerId};

/// Requests that count, for each worker.
const MEMORY: usize = 8;

/// A worker that is so much less similar than the best counts nothing, one half so much counts half: a domain that several
/// workers share has centroids that differ by less, and which of them is the nearest is chance.
const NEAR: f64 = 0.2;

/// What is left of the trust in centroids that have most requests on few workers.
const LEAST: f64 = 0.125;

/// A worker may be near to so many times its share before trust falls, since chance alone makes of it that much.
const CHANCE: f64 = 1.3;
/// How fast it falls then.
const STEEPNESS: f64 = 4.0;

/// The share of recent requests that each worker's centroid is near to.
#[derive(Debug, Clone)]
pub(super) struct Spread {
    shares: Vec<f64>,
}

impl Spread {
    /// Even to begin with.
    pub fn new(n_workers: usize) -> Self {
        Self { shares: vec![1.0 / n_workers.max(1) as f64; n_workers] }
    }

    /// Makes room for workers that joined, which are near to nothing yet.
    pub fn make_room(&mut self, n_workers: usize) {
        self.shares.resize(n_workers.max(self.shares.len()), 0.0);
    }

    /// A request was placed whose similarity to each of these workers' centroids is so far behind the best. It counts once,
    /// for those it is near to.
    pub fn observe(&mut self, behind: impl Iterator<Item = (WorkerId, f32)> + Clone) {
        let near = behind.map(|(worker, behind)| (worker, (1.0 - f64::from(behind) / NEAR).max(0.0)));
        let all: f64 = near.clone().map(|(_, weight)| weight).sum();
        if all > 0.0 {
            let memory = (MEMORY * self.shares.len()) as f64;
            self.shares.iter_mut().for_each(|share| *share -= *share / memory);
            near.for_each(|(worker, weight)| self.shares[worker.index()] += weight / all / memory);
        }
    }

    /// From [`LEAST`] to 1: whether no worker that is up would get many more requests than its share of the slots if each
    /// went where it is near.
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
            let nearest = nearest.expect("below the sum");
            spread.observe((0..weights.len()).map(|at| (WorkerId(at as u32), f32::from(u8::from(at != nearest)))));
            sum += if nth < 1000 { 0.0 } else { spread.trust(workers) / 1000.0 };
        }
        sum
    }

    #[test]
    fn centroids_are_trusted_as_far_as_requests_spread_over_them() {
        let even = workers(&[8; 8]);
        let (matched, skewed, one) =
            (trust(&[1; 8], &even), trust(&[9, 9, 6, 6, 3, 3, 2, 2], &even), trust(&[1], &even));
        assert!(matched > 0.5 && (LEAST..0.25).contains(&skewed), "{matched} {skewed}");
        assert!((one - LEAST).abs() < 1e-9, "{one}");
    }

    #[test]
    fn a_domain_that_workers_share_is_near_to_all_of_them() {
        let pool = workers(&[8; 4]);
        // Which of the two is the nearest is the same for each request of a domain.
        let trust = |between: f32| {
            let mut spread = Spread::new(4);
            for nth in 0..400 {
                let own = nth % 2 * 2;
                let behind = move |at| if at == own { 0.0 } else { [1.0, between][usize::from(at / 2 == own / 2)] };
                spread.observe((0..4).map(|at| (WorkerId(at as u32), behind(at))));
            }
            spread.trust(&pool)
        };
        let [same, close, far] = [0.0, 0.1, 0.5].map(trust);
        assert!(same > 0.95 && (0.75..same).contains(&close), "{same} {close}");
        assert!((far - LEAST).abs() < 1e-9, "two workers of four get all: {far}");
    }

    #[test]
    fn a_worker_of_twice_the_slots_may_be_near_to_twice_as_many() {
        let unequal = workers(&[16, 8, 8]);
        let (fit, misfit) = (trust(&[2, 1, 1], &unequal), trust(&[1, 1, 2], &unequal));
        assert!(fit > 0.8 && misfit < 0.25, "{fit} {misfit}");
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
