//! How well a request's prefill picks foretell its decode picks.
//!
//! Never pools requests before comparing their picks.

use ndarray::{ArrayView1, s};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{
    Figure,
    stats::{Moments, round, spread_sample},
};
use crate::calibrate::{CalibrationInput, CalibrationReport};

/// Points drawn at most.
const MAX_POINTS: usize = 2000;
const SEED: u64 = 1;

/// Shares of picks in prefill and in decode, for each request, usable layer and expert.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Phases {
    /// Pearson's correlation of the two shares over all requests, usable layers and experts.
    pub r: Option<f64>,
    /// Pearson's correlation of a request's prefill and decode counts, averaged over requests.
    pub r_of_request: Option<f64>,
    /// The usable layers.
    pub layers: Vec<PhaseLayer>,
    /// Prefill and decode share of a sample of them, at most 2,000: one drawn from each equal stretch of those picked
    /// at all, in order of layers and requests.
    pub points: Vec<[f64; 2]>,
    /// How many were picked at all, in prefill or decode.
    pub n_picked: usize,
}

/// One usable layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PhaseLayer {
    /// llama.cpp's number of the layer.
    pub layer: u32,
    /// Correlation over all its requests and experts.
    pub r: Option<f64>,
    /// Correlation within a request, averaged over requests.
    pub r_of_request: Option<f64>,
}

impl Phases {
    pub(super) fn of(input: &CalibrationInput, report: &CalibrationReport) -> Figure<Self> {
        let layers: Vec<Layer> = (0..input.usable().len()).into_par_iter().map(|at| Layer::of(input, at)).collect();
        let n_picked = layers.iter().map(|layer| layer.n_picked).sum();
        if n_picked == 0 {
            return Figure::left_out("no layer has both prefill and decode picks");
        }
        let mut all = Moments::default();
        for layer in &layers {
            all.merge(&layer.moments);
        }
        Figure::Data(Self {
            r: all.r().map(round),
            r_of_request: report.prefill_decode_correlation.map(round),
            layers: layers
                .iter()
                .zip(input.usable())
                .map(|(layer, &row)| PhaseLayer {
                    layer: input.shape().layers[row as usize],
                    r: layer.moments.r().map(round),
                    r_of_request: layer.r_of_request.map(round),
                })
                .collect(),
            points: points(input, n_picked),
            n_picked,
        })
    }
}

struct Layer {
    moments: Moments,
    r_of_request: Option<f64>,
    n_picked: usize,
}

impl Layer {
    /// Of the usable layer at `position`.
    fn of(input: &CalibrationInput, position: usize) -> Self {
        let mut layer = Self { moments: Moments::default(), r_of_request: None, n_picked: 0 };
        let mean = 1.0 / f64::from(input.shape().n_expert);
        let (mut sum, mut n) = (0.0, 0u32);
        for request in 0..input.n_requests() {
            let mut own = Moments::default();
            for [x, y] in shares(input, position, request) {
                own.add(x - mean, y - mean);
                layer.n_picked += usize::from(x + y > 0.0);
            }
            layer.moments.merge(&own);
            if let Some(r) = own.r() {
                sum += r;
                n += 1;
            }
        }
        layer.r_of_request = (n > 0).then(|| sum / f64::from(n));
        layer
    }
}

/// Share of each expert in a request's prefill and decode picks of one usable layer; empty without picks in either.
fn shares(input: &CalibrationInput, position: usize, request: usize) -> impl Iterator<Item = [f64; 2]> {
    let prefill = input.prefill().slice_move(s![request, position, ..]);
    let decode = input.decode().slice_move(s![request, input.usable()[position] as usize, ..]);
    let sum = |counts: &ArrayView1<'_, u32>| counts.iter().map(|&n| u64::from(n)).sum::<u64>() as f64;
    let (all_prefill, all_decode) = (sum(&prefill), sum(&decode));
    prefill
        .into_iter()
        .zip(decode)
        .filter(move |_| all_prefill > 0.0 && all_decode > 0.0)
        .map(move |(&x, &y)| [f64::from(x) / all_prefill, f64::from(y) / all_decode])
}

fn points(input: &CalibrationInput, n_picked: usize) -> Vec<[f64; 2]> {
    let mut wanted = spread_sample(n_picked, MAX_POINTS, SEED).into_iter().peekable();
    (0..input.usable().len())
        .flat_map(|position| (0..input.n_requests()).map(move |request| (position, request)))
        .flat_map(|(position, request)| shares(input, position, request))
        .filter(|[x, y]| x + y > 0.0)
        .enumerate()
        .filter(|(at, _)| wanted.next_if_eq(at).is_some())
        .map(|(_, shares)| shares.map(round))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        figures::{Extras, planted::Planted},
        signature::ExpertCounts,
        types::MoeShape,
    };

    #[test]
    fn r_is_pearsons_of_every_share() {
        let planted = Planted { n_requests: 24, ..Planted::default() };
        let (trace, data) = (planted.trace(), planted.report(Extras::default()));
        let phases = data.phases.data().expect("picks");
        let mut all = Vec::new();
        for (layer, got) in phases.layers.iter().enumerate() {
            let (mut cells, mut of_requests) = (Vec::new(), Vec::new());
            for request in &trace.requests {
                let share = |counts: ExpertCounts| -> Vec<f64> {
                    let row = counts.row(layer as u32).expect("a usable layer");
                    row.iter().map(|&n| f64::from(n) / f64::from(row.iter().sum::<u32>())).collect()
                };
                let (x, y) =
                    (share(request.prefill_counts(&trace.header)), share(request.decode_counts(&trace.header)));
                let own: Vec<(f64, f64)> = x.into_iter().zip(y).collect();
                of_requests.push(pearson(&own));
                cells.extend(own);
            }
            let mean = of_requests.iter().sum::<f64>() / of_requests.len() as f64;
            assert!((got.r.expect("spread") - pearson(&cells)).abs() < 1e-6);
            assert!((got.r_of_request.expect("spread") - mean).abs() < 1e-6);
            all.extend(cells);
        }
        assert!((phases.r.expect("spread") - pearson(&all)).abs() < 1e-6);
        assert_eq!(phases.n_picked, all.iter().filter(|(x, y)| x + y > 0.0).count());
        assert_eq!(phases.points.len(), phases.n_picked.min(MAX_POINTS));
        assert!(phases.points.iter().all(|&[x, y]| all.iter().any(|c| (c.0 - x).abs().max((c.1 - y).abs()) < 1e-6)));
    }

    /// As a textbook has it, in two passes.
    fn pearson(pairs: &[(f64, f64)]) -> f64 {
        let n = pairs.len() as f64;
        let (mean_x, mean_y) = (pairs.iter().map(|p| p.0).sum::<f64>() / n, pairs.iter().map(|p| p.1).sum::<f64>() / n);
        let sum = |f: &dyn Fn(f64, f64) -> f64| pairs.iter().map(|p| f(p.0 - mean_x, p.1 - mean_y)).sum::<f64>();
        sum(&|x, y| x * y) / (sum(&|x, _| x * x) * sum(&|_, y| y * y)).sqrt()
    }

    #[test]
    fn requests_without_decode_picks_take_no_part() {
        let shape = MoeShape { layers: vec![0, 1], n_layer: 2, n_expert: 3, n_expert_used: 1 };
        let mut input = CalibrationInput::new(shape, "planted");
        let prefill = ExpertCounts::from_rows(&[0], 3, 4, vec![3, 1, 0]);
        input.push("silent", None, &prefill, &ExpertCounts::new(&[0, 1], 3));
        assert_eq!(shares(&input, 0, 0).count(), 0);
        input.push("both", None, &prefill, &ExpertCounts::from_rows(&[0, 1], 3, 2, vec![1, 0, 1, 0, 0, 2]));
        assert_eq!(shares(&input, 0, 1).collect::<Vec<_>>(), [[0.75, 0.5], [0.25, 0.0], [0.0, 0.5]]);
        assert_eq!(points(&input, 3), [[0.75, 0.5], [0.25, 0.0], [0.0, 0.5]]);
    }
}
