//! What becomes of the engines that are open when the process ends.
//!
//! Never frees a handle: a thread of the host may still use it.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Once,
};

use super::{engine::OpenEngine, failure, handles};

unsafe extern "C" {
    fn atexit(callback: extern "C" fn()) -> i32;
}

static ASKED: Once = Once::new();

/// Sees to it that `exit()` and the end of `main` stop the workers of open engines before they take apart what these
/// compute with.
pub(super) fn stop_engines_then() {
    ASKED.call_once(|| {
        // SAFETY: the function lives as long as the library, which takes its registrations with it when it is unloaded.
        if unsafe { atexit(stop_engines) } != 0 {
            log::warn!("open engines will not be stopped when the process ends: free them before");
        }
    });
}

extern "C" fn stop_engines() {
    // In a log callback this may be a worker's own thread, which can not wait for itself.
    if failure::is_logging() {
        return;
    }
    let stop = || handles::all::<OpenEngine>().iter().for_each(|engine| engine.0.shutdown());
    // Nobody is left to hear of a panic.
    let _ = catch_unwind(AssertUnwindSafe(stop));
}
