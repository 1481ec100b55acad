use std::sync::Arc;

use axum::{
    extract::{Request, State},
    http::{
        HeaderMap, StatusCode,
        header::{AUTHORIZATION, HOST, ORIGIN, WWW_AUTHENTICATE},
    },
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use sha2::{Digest as _, Sha256};

use super::{app::App, error::ApiError};

/// What may be seen without a key: whether the server lives, and a page that shows nothing by itself.
const OPEN: [&str; 3] = ["/", "/health", "/ready"];

/// The keys that let a request in, as digests.
pub(super) struct Keys(Vec<[u8; 32]>);

impl Keys {
    pub fn new(keys: &[String]) -> Self {
        Self(keys.iter().map(|key| Sha256::digest(key.as_bytes()).into()).collect())
    }

    /// Whether `key` is one of them; takes as long for a wrong key as for a right one, whichever it is.
    pub fn admit(&self, key: &[u8]) -> bool {
        let given: [u8; 32] = Sha256::digest(key).into();
        let differs = |known: &[u8; 32]| known.iter().zip(&given).fold(0u8, |bits, (a, b)| bits | (a ^ b));
        self.0.iter().fold(false, |found, known| found | (differs(known) == 0))
    }
}

/// Lets in who has a key, if there are keys, and no page of another site.
pub(super) async fn check(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    if is_foreign(request.headers()) {
        let why = "pages of other sites may not use this server";
        return ApiError::status(StatusCode::FORBIDDEN, why).into_response();
    }
    if !app.keys.0.is_empty() && !OPEN.contains(&request.uri().path()) {
        // As bytes: a key may be text that is not ASCII.
        let key = request.headers().get(AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        if !app.keys.admit(key.unwrap_or_default()) {
            app.metrics.refused("api_key");
            let mut response = ApiError::unauthorized().into_response();
            response.headers_mut().insert(WWW_AUTHENTICATE, axum::http::HeaderValue::from_static("Bearer"));
            return response;
        }
    }
    next.run(request).await
}

/// A browser says which site's page sends a request; one of another site could use the server behind its user's back.
fn is_foreign(headers: &HeaderMap) -> bool {
    let Some(origin) = headers.get(ORIGIN) else { return false };
    let origin = origin.to_str().unwrap_or("null");
    let site = origin.split_once("://").map_or(origin, |(_, site)| site);
    headers.get(HOST).and_then(|host| host.to_str().ok()) != Some(site)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_keys_open() {
        let keys = Keys::new(&["one".to_owned(), "two".to_owned()]);
        assert!(keys.admit(b"one") && keys.admit(b"two"));
        assert!(["", "on", "ones", "onetwo", "One"].iter().all(|key| !keys.admit(key.as_bytes())));
    }

    #[test]
    fn a_page_of_another_site_is_foreign() {
        let headers = |pairs: &[(axum::http::HeaderName, &'static str)]| {
            pairs.iter().map(|(name, value)| (name.clone(), value.parse().expect("a value"))).collect::<HeaderMap>()
        };
        assert!(!is_foreign(&headers(&[(HOST, "localhost:8080")])));
        assert!(!is_foreign(&headers(&[(HOST, "localhost:8080"), (ORIGIN, "http://localhost:8080")])));
        assert!(is_foreign(&headers(&[(HOST, "localhost:8080"), (ORIGIN, "https://example.org")])));
        assert!(is_foreign(&headers(&[(HOST, "localhost:8080"), (ORIGIN, "null")])));
    }
}
