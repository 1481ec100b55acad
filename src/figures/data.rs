//! One calibration's report as data: what `report.json` holds and the page is drawn from.
//!
//! Field names are stable; new ones may be added.

use serde::{Deserialize, Serialize};

use super::{
    Activation, Batches, Clusters, Components, Extras, Labels, Phases, RhoCurve, TauCurve, TransformRho, Verdict,
    extras, stats::round,
};
use crate::{
    calibrate::{Calibration, CalibrationInput, CalibrationReport},
    trace::Trace,
    types::MoeShape,
};

/// The version of the data's format.
pub const REPORT_DATA_VERSION: u32 = 1;

/// Everything a calibration's page shows. Numbers have six decimals; layers are llama.cpp's numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReportData {
    /// [`REPORT_DATA_VERSION`].
    pub version: u32,
    /// The model's name, if it was given.
    pub model: Option<String>,
    /// Which model it is, as the calibration names it.
    pub fingerprint: String,
    /// Its MoE layers and experts.
    pub shape: MoeShape,
    /// The fit in numbers.
    pub summary: Summary,
    /// Whether locality helps.
    pub verdict: Figure<Verdict>,
    /// The labels that figures refer to by place.
    pub labels: Labels,
    /// Which experts each label picks more than the others do.
    pub activation: Figure<Activation>,
    /// Prefill picks against decode picks.
    pub phases: Figure<Phases>,
    /// Distinct experts against batch size.
    pub batches: Figure<Batches>,
    /// Rho under each transform of the counts.
    pub transforms: Figure<Vec<TransformRho>>,
    /// Rho against kept layers.
    pub mask: RhoCurve,
    /// Sizes and labels of the clusters.
    pub clusters: Clusters,
    /// Signatures in their first two principal components.
    pub components: Figure<Components>,
    /// What the band's width does.
    pub tau: Figure<TauCurve>,
}

/// The fit in numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Requests recorded.
    pub n_requests: usize,
    /// Their prompt tokens.
    pub n_tokens: u64,
    /// Their decode steps.
    pub n_steps: u64,
    /// Requests without a signature.
    pub n_without_signature: usize,
    /// Decode workers (K).
    pub n_workers: usize,
    /// The mask, ascending (N* layers).
    pub layers: Vec<u32>,
    /// Rho with the mask.
    pub rho: f64,
    /// Summed cosine distance of the requests from their centroids.
    pub cost: f64,
    /// Width of the locality band.
    pub tau: f64,
    /// Seed of the clustering.
    pub seed: u64,
}

/// What a figure shows, or why it is left out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Figure<T> {
    /// Its numbers.
    Data(T),
    /// Why there are none, as a clause without a full stop.
    LeftOut(String),
}

impl<T> Figure<T> {
    pub(super) fn left_out(why: &str) -> Self {
        Self::LeftOut(why.to_owned())
    }

    /// The numbers, if there are any.
    pub fn data(&self) -> Option<&T> {
        match self {
            Self::Data(data) => Some(data),
            Self::LeftOut(_) => None,
        }
    }
}

/// Why a text is not a report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReportDataError {
    /// Not JSON, or fields are missing or of another kind.
    #[error("not a calibration report: {0}; write it again with `eldr calibrate --report`")]
    Json(#[from] serde_json::Error),
    /// Another version of the format.
    #[error(
        "the calibration report has version {0}, but this eldr reads version {REPORT_DATA_VERSION}: write it again with \
         `eldr calibrate --report`"
    )]
    Version(u64),
}

impl ReportData {
    /// The report of a calibration fitted to all requests of `trace`.
    pub fn build(trace: &Trace, calibration: &Calibration, report: &CalibrationReport, extras: Extras) -> Self {
        let input = CalibrationInput::of_trace(trace, 0..trace.requests.len());
        Self::new(&input, Batches::of(trace), calibration, report, extras)
    }

    /// The report of a calibration fitted to counts alone, without the picks of each step.
    pub fn of_counts(
        input: &CalibrationInput,
        calibration: &Calibration,
        report: &CalibrationReport,
        extras: Extras,
    ) -> Self {
        let batches = Figure::left_out("counts do not hold the picks of each decode step; a trace does");
        Self::new(input, batches, calibration, report, extras)
    }

    fn new(
        input: &CalibrationInput,
        batches: Figure<Batches>,
        calibration: &Calibration,
        report: &CalibrationReport,
        extras: Extras,
    ) -> Self {
        let shape = input.shape();
        let labels = Labels::of(input.labels());
        let picks_a_step = (shape.n_layer_moe() as u64 * u64::from(shape.n_expert_used)).max(1);
        Self {
            version: REPORT_DATA_VERSION,
            model: extras.model,
            fingerprint: input.fingerprint().to_owned(),
            shape: shape.clone(),
            summary: Summary {
                n_requests: input.n_requests(),
                n_tokens: input.n_tokens().iter().map(|&n| u64::from(n)).sum(),
                n_steps: input.decode().iter().map(|&n| u64::from(n)).sum::<u64>() / picks_a_step,
                n_without_signature: report.n_without_signature,
                n_workers: calibration.n_workers(),
                layers: calibration.layers.iter().map(|&row| shape.layers[row as usize]).collect(),
                rho: round(calibration.rho),
                cost: round(calibration.cost),
                tau: round(f64::from(calibration.tau)),
                seed: calibration.seed,
            },
            verdict: extras::verdict(extras.verdict),
            activation: Activation::of(input, report, &labels),
            phases: Phases::of(input, report),
            batches,
            transforms: extras::transforms(extras.transforms),
            mask: RhoCurve::of(report, shape),
            clusters: Clusters::of(report, &labels),
            components: Components::of(input, calibration, report, &labels),
            tau: extras::tau(extras.tau),
            labels,
        }
    }

    /// The report as JSON, one line. [`ReportData::from_json`] gives back an equal report.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("numbers, strings and lists are JSON") + "\n"
    }

    /// A report from its JSON.
    pub fn from_json(text: &str) -> Result<Self, ReportDataError> {
        #[derive(Deserialize)]
        struct Version {
            version: u64,
        }
        let Version { version } = serde_json::from_str(text)?;
        if version != u64::from(REPORT_DATA_VERSION) {
            return Err(ReportDataError::Version(version));
        }
        Ok(serde_json::from_str(text)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        calibrate::{CalibrationParams, fit},
        figures::planted::{Planted, extras},
    };

    #[test]
    fn json_gives_back_an_equal_report() {
        for extras in [extras(), Extras::default()] {
            let data = Planted::default().report(extras);
            let back = ReportData::from_json(&data.to_json()).expect("its own JSON");
            assert_eq!(back, data);
            assert_eq!(back.to_json(), data.to_json());
        }
    }

    #[test]
    fn the_same_trace_gives_the_same_json_on_any_number_of_threads() {
        let on = |n: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("threads");
            pool.install(|| Planted::default().report(extras()).to_json())
        };
        assert_eq!(on(1), on(3));
    }

    #[test]
    fn the_summary_counts_what_was_recorded() {
        let data = Planted::default().report(Extras::default());
        let summary = &data.summary;
        assert_eq!((summary.n_requests, summary.n_tokens, summary.n_steps), (160, 160 * 60, 160 * 30));
        assert_eq!((summary.n_workers, summary.tau.to_bits(), summary.seed), (4, 0.1f64.to_bits(), 1));
        assert_eq!(data.labels.n_requests, [40; 4]);
    }

    #[test]
    fn counts_alone_lack_only_the_batches() {
        let trace = Planted::default().trace();
        let input = CalibrationInput::of_trace(&trace, 0..160);
        let (calibration, report) = fit(&input, &CalibrationParams::new(4)).expect("a good input");
        let whole = ReportData::build(&trace, &calibration, &report, extras());
        let counts = ReportData::of_counts(&input, &calibration, &report, extras());
        assert!(matches!(&counts.batches, Figure::LeftOut(why) if why.contains("trace")));
        assert_eq!(ReportData { batches: whole.batches.clone(), ..counts }, whole);
    }

    #[test]
    fn another_version_is_refused_before_its_fields_are_read() {
        let error = |text: &str| ReportData::from_json(text).expect_err("not a report").to_string();
        assert!(error("{\"version\": 2}").contains("version 2, but this eldr reads version 1"));
        assert!(error("{\"version\": 1}").contains("missing field"));
        assert!(error("[").contains("not a calibration report"));
    }
}
