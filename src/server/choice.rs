use std::{collections::VecDeque, sync::Arc};

use serde_json::Value;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use crate::{
    engine::{StopFilter, StreamEvent, TokenStream},
    route::PolicyKind,
    schedule::SubmitParams,
    types::{FinishReason, Request, Token, TokenLogprobs},
};

use super::{app::App, ask::Ask, error::ApiError, ledger::Entry};

/// One answer to one prompt, under way. Dropping it ends the request on its worker.
pub(super) struct Choice {
    stream: Option<TokenStream>,
    stop: StopFilter,
    wants_logprobs: bool,
    /// Tokens whose text is not let go yet.
    held: Vec<Drawn>,
    ready: VecDeque<Piece>,
    /// When the first token must be there, until it is; none where no clock reaches that far.
    first_by: Option<Instant>,
    /// Tells when the server cuts it short.
    cut: watch::Receiver<bool>,
    ticket: Ticket,
}

/// A token of an answer, for a client that asked how likely it was.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Drawn {
    pub token: Token,
    pub logprobs: Box<TokenLogprobs>,
}

/// What happens to a choice.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Piece {
    Text {
        text: String,
        drawn: Vec<Drawn>,
    },
    /// It is whole; nothing follows.
    Done(Finish),
    /// It could not be had; nothing follows.
    Failed(ApiError),
}

/// Why an answer is whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Finish {
    Stop,
    Length,
}

impl Finish {
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

impl App {
    /// Submits every choice of a request, or none: `n` answers to each prompt. The j-th answer to a prompt has the j-th
    /// seed from the request's on. `param` is the field that held the prompts.
    pub fn submit(
        self: &Arc<Self>,
        id: &str,
        prompts: &[Vec<Token>],
        ask: &Ask,
        param: &str,
    ) -> Result<Vec<Choice>, ApiError> {
        if !self.is_accepting() {
            self.metrics.refused("draining");
            return Err(ApiError::draining());
        }
        if let Some(kind) = ask.policy {
            let lent = self.engine.lend_policy(kind);
            lent.map_err(|error| ApiError::invalid("eldr.policy", format!("eldr.policy is {kind}: {error}")))?;
        }
        let n_choices = prompts.len() * ask.n;
        let most = self.config.max_choices;
        if n_choices > most {
            let why = format!("{param} and n ask for {n_choices} answers; one request may have {most}");
            return Err(ApiError::invalid(param, why));
        }
        let n_vocab = self.tokenizer().n_tokens();
        if let Some((token, _)) = ask.sampling.logit_bias.iter().find(|(token, _)| token.cast_unsigned() >= n_vocab) {
            let why = format!("logit_bias names token {token}, and the vocabulary has {n_vocab}");
            return Err(ApiError::invalid("logit_bias", why));
        }
        let mut choices = Vec::with_capacity(n_choices);
        for prompt in prompts {
            self.check_prompt(prompt, param)?;
        }
        for (at, prompt) in prompts.iter().enumerate() {
            for j in 0..ask.n {
                choices.push(self.start(id, at * ask.n + j, j as u64, prompt, ask, param)?);
            }
        }
        Ok(choices)
    }

    fn start(
        self: &Arc<Self>,
        id: &str,
        index: usize,
        j: u64,
        prompt: &[Token],
        ask: &Ask,
        param: &str,
    ) -> Result<Choice, ApiError> {
        let mut sampling = ask.sampling.clone();
        sampling.seed = sampling.seed.wrapping_add(j);
        if sampling.ignore_eos {
            forbid(&mut sampling.logit_bias, self.tokenizer().end_tokens());
        }
        let wants_logprobs = sampling.n_logprobs.is_some();
        let room = self.engine.n_ctx_slot().saturating_sub(prompt.len() as u32).max(1);
        let request = Request {
            prompt: prompt.to_vec(),
            max_tokens: ask.max_tokens.unwrap_or(room),
            sampling,
            domain: ask.domain.clone(),
            deadline: self.config.request_timeout,
        };
        let now = self.engine.started().elapsed();
        let policy = ask.policy.map_or(self.engine.policy_name(), PolicyKind::name);
        let params = SubmitParams { priority: ask.priority, policy: ask.policy, fresh: ask.fresh };
        let stream = self.engine.submit_with(request, params).map_err(|error| {
            let error = ApiError::from_engine(&error, param, self.retry_after());
            self.metrics.refused(if error.status.is_server_error() { "draining" } else { "queue_full" });
            error
        })?;
        let entry = self.ledger.open(Entry::new(stream.id(), id, index, prompt.len() as u32, policy, now));
        Ok(Choice {
            stream: Some(stream),
            stop: StopFilter::new(ask.stops.clone()),
            wants_logprobs,
            held: Vec::new(),
            ready: VecDeque::new(),
            first_by: self.config.queue_timeout.and_then(|time| Instant::now().checked_add(time)),
            cut: self.cuts(),
            ticket: Ticket { app: Arc::clone(self), entry, prompt: None, text: None, is_open: true },
        })
    }
}

impl Choice {
    /// What the ledger knows of it.
    pub fn entry(&self) -> &Arc<Entry> {
        &self.ticket.entry
    }

    /// Puts the prompt and the answer into the request log.
    pub fn log_text(&mut self, prompt: Value) {
        self.ticket.prompt = Some(prompt);
        self.ticket.text = Some(String::new());
    }

    /// What happens next; nothing after the end.
    pub async fn next(&mut self) -> Option<Piece> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Some(piece);
            }
            let stream = self.stream.as_mut()?;
            let first_by = self.first_by;
            let too_late = async {
                match first_by {
                    Some(by) => sleep_until(by).await,
                    None => std::future::pending().await,
                }
            };
            let cut = &mut self.cut;
            let cut = async { drop(cut.wait_for(|is_cut| *is_cut).await) };
            tokio::select! {
                biased;
                event = stream.next_async() => match event {
                    Some(event) => self.take(event),
                    None => self.stream = None,
                },
                () = cut => self.end(Piece::Failed(ApiError::draining()), "shutdown"),
                () = too_late => {
                    let why = "no token came within the time a request may wait; try again later";
                    let error = ApiError::unavailable("queue_timeout", why, self.ticket.app.retry_after());
                    self.end(Piece::Failed(error), "queue_timeout");
                }
            }
        }
    }

    fn take(&mut self, event: StreamEvent) {
        self.ticket.entry.cached(self.stream.as_ref().and_then(TokenStream::cached_tokens));
        match event {
            StreamEvent::Routed { decision, .. } => {
                self.ticket.app.metrics.routed(&decision);
                let counts = self.stream.as_ref().and_then(|stream| stream.counts().cloned());
                self.ticket.entry.routed(&decision, counts);
            }
            StreamEvent::Token { token, text, at, logprobs } => {
                self.first_by = None;
                self.ticket.app.metrics.token(self.ticket.entry.token(at));
                if self.wants_logprobs {
                    self.held.push(Drawn { token, logprobs: logprobs.unwrap_or_default() });
                }
                let released = self.stop.push(&text);
                self.let_go(released.text, released.hit.is_some());
                if released.hit.is_some() {
                    self.end(Piece::Done(Finish::Stop), "stop");
                }
            }
            StreamEvent::End { reason, text, .. } => self.take_end(reason, &text),
            StreamEvent::Failed(why) => self.end(Piece::Failed(ApiError::failed(why)), "failed"),
        }
    }

    fn take_end(&mut self, reason: FinishReason, text: &str) {
        let mut released = self.stop.push(text);
        if released.hit.is_none() {
            released.text.push_str(&self.stop.finish());
        }
        self.let_go(released.text, released.hit.is_some());
        match reason {
            FinishReason::Stop => self.end(Piece::Done(Finish::Stop), "stop"),
            FinishReason::Length => self.end(Piece::Done(Finish::Length), "length"),
            FinishReason::Deadline => {
                let error = ApiError::timeout("request_timeout", "the answer took longer than a request may take");
                self.end(Piece::Failed(error), "deadline");
            }
            // Nobody else cancels a request whose stream is still read.
            FinishReason::Cancelled => self.end(Piece::Failed(ApiError::draining()), "shutdown"),
        }
    }

    /// Passes text on, with its tokens once none of their text is held back. Those of a stop string are dropped.
    fn let_go(&mut self, text: String, hit: bool) {
        let drawn = match hit {
            true => {
                self.held.clear();
                Vec::new()
            }
            false if self.stop.is_empty() => std::mem::take(&mut self.held),
            false => Vec::new(),
        };
        if !text.is_empty() || !drawn.is_empty() {
            if let Some(all) = &mut self.ticket.text {
                all.push_str(&text);
            }
            self.ready.push_back(Piece::Text { text, drawn });
        }
    }

    fn end(&mut self, piece: Piece, outcome: &'static str) {
        self.ready.push_back(piece);
        self.stream = None;
        self.ticket.close(outcome);
    }
}

/// The text goes on because no token that ends it is drawn, as llama-server has it.
fn forbid(logit_bias: &mut Vec<(Token, f32)>, ends: &[Token]) {
    logit_bias.retain(|(token, _)| !ends.contains(token));
    logit_bias.extend(ends.iter().map(|&token| (token, f32::NEG_INFINITY)));
}

/// Accounts for a choice exactly once, whatever becomes of it.
struct Ticket {
    app: Arc<App>,
    entry: Arc<Entry>,
    prompt: Option<Value>,
    text: Option<String>,
    is_open: bool,
}

impl Ticket {
    fn close(&mut self, outcome: &'static str) {
        if !std::mem::take(&mut self.is_open) {
            return;
        }
        let Self { app, entry, .. } = self;
        app.ledger.close(entry, outcome);
        app.metrics.ended(entry, outcome);
        if let Some(journal) = &app.journal {
            let mut line = entry.to_json();
            if let (Some(prompt), Some(text)) = (self.prompt.take(), self.text.take()) {
                line["prompt"] = prompt;
                line["text"] = text.into();
            }
            journal.write(&line);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.close("cancelled");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Symptom: with `ignore_eos` an answer had the model's ends in it and went on behind them; llama-server's has none.
    #[test]
    fn an_end_that_is_ignored_is_never_drawn_whatever_else_was_said_of_it() {
        let mut bias = vec![(3, 1.0), (7, 50.0)];
        forbid(&mut bias, &[7, 9]);
        assert_eq!(bias, [(3, 1.0), (7, f32::NEG_INFINITY), (9, f32::NEG_INFINITY)]);
    }
}
