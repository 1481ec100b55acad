use std::sync::atomic::AtomicBool;

use super::{EngineConfig, EngineError, LoadedModel, RecordPrompt, Recorder};
use crate::{
    calibrate::CalibrationInput,
    trace::{RecordSettings, Trace, TraceHeader},
};

/// Prompt tokens a block has where nobody asked for another number.
pub const DEFAULT_BLOCK: u32 = 32;

/// Most slots a worker may have in an exact run, which needs a sequence of its own.
const MAX_EXACT_SLOTS: u32 = 255;

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
    let trace = record_trace(model, config, prompts, DEFAULT_BLOCK, &RecordSettings::default(), progress)?;
    Ok(CalibrationInput::of_trace(&trace, 0..trace.requests.len()))
}

/// Runs every prompt and its answer and keeps what was picked in memory. `progress` hears the number of finished
/// prompts.
pub fn record_trace(
    model: &LoadedModel,
    config: &EngineConfig,
    prompts: &[RecordPrompt],
    n_block: u32,
    settings: &RecordSettings,
    progress: &mut dyn FnMut(usize),
) -> Result<Trace, EngineError> {
    let recorder = model.recorder(config, n_block, settings)?;
    let header = recorder.header().clone();
    let mut requests = Vec::new();
    let prompts: Vec<&RecordPrompt> = prompts.iter().collect();
    recorder.run(&prompts, &AtomicBool::new(false), &mut |request, _| {
        requests.push(request);
        progress(requests.len());
        Ok(())
    })?;
    Ok(Trace { header, requests })
}

impl LoadedModel {
    /// A recorder of this model on the first prefill and the first decode worker of `config`, exact where they can be.
    /// Prompts are counted in blocks of `n_block` tokens, 1 to 128.
    ///
    /// Errors: a dense model, or one whose prompts show no picks.
    pub fn recorder(
        &self,
        config: &EngineConfig,
        n_block: u32,
        settings: &RecordSettings,
    ) -> Result<Recorder, EngineError> {
        let Some(shape) = self.moe_shape().cloned() else {
            return Err(EngineError::Calibration(
                "the model is dense: it has no experts, so there is nothing to record and nothing to calibrate"
                    .to_owned(),
            ));
        };
        if shape.usable().is_empty() {
            return Err(EngineError::Calibration(
                "the model's only MoE layer is its last, which shows no prompt's picks, so there is nothing to record \
                 and nothing to calibrate"
                    .to_owned(),
            ));
        }
        assert!((1..=128).contains(&n_block), "blocks of {n_block} tokens");
        let one = EngineConfig {
            prefill: config.prefill.first(),
            decode: config.decode.first(),
            n_slots: config.n_slots.min(MAX_EXACT_SLOTS),
            exact: true,
            ..config.clone()
        };
        let prefill = self.tap_runner(&one, settings.gates)?;
        let decode = self.decode_workers(&one, 1)?.remove(0).runner;
        let header = TraceHeader { shape, fingerprint: self.facts().fingerprint.clone(), n_block };
        Ok(Recorder::new(header, *settings, Box::new(prefill), decode, self.chunk(&one)))
    }
}
