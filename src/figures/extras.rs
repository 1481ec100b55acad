//! What a report shows that is not computed here: transforms compared, tau chosen, the verdict.
//!
//! Never computed from anything; whoever fits, replays and judges fills it in.

use serde::{Deserialize, Serialize};

use super::{Figure, stats::round};

/// What others computed, all of it optional: a figure without data is left out, and the page says why.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Extras {
    /// The model's name for the page's head.
    pub model: Option<String>,
    /// Rho under each transform of the counts; empty if none were compared.
    pub transforms: Vec<TransformRho>,
    /// What the band's width does to held-out requests.
    pub tau: Option<TauCurve>,
    /// Whether locality helps.
    pub verdict: Option<Verdict>,
}

/// How well one transform of the prefill counts tells who will share experts in decode.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TransformRho {
    /// Its name, such as `count*idf`.
    pub name: String,
    /// Rho of the best mask found under it, -1 to 1.
    pub rho: f64,
    /// Layers in that mask.
    pub n_layers: usize,
}

/// The locality band replayed against `baseline` at several widths, on requests that took no part in the fit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TauCurve {
    /// The policy it is compared with, such as `least_loaded`.
    pub baseline: String,
    /// One point a width, ascending.
    pub points: Vec<TauPoint>,
}

/// Changes at one width of the band, as shares: -0.1 is 10 % less than the baseline.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TauPoint {
    /// The width, in cosine similarity.
    pub tau: f64,
    /// Change of the median time per output token.
    pub tpot_p50_change: f64,
    /// Change of its 99th percentile.
    pub tpot_p99_change: f64,
    /// Change of the mean distinct experts a layer a step.
    pub experts_change: f64,
}

/// Whether locality helps this model under this traffic.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// False marks the calibration "locality does not help here".
    pub helps: bool,
    /// One sentence with the numbers.
    pub sentence: String,
    /// The numbers it stands on.
    pub numbers: Vec<VerdictNumber>,
}

/// One change on held-out requests, as a share: -0.1 is 10 % less.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VerdictNumber {
    /// What changed, such as `TPOT p50`.
    pub name: String,
    /// By how much.
    pub change: f64,
    /// Lower and upper end of the confidence interval, if there is one.
    pub interval: Option<[f64; 2]>,
}

/// The transforms, rounded.
pub(super) fn transforms(mut transforms: Vec<TransformRho>) -> Figure<Vec<TransformRho>> {
    if transforms.is_empty() {
        return Figure::left_out("the transforms of the counts were not compared in this calibration");
    }
    if transforms.iter().any(|t| !t.rho.is_finite()) {
        return Figure::left_out("rho is undefined under one of the transforms");
    }
    for transform in &mut transforms {
        transform.rho = round(transform.rho);
    }
    Figure::Data(transforms)
}

/// The tau curve, rounded.
pub(super) fn tau(curve: Option<TauCurve>) -> Figure<TauCurve> {
    let Some(mut curve) = curve.filter(|curve| !curve.points.is_empty()) else {
        return Figure::left_out(
            "no width was chosen by replaying the requests: tau was given, or there were too few of them",
        );
    };
    for point in &mut curve.points {
        let TauPoint { tau, tpot_p50_change, tpot_p99_change, experts_change } = point;
        for number in [tau, tpot_p50_change, tpot_p99_change, experts_change] {
            if !number.is_finite() {
                return Figure::left_out("a change in the replay is undefined");
            }
            *number = round(*number);
        }
    }
    Figure::Data(curve)
}

/// The verdict, rounded; numbers that are not finite are dropped.
pub(super) fn verdict(verdict: Option<Verdict>) -> Figure<Verdict> {
    let Some(mut verdict) = verdict else {
        return Figure::left_out("no verdict: the policies were not replayed on held-out requests");
    };
    verdict.numbers.retain(|number| number.change.is_finite());
    for number in &mut verdict.numbers {
        number.change = round(number.change);
        number.interval = number.interval.filter(|ends| ends.iter().all(|x| x.is_finite())).map(|ends| ends.map(round));
    }
    Figure::Data(verdict)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_or_undefined_is_left_out_with_a_reason() {
        assert!(matches!(transforms(Vec::new()), Figure::LeftOut(why) if why.contains("not compared")));
        let undefined = vec![TransformRho { name: "binary".into(), rho: f64::NAN, n_layers: 1 }];
        assert!(matches!(transforms(undefined), Figure::LeftOut(why) if why.contains("undefined")));
        assert!(matches!(tau(None), Figure::LeftOut(_)));
        let point = TauPoint { tau: 0.1, tpot_p50_change: f64::INFINITY, tpot_p99_change: 0.0, experts_change: 0.0 };
        let curve = TauCurve { baseline: "least_loaded".into(), points: vec![point] };
        assert!(matches!(tau(Some(curve)), Figure::LeftOut(why) if why.contains("undefined")));
        assert!(matches!(verdict(None), Figure::LeftOut(_)));
    }

    #[test]
    fn numbers_are_rounded_and_undefined_intervals_dropped() {
        let number = |change, interval| VerdictNumber { name: "x".into(), change, interval };
        let numbers = vec![number(-0.123_456_789, Some([0.0, f64::NAN])), number(f64::NAN, None)];
        let Figure::Data(got) = verdict(Some(Verdict { helps: true, sentence: "s".into(), numbers })) else {
            panic!("left out");
        };
        assert_eq!(got.numbers, [number(-0.123_457, None)]);
    }
}
