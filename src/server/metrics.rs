use std::{
    fmt::Write as _,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder, NoLabelSet, text::encode},
    metrics::{MetricType, counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use crate::{
    engine::{EngineStats, Times},
    route::Decision,
};

use super::ledger::{Entry, Ledger};

type Real = Gauge<f64, AtomicU64>;
type Seconds = Counter<f64, AtomicU64>;
type Outcome = [(&'static str, String); 3];
type Worker = [(&'static str, String); 1];
type Why = [(&'static str, &'static str); 1];
type Unlabelled = [(&'static str, &'static str); 0];

/// What the server measures, under eldr's names and, for the basics, llama-server's.
pub(super) struct Metrics {
    registry: Registry,
    requests: Family<Outcome, Counter>,
    refused: Family<Why, Counter>,
    ttft: Histogram,
    tpot: Histogram,
    itl: Histogram,
    similarity: Histogram,
    band: Histogram,
    prompt_tokens: Counter,
    output_tokens: Counter,
    prompt_seconds: Seconds,
    output_seconds: Seconds,
    sampled: Sampled,
}

/// Read off the engine at each scrape.
#[derive(Default)]
struct Sampled {
    active: Gauge,
    queued: Gauge,
    retried: Counter,
    lost: Counter,
    migrated: Counter,
    cached: Counter,
    held: Gauge,
    blocks: Family<Why, Counter>,
    copies: Counter,
    spilled: Counter,
    restored: Counter,
    unusable: Counter,
    uncounted: Counter,
    not_worth: Counter,
    checkpoints: Counter,
    returned: Counter,
    pinned: Gauge,
    row_bytes: Gauge,
    ram_bytes: Gauge,
    disk_bytes: Gauge,
    disk_files: Gauge,
    disk: Family<Why, Counter>,
    given_back: Family<Why, Counter>,
    /// Without an entry until a step was observed.
    experts: Family<Unlabelled, Real>,
    /// Likewise.
    step_time_error: Family<Unlabelled, Real>,
    route: Taken,
    handoff: Taken,
    slots: Family<Worker, Gauge>,
    inflight: Family<Worker, Gauge>,
    healthy: Family<Worker, Gauge>,
    kv_used: Family<Worker, Real>,
    processing: Gauge,
    deferred: Gauge,
    prompt_rate: Real,
    output_rate: Real,
}

/// Durations that the engine counted.
#[derive(Debug, Clone, Default)]
struct Taken(Arc<Mutex<Times>>);

impl EncodeMetric for Taken {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> std::fmt::Result {
        let times = *self.0.lock();
        let mut n_above = times.n;
        let mut buckets = Vec::with_capacity(Times::BOUNDS.len() + 1);
        for (bound, n) in Times::BOUNDS.into_iter().zip(times.counts) {
            buckets.push((bound, n));
            n_above -= n;
        }
        buckets.push((f64::INFINITY, n_above));
        encoder.encode_histogram::<NoLabelSet>(times.sum.as_secs_f64(), times.n, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

impl Metrics {
    pub fn new() -> Self {
        let seconds = |from: f64, n: u16| Histogram::new((0..n).map(|i| from * 2f64.powi(i32::from(i))));
        let metrics = Self {
            registry: Registry::default(),
            requests: Family::default(),
            refused: Family::default(),
            ttft: seconds(0.005, 14),
            tpot: seconds(0.001, 12),
            itl: seconds(0.001, 13),
            similarity: Histogram::new((1..=20).map(|i| f64::from(i) * 0.05)),
            band: Histogram::new([1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0]),
            prompt_tokens: Counter::default(),
            output_tokens: Counter::default(),
            prompt_seconds: Seconds::default(),
            output_seconds: Seconds::default(),
            sampled: Sampled::default(),
        };
        // Those that nobody has seen yet are zero, not missing.
        for reason in ["api_key", "draining", "queue_full"] {
            metrics.refused.get_or_create(&[("reason", reason)]).inc_by(0);
        }
        metrics.register()
    }

    fn register(mut self) -> Self {
        let mut r = Registry::default();
        r.register("eldr_requests", "Choices that ended, by policy, decode worker and outcome", self.requests.clone());
        r.register("eldr_refused", "Requests refused before they ran, by reason", self.refused.clone());
        r.register("eldr_ttft_seconds", "Time from submission to the first token", self.ttft.clone());
        r.register("eldr_tpot_seconds", "Time an output token took after the first, by request", self.tpot.clone());
        r.register("eldr_itl_seconds", "Time between two tokens of a request", self.itl.clone());
        r.register("eldr_route_similarity", "Cosine of signature and chosen centroid", self.similarity.clone());
        r.register("eldr_band_size", "Workers the policy chose between at the end", self.band.clone());
        let s = &self.sampled;
        r.register("eldr_requests_active", "Choices accepted and not ended", s.active.clone());
        r.register("eldr_queue_depth", "Choices waiting for a prefill worker", s.queued.clone());
        r.register("eldr_retries", "Requests prefilled again after a worker gave them back", s.retried.clone());
        r.register("eldr_workers_lost", "Workers lost since the start", s.lost.clone());
        r.register("eldr_migrations", "Running sequences moved to another decode worker", s.migrated.clone());
        r.register("eldr_cached_tokens", "Prompt tokens that were not computed again", s.cached.clone());
        r.register("eldr_cache_held_tokens", "Tokens kept for prompts to come", s.held.clone());
        r.register("eldr_cache_blocks", "Blocks of prompts that were there, or not, by outcome", s.blocks.clone());
        r.register("eldr_cache_copies", "Prefixes copied from another slot", s.copies.clone());
        r.register("eldr_cache_spilled", "Prefixes moved to host memory to make room", s.spilled.clone());
        r.register("eldr_cache_restored_tokens", "Tokens that came back from there", s.restored.clone());
        r.register(
            "eldr_cache_uncounted",
            "Prefixes whose picks are not known in the counted layers",
            s.uncounted.clone(),
        );
        r.register("eldr_cache_not_worth", "Stored prefixes that were faster computed", s.not_worth.clone());
        r.register("eldr_cache_checkpoints", "Prefixes stored because memory can not be cut", s.checkpoints.clone());
        r.register("eldr_cache_returned", "Answers that came back from decode workers", s.returned.clone());
        r.register("eldr_cache_pinned_tokens", "Tokens that are never dropped", s.pinned.clone());
        r.register("eldr_cache_row_bytes", "Bytes of the counts of cached blocks", s.row_bytes.clone());
        r.register("eldr_cache_ram_bytes", "Bytes of stored prefixes in host memory", s.ram_bytes.clone());
        r.register("eldr_cache_disk_bytes", "Bytes of stored prefixes on the disk", s.disk_bytes.clone());
        r.register("eldr_cache_disk_files", "Stored prefixes on the disk", s.disk_files.clone());
        r.register("eldr_cache_disk_prefixes", "What became of prefixes on the disk, by outcome", s.disk.clone());
        r.register("eldr_cache_unusable", "Prefixes that were there but could not be used", s.unusable.clone());
        r.register(
            "eldr_handoff_fallback",
            "Requests a decode worker gave back to be prefilled again, by reason",
            s.given_back.clone(),
        );
        r.register(
            "eldr_experts_distinct",
            "Distinct experts a layer and decode step, where counted",
            s.experts.clone(),
        );
        r.register(
            "eldr_step_time_error_ratio",
            "Mean relative error of the decode steps' times as the policy predicts them, once it does",
            s.step_time_error.clone(),
        );
        r.register("eldr_route_seconds", "Time the policy took to choose a decode worker", s.route.clone());
        r.register(
            "eldr_handoff_seconds",
            "Time a sequence took to get into a decode worker and be verified there",
            s.handoff.clone(),
        );
        r.register("eldr_worker_slots", "Sequences a decode worker can hold", s.slots.clone());
        r.register("eldr_worker_inflight", "Sequences a decode worker holds, hand-offs included", s.inflight.clone());
        r.register("eldr_worker_healthy", "1 while requests may be sent to the decode worker", s.healthy.clone());
        r.register("eldr_kv_used_ratio", "Share of a decode worker's positions that hold a token", s.kv_used.clone());
        r.register("llamacpp:requests_processing", "Choices being answered", s.processing.clone());
        r.register("llamacpp:requests_deferred", "Choices waiting", s.deferred.clone());
        r.register("llamacpp:prompt_tokens", "Prompt tokens processed", self.prompt_tokens.clone());
        r.register("llamacpp:tokens_predicted", "Tokens generated", self.output_tokens.clone());
        r.register("llamacpp:prompt_seconds", "Time to the first token, summed", self.prompt_seconds.clone());
        r.register(
            "llamacpp:tokens_predicted_seconds",
            "Time from first to last token, summed",
            self.output_seconds.clone(),
        );
        r.register("llamacpp:prompt_tokens_cached", "Prompt tokens that were not computed again", s.cached.clone());
        let per_second = "tokens a second of a choice, on average since the start";
        r.register("llamacpp:prompt_tokens_seconds", format!("Prompt {per_second}"), s.prompt_rate.clone());
        r.register("llamacpp:predicted_tokens_seconds", format!("Generated {per_second}"), s.output_rate.clone());
        self.registry = r;
        self
    }

    pub fn token(&self, gap: Option<Duration>) {
        self.output_tokens.inc();
        if let Some(gap) = gap {
            self.itl.observe(gap.as_secs_f64());
        }
    }

    pub fn routed(&self, decision: &Decision) {
        self.band.observe(f64::from(decision.band));
        if let Some(similarity) = decision.similarity {
            self.similarity.observe(f64::from(similarity));
        }
    }

    pub fn refused(&self, reason: &'static str) {
        self.refused.get_or_create(&[("reason", reason)]).inc();
    }

    pub fn ended(&self, entry: &Entry, outcome: &str) {
        let worker = entry.worker().map_or("none".to_owned(), |worker| worker.to_string());
        let labels = [("policy", entry.policy.to_owned()), ("worker", worker), ("outcome", outcome.to_owned())];
        self.requests.get_or_create(&labels).inc();
        if let Some(ttft) = entry.ttft() {
            self.prompt_tokens.inc_by(u64::from(entry.prompt_tokens));
            self.ttft.observe(ttft.as_secs_f64());
            self.prompt_seconds.inc_by(ttft.as_secs_f64());
            self.output_seconds.inc_by(entry.decoding().as_secs_f64());
        }
        if let Some(tpot) = entry.tpot() {
            self.tpot.observe(tpot.as_secs_f64());
        }
    }

    /// The page that Prometheus reads: `OpenMetrics`, or its older text format.
    pub fn render(&self, stats: &EngineStats, ledger: &Ledger, n_ctx_slot: u32, open_metrics: bool) -> String {
        self.sample(stats, ledger, n_ctx_slot);
        let mut text = String::new();
        if encode(&mut text, &self.registry).is_err() {
            log::error!("the metrics could not be written");
        }
        if open_metrics { text } else { to_prometheus_text(&text) }
    }

    fn sample(&self, stats: &EngineStats, ledger: &Ledger, n_ctx_slot: u32) {
        let s = &self.sampled;
        let whole = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        s.active.set(whole(stats.n_active));
        s.queued.set(whole(stats.n_queued));
        s.processing.set(whole(stats.n_active - stats.n_queued.min(stats.n_active)));
        s.deferred.set(whole(stats.n_queued));
        let rate = |n: &Counter, time: &Seconds| if time.get() > 0.0 { n.get() as f64 / time.get() } else { 0.0 };
        s.prompt_rate.set(rate(&self.prompt_tokens, &self.prompt_seconds));
        s.output_rate.set(rate(&self.output_tokens, &self.output_seconds));
        s.retried.inner().store(stats.dispatch.n_retried, Ordering::Relaxed);
        s.lost.inner().store(stats.dispatch.n_workers_lost, Ordering::Relaxed);
        s.migrated.inner().store(stats.dispatch.n_migrated, Ordering::Relaxed);
        s.cached.inner().store(stats.cache.n_cached_tokens, Ordering::Relaxed);
        s.held.set(i64::try_from(stats.cache.n_held_tokens).unwrap_or(i64::MAX));
        let set = |counter: &Counter, n: u64| counter.inner().store(n, Ordering::Relaxed);
        set(&s.blocks.get_or_create(&[("outcome", "hit")]), stats.cache.n_block_hits);
        set(&s.blocks.get_or_create(&[("outcome", "miss")]), stats.cache.n_block_misses);
        set(&s.copies, stats.cache.n_copies);
        set(&s.spilled, stats.cache.n_spilled);
        set(&s.restored, stats.cache.n_restored_tokens);
        set(&s.unusable, stats.cache.n_fallbacks);
        set(&s.uncounted, stats.cache.n_uncounted);
        set(&s.not_worth, stats.cache.n_not_worth);
        set(&s.checkpoints, stats.cache.n_checkpoints);
        set(&s.returned, stats.cache.n_returned);
        let gauge = |gauge: &Gauge, n: u64| {
            gauge.set(i64::try_from(n).unwrap_or(i64::MAX));
        };
        gauge(&s.pinned, stats.cache.n_pinned_tokens);
        gauge(&s.row_bytes, stats.cache.n_row_bytes);
        gauge(&s.ram_bytes, stats.cache_ram_bytes);
        let disk = stats.cache_disk.clone().unwrap_or_default();
        gauge(&s.disk_bytes, disk.n_bytes);
        gauge(&s.disk_files, disk.n_files);
        for (outcome, n) in [
            ("written", disk.n_written),
            ("skipped", disk.n_skipped),
            ("failed", disk.n_failed),
            ("read", disk.n_read),
            ("refused", disk.n_refused),
            ("removed", disk.n_removed),
        ] {
            set(&s.disk.get_or_create(&[("outcome", outcome)]), n);
        }
        set(&s.given_back.get_or_create(&[("reason", "worker_lost")]), stats.n_given_back.worker_lost);
        set(&s.given_back.get_or_create(&[("reason", "not_run")]), stats.n_given_back.not_run);
        if let Some(reads) = stats.refit.as_ref().and_then(|refit| refit.reads) {
            s.experts.get_or_create(&[]).set(reads.distinct);
        }
        if let Some(error) = stats.step_time_error {
            s.step_time_error.get_or_create(&[]).set(error);
        }
        *s.route.0.lock() = stats.route_times;
        *s.handoff.0.lock() = stats.handoff_times;
        let live = ledger.live();
        for worker in &stats.workers {
            let label: Worker = [("worker", worker.id.to_string())];
            let here = live.iter().filter(|entry| entry.worker() == Some(worker.id));
            let n_tokens: u64 = here.map(|entry| u64::from(entry.prompt_tokens + entry.n_generated())).sum();
            let room = f64::from(worker.n_slots) * f64::from(n_ctx_slot);
            s.slots.get_or_create(&label).set(i64::from(worker.n_slots));
            s.inflight.get_or_create(&label).set(i64::from(worker.n_inflight));
            s.healthy.get_or_create(&label).set(i64::from(worker.healthy));
            s.kv_used.get_or_create(&label).set(n_tokens as f64 / room.max(1.0));
        }
    }
}

/// `OpenMetrics` names a counter's family without the `_total` of its samples; the older format with it.
fn to_prometheus_text(open_metrics: &str) -> String {
    let mut counters: Vec<&str> = open_metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
    counters.retain(|line| line.ends_with(" counter"));
    let is_counter = |name: &str| counters.iter().any(|line| line.strip_suffix(" counter") == Some(name));
    let mut text = String::with_capacity(open_metrics.len());
    for line in open_metrics.lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("EOF" | "UNIT"), ..) => {}
            (Some("#"), Some(what), Some(name), Some(rest)) if is_counter(name) => {
                // Writing to a string does not fail.
                let _ = writeln!(text, "# {what} {name}_total {rest}");
            }
            _ => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_named_as_each_format_wants() {
        let text = "# HELP a_b What it is.\n# TYPE a_b counter\na_b_total{x=\"1\"} 2\n# HELP g G.\n# TYPE g gauge\ng 1\n# EOF\n";
        let want = "# HELP a_b_total What it is.\n# TYPE a_b_total counter\na_b_total{x=\"1\"} 2\n# HELP g G.\n# TYPE g gauge\ng 1\n";
        assert_eq!(to_prometheus_text(text), want);
    }
}
