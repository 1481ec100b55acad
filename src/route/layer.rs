//! What a policy around another policy passes on: everything, but for what it is there to change.
//!
//! Never decides.

use std::sync::Arc;

use ndarray::Array2;

use crate::{
    route::{Decision, Relief, RouteBuildError, RouteError, RoutePolicy, RouteRequest, WorkerView},
    types::{RequestId, WorkerId},
};

/// A [`RoutePolicy`] around another one, which gets every call that the layer does not take for itself.
///
/// Here and not in [`RoutePolicy`]'s defaults, because those are for policies that do not need to be told: a layer that
/// forgot to pass a call on would silently make the policy inside blind.
///
/// ```
/// use eldr::{
///     Decision, RoutePolicy,
///     route::{LeastLoaded, PolicyLayer, RouteError, RouteRequest, WorkerView},
///     types::WorkerId,
/// };
///
/// /// Counts the decisions of the policy inside.
/// struct Counted(Box<dyn RoutePolicy>, u64);
///
/// impl PolicyLayer for Counted {
///     fn inner(&self) -> &dyn RoutePolicy {
///         &*self.0
///     }
///
///     fn inner_mut(&mut self) -> &mut dyn RoutePolicy {
///         &mut *self.0
///     }
///
///     fn select(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
///         self.1 += 1;
///         self.0.select(request, workers)
///     }
/// }
///
/// let mut policy = Counted(Box::new(LeastLoaded), 0);
/// let workers = [WorkerView { id: WorkerId(0), n_slots: 1, n_inflight: 0, healthy: true }];
/// RoutePolicy::select(&mut policy, &RouteRequest::default(), &workers).expect("room");
/// assert_eq!((policy.name(), policy.1), ("least_loaded", 1));
/// ```
pub trait PolicyLayer: Send {
    /// The policy around which this one stands.
    fn inner(&self) -> &dyn RoutePolicy;

    /// The same, to ask it.
    fn inner_mut(&mut self) -> &mut dyn RoutePolicy;

    /// See [`RoutePolicy::select`].
    fn select(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
        self.inner_mut().select(request, workers)
    }
}

#[deny(clippy::missing_trait_methods, reason = "a default here would be a call not passed on")]
impl<L: PolicyLayer> RoutePolicy for L {
    fn name(&self) -> &'static str {
        self.inner().name()
    }

    fn select(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
        PolicyLayer::select(self, request, workers)
    }

    fn set_centroids(&mut self, centroids: &Arc<Array2<f32>>) -> Result<(), RouteBuildError> {
        self.inner_mut().set_centroids(centroids)
    }

    fn replace_centroids(&mut self, centroids: &Arc<Array2<f32>>) -> Result<(), RouteBuildError> {
        self.inner_mut().replace_centroids(centroids)
    }

    fn cost(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Option<f64> {
        self.inner_mut().cost(request, workers)
    }

    fn placed(&mut self, request: &RouteRequest<'_>, worker: WorkerId) {
        self.inner_mut().placed(request, worker);
    }

    fn left(&mut self, id: RequestId, worker: WorkerId) {
        self.inner_mut().left(id, worker);
    }

    fn stepped(&mut self, worker: WorkerId, n_batch: u32, time: f64) {
        self.inner_mut().stepped(worker, n_batch, time);
    }

    fn feedback(&self) -> u32 {
        self.inner().feedback()
    }

    fn picked(&mut self, id: RequestId, worker: WorkerId, experts: &[u32]) {
        self.inner_mut().picked(id, worker, experts);
    }

    fn relief(&mut self, workers: &[WorkerView], stall: f64) -> Option<Relief> {
        self.inner_mut().relief(workers, stall)
    }

    fn moved(&mut self, id: RequestId, n_tokens: u32, from: WorkerId, to: WorkerId) {
        self.inner_mut().moved(id, n_tokens, from, to);
    }

    fn step_time_error(&self) -> Option<f64> {
        self.inner().step_time_error()
    }
}
