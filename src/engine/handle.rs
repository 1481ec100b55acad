use std::{
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crossbeam::channel::unbounded;
use parking_lot::Mutex;

use crate::{
    calibrate::Calibration,
    engine::{
        DiskTier, EngineError, EngineExtras, EngineParts, EngineStats, EngineWorker, PrefixTiers, RamTier,
        RestoreRates, Shared, TokenStream, Tokenizer,
        refit::Refit,
        timed::{SharedTimes, TimedPolicy},
        watchdog::{Schedulers, Watch},
        worker::{Starter, spawn_worker},
    },
    refit::{RefitConfig, Refitter},
    schedule::{Answers, Dispatcher, Priority, RunnerInfo, Source, SubmitParams, WorkerEvent},
    types::{Request, Token, WorkerId},
};

/// Prompts one prefill worker has open at once.
pub const N_PREFILL_PARALLEL: u32 = 4;

/// A model served by several workers. Cheap to clone and shared among threads; the workers stop with the last clone.
///
/// ```
/// # mod fake {
/// #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_engine.rs"));
/// # }
///
/// use eldr::{
///     Engine,
///     types::{FinishReason, Request, SamplingParams},
/// };
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // With llama.cpp: `EngineConfig::builder().decode("2").open("model.gguf")?`. Here over workers that only pretend.
/// let engine: Engine = fake::engine();
/// let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::default() };
/// let request =
///     Request { prompt: engine.tokenize("Once")?, max_tokens: 8, sampling, domain: None, deadline: None };
/// let completion = engine.submit(request)?.collect()?;
/// assert_eq!((completion.tokens.len(), completion.reason), (8, Some(FinishReason::Length)));
/// assert_eq!(engine.stats().n_active, 0);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Engine(Arc<Inner>);

struct Inner {
    shared: Arc<Shared>,
    tokenizer: Arc<dyn Tokenizer>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Of the decode workers.
    names: Mutex<Vec<String>>,
    terms: Terms,
    schedulers: Arc<Schedulers>,
}

/// What every worker must agree with: the first one, and how prompts are cut.
struct Terms {
    first: String,
    info: RunnerInfo,
    chunk: u32,
    answers: Option<Answers>,
}

impl Engine {
    /// Starts a thread for every worker. Workers that cannot exchange sequences are refused with the setting that
    /// differs.
    pub fn start(parts: EngineParts) -> Result<Self, EngineError> {
        Self::launch(parts, None, None)
    }

    /// Starts like [`Engine::start`], and fits the policy's centroids to the traffic while it serves.
    ///
    /// Fits run on a thread of their own and never delay a request; at the end of the engine a fit that still runs is
    /// not waited for. When a decode worker is lost, drained or added, the traffic's shares are cut anew: in proportion to
    /// the calibration's capacities, or to the workers' slots.
    ///
    /// # Errors
    /// Without a calibration there is nothing to refit.
    pub fn start_refitting(parts: EngineParts, config: RefitConfig) -> Result<Self, EngineError> {
        Self::start_with(parts, EngineExtras { refit: Some(config), ..EngineExtras::default() })
    }

    /// Starts like [`Engine::start`], with all that `extras` holds.
    pub fn start_with(parts: EngineParts, extras: EngineExtras) -> Result<Self, EngineError> {
        let EngineExtras { refit, disk } = extras;
        let refitter = refit.map(|config| Self::refitter(&parts, config)).transpose()?;
        Self::launch(parts, refitter, disk)
    }

    fn refitter(parts: &EngineParts, config: RefitConfig) -> Result<Refitter, EngineError> {
        let refuse = |why: String| Err(EngineError::Config(why));
        let Some(calibration) = &parts.calibration else {
            return refuse("there is no calibration, so no centroids to refit: give one, or do not refit".to_owned());
        };
        let (n_centroids, n_workers) = (calibration.n_workers(), parts.decode.len());
        if n_centroids != n_workers {
            return refuse(format!(
                "the calibration has {n_centroids} centroids for {n_workers} decode workers: calibrate with `--workers \
                 {n_workers}`"
            ));
        }
        let n_slots: Vec<u32> = parts.decode.iter().map(|worker| worker.runner.info().n_slots).collect();
        Refitter::of_calibration(config, calibration, &n_slots).or_else(|error| refuse(error.to_string()))
    }

    fn launch(parts: EngineParts, refitter: Option<Refitter>, disk: Option<DiskTier>) -> Result<Self, EngineError> {
        let terms = Terms::of(&parts)?;
        let n_slots: Vec<u32> = parts.decode.iter().map(|worker| worker.runner.info().n_slots).collect();
        let route_times = SharedTimes::default();
        let policy = Box::new(TimedPolicy { policy: parts.policy, times: Arc::clone(&route_times) });
        let dispatcher = Dispatcher::new(parts.prefill.len(), &n_slots, policy, parts.calibration, parts.limits);
        let dispatcher = dispatcher.caching(parts.prefix, parts.prefill[0].runner.info());
        let names = parts.decode.iter().map(|worker| worker.name.clone()).collect();
        let (prefill_to, prefill_in): (Vec<_>, Vec<_>) = parts.prefill.iter().map(|_| unbounded()).unzip();
        let (decode_to, decode_in): (Vec<_>, Vec<_>) = parts.decode.iter().map(|_| unbounded()).unzip();
        let (refit, fits) = refitter.map(Refit::new).unzip();
        let ram = (parts.prefix.ram_bytes > 0).then(|| RamTier::new(parts.prefix.ram_bytes));
        let rates = RestoreRates::default();
        let tiers = PrefixTiers::new(ram, disk, rates.clone());
        let shared = Shared::new(dispatcher, prefill_to, decode_to, refit, route_times, tiers.clone());
        let shared = Arc::new(shared);
        let schedulers = Arc::new(Schedulers {
            chunk: parts.chunk,
            eog: parts.tokenizer.end_tokens().to_vec(),
            n_expert: parts.n_expert,
            prefix: parts.prefix,
            tiers,
            rates,
            answers: terms.answers.clone(),
            pins: Mutex::default(),
        });
        let mut starter = Starter { shared: Arc::clone(&shared), threads: Vec::new() };
        let prefill = parts.prefill.into_iter().zip(prefill_in).zip(0..);
        let prefill = prefill.map(|(worker, index)| (Source::Prefill(WorkerId(index)), worker));
        let decode = parts.decode.into_iter().zip(decode_in).zip(0..);
        let decode = decode.map(|(worker, index)| (Source::Decode(WorkerId(index)), worker));
        for (source, (worker, inbox)) in prefill.chain(decode) {
            let watch = watch(&worker, source, &shared, &schedulers);
            let scheduler = schedulers.make(source, worker.runner.info());
            starter.spawn(source, schedulers.timed(source, worker, &shared), scheduler, inbox)?;
            starter.threads.extend(watch.map(Watch::start).transpose()?);
        }
        starter.spawn_deadlines()?;
        if let Some(fits) = fits {
            fits.start(Arc::downgrade(&shared))?;
        }
        let threads = Mutex::new(std::mem::take(&mut starter.threads));
        let (names, tokenizer) = (Mutex::new(names), parts.tokenizer);
        Ok(Self(Arc::new(Inner { shared, tokenizer, threads, names, terms, schedulers })))
    }

    /// Accepts a request, or says why not; the answer comes through the stream.
    pub fn submit(&self, request: Request) -> Result<TokenStream, EngineError> {
        self.submit_as(request, Priority::Normal)
    }

    /// As [`Engine::submit`], with a priority in the queue for a prefill worker.
    pub fn submit_as(&self, request: Request, priority: Priority) -> Result<TokenStream, EngineError> {
        self.submit_with(request, SubmitParams { priority, ..SubmitParams::default() })
    }

    /// As [`Engine::submit`], with a priority and a policy of its own.
    ///
    /// # Errors
    /// Beside [`Engine::submit`]'s, those of [`Engine::lend_policy`].
    pub fn submit_with(&self, request: Request, params: SubmitParams) -> Result<TokenStream, EngineError> {
        self.check(&request)?;
        if let Some(kind) = params.policy {
            self.lend_policy(kind)?;
        }
        let (id, events) = self.0.shared.submit(request, params)?;
        let tokenizer = Arc::clone(&self.0.tokenizer);
        Ok(TokenStream::new(id, events, tokenizer, Arc::downgrade(&self.0.shared)))
    }

    /// The tokens of `text` as a prompt, special tokens included.
    pub fn tokenize(&self, text: &str) -> Result<Vec<Token>, EngineError> {
        self.0.tokenizer.tokenize(text).map_err(EngineError::Request)
    }

    /// Text to tokens and back.
    pub fn tokenizer(&self) -> &Arc<dyn Tokenizer> {
        &self.0.tokenizer
    }

    /// Tokens a sequence may have, prompt and output together.
    pub fn n_ctx_slot(&self) -> u32 {
        self.0.terms.info.n_ctx_slot
    }

    /// Lets every prefill worker keep the whole blocks of `tokens` for good, in a slot of their own, from the first prompt on
    /// that begins with them: a system prompt, say. A worker that can not says why in the log.
    pub fn pin(&self, tokens: &[Token]) -> Result<(), EngineError> {
        let tokens = Arc::from(tokens);
        self.0.shared.pin(&tokens)?;
        self.0.schedulers.pins.lock().push(tokens);
        Ok(())
    }

    /// Starts one decode worker more while requests run: its number. Requests go to it from now on.
    ///
    /// A policy that compares centroids sends it what it has no better worker for, until a refit cuts a centroid for it.
    ///
    /// # Errors
    /// A worker that can not exchange sequences with the others is refused with the setting that differs.
    pub fn add_decode(&self, worker: EngineWorker) -> Result<WorkerId, EngineError> {
        let Inner { shared, threads, names, terms, schedulers, .. } = &*self.0;
        terms.check(&worker)?;
        // Held to the end, so that a shutdown at the same time waits for the new thread too.
        let mut threads = threads.lock();
        let (to, inbox) = unbounded();
        let id = shared.add_decode(worker.runner.info().n_slots, to)?;
        names.lock().push(worker.name.clone());
        let source = Source::Decode(id);
        let watch = watch(&worker, source, shared, schedulers);
        let scheduler = schedulers.make(source, worker.runner.info());
        let started = spawn_worker(shared, source, schedulers.timed(source, worker, shared), scheduler, inbox);
        match started.and_then(|thread| Ok((thread, watch.map(Watch::start).transpose()?))) {
            Ok((thread, watching)) => threads.extend([thread].into_iter().chain(watching)),
            Err(error) => {
                shared.deliver(source, None, &mut vec![WorkerEvent::Lost { error: error.to_string() }]);
                return Err(error);
            }
        }
        shared.resume_decode(id)?;
        Ok(id)
    }

    /// Sends a decode worker no more requests; it finishes those it has, and can be resumed.
    ///
    /// # Errors
    /// An unknown or lost worker, and the last one that takes requests, are refused.
    pub fn drain_decode(&self, worker: WorkerId) -> Result<(), EngineError> {
        self.0.shared.drain_decode(worker)
    }

    /// Lets a drained decode worker take requests again.
    ///
    /// # Errors
    /// An unknown or lost worker is refused.
    pub fn resume_decode(&self, worker: WorkerId) -> Result<(), EngineError> {
        self.0.shared.resume_decode(worker)
    }

    /// What the engine is doing. Never waits for a worker.
    pub fn stats(&self) -> EngineStats {
        self.0.shared.stats()
    }

    /// Routes the requests to come by another calibration, which must be for the same model and workers and compare layers
    /// that the prefill workers count: all where the policy counts them (marginal cost), else those of the calibration the
    /// engine started with. The band keeps its width.
    pub fn set_calibration(&self, calibration: Arc<Calibration>) -> Result<(), EngineError> {
        self.0.shared.set_calibration(calibration, &self.0.terms.info.tapped)
    }

    /// The names of the decode workers, by number: `decode 3 on CPU`.
    pub fn decode_names(&self) -> Vec<String> {
        self.0.names.lock().clone()
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.0.shared
    }

    /// The moment the times of stream events are counted from.
    pub fn started(&self) -> Instant {
        self.0.shared.started()
    }

    /// The routing policy in use.
    pub fn policy_name(&self) -> &'static str {
        self.0.shared.policy_name()
    }

    /// Why the policy is less than what was asked for, in a sentence; none where it is not.
    pub fn policy_note(&self) -> Option<String> {
        self.0.shared.policy_note()
    }

    #[cfg(feature = "llama")]
    pub(super) fn with_policy_note(self, note: Option<String>) -> Self {
        self.0.shared.set_policy_note(note);
        self
    }

    /// Takes no more requests and waits until those it has are done, at most `limit`; whether they are.
    pub fn drain(&self, limit: Duration) -> bool {
        self.0.shared.stop_accepting();
        self.0.shared.wait_idle(limit)
    }

    /// Ends every request as cancelled and stops the workers. Dropping the last clone does the same.
    pub fn shutdown(&self) {
        self.0.shutdown();
    }
}

impl Inner {
    fn shutdown(&self) {
        self.shared.stop();
        for thread in self.threads.lock().drain(..) {
            if thread.join().is_err() {
                log::error!("a worker thread panicked outside a step");
            }
        }
        self.shared.close_tiers();
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shutdown();
    }
}

/// The watch over a worker whose device may fail.
fn watch(worker: &EngineWorker, source: Source, shared: &Arc<Shared>, schedulers: &Arc<Schedulers>) -> Option<Watch> {
    Some(Watch {
        shared: Arc::clone(shared),
        source,
        name: worker.name.clone(),
        permits: worker.permits.clone(),
        recovery: worker.runner.recovery()?,
        schedulers: Arc::clone(schedulers),
    })
}

impl Terms {
    /// The first worker's, once all others have been held against it.
    fn of(parts: &EngineParts) -> Result<Self, EngineError> {
        let (Some(first), false) = (parts.prefill.first(), parts.decode.is_empty()) else {
            let why = "an engine needs at least one prefill and one decode worker".to_owned();
            return Err(EngineError::Config(why));
        };
        let info = first.runner.info().clone();
        let terms = Self { first: first.name.clone(), info, chunk: parts.chunk, answers: parts.answers() };
        parts.prefill.iter().chain(&parts.decode).try_for_each(|worker| terms.check(worker))?;
        Ok(terms)
    }

    fn check(&self, worker: &EngineWorker) -> Result<(), EngineError> {
        let refuse = |why: String| Err(EngineError::Config(why));
        let Self { first, info, chunk, .. } = self;
        let (name, other) = (&worker.name, worker.runner.info());
        if let Some((setting, here, there)) = info.fingerprint.difference(&other.fingerprint) {
            return refuse(format!(
                "{first} and {name} can not exchange sequences: {setting} is {here} in one and {there} in the other; set \
                 it alike for all workers"
            ));
        }
        if other.n_ctx_slot != info.n_ctx_slot {
            return refuse(format!(
                "a slot of {first} holds {} tokens and one of {name} holds {}: give all workers the same context a slot",
                info.n_ctx_slot, other.n_ctx_slot
            ));
        }
        if *chunk == 0 || *chunk > other.n_batch {
            return refuse(format!("chunks of {chunk} tokens do not fit the batches of {name}, {}", other.n_batch));
        }
        Ok(())
    }
}
