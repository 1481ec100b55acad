//! An engine of fake workers, and how a test in Rust calls the C library as C does.
#![expect(unsafe_code, reason = "the functions are C's")]

use std::{mem::MaybeUninit, ptr};

use eldr::{
    capi::{
        EngineHandle, Event, RequestHandle, RequestParams, Status, eldr_engine_submit, eldr_request_default_params,
    },
    types::Token,
};

#[path = "../support/fake_engine.rs"]
mod fake_engine;

pub use fake_engine::engine;
#[allow(unused_imports, reason = "the bench measures and does not look at tokens")]
pub use fake_engine::{Letters, MODEL};

pub const PROMPT: [Token; 4] = [5, 6, 7, 8];

/// A request of [`PROMPT`] that goes on to its last token.
pub fn params(max_tokens: u32) -> RequestParams {
    let mut params = MaybeUninit::<RequestParams>::uninit();
    // SAFETY: a place for the whole struct.
    let status = unsafe { eldr_request_default_params(params.as_mut_ptr(), size_of::<RequestParams>()) };
    assert_eq!(status, Status::Ok);
    // SAFETY: filled above.
    let params = unsafe { params.assume_init() };
    RequestParams { prompt: PROMPT.as_ptr(), n_prompt: PROMPT.len(), max_tokens, ignore_eos: 1, ..params }
}

/// Submits as C does.
pub fn submit(engine: *mut EngineHandle, params: &RequestParams) -> Result<*mut RequestHandle, Status> {
    let mut out = MaybeUninit::new(ptr::null_mut());
    // SAFETY: a whole struct, whose prompt is a constant.
    match unsafe { eldr_engine_submit(engine, params, Some(&mut out)) } {
        // SAFETY: it was made with a value.
        Status::Ok => Ok(unsafe { out.assume_init() }),
        status => Err(status),
    }
}

/// An event to be filled.
pub fn empty_event() -> Event {
    let mut event = MaybeUninit::<Event>::zeroed();
    // SAFETY: `size` is the first field.
    unsafe { event.as_mut_ptr().cast::<usize>().write(size_of::<Event>()) };
    // SAFETY: zeros are an event.
    unsafe { event.assume_init() }
}
