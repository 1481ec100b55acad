//! Recording through llama.cpp: the known picks and gates of planted models, and the `eldr record` program, killed,
//! stopped and given bad input.

mod support;

use std::{
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::{Mutex, MutexGuard, PoisonError, atomic::AtomicBool},
    thread,
    time::Duration,
};

use eldr::{
    engine::{EngineConfig, LoadedModel, RecordPrompt, read_trace, read_trace_settings, write_trace},
    trace::{RecordSettings, Trace, TraceRequest},
    types::Token,
};
use support::planted::{self, Arch, Planted, Said};
use tempfile::TempDir;

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data");
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-moe-64x4.gguf");

/// Two recordings at once would have more threads than there are cores.
static COMPUTING: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    COMPUTING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a temporary folder has a Unicode name")
}

/// Records prompts of several lengths on a planted model; chunks of 48 tokens, blocks of 32.
fn record_planted(arch: Arch, gates: bool) -> (Planted, Vec<RecordPrompt>, Trace) {
    let _alone = alone();
    let dir = folder();
    let planted = planted::write(arch, &dir.path().join("planted.gguf"), 1);
    let config = EngineConfig {
        prefill: "1@cpu".parse().expect("a worker"),
        decode: "1@cpu".parse().expect("a list of workers"),
        n_slots: 3,
        n_ctx_slot: 256,
        chunk: 48,
        n_threads: 1,
        ..EngineConfig::default()
    };
    let model = LoadedModel::load(&planted.path, &config).expect("loads");
    let settings = RecordSettings { gates, ..RecordSettings::default() };
    let recorder = model.recorder(&config, 32, &settings).expect("has experts");
    let prompts: Vec<RecordPrompt> = [100, 1, 32, 65, 49]
        .into_iter()
        .map(|n| RecordPrompt {
            id: n.to_string(),
            domain: None,
            tokens: planted::some_tokens(n, n as u64),
            max_tokens: 6,
        })
        .collect();
    let path = dir.path().join("trace");
    recorder.record_into(&path, &prompts, &AtomicBool::new(false), &mut |_| {}).expect("recorded");
    let trace = read_trace(&path).expect("a trace");
    assert_eq!(trace.requests.len(), prompts.len(), "{arch:?}");
    (planted, prompts, trace)
}

#[test]
fn blocks_and_picks_are_the_known_ones() {
    for arch in Arch::MOE {
        let (planted, prompts, trace) = record_planted(arch, false);
        let (usable, header) = (planted.shape.usable(), &trace.header);
        for (prompt, request) in prompts.iter().zip(&trace.requests) {
            let blocks = prompt.tokens.chunks(32).flat_map(|tokens| {
                usable.iter().flat_map(|&layer| planted.expected_counts(tokens, layer)).collect::<Vec<_>>()
            });
            let blocks: Vec<u8> = blocks.map(|n| n as u8).collect();
            assert_eq!((&request.id, request.n_prompt as usize), (&prompt.id, prompt.tokens.len()));
            assert!(request.blocks == blocks && request.gates.is_none(), "{arch:?}, prompt {}", prompt.id);
            // Six tokens: the prefill draws the first, and the last is not run.
            assert_eq!(request.n_steps(header), 5, "{arch:?}");
            for step in 0..5 {
                let picked = |token: Token, layer: usize| {
                    let mut picks: Vec<u32> =
                        request.step_picks(header, step, layer).iter().map(|&e| e.into()).collect();
                    picks.sort_unstable();
                    picks == planted.expected_picks(token, layer as u32)
                };
                let all = |token: &Token| (0..planted.shape.n_layer_moe()).all(|layer| picked(*token, layer));
                let n_tokens = (0..Token::try_from(planted::N_VOCAB).expect("small")).filter(all).count();
                assert_eq!(n_tokens, 1, "{arch:?}, prompt {}, step {step}: no token's picks", prompt.id);
            }
        }
    }
}

/// What attention and experts write beside the token's own dimension adds to the norm and makes each score smaller: by no
/// more than planted models are built to bear (the scales of `support/planted/gate.rs`).
const NORMS: [f64; 2] = [0.97, 1.0];

/// A gate's logits and probabilities for scores that the norm made smaller.
fn gate_at(arch: Arch, said: Said<'_>, norm: f64) -> (Vec<f64>, Vec<f64>) {
    let logits: Vec<f64> =
        said.scores.iter().zip(said.logits).map(|(score, logit)| logit - score + norm * score).collect();
    let sum: f64 = logits.iter().map(|logit| logit.exp()).sum();
    let probability = |logit: &f64| match arch {
        Arch::DeepSeek2 => 1.0 / (1.0 + (-logit).exp()),
        _ => logit.exp() / sum,
    };
    let probabilities = logits.iter().map(probability).collect();
    (logits, probabilities)
}

#[test]
fn gate_sums_are_the_known_ones() {
    for arch in Arch::MOE {
        let (planted, prompts, trace) = record_planted(arch, true);
        let e = planted.shape.n_expert as usize;
        for (prompt, request) in prompts.iter().zip(&trace.requests) {
            let sums = request.gates.as_ref().expect("asked for");
            let usable = planted.shape.usable();
            assert_eq!((sums.probability.len(), sums.logit.len()), (usable.len() * e, usable.len() * e), "{arch:?}");
            for (row, layer) in usable.into_iter().enumerate() {
                let case = format!("{arch:?}, prompt {}, layer {layer}", prompt.id);
                // The least and the most each sum can be: probabilities of all experts, then logits.
                let mut range = vec![[0.0; 2]; 2 * e];
                for &token in &prompt.tokens {
                    let ends = NORMS.map(|norm| gate_at(arch, planted.expected_gate(token, layer), norm));
                    let [low, high] = ends.map(|(logits, probabilities)| [probabilities, logits].concat());
                    for (range, (a, b)) in range.iter_mut().zip(low.into_iter().zip(high)) {
                        *range = [range[0] + a.min(b), range[1] + a.max(b)];
                    }
                }
                let got = |sums: &[f32]| sums[row * e..][..e].iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
                let (probabilities, logits) = (got(&sums.probability), got(&sums.logit));
                for (i, (got, [low, high])) in probabilities.iter().chain(&logits).zip(range).enumerate() {
                    // A probability may turn between the ends, by far less than this.
                    let slack = 1e-3 * (high.abs() + 0.01);
                    assert!((low - slack..=high + slack).contains(got), "{case}, {i}: {got} not in {low}..{high}");
                }
                if arch != Arch::DeepSeek2 {
                    let (all, n) = (probabilities.iter().sum::<f64>(), prompt.tokens.len() as f64);
                    assert!((all - n).abs() < 1e-5 * n, "{case}: probabilities of {n} tokens add up to {all}");
                }
            }
        }
    }
}

/// The sums of a prompt of one token are the gate's outputs themselves, known to the float but for one factor, the norm.
#[test]
fn a_gates_outputs_for_one_token_are_the_known_ones_to_the_float() {
    for arch in Arch::MOE {
        let (planted, prompts, trace) = record_planted(arch, true);
        let e = planted.shape.n_expert as usize;
        let at = prompts.iter().position(|prompt| prompt.tokens.len() == 1).expect("a prompt of one token");
        let sums = trace.requests[at].gates.as_ref().expect("asked for");
        for (row, layer) in planted.shape.usable().into_iter().enumerate() {
            let case = format!("{arch:?}, layer {layer}");
            let said = planted.expected_gate(prompts[at].tokens[0], layer);
            let got = |sums: &[f32]| sums[row * e..][..e].iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
            let (logits, probabilities) = (got(&sums.logit), got(&sums.probability));
            let largest =
                (0..e).max_by(|&a, &b| said.scores[a].abs().total_cmp(&said.scores[b].abs())).expect("experts");
            let bias = said.logits[largest] - said.scores[largest];
            let norm = (logits[largest] - bias) / said.scores[largest];
            assert!((NORMS[0]..NORMS[1] + 1e-6).contains(&norm), "{case}: norm {norm}");
            let (want_logits, want_probabilities) = gate_at(arch, said, norm);
            for i in 0..e {
                let (got, want) = ((logits[i], probabilities[i]), (want_logits[i], want_probabilities[i]));
                let near = (got.0 - want.0).abs() < 1e-4 && (got.1 - want.1).abs() < 1e-5;
                assert!(near, "{case}, expert {i}: {got:?}, not {want:?}");
            }
        }
    }
}

#[test]
fn recording_the_gates_changes_no_pick() {
    for arch in [Arch::Qwen3Moe, Arch::GptOss] {
        let without = record_planted(arch, false).2;
        let mut with = record_planted(arch, true).2;
        for request in &mut with.requests {
            request.gates = None;
        }
        assert_eq!(with, without, "{arch:?}");
    }
}

/// The program with these arguments and none of the caller's settings, on one thread.
fn eldr<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_eldr"));
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("ELDR_")) {
        command.env_remove(name);
    }
    command.arg("record").args(args).env("ELDR_THREADS", "1").stdin(Stdio::null());
    command
}

fn run(args: &[&str]) -> Output {
    let _alone = alone();
    eldr(args).output().expect("the program starts")
}

#[track_caller]
fn succeeded(args: &[&str]) -> String {
    let ran = run(args);
    assert_eq!(ran.status.code(), Some(0), "{args:?}: {ran:?}");
    String::from_utf8(ran.stdout).expect("UTF-8")
}

/// Expects exit code 2 and one sentence that holds all of `wanted`.
#[track_caller]
fn refused(args: &[&str], wanted: &[&str]) {
    let ran = run(args);
    assert_eq!((ran.status.code(), ran.stdout.is_empty()), (Some(2), true), "{args:?}: {ran:?}");
    let said = String::from_utf8(ran.stderr).expect("UTF-8");
    assert!(said.starts_with("eldr: ") && said.lines().count() == 1, "{args:?}: {said}");
    assert!(wanted.iter().all(|want| said.contains(want)), "{args:?}: {wanted:?} not in: {said}");
}

fn task() -> String {
    format!("{DATA}/task.calibration.jsonl")
}

fn requests(path: &Path) -> Vec<TraceRequest> {
    read_trace(path).expect("a trace").requests
}

#[cfg(unix)]
#[test]
fn a_recording_that_was_stopped_or_killed_goes_on_to_the_same_bytes() {
    let dir = folder();
    let (whole, path) = (dir.path().join("whole"), dir.path().join("t"));
    let task = task();
    let args = |path: &Path| {
        ["-m", TINY, "--prompts", &task, "--requests", "24", "-n", "24", "--slots", "4", "-o", text(path)]
            .map(str::to_owned)
    };
    let all = args(&whole);
    let said = succeeded(&all.each_ref().map(String::as_str));
    assert!(said.contains("recorded 24 requests in"), "{said}");
    for signal in ["-INT", "-KILL"] {
        let _alone = alone();
        let n_before = fs::metadata(&path).map_or(0, |found| found.len());
        let mut child = eldr(args(&path)).stderr(Stdio::piped()).spawn().expect("runs");
        // Some records more, whatever the machine's speed.
        while fs::metadata(&path).map_or(0, |found| found.len()) < n_before + 20_000 {
            assert!(child.try_wait().expect("waited for").is_none(), "it ended before it was stopped");
            thread::sleep(Duration::from_millis(2));
        }
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().expect("kill runs").success());
        let ran = child.wait_with_output().expect("ends");
        let n = if signal == "-INT" { requests(&path).len() } else { 0 };
        if signal == "-INT" {
            let said = String::from_utf8(ran.stderr).expect("UTF-8");
            let want = format!("interrupted: {n} of 24 prompts are recorded in {}; the same command", path.display());
            assert!(ran.status.code() == Some(1) && said.contains(&want) && n > 0, "{said}");
        }
    }
    let all = args(&path);
    let said = succeeded(&all.each_ref().map(String::as_str));
    assert!(said.contains("were there before") && said.contains("holds 24 requests"), "{said}");
    assert!(fs::read(&path).expect("there") == fs::read(&whole).expect("there"));
}

#[test]
fn prompts_come_from_text_from_standard_input_and_in_the_chat_template() {
    use std::io::Write as _;
    let dir = folder();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("two.txt"), "first line\n\nthird line\n").expect("written");
    let prompts = at("two.txt");
    succeeded(&["-m", TINY, "--prompts", text(&prompts), "-n", "3", "-o", text(&at("plain"))]);
    let plain = requests(&at("plain"));
    assert_eq!(plain.iter().map(|request| request.id.as_str()).collect::<Vec<_>>(), ["two:1", "two:3"]);
    let settings = ["--chat", "--gates", "--block", "16", "--seed", "5", "--temperature", "0"];
    let args = ["-m", TINY, "--prompts", text(&prompts), "-n", "3", "-o"];
    let said = succeeded(&[&args[..], &[text(&at("chat")), "--json"], &settings].concat());
    let document: serde_json::Value = serde_json::from_str(&said).expect("one document");
    assert_eq!((&document["n_recorded"], &document["gates"]), (&2.into(), &true.into()), "{said}");
    let chat = requests(&at("chat"));
    assert!(chat.iter().zip(&plain).all(|(chat, plain)| chat.n_prompt > plain.n_prompt));
    assert!(chat.iter().all(|request| request.gates.is_some()));
    let want = RecordSettings { max_tokens: 3, temperature: 0.0, seed: 5, chat: true, gates: true };
    assert_eq!(read_trace_settings(&at("chat")).expect("a trace"), want);
    for (name, input, ids) in [
        ("lines", "one\ntwo\n", ["stdin:1", "stdin:2"]),
        ("json", "{\"id\":\"a\",\"prompt\":\"one\"}\n{\"id\":\"b\",\"prompt\":\"two\"}\n", ["a", "b"]),
    ] {
        let _alone = alone();
        let path = at(name);
        let args = ["-m", TINY, "--prompts", "-", "-n", "2", "-o", text(&path)];
        let mut child = eldr(args).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("runs");
        child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("written");
        assert!(child.wait().expect("ends").success());
        assert_eq!(requests(&path).iter().map(|request| request.id.clone()).collect::<Vec<_>>(), ids);
    }
}

#[test]
fn a_trace_that_can_not_be_gone_on_with_is_refused_in_a_sentence() {
    let dir = folder();
    let path = dir.path().join("t");
    let task = task();
    let base = ["-m", TINY, "--prompts", &task, "--requests", "3", "-n", "4"];
    let to = |path: &Path, more: &[&str]| -> Vec<String> {
        [&base[..], &["-o", text(path)], more].concat().into_iter().map(str::to_owned).collect()
    };
    let refused_with = |path: &Path, more: &[&str], wanted: &[&str]| {
        refused(&to(path, more).iter().map(String::as_str).collect::<Vec<_>>(), wanted);
    };
    succeeded(&to(&path, &[]).iter().map(String::as_str).collect::<Vec<_>>());
    let bytes = fs::read(&path).expect("there");
    for (more, wanted) in [
        (&["--seed", "2"][..], &["recorded with --seed 0, now it would be 2"][..]),
        (&["--temperature", "0.5"], &["--temperature 0.8", "0.5"]),
        (&["--block", "64"], &["--block 32", "64"]),
        (&["--gates"], &["--gates off", "on"]),
        (&["--chat"], &["--chat off", "on"]),
    ] {
        refused_with(&path, more, wanted);
    }
    let other = dir.path().join("other.gguf");
    planted::write(Arch::Qwen3Moe, &other, 1);
    let prompts = dir.path().join("p.jsonl");
    fs::write(&prompts, "{\"id\":\"a\",\"prompt\":\"one\"}\n").expect("written");
    let args = ["-m", text(&other), "--prompts", text(&prompts), "-n", "4", "-o", text(&path)];
    refused(&args, &["recorded with the model", text(&path)]);
    fs::write(&prompts, "{\"id\":\"task-calibration-0001\",\"prompt\":\"one\"}\n").expect("written");
    let args = ["-m", TINY, "--prompts", text(&prompts), "-n", "4", "-o", text(&path)];
    refused(&args, &["prompt \"task-calibration-0001\" is in the trace", "another text"]);
    assert!(fs::read(&path).expect("there") == bytes);

    let bad = dir.path().join("bad");
    let mut flipped = bytes.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 4;
    let mut newer = bytes.clone();
    newer[8] = 2;
    for (content, wanted) in [
        (&flipped, &["record 2 of the trace is damaged"][..]),
        (&newer, &["format version 2", "reads version 1"]),
        (&b"{\"id\":\"mine\"}".to_vec(), &["not a trace"]),
    ] {
        fs::write(&bad, content).expect("written");
        refused_with(&bad, &[], wanted);
        assert!(fs::read(&bad).expect("there") == *content);
    }
}

#[test]
fn bad_usage_and_prompts_are_refused_before_anything_is_written() {
    let dir = folder();
    let path = dir.path().join("t");
    let at = |name: &str, content: &str| -> PathBuf {
        let path = dir.path().join(name);
        fs::write(&path, content).expect("written");
        path
    };
    let dense = dir.path().join("dense.gguf");
    planted::write(Arch::DenseLlama, &dense, 1);
    let good = at("good.jsonl", "{\"id\":\"a\",\"prompt\":\"one\"}\n");
    let twice = at("twice.jsonl", "{\"id\":\"a\",\"prompt\":\"one\"}\n{\"id\":\"a\",\"prompt\":\"two\"}\n");
    let long = at("long.txt", &format!("short\n{}\n", "word ".repeat(400)));
    let empty = at("empty.txt", "\n\n");
    let to = |model: &str, prompts: &Path, more: &[&str], wanted: &[&str]| {
        refused(&[&["-m", model, "--prompts", text(prompts), "-o", text(&path)], more].concat(), wanted);
    };
    to(text(&dense), &good, &[], &["the model is dense", "nothing to record"]);
    to(TINY, &twice, &[], &["line 2", "id \"a\" is that of line 1"]);
    to(TINY, &long, &["-c", "256"], &["prompt \"long:2\"", "do not fit a slot of 256", "--ctx"]);
    to(TINY, &empty, &[], &["has no prompts", text(&empty)]);
    to(TINY, &dir.path().join("missing.jsonl"), &[], &["cannot be read"]);
    to(TINY, &good, &["--block", "8"], &["--block is 8", "between 16 and 128"]);
    to(TINY, &good, &["-n", "1"], &["--max-tokens must be at least 2"]);
    to(TINY, &good, &["--temperature=-1"], &["--temperature is -1"]);
    to(TINY, &good, &["--requests", "0"], &["--requests is 0"]);
    assert!(!path.exists());
    // Symptom: `-o /dev/stdout > t` wrote the trace and the report into one file.
    for output in ["/dev/stdout", "/proc/self/fd/1", text(&path)] {
        let file = fs::File::create(&path).expect("made");
        let mut command = eldr(["-m", TINY, "--prompts", text(&good), "-o", output]);
        let ran = command.stdout(file).output().expect("the program starts");
        let said = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.code() == Some(2) && said.contains(&format!("cannot write {output}: it is ")), "{said}");
        assert_eq!(fs::read(&path).expect("there"), b"");
        fs::remove_file(&path).expect("removed");
    }
    for output in [good.as_path(), dir.path()] {
        let args = ["-m", TINY, "--prompts", text(&good), "-o", text(output)];
        refused(&args, &[text(output)]);
    }
    assert_eq!(fs::read_to_string(&good).expect("there"), "{\"id\":\"a\",\"prompt\":\"one\"}\n");
}

/// The format's documentation ends with a reader in Python: it reads what is written.
#[test]
fn the_documented_python_reads_a_trace() {
    let docs = include_str!("../src/trace/mod.rs").lines().filter_map(|line| line.strip_prefix("//!"));
    let code: Vec<&str> = docs
        .skip_while(|line| line.trim() != "```python")
        .skip(1)
        .take_while(|line| line.trim() != "```")
        .map(|line| line.strip_prefix(' ').unwrap_or(line))
        .collect();
    let dir = folder();
    let path = dir.path().join("t");
    let (_, _, trace) = record_planted(Arch::DeepSeek2, true);
    let settings = RecordSettings { gates: true, ..RecordSettings::default() };
    write_trace(&path, &trace, &settings).expect("written");
    let show = "import sys\nprint(json.dumps([[n, d, c, list(p)] for n, d, c, p in requests(sys.argv[1])]))";
    let program = format!("{}\n{show}\n", code.join("\n"));
    let Ok(ran) = Command::new("python3").args(["-c", &program, text(&path)]).output() else { return };
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let read: serde_json::Value = serde_json::from_slice(&ran.stdout).expect("a list");
    let want = trace.requests.into_iter().map(|request| (request.id, request.domain, request.blocks, request.picks));
    assert_eq!(read, serde_json::to_value(want.collect::<Vec<_>>()).expect("a list"));
}
