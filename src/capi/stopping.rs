//! A request's events, of which stop strings end the text.
//!
//! Never shows a part of a stop string.

use crate::{
    engine::{StopFilter, StreamEvent, TokenStream},
    types::FinishReason,
};

/// A stream that its stop strings end early.
pub(super) struct Stopping {
    stream: TokenStream,
    filter: StopFilter,
    is_over: bool,
}

impl Stopping {
    /// Stops at any of `stops`, none of them empty.
    pub(super) fn new(stream: TokenStream, stops: Vec<String>) -> Self {
        Self { stream, filter: StopFilter::new(stops), is_over: false }
    }

    /// Waits for the next event; nothing after the last.
    pub(super) fn next(&mut self) -> Option<StreamEvent> {
        loop {
            let event = self.stream.next()?;
            if let Some(event) = self.take(event) {
                return Some(event);
            }
        }
    }

    /// As [`Stopping::next`], without a thread. Nothing is lost where it is given up.
    pub(super) async fn next_async(&mut self) -> Option<StreamEvent> {
        loop {
            let event = self.stream.next_async().await?;
            if let Some(event) = self.take(event) {
                return Some(event);
            }
        }
    }

    /// What is to be told of an event: nothing of tokens that were drawn behind a stop string.
    fn take(&mut self, event: StreamEvent) -> Option<StreamEvent> {
        Some(match event {
            StreamEvent::Token { .. } if self.is_over => return None,
            StreamEvent::Token { token, text, at, logprobs } => {
                let text = self.pass(&text);
                if self.is_over {
                    self.stream.cancel();
                }
                StreamEvent::Token { token, text, at, logprobs }
            }
            StreamEvent::End { usage, .. } if self.is_over => {
                StreamEvent::End { reason: FinishReason::Stop, usage, text: String::new() }
            }
            StreamEvent::End { reason, usage, text } => {
                let mut text = self.pass(&text);
                if self.is_over {
                    return Some(StreamEvent::End { reason: FinishReason::Stop, usage, text });
                }
                text.push_str(&self.filter.finish());
                StreamEvent::End { reason, usage, text }
            }
            other => other,
        })
    }

    fn pass(&mut self, text: &str) -> String {
        let released = self.filter.push(text);
        self.is_over = released.hit.is_some();
        released.text
    }
}
