//! How much each expert tells about a prompt: rare ones much, common ones nothing.
//!
//! Never looks at gate scores.

use ndarray::ArrayView2;
use rayon::prelude::*;

use crate::calibrate::CalibrationInput;

/// Weight of each expert of one layer: ln((n + 1) / (df + 1)), where df of the n requests picked the expert.
///
/// `counts` has a row of E for each request. An expert that every request picks weighs 0. (Paper, section 4.1.)
fn idf(counts: &ArrayView2<'_, u32>) -> Vec<f32> {
    let n = counts.nrows();
    counts
        .columns()
        .into_iter()
        .map(|column| {
            let df = column.iter().filter(|&&c| c > 0).count();
            ((n + 1) as f64 / (df + 1) as f64).ln() as f32
        })
        .collect()
}

/// Appends counts times weights.
pub(super) fn weigh(counts: &[u32], weights: &[f32], out: &mut Vec<f32>) {
    out.extend(counts.iter().zip(weights).map(|(&n, &w)| n as f32 * w));
}

/// A row of E weights for each usable layer.
pub(super) fn weights(input: &CalibrationInput) -> Vec<Vec<f32>> {
    (0..input.usable().len()).into_par_iter().map(|position| idf(&input.prefill_layer(position))).collect()
}

#[cfg(test)]
mod tests {
    use ndarray::array;

    use super::*;

    #[test]
    fn rare_experts_weigh_more_and_common_ones_nothing() {
        let counts = array![[1u32, 0, 0, 5], [2, 0, 1, 1], [9, 0, 0, 0]];
        let weights = idf(&counts.view());
        let want = [0.0, 4.0f64.ln() as f32, 2.0f64.ln() as f32, (4.0f64 / 3.0).ln() as f32];
        assert_eq!(weights, want);
    }
}
