//! Expert placement from a recording: what batches of each cluster pick together, and how much a placement made for it
//! saves on batches it was not made for.
//!
//! Never searches: [`place_layer`] does.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::{
    calibrate::{Calibration, ExpertRanks, PlacementError, busiest_rank, place_layer},
    rng::Rng,
    sim::ReplaySet,
    trace::Trace,
};

/// The version of the placement's format.
pub const PLACEMENT_VERSION: u32 = 1;

/// How placements are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacingParams {
    /// Ranks that share each layer's experts.
    pub n_ranks: u32,
    /// Sequences of a batch.
    pub batch: usize,
    /// Batches that a placement is made for, and as many others that judge it.
    pub n_batches: usize,
    /// Seed of the batches and of the search.
    pub seed: u64,
}

impl PlacingParams {
    /// 64 batches of 16, for `n_ranks` ranks.
    pub fn new(n_ranks: u32) -> Self {
        Self { n_ranks, batch: 16, n_batches: 64, seed: 0 }
    }
}

/// Where each cluster's experts are, by layer, and what that saves.
///
/// ```
/// # mod planted {
/// #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/planted_trace.rs"));
/// # }
///
/// use eldr::{
///     calibrate::{CalibrationInput, CalibrationParams, fit},
///     sim::{Judged, Placement, PlacingParams, ReplaySet, place_experts},
/// };
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // Each of four domains picks from experts of its own, which in order are all on one rank.
/// let trace = planted::trace(64);
/// let (calibration, _) = fit(&CalibrationInput::of_trace(&trace, 0..64), &CalibrationParams::new(4))?;
/// let params = PlacingParams { n_batches: 8, ..PlacingParams::new(4) };
/// let placed: Placement = place_experts(&trace, &ReplaySet::new(&trace), &calibration, &params);
/// let Judged { in_order, own, .. } = placed.judged;
/// assert!(own < in_order);
/// assert_eq!(placed.ranks()?.len(), 4, "one placement a cluster");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Placement {
    /// [`PLACEMENT_VERSION`].
    pub version: u32,
    /// The model, as traces name it.
    pub fingerprint: String,
    /// Ranks.
    pub n_ranks: u32,
    /// llama.cpp's number of each layer.
    pub layers: Vec<u32>,
    /// By cluster, layer and expert: the rank.
    pub clusters: Vec<Vec<Vec<u32>>>,
    /// What it saves.
    pub judged: Judged,
}

/// Active experts of the busiest rank, summed over layers and averaged over the batches of every cluster, on batches of
/// requests that no placement was made for.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Judged {
    /// Experts in order of their numbers, the first E / G on the first rank.
    pub in_order: f64,
    /// One placement for batches of all clusters.
    pub shared: f64,
    /// Each cluster's own.
    pub own: f64,
    /// As if every batch were spread evenly: a bound that no placement passes.
    pub even: f64,
}

impl Placement {
    /// The placements as the simulator takes them.
    pub fn ranks(&self) -> Result<Vec<ExpertRanks>, PlacementError> {
        self.clusters.iter().map(|layers| ExpertRanks::new(layers, self.n_ranks)).collect()
    }
}

/// What the batches of one cluster picked: by layer and batch, a bit an expert.
type Batches = Vec<Vec<Vec<u64>>>;

/// Places experts for each cluster of `calibration`, from the even half of a cluster's requests; the odd half judges. A
/// cluster with fewer than two requests gets the placement of all.
///
/// The same input and seed give the same bytes on any number of threads.
pub fn place_experts(trace: &Trace, set: &ReplaySet, calibration: &Calibration, params: &PlacingParams) -> Placement {
    let n_clusters = calibration.n_workers();
    let shape = &trace.header.shape;
    let mut members: Vec<Vec<usize>> = vec![Vec::new(); n_clusters];
    for at in (0..set.n_requests()).filter(|&at| set.n_steps(at) > 0) {
        if let Some(signature) = calibration.signature(&set.get(at).counts) {
            let cosine = |cluster: &usize| signature.cosine(calibration.centroid(*cluster));
            // The first of equals.
            let nearest = (0..n_clusters).rev().max_by(|a, b| cosine(a).total_cmp(&cosine(b))).expect("a cluster");
            members[nearest].push(at);
        }
    }
    let all: Vec<usize> = (0..set.n_requests()).filter(|&at| set.n_steps(at) > 0).collect();
    let half = |of: &[usize], odd: bool| of.iter().copied().skip(usize::from(odd)).step_by(2).collect::<Vec<_>>();
    let mut rng = Rng::new(params.seed);
    let own = |members: &Vec<usize>| if members.len() < 2 { all.clone() } else { members.clone() };
    let halves: Vec<[Vec<usize>; 2]> =
        members.iter().map(own).map(|members| [half(&members, false), half(&members, true)]).collect();
    let mut sample = |members: &[usize]| batches(set, members, params, &mut rng);
    let made: Vec<[Batches; 2]> = halves.iter().map(|[fit, judge]| [sample(fit), sample(judge)]).collect();
    let pooled = sample(&half(&all, false));
    let n_expert = shape.n_expert as usize;
    let n_ranks = params.n_ranks as usize;
    let place = |of: &Batches| -> Vec<Vec<u32>> {
        let layer = |batches: &Vec<Vec<u64>>| place_layer(&views(batches), n_expert, n_ranks, params.seed);
        of.par_iter().map(layer).collect()
    };
    let clusters: Vec<Vec<Vec<u32>>> = made.iter().map(|[fit, _]| place(fit)).collect();
    let shared = place(&pooled);
    let per_rank = n_expert.div_ceil(n_ranks);
    let in_order: Vec<Vec<u32>> =
        vec![(0..n_expert).map(|expert| (expert / per_rank) as u32).collect(); shape.n_layer_moe()];
    let judge = |placement: &dyn Fn(usize) -> Vec<Vec<u32>>| {
        let of = |(cluster, [_, judge]): (usize, &[Batches; 2])| busiest(judge, &placement(cluster), n_ranks);
        made.iter().enumerate().map(of).sum::<f64>() / n_clusters as f64
    };
    let judged = Judged {
        in_order: judge(&|_| in_order.clone()),
        shared: judge(&|_| shared.clone()),
        own: judge(&|cluster| clusters[cluster].clone()),
        even: made.iter().map(|[_, judge]| even(judge, n_ranks)).sum::<f64>() / n_clusters as f64,
    };
    Placement {
        version: PLACEMENT_VERSION,
        fingerprint: trace.header.fingerprint.clone(),
        n_ranks: params.n_ranks,
        layers: shape.layers.clone(),
        clusters,
        judged,
    }
}

/// Batches of random steps of random members.
fn batches(set: &ReplaySet, members: &[usize], params: &PlacingParams, rng: &mut Rng) -> Batches {
    let words_layer = set.n_words() / set.n_layer().max(1);
    let mut layers: Batches = vec![Vec::with_capacity(params.n_batches); set.n_layer()];
    for _ in 0..params.n_batches {
        let mut seen = vec![0u64; set.n_words()];
        for _ in 0..params.batch {
            let request = members[rng.below(members.len())];
            let mask = set.mask(request, rng.below(set.n_steps(request) as usize));
            seen.iter_mut().zip(mask).for_each(|(seen, &picked)| *seen |= picked);
        }
        layers.iter_mut().zip(seen.chunks_exact(words_layer)).for_each(|(layer, seen)| layer.push(seen.to_vec()));
    }
    layers
}

fn views(batches: &[Vec<u64>]) -> Vec<&[u64]> {
    batches.iter().map(Vec::as_slice).collect()
}

fn busiest(batches: &Batches, placement: &[Vec<u32>], n_ranks: usize) -> f64 {
    batches.iter().zip(placement).map(|(batches, places)| busiest_rank(&views(batches), places, n_ranks)).sum()
}

fn even(batches: &Batches, n_ranks: usize) -> f64 {
    let least =
        |batch: &Vec<u64>| f64::from(batch.iter().map(|word| word.count_ones()).sum::<u32>().div_ceil(n_ranks as u32));
    batches.iter().map(|layer| layer.iter().map(least).sum::<f64>() / layer.len().max(1) as f64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        calibrate::{CalibrationInput, CalibrationParams, fit},
        sim::planted::Planted,
    };

    #[test]
    fn a_cluster_s_own_placement_is_even_where_the_order_of_experts_is_not() {
        // Domain d picks from experts 8 d to 8 d + 7: in order they are all on one rank.
        let trace = Planted { n_requests: 96, ..Planted::default() }.trace();
        let set = ReplaySet::new(&trace);
        let (calibration, _) =
            fit(&CalibrationInput::of_trace(&trace, 0..96), &CalibrationParams::new(4)).expect("fits");
        let params = PlacingParams { n_batches: 24, ..PlacingParams::new(4) };
        let placement = place_experts(&trace, &set, &calibration, &params);
        let Judged { in_order, shared, own, even } = placement.judged;
        // Nearly all 8 experts of a domain are active in each of 4 layers.
        assert!(in_order > 28.0 && own < 9.0 && even <= own && own <= shared, "{:?}", placement.judged);
        assert_eq!((placement.clusters.len(), placement.clusters[0].len(), placement.clusters[0][0].len()), (4, 4, 32));
        assert_eq!(placement.ranks().expect("its own ranks").len(), 4);
        assert_eq!(placement, place_experts(&trace, &set, &calibration, &params));
        let json = serde_json::to_string(&placement).expect("json");
        assert_eq!(serde_json::from_str::<Placement>(&json).expect("its own json"), placement);
    }
}
