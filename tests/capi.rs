//! The C library as its users see it: its header, and its functions over an engine of fake workers.
#![allow(clippy::unwrap_used)]

#[path = "capi/fake.rs"]
mod fake;
#[path = "capi/header.rs"]
mod header;
#[path = "capi/marginal.rs"]
mod marginal;
#[path = "capi/world.rs"]
mod world;
