//! How likely it is that no sequence of a batch picks an expert, and what one more sequence would add.
//!
//! Never guesses a probability: those are handed in.

/// A probability of 1, of picking an expert. Probabilities are whole numbers, so that sums are the same in any order and
/// on every machine.
pub(super) const ONE: u16 = 1 << 13;
/// A probability of 1, of an expert that nobody picks.
const ALIVE: u16 = 1 << 15;

/// Steps of a survival's logarithm: its unit is 2^-16, the table's 2^-8.
const UNIT: u32 = 1 << 16;
const TABLE_SHIFT: u32 = 8;
/// Below half of 1/32768 nothing survives: 16 halvings.
const N_TABLE: usize = 16 << 8;

/// Batches over which survivals are averaged. Of half as many the batch of now is too large a part; twice as many gain
/// no more.
const BATCHES: i32 = 75;

/// Products are summed in so many lanes of 16 bits, which hold so many of them: each is below 2^12.
const LANES: usize = 32;
const N_SUMMED: usize = 16;
const PRODUCT_SHIFT: u32 = 16;
const PRODUCT_ONE: f32 = ((ONE as u32 * ALIVE as u32) >> PRODUCT_SHIFT) as f32;

/// The logarithms of survivals, and back.
#[derive(Debug, Clone)]
pub(super) struct Tables {
    /// -log2(1 - q), for each q below 1.
    halvings: Vec<u32>,
    /// 2^-x in 1/32768, for each x.
    survival: Vec<u16>,
}

impl Tables {
    pub(super) fn new() -> Self {
        let (one, alive) = (f64::from(ONE), f64::from(ALIVE));
        let halvings = |q: u16| (-(1.0 - f64::from(q) / one).log2() * f64::from(UNIT)).round() as u32;
        let survival = |x: usize| (alive * (-(x as f64) / 256.0).exp2()).round() as u16;
        Self { halvings: (0..ONE).map(halvings).collect(), survival: (0..N_TABLE).map(survival).collect() }
    }

    fn survival(&self, halvings: u32) -> u16 {
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
    nobody: Vec<u16>,
    expected: f32,
    /// The mean of `nobody` over the last batches.
    usually: Vec<u16>,
}

impl Survival {
    /// An empty batch, of a model of `n_experts` experts over all its layers.
    pub(super) fn new(n_experts: usize) -> Self {
        Self {
            halvings: vec![0; n_experts],
            nobody: vec![ALIVE; n_experts],
            expected: 0.0,
            usually: vec![ALIVE; n_experts],
        }
    }

    /// A sequence joins; `picks` are its probabilities, each below 1.
    pub(super) fn join(&mut self, picks: &[u16], tables: &Tables) {
        self.change(picks, tables, u32::wrapping_add);
    }

    /// A sequence that joined with the same `picks` leaves.
    pub(super) fn leave(&mut self, picks: &[u16], tables: &Tables) {
        self.change(picks, tables, u32::wrapping_sub);
    }

    fn change(&mut self, picks: &[u16], tables: &Tables, sum: fn(u32, u32) -> u32) {
        assert_eq!(picks.len(), self.halvings.len(), "picks of another model");
        let mut read = 0u64;
        for ((halvings, nobody), &q) in self.halvings.iter_mut().zip(&mut self.nobody).zip(picks) {
            *halvings = sum(*halvings, tables.halvings[q as usize]);
            *nobody = tables.survival(*halvings);
            read += u64::from(ALIVE - *nobody);
        }
        self.expected = read as f32 / f32::from(ALIVE);
    }

    /// A sequence that joined with the picks `old` is likely to pick `new` from now on.
    pub(super) fn replace(&mut self, old: &[u16], new: &[u16], tables: &Tables) {
        self.leave(old, tables);
        self.join(new, tables);
    }

    /// Takes the batch as it is into the mean of the last ones.
    pub(super) fn remember(&mut self) {
        for (usually, &now) in self.usually.iter_mut().zip(&self.nobody) {
            let step = (i32::from(now) - i32::from(*usually)) / BATCHES;
            *usually = (i32::from(*usually) + step) as u16;
        }
    }

    /// Distinct experts a step of the batch is expected to read, summed over the layers.
    pub(super) fn expected(&self) -> f32 {
        self.expected
    }

    /// Distinct experts a sequence with `picks` would add to a step. Each expert's chance is rounded down to 1/4096.
    ///
    /// The upper halves of products of 16 bits: the one multiplication that every x86-64 does eight at a time.
    pub(super) fn added(&self, picks: &[u16]) -> f32 {
        sum_of_products(&self.nobody, picks)
    }

    /// As [`Survival::added`], to the last batches on average.
    pub(super) fn usually_added(&self, picks: &[u16]) -> f32 {
        sum_of_products(&self.usually, picks)
    }
}

/// Out of line: inlined, it is not made of the instructions it is written for, and a decision takes half as long again.
#[inline(never)]
fn sum_of_products(survivals: &[u16], picks: &[u16]) -> f32 {
    let (p, p_rest) = survivals.as_chunks::<LANES>();
    let (q, q_rest) = picks.as_chunks::<LANES>();
    let mut sum = 0u32;
    for (p, q) in p.chunks(N_SUMMED).zip(q.chunks(N_SUMMED)) {
        let mut lanes = [0u16; LANES];
        for (p, q) in p.iter().zip(q) {
            for lane in 0..LANES {
                lanes[lane] = lanes[lane].wrapping_add(product(p[lane], q[lane]));
            }
        }
        sum += lanes.iter().map(|&lane| u32::from(lane)).sum::<u32>();
    }
    let rest: u32 = p_rest.iter().zip(q_rest).map(|(&p, &q)| u32::from(product(p, q))).sum();
    (sum + rest) as f32 / PRODUCT_ONE
}

fn product(p: u16, q: u16) -> u16 {
    ((u32::from(p) * u32::from(q)) >> PRODUCT_SHIFT) as u16
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn batch(n_experts: usize, sequences: &[Vec<u16>]) -> Survival {
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
        assert_eq!(batch.nobody, [0, ALIVE, ALIVE / 4]);
        assert!((batch.expected() - 1.75).abs() < 1e-6);
        assert!((batch.added(&picks) - 0.125).abs() < 1e-6);
    }

    proptest! {
        #[test]
        fn is_the_product_of_the_definition(
            sequences in prop::collection::vec(prop::collection::vec(0u16..ONE, 560), 0..40),
            asking in prop::collection::vec(0u16..ONE, 560),
        ) {
            let batch = batch(560, &sequences);
            let survives = |e: usize| sequences.iter().map(|q| 1.0 - f64::from(q[e]) / f64::from(ONE)).product::<f64>();
            let expected: f64 = (0..560).map(|e| 1.0 - survives(e)).sum();
            let added: f64 = (0..560).map(|e| survives(e) * f64::from(asking[e]) / f64::from(ONE)).sum();
            prop_assert!((f64::from(batch.expected()) - expected).abs() < 0.2, "{} {expected}", batch.expected());
            prop_assert!((f64::from(batch.added(&asking)) - added).abs() < 0.2, "{} {added}", batch.added(&asking));
        }

        #[test]
        fn who_has_left_has_never_been_there(
            stay in prop::collection::vec(prop::collection::vec(0u16..ONE, 70), 0..6),
            leave in prop::collection::vec(prop::collection::vec(0u16..ONE, 70), 0..60),
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
