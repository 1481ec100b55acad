use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use crate::{
    engine::{Tokenizer, shared::Shared},
    route::Decision,
    schedule::Outcome,
    signature::ExpertCounts,
    types::{FinishReason, RequestId, Token, TokenLogprobs, Usage},
};

/// What happens to a request, as its client sees it.
///
/// ```
/// # mod fake {
/// #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_engine.rs"));
/// # }
///
/// use eldr::{
///     StreamEvent,
///     types::{FinishReason, Request, SamplingParams, Usage},
/// };
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let engine = fake::engine();
/// let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::default() };
/// let request = Request { prompt: vec![5, 6], max_tokens: 3, sampling, domain: None, deadline: None };
/// let mut text = String::new();
/// for event in engine.submit(request)? {
///     match event {
///         StreamEvent::Routed { decision, .. } => assert_eq!(decision.worker.0, 0),
///         StreamEvent::Token { text: piece, .. } => text.push_str(&piece),
///         StreamEvent::End { reason, usage, text: rest } => {
///             text.push_str(&rest);
///             let Usage { prompt_tokens, completion_tokens, .. } = usage;
///             assert_eq!((reason, prompt_tokens, completion_tokens), (FinishReason::Length, 2, 3));
///         }
///         StreamEvent::Failed(why) => return Err(why.into()),
///     }
/// }
/// assert_eq!(text.len(), 3, "this engine's tokens are letters");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq)]
pub enum StreamEvent {
    /// A token was drawn.
    Token {
        /// The token.
        token: Token,
        /// The characters it completes; empty while a character is still in pieces.
        text: String,
        /// When it was drawn, since the engine's start.
        at: Duration,
        /// How likely it was, if the request asked.
        logprobs: Option<Box<TokenLogprobs>>,
    },
    /// The decode worker was chosen. A request that is prefilled again is routed again.
    Routed {
        /// Which, and why.
        decision: Box<Decision>,
        /// When, since the engine's start.
        at: Duration,
    },
    /// The request ended; nothing follows.
    End {
        /// Why.
        reason: FinishReason,
        /// What it used.
        usage: Usage,
        /// The last characters, if the text ended within one: replacement characters for what is missing.
        text: String,
    },
    /// The request could not be run; nothing follows.
    Failed(String),
}

/// What the workers put into a stream.
#[derive(Debug)]
pub(super) enum RawEvent {
    /// With the number of the prompt's tokens that were not computed.
    Token(Token, Duration, Option<Box<TokenLogprobs>>, u32),
    Routed(Box<Decision>, Duration, Option<Arc<ExpertCounts>>),
    End(Outcome),
}

/// The answer to one request, token by token. Dropping it cancels the request.
///
/// One client reads it: [`TokenStream::next`] blocks, [`TokenStream::next_async`] waits without a thread, under any
/// executor.
///
/// ```
/// # mod fake {
/// #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_engine.rs"));
/// # }
///
/// use eldr::{
///     EngineError, StreamEvent, TokenStream,
///     types::{FinishReason, Request, SamplingParams},
/// };
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), EngineError> {
/// let engine = fake::engine();
/// let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::default() };
/// let request = Request { prompt: vec![5, 6], max_tokens: 4000, sampling, domain: None, deadline: None };
/// let mut stream: TokenStream = engine.submit(request)?;
/// let mut last = None;
/// while let Some(event) = stream.next_async().await {
///     if matches!(event, StreamEvent::Token { .. }) {
///         stream.cancel(); // what was drawn before still comes, and the end
///     }
///     last = Some(event);
/// }
/// assert!(matches!(last, Some(StreamEvent::End { reason: FinishReason::Cancelled, .. })));
/// # Ok(())
/// # }
/// ```
pub struct TokenStream {
    id: RequestId,
    events: async_channel::Receiver<RawEvent>,
    tokenizer: Arc<dyn Tokenizer>,
    shared: Weak<Shared>,
    text: Utf8Tail,
    counts: Option<Arc<ExpertCounts>>,
    n_cached: Option<u32>,
    ended: bool,
}

impl TokenStream {
    pub(super) fn new(
        id: RequestId,
        events: async_channel::Receiver<RawEvent>,
        tokenizer: Arc<dyn Tokenizer>,
        shared: Weak<Shared>,
    ) -> Self {
        Self { id, events, tokenizer, shared, text: Utf8Tail::default(), counts: None, n_cached: None, ended: false }
    }

    /// The request's id.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The experts that the prompt picked in prefill: known once the request was routed, where prefill workers count.
    pub fn counts(&self) -> Option<&Arc<ExpertCounts>> {
        self.counts.as_ref()
    }

    /// Tokens of the prompt that were not computed, as [`Usage::cached_tokens`]: known once the first token came.
    pub fn cached_tokens(&self) -> Option<u32> {
        self.n_cached
    }

    /// Waits for the next event; nothing once the request has ended.
    #[expect(clippy::should_implement_trait, reason = "it is one: `impl Iterator` calls this")]
    pub fn next(&mut self) -> Option<StreamEvent> {
        if self.ended {
            return None;
        }
        let event = self.events.recv_blocking();
        Some(self.translate(event.ok()))
    }

    /// Waits for the next event without blocking a thread; nothing once the request has ended.
    pub async fn next_async(&mut self) -> Option<StreamEvent> {
        if self.ended {
            return None;
        }
        let event = self.events.recv().await;
        Some(self.translate(event.ok()))
    }

    /// Asks for an early end; the stream still delivers what was drawn before, and its end.
    pub fn cancel(&self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.cancel(self.id, FinishReason::Cancelled);
        }
    }

    /// What cancels the request while another thread reads the stream.
    pub fn canceller(&self) -> Canceller {
        Canceller { id: self.id, shared: Weak::clone(&self.shared) }
    }

    /// Reads to the end: the text, the tokens, and how it ended. A failure is the error.
    pub fn collect(mut self) -> Result<Completion, String> {
        let mut completion = Completion::default();
        while let Some(event) = self.next() {
            match event {
                StreamEvent::Token { token, text, .. } => {
                    completion.tokens.push(token);
                    completion.text.push_str(&text);
                }
                StreamEvent::Routed { decision, .. } => completion.decision = Some(*decision),
                StreamEvent::End { reason, usage, text } => {
                    completion.text.push_str(&text);
                    completion.reason = Some(reason);
                    completion.usage = usage;
                }
                StreamEvent::Failed(error) => return Err(error),
            }
        }
        Ok(completion)
    }

    fn translate(&mut self, event: Option<RawEvent>) -> StreamEvent {
        match event {
            Some(RawEvent::Token(token, at, logprobs, n_cached)) => {
                self.n_cached = Some(n_cached);
                let text = self.text.push(&self.tokenizer.piece(token));
                StreamEvent::Token { token, text, at, logprobs }
            }
            Some(RawEvent::Routed(decision, at, counts)) => {
                self.counts = counts;
                StreamEvent::Routed { decision, at }
            }
            Some(RawEvent::End(Outcome::Finished(reason, usage))) => {
                self.ended = true;
                self.n_cached = Some(usage.cached_tokens);
                StreamEvent::End { reason, usage, text: self.text.finish() }
            }
            Some(RawEvent::End(Outcome::Failed(error))) => {
                self.ended = true;
                StreamEvent::Failed(error)
            }
            None => {
                self.ended = true;
                StreamEvent::Failed("the engine stopped before the request ended".to_owned())
            }
        }
    }
}

/// Cancels one request, from any thread.
///
/// ```
/// # mod fake {
/// #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_engine.rs"));
/// # }
///
/// use eldr::{
///     engine::{Canceller, Completion},
///     types::{FinishReason, Request, SamplingParams},
/// };
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let engine = fake::engine();
/// let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::default() };
/// let request = Request { prompt: vec![5, 6], max_tokens: 4000, sampling, domain: None, deadline: None };
/// let stream = engine.submit(request)?;
/// let canceller: Canceller = stream.canceller();
/// let other = std::thread::spawn(move || canceller.cancel());
/// let completion: Completion = stream.collect()?;
/// assert_eq!(completion.reason, Some(FinishReason::Cancelled));
/// # other.join().expect("no panic");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Canceller {
    id: RequestId,
    shared: Weak<Shared>,
}

impl Canceller {
    /// As [`TokenStream::cancel`]. Does nothing once the request or the engine has ended.
    pub fn cancel(&self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.cancel(self.id, FinishReason::Cancelled);
        }
    }
}

impl Iterator for TokenStream {
    type Item = StreamEvent;

    fn next(&mut self) -> Option<StreamEvent> {
        TokenStream::next(self)
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        if !self.ended {
            self.cancel();
        }
    }
}

/// A whole answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Completion {
    /// The text.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<Token>,
    /// Why it ended.
    pub reason: Option<FinishReason>,
    /// What it used.
    pub usage: Usage,
    /// The last routing decision; none if the request never reached a decode worker.
    pub decision: Option<Decision>,
}

/// Bytes in, whole characters out. Bytes that are no UTF-8 become replacement characters.
#[derive(Debug, Default)]
struct Utf8Tail(Vec<u8>);

impl Utf8Tail {
    fn push(&mut self, bytes: &[u8]) -> String {
        self.0.extend_from_slice(bytes);
        let mut text = String::new();
        let mut n_used = 0;
        for chunk in self.0.utf8_chunks() {
            text.push_str(chunk.valid());
            n_used += chunk.valid().len();
            let invalid = chunk.invalid();
            let at_end = n_used + invalid.len() == self.0.len();
            if invalid.is_empty() || (at_end && could_continue(invalid)) {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            n_used += invalid.len();
        }
        self.0.drain(..n_used);
        text
    }

    fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.0)).into_owned()
    }
}

/// Whether more bytes could make `bytes` one character.
fn could_continue(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_character_in_pieces_is_held_back_until_it_is_whole() {
        let mut tail = Utf8Tail::default();
        assert_eq!(tail.push(&[0xf0, 0x9f]), "");
        assert_eq!(tail.push(&[0x98]), "");
        assert_eq!(tail.push(&[0x80, b'a', 0xc3]), "\u{1f600}a");
        assert_eq!(tail.push(b"b"), "\u{fffd}b");
        assert_eq!(tail.push(&[0xc3]), "");
        assert_eq!(tail.finish(), "\u{fffd}");
    }

    proptest! {
        #[test]
        fn pieces_say_what_the_whole_says(bytes in prop::collection::vec(any::<u8>(), 0..40), cuts in any::<u64>()) {
            let mut tail = Utf8Tail::default();
            let mut text = String::new();
            let mut piece = Vec::new();
            for (i, &byte) in bytes.iter().enumerate() {
                piece.push(byte);
                if cuts >> (i % 64) & 1 == 1 {
                    text.push_str(&tail.push(&std::mem::take(&mut piece)));
                }
            }
            text.push_str(&tail.push(&piece));
            text.push_str(&tail.finish());
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }
}
