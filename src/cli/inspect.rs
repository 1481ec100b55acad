//! `eldr inspect`: what a model and a calibration are, and which experts a prompt picks.
//!
//! Never generates a token.

use std::path::{Path, PathBuf};

use clap::Args;
use eldr::{
    calibrate::Calibration,
    engine::{EngineConfig, EngineError, KvFormat, LoadedModel, ModelFacts, WorkerList, read_calibration},
    kv::{BLOCK, row_bytes_per_token},
    signature::{ExpertCounts, Signature},
    sim::Verdict,
    types::MoeShape,
};
use serde_json::{Map, Value, json};

use super::{
    args::ModelArgs,
    error::CliError,
    output::{Output, columns},
    size::show,
};

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
    /// Count the experts this text picks; with --json, print just that
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Calibration file, from `eldr calibrate`
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// List the file's metadata, too
    #[arg(long)]
    metadata: bool,
    #[command(flatten)]
    model: ModelArgs,
}

impl InspectArgs {
    pub fn run(&self, output: &mut Output) -> Result<(), CliError> {
        let calibration = self.calibration.as_deref().map(read_calibration).transpose().map_err(EngineError::from)?;
        if let Some(calibration) = calibration.as_ref().filter(|_| !self.needs_model()) {
            return alone(calibration, output);
        }
        let mut config = EngineConfig { decode: WorkerList::best(1), n_slots: 1, ..EngineConfig::default() };
        self.model.configure(&mut config);
        let (path, loaded) = self.model.load(&config)?;
        if let (Some(path), Some(calibration)) = (&self.calibration, &calibration) {
            check_fit(path, calibration, &loaded)?;
        }
        match &self.prompt {
            Some(prompt) => picks(&loaded, &config, prompt, calibration.as_ref(), output),
            None => self.show(&path, &loaded, calibration.as_ref(), output),
        }
    }

    /// Whether more is asked for than what is in a calibration, which may be another engine's model's.
    fn needs_model(&self) -> bool {
        self.model.model.is_some() || self.prompt.is_some() || self.metadata
    }

    fn show(
        &self,
        path: &Path,
        loaded: &LoadedModel,
        calibration: Option<&Calibration>,
        output: &mut Output,
    ) -> Result<(), CliError> {
        let metadata = if self.metadata { loaded.metadata() } else { Vec::new() };
        for line in columns(&model_rows(path, loaded)) {
            output.line(&line)?;
        }
        if let Some(calibration) = calibration {
            let fits = row("fits", "the model above");
            for line in columns(&[calibration_rows(calibration), vec![fits]].concat()) {
                output.line(&line)?;
            }
        }
        for (key, value) in &metadata {
            output.line(&format!("{key} = {}", value.escape_debug()))?;
        }
        let mut document = model_json(path, loaded);
        document.insert("calibration".to_owned(), calibration.map_or(Value::Null, |c| calibration_json(c, Some(true))));
        if self.metadata {
            document.insert(
                "metadata".to_owned(),
                metadata.into_iter().collect::<std::collections::BTreeMap<_, _>>().into_iter().collect(),
            );
        }
        output.json(&document)
    }
}

/// Shows a calibration without any model.
fn alone(calibration: &Calibration, output: &mut Output) -> Result<(), CliError> {
    let fits = row("fits", "not checked: give the model with -m");
    for line in columns(&[calibration_rows(calibration), vec![fits]].concat()) {
        output.line(&line)?;
    }
    output.json(&json!({ "model": null, "calibration": calibration_json(calibration, None) }))
}

/// Refuses a calibration of another model; the number of workers does not matter here.
fn check_fit(path: &Path, calibration: &Calibration, loaded: &LoadedModel) -> Result<(), CliError> {
    let Some(shape) = loaded.moe_shape() else {
        return Err(CliError::input(format!("{}: the model is dense, so no calibration fits it", path.display())));
    };
    calibration
        .check(shape, &loaded.facts().fingerprint, calibration.n_workers())
        .map_err(|error| CliError::input(format!("{}: {error}", path.display())))
}

fn picks(
    loaded: &LoadedModel,
    config: &EngineConfig,
    prompt: &str,
    calibration: Option<&Calibration>,
    output: &mut Output,
) -> Result<(), CliError> {
    let tokens = loaded.tokenizer().tokenize(prompt).map_err(CliError::input)?;
    if prompt.trim().is_empty() || tokens.is_empty() {
        return Err(CliError::input("the prompt is empty: give --prompt some text"));
    }
    let captured = loaded.capture(config, &tokens)?;
    let (Some(shape), Some(counts)) = (loaded.moe_shape(), captured) else {
        return Err(CliError::input("the model is dense: it has no experts to count"));
    };
    let signature = calibration.map(|calibration| calibration.signature(&counts));
    for line in picks_lines(shape, &counts) {
        output.line(&line)?;
    }
    if let (Some(calibration), Some(signature)) = (calibration, &signature) {
        output.line(&similarity_line(calibration, signature.as_ref()))?;
    }
    let mut document = picks_json(shape, &counts);
    if let Some(signature) = &signature {
        let entries = signature.as_ref().map(Signature::as_slice);
        document.insert("signature".to_owned(), json!(entries));
    }
    output.json(&document)
}

/// `{"n_tokens", "layers", "counts"}`; layers are llama.cpp's numbers.
fn picks_json(shape: &MoeShape, counts: &ExpertCounts) -> Map<String, Value> {
    let layers: Vec<u32> = counts.layers().iter().map(|&row| shape.layers[row as usize]).collect();
    let rows: Vec<&[u32]> = counts.layers().iter().filter_map(|&row| counts.row(row)).collect();
    let document = [("n_tokens", json!(counts.n_tokens())), ("layers", json!(layers)), ("counts", json!(rows))];
    document.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// The experts most picked in each layer.
fn picks_lines(shape: &MoeShape, counts: &ExpertCounts) -> Vec<String> {
    let mut lines = vec![format!("{} tokens", counts.n_tokens())];
    for &layer in counts.layers() {
        let mut ranked: Vec<(u32, usize)> =
            counts.row(layer).unwrap_or_default().iter().copied().zip(0..).filter(|&(n, _)| n > 0).collect();
        ranked.sort_by_key(|&(n, expert)| (std::cmp::Reverse(n), expert));
        let most: Vec<String> = ranked.iter().take(8).map(|(n, expert)| format!("{expert} ({n})")).collect();
        lines.push(format!(
            "layer {:>3}: {:>3} of {} experts, most: {}",
            shape.layers[layer as usize],
            ranked.len(),
            shape.n_expert,
            most.join(", ")
        ));
    }
    lines
}

fn similarity_line(calibration: &Calibration, signature: Option<&Signature>) -> String {
    match signature {
        Some(signature) => {
            let similarities: Vec<String> = (0..calibration.n_workers())
                .map(|worker| format!("{:.3}", signature.cosine(calibration.centroid(worker))))
                .collect();
            format!("similarity to the workers' centroids: {}", similarities.join(" "))
        }
        None => "no signature: none of these picks weighs anything, so the prompt is routed by load".to_owned(),
    }
}

fn model_rows(path: &Path, loaded: &LoadedModel) -> Vec<Vec<String>> {
    let facts = loaded.facts();
    let mut rows = vec![
        row("model", path.display().to_string()),
        row("architecture", facts.arch.as_str()),
        row("description", facts.desc.as_str()),
        row("parameters", facts.n_params.to_string()),
        row("tensor bytes", show(facts.size_bytes)),
        row("layers", facts.n_layer.to_string()),
        row("embedding", facts.n_embd.to_string()),
        row("vocabulary", facts.n_vocab.to_string()),
        row("trained context", facts.n_ctx_train.to_string()),
        row("KV bytes a token", format!("{} (f16)", loaded.kv_bytes_per_token(KvFormat::F16))),
    ];
    if facts.n_swa > 0 {
        rows.push(row("sliding window", facts.n_swa.to_string()));
    }
    if facts.recurrent || facts.hybrid {
        rows.push(row("recurrent state", if facts.hybrid { "in some layers" } else { "in all layers" }));
    }
    match &facts.moe {
        Some(shape) => {
            rows.push(row("MoE layers", ranges(&shape.layers)));
            rows.push(row("experts a layer", format!("{}, {} a token", shape.n_expert, shape.n_expert_used)));
            let bytes = signature_bytes(shape);
            let share = 100.0 * bytes / loaded.kv_bytes_per_token(KvFormat::F16) as f64;
            rows.push(row("signature bytes a token", format!("{bytes:.1}, {share:.2} % of keys and values")));
        }
        None => rows.push(row("experts", "none: a dense model, routed by load")),
    }
    if let Some(experts) = &facts.experts {
        rows.push(row("expert bytes", format!("{} each, {} in all", show(experts.expert), show(experts.all_experts))));
        rows.push(row("other bytes", show(experts.dense)));
    }
    rows.push(row("fingerprint", facts.fingerprint.as_str()));
    rows
}

/// Bytes of counts that a cached token takes at most: all layers a signature may use.
fn signature_bytes(shape: &MoeShape) -> f64 {
    row_bytes_per_token(shape.usable().len(), shape.n_expert, BLOCK)
}

fn model_json(path: &Path, loaded: &LoadedModel) -> Map<String, Value> {
    let ModelFacts { arch, desc, n_layer, n_embd, n_head_kv, n_ctx_train, n_vocab, n_params, size_bytes, .. } =
        loaded.facts();
    let facts = loaded.facts();
    let model = json!({
        "path": path.display().to_string(),
        "arch": arch,
        "desc": desc,
        "n_layer": n_layer,
        "n_embd": n_embd,
        "n_head_kv": n_head_kv,
        "n_ctx_train": n_ctx_train,
        "n_vocab": n_vocab,
        "n_params": n_params,
        "size_bytes": size_bytes,
        "n_swa": facts.n_swa,
        "recurrent": facts.recurrent,
        "hybrid": facts.hybrid,
        "moe": facts.moe,
        "usable_layers": loaded.usable_layers().iter().filter_map(|&row| Some(facts.moe.as_ref()?.layers[row as usize])).collect::<Vec<u32>>(),
        "experts": facts.experts.map(|bytes| json!({
            "expert_bytes": bytes.expert,
            "all_experts_bytes": bytes.all_experts,
            "dense_bytes": bytes.dense,
        })),
        "kv_bytes_per_token": loaded.kv_bytes_per_token(KvFormat::F16),
        "signature_bytes_per_token": facts.moe.as_ref().map(signature_bytes),
        "chat_template": loaded.chat_template().is_some(),
        "fingerprint": facts.fingerprint,
    });
    [("model".to_owned(), model)].into_iter().collect()
}

fn mask(calibration: &Calibration) -> Vec<u32> {
    calibration.layers.iter().map(|&row| calibration.shape.layers[row as usize]).collect()
}

fn calibration_rows(calibration: &Calibration) -> Vec<Vec<String>> {
    vec![
        row("calibration", format!("for {} decode workers", calibration.n_workers())),
        row("MoE layers", ranges(&calibration.shape.layers)),
        row("experts a layer", format!("{}, {} a token", calibration.shape.n_expert, calibration.shape.n_expert_used)),
        row("fingerprint", calibration.fingerprint.as_str()),
        row("layers kept", ranges(&mask(calibration))),
        row("rho", format!("{:.4}", calibration.rho)),
        row("tau", format!("{} ({})", calibration.tau, calibration.tau_origin.name())),
        row("cost", format!("{:.4}", calibration.cost)),
        row("made from", format!("{} requests of {} tokens", calibration.n_requests, calibration.n_tokens)),
        row("seed", calibration.seed.to_string()),
        row("capacity", calibration.capacity.as_ref().map_or("all alike".to_owned(), |c| list(c))),
        row("verdict", Verdict::of(calibration).map_or("none".to_owned(), |verdict| verdict.sentence())),
    ]
}

/// `fits` is whether it fits the model, if there is one to compare it with.
fn calibration_json(calibration: &Calibration, fits: Option<bool>) -> Value {
    json!({
        "fits": fits,
        "shape": calibration.shape,
        "n_workers": calibration.n_workers(),
        "layers": mask(calibration),
        "rho": calibration.rho,
        "tau": calibration.tau,
        "tau_origin": calibration.tau_origin,
        "capacity": calibration.capacity,
        "verdict": Verdict::of(calibration),
        "cost": calibration.cost,
        "n_requests": calibration.n_requests,
        "n_tokens": calibration.n_tokens,
        "seed": calibration.seed,
        "load_model": calibration.load_model,
        "fingerprint": calibration.fingerprint,
    })
}

fn list(numbers: &[u32]) -> String {
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn row(name: &str, value: impl Into<String>) -> Vec<String> {
    vec![name.to_owned(), value.into()]
}

/// Ascending numbers, runs of them as `first-last`.
pub fn ranges(numbers: &[u32]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b);
    let shown = runs.map(|run| match run {
        [one] => one.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    });
    shown.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_numbers_are_drawn_together() {
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
        assert_eq!(ranges(&[]), "");
    }

    #[test]
    fn captured_layers_have_llama_cpp_numbers() {
        let shape = MoeShape { layers: vec![1, 3, 4], n_layer: 5, n_expert: 3, n_expert_used: 1 };
        let mut counts = ExpertCounts::for_shape(&shape);
        counts.add_tokens(2);
        counts.add(0, &[2, 2]);
        counts.add(1, &[0, 1]);
        let document = Value::Object(picks_json(&shape, &counts));
        assert_eq!(document, json!({ "n_tokens": 2, "layers": [1, 3], "counts": [[0, 0, 2], [1, 1, 0]] }));
    }
}
