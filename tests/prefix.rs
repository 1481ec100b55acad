//! A prompt whose beginning is used again gives what a cold prefill gives: the same counts, integer for integer, and in
//! the exact setting the same keys, values and logits, bit for bit.
#![allow(clippy::unwrap_used)]

#[path = "prefix/faulty.rs"]
mod faulty;
#[path = "prefix/hybrid.rs"]
mod hybrid;
#[path = "prefix/interleaving.rs"]
mod interleaving;
mod support;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
};

use eldr::{
    engine::{DiskTier, LlamaRunner, PrefixTiers, RamTier, RestoreRates, TapUse},
    llama::{Backend, Batch, Context, ContextParams, Model, ModelParams},
    schedule::{
        Answers, CacheStats, DecodeWorker, Handoff, Job, Leftover, ModelRunner, PrefillWorker, PrefixConfig,
        PrefixStore, Reuse, WorkerEvent,
    },
    types::{Request, RequestId, SamplingParams, Slot, Token},
};

use faulty::Faulty;
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
    runner: Faulty,
    worker: PrefillWorker,
    stats: CacheStats,
    /// By request: the bits of the probabilities of its likeliest first tokens, each of which depends on every logit.
    said: BTreeMap<RequestId, Vec<u32>>,
    /// Requests that ended here or were given back.
    n_ended: usize,
    /// Slots that somebody else has shifted and that were not emptied since.
    shifted: BTreeSet<Slot>,
    lost: bool,
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
        Self {
            runner: Faulty { llama: runner, fail: None },
            worker,
            stats: CacheStats::default(),
            said: BTreeMap::new(),
            n_ended: 0,
            shifted: BTreeSet::new(),
            lost: false,
        }
    }

    fn storing(self, store: impl PrefixStore + 'static) -> Self {
        Self { worker: self.worker.spilling(Some(Box::new(store))), ..self }
    }

    fn submit(&mut self, id: u64, prompt: &[Token]) {
        let request = Request {
            prompt: prompt.to_vec(),
            max_tokens: 3,
            sampling: SamplingParams { ignore_eos: true, n_logprobs: Some(8), ..SamplingParams::default() },
            domain: None,
            deadline: None,
        };
        self.worker.admit(Job::new(RequestId(id), Arc::new(request)));
    }

    /// One step; what it handed on. The ledger, the runner and llama.cpp's own cells agree after it.
    fn step(&mut self) -> Option<Handoff> {
        let mut events = Vec::new();
        self.worker.step(&mut self.runner, &mut events);
        let mut handed = None;
        for event in events {
            match event {
                WorkerEvent::Prefilled(handoff) => handed = Some(handoff),
                WorkerEvent::Cache(change) => self.stats = change.stats,
                WorkerEvent::Returned { error, .. } => {
                    assert!(error.contains("as scripted") || !self.shifted.is_empty(), "{error}");
                    self.n_ended += 1;
                }
                WorkerEvent::Lost { error } => {
                    assert!(error.contains("as scripted"), "{error}");
                    self.lost = true;
                }
                WorkerEvent::Token { id, logprobs, .. } => {
                    let top = logprobs.unwrap().top;
                    let bits = top.iter().flat_map(|(token, p)| [token.cast_unsigned(), p.to_bits()]);
                    self.said.insert(id, bits.collect());
                }
                WorkerEvent::Finished { .. } => self.n_ended += 1,
                WorkerEvent::Left(_) | WorkerEvent::Moved(_) | WorkerEvent::Stayed { .. } => {}
            }
        }
        if !self.lost {
            self.worker.cache().check_integrity();
            let differ: BTreeSet<Slot> = self.differ();
            assert!(differ.is_subset(&self.shifted), "{differ:?} differ, and {:?} were shifted", self.shifted);
            self.shifted = differ;
        }
        handed
    }

    /// Slots whose cells are not what the ledger says.
    fn differ(&self) -> BTreeSet<Slot> {
        self.worker.cache().differences(&self.runner).into_iter().map(|(slot, _)| slot).collect()
    }

    /// Somebody else moves a slot's positions, where the model's memory allows it. It is noticed.
    fn shift(&mut self, slot: Slot, by: i32) {
        let holds = !self.worker.cache().tokens(slot).is_empty();
        if holds && self.runner.llama.shift(slot, by).unwrap() {
            self.shifted.insert(slot);
            assert_eq!(self.differ(), self.shifted);
        }
    }

    /// Runs until nothing is left; the hand-offs in the order of their ids.
    fn drain(&mut self) -> Vec<Handoff> {
        let mut handoffs = Vec::new();
        while !self.worker.is_idle() {
            handoffs.extend(self.step());
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
    // Outside the exact setting too: these gates have no edge.
    for (arch, inexact) in Arch::MOE.into_iter().flat_map(|arch| [(arch, false), (arch, true)]) {
        let planted = planted::write(arch, &dir.path().join(format!("{}.gguf", arch.name())), 3);
        let model = load(&planted.path);
        let params = ContextParams { kv_unified: inexact, flash_attn: inexact, ..ContextParams::default() };
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

fn tiers(ram: u64, dir: Option<&Path>, max_disk: u64) -> PrefixTiers {
    let disk = dir.map(|dir| {
        let mut disk = DiskTier::open(dir, vec![("model".to_owned(), "planted".to_owned())], max_disk).unwrap();
        disk.closing();
        disk
    });
    PrefixTiers::new((ram > 0).then(|| RamTier::new(ram)), disk, RestoreRates::default()).unwrap()
}

#[test]
fn what_comes_back_from_memory_or_a_disk_is_bit_for_bit_a_cold_prefill() {
    let model = shipped();
    let dir = tempfile::tempdir().unwrap();
    let prompts: Vec<Vec<Token>> = ["One", "Two of", "Three in a row", "Four", "Five by five", "Six"]
        .iter()
        .map(|word| text(&model, 130, &format!("{word} of them stood beside the river and more. ")))
        .collect();
    let mut cold = Rig::new(&model, ContextParams::default(), 0);
    let wants: Vec<Handoff> = prompts.iter().map(|prompt| cold.run(prompt)).collect();
    let rounds = |rig: &mut Rig, cold: &mut Rig, n_rounds: usize| {
        for _ in 0..n_rounds {
            for (prompt, want) in prompts.iter().zip(&wants) {
                same(&rig.run(prompt), want, true, cold);
            }
        }
    };
    // Six prompts in four slots: each is gone when its turn comes again.
    for on_disk in [false, true] {
        let store = tiers(if on_disk { 0 } else { 64 << 20 }, on_disk.then_some(dir.path()), 64 << 20);
        let mut warm = Rig::aligned(&model, ContextParams::default(), 1 << 20, CHUNK).storing(store);
        rounds(&mut warm, &mut cold, 3);
        let stats = warm.stats;
        assert!(stats.n_fallbacks == 0 && stats.n_uncounted == 0, "{stats:?}");
        assert!(on_disk || stats.n_restored_tokens == 12 * 130, "{stats:?}");
        warm.worker.save(&mut warm.runner);
    }
    // Another process finds them all.
    let mut warm =
        Rig::aligned(&model, ContextParams::default(), 1 << 20, CHUNK).storing(tiers(0, Some(dir.path()), 64 << 20));
    rounds(&mut warm, &mut cold, 1);
    assert_eq!((warm.stats.n_restored_tokens, warm.stats.n_cached_tokens), (6 * 130, 6 * 128), "{:?}", warm.stats);
}

/// What a decode worker that taps every step leaves of a request.
fn decode(model: &Model, handoff: Handoff) -> Leftover {
    let shape = model.moe_shape().unwrap();
    let params = ContextParams {
        n_slots: N_SLOTS,
        n_ctx_slot: 512,
        n_batch: CHUNK,
        n_ubatch: CHUNK,
        ..ContextParams::default()
    };
    let mut runner = LlamaRunner::new(model, &params, &TapUse::Decode(1), true).unwrap();
    let answers =
        Answers { layers: shape.usable().into(), n_expert: shape.n_expert, block: PrefixConfig::default().block };
    let mut worker = DecodeWorker::new(runner.info(), CHUNK, &[]).returning(Some(answers));
    worker.admit(handoff);
    let mut events = Vec::new();
    while !worker.is_idle() {
        worker.step(&mut runner, &mut events);
    }
    let mut left =
        events.into_iter().filter_map(|event| if let WorkerEvent::Left(left) = event { Some(left) } else { None });
    left.next().unwrap()
}

#[test]
fn an_answer_that_comes_back_is_counted_as_if_it_had_been_prefilled() {
    let dir = tempfile::tempdir().unwrap();
    for arch in Arch::MOE.into_iter().filter(|arch| !arch.has_window()) {
        let planted = planted::write(arch, &dir.path().join(format!("{}.gguf", arch.name())), 3);
        let model = load(&planted.path);
        let mut warm = Rig::new(&model, ContextParams::default(), 1 << 20);
        let mut chat = planted::some_tokens(70, 4);
        let mut n_cached = Vec::new();
        for turn in 0..3 {
            let mut handoff = warm.run(&chat);
            n_cached.push(handoff.job.n_cached);
            let counts = handoff.counts.as_ref().unwrap();
            for layer in planted.shape.usable() {
                assert_eq!(counts.row(layer).unwrap(), planted.expected_counts(&chat, layer), "{arch:?}, turn {turn}");
            }
            Arc::get_mut(&mut handoff.job.request).unwrap().max_tokens = 50;
            let left = decode(&model, handoff);
            assert_eq!(left.tokens.len(), chat.len() + 49);
            chat = [&left.tokens[..], &planted::some_tokens(11, 5 + turn)].concat();
            warm.worker.take_in(left);
            warm.drain();
        }
        assert_eq!((n_cached, warm.stats.n_returned), (vec![0, 119, 179], 3), "{arch:?}");
    }
}

#[test]
fn with_a_sliding_window_the_third_prompt_that_begins_alike_finds_a_copy_made_for_it() {
    let dir = tempfile::tempdir().unwrap();
    for arch in Arch::MOE.into_iter().filter(|arch| arch.has_window()) {
        let planted = planted::write(arch, &dir.path().join(format!("{}.gguf", arch.name())), 3);
        let model = load(&planted.path);
        let system = planted::some_tokens(90, 1);
        let run = |n: usize, swa_full: bool, store: bool| {
            let prompts: Vec<_> = (2..6).map(|seed| [&system[..], &planted::some_tokens(n, seed)].concat()).collect();
            let params = ContextParams { swa_full, ..ContextParams::default() };
            let rig = Rig::new(&model, params, 1 << 20);
            let mut rig = if store { rig.storing(tiers(64 << 20, None, 0)) } else { rig };
            assert_eq!(rig.runner.info().reuse, Reuse::Window);
            let handoffs: Vec<_> = prompts.iter().map(|prompt| rig.run(prompt)).collect();
            for (handoff, prompt) in handoffs.iter().zip(&prompts) {
                let counts = handoff.counts.as_ref().unwrap();
                for layer in planted.shape.usable() {
                    assert_eq!(counts.row(layer).unwrap(), planted.expected_counts(prompt, layer), "{arch:?}");
                }
            }
            let cached: Vec<u32> = handoffs.iter().map(|handoff| handoff.job.n_cached).collect();
            (cached, rig.stats.n_fallbacks, rig.stats.n_checkpoints)
        };
        // llama.cpp keeps 256 positions of such a layer.
        assert_eq!(run(300, false, true), (vec![0, 0, 64, 64], 1, 1), "{arch:?}");
        assert_eq!(run(300, false, false), (vec![0; 4], 3, 0), "{arch:?}");
        assert_eq!(run(300, true, false), (vec![0, 64, 64, 64], 0, 0), "{arch:?}");
        assert_eq!(run(60, false, false), (vec![0, 64, 64, 64], 0, 0), "{arch:?}");
    }
}
