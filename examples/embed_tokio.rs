//! Serves from an async program: requests run side by side on one tokio thread, and none of them blocks it.
//!
//! `cargo run --release --example embed_tokio -- [MODEL]`; without a model the shipped one writes.
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::{error::Error, path::Path};

use eldr::{
    Engine, EngineConfig, StreamEvent,
    types::{Request, SamplingParams},
};

/// The text after `prompt`, and the worker that wrote it.
async fn complete(engine: &Engine, prompt: &str) -> Result<(Option<u32>, String), Box<dyn Error>> {
    let sampling = SamplingParams { temperature: 0.7, seed: 1, ..SamplingParams::default() };
    let prompt = engine.tokenize(prompt)?;
    let mut stream = engine.submit(Request { prompt, max_tokens: 32, sampling, domain: None, deadline: None })?;
    let (mut worker, mut answer) = (None, String::new());
    // A caller that goes away drops the stream, and with it the request.
    while let Some(event) = stream.next_async().await {
        match event {
            StreamEvent::Routed { decision, .. } => worker = Some(decision.worker.0),
            StreamEvent::Token { text, .. } | StreamEvent::End { text, .. } => answer.push_str(&text),
            StreamEvent::Failed(error) => return Err(error.into()),
        }
    }
    Ok((worker, answer))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let model = std::env::args().nth(1).unwrap_or_else(|| "examples/data/tiny-moe-64x4.gguf".to_owned());
    // Loading blocks for as long as the file takes, so it has a thread of its own.
    let engine =
        tokio::task::spawn_blocking(move || Engine::open(Path::new(&model), &EngineConfig::default())).await??;
    let (code, maths) = tokio::join!(
        complete(&engine, "def read_lines(path):"),
        complete(&engine, "Exercise: Compute the digits of 619 in base 3."),
    );
    for (worker, answer) in [code?, maths?] {
        println!("[worker {worker:?}] {answer}");
    }
    Ok(())
}
