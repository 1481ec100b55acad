use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, VecDeque},
    sync::Arc,
    time::Duration,
};

use crate::{
    bench::{BenchError, BenchRequest, PickStore, Probe, Timeline},
    refit::{RefitStats, Refitter},
    schedule::{
        CacheStats, Command, DecodeWorker, Dispatcher, ModelRunner, Outcome, PrefillWorker, Source, WorkerEvent,
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
    /// Decode steps each request has had.
    picks: Option<&'a mut PickStore>,
    refitter: Option<Refitter>,
}

/// What a virtual run gives.
#[derive(Debug)]
pub struct VirtualOutcome {
    /// What happened.
    pub timeline: Timeline,
    /// How long each step took; nothing if that was replayed.
    pub durations: Vec<Duration>,
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
}

/// How long each step takes, in the order they start.
#[derive(Debug)]
pub enum Durations {
    /// As long as it took.
    Measure(Vec<Duration>),
    /// As long as it took in an earlier run of the same schedule.
    Replay(std::vec::IntoIter<Duration>),
}

enum Happening {
    Arrival(usize),
    /// Of a step that did nothing but decode: its sequences and time.
    StepDone(Source, Option<(u32, Duration)>, Vec<WorkerEvent>),
}

impl<S> Worker<S> {
    /// A worker with nothing to do.
    pub fn new(scheduler: S, runner: Box<dyn ModelRunner>) -> Self {
        Self { scheduler, runner, busy: false }
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
                Happening::StepDone(source, ran, events) => {
                    self.worker_done(source);
                    if let (Source::Decode(worker), Some((n_batch, took))) = (source, ran) {
                        self.dispatcher.stepped(worker, n_batch, took);
                    }
                    for event in events {
                        if let WorkerEvent::Token { id, token, .. } = event {
                            self.timeline.token(id, token, at);
                        }
                        self.dispatcher.on_event(source, event, &mut commands);
                    }
                    if let Source::Decode(_) = source {
                        self.dispatcher.rebalance(Duration::ZERO, &mut commands);
                    }
                }
            }
            self.timeline.saw(self.probe.take(), Some(at));
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
                self.started(Source::Prefill(WorkerId(index as u32)), None, events, start.elapsed())?;
            }
        }
        for index in 0..self.decode.len() {
            let worker = &mut self.decode[index];
            if !worker.busy && !worker.scheduler.is_idle() {
                worker.busy = true;
                let mut events = Vec::new();
                let start = self.probe.stopwatch().start();
                let step = worker.scheduler.step(worker.runner.as_mut(), &mut events);
                let took = start.elapsed();
                let alone = step.n_decoded_alone();
                let mut members = Vec::with_capacity(step.requests.len());
                for (item, member) in step.requests.iter().copied().zip(step.at.iter().copied()).enumerate() {
                    members.push(member);
                    if let Some(store) = self.picks.as_deref_mut()
                        && !step.picks.is_empty()
                    {
                        store.insert(member, &step.picks, item);
                    }
                }
                let worker = WorkerId(index as u32);
                let done = self.started(Source::Decode(worker), alone, events, took)?;
                if !members.is_empty() {
                    self.timeline.stepped(done, worker, members);
                }
            }
        }
        Ok(())
    }

    /// `alone` are the sequences of a step that did nothing but decode.
    fn started(
        &mut self,
        source: Source,
        alone: Option<u32>,
        events: Vec<WorkerEvent>,
        took: Duration,
    ) -> Result<Duration, BenchError> {
        let took = took + self.probe.take_replayed();
        let took = match &mut self.durations {
            Durations::Measure(durations) => {
                durations.push(took);
                took
            }
            Durations::Replay(rest) => rest.next().ok_or(BenchError::OtherSchedule)?,
        };
        let done = self.now + took;
        // What the probe saw happened when the step ends on the clock.
        self.timeline.saw(self.probe.take(), Some(done));
        let ran = alone.map(|n_batch| (n_batch, took));
        self.at(done, Happening::StepDone(source, ran, events));
        Ok(done)
    }
}
