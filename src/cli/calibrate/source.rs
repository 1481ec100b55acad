//! Where a calibration's requests come from: prompts run now, a trace recorded before, or counts of another engine.
//!
//! Never fits anything.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use clap::Args;
use eldr::{
    calibrate::CalibrationInput,
    engine::{DEFAULT_BLOCK, model_fingerprint, read_trace, record_trace},
    trace::{RecordSettings, Trace},
};

use crate::cli::{
    args::{ModelArgs, RecordingArgs},
    error::CliError,
    model::shipped,
    progress, prompts,
};

#[derive(Debug, Args)]
#[group(id = "source", required = true, multiple = false, args = ["prompts", "trace", "counts"])]
pub struct SourceArgs {
    /// Prompts to run now: JSON lines with an id, a prompt and perhaps a domain and most tokens; a .txt file with a
    /// prompt on each line; or - for either on standard input
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Requests recorded before, from `eldr record`
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Counts that any engine captured: a safetensors file of `prefill_counts` and `decode_counts`, u32 [N,L,E]
    #[arg(long, value_name = "FILE")]
    counts: Option<PathBuf>,
    /// Tokens to generate for each prompt at most; the prompt's own limit counts if it is less. At least 2 are, and an
    /// answer does not end before them
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128)]
    max_tokens: u32,
    /// Use the first N requests only
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    #[command(flatten)]
    workers: RecordingArgs,
    #[command(flatten)]
    pub model: ModelArgs,
}

/// What a calibration is fitted to.
pub struct Source {
    /// The counts of all requests.
    pub input: CalibrationInput,
    /// The requests themselves; counts have none.
    pub trace: Option<Trace>,
    /// The file they came from; `-` is standard input.
    pub file: PathBuf,
    /// What a reader knows them by: the model, or the file they came from.
    pub name: PathBuf,
    /// The model they were recorded on, as far as it is known.
    pub model: Option<PathBuf>,
    /// Time it took to record them.
    pub recording: Option<Duration>,
}

impl Source {
    /// An error that is the requests' fault, with the file they are in.
    pub fn blame(&self, error: impl std::fmt::Display) -> CliError {
        CliError::input(format!("{}: {error}", self.file.display()))
    }
}

impl SourceArgs {
    /// The files it reads.
    pub fn inputs(&self) -> Vec<PathBuf> {
        let files = [&self.prompts, &self.trace, &self.counts].into_iter().flatten().cloned();
        files.chain(self.model.model.clone().or_else(shipped)).collect()
    }

    /// Refuses what can not work before anything is read.
    pub fn check(&self) -> Result<(), CliError> {
        if self.max_tokens < 2 {
            let n = self.max_tokens;
            return Err(CliError::usage(format!(
                "--max-tokens is {n}, which must be at least 2: the first token is the prefill's"
            )));
        }
        if self.requests == Some(0) {
            return Err(CliError::usage("--requests is 0: give at least one request to calibrate with"));
        }
        Ok(())
    }

    /// Reads or records the requests, for `n_workers` decode workers.
    pub fn read(&self, n_workers: usize) -> Result<Source, CliError> {
        if let Some(path) = &self.trace {
            return self.read_trace(path, n_workers);
        }
        if let Some(path) = &self.counts {
            let bytes = fs::read(path)
                .map_err(|error| CliError::input(format!("cannot read the counts {}: {error}", path.display())))?;
            let input = CalibrationInput::of_counts(&bytes)
                .map_err(|error| CliError::input(format!("{}: {error}", path.display())))?;
            if let Some(n) = self.requests.filter(|&n| n < input.n_requests()) {
                return Err(CliError::usage(format!(
                    "--requests {n} does not go with --counts: {} has {} requests and all are used",
                    path.display(),
                    input.n_requests()
                )));
            }
            let (file, name) = (path.clone(), path.clone());
            return Ok(Source { input, trace: None, file, name, model: self.model.model.clone(), recording: None });
        }
        self.record(self.prompts.as_deref().expect("one of the three is required"), n_workers)
    }

    fn read_trace(&self, path: &Path, n_workers: usize) -> Result<Source, CliError> {
        let mut trace = read_trace(path)?;
        if let Some(model) = &self.model.model {
            let fingerprint = model_fingerprint(model)?;
            if fingerprint != trace.header.fingerprint {
                return Err(CliError::input(format!(
                    "{} was recorded on another model than {}: record this one's prompts with `eldr record`",
                    path.display(),
                    model.display()
                )));
            }
        }
        trace.requests.truncate(self.requests.unwrap_or(usize::MAX));
        enough(path, trace.requests.len(), "requests", n_workers)?;
        in_order_of_ids(&mut trace);
        let input = CalibrationInput::of_trace(&trace, 0..trace.requests.len());
        let model = self.model.model.clone();
        let name = model.clone().unwrap_or_else(|| path.to_owned());
        Ok(Source { input, trace: Some(trace), file: path.to_owned(), name, model, recording: None })
    }

    fn record(&self, path: &Path, n_workers: usize) -> Result<Source, CliError> {
        let items = prompts::read(path)?;
        let items = &items[..self.requests.unwrap_or(items.len()).min(items.len())];
        enough(path, items.len(), "prompts", n_workers)?;
        let config = self.workers.config(&self.model);
        let (model, loaded) = self.model.load(&config)?;
        let prompts = prompts::tokenize(items, &loaded, self.max_tokens, false)?;
        let settings = RecordSettings { max_tokens: self.max_tokens, ..RecordSettings::default() };

        progress::end_on_interrupt(
            "no calibration was written; `eldr record` keeps what it has when it is interrupted",
        );
        let started = Instant::now();
        let bar = progress::bar(prompts.len() as u64, "recording");
        let mut trace = record_trace(&loaded, &config, &prompts, DEFAULT_BLOCK, &settings, &mut |n_done| {
            bar.set_position(n_done as u64);
        })?;
        bar.finish_and_clear();
        in_order_of_ids(&mut trace);
        let input = CalibrationInput::of_trace(&trace, 0..trace.requests.len());
        Ok(Source {
            input,
            trace: Some(trace),
            file: path.to_owned(),
            name: model.clone(),
            model: Some(model),
            recording: Some(started.elapsed()),
        })
    }
}

/// The same requests give the same calibration, also where a recording was interrupted and holds them in another order.
fn in_order_of_ids(trace: &mut Trace) {
    trace.requests.sort_by(|a, b| a.id.cmp(&b.id));
}

fn enough(path: &Path, n: usize, what: &str, n_workers: usize) -> Result<(), CliError> {
    if n >= n_workers {
        return Ok(());
    }
    Err(CliError::input(format!(
        "{}: {n} {what} are too few for {n_workers} decode workers; give at least one a worker",
        path.display()
    )))
}
