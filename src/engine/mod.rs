//! What a user of the crate runs.

#[cfg(feature = "llama")]
pub mod inflate;
