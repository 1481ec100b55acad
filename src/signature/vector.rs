//! The direction of a prompt's picks, and how alike two directions are.
//!
//! Never weighs counts itself: the weights belong to a calibration.

/// A request's direction in expert space: counts times idf over the masked layers, scaled to length 1.
///
/// (Paper, section 4.1.) An all-zero vector has no direction and is no signature.
///
/// ```
/// use eldr::signature::{Signature, dot};
///
/// let signature = Signature::normalised(vec![3.0, 0.0, 4.0]).expect("not all zero");
/// assert_eq!(signature.as_slice(), [0.6, 0.0, 0.8]);
/// assert_eq!(signature.cosine(&[0.0, 1.0, 0.0]), 0.0);
/// assert_eq!(dot(&[1.0, 2.0], &[3.0, 4.0]), 11.0);
/// assert_eq!(Signature::normalised(vec![0.0; 3]), None, "nothing has no direction");
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Signature(Vec<f32>);

impl Signature {
    /// Scales `weighted` (N* rows of E) to length 1; nothing if every entry is 0.
    pub fn normalised(mut weighted: Vec<f32>) -> Option<Self> {
        let length = squared_length(&weighted).sqrt();
        if length == 0.0 || !length.is_finite() {
            return None;
        }
        for x in &mut weighted {
            *x = (f64::from(*x) / length) as f32;
        }
        Some(Self(weighted))
    }

    /// The N* times E entries.
    pub fn as_slice(&self) -> &[f32] {
        &self.0
    }

    /// Cosine similarity with another unit vector of the same length.
    pub fn cosine(&self, unit: &[f32]) -> f32 {
        dot(&self.0, unit)
    }
}

/// The dot product of two vectors of the same length, with the same bits on every machine.
///
/// Sixteen interleaved partial sums, so that it runs at the speed of vector registers; they and the rest are added
/// in a fixed order.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    assert_eq!(a.len(), b.len(), "vectors of different models or masks");
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let mut lanes = [0.0f32; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    lanes.iter().sum::<f32>() + rest
}

/// Sum of squares in eight interleaved partial sums.
fn squared_length(x: &[f32]) -> f64 {
    const LANES: usize = 8;
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [0.0f64; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] += f64::from(chunk[lane]) * f64::from(chunk[lane]);
        }
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn three_four_becomes_a_unit_vector() {
        let signature = Signature::normalised(vec![3.0, 0.0, 4.0]).expect("not zero");
        assert_eq!(signature.as_slice(), [0.6, 0.0, 0.8]);
        assert!((signature.cosine(signature.as_slice()) - 1.0).abs() < 1e-6);
    }

    #[test]
    fn zero_has_no_direction() {
        assert_eq!(Signature::normalised(vec![0.0; 40]), None);
        assert_eq!(Signature::normalised(Vec::new()), None);
        assert_eq!(Signature::normalised(vec![1.0, f32::INFINITY]), None);
    }

    proptest! {
        #[test]
        fn lengths_and_products_equal_a_plain_sum(x in prop::collection::vec(-100i16..100, 1..120)) {
            // Sums of small whole numbers are exact in any order.
            let x: Vec<f32> = x.into_iter().map(f32::from).collect();
            let plain: f32 = x.iter().map(|x| x * x).sum();
            prop_assert_eq!(dot(&x, &x).to_bits(), plain.to_bits());
            prop_assert_eq!(squared_length(&x).to_bits(), f64::from(plain).to_bits());
        }
    }
}
