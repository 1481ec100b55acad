//! The C library: the whole engine, or only its router for programs that run llama.cpp themselves.
//!
//! Never calls llama.cpp, decides nothing of its own, and lets no panic and no wrong handle reach the caller as a crash.
//!
//! `eldr.h` is made from this folder; `eldr.hpp` is the C++ face of it. A handle is a number from a table, dressed as a
//! pointer: it is looked up at every call, never followed, and never given out twice. So a handle that was freed, or
//! that is of another kind, is a status, whichever thread uses it.
//!
//! The head of `eldr.h` has the conventions every function keeps, and asks of its caller.
//!
//! ```
//! # mod fake {
//! #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_engine.rs"));
//! # }
//!
//! // An engine that Rust started, with a policy or runners of its own perhaps, for the C part of a program to use and free.
//! let handle = eldr::capi::export_engine(fake::engine());
//! assert_eq!(eldr::capi::eldr_engine_free(handle), eldr::capi::Status::Ok);
//! ```
#![expect(unsafe_code, reason = "C calls it by name and passes pointers; each is read in `args`, after its check")]
#![expect(clippy::doc_markdown, reason = "the comments become those of a C header")]
#![expect(clippy::missing_safety_doc, reason = "what a caller must hold to is the same everywhere: the head of eldr.h")]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("the C library's handles are 64-bit numbers: build eldr for a 64-bit target");

mod args;
mod cache;
mod calibration;
mod callback;
mod control;
mod counts;
mod engine;
mod engine_params;
mod event;
mod exit;
mod failure;
mod handles;
mod info;
mod layout;
mod logging;
mod placement;
mod request;
mod router;
mod rows;
mod signature;
mod status;
mod stopping;
mod submit;
mod tap;
mod tap_call;

pub use cache::*;
pub use calibration::*;
pub use callback::*;
pub use control::*;
pub use counts::*;
pub use engine::*;
pub use engine_params::*;
pub use event::*;
pub use handles::*;
pub use info::*;
pub use layout::*;
pub use logging::*;
pub use placement::*;
pub use request::*;
pub use router::*;
pub use signature::*;
pub use status::Status;
pub use submit::*;
pub use tap::*;
