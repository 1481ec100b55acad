//! Runs prompts and their answers, one prefill and one decode worker, and tells which experts both picked.
//!
//! Never tells requests in another order than the prompts', so that a recording that was killed holds the first ones.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{EngineError, TraceWriter};
use crate::{
    schedule::{DecodeWorker, Handoff, Job, ModelRunner, RunError, WorkerEvent},
    trace::{GateSums, PromptKey, PromptPicks, RecordSettings, TraceHeader, TraceRequest},
    types::{Request, RequestId, SamplingParams, Slot, Token, shown},
};

/// A prompt to record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordPrompt {
    /// Its name, unique among the prompts.
    pub id: String,
    /// Its label, if it has one.
    pub domain: Option<String>,
    /// The prompt, special tokens included.
    pub tokens: Vec<Token>,
    /// Tokens to generate; at least 2 are, because the first is drawn by the prefill, and no more than fit the slot.
    pub max_tokens: u32,
}

/// What the tokens of a prompt's chunk picked in one layer.
#[derive(Debug, Clone, Copy)]
pub struct PromptRows<'a> {
    /// The MoE layer.
    pub layer: u32,
    /// k experts for each token, in order.
    pub experts: &'a [u32],
    /// E probabilities for each token; none where the runner does not read the gate.
    pub probabilities: &'a [f32],
    /// E logits for each token; none where the runner does not read the gate.
    pub logits: &'a [f32],
}

/// A runner that tells the picks of every token of a prompt.
pub trait TapRunner: ModelRunner {
    /// Runs a chunk as [`ModelRunner::prefill`] does, and tells each usable layer's picks once the chunk is run. A
    /// failed tap is an error.
    fn prefill_rows(
        &mut self,
        slot: Slot,
        tokens: &[Token],
        pos: u32,
        last: bool,
        sink: &mut dyn FnMut(PromptRows<'_>),
    ) -> Result<Option<Token>, RunError>;
}

/// How far a recording into a file came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordSummary {
    /// Prompts asked for.
    pub n_prompts: usize,
    /// Those that were in the file before.
    pub n_before: usize,
    /// Those recorded now.
    pub n_new: usize,
    /// Requests in the file, of other prompts too.
    pub n_in_file: usize,
}

impl RecordSummary {
    /// Whether every prompt is in the file.
    pub fn is_whole(&self) -> bool {
        self.n_before + self.n_new == self.n_prompts
    }
}

/// One recording. What it tells depends on the model, the settings and the prompts alone where the workers are exact.
///
/// ```
/// use std::sync::atomic::AtomicBool;
///
/// use eldr::{
///     EngineError,
///     engine::{PromptRows, RecordPrompt, RecordSummary, Recorder, TapRunner},
///     schedule::{FakeModel, FakeRunner, ModelRunner, RunError, RunnerLayer},
///     trace::{RecordSettings, TraceHeader},
///     types::{MoeShape, Slot, Token},
/// };
/// # struct Tapped(FakeModel, FakeRunner);
/// # impl RunnerLayer for Tapped {
/// #     fn inner(&self) -> &dyn ModelRunner {
/// #         &self.1
/// #     }
/// #     fn inner_mut(&mut self) -> &mut dyn ModelRunner {
/// #         &mut self.1
/// #     }
/// # }
///
/// // A prefill runner that can tell the picks of every token; here a toy model's.
/// impl TapRunner for Tapped {
///     fn prefill_rows(
///         &mut self,
///         slot: Slot,
///         tokens: &[Token],
///         pos: u32,
///         last: bool,
///         sink: &mut dyn FnMut(PromptRows<'_>),
///     ) -> Result<Option<Token>, RunError> {
///         let next = ModelRunner::prefill(&mut self.1, slot, tokens, pos, last, None)?;
///         let experts: Vec<u32> = tokens.iter().flat_map(|&token| self.0.picks(token, 0)).collect();
///         sink(PromptRows { layer: 0, experts: &experts, probabilities: &[], logits: &[] });
///         Ok(next)
///     }
/// }
///
/// # fn main() -> Result<(), EngineError> {
/// let model = FakeModel { n_vocab: 50, n_layer: 2, n_expert: 8, n_expert_used: 2 };
/// let runner = || FakeRunner::new(model, 4, 256, Vec::new());
/// let shape = MoeShape { layers: vec![0, 1], n_layer: 2, n_expert: 8, n_expert_used: 2 };
/// let header = TraceHeader { shape, fingerprint: "toy".to_owned(), n_block: 32 };
/// let prefill = Box::new(Tapped(model, runner()));
/// let recorder = Recorder::new(header, RecordSettings::default(), prefill, Box::new(runner()), 16);
/// let prompt = RecordPrompt { id: "a".to_owned(), domain: None, tokens: vec![1, 2, 3], max_tokens: 4 };
/// let mut n_prompt = 0;
/// recorder.run(&[&prompt], &AtomicBool::new(false), &mut |request, _| {
///     n_prompt += request.n_prompt;
///     Ok(())
/// })?;
/// assert_eq!(n_prompt, 3);
/// let whole = RecordSummary { n_prompts: 1, n_before: 0, n_new: 1, n_in_file: 1 };
/// assert!(whole.is_whole());
/// # Ok(())
/// # }
/// ```
pub struct Recorder {
    header: TraceHeader,
    settings: RecordSettings,
    chunk: u32,
    prefill: Box<dyn TapRunner>,
    decode: Box<dyn ModelRunner>,
}

impl Recorder {
    /// A recorder of the model in `header`. `prefill` taps the usable layers, and the gate if the settings say so;
    /// `decode` taps every layer. Prompts are cut every `chunk` tokens.
    pub fn new(
        header: TraceHeader,
        settings: RecordSettings,
        prefill: Box<dyn TapRunner>,
        decode: Box<dyn ModelRunner>,
        chunk: u32,
    ) -> Self {
        Self { header, settings, chunk, prefill, decode }
    }

    /// What holds for every request it tells.
    pub fn header(&self) -> &TraceHeader {
        &self.header
    }

    /// What is asked for `prompt`. Errors: a prompt that does not fit a slot with room for an answer.
    pub fn key(&self, prompt: &RecordPrompt) -> Result<PromptKey, EngineError> {
        let (n, n_ctx_slot) = (prompt.tokens.len(), self.prefill.info().n_ctx_slot);
        if n == 0 || n >= n_ctx_slot as usize {
            return Err(EngineError::Request(format!(
                "prompt \"{}\": {n} tokens do not fit a slot of {n_ctx_slot} with room for an answer; shorten it or give \
                 each slot more context (--ctx)",
                shown(&prompt.id)
            )));
        }
        let max_tokens = prompt.max_tokens.clamp(2, n_ctx_slot - n as u32 + 1);
        Ok(PromptKey::new(&prompt.tokens, max_tokens, prompt.domain.as_deref()))
    }

    /// Adds to the trace `path` every prompt that is not in it, and makes the trace if there is none. Ends early, with
    /// every finished request in the file, when `stop` is set; what was interrupted so may hold them in another order. `progress` hears how many prompts are in the file.
    ///
    /// Errors: ids that are there twice, prompts that do not fit a slot, a trace that can not be gone on with.
    pub fn record_into(
        self,
        path: &Path,
        prompts: &[RecordPrompt],
        stop: &AtomicBool,
        progress: &mut dyn FnMut(usize),
    ) -> Result<RecordSummary, EngineError> {
        let keys = prompts.iter().map(|prompt| self.key(prompt)).collect::<Result<Vec<_>, _>>()?;
        check_ids(prompts)?;
        let mut writer = TraceWriter::open(path, &self.header, &self.settings)?;
        let mut missing = Vec::new();
        for (prompt, key) in prompts.iter().zip(keys) {
            match writer.key(&prompt.id) {
                None => missing.push(prompt),
                Some(known) if known == key => {}
                Some(_) => {
                    return Err(EngineError::Request(format!(
                        "prompt \"{}\" is in the trace `{}` already, with another text, domain or length; give it another \
                         id or choose another output",
                        shown(&prompt.id),
                        path.display()
                    )));
                }
            }
        }
        let n_before = prompts.len() - missing.len();
        let mut n_new = 0;
        progress(n_before);
        self.run(&missing, stop, &mut |request, key| {
            writer.append(&request, key)?;
            n_new += 1;
            progress(n_before + n_new);
            Ok(())
        })?;
        writer.sync()?;
        Ok(RecordSummary { n_prompts: prompts.len(), n_before, n_new, n_in_file: writer.n_recorded() })
    }

    /// Tells `sink` each prompt's request, in order, as soon as it and all before it are done, until `stop` is set; then
    /// those that are done although one before them is not.
    ///
    /// Errors: prompts that do not fit a slot, a worker or a tap that fails, and those of `sink`.
    pub fn run(
        self,
        prompts: &[&RecordPrompt],
        stop: &AtomicBool,
        sink: &mut dyn FnMut(TraceRequest, PromptKey) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let keys = prompts.iter().map(|prompt| self.key(prompt)).collect::<Result<Vec<_>, _>>()?;
        let worker = DecodeWorker::new(self.decode.info(), self.chunk, &[]);
        let run = Run { recorder: self, worker, prompts, open: BTreeMap::new(), done: BTreeMap::new() };
        run.finish(&keys, stop, sink)
    }
}

fn check_ids(prompts: &[RecordPrompt]) -> Result<(), EngineError> {
    let mut ids = BTreeSet::new();
    match prompts.iter().find(|prompt| !ids.insert(&prompt.id)) {
        Some(prompt) => {
            let id = shown(&prompt.id);
            Err(EngineError::Request(format!("two prompts have the id \"{id}\"; give each request its own")))
        }
        None => Ok(()),
    }
}

/// A recording that runs. Requests are numbered by their prompt's place.
struct Run<'a> {
    recorder: Recorder,
    worker: DecodeWorker,
    prompts: &'a [&'a RecordPrompt],
    open: BTreeMap<u64, TraceRequest>,
    /// Done before one that stands before them.
    done: BTreeMap<u64, TraceRequest>,
}

impl Run<'_> {
    fn finish(
        mut self,
        keys: &[PromptKey],
        stop: &AtomicBool,
        sink: &mut dyn FnMut(TraceRequest, PromptKey) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let n_slots = self.recorder.decode.info().n_slots as usize;
        let mut next = 0;
        for (place, key) in (0..).zip(keys) {
            let request = loop {
                if stop.load(Ordering::Relaxed) {
                    return self.give_up(keys, sink);
                }
                if let Some(request) = self.done.remove(&place) {
                    break request;
                }
                if next < self.prompts.len() && self.worker.n_held() < n_slots {
                    self.prefill(next)?;
                    next += 1;
                } else {
                    self.step()?;
                }
            };
            sink(request, *key)?;
        }
        Ok(())
    }

    /// Tells what is done already although one before it is not.
    fn give_up(
        self,
        keys: &[PromptKey],
        sink: &mut dyn FnMut(TraceRequest, PromptKey) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        for (place, request) in self.done {
            sink(request, keys[place as usize])?;
        }
        Ok(())
    }

    /// Runs a prompt and hands it to the decode worker.
    fn prefill(&mut self, place: usize) -> Result<(), EngineError> {
        let prompt = self.prompts[place];
        let (handoff, blocks, gates) = self.run_prompt(place).map_err(|error| lost(&prompt.id, &error))?;
        let request = TraceRequest {
            id: prompt.id.clone(),
            domain: prompt.domain.clone(),
            n_prompt: prompt.tokens.len() as u32,
            blocks,
            picks: Vec::new(),
            gates,
        };
        self.open.insert(place as u64, request);
        self.worker.admit(handoff);
        Ok(())
    }

    fn run_prompt(&mut self, place: usize) -> Result<(Handoff, Vec<u8>, Option<GateSums>), String> {
        let prompt = self.prompts[place];
        let Recorder { header, settings, chunk, prefill, .. } = &mut self.recorder;
        let (slot, n_prompt) = (Slot(0), prompt.tokens.len() as u32);
        let mut job = job(place, prompt, settings);
        let mut picks = PromptPicks::new(header, n_prompt, settings.gates);
        let failed = |error: RunError| error.to_string();
        prefill.open(slot, &job.request.sampling, &[]).map_err(failed)?;
        let mut pos = 0;
        while pos < n_prompt {
            let end = (pos + *chunk).min(n_prompt);
            let tokens = &prompt.tokens[pos as usize..end as usize];
            let drawn = prefill.prefill_rows(slot, tokens, pos, end == n_prompt, &mut |rows| {
                picks.add(rows.layer, rows.experts, rows.probabilities, rows.logits);
            });
            job.generated.extend(drawn.map_err(failed)?);
            pos = end;
        }
        let state = prefill.export(slot).map_err(failed)?;
        prefill.close(slot).map_err(failed)?;
        let (blocks, gates) = picks.finish().ok_or("the tap lost tokens of the prompt")?;
        Ok((Handoff { job, state, counts: None }, blocks, gates))
    }

    /// Runs a token of every open request.
    fn step(&mut self) -> Result<(), EngineError> {
        let mut events = Vec::new();
        let step = self.worker.step(self.recorder.decode.as_mut(), &mut events);
        for (item, id) in step.requests.iter().enumerate() {
            let request = self.open.get_mut(&id.0).expect("an open request");
            if step.picks.is_empty() {
                return Err(lost(&request.id, "the tap failed"));
            }
            for layer in 0..step.picks.n_layer() {
                request.picks.extend(step.picks.row(item, layer).iter().map(|&expert| expert as u16));
            }
        }
        for event in events {
            match event {
                WorkerEvent::Finished { id, .. } => {
                    let request = self.open.remove(&id.0).expect("an open request");
                    self.done.insert(id.0, request);
                }
                WorkerEvent::Returned { job, error } => {
                    return Err(lost(&self.prompts[job.id.0 as usize].id, &error));
                }
                WorkerEvent::Lost { error } => return Err(EngineError::Run(error)),
                WorkerEvent::Token { .. }
                | WorkerEvent::Prefilled(_)
                | WorkerEvent::Cache(_)
                | WorkerEvent::Left(_)
                | WorkerEvent::Moved(_)
                | WorkerEvent::Stayed { .. } => {}
            }
        }
        Ok(())
    }
}

fn job(place: usize, prompt: &RecordPrompt, settings: &RecordSettings) -> Job {
    let sampling = SamplingParams {
        temperature: settings.temperature,
        seed: settings.seed_of(&prompt.id),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let request = Request {
        prompt: prompt.tokens.clone(),
        max_tokens: prompt.max_tokens.max(2),
        sampling,
        domain: prompt.domain.clone(),
        deadline: None,
    };
    Job::new(RequestId(place as u64), Arc::new(request))
}

fn lost(id: &str, error: &str) -> EngineError {
    EngineError::Run(format!("prompt \"{}\" could not be recorded: {error}", shown(id)))
}
