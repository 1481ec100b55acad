//! What a calibration holds, and what a prompt's counts become under it.
//!
//! Never fits or stores anything.

use ndarray::Array2;
use serde::Serialize;

use crate::{
    calibrate::{MismatchError, idf::weigh},
    signature::{ExpertCounts, Signature},
    types::MoeShape,
};

/// What routing needs to know about a model and its traffic: how to weigh counts, which layers to compare, and one
/// centroid a decode worker.
///
/// ```
/// # mod planted {
/// #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/planted_trace.rs"));
/// # }
///
/// use eldr::{
///     Calibration,
///     calibrate::{CalibrationInput, CalibrationParams, FormatError, MismatchError, TauOrigin, decode, encode, fit},
/// };
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // 48 recorded requests of four domains; one centroid for each of four decode workers.
/// let trace = planted::trace(48);
/// let input = CalibrationInput::of_trace(&trace, 0..48);
/// let (calibration, report) = fit(&input, &CalibrationParams::new(4))?;
/// assert_eq!(report.purity, Some(1.0), "every worker got one domain");
/// assert_eq!((calibration.n_workers(), calibration.tau_origin), (4, TauOrigin::Default));
///
/// // What routing compares: a prompt's signature is most like the centroid of its domain's worker.
/// let counts = trace.requests[0].prefill_counts(&trace.header);
/// let signature = calibration.signature(&counts).expect("it weighs something");
/// let worker = report.workers[0].expect("it was clustered") as usize;
/// let similarity = |worker| signature.cosine(calibration.centroid(worker));
/// assert!((0..4).all(|other| similarity(other) <= similarity(worker)));
///
/// // As a file's bytes. One for another model or number of workers is refused in words.
/// let bytes = encode(&calibration);
/// let read: Result<Calibration, FormatError> = decode(&bytes);
/// assert_eq!(read?, calibration);
/// let error: MismatchError = calibration.check(&trace.header.shape, "planted", 8).unwrap_err();
/// assert!(error.to_string().contains("4 decode workers"));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Calibration {
    /// The model's MoE layers and experts.
    pub shape: MoeShape,
    /// Which model it was made for; see [`Calibration::check`].
    pub fingerprint: String,
    /// Weight of each expert, L rows of E; rows of layers that can not be used are 0.
    pub idf: Array2<f32>,
    /// The mask: N* MoE layers (rows of `idf`), ascending.
    pub layers: Vec<u32>,
    /// K unit vectors of N* times E, layers in the order of `layers`; row i belongs to decode worker i.
    pub centroids: Array2<f32>,
    /// Requests it was made from.
    pub n_requests: u64,
    /// Their prompt tokens.
    pub n_tokens: u64,
    /// How well the mask tells who will share experts in decode: Spearman's rho of signature distances and decode
    /// distances over all pairs of requests.
    pub rho: f64,
    /// Width of the locality band, in cosine similarity, 0 to 2.
    pub tau: f32,
    /// Where `tau` comes from.
    pub tau_origin: TauOrigin,
    /// Share of the requests each decode worker was given, in proportion to these; equal shares without.
    pub capacity: Option<Vec<u32>>,
    /// Summed cosine distance of the requests from their centroids.
    pub cost: f64,
    /// Seed of the clustering.
    pub seed: u64,
    /// A fitted model of a decode step's cost, for policies that use one.
    pub load_model: Option<Vec<f32>>,
    /// What a replay said the calibration is worth, as one JSON document. Nothing here reads it.
    pub verdict: Option<String>,
}

/// Who chose the width of the locality band.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TauOrigin {
    /// Nobody: it is the paper's.
    #[default]
    Default,
    /// Whoever calibrated.
    Given,
    /// A replay of the trace.
    Trace,
}

impl TauOrigin {
    /// All there are.
    pub const ALL: [Self; 3] = [Self::Default, Self::Given, Self::Trace];

    /// As files and reports name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Given => "given",
            Self::Trace => "trace",
        }
    }
}

impl Calibration {
    /// The signature of a prompt from its counts, which have a row for each masked layer and may have more. Nothing if
    /// no pick of the prompt weighs anything.
    pub fn signature(&self, counts: &ExpertCounts) -> Option<Signature> {
        assert_eq!(counts.n_expert(), self.shape.n_expert, "counts of another model");
        let mut weighted = Vec::with_capacity(self.layers.len() * self.shape.n_expert as usize);
        for &layer in &self.layers {
            let row = counts.row(layer).expect("counts lack a layer of the mask");
            weigh(row, self.weights(layer), &mut weighted);
        }
        Signature::normalised(weighted)
    }

    /// Decode workers it has a centroid for (K).
    pub fn n_workers(&self) -> usize {
        self.centroids.nrows()
    }

    /// The E weights of MoE layer `layer`.
    pub fn weights(&self, layer: u32) -> &[f32] {
        let e = self.idf.ncols();
        let all = self.idf.as_slice().expect("idf is in row order");
        &all[layer as usize * e..][..e]
    }

    /// The centroid of decode worker `worker`.
    pub fn centroid(&self, worker: usize) -> &[f32] {
        let n = self.centroids.ncols();
        let all = self.centroids.as_slice().expect("centroids are in row order");
        &all[worker * n..][..n]
    }

    /// Refuses another model, another MoE shape, or another number of decode workers.
    pub fn check(&self, shape: &MoeShape, fingerprint: &str, n_workers: usize) -> Result<(), MismatchError> {
        if self.shape != *shape {
            return Err(MismatchError::Shape { made_for: describe(&self.shape), used_with: describe(shape) });
        }
        if self.fingerprint != fingerprint {
            return Err(MismatchError::Model { made_for: self.fingerprint.clone(), used_with: fingerprint.to_owned() });
        }
        if self.n_workers() != n_workers {
            return Err(MismatchError::Workers { made_for: self.n_workers(), used_with: n_workers });
        }
        Ok(())
    }
}

fn describe(shape: &MoeShape) -> String {
    format!(
        "{} MoE layers of {} with {} experts, top {}",
        shape.n_layer_moe(),
        shape.n_layer,
        shape.n_expert,
        shape.n_expert_used
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::planted;

    #[test]
    fn a_signature_weighs_the_masked_layers_and_ignores_the_others() {
        let calibration = planted::calibration();
        let mut counts = ExpertCounts::for_shape(&calibration.shape);
        counts.add(0, &[1, 1, 1]);
        counts.add(1, &[0, 0, 0, 3]);
        counts.add(2, &[2, 2]);
        // Mask {0, 2}; weights of layer 0 are 0, 1, 2, 3 and of layer 2 are 2, 3, 4, 5: x = (0, 3, 0, 0, 0, 0, 8, 0).
        let signature = calibration.signature(&counts).expect("it weighs something");
        let length = 73.0f64.sqrt();
        let want = [0.0, (3.0 / length) as f32, 0.0, 0.0, 0.0, 0.0, (8.0 / length) as f32, 0.0];
        assert_eq!(signature.as_slice(), want);
    }

    #[test]
    fn counts_that_weigh_nothing_have_no_signature() {
        let calibration = planted::calibration();
        let mut counts = ExpertCounts::for_shape(&calibration.shape);
        assert_eq!(calibration.signature(&counts), None);
        counts.add(0, &[0]);
        counts.add(1, &[3]);
        assert_eq!(calibration.signature(&counts), None);
    }

    #[test]
    fn another_model_or_worker_count_is_refused_in_words() {
        let calibration = planted::calibration();
        let shape = calibration.shape.clone();
        let check = |shape: &MoeShape, fingerprint: &str, n| {
            calibration.check(shape, fingerprint, n).map_err(|e| e.to_string())
        };
        assert_eq!(check(&shape, "planted", 2), Ok(()));
        let error = check(&shape, "planted", 8).expect_err("8 workers");
        assert!(error.contains("2 decode workers") && error.contains("is 8"), "{error}");
        let error = check(&shape, "other", 2).expect_err("another model");
        assert!(error.contains("`planted`") && error.contains("`other`"), "{error}");
        let wider = MoeShape { n_expert: 64, ..shape };
        let error = check(&wider, "planted", 2).expect_err("another shape");
        assert!(error.contains("with 4 experts") && error.contains("with 64 experts"), "{error}");
    }
}
