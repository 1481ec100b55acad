use crate::{
    kv::BlockName,
    schedule::{CacheStats, Handoff, Job, Leftover},
    types::{FinishReason, RequestId, Token, TokenLogprobs, Usage},
};

/// What a worker reports after a step, in order.
#[derive(Debug)]
pub enum WorkerEvent {
    /// A request drew a token.
    Token {
        /// Whose.
        id: RequestId,
        /// Which.
        token: Token,
        /// How likely it was, if the request asked.
        logprobs: Option<Box<TokenLogprobs>>,
        /// Tokens of its prompt that were not computed.
        n_cached: u32,
    },
    /// A prompt is done and can be handed to a decode worker.
    Prefilled(Handoff),
    /// A request ended; its slot is free.
    Finished {
        /// Which.
        id: RequestId,
        /// Why.
        reason: FinishReason,
        /// What it used.
        usage: Usage,
    },
    /// A request could not go on here and must be prefilled again, with its tokens so far.
    Returned {
        /// The request.
        job: Job,
        /// What went wrong.
        error: String,
    },
    /// A sequence that was to go on elsewhere ([`DecodeWorker::migrate`](super::DecodeWorker::migrate)), between two tokens.
    Moved(Handoff),
    /// A sequence that was to go on elsewhere goes on here.
    Stayed {
        /// Whose.
        id: RequestId,
    },
    /// What a finished request left on its decode worker, for a prefill worker to keep.
    Left(Leftover),
    /// What a prefill worker keeps has changed.
    Cache(CacheChange),
    /// The worker takes no more work.
    Lost {
        /// What went wrong.
        error: String,
    },
}

/// Which blocks a prefill worker holds since it last said so.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CacheChange {
    /// In order: a block's name, and whether it came or went.
    pub blocks: Vec<(BlockName, bool)>,
    /// Counters since the worker's start.
    pub stats: CacheStats,
}
