//! What sequences really pick, which corrects what their prompts foretold.
//!
//! Never moves a sequence: its worker is only priced by better numbers from then on.

use super::MarginalCost;
use crate::{
    route::survival::ONE,
    types::{RequestId, WorkerId},
};

/// Decode steps that a prompt weighs as much as.
const PROMPT_WEIGHT: u32 = 16;
/// Prompt and steps together weigh no more than so many, so that older ones are forgotten.
const MEMORY: u32 = 64;

impl MarginalCost {
    /// After a few steps whose picks are known, a probability is the mean of the prompt's, weighed as so many steps, and theirs.
    pub(super) fn correct(&mut self, id: RequestId, worker: WorkerId, experts: &[u32]) {
        let Some(batch) = self.workers.get_mut(worker.index()) else { return };
        let Some(at) = batch.find(id) else { return };
        let resident = &mut batch.residents[at];
        resident.n_corrections += 1;
        let weight = (PROMPT_WEIGHT + resident.n_corrections).min(MEMORY);
        let keep = (1 << 16) - (1 << 16) / weight;
        for (new, &old) in self.picks.iter_mut().zip(&resident.picks) {
            *new = ((u32::from(old) * keep) >> 16) as u16;
        }
        let step = (u32::from(ONE) / weight) as u16;
        let n_used = experts.len() / self.n_layer.max(1);
        for (layer, picked) in self.picks.chunks_exact_mut(self.n_expert.max(1)).zip(experts.chunks(n_used.max(1))) {
            for &expert in picked {
                let q = &mut layer[expert as usize];
                *q = (*q + step).min(ONE - 1);
            }
        }
        batch.survival.replace(&resident.picks, &self.picks, &self.tables);
        resident.picks.copy_from_slice(&self.picks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        route::{MarginalCostParams, RoutePolicy, RouteRequest},
        types::MoeShape,
    };

    const N_EXPERT: usize = 8;

    fn policy() -> MarginalCost {
        let shape = MoeShape { layers: vec![0, 1], n_layer: 2, n_expert: N_EXPERT as u32, n_expert_used: 2 };
        let mut policy = MarginalCost::new(Some(&shape), 2, MarginalCostParams::default());
        policy.placed(&RouteRequest { id: RequestId(1), n_tokens: 5, ..RouteRequest::default() }, WorkerId(1));
        policy
    }

    fn picks(policy: &MarginalCost) -> Vec<f64> {
        policy.workers[1].residents[0].picks.iter().map(|&q| f64::from(q) / f64::from(ONE)).collect()
    }

    #[test]
    fn picks_told_often_enough_are_all_that_counts() {
        let mut policy = policy();
        let first = picks(&policy);
        policy.picked(RequestId(1), WorkerId(1), &[0, 3, 6, 7]);
        let once = picks(&policy);
        // 16 of 17 parts what was foretold, one what was picked.
        assert!(
            (once[0] - (first[0] * 16.0 + 1.0) / 17.0).abs() < 1e-3 && (once[1] - first[1] * 16.0 / 17.0).abs() < 1e-3
        );
        (0..2000).for_each(|_| policy.picked(RequestId(1), WorkerId(1), &[0, 3, 6, 7]));
        for (at, q) in picks(&policy).into_iter().enumerate() {
            let is_picked = [0, 3, N_EXPERT + 6, N_EXPERT + 7].contains(&at);
            assert!((q - f64::from(u8::from(is_picked))).abs() < 0.02, "expert {at}: {q}");
        }
        assert!((policy.workers[1].survival.expected() - 4.0).abs() < 0.2);
        policy.left(RequestId(1), WorkerId(1));
        assert!(policy.workers[1].survival.expected().abs() < 1e-9, "it takes with it what it brought");
    }

    #[test]
    fn nobody_learns_from_who_is_not_there() {
        let mut policy = policy();
        let first = picks(&policy);
        for (id, worker) in [(2, 1), (1, 0), (1, 7)] {
            policy.picked(RequestId(id), WorkerId(worker), &[0, 3, 6, 7]);
        }
        assert_eq!(picks(&policy), first);
    }
}
