//! Which layers to compare: those that together tell best who will share experts in decode.
//!
//! Never samples pairs, and never passes over a candidate that could win.

use rayon::prelude::*;

use crate::calibrate::{
    PairProducts,
    spearman::{Bounds, Bucket, Ranked, grid_key},
};

/// The layers a greedy search adds, in order, and how well each prefix tells decode distances.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerChoice {
    /// Positions of the layers in the list searched, in the order they were added.
    pub order: Vec<usize>,
    /// Rho with the first 1, 2, .. layers of `order`.
    pub curve: Vec<f64>,
    /// Length of the prefix with the highest rho, the shortest if several share it.
    pub n_kept: usize,
}

impl LayerChoice {
    /// The kept layers' positions, ascending.
    pub fn kept(&self) -> Vec<usize> {
        let mut kept = self.order[..self.n_kept].to_vec();
        kept.sort_unstable();
        kept
    }

    /// Rho of the kept layers.
    pub fn rho(&self) -> f64 {
        self.curve[self.n_kept - 1]
    }
}

/// Chooses layers one by one, each time the one that gives the highest rho, until none or `max_layers` are chosen.
///
/// Rho is Spearman's correlation between the cosine distances of requests over the chosen layers and those of
/// `target`, over all pairs. A request that weighs nothing in the chosen layers is at distance 1 from all others. Ties
/// go to the first layer. Every candidate competes in every round: one is only passed over when its rho is proven to be
/// lower. `Err` says which side has no spread, so that no rho is defined.
pub fn choose_layers(
    layers: &[PairProducts],
    target: &PairProducts,
    max_layers: usize,
) -> Result<LayerChoice, NoSpread> {
    let n = target.n();
    assert!(layers.iter().all(|layer| layer.n() == n), "layers and target compare the same requests");
    let mut search = Search::new(target);
    if search.target.is_constant() {
        return Err(NoSpread::Target);
    }
    let mut left: Vec<usize> = (0..layers.len()).collect();
    let (mut order, mut curve) = (Vec::new(), Vec::new());
    while !left.is_empty() && order.len() < max_layers {
        let (at, rho) = search.best(layers, &left).ok_or(NoSpread::Layers)?;
        let chosen = left.remove(at);
        search.add(&layers[chosen]);
        order.push(chosen);
        curve.push(rho);
    }
    let peak = curve.iter().copied().max_by(f64::total_cmp).ok_or(NoSpread::Layers)?;
    let n_kept = 1 + curve.iter().position(|rho| rho.total_cmp(&peak).is_eq()).expect("the peak is in the curve");
    Ok(LayerChoice { order, curve, n_kept })
}

/// Rho with all `layers` together, if it is defined.
pub(super) fn rho_of_all(layers: &[PairProducts], target: &PairProducts) -> Option<f64> {
    let (last, others) = layers.split_last()?;
    let mut search = Search::new(target);
    for layer in others {
        search.add(layer);
    }
    search.rho_with(last)
}

/// All distances on one side are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoSpread {
    /// Distances in the layers to choose from.
    Layers,
    /// Distances to be predicted.
    Target,
}

/// The layers chosen so far, summed.
struct Search {
    target: Ranked,
    pairs: Vec<f64>,
    squares: Vec<f64>,
    /// One for each thread. Results do not depend on how many there are.
    work: Vec<WorkSpace>,
    sorted: Vec<u64>,
}

#[derive(Default)]
struct WorkSpace {
    keys: Vec<u32>,
    table: Vec<Bucket>,
    inverse_lengths: Vec<f64>,
}

impl Search {
    fn new(target: &PairProducts) -> Self {
        let mut search = Self {
            target: Ranked::new(&[]),
            pairs: vec![0.0; target.pairs.len()],
            squares: vec![0.0; target.n()],
            work: Vec::new(),
            sorted: Vec::new(),
        };
        search.work.resize_with(rayon::current_num_threads(), WorkSpace::default);
        let mut work = WorkSpace::default();
        search.measure(target, &mut work);
        search.target = Ranked::new(&work.keys);
        search
    }

    /// Position in `left` of the layer to add, and rho with it. Nothing if rho is undefined with any.
    fn best(&mut self, layers: &[PairProducts], left: &[usize]) -> Option<(usize, f64)> {
        let mut candidates = self.bounds(layers, left);
        candidates.sort_unstable_by(|(a, x), (b, y)| y.high.total_cmp(&x.high).then(a.cmp(b)));
        let mut best: Option<(usize, f64)> = None;
        for (at, bounds) in candidates {
            if best.is_some_and(|(_, rho)| bounds.high < rho) {
                break;
            }
            let Some(rho) = self.rho_with(&layers[left[at]]) else { continue };
            if best.is_none_or(|(first, highest)| rho > highest || (rho >= highest && at < first)) {
                best = Some((at, rho));
            }
        }
        best
    }

    /// Bounds of rho with each layer of `left`, by position.
    fn bounds(&mut self, layers: &[PairProducts], left: &[usize]) -> Vec<(usize, Bounds)> {
        let mut work = std::mem::take(&mut self.work);
        let step = work.len();
        let this = &*self;
        let bounds = work
            .par_iter_mut()
            .enumerate()
            .flat_map_iter(|(thread, work)| {
                (thread..left.len()).step_by(step).map(move |at| {
                    this.measure(&layers[left[at]], work);
                    (at, this.target.bounds(&work.keys, &mut work.table))
                })
            })
            .collect();
        self.work = work;
        bounds
    }

    fn rho_with(&mut self, layer: &PairProducts) -> Option<f64> {
        let mut work = std::mem::take(&mut self.work[0]);
        self.measure(layer, &mut work);
        let rho = self.target.rho(&work.keys, &mut self.sorted);
        self.work[0] = work;
        rho
    }

    /// Keys of the cosines over the chosen layers and `layer`.
    fn measure(&self, layer: &PairProducts, work: &mut WorkSpace) {
        let inverse = |square: f64| if square > 0.0 { 1.0 / square.sqrt() } else { 0.0 };
        work.inverse_lengths.clear();
        work.inverse_lengths
            .extend(self.squares.iter().zip(&layer.squares).map(|(sum, &x)| inverse(sum + f64::from(x))));
        work.keys.resize(self.pairs.len(), 0);
        let mut rest = (work.keys.as_mut_slice(), self.pairs.as_slice(), layer.pairs.as_slice());
        for (i, &mine) in work.inverse_lengths.iter().enumerate() {
            let theirs = &work.inverse_lengths[i + 1..];
            let (keys, other_keys) = rest.0.split_at_mut(theirs.len());
            let (sums, other_sums) = rest.1.split_at(theirs.len());
            let (products, other_products) = rest.2.split_at(theirs.len());
            rest = (other_keys, other_sums, other_products);
            for (((key, sum), &product), other) in keys.iter_mut().zip(sums).zip(products).zip(theirs) {
                *key = grid_key((sum + f64::from(product)) * (mine * other));
            }
        }
    }

    fn add(&mut self, layer: &PairProducts) {
        for (sum, &x) in self.pairs.iter_mut().zip(&layer.pairs) {
            *sum += f64::from(x);
        }
        for (sum, &x) in self.squares.iter_mut().zip(&layer.squares) {
            *sum += f64::from(x);
        }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, Array3, Axis, concatenate, s};

    use super::*;
    use crate::{
        calibrate::{pair_products, spearman},
        rng::Rng,
    };

    /// N x L x E random picks, some requests without any in a layer.
    fn random(seed: u64, dim: (usize, usize, usize)) -> Array3<f64> {
        let mut rng = Rng::new(seed);
        Array3::from_shape_fn(dim, |_| if rng.below(3) == 0 { rng.below(9) as f64 } else { 0.0 })
    }

    /// Rho from the definition: build the vectors, measure each pair, rank.
    fn plain_rho(x: &Array2<f64>, y: &Array2<f64>) -> Option<f64> {
        let distances = |x: &Array2<f64>| -> Vec<f64> {
            let mut all = Vec::new();
            for i in 0..x.nrows() {
                for j in i + 1..x.nrows() {
                    let dot = |a: usize, b: usize| x.row(a).dot(&x.row(b));
                    let lengths = (dot(i, i) * dot(j, j)).sqrt();
                    let cosine = if lengths > 0.0 { dot(i, j) / lengths } else { 0.0 };
                    // Equal distances must tie in spite of rounding.
                    all.push(((1.0 - cosine) * f64::from(1 << 24)).round());
                }
            }
            all
        };
        spearman(&distances(x), &distances(y))
    }

    fn plain_choice(x: &Array3<f64>, y: &Array2<f64>) -> (Vec<usize>, Vec<f64>) {
        let mut left: Vec<usize> = (0..x.len_of(Axis(1))).collect();
        let (mut order, mut curve) = (Vec::new(), Vec::new());
        while !left.is_empty() {
            let rho_with = |layer: usize| {
                let union: Vec<_> = order.iter().chain([&layer]).map(|&l: &usize| x.slice(s![.., l, ..])).collect();
                plain_rho(&concatenate(Axis(1), &union).expect("same rows"), y).unwrap_or(f64::NEG_INFINITY)
            };
            let mut best = 0;
            for at in 1..left.len() {
                if rho_with(left[at]) > rho_with(left[best]) {
                    best = at;
                }
            }
            curve.push(rho_with(left[best]));
            order.push(left.remove(best));
        }
        (order, curve)
    }

    fn layers_of(x: &Array3<f64>) -> Vec<PairProducts> {
        x.axis_iter(Axis(1)).map(|layer| pair_products(&layer.to_owned())).collect()
    }

    #[test]
    fn equals_the_definition() {
        for seed in 0..20 {
            let n = 4 + seed as usize;
            let x = random(seed, (n, 5, 6));
            let y = random(seed + 100, (n, 1, 8)).index_axis_move(Axis(1), 0);
            let (order, curve) = plain_choice(&x, &y);
            let choice = choose_layers(&layers_of(&x), &pair_products(&y), usize::MAX).expect("spread");
            assert_eq!(choice.order, order, "seed {seed}");
            for (got, want) in choice.curve.iter().zip(&curve) {
                assert!((got - want).abs() < 1e-12, "seed {seed}: {got} {want}");
            }
            assert!(choice.curve.iter().all(|&rho| rho <= choice.rho()));
            assert!(choice.curve[..choice.n_kept - 1].iter().all(|&rho| rho < choice.rho()));
            let all = rho_of_all(&layers_of(&x), &pair_products(&y)).expect("spread");
            assert!((all - curve[4]).abs() < 1e-12);
        }
    }

    #[test]
    fn ties_go_to_the_first_layer_and_the_shorter_prefix() {
        let one = random(1, (9, 1, 6));
        let same = concatenate(Axis(1), &[one.view(), one.view(), one.view()]).expect("same sizes");
        let y = random(2, (9, 1, 6)).index_axis_move(Axis(1), 0);
        let choice = choose_layers(&layers_of(&same), &pair_products(&y), usize::MAX).expect("spread");
        assert_eq!((choice.order.as_slice(), choice.n_kept), (&[0, 1, 2][..], 1));
    }

    #[test]
    fn the_order_of_requests_does_not_matter() {
        let n = 40;
        let (x, y) = (random(3, (n, 6, 8)), random(4, (n, 1, 8)).index_axis_move(Axis(1), 0));
        let back: Vec<usize> = (0..n).rev().collect();
        let forward = choose_layers(&layers_of(&x), &pair_products(&y), usize::MAX);
        let (x, y) = (x.select(Axis(0), &back), y.select(Axis(0), &back));
        assert_eq!(choose_layers(&layers_of(&x), &pair_products(&y), usize::MAX), forward);
    }

    #[test]
    fn at_most_max_layers_are_searched() {
        let (x, y) = (random(5, (12, 6, 8)), random(6, (12, 1, 8)).index_axis_move(Axis(1), 0));
        let all = choose_layers(&layers_of(&x), &pair_products(&y), usize::MAX).expect("spread");
        let few = choose_layers(&layers_of(&x), &pair_products(&y), 2).expect("spread");
        assert_eq!((few.order.as_slice(), few.curve.as_slice()), (&all.order[..2], &all.curve[..2]));
    }

    #[test]
    fn equal_distances_are_reported_not_ranked() {
        let varied = pair_products(&random(7, (6, 1, 8)).index_axis_move(Axis(1), 0));
        let equal = pair_products(&Array2::from_elem((6, 8), 1.0));
        let none = pair_products(&Array2::zeros((6, 8)));
        let choose = |layers: &[PairProducts], target| choose_layers(layers, target, usize::MAX);
        assert_eq!(choose(&[equal.clone(), none.clone()], &varied), Err(NoSpread::Layers));
        assert_eq!(choose(std::slice::from_ref(&varied), &equal), Err(NoSpread::Target));
        assert_eq!(choose(&[], &varied), Err(NoSpread::Layers));
        // A layer without weight changes nothing and loses the tie.
        let choice = choose(&[none, varied.clone()], &varied).expect("spread");
        assert_eq!((choice.order.as_slice(), choice.n_kept), (&[1, 0][..], 1));
        assert!((choice.rho() - 1.0).abs() < 1e-12);
    }
}
