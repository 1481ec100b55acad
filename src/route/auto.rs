//! Which policy to serve with where none was asked for, and why not a better one.
//!
//! Never builds it or logs; whoever does shows the reason.

use crate::route::PolicyKind;

/// What is known when a policy must be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AutoFacts {
    /// The model has experts.
    pub has_experts: bool,
    /// Decode workers.
    pub n_workers: usize,
    /// Requests that wait may overtake one another, so that there is something to choose on one worker.
    pub may_overtake: bool,
    /// There is a calibration.
    pub is_calibrated: bool,
    /// What it says of itself: whether locality helps; nothing if it does not say.
    pub helps: Option<bool>,
}

/// Why `auto` is less than it could be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepDown {
    /// The model is dense.
    Dense,
    /// The calibration says that locality does not help.
    NoHelp,
    /// There is no calibration, so no centroids.
    NoCalibration,
    /// One worker gets every request.
    OneWorker,
}

impl StepDown {
    /// The reason and what it means, in one sentence without a full stop.
    pub const fn sentence(self) -> &'static str {
        match self {
            Self::Dense => "the model is dense, so there is no expert locality: requests are routed by load",
            Self::NoHelp => "the calibration says that locality does not help: requests are routed by load",
            Self::NoCalibration => {
                "there is no calibration, so requests are routed by marginal_cost without centroids: one from `eldr \
                 calibrate` adds them"
            }
            Self::OneWorker => "there is one decode worker, so there is nothing to route",
        }
    }
}

/// [`PolicyKind::Auto`] as a policy: the marginal cost, with centroids where there is a calibration, or the least loaded
/// worker where there is nothing to gain; and what it steps down for.
pub fn choose(facts: &AutoFacts) -> (PolicyKind, Option<StepDown>) {
    match facts {
        AutoFacts { has_experts: false, .. } => (PolicyKind::LeastLoaded, Some(StepDown::Dense)),
        AutoFacts { n_workers: 1, may_overtake: false, .. } => (PolicyKind::LeastLoaded, Some(StepDown::OneWorker)),
        AutoFacts { helps: Some(false), .. } => (PolicyKind::LeastLoaded, Some(StepDown::NoHelp)),
        AutoFacts { is_calibrated: false, .. } => (PolicyKind::MarginalCost, Some(StepDown::NoCalibration)),
        _ => (PolicyKind::MarginalCost, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_down_for_the_first_reason() {
        let best =
            AutoFacts { has_experts: true, n_workers: 8, may_overtake: false, is_calibrated: true, helps: Some(true) };
        let (load, cost) = (PolicyKind::LeastLoaded, PolicyKind::MarginalCost);
        for (facts, want) in [
            (best, (cost, None)),
            (AutoFacts { helps: None, ..best }, (cost, None)),
            (AutoFacts { is_calibrated: false, helps: None, ..best }, (cost, Some(StepDown::NoCalibration))),
            (AutoFacts { helps: Some(false), ..best }, (load, Some(StepDown::NoHelp))),
            (AutoFacts { n_workers: 1, ..best }, (load, Some(StepDown::OneWorker))),
            (AutoFacts { n_workers: 1, may_overtake: true, ..best }, (cost, None)),
            (AutoFacts { has_experts: false, is_calibrated: false, ..best }, (load, Some(StepDown::Dense))),
        ] {
            assert_eq!(choose(&facts), want, "{facts:?}");
        }
    }
}
