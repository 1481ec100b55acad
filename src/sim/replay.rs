use std::{
    cmp::{Ordering, Reverse},
    collections::{BinaryHeap, HashMap},
    sync::Arc,
    time::Duration,
};

use crate::{
    calibrate::Calibration,
    refit::Refitter,
    rng::Rng,
    route::RoutePolicy,
    schedule::{
        Command, DecodeWorker, DispatchLimits, Dispatcher, Handoff, Job, ModelRunner, Outcome, Source, StepPicks,
        WorkerEvent,
    },
    sim::{
        Arrivals, ReplayParams, ReplayReport, ReplaySet, SimError, meter::Meter, order::Draws, runner::ReplayRunner,
    },
    types::{FinishReason, RequestId, WorkerId},
};

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
    start(set, requests, params, policy, calibration).map(Run::run)
}

/// As [`replay`], while `refitter` moves the policy's centroids. `unit` is how long the cost's unit of time is to it; a
/// check of the centroids takes no time.
pub fn replay_refitting(
    set: &ReplaySet,
    requests: &[usize],
    params: &ReplayParams,
    policy: Box<dyn RoutePolicy>,
    calibration: Arc<Calibration>,
    refitter: Refitter,
    unit: Duration,
) -> Result<ReplayReport, SimError> {
    let mut run = start(set, requests, params, policy, Some(calibration))?;
    run.dispatcher.keep_signatures();
    run.refit = Some((refitter, unit));
    Ok(run.run())
}

fn start<'a>(
    set: &'a ReplaySet,
    requests: &'a [usize],
    params: &'a ReplayParams,
    policy: Box<dyn RoutePolicy>,
    calibration: Option<Arc<Calibration>>,
) -> Result<Run<'a>, SimError> {
    params.check()?;
    if requests.is_empty() {
        return Err(SimError::NoRequests);
    }
    if let Some(&index) = requests.iter().find(|&&index| index >= set.n_requests()) {
        return Err(SimError::NoSuchRequest { index, n_requests: set.n_requests() });
    }
    let draws = Draws::new(requests, params.order, set.n_requests());
    Ok(Run::new(set, params, draws, policy, calibration))
}

struct Run<'a> {
    set: &'a ReplaySet,
    params: &'a ReplayParams,
    draws: Draws<'a>,
    /// Where requests come regardless of the load.
    gaps: Option<Gaps>,
    now: f64,
    dispatcher: Dispatcher,
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
    refit: Option<(Refitter, Duration)>,
}

/// When requests come: at random while bursts last.
struct Gaps {
    rate: f64,
    on: f64,
    off: f64,
    rng: Rng,
    /// Time spent in bursts.
    busy: f64,
}

impl Gaps {
    fn new(rate: f64, on: f64, off: f64, seed: u64) -> Self {
        Self { rate, on, off, rng: Rng::new(seed), busy: 0.0 }
    }

    fn next(&mut self, now: f64) -> f64 {
        let gap = self.rng.exponential(self.rate);
        if self.on.is_infinite() {
            return now + gap;
        }
        self.busy += gap;
        self.busy + (self.busy / self.on).floor() * self.off
    }
}

struct Worker<'a> {
    scheduler: DecodeWorker,
    runner: ReplayRunner<'a>,
    /// The step that is running, and what it will report.
    step: Option<Step>,
    /// What its sequences picked, where it is tapped.
    picked: Option<(Vec<RequestId>, StepPicks)>,
    events: Vec<WorkerEvent>,
}

#[derive(Clone, Copy)]
struct Step {
    n_distinct: u32,
    n_batch: u32,
    time: f64,
    /// It took no sequence in.
    is_pure: bool,
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
        let limits = DispatchLimits { max_queue: usize::MAX, max_prefill: usize::MAX, ..params.limits };
        let tap_every = policy.feedback();
        let worker = |&n_slots: &u32| {
            let runner = ReplayRunner::new(set, n_slots, tap_every);
            let scheduler = DecodeWorker::new(runner.info(), 1, &[]);
            Worker { scheduler, runner, step: None, picked: None, events: Vec::new() }
        };
        let gaps = match params.arrivals {
            Arrivals::Closed { .. } => None,
            Arrivals::Poisson { rate, seed } => Some(Gaps::new(rate, f64::INFINITY, 0.0, seed)),
            Arrivals::Bursts { rate, on, off, seed } => Some(Gaps::new(rate * (on + off) / on, on, off, seed)),
        };
        let n_warmup = (params.n_requests as f64 * params.warmup) as usize;
        Self {
            set,
            params,
            draws,
            gaps,
            now: 0.0,
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
            refit: None,
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
            self.refit();
            self.start_steps();
        }
        assert_eq!(self.dispatcher.n_active(), 0, "requests that never end");
        self.meter.report(self.dispatcher.policy_name(), self.set, self.draws.n_repeats(), self.now)
    }

    fn refit(&mut self) {
        let Some((refitter, unit)) = &mut self.refit else { return };
        let now = unit.mul_f64(self.now);
        for signature in self.dispatcher.take_signatures() {
            refitter.observe(signature, now);
        }
        let Some(job) = refitter.due(now) else { return };
        if let Some(centroids) = refitter.apply(job.run())
            && let Err(error) = self.dispatcher.set_centroids(&centroids)
        {
            refitter.switch_off(error.to_string());
        }
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
            Arrivals::Poisson { .. } | Arrivals::Bursts { .. } => self.next_arrival(),
        }
    }

    fn next_arrival(&mut self) {
        if let Some(gaps) = &mut self.gaps
            && self.n_planned < self.params.n_requests
        {
            self.n_planned += 1;
            let at = gaps.next(self.now);
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
            let counts = Some(recorded.counts.clone());
            WorkerEvent::Prefilled(Handoff { job, state: recorded.state.clone(), counts })
        };
        self.dispatcher.on_event(Source::Prefill(PREFILL), event, &mut self.commands);
    }

    fn step_done(&mut self, index: usize) {
        let worker = &mut self.workers[index];
        let step = worker.step.take().expect("a step that runs");
        self.meter.stepped(index, step.n_distinct, step.n_batch, step.time);
        if step.is_pure {
            self.dispatcher.stepped(WorkerId(index as u32), step.n_batch, Duration::from_secs_f64(step.time));
        }
        if let Some((requests, picks)) = worker.picked.take() {
            self.dispatcher.picked(WorkerId(index as u32), &requests, &picks);
        }
        for event in worker.events.drain(..) {
            // Tokens only count there, for requests that are cancelled; here none is.
            if !matches!(event, WorkerEvent::Token { .. }) {
                self.dispatcher.on_event(Source::Decode(WorkerId(index as u32)), event, &mut self.commands);
            }
        }
        // A replay takes sequences in at no cost.
        self.dispatcher.rebalance(Duration::ZERO, &mut self.commands);
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
                        if handoff.job.n_moves == 0 {
                            live.measured = self.meter.admitted(self.now - live.first_token);
                        }
                        self.workers[worker.index()].scheduler.admit(handoff);
                        self.woken.push(worker.index());
                    }
                    Command::Migrate(worker, id) => {
                        self.workers[worker.index()].scheduler.migrate(id);
                        self.woken.push(worker.index());
                    }
                    Command::End(id, outcome) => self.end(id, &outcome),
                    Command::Keep(..) => unreachable!("nothing is kept in a replay"),
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
            let step = worker.scheduler.step(&mut worker.runner, &mut worker.events);
            let (n_batch, is_pure) = (step.requests.len() as u32, step.n_decoded_alone().is_some());
            worker.picked = (!step.picks.is_empty()).then(|| (step.requests.clone(), step.picks.clone()));
            let n_distinct = worker.runner.n_distinct();
            let time = self.params.cost.step(n_distinct, n_batch);
            worker.step = Some(Step { n_distinct, n_batch, time, is_pure });
            self.at(self.now + time, Happening::StepDone(index));
        }
        self.woken = woken;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::{
        calibrate::{CalibrationInput, CalibrationParams, fit},
        route::{Decision, LocalityBand, LocalityBandParams, PolicyLayer, RouteError, RouteRequest, WorkerView},
        sim::{Order, StepCost, planted::Planted},
    };

    /// A band that remembers, for each decision, the cosines of the eligible workers and their loads.
    struct Watched {
        band: LocalityBand,
        calibration: Arc<Calibration>,
        log: Arc<Mutex<Vec<Seen>>>,
    }

    struct Seen {
        eligible: Vec<(f32, u32)>,
        decision: Decision,
    }

    impl PolicyLayer for Watched {
        fn inner(&self) -> &dyn RoutePolicy {
            &self.band
        }

        fn inner_mut(&mut self) -> &mut dyn RoutePolicy {
            &mut self.band
        }

        fn select(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
            let decision = self.band.select(request, workers)?;
            let signature = request.signature.expect("every planted request has one");
            let open = workers.iter().filter(|worker| worker.eligible());
            let cosine = |worker: &WorkerView| signature.cosine(self.calibration.centroid(worker.id.index()));
            let eligible = open.map(|worker| (cosine(worker), worker.n_inflight)).collect();
            self.log.lock().expect("one thread").push(Seen { eligible, decision: decision.clone() });
            Ok(decision)
        }
    }

    fn decisions(tau: f32) -> Vec<Seen> {
        let trace = Planted::default().trace();
        let input = CalibrationInput::of_trace(&trace, 0..96);
        let calibration = Arc::new(fit(&input, &CalibrationParams::new(4)).expect("domains").0);
        let centroids = Arc::new(calibration.centroids.clone());
        let band = LocalityBand::new(centroids, 4, LocalityBandParams { tau, min_band: 1 }).expect("valid");
        let log = Arc::default();
        let policy = Box::new(Watched { band, calibration: Arc::clone(&calibration), log: Arc::clone(&log) });
        let params = ReplayParams {
            n_slots: vec![8; 4],
            arrivals: Arrivals::Closed { concurrency: 20, ramp: 50.0 },
            order: Order::Shuffled { seed: 5 },
            n_requests: 300,
            warmup: 0.2,
            prefill: 3.0,
            cost: StepCost { fixed: 0.3, per_expert: 0.01, per_token: 0.02 },
            limits: DispatchLimits::default(),
        };
        let held_out: Vec<usize> = (96..192).collect();
        let report = replay(&ReplaySet::new(&trace), &held_out, &params, policy, Some(calibration)).expect("valid");
        assert_eq!((report.n_requests, report.n_measured, report.n_repeats), (300, 240, 0));
        Arc::into_inner(log).expect("the replay is over").into_inner().expect("one thread")
    }

    #[test]
    fn tau_2_goes_by_load_as_least_loaded_does() {
        let seen = decisions(2.0);
        assert_eq!(seen.len(), 300);
        for Seen { eligible, decision } in &seen {
            assert_eq!(decision.band as usize, eligible.len());
            assert_eq!(Some(decision.n_inflight), eligible.iter().map(|&(_, load)| load).min());
        }
    }

    #[test]
    fn tau_0_goes_to_the_nearest_centroid() {
        let seen = decisions(0.0);
        assert_eq!(seen.len(), 300);
        for Seen { eligible, decision } in &seen {
            let nearest = eligible.iter().map(|&(cosine, _)| cosine).fold(f32::MIN, f32::max);
            assert!((decision.similarity.expect("a band") - nearest).abs() < 1e-6, "{decision:?}");
        }
        // It did cost balance: the nearest was not always the least loaded.
        let least = |seen: &&Seen| seen.eligible.iter().any(|&(_, load)| load < seen.decision.n_inflight);
        assert!(seen.iter().filter(least).count() > 50);
    }
}
