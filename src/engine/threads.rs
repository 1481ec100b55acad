use std::{sync::Arc, thread::available_parallelism};

use crate::engine::{EngineError, Permits};

/// Threads of a worker that computes while no other does: all cores but one.
///
/// ggml's threads spin until the last of them is there, so one that has to share its core with another program stalls
/// them all. The spare core is for that program.
pub fn threads_alone() -> u32 {
    n_cores().saturating_sub(1).max(1)
}

fn n_cores() -> u32 {
    available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX))
}

/// How the cores are divided among the CPU workers, so that the threads computing at once never pass them.
#[derive(Debug, Clone)]
pub struct ThreadPlan {
    /// Threads of each worker.
    pub n_threads: u32,
    /// The workers' turns.
    pub permits: Arc<Permits>,
}

impl ThreadPlan {
    /// A plan for `n_workers` CPU workers of `n_threads` threads each; 0 divides the cores among them.
    pub fn new(n_threads: u32, n_workers: usize) -> Result<Self, EngineError> {
        Self::on(n_cores(), n_threads, n_workers)
    }

    /// As [`ThreadPlan::new`], on the cores that `n_pinned` pinned ones leave.
    #[cfg(feature = "llama")]
    pub(super) fn beside(n_pinned: u32, n_threads: u32, n_workers: usize) -> Result<Self, EngineError> {
        let n_cores = n_cores();
        if n_pinned >= n_cores && n_workers > 0 {
            return Err(EngineError::Config(format!(
                "workers are pinned to all {n_cores} cores, and {n_workers} more are to compute on the CPU: pin those too, \
                 or leave them a core"
            )));
        }
        Self::on(n_cores.saturating_sub(n_pinned).max(1), n_threads, n_workers)
    }

    fn on(n_cores: u32, n_threads: u32, n_workers: usize) -> Result<Self, EngineError> {
        if n_threads > n_cores {
            return Err(EngineError::Config(format!(
                "{n_threads} threads a worker on {n_cores} cores would run many times slower, not faster: ask for at \
                 most {n_cores}"
            )));
        }
        let n_threads = match n_threads {
            0 => (n_cores / u32::try_from(n_workers).unwrap_or(u32::MAX).max(1)).max(1),
            n => n,
        };
        Ok(Self { n_threads, permits: Arc::new(Permits::new((n_cores / n_threads) as usize)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_at_once_never_pass_the_cores() {
        for n_cores in 1..9 {
            for n_workers in 0..12 {
                for n_threads in 0..=n_cores {
                    let plan = ThreadPlan::on(n_cores, n_threads, n_workers).expect("fits");
                    assert!(plan.n_threads >= 1);
                    assert!(plan.n_threads * (plan.permits.n_at_once() as u32) <= n_cores);
                }
            }
        }
        let error = ThreadPlan::on(2, 3, 1).expect_err("too many").to_string();
        assert!(error.contains("3 threads") && error.contains("2 cores"), "{error}");
    }
}
