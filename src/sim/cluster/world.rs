use std::{
    cmp::{Ordering, Reverse},
    collections::{BinaryHeap, HashMap, VecDeque},
};

use super::{
    Event, Pool, Scenario,
    meter::Meter,
    mix::Mix,
    prompts::Prompts,
    runner::{Charged, ClusterRunner},
    traffic::Traffic,
};
use crate::{
    refit::Refitter,
    schedule::{Command, DecodeWorker, Dispatcher, PrefillWorker, Source, StepPicks, WorkerEvent},
    types::RequestId,
};

/// A run under way.
pub(super) struct Run<'a> {
    pub pool: Pool<'a>,
    pub scenario: &'a Scenario,
    pub now: f64,
    pub dispatcher: Dispatcher,
    pub prefill: Vec<Worker<'a, PrefillWorker>>,
    pub decode: Vec<Worker<'a, DecodeWorker>>,
    pub pending: BinaryHeap<Reverse<Due>>,
    pub n_events: u64,
    pub mix: Mix,
    pub traffic: Option<Traffic>,
    pub prompts: Prompts<'a>,
    pub concurrency: usize,
    pub n_arrived: u64,
    pub n_submitted: u64,
    /// Came while as many as may be were in the system.
    pub held: VecDeque<f64>,
    pub live: HashMap<RequestId, Live>,
    pub n_refused: u64,
    pub meter: Meter,
    pub commands: Vec<Command>,
    /// Workers that may have a step to start.
    pub woken: Vec<Source>,
    /// Hand-offs so far, and the milliseconds they took.
    pub handoffs: (f64, f64),
    pub refitter: Option<Refitter>,
}

/// A simulated worker: the engine's scheduler over a runner that charges time.
pub(super) struct Worker<'a, S> {
    pub scheduler: S,
    pub runner: ClusterRunner<'a>,
    /// How many times the cost's time a step takes.
    pub slowness: f64,
    pub step: Option<Step>,
    pub events: Vec<WorkerEvent>,
    /// Lost at the end of its step.
    pub doomed: bool,
}

/// A step that is running.
pub(super) struct Step {
    pub n_batch: u32,
    pub charged: Charged,
    /// It took no sequence in.
    pub is_pure: bool,
    /// What its sequences picked, where it is tapped.
    pub picked: Option<(Vec<RequestId>, StepPicks)>,
}

/// A request in the system.
pub(super) struct Live {
    pub index: u32,
    pub group: Option<u32>,
    pub arrival: f64,
    pub first_token: f64,
    pub admitted: Option<f64>,
    pub measured: bool,
}

/// Something that will happen.
pub(super) struct Due {
    pub at: f64,
    pub number: u64,
    pub what: Happening,
}

/// What can happen.
pub(super) enum Happening {
    Arrival,
    Done(Source),
    Planned(Event),
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at.total_cmp(&other.at).then(self.number.cmp(&other.number))
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Due {}

impl<'a, S> Worker<'a, S> {
    pub fn new(scheduler: S, runner: ClusterRunner<'a>, slowness: f64) -> Self {
        Self { scheduler, runner, slowness, step: None, events: Vec::new(), doomed: false }
    }
}
