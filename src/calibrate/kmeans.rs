//! Which requests belong together: k-means over signatures, balanced but for an ablation.
//!
//! Never depends on threads: searches run side by side, and each is sequential where order matters.

use ndarray::{Array2, ArrayView1, Axis};
use rayon::prelude::*;

use crate::{
    calibrate::{Shares, weighted_assignment},
    rng::{Rng, mix},
    signature::{Signature, dot},
};

/// How to search for clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KmeansParams {
    /// Clusters (K), at most the number of points.
    pub k: usize,
    /// Seed of the first centroids.
    pub seed: u64,
    /// Searches from other first centroids; the cheapest result wins. At least 1.
    pub n_restarts: u32,
    /// Assignment steps a search takes at most.
    pub max_iterations: u32,
}

/// Unit vectors in K groups; of [`balanced_kmeans`], their sizes differ by at most one.
#[derive(Debug, Clone, PartialEq)]
pub struct Clustering {
    /// Unit mean direction of each cluster, K rows; clusters are in the order of their first points.
    pub centroids: Array2<f32>,
    /// Cluster of each point.
    pub labels: Vec<u32>,
    /// Summed cosine distance of the points from their centroids.
    pub cost: f64,
    /// Assignment steps of the search that won.
    pub n_iterations: u32,
}

/// Clusters unit vectors (rows of `points`, in row order) by cosine distance into groups of equal size, give or take one.
///
/// Balanced k-means (Malinen and Fraenti, 2014): each step assigns the points at the least total cost the sizes allow,
/// then moves each centroid to its points' mean direction, until no point changes its cluster. Seeded as k-means++
/// (Arthur and Vassilvitskii, 2007). The same bits on any number of threads.
pub fn balanced_kmeans(points: &Array2<f32>, params: &KmeansParams) -> Clustering {
    weighted_kmeans(points, &vec![1; params.k], params)
}

/// [`balanced_kmeans`] with cluster sizes in proportion to `weights` (see [`Shares`](crate::calibrate::Shares)).
///
/// Cluster i has the size that `weights[i]` gives it; clusters of equal weight are in the order of their first points.
/// Every cluster must get at least one point.
pub fn weighted_kmeans(points: &Array2<f32>, weights: &[u32], params: &KmeansParams) -> Clustering {
    let n = points.nrows();
    assert_eq!(weights.len(), params.k, "a weight for each cluster");
    assert!(Shares::new(n, weights).floor.iter().all(|&floor| floor > 0), "{n} points for weights {weights:?}");
    cheapest(points, weights, params, &|distances| weighted_assignment(distances, weights))
}

/// K-means without balance: each point goes to the nearest centroid, and clusters have whatever sizes come of it, at least
/// one point each.
///
/// An ablation of [`balanced_kmeans`], which it is like in everything else: routing by such centroids overloads the workers
/// of large clusters.
pub(super) fn unbalanced_kmeans(points: &Array2<f32>, params: &KmeansParams) -> Clustering {
    cheapest(points, &vec![1; params.k], params, &nearest)
}

/// Of several searches that assign points by `assign`, the cheapest.
fn cheapest(points: &Array2<f32>, weights: &[u32], params: &KmeansParams, assign: &Assign<'_>) -> Clustering {
    let n = points.nrows();
    assert!((1..=n).contains(&params.k), "{} clusters of {n} points", params.k);
    assert!(points.is_standard_layout(), "points must be in row order");
    assert!(params.n_restarts > 0 && params.max_iterations > 0, "no search at all: {params:?}");
    (0..params.n_restarts)
        .into_par_iter()
        .map(|restart| {
            let mut rng = Rng::new(mix(params.seed.wrapping_add(u64::from(restart))));
            search(points, weights, params, assign, &mut rng)
        })
        .reduce_with(cheaper)
        .expect("a restart")
}

/// The cluster of each point, from the distances N x K.
type Assign<'a> = dyn Fn(&Array2<i64>) -> Vec<u32> + Sync + 'a;

/// The nearest cluster of each point, the lowest of equals. One that nobody is nearest to takes the point that is farthest
/// from its own.
fn nearest(distances: &Array2<i64>) -> Vec<u32> {
    let k = distances.ncols();
    let of_point = |row: ArrayView1<'_, i64>| (0..k).min_by_key(|&c| row[c]).expect("a cluster") as u32;
    let mut labels: Vec<u32> = distances.outer_iter().map(of_point).collect();
    let mut sizes = vec![0u32; k];
    for &label in &labels {
        sizes[label as usize] += 1;
    }
    while let Some(empty) = sizes.iter().position(|&size| size == 0) {
        let spare = (0..labels.len()).rev().filter(|&p| sizes[labels[p] as usize] > 1);
        let far = spare.max_by_key(|&p| distances[[p, labels[p] as usize]]).expect("as many points as clusters");
        sizes[labels[far] as usize] -= 1;
        sizes[empty] += 1;
        labels[far] = empty as u32;
    }
    labels
}

/// The cheaper of two, the first if they cost the same. Rayon reduces neighbours in order, so the lowest restart wins
/// however it splits them.
fn cheaper(first: Clustering, second: Clustering) -> Clustering {
    if second.cost < first.cost { second } else { first }
}

fn search(
    points: &Array2<f32>,
    weights: &[u32],
    params: &KmeansParams,
    assign: &Assign<'_>,
    rng: &mut Rng,
) -> Clustering {
    let mut centroids = first_centroids(points, params.k, rng);
    if weights.iter().any(|weight| *weight != weights[0]) {
        centroids = heavy_where_many(points, weights, &centroids);
    }
    let mut labels = Vec::new();
    let mut n_iterations = 0;
    while n_iterations < params.max_iterations {
        let next = assign(&distances(points, &centroids));
        n_iterations += 1;
        if next == labels {
            break;
        }
        labels = next;
        update(points, &labels, &mut centroids);
    }
    in_order_of_first_points(&mut labels, weights, &mut centroids);
    let cost = labels.iter().enumerate().map(|(p, &c)| distance(row(points, p), row(&centroids, c as usize))).sum();
    Clustering { centroids, labels, cost, n_iterations }
}

/// K points drawn one by one, each with a chance in proportion to its squared distance from those drawn before, which
/// on the unit sphere is twice the cosine distance.
fn first_centroids(points: &Array2<f32>, k: usize, rng: &mut Rng) -> Array2<f32> {
    let n = points.nrows();
    let mut nearest = vec![f64::INFINITY; n];
    let mut drawn = vec![false; n];
    let mut centroids = Array2::zeros((k, points.ncols()));
    for c in 0..k {
        let total: f64 = nearest.iter().sum();
        let point = if c == 0 {
            rng.below(n)
        } else if total > 0.0 {
            let mut left = rng.uniform() * total;
            let reached = nearest.iter().position(|&d| {
                left -= d;
                left < 0.0
            });
            // Rounding can leave a crumb past the last point that has a chance.
            reached.or_else(|| nearest.iter().rposition(|&d| d > 0.0)).expect("a point with a chance")
        } else {
            drawn.iter().position(|&d| !d).expect("k is at most n")
        };
        drawn[point] = true;
        centroids.row_mut(c).assign(&points.row(point));
        for (p, nearest) in nearest.iter_mut().enumerate() {
            *nearest = distance(row(points, p), row(points, point)).max(0.0).min(*nearest);
        }
        nearest[point] = 0.0;
    }
    centroids
}

/// The first centroids, given to the clusters so that a heavier one starts where more points are: a large group that
/// falls to a small cluster is not found again by the steps that follow.
fn heavy_where_many(points: &Array2<f32>, weights: &[u32], centroids: &Array2<f32>) -> Array2<f32> {
    let k = weights.len();
    let mut n_nearest = vec![0usize; k];
    for row in distances(points, centroids).outer_iter() {
        let nearest = (0..k).min_by_key(|&c| row[c]).expect("a cluster");
        n_nearest[nearest] += 1;
    }
    let by = |key: &dyn Fn(usize) -> usize| {
        let mut order: Vec<usize> = (0..k).collect();
        order.sort_by_key(|&i| std::cmp::Reverse(key(i)));
        order
    };
    let mut from = vec![0; k];
    for (cluster, centroid) in by(&|i| weights[i] as usize).into_iter().zip(by(&|i| n_nearest[i])) {
        from[cluster] = centroid;
    }
    centroids.select(Axis(0), &from)
}

/// Cosine distances in units of 2^-32, N x K.
fn distances(points: &Array2<f32>, centroids: &Array2<f32>) -> Array2<i64> {
    const UNIT: f64 = (1u64 << 32) as f64;
    let of_point = |p| {
        let point = row(points, p);
        (0..centroids.nrows()).map(move |c| (distance(point, row(centroids, c)) * UNIT).round() as i64)
    };
    let all = (0..points.nrows()).into_par_iter().flat_map_iter(of_point).collect();
    Array2::from_shape_vec((points.nrows(), centroids.nrows()), all).expect("K distances a point")
}

fn row(matrix: &Array2<f32>, i: usize) -> &[f32] {
    let n = matrix.ncols();
    &matrix.as_slice().expect("rows without gaps")[i * n..][..n]
}

/// One less the cosine of a point and a centroid.
fn distance(point: &[f32], centroid: &[f32]) -> f64 {
    1.0 - f64::from(dot(point, centroid))
}

/// Moves each centroid to the mean direction of its points; one whose points cancel out stays.
fn update(points: &Array2<f32>, labels: &[u32], centroids: &mut Array2<f32>) {
    centroids.axis_iter_mut(Axis(0)).into_par_iter().enumerate().for_each(|(c, mut centroid)| {
        let mut sum = vec![0.0f64; points.ncols()];
        for (_, point) in labels.iter().zip(points.rows()).filter(|(label, _)| **label as usize == c) {
            for (sum, &x) in sum.iter_mut().zip(point) {
                *sum += f64::from(x);
            }
        }
        if let Some(unit) = Signature::normalised(sum.into_iter().map(|x| x as f32).collect()) {
            centroid.assign(&ArrayView1::from(unit.as_slice()));
        }
    });
}

/// Numbers the clusters of each weight by their first points, so that equal partitions have equal labels.
fn in_order_of_first_points(labels: &mut [u32], weights: &[u32], centroids: &mut Array2<f32>) {
    let mut found = Vec::with_capacity(weights.len());
    for &label in labels.iter() {
        if !found.contains(&(label as usize)) {
            found.push(label as usize);
        }
    }
    let mut order = Vec::with_capacity(weights.len());
    for &weight in weights {
        let next = found.iter().position(|&old| weights[old] == weight).expect("each cluster has a point");
        order.push(found.remove(next));
    }
    *centroids = centroids.select(Axis(0), &order);
    for label in labels {
        *label = order.iter().position(|&old| old == *label as usize).expect("every label is in the order") as u32;
    }
}

#[cfg(test)]
mod tests {
    use ndarray::array;

    use super::*;

    fn units(rows: &[Vec<f32>]) -> Array2<f32> {
        let flat = rows.iter().flat_map(|r| Signature::normalised(r.clone()).expect("not zero").as_slice().to_vec());
        Array2::from_shape_vec((rows.len(), rows[0].len()), flat.collect()).expect("equal rows")
    }

    /// Random directions around `k` axes, in turn.
    fn around_axes(n: usize, k: usize, noise: f64, seed: u64) -> Array2<f32> {
        let mut rng = Rng::new(seed);
        let row = |i: usize, rng: &mut Rng| -> Vec<f32> {
            (0..k).map(|e| f32::from(u8::from(e == i % k)) + (rng.uniform() * noise) as f32).collect()
        };
        let rows: Vec<Vec<f32>> = (0..n).map(|i| row(i, &mut rng)).collect();
        units(&rows)
    }

    fn params(k: usize) -> KmeansParams {
        KmeansParams { k, seed: 1, n_restarts: 8, max_iterations: 50 }
    }

    #[test]
    fn planted_groups_are_found() {
        let clustering = balanced_kmeans(&around_axes(30, 5, 0.3, 1), &params(5));
        let want: Vec<u32> = (0..30).map(|i| i % 5).collect();
        assert_eq!(clustering.labels, want);
        assert!((0..5).map(|c| row(&clustering.centroids, c)).all(|c| distance(c, c).abs() < 1e-5));
    }

    #[test]
    fn sizes_differ_by_at_most_one_even_when_groups_do_not() {
        for n in [7, 20, 23] {
            // Nearly all points lie around one axis.
            let rows: Vec<Vec<f32>> =
                (0..n).map(|i| if i < 2 { vec![0.0, 1.0] } else { vec![1.0, 0.01 * i as f32] }).collect();
            let clustering = balanced_kmeans(&units(&rows), &params(3));
            let sizes: Vec<usize> = (0..3).map(|c| clustering.labels.iter().filter(|&&l| l == c).count()).collect();
            assert_eq!(sizes.iter().sum::<usize>(), n);
            assert!(sizes.iter().all(|&s| s == n / 3 || s == n.div_ceil(3)), "{sizes:?}");
        }
    }

    #[test]
    fn without_balance_sizes_are_the_groups_own() {
        // Axis 0 has half of the points, 1 and 2 a quarter each.
        let axis = |i: usize| [1, 0, 2, 0][i % 4];
        let rows: Vec<Vec<f32>> =
            (0..24).map(|i| (0..3).map(|e| if e == axis(i) { 1.0 } else { 0.01 * (i % 5) as f32 }).collect()).collect();
        let clustering = unbalanced_kmeans(&units(&rows), &params(3));
        let want: Vec<u32> = (0..24).map(|i| [0, 1, 2, 1][i % 4]).collect();
        assert_eq!(clustering.labels, want);
        assert!(clustering.cost < balanced_kmeans(&units(&rows), &params(3)).cost);
    }

    #[test]
    fn nobody_is_left_without_a_point() {
        // Both are nearest to cluster 1; cluster 0 takes the farther one.
        assert_eq!(nearest(&ndarray::array![[9, 2], [9, 3]]), [1, 0]);
        assert_eq!(nearest(&ndarray::array![[4, 4, 9], [1, 5, 9], [3, 2, 9]]), [2, 0, 1]);
        let alike = units(&vec![vec![1.0, 0.0]; 5]);
        let labels = unbalanced_kmeans(&alike, &params(3)).labels;
        assert!((0..3).all(|cluster| labels.contains(&cluster)), "{labels:?}");
    }

    #[test]
    fn weights_set_the_sizes_and_keep_the_order() {
        // Axis 0 has half of the points, 1 and 2 a quarter each.
        let axis = |i: usize| [1, 0, 2, 0][i % 4];
        let rows: Vec<Vec<f32>> =
            (0..24).map(|i| (0..3).map(|e| if e == axis(i) { 1.0 } else { 0.01 * (i % 5) as f32 }).collect()).collect();
        let points = units(&rows);
        for weights in [[2, 1, 1], [1, 2, 1], [1, 1, 2], [20, 20, 40]] {
            let clustering = weighted_kmeans(&points, &weights, &params(3));
            let size = |c: u32| clustering.labels.iter().filter(|&&label| label == c).count() as u32;
            let all: u32 = weights.iter().sum();
            assert_eq!([size(0), size(1), size(2)], weights.map(|w| 24 * w / all), "{weights:?}");
            // The heavy cluster is axis 0 wherever it stands; of the others, axis 1 has the first point.
            let heavy = weights.iter().position(|w| 2 * w == all).expect("one is half of all");
            let mut axes = vec![1, 2];
            axes.insert(heavy, 0);
            for (i, &label) in clustering.labels.iter().enumerate() {
                assert_eq!(axes[label as usize], axis(i), "{weights:?}: point {i}");
            }
        }
        assert_eq!(weighted_kmeans(&points, &[3; 3], &params(3)), balanced_kmeans(&points, &params(3)));
    }

    // Symptom: a cluster of double size took half of a small group and half of a large one.
    #[test]
    fn a_heavy_cluster_starts_where_many_points_are() {
        let axes = [4usize, 0, 4, 5, 2, 5];
        let rows: Vec<Vec<f32>> = (0..60)
            .map(|i| (0..6).map(|e| f32::from(u8::from(e == axes[i % 6])) + 0.01 * (i % 7) as f32).collect())
            .collect();
        for seed in 0..8 {
            let one = KmeansParams { seed, n_restarts: 4, ..params(4) };
            let clustering = weighted_kmeans(&units(&rows), &[1, 2, 1, 2], &one);
            for (cluster, n) in [10, 20, 10, 20].into_iter().enumerate() {
                let of: Vec<usize> = (0..60).filter(|&i| clustering.labels[i] as usize == cluster).collect();
                assert!(of.len() == n && of.iter().all(|i| axes[i % 6] == axes[of[0] % 6]), "{of:?}");
            }
        }
    }

    #[test]
    fn the_result_is_a_fixed_point() {
        let points = around_axes(40, 6, 2.0, 3);
        let clustering = balanced_kmeans(&points, &KmeansParams { max_iterations: 1000, ..params(4) });
        let mut centroids = clustering.centroids.clone();
        update(&points, &clustering.labels, &mut centroids);
        assert_eq!(centroids, clustering.centroids);
        assert_eq!(weighted_assignment(&distances(&points, &centroids), &[1; 4]), clustering.labels);
        let cost: f64 = clustering
            .labels
            .iter()
            .enumerate()
            .map(|(p, &c)| distance(row(&points, p), row(&centroids, c as usize)))
            .sum();
        assert!((cost - clustering.cost).abs() < 1e-12);
    }

    #[test]
    fn more_restarts_never_cost_more() {
        let points = around_axes(50, 8, 3.0, 4);
        let cost = |n_restarts| balanced_kmeans(&points, &KmeansParams { n_restarts, ..params(6) }).cost;
        assert!(cost(20) <= cost(5) && cost(5) <= cost(1));
    }

    // Symptom: many restarts aborted the process, because every search was kept until the last was done.
    #[test]
    fn the_lowest_of_equally_cheap_restarts_wins_on_any_number_of_threads() {
        let points = around_axes(12, 4, 1.0, 7);
        let many = KmeansParams { n_restarts: 600, ..params(3) };
        let assign = |distances: &Array2<i64>| weighted_assignment(distances, &[1; 3]);
        let alone =
            |restart: u32| search(&points, &[1; 3], &many, &assign, &mut Rng::new(mix(many.seed + u64::from(restart))));
        let want = (1..many.n_restarts).fold(alone(0), |best, restart| {
            let next = alone(restart);
            if next.cost < best.cost { next } else { best }
        });
        for n_threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().expect("threads");
            assert_eq!(pool.install(|| balanced_kmeans(&points, &many)), want);
        }
        let tie = Clustering { n_iterations: want.n_iterations + 1, ..want.clone() };
        assert_eq!(cheaper(want.clone(), tie), want);
    }

    #[test]
    fn equal_points_and_one_cluster_a_point_work() {
        let same = units(&vec![vec![1.0, 2.0]; 5]);
        let clustering = balanced_kmeans(&same, &params(3));
        assert!(clustering.cost.abs() < 1e-6);
        assert_eq!(clustering.labels.iter().collect::<std::collections::BTreeSet<_>>().len(), 3);
        let apart = units(&[vec![1.0, 0.0], vec![0.0, 1.0], vec![1.0, 1.0]]);
        assert_eq!(balanced_kmeans(&apart, &params(3)).labels, [0, 1, 2]);
        assert_eq!(balanced_kmeans(&apart, &params(1)).labels, [0, 0, 0]);
    }

    #[test]
    fn points_that_cancel_out_leave_their_centroid_in_place() {
        let points = array![[1.0f32, 0.0], [-1.0, 0.0]];
        let mut centroids = array![[0.0f32, 1.0]];
        update(&points, &[0, 0], &mut centroids);
        assert_eq!(centroids, array![[0.0, 1.0]]);
    }
}
