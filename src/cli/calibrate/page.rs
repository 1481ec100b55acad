//! `--report DIR`: a page of figures and the numbers it is drawn from.
//!
//! Never computes a number that the page shows and the JSON lacks.

use std::{
    fs,
    path::{Path, PathBuf},
};

use eldr::{
    bench::html,
    calibrate::{Calibration, CalibrationReport, gates_of, transform_rhos},
    engine::{check_output, replace_files},
    figures::{Extras, ReportData, TauCurve, TauPoint, TransformRho, Verdict, VerdictNumber},
    route::PolicyKind,
    sim::{Assessment, ReplayMeans},
};

use super::source::Source;
use crate::cli::error::CliError;

/// The page's folder, which is made if it is not there, can take both files.
pub fn check(dir: &Path, inputs: &[&Path]) -> Result<(), CliError> {
    fs::create_dir_all(dir)
        .map_err(|error| CliError::usage(format!("cannot make the folder {}: {error}", dir.display())))?;
    for file in files(dir) {
        check_output(&file, inputs).map_err(CliError::usage)?;
    }
    Ok(())
}

/// Writes the page and its numbers, both or neither; the page's path.
pub fn write(
    dir: &Path,
    source: &Source,
    calibration: &Calibration,
    report: &CalibrationReport,
    assessment: Option<&Assessment>,
) -> Result<PathBuf, CliError> {
    let extras = Extras {
        model: source.name.file_name().map(|name| name.to_string_lossy().into_owned()),
        transforms: transforms(source, calibration.seed),
        tau: assessment.filter(|a| a.tau_curve.points.len() > 1).map(tau_curve),
        verdict: assessment.map(verdict),
    };
    let data = match &source.trace {
        Some(trace) => ReportData::build(trace, calibration, report, extras),
        None => ReportData::of_counts(&source.input, calibration, report, extras),
    };
    let [page, json] = files(dir);
    let (numbers, drawn) = (data.to_json(), html::page(&data));
    replace_files(&[(&json, numbers.as_bytes()), (&page, drawn.as_bytes())])
        .map_err(|(path, error)| CliError::failed(format!("cannot write {}: {error}", path.display())))?;
    Ok(page)
}

fn files(dir: &Path) -> [PathBuf; 2] {
    ["report.html", "report.json"].map(|name| dir.join(name))
}

fn transforms(source: &Source, seed: u64) -> Vec<TransformRho> {
    let gates = source.trace.as_ref().and_then(|trace| gates_of(trace, 0..trace.requests.len()));
    let rhos = transform_rhos(&source.input, gates.as_deref(), seed);
    let known = |rho: &eldr::calibrate::TransformRho| {
        Some(TransformRho { name: rho.transform.name().to_owned(), rho: rho.rho?, n_layers: rho.n_layers? })
    };
    rhos.iter().filter_map(known).collect()
}

/// Against the balancer of the verdict.
fn tau_curve(assessment: &Assessment) -> TauCurve {
    let curve = &assessment.tau_curve;
    let least_loaded = PolicyKind::LeastLoaded.name();
    let baseline = curve.balancers.iter().find(|balancer| balancer.policy == least_loaded);
    let baseline = baseline.expect("least_loaded is always replayed");
    let point = |tau: f32, means: &ReplayMeans| TauPoint {
        tau: f64::from(tau),
        tpot_p50_change: means.tpot_p50 / baseline.means.tpot_p50 - 1.0,
        tpot_p99_change: means.tpot_p99 / baseline.means.tpot_p99 - 1.0,
        experts_change: means.experts_per_step / baseline.means.experts_per_step - 1.0,
    };
    let points = curve.points.iter().map(|at| point(at.tau, &at.means)).collect();
    TauCurve { baseline: baseline.policy.clone(), points }
}

fn verdict(assessment: &Assessment) -> Verdict {
    let verdict = &assessment.verdict;
    let numbers = [
        ("TPOT p50", verdict.tpot_p50),
        ("TPOT p99", verdict.tpot_p99),
        ("experts read a token", verdict.experts_per_token),
        ("distinct experts a step", verdict.experts_per_step),
        ("sequences a step", verdict.batch),
    ];
    let number = |(name, compared): (&str, eldr::sim::Compared)| VerdictNumber {
        name: name.to_owned(),
        change: -compared.gain.mean,
        interval: Some([-compared.gain.high, -compared.gain.low]),
    };
    Verdict { helps: verdict.helps, sentence: verdict.sentence(), numbers: numbers.map(number).to_vec() }
}
