//! The closed list of policies: their names, what they need, how they are built.
//!
//! Never routes; it is the one place that turns a name into a policy.

use std::{fmt, str::FromStr, sync::Arc};

use ndarray::Array2;
use serde::{Deserialize, Serialize};

use crate::{
    route::{
        Domain, LeastLoaded, LocalityBand, LocalityBandParams, MarginalCost, MarginalCostParams, PowerOfTwo, Random,
        RoundRobin, RouteBuildError, RoutePolicy, StepTime,
    },
    types::{MoeShape, shown},
};

/// A routing policy, by its name in the command line, configuration and JSON.
///
/// ```
/// use eldr::{
///     PolicyKind,
///     route::{ParsePolicyError, PolicyParams, RouteBuildError},
/// };
///
/// let kind: PolicyKind = "marginal_cost".parse()?;
/// assert_eq!(kind.build(&PolicyParams::new(8)).expect("it needs no calibration").name(), "marginal_cost");
/// let missing = PolicyKind::LocalityBand.build(&PolicyParams::new(8)).err();
/// assert!(matches!(missing, Some(RouteBuildError::NoCentroids { .. })));
/// assert_eq!(PolicyKind::parse_list("random,locality_band")?.len(), 2);
/// assert!("fastest".parse::<PolicyKind>().unwrap_err().to_string().contains("the policies are round_robin"));
/// # Ok::<(), ParsePolicyError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyKind {
    /// [`RoundRobin`]
    RoundRobin,
    /// [`Random`]
    Random,
    /// [`LeastLoaded`]
    LeastLoaded,
    /// [`PowerOfTwo`]
    PowerOfTwo,
    /// [`Domain`]
    Domain,
    /// [`LocalityBand`]
    LocalityBand,
    /// [`MarginalCost`]
    MarginalCost,
    /// The best that can be had: see [`crate::route::choose`]. An engine resolves it; built as it is, it is the marginal
    /// cost, or for a dense model the least loaded worker.
    Auto,
}

/// What the policies are built from; each takes what it needs.
#[derive(Debug, Clone)]
pub struct PolicyParams {
    /// Seed of the draws.
    pub seed: u64,
    /// Decode workers.
    pub n_workers: usize,
    /// Width of the locality band.
    pub tau: f32,
    /// Fewest workers of the locality band.
    pub min_band: u32,
    /// One unit vector a worker (K rows of N* times E), from a calibration.
    pub centroids: Option<Arc<Array2<f32>>>,
    /// The workload's domains, for the oracle.
    pub domains: Vec<String>,
    /// The model's experts, to predict picks; none for a dense model.
    pub shape: Option<MoeShape>,
    /// How the marginal cost is weighed.
    pub marginal: MarginalCostParams,
    /// What steps take, if that is known before the first: the marginal cost else learns it from [`StepTime::preset`] on.
    pub step_time: Option<StepTime>,
}

impl PolicyParams {
    /// The paper's band, seed 0, no calibration, no domains and no experts.
    pub fn new(n_workers: usize) -> Self {
        let LocalityBandParams { tau, min_band } = LocalityBandParams::default();
        Self {
            seed: 0,
            n_workers,
            tau,
            min_band,
            centroids: None,
            domains: Vec::new(),
            shape: None,
            marginal: MarginalCostParams::default(),
            step_time: None,
        }
    }
}

impl PolicyKind {
    /// Every policy, baselines first; [`PolicyKind::Auto`] is one of these.
    pub const ALL: [Self; 7] = [
        Self::RoundRobin,
        Self::Random,
        Self::LeastLoaded,
        Self::PowerOfTwo,
        Self::Domain,
        Self::LocalityBand,
        Self::MarginalCost,
    ];

    /// The policy's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round_robin",
            Self::Random => "random",
            Self::LeastLoaded => "least_loaded",
            Self::PowerOfTwo => "power_of_two",
            Self::Domain => "domain",
            Self::LocalityBand => "locality_band",
            Self::MarginalCost => "marginal_cost",
            Self::Auto => "auto",
        }
    }

    /// Whether the policy can not be built without centroids.
    pub const fn needs_calibration(self) -> bool {
        matches!(self, Self::LocalityBand)
    }

    /// Whether the policy compares signatures with centroids, where there are some.
    pub const fn uses_centroids(self) -> bool {
        matches!(self, Self::LocalityBand | Self::MarginalCost | Self::Auto)
    }

    /// Whether the policy looks at the counts of every usable layer, not of a calibration's mask alone.
    pub const fn uses_counts(self) -> bool {
        matches!(self, Self::MarginalCost | Self::Auto)
    }

    /// Whether the policy is one of the four load balancers the paper compares with.
    pub const fn is_load_balancer(self) -> bool {
        matches!(self, Self::RoundRobin | Self::Random | Self::LeastLoaded | Self::PowerOfTwo)
    }

    /// A policy of this kind, in its first state.
    ///
    /// # Errors
    /// No workers, centroids that do not fit the workers, and for the locality band: no centroids.
    pub fn build(self, params: &PolicyParams) -> Result<Box<dyn RoutePolicy>, RouteBuildError> {
        if params.n_workers == 0 {
            return Err(RouteBuildError::NoWorkers);
        }
        Ok(match self {
            Self::RoundRobin => Box::new(RoundRobin::default()),
            Self::Random => Box::new(Random::new(params.seed)),
            Self::LeastLoaded => Box::new(LeastLoaded),
            Self::Auto if params.shape.is_none() => Box::new(LeastLoaded),
            Self::PowerOfTwo => Box::new(PowerOfTwo::new(params.seed)),
            Self::Domain => Box::new(Domain::new(&params.domains, params.n_workers)),
            Self::LocalityBand => {
                let centroids = params.centroids.clone().ok_or(RouteBuildError::NoCentroids { policy: self.name() })?;
                let band = LocalityBandParams { tau: params.tau, min_band: params.min_band };
                Box::new(LocalityBand::new(centroids, params.n_workers, band)?)
            }
            Self::MarginalCost | Self::Auto => {
                let mut policy = MarginalCost::new(params.shape.as_ref(), params.n_workers, params.marginal);
                if let Some(known) = params.step_time {
                    policy = policy.with_step_time(known);
                }
                Box::new(match &params.centroids {
                    Some(centroids) => policy.with_centroids(Arc::clone(centroids))?,
                    None => policy,
                })
            }
        })
    }

    /// The policies of a list such as `round_robin,locality_band`, in its order; `all` is every policy.
    ///
    /// # Errors
    /// An unknown name, a name given twice, and an empty list.
    pub fn parse_list(list: &str) -> Result<Vec<Self>, ParsePolicyError> {
        if list.trim() == "all" {
            return Ok(Self::ALL.to_vec());
        }
        let mut kinds = Vec::new();
        for name in list.split(',') {
            let kind: Self = name.trim().parse()?;
            if kind == Self::Auto {
                return Err(ParsePolicyError::Auto);
            }
            if kinds.contains(&kind) {
                return Err(ParsePolicyError::Repeated(kind.name()));
            }
            kinds.push(kind);
        }
        Ok(kinds)
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = ParsePolicyError;

    fn from_str(name: &str) -> Result<Self, ParsePolicyError> {
        let unknown = || ParsePolicyError::Unknown(name.to_owned());
        Self::ALL.into_iter().chain([Self::Auto]).find(|kind| kind.name() == name).ok_or_else(unknown)
    }
}

/// Why a name or list is not a policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParsePolicyError {
    /// No policy has this name.
    #[error("unknown policy '{}'; the policies are {known}", shown(.0), known = known_names())]
    Unknown(String),
    /// A list is for comparing policies.
    #[error("auto is a choice among the policies; name those to compare: {known}", known = known_names())]
    Auto,
    /// A list names a policy twice.
    #[error("policy {0} is listed twice; name each policy once")]
    Repeated(&'static str),
}

fn known_names() -> String {
    PolicyKind::ALL.map(PolicyKind::name).join(", ")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        rng::Rng,
        route::{Decision, RouteError, RouteRequest, WorkerView},
        signature::Signature,
        types::{RequestId, WorkerId},
    };

    const DIM: usize = 24;

    fn signature(rng: &mut Rng) -> Signature {
        Signature::normalised((0..DIM).map(|_| rng.uniform() as f32 + 1e-6).collect()).expect("not all zero")
    }

    fn params(seed: u64, n_workers: usize) -> PolicyParams {
        let mut rng = Rng::new(seed ^ 1);
        let flat: Vec<f32> = (0..n_workers).flat_map(|_| signature(&mut rng).as_slice().to_vec()).collect();
        let centroids = Array2::from_shape_vec((n_workers, DIM), flat).expect("K rows");
        PolicyParams {
            seed,
            centroids: Some(Arc::new(centroids)),
            domains: ["code", "math", "law"].map(String::from).to_vec(),
            ..PolicyParams::new(n_workers)
        }
    }

    /// Routes `n` requests to workers that fill, empty, get lost and come back; returns every answer.
    fn run(kind: PolicyKind, seed: u64, n_workers: usize, n: usize) -> Vec<Result<Decision, RouteError>> {
        let mut policy = kind.build(&params(seed, n_workers)).expect("valid parameters");
        assert_eq!(policy.name(), kind.name());
        let mut rng = Rng::new(seed);
        let mut workers: Vec<WorkerView> = (0..n_workers)
            .map(|id| WorkerView {
                id: WorkerId(id as u32),
                n_slots: 1 + rng.below(4) as u32,
                n_inflight: 0,
                healthy: true,
            })
            .collect();
        let mut answers = Vec::new();
        for _ in 0..n {
            let signature = (rng.below(8) > 0).then(|| signature(&mut rng));
            let domain = [None, Some("code"), Some("law"), Some("art")][rng.below(4)];
            let before = workers.clone();
            let id = RequestId(answers.len() as u64);
            let request = RouteRequest { id, signature: signature.as_ref(), domain, ..RouteRequest::default() };
            let answer = policy.select(&request, &workers);
            match &answer {
                Ok(decision) => {
                    policy.placed(&request, decision.worker);
                    let chosen = &mut workers[decision.worker.index()];
                    assert!(chosen.eligible(), "{kind} chose {chosen:?}");
                    assert_eq!(decision.n_inflight, chosen.n_inflight);
                    let n_eligible = before.iter().filter(|worker| worker.eligible()).count();
                    assert!((1..=n_eligible).contains(&(decision.band as usize)), "{decision:?} of {n_eligible}");
                    chosen.n_inflight += 1;
                }
                Err(error) => {
                    assert!(before.iter().all(|worker| !worker.eligible()), "{kind} refused {before:?}");
                    assert_eq!(*error == RouteError::NoWorker, before.iter().all(|worker| !worker.healthy));
                }
            }
            let worker = &mut workers[rng.below(n_workers)];
            match rng.below(4) {
                0 => worker.n_inflight = worker.n_inflight.saturating_sub(2),
                1 => worker.healthy = !worker.healthy,
                _ => {}
            }
            answers.push(answer);
        }
        answers
    }

    proptest! {
        #[test]
        fn no_policy_chooses_a_worker_without_room(seed: u64, n_workers in 1usize..10) {
            for kind in PolicyKind::ALL {
                run(kind, seed, n_workers, 60);
            }
        }

        #[test]
        fn the_same_calls_and_seed_give_the_same_decisions(seed: u64, n_workers in 1usize..10) {
            for kind in PolicyKind::ALL {
                prop_assert_eq!(run(kind, seed, n_workers, 30), run(kind, seed, n_workers, 30));
            }
        }
    }

    #[test]
    fn a_thousand_workers_are_routed_to() {
        for kind in PolicyKind::ALL {
            let answers = run(kind, 9, 1000, 3000);
            let mut chosen: Vec<u32> = answers.iter().flatten().map(|decision| decision.worker.0).collect();
            chosen.sort_unstable();
            chosen.dedup();
            assert!(chosen.len() > 300, "{kind} used {} of 1000 workers for 3000 requests", chosen.len());
        }
    }

    #[test]
    fn names_are_the_same_everywhere() {
        for kind in PolicyKind::ALL.into_iter().chain([PolicyKind::Auto]) {
            assert_eq!(kind.to_string().parse(), Ok(kind));
            assert_eq!(serde_json::to_string(&kind).expect("json"), format!("\"{kind}\""));
        }
    }

    #[test]
    fn lists_are_read_and_bad_ones_refused_in_a_sentence() {
        use PolicyKind::{LocalityBand, RoundRobin};
        assert_eq!(PolicyKind::parse_list("all"), Ok(PolicyKind::ALL.to_vec()));
        assert_eq!(PolicyKind::parse_list("locality_band, round_robin"), Ok(vec![LocalityBand, RoundRobin]));
        let message = |list| PolicyKind::parse_list(list).expect_err("a bad list").to_string();
        assert_eq!(
            message("round_robin,fastest"),
            "unknown policy 'fastest'; the policies are round_robin, random, least_loaded, power_of_two, domain, \
             locality_band, marginal_cost"
        );
        assert!(message("random,auto").starts_with("auto is a choice among the policies"));
        assert!(message("").starts_with("unknown policy ''"));
        assert_eq!(message("random,random"), "policy random is listed twice; name each policy once");
    }

    #[test]
    fn what_is_missing_is_named() {
        let error = |kind: PolicyKind, params: &PolicyParams| kind.build(params).err().map(|error| error.to_string());
        let bare = PolicyParams::new(4);
        for kind in PolicyKind::ALL {
            assert_eq!(error(kind, &bare).is_some(), kind.needs_calibration(), "{kind}");
            assert!(error(kind, &PolicyParams { n_workers: 0, ..bare.clone() }).is_some(), "{kind}");
        }
        let other = PolicyParams { n_workers: 3, ..params(1, 4) };
        let message = error(PolicyKind::LocalityBand, &other).expect("4 centroids for 3 workers");
        assert!(message.starts_with("the calibration has 4 centroids for 3 decode workers"), "{message}");
    }
}
