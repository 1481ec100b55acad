use std::sync::Arc;

use axum::{
    Json,
    extract::{Request, State},
};
use serde_json::{Value, json};

use crate::types::Token;

use super::{
    app::{App, blocking},
    ask::Ask,
    body,
    choice::Piece,
    control::explained,
    error::ApiError,
    fields::{Fields, whole},
};

/// `POST /tokenize`.
pub(super) async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    let body = body::json(request).await?;
    let fields = Fields::of(&body, "")?;
    fields.required("content")?;
    let text = fields.text("content")?.unwrap_or_default().to_owned();
    let add_special = fields.flag("add_special")?.unwrap_or(false);
    let parse_special = fields.flag("parse_special")?.unwrap_or(true);
    let with_pieces = fields.flag("with_pieces")?.unwrap_or(false);
    let tokenizer = Arc::clone(app.tokenizer());
    let tokens = blocking(move || tokenizer.tokenize_as(&text, add_special, parse_special)).await?;
    let tokens = tokens.map_err(|why| ApiError::invalid("content", why))?;
    if !with_pieces {
        return Ok(Json(json!({ "tokens": tokens })));
    }
    let pieces = tokens.iter().map(|&token| {
        let bytes = app.tokenizer().piece(token);
        // A part of a character has no text; llama-server gives its bytes.
        let piece = String::from_utf8(bytes).map_or_else(|error| json!(error.into_bytes()), Value::from);
        json!({ "id": token, "piece": piece })
    });
    Ok(Json(json!({ "tokens": pieces.collect::<Vec<_>>() })))
}

/// `POST /detokenize`.
pub(super) async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    let body = body::json(request).await?;
    let fields = Fields::of(&body, "")?;
    fields.required("tokens")?;
    let n_vocab = u64::from(app.tokenizer().n_tokens());
    let mut bytes = Vec::new();
    for (at, token) in fields.list("tokens")?.unwrap_or_default().iter().enumerate() {
        let token = whole(token, &format!("tokens[{at}]"), 0..=n_vocab - 1)?;
        bytes.extend(app.tokenizer().piece(token as Token));
    }
    Ok(Json(json!({ "content": String::from_utf8_lossy(&bytes) })))
}

/// `POST /v1/eldr/explain`: routes a prompt and says where it went, and why.
///
/// It is prefilled and routed like any other request, and decodes one token, so that the answer is what would happen.
pub(super) async fn explain(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    let body = body::json(request).await?;
    let fields = Fields::of(&body, "")?;
    fields.required("prompt")?;
    let text = fields.text("prompt")?.unwrap_or_default().to_owned();
    let mut ask = Ask::read(&fields, app.fresh(), app.engine.policy_name(), 1)?;
    // The first token comes from the prefill worker, the second from the decode worker.
    ask.max_tokens = Some(2);
    ask.sampling.ignore_eos = true;
    ask.sampling.grammar = None;
    let prompt = app.tokenize(text, "prompt").await?;
    let id = format!("explain-{:016x}", app.fresh());
    let mut choice = app.submit(&id, &[prompt], &ask, "prompt")?.remove(0);
    while let Some(piece) = choice.next().await {
        if let Piece::Failed(error) = piece {
            return Err(error);
        }
    }
    Ok(Json(explained(&app, &id, &[Arc::clone(choice.entry())])))
}
