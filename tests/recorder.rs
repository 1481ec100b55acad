//! Recording over a fake model: what is told, in which order, and that a recording which ended early goes on to the same
//! bytes.

use std::{
    cell::RefCell,
    fs,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use eldr::{
    engine::{EngineError, PromptRows, RecordPrompt, RecordSummary, Recorder, TapRunner, read_trace},
    schedule::{FakeModel, FakeRunner, Fault, ModelRunner, RunError, RunnerLayer},
    trace::{GateSums, RecordSettings, TraceHeader, TraceRequest},
    types::{MoeShape, SamplingParams, Slot, Token},
};

const MODEL: FakeModel = FakeModel { n_vocab: 50, n_layer: 3, n_expert: 8, n_expert_used: 2 };
const N_CTX: u32 = 40;

/// The fake runner with a tap on prompts; its gate says the expert's number and its negative.
struct FakeTap(FakeRunner);

impl RunnerLayer for FakeTap {
    fn inner(&self) -> &dyn ModelRunner {
        &self.0
    }

    fn inner_mut(&mut self) -> &mut dyn ModelRunner {
        &mut self.0
    }
}

impl TapRunner for FakeTap {
    fn prefill_rows(
        &mut self,
        slot: Slot,
        tokens: &[Token],
        pos: u32,
        last: bool,
        sink: &mut dyn FnMut(PromptRows<'_>),
    ) -> Result<Option<Token>, RunError> {
        let drawn = self.0.prefill(slot, tokens, pos, last, None)?;
        for layer in 0..MODEL.n_layer - 1 {
            let experts: Vec<u32> = tokens.iter().flat_map(|&token| MODEL.picks(token, layer)).collect();
            let numbers = || (0..MODEL.n_expert).map(|expert| expert as f32);
            let probabilities: Vec<f32> = tokens.iter().flat_map(|_| numbers()).collect();
            let logits: Vec<f32> = probabilities.iter().map(|p| -p).collect();
            sink(PromptRows { layer, experts: &experts, probabilities: &probabilities, logits: &logits });
        }
        Ok(drawn)
    }
}

fn recorder(n_slots: u32, settings: RecordSettings, faults: &[Fault]) -> Recorder {
    let shape = MoeShape { layers: vec![0, 1, 2], n_layer: 3, n_expert: 8, n_expert_used: 2 };
    let header = TraceHeader { shape, fingerprint: "fake".into(), n_block: 5 };
    let runner = || FakeRunner::new(MODEL, n_slots, N_CTX, faults.to_vec());
    Recorder::new(header, settings, Box::new(FakeTap(runner())), Box::new(runner()), 8)
}

/// Prompts of many lengths, whose answers end in another order than they begin.
fn prompts(n: usize) -> Vec<RecordPrompt> {
    let prompt = |i: usize| RecordPrompt {
        id: format!("p{i}"),
        domain: i.is_multiple_of(3).then(|| "third".to_owned()),
        tokens: (0..3 + i * 7 % 19).map(|t| Token::from(1 + ((t * 31 + i * 17) % 49) as u8)).collect(),
        max_tokens: 12 - (i * 5 % 11) as u32,
    };
    (0..n).map(prompt).collect()
}

/// The request as it must be told, from the model alone.
fn expected(prompt: &RecordPrompt, settings: &RecordSettings) -> TraceRequest {
    let sampling = SamplingParams { seed: settings.seed_of(&prompt.id), ignore_eos: true, ..SamplingParams::default() };
    let answer = MODEL.complete(&prompt.tokens, &sampling, prompt.max_tokens.max(2));
    let mut blocks = Vec::new();
    for tokens in prompt.tokens.chunks(5) {
        for layer in 0..2 {
            let mut counts = [0; 8];
            for expert in tokens.iter().flat_map(|&token| MODEL.picks(token, layer)) {
                counts[expert as usize] += 1;
            }
            blocks.extend(counts);
        }
    }
    let run = &answer[..answer.len() - 1];
    let picks = run.iter().flat_map(|&token| (0..3).flat_map(move |layer| MODEL.picks(token, layer)));
    let n = prompt.tokens.len() as f32;
    let gates = settings.gates.then(|| {
        let sums: Vec<f32> = (0..16).map(|place| n * (place % 8) as f32).collect();
        GateSums { logit: sums.iter().map(|sum| -sum).collect(), probability: sums }
    });
    TraceRequest {
        id: prompt.id.clone(),
        domain: prompt.domain.clone(),
        n_prompt: prompt.tokens.len() as u32,
        blocks,
        picks: picks.map(|expert| expert as u16).collect(),
        gates,
    }
}

#[test]
fn every_request_is_told_in_order_whatever_its_company() {
    for (n_slots, gates) in [(1, false), (3, true), (16, false)] {
        let settings = RecordSettings { gates, seed: 9, ..RecordSettings::default() };
        let prompts = prompts(20);
        let mut told = Vec::new();
        let run = recorder(n_slots, settings, &[]).run(
            &prompts.iter().collect::<Vec<_>>(),
            &AtomicBool::new(false),
            &mut |r, _| {
                told.push(r);
                Ok(())
            },
        );
        run.expect("recorded");
        let want: Vec<TraceRequest> = prompts.iter().map(|prompt| expected(prompt, &settings)).collect();
        assert_eq!(told, want, "{n_slots} slots");
    }
}

/// Records into `path` until `n` requests are in it; the error's words.
fn into(path: &Path, n_slots: u32, prompts: &[RecordPrompt], n: usize) -> Result<RecordSummary, String> {
    let stop = AtomicBool::new(false);
    let recorder = recorder(n_slots, RecordSettings::default(), &[]);
    let summary = recorder.record_into(path, prompts, &stop, &mut |n_done| {
        stop.store(n_done >= n, Ordering::Relaxed);
    });
    summary.map_err(|error| error.to_string())
}

/// A file's requests by id, whatever their order.
fn by_id(path: &Path) -> Vec<TraceRequest> {
    let mut requests = read_trace(path).expect("a trace").requests;
    requests.sort_by(|a, b| a.id.cmp(&b.id));
    requests
}

// Symptom: what had ended behind an unfinished prompt was thrown away, so that repeated interruptions got nowhere.
#[test]
fn a_recording_that_was_stopped_keeps_what_had_ended_and_goes_on_to_the_same_requests() {
    let dir = tempfile::tempdir().expect("a folder");
    let whole = dir.path().join("whole");
    let all = prompts(9);
    let summary = into(&whole, 4, &all, usize::MAX).expect("recorded");
    assert_eq!(summary, RecordSummary { n_prompts: 9, n_before: 0, n_new: 9, n_in_file: 9 });
    assert_eq!(read_trace(&whole).expect("a trace").requests.len(), 9);
    let bytes = fs::read(&whole).expect("there");
    let mut n_kept_behind = 0;
    for stop in 0..9 {
        let path = dir.path().join(format!("stopped-{stop}"));
        let summary = into(&path, 4, &all, stop).expect("stopped");
        assert!(summary.n_new >= stop, "{summary:?}");
        n_kept_behind += summary.n_new - stop;
        // The rest in other company, and half of a record lost.
        let torn = fs::read(&path).expect("there");
        fs::write(&path, &torn[..torn.len() - usize::from(summary.n_new > 0)]).expect("written");
        let n_before = summary.n_new.saturating_sub(1);
        let summary = into(&path, 3, &all, usize::MAX).expect("recorded");
        assert_eq!(summary, RecordSummary { n_prompts: 9, n_before, n_new: 9 - n_before, n_in_file: 9 });
        assert_eq!(by_id(&path), by_id(&whole), "stopped after {stop}");
    }
    assert!(n_kept_behind > 0, "no request ended before one that stands before it");
    // Nothing is left to do, and then two prompts more.
    assert_eq!(into(&whole, 4, &all, usize::MAX).map(|summary| summary.n_new), Ok(0));
    assert!(fs::read(&whole).expect("there") == bytes);
    let more = prompts(11);
    assert_eq!(into(&whole, 4, &more[9..], usize::MAX).map(|summary| summary.n_in_file), Ok(11));
    assert!(fs::read(&whole).expect("there").starts_with(&bytes));
}

#[test]
fn prompts_that_can_not_be_recorded_are_named_before_anything_is_written() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("t");
    let good = prompts(3);
    let refused = |change: &dyn Fn(&mut Vec<RecordPrompt>)| {
        let mut prompts = good.clone();
        change(&mut prompts);
        into(&path, 2, &prompts, usize::MAX).expect_err("refused")
    };
    let long = refused(&|prompts| prompts[1].tokens = vec![1; N_CTX as usize]);
    assert!(long.contains("prompt \"p1\": 40 tokens do not fit a slot of 40"), "{long}");
    let empty = refused(&|prompts| prompts[2].tokens.clear());
    assert!(empty.contains("prompt \"p2\": 0 tokens do not fit"), "{empty}");
    let twice = refused(&|prompts| prompts[2].id = "p0".to_owned());
    assert!(twice.contains("two prompts have the id \"p0\""), "{twice}");
    assert!(!path.exists());
    into(&path, 2, &good, usize::MAX).expect("recorded");
    for change in [
        &(|prompts: &mut Vec<RecordPrompt>| prompts[1].tokens[0] += 1) as &dyn Fn(&mut Vec<RecordPrompt>),
        &|prompts| prompts[1].max_tokens += 1,
        &|prompts| prompts[1].domain = Some("other".to_owned()),
    ] {
        let other = refused(change);
        assert!(other.contains("prompt \"p1\" is in the trace") && other.contains("another text"), "{other}");
    }
    // A slot holds no longer answer, so to ask for more changes nothing.
    let mut full = prompts(1);
    full[0].max_tokens = N_CTX - full[0].tokens.len() as u32 + 1;
    let path = dir.path().join("full");
    into(&path, 2, &full, usize::MAX).expect("recorded");
    full[0].max_tokens = 1000;
    assert_eq!(into(&path, 2, &full, usize::MAX).map(|summary| summary.n_before), Ok(1));
    let trace = read_trace(&path).expect("a trace");
    assert_eq!(trace.requests[0].n_steps(&trace.header) as u32, N_CTX - full[0].tokens.len() as u32);
}

#[test]
fn a_worker_that_fails_ends_the_recording_and_costs_no_record() {
    let dir = tempfile::tempdir().expect("a folder");
    let prompts = prompts(9);
    let whole = dir.path().join("whole");
    into(&whole, 2, &prompts, usize::MAX).expect("recorded");
    for (index, fault) in
        [Fault::DecodeFatal(14), Fault::PrefillFatal(9), Fault::PrefillRestored(9), Fault::ExportRestored(4)]
            .into_iter()
            .enumerate()
    {
        let path = dir.path().join(index.to_string());
        let n_done = RefCell::new(0);
        let failed = recorder(2, RecordSettings::default(), std::slice::from_ref(&fault));
        let error = failed.record_into(&path, &prompts, &AtomicBool::new(false), &mut |n| *n_done.borrow_mut() = n);
        let error = error.expect_err("the fault");
        assert!(matches!(error, EngineError::Run(_)), "{fault:?}: {error}");
        assert_eq!(read_trace(&path).expect("whole records").requests.len(), n_done.take(), "{fault:?}");
        into(&path, 2, &prompts, usize::MAX).expect("recorded");
        assert!(fs::read(&path).expect("there") == fs::read(&whole).expect("there"), "{fault:?}");
    }
    // A step or an import that changed nothing is tried again.
    let path = dir.path().join("restored");
    let faults = [Fault::DecodeRestored(5), Fault::ImportRestored(2)];
    let restored = recorder(2, RecordSettings::default(), &faults);
    restored.record_into(&path, &prompts, &AtomicBool::new(false), &mut |_| {}).expect("recorded");
    assert!(fs::read(&path).expect("there") == fs::read(&whole).expect("there"));
}
