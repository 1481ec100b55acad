use std::collections::{HashMap, HashSet};

use crate::{schedule::StepPicks, types::RequestId};

/// One request's decode step: the request and how many steps it had before.
pub type RequestStep = (RequestId, u32);

/// The experts every request picked in each of its decode steps, recorded once.
///
/// Picks follow from the tokens alone where outputs do not depend on the batch, so what one run recorded says which
/// experts any other batch of the same outputs reads.
#[derive(Debug, Default)]
pub struct PickStore {
    /// By layer, then k experts.
    picks: HashMap<RequestStep, Vec<Vec<u32>>>,
    /// One hash over the outputs they belong to.
    pub tokens_sha256: Option<String>,
}

impl PickStore {
    /// Records the picks of one item of a step.
    pub fn insert(&mut self, step: RequestStep, picks: &StepPicks, item: usize) {
        let layers = (0..picks.n_layer()).map(|layer| picks.row(item, layer).to_vec()).collect();
        self.picks.insert(step, layers);
    }

    /// Distinct experts a batch of these steps picks in each layer; nothing if one of them was not recorded.
    pub fn distinct(&self, batch: &[RequestStep]) -> Option<Vec<u32>> {
        let steps: Vec<&Vec<Vec<u32>>> = batch.iter().map(|step| self.picks.get(step)).collect::<Option<_>>()?;
        let n_layer = steps.first()?.len();
        let distinct = |layer: usize| steps.iter().flat_map(|step| &step[layer]).collect::<HashSet<_>>().len() as u32;
        Some((0..n_layer).map(distinct).collect())
    }
}
