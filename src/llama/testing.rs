//! The shipped model and short ways to run it, for the tests of this folder.
//!
//! Never used outside tests.

use std::{path::PathBuf, sync::OnceLock};

use super::{Backend, Batch, Context, ContextParams, Model, ModelParams};
use crate::types::Token;

/// Where the shipped model is.
pub fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples/data/tiny-moe-64x4.gguf")
}

/// The shipped model on the CPU, loaded once.
pub fn model() -> &'static Model {
    static MODEL: OnceLock<Model> = OnceLock::new();
    MODEL.get_or_init(|| {
        let backend = Backend::init();
        let device = backend.device("cpu").expect("a CPU");
        let params = ModelParams { device: Some(device), ..ModelParams::default() };
        Model::load(&backend, path(), &params).expect("the shipped model")
    })
}

/// `n` tokens of plain text.
pub fn prompt(n: usize) -> Vec<Token> {
    let sentence = "The river turns north below the old mill, and every spring its water covers the lower fields. ";
    let tokens = model().tokenize(&sentence.repeat(n / 8 + 1), true, false).expect("plain text");
    tokens[..n].to_vec()
}

/// A context with room for 256 tokens a slot and the logits of every row.
pub fn context(params: &ContextParams) -> Context {
    let params = ContextParams { n_ctx_slot: 256, n_outputs: params.n_batch, ..params.clone() };
    Context::new(model(), &params).expect("a context")
}

/// A batch of one sequence, whose last row, or every row, wants logits.
pub fn batch(tokens: &[Token], first: u32, seq: u32, all: bool) -> Batch {
    let mut batch = Batch::new(tokens.len());
    for (i, &token) in tokens.iter().enumerate() {
        batch.push(token, first + i as u32, seq, all || i + 1 == tokens.len()).expect("room");
    }
    batch
}

/// Runs a prompt from position 0 and gives the logits of its last token.
pub fn prefill(context: &mut Context, tokens: &[Token], seq: u32) -> Vec<f32> {
    context.decode(&batch(tokens, 0, seq, false)).expect("a prefill");
    context.logits(tokens.len() - 1).to_vec()
}

/// Bit patterns, so that equality means identity.
pub fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

/// The last processor this process may use.
pub fn last_cpu() -> u32 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).expect("a list");
    let set: crate::types::CpuSet = list.trim().parse().expect("processors");
    *set.cpus().last().expect("at least one")
}
