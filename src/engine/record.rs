use std::sync::Arc;

use crate::{
    calibrate::CalibrationInput,
    engine::{EngineConfig, EngineError, LoadedModel},
    schedule::{DecodeWorker, Job, ModelRunner, PrefillWorker, WorkerEvent},
    signature::ExpertCounts,
    types::{MoeShape, Request, RequestId, SamplingParams, Token},
};

/// A prompt to record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordPrompt {
    /// Its name in the calibration input.
    pub id: String,
    /// Its label, if it has one.
    pub domain: Option<String>,
    /// The prompt, special tokens included.
    pub tokens: Vec<Token>,
    /// Tokens to generate; at least 2 are, because the first is drawn by the prefill.
    pub max_tokens: u32,
}

/// How the answers are sampled: as users sample, because greedy text of a small model loops. Seeded by the prompt's
/// place in the list.
const TEMPERATURE: f32 = 0.8;

/// Runs every prompt and its answer, counting the experts both pick: what [`crate::calibrate::fit`] learns from.
///
/// Prefill counts are those of the usable layers, decode counts those of all MoE layers. `progress` hears the number
/// of finished prompts.
pub fn record(
    model: &LoadedModel,
    config: &EngineConfig,
    prompts: &[RecordPrompt],
    progress: &mut dyn FnMut(usize),
) -> Result<CalibrationInput, EngineError> {
    let Some(shape) = model.moe_shape().cloned() else {
        return Err(EngineError::Calibration(
            "the model is dense: it has no experts, so there is nothing to calibrate".to_owned(),
        ));
    };
    let mut recorder = Recorder::new(model, config, &shape, prompts)?;
    recorder.run(progress)?;
    let mut input = CalibrationInput::new(shape, model.facts().fingerprint.clone());
    for (prompt, counts) in prompts.iter().zip(recorder.records) {
        let prefill = counts.prefill.ok_or_else(|| lost(&prompt.id, "the tap failed"))?;
        input.push(prompt.id.clone(), prompt.domain.clone(), &prefill, &counts.decode);
    }
    Ok(input)
}

struct Recorder<'a> {
    prompts: &'a [RecordPrompt],
    prefill: (PrefillWorker, Box<dyn ModelRunner>),
    decode: (DecodeWorker, Box<dyn ModelRunner>),
    records: Vec<Recorded>,
    n_done: usize,
}

#[derive(Clone)]
struct Recorded {
    prefill: Option<ExpertCounts>,
    decode: ExpertCounts,
}

impl<'a> Recorder<'a> {
    fn new(
        model: &LoadedModel,
        config: &EngineConfig,
        shape: &MoeShape,
        prompts: &'a [RecordPrompt],
    ) -> Result<Self, EngineError> {
        let one = EngineConfig { prefill: config.prefill.first(), decode: config.decode.first(), ..config.clone() };
        let prefill = model.prefill_workers(&one, &shape.usable())?.remove(0).runner;
        let decode = model.decode_workers(&one, true)?.remove(0).runner;
        let n_ctx_slot = prefill.info().n_ctx_slot as usize;
        for prompt in prompts {
            let n = prompt.tokens.len();
            if n == 0 || n >= n_ctx_slot {
                return Err(EngineError::Request(format!(
                    "prompt {}: {n} tokens do not fit a slot of {n_ctx_slot} with room for an answer; shorten it or \
                     give each slot more context (--ctx)",
                    prompt.id
                )));
            }
        }
        let all: Vec<u32> = (0..shape.layers.len() as u32).collect();
        let empty = Recorded { prefill: None, decode: ExpertCounts::new(&all, shape.n_expert) };
        Ok(Self {
            prompts,
            prefill: (PrefillWorker::new(prefill.info(), model.chunk(config), 1, &[], shape.n_expert), prefill),
            decode: (DecodeWorker::new(decode.info(), model.chunk(config), &[]), decode),
            records: vec![empty; prompts.len()],
            n_done: 0,
        })
    }

    fn run(&mut self, progress: &mut dyn FnMut(usize)) -> Result<(), EngineError> {
        let n_slots = self.decode.1.info().n_slots as usize;
        let mut events = Vec::new();
        let mut next = 0;
        while self.n_done < self.prompts.len() {
            while next < self.prompts.len() && self.decode.0.n_held() < n_slots {
                self.prefill.0.admit(job(next, &self.prompts[next]));
                next += 1;
                while !self.prefill.0.is_idle() {
                    self.prefill.0.step(self.prefill.1.as_mut(), &mut events);
                    self.take_in(&mut events)?;
                }
            }
            let step = self.decode.0.step(self.decode.1.as_mut(), &mut events);
            if !step.picks.is_empty() {
                for (item, id) in step.requests.iter().enumerate() {
                    let decode = &mut self.records[id.0 as usize].decode;
                    decode.add_tokens(1);
                    for layer in 0..step.picks.n_layer() {
                        decode.add(layer as u32, step.picks.row(item, layer));
                    }
                }
            }
            self.take_in(&mut events)?;
            progress(self.n_done);
        }
        Ok(())
    }

    fn take_in(&mut self, events: &mut Vec<WorkerEvent>) -> Result<(), EngineError> {
        for event in events.drain(..) {
            match event {
                WorkerEvent::Token { .. } => {}
                WorkerEvent::Prefilled(handoff) => {
                    self.records[handoff.job.id.0 as usize].prefill.clone_from(&handoff.counts);
                    self.decode.0.admit(handoff);
                }
                WorkerEvent::Finished { .. } => self.n_done += 1,
                WorkerEvent::Returned { job, error } => {
                    return Err(lost(&self.prompts[job.id.0 as usize].id, &error));
                }
                WorkerEvent::Lost { error } => return Err(EngineError::Run(error)),
            }
        }
        Ok(())
    }
}

fn job(index: usize, prompt: &RecordPrompt) -> Job {
    let sampling =
        SamplingParams { temperature: TEMPERATURE, seed: index as u64, ignore_eos: true, ..SamplingParams::default() };
    let request = Request {
        prompt: prompt.tokens.clone(),
        max_tokens: prompt.max_tokens.max(2),
        sampling,
        domain: prompt.domain.clone(),
        deadline: None,
    };
    Job::new(RequestId(index as u64), Arc::new(request))
}

fn lost(id: &str, error: &str) -> EngineError {
    EngineError::Run(format!("prompt {id} could not be recorded: {error}"))
}
