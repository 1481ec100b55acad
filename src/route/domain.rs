//! The oracle: what routing would gain if every request came with its domain's name.
//!
//! Never guesses a label; it is for comparison, since real requests have none.

use std::ops::Range;

use crate::route::{Decision, Reason, RouteError, RoutePolicy, RouteRequest, WorkerView, load};

/// Gives each domain its own neighbouring workers and takes the least loaded of them.
///
/// The workers are split among the labels in sorted order, in shares that differ by at most one; with more labels than
/// workers, neighbouring labels share one worker. A request whose share is full, or whose label is unknown, goes to the
/// least loaded of all workers.
#[derive(Debug, Clone)]
pub struct Domain {
    labels: Vec<String>,
    n_workers: usize,
}

impl Domain {
    /// Splits workers 0 to `n_workers - 1` among `labels`, whose order and repetitions do not matter.
    pub fn new(labels: &[String], n_workers: usize) -> Self {
        let mut labels = labels.to_vec();
        labels.sort_unstable();
        labels.dedup();
        Self { labels, n_workers }
    }

    /// The positions of the workers set apart for `label`, or nothing if the label is unknown.
    pub fn share(&self, label: &str) -> Option<Range<usize>> {
        let i = self.labels.binary_search_by(|known| known.as_str().cmp(label)).ok()?;
        let start = i * self.n_workers / self.labels.len();
        let end = (i + 1) * self.n_workers / self.labels.len();
        Some(start..end.max(start + 1))
    }
}

impl RoutePolicy for Domain {
    fn name(&self) -> &'static str {
        "domain"
    }

    fn select(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
        if let Some(share) = request.domain.and_then(|label| self.share(label)) {
            let start = workers.partition_point(|worker| worker.id.index() < share.start);
            let end = workers.partition_point(|worker| worker.id.index() < share.end);
            if let Ok((worker, n)) = load::least_loaded(&workers[start..end]) {
                return Ok(load::decide(worker, Reason::Domain, n));
            }
        }
        let (worker, n) = load::least_loaded(workers)?;
        Ok(load::decide(worker, Reason::OutsideDomain, n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::load::tests::loads;

    fn labels(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    fn ask(domain: &str) -> RouteRequest<'_> {
        RouteRequest { domain: Some(domain), ..RouteRequest::default() }
    }

    #[test]
    fn shares_are_neighbours_cover_all_workers_and_differ_by_at_most_one() {
        for n_labels in 1..12 {
            let names: Vec<String> = (0..n_labels).map(|i| format!("d{i:02}")).collect();
            for n_workers in n_labels..40 {
                let policy = Domain::new(&names, n_workers);
                let shares: Vec<_> = names.iter().map(|name| policy.share(name).expect("a known label")).collect();
                assert_eq!((shares[0].start, shares[n_labels - 1].end), (0, n_workers));
                assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start));
                let smallest = n_workers / n_labels;
                assert!(shares.iter().all(|share| share.len() == smallest || share.len() == smallest + 1));
            }
        }
    }

    #[test]
    fn with_more_labels_than_workers_each_label_still_has_one() {
        let policy = Domain::new(&labels(&["e", "a", "c", "b", "d", "a"]), 2);
        let share = |label| policy.share(label).expect("a known label");
        assert_eq!(["a", "b", "c", "d", "e"].map(share), [0..1, 0..1, 0..1, 1..2, 1..2]);
    }

    #[test]
    fn stays_in_the_share_while_it_has_room() {
        let mut policy = Domain::new(&labels(&["math", "code"]), 4);
        let mut workers = loads(&[9, 8, 0, 1]);
        let decision = policy.select(&ask("code"), &workers).expect("room");
        assert_eq!((decision.worker.0, decision.reason, decision.band), (1, Reason::Domain, 2));
        workers[0].healthy = false;
        workers[1].n_inflight = 16;
        let decision = policy.select(&ask("code"), &workers).expect("room");
        assert_eq!((decision.worker.0, decision.reason, decision.band), (2, Reason::OutsideDomain, 2));
    }

    #[test]
    fn a_request_without_a_known_label_goes_by_load() {
        let workers = loads(&[9, 8, 0, 1]);
        let mut policy = Domain::new(&labels(&["code", "math"]), 4);
        for request in [ask("law"), RouteRequest::default()] {
            let decision = policy.select(&request, &workers).expect("room");
            assert_eq!((decision.worker.0, decision.reason), (2, Reason::OutsideDomain));
        }
        let decision = Domain::new(&[], 4).select(&ask("code"), &workers).expect("room");
        assert_eq!(decision.reason, Reason::OutsideDomain);
        assert_eq!(policy.select(&ask("code"), &loads(&[16; 4])), Err(RouteError::AllFull));
    }
}
