//! The numbers behind a calibration's figures, from recorded requests.
//!
//! Never draws them, reads a file or looks at a clock; the same requests give the same numbers on any number of threads.
//!
//! ```
//! # mod planted {
//! #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/planted_trace.rs"));
//! # }
//!
//! use eldr::{
//!     calibrate::{CalibrationInput, CalibrationParams, fit},
//!     figures::{
//!         Activation, ActivationLayer, BatchSize, Batches, Cluster, Clusters, Components, Extras, Figure, Labels, PhaseLayer,
//!         Phases, Point, ReportData, ReportDataError, RhoCurve, Summary, TauCurve, TauPoint, TransformRho, Verdict, VerdictNumber,
//!     },
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let trace = planted::trace(64);
//! let (calibration, report) = fit(&CalibrationInput::of_trace(&trace, 0..64), &CalibrationParams::new(4))?;
//! // What others computed; all of it may be missing.
//! let extras = Extras {
//!     model: Some("planted".to_owned()),
//!     transforms: vec![TransformRho { name: "count*idf".to_owned(), rho: 0.75, n_layers: 3 }],
//!     tau: Some(TauCurve {
//!         baseline: "least_loaded".to_owned(),
//!         points: vec![TauPoint { tau: 0.1, tpot_p50_change: -0.05, tpot_p99_change: 0.01, experts_change: -0.2 }],
//!     }),
//!     verdict: Some(Verdict {
//!         helps: true,
//!         sentence: "locality helps here".to_owned(),
//!         numbers: vec![VerdictNumber { name: "TPOT p50".to_owned(), change: -0.05, interval: None }],
//!     }),
//! };
//! let data = ReportData::build(&trace, &calibration, &report, extras);
//! let ReportData { summary: Summary { n_requests, .. }, labels: Labels { names, .. }, .. } = &data;
//! assert_eq!((*n_requests, names.len()), (64, 4));
//!
//! // Requests of one domain read fewer distinct experts a step than a mix does.
//! let batches: &Figure<Batches> = &data.batches;
//! let size: &BatchSize = &batches.data().expect("a trace has steps").sizes.iter().rfind(|size| size.same.is_some()).expect("a size");
//! assert!(size.same.expect("domains of some size") < size.mixed);
//! let (clusters, curve): (&Clusters, &RhoCurve) = (&data.clusters, &data.mask);
//! let cluster: &Cluster = &clusters.clusters[0];
//! assert!(cluster.purity == Some(1.0) && !curve.rho.is_empty());
//! if let Some(Activation { layers, .. }) = data.activation.data() {
//!     let ActivationLayer { experts, deviation, .. } = &layers[0];
//!     assert_eq!(deviation[0].len(), experts.len());
//! }
//! if let Some(Phases { layers, .. }) = data.phases.data() {
//!     let PhaseLayer { r, .. } = &layers[0];
//!     assert!(r.is_some_and(|r| r > 0.5), "prompts tell what answers pick");
//! }
//! if let Some(Components { points, .. }) = data.components.data() {
//!     let Point { x, y, .. } = points[0];
//!     assert!(x.is_finite() && y.is_finite());
//! }
//!
//! assert_eq!(ReportData::from_json(&data.to_json())?, data);
//! assert!(matches!(ReportData::from_json("{}"), Err(ReportDataError::Json(_))));
//! # Ok(())
//! # }
//! ```

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
