//! What steps take on this machine: decode steps of every batch size, of mixed and of like requests, and prefills.
//!
//! Never simulates.

use std::{collections::VecDeque, sync::Arc, time::Instant};

use super::{Bench, BenchParams, Progress};
use crate::{
    bench::{
        BenchError, BenchRequest, Clock, Environment, LeastSquares, Limit, Probe, StepBytes, StepSample, Timeline,
        least_squares,
    },
    engine::{EngineError, N_PREFILL_PARALLEL},
    route::PolicyKind,
    schedule::{DecodeWorker, Handoff, Job, PrefillWorker, WorkerEvent},
    sim::{DecodeCost, DeviceCost, HandoffCost, PrefillCost},
    types::{MoeShape, RequestId},
};

/// Decode steps of a batch size and an order of requests.
const STEPS: usize = 64;
/// Requests there are for each place in a batch: those that end are followed by others.
const ROUNDS: usize = 3;
/// Steps of a size without which it is not shown.
const SHOWN: usize = 16;

/// A device's costs and how well they describe what was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct CostFit {
    /// The costs.
    pub cost: DeviceCost,
    /// Of decode steps, the mean of the error's size, and what 95% of them keep to, as shares of a step.
    pub decode_error: (f64, f64),
    /// Steps the fit is over, and steps left out because something lengthened them.
    pub n_steps: (usize, usize),
    /// As `decode_error`, of prefill steps.
    pub prefill_error: (f64, f64),
    /// Each batch size.
    pub batches: Vec<BatchFit>,
    /// What the model's steps read.
    pub bytes: Option<StepBytes>,
    /// The machine, and its read bandwidth.
    pub environment: Environment,
}

/// The steps of one batch size.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchFit {
    /// Sequences.
    pub batch: u32,
    /// Steps measured.
    pub n_steps: usize,
    /// Their mean.
    pub step_ms: f64,
    /// Mean of the cost's over the measured, less 1.
    pub bias: f64,
    /// Distinct experts a layer.
    pub experts: f64,
    /// Tokens in a second.
    pub tokens_per_s: f64,
    /// Bytes read in a second, in GB/s.
    pub gb_per_s: Option<f64>,
}

impl CostFit {
    /// The batch size that makes the most tokens a second, and the first size after which more sequences made fewer.
    pub fn best_batch(&self) -> Option<(u32, Option<u32>)> {
        let best = self.batches.iter().max_by(|a, b| a.tokens_per_s.total_cmp(&b.tokens_per_s))?;
        let falls = self.batches.windows(2).find(|pair| pair[1].tokens_per_s < pair[0].tokens_per_s * 0.97);
        Some((best.batch, falls.map(|pair| pair[0].batch)))
    }
}

/// Measures steps of `params`' model, workload and workers' settings on the first decode worker alone, and fits their
/// costs.
///
/// Batches of 1, 2, 3, 4, 6, 8, 12, .. up to the slots, kept full; half of each from requests in the workload's order and
/// half from requests of one domain after another, so that equal batches pick other numbers of experts.
pub fn fit_cost(params: &BenchParams, progress: &mut dyn FnMut(Progress)) -> Result<CostFit, BenchError> {
    let mut params = params.clone();
    params.policies = vec![PolicyKind::RoundRobin];
    params.config.policy = PolicyKind::RoundRobin;
    (params.config.prefill, params.config.decode) = (params.config.prefill.first(), params.config.decode.first());
    // Steps are computed one at a time in this thread.
    params.clock = Clock::Virtual;
    let mut bench = Bench::open(&params)?;
    bench.measure_memory();
    let n_slots = bench.config.n_slots;
    let all = std::mem::take(&mut bench.requests);
    let mut by_domain = all.clone();
    by_domain.sort_by(|a, b| a.request.domain.cmp(&b.request.domain));
    let mut samples = Vec::new();
    let mut handoffs = (0.0, 0.0);
    for batch in sizes(n_slots) {
        for order in [&all, &by_domain] {
            // From one end and the other, so that like requests are not always the same ones.
            let n = (batch as usize * ROUNDS).min(order.len());
            let first = if batch % 2 == 0 { 0 } else { order.len() - n };
            let requests = &order[first..first + n];
            let hear = |counting| Progress {
                policy: PolicyKind::RoundRobin,
                counting,
                n_done: batch as usize,
                n_requests: n_slots as usize,
            };
            progress(hear(false));
            let mut timed = bench.decode_full(batch, requests, false)?;
            handoffs.0 += timed.handoffs_ms();
            handoffs.1 += requests.iter().map(|request| request.request.prompt.len() as f64).sum::<f64>();
            progress(hear(true));
            timed.take_batches(bench.decode_full(batch, requests, true)?);
            samples.extend(timed.step_samples());
        }
    }
    let chunks = bench.memo.timings(bench.model.chunk(&bench.config));
    fitted(&bench, &samples, &chunks, handoffs.0 / f64::max(handoffs.1, 1.0))
}

impl Bench<'_> {
    /// Decodes `requests` on one worker, `batch` at a time, until so many steps are done or fewer are left. With `tap`, the
    /// experts are counted; the steps are the same.
    fn decode_full(&self, batch: u32, requests: &[BenchRequest], tap: bool) -> Result<Timeline, BenchError> {
        let probe = Probe::new(Instant::now(), self.stopwatch());
        let mut parts = self.parts(tap, &probe)?;
        let eog = parts.tokenizer.end_tokens().to_vec();
        let mut prefill = self.memo.wrap(&probe, parts.prefill.swap_remove(0).runner);
        let mut first = PrefillWorker::new(prefill.info(), parts.chunk, N_PREFILL_PARALLEL, &eog, parts.n_expert);
        for (index, request) in requests.iter().enumerate() {
            first.admit(Job::new(RequestId(index as u64), Arc::clone(&request.request)));
        }
        let (mut events, mut waiting) = (Vec::new(), VecDeque::new());
        while !first.is_idle() {
            first.step(prefill.as_mut(), &mut events);
            waiting.extend(handed_on(&mut events)?);
        }
        let mut runner = parts.decode.swap_remove(0).runner;
        let mut worker = DecodeWorker::new(runner.info(), parts.chunk, &eog);
        for _ in 0..STEPS {
            while worker.n_held() < batch as usize
                && let Some(handoff) = waiting.pop_front()
            {
                worker.admit(handoff);
            }
            if worker.n_held() < (batch as usize).min(requests.len()) {
                break;
            }
            worker.step(runner.as_mut(), &mut events);
            handed_on(&mut events)?;
        }
        let mut timeline = Timeline::default();
        timeline.saw(probe.take(), None);
        Ok(timeline)
    }
}

/// What a worker handed on; anything it lost is an error.
fn handed_on(events: &mut Vec<WorkerEvent>) -> Result<Vec<Handoff>, BenchError> {
    let mut handoffs = Vec::new();
    for event in events.drain(..) {
        match event {
            WorkerEvent::Prefilled(handoff) => handoffs.push(handoff),
            WorkerEvent::Lost { error } | WorkerEvent::Returned { error, .. } => {
                return Err(EngineError::Run(error).into());
            }
            WorkerEvent::Token { .. }
            | WorkerEvent::Finished { .. }
            | WorkerEvent::Left(_)
            | WorkerEvent::Moved(_)
            | WorkerEvent::Stayed { .. }
            | WorkerEvent::Cache(_) => {}
        }
    }
    Ok(handoffs)
}

fn fitted(
    bench: &Bench<'_>,
    samples: &[StepSample],
    chunks: &[(u32, u32, f64)],
    handoff: f64,
) -> Result<CostFit, BenchError> {
    let decode = least_squares(&rows(samples)).ok_or(BenchError::NoSteps)?;
    let prefill = least_squares(&chunk_rows(chunks)).ok_or(BenchError::NoSteps)?;
    let bytes = bench.step_bytes();
    let n_layer = bench.model.moe_shape().map_or(1, MoeShape::n_layer_moe) as f64;
    let mut sizes: Vec<u32> = samples.iter().map(|step| step.n_batch).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let of_size = |&batch: &u32| {
        let own: Vec<StepSample> = samples.iter().filter(|step| step.n_batch == batch).copied().collect();
        let n = own.len() as f64;
        let step_ms = own.iter().map(|step| step.ms).sum::<f64>() / n;
        let bias = own.iter().map(|step| decode.of(&row(step)) / step.ms).sum::<f64>() / n - 1.0;
        let gb_per_s = bytes.and_then(|bytes| Limit::of("", &own, &bytes, None)).map(|limit| limit.gb_per_s);
        BatchFit {
            batch,
            n_steps: own.len(),
            step_ms,
            bias,
            experts: own.iter().map(|step| f64::from(step.n_experts)).sum::<f64>() / n / n_layer,
            tokens_per_s: f64::from(batch) * 1e3 / step_ms,
            gb_per_s,
        }
    };
    let batches: Vec<BatchFit> = sizes.iter().map(of_size).filter(|size| size.n_steps >= SHOWN).collect();
    Ok(CostFit {
        cost: device_cost(bench, &decode, &prefill, handoff),
        decode_error: (decode.mean_error, decode.p95_error),
        n_steps: decode.n,
        prefill_error: (prefill.mean_error, prefill.p95_error),
        batches,
        bytes,
        environment: bench.environment.clone(),
    })
}

impl Bench<'_> {
    /// The costs of the steps that this bench ran, adding up to the time they took, whatever lengthened some of them; nothing
    /// where steps were not timed alone or their experts not counted, or all held as many sequences, which tells nothing of
    /// others.
    pub(super) fn own_cost(&self) -> Option<DeviceCost> {
        let mut batches = self.samples.iter().map(|step| step.n_batch);
        let first = batches.next()?;
        if batches.all(|n_batch| n_batch == first) {
            return None;
        }
        let (steps, chunks) = (rows(&self.samples), self.memo.timings(self.model.chunk(&self.config)));
        let chunks = chunk_rows(&chunks);
        let decode = least_squares(&steps)?.adding_up(&steps);
        let prefill = least_squares(&chunks)?.adding_up(&chunks);
        let n_tokens: usize = self.requests.iter().map(|request| request.request.prompt.len()).sum();
        let handoff = self.handoffs_ms / (n_tokens * self.params.policies.len()).max(1) as f64;
        Some(device_cost(self, &decode, &prefill, handoff))
    }
}

fn row(step: &StepSample) -> [f64; 4] {
    [1.0, f64::from(step.n_experts), f64::from(step.n_batch), step.n_kv as f64]
}

fn rows(steps: &[StepSample]) -> Vec<([f64; 4], f64)> {
    steps.iter().map(|step| (row(step), step.ms)).collect()
}

fn chunk_rows(chunks: &[(u32, u32, f64)]) -> Vec<([f64; 3], f64)> {
    let row = |&(pos, n, ms)| ([1.0, f64::from(n), PrefillCost::context(n as usize, pos)], ms);
    chunks.iter().map(row).collect()
}

/// `handoff` is in milliseconds a token.
fn device_cost(bench: &Bench<'_>, decode: &LeastSquares<4>, prefill: &LeastSquares<3>, handoff: f64) -> DeviceCost {
    let [fixed, per_expert, per_token, per_kv_token] = decode.coefficients;
    let [prefill_fixed, prefill_token, prefill_kv_token] = prefill.coefficients;
    DeviceCost {
        source: format!(
            "measured with {} threads on {} decode steps, mean error {:.1}% of a step, 95% within {:.1}%",
            bench.config.n_threads.max(1),
            decode.n.0,
            decode.mean_error * 100.0,
            decode.p95_error * 100.0
        ),
        decode: DecodeCost { fixed, per_expert, per_token, per_kv_token },
        prefill: PrefillCost { fixed: prefill_fixed, per_token: prefill_token, per_kv_token: prefill_kv_token },
        handoff: HandoffCost { fixed: 0.0, per_token: handoff },
    }
}

/// 1, 2, 3, 4, 6, 8, 12, 16, .. up to `n_slots`, which is one of them, and 9 after 8, where some devices change kernels.
fn sizes(n_slots: u32) -> Vec<u32> {
    let mut sizes = vec![1, 9, n_slots];
    let mut size = 2;
    while size <= n_slots {
        sizes.extend([size, size + size / 2]);
        size *= 2;
    }
    sizes.retain(|&size| size <= n_slots);
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_double_with_steps_between() {
        assert_eq!(sizes(16), [1, 2, 3, 4, 6, 8, 9, 12, 16]);
        assert_eq!((sizes(1), sizes(5)), (vec![1], vec![1, 2, 3, 4, 5]));
    }
}
