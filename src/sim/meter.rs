use crate::{
    metrics::Summary,
    sim::{ReplayReport, ReplaySet},
};

/// Adds a replay up as it goes, in memory that grows with the measured requests alone.
pub(super) struct Meter {
    n_warmup: usize,
    n_admitted: usize,
    n_finished: u64,
    n_tokens: u64,
    tpot: Vec<f64>,
    waits: Vec<f64>,
    /// Steps since the first measured request came.
    running: Steps,
    /// As they were when the last request came so far.
    window: Steps,
}

#[derive(Clone, Default)]
struct Steps {
    n: u64,
    n_distinct: u64,
    n_batch: u64,
    time: f64,
    of_worker: Vec<u64>,
}

impl Meter {
    /// Measures what comes after the first `n_warmup` requests to reach one of `n_workers` decode workers.
    pub fn new(n_workers: usize, n_warmup: usize) -> Self {
        let none = Steps { of_worker: vec![0; n_workers], ..Steps::default() };
        let (running, window) = (none.clone(), none);
        Self {
            n_warmup,
            n_admitted: 0,
            n_finished: 0,
            n_tokens: 0,
            tpot: Vec::new(),
            waits: Vec::new(),
            running,
            window,
        }
    }

    /// A request reached a decode worker after it had waited so long for it; whether it is measured.
    pub fn admitted(&mut self, wait: f64) -> bool {
        self.n_admitted += 1;
        self.window.clone_from(&self.running);
        let measured = self.n_admitted > self.n_warmup;
        self.waits.extend(measured.then_some(wait));
        measured
    }

    /// A step ended.
    pub fn stepped(&mut self, worker: usize, n_distinct: u32, n_batch: u32, time: f64) {
        self.n_tokens += u64::from(n_batch);
        if self.n_admitted > self.n_warmup {
            self.running.n += 1;
            self.running.n_distinct += u64::from(n_distinct);
            self.running.n_batch += u64::from(n_batch);
            self.running.time += time;
            self.running.of_worker[worker] += 1;
        }
    }

    /// A request ended; `tpot` if it is measured and generated more than one token.
    pub fn finished(&mut self, tpot: Option<f64>) {
        self.n_finished += 1;
        self.tpot.extend(tpot);
    }

    /// The whole, at time `time`.
    pub fn report(mut self, policy: &str, set: &ReplaySet, n_repeats: u64, time: f64) -> ReplayReport {
        let steps = self.window;
        let over = |x: f64, n: f64| if n > 0.0 { x / n } else { 0.0 };
        let distinct = over(steps.n_distinct as f64, set.n_layer() as f64);
        ReplayReport {
            policy: policy.to_owned(),
            n_requests: self.n_finished,
            n_tokens: self.n_tokens,
            n_measured: self.tpot.len() as u64,
            n_repeats,
            time,
            tpot: Summary::of(&mut self.tpot),
            wait: Summary::of(&mut self.waits),
            experts_per_step: over(distinct, steps.n as f64),
            experts_per_token: over(distinct, steps.n_batch as f64),
            batch: over(steps.n_batch as f64, steps.n as f64),
            step: over(steps.time, steps.n as f64),
            steps: steps.of_worker,
        }
    }
}
