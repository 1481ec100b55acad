use std::collections::VecDeque;

use crate::{
    kv::ChunkCounts,
    schedule::{
        Handoff, Job, Leftover, ModelRunner, PrefixCache, PrefixConfig, PrefixStore, RunError, RunnerInfo, WorkerEvent,
    },
    types::{FinishReason, RequestId, Slot, Token, TokenLogprobs},
};

/// Chunks a prompt may be passed over by shorter ones before it is next.
const MAX_PASSED_OVER: u32 = 8;

/// One prefill worker: runs prompts chunk by chunk, counting the experts they pick, and hands each on with its first
/// token.
///
/// A chunk ends at an absolute multiple of the chunk length, whatever the load, so that a prompt is always cut at the
/// same places. Up to `n_parallel` prompts are open at once and the one with the fewest tokens left runs next, so a
/// long prompt delays a short one by a chunk; a prompt passed over eight times runs next. What a prompt begins with is
/// not computed if a slot still holds it.
#[derive(Debug)]
pub struct PrefillWorker {
    chunk: u32,
    replays: bool,
    eog: Vec<Token>,
    cache: PrefixCache,
    open: Vec<Option<Open>>,
    waiting: VecDeque<Job>,
    cancelled: Vec<(RequestId, FinishReason)>,
    left: Vec<Leftover>,
    lost: bool,
}

#[derive(Debug)]
struct Open {
    job: Job,
    /// Tokens to prefill.
    n_prefill: u32,
    /// Its place in the worker, once it has begun.
    slot: Option<Slot>,
    n_done: u32,
    n_passed_over: u32,
}

/// The chunk a step runs.
struct Plan {
    /// Which of the open prompts.
    index: usize,
    slot: Slot,
    tokens: Vec<Token>,
    pos: u32,
    /// Nothing is left after it.
    last: bool,
    /// It draws the request's first token.
    draws: bool,
}

impl PrefillWorker {
    /// A worker for a runner with `info`, whose prompts are cut every `chunk` tokens. `eog` are the model's
    /// end-of-generation tokens, `n_expert` its experts a layer (0: dense).
    pub fn new(info: &RunnerInfo, chunk: u32, n_parallel: u32, eog: &[Token], n_expert: u32) -> Self {
        assert!(chunk > 0 && chunk <= info.n_batch, "chunk {chunk} for batches of {}", info.n_batch);
        let n_parallel = n_parallel.clamp(1, info.n_slots);
        Self {
            chunk,
            replays: info.replays,
            eog: eog.to_vec(),
            cache: PrefixCache::new(PrefixConfig::default(), info, n_expert),
            open: (0..n_parallel).map(|_| None).collect(),
            waiting: VecDeque::new(),
            cancelled: Vec::new(),
            left: Vec::new(),
            lost: false,
        }
    }

    /// Keeps what finished prompts leave behind, for others that begin alike. Before the first request only.
    #[must_use]
    pub fn caching(mut self, config: PrefixConfig, info: &RunnerInfo, n_expert: u32) -> Self {
        assert!(self.is_idle(), "the cache is set before the first request");
        self.cache = PrefixCache::new(config, info, n_expert);
        self
    }

    /// Lets prefixes that must make room go to `store`, and come back from there.
    #[must_use]
    pub fn spilling(mut self, store: Option<Box<dyn PrefixStore>>) -> Self {
        self.cache.spill_to(store);
        self
    }

    /// Keeps a prefix for good, from the first prompt on that begins with it. Errors: why it can not be kept.
    pub fn pin(&mut self, tokens: &[Token]) -> Result<(), String> {
        self.cache.pin(tokens, self.open.len())
    }

    /// Takes in what a finished request left on its decode worker, at the next step.
    pub fn take_in(&mut self, left: Leftover) {
        self.left.push(left);
    }

    /// Stores what the slots hold, where that outlives the process. Only after the last step.
    pub fn save(&mut self, runner: &mut dyn ModelRunner) {
        if !self.lost {
            self.cache.save(runner);
        }
    }

    /// What is in the worker's slots.
    pub fn cache(&self) -> &PrefixCache {
        &self.cache
    }

    /// Takes a request in.
    pub fn admit(&mut self, job: Job) {
        self.waiting.push_back(job);
    }

    /// Ends a request at the next step, if it is still here.
    pub fn cancel(&mut self, id: RequestId, reason: FinishReason) {
        self.cancelled.push((id, reason));
    }

    /// Whether a step would do nothing.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty()
            && self.cancelled.is_empty()
            && self.left.is_empty()
            && self.open.iter().all(Option::is_none)
    }

    /// Runs one chunk of one prompt; how many tokens it had. A lost worker gives back what still reaches it.
    pub fn step(&mut self, runner: &mut dyn ModelRunner, events: &mut Vec<WorkerEvent>) -> u32 {
        if self.lost {
            self.lose(LOST, events);
            return 0;
        }
        self.sweep_cancelled(runner, events);
        for left in std::mem::take(&mut self.left) {
            if !self.lost
                && let Err(error) = self.cache.take_in(&left, runner)
            {
                self.lose(&error.to_string(), events);
            }
        }
        let plan = self.plan(runner, events);
        let n_run = plan.as_ref().map_or(0, |plan| plan.tokens.len() as u32);
        if let Some(plan) = plan {
            let mut counts = self.cache.chunk_counts(plan.slot, plan.pos, plan.pos + plan.tokens.len() as u32);
            let run = runner.prefill(plan.slot, &plan.tokens, plan.pos, plan.draws, counts.as_mut());
            self.apply(&plan, run, counts.as_ref(), runner, events);
        }
        events.extend(self.cache.take_change().map(WorkerEvent::Cache));
        if cfg!(debug_assertions) && self.is_idle() && !self.lost {
            self.cache.check_integrity();
            self.cache.check_against(runner);
        }
        n_run
    }

    /// Prompt tokens a step runs at most.
    pub fn chunk(&self) -> u32 {
        self.chunk
    }

    /// Gives back every request, for prefilling elsewhere, and reports the worker lost: its runner panicked, say.
    pub fn abandon(&mut self, message: &str, events: &mut Vec<WorkerEvent>) {
        self.lose(message, events);
    }

    fn take_all(&mut self) -> Vec<Job> {
        let open = self.open.iter_mut().filter_map(Option::take).map(|open| open.job);
        open.chain(self.waiting.drain(..)).collect()
    }

    /// The prompt, or, for a request that lost its decode worker, all but its last drawn token, which the next decode
    /// worker runs as the lost one would have; or the prompt alone, if that one must run every drawn token so.
    fn n_prefill(&self, job: &Job) -> u32 {
        if self.replays || job.generated.is_empty() { job.request.prompt.len() as u32 } else { job.n_tokens() - 1 }
    }

    fn plan(&mut self, runner: &mut dyn ModelRunner, events: &mut Vec<WorkerEvent>) -> Option<Plan> {
        for index in 0..self.open.len() {
            if self.open[index].is_some() {
                continue;
            }
            let Some(job) = self.waiting.pop_front() else { break };
            let n_prefill = self.n_prefill(&job);
            self.open[index] = Some(Open { job, n_prefill, slot: None, n_done: 0, n_passed_over: 0 });
        }
        let candidates = || self.open.iter().enumerate().filter_map(|(i, open)| Some((i, open.as_ref()?)));
        let overdue = candidates().find(|(_, open)| open.n_passed_over >= MAX_PASSED_OVER).map(|(i, _)| i);
        let shortest = || candidates().min_by_key(|(i, open)| (open.n_prefill - open.n_done, *i)).map(|(i, _)| i);
        let chosen = overdue.or_else(shortest)?;
        for (index, open) in self.open.iter_mut().enumerate() {
            if let Some(open) = open {
                open.n_passed_over = if index == chosen { 0 } else { open.n_passed_over + 1 };
            }
        }
        let slot = self.begin(chosen, runner, events)?;
        let open = self.open[chosen].as_ref()?;
        let end = ((open.n_done / self.chunk + 1) * self.chunk).min(open.n_prefill);
        Some(Plan {
            index: chosen,
            slot,
            tokens: open.job.tokens(open.n_done, end),
            pos: open.n_done,
            last: end == open.n_prefill,
            draws: end == open.n_prefill && open.job.generated.is_empty(),
        })
    }

    /// The chosen prompt's slot; it gets one, and what is known of it, when it first runs. None if that failed.
    fn begin(&mut self, index: usize, runner: &mut dyn ModelRunner, events: &mut Vec<WorkerEvent>) -> Option<Slot> {
        let open = self.open[index].as_mut().expect("chosen");
        if open.slot.is_some() {
            return open.slot;
        }
        let tokens = open.job.tokens(0, open.n_prefill);
        let place = match self.cache.begin(&tokens, open.job.fresh, runner) {
            Ok(place) => place,
            Err(error) => {
                self.give_back(index, &error, events);
                return None;
            }
        };
        open.slot = Some(place.slot);
        open.n_done = place.used.n_tokens;
        open.job.n_cached = place.used.n_tokens.min(open.job.request.prompt.len() as u32);
        open.job.cache = place.used;
        let opened = runner.open(place.slot, &open.job.request.sampling, &open.job.generated);
        if let Err(error) = opened {
            self.give_back(index, &error, events);
            self.discard(place.slot, runner, events);
            return None;
        }
        Some(place.slot)
    }

    fn apply(
        &mut self,
        plan: &Plan,
        run: Result<Option<Token>, RunError>,
        counts: Option<&ChunkCounts>,
        runner: &mut dyn ModelRunner,
        events: &mut Vec<WorkerEvent>,
    ) {
        let index = plan.index;
        match run {
            Ok(token) => {
                assert_eq!(token.is_some(), plan.draws, "a token is drawn when it is asked for");
                self.cache.ran(plan.slot, plan.pos, &plan.tokens, counts);
                self.cache.checkpoint(plan.slot, self.chunk, runner);
                self.open[index].as_mut().expect("planned").n_done += plan.tokens.len() as u32;
                if plan.last {
                    self.hand_on(index, plan.slot, token, runner, events);
                }
            }
            Err(error) => {
                self.give_back(index, &error, events);
                self.discard(plan.slot, runner, events);
            }
        }
    }

    /// The prompt is done: streams its first token, if one was drawn, and lets the sequence go.
    fn hand_on(
        &mut self,
        index: usize,
        slot: Slot,
        token: Option<Token>,
        runner: &mut dyn ModelRunner,
        events: &mut Vec<WorkerEvent>,
    ) {
        let Open { job, n_done, .. } = self.open[index].as_mut().expect("planned");
        let n_tokens = *n_done;
        let logprobs = logprobs(job, slot, runner);
        let end = token.and_then(|token| draw(job, token, logprobs, &self.eog, runner.info().n_ctx_slot, events));
        if let Some(reason) = end {
            events.push(WorkerEvent::Finished { id: job.id, reason, usage: job.usage() });
            self.open[index] = None;
        } else {
            match runner.export(slot) {
                Ok(state) => {
                    assert_eq!(state.n_tokens, n_tokens, "exported length");
                    let Open { job, .. } = self.open[index].take().expect("planned");
                    // None where the tap failed: counts that miss tokens would give a wrong signature.
                    let counts = self.cache.counts(slot);
                    assert!(counts.as_ref().is_none_or(|counts| counts.n_tokens() == n_tokens), "counted tokens");
                    events.push(WorkerEvent::Prefilled(Handoff { job, state, counts }));
                }
                Err(error) => self.give_back(index, &error, events),
            }
        }
        self.close(slot, runner, events);
    }

    fn sweep_cancelled(&mut self, runner: &mut dyn ModelRunner, events: &mut Vec<WorkerEvent>) {
        for (id, reason) in std::mem::take(&mut self.cancelled) {
            let job = if let Some(at) = self.waiting.iter().position(|job| job.id == id) {
                self.waiting.remove(at)
            } else if let Some(at) = self.open.iter().position(|open| open.as_ref().is_some_and(|o| o.job.id == id)) {
                let open = self.open[at].take();
                if let Some(slot) = open.as_ref().and_then(|open| open.slot) {
                    self.close(slot, runner, events);
                }
                open.map(|open| open.job)
            } else {
                None
            };
            if let Some(job) = job {
                events.push(WorkerEvent::Finished { id, reason, usage: job.usage() });
            }
        }
    }

    /// One request could not run here; after a fatal error none of the others can either.
    fn give_back(&mut self, index: usize, error: &RunError, events: &mut Vec<WorkerEvent>) {
        let Open { job, .. } = self.open[index].take().expect("an open prompt");
        if let RunError::Fatal(message) = error {
            self.lose(message, events);
        }
        events.push(WorkerEvent::Returned { job, error: error.to_string() });
    }

    /// A slot's prompt is over.
    fn close(&mut self, slot: Slot, runner: &mut dyn ModelRunner, events: &mut Vec<WorkerEvent>) {
        if !self.lost
            && let Err(error) = self.cache.end(slot, runner)
        {
            self.lose(&error.to_string(), events);
        }
    }

    /// A slot's prompt failed.
    fn discard(&mut self, slot: Slot, runner: &mut dyn ModelRunner, events: &mut Vec<WorkerEvent>) {
        if !self.lost
            && let Err(error) = self.cache.discard(slot, runner)
        {
            self.lose(&error.to_string(), events);
        }
    }

    /// Reports the loss first, so that nothing that is given back is sent here again.
    fn lose(&mut self, message: &str, events: &mut Vec<WorkerEvent>) {
        self.left.clear();
        if !self.lost {
            self.lost = true;
            events.push(WorkerEvent::Lost { error: message.to_owned() });
        }
        for job in self.take_all() {
            events.push(WorkerEvent::Returned { job, error: message.to_owned() });
        }
    }
}

/// Why a lost worker gives a request back that reached it late.
pub(super) const LOST: &str = "the worker is lost";

/// How likely the last draw of a slot was, if its request asks.
pub(super) fn logprobs(job: &Job, slot: Slot, runner: &mut dyn ModelRunner) -> Option<Box<TokenLogprobs>> {
    job.request.sampling.n_logprobs.and_then(|_| runner.take_logprobs(slot))
}

/// Takes in a drawn token: streams it, or says why the request ends.
pub(super) fn draw(
    job: &mut Job,
    token: Token,
    logprobs: Option<Box<TokenLogprobs>>,
    eog: &[Token],
    n_ctx_slot: u32,
    events: &mut Vec<WorkerEvent>,
) -> Option<FinishReason> {
    if !job.request.sampling.ignore_eos && eog.contains(&token) {
        return Some(FinishReason::Stop);
    }
    events.push(WorkerEvent::Token { id: job.id, token, logprobs, n_cached: job.n_cached });
    job.generated.push(token);
    let full = job.generated.len() as u32 >= job.request.max_tokens || job.n_tokens() > n_ctx_slot;
    full.then_some(FinishReason::Length)
}
