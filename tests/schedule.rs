//! The dispatcher and the workers together, over the fake runner: whatever fails, every accepted request ends exactly
//! once, with the text an undisturbed run would have given.
#![allow(clippy::unwrap_used)]

#[path = "schedule/migration.rs"]
mod migration;
#[path = "schedule/restless.rs"]
mod restless;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use eldr::{
    rng::Rng,
    route::{LeastLoaded, RoutePolicy},
    schedule::{
        Answers, Command, DecodeStep, DecodeWorker, DispatchLimits, Dispatcher, FakeModel, FakeRunner, Fault, Job,
        Leftover, Outcome, PrefillWorker, Priority, Source, WorkerEvent,
    },
    signature::ExpertCounts,
    types::{FinishReason, Request, RequestId, SamplingParams, Token, Usage, WorkerId},
};
use proptest::prelude::*;

const MODEL: FakeModel = FakeModel { n_vocab: 23, n_layer: 3, n_expert: 8, n_expert_used: 2 };
const CHUNK: u32 = 8;

struct World {
    replays: bool,
    dispatcher: Dispatcher,
    prefill: Vec<(PrefillWorker, FakeRunner)>,
    decode: Vec<(DecodeWorker, FakeRunner)>,
    commands: Vec<Command>,
    tokens: BTreeMap<RequestId, Vec<Token>>,
    ends: BTreeMap<RequestId, Outcome>,
    n_decode_steps: u64,
}

impl World {
    fn new(replays: bool, n_prefill: usize, slots: &[u32], faults: &[(Source, Fault)], limits: DispatchLimits) -> Self {
        Self::routed(Box::new(LeastLoaded), replays, n_prefill, slots, faults, limits)
    }

    fn routed(
        policy: Box<dyn RoutePolicy>,
        replays: bool,
        n_prefill: usize,
        slots: &[u32],
        faults: &[(Source, Fault)],
        limits: DispatchLimits,
    ) -> Self {
        let faults_of = |source: Source| faults.iter().filter(|f| f.0 == source).map(|f| f.1.clone()).collect();
        let prefill = (0..n_prefill).map(|i| {
            let runner = runner(replays, 4, faults_of(Source::Prefill(WorkerId(i as u32))));
            (PrefillWorker::new(runner_info(&runner), CHUNK, 2, &[0], MODEL.n_expert), runner)
        });
        let decode = slots.iter().enumerate().map(|(i, &n)| {
            let runner = runner(replays, n, faults_of(Source::Decode(WorkerId(i as u32))));
            (DecodeWorker::new(runner_info(&runner), CHUNK, &[0]), runner)
        });
        Self {
            replays,
            dispatcher: Dispatcher::new(n_prefill, slots, policy, None, limits),
            prefill: prefill.collect(),
            decode: decode.collect(),
            commands: Vec::new(),
            tokens: BTreeMap::new(),
            ends: BTreeMap::new(),
            n_decode_steps: 0,
        }
    }

    fn submit(&mut self, id: u64, request: Request) -> bool {
        let id = RequestId(id);
        let accepted = self.dispatcher.submit(id, Arc::new(request), Duration::ZERO, &mut self.commands).is_ok();
        if accepted {
            self.tokens.insert(id, Vec::new());
        }
        self.carry_out();
        accepted
    }

    fn cancel(&mut self, id: u64) {
        self.dispatcher.cancel(RequestId(id), FinishReason::Cancelled, &mut self.commands);
        self.carry_out();
    }

    /// One step of one worker, chosen by `pick`.
    fn step(&mut self, pick: usize) {
        let mut events = Vec::new();
        let n = self.prefill.len() + self.decode.len();
        let source = if pick % n < self.prefill.len() {
            let index = pick % n;
            let (worker, runner) = &mut self.prefill[index];
            worker.step(runner, &mut events);
            Source::Prefill(WorkerId(index as u32))
        } else {
            let index = pick % n - self.prefill.len();
            let (worker, runner) = &mut self.decode[index];
            worker.step(runner, &mut events);
            Source::Decode(WorkerId(index as u32))
        };
        for event in events {
            if let WorkerEvent::Token { id, token, .. } = event {
                self.tokens.get_mut(&id).unwrap().push(token);
            }
            self.dispatcher.on_event(source, event, &mut self.commands);
            self.dispatcher.check_integrity();
            self.carry_out();
        }
        if matches!(source, Source::Decode(_)) {
            self.n_decode_steps += 1;
            self.dispatcher.rebalance(Duration::ZERO, &mut self.commands);
            self.carry_out();
        }
    }

    /// Drains, resumes or adds a decode worker, chosen by `pick`; refusals change nothing.
    fn regroup(&mut self, pick: usize, n_slots: u32) {
        let worker = WorkerId((pick / 3 % self.decode.len()) as u32);
        match pick % 3 {
            0 => drop(self.dispatcher.drain_decode(worker)),
            1 => drop(self.dispatcher.resume_decode(worker, &mut self.commands)),
            _ => {
                let runner = runner(self.replays, n_slots, Vec::new());
                self.decode.push((DecodeWorker::new(runner_info(&runner), CHUNK, &[0]), runner));
                let id = self.dispatcher.add_decode(n_slots);
                assert_eq!(id.index() + 1, self.decode.len());
                self.dispatcher.resume_decode(id, &mut self.commands).unwrap();
            }
        }
        self.carry_out();
    }

    fn carry_out(&mut self) {
        for command in std::mem::take(&mut self.commands) {
            match command {
                Command::Prefill(worker, job) => self.prefill[worker.index()].0.admit(job),
                Command::Migrate(worker, id) => self.decode[worker.index()].0.migrate(id),
                Command::Keep(worker, left) => self.prefill[worker.index()].0.take_in(left),
                Command::Decode(worker, handoff, _) => self.decode[worker.index()].0.admit(handoff),
                Command::Cancel(Source::Prefill(worker), id, why) => self.prefill[worker.index()].0.cancel(id, why),
                Command::Cancel(Source::Decode(worker), id, why) => self.decode[worker.index()].0.cancel(id, why),
                Command::End(id, outcome) => {
                    assert!(self.ends.insert(id, outcome).is_none(), "request {id} ended twice");
                }
            }
        }
        self.dispatcher.check_integrity();
    }

    fn drain(&mut self) {
        let n = self.prefill.len() + self.decode.len();
        for round in 0.. {
            if self.dispatcher.n_active() == 0 {
                return;
            }
            assert!(round < 10_000, "{} requests never end", self.dispatcher.n_active());
            (0..n).for_each(|worker| self.step(worker));
        }
    }
}

/// With `replays`, a runner whose text tells how each token was computed.
fn runner(replays: bool, n_slots: u32, faults: Vec<Fault>) -> FakeRunner {
    let runner = FakeRunner::new(MODEL, n_slots, 64, faults);
    if replays { runner.path_dependent(true) } else { runner }
}

fn runner_info(runner: &FakeRunner) -> &eldr::schedule::RunnerInfo {
    use eldr::schedule::ModelRunner as _;
    runner.info()
}

fn request(rng: &mut Rng) -> Request {
    let prompt = (0..=rng.below(40)).map(|_| Token::try_from(1 + rng.below(22)).unwrap()).collect();
    Request {
        prompt,
        max_tokens: 1 + rng.below(20) as u32,
        sampling: SamplingParams { seed: rng.next_u64(), ..SamplingParams::default() },
        domain: None,
        deadline: None,
    }
}

/// What the request's stream must be: the model's text, cut where the slot is full.
fn expected(request: &Request, replays: bool) -> Vec<Token> {
    let room = 64 + 1 - request.prompt.len() as u32;
    let complete = if replays { FakeModel::complete_by_path } else { FakeModel::complete };
    complete(&MODEL, &request.prompt, &request.sampling, request.max_tokens.min(room))
}

fn fault(kind: usize, at: u64) -> Fault {
    match kind {
        0 => Fault::DecodeRestored(at),
        1 => Fault::DecodeFatal(at),
        2 => Fault::PrefillRestored(at),
        3 => Fault::PrefillFatal(at),
        4 => Fault::ImportRestored(at),
        _ => Fault::ExportRestored(at),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_request_ends_once_with_the_undisturbed_text(
        seed in any::<u64>(),
        replays in any::<bool>(),
        n_prefill in 1usize..3,
        slots in prop::collection::vec(1u32..5, 1..4),
        faults in prop::collection::vec((0usize..6, 0u64..30, 0u32..4), 0..5),
        n_requests in 1u64..25,
        cancels in prop::collection::vec(0u64..25, 0..4),
        regroups in prop::collection::vec((0u64..25, any::<usize>(), 1u32..4), 0..6),
    ) {
        let faults = on_every_worker(faults);
        let limits = DispatchLimits { max_queue: 64, ..Default::default() };
        let mut world = World::new(replays, n_prefill, &slots, &faults, limits);
        let requests = disturb(&mut world, seed, n_requests, &cancels, &regroups);
        check(&world, &requests, &faults);
    }
}

fn on_every_worker(faults: Vec<(usize, u64, u32)>) -> Vec<(Source, Fault)> {
    let both = |(kind, at, worker)| {
        let fault = fault(kind, at);
        [(Source::Decode(WorkerId(worker)), fault.clone()), (Source::Prefill(WorkerId(worker)), fault)]
    };
    faults.into_iter().flat_map(both).collect()
}

/// Requests that come while workers step, are regrouped, and some requests are cancelled; until all have ended.
fn disturb(
    world: &mut World,
    seed: u64,
    n_requests: u64,
    cancels: &[u64],
    regroups: &[(u64, usize, u32)],
) -> BTreeMap<RequestId, Request> {
    let mut rng = Rng::new(seed);
    let mut requests = BTreeMap::new();
    for id in 0..n_requests {
        let request = request(&mut rng);
        assert!(world.submit(id, request.clone()));
        requests.insert(RequestId(id), request);
        for _ in 0..rng.below(6) {
            world.step(rng.below(64));
        }
        for &(_, pick, n_slots) in regroups.iter().filter(|regroup| regroup.0 == id) {
            world.regroup(pick, n_slots);
        }
        if cancels.contains(&id) {
            world.cancel(rng.below(id as usize + 1) as u64);
        }
    }
    world.drain();
    requests
}

/// Every request has ended once, and streamed what it would have alone.
fn check(world: &World, requests: &BTreeMap<RequestId, Request>, faults: &[(Source, Fault)]) {
    assert_eq!(world.ends.len(), requests.len());
    for (id, request) in requests {
        let (got, want) = (&world.tokens[id], expected(request, world.replays));
        match &world.ends[id] {
            Outcome::Finished(FinishReason::Stop | FinishReason::Length, usage) => {
                assert_eq!(got, &want);
                assert_eq!(usage.completion_tokens as usize, want.len());
                assert_eq!(usage.prompt_tokens as usize, request.prompt.len());
            }
            // A cancelled or failed request has streamed a prefix and nothing wrong.
            Outcome::Finished(..) | Outcome::Failed(_) => assert!(want.starts_with(got)),
        }
    }
    if faults.is_empty() {
        assert!(world.ends.values().all(|end| !matches!(end, Outcome::Failed(_))));
    }
    let breaks = |fault: &(Source, Fault)| matches!(fault.1, Fault::DecodeFatal(_) | Fault::DecodeRestored(_));
    for (worker, runner) in &world.decode {
        assert!(worker.is_idle());
        assert!(runner.n_open() == 0 || faults.iter().any(breaks));
    }
}

#[test]
fn a_lost_decode_worker_costs_no_token() {
    let faults = [(Source::Decode(WorkerId(0)), Fault::DecodeFatal(5))];
    let mut world = World::new(false, 1, &[4, 4], &faults, DispatchLimits::default());
    let mut rng = Rng::new(1);
    let requests: Vec<Request> = (0..12).map(|_| request(&mut rng)).collect();
    for (id, request) in requests.iter().enumerate() {
        assert!(world.submit(id as u64, request.clone()));
    }
    world.drain();
    for (id, request) in requests.iter().enumerate() {
        assert_eq!(world.tokens[&RequestId(id as u64)], expected(request, false));
    }
    assert_eq!(world.dispatcher.stats().n_workers_lost, 1);
    assert!(world.dispatcher.stats().n_retried > 0);
}

/// The texts of requests that lose two of three workers.
fn texts_of_losses(requests: &[Request], runner: impl Fn(u32, Vec<Fault>) -> FakeRunner) -> Vec<Vec<Token>> {
    let mut world = World::new(false, 1, &[4; 3], &[], DispatchLimits::default());
    world.prefill[0].1 = runner(4, Vec::new());
    for (place, fault) in
        world.decode.iter_mut().zip([Fault::DecodeFatal(5), Fault::DecodeFatal(9), Fault::DecodeRestored(3)])
    {
        let runner = runner(4, vec![fault]);
        *place = (DecodeWorker::new(runner_info(&runner), CHUNK, &[0]), runner);
    }
    world.prefill[0].0 = PrefillWorker::new(runner_info(&world.prefill[0].1), CHUNK, 2, &[0], MODEL.n_expert);
    for (id, request) in requests.iter().enumerate() {
        assert!(world.submit(id as u64, request.clone()));
    }
    world.drain();
    assert_eq!(world.dispatcher.stats().n_workers_lost, 2);
    world.tokens.into_values().collect()
}

#[test]
fn what_was_drawn_is_decoded_again_where_prefill_leaves_other_bits() {
    let mut rng = Rng::new(5);
    let long = |request: Request| {
        let sampling = SamplingParams { ignore_eos: true, ..request.sampling };
        Request { max_tokens: 20, sampling, ..request }
    };
    let requests: Vec<Request> = (0..12).map(|_| long(request(&mut rng))).collect();
    let undisturbed: Vec<Vec<Token>> = requests.iter().map(|request| expected(request, true)).collect();
    let texts =
        |replays| texts_of_losses(&requests, |n, faults| FakeRunner::new(MODEL, n, 64, faults).path_dependent(replays));
    assert_eq!(texts(true), undisturbed);
    assert_ne!(texts(false), undisturbed, "the fake model must tell the two apart");
}

/// A request that has drawn `generated`, from its prefill to its end: the tokens it draws, its steps, what it leaves.
fn finish(request: &Request, generated: &[Token], faults: Vec<Fault>) -> (Vec<Token>, Vec<DecodeStep>, Leftover) {
    let mut job = Job::new(RequestId(7), Arc::new(request.clone()));
    job.generated = generated.to_vec();
    let (mut prefiller, mut decoder) = (runner(true, 4, Vec::new()), runner(true, 4, faults));
    let mut prefill = PrefillWorker::new(runner_info(&prefiller), CHUNK, 2, &[0], MODEL.n_expert);
    let answers = Answers { layers: [0, 1, 2].into(), n_expert: MODEL.n_expert, block: 4 };
    let mut decode = DecodeWorker::new(runner_info(&decoder), CHUNK, &[0]).returning(Some(answers));
    let (mut tokens, mut steps, mut left) = (Vec::new(), Vec::new(), None);
    prefill.admit(job);
    loop {
        let mut events = Vec::new();
        if prefill.is_idle() {
            steps.push(decode.step(&mut decoder, &mut events).clone());
        } else {
            prefill.step(&mut prefiller, &mut events);
        }
        for event in events {
            match event {
                WorkerEvent::Token { token, .. } => tokens.push(token),
                WorkerEvent::Prefilled(handoff) => {
                    assert_eq!(handoff.state.n_tokens as usize, request.prompt.len());
                    assert_eq!(handoff.counts.as_ref().map(ExpertCounts::n_tokens), Some(handoff.state.n_tokens));
                    decode.admit(handoff);
                }
                WorkerEvent::Left(leftover) => left = Some(leftover),
                WorkerEvent::Finished { usage, .. } => {
                    assert_eq!(usage.completion_tokens, request.max_tokens);
                    return (tokens, steps, left.expect("an answer of several blocks"));
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn a_replay_draws_nothing_and_leaves_what_an_undisturbed_request_leaves() {
    let sampling = SamplingParams { seed: 3, ignore_eos: true, ..SamplingParams::default() };
    let prompt = (1..=21).collect();
    let request = Request { prompt, max_tokens: 15, sampling, domain: None, deadline: None };
    let (text, undisturbed, left) = finish(&request, &[], Vec::new());
    assert_eq!(text, expected(&request, true));
    assert!(left.counts.is_some() && undisturbed.iter().all(|step| step.n_replayed == 0));
    for (n, faults) in [(1, vec![]), (2, vec![]), (6, vec![]), (14, vec![]), (6, vec![Fault::ImportRestored(0)])] {
        let broken = !faults.is_empty();
        let (rest, steps, moved) = finish(&request, &text[..n], faults);
        assert_eq!(rest, text[n..], "{n} drawn");
        assert_eq!((moved.tokens, moved.state, moved.n_base), (left.tokens.clone(), left.state.clone(), left.n_base));
        assert_eq!(moved.counts, left.counts, "{n} drawn");
        let ran: Vec<&DecodeStep> = steps.iter().filter(|step| !step.requests.is_empty()).collect();
        assert_eq!(ran.len(), undisturbed.len(), "{n} drawn");
        for (at, (step, was)) in ran.iter().zip(&undisturbed).enumerate() {
            assert_eq!((&step.requests, &step.at, &step.picks), (&was.requests, &was.at, &was.picks));
            assert_eq!((step.at[0] as usize, step.n_replayed), (at, u32::from(at + 1 < n)));
        }
        assert_eq!(steps.len() > ran.len(), broken, "a chunk a step where the hand-off failed");
    }
}

#[test]
fn when_the_last_decode_worker_is_lost_every_request_is_told() {
    let faults = [(Source::Decode(WorkerId(0)), Fault::DecodeFatal(2))];
    let mut world = World::new(false, 1, &[2], &faults, DispatchLimits::default());
    let mut rng = Rng::new(2);
    for id in 0..6 {
        let long = Request { max_tokens: 20, ..request(&mut rng) };
        let sampling = SamplingParams { ignore_eos: true, ..long.sampling };
        assert!(world.submit(id, Request { sampling, ..long }));
    }
    world.drain();
    let failed = world.ends.values().filter(|end| matches!(end, Outcome::Failed(why) if why.contains("decode worker")));
    assert_eq!(failed.count(), 6);
}

#[test]
fn a_full_queue_refuses_and_loses_nothing() {
    let limits = DispatchLimits { max_queue: 2, max_prefill: 1, max_handoffs: 0, ..DispatchLimits::default() };
    let mut world = World::new(false, 1, &[1], &[], limits);
    let mut rng = Rng::new(3);
    let accepted: Vec<bool> = (0..6).map(|id| world.submit(id, request(&mut rng))).collect();
    assert_eq!(accepted, [true, true, true, false, false, false]);
    world.drain();
    assert_eq!(world.ends.len(), 3);
}

#[test]
fn a_deadline_ends_a_request_wherever_it_is() {
    let mut world = World::new(false, 1, &[1], &[], DispatchLimits::default());
    let mut rng = Rng::new(4);
    for id in 0..5 {
        let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::default() };
        let deadline = Some(Duration::from_secs(id + 1));
        assert!(world.submit(id, Request { sampling, deadline, max_tokens: 20, ..request(&mut rng) }));
    }
    (0..7).for_each(|pick| world.step(pick));
    assert_eq!(world.dispatcher.next_deadline(), Some(Duration::from_secs(1)));
    world.dispatcher.expire(Duration::from_secs(3), &mut world.commands);
    world.carry_out();
    world.drain();
    let late = |id: u64| matches!(world.ends[&RequestId(id)], Outcome::Finished(FinishReason::Deadline, _));
    assert_eq!([late(0), late(1), late(2), late(3), late(4)], [true, true, true, false, false]);
}

#[test]
fn requests_of_high_priority_are_prefilled_first_and_starve_nobody() {
    let limits = DispatchLimits { max_prefill: 1, ..DispatchLimits::default() };
    let mut dispatcher = Dispatcher::new(1, &[4], Box::new(LeastLoaded), None, limits);
    let mut commands = Vec::new();
    let sampling = SamplingParams::default();
    let request = Arc::new(Request { prompt: vec![1, 2], max_tokens: 1, sampling, domain: None, deadline: None });
    for id in 0..12 {
        let priority = if id < 4 { Priority::Normal } else { Priority::High };
        dispatcher.submit_as(priority, RequestId(id), Arc::clone(&request), Duration::ZERO, &mut commands).unwrap();
    }
    let mut order = Vec::new();
    while let Some(command) = commands.pop() {
        let Command::Prefill(worker, job) = command else { continue };
        order.push(job.id.0);
        let event = WorkerEvent::Finished { id: job.id, reason: FinishReason::Length, usage: Usage::default() };
        dispatcher.on_event(Source::Prefill(worker), event, &mut commands);
        dispatcher.check_integrity();
    }
    // The first found the worker free.
    assert_eq!(order, [0, 4, 5, 1, 6, 7, 8, 2, 9, 10, 11, 3]);
}
