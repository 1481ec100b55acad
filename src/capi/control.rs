use std::{ffi::c_char, mem::MaybeUninit, sync::Arc};

use super::{
    CalibrationHandle, EngineHandle, Status, args,
    calibration::OpenCalibration,
    engine::OpenEngine,
    event::forever,
    failure::{Failure, guard_done},
    handles,
};
use crate::types::WorkerId;

/// Writes the name of the policy that routes to `name`, which lives for ever, and to `note`, unless that is NULL, why it is
/// less than what was asked for, which lives for ever too: NULL where it is not. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_engine_get_policy(
    engine: *const EngineHandle,
    name: Option<&mut MaybeUninit<*const c_char>>,
    note: Option<&mut MaybeUninit<*const c_char>>,
) -> Status {
    guard_done(|| {
        let engine = &handles::get::<OpenEngine>(engine)?.0;
        args::put(name, forever(engine.policy_name()).as_ptr(), "name")?;
        if let Some(out) = note {
            let note = engine.policy_note();
            out.write(note.map_or(std::ptr::null(), |note| forever(&note).as_ptr()));
        }
        Ok(())
    })
}

/// Sends decode worker `worker` no more requests; it finishes those it has, and can be resumed. Any thread.
///
/// Errors: ELDR_STATUS_ARGUMENT for a worker that is not there or lost, and for the last one that takes requests.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_engine_drain_worker(engine: *mut EngineHandle, worker: u32) -> Status {
    guard_done(|| Ok(handles::get::<OpenEngine>(engine)?.0.drain_decode(WorkerId(worker))?))
}

/// Lets a drained decode worker take requests again. Any thread.
///
/// Errors: ELDR_STATUS_ARGUMENT for a worker that is not there or lost.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_engine_resume_worker(engine: *mut EngineHandle, worker: u32) -> Status {
    guard_done(|| Ok(handles::get::<OpenEngine>(engine)?.0.resume_decode(WorkerId(worker))?))
}

/// Routes the requests to come by another calibration of the same model and number of workers; the band keeps its width.
/// It may compare other layers, as far as the prefill workers count them: those of the calibration the engine was opened
/// with, or every layer under `marginal_cost`. Any thread; the calibration's handle may be freed afterwards.
///
/// Errors: ELDR_STATUS_CALIBRATION for one of another model or number of workers, for layers that are not counted, and
/// while centroids are refitted.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_engine_set_calibration(
    engine: *mut EngineHandle,
    calibration: *const CalibrationHandle,
) -> Status {
    guard_done(|| {
        let engine = handles::get::<OpenEngine>(engine)?;
        let calibration = handles::get::<OpenCalibration>(calibration)?.0.calibration.clone();
        Ok(engine.0.set_calibration(Arc::new(calibration))?)
    })
}

/// Copies the bytes of `token`'s text, of which several tokens may make one character, to `text`, which has room for
/// `room`; writes to `n`, unless it is NULL, how many there are. No NUL is added. Any thread.
///
/// Errors: ELDR_STATUS_ARGUMENT for a token that the vocabulary does not have, ELDR_STATUS_BUFFER for too little room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_engine_token_text(
    engine: *const EngineHandle,
    token: i32,
    text: *mut u8,
    room: usize,
    n: Option<&mut MaybeUninit<usize>>,
) -> Status {
    guard_done(|| {
        let engine = handles::get::<OpenEngine>(engine)?;
        let tokenizer = engine.0.tokenizer();
        let n_tokens = tokenizer.n_tokens();
        if u32::try_from(token).map_or(true, |token| token >= n_tokens) {
            let why = format!("token {token} is not in the vocabulary of {n_tokens} tokens; pass one that is");
            return Err(Failure::new(Status::Argument, why));
        }
        // SAFETY: the caller says that there is room for `room`.
        unsafe { args::copy_out(&tokenizer.piece(token), text, room, n) }
    })
}
