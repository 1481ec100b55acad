//! A worker's sequences as far as they were placed by the policy.
//!
//! Never asks what they cost.

use crate::{
    route::{
        StepLoad,
        survival::{Survival, Tables},
    },
    types::{RequestId, WorkerId},
};

/// What one worker runs.
#[derive(Debug, Clone)]
pub(super) struct Batch {
    pub survival: Survival,
    pub residents: Vec<Resident>,
    pub n_steps: i64,
    /// Tokens of context the residents had, less the steps the worker had run, when each came.
    context: i64,
}

/// One sequence of it.
#[derive(Debug, Clone)]
pub(super) struct Resident {
    pub id: RequestId,
    /// How likely it is to pick each expert.
    pub picks: Box<[u16]>,
    /// Steps whose picks corrected that.
    pub n_corrections: u32,
    /// How far each worker's similarity was behind the best when it came; none where nothing was compared.
    pub behind: Vec<f32>,
    /// It came from another worker.
    pub has_moved: bool,
    context: i64,
    /// Steps the worker had run when it came, less those that it had run elsewhere.
    since: i64,
}

impl Resident {
    /// Memory for one, of a model of `n_experts` experts over all its layers.
    pub fn new(n_experts: usize, n_workers: usize) -> Self {
        Self {
            id: RequestId(0),
            picks: vec![0; n_experts].into(),
            n_corrections: 0,
            behind: Vec::with_capacity(n_workers),
            has_moved: false,
            context: 0,
            since: 0,
        }
    }

    /// Becomes a request that has not run yet.
    pub fn begin(&mut self, id: RequestId, picks: &[u16]) {
        self.id = id;
        self.picks.copy_from_slice(picks);
        self.behind.clear();
        (self.n_corrections, self.has_moved) = (0, false);
    }

    /// How far `worker` is behind, where that is known.
    pub fn behind(&self, worker: WorkerId) -> f64 {
        self.behind.get(worker.index()).copied().unwrap_or(0.0).into()
    }
}

impl Batch {
    /// No sequences, of a model of `n_experts` experts over all its layers.
    pub fn new(n_experts: usize) -> Self {
        Self { survival: Survival::new(n_experts), residents: Vec::new(), n_steps: 0, context: 0 }
    }

    pub fn load(&self, n_batch: u32) -> StepLoad {
        let n_context = self.context + self.n_steps * i64::from(self.residents.len() as u32);
        StepLoad {
            n_experts: f64::from(self.survival.expected()),
            n_batch: f64::from(n_batch),
            n_context: n_context as f64,
        }
    }

    pub fn find(&self, id: RequestId) -> Option<usize> {
        self.residents.iter().position(|resident| resident.id == id)
    }

    /// Steps that a resident has run, here and before.
    pub fn n_run(&self, at: usize) -> i64 {
        self.n_steps - self.residents[at].since
    }

    /// Tokens of a resident's context.
    pub fn n_tokens(&self, at: usize) -> u32 {
        u32::try_from(self.residents[at].context + self.n_steps).unwrap_or(0)
    }

    /// Takes a sequence in that has `n_tokens` of context and has run `n_run` steps.
    pub fn push(&mut self, mut resident: Resident, n_tokens: u32, n_run: i64, tables: &Tables) {
        resident.context = i64::from(n_tokens) - self.n_steps;
        resident.since = self.n_steps - n_run;
        self.survival.join(&resident.picks, tables);
        self.context += resident.context;
        self.residents.push(resident);
    }

    /// A sequence leaves; the last one takes its place.
    pub fn take(&mut self, at: usize, tables: &Tables) -> Resident {
        let resident = self.residents.swap_remove(at);
        self.survival.leave(&resident.picks, tables);
        self.context -= resident.context;
        resident
    }

    /// Undoes [`Batch::take`].
    pub fn put_back(&mut self, at: usize, resident: Resident, tables: &Tables) {
        self.survival.join(&resident.picks, tables);
        self.context += resident.context;
        self.residents.push(resident);
        let last = self.residents.len() - 1;
        self.residents.swap(at, last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::survival::ONE;

    #[test]
    fn who_is_taken_and_put_back_has_never_been_away() {
        let tables = Tables::new();
        let mut batch = Batch::new(3);
        for id in 0..3 {
            let mut resident = Resident::new(3, 1);
            resident.begin(RequestId(id), &[ONE / 2, 0, ONE / 4]);
            batch.push(resident, 10, 0, &tables);
            batch.n_steps += 5;
        }
        let (load, ids) = (batch.load(3), batch.residents.iter().map(|resident| resident.id).collect::<Vec<_>>());
        // 25, 20 and 15 tokens.
        assert_eq!(load.n_context.to_bits(), 60.0f64.to_bits());
        for (at, expected) in [(15, 25), (10, 20), (5, 15)].into_iter().enumerate() {
            let (n_run, n_tokens) = (batch.n_run(at), batch.n_tokens(at));
            assert_eq!((n_run, n_tokens), expected);
            let resident = batch.take(at, &tables);
            assert!(batch.load(2).n_experts < load.n_experts);
            batch.put_back(at, resident, &tables);
            assert_eq!((batch.load(3), batch.n_run(at), batch.n_tokens(at)), (load, n_run, n_tokens));
        }
        assert_eq!(batch.residents.iter().map(|resident| resident.id).collect::<Vec<_>>(), ids);
    }
}
