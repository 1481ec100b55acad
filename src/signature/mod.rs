//! What a prompt's expert picks look like: counts, and the unit vector (signature) that routing compares.
//!
//! Never sees a model, a file or a worker.

mod counts;
mod vector;

pub use counts::ExpertCounts;
pub use vector::{Signature, dot};
