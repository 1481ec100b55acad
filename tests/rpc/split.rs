//! One model divided over two servers: text and counts of the model in one place, bytes where they are, and the death of
//! either server the end of that worker alone.

use std::fs;

use eldr::{
    engine::{Plan, PlannedDevice},
    llama::{Backend, Context, ContextParams, Device, MemoryRow, Model, ModelParams},
};
use serde_json::Value;

use super::*;

/// Keys and values of a token in one layer: two heads of 64, two bytes each.
const LAYER_TOKEN: u64 = 2 * 64 * 2 * 2;

fn two() -> ([String; 2], Vec<Server>) {
    let endpoints = [free_endpoint(), free_endpoint()];
    let servers = endpoints.iter().map(|endpoint| Server::start(endpoint)).collect();
    (endpoints, servers)
}

#[test]
fn a_divided_model_gives_the_text_and_the_counts_of_one_in_one_place() {
    let (texts, _, counts) = serve(&config("1@cpu", "1@cpu"));
    let ([a, b], _servers) = two();
    let both = format!("1@rpc:{a}+rpc:{b}");
    for (prefill, decode) in [
        // One copy, and hand-offs within it, to it and from it.
        (both.clone(), both.clone()),
        ("1@cpu".to_owned(), format!("{both}[split=5:2]")),
        (format!("1@rpc:{b}+rpc:{a}[split=1:6]"), "1@cpu".to_owned()),
        // Three places: the first layers, or all experts, on the host.
        (format!("{both}[n-gpu-layers=4,split=1:1]"), format!("{both}[cpu-moe]")),
        // A whole copy beside a divided one on the same server.
        (both.clone(), format!("1@rpc:{a},1@rpc:{b}")),
    ] {
        let (divided_texts, _, divided_counts) = serve(&config(&prefill, &decode));
        assert_eq!(divided_counts, counts, "tap counts, {prefill} {decode}");
        assert_eq!(divided_texts, texts, "texts, {prefill} {decode}");
    }
}

#[test]
fn either_server_dying_costs_the_divided_worker_alone() {
    let ([a, b], mut servers) = two();
    let mut config = config("1@cpu", &format!("1@rpc:{a}+rpc:{b},1@rpc:{a},1@cpu"));
    // Long enough for a machine that is busy with something else.
    config.rpc_deadline = Duration::from_secs(5);
    let engine = Engine::open(Path::new(MODEL), &config).unwrap();
    let requests = requests(&engine, 3, 24);
    let early = requests.len() * 24 / 4;
    let undisturbed = run(&engine, requests.clone(), 0, || {});
    assert_eq!(undisturbed.workers, [0, 1, 2], "every worker is used");

    // The second: what is on the first alone goes on.
    let killed = run(&engine, requests.clone(), early, || servers[1].signal("KILL"));
    killed.is_as(&undisturbed.texts, "the second server killed");
    await_all(&engine, &[true, false, false]);
    servers[1] = Server::start(&b);
    await_all(&engine, &[false; 3]);
    run(&engine, requests.clone(), 0, || {}).is_as(&undisturbed.texts, "the second is back");
    assert_eq!(engine.stats().dispatch.n_workers_lost, 1);

    // The first: both workers on it.
    let stopped = run(&engine, requests.clone(), early, || servers[0].signal("STOP"));
    stopped.is_as(&undisturbed.texts, "the first server stopped");
    await_all(&engine, &[true, true, false]);
    servers[0].signal("CONT");
    await_all(&engine, &[false; 3]);
    let again = run(&engine, requests, 0, || {});
    again.is_as(&undisturbed.texts, "all are back");
    assert_eq!(again.workers, [0, 1, 2], "every worker is used again");
}

fn device<'a>(plan: &'a Plan, name: &str) -> &'a PlannedDevice {
    plan.devices.iter().find(|device| device.name == name).unwrap()
}

#[test]
fn the_plan_has_the_bytes_of_each_device() {
    let ([a, b], _servers) = two();
    let backend = Backend::init();
    let devices: Vec<Device> =
        [&a, &b].map(|endpoint| backend.add_rpc(endpoint, Duration::from_secs(30)).unwrap().remove(0)).into();
    let [first, second] = [devices[0].name(), devices[1].name()];
    let plan = |decode: &str| {
        let config = EngineConfig { exact: false, ..config("1@cpu", decode) };
        Plan::new(Path::new(MODEL), &config).unwrap()
    };
    let whole = plan(&format!("3@rpc:{a}"));
    let (one, three) = (plan(&format!("1@rpc:{a}+rpc:{b}[split=5:2]")), plan(&format!("3@rpc:{a}+rpc:{b}[split=5:2]")));
    let weights = |plan: &Plan, name: &str| device(plan, name).weights;
    // Workers on the same devices share the weights, of which none are lost or held twice.
    assert_eq!(weights(&one, first), weights(&three, first));
    assert_eq!(weights(&three, first) + weights(&three, second), weights(&whole, first));
    // Of 6 layers and the output, 5 and 2.
    let slots = 3 * 4 * 256 * LAYER_TOKEN;
    assert_eq!([first, second].map(|name| device(&three, name).kv), [5 * slots, slots]);
    assert_eq!(device(&whole, first).kv, 6 * slots);
    assert_eq!([first, second].map(|name| device(&three, name).n_workers), [3, 3]);

    // What is foreseen is what is taken, at equal shares too; only of buffers it may be less.
    for shares in [vec![5, 2], vec![]] {
        let rows = |no_alloc| {
            let (device, beside) = (Some(devices[0].clone()), vec![devices[1].clone()]);
            let params = ModelParams { device, beside, shares: shares.clone(), no_alloc, ..ModelParams::default() };
            let model = Model::load(&backend, MODEL, &params).unwrap();
            let params = ContextParams { n_slots: 4, n_ctx_slot: 256, ..ContextParams::default() };
            let rows = Context::new(&model, &params).unwrap().footprint().unwrap();
            let mut rows: Vec<MemoryRow> = rows.into_iter().filter(|row| row.device.is_some()).collect();
            rows.sort_by(|one, other| one.device.cmp(&other.device));
            rows
        };
        for (foreseen, taken) in rows(true).into_iter().zip(rows(false)) {
            assert!(foreseen.compute >= taken.compute, "{shares:?}: {foreseen:?} {taken:?}");
            assert_eq!(MemoryRow { compute: taken.compute, ..foreseen }, taken, "{shares:?}");
        }
    }
}

fn eldr(args: &[&str]) -> (bool, String, Vec<String>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_eldr"));
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("ELDR_")) {
        command.env_remove(name);
    }
    let ran = command.args(args).env("ELDR_THREADS", "1").stdin(Stdio::null()).output().unwrap();
    let told = String::from_utf8(ran.stderr).unwrap();
    (ran.status.success(), String::from_utf8(ran.stdout).unwrap(), told.lines().map(str::to_owned).collect())
}

#[test]
fn a_split_is_asked_for_in_every_way() {
    let ([a, b], _servers) = two();
    let rpc = format!("{a},{b}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("eldr.toml");
    fs::write(&file, "split = true\n[run]\nprefill = \"1\"\ndecode = \"1\"\n").unwrap();
    let file = file.to_str().unwrap();
    let run = |args: &[&str]| {
        let base = ["run", "-m", MODEL, "-c", "256", "-n", "12", "--json"];
        let (ran, text, told) = eldr(&[&base, args, &["Compute 17 * 23."]].concat());
        assert!(ran, "{args:?}: {told:?}");
        let told: Value = serde_json::from_str(&text).unwrap();
        told["text"].as_str().unwrap().to_owned()
    };
    let here = run(&["--prefill", "1@cpu", "--decode", "1@cpu"]);
    for args in [
        &["--rpc", &rpc, "--split", "--prefill", "1", "--decode", "1"][..],
        &["--rpc", &rpc, "--prefill", "1@cpu", "--decode", "1@all[split=2:1]"],
        &["--rpc", &rpc, "--config", file],
    ] {
        assert_eq!(run(args), here, "{args:?}");
    }
}

#[test]
fn what_does_not_fit_is_refused_with_another_division() {
    let ([a, b], _servers) = two();
    let rpc = format!("{a},{b}");
    let plan = |args: &[&str]| {
        let base = ["doctor", "--plan", "--json", "-m", MODEL, "--rpc", &rpc, "--slots", "255"];
        let (ran, text, told) = eldr(&[&base, args].concat());
        let document: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {told:?}"));
        (ran, document)
    };
    let (ran, fits) = plan(&["--prefill", "1", "--decode", "1"]);
    assert!(ran, "{fits}");
    let remote = fits["plan"]["devices"].as_array().unwrap().iter().find(|device| device["name"] == "RPC0").unwrap();
    let (free, worker) = (remote["free"].as_u64().unwrap(), 255 * 1024 * 6 * LAYER_TOKEN);
    assert_eq!(remote["kv"].as_u64(), Some(2 * worker));
    // A little more than one server has, which two have.
    let n = free.div_ceil(worker).to_string();
    let (ran, document) = plan(&["--prefill", "1", "--decode", &n]);
    let findings = document["findings"].to_string();
    assert!(!ran && findings.contains("on RPC0 (") && findings.contains("or --split would fit"), "{findings}");
    let (ran, document) = plan(&["--prefill", "1", "--decode", &n, "--split"]);
    assert!(ran, "{document}");
    let uneven = format!("{n}@rpc:{a}+rpc:{b}[split=6:1]");
    let (ran, document) = plan(&["--prefill", "1@all", "--decode", &uneven]);
    let findings = document["findings"].to_string();
    assert!(!ran && findings.contains("or shares by free memory, without split=, would fit"), "{findings}");
}

#[test]
fn every_wrong_list_gets_one_sentence() {
    let ([a, b], _servers) = two();
    let (rpc, twice) = (format!("{a},{b}"), format!("1@rpc:{a}+RPC0"));
    let unknown = format!("1@rpc:{a}+cuda:7");
    let host = format!("1@RPC0+{}", Backend::init().device("cpu").unwrap().index());
    for (decode, want) in [
        (twice.as_str(), "names RPC0 twice"),
        (unknown.as_str(), "no device \"cuda:7\""),
        ("1@RPC0+RPC0", "names RPC0 twice"),
        ("1@RPC0+cpu", "leave the host the first layers with n-gpu-layers=N"),
        ("1@cpu[0-3]+cpu", "one device: write 1@cpu"),
        (host.as_str(), "leave the host the first layers"),
        ("1@RPC0+RPC1[split=3]", "gives 1 share to 2 devices"),
        ("1@RPC0+RPC1[split=3:0]", "share of 0"),
        ("1@RPC0[split=3:1]", "names one"),
        ("1@all[split=1:2:3]", "gives 3 shares to 2 devices"),
        ("1@RPC0+RPC1[split-mode=row]", "divided by layers"),
    ] {
        let args = ["run", "-m", MODEL, "--rpc", &rpc, "--prefill", "1@cpu", "--decode", decode, "-n", "1", "x"];
        let (ran, text, told) = eldr(&args);
        assert!(!ran && text.is_empty() && told.len() == 1 && told[0].contains(want), "{decode}: {told:?}");
    }
    let args = ["run", "-m", MODEL, "--split", "--prefill", "1@cpu", "--decode", "1@cpu", "-n", "1", "x"];
    let (ran, _, told) = eldr(&args);
    assert!(!ran && told.len() == 1 && told[0].contains("every worker names one"), "{told:?}");
}
