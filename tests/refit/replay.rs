//! Planted requests through decode workers on a virtual clock, in a closed loop: a request that ends makes room for the
//! next. A step costs what the experts it reads cost, so that routing shows in the time of a token.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use eldr::{
    Calibration,
    calibrate::{KmeansParams, balanced_kmeans},
    refit::{FitJob, RefitConfig, Refitter, align},
    route::{PolicyKind, PolicyParams, RoutePolicy, RouteRequest, WorkerView},
    signature::Signature,
    types::WorkerId,
};
use ndarray::Array2;

use crate::world::{Mix, N_LAYERS, Planted, World};

const N_SLOTS: u32 = 16;
/// Requests a worker has on average.
const N_RESIDENT: usize = 14;
/// A step of a full worker that reads `DISTINCT` experts a layer.
const STEP: f64 = 0.030;
const DISTINCT: f64 = 36.0;
/// From a fit's start until its centroids are there.
const FIT_TIME: Duration = Duration::from_millis(300);

/// What moves the centroids.
pub enum Mover {
    /// Nothing: as calibrated.
    Nobody,
    /// A fit of the last 5 s, every 2.5 s, always set; aligned to the workers.
    Timer { window: VecDeque<(Duration, Signature)>, last: Duration, out: Option<(Duration, Array2<f32>)> },
    /// The crate's refitter.
    Refitter { refitter: Box<Refitter>, out: Option<(Duration, FitJob)> },
}

impl Mover {
    pub fn timer() -> Self {
        Self::Timer { window: VecDeque::new(), last: Duration::ZERO, out: None }
    }

    pub fn refitter(config: RefitConfig, calibration: &Calibration) -> Self {
        let refitter = Refitter::new(config, Arc::new(calibration.centroids.clone())).unwrap();
        Self::Refitter { refitter: Box::new(refitter), out: None }
    }

    fn observe(&mut self, signature: Signature, now: Duration) {
        match self {
            Self::Nobody => {}
            Self::Timer { window, .. } => window.push_back((now, signature)),
            Self::Refitter { refitter, .. } => refitter.observe(signature, now),
        }
    }

    /// New centroids, if some are there at time `now`.
    fn turn(&mut self, now: Duration, old: &Array2<f32>) -> Option<Arc<Array2<f32>>> {
        match self {
            Self::Nobody => None,
            Self::Timer { window, last, out } => {
                while window.front().is_some_and(|(at, _)| now.saturating_sub(*at) > Duration::from_secs(5)) {
                    window.pop_front();
                }
                if out.is_none()
                    && now.saturating_sub(*last) >= Duration::from_millis(2500)
                    && window.len() >= old.nrows()
                {
                    *last = now;
                    let flat = window.iter().flat_map(|(_, s)| s.as_slice()).copied().collect();
                    let points = Array2::from_shape_vec((window.len(), old.ncols()), flat).unwrap();
                    let params = KmeansParams { k: old.nrows(), seed: 1, n_restarts: 4, max_iterations: 50 };
                    let fitted = balanced_kmeans(&points, &params).centroids;
                    let views: Vec<_> = old.outer_iter().collect();
                    *out = Some((now + FIT_TIME, fitted.select(ndarray::Axis(0), &align(&views, &fitted))));
                }
                out.take_if(|(at, _)| *at <= now).map(|(_, centroids)| Arc::new(centroids))
            }
            Self::Refitter { refitter, out } => {
                if let Some(job) = refitter.due(now) {
                    *out = Some((now + FIT_TIME, job));
                }
                out.take_if(|(at, _)| *at <= now).and_then(|(_, job)| refitter.apply(job.run()))
            }
        }
    }
}

/// What a replay measured, over the requests after the first tenth.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// Distinct experts a layer and step.
    pub distinct: f64,
    /// Median time per output token, in seconds.
    pub tpot: f64,
    /// 99th percentile of the same.
    pub tpot_p99: f64,
    /// Times new centroids were set.
    pub n_swaps: f64,
}

impl Measured {
    pub fn mean(runs: &[Self]) -> Self {
        let of = |value: fn(&Self) -> f64| runs.iter().map(value).sum::<f64>() / runs.len() as f64;
        Self {
            distinct: of(|m| m.distinct),
            tpot: of(|m| m.tpot),
            tpot_p99: of(|m| m.tpot_p99),
            n_swaps: of(|m| m.n_swaps),
        }
    }
}

struct Resident {
    planted: Planted,
    n_left: u32,
    began: f64,
    index: u64,
}

pub struct Replay<'a> {
    pub world: &'a World,
    pub calibration: &'a Calibration,
    pub n_requests: u64,
    /// The mix of domains when request `i` arrives.
    pub mixture: &'a dyn Fn(u64) -> Mix,
}

struct Run<'a> {
    replay: &'a Replay<'a>,
    policy: Box<dyn RoutePolicy>,
    centroids: Arc<Array2<f32>>,
    mover: Mover,
    views: Vec<WorkerView>,
    residents: Vec<Vec<Resident>>,
    /// When each worker's step ends; infinite while it has none.
    ends: Vec<f64>,
    next: u64,
    n_swaps: u64,
}

impl Replay<'_> {
    pub fn run(&self, mover: Mover) -> Measured {
        let n_workers = self.calibration.n_workers();
        let centroids = Arc::new(self.calibration.centroids.clone());
        let params = PolicyParams { centroids: Some(Arc::clone(&centroids)), seed: 1, ..PolicyParams::new(n_workers) };
        let view = |id| WorkerView { id: WorkerId(id as u32), n_slots: N_SLOTS, n_inflight: 0, healthy: true };
        let mut run = Run {
            replay: self,
            policy: PolicyKind::LocalityBand.build(&params).unwrap(),
            centroids,
            mover,
            views: (0..n_workers).map(view).collect(),
            residents: (0..n_workers).map(|_| Vec::new()).collect(),
            ends: vec![f64::INFINITY; n_workers],
            next: 0,
            n_swaps: 0,
        };
        run.finish()
    }
}

impl Run<'_> {
    fn finish(&mut self) -> Measured {
        let warm = self.replay.n_requests / 10;
        for _ in 0..N_RESIDENT * self.views.len() {
            self.admit(0.0);
        }
        let (mut n_distinct, mut n_rows) = (0u64, 0u64);
        let mut tpots = Vec::new();
        while let Some(worker) = (0..self.ends.len()).min_by(|&a, &b| self.ends[a].total_cmp(&self.ends[b])) {
            if self.ends[worker].is_infinite() {
                break;
            }
            let now = self.ends[worker];
            self.ends[worker] = f64::INFINITY;
            let mut ended = 0;
            let mut residents = std::mem::take(&mut self.residents[worker]);
            residents.retain_mut(|resident| {
                resident.n_left -= 1;
                if resident.n_left == 0 && resident.index >= warm {
                    tpots.push((now - resident.began) / f64::from(resident.planted.n_output));
                }
                ended += u32::from(resident.n_left == 0);
                resident.n_left > 0
            });
            self.residents[worker] = residents;
            self.views[worker].n_inflight -= ended;
            if let Some(centroids) = self.mover.turn(Duration::from_secs_f64(now), &self.centroids) {
                self.policy.set_centroids(&centroids).unwrap();
                self.centroids = centroids;
                self.n_swaps += 1;
            }
            (0..ended).for_each(|_| self.admit(now));
            let distinct = self.begin_step(worker, now);
            if self.next >= warm && self.next < self.replay.n_requests {
                n_distinct += distinct;
                n_rows += u64::from(N_LAYERS);
            }
        }
        tpots.sort_unstable_by(f64::total_cmp);
        Measured {
            distinct: n_distinct as f64 / n_rows as f64,
            tpot: tpots[tpots.len() / 2],
            tpot_p99: tpots[tpots.len() * 99 / 100],
            n_swaps: self.n_swaps as f64,
        }
    }

    /// Prefills and places the next request, if there is one.
    fn admit(&mut self, now: f64) {
        let index = self.next;
        if index == self.replay.n_requests {
            return;
        }
        self.next += 1;
        let mut planted = self.replay.world.request(index, &(self.replay.mixture)(index));
        let signature = self.replay.world.prefill(&mut planted, self.replay.calibration);
        let request = RouteRequest { signature: Some(&signature), ..RouteRequest::default() };
        let worker = self.policy.select(&request, &self.views).expect("fewer requests than slots").worker.index();
        self.mover.observe(signature, Duration::from_secs_f64(now));
        self.views[worker].n_inflight += 1;
        self.residents[worker].push(Resident { n_left: planted.n_output, planted, began: now, index });
        if self.ends[worker].is_infinite() && self.residents[worker].len() == 1 {
            self.begin_step(worker, now);
        }
    }

    /// Starts the worker's next step; the distinct experts it reads, over all layers.
    fn begin_step(&mut self, worker: usize, now: f64) -> u64 {
        if self.residents[worker].is_empty() || self.ends[worker].is_finite() {
            return 0;
        }
        let mut distinct = 0;
        let residents = &mut self.residents[worker];
        for layer in 0..N_LAYERS {
            let mut read = 0u64;
            for resident in residents.iter_mut() {
                for expert in self.replay.world.picks(&mut resident.planted, layer) {
                    read |= 1 << expert;
                }
            }
            distinct += u64::from(read.count_ones());
        }
        let experts = distinct as f64 / f64::from(N_LAYERS) / DISTINCT;
        let tokens = residents.len() as f64 / f64::from(N_SLOTS);
        self.ends[worker] = now + STEP * (0.30 + 0.55 * experts + 0.15 * tokens);
        distinct
    }
}
