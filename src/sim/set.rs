use std::sync::Arc;

use rayon::prelude::*;

use crate::{
    schedule::{SeqState, StepPicks},
    signature::ExpertCounts,
    trace::{Trace, TraceHeader, TraceRequest},
    types::{Request, SamplingParams},
};

/// A trace made ready for replay: prompts summed, and the picks of every decode step as one bit an expert.
///
/// Made once and shared by all replays. Takes L * ceil(E / 64) * 8 bytes a generated token: 98 MB for 1,000 requests of
/// 128 tokens on 48 layers of 128 experts.
#[derive(Debug)]
pub struct ReplaySet {
    n_layer: usize,
    n_expert_used: usize,
    /// Words a step: those of one layer after another.
    n_words: usize,
    requests: Vec<Recorded>,
}

#[derive(Debug)]
pub(super) struct Recorded {
    pub request: Arc<Request>,
    /// What a hand-off carries: the request's position in the set.
    pub state: SeqState,
    pub counts: ExpertCounts,
    pub n_steps: u32,
    /// Steps x L x ceil(E / 64).
    masks: Vec<u64>,
}

impl ReplaySet {
    /// Every request of `trace`, at its position there.
    pub fn new(trace: &Trace) -> Self {
        let header = &trace.header;
        let n_layer = header.shape.n_layer_moe();
        let words_layer = (header.shape.n_expert as usize).div_ceil(64);
        let record = |(index, recorded): (usize, &TraceRequest)| Recorded {
            request: Arc::new(request(recorded, header)),
            state: SeqState { n_tokens: recorded.n_prompt, bytes: Arc::from((index as u64).to_le_bytes()) },
            counts: recorded.prefill_counts(header),
            n_steps: recorded.n_steps(header) as u32,
            masks: masks(recorded, header, words_layer),
        };
        let requests = trace.requests.par_iter().enumerate().map(record).collect();
        let n_expert_used = header.shape.n_expert_used as usize;
        Self { n_layer, n_expert_used, n_words: n_layer * words_layer, requests }
    }

    /// Requests.
    pub fn n_requests(&self) -> usize {
        self.requests.len()
    }

    /// MoE layers (L).
    pub fn n_layer(&self) -> usize {
        self.n_layer
    }

    /// Decode steps of a request.
    pub fn n_steps(&self, index: usize) -> u32 {
        self.requests[index].n_steps
    }

    pub(super) fn get(&self, index: usize) -> &Recorded {
        &self.requests[index]
    }

    pub(super) fn n_words(&self) -> usize {
        self.n_words
    }

    /// What step `step` of a request picked.
    pub(super) fn mask(&self, index: usize, step: usize) -> &[u64] {
        &self.requests[index].masks[step * self.n_words..][..self.n_words]
    }

    /// The same as the picks of a step, of which each item is a request and its own step.
    pub(super) fn fill(&self, items: impl ExactSizeIterator<Item = (usize, usize)>, picks: &mut StepPicks) {
        picks.reset(items.len(), self.n_layer, self.n_expert_used);
        let words_layer = self.n_words / self.n_layer.max(1);
        let mut experts = Vec::with_capacity(self.n_expert_used);
        for (item, (index, step)) in items.enumerate() {
            for (layer, words) in self.mask(index, step).chunks_exact(words_layer.max(1)).enumerate() {
                let is_picked = |expert: &u32| (words[*expert as usize / 64] >> (expert % 64)) & 1 == 1;
                experts.clear();
                experts.extend((0..64 * words_layer as u32).filter(is_picked));
                // One that is recorded twice was picked twice.
                experts.resize(self.n_expert_used, experts[0]);
                picks.set(item, layer, &experts);
            }
        }
    }
}

/// The tokens themselves do not matter: as many of them as were recorded do.
fn request(recorded: &TraceRequest, header: &TraceHeader) -> Request {
    Request {
        prompt: vec![0; recorded.n_prompt as usize],
        max_tokens: recorded.n_steps(header) as u32 + 1,
        sampling: SamplingParams { ignore_eos: true, ..SamplingParams::default() },
        domain: recorded.domain.clone(),
        deadline: None,
    }
}

fn masks(recorded: &TraceRequest, header: &TraceHeader, words_layer: usize) -> Vec<u64> {
    let (n_layer, e) = (header.shape.n_layer_moe(), header.shape.n_expert);
    let mut masks = vec![0u64; recorded.n_steps(header) * n_layer * words_layer];
    let k = header.shape.n_expert_used as usize;
    for (row, experts) in masks.chunks_exact_mut(words_layer.max(1)).zip(recorded.picks.chunks_exact(k.max(1))) {
        for &expert in experts {
            assert!(u32::from(expert) < e, "request `{}` picks expert {expert} of {e}", recorded.id);
            row[usize::from(expert) / 64] |= 1 << (expert % 64);
        }
    }
    masks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::MoeShape;

    #[test]
    fn a_step_is_one_bit_an_expert() {
        let shape = MoeShape { layers: vec![0, 1], n_layer: 2, n_expert: 130, n_expert_used: 2 };
        let recorded = TraceRequest {
            id: "a".into(),
            domain: Some("math".into()),
            n_prompt: 3,
            blocks: vec![2; 130],
            picks: vec![0, 129, 64, 63, 5, 5, 128, 1],
            gates: None,
        };
        let header = TraceHeader { shape, fingerprint: "planted".into(), n_block: 4 };
        let set = ReplaySet::new(&Trace { header, requests: vec![recorded] });
        assert_eq!((set.n_requests(), set.n_layer(), set.n_words(), set.n_steps(0)), (1, 2, 6, 2));
        assert_eq!(set.mask(0, 0), [1, 0, 2, 1 << 63, 1, 0]);
        assert_eq!(set.mask(0, 1), [32, 0, 0, 2, 0, 1]);
        let mut picks = StepPicks::default();
        set.fill([(0, 1), (0, 0)].into_iter(), &mut picks);
        assert_eq!((picks.item(0), picks.item(1)), (&[5, 5, 1, 128][..], &[0, 129, 63, 64][..]));
        let request = &set.get(0).request;
        assert_eq!((request.prompt.len(), request.max_tokens, request.domain.as_deref()), (3, 3, Some("math")));
    }
}
