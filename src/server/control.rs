use std::sync::Arc;

use axum::{
    Json,
    extract::{
        Path, Query, State,
        rejection::{PathRejection, QueryRejection},
    },
    http::{
        HeaderMap, StatusCode,
        header::{ACCEPT, CONTENT_TYPE},
    },
    response::{IntoResponse as _, Response},
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::types::WorkerId;

use super::{
    app::{App, blocking},
    error::ApiError,
    experts,
    ledger::Entry,
};

/// Routed requests that the list of workers shows.
const N_RECENT: usize = 32;

/// `GET /health`: the process lives.
pub(super) async fn health() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

/// `GET /ready`: requests sent now would be answered.
pub(super) async fn ready(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    if !app.is_accepting() {
        return Err(ApiError::draining());
    }
    if app.engine.stats().workers.iter().all(|worker| !worker.healthy) {
        return Err(ApiError::unavailable("no_worker", "no decode worker is running", 5));
    }
    Ok(Json(json!({ "status": "ok" })))
}

/// `GET /v1/models`.
pub(super) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    let card = &app.card;
    let meta = json!({
        "n_vocab": app.tokenizer().n_tokens(), "n_ctx": app.engine.n_ctx_slot(), "n_ctx_train": card.n_ctx_train,
        "n_params": card.n_params, "size": card.n_bytes,
    });
    let model = json!({ "id": card.id, "object": "model", "created": app.created, "owned_by": "eldr", "meta": meta });
    Json(json!({ "object": "list", "data": [model] }))
}

/// `GET /props`, in llama-server's words.
pub(super) async fn props(State(app): State<Arc<App>>) -> Json<Value> {
    let n_slots: u32 = app.engine.stats().workers.iter().map(|worker| worker.n_slots).sum();
    Json(json!({
        "default_generation_settings": {
            "n_ctx": app.engine.n_ctx_slot(),
            "params": { "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.0 },
        },
        "total_slots": n_slots,
        "model_alias": app.card.id,
        "chat_template": app.template.source(),
        "bos_token": app.card.bos,
        "eos_token": app.card.eos,
        "eldr": { "policy": app.engine.policy_name(), "policy_note": app.engine.policy_note() },
        "build_info": concat!("eldr ", env!("CARGO_PKG_VERSION")),
    }))
}

/// `GET /slots`, in llama-server's words: a worker's busy slots first, and which worker's they are.
pub(super) async fn slots(State(app): State<Arc<App>>) -> Json<Value> {
    let live = app.ledger.live();
    let mut slots = Vec::new();
    for worker in app.engine.stats().workers {
        let mut here = live.iter().filter(|entry| entry.worker() == Some(worker.id));
        for _ in 0..worker.n_slots {
            let entry = here.next();
            slots.push(json!({
                "id": slots.len(), "n_ctx": app.engine.n_ctx_slot(), "is_processing": entry.is_some(),
                "id_task": entry.map(|entry| entry.request.0),
                "n_prompt_tokens": entry.map(|entry| entry.prompt_tokens),
                "n_prompt_tokens_cache": entry.and_then(|entry| entry.cached_tokens()),
                "next_token": entry.map(|entry| json!([{ "n_decoded": entry.n_generated(), "has_next_token": true }])),
                "speculative": false,
                "eldr": { "worker": worker.id, "request": entry.map(|entry| &entry.id) },
            }));
        }
    }
    Json(slots.into())
}

/// `GET /v1/eldr/workers`: loads, and the last requests with the reasons of their routes.
pub(super) async fn workers(State(app): State<Arc<App>>) -> Json<Value> {
    let stats = app.engine.stats();
    let live = app.ledger.live();
    let names = app.engine.decode_names();
    let workers = stats.workers.iter().zip(&stats.lost).zip(&names).map(|((worker, lost), name)| {
        let here = || live.iter().filter(|entry| entry.worker() == Some(worker.id));
        let similarities: Vec<f32> =
            here().filter_map(|entry| entry.decision()).filter_map(|decision| decision.similarity).collect();
        let mean = similarities.iter().sum::<f32>() / similarities.len() as f32;
        json!({
            "id": worker.id, "name": name, "n_slots": worker.n_slots, "n_inflight": worker.n_inflight,
            "healthy": worker.healthy, "lost": lost, "drained": !worker.healthy && !lost,
            "n_tokens": here().map(|entry| entry.prompt_tokens + entry.n_generated()).sum::<u32>(),
            "n_ctx_slot": app.engine.n_ctx_slot(),
            "mean_similarity": (!similarities.is_empty()).then_some(mean),
        })
    });
    let recent: Vec<Value> = app.ledger.recent(N_RECENT).iter().map(|entry| entry.to_json()).collect();
    Json(json!({
        "policy": app.engine.policy_name(),
        "policy_note": app.engine.policy_note(),
        "model": app.card.id,
        "n_active": stats.n_active,
        "n_queued": stats.n_queued,
        "n_retried": stats.dispatch.n_retried,
        "n_migrated": stats.dispatch.n_migrated,
        "n_workers_lost": stats.dispatch.n_workers_lost,
        "workers": workers.collect::<Vec<_>>(),
        "recent": recent,
    }))
}

/// What a path or a query says; one that can not be read is the request's fault, and said in OpenAI's shape.
type Named = Result<Path<String>, PathRejection>;
type Asked = Result<Query<Which>, QueryRejection>;

/// `POST /v1/eldr/workers/{id}/drain`: the decode worker finishes what it has and gets nothing more.
pub(super) async fn drain(State(app): State<Arc<App>>, id: Named) -> Result<Json<Value>, ApiError> {
    let worker = worker_id(id)?;
    app.engine.drain_decode(worker).map_err(|error| ApiError::invalid("id", error.to_string()))?;
    Ok(workers(State(app)).await)
}

/// `POST /v1/eldr/workers/{id}/resume`: a drained decode worker gets requests again.
pub(super) async fn resume(State(app): State<Arc<App>>, id: Named) -> Result<Json<Value>, ApiError> {
    let worker = worker_id(id)?;
    app.engine.resume_decode(worker).map_err(|error| ApiError::invalid("id", error.to_string()))?;
    Ok(workers(State(app)).await)
}

fn worker_id(id: Named) -> Result<WorkerId, ApiError> {
    let Path(id) = id.map_err(|rejection| ApiError::of_path(&rejection))?;
    let number = id.parse().map_err(|_| ApiError::invalid("id", format!("{id:?} is not the number of a worker")));
    number.map(WorkerId)
}

#[derive(Deserialize)]
pub(super) struct Which {
    id: Option<String>,
}

/// `GET /v1/eldr/explain?id=..`: how an answer came to be where it was computed.
pub(super) async fn explain(State(app): State<Arc<App>>, which: Asked) -> Result<Json<Value>, ApiError> {
    let Query(Which { id }) = which.map_err(|rejection| ApiError::of_query(&rejection))?;
    let Some(id) = id else {
        return Err(ApiError::invalid("id", "id is missing: give the id of an answer, or POST a prompt"));
    };
    let found = app.ledger.find(&id);
    if found.is_empty() {
        let why = format!("no answer {id:?} is remembered; the last 256 choices are");
        return Err(ApiError::status(StatusCode::NOT_FOUND, why));
    }
    Ok(Json(explained(&app, &id, &found)))
}

/// The document that says how the choices of an answer were routed.
pub(super) fn explained(app: &App, id: &str, choices: &[Arc<Entry>]) -> Value {
    let engine = &app.engine;
    let explain = |entry: &Arc<Entry>| {
        let mut choice = entry.to_json();
        choice["experts"] = experts::of_prompt(entry.counts().as_deref());
        choice
    };
    let choices: Vec<Value> = choices.iter().map(explain).collect();
    json!({ "id": id, "policy": engine.policy_name(), "policy_note": engine.policy_note(), "choices": choices })
}

/// `POST /v1/eldr/reload`: what a SIGHUP does.
pub(super) async fn reload(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let Some(reload) = app.reload.get().cloned() else {
        let why = "there is nothing to read again: the server was started without a calibration";
        return Err(ApiError::status(StatusCode::CONFLICT, why));
    };
    match blocking(move || reload()).await? {
        Ok(what) => {
            log::info!("reload: {what}");
            Ok(Json(json!({ "status": "ok" })))
        }
        Err(why) => {
            log::error!("reload: nothing was changed: {why}");
            // It may name a path of the host, which is the log's to know.
            let why = "nothing was changed: the file can not be used; the server's log says why";
            Err(ApiError::status(StatusCode::CONFLICT, why))
        }
    }
}

/// `GET /metrics`.
pub(super) async fn metrics(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    let accepts = headers.get(ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or("");
    let open_metrics = accepts.contains("application/openmetrics-text");
    let text = app.metrics.render(&app.engine.stats(), &app.ledger, app.engine.n_ctx_slot(), open_metrics);
    let kind = if open_metrics {
        "application/openmetrics-text; version=1.0.0; charset=utf-8"
    } else {
        "text/plain; version=0.0.4; charset=utf-8"
    };
    ([(CONTENT_TYPE, kind)], text).into_response()
}

pub(super) async fn unknown_path() -> ApiError {
    ApiError::status(StatusCode::NOT_FOUND, "there is nothing at this path")
}

pub(super) async fn wrong_method() -> ApiError {
    ApiError::status(StatusCode::METHOD_NOT_ALLOWED, "this path does not take this method")
}
