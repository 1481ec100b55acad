//! Where verbs write, and what that never costs.

use std::{
    fs,
    os::unix::fs::symlink,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use tempfile::TempDir;

use crate::{DATA, Ran, TINY, alone, eldr, folder, refused, run, text, write};

fn names(dir: &TempDir) -> Vec<String> {
    let entries = fs::read_dir(dir.path()).expect("a folder");
    let mut names: Vec<String> =
        entries.map(|e| e.expect("an entry").file_name().into_string().expect("Unicode")).collect();
    names.sort();
    names
}

/// Expects every verb to refuse to write `output`, with `model` and `prompts` as its inputs, before any work.
#[track_caller]
fn refused_by_all(model: &str, prompts: &str, output: &str, wanted: &[&str]) {
    refused(&["calibrate", "-m", model, "--prompts", prompts, "--workers", "2", "-o", output], wanted);
    refused(&["bench", "-m", model, "--workload", prompts, "--svg", output], wanted);
    // `refused` adds --json, which the bench takes once.
    let ran = run(["bench", "-m", model, "--workload", prompts, "--json", output]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""), "{ran:?}");
    assert!(wanted.iter().all(|want| ran.sentence().contains(want)), "{ran:?}");
}

#[test]
fn an_output_that_is_an_input_is_refused() {
    // Symptom: `calibrate -m m.gguf -o m.gguf` replaced the model by a calibration, and the bench's report the workload.
    let dir = folder();
    let model = dir.path().join("m.gguf");
    fs::copy(TINY, &model).expect("copied");
    let prompts = dir.path().join("p.jsonl");
    fs::copy(format!("{DATA}/task.calibration.jsonl"), &prompts).expect("copied");
    let link = dir.path().join("link");
    symlink("m.gguf", &link).expect("linked");
    let hard = dir.path().join("hard");
    fs::hard_link(&prompts, &hard).expect("linked");
    let before = names(&dir);
    for output in [&model, &prompts, &link, &hard, &dir.path().join("./p.jsonl")] {
        refused_by_all(text(&model), text(&prompts), text(output), &["it is an input", text(output)]);
    }
    for output in [&model, &link] {
        let args = ["inflate", "-m", text(&model), "--factor", "2", "--force", "-o", text(output)];
        refused(&args, &["it is an input", text(output)]);
    }
    let same = fs::read(&model).expect("there") == fs::read(TINY).expect("shipped");
    assert!(same && names(&dir) == before, "{:?}", names(&dir));
}

#[test]
fn an_output_that_is_no_regular_file_is_refused() {
    // Symptom: `calibrate -o /dev/null` as root replaced the device by a file; a pipe likewise.
    let dir = folder();
    let prompts = format!("{DATA}/task.calibration.jsonl");
    let pipe = dir.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs").success());
    let link = dir.path().join("link");
    symlink("pipe", &link).expect("linked");
    let before = names(&dir);
    for (output, want) in [
        (pipe.as_path(), "it is a pipe"),
        (&link, "it is a pipe"),
        (dir.path(), "it is a folder"),
        (Path::new("/dev/null"), "it is a device"),
    ] {
        refused_by_all(TINY, &prompts, text(output), &[want, text(output)]);
        refused(&["inflate", "-m", TINY, "--factor", "2", "--force", "-o", text(output)], &[want, text(output)]);
    }
    assert_eq!(names(&dir), before);
    refused(&["bench", "--workload", &prompts, "--svg", "-"], &["cannot write -", "./-"]);
    refused(&["calibrate", "--prompts", &prompts, "--workers", "2", "-o", "-"], &["cannot write -"]);
    refused(&["inflate", "--factor", "2", "-o", "-"], &["cannot write -"]);
}

#[test]
fn two_outputs_are_two_files() {
    // Symptom: `bench --json same --svg same` kept the drawing alone.
    let dir = folder();
    let workload = format!("{DATA}/task.serve.jsonl");
    let new = dir.path().join("new");
    let link = dir.path().join("link");
    symlink("new", &link).expect("linked");
    for svg in [&new, &link, &dir.path().join("./new")] {
        let ran = run(["bench", "-m", TINY, "--workload", &workload, "--json", text(&new), "--svg", text(svg)]);
        assert!(ran.code == Some(2) && ran.sentence().contains("--json and --svg both write"), "{ran:?}");
    }
    assert_eq!(names(&dir), ["link"]);
    // Symptom: `bench --rows o --cost o` and `report --html o --svg o -o o` kept the last one alone.
    let new = text(&new);
    let bench = ["bench", "-m", TINY, "--workload", &workload];
    for (first, second) in [("--rows", "--cost"), ("--svg", "--rows")] {
        let wanted = format!("{first} and {second} both write {new}; give them different files");
        refused(&[&bench[..], &[first, new, second, text(&link)]].concat(), &[&wanted]);
    }
    let rows = write(&dir, "rows.json", "[]");
    for (first, second) in [("--html", "--svg"), ("--output", "--html"), ("--output", "--svg")] {
        let wanted = format!("{first} and {second} both write {new}; give them different files");
        refused(&["report", text(&rows), second, new, first, new], &[&wanted]);
    }
    let simulate = ["simulate", "--trace", "t", "--cost", "c", "--place", "2", "--placement", new, "-o", new];
    refused(&simulate, &["--output and --placement both write"]);
    let page = dir.path().join("report.json");
    let calibrate = ["calibrate", "-m", TINY, "--prompts", &workload, "--workers", "2", "--report", text(dir.path())];
    refused(&[&calibrate[..], &["-o", text(&page)]].concat(), &["report.json"]);
}

#[test]
fn a_folder_that_takes_no_files_is_found_before_the_work() {
    // Symptom: all prompts were recorded, or the whole bench run, and then the file could not be written.
    let dir = folder();
    let prompts = format!("{DATA}/task.calibration.jsonl");
    let nowhere = dir.path().join("no/such/x");
    refused_by_all(TINY, &prompts, text(&nowhere), &[text(&nowhere), "choose a folder that exists"]);
    refused(&["inflate", "--factor", "2", "-o", text(&nowhere)], &[text(&nowhere), "choose a folder that exists"]);
    // Nobody may write there, root included.
    #[cfg(target_os = "linux")]
    refused_by_all(TINY, &prompts, "/proc/eldr.out", &["/proc/eldr.out", "may be written"]);
}

// Symptom: a cache folder or a request log that can not be written was found out once the model was loaded, or at the
// first write. Nobody may write in /proc, root included.
#[cfg(target_os = "linux")]
#[test]
fn whatever_a_verb_writes_is_tried_before_it_reads_a_model() {
    let dir = folder();
    let model = write(&dir, "no.gguf", "no model");
    let (model, none, prompts) = (text(&model), "/proc/eldr/none", format!("{DATA}/task.serve.jsonl"));
    let bench = ["bench", "-m", model, "--workload", &prompts];
    let calibrate = ["calibrate", "-m", model, "--prompts", &prompts, "--workers", "2"];
    let page = dir.path().join("c");
    let simulate = ["simulate", "--trace", "none", "--device", "h200", "--place", "2"];
    let cases: [(&[&str], &[&str]); 18] = [
        (&["run", "-m", model, "x"], &["--cache-dir", none]),
        (&bench, &["--prefix-cache", "on", "--cache-dir", none]),
        (&bench, &["--json", none]),
        (&bench, &["--svg", none]),
        (&bench, &["--rows", none]),
        (&bench, &["--cost", none]),
        (&bench, &["--fit", none]),
        (&["record", "-m", model, "--prompts", &prompts], &["-o", none]),
        (&calibrate, &["-o", none]),
        (&calibrate, &["-o", text(&page), "--report", none]),
        (&simulate, &["-o", none]),
        (&simulate, &["--placement", none]),
        (&["report", "none"], &["-o", none]),
        (&["report", "none"], &["--html", none]),
        (&["report", "none"], &["--svg", none]),
        (&["inflate", "-m", model, "--factor", "2"], &["-o", none]),
        // Last, since there is no such verb without that feature.
        (&["serve", "-m", model], &["--cache-dir", none]),
        (&["serve", "-m", model], &["--request-log", none]),
    ];
    let n_cases = cases.len() - if cfg!(feature = "server") { 0 } else { 2 };
    for (verb, output) in cases.into_iter().take(n_cases) {
        let ran = run([verb, output].concat());
        assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""), "{verb:?} {output:?}: {ran:?}");
        assert!(ran.sentence().contains(none), "{verb:?} {output:?}: {ran:?}");
    }
    assert_eq!(names(&dir), ["no.gguf"]);
}

#[test]
fn a_report_that_does_not_fit_leaves_the_old_one() {
    // Symptom: on a full disk the old report became a file of 0 bytes, and the drawing was not tried.
    let dir = folder();
    let json = write(&dir, "bench.json", "old");
    let svg = dir.path().join("bench.svg");
    let program = env!("CARGO_BIN_EXE_eldr");
    // The shell's limit on the size of a file stands in for a full disk.
    let script = format!(
        "trap '' XFSZ; ulimit -f 1; exec '{program}' bench -m '{TINY}' --workload '{DATA}/task.serve.jsonl' \
         --requests 2 --decode 1 --policies round_robin --no-count --warmup 0 -n 2 --threads 1 \
         --json '{}' --svg '{}'",
        json.display(),
        svg.display()
    );
    let _alone = alone();
    let ran = Ran::from(Command::new("sh").args(["-c", &script]).output().expect("a shell"));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    for path in [&json, &svg] {
        assert!(ran.sentence().contains(&format!("cannot write {}", path.display())), "{ran:?}");
    }
    assert_eq!(fs::read(&json).expect("there"), b"old");
    assert_eq!(names(&dir), ["bench.json"]);
}

#[test]
fn an_interrupted_inflate_leaves_nothing() {
    // Symptom: Ctrl-C, and later SIGTERM, left a file of gigabytes named `k.gguf.PID.partial`; kill -9 left it for ever.
    let dir = folder();
    let _alone = alone();
    let output = dir.path().join("k.gguf");
    for (signal, code) in [("-INT", Some(1)), ("-TERM", Some(1)), ("-KILL", None)] {
        let mut child = eldr(["inflate", "-m", TINY, "--size", "4GiB", "-o", text(&output)]).spawn().expect("runs");
        while !names(&dir).iter().any(|name| name.ends_with(".partial")) {
            assert!(child.try_wait().expect("waited for").is_none(), "it ended before it was interrupted");
            thread::sleep(Duration::from_millis(5));
        }
        let killed = Command::new("kill").args([signal, &child.id().to_string()]).status().expect("kill runs");
        assert!(killed.success());
        assert_eq!(child.wait().expect("ends").code(), code);
        assert_eq!(names(&dir).len(), usize::from(signal == "-KILL"), "{signal}: {:?}", names(&dir));
    }
    let ran = Ran::from(eldr(["inflate", "-m", TINY, "--factor", "2", "-o", text(&output)]).output().expect("runs"));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(names(&dir), ["k.gguf"]);
}

#[test]
fn of_two_inflates_to_one_file_the_second_is_refused() {
    // Symptom: both ended well, and the file of one silently replaced the other's.
    let dir = folder();
    let _alone = alone();
    let output = dir.path().join("k.gguf");
    let inflate = ["inflate", "-m", TINY, "--size", "200MB", "-o", text(&output)];
    let children = [0, 1].map(|_| eldr(inflate).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("runs"));
    let mut ran = children.map(|child| Ran::from(child.wait_with_output().expect("ends")));
    ran.sort_by_key(|ran| ran.code);
    assert_eq!([ran[0].code, ran[1].code], [Some(0), Some(2)], "{ran:?}");
    assert!(ran[1].sentence().contains("exists; choose another output or use --force"), "{ran:?}");
    assert_eq!(names(&dir), ["k.gguf"]);
}

#[test]
fn an_inflate_that_the_disk_can_not_hold_is_refused_before_the_work() {
    // Symptom: it wrote until the disk was full.
    let dir = folder();
    let output = dir.path().join("k.gguf");
    for (option, value) in [("--size", "100TiB"), ("--factor", "60000000")] {
        let args = ["inflate", "-m", TINY, option, value, "-o", text(&output)];
        refused(&args, &["cannot write", text(&output), "are free there"]);
    }
    let args = ["inflate", "-m", TINY, "--factor", "18446744073709551615", "-o", text(&output)];
    refused(&args, &["a factor is at most 67108863 here"]);
    assert!(names(&dir).is_empty(), "{:?}", names(&dir));
}

#[test]
fn a_damaged_model_is_one_sentence_to_inflate() {
    // Symptom: ggml's own lines about the header came before eldr's sentence.
    let dir = folder();
    let mut bytes = fs::read(TINY).expect("shipped");
    // The type of the first key's value, after magic, version, two counts and the key.
    let n = u64::from_le_bytes(bytes[24..32].try_into().expect("eight bytes")) as usize;
    bytes[32 + n] = 99;
    let model = write(&dir, "damaged.gguf", bytes);
    let output = dir.path().join("k.gguf");
    refused(&["inflate", "-m", text(&model), "--factor", "2", "-o", text(&output)], &["damaged", text(&model)]);
    assert!(!output.exists());
}
