//! How likely it is that no sequence of a batch picks an expert, and what one more sequence would add.
//!
//! Never guesses a probability: those are handed in.

/// A probability of 1. Probabilities are whole numbers of 1/4096, so that sums are the same in any order and on every
/// machine.
pub(super) const ONE: i16 = 1 << 12;

/// Steps of a survival's logarithm: its unit is 2^-16, the table's 2^-8.
const UNIT: u32 = 1 << 16;
const TABLE_SHIFT: u32 = 8;
/// Below half of 1/4096 nothing survives: 13 halvings.
const N_TABLE: usize = 13 << 8;

/// Entries summed at once: 64 products of two probabilities fit 31 bits.
const CHUNK: usize = 64;

/// The logarithms of survivals, and back.
#[derive(Debug, Clone)]
pub(super) struct Tables {
    /// -log2(1 - q), for each q below 1.
    halvings: Vec<u32>,
    /// 2^-x in 1/4096, for each x.
    survival: Vec<i16>,
}

impl Tables {
    pub(super) fn new() -> Self {
        let one = f64::from(ONE);
        let halvings = |q: i16| (-(1.0 - f64::from(q) / one).log2() * f64::from(UNIT)).round() as u32;
        let survival = |x: usize| (one * (-(x as f64) / 256.0).exp2()).round() as i16;
        Self { halvings: (0..ONE).map(halvings).collect(), survival: (0..N_TABLE).map(survival).collect() }
    }

    fn survival(&self, halvings: u32) -> i16 {
        let rounded = (halvings + (1 << (TABLE_SHIFT - 1))) >> TABLE_SHIFT;
        self.survival.get(rounded as usize).copied().unwrap_or(0)
    }
}

/// A worker's batch as the sum of what its sequences are likely to pick.
///
/// The chance that nobody picks an expert is a product over the sequences. It is kept as a sum of whole logarithms:
/// what a sequence adds when it comes is exactly what it takes away when it leaves, however many have come and gone.
#[derive(Debug, Clone)]
pub(super) struct Survival {
    /// Of each expert: the logarithm of the chance that nobody picks it, and that chance.
    halvings: Vec<u32>,
    nobody: Vec<i16>,
    expected: f32,
}

impl Survival {
    /// An empty batch, of a model of `n_experts` experts over all its layers.
    pub(super) fn new(n_experts: usize) -> Self {
        Self { halvings: vec![0; n_experts], nobody: vec![ONE; n_experts], expected: 0.0 }
    }

    /// A sequence joins; `picks` are its probabilities, each below 1.
    pub(super) fn join(&mut self, picks: &[i16], tables: &Tables) {
        self.change(picks, tables, u32::wrapping_add);
    }

    /// A sequence that joined with the same `picks` leaves.
    pub(super) fn leave(&mut self, picks: &[i16], tables: &Tables) {
        self.change(picks, tables, u32::wrapping_sub);
    }

    fn change(&mut self, picks: &[i16], tables: &Tables, sum: fn(u32, u32) -> u32) {
        assert_eq!(picks.len(), self.halvings.len(), "picks of another model");
        let mut read = 0i64;
        for ((halvings, nobody), &q) in self.halvings.iter_mut().zip(&mut self.nobody).zip(picks) {
            *halvings = sum(*halvings, tables.halvings[q as usize]);
            *nobody = tables.survival(*halvings);
            read += i64::from(ONE - *nobody);
        }
        self.expected = read as f32 / f32::from(ONE);
    }

    /// Distinct experts a step of the batch is expected to read, summed over the layers.
    pub(super) fn expected(&self) -> f32 {
        self.expected
    }

    /// Distinct experts a sequence with `picks` would add to a step.
    pub(super) fn added(&self, picks: &[i16]) -> f32 {
        let (p, p_rest) = self.nobody.as_chunks::<CHUNK>();
        let (q, q_rest) = picks.as_chunks::<CHUNK>();
        let sum: i64 = p.iter().zip(q).map(|(p, q)| i64::from(products(p, q))).sum();
        let rest = i64::from(products(p_rest, q_rest));
        (sum + rest) as f32 / (f32::from(ONE) * f32::from(ONE))
    }
}

fn products(p: &[i16], q: &[i16]) -> i32 {
    p.iter().zip(q).map(|(&p, &q)| i32::from(p) * i32::from(q)).sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn batch(n_experts: usize, sequences: &[Vec<i16>]) -> Survival {
        let tables = Tables::new();
        let mut batch = Survival::new(n_experts);
        for picks in sequences {
            batch.join(picks, &tables);
        }
        batch
    }

    #[test]
    fn certain_and_impossible_picks_are_read_once_and_never() {
        let picks = vec![ONE - 1, 0, ONE / 2];
        let batch = batch(3, &[picks.clone(), picks.clone()]);
        assert_eq!(batch.nobody, [0, ONE, ONE / 4]);
        assert!((batch.expected() - 1.75).abs() < 1e-6);
        assert!((batch.added(&picks) - 0.125).abs() < 1e-6);
    }

    proptest! {
        #[test]
        fn is_the_product_of_the_definition(
            sequences in prop::collection::vec(prop::collection::vec(0i16..ONE, 150), 0..40),
            asking in prop::collection::vec(0i16..ONE, 150),
        ) {
            let batch = batch(150, &sequences);
            let survives = |e: usize| sequences.iter().map(|q| 1.0 - f64::from(q[e]) / 4096.0).product::<f64>();
            let expected: f64 = (0..150).map(|e| 1.0 - survives(e)).sum();
            let added: f64 = (0..150).map(|e| survives(e) * f64::from(asking[e]) / 4096.0).sum();
            prop_assert!((f64::from(batch.expected()) - expected).abs() < 0.2, "{} {expected}", batch.expected());
            prop_assert!((f64::from(batch.added(&asking)) - added).abs() < 0.2, "{} {added}", batch.added(&asking));
        }

        #[test]
        fn who_has_left_has_never_been_there(
            stay in prop::collection::vec(prop::collection::vec(0i16..ONE, 70), 0..6),
            leave in prop::collection::vec(prop::collection::vec(0i16..ONE, 70), 0..60),
        ) {
            let tables = Tables::new();
            let mut both = batch(70, &[leave.clone(), stay.clone()].concat());
            for picks in &leave {
                both.leave(picks, &tables);
            }
            let alone = batch(70, &stay);
            prop_assert_eq!(&both.halvings, &alone.halvings);
            prop_assert_eq!(&both.nobody, &alone.nobody);
            prop_assert_eq!(both.expected.to_bits(), alone.expected.to_bits());
        }
    }
}
