//! The C library as its users see it: its header, its functions over an engine of fake workers, and what a host with
//! llama.cpp contexts of its own must see.
#![allow(clippy::unwrap_used)]

#[path = "capi/fake.rs"]
mod fake;
#[path = "capi/header.rs"]
mod header;
#[path = "capi/marginal.rs"]
mod marginal;
#[cfg(feature = "llama")]
#[path = "capi/reference.rs"]
mod reference;
#[path = "capi/world.rs"]
mod world;
