use std::{collections::BTreeMap, time::Duration};

use crate::{
    bench::{BatchSeen, PickStore, Seen, StepSample, picks::RequestStep, tokens_sha256},
    metrics::{RunMetrics, RunSummary, StepRecord},
    route::PolicyKind,
    types::{RequestId, Token, WorkerId},
};

/// Everything that happened in one run, by its time since the start, on either clock.
#[derive(Debug, Default)]
pub struct Timeline {
    requests: BTreeMap<RequestId, RequestLine>,
    seen: Seen,
    steps: Vec<(Duration, WorkerId, Vec<RequestStep>)>,
}

#[derive(Debug, Default)]
struct RequestLine {
    name: String,
    arrival: Duration,
    /// When its decode worker was first chosen.
    admitted: Option<Duration>,
    tokens: Vec<(Duration, Token)>,
    failed: bool,
}

impl Timeline {
    /// A request arrived.
    pub fn arrived(&mut self, id: RequestId, name: &str, at: Duration) {
        self.requests.insert(id, RequestLine { name: name.to_owned(), arrival: at, ..RequestLine::default() });
    }

    /// Its decode worker was chosen.
    pub fn admitted(&mut self, id: RequestId, at: Duration) {
        if let Some(request) = self.requests.get_mut(&id) {
            request.admitted.get_or_insert(at);
        }
    }

    /// It drew a token.
    pub fn token(&mut self, id: RequestId, token: Token, at: Duration) {
        if let Some(request) = self.requests.get_mut(&id) {
            request.tokens.push((at, token));
        }
    }

    /// It could not be run.
    pub fn failed(&mut self, id: RequestId) {
        if let Some(request) = self.requests.get_mut(&id) {
            request.failed = true;
        }
    }

    /// Takes in what a probe saw. `at` gives the time instead of the probe's own clock.
    pub fn saw(&mut self, seen: Seen, at: Option<Duration>) {
        let stamp = |own| at.unwrap_or(own);
        self.seen.batches.extend(seen.batches.into_iter().map(|(own, batch)| (stamp(own), batch)));
        self.seen.handoffs.extend(seen.handoffs.into_iter().map(|(own, took)| (stamp(own), took)));
        self.seen.decisions.extend(seen.decisions.into_iter().map(|(own, d, took)| (stamp(own), d, took)));
    }

    /// A decode worker finished a step of these requests; for counting their experts afterwards.
    pub fn stepped(&mut self, at: Duration, worker: WorkerId, members: Vec<RequestStep>) {
        self.steps.push((at, worker, members));
    }

    /// Counts the distinct experts of every step from recorded picks; false if they belong to other outputs.
    pub fn count(&mut self, picks: &PickStore) -> bool {
        if picks.tokens_sha256.as_deref() != Some(self.tokens_sha256().as_str()) {
            return false;
        }
        let count = |(at, worker, members): &(Duration, WorkerId, Vec<RequestStep>)| {
            let n_distinct = picks.distinct(members)?;
            let (n_batch, took) = (members.len() as u32, Duration::ZERO);
            Some((*at, BatchSeen { worker: *worker, n_batch, n_distinct, n_kv: 0, took }))
        };
        match self.steps.iter().map(count).collect::<Option<Vec<_>>>() {
            Some(batches) => {
                self.replace(batches);
                true
            }
            None => false,
        }
    }

    /// One hash over every request's tokens.
    pub fn tokens_sha256(&self) -> String {
        let tokens: Vec<(&str, Vec<Token>)> = self
            .requests
            .values()
            .map(|request| (request.name.as_str(), request.tokens.iter().map(|&(_, token)| token).collect()))
            .collect();
        let outputs: Vec<(&str, &[Token])> = tokens.iter().map(|(name, tokens)| (*name, tokens.as_slice())).collect();
        tokens_sha256(&outputs)
    }

    /// The decode batches of another run of the same schedule, which counted experts, in place of this run's.
    pub fn take_batches(&mut self, counted: Self) {
        self.replace(counted.seen.batches);
    }

    /// Takes counted batches in place of timed ones, whose times they keep where they are the same batches.
    fn replace(&mut self, mut counted: Vec<(Duration, BatchSeen)>) {
        let timed = std::mem::take(&mut self.seen.batches);
        let is_same = |((_, a), (_, b)): (&(Duration, BatchSeen), &(Duration, BatchSeen))| {
            (a.worker, a.n_batch) == (b.worker, b.n_batch)
        };
        if counted.len() == timed.len() && counted.iter().zip(&timed).all(is_same) {
            for ((_, counted), (_, timed)) in counted.iter_mut().zip(timed) {
                (counted.n_kv, counted.took) = (timed.n_kv, timed.took);
            }
        }
        self.seen.batches = counted;
    }

    /// Every decode step that was timed and whose experts were counted.
    pub fn step_samples(&self) -> Vec<StepSample> {
        let sample = |(_, batch): &(Duration, BatchSeen)| {
            (!batch.n_distinct.is_empty() && batch.took > Duration::ZERO).then(|| StepSample {
                ms: batch.took.as_secs_f64() * 1e3,
                n_experts: batch.n_distinct.iter().sum(),
                n_batch: batch.n_batch,
                n_kv: batch.n_kv,
            })
        };
        self.seen.batches.iter().filter_map(sample).collect()
    }

    /// Milliseconds that all hand-offs took.
    pub fn handoffs_ms(&self) -> f64 {
        self.seen.handoffs.iter().map(|(_, took)| took.as_secs_f64() * 1e3).sum()
    }

    /// The run in numbers, without its warm-up: the first `warmup` share of requests to leave their prefill, and all
    /// that happened before the next one did. What happened after the last one did (the batches only shrink then) is
    /// left out too, except that every measured request counts to its end.
    pub fn summarise(self, policy: PolicyKind, n_workers: usize, warmup: f64) -> RunSummary {
        let sha256 = self.tokens_sha256();
        // A request of one token ends in its prefill and never reaches a decode worker.
        let left = |request: &RequestLine| request.admitted.or(request.tokens.first().map(|&(at, _)| at));
        let mut order: Vec<(Duration, RequestId)> =
            self.requests.iter().filter_map(|(&id, request)| Some((left(request)?, id))).collect();
        order.sort_unstable();
        let n_warmup = ((order.len() as f64 * warmup) as usize).min(order.len().saturating_sub(1));
        let measured = &order[n_warmup.min(order.len())..];
        let (from, to) = match (measured.first(), measured.last()) {
            (Some(&(from, _)), Some(&(to, _))) => (from, to),
            _ => (Duration::ZERO, Duration::MAX),
        };
        let mut metrics = RunMetrics::new(n_workers);
        for (_, id) in measured {
            let request = &self.requests[id];
            let times: Vec<Duration> = request.tokens.iter().map(|&(at, _)| at).collect();
            if !request.failed && !times.is_empty() {
                metrics.finished(request.arrival, &times);
            }
        }
        // Those that fail count wherever they are.
        self.requests.values().filter(|request| request.failed).for_each(|_| metrics.failed());
        let inside = |at: &Duration| (from..=to).contains(at);
        for (_, batch) in self.seen.batches.iter().filter(|(at, _)| inside(at)) {
            metrics.stepped(StepRecord { worker: batch.worker, n_batch: batch.n_batch, n_distinct: &batch.n_distinct });
        }
        for (_, took) in self.seen.handoffs.iter().filter(|(at, _)| inside(at)) {
            metrics.handed_off(*took);
        }
        for (_, decision, took) in self.seen.decisions.iter().filter(|(at, ..)| inside(at)) {
            metrics.routed(decision, *took);
        }
        metrics.summarise(policy, sha256)
    }
}
