//! Recorded requests as pair products: what the layer mask and its rho are made of.
//!
//! Never clusters anything.

use ndarray::Array2;
use rayon::prelude::*;

use crate::{
    calibrate::{CalibrationInput, MAX_COMPARED, PairProducts, pair_products},
    rng::{Rng, mix},
};

/// The requests whose pairs are compared: all, or 2,048 drawn by `seed` if there are more; ascending.
///
/// Pairs grow with the square of the requests: 2,048 have 2.1 million, 400 MB over 48 layers.
pub(super) fn compared(n_requests: usize, seed: u64) -> Vec<usize> {
    let mut left: Vec<usize> = (0..n_requests).collect();
    if n_requests > MAX_COMPARED {
        let mut rng = Rng::new(mix(seed ^ 0x6d61_736b));
        for i in 0..MAX_COMPARED {
            left.swap(i, i + rng.below(n_requests - i));
        }
        left.truncate(MAX_COMPARED);
        left.sort_unstable();
    }
    left
}

/// Pair products of the requests `which` in each usable layer, where `value` says what a request shows at a layer's
/// position and an expert.
pub(super) fn layer_products(
    input: &CalibrationInput,
    which: &[usize],
    value: impl Fn(usize, usize, usize) -> f64 + Sync,
) -> Vec<PairProducts> {
    let e = input.shape().n_expert as usize;
    (0..input.usable().len())
        .into_par_iter()
        .map(|layer| {
            pair_products(&Array2::from_shape_fn((which.len(), e), |(at, expert)| value(which[at], layer, expert)))
        })
        .collect()
}

/// Pair products of what the requests `which` picked in decode, over all layers.
pub(super) fn decode_products(input: &CalibrationInput, which: &[usize]) -> PairProducts {
    let decode = input.decode();
    let (_, l, e) = decode.dim();
    pair_products(&Array2::from_shape_fn((which.len(), l * e), |(at, cell)| {
        f64::from(decode[[which[at], cell / e, cell % e]])
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_requests_are_compared_up_to_the_limit_and_a_fixed_sample_beyond() {
        for n in [0, 1, MAX_COMPARED] {
            assert_eq!(compared(n, 1), (0..n).collect::<Vec<_>>());
        }
        let n = 3 * MAX_COMPARED;
        let sample = compared(n, 1);
        assert_eq!((sample.len(), &sample), (MAX_COMPARED, &compared(n, 1)));
        assert!(sample.windows(2).all(|w| w[0] < w[1]) && sample[MAX_COMPARED - 1] < n);
        assert_ne!(sample, compared(n, 2));
    }
}
