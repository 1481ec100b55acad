//! A workload made ready for a model.
//!
//! Never runs anything.

use std::{fs::File, io::Read, path::Path, sync::Arc, time::Duration};

use sha2::{Digest, Sha256};

use super::BenchParams;
use crate::{
    bench::{BenchError, BenchRequest, workload::WorkloadItem},
    engine::LoadedModel,
    types::{Request, SamplingParams},
};

/// The lines whose prompts have at most so many tokens.
pub(super) fn short(
    items: Vec<WorkloadItem>,
    max_prompt: usize,
    model: &LoadedModel,
) -> Result<Vec<WorkloadItem>, BenchError> {
    let tokenizer = model.tokenizer();
    let mut shortest = usize::MAX;
    let mut kept = Vec::new();
    for item in items {
        let prompt = tokenizer.tokenize(&item.prompt).map_err(|error| BenchError::Prompt(item.id.clone(), error))?;
        shortest = shortest.min(prompt.len());
        if prompt.len() <= max_prompt {
            kept.push(item);
        }
    }
    if kept.is_empty() {
        return Err(BenchError::AllTooLong { max_prompt, shortest });
    }
    Ok(kept)
}

/// The workload's requests with their arrival times. Every output has exactly its `max_tokens` tokens, so that all
/// policies do the same work.
pub(super) fn prepare(
    params: &BenchParams,
    model: &LoadedModel,
    items: &[WorkloadItem],
) -> Result<Vec<BenchRequest>, BenchError> {
    let tokenizer = model.tokenizer();
    let n_ctx_slot = model.n_ctx_slot(&params.config);
    let times = params.arrivals.times(items.len(), params.seed)?;
    let request = |(index, (item, arrival)): (usize, (&WorkloadItem, Duration))| {
        let prompt = tokenizer.tokenize(&item.prompt).map_err(|error| BenchError::Prompt(item.id.clone(), error))?;
        let max_tokens = params.output_tokens.or(item.max_tokens).unwrap_or(params.default_max_tokens);
        if prompt.len() + max_tokens as usize > n_ctx_slot as usize {
            let n = prompt.len();
            let why = format!(
                "{n} prompt tokens and {max_tokens} to generate do not fit a slot of {n_ctx_slot} tokens: shorten them \
                 or give each slot more context (--ctx)"
            );
            return Err(BenchError::Prompt(item.id.clone(), why));
        }
        let sampling = SamplingParams {
            temperature: params.temperature,
            seed: params.seed.wrapping_mul(0x1_0000_0001).wrapping_add(index as u64),
            ignore_eos: true,
            ..SamplingParams::default()
        };
        let request = Request { prompt, max_tokens, sampling, domain: item.domain.clone(), deadline: None };
        Ok(BenchRequest { name: item.id.clone(), arrival, request: Arc::new(request) })
    };
    items.iter().zip(times).enumerate().map(request).collect()
}

pub(super) fn file_sha256(path: &Path) -> Result<String, BenchError> {
    let fail = |source| BenchError::File { path: path.to_owned(), source };
    let mut file = File::open(path).map_err(fail)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut buffer).map_err(fail)?;
        if n == 0 {
            break;
        }
        hash.update(&buffer[..n]);
    }
    Ok(hash.finalize().iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}")))
}
