//! The refitter beside the dispatcher, and the thread its fits run on.
//!
//! Never fits under the engine's lock: there it only takes in signatures and hands out jobs.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Weak},
    time::Duration,
};

use crossbeam::channel::{Receiver, Sender, unbounded};
use ndarray::Array2;

use crate::{
    engine::{EngineError, Shared},
    refit::{FitJob, FitResult, Reads, RefitStats, Refitter},
    route::WorkerView,
    schedule::Dispatcher,
    types::WorkerId,
};

/// The refitter of a running engine. Whoever holds the dispatcher holds it too.
pub(super) struct Refit {
    refitter: Refitter,
    /// None once the engine stops.
    jobs: Option<Sender<FitJob>>,
    /// Workers whose share has its weight.
    n_weighed: usize,
}

/// The jobs of a [`Refit`], for its thread.
pub(super) struct Fits(Receiver<FitJob>);

impl Refit {
    pub(super) fn new(refitter: Refitter) -> (Self, Fits) {
        let (jobs, fits) = unbounded();
        (Self { n_weighed: refitter.group().len(), refitter, jobs: Some(jobs) }, Fits(fits))
    }

    /// Takes in what was routed and who is lost, and sends off a check that is due.
    pub(super) fn turn(&mut self, dispatcher: &mut Dispatcher, now: Duration) {
        for signature in dispatcher.take_signatures() {
            self.refitter.observe(signature, now);
        }
        let healthy = dispatcher.workers().iter().filter(|worker| worker.healthy).map(|worker| worker.id);
        if !healthy.clone().eq(self.refitter.group().iter().copied()) {
            let group: Vec<WorkerId> = healthy.collect();
            self.weigh_new(dispatcher.workers());
            let centroids = self.refitter.resize(&group);
            self.set(centroids, dispatcher);
        }
        if let Some(jobs) = &self.jobs
            && let Some(job) = self.refitter.due(now)
            && jobs.send(job).is_err()
        {
            self.refitter.switch_off("the thread that fits is gone");
        }
    }

    /// Gives workers that have joined the weight that their slots have among the others.
    fn weigh_new(&mut self, workers: &[WorkerView]) {
        let (known, new) = workers.split_at(self.n_weighed.min(workers.len()));
        let weights: u64 = known.iter().map(|worker| u64::from(self.refitter.weight(worker.id))).sum();
        let slots: u64 = known.iter().map(|worker| u64::from(worker.n_slots)).sum();
        for worker in new {
            let weight = (u64::from(worker.n_slots) * weights).div_ceil(slots.max(1));
            self.refitter.set_weight(worker.id, u32::try_from(weight).unwrap_or(u32::MAX).max(1));
        }
        self.n_weighed = workers.len();
    }

    /// Takes in the end of a check; nothing if it panicked.
    pub(super) fn end(&mut self, result: Option<FitResult>, dispatcher: &mut Dispatcher) {
        let Some(result) = result else { return self.refitter.switch_off("a fit panicked") };
        let centroids = self.refitter.apply(result);
        self.set(centroids, dispatcher);
    }

    pub(super) fn observe_step(&mut self, reads: Reads) {
        self.refitter.observe_step(reads);
    }

    pub(super) fn stop(&mut self) {
        self.jobs = None;
    }

    pub(super) fn stats(&self) -> RefitStats {
        self.refitter.stats()
    }

    fn set(&mut self, centroids: Option<Arc<Array2<f32>>>, dispatcher: &mut Dispatcher) {
        if let Some(centroids) = centroids
            && let Err(error) = dispatcher.set_centroids(&centroids)
        {
            log::error!("the centroids stay as they are from now on: the policy refused new ones: {error}");
            self.refitter.switch_off(error.to_string());
        }
    }
}

impl Fits {
    /// Starts the thread. It ends by itself when the engine stops; nobody waits for it, since a fit may take seconds.
    pub(super) fn start(self, shared: Weak<Shared>) -> Result<(), EngineError> {
        let no_thread = |error: String| EngineError::Config(format!("no thread could be started for refits: {error}"));
        // One thread, however many cores there are: the others are the workers'.
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).thread_name(|_| "refit pool".to_owned()).build();
        let pool = pool.map_err(|error| no_thread(error.to_string()))?;
        let run = move |job: FitJob| pool.install(|| job.run());
        let end = move |result| {
            if let Some(shared) = shared.upgrade() {
                shared.end_fit(result);
            }
        };
        let thread = std::thread::Builder::new().name("refit".to_owned());
        thread.spawn(move || self.serve(run, end)).map_err(|error| no_thread(error.to_string()))?;
        Ok(())
    }

    /// Runs jobs until there are no more, or one panics.
    fn serve(self, run: impl Fn(FitJob) -> FitResult, end: impl Fn(Option<FitResult>)) {
        while let Ok(job) = self.0.recv() {
            let result = catch_unwind(AssertUnwindSafe(|| run(job))).ok();
            let panicked = result.is_none();
            end(result);
            if panicked {
                log::error!("a fit of the centroids panicked: they stay as they are from now on");
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;
    use crate::{
        refit::RefitConfig,
        route::{LocalityBand, LocalityBandParams},
        schedule::DispatchLimits,
        signature::Signature,
    };

    /// Two workers that serve the axes of a plane, and a check that is due.
    fn ready() -> (Refit, Fits, Dispatcher) {
        let axes = Arc::new(ndarray::array![[1.0f32, 0.0], [0.0, 1.0]]);
        let config = RefitConfig { min_fresh: 16, min_interval: Duration::ZERO, ..RefitConfig::default() };
        let mut refitter = Refitter::new(config, Arc::clone(&axes)).expect("valid");
        for i in 0..16 {
            let signature = Signature::normalised(vec![f32::from(i % 2 == 0), 1.0]).expect("not zero");
            refitter.observe(signature, Duration::ZERO);
        }
        let (refit, fits) = Refit::new(refitter);
        let policy = LocalityBand::new(axes, 2, LocalityBandParams::default()).expect("valid");
        (refit, fits, Dispatcher::new(1, &[4, 4], Box::new(policy), None, DispatchLimits::default()))
    }

    #[test]
    fn a_panic_in_a_fit_switches_refits_off_and_nothing_else() {
        let (mut refit, fits, mut dispatcher) = ready();
        refit.turn(&mut dispatcher, Duration::ZERO);
        let ends = Mutex::new(Vec::new());
        fits.serve(|_| panic!("as scripted"), |result| ends.lock().push(result.is_none()));
        assert_eq!(*ends.lock(), [true]);
        refit.end(None, &mut dispatcher);
        assert_eq!(refit.stats().off.as_deref(), Some("a fit panicked"));
        refit.turn(&mut dispatcher, Duration::from_secs(60));
        assert_eq!((refit.stats().n_checks, refit.stats().n_window), (0, 16));
    }

    #[test]
    fn a_thread_that_is_gone_switches_refits_off() {
        let (mut refit, fits, mut dispatcher) = ready();
        drop(fits);
        refit.turn(&mut dispatcher, Duration::ZERO);
        assert_eq!(refit.stats().off.as_deref(), Some("the thread that fits is gone"));
    }

    #[test]
    fn a_check_that_ends_late_or_never_holds_up_nothing() {
        let (mut refit, fits, mut dispatcher) = ready();
        refit.turn(&mut dispatcher, Duration::ZERO);
        refit.turn(&mut dispatcher, Duration::from_secs(60));
        assert_eq!(fits.0.len(), 1, "one check at a time");
        let result = fits.0.recv().expect("a job").run();
        refit.end(Some(result), &mut dispatcher);
        assert_eq!((refit.stats().n_checks, refit.stats().off), (1, None));
        refit.stop();
        refit.turn(&mut dispatcher, Duration::from_secs(120));
        assert!(fits.0.is_empty());
    }
}
