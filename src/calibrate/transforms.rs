//! What a request should show of its prompt's gate: counts, counts with weights, or the gate's own numbers.
//!
//! Never changes a calibration, which always weighs counts by idf; this says what the others would have been worth.

use std::fmt;

use serde::Serialize;

use crate::{
    calibrate::{
        CalibrationInput, LayerChoice, choose_layers,
        idf::weights,
        mask::rho_of_all,
        products::{compared, decode_products, layer_products},
    },
    trace::{GateSums, Trace},
};

/// What a request shows at a layer and an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Transform {
    /// How many of its prompt's tokens picked the expert.
    Count,
    /// That times the expert's idf: what a calibration uses.
    CountIdf,
    /// The square root of the count.
    SqrtCount,
    /// The gate's probability of the expert, summed over the prompt's tokens.
    Probability,
    /// The gate's logit of the expert, summed over the prompt's tokens, as the model computes it.
    Logit,
    /// 1 if any token picked the expert, else 0.
    Binary,
}

impl Transform {
    /// All there are, counts first.
    pub const ALL: [Self; 6] =
        [Self::Count, Self::CountIdf, Self::SqrtCount, Self::Probability, Self::Logit, Self::Binary];

    /// As reports name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Count => "count",
            Self::CountIdf => "count_idf",
            Self::SqrtCount => "sqrt_count",
            Self::Probability => "probability",
            Self::Logit => "logit",
            Self::Binary => "binary",
        }
    }
}

impl fmt::Display for Transform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How well distances under a transform tell decode distances.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TransformRho {
    /// The transform.
    pub transform: Transform,
    /// Rho with its own greedy layer mask. Nothing if gates were not recorded, hold a number that is not finite, or all
    /// distances are equal.
    pub rho: Option<f64>,
    /// Layers that mask keeps.
    pub n_layers: Option<usize>,
    /// Rho with every usable layer.
    pub rho_all_layers: Option<f64>,
}

/// What the gates of the requests at positions `which` of a trace said; nothing if one of them was recorded without.
pub fn gates_of(trace: &Trace, which: impl IntoIterator<Item = usize>) -> Option<Vec<&GateSums>> {
    which.into_iter().map(|at| trace.requests[at].gates.as_ref()).collect()
}

/// Rho of each transform, in the order of [`Transform::ALL`]; `gates` are those of the input's requests, in their order.
///
/// Every transform gets what count * idf gets: cosine distances over a greedy layer mask of its own, all pairs of the
/// same requests, the same decode distances (see [`choose_layers`]; of more than 2,048 requests a sample drawn by
/// `seed`). Cosine does not see a request's length, so that sums over tokens stand for means. Logits may be negative, and
/// then so may cosines: they are compared as the gate gives them, without a shift that would be a choice of ours.
pub fn transform_rhos(input: &CalibrationInput, gates: Option<&[&GateSums]>, seed: u64) -> Vec<TransformRho> {
    let e = input.shape().n_expert as usize;
    if let Some(gates) = gates {
        let width = input.usable().len() * e;
        assert_eq!(gates.len(), input.n_requests(), "the gates of each request");
        let fits = |sums: &[f32]| sums.len() == width;
        assert!(gates.iter().all(|g| fits(&g.probability) && fits(&g.logit)), "a number for each layer and expert");
    }
    let which = compared(input.n_requests(), seed);
    let (idf, prefill) = (weights(input), input.prefill());
    let target = decode_products(input, &which);
    let count = |request: usize, layer: usize, expert: usize| f64::from(prefill[[request, layer, expert]]);
    let rho = |transform: Transform, value: &(dyn Fn(usize, usize, usize) -> f64 + Sync)| {
        let layers = layer_products(input, &which, value);
        let choice = choose_layers(&layers, &target, usize::MAX).ok();
        TransformRho {
            transform,
            rho: choice.as_ref().map(LayerChoice::rho),
            n_layers: choice.as_ref().map(|choice| choice.n_kept),
            rho_all_layers: rho_of_all(&layers, &target),
        }
    };
    let gate = |transform: Transform, sums: fn(&GateSums) -> &[f32]| {
        let finite = |gates: &&[&GateSums]| gates.iter().all(|g| sums(g).iter().all(|x| x.is_finite()));
        match gates.filter(finite) {
            Some(gates) => {
                rho(transform, &|request, layer, expert| f64::from(sums(gates[request])[layer * e + expert]))
            }
            None => TransformRho { transform, rho: None, n_layers: None, rho_all_layers: None },
        }
    };
    let of = |transform| match transform {
        Transform::Count => rho(transform, &count),
        Transform::CountIdf => rho(transform, &|r, l, x| count(r, l, x) * f64::from(idf[l][x])),
        Transform::SqrtCount => rho(transform, &|r, l, x| count(r, l, x).sqrt()),
        Transform::Probability => gate(transform, |gates| &gates.probability),
        Transform::Logit => gate(transform, |gates| &gates.logit),
        Transform::Binary => rho(transform, &|r, l, x| f64::from(u8::from(count(r, l, x) > 0.0))),
    };
    Transform::ALL.map(of).to_vec()
}

/// The transform with the highest rho, the first if several share it.
pub fn best_transform(rhos: &[TransformRho]) -> Option<Transform> {
    let defined = rhos.iter().filter_map(|r| r.rho.map(|rho| (r.transform, rho)));
    defined.reduce(|best, next| if next.1 > best.1 { next } else { best }).map(|(transform, _)| transform)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        calibrate::{CalibrationParams, fit, planted::Planted, spearman},
        rng::Rng,
        trace::{TraceHeader, TraceRequest},
    };

    /// Gates that say what was picked, and something about the rest.
    fn gates(input: &CalibrationInput) -> Vec<GateSums> {
        let mut rng = Rng::new(6);
        let of = |counts: ndarray::ArrayView2<'_, u32>, rng: &mut Rng| GateSums {
            probability: counts.iter().map(|&c| c as f32 + rng.uniform() as f32).collect(),
            logit: counts.iter().map(|&c| c as f32 - 4.0 * rng.uniform() as f32).collect(),
        };
        input.prefill().outer_iter().map(|counts| of(counts, &mut rng)).collect()
    }

    /// Rho over all layers from the definition.
    fn plain(input: &CalibrationInput, show: impl Fn(usize, usize) -> f64) -> f64 {
        let width = input.usable().len() * input.shape().n_expert as usize;
        let n = input.n_requests();
        let distances = |rows: Vec<Vec<f64>>| -> Vec<f64> {
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
            let pairs = (0..n).flat_map(|i| (i + 1..n).map(move |j| (i, j)));
            let cosine = |(i, j): (usize, usize)| {
                dot(&rows[i], &rows[j]) / (dot(&rows[i], &rows[i]) * dot(&rows[j], &rows[j])).sqrt()
            };
            pairs.map(|pair| ((1.0 - cosine(pair)) * f64::from(1 << 24)).round()).collect()
        };
        let shown = (0..n).map(|r| (0..width).map(|cell| show(r, cell)).collect()).collect();
        let decode = input.decode().outer_iter().map(|d| d.iter().map(|&c| f64::from(c)).collect()).collect();
        spearman(&distances(shown), &distances(decode)).expect("spread")
    }

    #[test]
    fn each_transform_is_what_it_says() {
        let input = Planted { n_requests: 30, noise: 0.5, ..Planted::default() }.input();
        let gates = gates(&input);
        let rhos = transform_rhos(&input, Some(&gates.iter().collect::<Vec<_>>()), 1);
        let e = input.shape().n_expert as usize;
        let (prefill, n) = (input.prefill(), input.n_requests());
        let count = |r: usize, cell: usize| f64::from(prefill[[r, cell / e, cell % e]]);
        let idf = |cell: usize| {
            let df = (0..n).filter(|&r| count(r, cell) > 0.0).count();
            ((n + 1) as f64 / (df + 1) as f64).ln()
        };
        let want = [
            plain(&input, count),
            plain(&input, |r, cell| count(r, cell) * idf(cell)),
            plain(&input, |r, cell| count(r, cell).sqrt()),
            plain(&input, |r, cell| f64::from(gates[r].probability[cell])),
            plain(&input, |r, cell| f64::from(gates[r].logit[cell])),
            plain(&input, |r, cell| count(r, cell).min(1.0)),
        ];
        for ((got, want), transform) in rhos.iter().zip(want).zip(Transform::ALL) {
            let all = got.rho_all_layers.expect("spread");
            // Single-precision products move a few pairs across each other.
            assert!((all - want).abs() < 1e-4, "{transform}: {all} {want}");
            assert!(got.transform == transform && got.rho.expect("spread") >= all - 1e-12);
            assert!((1..=5).contains(&got.n_layers.expect("a mask")));
        }
    }

    #[test]
    fn count_times_idf_is_what_the_fit_reports() {
        let input = Planted::default().input();
        let (_, report) = fit(&input, &CalibrationParams::new(4)).expect("a good input");
        let rhos = transform_rhos(&input, None, 1);
        assert_eq!((rhos[1].rho, rhos[1].n_layers), (Some(report.rho), Some(report.layers.len())));
        assert_eq!((rhos[3].rho, rhos[4].rho_all_layers), (None, None));
        assert!(
            rhos.iter().all(|r| r.rho.is_some() != [Transform::Probability, Transform::Logit].contains(&r.transform))
        );
    }

    #[test]
    fn the_best_is_the_first_with_the_highest_rho() {
        let of = |transform, rho| TransformRho { transform, rho, n_layers: None, rho_all_layers: None };
        let rhos = [
            of(Transform::Count, Some(0.4)),
            of(Transform::CountIdf, Some(0.6)),
            of(Transform::Logit, None),
            of(Transform::Binary, Some(0.6)),
        ];
        assert_eq!(best_transform(&rhos), Some(Transform::CountIdf));
        assert_eq!(best_transform(&rhos[2..3]), None);
    }

    #[test]
    fn gates_are_used_only_where_every_request_has_finite_ones() {
        let input = Planted { n_requests: 12, ..Planted::default() }.input();
        let mut gates = gates(&input);
        gates[5].logit[7] = f32::NEG_INFINITY;
        let rhos = transform_rhos(&input, Some(&gates.iter().collect::<Vec<_>>()), 1);
        assert!(rhos[3].rho.is_some() && rhos[4].rho.is_none());

        let request = |gates: Option<&GateSums>| TraceRequest {
            id: String::new(),
            domain: None,
            n_prompt: 0,
            blocks: vec![],
            picks: vec![],
            gates: gates.cloned(),
        };
        let header = TraceHeader { shape: input.shape().clone(), fingerprint: String::new(), n_block: 1 };
        let requests = vec![request(Some(&gates[0])), request(None), request(Some(&gates[2]))];
        let trace = Trace { header, requests };
        assert_eq!(gates_of(&trace, [2, 0]), Some(vec![&gates[2], &gates[0]]));
        assert_eq!(gates_of(&trace, 0..3), None);
    }
}
