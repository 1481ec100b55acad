//! The policy in use, and others that single requests may ask for.
//!
//! Never books a slot: the dispatcher does, and tells all of them.

use std::{collections::BTreeMap, convert::Infallible, sync::Arc, time::Duration};

use ndarray::Array2;

use crate::{
    route::{Decision, PolicyKind, Relief, RouteBuildError, RouteError, RoutePolicy, RouteRequest, WorkerView},
    schedule::{Command, Dispatcher, Priority, QueueFull, StepPicks},
    types::{Request, RequestId, WorkerId},
};

/// How a request is treated on its way, beside what it asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SubmitParams {
    /// In the queue for a prefill worker.
    pub priority: Priority,
    /// Chooses its decode worker instead of the policy in use; it must have been lent
    /// ([`crate::schedule::Dispatcher::lend_policy`]).
    pub policy: Option<PolicyKind>,
    /// Its whole prompt is computed, whatever a worker holds of it.
    pub fresh: bool,
}

/// The policy of all requests that ask for no other, and those that were asked for.
pub(super) struct Policies {
    main: Box<dyn RoutePolicy>,
    lent: BTreeMap<PolicyKind, Box<dyn RoutePolicy>>,
    /// The last centroids, for policies that are lent later.
    centroids: Option<Arc<Array2<f32>>>,
    /// They may be of other layers than those a policy is made with.
    replaced: bool,
}

impl Policies {
    pub fn new(main: Box<dyn RoutePolicy>) -> Self {
        Self { main, lent: BTreeMap::new(), centroids: None, replaced: false }
    }

    pub fn lend(&mut self, kind: PolicyKind, mut policy: Box<dyn RoutePolicy>) -> Result<(), RouteBuildError> {
        if let Some(centroids) = &self.centroids {
            if self.replaced {
                policy.replace_centroids(centroids)?;
            } else {
                policy.set_centroids(centroids)?;
            }
        }
        self.lent.insert(kind, policy);
        Ok(())
    }

    pub fn lends(&self, kind: PolicyKind) -> bool {
        self.lent.contains_key(&kind)
    }

    pub fn name(&self) -> &'static str {
        self.main.name()
    }

    /// By policy `kind`, which is lent, or by the one in use.
    pub fn select(
        &mut self,
        kind: Option<PolicyKind>,
        request: &RouteRequest<'_>,
        workers: &[WorkerView],
    ) -> Result<Decision, RouteError> {
        match kind.and_then(|kind| self.lent.get_mut(&kind)) {
            Some(policy) => policy.select(request, workers),
            None => self.main.select(request, workers),
        }
    }

    pub fn cost(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Option<f64> {
        self.main.cost(request, workers)
    }

    pub fn set_centroids(&mut self, centroids: &Arc<Array2<f32>>) -> Result<(), RouteBuildError> {
        self.each(|policy| policy.set_centroids(centroids))?;
        self.centroids = Some(Arc::clone(centroids));
        Ok(())
    }

    pub fn replace_centroids(&mut self, centroids: &Arc<Array2<f32>>) -> Result<(), RouteBuildError> {
        self.each(|policy| policy.replace_centroids(centroids))?;
        (self.centroids, self.replaced) = (Some(Arc::clone(centroids)), true);
        Ok(())
    }

    pub fn placed(&mut self, request: &RouteRequest<'_>, worker: WorkerId) {
        self.all(|policy| policy.placed(request, worker));
    }

    pub fn left(&mut self, id: RequestId, worker: WorkerId) {
        self.all(|policy| policy.left(id, worker));
    }

    pub fn stepped(&mut self, worker: WorkerId, n_batch: u32, took: Duration) {
        self.all(|policy| policy.stepped(worker, n_batch, took.as_secs_f64()));
    }

    fn picked(&mut self, worker: WorkerId, requests: &[RequestId], picks: &StepPicks) {
        for (item, &id) in requests.iter().enumerate() {
            self.all(|policy| policy.picked(id, worker, picks.item(item)));
        }
    }

    pub fn relief(&mut self, workers: &[WorkerView], stall: Duration) -> Option<Relief> {
        self.main.relief(workers, stall.as_secs_f64())
    }

    pub fn moved(&mut self, id: RequestId, n_tokens: u32, from: WorkerId, to: WorkerId) {
        self.all(|policy| policy.moved(id, n_tokens, from, to));
    }

    pub fn step_time_error(&self) -> Option<f64> {
        self.main.step_time_error()
    }

    fn all(&mut self, mut tell: impl FnMut(&mut dyn RoutePolicy)) {
        let Ok(()) = self.each(|policy| {
            tell(policy);
            Ok::<_, Infallible>(())
        });
    }

    fn each<E>(&mut self, mut act: impl FnMut(&mut dyn RoutePolicy) -> Result<(), E>) -> Result<(), E> {
        act(self.main.as_mut())?;
        self.lent.values_mut().try_for_each(|policy| act(policy.as_mut()))
    }
}

impl Dispatcher {
    /// As [`Dispatcher::submit_with`], with no params of its own.
    pub fn submit(
        &mut self,
        id: RequestId,
        request: Arc<Request>,
        now: Duration,
        commands: &mut Vec<Command>,
    ) -> Result<(), QueueFull> {
        self.submit_with(SubmitParams::default(), id, request, now, commands)
    }

    /// As [`Dispatcher::submit_with`], with a priority in the queue for a prefill worker.
    pub fn submit_as(
        &mut self,
        priority: Priority,
        id: RequestId,
        request: Arc<Request>,
        now: Duration,
        commands: &mut Vec<Command>,
    ) -> Result<(), QueueFull> {
        self.submit_with(SubmitParams { priority, ..SubmitParams::default() }, id, request, now, commands)
    }

    /// Tells the policy that a decode worker ran a step of `n_batch` sequences in `took`; to be told before the step's
    /// events, and only of steps that took no sequence in.
    pub fn stepped(&mut self, worker: WorkerId, n_batch: u32, took: Duration) {
        self.policies.stepped(worker, n_batch, took);
    }

    /// As [`RoutePolicy::feedback`], of the policy in use.
    pub fn feedback(&self) -> u32 {
        self.policies.main.feedback()
    }

    /// Tells the policy what the `requests` of a decode step picked, in the order of `picks`.
    pub fn picked(&mut self, worker: WorkerId, requests: &[RequestId], picks: &StepPicks) {
        self.policies.picked(worker, requests, picks);
    }

    /// As [`RoutePolicy::step_time_error`].
    pub fn step_time_error(&self) -> Option<f64> {
        self.policies.step_time_error()
    }

    /// Lets requests ask for a policy of this kind from now on. It must know of the sequences that run
    /// ([`RoutePolicy::placed`]); of those to come it is told.
    ///
    /// # Errors
    /// One that the last centroids do not fit is refused.
    pub fn lend_policy(&mut self, kind: PolicyKind, policy: Box<dyn RoutePolicy>) -> Result<(), RouteBuildError> {
        self.policies.lend(kind, policy)
    }

    /// Whether requests may ask for a policy of this kind.
    pub fn lends_policy(&self, kind: PolicyKind) -> bool {
        self.policies.lends(kind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::{LeastLoaded, LocalityBand, LocalityBandParams, RoundRobin};

    fn workers() -> Vec<WorkerView> {
        (0..3).map(|id| WorkerView { id: WorkerId(id), n_slots: 4, n_inflight: id, healthy: true }).collect()
    }

    #[test]
    fn a_request_is_placed_by_the_policy_it_asked_for() {
        let mut policies = Policies::new(Box::new(LeastLoaded));
        policies.lend(PolicyKind::RoundRobin, Box::new(RoundRobin::default())).expect("no centroids to fit");
        let mut choose = |kind| {
            let request = RouteRequest::default();
            policies.select(kind, &request, &workers()).expect("all have room").worker.0
        };
        let asked = Some(PolicyKind::RoundRobin);
        assert_eq!([choose(asked), choose(None), choose(asked), choose(None), choose(asked)], [0, 0, 1, 0, 2]);
        assert_eq!(choose(Some(PolicyKind::Random)), 0, "one that was not lent is the one in use");
        assert_eq!((policies.name(), policies.lends(PolicyKind::Random)), ("least_loaded", false));
    }

    #[test]
    fn a_policy_lent_late_gets_the_last_centroids() {
        let band = |rows: usize| {
            let centroids = Arc::new(Array2::eye(rows));
            LocalityBand::new(centroids, rows, LocalityBandParams::default()).expect("unit rows")
        };
        let mut policies = Policies::new(Box::new(band(3)));
        policies.set_centroids(&Arc::new(Array2::eye(3))).expect("as wide");
        let refused = policies.lend(PolicyKind::LocalityBand, Box::new(band(2)));
        assert!(matches!(refused, Err(RouteBuildError::Width { .. })), "{refused:?}");
        assert_eq!(policies.lend(PolicyKind::LocalityBand, Box::new(band(3))), Ok(()));
    }
}
