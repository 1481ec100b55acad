use std::collections::VecDeque;

use crate::{rng::Rng, sim::folds::shuffle};

/// In which order requests are drawn from those given, again and again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// As given: for a mix of requests that changes with time.
    Given,
    /// As given, but one that is still in the system is passed over until it has ended.
    Passing,
    /// In a fresh order each time round. One that is still in the system is passed over until it has ended, because a
    /// request beside its own copy would share more experts than any two real ones do.
    Shuffled {
        /// Seed of the orders.
        seed: u64,
    },
}

/// Draws requests, and knows which are in the system.
pub(super) struct Draws<'a> {
    requests: &'a [usize],
    order: Order,
    rng: Rng,
    queue: VecDeque<usize>,
    /// Times each request of the trace is in the system.
    n_live: Vec<u32>,
    n_repeats: u64,
}

impl<'a> Draws<'a> {
    /// Draws from `requests`, which is not empty, positions in a trace of `n_recorded`.
    pub fn new(requests: &'a [usize], order: Order, n_recorded: usize) -> Self {
        let seed = if let Order::Shuffled { seed } = order { seed } else { 0 };
        Self { requests, order, rng: Rng::new(seed), queue: VecDeque::new(), n_live: vec![0; n_recorded], n_repeats: 0 }
    }

    /// The next request, which is in the system from now on.
    pub fn take(&mut self) -> usize {
        let drawn = if self.order == Order::Given { None } else { self.take_idle() };
        let request = drawn.unwrap_or_else(|| {
            if self.queue.is_empty() {
                self.queue.extend(self.requests);
            }
            self.queue.pop_front().expect("there are requests")
        });
        self.n_repeats += u64::from(self.n_live[request] > 0);
        self.n_live[request] += 1;
        request
    }

    /// A request has left the system.
    pub fn give_back(&mut self, request: usize) {
        self.n_live[request] -= 1;
    }

    /// Times a request was drawn while it was in the system.
    pub fn n_repeats(&self) -> u64 {
        self.n_repeats
    }

    /// The first in line that is not in the system; nothing if all are.
    fn take_idle(&mut self) -> Option<usize> {
        let at = self.idle().or_else(|| {
            self.refill();
            self.idle()
        })?;
        self.queue.remove(at)
    }

    fn idle(&self) -> Option<usize> {
        self.queue.iter().position(|&request| self.n_live[request] == 0)
    }

    /// The queue holds fewer than two rounds, however long its requests stay in the system.
    fn refill(&mut self) {
        if self.queue.len() < self.requests.len() {
            let mut round = self.requests.to_vec();
            if let Order::Shuffled { .. } = self.order {
                shuffle(&mut round, &mut self.rng);
            }
            self.queue.extend(round);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn as_given_again_and_again() {
        let mut draws = Draws::new(&[4, 2, 4], Order::Given, 5);
        let got: Vec<usize> = (0..7).map(|_| draws.take()).collect();
        assert_eq!(got, [4, 2, 4, 4, 2, 4, 4]);
        assert_eq!(draws.n_repeats(), 5);
    }

    #[test]
    fn a_request_never_meets_itself_while_others_are_left() {
        let requests: Vec<usize> = (0..12).collect();
        let mut draws = Draws::new(&requests, Order::Shuffled { seed: 3 }, 12);
        let mut live = VecDeque::new();
        let mut n_drawn = [0u32; 12];
        for _ in 0..600 {
            if live.len() == 9 {
                draws.give_back(live.pop_front().expect("nine"));
            }
            let request = draws.take();
            assert!(!live.contains(&request), "{request} in {live:?}");
            live.push_back(request);
            n_drawn[request] += 1;
        }
        assert_eq!(draws.n_repeats(), 0);
        assert!(n_drawn.iter().all(|n| n.abs_diff(50) <= 1), "{n_drawn:?}");
    }

    #[test]
    fn passing_keeps_the_order_but_for_those_in_the_system() {
        let mut draws = Draws::new(&[0, 0, 1, 2], Order::Passing, 3);
        let got: Vec<usize> = (0..3).map(|_| draws.take()).collect();
        assert_eq!(got, [0, 1, 2]);
        draws.give_back(0);
        assert_eq!((draws.take(), draws.n_repeats()), (0, 0));
    }

    #[test]
    fn when_all_are_in_the_system_the_first_in_line_comes_twice() {
        let mut draws = Draws::new(&[0, 1, 2], Order::Shuffled { seed: 3 }, 3);
        let got: Vec<usize> = (0..9).map(|_| draws.take()).collect();
        assert_eq!(got[..3].iter().collect::<BTreeSet<_>>().len(), 3);
        assert_eq!(draws.n_repeats(), 6);
        assert!(draws.queue.len() < 6);
    }
}
