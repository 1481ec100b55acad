use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use crossbeam::channel::Sender;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::{
    calibrate::Calibration,
    engine::{
        DiskTier, EngineError, EngineStats, GivenBack, PrefixTiers, Resident,
        refit::Refit,
        residents::{Lent, PolicyBuilder},
        stream::RawEvent,
        timed::SharedTimes,
    },
    refit::{FitResult, Reads},
    schedule::{Command, Dispatcher, Handoff, Job, Leftover, Source, StepPicks, SubmitParams, WorkerEvent},
    types::{FinishReason, Request, RequestId, Token, WorkerId},
};

/// What a worker's thread is told.
pub(super) enum ToWorker {
    Prefill(Job),
    Decode(Handoff),
    Keep(Leftover),
    Pin(Arc<[Token]>),
    Migrate(RequestId),
    Cancel(RequestId, FinishReason),
}

/// What the client side and the workers share: the dispatcher, the streams and the way to each worker.
pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    /// Signalled when a request ends and when a deadline may have moved closer.
    changed: Condvar,
    started: Instant,
    pub(super) route_times: SharedTimes,
    pub(super) handoff_times: SharedTimes,
    pub(super) restore_times: SharedTimes,
    /// Where prefixes go that had to make room, until the engine stops.
    tiers: Mutex<Option<PrefixTiers>>,
}

pub(super) struct State {
    pub(super) dispatcher: Dispatcher,
    streams: HashMap<RequestId, async_channel::Sender<RawEvent>>,
    /// What the decode workers were given and have not ended.
    pub(super) residents: BTreeMap<RequestId, Resident>,
    /// Makes policies for requests that ask for another.
    pub(super) build_policy: PolicyBuilder,
    prefill: Vec<Sender<ToWorker>>,
    decode: Vec<Sender<ToWorker>>,
    commands: Vec<Command>,
    refit: Option<Refit>,
    n_given_back: GivenBack,
    pub(super) policy_note: Option<String>,
    /// For prefill workers that come back.
    pins: Vec<Arc<[Token]>>,
    next_id: u64,
    draining: bool,
    stopped: bool,
}

impl Shared {
    pub(super) fn new(
        mut dispatcher: Dispatcher,
        prefill: Vec<Sender<ToWorker>>,
        decode: Vec<Sender<ToWorker>>,
        refit: Option<Refit>,
        route_times: SharedTimes,
        tiers: Option<PrefixTiers>,
    ) -> Self {
        if refit.is_some() {
            dispatcher.keep_signatures();
        }
        let state = State {
            dispatcher,
            streams: HashMap::new(),
            residents: BTreeMap::new(),
            build_policy: Lent::load_balancers(decode.len()).builder(),
            prefill,
            decode,
            commands: Vec::new(),
            refit,
            n_given_back: GivenBack::default(),
            policy_note: None,
            pins: Vec::new(),
            next_id: 0,
            draining: false,
            stopped: false,
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            started: Instant::now(),
            route_times,
            handoff_times: SharedTimes::default(),
            restore_times: SharedTimes::default(),
            tiers: Mutex::new(tiers),
        }
    }

    pub(super) fn submit(
        &self,
        request: Request,
        params: SubmitParams,
    ) -> Result<(RequestId, async_channel::Receiver<RawEvent>), EngineError> {
        let mut state = self.state.lock();
        if state.draining {
            return Err(EngineError::Draining);
        }
        let id = RequestId(state.next_id);
        let (sender, receiver) = async_channel::unbounded();
        state.streams.insert(id, sender);
        let now = self.started.elapsed();
        let has_deadline = request.deadline.is_some();
        let State { dispatcher, commands, .. } = &mut *state;
        if let Err(full) = dispatcher.submit_with(params, id, Arc::new(request), now, commands) {
            state.streams.remove(&id);
            return Err(full.into());
        }
        if has_deadline {
            // One that has passed already ends here; for others the deadline thread looks again.
            dispatcher.expire(now, commands);
            self.changed.notify_all();
        }
        state.next_id += 1;
        self.carry_out(&mut state);
        Ok((id, receiver))
    }

    pub(super) fn cancel(&self, id: RequestId, reason: FinishReason) {
        let mut state = self.state.lock();
        let State { dispatcher, commands, .. } = &mut *state;
        dispatcher.cancel(id, reason, commands);
        self.carry_out(&mut state);
    }

    /// Streams a worker's tokens and acts on what else it reports. `ran` is a step that did nothing but decode so many
    /// sequences, and how long it took.
    pub(super) fn deliver(&self, source: Source, ran: Option<(u32, Duration)>, events: &mut Vec<WorkerEvent>) {
        if events.is_empty() {
            return;
        }
        let now = self.started.elapsed();
        let mut state = self.state.lock();
        if let (Source::Decode(worker), Some((n_batch, took))) = (source, ran) {
            state.dispatcher.stepped(worker, n_batch, took);
        }
        for mut event in events.drain(..) {
            if let WorkerEvent::Token { id, token, logprobs, n_cached } = &mut event {
                state.send(*id, RawEvent::Token(*token, now, logprobs.take(), *n_cached));
            }
            if let WorkerEvent::Lost { error } = &event {
                log::error!("{source:?} is lost, its requests go to other workers: {error}");
            }
            if let WorkerEvent::Returned { job, error } = &event {
                log::warn!("request {} is prefilled again: {error}", job.id);
                state.given_back(source);
                state.residents.remove(&job.id);
            }
            let State { dispatcher, commands, .. } = &mut *state;
            dispatcher.on_event(source, event, commands);
            self.carry_out(&mut state);
        }
        if matches!(source, Source::Decode(_)) && !state.draining {
            let stall = self.handoff_times.lock().mean();
            let State { dispatcher, commands, .. } = &mut *state;
            dispatcher.rebalance(stall, commands);
            self.carry_out(&mut state);
        }
        if cfg!(debug_assertions) && state.dispatcher.n_active() == 0 {
            state.dispatcher.check_integrity();
        }
    }

    fn carry_out(&self, state: &mut State) {
        let now = self.started.elapsed();
        while !state.commands.is_empty() {
            for command in std::mem::take(&mut state.commands) {
                match command {
                    Command::Prefill(worker, job) => state.tell(Source::Prefill(worker), ToWorker::Prefill(job)),
                    Command::Decode(worker, handoff, decision) => {
                        let mut resident = Resident::new(worker, &handoff);
                        if let Some(before) = state.residents.remove(&handoff.job.id) {
                            resident.counts = resident.counts.or(before.counts);
                        }
                        state.send(handoff.job.id, RawEvent::Routed(Box::new(decision), now, resident.counts.clone()));
                        state.residents.insert(handoff.job.id, resident);
                        state.tell(Source::Decode(worker), ToWorker::Decode(handoff));
                    }
                    Command::Migrate(worker, id) => state.tell(Source::Decode(worker), ToWorker::Migrate(id)),
                    Command::Keep(worker, left) => state.tell(Source::Prefill(worker), ToWorker::Keep(left)),
                    Command::Cancel(source, id, reason) => state.tell(source, ToWorker::Cancel(id, reason)),
                    Command::End(id, outcome) => {
                        state.send(id, RawEvent::End(outcome));
                        state.streams.remove(&id);
                        state.residents.remove(&id);
                        self.changed.notify_all();
                    }
                }
            }
        }
        let State { dispatcher, refit, .. } = state;
        if let Some(refit) = refit {
            refit.turn(dispatcher, now);
        }
    }

    /// Takes in what a decode step read.
    pub(super) fn observe_step(&self, reads: Reads) {
        if let Some(refit) = &mut self.state.lock().refit {
            refit.observe_step(reads);
        }
    }

    /// One decode step in so many whose picks the policy is to be told; none if 0.
    pub(super) fn feedback(&self) -> u32 {
        self.state.lock().dispatcher.feedback()
    }

    /// Tells the policy what a decode step picked.
    pub(super) fn observe_picks(&self, worker: WorkerId, requests: &[RequestId], picks: &StepPicks) {
        self.state.lock().dispatcher.picked(worker, requests, picks);
    }

    /// Takes in the end of a check of the centroids; nothing if it panicked.
    pub(super) fn end_fit(&self, result: Option<FitResult>) {
        let State { dispatcher, refit, .. } = &mut *self.state.lock();
        if let Some(refit) = refit {
            refit.end(result, dispatcher);
        }
    }

    /// Gives a decode worker that is about to start its number. It gets requests once it is resumed.
    pub(super) fn add_decode(&self, n_slots: u32, inbox: Sender<ToWorker>) -> Result<WorkerId, EngineError> {
        let mut state = self.running()?;
        state.decode.push(inbox);
        Ok(state.dispatcher.add_decode(n_slots))
    }

    /// The state, unless the engine has stopped.
    fn running(&self) -> Result<MutexGuard<'_, State>, EngineError> {
        let state = self.state.lock();
        if state.stopped { Err(EngineError::Draining) } else { Ok(state) }
    }

    pub(super) fn drain_decode(&self, worker: WorkerId) -> Result<(), EngineError> {
        let mut state = self.running()?;
        state.dispatcher.drain_decode(worker)?;
        self.carry_out(&mut state);
        Ok(())
    }

    pub(super) fn resume_decode(&self, worker: WorkerId) -> Result<(), EngineError> {
        let mut state = self.running()?;
        let State { dispatcher, commands, .. } = &mut *state;
        dispatcher.resume_decode(worker, commands)?;
        self.carry_out(&mut state);
        Ok(())
    }

    /// Whether the engine has stopped.
    pub(super) fn is_stopped(&self) -> bool {
        self.state.lock().stopped
    }

    /// Takes a worker out, if it is not yet, because its device has failed; whether it has given back all it had.
    pub(super) fn lose(&self, source: Source, error: &str) -> bool {
        if !self.state.lock().dispatcher.is_lost(source) {
            self.deliver(source, None, &mut vec![WorkerEvent::Lost { error: error.to_owned() }]);
        }
        self.state.lock().dispatcher.is_empty(source)
    }

    /// A lost worker is back, at the other end of `inbox`.
    pub(super) fn revive(&self, source: Source, inbox: Sender<ToWorker>) {
        let mut state = self.state.lock();
        if state.stopped {
            return;
        }
        match source {
            Source::Prefill(worker) => state.prefill[worker.index()] = inbox,
            Source::Decode(worker) => state.decode[worker.index()] = inbox,
        }
        if matches!(source, Source::Prefill(_)) {
            for tokens in state.pins.clone() {
                state.tell(source, ToWorker::Pin(tokens));
            }
        }
        let State { dispatcher, commands, .. } = &mut *state;
        dispatcher.revive(source, commands);
        self.carry_out(&mut state);
    }

    /// Whether requests wait while no worker is left.
    pub(super) fn set_patient(&self, patient: bool) {
        let mut state = self.state.lock();
        let State { dispatcher, commands, .. } = &mut *state;
        dispatcher.set_patient(patient, commands);
        self.carry_out(&mut state);
    }

    /// Lets every prefill worker keep a prefix for good.
    pub(super) fn pin(&self, tokens: &Arc<[Token]>) -> Result<(), EngineError> {
        let mut state = self.running()?;
        for worker in 0..state.prefill.len() {
            state.tell(Source::Prefill(WorkerId(worker as u32)), ToWorker::Pin(Arc::clone(tokens)));
        }
        state.pins.push(Arc::clone(tokens));
        Ok(())
    }

    /// Takes no more requests.
    pub(super) fn stop_accepting(&self) {
        self.state.lock().draining = true;
    }

    /// Waits until every request has ended, at most `limit`; whether they have.
    pub(super) fn wait_idle(&self, limit: Duration) -> bool {
        // No time is that far away: then for ever.
        let until = Instant::now().checked_add(limit);
        let mut state = self.state.lock();
        while state.dispatcher.n_active() > 0 {
            match until {
                Some(until) if self.changed.wait_until(&mut state, until).timed_out() => {
                    return state.dispatcher.n_active() == 0;
                }
                Some(_) => {}
                None => self.changed.wait(&mut state),
            }
        }
        true
    }

    /// Ends every request as cancelled and lets the workers' threads run out.
    pub(super) fn stop(&self) {
        let mut state = self.state.lock();
        state.draining = true;
        let mut ids: Vec<RequestId> = state.streams.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            let State { dispatcher, commands, .. } = &mut *state;
            dispatcher.cancel(id, FinishReason::Cancelled, commands);
        }
        self.carry_out(&mut state);
        state.stopped = true;
        state.prefill.clear();
        state.decode.clear();
        // Its thread runs out; the last numbers stay.
        if let Some(refit) = &mut state.refit {
            refit.stop();
        }
        self.changed.notify_all();
    }

    /// Ends requests whose deadline passes, until the engine stops.
    pub(super) fn watch_deadlines(&self) {
        let mut state = self.state.lock();
        while !state.stopped {
            let now = self.started.elapsed();
            let State { dispatcher, commands, .. } = &mut *state;
            dispatcher.expire(now, commands);
            let next = dispatcher.next_deadline();
            self.carry_out(&mut state);
            match next {
                Some(next) if next <= now => {}
                Some(next) => {
                    self.changed.wait_for(&mut state, next.saturating_sub(now));
                }
                None => self.changed.wait(&mut state),
            }
        }
    }

    /// Waits until what was stored is on the disk. Once the workers' threads are gone.
    pub(super) fn close_tiers(&self) {
        let tiers = self.tiers.lock().take();
        if let Some(disk) = tiers.as_ref().and_then(PrefixTiers::disk) {
            disk.flush();
        }
    }

    pub(super) fn stats(&self) -> EngineStats {
        let tiers = self.tiers.lock();
        let state = self.state.lock();
        EngineStats {
            n_active: state.dispatcher.n_active(),
            n_queued: state.dispatcher.n_queued(),
            workers: state.dispatcher.workers().to_vec(),
            lost: state.dispatcher.lost().to_vec(),
            dispatch: state.dispatcher.stats(),
            cache: state.dispatcher.cache_stats(),
            step_time_error: state.dispatcher.step_time_error(),
            refit: state.refit.as_ref().map(Refit::stats),
            route_times: *self.route_times.lock(),
            handoff_times: *self.handoff_times.lock(),
            restore_times: *self.restore_times.lock(),
            cache_ram_bytes: tiers.as_ref().map_or(0, PrefixTiers::ram_bytes),
            cache_disk: tiers.as_ref().and_then(PrefixTiers::disk).map(DiskTier::stats),
            n_given_back: state.n_given_back,
        }
    }

    pub(super) fn set_calibration(&self, calibration: Arc<Calibration>, counted: &[u32]) -> Result<(), EngineError> {
        let mut state = self.state.lock();
        if state.refit.is_some() {
            let why = "the centroids follow the traffic (--refit), so no file may replace them; restart without it";
            return Err(EngineError::Calibration(why.to_owned()));
        }
        state.dispatcher.set_calibration(calibration, counted).map_err(EngineError::Calibration)
    }

    pub(super) fn started(&self) -> Instant {
        self.started
    }
}

impl State {
    /// A client that dropped its stream hears nothing; its cancellation is on the way.
    fn send(&self, id: RequestId, event: RawEvent) {
        if let Some(stream) = self.streams.get(&id) {
            let _ = stream.try_send(event);
        }
    }

    /// Counts a request that `source` gave back; a worker that is lost has said so before.
    fn given_back(&mut self, source: Source) {
        let Source::Decode(worker) = source else { return };
        match self.dispatcher.lost().get(worker.index()) {
            Some(true) => self.n_given_back.worker_lost += 1,
            _ => self.n_given_back.not_run += 1,
        }
    }

    fn tell(&mut self, to: Source, message: ToWorker) {
        let inbox = match to {
            Source::Prefill(worker) => self.prefill.get(worker.index()),
            Source::Decode(worker) => self.decode.get(worker.index()),
        };
        let Some(inbox) = inbox else { return };
        let Err(lost) = inbox.send(message) else { return };
        // The worker's thread is gone, which only happens after it reported itself lost: give the work back for it.
        let job = match lost.into_inner() {
            ToWorker::Cancel(..) | ToWorker::Keep(_) | ToWorker::Pin(_) | ToWorker::Migrate(_) => return,
            ToWorker::Prefill(job) => job,
            ToWorker::Decode(handoff) => handoff.job,
        };
        self.given_back(to);
        let event = WorkerEvent::Returned { job, error: format!("the thread of {to:?} is gone") };
        self.dispatcher.on_event(to, event, &mut self.commands);
    }
}
