use std::{sync::Arc, thread::JoinHandle, time::Duration};

use crossbeam::channel::unbounded;

use crate::{
    engine::{
        EngineError, EngineWorker, N_PREFILL_PARALLEL, Permits, PrefixTiers, RestoreRates, Shared,
        timed::TimedRunner,
        worker::{Scheduler, spawn_worker, thread},
    },
    schedule::{Answers, DecodeWorker, PrefillWorker, PrefixConfig, PrefixStore, Recovery, RunnerInfo, Source},
    types::Token,
};

/// How often a device that may fail is looked at.
const LOOK: Duration = Duration::from_millis(100);
/// Looks between two attempts to bring a failed one back.
const LOOKS_AN_ATTEMPT: u32 = 10;
/// Looks that requests wait for one to come back where no other worker is left.
const PATIENCE: u32 = 600;

/// What a worker's state machine is made of, for the first and for those that come back.
pub(super) struct Schedulers {
    pub chunk: u32,
    pub eog: Vec<Token>,
    pub n_expert: u32,
    pub prefix: PrefixConfig,
    pub tiers: Option<PrefixTiers>,
    pub rates: RestoreRates,
    pub answers: Option<Answers>,
}

impl Schedulers {
    /// A state machine without requests.
    pub fn make(&self, source: Source, info: &RunnerInfo) -> Scheduler {
        let Self { chunk, eog, n_expert, prefix, tiers, answers, .. } = self;
        match source {
            Source::Prefill(_) => {
                let worker = PrefillWorker::new(info, *chunk, N_PREFILL_PARALLEL, eog, *n_expert);
                let store = tiers.clone().map(|tiers| Box::new(tiers) as Box<dyn PrefixStore>);
                Scheduler::Prefill(Box::new(worker.caching(*prefix, info, *n_expert).spilling(store)))
            }
            Source::Decode(_) => {
                Scheduler::Decode(Box::new(DecodeWorker::new(info, *chunk, eog).returning(answers.clone())))
            }
        }
    }

    /// The worker, its imports timed and, of a prefill worker, what it takes to compute and to restore.
    pub fn timed(&self, source: Source, worker: EngineWorker, shared: &Shared) -> EngineWorker {
        let (times, rates) = match source {
            Source::Prefill(_) => (&shared.restore_times, Some(self.rates.clone())),
            Source::Decode(_) => (&shared.handoff_times, None),
        };
        let EngineWorker { name, runner, permits } = worker;
        EngineWorker { name, runner: Box::new(TimedRunner { runner, times: Arc::clone(times), rates }), permits }
    }
}

/// One worker whose device may fail, and what it takes to start it again.
pub(super) struct Watch {
    pub shared: Arc<Shared>,
    pub source: Source,
    pub name: String,
    pub permits: Option<Arc<Permits>>,
    pub recovery: Arc<dyn Recovery>,
    pub schedulers: Arc<Schedulers>,
}

impl Watch {
    /// Watches in a thread of its own, which ends with the engine.
    pub fn start(self) -> Result<JoinHandle<()>, EngineError> {
        self.shared.set_patient(true);
        let name = format!("watch {}", self.name);
        thread(&name, move || self.run())
    }

    fn run(mut self) {
        let mut revived = Vec::new();
        let mut n_looks = 0u32;
        while !self.shared.is_stopped() {
            std::thread::sleep(LOOK);
            let Some(reason) = self.recovery.failure() else { continue };
            let is_empty = self.shared.lose(self.source, &reason);
            n_looks = n_looks.saturating_add(1);
            if n_looks == PATIENCE {
                self.shared.set_patient(false);
            }
            if !is_empty || n_looks % LOOKS_AN_ATTEMPT != 1 {
                continue;
            }
            match self.revive() {
                Ok(thread) => {
                    log::warn!("{} is back", self.name);
                    revived.push(thread);
                    self.shared.set_patient(true);
                    n_looks = 0;
                }
                Err(error) => log::debug!("{} does not come back yet: {error}", self.name),
            }
        }
        for thread in revived {
            if thread.join().is_err() {
                log::error!("the thread of {} panicked outside a step", self.name);
            }
        }
    }

    fn revive(&mut self) -> Result<JoinHandle<()>, String> {
        let runner = self.recovery.revive()?;
        if let Some(recovery) = runner.recovery() {
            self.recovery = recovery;
        }
        let scheduler = self.schedulers.make(self.source, runner.info());
        let worker = EngineWorker { name: self.name.clone(), runner, permits: self.permits.clone() };
        let worker = self.schedulers.timed(self.source, worker, &self.shared);
        let (to, inbox) = unbounded();
        let thread = spawn_worker(&self.shared, self.source, worker, scheduler, inbox);
        let thread = thread.map_err(|error| error.to_string())?;
        self.shared.revive(self.source, to);
        Ok(thread)
    }
}
