//! How long routing and hand-offs take, measured around the policy and the runners, which read no clocks.
//!
//! Never changes what they do or return.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::{
    engine::RestoreRates,
    kv::ChunkCounts,
    route::{Decision, PolicyLayer, RouteError, RoutePolicy, RouteRequest, WorkerView},
    schedule::{ModelRunner, RunError, RunnerLayer, SeqState},
    types::{Slot, Token},
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

    /// Their mean; nothing where there were none.
    pub fn mean(&self) -> Duration {
        Duration::from_secs_f64(self.sum.as_secs_f64() / (self.n.max(1) as f64))
    }

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

impl PolicyLayer for TimedPolicy {
    fn inner(&self) -> &dyn RoutePolicy {
        &*self.policy
    }

    fn inner_mut(&mut self) -> &mut dyn RoutePolicy {
        &mut *self.policy
    }

    fn select(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
        let began = Instant::now();
        let decision = self.policy.select(request, workers)?;
        self.times.lock().add(began.elapsed());
        Ok(decision)
    }
}

/// A runner whose imports are timed: the sequences that arrive and are verified.
pub(super) struct TimedRunner {
    pub(super) runner: Box<dyn ModelRunner>,
    pub(super) times: SharedTimes,
    /// Of a prefill worker: what it takes to compute and to restore.
    pub(super) rates: Option<RestoreRates>,
}

impl RunnerLayer for TimedRunner {
    fn inner(&self) -> &dyn ModelRunner {
        &*self.runner
    }

    fn inner_mut(&mut self) -> &mut dyn ModelRunner {
        &mut *self.runner
    }

    fn import(&mut self, slot: Slot, state: &SeqState) -> Result<(), RunError> {
        let began = Instant::now();
        self.runner.import(slot, state)?;
        let took = began.elapsed();
        self.times.lock().add(took);
        self.rates.iter().for_each(|rates| rates.imported(state.bytes.len(), took));
        Ok(())
    }

    fn prefill(
        &mut self,
        slot: Slot,
        tokens: &[Token],
        pos: u32,
        last: bool,
        counts: Option<&mut ChunkCounts>,
    ) -> Result<Option<Token>, RunError> {
        let began = Instant::now();
        let next = self.runner.prefill(slot, tokens, pos, last, counts)?;
        self.rates.iter().for_each(|rates| rates.prefilled(tokens.len(), began.elapsed()));
        Ok(next)
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
