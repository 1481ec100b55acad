use std::time::Duration;

use axum::{
    body::Bytes,
    extract::{FromRequest as _, Request, rejection::BytesRejection},
    http::StatusCode,
    response::IntoResponse as _,
};
use serde_json::Value;
use tokio::time::timeout;

use super::{app::blocking, error::ApiError};

/// Time a body may take to arrive.
const MAX_TIME: Duration = Duration::from_secs(60);

/// The bytes of a request's body, which may be so long and take so long.
pub(super) async fn read(request: Request) -> Result<Bytes, ApiError> {
    let Ok(read) = timeout(MAX_TIME, Bytes::from_request(request, &())).await else {
        return Err(ApiError::status(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time"));
    };
    read.map_err(|rejection: BytesRejection| {
        let status = rejection.into_response().status();
        match status {
            StatusCode::PAYLOAD_TOO_LARGE => ApiError::status(status, "the body is too large for this server"),
            _ => ApiError::invalid("", "the body could not be read to its end"),
        }
    })
}

/// A request's body as JSON, parsed where it keeps no other client waiting.
pub(super) async fn json(request: Request) -> Result<Value, ApiError> {
    let bytes = read(request).await?;
    blocking(move || parse(&bytes)).await?
}

/// The bytes of a body as JSON.
pub(super) fn parse(bytes: &[u8]) -> Result<Value, ApiError> {
    serde_json::from_slice(bytes).map_err(|error| ApiError::invalid("", format!("the body is not JSON: {error}")))
}
