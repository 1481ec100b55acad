//! The sequences that the decode workers hold, the experts their prompts picked, and the policies that place them.
//!
//! Never waits for a worker: it is what the workers were given.

use std::sync::Arc;

use crate::{
    engine::{Engine, EngineError, Shared},
    route::{PolicyKind, PolicyParams, RoutePolicy, RouteRequest},
    schedule::Handoff,
    signature::ExpertCounts,
    types::{RequestId, WorkerId},
};

/// Makes a policy of a kind for requests that ask for it, or says why there is none.
pub type PolicyBuilder = Box<dyn Fn(PolicyKind) -> Result<Box<dyn RoutePolicy>, String> + Send>;

/// A sequence that a decode worker was given and has not ended.
///
/// ```
/// # mod fake {
/// #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_engine.rs"));
/// # }
///
/// use eldr::{
///     EngineError, PolicyKind, StreamEvent,
///     engine::Resident,
///     schedule::{Priority, SubmitParams},
///     types::{Request, SamplingParams},
/// };
///
/// # fn main() -> Result<(), EngineError> {
/// let engine = fake::engine();
/// let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::default() };
/// let request = Request { prompt: vec![1, 2, 3], max_tokens: 1000, sampling, domain: None, deadline: None };
/// // Before others in the queue, and by a policy of its own.
/// let how = SubmitParams { priority: Priority::High, policy: Some(PolicyKind::RoundRobin), ..SubmitParams::default() };
/// let mut stream = engine.submit_with(request, how)?;
/// while let Some(event) = stream.next() {
///     if let StreamEvent::Routed { decision, .. } = event {
///         // The worker has it for as long as it decodes.
///         for (id, Resident { worker, n_tokens, .. }) in engine.residents() {
///             assert_eq!((id, worker), (stream.id(), decision.worker));
///             assert!(n_tokens > 3, "the prompt and what prefill drew");
///         }
///         break;
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Resident {
    /// Which worker.
    pub worker: WorkerId,
    /// Tokens it brought.
    pub n_tokens: u32,
    /// The experts its prompt picked; none where prefill workers count none.
    pub counts: Option<Arc<ExpertCounts>>,
}

impl Resident {
    pub(super) fn new(worker: WorkerId, handoff: &Handoff) -> Self {
        Self { worker, n_tokens: handoff.job.n_tokens(), counts: handoff.counts.clone().map(Arc::new) }
    }
}

/// The policies that an engine can lend.
#[derive(Debug)]
pub(super) struct Lent {
    pub params: PolicyParams,
    /// Prefill workers count the experts of every usable layer.
    pub counts_all: bool,
    /// Prefill workers count the experts of the calibration's layers.
    pub counts_mask: bool,
}

impl Lent {
    /// Those that need nothing but the workers' loads.
    pub fn load_balancers(n_workers: usize) -> Self {
        Self { params: PolicyParams::new(n_workers), counts_all: false, counts_mask: false }
    }

    pub fn builder(self) -> PolicyBuilder {
        Box::new(move |kind| {
            if kind.needs_calibration() && self.params.centroids.is_none() {
                return Err(format!(
                    "there is no calibration, which policy {kind} needs; start with --policy {kind} --calibration FILE"
                ));
            }
            if (kind.uses_counts() && !self.counts_all) || (kind.needs_calibration() && !self.counts_mask) {
                return Err(format!(
                    "the prefill workers do not count the experts that policy {kind} compares; start with --policy {kind}"
                ));
            }
            kind.build(&self.params).map_err(|error| error.to_string())
        })
    }
}

impl Engine {
    /// What the decode workers hold, oldest request first. Never waits for a worker.
    pub fn residents(&self) -> Vec<(RequestId, Resident)> {
        self.shared().residents()
    }

    /// Sees to it that a request may ask for a policy of this kind ([`Engine::submit_with`]); the policy in use stays.
    ///
    /// # Errors
    /// One that needs what the workers of this engine do not count is refused.
    pub fn lend_policy(&self, kind: PolicyKind) -> Result<(), EngineError> {
        self.shared().lend_policy(kind).map_err(EngineError::Config)
    }

    /// Makes policies that are lent by `build`, instead of load balancers only.
    #[must_use]
    pub fn lending(self, build: PolicyBuilder) -> Self {
        self.shared().state.lock().build_policy = build;
        self
    }
}

impl Shared {
    fn residents(&self) -> Vec<(RequestId, Resident)> {
        self.state.lock().residents.iter().map(|(&id, resident)| (id, resident.clone())).collect()
    }

    pub(super) fn policy_name(&self) -> &'static str {
        self.state.lock().dispatcher.policy_name()
    }

    pub(super) fn policy_note(&self) -> Option<String> {
        self.state.lock().policy_note.clone()
    }

    #[cfg(feature = "llama")]
    pub(super) fn set_policy_note(&self, note: Option<String>) {
        self.state.lock().policy_note = note;
    }

    fn lend_policy(&self, kind: PolicyKind) -> Result<(), String> {
        let mut state = self.state.lock();
        if state.dispatcher.lends_policy(kind) {
            return Ok(());
        }
        let mut policy = (state.build_policy)(kind)?;
        for (&id, resident) in &state.residents {
            let counts = resident.counts.as_deref();
            policy.placed(
                &RouteRequest { id, counts, n_tokens: resident.n_tokens, ..RouteRequest::default() },
                resident.worker,
            );
        }
        state.dispatcher.lend_policy(kind, policy).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_lent_where_what_they_compare_is_counted() {
        let lends = |counts_all, counts_mask, kind: PolicyKind| {
            let params = PolicyParams { centroids: Some(Arc::new(ndarray::Array2::eye(2))), ..PolicyParams::new(2) };
            Lent { params, counts_all, counts_mask }.builder()(kind).map(|policy| policy.name())
        };
        for kind in PolicyKind::ALL {
            let needs_all = kind == PolicyKind::MarginalCost;
            let needs_mask = kind == PolicyKind::LocalityBand;
            assert_eq!(lends(false, false, kind).is_ok(), !needs_all && !needs_mask, "{kind}");
            assert_eq!(lends(false, true, kind).is_ok(), !needs_all, "{kind}");
            assert_eq!(lends(true, true, kind), Ok(kind.name()));
        }
        let why = lends(false, false, PolicyKind::LocalityBand).expect_err("nothing is counted");
        assert!(why.ends_with("start with --policy locality_band"), "{why}");
    }

    // Symptom: without a calibration the advice was to start with --policy locality_band, which then asked for one.
    #[test]
    fn a_policy_that_needs_a_calibration_says_so() {
        let lend = Lent::load_balancers(2).builder();
        let why = lend(PolicyKind::LocalityBand).map(|policy| policy.name()).expect_err("no calibration");
        assert!(why.ends_with("start with --policy locality_band --calibration FILE"), "{why}");
    }
}
