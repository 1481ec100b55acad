use crate::{
    schedule::DispatchLimits,
    sim::{Order, SimError, StepCost},
};

/// How requests come.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arrivals {
    /// One comes whenever another has ended, so that as many are always in the system.
    Closed {
        /// Requests in the system.
        concurrency: usize,
        /// The first ones come spread evenly over this time; all at once, they would keep step with one another.
        ramp: f64,
    },
    /// At random and regardless of the load.
    Poisson {
        /// Requests a unit of time.
        rate: f64,
        /// Seed of the gaps.
        seed: u64,
    },
    /// At random for `on`, then none for `off`, and so on.
    Bursts {
        /// Requests a unit of time, on average.
        rate: f64,
        /// Length of a burst.
        on: f64,
        /// Length of the pause after it.
        off: f64,
        /// Seed of the gaps.
        seed: u64,
    },
}

/// What is replayed: the workers, the load, the cost. Times are in the cost's unit.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplayParams {
    /// Slots of each decode worker.
    pub n_slots: Vec<u32>,
    /// How requests come.
    pub arrivals: Arrivals,
    /// In which order they are drawn.
    pub order: Order,
    /// Requests that come in all.
    pub n_requests: usize,
    /// Share of them, from 0 to 1, that come before the measurement begins.
    pub warmup: f64,
    /// From a request's turn in prefill to its first token, for every request.
    pub prefill: f64,
    /// What a decode step takes.
    pub cost: StepCost,
    /// What it takes longer for each running sequence that the worker gives away in it or takes in from another one. A
    /// sequence's first worker takes it in at no cost.
    pub handoff: f64,
    /// Of these, the number of waiting hand-offs and the age bound; the queue before them has no bound.
    pub limits: DispatchLimits,
}

impl ReplayParams {
    /// Refuses what no clock could follow.
    pub(super) fn check(&self) -> Result<(), SimError> {
        if self.n_slots.is_empty() || self.n_slots.contains(&0) {
            return Err(SimError::Slots(self.n_slots.clone()));
        }
        if !self.cost.is_usable() {
            return Err(SimError::Cost);
        }
        let not_negative = |name, value: f64| {
            let ok = value.is_finite() && value >= 0.0;
            if ok { Ok(()) } else { Err(SimError::Value { name, value, want: "a number of 0 or more" }) }
        };
        not_negative("the time of a prefill", self.prefill)?;
        not_negative("the time of a hand-off", self.handoff)?;
        match self.arrivals {
            Arrivals::Closed { concurrency: 0, .. } => {
                return Err(SimError::Value { name: "the concurrency", value: 0.0, want: "at least 1" });
            }
            Arrivals::Closed { ramp, .. } => not_negative("the ramp", ramp)?,
            Arrivals::Bursts { on, off, .. } if !(on.is_finite() && on > 0.0 && off.is_finite() && off >= 0.0) => {
                return Err(SimError::Value { name: "a burst's length", value: on, want: "a number above 0" });
            }
            Arrivals::Poisson { rate, .. } | Arrivals::Bursts { rate, .. } if !rate.is_finite() || rate <= 0.0 => {
                return Err(SimError::Value { name: "the rate", value: rate, want: "a number above 0" });
            }
            Arrivals::Poisson { .. } | Arrivals::Bursts { .. } => {}
        }
        if !(0.0..1.0).contains(&self.warmup) {
            let want = "a share from 0 to below 1";
            return Err(SimError::Value { name: "the warm-up", value: self.warmup, want });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        route::LeastLoaded,
        sim::{ReplaySet, planted::Planted, replay},
    };

    #[test]
    fn what_can_not_be_replayed_is_refused_in_words() {
        let set = ReplaySet::new(&Planted { n_requests: 3, ..Planted::default() }.trace());
        let good = ReplayParams {
            n_slots: vec![2],
            arrivals: Arrivals::Closed { concurrency: 2, ramp: 0.0 },
            order: Order::Given,
            n_requests: 4,
            warmup: 0.0,
            prefill: 0.0,
            cost: StepCost::UNIT,
            handoff: 0.0,
            limits: DispatchLimits::default(),
        };
        let run = |requests: &[usize], params: &ReplayParams| {
            let policy = Box::new(LeastLoaded);
            replay(&set, requests, params, policy, None).map_err(|error| error.to_string())
        };
        assert_eq!(run(&[0, 1, 2], &good).map(|report| report.n_requests), Ok(4));
        let bad = |requests: &[usize], params: ReplayParams| run(requests, &params).expect_err("bad");
        assert!(bad(&[], good.clone()).contains("no requests"));
        assert!(bad(&[3], good.clone()).contains("request 3") && bad(&[3], good.clone()).contains("holds 3"));
        assert!(bad(&[0], ReplayParams { n_slots: vec![2, 0], ..good.clone() }).contains("[2, 0]"));
        assert!(bad(&[0], ReplayParams { warmup: 1.0, ..good.clone() }).contains("warm-up is 1"));
        assert!(bad(&[0], ReplayParams { prefill: -1.0, ..good.clone() }).contains("prefill is -1"));
        assert!(bad(&[0], ReplayParams { handoff: f64::NAN, ..good.clone() }).contains("hand-off is NaN"));
        let arrivals = Arrivals::Closed { concurrency: 0, ramp: 0.0 };
        assert!(bad(&[0], ReplayParams { arrivals, ..good.clone() }).contains("concurrency is 0"));
        let arrivals = Arrivals::Poisson { rate: f64::NAN, seed: 1 };
        assert!(bad(&[0], ReplayParams { arrivals, ..good.clone() }).contains("rate is NaN"));
        let cost = StepCost { per_expert: -1.0, ..StepCost::UNIT };
        assert!(bad(&[0], ReplayParams { cost, ..good }).contains("step cost"));
    }
}
