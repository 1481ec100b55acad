//! Requests whose mix of domains is not the calibrated one, or changes as they come.
//!
//! Never looks at picks; a request's domain is its label.

use std::collections::BTreeMap;

use crate::{rng::Rng, sim::folds::shuffle, trace::Trace};

/// How a workload mixes its domains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Traffic {
    /// Equal parts, as calibrated.
    Matched,
    /// 45, 30, 15 and 10 of 100 (with other numbers of domains, parts of the same kind).
    Skewed,
    /// Skewed, and half-way skewed the other way round.
    Step,
    /// From one end of the domains slowly to the other.
    Turnover,
    /// Equal parts, but the calibration has not seen the first domain.
    NewDomain,
    /// The first domain alone.
    OneDomain,
    /// Equal parts, but many of one domain come in a row.
    Runs,
}

/// Requests of one domain in a row, in [`Traffic::Runs`].
const RUN: usize = 48;

impl Traffic {
    /// All there are.
    pub const ALL: [Self; 7] =
        [Self::Matched, Self::Skewed, Self::Step, Self::Turnover, Self::NewDomain, Self::OneDomain, Self::Runs];

    /// Its name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Matched => "matched",
            Self::Skewed => "skewed",
            Self::Step => "step",
            Self::Turnover => "turnover",
            Self::NewDomain => "new_domain",
            Self::OneDomain => "one_domain",
            Self::Runs => "runs",
        }
    }

    /// Splits a trace for this traffic: positions to calibrate on, `n_fit` of each domain, and the `n_served` positions of
    /// a run over the others, in order and with repetitions. Which domain is the first is drawn too.
    ///
    /// Requests without a domain, or without a decode step, take no part.
    pub fn split(self, trace: &Trace, n_fit: usize, n_served: usize, seed: u64) -> (Vec<usize>, Vec<usize>) {
        let mut rng = Rng::new(seed);
        let mut of_domain: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (at, request) in trace.requests.iter().enumerate() {
            if let Some(domain) = request.domain.as_deref()
                && request.n_steps(&trace.header) > 0
            {
                of_domain.entry(domain).or_default().push(at);
            }
        }
        let mut domains: Vec<Vec<usize>> = of_domain.into_values().collect();
        let mut turn: Vec<usize> = (0..domains.len()).collect();
        shuffle(&mut turn, &mut rng);
        domains = turn.into_iter().map(|at| std::mem::take(&mut domains[at])).collect();
        for requests in &mut domains {
            shuffle(requests, &mut rng);
        }
        let mut fit = Vec::new();
        let mut serve: Vec<Vec<usize>> = Vec::new();
        for (nth, requests) in domains.into_iter().enumerate() {
            let (own, rest) = requests.split_at(n_fit.min(requests.len() / 2));
            if nth > 0 || self != Self::NewDomain {
                fit.extend(own);
            }
            serve.push(rest.to_vec());
        }
        fit.sort_unstable();
        let mut taken = vec![0usize; serve.len()];
        let served = (0..n_served).map(|i| {
            let domain = self.draw(i as f64 / n_served as f64, i, serve.len(), &mut rng);
            let n = serve[domain].len();
            if taken[domain].is_multiple_of(n) {
                shuffle(&mut serve[domain], &mut rng);
            }
            taken[domain] += 1;
            serve[domain][(taken[domain] - 1) % n]
        });
        let served = served.collect();
        (fit, served)
    }

    /// The domain of the `i`-th request, when a share `time` of all have come.
    fn draw(self, time: f64, i: usize, n: usize, rng: &mut Rng) -> usize {
        let skewed = |d: usize| [45.0, 30.0, 15.0, 10.0].get(d).copied().unwrap_or(10.0);
        let weight = |d: usize| match self {
            Self::Matched | Self::NewDomain | Self::Runs => 1.0,
            Self::Skewed => skewed(d),
            Self::Step if time < 0.5 => skewed(d),
            Self::Step => skewed(n - 1 - d),
            Self::Turnover => (1.0 - (time * (n - 1) as f64 - d as f64).abs()).max(0.0) + 0.05,
            Self::OneDomain => f64::from(u8::from(d == 0)),
        };
        if self == Self::Runs {
            return i / RUN % n;
        }
        let all: f64 = (0..n).map(weight).sum();
        let mut left = rng.uniform() * all;
        for d in 0..n {
            left -= weight(d);
            if left < 0.0 {
                return d;
            }
        }
        n - 1
    }
}
