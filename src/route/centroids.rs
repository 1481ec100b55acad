//! One direction a worker, and how alike a request is to each.
//!
//! Never decides; it checks what it is given.

use std::sync::Arc;

use ndarray::{Array2, ArrayView1};

use crate::{route::RouteBuildError, types::WorkerId};

/// How far from a unit vector a centroid read from a file may be.
const UNIT_TOLERANCE: f32 = 1e-3;

/// Unit vectors, row i worker i's. New ones may leave workers out: a row of zeros, or an id past the last row.
#[derive(Debug, Clone)]
pub(super) struct Centroids {
    /// Rows without gaps.
    rows: Arc<Array2<f32>>,
    /// Which rows are a centroid; the others are zeros.
    is_set: Vec<bool>,
}

impl Centroids {
    /// One centroid for each of `n_workers`.
    pub(super) fn new(rows: Arc<Array2<f32>>, n_workers: usize) -> Result<Self, RouteBuildError> {
        if n_workers == 0 {
            return Err(RouteBuildError::NoWorkers);
        }
        if rows.nrows() != n_workers {
            return Err(RouteBuildError::WorkerCount { n_centroids: rows.nrows(), n_workers });
        }
        let is_set = check_rows(&rows)?;
        if let Some(centroid) = is_set.iter().position(|is_set| !is_set) {
            return Err(RouteBuildError::NotUnit { centroid, length: 0.0 });
        }
        Ok(Self { rows: in_row_order(rows), is_set })
    }

    /// Replaces them. Rows that are neither of length 1 nor all zeros, and rows of another width, are refused: the old
    /// ones stay.
    pub(super) fn set(&mut self, rows: &Arc<Array2<f32>>) -> Result<(), RouteBuildError> {
        let (found, want) = (rows.ncols(), self.rows.ncols());
        if found != want {
            return Err(RouteBuildError::Width { found, want });
        }
        self.replace(rows)
    }

    /// As [`Centroids::set`], of any width.
    pub(super) fn replace(&mut self, rows: &Arc<Array2<f32>>) -> Result<(), RouteBuildError> {
        self.is_set = check_rows(rows)?;
        self.rows = in_row_order(Arc::clone(rows));
        Ok(())
    }

    /// How alike `signature` is to the worker's centroid; nothing where it has none.
    pub(super) fn cosine(&self, worker: WorkerId, signature: &[f32]) -> Option<f32> {
        let (n_rows, dim) = self.rows.dim();
        assert_eq!(signature.len(), dim, "a signature of {} entries for centroids of {dim}", signature.len());
        let rows = self.rows.as_slice().expect("rows without gaps");
        let k = worker.index();
        (k < n_rows && self.is_set[k]).then(|| dot(signature, &rows[k * dim..][..dim]))
    }
}

/// Which rows are a unit vector; the others are all zeros, or this fails.
fn check_rows(centroids: &Array2<f32>) -> Result<Vec<bool>, RouteBuildError> {
    let is_set = |(centroid, row): (usize, ArrayView1<'_, f32>)| {
        let length = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt() as f32;
        let is_unit = (length - 1.0).abs() <= UNIT_TOLERANCE;
        let is_zero = row.iter().all(|x| x.abs().to_bits() == 0);
        if is_unit || is_zero { Ok(is_unit) } else { Err(RouteBuildError::NotUnit { centroid, length }) }
    };
    centroids.outer_iter().enumerate().map(is_set).collect()
}

fn in_row_order(centroids: Arc<Array2<f32>>) -> Arc<Array2<f32>> {
    if centroids.is_standard_layout() { centroids } else { Arc::new(centroids.as_standard_layout().into_owned()) }
}

/// The dot product, in sixteen partial sums: wide enough for vector registers, and the same on every machine.
///
/// Out of line: inlined, the sums are kept in memory and a decision takes a quarter longer.
#[inline(never)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0f32; LANES];
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}
