//! How long routing and hand-offs take, measured around the policy and the runners, which read no clocks.
//!
//! Never changes what they do or return.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use ndarray::Array2;
use parking_lot::Mutex;

use crate::{
    kv::ChunkCounts,
    route::{Decision, RouteBuildError, RouteError, RoutePolicy, RouteRequest, WorkerView},
    schedule::{DecodeItem, ModelRunner, Recovery, RunError, RunnerInfo, SeqState, StepPicks},
    types::{RequestId, SamplingParams, Slot, Token, TokenLogprobs, WorkerId},
};

/// Durations of one kind, counted in buckets.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Times {
    /// How many there were.
    pub n: u64,
    /// Their sum.
    pub sum: Duration,
    /// How many were at most [`Times::BOUNDS`] of the same index and above the bound before.
    pub counts: [u64; Self::BOUNDS.len()],
}

impl Times {
    /// Upper bounds of the buckets, in seconds; what is above the last one is counted in `n` alone.
    pub const BOUNDS: [f64; 11] = [1e-6, 4e-6, 16e-6, 64e-6, 256e-6, 1e-3, 4e-3, 16e-3, 64e-3, 256e-3, 1.0];

    fn add(&mut self, took: Duration) {
        self.n += 1;
        self.sum += took;
        if let Some(bucket) = Self::BOUNDS.iter().position(|&bound| took.as_secs_f64() <= bound) {
            self.counts[bucket] += 1;
        }
    }
}

/// Times that several threads add to.
pub(super) type SharedTimes = Arc<Mutex<Times>>;

/// A policy whose choices are timed; what waits for a slot is not a choice.
pub(super) struct TimedPolicy {
    pub(super) policy: Box<dyn RoutePolicy>,
    pub(super) times: SharedTimes,
}

impl RoutePolicy for TimedPolicy {
    fn name(&self) -> &'static str {
        self.policy.name()
    }

    fn select(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
        let began = Instant::now();
        let decision = self.policy.select(request, workers)?;
        self.times.lock().add(began.elapsed());
        Ok(decision)
    }

    fn set_centroids(&mut self, centroids: &Arc<Array2<f32>>) -> Result<(), RouteBuildError> {
        self.policy.set_centroids(centroids)
    }

    fn cost(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Option<f64> {
        self.policy.cost(request, workers)
    }

    fn placed(&mut self, request: &RouteRequest<'_>, worker: WorkerId) {
        self.policy.placed(request, worker);
    }

    fn left(&mut self, id: RequestId, worker: WorkerId) {
        self.policy.left(id, worker);
    }

    fn stepped(&mut self, worker: WorkerId, n_batch: u32, time: f64) {
        self.policy.stepped(worker, n_batch, time);
    }

    fn step_time_error(&self) -> Option<f64> {
        self.policy.step_time_error()
    }
}

/// A decode worker's runner whose imports are timed: the sequences that arrive and are verified.
pub(super) struct TimedRunner {
    pub(super) runner: Box<dyn ModelRunner>,
    pub(super) times: SharedTimes,
}

impl ModelRunner for TimedRunner {
    fn info(&self) -> &RunnerInfo {
        self.runner.info()
    }

    fn enter(&mut self) {
        self.runner.enter();
    }

    fn recovery(&self) -> Option<Arc<dyn Recovery>> {
        self.runner.recovery()
    }

    fn open(&mut self, slot: Slot, sampling: &SamplingParams, generated: &[Token]) -> Result<(), RunError> {
        self.runner.open(slot, sampling, generated)
    }

    fn prefill(
        &mut self,
        slot: Slot,
        tokens: &[Token],
        pos: u32,
        last: bool,
        counts: Option<&mut ChunkCounts>,
    ) -> Result<Option<Token>, RunError> {
        self.runner.prefill(slot, tokens, pos, last, counts)
    }

    fn decode(&mut self, batch: &[DecodeItem], next: &mut Vec<Token>, picks: &mut StepPicks) -> Result<(), RunError> {
        self.runner.decode(batch, next, picks)
    }

    fn take_logprobs(&mut self, slot: Slot) -> Option<Box<TokenLogprobs>> {
        self.runner.take_logprobs(slot)
    }

    fn export(&mut self, slot: Slot) -> Result<SeqState, RunError> {
        self.runner.export(slot)
    }

    fn import(&mut self, slot: Slot, state: &SeqState) -> Result<(), RunError> {
        let began = Instant::now();
        self.runner.import(slot, state)?;
        self.times.lock().add(began.elapsed());
        Ok(())
    }

    fn relocate(&mut self, from: Slot, to: Slot) -> Result<(), RunError> {
        self.runner.relocate(from, to)
    }

    fn close(&mut self, slot: Slot) -> Result<(), RunError> {
        self.runner.close(slot)
    }

    fn keep(&mut self, slot: Slot, n_tokens: u32) -> Result<(), RunError> {
        self.runner.keep(slot, n_tokens)
    }

    fn copy_prefix(&mut self, from: Slot, to: Slot, n_tokens: u32) -> Result<(), RunError> {
        self.runner.copy_prefix(from, to, n_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_time_is_counted_once_in_the_first_bucket_that_holds_it() {
        let mut times = Times::default();
        for micros in [1, 2, 64, 65, 5_000_000] {
            times.add(Duration::from_micros(micros));
        }
        assert_eq!((times.n, times.sum), (5, Duration::from_micros(5_000_132)));
        assert_eq!(times.counts, [1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0]);
    }
}
