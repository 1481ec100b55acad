use axum::{
    Json,
    extract::rejection::{PathRejection, QueryRejection},
    http::{HeaderValue, StatusCode, header::RETRY_AFTER},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use crate::engine::EngineError;

/// Why a request is not answered, in the shape that OpenAI's clients read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ApiError {
    pub status: StatusCode,
    kind: &'static str,
    pub message: String,
    /// The path of the field at fault: `messages[2].content`.
    pub param: Option<String>,
    code: Option<&'static str>,
    /// Seconds after which another try may succeed.
    retry_after: Option<u64>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// A field, or the whole body where `param` is empty, that can not be used as it stands.
    pub fn invalid(param: &str, message: impl Into<String>) -> Self {
        let param = Some(param.to_owned()).filter(|param| !param.is_empty());
        Self { param, ..Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message) }
    }

    /// A prompt that no slot can hold.
    pub fn too_long(param: &str, message: impl Into<String>) -> Self {
        Self { code: Some("context_length_exceeded"), ..Self::invalid(param, message) }
    }

    pub fn status(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, "invalid_request_error", message)
    }

    pub fn unauthorized() -> Self {
        let message = "no valid API key: send one as `Authorization: Bearer KEY`";
        Self { code: Some("invalid_api_key"), ..Self::new(StatusCode::UNAUTHORIZED, "authentication_error", message) }
    }

    /// Too much is waiting already.
    pub fn busy(message: impl Into<String>, retry_after: u64) -> Self {
        Self {
            code: Some("queue_full"),
            retry_after: Some(retry_after),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
        }
    }

    /// The server can not answer now.
    pub fn unavailable(code: &'static str, message: impl Into<String>, retry_after: u64) -> Self {
        Self {
            code: Some(code),
            retry_after: Some(retry_after),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable_error", message)
        }
    }

    pub fn draining() -> Self {
        Self::unavailable("shutting_down", "the server is shutting down and takes no more requests", 5)
    }

    pub fn timeout(code: &'static str, message: impl Into<String>) -> Self {
        Self { code: Some(code), ..Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout_error", message) }
    }

    /// A worker's failure, which is not the client's.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// What the engine said to a request for `param`; a full queue asks to come back after `retry_after` seconds.
    pub fn from_engine(error: &EngineError, param: &str, retry_after: u64) -> Self {
        match error {
            EngineError::QueueFull(full) => Self::busy(full.to_string(), retry_after),
            EngineError::Draining => Self::draining(),
            EngineError::Request(why) => Self::invalid(param, why),
            other => Self::failed(other.to_string()),
        }
    }

    /// A query whose fields can not be read.
    pub fn of_query(rejection: &QueryRejection) -> Self {
        let why = rejection.body_text();
        let why = why.strip_prefix("Failed to deserialize query string: ").unwrap_or(&why);
        Self::status(rejection.status(), format!("the query can not be read: {why}; give each of its fields once"))
    }

    /// A path whose names can not be read.
    pub fn of_path(rejection: &PathRejection) -> Self {
        Self::status(rejection.status(), format!("the path can not be read: {}", rejection.body_text()))
    }

    pub fn to_json(&self) -> Value {
        json!({ "error": { "message": self.message, "type": self.kind, "param": self.param, "code": self.code } })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.to_json())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
