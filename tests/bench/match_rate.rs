//! How often a prefix hit and a cold prefill part ways, on the shipped model: experts picked by the prompt's tokens, first
//! tokens, and tokens of a greedy answer. In the exact setting none does, and this program fails if one does; outside it
//! nothing is promised, and the shares are printed.
//!
//! Every prompt follows another one's text, whose keys, values and counts it takes over, as a chat's next turn does. Counts,
//! not times: a busy machine prints the same, but a context with two threads may differ from run to run.
//!
//! Usage: `cargo bench --bench match_rate -- PROMPTS`, 16 of each workload without a number.
#![expect(clippy::print_stdout, reason = "it prints its report")]

use std::{collections::BTreeMap, path::Path};

use eldr::{
    engine::{LlamaRunner, TapRunner, TapUse},
    llama::{Backend, ContextParams, Model, ModelParams},
    schedule::{DecodeItem, ModelRunner, StepPicks},
    types::{SamplingParams, Slot, Token},
};

const CHUNK: usize = 64;
const BLOCK: usize = 32;
const N_ANSWER: usize = 32;
const N_CTX: u32 = 768;
/// Most tokens of a text.
const N_TEXT: usize = 200;

/// A prompt's picks by layer and token, k each, and the answer.
#[derive(Default)]
struct Ran {
    picks: BTreeMap<u32, Vec<Vec<u32>>>,
    answer: Vec<Token>,
}

#[derive(Default)]
struct Differ {
    n_picks: usize,
    picks: usize,
    n_answers: usize,
    first: usize,
    tokens: usize,
}

struct Setting {
    name: &'static str,
    params: ContextParams,
    exact: bool,
    /// Where a prefix may end.
    align: usize,
}

fn settings() -> Vec<Setting> {
    let base = ContextParams {
        n_slots: 3,
        n_ctx_slot: N_CTX,
        n_batch: CHUNK as u32,
        n_ubatch: CHUNK as u32,
        ..ContextParams::default()
    };
    let flash = ContextParams { flash_attn: true, ..base.clone() };
    let unified = ContextParams { kv_unified: true, ..base.clone() };
    let both = ContextParams { flash_attn: true, kv_unified: true, ..base.clone() };
    let two = ContextParams { n_threads: 2, ..both.clone() };
    let of = |name, params: &ContextParams, exact, align| Setting { name, params: params.clone(), exact, align };
    vec![
        of("exact: streams, no flash attention", &base, true, CHUNK),
        of("no flash attention, a lone row alone", &base, false, BLOCK),
        of("flash attention, cut at chunks", &flash, false, CHUNK),
        of("flash attention, cut at blocks", &flash, false, BLOCK),
        of("one stream, cut at blocks", &unified, false, BLOCK),
        of("one stream and flash attention", &both, false, BLOCK),
        of("the same with two threads", &two, false, BLOCK),
    ]
}

/// Runs a prompt from `from` on in `slot`, chunks ending at multiples of a chunk, and the answer after it.
fn run(runner: &mut LlamaRunner, slot: Slot, prompt: &[Token], from: usize, ran: &mut Ran) {
    runner.open(slot, &SamplingParams { ignore_eos: true, ..SamplingParams::default() }, &[]).expect("open");
    let (mut pos, mut next) = (from, None);
    while pos < prompt.len() {
        let end = ((pos / CHUNK + 1) * CHUNK).min(prompt.len());
        let mut rows = |rows: eldr::engine::PromptRows<'_>| {
            let k = rows.experts.len() / (end - pos);
            let sorted = rows.experts.chunks_exact(k).map(|picks| {
                let mut picks = picks.to_vec();
                picks.sort_unstable();
                picks
            });
            ran.picks.entry(rows.layer).or_default().extend(sorted);
        };
        next = runner.prefill_rows(slot, &prompt[pos..end], pos as u32, end == prompt.len(), &mut rows).expect("run");
        pos = end;
    }
    let mut token = next.expect("the last chunk draws");
    ran.answer.push(token);
    let mut drawn = Vec::new();
    for pos in (prompt.len()..).take(N_ANSWER - 1) {
        let item = DecodeItem { slot, token, pos: pos as u32, draws: true };
        runner.decode(&[item], &mut drawn, &mut StepPicks::default()).expect("a step");
        token = drawn[0];
        ran.answer.push(token);
    }
}

/// What runs cold and after a hit, of texts that follow one another: a first prompt leaves what the second takes over.
fn compare(model: &Model, setting: &Setting, texts: &[Vec<Token>]) -> Differ {
    let layers = model.moe_shape().expect("a model with experts").usable();
    let tap = TapUse::Prefill(layers);
    let mut runner = LlamaRunner::new(model, &setting.params, &tap, setting.exact).expect("a context");
    let mut differ = Differ::default();
    for texts in texts.windows(3) {
        let (left, prompt) = ([&texts[0][..], &texts[1]].concat(), [&texts[0][..], &texts[2]].concat());
        let n = texts[0].len() / setting.align * setting.align;
        let (mut before, mut cold, mut warm) = (Ran::default(), Ran::default(), Ran::default());
        run(&mut runner, Slot(0), &left, 0, &mut before);
        run(&mut runner, Slot(1), &prompt, 0, &mut cold);
        runner.close(Slot(1)).expect("closed");
        if n > 0 {
            runner.copy_prefix(Slot(0), Slot(1), n as u32).expect("copied");
            warm.picks = before.picks.iter().map(|(&layer, rows)| (layer, rows[..n].to_vec())).collect();
        }
        run(&mut runner, Slot(1), &prompt, n, &mut warm);
        for slot in [Slot(0), Slot(1)] {
            runner.close(slot).expect("closed");
        }
        differ.add(&cold, &warm);
    }
    differ
}

impl Differ {
    fn add(&mut self, cold: &Ran, warm: &Ran) {
        for (layer, rows) in &cold.picks {
            let others = &warm.picks[layer];
            assert_eq!(rows.len(), others.len(), "tokens of layer {layer}");
            for (a, b) in rows.iter().zip(others) {
                self.n_picks += a.len();
                self.picks += a.iter().filter(|expert| !b.contains(expert)).count();
            }
        }
        self.n_answers += 1;
        self.first += usize::from(cold.answer[0] != warm.answer[0]);
        self.tokens += cold.answer.iter().zip(&warm.answer).filter(|(a, b)| a != b).count();
    }
}

fn texts(model: &Model, workload: &str, n: usize) -> Vec<Vec<Token>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("examples/data/{workload}.serve.jsonl"));
    let lines = std::fs::read_to_string(path).expect("the workload");
    let all = lines.lines().map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).expect("a line of JSON");
        let mut tokens = model.tokenize(line["prompt"].as_str().expect("a prompt"), false, false).expect("tokens");
        tokens.truncate(N_TEXT);
        tokens
    });
    // Long enough that there is something to take over.
    all.filter(|tokens| tokens.len() >= 2 * CHUNK).take(n + 2).collect()
}

fn main() {
    let n = std::env::args().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(16);
    let backend = Backend::init();
    let device = backend.device("CPU").expect("a CPU");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/tiny-moe-64x4.gguf");
    let model = Model::load(&backend, &path, &ModelParams { device: Some(device), ..ModelParams::default() });
    let model = model.expect("the model");
    println!("{:<9} {:<38} {:>22} {:>14} {:>18}", "workload", "setting", "picks", "first tokens", "answers' tokens");
    for workload in ["task", "language"] {
        let texts = texts(&model, workload, n);
        for setting in settings() {
            let Differ { n_picks, picks, n_answers, first, tokens } = compare(&model, &setting, &texts);
            let n_tokens = n_answers * N_ANSWER;
            let share = |n: usize, of: usize| format!("{n} of {of} ({:.3}%)", 100.0 * n as f64 / of as f64);
            let (picked, said) = (share(picks, n_picks), share(tokens, n_tokens));
            println!("{workload:<9} {:<38} {picked:>22} {first:>7} of {n_answers:<3} {said:>18}", setting.name);
            assert!(!setting.exact || (picks, tokens) == (0, 0), "the exact setting is not exact");
        }
    }
}
