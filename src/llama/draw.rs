//! Which of a row of logits a number between 0 and 1 draws.
//!
//! Never calls the system's `exp`: one of ours is as exact as a draw needs, runs in vector registers, and gives the same
//! bits on every machine. A vocabulary of 150,000 tokens would otherwise cost milliseconds a sequence a step.

/// Weights summed together; a draw skips whole blocks of them.
const BLOCK: usize = 256;

/// Partial sums, for vector registers; the same on every machine.
const LANES: usize = 16;

/// Index of the logit at `uniform` of the cumulative distribution of `softmax(logits / temperature)`, in their order.
/// NaN weighs nothing; `None` when no logit is a number. `weights` is kept to spare an allocation a draw.
pub(super) fn draw(logits: &[f32], temperature: f32, uniform: f64, weights: &mut Vec<f32>) -> Option<usize> {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if top == f32::NEG_INFINITY {
        return None;
    }
    // So cold, or so penalised, that nothing but the likeliest has a chance: beside it, no weight could be computed.
    if !(top / temperature).is_finite() {
        return logits.iter().position(|logit| logit.total_cmp(&top).is_eq());
    }
    let top = top / temperature;
    weights.clear();
    weights.extend(logits.iter().map(|logit| exp(logit / temperature - top)));
    let sums: Vec<f64> = weights.chunks(BLOCK).map(sum).collect();
    let target = uniform * sums.iter().sum::<f64>();
    let mut below = 0.0;
    let mut start = None;
    for (block, sum) in sums.iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
        // Rounding can leave the target past all blocks: then it is in the last one.
        below += start.map_or(0.0, |before: usize| sums[before]);
        start = Some(block);
        if below + sum > target {
            break;
        }
    }
    let start = start? * BLOCK;
    let mut drawn = None;
    for (at, &weight) in weights[start..].iter().take(BLOCK).enumerate().filter(|(_, weight)| **weight > 0.0) {
        // Rounding can leave the target past the block's weights: then the last of them is drawn.
        drawn = Some(start + at);
        below += f64::from(weight);
        if below > target {
            break;
        }
    }
    drawn
}

fn sum(weights: &[f32]) -> f64 {
    let (blocks, rest) = weights.as_chunks::<LANES>();
    let mut sums = [0.0f64; LANES];
    for block in blocks {
        for lane in 0..LANES {
            sums[lane] += f64::from(block[lane]);
        }
    }
    sums.iter().sum::<f64>() + rest.iter().map(|&weight| f64::from(weight)).sum::<f64>()
}

/// e^x for x up to 0, within two units in the last place; 0 below -87, where the result would be denormal, and for NaN.
///
/// 2^n times a polynomial for the rest of the exponent, as in Cephes' `expf`.
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// Adding and subtracting it rounds to a whole number, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let shifted = x.max(-87.0) * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x.max(-87.0) - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1] {
        p = p * r + c;
    }
    let p = p * r * r + r + 1.0;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    // A comparison with NaN is false.
    if x >= -87.0 { p * scale } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for i in 0..=870_000 {
            let x = -(i as f32) / 10_000.0;
            let (got, want) = (exp(x), f64::from(x).exp());
            assert!((f64::from(got) / want - 1.0).abs() < 2.4e-7, "{x}: {got} for {want}");
        }
        assert_eq!(
            [exp(0.0), exp(-88.0), exp(f32::NEG_INFINITY), exp(f32::NAN)].map(f32::to_bits),
            [1.0, 0.0, 0.0, 0.0].map(f32::to_bits)
        );
    }

    #[test]
    fn the_likeliest_is_drawn_where_no_other_has_a_weight() {
        // A temperature of 1e-40 gave no token, which cost the worker and, one worker after the other, the engine.
        let weights = &mut Vec::new();
        for temperature in [f32::from_bits(1), 1e-40, 1e-38, 1e-30] {
            for top in [3.0, -3.0, f32::MAX, f32::MIN_POSITIVE] {
                let logits = [top - 5.0, f32::NAN, top, top - 1.0, f32::NEG_INFINITY];
                let most = logits.iter().position(|&logit| logit >= top);
                assert_eq!(draw(&logits, temperature, 0.9999, weights), most, "{top} at {temperature}");
            }
        }
        // A repetition "penalty" that raises a token beyond every number.
        assert_eq!(draw(&[1.0, f32::INFINITY, 2.0], 1.0, 0.5, weights), Some(1));
    }

    #[test]
    fn what_is_no_number_is_never_drawn() {
        let weights = &mut Vec::new();
        assert_eq!(draw(&[], 1.0, 0.5, weights), None);
        assert_eq!(draw(&[f32::NAN, f32::NEG_INFINITY], 1.0, 0.5, weights), None);
        let mut logits = vec![f32::NAN; 1000];
        logits[700] = -3.0;
        for uniform in [0.0, 0.5, 1.0] {
            assert_eq!(draw(&logits, 0.7, uniform, weights), Some(700));
        }
    }

    /// One sum from the first to the last, by the system's `exp`.
    fn reference(logits: &[f32], temperature: f32, uniform: f64) -> (usize, f64) {
        let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f64> =
            logits.iter().map(|&l| ((f64::from(l) - f64::from(top)) / f64::from(temperature)).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut sum = 0.0;
        let mut nearest = f64::INFINITY;
        let mut drawn = 0;
        for (at, weight) in weights.iter().enumerate() {
            if sum <= uniform * total {
                drawn = at;
            }
            sum += weight;
            nearest = nearest.min((sum / total - uniform).abs());
        }
        (drawn, nearest)
    }

    proptest! {
        #[test]
        fn a_draw_is_the_inverse_of_the_cumulative_distribution(
            logits in prop::collection::vec(-20.0f32..20.0, 1..1500),
            temperature in 0.3f32..3.0,
            uniform in 0.0f64..1.0,
        ) {
            let (want, to_edge) = reference(&logits, temperature, uniform);
            // On an edge rounding decides.
            prop_assume!(to_edge > 1e-5);
            prop_assert_eq!(draw(&logits, temperature, uniform, &mut Vec::new()), Some(want));
        }
    }
}
