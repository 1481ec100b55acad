//! Which experts each label's answers pick more or less often than the others' do.
//!
//! Never weighs labels by their number of requests.

use ndarray::s;
use serde::{Deserialize, Serialize};

use super::{Figure, Labels, stats::round};
use crate::calibrate::{CalibrationInput, CalibrationReport};

/// Layers shown at most.
const MAX_LAYERS: usize = 6;
/// Experts of a layer shown at most.
const MAX_EXPERTS: usize = 128;

/// Deviation of each expert's share of a label's decode picks from the mean over labels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Activation {
    /// The first layers of the mask, in the order they were chosen; at most 6.
    pub layers: Vec<ActivationLayer>,
    /// Layers of the mask that are not shown.
    pub n_layers_left_out: usize,
    /// Experts of each layer that are not shown, those whose shares differ least among the labels.
    pub n_experts_left_out: usize,
}

/// One layer: a row for each label, a column for each expert.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ActivationLayer {
    /// llama.cpp's number of the layer.
    pub layer: u32,
    /// The experts in order of columns: by the label that picks them most above the mean, most first.
    pub experts: Vec<u32>,
    /// A row for each label of [`Labels::names`]: share of its picks less the mean of the labels' shares.
    pub deviation: Vec<Vec<f64>>,
    /// For each label, the share of its picks that would have to go to other experts to make it the mean: 0 is the
    /// mean itself, 1 would share no expert with it.
    pub distance: Vec<f64>,
}

impl Activation {
    pub(super) fn of(input: &CalibrationInput, report: &CalibrationReport, labels: &Labels) -> Figure<Self> {
        if labels.names.len() < 2 {
            return Figure::left_out("fewer than two labels to compare; give the prompts a domain");
        }
        let kept: Vec<u32> = report.layer_order.iter().copied().filter(|layer| report.layers.contains(layer)).collect();
        let shown = &kept[..kept.len().min(MAX_LAYERS)];
        Figure::Data(Self {
            layers: shown.iter().map(|&row| layer(input, labels, row)).collect(),
            n_layers_left_out: kept.len() - shown.len(),
            n_experts_left_out: (input.shape().n_expert as usize).saturating_sub(MAX_EXPERTS),
        })
    }
}

fn layer(input: &CalibrationInput, labels: &Labels, row: u32) -> ActivationLayer {
    let n_expert = input.shape().n_expert as usize;
    let mut picks = vec![vec![0u64; n_expert]; labels.names.len()];
    let decode = input.decode();
    for (counts, label) in decode.slice(s![.., row as usize, ..]).outer_iter().zip(input.labels()) {
        let Some(place) = labels.place(label.as_deref()) else { continue };
        picks[place].iter_mut().zip(counts).for_each(|(sum, &n)| *sum += u64::from(n));
    }
    let shares: Vec<Vec<f64>> = picks
        .iter()
        .map(|picks| {
            let all = picks.iter().sum::<u64>().max(1) as f64;
            picks.iter().map(|&n| n as f64 / all).collect()
        })
        .collect();
    let deviation = |place: usize, expert: usize| {
        let mean = shares.iter().map(|row| row[expert]).sum::<f64>() / shares.len() as f64;
        round(shares[place][expert] - mean)
    };
    let columns: Vec<Vec<f64>> =
        (0..n_expert).map(|expert| (0..shares.len()).map(|place| deviation(place, expert)).collect()).collect();
    let experts = order(&columns);
    ActivationLayer {
        layer: input.shape().layers[row as usize],
        deviation: (0..shares.len())
            .map(|place| experts.iter().map(|&e| columns[e as usize][place]).collect())
            .collect(),
        distance: (0..shares.len()).map(|p| round(columns.iter().map(|c| c[p].abs()).sum::<f64>() / 2.0)).collect(),
        experts,
    }
}

/// The experts to show, in order of columns.
fn order(columns: &[Vec<f64>]) -> Vec<u32> {
    let highest = |expert: u32| columns[expert as usize].iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lowest = |expert: u32| columns[expert as usize].iter().copied().fold(f64::INFINITY, f64::min);
    let spread = |expert: u32| highest(expert) - lowest(expert);
    let mut experts: Vec<u32> = (0..columns.len() as u32).collect();
    experts.sort_by(|&a, &b| spread(b).total_cmp(&spread(a)));
    experts.truncate(MAX_EXPERTS);
    let first = |expert: u32| columns[expert as usize].iter().position(|x| x.total_cmp(&highest(expert)).is_eq());
    experts.sort_by(|&a, &b| first(a).cmp(&first(b)).then(highest(b).total_cmp(&highest(a))).then(a.cmp(&b)));
    experts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::{Extras, planted::Planted};

    #[test]
    fn disjoint_domains_deviate_by_all_their_own_experts() {
        let data = Planted { noise: 0.0, ..Planted::default() }.report(Extras::default());
        let activation = data.activation.data().expect("labels");
        assert_eq!(activation.layers.len() + activation.n_layers_left_out, data.summary.layers.len());
        for layer in &activation.layers {
            // Columns come domain by domain: 8 own experts each.
            for (place, row) in layer.deviation.iter().enumerate() {
                for (column, (&expert, &deviation)) in layer.experts.iter().zip(row).enumerate() {
                    assert_eq!((column / 8, expert as usize / 8 == place), (expert as usize / 8, deviation > 0.0));
                }
                // An own expert has the mean share 1/4 of the domain's share, another the same below.
                let above: f64 = row.iter().filter(|x| **x > 0.0).sum();
                assert!((above - 0.75).abs() < 1e-4 && (layer.distance[place] - 0.75).abs() < 1e-4, "{above}");
            }
        }
    }

    #[test]
    fn deviations_are_those_of_a_plain_count() {
        let planted = Planted::default();
        let (trace, data) = (planted.trace(), planted.report(Extras::default()));
        let share = |domain: &str, layer: usize, expert: u32| {
            let (mut own, mut all) = (0, 0);
            for request in trace.requests.iter().filter(|r| r.domain.as_deref() == Some(domain)) {
                for step in 0..request.n_steps(&trace.header) {
                    let picks = request.step_picks(&trace.header, step, layer);
                    own += picks.iter().filter(|&&e| u32::from(e) == expert).count();
                    all += picks.len();
                }
            }
            own as f64 / all as f64
        };
        let layer = &data.activation.data().expect("labels").layers[0];
        for (column, &expert) in layer.experts.iter().enumerate() {
            let shares = planted.domains.iter().map(|domain| share(domain, layer.layer as usize, expert));
            let shares: Vec<f64> = shares.collect();
            let mean = shares.iter().sum::<f64>() / 4.0;
            for (place, share) in shares.iter().enumerate() {
                assert!((layer.deviation[place][column] - (share - mean)).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn one_label_is_nothing_to_compare() {
        let data = Planted { domains: vec!["only"], ..Planted::default() }.report(Extras::default());
        assert!(matches!(data.activation, Figure::LeftOut(why) if why.contains("two labels")));
    }

    #[test]
    fn only_the_experts_that_differ_most_are_shown() {
        // Expert e deviates by e at the first label.
        let columns: Vec<Vec<f64>> = (0..200).map(|e| vec![f64::from(e), -f64::from(e)]).collect();
        let want: Vec<u32> = (72..200).rev().collect();
        assert_eq!(order(&columns), want);
    }
}
