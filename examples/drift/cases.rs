//! What is served, and on which workers.

use std::{
    collections::BTreeMap,
    error::Error,
    ops::Range,
    sync::{Arc, Mutex},
    time::Duration,
};

use eldr::{
    Calibration, RoutePolicy,
    calibrate::{CalibrationInput, CalibrationParams, fit},
    refit::Refitter,
    rng::Rng,
    route::{PolicyKind, PolicyParams},
    schedule::DispatchLimits,
    sim::{
        Arrivals, Burst, CostShares, DecodeCost, DecodeGroup, DeviceCost, Event, HandoffCost, Happens, Order, Pool,
        PrefillCost, ReplayParams, ReplaySet, Scenario, StepCost, Traffic, replay, replay_refitting, simulate,
    },
    trace::Trace,
};

use crate::{
    bound::{self, Known, Watch},
    clairvoyant::{Clairvoyant, Future, Seen, Watched},
    contenders::Contender,
    recovery::recoveries,
};

/// Requests a worker has on average under round robin, and requests of each domain that a calibration is fitted to.
pub const N_RESIDENT: usize = 16;
const N_FIT: usize = 20;
/// Requests of a run, for each in the system, and the share of them that come before it is measured.
const ROUNDS: usize = 8;
const WARMUP: f64 = 0.2;
/// Moments of which the best partition is sought, while as many requests come as are in the system.
const MOMENTS: usize = 4;
/// A mean step in milliseconds.
const STEP_MS: f64 = 30.0;
/// Part of it that a worker stands still to take a sequence in; in a replay, one that ran elsewhere, and to give it away.
const HANDOFF: f64 = 0.1;

/// One scenario.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Case {
    /// The domains mixed so. Requests come at random, as many in a time whatever the policy: shorter steps leave fewer of them
    /// to run at once.
    Mix(Traffic),
    /// The domains mixed so; one comes when another has ended, so that batches stay as full as they are.
    Full(Traffic),
    /// Picks drawn at random, in the prompt and after: there is no locality.
    Noise,
    /// As calibrated, but requests come in bursts, twice as many in a time, and none in between.
    Bursts,
    /// Half the workers take twice the time.
    Unequal,
    /// A worker takes three times as long from a third of the time on.
    Straggler,
    /// A worker is lost after 40% of the time and another joins after 70%.
    LostAndAdded,
}

impl Case {
    pub const ALL: [Self; 16] = [
        Self::Mix(Traffic::Matched),
        Self::Mix(Traffic::Skewed),
        Self::Mix(Traffic::Step),
        Self::Mix(Traffic::Turnover),
        Self::Mix(Traffic::NewDomain),
        Self::Mix(Traffic::OneDomain),
        Self::Mix(Traffic::Runs),
        Self::Bursts,
        Self::Unequal,
        Self::Straggler,
        Self::LostAndAdded,
        Self::Noise,
        Self::Full(Traffic::Matched),
        Self::Full(Traffic::Skewed),
        Self::Full(Traffic::Step),
        Self::Full(Traffic::Turnover),
    ];
    pub const ABLATIONS: [Self; 6] = [
        Self::Mix(Traffic::Matched),
        Self::Mix(Traffic::Skewed),
        Self::Mix(Traffic::Turnover),
        Self::Bursts,
        Self::Straggler,
        Self::LostAndAdded,
    ];

    pub fn name(self) -> String {
        match self {
            Self::Mix(traffic) => traffic.name().to_owned(),
            Self::Full(traffic) => format!("{}, full", traffic.name()),
            Self::Noise => "noise".to_owned(),
            Self::Bursts => "bursts".to_owned(),
            Self::Unequal => "unequal".to_owned(),
            Self::Straggler => "straggler".to_owned(),
            Self::LostAndAdded => "lost_and_added".to_owned(),
        }
    }

    fn traffic(self) -> Traffic {
        if let Self::Mix(traffic) | Self::Full(traffic) = self { traffic } else { Traffic::Matched }
    }
}

/// What one contender did with one seed.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub p50: f64,
    pub p99: f64,
    pub mean: f64,
    pub experts: f64,
    /// Steps until it had recovered from each change of the workers.
    pub recoveries: Vec<usize>,
}

/// The recording and the pool.
pub struct World {
    pub trace: Trace,
    pub set: ReplaySet,
    known: Arc<Known>,
    noise: (Trace, ReplaySet),
    pub n_workers: usize,
    seeds: Range<u64>,
}

/// One seed of one scenario.
struct Serving<'a> {
    trace: &'a Trace,
    set: &'a ReplaySet,
    served: Vec<usize>,
    calibration: Arc<Calibration>,
    future: Arc<Future>,
    params: ReplayParams,
    seed: u64,
}

impl World {
    pub fn new(trace: Trace, n_workers: usize, seeds: Range<u64>) -> Self {
        let noise = noise(&trace);
        let sets = (ReplaySet::new(&trace), ReplaySet::new(&noise));
        let known = Arc::new(Known::of(&trace));
        Self { trace, set: sets.0, known, noise: (noise, sets.1), n_workers, seeds }
    }

    pub fn seeds(&self) -> Range<u64> {
        self.seeds.clone()
    }

    /// One outcome for each contender.
    pub fn serve(&self, case: Case, seed: u64, contenders: &[Contender]) -> Result<Vec<Outcome>, Box<dyn Error>> {
        let serving = self.serving(case, seed)?;
        let one = |contender: &Contender| match case {
            Case::Mix(_) | Case::Full(_) | Case::Noise => serving.replay(contender),
            _ => serving.simulate(case, contender),
        };
        contenders.iter().map(one).collect()
    }

    /// What the best partitions of those that ran under `contender` would have come to, one outcome for each of
    /// [`bound::KINDS`]; only where batches stay as full as they are.
    pub fn bounds(&self, case: Case, seed: u64, contender: &Contender) -> Result<Vec<Outcome>, Box<dyn Error>> {
        if let Case::Full(_) = case { self.serving(case, seed)?.bounds(contender, &self.known) } else { Ok(Vec::new()) }
    }

    fn serving(&self, case: Case, seed: u64) -> Result<Serving<'_>, Box<dyn Error>> {
        let (trace, set) = if case == Case::Noise { (&self.noise.0, &self.noise.1) } else { (&self.trace, &self.set) };
        let n_domain = trace.requests.len() / 5;
        let wanted = N_RESIDENT * self.n_workers;
        let concurrency = if case.traffic() == Traffic::OneDomain { wanted.min(n_domain * 4 / 5) } else { wanted };
        let n_requests = ROUNDS * concurrency;
        let (fitted_to, served) = case.traffic().split(trace, N_FIT, n_requests, seed);
        let input = CalibrationInput::of_trace(trace, fitted_to);
        let mut params = ReplayParams {
            n_slots: vec![2 * N_RESIDENT as u32; self.n_workers],
            arrivals: Arrivals::Closed { concurrency, ramp: 100.0 },
            order: Order::Passing,
            n_requests,
            warmup: WARMUP,
            prefill: 10.0,
            cost: StepCost::UNIT,
            handoff: HANDOFF,
            limits: DispatchLimits::default(),
        };
        let round_robin = PolicyKind::RoundRobin.build(&PolicyParams::new(self.n_workers))?;
        let even = replay(set, &served, &params, round_robin, None)?;
        params.cost = StepCost::from_shares(CostShares::default(), &even, set.n_layer());
        if let Case::Mix(_) | Case::Noise = case {
            // A step of round robin takes 1.
            params.arrivals = Arrivals::Poisson { rate: concurrency as f64 / mean_steps(set, &served), seed };
            // A policy that takes longer has more to run at once.
            params.n_slots.fill(4 * N_RESIDENT as u32);
        }
        Ok(Serving {
            trace,
            set,
            served,
            calibration: Arc::new(fit(&input, &CalibrationParams::new(self.n_workers))?.0),
            future: Arc::new(Future::of(trace)),
            params,
            seed,
        })
    }
}

impl Serving<'_> {
    fn policy(&self, contender: &Contender) -> Result<Box<dyn RoutePolicy>, Box<dyn Error>> {
        let n_workers = self.params.n_slots.len();
        let inner = contender.kind.build(&PolicyParams {
            seed: self.seed,
            tau: contender.tau,
            centroids: contender.calibrated.then(|| Arc::new(self.calibration.centroids.clone())),
            shape: Some(self.trace.header.shape.clone()),
            marginal: contender.params,
            ..PolicyParams::new(n_workers)
        })?;
        let future = Arc::clone(&self.future);
        Ok(if contender.knows { Box::new(Clairvoyant { inner, future }) } else { inner })
    }

    fn refitter(&self, contender: &Contender) -> Result<Option<Refitter>, Box<dyn Error>> {
        let new = |config| Refitter::of_calibration(config, &self.calibration, &self.params.n_slots);
        Ok(contender.refit.clone().map(new).transpose()?)
    }

    fn replay(&self, contender: &Contender) -> Result<Outcome, Box<dyn Error>> {
        self.replay_by(contender, self.policy(contender)?)
    }

    fn bounds(&self, contender: &Contender, known: &Arc<Known>) -> Result<Vec<Outcome>, Box<dyn Error>> {
        let Arrivals::Closed { concurrency, .. } = self.params.arrivals else { return Ok(Vec::new()) };
        let moments = Arc::default();
        let watch = Watch {
            inner: self.policy(contender)?,
            known: Arc::clone(known),
            n_warmup: (self.params.n_requests as f64 * WARMUP) as usize,
            every: concurrency.div_ceil(MOMENTS),
            n_placed: 0,
            residents: BTreeMap::new(),
            moments: Arc::clone(&moments),
        };
        let ran = self.replay_by(contender, Box::new(watch))?;
        let n_workers = self.params.n_slots.len();
        let pool = bound::Pool { known, cost: self.params.cost, n_workers, n_slots: 2 * N_RESIDENT, seed: self.seed };
        let shares = bound::shares(&pool, &moments.lock().expect("one thread"));
        let outcome = |share: bound::Shares| Outcome {
            p50: ran.p50 * share.p50,
            p99: ran.p99 * share.p99,
            mean: ran.mean * share.mean,
            experts: ran.experts * share.experts,
            recoveries: Vec::new(),
        };
        Ok(shares.map(outcome).to_vec())
    }

    fn replay_by(&self, contender: &Contender, policy: Box<dyn RoutePolicy>) -> Result<Outcome, Box<dyn Error>> {
        let Self { set, served, calibration, params, .. } = self;
        let limits = DispatchLimits { migrate_every: contender.migrate_every, ..params.limits };
        let params = &ReplayParams { limits, ..params.clone() };
        let report = if let Some(refitter) = self.refitter(contender)? {
            let unit = Duration::from_secs_f64(STEP_MS / 1e3);
            replay_refitting(set, served, params, policy, Arc::clone(calibration), refitter, unit)?
        } else {
            let calibration = contender.calibrated.then(|| Arc::clone(calibration));
            replay(set, served, params, policy, calibration)?
        };
        let tpot = report.tpot.ok_or("no request was measured")?;
        Ok(Outcome {
            p50: tpot.p50,
            p99: tpot.p99,
            mean: tpot.mean,
            experts: report.experts_per_step,
            recoveries: Vec::new(),
        })
    }

    fn simulate(&self, case: Case, contender: &Contender) -> Result<Outcome, Box<dyn Error>> {
        let n_workers = self.params.n_slots.len();
        let cost = self.device_cost();
        let pool = Pool {
            trace: self.trace,
            set: self.set,
            served: &self.served,
            cost: &cost,
            calibration: Some(&self.calibration),
            ranks: &[],
            clairvoyant: false,
        };
        let scenario = Scenario { migrate_every: contender.migrate_every, ..self.scenario(case) };
        let (scenario, seen) = (scenario, Arc::<Mutex<Seen>>::default());
        let inner = self.policy(contender)?;
        let policy =
            Box::new(Watched { inner, n_workers, awaits_straggler: case == Case::Straggler, seen: Arc::clone(&seen) });
        let report = simulate(pool, &scenario, policy, self.refitter(contender)?)?;
        let tpot = report.tpot_ms.ok_or("no request was measured")?;
        let recoveries = recoveries(&seen.lock().expect("one thread"));
        Ok(Outcome { p50: tpot.p50, p99: tpot.p99, mean: tpot.mean, experts: report.experts_per_step, recoveries })
    }

    /// The replay's cost in milliseconds, with prefills that are not what is compared.
    fn device_cost(&self) -> DeviceCost {
        let StepCost { fixed, per_expert, per_token } = self.params.cost;
        let ms = |x: f64| x * STEP_MS;
        let decode =
            DecodeCost { fixed: ms(fixed), per_expert: ms(per_expert), per_token: ms(per_token), per_kv_token: 0.0 };
        let prefill = PrefillCost { fixed: ms(0.2), per_token: 0.0, per_kv_token: 0.0 };
        let handoff = HandoffCost { fixed: ms(HANDOFF), per_token: 0.0 };
        DeviceCost { source: "as the replays".into(), decode, prefill, handoff }
    }

    fn scenario(&self, case: Case) -> Scenario {
        let n = self.params.n_slots.len();
        let concurrency = (N_RESIDENT * n) as u32;
        // A request holds its slot for its steps, of STEP_MS each.
        let life = mean_steps(self.set, &self.served) * STEP_MS / 1e3;
        let total = ROUNDS as f64 * life;
        let group =
            |workers: usize, speed| DecodeGroup { workers: workers as u32, slots: 2 * N_RESIDENT as u32, speed };
        let event = |share: f64, worker, what, by| Event { at: share * total, worker, what, by };
        let even = Scenario {
            requests: self.params.n_requests as u64,
            seed: self.seed,
            decode: vec![group(n, 1.0)],
            prefill: Some(n as u32),
            concurrency: Some(concurrency),
            ..Scenario::default()
        };
        match case {
            Case::Bursts => Scenario {
                rate: Some(f64::from(concurrency) / life),
                burst: Some(Burst { on: life, off: life }),
                concurrency: None,
                ..even
            },
            Case::Unequal => Scenario { decode: vec![group(n - n / 2, 1.0), group(n / 2, 0.5)], ..even },
            Case::Straggler => Scenario { event: vec![event(0.33, 0, Happens::Slow, 3.0)], ..even },
            Case::LostAndAdded => {
                let slots = 2.0 * N_RESIDENT as f64;
                let events = [event(0.4, 0, Happens::Fail, 1.0), event(0.7, 0, Happens::Join, slots)];
                Scenario { event: events.to_vec(), ..even }
            }
            Case::Mix(_) | Case::Full(_) | Case::Noise => even,
        }
    }
}

fn mean_steps(set: &ReplaySet, served: &[usize]) -> f64 {
    served.iter().map(|&at| f64::from(set.n_steps(at))).sum::<f64>() / served.len() as f64
}

/// The same prompts and lengths with picks drawn at random.
fn noise(trace: &Trace) -> Trace {
    let mut noise = trace.clone();
    let shape = &trace.header.shape;
    let (e, k) = (shape.n_expert as usize, shape.n_expert_used as usize);
    let mut rng = Rng::new(1);
    let mut pick = |row: &mut [u16]| {
        for at in 0..k {
            row[at] = std::iter::repeat_with(|| rng.below(e) as u16)
                .find(|expert| !row[..at].contains(expert))
                .expect("fewer picks than experts");
        }
    };
    let mut row = vec![0; k];
    for request in &mut noise.requests {
        request.picks.chunks_exact_mut(k).for_each(&mut pick);
        for counts in request.blocks.chunks_exact_mut(e) {
            let n_tokens = counts.iter().map(|&n| usize::from(n)).sum::<usize>() / k;
            counts.fill(0);
            for _ in 0..n_tokens {
                pick(&mut row);
                for &expert in &row {
                    counts[usize::from(expert)] += 1;
                }
            }
        }
    }
    noise
}
