//! The device, the models on it and on the CPU, and the few ways a batch is run.
//!
//! Never checks or times anything.

use std::{
    error::Error,
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use eldr::{
    llama::{Backend, Batch, Context, ContextParams, DecodeError, Device, DeviceKind, LlamaError, Model, ModelParams},
    types::Token,
};
use serde_json::{Value, json};

const SHIPPED: &str = "examples/data/tiny-moe-64x4.gguf";
const PROMPTS: &str = "examples/data/task.calibration.jsonl";

/// How much is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// Enough to see that every part runs.
    Small,
    /// Enough for numbers to be told.
    Full,
}

impl Size {
    pub fn name(self) -> &'static str {
        if self == Self::Small { "small" } else { "full" }
    }

    /// The one of two numbers that is this size's.
    pub fn of<T>(self, small: T, full: T) -> T {
        if self == Self::Small { small } else { full }
    }
}

pub struct Rig {
    pub backend: Backend,
    pub device: Device,
    pub size: Size,
    /// The shipped model on the device.
    pub model: Model,
    /// The shipped model on the CPU.
    pub on_cpu: Model,
    /// The file that times are taken with.
    pub timed: PathBuf,
    pub calibration: Option<PathBuf>,
    /// Tokens of the shipped prompts.
    pub prompts: Vec<Vec<Token>>,
}

impl Rig {
    pub fn open(
        device: &str,
        size: Size,
        timed: Option<PathBuf>,
        calibration: Option<PathBuf>,
    ) -> Result<Self, Box<dyn Error>> {
        let backend = Backend::init();
        let device = backend.device(device)?;
        let model = load(&backend, &device, &shipped())?;
        let on_cpu = load(&backend, &backend.device("cpu")?, &shipped())?;
        let text = fs::read_to_string(root().join(PROMPTS))?;
        let prompts = text.lines().map(|line| {
            let line: Value = serde_json::from_str(line)?;
            Ok(model.tokenize(line["prompt"].as_str().unwrap_or_default(), true, false)?)
        });
        let prompts = prompts.collect::<Result<_, Box<dyn Error>>>()?;
        let timed = timed.unwrap_or_else(shipped);
        Ok(Self { backend, device, size, model, on_cpu, timed, calibration, prompts })
    }

    pub fn is_cpu(&self) -> bool {
        self.device.kind() == DeviceKind::Cpu
    }

    pub fn load(&self, path: &Path) -> Result<Model, LlamaError> {
        load(&self.backend, &self.device, path)
    }

    pub fn description(&self) -> Value {
        let info = self.device.info();
        json!({
            "name": info.name,
            "description": info.description,
            "kind": format!("{:?}", info.kind),
            "total_bytes": info.total_bytes,
            "free_bytes": info.free_bytes,
            "versions": self.backend.version(),
            "timed_model": self.timed.file_name().map(|name| name.to_string_lossy()),
        })
    }
}

pub fn shipped() -> PathBuf {
    root().join(SHIPPED)
}

/// Where the examples are: the folder the program is run in, so that it can be built elsewhere.
fn root() -> PathBuf {
    if Path::new(SHIPPED).exists() { PathBuf::new() } else { PathBuf::from(env!("CARGO_MANIFEST_DIR")) }
}

fn load(backend: &Backend, device: &Device, path: &Path) -> Result<Model, LlamaError> {
    Model::load(backend, path, &ModelParams { device: Some(device.clone()), ..ModelParams::default() })
}

/// One thread, so that a CPU's logits do not depend on how attention is divided.
pub fn context(model: &Model, params: &ContextParams) -> Result<Context, LlamaError> {
    Context::new(model, &ContextParams { n_threads: 1, ..params.clone() })
}

/// `tokens` of one sequence from `pos` on, the last with logits.
pub fn prompt_batch(tokens: &[Token], pos: u32, seq: u32) -> Batch {
    let mut batch = Batch::new(tokens.len());
    for (i, &token) in tokens.iter().enumerate() {
        batch.push(token, pos + i as u32, seq, i + 1 == tokens.len()).expect("room");
    }
    batch
}

/// One token of each of the first sequences, all at `pos`.
pub fn step_batch(tokens: &[Token], pos: u32) -> Batch {
    let mut batch = Batch::new(tokens.len());
    for (seq, &token) in tokens.iter().enumerate() {
        batch.push(token, pos, seq as u32, true).expect("room");
    }
    batch
}

/// Milliseconds of a batch whose last row has logits; they are read, so that the device has finished.
pub fn time(context: &mut Context, batch: &Batch) -> Result<f64, DecodeError> {
    let start = Instant::now();
    context.decode(batch)?;
    context.logits(batch.len() - 1);
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

/// As [`time`], with the tap; the picks it read, by layer.
pub fn time_tapped(context: &mut Context, batch: &Batch) -> Result<(f64, Picks), DecodeError> {
    let mut picks = Picks::new();
    let start = Instant::now();
    context.decode_tapped(batch, &mut |rows| picks.push((rows.layer, rows.tokens().map(sorted).collect())))?;
    context.logits(batch.len() - 1);
    Ok((start.elapsed().as_secs_f64() * 1e3, picks))
}

/// MoE layer, then the ascending picks of each row of the batch.
pub type Picks = Vec<(u32, Vec<Vec<u32>>)>;

fn sorted(picks: &[u32]) -> Vec<u32> {
    let mut picks = picks.to_vec();
    picks.sort_unstable();
    picks
}

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
