use std::{ffi::c_char, mem::MaybeUninit, time::Duration};

use serde_json::json;

use super::{
    EngineHandle, EngineParams, Status, args, exit,
    failure::{self, Failure, guard, guard_done},
    handles::{self, Class},
};
use crate::engine::{Engine, EngineConfig};

pub(super) struct OpenEngine(pub(super) Engine);

impl Class for OpenEngine {
    const NAME: &'static str = "eldr_engine";
    type Handle = EngineHandle;
}

/// Makes a C handle for an engine that was started in Rust, over runners or a policy of its own, say. C frees it with
/// `eldr_engine_free`.
pub fn export_engine(engine: Engine) -> *mut EngineHandle {
    exit::stop_engines_then();
    handles::insert(OpenEngine(engine))
}

/// Loads a model and starts its workers; opens the engine in `out`, which the caller frees. Takes as long as loading
/// takes. Any thread.
///
/// Errors: ELDR_STATUS_CONFIG with every mistake in the settings, one a line, a calibration that is not there among them;
/// ELDR_STATUS_CALIBRATION or ELDR_STATUS_FILE for the calibration, ELDR_STATUS_LLAMA for the model, ELDR_STATUS_UNSUPPORTED in a library without llama.cpp.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_engine_open(
    params: *const EngineParams,
    out: Option<&mut MaybeUninit<*mut EngineHandle>>,
) -> Status {
    guard_done(|| {
        let out = args::need(out, "out")?;
        // SAFETY: the caller passes a struct whose size it set.
        let params = unsafe { args::read(params, "params") }?;
        // SAFETY: the caller passes a string.
        let model = unsafe { args::text(params.model, "model") }?;
        // SAFETY: the caller passes strings or NULL.
        let config = unsafe { params.config() }?;
        out.write(export_engine(open(model, &config)?));
        Ok(())
    })
}

#[cfg(feature = "llama")]
fn open(model: &str, config: &EngineConfig) -> Result<Engine, Failure> {
    Ok(Engine::open(std::path::Path::new(model), config)?)
}

#[cfg(not(feature = "llama"))]
fn open(model: &str, _config: &EngineConfig) -> Result<Engine, Failure> {
    let why = format!("this library has no llama.cpp to run '{model}'; link the one built with it");
    Err(Failure::new(Status::Unsupported, why))
}

/// Copies the tokens of `text`, `n_text` bytes of UTF-8, as a prompt with its special tokens, to `tokens`, which has room
/// for `room`; writes to `n`, unless it is NULL, how many there are. Any thread.
///
/// Errors: ELDR_STATUS_BUFFER for too little room: `n_text` + 8 is enough for all but odd vocabularies.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_engine_tokenize(
    engine: *const EngineHandle,
    text: *const c_char,
    n_text: usize,
    tokens: *mut i32,
    room: usize,
    n: Option<&mut MaybeUninit<usize>>,
) -> Status {
    guard_done(|| {
        let engine = handles::get::<OpenEngine>(engine)?;
        // SAFETY: the caller passes `n_text` bytes.
        let bytes = unsafe { args::values(text.cast::<u8>(), n_text, "text") }?;
        let text = str::from_utf8(bytes).map_err(|error| {
            Failure::new(
                Status::Utf8,
                format!("`text` is not UTF-8 from byte {} on; encode it so", error.valid_up_to()),
            )
        })?;
        // SAFETY: the caller says that there is room for `room`.
        unsafe { args::copy_out(&engine.0.tokenize(text)?, tokens, room, n) }
    })
}

/// Writes what the engine is doing, as a JSON object, to `json`: the tokens of a slot, requests active and waiting, the
/// workers and their loads, counters, prompts' beginnings used again, and refits. eldr owns the text; it stays until the
/// thread's next call that gives out text. Never waits for a worker. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_engine_stats_json(
    engine: *const EngineHandle,
    json: Option<&mut MaybeUninit<*const c_char>>,
) -> Status {
    guard_done(|| {
        let engine = handles::get::<OpenEngine>(engine)?;
        let text = stats_text(&engine.0);
        args::put(json, failure::lend(&text), "json")
    })
}

fn stats_text(engine: &Engine) -> String {
    let stats = engine.stats();
    let view = |w: &crate::route::WorkerView| json!({ "id": w.id.0, "n_slots": w.n_slots, "n_inflight": w.n_inflight, "is_running": w.healthy });
    let workers: Vec<_> = stats.workers.iter().map(view).collect();
    json!({
        "policy": engine.policy_name(),
        "policy_note": engine.policy_note(),
        "step_time_error": stats.step_time_error,
        "n_ctx_slot": engine.n_ctx_slot(),
        "n_active": stats.n_active,
        "n_queued": stats.n_queued,
        "n_retried": stats.dispatch.n_retried,
        "n_migrated": stats.dispatch.n_migrated,
        "n_workers_lost": stats.dispatch.n_workers_lost,
        "workers": workers,
        "cache": {
            "n_prompt_tokens": stats.cache.n_prompt_tokens,
            "n_cached_tokens": stats.cache.n_cached_tokens,
            "n_block_hits": stats.cache.n_block_hits,
            "n_block_misses": stats.cache.n_block_misses,
        },
        "refit": stats.refit.as_ref().map(|refit| serde_json::to_value(refit).unwrap_or_default()),
    })
    .to_string()
}

/// Takes no more requests and waits up to `timeout_ms` milliseconds until those there are have ended. Any thread; other
/// threads go on reading theirs.
///
/// ELDR_STATUS_WAIT if some have not ended: call again, or free the engine, which cancels them.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_engine_drain(engine: *mut EngineHandle, timeout_ms: u32) -> Status {
    guard(|| {
        let is_idle = handles::get::<OpenEngine>(engine)?.0.drain(Duration::from_millis(timeout_ms.into()));
        Ok(if is_idle { Status::Ok } else { Status::Wait })
    })
}

/// Cancels what the engine is doing, stops its workers and frees the handle; NULL is let pass. Requests may be freed
/// before or after: their ends can still be read. Any thread, callbacks too.
///
/// exit() and the end of main() stop the workers of engines that are still open; end a process by nothing more abrupt, and
/// not while an engine is being opened.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_engine_free(engine: *mut EngineHandle) -> Status {
    guard_done(|| {
        if let Some(engine) = handles::remove::<OpenEngine>(engine)? {
            // Another thread may be in a call with it; the workers stop all the same.
            engine.0.shutdown();
        }
        Ok(())
    })
}
