//! The C library as C sees it: its header, and its functions over an engine of fake workers.
#![allow(clippy::unwrap_used)]

#[path = "capi/header.rs"]
mod header;
