use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread::JoinHandle,
    time::Instant,
};

use crossbeam::channel::Receiver;

use crate::{
    engine::{EngineError, EngineWorker, Permits, Shared, shared::ToWorker},
    refit::Reads,
    schedule::{DecodeWorker, ModelRunner, PrefillWorker, Source, StepPicks, WorkerEvent},
    types::RequestId,
};

/// Either kind of worker's state machine.
pub(super) enum Scheduler {
    Prefill(Box<PrefillWorker>),
    Decode(Box<DecodeWorker>),
}

/// What a step tells beside its events.
#[derive(Default)]
struct Told {
    /// Of a prefill worker: prompt tokens it ran.
    n_prompt: u32,
    /// What it read, if its experts were counted.
    reads: Option<Reads>,
    /// What its sequences picked, if the policy is to be told.
    picked: Option<(Vec<RequestId>, StepPicks)>,
    /// Its sequences, if it did nothing but decode them.
    n_alone: Option<u32>,
}

impl Scheduler {
    fn take(&mut self, message: ToWorker) {
        match (self, message) {
            (Self::Prefill(worker), ToWorker::Prefill(job)) => worker.admit(job),
            (Self::Decode(worker), ToWorker::Decode(handoff)) => worker.admit(handoff),
            (Self::Prefill(worker), ToWorker::Keep(left)) => worker.take_in(left),
            (Self::Prefill(worker), ToWorker::Pin(tokens)) => {
                if let Err(why) = worker.pin(&tokens) {
                    log::warn!("a prefix of {} tokens is not pinned: {why}", tokens.len());
                }
            }
            (Self::Decode(worker), ToWorker::Migrate(id)) => worker.migrate(id),
            (Self::Prefill(worker), ToWorker::Cancel(id, reason)) => worker.cancel(id, reason),
            (Self::Decode(worker), ToWorker::Cancel(id, reason)) => worker.cancel(id, reason),
            (Self::Prefill(_), ToWorker::Decode(_) | ToWorker::Migrate(_))
            | (Self::Decode(_), ToWorker::Prefill(_) | ToWorker::Keep(_) | ToWorker::Pin(_)) => {
                unreachable!("each kind of worker is sent its own kind of work")
            }
        }
    }

    fn is_idle(&self) -> bool {
        match self {
            Self::Prefill(worker) => worker.is_idle(),
            Self::Decode(worker) => worker.is_idle(),
        }
    }

    /// One step; what is to be told of it, its picks too if `tells`.
    fn step(&mut self, runner: &mut dyn ModelRunner, events: &mut Vec<WorkerEvent>, tells: bool) -> Told {
        let step = match self {
            Self::Prefill(worker) => return Told { n_prompt: worker.step(runner, events), ..Told::default() },
            Self::Decode(worker) => worker.step(runner, events),
        };
        let distinct = step.picks.distinct();
        let sum: u32 = distinct.iter().sum();
        let reads = Reads { distinct: f64::from(sum) / distinct.len() as f64, batch: step.requests.len() as f64 };
        let picked = (tells && !step.picks.is_empty()).then(|| (step.requests.clone(), step.picks.clone()));
        let reads = (!distinct.is_empty()).then_some(reads);
        Told { n_prompt: 0, reads, picked, n_alone: step.n_decoded_alone() }
    }

    /// Whether a turn of which `n_prompt` tokens have run goes on: prefill's until they are a chunk, of as many prompts as
    /// that is, so that a burst of short prompts is no slower than a long one. Decoding waits for less than two chunks.
    fn goes_on(&self, n_prompt: u32) -> bool {
        match self {
            Self::Prefill(worker) => n_prompt > 0 && n_prompt < worker.chunk() && !worker.is_idle(),
            Self::Decode(_) => false,
        }
    }

    /// Stores what would be lost with the worker.
    fn save(&mut self, runner: &mut dyn ModelRunner) {
        if let Self::Prefill(worker) = self {
            worker.save(runner);
        }
    }

    fn abandon(&mut self, message: &str, events: &mut Vec<WorkerEvent>) {
        match self {
            Self::Prefill(worker) => worker.abandon(message, events),
            Self::Decode(worker) => worker.abandon(message, events),
        }
    }
}

/// The threads started so far; if one cannot be started, the others are stopped.
pub(super) struct Starter {
    pub(super) shared: Arc<Shared>,
    pub(super) threads: Vec<JoinHandle<()>>,
}

impl Starter {
    pub(super) fn spawn(
        &mut self,
        source: Source,
        worker: EngineWorker,
        scheduler: Scheduler,
        inbox: Receiver<ToWorker>,
    ) -> Result<(), EngineError> {
        self.threads.push(spawn_worker(&self.shared, source, worker, scheduler, inbox)?);
        Ok(())
    }

    pub(super) fn spawn_deadlines(&mut self) -> Result<(), EngineError> {
        let shared = Arc::clone(&self.shared);
        self.threads.push(thread("deadlines", move || shared.watch_deadlines())?);
        Ok(())
    }
}

impl Drop for Starter {
    fn drop(&mut self) {
        if !self.threads.is_empty() {
            self.shared.stop();
            self.threads.drain(..).for_each(|thread| drop(thread.join()));
        }
    }
}

/// Starts a worker's thread.
pub(super) fn spawn_worker(
    shared: &Arc<Shared>,
    source: Source,
    worker: EngineWorker,
    scheduler: Scheduler,
    inbox: Receiver<ToWorker>,
) -> Result<JoinHandle<()>, EngineError> {
    let shared = Arc::clone(shared);
    let name = worker.name.clone();
    thread(&name, move || run_worker(source, worker, scheduler, &inbox, &shared))
}

pub(super) fn thread(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, EngineError> {
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(body);
    thread.map_err(|error| EngineError::Config(format!("no thread could be started for {name}: {error}")))
}

/// When the policy is told what a step picked.
struct Feedback {
    /// One step in so many, or none.
    every: u32,
    /// Since it was told.
    n_steps: u32,
}

impl Feedback {
    fn is_due(&self) -> bool {
        self.every > 0 && self.n_steps >= self.every
    }
}

/// A worker's thread: messages in, one step, events out, until the engine stops.
fn run_worker(
    source: Source,
    mut worker: EngineWorker,
    mut scheduler: Scheduler,
    inbox: &Receiver<ToWorker>,
    shared: &Shared,
) {
    let mut events = Vec::new();
    let turns = worker.permits.take();
    let (mut turn, mut n_prompt_turn) = (None, 0);
    let mut feedback = Feedback { every: shared.feedback(), n_steps: 0 };
    worker.runner.enter();
    loop {
        if scheduler.is_idle() {
            turn = None;
            match inbox.recv() {
                Ok(message) => scheduler.take(message),
                Err(_) => break,
            }
        }
        while let Ok(message) = inbox.try_recv() {
            scheduler.take(message);
        }
        if turn.is_none() {
            turn = turns.as_deref().map(Permits::acquire);
            n_prompt_turn = 0;
        }
        // A panic in a runner is that worker's end, not the engine's: its requests go on elsewhere.
        let began = Instant::now();
        let step =
            catch_unwind(AssertUnwindSafe(|| scheduler.step(worker.runner.as_mut(), &mut events, feedback.is_due())));
        let took = began.elapsed();
        let Told { n_prompt, reads, picked, n_alone } = step.unwrap_or_else(|_| {
            scheduler.abandon(&format!("{} panicked", worker.name), &mut events);
            Told::default()
        });
        n_prompt_turn += n_prompt;
        if n_prompt == 0 || !scheduler.goes_on(n_prompt_turn) {
            turn = None;
        }
        if let Some(reads) = reads {
            shared.observe_step(reads);
        }
        if let (Source::Decode(worker), Some((requests, picks))) = (source, picked) {
            feedback.n_steps = 0;
            shared.observe_picks(worker, &requests, &picks);
        }
        feedback.n_steps = feedback.n_steps.saturating_add(1);
        shared.deliver(source, n_alone.map(|n_batch| (n_batch, took)), &mut events);
    }
    // Giving a context back is a call to its device too.
    let _turn = turn.or_else(|| turns.as_deref().map(Permits::acquire));
    if catch_unwind(AssertUnwindSafe(|| scheduler.save(worker.runner.as_mut()))).is_err() {
        log::error!("{} panicked while it stored what it keeps", worker.name);
    }
    drop(worker);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        schedule::{FakeModel, FakeRunner, Job},
        types::{Request, RequestId, SamplingParams},
    };

    #[test]
    fn a_turn_of_prefill_is_a_chunk_of_tokens_and_one_of_decode_a_step() {
        let model = FakeModel { n_vocab: 50, n_layer: 2, n_expert: 8, n_expert_used: 2 };
        let mut runner = FakeRunner::new(model, 4, 256, Vec::new());
        let mut prefill = PrefillWorker::new(runner.info(), 16, 4, &[], model.n_expert);
        for (id, n) in [6, 5, 40].into_iter().enumerate() {
            let request = Request {
                prompt: (0..n).collect(),
                max_tokens: 2,
                sampling: SamplingParams::default(),
                domain: None,
                deadline: None,
            };
            prefill.admit(Job::new(RequestId(id as u64), Arc::new(request)));
        }
        let mut scheduler = Scheduler::Prefill(Box::new(prefill));
        let (mut events, mut turns, mut n_turn) = (Vec::new(), Vec::new(), 0);
        while !scheduler.is_idle() {
            n_turn += scheduler.step(&mut runner, &mut events, false).n_prompt;
            if !scheduler.goes_on(n_turn) {
                turns.push(std::mem::take(&mut n_turn));
            }
        }
        // The two short prompts and the first chunk of the long one share a turn.
        assert_eq!(turns, [5 + 6 + 16, 16, 8]);
        let decode = Scheduler::Decode(Box::new(DecodeWorker::new(runner.info(), 16, &[])));
        assert!(!decode.goes_on(0));
    }
}
