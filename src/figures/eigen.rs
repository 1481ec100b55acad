//! The two largest eigenvalues of a symmetric matrix, and their vectors.
//!
//! Never depends on the number of threads.

use ndarray::{Array1, Array2, Axis, s};

use crate::rng::Rng;

/// Vectors iterated together; the more beyond two, the faster the first two settle.
const BLOCK: usize = 8;
const MAX_ITERATIONS: usize = 300;
/// Relative change of the two values at which they have settled.
const SETTLED: f64 = 1e-13;
const SEED: u64 = 1;

/// Value and unit vector of the two largest eigenvalues of a matrix without negative ones, largest first.
///
/// A value of 0 beside the largest comes with a zero vector: any direction would do. The entry of a vector that is
/// furthest from 0 is positive, the first of those about as far.
pub(super) fn leading_two(matrix: &Array2<f64>) -> [(f64, Array1<f64>); 2] {
    let n = matrix.nrows();
    let mut rng = Rng::new(SEED);
    let mut basis = Array2::from_shape_fn((n, BLOCK.min(n)), |_| rng.uniform() - 0.5);
    orthonormalise(&mut basis);
    let mut last = [f64::NAN; 2];
    for _ in 0..MAX_ITERATIONS {
        let next = matrix.dot(&basis);
        // The basis turned so that the small matrix it sees is diagonal (Rayleigh-Ritz).
        let (values, turn) = jacobi(basis.t().dot(&next));
        let top = [0, 1].map(|at| values.get(at).copied().unwrap_or(0.0));
        let is_settled = top.iter().zip(last).all(|(now, before)| (now - before).abs() <= SETTLED * top[0].abs());
        if is_settled {
            basis = basis.dot(&turn);
            break;
        }
        last = top;
        basis = next.dot(&turn);
        orthonormalise(&mut basis);
    }
    [0, 1]
        .map(|at| {
            let vector = if at < basis.ncols() { basis.column(at).to_owned() } else { Array1::zeros(n) };
            let value = vector.dot(&matrix.dot(&vector));
            (value, signed(vector))
        })
        .map({
            let mut largest = None;
            move |(value, vector)| {
                let largest = *largest.get_or_insert(value);
                if value > 1e-9 * largest { (value, vector) } else { (0.0, Array1::zeros(n)) }
            }
        })
}

fn signed(vector: Array1<f64>) -> Array1<f64> {
    let furthest = vector.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    let first = vector.iter().find(|x| x.abs() >= furthest * (1.0 - 1e-6));
    if first.is_some_and(|&x| x < 0.0) { -vector } else { vector }
}

/// Makes the columns unit vectors at right angles (Gram-Schmidt, twice); one that lies in the others becomes 0.
fn orthonormalise(basis: &mut Array2<f64>) {
    for at in 0..basis.ncols() {
        let (before, mut rest) = basis.view_mut().split_at(Axis(1), at);
        let mut column = rest.column_mut(0);
        let length_before = column.dot(&column).sqrt();
        for _ in 0..2 {
            for other in before.columns() {
                let shared = other.dot(&column);
                column.scaled_add(-shared, &other);
            }
        }
        let length = column.dot(&column).sqrt();
        let is_new = length > 1e-12 * length_before && length > 0.0;
        column.mapv_inplace(|x| if is_new { x / length } else { 0.0 });
    }
}

/// Eigenvalues of a small symmetric matrix, largest first, and their vectors as columns (cyclic Jacobi rotations).
fn jacobi(mut a: Array2<f64>) -> (Vec<f64>, Array2<f64>) {
    let n = a.nrows();
    let mut vectors = Array2::eye(n);
    for _ in 0..60 {
        let off: f64 = (0..n).flat_map(|p| (p + 1..n).map(move |q| (p, q))).map(|at| a[at] * a[at]).sum();
        if off <= 1e-30 * a.iter().map(|x| x * x).sum::<f64>() {
            break;
        }
        for (p, q) in (0..n).flat_map(|p| (p + 1..n).map(move |q| (p, q))) {
            if a[[p, q]] == 0.0 {
                continue;
            }
            let theta = (a[[q, q]] - a[[p, p]]) / (2.0 * a[[p, q]]);
            let tangent = theta.signum() / (theta.abs() + theta.hypot(1.0));
            let cosine = 1.0 / tangent.hypot(1.0);
            let sine = tangent * cosine;
            for i in 0..n {
                let (x, y) = (a[[i, p]], a[[i, q]]);
                (a[[i, p]], a[[i, q]]) = (cosine * x - sine * y, sine * x + cosine * y);
            }
            for i in 0..n {
                let (x, y) = (a[[p, i]], a[[q, i]]);
                (a[[p, i]], a[[q, i]]) = (cosine * x - sine * y, sine * x + cosine * y);
                let (x, y) = (vectors[[i, p]], vectors[[i, q]]);
                (vectors[[i, p]], vectors[[i, q]]) = (cosine * x - sine * y, sine * x + cosine * y);
            }
        }
    }
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&p, &q| a[[q, q]].total_cmp(&a[[p, p]]));
    let values = order.iter().map(|&at| a[[at, at]]).collect();
    let mut sorted = Array2::zeros((n, n));
    for (column, &at) in order.iter().enumerate() {
        sorted.slice_mut(s![.., column]).assign(&vectors.column(at));
    }
    (values, sorted)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A^T A of a random A.
    fn random(n: usize, rank: usize, seed: u64) -> Array2<f64> {
        let mut rng = Rng::new(seed);
        let a = Array2::from_shape_fn((rank, n), |_| rng.uniform() - 0.5);
        a.t().dot(&a)
    }

    #[test]
    fn jacobi_of_a_known_matrix() {
        let (values, vectors) = jacobi(ndarray::array![[2.0, 1.0], [1.0, 2.0]]);
        assert!((values[0] - 3.0).abs() < 1e-14 && (values[1] - 1.0).abs() < 1e-14);
        assert!((vectors[[0, 0]] - vectors[[1, 0]]).abs() < 1e-14);
        assert!((vectors[[0, 0]].abs() - 0.5f64.sqrt()).abs() < 1e-14);
    }

    #[test]
    fn equals_the_whole_spectrum() {
        for seed in 0..10 {
            let n = 12 + 3 * seed as usize;
            let matrix = random(n, n + 4, seed);
            let (values, vectors) = jacobi(matrix.clone());
            for (at, (value, vector)) in leading_two(&matrix).into_iter().enumerate() {
                assert!((value - values[at]).abs() < 1e-9 * values[0], "seed {seed}: {value} {}", values[at]);
                let same = vector.dot(&vectors.column(at)).abs();
                assert!((same - 1.0).abs() < 1e-4, "seed {seed}: {same}");
            }
        }
    }

    #[test]
    fn a_missing_second_direction_is_zero() {
        let [(first, vector), (second, none)] = leading_two(&random(9, 1, 4));
        assert!(first > 0.0 && second == 0.0, "{first} {second}");
        assert!((vector.dot(&vector) - 1.0).abs() < 1e-9 && none.iter().all(|&x| x == 0.0));
        let furthest = vector.iter().copied().max_by(|a, b| a.abs().total_cmp(&b.abs())).expect("entries");
        assert!(furthest > 0.0);
        let [(nothing, _), _] = leading_two(&Array2::zeros((3, 3)));
        assert!(nothing == 0.0);
    }
}
