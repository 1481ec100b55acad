//! Coefficients that are not negative, by least squares of relative errors.
//!
//! Never knows what the columns mean.

/// Rounds that leave outliers out: steps that something else on the machine lengthened.
const ROUNDS: usize = 3;
/// An error of more than so many median errors is an outlier.
const OUTLIER: f64 = 5.0;

/// A fit.
#[derive(Debug, Clone, PartialEq)]
pub struct LeastSquares<const N: usize> {
    /// A coefficient for each column, 0 or more.
    pub coefficients: [f64; N],
    /// Of the samples kept, the mean of the error's size over the sample.
    pub mean_error: f64,
    /// 95% of the samples kept are off by no more.
    pub p95_error: f64,
    /// Samples kept and left out.
    pub n: (usize, usize),
}

impl<const N: usize> LeastSquares<N> {
    /// The value for a row.
    pub fn of(&self, row: &[f64; N]) -> f64 {
        row.iter().zip(&self.coefficients).map(|(x, c)| x * c).sum()
    }

    /// The same fit, in proportion, so that its values for `samples` sum up to theirs.
    #[must_use]
    pub fn adding_up<'a>(mut self, samples: impl IntoIterator<Item = &'a ([f64; N], f64)>) -> Self {
        let sums = samples.into_iter().filter(|(_, y)| y.is_finite());
        let (own, all) = sums.fold((0.0, 0.0), |(own, all), (row, y)| (own + self.of(row), all + y));
        if own > 0.0 && all > 0.0 {
            self.coefficients.iter_mut().for_each(|c| *c *= all / own);
        }
        self
    }
}

/// The coefficients c of 0 or more for which `sum(((row . c) - y) / y)^2` is least over `samples` of (row, y > 0); nothing
/// without samples. A column that says nothing new gets 0. The whole is then made to add up over the samples that are no
/// outliers, since relative errors alone would follow the short ones.
pub fn least_squares<const N: usize>(samples: &[([f64; N], f64)]) -> Option<LeastSquares<N>> {
    let mut kept: Vec<&([f64; N], f64)> = samples.iter().filter(|(_, y)| y.is_finite() && *y > 0.0).collect();
    let n_all = kept.len();
    let mut fit = solve(&kept)?;
    for _ in 1..ROUNDS {
        let mut errors: Vec<f64> = kept.iter().map(|sample| error(&fit, sample)).collect();
        errors.sort_unstable_by(f64::total_cmp);
        let limit = (errors[errors.len() / 2] * OUTLIER).max(1e-9);
        kept.retain(|sample| error(&fit, sample) <= limit);
        fit = solve(&kept)?;
    }
    let mut errors: Vec<f64> = kept.iter().map(|sample| error(&fit, sample)).collect();
    errors.sort_unstable_by(f64::total_cmp);
    let fit = LeastSquares {
        coefficients: fit,
        mean_error: errors.iter().sum::<f64>() / errors.len() as f64,
        p95_error: errors[(errors.len() * 95).div_ceil(100) - 1],
        n: (kept.len(), n_all - kept.len()),
    };
    Some(fit.adding_up(kept))
}

fn error<const N: usize>(c: &[f64; N], (row, y): &([f64; N], f64)) -> f64 {
    (row.iter().zip(c).map(|(x, c)| x * c).sum::<f64>() / y - 1.0).abs()
}

/// Leaves out columns until no coefficient is negative.
fn solve<const N: usize>(samples: &[&([f64; N], f64)]) -> Option<[f64; N]> {
    if samples.is_empty() {
        return None;
    }
    let mut used = [true; N];
    // Columns of other sizes are made alike, so that what is too small to tell is the same for all.
    let scale: [f64; N] = std::array::from_fn(|column| {
        let most = samples.iter().map(|(row, y)| (row[column] / y).abs()).fold(0.0, f64::max);
        if most > 0.0 { most } else { 1.0 }
    });
    loop {
        let mut normal = vec![vec![0.0; N + 1]; N];
        for (row, y) in samples {
            let scaled: [f64; N] = std::array::from_fn(|i| if used[i] { row[i] / y / scale[i] } else { 0.0 });
            for i in 0..N {
                for j in 0..N {
                    normal[i][j] += scaled[i] * scaled[j];
                }
                normal[i][N] += scaled[i];
            }
        }
        let found = eliminate(normal);
        let least = (0..N).filter(|&i| used[i]).min_by(|&a, &b| found[a].total_cmp(&found[b]))?;
        if found[least] >= 0.0 {
            return Some(std::array::from_fn(|i| found[i] / scale[i]));
        }
        used[least] = false;
    }
}

/// Gauss with pivots; a column without one gets 0.
fn eliminate(mut rows: Vec<Vec<f64>>) -> Vec<f64> {
    let n = rows.len();
    let largest = rows.iter().enumerate().map(|(i, row)| row[i].abs()).fold(0.0, f64::max);
    let mut pivot_of = vec![None; n];
    let mut top = 0;
    for column in 0..n {
        let Some(best) = (top..n).max_by(|&a, &b| rows[a][column].abs().total_cmp(&rows[b][column].abs())) else {
            break;
        };
        if rows[best][column].abs() <= largest * 1e-10 {
            continue;
        }
        rows.swap(top, best);
        let pivot = rows[top].clone();
        for (at, row) in rows.iter_mut().enumerate() {
            let factor = row[column] / pivot[column];
            if at != top && factor != 0.0 {
                row.iter_mut().zip(&pivot).for_each(|(x, p)| *x -= factor * p);
            }
        }
        pivot_of[column] = Some(top);
        top += 1;
    }
    pivot_of.iter().enumerate().map(|(column, row)| row.map_or(0.0, |row| rows[row][n] / rows[row][column])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    /// Steps of a device whose cost is `truth`, each off by up to `noise`.
    fn steps(truth: [f64; 4], noise: f64, seed: u64) -> Vec<([f64; 4], f64)> {
        let mut rng = Rng::new(seed);
        let mut step = || {
            let batch = (1 + rng.below(32)) as f64;
            let row =
                [1.0, batch.powf(0.7) * 24.0 * (1.0 + rng.uniform()), batch, batch * 300.0 * (0.5 + rng.uniform())];
            let time: f64 = row.iter().zip(truth).map(|(x, c)| x * c).sum();
            (row, time * (1.0 + noise * (rng.uniform() - 0.5)))
        };
        (0..400).map(|_| step()).collect()
    }

    #[test]
    fn a_known_cost_is_found() {
        let truth = [4.0, 0.05, 0.4, 0.001];
        let fit = least_squares(&steps(truth, 0.0, 1)).expect("samples");
        for (got, want) in fit.coefficients.iter().zip(truth) {
            assert!((got / want - 1.0).abs() < 1e-6, "{:?}", fit.coefficients);
        }
        assert!(fit.p95_error < 1e-9 && fit.n.0 > 0);
        let noisy = least_squares(&steps(truth, 0.1, 2)).expect("samples");
        assert!(noisy.mean_error < 0.03 && (noisy.coefficients[1] / 0.05 - 1.0).abs() < 0.1, "{noisy:?}");
    }

    #[test]
    fn steps_that_were_disturbed_do_not_count() {
        let truth = [4.0, 0.05, 0.4, 0.001];
        let mut disturbed = steps(truth, 0.02, 3);
        disturbed.iter_mut().step_by(20).for_each(|(_, time)| *time *= 3.0);
        let fit = least_squares(&disturbed).expect("samples");
        assert!((fit.coefficients[1] / 0.05 - 1.0).abs() < 0.05 && fit.n.1 >= 20, "{fit:?}");
    }

    // Symptom: costs fitted on a noisy machine were some percent too small, because short steps weigh more in relative errors.
    #[test]
    fn a_noisy_fit_adds_up() {
        let noisy = steps([4.0, 0.05, 0.4, 0.001], 0.6, 5);
        let fit = least_squares(&noisy).expect("samples");
        let own: f64 = noisy.iter().map(|(row, _)| fit.of(row)).sum();
        let all: f64 = noisy.iter().map(|(_, y)| y).sum();
        assert_eq!(fit.n.1, 0);
        assert!((own / all - 1.0).abs() < 1e-9, "{fit:?}");
        let twice = fit.clone().adding_up(&noisy.iter().map(|(row, y)| (*row, 2.0 * y)).collect::<Vec<_>>());
        assert!((twice.of(&noisy[0].0) / fit.of(&noisy[0].0) - 2.0).abs() < 1e-9);
    }

    #[test]
    fn nothing_negative_and_nothing_of_columns_that_say_nothing() {
        let free = least_squares(&steps([4.0, 0.05, 0.0, 0.0], 0.05, 4)).expect("samples");
        assert!(free.coefficients.iter().all(|&c| c >= 0.0), "{free:?}");
        let same: Vec<([f64; 2], f64)> =
            (1..9).map(|n| ([f64::from(n), 2.0 * f64::from(n)], 6.0 * f64::from(n))).collect();
        let fit = least_squares(&same).expect("samples");
        assert!((fit.of(&[1.0, 2.0]) - 6.0).abs() < 1e-9, "{fit:?}");
        assert_eq!(least_squares::<2>(&[]), None);
        assert_eq!(least_squares(&[([1.0], 0.0)]), None);
    }
}
