//! The replay once more, as plainly as can be: lists instead of queues and heaps, sets of experts instead of bits, and
//! neither the dispatcher nor the decode worker.
//!
//! Never used outside tests.

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use proptest::prelude::*;

use crate::{
    calibrate::{Calibration, CalibrationInput, CalibrationParams, fit},
    metrics::Summary,
    rng::Rng,
    route::{PolicyKind, PolicyParams, RoutePolicy, RouteRequest, WorkerView},
    schedule::DispatchLimits,
    sim::{Arrivals, Order, ReplayParams, ReplayReport, ReplaySet, StepCost, order::Draws, planted::Planted, replay},
    trace::Trace,
    types::{RequestId, WorkerId},
};

#[derive(Clone, Copy, PartialEq)]
enum What {
    Arrival,
    Prefilled(usize),
    StepDone(usize),
}

/// One served request: its trace position, when it got its first token, the decode steps it has had.
struct Served {
    index: usize,
    first_token: f64,
    wait: f64,
    n_done: usize,
    admission: Option<usize>,
    tpot: Option<f64>,
}

struct StepSeen {
    /// Requests admitted before the step ended.
    n_admitted: usize,
    worker: usize,
    n_batch: usize,
    n_distinct: usize,
    time: f64,
}

struct Plain<'a> {
    trace: &'a Trace,
    params: &'a ReplayParams,
    draws: Draws<'a>,
    gaps: Option<Rng>,
    in_bursts: f64,
    policy: Box<dyn RoutePolicy>,
    calibration: Option<Arc<Calibration>>,
    now: f64,
    events: Vec<(f64, What)>,
    n_due: usize,
    served: Vec<Served>,
    queued: VecDeque<usize>,
    n_prefilling: usize,
    waiting: VecDeque<usize>,
    /// Requests each worker holds or is to get, as the router knows it.
    booked: Vec<u32>,
    /// What each worker holds, by slot, and what waits for its next step.
    slots: Vec<Vec<Option<usize>>>,
    incoming: Vec<VecDeque<usize>>,
    /// The batch of the step that is running, whether the step took none in, and its time.
    running: Vec<Option<(Vec<usize>, bool, f64)>>,
    n_admitted: usize,
    steps: Vec<StepSeen>,
}

impl Plain<'_> {
    fn run(mut self) -> ReplayReport {
        match self.params.arrivals {
            Arrivals::Closed { concurrency, ramp } => {
                self.n_due = concurrency.min(self.params.n_requests);
                for nth in 0..self.n_due {
                    self.events.push((ramp * nth as f64 / concurrency as f64, What::Arrival));
                }
            }
            Arrivals::Poisson { .. } | Arrivals::Bursts { .. } => self.arrival(),
        }
        while !self.events.is_empty() {
            let first = (0..self.events.len()).min_by(|&a, &b| self.events[a].0.total_cmp(&self.events[b].0));
            let (at, what) = self.events.remove(first.expect("an event"));
            self.now = at;
            match what {
                What::Arrival => {
                    self.submit();
                    self.arrival();
                    self.advance();
                }
                What::Prefilled(id) => {
                    self.n_prefilling -= 1;
                    self.served[id].first_token = at;
                    if self.n_steps(id) == 0 {
                        self.advance();
                        self.ended(id);
                    } else {
                        self.waiting.push_back(id);
                        self.advance();
                    }
                }
                What::StepDone(worker) => self.step_done(worker),
            }
            self.start_steps();
        }
        self.report()
    }

    fn n_steps(&self, id: usize) -> usize {
        self.trace.requests[self.served[id].index].n_steps(&self.trace.header)
    }

    fn arrival(&mut self) {
        let Some(rng) = self.gaps.as_mut().filter(|_| self.n_due < self.params.n_requests) else { return };
        self.n_due += 1;
        let at = match self.params.arrivals {
            Arrivals::Closed { .. } => unreachable!("no gaps"),
            Arrivals::Poisson { rate, .. } => self.now + rng.exponential(rate),
            Arrivals::Bursts { rate, on, off, .. } => {
                self.in_bursts += rng.exponential(rate * (on + off) / on);
                self.in_bursts + (self.in_bursts / on).floor() * off
            }
        };
        self.events.push((at, What::Arrival));
    }

    fn submit(&mut self) {
        self.queued.push_back(self.served.len());
        let index = self.draws.take();
        self.served.push(Served { index, first_token: 0.0, wait: 0.0, n_done: 0, admission: None, tpot: None });
    }

    fn advance(&mut self) {
        while let Some(&id) = self.waiting.front() {
            let views: Vec<WorkerView> = (0..self.slots.len())
                .map(|worker| WorkerView {
                    id: WorkerId(worker as u32),
                    n_slots: self.params.n_slots[worker],
                    n_inflight: self.booked[worker],
                    healthy: true,
                })
                .collect();
            let recorded = &self.trace.requests[self.served[id].index];
            let counts = recorded.prefill_counts(&self.trace.header);
            let signature = self.calibration.as_ref().and_then(|calibration| calibration.signature(&counts));
            let request = RouteRequest {
                id: RequestId(id as u64),
                signature: signature.as_ref(),
                domain: recorded.domain.as_deref(),
                counts: Some(&counts),
                n_tokens: recorded.n_prompt + 1,
            };
            let Ok(decision) = self.policy.select(&request, &views) else { break };
            self.policy.placed(&request, decision.worker);
            self.waiting.pop_front();
            self.served[id].admission = Some(self.n_admitted);
            self.served[id].wait = self.now - self.served[id].first_token;
            self.n_admitted += 1;
            self.booked[decision.worker.index()] += 1;
            self.incoming[decision.worker.index()].push_back(id);
        }
        let free: u32 = self.params.n_slots.iter().zip(&self.booked).map(|(slots, booked)| slots - booked).sum();
        while self.waiting.len() + self.n_prefilling < free as usize + DispatchLimits::default().max_handoffs
            && let Some(id) = self.queued.pop_front()
        {
            self.n_prefilling += 1;
            self.events.push((self.now + self.params.prefill, What::Prefilled(id)));
        }
    }

    fn step_done(&mut self, worker: usize) {
        let (batch, is_pure, time) = self.running[worker].take().expect("a step");
        if is_pure {
            // The dispatcher's clock ticks in nanoseconds.
            let time = Duration::from_secs_f64(time).as_secs_f64();
            self.policy.stepped(WorkerId(worker as u32), batch.len() as u32, time);
        }
        let n_distinct = self.distinct(&batch);
        assert_eq!(self.params.cost.step(n_distinct as u32, batch.len() as u32).to_bits(), time.to_bits());
        self.steps.push(StepSeen { n_admitted: self.n_admitted, worker, n_batch: batch.len(), n_distinct, time });
        for &id in &batch {
            self.served[id].n_done += 1;
        }
        let done: Vec<usize> = batch.into_iter().filter(|&id| self.served[id].n_done == self.n_steps(id)).collect();
        for &id in &done {
            self.slots[worker].iter_mut().filter(|held| **held == Some(id)).for_each(|held| *held = None);
            self.booked[worker] -= 1;
            self.policy.left(RequestId(id as u64), WorkerId(worker as u32));
            self.advance();
        }
        for &id in &done {
            self.ended(id);
        }
    }

    fn distinct(&self, batch: &[usize]) -> usize {
        let header = &self.trace.header;
        let mut experts = HashSet::new();
        for served in batch.iter().map(|&id| &self.served[id]) {
            for layer in 0..header.shape.n_layer_moe() {
                let picks = self.trace.requests[served.index].step_picks(header, served.n_done, layer);
                experts.extend(picks.iter().map(|&expert| (layer, expert)));
            }
        }
        experts.len()
    }

    fn start_steps(&mut self) {
        for worker in 0..self.slots.len() {
            if self.running[worker].is_some() {
                continue;
            }
            let is_pure = self.incoming[worker].is_empty();
            while let Some(free) = self.slots[worker].iter().position(Option::is_none)
                && let Some(id) = self.incoming[worker].pop_front()
            {
                self.slots[worker][free] = Some(id);
            }
            let batch: Vec<usize> = self.slots[worker].iter().flatten().copied().collect();
            if !batch.is_empty() {
                let time = self.params.cost.step(self.distinct(&batch) as u32, batch.len() as u32);
                self.events.push((self.now + time, What::StepDone(worker)));
                self.running[worker] = Some((batch, is_pure, time));
            }
        }
    }

    fn ended(&mut self, id: usize) {
        let n_steps = self.n_steps(id);
        let served = &mut self.served[id];
        served.tpot = (n_steps > 0).then(|| (self.now - served.first_token) / n_steps as f64);
        let index = served.index;
        self.draws.give_back(index);
        if self.gaps.is_none() && self.n_due < self.params.n_requests {
            self.n_due += 1;
            self.submit();
            self.advance();
        }
    }
    fn report(self) -> ReplayReport {
        let n_warmup = (self.params.n_requests as f64 * self.params.warmup) as usize;
        let n_layer = self.trace.header.shape.n_layer_moe() as f64;
        let inside = |step: &&StepSeen| step.n_admitted > n_warmup && step.n_admitted < self.n_admitted;
        let steps: Vec<&StepSeen> = self.steps.iter().filter(inside).collect();
        let over = |x: f64, n: f64| if n > 0.0 { x / n } else { 0.0 };
        let n = steps.len() as f64;
        let n_batch = steps.iter().map(|step| step.n_batch).sum::<usize>() as f64;
        let distinct = steps.iter().map(|step| step.n_distinct).sum::<usize>() as f64 / n_layer;
        let measured = |served: &&Served| served.admission.is_some_and(|at| at >= n_warmup);
        let mut tpot: Vec<f64> = self.served.iter().filter(measured).filter_map(|served| served.tpot).collect();
        let mut waits: Vec<f64> = self.served.iter().filter(measured).map(|served| served.wait).collect();
        let of_worker = |w: usize| steps.iter().filter(|step| step.worker == w).count() as u64;
        ReplayReport {
            policy: self.policy.name().to_owned(),
            n_requests: self.served.len() as u64,
            n_tokens: self.steps.iter().map(|step| step.n_batch as u64).sum(),
            n_measured: tpot.len() as u64,
            n_repeats: self.draws.n_repeats(),
            time: self.now,
            tpot: Summary::of(&mut tpot),
            wait: Summary::of(&mut waits),
            experts_per_step: over(distinct, n),
            experts_per_token: over(distinct, n_batch),
            batch: over(n_batch, n),
            step: over(steps.iter().map(|step| step.time).sum(), n),
            steps: (0..self.slots.len()).map(of_worker).collect(),
        }
    }
}

fn plain(
    trace: &Trace,
    requests: &[usize],
    params: &ReplayParams,
    policy: Box<dyn RoutePolicy>,
    calibration: Option<Arc<Calibration>>,
) -> ReplayReport {
    let n_workers = params.n_slots.len();
    let gaps = match params.arrivals {
        Arrivals::Closed { .. } => None,
        Arrivals::Poisson { seed, .. } | Arrivals::Bursts { seed, .. } => Some(Rng::new(seed)),
    };
    let run = Plain {
        trace,
        params,
        draws: Draws::new(requests, params.order, trace.requests.len()),
        gaps,
        in_bursts: 0.0,
        policy,
        calibration,
        now: 0.0,
        events: Vec::new(),
        n_due: 0,
        served: Vec::new(),
        queued: VecDeque::new(),
        n_prefilling: 0,
        waiting: VecDeque::new(),
        booked: vec![0; n_workers],
        slots: params.n_slots.iter().map(|&n| vec![None; n as usize]).collect(),
        incoming: vec![VecDeque::new(); n_workers],
        running: vec![None; n_workers],
        n_admitted: 0,
        steps: Vec::new(),
    };
    run.run()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn a_replay_equals_the_plain_one(
        seed: u64,
        n_slots in prop::collection::vec(1u32..6, 1..4),
        shuffled: bool,
        concurrency in 1usize..24,
        poisson in prop::option::of(0.05f64..3.0),
        kind in prop::sample::select(PolicyKind::ALL.to_vec()),
        tau in prop::sample::select(vec![0.0f32, 0.1, 2.0]),
        (n_expert, k) in prop::sample::select(vec![(8usize, 2usize), (64, 4), (130, 3)]),
        (ramp, prefill, warmup) in (0.0f64..30.0, 0.0f64..6.0, 0.0f64..0.9),
        whole_times: bool,
        bursty: bool,
    ) {
        let planted = Planted { n_requests: 30, n_layer: 3, n_expert, k, n_steps: (0, 9), seed, ..Planted::default() };
        let trace = planted.trace();
        let requests: Vec<usize> = (0..20).collect();
        // With whole times, many things happen at once.
        let cost = if whole_times { StepCost::UNIT } else { StepCost { fixed: 0.3, per_expert: 0.07, per_token: 0.11 } };
        let whole = |x: f64| if whole_times { x.floor() } else { x };
        let arrivals = match poisson {
            Some(rate) if bursty => Arrivals::Bursts { rate, on: 7.0, off: 20.0, seed },
            Some(rate) => Arrivals::Poisson { rate, seed },
            None => Arrivals::Closed { concurrency, ramp: whole(ramp) },
        };
        let order = if shuffled { Order::Shuffled { seed } } else { Order::Given };
        let limits = DispatchLimits::default();
        let prefill = whole(prefill);
        let params =
            ReplayParams { arrivals, order, n_requests: 75, warmup, prefill, cost, handoff: 0.0, n_slots, limits };
        let n_workers = params.n_slots.len();
        let calibration = (kind.needs_calibration() || kind.uses_centroids() && shuffled).then(|| {
            let with_steps = (0..30).filter(|&at| trace.requests[at].n_steps(&trace.header) > 0);
            let input = CalibrationInput::of_trace(&trace, with_steps);
            Arc::new(fit(&input, &CalibrationParams::new(n_workers)).expect("requests that differ").0)
        });
        let policy = || {
            kind.build(&PolicyParams {
                seed,
                tau,
                centroids: calibration.as_ref().map(|c| Arc::new(c.centroids.clone())),
                shape: Some(trace.header.shape.clone()),
                domains: (0..4).map(|d| format!("domain-{d}")).collect(),
                ..PolicyParams::new(n_workers)
            })
            .expect("valid")
        };
        let got = replay(&ReplaySet::new(&trace), &requests, &params, policy(), calibration.clone()).expect("valid");
        prop_assert_eq!(&got, &plain(&trace, &requests, &params, policy(), calibration.clone()));
        prop_assert_eq!(got.n_requests, 75);
    }
}
