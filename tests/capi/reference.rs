//! What the built-in engine sees of some prompts, written down for a host that has llama.cpp contexts of its own.
//!
//! `examples/byo_context.cpp` prints the same lines; tests/capi/run.sh compares them.
#![allow(clippy::unwrap_used)]

use std::{env, fmt::Write, fs, path::PathBuf};

use eldr::{
    Engine, EngineConfig, PolicyKind,
    calibrate::{CalibrationParams, fit},
    engine::{LoadedModel, RecordPrompt, WorkerList, record, write_calibration},
    types::{Request, SamplingParams},
};

const N_WORKERS: usize = 4;
const N_CALIBRATION: usize = 24;
const N_SERVE: usize = 10;

fn prompts(file: &str, n: usize) -> Vec<String> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples/data").join(file);
    let text = fs::read_to_string(path).unwrap();
    let prompt = |line: &str| {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        // One line each, so that a file of them needs no format.
        value["prompt"].as_str().unwrap().replace('\n', " ")
    };
    let lines: Vec<&str> = text.lines().collect();
    // Spread over the file, which has the domains mixed.
    (0..n).map(|i| prompt(lines[i * lines.len() / n])).collect()
}

/// 64-bit FNV-1a.
fn fnv(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

#[test]
#[ignore = "tests/capi/run.sh runs it: it computes with the shipped model and writes to ELDR_CAPI_DIR"]
fn write_reference() {
    let dir = PathBuf::from(env::var_os("ELDR_CAPI_DIR").expect("ELDR_CAPI_DIR is a folder to write to"));
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples/data/tiny-moe-64x4.gguf");
    let mut config = EngineConfig {
        prefill: "1@cpu".parse::<WorkerList>().unwrap(),
        decode: format!("{N_WORKERS}@cpu").parse::<WorkerList>().unwrap(),
        n_slots: 2,
        n_ctx_slot: 512,
        chunk: 512,
        n_threads: 1,
        ..EngineConfig::default()
    };
    let loaded = LoadedModel::load(&model, &config).unwrap();
    let tokenizer = loaded.tokenizer();
    let tokens = |text: &str| tokenizer.tokenize(text).unwrap();
    let learnt: Vec<RecordPrompt> = prompts("task.calibration.jsonl", N_CALIBRATION)
        .iter()
        .enumerate()
        .map(|(i, text)| RecordPrompt { id: i.to_string(), domain: None, tokens: tokens(text), max_tokens: 8 })
        .collect();
    let input = record(&loaded, &config, &learnt, &mut |_| {}).unwrap();
    let (calibration, _) = fit(&input, &CalibrationParams::new(N_WORKERS)).unwrap();
    let path = dir.join("calibration.safetensors");
    write_calibration(&path, &calibration).unwrap();

    config.policy = PolicyKind::LocalityBand;
    config.calibration = Some(path);
    config.heed_verdict = false;
    let engine: Engine = loaded.engine(&config).unwrap();
    let mut lines = String::new();
    let served = prompts("task.serve.jsonl", N_SERVE);
    for text in &served {
        let prompt = tokens(text);
        let n_tokens = prompt.len();
        let counts = loaded.capture(&config, &prompt).unwrap().unwrap();
        let rows = calibration.layers.iter().flat_map(|&layer| counts.row(layer).unwrap());
        let signature = calibration.signature(&counts).unwrap();
        let request =
            Request { prompt, max_tokens: 2, sampling: SamplingParams::default(), domain: None, deadline: None };
        let decision = engine.submit(request).unwrap().collect().unwrap().decision.unwrap();
        writeln!(
            lines,
            "tokens {n_tokens} counts {:016x} signature {:016x} worker {} band {} similarity {:08x}",
            fnv(rows.flat_map(|n| n.to_le_bytes())),
            fnv(signature.as_slice().iter().flat_map(|x| x.to_bits().to_le_bytes())),
            decision.worker,
            decision.band,
            decision.similarity.unwrap().to_bits(),
        )
        .unwrap();
    }
    fs::write(dir.join("prompts.txt"), served.join("\n") + "\n").unwrap();
    fs::write(dir.join("engine.txt"), lines).unwrap();
}
