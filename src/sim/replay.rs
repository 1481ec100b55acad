use std::{
    cmp::{Ordering, Reverse},
    collections::{BinaryHeap, HashMap},
    sync::Arc,
    time::Duration,
};

use crate::{
    calibrate::Calibration,
    rng::Rng,
    route::RoutePolicy,
    schedule::{
        Command, DecodeWorker, DispatchLimits, Dispatcher, Handoff, Job, ModelRunner, Outcome, Source, WorkerEvent,
    },
    sim::{Order, ReplayReport, ReplaySet, SimError, StepCost, meter::Meter, order::Draws, runner::ReplayRunner},
    types::{FinishReason, RequestId, WorkerId},
};

/// How requests come.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arrivals {
    /// One comes whenever another has ended, so that as many are always in the system.
    Closed {
        /// Requests in the system.
        concurrency: usize,
        /// The first ones come spread evenly over this time; all at once, they would keep step with one another.
        ramp: f64,
    },
    /// At random and regardless of the load.
    Poisson {
        /// Requests a unit of time.
        rate: f64,
        /// Seed of the gaps.
        seed: u64,
    },
}

/// What is replayed: the workers, the load, the cost. Times are in the cost's unit.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplayParams {
    /// Slots of each decode worker.
    pub n_slots: Vec<u32>,
    /// How requests come.
    pub arrivals: Arrivals,
    /// In which order they are drawn.
    pub order: Order,
    /// Requests that come in all.
    pub n_requests: usize,
    /// Share of them, from 0 to 1, that come before the measurement begins.
    pub warmup: f64,
    /// From a request's turn in prefill to its first token, for every request.
    pub prefill: f64,
    /// What a decode step takes.
    pub cost: StepCost,
}

/// Serves the recorded `requests` (positions in `set`) under `policy` on a simulated clock.
///
/// Dispatcher and decode workers are the engine's own; picks are looked up, and a step takes what `params.cost` says.
/// `calibration` turns counts into signatures, as in the engine. Deterministic: ties in time go in order of events.
///
/// # Errors
/// No requests, positions outside `set`, no slots, and times that are negative or no numbers.
pub fn replay(
    set: &ReplaySet,
    requests: &[usize],
    params: &ReplayParams,
    policy: Box<dyn RoutePolicy>,
    calibration: Option<Arc<Calibration>>,
) -> Result<ReplayReport, SimError> {
    params.check()?;
    if requests.is_empty() {
        return Err(SimError::NoRequests);
    }
    if let Some(&index) = requests.iter().find(|&&index| index >= set.n_requests()) {
        return Err(SimError::NoSuchRequest { index, n_requests: set.n_requests() });
    }
    let draws = Draws::new(requests, params.order, set.n_requests());
    Ok(Run::new(set, params, draws, policy, calibration).run())
}

impl ReplayParams {
    fn check(&self) -> Result<(), SimError> {
        if self.n_slots.is_empty() || self.n_slots.contains(&0) {
            return Err(SimError::Slots(self.n_slots.clone()));
        }
        if !self.cost.is_usable() {
            return Err(SimError::Cost);
        }
        let not_negative = |name, value: f64| {
            let ok = value.is_finite() && value >= 0.0;
            if ok { Ok(()) } else { Err(SimError::Value { name, value, want: "a number of 0 or more" }) }
        };
        not_negative("the time of a prefill", self.prefill)?;
        match self.arrivals {
            Arrivals::Closed { concurrency: 0, .. } => {
                return Err(SimError::Value { name: "the concurrency", value: 0.0, want: "at least 1" });
            }
            Arrivals::Closed { ramp, .. } => not_negative("the ramp", ramp)?,
            Arrivals::Poisson { rate, .. } if !rate.is_finite() || rate <= 0.0 => {
                return Err(SimError::Value { name: "the rate", value: rate, want: "a number above 0" });
            }
            Arrivals::Poisson { .. } => {}
        }
        if !(0.0..1.0).contains(&self.warmup) {
            let want = "a share from 0 to below 1";
            return Err(SimError::Value { name: "the warm-up", value: self.warmup, want });
        }
        Ok(())
    }
}

struct Run<'a> {
    set: &'a ReplaySet,
    params: &'a ReplayParams,
    draws: Draws<'a>,
    /// Where requests come regardless of the load.
    gaps: Option<(f64, Rng)>,
    now: f64,
    dispatcher: Dispatcher,
    with_counts: bool,
    workers: Vec<Worker<'a>>,
    pending: BinaryHeap<Reverse<Event>>,
    n_events: u64,
    n_submitted: usize,
    /// Those that will come for certain included.
    n_planned: usize,
    live: HashMap<RequestId, Live>,
    meter: Meter,
    commands: Vec<Command>,
    /// Workers that may have a step to start.
    woken: Vec<usize>,
}

struct Worker<'a> {
    scheduler: DecodeWorker,
    runner: ReplayRunner<'a>,
    /// The step that is running, and what it will report.
    step: Option<Step>,
    events: Vec<WorkerEvent>,
}

#[derive(Clone, Copy)]
struct Step {
    n_distinct: u32,
    n_batch: u32,
    time: f64,
}

struct Live {
    index: usize,
    first_token: f64,
    measured: bool,
}

struct Event {
    at: f64,
    number: u64,
    what: Happening,
}

enum Happening {
    Arrival,
    Prefilled(Job),
    StepDone(usize),
}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at.total_cmp(&other.at).then(self.number.cmp(&other.number))
    }
}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Event {}

/// Prefill is not what is simulated: one worker that takes every prompt at once.
const PREFILL: WorkerId = WorkerId(0);

impl<'a> Run<'a> {
    fn new(
        set: &'a ReplaySet,
        params: &'a ReplayParams,
        draws: Draws<'a>,
        policy: Box<dyn RoutePolicy>,
        calibration: Option<Arc<Calibration>>,
    ) -> Self {
        let limits = DispatchLimits { max_queue: usize::MAX, max_prefill: usize::MAX, ..DispatchLimits::default() };
        let worker = |&n_slots: &u32| {
            let runner = ReplayRunner::new(set, n_slots);
            let scheduler = DecodeWorker::new(runner.info(), 1, &[]);
            Worker { scheduler, runner, step: None, events: Vec::new() }
        };
        let gaps = match params.arrivals {
            Arrivals::Closed { .. } => None,
            Arrivals::Poisson { rate, seed } => Some((rate, Rng::new(seed))),
        };
        let n_warmup = (params.n_requests as f64 * params.warmup) as usize;
        Self {
            set,
            params,
            draws,
            gaps,
            now: 0.0,
            with_counts: calibration.is_some(),
            dispatcher: Dispatcher::new(1, &params.n_slots, policy, calibration, limits),
            workers: params.n_slots.iter().map(worker).collect(),
            pending: BinaryHeap::new(),
            n_events: 0,
            n_submitted: 0,
            n_planned: 0,
            live: HashMap::new(),
            meter: Meter::new(params.n_slots.len(), n_warmup),
            commands: Vec::new(),
            woken: Vec::new(),
        }
    }

    fn run(mut self) -> ReplayReport {
        self.first_arrivals();
        while let Some(Reverse(event)) = self.pending.pop() {
            self.now = event.at;
            match event.what {
                Happening::Arrival => self.arrive(),
                Happening::Prefilled(job) => self.prefilled(job),
                Happening::StepDone(worker) => self.step_done(worker),
            }
            self.carry_out();
            self.start_steps();
        }
        assert_eq!(self.dispatcher.n_active(), 0, "requests that never end");
        self.meter.report(self.dispatcher.policy_name(), self.set, self.draws.n_repeats(), self.now)
    }

    fn at(&mut self, at: f64, what: Happening) {
        self.pending.push(Reverse(Event { at, number: self.n_events, what }));
        self.n_events += 1;
    }

    fn first_arrivals(&mut self) {
        match self.params.arrivals {
            Arrivals::Closed { concurrency, ramp } => {
                self.n_planned = concurrency.min(self.params.n_requests);
                for nth in 0..self.n_planned {
                    self.at(ramp * nth as f64 / concurrency as f64, Happening::Arrival);
                }
            }
            Arrivals::Poisson { .. } => self.next_arrival(),
        }
    }

    fn next_arrival(&mut self) {
        if let Some((rate, rng)) = &mut self.gaps
            && self.n_planned < self.params.n_requests
        {
            self.n_planned += 1;
            let at = self.now + rng.exponential(*rate);
            self.at(at, Happening::Arrival);
        }
    }

    fn arrive(&mut self) {
        self.submit();
        self.next_arrival();
    }

    fn submit(&mut self) {
        let id = RequestId(self.n_submitted as u64);
        let index = self.draws.take();
        self.n_submitted += 1;
        self.live.insert(id, Live { index, first_token: 0.0, measured: false });
        let request = Arc::clone(&self.set.get(index).request);
        let accepted = self.dispatcher.submit(id, request, Duration::ZERO, &mut self.commands);
        accepted.expect("the queue has no bound");
    }

    /// The prompt is done and has drawn the first token.
    fn prefilled(&mut self, mut job: Job) {
        let live = self.live.get_mut(&job.id).expect("a request of this run");
        live.first_token = self.now;
        let recorded = self.set.get(live.index);
        job.generated.push(0);
        let event = if recorded.n_steps == 0 {
            WorkerEvent::Finished { id: job.id, reason: FinishReason::Length, usage: job.usage() }
        } else {
            let counts = self.with_counts.then(|| recorded.counts.clone());
            WorkerEvent::Prefilled(Handoff { job, state: recorded.state.clone(), counts })
        };
        self.dispatcher.on_event(Source::Prefill(PREFILL), event, &mut self.commands);
    }

    fn step_done(&mut self, index: usize) {
        let worker = &mut self.workers[index];
        let step = worker.step.take().expect("a step that runs");
        self.meter.stepped(index, step.n_distinct, step.n_batch, step.time);
        for event in worker.events.drain(..) {
            // Tokens only count there, for requests that are cancelled; here none is.
            if !matches!(event, WorkerEvent::Token { .. }) {
                self.dispatcher.on_event(Source::Decode(WorkerId(index as u32)), event, &mut self.commands);
            }
        }
        self.woken.push(index);
    }

    /// Gives the work out, and lets a request in for each that ended.
    fn carry_out(&mut self) {
        while !self.commands.is_empty() {
            for command in std::mem::take(&mut self.commands) {
                match command {
                    Command::Prefill(_, job) => self.at(self.now + self.params.prefill, Happening::Prefilled(job)),
                    Command::Decode(worker, handoff, _) => {
                        let live = self.live.get_mut(&handoff.job.id).expect("a request of this run");
                        live.measured = self.meter.admitted();
                        self.workers[worker.index()].scheduler.admit(handoff);
                        self.woken.push(worker.index());
                    }
                    Command::End(id, outcome) => self.end(id, &outcome),
                    Command::Cancel(..) => unreachable!("nothing is cancelled in a replay"),
                }
            }
        }
    }

    fn end(&mut self, id: RequestId, outcome: &Outcome) {
        assert!(matches!(outcome, Outcome::Finished(FinishReason::Length, _)), "request {id} ended with {outcome:?}");
        let live = self.live.remove(&id).expect("a request of this run");
        let n_steps = self.set.n_steps(live.index);
        let tpot = (self.now - live.first_token) / f64::from(n_steps);
        self.meter.finished((live.measured && n_steps > 0).then_some(tpot));
        self.draws.give_back(live.index);
        if matches!(self.params.arrivals, Arrivals::Closed { .. }) && self.n_planned < self.params.n_requests {
            self.n_planned += 1;
            self.submit();
        }
    }

    /// Starts the next step of every worker that has one and is not in one.
    fn start_steps(&mut self) {
        self.woken.sort_unstable();
        self.woken.dedup();
        let mut woken = std::mem::take(&mut self.woken);
        for index in woken.drain(..) {
            let worker = &mut self.workers[index];
            if worker.step.is_some() || worker.scheduler.is_idle() {
                continue;
            }
            let n_batch = worker.scheduler.step(&mut worker.runner, &mut worker.events).requests.len() as u32;
            let n_distinct = worker.runner.n_distinct();
            let time = self.params.cost.step(n_distinct, n_batch);
            worker.step = Some(Step { n_distinct, n_batch, time });
            self.at(self.now + time, Happening::StepDone(index));
        }
        self.woken = woken;
    }
}
