//! `eldr inflate`: a model with larger experts and the same outputs.
//!
//! Never replaces a file unless told to.

use std::{
    error::Error as _,
    fs, io,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use clap::Args;
use eldr::engine::{InflateError, InflateReport, InflateTarget, inflate, inflate_partial};
use serde_json::json;

use super::{
    error::CliError,
    model::shipped_or,
    output::{Output, complain, end_now},
    progress,
    size::{self, show},
};

#[derive(Debug, Args)]
pub struct InflateArgs {
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
    /// GGUF model; the shipped test model without it
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// GGUF file to write
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Times the experts' hidden dimension grows
    #[arg(long, value_name = "N")]
    factor: Option<f64>,
    /// Size of the new file, such as 1GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    size: Option<u64>,
    /// Replace the output file
    #[arg(long)]
    force: bool,
}

impl InflateArgs {
    pub fn run(&self, output: &mut Output) -> Result<(), CliError> {
        let target = match (self.factor, self.size) {
            (Some(factor), None) => InflateTarget::Factor(factor),
            (None, Some(bytes)) => InflateTarget::Bytes(bytes),
            _ => return Err(CliError::usage("give one of --factor N and --size SIZE")),
        };
        let input = shipped_or(self.model.as_ref())?;
        let interrupted = Arc::new(AtomicBool::new(false));
        self.remove_on_interrupt(&interrupted)?;
        let bar = progress::bar(1, "writing");
        let report = inflate(&input, &self.output, target, self.force, |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        });
        bar.finish_and_clear();
        // What the handler took away is no error of its own: the handler ends the program.
        while report.is_err() && interrupted.load(Ordering::SeqCst) {
            thread::park();
        }
        let InflateReport { n_ff, n_bytes, n_grown } = report.map_err(to_cli)?;
        output.line(&format!(
            "wrote {}: {} instead of {}, experts of {} instead of {} rows in {n_grown} tensors; its outputs and picks \
             are those of {}",
            self.output.display(),
            show(n_bytes.1),
            show(n_bytes.0),
            n_ff.1,
            n_ff.0,
            input.display()
        ))?;
        output.json(&json!({
            "input": input.display().to_string(),
            "output": self.output.display().to_string(),
            "n_ff": { "before": n_ff.0, "after": n_ff.1 },
            "n_bytes": { "before": n_bytes.0, "after": n_bytes.1 },
            "n_grown": n_grown,
        }))
    }

    /// Ctrl-C and SIGTERM take the unfinished file with them.
    fn remove_on_interrupt(&self, interrupted: &Arc<AtomicBool>) -> Result<(), CliError> {
        let partial = inflate_partial(&self.output).map_err(to_cli)?;
        let interrupted = Arc::clone(interrupted);
        let end = move || {
            interrupted.store(true, Ordering::SeqCst);
            // There is none before the first and after the last byte.
            let _ = fs::remove_file(&partial);
            complain("eldr: interrupted: no model was written");
            end_now(1);
        };
        #[cfg(unix)]
        on_terminate(end.clone());
        if let Err(error) = ctrlc::set_handler(end) {
            log::warn!("Ctrl-C will leave an unfinished file: {error}");
        }
        Ok(())
    }
}

/// ctrlc's own way to hear of SIGTERM would take SIGHUP too, which `nohup` has set to be ignored.
#[cfg(unix)]
fn on_terminate(end: impl Fn() + Send + 'static) {
    match signal_hook::iterator::Signals::new([signal_hook::consts::SIGTERM]) {
        Ok(mut signals) => {
            thread::spawn(move || signals.forever().for_each(|_| end()));
        }
        Err(error) => log::warn!("SIGTERM will leave an unfinished file: {error}"),
    }
}

/// A full disk is no fault of the input.
fn to_cli(error: InflateError) -> CliError {
    if let InflateError::Output(error) = error {
        return CliError::usage(error);
    }
    let system = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    match system.map(io::Error::kind) {
        None | Some(io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => CliError::input(error),
        Some(_) => CliError::failed(error),
    }
}
