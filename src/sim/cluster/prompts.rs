//! The prompts of simulated requests, and what they picked in prefill.
//!
//! Never draws a request.

use std::sync::Arc;

use super::{PrefixSharing, drawing::Coding};
use crate::{
    signature::ExpertCounts,
    sim::ReplaySet,
    trace::{Trace, TraceHeader, TraceRequest},
    types::{Request, Token},
};

/// Makes prompts of tokens that tell where they come from.
pub(super) struct Prompts<'a> {
    trace: &'a Trace,
    set: &'a ReplaySet,
    tells_answers: bool,
    n_prefix: u32,
    /// What each shared prefix picked.
    prefix_counts: Vec<ExpertCounts>,
}

impl<'a> Prompts<'a> {
    /// `source` is the recorded request whose beginning a shared prefix is; a prompt that is too short is repeated.
    pub fn new(
        trace: &'a Trace,
        set: &'a ReplaySet,
        prefix: Option<PrefixSharing>,
        source: impl Fn(u32) -> u32,
    ) -> Self {
        let (n_prefix, n_groups) = prefix.map_or((0, 0), |prefix| (prefix.tokens, prefix.groups));
        let n_block = trace.header.n_block.max(1);
        // Picks are recorded by blocks.
        let n_prefix = n_prefix.next_multiple_of(n_block);
        let counts = |group| beginning(&trace.requests[source(group) as usize], &trace.header, n_prefix / n_block);
        Self { trace, set, tells_answers: false, n_prefix, prefix_counts: (0..n_groups).map(counts).collect() }
    }

    /// Tells the picks of the answers in place of the prompts'.
    pub fn telling_answers(self) -> Self {
        Self { tells_answers: true, ..self }
    }

    /// Tokens of a shared prefix: those asked for, in whole blocks of the recording.
    pub fn n_prefix(&self) -> u32 {
        self.n_prefix
    }

    /// The request that replays the recorded one at `index` with its own tokens all `token`, behind a shared prefix.
    pub fn request(&self, index: u32, group: Option<u32>, token: Token) -> Arc<Request> {
        let recorded = self.set.get(index as usize);
        let n_own = recorded.state.n_tokens as usize;
        let n_prefix = group.map_or(0, |_| self.n_prefix as usize);
        let mut prompt = Vec::with_capacity(n_prefix + n_own);
        prompt.extend(std::iter::repeat_n(Coding::prefix_token(group.unwrap_or(0)), n_prefix));
        prompt.extend(std::iter::repeat_n(token, n_own));
        let Request { max_tokens, sampling, domain, deadline, .. } = &*recorded.request;
        let (sampling, domain) = (sampling.clone(), domain.clone());
        Arc::new(Request { prompt, max_tokens: *max_tokens, sampling, domain, deadline: *deadline })
    }

    /// What its prompt picked, or its answer will pick.
    pub fn counts(&self, index: u32, group: Option<u32>) -> ExpertCounts {
        if self.tells_answers {
            return self.trace.requests[index as usize].decode_counts(&self.trace.header);
        }
        let mut counts = self.set.get(index as usize).counts.clone();
        if let Some(group) = group {
            counts.merge(&self.prefix_counts[group as usize]);
        }
        counts
    }
}

/// The counts of a prompt's first blocks. Whole ones only, as long as it has one.
fn beginning(request: &TraceRequest, header: &TraceHeader, n_blocks: u32) -> ExpertCounts {
    let layers = header.shape.usable();
    let width = layers.len() * header.shape.n_expert as usize;
    let n_whole = (request.n_prompt / header.n_block.max(1)) as usize;
    let n_known = n_whole.max(1) as u32;
    let n_tokens = if n_whole == 0 { request.n_prompt } else { header.n_block };
    let mut sums = vec![0u32; width];
    for block in (0..n_blocks).map(|block| (block % n_known) as usize) {
        let row = &request.blocks[block * width..][..width];
        sums.iter_mut().zip(row).for_each(|(sum, &n)| *sum += u32::from(n));
    }
    ExpertCounts::from_rows(&layers, header.shape.n_expert, n_blocks * n_tokens, sums)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::planted::Planted;

    #[test]
    fn a_prefix_adds_its_tokens_and_their_picks() {
        let trace = Planted { n_requests: 4, ..Planted::default() }.trace();
        let set = ReplaySet::new(&trace);
        let prefix = PrefixSharing { groups: 2, tokens: 70, share: 1.0, cache_tokens: 0 };
        let prompts = Prompts::new(&trace, &set, Some(prefix), |group| group);
        // 70 tokens in blocks of 16.
        assert_eq!(prompts.n_prefix(), 80);
        let request = prompts.request(3, Some(1), 9);
        assert_eq!((request.prompt.len(), request.prompt[79], request.prompt[80]), (120, -2, 9));
        let own = prompts.counts(3, None);
        let both = prompts.counts(3, Some(1));
        assert_eq!((own.n_tokens(), both.n_tokens()), (40, 120));
        assert!(own.conserves(3) && both.conserves(3));
        let answer = Prompts::new(&trace, &set, None, |group| group).telling_answers().counts(3, None);
        assert_eq!((answer.layers().len(), answer.n_tokens()), (4, set.n_steps(3)));
        // Domain 1 picks from the second eighth of 32 experts in 4 domains; request 3 from the last.
        let row = both.row(0).expect("usable");
        assert_eq!((row[8..16].iter().sum::<u32>(), row[24..32].iter().sum::<u32>()), (240, 120));
    }
}
