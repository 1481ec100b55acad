//! `simulate` and `report` on a recording of the shipped model.

use std::{fs, path::PathBuf};

use tempfile::TempDir;

use crate::{DATA, TINY, folder, refused, run, text, write};

const COST: &str =
    "[decode]\nfixed = 9.0\nper_expert = 0.07\nper_token = 0.3\n[prefill]\nfixed = 9.0\nper_token = 0.05\n";

/// A short recording and a cost.
fn recorded(dir: &TempDir) -> (PathBuf, PathBuf) {
    let trace = dir.path().join("task.trace");
    let prompts = format!("{DATA}/task.calibration.jsonl");
    run(["record", "-m", TINY, "--prompts", &prompts, "--requests", "32", "-n", "8", "-o", text(&trace)]).succeeded();
    (trace, write(dir, "cost.toml", COST))
}

#[test]
fn a_simulation_is_the_same_every_time_and_its_rows_can_be_reported() {
    let dir = folder();
    let (trace, cost) = recorded(&dir);
    let scenario =
        write(&dir, "s.toml", "requests = 120\nrate = 40.0\n[[event]]\nat = 1.0\nworker = 1\nwhat = \"fail\"\n");
    let rows = dir.path().join("rows.json");
    let ask = |seed: &str| {
        let args = ["simulate", "--trace", text(&trace), "--cost", text(&cost), "--scenario", text(&scenario)];
        let more = ["--workers", "2,4", "--slots", "8", "--seeds", "2", "--seed", seed, "--json", "-o", text(&rows)];
        run(args.into_iter().chain(more)).succeeded()
    };
    let first = ask("1");
    let again = ask("1");
    assert_eq!(first.out, again.out);
    assert_ne!(first.out, ask("2").out);
    let json = first.json();
    let all = json["rows"].as_array().expect("rows");
    // Seven policies, two pools, two seeds.
    assert_eq!(all.len(), 28);
    for row in all {
        assert_eq!((&row["measured"]["finished"], &row["measured"]["lost"]), (&120.0.into(), &1.0.into()), "{row}");
    }

    let (page, charts) = (dir.path().join("r.html"), dir.path().join("r.svg"));
    // Symptom: of a cost file without a source it said `What steps take: .`.
    let wanted = format!("What steps take: from the file {}.", cost.display());
    assert_eq!(json["notes"][0], format!("Simulated. {wanted}"));
    let told = run(["report", text(&rows), "--html", text(&page), "--svg", text(&charts)]).succeeded();
    assert!(told.out.starts_with("### simulate") && told.out.contains("| locality_band |"), "{}", told.out);
    let page = fs::read_to_string(page).expect("written");
    assert!(page.contains("<polyline") && page.matches("<table>").count() == 1);
    assert!(fs::read_to_string(charts).expect("written").starts_with("<svg xmlns"));
}

#[test]
fn what_has_no_lines_is_not_drawn_and_says_so() {
    let dir = folder();
    let (trace, cost) = recorded(&dir);
    let rows = dir.path().join("rows.json");
    let args = ["simulate", "--trace", text(&trace), "--cost", text(&cost), "--workers", "2", "--requests", "40"];
    run(args.into_iter().chain(["--policies", "round_robin,random", "-o", text(&rows)])).succeeded();
    let (tables, charts) = (dir.path().join("r.md"), dir.path().join("r.svg"));
    refused(
        &["report", text(&rows), "-o", text(&tables), "--svg", text(&charts)],
        &["r.svg was not written", "to draw"],
    );
    assert!(fs::read_to_string(tables).expect("written").contains("| random |"));
    assert!(!charts.exists());
}

#[test]
fn an_ablation_is_a_row_of_its_own() {
    let dir = folder();
    let (trace, cost) = recorded(&dir);
    let args = ["simulate", "--trace", text(&trace), "--cost", text(&cost), "--workers", "4", "--requests", "60"];
    let more = ["--clusters", "3", "--policies", "least_loaded,locality_band", "--unbalanced", "--json"];
    let json = run(args.into_iter().chain(more)).succeeded().json();
    let rows = json["rows"].as_array().expect("rows");
    let told: Vec<_> = rows.iter().map(|row| (&row["setting"]["policy"], &row["setting"]["clusters"])).collect();
    let null = &serde_json::Value::Null;
    let (band, plain) = (&"locality_band".into(), &"unbalanced".into());
    assert_eq!(told, [(&"least_loaded".into(), null), (band, null), (band, plain)]);
    assert_ne!(rows[1]["measured"], rows[2]["measured"]);
}

// Symptom: a simulation whose requests were all lost printed a table without times and ended well.
#[test]
fn a_run_that_serves_nothing_is_no_result() {
    let dir = folder();
    let (trace, cost) = recorded(&dir);
    let rows = dir.path().join("rows.json");
    let refuses = |scenario: &str, code: i32, wanted: &[&str]| {
        let file = write(&dir, "lost.toml", scenario);
        let args = ["simulate", "--trace", text(&trace), "--cost", text(&cost), "--scenario", text(&file)];
        let done = run(args.into_iter().chain(["--policies", "least_loaded", "-o", text(&rows)]));
        assert_eq!(done.code, Some(code), "{}", done.err);
        assert!(wanted.iter().all(|words| done.err.contains(words)), "{}", done.err);
        // Symptom: `let more              wait (max_queue)`.
        assert!(!done.err.contains("  "), "{}", done.err);
        assert!(!rows.exists());
    };
    let workers = "requests = 40\n[[decode]]\nworkers = 1\n[[event]]\nat = 0.0001\nworker = 0\n";
    refuses(&format!("{workers}what = \"fail\""), 1, &["least_loaded measured no request", "40 failed"]);
    let others = "requests = 40\n[[decode]]\nworkers = 2\n[[event]]\nat = 0.0001\nworker = 1\nwhat = \"drain\"\n";
    let lost = "[[event]]\nat = 0.0002\nworker = 0\nwhat = \"fail\"\n";
    refuses(&format!("{others}{lost}"), 1, &["least_loaded measured no request", "40 failed"]);
}

#[test]
fn a_placement_is_written_and_compared() {
    let dir = folder();
    let (trace, cost) = recorded(&dir);
    let placement = dir.path().join("placement.json");
    let args = ["simulate", "--trace", text(&trace), "--cost", text(&cost), "--workers", "2", "--requests", "60"];
    let more = ["--policies", "locality_band", "--place", "4", "--placement", text(&placement), "--json"];
    let json = run(args.into_iter().chain(more)).succeeded().json();
    let experts = |at: usize| json["rows"][at]["measured"]["experts_per_step"].as_f64().expect("a number");
    assert_eq!(
        (&json["rows"][0]["setting"]["placement"], &json["rows"][1]["setting"]["placement"]),
        (&"in_order".into(), &"own".into())
    );
    assert!(experts(1) < experts(0), "{json}");
    let placed: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(placement).expect("written")).expect("JSON");
    assert_eq!((placed["n_ranks"].as_u64(), placed["clusters"][0][5].as_array().map(Vec::len)), (Some(4), Some(64)));
}

#[test]
fn what_can_not_be_simulated_is_refused_in_a_sentence() {
    let dir = folder();
    let (trace, cost) = recorded(&dir);
    let (trace, cost) = (text(&trace), text(&cost));
    let scenario = |content: &str| write(&dir, "wrong.toml", content);
    refused(&["simulate", "--trace", trace], &["eldr bench --fit", "--device"]);
    refused(&["simulate", "--trace", trace, "--device", "abacus", "-m", TINY], &["'abacus' is not known", "h100-sxm"]);
    for (content, wanted) in [
        ("\nrequests = 0", &["requests is 0"][..]),
        ("requests = 9\nrats = 3", &["wrong.toml, line 2", "rats"]),
        ("[mix]\nlaw = 1.0", &["mix.law names a domain", "code, legal, math, medical"]),
        ("[[event]]\nat = 1.0\nworker = 9\nwhat = \"fail\"", &["event 0 is about decode worker 9"]),
        ("[[event]]\nat = 1.0\nwhat = \"explode\"", &["wrong.toml, line 3", "explode"]),
        // Symptom: the last of what may stand there was hidden behind "..", and "expected a sequence" was all that was said.
        ("[[event]]\nat = 1.0\nwhat = \"explode\"", &["expected one of `fail`, `slow`, `drain`, `resume`, `join`"]),
        ("[decode]\nworkers = 2", &["wrong.toml, line 1", "several: write [[decode]] above each, instead of [decode]"]),
        ("decode = { workers = 2 }", &["wrong.toml, line 1", "write [[..]] above each"]),
        ("[[event]]\nat = 1.0\nwhat = \"join\"\nby = 2.5", &["event 0: by is 2.5, which must be a whole number"]),
        // Symptom: the drain was passed over without a word, as was what befell a worker that was lost.
        (
            "[[decode]]\nworkers = 1\n[[event]]\nat = 1.0\nworker = 0\nwhat = \"drain\"",
            &["event 0 drains decode worker 0, the last one that takes requests"],
        ),
        // Files that were cut.
        ("\n", &["scenario", "wrong.toml is empty"]),
        ("requests = 9\nrate", &["wrong.toml, line 2"]),
        ("requests = 9\n[[decode]", &["wrong.toml, line 2"]),
        ("requests = 9\n[[event]]\nat = 1.0", &["wrong.toml, line 2", "what"]),
    ] {
        let file = scenario(content);
        refused(&["simulate", "--trace", trace, "--cost", cost, "--scenario", text(&file)], wanted);
    }
    let no_cost = write(&dir, "no-cost.toml", COST.replace("fixed = 9.0\nper_expert", "fixed = -1.0\nper_expert"));
    let wrong = &["no-cost.toml", "decode.fixed is -1 ms"];
    refused(&["simulate", "--trace", trace, "--cost", text(&no_cost)], wrong);
    refused(&["run", "--step-cost", text(&no_cost), "x"], wrong);
    refused(&["bench", "--charge", text(&no_cost), "--workload", trace], wrong);
    refused(
        &["bench", "--charge", cost, "--clock", "real", "--workload", trace],
        &["--charge is for the virtual clock"],
    );
    refused(&["simulate", "--trace", trace, "--cost", cost, "--place", "100"], &["--place is 100", "64 experts"]);
    let both = ["simulate", "--trace", trace, "--cost", cost];
    let with = |more: &[&str], wanted: &[&str]| refused(&[&both[..], more].concat(), wanted);
    with(&["--tau", "0.1,5"], &["'5' of it", "from 0", "to 2"]);
    with(&["--workers", "4,2,4"], &["'4,2,4' for '--workers", "it holds 4 twice; leave one out"]);
    with(&["--tau", "0.1,auto,AUTO"], &["it holds AUTO twice"]);
    with(&["--concurrency", "99999999999"], &["--concurrency", "too large a number"]);
    with(&["--concurrency", "4000000000"], &["concurrency is 4000000000, which must be at most"]);
    refused(&["report", trace], &["task.trace"]);
    refused(&["report", cost], &["not rows of eldr"]);
    // Symptom: rows with a time below 0 were drawn; a file that was given twice was taken for repeats.
    let row = |ms: f64| {
        format!("{{\"verb\":\"bench\",\"setting\":{{\"policy\":\"random\"}},\"measured\":{{\"tpot_p50_ms\":{ms}}}}}")
    };
    let rows = |ms| format!("{{\"version\":1,\"rows\":[{},{}]}}", row(1.0), row(ms));
    let good = write(&dir, "good.json", rows(1.5));
    let bad = write(&dir, "bad.json", rows(-1.5));
    refused(&["report", text(&good), text(&bad)], &["bad.json: row 2: measured.tpot_p50_ms is -1.5"]);
    let same = dir.path().join("./good.json");
    refused(&["report", text(&good), text(&same)], &["good.json is given twice"]);
}

// Symptom: a width of a band that no policy has was taken without a word.
#[test]
fn what_changes_nothing_is_said_once() {
    let dir = folder();
    let (trace, cost) = recorded(&dir);
    let args = ["simulate", "--trace", text(&trace), "--cost", text(&cost), "--workers", "2", "--requests", "40"];
    let notes = |policies: &str| {
        let more = ["--policies", policies, "--tau", "0.2", "--refit", "-m", "none.gguf"];
        run(args.into_iter().chain(more)).succeeded().err
    };
    let told = notes("round_robin");
    for option in ["--tau", "--refit", "--model"] {
        assert!(told.contains(&format!("eldr: {option} changes nothing: ")), "{told}");
    }
    let told = notes("locality_band");
    assert!(told.contains("--model changes nothing") && !told.contains("--tau") && !told.contains("--refit"), "{told}");
}
