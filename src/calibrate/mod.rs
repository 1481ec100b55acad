//! From recorded requests to a calibration: idf weights, layer mask, one centroid a decode worker.
//!
//! Never reads a file, runs a model or looks at a clock; the same input and seed give the same bytes on any number of
//! threads.
//!
//! ```
//! # mod planted {
//! #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/planted_trace.rs"));
//! # }
//!
//! use eldr::calibrate::{
//!     CalibrateError, CalibrationInput, CalibrationParams, CalibrationReport, ClusterReport, Clustering, KmeansParams,
//!     LayerChoice, NoSpread, PairProducts, Shares, Transform, TransformRho, balanced_kmeans, best_transform, choose_layers, fit,
//!     pair_products, transform_rhos,
//! };
//! use ndarray::{Array2, array};
//!
//! # fn main() -> Result<(), CalibrateError> {
//! let input = CalibrationInput::of_trace(&planted::trace(48), 0..48);
//! let params = CalibrationParams { capacity: Some(vec![2, 1, 1]), ..CalibrationParams::new(3) };
//! let (calibration, report): (_, CalibrationReport) = fit(&input, &params)?;
//! let first: &ClusterReport = &report.clusters[0];
//! assert_eq!(first.size, 24, "twice the capacity, twice the share");
//! assert!(calibration.rho > 0.5, "prompts tell who will share experts");
//! let none = CalibrationInput::new(input.shape().clone(), "planted");
//! assert!(matches!(fit(&none, &params), Err(CalibrateError::NoRequests)));
//!
//! // Its parts. Cluster sizes, from weights:
//! assert_eq!(Shares::new(48, &[2, 1, 1]).floor, [24, 12, 12]);
//! // clusters of equal size:
//! let points = array![[1.0, 0.0], [0.0, 1.0], [0.8, 0.6], [0.6, 0.8]];
//! let found: Clustering = balanced_kmeans(&points, &KmeansParams { k: 2, seed: 1, n_restarts: 4, max_iterations: 20 });
//! assert_eq!(found.labels, [0, 1, 0, 1]);
//! // the layers whose distances are like the target's:
//! let target: PairProducts = pair_products(&array![[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]);
//! let noise = pair_products(&array![[0.0, 1.0], [1.0, 0.0], [0.1, 0.9]]);
//! let choice: Result<LayerChoice, NoSpread> = choose_layers(&[noise, target.clone()], &target, 2);
//! assert_eq!(choice.expect("distances differ").kept(), [1]);
//! let alike = pair_products(&Array2::ones((3, 2)));
//! assert_eq!(choose_layers(&[target], &alike, 1).unwrap_err(), NoSpread::Target);
//! // and what counts are best turned into:
//! let rhos: Vec<TransformRho> = transform_rhos(&input, None, 1);
//! assert!(rhos[0].transform == Transform::Count && best_transform(&rhos).is_some());
//! # Ok(())
//! # }
//! ```

mod assign;
mod calibration;
mod checksum;
mod cosines;
mod counts;
mod encode;
mod error;
mod fit;
mod gram;
mod idf;
mod input;
mod kmeans;
mod mask;
mod placement;
#[cfg(test)]
mod planted;
mod products;
mod ranked;
mod ranks;
mod report;
mod shares;
mod spearman;
mod ties;
mod transforms;

pub use assign::{balanced_assignment, weighted_assignment};
pub use calibration::{Calibration, TauOrigin};
pub use counts::PrefillCounts;
pub use encode::{FORMAT_VERSION, decode, encode};
pub use error::{CalibrateError, CountsError, FormatError, MismatchError};
pub use fit::{CalibrationParams, fit};
pub use gram::{PairProducts, pair_products};
pub use input::CalibrationInput;
pub use kmeans::{Clustering, KmeansParams, balanced_kmeans, weighted_kmeans};
pub use mask::{LayerChoice, MAX_COMPARED, NoSpread, choose_layers};
pub use placement::{PlacementError, busiest_rank, place_layer, place_layer_exactly};
pub use ranks::ExpertRanks;
pub use report::{CalibrationReport, ClusterReport};
pub use shares::Shares;
pub use spearman::spearman;
pub use transforms::{Transform, TransformRho, best_transform, gates_of, transform_rhos};
