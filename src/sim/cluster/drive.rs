//! What a simulated pool does between two moments: takes in what steps report, carries commands out, starts steps.
//!
//! Never decides where a request goes: the dispatcher does.

use std::time::Duration;

use super::{
    Event, Happens,
    meter::Times,
    world::{Happening, Run, Step},
};
use crate::{
    schedule::{Command, Handoff, Outcome, Source, WorkerEvent},
    types::{FinishReason, RequestId, WorkerId},
};

/// Why a worker that fails gives its requests back.
const FAILED: &str = "the scenario lost this worker";

impl Run<'_> {
    pub(super) fn prefill_done(&mut self, worker: WorkerId) {
        let source = Source::Prefill(worker);
        let state = &mut self.prefill[worker.index()];
        state.step = None;
        let events = std::mem::take(&mut state.events);
        for event in events {
            match event {
                WorkerEvent::Token { id, .. } => {
                    self.live.get_mut(&id).expect("a request of this run").first_token = self.now;
                }
                WorkerEvent::Prefilled(handoff) => {
                    let live = &self.live[&handoff.job.id];
                    let counts = Some(self.prompts.counts(live.index, live.group));
                    let event = WorkerEvent::Prefilled(Handoff { counts, ..handoff });
                    self.dispatcher.on_event(source, event, &mut self.commands);
                }
                event => self.dispatcher.on_event(source, event, &mut self.commands),
            }
        }
        self.woken.push(source);
    }

    pub(super) fn decode_done(&mut self, worker: WorkerId) {
        let source = Source::Decode(worker);
        let state = &mut self.decode[worker.index()];
        if let Some(Step { n_batch, charged, is_pure, picked }) = state.step.take()
            && n_batch > 0
        {
            self.meter.stepped(worker.index(), n_batch, &charged, self.now);
            if is_pure {
                self.dispatcher.stepped(worker, n_batch, Duration::from_secs_f64(charged.ms / 1e3));
            }
            if let Some((requests, picks)) = picked {
                self.dispatcher.picked(worker, &requests, &picks);
            }
        }
        if state.doomed {
            state.scheduler.abandon(FAILED, &mut state.events);
            state.doomed = false;
        }
        let mut events = std::mem::take(&mut state.events);
        for event in events.drain(..) {
            // Tokens only count there, for requests that are cancelled; here none is.
            if !matches!(event, WorkerEvent::Token { .. }) {
                self.dispatcher.on_event(source, event, &mut self.commands);
            }
        }
        self.decode[worker.index()].events = events;
        let (n, ms) = self.handoffs;
        self.dispatcher.rebalance(Duration::from_secs_f64(ms / n.max(1.0) / 1e3), &mut self.commands);
        self.woken.push(source);
    }

    /// What the scenario has planned, which can happen: it was checked.
    pub(super) fn happen(&mut self, event: Event) {
        let worker = WorkerId(event.worker);
        match event.what {
            Happens::Fail => {
                let state = &mut self.decode[worker.index()];
                state.doomed = true;
                if state.step.is_none() {
                    self.decode_done(worker);
                }
            }
            Happens::Slow => {
                let speed = self.speed_of(worker);
                self.decode[worker.index()].slowness = event.by / speed;
            }
            Happens::Drain => self.dispatcher.drain_decode(worker).expect("another one takes requests"),
            Happens::Resume => {
                let resumed = self.dispatcher.resume_decode(worker, &mut self.commands);
                resumed.expect("the worker is not lost");
            }
            Happens::Join => {
                let n_slots = event.by as u32;
                self.add_worker(n_slots, 1.0);
                let joined = self.dispatcher.add_decode(n_slots);
                let resumed = self.dispatcher.resume_decode(joined, &mut self.commands);
                resumed.expect("a new worker is not lost");
            }
        }
    }

    /// As the scenario has it, before anything happened.
    fn speed_of(&self, worker: WorkerId) -> f64 {
        let speeds =
            self.scenario.decode.iter().flat_map(|group| std::iter::repeat_n(group.speed, group.workers as usize));
        speeds.into_iter().nth(worker.index()).unwrap_or(1.0)
    }

    /// Gives the work out.
    pub(super) fn carry_out(&mut self) {
        while !self.commands.is_empty() {
            for command in std::mem::take(&mut self.commands) {
                match command {
                    Command::Prefill(worker, job) => {
                        self.prefill[worker.index()].scheduler.admit(job);
                        self.woken.push(Source::Prefill(worker));
                    }
                    Command::Decode(worker, handoff, _) => {
                        let live = self.live.get_mut(&handoff.job.id).expect("a request of this run");
                        if live.admitted.is_none() {
                            live.admitted = Some(self.now);
                            live.measured = self.meter.admitted(self.now);
                        }
                        self.handoffs.0 += 1.0;
                        self.handoffs.1 += self.pool.cost.handoff.step(handoff.state.n_tokens);
                        self.decode[worker.index()].scheduler.admit(handoff);
                        self.woken.push(Source::Decode(worker));
                    }
                    Command::Migrate(worker, id) => {
                        self.decode[worker.index()].scheduler.migrate(id);
                        self.woken.push(Source::Decode(worker));
                    }
                    Command::End(id, outcome) => self.end(id, &outcome),
                    Command::Keep(..) => unreachable!("no answer is kept in a simulation"),
                    Command::Cancel(..) => unreachable!("nothing is cancelled in a simulation"),
                }
            }
        }
    }

    fn end(&mut self, id: RequestId, outcome: &Outcome) {
        let live = self.live.remove(&id).expect("a request of this run");
        self.mix.give_back(live.index);
        if let Outcome::Finished(FinishReason::Length, usage) = outcome {
            let times = Times {
                arrival: live.arrival,
                first_token: live.first_token,
                admitted: live.admitted,
                n_tokens: usage.completion_tokens,
            };
            self.meter.finished(&times, self.now, live.measured);
        } else {
            self.meter.failed();
        }
    }

    pub(super) fn refit(&mut self) {
        let Some(refitter) = &mut self.refitter else { return };
        let now = Duration::from_secs_f64(self.now);
        for signature in self.dispatcher.take_signatures() {
            refitter.observe(signature, now);
        }
        let Some(job) = refitter.due(now) else { return };
        if let Some(centroids) = refitter.apply(job.run())
            && let Err(error) = self.dispatcher.set_centroids(&centroids)
        {
            refitter.switch_off(error.to_string());
        }
    }

    /// Starts the next step of every woken worker that has one and is not in one.
    pub(super) fn start_steps(&mut self) {
        let key = |source: &Source| match *source {
            Source::Prefill(worker) => (0, worker),
            Source::Decode(worker) => (1, worker),
        };
        self.woken.sort_unstable_by_key(key);
        self.woken.dedup();
        let mut woken = std::mem::take(&mut self.woken);
        for source in woken.drain(..) {
            let ms = match source {
                Source::Prefill(worker) => self.start_prefill(worker),
                Source::Decode(worker) => self.start_decode(worker),
            };
            if let Some(ms) = ms {
                self.at(self.now + ms / 1e3, Happening::Done(source));
            }
        }
        self.woken = woken;
    }

    fn start_prefill(&mut self, worker: WorkerId) -> Option<f64> {
        let worker = &mut self.prefill[worker.index()];
        if worker.step.is_some() || worker.scheduler.is_idle() {
            return None;
        }
        worker.scheduler.step(&mut worker.runner, &mut worker.events);
        let charged = worker.runner.take_charged();
        worker.step = Some(Step { n_batch: 0, charged, is_pure: false, picked: None });
        Some(charged.ms)
    }

    fn start_decode(&mut self, id: WorkerId) -> Option<f64> {
        let worker = &mut self.decode[id.index()];
        if worker.step.is_some() || worker.scheduler.is_idle() {
            return None;
        }
        let step = worker.scheduler.step(&mut worker.runner, &mut worker.events);
        let (n_batch, is_pure) = (step.requests.len() as u32, step.n_decoded_alone().is_some());
        let picked = (!step.picks.is_empty()).then(|| (step.requests.clone(), step.picks.clone()));
        let mut charged = worker.runner.take_charged();
        charged.ms *= worker.slowness;
        worker.step = Some(Step { n_batch, charged, is_pure, picked });
        if n_batch > 0 {
            self.meter.began(id.index(), self.now);
        }
        Some(charged.ms)
    }
}
