use crate::{rng::Rng, sim::SimError};

/// The requests of one round of a cross-validation. The three parts share none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fold {
    /// Requests to fit a calibration to.
    pub fit: Vec<usize>,
    /// Requests to choose the band's width on.
    pub choose: Vec<usize>,
    /// Requests to judge on.
    pub judge: Vec<usize>,
}

/// More folds than this leave too few requests to replay, and have no quantile in [`crate::sim::Interval`].
pub(super) const MAX_FOLDS: usize = 20;

/// Splits `requests` into `n_folds` parts by a seeded draw and takes turns: one part judges, the next one chooses, the
/// others fit. Every request judges once.
///
/// Sizes differ by at most one. Nothing but the order of `requests` and the seed takes part: no label does.
pub fn folds(requests: &[usize], n_folds: usize, seed: u64) -> Result<Vec<Fold>, SimError> {
    if !(3..=MAX_FOLDS).contains(&n_folds) {
        return Err(SimError::Folds { n_folds, limit: MAX_FOLDS });
    }
    let mut drawn = requests.to_vec();
    shuffle(&mut drawn, &mut Rng::new(seed));
    let part = |which: usize| drawn.iter().copied().skip(which % n_folds).step_by(n_folds);
    let ascending = |mut requests: Vec<usize>| {
        requests.sort_unstable();
        requests
    };
    let round = |at: usize| Fold {
        fit: ascending((at + 2..at + n_folds).flat_map(part).collect()),
        choose: ascending(part(at + 1).collect()),
        judge: ascending(part(at).collect()),
    };
    Ok((0..n_folds).map(round).collect())
}

/// Puts `items` in an order drawn from `rng`, each as likely (Fisher and Yates).
pub(super) fn shuffle(items: &mut [usize], rng: &mut Rng) {
    for last in (1..items.len()).rev() {
        items.swap(last, rng.below(last + 1));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_parts_share_no_request_and_each_judges_and_chooses_once(
            n_requests in 0usize..200, n_folds in 3usize..=20, seed: u64,
        ) {
            let requests: Vec<usize> = (0..n_requests).map(|i| 3 * i).collect();
            let folds = folds(&requests, n_folds, seed).expect("enough folds");
            for fold in &folds {
                let mut all = [fold.fit.clone(), fold.choose.clone(), fold.judge.clone()].concat();
                all.sort_unstable();
                prop_assert_eq!(&all, &requests);
                prop_assert!(fold.judge.len().abs_diff(n_requests / n_folds) <= 1);
            }
            for part in [|fold: &Fold| fold.judge.clone(), |fold: &Fold| fold.choose.clone()] {
                let mut all: Vec<usize> = folds.iter().flat_map(part).collect();
                all.sort_unstable();
                prop_assert_eq!(&all, &requests);
            }
        }
    }

    #[test]
    fn the_seed_decides() {
        let requests: Vec<usize> = (0..40).collect();
        assert_eq!(folds(&requests, 4, 7), folds(&requests, 4, 7));
        assert_ne!(folds(&requests, 4, 7), folds(&requests, 4, 8));
        assert_eq!(folds(&requests, 2, 7), Err(SimError::Folds { n_folds: 2, limit: 20 }));
    }
}
