//! How a call ends: a status, and for the thread that called a sentence about it.
//!
//! Never lets a panic out.

use std::{
    any::Any,
    cell::{Cell, RefCell},
    ffi::{CString, c_char},
    fmt::Display,
    panic::{AssertUnwindSafe, catch_unwind},
};

use super::Status;
use crate::{
    engine::{CalibrationFileError, EngineError},
    route::{RouteBuildError, RouteError},
};

/// Why a call did not do what it was asked to.
#[derive(Debug)]
pub(super) struct Failure {
    status: Status,
    message: String,
}

impl Failure {
    pub(super) fn new(status: Status, message: impl Display) -> Self {
        Self { status, message: message.to_string() }
    }

    #[cfg(test)]
    pub(super) fn status(&self) -> Status {
        self.status
    }

    #[cfg(test)]
    pub(super) fn message(&self) -> &str {
        &self.message
    }
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
    static TEXT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    static IS_LOGGING: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is in the host's log callback.
pub(super) fn is_logging() -> bool {
    IS_LOGGING.try_with(Cell::get).unwrap_or(false)
}

/// Runs a call's body: its answer is the status, a failure's sentence becomes the thread's last error.
pub(super) fn guard(body: impl FnOnce() -> Result<Status, Failure>) -> Status {
    if is_logging() {
        return fail(&Failure::new(
            Status::Reentrant,
            "an eldr function was called from the log callback; note the message and call later",
        ));
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(status)) => status,
        Ok(Err(failure)) => fail(&failure),
        Err(panic) => fail(&Failure::new(
            Status::Panic,
            format!("eldr has a fault, please report it: {}", panic_text(panic.as_ref())),
        )),
    }
}

/// Like [`guard`], for a call whose only answer is that it is done.
pub(super) fn guard_done(body: impl FnOnce() -> Result<(), Failure>) -> Status {
    guard(|| body().map(|()| Status::Ok))
}

fn fail(failure: &Failure) -> Status {
    let message = c_string(failure.message.clone());
    // A thread that is ending has no last error any more.
    let _ = LAST_ERROR.try_with(|last| last.replace(message));
    failure.status
}

/// The text with its NULs, which C would stop at, as spaces.
pub(super) fn c_string(text: String) -> CString {
    CString::new(text).unwrap_or_else(|error| {
        let bytes: Vec<u8> = error.into_vec().into_iter().map(|byte| if byte == 0 { b' ' } else { byte }).collect();
        CString::new(bytes).unwrap_or_default()
    })
}

pub(super) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without words")
}

/// Keeps `text`, with a NUL behind it, for the calling thread until its next text; where it lies.
pub(super) fn lend(text: &str) -> *const c_char {
    TEXT.with_borrow_mut(|kept| {
        kept.clear();
        kept.extend_from_slice(text.as_bytes());
        kept.push(0);
        kept.as_ptr().cast()
    })
}

pub(super) fn last_error() -> *const c_char {
    LAST_ERROR.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Calls the host's log callback; what it calls of eldr meanwhile is refused.
pub(super) fn while_logging(call: impl FnOnce()) {
    if let Ok(was) = IS_LOGGING.try_with(|is| is.replace(true)) {
        call();
        let _ = IS_LOGGING.try_with(|is| is.set(was));
    }
}

/// The options of the program that the engine's errors advise, and what does the same in C; longer ones first.
const IN_C: [(&str, &str); 9] = [
    (" --calibration FILE", " and a calibration"),
    ("--calibration", "calibration"),
    ("--cache-ram", "cache_ram_mib"),
    ("--cpu-moe", "n_cpu_moe -1"),
    ("--slots", "n_slots"),
    ("--ctx", "n_ctx_slot"),
    ("--policy", "policy"),
    ("--refit", "refit"),
    ("`--workers", "`eldr calibrate --workers"),
];

/// A sentence of the engine in C's words.
fn in_c(error: &impl Display) -> String {
    IN_C.iter().fold(error.to_string(), |text, (option, field)| text.replace(option, field))
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        let status = match &error {
            EngineError::QueueFull(_) => Status::QueueFull,
            EngineError::Member(_) => Status::Argument,
            EngineError::Draining => Status::Draining,
            EngineError::Request(_) => Status::Request,
            EngineError::Calibration(_) => Status::Calibration,
            EngineError::CalibrationFile(error) => of_file(error),
            #[cfg(feature = "llama")]
            EngineError::Llama(_) => Status::Llama,
            EngineError::Config(_) | EngineError::Problems(_) => Status::Config,
            _ => Status::Run,
        };
        Self::new(status, in_c(&error))
    }
}

impl From<CalibrationFileError> for Failure {
    fn from(error: CalibrationFileError) -> Self {
        Self::new(of_file(&error), in_c(&error))
    }
}

fn of_file(error: &CalibrationFileError) -> Status {
    match error {
        CalibrationFileError::Format { .. } => Status::Calibration,
        _ => Status::File,
    }
}

impl From<RouteBuildError> for Failure {
    fn from(error: RouteBuildError) -> Self {
        Self::new(Status::Config, in_c(&error))
    }
}

impl From<RouteError> for Failure {
    fn from(error: RouteError) -> Self {
        let status = match error {
            RouteError::AllFull => Status::Full,
            _ => Status::NoWorker,
        };
        Self::new(status, error)
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn last() -> String {
        // SAFETY: the thread's last error is a terminated string until its next call.
        unsafe { CStr::from_ptr(last_error()) }.to_string_lossy().into_owned()
    }

    #[test]
    fn a_failure_and_a_panic_are_statuses_with_a_sentence() {
        assert_eq!(guard_done(|| Ok(())), Status::Ok);
        assert_eq!(guard_done(|| Err(Failure::new(Status::Null, "`out` is\0NULL"))), Status::Null);
        assert_eq!(last(), "`out` is NULL");
        assert_eq!(guard_done(|| panic!("worker {} of 2", 7)), Status::Panic);
        assert!(last().ends_with("report it: worker 7 of 2"), "{}", last());
    }

    // Symptom: C was advised to set `--ctx`, an option of the program.
    #[test]
    fn advice_names_the_fields_of_c() {
        for (said, wanted) in [
            (
                "a slot holds 8: shorten it, or raise --ctx if the model",
                "a slot holds 8: shorten it, or raise n_ctx_slot if the model",
            ),
            ("--slots 4 or --ctx 512 would fit", "n_slots 4 or n_ctx_slot 512 would fit"),
            (
                "start with --policy locality_band --calibration FILE",
                "start with policy locality_band and a calibration",
            ),
            ("calibrate with `--workers 3`", "calibrate with `eldr calibrate --workers 3`"),
        ] {
            assert_eq!(in_c(&said), wanted);
            let failure = Failure::from(EngineError::Request(said.to_owned()));
            assert_eq!((failure.status(), failure.message()), (Status::Request, wanted));
        }
    }

    #[test]
    fn a_call_from_the_log_callback_is_refused() {
        let mut inner = Status::Ok;
        while_logging(|| inner = guard_done(|| Ok(())));
        assert_eq!((inner, guard_done(|| Ok(()))), (Status::Reentrant, Status::Ok));
    }
}
