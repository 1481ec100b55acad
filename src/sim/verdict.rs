use serde::{Deserialize, Serialize};

use crate::{
    calibrate::Calibration,
    sim::{Interval, ReplayMeans, StepCost},
};

/// Whether the locality band is worth using: what it gains over `least_loaded` on requests that took no part in fitting
/// it or in choosing its width.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// The median TPOT is lower by at least `threshold` on average, and certainly lower (its interval lies above 0).
    pub helps: bool,
    /// Gain of the median TPOT that is worth routing for.
    pub threshold: f64,
    /// Median time per output token, in the step cost's unit.
    pub tpot_p50: Compared,
    /// Its 99th percentile.
    pub tpot_p99: Compared,
    /// Expert reads a layer for each token.
    pub experts_per_token: Compared,
    /// Distinct experts a layer for each step.
    pub experts_per_step: Compared,
    /// Sequences a step.
    pub batch: Compared,
    /// The width chosen in each fold, on requests of the other folds.
    pub taus: Vec<f32>,
    /// Requests judged on.
    pub n_requests: usize,
    /// Decode workers.
    pub n_workers: usize,
    /// Requests in the system.
    pub concurrency: usize,
    /// Replays of each policy in a fold.
    pub n_seeds: usize,
    /// What a step was taken to cost.
    pub cost: StepCost,
}

/// One number under both policies, averaged over folds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    /// Under `least_loaded`.
    pub least_loaded: f64,
    /// Under `locality_band`.
    pub locality_band: f64,
    /// The share by which the band's is lower, one sample a fold.
    pub gain: Interval,
}

impl Compared {
    /// Compares `number` of (least loaded, band) in each fold.
    pub(super) fn of(folds: &[(ReplayMeans, ReplayMeans)], number: impl Fn(&ReplayMeans) -> f64) -> Self {
        let mean = |side: &dyn Fn(&(ReplayMeans, ReplayMeans)) -> f64| {
            folds.iter().map(side).sum::<f64>() / folds.len() as f64
        };
        let gains: Vec<f64> = folds.iter().map(|(load, band)| 1.0 - number(band) / number(load)).collect();
        Self {
            least_loaded: mean(&|(load, _)| number(load)),
            locality_band: mean(&|(_, band)| number(band)),
            gain: Interval::of(&gains),
        }
    }
}

impl Verdict {
    /// The verdict that a calibration carries; nothing if it carries none, or one that this version does not know.
    pub fn of(calibration: &Calibration) -> Option<Self> {
        serde_json::from_str(calibration.verdict.as_deref()?).ok()
    }

    /// Whether a gain of the median TPOT is worth routing for.
    pub(super) fn is_worth(gain: &Interval, threshold: f64) -> bool {
        gain.low > 0.0 && gain.mean >= threshold
    }

    /// The verdict with its numbers, in one sentence without a full stop.
    pub fn sentence(&self) -> String {
        let gain = self.tpot_p50.gain;
        let numbers = format!(
            "against least_loaded, locality_band changes the median time per output token by {} (95% interval {} to \
             {}) and the experts read a token by {}, replayed on {} requests it had not seen, over {} decode workers \
             with {} requests in the system",
            change(gain.mean),
            change(gain.high),
            change(gain.low),
            change(self.experts_per_token.gain.mean),
            self.n_requests,
            self.n_workers,
            self.concurrency
        );
        if self.helps {
            format!("locality helps here: {numbers}")
        } else {
            let wanted = change(self.threshold);
            format!(
                "locality does not help here: {numbers}; the change would have to be at most {wanted}, with the whole \
                 interval below 0: route by load"
            )
        }
    }
}

/// The change that a gain is, in percent.
fn change(gain: f64) -> String {
    // No gain is +0.0, never -0.0.
    format!("{:+.1}%", -100.0 * gain + 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn means(tpot_p50: f64, experts_per_token: f64) -> ReplayMeans {
        ReplayMeans { tpot_p50, experts_per_token, ..ReplayMeans::default() }
    }

    #[test]
    fn gains_are_shares_fold_by_fold() {
        let folds = [(means(1.0, 4.0), means(0.9, 3.0)), (means(2.0, 4.0), means(1.4, 3.0))];
        let tpot = Compared::of(&folds, |m| m.tpot_p50);
        assert!((tpot.gain.mean - 0.2).abs() < 1e-12, "{tpot:?}");
        assert!((tpot.least_loaded - 1.5).abs() < 1e-12 && (tpot.locality_band - 1.15).abs() < 1e-12, "{tpot:?}");
        let experts = Compared::of(&folds, |m| m.experts_per_token);
        assert!((experts.gain.low - 0.25).abs() < 1e-12 && (experts.gain.high - 0.25).abs() < 1e-12, "{experts:?}");
    }

    #[test]
    fn a_gain_must_be_large_enough_and_certain() {
        let of = |mean, low| Verdict::is_worth(&Interval { mean, low, high: 0.5 }, 0.02);
        assert!(of(0.05, 0.01) && of(0.02, 0.001));
        assert!(!of(0.05, -0.01) && !of(0.019, 0.018) && !of(-0.1, -0.2) && !of(f64::NAN, f64::NAN));
    }

    #[test]
    fn the_sentence_has_the_numbers_and_survives_json() {
        let folds = [(means(1.0, 4.0), means(0.9, 3.0)); 4];
        let compared = |number: fn(&ReplayMeans) -> f64| Compared::of(&folds, number);
        let mut verdict = Verdict {
            helps: true,
            threshold: 0.02,
            tpot_p50: compared(|m| m.tpot_p50),
            tpot_p99: compared(|m| m.tpot_p50),
            experts_per_token: compared(|m| m.experts_per_token),
            experts_per_step: compared(|m| m.experts_per_token),
            batch: compared(|m| m.tpot_p50),
            taus: vec![0.1, 0.02],
            n_requests: 480,
            n_workers: 8,
            concurrency: 60,
            n_seeds: 4,
            cost: StepCost::UNIT,
        };
        let sentence = verdict.sentence();
        for part in
            ["locality helps here", "token by -10.0%", "-10.0% to -10.0%", "read a token by -25.0%", "480", "60"]
        {
            assert!(sentence.contains(part), "{part}: {sentence}");
        }
        let json = serde_json::to_string(&verdict).expect("json");
        assert_eq!(serde_json::from_str::<Verdict>(&json).expect("its own json"), verdict);
        verdict.helps = false;
        verdict.tpot_p50.gain.mean = -0.013;
        let sentence = verdict.sentence();
        assert!(sentence.starts_with("locality does not help here: ") && sentence.contains("+1.3%"), "{sentence}");
        assert!(
            sentence.contains("at most -2.0%, with the whole interval below 0") && change(0.0) == "+0.0%",
            "{sentence}"
        );
    }
}
