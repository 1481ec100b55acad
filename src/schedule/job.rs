use std::sync::Arc;

use crate::{
    kv::ChunkCounts,
    route::RouteRequest,
    schedule::{CacheUse, SeqState},
    signature::{ExpertCounts, Signature},
    types::{Request, RequestId, Token, Usage},
};

/// An accepted request on its way through the workers. There is exactly one of it: whoever holds it owes the client
/// an end.
#[derive(Debug)]
pub struct Job {
    /// Which request.
    pub id: RequestId,
    /// What was asked for.
    pub request: Arc<Request>,
    /// Its whole prompt is computed, whatever a worker holds of it.
    pub fresh: bool,
    /// The tokens drawn so far. They survive the loss of a worker, so that the client's stream goes on unbroken.
    pub generated: Vec<Token>,
    /// Tokens of the prompt that were not computed, because a worker still held them.
    pub n_cached: u32,
    /// What of its prompt was there when it last began.
    pub cache: CacheUse,
    /// Times the request had to be prefilled again.
    pub n_retries: u32,
    /// Times it was moved from one decode worker to another.
    pub n_moves: u32,
}

impl Job {
    /// A request that has not run yet.
    pub fn new(id: RequestId, request: Arc<Request>) -> Self {
        Self {
            id,
            request,
            fresh: false,
            generated: Vec::new(),
            n_cached: 0,
            cache: CacheUse::default(),
            n_retries: 0,
            n_moves: 0,
        }
    }

    /// Prompt and generated tokens together.
    pub fn n_tokens(&self) -> u32 {
        (self.request.prompt.len() + self.generated.len()) as u32
    }

    /// Token `pos` of the sequence: the prompt's, then the generated ones.
    pub fn token(&self, pos: u32) -> Token {
        let pos = pos as usize;
        let n_prompt = self.request.prompt.len();
        if pos < n_prompt { self.request.prompt[pos] } else { self.generated[pos - n_prompt] }
    }

    /// Tokens `from..to` of the sequence.
    pub fn tokens(&self, from: u32, to: u32) -> Vec<Token> {
        (from..to).map(|pos| self.token(pos)).collect()
    }

    /// What the request has used.
    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.request.prompt.len() as u32,
            completion_tokens: self.generated.len() as u32,
            cached_tokens: self.n_cached,
            block_hits: self.cache.n_hits,
            block_misses: self.cache.n_misses,
            restored_tokens: self.cache.n_restored,
        }
    }
}

/// A request between two workers, prefilled or moved: in `state` are all tokens but the last drawn one, or, where a lost decode
/// worker's tokens are replayed ([`RunnerInfo::replays`](super::RunnerInfo::replays)), the prompt's alone.
#[derive(Debug)]
pub struct Handoff {
    /// The request; its last generated token has been streamed but not run.
    pub job: Job,
    /// Keys and values.
    pub state: SeqState,
    /// The experts the prefill picked; none where the prefill worker has no tap.
    pub counts: Option<ExpertCounts>,
}

/// Keys and values of a finished request, prompt and answer, on their way from its decode worker to a prefill worker.
#[derive(Debug)]
pub struct Leftover {
    /// The tokens; the last one drawn was not run and is not among them.
    pub tokens: Vec<Token>,
    /// Their keys and values.
    pub state: SeqState,
    /// The first so many were computed by a prefill worker, which knows their picks.
    pub n_base: u32,
    /// The picks of the others; none if they were not all counted.
    pub counts: Option<ChunkCounts>,
}

impl Handoff {
    /// What a policy is asked for it.
    pub(super) fn ask<'a>(&'a self, signature: Option<&'a Signature>) -> RouteRequest<'a> {
        RouteRequest {
            id: self.job.id,
            signature,
            domain: self.job.request.domain.as_deref(),
            counts: self.counts.as_ref(),
            n_tokens: self.job.n_tokens(),
        }
    }
}
