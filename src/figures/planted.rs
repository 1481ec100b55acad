//! Traces with a known answer, for tests.
//!
//! Never used outside tests.

use super::{Extras, ReportData, TauCurve, TauPoint, TransformRho, Verdict, VerdictNumber};
use crate::{
    calibrate::{CalibrationInput, CalibrationParams, fit},
    rng::Rng,
    trace::{Trace, TraceHeader, TraceRequest},
    types::MoeShape,
};

/// Requests of the named domains in turn. Each domain owns an equal part of the experts; a token picks among its
/// domain's own, and with the chance `noise` among all.
pub(crate) struct Planted {
    pub domains: Vec<&'static str>,
    pub n_requests: usize,
    pub n_expert: u32,
    pub noise: f64,
}

const N_LAYER: u32 = 5;
const N_PROMPT: u32 = 60;
const N_STEPS: u32 = 30;

impl Default for Planted {
    fn default() -> Self {
        Self { domains: vec!["code", "law", "math", "medicine"], n_requests: 160, n_expert: 32, noise: 0.2 }
    }
}

impl Planted {
    pub fn trace(&self) -> Trace {
        let shape =
            MoeShape { layers: (0..N_LAYER).collect(), n_layer: N_LAYER, n_expert: self.n_expert, n_expert_used: 2 };
        let header = TraceHeader { shape, fingerprint: "planted".into(), n_block: 32 };
        let mut rng = Rng::new(7);
        let requests = (0..self.n_requests).map(|i| self.request(i, &header, &mut rng)).collect();
        Trace { header, requests }
    }

    fn request(&self, i: usize, header: &TraceHeader, rng: &mut Rng) -> TraceRequest {
        let domain = i % self.domains.len();
        let e = self.n_expert as usize;
        let usable = header.shape.usable().len();
        let mut blocks = Vec::new();
        for first in (0..N_PROMPT).step_by(header.n_block as usize) {
            let mut block = vec![0u8; usable * e];
            for _ in first..N_PROMPT.min(first + header.n_block) {
                for layer in 0..usable {
                    self.pick(domain, rng).into_iter().for_each(|expert| block[layer * e + expert] += 1);
                }
            }
            blocks.extend(block);
        }
        let picks = (0..N_STEPS * N_LAYER).flat_map(|_| self.pick(domain, rng)).map(|expert| expert as u16).collect();
        TraceRequest {
            id: format!("request-{i}"),
            domain: Some(self.domains[domain].to_owned()),
            n_prompt: N_PROMPT,
            blocks,
            picks,
            gates: None,
        }
    }

    /// Two different experts.
    fn pick(&self, domain: usize, rng: &mut Rng) -> [usize; 2] {
        let own = self.n_expert as usize / self.domains.len();
        let (first, n) = if rng.uniform() < self.noise { (0, self.n_expert as usize) } else { (domain * own, own) };
        let one = rng.below(n);
        let other = (one + 1 + rng.below(n - 1)) % n;
        [first + one, first + other]
    }

    /// The report of a fit for four workers.
    pub fn report(&self, extras: Extras) -> ReportData {
        let trace = self.trace();
        let input = CalibrationInput::of_trace(&trace, 0..trace.requests.len());
        let (calibration, report) = fit(&input, &CalibrationParams::new(4)).expect("a good input");
        ReportData::build(&trace, &calibration, &report, extras)
    }
}

/// Something in every place.
pub(crate) fn extras() -> Extras {
    let point = |tau, tpot_p50_change, tpot_p99_change, experts_change| TauPoint {
        tau,
        tpot_p50_change,
        tpot_p99_change,
        experts_change,
    };
    let transform = |name: &str, rho, n_layers| TransformRho { name: name.to_owned(), rho, n_layers };
    let number = |name: &str, change, interval| VerdictNumber { name: name.to_owned(), change, interval };
    Extras {
        model: Some("planted model".to_owned()),
        transforms: vec![transform("count", 0.61, 3), transform("count*idf", 0.68, 2), transform("binary", 0.42, 4)],
        tau: Some(TauCurve {
            baseline: "least_loaded".to_owned(),
            points: vec![point(0.0, -0.02, 0.09, -0.2), point(0.1, -0.08, -0.03, -0.18), point(0.4, -0.01, 0.0, -0.02)],
        }),
        verdict: Some(Verdict {
            helps: true,
            sentence: "Locality helps: 18 % fewer distinct experts and 8 % less TPOT than least_loaded.".to_owned(),
            numbers: vec![number("distinct experts", -0.18, Some([-0.2, -0.16])), number("TPOT p50", -0.08, None)],
        }),
    }
}
