//! How much there is to win: those that ran together at moments of a run, parted over the workers as well as they can be.
//!
//! Never serves anything: each partition is for its moment, by the true picks, and nothing moved there.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex},
};

use eldr::{
    metrics::Summary,
    rng::Rng,
    route::{PolicyLayer, RoutePolicy, RouteRequest},
    signature::ExpertCounts,
    sim::StepCost,
    trace::{Trace, TraceHeader, TraceRequest},
    types::{RequestId, WorkerId},
};
use rayon::prelude::*;

use crate::partition::{Partition, Parts, dealt};

/// What the requests of a moment are parted by.
///
/// The first two know how often each request picks each expert in all of its answer. Batches are as even as they can be, so
/// that no request has it better at the cost of others, or of any size that makes the mean request's step shortest. The
/// last knows what each picks in the very step: only who could deal all sequences anew for every token would reach it.
pub const KINDS: [&str; 3] = ["best partition", "best of any sizes", "best of each step"];

/// Random starts of a search.
const N_STARTS: usize = 2;
/// Times the picks of a moment's requests are drawn from their answers, to tell what its steps read.
const N_DRAWS: usize = 16;
/// No chance to pick an expert is higher: a search takes requests out of batches again.
const SURE: f64 = 0.9999;

/// What every request of a recording picks.
pub struct Known {
    /// Where the request with such a prompt is.
    positions: HashMap<Vec<u32>, usize>,
    /// Of each request and expert, the chance that a step does not pick it.
    spared: Vec<Vec<f64>>,
    /// Of each request, its steps one after another, with a bit for each expert.
    steps: Vec<Vec<u64>>,
    n_words: usize,
}

impl Known {
    pub fn of(trace: &Trace) -> Self {
        let header = &trace.header;
        let n_words = (header.shape.n_layer_moe() * header.shape.n_expert as usize).div_ceil(64);
        let requests = || trace.requests.iter();
        Self {
            positions: requests().enumerate().map(|(at, request)| (key(&request.prefill_counts(header)), at)).collect(),
            spared: requests().map(|request| spared(request, header)).collect(),
            steps: requests().map(|request| steps(request, header, n_words)).collect(),
            n_words,
        }
    }

    /// A step of a request at random.
    fn draw(&self, request: usize, rng: &mut Rng) -> &[u64] {
        let steps = &self.steps[request];
        &steps[self.n_words * rng.below(steps.len() / self.n_words)..][..self.n_words]
    }
}

/// The prompt's counts are as good as a name.
fn key(counts: &ExpertCounts) -> Vec<u32> {
    counts.layers().iter().filter_map(|&layer| counts.row(layer)).flatten().copied().collect()
}

fn spared(request: &TraceRequest, header: &TraceHeader) -> Vec<f64> {
    let counts = request.decode_counts(header);
    let chance = |&n: &u32| 1.0 - (f64::from(n) / f64::from(counts.n_tokens().max(1))).min(SURE);
    counts.layers().iter().filter_map(|&layer| counts.row(layer)).flatten().map(chance).collect()
}

fn steps(request: &TraceRequest, header: &TraceHeader, n_words: usize) -> Vec<u64> {
    let n_expert = header.shape.n_expert as usize;
    let mut steps = vec![0; request.n_steps(header) * n_words];
    for (step, words) in steps.chunks_exact_mut(n_words).enumerate() {
        for layer in 0..header.shape.n_layer_moe() {
            for &expert in request.step_picks(header, step, layer) {
                let bit = layer * n_expert + usize::from(expert);
                words[bit / 64] |= 1 << (bit % 64);
            }
        }
    }
    steps
}

/// Who ran where when a request came: the request, its place in the recording, its worker.
type Moment = Vec<(RequestId, usize, WorkerId)>;

/// Writes down who runs where, whenever so many requests have come.
pub struct Watch {
    pub inner: Box<dyn RoutePolicy>,
    pub known: Arc<Known>,
    /// Requests that come before the first moment, and from one to the next.
    pub n_warmup: usize,
    pub every: usize,
    pub n_placed: usize,
    pub residents: BTreeMap<RequestId, (usize, WorkerId)>,
    pub moments: Arc<Mutex<Vec<Moment>>>,
}

impl PolicyLayer for Watch {
    fn inner(&self) -> &dyn RoutePolicy {
        &*self.inner
    }

    fn inner_mut(&mut self) -> &mut dyn RoutePolicy {
        &mut *self.inner
    }

    fn placed(&mut self, request: &RouteRequest<'_>, worker: WorkerId) {
        self.inner.placed(request, worker);
        let name = key(request.counts.expect("a replay counts prompts"));
        self.residents.insert(request.id, (self.known.positions[&name], worker));
        self.n_placed += 1;
        if self.n_placed > self.n_warmup && self.n_placed.is_multiple_of(self.every) {
            let moment = self.residents.iter().map(|(&id, &(at, worker))| (id, at, worker)).collect();
            self.moments.lock().expect("one thread").push(moment);
        }
    }

    fn left(&mut self, id: RequestId, worker: WorkerId) {
        self.inner.left(id, worker);
        self.residents.remove(&id);
    }

    fn moved(&mut self, id: RequestId, n_tokens: u32, from: WorkerId, to: WorkerId) {
        self.inner.moved(id, n_tokens, from, to);
        self.residents.entry(id).and_modify(|resident| resident.1 = to);
    }
}

/// What a partition comes to, as shares of what it was where the requests ran.
#[derive(Debug, Clone, Copy)]
pub struct Shares {
    /// Of the requests' mean steps at the moments that saw them. Nothing where each moment is a single step, of which a
    /// request has too few for a mean of its own.
    pub p50: f64,
    pub p99: f64,
    pub mean: f64,
    pub experts: f64,
}

/// The workers of a moment.
pub struct Pool<'a> {
    pub known: &'a Known,
    pub cost: StepCost,
    pub n_workers: usize,
    pub n_slots: usize,
    pub seed: u64,
}

/// A partition of a moment: the step that each of its requests takes, and the experts that a worker's step reads.
struct Steps {
    times: Vec<f64>,
    experts: f64,
}

/// For each of [`KINDS`].
pub fn shares(pool: &Pool<'_>, moments: &[Moment]) -> [Shares; 3] {
    let numbered: Vec<_> = (0..).zip(moments).collect();
    let judged: Vec<[Steps; 5]> = numbered.into_par_iter().map(|(nth, moment)| pool.judge(moment, nth)).collect();
    let experts = |of: usize| judged.iter().map(|steps| steps[of].experts).sum::<f64>();
    let means = |of: usize| {
        let mut requests: BTreeMap<RequestId, (f64, f64)> = BTreeMap::new();
        for (moment, steps) in moments.iter().zip(&judged) {
            for (&(id, ..), time) in moment.iter().zip(&steps[of].times) {
                let (sum, n) = requests.entry(id).or_default();
                (*sum, *n) = (*sum + time, *n + 1.0);
            }
        }
        let mut means: Vec<f64> = requests.into_values().map(|(sum, n)| sum / n).collect();
        Summary::of(&mut means).expect("a request")
    };
    let share = |of: usize, to: usize| {
        let (now, then) = (means(of), means(to));
        let experts = experts(of) / experts(to);
        Shares { p50: now.p50 / then.p50, p99: now.p99 / then.p99, mean: now.mean / then.mean, experts }
    };
    [share(1, 0), share(2, 0), Shares { p50: f64::NAN, p99: f64::NAN, ..share(4, 3) }]
}

impl Pool<'_> {
    /// Where the requests ran, the first two of [`KINDS`], and, in one of their steps, where they ran and the last kind.
    fn judge(&self, moment: &Moment, nth: u64) -> [Steps; 5] {
        let mut rng = Rng::new(self.seed.wrapping_mul(1 << 20).wrapping_add(nth));
        let n = moment.len();
        let mut ran: Parts = vec![Vec::new(); self.n_workers];
        moment.iter().enumerate().for_each(|(at, &(.., worker))| ran[worker.index()].push(at));
        let mut draw = || moment.iter().map(|&(_, request, _)| self.known.draw(request, &mut rng)).collect::<Vec<_>>();
        let draws: Vec<Vec<&[u64]>> = (0..N_DRAWS).map(|_| draw()).collect();
        let often: Vec<Vec<f64>> = moment.iter().map(|&(_, request, _)| self.known.spared[request].clone()).collect();
        let once: Vec<Vec<f64>> = draws[0].iter().map(|words| self.spared_once(words)).collect();
        let mut starts = || (0..N_STARTS).map(|_| dealt(n, self.n_workers, &mut rng)).collect::<Vec<_>>();
        let even = self.partition(&often, false).best(starts());
        let any = self.partition(&often, true).best([even.clone(), ran.clone()]);
        let each = self.partition(&once, false).best(starts().into_iter().chain([even.clone()]));
        let (all, one) = (&draws[..], &draws[..1]);
        [(&ran, all), (&even, all), (&any, all), (&ran, one), (&each, one)]
            .map(|(parts, draws)| self.steps(parts, draws))
    }

    fn partition<'a>(&self, spared: &'a [Vec<f64>], resizes: bool) -> Partition<'a> {
        Partition { spared, cost: self.cost, n_slots: self.n_slots, resizes }
    }

    fn spared_once(&self, words: &[u64]) -> Vec<f64> {
        let n = self.known.spared[0].len();
        (0..n).map(|bit| if words[bit / 64] >> (bit % 64) & 1 == 1 { 1.0 - SURE } else { 1.0 }).collect()
    }

    /// Mean steps over the `draws`, each the picks of every request.
    fn steps(&self, parts: &Parts, draws: &[Vec<&[u64]>]) -> Steps {
        let mut times = vec![0.0; draws[0].len()];
        let (mut experts, mut n_busy) = (0.0, 0.0);
        let mut read = vec![0u64; self.known.n_words];
        for part in parts.iter().filter(|part| !part.is_empty()) {
            let distinct = |draw: &Vec<&[u64]>| {
                read.fill(0);
                for &at in part {
                    read.iter_mut().zip(draw[at]).for_each(|(read, picked)| *read |= picked);
                }
                read.iter().map(|word| word.count_ones()).sum::<u32>()
            };
            let n_distinct = f64::from(draws.iter().map(distinct).sum::<u32>()) / draws.len() as f64;
            let StepCost { fixed, per_expert, per_token } = self.cost;
            let time = fixed + per_expert * n_distinct + per_token * part.len() as f64;
            for &at in part {
                times[at] = time;
            }
            (experts, n_busy) = (experts + n_distinct, n_busy + 1.0);
        }
        Steps { times, experts: experts / f64::max(n_busy, 1.0) }
    }
}
