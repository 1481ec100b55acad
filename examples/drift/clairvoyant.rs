//! A policy told what every request will pick, for an upper bound: no prediction could place better by the same rule.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use eldr::{
    route::{Decision, PolicyLayer, RouteError, RoutePolicy, RouteRequest, WorkerView},
    signature::ExpertCounts,
    trace::Trace,
    types::WorkerId,
};

/// Decode counts by prefill counts, which are as good as a name.
pub struct Future(HashMap<Vec<u32>, ExpertCounts>);

impl Future {
    pub fn of(trace: &Trace) -> Self {
        let header = &trace.header;
        let told = |request: &eldr::trace::TraceRequest| {
            (name(&request.prefill_counts(header)), request.decode_counts(header))
        };
        Self(trace.requests.iter().map(told).collect())
    }
}

fn name(counts: &ExpertCounts) -> Vec<u32> {
    counts.layers().iter().filter_map(|&layer| counts.row(layer)).flatten().copied().collect()
}

/// Gives the policy inside the counts of the picks to come instead of the prompt's.
pub struct Clairvoyant {
    pub inner: Box<dyn RoutePolicy>,
    pub future: Arc<Future>,
}

impl Clairvoyant {
    fn told<'a>(future: &'a Future, request: &RouteRequest<'a>) -> RouteRequest<'a> {
        let counts = request.counts.map(|counts| future.0.get(&name(counts)).unwrap_or(counts));
        RouteRequest { counts, ..*request }
    }
}

impl PolicyLayer for Clairvoyant {
    fn inner(&self) -> &dyn RoutePolicy {
        &*self.inner
    }

    fn inner_mut(&mut self) -> &mut dyn RoutePolicy {
        &mut *self.inner
    }

    fn name(&self) -> &'static str {
        "clairvoyant"
    }

    fn select(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
        self.inner.select(&Self::told(&self.future, request), workers)
    }

    fn cost(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Option<f64> {
        self.inner.cost(&Self::told(&self.future, request), workers)
    }

    fn placed(&mut self, request: &RouteRequest<'_>, worker: WorkerId) {
        self.inner.placed(&Self::told(&self.future, request), worker);
    }
}

/// Steps whose mean is usual.
const SETTLED: usize = 400;

/// What a watched policy saw.
#[derive(Default)]
pub struct Seen {
    /// Sequences and time of each step, in order.
    pub steps: Vec<(u32, f64)>,
    /// For each change of the workers that take requests, and for one that slows down: the steps before it, and the workers
    /// after it.
    pub changes: Vec<(usize, usize)>,
}

/// Writes down what the policy inside is told.
pub struct Watched {
    pub inner: Box<dyn RoutePolicy>,
    pub n_workers: usize,
    /// The first worker will slow down.
    pub awaits_straggler: bool,
    pub seen: Arc<Mutex<Seen>>,
}

impl PolicyLayer for Watched {
    fn inner(&self) -> &dyn RoutePolicy {
        &*self.inner
    }

    fn inner_mut(&mut self) -> &mut dyn RoutePolicy {
        &mut *self.inner
    }

    fn select(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
        let n_workers = workers.iter().filter(|worker| worker.healthy).count();
        if n_workers != self.n_workers {
            self.n_workers = n_workers;
            let mut seen = self.seen.lock().expect("one thread");
            let n_steps = seen.steps.len();
            seen.changes.push((n_steps, n_workers));
        }
        self.inner.select(request, workers)
    }

    fn stepped(&mut self, worker: WorkerId, n_batch: u32, time: f64) {
        let mut seen = self.seen.lock().expect("one thread");
        if self.awaits_straggler && worker == WorkerId(0) && seen.steps.len() > SETTLED {
            let last = &seen.steps[seen.steps.len() - SETTLED..];
            let usual = last.iter().map(|step| step.1).sum::<f64>() / SETTLED as f64;
            if time > 2.0 * usual {
                self.awaits_straggler = false;
                let n_steps = seen.steps.len();
                seen.changes.push((n_steps, self.n_workers));
            }
        }
        seen.steps.push((n_batch, time));
        drop(seen);
        self.inner.stepped(worker, n_batch, time);
    }
}
