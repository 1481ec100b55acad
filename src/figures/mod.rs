//! The numbers behind a calibration's figures, from recorded requests.
//!
//! Never draws them, reads a file or looks at a clock; the same requests give the same numbers on any number of threads.

mod activation;
mod batches;
mod clusters;
mod components;
mod data;
mod eigen;
mod extras;
mod labels;
mod mask;
mod phases;
#[cfg(test)]
pub(crate) mod planted;
mod stats;

pub use activation::{Activation, ActivationLayer};
pub use batches::{BatchSize, Batches};
pub use clusters::{Cluster, Clusters};
pub use components::{Components, Point};
pub use data::{Figure, REPORT_DATA_VERSION, ReportData, ReportDataError, Summary};
pub use extras::{Extras, TauCurve, TauPoint, TransformRho, Verdict, VerdictNumber};
pub use labels::Labels;
pub use mask::RhoCurve;
pub use phases::{PhaseLayer, Phases};
