//! Requests that wait for a prefill worker, in the order they get one.
//!
//! Never lets anybody starve: every n-th turn is the oldest's, whatever its priority.

use std::collections::VecDeque;

use crate::{schedule::Job, types::RequestId};

/// Which requests go first in the queue for a prefill worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Priority {
    /// Before all normal ones, but for every fourth turn.
    High,
    /// In turn.
    #[default]
    Normal,
}

/// Of so many turns, one is the oldest request's.
const FAIR_TURN: u64 = 4;

/// A queue with two priorities, and a place before both for requests that had their turn already.
#[derive(Debug, Default)]
pub(super) struct PromptQueue {
    /// Given back by a worker: their turn has been.
    returned: VecDeque<Job>,
    high: VecDeque<(u64, Job)>,
    normal: VecDeque<(u64, Job)>,
    n_joined: u64,
    n_turns: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lane {
    Returned,
    High,
    Normal,
}

impl PromptQueue {
    pub(super) fn push(&mut self, job: Job, priority: Priority) {
        let lane = match priority {
            Priority::High => &mut self.high,
            Priority::Normal => &mut self.normal,
        };
        lane.push_back((self.n_joined, job));
        self.n_joined += 1;
    }

    /// Puts a request before all others.
    pub(super) fn push_front(&mut self, job: Job) {
        self.returned.push_front(job);
    }

    /// Whose turn it is.
    pub(super) fn front(&self) -> Option<&Job> {
        match self.lane() {
            Lane::Returned => self.returned.front(),
            Lane::High => self.high.front().map(|(_, job)| job),
            Lane::Normal => self.normal.front().map(|(_, job)| job),
        }
    }

    /// Takes the one whose turn it is.
    pub(super) fn pop_front(&mut self) -> Option<Job> {
        let lane = match self.lane() {
            Lane::Returned => return self.returned.pop_front(),
            Lane::High => &mut self.high,
            Lane::Normal => &mut self.normal,
        };
        let (_, job) = lane.pop_front()?;
        self.n_turns += 1;
        Some(job)
    }

    pub(super) fn remove(&mut self, id: RequestId) {
        self.returned.retain(|job| job.id != id);
        self.high.retain(|(_, job)| job.id != id);
        self.normal.retain(|(_, job)| job.id != id);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Job> {
        self.returned.iter().chain(self.high.iter().chain(&self.normal).map(|(_, job)| job))
    }

    pub(super) fn len(&self) -> usize {
        self.returned.len() + self.high.len() + self.normal.len()
    }

    fn lane(&self) -> Lane {
        if !self.returned.is_empty() {
            return Lane::Returned;
        }
        let Some((joined, _)) = self.high.front() else { return Lane::Normal };
        let is_fair = self.n_turns % FAIR_TURN == FAIR_TURN - 1;
        match self.normal.front() {
            Some((earlier, _)) if is_fair && earlier < joined => Lane::Normal,
            _ => Lane::High,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::types::{Request, SamplingParams};

    fn job(id: u64) -> Job {
        let sampling = SamplingParams::default();
        let request = Request { prompt: vec![1], max_tokens: 1, sampling, domain: None, deadline: None };
        Job::new(RequestId(id), Arc::new(request))
    }

    fn order(mut queue: PromptQueue) -> Vec<u64> {
        std::iter::from_fn(|| queue.pop_front()).map(|job| job.id.0).collect()
    }

    #[test]
    fn high_ones_go_first_and_every_fourth_turn_is_the_oldests() {
        let mut queue = PromptQueue::default();
        (0..3).for_each(|id| queue.push(job(id), Priority::Normal));
        (10..16).for_each(|id| queue.push(job(id), Priority::High));
        queue.push_front(job(20));
        queue.remove(RequestId(12));
        assert_eq!((queue.len(), queue.iter().count()), (9, 9));
        assert_eq!(order(queue), [20, 10, 11, 13, 0, 14, 15, 1, 2]);
    }

    #[test]
    fn equals_go_in_turn() {
        for priority in [Priority::High, Priority::Normal] {
            let mut queue = PromptQueue::default();
            (0..9).for_each(|id| queue.push(job(id), priority));
            assert_eq!(order(queue), (0..9).collect::<Vec<_>>());
        }
    }

    proptest! {
        #[test]
        fn the_n_th_in_line_has_gone_after_four_times_n_turns(high in prop::collection::vec(any::<bool>(), 1..60)) {
            let mut queue = PromptQueue::default();
            let mut due = std::collections::BTreeMap::new();
            let mut n_turns = 0u64;
            for (id, high) in (0u64..).zip(high) {
                // Two join for one that leaves, so that high ones never run out.
                for (id, priority) in [(2 * id, Priority::High), (2 * id + 1, if high { Priority::High } else { Priority::Normal })] {
                    due.insert(id, n_turns + FAIR_TURN * (queue.len() as u64 + 1));
                    queue.push(job(id), priority);
                }
                let front = queue.front().map(|job| job.id);
                let taken = queue.pop_front().map(|job| job.id);
                prop_assert_eq!(front, taken);
                n_turns += 1;
                let due = due.remove(&taken.expect("one that waits").0).expect("known");
                prop_assert!(n_turns <= due);
            }
            prop_assert!(due.values().filter(|&&due| due <= n_turns).count() == 0);
        }
    }
}
