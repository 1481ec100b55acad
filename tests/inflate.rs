//! `eldr inflate`: larger experts, the same outputs and picks, and a sentence for everything that cannot be inflated.

mod support;

use std::{
    fs,
    path::{Path, PathBuf},
};

use eldr::{
    engine::{InflateError, InflateReport, InflateTarget, inflate},
    llama::{
        Backend, Batch, Context, ContextParams, Model, ModelParams,
        gguf_file::{GgufFile, GgufWriter, TensorType, Value},
    },
};
use support::planted::{self, Arch};
use tempfile::TempDir;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-moe-64x4.gguf");

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

fn grow(input: &Path, output: &Path, target: InflateTarget) -> Result<InflateReport, InflateError> {
    inflate(input, output, target, false, |_, _| {})
}

/// A model of two layers that says what `set` makes it say, with experts of width 256 in the format `ttype`.
fn sketch(path: PathBuf, ttype: &str, set: impl FnOnce(&mut GgufWriter)) -> PathBuf {
    let mut writer = GgufWriter::new();
    writer.set("general.architecture", "qwen3moe").expect("writable");
    writer.set("qwen3moe.expert_count", 4).expect("writable");
    writer.set("qwen3moe.expert_used_count", 1).expect("writable");
    writer.set("qwen3moe.expert_feed_forward_length", 256).expect("writable");
    let ttype = TensorType::from_name(ttype).expect("a ggml type");
    for layer in 0..2 {
        writer.add_tensor(&format!("blk.{layer}.ffn_up_exps.weight"), ttype, &[512, 256, 4]).expect("writable");
        writer.add_tensor(&format!("blk.{layer}.ffn_down_exps.weight"), ttype, &[256, 512, 4]).expect("writable");
    }
    set(&mut writer);
    let n_bytes = ttype.row_bytes(256) * 512 * 4;
    writer
        .write(&path, |name, sink| match name.strip_suffix("_exps.weight") {
            Some(_) => sink.put_zeros(n_bytes),
            None => sink.put_zeros(4),
        })
        .expect("written");
    path
}

// Symptom: a bench of an inflated model did not say so, and what was calibrated for its source was refused.
#[test]
fn an_inflated_model_says_so_and_counts_as_its_source() {
    let dir = folder();
    let [once, twice] = ["once.gguf", "twice.gguf"].map(|name| dir.path().join(name));
    grow(Path::new(TINY), &once, InflateTarget::Factor(2.0)).expect("inflated");
    grow(&once, &twice, InflateTarget::Factor(2.0)).expect("inflated");
    let model = |path: &Path| Model::load(&Backend::init(), path, &ModelParams::default()).expect("loads");
    let source = model(Path::new(TINY));
    assert!(!source.is_inflated());
    for path in [&once, &twice] {
        let inflated = model(path);
        assert!(inflated.is_inflated());
        assert_eq!(inflated.fingerprint(), source.fingerprint());
    }
}

#[test]
fn the_file_grows_by_the_added_rows_and_says_so() {
    let dir = folder();
    let (output, mut last) = (dir.path().join("big.gguf"), (0, 0));
    let report =
        inflate(Path::new(TINY), &output, InflateTarget::Factor(4.0), false, |done, total| last = (done, total));
    let report = report.expect("inflated");

    let (before, after) = (GgufFile::open(TINY).expect("readable"), GgufFile::open(&output).expect("readable"));
    let expert_bytes = |file: &GgufFile| -> u64 {
        file.tensors().iter().filter(|t| t.name.contains("_exps.")).map(|t| t.n_bytes).sum()
    };
    assert_eq!(expert_bytes(&after), 4 * expert_bytes(&before));
    assert_eq!(report.n_bytes, (before.n_bytes(), after.n_bytes()));
    // The header grows by one key.
    let grown = after.n_bytes() - before.n_bytes() - 3 * expert_bytes(&before);
    assert!(grown < 200, "{grown}");
    let width = |file: &GgufFile| file.arch_value("expert_feed_forward_length").and_then(|v| v.as_u64());
    assert_eq!((width(&before), width(&after)), (Some(report.n_ff.0), Some(report.n_ff.1)));
    assert_eq!(report.n_ff.1, 4 * report.n_ff.0);
    // Progress counts tensor data; the rest of the total is metadata and padding.
    assert!(last.1 == after.n_bytes() && last.0 < last.1 && last.0 > last.1 / 2, "{last:?}");
    assert_eq!(before.keys().len() + 1, after.keys().len());
    for key in before.keys() {
        if !key.ends_with("expert_feed_forward_length") {
            assert_eq!(before.value(&key), after.value(&key), "{key}");
        }
    }
}

#[test]
fn a_target_in_bytes_is_met_by_the_smallest_width() {
    let dir = folder();
    let step = 32;
    for target in [22_969_056, 22_969_057, 50_000_000] {
        let output = dir.path().join(target.to_string());
        let report = grow(Path::new(TINY), &output, InflateTarget::Bytes(target)).expect("inflated");
        assert!(report.n_bytes.1 >= target, "{report:?}");
        if report.n_ff.1 > report.n_ff.0 {
            let factor = (report.n_ff.1 - step) as f64 / report.n_ff.0 as f64;
            let smaller = inflate(Path::new(TINY), &output, InflateTarget::Factor(factor), true, |_, _| {});
            assert!(smaller.expect("inflated").n_bytes.1 < target, "{report:?}");
        }
    }
    let refused =
        grow(Path::new(TINY), &dir.path().join("less"), InflateTarget::Bytes(22_969_055)).expect_err("refused");
    assert!(refused.to_string().contains("the model has 22969056 already"), "{refused}");
}

#[test]
fn widths_stay_whole_blocks() {
    let dir = folder();
    for (ttype, width) in [("f16", 352), ("q8_0", 352), ("q4_K", 512), ("iq4_xs", 512), ("mxfp4", 352)] {
        let input = sketch(dir.path().join(ttype), ttype, |_| {});
        let output = dir.path().join(format!("big-{ttype}"));
        let report = grow(&input, &output, InflateTarget::Factor(1.3)).expect("inflated");
        assert_eq!((report.n_ff, report.n_grown), ((256, width), 4), "{ttype}");
        let file = GgufFile::open(&output).expect("readable");
        assert_eq!(file.tensor("blk.1.ffn_down_exps.weight").map(|t| t.shape), Some([width, 512, 4, 1]));
        assert_eq!(file.tensor("blk.1.ffn_up_exps.weight").map(|t| t.shape), Some([512, width, 4, 1]));
    }
}

#[test]
fn what_cannot_be_inflated_is_refused_with_the_reason() {
    let dir = folder();
    let path = |name: &str| dir.path().join(name);
    let refused = |input: &Path| {
        let error = grow(input, &path("out"), InflateTarget::Factor(2.0)).expect_err("refused").to_string();
        assert!(!path("out").exists());
        error
    };
    planted::write(Arch::DenseLlama, &path("dense"), 1);
    assert!(refused(&path("dense")).contains("is a dense model"));
    assert!(refused(&path("missing")).contains("missing"));
    fs::write(path("text"), "not a model").expect("written");
    assert!(refused(&path("text")).contains("is not a GGUF file: it begins with"));
    let whole = fs::read(TINY).expect("readable");
    fs::write(path("cut"), &whole[..whole.len() - 1000]).expect("written");
    assert!(refused(&path("cut")).contains("is truncated"));

    let set = |key: &'static str, value: Value| move |w: &mut GgufWriter| w.set(key, value).expect("writable");
    let part = sketch(path("part"), "f32", set("split.count", Value::U16(2)));
    assert!(refused(&part).contains("merge the parts"));
    let other = sketch(path("other"), "f32", |w| {
        w.set("general.architecture", "jamba").expect("writable");
        w.set("jamba.expert_count", 4).expect("writable");
    });
    assert!(refused(&other).starts_with("inflating the architecture jamba is not supported; these are: afmoe, "));
    let lied = sketch(path("lied"), "f32", set("qwen3moe.expert_feed_forward_length", 128.into()));
    assert!(refused(&lied).contains("layers of different widths are not supported"));
    let mixed = sketch(path("mixed"), "f32", |w| {
        w.add_tensor("blk.2.ffn_down_exps.weight", TensorType::F32, &[128, 1024, 4]).expect("writable");
    });
    assert!(refused(&mixed).contains("no expert width of 256"));
    let integers = sketch(path("integers"), "i8", |_| {});
    assert!(refused(&integers).contains("zero bytes are not zero weights in its type i8"));
}

#[test]
fn targets_and_outputs_are_checked_before_anything_is_written() {
    let dir = folder();
    let (input, output) = (dir.path().join("in"), dir.path().join("out"));
    fs::copy(TINY, &input).expect("copied");
    for factor in [0.5, f64::NAN, f64::NEG_INFINITY] {
        let error = grow(&input, &output, InflateTarget::Factor(factor)).expect_err("refused").to_string();
        assert!(error.contains("a factor is at least 1"), "{error}");
    }
    // Symptom: 18446744073709551615 was refused with "a factor is at least 1". The width is 64 and grows by 32.
    for factor in [67_108_864.0, 18_446_744_073_709_551_615.0, f64::INFINITY] {
        let error = grow(&input, &output, InflateTarget::Factor(factor)).expect_err("refused").to_string();
        assert!(error.contains("a factor is at most 67108863 here, since llama.cpp"), "{error}");
    }
    // Symptom: more than the disk holds was written until it was full.
    #[cfg(unix)]
    for target in [InflateTarget::Bytes(100 << 40), InflateTarget::Factor(67_108_863.0)] {
        let error = grow(&input, &output, target).expect_err("refused").to_string();
        assert!(error.contains("are free there; ask for less"), "{error}");
    }
    let huge = grow(&input, &output, InflateTarget::Bytes(u64::MAX)).expect_err("refused").to_string();
    assert!(huge.contains("llama.cpp holds it in 32 bits"), "{huge}");
    let same = inflate(&input, &input, InflateTarget::Factor(2.0), true, |_, _| {}).expect_err("refused");
    assert!(same.to_string().contains("it is an input"));
    fs::write(&output, "mine").expect("written");
    let exists = grow(&input, &output, InflateTarget::Factor(2.0)).expect_err("refused").to_string();
    assert!(exists.contains("exists; choose another output or use --force"), "{exists}");
    assert_eq!(fs::read(&output).expect("there"), b"mine");
    inflate(&input, &output, InflateTarget::Factor(1.0), true, |_, _| {}).expect("replaced");
    let tensors = |path: &Path| GgufFile::open(path).expect("readable").tensors().to_vec();
    assert_eq!(tensors(&output), tensors(&input));
    let nowhere = dir.path().join("no").join("out");
    let error = grow(&input, &nowhere, InflateTarget::Factor(2.0)).expect_err("refused").to_string();
    assert!(error.starts_with("cannot write") && error.contains("No such file"), "{error}");
    assert_eq!(fs::read_dir(dir.path()).expect("there").count(), 2);
}

/// Logits of a prompt's last token and of some decode steps, as bits, and all picks.
fn outputs(path: &Path) -> (Vec<u32>, Vec<(u32, Vec<u32>)>) {
    let backend = Backend::init();
    let device = backend.device("CPU").expect("every build has it");
    let model = Model::load(&backend, path, &ModelParams { device: Some(device), ..ModelParams::default() });
    let model = model.expect("loads");
    let params = ContextParams { n_ctx_slot: 256, n_threads: 1, tap: true, ..ContextParams::default() };
    let mut ctx = Context::new(&model, &params).expect("a context");
    let (mut logits, mut picks) = (Vec::new(), Vec::new());
    let mut pos = 0;
    for (step, n_tokens) in [60, 1, 1, 1, 1].into_iter().enumerate() {
        let mut batch = Batch::new(n_tokens);
        for (i, token) in planted::some_tokens(n_tokens, step as u64).into_iter().enumerate() {
            batch.push(token, pos, 0, i + 1 == n_tokens).expect("room");
            pos += 1;
        }
        ctx.decode_tapped(&batch, &mut |rows| picks.push((rows.layer, rows.experts.to_vec()))).expect("runs");
        logits.extend(ctx.logits(n_tokens - 1).iter().map(|v| v.to_bits()));
    }
    (logits, picks)
}

#[test]
fn an_inflated_model_gives_the_same_logits_and_picks_to_the_bit() {
    let dir = folder();
    let mut models = vec![PathBuf::from(TINY)];
    for arch in Arch::MOE {
        models.push(planted::write(arch, &dir.path().join(format!("{arch:?}.gguf")), 3).path);
    }
    for model in models {
        let before = outputs(&model);
        assert!(before.0.iter().any(|&bits| f32::from_bits(bits) != 0.0));
        for factor in [4.0, 9.5] {
            let output = dir.path().join("big.gguf");
            inflate(&model, &output, InflateTarget::Factor(factor), true, |_, _| {}).expect("inflated");
            assert_eq!(outputs(&output), before, "{}, times {factor}", model.display());
        }
    }
}
