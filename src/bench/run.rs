mod fitting;
mod memory;
mod notes;
mod prepare;

use std::{path::PathBuf, sync::Arc, time::Instant};

use crate::{
    bench::{
        BenchError, BenchReport, BenchRequest, CalibrationInfo, ChargedRunner, Clock, Environment, Limit, ModelInfo,
        PickStore, PrefillMemo, Probe, REPORT_VERSION, StepSample, Stopwatch, Timeline,
        real_clock::run_real,
        virtual_clock::{Durations, VirtualOutcome, VirtualRun, Worker},
        workload::{self, Arrivals},
    },
    calibrate::Calibration,
    engine::{
        Engine, EngineConfig, EngineError, EngineParts, EngineWorker, LoadedModel, N_PREFILL_PARALLEL, PrefixBudget,
        RamTier, devices, threads_alone, versions,
    },
    metrics::RunSummary,
    refit::{RefitConfig, RefitStats, Refitter},
    route::PolicyKind,
    schedule::{
        CacheStats, DecodeWorker, DispatchLimits, Dispatcher, Job, ModelRunner, PrefillWorker, PrefixStore, WorkerEvent,
    },
    sim::DeviceCost,
    types::{RequestId, WorkerId},
};
use notes::expert_note;
use prepare::{file_sha256, prepare, short};

pub use fitting::{BatchFit, CostFit, fit_cost};

/// What to bench.
#[derive(Debug, Clone)]
pub struct BenchParams {
    /// The model file.
    pub model: PathBuf,
    /// The workload file.
    pub workload: PathBuf,
    /// Policies, in the order of the runs.
    pub policies: Vec<PolicyKind>,
    /// The clock.
    pub clock: Clock,
    /// When requests arrive.
    pub arrivals: Arrivals,
    /// Requests in the system at most; the next arrives when one ends. None is no limit.
    pub concurrency: Option<usize>,
    /// Tokens of a prompt at most; lines with longer ones are left out. None takes every line.
    pub max_prompt: Option<usize>,
    /// Requests a run; the workload is cut or cycled to it. None is the workload once.
    pub n_requests: Option<usize>,
    /// Seed of arrivals, draws and policies.
    pub seed: u64,
    /// Temperature of the outputs.
    pub temperature: f32,
    /// Tokens of a request whose line has no `max_tokens`.
    pub default_max_tokens: u32,
    /// Tokens of every request, whatever its line says.
    pub output_tokens: Option<u32>,
    /// Share of requests that count as warm-up.
    pub warmup: f64,
    /// Count distinct experts in a second run of each policy.
    pub count_experts: bool,
    /// On the virtual clock, let every step take what these costs say: it is computed, and not timed.
    pub charge: Option<DeviceCost>,
    /// The workers.
    pub config: EngineConfig,
}

/// How far a bench is.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// The policy being run.
    pub policy: PolicyKind,
    /// Whether this run counts experts instead of timing.
    pub counting: bool,
    /// Requests done.
    pub n_done: usize,
    /// Requests of the run.
    pub n_requests: usize,
}

/// Runs the workload under each policy, on the same arrivals and seeds, and reports what was measured.
///
/// Each policy is timed with no tap on the decode steps. With `count_experts`, distinct experts come from a second run
/// with a tap: on the virtual clock it follows the first's schedule step for step, and its picks count for every
/// policy whose outputs are equal; on the real clock each policy has a counting run of its own. Steps that take what costs
/// say are tapped at once.
pub fn run(params: &BenchParams, progress: &mut dyn FnMut(Progress)) -> Result<BenchReport, BenchError> {
    let mut bench = Bench::open(params)?;
    if params.count_experts && params.charge.is_none() {
        bench.measure_memory();
    }
    if params.clock == Clock::Virtual && !bench.keeps_prefixes() {
        bench.prefill_all()?;
    }
    let mut runs = Vec::new();
    for &policy in &params.policies {
        runs.push(bench.run_policy(policy, progress)?);
    }
    bench.report(runs)
}

struct Bench<'a> {
    params: &'a BenchParams,
    config: EngineConfig,
    refit: Option<RefitConfig>,
    /// What refits came to, a run each.
    refits: Vec<(PolicyKind, RefitStats)>,
    /// What each run's prefill workers kept and used again.
    caches: Vec<(PolicyKind, CacheStats)>,
    model: LoadedModel,
    calibration: Option<Arc<Calibration>>,
    requests: Vec<BenchRequest>,
    memo: PrefillMemo,
    picks: PickStore,
    /// What each run's steps read.
    limits: Vec<Limit>,
    /// The decode steps of all runs that were timed alone, and what their hand-offs took.
    samples: Vec<StepSample>,
    handoffs_ms: f64,
    environment: Environment,
}

impl<'a> Bench<'a> {
    /// Loads the model and makes the workload ready.
    fn open(params: &'a BenchParams) -> Result<Self, BenchError> {
        let items = workload::read(&params.workload)?;
        let mut config = params.config.clone();
        config.seed = params.seed;
        config.heed_verdict = false;
        // Only some of the policies have centroids.
        let refit = config.refit.take();
        if params.clock == Clock::Virtual && config.n_threads == 0 {
            config.n_threads = threads_alone();
        }
        let model = LoadedModel::load(&params.model, &config)?;
        let items = match params.max_prompt {
            Some(max_prompt) => short(items, max_prompt, &model)?,
            None => items,
        };
        let items = workload::take(&items, params.n_requests.unwrap_or(items.len()));
        config.domains = workload::domains(&items);
        // A bench offers its load whatever happens: the queue holds all of it.
        config.limits = DispatchLimits { max_queue: items.len().max(1), ..config.limits };
        let calibration = model.calibration(&config)?;
        let requests = prepare(params, &model, &items)?;
        Ok(Self {
            params,
            config,
            refit,
            refits: Vec::new(),
            caches: Vec::new(),
            model,
            calibration,
            requests,
            memo: PrefillMemo::default(),
            picks: PickStore::default(),
            limits: Vec::new(),
            samples: Vec::new(),
            handoffs_ms: 0.0,
            environment: Environment::detect(
                Some(versions().llama_cpp),
                devices().into_iter().map(|device| device.name).collect(),
            ),
        })
    }

    fn run_policy(&mut self, policy: PolicyKind, progress: &mut dyn FnMut(Progress)) -> Result<RunSummary, BenchError> {
        self.config.policy = policy;
        let n_requests = self.requests.len();
        let count = self.params.count_experts && self.model.moe_shape().is_some();
        let mut hear = |counting, n_done| progress(Progress { policy, counting, n_done, n_requests });
        let timeline = match self.params.clock {
            Clock::Virtual if self.params.charge.is_some() => {
                let mut picks = PickStore::default();
                let measure = Durations::Measure(Vec::new());
                let VirtualOutcome { timeline, refit, cache, .. } =
                    self.run_virtual(Some(&mut picks), measure, &mut |n| hear(false, n))?;
                self.refits.extend(refit.map(|stats| (policy, stats)));
                self.caches.push((policy, cache));
                timeline
            }
            Clock::Virtual => {
                let measure = Durations::Measure(Vec::new());
                let VirtualOutcome { mut timeline, durations, refit, cache } =
                    self.run_virtual(None, measure, &mut |n| hear(false, n))?;
                self.refits.extend(refit.map(|stats| (policy, stats)));
                self.caches.push((policy, cache));
                if count && !timeline.count(&self.picks) {
                    let mut picks = PickStore::default();
                    let replay = Durations::Replay(durations.into_iter());
                    let VirtualOutcome { timeline: counted, .. } =
                        self.run_virtual(Some(&mut picks), replay, &mut |n| hear(true, n))?;
                    picks.tokens_sha256 = Some(counted.tokens_sha256());
                    timeline.take_batches(counted);
                    self.picks = picks;
                }
                timeline
            }
            Clock::Real => {
                let mut timeline = self.run_engine(false, &mut |n| hear(false, n))?;
                if count {
                    timeline.take_batches(self.run_engine(true, &mut |n| hear(true, n))?);
                }
                timeline
            }
        };
        if self.params.clock == Clock::Virtual {
            self.samples.extend(timeline.step_samples());
            self.handoffs_ms += timeline.handoffs_ms();
        }
        let bytes = self.step_bytes();
        let limit = bytes.filter(|_| self.params.charge.is_none()).and_then(|bytes| {
            Limit::of(policy.name(), &timeline.step_samples(), &bytes, self.environment.read_gb_per_s)
        });
        self.limits.extend(limit);
        Ok(timeline.summarise(policy, self.config.decode.n_workers(), self.params.warmup))
    }

    /// Computes and times every prefill before the first run, so that the decode steps of no policy find the caches
    /// full of prompts.
    fn prefill_all(&mut self) -> Result<(), BenchError> {
        let Some(&policy) = self.params.policies.first() else { return Ok(()) };
        self.config.policy = policy;
        let probe = Probe::new(Instant::now(), self.stopwatch());
        let mut parts = self.parts(false, &probe)?;
        let mut runner = self.memo.wrap(&probe, parts.prefill.swap_remove(0).runner);
        let eog = parts.tokenizer.end_tokens();
        let mut worker = PrefillWorker::new(runner.info(), parts.chunk, N_PREFILL_PARALLEL, eog, parts.n_expert);
        for (index, request) in self.requests.iter().enumerate() {
            worker.admit(Job::new(RequestId(index as u64), Arc::clone(&request.request)));
        }
        let mut events = Vec::new();
        while !worker.is_idle() {
            worker.step(runner.as_mut(), &mut events);
            for event in events.drain(..) {
                if let WorkerEvent::Lost { error } | WorkerEvent::Returned { error, .. } = event {
                    return Err(EngineError::Run(error).into());
                }
            }
        }
        Ok(())
    }

    fn run_virtual(
        &self,
        picks: Option<&mut PickStore>,
        durations: Durations,
        progress: &mut dyn FnMut(usize),
    ) -> Result<VirtualOutcome, BenchError> {
        let probe = Probe::new(Instant::now(), self.stopwatch());
        let parts = self.parts(picks.is_some(), &probe)?;
        let eog = parts.tokenizer.end_tokens().to_vec();
        let n_slots: Vec<u32> = parts.decode.iter().map(|worker| worker.runner.info().n_slots).collect();
        let (n_prefill, answers) = (parts.prefill.len(), parts.answers());
        let dispatcher = Dispatcher::new(n_prefill, &n_slots, parts.policy, parts.calibration, parts.limits);
        let dispatcher = dispatcher.caching(parts.prefix, parts.prefill[0].runner.info());
        let ram = (parts.prefix.ram_bytes > 0).then(|| RamTier::new(parts.prefix.ram_bytes));
        let store = || ram.clone().map(|ram| Box::new(ram) as Box<dyn PrefixStore>);
        let prefill = parts.prefill.into_iter().map(|EngineWorker { runner, .. }| {
            let scheduler = PrefillWorker::new(runner.info(), parts.chunk, N_PREFILL_PARALLEL, &eog, parts.n_expert);
            let scheduler = scheduler.caching(parts.prefix, runner.info(), parts.n_expert).spilling(store());
            Worker::new(scheduler, if self.keeps_prefixes() { runner } else { self.memo.wrap(&probe, runner) })
        });
        let decode = parts.decode.into_iter().map(|EngineWorker { runner, .. }| {
            let scheduler = DecodeWorker::new(runner.info(), parts.chunk, &eog).returning(answers.clone());
            Worker::new(scheduler, runner)
        });
        let mut run = VirtualRun::new(dispatcher, prefill.collect(), decode.collect(), probe.clone(), durations, picks);
        if let Some(refitter) = self.refitter()? {
            run = run.refitting(refitter);
        }
        run.run(&self.requests, self.params.concurrency, progress)
    }

    /// Whether prompts begin with what others left behind: their prefills then differ from run to run.
    fn keeps_prefixes(&self) -> bool {
        self.config.prefix_cache != PrefixBudget::Off
    }

    fn refitter(&self) -> Result<Option<Refitter>, BenchError> {
        let (Some(refit), Some(calibration), true) =
            (&self.refit, &self.calibration, self.config.policy.uses_centroids())
        else {
            return Ok(None);
        };
        let n_slots = vec![self.config.n_slots; self.config.decode.n_workers()];
        let refitter = Refitter::of_calibration(refit.clone(), calibration, &n_slots);
        refitter.map(Some).map_err(|error| EngineError::Config(error.to_string()).into())
    }

    /// For the virtual clock, which runs one step at a time in this thread.
    fn stopwatch(&self) -> Stopwatch {
        match () {
            () if self.params.charge.is_some() => Stopwatch::Charged,
            () if self.model.computes_in_the_callers_thread() => Stopwatch::Thread,
            () => Stopwatch::Wall,
        }
    }

    fn run_engine(&mut self, tap: bool, progress: &mut dyn FnMut(usize)) -> Result<Timeline, BenchError> {
        let started = Instant::now();
        let probe = Probe::new(started, Stopwatch::Wall);
        let parts = self.parts(tap, &probe)?;
        let engine = match &self.refit {
            Some(refit) if self.config.policy.uses_centroids() && parts.calibration.is_some() => {
                Engine::start_refitting(parts, refit.clone())?
            }
            _ => Engine::start(parts)?,
        };
        let timeline = run_real(&engine, &self.requests, self.params.concurrency, &probe, started, progress)?;
        if !tap {
            let (policy, stats) = (self.config.policy, engine.stats());
            self.refits.extend(stats.refit.map(|stats| (policy, stats)));
            self.caches.push((policy, stats.cache));
        }
        Ok(timeline)
    }

    /// The runner, on a device with the given costs if there are any.
    fn charged(&self, runner: Box<dyn ModelRunner>) -> Box<dyn ModelRunner> {
        match self.params.charge.clone().filter(|_| self.params.clock == Clock::Virtual) {
            Some(cost) => Box::new(ChargedRunner::new(cost, runner)),
            None => runner,
        }
    }

    /// Fresh workers and a fresh policy, watched by the probe. Every policy's prefill counts the same layers, so that
    /// no policy's prompts are cheaper.
    fn parts(&self, tap: bool, probe: &Probe) -> Result<EngineParts, BenchError> {
        let watch = |mut workers: Vec<EngineWorker>| -> Vec<EngineWorker> {
            let watched = workers.drain(..).enumerate().map(|(index, worker)| EngineWorker {
                runner: probe.watch(WorkerId(index as u32), self.charged(worker.runner)),
                ..worker
            });
            watched.collect()
        };
        let tapped = if self.params.policies.iter().any(|policy| policy.uses_counts()) {
            self.model.usable_layers()
        } else {
            self.calibration.as_ref().map(|c| c.layers.clone()).unwrap_or_default()
        };
        let policy = self.model.policy(&self.config, self.calibration.as_deref())?;
        // Answers come back with their picks.
        let tap = tap || (self.config.cache_answers && !tapped.is_empty());
        Ok(EngineParts {
            prefill: watch(self.model.prefill_workers(&self.config, &tapped)?),
            decode: watch(self.model.decode_workers(&self.config, u32::from(tap))?),
            tokenizer: self.model.tokenizer(),
            policy: probe.watch_policy(policy),
            calibration: self.calibration.clone(),
            limits: self.config.limits,
            chunk: self.model.chunk(&self.config),
            n_expert: self.model.moe_shape().map_or(0, |shape| shape.n_expert),
            prefix: self.model.prefix(&self.config),
        })
    }

    /// Fills in what the experts of a step weigh, and says it.
    fn expert_traffic(&self, runs: &mut [RunSummary]) -> Option<String> {
        let n_layer = self.model.moe_shape()?.layers.len();
        let bytes = self.step_bytes()?;
        for run in &mut *runs {
            run.expert_bytes_step = run.experts_distinct.map(|experts| bytes.experts(experts.mean * n_layer as f64));
        }
        expert_note(runs, self.model.n_host_layers(&self.config), n_layer)
    }

    fn report(self, mut runs: Vec<RunSummary>) -> Result<BenchReport, BenchError> {
        let traffic = self.expert_traffic(&mut runs);
        let shape = self.model.moe_shape();
        let size = |f: fn(&crate::types::MoeShape) -> u32| shape.map_or(0, f);
        let path = &self.params.model;
        let inflated = self.model.is_inflated();
        let notes = traffic.into_iter().chain(self.notes(&runs)).collect();
        let cost = self.own_cost();
        Ok(BenchReport {
            version: REPORT_VERSION,
            machine: self.environment.machine.clone(),
            model: ModelInfo {
                path: path.display().to_string(),
                sha256: file_sha256(path)?,
                n_layer_moe: size(|s| s.n_layer_moe() as u32),
                n_expert: size(|s| s.n_expert),
                n_expert_used: size(|s| s.n_expert_used),
                inflated,
            },
            clock: self.params.clock,
            prefill: self.config.prefill.n_workers() as u32,
            decode: self.config.decode.n_workers() as u32,
            rate: self.params.arrivals.rate(),
            seed: self.params.seed,
            workload: Some(self.params.workload.display().to_string()),
            arrivals: Some(match self.params.concurrency {
                Some(n) => format!("{}, at most {n} at a time", self.params.arrivals),
                None => self.params.arrivals.to_string(),
            }),
            calibration: self.calibration.map(|c| CalibrationInfo {
                path: self.config.calibration.as_ref().map(|path| path.display().to_string()),
                rho: c.rho,
                n_layer: c.layers.len() as u32,
                tau: self.config.tau.unwrap_or(c.tau),
                min_band: self.config.min_band,
            }),
            notes,
            runs,
            limits: self.limits,
            cost,
            environment: Some(self.environment),
            extra: serde_json::Map::new(),
        })
    }
}
