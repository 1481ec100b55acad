use std::sync::Arc;

use axum::{
    extract::{Request, State},
    response::Response,
};
use serde_json::Value;

use crate::types::Token;

use super::{
    app::{App, now},
    ask::{Ask, MAX_LOGPROBS, n_probs},
    body,
    choice::Choice,
    error::ApiError,
    fields::{Fields, whole, wrong_kind},
    output::Output,
    respond::Answer,
    shape::{Kind, Shape},
};

/// `POST /v1/completions`.
pub(super) async fn completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let body = body::json(request).await?;
    let fields = Fields::of(&body, "")?;
    let mut ask = Ask::read(&fields, app.fresh(), app.engine.policy_name(), app.config.max_choices)?;
    ask.sampling.n_logprobs = match fields.get("logprobs") {
        None => n_probs(&fields)?,
        Some(Value::Bool(false)) => None,
        Some(value) => Some(whole(value, "logprobs", 0..=MAX_LOGPROBS)? as u32),
    };
    let prompts = prompts(&app, fields.required("prompt")?).await?;
    app.check_grammar(&ask.sampling).await?;
    let id = format!("cmpl-{:016x}", app.fresh());
    let shape = Shape { kind: Kind::Completion, id, created: now(), model: app.card.id.clone() };
    let mut choices = app.submit(&shape.id, &prompts, &ask, "prompt")?;
    log_text(&app, &mut choices, fields.get("prompt"));
    let outputs = (0..choices.len()).map(|index| Output::plain(index % ask.n == 0)).collect();
    let answer = Answer::new(&app, shape, choices, outputs, &ask);
    if ask.stream { Ok(answer.stream(ask.include_usage)) } else { answer.whole().await }
}

/// Puts prompts and answers into the request log, if that was asked for at the start.
pub(super) fn log_text(app: &App, choices: &mut [Choice], prompt: Option<&Value>) {
    if app.config.log_text {
        for choice in choices {
            choice.log_text(prompt.cloned().unwrap_or_default());
        }
    }
}

/// A text, a list of texts, a list of tokens, or a list of such lists.
async fn prompts(app: &Arc<App>, prompt: &Value) -> Result<Vec<Vec<Token>>, ApiError> {
    let one =
        |value: &Value| value.is_string() || value.as_array().is_some_and(|list| list.iter().all(Value::is_number));
    if one(prompt) {
        return Ok(vec![tokens(app, prompt, "prompt").await?]);
    }
    let Some(list) = prompt.as_array() else { return Err(wrong_kind("prompt", "a string or a list", prompt)) };
    let most = app.config.max_choices;
    if list.len() > most {
        let n = list.len();
        return Err(ApiError::invalid("prompt", format!("prompt has {n} prompts; one request may have {most}")));
    }
    let mut prompts = Vec::with_capacity(list.len());
    for (index, prompt) in list.iter().enumerate() {
        prompts.push(tokens(app, prompt, &format!("prompt[{index}]")).await?);
    }
    Ok(prompts)
}

async fn tokens(app: &Arc<App>, prompt: &Value, path: &str) -> Result<Vec<Token>, ApiError> {
    let tokens = match prompt {
        Value::String(text) => app.tokenize(text.clone(), path).await?,
        Value::Array(list) => list
            .iter()
            .enumerate()
            .map(|(at, token)| whole(token, &format!("{path}[{at}]"), 0..=i32::MAX as u64).map(|token| token as Token))
            .collect::<Result<_, _>>()?,
        other => return Err(wrong_kind(path, "a string or a list of tokens", other)),
    };
    app.check_prompt(&tokens, path)?;
    Ok(tokens)
}
