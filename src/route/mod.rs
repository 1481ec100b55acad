//! Which decode worker a prefilled request goes to, and why.
//!
//! Pure: never counts load itself, books nothing, reads no clock.
//!
//! ```
//! use std::sync::Arc;
//!
//! use eldr::{
//!     route::{
//!         AutoFacts, Domain, LeastLoaded, LocalityBand, LocalityBandParams, Marginal, MarginalCost, MarginalCostParams,
//!         PowerOfTwo, Random, RoundRobin, RoutePolicy, RouteRequest, StepDown, StepLoad, StepTime, StepTimes, WorkerView, choose,
//!     },
//!     signature::{ExpertCounts, Signature},
//!     types::{MoeShape, RequestId, WorkerId},
//! };
//! use ndarray::array;
//!
//! # fn main() -> Result<(), eldr::route::RouteBuildError> {
//! let view = |id, n_inflight| WorkerView { id: WorkerId(id), n_slots: 4, n_inflight, healthy: true };
//! let workers = [view(0, 2), view(1, 1)];
//!
//! // The paper's band: of the workers whose centroid is nearly as like as the best, the one with the fewest requests.
//! let centroids = Arc::new(array![[1.0, 0.0], [0.0, 1.0]]);
//! let signature = Signature::normalised(vec![0.9, 0.8]);
//! let request = RouteRequest { signature: signature.as_ref(), ..RouteRequest::default() };
//! let mut narrow = LocalityBand::new(centroids.clone(), 2, LocalityBandParams { tau: 0.0, min_band: 1 })?;
//! let mut wide = LocalityBand::new(centroids, 2, LocalityBandParams { tau: 0.5, min_band: 1 })?;
//! let worker = |policy: &mut dyn RoutePolicy| policy.select(&request, &workers).expect("room").worker;
//! assert_eq!((worker(&mut narrow), worker(&mut wide)), (WorkerId(0), WorkerId(1)));
//!
//! // The marginal cost: a request joins the batch that reads its experts already.
//! let shape = MoeShape { layers: vec![0, 1], n_layer: 2, n_expert: 8, n_expert_used: 2 };
//! let mut cost = MarginalCost::new(Some(&shape), 2, MarginalCostParams::default());
//! let mut counts = ExpertCounts::for_shape(&shape);
//! counts.add_tokens(4);
//! counts.add(0, &[5, 6, 5, 6, 5, 6, 5, 6]);
//! let asked = |id| RouteRequest { id: RequestId(id), counts: Some(&counts), n_tokens: 4, ..RouteRequest::default() };
//! cost.placed(&asked(0), WorkerId(0));
//! let decision = cost.select(&asked(1), &[view(0, 1), view(1, 1)]).expect("room");
//! let Some(Marginal { added_experts, .. }) = decision.marginal else { panic!("it predicts what it costs") };
//! assert_eq!(decision.worker, WorkerId(0));
//! assert!(added_experts < 3.0, "of the four that it picks");
//! // It learns what a step costs from the steps it is told of.
//! let mut times = StepTimes::new(StepTime::preset(2, 8, 2), 2);
//! times.observe(0, &StepLoad { n_experts: 6.0, n_batch: 2.0, n_context: 100.0 }, 3.0);
//! assert!(times.get(0).fixed > 0.0);
//!
//! // What the paper compares with, and an oracle.
//! let domains = ["code", "law"].map(str::to_owned);
//! let mut others: Vec<Box<dyn RoutePolicy>> = vec![
//!     Box::new(RoundRobin::default()),
//!     Box::new(Random::new(1)),
//!     Box::new(LeastLoaded),
//!     Box::new(PowerOfTwo::new(1)),
//!     Box::new(Domain::new(&domains, 2)),
//! ];
//! assert!(others.iter_mut().all(|policy| policy.select(&request, &workers).is_ok()));
//!
//! // And what `auto` becomes.
//! let facts =
//!     AutoFacts { has_experts: false, n_workers: 2, may_overtake: false, is_calibrated: false, helps: None };
//! assert_eq!(choose(&facts).1, Some(StepDown::Dense));
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod auto;
mod centroids;
mod domain;
mod kind;
mod layer;
mod least_loaded;
mod load;
mod locality_band;
mod marginal_cost;
mod policy;
mod power_of_two;
mod random;
mod round_robin;
mod step_time;
mod survival;

pub use auto::{AutoFacts, StepDown, choose};
pub use domain::Domain;
pub use kind::{ParsePolicyError, PolicyKind, PolicyParams};
pub use layer::PolicyLayer;
pub use least_loaded::LeastLoaded;
pub use locality_band::{LocalityBand, LocalityBandParams};
pub use marginal_cost::{MarginalCost, MarginalCostParams};
pub use policy::{
    Decision, Marginal, Reason, Relief, RouteBuildError, RouteError, RoutePolicy, RouteRequest, WorkerView,
};
pub use power_of_two::PowerOfTwo;
pub use random::Random;
pub use round_robin::RoundRobin;
pub use step_time::{StepLoad, StepTime, StepTimes};
