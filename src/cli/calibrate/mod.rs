//! `eldr calibrate`: recorded requests in, a calibration file and its report out.
//!
//! Never writes the file unless the fit succeeded.

mod page;
mod source;

use std::{
    num::NonZeroU32,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use clap::Args;
use eldr::{
    calibrate::{CalibrationParams, CalibrationReport, TauOrigin, fit},
    engine::{EngineError, check_output, write_calibration},
    sim::{AssessParams, Assessment, SimError, assess},
    types::shown,
};
use serde_json::json;

use self::source::{Source, SourceArgs};
use super::{
    args::{TauChoice, switch},
    error::CliError,
    inspect::ranges,
    lists::Many,
    output::{Output, columns, note},
};

/// Slots of a decode worker in the replays, where all are alike.
const N_SLOTS: u32 = 32;

#[derive(Debug, Args)]
pub struct CalibrateArgs {
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
    /// Decode workers to calibrate for
    #[arg(long, value_name = "K")]
    workers: u32,
    /// Calibration file to write
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Folder for a page of figures, report.html, and its numbers, report.json
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
    /// What each decode worker can hold, relative to the others, such as 2,1,1; all alike without it
    #[arg(long, value_name = "N,N,..")]
    capacity: Option<Many<NonZeroU32>>,
    /// Width of the locality band to store; auto chooses it by replaying the requests [default: auto, or 0.1 for counts]
    #[arg(long, value_name = "TAU|auto")]
    tau: Option<TauChoice>,
    /// Skip the replays that tell whether locality helps, and choose tau
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch())]
    no_verdict: Option<bool>,
    /// Seed of the clustering and of the replays
    #[arg(short, long, value_name = "N")]
    seed: Option<u64>,
    /// Searches of the clustering; the best one counts
    #[arg(long, value_name = "N")]
    restarts: Option<u32>,
    /// Layers in the mask at most
    #[arg(long, value_name = "N")]
    max_layers: Option<usize>,
    #[command(flatten)]
    source: SourceArgs,
}

/// What the replays came to.
enum Judged {
    /// A width and a verdict.
    Verdict(Box<Assessment>),
    /// They could not be had; why.
    NoVerdict(String),
    /// They were not wanted.
    NotAsked,
}

impl CalibrateArgs {
    pub fn run(&self, output: &mut Output) -> Result<(), CliError> {
        let mut params = self.params()?;
        self.source.check()?;
        self.check_outputs()?;
        let source = self.source.read(params.n_workers)?;

        let started = Instant::now();
        let (assessment, no_verdict) = match self.assess(&source, &params)? {
            Judged::Verdict(assessment) => (Some(*assessment), None),
            Judged::NoVerdict(why) => (None, Some(why)),
            Judged::NotAsked => (None, None),
        };
        match (self.tau, &assessment) {
            (Some(TauChoice::Fixed(tau)), _) => (params.tau, params.tau_origin) = (tau, TauOrigin::Given),
            (_, Some(assessment)) => (params.tau, params.tau_origin) = (assessment.tau_curve.tau, TauOrigin::Trace),
            (_, None) => {}
        }
        let replayed = started.elapsed();
        let started = Instant::now();
        let (mut calibration, report) = fit(&source.input, &params).map_err(|error| source.blame(error))?;
        if let Some(assessment) = &assessment {
            calibration.verdict = Some(serde_json::to_string(&assessment.verdict).map_err(CliError::failed)?);
        }
        let fitted = started.elapsed();
        write_calibration(&self.output, &calibration).map_err(EngineError::from)?;
        // Not before the fit: what kept it from being judged may keep it from being made, which is one mistake.
        if let Some(why) = &no_verdict {
            note(&format!("no verdict on whether locality helps, and tau stays {}: {why}", params.tau));
        }
        let write_page = |dir: &PathBuf| page::write(dir, &source, &calibration, &report, assessment.as_ref());
        let page = self.report.as_ref().map(write_page).transpose().map_err(|error| {
            CliError::failed(format!("{}; the calibration {} is written", error.message, self.output.display()))
        })?;

        let layer = |&row: &u32| source.input.shape().layers[row as usize];
        let order: Vec<u32> = report.layer_order.iter().map(layer).collect();
        let kept: Vec<u32> = report.layers.iter().map(layer).collect();
        let times = [source.recording.unwrap_or_default(), replayed, fitted];
        for line in self.lines(&report, [&order, &kept], &params, times) {
            output.line(&line)?;
        }
        let sentence = assessment.as_ref().map(|assessment| assessment.verdict.sentence());
        for line in sentence.iter().cloned().chain(page.iter().map(|page| format!("report: {}", page.display()))) {
            output.line(&line)?;
        }
        let mut document = serde_json::to_value(&report).map_err(CliError::failed)?;
        // The report names layers by row; everything printed has llama.cpp's numbers.
        document["layer_order"] = json!(order);
        document["layers"] = json!(kept);
        document["output"] = json!(self.output.display().to_string());
        document["model"] = json!(source.model.as_ref().map(|path| path.display().to_string()));
        document["n_workers"] = json!(params.n_workers);
        // As it was written: 0.3, not the nearest f64 of the f32.
        document["tau"] = json!(params.tau.to_string().parse::<f64>().unwrap_or_default());
        document["tau_origin"] = json!(params.tau_origin);
        document["seed"] = json!(params.seed);
        document["verdict"] = json!(assessment.as_ref().map(|assessment| &assessment.verdict));
        document["verdict_sentence"] = json!(sentence);
        document["no_verdict"] = json!(no_verdict);
        document["tau_curve"] = json!(assessment.as_ref().map(|assessment| &assessment.tau_curve));
        document["page"] = json!(page.map(|path| path.display().to_string()));
        document["record_s"] = json!(source.recording.map(|time| time.as_secs_f64()));
        document["replay_s"] = json!(replayed.as_secs_f64());
        document["fit_s"] = json!(fitted.as_secs_f64());
        output.json(&document)
    }

    /// Refuses outputs before the recording rather than after it.
    fn check_outputs(&self) -> Result<(), CliError> {
        let inputs = self.source.inputs();
        let mut inputs: Vec<&Path> = inputs.iter().map(PathBuf::as_path).collect();
        check_output(&self.output, &inputs).map_err(CliError::usage)?;
        inputs.push(&self.output);
        self.report.as_deref().map_or(Ok(()), |dir| page::check(dir, &inputs))
    }

    fn params(&self) -> Result<CalibrationParams, CliError> {
        if self.workers == 0 {
            return Err(CliError::usage("--workers is 0: a calibration needs at least one decode worker"));
        }
        let mut params = CalibrationParams::new(self.workers as usize);
        params.capacity = self.capacity.as_ref().map(|many| many.values().map(NonZeroU32::get).collect());
        params.seed = self.seed.unwrap_or(params.seed);
        params.n_restarts = self.restarts.unwrap_or(params.n_restarts);
        params.max_layers = self.max_layers;
        if let Some(TauChoice::Fixed(tau)) = self.tau {
            params.tau = tau;
        }
        params.check().map_err(CliError::usage)?;
        Ok(params)
    }

    /// The replays: what tau to take, and whether locality helps.
    fn assess(&self, source: &Source, params: &CalibrationParams) -> Result<Judged, CliError> {
        let wanted = !self.no_verdict.unwrap_or(false);
        let asks_for_tau = self.tau == Some(TauChoice::Auto);
        let Some(trace) = source.trace.as_ref().filter(|_| wanted) else {
            let why = if wanted { "--counts has no generated tokens to replay" } else { "--no-verdict skips it" };
            if asks_for_tau {
                return Err(CliError::usage(format!("--tau auto needs a replay, and {why}; give a number")));
            }
            return Ok(if wanted {
                Judged::NoVerdict(format!("{why}; a trace has, see `eldr record`"))
            } else {
                Judged::NotAsked
            });
        };
        if params.n_workers == 1 && !asks_for_tau {
            return Ok(Judged::NoVerdict("one decode worker leaves nothing to choose".to_owned()));
        }
        let mut assessing = AssessParams::new(params.clone());
        if let Some(capacity) = &params.capacity {
            let total: u64 = capacity.iter().map(|&n| u64::from(n)).sum();
            let slots = u64::from(N_SLOTS) * capacity.len() as u64;
            assessing.n_slots = capacity.iter().map(|&n| (u64::from(n) * slots / total).max(1) as u32).collect();
        }
        if let Some(TauChoice::Fixed(tau)) = self.tau {
            assessing.taus = vec![tau];
        }
        assessing.seed = params.seed;
        match assess(trace, &assessing) {
            Ok(assessment) => Ok(Judged::Verdict(Box::new(assessment))),
            Err(error @ (SimError::TooFewRequests { .. } | SimError::NoRequests | SimError::Fit { .. }))
                if !asks_for_tau =>
            {
                Ok(Judged::NoVerdict(error.to_string()))
            }
            Err(error) => Err(source.blame(error)),
        }
    }

    fn lines(
        &self,
        report: &CalibrationReport,
        [order, kept]: [&[u32]; 2],
        params: &CalibrationParams,
        [recorded, replayed, fitted]: [Duration; 3],
    ) -> Vec<String> {
        let number = |value: Option<f64>| value.map_or_else(|| "none".to_owned(), |value| format!("{value:.3}"));
        let curve: Vec<String> = report.rho_curve.iter().map(|rho| format!("{rho:.3}")).collect();
        let order: Vec<String> = order.iter().map(ToString::to_string).collect();
        let facts = [
            ("requests", format!("{} of {} tokens", report.n_requests, report.n_tokens)),
            ("without signature", report.n_without_signature.to_string()),
            ("layers kept (N*)", format!("{} ({})", kept.len(), ranges(kept))),
            ("order of layers", order.join(" ")),
            ("rho with them", curve.join(" ")),
            ("rho", format!("{:.4} (all layers: {})", report.rho, number(report.rho_all_layers))),
            ("prefill/decode correlation", number(report.prefill_decode_correlation)),
            ("cost", format!("{:.4} after {} iterations", report.cost, report.n_iterations)),
            ("purity by domain", number(report.purity)),
            ("tau", format!("{} ({})", params.tau, params.tau_origin.name())),
            (
                "time",
                format!(
                    "{:.1} s recording, {:.1} s replaying, {:.1} s fitting",
                    recorded.as_secs_f64(),
                    replayed.as_secs_f64(),
                    fitted.as_secs_f64()
                ),
            ),
        ];
        let mut lines = columns(&facts.map(|(name, value)| vec![name.to_owned(), value]));
        lines.extend(report.clusters.iter().enumerate().map(|(worker, cluster)| {
            let labels: Vec<String> = cluster.labels.iter().map(|(label, n)| format!("{} {n}", shown(label))).collect();
            format!("worker {worker}: {} requests  {}", cluster.size, labels.join(", ")).trim_end().to_owned()
        }));
        lines.push(format!("wrote {}", self.output.display()));
        lines
    }
}
