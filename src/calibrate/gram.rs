//! How alike all pairs of requests are, layer by layer.
//!
//! Never keeps whole N x N matrices.

use ndarray::{Array2, s};
use rayon::prelude::*;

/// Dot products of all pairs of N vectors: everything cosine distances need, and additive over layers.
#[derive(Debug, Clone, PartialEq)]
pub struct PairProducts {
    /// Products of the pairs (0, 1), (0, 2), .., (0, N-1), (1, 2), .., (N-2, N-1).
    pub pairs: Vec<f32>,
    /// Product of each vector with itself.
    pub squares: Vec<f32>,
}

impl PairProducts {
    /// Vectors compared (N).
    pub fn n(&self) -> usize {
        self.squares.len()
    }
}

/// Rows of one matrix product: tall enough to keep it busy, short enough to skip most of the lower triangle.
const BLOCK: usize = 64;

/// The products of all pairs of rows of `x`, summed in double precision.
///
/// Equal rows give equal products, whatever their places and the number of threads.
pub fn pair_products(x: &Array2<f64>) -> PairProducts {
    let n = x.nrows();
    let mut pairs = vec![0.0f32; n * n.saturating_sub(1) / 2];
    let mut squares = vec![0.0f32; n];
    let mut blocks = Vec::new();
    let mut rest = pairs.as_mut_slice();
    for (block, squares) in squares.chunks_mut(BLOCK).enumerate() {
        let start = block * BLOCK;
        let n_pairs = (0..squares.len()).map(|i| n - 1 - start - i).sum();
        let (mine, others) = rest.split_at_mut(n_pairs);
        rest = others;
        blocks.push((start, mine, squares));
    }
    blocks.into_par_iter().for_each(|(start, mut pairs, squares)| {
        let rows = x.slice(s![start..start + squares.len(), ..]);
        let product = rows.dot(&x.slice(s![start.., ..]).t());
        for (i, square) in squares.iter_mut().enumerate() {
            *square = product[[i, i]] as f32;
            let above = product.slice(s![i, i + 1..]);
            let (row, others) = pairs.split_at_mut(above.len());
            for (pair, &product) in row.iter_mut().zip(above) {
                *pair = product as f32;
            }
            pairs = others;
        }
    });
    PairProducts { pairs, squares }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn products_equal_plain_sums() {
        for n in [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5] {
            let mut rng = Rng::new(n as u64);
            let x = Array2::from_shape_fn((n, 7), |_| rng.below(100) as f64);
            let products = pair_products(&x);
            let mut at = 0;
            for i in 0..n {
                let product = |j: usize| (0..7).map(|e| x[[i, e]] * x[[j, e]]).sum::<f64>() as f32;
                assert_eq!(products.squares[i].to_bits(), product(i).to_bits());
                for j in i + 1..n {
                    assert_eq!(products.pairs[at].to_bits(), product(j).to_bits(), "pair ({i}, {j}) of {n}");
                    at += 1;
                }
            }
            assert_eq!(at, products.pairs.len());
        }
    }

    #[test]
    fn equal_rows_give_equal_products_in_every_place() {
        let mut rng = Rng::new(5);
        let kinds = Array2::from_shape_fn((3, 300), |_| rng.uniform());
        let n = 2 * BLOCK + 9;
        let x = Array2::from_shape_fn((n, 300), |(r, e)| kinds[[r % 3, e]]);
        let products = pair_products(&x);
        let mut seen = [[None; 3]; 3];
        let mut at = 0;
        for i in 0..n {
            for j in i + 1..n {
                let (a, b) = (i % 3, j % 3);
                let first = *seen[a.min(b)][a.max(b)].get_or_insert(products.pairs[at]);
                assert_eq!(first.to_bits(), products.pairs[at].to_bits());
                if a == b {
                    assert_eq!(products.squares[i].to_bits(), first.to_bits());
                }
                at += 1;
            }
        }
    }
}
