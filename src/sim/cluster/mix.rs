//! Which recorded request comes next: in the trace's order, or drawn by the mix of domains of the moment.
//!
//! Never looks at picks; a request's domain is its label.

use std::{collections::BTreeMap, f64::consts::TAU};

use super::{Drift, PrefixSharing, Scenario, drawing::Drawing};
use crate::{rng::Rng, types::Request};

/// Times another request is drawn in place of one that is in the system.
const REDRAWS: usize = 16;

/// Draws requests with replacement, and knows which are in the system.
pub(super) struct Mix {
    rng: Rng,
    /// Positions of the recorded requests of each domain, domains by name.
    pools: Vec<Vec<u32>>,
    weights: Vec<f64>,
    drift: Option<Drift>,
    prefix: Option<PrefixSharing>,
    /// The domain of each shared prefix.
    prefix_domain: Vec<usize>,
    /// In the trace's order.
    order: Option<Vec<u32>>,
    n_drawn: usize,
    domain_of: Vec<usize>,
    n_live: Vec<u32>,
    n_copies: u64,
}

/// What comes.
pub(super) struct Draw {
    pub drawing: Drawing,
    /// The shared prefix it begins with.
    pub group: Option<u32>,
}

impl Mix {
    /// Draws from the requests at `served`, of those recorded.
    pub fn new<'a>(scenario: &Scenario, recorded: impl Iterator<Item = &'a Request>, served: &[usize]) -> Self {
        let labels: Vec<Option<&str>> = recorded.map(|request| request.domain.as_deref()).collect();
        let mut pools: BTreeMap<Option<&str>, Vec<u32>> = BTreeMap::new();
        for &at in served {
            pools.entry(labels[at]).or_default().push(at as u32);
        }
        let weight = |label: Option<&str>, n: usize| {
            let own = label.and_then(|label| scenario.mix.get(label)).copied().unwrap_or(0.0);
            if scenario.mix.is_empty() { n as f64 } else { own }
        };
        let weights = pools.iter().map(|(&label, pool)| weight(label, pool.len())).collect();
        let domain_of = labels.iter().map(|label| pools.keys().position(|known| known == label).unwrap_or(0)).collect();
        let n_domains = pools.len();
        let groups = scenario.prefix.map_or(0, |prefix| prefix.groups) as usize;
        Self {
            rng: Rng::new(scenario.seed ^ 0x006d_6978),
            pools: pools.into_values().collect(),
            weights,
            drift: scenario.drift,
            prefix: scenario.prefix,
            prefix_domain: (0..groups).map(|group| group % n_domains.max(1)).collect(),
            order: scenario.in_order.then(|| served.iter().map(|&at| at as u32).collect()),
            n_drawn: 0,
            domain_of,
            n_live: vec![0; labels.len()],
            n_copies: 0,
        }
    }

    /// The request that comes at `now` seconds; it is in the system from now on.
    pub fn take(&mut self, now: f64) -> Draw {
        let index = match &self.order {
            Some(order) => order[self.n_drawn % order.len()],
            None => self.draw(now),
        };
        self.n_drawn += 1;
        let live = &mut self.n_live[index as usize];
        let is_copy = *live > 0;
        *live += 1;
        self.n_copies += u64::from(is_copy);
        let group = self.group(index);
        Draw { drawing: Drawing { index, shares: group.is_some(), is_copy }, group }
    }

    /// A request has left the system.
    pub fn give_back(&mut self, index: u32) {
        self.n_live[index as usize] -= 1;
    }

    /// Times a request came while a copy of it was in the system.
    pub fn n_copies(&self) -> u64 {
        self.n_copies
    }

    /// The recorded request whose beginning is the shared prefix `group`.
    pub fn prefix_source(&self, group: u32) -> u32 {
        let pool = &self.pools[self.prefix_domain[group as usize]];
        pool[group as usize / self.pools.len() % pool.len()]
    }

    fn draw(&mut self, now: f64) -> u32 {
        let n = self.pools.len();
        let weight = |domain: usize| {
            let drift = self.drift.map_or(1.0, |drift| {
                1.0 + drift.amplitude * (TAU * (now / drift.period + domain as f64 / n as f64)).sin()
            });
            self.weights[domain] * drift
        };
        let all: f64 = (0..n).map(weight).sum();
        let mut left = self.rng.uniform() * all;
        let domain = (0..n).find(|&domain| {
            left -= weight(domain);
            left < 0.0
        });
        let heaviest = || (0..n).max_by(|&a, &b| weight(a).total_cmp(&weight(b))).expect("there are requests");
        let domain = domain.unwrap_or_else(heaviest);
        let pool = &self.pools[domain];
        let mut index = pool[self.rng.below(pool.len())];
        for _ in 0..REDRAWS {
            if self.n_live[index as usize] == 0 {
                break;
            }
            index = pool[self.rng.below(pool.len())];
        }
        index
    }

    /// A prefix of the request's own domain, where there is one.
    fn group(&mut self, index: u32) -> Option<u32> {
        let prefix = self.prefix?;
        if self.rng.uniform() >= prefix.share {
            return None;
        }
        let domain = self.domain_of[index as usize];
        let own = || (0..prefix.groups).filter(|&group| self.prefix_domain[group as usize] == domain);
        match own().count() {
            0 => Some(self.rng.below(prefix.groups as usize) as u32),
            n => {
                let nth = self.rng.below(n);
                own().nth(nth)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::SamplingParams;

    fn recorded(n: usize) -> Vec<Request> {
        let request = |at: usize| Request {
            prompt: vec![0],
            max_tokens: 2,
            sampling: SamplingParams::default(),
            domain: Some(["code", "math"][at % 2].to_owned()),
            deadline: None,
        };
        (0..n).map(request).collect()
    }

    fn mix(scenario: &Scenario, n: usize) -> Mix {
        Mix::new(scenario, recorded(n).iter(), &(0..n).collect::<Vec<_>>())
    }

    /// Of how many draws at `now` the domain is the first.
    fn share(mix: &mut Mix, now: f64) -> f64 {
        let draws: Vec<u32> = (0..4000).map(|_| mix.take(now).drawing.index).collect();
        for &index in &draws {
            mix.give_back(index);
        }
        draws.iter().filter(|&index| index % 2 == 0).count() as f64 / draws.len() as f64
    }

    #[test]
    fn weights_and_their_drift_are_kept() {
        let skewed = Scenario { mix: [("code".into(), 3.0), ("math".into(), 1.0)].into(), ..Scenario::default() };
        assert!((share(&mut mix(&skewed, 200), 0.0) - 0.75).abs() < 0.03);
        let drift = Some(Drift { period: 100.0, amplitude: 1.0 });
        let mut drifting = mix(&Scenario { drift, ..Scenario::default() }, 200);
        assert!(share(&mut drifting, 25.0) > 0.97 && share(&mut drifting, 75.0) < 0.03);
        assert!((share(&mut drifting, 0.0) - 0.5).abs() < 0.03);
    }

    #[test]
    fn copies_are_avoided_while_others_are_left_and_counted_when_not() {
        let mut few = mix(&Scenario::default(), 6);
        let copies = (0..12).filter(|_| few.take(0.0).drawing.is_copy).count();
        assert_eq!((copies as u64, few.n_copies()), (few.n_copies(), few.n_copies()));
        assert!((6..=8).contains(&copies), "{copies}");
        let mut in_order = mix(&Scenario { in_order: true, ..Scenario::default() }, 3);
        let indices: Vec<u32> = (0..5).map(|_| in_order.take(0.0).drawing.index).collect();
        assert_eq!((indices, in_order.n_copies()), (vec![0, 1, 2, 0, 1], 2));
    }

    #[test]
    fn prefixes_are_of_the_requests_domain() {
        let prefix = Some(PrefixSharing { groups: 4, tokens: 32, share: 0.5, cache_tokens: 0 });
        let mut mix = mix(&Scenario { prefix, ..Scenario::default() }, 100);
        let draws: Vec<Draw> = (0..400).map(|_| mix.take(0.0)).collect();
        let sharing: Vec<&Draw> = draws.iter().filter(|draw| draw.drawing.shares).collect();
        assert!((150..250).contains(&sharing.len()), "{}", sharing.len());
        assert!(sharing.iter().all(|draw| draw.group.is_some_and(|group| group % 2 == draw.drawing.index % 2)));
        assert!((0..4).all(|group| mix.prefix_source(group) % 2 == group % 2));
    }
}
