//! `eldr route`: where a calibration would send requests whose counts are given, and why.
//!
//! Never runs a model: it is for programs that bring another engine, and for tests.

use std::{fs, path::PathBuf, sync::Arc};

use clap::Args;
use eldr::{
    calibrate::{Calibration, PrefillCounts},
    engine::{EngineError, read_calibration},
    route::{Decision, PolicyKind, PolicyParams, RouteRequest, WorkerView},
    signature::{ExpertCounts, Signature},
    sim::Verdict,
    types::WorkerId,
};
use serde_json::{Value, json};

use super::{args::TauChoice, error::CliError, lists::Many, output::Output};

/// Slots of a worker that nobody described: it is never full.
const MANY_SLOTS: u32 = u32::MAX;

#[derive(Debug, Args)]
pub struct RouteArgs {
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
    /// Calibration file, from `eldr calibrate`
    #[arg(long, value_name = "FILE")]
    calibration: PathBuf,
    /// The requests: a safetensors file of `prefill_counts`, u32 [N,L,E]
    #[arg(long, value_name = "FILE")]
    counts: PathBuf,
    /// Requests each worker has in flight, such as 3,1,0; all 0 without it
    #[arg(long, value_name = "N,N,..")]
    loads: Option<Many<u32>>,
    /// Most requests each worker can hold, such as 16,16,8; no bound without it
    #[arg(long, value_name = "N,N,..")]
    limits: Option<Many<u32>>,
    /// Book each request on its worker before the next is routed
    #[arg(long)]
    book: bool,
    /// Width of the locality band; without it, or auto, the calibration's
    #[arg(long, value_name = "TAU|auto")]
    tau: Option<TauChoice>,
    /// Fewest workers of the locality band
    #[arg(long, value_name = "N", default_value_t = 1)]
    min_band: u32,
}

impl RouteArgs {
    pub fn run(&self, output: &mut Output) -> Result<(), CliError> {
        let calibration = read_calibration(&self.calibration).map_err(EngineError::from)?;
        let PrefillCounts { ids, counts, .. } = self.counts(&calibration)?;
        let mut workers = self.workers(calibration.n_workers())?;
        let params = PolicyParams {
            tau: self.tau.and_then(TauChoice::fixed).unwrap_or(calibration.tau),
            min_band: self.min_band,
            centroids: Some(Arc::new(calibration.centroids.clone())),
            ..PolicyParams::new(calibration.n_workers())
        };
        let mut policy = PolicyKind::LocalityBand.build(&params).map_err(CliError::usage)?;
        let mut rows = Vec::with_capacity(counts.len());
        for (id, counts) in ids.iter().zip(&counts) {
            let signature = calibration.signature(counts);
            let request = RouteRequest { signature: signature.as_ref(), ..RouteRequest::default() };
            let decision = policy
                .select(&request, &workers)
                .map_err(|error| CliError::failed(format!("request {id} can not be placed: {error}")))?;
            let similarities = signature.as_ref().map(|signature| similarities(&calibration, signature));
            let band = similarities.as_deref().map(|cosines| band(cosines, &workers, decision.band));
            if self.book {
                workers[decision.worker.index()].n_inflight += 1;
            }
            output.line(&line(id, &decision, similarities.as_deref()))?;
            rows.push(row(id, &decision, similarities.as_deref(), band.as_deref()));
        }
        let verdict = Verdict::of(&calibration).map(|verdict| verdict.sentence());
        if let Some(sentence) = &verdict {
            output.line(sentence)?;
        }
        output.json(&json!({ "policy": policy.name(), "tau": params.tau, "verdict": verdict, "requests": rows }))
    }

    /// The requests' names and counts, in the calibration's layers.
    fn counts(&self, calibration: &Calibration) -> Result<PrefillCounts, CliError> {
        let shown = self.counts.display();
        let bytes = fs::read(&self.counts)
            .map_err(|error| CliError::input(format!("cannot read the counts {shown}: {error}")))?;
        let read = PrefillCounts::read(&bytes).map_err(|error| CliError::input(format!("{shown}: {error}")))?;
        if let Some(model) = read
            .model
            .as_ref()
            .filter(|model| **model != calibration.fingerprint && read.fingerprint != calibration.fingerprint)
        {
            return Err(CliError::input(format!(
                "{shown} has counts of the model `{model}`, and the calibration was made for another: give counts of the \
                 model that was calibrated"
            )));
        }
        let shape = &calibration.shape;
        let wrong = |counts: &&ExpertCounts| {
            (counts.layers().len(), counts.n_expert()) != (shape.n_layer_moe(), shape.n_expert)
        };
        if let Some(counts) = read.counts.iter().find(wrong) {
            return Err(CliError::input(format!(
                "{shown} has counts of {} layers of {} experts, and the calibration is for {} of {}: give a row for each \
                 MoE layer of the model that was calibrated, the last one too",
                counts.layers().len(),
                counts.n_expert(),
                shape.n_layer_moe(),
                shape.n_expert
            )));
        }
        Ok(read)
    }

    fn workers(&self, n_workers: usize) -> Result<Vec<WorkerView>, CliError> {
        let numbers = |given: &Option<Many<u32>>, name: &str, otherwise: u32| match given.as_ref().map(Many::values) {
            Some(numbers) if numbers.len() == n_workers => Ok(numbers.collect()),
            Some(numbers) => Err(CliError::usage(format!(
                "--{name} has {} numbers, and the calibration is for {n_workers} workers: give one for each",
                numbers.len()
            ))),
            None => Ok(vec![otherwise; n_workers]),
        };
        let loads = numbers(&self.loads, "loads", 0)?;
        let slots = numbers(&self.limits, "limits", MANY_SLOTS)?;
        let view = |(id, (n_inflight, n_slots))| WorkerView { id: WorkerId(id), n_slots, n_inflight, healthy: true };
        Ok((0..).zip(loads.into_iter().zip(slots)).map(view).collect())
    }
}

fn similarities(calibration: &Calibration, signature: &Signature) -> Vec<f32> {
    (0..calibration.n_workers()).map(|worker| signature.cosine(calibration.centroid(worker))).collect()
}

fn line(id: &str, decision: &Decision, similarities: Option<&[f32]>) -> String {
    let shown: Vec<String> = similarities.unwrap_or_default().iter().map(|cosine| format!("{cosine:.3}")).collect();
    let why = match similarities {
        Some(_) => format!("band of {}, load {}; similarities {}", decision.band, decision.n_inflight, shown.join(" ")),
        None => format!("no signature, load {}", decision.n_inflight),
    };
    format!("{id}: worker {} ({why})", decision.worker)
}

/// The workers the policy chose between: the most similar eligible ones, the lower number first among equals.
fn band(similarities: &[f32], workers: &[WorkerView], n: u32) -> Vec<u32> {
    let similarity = |worker: &WorkerView| similarities[worker.id.index()];
    let mut eligible: Vec<&WorkerView> = workers.iter().filter(|worker| worker.eligible()).collect();
    eligible.sort_by(|a, b| similarity(b).total_cmp(&similarity(a)).then(a.id.cmp(&b.id)));
    let mut band: Vec<u32> = eligible.iter().take(n as usize).map(|worker| worker.id.0).collect();
    band.sort_unstable();
    band
}

fn row(id: &str, decision: &Decision, similarities: Option<&[f32]>, band: Option<&[u32]>) -> Value {
    json!({
        "id": id,
        "worker": decision.worker,
        "reason": decision.reason,
        "similarities": similarities,
        "band": band,
        "n_inflight": decision.n_inflight,
    })
}
