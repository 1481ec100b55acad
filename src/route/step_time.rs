//! How long a worker's decode step takes for a given batch, learnt from the steps it has run.
//!
//! Never reads a clock; the times and their unit are the caller's.

/// Numbers a step's time depends on: one, experts, sequences, tokens of context.
const N: usize = 4;

/// Steps after which a worker's step counts a third.
const MEMORY: f64 = 400.0;
/// The same for what all workers have in common.
const POOL_MEMORY: f64 = 2000.0;
/// Steps a model is believed for until it has seen some: its shape, and its speed.
const BELIEF: f64 = 50.0;
const SPEED_BELIEF: f64 = 20.0;
/// Steps over which the error is averaged.
const ERROR_MEMORY: f64 = 200.0;

/// What a decode step has to do.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepLoad {
    /// Distinct experts, summed over the layers.
    pub n_experts: f64,
    /// Sequences.
    pub n_batch: f64,
    /// Tokens of all sequences' contexts.
    pub n_context: f64,
}

/// The time of a decode step: `fixed + per_expert * experts + per_sequence * sequences + per_token * context`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepTime {
    /// What every step takes.
    pub fixed: f64,
    /// What each distinct expert of each layer adds.
    pub per_expert: f64,
    /// What each sequence adds.
    pub per_sequence: f64,
    /// What each token of context adds.
    pub per_token: f64,
}

impl StepTime {
    /// The time of a step.
    pub fn of(&self, load: &StepLoad) -> f64 {
        self.fixed
            + self.per_expert * load.n_experts
            + self.per_sequence * load.n_batch
            + self.per_token * load.n_context
    }

    /// A device that waits for weights: a step of a batch of 16 unrelated sequences takes 1, of which 0.30 is fixed, 0.55
    /// goes with the experts and 0.15 with the sequences. For `n_layer` MoE layers of `n_expert` experts, `k` a token.
    pub fn preset(n_layer: usize, n_expert: u32, k: u32) -> Self {
        const BATCH: f64 = 16.0;
        let experts = expected_distinct(n_expert, k, BATCH) * n_layer as f64;
        let per_expert = if experts > 0.0 { 0.55 / experts } else { 0.0 };
        Self { fixed: 0.30, per_expert, per_sequence: 0.15 / BATCH, per_token: 0.0 }
    }

    fn scaled(&self, by: f64) -> [f64; N] {
        [self.fixed, self.per_expert, self.per_sequence, self.per_token].map(|x| x * by)
    }

    fn from_array([fixed, per_expert, per_sequence, per_token]: [f64; N]) -> Self {
        Self { fixed, per_expert, per_sequence, per_token }
    }
}

/// Distinct experts of `batch` tokens that pick `k` of `n_expert` at random.
fn expected_distinct(n_expert: u32, k: u32, batch: f64) -> f64 {
    if n_expert == 0 {
        return 0.0;
    }
    let n = f64::from(n_expert);
    n * (1.0 - (1.0 - f64::from(k) / n).powf(batch))
}

/// Every worker's [`StepTime`], learnt online by least squares that forgets.
///
/// A worker's model is drawn towards that of all workers together, at the worker's own speed, and that one towards the
/// first model, so that neither a new worker nor a load that never changes leads it astray. No coefficient is negative.
#[derive(Debug, Clone)]
pub struct StepTimes {
    first: StepTime,
    pool: Learner,
    workers: Vec<Learner>,
    error: Option<f64>,
}

impl StepTimes {
    /// Models for `n_workers` workers that start as `first`, whose unit of time does not matter: the first steps show it.
    pub fn new(first: StepTime, n_workers: usize) -> Self {
        let learner = |memory| Learner::new(first, memory);
        Self { first, pool: learner(POOL_MEMORY), workers: vec![learner(MEMORY); n_workers], error: None }
    }

    /// Adds workers up to so many, which start as all workers together are.
    pub fn make_room(&mut self, n_workers: usize) {
        self.workers.resize(n_workers.max(self.workers.len()), Learner::new(self.pool.model, MEMORY));
    }

    /// A worker's model as of now.
    pub fn get(&self, worker: usize) -> &StepTime {
        &self.workers[worker].model
    }

    /// A worker ran a step in `time`. Times that are no numbers above 0 are ignored.
    pub fn observe(&mut self, worker: usize, load: &StepLoad, time: f64) {
        if !(time.is_finite() && time > 0.0) {
            return;
        }
        if self.pool.weight >= BELIEF {
            let miss = (self.workers[worker].model.of(load) / time - 1.0).abs();
            let error = self.error.get_or_insert(miss);
            *error += (miss - *error) / ERROR_MEMORY;
        }
        self.pool.observe(load, time, &self.first, 0.0);
        let pool = self.pool.model;
        self.workers[worker].observe(load, time, &pool, SPEED_BELIEF);
        // One that has run no step yet would else be compared in another unit of time.
        self.workers.iter_mut().filter(|other| other.weight < 1.0).for_each(|other| other.model = pool);
    }

    /// The mean relative error of the predictions, over the last steps; nothing before the models have seen some.
    pub fn error(&self) -> Option<f64> {
        self.error
    }
}

/// Forgetting least squares of one model.
#[derive(Debug, Clone)]
struct Learner {
    model: StepTime,
    keep: f64,
    /// Sums over the steps seen: x x', x t, t, and the times the believed model gave.
    xx: [[f64; N]; N],
    xt: [f64; N],
    time: f64,
    believed: f64,
    weight: f64,
}

impl Learner {
    fn new(model: StepTime, memory: f64) -> Self {
        let keep = 1.0 - 1.0 / memory;
        Self { model, keep, xx: [[0.0; N]; N], xt: [0.0; N], time: 0.0, believed: 0.0, weight: 0.0 }
    }

    /// `belief` is the model that is right until steps tell otherwise, but for its speed, which is believed for as many
    /// steps as `speed_belief` says.
    fn observe(&mut self, load: &StepLoad, time: f64, belief: &StepTime, speed_belief: f64) {
        let x = [1.0, load.n_experts, load.n_batch, load.n_context];
        for (row, &x_i) in self.xx.iter_mut().zip(&x) {
            for (sum, &x_j) in row.iter_mut().zip(&x) {
                *sum = *sum * self.keep + x_i * x_j;
            }
        }
        for (sum, &x_i) in self.xt.iter_mut().zip(&x) {
            *sum = *sum * self.keep + x_i * time;
        }
        self.time = self.time * self.keep + time;
        self.believed = self.believed * self.keep + belief.of(load);
        self.weight = self.weight * self.keep + 1.0;
        let of_belief = speed_belief * self.believed / self.weight;
        let speed = (self.time + of_belief) / (self.believed + of_belief).max(f64::MIN_POSITIVE);
        self.solve(belief.scaled(speed));
    }

    /// Least squares over the steps seen, plus [`BELIEF`] times the squared distance from `belief` in the time of a mean
    /// step, no coefficient below 0: by coordinate descent from the last solution.
    fn solve(&mut self, belief: [f64; N]) {
        let mut model = self.model.scaled(1.0);
        for _ in 0..4 {
            for i in 0..N {
                // A coefficient counts by what it adds to a mean step.
                let tie = BELIEF * self.xx[i][i] / self.weight;
                let others: f64 = (0..N).filter(|&j| j != i).map(|j| self.xx[i][j] * model[j]).sum();
                let curvature = self.xx[i][i] + tie;
                if curvature > 0.0 {
                    model[i] = ((self.xt[i] - others + tie * belief[i]) / curvature).max(0.0);
                } else {
                    model[i] = belief[i];
                }
            }
        }
        self.model = StepTime::from_array(model);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    const TRUTH: StepTime = StepTime { fixed: 0.004, per_expert: 0.0001, per_sequence: 0.0005, per_token: 1e-6 };

    /// Loads as a worker has them: experts follow the sequences, but not exactly.
    fn load(rng: &mut Rng) -> StepLoad {
        let n_batch = 1.0 + rng.below(24) as f64;
        let n_experts = 5.0 * expected_distinct(64, 4, n_batch) * (0.75 + 0.25 * rng.uniform());
        StepLoad { n_experts, n_batch, n_context: n_batch * (100.0 + 300.0 * rng.uniform()) }
    }

    #[test]
    fn the_preset_takes_one_for_a_batch_of_sixteen() {
        let load = StepLoad { n_experts: 5.0 * expected_distinct(64, 4, 16.0), n_batch: 16.0, n_context: 0.0 };
        assert!((StepTime::preset(5, 64, 4).of(&load) - 1.0).abs() < 1e-12);
        assert_eq!(StepTime::preset(0, 0, 0).per_expert.to_bits(), 0);
    }

    #[test]
    fn learns_every_workers_times_in_their_own_unit() {
        let mut rng = Rng::new(1);
        let mut times = StepTimes::new(StepTime::preset(5, 64, 4), 3);
        // Worker 1 is half as fast; worker 2 never runs.
        for _ in 0..4000 {
            let worker = rng.below(2);
            let load = load(&mut rng);
            let noise = 0.98 + 0.04 * rng.uniform();
            times.observe(worker, &load, TRUTH.of(&load) * (1 + worker) as f64 * noise);
        }
        for _ in 0..50 {
            let load = load(&mut rng);
            for worker in 0..2 {
                let ratio = times.get(worker).of(&load) / (TRUTH.of(&load) * (1 + worker) as f64);
                assert!((ratio - 1.0).abs() < 0.05, "worker {worker}: {ratio}");
            }
            let unseen = times.get(2).of(&load) / TRUTH.of(&load);
            assert!((0.5..3.0).contains(&unseen), "{unseen}");
        }
        assert!(times.error().is_some_and(|error| error < 0.03), "{:?}", times.error());
    }

    #[test]
    fn a_straggler_is_seen_within_its_memory() {
        let mut rng = Rng::new(2);
        let mut times = StepTimes::new(StepTime::preset(5, 64, 4), 2);
        for step in 0..1600 {
            let load = load(&mut rng);
            let slow = if step >= 800 { 3.0 } else { 1.0 };
            times.observe(step % 2, &load, TRUTH.of(&load) * if step % 2 == 0 { slow } else { 1.0 });
        }
        let load = load(&mut rng);
        let ratio = times.get(0).of(&load) / times.get(1).of(&load);
        assert!((2.0..3.5).contains(&ratio), "{ratio}");
    }

    #[test]
    fn no_coefficient_is_negative_whatever_is_seen() {
        let mut rng = Rng::new(3);
        let mut times = StepTimes::new(StepTime::preset(5, 64, 4), 1);
        for _ in 0..500 {
            times.observe(0, &load(&mut rng), rng.uniform());
            times.observe(0, &load(&mut rng), f64::NAN);
            times.observe(0, &load(&mut rng), -1.0);
            assert!(times.get(0).scaled(1.0).iter().all(|x| x.is_finite() && *x >= 0.0), "{:?}", times.get(0));
        }
    }
}
