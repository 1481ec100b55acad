//! What the tap costs: a 512-token prefill with the tap on four layers, beside the same prefill in a context without
//! one. Both run in turns, so that whatever else the machine does falls on both.

#![expect(clippy::print_stdout, reason = "it is the result")]

use std::{
    path::Path,
    time::{Duration, Instant},
};

use eldr::llama::{Backend, Batch, Context, ContextParams, Model, ModelParams};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-moe-64x4.gguf");
const N_TOKENS: usize = 512;
const N_PAIRS: usize = 200;

fn main() {
    let path = std::env::var("ELDR_MODEL").unwrap_or_else(|_| MODEL.to_owned());
    let model = Model::load(&Backend::init(), Path::new(&path), &ModelParams::default()).expect("model");
    let n_threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    let params = ContextParams { n_threads, n_batch: 512, n_ubatch: 512, ..ContextParams::default() };
    let mut plain = Context::new(&model, &params).expect("context");
    let mut tapped = Context::new(&model, &ContextParams { tap: true, ..params }).expect("context with a tap");
    tapped.set_tap_layers(&[0, 1, 2, 3]).expect("layers");
    let mut batch = Batch::new(N_TOKENS);
    for (i, token) in (0..N_TOKENS).zip((10..4000).step_by(7).cycle()) {
        batch.push(token, i as u32, 0, i + 1 == N_TOKENS).expect("room");
    }
    let mut times: Vec<(Duration, Duration)> = Vec::new();
    let mut n_picks = 0;
    for _ in 0..N_PAIRS {
        let start = Instant::now();
        plain.decode(&batch).expect("plain prefill");
        let without = start.elapsed();
        plain.clear_seq(0).expect("empty");
        let start = Instant::now();
        tapped.decode_tapped(&batch, &mut |rows| n_picks += rows.experts.len()).expect("tapped prefill");
        times.push((without, start.elapsed()));
        tapped.clear_seq(0).expect("empty");
    }
    assert_eq!(n_picks, N_PAIRS * 4 * 4 * N_TOKENS, "every pick was read");
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let ratio = median(times.iter().map(|(without, with)| with.as_secs_f64() / without.as_secs_f64()).collect());
    let ms = median(times.iter().map(|(without, _)| without.as_secs_f64() * 1e3).collect());
    println!(
        "tap: {N_TOKENS}-token prefill {ms:.2} ms without, {:+.2} % with the tap on 4 layers",
        (ratio - 1.0) * 100.0
    );
}
