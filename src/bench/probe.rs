use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::{
    bench::Stopwatch,
    route::{Decision, PolicyLayer, RouteError, RoutePolicy, RouteRequest, WorkerView},
    schedule::{DecodeItem, ModelRunner, RunError, RunnerLayer, SeqState, StepPicks},
    types::{Slot, Token, WorkerId},
};

/// Watches runners and a policy from outside, on either clock: decode batches and the experts they picked, hand-offs,
/// decisions.
#[derive(Debug, Clone)]
pub struct Probe {
    started: Instant,
    stopwatch: Stopwatch,
    log: Arc<Mutex<Log>>,
}

#[derive(Debug, Default)]
struct Log {
    seen: Seen,
    /// Exports on their way, by the address of their bytes, which the hand-off shares.
    exports: HashMap<usize, Duration>,
    replayed: Duration,
}

/// What a [`Probe`] saw since it was last asked, each with the time since it was made.
#[derive(Debug, Default)]
pub struct Seen {
    /// Decode batches.
    pub batches: Vec<(Duration, BatchSeen)>,
    /// How long each hand-off's export and import took together.
    pub handoffs: Vec<(Duration, Duration)>,
    /// Decisions, and how long each took.
    pub decisions: Vec<(Duration, Decision, Duration)>,
}

/// A decode batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchSeen {
    /// The worker.
    pub worker: WorkerId,
    /// Sequences in it.
    pub n_batch: u32,
    /// Distinct experts it picked in each MoE layer; empty without a tap.
    pub n_distinct: Vec<u32>,
    /// Tokens of context, summed over its sequences.
    pub n_kv: u64,
    /// How long its forward pass took.
    pub took: Duration,
}

impl Probe {
    /// A probe whose times start at `started`, and that times calls with `stopwatch`.
    pub fn new(started: Instant, stopwatch: Stopwatch) -> Self {
        Self { started, stopwatch, log: Arc::default() }
    }

    /// What calls are timed with.
    pub fn stopwatch(&self) -> Stopwatch {
        self.stopwatch
    }

    /// Everything seen since the last call.
    pub fn take(&self) -> Seen {
        std::mem::take(&mut self.log.lock().seen)
    }

    /// Time that replayed calls stand for since the last call.
    pub fn take_replayed(&self) -> Duration {
        std::mem::take(&mut self.log.lock().replayed)
    }

    pub(super) fn add_replayed(&self, took: Duration) {
        self.log.lock().replayed += took;
    }

    /// Watches a worker's runner.
    pub fn watch(&self, worker: WorkerId, runner: Box<dyn ModelRunner>) -> Box<dyn ModelRunner> {
        Box::new(WatchedRunner { probe: self.clone(), worker, runner })
    }

    /// Watches a policy.
    pub fn watch_policy(&self, policy: Box<dyn RoutePolicy>) -> Box<dyn RoutePolicy> {
        Box::new(WatchedPolicy { probe: self.clone(), policy })
    }
}

struct WatchedRunner {
    probe: Probe,
    worker: WorkerId,
    runner: Box<dyn ModelRunner>,
}

impl RunnerLayer for WatchedRunner {
    fn inner(&self) -> &dyn ModelRunner {
        &*self.runner
    }

    fn inner_mut(&mut self) -> &mut dyn ModelRunner {
        &mut *self.runner
    }

    fn decode(&mut self, batch: &[DecodeItem], next: &mut Vec<Token>, picks: &mut StepPicks) -> Result<(), RunError> {
        let start = self.probe.stopwatch.start();
        self.runner.decode(batch, next, picks)?;
        let took = start.elapsed();
        let n_kv = batch.iter().map(|item| u64::from(item.pos) + 1).sum();
        let n_batch = u32::try_from(batch.len()).unwrap_or(u32::MAX);
        let seen = BatchSeen { worker: self.worker, n_batch, n_distinct: picks.distinct(), n_kv, took };
        self.probe.log.lock().seen.batches.push((self.probe.started.elapsed(), seen));
        Ok(())
    }

    fn export(&mut self, slot: Slot) -> Result<SeqState, RunError> {
        let replayed = self.probe.log.lock().replayed;
        let start = self.probe.stopwatch.start();
        let state = self.runner.export(slot)?;
        let took = start.elapsed() + self.probe.log.lock().replayed.saturating_sub(replayed);
        self.probe.log.lock().exports.insert(state.bytes.as_ptr().addr(), took);
        Ok(state)
    }

    fn import(&mut self, slot: Slot, state: &SeqState) -> Result<(), RunError> {
        let start = self.probe.stopwatch.start();
        self.runner.import(slot, state)?;
        let took = start.elapsed();
        let mut log = self.probe.log.lock();
        let exported = log.exports.remove(&state.bytes.as_ptr().addr()).unwrap_or_default();
        log.seen.handoffs.push((self.probe.started.elapsed(), exported + took));
        Ok(())
    }
}

struct WatchedPolicy {
    probe: Probe,
    policy: Box<dyn RoutePolicy>,
}

impl PolicyLayer for WatchedPolicy {
    fn inner(&self) -> &dyn RoutePolicy {
        &*self.policy
    }

    fn inner_mut(&mut self) -> &mut dyn RoutePolicy {
        &mut *self.policy
    }

    fn select(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
        let start = self.probe.stopwatch.start();
        let decision = self.policy.select(request, workers)?;
        let took = start.elapsed();
        let mut log = self.probe.log.lock();
        log.seen.decisions.push((self.probe.started.elapsed(), decision.clone(), took));
        Ok(decision)
    }
}
