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
/// assert_eq!((RoutePolicy::name(&policy), policy.1), ("least_loaded", 1));
/// ```
pub trait PolicyLayer: Send {
    /// The policy around which this one stands.
    fn inner(&self) -> &dyn RoutePolicy;

    /// The same, to ask it.
    fn inner_mut(&mut self) -> &mut dyn RoutePolicy;

    /// See [`RoutePolicy::name`].
    fn name(&self) -> &'static str {
        self.inner().name()
    }

    /// See [`RoutePolicy::select`].
    fn select(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
        self.inner_mut().select(request, workers)
    }

    /// See [`RoutePolicy::set_centroids`].
    fn set_centroids(&mut self, centroids: &Arc<Array2<f32>>) -> Result<(), RouteBuildError> {
        self.inner_mut().set_centroids(centroids)
    }

    /// See [`RoutePolicy::replace_centroids`].
    fn replace_centroids(&mut self, centroids: &Arc<Array2<f32>>) -> Result<(), RouteBuildError> {
        self.inner_mut().replace_centroids(centroids)
    }

    /// See [`RoutePolicy::cost`].
    fn cost(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Option<f64> {
        self.inner_mut().cost(request, workers)
    }

    /// See [`RoutePolicy::placed`].
    fn placed(&mut self, request: &RouteRequest<'_>, worker: WorkerId) {
        self.inner_mut().placed(request, worker);
    }

    /// See [`RoutePolicy::left`].
    fn left(&mut self, id: RequestId, worker: WorkerId) {
        self.inner_mut().left(id, worker);
    }

    /// See [`RoutePolicy::stepped`].
    fn stepped(&mut self, worker: WorkerId, n_batch: u32, time: f64) {
        self.inner_mut().stepped(worker, n_batch, time);
    }

    /// See [`RoutePolicy::feedback`].
    fn feedback(&self) -> u32 {
        self.inner().feedback()
    }

    /// See [`RoutePolicy::picked`].
    fn picked(&mut self, id: RequestId, worker: WorkerId, experts: &[u32]) {
        self.inner_mut().picked(id, worker, experts);
    }

    /// See [`RoutePolicy::relief`].
    fn relief(&mut self, workers: &[WorkerView], stall: f64) -> Option<Relief> {
        self.inner_mut().relief(workers, stall)
    }

    /// See [`RoutePolicy::moved`].
    fn moved(&mut self, id: RequestId, n_tokens: u32, from: WorkerId, to: WorkerId) {
        self.inner_mut().moved(id, n_tokens, from, to);
    }

    /// See [`RoutePolicy::step_time_error`].
    fn step_time_error(&self) -> Option<f64> {
        self.inner().step_time_error()
    }
}

#[deny(clippy::missing_trait_methods, reason = "a default here would be a call not passed on")]
impl<L: PolicyLayer> RoutePolicy for L {
    fn name(&self) -> &'static str {
        PolicyLayer::name(self)
    }

    fn select(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
        PolicyLayer::select(self, request, workers)
    }

    fn set_centroids(&mut self, centroids: &Arc<Array2<f32>>) -> Result<(), RouteBuildError> {
        PolicyLayer::set_centroids(self, centroids)
    }

    fn replace_centroids(&mut self, centroids: &Arc<Array2<f32>>) -> Result<(), RouteBuildError> {
        PolicyLayer::replace_centroids(self, centroids)
    }

    fn cost(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Option<f64> {
        PolicyLayer::cost(self, request, workers)
    }

    fn placed(&mut self, request: &RouteRequest<'_>, worker: WorkerId) {
        PolicyLayer::placed(self, request, worker);
    }

    fn left(&mut self, id: RequestId, worker: WorkerId) {
        PolicyLayer::left(self, id, worker);
    }

    fn stepped(&mut self, worker: WorkerId, n_batch: u32, time: f64) {
        PolicyLayer::stepped(self, worker, n_batch, time);
    }

    fn feedback(&self) -> u32 {
        PolicyLayer::feedback(self)
    }

    fn picked(&mut self, id: RequestId, worker: WorkerId, experts: &[u32]) {
        PolicyLayer::picked(self, id, worker, experts);
    }

    fn relief(&mut self, workers: &[WorkerView], stall: f64) -> Option<Relief> {
        PolicyLayer::relief(self, workers, stall)
    }

    fn moved(&mut self, id: RequestId, n_tokens: u32, from: WorkerId, to: WorkerId) {
        PolicyLayer::moved(self, id, n_tokens, from, to);
    }

    fn step_time_error(&self) -> Option<f64> {
        PolicyLayer::step_time_error(self)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::route::LeastLoaded;

    /// Writes down what it is asked and told.
    struct Spy(Arc<Mutex<Vec<&'static str>>>);

    impl Spy {
        fn heard(&self, what: &'static str) {
            self.0.lock().expect("one thread").push(what);
        }
    }

    #[deny(clippy::missing_trait_methods, reason = "it must hear every call")]
    impl RoutePolicy for Spy {
        fn name(&self) -> &'static str {
            self.heard("name");
            "spy"
        }

        fn select(&mut self, request: &RouteRequest<'_>, workers: &[WorkerView]) -> Result<Decision, RouteError> {
            self.heard("select");
            LeastLoaded.select(request, workers)
        }

        fn set_centroids(&mut self, _: &Arc<Array2<f32>>) -> Result<(), RouteBuildError> {
            self.heard("set_centroids");
            Ok(())
        }

        fn replace_centroids(&mut self, _: &Arc<Array2<f32>>) -> Result<(), RouteBuildError> {
            self.heard("replace_centroids");
            Ok(())
        }

        fn cost(&mut self, _: &RouteRequest<'_>, _: &[WorkerView]) -> Option<f64> {
            self.heard("cost");
            Some(7.0)
        }

        fn placed(&mut self, _: &RouteRequest<'_>, _: WorkerId) {
            self.heard("placed");
        }

        fn left(&mut self, _: RequestId, _: WorkerId) {
            self.heard("left");
        }

        fn stepped(&mut self, _: WorkerId, _: u32, _: f64) {
            self.heard("stepped");
        }

        fn feedback(&self) -> u32 {
            self.heard("feedback");
            16
        }

        fn picked(&mut self, _: RequestId, _: WorkerId, _: &[u32]) {
            self.heard("picked");
        }

        fn relief(&mut self, _: &[WorkerView], _: f64) -> Option<Relief> {
            self.heard("relief");
            None
        }

        fn moved(&mut self, _: RequestId, _: u32, _: WorkerId, _: WorkerId) {
            self.heard("moved");
        }

        fn step_time_error(&self) -> Option<f64> {
            self.heard("step_time_error");
            Some(0.5)
        }
    }

    struct Plain(Box<dyn RoutePolicy>);

    impl PolicyLayer for Plain {
        fn inner(&self) -> &dyn RoutePolicy {
            &*self.0
        }

        fn inner_mut(&mut self) -> &mut dyn RoutePolicy {
            &mut *self.0
        }
    }

    // Wrapped policies were not told of centroids cut from other layers, nor asked how well they predict: wrappers that
    // passed on call by call had missed those two.
    #[test]
    fn a_layer_that_takes_nothing_for_itself_passes_on_every_call() {
        let log = Arc::default();
        let mut policy: Box<dyn RoutePolicy> = Box::new(Plain(Box::new(Spy(Arc::clone(&log)))));
        let (request, worker, centroids) = (RouteRequest::default(), WorkerId(0), Arc::new(Array2::zeros((1, 1))));
        let workers = [WorkerView { id: worker, n_slots: 1, n_inflight: 0, healthy: true }];
        assert_eq!(policy.name(), "spy");
        assert_eq!(policy.select(&request, &workers).map(|decision| decision.worker), Ok(worker));
        assert_eq!(policy.set_centroids(&centroids), Ok(()));
        assert_eq!(policy.replace_centroids(&centroids), Ok(()));
        assert_eq!(policy.cost(&request, &workers), Some(7.0));
        policy.placed(&request, worker);
        policy.left(request.id, worker);
        policy.stepped(worker, 1, 1.0);
        assert_eq!(policy.feedback(), 16);
        policy.picked(request.id, worker, &[1]);
        assert_eq!(policy.relief(&workers, 1.0), None);
        policy.moved(request.id, 1, worker, worker);
        assert_eq!(policy.step_time_error(), Some(0.5));
        let heard = log.lock().expect("one thread").join(" ");
        let every = "name select set_centroids replace_centroids cost placed left stepped feedback picked relief moved \
                     step_time_error";
        assert_eq!(heard, every);
    }
}
