//! Events that can not happen as they are written down.
//!
//! Never looks at requests: a worker that fails is lost from then on, although it ends its step first.

use super::{Event, Happens, LONGEST, MOST_SLOTS, MOST_TIMES, Scenario};

/// What has become of a decode worker.
#[derive(Clone, Copy, PartialEq)]
enum State {
    Serving,
    Drained,
    /// By which event.
    Lost(usize),
}

impl Scenario {
    /// What is wrong with the events, in a sentence. There are not too many workers.
    pub(super) fn bad_event(&self) -> Option<String> {
        let mut workers = vec![State::Serving; self.n_workers()];
        let mut last = 0.0;
        for (nth, event) in self.event.iter().enumerate() {
            let name = format!("event {nth}");
            let wrong = bad_numbers(&name, event, last).or_else(|| happens(&name, nth, event, &mut workers));
            if wrong.is_some() {
                return wrong;
            }
            last = event.at;
        }
        None
    }
}

fn bad_numbers(name: &str, event: &Event, last: f64) -> Option<String> {
    let Event { at, what, by, .. } = *event;
    if !(at.is_finite() && at >= last) {
        return Some(format!("{name} is at {at}, which must be a time not before the event above it"));
    }
    if at > LONGEST {
        return Some(format!("{name} is at {at:e} seconds, which must be at most {LONGEST:e}"));
    }
    if !(by.is_finite() && by > 0.0) {
        return Some(format!("{name}: by is {by}, which must be a finite number above 0"));
    }
    match what {
        Happens::Slow if by > MOST_TIMES => Some(format!("{name}: by is {by:e}, which must be at most {MOST_TIMES:e}")),
        Happens::Join if by > MOST_SLOTS as f64 => {
            Some(format!("{name}: by is {by}, and a worker may have {MOST_SLOTS} slots at most"))
        }
        Happens::Join if by < 1.0 => Some(format!("{name}: by is {by}, and the new worker needs a slot at least")),
        Happens::Join if by.fract() != 0.0 => {
            Some(format!("{name}: by is {by}, which must be a whole number of slots"))
        }
        _ => None,
    }
}

/// Lets it happen to the workers, or says why it can not.
fn happens(name: &str, nth: usize, event: &Event, workers: &mut Vec<State>) -> Option<String> {
    let Event { worker, what, .. } = *event;
    if what == Happens::Join {
        workers.push(State::Serving);
        return None;
    }
    let n_workers = workers.len();
    let n_serving = workers.iter().filter(|state| **state == State::Serving).count();
    let Some(state) = workers.get_mut(worker as usize) else {
        return Some(format!("{name} is about decode worker {worker}, and then there are {n_workers}, counted from 0"));
    };
    if let State::Lost(by) = *state {
        return Some(format!(
            "{name} is about decode worker {worker}, which event {by} has lost for good: let another one join instead"
        ));
    }
    match what {
        Happens::Drain if n_serving <= usize::from(*state == State::Serving) => {
            return Some(format!(
                "{name} drains decode worker {worker}, the last one that takes requests: let another join or resume one \
                 before"
            ));
        }
        Happens::Drain => *state = State::Drained,
        Happens::Resume => *state = State::Serving,
        Happens::Fail => *state = State::Lost(nth),
        Happens::Slow | Happens::Join => {}
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::DecodeGroup;

    fn problem(workers: u32, events: &[(u32, Happens)]) -> String {
        let at = |(nth, &(worker, what)): (usize, &(u32, Happens))| Event { at: nth as f64, worker, what, by: 2.0 };
        let scenario = Scenario {
            decode: vec![DecodeGroup { workers, slots: 4, speed: 1.0 }],
            event: events.iter().enumerate().map(at).collect(),
            ..Scenario::default()
        };
        scenario.problem(&[]).unwrap_or_default()
    }

    // Symptom: the drain was passed over, and the scenario that was asked for was not the one that ran.
    #[test]
    fn the_last_worker_that_takes_requests_is_not_drained() {
        use Happens::{Drain, Fail, Join, Resume};
        let last = |nth, worker| format!("event {nth} drains decode worker {worker}, the last one that takes requests");
        for (workers, events, want) in [
            (1, &[(0, Drain)][..], last(0, 0)),
            (2, &[(0, Drain), (1, Drain)], last(1, 1)),
            (2, &[(0, Fail), (1, Drain)], last(1, 1)),
            (2, &[(0, Drain), (1, Fail), (0, Drain)], last(2, 0)),
        ] {
            let told = problem(workers, events);
            assert!(told.starts_with(&want), "{want}: {told}");
        }
        for (workers, events) in [
            (2, &[(0, Drain), (0, Resume), (1, Drain)][..]),
            (1, &[(0, Join), (0, Drain)]),
            (2, &[(0, Drain), (0, Drain), (1, Fail), (0, Resume)]),
        ] {
            assert_eq!(problem(workers, events), "", "{events:?}");
        }
    }

    // Symptom: a lost worker was resumed, slowed or lost again without effect.
    #[test]
    fn nothing_happens_to_a_lost_worker() {
        for what in [Happens::Fail, Happens::Slow, Happens::Drain, Happens::Resume] {
            let told = problem(3, &[(0, Happens::Slow), (1, Happens::Fail), (1, what)]);
            assert!(told.starts_with("event 2 is about decode worker 1, which event 1 has lost for good"), "{told}");
        }
    }
}
