use serde_json::{Map, Value, json};

use crate::engine::Tokenizer;

use super::{choice::Drawn, output::Delta};

/// What answers to the same request and seed have in common, where they are the same.
const FINGERPRINT: &str = concat!("eldr-", env!("CARGO_PKG_VERSION"));

/// Which endpoint's words an answer is put into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Completion,
    Chat,
}

/// What all parts of an answer have in common.
#[derive(Debug, Clone)]
pub(super) struct Shape {
    pub kind: Kind,
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    pub model: String,
}

/// A whole choice.
#[derive(Debug, Default)]
pub(super) struct Whole {
    pub content: String,
    pub reasoning: String,
    pub calls: Vec<Value>,
    pub drawn: Vec<Drawn>,
    pub finish: &'static str,
    pub route: Option<Value>,
}

impl Shape {
    /// The chunk that opens a choice, if there is one.
    pub fn opening(&self, index: usize) -> Option<Value> {
        match self.kind {
            Kind::Completion => None,
            Kind::Chat => Some(self.chunk(&json!([{
                "index": index, "delta": { "role": "assistant", "content": "" }, "logprobs": null, "finish_reason": null,
            }]))),
        }
    }

    /// The chunk that carries a part of a choice.
    pub fn delta(&self, index: usize, delta: &Delta, logprobs: &Value) -> Value {
        let choice = match (self.kind, delta) {
            (Kind::Completion, Delta::Content(text) | Delta::Reasoning(text)) => {
                json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": null })
            }
            (_, Delta::Content(text)) => {
                json!({ "index": index, "delta": { "content": text }, "logprobs": logprobs, "finish_reason": null })
            }
            (_, Delta::Reasoning(text)) => json!({
                "index": index, "delta": { "reasoning_content": text }, "logprobs": logprobs, "finish_reason": null,
            }),
            (_, Delta::Call(call)) => {
                let calls = json!([call.to_json(Some(call.index))]);
                json!({ "index": index, "delta": { "tool_calls": calls }, "logprobs": logprobs, "finish_reason": null })
            }
        };
        self.chunk(&json!([choice]))
    }

    /// The chunk that ends a choice, with how long that took.
    pub fn ending(&self, index: usize, finish: &str, timings: Value, route: Option<Value>) -> Value {
        let mut chunk = self.chunk(&match self.kind {
            Kind::Completion => json!([{ "index": index, "text": "", "logprobs": null, "finish_reason": finish }]),
            Kind::Chat => json!([{ "index": index, "delta": {}, "logprobs": null, "finish_reason": finish }]),
        });
        chunk["timings"] = timings;
        if let Some(route) = route {
            chunk["eldr"] = route;
        }
        chunk
    }

    /// The chunk behind all others for clients that asked for it.
    pub fn usage(&self, usage: Value, timings: Value) -> Value {
        let mut chunk = self.chunk(&json!([]));
        chunk["usage"] = usage;
        chunk["timings"] = timings;
        chunk
    }

    /// The answer of a request that is not streamed.
    pub fn whole(&self, choices: Vec<Whole>, usage: &Value, timings: &Value, tokenizer: &dyn Tokenizer) -> Value {
        let mut routes = Vec::new();
        let choices: Vec<Value> = choices
            .into_iter()
            .enumerate()
            .map(|(index, choice)| {
                routes.extend(choice.route.clone());
                let logprobs = self.logprobs(&choice.drawn, 0, tokenizer);
                match self.kind {
                    Kind::Completion => json!({
                        "index": index, "text": choice.content, "logprobs": logprobs, "finish_reason": choice.finish,
                    }),
                    Kind::Chat => json!({
                        "index": index, "message": message(&choice.content, &choice.reasoning, choice.calls),
                        "logprobs": logprobs, "finish_reason": choice.finish,
                    }),
                }
            })
            .collect();
        let object = if self.kind == Kind::Chat { "chat.completion" } else { "text_completion" };
        let mut answer = json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "system_fingerprint": FINGERPRINT, "choices": choices, "usage": usage,
            "timings": timings,
        });
        if !routes.is_empty() {
            answer["eldr"] = routes.into();
        }
        answer
    }

    /// How likely tokens were, in the endpoint's words; null where nobody asked. `offset` is the length of the text
    /// before them, in characters.
    pub fn logprobs(&self, drawn: &[Drawn], offset: usize, tokenizer: &dyn Tokenizer) -> Value {
        if drawn.is_empty() {
            return Value::Null;
        }
        let text = |token| String::from_utf8_lossy(&tokenizer.piece(token)).into_owned();
        match self.kind {
            Kind::Chat => {
                let one = |token, logprob: f32| {
                    let bytes = tokenizer.piece(token);
                    json!({ "token": String::from_utf8_lossy(&bytes), "logprob": finite(logprob), "bytes": bytes })
                };
                let content = drawn.iter().map(|drawn| {
                    let mut entry = one(drawn.token, drawn.logprobs.logprob);
                    entry["top_logprobs"] = drawn.logprobs.top.iter().map(|&(token, p)| one(token, p)).collect();
                    entry
                });
                json!({ "content": content.collect::<Vec<Value>>() })
            }
            Kind::Completion => {
                let mut offset = offset;
                let offsets = drawn.iter().map(|drawn| {
                    let at = offset;
                    offset += text(drawn.token).chars().count();
                    at
                });
                let offsets: Vec<usize> = offsets.collect();
                let top = drawn.iter().map(|drawn| {
                    let top = drawn.logprobs.top.iter().map(|&(token, p)| (text(token), Value::from(finite(p))));
                    top.collect::<Map<String, Value>>()
                });
                json!({
                    "tokens": drawn.iter().map(|drawn| text(drawn.token)).collect::<Vec<_>>(),
                    "token_logprobs": drawn.iter().map(|drawn| finite(drawn.logprobs.logprob)).collect::<Vec<_>>(),
                    "top_logprobs": top.collect::<Vec<_>>(),
                    "text_offset": offsets,
                })
            }
        }
    }

    fn chunk(&self, choices: &Value) -> Value {
        let object = if self.kind == Kind::Chat { "chat.completion.chunk" } else { "text_completion" };
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "system_fingerprint": FINGERPRINT, "choices": choices,
        })
    }
}

/// JSON has no infinity; OpenAI says -9999 for what is very unlikely.
fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

fn message(content: &str, reasoning: &str, calls: Vec<Value>) -> Value {
    let mut message = json!({ "role": "assistant", "content": content });
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        if message["content"] == "" {
            message["content"] = Value::Null;
        }
        message["tool_calls"] = calls.into();
    }
    message
}
