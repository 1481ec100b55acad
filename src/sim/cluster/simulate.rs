use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap, HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use super::{
    ClusterReport, DeviceCost, Scenario,
    drawing::Coding,
    meter::{Meter, Totals},
    mix::{Draw, Mix},
    prompts::Prompts,
    runner::ClusterRunner,
    traffic::Traffic,
    world::{Due, Happening, Live, Run, Worker},
};
use crate::{
    calibrate::{Calibration, ExpertRanks},
    refit::Refitter,
    route::RoutePolicy,
    schedule::{DecodeWorker, DispatchLimits, Dispatcher, ModelRunner, PrefillWorker, PrefixConfig, Source},
    sim::{ReplaySet, SimError},
    trace::Trace,
    types::RequestId,
};

/// Prompts a prefill worker has open at once, as the engine's.
const N_PREFILL_PARALLEL: u32 = 4;

/// What is simulated: recorded requests, a device's costs, what a calibration says.
#[derive(Clone, Copy)]
pub struct Pool<'a> {
    /// The recording.
    pub trace: &'a Trace,
    /// The same, made ready.
    pub set: &'a ReplaySet,
    /// Which of its requests are served, by position; each has two tokens or more.
    pub served: &'a [usize],
    /// What steps take.
    pub cost: &'a DeviceCost,
    /// Turns counts into signatures.
    pub calibration: Option<&'a Arc<Calibration>>,
    /// Where each worker's experts are, for devices of several ranks; the workers take these in turn.
    pub ranks: &'a [Arc<ExpertRanks>],
    /// Policies are told the picks of the answer, which nobody knows yet, in place of the prompt's: a bound for what a better
    /// prediction could gain.
    pub clairvoyant: bool,
}

/// Runs `scenario` over `pool` under `policy`, whose centroids `refitter` moves if there is one.
///
/// Dispatcher, prefill and decode workers are the engine's own; a step takes what the cost says. Deterministic: ties in
/// time go in order of events.
///
/// # Errors
/// A scenario or a cost that makes no sense, and nothing to serve. Requests that nobody is left to serve fail.
pub fn simulate(
    pool: Pool<'_>,
    scenario: &Scenario,
    policy: Box<dyn RoutePolicy>,
    refitter: Option<Refitter>,
) -> Result<ClusterReport, SimError> {
    if let Some(problem) = scenario.problem(&domains(pool)) {
        return Err(SimError::Scenario(problem));
    }
    if let Some(problem) = pool.cost.problem() {
        return Err(SimError::DeviceCost(problem));
    }
    if let Some(&index) = pool.served.iter().find(|&&index| index >= pool.set.n_requests()) {
        return Err(SimError::NoSuchRequest { index, n_requests: pool.set.n_requests() });
    }
    if pool.served.is_empty() || pool.served.iter().any(|&index| pool.set.n_steps(index) == 0) {
        return Err(SimError::NoRequests);
    }
    Ok(Run::new(pool, scenario, policy, refitter).run())
}

/// The labels of the requests that are served, by name.
fn domains(pool: Pool<'_>) -> Vec<String> {
    let labels = pool.served.iter().filter_map(|&at| pool.trace.requests.get(at)?.domain.clone());
    labels.collect::<BTreeSet<_>>().into_iter().collect()
}

impl<'a> Run<'a> {
    fn new(pool: Pool<'a>, scenario: &'a Scenario, policy: Box<dyn RoutePolicy>, refitter: Option<Refitter>) -> Self {
        let n_slots = scenario.n_slots();
        let limits = DispatchLimits {
            max_queue: scenario.max_queue.map_or(usize::MAX, |n| n as usize),
            max_handoffs: scenario.max_handoffs as usize,
            age_bound: scenario.age_bound,
            migrate_every: scenario.migrate_every,
            ..DispatchLimits::default()
        };
        let requests = pool.trace.requests.len();
        let mix = Mix::new(scenario, (0..requests).map(|at| &*pool.set.get(at).request), pool.served);
        let prompts = Prompts::new(pool.trace, pool.set, scenario.prefix, |group| mix.prefix_source(group));
        let prompts = if pool.clairvoyant { prompts.telling_answers() } else { prompts };
        let cache_tokens = scenario.prefix.map_or(0, |prefix| prefix.cache_tokens);
        let config = PrefixConfig { max_tokens: cache_tokens, align: 1, ..PrefixConfig::default() };
        let runner = |n_slots, ranks| {
            ClusterRunner::new(pool.set, pool.cost, n_slots, scenario.chunk, prompts.n_prefix(), ranks)
        };
        // Slots of a prefill worker: those of the engine's, whose workers are all alike.
        let prefill_slots = n_slots.iter().copied().max().unwrap_or(1).max(N_PREFILL_PARALLEL);
        let prefill: Vec<_> = (0..scenario.n_prefill())
            .map(|_| {
                let runner = runner(prefill_slots, None);
                let info = runner.info();
                let scheduler = PrefillWorker::new(info, scenario.chunk, N_PREFILL_PARALLEL, &[], 0);
                Worker::new(scheduler.caching(config, info, 0), runner, 1.0)
            })
            .collect();
        let dispatcher = Dispatcher::new(prefill.len(), &n_slots, policy, pool.calibration.cloned(), limits);
        let dispatcher = dispatcher.caching(config, prefill[0].runner.info());
        let mut run = Self {
            pool,
            scenario,
            now: 0.0,
            dispatcher,
            prefill,
            decode: Vec::new(),
            pending: BinaryHeap::new(),
            n_events: 0,
            mix,
            traffic: Traffic::new(scenario),
            prompts,
            concurrency: concurrency(scenario),
            n_arrived: 0,
            n_submitted: 0,
            held: VecDeque::new(),
            live: HashMap::new(),
            n_refused: 0,
            meter: Meter::new(n_slots.len(), (scenario.requests as f64 * scenario.warmup) as u64),
            commands: Vec::new(),
            woken: Vec::new(),
            handoffs: (0.0, 0.0),
            refitter,
        };
        for group in &scenario.decode {
            (0..group.workers).for_each(|_| run.add_worker(group.slots, 1.0 / group.speed));
        }
        if run.refitter.is_some() {
            run.dispatcher.keep_signatures();
        }
        run
    }

    pub(super) fn add_worker(&mut self, n_slots: u32, slowness: f64) {
        let (pool, nth) = (self.pool, self.decode.len());
        let ranks = (!pool.ranks.is_empty()).then(|| Arc::clone(&pool.ranks[nth % pool.ranks.len()]));
        let (chunk, n_prefix) = (self.scenario.chunk, self.prompts.n_prefix());
        let runner = ClusterRunner::new(pool.set, pool.cost, n_slots, chunk, n_prefix, ranks);
        let runner = runner.tapped(self.dispatcher.feedback());
        let scheduler = DecodeWorker::new(runner.info(), chunk, &[]);
        self.decode.push(Worker::new(scheduler, runner, slowness));
    }

    fn run(mut self) -> ClusterReport {
        for event in &self.scenario.event {
            self.at(event.at, Happening::Planned(*event));
        }
        self.next_arrival();
        self.let_in();
        self.after_each();
        while let Some(Reverse(due)) = self.pending.pop() {
            let is_event = matches!(due.what, Happening::Planned(_));
            if is_event && self.n_arrived == self.scenario.requests && self.dispatcher.n_active() == 0 {
                break;
            }
            self.now = due.at;
            match due.what {
                Happening::Arrival => {
                    self.held.push_back(self.now);
                    self.next_arrival();
                }
                Happening::Done(Source::Prefill(worker)) => self.prefill_done(worker),
                Happening::Done(Source::Decode(worker)) => self.decode_done(worker),
                Happening::Planned(event) => self.happen(event),
            }
            self.after_each();
        }
        // Its dispatcher is not patient: without a worker that takes requests those that wait fail.
        assert_eq!(self.dispatcher.n_active(), 0, "requests are left at {} s, and nothing is to come", self.now);
        let stats = self.dispatcher.stats();
        let cache = self.dispatcher.cache_stats();
        let totals = Totals {
            policy: self.dispatcher.policy_name().to_owned(),
            n_layer: self.pool.set.n_layer(),
            n_workers: self.decode.len(),
            now: self.now,
            refused: self.n_refused,
            retried: stats.n_retried,
            lost: stats.n_workers_lost,
            migrated: stats.n_migrated,
            copies: self.mix.n_copies(),
            cached: cache.n_cached_tokens as f64 / (cache.n_prompt_tokens as f64).max(1.0),
        };
        self.meter.report(totals)
    }

    fn after_each(&mut self) {
        self.carry_out();
        self.let_in();
        self.refit();
        self.start_steps();
    }

    pub(super) fn at(&mut self, at: f64, what: Happening) {
        self.pending.push(Reverse(Due { at, number: self.n_events, what }));
        self.n_events += 1;
    }

    fn next_arrival(&mut self) {
        if self.n_arrived < self.scenario.requests
            && let Some(traffic) = &mut self.traffic
        {
            self.n_arrived += 1;
            let at = traffic.next();
            self.at(at, Happening::Arrival);
        }
    }

    /// Submits what has come, as long as there is room in the system.
    fn let_in(&mut self) {
        while self.dispatcher.n_active() < self.concurrency {
            let arrival = match (self.held.pop_front(), &self.traffic) {
                (Some(at), _) => at,
                (None, None) if self.n_arrived < self.scenario.requests => {
                    self.n_arrived += 1;
                    self.now
                }
                _ => return,
            };
            self.submit(arrival);
            self.carry_out();
        }
    }

    fn submit(&mut self, arrival: f64) {
        let serial = self.n_submitted;
        self.n_submitted += 1;
        let Draw { drawing, group } = self.mix.take(self.now);
        let token = Coding::new(self.pool.set.n_requests()).token(serial, drawing);
        let request = self.prompts.request(drawing.index, group, token);
        let id = RequestId(serial);
        let index = drawing.index;
        let now = Duration::from_secs_f64(self.now);
        if self.dispatcher.submit(id, request, now, &mut self.commands).is_err() {
            self.n_refused += 1;
            self.mix.give_back(index);
            return;
        }
        let live = Live { index, group, arrival, first_token: 0.0, admitted: None, measured: false };
        self.live.insert(id, live);
    }
}

/// Requests in the system at most.
fn concurrency(scenario: &Scenario) -> usize {
    let half = scenario.n_slots().iter().map(|&n| n as usize).sum::<usize>().div_ceil(2);
    let unbounded = if scenario.rate.is_some() { usize::MAX } else { half };
    scenario.concurrency.map_or(unbounded, |n| n as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        calibrate::{CalibrationInput, CalibrationParams, fit},
        route::{PolicyKind, PolicyParams},
        sim::{
            DecodeGroup, Event, Happens, PrefixSharing,
            cluster::cost::tests::cost,
            planted::{Planted, Pools},
        },
    };

    struct World {
        trace: Trace,
        set: ReplaySet,
        served: Vec<usize>,
        cost: DeviceCost,
        calibration: Arc<Calibration>,
    }

    impl World {
        fn new(planted: &Planted) -> Self {
            let trace = planted.trace();
            let n = trace.requests.len();
            let (fitted, served) = (0..n / 2, (n / 2..n).collect());
            let (calibration, _) =
                fit(&CalibrationInput::of_trace(&trace, fitted), &CalibrationParams::new(4)).expect("fits");
            Self { set: ReplaySet::new(&trace), trace, served, cost: cost(), calibration: Arc::new(calibration) }
        }

        fn run(&self, scenario: &Scenario, kind: PolicyKind) -> ClusterReport {
            let centroids = Some(Arc::new(self.calibration.centroids.clone()));
            let shape = Some(self.trace.header.shape.clone());
            let policy = kind.build(&PolicyParams { centroids, shape, ..PolicyParams::new(4) }).expect("valid");
            self.simulate(scenario, policy).expect("runs")
        }

        fn simulate(&self, scenario: &Scenario, policy: Box<dyn RoutePolicy>) -> Result<ClusterReport, SimError> {
            let pool = Pool {
                trace: &self.trace,
                set: &self.set,
                served: &self.served,
                cost: &self.cost,
                calibration: Some(&self.calibration),
                ranks: &[],
                clairvoyant: false,
            };
            simulate(pool, scenario, policy, None)
        }
    }

    fn four(scenario: Scenario) -> Scenario {
        Scenario { decode: vec![DecodeGroup { workers: 4, slots: 12, speed: 1.0 }], requests: 300, ..scenario }
    }

    #[test]
    fn one_request_at_a_time_takes_what_the_cost_says() {
        let world = World::new(&Planted { n_steps: (50, 50), ..Planted::default() });
        let scenario = Scenario { concurrency: Some(1), requests: 40, prefill: Some(1), ..four(Scenario::default()) };
        let report = world.run(&scenario, PolicyKind::RoundRobin);
        assert_eq!((report.finished, report.measured, report.failed), (40, 32, 0));
        // A prompt of 40 tokens; 3 experts in each of 4 layers; a context of 41 to 90 tokens; the first step takes 40 in.
        let ttft = 2.0 + 0.1 * 40.0;
        let tpot = 4.0 + 0.25 * 12.0 + 0.5 + 0.001 * 65.5 + (0.5 + 0.01 * 40.0) / 50.0;
        let (got_ttft, got_tpot) = (report.ttft_ms.expect("measured"), report.tpot_ms.expect("measured"));
        assert!((got_ttft.mean - ttft).abs() < 1e-6 && (got_ttft.p99 - ttft).abs() < 1e-6, "{got_ttft:?}");
        assert!((got_tpot.mean - tpot).abs() < 1e-6 && (got_tpot.p99 - tpot).abs() < 1e-6, "{got_tpot:?} for {tpot}");
        assert!((report.experts_per_step - 3.0).abs() < 1e-12 && (report.batch - 1.0).abs() < 1e-12);
        let time = 40.0 * (ttft + 50.0 * tpot) / 1e3;
        assert!((report.time_s - time).abs() < 1e-6, "{} for {time}", report.time_s);
    }

    #[test]
    fn the_same_seed_gives_the_same_bytes_and_another_one_others() {
        let world = World::new(&Planted::default());
        let scenario = Scenario { rate: Some(40.0), ..four(Scenario::default()) };
        let json = |seed, kind| {
            let scenario = Scenario { seed, ..scenario.clone() };
            serde_json::to_string(&world.run(&scenario, kind)).expect("json")
        };
        for kind in PolicyKind::ALL {
            assert_eq!(json(3, kind), json(3, kind), "{kind}");
        }
        assert_ne!(json(3, PolicyKind::LeastLoaded), json(4, PolicyKind::LeastLoaded));
    }

    #[test]
    fn locality_reads_fewer_experts_where_domains_differ_and_not_in_noise() {
        let reads = |pools, kind| {
            let world = World::new(&Planted { pools, ..Planted::default() });
            world.run(&four(Scenario::default()), kind).experts_per_token
        };
        let saved = |pools| reads(pools, PolicyKind::LocalityBand) / reads(pools, PolicyKind::RoundRobin);
        assert!(saved(Pools::Disjoint) < 0.8, "{}", saved(Pools::Disjoint));
        assert!((saved(Pools::Noise) - 1.0).abs() < 0.1, "{}", saved(Pools::Noise));
    }

    #[test]
    fn what_a_lost_worker_had_is_finished_by_the_others() {
        let world = World::new(&Planted::default());
        let at = |at, worker, what, by| Event { at, worker, what, by };
        let event =
            vec![at(0.5, 1, Happens::Fail, 1.0), at(0.8, 0, Happens::Join, 12.0), at(1.0, 4, Happens::Fail, 1.0)];
        let scenario = Scenario { event, ..four(Scenario::default()) };
        for kind in [PolicyKind::LeastLoaded, PolicyKind::MarginalCost] {
            let report = world.run(&scenario, kind);
            assert_eq!((report.finished, report.failed, report.lost, report.workers), (300, 0, 2, 5), "{kind}");
            assert!(report.retried > 4, "{report:?}");
        }
        // With nobody left all that comes fails.
        let event = (0..4).map(|worker| at(0.5, worker, Happens::Fail, 1.0)).collect();
        let report = world.run(&Scenario { event, ..four(Scenario::default()) }, PolicyKind::LeastLoaded);
        assert_eq!((report.finished + report.failed, report.lost), (300, 4));
        assert!(report.failed > 200, "{report:?}");
    }

    // Requests were said to wait for ever where every worker that is left is drained. They never did.
    #[test]
    fn with_the_only_worker_that_is_left_drained_all_that_comes_fails_until_it_is_resumed() {
        let world = World::new(&Planted::default());
        let at = |at, worker, what| Event { at, worker, what, by: 12.0 };
        let lost = (1..4).map(|worker| at(0.6, worker, Happens::Fail));
        let event: Vec<_> = [at(0.5, 0, Happens::Drain)].into_iter().chain(lost).collect();
        for policy in PolicyKind::ALL {
            let report = world.run(&four(Scenario { event: event.clone(), ..Scenario::default() }), policy);
            assert_eq!((report.finished + report.failed, report.lost), (300, 3), "{policy}");
            assert!(report.failed > 200 && report.finished > 0, "{report:?}");
        }
        let slow = four(Scenario { rate: Some(20.0), ..Scenario::default() });
        let failed = |more: Option<Event>| {
            let event = event.iter().copied().chain(more).collect();
            world.run(&Scenario { event, ..slow.clone() }, PolicyKind::LeastLoaded).failed
        };
        let (left, resumed, joined) =
            (failed(None), failed(Some(at(5.0, 0, Happens::Resume))), failed(Some(at(5.0, 0, Happens::Join))));
        assert!(left > 200 && resumed < 150 && joined < 150, "{left} {resumed} {joined}");
    }

    #[test]
    fn a_straggler_and_a_slower_device_slow_their_requests() {
        let world = World::new(&Planted::default());
        let p99 = |scenario: Scenario| {
            let report = world.run(&Scenario { warmup: 0.1, ..scenario }, PolicyKind::RoundRobin);
            report.tpot_ms.expect("measured").p99
        };
        let even = p99(four(Scenario::default()));
        let slow = Event { at: 0.0, worker: 2, what: Happens::Slow, by: 3.0 };
        let straggler = p99(Scenario { event: vec![slow], ..four(Scenario::default()) });
        let group = |workers, speed| DecodeGroup { workers, slots: 12, speed };
        let decode = vec![group(3, 1.0), group(1, 1.0 / 3.0)];
        let unequal = p99(Scenario { decode, ..four(Scenario::default()) });
        assert!(straggler > 2.0 * even && unequal > 2.0 * even, "{even} {straggler} {unequal}");
    }

    #[test]
    fn a_kept_prefix_is_not_run_again() {
        let world = World::new(&Planted::default());
        let sharing = |cache_tokens| Some(PrefixSharing { groups: 4, tokens: 640, share: 1.0, cache_tokens });
        let run = |cache_tokens| {
            let scenario = Scenario { prefix: sharing(cache_tokens), ..four(Scenario::default()) };
            world.run(&scenario, PolicyKind::LocalityBand)
        };
        let (without, with) = (run(0), run(100_000));
        assert_eq!((without.finished, with.finished, without.cached.to_bits()), (300, 300, 0.0f64.to_bits()));
        assert!(with.cached > 0.7, "{}", with.cached);
        assert!(with.ttft_ms.expect("measured").p50 < 0.6 * without.ttft_ms.expect("measured").p50);
        // Signatures are those of whole prompts either way.
        let scenario = Scenario { prefix: sharing(100_000), ..four(Scenario::default()) };
        let balanced = world.run(&scenario, PolicyKind::RoundRobin);
        assert!(with.experts_per_token < 0.9 * balanced.experts_per_token);
    }

    #[test]
    fn a_full_queue_refuses_and_a_bound_of_the_system_holds() {
        let world = World::new(&Planted::default());
        let flood = Scenario { rate: Some(1e6), max_queue: Some(10), ..four(Scenario::default()) };
        let report = world.run(&flood, PolicyKind::LeastLoaded);
        assert!(report.refused > 100 && report.finished + report.refused == 300, "{report:?}");
        let bounded = Scenario { rate: Some(1e6), concurrency: Some(8), ..four(Scenario::default()) };
        let report = world.run(&bounded, PolicyKind::LeastLoaded);
        assert!(report.finished == 300 && report.batch <= 2.0, "{report:?}");
    }

    #[test]
    fn what_can_not_be_simulated_is_refused_in_words() {
        let mut world = World::new(&Planted::default());
        let message = |world: &World, scenario: &Scenario| {
            let policy = PolicyKind::RoundRobin.build(&PolicyParams::new(4)).expect("valid");
            world.simulate(scenario, policy).expect_err("wrong").to_string()
        };
        let mix = [("law".to_owned(), 1.0)].into();
        assert!(message(&world, &four(Scenario { mix, ..Scenario::default() })).contains("domain-0, domain-1"));
        world.cost.decode.fixed = -1.0;
        assert!(message(&world, &four(Scenario::default())).contains("decode.fixed is -1 ms"));
        world.cost = cost();
        world.served = vec![4000];
        assert!(message(&world, &four(Scenario::default())).contains("request 4000"));
        world.served.clear();
        assert!(message(&world, &four(Scenario::default())).contains("no requests"));
    }
}
