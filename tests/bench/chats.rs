//! What the prefix cache is worth to chats, and that it changes nothing else: with it and without, the tokens prefilled,
//! the time to first token, the time per output token and what routing by experts gains on it.
//!
//! Chats of four turns share a system prompt a domain; a turn goes on with the answer the model really gave. Prompts,
//! answers and picks are real. Time is not: a step takes what [`Costs`] says, turns begin at fixed times, and so every run
//! prints the same, whatever else the machine does, and the batches with and without the cache are those of one load.
//!
//! Usage: `cargo bench --bench chats -- WORKLOAD CHATS`, `task` or `language`, 64 chats without a number.
#![expect(clippy::print_stdout, reason = "it prints its report")]

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use eldr::{
    PolicyKind,
    engine::{EngineConfig, EngineWorker, LoadedModel, N_PREFILL_PARALLEL, PrefixBudget, WorkerList},
    kv::ChunkCounts,
    rng::mix,
    schedule::{
        Answers, CacheStats, Command, DecodeItem, DecodeWorker, DispatchLimits, Dispatcher, ModelRunner, Outcome,
        PrefillWorker, RunError, RunnerLayer, SeqState, Source, StepPicks, WorkerEvent,
    },
    types::{FinishReason, Request, RequestId, SamplingParams, Slot, Token, WorkerId},
};

const N_TURNS: usize = 4;
const N_OUTPUT: u32 = 48;
/// From one turn's begin to the next's: longer than a turn takes.
const TURN: Duration = Duration::from_millis(800);
/// From one chat's begin to the next's.
const NEXT_CHAT: Duration = Duration::from_micros(12_500);
/// Characters of what a user says.
const N_QUESTION: usize = 130;

/// Characters of a domain's system prompt.
const N_SYSTEM: usize = 200;

/// What steps take, in microseconds: as on a device that reads the experts of 8 sequences in half of a step.
struct Costs {
    prefill_token: f64,
    /// Keys and values that move: a hand-off's, a prefix's.
    moved_token: f64,
    decode: f64,
    /// A distinct expert, mean over the layers.
    expert: f64,
    sequence: f64,
}

const COSTS: Costs = Costs { prefill_token: 100.0, moved_token: 2.0, decode: 3000.0, expert: 220.0, sequence: 190.0 };

/// What the step under way costs, in microseconds, and what it ran.
#[derive(Debug, Default, Clone)]
struct Spent {
    micros: f64,
    n_prefilled: u64,
    n_batch: usize,
    n_distinct: f64,
}

/// A runner whose calls are added up.
struct Meter {
    inner: Box<dyn ModelRunner>,
    spent: Arc<Mutex<Spent>>,
}

impl Meter {
    fn add(&self, add: impl FnOnce(&mut Spent)) {
        add(&mut self.spent.lock().expect("one thread"));
    }

    fn moved(&self, n_tokens: u32) {
        self.add(|spent| spent.micros += COSTS.moved_token * f64::from(n_tokens));
    }
}

impl RunnerLayer for Meter {
    fn inner(&self) -> &dyn ModelRunner {
        &*self.inner
    }

    fn inner_mut(&mut self) -> &mut dyn ModelRunner {
        &mut *self.inner
    }

    fn prefill(
        &mut self,
        slot: Slot,
        tokens: &[Token],
        pos: u32,
        last: bool,
        counts: Option<&mut ChunkCounts>,
    ) -> Result<Option<Token>, RunError> {
        self.add(|spent| {
            spent.n_prefilled += tokens.len() as u64;
            spent.micros += COSTS.prefill_token * tokens.len() as f64;
        });
        self.inner.prefill(slot, tokens, pos, last, counts)
    }

    fn decode(&mut self, batch: &[DecodeItem], next: &mut Vec<Token>, picks: &mut StepPicks) -> Result<(), RunError> {
        self.inner.decode(batch, next, picks)?;
        let distinct = picks.distinct();
        let mean = f64::from(distinct.iter().sum::<u32>()) / distinct.len() as f64;
        self.add(|spent| {
            (spent.n_batch, spent.n_distinct) = (batch.len(), mean);
            spent.micros += COSTS.decode + COSTS.expert * mean + COSTS.sequence * batch.len() as f64;
        });
        Ok(())
    }

    fn export(&mut self, slot: Slot) -> Result<SeqState, RunError> {
        let state = self.inner.export(slot)?;
        self.moved(state.n_tokens);
        Ok(state)
    }

    fn import(&mut self, slot: Slot, state: &SeqState) -> Result<(), RunError> {
        self.moved(state.n_tokens);
        self.inner.import(slot, state)
    }

    fn copy_prefix(&mut self, from: Slot, to: Slot, n_tokens: u32) -> Result<(), RunError> {
        self.moved(n_tokens);
        self.inner.copy_prefix(from, to, n_tokens)
    }
}

struct Worker<S> {
    scheduler: S,
    runner: Meter,
    spent: Arc<Mutex<Spent>>,
    busy: bool,
}

impl<S> Worker<S> {
    fn new(scheduler: S, runner: Box<dyn ModelRunner>) -> Self {
        let spent = Arc::new(Mutex::new(Spent::default()));
        Self { scheduler, runner: Meter { inner: runner, spent: Arc::clone(&spent) }, spent, busy: false }
    }

    fn take_spent(&self) -> Spent {
        std::mem::take(&mut self.spent.lock().expect("one thread"))
    }
}

/// A chat: what its user says, turn by turn, and what has been said so far.
struct Chat {
    domain: String,
    questions: Vec<Vec<Token>>,
    said: Vec<Token>,
}

struct Turn {
    begun: Duration,
    first: Option<Duration>,
    ended: Duration,
    prompt: Vec<Token>,
    output: Vec<Token>,
}

/// What a run came to.
#[derive(Default)]
struct Ran {
    n_prompt: u64,
    n_prefilled: u64,
    /// Milliseconds, of first turns and of later ones.
    ttft: [f64; 2],
    tpot: f64,
    batch: f64,
    distinct: f64,
    outputs: Vec<Vec<Token>>,
    cache: CacheStats,
}

enum Happening {
    Begin(usize, usize),
    Done(Source, Vec<WorkerEvent>),
}

struct Run<'a> {
    dispatcher: Dispatcher,
    prefill: Vec<Worker<PrefillWorker>>,
    decode: Vec<Worker<DecodeWorker>>,
    chats: Vec<Chat>,
    turns: BTreeMap<RequestId, Turn>,
    pending: BinaryHeap<Reverse<(Duration, usize)>>,
    happenings: Vec<Option<Happening>>,
    now: Duration,
    spent: Spent,
    /// Sequences and distinct experts, summed over decode steps.
    steps: (usize, usize, f64),
    model: &'a LoadedModel,
}

fn config(policy: PolicyKind, cache: bool, exact: bool, answers: bool) -> EngineConfig {
    EngineConfig {
        prefill: WorkerList::best(4),
        decode: WorkerList::best(4),
        n_slots: 16,
        n_ctx_slot: 1024,
        chunk: 32,
        n_threads: 1,
        exact,
        prefix_cache: if cache { PrefixBudget::Slots } else { PrefixBudget::Off },
        cache_answers: answers,
        policy,
        ..EngineConfig::default()
    }
}

impl<'a> Run<'a> {
    fn new(model: &'a LoadedModel, config: &EngineConfig, chats: Vec<Chat>) -> Self {
        let layers = model.usable_layers();
        let n_expert = model.moe_shape().expect("a model with experts").n_expert;
        let (prefix, chunk, eog) = (model.prefix(config), model.chunk(config), model.tokenizer().end_tokens().to_vec());
        let answers = prefix.answers.then(|| Answers { layers: layers.clone().into(), n_expert, block: prefix.block });
        let prefill = model.prefill_workers(config, &layers).expect("workers").into_iter();
        let prefill: Vec<_> = prefill
            .map(|EngineWorker { runner, .. }| {
                let scheduler = PrefillWorker::new(runner.info(), chunk, N_PREFILL_PARALLEL, &eog, n_expert);
                Worker::new(scheduler.caching(prefix, runner.info(), n_expert), runner)
            })
            .collect();
        let decode = model.decode_workers(config, 1).expect("workers").into_iter();
        let decode: Vec<_> = decode
            .map(|EngineWorker { runner, .. }| {
                Worker::new(DecodeWorker::new(runner.info(), chunk, &eog).returning(answers.clone()), runner)
            })
            .collect();
        let n_slots = vec![config.n_slots; decode.len()];
        let policy = model.policy(config, None).expect("a policy");
        let limits = DispatchLimits { max_queue: 4096, ..config.limits };
        let dispatcher = Dispatcher::new(prefill.len(), &n_slots, policy, None, limits);
        let dispatcher = dispatcher.caching(prefix, ModelRunner::info(&prefill[0].runner));
        let mut run = Self {
            dispatcher,
            prefill,
            decode,
            chats,
            turns: BTreeMap::new(),
            pending: BinaryHeap::new(),
            happenings: Vec::new(),
            now: Duration::ZERO,
            spent: Spent::default(),
            steps: (0, 0, 0.0),
            model,
        };
        for chat in 0..run.chats.len() {
            for turn in 0..N_TURNS {
                run.at(NEXT_CHAT * chat as u32 + TURN * turn as u32, Happening::Begin(chat, turn));
            }
        }
        run
    }

    fn at(&mut self, at: Duration, happening: Happening) {
        self.pending.push(Reverse((at, self.happenings.len())));
        self.happenings.push(Some(happening));
    }

    fn run(mut self) -> Ran {
        while let Some(Reverse((at, number))) = self.pending.pop() {
            self.now = at;
            let mut commands = Vec::new();
            match self.happenings[number].take().expect("once") {
                Happening::Begin(chat, turn) => self.begin(chat, turn, &mut commands),
                Happening::Done(source, events) => {
                    match source {
                        Source::Prefill(worker) => self.prefill[worker.index()].busy = false,
                        Source::Decode(worker) => self.decode[worker.index()].busy = false,
                    }
                    for event in events {
                        if let WorkerEvent::Token { id, token, .. } = event {
                            let turn = self.turns.get_mut(&id).expect("begun");
                            turn.first.get_or_insert(at);
                            turn.output.push(token);
                        }
                        self.dispatcher.on_event(source, event, &mut commands);
                    }
                }
            }
            self.carry_out(commands);
            self.start_steps();
        }
        self.sum_up()
    }

    /// A chat's next turn: all that was said, the answer included, and the next question.
    fn begin(&mut self, chat: usize, turn: usize, commands: &mut Vec<Command>) {
        let id = RequestId((turn * self.chats.len() + chat) as u64);
        if turn > 0 {
            let before = &self.turns[&RequestId(((turn - 1) * self.chats.len() + chat) as u64)];
            assert_eq!(before.output.len(), N_OUTPUT as usize, "turn {turn} of chat {chat} begins too early");
            self.chats[chat].said.extend(&before.output);
        }
        let chat = &mut self.chats[chat];
        chat.said.extend(&chat.questions[turn]);
        let request = Request {
            prompt: chat.said.clone(),
            max_tokens: N_OUTPUT,
            sampling: SamplingParams { ignore_eos: true, ..SamplingParams::default() },
            domain: Some(chat.domain.clone()),
            deadline: None,
        };
        let (begun, prompt) = (self.now, chat.said.clone());
        self.turns.insert(id, Turn { begun, first: None, ended: begun, prompt, output: Vec::new() });
        self.dispatcher.submit(id, Arc::new(request), begun, commands).expect("room in the queue");
    }

    fn carry_out(&mut self, commands: Vec<Command>) {
        for command in commands {
            match command {
                Command::Prefill(worker, job) => self.prefill[worker.index()].scheduler.admit(job),
                Command::Decode(worker, handoff, _) => self.decode[worker.index()].scheduler.admit(handoff),
                Command::Keep(worker, left) => self.prefill[worker.index()].scheduler.take_in(left),
                Command::Cancel(..) | Command::Migrate(..) => panic!("nobody cancels or moves"),
                Command::End(id, outcome) => {
                    assert!(matches!(outcome, Outcome::Finished(FinishReason::Length, _)), "{outcome:?}");
                    self.turns.get_mut(&id).expect("begun").ended = self.now;
                }
            }
        }
    }

    fn start_steps(&mut self) {
        for index in 0..self.prefill.len() {
            let worker = &mut self.prefill[index];
            if !worker.busy && !worker.scheduler.is_idle() {
                let mut events = Vec::new();
                worker.busy = true;
                worker.scheduler.step(&mut worker.runner, &mut events);
                let spent = worker.take_spent();
                self.spent.n_prefilled += spent.n_prefilled;
                self.started(Source::Prefill(WorkerId(index as u32)), &spent, events);
            }
        }
        for index in 0..self.decode.len() {
            let worker = &mut self.decode[index];
            if !worker.busy && !worker.scheduler.is_idle() {
                let mut events = Vec::new();
                worker.busy = true;
                worker.scheduler.step(&mut worker.runner, &mut events);
                let spent = worker.take_spent();
                let (n_steps, n_batch, n_distinct) = self.steps;
                if spent.n_batch > 0 {
                    self.steps = (n_steps + 1, n_batch + spent.n_batch, n_distinct + spent.n_distinct);
                }
                self.started(Source::Decode(WorkerId(index as u32)), &spent, events);
            }
        }
    }

    fn started(&mut self, source: Source, spent: &Spent, events: Vec<WorkerEvent>) {
        let took = Duration::from_secs_f64(spent.micros / 1e6);
        self.at(self.now + took, Happening::Done(source, events));
    }

    fn sum_up(self) -> Ran {
        let n_chats = self.chats.len() as u64;
        let n_turns = self.turns.len() as f64;
        let (n_steps, n_batch, n_distinct) = self.steps;
        let mut ran = Ran {
            n_prefilled: self.spent.n_prefilled,
            batch: n_batch as f64 / n_steps as f64,
            distinct: n_distinct / n_steps as f64,
            cache: self.dispatcher.cache_stats(),
            ..Ran::default()
        };
        for (id, turn) in &self.turns {
            let first = turn.first.expect("answered");
            let ms = |time: Duration| time.as_secs_f64() * 1e3;
            let later = usize::from(id.0 >= n_chats);
            let n_alike = if later == 0 { n_chats as f64 } else { n_turns - n_chats as f64 };
            ran.ttft[later] += ms(first.saturating_sub(turn.begun)) / n_alike;
            ran.tpot += ms(turn.ended.saturating_sub(first)) / f64::from(N_OUTPUT - 1) / n_turns;
            ran.n_prompt += turn.prompt.len() as u64;
            ran.outputs.push(turn.output.clone());
        }
        assert!(self.model.moe_shape().is_some());
        ran
    }
}

/// `n` chats, as many of each domain, in an order that no policy knows.
fn chats(model: &LoadedModel, workload: &str, n: usize) -> Vec<Chat> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("examples/data/{workload}.serve.jsonl"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut domains: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for line in text.lines() {
        let item: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let field = |name: &str| item[name].as_str().expect("a text").to_owned();
        domains.entry(field("domain")).or_default().push(field("prompt"));
    }
    let tokenizer = model.tokenizer();
    let chat = |index: usize| {
        let (domain, texts) = domains.iter().nth(index % domains.len()).expect("a domain");
        let question = |turn: usize| {
            let question: String =
                texts[(index / domains.len() * N_TURNS + turn) % texts.len()].chars().take(N_QUESTION).collect();
            let system: String = texts[texts.len() - 1].chars().take(if turn == 0 { N_SYSTEM } else { 0 }).collect();
            tokenizer.tokenize(&format!("{system}\nUser: {question}\nAnswer:")).expect("tokens")
        };
        Chat { domain: domain.clone(), questions: (0..N_TURNS).map(question).collect(), said: Vec::new() }
    };
    let order: BTreeMap<u64, usize> = (0..n).map(|index| (mix(index as u64), index)).collect();
    order.into_values().map(chat).collect()
}

fn change(from: f64, to: f64) -> f64 {
    100.0 * (to - from) / from
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let workload = arguments.first().map_or("task", String::as_str);
    let n_chats = arguments.get(1).map_or(64, |n| n.parse().expect("a number of chats"));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/tiny-moe-64x4.gguf");
    let (even, alike) = (PolicyKind::RoundRobin, PolicyKind::MarginalCost);
    let model = LoadedModel::load(&path, &config(even, true, true, false)).expect("the shipped model");
    let run = |policy, cache, exact, answers| {
        let config = config(policy, cache, exact, answers);
        let ran = Run::new(&model, &config, chats(&model, workload, n_chats)).run();
        let name = match (cache, answers) {
            (false, _) => "off",
            (true, false) => "on",
            (true, true) => "on, answers",
        };
        println!(
            "{:<14} {name:<12} {:<6} {:>9} {:>10} {:>8.1} {:>8.1} {:>8.2} {:>7.2} {:>9.2} {:>9}",
            policy.name(),
            if exact { "yes" } else { "no" },
            ran.n_prompt,
            ran.n_prefilled,
            ran.ttft[0],
            ran.ttft[1],
            ran.tpot,
            ran.batch,
            ran.distinct,
            ran.cache.n_returned,
        );
        ran
    };
    println!(
        "{workload}: {n_chats} chats of {N_TURNS} turns, {N_OUTPUT} tokens an answer; 4 prefill and 4 decode workers of 16 \
         slots; times in ms of the modelled device"
    );
    println!(
        "{:<14} {:<12} {:<6} {:>9} {:>10} {:>8} {:>8} {:>8} {:>7} {:>9} {:>9}",
        "policy",
        "prefix cache",
        "exact",
        "prompt",
        "prefilled",
        "TTFT 1",
        "TTFT 2-4",
        "TPOT",
        "batch",
        "distinct",
        "returned"
    );
    let [off, on] = [false, true].map(|cache| [even, alike].map(|policy| run(policy, cache, true, false)));
    let free = run(alike, true, false, false);
    let answers = run(alike, true, false, true);
    for ran in off.iter().chain(&on) {
        assert!(ran.outputs == off[0].outputs, "an exact run answered otherwise");
    }
    let gain = |runs: &[Ran; 2]| (change(runs[0].tpot, runs[1].tpot), change(runs[0].distinct, runs[1].distinct));
    println!(
        "\nThe cache: TPOT {:+.1} % ({} {:+.1} %), batch {:+.1} %, tokens prefilled {:+.1} %, TTFT of later turns {:+.1} %.",
        change(off[1].tpot, on[1].tpot),
        even.name(),
        change(off[0].tpot, on[0].tpot),
        change(off[1].batch, on[1].batch),
        change(off[1].n_prefilled as f64, on[1].n_prefilled as f64),
        change(off[1].ttft[1], on[1].ttft[1]),
    );
    println!(
        "{} against {}: TPOT {:+.1} %, distinct experts {:+.1} % without the cache; {:+.1} %, {:+.1} % with it. Every answer is the \
         same.",
        alike.name(),
        even.name(),
        gain(&off).0,
        gain(&off).1,
        gain(&on).0,
        gain(&on).1,
    );
    println!(
        "Answers that come back, not exact: tokens prefilled {:+.1} %, TTFT of later turns {:+.1} %, TPOT {:+.1} %.",
        change(free.n_prefilled as f64, answers.n_prefilled as f64),
        change(free.ttft[1], answers.ttft[1]),
        change(free.tpot, answers.tpot),
    );
}
