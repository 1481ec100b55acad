//! Which tokens' keys and values a worker still holds, and the expert picks that go with them.
//!
//! Never touches them itself: it is told what was done to llama.cpp's memory, and answers what can be used again.
//!
//! A sequence is cut into blocks of a fixed number of tokens. A block is named by a hash chained over all tokens before
//! and in it, so two sequences that start alike hold the same blocks. The [`Ledger`] knows who holds which block and
//! reports every change as a [`BlockEvent`]; [`SignatureRows`] follows these events with a row of counts for each
//! block, so that the counts of a prompt whose beginning was not computed again are those of one that was.
//!
//! A sequence is never shifted. llama.cpp can move positions back to make room in a full context (`llama_memory_seq_add`),
//! which turns the keys but keeps values that were computed after tokens which are gone: no prompt gives them, so no name
//! would be true. A request that fills its slot ends there, with the length as its reason. A slot that somebody else has
//! shifted does not end where it was left: before it is used, copied or stored that is seen
//! ([`ModelRunner::reaches`](crate::schedule::ModelRunner::reaches)), and it is emptied. Tests and idle debug builds look at
//! every cell ([`ModelRunner::check_held`](crate::schedule::ModelRunner::check_held)).

mod chunk;
mod composed;
mod event;
mod ledger;
mod name;
mod pool;
mod rows;

pub use chunk::ChunkCounts;
pub use event::BlockEvent;
pub use ledger::{Ledger, PrefixMatch};
pub use name::{BlockName, NameSet, names};
pub use rows::{SignatureRows, row_bytes_per_token};

/// Tokens of a block, if nothing else is said.
pub const BLOCK: u32 = 32;

/// Most tokens of a block: a row's counts are bytes, and a token picks an expert once.
pub const MAX_BLOCK: u32 = 128;
