use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, SystemTime},
};

use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::{
    route::Decision,
    signature::ExpertCounts,
    types::{RequestId, WorkerId},
};

/// Ended requests that are remembered.
const N_PAST: usize = 256;
const NOWHERE: u32 = u32::MAX;

/// The requests being answered, and the last ones that were.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    live: Mutex<BTreeMap<RequestId, Arc<Entry>>>,
    past: Mutex<VecDeque<Arc<Entry>>>,
}

/// One choice of one request.
#[derive(Debug)]
pub(super) struct Entry {
    /// The engine's number.
    pub request: RequestId,
    /// The name the client was given: that of the answer, which may have several choices.
    pub id: String,
    pub choice: usize,
    pub prompt_tokens: u32,
    /// What chooses its worker.
    pub policy: &'static str,
    pub arrived: SystemTime,
    /// Since the engine's start.
    pub submitted: Duration,
    n_generated: AtomicU32,
    worker: AtomicU32,
    rest: Mutex<Rest>,
}

#[derive(Debug, Default, Clone)]
struct Rest {
    decision: Option<Decision>,
    counts: Option<Arc<ExpertCounts>>,
    n_routed: u32,
    first: Option<Duration>,
    last: Option<Duration>,
    cached_tokens: Option<u32>,
    outcome: Option<&'static str>,
}

impl Ledger {
    /// Opens an entry for a request that was accepted.
    pub fn open(&self, entry: Entry) -> Arc<Entry> {
        let entry = Arc::new(entry);
        self.live.lock().insert(entry.request, Arc::clone(&entry));
        entry
    }

    /// Moves an entry to those that ended.
    pub fn close(&self, entry: &Arc<Entry>, outcome: &'static str) {
        entry.rest.lock().outcome = Some(outcome);
        self.live.lock().remove(&entry.request);
        let mut past = self.past.lock();
        if past.len() == N_PAST {
            past.pop_front();
        }
        past.push_back(Arc::clone(entry));
    }

    /// The requests being answered, oldest first.
    pub fn live(&self) -> Vec<Arc<Entry>> {
        self.live.lock().values().cloned().collect()
    }

    /// The last `n` routed requests, those being answered included, newest first.
    pub fn recent(&self, n: usize) -> Vec<Arc<Entry>> {
        let mut all = self.live();
        all.extend(self.past.lock().iter().cloned());
        all.sort_by_key(|entry| std::cmp::Reverse(entry.request));
        all.truncate(n);
        all
    }

    /// The choices of the answer `id`, as far as they are remembered.
    pub fn find(&self, id: &str) -> Vec<Arc<Entry>> {
        let mut found = self.recent(usize::MAX);
        found.retain(|entry| entry.id == id);
        found.reverse();
        found
    }
}

impl Entry {
    /// A request that the engine accepted at `now`, since its start.
    pub fn new(
        request: RequestId,
        id: &str,
        choice: usize,
        prompt_tokens: u32,
        policy: &'static str,
        now: Duration,
    ) -> Self {
        Self {
            request,
            id: id.to_owned(),
            choice,
            prompt_tokens,
            policy,
            arrived: SystemTime::now(),
            submitted: now,
            n_generated: AtomicU32::new(0),
            worker: AtomicU32::new(NOWHERE),
            rest: Mutex::default(),
        }
    }

    pub fn routed(&self, decision: &Decision, counts: Option<Arc<ExpertCounts>>) {
        self.worker.store(decision.worker.0, Ordering::Relaxed);
        let mut rest = self.rest.lock();
        rest.n_routed += 1;
        rest.decision = Some(decision.clone());
        rest.counts = counts;
    }

    /// Takes a token into account; the time since the one before it, if there was one.
    pub fn token(&self, at: Duration) -> Option<Duration> {
        self.n_generated.fetch_add(1, Ordering::Relaxed);
        let mut rest = self.rest.lock();
        rest.first.get_or_insert(at);
        rest.last.replace(at).map(|last| at.saturating_sub(last))
    }

    /// Takes into account what its prompt found, once that is known.
    pub fn cached(&self, tokens: Option<u32>) {
        let mut rest = self.rest.lock();
        rest.cached_tokens = tokens.or(rest.cached_tokens);
    }

    /// Prompt tokens that were not computed again; known once the prefill is over.
    pub fn cached_tokens(&self) -> Option<u32> {
        self.rest.lock().cached_tokens
    }

    pub fn n_generated(&self) -> u32 {
        self.n_generated.load(Ordering::Relaxed)
    }

    /// The decode worker it was sent to last.
    pub fn worker(&self) -> Option<WorkerId> {
        Some(self.worker.load(Ordering::Relaxed)).filter(|&worker| worker != NOWHERE).map(WorkerId)
    }

    pub fn decision(&self) -> Option<Decision> {
        self.rest.lock().decision.clone()
    }

    /// The experts its prompt picked, once it was routed, where they are counted.
    pub fn counts(&self) -> Option<Arc<ExpertCounts>> {
        self.rest.lock().counts.clone()
    }

    /// Time to the first token.
    pub fn ttft(&self) -> Option<Duration> {
        Some(self.rest.lock().first?.saturating_sub(self.submitted))
    }

    /// Time an output token took after the first.
    pub fn tpot(&self) -> Option<Duration> {
        let rest = self.rest.lock();
        let n = self.n_generated().checked_sub(1).filter(|&n| n > 0)?;
        Some(rest.last?.saturating_sub(rest.first?) / n)
    }

    /// From the first token to the last.
    pub fn decoding(&self) -> Duration {
        let rest = self.rest.lock();
        rest.last.zip(rest.first).map_or(Duration::ZERO, |(last, first)| last.saturating_sub(first))
    }

    /// Its tokens and milliseconds, in llama-server's words. The prompt's time is that to the first token, so a wait in the
    /// queue is in it; the other tokens' time is put down to all of them, the first included, as it does there.
    pub fn timings(&self) -> Value {
        let cached = self.cached_tokens().unwrap_or(0).min(self.prompt_tokens);
        let (prompt, predicted) = (self.prompt_tokens - cached, self.n_generated());
        let [prompt_ms, predicted_ms] =
            [self.ttft().unwrap_or_default(), self.decoding()].map(|time| time.as_secs_f64() * 1e3);
        let [n_prompt, n_predicted] = [prompt, predicted].map(f64::from);
        let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        json!({
            "cache_n": cached,
            "prompt_n": prompt,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": ratio(prompt_ms, n_prompt),
            "prompt_per_second": ratio(1e3 * n_prompt, prompt_ms),
            "predicted_n": predicted,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": ratio(predicted_ms, n_predicted),
            "predicted_per_second": ratio(1e3 * n_predicted, predicted_ms),
        })
    }

    /// What happened to it, as far as it got. Without any of its text.
    pub fn to_json(&self) -> Value {
        let arrived = self.arrived.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let Rest { decision, n_routed, outcome, cached_tokens, .. } = self.rest.lock().clone();
        json!({
            "id": self.id,
            "choice": self.choice,
            "arrived": arrived.as_millis() as f64 / 1e3,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": cached_tokens,
            "completion_tokens": self.n_generated(),
            "outcome": outcome,
            "worker": self.worker().map(|worker| worker.0),
            "policy": self.policy,
            "route": decision,
            "n_routed": n_routed,
            "ttft_seconds": self.ttft().map(|time| time.as_secs_f64()),
            "tpot_seconds": self.tpot().map(|time| time.as_secs_f64()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Symptom: predicted_per_token_ms was not predicted_ms / predicted_n, as it is in llama-server.
    #[test]
    fn timings_are_over_all_predicted_tokens() {
        let entry = Entry::new(RequestId(1), "x", 0, 4, "least_loaded", Duration::from_secs(1));
        let rates = |entry: &Entry| {
            let timings = entry.timings();
            ["predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"]
                .map(|name| timings[name].as_f64())
        };
        assert_eq!(rates(&entry), [0.0; 4].map(Some));
        entry.token(Duration::from_secs(2));
        assert_eq!(rates(&entry), [1.0, 0.0, 0.0, 0.0].map(Some), "it took no time, which is no rate");
        for second in 3..6 {
            entry.token(Duration::from_secs(second));
        }
        assert_eq!(rates(&entry), [4.0, 3000.0, 750.0, 4000.0 / 3000.0].map(Some));
    }
}
