use std::collections::BTreeSet;

use std::{fs, io::Write as _, path::PathBuf, process::Stdio};

use serde_json::Value;

use crate::{DATA, Ran, TINY, alone, eldr, folder, line, run, text, write};

#[test]
fn run_prints_the_text_its_document_holds() {
    let args = ["run", "-m", TINY, "-n", "8", "--ignore-eos", "The court held that"];
    let plain = run(args).succeeded();
    assert_eq!(plain.err, "");
    let json = run(args.into_iter().chain(["--json"])).succeeded().json();
    assert_eq!(plain.out, format!("{}\n", json["text"].as_str().expect("a text")));
    assert_eq!(json["tokens"].as_array().map(Vec::len), Some(8));
    assert_eq!((&json["usage"]["completion_tokens"], &json["finish_reason"]), (&8.into(), &"length".into()));
    assert_eq!(json["decision"]["worker"], 0);
    assert!(json["timings"]["ttft_ms"].is_f64() && json["timings"]["tpot_ms"].is_f64(), "{json}");
}

#[test]
fn a_seed_decides_a_drawn_text_on_any_number_of_workers() {
    let text = |more: &str| {
        let ran = line(&format!("run -m {TINY} -n 12 --temperature 0.9 --top-k 50 --json {more} Hello"));
        ran.succeeded().json()["tokens"].clone()
    };
    assert_eq!(text("--seed 3"), text("--seed 3 --decode 2 --threads 1 --policy random"));
    assert_ne!(text("--seed 3"), text("--seed 4"));
}

#[test]
fn a_prompt_comes_from_standard_input_and_through_the_chat_template() {
    let from_stdin = |bytes: &[u8]| -> Ran {
        let _alone = alone();
        let mut command = eldr(["run", "-m", TINY, "-n", "4", "--json", "-"]);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("runs");
        child.stdin.take().expect("piped").write_all(bytes).expect("read");
        child.wait_with_output().expect("ends").into()
    };
    let ran = from_stdin(b"Hello there\n").succeeded();
    let direct = run(["run", "-m", TINY, "-n", "4", "--json", "Hello there"]).succeeded().json();
    assert_eq!(ran.json()["tokens"], direct["tokens"]);
    let ran = from_stdin(b"caf\xe9");
    assert!(ran.code == Some(2) && ran.sentence().contains("not UTF-8"), "{ran:?}");

    let chat = run(["run", "-m", TINY, "-n", "4", "--json", "--chat", "--system", "Be brief", "Hello there"]);
    let n = |json: &Value| json["usage"]["prompt_tokens"].as_u64().expect("a count");
    assert!(n(&chat.succeeded().json()) > n(&direct));
}

// Symptom: a band's width without a calibration, and a policy that goes by labels, were taken without a word.
#[test]
fn what_changes_nothing_is_told() {
    let ran = run(["run", "-m", TINY, "-n", "1", "--tau", "0.1", "Hello"]).succeeded();
    assert!(ran.sentence().starts_with("--tau changes nothing: without --calibration"), "{ran:?}");
    let ran = run(["run", "-m", TINY, "-n", "1", "--policy", "domain", "Hello"]).succeeded();
    assert!(ran.sentence().starts_with("policy domain goes by the labels of a workload"), "{ran:?}");
}

#[test]
fn an_answer_may_be_too_late() {
    let ran = run(["run", "-m", TINY, "-n", "500", "--ignore-eos", "--deadline", "0", "--json", "Hello"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert_eq!(ran.json()["finish_reason"], "deadline");
}

#[test]
fn inspect_counts_what_every_token_of_a_prompt_picks() {
    let json = run(["inspect", "-m", TINY, "--prompt", "The court held that", "--json"]).succeeded().json();
    let keys: BTreeSet<&str> = json.as_object().expect("an object").keys().map(String::as_str).collect();
    assert_eq!(keys, BTreeSet::from(["counts", "layers", "n_tokens"]));
    // The last of six layers computes one token only.
    assert_eq!(json["layers"], serde_json::json!([0, 1, 2, 3, 4]));
    let n_tokens = json["n_tokens"].as_u64().expect("a count");
    for row in json["counts"].as_array().expect("rows") {
        let row: Vec<u64> = row.as_array().expect("a row").iter().filter_map(Value::as_u64).collect();
        assert_eq!((row.len(), row.iter().sum::<u64>()), (64, 4 * n_tokens));
    }
    let model = line(&format!("inspect -m {TINY} --json")).succeeded().json()["model"].take();
    assert_eq!((&model["moe"]["n_expert"], &model["moe"]["n_expert_used"]), (&64.into(), &4.into()));
    assert_eq!(model["usable_layers"], json["layers"]);
}

#[test]
fn without_a_model_the_shipped_one_is_used_and_said_so() {
    let ran = line("inspect --json").succeeded();
    assert!(ran.err.starts_with("eldr: no -m given: using the shipped test model "), "{ran:?}");
    assert!(ran.json()["model"]["path"].as_str().expect("a path").ends_with("tiny-moe-64x4.gguf"));
}

/// A calibration of the shipped model for two workers, from eight prompts.
fn calibrate(dir: &tempfile::TempDir, name: &str) -> (PathBuf, Value) {
    let out = dir.path().join(name);
    let prompts = format!("{DATA}/task.calibration.jsonl");
    let args =
        ["calibrate", "-m", TINY, "--prompts", &prompts, "--requests", "8", "--max-tokens", "4", "--workers", "2"];
    let ran = run(args.into_iter().chain(["-o", text(&out), "--tau", "0.2", "--no-verdict", "--json"])).succeeded();
    assert_eq!(ran.err, "");
    (out, ran.json())
}

#[test]
fn a_calibration_is_made_read_and_routed_with() {
    let dir = folder();
    let (file, report) = calibrate(&dir, "a.safetensors");
    assert_eq!((&report["n_requests"], &report["n_workers"]), (&8.into(), &2.into()));
    assert_eq!(report["clusters"][0]["size"], 4);
    assert!(report["rho"].as_f64().expect("rho") <= 1.0 && report["purity"].is_f64(), "{report}");
    let (again, _) = calibrate(&dir, "b.safetensors");
    assert!(fs::read(&file).expect("written") == fs::read(again).expect("written"), "same seed, other bytes");

    let shown = run(["inspect", "-m", TINY, "--calibration", text(&file), "--json"]).succeeded().json();
    let calibration = &shown["calibration"];
    assert_eq!((&calibration["n_workers"], &calibration["layers"]), (&2.into(), &report["layers"]));
    let tau = calibration["tau"].as_f64().expect("tau");
    assert!((tau - 0.2).abs() < 1e-6, "{calibration}");

    let args = ["inspect", "-m", TINY, "--calibration", text(&file), "--prompt", "Solve for x", "--json"];
    let picks = run(args).succeeded().json();
    let signature: Vec<f64> =
        picks["signature"].as_array().expect("a signature").iter().filter_map(Value::as_f64).collect();
    assert_eq!(signature.len(), 64 * report["layers"].as_array().expect("layers").len());
    assert!((signature.iter().map(|x| x * x).sum::<f64>() - 1.0).abs() < 1e-4);

    // As many workers as it was made for, and the policy that uses it, without being told.
    let ran = run(["run", "-m", TINY, "--calibration", text(&file), "-n", "2", "--json", "Solve for x"]).succeeded();
    let json = ran.json();
    assert_eq!((&json["policy"], &json["decision"]["reason"]), (&"marginal_cost".into(), &"marginal_cost".into()));
    assert!(json["decision"]["similarity"].is_f64(), "{json}");
}

#[test]
fn a_bench_prints_a_table_and_writes_its_report_and_drawing() {
    let dir = folder();
    let workload = format!("{DATA}/task.serve.jsonl");
    let (json, svg) = (dir.path().join("bench.json"), dir.path().join("bench.svg"));
    let args = [
        "bench",
        "-m",
        TINY,
        "--workload",
        &workload,
        "--requests",
        "4",
        "--decode",
        "2",
        "--policies",
        "round_robin,least_loaded",
        "--slots",
        "4",
        "--warmup",
        "0",
    ];
    let ran = run(args.into_iter().chain(["--json", text(&json), "--svg", text(&svg)])).succeeded();
    assert!(ran.out.contains("round_robin") && ran.out.contains("least_loaded"), "{ran:?}");
    let report: Value = serde_json::from_slice(&fs::read(json).expect("written")).expect("JSON");
    assert_eq!((&report["version"], &report["decode"], &report["clock"]), (&1.into(), &2.into(), &"virtual".into()));
    let runs = report["runs"].as_array().expect("runs");
    assert_eq!(runs.iter().map(|run| &run["policy"]).collect::<Vec<_>>(), ["round_robin", "least_loaded"]);
    assert!(runs.iter().all(|run| run["failed"] == 0 && run["tokens_sha256"] == runs[0]["tokens_sha256"]), "{report}");
    assert!(fs::read_to_string(svg).expect("written").contains("<svg"));

    let ran = run(args.into_iter().chain(["--no-count", "--json"])).succeeded();
    assert_eq!(ran.json()["runs"].as_array().map(Vec::len), Some(2));
    assert_eq!(ran.json()["runs"][0]["tokens_sha256"], runs[0]["tokens_sha256"]);
}

#[test]
fn an_inflated_model_is_larger_and_says_the_same() {
    let dir = folder();
    let big = dir.path().join("big.gguf");
    let report = run(["inflate", "-m", TINY, "-o", text(&big), "--factor", "2", "--json"]).succeeded().json();
    let size = fs::metadata(&big).expect("written").len();
    assert_eq!(report["n_bytes"]["after"], size);
    assert!(size > fs::metadata(TINY).expect("shipped").len());
    let tokens = |model| run(["run", "-m", model, "-n", "6", "--json", "Hello"]).succeeded().json()["tokens"].clone();
    assert_eq!(tokens(text(&big)), tokens(TINY));
}

// Symptom: of `--ctx 7` the doctor gave two sizes of keys and values, the one that was asked for and llama.cpp's.
#[test]
fn doctor_counts_a_slot_as_llama_cpp_does() {
    let kv = |ctx: u32| {
        let told = line(&format!("doctor -m {TINY} --plan --prefill 1@cpu --decode 1@cpu --ctx {ctx} --json")).json();
        let findings: Vec<String> =
            told["findings"].as_array().expect("findings").iter().map(|f| f["message"].to_string()).collect();
        let devices = told["plan"]["devices"].as_array().expect("devices");
        let bytes: u64 = devices.iter().filter_map(|device| device["kv"].as_u64()).sum();
        (findings.join("\n"), bytes)
    };
    let (told, bytes) = kv(7);
    assert!(told.contains("a slot of 7 tokens holds 256"), "{told}");
    let size = format!("and {:.1} MiB of keys and values for 2 workers", bytes as f64 / f64::from(1 << 20));
    assert!(told.contains(&size), "{size}: {told}");
    let (told, same) = kv(256);
    assert!(!told.contains("holds 256") && same == bytes, "{same} {bytes}: {told}");
}

#[test]
fn doctor_finds_what_is_broken() {
    let good = line(&format!("doctor -m {TINY} --decode 1 --json"));
    let document = good.json();
    assert_eq!((good.code, &document["usable"]), (Some(0), &true.into()), "{document}");
    assert!(document["devices"].as_array().expect("devices").iter().any(|device| device["name"] == "CPU"));

    let bad = line("doctor -m /no/model.gguf --slots 0 --decode 2@abacus --json");
    let document = bad.json();
    assert_eq!((bad.code, &document["usable"]), (Some(1), &false.into()), "{document}");
    let findings = document["findings"].as_array().expect("findings");
    let broken: Vec<&str> =
        findings.iter().filter(|f| f["level"] == "broken").filter_map(|f| f["message"].as_str()).collect();
    for want in ["/no/model.gguf", "slots must be", "abacus"] {
        assert!(broken.iter().any(|message| message.contains(want)), "{want}: {broken:?}");
    }
    let _alone = alone();
    let ran: Ran = eldr(["doctor", "-m", TINY]).env("ELDR_SLOT", "1").output().expect("the program starts").into();
    assert!(ran.out.contains("ELDR_SLOT is set"), "{ran:?}");
}

#[test]
fn completions_and_help_are_printed() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = line(&format!("completions {shell}")).succeeded().out;
        assert!(script.contains("eldr") && script.contains("calibrate"), "{shell}");
        assert_eq!(line(&format!("completions {shell} --json")).succeeded().json()["script"], script);
    }
    assert!(line("--version").succeeded().out.starts_with("eldr "));
    assert!(line("bench --help").succeeded().out.contains("--policies"));
    let help = line("rpc-server --help").succeeded().out;
    assert!(["--listen", "--device", "--threads"].iter().all(|flag| help.contains(flag)), "{help}");
    assert!(!help.contains("--inner"), "{help}");
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    for args in [&["inspect", "-m", TINY][..], &["run", "-m", TINY, "-n", "400", "--ignore-eos", "Hello"], &["--help"]]
    {
        let _alone = alone();
        let mut child = eldr(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("runs");
        drop(child.stdout.take());
        let ran = Ran::from(child.wait_with_output().expect("ends"));
        assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""), "{args:?}");
    }
}

#[cfg(unix)]
#[test]
fn an_interrupt_ends_the_answer_cleanly() {
    let _alone = alone();
    let mut command = eldr(["run", "-m", TINY, "-n", "900", "--ignore-eos", "Hello"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("runs");
    let mut out = child.stdout.take().expect("piped");
    // The first text shows that the handler is installed.
    std::io::Read::read_exact(&mut out, &mut [0]).expect("some text");
    let sent = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill");
    assert!(sent.success());
    std::io::copy(&mut out, &mut std::io::sink()).expect("the rest");
    let ran = Ran::from(child.wait_with_output().expect("ends"));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.sentence().starts_with("interrupted after "), "{ran:?}");
}

#[test]
fn prompts_and_paths_may_hold_any_character() {
    let dir = folder();
    let odd = dir.path().join("\u{6a21}\u{578b} \u{e9}\u{1f600}'\"$");
    fs::create_dir(&odd).expect("created");
    let model = odd.join("\u{43c}\u{43e}\u{434}\u{435}\u{43b}\u{44c} 1.gguf");
    fs::copy(TINY, &model).expect("copied");
    let prompt = "e\u{301}\u{1f469}\u{200d}\u{1f52c}\u{202e}\u{0}\u{feff}\t\u{7f}".replace('\0', "");
    let ran = run(["run", "-m", text(&model), "-n", "3", "--json", &prompt]).succeeded();
    assert_eq!(ran.json()["model"], text(&model));
    // A prompt that looks like an option.
    run(["run", "-m", TINY, "-n", "1", "--", "--json"]).succeeded();
    let workload = write(&dir, "w.jsonl", format!("{{\"id\":\"\u{1f600}\",\"prompt\":\"{}\"}}\n", "\u{6f22}\u{5b57}"));
    let args = ["bench", "-m", text(&model), "--workload", text(&workload), "--policies", "random", "--decode", "1"];
    let report = run(args.into_iter().chain(["--max-tokens", "2", "--warmup", "0", "--json"])).succeeded().json();
    assert_eq!(report["runs"][0]["requests"], 1);
}

// Symptom: `--exact` was dropped without a word.
#[test]
fn exactness_that_can_not_be_had_is_said() {
    if std::thread::available_parallelism().is_ok_and(|n| n.get() > 1) {
        let ran = line("run --exact --flash-attn on --threads 2 -n 2 hello").succeeded();
        assert!(ran.err.contains("is not exact") && ran.err.contains("one thread"), "{ran:?}");
    }
    let ran = line("run --exact --flash-attn on --threads 1 -n 2 hello").succeeded();
    assert!(!ran.err.contains("is not exact"), "{ran:?}");
}
