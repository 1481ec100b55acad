//! A routing policy of your own: fill one worker before the next is used, so that idle ones can sleep.
//!
//! Runs on the fake model, so it needs no GGUF file: `cargo run --release --example custom_policy`.
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::{error::Error, sync::Arc};

use eldr::{
    engine::{Engine, EngineParts, EngineWorker, Tokenizer},
    route::{Decision, LeastLoaded, Reason, RouteError, RoutePolicy, RouteRequest, WorkerView},
    schedule::{DispatchLimits, FakeModel, FakeRunner, PrefixConfig},
    types::{Request, SamplingParams, Token},
};

/// The fullest worker that still has room.
struct Pack;

impl RoutePolicy for Pack {
    fn name(&self) -> &'static str {
        "pack"
    }

    fn select(&mut self, _: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
        let none = if workers.iter().any(|w| w.healthy) { RouteError::AllFull } else { RouteError::NoWorker };
        let eligible = workers.iter().filter(|w| w.eligible());
        let band = eligible.clone().count() as u32;
        // `min_by_key` keeps the first of equals: the lowest id.
        let worker = eligible.min_by_key(|w| w.n_slots - w.n_inflight).ok_or(none)?;
        let (reason, n_inflight) = (Reason::Load, worker.n_inflight);
        Ok(Decision {
            worker: worker.id,
            reason,
            similarity: None,
            best_similarity: None,
            band,
            n_inflight,
            marginal: None,
        })
    }
}

/// One token a byte.
struct Bytes;

impl Tokenizer for Bytes {
    fn tokenize(&self, text: &str) -> Result<Vec<Token>, String> {
        Ok(text.bytes().map(Token::from).collect())
    }

    fn piece(&self, token: Token) -> Vec<u8> {
        u8::try_from(token).into_iter().collect()
    }

    fn end_tokens(&self) -> &[Token] {
        &[0]
    }

    fn n_tokens(&self) -> u32 {
        256
    }
}

/// Requests each of four workers of four slots got, of eight that are served at once.
fn serve(policy: Box<dyn RoutePolicy>) -> Result<[u32; 4], Box<dyn Error>> {
    let model = FakeModel { n_vocab: 256, n_layer: 2, n_expert: 8, n_expert_used: 2 };
    let worker = |name: String| {
        let runner = Box::new(FakeRunner::new(model, 4, 4096, Vec::new()));
        EngineWorker { name, runner, permits: None }
    };
    let engine = Engine::start(EngineParts {
        prefill: vec![worker("prefill 0".to_owned())],
        decode: (0..4).map(|i| worker(format!("decode {i}"))).collect(),
        tokenizer: Arc::new(Bytes),
        policy,
        calibration: None,
        limits: DispatchLimits::default(),
        chunk: 128,
        n_expert: model.n_expert,
        prefix: PrefixConfig::default(),
    })?;
    let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::default() };
    let prompt = engine.tokenize("hello")?;
    let request = Request { prompt, max_tokens: 2000, sampling, domain: None, deadline: None };
    let streams: Vec<_> = (0..8).map(|_| engine.submit(request.clone())).collect::<Result<_, _>>()?;
    let mut n_requests = [0; 4];
    for stream in streams {
        let decision = stream.collect()?.decision.ok_or("the request was never routed")?;
        n_requests[decision.worker.index()] += 1;
    }
    Ok(n_requests)
}

fn main() -> Result<(), Box<dyn Error>> {
    for policy in [Box::new(LeastLoaded) as Box<dyn RoutePolicy>, Box::new(Pack)] {
        println!("{:12} requests a worker: {:?}", policy.name(), serve(policy)?);
    }
    Ok(())
}
