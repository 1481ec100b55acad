use std::{collections::VecDeque, convert::Infallible, pin::Pin, sync::Arc};

use axum::{
    Json,
    response::{
        IntoResponse as _, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures_util::{
    Stream, StreamExt as _,
    stream::{self, SelectAll},
};
use serde_json::{Value, json};

use super::{
    app::App,
    ask::Ask,
    choice::{Choice, Finish, Piece},
    error::ApiError,
    ledger::Entry,
    output::{Delta, Output},
    shape::{Shape, Whole},
};

type Pieces = SelectAll<Pin<Box<dyn Stream<Item = (usize, Piece)> + Send>>>;

/// An answer being put together: the choices as they come, and how their text is to be read.
pub(super) struct Answer {
    app: Arc<App>,
    shape: Shape,
    pieces: Pieces,
    choices: Vec<Reading>,
    explain: bool,
    timings_per_token: bool,
}

/// What is known of a choice besides what is still to come.
struct Reading {
    output: Output,
    entry: Arc<Entry>,
    n_chars: usize,
}

impl Answer {
    /// `outputs` has one for each choice.
    pub fn new(app: &Arc<App>, shape: Shape, choices: Vec<Choice>, outputs: Vec<Output>, ask: &Ask) -> Self {
        assert_eq!(choices.len(), outputs.len(), "one reading for each choice");
        let entries = choices.iter().map(|choice| Arc::clone(choice.entry()));
        let readings = entries.zip(outputs).map(|(entry, output)| Reading { output, entry, n_chars: 0 }).collect();
        let streams = choices.into_iter().enumerate().map(|(index, choice)| {
            let next =
                move |mut choice: Choice| async move { choice.next().await.map(|piece| ((index, piece), choice)) };
            stream::unfold(choice, next).boxed()
        });
        let (explain, timings_per_token) = (ask.explain, ask.timings_per_token);
        let (app, pieces) = (Arc::clone(app), stream::select_all(streams));
        Self { app, shape, pieces, choices: readings, explain, timings_per_token }
    }

    /// Everything at once; the first choice that fails fails the request.
    pub async fn whole(mut self) -> Result<Response, ApiError> {
        let mut wholes: Vec<Whole> = self.choices.iter().map(|_| Whole::default()).collect();
        while let Some((index, piece)) = self.pieces.next().await {
            let (whole, output) = (&mut wholes[index], &mut self.choices[index].output);
            let deltas = match piece {
                Piece::Text { text, drawn } => {
                    whole.drawn.extend(drawn);
                    output.push(&text)
                }
                Piece::Done(finish) => {
                    let deltas = output.finish();
                    whole.finish = finish_name(finish, output);
                    deltas
                }
                Piece::Failed(error) => return Err(error),
            };
            for delta in deltas {
                match delta {
                    Delta::Content(text) => whole.content.push_str(&text),
                    Delta::Reasoning(text) => whole.reasoning.push_str(&text),
                    Delta::Call(call) => whole.calls.push(call.to_json(None)),
                }
            }
        }
        for (whole, reading) in wholes.iter_mut().zip(&self.choices) {
            whole.route = self.explain.then(|| reading.entry.to_json());
        }
        let (usage, timings) = (self.usage(), self.timings());
        Ok(Json(self.shape.whole(wholes, &usage, &timings, self.app.tokenizer().as_ref())).into_response())
    }

    /// Server-sent events: a chunk for each part as it comes, the usage if asked for, and `[DONE]`.
    pub fn stream(self, include_usage: bool) -> Response {
        let keep_alive = KeepAlive::new().interval(self.app.config.keep_alive).text("still alive");
        let opening = (0..self.choices.len()).filter_map(|index| self.shape.opening(index));
        let ready = opening.map(|chunk| chunk.to_string()).collect();
        let talk = Talk { answer: self, ready, include_usage, over: false };
        let events = stream::unfold(talk, |mut talk| async move { Some((talk.next().await?, talk)) });
        let events = events.map(|data| Ok::<_, Infallible>(Event::default().data(data)));
        Sse::new(events).keep_alive(keep_alive).into_response()
    }

    /// Of all choices; each prompt counts once.
    fn usage(&self) -> Value {
        let entries = || self.choices.iter().map(|reading| &reading.entry);
        let completion: u32 = entries().map(|entry| entry.n_generated()).sum();
        let n_each = self.choices.len() / self.n_prompts().max(1);
        let prompt: u32 = entries().step_by(n_each.max(1)).map(|entry| entry.prompt_tokens).sum();
        let mut usage =
            json!({ "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion });
        let cached = entries().step_by(n_each.max(1)).map(|entry| entry.cached_tokens()).sum::<Option<u32>>();
        if let Some(cached) = cached {
            usage["prompt_tokens_details"] = json!({ "cached_tokens": cached });
        }
        usage
    }

    /// Of the first choice, as llama-server has it.
    fn timings(&self) -> Value {
        self.choices.first().map(|reading| reading.entry.timings()).unwrap_or_default()
    }

    fn n_prompts(&self) -> usize {
        self.choices.iter().filter(|reading| reading.output.opens_prompt).count()
    }

    fn chunks(&mut self, index: usize, piece: Piece) -> Result<Vec<Value>, ApiError> {
        let tokenizer = Arc::clone(self.app.tokenizer());
        let Reading { output, entry, n_chars } = &mut self.choices[index];
        Ok(match piece {
            Piece::Text { text, drawn } => {
                let mut logprobs = self.shape.logprobs(&drawn, *n_chars, tokenizer.as_ref());
                *n_chars += text.chars().count();
                let mut deltas = output.push(&text);
                if deltas.is_empty() && !logprobs.is_null() {
                    deltas.push(Delta::Content(String::new()));
                }
                // The tokens go with the first part of their text.
                let timings = self.timings_per_token.then(|| entry.timings());
                let chunk = |delta: &Delta| {
                    let mut chunk = self.shape.delta(index, delta, &logprobs.take());
                    if let Some(timings) = &timings {
                        chunk["timings"] = timings.clone();
                    }
                    chunk
                };
                deltas.iter().map(chunk).collect()
            }
            Piece::Done(finish) => {
                let deltas = output.finish();
                let mut chunks: Vec<Value> =
                    deltas.iter().map(|delta| self.shape.delta(index, delta, &Value::Null)).collect();
                let route = self.explain.then(|| entry.to_json());
                chunks.push(self.shape.ending(index, finish_name(finish, output), entry.timings(), route));
                chunks
            }
            Piece::Failed(error) => return Err(error),
        })
    }
}

fn finish_name(finish: Finish, output: &Output) -> &'static str {
    if finish == Finish::Stop && output.has_calls() { "tool_calls" } else { finish.name() }
}

/// An answer being streamed.
struct Talk {
    answer: Answer,
    ready: VecDeque<String>,
    include_usage: bool,
    over: bool,
}

impl Talk {
    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(data) = self.ready.pop_front() {
                return Some(data);
            }
            if self.over {
                return None;
            }
            match self.answer.pieces.next().await {
                Some((index, piece)) => match self.answer.chunks(index, piece) {
                    Ok(chunks) => self.ready.extend(chunks.iter().map(Value::to_string)),
                    Err(error) => self.end(&error.to_json()),
                },
                None if self.include_usage => {
                    let usage = self.answer.shape.usage(self.answer.usage(), self.answer.timings());
                    self.end(&usage);
                }
                None => self.close(),
            }
        }
    }

    fn end(&mut self, last: &Value) {
        self.ready.push_back(last.to_string());
        self.close();
    }

    /// What is still under way is not read any more, which ends it.
    fn close(&mut self) {
        self.answer.pieces = SelectAll::new();
        self.ready.push_back("[DONE]".to_owned());
        self.over = true;
    }
}
