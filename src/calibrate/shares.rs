//! How many points each cluster gets when clusters have weights.
//!
//! Never decides between clusters whose claims are equal: their cost does.

/// The sizes of clusters in proportion to weights, by largest remainder (Hamilton).
///
/// A cluster's exact share of N points is N * weight / all weights. It gets the whole part, and the points left over go,
/// one each, to the largest fractions. Where fractions tie for the last of them, any of the tied clusters may get one:
/// with equal weights sizes differ by at most one, and nothing else is said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shares {
    /// Points each cluster gets in any case.
    pub floor: Vec<usize>,
    /// Clusters that may get one more.
    pub may_exceed: Vec<bool>,
    /// How many of those do.
    pub n_extra: usize,
}

impl Shares {
    /// Shares of `n` points for clusters of `weights`, of which at least one is above 0.
    pub fn new(n: usize, weights: &[u32]) -> Self {
        let all: u128 = weights.iter().map(|&w| u128::from(w)).sum();
        assert!(all > 0, "no cluster has a weight");
        let exact = |&weight: &u32| n as u128 * u128::from(weight);
        let mut floor: Vec<usize> = weights.iter().map(|w| (exact(w) / all) as usize).collect();
        let fractions: Vec<u128> = weights.iter().map(|w| exact(w) % all).collect();
        let n_left = n - floor.iter().sum::<usize>();
        let mut largest = fractions.clone();
        largest.sort_unstable_by(|a, b| b.cmp(a));
        // Fractions are below one and sum to `n_left`, so that more than `n_left` of them are above 0, if any is.
        let (Some(&last), next) = (largest.get(n_left.wrapping_sub(1)), largest.get(n_left)) else {
            return Self { may_exceed: vec![false; floor.len()], floor, n_extra: 0 };
        };
        let tie = next == Some(&last);
        let is_certain = |fraction: u128| fraction > last || (!tie && fraction == last);
        for (floor, _) in floor.iter_mut().zip(&fractions).filter(|(_, fraction)| is_certain(**fraction)) {
            *floor += 1;
        }
        let n_certain = fractions.iter().filter(|fraction| is_certain(**fraction)).count();
        let may_exceed = fractions.iter().map(|&fraction| tie && fraction == last).collect();
        Self { floor, may_exceed, n_extra: n_left - n_certain }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn known_shares() {
        let of = |n, weights: &[u32]| {
            let shares = Shares::new(n, weights);
            (shares.floor, shares.may_exceed, shares.n_extra)
        };
        assert_eq!(of(8, &[2, 1, 1]), (vec![4, 2, 2], vec![false; 3], 0));
        // 4.5, 2.25, 2.25: the half gets it.
        assert_eq!(of(9, &[2, 1, 1]), (vec![5, 2, 2], vec![false; 3], 0));
        // 5, 2.5, 2.5: one of two, whichever is cheaper.
        assert_eq!(of(10, &[2, 1, 1]), (vec![5, 2, 2], vec![false, true, true], 1));
        assert_eq!(of(7, &[1, 1, 1]), (vec![2, 2, 2], vec![true; 3], 1));
        assert_eq!(of(0, &[3, 1]), (vec![0, 0], vec![false; 2], 0));
        // 10.6, 0.1, 0.1, 0.1, 0.1.
        assert_eq!(of(11, &[106, 1, 1, 1, 1]), (vec![11, 0, 0, 0, 0], vec![false; 5], 0));
        assert_eq!(of(usize::MAX >> 1, &[u32::MAX, u32::MAX]).2, 1);
    }

    proptest! {
        #[test]
        fn every_point_has_a_place_and_no_share_is_off_by_one(
            n in 0usize..5000, weights in prop::collection::vec(1u32..1000, 1..9)
        ) {
            let Shares { floor, may_exceed, n_extra } = Shares::new(n, &weights);
            prop_assert_eq!(floor.iter().sum::<usize>() + n_extra, n);
            let n_tied = may_exceed.iter().filter(|&&may| may).count();
            prop_assert!(n_extra < n_tied || (n_extra, n_tied) == (0, 0));
            let all: u32 = weights.iter().sum();
            for ((&floor, &may), &weight) in floor.iter().zip(&may_exceed).zip(&weights) {
                let exact = n as f64 * f64::from(weight) / f64::from(all);
                let most = floor as f64 + f64::from(u8::from(may));
                prop_assert!((floor as f64 - exact).abs() < 1.0 && (most - exact).abs() < 1.0);
            }
            if weights.iter().all(|w| *w == weights[0]) {
                prop_assert!(floor.iter().all(|&f| f == n / weights.len()) && n_extra == n % weights.len());
            }
        }
    }
}
