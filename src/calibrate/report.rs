//! How good a calibration is, in numbers a reader can check.
//!
//! Never changes what was fitted.

use std::collections::BTreeMap;

use serde::Serialize;

/// How a calibration was found and how good it is; everything a reader needs to trust or doubt it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CalibrationReport {
    /// Requests recorded.
    pub n_requests: usize,
    /// Their prompt tokens.
    pub n_tokens: u64,
    /// Requests whose pairs the mask and rho are made of: all of them, or a sample of
    /// [`MAX_COMPARED`](crate::calibrate::MAX_COMPARED).
    pub n_compared: usize,
    /// Requests left out of the clusters, because none of their picks weighs anything in the masked layers.
    pub n_without_signature: usize,
    /// MoE layers in the order they were chosen, those beyond the mask too.
    pub layer_order: Vec<u32>,
    /// Rho with the first 1, 2, .. layers of `layer_order`.
    pub rho_curve: Vec<f64>,
    /// The mask, ascending.
    pub layers: Vec<u32>,
    /// Rho with the mask.
    pub rho: f64,
    /// Rho with every usable layer.
    pub rho_all_layers: Option<f64>,
    /// Pearson's correlation of a request's prefill and decode counts, averaged over requests.
    pub prefill_decode_correlation: Option<f64>,
    /// Shares of the decode workers that cluster sizes follow; equal without.
    pub capacity: Option<Vec<u32>>,
    /// Summed cosine distance of the requests from their centroids.
    pub cost: f64,
    /// Assignment steps of the search that won.
    pub n_iterations: u32,
    /// Share of labelled requests whose label is the commonest of their cluster; nothing without labels.
    pub purity: Option<f64>,
    /// The clusters, in order of decode workers.
    pub clusters: Vec<ClusterReport>,
    /// Decode worker of each request, in order of recording; nothing for one without a signature.
    pub workers: Vec<Option<u32>>,
}

/// The requests of one decode worker.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ClusterReport {
    /// Requests in the cluster.
    pub size: usize,
    /// How many of them carry each label.
    pub labels: BTreeMap<String, usize>,
}

/// The clusters of `n_workers` workers, and their purity.
pub(super) fn clusters(
    n_workers: usize,
    workers: &[Option<u32>],
    labels: &[Option<String>],
) -> (Vec<ClusterReport>, Option<f64>) {
    let mut clusters = vec![ClusterReport::default(); n_workers];
    for (worker, label) in workers.iter().zip(labels) {
        let Some(worker) = worker else { continue };
        let cluster = &mut clusters[*worker as usize];
        cluster.size += 1;
        if let Some(label) = label {
            *cluster.labels.entry(label.clone()).or_default() += 1;
        }
    }
    let n_labelled: usize = clusters.iter().flat_map(|c| c.labels.values()).sum();
    let n_commonest: usize = clusters.iter().filter_map(|c| c.labels.values().max()).sum();
    let purity = (n_labelled > 0).then(|| n_commonest as f64 / n_labelled as f64);
    (clusters, purity)
}

/// Pearson's correlation of two rows of counts; nothing if one is constant.
pub(super) fn pearson<'a>(pairs: impl Iterator<Item = (&'a u32, &'a u32)>) -> Option<f64> {
    let pairs: Vec<(i128, i128)> = pairs.map(|(&x, &y)| (i128::from(x), i128::from(y))).collect();
    let n = pairs.len() as i128;
    let sum = |f: fn(&(i128, i128)) -> i128| pairs.iter().map(f).sum::<i128>();
    let (sum_x, sum_y) = (sum(|p| p.0), sum(|p| p.1));
    let spread_x = n * sum(|p| p.0 * p.0) - sum_x * sum_x;
    let spread_y = n * sum(|p| p.1 * p.1) - sum_y * sum_y;
    let shared = n * sum(|p| p.0 * p.1) - sum_x * sum_y;
    let defined = spread_x > 0 && spread_y > 0;
    defined.then(|| shared as f64 / ((spread_x as f64).sqrt() * (spread_y as f64).sqrt()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pearson_of_known_rows() {
        let of = |x: &[u32], y: &[u32]| pearson(x.iter().zip(y));
        assert!((of(&[1, 2, 3], &[2, 4, 6]).expect("spread") - 1.0).abs() < 1e-15);
        assert!((of(&[1, 2, 3], &[5, 5, 2]).expect("spread") + 0.75f64.sqrt()).abs() < 1e-15);
        assert_eq!(of(&[1, 1], &[1, 2]), None);
        assert_eq!(of(&[], &[]), None);
    }

    #[test]
    fn purity_counts_labelled_requests_only() {
        let label = |l: &str| Some(l.to_owned());
        let labels = [label("a"), label("a"), label("b"), None, label("b"), label("a")];
        let workers = [Some(0), Some(0), Some(0), Some(1), Some(1), None];
        let (clusters, purity) = clusters(3, &workers, &labels);
        assert_eq!(clusters.iter().map(|c| c.size).collect::<Vec<_>>(), [3, 2, 0]);
        assert_eq!(clusters[0].labels, BTreeMap::from([("a".into(), 2), ("b".into(), 1)]));
        assert!((purity.expect("labels") - 0.75).abs() < 1e-15);
        assert_eq!(super::clusters(1, &[Some(0)], &[None]).1, None);
    }
}
