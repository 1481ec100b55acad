//! Calibrations from traces and from other engines' counts, their verdicts, and where they send requests.

use std::{collections::HashMap, fs, path::PathBuf};

use eldr::{
    calibrate::{CalibrationInput, CalibrationParams, decode, encode, fit},
    engine::read_trace,
    sim::Verdict,
};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::Value;
use tempfile::TempDir;

use crate::{DATA, TINY, bad_input::calibration, folder, refused, run, text, write};

/// A trace of the first 40 calibration prompts.
fn trace(dir: &TempDir) -> PathBuf {
    let path = dir.path().join("trace");
    let prompts = format!("{DATA}/task.calibration.jsonl");
    let args = ["record", "-m", TINY, "--prompts", &prompts, "--requests", "40", "-n", "8", "--gates"];
    run(args.into_iter().chain(["-o", text(&path)])).succeeded();
    path
}

/// A counts file of these requests, L layers and E experts.
fn counts(
    dir: &TempDir,
    name: &str,
    shape: [usize; 3],
    prefill: &[u32],
    decode: &[u32],
    labels: Option<&str>,
) -> PathBuf {
    let bytes = [prefill, decode].map(|counts| counts.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>());
    let view = |bytes| TensorView::new(Dtype::U32, shape.to_vec(), bytes).expect("a tensor");
    let tensors = [("prefill_counts", view(&bytes[0])), ("decode_counts", view(&bytes[1]))];
    let metadata = labels.map(|labels| HashMap::from([("labels".to_owned(), labels.to_owned())]));
    write(dir, name, safetensors::serialize(tensors, metadata).expect("safetensors"))
}

/// Six requests of two kinds: the even ones pick experts 0 and 1, the odd ones 2 and 3.
fn two_kinds(dir: &TempDir, name: &str) -> PathBuf {
    let row = |kind: u32, i: u32| [0, 1, 2, 3].map(|e| if e / 2 == kind { 5 + (i * (e + 1)) % 3 } else { (i + e) % 2 });
    let all: Vec<u32> = (0..6).flat_map(|i| row(i % 2, i).into_iter().chain(row(i % 2, i + 1))).collect();
    counts(dir, name, [6, 2, 4], &all, &all, Some(r#"["a","b","a","b","a",null]"#))
}

#[test]
fn a_trace_gives_tau_a_verdict_and_a_page() {
    let dir = folder();
    let trace = trace(&dir);
    let [file, again] = ["a.safetensors", "b.safetensors"].map(|name| dir.path().join(name));
    let pages = dir.path().join("pages/deep");
    let args = ["calibrate", "--trace", text(&trace), "--workers", "2", "--json", "-o"];
    let ran = run(args.into_iter().chain([text(&file), "--report", text(&pages)])).succeeded();
    assert_eq!(ran.err, "");
    let report = ran.json();
    assert_eq!((&report["n_requests"], &report["tau_origin"]), (&40.into(), &"trace".into()));
    let taus = report["tau_curve"]["points"].as_array().expect("points").len();
    assert!(taus > 5 && report["verdict"]["helps"].is_boolean(), "{report}");
    let sentence = report["verdict_sentence"].as_str().expect("a sentence");
    assert!(sentence.starts_with("locality ") && sentence.contains("95% interval"), "{sentence}");

    let html = fs::read_to_string(pages.join("report.html")).expect("a page");
    let json: Value =
        serde_json::from_str(&fs::read_to_string(pages.join("report.json")).expect("numbers")).expect("JSON");
    assert!(html.starts_with("<!") && html.contains("<svg") && !html.contains("http://") && json.is_object());

    run(args.into_iter().chain([text(&again)])).succeeded();
    let bytes = fs::read(&file).expect("written");
    assert!(bytes == fs::read(&again).expect("written"), "the same trace and seed gave other bytes");
    let stored = Verdict::of(&decode(&bytes).expect("a calibration")).expect("a verdict");
    assert_eq!(stored.sentence(), sentence);
    let shown = run(["inspect", "-m", TINY, "--calibration", text(&file)]).succeeded().out;
    assert!(shown.contains(sentence), "{shown}");

    // With a given tau the verdict is on that tau.
    let given = run(args.into_iter().chain([text(&file), "--tau", "0.3", "--capacity", "3,1"])).succeeded().json();
    assert_eq!((&given["tau"], &given["tau_origin"]), (&0.3.into(), &"given".into()));
    // Symptom: a worker that gets no request was told twice, first as a verdict that could not be had.
    let ask =
        ["calibrate", "--trace", text(&trace), "--workers", "2", "-o", text(&again), "--capacity", "4294967295,1"];
    refused(&ask, &["decode worker 1 with capacity 1 of 4294967296 would get none"]);
    assert!(!again.exists() || fs::read(&again).expect("as it was") == bytes);
    assert_eq!((&given["clusters"][0]["size"], &given["clusters"][1]["size"]), (&30.into(), &10.into()));
    assert_eq!(given["tau_curve"]["points"].as_array().map(Vec::len), Some(1));

    // Symptom: the page was written over the calibration, and both were said to be there.
    for name in ["report.html", "report.json"] {
        let (pages, page) = (dir.path().join("over"), dir.path().join("over").join(name));
        fs::create_dir_all(&pages).expect("made");
        let ask = ["calibrate", "--trace", text(&trace), "--workers", "2", "-o", text(&page), "--report", text(&pages)];
        refused(&ask, &["cannot write", name]);
        assert!(!page.exists());
    }

    let dense = crate::dense(&dir);
    let ask = ["calibrate", "-m", text(&dense), "--trace", text(&trace), "--workers", "2", "-o", text(&file)];
    refused(&ask, &["recorded on another model"]);
    let ask = ["calibrate", "--trace", text(&trace), "--requests", "1", "--workers", "2", "-o", text(&file)];
    refused(&ask, &["1 requests are too few for 2 decode workers"]);
    let ask = ["calibrate", "--trace", text(&trace), "--workers", "9", "--tau", "auto", "-o", text(&file)];
    refused(&ask, &["needs", "record more"]);
    let mut flipped = fs::read(&trace).expect("recorded");
    let at = flipped.len() / 2;
    flipped[at] ^= 4;
    let flipped = write(&dir, "flipped", flipped);
    refused(
        &["calibrate", "--trace", text(&flipped), "--workers", "2", "-o", text(&again)],
        &["record", text(&flipped)],
    );
    assert!(fs::read(&again).expect("as it was") == bytes, "a refused calibration changed the file");

    // The trace read by the library is what the program fitted.
    let trace = read_trace(&trace).expect("a trace");
    let input = CalibrationInput::of_trace(&trace, 0..40);
    assert!(trace.requests.is_sorted_by_key(|request| &request.id), "recorded in the order of ids");
    let (fitted, _) = fit(&input, &CalibrationParams::new(2)).expect("a fit");
    assert_eq!(fitted.centroids, decode(&bytes).expect("a calibration").centroids);
}

#[test]
fn counts_of_another_engine_are_calibrated_and_routed() {
    let dir = folder();
    let captured = two_kinds(&dir, "counts.safetensors");
    let file = dir.path().join("c.safetensors");
    let args = ["calibrate", "--counts", text(&captured), "--workers", "2", "-o", text(&file), "--json"];
    let ran = run(args).succeeded();
    let report = ran.json();
    assert_eq!((&report["purity"], &report["tau_origin"]), (&1.0.into(), &"default".into()));
    // Symptom: there was no verdict, and nobody said why.
    assert!(report["verdict"].is_null());
    assert!(
        ran.sentence().starts_with("no verdict on whether locality helps") && ran.err.lines().count() == 1,
        "{ran:?}"
    );
    assert!(report["no_verdict"].as_str().expect("why").contains("--counts has no generated tokens"), "{report}");

    // Symptom: a calibration of another engine's model could not be looked at: the shipped model does not fit it.
    let shown = run(["inspect", "--calibration", text(&file), "--json"]).succeeded();
    assert_eq!(shown.err, "");
    let document = shown.json();
    let calibration = &document["calibration"];
    assert!(
        document["model"].is_null() && calibration["fits"].is_null() && calibration["verdict"].is_null(),
        "{shown:?}"
    );
    assert_eq!((&calibration["n_workers"], &calibration["shape"]["n_expert"]), (&2.into(), &4.into()));
    assert_eq!(calibration["rho"], report["rho"]);
    let lines = run(["inspect", "--calibration", text(&file)]).succeeded().out;
    let fingerprint = calibration["fingerprint"].as_str().expect("a fingerprint");
    for want in ["for 2 decode workers", fingerprint, "layers kept", "rho", "tau", "verdict", "capacity", "not checked"]
    {
        assert!(lines.contains(want), "{want}: {lines}");
    }
    refused(
        &["inspect", "-m", TINY, "--calibration", text(&file)],
        &["made for a model of", "2 MoE layers", text(&file)],
    );

    let route = |more: &[&str]| {
        let args = ["route", "--calibration", text(&file), "--counts", text(&captured), "--json"];
        run(args.iter().chain(more)).succeeded().json()
    };
    let routed = route(&[]);
    let requests = routed["requests"].as_array().expect("requests");
    let workers: Vec<&Value> = requests.iter().map(|request| &request["worker"]).collect();
    assert_eq!(workers, [0, 1, 0, 1, 0, 1].map(Value::from).iter().collect::<Vec<_>>());
    for request in requests {
        let similarities: Vec<f64> =
            request["similarities"].as_array().expect("cosines").iter().filter_map(Value::as_f64).collect();
        let best = usize::from(similarities[1] > similarities[0]);
        assert_eq!((&request["worker"], &request["band"][0]), (&best.into(), &best.into()), "{request}");
        assert_eq!(
            (&request["reason"], request["band"].as_array().map(Vec::len)),
            (&"band".into(), Some(1)),
            "{request}"
        );
    }
    // A band of all workers goes by load; booked requests count.
    let wide = route(&["--tau", "2", "--loads", "3,1", "--book"]);
    let workers: Vec<&Value> = wide["requests"].as_array().expect("requests").iter().map(|r| &r["worker"]).collect();
    assert_eq!(workers[..2], [&Value::from(1), &Value::from(1)]);
    assert_eq!(wide["requests"][0]["band"], serde_json::json!([0, 1]));

    let base = ["route", "--calibration", text(&file), "--counts", text(&captured)];
    let with = |more: &[&'static str]| base.iter().copied().chain(more.iter().copied()).collect::<Vec<&str>>();
    refused(&with(&["--loads", "1,2,3"]), &["--loads has 3 numbers", "2 workers"]);
    refused(&with(&["--loads", "1,x"]), &["--loads", "'x' of it: it must be a whole number"]);
    refused(&with(&["--tau", "9"]), &["--tau", "from 0", "to 2"]);
    let full = run(with(&["--loads", "1,1", "--limits", "1,1"]));
    assert!(full.code == Some(1) && full.sentence().contains("every decode worker is full"), "{full:?}");
    // Symptom: the band listed full workers and forgot those that --min-band adds.
    let narrow = route(&["--min-band", "2"]);
    assert_eq!(narrow["requests"][0]["band"], serde_json::json!([0, 1]));
    let one_full = route(&["--tau", "2", "--loads", "1,0", "--limits", "1,9"]);
    assert_eq!(one_full["requests"][0]["band"], serde_json::json!([1]));
    // Symptom: settings that another verb reads differently broke the command.
    let config = write(&dir, "settings.toml", "slots = 16\ntau = \"auto\"\n");
    assert_eq!(route(&["--config", text(&config)])["requests"], routed["requests"]);
    let other = counts(&dir, "other.safetensors", [1, 3, 4], &[1; 12], &[1; 12], None);
    refused(
        &["route", "--calibration", text(&file), "--counts", text(&other)],
        &["3 layers of 4 experts", "for 2 of 4", "each MoE layer"],
    );
}

#[test]
fn what_can_not_be_calibrated_is_refused_in_a_sentence() {
    let dir = folder();
    let out = dir.path().join("out.safetensors");
    let captured = two_kinds(&dir, "counts.safetensors");
    let same = counts(&dir, "same.safetensors", [6, 2, 4], &[1; 48], &[1; 48], None);
    let calibrate = |source: &[&str], workers: &str, more: &[&str], wanted: &[&str]| {
        let args = [&["calibrate"], source, &["--workers", workers, "-o", text(&out)], more].concat();
        refused(&args, wanted);
        assert!(!out.exists());
    };
    let from = ["--counts", text(&captured)];
    calibrate(&[], "2", &[], &["--prompts", "--trace", "--counts"]);
    calibrate(&from, "2", &["--trace", "t"], &["cannot be used with"]);
    // Symptom: which file has too few requests, or such that are all alike, was not said.
    calibrate(&from, "7", &[], &[text(&captured), "6 calibration requests", "7"]);
    calibrate(&from, "2", &["--capacity", "1,2,3"], &["3", "2"]);
    calibrate(&from, "2", &["--capacity", "1,none"], &["'none' of it: it must be a whole number"]);
    calibrate(&from, "2", &["--tau", "auto"], &["--counts has no generated tokens to replay"]);
    calibrate(&from, "2", &["--tau", "3"], &["from 0", "to 2"]);
    calibrate(&from, "2", &["--restarts", "20000"], &["20000"]);
    calibrate(&["--counts", text(&same)], "2", &[], &[text(&same), "equally far apart", "6 calibration requests"]);
    calibrate(&["--counts", text(&dir.path().join("none"))], "2", &[], &["cannot read the counts"]);
    let damaged = write(&dir, "damaged.safetensors", &fs::read(&captured).expect("written")[..90]);
    calibrate(&["--counts", text(&damaged)], "2", &[], &["not a whole safetensors file"]);
    // Symptom: two requests of one name were taken.
    let twice = HashMap::from([("ids".to_owned(), r#"["a","b","a","c","d","e"]"#.to_owned())]);
    let ones: Vec<u8> = [1u32; 48].iter().flat_map(|n| n.to_le_bytes()).collect();
    let view = || TensorView::new(Dtype::U32, vec![6, 2, 4], &ones).expect("a tensor");
    let both = [("prefill_counts", view()), ("decode_counts", view())];
    let twice = write(&dir, "twice.safetensors", safetensors::serialize(both, Some(twice)).expect("safetensors"));
    calibrate(&["--counts", text(&twice)], "2", &[], &[text(&twice), "`ids` has \"a\" for requests 0 and 2"]);
    let prose = write(&dir, "prose", "Once upon a time");
    calibrate(&["--trace", text(&prose)], "2", &[], &["not a trace"]);
}

#[cfg(unix)]
#[test]
fn of_a_report_both_files_are_written_or_neither() {
    // Symptom: on a full disk report.json was there and report.html was not.
    let dir = folder();
    let captured = two_kinds(&dir, "counts.safetensors");
    let (out, pages) = (dir.path().join("c.safetensors"), dir.path().join("pages"));
    fs::create_dir(&pages).expect("made");
    let program = env!("CARGO_BIN_EXE_eldr");
    // The shell's limit on the size of a file stands in for a full disk: the page is larger than its numbers.
    let calibrate = |n_blocks: &str| {
        let script = format!(
            "trap '' XFSZ; ulimit -f {n_blocks}; exec '{program}' calibrate --counts '{}' --workers 2 -o '{}' --report '{}'",
            text(&captured),
            text(&out),
            text(&pages)
        );
        crate::Ran::from(std::process::Command::new("sh").args(["-c", &script]).output().expect("a shell"))
    };
    assert_eq!(calibrate("unlimited").code, Some(0));
    let size = |name: &str| fs::metadata(pages.join(name)).expect("there").len();
    let (json, html) = (size("report.json"), size("report.html"));
    fs::remove_dir_all(&pages).expect("removed");
    fs::create_dir(&pages).expect("made");
    // Blocks of 512 bytes: room for the numbers, and not for the page.
    let n_blocks = json.div_ceil(512) + 1;
    assert!(n_blocks * 1024 < html, "{json} {html}");
    let ran = calibrate(&n_blocks.to_string());
    assert!(ran.code == Some(1) && ran.sentence().contains("report.html"), "{ran:?}");
    assert_eq!(fs::read_dir(&pages).expect("there").count(), 0);
}

// Symptom to prevent: a router that is worse than a load balancer serves because somebody once calibrated it.
#[test]
fn serving_heeds_a_verdict_that_locality_does_not_help() {
    let dir = folder();
    let trace = trace(&dir);
    let judged = dir.path().join("judged.safetensors");
    let args = ["calibrate", "--trace", text(&trace), "--workers", "2", "-o", text(&judged)];
    run(args).succeeded();
    let mut verdict = Verdict::of(&decode(&fs::read(&judged).expect("written")).expect("read")).expect("a verdict");
    let mut ask = |helps: bool, more: &[&str]| {
        verdict.helps = helps;
        let mut made_up = calibration();
        made_up.verdict = Some(serde_json::to_string(&verdict).expect("JSON"));
        let file = write(&dir, "made-up.safetensors", encode(&made_up));
        let args = ["run", "-m", TINY, "--calibration", text(&file), "-n", "2", "--json", "Solve for x"];
        run(args.iter().chain(more)).succeeded()
    };
    let ran = ask(false, &[]);
    assert_eq!(ran.json()["policy"], "least_loaded");
    assert!(ran.err.contains("locality does not help here"), "{ran:?}");
    assert_eq!(ask(true, &[]).json()["policy"], "marginal_cost");
    // Symptom: the refit that was asked for by name went with the locality, without a word.
    let ran = ask(false, &["--refit"]);
    assert!(ran.err.contains("--refit changes nothing: requests are routed by least_loaded"), "{ran:?}");
    assert!(!ask(true, &["--refit"]).err.contains("changes nothing"));
    assert_eq!(ask(false, &["--policy", "locality_band"]).json()["policy"], "locality_band");
}
