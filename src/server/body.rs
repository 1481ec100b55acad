use axum::{
    body::Bytes,
    extract::{FromRequest as _, Request, rejection::BytesRejection},
    http::StatusCode,
    response::IntoResponse as _,
};
use serde_json::Value;

use super::error::ApiError;

/// The bytes of a request's body, as far as it may be long.
pub(super) async fn read(request: Request) -> Result<Bytes, ApiError> {
    Bytes::from_request(request, &()).await.map_err(|rejection: BytesRejection| {
        let status = rejection.into_response().status();
        match status {
            StatusCode::PAYLOAD_TOO_LARGE => ApiError::status(status, "the body is too large for this server"),
            _ => ApiError::invalid("", "the body could not be read to its end"),
        }
    })
}

/// The body as JSON.
pub(super) fn parse(bytes: &[u8]) -> Result<Value, ApiError> {
    serde_json::from_slice(bytes).map_err(|error| ApiError::invalid("", format!("the body is not JSON: {error}")))
}
