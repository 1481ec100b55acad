//! Which labels the requests of each decode worker's cluster carry.
//!
//! Never assigns a request.

use serde::{Deserialize, Serialize};

use super::{Labels, stats::round};
use crate::calibrate::CalibrationReport;

/// Sizes and purity of the clusters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Clusters {
    /// Share of labelled requests whose label is the commonest of their cluster.
    pub purity: Option<f64>,
    /// One a decode worker.
    pub clusters: Vec<Cluster>,
}

/// The requests of one decode worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cluster {
    /// Requests in it.
    pub size: usize,
    /// How many carry each label of [`Labels::names`].
    pub n_of_label: Vec<usize>,
    /// How many carry another label.
    pub n_other: usize,
    /// Share of its labelled requests that carry its commonest label.
    pub purity: Option<f64>,
}

impl Clusters {
    pub(super) fn of(report: &CalibrationReport, labels: &Labels) -> Self {
        let clusters = report.clusters.iter().map(|cluster| {
            let n_of_label: Vec<usize> =
                labels.names.iter().map(|name| cluster.labels.get(name).copied().unwrap_or(0)).collect();
            let n_labelled: usize = cluster.labels.values().sum();
            let n_commonest = cluster.labels.values().copied().max().unwrap_or(0);
            Cluster {
                size: cluster.size,
                n_other: n_labelled - n_of_label.iter().sum::<usize>(),
                n_of_label,
                purity: (n_labelled > 0).then(|| round(n_commonest as f64 / n_labelled as f64)),
            }
        });
        Self { purity: report.purity.map(round), clusters: clusters.collect() }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{calibrate::ClusterReport, figures::planted::Planted};

    #[test]
    fn labels_without_a_place_count_as_others() {
        let labels = Labels { names: vec!["a".into(), "b".into()], ..Labels::default() };
        let report = |clusters| CalibrationReport { clusters, purity: Some(0.7), ..planted_report() };
        let of = |n: &[(&str, usize)]| -> BTreeMap<String, usize> {
            n.iter().map(|&(label, n)| (label.to_owned(), n)).collect()
        };
        let clusters = vec![
            ClusterReport { size: 9, labels: of(&[("a", 2), ("b", 1), ("rare", 5)]) },
            ClusterReport { size: 3, labels: BTreeMap::new() },
        ];
        let got = Clusters::of(&report(clusters), &labels);
        let first = Cluster { size: 9, n_of_label: vec![2, 1], n_other: 5, purity: Some(0.625) };
        let second = Cluster { size: 3, n_of_label: vec![0, 0], n_other: 0, purity: None };
        assert_eq!(got, Clusters { purity: Some(0.7), clusters: vec![first, second] });
    }

    fn planted_report() -> CalibrationReport {
        use crate::calibrate::{CalibrationInput, CalibrationParams, fit};
        let trace = Planted { n_requests: 20, ..Planted::default() }.trace();
        fit(&CalibrationInput::of_trace(&trace, 0..20), &CalibrationParams::new(2)).expect("a good input").1
    }

    #[test]
    fn disjoint_domains_are_pure() {
        let data = Planted { noise: 0.0, ..Planted::default() }.report(crate::figures::Extras::default());
        assert_eq!(data.clusters.purity, Some(1.0));
        for cluster in &data.clusters.clusters {
            assert_eq!((cluster.size, cluster.purity), (40, Some(1.0)));
            assert_eq!(cluster.n_of_label.iter().filter(|&&n| n > 0).count(), 1);
        }
    }
}
