//! Running sequences that go on elsewhere, because the policy foresees that they cost less there.
//!
//! Never moves one from or to a worker that is drained or lost, nor two at a time, nor one while others wait for a slot.

use std::time::Duration;

use crate::{
    route::{Decision, Reason, Relief},
    schedule::{Command, Dispatcher, Handoff, Source},
    types::{RequestId, WorkerId},
};

use super::Place;

/// The move under way, and how long ago one was looked for.
#[derive(Debug, Default)]
pub(super) struct Moves {
    under_way: Option<Relief>,
    n_steps: u32,
}

impl Moves {
    /// Whether a slot of the worker is kept for the one that moves.
    pub fn is_booked(&self, worker: WorkerId) -> bool {
        self.under_way.is_some_and(|relief| relief.to == worker)
    }
}

impl Dispatcher {
    /// Moves a sequence if it is time and one is worth it. To be called once a decode step's events were told; `stall` is how
    /// long a worker takes to give a sequence away, and another to take it in.
    pub fn rebalance(&mut self, stall: Duration, commands: &mut Vec<Command>) {
        if self.limits.migrate_every == 0 {
            return;
        }
        self.moves.n_steps = self.moves.n_steps.saturating_add(1);
        let is_time = self.moves.n_steps >= self.limits.migrate_every;
        if !is_time || self.moves.under_way.is_some() || self.handoffs.len() > 0 {
            return;
        }
        self.moves.n_steps = 0;
        let Some(relief) = self.policies.relief(&self.decode, stall) else { return };
        let Relief { id, from, to, .. } = relief;
        let is_there = |record: &super::Record| record.place == Place::Decode(from) && record.cancelled.is_none();
        if !self.records.get(&id).is_some_and(is_there) {
            return;
        }
        let (is_up, target) = (self.decode[from.index()].healthy, &mut self.decode[to.index()]);
        assert!(
            is_up && target.eligible() && from != to,
            "{} moves request {id} from {from} to {to}",
            self.policies.name()
        );
        target.n_inflight += 1;
        self.moves.under_way = Some(relief);
        commands.push(Command::Migrate(from, id));
    }

    /// The sequence has left its worker. It goes where a slot is kept for it, or, if that worker takes none any more, where the
    /// policy sends it.
    pub(super) fn on_moved(&mut self, source: Source, handoff: Handoff, commands: &mut Vec<Command>) {
        let id = handoff.job.id;
        let relief = self.moves.under_way.filter(|relief| relief.id == id && source == Source::Decode(relief.from));
        let relief = relief.unwrap_or_else(|| panic!("request {id} was not to leave {source:?}"));
        let Relief { from, to, marginal, .. } = relief;
        if self.record(id).cancelled.is_some() || !self.decode[to.index()].healthy {
            self.leave(source, id);
            self.on_prefilled(handoff, commands);
            return;
        }
        assert_eq!(self.record(id).place, Place::Decode(from), "request {id} moved away from decode worker {from}");
        self.record(id).place = Place::Decode(to);
        self.moves.under_way = None;
        self.decode[from.index()].n_inflight -= 1;
        self.policies.moved(id, handoff.job.n_tokens(), from, to);
        self.stats.n_migrated += 1;
        let decision = Decision {
            worker: to,
            reason: Reason::Migration,
            similarity: None,
            best_similarity: None,
            band: 1,
            n_inflight: self.decode[to.index()].n_inflight - 1,
            marginal: Some(marginal),
        };
        commands.push(Command::Decode(to, handoff, decision));
    }

    /// A request that was to move does not, or has ended: its slot elsewhere is free again.
    pub(super) fn give_up_move(&mut self, id: RequestId) {
        if let Some(Relief { to, .. }) = self.moves.under_way.take_if(|relief| relief.id == id) {
            self.decode[to.index()].n_inflight -= 1;
        }
    }
}
