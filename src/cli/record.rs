//! `eldr record`: prompts in, a trace of the experts that they and their answers pick out.
//!
//! Never loses a request that it has recorded: what ends the program early, the same command goes on from.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use clap::Args;
use eldr::{
    engine::{DEFAULT_BLOCK, RecordSummary, check_trace_output},
    trace::RecordSettings,
};
use serde_json::json;

use super::{
    args::{ModelArgs, RecordingArgs, switch},
    error::CliError,
    model::shipped,
    output::{Output, end_now},
    progress, prompts,
};

#[derive(Debug, Args)]
pub struct RecordArgs {
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
    /// JSON lines with an id, a prompt and perhaps a domain and most tokens; a .txt file with a prompt on each line; or
    /// - for either on standard input
    #[arg(long, value_name = "FILE")]
    prompts: PathBuf,
    /// Trace to write; one that is there is gone on with
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Tokens to generate for each prompt at most; the prompt's own limit counts if it is less. At least 2 are, and an
    /// answer does not end before them
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128)]
    max_tokens: u32,
    /// Use the first N prompts only
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// 0 takes the likeliest token; 0.8 without it
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// Seed of the draws
    #[arg(short, long, value_name = "N")]
    seed: Option<u64>,
    /// Prompt tokens counted together, 16 to 128
    #[arg(long, value_name = "TOKENS", default_value_t = DEFAULT_BLOCK)]
    block: u32,
    /// Also sum what the gates say of every expert over each prompt
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch())]
    gates: Option<bool>,
    /// Wrap each prompt in the model's chat template
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch())]
    chat: Option<bool>,
    #[command(flatten)]
    workers: RecordingArgs,
    #[command(flatten)]
    model: ModelArgs,
}

impl RecordArgs {
    pub fn run(&self, output: &mut Output) -> Result<(), CliError> {
        let settings = self.settings()?;
        self.check_output()?;
        let items = prompts::read(&self.prompts)?;
        let items = &items[..self.requests.unwrap_or(items.len()).min(items.len())];
        let stop = stop_on_interrupt();
        let config = self.workers.config(&self.model);
        let (path, loaded) = self.model.load(&config)?;
        let recorder = loaded.recorder(&config, self.block, &settings)?;
        let prompts = prompts::tokenize(items, &loaded, self.max_tokens, settings.chat)?;

        let started = Instant::now();
        let bar = progress::bar(prompts.len() as u64, "recording");
        let progress = &mut |n_done| bar.set_position(n_done as u64);
        let summary = recorder.record_into(&self.output, &prompts, &stop, progress)?;
        bar.finish_and_clear();
        let seconds = started.elapsed().as_secs_f64();

        let RecordSummary { n_prompts, n_before, n_new, n_in_file } = summary;
        let shown = self.output.display().to_string();
        if summary.is_whole() {
            let requests = |n| if n == 1 { "1 request".to_owned() } else { format!("{n} requests") };
            let before = if n_before == 0 { String::new() } else { format!("; {n_before} were there before") };
            output.line(&format!("recorded {} in {seconds:.1} s{before}", requests(n_new)))?;
            output.line(&format!("{shown} holds {}", requests(n_in_file)))?;
        }
        output.json(&json!({
            "model": path.display().to_string(),
            "output": shown,
            "n_prompts": n_prompts,
            "n_before": n_before,
            "n_recorded": n_new,
            "n_in_file": n_in_file,
            "interrupted": !summary.is_whole(),
            "block": self.block,
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "seed": settings.seed,
            "chat": settings.chat,
            "gates": settings.gates,
            "record_s": seconds,
        }))?;
        if summary.is_whole() {
            return Ok(());
        }
        let n_done = n_before + n_new;
        Err(CliError::already_told(format!(
            "interrupted: {n_done} of {n_prompts} prompts are recorded in {shown}; the same command goes on from there"
        )))
    }

    fn settings(&self) -> Result<RecordSettings, CliError> {
        let default = RecordSettings::default();
        let settings = RecordSettings {
            max_tokens: self.max_tokens,
            temperature: self.temperature.unwrap_or(default.temperature),
            seed: self.seed.unwrap_or(default.seed),
            chat: self.chat.unwrap_or(false),
            gates: self.gates.unwrap_or(false),
        };
        if settings.max_tokens < 2 {
            return Err(CliError::usage("--max-tokens must be at least 2: the first token is the prefill's"));
        }
        if !(0.0..=f32::MAX).contains(&settings.temperature) {
            let temperature = settings.temperature;
            return Err(CliError::usage(format!(
                "--temperature is {temperature}, which must be a finite number, 0 or more"
            )));
        }
        if !(16..=128).contains(&self.block) {
            return Err(CliError::usage(format!("--block is {}, which must be between 16 and 128", self.block)));
        }
        if self.requests == Some(0) {
            return Err(CliError::usage("--requests is 0: give at least one prompt to record"));
        }
        Ok(settings)
    }

    /// Refuses an output before the model is loaded.
    fn check_output(&self) -> Result<(), CliError> {
        let model = self.model.model.clone().or_else(shipped);
        let inputs: Vec<&Path> = model.as_deref().into_iter().chain([self.prompts.as_path()]).collect();
        Ok(check_trace_output(&self.output, &inputs)?)
    }
}

/// Set by Ctrl-C; a second one ends the process, which loses no more than the request being written.
fn stop_on_interrupt() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let installed = ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) {
            end_now(1);
        }
    });
    if let Err(error) = installed {
        log::warn!("Ctrl-C will end the recording without a word: {error}");
    }
    stop
}
