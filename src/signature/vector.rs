/// A request's direction in expert space: counts times idf over the masked layers, scaled to length 1.
///
/// (Paper, section 4.1; DESIGN.md section 2, step 4.) An all-zero vector has no direction and is no signature.
#[derive(Debug, Clone, PartialEq)]
pub struct Signature(Vec<f32>);

impl Signature {
    /// Scales `weighted` (N* rows of E) to length 1; nothing if every entry is 0.
    pub fn normalised(mut weighted: Vec<f32>) -> Option<Self> {
        let length = weighted.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
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
        assert_eq!(self.0.len(), unit.len(), "vectors of different models or masks");
        self.0.iter().zip(unit).map(|(a, b)| a * b).sum()
    }
}
