use super::{ClusterReport, runner::Charged};
use crate::metrics::Summary;

/// Adds a run up as it goes, in memory that grows with the measured requests alone. Times in seconds.
#[derive(Default)]
pub(super) struct Meter {
    n_warmup: u64,
    n_admitted: u64,
    n_finished: u64,
    n_failed: u64,
    n_steps: u64,
    samples: [Vec<f64>; 4],
    /// Steps since the first measured request came.
    running: Steps,
    /// As they were when the last request came so far.
    window: Steps,
    /// When the first measured request and the last one came.
    span: (f64, f64),
    /// When the step of each worker that is in one began.
    began: Vec<Option<f64>>,
}

#[derive(Clone, Default)]
struct Steps {
    n: u64,
    n_experts: u64,
    n_batch: u64,
    n_kv: u64,
    ms: f64,
    /// Seconds of these steps since the first measured request came.
    busy: f64,
    of_worker: Vec<u64>,
}

/// When things happened to a request that ended.
pub(super) struct Times {
    pub arrival: f64,
    pub first_token: f64,
    pub admitted: Option<f64>,
    pub n_tokens: u32,
}

/// What the driver knows besides.
pub(super) struct Totals {
    pub policy: String,
    pub n_layer: usize,
    pub n_workers: usize,
    pub now: f64,
    pub refused: u64,
    pub retried: u64,
    pub lost: u64,
    pub migrated: u64,
    pub copies: u64,
    pub cached: f64,
}

impl Meter {
    /// Measures what comes after the first `n_warmup` requests to reach a decode worker.
    pub fn new(n_workers: usize, n_warmup: u64) -> Self {
        let none = Steps { of_worker: vec![0; n_workers], ..Steps::default() };
        Self { n_warmup, running: none.clone(), window: none, ..Self::default() }
    }

    /// A request reached a decode worker, or ended before; whether it is measured.
    pub fn admitted(&mut self, now: f64) -> bool {
        self.n_admitted += 1;
        self.window.clone_from(&self.running);
        let measured = self.n_admitted > self.n_warmup;
        if self.n_admitted == self.n_warmup + 1 {
            self.span.0 = now;
        }
        self.span.1 = now;
        // Steps that have begun count as far as they have come.
        if measured {
            self.window.busy += self.began.iter().flatten().map(|&began| self.since(began, now)).sum::<f64>();
        }
        measured
    }

    /// Seconds of a step that began then, without what was before the first measured request.
    fn since(&self, began: f64, now: f64) -> f64 {
        now - began.max(self.span.0)
    }

    /// A decode step began.
    pub fn began(&mut self, worker: usize, now: f64) {
        if worker >= self.began.len() {
            self.began.resize(worker + 1, None);
        }
        self.began[worker] = Some(now);
    }

    /// A decode step of `n_batch` sequences ended.
    pub fn stepped(&mut self, worker: usize, n_batch: u32, charged: &Charged, now: f64) {
        self.n_steps += 1;
        let began = self.began[worker].take().expect("a step that ends has begun");
        if self.n_admitted > self.n_warmup {
            let busy = self.since(began, now);
            let steps = &mut self.running;
            steps.n += 1;
            steps.n_experts += u64::from(charged.n_experts);
            steps.n_batch += u64::from(n_batch);
            steps.n_kv += charged.n_kv;
            steps.ms += charged.ms;
            steps.busy += busy;
            if worker >= steps.of_worker.len() {
                steps.of_worker.resize(worker + 1, 0);
            }
            steps.of_worker[worker] += u64::from(n_batch);
        }
    }

    /// A request ended with all its tokens.
    pub fn finished(&mut self, times: &Times, now: f64, measured: bool) {
        self.n_finished += 1;
        if !measured {
            return;
        }
        let ms = 1e3;
        let [ttft, tpot, e2e, wait] = &mut self.samples;
        ttft.push((times.first_token - times.arrival) * ms);
        e2e.push((now - times.arrival) * ms);
        if times.n_tokens > 1 {
            tpot.push((now - times.first_token) * ms / f64::from(times.n_tokens - 1));
        }
        wait.extend(times.admitted.map(|at| (at - times.first_token) * ms));
    }

    /// A request could not be run.
    pub fn failed(&mut self) {
        self.n_failed += 1;
    }

    /// The whole.
    pub fn report(self, totals: Totals) -> ClusterReport {
        let steps = &self.window;
        let over = |x: f64, n: f64| if n > 0.0 { x / n } else { 0.0 };
        let experts = over(steps.n_experts as f64, totals.n_layer as f64);
        let (n, n_batch) = (steps.n as f64, steps.n_batch as f64);
        let seconds = self.span.1 - self.span.0;
        let n_workers = totals.n_workers as f64;
        let most = steps.of_worker.iter().max().copied().unwrap_or(0) as f64;
        let [mut ttft, mut tpot, mut e2e, mut wait] = self.samples;
        ClusterReport {
            policy: totals.policy,
            workers: totals.n_workers as u32,
            finished: self.n_finished,
            failed: self.n_failed,
            refused: totals.refused,
            retried: totals.retried,
            lost: totals.lost,
            migrated: totals.migrated,
            copies: totals.copies,
            measured: ttft.len() as u64,
            time_s: totals.now,
            ttft_ms: Summary::of(&mut ttft),
            tpot_ms: Summary::of(&mut tpot),
            e2e_ms: Summary::of(&mut e2e),
            wait_ms: Summary::of(&mut wait),
            experts_per_step: over(experts, n),
            experts_per_token: over(experts, n_batch),
            batch: over(n_batch, n),
            context: over(steps.n_kv as f64, n),
            step_ms: over(steps.ms, n),
            tokens_per_s: over(n_batch, seconds),
            busy: over(steps.busy, seconds * n_workers),
            imbalance: over(most, n_batch / n_workers),
            cached: totals.cached,
            steps: self.n_steps,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Symptom: the only worker of a pool was busy 1.042 of the time: a step that the measured window cut counted whole.
    #[test]
    fn a_step_is_busy_inside_the_measured_window_alone() {
        let mut meter = Meter::new(2, 1);
        let step = |meter: &mut Meter, worker: usize, from: f64, to: f64| {
            meter.began(worker, from);
            meter.stepped(worker, 1, &Charged::default(), to);
        };
        step(&mut meter, 0, 0.0, 1.0);
        assert!(!meter.admitted(1.0));
        meter.began(0, 1.0);
        assert!(meter.admitted(2.0));
        meter.stepped(0, 1, &Charged::default(), 4.0);
        step(&mut meter, 1, 4.0, 5.0);
        meter.began(0, 5.0);
        assert!(meter.admitted(6.0));
        meter.stepped(0, 1, &Charged::default(), 9.0);
        let totals = Totals {
            policy: String::new(),
            n_layer: 1,
            n_workers: 2,
            now: 9.0,
            refused: 0,
            retried: 0,
            lost: 0,
            migrated: 0,
            copies: 0,
            cached: 0.0,
        };
        // From 2 to 6 s: 2 s and 1 s of the first worker, 1 s of the second.
        assert!((meter.report(totals).busy - 0.5).abs() < 1e-12);
    }
}
