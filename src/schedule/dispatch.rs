mod calibrated;
mod members;
mod moves;
mod policies;
mod views;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use calibrated::signature;
pub use members::MemberError;
use moves::Moves;
use ndarray::Array2;
use policies::Policies;
pub use policies::SubmitParams;

use crate::{
    calibrate::Calibration,
    kv::BlockName,
    route::{Decision, PolicyKind, RouteBuildError, RouteError, RoutePolicy, WorkerView},
    schedule::{
        DispatchLimits, DispatchStats, Handoff, Job, Leftover, PrefixConfig, QueueFull, RunnerInfo, WorkerEvent,
        prefix_map::PrefixMap, prompt_queue::PromptQueue, waiting::Waiting,
    },
    signature::Signature,
    types::{FinishReason, Request, RequestId, Usage, WorkerId},
};

/// Which worker an event comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// A prefill worker.
    Prefill(WorkerId),
    /// A decode worker.
    Decode(WorkerId),
}

/// What the driver must do next.
#[derive(Debug)]
pub enum Command {
    /// Give a request to a prefill worker.
    Prefill(WorkerId, Job),
    /// Give a prefilled request to a decode worker, for the reason stated.
    Decode(WorkerId, Handoff, Decision),
    /// Let a decode worker give a running request away ([`DecodeWorker::migrate`](crate::schedule::DecodeWorker::migrate)).
    Migrate(WorkerId, RequestId),
    /// Give what a finished request left to a prefill worker, to keep.
    Keep(WorkerId, Leftover),
    /// End a request on a worker that holds it.
    Cancel(Source, RequestId, FinishReason),
    /// Tell the client that its request ended.
    End(RequestId, Outcome),
}

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// With all the text it will have.
    Finished(FinishReason, Usage),
    /// It could not be run: one sentence says why.
    Failed(String),
}

/// Knows where every request is; feeds the prefill workers, chooses decode workers and books their slots.
///
/// Events in, commands out; the driver (threads, or a virtual clock) carries them. One owner.
pub struct Dispatcher {
    policies: Policies,
    calibration: Option<Arc<Calibration>>,
    limits: DispatchLimits,
    prefill: Vec<PrefillView>,
    prefixes: PrefixMap,
    decode: Vec<WorkerView>,
    /// Decode workers that are lost; the others that are not healthy are drained.
    lost: Vec<bool>,
    /// Requests wait where no worker is left, because one may come back.
    patient: bool,
    queue: PromptQueue,
    handoffs: Waiting<(Handoff, Option<Signature>)>,
    records: BTreeMap<RequestId, Record>,
    moves: Moves,
    /// Of routed requests, where the driver asked for them.
    routed: Option<Vec<Signature>>,
    stats: DispatchStats,
}

#[derive(Debug, Clone, Copy)]
struct PrefillView {
    n_inflight: usize,
    n_tokens: u64,
    healthy: bool,
}

#[derive(Debug)]
struct Record {
    place: Place,
    /// The policy it asked for.
    policy: Option<PolicyKind>,
    /// To run; once a prefill worker is chosen, without those it holds.
    n_tokens: u64,
    /// The blocks of its prompt; none of one that is computed whatever is held of it.
    blocks: Vec<BlockName>,
    deadline: Option<Duration>,
    /// Set when the request must end wherever it is met next.
    cancelled: Option<FinishReason>,
    usage: Usage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Queue,
    Prefill(WorkerId),
    Handoff,
    Decode(WorkerId),
}

impl Dispatcher {
    /// A dispatcher for `n_prefill` prefill workers and one decode worker for each entry of `n_slots`.
    ///
    /// `calibration` turns counts into signatures; without it every request is routed without one.
    pub fn new(
        n_prefill: usize,
        n_slots: &[u32],
        policy: Box<dyn RoutePolicy>,
        calibration: Option<Arc<Calibration>>,
        limits: DispatchLimits,
    ) -> Self {
        let decode = n_slots.iter().enumerate().map(|(id, &n_slots)| WorkerView {
            id: WorkerId(id as u32),
            n_slots,
            n_inflight: 0,
            healthy: true,
        });
        Self {
            policies: Policies::new(policy),
            calibration,
            limits,
            prefill: vec![PrefillView { n_inflight: 0, n_tokens: 0, healthy: true }; n_prefill],
            prefixes: PrefixMap::default(),
            decode: decode.collect(),
            lost: vec![false; n_slots.len()],
            patient: false,
            queue: PromptQueue::default(),
            handoffs: Waiting::new(limits.age_bound),
            records: BTreeMap::new(),
            moves: Moves::default(),
            routed: None,
            stats: DispatchStats::default(),
        }
    }

    /// Gives a prompt to the prefill worker that is done with it first, given what each holds of it. For workers that
    /// keep prefixes as `config` says, like the one with `info`.
    #[must_use]
    pub fn caching(mut self, config: PrefixConfig, info: &RunnerInfo) -> Self {
        if config.max_tokens > 0 {
            self.prefixes = PrefixMap::new(self.prefill.len(), config.block, info.root_name());
        }
        self
    }

    /// Accepts a request at time `now`; from here on it has exactly one [`Command::End`].
    pub fn submit_with(
        &mut self,
        params: SubmitParams,
        id: RequestId,
        request: Arc<Request>,
        now: Duration,
        commands: &mut Vec<Command>,
    ) -> Result<(), QueueFull> {
        if self.queue.len() >= self.limits.max_queue {
            return Err(QueueFull(self.queue.len()));
        }
        let n_prompt = request.prompt.len();
        let record = Record {
            place: Place::Queue,
            policy: params.policy.filter(|&kind| self.policies.lends(kind)),
            n_tokens: n_prompt as u64,
            blocks: if params.fresh { Vec::new() } else { self.prefixes.names(&request.prompt) },
            deadline: request.deadline.map(|deadline| now.saturating_add(deadline)),
            cancelled: None,
            usage: Usage { prompt_tokens: n_prompt as u32, ..Usage::default() },
        };
        let known = self.records.insert(id, record);
        assert!(known.is_none(), "request {id} submitted twice");
        self.queue.push(Job { fresh: params.fresh, ..Job::new(id, request) }, params.priority);
        self.advance(commands);
        Ok(())
    }

    /// Ends a request for the caller, wherever it is. Unknown and ended requests are ignored.
    pub fn cancel(&mut self, id: RequestId, reason: FinishReason, commands: &mut Vec<Command>) {
        let Some(record) = self.records.get_mut(&id) else { return };
        record.cancelled.get_or_insert(reason);
        match record.place {
            Place::Prefill(worker) => commands.push(Command::Cancel(Source::Prefill(worker), id, reason)),
            Place::Decode(worker) => commands.push(Command::Cancel(Source::Decode(worker), id, reason)),
            Place::Queue => {
                self.queue.remove(id);
                self.end_cancelled(id, commands);
            }
            Place::Handoff => {
                self.handoffs.retain(|(handoff, _)| handoff.job.id != id);
                self.end_cancelled(id, commands);
            }
        }
        self.advance(commands);
    }

    /// Ends every request whose deadline is past at time `now`.
    pub fn expire(&mut self, now: Duration, commands: &mut Vec<Command>) {
        let late = |record: &Record| record.cancelled.is_none() && record.deadline.is_some_and(|d| d <= now);
        let ids: Vec<RequestId> = self.records.iter().filter(|(_, r)| late(r)).map(|(&id, _)| id).collect();
        for id in ids {
            self.cancel(id, FinishReason::Deadline, commands);
        }
    }

    /// The earliest deadline of a request that is still running.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.records.values().filter(|r| r.cancelled.is_none()).filter_map(|r| r.deadline).min()
    }

    /// Takes in what a worker reported. Tokens are the driver's to stream; here they only count.
    pub fn on_event(&mut self, source: Source, event: WorkerEvent, commands: &mut Vec<Command>) {
        match event {
            WorkerEvent::Token { id, .. } => {
                if let Some(record) = self.records.get_mut(&id) {
                    record.usage.completion_tokens += 1;
                }
            }
            WorkerEvent::Prefilled(handoff) => {
                self.leave(source, handoff.job.id);
                self.on_prefilled(handoff, commands);
            }
            WorkerEvent::Finished { id, reason, usage } => {
                self.leave(source, id);
                self.end(id, Outcome::Finished(reason, usage), commands);
            }
            WorkerEvent::Returned { job, error } => {
                self.leave(source, job.id);
                self.on_returned(job, &error, commands);
            }
            WorkerEvent::Moved(handoff) => self.on_moved(source, handoff, commands),
            WorkerEvent::Stayed { id } => self.give_up_move(id),
            WorkerEvent::Cache(change) => {
                if let Source::Prefill(worker) = source {
                    self.prefixes.apply(worker, &change);
                }
            }
            WorkerEvent::Left(left) => commands.extend(self.keeper(&left).map(|worker| Command::Keep(worker, left))),
            WorkerEvent::Lost { error } => self.on_lost(source, &error, commands),
        }
        self.advance(commands);
    }

    /// From now on keeps the signature of every request it routes, until [`Dispatcher::take_signatures`].
    pub fn keep_signatures(&mut self) {
        self.routed.get_or_insert_default();
    }

    /// The signatures of requests routed since the last call, in order; one routed again after a loss counts again.
    pub fn take_signatures(&mut self) -> impl Iterator<Item = Signature> {
        self.routed.iter_mut().flat_map(|routed| routed.drain(..))
    }

    /// Gives the policy new centroids, for the decisions to come; see [`RoutePolicy::set_centroids`].
    pub fn set_centroids(&mut self, centroids: &Arc<Array2<f32>>) -> Result<(), RouteBuildError> {
        self.policies.set_centroids(centroids)
    }

    /// The prefill worker that holds most of what a finished request left; none if none holds anything of it.
    fn keeper(&self, left: &Leftover) -> Option<WorkerId> {
        let blocks = self.prefixes.names(&left.tokens);
        let n_held = |&index: &usize| self.prefixes.n_cached(index, &blocks);
        let healthy = (0..self.prefill.len()).rev().filter(|&index| self.prefill[index].healthy);
        healthy.filter(|index| n_held(index) > 0).max_by_key(n_held).map(|index| WorkerId(index as u32))
    }

    fn on_prefilled(&mut self, handoff: Handoff, commands: &mut Vec<Command>) {
        let id = handoff.job.id;
        if self.end_cancelled(id, commands) {
            return;
        }
        let signature = self.calibration.as_deref().and_then(|calibration| signature(calibration, &handoff));
        let usage = handoff.job.usage();
        let record = self.record(id);
        record.place = Place::Handoff;
        record.usage = Usage { completion_tokens: record.usage.completion_tokens, ..usage };
        self.handoffs.push((handoff, signature));
    }

    fn on_returned(&mut self, mut job: Job, error: &str, commands: &mut Vec<Command>) {
        let id = job.id;
        if self.end_cancelled(id, commands) {
            return;
        }
        if job.n_retries >= self.limits.max_retries {
            let message = format!("given up after {} tries; the last one: {error}", job.n_retries + 1);
            self.end(id, Outcome::Failed(message), commands);
            return;
        }
        job.n_retries += 1;
        self.stats.n_retried += 1;
        let n_tokens = u64::from(job.n_tokens());
        let record = self.record(id);
        record.place = Place::Queue;
        record.n_tokens = n_tokens;
        self.queue.push_front(job);
    }

    fn on_lost(&mut self, source: Source, error: &str, commands: &mut Vec<Command>) {
        if self.is_lost(source) {
            return;
        }
        self.stats.n_workers_lost += 1;
        match source {
            Source::Prefill(worker) => {
                self.prefill[worker.index()].healthy = false;
                self.prefixes.lose(worker);
            }
            Source::Decode(worker) => {
                self.decode[worker.index()].healthy = false;
                self.lost[worker.index()] = true;
            }
        }
        if let Some(kind) = self.missing().filter(|_| !self.patient) {
            self.fail_waiting(&format!("no {kind} worker is left to take requests; the last one: {error}"), commands);
        }
    }

    /// The kind of worker of which none takes requests.
    fn missing(&self) -> Option<&'static str> {
        let no_prefill = self.prefill.iter().all(|worker| !worker.healthy);
        let no_decode = self.decode.iter().all(|worker| !worker.healthy);
        if no_prefill { Some("prefill") } else { no_decode.then_some("decode") }
    }

    /// Fails what waits and can not run any more; requests still on a worker end when it reports them.
    fn fail_waiting(&mut self, message: &str, commands: &mut Vec<Command>) {
        let queued = std::mem::take(&mut self.queue);
        let queued = queued.iter().map(|job| job.id);
        let handoffs = self.handoffs.drain().map(|(handoff, _)| handoff.job.id);
        for id in queued.chain(handoffs).collect::<Vec<_>>() {
            self.end(id, Outcome::Failed(message.to_owned()), commands);
        }
    }

    /// Moves on whatever can move: hand-offs to decode workers first, then the queue to prefill workers.
    fn advance(&mut self, commands: &mut Vec<Command>) {
        while self.handoffs.len() > 0 {
            let at = self.next_handoff();
            let (handoff, signature) = self.handoffs.get(at).expect("a choice");
            let request = handoff.ask(signature.as_ref());
            let asked = self.records[&request.id].policy;
            match self.policies.select(asked, &request, &self.decode) {
                Ok(decision) => {
                    let worker = &mut self.decode[decision.worker.index()];
                    assert!(
                        worker.eligible(),
                        "{} chose worker {} which is full",
                        asked.map_or(self.policies.name(), PolicyKind::name),
                        worker.id
                    );
                    worker.n_inflight += 1;
                    self.policies.placed(&request, decision.worker);
                    let (handoff, signature) = self.handoffs.take(at);
                    self.record(handoff.job.id).place = Place::Decode(decision.worker);
                    commands.push(Command::Decode(decision.worker, handoff, decision));
                    if let Some(routed) = &mut self.routed {
                        routed.extend(signature);
                    }
                }
                Err(RouteError::AllFull) => break,
                Err(RouteError::NoWorker) if self.patient => break,
                Err(error @ RouteError::NoWorker) => {
                    let (handoff, _) = self.handoffs.take(at);
                    self.end(handoff.job.id, Outcome::Failed(error.to_string()), commands);
                }
            }
        }
        self.feed_prefill(commands);
    }

    /// The hand-off to be placed next: the cheapest that may go first, the oldest of equals.
    fn next_handoff(&mut self) -> usize {
        let mut least = (0, f64::INFINITY);
        let n_choices = self.handoffs.n_choices();
        for at in (0..n_choices).filter(|_| n_choices > 1) {
            let (handoff, signature) = self.handoffs.get(at).expect("a choice");
            let Some(cost) = self.policies.cost(&handoff.ask(signature.as_ref()), &self.decode) else { break };
            if cost < least.1 {
                least = (at, cost);
            }
        }
        least.0
    }

    fn feed_prefill(&mut self, commands: &mut Vec<Command>) {
        if let Some(kind) = self.missing() {
            if !self.patient {
                self.fail_waiting(&format!("no {kind} worker is running"), commands);
            }
            return;
        }
        while self.queue.len() > 0 {
            let n_prefilling: usize = self.prefill.iter().map(|worker| worker.n_inflight).sum();
            if self.handoffs.len() + n_prefilling >= self.n_ahead() {
                return;
            }
            let Some((index, n_tokens)) = self.first_done() else { return };
            let Some(job) = self.queue.pop_front() else { return };
            let worker = WorkerId(index as u32);
            let record = self.record(job.id);
            record.place = Place::Prefill(worker);
            record.n_tokens = n_tokens;
            let blocks = record.blocks.clone();
            self.prefixes.give(index, job.id, blocks);
            self.prefill[index].n_inflight += 1;
            self.prefill[index].n_tokens += n_tokens;
            commands.push(Command::Prefill(worker, job));
        }
    }

    /// The free prefill worker that would be done with the first waiting request first, and the tokens it would run. So a
    /// prompt waits for what is held of it no longer than it would take to run.
    fn first_done(&self) -> Option<(usize, u64)> {
        let record = &self.records[&self.queue.front()?.id];
        let free = self.prefill.iter().enumerate().filter(|(_, w)| w.healthy && w.n_inflight < self.limits.max_prefill);
        let to_run = |worker| record.n_tokens.saturating_sub(self.prefixes.n_cached(worker, &record.blocks));
        let all = free.map(|(index, worker)| (worker.n_tokens + to_run(index), index));
        all.min().map(|(_, index)| (index, to_run(index)))
    }

    /// Requests that may be in prefill or waiting for a slot: those the free slots can take, and `max_handoffs` more.
    fn n_ahead(&self) -> usize {
        let free = self.decode.iter().filter(|w| w.healthy).map(|w| (w.n_slots - w.n_inflight) as usize);
        free.sum::<usize>().saturating_add(self.limits.max_handoffs)
    }

    /// A request has left the worker that held it.
    fn leave(&mut self, source: Source, id: RequestId) {
        let record = self.record(id);
        let n_tokens = record.n_tokens;
        match source {
            Source::Prefill(worker) => {
                assert_eq!(record.place, Place::Prefill(worker), "request {id} reported by prefill worker {worker}");
                self.prefill[worker.index()].n_inflight -= 1;
                self.prefill[worker.index()].n_tokens -= n_tokens;
                self.prefixes.leave(worker, id);
            }
            Source::Decode(worker) => {
                assert_eq!(record.place, Place::Decode(worker), "request {id} reported by decode worker {worker}");
                self.decode[worker.index()].n_inflight -= 1;
                self.policies.left(id, worker);
                self.give_up_move(id);
            }
        }
    }

    fn end_cancelled(&mut self, id: RequestId, commands: &mut Vec<Command>) -> bool {
        let record = self.record(id);
        let usage = record.usage;
        let Some(reason) = record.cancelled else { return false };
        self.end(id, Outcome::Finished(reason, usage), commands);
        true
    }

    fn end(&mut self, id: RequestId, outcome: Outcome, commands: &mut Vec<Command>) {
        let record = self.records.remove(&id);
        assert!(record.is_some(), "request {id} ended twice");
        commands.push(Command::End(id, outcome));
    }

    fn record(&mut self, id: RequestId) -> &mut Record {
        self.records.get_mut(&id).unwrap_or_else(|| panic!("request {id} is not known"))
    }
}
