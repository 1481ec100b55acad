//! Where signatures and centroids lie in the plane that shows most of their spread.
//!
//! Never used for routing, which compares whole signatures.

use ndarray::{Array1, Array2, Axis};
use serde::{Deserialize, Serialize};

use super::{
    Figure, Labels,
    eigen::leading_two,
    stats::{round, spread_sample},
};
use crate::{
    calibrate::{Calibration, CalibrationInput, CalibrationReport, pair_products},
    signature::{ExpertCounts, Signature, dot},
};

/// Signatures analysed and drawn at most.
const MAX_POINTS: usize = 1000;
const SEED: u64 = 1;

/// Signatures in their first two principal components.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Components {
    /// Share of the spread along each component.
    pub explained: [f64; 2],
    /// Requests with a signature.
    pub n_signatures: usize,
    /// The requests drawn, at most 1,000: one from each equal stretch of those with a signature.
    pub points: Vec<Point>,
    /// Each decode worker's centroid in the same plane.
    pub centroids: Vec<[f64; 2]>,
}

/// One request.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// First component.
    pub x: f64,
    /// Second component.
    pub y: f64,
    /// Its label's place in [`Labels::names`]; nothing for an uncommon one or none.
    pub label: Option<usize>,
    /// The decode worker whose cluster it is in, if it took part in the fit.
    pub worker: Option<u32>,
}

impl Components {
    pub(super) fn of(
        input: &CalibrationInput,
        calibration: &Calibration,
        report: &CalibrationReport,
        labels: &Labels,
    ) -> Figure<Self> {
        let signatures: Vec<(usize, Signature)> = (0..input.n_requests())
            .filter_map(|request| Some((request, signature(input, calibration, request)?)))
            .collect();
        let drawn = spread_sample(signatures.len(), MAX_POINTS, SEED);
        let drawn: Vec<&(usize, Signature)> = drawn.into_iter().map(|at| &signatures[at]).collect();
        let rows: Vec<&[f32]> = drawn.iter().map(|(_, signature)| signature.as_slice()).collect();
        let Some(plane) = Plane::of(&rows) else {
            return Figure::left_out("the signatures are all alike, or there are fewer than two");
        };
        let took_part = report.workers.len() == input.n_requests();
        let points = drawn.iter().enumerate().map(|(at, (request, _))| Point {
            x: round(plane.points[0][at]),
            y: round(plane.points[1][at]),
            label: labels.place(input.labels()[*request].as_deref()),
            worker: report.workers.get(*request).copied().flatten().filter(|_| took_part),
        });
        Figure::Data(Self {
            explained: plane.explained.map(round),
            n_signatures: signatures.len(),
            points: points.collect(),
            centroids: (0..calibration.n_workers())
                .map(|worker| plane.project(&rows, calibration.centroid(worker)).map(round))
                .collect(),
        })
    }
}

fn signature(input: &CalibrationInput, calibration: &Calibration, request: usize) -> Option<Signature> {
    let counts = input.prefill();
    let rows = counts.index_axis(Axis(0), request).iter().copied().collect();
    let e = input.shape().n_expert;
    calibration.signature(&ExpertCounts::from_rows(input.usable(), e, input.n_tokens()[request], rows))
}

/// The plane of the first two principal components.
struct Plane {
    /// Coordinates of the points on each axis.
    points: [Array1<f64>; 2],
    explained: [f64; 2],
    /// Unit eigenvectors of the centred Gram matrix, and the square roots of their values.
    axes: [(f64, Array1<f64>); 2],
    /// Product of each point with the mean of all.
    with_mean: Array1<f64>,
}

impl Plane {
    /// From products of pairs rather than of entries, because there are far fewer points than entries. Nothing if the
    /// points have no spread.
    fn of(rows: &[&[f32]]) -> Option<Self> {
        let n = rows.len();
        if n < 2 {
            return None;
        }
        let flat = rows.iter().copied().flatten().map(|&x| f64::from(x)).collect();
        let products = pair_products(&Array2::from_shape_vec((n, rows[0].len()), flat).expect("rows of one mask"));
        let mut gram = Array2::zeros((n, n));
        let mut pairs = products.pairs.iter();
        for i in 0..n {
            gram[[i, i]] = f64::from(products.squares[i]);
            for j in i + 1..n {
                let product = f64::from(*pairs.next().expect("a product for each pair"));
                gram[[i, j]] = product;
                gram[[j, i]] = product;
            }
        }
        let with_mean = gram.mean_axis(Axis(0)).expect("points");
        let mean_squared = with_mean.mean().expect("points");
        let scale = gram.diag().sum();
        for ((i, j), cell) in gram.indexed_iter_mut() {
            *cell += mean_squared - with_mean[i] - with_mean[j];
        }
        let spread = gram.diag().sum();
        // Products are single precision: less than this is rounding.
        if spread <= 1e-6 * scale {
            return None;
        }
        let axes = leading_two(&gram).map(|(value, vector)| (value.sqrt(), vector));
        Some(Self {
            points: [0, 1].map(|at: usize| &axes[at].1 * axes[at].0),
            explained: [0, 1].map(|at: usize| axes[at].0 * axes[at].0 / spread),
            axes,
            with_mean,
        })
    }

    /// Coordinates of another vector. An axis is a weighted sum of the points whose weights sum to 0, so products with
    /// the points are enough.
    fn project(&self, rows: &[&[f32]], vector: &[f32]) -> [f64; 2] {
        let products: Array1<f64> = rows.iter().map(|row| f64::from(dot(row, vector))).collect();
        let centred = products - &self.with_mean;
        [0, 1].map(|at: usize| {
            let (length, weights) = &self.axes[at];
            if *length > 0.0 { weights.dot(&centred) / length } else { 0.0 }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Points from 0 along two axes at right angles in four dimensions.
    fn rows(places: &[[f32; 2]]) -> Vec<Vec<f32>> {
        places.iter().map(|[a, b]| vec![1.0 + a, 2.0, 0.6 * b, 0.8 * b]).collect()
    }

    fn plane(rows: &[Vec<f32>]) -> Option<Plane> {
        Plane::of(&rows.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }

    #[test]
    fn points_of_a_known_plane_keep_their_places() {
        // Centred, with spread 2 * 9 along the first axis and 2 * 1 along the second.
        let places = [[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]];
        let rows = rows(&places);
        let plane = plane(&rows).expect("spread");
        assert!((plane.explained[0] - 0.9).abs() < 1e-6 && (plane.explained[1] - 0.1).abs() < 1e-6);
        for (at, place) in places.iter().enumerate() {
            for (axis, &want) in place.iter().enumerate() {
                let got = plane.points[axis][at];
                assert!((got - f64::from(want)).abs() < 1e-5, "point {at}, axis {axis}: {got} {want}");
            }
        }
        // A vector off the plane falls on its foot.
        let views: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        let [x, y] = plane.project(&views, &[2.5, 7.0, 0.6 * 0.25, 0.8 * 0.25]);
        assert!((x - 1.5).abs() < 1e-5 && (y - 0.25).abs() < 1e-5, "{x} {y}");
    }

    #[test]
    fn no_spread_has_no_plane_and_a_line_has_no_second_axis() {
        assert!(plane(&rows(&[[1.0, 1.0]])).is_none());
        assert!(plane(&rows(&[[1.0, 1.0]; 5])).is_none());
        let line = plane(&rows(&[[1.0, 0.0], [2.0, 0.0], [6.0, 0.0]])).expect("spread");
        assert!(line.points[1].iter().all(|&y| y == 0.0) && line.explained[1] == 0.0);
        assert!((line.points[0][2] - 3.0).abs() < 1e-5, "{:?}", line.points[0]);
    }
}
