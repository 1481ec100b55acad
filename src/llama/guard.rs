//! Calls into `vendor/guard` and turns its codes into values.
//!
//! Never interprets what llama.cpp returned; callers do.

use std::ffi::{CStr, c_char};

mod bindings {
    include!(concat!(env!("OUT_DIR"), "/guard.rs"));
}

pub(super) use bindings::*;

/// An exception caught at the boundary, or a missing backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Caught {
    code: i32,
    text: String,
}

impl Caught {
    pub fn is_no_memory(&self) -> bool {
        self.code == ELDR_GUARD_NO_MEMORY.cast_signed()
    }

    pub fn is_no_backend(&self) -> bool {
        self.code == ELDR_GUARD_NO_BACKEND.cast_signed()
    }
}

impl std::fmt::Display for Caught {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "C++ exception: {}", self.text)
    }
}

/// The text of a C string.
///
/// # Safety
/// `text` points to a NUL-terminated string that lives for the call.
pub(super) unsafe fn text(text: *const c_char) -> String {
    // SAFETY: promised by the caller.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

const MESSAGE_SIZE: usize = 1024;

/// Runs one guard function, which gets a message buffer and its size.
pub(super) fn call(body: impl FnOnce(*mut c_char, usize) -> i32) -> Result<(), Caught> {
    let mut buffer: [c_char; MESSAGE_SIZE] = [0; MESSAGE_SIZE];
    let code = body(buffer.as_mut_ptr(), MESSAGE_SIZE);
    if code == ELDR_GUARD_OK.cast_signed() {
        return Ok(());
    }
    // SAFETY: the buffer starts zeroed and the guard writes with snprintf, so a NUL is inside it.
    let text = unsafe { text(buffer.as_ptr()) };
    Err(Caught { code, text })
}
