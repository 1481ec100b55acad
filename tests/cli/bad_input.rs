use std::{fs, path::Path};

use eldr::{
    calibrate::{Calibration, TauOrigin, encode},
    types::MoeShape,
};
use ndarray::Array2;
use tempfile::TempDir;

use crate::{DATA, TINY, dense, folder, line, refused, run, text, write};

#[test]
fn a_model_that_is_no_model_is_named() {
    let dir = folder();
    let missing = dir.path().join("missing.gguf");
    let prose = write(&dir, "prose.gguf", "Once upon a time");
    let empty = write(&dir, "empty.gguf", "");
    let whole = fs::read(TINY).expect("the shipped model");
    let cut = write(&dir, "cut.gguf", &whole[..whole.len() / 2]);
    let cut_header = write(&dir, "cut-header.gguf", &whole[..2000]);
    for (model, want) in [
        (missing.as_path(), "no model file at"),
        (dir.path(), "is not a file"),
        (&prose, "is not a GGUF file"),
        (&empty, "is not a GGUF file"),
        (&cut, "is truncated"),
        (&cut_header, "cut off or damaged"),
    ] {
        refused(&["run", "-m", text(model), "hello"], &[want, text(model)]);
        refused(&["inspect", "-m", text(model)], &[want, text(model)]);
    }
}

#[cfg(unix)]
#[test]
fn a_path_that_is_not_unicode_is_refused_like_any_other() {
    use std::os::unix::ffi::OsStringExt as _;
    let dir = folder();
    let mut model = dir.path().as_os_str().as_encoded_bytes().to_vec();
    model.extend(b"/\xff.gguf");
    let model = std::ffi::OsString::from_vec(model);
    fs::copy(TINY, &model).expect("copied");
    let ran = run(["inspect".as_ref(), "-m".as_ref(), model.as_os_str()]);
    assert!(ran.code == Some(2) && ran.sentence().contains("UTF-8 only"), "{ran:?}");
}

#[test]
fn a_dense_model_runs_and_says_that_it_is_routed_by_load() {
    let dir = folder();
    let model = dense(&dir);
    let ran = run(["run", "-m", text(&model), "--policy", "locality_band", "-n", "2", "--json", "abc"]).succeeded();
    assert!(ran.err.contains("the model is dense") && ran.err.contains("by load"), "{ran:?}");
    assert_eq!(ran.json()["policy"], "least_loaded");
    refused(&["inspect", "-m", text(&model), "--prompt", "abc"], &["the model is dense"]);
    let prompts = format!("{DATA}/task.calibration.jsonl");
    let out = dir.path().join("out.safetensors");
    let calibrate =
        ["calibrate", "-m", text(&model), "--prompts", &prompts, "--requests", "4", "--workers", "2", "-o", text(&out)];
    refused(&calibrate, &["the model is dense", "nothing to calibrate"]);
    assert!(!out.exists());
}

/// A calibration of the shipped model for two workers, made up: the first experts of layer 0 tell them apart.
pub fn calibration() -> Calibration {
    let model = line("inspect --json").succeeded().json()["model"].take();
    let shape: MoeShape = serde_json::from_value(model["moe"].clone()).expect("a shape");
    let e = shape.n_expert as usize;
    Calibration {
        idf: Array2::from_elem((shape.n_layer_moe(), e), 0.5),
        layers: vec![0],
        centroids: Array2::from_shape_fn((2, e), |(worker, expert)| f32::from(u8::from(worker == expert))),
        fingerprint: model["fingerprint"].as_str().expect("a fingerprint").to_owned(),
        shape,
        n_requests: 4,
        n_tokens: 100,
        rho: 0.5,
        tau: 0.1,
        cost: 1.0,
        seed: 1,
        load_model: None,
        tau_origin: TauOrigin::Default,
        capacity: None,
        verdict: None,
    }
}

fn refuses_calibration(dir: &TempDir, bytes: &[u8], decode: &str, wanted: &[&str]) {
    let file = write(dir, "c.safetensors", bytes);
    let wanted: Vec<&str> = wanted.iter().copied().chain([text(&file)]).collect();
    refused(&["run", "--calibration", text(&file), "--decode", decode, "hello"], &wanted);
    let workload = format!("{DATA}/task.serve.jsonl");
    refused(
        &["bench", "--workload", &workload, "--requests", "2", "--calibration", text(&file), "--decode", decode],
        &wanted,
    );
}

#[test]
fn a_calibration_that_does_not_fit_is_refused() {
    let dir = folder();
    let good = calibration();
    let bytes = encode(&good);

    refuses_calibration(&dir, &bytes, "3", &["made for 2 decode workers", "is 3", "--workers 3"]);

    let other = Calibration { fingerprint: "0123".to_owned(), ..good.clone() };
    refuses_calibration(&dir, &encode(&other), "2", &["made for model `0123`"]);
    let fewer = MoeShape { n_expert_used: 2, ..good.shape.clone() };
    refuses_calibration(&dir, &encode(&Calibration { shape: fewer, ..good.clone() }), "2", &["top 2", "top 4"]);

    let mut nan = good.clone();
    nan.centroids[[1, 5]] = f32::NAN;
    refuses_calibration(&dir, &encode(&nan), "2", &["centroids", "NaN"]);
    nan = good.clone();
    nan.idf[[2, 3]] = f32::NAN;
    refuses_calibration(&dir, &encode(&nan), "2", &["idf", "NaN"]);

    let newer = replace(&bytes, br#""eldr_calibration":"2""#, br#""eldr_calibration":"7""#);
    refuses_calibration(&dir, &newer, "2", &["format version 7", "reads version 2"]);
    refuses_calibration(&dir, &bytes[..bytes.len() - 9], "2", &["not a whole safetensors file"]);
    refuses_calibration(&dir, b"not safetensors", "2", &["not a whole safetensors file"]);

    let missing = dir.path().join("missing.safetensors");
    refused(&["run", "--calibration", text(&missing), "hello"], &["cannot read calibration", text(&missing)]);
    refused(&["inspect", "--calibration", text(&missing)], &["cannot read calibration", text(&missing)]);
}

fn replace(bytes: &[u8], old: &[u8], new: &[u8]) -> Vec<u8> {
    assert_eq!(old.len(), new.len());
    let at = bytes.windows(old.len()).position(|window| window == old).expect("the bytes to replace");
    [&bytes[..at], new, &bytes[at + old.len()..]].concat()
}

#[test]
fn an_unknown_policy_or_device_is_answered_with_the_known_ones() {
    let known = ["unknown policy 'fastest'", "round_robin", "locality_band"];
    refused(&["run", "--policy", "fastest", "hello"], &known);
    refused(&["bench", "--workload", "w.jsonl", "--policies", "random,fastest"], &known);
    refused(&["run", "--decode", "2@cuda:7", "hello"], &["cuda:7", "CPU"]);
    refused(&["run", "--prefill", "1@abacus", "hello"], &["abacus", "CPU"]);
    // Nothing listens on port 1.
    refused(&["run", "--rpc", "127.0.0.1:1", "hello"], &["127.0.0.1:1", "no server answers"]);
    refused(&["run", "--rpc", "nonsense", "hello"], &["nonsense", "HOST:PORT"]);
    refused(&["run", "--policy", "locality_band", "hello"], &["needs a calibration", "eldr calibrate"]);
}

#[test]
fn zero_of_something_is_refused() {
    refused(&["run", "--decode", "0", "hello"], &["zero workers"]);
    refused(&["run", "--prefill", "0@cpu", "hello"], &["zero workers"]);
    refused(&["run", "--slots", "0", "hello"], &["slots must be between 1 and 256, not 0"]);
    refused(&["run", "--exact", "--slots", "256", "hello"], &["slots must be between 1 and 255, not 256"]);
    refused(&["run", "-n", "0", "hello"], &["-n is 0, which must be at least 1"]);
    refused(&["run", "--threads", "100000", "hello"], &["threads", "cores"]);
    refused(&["calibrate", "--prompts", "p", "--workers", "0", "-o", "o"], &["--workers is 0"]);
    refused(&["bench", "--workload", "w", "--decode", "0"], &["zero workers"]);
    refused(&["run", "--top-p", "7", "hello"], &["--top-p is 7, which must be between 0 and 1"]);
    refused(&["run", "--temperature=-1", "hello"], &["--temperature is -1, which must be a finite number, 0 or more"]);
}

// Symptom: "unexpected argument '-1' found", with the advice to write `-- -1`, for a number that is too small; three
// hundred digits for a rate of 1e-300; "0 or more" for a deadline of 1e300.
#[test]
fn numbers_out_of_bounds_are_named_by_option_and_value() {
    refused(
        &["run", "--temperature", "-1", "hello"],
        &["--temperature is -1, which must be a finite number, 0 or more"],
    );
    refused(&["run", "--seed", "-1", "hello"], &["'-1'", "--seed", "a whole number, 0 or more"]);
    refused(
        &["run", "--deadline", "1e300", "hello"],
        &["--deadline is 1e300, which must be a finite number of seconds"],
    );
    refused(
        &["run", "--repeat-penalty", "0", "hello"],
        &["--repeat-penalty is 0, which must be a finite number above 0"],
    );
    let workload = format!("{DATA}/task.serve.jsonl");
    let bench = |rate: &str, wanted: &[&str]| {
        refused(&["bench", "--workload", &workload, "--requests", "2", "--rate", rate], wanted);
    };
    bench("-1", &["--rate: the rate is -1 requests a second, which must be a finite number above 0"]);
    bench("1e-300", &["at 1e-300 requests a second", "more time than can be counted"]);
}

// Symptom: an id with an escape sequence and a newline coloured the terminal and broke the error in two, which called
// the id a line: "workload line b".
#[test]
fn names_in_errors_are_quoted_cut_and_harmless() {
    let dir = folder();
    let long = format!("{{\"id\":\"a\\u001b[31m\\nzzz{}\",\"prompt\":\"{}\"}}\n", "y".repeat(500), "word ".repeat(300));
    let prompts = write(&dir, "long.jsonl", long);
    let out = dir.path().join("out");
    let shown = r#"prompt "a\u{1b}[31m\nzzzyyy"#;
    refused(
        &["bench", "--workload", text(&prompts), "--policies", "random", "-c", "128"],
        &[&format!("workload {shown}"), r#"yy..": "#],
    );
    refused(&["record", "--prompts", text(&prompts), "-c", "128", "-o", text(&out)], &[shown, r#"yy..": "#]);
    refused(&["run", "-m", "no\n\u{1b}[31msuch.gguf", "hello"], &[r"no\n\u{1b}[31msuch.gguf"]);
    refused(&["run", "--policy", &"\u{1b}x".repeat(300), "hello"], &[r"\u{1b}x..", "round_robin"]);
}

#[test]
fn a_prompt_that_does_not_fit_is_refused() {
    let long = "word ".repeat(200);
    refused(&["run", "-c", "256", &long], &["the prompt has", "a slot holds 256", "--ctx"]);
    refused(&["inspect", "-c", "256", "--prompt", &long], &["the prompt has", "256"]);
    refused(&["run", ""], &["the prompt is empty"]);
    refused(&["run", " \n\t"], &["the prompt is empty"]);
    // Standard input is empty here.
    refused(&["run", "-"], &["the prompt is empty"]);
    refused(&["inspect", "--prompt", ""], &["the prompt is empty"]);
    refused(&["run"], &["<PROMPT>", "eldr run --help"]);
}

#[test]
fn a_workload_that_can_not_be_read_is_refused_with_its_line() {
    let dir = folder();
    let out = dir.path().join("out.safetensors");
    let refused_both = |file: &Path, wanted: &[&str]| {
        let wanted: Vec<&str> = wanted.iter().copied().chain([text(file)]).collect();
        refused(&["calibrate", "--prompts", text(file), "--workers", "2", "-o", text(&out)], &wanted);
        refused(&["bench", "--workload", text(file)], &wanted);
    };
    let good = r#"{"id":"a","prompt":"one"}"#;
    for (name, content, wanted) in [
        ("cut", format!("{good}\n{{\"id\":\"b\",\n"), &["line 2"][..]),
        ("array", format!("{good}\n\n[1]\n"), &["line 3", "not a JSON object"]),
        ("no-prompt", "{\"id\":\"a\"}\n".to_owned(), &["line 1", "prompt"]),
        ("empty-prompt", "{\"id\":\"a\",\"prompt\":\" \"}\n".to_owned(), &["line 1", "the prompt is empty"]),
        ("twice", format!("{good}\n{good}\n"), &["line 2", "id \"a\" is that of line 1"]),
        ("empty", String::new(), &["is empty"]),
    ] {
        refused_both(&write(&dir, name, content), wanted);
    }
    refused_both(&write(&dir, "latin1", b"{\"id\":\"\xe9\",\"prompt\":\"x\"}\n"), &["line 1", "not UTF-8"]);
    refused_both(&dir.path().join("missing"), &["cannot be read"]);
    let few = write(&dir, "few", format!("{good}\n"));
    refused(
        &["calibrate", "--prompts", text(&few), "--workers", "2", "-o", text(&out)],
        &["1 prompts are too few for 2 decode workers"],
    );
    assert!(!out.exists());
}

/// The shell's limit on address space stands in for a small machine.
#[cfg(unix)]
#[test]
fn a_context_that_memory_can_not_hold_is_named_with_its_size() {
    let program = env!("CARGO_BIN_EXE_eldr");
    let script = format!("ulimit -v 1500000; exec '{program}' run -m '{TINY}' --slots 256 --kv-type f32 hello");
    let _alone = crate::alone();
    let ran = std::process::Command::new("sh").args(["-c", &script]).output().expect("a shell");
    let ran = crate::Ran::from(ran);
    assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""), "{ran:?}");
    for want in ["out of memory for context prefill 0 on CPU", "1536 MiB", "256 slots of 1024 tokens"] {
        assert!(ran.sentence().contains(want), "{ran:?}");
    }
}

#[test]
fn the_oracle_needs_labels() {
    let dir = folder();
    let workload = write(&dir, "w.jsonl", "{\"id\": \"a\", \"prompt\": \"hello\", \"max_tokens\": 2}\n");
    let bench = ["bench", "--workload", text(&workload), "--policies"];
    refused(&[&bench[..], &["domain"]].concat(), &["policy domain goes by labels", "no line of the workload"]);
    let ran = run([&bench[..], &["all", "--no-count"]].concat()).succeeded();
    assert!(ran.err.contains("policy domain is left out: no line") && !ran.out.contains("domain "), "{ran:?}");
}

#[test]
fn files_that_can_not_be_written_are_refused_before_the_work() {
    let workload = format!("{DATA}/task.serve.jsonl");
    refused(&["bench", "--workload", &workload, "--svg", "/no/such/folder/x.svg"], &["/no/such/folder/x.svg"]);
    let dir = folder();
    let taken = write(&dir, "taken.gguf", "mine");
    refused(&["inflate", "-o", text(&taken), "--factor", "2"], &["exists", "--force"]);
    refused(
        &["inflate", "-o", text(&dir.path().join("small.gguf")), "--size", "1MB"],
        &["cannot inflate to 1000000 bytes"],
    );
    assert_eq!(fs::read(&taken).expect("still there"), b"mine");
    let new = dir.path().join("new.gguf");
    refused(&["inflate", "-o", text(&new)], &["--factor", "--size"]);
    refused(&["inflate", "-o", text(&new), "--factor", "2", "--size", "1GiB"], &["--factor", "--size"]);
    refused(&["inflate", "-o", text(&new), "--size", "huge"], &["it is not a size"]);
    refused(&["inflate", "-o", text(&new), "--factor", "0.5"], &["at least 1"]);
    refused(&["inflate", "-m", text(&taken), "-o", text(&new), "--factor", "2"], &["GGUF", text(&taken)]);
}

#[test]
fn wrong_usage_is_one_sentence_with_the_way_to_the_help() {
    for (words, want) in [
        ("run --slotz 3 hello", "'--slotz'"),
        ("walk", "'walk'"),
        ("run --slots many hello", "'many'"),
        ("run --flash-attn sometimes hello", "auto, on, off"),
        ("completions tcsh", "bash"),
        ("bench", "--workload"),
        ("rpc-server --threads 0", "--threads is 0"),
        ("rpc-server --listen nowhere", "--listen"),
        ("", "no verb given; they are run, "),
        ("", "record, calibrate, route, bench, simulate, report, inspect, inflate, rpc-server, doctor, completions"),
    ] {
        let ran = line(words);
        assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""), "{words}: {ran:?}");
        assert!(ran.sentence().contains(want), "{words}: {ran:?}");
        assert_eq!(ran.err.lines().count(), 1, "{words}: {ran:?}");
    }
}
