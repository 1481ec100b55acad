//! Sends llama.cpp's log lines to the `log` crate and keeps the last errors, so that a failed call can quote them.
//!
//! Never prints, except the text of a failed assert when no logger would show it, because the process dies next.

use std::{
    cell::RefCell,
    ffi::{CStr, c_char, c_void},
    io::Write,
    panic::catch_unwind,
    ptr,
};

use llama_cpp_sys_2 as sys;

const TARGET: &str = "llama.cpp";
const KEPT_ERRORS: usize = 3;

/// What the calling thread's calls have said.
#[derive(Default)]
struct Lines {
    level: Option<log::Level>,
    partial: String,
    errors: Vec<String>,
}

thread_local! {
    // llama.cpp logs on the thread that called it; a failed call therefore finds its own reason here.
    static LINES: RefCell<Lines> = RefCell::default();
}

/// Forgets this thread's errors; call it before the call whose reason is wanted.
pub(super) fn clear_errors() {
    LINES.with_borrow_mut(|lines| lines.errors.clear());
}

/// This thread's last error lines since [`clear_errors`], joined; empty when llama.cpp said nothing.
pub(super) fn take_errors() -> String {
    LINES.with_borrow_mut(|lines| {
        let text = lines.errors.join("; ");
        lines.errors.clear();
        text
    })
}

/// [`take_errors`], or words for its absence.
pub(super) fn take_reason() -> String {
    let text = take_errors();
    if text.is_empty() { "it gave no reason".to_owned() } else { text }
}

/// Takes over the process-wide logger and assert hook. Called once.
pub(super) fn install() {
    // SAFETY: `forward` matches ggml_log_callback and lives as long as the program; no user data is passed.
    unsafe { sys::llama_log_set(Some(forward), ptr::null_mut()) };
    // SAFETY: `report_abort` matches ggml_abort_callback_t and lives as long as the program.
    unsafe { sys::ggml_set_abort_callback(Some(report_abort)) };
}

// llama.cpp is chatty: what it calls info is detail here, and its warnings are mostly about settings we chose.
fn level_of(level: sys::ggml_log_level) -> Option<log::Level> {
    match level {
        sys::GGML_LOG_LEVEL_ERROR => Some(log::Level::Warn),
        sys::GGML_LOG_LEVEL_WARN => Some(log::Level::Info),
        sys::GGML_LOG_LEVEL_INFO => Some(log::Level::Debug),
        sys::GGML_LOG_LEVEL_DEBUG => Some(log::Level::Trace),
        _ => None,
    }
}

impl Lines {
    /// Adds a piece of text; `level` is `None` for the continuation of a line.
    fn push(&mut self, level: Option<log::Level>, text: &str) {
        if level.is_some() {
            self.flush();
            self.level = level;
        }
        self.partial.push_str(text);
        if self.partial.ends_with('\n') {
            self.flush();
        }
    }

    fn flush(&mut self) {
        let Some(level) = self.level else {
            self.partial.clear();
            return;
        };
        let line = self.partial.trim();
        if !line.is_empty() {
            log::log!(target: TARGET, level, "{line}");
            if level == log::Level::Warn {
                if self.errors.len() == KEPT_ERRORS {
                    self.errors.remove(0);
                }
                self.errors.push(strip_function(line).to_owned());
            }
        }
        self.partial.clear();
    }
}

/// The line without the C function's name in front of it.
fn strip_function(line: &str) -> &str {
    match line.split_once(": ") {
        Some((name, rest)) if name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') => rest.trim_start(),
        _ => line,
    }
}

unsafe extern "C" fn forward(level: sys::ggml_log_level, text: *const c_char, _user: *mut c_void) {
    if text.is_null() {
        return;
    }
    // SAFETY: ggml passes a NUL-terminated string that lives for the call.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    // A logger that panics, or one that calls llama.cpp and comes back here, loses the line and nothing else.
    let _ = catch_unwind(|| {
        let _ = LINES.try_with(|lines| {
            if let Ok(mut lines) = lines.try_borrow_mut() {
                lines.push(level_of(level), &text);
            }
        });
    });
}

unsafe extern "C" fn report_abort(text: *const c_char) {
    if text.is_null() {
        return;
    }
    // SAFETY: ggml_abort passes a NUL-terminated buffer on its stack.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let _ = catch_unwind(|| {
        let text = short_place(&text);
        if log::log_enabled!(target: TARGET, log::Level::Error) {
            // The target already names llama.cpp.
            log::error!(target: TARGET, "it stops the process at {text}");
            log::logger().flush();
        } else {
            let _ = writeln!(std::io::stderr(), "llama.cpp stops the process at {text}");
        }
    });
}

/// The text of a failed assert, `path:line: what`, with the file's name instead of its path where it was built.
fn short_place(text: &str) -> &str {
    let path = text.split(": ").next().unwrap_or_default();
    text.get(path.rfind(['/', '\\']).map_or(0, |slash| slash + 1)..).unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_kept_whole_and_in_order() {
        let mut lines = Lines::default();
        lines.push(Some(log::Level::Warn), "load_it: first ");
        lines.push(None, "half\n");
        lines.push(Some(log::Level::Debug), "detail\n");
        for i in 0..4 {
            lines.push(Some(log::Level::Warn), &format!("error {i}\n"));
        }
        assert_eq!(lines.errors, ["error 1", "error 2", "error 3"]);
        let mut lines = Lines::default();
        lines.push(Some(log::Level::Warn), "load_it: first ");
        lines.push(None, "half\n");
        assert_eq!(lines.errors, ["first half"]);
    }

    // Symptom: the text of a failed assert showed a path of the machine that built llama.cpp.
    #[test]
    fn an_assert_is_placed_by_file_name_and_line() {
        let text = "/build/x y/llama-model.cpp:1364: GGML_ASSERT(a/b: c) failed";
        assert_eq!(short_place(text), "llama-model.cpp:1364: GGML_ASSERT(a/b: c) failed");
        assert_eq!(short_place(r"C:\x\ggml.c:7: fatal error"), "ggml.c:7: fatal error");
        assert_eq!(short_place("fatal error"), "fatal error");
        assert_eq!(short_place(""), "");
    }

    #[test]
    fn only_a_function_name_is_stripped() {
        assert_eq!(strip_function("llama_init_from_model: failed: no"), "failed: no");
        assert_eq!(strip_function("two words: kept"), "two words: kept");
    }
}
