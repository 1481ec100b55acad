//! Workers that join, are drained, are lost and come back, while requests run.
//!
//! Never moves a request: what a drained worker holds it finishes, what a lost one held it gives back itself.

use crate::{
    route::WorkerView,
    schedule::{Command, Dispatcher, Source},
    types::WorkerId,
};

/// Why a decode worker was not drained or taken back.
///
/// ```
/// use eldr::{
///     route::LeastLoaded,
///     schedule::{DispatchLimits, Dispatcher, MemberError},
///     types::WorkerId,
/// };
///
/// let mut dispatcher = Dispatcher::new(1, &[4, 4], Box::new(LeastLoaded), None, DispatchLimits::default());
/// assert_eq!(dispatcher.drain_decode(WorkerId(0)), Ok(()));
/// assert_eq!(dispatcher.drain_decode(WorkerId(1)), Err(MemberError::Last(WorkerId(1))));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemberError {
    /// There is no such worker.
    #[error("there is no decode worker {worker}: there are {n_workers}, counted from 0")]
    Unknown {
        /// The number given.
        worker: WorkerId,
        /// Decode workers so far, lost and drained ones included.
        n_workers: usize,
    },
    /// Requests would have nowhere to go.
    #[error("decode worker {0} is the last one that takes requests: add or resume another before it is drained")]
    Last(WorkerId),
    /// The worker is lost.
    #[error("decode worker {0} is lost: it comes back with its device, or add a new one")]
    Lost(WorkerId),
}

impl Dispatcher {
    /// One decode worker more, of `n_slots` slots: its number. It takes requests once it is resumed.
    pub fn add_decode(&mut self, n_slots: u32) -> WorkerId {
        let id = WorkerId(self.decode.len() as u32);
        self.decode.push(WorkerView { id, n_slots, n_inflight: 0, healthy: false });
        self.lost.push(false);
        id
    }

    /// Sends the worker no more requests; it finishes those it has. Draining it again changes nothing.
    pub fn drain_decode(&mut self, worker: WorkerId) -> Result<(), MemberError> {
        self.known(worker)?;
        let mut others = self.decode.iter().filter(|other| other.id != worker);
        if !others.any(|other| other.healthy) {
            return Err(MemberError::Last(worker));
        }
        self.decode[worker.index()].healthy = false;
        Ok(())
    }

    /// Lets a drained or new worker take requests.
    pub fn resume_decode(&mut self, worker: WorkerId, commands: &mut Vec<Command>) -> Result<(), MemberError> {
        self.known(worker)?;
        self.decode[worker.index()].healthy = true;
        self.advance(commands);
        Ok(())
    }

    /// Whether a worker is lost.
    pub fn is_lost(&self, source: Source) -> bool {
        match source {
            Source::Prefill(worker) => !self.prefill[worker.index()].healthy,
            Source::Decode(worker) => self.lost[worker.index()],
        }
    }

    /// Whether a worker has no request: a lost one that has given back all it had.
    pub fn is_empty(&self, source: Source) -> bool {
        match source {
            Source::Prefill(worker) => self.prefill[worker.index()].n_inflight == 0,
            Source::Decode(worker) => self.decode[worker.index()].n_inflight == 0,
        }
    }

    /// A lost worker without requests is back, as it was: it takes requests from now on.
    pub fn revive(&mut self, source: Source, commands: &mut Vec<Command>) {
        assert!(self.is_lost(source) && self.is_empty(source), "{source:?} is not lost, or has requests");
        match source {
            Source::Prefill(worker) => self.prefill[worker.index()].healthy = true,
            Source::Decode(worker) => {
                self.decode[worker.index()].healthy = true;
                self.lost[worker.index()] = false;
            }
        }
        self.advance(commands);
    }

    /// Whether requests wait while no worker is left, because one may come back, or fail as they do at first.
    pub fn set_patient(&mut self, patient: bool, commands: &mut Vec<Command>) {
        self.patient = patient;
        self.advance(commands);
        if let Some(kind) = self.missing().filter(|_| !patient) {
            self.fail_waiting(&format!("no {kind} worker is left to take requests"), commands);
        }
    }

    /// Which decode workers are lost, by number; the others that take no requests are drained.
    pub fn lost(&self) -> &[bool] {
        &self.lost
    }

    fn known(&self, worker: WorkerId) -> Result<(), MemberError> {
        match self.lost.get(worker.index()) {
            None => Err(MemberError::Unknown { worker, n_workers: self.lost.len() }),
            Some(true) => Err(MemberError::Lost(worker)),
            Some(false) => Ok(()),
        }
    }
}
