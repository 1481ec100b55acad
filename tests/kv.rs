//! A prefill worker that keeps what prompts leave behind, over the fake runner: after any interleaving of requests,
//! cancellations and failures, every text and every count is that of a prompt run from its first token.
//!
//! The fake model's next token is a hash of all tokens before it, so its states and first tokens stand for keys, values
//! and logits bit for bit.
#![allow(clippy::unwrap_used)]

#[path = "kv/answers.rs"]
mod answers;
#[path = "kv/changed.rs"]
mod changed;
#[path = "kv/interleaving.rs"]
mod interleaving;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use eldr::{
    engine::DiskTier,
    kv::names,
    route::LeastLoaded,
    schedule::{
        Answers, CacheChange, CacheStats, Command, DecodeWorker, DispatchLimits, Dispatcher, FakeModel, FakeRunner,
        Fault, Handoff, Job, Leftover, ModelRunner, PrefillWorker, PrefixConfig, PrefixStore, Reuse, Source,
        StoredMatch, StoredPrefix, WorkerEvent, has_layers, n_usable,
    },
    signature::ExpertCounts,
    types::{FinishReason, Request, RequestId, SamplingParams, Slot, Token, WorkerId},
};

const MODEL: FakeModel = FakeModel { n_vocab: 23, n_layer: 3, n_expert: 8, n_expert_used: 2 };
const CHUNK: u32 = 8;
const BLOCK: u32 = 4;
const N_CTX: u32 = 64;

/// The plainest store: the newest few.
struct Newest(Vec<Arc<StoredPrefix>>);

impl PrefixStore for Newest {
    fn find(&mut self, prompt: &[Token], layers: &[u32]) -> Option<StoredMatch> {
        let fitting = self.0.iter().enumerate().filter(|(_, prefix)| has_layers(prefix.layers(), layers));
        let common = fitting.map(|(at, prefix)| (n_usable(&prefix.tokens, prefix.whole, prompt), at));
        let (n_common, at) = common.max().filter(|&(n, _)| n > 0)?;
        let n_tokens = u32::try_from(self.0[at].tokens.len()).unwrap();
        Some(StoredMatch { id: at as u64, tier: 0, n_tokens, n_common, n_bytes: 0 })
    }

    fn load(&mut self, found: &StoredMatch) -> Option<Arc<StoredPrefix>> {
        self.0.get(usize::try_from(found.id).unwrap()).cloned()
    }

    fn has(&self, tokens: &[Token], layers: &[u32]) -> bool {
        self.0.iter().any(|prefix| prefix.covers(tokens, layers))
    }

    fn put(&mut self, prefix: StoredPrefix) {
        assert!(!self.has(&prefix.tokens, prefix.layers()), "{:?} is there already", prefix.tokens);
        assert_eq!(prefix.state.n_tokens as usize, prefix.tokens.len());
        self.0.push(Arc::new(prefix));
        if self.0.len() > 6 {
            self.0.remove(0);
        }
    }
}

struct World {
    worker: PrefillWorker,
    runner: FakeRunner,
    n_slots: u32,
    /// Requests under way.
    running: BTreeMap<RequestId, Vec<Token>>,
    n_given_back: usize,
    stats: CacheStats,
    /// The worker has given everything back.
    lost: bool,
}

impl World {
    fn new(n_slots: u32, max_tokens: u64, reuse: Reuse, faults: Vec<Fault>) -> Self {
        let runner = FakeRunner::new(MODEL, n_slots, N_CTX, faults).reusing(reuse);
        let config = PrefixConfig { max_tokens, block: BLOCK, ..PrefixConfig::default() };
        let worker = PrefillWorker::new(runner.info(), CHUNK, 3, &[0], MODEL.n_expert);
        let worker = worker.caching(config, runner.info(), MODEL.n_expert);
        Self {
            worker,
            runner,
            n_slots,
            running: BTreeMap::new(),
            n_given_back: 0,
            stats: CacheStats::default(),
            lost: false,
        }
    }

    fn spilling(self) -> Self {
        self.storing(Box::new(Newest(Vec::new())))
    }

    fn storing(self, store: Box<dyn PrefixStore>) -> Self {
        Self { worker: self.worker.spilling(Some(store)), ..self }
    }

    /// The worker is lost, and another one takes its place: what it held is gone.
    fn lose(&mut self, max_tokens: u64, reuse: Reuse) {
        let mut events = Vec::new();
        self.worker.abandon("as scripted", &mut events);
        for event in events {
            match event {
                WorkerEvent::Returned { job, .. } => drop(self.running.remove(&job.id).unwrap()),
                WorkerEvent::Lost { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        assert!(self.running.is_empty(), "{:?} got lost with the worker", self.running);
        let Self { worker, runner, .. } = Self::new(self.n_slots, max_tokens, reuse, vec![]);
        (self.worker, self.runner, self.stats, self.lost) = (worker, runner, CacheStats::default(), false);
    }

    /// Decodes a hand-off to its end on a worker of its own; what it leaves.
    fn decode(handoff: Handoff, tap: bool) -> Option<Leftover> {
        let mut runner = FakeRunner::new(MODEL, 2, N_CTX, vec![]);
        let layers: Vec<u32> = if tap { (0..MODEL.n_layer).collect() } else { Vec::new() };
        let answers = Answers { layers: layers.into(), n_expert: MODEL.n_expert, block: BLOCK };
        let mut worker = DecodeWorker::new(runner.info(), CHUNK, &[0]).returning(Some(answers));
        worker.admit(handoff);
        let mut events = Vec::new();
        while !worker.is_idle() {
            worker.step(&mut runner, &mut events);
        }
        events.into_iter().find_map(|event| if let WorkerEvent::Left(left) = event { Some(left) } else { None })
    }

    fn submit(&mut self, id: u64, prompt: &[Token]) {
        let request = Request {
            prompt: prompt.to_vec(),
            max_tokens: 4,
            sampling: SamplingParams { ignore_eos: true, ..SamplingParams::default() },
            domain: None,
            deadline: None,
        };
        self.running.insert(RequestId(id), prompt.to_vec());
        self.worker.admit(Job::new(RequestId(id), Arc::new(request)));
    }

    /// One step; the hand-offs it led to, checked.
    fn step(&mut self) -> Vec<Handoff> {
        let mut events = Vec::new();
        self.worker.step(&mut self.runner, &mut events);
        let mut handoffs = Vec::new();
        for event in events {
            match event {
                WorkerEvent::Prefilled(handoff) => {
                    self.check_handoff(&handoff);
                    handoffs.push(handoff);
                }
                WorkerEvent::Returned { job, .. } => {
                    self.n_given_back += 1;
                    self.running.remove(&job.id).unwrap();
                }
                WorkerEvent::Finished { id, reason, .. } => {
                    assert_eq!(reason, FinishReason::Cancelled);
                    self.running.remove(&id).unwrap();
                }
                WorkerEvent::Cache(change) => self.stats = change.stats,
                WorkerEvent::Token { id, token, .. } => {
                    let prompt = &self.running[&id];
                    assert_eq!(token, MODEL.next(prompt, &SamplingParams::default()), "first token after {prompt:?}");
                }
                WorkerEvent::Left(_) | WorkerEvent::Moved(_) | WorkerEvent::Stayed { .. } => {
                    panic!("nothing decodes here")
                }
                WorkerEvent::Lost { error } => {
                    assert!(error.contains("as scripted"), "{error}");
                    self.lost = true;
                }
            }
        }
        if !self.lost {
            self.check();
        }
        handoffs
    }

    /// The ledger is whole and tells what is in the slots; exactly those that somebody has shifted are found to differ.
    fn check(&self) {
        let slots = || (0..self.n_slots).map(Slot);
        for slot in slots() {
            assert_eq!(self.worker.cache().tokens(slot), self.runner.tokens(slot), "slot {slot}");
        }
        self.worker.cache().check_integrity();
        let differ = self.worker.cache().differences(&self.runner).into_iter().map(|(slot, _)| slot);
        assert!(differ.eq(slots().filter(|&slot| self.runner.is_shifted(slot))), "slots that differ");
    }

    fn check_handoff(&mut self, handoff: &Handoff) {
        let prompt = self.running.remove(&handoff.job.id).unwrap();
        assert_eq!(handoff.state.n_tokens as usize, prompt.len());
        let bytes: Vec<u8> = prompt.iter().flat_map(|token| token.to_le_bytes()).collect();
        assert_eq!(*handoff.state.bytes, *bytes, "the state is the whole prompt's");
        assert_eq!(handoff.counts.as_ref(), Some(&cold(&prompt)), "counts of {prompt:?}");
    }

    fn drain(&mut self) -> Vec<Handoff> {
        let mut handoffs = Vec::new();
        for round in 0.. {
            if self.worker.is_idle() {
                break;
            }
            assert!(round < 1000, "the worker never gets idle");
            handoffs.extend(self.step());
        }
        assert!(self.running.is_empty(), "{:?} got lost", self.running);
        assert!(self.lost || self.runner.n_open() == 0, "{} slots are open", self.runner.n_open());
        handoffs
    }

    /// Runs prompts one after another; how many tokens of each were there.
    fn cached(&mut self, prompts: &[&[Token]]) -> Vec<u32> {
        let mut cached = Vec::new();
        for prompt in prompts {
            self.submit(0, prompt);
            cached.extend(self.drain().iter().map(|handoff| handoff.job.n_cached));
        }
        cached
    }
}

/// The counts of a prompt that is run from its first token.
fn cold(prompt: &[Token]) -> ExpertCounts {
    let layers: Vec<u32> = (0..MODEL.n_layer).collect();
    let mut counts = ExpertCounts::new(&layers, MODEL.n_expert);
    counts.add_tokens(prompt.len() as u32);
    for &layer in &layers {
        for &token in prompt {
            counts.add(layer, &MODEL.picks(token, layer));
        }
    }
    counts
}

fn tokens(n: usize, seed: usize) -> Vec<Token> {
    (0..n).map(|i| Token::try_from(1 + (i * i + seed * 7 + i * seed) % 22).unwrap()).collect()
}

fn joined(parts: &[&[Token]]) -> Vec<Token> {
    parts.concat()
}

#[test]
fn what_is_used_again_ends_at_a_block_and_leaves_two_tokens_to_run() {
    let (system, a, b) = (tokens(16, 1), tokens(7, 2), tokens(9, 3));
    let first = joined(&[&system, &a]);
    let mut world = World::new(6, 1000, Reuse::Prefix, vec![]);
    assert_eq!(world.cached(&[&first]), [0]);
    assert_eq!(world.cached(&[&first]), [21], "a full hit");
    assert_eq!(world.cached(&[&joined(&[&system, &b])]), [16], "another branch of the system prompt");
    assert_eq!(world.cached(&[&first[..18]]), [16], "the middle of a block is not used");
    assert_eq!(
        world.cached(&[&joined(&[&first, &b])]),
        [23],
        "a block with room is, by a prompt that goes on after it"
    );
    assert_eq!(world.cached(&[&joined(&[&first, &b[..1]])]), [22], "but two tokens are left to run");
    assert_eq!(world.stats.n_fallbacks, 0);
    assert_eq!(world.cached(&[&[7]]), [0]);
}

#[test]
fn identical_prompts_at_once_are_computed_once() {
    let prompt = tokens(20, 1);
    let mut world = World::new(4, 1000, Reuse::Prefix, vec![]);
    (0..5).for_each(|id| world.submit(id, &prompt));
    let cached: Vec<u32> = world.drain().iter().map(|handoff| handoff.job.n_cached).collect();
    assert_eq!(cached, [0, 18, 18, 18, 18]);
}

#[test]
fn a_prefix_is_copied_out_of_a_prompt_that_is_still_running() {
    let (long, short) = (tokens(40, 1), tokens(40, 1)[..14].to_vec());
    let mut world = World::new(4, 1000, Reuse::Prefix, vec![]);
    world.submit(0, &long);
    world.step();
    world.step();
    world.submit(1, &short);
    let handoffs = world.drain();
    let cached: Vec<_> = handoffs.iter().map(|handoff| (handoff.job.id.0, handoff.job.n_cached)).collect();
    assert_eq!(cached, [(1, 12), (0, 0)]);
}

#[test]
fn a_branch_of_a_branch_and_an_eviction_of_what_is_in_use() {
    let (root, a, b) = (tokens(8, 1), tokens(8, 2), tokens(8, 3));
    let (ra, rab) = (joined(&[&root, &a]), joined(&[&root, &a, &b]));
    let mut world = World::new(3, 1000, Reuse::Prefix, vec![]);
    let rba = joined(&[&root, &b, &a]);
    assert_eq!(world.cached(&[&ra, &rab, &rba, &rab]), [0, 16, 8, 22]);
    // Three prompts at once take every slot; what they begin with goes while the others still need it.
    world.submit(0, &rab);
    let mut handoffs = world.step();
    world.submit(1, &tokens(24, 9));
    world.submit(2, &rba);
    world.submit(3, &ra);
    handoffs.extend(world.drain());
    assert_eq!(handoffs.len(), 4);
}

#[test]
fn a_prompt_longer_than_the_budget_keeps_its_head() {
    let prompt = tokens(40, 1);
    let mut world = World::new(4, 18, Reuse::Prefix, vec![]);
    assert_eq!(world.cached(&[&prompt, &prompt]), [0, 16]);
    assert_eq!(world.stats.n_held_tokens, 16);
    assert_eq!(world.cached(&[&tokens(13, 5), &prompt]), [0, 4], "the older prompt made room from its end");
}

#[test]
fn a_memory_that_can_not_be_cut_only_goes_on_at_its_end() {
    let (a, b) = (tokens(11, 1), tokens(6, 2));
    let mut world = World::new(4, 1000, Reuse::Whole, vec![]);
    assert_eq!(world.cached(&[&a, &joined(&[&a, &b]), &a]), [0, 11, 0]);
    assert_eq!(world.cached(&[&joined(&[&a, &b, &a]), &joined(&[&a[..8], &b])]), [17, 0]);
    let mut world = World::new(4, 1000, Reuse::Nothing, vec![]);
    assert_eq!(world.cached(&[&a, &a]), [0, 0]);
}

#[test]
fn a_prefix_that_does_not_arrive_is_computed_and_counted() {
    let prompt = tokens(20, 1);
    // The first prompt is kept (call 0); the second fails to go on from it (call 1).
    let mut world = World::new(4, 1000, Reuse::Prefix, vec![Fault::ReuseRestored(1)]);
    assert_eq!(world.cached(&[&prompt, &prompt, &prompt]), [0, 0, 18]);
    assert_eq!((world.stats.n_fallbacks, world.stats.n_cached_tokens), (1, 18));
}

#[test]
fn a_prefix_that_made_room_comes_back() {
    let prompts: Vec<Vec<Token>> = (1..6).map(|seed| tokens(22, seed)).collect();
    let mut world = World::new(3, 1000, Reuse::Prefix, vec![]).spilling();
    assert!(prompts.iter().all(|prompt| world.cached(&[prompt]) == [0]));
    assert_eq!(world.stats.n_spilled, 2);
    assert_eq!(world.cached(&[&prompts[0]]), [20], "all of it");
    assert_eq!(world.cached(&[&joined(&[&prompts[1][..13], &prompts[0]])]), [12], "a branch of it");
    assert_eq!(world.stats.n_restored_tokens, 44);
    let mut world = World::new(3, 1000, Reuse::Whole, vec![Fault::ImportRestored(1)]).spilling();
    assert!(prompts.iter().all(|prompt| world.cached(&[prompt]) == [0]));
    assert_eq!(world.cached(&[&joined(&[&prompts[0], &[1, 2]])]), [22], "its end is where the prompt goes on");
    assert_eq!(world.cached(&[&joined(&[&prompts[1], &[1, 2]])]), [0], "an import that fails is a cold prefill");
    assert_eq!((world.stats.n_restored_tokens, world.stats.n_fallbacks), (22, 1));
}

#[test]
fn what_is_on_a_disk_survives_the_worker_and_the_client_hears_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let tier = || DiskTier::open(dir.path(), vec![("model".to_owned(), "fake".to_owned())], 1 << 20).unwrap();
    let prompts: Vec<Vec<Token>> = (1..4).map(|seed| tokens(22, seed)).collect();
    let mut world = World::new(4, 1000, Reuse::Prefix, vec![]).storing(Box::new(tier()));
    for prompt in &prompts {
        assert_eq!(world.cached(&[prompt]), [0]);
    }
    world.worker.save(&mut world.runner);
    drop(world);
    let mut world = World::new(4, 1000, Reuse::Prefix, vec![]).storing(Box::new(tier()));
    world.submit(7, &joined(&[&prompts[1], &[3, 4, 5]]));
    let usage = world.drain()[0].job.usage();
    assert_eq!((usage.cached_tokens, usage.restored_tokens), (22, 22));
    assert_eq!((usage.block_hits, usage.block_misses), (6, 1));
    world.submit(8, &joined(&[&prompts[1], &[3, 4, 6]]));
    let usage = world.drain()[0].job.usage();
    assert_eq!((usage.cached_tokens, usage.restored_tokens), (23, 0), "it is in a slot by now");
}

#[test]
fn a_pinned_prefix_is_never_dropped() {
    let system = tokens(18, 1);
    let prompt = |seed| joined(&[&system, &tokens(9, seed)]);
    let mut world = World::new(5, 40, Reuse::Prefix, vec![]);
    world.worker.pin(&system).unwrap();
    world.worker.pin(&system).unwrap();
    assert_eq!(world.cached(&[&prompt(2)]), [0], "the first prompt that begins with it computes it");
    assert_eq!((world.worker.cache().n_pinned(), world.stats.n_pinned_tokens), (1, 16), "whole blocks");
    // Far more than the budget and the slots.
    (20..40).for_each(|seed| drop(world.cached(&[&tokens(30, seed)])));
    assert_eq!(world.cached(&[&prompt(3)]), [16]);
    let why = World::new(4, 40, Reuse::Prefix, vec![]).worker.pin(&tokens(3, 1)).unwrap_err();
    assert!(why.contains("only whole blocks are pinned"), "{why}");
    let mut full = World::new(4, 40, Reuse::Prefix, vec![]);
    full.worker.pin(&tokens(8, 1)).unwrap();
    let why = full.worker.pin(&tokens(8, 2)).unwrap_err();
    assert!(why.contains("prompts need 3 of its 4"), "{why}");
    let why = World::new(4, 40, Reuse::Whole, vec![]).worker.pin(&system).unwrap_err();
    assert!(why.contains("can not be cut"), "{why}");
    let why = World::new(4, 0, Reuse::Prefix, vec![]).worker.pin(&system).unwrap_err();
    assert!(why.contains("switch the prefix cache on"), "{why}");
}

#[test]
fn where_memory_can_not_be_cut_the_third_prompt_that_begins_alike_finds_a_copy() {
    let system = tokens(21, 1);
    for reuse in [Reuse::Whole, Reuse::Window] {
        let prompt = |seed| joined(&[&system, &tokens(19, seed)]);
        let mut world = World::new(4, 1000, reuse, vec![]).spilling();
        assert_eq!(world.cached(&[&prompt(2), &prompt(3), &prompt(4), &prompt(5)]), [0, 0, 16, 16], "{reuse:?}");
        assert_eq!((world.stats.n_fallbacks, world.stats.n_checkpoints), (1, 1), "{reuse:?}");
        let mut world = World::new(4, 1000, reuse, vec![]);
        assert_eq!(world.cached(&[&prompt(2), &prompt(3), &prompt(4)]), [0, 0, 0], "{reuse:?}");
        assert!(world.stats.n_fallbacks >= 1 && world.stats.n_checkpoints == 0, "every fallback is counted: {reuse:?}");
    }
}

#[test]
fn nothing_is_kept_without_a_budget() {
    let prompt = tokens(20, 1);
    let mut world = World::new(4, 0, Reuse::Prefix, vec![]);
    assert_eq!(world.cached(&[&prompt, &prompt]), [0, 0]);
    assert!((0..4).all(|slot| world.runner.tokens(Slot(slot)).is_empty()));
}

#[test]
fn a_prompt_goes_to_the_worker_that_will_be_done_with_it_first() {
    let runner = FakeRunner::new(MODEL, 4, N_CTX, vec![]);
    let config = PrefixConfig { max_tokens: 1000, block: BLOCK, ..PrefixConfig::default() };
    let limits = DispatchLimits::default();
    let dispatcher = Dispatcher::new(2, &[16], Box::new(LeastLoaded), None, limits);
    let mut dispatcher = dispatcher.caching(config, runner.info());
    let mut n_submitted = 0;
    let mut place = |dispatcher: &mut Dispatcher, prompt: &[Token]| {
        let request = Request {
            prompt: prompt.to_vec(),
            max_tokens: 1,
            sampling: SamplingParams::default(),
            domain: None,
            deadline: None,
        };
        let mut commands = Vec::new();
        n_submitted += 1;
        dispatcher.submit(RequestId(n_submitted), Arc::new(request), Duration::ZERO, &mut commands).unwrap();
        dispatcher.check_integrity();
        match commands.remove(0) {
            Command::Prefill(worker, _) => worker.0,
            other => panic!("{other:?}"),
        }
    };
    let (a, b, c) = (tokens(32, 1), tokens(20, 2), tokens(40, 3));
    assert_eq!(place(&mut dispatcher, &a), 0);
    assert_eq!(place(&mut dispatcher, &b), 1, "the other one has nothing to do");
    assert_eq!(place(&mut dispatcher, &a), 0, "where it will be when its turn comes");
    assert_eq!(place(&mut dispatcher, &joined(&[&a[..8], &c])), 1, "what is held of it is not worth the wait");
    // Worker 1 says that it holds the third prompt, from before; it has 68 tokens to run, the other one 32.
    let blocks = names(runner.info().root_name(), BLOCK, &c).into_iter().map(|name| (name, true)).collect();
    let said = WorkerEvent::Cache(CacheChange { blocks, ..CacheChange::default() });
    dispatcher.on_event(Source::Prefill(WorkerId(1)), said, &mut Vec::new());
    assert_eq!(place(&mut dispatcher, &c), 1);
}
