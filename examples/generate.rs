//! Opens an engine on a model file, submits one prompt, prints the text as it comes.
//!
//! `cargo run --release --example generate -- [MODEL] [PROMPT]`; without arguments the shipped model writes some code.
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::{
    error::Error,
    io::{Write, stdout},
};

use eldr::{
    EngineConfig, StreamEvent,
    types::{Request, SamplingParams},
};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let model = args.next().unwrap_or_else(|| "examples/data/tiny-moe-64x4.gguf".to_owned());
    let prompt = args.next().unwrap_or_else(|| "def read_lines(path):".to_owned());

    // One prefill worker and two decode workers on the best device there is.
    let engine = EngineConfig::builder().prefill("1").decode("2").open(&model)?;
    let mut stream = engine.submit(Request {
        prompt: engine.tokenize(&prompt)?,
        max_tokens: 64,
        sampling: SamplingParams { temperature: 0.7, seed: 1, ..SamplingParams::default() },
        domain: None,
        deadline: None,
    })?;

    let mut worker = String::new();
    print!("{prompt}");
    while let Some(event) = stream.next() {
        match event {
            StreamEvent::Routed { decision, .. } => worker = decision.worker.to_string(),
            StreamEvent::Token { text, .. } => print!("{text}"),
            StreamEvent::End { text, usage, .. } => {
                println!("{text}\n[{} tokens, decode worker {worker}]", usage.completion_tokens);
            }
            StreamEvent::Failed(why) => return Err(why.into()),
        }
        stdout().flush()?;
    }
    Ok(())
}
