//! What a prefix costs: computed, copied out of a worker, put into one, written to a disk and read from it. A prefix is
//! worth restoring, and an answer worth bringing back, where moving all of it takes less time than computing what is new.
//!
//! One thread, the shipped model: 6 layers, 1.2 KiB of keys and values a token and layer at most. A larger model computes
//! far more a token and moves somewhat more.

use std::{path::Path, sync::Arc};

use divan::{Bencher, counter::ItemsCount};
use eldr::{
    engine::{DiskTier, LlamaRunner, TapUse},
    llama::{Backend, ContextParams, Model, ModelParams},
    schedule::{ModelRunner, PrefixStore, SeqState, StoredPrefix},
    types::{SamplingParams, Slot, Token},
};

const N_TOKENS: [usize; 2] = [256, 1024];
const CHUNK: usize = 256;

fn main() {
    divan::main();
}

fn runner() -> LlamaRunner {
    let backend = Backend::init();
    let device = backend.device("CPU").expect("a CPU");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/tiny-moe-64x4.gguf");
    let model = Model::load(&backend, &path, &ModelParams { device: Some(device), ..ModelParams::default() });
    let params = ContextParams {
        n_slots: 2,
        n_ctx_slot: 1088,
        n_batch: CHUNK as u32,
        n_ubatch: CHUNK as u32,
        n_threads: 1,
        ..ContextParams::default()
    };
    LlamaRunner::new(&model.expect("the model"), &params, &TapUse::Off, false).expect("a context")
}

fn prefill(runner: &mut LlamaRunner, n_tokens: usize) {
    let tokens: Vec<Token> = (0..n_tokens).map(|i| Token::try_from(300 + i * i % 900).expect("small")).collect();
    runner.open(Slot(0), &SamplingParams::default(), &[]).expect("open");
    for (at, chunk) in tokens.chunks(CHUNK).enumerate() {
        runner.prefill(Slot(0), chunk, (at * CHUNK) as u32, false, None).expect("computed");
    }
}

fn state(runner: &mut LlamaRunner, n_tokens: usize) -> SeqState {
    prefill(runner, n_tokens);
    runner.export(Slot(0)).expect("a state")
}

#[divan::bench(args = N_TOKENS, sample_count = 5, sample_size = 1)]
fn computed(bencher: Bencher<'_, '_>, n_tokens: usize) {
    let mut runner = runner();
    bencher.counter(ItemsCount::new(n_tokens)).bench_local(|| {
        prefill(&mut runner, n_tokens);
        runner.close(Slot(0)).expect("closed");
    });
}

#[divan::bench(args = N_TOKENS)]
fn copied_out(bencher: Bencher<'_, '_>, n_tokens: usize) {
    let mut runner = runner();
    prefill(&mut runner, n_tokens);
    bencher.counter(ItemsCount::new(n_tokens)).bench_local(|| runner.export(Slot(0)).expect("a state"));
}

#[divan::bench(args = N_TOKENS)]
fn put_in_and_verified(bencher: Bencher<'_, '_>, n_tokens: usize) {
    let mut runner = runner();
    let state = state(&mut runner, n_tokens);
    bencher.counter(ItemsCount::new(n_tokens)).bench_local(|| {
        runner.import(Slot(1), &state).expect("whole");
        runner.close(Slot(1)).expect("closed");
    });
}

#[divan::bench(args = N_TOKENS)]
fn read_from_a_disk_and_verified(bencher: Bencher<'_, '_>, n_tokens: usize) {
    let dir = tempfile::tempdir().expect("a folder");
    let state = state(&mut runner(), n_tokens);
    let mut tier = DiskTier::open(dir.path(), vec![("model".to_owned(), "m".to_owned())], 1 << 30).expect("a folder");
    let tokens: Vec<Token> = (0..n_tokens).map(|i| Token::try_from(i).expect("small")).collect();
    let n_bytes = state.bytes.len();
    let state = SeqState { n_tokens: state.n_tokens, bytes: Arc::clone(&state.bytes) };
    tier.put(StoredPrefix { tokens: tokens.clone(), state, counts: None, whole: false });
    while tier.stats().n_written == 0 {
        std::thread::yield_now();
    }
    let found = tier.find(&tokens, &[]).expect("stored");
    assert!(found.n_bytes > n_bytes as u64);
    bencher.counter(ItemsCount::new(n_tokens)).bench_local(|| tier.load(&found).expect("whole"));
}
