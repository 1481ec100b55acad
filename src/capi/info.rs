use std::{
    ffi::{CStr, c_char},
    mem::MaybeUninit,
};

use super::{Status, args, failure};

/// Version of the C ABI this header describes. It grows when something is added and nothing is ever taken away; a
/// program runs with a library whose eldr_abi_version() is at least the one it was compiled with.
pub const ABI_VERSION: u32 = 1;

/// The library's version of the C ABI. Never fails. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_abi_version() -> u32 {
    ABI_VERSION
}

/// The library's version, such as `0.1.0`; it lives for ever. Never fails. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Whether this library has llama.cpp in it, so that eldr_engine_open() works; without, it has the router for programs
/// that run llama.cpp themselves. Never fails. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_has_engine() -> bool {
    cfg!(feature = "llama")
}

/// What was wrong in the calling thread's last call that returned a status from 100 on: one sentence, of an engine's
/// settings one a line for each mistake; empty before the first. eldr owns it; it stays until the thread's next call that fails. Never fails. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_last_error() -> *const c_char {
    failure::last_error()
}

/// A status's name, such as `ELDR_STATUS_FULL`, or `unknown`; it lives for ever. Never fails. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_status_name(status: i32) -> *const c_char {
    NAMES.iter().find(|(known, _)| *known as i32 == status).map_or(c"unknown", |(_, name)| name).as_ptr()
}

/// Writes the names of all routing policies, separated by commas, to `names`; they live for ever. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_policy_names(names: Option<&mut MaybeUninit<*const c_char>>) -> Status {
    failure::guard_done(|| {
        let known = crate::route::PolicyKind::ALL.map(crate::route::PolicyKind::name).join(",");
        args::put(names, super::event::forever(&known).as_ptr(), "names")
    })
}

const NAMES: &[(Status, &CStr)] = &[
    (Status::Ok, c"ELDR_STATUS_OK"),
    (Status::Wait, c"ELDR_STATUS_WAIT"),
    (Status::End, c"ELDR_STATUS_END"),
    (Status::NoSignature, c"ELDR_STATUS_NO_SIGNATURE"),
    (Status::Full, c"ELDR_STATUS_FULL"),
    (Status::NoWorker, c"ELDR_STATUS_NO_WORKER"),
    (Status::Null, c"ELDR_STATUS_NULL"),
    (Status::Handle, c"ELDR_STATUS_HANDLE"),
    (Status::StructSize, c"ELDR_STATUS_STRUCT_SIZE"),
    (Status::Argument, c"ELDR_STATUS_ARGUMENT"),
    (Status::Utf8, c"ELDR_STATUS_UTF8"),
    (Status::Buffer, c"ELDR_STATUS_BUFFER"),
    (Status::Unsupported, c"ELDR_STATUS_UNSUPPORTED"),
    (Status::Reentrant, c"ELDR_STATUS_REENTRANT"),
    (Status::Panic, c"ELDR_STATUS_PANIC"),
    (Status::File, c"ELDR_STATUS_FILE"),
    (Status::Calibration, c"ELDR_STATUS_CALIBRATION"),
    (Status::Config, c"ELDR_STATUS_CONFIG"),
    (Status::Request, c"ELDR_STATUS_REQUEST"),
    (Status::QueueFull, c"ELDR_STATUS_QUEUE_FULL"),
    (Status::Draining, c"ELDR_STATUS_DRAINING"),
    (Status::Llama, c"ELDR_STATUS_LLAMA"),
    (Status::Layout, c"ELDR_STATUS_LAYOUT"),
    (Status::Tap, c"ELDR_STATUS_TAP"),
    (Status::Mismatch, c"ELDR_STATUS_MISMATCH"),
    (Status::Run, c"ELDR_STATUS_RUN"),
];
