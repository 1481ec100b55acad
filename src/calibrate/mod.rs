//! From recorded requests to a calibration: idf weights, layer mask, one centroid a decode worker.
//!
//! Never reads a file, runs a model or looks at a clock; the same input and seed give the same bytes on any number of
//! threads.

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
