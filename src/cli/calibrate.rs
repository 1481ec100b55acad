//! `eldr calibrate`: prompts in, a calibration file and its report out.
//!
//! Never writes the file unless the fit succeeded.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use clap::Args;
use eldr::{
    bench::workload,
    calibrate::{CalibrationParams, CalibrationReport, fit},
    engine::{
        EngineConfig, EngineError, LoadedModel, RecordPrompt, WorkerList, check_output, record, threads_alone,
        write_calibration,
    },
};
use serde_json::json;

use super::{
    args::ModelArgs,
    error::CliError,
    inspect::ranges,
    model::shipped,
    output::{Output, columns},
    progress,
};

#[derive(Debug, Args)]
pub struct CalibrateArgs {
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
    /// JSON lines with an id, a prompt and perhaps a domain and most tokens
    #[arg(long, value_name = "FILE")]
    prompts: PathBuf,
    /// Decode workers to calibrate for
    #[arg(long, value_name = "K")]
    workers: u32,
    /// Calibration file to write
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Tokens to generate for each prompt at most; the prompt's own limit counts if it is less
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128)]
    max_tokens: u32,
    /// Use the first N prompts only
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// Seed of the clustering
    #[arg(short, long, value_name = "N")]
    seed: Option<u64>,
    /// Searches of the clustering; the best one counts
    #[arg(long, value_name = "N")]
    restarts: Option<u32>,
    /// Width of the locality band to store
    #[arg(long, value_name = "TAU")]
    tau: Option<f32>,
    /// Layers in the mask at most
    #[arg(long, value_name = "N")]
    max_layers: Option<usize>,
    /// Where prompts are prefilled
    #[arg(long, value_name = "WORKER")]
    prefill: Option<WorkerList>,
    /// Where answers are generated
    #[arg(long, value_name = "WORKER")]
    decode: Option<WorkerList>,
    #[command(flatten)]
    model: ModelArgs,
}

impl CalibrateArgs {
    pub fn run(&self, output: &mut Output) -> Result<(), CliError> {
        let params = self.params()?;
        self.check_output()?;
        let items = workload::read(&self.prompts).map_err(CliError::input)?;
        let items = &items[..self.requests.unwrap_or(items.len()).min(items.len())];
        if items.len() < params.n_workers {
            return Err(CliError::input(format!(
                "{}: {} prompts are too few for {} decode workers; give at least one a worker",
                self.prompts.display(),
                items.len(),
                params.n_workers
            )));
        }
        let config = self.config();
        let (path, loaded) = self.model.load(&config)?;
        let prompts = self.tokenize(items, &loaded)?;

        progress::end_on_interrupt("no calibration was written; fewer --requests or a lower -n end sooner");
        let started = Instant::now();
        let bar = progress::bar(prompts.len() as u64, "recording");
        let input = record(&loaded, &config, &prompts, &mut |n_done| bar.set_position(n_done as u64))?;
        bar.finish_and_clear();
        let recorded = started.elapsed();
        let started = Instant::now();
        let (calibration, report) = fit(&input, &params).map_err(CliError::input)?;
        let fitted = started.elapsed();
        write_calibration(&self.output, &calibration).map_err(EngineError::from)?;

        let layer = |&row: &u32| input.shape().layers[row as usize];
        let order: Vec<u32> = report.layer_order.iter().map(layer).collect();
        let kept: Vec<u32> = report.layers.iter().map(layer).collect();
        for line in self.lines(&report, &order, &kept, recorded, fitted) {
            output.line(&line)?;
        }
        let mut document = serde_json::to_value(&report).map_err(CliError::failed)?;
        // The report names layers by row; everything printed has llama.cpp's numbers.
        document["layer_order"] = json!(order);
        document["layers"] = json!(kept);
        document["output"] = json!(self.output.display().to_string());
        document["model"] = json!(path.display().to_string());
        document["n_workers"] = json!(params.n_workers);
        document["tau"] = json!(params.tau);
        document["seed"] = json!(params.seed);
        document["record_s"] = json!(recorded.as_secs_f64());
        document["fit_s"] = json!(fitted.as_secs_f64());
        output.json(&document)
    }

    /// Refuses an output before the recording rather than after it.
    fn check_output(&self) -> Result<(), CliError> {
        let model = self.model.model.clone().or_else(shipped);
        let inputs: Vec<&Path> = model.as_deref().into_iter().chain([self.prompts.as_path()]).collect();
        check_output(&self.output, &inputs).map(|_| ()).map_err(CliError::usage)
    }

    fn params(&self) -> Result<CalibrationParams, CliError> {
        if self.workers == 0 {
            return Err(CliError::usage("--workers is 0: a calibration needs at least one decode worker"));
        }
        if self.max_tokens < 2 {
            return Err(CliError::usage("--max-tokens must be at least 2: the first token is the prefill's"));
        }
        let mut params = CalibrationParams::new(self.workers as usize);
        params.seed = self.seed.unwrap_or(params.seed);
        params.tau = self.tau.unwrap_or(params.tau);
        params.n_restarts = self.restarts.unwrap_or(params.n_restarts);
        params.max_layers = self.max_layers;
        if !(0.0..=2.0).contains(&params.tau) {
            return Err(CliError::usage(format!("--tau is {}, which must be between 0 and 2", params.tau)));
        }
        Ok(params)
    }

    fn config(&self) -> EngineConfig {
        let mut config = EngineConfig { decode: WorkerList::best(1), ..EngineConfig::default() };
        self.model.configure(&mut config);
        config.prefill = self.prefill.clone().unwrap_or(config.prefill);
        config.decode = self.decode.clone().unwrap_or(config.decode);
        if config.n_threads == 0 {
            // Recording runs one worker at a time.
            config.n_threads = threads_alone();
        }
        config
    }

    fn tokenize(&self, items: &[workload::WorkloadItem], loaded: &LoadedModel) -> Result<Vec<RecordPrompt>, CliError> {
        let tokenizer = loaded.tokenizer();
        items
            .iter()
            .map(|item| {
                let tokens = tokenizer
                    .tokenize(&item.prompt)
                    .map_err(|error| CliError::input(format!("prompt {}: {error}", item.id)))?;
                let max_tokens = item.max_tokens.map_or(self.max_tokens, |n| n.min(self.max_tokens));
                Ok(RecordPrompt { id: item.id.clone(), domain: item.domain.clone(), tokens, max_tokens })
            })
            .collect()
    }

    fn lines(
        &self,
        report: &CalibrationReport,
        order: &[u32],
        kept: &[u32],
        recorded: Duration,
        fitted: Duration,
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
            ("time", format!("{:.1} s recording, {:.1} s fitting", recorded.as_secs_f64(), fitted.as_secs_f64())),
        ];
        let mut lines = columns(&facts.map(|(name, value)| vec![name.to_owned(), value]));
        lines.extend(report.clusters.iter().enumerate().map(|(worker, cluster)| {
            let labels: Vec<String> = cluster.labels.iter().map(|(label, n)| format!("{label} {n}")).collect();
            format!("worker {worker}: {} requests  {}", cluster.size, labels.join(", ")).trim_end().to_owned()
        }));
        lines.push(format!("wrote {}", self.output.display()));
        lines
    }
}
