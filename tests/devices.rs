//! Where workers are placed, as the system and a shell see it: pinned threads, the plan, lent devices, wrong places.
#![allow(clippy::unwrap_used)]

use std::{
    env, fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Output, Stdio},
};

use eldr::{
    engine::{EngineConfig, LoadedModel, Topology},
    types::{Request, SamplingParams, Token},
};
use serde_json::Value;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-moe-64x4.gguf");

fn config(prefill: &str, decode: &str) -> EngineConfig {
    EngineConfig {
        prefill: prefill.parse().unwrap(),
        decode: decode.parse().unwrap(),
        n_slots: 4,
        n_ctx_slot: 256,
        chunk: 32,
        n_threads: 1,
        exact: true,
        ..EngineConfig::default()
    }
}

/// Texts, and of each worker's thread the processors it may use.
fn serve(config: &EngineConfig) -> (Vec<Vec<Token>>, Vec<(String, String)>) {
    let engine = LoadedModel::load(Path::new(MODEL), config).unwrap().engine(config).unwrap();
    let request = |seed| Request {
        prompt: engine.tokenize("def area(width, height):").unwrap(),
        max_tokens: 12,
        sampling: SamplingParams { temperature: 0.8, seed, ignore_eos: true, ..SamplingParams::default() },
        domain: None,
        deadline: None,
    };
    let streams: Vec<_> = (0..4).map(|seed| engine.submit(request(seed)).unwrap()).collect();
    let texts = streams.into_iter().map(|stream| stream.collect().unwrap().tokens).collect();
    let mut threads = Vec::new();
    for task in fs::read_dir("/proc/self/task").unwrap() {
        let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap_or_default().trim().to_owned()
        };
        // The system keeps 15 bytes of a name.
        if field("Name:").starts_with("prefill ") || field("Name:").starts_with("decode ") {
            threads.push((field("Name:"), field("Cpus_allowed_list:")));
        }
    }
    threads.sort();
    (texts, threads)
}

#[test]
fn workers_are_where_they_were_placed_and_say_the_same() {
    let all = Topology::detect().allowed;
    if all.len() < 2 {
        return;
    }
    let (first, second) = (all.cpus()[0], all.cpus()[1]);
    let (free, _) = serve(&config("1@cpu", "1@cpu"));
    let (pinned, threads) = serve(&config(&format!("1@cpu[{first}]"), &format!("1@cpu[{second}]")));
    assert_eq!(pinned, free);
    let names: Vec<(&str, String)> =
        vec![("decode 0 on CPU", second.to_string()), ("prefill 0 on CP", first.to_string())];
    let seen: Vec<(&str, String)> = threads.iter().map(|(name, cpus)| (name.as_str(), cpus.clone())).collect();
    assert_eq!(seen, names);
}

fn eldr(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_eldr"));
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("ELDR_")) {
        command.env_remove(name);
    }
    command.args(args).env("ELDR_THREADS", "1").stdin(Stdio::null());
    command
}

fn document(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

#[test]
fn every_wrong_place_gets_one_sentence() {
    let beyond = Topology::detect().allowed.cpus().last().unwrap() + 1;
    let pinned = format!("1@cpu[{beyond}]");
    for (prefill, decode, want) in [
        ("1@cpu", "1@cuda:7", "cuda:7"),
        ("1@cpu", "1@rpc:127.0.0.1:1", "RPC endpoint 127.0.0.1:1: no server answers"),
        ("1@cpu", "1@rpc:nowhere", "rpc:nowhere"),
        ("1@cpu[0]", "1@cpu[0]", "both claim processor 0"),
        ("1@cpu", pinned.as_str(), "is not among them"),
        ("1@cpu", "1@cpu[0,threads=2]", "more threads than the 1 processors"),
        ("1@cpu", "1@cpu[slots=2]", "set --slots instead"),
        ("1@cpu", "1@cpu[cpu-moe]", "cpu is the host"),
    ] {
        let ran = eldr(&["run", "--prefill", prefill, "--decode", decode, "-n", "1", "x"]).output().unwrap();
        let text = String::from_utf8(ran.stderr).unwrap();
        let told: Vec<&str> = text.lines().filter(|line| !line.contains("no -m given")).collect();
        assert!(!ran.status.success() && ran.stdout.is_empty(), "{decode}: {text}");
        assert!(told.len() == 1 && told[0].contains(want), "{decode}: {text}");
    }
}

#[test]
fn the_plan_shows_what_fits_and_refuses_what_does_not() {
    let plan = |args: &[&str]| {
        let base = ["doctor", "--plan", "--json", "-m", MODEL, "--prefill", "1@cpu"];
        eldr(&[&base, args].concat()).output().unwrap()
    };
    let fits = plan(&["--decode", "2@cpu", "--slots", "4"]);
    let document_of = document(&fits);
    assert!(fits.status.success(), "{document_of}");
    let host = &document_of["plan"]["devices"][0];
    assert_eq!(
        (host["name"].as_str(), host["n_workers"].as_u64(), host["fits"].as_bool()),
        (Some("host"), Some(3), Some(true))
    );
    // Three workers of 4 slots of 1,024 tokens, 3,072 bytes a token.
    assert_eq!(host["kv"].as_u64(), Some(3 * 4 * 1024 * 3072));
    let threads = &document_of["plan"]["threads"];
    assert!(threads["most"].as_u64() <= threads["n_cores"].as_u64(), "{threads}");
    assert!(document_of["topology"]["nodes"][0]["cpus"].is_string());

    let huge = plan(&["--decode", "1000@cpu", "--slots", "255"]);
    let document_of = document(&huge);
    assert!(!huge.status.success() && document_of["usable"] == false);
    let findings = document_of["findings"].to_string();
    assert!(findings.contains("MiB on host") && findings.contains("--slots "), "{findings}");
    let ran = eldr(&["run", "-m", MODEL, "--prefill", "1@cpu", "--decode", "1000@cpu", "--slots", "255", "x"]);
    let ran = { ran }.output().unwrap();
    let text = String::from_utf8(ran.stderr).unwrap();
    assert!(!ran.status.success() && text.contains("are free: --slots "), "{text}");
}

// Symptom: two sentences, the first without the devices there are, and the exit code of a failure.
#[test]
fn a_device_that_can_not_be_lent_gets_one_sentence() {
    for device in ["cuda:7", "rpc:127.0.0.1:1", "99"] {
        let ran = eldr(&["rpc-server", "--listen", "127.0.0.1:0", "--device", device]).output().unwrap();
        let text = String::from_utf8(ran.stderr).unwrap();
        assert!(ran.status.code() == Some(2) && ran.stdout.is_empty() && text.lines().count() == 1, "{device}: {text}");
        assert!(text.contains(&format!("no device \"{device}\"")) && text.contains("CPU"), "{device}: {text}");
    }
}

/// A lent device; ends with the test.
struct Lent(Child);

impl Drop for Lent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_lent_device_computes_for_others_and_is_back_after_a_crash() {
    let mut child = eldr(&["rpc-server", "--listen", "127.0.0.1:0", "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut text = String::new();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let lent = Lent(child);
    while serde_json::from_str::<Value>(&text).is_err() {
        text.push_str(&lines.next().expect("a document").unwrap());
    }
    let told: Value = serde_json::from_str(&text).unwrap();
    let address = told["listening"].as_str().unwrap();
    assert_eq!((told["device"].as_str(), told["threads"].as_u64()), (Some("CPU"), Some(1)));
    let place = format!("1@rpc:{address}");
    let run = |decode: &str| {
        let args = [
            "run",
            "-m",
            MODEL,
            "--prefill",
            "1@cpu",
            "--decode",
            decode,
            "-c",
            "256",
            "-n",
            "12",
            "--json",
            "Compute 17 * 23.",
        ];
        let ran = eldr(&args).output().unwrap();
        assert!(ran.status.success(), "{ran:?}");
        document(&ran)["text"].as_str().expect("a text").to_owned()
    };
    let here = run("1@cpu");
    assert_eq!(run(&place), here);

    // What ggml's server ends its process over ends the child, and the next one serves.
    let children = || -> Vec<String> {
        let tasks = fs::read_dir(format!("/proc/{}/task", lent.0.id())).unwrap();
        let of = |task: fs::DirEntry| fs::read_to_string(task.path().join("children")).unwrap_or_default();
        let all: Vec<String> = tasks.map(|task| of(task.unwrap())).collect();
        all.iter().flat_map(|pids| pids.split_whitespace().map(str::to_owned)).collect()
    };
    let inner = children().pop().expect("a child");
    assert!(Command::new("kill").args(["-KILL", &inner]).status().unwrap().success());
    let again = (0..600).find(|_| {
        std::thread::sleep(std::time::Duration::from_millis(100));
        children().iter().any(|pid| *pid != inner)
    });
    assert!(again.is_some(), "a new child");
    let listens = |_: &u32| {
        std::thread::sleep(std::time::Duration::from_millis(100));
        eldr(&["doctor", "--plan", "--json", "--decode", &place]).output().unwrap().status.success()
    };
    assert!((0..100).any(|at| listens(&at)), "it listens again");
    assert_eq!(run(&place), here);
}
