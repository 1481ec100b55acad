//! Which layers to compare: those that together tell best who will share experts in decode.
//!
//! Never samples pairs, and never passes over a candidate that could win.
//!
//! Each round every layer left is a candidate, and one pass over all pairs bounds its rho from below and above. The
//! candidate with the highest lower bound proves all those worse whose upper bound is under it; the others, few in
//! most rounds, get closer bounds in the same way and, if that leaves several, their exact rho. Bounds only
//! ever rule out what the exact values would, so the choice is that of comparing exact values throughout.

use rayon::prelude::*;

use crate::calibrate::{
    PairProducts,
    cosines::SummedProducts,
    ranked::{Bounds, COARSE, FINE, Histogram, Ranked},
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
    assert!(n <= MAX_COMPARED, "{n} requests are more than the {MAX_COMPARED} that can be compared");
    let mut search = Search { target: ranked(target), chosen: SummedProducts::new(n) };
    if search.target.is_constant() {
        return Err(NoSpread::Target);
    }
    let mut left: Vec<usize> = (0..layers.len()).collect();
    let (mut order, mut curve) = (Vec::new(), Vec::new());
    let mut last: Option<Chosen> = None;
    while !left.is_empty() && order.len() < max_layers {
        // How good the last choice was and what the next may be are two questions about the same sums.
        let (rho, candidates) = rayon::join(|| search.rho(last.as_ref()), || search.candidates(layers, &left));
        curve.extend(rho);
        let chosen = search.best(layers, candidates).ok_or(NoSpread::Layers)?;
        left.retain(|&layer| layer != chosen.layer);
        search.chosen.add(&layers[chosen.layer]);
        order.push(chosen.layer);
        last = Some(chosen);
    }
    curve.extend(search.rho(last.as_ref()));
    let peak = curve.iter().copied().max_by(f64::total_cmp).ok_or(NoSpread::Layers)?;
    let n_kept = 1 + curve.iter().position(|rho| rho.total_cmp(&peak).is_eq()).expect("the peak is in the curve");
    Ok(LayerChoice { order, curve, n_kept })
}

/// Requests [`choose_layers`] compares at most.
pub const MAX_COMPARED: usize = 2048;

fn ranked(target: &PairProducts) -> Ranked {
    let mut sums = SummedProducts::new(target.n());
    sums.add(target);
    Ranked::new(&sums.cosines())
}

/// Rho with all `layers` together, if it is defined.
pub(super) fn rho_of_all(layers: &[PairProducts], target: &PairProducts) -> Option<f64> {
    let mut sums = SummedProducts::new(target.n());
    for layer in layers {
        sums.add(layer);
    }
    let (target, cosines) = (ranked(target), sums.cosines());
    target.rho(&cosines, &target.histogram::<COARSE>(&cosines))
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
    chosen: SummedProducts,
}

/// A layer that may be added.
struct Candidate {
    layer: usize,
    histogram: Histogram<COARSE>,
    bounds: Option<Bounds>,
}

/// The best of them, and rho with it if that had to be known to choose.
struct Chosen {
    layer: usize,
    histogram: Histogram<COARSE>,
    rho: Option<f64>,
}

impl Search {
    /// Rho with the layers chosen, `last` being the last.
    fn rho(&self, last: Option<&Chosen>) -> Option<f64> {
        let last = last?;
        last.rho.or_else(|| self.target.rho(&self.chosen.cosines(), &last.histogram))
    }

    /// What each layer of `left` may reach, in their order.
    fn candidates(&self, layers: &[PairProducts], left: &[usize]) -> Vec<Candidate> {
        let candidate = |&layer: &usize| {
            let histogram = self.target.histogram(&self.chosen.cosines_with(&layers[layer]));
            let bounds = self.target.bounds(&histogram);
            Candidate { layer, histogram, bounds }
        };
        left.par_iter().map(candidate).collect()
    }

    /// The candidate to add. Nothing if rho is undefined with any.
    fn best(&self, layers: &[PairProducts], candidates: Vec<Candidate>) -> Option<Chosen> {
        let mut rivals = may_win(candidates);
        if rivals.len() > 1 {
            rivals.par_iter_mut().for_each(|rival| {
                let histogram = self.target.histogram::<FINE>(&self.chosen.cosines_with(&layers[rival.layer]));
                rival.bounds = self.target.bounds(&histogram);
            });
            rivals = may_win(rivals);
        }
        if rivals.len() == 1
            && let Some(Candidate { layer, histogram, .. }) = rivals.pop_if(|only| only.bounds.is_some())
        {
            return Some(Chosen { layer, histogram, rho: None });
        }
        let rho = |Candidate { layer, histogram, .. }: Candidate| {
            let rho = self.target.rho(&self.chosen.cosines_with(&layers[layer]), &histogram)?;
            Some(Chosen { layer, histogram, rho: Some(rho) })
        };
        let measured: Vec<Chosen> = rivals.into_par_iter().filter_map(rho).collect();
        measured.into_iter().reduce(|best, next| if next.rho > best.rho { next } else { best })
    }
}

/// The candidates that no other is proven better than, in the same order. One without bounds may be anything.
fn may_win(mut candidates: Vec<Candidate>) -> Vec<Candidate> {
    let lowest = candidates.iter().filter_map(|c| c.bounds).map(|b| b.low).max_by(f64::total_cmp);
    candidates.retain(|c| c.bounds.is_none_or(|b| lowest.is_none_or(|lowest| b.high >= lowest)));
    candidates
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, Array3, Axis, concatenate, s};
    use proptest::prelude::*;

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

    proptest! {
        /// Few values and few requests: ties, requests without weight, layers that are equal or constant.
        #[test]
        fn equals_the_definition_whatever_ties(
            n in 2usize..8,
            cells in prop::collection::vec(0u8..3, 7 * 5 * 2),
            constant in 0usize..6,
            copied in 0usize..4,
        ) {
            let mut x = Array3::from_shape_fn((n, 4, 2), |(i, l, e)| f64::from(cells[(i * 5 + l) * 2 + e]));
            if constant < 4 {
                x.slice_mut(s![.., constant, ..]).fill(1.0);
            }
            let copy = x.slice(s![.., copied, ..]).to_owned();
            x.slice_mut(s![.., 3, ..]).assign(&copy);
            let y = Array2::from_shape_fn((n, 2), |(i, e)| f64::from(cells[(i * 5 + 4) * 2 + e]));
            let layers = layers_of(&x);
            match choose_layers(&layers, &pair_products(&y), usize::MAX) {
                Err(NoSpread::Target) => prop_assert!(plain_rho(&y, &y).is_none()),
                // Once a union of layers has no spread, only the definition's placeholder is left to compare.
                Err(NoSpread::Layers) => {
                    prop_assert!(plain_choice(&x, &y).1.iter().any(|&rho| rho == f64::NEG_INFINITY));
                }
                Ok(choice) => {
                    let (order, curve) = plain_choice(&x, &y);
                    prop_assert_eq!(&choice.order, &order);
                    for (got, want) in choice.curve.iter().zip(&curve) {
                        prop_assert!((got - want).abs() < 1e-12, "{:?} {:?}", choice.curve, curve);
                    }
                    let peak = curve.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    prop_assert!((choice.rho() - peak).abs() < 1e-12);
                }
            }
        }
    }

    #[test]
    fn any_number_of_threads_chooses_as_the_definition_does() {
        let (x, y) = (random(8, (60, 12, 16)), random(9, (60, 1, 16)).index_axis_move(Axis(1), 0));
        let (layers, target) = (layers_of(&x), pair_products(&y));
        let choose = |n_threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().expect("threads");
            pool.install(|| choose_layers(&layers, &target, usize::MAX))
        };
        let one = choose(1);
        assert_eq!(one.as_ref().expect("spread").order, plain_choice(&x, &y).0);
        assert!([2, 3, 8].iter().all(|&n| choose(n) == one));
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
