use std::time::Duration;

use crate::refit::Reads;

/// When centroids are checked and fitted again. The default suits a few to some dozens of workers.
#[derive(Debug, Clone, PartialEq)]
pub struct RefitConfig {
    /// Signatures kept at most. Each takes 4 bytes times N* times E: 1024 of 10 layers x 128 experts are 5 MB.
    pub max_signatures: usize,
    /// Signatures older than this are forgotten.
    pub max_age: Duration,
    /// Shortest time between two checks.
    pub min_interval: Duration,
    /// New signatures a check waits for; it also waits for eight a worker.
    pub min_fresh: usize,
    /// A fit is made when the newest signatures' similarity is this far below what was expected.
    pub drift: f64,
    /// New centroids are set when they raise the similarity of signatures they were not cut from by more than this and
    /// by more than chance would.
    pub margin: f64,
    /// Searches when centroids are cut anew.
    pub n_restarts: u32,
    /// Assignment steps a search takes at most.
    pub max_iterations: u32,
    /// Seed of the searches.
    pub seed: u64,
    /// One decode step in so many tells which experts it read, to be shown beside what was expected; none does if 0.
    pub sample_decode: u32,
    /// What decode steps were expected to read; none is what the calibration's verdict found.
    pub expected_reads: Option<Reads>,
}

/// Fewest new signatures a worker, so that every second one still leaves a few a worker on either side.
const FRESH_PER_WORKER: usize = 8;

impl Default for RefitConfig {
    fn default() -> Self {
        Self {
            max_signatures: 1024,
            max_age: Duration::from_secs(300),
            min_interval: Duration::from_secs(2),
            min_fresh: 64,
            drift: 0.04,
            margin: 0.005,
            n_restarts: 4,
            max_iterations: 30,
            seed: 1,
            sample_decode: 64,
            expected_reads: None,
        }
    }
}

impl RefitConfig {
    /// New signatures a check of `n_workers` workers waits for.
    pub fn n_fresh(&self, n_workers: usize) -> usize {
        self.min_fresh.max(FRESH_PER_WORKER * n_workers)
    }

    /// Every number that can not work with `n_workers` workers, each in a sentence; nothing if all can.
    pub fn problems(&self, n_workers: usize) -> Vec<String> {
        let mut problems = Vec::new();
        let mut rule = |holds: bool, why: String| {
            if !holds {
                problems.push(why);
            }
        };
        let n_fresh = self.n_fresh(n_workers);
        rule(
            self.max_signatures >= n_fresh,
            format!(
                "refit keeps {} signatures, but a check with {n_workers} workers needs {n_fresh}: keep at least as many",
                self.max_signatures
            ),
        );
        rule(!self.max_age.is_zero(), "refit forgets every signature at once: give a longest age above 0".to_owned());
        for (name, value) in [("drift", self.drift), ("margin", self.margin)] {
            let why =
                format!("refit's {name} is {value}, but a difference of cosine similarities lies between 0 and 2");
            rule((0.0..=2.0).contains(&value), why);
        }
        rule(self.n_restarts > 0, "refit makes no search: allow at least one".to_owned());
        rule(self.max_iterations > 0, "refit may take no assignment step: allow at least one".to_owned());
        let sound = |n: f64| n.is_finite() && n > 0.0;
        let reads = self.expected_reads.is_none_or(|reads| sound(reads.distinct) && sound(reads.batch));
        rule(reads, "refit's expected experts and batch must be numbers above 0".to_owned());
        problems
    }
}

/// Why centroids can not be refitted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RefitError {
    /// A setting that can not work.
    #[error("{0}")]
    Config(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_works_and_every_wrong_number_is_named() {
        assert_eq!(RefitConfig::default().problems(16), Vec::<String>::new());
        let wrong = RefitConfig {
            max_signatures: 10,
            max_age: Duration::ZERO,
            drift: f64::NAN,
            margin: -1.0,
            n_restarts: 0,
            max_iterations: 0,
            expected_reads: Some(Reads { distinct: 0.0, batch: 1.0 }),
            ..RefitConfig::default()
        };
        let problems = wrong.problems(2);
        assert_eq!(problems.len(), 7, "{problems:#?}");
        assert!(problems[0].contains("keeps 10 signatures") && problems[0].contains("needs 64"), "{}", problems[0]);
    }

    #[test]
    fn many_workers_need_a_longer_window() {
        let problems = RefitConfig::default().problems(200);
        assert!(problems[0].contains("200 workers needs 1600"), "{problems:?}");
    }
}
