//! Failures, injected between the scheduler and llama.cpp.

use eldr::{
    engine::LlamaRunner,
    kv::ChunkCounts,
    schedule::{ModelRunner, RunError, RunnerLayer},
    types::{Slot, Token},
};

/// A runner whose next chunk fails where that is asked for.
pub struct Faulty {
    pub llama: LlamaRunner,
    pub fail: Option<RunError>,
}

impl RunnerLayer for Faulty {
    fn inner(&self) -> &dyn ModelRunner {
        &self.llama
    }

    fn inner_mut(&mut self) -> &mut dyn ModelRunner {
        &mut self.llama
    }

    fn prefill(
        &mut self,
        slot: Slot,
        tokens: &[Token],
        pos: u32,
        last: bool,
        counts: Option<&mut ChunkCounts>,
    ) -> Result<Option<Token>, RunError> {
        match self.fail.take() {
            Some(error) => Err(error),
            None => self.llama.prefill(slot, tokens, pos, last, counts),
        }
    }
}
