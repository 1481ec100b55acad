//! eldr's log lines, given to the host.
//!
//! Never prints, and never lets the host's callback come back into eldr.

use std::{
    ffi::{c_char, c_void},
    sync::OnceLock,
};

use parking_lot::RwLock;

use super::{
    Status,
    failure::{Failure, c_string, guard_done, while_logging},
};

/// Gets one line: its level (1 error, 2 warning, 3 information, 4 detail, 5 trace) and its text, which lives for the
/// call. Called on any thread of eldr or of the host, on several at once; must call nothing of eldr.
pub type LogCallback = Option<unsafe extern "C" fn(level: i32, text: *const c_char, user: *mut c_void)>;

#[derive(Clone, Copy)]
struct Sink {
    callback: unsafe extern "C" fn(i32, *const c_char, *mut c_void),
    user: *mut c_void,
}

// SAFETY: the header asks that the callback may be called, with this pointer, on any thread.
unsafe impl Send for Sink {}
// SAFETY: as above, on several at once.
unsafe impl Sync for Sink {}

static SINK: RwLock<Option<Sink>> = RwLock::new(None);
/// Whether the process's logger is ours; asked once.
static IS_OURS: OnceLock<bool> = OnceLock::new();

struct ToHost;

impl log::Log for ToHost {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &log::Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let text = c_string(record.args().to_string());
        while_logging(|| {
            // Held while the host is called, so that eldr_log_set() returns only when the old callback is done.
            let sink = SINK.read();
            if let Some(Sink { callback, user }) = *sink {
                // SAFETY: set by the host for this, and not replaced while it runs; the text outlives the call.
                unsafe { callback(record.level() as i32, text.as_ptr(), user) };
            }
        });
    }

    fn flush(&self) {}
}

/// Gives the lines of `level` and below (1 error to 5 trace; 0 none) to `callback`, with `user`; NULL stops it. The
/// lines are eldr's and llama.cpp's, of which errors are warnings here, warnings information, and so on.
///
/// Process-wide. When it returns, no thread is in the callback set before, and its `user` may go. Any thread, but not
/// from the callback. Errors: ELDR_STATUS_ARGUMENT for another level, ELDR_STATUS_UNSUPPORTED if the process is a Rust
/// program that has a logger.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_log_set(level: i32, callback: LogCallback, user: *mut c_void) -> Status {
    guard_done(|| {
        let filter = match level {
            0 => log::LevelFilter::Off,
            1 => log::LevelFilter::Error,
            2 => log::LevelFilter::Warn,
            3 => log::LevelFilter::Info,
            4 => log::LevelFilter::Debug,
            5 => log::LevelFilter::Trace,
            _ => {
                let why = format!("log level {level} does not exist; pass 0 (none) to 5 (trace)");
                return Err(Failure::new(Status::Argument, why));
            }
        };
        if !IS_OURS.get_or_init(|| log::set_logger(&ToHost).is_ok()) {
            let why = "this process has a logger of Rust's `log` already; read eldr's lines there";
            return Err(Failure::new(Status::Unsupported, why));
        }
        *SINK.write() = callback.map(|callback| Sink { callback, user });
        log::set_max_level(if callback.is_some() { filter } else { log::LevelFilter::Off });
        Ok(())
    })
}
