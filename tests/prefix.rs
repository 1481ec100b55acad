//! A prompt whose beginning is used again gives what a cold prefill gives: the same counts, integer for integer, and in
//! the exact setting the same keys, values and logits, bit for bit.
#![allow(clippy::unwrap_used)]

mod support;

use std::{path::Path, sync::Arc};

use eldr::{
    engine::{LlamaRunner, TapUse},
    llama::{Backend, Batch, Context, ContextParams, Model, ModelParams},
    schedule::{CacheStats, Handoff, Job, ModelRunner, PrefillWorker, PrefixConfig, WorkerEvent},
    types::{Request, RequestId, SamplingParams, Slot, Token},
};
use support::planted::{self, Arch};

const CHUNK: u32 = 64;
const N_SLOTS: u32 = 4;

fn load(path: &Path) -> Model {
    let backend = Backend::init();
    let device = backend.device("CPU").unwrap();
    Model::load(&backend, path, &ModelParams { device: Some(device), ..ModelParams::default() }).unwrap()
}

fn shipped() -> Model {
    load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/tiny-moe-64x4.gguf"))
}

fn text(model: &Model, n: usize, sentence: &str) -> Vec<Token> {
    model.tokenize(&sentence.repeat(n / 4 + 1), true, false).unwrap()[..n].to_vec()
}

/// A prefill worker over llama.cpp and what it has said.
struct Rig {
    runner: LlamaRunner,
    worker: PrefillWorker,
    stats: CacheStats,
}

impl Rig {
    fn new(model: &Model, params: ContextParams, max_tokens: u64) -> Self {
        Self::aligned(model, params, max_tokens, 1)
    }

    fn aligned(model: &Model, params: ContextParams, max_tokens: u64, align: u32) -> Self {
        let layers = model.moe_shape().unwrap().usable();
        let n_expert = model.moe_shape().unwrap().n_expert;
        let params = ContextParams { n_slots: N_SLOTS, n_ctx_slot: 512, n_batch: CHUNK, n_ubatch: CHUNK, ..params };
        let runner = LlamaRunner::new(model, &params, &TapUse::Prefill(layers), true).unwrap();
        let config = PrefixConfig { max_tokens, align, ..PrefixConfig::default() };
        let worker = PrefillWorker::new(runner.info(), CHUNK, 2, &[], n_expert);
        let worker = worker.caching(config, runner.info(), n_expert);
        Self { runner, worker, stats: CacheStats::default() }
    }

    fn submit(&mut self, id: u64, prompt: &[Token]) {
        let request = Request {
            prompt: prompt.to_vec(),
            max_tokens: 3,
            sampling: SamplingParams { ignore_eos: true, ..SamplingParams::default() },
            domain: None,
            deadline: None,
        };
        self.worker.admit(Job::new(RequestId(id), Arc::new(request)));
    }

    /// Runs until nothing is left; the hand-offs in the order of their ids.
    fn drain(&mut self) -> Vec<Handoff> {
        let mut handoffs = Vec::new();
        while !self.worker.is_idle() {
            let mut events = Vec::new();
            self.worker.step(&mut self.runner, &mut events);
            for event in events {
                match event {
                    WorkerEvent::Prefilled(handoff) => handoffs.push(handoff),
                    WorkerEvent::Cache(change) => self.stats = change.stats,
                    WorkerEvent::Returned { error, .. } | WorkerEvent::Lost { error } => panic!("{error}"),
                    WorkerEvent::Token { .. } | WorkerEvent::Finished { .. } | WorkerEvent::Left(_) => {}
                }
            }
            self.worker.cache().check_integrity();
        }
        handoffs.sort_by_key(|handoff| handoff.job.id);
        handoffs
    }

    fn run(&mut self, prompt: &[Token]) -> Handoff {
        self.submit(0, prompt);
        self.drain().remove(0)
    }
}

/// What of a hand-off does not depend on how it was computed: the first token, the state, the counts. The states are
/// compared from the same slot of `rig`, since they name the slot they come from.
fn same(a: &Handoff, b: &Handoff, exact: bool, rig: &mut Rig) {
    let tokens = a.job.request.prompt.len();
    assert_eq!(a.job.request.prompt, b.job.request.prompt);
    assert!(a.counts.is_some());
    assert_eq!(a.counts, b.counts, "counts of {tokens} tokens");
    assert_eq!(a.state.n_tokens, b.state.n_tokens);
    if exact {
        assert_eq!(a.job.generated, b.job.generated, "first token after {tokens} tokens");
        let [a, b] = [a, b].map(|handoff| {
            rig.runner.import(Slot(1), &handoff.state).unwrap();
            let state = rig.runner.export(Slot(1)).unwrap();
            rig.runner.close(Slot(1)).unwrap();
            state.bytes
        });
        assert!(a == b, "keys and values of {tokens} tokens differ");
    }
}

/// Prompts that branch, repeat, grow, stop in the middle of blocks and chunks, and outgrow a chunk; and how many tokens
/// of each are there when they run one after another.
fn scenario(system: &[Token], a: &[Token], b: &[Token]) -> Vec<(Vec<Token>, u32)> {
    let (n, na, nb) = (system.len(), a.len(), b.len());
    assert_eq!((n, na, nb), (96, 70, 45));
    let sa = [system, a].concat();
    let sb = [system, b].concat();
    vec![
        (sa.clone(), 0),
        (sb.clone(), 96),                       // another branch
        (sa.clone(), 164),                      // a full hit leaves two tokens
        ([&sa[..], b].concat(), 166),           // the conversation goes on after a block with room
        (sa[..110].to_vec(), 96),               // the middle of a block
        (sa[..129].to_vec(), 127),              // two tokens left, on both sides of a chunk's end
        ([&sb[..], &a[..9]].concat(), 141),     // on from the other branch
        ([&sa[..], &b[..20], a].concat(), 160), // a branch of a branch
        (b.to_vec(), 0),
    ]
}

#[test]
fn what_is_used_again_is_bit_for_bit_a_cold_prefill() {
    let model = shipped();
    let system = text(&model, 96, "You answer questions about the rules of the reading room, briefly and politely. ");
    let a = text(&model, 70, "def opening_hours(day):\n    return hours[day]\n");
    let b = text(&model, 45, "Solve 3x + 5 = 20 and say how many books may be lent. ");
    let mut cold = Rig::new(&model, ContextParams::default(), 0);
    let mut warm = Rig::new(&model, ContextParams::default(), 1 << 20);
    for (prompt, n_cached) in scenario(&system, &a, &b) {
        let (want, got) = (cold.run(&prompt), warm.run(&prompt));
        same(&got, &want, true, &mut cold);
        assert_eq!((got.job.n_cached, want.job.n_cached), (n_cached, 0), "{} tokens", prompt.len());
    }
    assert_eq!(warm.stats.n_fallbacks, 0);
}

#[test]
fn logits_after_a_prefix_are_those_of_a_cold_prefill() {
    let model = shipped();
    let tokens = text(&model, 150, "The river turns north below the old mill, and the fields flood every spring. ");
    let params = ContextParams { n_slots: 3, n_ctx_slot: 256, ..ContextParams::default() };
    let mut context = Context::new(&model, &params).unwrap();
    let run = |context: &mut Context, seq: u32, from: u32| -> Vec<u32> {
        let mut pos = from;
        let mut logits = Vec::new();
        while pos < 150 {
            let end = ((pos / CHUNK + 1) * CHUNK).min(150);
            let mut batch = Batch::new(CHUNK as usize);
            for at in pos..end {
                batch.push(tokens[at as usize], at, seq, at == 149).unwrap();
            }
            context.decode(&batch).unwrap();
            if end == 150 {
                logits = context.logits((end - pos - 1) as usize).iter().map(|x| x.to_bits()).collect();
            }
            pos = end;
        }
        logits
    };
    let cold = run(&mut context, 0, 0);
    for n in [2, 32, 63, 64, 65, 96, 120, 126, 128, 148] {
        context.seq_cp(0, 2).unwrap();
        context.seq_truncate(2, n).unwrap();
        context.verify(2, n).unwrap();
        assert_eq!(run(&mut context, 2, n), cold, "{n} tokens used again");
        context.seq_truncate(2, n).unwrap();
        assert_eq!(run(&mut context, 2, n), cold, "{n} tokens used again in place");
    }
    assert!(context.verify(2, 151).is_err() && context.verify(2, 149).is_err());
}

#[test]
fn identical_prompts_at_once_and_a_small_budget_stay_exact() {
    let model = shipped();
    let system = text(&model, 96, "You answer questions about the rules of the reading room, briefly and politely. ");
    let others: Vec<Vec<Token>> = ["One", "Two of", "Three in a row", "Four", "Five by five"]
        .iter()
        .map(|word| [&system[..], &text(&model, 40, &format!("{word} and more. "))].concat())
        .collect();
    let mut cold = Rig::new(&model, ContextParams::default(), 0);
    // Less than two prompts: the older ones lose their ends while the next is under way.
    let mut warm = Rig::new(&model, ContextParams::default(), 200);
    let prompts: Vec<&Vec<Token>> = others.iter().chain(&others).chain([&others[0], &others[0], &others[0]]).collect();
    for (id, prompt) in prompts.iter().enumerate() {
        warm.submit(id as u64, prompt);
    }
    let handoffs = warm.drain();
    for (handoff, prompt) in handoffs.iter().zip(&prompts) {
        let want = cold.run(prompt);
        same(handoff, &want, true, &mut cold);
    }
    assert_eq!(handoffs.last().unwrap().job.n_cached, 134, "the last of three at once");
    assert!(warm.stats.n_held_tokens <= 200 && warm.stats.n_fallbacks == 0, "{:?}", warm.stats);
}

/// Symptom: two rows left over on both sides of a chunk's end gave other keys than the chunks of a cold prefill.
#[test]
fn cut_where_a_cold_prefill_is_cut_every_architecture_gives_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    for arch in Arch::MOE.into_iter().filter(|arch| !arch.has_window()) {
        let planted = planted::write(arch, &dir.path().join(format!("{}.gguf", arch.name())), 3);
        let model = load(&planted.path);
        let mut cold = Rig::new(&model, ContextParams::default(), 0);
        let mut warm = Rig::aligned(&model, ContextParams::default(), 1 << 20, CHUNK);
        let part = |n, seed| planted::some_tokens(n, seed);
        for (prompt, n_cached) in scenario(&part(96, 1), &part(70, 2), &part(45, 3)) {
            let (want, got) = (cold.run(&prompt), warm.run(&prompt));
            same(&got, &want, true, &mut cold);
            // A slot that was filled in the meantime may have had to make room.
            let n = got.job.n_cached;
            assert!(n.is_multiple_of(CHUNK) && n <= n_cached, "{arch:?}: {n} of {} tokens", prompt.len());
        }
        assert!(warm.stats.n_cached_tokens >= 500 && warm.stats.n_fallbacks == 0, "{arch:?}: {:?}", warm.stats);
    }
}

#[test]
fn planted_picks_are_counted_whatever_is_used_again_in_every_architecture() {
    let dir = tempfile::tempdir().unwrap();
    for (arch, kv_unified) in Arch::MOE.into_iter().flat_map(|arch| [(arch, false), (arch, true)]) {
        let planted = planted::write(arch, &dir.path().join(format!("{}.gguf", arch.name())), 3);
        let model = load(&planted.path);
        let params = ContextParams { kv_unified, ..ContextParams::default() };
        let mut cold = Rig::new(&model, params.clone(), 0);
        let mut warm = Rig::new(&model, params, 1 << 20);
        let part = |n, seed| planted::some_tokens(n, seed);
        for (prompt, n_cached) in scenario(&part(96, 1), &part(70, 2), &part(45, 3)) {
            let (want, got) = (cold.run(&prompt), warm.run(&prompt));
            same(&got, &want, false, &mut cold);
            let counts = got.counts.unwrap();
            for layer in planted.shape.usable() {
                assert_eq!(counts.row(layer).unwrap(), planted.expected_counts(&prompt, layer), "{arch:?}");
            }
            if !arch.has_window() {
                assert_eq!(got.job.n_cached, n_cached, "{arch:?}, {} tokens", prompt.len());
            }
        }
        assert!(warm.stats.n_cached_tokens > 0, "{arch:?}: {:?}", warm.stats);
        assert!(arch.has_window() || warm.stats.n_fallbacks == 0, "{arch:?}: {:?}", warm.stats);
    }
}
