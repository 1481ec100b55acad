//! Which prefill worker a chat's next turn should go to: the one that is done with it first (ours), a consistent hash of
//! the prompt's first tokens with a load gate (the rule of the paper's artifact), the least loaded one, and each in turn.
//!
//! A simulation that counts tokens instead of seconds: a prefill worker runs a token a tick, over the engine's own
//! scheduler, ledger and eviction. Everything is seeded: the numbers are the same on every machine. Not timed.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::sync::Arc;

use eldr::{
    kv::{NameSet, names},
    rng::{Rng, mix},
    schedule::{FakeModel, FakeRunner, Handoff, Job, ModelRunner, PrefillWorker, PrefixConfig, WorkerEvent},
    types::{Request, RequestId, SamplingParams, Token},
};

const MODEL: FakeModel = FakeModel { n_vocab: 30_000, n_layer: 1, n_expert: 0, n_expert_used: 0 };
const N_WORKERS: usize = 4;
const N_SLOTS: u32 = 16;
const CHUNK: u32 = 512;
/// Tokens whose hash chooses: the artifact takes 1,024 bytes.
const N_HASHED: usize = 256;
/// A worker above so many times the mean load is passed over.
const GATE: f64 = 1.25;

#[derive(Debug, Clone, Copy)]
enum Rule {
    DoneFirst,
    Hash,
    LeastLoaded,
    InTurn,
}

/// Chats that begin with one of a few system prompts, some far more popular than others.
struct Workload {
    /// When, and which tokens.
    prompts: Vec<(u64, Vec<Token>)>,
}

impl Workload {
    fn new(n_systems: usize, n_chats: usize, n_turns: usize, gap: u64, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut text =
            |n: usize| -> Vec<Token> { (0..n).map(|_| Token::try_from(1 + rng.below(29_000)).unwrap()).collect() };
        let systems: Vec<_> = (0..n_systems).map(|_| text(600)).collect();
        let mut prompts = Vec::new();
        for chat in 0..n_chats {
            // The first system prompt gets half of the chats, the second a quarter, and so on.
            let system = (mix(chat as u64 ^ seed).trailing_zeros() as usize).min(n_systems - 1);
            let mut said = systems[system].clone();
            for turn in 0..n_turns {
                said.extend(text(60 + (chat * 7 + turn * 13) % 90));
                let at = chat as u64 * gap + turn as u64 * 12_000 + mix((chat * 31 + turn) as u64) % 4_000;
                prompts.push((at, said.clone()));
                said.extend(text(120));
            }
        }
        prompts.sort_by_key(|(at, _)| *at);
        Self { prompts }
    }
}

struct Worker {
    runner: FakeRunner,
    scheduler: PrefillWorker,
    /// When it is done with what it has, in ticks.
    free_at: u64,
    held: NameSet,
}

/// What a rule came to.
#[derive(Debug)]
struct Result {
    n_computed: u64,
    mean_wait: f64,
    p99_wait: u64,
    imbalance: f64,
}

fn worker() -> Worker {
    let runner = FakeRunner::new(MODEL, N_SLOTS, 8192, Vec::new());
    let config = PrefixConfig { max_tokens: 20_000, ..PrefixConfig::default() };
    let scheduler = PrefillWorker::new(runner.info(), CHUNK, 4, &[], 0).caching(config, runner.info(), 0);
    Worker { runner, scheduler, free_at: 0, held: NameSet::default() }
}

/// Runs a prompt on a worker at once; how many of its tokens were computed.
fn run(worker: &mut Worker, id: u64, prompt: &[Token]) -> u64 {
    let request = Request {
        prompt: prompt.to_vec(),
        max_tokens: 2,
        sampling: SamplingParams { ignore_eos: true, ..SamplingParams::default() },
        domain: None,
        deadline: None,
    };
    worker.scheduler.admit(Job::new(RequestId(id), Arc::new(request)));
    let mut events = Vec::new();
    while !worker.scheduler.is_idle() {
        worker.scheduler.step(&mut worker.runner, &mut events);
    }
    let mut n_computed = 0;
    for event in events {
        match event {
            WorkerEvent::Prefilled(Handoff { job, .. }) => n_computed = prompt.len() as u64 - u64::from(job.n_cached),
            WorkerEvent::Cache(change) => {
                for (name, came) in change.blocks {
                    if came {
                        worker.held.insert(name);
                    } else {
                        worker.held.remove(&name);
                    }
                }
            }
            _ => {}
        }
    }
    n_computed
}

fn simulate(workload: &Workload, rule: Rule) -> Result {
    let mut workers: Vec<Worker> = (0..N_WORKERS).map(|_| worker()).collect();
    let root = workers[0].runner.info().root_name();
    let block = PrefixConfig::default().block;
    let (mut waits, mut n_computed, mut busy) = (Vec::new(), 0, vec![0u64; N_WORKERS]);
    for (id, (now, prompt)) in workload.prompts.iter().enumerate() {
        let left: Vec<u64> = workers.iter().map(|worker| worker.free_at.saturating_sub(*now)).collect();
        let blocks = names(root, block, prompt);
        let n_held = |worker: &Worker| {
            let n = blocks.iter().take_while(|name| worker.held.contains(name)).count();
            n as u64 * u64::from(block)
        };
        let chosen = match rule {
            Rule::DoneFirst => {
                let done = |&at: &usize| left[at] + prompt.len() as u64 - n_held(&workers[at]).min(prompt.len() as u64);
                (0..N_WORKERS).min_by_key(|at| (done(at), *at)).unwrap()
            }
            Rule::Hash => {
                // Highest random weight: a consistent hash without a ring.
                let hash =
                    prompt.iter().take(N_HASHED).fold(0, |hash, &token| mix(hash ^ u64::from(token.cast_unsigned())));
                let mut order: Vec<usize> = (0..N_WORKERS).collect();
                order.sort_by_key(|&at| std::cmp::Reverse(mix(hash ^ (at as u64 + 1))));
                let mean = left.iter().sum::<u64>() as f64 / N_WORKERS as f64;
                let fits = |&at: &usize| left[at] as f64 <= GATE * mean;
                order.iter().copied().find(fits).unwrap_or(order[0])
            }
            Rule::LeastLoaded => (0..N_WORKERS).min_by_key(|&at| (left[at], at)).unwrap(),
            Rule::InTurn => id % N_WORKERS,
        };
        let n = run(&mut workers[chosen], id as u64, prompt);
        workers[chosen].free_at = workers[chosen].free_at.max(*now) + n;
        waits.push(workers[chosen].free_at - now);
        busy[chosen] += n;
        n_computed += n;
    }
    waits.sort_unstable();
    Result {
        n_computed,
        mean_wait: waits.iter().sum::<u64>() as f64 / waits.len() as f64,
        p99_wait: waits[waits.len() * 99 / 100],
        imbalance: *busy.iter().max().unwrap() as f64 * N_WORKERS as f64 / busy.iter().sum::<u64>() as f64,
    }
}

fn main() {
    println!("{N_WORKERS} prefill workers of {N_SLOTS} slots and 20,000 cached tokens; times in tokens computed");
    for (n_systems, gap) in [(4, 900), (4, 700), (4, 600), (32, 900), (32, 700)] {
        let workload = Workload::new(n_systems, 600, 4, gap, 1);
        let n_prompt: usize = workload.prompts.iter().map(|(_, prompt)| prompt.len()).sum();
        println!("\n{n_systems} system prompts, a new chat every {gap} ticks, {n_prompt} prompt tokens");
        println!(
            "{:<12} {:>10} {:>8} {:>10} {:>9} {:>9}",
            "rule", "computed", "share", "mean TTFT", "p99 TTFT", "imbalance"
        );
        for rule in [Rule::DoneFirst, Rule::Hash, Rule::LeastLoaded, Rule::InTurn] {
            let Result { n_computed, mean_wait, p99_wait, imbalance } = simulate(&workload, rule);
            let share = 100.0 * n_computed as f64 / n_prompt as f64;
            let rule = format!("{rule:?}");
            println!("{rule:<12} {n_computed:>10} {share:>7.1}% {mean_wait:>10.0} {p99_wait:>9} {imbalance:>9.2}");
        }
    }
}
