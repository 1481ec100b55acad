use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, VecDeque},
    sync::Arc,
    time::Duration,
};

use crate::{
    bench::{BenchError, BenchRequest, PickStore, Probe, Stopwatch, Timeline},
    refit::{RefitStats, Refitter},
    schedule::{
        CacheStats, Command, DecodeWorker, Dispatcher, ModelRunner, Outcome, PrefillWorker, Source, StepPicks,
        WorkerEvent,
    },
    types::{FinishReason, RequestId, WorkerId},
};

/// One run on a virtual clock: every step is really computed and timed, alone on the machine, and takes that long on
/// the clock; arrivals and hand-offs happen between steps, so that many workers can be measured on few cores.
///
/// The schedulers and the dispatcher are the engine's own; only the threads are not there.
pub struct VirtualRun<'a> {
    now: Duration,
    dispatcher: Dispatcher,
    prefill: Vec<Worker<PrefillWorker>>,
    decode: Vec<Worker<DecodeWorker>>,
    probe: Probe,
    pending: BinaryHeap<Reverse<(Duration, u64)>>,
    happenings: BTreeMap<u64, Happening>,
    n_happenings: u64,
    timeline: Timeline,
    durations: Durations,
    /// How many hand-offs there were, and how long each of the two workers stood still for them in all.
    stalls: (u32, Duration),
    picks: Option<&'a mut PickStore>,
    refitter: Option<Refitter>,
}

/// What a virtual run gives.
#[derive(Debug)]
pub struct VirtualOutcome {
    /// What happened.
    pub timeline: Timeline,
    /// How long each step took, in the order they began; nothing if that was replayed.
    pub durations: Vec<TimedStep>,
    /// What refits came to, if there were to be any.
    pub refit: Option<RefitStats>,
    /// What the prefill workers kept and used again.
    pub cache: CacheStats,
}

/// A worker's scheduler and runner, and whether a step of it is running on the clock.
pub struct Worker<S> {
    scheduler: S,
    runner: Box<dyn ModelRunner>,
    busy: bool,
    /// Steps since the policy was told what one picked.
    n_untold: u32,
}

/// How long each step takes, in the order they start.
#[derive(Debug)]
pub enum Durations {
    /// As long as it took.
    Measure(Vec<TimedStep>),
    /// As long as it took in an earlier run of the same schedule.
    Replay(std::vec::IntoIter<TimedStep>),
}

/// What a step took, and what the dispatcher is told of it: in a run of the same schedule, the same.
#[derive(Debug, Clone, Copy, Default)]
pub struct TimedStep {
    took: Duration,
    /// The sequences of a step that did nothing but decode.
    n_alone: Option<u32>,
    /// The policy is told what they picked.
    tells: bool,
    /// How long a worker that gave a sequence away or took it in stood still for that on average until then.
    stall: Duration,
}

enum Happening {
    Arrival(usize),
    StepDone(Source, TimedStep, Option<(Vec<RequestId>, StepPicks)>, Vec<WorkerEvent>),
}

impl<S> Worker<S> {
    /// A worker with nothing to do.
    pub fn new(scheduler: S, runner: Box<dyn ModelRunner>) -> Self {
        Self { scheduler, runner, busy: false, n_untold: 0 }
    }
}

impl<'a> VirtualRun<'a> {
    /// A run over these workers. `probe` watches their runners; the picks of tapped decode steps go to `picks`.
    pub fn new(
        dispatcher: Dispatcher,
        prefill: Vec<Worker<PrefillWorker>>,
        decode: Vec<Worker<DecodeWorker>>,
        probe: Probe,
        durations: Durations,
        picks: Option<&'a mut PickStore>,
    ) -> Self {
        Self {
            now: Duration::ZERO,
            dispatcher,
            prefill,
            decode,
            probe,
            pending: BinaryHeap::new(),
            happenings: BTreeMap::new(),
            n_happenings: 0,
            timeline: Timeline::default(),
            durations,
            stalls: (0, Duration::ZERO),
            picks,
            refitter: None,
        }
    }

    /// Lets the policy's centroids follow the traffic. Fits take no time on the clock.
    #[must_use]
    pub fn refitting(mut self, refitter: Refitter) -> Self {
        self.dispatcher.keep_signatures();
        self.refitter = Some(refitter);
        self
    }

    /// Serves the requests at their arrival times, at most `concurrency` at once (one that comes in between arrives
    /// when another ends); `progress` hears the number of ended requests.
    pub fn run(
        mut self,
        requests: &[BenchRequest],
        concurrency: Option<usize>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<VirtualOutcome, BenchError> {
        for (index, request) in requests.iter().enumerate() {
            self.at(request.arrival, Happening::Arrival(index));
        }
        // Whatever the probe saw before belongs to the warm-up.
        self.probe.take();
        let mut n_ended = 0;
        let mut held = VecDeque::new();
        while let Some(Reverse((at, number))) = self.pending.pop() {
            self.now = at;
            let Some(happening) = self.happenings.remove(&number) else { continue };
            let mut commands = Vec::new();
            match happening {
                Happening::Arrival(index) => held.push_back(index),
                Happening::StepDone(source, step, picked, events) => {
                    self.worker_done(source);
                    if let (Source::Decode(worker), Some((requests, picks))) = (source, picked) {
                        self.dispatcher.picked(worker, &requests, &picks);
                    }
                    if let (Source::Decode(worker), Some(n_batch)) = (source, step.n_alone) {
                        self.dispatcher.stepped(worker, n_batch, step.took);
                    }
                    for event in events {
                        if let WorkerEvent::Token { id, token, .. } = event {
                            self.timeline.token(id, token, at);
                        }
                        self.dispatcher.on_event(source, event, &mut commands);
                    }
                    if let Source::Decode(_) = source {
                        self.dispatcher.rebalance(step.stall, &mut commands);
                    }
                }
            }
            self.saw(at);
            n_ended += self.carry_out(commands);
            while self.dispatcher.n_active() < concurrency.unwrap_or(usize::MAX)
                && let Some(index) = held.pop_front()
            {
                n_ended += self.submit(index, &requests[index]);
            }
            self.refit();
            progress(n_ended);
            self.start_steps()?;
        }
        if self.dispatcher.n_active() > 0 {
            return Err(BenchError::Stuck { n_active: self.dispatcher.n_active() });
        }
        let durations = match self.durations {
            Durations::Measure(durations) => durations,
            Durations::Replay(rest) if rest.len() > 0 => return Err(BenchError::OtherSchedule),
            Durations::Replay(_) => Vec::new(),
        };
        let refit = self.refitter.as_ref().map(Refitter::stats);
        let cache = self.dispatcher.cache_stats();
        Ok(VirtualOutcome { timeline: self.timeline, durations, refit, cache })
    }

    /// Takes in what the probe saw until `at`.
    fn saw(&mut self, at: Duration) {
        let seen = self.probe.take();
        for (_, both) in &seen.handoffs {
            self.stalls.0 += 1;
            // Giving a sequence away and taking it in.
            self.stalls.1 += *both / 2;
        }
        self.timeline.saw(seen, Some(at));
    }

    fn refit(&mut self) {
        let Some(refitter) = &mut self.refitter else { return };
        for signature in self.dispatcher.take_signatures() {
            refitter.observe(signature, self.now);
        }
        let Some(job) = refitter.due(self.now) else { return };
        let centroids = refitter.apply(job.run());
        if let Some(centroids) = centroids
            && let Err(error) = self.dispatcher.set_centroids(&centroids)
        {
            refitter.switch_off(error.to_string());
        }
    }

    /// Submits a request now; how many requests ended because of it.
    fn submit(&mut self, index: usize, request: &BenchRequest) -> usize {
        let id = RequestId(index as u64);
        self.timeline.arrived(id, &request.name, self.now);
        let mut commands = Vec::new();
        if self.dispatcher.submit(id, Arc::clone(&request.request), self.now, &mut commands).is_ok() {
            return self.carry_out(commands);
        }
        self.timeline.failed(id);
        1
    }

    fn at(&mut self, at: Duration, happening: Happening) {
        self.pending.push(Reverse((at, self.n_happenings)));
        self.happenings.insert(self.n_happenings, happening);
        self.n_happenings += 1;
    }

    fn worker_done(&mut self, source: Source) {
        match source {
            Source::Prefill(worker) => self.prefill[worker.index()].busy = false,
            Source::Decode(worker) => self.decode[worker.index()].busy = false,
        }
    }

    /// Gives the work out; how many requests ended.
    fn carry_out(&mut self, commands: Vec<Command>) -> usize {
        let mut n_ended = 0;
        for command in commands {
            match command {
                Command::Prefill(worker, job) => self.prefill[worker.index()].scheduler.admit(job),
                Command::Decode(worker, handoff, _) => {
                    self.timeline.admitted(handoff.job.id, self.now);
                    self.decode[worker.index()].scheduler.admit(handoff);
                }
                Command::Migrate(worker, id) => self.decode[worker.index()].scheduler.migrate(id),
                Command::Keep(worker, left) => self.prefill[worker.index()].scheduler.take_in(left),
                Command::Cancel(Source::Prefill(worker), id, reason) => {
                    self.prefill[worker.index()].scheduler.cancel(id, reason);
                }
                Command::Cancel(Source::Decode(worker), id, reason) => {
                    self.decode[worker.index()].scheduler.cancel(id, reason);
                }
                Command::End(id, outcome) => {
                    n_ended += 1;
                    if !matches!(outcome, Outcome::Finished(FinishReason::Stop | FinishReason::Length, _)) {
                        self.timeline.failed(id);
                    }
                }
            }
        }
        n_ended
    }

    /// Computes the next step of every worker that has one and is not in one.
    fn start_steps(&mut self) -> Result<(), BenchError> {
        for index in 0..self.prefill.len() {
            let worker = &mut self.prefill[index];
            if !worker.busy && !worker.scheduler.is_idle() {
                worker.busy = true;
                let mut events = Vec::new();
                let start = self.probe.stopwatch().start();
                worker.scheduler.step(worker.runner.as_mut(), &mut events);
                let step = TimedStep { took: start.elapsed(), ..TimedStep::default() };
                let (step, done) = self.timed(step)?;
                self.at(done, Happening::StepDone(Source::Prefill(WorkerId(index as u32)), step, None, events));
            }
        }
        let feedback = self.dispatcher.feedback();
        for index in 0..self.decode.len() {
            let worker = &mut self.decode[index];
            if !worker.busy && !worker.scheduler.is_idle() {
                worker.busy = true;
                let mut events = Vec::new();
                let start = self.probe.stopwatch().start();
                let step = worker.scheduler.step(worker.runner.as_mut(), &mut events);
                let took = start.elapsed();
                let mut members = Vec::with_capacity(step.requests.len());
                for (item, member) in step.requests.iter().copied().zip(step.at.iter().copied()).enumerate() {
                    members.push(member);
                    if let Some(store) = self.picks.as_deref_mut()
                        && !step.picks.is_empty()
                    {
                        store.insert(member, &step.picks, item);
                    }
                }
                worker.n_untold += 1;
                let tells = feedback > 0 && worker.n_untold >= feedback && !step.picks.is_empty();
                let told = (!step.picks.is_empty()).then(|| (step.requests.clone(), step.picks.clone()));
                let is_timed = self.probe.stopwatch() != Stopwatch::Charged;
                let n_alone = if is_timed { step.n_decoded_alone() } else { step.n_only_decoded() };
                let own = TimedStep { took, n_alone, tells, stall: Duration::ZERO };
                let (step, done) = self.timed(own)?;
                if step.tells {
                    self.decode[index].n_untold = 0;
                }
                let source = Source::Decode(WorkerId(index as u32));
                self.at(done, Happening::StepDone(source, step, told.filter(|_| step.tells), events));
                if !members.is_empty() {
                    self.timeline.stepped(done, WorkerId(index as u32), members);
                }
            }
        }
        Ok(())
    }

    /// A step as it counts on the clock, and when it ends there.
    fn timed(&mut self, own: TimedStep) -> Result<(TimedStep, Duration), BenchError> {
        let took = own.took + self.probe.take_replayed();
        let step = match &mut self.durations {
            Durations::Measure(steps) => {
                let (n, all) = self.stalls;
                steps.push(TimedStep { took, stall: all / n.max(1), ..own });
                steps[steps.len() - 1]
            }
            Durations::Replay(rest) => rest.next().ok_or(BenchError::OtherSchedule)?,
        };
        let done = self.now + step.took;
        // What the probe saw happened when the step ends on the clock.
        self.saw(done);
        Ok((step, done))
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Mutex, time::Instant};

    use super::*;
    use crate::{
        bench::{Stopwatch, tokens_sha256},
        route::{Decision, LeastLoaded, Marginal, Relief, RouteError, RoutePolicy, RouteRequest, WorkerView},
        schedule::{DecodeItem, DispatchLimits, FakeModel, FakeRunner, RunError, RunnerLayer},
        types::{Request, SamplingParams, Token},
    };

    const MODEL: FakeModel = FakeModel { n_vocab: 97, n_layer: 3, n_expert: 8, n_expert_used: 2 };
    const FEEDBACK: u32 = 3;

    /// Balances the load, then moves a request back and forth, and writes down what it is told.
    struct Spy {
        residents: BTreeMap<RequestId, WorkerId>,
        log: Arc<Mutex<Vec<String>>>,
    }

    impl Spy {
        fn hear(&self, what: String) {
            self.log.lock().expect("one thread").push(what);
        }
    }

    impl RoutePolicy for Spy {
        fn name(&self) -> &'static str {
            "spy"
        }

        fn select(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
            LeastLoaded.select(request, workers)
        }

        fn placed(&mut self, request: &RouteRequest<'_>, worker: WorkerId) {
            self.residents.insert(request.id, worker);
        }

        fn left(&mut self, id: RequestId, _: WorkerId) {
            self.residents.remove(&id);
        }

        fn stepped(&mut self, worker: WorkerId, n_batch: u32, time: f64) {
            self.hear(format!("worker {worker}: {n_batch} in {time}"));
        }

        fn feedback(&self) -> u32 {
            FEEDBACK
        }

        fn picked(&mut self, id: RequestId, worker: WorkerId, experts: &[u32]) {
            assert_eq!(experts.len(), 3 * 2);
            self.hear(format!("worker {worker}: {id} picks {experts:?}"));
        }

        fn relief(&mut self, workers: &[WorkerView], stall: f64) -> Option<Relief> {
            self.hear(format!("stall {}", if stall > 0.0 { "known" } else { "unknown" }));
            let (&id, &from) = self.residents.first_key_value()?;
            let to = workers.iter().find(|worker| worker.id != from && worker.eligible())?.id;
            let marginal = Marginal { experts: 0.0, added_experts: 0.0, step: 1.0, cost: 1.0, regret: 0.0 };
            Some(Relief { id, from, to, saved: 1.0, marginal })
        }
    }

    /// Tells the picks of one decode step in so many.
    struct Tapped {
        runner: FakeRunner,
        every: u32,
        n_steps: u32,
    }

    impl RunnerLayer for Tapped {
        fn inner(&self) -> &dyn ModelRunner {
            &self.runner
        }

        fn inner_mut(&mut self) -> &mut dyn ModelRunner {
            &mut self.runner
        }

        fn decode(
            &mut self,
            batch: &[DecodeItem],
            next: &mut Vec<Token>,
            picks: &mut StepPicks,
        ) -> Result<(), RunError> {
            self.runner.decode(batch, next, picks)?;
            self.n_steps += 1;
            if !self.n_steps.is_multiple_of(self.every) {
                picks.clear();
            }
            Ok(())
        }
    }

    fn requests() -> Vec<BenchRequest> {
        let request = |seed: u64| {
            let sampling = SamplingParams { ignore_eos: true, seed, ..SamplingParams::default() };
            let prompt = (1..5 + Token::try_from(seed).expect("small")).collect();
            let request = Request { prompt, max_tokens: 20, sampling, domain: None, deadline: None };
            BenchRequest { name: format!("request {seed}"), arrival: Duration::ZERO, request: Arc::new(request) }
        };
        (0..6).map(request).collect()
    }

    fn run(tap_every: u32, durations: Durations) -> (VirtualOutcome, Vec<String>) {
        let probe = Probe::new(Instant::now(), Stopwatch::Wall);
        let runner = |worker: u32| {
            let runner = Tapped { runner: FakeRunner::new(MODEL, 6, 256, Vec::new()), every: tap_every, n_steps: 0 };
            probe.watch(WorkerId(worker), Box::new(runner))
        };
        let log = Arc::default();
        let policy = Box::new(Spy { residents: BTreeMap::new(), log: Arc::clone(&log) });
        let limits = DispatchLimits { migrate_every: 4, ..DispatchLimits::default() };
        let dispatcher = Dispatcher::new(1, &[6, 6], policy, None, limits);
        let first = runner(0);
        let prefill = PrefillWorker::new(first.info(), 16, 4, &[], MODEL.n_expert);
        let decode = |worker| {
            let runner = runner(worker);
            Worker::new(DecodeWorker::new(runner.info(), 16, &[]), runner)
        };
        let (prefill, decode) = (vec![Worker::new(prefill, first)], (0..2).map(decode).collect());
        let run = VirtualRun::new(dispatcher, prefill, decode, probe.clone(), durations, None);
        let outcome = run.run(&requests(), None, &mut |_| {}).expect("they all end");
        let log = log.lock().expect("one thread").clone();
        (outcome, log)
    }

    // Symptom: `eldr bench --feedback 16 --migrate-every 32` measured a policy that was never told a pick, and to which a move
    // took no time; and the run that counts experts was another one, where the policy heard of no step.
    #[test]
    fn the_policy_is_told_picks_and_stalls_and_the_same_when_experts_are_counted() {
        let (timed, told) = run(FEEDBACK, Durations::Measure(Vec::new()));
        let n = |what: &str| told.iter().filter(|line| line.contains(what)).count();
        assert!(n("picks") > 0 && n(" in ") > 0, "{told:?}");
        assert!(n("stall known") > 0, "{told:?}");
        let (counted, heard) = run(1, Durations::Replay(timed.durations.into_iter()));
        assert_eq!(heard, told);
        let outputs: Vec<(String, Vec<Token>)> = requests()
            .into_iter()
            .map(|one| (one.name, MODEL.complete(&one.request.prompt, &one.request.sampling, one.request.max_tokens)))
            .collect();
        let outputs: Vec<(&str, &[Token])> = outputs.iter().map(|(name, tokens)| (&**name, &**tokens)).collect();
        for timeline in [timed.timeline, counted.timeline] {
            assert_eq!(timeline.tokens_sha256(), tokens_sha256(&outputs));
        }
    }
}
