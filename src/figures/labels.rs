//! The labels a report shows: the commonest ones, each with a fixed place.
//!
//! Never merges labels that differ.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// As many as there are colours that everybody can tell apart.
const MAX_LABELS: usize = 8;

/// The labels (domains, say) of the recorded requests.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Labels {
    /// The commonest ones, at most 8, in alphabetical order; figures name a label by its place here.
    pub names: Vec<String>,
    /// Requests of each.
    pub n_requests: Vec<usize>,
    /// Labels beyond those.
    pub n_other_labels: usize,
    /// Requests with one of them.
    pub n_other_requests: usize,
    /// Requests without a label.
    pub n_unlabelled: usize,
}

impl Labels {
    pub(super) fn of(labels: &[Option<String>]) -> Self {
        let mut n_of: BTreeMap<&str, usize> = BTreeMap::new();
        for label in labels.iter().flatten() {
            *n_of.entry(label).or_default() += 1;
        }
        let mut common: Vec<(&str, usize)> = n_of.into_iter().collect();
        common.sort_by_key(|&(_, n)| std::cmp::Reverse(n));
        let others = common.split_off(common.len().min(MAX_LABELS));
        common.sort_unstable();
        Self {
            names: common.iter().map(|&(name, _)| name.to_owned()).collect(),
            n_requests: common.iter().map(|&(_, n)| n).collect(),
            n_other_labels: others.len(),
            n_other_requests: others.iter().map(|&(_, n)| n).sum(),
            n_unlabelled: labels.iter().filter(|label| label.is_none()).count(),
        }
    }

    /// The place of a label; nothing for an uncommon one or none.
    pub(super) fn place(&self, label: Option<&str>) -> Option<usize> {
        let label = label?;
        self.names.binary_search_by(|name| name.as_str().cmp(label)).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commonest_have_places_and_the_rest_are_counted() {
        // Label n0 once, n1 twice, .. n9 ten times; two without.
        let mut all: Vec<Option<String>> =
            (0..10).flat_map(|i| std::iter::repeat_n(Some(format!("n{i}")), i + 1)).collect();
        all.extend([None, None]);
        let labels = Labels::of(&all);
        assert_eq!(labels.names, ["n2", "n3", "n4", "n5", "n6", "n7", "n8", "n9"]);
        assert_eq!(labels.n_requests, [3, 4, 5, 6, 7, 8, 9, 10]);
        assert_eq!((labels.n_other_labels, labels.n_other_requests, labels.n_unlabelled), (2, 3, 2));
        assert_eq!((labels.place(Some("n3")), labels.place(Some("n0")), labels.place(None)), (Some(1), None, None));
        assert_eq!(Labels::of(&[None]), Labels { n_unlabelled: 1, ..Labels::default() });
    }
}
