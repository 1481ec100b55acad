use std::{collections::VecDeque, sync::Arc};

use crate::{
    kv::ChunkCounts,
    schedule::{
        DecodeItem, Handoff, Job, Leftover, ModelRunner, RunError, RunnerInfo, StepPicks, WorkerEvent, compact,
        prefill::{LOST, draw, logprobs},
    },
    types::{FinishReason, RequestId, Slot, Token},
};

/// Times a step that changed nothing is tried again before the worker gives its requests back.
const MAX_STEP_RETRIES: u32 = 2;

/// One decode worker: a token of every resident sequence each step, sequences joining and leaving between steps.
#[derive(Debug)]
pub struct DecodeWorker {
    chunk: u32,
    contiguous: bool,
    replays: bool,
    eog: Vec<Token>,
    slots: Vec<Option<Resident>>,
    incoming: VecDeque<Handoff>,
    cancelled: Vec<(RequestId, FinishReason)>,
    moving: Vec<RequestId>,
    n_step_retries: u32,
    lost: bool,
    next: Vec<Token>,
    batch: Vec<DecodeItem>,
    step: DecodeStep,
    answers: Option<Answers>,
}

/// What decode workers tell of answers that go back to the prefix cache.
///
/// ```
/// use std::sync::Arc;
///
/// use eldr::{
///     schedule::{
///         Answers, CacheUse, DecodeWorker, FakeModel, FakeRunner, Job, Leftover, ModelRunner, PrefillWorker, WorkerEvent,
///     },
///     types::{Request, RequestId, SamplingParams},
/// };
///
/// // A prefill and a decode worker of a toy model, which gives back what has a block of four tokens more than its prompt.
/// let model = FakeModel { n_vocab: 50, n_layer: 2, n_expert: 8, n_expert_used: 2 };
/// let mut runners = [(); 2].map(|()| FakeRunner::new(model, 4, 256, Vec::new()));
/// let mut prefill = PrefillWorker::new(runners[0].info(), 16, 4, &[], model.n_expert);
/// let answers = Answers { layers: [].into(), n_expert: model.n_expert, block: 4 };
/// let mut decode = DecodeWorker::new(runners[1].info(), 16, &[]).returning(Some(answers));
///
/// let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::default() };
/// let request = Request { prompt: vec![1, 2, 3], max_tokens: 8, sampling, domain: None, deadline: None };
/// prefill.admit(Job::new(RequestId(0), Arc::new(request)));
/// let mut events = Vec::new();
/// prefill.step(&mut runners[0], &mut events);
/// let Some(WorkerEvent::Prefilled(handoff)) = events.pop() else { panic!("the prompt is done") };
/// let CacheUse { n_tokens, .. } = handoff.job.cache;
/// assert_eq!(n_tokens, 0, "nothing of it was there");
/// decode.admit(handoff);
/// while !decode.is_idle() {
///     decode.step(&mut runners[1], &mut events);
/// }
/// let left = events.iter().find_map(|event| if let WorkerEvent::Left(left) = event { Some(left) } else { None });
/// let Leftover { tokens, n_base, .. } = left.expect("prompt and answer go back");
/// // The last token drawn was not run.
/// assert_eq!((tokens.len(), *n_base), (3 + 8 - 1, 3));
/// ```
#[derive(Debug, Clone)]
pub struct Answers {
    /// MoE layers whose picks the prefill workers count; none if they count nothing.
    pub layers: Arc<[u32]>,
    /// Experts a layer.
    pub n_expert: u32,
    /// Tokens of a block.
    pub block: u32,
}

/// What one step did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DecodeStep {
    /// The requests that ran a token, in slot order.
    pub requests: Vec<RequestId>,
    /// How many tokens each had run before it, its prompt's not counted.
    pub at: Vec<u32>,
    /// The experts they picked, if the runner taps decode steps.
    pub picks: StepPicks,
    /// Sequences taken in.
    pub n_imported: u32,
    /// Hand-offs that did not arrive whole and are prefilled again on this worker.
    pub n_refilled: u32,
    /// Of the requests, those that ran a token again that they had drawn on a lost worker, and got none.
    pub n_replayed: u32,
    /// Sequences moved to keep the batch in neighbouring slots.
    pub n_relocated: u32,
    /// Sequences given away, to go on elsewhere.
    pub n_exported: u32,
}

impl DecodeStep {
    /// The sequences of a step that decoded and did nothing else, no counting either, so that its time tells about decoding;
    /// nothing of others.
    pub fn n_decoded_alone(&self) -> Option<u32> {
        self.n_only_decoded().filter(|_| self.picks.is_empty())
    }

    /// The same where counting takes no time.
    pub fn n_only_decoded(&self) -> Option<u32> {
        let n_other = self.n_imported + self.n_refilled + self.n_replayed + self.n_relocated + self.n_exported;
        (n_other == 0 && !self.requests.is_empty()).then_some(self.requests.len() as u32)
    }
}

#[derive(Debug)]
struct Resident {
    job: Job,
    /// Tokens in the slot. A sequence whose hand-off failed is filled up chunk by chunk before it decodes; one that lost
    /// its worker may have to decode again what it had drawn.
    n_filled: u32,
    /// Tokens that were prefilled.
    n_base: u32,
    /// The experts that the tokens after those picked, by token, layer and pick.
    picked: Vec<u32>,
}

impl Resident {
    /// All but the last drawn token are in the slot.
    fn is_ready(&self) -> bool {
        self.n_filled + 1 == self.job.n_tokens()
    }

    /// Tokens that are prefilled here if they are missing: all but the last drawn one, or the prompt's alone.
    fn n_prefill(&self, replays: bool) -> u32 {
        if replays { self.job.request.prompt.len() as u32 } else { self.job.n_tokens() - 1 }
    }
}

impl Answers {
    /// What a finished request leaves, if it has a block more than its prompt; a sequence that can not be copied out is
    /// simply gone, and one that came from another worker is, because nobody knows all its picks.
    fn take(&self, resident: &Resident, slot: Slot, runner: &mut dyn ModelRunner) -> Option<WorkerEvent> {
        let Resident { job, n_filled, n_base, picked } = resident;
        let (n_filled, n_base) = (*n_filled, *n_base);
        let n_picks = self.layers.len() * (n_filled - n_base) as usize;
        if job.n_moves > 0
            || n_filled < n_base + self.block
            || (n_picks > 0 && (picked.is_empty() || !picked.len().is_multiple_of(n_picks)))
        {
            return None;
        }
        let state = runner.export(slot).ok()?;
        let counts = (n_picks > 0).then(|| {
            let mut counts = ChunkCounts::new(&self.layers, self.n_expert, self.block, n_base, n_filled, n_base);
            for (at, experts) in picked.chunks_exact(picked.len() / n_picks).enumerate() {
                counts.add(self.layers[at % self.layers.len()], at / self.layers.len(), experts);
            }
            counts
        });
        Some(WorkerEvent::Left(Leftover { tokens: job.tokens(0, n_filled), state, n_base, counts }))
    }
}

impl DecodeWorker {
    /// A worker for a runner with `info`. A sequence whose hand-off failed is prefilled again `chunk` tokens a step;
    /// `eog` are the model's end-of-generation tokens.
    pub fn new(info: &RunnerInfo, chunk: u32, eog: &[Token]) -> Self {
        assert!(chunk > 0 && chunk <= info.n_batch, "chunk {chunk} for batches of {}", info.n_batch);
        Self {
            chunk,
            contiguous: info.contiguous_slots,
            replays: info.replays,
            eog: eog.to_vec(),
            slots: (0..info.n_slots).map(|_| None).collect(),
            incoming: VecDeque::new(),
            cancelled: Vec::new(),
            moving: Vec::new(),
            n_step_retries: 0,
            lost: false,
            next: Vec::new(),
            batch: Vec::new(),
            step: DecodeStep::default(),
            answers: None,
        }
    }

    /// Lets a finished request's keys and values, prompt and answer, go back to a prefill worker, with the picks of its
    /// answer where the runner taps every step. Before the first request only.
    #[must_use]
    pub fn returning(mut self, answers: Option<Answers>) -> Self {
        assert!(self.is_idle(), "set before the first request");
        self.answers = answers;
        self
    }

    /// Takes a prefilled request in; the dispatcher has booked its slot.
    pub fn admit(&mut self, handoff: Handoff) {
        assert!(self.n_held() < self.slots.len(), "more hand-offs than the {} slots", self.slots.len());
        self.incoming.push_back(handoff);
    }

    /// Ends a request at the next step, if it is still here.
    pub fn cancel(&mut self, id: RequestId, reason: FinishReason) {
        self.cancelled.push((id, reason));
    }

    /// Gives a sequence away at the next step, to go on elsewhere, if it is whole here then.
    pub fn migrate(&mut self, id: RequestId) {
        self.moving.push(id);
    }

    /// Requests held, those not yet imported included.
    pub fn n_held(&self) -> usize {
        self.incoming.len() + self.slots.iter().flatten().count()
    }

    /// Whether a step would do nothing.
    pub fn is_idle(&self) -> bool {
        self.n_held() == 0 && self.cancelled.is_empty() && self.moving.is_empty()
    }

    /// Runs one token of every resident sequence that is filled up; one that lost its worker runs what it had drawn again,
    /// token by token, if the runner replays. A lost worker gives back what still reaches it.
    pub fn step(&mut self, runner: &mut dyn ModelRunner, events: &mut Vec<WorkerEvent>) -> &DecodeStep {
        self.step.requests.clear();
        self.step.at.clear();
        self.step.picks.clear();
        self.step.n_imported = 0;
        self.step.n_refilled = 0;
        self.step.n_replayed = 0;
        self.step.n_relocated = 0;
        self.step.n_exported = 0;
        if self.lost {
            self.lose(LOST, events);
        } else if let Err(error) = self.run_step(runner, events) {
            self.lose(&error.to_string(), events);
        }
        &self.step
    }

    /// Gives back every request, for prefilling elsewhere, and reports the worker lost: its runner panicked, say.
    pub fn abandon(&mut self, message: &str, events: &mut Vec<WorkerEvent>) {
        self.lose(message, events);
    }

    fn take_all(&mut self) -> Vec<Job> {
        let resident = self.slots.iter_mut().filter_map(Option::take).map(|resident| resident.job);
        resident.chain(self.incoming.drain(..).map(|handoff| handoff.job)).collect()
    }

    fn run_step(&mut self, runner: &mut dyn ModelRunner, events: &mut Vec<WorkerEvent>) -> Result<(), RunError> {
        self.sweep_cancelled(runner, events)?;
        self.sweep_moving(runner, events)?;
        self.import(runner)?;
        self.refill(runner, events)?;
        if self.contiguous {
            self.close_ranks(runner)?;
        }
        self.plan();
        if self.batch.is_empty() {
            return Ok(());
        }
        let undrawn = match runner.decode(&self.batch, &mut self.next, &mut self.step.picks) {
            Ok(()) => Vec::new(),
            Err(RunError::Undrawn(undrawn)) => undrawn,
            Err(RunError::Restored(_)) if self.n_step_retries < MAX_STEP_RETRIES => {
                self.n_step_retries += 1;
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        self.n_step_retries = 0;
        self.apply(undrawn, runner, events)
    }

    fn plan(&mut self) {
        self.batch.clear();
        for (index, resident) in self.slots.iter().enumerate() {
            if let Some(resident) = resident
                && resident.n_filled >= resident.n_prefill(self.replays)
            {
                let (pos, draws) = (resident.n_filled, resident.is_ready());
                self.batch.push(DecodeItem { slot: Slot(index as u32), token: resident.job.token(pos), pos, draws });
            }
        }
    }

    /// Takes in what a step drew; what drew nothing goes back.
    fn apply(
        &mut self,
        mut undrawn: Vec<(Slot, String)>,
        runner: &mut dyn ModelRunner,
        events: &mut Vec<WorkerEvent>,
    ) -> Result<(), RunError> {
        assert_eq!(self.next.len(), self.batch.len(), "one token drawn for each of the batch");
        let n_ctx_slot = runner.info().n_ctx_slot;
        for (row, (item, &token)) in self.batch.iter().zip(&self.next).enumerate() {
            let place = &mut self.slots[item.slot.index()];
            let resident = place.as_mut().expect("planned");
            resident.n_filled += 1;
            self.step.requests.push(resident.job.id);
            self.step.at.push(item.pos - resident.job.request.prompt.len() as u32);
            if let Some(answers) = self.answers.as_ref().filter(|_| !self.step.picks.is_empty()) {
                for &layer in &*answers.layers {
                    resident.picked.extend_from_slice(self.step.picks.row(row, layer as usize));
                }
            }
            if !item.draws {
                self.step.n_replayed += 1;
                continue;
            }
            if let Some(at) = undrawn.iter().position(|(slot, _)| *slot == item.slot) {
                let job = place.take().expect("planned").job;
                events.push(WorkerEvent::Returned { job, error: undrawn.swap_remove(at).1 });
                runner.close(item.slot)?;
                continue;
            }
            let logprobs = logprobs(&resident.job, item.slot, runner);
            if let Some(reason) = draw(&mut resident.job, token, logprobs, &self.eog, n_ctx_slot, events) {
                let resident = place.take().expect("planned");
                events.extend(self.answers.as_ref().and_then(|answers| answers.take(&resident, item.slot, runner)));
                let job = resident.job;
                events.push(WorkerEvent::Finished { id: job.id, reason, usage: job.usage() });
                runner.close(item.slot)?;
            }
        }
        Ok(())
    }

    /// Takes waiting hand-offs into the lowest free slots. One that does not arrive whole is prefilled again here.
    fn import(&mut self, runner: &mut dyn ModelRunner) -> Result<(), RunError> {
        while let Some(free) = self.slots.iter().position(Option::is_none) {
            let Some(Handoff { job, state, .. }) = self.incoming.pop_front() else { break };
            let slot = Slot(free as u32);
            // The job takes its place first: whatever fails below, it is among those the worker gives back.
            let request = Arc::clone(&job.request);
            let resident = self.slots[free].insert(Resident {
                job,
                n_filled: state.n_tokens,
                n_base: state.n_tokens,
                picked: Vec::new(),
            });
            runner.open(slot, &request.sampling, &resident.job.generated)?;
            match runner.import(slot, &state) {
                Ok(()) => self.step.n_imported += 1,
                Err(RunError::Restored(_)) => {
                    resident.n_filled = 0;
                    resident.n_base = resident.n_prefill(self.replays);
                    self.step.n_refilled += 1;
                    runner.close(slot)?;
                    runner.open(slot, &request.sampling, &resident.job.generated)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Runs the next chunk of each sequence that is not whole yet. One that can not be filled up here goes back.
    fn refill(&mut self, runner: &mut dyn ModelRunner, events: &mut Vec<WorkerEvent>) -> Result<(), RunError> {
        for (index, place) in self.slots.iter_mut().enumerate() {
            let Some(resident) = place else { continue };
            let n_prefill = resident.n_prefill(self.replays);
            if resident.n_filled >= n_prefill {
                continue;
            }
            let slot = Slot(index as u32);
            let end = ((resident.n_filled / self.chunk + 1) * self.chunk).min(n_prefill);
            let tokens = resident.job.tokens(resident.n_filled, end);
            match runner.prefill(slot, &tokens, resident.n_filled, false, None) {
                Ok(_) => resident.n_filled = end,
                Err(RunError::Restored(error)) => {
                    let job = place.take().expect("a resident").job;
                    events.push(WorkerEvent::Returned { job, error });
                    runner.close(slot)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Moves sequences so that the batch sits in neighbouring slots: llama.cpp cuts a batch with gaps into several
    /// passes over the weights (`split_equal` of the pinned revision).
    fn close_ranks(&mut self, runner: &mut dyn ModelRunner) -> Result<(), RunError> {
        let occupied: Vec<bool> = self.slots.iter().map(Option::is_some).collect();
        for (from, to) in compact::moves(&occupied) {
            match runner.relocate(Slot(from as u32), Slot(to as u32)) {
                Ok(()) => {}
                // Still correct, only slower: the step runs with the gap.
                Err(RunError::Restored(_)) => break,
                Err(error) => return Err(error),
            }
            self.slots[to] = self.slots[from].take();
            self.step.n_relocated += 1;
        }
        Ok(())
    }

    fn sweep_cancelled(&mut self, runner: &mut dyn ModelRunner, events: &mut Vec<WorkerEvent>) -> Result<(), RunError> {
        for (id, reason) in std::mem::take(&mut self.cancelled) {
            if let Some(at) = self.incoming.iter().position(|handoff| handoff.job.id == id) {
                if let Some(handoff) = self.incoming.remove(at) {
                    events.push(WorkerEvent::Finished { id, reason, usage: handoff.job.usage() });
                }
            } else if let Some(at) = self.slots.iter().position(|slot| slot.as_ref().is_some_and(|r| r.job.id == id)) {
                if let Some(resident) = self.slots[at].take() {
                    events.push(WorkerEvent::Finished { id, reason, usage: resident.job.usage() });
                }
                runner.close(Slot(at as u32))?;
            }
        }
        Ok(())
    }

    /// Gives sequences away between two tokens: all but the last drawn one are in the slot. One that is not whole stays.
    fn sweep_moving(&mut self, runner: &mut dyn ModelRunner, events: &mut Vec<WorkerEvent>) -> Result<(), RunError> {
        for id in std::mem::take(&mut self.moving) {
            let is_here = |slot: &Option<Resident>| slot.as_ref().is_some_and(|resident| resident.job.id == id);
            let Some(at) = self.slots.iter().position(is_here) else {
                if self.incoming.iter().any(|handoff| handoff.job.id == id) {
                    events.push(WorkerEvent::Stayed { id });
                }
                continue;
            };
            let slot = Slot(at as u32);
            let is_ready = self.slots[at].as_ref().is_some_and(Resident::is_ready);
            match is_ready.then(|| runner.export(slot)) {
                Some(Ok(state)) => {
                    let mut job = self.slots[at].take().expect("found").job;
                    job.n_moves += 1;
                    self.step.n_exported += 1;
                    events.push(WorkerEvent::Moved(Handoff { job, state, counts: None }));
                    runner.close(slot)?;
                }
                None | Some(Err(RunError::Restored(_))) => events.push(WorkerEvent::Stayed { id }),
                Some(Err(error)) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reports the loss first, so that nothing that is given back is sent here again.
    fn lose(&mut self, message: &str, events: &mut Vec<WorkerEvent>) {
        if !self.lost {
            self.lost = true;
            events.push(WorkerEvent::Lost { error: message.to_owned() });
        }
        self.moving.clear();
        for job in self.take_all() {
            events.push(WorkerEvent::Returned { job, error: message.to_owned() });
        }
    }
}
