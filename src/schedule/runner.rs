use std::sync::Arc;

use crate::{
    kv::{BlockName, ChunkCounts},
    schedule::StepPicks,
    types::{SamplingParams, Slot, Token, TokenLogprobs},
};

/// Runs one worker's forward passes: llama.cpp in the engine, scripted faults in tests.
///
/// The scheduler decides what to run and keeps the slots; the runner owns the context. Slots are below
/// [`RunnerInfo::n_slots`].
///
/// ```
/// use eldr::{
///     kv::ChunkCounts,
///     schedule::{DecodeItem, ModelRunner, Reuse, RunError, RunnerInfo, SeqState, StateFingerprint, StepPicks},
///     types::{SamplingParams, Slot, Token},
/// };
///
/// /// Says again and again what it read last. It needs no keys and values.
/// struct Echo {
///     info: RunnerInfo,
///     last: Vec<Token>,
/// }
///
/// impl ModelRunner for Echo {
///     fn info(&self) -> &RunnerInfo {
///         &self.info
///     }
///
///     fn open(&mut self, _: Slot, _: &SamplingParams, _: &[Token]) -> Result<(), RunError> {
///         Ok(())
///     }
///
///     fn prefill(
///         &mut self,
///         slot: Slot,
///         tokens: &[Token],
///         _: u32,
///         last: bool,
///         _: Option<&mut ChunkCounts>,
///     ) -> Result<Option<Token>, RunError> {
///         self.last[slot.index()] = *tokens.last().ok_or_else(|| RunError::Restored("no tokens".to_owned()))?;
///         Ok(last.then(|| self.last[slot.index()]))
///     }
///
///     fn decode(&mut self, batch: &[DecodeItem], next: &mut Vec<Token>, _: &mut StepPicks) -> Result<(), RunError> {
///         next.extend(batch.iter().map(|item| item.token));
///         Ok(())
///     }
///
///     fn export(&mut self, _: Slot) -> Result<SeqState, RunError> {
///         Ok(SeqState { n_tokens: 1, bytes: Vec::new().into() })
///     }
///
///     fn import(&mut self, _: Slot, _: &SeqState) -> Result<(), RunError> {
///         Ok(())
///     }
///
///     fn relocate(&mut self, from: Slot, to: Slot) -> Result<(), RunError> {
///         self.last.swap(from.index(), to.index());
///         Ok(())
///     }
///
///     fn close(&mut self, _: Slot) -> Result<(), RunError> {
///         Ok(())
///     }
/// }
///
/// let info = RunnerInfo {
///     n_slots: 2,
///     n_ctx_slot: 64,
///     n_batch: 16,
///     contiguous_slots: false,
///     tapped: Vec::new(),
///     reuse: Reuse::Nothing,
///     replays: false,
///     fingerprint: StateFingerprint::default(),
/// };
/// let mut echo = Echo { info, last: vec![0; 2] };
/// assert_eq!(echo.prefill(Slot(1), &[4, 7], 0, true, None), Ok(Some(7)));
/// ```
pub trait ModelRunner: Send {
    /// What the scheduler must know about the worker.
    fn info(&self) -> &RunnerInfo;

    /// Called once, in the thread that makes all calls from then on.
    fn enter(&mut self) {}

    /// The way back of a worker whose device may fail; none for one that does not come back.
    fn recovery(&self) -> Option<Arc<dyn Recovery>> {
        None
    }

    /// Starts a sequence in a slot that is empty, or goes on with what a closed one left there: how its tokens are
    /// drawn, and the tokens generated before it came here.
    fn open(&mut self, slot: Slot, sampling: &SamplingParams, generated: &[Token]) -> Result<(), RunError>;

    /// Runs the next chunk of a prompt. Expert picks of its tokens are added to `counts` if the runner taps.
    /// With `last`, draws the sequence's next token. What a call that fails has counted means nothing.
    fn prefill(
        &mut self,
        slot: Slot,
        tokens: &[Token],
        pos: u32,
        last: bool,
        counts: Option<&mut ChunkCounts>,
    ) -> Result<Option<Token>, RunError>;

    /// Runs one token of each sequence in `batch` (slots ascending) and draws the next token of each into `next`, in
    /// the same order. A sequence that does not draw gets any token there, and its sampler stays as it is. The experts they picked go to `picks`, if the runner taps decode steps; otherwise it is left
    /// empty.
    fn decode(&mut self, batch: &[DecodeItem], next: &mut Vec<Token>, picks: &mut StepPicks) -> Result<(), RunError>;

    /// How likely the token was that the slot drew last, if its sampling asks for that and the runner can tell.
    fn take_logprobs(&mut self, slot: Slot) -> Option<Box<TokenLogprobs>> {
        let _ = slot;
        None
    }

    /// Copies a sequence out of its slot.
    fn export(&mut self, slot: Slot) -> Result<SeqState, RunError>;

    /// Puts a sequence into an empty slot and verifies that every position arrived.
    fn import(&mut self, slot: Slot, state: &SeqState) -> Result<(), RunError>;

    /// Moves a sequence, its sampler included, to an empty slot, unchanged to the bit.
    fn relocate(&mut self, from: Slot, to: Slot) -> Result<(), RunError>;

    /// Empties a slot. An empty slot stays empty.
    fn close(&mut self, slot: Slot) -> Result<(), RunError>;

    /// Ends a slot's sequence and keeps the keys and values of its first `n_tokens` tokens there. Errors: the slot is
    /// empty then. Only called where [`RunnerInfo::reuse`] allows it.
    fn keep(&mut self, slot: Slot, n_tokens: u32) -> Result<(), RunError> {
        let _ = n_tokens;
        self.close(slot)?;
        Err(RunError::Restored("this runner keeps no keys and values".to_owned()))
    }

    /// Copies the first `n_tokens` tokens of a sequence into an empty slot and verifies that they arrived. Errors: that
    /// slot is empty then. Only called where [`RunnerInfo::reuse`] allows it.
    fn copy_prefix(&mut self, from: Slot, to: Slot, n_tokens: u32) -> Result<(), RunError> {
        let _ = (from, to, n_tokens);
        Err(RunError::Restored("this runner copies no prefixes".to_owned()))
    }

    /// Whether a slot's tokens can be cut to the first `n_tokens` of them and gone on from there: they are as this runner
    /// left them, and not out of reach of a sliding window or a recurrent state. Quick.
    fn reaches(&self, slot: Slot, n_tokens: u32) -> bool {
        let _ = (slot, n_tokens);
        true
    }

    /// Compares a slot with what the scheduler believes, where the runner can: it holds tokens `0..n_tokens` and nothing
    /// else. Errors: what is there instead. Slow; for tests and idle debug builds.
    fn check_held(&self, slot: Slot, n_tokens: u32) -> Result<(), String> {
        let _ = (slot, n_tokens);
        Ok(())
    }
}

/// Tells whether a worker's device has failed, and makes a runner on it again. Any thread may ask.
///
/// ```
/// use eldr::schedule::{FakeModel, FakeRunner, ModelRunner, Recovery};
///
/// /// A device that is well, and makes a runner when asked.
/// struct Well(FakeModel);
///
/// impl Recovery for Well {
///     fn failure(&self) -> Option<String> {
///         None
///     }
///
///     fn revive(&self) -> Result<Box<dyn ModelRunner>, String> {
///         Ok(Box::new(FakeRunner::new(self.0, 4, 256, Vec::new())))
///     }
/// }
///
/// let well = Well(FakeModel { n_vocab: 50, n_layer: 2, n_expert: 8, n_expert_used: 2 });
/// assert_eq!(well.revive().map(|runner| runner.info().n_slots), Ok(4));
/// ```
pub trait Recovery: Send + Sync {
    /// Why the device can not be used any more; none while it is well. What has failed stays so.
    fn failure(&self) -> Option<String>;

    /// A runner like the first one, if the device is back; otherwise what is the matter. May take a while.
    fn revive(&self) -> Result<Box<dyn ModelRunner>, String>;
}

impl RunnerInfo {
    /// The name before the first block: it stands for all that keys and values depend on besides the tokens.
    pub fn root_name(&self) -> BlockName {
        BlockName::root(self.fingerprint.0.iter().flat_map(|(name, value)| [*name, value.as_str()]))
    }
}

/// What a worker can do with the keys and values a finished prompt leaves behind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Reuse {
    /// Nothing.
    #[default]
    Nothing,
    /// Go on at their end: the model's memory can not be cut.
    Whole,
    /// Use any beginning of them from which the model's sliding window has not moved away.
    Window,
    /// Use any beginning of them.
    Prefix,
}

/// A worker's limits and what its sequences can be exchanged with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunnerInfo {
    /// Sequences the worker holds at most.
    pub n_slots: u32,
    /// Tokens a sequence may have, prompt and output together.
    pub n_ctx_slot: u32,
    /// Prompt tokens a call of [`ModelRunner::prefill`] takes at most.
    pub n_batch: u32,
    /// Sequences of a decode batch must sit in neighbouring slots, or the step is cut in parts.
    pub contiguous_slots: bool,
    /// MoE layers whose picks the runner counts in prefill.
    pub tapped: Vec<u32>,
    /// What it can do with what finished prompts leave behind.
    pub reuse: Reuse,
    /// A token leaves other bits when it runs with a prompt than when it is decoded, and that must not be seen: what a
    /// request had drawn when it lost its worker is decoded again token by token.
    pub replays: bool,
    /// What must be equal for two workers to exchange sequences.
    pub fingerprint: StateFingerprint,
}

/// What must be equal for two workers to exchange sequences, in words.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StateFingerprint(
    /// Name and value of each setting, in a fixed order.
    pub Vec<(&'static str, String)>,
);

impl StateFingerprint {
    /// The first setting that differs: its name, the value here and the value there.
    pub fn difference<'a>(&'a self, other: &'a Self) -> Option<(&'static str, &'a str, &'a str)> {
        assert_eq!(self.0.len(), other.0.len(), "fingerprints of different kinds of runners");
        self.0.iter().zip(&other.0).find(|(a, b)| a != b).map(|(a, b)| (a.0, a.1.as_str(), b.1.as_str()))
    }
}

/// One sequence's token of a decode step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeItem {
    /// The sequence's slot.
    pub slot: Slot,
    /// The token to run: the last one drawn, or, where `draws` is false, an earlier one.
    pub token: Token,
    /// Its position.
    pub pos: u32,
    /// The sequence draws its next token; false while it replays tokens whose successors are known.
    pub draws: bool,
}

/// A sequence's keys and values outside any worker.
#[derive(Clone, PartialEq, Eq)]
pub struct SeqState {
    /// Positions 0 to `n_tokens - 1` are in it.
    pub n_tokens: u32,
    /// The runner's own format.
    pub bytes: Arc<[u8]>,
}

impl std::fmt::Debug for SeqState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SeqState {{ n_tokens: {}, {} bytes }}", self.n_tokens, self.bytes.len())
    }
}

/// A forward pass or state copy that did not work, and what is left.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The call did nothing: every sequence is as it was, and may be retried or given to another worker.
    #[error("{0}")]
    Restored(String),
    /// The worker cannot be trusted any more: its sequences must be prefilled again elsewhere.
    #[error("{0}")]
    Fatal(String),
    /// A step ran, but these of its sequences could draw no token, which their requests and not the worker are to blame
    /// for. The others have theirs in `next`.
    #[error("{}", .0.first().map_or("no token was drawn", |(_, reason)| reason))]
    Undrawn(Vec<(Slot, String)>),
}
